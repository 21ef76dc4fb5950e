"""The foundations of the CPU engine: instruction sets, the compiler and its cache, the threads.

Tests of layers on these foundations are in `test_layer_runtime.py`.

One file, because tests of the cache, of names and of threads share a compiled function and the
fixtures that keep it apart from the user's cache.
"""

import contextlib
import ctypes.util
import dataclasses
import importlib.util
import inspect
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import LIMIT, ROOT, at_once, python, run
from random_cells import random_cell
from tolerances import assert_close

import anycell
from anycell import Cell, cell, cells, environment, tanh
from anycell.engines.cpu import driver, image, ir, isa, jit, kernel, memory, pool, sources, threads
from anycell.engines.cpu.layout import Layout
from anycell.engines.cpu.sequence import print_kernel
from anycell.plan import DTYPES, plan

pool.PATIENCE = LIMIT  # on a busy machine, new threads may start late
pool.LOSS = 1 << 62  # and a gang may lose time

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX permissions and fork")
x86 = pytest.mark.skipif(not ir.X86, reason="about x86 instructions")


def axpy(target: ir.Target) -> str:
    """LLVM text of a kernel for `y[:n] += a * x[:n]`; its args are a, x, y, n."""
    module = ir.Module(target)
    b = module.function("axpy", "ptr args, i64 part, i64 parts")
    args = b.args[0]
    a = b.splat(b.load(args, "float"))
    x, y = (b.load(b.gep(args, k, "i64"), "ptr") for k in (1, 2))
    n = b.load(b.gep(args, 3, "i64"), "i64")
    with b.loop(0, n, step=b.lanes) as i:
        here = b.gep(y, i)
        b.store(b.fma(a, b.load(b.gep(x, i)), b.load(here)), here)
    return str(module)


_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_KERNEL = ctypes.CFUNCTYPE(None, _POINTER, _NUMBER, _NUMBER)
_GANG = ctypes.CFUNCTYPE(_NUMBER, _POINTER, _POINTER, _POINTER, _NUMBER, _POINTER)


def parallel(address: int, args: int, parts: int) -> int:
    """Runs a kernel as a gang of up to ``parts``, as the door does; returns the number of parts."""
    parts = min(parts, pool.MOST)
    if parts <= 1:
        _KERNEL(address)(args, 0, 1)
        return 1
    function, table, openmp, *_ = (ctypes.c_int64 * 5).from_address(pool.gang(parts))
    return int(_GANG(function)(table, address, args, parts, openmp))


def check_axpy(library: jit.Library) -> None:
    x, y = np.arange(64, dtype=np.float32), np.ones(64, np.float32)
    args = np.array([0, x.ctypes.data, y.ctypes.data, 64], np.int64)
    args[:1].view(np.float32)[0] = 3.0
    assert parallel(library.address("axpy"), args.ctypes.data, 1) == 1
    np.testing.assert_array_equal(y, 1 + 3 * np.arange(64))


# -- instruction sets ----------------------------------------------------------------------------
@pytest.mark.parametrize("name", isa.available())
def test_every_instruction_set_can_be_forced(name: str) -> None:
    with isa.force(name) as target:
        assert isa.current() is target is isa.TARGETS[name]
        check_axpy(jit.compile(axpy(target), ["axpy"], target))


@x86
@pytest.mark.parametrize("name", isa.available())
def test_assembly_stays_within_the_instruction_set(name: str) -> None:
    target = isa.TARGETS[name]
    code = jit.compile(axpy(target), ["axpy"], target).assembly()
    fused = re.search(r"\bvfm", code) is not None
    mine, wider = {
        "generic": ("%xmm", r"%ymm|%zmm|\bv(mov|add|mul|fm)"),
        "avx2": ("%ymm", r"%zmm|%[xyz]mm(1[6-9]|[23]\d)|%k\d"),
        "avx512": ("%zmm", "$^"),
        "avx512vnni": ("%zmm", "$^"),
        "avx512bf16": ("%zmm", "$^"),
        "amx": ("%zmm", "$^"),
    }[name]
    assert mine in code
    assert not re.search(wider, code), code
    assert fused == target.fma


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("name", ["neondot", "neonbf16"])
def test_products_of_arm(name: str, dtype: str) -> None:
    """ARM multiplies bytes in fours and bfloat16 in pairs; any machine can compile for it."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = isa.TARGETS[name]
    cpu, features, _ = isa.machine(target)
    triple = llvm.Target.from_triple("aarch64-unknown-linux-gnu")
    machine = triple.create_target_machine(cpu=cpu, features=features, opt=3, reloc="pic")
    text = str(print_kernel(Layout(plan(cells.RNN, 8, dtype, "cpu"), False, target)))
    code = machine.emit_assembly(jit.optimised(text, machine))
    used = {word for word in ("sdot", "usdot", "bfdot") if f"\t{word}\t" in code}
    products = {("neondot", "int8"): {"sdot"}, ("neonbf16", "int8"): {"usdot"}}
    products["neonbf16", "bfloat16"] = {"bfdot"}
    assert used == products.get((name, dtype), set())


@pytest.mark.parametrize("processor", ["arm", "other"])
def test_threads_of_other_processors(processor: str) -> None:
    """LLVM makes code of their text for 64-bit ARM as the JIT asks it to: without a parser of
    assembly, for whose lack it would end the process.
    """
    python(
        """
        import sys

        import llvmlite.binding as llvm

        from anycell.engines.cpu import jit, pool

        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        triple = llvm.Target.from_triple("aarch64-unknown-linux-gnu")
        machine = triple.create_target_machine(reloc="pic", codemodel="small")
        machine.emit_object(jit.optimised(pool.gang_text(sys.argv[1]), machine))
        """,
        processor,
    )


@pytest.mark.parametrize("name", isa.TARGETS)
@pytest.mark.sample(every=3)
def test_products_of_integers_without_packing(name: str) -> None:
    """Each instruction set multiplies signed bytes by what it has; any x86 compiles for all of
    them, and any machine for ARM.
    """
    import llvmlite.binding as llvm

    arm = name.startswith("neon")
    if not arm and not ir.X86:
        pytest.skip("this generic set is ARM's")
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target, triple = isa.TARGETS[name], "aarch64-unknown-linux-gnu" if arm else "x86_64-linux-gnu"
    cpu, features, _ = isa.machine(target)
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=features, opt=3, reloc="pic"
    )
    text = str(driver.module(target, DTYPES["int8"], "few"))
    code = machine.emit_assembly(jit.optimised(text, machine))
    by_name = {"avx2": "vpmaddubsw", "avx512": "vpmaddubsw", "neondot": "sdot", "neonbf16": "usdot"}
    wanted = by_name.get(name, "vpdpbusd" if target.dot else "pmaddwd")
    for function in ("one_row", "few_rows"):
        printed = code[code.index(f"\n{function}:") : code.index(f".size\t{function}")]
        assert wanted in printed
        assert ("vpmaddubsw" in printed) == (wanted == "vpmaddubsw")


@pytest.mark.parametrize("system", ["linux", "darwin"])
@pytest.mark.parametrize("missing", ["", "bf16", "i8mm", "dotprod"])
def test_features_of_arm(system: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features are read as Linux and macOS report them."""
    bits = {"neon": (16, 1), "dotprod": (16, 20), "i8mm": (26, 13), "bf16": (26, 14)}
    there = bits.keys() - {missing}

    class Libc:
        @staticmethod
        def getauxval(entry: int) -> int:
            return sum(1 << bit for name in there for at, bit in [bits[name]] if at == entry)

        @staticmethod
        def sysctlbyname(key: bytes, value: Any, size: Any, *new: Any) -> int:
            names = {"AdvSIMD": "neon", "FEAT_DotProd": "dotprod", "FEAT_I8MM": "i8mm"}
            names["FEAT_BF16"] = "bf16"
            assert size._obj.value == ctypes.sizeof(value._obj)
            value._obj.value = names[key.decode().split(".")[-1]] in there
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Libc)
    monkeypatch.setattr(sys, "platform", system)
    assert isa._arm_features() == there


