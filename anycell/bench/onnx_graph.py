"""``torch.nn`` weights as an ONNX graph, built by hand with ``onnx.helper``, and in 8 bits.

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
    helper: Any = need("onnx.helper", "the onnxruntime peer")
    numpy_helper: Any = need("onnx.numpy_helper", "the onnxruntime peer")
    operator, shape = OPERATORS[problem.cell.name], problem.shape
    nodes, constants = [], []

    def constant(name: str, value: np.ndarray) -> str:
        constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    flat = constant("flat", np.array([0, 0, shape.D * shape.H]))
    source = "x"
    for layer, directions in enumerate(by_direction(problem.weights, shape)):
        parts = [_arrays(operator, weights) for weights in directions]
        arrays = {
            name: np.concatenate([p[name] for p in parts]) for name in "WRBP" if name in parts[0]
        }
        inputs = [source, *(constant(f"{name}{layer}", arrays[name]) for name in "WRB")]
        if "P" in arrays:
            inputs += ["", "", "", constant(f"P{layer}", arrays["P"])]
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


def _arrays(operator: str, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """W, R, B, and P where there are peepholes, of one direction in ONNX's order of gates."""
    if operator != "RNN":
        named = {f"{name}_l0": value for name, value in weights.items()}
        return layouts.convert(named, operator, "torch", "onnx")
    bias = np.concatenate([weights["bias_ih"], weights["bias_hh"]])
    return {"W": weights["weight_ih"][None], "R": weights["weight_hh"][None], "B": bias[None]}


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


def onnxruntime(problem: Problem, settings: Mapping[str, str] | None = None) -> Contender:
    """The same weights as an ONNX graph: inference in float32, of LSTMs in int8 too.

    The weights are constants of the graph, which a session packs once. Those of int8 are of 7 bits
    where products of 8 bits would saturate, and wrong results come out. `settings` are entries of
    its configuration; by default all are ONNX Runtime's own, so that its threads spin while it runs
    as they do for its users.
    """
    if problem.dtype not in ("float32", "int8"):
        raise Unsupported(f"ONNX Runtime has no {problem.dtype} recurrent layers")
    model, remark = build(problem), None
    if problem.types.quantized:
        reduced = saturates()
        model = quantized(model, reduced)
        if reduced:
            remark = "weights of 7 bits, for its products of 8 bits saturate without VNNI"
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
    """The same ONNX graph in Intel's runtime, where that computes in the dtype on this machine."""
    hint = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}.get(problem.dtype)
    if hint is None:
        raise Unsupported(f"OpenVINO has no {problem.dtype} recurrent layers")
    if problem.cell.name == "PeepholeLSTM":
        raise Unsupported("OpenVINO leaves out the peepholes of an ONNX LSTM")
    try:
        runtime: Any = need("openvino", "the openvino peer", "openvino")
    except UsageError as error:  # it is large, and the others can be measured without it
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
