; The floating point mode, which ARM has in its register FPCR.

declare void @llvm.aarch64.hint(i32)
declare i64 @llvm.aarch64.get.fpcr()
declare void @llvm.aarch64.set.fpcr(i64)
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
