"""A readout that is its layer's next input, for ``Feedback`` of every frontend.

With Y outputs of the readout, and x made of Y numbers of a series, which come first, and of others
that are always given:

    y_t     = W_readout output_t + b_readout
    input_t = [series_t where forced_t, else y_{t-1}; others_t]

All steps forced are teacher forcing, none is a free run, and some by chance are scheduled sampling,
whose probability may follow a schedule: ``forced=schedule(step)``. Both passes are those of one
fused kernel, the readout within it; gradients flow back through what is fed back. y before the
first step is the readout of the initial state, so that a forecast may start from the state that any
call of the layer returned.

The kernel runs the cell that ``with_feedback`` makes. That has one more gate, the last, and x
one more number, the last, which says to this gate where x is free: 1, and 0 elsewhere. A row that
is rounded to 8 bits is rounded by its largest number. There the last one is as large as that, and
at least ``LEAST``, so that neither it nor the others are lost.

Source: Williams & Zipser, *A Learning Algorithm for Continually Running Fully Recurrent Neural
Networks*, 1989; Bengio et al., *Scheduled Sampling for Sequence Prediction with Recurrent Neural
Networks*, 2015.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from anycell.lang.namespaces import Array, Namespace
from anycell.layer.checks import refuse
from anycell.plan import scales_of

# What has rows for every gate, and what the rows of the one more gate are filled with.
BY_GATE = {"weight_ih": 0, "weight_hh": 0, "bias_ih": 0, "bias_hh": 0}
BY_GATE |= {scales_of("weight_ih"): 1, scales_of("weight_hh"): 0}
LEAST = 1e-19  # 127 over it is a float32, and so is what a row of that size is scaled by


def fed(
    xp: Namespace, learned: Mapping[str, Array], hidden: int, weight: Array, bias: Array | None
) -> dict[str, Any]:
    """Adds the readout, and the gate and the input that say what is free, to what a layer learns.

    Args:
        xp: the arrays' namespace.
        learned: of a layer of one direction, by the names of ``anycell.layer.signature``; what else
            is there stays as it is.
        hidden: H.
        weight, bias: of the readout, ``[Y, size]`` and ``[Y]``.
    """
    entering, arrays = learned["weight_ih"], dict(learned)
    arrays["weight_feedback"] = entering[:, : weight.shape[0]]
    if scales_of("weight_ih") in learned:
        arrays[scales_of("weight_feedback")] = learned[scales_of("weight_ih")]
    for name in BY_GATE.keys() & learned.keys():
        fill = xp.ones_like if BY_GATE[name] else xp.zeros_like
        arrays[name] = xp.concatenate([learned[name], fill(learned[name][:hidden])], 0)
    column = [xp.zeros_like(entering[:, :1]), xp.ones_like(entering[:hidden, :1])]
    column = xp.concatenate(column, 0)
    arrays["weight_ih"] = xp.concatenate([arrays["weight_ih"], column], 1)
    return arrays | {"weight_readout": weight} | ({} if bias is None else {"bias_readout": bias})


def entering(xp: Namespace, x: Array, given: Array, width: int, quantized: bool) -> Array:
    """Appends to x the number that says what is free, and empties the series there.

    Args:
        xp: the arrays' namespace.
        x: with two axes of steps and rows, in any order, and the inputs.
        given: bool, ``x.shape[:2]``: where the series is forced.
        width: Y.
        quantized: whether rows are rounded to 8 bits.
    """
    given, series = given[..., None], x[..., :width]
    row = xp.concatenate([xp.where(given, series, xp.zeros_like(series)), x[..., width:]], -1)
    free = xp.ones_like(x[..., :1])
    if quantized:
        largest = xp.amax(xp.abs(xp.stop_gradient(row)), -1)[..., None]
        free = xp.where(largest < LEAST, LEAST * free, largest)
    return xp.concatenate([row, xp.where(given, xp.zeros_like(free), free)], -1)


def all_forced(forced: Any) -> bool | None:
    """Whether a step is forced in all rows, or free in all; None for flags, one per row."""
    if not isinstance(forced, (int, float)):
        return None
    if forced not in (0, 1):
        hint = "Draw the rows that are forced, and pass them."
        refuse("forced", repr(forced), "True or False, or a bool for each row", hint)
    return bool(forced)


def entering_step(
    xp: Namespace, x: Array, forced: bool | Array, width: int, before: Callable[[], Array]
) -> Array:
    """The input of a layer's step: where it is not forced, the readout in place of the series.

    Args:
        xp: the arrays' namespace.
        x: ``[B, inputs]``.
        forced: for all rows, or bool ``[B]``.
        width: Y.
        before: gives the readout of the state before the step, ``[B, Y]``.
    """
    if forced is True:
        return x
    series = before()
    if forced is not False:
        series = xp.where(forced[:, None], x[:, :width], series)
    return xp.concatenate([series, x[:, width:]], -1)


__all__ = ["BY_GATE", "all_forced", "entering", "entering_step", "fed"]
