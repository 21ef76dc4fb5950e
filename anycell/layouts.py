"""Weights of one layer and direction, from any framework's layout to any other's.

    convert(keras_weights, "LSTM", "keras", "torch")

A layout is a table entry: the order of gates, and how its arrays hold them. ``read`` turns arrays
into ``Weights``, one matrix per gate, and ``write`` does the reverse; nothing else knows two
layouts at once.

| layout | arrays |
|---|---|
| torch | ``weight_ih_l0`` ``[G*H, in]``, ``weight_hh_l0`` ``[G*H, H]``, ``bias_ih_l0``, ``bias_hh_l0`` ``[G*H]`` |
| keras | ``kernel`` ``[in, G*H]``, ``recurrent_kernel`` ``[H, G*H]``, ``bias`` ``[G*H]``, or ``[2, G*H]`` of a GRU with the reset after the matmul |
| onnx | ``W`` ``[1, G*H, in]``, ``R`` ``[1, G*H, H]``, ``B`` ``[1, 2*G*H]``; LSTM: ``P`` ``[1, 3*H]`` (i o f); GRU: ``linear_before_reset``, the node's attribute, 0 or 1 |
| tf1 | LSTM: ``kernel`` ``[in + H, 4*H]``, ``bias``, ``w_i_diag``, ``w_f_diag``, ``w_o_diag``, and 1 added to f at run time; GRU: ``gates/kernel`` ``[in + H, 2*H]``, ``gates/bias``, ``candidate/kernel``, ``candidate/bias`` |
| block_v2 | ``BlockLSTMV2``: ``w`` ``[in + H, 4*H]``, ``b``, ``wci``, ``wcf``, ``wco`` |
| flax | ``nnx.OptimizedLSTMCell``: ``dense_i/kernel`` ``[in, 4*H]``, ``dense_h/kernel`` ``[H, 4*H]``, ``dense_h/bias``; ``nnx.GRUCell``: ``dense_i/kernel`` ``[in, 3*H]``, ``dense_i/bias``, ``dense_h/kernel`` ``[H, 3*H]`` |
| flax_lstm | ``nnx.LSTMCell``: ``ii/kernel``, ``if_/kernel``, ``ig/kernel``, ``io/kernel`` ``[in, H]``, ``hi/kernel``, ... ``[H, H]``, ``hi/bias``, ... |
| equinox | ``LSTMCell``: ``weight_ih`` ``[4*H, in]``, ``weight_hh`` ``[4*H, H]``, ``bias``; ``GRUCell``: ``weight_ih`` ``[3*H, in]``, ``weight_hh``, ``bias``, ``bias_n`` ``[H]`` |

Peepholes are ``p_i``, ``p_f``, ``p_o`` in the layouts that have no name for them.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from anycell.refusal import refuse

Array = npt.NDArray[Any]
Arrays = Mapping[str, npt.ArrayLike]
FORGET_BIAS = 1.0  # what TensorFlow 1 adds to f by default


@dataclass(frozen=True)
class Weights:
    """The weights of one direction of an LSTM or GRU layer, with gates stacked in a layout's order.

    Attributes:
        kernel: ``[G*H, in]``.
        recurrent: ``[G*H, H]``.
        bias: ``[G*H]``, of the input projection, or of both if they are only added; or None.
        recurrent_bias: ``[G*H]``, or None if there is no separate one.
        peepholes: ``[H]`` by gate (i f o), empty without peepholes.
        reset_after: whether the reset of a GRU comes after the matmul; None for an LSTM.
    """

    kernel: Array
    recurrent: Array
    bias: Array | None = None
    recurrent_bias: Array | None = None
    peepholes: Mapping[str, Array] = field(default_factory=dict)
    reset_after: bool | None = None

    @property
    def size(self) -> int:
        """The hidden size H."""
        return self.recurrent.shape[1]

    def joint_bias(self) -> Array:
        """The sum of both biases."""
        first, second = self.two_biases()
        if self.reset_after and second[-self.size :].any():  # the candidate is last in every layout
            raise ValueError(
                "the candidate's recurrent bias is not zero, and the reset multiplies it; expected "
                "a target with two biases: torch, keras, onnx or equinox."
            )
        return np.add(first, second)

    def two_biases(self) -> list[Array]:
        """The biases of the input and the recurrent projection, zeros for a missing one."""
        none = np.zeros_like(self.kernel[:, 0])
        return [none if bias is None else bias for bias in (self.bias, self.recurrent_bias)]

    def ordered(self, source: str, target: str) -> Weights:
        """The weights with their gates in another order."""
        before, after = source.split(), target.split()

        def turn(stacked: Array | None) -> Any:
            if stacked is None:
                return None
            blocks = dict(zip(before, np.split(stacked, len(before)), strict=True))
            return np.concatenate([blocks[gate] for gate in after])

        rest = turn(self.bias), turn(self.recurrent_bias), self.peepholes, self.reset_after
        return Weights(turn(self.kernel), turn(self.recurrent), *rest)


class Kind(NamedTuple):
    """The arrays in which a layout holds an LSTM or a GRU.

    Attributes:
        gates: the gates in the layout's order.
        shapes: the shape of each array; "|" separates alternatives. The first array gives H and in.
    """

    gates: str
    shapes: Mapping[str, str]


class Layout(NamedTuple):
    """The way in which a framework holds a kind of layer."""

    read: Callable[[Mapping[str, Array], bool], Weights]  # the flag is True for a GRU
    write: Callable[[Weights], dict[str, Array]]
    kinds: Mapping[str, Kind]


def convert(weights: Arrays, kind: str, source: str, target: str) -> dict[str, Array]:
    """Converts the arrays of one layer and direction to another layout.

    Args:
        weights: by name, as in the table above; biases and peepholes may be absent.
        kind: "LSTM" or "GRU".
        source, target: names of layouts.

    Returns:
        new arrays by name, of the same dtype.

    Raises:
        ValueError: for an unknown layout or kind; for arrays that are missing, unknown to the
            source, or of a wrong shape; for weights that the target cannot hold: peepholes, or a
            GRU with its reset on the other side of the matmul.
        TypeError: if ``weights`` is not a mapping, or a value not an array of real numbers.

    Example:
        >>> keras_weights = {"kernel": np.ones((3, 8)), "recurrent_kernel": np.ones((2, 8))}
        >>> found = convert(keras_weights, "LSTM", "keras", "torch")
        >>> {name: array.shape for name, array in found.items()}["weight_ih_l0"]
        (8, 3)
    """
    for role, name in (("source", source), ("target", target)):
        known = [
            n for n, layout in LAYOUTS.items() if isinstance(kind, str) and kind in layout.kinds
        ]
        if not isinstance(name, str) or name not in known:
            expected = f"one of {', '.join(known) or 'no layout: kinds are LSTM and GRU'}"
            refuse(role, f"{name!r} of kind {kind!r}", expected)
    if not isinstance(weights, Mapping):
        expected = "a dict, or another mapping, of arrays by name"
        refuse("weights", type(weights).__name__, expected, error=TypeError)
    arrays = {name: _numbers(name, value) for name, value in weights.items()}
    read, write = LAYOUTS[source], LAYOUTS[target]
    _check_shapes(arrays, read.kinds[kind].shapes)
    layer = read.read(arrays, kind == "GRU")
    converted = write.write(layer.ordered(read.kinds[kind].gates, write.kinds[kind].gates))
    return {name: np.array(array) for name, array in converted.items()}


# -- what is given ---------------------------------------------------------------------------------


def _numbers(name: str, value: npt.ArrayLike) -> Array:
    try:
        array = np.asarray(value)
    except MemoryError:
        raise
    except Exception as error:  # rows of unequal lengths, or a tensor that refuses
        raise TypeError(
            f"weights: given {name!r} as {type(value).__name__}, which is no array ({error}); "
            "expected an array of real numbers."
        ) from error
    # NumPy gives 16-bit numbers of other packages the kind "V", which records have too.
    if array.dtype.kind not in "fiu" and not (
        array.dtype.kind == "V" and not issubclass(array.dtype.type, np.void)
    ):
        given = f"{name!r} of dtype {array.dtype}"
        refuse("weights", given, "an array of real numbers", error=TypeError)
    return array


def _check_shapes(arrays: Mapping[str, Array], shapes: Mapping[str, str]) -> None:
    """Checks that the arrays belong to a layout, and to one layer."""
    first = next(iter(shapes))
    shape, sides = _take(arrays, first).shape, shapes[first].split()
    if unknown := [str(name) for name in arrays if name not in shapes]:
        expected = f"only {', '.join(shapes)}, of one layer and direction"
        refuse("weights", ", ".join(unknown), expected)
    units = inputs = 0
    if len(shape) == len(sides):
        parts = [(size, *_parts(side)) for size, side in zip(shape, sides, strict=True)]
        units = next(size // h for size, h, i, _ in parts if h and not i)
        inputs = next(size - h * units for size, h, i, _ in parts if i)
    for name in (name for name in shapes if name in arrays):
        alternatives, shape = [s.split() for s in shapes[name].split("|")], arrays[name].shape
        fitting = [
            tuple(h * units + i * inputs + more for h, i, more in map(_parts, alternative))
            for alternative in alternatives
        ]
        if shape not in fitting or units < 1 or inputs < 1:
            expected = " or ".join(f"({', '.join(alternative)})" for alternative in alternatives)
            sizes = f" with H = {units}, in = {inputs}, as in {first}" if name != first else ""
            refuse("weights", f"{name!r} of shape {shape}", expected + sizes)


def _parts(side: str) -> tuple[int, int, int]:
    """Counts H, in and 1 in a side of a shape, such as "in+4H"."""
    units = inputs = more = 0
    for term in side.split("+"):
        if term == "in":
            inputs += 1
        elif term.endswith("H"):
            units += int(term[:-1] or 1)
        else:
            more += int(term)
    return units, inputs, more


# -- parts -----------------------------------------------------------------------------------------


def _take(arrays: Mapping[str, Array], name: str) -> Array:
    if name not in arrays:
        given = ", ".join(sorted(map(str, arrays))) or "none"
        refuse("weights", given, f"{name} among them")
    return arrays[name]


def _peepholes(arrays: Mapping[str, Array], form: str) -> dict[str, Array]:
    named = {gate: arrays.get(form.format(gate)) for gate in "ifo"}
    return {gate: array for gate, array in named.items() if array is not None}


def _expect(w: Weights, after: tuple[bool | None, ...], peepholes: bool, name: str) -> None:
    """Checks that a layout can hold the weights."""
    if w.reset_after not in after:
        side = "after" if w.reset_after else "before"
        given = f"{name!r} for a GRU with the reset {side} the matmul"
        refuse("target", given, "a layout that holds such a GRU")
    if w.peepholes and not peepholes:
        given = f"{name!r} for weights with peepholes, but this layout has none"
        refuse("target", given, "a layout with peepholes")


# -- layouts ---------------------------------------------------------------------------------------


def _read_torch(a: Mapping[str, Array], gru: bool) -> Weights:
    biases = a.get("bias_ih_l0"), a.get("bias_hh_l0")
    rest = _peepholes(a, "p_{}_l0"), True if gru else None
    return Weights(_take(a, "weight_ih_l0"), _take(a, "weight_hh_l0"), *biases, *rest)


def _write_torch(w: Weights) -> dict[str, Array]:
    _expect(w, (None, True), True, "torch")
    first, second = w.two_biases()
    return {
        "weight_ih_l0": w.kernel,
        "weight_hh_l0": w.recurrent,
        "bias_ih_l0": first,
        "bias_hh_l0": second,
        **{f"p_{g}_l0": p for g, p in w.peepholes.items()},
    }


def _read_keras(a: Mapping[str, Array], gru: bool) -> Weights:
    bias = a.get("bias")
    two = bias is not None and bias.ndim == 2
    first, second = bias if bias is not None and two else (bias, None)
    rest = _peepholes(a, "p_{}"), two if gru else None
    return Weights(_take(a, "kernel").T, _take(a, "recurrent_kernel").T, first, second, *rest)


def _write_keras(w: Weights) -> dict[str, Array]:
    return {
        "kernel": w.kernel.T,
        "recurrent_kernel": w.recurrent.T,
        "bias": np.stack(w.two_biases()) if w.reset_after else w.joint_bias(),
        **{f"p_{g}": p for g, p in w.peepholes.items()},
    }


def _read_onnx(a: Mapping[str, Array], gru: bool) -> Weights:
    first, second = np.split(a["B"][0], 2) if "B" in a else (None, None)
    peepholes = dict(zip("iof", np.split(a["P"][0], 3), strict=True)) if "P" in a else {}
    after = None
    if gru:
        after = bool(_take(a, "linear_before_reset"))
        if a["linear_before_reset"] not in (0, 1):
            refuse("weights", f"linear_before_reset = {a['linear_before_reset']}", "0 or 1")
    return Weights(_take(a, "W")[0], _take(a, "R")[0], first, second, peepholes, after)


def _write_onnx(w: Weights) -> dict[str, Array]:
    biases = np.concatenate(w.two_biases())
    arrays = {"W": w.kernel[None], "R": w.recurrent[None], "B": biases[None]}
    if w.peepholes:
        none = np.zeros_like(next(iter(w.peepholes.values())))
        arrays["P"] = np.concatenate([w.peepholes.get(g, none) for g in "iof"])[None]
    if w.reset_after is not None:  # an attribute of the node
        arrays["linear_before_reset"] = np.asarray(int(w.reset_after))
    return arrays


def _joint(w: Weights) -> Array:
    """Stacks both kernels: ``[in + H, G*H]``."""
    return np.concatenate([w.kernel.T, w.recurrent.T])


def _read_joint(joint: Array, size: int, *more: Any) -> Weights:
    """Splits a kernel ``[in + H, G*H]``, whose H is ``size``."""
    return Weights(joint[:-size].T, joint[-size:].T, *more)


def _read_tf1(a: Mapping[str, Array], gru: bool) -> Weights:
    if not gru:
        return _shifted(_read_block(a, gru, ("kernel", "bias", "w_{}_diag")), FORGET_BIAS)
    last = _take(a, "candidate/kernel")
    joint = np.concatenate([_take(a, "gates/kernel"), last], axis=1)
    bias = np.concatenate([_take(a, "gates/bias"), _take(a, "candidate/bias")])
    return _read_joint(joint, last.shape[1], bias, None, {}, False)


def _write_tf1(w: Weights) -> dict[str, Array]:
    _expect(w, (None, False), True, "tf1")
    if w.reset_after is None:
        return _write_block(_shifted(w, -FORGET_BIAS), ("kernel", "bias", "w_{}_diag"))
    joint, bias, cut = _joint(w), w.joint_bias(), 2 * w.size
    arrays = {"gates/kernel": joint[:, :cut], "gates/bias": bias[:cut]}
    return arrays | {"candidate/kernel": joint[:, cut:], "candidate/bias": bias[cut:]}


_V2 = ("w", "b", "wc{}")


def _read_block(a: Mapping[str, Array], gru: bool, names: tuple[str, str, str] = _V2) -> Weights:
    kernel, bias, peephole = names
    joint = _take(a, kernel)
    return _read_joint(joint, joint.shape[1] // 4, a.get(bias), None, _peepholes(a, peephole))


def _write_block(w: Weights, names: tuple[str, str, str] = _V2) -> dict[str, Array]:
    kernel, bias, peephole = names
    arrays = {kernel: _joint(w), bias: w.joint_bias()}
    return arrays | {peephole.format(g): p for g, p in w.peepholes.items()}


def _shifted(w: Weights, by: float) -> Weights:
    """Adds a number to the bias of f, the third gate of TensorFlow 1."""
    bias, f = w.joint_bias(), slice(2 * w.size, 3 * w.size)
    bias[f] += bias.dtype.type(by)
    return Weights(w.kernel, w.recurrent, bias, peepholes=w.peepholes)


def _read_flax(a: Mapping[str, Array], gru: bool) -> Weights:
    bias, after = a.get(_FLAX_BIAS[gru]), True if gru else None
    kernels = _take(a, "dense_i/kernel").T, _take(a, "dense_h/kernel").T
    return Weights(*kernels, bias, reset_after=after)


def _write_flax(w: Weights) -> dict[str, Array]:
    _expect(w, (None, True), False, "flax")
    arrays = {"dense_i/kernel": w.kernel.T, "dense_h/kernel": w.recurrent.T}
    return arrays | {_FLAX_BIAS[w.reset_after is not None]: w.joint_bias()}


_FLAX_BIAS = "dense_h/bias", "dense_i/bias"  # of an LSTM, of a GRU
_OF_X, _OF_H = ("ii", "if_", "ig", "io"), ("hi", "hf", "hg", "ho")


def _read_flax_lstm(a: Mapping[str, Array], gru: bool) -> Weights:
    kernel, recurrent = (
        np.concatenate([_take(a, f"{name}/kernel").T for name in names]) for names in (_OF_X, _OF_H)
    )
    none = np.zeros_like(recurrent[0])
    return Weights(
        kernel, recurrent, np.concatenate([a.get(f"{name}/bias", none) for name in _OF_H])
    )


def _write_flax_lstm(w: Weights) -> dict[str, Array]:
    _expect(w, (None,), False, "flax_lstm")
    arrays: dict[str, Array] = {}
    for names, kernel in ((_OF_X, w.kernel), (_OF_H, w.recurrent)):
        parts = zip(names, np.split(kernel, 4), strict=True)
        arrays |= {f"{name}/kernel": part.T for name, part in parts}
    biases = zip(_OF_H, np.split(w.joint_bias(), 4), strict=True)
    return arrays | {f"{name}/bias": bias for name, bias in biases}


def _read_equinox(a: Mapping[str, Array], gru: bool) -> Weights:
    weights, second = (_take(a, "weight_ih"), _take(a, "weight_hh")), None
    if "bias_n" in a:
        second = np.concatenate([np.zeros_like(weights[0][: -a["bias_n"].size, 0]), a["bias_n"]])
    return Weights(*weights, a.get("bias"), second, reset_after=True if gru else None)


def _write_equinox(w: Weights) -> dict[str, Array]:
    _expect(w, (None, True), False, "equinox")
    arrays = {"weight_ih": w.kernel, "weight_hh": w.recurrent}
    if w.reset_after is None:
        return arrays | {"bias": w.joint_bias()}
    first, second = w.two_biases()
    added = np.where(np.arange(first.size) < 2 * w.size, second, 0)  # the reset multiplies the rest
    return arrays | {"bias": first + added, "bias_n": second[-w.size :]}


def _kinds(shapes: Mapping[str, str], peepholes: str = "", **gates: str) -> dict[str, Kind]:
    """Makes each ``Kind``: in shapes G is the number of gates, in ``peepholes`` {} is a gate."""
    kinds = {}
    for kind, order in gates.items():
        count = str(len(order.split()))
        named = {name: shape.replace("G", count) for name, shape in shapes.items()}
        if peepholes and kind == "LSTM":
            named |= {peepholes.format(gate): "H" for gate in "ifo"}
        kinds[kind] = Kind(order, named)
    return kinds


_ONNX = {"W": "1 GH in", "R": "1 GH H", "B": "1 GH+GH"}
_TORCH = {"weight_ih_l0": "GH in", "weight_hh_l0": "GH H", "bias_ih_l0": "GH", "bias_hh_l0": "GH"}
_TF1_GRU = {
    "gates/kernel": "in+H 2H", "gates/bias": "2H",
    "candidate/kernel": "in+H H", "candidate/bias": "H",
}  # fmt: skip
_FLAX = {"dense_i/kernel": "in GH", "dense_h/kernel": "H GH"}
_FLAX_LSTM = {f"{name}/kernel": "in H" for name in _OF_X} | {
    f"{name}/{part}": shape for name in _OF_H for part, shape in (("kernel", "H H"), ("bias", "H"))
}
_EQUINOX = {"weight_ih": "GH in", "weight_hh": "GH H", "bias": "GH"}
_KERAS = {"kernel": "in GH", "recurrent_kernel": "H GH"}

LAYOUTS = {
    "torch": Layout(
        _read_torch, _write_torch, _kinds(_TORCH, "p_{}_l0", LSTM="i f g o", GRU="r z n")
    ),
    "keras": Layout(
        _read_keras,
        _write_keras,
        _kinds({**_KERAS, "bias": "GH"}, "p_{}", LSTM="i f g o")
        | _kinds({**_KERAS, "bias": "GH|2 GH"}, GRU="z r n"),
    ),
    "onnx": Layout(
        _read_onnx,
        _write_onnx,
        _kinds({**_ONNX, "P": "1 3H"}, LSTM="i o f g")
        | _kinds({**_ONNX, "linear_before_reset": ""}, GRU="z r n"),
    ),
    "tf1": Layout(
        _read_tf1,
        _write_tf1,
        _kinds({"kernel": "in+H GH", "bias": "GH"}, "w_{}_diag", LSTM="i g f o")
        | _kinds(_TF1_GRU, GRU="r z n"),
    ),
    "block_v2": Layout(
        _read_block, _write_block, _kinds({"w": "in+H GH", "b": "GH"}, "wc{}", LSTM="i f g o")
    ),
    "flax": Layout(
        _read_flax,
        _write_flax,
        _kinds({**_FLAX, _FLAX_BIAS[0]: "GH"}, LSTM="i f g o")
        | _kinds({**_FLAX, _FLAX_BIAS[1]: "GH"}, GRU="r z n"),
    ),
    "flax_lstm": Layout(_read_flax_lstm, _write_flax_lstm, _kinds(_FLAX_LSTM, LSTM="i f g o")),
    "equinox": Layout(
        _read_equinox,
        _write_equinox,
        _kinds(_EQUINOX, LSTM="i f g o") | _kinds({**_EQUINOX, "bias_n": "H"}, GRU="r z n"),
    ),
}
