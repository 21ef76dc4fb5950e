"""Runs a compiled kernel on several threads at once.

A kernel is `void kernel(ptr args, i64 part, i64 parts)`, and its parts may wait for each other at
a barrier. So all parts of a call, a *gang*, run at the same time: nothing is queued, and a call
that finds a gang at work runs as one part in its own thread. Any number of parts is right, as a
kernel divides its work by the `parts` that it is given; more of them are only faster.

>>> pool.parallel(code.address("lstm_forward"), args.ctypes.data, pool.threads())
2

Two ways to get the threads:

- **openmp**: where an OpenMP runtime is already in the process, its threads. They spin for a while
  after each parallel region, and a second pool would fight them for the cores. Such a runtime does
  not survive a fork, so a forked child takes the other way.
- **own**: threads that wait in compiled code for their part, spinning first, then asleep in the
  kernel.

Both are one native call, made without Python's lock: no signal can come between starting a gang and
waiting for it, so an interrupt never leaves a part waiting for another that was not started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import threading
import time
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from anycell import environment

from . import ir, isa, jit

SPIN = 8000  # turns a thread spins before it sleeps: 0.1 to 0.4 ms, a layer's way to the next call
MOST = 1024  # threads of a gang
PATIENCE = 1.0  # seconds that a call waits for new threads to begin, before it goes on with fewer

_chosen: int | None = None


# ----------------------------------------------------------------------------------------- how many


def threads() -> int:
    """How many parts a call should have, unless the frontend knows better.

    What `set_threads` said, else `ANYCELL_NUM_THREADS`, else `OMP_NUM_THREADS`, else the CPUs that
    this process may use, all looked at anew each time.

    Raises:
        ValueError: for an `ANYCELL_NUM_THREADS` that is no whole number from 1 to `MOST`.
    """
    if _chosen is not None:
        return _chosen
    if count := _said(*map(os.environ.get, ("ANYCELL_NUM_THREADS", "OMP_NUM_THREADS"))):
        return count
    if hasattr(os, "sched_getaffinity"):
        return max(1, min(len(os.sched_getaffinity(0)), _quota()))
    return os.cpu_count() or 1


@lru_cache(maxsize=64)
def _said(ours: str | None, openmps: str | None) -> int | None:
    """What the two variables say, by their texts."""
    if count := environment.whole_number("ANYCELL_NUM_THREADS", MOST):
        return count
    # OpenMP allows a list, one number per nesting level, and ignores what it cannot read.
    return environment.number((openmps or "").split(",")[0], MOST)


def set_threads(count: int | None) -> None:
    """Fix what `threads()` says; None goes back to the environment and the machine.

    Raises:
        ValueError: for what is no whole number from 1 to `MOST`.
    """
    global _chosen
    whole = isinstance(count, (int, np.integer)) and not isinstance(count, bool)
    if count is not None and not (whole and 1 <= count <= MOST):
        raise ValueError(
            f"threads: given {count!r}; expected a whole number from 1 to {MOST}, or None."
        )
    _chosen = None if count is None else int(count)


@lru_cache(maxsize=1)
def _quota() -> int:
    """CPUs that the container's quota is worth: threads beyond it only stop each other."""
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        return -(-int(quota) // int(period))
    except (OSError, ValueError):  # no such file, or "max"
        return MOST


# -------------------------------------------------------------------------------------- native code

# The table has a line of 64 bytes, a cache line, per thread. Line 0 is the gang's: its state is 1
# while one is at work. Each further line is a worker's: its state is 0 when it is free, 1 when it
# has a part to run, 2 when it is free and asleep, 3 when it has a part and the caller sleeps until
# that is done. Whoever finds the other asleep wakes it.
#
# Workers take over the caller's floating point mode (denormals, rounding), since the bits of a
# result must not depend on which thread computed it.
_TEXT = """
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
  PAUSE
  %next = add i32 %turn, 1
  %more = icmp ult i32 %next, SPIN
  br i1 %more, label %spin, label %tired
tired:                                  ; say so, unless the state changed just now
  %swap = cmpxchg ptr %line, i32 %now, i32 %asleep acq_rel acquire
  %said = extractvalue { i32, i1 } %swap, 1
  br i1 %said, label %sleep, label %done
sleep:
  %at = getelementptr %line, ptr %line, i32 0, i32 6
  %wait = load ptr, ptr %at
  WAIT
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
  WAKE
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
"""

# Yield the core for a moment; read and set the floating point mode. Elsewhere: nothing.
_PROCESSOR = {
    "x86": (
        "call void @llvm.x86.sse2.pause()",
        """
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
""",
    ),
    "arm": (
        "call void @llvm.aarch64.hint(i32 1)",
        """
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
""",
    ),
    "": (
        "",
        """
define internal i32 @get_mode() {
  ret i32 0
}
define internal void @set_mode(i32 %mode) {
  ret void
}
""",
    ),
}

_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}


