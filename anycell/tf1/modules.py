"""The recurrent cells of TensorFlow 1 that run on a fused kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from anycell.explanation import Explained
from anycell.keras.call import Arrays, Tensor, named_states
from anycell.keras.cells import ACTIVATIONS
from anycell.keras.tensorflow.fused import engine_of, recur
from anycell.lang.cell import Cell
from anycell.layer.checks import integer, refuse
from anycell.plan import Engine, Layer, Options
from anycell.tf1 import cells
from anycell.tf1.base import LSTMStateTuple, Result, RNNCell, mask, read, run, tensor, v1

# The names that TensorFlow 1 knew. Keras has since changed the meaning of some other names.
_NAMES = "elu exponential linear relu selu sigmoid softplus softsign swish tanh".split()
# The names of TensorFlow's functions that differ from those in the language of cells.
_SYNONYMS = {"exponential": "exp", "linear": "identity", "silu": "swish"}


def _activation(value: Any) -> str:
    """Returns the name of an activation in the language of cells."""
    for name in ACTIVATIONS:
        names = name, _SYNONYMS.get(name, name)
        if isinstance(value, str) and value in names and value in _NAMES:
            return name
        modules = tf.nn, tf.math, tf, v1.nn, v1.math, v1
        places = (getattr(place, n, None) for n in names for place in modules)
        if callable(value) and value in (*places, getattr(keras.activations, name, None)):
            return name
    raise ValueError(
        f"activation: given {value!r}; expected None or one of {', '.join(_NAMES)}, or the "
        f"function of TensorFlow or Keras for one of {', '.join(ACTIVATIONS)}. For any other "
        "activation, write your own cell with @anycell.cell."
    )


class KernelCell(Explained, RNNCell):
    """The base of cells with a kernel: makes variables at the first call, and runs sequences."""

    cell: Cell
    _cell_sizes: tuple[tuple[str, int], ...] = ()

    def __init__(
        self, num_units: int, dtype: Any, name: str | None, activation: Any = None,
        reuse: Any = None, kernel_initializer: Any = None, bias_initializer: Any = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(name=name, dtype=dtype, **{"_reuse": reuse, **kwargs})
        if self._reuse is True and v1.executing_eagerly_outside_functions():
            expected = "None, False or AUTO_REUSE outside a graph of TensorFlow 1"
            hint = "Here, variables belong to the cell: call the same cell again to share them."
            refuse("reuse", "True", expected, hint)
        self.activation = "tanh" if activation is None else _activation(activation)
        self.num_units = self.output_size = integer("num_units", num_units)
        self.state_size: Any = self.num_units
        self.kernel_initializer, self.bias_initializer = kernel_initializer, bias_initializer
        self._weights: dict[str, tf.Variable] = {}

    # -- of each cell ----------------------------------------------------------------------------
    def _shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the variables for inputs of that width."""
        raise NotImplementedError

    def _layer(self) -> Layer:
        """Returns the layer of the cell."""
        sizes = ("H", self.num_units), *self._cell_sizes
        return Layer(self.cell, sizes, dtype=tf.as_dtype(self.dtype or tf.float32).name)

    def _arrays(self, x: Tensor, state: Sequence[Tensor]) -> Arrays:
        """Returns the variables and the parts of the state in the form that a run takes."""
        raise NotImplementedError

    def _read_kernel(self, x: Tensor) -> dict[str, Tensor]:
        """Returns the input and the bias, and splits TF 1's kernel into that of input and state."""
        kernel, width = self._read("kernel"), x.shape.as_list()[2]
        return {
            "x": x,
            "turned weight_ih": kernel[:width],
            "turned weight_hh": kernel[width:],
            "bias_ih": self._read("bias"),
        }

    def _state(self, final: Sequence[Tensor]) -> Any:
        """Returns final states in the form of TensorFlow 1."""
        return final[0]

    # -- variables -------------------------------------------------------------------------------
    @property
    def named(self) -> dict[str, tf.Variable]:
        """The cell's variables, by their names in a checkpoint below its scope."""
        return self._weights | super().named

    def build(self, inputs_shape: Any) -> None:
        """Makes the variables for inputs of that shape or width. Without initializers, kernels take
        the initializer of their scope, or glorot, and biases are as in TF 1."""
        whole = inputs_shape if isinstance(inputs_shape, int) else inputs_shape[-1]
        width = integer("inputs_shape", getattr(whole, "value", whole))
        with self._scoped():
            self._build(width, tf.float32)

    def _build(self, width: int, dtype: Any) -> None:
        if self._weights:
            made = next(iter(self._weights.values())).shape[0] - self.output_size
            if width != made:
                expected = f"{made}, the width that the variables were made for"
                refuse("inputs", f"width {width}", expected, "Make a cell for each layer.")
            return
        self.dtype = self.dtype or dtype
        with tf.init_scope():
            for name, shape in self._shapes(width).items():
                self._weights[name] = v1.get_variable(
                    name, shape, self.dtype, self._initial(name), trainable=self.trainable
                )

    def _initial(self, name: str) -> Any:
        # The gates of a GRU start open; the ``forget_bias`` of an LSTM is not part of its bias.
        bias = self.bias_initializer or ("ones" if name.startswith("gates") else "zeros")
        wanted = bias if name.endswith("bias") else self.kernel_initializer
        initializer = None if wanted is None else keras.initializers.get(wanted)
        if isinstance(initializer, keras.initializers.Initializer):
            # A copy, because otherwise all variables of one shape would get the same numbers.
            initializer = initializer.clone()
        return initializer

    def _read(self, name: str) -> Tensor:
        """Returns a variable's value in the dtype of the computation."""
        return tf.cast(tf.convert_to_tensor(self._weights[name]), self._computed)

    def _restore(self, reader: Any, scope: str) -> None:
        shapes = reader.get_variable_to_shape_map()
        kernel = next(iter(self._shapes(0)))
        stored = shapes.get(f"{scope}/{kernel}")
        width = 0 if stored is None else stored[0] - self.output_size
        if width > 0:
            with self._scoped():
                self._build(width, reader.get_variable_to_dtype_map()[f"{scope}/{kernel}"])
        wanted = self._shapes(width)
        for name, shape in wanted.items():
            saved = shapes.get(f"{scope}/{name}")
            if saved is None or tuple(saved) != shape:
                fault = "missing" if saved is None else f"of shape {tuple(saved)}"
                shown = f"{scope!r}, whose {name} in the checkpoint is {fault}"
                refuse("scope", shown, f"shape {shape}", f"It has: {', '.join(sorted(shapes))}.")
        super()._restore(reader, scope)

    # -- runs ------------------------------------------------------------------------------------
    @property
    def _computed(self) -> Any:
        """The dtype of the computation; only inputs, variables and results can have 16 bits."""
        return tf.float64 if self.dtype == tf.float64 else tf.float32

    def _about(self) -> str:
        return self.name

    def _engine(self) -> Engine:
        dtype = tf.as_dtype(self.dtype or tf.float32)
        name, reason = engine_of(self._layer()._replace(dtype=self._computed.name))
        return Engine(name, reason + f"; {dtype.name} computes in float32" * (dtype.size == 2))

    def call(self, inputs: Tensor, state: Any) -> Result:
        """Runs one step."""
        x = read(self, inputs, "[B, width]")[None]
        outputs, final = self._sequence(x, state, None, False)
        return outputs[0], final

    def _sequence(self, x: Tensor, state: Any, lengths: Tensor, reverse: bool) -> Result:
        x = read(self, x)
        rows, width = x.shape.as_list()[1:]
        self._build(width, x.dtype)
        parts = [tf.cast(part, self._computed) for part in self._parts(state, rows)]
        arrays = dict(self._arrays(tf.cast(x, self._computed), parts))
        if lengths is not None:
            arrays["mask"] = mask(x, lengths)
        layer = self._layer()._replace(options=Options(reverse=(reverse,)))
        outputs, final = recur(layer, arrays)
        return tf.cast(outputs, x.dtype), self._state([tf.cast(part, x.dtype) for part in final])

    def _parts(self, state: Any, rows: int | None) -> list[Tensor]:
        """Returns the tensors of a state, ``[B, size]`` each."""
        sizes = tf.nest.flatten(self.state_size)
        several = isinstance(state, (tuple, list)) and isinstance(self.state_size, tuple)
        parts = [tensor("state", part, self.dtype) for part in (state if several else [state])]
        actual = [part.shape for part in parts]
        expected = [tf.TensorShape((rows, size)) for size in sizes]
        pairs = zip(actual, expected, strict=False)
        if len(actual) != len(expected) or not all(g.is_compatible_with(e) for g, e in pairs):
            shown = [", ".join(map(str, shapes)) for shapes in (actual, expected)]
            refuse("state", f"shapes {shown[0]}", shown[1], "cell.zero_state makes one.")
        return parts


