"""The vector instruction sets that kernels are printed for, and LLVM's names for them.

A `Target` says what a kernel's text looks like (vector width, registers); `machine(target)` says
what LLVM may do with that text (CPU name and feature string). The host's CPU *name* is never
trusted, since virtual machines hide features that it promises: only the reported features count.

>>> isa.current().name              # the last of `isa.available()`
'amx'
>>> with isa.force("avx2") as t:    # or ANYCELL_ISA=avx2 in the environment
...     t.bits
256
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from .ir import ARM, X86, Target

ENV = "ANYCELL_ISA"


class Machine(NamedTuple):
    """The arguments of LLVM's target machine, and the features that a host must have."""

    cpu: str
    features: str
    needs: frozenset[str]


# The levels v3 and v4 of the x86-64 psABI. Every core with one feature of a level has all of them,
# unless a hypervisor hides some; the level is then not available.
_V3 = "cx16 sahf popcnt sse3 ssse3 sse4.1 sse4.2 avx avx2 bmi bmi2 f16c fma lzcnt movbe"
_V4 = f"{_V3} avx512f avx512bw avx512cd avx512dq avx512vl"
_VNNI = f"{_V4} avx512vnni"  # adds products of 8-bit integers
_BF16 = f"{_VNNI} avx512bf16"  # adds products of bfloat16
_AMX = f"{_BF16} amx-tile amx-int8 amx-bf16"

TARGETS: dict[str, Target] = {}  # narrowest first
_MACHINES: dict[str, Machine] = {}


def _add(target: Target, cpu: str, needs: str, *tuning: str) -> None:
    features = [*(f"+{feature}" for feature in needs.split()), *tuning]
    _MACHINES[target.name] = Machine(cpu, ",".join(features), frozenset(needs.split()))
    TARGETS[target.name] = target


# Every machine can run this set: SSE2 on x86-64, NEON on ARM; elsewhere LLVM legalises vectors of
# 128 bits.
_generic = Target("generic", bits=128, registers=32 if ARM else 16, fma=ARM, half=ARM)
_add(_generic, "x86-64" if X86 else "generic", "neon" if ARM else "")
if X86:
    _add(Target("avx2", bits=256, registers=16, fma=True, half=True), "x86-64-v3", _V3)
    _avx512 = Target("avx512", bits=512, registers=32, fma=True, half=True, masks=True)
    _vnni = replace(_avx512, name="avx512vnni", dot="llvm.x86.avx512.vpdpbusd.512")
    _pairs = "llvm.x86.avx512bf16.dpbf16ps.512"
    for _target, _needs in (
        (_avx512, _V4),
        (_vnni, _VNNI),
        (replace(_vnni, name="avx512bf16", pairs=_pairs, bfloat=True), _BF16),
        (replace(_vnni, name="amx", tiles="amx", bfloat=True), _AMX),
        (replace(_vnni, name="amx-emulated", tiles="emulated"), _VNNI),
    ):
        # LLVM splits 512-bit vectors in two on the older cores unless it is told not to.
        _add(_target, "x86-64-v4", _needs, "-prefer-256-bit")
_dot = Target(
    "neondot", bits=128, registers=32, fma=True, half=True, x86=False,
    dot="llvm.aarch64.neon.sdot.v4i32.v16i8",
)  # fmt: skip
_bf16 = replace(
    _dot, name="neonbf16", dot="llvm.aarch64.neon.usdot.v4i32.v16i8",
    pairs="llvm.aarch64.neon.bfdot.v4f32.v8bf16", bfloat=True,
)  # fmt: skip
_add(_dot, "generic", "neon dotprod")
_add(_bf16, "generic", "neon dotprod i8mm bf16")
# Used only on request: the emulation, for tests; and products of bfloat16 in pairs, unless AMD made
# the processor. They take twice as long as products of float32 on Intel's, half as long on AMD's.
ASKED_FOR = ("amx-emulated", "avx512bf16") if X86 else ()


def machine(target: Target) -> Machine:
    """The LLVM CPU name and feature string of `target`."""
    return _MACHINES[target.name]


@lru_cache(maxsize=1)
def available() -> tuple[str, ...]:
    """The names of the sets that this host can run, narrowest first, without those in ``ASKED_FOR``
    that do not pay here. Asks Linux for permission to use tiles, if the host has them.
    """
    paying = {"avx512bf16"} if amd() else set()
    known = [name for name in TARGETS if name not in {*ASKED_FOR} - paying and runs(name)]
    return tuple(name for name in known if TARGETS[name].tiles != "amx" or permitted())