class _Sleep(NamedTuple):
    """How this system lets a thread sleep until a word in memory changes: two functions, and the
    calls of them. Nothing is lost when a sleeper wakes early, since it looks again."""

    wait: int
    wake: int
    waiting: str
    waking: str


def _sleep() -> _Sleep | None:
    system, processor = sys.platform, platform.machine().lower()
    try:
        if system == "linux" and processor in _FUTEX:
            call = _address(ctypes.CDLL(None).syscall)
            futex = f"call i64 (i64, ...) %{{}}(i64 {_FUTEX[processor]}, ptr %line, "
            return _Sleep(
                call,
                call,
                futex.format("wait") + "i32 128, i32 %asleep, ptr null)",  # FUTEX_WAIT_PRIVATE
                futex.format("wake") + "i32 129, i32 1)",  # FUTEX_WAKE_PRIVATE
            )
        if system == "darwin":
            library = ctypes.CDLL(None)
            return _Sleep(
                _address(library.__ulock_wait),
                _address(library.__ulock_wake),
                "%value = zext i32 %asleep to i64\n"
                "  call i32 %wait(i32 1, ptr %line, i64 %value, i32 0)",  # UL_COMPARE_AND_WAIT
                "call i32 %wake(i32 1, ptr %line, i64 0)",
            )
        if system == "win32":
            library = ctypes.CDLL("api-ms-win-core-synch-l1-2-0")
            return _Sleep(
                _address(library.WaitOnAddress),
                _address(library.WakeByAddressSingle),
                "store i32 %asleep, ptr %seen\n"
                "  call i32 %wait(ptr %line, ptr %seen, i64 4, i32 -1)",
                "call void %wake(ptr %line)",
            )
    except (OSError, AttributeError):
        pass
    return None  # then there are no threads of our own, and every call is one part


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _compiled(sleep: _Sleep | None) -> jit.Library:
    pause, mode = _PROCESSOR["x86" if ir.X86 else "arm" if isa.ARM else ""]
    text = _TEXT
    for word, code in (
        ("PAUSE", pause),
        ("SPIN", str(SPIN)),
        ("WAIT", sleep.waiting if sleep else ""),
        ("WAKE", sleep.waking if sleep else ""),
    ):
        text = text.replace(word, code)
    return jit.compile(text + mode, ["worker", "own", "openmp"], isa.TARGETS["generic"])


# ------------------------------------------------------------------------------------ OpenMP, found


class _OpenMP(NamedTuple):
    path: str
    table: Any  # the addresses that the compiled code calls


def _find_openmp(near: str | None) -> _OpenMP | None:
    """The OpenMP runtime that this process has loaded, preferably one with `near` in its path."""
    if near is None or FORKED:
        return None
    try:
        with open("/proc/self/maps") as file:
            mapped = {line.split(maxsplit=5)[5].strip() for line in file if "omp" in line}
    except OSError:  # not Linux: the threads of our own do
        return None
    names = ("libgomp", "libiomp5", "libomp")
    found = (path for path in mapped if os.path.basename(path).startswith(names))
    for path in sorted(found, key=lambda path: (near not in path, path)):
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            functions = (
                library.GOMP_parallel,
                library.omp_get_thread_num,
                library.omp_get_num_threads,
            )
        except (OSError, AttributeError):
            continue
        return _OpenMP(path, (ctypes.c_int64 * 3)(*map(_address, functions)))
    return None


def _forked() -> bool:
    """Whether this process was forked, before this import, and has not started another program."""
    try:
        with open("/proc/self/stat") as file:
            flags = int(file.read().rpartition(")")[2].split()[6])
    except (OSError, ValueError, IndexError):
        return False
    return bool(flags & 0x40)  # PF_FORKNOEXEC


# Whether this process was forked and has not started another program since. Then a runtime that was
# used in the parent hangs here, and there is no telling if it was.
FORKED = _forked()


def _in_child() -> None:
    global FORKED
    FORKED = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


# -------------------------------------------------------------------------------------------- gangs


