"""The base of every cell of TensorFlow 1: one step, in a scope of variables; and whole runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from anycell.keras.call import Tensor
from anycell.keras.tensorflow.framework import sizes_of
from anycell.keras.tensorflow.read import short
from anycell.layer.checks import refuse
from anycell.plan import Engine
from anycell.read import SHORT
from anycell.tf1 import reading

v1 = tf.compat.v1
Result = tuple[Tensor, Any]  # outputs, and the state after them


class LSTMStateTuple(NamedTuple):
    """The state of an LSTM, ``[B, units]`` and ``[B, size of the output]``: c comes first."""

    c: Tensor
    h: Tensor

    @property
    def dtype(self) -> Any:
        """The dtype of both."""
        if self.c.dtype != self.h.dtype:
            raise TypeError(f"state: given {self.c.dtype} for c and {self.h.dtype} for h.")
        return self.c.dtype


class RNNCell(tf.Module):
    """``tf.compat.v1.nn.rnn_cell.RNNCell``: ``cell(inputs, state)`` is one step.

    Your own subclass defines ``call(inputs, state)``, which returns the output and the new state,
    and ``state_size`` and ``output_size``. TensorFlow's own loop runs it, step by step. Variables
    come from ``get_variable`` in ``call``, or from ``add_variable`` in ``build(inputs_shape)``, and
    the cell keeps them.

    Args:
        trainable: whether optimizers train its variables.
        name: the scope of its variables; None makes it from the class, ``my_cell`` from ``MyCell``.
        dtype: the dtype of inputs, states and variables; None takes that of the first inputs.

    Attributes:
        state_size: the size of the state, or sizes in the structure of the state.
        output_size: the size of the output.
        engine: the engine that runs the cell on this machine, and why: "cpu" is a fused kernel,
            "composite" a loop of TensorFlow over the steps.
    """

    state_size: Any
    output_size: Any
    # In TensorFlow 1, subclasses need not call __init__.
    dtype: Any = None
    trainable = True
    built = False
    _made: Any = None
    _reuse: Any = None
    _base_name: str | None = None
    _scope: Any = None
    _called = False

    def __init__(
        self, trainable: bool = True, name: str | None = None, dtype: Any = None, _reuse: Any = None
    ) -> None:
        super().__init__()
        self.trainable, self._base_name, self._reuse = trainable, name, _reuse
        if dtype is not None:
            self.dtype = _floating(dtype)

    @property
    def name(self) -> str:
        """The name of its scope of variables, which need not be an identifier of Python."""
        return self._base_name or super().name

    # -- of each cell ----------------------------------------------------------------------------
    def build(self, inputs_shape: Any) -> None:
        """Makes the variables for inputs of that shape, before the first step."""

    def call(self, inputs: Tensor, state: Any) -> Result:
        """One step."""
        raise NotImplementedError(f"{type(self).__name__}.call(inputs, state)")

    def _sequence(self, x: Tensor, state: Any, lengths: Tensor, reverse: bool) -> Result:
        """Runs all steps of ``x`` ``[T, B, width]`` at once."""
        raise NotImplementedError

    def _obstacle(self) -> str | None:
        """Returns why only a loop over the steps can run the cell, or None."""
        return None

    def _engine(self) -> Engine:
        """Returns the engine that runs the cell if there is no obstacle."""
        raise NotImplementedError

    def _begin(self) -> RNNCell:
        """Returns the cell for one run."""
        return self

    def _within(self) -> list[tuple[str, Any]]:
        """Returns the cells inside this cell, with their scopes below its own."""
        return []

    # -- use -------------------------------------------------------------------------------------
    def __call__(self, inputs: Tensor, state: Any, scope: Any = None) -> Result:
        """Runs one step; returns the output ``[B, output_size]`` and the new state."""
        with self._scoped(scope):
            if not self.built and not _ours(self.build):
                x = tf.convert_to_tensor(inputs)
                self.dtype = self.dtype or x.dtype  # as in TensorFlow 1
                self.build(x.shape)
                self.built = True
            return self.call(inputs, state)

    def add_weight(
        self, name: str, shape: Any, dtype: Any = None, initializer: Any = None,
        regularizer: Any = None, trainable: bool = True, **more: Any,
    ) -> tf.Variable:  # fmt: skip
        """Makes a variable in the cell's scope, like ``get_variable``, in your own ``build``."""
        initializer = None if initializer is None else keras.initializers.get(initializer)
        how = initializer, regularizer, trainable and self.trainable
        return v1.get_variable(name, shape, dtype or self.dtype, *how, **more)

    add_variable = add_weight

    def run(
        self, inputs: Tensor, initial_state: Any = None, sequence_length: Tensor = None,
        reverse: bool = False,
    ) -> Result:  # fmt: skip
        """Returns outputs ``[T, B, output_size]`` and final state for inputs ``[T, B, width]``.

        Past a row's ``sequence_length`` outputs are zero and the state is held; ``reverse`` starts
        there.
        """
        return run(self, read(self, inputs), initial_state, sequence_length, reverse)

    def zero_state(self, batch_size: Any, dtype: Any = None) -> Any:
        """Returns an initial state of zeros."""
        kind = dtype or self.dtype or tf.float32

        def zeros(size: Any) -> Tensor:
            return tf.zeros([batch_size, *tf.TensorShape(size).as_list()], kind)

        return tf.nest.map_structure(zeros, self.state_size)

    def get_initial_state(
        self, inputs: Any = None, batch_size: Any = None, dtype: Any = None
    ) -> Any:
        """Returns ``zero_state`` for ``batch_size`` rows, or those of ``inputs`` ``[B, ...]``."""
        if inputs is not None:
            x = tf.convert_to_tensor(inputs)
            batch_size, dtype = x.shape.as_list()[0] or tf.shape(x)[0], x.dtype
        return self.zero_state(batch_size, dtype)

    @property
    def engine(self) -> Engine:
        """The engine that runs the cell on this machine, and why."""
        return engine(self)

    @property
    def named(self) -> dict[str, tf.Variable]:
        """The cell's variables, by their names in a checkpoint below its scope."""
        within = {
            f"{scope}/{name}" if scope else name: variable
            for scope, cell in self._within()
            for name, variable in getattr(cell, "named", {}).items()
        }
        made = (self._made or {}).items()
        return within or {name.removeprefix(f"{self._scope.name}/"): v for name, v in made}

    def restore(self, checkpoint: str, scope: str) -> None:
        """Reads the variables of a checkpoint of TensorFlow 1.

        Args:
            checkpoint: its path, without ``.index``.
            scope: the cell's scope in it, as ``"rnn/lstm_cell"``; see ``tf.train.list_variables``.

        Raises:
            ValueError: if a variable is missing or has another shape.
            RuntimeError: in a graph of TensorFlow 1, where ``tf.compat.v1.train.Saver`` does it.
        """
        if not v1.executing_eagerly_outside_functions():
            hint = (
                "In a graph, variables have the names of TensorFlow 1: call "
                "tf.compat.v1.train.Saver().restore(session, path)."
            )
            refuse("restore", "a graph of TensorFlow 1", "eager mode", hint, RuntimeError)
        within = self._within()
        if not within:
            self._restore(tf.train.load_checkpoint(checkpoint), scope)
        for below, cell in within:
            if not isinstance(cell, RNNCell):
                expected = "cells of anycell.tf1, whose variables are known"
                hint = "Restore each cell separately."
                refuse("restore", f"a {type(cell).__name__} within", expected, hint)
            cell.restore(checkpoint, f"{scope}/{below}" if below else scope)

    def _restore(self, reader: Any, scope: str) -> None:
        """Reads the variables of a cell that has no cells inside."""
        if not self.named:
            expected = "a cell that has made its variables"
            refuse("restore", f"a new {type(self).__name__}", expected, "Call it once before.")
        for name, variable in self.named.items():
            variable.assign(reader.get_tensor(f"{scope}/{name}"))

    @contextmanager
    def _scoped(self, scope: Any = None) -> Iterator[None]:
        """Enters the cell's scope of variables, which the first use sets, as in TensorFlow 1."""
        if self._scope is None:
            place = self.name if self._reuse and scope is None else scope
            with v1.variable_scope(place, default_name=self.name) as self._scope:
                pass
            if not tf.executing_eagerly():  # TensorFlow's loop sets one, and eager mode refuses it
                self._scope.set_caching_device(None)
        reuse = True if self._called else self._reuse
        keep = self._keep if v1.executing_eagerly_outside_functions() else None
        with v1.variable_scope(
            self._scope, reuse=reuse, custom_getter=keep, auxiliary_name_scope=False
        ):
            yield
        self._called = True

    def _keep(self, getter: Any, name: str, **given: Any) -> Any:
        """Gets a variable that only the cell keeps, outside a graph of TensorFlow 1."""
        if self._made is None:
            self._made = {}
        if name not in self._made:  # a graph need not know it, unless its value comes from there
            within = nullcontext() if tf.is_tensor(given.get("initializer")) else tf.init_scope()
            with within:
                self._made[name] = getter(name, **given)
        return self._made[name]


