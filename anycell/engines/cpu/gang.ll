; What the threads of a gang do, and how one is started; pool.py fills in what begins with a dollar.
;
; The table has a line of 64 bytes, a cache line, per thread. Line 0 is the gang's: its state is 1
; while one is at work. Each further line is a worker's: its state is 0 when it is free, 1 when it
; is offered a part, 2 when it is free and asleep, 3 when it runs a part and the caller sleeps until
; that is done, 4 when it runs a part. A thread that finds the other asleep wakes it.
;
; Where other processes want the cores, a thread may stand still for a whole time slice. So nobody
; waits for what has not begun: the caller takes back parts that no worker has begun, and in a step
; whose units are shared, a thread takes the pieces that the others have not begun. The time is lost
; that a thread waits for a piece at work, and that passes from the end of the first part to the end
; of the last. If a gang loses more than two thirds of its time, and more than `patience`, calls run
; in their own thread alone for twice the time that was lost, and twice as long each time that the
; next gangs soon lose time again: what waiting costs is bounded, and a core that is free again is
; soon used again.
;
; Workers take over the caller's floating point mode (denormals, rounding), since the bits of a
; result must not depend on which thread computed it.

; state, mode, kernel, args, part, parts, wait, wake, when its last part ended
%job = type <{ i32, ptr, ptr, i64, i64 }>  ; the middle of it, without gaps
%line = type { i32, i32, ptr, ptr, i64, i64, ptr, ptr, i64 }
; Line 0: state; whether its workers leave; when it began; the time lost; the number of workers;
; when calls may take several threads again; patience; for how long they might not, the last time;
; -. Times are as `now` counts them.
%gang = type { i32, i32, i64, i64, i64, i64, i64, i64, i64 }

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
  %count = getelementptr %gang, ptr %table, i32 0, i32 4
  %before = atomicrmw add ptr %count, i64 1 acq_rel
  %place = add i64 %before, 1
  %line = getelementptr %line, ptr %table, i64 %place
  %job.at = getelementptr %line, ptr %line, i32 0, i32 1
  br label %life
life:
  call void @await(ptr %line, i32 0, i32 2)
  %begins = call i1 @turn(ptr %line, i32 1, i32 4)
  br i1 %begins, label %work, label %life  ; not if the caller took the part back
work:
  %job = load %job, ptr %job.at, align 4
  %mode = extractvalue %job %job, 0
  %kernel = extractvalue %job %job, 1
  %args = extractvalue %job %job, 2
  %part = extractvalue %job %job, 3
  %parts = extractvalue %job %job, 4
  call void @run(ptr %kernel, ptr %args, i64 %part, i64 %parts, i32 %mode)
  %ended.at = getelementptr %line, ptr %line, i32 0, i32 8
  %ended = call i64 @now()
  store i64 %ended, ptr %ended.at
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

define internal i1 @turn(ptr %line, i32 %old, i32 %new) {
  %swap = cmpxchg ptr %line, i32 %old, i32 %new acq_rel acquire
  %turned = extractvalue { i32, i1 } %swap, 1
  ret i1 %turned
}

define internal i1 @begin(ptr %table) { ; whether a gang begins: none is at work, or had bad luck
entry:
  %until.at = getelementptr %gang, ptr %table, i32 0, i32 5
  %until = load atomic i64, ptr %until.at monotonic, align 8
  %now = call i64 @now()
  %left = sub i64 %until, %now
  %rests = icmp sgt i64 %left, 0
  %near = icmp sle i64 %left, $rest     ; a clock may begin anew, as after a machine slept
  %soon = and i1 %rests, %near
  br i1 %soon, label %no, label %take
take:
  %mine = call i1 @turn(ptr %table, i32 0, i32 1)
  br i1 %mine, label %yes, label %no
yes:
  %leave.at = getelementptr %gang, ptr %table, i32 0, i32 1
  %begun.at = getelementptr %gang, ptr %table, i32 0, i32 2
  %lost.at = getelementptr %gang, ptr %table, i32 0, i32 3
  store atomic i32 0, ptr %leave.at monotonic, align 4
  store atomic i64 %now, ptr %begun.at monotonic, align 8
  store atomic i64 0, ptr %lost.at monotonic, align 8
  ret i1 1
no:
  ret i1 0
}

