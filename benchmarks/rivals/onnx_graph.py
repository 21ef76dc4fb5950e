"""``torch.nn`` weights as an ONNX graph, in 8 bits too, and the contenders that run it.

One LSTM, GRU or RNN node per layer. ONNX has its own gate order, and puts the directions on an axis
of the output, ``[T, D, B, H]``; a transpose and a reshape bring it to torch's ``[T, B, D * H]``.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from anycell import layouts
from anycell.bench.problem import Problem, by_direction
from anycell.bench.tasks import Contender, Task, Unsupported
from anycell.engines.cpu.ir import X86
from anycell.machine import instruction_sets
from anycell.usage import UsageError, need

OPERATORS = {"LSTM": "LSTM", "PeepholeLSTM": "LSTM", "GRU": "GRU", "RNN": "RNN"}


def build(problem: Problem) -> bytes:
    """The serialized model: input ``x`` ``[T, B, I]``, output ``y`` ``[T, B, D * H]``."""
    if problem.cell.name not in OPERATORS:
        raise Unsupported(f"ONNX has no operator for {problem.cell.name}")
    onnx = need("onnx", "the onnxruntime peer")
    parser: Any = need("onnx.parser", "the onnxruntime peer")
    operator, shape = OPERATORS[problem.cell.name], problem.shape
    direction = "bidirectional" if shape.D == 2 else "forward"
    attributes = f'hidden_size = {shape.H}, direction = "{direction}"'
    attributes += ", linear_before_reset = 1" * (operator == "GRU")
    names = ["x", *(f"x{layer}" for layer in range(1, shape.L)), "y"]
    constants, nodes = {"flat": np.array([0, 0, shape.D * shape.H])}, []
    for layer, directions in enumerate(by_direction(problem.weights, shape)):
        parts = [_arrays(operator, weights) for weights in directions]
        for name in parts[0].keys() & set("WRBP"):
            constants[f"{name}{layer}"] = np.concatenate([part[name] for part in parts])
        peepholes = f", , , , P{layer}" * ("P" in parts[0])
        given = f"{names[layer]}, W{layer}, R{layer}, B{layer}{peepholes}"
        nodes.append(f"""
            tdbh{layer} = {operator} <{attributes}> ({given})
            tbdh{layer} = Transpose <perm = [0, 2, 1, 3]> (tdbh{layer})
            {names[layer + 1]} = Reshape (tbdh{layer}, flat)""")
    # An old opset and IR, so that any ONNX Runtime of recent years loads the model.
    model = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 14]>
        bench (float[{shape.T}, {shape.B}, {shape.I}] x)
            => (float[{shape.T}, {shape.B}, {shape.D * shape.H}] y)
        {{{"".join(nodes)} }}""")
    for name, value in constants.items():
        array = np.ascontiguousarray(value)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def _arrays(operator: str, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """W, R, B, and with peepholes P, of one direction, in ONNX's order of gates."""
    if operator != "RNN":
        named = {f"{name}_l0": value for name, value in weights.items()}
        return layouts.convert(named, operator, "torch", "onnx")
    bias = np.concatenate([weights["bias_ih"], weights["bias_hh"]])
    return {"W": weights["weight_ih"][None], "R": weights["weight_hh"][None], "B": bias[None]}


def saturates() -> bool:
    """Whether ONNX Runtime's sums of byte products may overflow: on x86 without VNNI it sums pairs
    of products in 16 bits, and outputs are off by 9 to 20 percent.
    """
    return X86 and not {"avx512_vnni", "avx_vnni"} & set(instruction_sets())


def quantized(model: bytes, reduce_range: bool) -> bytes:
    """The model with ``DynamicQuantizeLSTM``: weights of 8 bits, with a scale for each output.

    Args:
        reduce_range: whether weights have 7 bits, so that products cannot saturate.
    """
    onnx = need("onnx", "the onnxruntime peer")
    quantization: Any = need("onnxruntime.quantization", "the onnxruntime peer")
    graph = onnx.load_from_string(model)
    # Marks the graph as prepared, or ONNX Runtime asks for it; a graph of constants needs nothing.
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


def onnxruntime(problem: Problem, settings: Mapping[str, str] | None = None) -> Contender:
    """ONNX Runtime on the problem as a graph: inference in float32, for LSTMs also in int8.

    The weights are constants of the graph, which a session packs once. In int8 they have 7 bits if
    products of 8 bits would saturate and give wrong results. `settings` are entries of its
    configuration. By default all are ONNX Runtime's own: its threads spin, as in users' programs.
    """
    if problem.dtype not in ("float32", "int8"):
        raise Unsupported(f"ONNX Runtime has no {problem.dtype} recurrent layers")
    model, remark = build(problem), None
    if problem.types.quantized:
        reduced = saturates()
        model = quantized(model, reduced)
        if reduced:
            remark = "weights of 7 bits, because its products of 8 bits saturate without VNNI"
    runtime: Any = need("onnxruntime", "the onnxruntime peer")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = problem.threads
    options.inter_op_num_threads = 1
    for key, value in (settings or {}).items():
        options.add_session_config_entry(key, value)
    session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feed = {"x": problem.x}
    return Contender({"inference": Task(lambda: session.run(None, feed)[0])}, remark=remark)


def openvino(problem: Problem) -> Contender:
    """Intel's runtime on the ONNX graph, if it computes in the dtype on this machine."""
    hint = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}.get(problem.dtype)
    if hint is None:
        raise Unsupported(f"OpenVINO has no {problem.dtype} recurrent layers")
    if problem.cell.name == "PeepholeLSTM":
        raise Unsupported("OpenVINO leaves out the peepholes of an ONNX LSTM")
    try:
        runtime: Any = need("openvino", "the openvino peer", "pip install openvino")
    except UsageError as error:  # it is large, and all others run without it
        raise Unsupported(str(error)) from None
    core = runtime.Core()
    settings = {
        "INFERENCE_PRECISION_HINT": hint,
        "INFERENCE_NUM_THREADS": problem.threads,
        "PERFORMANCE_HINT": "LATENCY",
    }
    model = core.compile_model(core.read_model(build(problem)), "CPU", settings)
    precision = model.get_property("INFERENCE_PRECISION_HINT").to_string()
    if precision != hint:
        raise Unsupported(f"OpenVINO computes in {precision} on this machine")
    request, feed = model.create_infer_request(), {"x": problem.x}
    infer = functools.partial(request.infer, feed, share_inputs=True)
    return Contender({"inference": Task(infer, lambda _: {"output": request.results["y"].copy()})})