class _Gangs:
    """The threads of one process: a forked child has another one."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        sleep = _sleep()
        library = _compiled(sleep)
        self._library = library
        worker = library.address("worker")
        self._worker = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(worker)
        self._asked = 0 if sleep else MOST  # for workers
        self._started = 0
        lines = np.zeros((MOST + 1) * 8 + 7, np.int64)
        self._lines = lines[-lines.ctypes.data // 8 % 8 :][: (MOST + 1) * 8].reshape(-1, 8)
        if sleep:
            self._lines[:, 5:7] = sleep.wait, sleep.wake
        self._table = self._lines.ctypes.data
        # Workers read the table until the process ends, and so after the interpreter has.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(lines))
        self._of_own = self._record(library.address("own"), 0)
        self.use(_find_openmp(_near))

    def use(self, openmp: _OpenMP | None) -> None:
        """Takes the threads of a runtime, or None of them."""
        self.openmp, self._of_openmp = openmp, None
        if openmp is not None:
            runtime = ctypes.addressof(openmp.table)
            self._of_openmp = self._record(self._library.address("openmp"), runtime)

    def _record(self, function: int, openmp: int) -> Any:
        return (ctypes.c_int64 * 4)(function, self._table, openmp, yield_address())

    def record(self, parts: int) -> int:
        if self._of_openmp is not None:
            return ctypes.addressof(self._of_openmp)
        if parts - 1 > self._asked:
            self._hire(parts - 1)
        return ctypes.addressof(self._of_own)

    def _hire(self, count: int) -> None:
        """Start workers until there are `count`; as many as the system grants is good, too."""
        with jit.lock:  # no fork sees this half done
            with contextlib.suppress(RuntimeError):  # no more threads to be had
                while self._asked < count:
                    self._asked += 1
                    # Daemons, for they never end; they hold no lock of Python's after this.
                    threading.Thread(
                        target=self._worker, args=(self._table,), name="anycell", daemon=True
                    ).start()
                    self._started += 1
            until = time.monotonic() + PATIENCE
            while self._lines[0, 3] < self._started and time.monotonic() < until:
                time.sleep(1e-5)


_near: str | None = ""
_gangs: _Gangs | None = None


def _current() -> _Gangs:
    global _gangs
    if _gangs is None or _gangs.pid != os.getpid():
        with jit.lock:
            if _gangs is None or _gangs.pid != os.getpid():
                _gangs = _Gangs()
    return _gangs


def attach(near: str | None) -> None:
    """Look for an OpenMP runtime anew, preferring one whose path contains `near`.

    For a frontend, once its framework is loaded: `attach("torch")`. With None none is used.
    """
    global _near
    _near = near
    if _gangs is not None:
        _gangs.use(_find_openmp(near))


def backend() -> str:
    """Whose threads the next gang will have: "openmp" or "own"."""
    return "own" if _current().openmp is None else "openmp"


@lru_cache(maxsize=1)
def yield_address() -> int:
    """The address of `i32 f()` that lets another thread have this core.

    For barriers inside kernels: where there are more parts than free cores, one that only spins
    keeps the others from arriving for a whole time slice of the scheduler.
    """
    if sys.platform == "win32":
        return _address(ctypes.CDLL("kernel32").SwitchToThread)
    return _address(ctypes.CDLL(None).sched_yield)


def gang(parts: int) -> int:
    """The address of what native code needs to run a gang of so many parts: of four addresses, the
    function, its first and its fifth argument, and ``yield_address``. 0 for one part.

    The function is ``i64 f(ptr, ptr kernel, ptr args, i64 parts, ptr)``. It returns how many parts
    there were, when all are done. The address holds until the process forks, or ``attach`` is
    called.
    """
    return _current().record(min(parts, MOST)) if parts > 1 else 0


_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_KERNEL = ctypes.CFUNCTYPE(None, _POINTER, _NUMBER, _NUMBER)
_GANG = ctypes.CFUNCTYPE(_NUMBER, _POINTER, _POINTER, _POINTER, _NUMBER, _POINTER)


def parallel(address: int, args: int, parts: int) -> int:
    """Run the kernel at `address` as a gang of up to `parts`, and return how many there were.

    Fewer than asked for where a gang is at work for another thread (then there is one part), or the
    system grants no more threads. Returns when all parts have.
    """
    parts = min(parts, MOST)
    if parts <= 1:
        _KERNEL(address)(args, 0, 1)
        return 1
    function, table, openmp, _ = (ctypes.c_int64 * 4).from_address(gang(parts))
    return int(_GANG(function)(table, address, args, parts, openmp))
