"""Whom ``anycell bench`` can measure in a checkout, besides layers of PyTorch and NumPy: layers of
Keras and JAX, ours and others', loops over time as people write them, and runtimes of ONNX graphs.
"""

from anycell.bench.tasks import Source

TORCH, NUMPY, ONNX = "rivals.torch_loops", "rivals.numpy_loops", "rivals.onnx_graph"
KERAS, KERAS_LOOPS = "rivals.keras_layers", "rivals.keras_loops"
JAX, JAX_SCANS = "rivals.jax_layers", "rivals.jax_scans"
RUNTIME, TENSORFLOW = ("onnx", "onnxruntime"), ("keras", "tensorflow")
CALM = {"session.intra_op.allow_spinning": "0"}  # threads sleep when they have no work
CONTENDERS: dict[str, Source] = {
    "torch-loop": Source(TORCH, "loop"),
    "torch-compile": Source(TORCH, "compiled"),
    "numpy-loop": Source(NUMPY, "loop", ("threadpoolctl",)),
    "onnxruntime": Source(ONNX, "onnxruntime", RUNTIME),
    "onnxruntime-calm": Source(ONNX, "onnxruntime", RUNTIME, {"settings": CALM}),
    "openvino": Source(ONNX, "openvino"),  # which is left out if it is not installed
    "anycell.keras": Source(KERAS, "ours", TENSORFLOW),
    "keras": Source(KERAS, "theirs", TENSORFLOW),
    "keras-xla": Source(KERAS, "theirs", TENSORFLOW, {"compiled": True}),
    "keras-loop": Source(KERAS_LOOPS, "loop", TENSORFLOW),
    "tf-block": Source(KERAS_LOOPS, "block", TENSORFLOW),
    "anycell.jax": Source(JAX, "ours", ("jax",)),
    "flax": Source(JAX, "flax", ("jax", "flax")),
    "jax-scan": Source(JAX_SCANS, "scan", ("jax",)),
}