@pytest.fixture
def unread() -> Iterator[None]:
    """Makes a test and the code after it read the environment again."""
    isa.current.cache_clear()
    yield
    isa.current.cache_clear()


@pytest.mark.usefixtures("unread")
def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYCELL_ISA", "avx1024")
    with pytest.raises(ValueError, match=r"ANYCELL_ISA='avx1024'.*no such.*generic"):
        isa.current()
    with pytest.raises(ValueError, match="avx2048"), isa.force("avx2048"):
        pass
    assert os.environ["ANYCELL_ISA"] == "avx1024"


@x86
@pytest.mark.usefixtures("unread")
def test_a_feature_that_the_host_hides_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = isa.machine(isa.TARGETS["avx512"]).needs - {"fma"}
    monkeypatch.setattr(isa, "_features", lambda: shown)
    seen = isa.available.__wrapped__()
    assert seen == ("generic",)
    monkeypatch.setattr(isa, "available", lambda: seen)
    monkeypatch.delenv(isa.ENV, raising=False)  # set if the whole run has a narrower set
    assert isa.current().name == "generic"
    refusal = pytest.raises(
        ValueError, match=r"'avx512': this host cannot.*available here: generic"
    )
    with refusal, isa.force("avx512"):
        pass


def test_no_machine_runs_what_another_kind_of_processor_has() -> None:
    assert isa.runs("generic") and not isa.runs("neondot" if ir.X86 else "amx")


@pytest.mark.skipif(sys.platform != "linux" or not ir.X86, reason="needs /proc/cpuinfo")
def test_linux_and_llvm_report_the_same_features() -> None:
    import llvmlite.binding as llvm

    asked = isa.machine(isa.TARGETS["amx"]).needs
    has = {name for name, on in llvm.get_host_cpu_features().items() if on}
    assert isa._features() == has & asked


def test_the_compiler_is_not_imported_before_it_is_needed() -> None:
    python(
        """
        import sys
        from anycell.engines.cpu import ir, isa, jit, pool, threads
        assert threads.current() >= 1
        assert not [name for name in sys.modules if name.startswith("llvmlite")]
        short = jit._toolchain()
        assert "llvmlite.binding" not in sys.modules
        import llvmlite
        assert llvmlite.__version__ in short and "libllvmlite" in short or "llvmlite.dll" in short
        """
    )


# -- compiling -----------------------------------------------------------------------------------
def test_a_missing_function_is_an_error_not_a_crash() -> None:
    with pytest.raises(ValueError, match="no function 'other'"):
        jit.compile(axpy(isa.current()), ["axpy", "other"], isa.current())
    declared = "declare void @other()\n" + axpy(isa.current())
    with pytest.raises(ValueError, match="no function 'other'"):
        jit.compile(declared, ["other"], isa.current())
    with pytest.raises(RuntimeError):
        jit.compile("define nonsense", [], isa.current())


def test_the_text_can_be_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = axpy(isa.current())
    assert jit.compile(text, ["axpy"], isa.current()).text == text
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("ANYCELL_DEBUG", "1")
    jit.compile(text, ["axpy"], isa.current())
    assert "@axpy" in capsys.readouterr().err


WRITTEN = """
@count = global i64 7
define i64 @f() {
  %old = atomicrmw add ptr @count, i64 1 seq_cst
  ret i64 %old
}
"""
FOREIGN = """
declare i64 @elsewhere(i64)
define i64 @f() {
  %value = call i64 @elsewhere(i64 7)
  ret i64 %value
}
"""


def test_only_code_that_stands_alone_is_loaded_without_llvm() -> None:
    target = isa.TARGETS["generic"]
    for text in (WRITTEN, FOREIGN):
        assert image.load(jit.object_code(text, ["f"], target), ["f"]) is None
    count = ctypes.CFUNCTYPE(ctypes.c_int64)(jit.compile(WRITTEN, ["f"], target).address("f"))
    assert [count(), count()] == [7, 8]


@pytest.mark.skipif(not image.SUPPORTED, reason="LLVM loads all code here")
@pytest.mark.parametrize("backward", [False, True])
def test_a_kernel_refers_to_nothing_outside_itself(backward: bool) -> None:
    """Otherwise a second process would have to load LLVM."""
    target = isa.current()
    text = str(print_kernel(Layout(plan(cells.RNN, 6, "float64", "cpu"), backward, target)))
    assert image.link(jit.object_code(text, ["door"], target)) is not None


@pytest.mark.skipif(not image.SUPPORTED, reason="LLVM loads all code here")
def test_code_is_never_writable_and_executable() -> None:
    address = build("a remark").address("axpy")
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(bound, 16) for bound in line.split()[0].split("-"))
        if begin <= address < end:
            assert line.split()[1] == "r-xp"
            return
    pytest.fail("the code is nowhere")


