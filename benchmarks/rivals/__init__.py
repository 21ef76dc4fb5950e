"""Whom ``anycell bench`` can measure against in a checkout, besides layers of the frameworks: loops
over time as people write them, and runtimes of ONNX graphs.
"""

from collections.abc import Callable

from anycell.bench.problem import Problem
from anycell.bench.tasks import Contender, late

TORCH, NUMPY, ONNX = "rivals.torch_loops", "rivals.numpy_loops", "rivals.onnx_graph"
KERAS, JAX = "rivals.keras_loops", "rivals.jax_scans"
CALM = {"session.intra_op.allow_spinning": "0"}  # threads sleep when they have no work
CONTENDERS: dict[str, Callable[[Problem], Contender]] = {
    "torch-loop": late(TORCH, "loop"),
    "torch-compile": late(TORCH, "compiled"),
    "numpy-loop": late(NUMPY, "loop"),
    "onnxruntime": late(ONNX, "onnxruntime"),
    "onnxruntime-calm": late(ONNX, "onnxruntime", settings=CALM),
    "openvino": late(ONNX, "openvino"),
    "keras-loop": late(KERAS, "loop"),
    "tf-block": late(KERAS, "block"),
    "jax-scan": late(JAX, "scan"),
}
ON_TENSORFLOW = ("keras-loop", "tf-block")
PACKAGES: dict[str, tuple[str, ...]] = {
    "numpy-loop": ("threadpoolctl",), "jax-scan": ("jax",),
    **dict.fromkeys(("onnxruntime", "onnxruntime-calm"), ("onnx", "onnxruntime")),
    **dict.fromkeys(ON_TENSORFLOW, ("keras", "tensorflow")),
}  # fmt: skip
