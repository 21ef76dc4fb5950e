"""``Feedback``: a layer whose readout is its own next input."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from anycell.explanation import Explained
from anycell.lang.transform import with_feedback
from anycell.layer.checks import refuse
from anycell.layer.feedback import BY_GATE, Fed, check_layer, check_width
from anycell.layer.layers import Arrays, Stack
from anycell.layer.rounding import rounded
from anycell.numpy import base, check, passes
from anycell.numpy.base import Array
from anycell.numpy.dense import Dense
from anycell.numpy.framework import Numpy
from anycell.numpy.layers import RNN
from anycell.numpy.typed import State
from anycell.plan import Engine, Layer, Plan, plan, scales_of
from anycell.refusal import explained


class Feedback(Fed, Explained, base.Layer):
    """Runs a layer whose input is a series, or its own readout at steps without the series.

        y_t     = W_readout output_t + b_readout
        input_t = [series_t where forced_t, else y_{t-1}; others_t]

    To force all steps is teacher forcing, ``readout.forward(layer.forward(x)[0])``; without forcing
    it runs freely; with random forcing it is scheduled sampling. y before the first step is the
    readout of the initial state.

    Parameters and gradients of ``layer`` and ``readout`` have names that begin with these words, as
    in ``anycell.torch``: "layer.weight_ih_l0". Pass an optimizer either this or both of them.

    Args:
        layer: any cell, in one layer and one direction.
        readout: maps the layer's output to the Y numbers of the series.
        seed: of the random choice of forced steps; None draws one.

    Raises:
        ValueError, TypeError: naming the argument, what was given and what was expected.

    Example:
        >>> layer, readout = RNN(anycell.cells.LSTM, 3, 8, seed=0), Dense(8, 1, seed=1)
        >>> y, state = Feedback(layer, readout).forward(np.zeros((5, 2, 3)), forced=0.5)
        >>> y.shape
        (5, 2, 1)
    """

    framework = Numpy

    @explained
    def __init__(self, layer: RNN, readout: Dense, *, seed: int | None = None) -> None:
        fused = isinstance(layer, RNN)
        check_layer(layer, fused, "RNN, LSTM or GRU of anycell.numpy", "Make one.")
        fits = isinstance(readout, Dense) and readout.input_size == layer._width
        if not fits or readout.dtype != layer.dtype:
            expected = f"Dense({layer._width}, ...) of {layer.dtype}, like the layer"
            refuse("readout", repr(readout), expected, "It reads the output of the layer.")
        check_width(readout, readout.output_size, layer.input_size)
        self.layer, self.readout = layer, readout
        with_feedback(layer.cell)  # raises if the cell cannot be fed back
        self._generator = check.generator("seed", seed)
        self._saved = None

    def _joined(self, kind: str) -> Mapping[str, Array]:
        parts = {"layer": self.layer, "readout": self.readout}
        named = {f"{p}.{n}": a for p, part in parts.items() for n, a in getattr(part, kind).items()}
        return MappingProxyType(named)

    @property
    def parameters(self) -> Mapping[str, Array]:
        """The learned arrays of layer and readout, by name."""
        return self._joined("parameters")

    @property
    def arrays(self) -> Mapping[str, Array]:
        """All saved arrays of layer and readout, by name."""
        return self._joined("arrays")

    @property
    def grads(self) -> Mapping[str, Array]:
        """The gradients of the last ``backward``, by the same names; empty before the first."""
        return self._joined("grads")

    @property
    def dtype(self) -> np.dtype[Any]:  # type: ignore[override]
        """The dtype of everything that the layer computes."""
        return self.layer.dtype

    def __repr__(self) -> str:
        return f"Feedback({self.layer!r}, {self.readout!r})"

    @property
    def engine(self) -> Engine:
        """The engine that runs the layer with its readout, and why."""
        chosen = self._plan()
        return Engine(chosen.engine, chosen.reason)

    def _plan(self) -> Plan:
        layer, engine = self._layer(), "cpu" if self.layer.plan.types.quantized else None
        return plan(layer.cell, self.layer.hidden_size, layer.dtype, engine, dict(layer.sizes))

    @property
    def _width(self) -> int:
        return self.readout.output_size

    def _parts(self) -> tuple[Arrays, Array, Array | None]:
        readout = self.readout.parameters
        return self.layer._learned(0), readout["weight"], readout.get("bias")

    def _draw(self, like: Array) -> Array:
        if self.layer.batch_first:  # the same numbers for either layout
            return self._generator.random(like.shape[::-1]).T
        return self._generator.random(like.shape)

    def _read(self, outputs: Array) -> Array:
        return self.readout._read(outputs)

    def forward(
        self,
        x: npt.ArrayLike,
        state: State | None = None,
        *,
        forced: npt.ArrayLike | float = True,
        mask: npt.ArrayLike | None = None,
        lengths: npt.ArrayLike | None = None,
        resets: npt.ArrayLike | None = None,
        static: npt.ArrayLike | None = None,
        training: bool = False,
    ) -> tuple[Array, State]:
        """Runs whole sequences.

        Args:
            x: ``[T, B, input_size]``, laid out as for the layer, the series in the first Y columns.
                At steps that are not forced, the series has no influence, not even as NaN.
            state, mask, lengths, resets, static, training: as in ``RNN.forward``.
            forced: the steps at which the series is given: bool, laid out as x without its last
                axis, such as ``np.isfinite(series)``, or ``[T]`` for all rows. Or a number in
                [0, 1], the probability of each step of each row. True means all steps.

        Returns:
            y ``[T, B, Y]``, laid out as x, and the state, as in ``RNN.forward``; where no step
            runs, the output is zero and y the bias.
        """
        layer, pullbacks = self.layer, list[passes.Pullback]()
        options = layer._options(training)

        def run(this: Layer, arrays: Arrays) -> Any:
            output, final, others, pullback = passes.run(this, arrays)
            pullbacks.append(pullback)
            return output, tuple(final), others

        def stack(learned: Arrays) -> Stack:
            this = self._layer()._replace(options=options, plan=self._plan())
            if this.plan.types.quantized:
                integers, scales = rounded(learned["weight_readout"], "weight", "readout")
                both = {"weight_readout": integers, scales_of("weight_readout"): scales}
                learned = {**learned, **both}
            return Stack(Numpy, run, this, [learned], layer.batch_first)

        array, flags = self._sequence(x), check.numbers("forced", forced)
        # Given always, so that the backward pass returns their gradients.
        states = layer._states("state", state, array.shape[0 if layer.batch_first else 1])
        flags, output, final = self._run(
            array, states, flags if flags.ndim else flags.item(), stack,
            mask=mask, lengths=lengths, resets=resets, static=static,
        )  # fmt: skip
        self._saved = (pullbacks[0], flags) if options.training else None
        return self.readout.forward(output, training=options.training), final

    if TYPE_CHECKING:
        __call__ = forward

        def step(
            self, x: npt.ArrayLike, state: State | None = None, *,
            forced: npt.ArrayLike | float = True, static: npt.ArrayLike | None = None,
            resets: npt.ArrayLike | None = None,
        ) -> tuple[Array, State]: ...  # fmt: skip

    def backward(
        self, grad_y: npt.ArrayLike, grad_state: State | None = None
    ) -> tuple[Array, State]:
        """Computes gradients like ``RNN.backward``, from the gradients of y and the final state.

        Replaces ``grads`` of the layer and of the readout. The gradient of the series in x is 0 at
        steps where it was not given.

        Raises:
            RuntimeError: if no ``forward(..., training=True)`` came before.
        """
        (pullback, flags), layer, readout = self._last_forward(), self.layer, self.readout
        d = check.array("grad_y", grad_y, (*flags.shape, self._width), layer.dtype)
        d = readout.backward(d)
        d = np.ascontiguousarray(d.swapaxes(0, 1)) if layer.batch_first else d
        d_states = layer._states("grad_state", grad_state, d.shape[1], start=0.0)
        grads = pullback(d, d_states, {})
        for name in BY_GATE.keys() & grads.keys():
            grads[name] = grads[name][: -layer.hidden_size]
        grads["weight_ih"] = np.ascontiguousarray(grads["weight_ih"][:, :-1])
        grads["weight_ih"][:, : self._width] += grads["weight_feedback"]
        layer._grads = {name: grads[name.removesuffix("_l0")] for name in layer.parameters}
        layer.grad_static = grads.get("static")
        for name in readout.grads:
            readout._grads[name] += grads[f"{name}_readout"]
        d_x = grads["x"].swapaxes(0, 1) if layer.batch_first else grads["x"]
        d_x[..., : self._width] *= flags[..., None]
        return np.ascontiguousarray(d_x[..., :-1]), layer._joined("state", [grads])