@pytest.mark.parametrize("refused", ["mmap", "mprotect"])
@pytest.mark.skipif(not image.SUPPORTED, reason="LLVM loads all code here")
def test_where_the_system_refuses_memory_llvm_has_a_try(
    monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    class Refusing:
        def __getattr__(self, name: str) -> object:
            if name == refused:
                return lambda *_: ctypes.c_void_p(-1).value
            return getattr(libc, name)

    libc = image._libc()
    monkeypatch.setattr(image, "_libc", Refusing)
    build("refused")


def test_threads_compile_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYCELL_CACHE_DIR", str(tmp_path / "cache"))
    target = isa.current()

    def work() -> None:
        for k in range(5):
            check_axpy(jit.compile(f"; {k}\n" + axpy(target), ["axpy"], target))

    at_once(*[work] * 6)


@posix
def test_fork_while_a_thread_compiles() -> None:
    python(
        """
        import os, threading, warnings
        from tests.engines.test_cpu_runtime import axpy, check_axpy
        from anycell.engines.cpu import isa, jit

        warnings.simplefilter("ignore")  # Python's own, about threads and fork
        target, texts = isa.current(), iter(range(10**9))
        stop = threading.Event()

        def compile_one():
            text = f"; {next(texts)} of {os.getpid()}\\n" + axpy(target)
            return jit.compile(text, ["axpy"], target)

        def work():
            while not stop.is_set():
                compile_one()

        compile_one()
        thread = threading.Thread(target=work)
        thread.start()
        try:
            for _ in range(10):
                child = os.fork()
                if not child:
                    check_axpy(compile_one())
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
        finally:
            stop.set()
            thread.join()
        """,
        ANYCELL_CACHE="0",
    )


# Ends processes while a daemon of theirs compiles. The thread that ends a process may go on.
ENDS = """
    import atexit, os, sys, threading, time, warnings
    warnings.simplefilter("ignore")
    atexit.register(lambda: compile_one())
    from anycell import cells
    from anycell.engines.cpu import isa, jit
    from anycell.engines.cpu.layout import Layout
    from anycell.engines.cpu.sequence import print_kernel
    from anycell.plan import plan

    target, number = isa.current(), int(sys.argv[1])
    text = str(print_kernel(Layout(plan(cells.RNN, 33, "float32", "cpu"), False, target)))

    def compile_one():
        jit.compile(text, ["door"], target)

    def work():
        while True:
            compile_one()

    compile_one()
    for turn in range(number):
        child = os.fork()
        if not child:
            threading.Thread(target=work, daemon=True).start()
            time.sleep(0.1 + 0.01 * turn)
            break  # the end of the program
        print(os.waitpid(child, 0)[1])
"""


@posix
@pytest.mark.parametrize("count", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_a_process_that_ends_waits_for_the_compiler(count: int) -> None:
    """Its destructors would abort the process."""
    assert python(ENDS, str(count), ANYCELL_CACHE="0").split() == ["0"] * count


@posix
def test_threads_that_wait_for_another_process_end_too(cache: Path) -> None:
    """They hold the lock that the end of the process waits for."""
    python(
        """
        import atexit, threading, time
        began = time.monotonic()
        atexit.register(lambda: print("ended after", time.monotonic() - began))
        from tests.engines.test_cpu_runtime import build
        from anycell.engines.cpu import jit

        jit.PATIENCE, asked = 1000.0, threading.Event()
        jit._locked = lambda file: asked.set()
        threading.Thread(target=build, daemon=True).start()
        asked.wait()
        """,
        quiet=True,
    )


# -- the cache -----------------------------------------------------------------------------------
@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory for this test alone, which does not exist yet."""
    monkeypatch.setenv("ANYCELL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("ANYCELL_CACHE", raising=False)
    monkeypatch.setattr(jit, "_warned", set())
    return tmp_path / "cache"


def build(remark: str = "") -> jit.Library:
    """Compiles a function, and checks that its code is right."""
    library = jit.compile(f"; {remark}\n" + axpy(isa.current()), ["axpy"], isa.current())
    check_axpy(library)
    return library


def only(directory: Path) -> Path:
    (entry,) = directory.iterdir()
    return entry


def test_another_process_loads_without_parsing(cache: Path) -> None:
    assert not build().cached
    assert build().cached
    python(
        """
        import llvmlite.binding as llvm
        from anycell.engines.cpu import image
        from tests.engines.test_cpu_runtime import build

        image.load = lambda *_: None  # as on other systems
        parse = llvm.parse_assembly
        def refuse(text, *context):
            assert not text, "a cached kernel was parsed"
            return parse(text, *context)
        llvm.parse_assembly = refuse
        assert build().cached
        """
    )


@posix
def test_the_cache_is_private(cache: Path) -> None:
    umask = os.umask(0)
    try:
        build()
    finally:
        os.umask(umask)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert stat.S_IMODE(only(cache).stat().st_mode) == 0o600


@posix
def test_an_entry_that_others_could_have_written_is_not_taken(cache: Path) -> None:
    build()
    entry = only(cache)
    entry.chmod(0o620)
    assert not build().cached
    assert stat.S_IMODE(only(cache).stat().st_mode) == 0o600
    if os.geteuid() == 0:
        os.chown(entry, 12345, -1)
        assert not build().cached
        assert entry.stat().st_uid == 0


def device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero never ends
    except PermissionError:
        pytest.skip("only root can make a device")


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server, pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)
        server.bind(path.name)  # a path of its length would be refused


# Functions that put something at a path that is not a file.
STRANGE: dict[str, Callable[[Path], object]] = {
    "a FIFO": lambda path: os.mkfifo(path),
    "a directory": lambda path: (path / "inside").mkdir(parents=True),
    "a link to an entry": lambda path: path.symlink_to(path.with_name("elsewhere")),
    "a link to nowhere": lambda path: path.symlink_to(path.with_name("nowhere")),
    "a device": device,
    "a socket": unix_socket,
}


@posix
@pytest.mark.parametrize("kind", STRANGE)
def test_what_is_no_file_is_no_entry(cache: Path, kind: str) -> None:
    """The cache neither waits for, follows nor replaces it, even under a name like our own."""
    build()
    entry = only(cache)
    code = entry.read_bytes()
    entry.rename(cache / "elsewhere")
    draft = cache / f"{'0' * 64}.{'0' * 16}"
    STRANGE[kind](entry)
    STRANGE[kind](draft)
    before = [path.lstat() for path in (entry, draft)]
    with pytest.warns(jit.CacheWarning, match="exists and is not a file") as seen:
        assert not build().cached
    assert len(seen) == 1
    assert not build().cached
    build("another")  # which scans the directory
    assert [path.lstat() for path in (entry, draft)] == before
    assert (cache / "elsewhere").read_bytes() == code
    assert len(list(cache.iterdir())) == 4


def strangers(directory: Path) -> dict[str, bytes]:
    """Creates old, large files of other programs, with names that resemble or match our own."""
    mark = b"anycell\0"
    files = {
        "thesis.tar": b"years of work",
        "b" * 64: b"a blob of a registry",
        "B" * 64: mark,
        "c" * 63: mark,
        "d" * 65: mark,
        "e" * 64 + ".tmp": mark,
        "e" * 64 + "." + "e" * 15: mark,
        "f" * 64 + "." + "f" * 16: b"not what ours begin with",
        "a" * 64: b"anycells",
        ".hidden": b"",
    }
    directory.mkdir(mode=0o700, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content + bytes(5000) if content else b"")
        os.utime(directory / name, (1, 1))
    return {name: (directory / name).read_bytes() for name in files}


def test_files_of_others_stay_and_do_not_count(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = strangers(cache)
    build("0")
    (entry,) = {path for path in cache.iterdir() if path.name not in theirs}
    size = entry.stat().st_size
    monkeypatch.setattr(jit, "LIMIT", 2 * size)
    os.utime(entry, (1, 1))
    build("1")
    assert build("0").cached, "what others keep there counted"
    assert jit.kept() == [size] * 2
    build("2")
    assert jit.kept() == [size] * 2
    assert not entry.exists(), "the oldest makes room"
    assert build("1").cached
    assert {name: (cache / name).read_bytes() for name in theirs} == theirs


def test_drafts_that_a_crash_left_are_removed(cache: Path) -> None:
    """Old drafts go, however much of them was written; drafts that may still be written stay."""
    build("0")
    entry = only(cache)
    name, content = entry.name, entry.read_bytes()
    for number, size in enumerate([0, 3, 8, 100, len(content)]):
        for age in (0, 7200):
            draft = cache / f"{name}.{age + number:016x}"
            draft.write_bytes(content[:size])
            os.utime(draft, (time.time() - age,) * 2)
    build("1")
    drafts = [path.name for path in cache.iterdir() if "." in path.name]
    assert sorted(drafts) == [f"{name}.{number:016x}" for number in range(5)]


def test_a_relative_directory_where_there_is_none(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = cache.parent / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setenv("ANYCELL_CACHE_DIR", "cache")
    gone.rmdir()
    with pytest.warns(jit.CacheWarning, match="'cache'"):
        assert not build().cached


def below_a_file(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_text("not a directory")


def directory(path: Path, mode: int) -> Path:
    path.mkdir()
    path.chmod(mode)
    return path


def given_away(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a directory away")
    os.chown(directory(path, 0o700), 12345, -1)


def read_only(path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root can write it all the same")
    directory(path, 0o500)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "a file": lambda path: path.write_text("not a directory"),
    "below a file": below_a_file,
    "a dangling link": lambda path: path.symlink_to(path.parent / "nowhere"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to one that others can write": lambda path: path.symlink_to(
        directory(path.parent / "target", 0o777)
    ),
    "of another user": given_away,
    "read-only": read_only,
    "of the group": lambda path: directory(path, 0o770),
    "of everybody": lambda path: directory(path, 0o777),
    "of others, sticky": lambda path: directory(path, 0o1703),
}


@posix
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_bad_directory_is_left_alone_with_one_warning(
    cache: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = cache.parent / "parent" / "cache"
    path.parent.mkdir()
    monkeypatch.setenv("ANYCELL_CACHE_DIR", str(path))
    HOSTILE[kind](path)
    with pytest.warns(jit.CacheWarning, match=re.escape(repr(str(path)))) as seen:
        assert not build().cached
    assert len(seen) == 1
    assert seen[0].filename == __file__, "the warning should point at the call"
    assert not build().cached  # no second warning: here warnings are errors
    if path.is_dir():
        assert not list(path.iterdir())


@posix
def test_a_warning_points_at_the_users_line(cache: Path) -> None:
    """Not into the package, nor into a framework through which the call came."""
    cache.write_text("")  # not a directory
    user, package = cache.parent / "user.py", cache.parent / "site-packages" / "framework.py"
    package.parent.mkdir()
    package.write_text("def call(layer, x):\n    return layer.forward(x)\n")
    text = "import framework, numpy as np, anycell.numpy\n" + "\n" * 7
    call = "framework.call(anycell.numpy.GRU(3, 6), np.ones((2, 1, 3)))\nraise SystemExit(3)\n"
    user.write_text(text + call)
    printed = run(str(user), paths=[package.parent], status=3)  # with what goes to standard error
    assert f"{user}:9: CacheWarning: " in printed


@posix
def test_a_link_to_a_good_directory_is_followed(cache: Path) -> None:
    real = cache.parent / "real"
    real.mkdir(0o700)
    cache.symlink_to(real)
    build()
    assert build().cached


def test_a_full_disk_costs_a_warning(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(jit.CacheWarning, match="No space left"):
        assert not build().cached
    assert not build().cached
    assert not list(cache.iterdir()), "a draft was left behind"


def test_the_cache_can_be_switched_off(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYCELL_CACHE", "0")
    assert not build().cached
    assert not build().cached
    assert not cache.exists()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANYCELL_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert jit.cache_directory() == os.path.expanduser(os.path.join("~", ".cache", "anycell"))
    monkeypatch.setenv("XDG_CACHE_HOME", os.path.abspath("x"))
    assert jit.cache_directory() == os.path.abspath(os.path.join("x", "anycell"))


def test_everything_that_changes_the_code_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    generic = isa.TARGETS["generic"]
    machines = {isa.machine(target): target for target in isa.TARGETS.values()}
    keys = [jit.name("text", ["f"], target) for target in machines.values()]
    keys += [jit.name("text ", ["f"], generic), jit.name("text", ["f", "g"], generic)]
    keys += [jit.name("text", ["f"], generic, recipe) for recipe in ("", "text", "recipe")]
    assert jit.name("other text", ["f"], generic, "recipe") == keys[-1]
    monkeypatch.setattr(jit, "FORMAT", -1)
    keys += [jit.name("text", ["f"], generic)]
    monkeypatch.setattr(jit, "_toolchain", lambda: "another LLVM")
    keys += [jit.name("text", ["f"], generic)]
    assert len(set(keys)) == len(keys)


# -- the names of kernels ------------------------------------------------------------------------
def scaled(declared: dict[str, float], used: str, constant: float = 0.5, **more: str) -> Cell:
    """Returns a small cell that declares these hyperparameters, and uses one of them."""

    def step(x, r, s, *_, **hyper):
        return tanh(hyper[used] * (x.a + r.a)) + constant * s.h

    kinds = inspect.Parameter
    names = [*"xrs", *(name for name in more if name in ("params", "static"))]
    step.__signature__ = inspect.Signature(
        [kinds(name, kinds.POSITIONAL_ONLY) for name in names]
        + [kinds(name, kinds.KEYWORD_ONLY, default=value) for name, value in declared.items()]
    )
    return cell(**{"gates": "a", "state": "h", **more})(step)


ALIKE = [
    cells.LSTM,
    cells.GRU,
    cells.RNN,
    cells.RNN(nonlinearity="relu"),
    cells.PeepholeLSTM,
    cells.PeepholeLSTM(coupled=True),
    cells.LayerNormLSTM,
    scaled({"u": 1.0}, "u"),
    scaled({"u": 1.0}, "u", 0.25),
    scaled({"u": 1.0}, "u", -0.5),
    scaled({"v": 1.0}, "v"),
    scaled({"u": 1.0, "v": 1.0}, "u"),
    scaled({"u": 1.0, "v": 1.0}, "v"),
    scaled({"v": 1.0, "u": 1.0}, "v"),
    scaled({"u": 1.0}, "u", state="h=1"),
    scaled({"u": 1.0}, "u", gates="b a"),
    scaled({"u": 1.0}, "u", gates="a b"),
    scaled({"u": 1.0}, "u", params="p=1"),
    scaled({"u": 1.0}, "u", static="e"),
]


def test_kernels_of_one_recipe_have_one_text() -> None:
    texts: dict[str, str] = {}
    several = [plan(each, 19) for each in [*ALIKE, *(random_cell(seed, 19) for seed in range(5))]]
    several += [plan(ALIKE[-1], 20), plan(ALIKE[-1], 19, "float64")]
    targets = [isa.current()] * len(several) + list(isa.TARGETS.values())
    several += [several[-1]] * len(isa.TARGETS)
    for each, target in zip(several, targets, strict=True):
        for backward in (False, True):
            layout = Layout(each, backward, target)
            name, text = kernel.request(layout)[-1], str(kernel.print_kernel(layout))
            assert name and texts.setdefault(name, text) == text
    assert len(set(texts.values())) > len(ALIKE)


def test_names_and_texts_are_the_same_in_every_process(cache: Path) -> None:
    """They do not depend on the order of sets, so later processes find all kernels."""
    code = """
        import hashlib
        from anycell import cells
        from anycell.engines.cpu import driver, isa, jit, kernel
        from anycell.engines.cpu.layout import Layout
        from anycell.plan import plan
        from random_cells import random_cell

        for cell in (cells.PeepholeLSTM, cells.LayerNormLSTM, random_cell(3, 19)):
            for backward in (False, True):
                layout = Layout(plan(cell, 19), backward, isa.current())
                name = kernel.request(layout)[-1] + str(kernel.print_kernel(layout))
                print(hashlib.sha256(name.encode()).hexdigest())
        for dtype in ("float32", "bfloat16"):
            kernel.compiled(plan(cells.RNN, 8, dtype))
            driver.compiled(dtype, isa.current())
        print(len(jit.kept()))
        """
    first, other = (python(code, PYTHONHASHSEED=seed).split() for seed in "01")
    entries = 10 if image.SUPPORTED else 4  # each kernel has three parts, which both dtypes have
    assert len({*first[:-1]}) == 6 and int(first[-1]) == entries
    assert other == first


def test_a_name_has_a_place_for_all_of_a_plan() -> None:
    """The name covers all fields of a plan, also fields that are added later."""
    made = plan(cells.RNN, 8)
    names = {field.name for field in dataclasses.fields(made)} - {"engine", "reason"}
    assert names <= set(kernel._leaves(made))
    with pytest.raises(TypeError, match="expected expressions and plain values"):
        list(kernel._leaves(dataclasses.replace(made, saved={1, 2})))


def test_hyperparameters_are_read_by_their_place() -> None:
    """Cells with the same graph may declare further hyperparameters besides the one they use."""
    x, weights = np.full((1, 1, 8), 0.5), {"weight_hh": np.zeros((8, 8))}
    for declared in ({"u": 1.0, "v": 2.0}, {"v": 2.0}, {"v": 2.0, "u": 1.0}):
        found, _ = anycell.recurrence(scaled(declared, "v"), x, weights)
        assert_close(found, np.full_like(found, np.tanh(1.0)), "float64", "forward")


def copied(tmp_path: Path) -> Path:
    package = tmp_path / "copy" / "anycell"
    shutil.copytree(ROOT / "anycell", package, ignore=shutil.ignore_patterns("__pycache__"))
    return package


def test_every_source_of_the_printers_is_in_the_name(tmp_path: Path) -> None:
    package = copied(tmp_path)
    names = sources.files(str(package))
    assert {"plan/cut.py", "lang/grad.py", "engines/cpu/sequence.py", "engines/cpu/ops.py"} <= {
        Path(name).as_posix() for name in names
    }
    digests = [sources.digest(str(package))]
    for name in names:
        with open(package / name, "a") as file:
            file.write("# edited\n")
        digests.append(sources.digest(str(package)))
    (package / "lang" / "new.py").write_text("")
    digests.append(sources.digest(str(package)))
    assert len(set(digests)) == len(names) + 2
    (package / "doctor.py").write_text("")
    assert sources.digest(str(package)) == digests[-1]


def test_an_edit_gives_kernels_another_name_from_the_next_process_on(
    cache: Path, tmp_path: Path
) -> None:
    package = copied(tmp_path)

    def cached(edit: str = "") -> bool:
        code = f"""
        import sys
        sys.path.insert(0, {str(package.parent)!r})
        from anycell import cells
        from anycell.engines.cpu import kernel, sources
        from anycell.plan import plan
        assert sources.PACKAGE == {str(package)!r}
        {edit}
        print(kernel.compiled(plan(cells.RNN, 8)).library.cached)
        """
        return python(code).strip() == "True"

    assert [cached(), cached()] == [False, True]
    # The imported code runs: it must neither use nor leave a kernel of the edited source.
    edit = f"open({str(package / 'engines/cpu/ops.py')!r}, 'a').write('# edited')"
    assert [cached(edit), cached(), cached()] == [False, False, True]


def test_without_sources_kernels_go_by_their_text(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PACKAGE", str(cache / "nowhere"))
    assert sources._stamps() is None
    assert sources.fingerprint.__wrapped__() is None
    monkeypatch.setattr(kernel, "fingerprint", lambda: None)
    layout = Layout(plan(cells.RNN, 8), False, isa.current())
    text, symbols, target, recipe = kernel.request(layout)
    assert recipe is None
    assert not jit.compile(text, symbols, target, recipe).cached
    assert jit.compile(str(text()), symbols, target).cached


@pytest.mark.skipif(not image.SUPPORTED, reason="LLVM loads all code here")
def test_what_kernels_share_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernels of other cells, in the other direction, and by products; in any process."""
    target, texts, make = isa.current(), list[str](), jit.object_code
    monkeypatch.setattr(
        jit, "object_code", lambda text, *rest: (texts.append(text), make(text, *rest))[1]
    )

    def functions(request: jit.Request) -> list[str]:
        texts.clear()
        jit.compile(*request)
        return re.findall(r"^define .*@(\w+)", "\n".join(texts), re.MULTILINE)

    lstm, peephole = (plan(cell, 12) for cell in (cells.LSTM, cells.PeepholeLSTM))
    first = functions(kernel.request(Layout(lstm, False, target)))
    blocks = {name for name in first if name.startswith("block0")}
    assert blocks and {"sequence", "door", "pack_block", "gang"} <= {*first}
    other = functions(kernel.request(Layout(peephole, False, target)))
    assert "sequence" in other and not {"pack_block", "gang", *blocks} & {*other}
    backward = functions(kernel.request(Layout(lstm, True, target)))
    assert "sequence" in backward and not {"pack_block", "gang"} & {*backward}
    matmul = functions(driver.request(lstm.types, target, "gemm"))
    assert "panel" in matmul and "pack_block" not in matmul
    assert not functions(kernel.request(Layout(lstm, False, target)))
    monkeypatch.setenv("ANYCELL_CACHE", "0")  # then nothing is shared, and one text is faster
    assert functions(kernel.request(Layout(lstm, False, target))) and len(texts) == 1


def test_parts_and_the_whole_have_the_same_functions() -> None:
    module = print_kernel(Layout(plan(cells.LSTM, 12), False, isa.current()))
    own, parts = module.parts()
    defined = re.compile(r"^define .*@(\w+)", re.MULTILINE)
    of_parts = [name for text in (own, *parts) for name in defined.findall(text)]
    assert len(parts) == 3 and sorted(of_parts) == sorted(defined.findall(str(module)))


def test_without_our_linker(tmp_path: Path) -> None:
    """LLVM loads the parts if they cannot be linked; on other systems it compiles all at once."""
    code = """
        import sys
        import numpy as np
        import anycell.numpy
        from anycell.engines.cpu import image, jit, kernel
        from anycell.engines.cpu.layout import Layout

        if sys.argv[1] != "linked":
            image.load = lambda *_: None
        if sys.argv[1] == "whole":
            image.SUPPORTED = False
        layer = anycell.numpy.LSTM(3, 12, seed=1)
        x = np.random.default_rng(0).standard_normal((5, 7, 3), "float32")
        print(layer(x)[0].tobytes().hex())
        (one,) = kernel._kernels.values()
        code = jit.stored(*kernel.request(Layout(one.plan, False, one.library.target)))
        print(len(list(image.objects(code))), jit.code_size(code) > 4000)
        """
    found = {
        way: python(code, way, ANYCELL_CACHE_DIR=str(tmp_path / way)).split()
        for way in ("linked", "loaded", "whole")
    }
    assert len({bits for bits, *_ in found.values()}) == 1
    files = "4" if image.SUPPORTED else "1"
    assert [count for _, count, _ in found.values()] == [files, files, "1"]
    assert all(large == "True" for *_, large in found.values())


def test_a_second_process_prints_nothing(cache: Path) -> None:
    code = """
        import sys
        from anycell import cells
        from anycell.engines.cpu import image, kernel
        from anycell.plan import plan

        print_kernel, printed = kernel.print_kernel, []
        kernel.print_kernel = lambda layout: printed.append(layout) or print_kernel(layout)
        library = kernel.compiled(plan(cells.LSTM, 8)).library
        if library.cached:
            assert not printed
            assert not image.SUPPORTED or "llvmlite.binding" not in sys.modules
        assert "define" in library.text  # all the same
        print(library.cached)
        """
    assert [python(code), python(code)] == ["False\n", "True\n"]


def test_drafts_of_another_process_vanish(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process renames its drafts while this one sums the sizes of all files."""
    scandir = os.scandir

    def before_the_rename(path: str) -> Any:
        draft = cache / f"{'0' * 64}.{'0' * 16}"
        draft.touch()
        found = list(scandir(path))
        draft.unlink()
        return contextlib.nullcontext(found)

    monkeypatch.setattr(os, "scandir", before_the_rename)
    assert not build().cached  # without a warning
    assert build().cached


def test_two_processes_write_the_same_entries(cache: Path) -> None:
    code = """
        import os, warnings
        from pathlib import Path
        from tests.engines.test_cpu_runtime import build

        warnings.simplefilter("error")
        for turn in range(10):
            for remark in "abc":
                build(remark)
            for entry in Path(os.environ["ANYCELL_CACHE_DIR"]).iterdir():
                if len(entry.name) == 64:  # a draft of the other process stays
                    entry.unlink(missing_ok=True)
        """
    at_once(*[lambda: python(code)] * 2)
    assert all(len(entry.name) == 64 for entry in cache.iterdir()), "a draft was left behind"
    for remark in "abc":
        build(remark)
        assert build(remark).cached


# Processes that start together: each waits for all, then compiles three functions, and reports
# those that it compiled itself.
TOGETHER = """
    import os, sys, time
    from pathlib import Path
    from tests.engines.test_cpu_runtime import build
    from anycell.engines.cpu import jit

    compiled, make, here = [], jit.object_code, Path(sys.argv[1])
    jit.object_code = lambda *a: (compiled.append(1), time.sleep(0.1), make(*a))[-1]
    (here / str(os.getpid())).touch()
    while len(list(here.iterdir())) < 4:
        time.sleep(0.001)
    for remark in "abc":
        build(remark)
    print(len(compiled))
"""


def test_processes_that_start_together_compile_once(cache: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    ready.mkdir()
    counts = at_once(*[lambda: int(python(TOGETHER, str(ready)))] * 4)
    assert sum(counts) == 3
    assert all(len(entry.name) == 64 for entry in cache.iterdir()), "a claim was left behind"


@posix
@pytest.mark.parametrize("ends", ["dies", "stays"])
def test_nobody_waits_for_ever(cache: Path, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    """The claim of a process that dies is gone; for one that lives, there is a limit."""
    entries: list[str] = []
    monkeypatch.setattr(jit, "PATIENCE", LIMIT if ends == "dies" else 0.05)
    make = jit.object_code

    def compile_beside_another(*arguments: Any) -> bytes:
        entries.extend(path.name for path in cache.iterdir())
        return make(*arguments)

    monkeypatch.setattr(jit, "object_code", compile_beside_another)
    code = """
        import os, sys, time
        from anycell.engines.cpu import jit
        cache = jit._Cache(jit.cache_directory())
        with cache.claim(sys.argv[1]):
            print("claimed", flush=True)
            sys.stdin.read()
        """
    target = isa.current()
    name = jit.name("; beside\n" + axpy(target), ["axpy"], target)
    other = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with other:
        assert other.stdout is not None and other.stdout.readline() == b"claimed\n"
        if ends == "dies":
            other.kill()
            other.wait()
        assert not build("beside").cached
        assert entries == [f"{name}.{0:016x}"]
        assert build("beside").cached
        other.kill()
    assert only(cache).name == name


@posix
def test_without_locks_everybody_compiles(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert not build().cached and build().cached
    assert len(only(cache).name) == 64


# -- how many threads ----------------------------------------------------------------------------
def test_thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_chosen", None)
    monkeypatch.setenv("OMP_NUM_THREADS", "5,2")
    monkeypatch.delenv("ANYCELL_NUM_THREADS", raising=False)
    assert threads.current() == 5
    monkeypatch.setenv("ANYCELL_NUM_THREADS", "3")
    assert threads.current() == 3
    threads.set_threads(7)
    assert threads.current() == 7
    threads.set_threads(None)
    for bad in ("0", "-1", "+1", "two", "1.5", " ", "1025", "9" * 30, "9" * 5000, "²", "٣"):
        monkeypatch.setenv("ANYCELL_NUM_THREADS", bad)
        with pytest.raises(ValueError, match=r"ANYCELL_NUM_THREADS='.*from 1 to 1024.*unset") as e:
            threads.current()
        assert repr(bad) in str(e.value)
    for number in (0, -1, 1.5, True, "2", 10**30, float("nan"), float("inf"), [1]):
        with pytest.raises(ValueError, match=re.escape(f"threads: given {number!r}; expected")):
            threads.set_threads(number)  # type: ignore[arg-type]
    for good, count in ((" 3 ", 3), ("007", 7), ("1024", 1024)):
        monkeypatch.setenv("ANYCELL_NUM_THREADS", good)
        assert threads.current() == count
    monkeypatch.delenv("ANYCELL_NUM_THREADS")
    for nonsense in ("nonsense", "9" * 30, "9" * 5000, "0", "², 3"):
        monkeypatch.setenv("OMP_NUM_THREADS", nonsense)
        assert 1 <= threads.current() <= (os.cpu_count() or 1)


def test_threads_within_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The innermost counts, also after errors, in its thread alone, before all other settings."""
    monkeypatch.setenv("ANYCELL_NUM_THREADS", "3")
    monkeypatch.setattr(threads, "_chosen", 9)
    with pytest.raises(KeyError), anycell.threads(1):
        with contextlib.suppress(ZeroDivisionError), anycell.threads(np.int64(2)):
            assert threads.current() == threads.within() == 2
            assert at_once(threads.current) == [9]
            raise ZeroDivisionError
        assert threads.current() == 1
        raise KeyError
    assert threads.current() == 9 and threads.within() is None
    for number in (0, -1, 1025, 1.5, True, "2", None):
        with pytest.raises(ValueError, match=re.escape(f"count: given {number!r}; expected a who")):
            anycell.threads(number)  # type: ignore[arg-type]


GROUPS = {
    "a container of its own": ("0::/", {"cpu.max": "150000 100000"}, 2),
    "half a CPU": ("0::/", {"cpu.max": "50000 100000"}, 1),
    "no quota": ("0::/", {"cpu.max": "max 100000"}, threads.MOST),
    "a unit of systemd": (
        "0::/system.slice/a.service",
        {"system.slice/a.service/cpu.max": "300000 100000", "system.slice/cpu.max": "max 100000"},
        3,
    ),
    "a smaller quota around it": (
        "0::/system.slice/a.service",
        {
            "system.slice/a.service/cpu.max": "300000 100000",
            "system.slice/cpu.max": "200000 100000",
        },
        2,
    ),
    "a container that sees the paths of the host": (
        "0::/docker/1a2b",
        {"cpu.max": "400000 100000"},
        4,
    ),
    "version 1": (
        "5:memory:/a\n4:cpu,cpuacct:/a\n0::/a",
        {"cpu/a/cpu.cfs_quota_us": "250000", "cpu/a/cpu.cfs_period_us": "100000\n"},
        3,
    ),
    "version 1 without a quota": (
        "4:cpuacct,cpu:/a",
        {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"},
        threads.MOST,
    ),
    "no files": ("4:cpuset:/a\n0::/a", {}, threads.MOST),
    "no control groups": (None, {}, threads.MOST),
}


@pytest.mark.parametrize("name", GROUPS)
def test_quotas_of_control_groups(tmp_path: Path, name: str) -> None:
    groups, files, expected = GROUPS[name]
    if groups is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups + "\n")
    for path, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert threads._quota.__wrapped__(tmp_path) == expected


@pytest.mark.parametrize("name", ["ANYCELL_CACHE", "ANYCELL_DEBUG"])
def test_switches_are_0_or_1(cache: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for value in ("off", "false", "no", "2", " 0", "00", "yes"):
        monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=f"{name}='{value}': expected 0 or 1.*unset"):
            build()
    assert not cache.exists()
    for value, on in (("", name == "ANYCELL_CACHE"), ("0", False), ("1", True)):
        monkeypatch.setenv(name, value)
        assert environment.switch(name, default=name == "ANYCELL_CACHE") == on
        build()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs sched_setaffinity")
def test_thread_count_follows_the_affinity() -> None:
    python(
        """
        import os
        from anycell.engines.cpu import threads
        os.environ.pop("OMP_NUM_THREADS", None)
        os.environ.pop("ANYCELL_NUM_THREADS", None)
        threads._quota = lambda: 1000
        cpus = os.sched_getaffinity(0)
        assert threads.current() == len(cpus)
        os.sched_setaffinity(0, {min(cpus)})
        assert threads.current() == 1
        """
    )


# -- gangs ---------------------------------------------------------------------------------------


def barrier() -> str:
    """LLVM text whose args are arrivals, rounds, seen, gate, tiny, yield. In each round, the parts
    wait for each other; then they wait for the gate. Each part writes ``parts`` to ``seen[part]``,
    and tiny * 0.5 to ``seen[part + 64]``.
    """
    module = ir.Module(isa.TARGETS["generic"], "double")
    b = module.function("meet", "ptr args, i64 part, i64 parts")
    args, part, parts = b.args
    rounds, seen, gate, tiny, relax = (b.gep(args, i, "i64") for i in range(1, 6))

    def wait(place: ir.Value, least: ir.Operand) -> None:
        with b.repeat() as again:
            b.call(b.load(relax, "ptr"), returns="i32")
            again(b.atomic_load(place) < least)

    with b.loop(0, b.load(rounds, "i64")) as done:
        b.atomic_add(args, 1)
        wait(args, (done + 1) * parts)
    wait(gate, 1)
    b.store(parts, b.gep(b.load(seen, "ptr"), part, "i64"))
    half = b.load(tiny, "double") * 0.5
    b.store(half, b.gep(b.load(seen, "ptr"), part + 64, "i64"))
    return str(module)


class Meeting:
    """A call of the kernel of ``barrier``, and its results."""

    def __init__(self, rounds: int = 10, gate: int = 1, tiny: float = 2e-308) -> None:
        self.seen = np.zeros(128, np.int64)
        data = [0, rounds, self.seen.ctypes.data, gate, 0, pool.yield_address()]
        self.args = np.array(data, np.int64)
        self.args[4:5].view(np.float64)[0] = tiny
        self.rounds = rounds
        self.address = jit.compile(barrier(), ["meet"], isa.TARGETS["generic"]).address("meet")

    def run(self, parts: int) -> int:
        team = parallel(self.address, self.args.ctypes.data, parts)
        assert 1 <= team <= parts
        assert self.args[0] == team * self.rounds, "a part ran twice or not at all"
        assert self.seen[:64].tolist() == [team] * team + [0] * (64 - team)
        # Compares bits: if denormals are flushed, comparing numbers would flush them, too.
        (self.half,) = set(self.seen[64 : 64 + team].tolist())
        return team


def openmp() -> str:
    """The path of an OpenMP runtime: torch's, whose library alone loads faster than torch."""
    if sys.platform != "linux":
        pytest.skip("an OpenMP runtime is only looked for on Linux")
    if (torch := importlib.util.find_spec("torch")) and torch.origin:
        package = Path(torch.origin).parent
        for path in [*package.glob("lib/libgomp*"), *package.parent.glob("torch.libs/libgomp*")]:
            return str(path)
    return ctypes.util.find_library("gomp") or pytest.skip("there is no OpenMP runtime here")


@pytest.fixture(params=["own", "openmp"])
def setup(request: pytest.FixtureRequest) -> str:
    """The first lines of a process that gets its threads in one of the ways."""
    attach = "pool.attach(None)"
    if request.param == "openmp":
        attach = f"ctypes.CDLL({openmp()!r}); pool.attach({openmp()!r})"
    return f"""
import ctypes, os, signal, sys, threading, warnings
import numpy as np
from anycell.engines.cpu import ir, isa, jit, pool
from processes import at_once
from tests.engines.test_cpu_runtime import Meeting, parallel
{attach}
assert pool.backend() == {request.param!r}, pool.backend()
"""


def case(setup: str, body: str, **env: str) -> None:
    python(setup + textwrap.dedent(body), **env)


# Tests of gangs, by name.
GANGS = {
    "all parts run at once": """
assert Meeting(rounds=30).run(2) == 2
for parts in (1, 2, 3, 5, 1, 4, 2):  # more than cores, and growing and shrinking
    for _ in range(3):
        assert Meeting(rounds=3).run(parts) == parts
for _ in range(200):
    assert Meeting(rounds=1).run(2) == 2
""",
    "threads call at once": """
teams = []

def work():
    for _ in range(50):
        teams.append(Meeting(rounds=3).run(2))

at_once(*[work] * 8)
assert len(teams) == 400 and set(teams) <= {1, 2}
assert Meeting().run(2) == 2
""",
    "a busy gang makes nobody wait": """
# While one gang stands at its gate, another call is done, alone; then the gate opens.
first = Meeting(rounds=1, gate=0)
teams = []
thread = threading.Thread(target=lambda: teams.append(first.run(2)))
thread.start()
while first.args[0] < 2: os.sched_yield()
assert Meeting().run(2) == 1
assert thread.is_alive()
first.args[3] = 1
thread.join()
assert teams == [2]
assert Meeting().run(2) == 2
""",
    "an interrupt comes during a call": """
# A shell has what runs in its background ignore the signal, and Python keeps to that.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _ in range(3):
    meeting = Meeting(rounds=1, gate=0)

    def interrupt():
        while meeting.args[0] < 2: os.sched_yield()  # both parts are inside
        os.kill(os.getpid(), signal.SIGINT)
        meeting.args[3] = 1

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        meeting.run(2)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("no interrupt came")
    thread.join()
    assert meeting.seen[:3].tolist() == [2, 2, 0], "the call was not finished"
    assert Meeting(rounds=30).run(2) == 2
""",
    "parts share the floating point mode": '''
# Flushing denormals in the caller flushes them in every part, and in nobody else's work.
code = jit.compile("""
declare void @llvm.x86.sse.ldmxcsr(ptr)
define void @mode(ptr %mode, i64 %part, i64 %parts) {
  call void @llvm.x86.sse.ldmxcsr(ptr %mode)
  ret void
}
""", ["mode"], isa.TARGETS["generic"])
usual, flush = np.array([0x1F80], np.int32), np.array([0x9FC0], np.int32)

def half():
    meeting = Meeting(tiny=2.0**-1022)
    assert meeting.run(2) == 2
    return meeting.half

assert half() == 1 << 51
parallel(code.address("mode"), flush.ctypes.data, 1)
flushed = half()
parallel(code.address("mode"), usual.ctypes.data, 1)
assert flushed == 0
assert half() == 1 << 51  # the bits of 2.0**-1023
''',
}
if os.name != "posix":
    del GANGS["an interrupt comes during a call"]
if not ir.X86:
    del GANGS["parts share the floating point mode"]


def test_gangs(setup: str) -> None:
    """Runs all of ``GANGS`` in one process; a failed test is the last name it prints."""
    case(setup, "".join(f"print({name!r}, flush=True)\n{body}" for name, body in GANGS.items()))


@posix
def test_fork_after_use(setup: str) -> None:
    case(
        setup,
        """
        warnings.simplefilter("ignore")  # Python's own, about threads and fork
        assert Meeting().run(2) == 2
        for _ in range(3):
            child = os.fork()
            if not child:
                assert pool.backend() == "own"
                assert Meeting(rounds=30).run(2) == 2
                assert Meeting(rounds=30).run(2) == 2
                grandchild = os.fork()
                if not grandchild:
                    assert Meeting(rounds=30).run(2) == 2
                    os._exit(0)
                os._exit(os.waitpid(grandchild, 0)[1])
            assert os.waitpid(child, 0)[1] == 0
            assert Meeting(rounds=30).run(2) == 2
        """,
    )


@posix
def test_fork_while_a_gang_is_at_work(setup: str) -> None:
    case(
        setup,
        """
        warnings.simplefilter("ignore")
        first = Meeting(rounds=1, gate=0)
        thread = threading.Thread(target=lambda: first.run(2))
        thread.start()
        while first.args[0] < 2: os.sched_yield()
        child = os.fork()
        if not child:
            assert Meeting(rounds=30).run(2) == 2
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        first.args[3] = 1
        thread.join()
        """,
    )


def test_idle_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks that are not in use the latest are kept, and none that is larger than all of them
    may be.
    """
    size = memory.GRAIN
    monkeypatch.setattr(memory, "_idle", [])
    monkeypatch.setattr(memory, "LIMIT", 2 * size)
    kept = [memory.empty((size,), "uint8") for _ in range(3)]
    addresses = [array.ctypes.data for array in kept]
    while kept:
        kept.pop(0)
    assert [block.ctypes.data for block in memory._idle] == addresses[1:]
    memory.empty((3 * size,), "uint8")
    assert [block.ctypes.data for block in memory._idle] == addresses[1:]
    assert memory.empty((size,), "uint8").ctypes.data == addresses[2]


@posix
def test_fork_while_a_thread_takes_memory() -> None:
    python(
        """
        import os, threading, warnings
        from anycell.engines.cpu import memory

        warnings.simplefilter("ignore")
        held, forked = threading.Event(), threading.Event()

        def hold():
            with memory._lock:
                held.set()
                forked.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        child = os.fork()
        if not child:
            memory.empty((memory.SMALL,), "float32")
            os._exit(0)
        forked.set()
        thread.join()
        assert os.waitpid(child, 0)[1] == 0
        """
    )


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and fork")
@pytest.mark.slow
def test_fork_after_torch_was_used() -> None:
    """torch's runtime hangs in the child. The child may import the engine after the fork, and then
    does not know that torch was used; or the parent imported the engine before.
    """
    pytest.importorskip("torch")
    python(
        """
        import os, sys, warnings, torch
        warnings.simplefilter("ignore")
        torch.set_num_threads(2)
        for imported in (False, True):
            if imported:
                from anycell.engines.cpu import pool
                from tests.engines.test_cpu_runtime import Meeting
                pool.attach("torch")
                assert pool.backend() == "openmp" and "torch" in pool._current().openmp.path
                assert Meeting().run(2) == 2
            (torch.ones(999, 999) @ torch.ones(999, 999)).sum()
            child = os.fork()
            if not child:
                from anycell.engines.cpu import pool
                from tests.engines.test_cpu_runtime import Meeting
                pool.attach("torch")
                assert pool.backend() == "own"
                assert Meeting(rounds=30).run(2) == 2
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        """
    )


def test_a_smaller_team_than_asked_for() -> None:
    """OpenMP grants fewer threads under a limit, as does the system if it runs out of threads."""
    python(
        """
        import threading
        from anycell.engines.cpu import pool
        from tests.engines.test_cpu_runtime import Meeting

        pool.attach(None)
        start, granted = threading.Thread.start, []
        def limited(thread):
            if len(granted) == 2:
                raise RuntimeError("can't start new thread")
            granted.append(thread)
            start(thread)
        threading.Thread.start = limited
        assert [Meeting().run(parts) for parts in (4, 8, 2)] == [3, 3, 2]
        """
    )


def test_a_smaller_openmp_team_than_asked_for() -> None:
    python(
        f"""
        import ctypes
        from anycell.engines.cpu import pool
        from tests.engines.test_cpu_runtime import Meeting

        ctypes.CDLL({openmp()!r})
        assert pool.backend() == "openmp"
        assert [Meeting().run(parts) for parts in (4, 8, 2)] == [2, 2, 2]
        """,
        OMP_THREAD_LIMIT="2",
    )


def test_the_process_ends_while_a_gang_is_at_work(setup: str) -> None:
    case(
        setup,
        """
        endless = Meeting(rounds=1, gate=0)
        thread = threading.Thread(target=lambda: endless.run(2), daemon=True)
        thread.start()
        while endless.args[0] < 2: os.sched_yield()
        """,
    )


def test_a_runtime_loaded_later_is_found() -> None:
    python(
        f"""
        import ctypes
        from anycell.engines.cpu import pool
        from tests.engines.test_cpu_runtime import Meeting

        assert pool.backend() == "own"
        assert Meeting().run(2) == 2
        ctypes.CDLL({openmp()!r})
        pool.attach("gomp")
        assert pool.backend() == "openmp" and "gomp" in pool._current().openmp.path
        assert Meeting().run(2) == 2
        pool.attach(None)
        assert pool.backend() == "own"
        assert Meeting().run(2) == 2
        """
    )