def runs(name: str) -> bool:
    """Whether this host has all features of an instruction set, even one of another processor."""
    return name == "generic" or (name in _MACHINES and _MACHINES[name].needs <= _features())


_SYSCALL, _ASK, _TILE_DATA = 158, 0x1023, 18  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)


@lru_cache(maxsize=1)
def permitted() -> bool:
    """Asks Linux to let this process and its forks use tiles; returns whether Linux does."""
    try:
        return ctypes.CDLL(None).syscall(_SYSCALL, _ASK, _TILE_DATA) == 0
    except (OSError, AttributeError):  # not Linux
        return False


# Linux's names for features, by LLVM's names, where the two differ.
_LINUX = {
    "sahf": "lahf_lm", "sse3": "pni", "sse4.1": "sse4_1", "sse4.2": "sse4_2", "bmi": "bmi1",
    "lzcnt": "abm", "avx512vnni": "avx512_vnni", "avx512bf16": "avx512_bf16",
    "amx-tile": "amx_tile", "amx-int8": "amx_int8", "amx-bf16": "amx_bf16",
}  # fmt: skip
# ARM features: LLVM's name; the entry of Linux's auxiliary vector, and the bit in it; macOS's name.
_ARM = [
    ("neon", 16, 1, "AdvSIMD"),
    ("dotprod", 16, 20, "arm.FEAT_DotProd"),
    ("i8mm", 26, 13, "arm.FEAT_I8MM"),
    ("bf16", 26, 14, "arm.FEAT_BF16"),
]


def _arm_features() -> set[str]:
    """The features in ``_ARM`` that this host reports."""
    libc, names = ctypes.CDLL(None), set()
    for name, entry, bit, apple in _ARM:
        if sys.platform == "linux":
            on = libc.getauxval(entry) >> bit & 1  # as an int, which has these bits
        else:
            value, size = ctypes.c_int(), ctypes.c_size_t(4)
            key = f"hw.optional.{apple}".encode()
            libc.sysctlbyname(key, ctypes.byref(value), ctypes.byref(size), None, 0)
            on = value.value
        if on:
            names.add(name)
    return names


def _features() -> set[str]:
    """The features that this host reports, by LLVM's names."""
    if ARM and sys.platform in ("linux", "darwin"):
        return _arm_features()
    # /proc/cpuinfo is as reliable as LLVM, and LLVM need not be imported to read it.
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("flags"):
                flags = set(line.split())
                return {name for name in _AMX.split() if _LINUX.get(name, name) in flags}
    import llvmlite.binding as llvm

    try:
        return {name for name, on in llvm.get_host_cpu_features().items() if on}
    except RuntimeError:  # LLVM cannot tell on this host
        return set()


@lru_cache(maxsize=1)
def amd() -> bool:
    """Whether AMD made this processor."""
    try:
        with open("/proc/cpuinfo") as file:
            return any("AuthenticAMD" in line for line in file if line.startswith("vendor_id"))
    except OSError:  # not Linux; on Windows the maker is part of this name
        return "AuthenticAMD" in platform.processor()


@lru_cache(maxsize=1)  # every pass of every layer calls this
def current() -> Target:
    """The target to print for: `ANYCELL_ISA` if it is set, else the last of `available()`. The
    variable is read once; `force` changes it later.
    """
    name = os.environ.get(ENV) or available()[-1]
    if name not in available() and not (name in ASKED_FOR and runs(name)):
        fault = "this host cannot run it" if name in TARGETS else "there is no such instruction set"
        if name == "amx" and runs(name):
            fault = "Linux does not let this process use tiles"
        raise ValueError(f"{ENV}={name!r}: {fault}; available here: {', '.join(available())}")
    return TARGETS[name]


@contextlib.contextmanager
def force(name: str) -> Iterator[Target]:
    """Within the block `current()` is `name`, in this process and in those it starts."""
    before = os.environ.get(ENV)
    os.environ[ENV] = name
    current.cache_clear()
    try:
        yield current()
    finally:
        if before is None:
            del os.environ[ENV]
        else:
            os.environ[ENV] = before
        current.cache_clear()
