"""The list of contenders. Each gets the same problem and returns arrays under the same names.

A contender is built once per problem and then asked for *tasks*, mostly inference and training.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from anycell.bench.problem import Problem, find_cell
from anycell.bench.tasks import Array, Contender, Mode


def late(module: str, function: str, **options: Any) -> Callable[..., Any]:
    """Returns a function that imports its module, and so a framework, only when it is called."""

    def call(*args: Any) -> Any:
        return getattr(importlib.import_module(module), function)(*args, **options)

    return call


TORCH, NUMPY = "anycell.bench.torch_layers", "anycell.bench.numpy_loops"
ONNX, KERAS = "anycell.bench.onnx_graph", "anycell.bench.keras_layers"
JAX = "anycell.bench.jax_layers"
SUBJECT = "anycell"
CALM = {"session.intra_op.allow_spinning": "0"}  # threads sleep when they have no work
OUR_LSTM = "anycell-LSTM"  # our LSTM on the same shape, to show what another cell costs
FLOAT32 = "anycell-float32"  # our layer in float32, to show what fewer bits gain
CONTENDERS: dict[str, Callable[[Problem], Contender]] = {
    SUBJECT: late(TORCH, "ours"),
    OUR_LSTM: late(TORCH, "ours"),
    FLOAT32: late(TORCH, "ours"),
    "anycell.numpy": late(NUMPY, "ours"),
    "torch.nn": late(TORCH, "theirs"),
    "torch-loop": late(TORCH, "loop"),
    "torch-compile": late(TORCH, "compiled"),
    "numpy-loop": late(NUMPY, "loop"),
    "onnxruntime": late(ONNX, "onnxruntime"),
    "onnxruntime-calm": late(ONNX, "onnxruntime", settings=CALM),
    "openvino": late(ONNX, "openvino"),
    "anycell.keras": late(KERAS, "ours"),
    "keras": late(KERAS, "theirs"),
    "keras-xla": late(KERAS, "theirs", compiled=True),
    "keras-loop": late(KERAS, "loop"),
    "tf-block": late(KERAS, "block"),
    "anycell.jax": late(JAX, "ours"),
    "jax-scan": late(JAX, "scan"),
    "flax": late(JAX, "flax"),
}
DEFAULT_PEERS = ("torch.nn", "torch-loop")
ON_TENSORFLOW = ("anycell.keras", "keras", "keras-xla", "keras-loop", "tf-block")
# The packages that contenders need beyond NumPy and PyTorch.
PACKAGES: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("onnxruntime", "onnxruntime-calm"), ("onnx", "onnxruntime")
)
PACKAGES |= dict.fromkeys(("anycell.numpy", "numpy-loop"), ("threadpoolctl",))
PACKAGES |= dict.fromkeys(ON_TENSORFLOW, ("keras", "tensorflow"))
PACKAGES |= {"anycell.jax": ("jax",), "jax-scan": ("jax",), "flax": ("jax", "flax")}


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
