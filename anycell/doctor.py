"""``python -m anycell doctor``: what is here, what is used, and whether it works."""

from __future__ import annotations

import os
import platform
import stat
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import util
from typing import TYPE_CHECKING, Literal

import numpy as np

from anycell.machine import busy_cores, cpu_name, revision, usable_cores, version

if TYPE_CHECKING:
    from anycell.engines.cpu.ir import Target

Verdict = Literal["ok", "note", "bad"]
Finding = tuple[Verdict, str]
MARKS: dict[Verdict, str] = {"ok": "  ", "note": "! ", "bad": "X "}

OPTIONAL = "torch tensorflow keras jax flax equinox triton onnx onnxruntime matplotlib rich".split()
LIMIT = 1e-6  # relative error of a forward pass in float32


def main() -> int:
    """Prints all findings; returns 1 if something does not work, else 0."""
    worst: list[Verdict] = []
    for title, check in CHECKS:
        try:
            findings = list(check())
        except Exception as error:  # the other checks still help
            findings = [("bad", f"{type(error).__name__}: {error}")]
        for number, (verdict, text) in enumerate(findings):
            worst.append(verdict)
            print(f"{MARKS[verdict]}{title if number == 0 else '':<12} {text}")
    if "bad" in worst:
        print("\nSomething is wrong: see the lines with X.")
        return 1
    print("\nAll is well." if "note" not in worst else "\nIt works; the lines with ! may matter.")
    return 0


def _versions() -> Iterator[Finding]:
    import llvmlite.binding as llvm

    import anycell

    checkout = f", revision {commit}" if (commit := revision()) else ""
    compiler = ".".join(map(str, llvm.llvm_version_info))
    yield "ok", f"anycell {anycell.__version__}{checkout}, in {os.path.dirname(anycell.__file__)}"
    yield "ok", f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    yield "ok", platform.platform()
    yield "ok", f"numpy {np.__version__}, llvmlite {version('llvmlite')} (LLVM {compiler})"


def _frameworks() -> Iterator[Finding]:
    """Frameworks, from metadata: importing TensorFlow takes seconds, and may itself be broken."""
    installed = [name for name in OPTIONAL if util.find_spec(name) is not None]
    versions = [version(name, f"{name}-cpu", f"{name}-gpu") for name in installed]
    shown = [f"{n} {v or '(version unknown)'}" for n, v in zip(installed, versions, strict=True)]
    yield "ok", ", ".join(shown) or "none"
    missing = [name for name in OPTIONAL if name not in installed]
    if missing:
        yield "ok", f"not installed, and not needed: {', '.join(missing)}"


def _cpu() -> Iterator[Finding]:
    from anycell.engines.cpu import isa

    yield "ok", cpu_name()
    available, chosen = isa.available(), isa.current().name
    forced = f", as {isa.ENV} says" if isa.ENV in os.environ else ""
    yield "ok", f"kernels for {chosen}{forced}; this machine runs {', '.join(available)}"
    yield "ok", _multiplied(isa.current())
    if isa.runs("amx") and "amx" not in available:
        yield "note", "this machine has AMX, but Linux does not let this process use it"
    if chosen == "generic" and platform.machine() in ("x86_64", "AMD64"):
        yield "note", "without AVX2 kernels are several times slower"


def _multiplied(target: Target) -> str:
    """Says in one line how kernels multiply numbers of each dtype."""
    bytes_, bfloat = "8 bits after widening", "bfloat16 after widening"
    if target.dot:
        bytes_ = "8 bits in fours"
    if target.pairs:
        bfloat = "bfloat16 in pairs"
    if target.tiles:
        bytes_, bfloat = "8 bits by matrix tiles", "bfloat16 by matrix tiles"
    lanes = target.lanes("float")
    return f"{lanes} numbers of float32 at once; {bfloat}, float16 after widening; {bytes_}"


def _products() -> Iterator[Finding]:
    from anycell.layer.products import NUMPY, rule

    yield "ok", f"NumPy and Keras: {NUMPY}"
    yield "ok", f"PyTorch: {rule().why}"


def _threads() -> Iterator[Finding]:
    from anycell.engines.cpu import pool, threads

    count, cores = threads.current(), usable_cores()
    backend = {
        "openmp": "those of the OpenMP runtime in this process",
        "own": "our own (a framework brings an OpenMP runtime when it is imported)",
    }[pool.backend()]
    most = f"a call takes at most {count} on {cores} cores, and one if it has little work"
    yield "ok" if count <= cores else "note", f"{most}; {backend}"
    yield "ok", "PyTorch layers take at most torch.get_num_threads() instead"
    busy = busy_cores(ASLEEP)
    if busy is not None:
        others = f"other work keeps {busy:.1f} of {cores} cores busy now"
        if count == 1 or count <= cores - busy + SPARE:
            yield "ok", others
        else:
            yielding = "calls that lose time by waiting run in one thread for a while"
            advice = f"ANYCELL_NUM_THREADS={max(1, round(cores - busy))} does not try others"
            yield "note", f"{others}: {yielding}; {advice}"


