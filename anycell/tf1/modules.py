"""The recurrent cells of TensorFlow 1 as modules of TensorFlow 2, with their variables' names."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from anycell.keras.call import Call, Inputs, Tensor
from anycell.keras.tensorflow import recur
from anycell.lang.cell import Cell
from anycell.tf1 import cells


class LSTMStateTuple(NamedTuple):
    """The state of an LSTM, ``[B, units]`` and ``[B, size of the output]``: c comes first."""

    c: Tensor
    h: Tensor


def _positive(name: str, given: Any) -> int:
    """A size; NumPy's integers are integers."""
    try:
        size = 0 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        size = 0
    if size <= 0:
        raise ValueError(f"{name}: given {given!r}; expected a positive integer.")
    return size


class RNNCell(tf.Module):
    """What the cells share: variables made at the first call, and one run over a sequence.

    Attributes:
        num_units: H.
        output_size: of the output.
        state_size: of the state, or a tuple of sizes.
    """

    def __init__(
        self,
        num_units: int,
        dtype: Any,
        name: str | None,
        activation: Any = None,
        reuse: Any = None,
        kernel_initializer: Any = None,
        bias_initializer: Any = None,
    ) -> None:
        super().__init__(name=name)
        self.dtype = tf.as_dtype(dtype or tf.float32)
        if self.dtype not in (tf.float32, tf.float64):
            raise ValueError(f"dtype: given {self.dtype.name}; expected float32 or float64.")
        if activation not in (None, "tanh", tf.tanh, keras.activations.tanh):
            raise ValueError(
                f"activation: given {activation!r}; expected None or tanh. Write a cell of your "
                "own with @anycell.cell for another."
            )
        if reuse is True:
            raise ValueError(
                "reuse: given True; expected None, False or AUTO_REUSE, which change nothing: "
                "variables belong to the cell. Call the same cell again to share them."
            )
        self.num_units = self.output_size = _positive("num_units", num_units)
        self.state_size: Any = self.num_units
        self.kernel_initializer = kernel_initializer or "glorot_uniform"
        self.bias_initializer = bias_initializer
        self.named: dict[str, tf.Variable] = {}  # as in a checkpoint, below the cell's scope

    # -- of each cell ----------------------------------------------------------------------------
    def _shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        """The variables for inputs of that width."""
        raise NotImplementedError

    def _call(self) -> Call:
        """The cell that runs."""
        raise NotImplementedError

    def _inputs(self, x: Tensor, state: Sequence[Tensor]) -> Inputs:
        """The variables and the parts of the state as a run takes them."""
        raise NotImplementedError

    def _state(self, final: Sequence[Tensor]) -> Any:
        """Final states as TensorFlow 1 has them."""
        raise NotImplementedError

    # -- use -------------------------------------------------------------------------------------
    def zero_state(self, batch_size: Any, dtype: Any = None) -> Any:
        """The state to begin with, all zeros."""
        kind = dtype or self.dtype
        return tf.nest.map_structure(
            lambda size: tf.zeros((batch_size, size), kind), self.state_size
        )

    def build(self, width: int) -> None:
        """Makes the variables for inputs ``[..., width]``: unless initializers were given, kernels
        glorot, biases as in TF 1."""
        if self.named:
            made = next(iter(self.named.values())).shape[0] - self._recurrent_size
            if width != made:
                raise ValueError(
                    f"inputs: given width {width}; expected {made}, for which the variables are."
                )
            return
        with tf.init_scope(), self.name_scope:
            for name, shape in self._shapes(width).items():
                self.named[name] = tf.Variable(self._initial(name, shape), name=name)

    def _initial(self, name: str, shape: tuple[int, ...]) -> Tensor:
        # The gates of a GRU start open; what an LSTM adds to f is no part of its bias.
        bias = self.bias_initializer or ("ones" if name.startswith("gates") else "zeros")
        found = keras.initializers.get(bias if name.endswith("bias") else self.kernel_initializer)
        if isinstance(found, keras.initializers.Initializer):
            found = found.clone()  # else each variable of one shape would get the same numbers
        return found(shape, self.dtype)

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
        x = self.read(inputs, "[T, B, width]")
        self.build(x.shape[2])
        steps, rows = tf.unstack(tf.shape(x)[:2])
        state = self.zero_state(rows) if initial_state is None else initial_state
        given = self._inputs(x, self._parts(state, x.shape[1]))
        if sequence_length is not None:
            lengths = _lengths(sequence_length, x.shape[1], rows)
            given = given._replace(mask=tf.range(steps)[:, None] < lengths[None])
        outputs, final = recur(replace(self._call(), reverse=reverse), given)
        return outputs, self._state(final)

    def __call__(self, inputs: Tensor, state: Any, scope: Any = None) -> tuple[Tensor, Any]:
        """One step: the output ``[B, output_size]`` and the new state from ``[B, width]``."""
        outputs, final = self.run(self.read(inputs, "[B, width]")[None], state)
        return outputs[0], final

    # -- what is given ---------------------------------------------------------------------------
    def read(self, inputs: Any, layout: str, dtype: Any = None) -> Tensor:
        """Inputs of that layout as a tensor; ``dtype`` is what a loop was told, if anything."""
        if dtype is not None and tf.as_dtype(dtype) != self.dtype:
            raise ValueError(
                f"dtype: given {tf.as_dtype(dtype).name}; expected {self.dtype.name}, that of the "
                "cell: give the cell another by its own dtype."
            )
        x = tf.convert_to_tensor(inputs, self.dtype)
        if x.shape.rank != layout.count(",") + 1 or x.shape[-1] is None:
            raise ValueError(
                f"inputs: given shape {x.shape}; expected {layout}, of which rank and width are "
                "known when a graph is made: inputs.set_shape says them."
            )
        return x

    def _parts(self, state: Any, rows: int | None) -> list[Tensor]:
        """The tensors of a state, ``[B, size]`` each."""
        sizes = tf.nest.flatten(self.state_size)
        several = isinstance(state, (tuple, list)) and isinstance(self.state_size, tuple)
        parts = [tf.convert_to_tensor(part, self.dtype) for part in (state if several else [state])]
        expected = [tf.TensorShape((rows, size)) for size in sizes]
        if len(parts) != len(sizes) or not all(
            part.shape.is_compatible_with(shape)
            for part, shape in zip(parts, expected, strict=True)
        ):
            shown = [", ".join(str(shape) for shape in shapes) for shapes in (
                [part.shape for part in parts], expected
            )]  # fmt: skip
            raise ValueError(
                f"state: given shapes {shown[0]}; expected {shown[1]}, as cell.zero_state makes it."
            )
        return parts