; Adds the time since `since` to the time lost. Tells the workers to leave if that is too much.
define internal void @lose(ptr %table, i64 %since) {
entry:
  %begun.at = getelementptr %gang, ptr %table, i32 0, i32 2
  %begun = load atomic i64, ptr %begun.at monotonic, align 8
  %lost.at = getelementptr %gang, ptr %table, i32 0, i32 3
  %patience.at = getelementptr %gang, ptr %table, i32 0, i32 6
  %patience = load i64, ptr %patience.at
  %now = call i64 @now()
  %time = sub i64 %now, %since
  %before = atomicrmw add ptr %lost.at, i64 %time monotonic
  %lost = add i64 %before, %time
  %long = icmp sgt i64 %lost, %patience
  %all = sub i64 %now, %begun
  %thrice = mul i64 %lost, 3
  %twice = shl i64 %all, 1
  %most = icmp sgt i64 %thrice, %twice
  %bad = and i1 %long, %most
  br i1 %bad, label %leave, label %done
leave:
  %leave.at = getelementptr %gang, ptr %table, i32 0, i32 1
  store atomic i32 1, ptr %leave.at monotonic, align 4
  br label %done
done:
  ret void
}

define internal void @end(ptr %table) {
entry:
  %leave.at = getelementptr %gang, ptr %table, i32 0, i32 1
  %leave = load atomic i32, ptr %leave.at monotonic, align 4
  %bad = icmp ne i32 %leave, 0
  br i1 %bad, label %rest, label %done
rest:
  %begun.at = getelementptr %gang, ptr %table, i32 0, i32 2
  %lost.at = getelementptr %gang, ptr %table, i32 0, i32 3
  %until.at = getelementptr %gang, ptr %table, i32 0, i32 5
  %rest.at = getelementptr %gang, ptr %table, i32 0, i32 7
  %begun = load atomic i64, ptr %begun.at monotonic, align 8
  %lost = load atomic i64, ptr %lost.at monotonic, align 8
  %old = load atomic i64, ptr %until.at monotonic, align 8
  %last = load i64, ptr %rest.at
  %since = sub i64 %begun, %old         ; the last rest
  %again = icmp slt i64 %since, %last
  %rested = select i1 %again, i64 %last, i64 0
  %worse = icmp sgt i64 %rested, %lost
  %most = select i1 %worse, i64 %rested, i64 %lost
  %twice = shl i64 %most, 1
  %longer = icmp sgt i64 %twice, $rest
  %length = select i1 %longer, i64 $rest, i64 %twice
  %now = call i64 @now()
  %until = add i64 %now, %length
  store i64 %length, ptr %rest.at
  store atomic i64 %until, ptr %until.at monotonic, align 8
  br label %done
done:
  store atomic i32 0, ptr %table release, align 4
  ret void
}

; A thread that has done its piece of a step waits until all pieces are done, and returns -1. It
; returns the number of a piece that nobody has begun, for this thread to take, or -2 if it is to
; leave its gang. `done` counts the pieces of all steps. A piece has a line, `stride` bytes after that
; of the piece before: the number of the step in which the piece is begun next; and the step of which
; the piece's thread waits for no pieces that have not begun, because it took one in the step before.
define i64 @meet(ptr %record, ptr %done, ptr %words, i64 %stride, i64 %step, i64 %part, i64 %parts) {
entry:
  %table.at = getelementptr ptr, ptr %record, i64 1
  %table = load ptr, ptr %table.at
  %yield.at = getelementptr ptr, ptr %record, i64 3
  %yield = load ptr, ptr %yield.at
  %leave.at = getelementptr %gang, ptr %table, i32 0, i32 1
  %worker = icmp ne i64 %part, 0
  %next = add i64 %step, 1
  %all = mul i64 %next, %parts
  %own.offset = mul i64 %part, %stride
  %own.at = getelementptr i8, ptr %words, i64 %own.offset
  %hasty.at = getelementptr i64, ptr %own.at, i64 1
  %hasty.step = load i64, ptr %hasty.at
  %hasty = icmp eq i64 %hasty.step, %step
  %turns = select i1 %hasty, i64 0, i64 $spins
  br label %spin
spin:
  %turn = phi i64 [ 0, %entry ], [ %turn.next, %again ], [ %turn.next, %relax ]
  %since = phi i64 [ 0, %entry ], [ %since, %again ], [ %since.next, %relax ]
  %count = load atomic i64, ptr %done acquire, align 8
  %over = icmp sge i64 %count, %all
  br i1 %over, label %passed, label %wait
wait:
  $pause
  %turn.next = add i64 %turn, 1
  %leave = load atomic i32, ptr %leave.at monotonic, align 4
  %alone = icmp ne i32 %leave, 0
  %leaves = and i1 %alone, %worker
  br i1 %leaves, label %left, label %stay
stay:                                   ; once the others have left, there is no sense in waiting
  %early = icmp ult i64 %turn, %turns
  %patient = xor i1 %alone, 1
  %waits = and i1 %early, %patient
  br i1 %waits, label %again, label %look
again:
  br label %spin
relax:                                  ; all are begun, and there may be more threads than cores
  %first = icmp eq i64 %since, 0
  %now = call i64 @now()
  %since.next = select i1 %first, i64 %now, i64 %since
  call i32 %yield()
  br label %spin
look:
  %piece = phi i64 [ 0, %stay ], [ %piece.next, %begun ]
  %more = icmp slt i64 %piece, %parts
  br i1 %more, label %ask, label %relax
ask:
  %offset = mul i64 %piece, %stride
  %word.at = getelementptr i8, ptr %words, i64 %offset
  %word = load atomic i64, ptr %word.at monotonic, align 8
  %free = icmp eq i64 %word, %step
  br i1 %free, label %taken, label %begun
begun:
  %piece.next = add i64 %piece, 1
  br label %look
taken:
  store i64 %next, ptr %hasty.at
  ret i64 %piece
left:
  ret i64 -2
passed:
  %waited = icmp ne i64 %since, 0
  br i1 %waited, label %late, label %met
late:
  call void @lose(ptr %table, i64 %since)
  br label %met
met:
  ret i64 -1
}

