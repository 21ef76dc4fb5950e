"""The table of contenders. Each gets the same problem and returns arrays under the same names.

A contender is built once per problem and then asked for *tasks*, mostly inference and training.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace

from anycell.bench.problem import Problem, find_cell
from anycell.bench.tasks import Contender, Source
from anycell.machine import ROOT

TORCH, NUMPY = "anycell.bench.torch_layers", "anycell.bench.numpy_layers"
KERAS, JAX = "anycell.bench.keras_layers", "anycell.bench.jax_layers"
ON_KERAS = "keras", "tensorflow"
SUBJECT = "anycell"
OUR_LSTM = "anycell-LSTM"  # our LSTM on the same shape, to show what another cell costs
FLOAT32 = "anycell-float32"  # our layer in float32, to show what fewer bits gain
CONTENDERS: dict[str, Source] = {
    SUBJECT: Source(TORCH, "ours"),
    OUR_LSTM: Source(TORCH, "ours"),
    FLOAT32: Source(TORCH, "ours"),
    "anycell.numpy": Source(NUMPY, "ours", ("threadpoolctl",)),
    "torch.nn": Source(TORCH, "theirs"),
    "anycell.keras": Source(KERAS, "ours", ON_KERAS),
    "keras": Source(KERAS, "theirs", ON_KERAS),
    "keras-xla": Source(KERAS, "theirs", ON_KERAS, {"compiled": True}),
    "anycell.jax": Source(JAX, "ours", ("jax",)),
    "flax": Source(JAX, "flax", ("jax", "flax")),
}
RIVALS = ROOT / "benchmarks" / "rivals"  # loops by hand and runtimes, which only a checkout has
if RIVALS.is_dir():
    sys.path.append(str(RIVALS.parent))
    CONTENDERS |= importlib.import_module("rivals").CONTENDERS
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
