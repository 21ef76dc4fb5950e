"""Layers as models of ONNX."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from anycell.lang.transform import OUTPUT
from anycell.layer.checks import check_options
from anycell.layer.compression import array_of, compression, numbers
from anycell.layer.parts import opened
from anycell.layer.signature import ENDS, of_layer
from anycell.onnx.cells import FLAGS as FLAG
from anycell.onnx.cells import FUNCTIONS, ORDERS, USUAL, Form, form_of, reordered, rows
from anycell.onnx.scan import Graph, scan
from anycell.plan import OF_CALL, CallOptions, Layer, takes
from anycell.refusal import refuse

if TYPE_CHECKING:
    from typing_extensions import Unpack

Array = npt.NDArray[Any]
Weights = Mapping[str, Array]
Names = Mapping[str, str]
OPSET, IR = 22, 10  # what ONNX Runtime 1.20 and newer run
FLAGS = {"mask": "valid", "resets": "starts", "forced": "forced"}  # as ``scan`` calls them
INPUTS = "state", "lengths", "mask", "resets", "reset_state"


@takes(CallOptions)
def export(
    layer: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    params: Mapping[str, Any] | None = None,
    inputs: str | Sequence[str] = (),
    **options: Unpack[CallOptions],
) -> onnx.ModelProto:
    """Writes a trained layer as an ONNX model, for any number of steps and rows above 0.

    A layer of an LSTM, with peepholes or without, a GRU or an RNN becomes the node of that name;
    any other cell becomes a ``Scan``, whose body is the step of the cell. So do all cells of a call
    with masks or resets, which ONNX's nodes lack, and of float64, which ONNX Runtime's lack.

    Args:
        layer: a layer of ``anycell.torch`` (``RNN``, ``LSTM``, ``GRU``), ``anycell.numpy``,
            ``anycell.keras`` (built; also in ``Bidirectional``), their ``Feedback``, or
            ``anycell.jax.RNN``.
        path: where to write the model, too.
        params: the parameters of a layer of JAX.
        inputs: what a call passes besides x, by the names of ``RNN``: "state", "lengths", "mask",
            "resets", "reset_state"; in one string, "state lengths", or a list. "static" is always
            among them where the cell has one, and "forced" of ``Feedback``, which has no
            "reset_state".
        {arguments}

    Returns:
        the model, of opset 22, in evaluation: random masks are their means. Its inputs are ``x``,
        and those of ``inputs``, its outputs ``output`` and for each state ``final_h``. They are
        laid out as in a call of the layer: x ``[T, B, input_size]``, or ``[B, T, input_size]`` if
        ``batch_first`` and of Keras; the states one by one, ``state_h`` ``[layers * D, B, H]``;
        ``lengths`` int64, ``mask``, ``resets`` and ``forced`` bool. Numbers are float32, or float64
        if the layer's are. Outputs of Keras at masked steps are as the layer is set, unless
        ``masked_output`` is passed.

    Raises:
        ValueError, TypeError: with what was given, what is expected, and what to do.

    Example:
        >>> layer = anycell.numpy.RNN(anycell.cells.JANET, 3, 8)
        >>> model = export(layer, inputs="state lengths")
        >>> [i.name for i in model.graph.input]
        ['x', 'state_h', 'lengths']
    """
    layer, weights, readout, rows_first = _seen(layer, params)
    cell, directions, count = layer.cell, len(layer.options.reverse), len(weights)
    wanted = inputs.split() if isinstance(inputs, str) else inputs
    wanted = [*wanted] if isinstance(wanted, Iterable) else [wanted]
    always = ["static"] * bool(cell.static) + ["forced"] * bool(readout)
    known = [*(INPUTS[:-1] if readout else INPUTS), *always]
    if unknown := [name for name in wanted if name not in known]:
        refuse("inputs", repr(unknown[0]), f"names among {', '.join(known)}", "Leave it out.")
    settings = check_options(options, () if readout else OF_CALL, export, others=())
    layer = layer._replace(options=layer.options._replace(**settings))
    graph, taken = Graph(layer.dtype), list[Any]()

    def take(name: str, *shape: str | int, kind: int = graph.kind) -> str:
        taken.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def turned(name: str, *others: int) -> str:
        """A sequence with steps first from one with rows first, or back."""
        return str(graph("Transpose", name, perm=[1, 0, *others])) if rows_first else name

    steps: tuple[str, str] = ("rows", "steps") if rows_first else ("steps", "rows")
    x = turned(take("x", *steps, weights[0]["weight_ih"].shape[1]), 2)
    call, lengths = dict[str, str](), ""
    states: list[dict[str, str]] = [{} for _ in weights]  # [D, rows, size] of each layer
    for name in (name for name in known if name in (*wanted, *always)):
        if name == "lengths":
            lengths = take(name, "rows", kind=TensorProto.INT64)
        elif name == "static":
            call[name] = take(name, "rows", layer.size(cell.static_size))
        elif name in FLAGS:
            flags = turned(take(name, *steps, kind=TensorProto.BOOL))
            call[FLAGS[name]] = graph("Unsqueeze", flags, graph.integers(2))
        else:
            for s in cell.states:
                whole = take(f"{name}_{s.name}", directions * count, "rows", layer.size(s.size))
                for k, part in enumerate(graph.split(whole, [directions] * count, 0)):
                    states[k][f"{name} {s.name}"] = part
    if readout:  # what the series holds at free steps has no influence, not even as NaN
        series = np.arange(weights[0]["weight_ih"].shape[1]) < layer.size(OUTPUT)
        call["free"] = graph("Not", call.pop("forced"))
        hidden = graph("And", call["free"], graph.constant(series, bool))
        x = graph("Where", hidden, graph.constant(0.0), x)
    nodes = layer.dtype == "float32" and not call and layer.options.apart(True) >= bool(lengths)
    form = form_of(cell) if nodes else None
    if lengths and form is None:
        size = graph("Squeeze", graph("Shape", x, end=1))
        t = graph("Range", graph.constant(0, np.int64), size, graph.constant(1, np.int64))
        ends = graph("Unsqueeze", lengths, graph.integers(1))
        valid = graph("Less", graph("Unsqueeze", t, graph.integers(1, 2)), ends)
        call["valid"] = graph("And", valid, call["valid"]) if "valid" in call else valid
    finals = []
    for k, learned in enumerate(weights):
        if form is None:
            x, final = _scans(graph, layer, learned, x, call, states[k])
        else:
            x, final = _node(graph, form, layer, learned, x, lengths, states[k], f"layer_{k}")
        finals.append(final)
    x = graph.linear(x, *readout) if readout else x
    results = [turned(x, 2), *(graph("Concat", *f, axis=0) for f in zip(*finals, strict=True))]
    names = ["output", *(f"final_{name}" for name in cell.state_names)]
    shapes = [(*steps, None), *[(None, "rows", None)] * len(cell.states)]
    shown = zip(names, shapes, strict=True)
    outputs = [helper.make_tensor_value_info(name, graph.kind, shape) for name, shape in shown]
    for name, result in zip(names, results, strict=True):
        graph.nodes.append(helper.make_node("Identity", [result], [name]))
    made = helper.make_graph(graph.nodes, cell.name, taken, outputs, graph.constants)
    opsets = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(made, opset_imports=opsets, ir_version=IR, producer_name="anycell")
    if path is not None:
        onnx.save(model, path)
    return model


def _seen(layer: Any, params: Any) -> tuple[Layer, list[dict[str, Array]], Sequence[Any], bool]:
    """A layer as a value, with its dtype; the weights of its layers, and weight and bias of its
    readout, if it has one; whether rows come first.
    """
    known, inner, readout = compression(layer), layer, tuple[Any, ...]()
    of_jax = isinstance(layer, getattr(sys.modules.get("anycell.jax"), "RNN", ()))
    if params is not None and not of_jax:
        refuse("params", type(params).__name__, "None but for a layer of JAX", "Leave it out.")
    if of_jax:
        record, arrays = layer._layer(), layer._params(params)
        count = len(record.options.reverse)
        learned = [of_layer(record.cell, arrays, k, count) for k in range(layer.num_layers)]
    elif known is None or not isinstance(layer, (known.layers, known.feedback)):
        expected = "a layer of anycell.torch, anycell.numpy, anycell.keras or anycell.jax"
        hint = "anycell.torch.accelerate and anycell.keras.accelerate make these of others."
        refuse("layer", type(layer).__name__, expected, hint, TypeError)
    elif getattr(getattr(layer, "forward_layer", layer), "go_backwards", False):
        hint = (
            "Put it in Bidirectional, behind one that goes forwards, or export one that goes "
            "forwards and reverse x."
        )
        refuse("layer", "go_backwards=True", "False", hint)
    else:
        inner = layer.layer if isinstance(layer, known.feedback) else layer
        record, learned = known.describe(inner), known.learned(inner)
    kind = str(array_of(learned[0]["weight_ih"]).dtype)
    if "int" in kind:
        hint = "Export the layer before, and quantize the model by ONNX Runtime's own tool."
        refuse("layer", "weights of 8 bits", "real numbers", hint)
    dtype = "float64" if "float64" in kind else "float32"
    if inner is not layer:
        exported = importlib.import_module(f"{known.framework}.exported")
        both: Any = opened(next(exported.parts(layer)), dtype)
        (_, record, learned, _), readout = both
    weights = [{n: numbers(w).astype(dtype) for n, w in named.items()} for named in learned]
    first = getattr(inner, "batch_first", True)  # of Keras, which says nothing
    return record._replace(dtype=dtype), weights, readout, first


def _scans(
    graph: Graph, layer: Layer, weights: Weights, x: str, call: Names, states: Names
) -> tuple[str, list[str]]:
    """A layer of any cell: its output, and its final states ``[D, rows, size]``."""
    outputs, finals = [], []
    for d, end in enumerate(ENDS[: len(layer.options.reverse)]):
        names = [name for name in layer.cell.learned if name + end in weights]
        mine = {n: graph("Gather", part, graph.constant(d, np.int64)) for n, part in states.items()}
        learned = {name: weights[name + end] for name in names}
        output, final = scan(graph, layer, d, learned, x, {**call, **mine})
        outputs.append(output)
        finals.append([graph("Unsqueeze", state, graph.integers(0)) for state in final])
    joined = [graph("Concat", *parts, axis=0) for parts in zip(*finals, strict=True)]
    return graph("Concat", *outputs, axis=2), joined


def _node(
    graph: Graph, form: Form, layer: Layer, weights: Weights, x: str, lengths: str, states: Names,
    title: str,
) -> tuple[str, list[str]]:  # fmt: skip
    """A layer of a cell that ONNX has: its output, and its final states ``[D, rows, size]``."""
    cell, ends = layer.cell, ENDS[: len(layer.options.reverse)]
    further = [l.weight for l in cell.linears if not l.recurrent]  # of a GRU that resets before

    def of(name: str, end: str) -> Array:
        array = weights.get(name + end, np.zeros_like(weights["weight_ih"][:, 0]))
        if name in cell.param_names:
            return array
        array = reordered(array, rows(cell), ORDERS[form.op])
        if further and name.endswith("hh"):
            inside = weights[further[0] + end]
            array[-len(inside) :] = inside if name == "weight_hh" else 0.0
        return array

    def constant(*names: str) -> str:
        return graph.constant([np.concatenate([of(name, end) for name in names]) for end in ends])

    attributes: dict[str, Any] = {"hidden_size": layer.size("H")}
    attributes["direction"] = "bidirectional" if len(ends) > 1 else "forward"
    if form.clip is not None:
        attributes["clip"] = form.clip
    if form.flag:
        attributes[FLAG[form.op]] = 1
    if form.activations != USUAL[form.op]:
        functions = [(FUNCTIONS[name], name, n) for name, *n in form.activations * len(ends)]
        attributes["activations"] = [name for _, name, _ in functions]
        attributes["activation_alpha"] = [n[0] for f, _, n in functions if f.alpha is not ...]
        attributes["activation_beta"] = [n[-1] for f, _, n in functions if f.beta is not ...]
    operands = [
        x, constant("weight_ih"), constant("weight_hh"),
        constant("bias_ih", "bias_hh") if "bias_ih" in weights else "",
        graph("Cast", lengths, to=TensorProto.INT32) if lengths else "",
        *(states.get(f"state {name}", "") for name in cell.state_names),
    ]  # fmt: skip
    if form.peepholes:
        operands.append(constant("p_i", "p_o", "p_f"))
    attributes = {name: value for name, value in attributes.items() if value != []}
    count = 1 + len(cell.states)
    y, *finals = graph(form.op, *operands, count=count, name=title, **attributes)
    if lengths and states:  # ONNX Runtime ends rows of length 0 in zeros, layers in their state
        empty = graph("Equal", lengths, graph.constant(0, np.int64))
        empty = graph("Unsqueeze", empty, graph.integers(1))
        pairs = zip(states.values(), finals, strict=True)
        finals = [graph("Where", empty, state, final) for state, final in pairs]
    side_by_side = graph("Transpose", y, perm=[0, 2, 1, 3])
    return graph("Reshape", side_by_side, graph.integers(0, 0, -1)), finals
