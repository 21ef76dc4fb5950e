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
from anycell.layer.arguments import (
    ANY,
    DENSE,
    MATRIX,
    ROWS,
    Array,
    Arrays,
    Options,
    Saved,
    Weights,
)
from anycell.plan import Plan

Shape = tuple[int, ...]


class _State(NamedTuple):
    """A state: its size, and what its arrays are called in errors."""

    size: int
    initial: str
    reset: str
    gradient: str
    kept: str


class _Shapes(NamedTuple):
    """What follows from the plan alone.

    Attributes:
        gates: G*H.
        hh: shape of the recurrent weight; None where there is none.
        linears: of each further matmul the name, and the shapes of weight and bias.
    """

    gates: int
    hh: Shape | None
    linears: tuple[tuple[str, Shape, Shape], ...]
    states: tuple[_State, ...]


@functools.lru_cache(maxsize=512)
def _shapes(plan: Plan) -> _Shapes:
    cell, size = plan.cell, plan.sizes
    gates, weights = len(cell.gates) * plan.hidden_size, {l.weight: l for l in cell.linears}
    words = "state", "reset_state", "d_state", "kept state"
    return _Shapes(
        gates,
        (gates, size[cell.states[0].size]) if weights.pop(RECURRENT, None) else None,
        tuple(
            (name, l.shape(size), (len(l.declared) * size[l.out_size],))
            for name, l in weights.items()
        ),
        tuple(_State(size[s.size], *[f"{word} {s.name!r}" for word in words]) for s in cell.states),
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
    shape, projected = x.shape, weights[0].ih is None
    if len(shape) != 3 or (projected and shape[2] != _shapes(plan).gates):
        last = f"{_shapes(plan).gates} projected gates" if projected else "input size"
        raise ValueError(f"x: given shape {tuple(shape)}; expected [steps, rows, {last}].")
    x = _fit(host, "x", x, shape, ROWS if read else ANY)
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
    output, borders = len(weights) * states[0].size, segment < steps
    hidden, others, values = steps + 1 + any(w.reverse for w in weights), steps + 1, steps
    if borders:
        hidden = others = -(-steps // segment)
        values = 0
    kept = [i > 0 and (borders or keeps(plan, i)) for i in range(len(states))]
    sequences = [
        [
            _fit(host, s.kept, array, (others, batch, s.size), DENSE, wide=borders)
            if keep
            else None
            for keep, (array, s) in zip(kept, _pairs("kept states", arrays, states), strict=True)
        ]
        for arrays, _ in _pairs("kept states", saved.states, weights)
    ]
    restoring = () if saved.options.resets is None else weights
    fitted = Saved(
        saved.x,
        weights,
        saved.options,
        _fit(host, "hidden states", saved.hidden, (hidden, batch, output), DENSE),
        sequences,
        [
            _fit(host, "saved values", array, (values, batch, width), DENSE)
            for array, _ in _pairs("saved values", saved.values, weights)
        ],
        [
            _restored(host, plan, arrays, batch)
            for arrays, _ in _pairs("reset_state", saved.reset, restoring)
        ],
    )
    if dy is not None:
        dy = _fit(host, "d_output", dy, (steps, batch, output), ROWS)
    final = [
        [
            None if d is None else _fit(host, s.gradient, d, (batch, s.size), ANY)
            for d, s in _pairs("d_state", gradients, states)
        ]
        for gradients, _ in _pairs("d_state", dfinal, weights)
    ]
    return fitted, dy, final


def learned(host: Arrays, plan: Plan, w: Weights, inputs: int) -> dict[str, Any]:
    """What one direction learns, fit for a kernel, by the names of ``Weights``.

    Args:
        inputs: the last axis of x.

    Raises:
        ValueError, TypeError: as ``entering``.
    """
    shapes, names, end = _shapes(plan), plan.cell.param_names, "_reverse" if w.reverse else ""
    ih, hh, bias_ih, bias_hh, gates = w.ih, None, w.bias_ih, w.bias_hh, (shapes.gates,)
    if ih is not None:
        ih = _fit(host, "weight_ih", ih, (shapes.gates, inputs), MATRIX, end)
    if shapes.hh is not None:
        hh = _fit(host, "weight_hh", w.hh, shapes.hh, MATRIX, end)
    if bias_ih is not None:
        bias_ih = _fit(host, "bias_ih", bias_ih, gates, DENSE, end)
    if bias_hh is not None:
        bias_hh = _fit(host, "bias_hh", bias_hh, gates, DENSE, end)
    linears: dict[str, Array | None] = {}
    for name, shape, length in shapes.linears:
        bias = w.linears.get(f"{name}_bias")
        linears[name] = _fit(host, f"weight_{name}", w.linears.get(name), shape, MATRIX, end)
        if bias is not None:
            bias = _fit(host, f"bias_{name}", bias, length, DENSE, end)
        linears[f"{name}_bias"] = bias
    params = [
        _fit(host, name, value, (plan.hidden_size,), DENSE, end)
        for value, name in _pairs("parameters", w.params, names)
    ]
    return {
        "ih": ih,
        "hh": hh,
        "bias_ih": bias_ih,
        "bias_hh": bias_hh,
        "params": params,
        "linears": linears,
    }


def _direction(host: Arrays, plan: Plan, w: Weights, inputs: int, batch: int) -> Weights:
    """All arrays of one direction, for so many rows."""
    states, cell = _shapes(plan).states, plan.cell
    static, mask, reset = w.static, w.recurrent_mask, w.reset
    if cell.static is not None or static is not None:
        shape = () if cell.static is None else (batch, plan.hidden_size)
        static = _fit(host, "static", static, shape, DENSE)
    if mask is not None:
        rows = batch, states[0].size
        whole = rows if len(mask.shape) == 2 else (len(cell.gates), *rows)
        mask = _fit(host, "recurrent_mask", mask, whole, DENSE)
    initial = [
        value if isinstance(value, float) else _fit(host, s.initial, value, (batch, s.size), ANY)
        for value, s in _pairs("state", w.initial, states)
    ]
    return Weights(
        **learned(host, plan, w, inputs),
        initial=initial,
        reset=None if reset is None else _restored(host, plan, reset, batch),
        static=static,
        recurrent_mask=mask,
        reverse=w.reverse,
    )


def _restored(host: Arrays, plan: Plan, values: Sequence[Array], batch: int) -> list[Array]:
    """What resets restore: of every row, or one for all."""
    return [
        _fit(host, s.reset, value, (s.size,) if len(value.shape) == 1 else (batch, s.size), DENSE)
        for value, s in _pairs("reset_state", values, _shapes(plan).states)
    ]


# -- one array -------------------------------------------------------------------------------------


def _fit(
    host: Arrays,
    name: str,
    array: Array | None,
    shape: Shape,
    layout: int,
    end: str = "",
    wide: bool = False,
) -> Array:
    """The array, or a copy where strides or alignment do not fit; ``end`` is part of its name."""
    if array is None or array.shape != shape:
        raise ValueError(
            f"{name}{end}: given {'nothing' if array is None else f'shape {tuple(array.shape)}'}; "
            f"expected {tuple(shape)}, from the sizes of the layer and the input. "
            "Pass an array of that shape."
        )
    fitted = host.fit(array, layout, wide)
    if fitted is None:
        raise TypeError(
            f"{name}{end}: given {_kind(array)}; expected {host.dtype}, as the plan of the layer, "
            "and on its device. Convert the array."
        )
    return fitted


def _flags(host: Arrays, name: str, array: Array, shape: Shape) -> Array:
    """Flags as bytes."""
    flags = host.as_flags(array)
    if flags is None or flags.shape != shape:
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
