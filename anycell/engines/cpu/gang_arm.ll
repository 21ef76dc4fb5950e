; The floating point mode, which ARM has in its register FPCR, and the time in nanoseconds, which it
; counts at a frequency of 1 MHz to 1 GHz.

declare void @llvm.aarch64.hint(i32)
declare i64 @llvm.aarch64.get.fpcr()
declare void @llvm.aarch64.set.fpcr(i64)
declare i64 @llvm.read_volatile_register.i64(metadata)  ; inline assembly would need a parser
define internal i32 @get_mode() {
  %all = call i64 @llvm.aarch64.get.fpcr()
  %mode = trunc i64 %all to i32
  ret i32 %mode
}
define internal void @set_mode(i32 %mode) {
  %all = zext i32 %mode to i64
  call void @llvm.aarch64.set.fpcr(i64 %all)
  ret void
}

define internal i64 @now() {
  %count = call i64 @llvm.read_volatile_register.i64(metadata !{!"cntvct_el0"})
  %frequency = call i64 @llvm.read_volatile_register.i64(metadata !{!"cntfrq_el0"})
  %mega = udiv i64 %frequency, 1000000
  %none = icmp eq i64 %mega, 0
  %per = select i1 %none, i64 1, i64 %mega
  %thousands = mul i64 %count, 1000
  %now = udiv i64 %thousands, %per
  ret i64 %now
}