def _lengths(given: Any, rows: int | None, there: Tensor) -> Tensor:
    """A length for each row; ``there`` is the number of rows when a graph runs."""
    lengths = tf.cast(given, tf.int32)
    if not lengths.shape.is_compatible_with((rows,)):
        raise ValueError(
            f"sequence_length: given shape {lengths.shape}; expected ({rows},), a length for each "
            "row of the batch."
        )
    if rows is not None and lengths.shape.is_fully_defined():
        return lengths
    same = tf.debugging.assert_equal(
        tf.size(lengths), there, "sequence_length: expected a length for each row."
    )
    with tf.control_dependencies([same]):
        return tf.reshape(lengths, (-1,))


class LSTMCell(RNNCell):
    """``tf.compat.v1.nn.rnn_cell.LSTMCell``; ``BasicLSTMCell(n, b)`` is ``LSTMCell(n,
    forget_bias=b)``.

    Args:
        num_units: H.
        use_peepholes: whether gates see the cell state.
        cell_clip: a bound for c, or None.
        initializer: of kernels and peepholes, None is glorot.
        num_proj: the size of a projected output, or None.
        proj_clip: a bound for that.
        num_unit_shards, num_proj_shards: change nothing.
        forget_bias: added to f in every step.
        state_is_tuple: True.
        activation: None or tanh.
        reuse: not True: variables belong to the cell.
        name: of the module.
        dtype: float32 or float64, None is float32.

    Variables: ``kernel`` ``[width + output_size, 4 * H]`` with gates i c f o, ``bias``
    ``[4 * H]``, ``w_i_diag``, ``w_f_diag``, ``w_o_diag`` ``[H]``, ``projection/kernel``
    ``[H, num_proj]``. The state is ``LSTMStateTuple(c, h)``.
    """

    def __init__(
        self,
        num_units: int,
        use_peepholes: bool = False,
        cell_clip: float | None = None,
        initializer: Any = None,
        num_proj: int | None = None,
        proj_clip: float | None = None,
        num_unit_shards: int | None = None,
        num_proj_shards: int | None = None,
        forget_bias: float = 1.0,
        state_is_tuple: bool = True,
        activation: Any = None,
        reuse: Any = None,
        name: str | None = "lstm_cell",
        dtype: Any = None,
    ) -> None:
        super().__init__(num_units, dtype, name, activation, reuse, initializer)
        if not state_is_tuple:
            raise ValueError(
                f"state_is_tuple: given {state_is_tuple!r}; expected True. The state is "
                "LSTMStateTuple(c, h): c, h = tf.split(state, [num_units, output_size], axis=1)."
            )
        if num_proj is not None:
            num_proj = self.output_size = _positive("num_proj", num_proj)
        self.use_peepholes, self.num_proj = use_peepholes, num_proj
        self.state_size = LSTMStateTuple(self.num_units, self.output_size)
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

    def _inputs(self, x: Tensor, state: Sequence[Tensor]) -> Inputs:
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
            (h, c),
        )

    def _state(self, final: Sequence[Tensor]) -> LSTMStateTuple:
        return LSTMStateTuple(final[1], final[0])


