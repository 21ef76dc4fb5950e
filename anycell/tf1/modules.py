"""The recurrent cells of TensorFlow 1 as modules of TensorFlow 2, with their variables' names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import tensorflow as tf

from anycell.keras.call import Call, Inputs, Tensor
from anycell.keras.tensorflow import recur
from anycell.lang.cell import Cell
from anycell.tf1 import cells


class LSTMStateTuple(NamedTuple):
    """The state of an LSTM, ``[B, units]`` and ``[B, size of the output]``: c comes first."""

    c: Tensor
    h: Tensor


class RNNCell(tf.Module):
    """What the cells share: variables made at the first call, and one run over a sequence.

    Attributes:
        num_units: H.
        output_size: of the output.
    """

    def __init__(self, num_units: int, dtype: Any, name: str | None) -> None:
        super().__init__(name=name)
        if isinstance(num_units, bool) or not isinstance(num_units, int) or num_units <= 0:
            raise ValueError(f"num_units: given {num_units!r}; expected a positive integer.")
        self.dtype = tf.as_dtype(dtype or tf.float32)
        if self.dtype not in (tf.float32, tf.float64):
            raise ValueError(f"dtype: given {self.dtype.name}; expected float32 or float64.")
        self.num_units = self.output_size = num_units
        self.named: dict[str, tf.Variable] = {}  # as in a checkpoint, below the cell's scope

    # -- of each cell ----------------------------------------------------------------------------
    def _shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        """The variables for inputs of that width."""
        raise NotImplementedError

    def _call(self) -> Call:
        """The cell that runs."""
        raise NotImplementedError

    def _inputs(self, x: Tensor, state: Any) -> Inputs:
        """The variables and states as a run takes them."""
        raise NotImplementedError

    def _state(self, final: Sequence[Tensor]) -> Any:
        """Final states as TensorFlow 1 has them."""
        raise NotImplementedError

    def zero_state(self, batch_size: Any, dtype: Any = None) -> Any:
        """The state to begin with, all zeros."""
        raise NotImplementedError

    # -- use -------------------------------------------------------------------------------------
    def build(self, width: int) -> None:
        """Makes the variables for inputs ``[..., width]``: kernels glorot, biases as in TF 1."""
        if self.named:
            return
        with tf.init_scope(), self.name_scope:
            for name, shape in self._shapes(width).items():
                self.named[name] = tf.Variable(self._initial(name, shape), name=name)

    def _initial(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("bias"):
            # The gates of a GRU start open; what an LSTM adds to f is no part of its bias.
            return (tf.ones if name.startswith("gates") else tf.zeros)(shape, self.dtype)
        return tf.initializers.GlorotUniform()(shape, self.dtype)

    def restore(self, checkpoint: str, scope: str) -> None:
        """Reads the variables of a checkpoint of TensorFlow 1.

        Args:
            checkpoint: its path, without ``.index``.
            scope: of the cell in it, as ``"rnn/lstm_cell"``; ``tf.train.list_variables`` lists.

        Raises:
            ValueError: if it has not all of them, or in other shapes.
        """
        reader = tf.train.load_checkpoint(checkpoint)
        shapes = reader.get_variable_to_shape_map()
        kernel = next(iter(self._shapes(0)))
        there = shapes.get(f"{scope}/{kernel}")
        if there is not None:
            self.build(there[0] - self._recurrent_size)
        wanted = self._shapes(0 if there is None else there[0] - self._recurrent_size)
        for name, shape in wanted.items():
            found = shapes.get(f"{scope}/{name}")
            if found is None or tuple(found) != shape:
                raise ValueError(
                    f"scope: given {scope!r}, whose {name} in the checkpoint is "
                    f"{'missing' if found is None else f'of shape {tuple(found)}'}; expected "
                    f"{'one' if found is None else f'shape {shape}'}. It has: "
                    f"{', '.join(sorted(shapes))}."
                )
        for name in wanted:
            self.named[name].assign(reader.get_tensor(f"{scope}/{name}"))

    @property
    def _recurrent_size(self) -> int:
        return self.output_size

    def run(
        self,
        inputs: Tensor,
        initial_state: Any = None,
        sequence_length: Tensor = None,
        reverse: bool = False,
    ) -> tuple[Tensor, Any]:
        """Outputs ``[T, B, output_size]`` and the final state, over inputs ``[T, B, width]``.

        Past a row's ``sequence_length`` outputs are zero and the state is held; ``reverse`` starts
        there.
        """
        x = tf.convert_to_tensor(inputs, self.dtype)
        if x.shape.rank != 3:
            raise ValueError(f"inputs: given shape {x.shape}; expected [T, B, width].")
        self.build(x.shape[2])
        steps, rows = tf.unstack(tf.shape(x)[:2])
        state = self.zero_state(rows) if initial_state is None else initial_state
        given = self._inputs(x, state)
        if sequence_length is not None:
            lengths = tf.cast(sequence_length, tf.int32)
            given = given._replace(mask=tf.range(steps)[:, None] < lengths[None])
        outputs, final = recur(replace(self._call(), reverse=reverse), given)
        return outputs, self._state(final)

    def __call__(self, inputs: Tensor, state: Any) -> tuple[Tensor, Any]:
        """One step: the output ``[B, output_size]`` and the new state from ``[B, width]``."""
        outputs, final = self.run(tf.convert_to_tensor(inputs, self.dtype)[None], state)
        return outputs[0], final


class LSTMCell(RNNCell):
    """``tf.compat.v1.nn.rnn_cell.LSTMCell``, and ``BasicLSTMCell``.

    Args:
        num_units: H.
        use_peepholes: whether gates see the cell state.
        cell_clip: a bound for c, or None.
        num_proj: the size of a projected output, or None.
        proj_clip: a bound for that.
        forget_bias: added to f in every step.
        dtype: float32 or float64.

    Variables: ``kernel`` ``[width + output_size, 4 * H]`` with gates i c f o, ``bias``
    ``[4 * H]``, ``w_i_diag``, ``w_f_diag``, ``w_o_diag`` ``[H]``, ``projection/kernel``
    ``[H, num_proj]``. The state is ``LSTMStateTuple(c, h)``.
    """

    def __init__(
        self,
        num_units: int,
        use_peepholes: bool = False,
        cell_clip: float | None = None,
        num_proj: int | None = None,
        proj_clip: float | None = None,
        forget_bias: float = 1.0,
        dtype: Any = None,
        name: str | None = "lstm_cell",
    ) -> None:
        super().__init__(num_units, dtype, name)
        self.use_peepholes, self.num_proj = use_peepholes, num_proj
        self.output_size = num_proj or num_units
        given: dict[str, Any] = {"forget_bias": float(forget_bias)}
        if cell_clip is not None:
            given["cell_clip"] = float(cell_clip)
        if num_proj is not None and proj_clip is not None:
            given["proj_clip"] = float(proj_clip)
        kinds = {
            (False, False): cells.LSTM,
            (True, False): cells.PeepholeLSTM,
            (False, True): cells.ProjectedLSTM,
            (True, True): cells.ProjectedPeepholeLSTM,
        }
        self.cell: Cell = kinds[bool(use_peepholes), num_proj is not None](**given)

    def _shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        h = self.num_units
        found: dict[str, tuple[int, ...]] = {
            "kernel": (width + self.output_size, 4 * h), "bias": (4 * h,)
        }  # fmt: skip
        found |= dict.fromkeys(self.cell.param_names, (h,))
        return found | ({"projection/kernel": (h, self.num_proj)} if self.num_proj else {})

    def _call(self) -> Call:
        sizes = (("P", self.num_proj),) if self.num_proj else ()
        return Call(self.cell, self.num_units, sizes, repeat=False)

    def _inputs(self, x: Tensor, state: Any) -> Inputs:
        c, h = state
        kernel, width = self.named["kernel"], x.shape[2]
        projection = self.named.get("projection/kernel")
        return Inputs(
            x,
            kernel[:width],
            kernel[width:],
            tf.convert_to_tensor(self.named["bias"]),
            None,
            tuple(tf.convert_to_tensor(self.named[name]) for name in self.cell.param_names),
            () if projection is None else (("projection", tf.transpose(projection)),),
            (tf.convert_to_tensor(h, self.dtype), tf.convert_to_tensor(c, self.dtype)),
        )

    def _state(self, final: Sequence[Tensor]) -> LSTMStateTuple:
        return LSTMStateTuple(final[1], final[0])

    def zero_state(self, batch_size: Any, dtype: Any = None) -> LSTMStateTuple:
        """The state to begin with, all zeros."""
        kind = dtype or self.dtype
        c = tf.zeros((batch_size, self.num_units), kind)
        return LSTMStateTuple(c, tf.zeros((batch_size, self.output_size), kind))


class LSTMBlockCell(LSTMCell):
    """``tf.contrib.rnn.LSTMBlockCell``: the same, with its own spelling of the arguments."""

    def __init__(
        self,
        num_units: int,
        forget_bias: float = 1.0,
        cell_clip: float | None = None,
        use_peephole: bool = False,
        dtype: Any = None,
        name: str | None = "lstm_cell",
    ) -> None:
        # TensorFlow 1 spelt "no bound" as -1 too.
        bound = None if cell_clip is None or cell_clip <= 0 else cell_clip
        super().__init__(
            num_units, use_peephole, bound, forget_bias=forget_bias, dtype=dtype, name=name
        )


class LSTMBlockFusedCell(LSTMBlockCell):
    """``tf.contrib.rnn.LSTMBlockFusedCell``: over whole sequences, time first.

    ``cell(inputs [T, B, width], initial_state=None, sequence_length=None)`` returns outputs
    ``[T, B, H]``, zero past a row's length, and ``LSTMStateTuple(c, h)`` at its end.
    """

    def __init__(
        self,
        num_units: int,
        forget_bias: float = 1.0,
        cell_clip: float | None = None,
        use_peephole: bool = False,
        dtype: Any = None,
        name: str | None = "lstm_fused_cell",
    ) -> None:
        super().__init__(num_units, forget_bias, cell_clip, use_peephole, dtype, name)

    def __call__(
        self, inputs: Tensor, initial_state: Any = None, sequence_length: Tensor = None
    ) -> tuple[Tensor, LSTMStateTuple]:
        """Runs whole sequences."""
        return self.run(inputs, initial_state, sequence_length)


class GRUCell(RNNCell):
    """``tf.compat.v1.nn.rnn_cell.GRUCell``, and ``GRUBlockCell``: the reset before the matmul.

    Variables: ``gates/kernel`` ``[width + H, 2 * H]`` with r u, ``gates/bias`` ``[2 * H]``,
    ``candidate/kernel`` ``[width + H, H]``, ``candidate/bias`` ``[H]``. The state is h.
    """

    def __init__(self, num_units: int, dtype: Any = None, name: str | None = "gru_cell") -> None:
        super().__init__(num_units, dtype, name)

    def _shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        h = self.num_units
        rows = width + h
        return {
            "gates/kernel": (rows, 2 * h), "gates/bias": (2 * h,),
            "candidate/kernel": (rows, h), "candidate/bias": (h,),
        }  # fmt: skip

    def _call(self) -> Call:
        return Call(cells.GRU, self.num_units, repeat=False)

    def _inputs(self, x: Tensor, state: Any) -> Inputs:
        width = x.shape[2]
        gates, candidate = self.named["gates/kernel"], self.named["candidate/kernel"]
        biases = [self.named["gates/bias"], self.named["candidate/bias"]]
        return Inputs(
            x,
            tf.concat([gates[:width], candidate[:width]], axis=1),
            None,
            tf.concat(biases, axis=0),
            None,
            (),
            (
                ("gates", tf.transpose(gates[width:])),
                ("candidate", tf.transpose(candidate[width:])),
            ),
            (tf.convert_to_tensor(state, self.dtype),),
        )

    def _state(self, final: Sequence[Tensor]) -> Tensor:
        return final[0]

    def zero_state(self, batch_size: Any, dtype: Any = None) -> Tensor:
        """The state to begin with, all zeros."""
        return tf.zeros((batch_size, self.num_units), dtype or self.dtype)
