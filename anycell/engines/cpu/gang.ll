; What the threads of a gang do, and how one is started; pool.py fills in what begins with a dollar.
;
; The table has a line of 64 bytes, a cache line, per thread. Line 0 is the gang's: its state is 1
; while one is at work. Each further line is a worker's: its state is 0 when it is free, 1 when it
; has a part to run, 2 when it is free and asleep, 3 when it has a part and the caller sleeps until
; that is done. A thread that finds the other asleep wakes it.
;
; Workers take over the caller's floating point mode (denormals, rounding), since the bits of a
; result must not depend on which thread computed it.

; state, mode, kernel, args, part, parts, wait, wake, -; line 0 has the number of workers as `part`
%job = type <{ i32, ptr, ptr, i64, i64 }>  ; the middle of it, without gaps
%line = type { i32, i32, ptr, ptr, i64, i64, ptr, ptr, i64 }

define internal void @await(ptr %line, i32 %now, i32 %asleep) {
entry:
  %seen = alloca i32, align 4           ; some systems want the value in memory
  br label %spin
spin:                                   ; until the state is no longer `now`
  %turn = phi i32 [ 0, %entry ], [ %next, %again ]
  %state = load atomic i32, ptr %line acquire, align 4
  %same = icmp eq i32 %state, %now
  br i1 %same, label %again, label %done
again:
  $pause
  %next = add i32 %turn, 1
  %more = icmp ult i32 %next, $spin
  br i1 %more, label %spin, label %tired
tired:                                  ; say so, unless the state changed just now
  %swap = cmpxchg ptr %line, i32 %now, i32 %asleep acq_rel acquire
  %said = extractvalue { i32, i1 } %swap, 1
  br i1 %said, label %sleep, label %done
sleep:
  %at = getelementptr %line, ptr %line, i32 0, i32 6
  %wait = load ptr, ptr %at
  $wait
  %woken = load atomic i32, ptr %line acquire, align 4
  %still = icmp eq i32 %woken, %asleep
  br i1 %still, label %sleep, label %done
done:
  ret void
}

define internal void @post(ptr %line, i32 %new, i32 %asleep) {
  %old = atomicrmw xchg ptr %line, i32 %new acq_rel
  %sleeps = icmp eq i32 %old, %asleep
  br i1 %sleeps, label %rouse, label %done
rouse:
  %at = getelementptr %line, ptr %line, i32 0, i32 7
  %wake = load ptr, ptr %at
  $wake
  br label %done
done:
  ret void
}

define internal void @run(ptr %kernel, ptr %args, i64 %part, i64 %parts, i32 %mode) {
  %own = call i32 @get_mode()
  call void @set_mode(i32 %mode)
  call void %kernel(ptr %args, i64 %part, i64 %parts)
  call void @set_mode(i32 %own)
  ret void
}

define void @worker(ptr %table) {       ; the life of a thread of our own; it never returns
entry:
  %count = getelementptr %line, ptr %table, i32 0, i32 4
  %before = atomicrmw add ptr %count, i64 1 acq_rel
  %place = add i64 %before, 1
  %line = getelementptr %line, ptr %table, i64 %place
  %job.at = getelementptr %line, ptr %line, i32 0, i32 1
  br label %life
life:
  call void @await(ptr %line, i32 0, i32 2)
  %job = load %job, ptr %job.at, align 4
  %mode = extractvalue %job %job, 0
  %kernel = extractvalue %job %job, 1
  %args = extractvalue %job %job, 2
  %part = extractvalue %job %job, 3
  %parts = extractvalue %job %job, 4
  call void @run(ptr %kernel, ptr %args, i64 %part, i64 %parts, i32 %mode)
  call void @post(ptr %line, i32 0, i32 3)
  br label %life
}

define internal void @give(ptr %table, i64 %place, ptr %kernel, ptr %args, i64 %parts, i32 %mode) {
  %line = getelementptr %line, ptr %table, i64 %place
  %job.at = getelementptr %line, ptr %line, i32 0, i32 1
  %job.1 = insertvalue %job undef, i32 %mode, 0
  %job.2 = insertvalue %job %job.1, ptr %kernel, 1
  %job.3 = insertvalue %job %job.2, ptr %args, 2
  %job.4 = insertvalue %job %job.3, i64 %place, 3
  %job.5 = insertvalue %job %job.4, i64 %parts, 4
  store %job %job.5, ptr %job.at, align 4
  call void @post(ptr %line, i32 1, i32 2)
  ret void
}

