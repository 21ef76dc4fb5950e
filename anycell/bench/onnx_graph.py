"""``torch.nn`` weights as an ONNX graph, built by hand with ``onnx.helper``, and in 8 bits.

One LSTM, GRU or RNN node per layer. ONNX has its own gate order, and puts the directions on an axis
of the output, ``[T, D, B, H]``; a transpose and a reshape bring it to torch's ``[T, B, D * H]``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from anycell.bench.errors import Unsupported, need
from anycell.bench.problem import Problem
from anycell.engines.cpu.ir import X86
from anycell.machine import instruction_sets

# cell -> (ONNX operator, where each gate of ONNX is found in torch's order)
OPERATORS = {
    "LSTM": ("LSTM", (0, 3, 1, 2)),  # i f g o -> i o f c
    "PeepholeLSTM": ("LSTM", (0, 3, 1, 2)),
    "GRU": ("GRU", (1, 0, 2)),  # r z n -> z r h
    "RNN": ("RNN", (0,)),
}


def build(problem: Problem) -> bytes:
    """The serialized model: input ``x`` ``[T, B, I]``, output ``y`` ``[T, B, D * H]``."""
    if problem.cell.name not in OPERATORS:
        raise Unsupported(f"ONNX has no operator for {problem.cell.name}")
    onnx = need("onnx", "the onnxruntime peer")
    helper: Any = need("onnx.helper", "the onnxruntime peer")
    numpy_helper: Any = need("onnx.numpy_helper", "the onnxruntime peer")
    operator, order = OPERATORS[problem.cell.name]
    shape = problem.shape
    nodes, constants = [], []

    def constant(name: str, value: np.ndarray) -> str:
        constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def weight(name: str, layer: int) -> np.ndarray:
        """``[D, gates * H, ...]`` in ONNX's gate order."""
        directions = []
        for direction in range(shape.D):
            value = problem.weights[f"{name}_l{layer}" + "_reverse" * direction]
            directions.append(np.concatenate([np.split(value, len(order))[k] for k in order]))
        return np.stack(directions)

    flat = constant("flat", np.array([0, 0, shape.D * shape.H]))
    source = "x"
    for layer in range(shape.L):
        bias = np.concatenate([weight("bias_ih", layer), weight("bias_hh", layer)], axis=1)
        inputs = [
            source,
            constant(f"W{layer}", weight("weight_ih", layer)),
            constant(f"R{layer}", weight("weight_hh", layer)),
            constant(f"B{layer}", bias),
        ]
        if problem.cell.name == "PeepholeLSTM":
            peepholes = [
                np.concatenate([problem.weights[f"p_{k}_l{layer}" + "_reverse" * d] for k in "iof"])
                for d in range(shape.D)
            ]
            inputs += ["", "", "", constant(f"P{layer}", np.stack(peepholes))]
        attributes: dict[str, Any] = {
            "hidden_size": shape.H,
            "direction": "bidirectional" if shape.D == 2 else "forward",
        }
        if operator == "GRU":
            attributes["linear_before_reset"] = 1
        target = "y" if layer == shape.L - 1 else f"y{layer}"
        nodes += [
            helper.make_node(operator, inputs, [f"tdbh{layer}"], **attributes),
            helper.make_node("Transpose", [f"tdbh{layer}"], [f"tbdh{layer}"], perm=[0, 2, 1, 3]),
            helper.make_node("Reshape", [f"tbdh{layer}", flat], [target]),
        ]
        source = target

    element = helper.np_dtype_to_tensor_dtype(np.dtype(problem.wide))
    graph = helper.make_graph(
        nodes,
        "bench",
        [helper.make_tensor_value_info("x", element, [shape.T, shape.B, shape.I])],
        [helper.make_tensor_value_info("y", element, [shape.T, shape.B, shape.D * shape.H])],
        constants,
    )
    # An old opset and IR, so that any ONNX Runtime of the last years loads the model.
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def saturates() -> bool:
    """Whether ONNX Runtime's products of bytes may exceed what they are summed in: on x86 without
    VNNI pairs of them are summed in 16 bits, and outputs are off by 9 to 20 percent.
    """
    return X86 and not {"avx512_vnni", "avx_vnni"} & set(instruction_sets())


def quantized(model: bytes, reduce_range: bool) -> bytes:
    """The same with ``DynamicQuantizeLSTM``: weights of 8 bits, with a scale for each output.

    Args:
        reduce_range: weights of 7 bits, whose products cannot saturate.
    """
    onnx = need("onnx", "the onnxruntime peer")
    quantization: Any = need("onnxruntime.quantization", "the onnxruntime peer")
    graph = onnx.load_from_string(model)
    # There is nothing to prepare in a graph of constants: without this ONNX Runtime asks for it.
    onnx.helper.set_model_props(graph, {"onnx.quant.pre_process": "onnxruntime.quant"})
    with tempfile.TemporaryDirectory(prefix="anycell-bench-") as folder:
        path = Path(folder) / "quantized.onnx"
        int8 = quantization.QuantType.QInt8
        quantization.quantize_dynamic(
            graph, path, per_channel=True, reduce_range=reduce_range, weight_type=int8
        )
        result = path.read_bytes()
    operators = {node.op_type for node in onnx.load_from_string(result).graph.node}
    if "DynamicQuantizeLSTM" not in operators:
        raise Unsupported(f"ONNX Runtime has no int8 {graph.graph.node[0].op_type}")
    return result