; Both ways run the kernel in up to `wanted` parts, and return how many there were.

define i64 @own(ptr %table, ptr %kernel, ptr %args, i64 %wanted, ptr %none) {
entry:
  %mine = call i1 @begin(ptr %table)
  br i1 %mine, label %gather, label %alone
alone:
  call void %kernel(ptr %args, i64 0, i64 1)
  ret i64 1
gather:
  %count = getelementptr %gang, ptr %table, i32 0, i32 4
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
  br label %back
back:                                   ; takes back what has not begun, and runs it
  %b = phi i64 [ 1, %first ], [ %b.next, %kept ], [ %b.next, %taken ]
  %b.more = icmp slt i64 %b, %parts
  br i1 %b.more, label %offered, label %ran
offered:
  %b.next = add i64 %b, 1
  %b.line = getelementptr %line, ptr %table, i64 %b
  %idle = call i1 @turn(ptr %b.line, i32 1, i32 0)
  br i1 %idle, label %taken, label %kept
taken:
  call void %kernel(ptr %args, i64 %b, i64 %parts)
  br label %back
kept:
  br label %back
ran:
  %begun.at = getelementptr %gang, ptr %table, i32 0, i32 2
  %begun = load atomic i64, ptr %begun.at monotonic, align 8
  %mine.ended = call i64 @now()
  br label %finish
finish:
  %f = phi i64 [ 1, %ran ], [ %f.next, %finished ]
  %first.ended = phi i64 [ %mine.ended, %ran ], [ %sooner, %finished ]
  %f.more = icmp slt i64 %f, %parts
  br i1 %f.more, label %finished, label %done
finished:
  %line = getelementptr %line, ptr %table, i64 %f
  call void @await(ptr %line, i32 4, i32 3)
  %ended.at = getelementptr %line, ptr %line, i32 0, i32 8
  %ended = load i64, ptr %ended.at
  %worked = icmp sgt i64 %ended, %begun  ; it did not, if its part was taken back
  %before = icmp slt i64 %ended, %first.ended
  %sooner.ended = and i1 %worked, %before
  %sooner = select i1 %sooner.ended, i64 %ended, i64 %first.ended
  %f.next = add i64 %f, 1
  br label %finish
done:
  call void @lose(ptr %table, i64 %first.ended)
  call void @end(ptr %table)
  ret i64 %parts
}

; kernel, args, omp runtime, size, mode, when the first part ended
%team = type { ptr, ptr, ptr, i64, i32, i64 }
%omp = type { ptr, ptr, ptr }             ; GOMP_parallel, omp_get_thread_num, omp_get_num_threads

define i64 @openmp(ptr %table, ptr %kernel, ptr %args, i64 %wanted, ptr %omp) {
entry:
  %team = alloca %team, align 8
  %mine = call i1 @begin(ptr %table)
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
  %team.6 = insertvalue %team %team.5, i64 9223372036854775807, 5
  store %team %team.6, ptr %team
  %parallel = load ptr, ptr %omp
  %threads = trunc i64 %wanted to i32
  call void %parallel(ptr @member, ptr %team, i32 %threads, i32 0)
  %ended.at = getelementptr %team, ptr %team, i32 0, i32 5
  %ended = load atomic i64, ptr %ended.at monotonic, align 8
  call void @lose(ptr %table, i64 %ended)
  call void @end(ptr %table)
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
  call void @run(ptr %kernel, ptr %args, i64 %part, i64 %parts, i32 %mode)
  %ended.at = getelementptr %team, ptr %at, i32 0, i32 5
  %ended = call i64 @now()
  %before = atomicrmw min ptr %ended.at, i64 %ended monotonic
  %first = icmp eq i64 %part, 0
  br i1 %first, label %report, label %done
report:
  %report.at = getelementptr %team, ptr %at, i32 0, i32 3
  store i64 %parts, ptr %report.at
  br label %done
done:
  ret void
}
