"""A readout that is its layer's next input, for ``Feedback`` of every frontend.

The readout has Y outputs. x has Y numbers of a series, which come first, and others, which are
always given:

    y_t     = W_readout output_t + b_readout
    input_t = [series_t where forced_t, else y_{t-1}; others_t]

Forcing all steps is teacher forcing, forcing none is a free run, and forcing random steps is
scheduled sampling, whose probability may follow a schedule: ``forced=schedule(step)``. Both passes
run in one fused kernel that includes the readout; gradients flow back through what is fed back. y
before the first step is the readout of the initial state, so that a forecast may start from the
state that any call of the layer returned.

The kernel runs the cell that ``with_feedback`` makes. It has an additional last gate, and x an
additional last number, which tells this gate where x is free: 1, and 0 elsewhere. Rounding to 8
bits scales a row by its largest number. So there the last number equals the largest of the others,
and at least ``LEAST``, to lose neither it nor them.

Source: Williams & Zipser, *A Learning Algorithm for Continually Running Fully Recurrent Neural
Networks*, 1989; Bengio et al., *Scheduled Sampling for Sequence Prediction with Recurrent Neural
Networks*, 2015.
"""
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anycell.lang.namespaces import Array, Namespace
from anycell.lang.transform import OUTPUT, with_feedback
from anycell.layer.checks import number, refuse
from anycell.layer.framework import Framework
from anycell.layer.layers import Arrays, Stack
from anycell.layer.rounding import quantized
from anycell.plan import scales_of

if TYPE_CHECKING:
    from typing_extensions import Self

# Arrays with rows for every gate, and the fill value for the rows of the additional gate.
BY_GATE = {"weight_ih": 0, "weight_hh": 0, "bias_ih": 0, "bias_hh": 0}
BY_GATE |= {scales_of("weight_ih"): 1, scales_of("weight_hh"): 0}
LEAST = 1e-19  # 127 / LEAST and LEAST / 127, the scale of a row of that size, are float32


