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

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anycell.lang.namespaces import Array, Namespace, namespace
from anycell.layer.checks import number, refuse
from anycell.plan import scales_of

if TYPE_CHECKING:
    from typing_extensions import Self

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


class Fed:
    """The base of ``Feedback``: a layer and its readout, one step at a time."""

    layer: Any
    readout: Any
    _namespace = staticmethod(namespace)

    def prepare(self) -> Self:
        """Packs the weights of the layer, as they are now, for ``step``; gives the object itself.
        See ``RNN``.
        """
        self.layer.prepare()
        return self

    def step(
        self, x: Any, state: Any = None, *, forced: Any = True, static: Any = None,
        resets: Any = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        """One step, as they arrive: what a call gives for a sequence of one step, in evaluation.

        Nothing has to be kept but the state: what is fed back is the readout of it. In between the
        layer makes a ``step`` of its own, after ``prepare()`` a fast one. Of a layer in 8 bits
        results are those of a call to within the rounding of what is fed back.

        Args:
            x: ``[B, input_size]``, the series in the first Y columns. Where the step is not forced,
                what lies there never matters.
            state: as the step before returned it. None for what a call begins with.
            forced: whether the series is given: True or False, or bool ``[B]``.
            static: as a call takes it.
            resets: bool ``[B]``, True where the state is replaced, before the step, by what a call
                begins with.

        Returns:
            y ``[B, Y]``, and the new state.

        Raises:
            ValueError, TypeError: naming the argument, what was given and what was expected.
        """
        x = self._one_step(x)
        xp, before = self._namespace(x), self._before(x, state)
        if resets is not None:
            new, begin = self._flags("resets", resets, x)[:, None], self._before(x, None)
            before = [xp.where(new, b, s) for b, s in zip(begin, before, strict=True)]
        if isinstance(forced, (int, float)):  # all rows are forced, or all free
            if forced not in (0, 1):
                hint = "Draw the rows that are forced, and pass them."
                refuse("forced", repr(forced), "True or False, or a bool for each row", hint)
            rows = None
        else:
            rows = self._flags("forced", forced, x)[:, None]
        if rows is not None or not forced:
            series = self._read_state(before[0])
            width = series.shape[1]
            series = series if rows is None else xp.where(rows, x[:, :width], series)
            x = xp.concatenate([series, x[:, width:]], -1)
        further = {} if static is None else {"static": static}
        output, after = self.layer.step(x, tuple(before), **further)
        return self._read(output), after

    def _one_step(self, x: Any) -> Array:
        """``[B, inputs]``, checked."""
        raise NotImplementedError

    def _before(self, x: Array, state: Any) -> Sequence[Array]:
        """The states before a step; for None those with which a call begins."""
        raise NotImplementedError

    def _flags(self, name: str, value: Any, x: Array) -> Array:
        """bool ``[B]``, checked."""
        raise NotImplementedError

    def _read_state(self, state: Array) -> Array:
        """The readout, ``[B, Y]``, of the first state before a step, with the dtype of x."""
        return self._read(state[0])

    def _read(self, outputs: Array) -> Array:
        """The readout, ``[B, Y]``, of outputs ``[B, size]``."""
        return self.readout(outputs)


# -- checks ----------------------------------------------------------------------------------------


def check_layer(layer: Any, ours: bool, expected: str, remedy: str) -> None:
    """Refuses what is no layer of the frontend, and layers of several directions or layers."""
    if not ours:
        refuse("layer", type(layer).__name__, expected, remedy, TypeError)
    if layer.num_layers > 1 or layer.bidirectional:
        hint = "Of several cells make one: a cell may hold the states of all."
        refuse("layer", repr(layer), "one of one layer and one direction", hint)


def check_width(readout: Any, width: int, inputs: int) -> None:
    """A readout of ``width`` outputs is fed back to a layer of as many ``inputs`` or more."""
    if width > inputs:
        expected = f"at most the {inputs} inputs of the layer"
        refuse("readout", repr(readout), expected, f"Its {width} outputs are fed back.")


def chance(forced: Any) -> float | None:
    """The probability that a step is forced, in all steps and rows; None for flags."""
    if not isinstance(forced, (int, float)):
        return None
    return number("forced", float(forced), 0.0, 1.0, closed=True)
