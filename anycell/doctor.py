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
from typing import Literal

import numpy as np

from anycell.machine import cpu_name, revision, usable_cores, version

Verdict = Literal["ok", "note", "bad"]
Finding = tuple[Verdict, str]
MARKS: dict[Verdict, str] = {"ok": "  ", "note": "! ", "bad": "X "}

OPTIONAL = "torch tensorflow keras jax flax triton onnx onnxruntime matplotlib rich".split()
LIMIT = 1e-6  # relative error of a forward pass in float32


def main() -> int:
    """Print everything; 1 if something does not work, else 0."""
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
    import anycell

    checkout = f", revision {found}" if (found := revision()) else ""
    yield "ok", f"anycell {anycell.__version__}{checkout}, in {os.path.dirname(anycell.__file__)}"
    yield "ok", f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    yield "ok", f"{platform.platform()}"
    yield "ok", f"numpy {np.__version__}, llvmlite {version('llvmlite')} (LLVM {_llvm()})"


def _llvm() -> str:
    import llvmlite.binding as llvm

    return ".".join(map(str, llvm.llvm_version_info))


def _frameworks() -> Iterator[Finding]:
    """Frameworks, by metadata: importing TensorFlow takes seconds, and may be what is broken."""
    installed = [name for name in OPTIONAL if util.find_spec(name) is not None]
    versions = [version(name, f"{name}-cpu", f"{name}-gpu") for name in installed]
    found = [f"{n} {v or '(version unknown)'}" for n, v in zip(installed, versions, strict=True)]
    yield "ok", ", ".join(found) or "none"
    missing = [name for name in OPTIONAL if name not in installed]
    if missing:
        yield "ok", f"not installed, and not needed: {', '.join(missing)}"


def _cpu() -> Iterator[Finding]:
    from anycell.engines.cpu import isa

    yield "ok", cpu_name()
    available, chosen = isa.available(), isa.current().name
    forced = f", as {isa.ENV} says" if isa.ENV in os.environ else ""
    yield "ok", f"kernels for {chosen}{forced}; this machine runs {', '.join(available)}"
    if isa.runs("amx") and "amx" not in available:
        yield "note", "this machine has AMX, but Linux does not let this process use it"
    if chosen == "generic" and platform.machine() in ("x86_64", "AMD64"):
        yield "note", "without AVX2 kernels are several times slower"


def _products() -> Iterator[Finding]:
    from anycell.layer.products import rule

    for library, name in (("numpy", "NumPy and Keras"), ("torch", "PyTorch")):
        yield "ok", f"{name}: {rule(library).why}"


def _threads() -> Iterator[Finding]:
    from anycell.engines.cpu import pool

    count, cores = pool.threads(), usable_cores()
    backend = {
        "openmp": "those of the OpenMP runtime in this process",
        "own": "our own (a framework brings an OpenMP runtime when it is imported)",
    }[pool.backend()]
    yield "ok" if count <= cores else "note", f"{count} on {cores} cores; {backend}"


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
    """A small LSTM, fused in float32 against the reference in float64."""
    import anycell

    rng = np.random.default_rng(0)
    hidden = 33
    gates_x = rng.standard_normal((20, 5, 4 * hidden))
    weight = rng.standard_normal((4 * hidden, hidden)) / hidden
    exact, _ = anycell.recurrence(
        anycell.cells.LSTM, gates_x, {"weight_hh": weight}, engine="reference"
    )
    start = time.perf_counter()
    fused, _ = anycell.recurrence(
        anycell.cells.LSTM,
        gates_x.astype(np.float32),
        {"weight_hh": weight.astype(np.float32)},
        engine="cpu",
    )
    took = 1e3 * (time.perf_counter() - start)
    error = float(np.linalg.norm(fused - exact) / np.linalg.norm(exact))
    verdict: Verdict = "ok" if error <= LIMIT else "bad"
    yield (
        verdict,
        f"a fused LSTM is within {error:.0e} of float64 (limit {LIMIT:.0e}), {took:.0f} ms",
    )


CHECKS: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
    ("versions", _versions),
    ("frameworks", _frameworks),
    ("processor", _cpu),
    ("products", _products),
    ("threads", _threads),
    ("environment", _environment),
    ("kernel cache", _cache),
    ("self-check", _self_check),
]