class BasicRNNCell(KernelCell):
    """``tf.compat.v1.nn.rnn_cell.BasicRNNCell``: h' = activation(W [x, h] + b).

    Args:
        num_units: H.
        activation: a function of TensorFlow or its name; None is tanh.
        reuse: whether variables exist already, in a graph of TensorFlow 1; elsewhere variables
            belong to the cell, and it must not be True.
        name: the scope of its variables; None is ``"basic_rnn_cell"``.
        dtype: float16, bfloat16, float32 or float64; None is that of the first inputs.
        kwargs: ``trainable``.

    Variables: ``kernel`` ``[width + H, H]``, ``bias`` ``[H]``. The state is h.
    """

    def __init__(
        self, num_units: int, activation: Any = None, reuse: Any = None, name: str | None = None,
        dtype: Any = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(num_units, dtype, name, activation, reuse, **kwargs)
        self.cell = cells.RNN(activation=self.activation)

    def _shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        return {"kernel": (width + self.num_units, self.num_units), "bias": (self.num_units,)}

    def _arrays(self, x: Tensor, state: Sequence[Tensor]) -> Arrays:
        return self._read_kernel(x) | named_states(self.cell, state)


class LSTMCell(KernelCell):
    """``tf.compat.v1.nn.rnn_cell.LSTMCell``.

    Args:
        num_units: H.
        use_peepholes: whether gates see the cell state.
        cell_clip: a bound for c, or None.
        initializer: for kernels and peepholes; None is that of the scope of variables, or glorot.
        num_proj: the size of a projected output, or None.
        proj_clip: a bound for the projected output, or None.
        num_unit_shards, num_proj_shards: change nothing.
        forget_bias: added to f in every step.
        state_is_tuple: whether the state is ``LSTMStateTuple(c, h)``, instead of one tensor with c
            and h concatenated.
        activation, reuse, name, dtype, kwargs: as in ``BasicRNNCell``.

    Variables: ``kernel`` ``[width + output_size, 4 * H]`` with gates i c f o, ``bias``
    ``[4 * H]``, ``w_f_diag``, ``w_i_diag``, ``w_o_diag`` ``[H]``, ``projection/kernel``
    ``[H, num_proj]``.
    """

    _diagonals = "w_f_diag", "w_i_diag", "w_o_diag"  # in the order in which TensorFlow 1 made them

    def __init__(
        self, num_units: int, use_peepholes: bool = False, cell_clip: float | None = None,
        initializer: Any = None, num_proj: int | None = None, proj_clip: float | None = None,
        num_unit_shards: int | None = None, num_proj_shards: int | None = None,
        forget_bias: float = 1.0, state_is_tuple: bool = True, activation: Any = None,
        reuse: Any = None, name: str | None = None, dtype: Any = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(num_units, dtype, name, activation, reuse, initializer, **kwargs)
        if num_proj is not None:
            num_proj = self.output_size = integer("num_proj", num_proj)
        self.use_peepholes, self.num_proj = use_peepholes, num_proj
        self.state_is_tuple = state_is_tuple
        sizes = LSTMStateTuple(self.num_units, self.output_size)
        self.state_size = sizes if state_is_tuple else sum(sizes)
        hyper: dict[str, Any] = {"forget_bias": float(forget_bias), "activation": self.activation}
        if cell_clip is not None:
            hyper["cell_clip"] = float(cell_clip)
        if num_proj is not None and proj_clip is not None:
            hyper["proj_clip"] = float(proj_clip)
        plain, projected = cells.LSTM, cells.ProjectedLSTM
        if use_peepholes:
            plain, projected = cells.PeepholeLSTM, cells.ProjectedPeepholeLSTM
        self.cell = (plain if num_proj is None else projected)(**hyper)
        self._cell_sizes = () if num_proj is None else (("P", num_proj),)

    def _shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        h = self.num_units
        shapes = {"kernel": (width + self.output_size, 4 * h), "bias": (4 * h,)}
        shapes |= dict.fromkeys(self._diagonals if self.use_peepholes else (), (h,))
        return shapes | ({"projection/kernel": (h, self.num_proj)} if self.num_proj else {})

    def _arrays(self, x: Tensor, state: Sequence[Tensor]) -> Arrays:
        # A state in one tensor has been checked; here it is split.
        sizes = [self.num_units, self.output_size]
        c, h = state if self.state_is_tuple else tf.split(state[0], sizes, axis=1)
        arrays = self._read_kernel(x) | named_states(self.cell, (h, c))
        arrays |= {name: self._read(name) for name in self.cell.param_names}
        if self.num_proj:
            arrays["turned weight_projection"] = self._read("projection/kernel")
        return arrays

    def _state(self, final: Sequence[Tensor]) -> Any:
        h, c = final
        return LSTMStateTuple(c, h) if self.state_is_tuple else tf.concat([c, h], axis=1)


class BasicLSTMCell(LSTMCell):
    """``tf.compat.v1.nn.rnn_cell.BasicLSTMCell``: without peepholes, bounds and projection."""

    def __init__(
        self, num_units: int, forget_bias: float = 1.0, state_is_tuple: bool = True,
        activation: Any = None, reuse: Any = None, name: str | None = None, dtype: Any = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            num_units, forget_bias=forget_bias, state_is_tuple=state_is_tuple,
            activation=activation, reuse=reuse, name=name, dtype=dtype, **kwargs,
        )  # fmt: skip


class LSTMBlockCell(LSTMCell):
    """``tf.contrib.rnn.LSTMBlockCell``: ``LSTMCell`` with its own names of the arguments."""

    _diagonals = "w_i_diag", "w_f_diag", "w_o_diag"

    def __init__(
        self, num_units: int, forget_bias: float = 1.0, cell_clip: float | None = None,
        use_peephole: bool = False, dtype: Any = None, reuse: Any = None,
        name: str | None = "lstm_cell",
    ) -> None:  # fmt: skip
        # TensorFlow 1 spelt "no bound" as -1 too.
        bound = None if cell_clip is None or cell_clip <= 0 else cell_clip
        super().__init__(
            num_units, use_peephole, bound,
            forget_bias=forget_bias, dtype=dtype, reuse=reuse, name=name,
        )  # fmt: skip


class LSTMBlockFusedCell(LSTMBlockCell):
    """``tf.contrib.rnn.LSTMBlockFusedCell``: runs whole sequences, time first.

    ``cell(inputs [T, B, width], initial_state=None, dtype=None, sequence_length=None)`` returns
    outputs ``[T, B, H]``, zero past a row's length, and ``LSTMStateTuple(c, h)`` at its end.
    """

    def __init__(
        self, num_units: int, forget_bias: float = 1.0, cell_clip: float | None = None,
        use_peephole: bool = False, reuse: Any = None, dtype: Any = None,
        name: str | None = "lstm_fused_cell",
    ) -> None:  # fmt: skip
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
        x = read(self, inputs, "[T, B, width]", dtype)
        with self._scoped(scope):
            return run(self, x, initial_state, sequence_length)


class GRUCell(KernelCell):
    """``tf.compat.v1.nn.rnn_cell.GRUCell``, and ``GRUBlockCell``: resets before the matmul.

    Args:
        num_units: H.
        activation: the activation of the candidate.
        kernel_initializer: None is that of the scope of variables, or glorot.
        bias_initializer: None is 1 for the gates, 0 for the candidate.
        reuse, name, dtype, kwargs: as in ``BasicRNNCell``.

    Variables: ``gates/kernel`` ``[width + H, 2 * H]`` with r u, ``gates/bias`` ``[2 * H]``,
    ``candidate/kernel`` ``[width + H, H]``, ``candidate/bias`` ``[H]``. The state is h.
    """

    def __init__(
        self, num_units: int, activation: Any = None, reuse: Any = None,
        kernel_initializer: Any = None, bias_initializer: Any = None, name: str | None = None,
        dtype: Any = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            num_units, dtype, name, activation, reuse, kernel_initializer, bias_initializer,
            **kwargs,
        )  # fmt: skip
        self.cell = cells.GRU(activation=self.activation)

    def _shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        h = self.num_units
        shapes = {"gates/kernel": (width + h, 2 * h), "gates/bias": (2 * h,)}
        return shapes | {"candidate/kernel": (width + h, h), "candidate/bias": (h,)}

    def _arrays(self, x: Tensor, state: Sequence[Tensor]) -> Arrays:
        width = x.shape.as_list()[2]
        gates, candidate = self._read("gates/kernel"), self._read("candidate/kernel")
        return {
            "x": x,
            "turned weight_ih": tf.concat([gates[:width], candidate[:width]], axis=1),
            "bias_ih": tf.concat([self._read("gates/bias"), self._read("candidate/bias")], axis=0),
            "turned weight_gates": gates[width:],
            "turned weight_candidate": candidate[width:],
            **named_states(self.cell, state),
        }