ASLEEP = 0.3  # seconds of the measurement of other work
SPARE = 0.3  # cores' worth of other work that does not matter


def _speed() -> Iterator[Finding]:
    """Measures large products, ours and the libraries', and memory, in some two seconds."""
    from anycell.engines.cpu import threads

    count = threads.current()
    near = _rate(_ours("float32", ROWS // 20, 1), ROWS // 20)
    yield "ok", f"a core multiplies {near:.0f} GFLOP/s of float32 where all is near"
    calls = {"ours": _ours("float32", ROWS, count), "numpy's": _numpys()}
    if util.find_spec("torch") is not None:
        calls["torch's"] = _torchs()
    if util.find_spec("ml_dtypes") is not None:
        calls["ours of bfloat16"] = _ours("bfloat16", ROWS, count)
    rates = ", ".join(f"{name} {_rate(call, ROWS):.0f}" for name, call in calls.items())
    yield "ok", f"large products, {count} {'thread' if count == 1 else 'threads'}: {rates}"
    source, copy = np.ones((2, 1 << 24), np.float32)
    seconds = min(_seconds(lambda: np.copyto(copy, source)) for _ in range(5))
    yield "ok", f"a thread copies {2 * source.nbytes / seconds / 1e9:.1f} GB/s in memory"


ROWS, COLUMNS, INNER = 1920, 1024, 512  # sizes of the products that are timed
SHAPES = (ROWS, INNER), (INNER, COLUMNS), (ROWS, COLUMNS)


def _ours(dtype: str, rows: int, threads: int) -> Callable[[], object]:
    from anycell.layer.products import multiply
    from anycell.numpy.framework import Numpy

    host = Numpy.of(dtype)
    a, b = host.zeros((rows, INNER)), host.zeros((INNER, COLUMNS))
    out = np.empty((rows, COLUMNS), np.float32)
    return lambda: multiply(host, dtype, a, b, out, False, threads)


def _numpys() -> Callable[[], object]:
    a, b, out = (np.zeros(shape, np.float32) for shape in SHAPES)
    return lambda: np.matmul(a, b, out=out)


def _torchs() -> Callable[[], object]:
    from anycell.torch.framework import Torch

    a, b, out = map(Torch.of("float32").zeros, SHAPES)
    return lambda: out.addmm_(a, b, beta=0)


def _rate(call: Callable[[], object], rows: int) -> float:
    """Measures the GFLOP/s of a product with this many rows."""
    call()
    return 2e-9 * rows * COLUMNS * INNER / min(_seconds(call) for _ in range(9))


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _environment() -> Iterator[Finding]:
    names = sorted(name for name in os.environ if name.startswith("ANYCELL_"))
    yield "ok", ", ".join(f"{name}={os.environ[name]}" for name in names) or "no ANYCELL_..."


def _cache() -> Iterator[Finding]:
    from anycell.engines.cpu import isa, jit

    if not jit.enabled():
        yield "note", "switched off by ANYCELL_CACHE=0: every process compiles its kernels"
        return
    path = jit.cache_directory()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # A function that is not in the cache: the first call must write it, the second find it.
        text = f"define i64 @probe() {{\n  ret i64 {time.time_ns()}\n}}\n"
        first, again = (jit.compile(text, ["probe"], isa.current()) for _ in range(2))
    yield from (("note", str(warning.message)) for warning in caught)
    if caught:
        return
    sizes = jit.kept()
    mode = stat.S_IMODE(os.stat(path).st_mode)
    yield "ok", f"{path} (mode {mode:04o}): {len(sizes)} kernels, {sum(sizes) / 1e6:.1f} MB"
    if first.cached or not again.cached:
        yield "bad", "a kernel that was just compiled is not found in it"


def _self_check() -> Iterator[Finding]:
    """Compares a small LSTM, fused in float32, with the reference in float64."""
    import anycell

    rng, lstm, size = np.random.default_rng(0), anycell.cells.LSTM, 33
    gates_x = rng.standard_normal((20, 5, 4 * size))
    weight = rng.standard_normal((4 * size, size)) / size
    exact, _ = anycell.recurrence(lstm, gates_x, {"weight_hh": weight}, engine="reference")
    narrow = gates_x.astype(np.float32), {"weight_hh": weight.astype(np.float32)}
    start = time.perf_counter()
    fused, _ = anycell.recurrence(lstm, *narrow, engine="cpu")
    took = 1e3 * (time.perf_counter() - start)
    error = float(np.linalg.norm(fused - exact) / np.linalg.norm(exact))
    within = f"within {error:.0e} of float64 (limit {LIMIT:.0e})"
    yield "ok" if error <= LIMIT else "bad", f"a fused LSTM is {within}, {took:.0f} ms"


CHECKS: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
    ("versions", _versions),
    ("frameworks", _frameworks),
    ("processor", _cpu),
    ("products", _products),
    ("threads", _threads),
    ("speed", _speed),
    ("environment", _environment),
    ("kernel cache", _cache),
    ("self-check", _self_check),
]
