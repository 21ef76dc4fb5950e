"""Whom ``anycell bench`` can measure against in a checkout, besides layers of the frameworks: loops
over time as people write them, and runtimes of ONNX graphs.
"""

from anycell.bench.tasks import Source

TORCH, NUMPY, ONNX = "rivals.torch_loops", "rivals.numpy_loops", "rivals.onnx_graph"
KERAS, JAX = "rivals.keras_loops", "rivals.jax_scans"
RUNTIME, TENSORFLOW = ("onnx", "onnxruntime"), ("keras", "tensorflow")
CALM = {"session.intra_op.allow_spinning": "0"}  # threads sleep when they have no work
CONTENDERS: dict[str, Source] = {
    "torch-loop": Source(TORCH, "loop"),
    "torch-compile": Source(TORCH, "compiled"),
    "numpy-loop": Source(NUMPY, "loop", ("threadpoolctl",)),
    "onnxruntime": Source(ONNX, "onnxruntime", RUNTIME),
    "onnxruntime-calm": Source(ONNX, "onnxruntime", RUNTIME, {"settings": CALM}),
    "openvino": Source(ONNX, "openvino"),  # which is left out if it is not installed
    "keras-loop": Source(KERAS, "loop", TENSORFLOW),
    "tf-block": Source(KERAS, "block", TENSORFLOW),
    "jax-scan": Source(JAX, "scan", ("jax",)),
}
