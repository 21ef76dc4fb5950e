"""``Feedback``: a layer whose readout is its own next input."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from anycell.explanation import Explained
from anycell.lang.namespaces import namespace
from anycell.lang.transform import OUTPUT, with_feedback
from anycell.layer.checks import refuse
from anycell.layer.feedback import BY_GATE, Fed, chance, check_layer, check_width, entering, fed
from anycell.layer.layers import Layout
from anycell.layer.rounding import rounded
from anycell.numpy import base, check
from anycell.numpy.base import Array
from anycell.numpy.dense import Dense
from anycell.numpy.framework import Numpy
from anycell.numpy.layers import RNN
from anycell.numpy.typed import State
from anycell.plan import Engine, Layer, scales_of


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

    def __init__(self, layer: RNN, readout: Dense, *, seed: int | None = None) -> None:
        ours = isinstance(layer, RNN)
        check_layer(layer, ours, "RNN, LSTM or GRU of anycell.numpy", "Make one.")
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
        return self._fed_layer().engine

    def _layer(self) -> Layer:
        return self._fed_layer()._layer()

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
            y ``[T, B, Y]``, laid out as x, and the state, as in ``RNN.forward``.
        """
        layer = self.layer
        x = check.array("x", x, layer._layout(layer.input_size), layer.dtype)
        steps, rows = x.shape[:2][:: -1 if layer.batch_first else 1]
        given = self._forced(forced, steps, rows)
        given = given.T if layer.batch_first else given
        run, training = self._fed_layer(), check.boolean("training", training)
        width, rounds = self.readout.output_size, layer.plan.types.quantized
        how: dict[str, Any] = {"mask": mask, "lengths": lengths, "resets": resets, "static": static}
        fed_back = entering(namespace(x), x, given, width, rounds)
        output, final = run.forward(fed_back, state, training=training, **how)
        self._saved = (run, given) if training else None
        return self.readout.forward(output, training=training), final

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
        (run, given), layer, readout = self._last_forward(), self.layer, self.readout
        width = readout.output_size
        d = check.array("grad_y", grad_y, (*given.shape, width), layer.dtype)
        d_x, d_state = run.backward(readout.backward(d), grad_state)
        learned = {name: run.grads[name] for name in layer.parameters}
        for name in learned.keys() & {f"{name}_l0" for name in BY_GATE}:
            learned[name] = learned[name][: -layer.hidden_size]
        learned["weight_ih_l0"] = np.ascontiguousarray(learned["weight_ih_l0"][:, :-1])
        learned["weight_ih_l0"][:, :width] += run.grads["weight_feedback_l0"]
        layer._grads, layer.grad_static = learned, run.grad_static
        for name in readout.grads:
            readout._grads[name] += run.grads[f"{name}_readout_l0"]
        d_x[..., :width] *= given[..., None]
        return np.ascontiguousarray(d_x[..., :-1]), d_state

    def _one_step(self, x: Any) -> Array:
        return check.array("x", x, ("B", self.layer.input_size), self.layer.dtype)

    def _before(self, x: Array, state: State | None) -> Sequence[Array]:
        return self.layer._states("state", state, len(x))

    def _flags(self, name: str, value: Any, x: Array) -> npt.NDArray[np.bool_]:
        return check.flags(name, value, (len(x),))

    def _read(self, outputs: Array) -> Array:
        return self.readout._read(outputs)

    def _forced(self, forced: npt.ArrayLike | float, steps: int, rows: int) -> npt.NDArray[Any]:
        """Returns the forced steps as flags ``[T, B]``."""
        probability = chance(np.asarray(forced).item() if np.ndim(forced) == 0 else forced)
        if probability is not None:
            return self._generator.random((steps, rows)) < probability
        if np.ndim(forced) == 1:
            flags = check.flags("forced", forced, (steps,))[:, None]
        else:
            layout = Layout(Numpy, self, steps, rows, self.layer.batch_first)
            flags = layout.flags("forced", forced)
        return np.broadcast_to(flags, (steps, rows))

    def _fed_layer(self) -> RNN:
        """Makes the layer of the fed cell from the arrays of both, and scales of 8-bit weights."""
        layer, readout = self.layer, self.readout
        weight = readout.parameters["weight"]
        bias = readout.parameters.get("bias", np.zeros(readout.output_size, layer.dtype))
        learned = fed(namespace(weight), layer._learned(0), layer.hidden_size, weight, bias)
        if layer.plan.types.quantized:
            integers, scales = rounded(weight, "weight", "readout")
            learned |= {"weight_readout": integers, scales_of("weight_readout"): scales}
        run = copy.copy(layer)
        run.cell, run.input_size = with_feedback(layer.cell), layer.input_size + 1
        run.sizes = {**layer.sizes, OUTPUT: readout.output_size}
        run._parameters = {f"{name}_l0": array for name, array in learned.items()}
        vars(run)["_learned"] = lambda k: learned
        return run