define internal i1 @take(ptr %table) {
  %swap = cmpxchg ptr %table, i32 0, i32 1 acq_rel acquire
  %mine = extractvalue { i32, i1 } %swap, 1
  ret i1 %mine
}

; Both ways run the kernel in up to `wanted` parts, and return how many there were.

define i64 @own(ptr %table, ptr %kernel, ptr %args, i64 %wanted, ptr %none) {
entry:
  %mine = call i1 @take(ptr %table)
  br i1 %mine, label %gather, label %alone
alone:                                  ; a gang is at work for another thread
  call void %kernel(ptr %args, i64 0, i64 1)
  ret i64 1
gather:
  %count = getelementptr %line, ptr %table, i32 0, i32 4
  %workers = load atomic i64, ptr %count acquire, align 8
  %all = add i64 %workers, 1
  %enough = icmp slt i64 %wanted, %all
  %parts = select i1 %enough, i64 %wanted, i64 %all
  %mode = call i32 @get_mode()
  br label %start
start:
  %s = phi i64 [ 1, %gather ], [ %s.next, %started ]
  %s.more = icmp slt i64 %s, %parts
  br i1 %s.more, label %started, label %first
started:
  call void @give(ptr %table, i64 %s, ptr %kernel, ptr %args, i64 %parts, i32 %mode)
  %s.next = add i64 %s, 1
  br label %start
first:
  call void %kernel(ptr %args, i64 0, i64 %parts)
  br label %finish
finish:
  %f = phi i64 [ 1, %first ], [ %f.next, %finished ]
  %f.more = icmp slt i64 %f, %parts
  br i1 %f.more, label %finished, label %done
finished:
  %line = getelementptr %line, ptr %table, i64 %f
  call void @await(ptr %line, i32 1, i32 3)
  %f.next = add i64 %f, 1
  br label %finish
done:
  store atomic i32 0, ptr %table release, align 4
  ret i64 %parts
}

%team = type { ptr, ptr, ptr, i64, i32 }  ; kernel, args, omp runtime, size, mode
%omp = type { ptr, ptr, ptr }             ; GOMP_parallel, omp_get_thread_num, omp_get_num_threads

define i64 @openmp(ptr %table, ptr %kernel, ptr %args, i64 %wanted, ptr %omp) {
entry:
  %team = alloca %team, align 8
  %mine = call i1 @take(ptr %table)
  br i1 %mine, label %fork, label %alone
alone:
  call void %kernel(ptr %args, i64 0, i64 1)
  ret i64 1
fork:
  %mode = call i32 @get_mode()
  %team.1 = insertvalue %team undef, ptr %kernel, 0
  %team.2 = insertvalue %team %team.1, ptr %args, 1
  %team.3 = insertvalue %team %team.2, ptr %omp, 2
  %team.4 = insertvalue %team %team.3, i64 1, 3
  %team.5 = insertvalue %team %team.4, i32 %mode, 4
  store %team %team.5, ptr %team
  %parallel = load ptr, ptr %omp
  %threads = trunc i64 %wanted to i32
  call void %parallel(ptr @member, ptr %team, i32 %threads, i32 0)
  store atomic i32 0, ptr %table release, align 4
  %size.at = getelementptr %team, ptr %team, i32 0, i32 3
  %size = load i64, ptr %size.at
  ret i64 %size
}

define internal void @member(ptr %at) { ; what each thread of an OpenMP team does
entry:
  %kernel = load ptr, ptr %at
  %args.at = getelementptr %team, ptr %at, i32 0, i32 1
  %args = load ptr, ptr %args.at
  %omp.at = getelementptr %team, ptr %at, i32 0, i32 2
  %omp = load ptr, ptr %omp.at
  %mode.at = getelementptr %team, ptr %at, i32 0, i32 4
  %mode = load i32, ptr %mode.at
  %number.at = getelementptr %omp, ptr %omp, i32 0, i32 1
  %number = load ptr, ptr %number.at
  %size.at = getelementptr %omp, ptr %omp, i32 0, i32 2
  %size = load ptr, ptr %size.at
  %part.32 = call i32 %number()
  %part = zext i32 %part.32 to i64
  %parts.32 = call i32 %size()          ; may be fewer than were asked for
  %parts = zext i32 %parts.32 to i64
  %first = icmp eq i64 %part, 0
  br i1 %first, label %report, label %work
report:
  %report.at = getelementptr %team, ptr %at, i32 0, i32 3
  store i64 %parts, ptr %report.at
  br label %work
work:
  call void @run(ptr %kernel, ptr %args, i64 %part, i64 %parts, i32 %mode)
  ret void
}
