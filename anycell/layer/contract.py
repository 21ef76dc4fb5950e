"""The contract of memory: what an array of a call must be before a kernel gets its address.

Kernels do no bounds checks. So every array of every call passes here once, whichever frontend it
comes from, and nothing below asks again:

    array                                      shape                        strides
    x                                          [T, B, I], gates [T, B, G*H] last axis dense
    weight_ih, weight_hh, weight_<name>        of the layer                 dense rows or columns
    bias_ih, bias_hh, bias_<name>, parameters  [G*H], ..., [H]              dense
    state, d_state                             [B, size]                    any: the host copies it
    reset_state                                [size] or [B, size]          contiguous
    static, recurrent_mask                     [B, H], [B or G, B, size]    contiguous
    mask, resets                               [T, B], bool or uint8        contiguous
    d_output                                   [T, B, D*size]               last axis dense
    what the forward pass kept                 see ``Saved``                contiguous

All but masks and resets have the dtype of the plan. All lie on the host's device, begin at a
multiple of an element's size, and have strides of whole elements, which may be 0 or negative. An
array of other strides or alignment is copied. One of another shape, dtype or device is an error:
it is not the array that the call describes.

``ANYCELL_CHECK=1`` holds the addresses that kernels get against all this once more, at the native
call; see ``anycell/engines/cpu/check.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from anycell.lang.cell import RECURRENT
from anycell.layer.arguments import Array, Arrays, Options, Saved, Weights
from anycell.plan import Plan

Shape = tuple[int, ...]


class _Shapes(NamedTuple):
    """Shapes that follow from the plan alone.

    Attributes:
        gates: G*H.
        hh: of the recurrent weight; None where there is none.
        linears: name, shape of the weight and of the bias of each further matmul.
        states: name and size of each state.
    """

    gates: int
    hh: Shape | None
    linears: tuple[tuple[str, Shape, Shape], ...]
    states: tuple[tuple[str, int], ...]


@functools.lru_cache(maxsize=512)
def _shapes(plan: Plan) -> _Shapes:
    cell, size = plan.cell, plan.sizes
    gates, weights = len(cell.gates) * plan.hidden_size, {l.weight: l for l in cell.linears}
    return _Shapes(
        gates,
        (gates, size[cell.states[0].size]) if weights.pop(RECURRENT, None) else None,
        tuple(
            (name, l.shape(size), (len(l.declared) * size[l.out_size],))
            for name, l in weights.items()
        ),
        tuple((s.name, size[s.size]) for s in cell.states),
    )


# -- the calls -------------------------------------------------------------------------------------


def entering(
    host: Arrays,
    plan: Plan,
    x: Array,
    weights: Sequence[Weights],
    options: Options,
    read: bool = True,
) -> tuple[Array, list[Weights], Options]:
    """What a pass takes, fit for its kernel.

    Args:
        read: whether a kernel may read x.

    Raises:
        ValueError, TypeError: naming the array, what was given and what was expected.
    """
    shapes, shape = _shapes(plan), tuple(x.shape)
    projected = weights[0].ih is None
    if len(shape) != 3 or (projected and shape[2] != shapes.gates):
        last = f"{shapes.gates} projected gates" if projected else "input size"
        raise ValueError(f"x: given shape {shape}; expected [steps, rows, {last}].")
    x = (_rows if read else _whole)(host, "x", x, shape)
    steps, batch, inputs = shape
    fitted = [_direction(host, plan, w, inputs, batch) for w in weights]
    mask, resets = options.mask, options.resets
    if mask is not None:
        options = replace(options, mask=_flags(host, "mask", mask, (steps, batch)))
    if resets is not None:
        options = replace(options, resets=_flags(host, "resets", resets, (steps, batch)))
    return x, fitted, options


def arriving(
    host: Arrays,
    plan: Plan,
    saved: Saved,
    dy: Array | None,
    dfinal: Sequence[Sequence[Array | None]],
    *,
    segment: int,
    width: int,
    keeps: Callable[[Plan, int], bool],
) -> tuple[Saved, Array | None, Sequence[Sequence[Array | None]]]:
    """What a backward pass takes besides, fit for its kernel.

    Args:
        saved: its x, weights and options are fit already.
        segment: steps of which it needs all at once; fewer than all where it has checkpoints.
        width: of a row of ``Saved.values``.
        keeps: whether the forward pass keeps the sequence of a state, without checkpoints.

    Raises:
        ValueError, TypeError: as ``entering``.
    """
    weights, (steps, batch, _), states = saved.weights, saved.x.shape, _shapes(plan).states
    output, borders = len(weights) * states[0][1], segment < steps
    hidden, sequence, values = steps + 1 + any(w.reverse for w in weights), steps + 1, steps
    if borders:
        hidden, sequence, values = -(-steps // segment), -(-steps // segment), 0
    kept = [i > 0 and (borders or keeps(plan, i)) for i in range(len(states))]
    restoring = () if saved.options.resets is None else weights
    saved = replace(
        saved,
        hidden=_dense(host, "hidden states", saved.hidden, (hidden, batch, output)),
        states=[
            [
                _dense(host, f"states {name!r}", array, (sequence, batch, size), wide=borders)
                if keep
                else None
                for keep, (array, (name, size)) in zip(
                    kept, _pairs("states", sequences, states), strict=True
                )
            ]
            for sequences, _ in _pairs("states", saved.states, weights)
        ],
        values=[
            _dense(host, "saved values", array, (values, batch, width))
            for array, _ in _pairs("saved values", saved.values, weights)
        ],
        reset=[
            _restored(host, plan, arrays, batch)
            for arrays, _ in _pairs("reset_state", saved.reset, restoring)
        ],
    )
    if dy is not None:
        dy = _rows(host, "d_output", dy, (steps, batch, output))
    final = [
        [
            None if d is None else _whole(host, f"d_state {name!r}", d, (batch, size))
            for d, (name, size) in _pairs("d_state", gradients, states)
        ]
        for gradients, _ in _pairs("d_state", dfinal, weights)
    ]
    return saved, dy, final


def learned(host: Arrays, plan: Plan, w: Weights, inputs: int) -> dict[str, Any]:
    """What one direction learns, fit for a kernel, by the names of ``Weights``.

    Args:
        inputs: the last axis of x.

    Raises:
        ValueError, TypeError: as ``entering``.
    """
    shapes, names = _shapes(plan), plan.cell.param_names
    end, unit, gates = "_reverse" if w.reverse else "", (plan.hidden_size,), (shapes.gates,)
    linears: dict[str, Array | None] = {}
    for name, shape, length in shapes.linears:
        weight, bias = w.linears.get(name), w.linears.get(f"{name}_bias")
        linears[name] = _matrix(host, f"weight_{name}{end}", weight, shape)
        linears[f"{name}_bias"] = _optional(host, f"bias_{name}{end}", bias, length)
    ih, hh = w.ih, None
    if ih is not None:
        ih = _matrix(host, f"weight_ih{end}", ih, (shapes.gates, inputs))
    if shapes.hh is not None:
        hh = _matrix(host, f"weight_hh{end}", w.hh, shapes.hh)
    return {
        "ih": ih,
        "hh": hh,
        "bias_ih": _optional(host, f"bias_ih{end}", w.bias_ih, gates),
        "bias_hh": _optional(host, f"bias_hh{end}", w.bias_hh, gates),
        "params": [
            _dense(host, f"{name}{end}", value, unit)
            for value, name in _pairs("parameters", w.params, names)
        ],
        "linears": linears,
    }


def _direction(host: Arrays, plan: Plan, w: Weights, inputs: int, batch: int) -> Weights:
    """All arrays of one direction, for so many rows."""
    states, cell = _shapes(plan).states, plan.cell
    static, mask, reset = w.static, w.recurrent_mask, w.reset
    if cell.static is not None or static is not None:
        shape = () if cell.static is None else (batch, plan.hidden_size)
        static = _dense(host, "static", static, shape)
    if mask is not None:
        rows = batch, states[0][1]
        mask = _dense(host, "recurrent_mask", mask, rows, (len(cell.gates), *rows))
    return Weights(
        **learned(host, plan, w, inputs),
        initial=[
            value
            if isinstance(value, float)
            else _whole(host, f"state {name!r}", value, (batch, size))
            for value, (name, size) in _pairs("state", w.initial, states)
        ],
        reset=None if reset is None else _restored(host, plan, reset, batch),
        static=static,
        recurrent_mask=mask,
        reverse=w.reverse,
    )


def _restored(host: Arrays, plan: Plan, values: Sequence[Array], batch: int) -> list[Array]:
    """What resets restore."""
    return [
        _dense(host, f"reset_state {name!r}", value, (size,), (batch, size))
        for value, (name, size) in _pairs("reset_state", values, _shapes(plan).states)
    ]


# -- one array: checked, and copied where its strides or its alignment do not fit ------------------


def _whole(
    host: Arrays, name: str, array: Array | None, *shapes: Shape, wide: bool = False
) -> Array:
    """Strides do not matter, because the host reads it."""
    if array is None or tuple(array.shape) not in shapes:
        expected = " or ".join(map(str, shapes))
        raise ValueError(
            f"{name}: given {'nothing' if array is None else f'shape {tuple(array.shape)}'}; "
            f"expected {expected}, from the sizes of the layer and the input. "
            "Pass an array of that shape."
        )
    if not host.holds(array, wide):
        raise TypeError(
            f"{name}: given {_kind(array)}; expected {host.dtype}, as the plan of the layer, and "
            "on its device. Convert the array."
        )
    return array if host.aligned(array) else host.dense(array)


def _rows(host: Arrays, name: str, array: Array | None, shape: Shape) -> Array:
    """The last axis is dense."""
    array = _whole(host, name, array, shape)
    return array if shape[-1] < 2 or host.strides(array)[-1] == 1 else host.dense(array)


def _matrix(host: Arrays, name: str, array: Array | None, shape: Shape) -> Array:
    """One of the last two axes is dense."""
    array = _whole(host, name, array, shape)
    return array if 1 in host.strides(array)[-2:] else host.dense(array)


def _dense(
    host: Arrays, name: str, array: Array | None, *shapes: Shape, wide: bool = False
) -> Array:
    """All of it is contiguous."""
    return host.dense(_whole(host, name, array, *shapes, wide=wide))


def _optional(host: Arrays, name: str, array: Array | None, shape: Shape) -> Array | None:
    """Contiguous, or not there."""
    return None if array is None else _dense(host, name, array, shape)


def _flags(host: Arrays, name: str, array: Array, shape: Shape) -> Array:
    """Flags as bytes."""
    flags = host.as_flags(array)
    if flags is None or tuple(flags.shape) != shape:
        raise (TypeError if flags is None else ValueError)(
            f"{name}: given {_kind(array)} of shape {tuple(array.shape)}; expected bool or uint8 "
            f"of shape {shape}, one flag per step and row, where the input is."
        )
    return flags


def _kind(array: Array) -> str:
    """Dtype and, away from the CPU, device."""
    device = str(getattr(array, "device", "cpu"))
    return f"{array.dtype}" if device == "cpu" else f"{array.dtype} on {device}"


def _pairs(name: str, values: Sequence[Any], declared: Sequence[Any]) -> Any:
    """``values`` beside what the cell declares, if there are as many."""
    if len(values) != len(declared):
        raise ValueError(f"{name}: given {len(values)}; expected {len(declared)}, as the cell has.")
    return zip(values, declared, strict=True)
