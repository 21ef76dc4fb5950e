"""The list of contenders. Each gets the same problem and returns arrays under the same names.

A contender is built once per problem and then asked for *tasks*, mostly inference and training.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from anycell.bench.problem import Problem, find_cell
from anycell.bench.tasks import Array, Contender, Mode, late
from anycell.machine import ROOT

TORCH, NUMPY = "anycell.bench.torch_layers", "anycell.bench.numpy_layers"
KERAS, JAX = "anycell.bench.keras_layers", "anycell.bench.jax_layers"
SUBJECT = "anycell"
OUR_LSTM = "anycell-LSTM"  # our LSTM on the same shape, to show what another cell costs
FLOAT32 = "anycell-float32"  # our layer in float32, to show what fewer bits gain
CONTENDERS: dict[str, Callable[[Problem], Contender]] = {
    SUBJECT: late(TORCH, "ours"),
    OUR_LSTM: late(TORCH, "ours"),
    FLOAT32: late(TORCH, "ours"),
    "anycell.numpy": late(NUMPY, "ours"),
    "torch.nn": late(TORCH, "theirs"),
    "anycell.keras": late(KERAS, "ours"),
    "keras": late(KERAS, "theirs"),
    "keras-xla": late(KERAS, "theirs", compiled=True),
    "anycell.jax": late(JAX, "ours"),
    "flax": late(JAX, "flax"),
}
ON_TENSORFLOW = ["anycell.keras", "keras", "keras-xla"]
# The packages that contenders need beyond NumPy and PyTorch.
PACKAGES: dict[str, tuple[str, ...]] = {
    "anycell.numpy": ("threadpoolctl",), "anycell.jax": ("jax",), "flax": ("jax", "flax"),
    **dict.fromkeys(ON_TENSORFLOW, ("keras", "tensorflow")),
}  # fmt: skip
RIVALS = ROOT / "benchmarks"  # only a checkout has them


def _add_rivals(folder: Path) -> None:
    """Adds the loops by hand and the runtimes of ``benchmarks/rivals``, if they are there."""
    if (folder / "rivals").is_dir():
        sys.path.append(str(folder))
        rivals = importlib.import_module("rivals")
        CONTENDERS.update(rivals.CONTENDERS)
        PACKAGES.update(rivals.PACKAGES)
        ON_TENSORFLOW.extend(rivals.ON_TENSORFLOW)


_add_rivals(RIVALS)
DEFAULT_PEERS = tuple(name for name in ("torch.nn", "torch-loop") if name in CONTENDERS)


def make(name: str, problem: Problem) -> Contender:
    """Builds a contender; raises `Unsupported` if it has no such layer."""
    return CONTENDERS[name](posed(name, problem))


def posed(name: str, problem: Problem) -> Problem:
    """The problem that this contender solves: ``OUR_LSTM`` gets the LSTM as its cell, ``FLOAT32``
    gets float32, and all others get the problem unchanged.
    """
    if name == OUR_LSTM:
        return replace(problem, cell=find_cell("LSTM"))
    return replace(problem, dtype="float32") if name == FLOAT32 else problem


# Computes the output, in training all gradients too, in float64.
reference: Callable[[Problem, Mode], dict[str, Array]] = late(TORCH, "reference")