def fed(
    xp: Namespace, learned: Mapping[str, Array], hidden: int, weight: Array, bias: Array | None
) -> dict[str, Any]:
    """Adds the readout, and the gate and the input that mark free steps, to what a layer learns.

    Args:
        xp: the arrays' namespace.
        learned: of a layer of one direction, by the names of ``anycell.layer.signature``; other
            arrays stay as they are.
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


def entering(xp: Namespace, x: Array, column: Array, width: int, quantized: bool) -> Array:
    """Appends to x the number that marks free steps, and sets the series to 0 there.

    Args:
        xp: the arrays' namespace.
        x: with two axes of steps and rows, in any order, and the inputs.
        column: bool, ``x.shape[:2]``: where the series is forced.
        width: Y.
        quantized: whether rows are rounded to 8 bits.
    """
    column, series = column[..., None], x[..., :width]
    row = xp.concatenate([xp.where(column, series, xp.zeros_like(series)), x[..., width:]], -1)
    free = xp.ones_like(x[..., :1])
    if quantized:
        largest = xp.amax(xp.abs(xp.stop_gradient(row)), -1)[..., None]
        free = xp.where(largest < LEAST, LEAST * free, largest)
    return xp.concatenate([row, xp.where(column, xp.zeros_like(free), free)], -1)


class Fed:
    """The base of ``Feedback``: a layer and its readout.

    Attributes:
        framework: of their arrays.
        layer: of one direction, with what every layer of its frontend has.
        readout: a linear map of the layer's output.
    """

    framework: type[Framework]
    layer: Any
    readout: Any

    @property
    def _like(self) -> Any:
        """Has the dtype and the device of all arrays."""
        return self.layer

    @property
    def _width(self) -> int:
        """Y."""

    def _parts(self) -> tuple[Mapping[str, Array], Array, Array | None]:
        """The arrays that the layer learns, and the readout's weight ``[Y, size]`` and bias."""

    def _draw(self, like: Array) -> Array:
        """Random numbers in [0, 1), of the shape of ``like``."""

    def _read(self, outputs: Array) -> Array:
        """The readout, ``[B, Y]``, of outputs ``[B, size]``."""
        return self.readout(outputs)

    def _xp(self, array: Array) -> Namespace:
        return self.framework.xp

    def _layer(self) -> Any:
        layer = self.layer._layer()
        sizes = (*layer.sizes, (OUTPUT, self._width))
        return layer._replace(cell=with_feedback(layer.cell), sizes=sizes)

    def _run(
        self, x: Any, state: Any, forced: Any, stack: Callable[[Arrays], Stack], **arguments: Any
    ) -> tuple[Array, Array, Any]:
        """Runs whole sequences: returns where the series was given, the outputs and the last state.

        Args:
            stack: makes the stack of the fed cell, of what it learns.
            arguments: of the call, as users pass them.
        """
        framework, x, (learned, weight, bias) = self.framework, self._sequence(x), self._parts()
        what = "as the weights of the layer"
        framework.check_array("readout", weight, weight.shape, what, self._like)
        flags = self._forced(forced, x, self.layer.batch_first)
        learned = fed(framework.xp, learned, self.layer.hidden_size, weight, bias)
        rounds = quantized(learned) and x.dtype == framework.xp.float32
        series = entering(framework.xp, x, flags, self._width, rounds)
        output, final = stack(learned).call(series, state, arguments)
        return flags, output, final

    def _sequence(self, x: Any) -> Array:
        """x, checked."""
        layer, count = self.layer, self.layer.input_size
        shape: Sequence[Any] = getattr(x, "shape", ())
        if len(shape) != 3 or shape[2] != count:
            axes = ("batch", "time") if layer.batch_first else ("time", "batch")
            shape = *axes, count
        what = f"the series in the first {self._width} column(s)"
        return self.framework.check_array("x", x, shape, what, self._like)

    def _forced(self, forced: Any, x: Array, batch_first: bool) -> Array:
        """Flags of where the series is forced, bool, laid out as x.

        Args:
            forced: a probability, or flags as users pass them.
            x: with two axes of steps and rows, and the inputs.
        """
        xp, like, probability = self._xp(x), x[..., 0], chance(forced)
        if probability is not None:
            # Nothing is drawn for all or none, not even in an exported graph.
            drawn = xp.zeros_like(like) if probability in (0, 1) else self._draw(like)
            return drawn < probability
        shape, steps = tuple(x.shape[:2]), x.shape[int(batch_first)]
        if len(getattr(forced, "shape", shape)) != 1:
            what = f"laid out as x, or [{steps}], or a probability"
            return self._flags("forced", forced, shape, what, x)
        flags = self._flags("forced", forced, (steps,), "of all rows", x)
        return (flags if batch_first else flags[:, None]) | (xp.zeros_like(like) > 0)

    def _flags(self, name: str, value: Any, shape: Any, axes: str, x: Array) -> Array:
        """bool of that shape, checked."""
        return self.framework.check_flags(name, value, shape, axes, x)

    def prepare(self) -> Self:
        """Packs the weights of the layer, as they are now, for ``step``; returns the object itself.
        See ``RNN``.
        """
        self.layer.prepare()
        return self

    def step(
        self, x: Any, state: Any = None, *, forced: Any = True, static: Any = None,
        resets: Any = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Runs one step: returns what a call in evaluation returns for a sequence of one step.

        Only the state has to be kept: its readout is what is fed back. This calls the ``step`` of
        the layer, which is fast after ``prepare()``. For a layer in 8 bits, results equal those of
        a call to within the rounding of what is fed back.

        Args:
            x: ``[B, input_size]``, the series in the first Y columns, which are ignored where the
                step is not forced.
            state: as the previous step returned it. None for the initial state of a call.
            forced: whether the series is given: True or False, or bool ``[B]``.
            static: as a call takes it.
            resets: bool ``[B]``, True where the state is replaced, before the step, by the initial
                state of a call.

        Returns:
            y ``[B, Y]``, and the new state.

        Raises:
            ValueError, TypeError: naming the argument, what was given and what was expected.
        """
        x = self._one_step(x)
        xp, before = self._xp(x), self._before(x, state)
        if resets is not None:
            new = self._flags("resets", resets, x.shape[:1], "one per row", x)[:, None]
            begin = self._before(x, None)
            before = [xp.where(new, b, s) for b, s in zip(begin, before, strict=True)]
        if isinstance(forced, (int, float)):  # all rows are forced, or all free
            if forced not in (0, 1):
                hint = "Draw the rows that are forced, and pass them."
                refuse("forced", repr(forced), "True or False, or a bool for each row", hint)
            rows = None
        else:
            rows = self._flags("forced", forced, x.shape[:1], "one per row", x)[:, None]
        if rows is not None or not forced:
            series = self._read_state(before[0])
            width = series.shape[1]
            series = series if rows is None else xp.where(rows, x[:, :width], series)
            x = xp.concatenate([series, x[:, width:]], -1)
        further = {} if static is None else {"static": static}
        state = tuple(before) if len(before) > 1 else before[0]
        output, after = self.layer.step(x, state, **further)
        return self._read(output), after

    def _one_step(self, x: Any) -> Array:
        """``[B, inputs]``, checked."""
        batched = isinstance(x, self.framework.kind) and len(x.shape) == 2
        rows = x.shape[0] if batched else "rows"
        shape = rows, self.layer.input_size
        return self.framework.check_array("x", x, shape, "one step of each row", self._like)

    def _before(self, x: Array, state: Any) -> Sequence[Array]:
        """The states before a step; for None the initial states of a call."""
        layer, xp = self.layer._layer(), self._xp(x)
        if state is not None:
            sizes, first = dict(layer.sizes), (1, x.shape[0])  # len() would fix it in exports
            check = self.framework.check_states
            return check("state", state, layer.cell, sizes, first, self._like)
        return [
            xp.tile(xp.full_like(x[:, :1], s.initial), (1, layer.size(s.size)))[None]
            for s in layer.cell.states
        ]

    def _read_state(self, state: Array) -> Array:
        """The readout, ``[B, Y]``, of the first state before a step, with the dtype of x."""
        return self._read(state[0])


# -- checks ----------------------------------------------------------------------------------------


def check_layer(layer: Any, ours: bool, expected: str, remedy: str) -> None:
    """Refuses objects other than the frontend's layers, and stacked or bidirectional layers."""
    if not ours:
        refuse("layer", type(layer).__name__, expected, remedy, TypeError)
    if layer.num_layers > 1 or layer.bidirectional:
        hint = "Combine several cells in one cell, which may hold the states of all."
        refuse("layer", repr(layer), "a single layer of one direction", hint)


def check_width(readout: Any, width: int, inputs: int) -> None:
    """Refuses a readout with more outputs, ``width``, than the layer has ``inputs``."""
    if width > inputs:
        expected = f"at most {inputs} outputs, because the layer has {inputs} inputs"
        refuse("readout", repr(readout), expected, f"Its {width} outputs are fed back as inputs.")


def chance(forced: Any) -> float | None:
    """The probability that a step is forced, in all steps and rows; None for flags."""
    if not isinstance(forced, (int, float)):
        return None
    return number("forced", float(forced), 0.0, 1.0, closed=True)
