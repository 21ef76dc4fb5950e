"""Recurrent nodes of ONNX, and models of such nodes, as layers and what it takes to call them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from anycell.lang.namespaces import namespace
from anycell.layer.signature import place
from anycell.onnx.cells import FLAGS, FUNCTIONS, ORDERS, USUAL, Form, reordered, rows
from anycell.refusal import refuse

Array = npt.NDArray[Any]
OLDEST = 7  # the opset from which on recurrent nodes are as they are
DIRECTIONS = {b"forward": (False,), b"reverse": (True,), b"bidirectional": (False, True)}


def load(model: Any, framework: str = "torch") -> Any:
    """Makes layers of the LSTM, GRU and RNN nodes of an ONNX model, with their weights.

    Args:
        model: a path, the bytes of a file, or an ``onnx.ModelProto``, of opset 7 or newer.
        framework: "torch" or "numpy": whose layers to make.

    Returns:
        a program: a ``torch.nn.Module`` with the layers' parameters, or an object of NumPy's.

        ``program(*inputs, **inputs)`` takes the inputs of the model, in order or by name, and
        returns its outputs, a tuple if there are several. In NumPy ONNX's own evaluator runs all
        other nodes, but those with graphs inside. In PyTorch only what lays arrays out may lie
        between recurrent nodes and behind them, and readouts: see ``anycell.torch.onnx.OPERATORS``;
        numbers of such nodes are not learned.

        ``program[name]`` is a node, by its name, or its first output's where it has none;
        ``program.plan.names`` lists them. It is called as ONNX calls it,
        ``(X, sequence_lens=None, initial_h=None, initial_c=None)``, in the node's ``layout``, and
        returns ``(Y, Y_h)``, of an LSTM ``(Y, Y_h, Y_c)``, each as ONNX defines it.

        ``program[name][0]`` is the node's layer, an ``RNN`` of ``[T, B, input]``, with a cell of
        ``anycell.cells`` where one fits. A node of direction "reverse" has a layer that gets x
        reversed. If directions have other activations, there is a layer for each, ``[0]`` and
        ``[1]``.

    As in ONNX Runtime, ``clip`` bounds the arguments of gates, not that of an LSTM's last
    activation; ``input_forget`` makes f = 1 - i; and ``activation_alpha`` has numbers for those
    activations that take one. Without it, ``ThresholdedRelu`` takes 1.0, ONNX's default, where ONNX
    Runtime takes 0. A row of length 0 ends in its initial state, which ONNX leaves open
    (in ONNX Runtime it ends in zeros). A ``Scan``, as ``export`` writes it, is not read.

    Raises:
        ValueError, TypeError: with what was given, what is expected, and what to do.

    Example:
        >>> layer = anycell.numpy.GRU(3, 8, seed=0)
        >>> again = load(export(layer), "numpy")
        >>> x = np.zeros((5, 2, 3), np.float32)
        >>> output, h = again(x)
        >>> np.allclose(output, layer(x)[0])
        True
    """
    if framework not in ("torch", "numpy"):
        refuse("framework", repr(framework), "'torch' or 'numpy'")
    frontend = importlib.import_module(f"anycell.{framework}.onnx")
    graph, opset, constants = _checked(model)
    steps, parts = list[tuple[onnx.NodeProto, str]](), dict[str, Any]()
    for node in graph.node:
        name = ""
        if node.op_type in ORDERS and node.domain in _ONNX:
            known = {*parts, ""}
            name = next((n for n in (node.name, *node.output) if n not in known), f"{len(parts)}")
            parts[name] = _node(node, f"{node.op_type} node {name!r}", constants, frontend)
        elif {*node.input} <= constants.keys():
            with contextlib.suppress(Exception):  # what cannot be computed now is left
                values = [constants[name] for name in node.input]
                constants |= zip(node.output, _run(node, opset, values, framework), strict=True)
                continue
        steps.append((node, name))
    if not parts:
        kinds = ", ".join(sorted({node.op_type for node in graph.node})) or "no nodes"
        hint = "Nodes inside of Scan, Loop, If and functions are not read."
        refuse("model", kinds, "a graph with LSTM, GRU or RNN nodes", hint)
    inputs = [i.name for i in graph.input if i.name not in constants]
    outputs = [output.name for output in graph.output]
    plan = Chain([*parts], steps, constants, inputs, outputs, opset, framework)
    return frontend.Program(plan, parts.values())


def _checked(model: Any) -> tuple[onnx.GraphProto, int, dict[str, Array]]:
    """Graph, opset and constants of a model that ONNX's checker accepts."""
    if not isinstance(model, (str, bytes, os.PathLike, onnx.ModelProto)):
        expected = "a path, the bytes of a file, or an onnx.ModelProto"
        refuse("model", type(model).__name__, expected, error=TypeError)
    try:
        if not isinstance(model, onnx.ModelProto):
            read: Any = onnx.load_from_string if isinstance(model, bytes) else onnx.load
            model = read(model)
        onnx.checker.check_model(model)
        constants = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    except OSError:
        raise
    except Exception as error:  # of protobuf, of the checker, of data that does not decode
        (reason, *_) = str(error).strip().splitlines() or [type(error).__name__]
        given = f"one that ONNX's checker refuses ({reason})"
        raise ValueError(f"model: given {given}; expected a valid one. Export it anew.") from error
    opset = max((e.version for e in model.opset_import if e.domain in _ONNX), default=0)
    if opset < OLDEST:
        hint = "Convert it with onnx.version_converter."
        refuse("model", f"opset {opset}", f"opset {OLDEST} or newer", hint)
    return model.graph, opset, constants