# -- runs ------------------------------------------------------------------------------------------
def run(
    cell: Any, x: Tensor, state: Any = None, sequence_length: Any = None, reverse: bool = False
) -> Result:
    """Returns outputs and final state of any cell over ``x`` ``[T, B, width]``."""
    steps, rows = sizes_of(x, 2)
    state = cell.zero_state(rows, x.dtype) if state is None else state
    lengths = None
    if sequence_length is not None:
        lengths = _lengths(sequence_length, x.shape.as_list()[1], rows, steps)
    return sequence(cell, x, state, lengths, reverse)


def sequence(cell: Any, x: Tensor, state: Any, lengths: Tensor, reverse: bool) -> Result:
    """Returns the results of ``run``: all steps at once if possible, else step by step."""
    begun = cell._begin() if isinstance(cell, RNNCell) else cell
    if obstacle(cell) is None:
        with cell._scoped():
            return begun._sequence(x, state, lengths, reverse)
    if _of_users(cell) is not None:
        few = short(x.shape[0], x.shape[1], tf.nest.flatten(state))
        step = vars(cell)["_step"] = SHORT if few else reading.read(begun, x, state)
        if not isinstance(step, str):
            known = None if lengths is None else mask(x, lengths)
            return reading.run(step, masked(x, lengths), state, known, reverse)
    return _step_by_step(begun, x, state, lengths, reverse)


