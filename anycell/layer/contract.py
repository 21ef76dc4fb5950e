"""The contract of memory: what an array of a call must be before a kernel gets its address.

Kernels do not check bounds. So every array of every call is checked here once, whichever frontend
it comes from, and nothing below checks it again. ``signature`` has the shapes; the strides are:

    array                                        strides
    x, d_output                                  last axis dense
    weights of matmuls                           dense rows or columns
    biases, parameters                           dense
    state, d_state                               any: the host copies it
    reset_state, static, recurrent_mask          contiguous
    mask, resets                                 contiguous, bool or uint8
    what the forward pass kept, see ``Kept``     contiguous

All but masks and resets have the dtype of the plan; integer weights have the dtype of its operands.
All lie on the host's device, begin at a multiple of an element's size, and have strides of whole
elements, which may be 0 or negative. An array of other strides or alignment is copied. An array of
another shape, dtype or device is an error: it is not the array that the call describes.

``Framework.layout`` says everything that these rules depend on. So arrays are not checked again if
they have the layout of an earlier call whose arrays were not copied.

``ANYCELL_CHECK=1`` checks the addresses that kernels get once more, at the native call; see
``anycell/engines/cpu/check.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anycell.layer.arguments import Array, Direction, Kept
from anycell.layer.checks import refuse
from anycell.layer.framework import Framework
from anycell.layer.signature import ANY, DENSE, ENDS, FLAGS, ROWS, Shape, learned, states
from anycell.plan import Options, Plan, recurrent_masks
from anycell.recent import add_recent

# -- the calls -------------------------------------------------------------------------------------


def fit(
    host: Framework, plan: Plan, arrays: Mapping[str, Array], options: Options, read: bool = True
) -> tuple[dict[str, Array], tuple[Any, ...]]:
    """Checks the arrays of a pass and makes them fit for its kernel.

    Args:
        arrays: by the names of ``signature``.
        read: whether a kernel may read an x that is projected already.

    Returns:
        the arrays, and a hashable key of their layout. Resets are those of each direction,
        ``[D, T, B]``, see ``restarts``.

    Raises:
        ValueError, TypeError: naming the array, what was given and what was expected.
    """
    directions = len(options.reverse)
    key: tuple[Any, ...] = type(host), host.dtype, plan, directions, read, host.layout(arrays)
    fitted = dict(arrays)
    if key not in _accepted:
        done = _fitted(host, plan, arrays, directions, read)
        fitted = {n: done.get(n, a) for n, a in fitted.items() if n in done or n in FLAGS}
        if all(fitted.get(name) is array for name, array in arrays.items()):
            _accept(key)
        else:
            key = type(host), host.dtype, plan, directions, read, host.layout(fitted)
    for name in FLAGS:
        if name in fitted:
            fitted[name] = _flags(host, name, fitted[name], fitted["x"].shape[:2])
            key += (name,)
    if "resets" in fitted:
        flags = fitted["resets"], fitted.get("mask")
        fitted["resets"] = host.restarts(*flags, options.reverse)
    return fitted, key


_MOST = 1024  # the largest number of remembered layouts
_accepted: dict[tuple[Any, ...], bool] = {}


def _accept(key: tuple[Any, ...]) -> None:
    """Remembers that arrays of this layout need no copy."""
    add_recent(_accepted, key, True, _MOST)


def _fitted(
    host: Framework, plan: Plan, arrays: Mapping[str, Array], directions: int, read: bool
) -> dict[str, Array]:
    """Makes all given arrays except flags fit for a kernel."""
    cell, ends = plan.cell, ENDS[:directions]
    x, gates = arrays["x"], plan.gates_width
    shape, projects = x.shape, arrays.get("weight_ih") is not None
    if len(shape) != 3 or not (projects or shape[2] == gates):
        last = "input size" if projects else f"{gates} projected gates"
        raise ValueError(f"x: given shape {tuple(shape)}; expected [steps, rows, {last}].")
    layout = ROWS if read or projects else ANY
    every = ends[:1] if projects else ends
    fitted = {f"x{end}": _fit(host, f"x{end}", arrays[f"x{end}"], shape, layout) for end in every}
    _, batch, inputs = shape
    for end in ends:
        learns = weights(host, plan, arrays, inputs, end)
        fitted |= {name + end: array for name, array in learns.items()}
    static, mask, masks = arrays.get("static"), arrays.get("recurrent_mask"), recurrent_masks(plan)
    if static is not None and cell.static is None:
        refuse("static", _kind(static), f"nothing: {cell.name} declares no static input")
    if cell.static is not None:
        fitted["static"] = _fit(host, "static", static, (batch, plan.static_width), DENSE)
    if mask is not None and not masks:
        refuse("recurrent_mask", _kind(mask), f"nothing: the plan of {cell.name} takes none")
    if masks:
        rows = batch, states(plan)[0][1]
        gated = masks > 1 or (mask is not None and len(mask.shape) == 3)
        wanted: Shape = (len(cell.gates), *rows) if gated else rows
        fitted["recurrent_mask"] = _fit(host, "recurrent_mask", mask, wanted, DENSE)
    for name, size in states(plan):
        state, reset = arrays.get(f"state {name}"), arrays.get(f"reset_state {name}")
        if state is not None:
            whole: Shape = len(ends), batch, size
            fitted[f"state {name}"] = _fit(host, f"state {name!r}", state, whole, ANY)
        if reset is not None:
            whole = (len(ends), batch, size) if len(reset.shape) == 3 else (len(ends), size)
            fitted[f"reset_state {name}"] = _fit(host, f"reset_state {name!r}", reset, whole, DENSE)
    return fitted


def weights(
    host: Framework, plan: Plan, arrays: Mapping[str, Array], inputs: int, end: str = ""
) -> Direction:
    """Checks the weights of one direction and makes them fit for a kernel.

    Args:
        inputs: the last axis of x.
        end: of the names in ``arrays``.

    Raises:
        ValueError, TypeError: as ``fit``.
    """
    direction: Direction = {}
    width = None if arrays.get(f"weight_ih{end}") is None else inputs
    # Only the CPU engine has plans with integer weights.
    of_weights = host.eight_bits if plan.types.quantized else host
    for name, shape, layout, optional, integers in learned(plan, width):
        array = arrays.get(name + end)
        if array is not None or not optional:
            suited = of_weights if integers else host
            direction[name] = _fit(suited, name + end, array, shape, layout)
    return direction


def fit_gradients(
    host: Framework,
    plan: Plan,
    shape: Shape,
    reverse: Sequence[bool],
    kept: Kept,
    d_output: Array | None,
    d_final: Sequence[Array | None],
    d_states: Mapping[str, Array],
    *,
    segment: int,
    keeps: Callable[[Plan, int], bool],
) -> tuple[dict[str, Array], tuple[Any, ...]]:
    """Checks the arrays that only a backward pass has, and makes them fit for its kernel.

    Args:
        shape: of x.
        segment: the steps whose values it needs at the same time; with checkpoints, not all steps.
        keeps: whether the forward pass keeps the sequence of a state, without checkpoints.

    Returns:
        those that there are of "hidden", "saved 0" and "sequence 0 c" (direction 0, state c),
        "d_output", "d_final c" and "d_sequence c"; and a hashable key of their layout.

    Raises:
        ValueError, TypeError: as ``fit``.
    """
    steps, batch, _ = shape
    sizes, borders, directions = states(plan), segment < steps, len(reverse)
    names = [name for name, _ in sizes]
    arrays: dict[str, Array | None] = {"hidden": kept.hidden}
    for d, array in enumerate(_all("saved values", kept.values, reverse)):
        arrays[f"saved {d}"] = array
    for d, sequence in enumerate(_all("kept states", kept.states, reverse)):
        for name, array in zip(names, _all("kept states", sequence, names), strict=True):
            arrays[f"sequence {d} {name}"] = array
    for name, array in zip(names, _all("d_state", d_final, names), strict=True):
        arrays[f"d_final {name}"] = array
    arrays |= {f"d_sequence {name}": array for name, array in d_states.items()}
    if d_output is not None:  # often one expanded number, as after a sum, and copied each time
        output = steps, batch, directions * sizes[0][1]
        arrays["d_output"] = _fit(host, "d_output", d_output, output, ROWS)
    parts = {name: array for name, array in arrays.items() if array is not None}

    def key() -> tuple[Any, ...]:
        facts = type(host), host.dtype, plan, tuple(shape), tuple(reverse), segment
        return *facts, host.layout(parts)

    known = key()
    if known in _accepted:
        return parts, known
    apart = [i > 0 and (borders or keeps(plan, i)) for i in range(len(sizes))]
    slots, wide = -(-steps // segment) if borders else None, borders or host.wide_states
    expected = kept_shapes(plan, steps, batch, reverse, apart, slots)
    rows = {"hidden": ("hidden states", expected.hidden, DENSE, False)}
    for d, (of_states, of_values) in enumerate(zip(expected.states, expected.values, strict=True)):
        rows[f"saved {d}"] = "saved values", of_values, DENSE, False
        for name, whole in zip(names, of_states, strict=True):
            if whole is not None:
                rows[f"sequence {d} {name}"] = f"kept state {name!r}", whole, DENSE, wide
    widths = dict(sizes)
    for name, size in sizes:
        if f"d_final {name}" in parts:
            rows[f"d_final {name}"] = f"d_state {name!r}", (directions, batch, size), ANY, False
    for name in d_states:
        whole = steps, batch, directions * widths[name]
        rows[f"d_sequence {name}"] = f"d_states {name!r}", whole, ROWS, False
    fitted = {name: _fit(host, row[0], parts.get(name), *row[1:]) for name, row in rows.items()}
    before, read = parts, {*rows, "d_output"}
    parts = {name: fitted.get(name, array) for name, array in before.items() if name in read}
    if all(parts.get(name) is array for name, array in before.items()):
        _accept(known)
    return parts, key()


def kept_shapes(
    plan: Plan,
    steps: int,
    batch: int,
    reverse: Sequence[bool],
    there: Sequence[bool],
    borders: int | None = None,
) -> Kept:
    """The shapes of what a forward pass keeps.

    Args:
        there: which states are kept, besides the first.
        borders: with checkpoints, the number of segments.
    """
    sizes, directions = [size for _, size in states(plan)], len(reverse)
    hidden, others, values = steps + 1 + int(any(reverse)), steps + 1, steps
    if borders is not None:
        hidden = others = borders
        values = 0
    pairs = list(zip(sizes, there, strict=True))
    sequences = [(others, batch, size) if kept else None for size, kept in pairs]
    return Kept(
        (hidden, batch, directions * sizes[0]), [sequences] * directions,
        [(values, batch, plan.saved_stride)] * directions,
    )  # fmt: skip


# -- one array -------------------------------------------------------------------------------------


def _fit(
    host: Framework, name: str, array: Array | None, shape: Shape, layout: int, wide: bool = False
) -> Array:
    """The array, or a copy where strides or alignment do not fit."""
    if array is None or array.shape != shape:
        given = "nothing" if array is None else f"shape {tuple(array.shape)}"
        expected = f"{tuple(shape)}, from the sizes of the layer and the input"
        refuse(name, given, expected, "Pass an array of that shape.")
    fitted = host.fit(array, layout, wide)
    if fitted is None:
        expected = f"{host.dtype}, the dtype of the layer's plan, on the layer's device"
        refuse(name, _kind(array), expected, "Convert the array.", TypeError)
    return fitted


def _flags(host: Framework, name: str, array: Array, shape: Shape) -> Array:
    """Flags as bytes."""
    flags = host.as_flags(array)
    if flags is None or flags.shape != shape:
        raise (TypeError if flags is None else ValueError)(
            f"{name}: given {_kind(array)} of shape {tuple(array.shape)}; expected bool or uint8 "
            f"of shape {tuple(shape)}, one flag per step and row, on the input's device."
        )
    return flags


def _kind(array: Array) -> str:
    """The dtype and, unless it is the CPU, the device."""
    device = str(getattr(array, "device", "cpu"))
    return f"{array.dtype}" if device == "cpu" else f"{array.dtype} on {device}"


def _all(name: str, values: Sequence[Any], declared: Sequence[Any]) -> Sequence[Any]:
    """Returns ``values`` if there is one for each of ``declared``."""
    if len(values) != len(declared):
        refuse(name, f"{len(values)}", f"{len(declared)}, from the cell and the directions")
    return values
