; The floating point mode, which x86 has in its register MXCSR, and the time, which it counts in
; cycles at 2 to 4 GHz: `now` counts half of them, about nanoseconds.

declare void @llvm.x86.sse2.pause()
declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.sse.ldmxcsr(ptr)
define internal i32 @get_mode() {
  %at = alloca i32, align 4
  call void @llvm.x86.sse.stmxcsr(ptr %at)
  %mode = load i32, ptr %at
  ret i32 %mode
}
define internal void @set_mode(i32 %mode) {
  %at = alloca i32, align 4
  store i32 %mode, ptr %at
  call void @llvm.x86.sse.ldmxcsr(ptr %at)
  ret void
}

declare i64 @llvm.readcyclecounter()
define internal i64 @now() {
  %cycles = call i64 @llvm.readcyclecounter()
  %now = lshr i64 %cycles, 1
  ret i64 %now
}
