"""A layer step by step: the reference engine on the arrays of a call, by their public names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from anycell.engines.reference import Recurrence
from anycell.lang.namespaces import namespace
from anycell.layer.arguments import Array
from anycell.layer.signature import ENDS
from anycell.plan import Layer

# Output ``[T, B, D * size]``, final states ``[D, B, size]``, and for each of ``Layer.sequences``
# the values after every step, laid out as the output.
Results = tuple[Array, tuple[Array, ...], tuple[Array, ...]]
# The sequences of some states, by name, and the final states, of one direction.
Scan = Callable[[Recurrence, Sequence[str]], tuple[Sequence[Array], Sequence[Array]]]


def linear(x: Array, weight: Array, bias: Array | None) -> Array:
    """``x @ weight.T + bias``."""
    return x @ weight.T if bias is None else x @ weight.T + bias


def run(layer: Layer, runs: Sequence[Recurrence], scan: Scan = Recurrence.sequences) -> Results:
    """Runs the ``directions`` of a layer by ``scan``, the loop over the steps."""
    names = (layer.cell.state_names[0], *layer.sequences)
    sequences, finals = zip(*[scan(run, names) for run in runs], strict=True)
    xp = runs[0].xp
    output, *others = [
        parts[0] if len(parts) == 1 else xp.concatenate(parts, axis=-1)
        for parts in zip(*sequences, strict=True)
    ]
    return output, tuple(xp.stack(parts) for parts in zip(*finals, strict=True)), tuple(others)


def one_step(
    run: Recurrence, names: Sequence[str], **drawing: Any
) -> tuple[Callable[..., tuple[Any, Any]], tuple[Array, ...], Mapping[str, Array]]:
    """A run of one direction as a framework's own loop over the steps takes it.

    Args:
        names: of the states whose values after each step are wanted.
        drawing: fields of ``Recurrence`` for random masks.

    Returns:
        the step, which takes what a step hands to the next one, the parts of the sequences at its
        time, that time if random masks need it, and fields of ``Recurrence`` in the place of the
        run's; and returns what it hands on, and the states of ``names``.
        What enters the first step: the states, and where the direction runs backwards and has
        resets, whether an episode starts at the step that ran last.
        The sequences, ``[T, ...]`` each, over which it runs, backwards if the direction does.
    """
    options, count, xp = run.layer.options, len(run.cell.states), run.xp
    forwards = options._replace(reverse=(False,) * len(options.reverse))
    layer, first = run.layer._replace(options=forwards), run.initial(run.state)
    sequences = {"gates_x": run.gates_x, "mask": run.mask, "resets": run.resets}
    late = run.resets is not None and options.reverse[run.direction]
    if late:
        first = (*first, xp.zeros_like(xp.any(run.resets, axis=0)))

    def step(entering: Any, now: Mapping[str, Array], t: Any = 0, **others: Any) -> tuple[Any, Any]:
        parts, leaving = dict(now), tuple[Array, ...]()
        if late:
            (parts["resets"],), starts, mask = entering[count:], now["resets"], now.get("mask")
            if mask is not None:  # not by ``where``, which ONNX Runtime lacks for flags
                held = xp.logical_and(entering[-1], xp.logical_not(mask))
                starts = xp.logical_or(held, xp.logical_and(starts, mask))
            leaving = (starts,)
        parts = {name: part[None] for name, part in parts.items()}
        states = entering[:count]
        one = replace(run, layer=layer, state=states, begin=t, **drawing, **parts, **others)
        after, final = one.sequences(names)
        return (*final, *leaving), tuple(values[0] for values in after)

    return step, first, {name: array for name, array in sequences.items() if array is not None}


def unmasked(arrays: Mapping[str, Array]) -> Array:
    """The input ``x`` with zeros under the mask: NaN there must not reach a weight's gradient."""
    x, mask = arrays["x"], arrays.get("mask")
    if mask is None:
        return x
    xp = namespace(x)
    return xp.where(mask[..., None], x, xp.zeros_like(x))


def directions(
    layer: Layer,
    arrays: Mapping[str, Array],
    linear: Callable[..., Array] = linear,
    kind: type[Recurrence] = Recurrence,
) -> list[Recurrence]:
    """A run of the reference engine for each direction of a layer.

    Args:
        arrays: by the names of ``signature``; None stands for an array that is not given. Without
            ``weight_ih``, x is projected already. mask and resets are booleans.
        linear: computes ``x @ weight.T + bias`` from ``(x, weight, bias)``; the bias may be None.
        kind: the class of the runs.
    """
    cell, get, x, runs = layer.cell, arrays.get, unmasked(arrays), []

    def of(kind: str, d: int) -> list[Any]:
        values = (get(f"{kind} {name}") for name in cell.state_names)
        return [None if value is None else value[d] for value in values]

    for d, end in enumerate(ENDS[: len(layer.options.reverse)]):
        weight, bias = get(f"weight_ih{end}"), get(f"bias_ih{end}")
        gates = x if weight is None else linear(x, weight, bias)
        run = kind(
            layer,
            gates + bias if weight is None and bias is not None else gates,
            {n: get(n + end) for l in cell.linears for n in (l.weight, l.bias_name)},
            of("state", d),
            {name: arrays[name + end] for name in cell.param_names},
            static=get("static"),
            mask=get("mask"),
            resets=get("resets"),
            reset_state=of("reset_state", d),
            recurrent_mask=get("recurrent_mask"),
            direction=d,
        )
        runs.append(run)
    return runs