def _step_by_step(cell: Any, x: Tensor, state: Any, lengths: Tensor, reverse: bool) -> Result:
    """Runs a cell in TensorFlow's own loop."""

    def flip(steps: Tensor) -> Tensor:
        if not reverse:
            return steps
        if lengths is None:
            return tf.reverse(steps, [0])
        return tf.reverse_sequence(steps, lengths, seq_axis=0, batch_axis=1)

    outputs, final = v1.nn.dynamic_rnn(
        cell, flip(masked(x, lengths)), lengths, state, x.dtype, time_major=True,
        scope=v1.get_variable_scope(),
    )  # fmt: skip
    return tf.nest.map_structure(flip, outputs), final


def step(cell: Any, inputs: Tensor, state: Any, scope: Any = None) -> Result:
    """Runs one step of any cell."""
    return cell(inputs, state) if scope is None else cell(inputs, state, scope)


def engine(cell: Any) -> Engine:
    """Returns the engine that runs any cell, and why."""
    reason = obstacle(cell)
    if reason is None:
        return cell._engine()
    step = vars(cell).get("_step")  # as it was read in the last run
    if step is None or isinstance(step, str):
        return Engine("composite", f"{reason}; {step}" if step else reason)
    return step.engine


def obstacle(cell: Any) -> str | None:
    """Returns why a cell runs step by step, or None."""
    return _of_users(cell) or cell._obstacle()


def _of_users(cell: Any) -> str | None:
    """Returns what of a cell is the user's own, or None."""
    kind = type(cell).__name__
    if not isinstance(cell, RNNCell):
        return f"{kind} is no cell of anycell.tf1"
    for name in ("__call__", "build", "call"):
        if not _ours(getattr(cell, name)):
            return f"{kind}.{name} is not anycell's"
    return None


def _ours(method: Any) -> bool:
    """Whether a method is not the user's own."""
    return str(getattr(method, "__module__", "")).startswith(__package__ + ".")


# -- what is given ---------------------------------------------------------------------------------
def like_cell(name: str, cell: Any) -> Any:
    """Returns the cell.

    Raises:
        TypeError: if ``cell`` is not a cell.
    """
    wanted = ("state_size", "output_size", "zero_state")
    missing = [part for part in wanted if not hasattr(cell, part)]
    if isinstance(cell, type) or not callable(cell) or missing:
        shown = f"the class {cell.__name__}" if isinstance(cell, type) else type(cell).__name__
        expected = (
            "a cell of anycell.tf1, or another of TensorFlow 1, which has "
            f"{', '.join(wanted)} and is called with inputs and a state"
        )
        hint = "Make one, as LSTMCell(128); a cell of Keras runs in keras.layers.RNN."
        refuse(name, shown, expected, hint, TypeError)
    return cell


