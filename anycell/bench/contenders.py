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
    """A function of a module that is imported when it is called, with its framework."""

    def call(*args: Any) -> Any:
        return getattr(importlib.import_module(module), function)(*args, **options)

    return call


TORCH, NUMPY = "anycell.bench.torch_layers", "anycell.bench.numpy_loops"
ONNX, KERAS = "anycell.bench.onnx_graph", "anycell.bench.keras_layers"
SUBJECT = "anycell"
CALM = {"session.intra_op.allow_spinning": "0"}  # threads that sleep where they have no work
OUR_LSTM = "anycell-LSTM"  # what our own LSTM takes on the same shape: the price of another cell
FLOAT32 = "anycell-float32"  # what our layer takes in float32: the gain of fewer bits
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
}
DEFAULT_PEERS = ("torch.nn", "torch-loop")
ON_TENSORFLOW = ("anycell.keras", "keras", "keras-xla", "keras-loop", "tf-block")
# Beyond NumPy and PyTorch.
PACKAGES = dict.fromkeys(("onnxruntime", "onnxruntime-calm"), ("onnx", "onnxruntime"))
PACKAGES |= dict.fromkeys(ON_TENSORFLOW, ("keras", "tensorflow"))


def make(name: str, problem: Problem) -> Contender:
    """The contender of that name, built; `Unsupported` where it has no such layer."""
    return CONTENDERS[name](posed(name, problem))


def posed(name: str, problem: Problem) -> Problem:
    """The problem that this contender solves: the same, except for our LSTM among other cells, and
    for float32 among other dtypes.
    """
    if name == OUR_LSTM:
        return replace(problem, cell=find_cell("LSTM"))
    return replace(problem, dtype="float32") if name == FLOAT32 else problem


# Output, in training all gradients too, in float64.
reference: Callable[[Problem, Mode], dict[str, Array]] = late(TORCH, "reference")
