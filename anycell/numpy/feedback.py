"""``Feedback``: a layer whose readout is its own next input."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from anycell.engines.cpu import pool
from anycell.lang.transform import OUTPUT, with_feedback
from anycell.layer import Options, check_checkpoint
from anycell.layer.feedback import BY_GATE, LEAST
from anycell.layer.rounding import rounded
from anycell.numpy import check, passes
from anycell.numpy.base import Array
from anycell.numpy.dense import Dense
from anycell.numpy.layers import RNN, State
from anycell.plan import plan, scales_of


class Feedback:
    """Runs a layer whose input is a series, or, where that is not given, its own readout.

    With Y = ``readout.output_size``, and the layer's input made of Y numbers of the series, which
    come first, and of others that are always given:

        y_t     = W_readout output_t + b_readout
        input_t = [series_t where forced_t, else y_{t-1}; others_t]

    Where all steps are forced this is teacher forcing: ``readout.forward(layer.forward(x)[0])``.
    Where none is, the layer runs freely. In between, by chance, it is scheduled sampling. Both
    passes are those of one fused kernel, the readout within it; gradients flow back through what is
    fed back. y before the first step is the readout of the initial state, so that a forecast may
    start from the state that any call of ``layer`` returned.

    Parameters and gradients stay those of ``layer`` and ``readout``: give both to an optimizer.

    Args:
        layer: of one layer and one direction, any cell.
        readout: from the layer's output to the series.
        seed: of the steps that are forced by chance; None draws one.

    Raises:
        ValueError, TypeError: naming the argument, what was given and what was expected.

    Example:
        >>> layer, readout = RNN(anycell.cells.LSTM, 3, 8, seed=0), Dense(8, 1, seed=1)
        >>> y, state = Feedback(layer, readout).forward(np.zeros((5, 2, 3)), forced=0.5)
        >>> y.shape
        (5, 2, 1)

    Source: Williams & Zipser, *A Learning Algorithm for Continually Running Fully Recurrent Neural
    Networks*, 1989; Bengio et al., *Scheduled Sampling for Sequence Prediction with Recurrent
    Neural Networks*, 2015.
    """

    def __init__(self, layer: RNN, readout: Dense, *, seed: int | None = None) -> None:
        if not isinstance(layer, RNN) or layer.num_layers > 1 or layer.bidirectional:
            raise ValueError(
                f"layer: given {layer!r}, expected anycell.numpy.RNN, LSTM or GRU of one layer and "
                "one direction. Of several cells make one: a cell may hold the states of all."
            )
        if not isinstance(readout, Dense) or readout.input_size != layer._width:
            raise ValueError(f"readout: given {readout!r}, expected Dense({layer._width}, ...).")
        if readout.output_size > layer.input_size or readout.dtype != layer.dtype:
            raise ValueError(
                f"readout: given {readout!r} of {readout.dtype}, expected at most the layer's "
                f"{layer.input_size} inputs, of {layer.dtype}: what is read out is fed back."
            )
        self.layer, self.readout = layer, readout
        with_feedback(layer.cell)  # or why there is none
        self._generator = check.generator("seed", seed)
        self._saved: tuple[passes.Pullback, Any] | None = None

    def __repr__(self) -> str:
        return f"Feedback({self.layer!r}, {self.readout!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_saved": None}  # a copy is no part of a pass that is under way

    def forward(
        self,
        x: npt.ArrayLike,
        state: State | None = None,
        *,
        forced: npt.ArrayLike | float,
        mask: npt.ArrayLike | None = None,
        lengths: npt.ArrayLike | None = None,
        resets: npt.ArrayLike | None = None,
        static: npt.ArrayLike | None = None,
        training: bool = False,
    ) -> tuple[Array, State]:
        """Runs whole sequences.

        Args:
            x: ``[T, B, input_size]``, laid out as for the layer, the series in the first Y columns.
                Where a step is not forced, what lies there never matters, not even NaN.
            state, mask, lengths, resets, static, training: as in ``RNN.forward``.
            forced: where the series is given: bool, laid out as x without its last axis, such as
                ``np.isfinite(series)`` of one with gaps, or ``[T]``, the same for all rows. Or a
                number in [0, 1]: with that probability each step of each row is, drawn from
                ``seed``. A schedule of it is ``forced=schedule(step)``.

        Returns:
            y: ``[T, B, Y]``, laid out as x.
            state: as of ``RNN.forward``.
        """
        layer, width = self.layer, self.readout.output_size
        x = check.array("x", x, layer._layout("T", "B", layer.input_size), layer.dtype)
        x = x.swapaxes(0, 1) if layer.batch_first else x
        steps, rows = x.shape[:2]
        given, training = self._forced(forced, steps, rows), check.boolean("training", training)
        if training and layer.plan.types.quantized:
            layer.forward(x, training=True)  # which refuses
        entering = np.empty((steps, rows, layer.input_size + 1), layer.dtype)
        entering[..., :width] = np.where(given[..., None], x[..., :width], 0.0)
        entering[..., width:-1] = x[..., width:]
        free: Any = 1.0
        if layer.plan.types.quantized:
            largest = np.abs(entering[..., :-1]).max(-1, initial=0.0)
            free = np.maximum(largest, layer.dtype.type(LEAST))
        entering[..., -1] = np.where(given, 0.0, free)
        options = Options(
            training=training,
            seed=int(layer._generator.integers(1 << 63)) if training and layer.cell.keeps else 0,
            threads=pool.threads(),
            checkpoint=check_checkpoint(layer.checkpoint),
        )
        states = zip(layer.cell.state_names, layer._states("state", state, rows), strict=True)
        arrays = {
            "x": entering,
            "mask": layer._valid(mask, lengths, steps, rows),
            "resets": None if resets is None else layer._flags("resets", resets, steps, rows),
            "static": layer._static(static, rows),
            **{f"state {name}": array for name, array in states},
            **self._learned(),
        }
        sizes = {**layer.sizes, OUTPUT: width}
        fed = with_feedback(layer.cell)
        chosen = plan(fed, layer.hidden_size, layer.plan.dtype, sizes=sizes)
        output, final, pullback = passes.run(chosen, arrays, options)
        self._saved = (pullback, given) if training else None
        y = self.readout.forward(output, training=training)
        y = np.ascontiguousarray(y.swapaxes(0, 1)) if layer.batch_first else y
        return y, layer._returned([final])

    def backward(
        self, grad_y: npt.ArrayLike, grad_state: State | None = None
    ) -> tuple[Array, State]:
        """The gradients of the last ``forward``'s arguments, from those of its results.

        Replaces ``grads`` of the layer and of the readout.

        Args:
            grad_y: shaped as y.
            grad_state: shaped as the returned state; None is zero.

        Returns:
            the gradients of x, zero for the series where it was not given, and of the initial
            state, shaped as those. That of a static input is ``layer.grad_static``.

        Raises:
            RuntimeError: where no ``forward(..., training=True)`` went before.
        """
        if self._saved is None:
            raise RuntimeError("Feedback.backward() needs a forward(x, training=True) before it.")
        (pullback, given), layer, readout = self._saved, self.layer, self.readout
        (steps, rows), width = given.shape, readout.output_size
        d = check.array("grad_y", grad_y, layer._layout(steps, rows, width), layer.dtype)
        d = np.ascontiguousarray(d.swapaxes(0, 1)) if layer.batch_first else d
        gradients = pullback(
            readout.backward(d), layer._states("grad_state", grad_state, rows, start=0.0)
        )
        hidden = layer.hidden_size
        learned = {
            name: gradients[name][:-hidden] if name in BY_GATE else gradients[name]
            for name in layer._shapes(0)
        }
        learned["weight_ih"] = np.ascontiguousarray(learned["weight_ih"][:, :-1])
        learned["weight_ih"][:, :width] += gradients["weight_feedback"]
        layer._grads = {name: learned[name.removesuffix("_l0")] for name in layer.parameters}
        for name in readout.grads:
            readout._grads[name] += gradients[f"{name}_readout"]
        layer.grad_static = gradients.get("static")
        d_x = gradients["x"][..., :-1]
        d_x[..., :width] *= given[..., None]
        d_x = np.ascontiguousarray(d_x.swapaxes(0, 1) if layer.batch_first else d_x)
        return d_x, layer._returned([[gradients[f"state {n}"] for n in layer.cell.state_names]])

    def _forced(self, forced: npt.ArrayLike | float, steps: int, rows: int) -> npt.NDArray[Any]:
        """``[T, B]``."""
        if np.ndim(forced) == 1:
            flags = check.flags("forced", forced, (steps,))
            return np.broadcast_to(flags[:, None], (steps, rows))
        if np.ndim(forced) == 0 and not isinstance(forced, (bool, np.bool_)):
            chance = check.probability("forced", forced)
            return self._generator.random((steps, rows)) < chance
        return self.layer._flags("forced", forced, steps, rows).astype(bool)

    def _learned(self) -> dict[str, Any]:
        """What the fed cell learns, with the scales of what has 8 bits."""
        layer, readout = self.layer, self.readout
        learned, hidden = layer._learned(0), layer.hidden_size
        fed: dict[str, Any] = {"weight_feedback": learned["weight_ih"][:, : readout.output_size]}
        fed["weight_readout"] = readout.parameters["weight"]
        if layer.plan.types.quantized:
            fed[scales_of("weight_feedback")] = learned[scales_of("weight_ih")]
            integers, scales = rounded(readout.parameters["weight"], "readout")
            fed |= {"weight_readout": integers, scales_of("weight_readout"): scales}
        for name in BY_GATE.keys() & learned.keys():
            below = (hidden, *learned[name].shape[1:])
            rows = np.full_like(learned[name], BY_GATE[name], shape=below)
            learned[name] = np.concatenate([learned[name], rows])
        column = np.zeros_like(learned["weight_ih"][:, :1])
        column[-hidden:] = 1
        learned["weight_ih"] = np.concatenate([learned["weight_ih"], column], axis=1)
        return {**learned, **fed, "bias_readout": readout.parameters.get("bias")}


__all__ = ["Feedback"]