class LSTMBlockCell(LSTMCell):
    """``tf.contrib.rnn.LSTMBlockCell``: the same, with its own spelling of the arguments."""

    def __init__(
        self,
        num_units: int,
        forget_bias: float = 1.0,
        cell_clip: float | None = None,
        use_peephole: bool = False,
        dtype: Any = None,
        reuse: Any = None,
        name: str | None = "lstm_cell",
    ) -> None:
        # TensorFlow 1 spelt "no bound" as -1 too.
        bound = None if cell_clip is None or cell_clip <= 0 else cell_clip
        super().__init__(
            num_units, use_peephole, bound,
            forget_bias=forget_bias, dtype=dtype, reuse=reuse, name=name,
        )  # fmt: skip


class LSTMBlockFusedCell(LSTMBlockCell):
    """``tf.contrib.rnn.LSTMBlockFusedCell``: over whole sequences, time first.

    ``cell(inputs [T, B, width], initial_state=None, dtype=None, sequence_length=None)`` returns
    outputs ``[T, B, H]``, zero past a row's length, and ``LSTMStateTuple(c, h)`` at its end.
    """

    def __init__(
        self,
        num_units: int,
        forget_bias: float = 1.0,
        cell_clip: float | None = None,
        use_peephole: bool = False,
        reuse: Any = None,
        dtype: Any = None,
        name: str | None = "lstm_fused_cell",
    ) -> None:
        super().__init__(num_units, forget_bias, cell_clip, use_peephole, dtype, reuse, name)

    def __call__(  # type: ignore[override]
        self,
        inputs: Tensor,
        initial_state: Any = None,
        dtype: Any = None,
        sequence_length: Tensor = None,
        scope: Any = None,
    ) -> tuple[Tensor, LSTMStateTuple]:
        """Runs whole sequences."""
        x = self.read(inputs, "[T, B, width]", dtype)
        return self.run(x, initial_state, sequence_length)


class GRUCell(RNNCell):
    """``tf.compat.v1.nn.rnn_cell.GRUCell``, and ``GRUBlockCell``: the reset before the matmul.

    Args:
        num_units: H.
        activation: None or tanh.
        reuse: not True: variables belong to the cell.
        kernel_initializer: None is glorot.
        bias_initializer: None is 1 for the gates, 0 for the candidate.
        name: of the module.
        dtype: float32 or float64, None is float32.

    Variables: ``gates/kernel`` ``[width + H, 2 * H]`` with r u, ``gates/bias`` ``[2 * H]``,
    ``candidate/kernel`` ``[width + H, H]``, ``candidate/bias`` ``[H]``. The state is h.
    """

    def __init__(
        self,
        num_units: int,
        activation: Any = None,
        reuse: Any = None,
        kernel_initializer: Any = None,
        bias_initializer: Any = None,
        name: str | None = "gru_cell",
        dtype: Any = None,
    ) -> None:
        super().__init__(
            num_units, dtype, name, activation, reuse, kernel_initializer, bias_initializer
        )

    def _shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        h = self.num_units
        rows = width + h
        return {
            "gates/kernel": (rows, 2 * h), "gates/bias": (2 * h,),
            "candidate/kernel": (rows, h), "candidate/bias": (h,),
        }  # fmt: skip

    def _call(self) -> Call:
        return Call(cells.GRU, self.num_units, repeat=False)

    def _inputs(self, x: Tensor, state: Sequence[Tensor]) -> Inputs:
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
            tuple(state),
        )

    def _state(self, final: Sequence[Tensor]) -> Tensor:
        return final[0]
