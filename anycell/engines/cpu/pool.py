"""Threads for compiled kernels.

A kernel is `void kernel(ptr args, i64 part, i64 parts)`. The threads that run the parts of a call
are a *gang*. Nothing is queued: a call that finds a gang at work runs as one part in its own
thread. Any number of parts is correct, because a kernel divides its work by its argument `parts`;
more parts are only faster. They are slower where other processes want the cores: a gang that loses
time by waiting makes the next calls run in one part (`gang.ll`).

Two ways to get the threads:

- **openmp**: the threads of an OpenMP runtime that the process has already loaded. They spin for a
  while after each parallel region, and a second pool would compete with them for the cores. Such a
  runtime does not survive a fork, so a forked child uses its own threads.
- **own**: threads that wait in compiled code for their part: first they spin, then they sleep in
  the operating system.

Both take one native call, made without Python's lock. No signal handler of Python's runs between
starting a gang and waiting for it, so an interrupt never leaves a part waiting for a missing part.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pkgutil
import platform
import sys
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from string import Template
from typing import Any, NamedTuple

import numpy as np

from . import ir, isa, jit
from .threads import MOST as MOST

SPIN = 8000  # turns that a thread spins before it sleeps: 0.1 to 0.4 ms, as between calls of layers
PATIENCE = 1.0  # seconds that a call waits for new threads to begin before it goes on with fewer
# At a step whose units are shared, turns that a thread waits before it takes pieces that nobody has
# begun, and lets other threads have its core: about 10 us.
SPINS = 400
LOSS = 50_000  # nanoseconds of waiting, roughly, that a call never minds
REST = 250_000_000  # nanoseconds that calls run in one part at most, after one that minded


# -------------------------------------------------------------------------------------- native code

# The instruction by which a thread pauses in a spin loop, by processor.
_PAUSES = {
    "x86": "call void @llvm.x86.sse2.pause()",
    "arm": "call void @llvm.aarch64.hint(i32 1)",
    "other": "",
}

_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}


class _Sleep(NamedTuple):
    """The system's functions by which a thread sleeps until a word in memory changes, and the text
    of their calls. A thread may wake early, since it checks the word again."""

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
    return None  # then there are no threads of our own; without OpenMP, a call is one part


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _compiled(sleep: _Sleep | None) -> jit.Library:
    processor = "x86" if ir.X86 else "arm" if ir.ARM else "other"
    text = gang_text(processor, *(sleep.waiting, sleep.waking) if sleep else ())
    return jit.compile(text, ["worker", "own", "openmp", "meet"], isa.TARGETS["generic"])


def gang_text(processor: str, waiting: str = "", waking: str = "") -> str:
    """The LLVM text of a gang for a processor, with the calls by which its threads sleep."""
    return Template(_file("gang.ll") + _file(f"gang_{processor}.ll")).substitute(
        pause=_PAUSES[processor], spin=SPIN, spins=SPINS, rest=REST, wait=waiting, wake=waking
    )


def _file(name: str) -> str:
    """The text of a file in this directory, which may be in a zip archive."""
    text = pkgutil.get_data(__package__, name)
    assert text is not None  # loaders of files and of archives support `get_data`
    return text.decode()


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
    except OSError:  # not Linux: our own threads are used
        return None
    names = ("libgomp", "libiomp5", "libomp")
    runtimes = (path for path in mapped if os.path.basename(path).startswith(names))
    for path in sorted(runtimes, key=lambda path: (near not in path, path)):
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


# Whether this process was forked and has not started another program since. Then an OpenMP runtime
# hangs here if the parent has used it, which cannot be found out.
FORKED = _forked()


def _in_child() -> None:
    global FORKED
    FORKED = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


# -------------------------------------------------------------------------------------------- gangs


class _Workers:
    """Threads of our own, of one process.

    Attributes:
        threads: the threads that were started, and those that the system refused to start.
        address: the address of their record.
    """

    def __init__(self) -> None:
        self.pid, self._sleep = os.getpid(), _sleep()
        self._library = _compiled(self._sleep)
        self._work = self._library.function("worker")
        self.threads: list[threading.Thread] = []
        lines = np.zeros((MOST + 1) * 8 + 7, np.int64)
        self._lines = lines[-lines.ctypes.data // 8 % 8 :][: (MOST + 1) * 8].reshape(-1, 8)
        self._lines[0, 5] = LOSS
        if self._sleep:
            self._lines[1:, 5:7] = self._sleep.wait, self._sleep.wake
        self._table = self._lines.ctypes.data
        # Workers read the table until the process ends, which is after the interpreter's end.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(lines))
        self._record = self.record("own", 0)
        self.address = ctypes.addressof(self._record)

    def record(self, function: str, runtime: int) -> Any:
        """The five addresses that ``gang`` describes."""
        run, meet = map(self._library.address, (function, "meet"))
        return (ctypes.c_int64 * 5)(run, self._table, runtime, yield_address(), meet)

    def hire(self, count: int) -> None:
        """Starts workers until there are ``count`` or the system refuses to start one."""
        if count > len(self.threads) and self._sleep:
            with jit.lock:  # no fork happens in between
                with contextlib.suppress(RuntimeError):  # the system starts no more threads
                    while len(self.threads) < count:
                        # Daemons, because they never end; once started, they hold no Python lock.
                        thread = threading.Thread(
                            target=self._work, args=(self._table,), name="anycell", daemon=True
                        )
                        self.threads.append(thread)
                        thread.start()
                started = sum(thread.ident is not None for thread in self.threads)
                until = time.monotonic() + PATIENCE
                while self._lines[0, 3] < started and time.monotonic() < until:
                    time.sleep(1e-5)


class _Gangs(NamedTuple):
    """The threads of a process: an OpenMP runtime's, with their record, or else the workers."""

    workers: _Workers
    openmp: _OpenMP | None
    record: Any