def read(cell: Any, inputs: Any, layout: str = "[T, B, width]", dtype: Any = None) -> Tensor:
    """Returns inputs of that layout as a tensor; ``dtype`` is the argument of a loop, or None."""
    of_cell = getattr(cell, "dtype", None)
    if None not in (dtype, of_cell) and tf.as_dtype(dtype) != of_cell:
        shown, expected = tf.as_dtype(dtype).name, f"{tf.as_dtype(of_cell).name}, that of the cell"
        refuse("dtype", shown, expected, "Pass this dtype to the cell when you make it.")
    kind = dtype or of_cell or (None if tf.is_tensor(inputs) else tf.float32)
    x = tensor("inputs", inputs, kind)
    _floating(x.dtype)
    if x.shape.rank != layout.count(",") + 1 or x.shape.as_list()[-1] is None:
        expected = f"{layout}, of which rank and width are known when a graph is made"
        refuse("inputs", f"shape {x.shape}", expected, _remedy(x, layout))
    return x


def _remedy(x: Tensor, layout: str) -> str:
    """Says what to do about inputs that do not have that layout."""
    if x.shape.rank is None or x.shape.as_list()[-1:] == [None]:
        return "Set them with inputs.set_shape."
    if layout == "[B, width]":
        return "A call runs one step; for a whole sequence call dynamic_rnn(cell, inputs)."
    if x.shape.rank == 2:
        return (
            "This runs a whole sequence: call it once, with all steps, in place of a loop such as "
            "tf.scan; or call LSTMBlockCell, or another cell, in the loop."
        )
    return "Reshape them."


def tensor(name: str, value: Any, dtype: Any) -> Tensor:
    """Returns a tensor of that dtype; converts anything that is not a tensor yet."""
    if tf.is_tensor(value) and dtype is not None and value.dtype.base_dtype != dtype:
        expected = tf.as_dtype(dtype).name
        refuse(name, value.dtype.name, expected, f"Cast it: tf.cast({name}, tf.{expected}).")
    return tf.convert_to_tensor(value, dtype)


def masked(x: Tensor, lengths: Tensor) -> Tensor:
    """Returns ``x`` ``[T, B, ...]`` with zeros past the lengths."""
    if lengths is None:
        return x
    return tf.where(mask(x, lengths)[..., None], x, tf.zeros((), x.dtype))


def mask(x: Tensor, lengths: Tensor) -> Tensor:
    """Marks the steps of ``x`` ``[T, B, ...]`` that are within the lengths: ``[T, B]``."""
    return tf.range(tf.shape(x)[0])[:, None] < lengths[None]


def _floating(dtype: Any) -> Any:
    base = tf.as_dtype(dtype).base_dtype
    # No walrus operator, because AutoGraph converts this function and does not support it.
    if base not in (tf.float16, tf.bfloat16, tf.float32, tf.float64):
        refuse("dtype", base.name, "float16, bfloat16, float32 or float64", "Cast the inputs.")
    return base


def _lengths(value: Any, known: int | None, rows: Any, steps: Any) -> Tensor:
    """Returns a length for each of ``rows``; ``known`` is their number, if a graph knows it yet."""
    lengths = tf.convert_to_tensor(value)
    if not lengths.dtype.is_integer:
        hint = "Cast them: tf.cast(sequence_length, tf.int32)."
        refuse("sequence_length", lengths.dtype.name, "integers", hint)
    if not lengths.shape.is_compatible_with((known,)):
        hint = "Pass a length for each row of the batch."
        refuse("sequence_length", f"shape {lengths.shape}", f"({known},)", hint)
    # Lengths beyond the last step are clipped before a cast to int32 could wrap them.
    lengths = tf.clip_by_value(tf.cast(lengths, tf.int64), 0, tf.cast(steps, tf.int64))
    lengths = tf.cast(lengths, tf.int32)
    if known is not None and lengths.shape.is_fully_defined():
        return lengths
    message = "sequence_length: expected a length for each row."
    with tf.control_dependencies([v1.assert_equal(tf.size(lengths), rows, message=message)]):
        return tf.reshape(lengths, (-1,))