_ONNX = "", "ai.onnx"  # the domain of ONNX's own operators
INPUTS = "X W R B sequence_lens initial_h initial_c P".split()  # of an LSTM; others have fewer
CALLED = "X", "sequence_lens", "initial_h", "initial_c"  # of these, what is no constant


def _node(node: onnx.NodeProto, title: str, constants: Mapping[str, Array], frontend: Any) -> Any:
    """A recurrent node: its layers, and how they are called."""
    op, known = node.op_type, dict[str, Any](direction=b"forward", layout=0, clip=None)
    known |= {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    reverse, clip, layout = DIRECTIONS.get(known["direction"]), known["clip"], known["layout"]
    for name, right, expected in (
        ("direction", reverse, "one of forward, reverse, bidirectional"),
        ("layout", layout in (0, 1), "0 or 1"),
        ("clip", clip is None or clip > 0, "a number above 0"),
    ):
        if not right:
            refuse(title, f"{name}={known[name]!r}", expected)
    assert reverse is not None
    named = {name: given for name, given in zip(INPUTS, node.input, strict=False) if given}
    arrays: dict[str, Any] = {n: constants.get(named[n]) for n in "WRBP" if n in named}
    _check(title, op, arrays, len(reverse), known.get("hidden_size"))
    usual = [name for name, *_ in USUAL[op]] * len(reverse)
    names = [name.decode(errors="replace") for name in known.get("activations", ())] or usual
    if len(names) != len(usual):
        refuse(title, f"activations={names}", f"{len(usual)} names")
    numbers = [iter(known.get(f"activation_{number}", ())) for number in ("alpha", "beta")]
    functions = [_activation(title, name, *numbers) for name in names]
    further, size = (clip, bool(known.get(FLAGS[op])), "P" in arrays), len(USUAL[op])
    forms = [Form(op, tuple(functions[i : i + size]), *further) for i in range(0, len(names), size)]
    alike = len(reverse) == 2 and forms[0] == forms[1]
    options = {"bidirectional": alike, "bias": "B" in arrays, "input_size": arrays["W"].shape[2]}
    options["hidden_size"] = arrays["R"].shape[2]
    learned = [_learned(form, arrays, d) for d, form in enumerate(forms)]
    if alike:
        learned = [learned[0] | {f"{name}_reverse": a for name, a in learned[1].items()}]
    layers = [
        frontend.layer(form.cell(), {place(n, 0): a for n, a in named.items()}, **options)
        for form, named in zip(forms, learned, strict=False)
    ]
    return frontend.Program(Node(layout, (False,) if alike else reverse), layers)


def _check(title: str, op: str, arrays: Mapping[str, Any], directions: int, size: Any) -> None:
    """Checks the constants of a node."""
    for name, array in arrays.items():
        if array is None:
            hint = "Export the model with its weights in it."
            refuse(title, f"{name}, which is not known before it runs", "a constant", hint)
    units, width = (arrays[n].shape[-1] if arrays[n].ndim == 3 else 0 for n in "RW")
    count = len(ORDERS[op]) * units
    shapes = {"R": (count, size or units), "W": (count, width), "B": (2 * count,)}
    shapes["P"] = (3 * units,)
    for name, array in arrays.items():
        kind, shape = array.dtype, (directions, *shapes[name])
        if array.shape != shape or 0 in shape or kind.kind != "f" or kind != arrays["W"].dtype:
            expected = f"{list(shape)} of real numbers, of the dtype of W"
            refuse(title, f"{name}, {kind} {list(array.shape)}", expected)


def _activation(title: str, given: str, alphas: Iterator[float], betas: Iterator[float]) -> Any:
    """An activation with its numbers, the next ones of each list."""
    name = {name.lower(): name for name in FUNCTIONS}.get(given.lower(), "")
    if not name:
        refuse(title, f"the activation {given!r}", f"one of {', '.join(FUNCTIONS)}")
    function = FUNCTIONS[name]
    pairs = (alphas, function.alpha), (betas, function.beta)
    activation = name, *(next(given, usual) for given, usual in pairs if usual is not ...)
    if None in activation:
        refuse(title, f"{name} without its numbers", "activation_alpha and activation_beta")
    return activation


def _learned(form: Form, arrays: Mapping[str, Array], d: int) -> dict[str, Array]:
    """The weights of a direction, by the names of ``layer.signature``."""
    cell, parts = form.cell(), {"weight_ih": arrays["W"][d], "weight_hh": arrays["R"][d]}
    further = [l.weight for l in cell.linears if not l.recurrent]  # of a GRU that resets before
    learned = dict.fromkeys(further, parts["weight_hh"][-parts["weight_hh"].shape[1] :])
    if "B" in arrays:
        parts["bias_ih"], parts["bias_hh"] = np.split(arrays["B"][d].copy(), 2)
        for weight in learned.values():
            parts["bias_ih"][-len(weight) :] += parts["bias_hh"][-len(weight) :]
    learned |= {name: reordered(a, ORDERS[form.op], rows(cell)) for name, a in parts.items()}
    peepholes = np.split(arrays["P"][d], 3) if "P" in arrays else ()
    return learned | dict(zip(("p_i", "p_o", "p_f"), peepholes, strict=False))


@dataclass
class Node:
    """The call of a recurrent node, as ONNX defines it; its parts are layers.

    Attributes:
        layout: 1 if the batch is the first axis, of states too.
        reverse: for each layer whether it gets x reversed.
    """

    layout: int
    reverse: Sequence[bool]

    def index(self, number: int) -> int:
        """The place of a part."""
        return number

    def __call__(
        self, layers: Sequence[Any], X: Any, sequence_lens: Any = None, initial_h: Any = None,
        initial_c: Any = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Returns Y, Y_h and, of an LSTM, Y_c."""
        xp, names = namespace(X), layers[0].cell.state_names

        def turned(array: Any) -> Any:
            return xp.swapaxes(array, 0, 1) if self.layout else array

        if X.ndim != 3:
            shape = "[batch, time, input_size]" if self.layout else "[time, batch, input_size]"
            refuse("X", f"shape {list(X.shape)}", shape)
        x, states = turned(X), [initial_h, initial_c][: len(names)]
        if sequence_lens is not None and np.shape(sequence_lens) != (x.shape[1],):
            shape = f"shape {list(np.shape(sequence_lens))}"
            refuse("sequence_lens", shape, f"[{x.shape[1]}], a length for each row")
        ends = sequence_lens if sequence_lens is None else [int(length) for length in sequence_lens]
        known = [turned(xp.array(state, X)) for state in states if state is not None]
        if len(known) == 1 < len(names):
            zeros = xp.zeros_like(known[0])
            known = [zeros, *known] if initial_h is None else [*known, zeros]
        outputs, finals, d = [], [], 0
        for layer, reverse in zip(layers, self.reverse, strict=True):
            part = slice(d, d := d + 1 + layer.bidirectional)
            place: Any = _backwards(x, ends) if reverse else slice(None)
            state = tuple(state[part] for state in known)
            given = (state if len(names) > 1 else state[0]) if state else None
            output, final = layer(x[place], given, lengths=ends)
            sides = 1 + layer.bidirectional
            width = output.shape[2] // sides
            outputs.append(xp.reshape(output[place], (*x.shape[:2], sides, width)))
            finals.append(final if len(names) > 1 else (final,))
        y = xp.concatenate(outputs, 2)
        y = xp.swapaxes(y, 0, 1) if self.layout else xp.swapaxes(y, 1, 2)
        return y, *(turned(xp.concatenate(parts)) for parts in zip(*finals, strict=True))


def _backwards(x: Any, lengths: Sequence[int] | None) -> Any:
    """The index that reverses each row of ``[T, B, .]`` within its length."""
    steps, rows, _ = x.shape
    ends, t = np.minimum(steps if lengths is None else lengths, steps), np.arange(steps)[:, None]
    return np.where(t < ends, ends - 1 - t, t), np.arange(rows)


@dataclass
class Chain:
    """The call of a model; its parts are the recurrent nodes of these names.

    Attributes:
        steps: all nodes that run, with the name of the part, or "" of another operator.
        constants: by name.
        inputs, outputs: the names of what the model takes and returns.
        framework: whose arrays it takes.
    """

    names: list[str]
    steps: list[tuple[onnx.NodeProto, str]]
    constants: dict[str, Array]
    inputs: list[str]
    outputs: list[str]
    opset: int
    framework: str

    def index(self, name: str) -> int:
        """The place of a part."""
        if name not in self.names:
            refuse("name", repr(name), f"one of {', '.join(self.names)}", error=KeyError)
        return self.names.index(name)

    def __call__(self, parts: Sequence[Any], *inputs: Any, **named: Any) -> Any:
        """Returns the outputs of the model, a tuple if there are several."""
        feeds = dict(zip(self.inputs, inputs, strict=False)) | named
        if {*feeds} != {*self.inputs} or len(inputs) + len(named) != len(feeds):
            shown = ", ".join([f"{len(inputs)} in order", *named])
            refuse("inputs", shown, ", ".join(self.inputs), "Pass each once.", TypeError)
        values: dict[str, Any] = {**self.constants, **feeds}
        for node, name in self.steps:
            taken = [values[name] if name else None for name in node.input]
            if name:
                arguments = dict(zip(INPUTS, taken, strict=False))
                results = parts[self.index(name)](*map(arguments.get, CALLED))
            else:
                results = _run(node, self.opset, taken, self.framework)
            values |= zip(node.output, results, strict=False)
        outputs = tuple(values[name] for name in self.outputs)
        return outputs if len(outputs) > 1 else outputs[0]


_FLAT = "Hardmax", "LogSoftmax", "Softmax"  # before opset 13, of all axes from ``axis`` on


def _run(node: onnx.NodeProto, opset: int, inputs: Sequence[Any], framework: str) -> Sequence[Any]:
    """The outputs of another operator: of NumPy's arrays by ONNX's own evaluator."""
    if opset < 13 and node.op_type in _FLAT:
        (a,), axis = inputs, next((attribute.i for attribute in node.attribute), 1)
        last = helper.make_node(node.op_type, node.input, node.output)
        kept = axis % a.ndim
        flat = a.reshape(*a.shape[:kept], math.prod(a.shape[kept:]))  # also of no rows
        return [result.reshape(a.shape) for result in _run(last, 13, [flat], framework)]
    types = (np.ndarray, np.generic, type(None))
    foreign = [type(value).__name__ for value in inputs if not isinstance(value, types)]
    if not foreign:
        feeds = {name: value for name, value in zip(node.input, inputs, strict=True) if name}
        return list(_evaluator(node.SerializeToString(), opset).run(None, feeds, {}))
    frontend = importlib.import_module(f"anycell.{framework}.onnx")
    if node.op_type not in frontend.OPERATORS:
        hint = "Load it for NumPy, or call its recurrent nodes: program[name](X)."
        known = ", ".join(frontend.OPERATORS) or "arrays of NumPy"
        refuse(f"{node.op_type} node", foreign[0], known, hint)
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type == "Split":
        attributes["num_outputs"] = len(node.output)
    results = frontend.operator(node.op_type, inputs, **attributes)
    return results if isinstance(results, (tuple, list)) else (results,)


@functools.lru_cache(maxsize=1024)
def _evaluator(node: bytes, opset: int) -> ReferenceEvaluator:
    """An evaluator of a node, in a function: it takes a node alone for one of the newest opset."""
    one = onnx.NodeProto.FromString(node)
    opsets = [helper.make_opsetid(one.domain, opset if one.domain in _ONNX else 1)]
    inputs = [name for name in one.input if name]
    return ReferenceEvaluator(helper.make_function("", "node", inputs, one.output, [one], opsets))