_near: str | None = ""
_gangs: _Gangs | None = None
CHANGED: list[Callable[[], None]] = []  # called where ``attach`` made addresses invalid


def _around(workers: _Workers) -> _Gangs:
    openmp = _find_openmp(_near)
    record = openmp and workers.record("openmp", ctypes.addressof(openmp.table))
    return _Gangs(workers, openmp, record)


def _current() -> _Gangs:
    global _gangs
    if _gangs is None or _gangs.workers.pid != os.getpid():  # a forked child has its own
        with jit.lock:
            if _gangs is None or _gangs.workers.pid != os.getpid():
                _gangs = _around(_Workers())
    return _gangs


def attach(near: str | None) -> None:
    """Looks for an OpenMP runtime again, preferring a runtime whose path contains `near`.

    A frontend calls `attach("torch")` once its framework is loaded. None disables OpenMP.
    """
    global _near, _gangs
    _near = near
    if _gangs is not None:
        _gangs = _around(_gangs.workers)
    for forget in CHANGED:
        forget()


def backend() -> str:
    """The owner of the next gang's threads: "openmp" or "own"."""
    return "own" if _current().openmp is None else "openmp"


@lru_cache(maxsize=1)
def yield_address() -> int:
    """The address of `i32 f()` that lets another thread have this core.

    If there are more parts than free cores, a part that only spins keeps the others from arriving
    for a whole time slice of the scheduler.
    """
    if sys.platform == "win32":
        return _address(ctypes.CDLL("kernel32").SwitchToThread)
    return _address(ctypes.CDLL(None).sched_yield)


def gang(parts: int) -> int:
    """The address of the record that native code needs to run a gang; 0 for one part. The record
    has five addresses: a function, its first and its fifth argument, ``yield_address``, and
    ``meet``, by which the parts of a step wait for each other (``gang.ll``).

    The function is ``i64 f(ptr, ptr kernel, ptr args, i64 parts, ptr)``. It returns the number of
    parts that ran, when all are done. The record's address is valid until the process forks or
    ``attach`` is called.
    """
    if parts <= 1:
        return 0
    gangs = _gangs
    if gangs is None or gangs.workers.pid != os.getpid():  # usually saves a call
        gangs = _current()
    if gangs.openmp is not None:
        return ctypes.addressof(gangs.record)
    return _hired(gangs.workers, parts)


def own_gang(parts: int) -> int:
    """Like ``gang``, with threads of our own; the address is valid until the process forks."""
    return 0 if parts <= 1 else _hired(_current().workers, parts)


def _hired(workers: _Workers, parts: int) -> int:
    count = min(parts, MOST) - 1
    if count > len(workers.threads):  # usually saves a call
        workers.hire(count)
    return workers.address
