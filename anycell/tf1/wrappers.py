"""Cells made of other cells: stacks, dropout, residual connections and devices."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from anycell.keras.call import Tensor
from anycell.keras.rule import OURS
from anycell.layer.checks import refuse
from anycell.plan import Engine
from anycell.tf1.base import Result, RNNCell, engine, like_cell, masked, sequence, step, v1


class MultiRNNCell(RNNCell):
    """``tf.compat.v1.nn.rnn_cell.MultiRNNCell``: each cell reads the previous cell's outputs.

    In a loop, each layer runs its whole sequence before the next layer starts.

    Args:
        cells: a list of cells.
        state_is_tuple: whether the state is a tuple of the cells' states; otherwise the cells'
            states are tensors, concatenated into one.
    """

    def __init__(self, cells: Any, state_is_tuple: bool = True) -> None:
        if not isinstance(cells, (list, tuple)):
            refuse("cells", type(cells).__name__, "a list of cells", "Pass [cell].", TypeError)
        if not cells:
            refuse("cells", "none", "a list of one or more", "Pass one for each layer.")
        cells = [like_cell(f"cells[{k}]", cell) for k, cell in enumerate(cells)]
        super().__init__(dtype=getattr(cells[0], "dtype", None))
        self.cells, self.state_is_tuple = cells, state_is_tuple
        sizes = [cell.state_size for cell in cells]
        if not state_is_tuple and any(tf.nest.is_nested(size) for size in sizes):
            given = f"False, with cells whose states are of sizes {sizes}"
            refuse("state_is_tuple", given, "True, or cells that have state_is_tuple=False too")
        self.state_size = tuple(sizes) if state_is_tuple else sum(sizes)
        self.output_size = cells[-1].output_size

    def zero_state(self, batch_size: Any, dtype: Any = None) -> Any:
        if not self.state_is_tuple:
            return super().zero_state(batch_size, dtype)
        kind = dtype or self.dtype or tf.float32
        return tuple(cell.zero_state(batch_size, kind) for cell in self.cells)

    def call(self, inputs: Tensor, state: Any) -> Result:
        return self._through(inputs, state, step)

    def _sequence(self, x: Tensor, state: Any, lengths: Tensor, reverse: bool) -> Result:
        return self._through(x, state, sequence, lengths, reverse)

    def _through(self, x: Tensor, state: Any, run: Callable[..., Any], *how: Any) -> Result:
        """Runs the cells one after the other, each on the outputs of the previous cell."""
        count = len(self.cells)
        if not self.state_is_tuple:
            state = tf.split(state, [cell.state_size for cell in self.cells], axis=1)
        elif not isinstance(state, (list, tuple)) or len(state) != count:
            given = f"{len(state)} of them" if isinstance(state, (list, tuple)) else "one tensor"
            expected = f"a tuple of {count}, one for each cell"
            refuse("state", given, expected, "cell.zero_state makes one.")
        final = []
        for k, (cell, part) in enumerate(zip(self.cells, state, strict=True)):
            with v1.variable_scope(f"cell_{k}"):
                x, new = run(cell, x, part, *how)
            final.append(new)
        return x, tuple(final) if self.state_is_tuple else tf.concat(final, axis=1)

    def _engine(self) -> Engine:
        engines = [engine(cell) for cell in self.cells]
        for k, (name, reason) in enumerate(engines):
            if name not in OURS:
                names = ", ".join(name for name, _ in engines)
                return Engine(name, f"cells run on {names}; of cell_{k}: {reason}")
        return Engine(engines[0].name, f"layer by layer; {engines[0].reason}")

    def _within(self) -> list[tuple[str, Any]]:
        return [(f"cell_{k}/{cell.name}", cell) for k, cell in enumerate(self.cells)]


class _Wrapper(RNNCell):
    """A cell around another cell, which has the states, sizes and variable scope of that cell."""

    def __init__(self, cell: Any, dtype: Any = None) -> None:
        like_cell("cell", cell)
        super().__init__(name=getattr(cell, "name", None), dtype=dtype)
        self.cell, self.dtype = cell, self.dtype or getattr(cell, "dtype", None)
        self.state_size, self.output_size = cell.state_size, cell.output_size

    def zero_state(self, batch_size: Any, dtype: Any = None) -> Any:
        return self.cell.zero_state(batch_size, dtype or self.dtype or tf.float32)

    def __call__(self, inputs: Tensor, state: Any, scope: Any = None) -> Result:
        return self._around(inputs, lambda x: step(self.cell, x, state, scope))

    def _sequence(self, x: Tensor, state: Any, lengths: Tensor, reverse: bool) -> Result:
        return self._around(x, lambda x: sequence(self.cell, x, state, lengths, reverse))

    def _begin(self) -> RNNCell:
        run = copy.copy(self)
        if isinstance(self.cell, RNNCell):
            run.cell = self.cell._begin()
        return run

    def _around(self, x: Tensor, run: Callable[[Tensor], Any]) -> Result:
        """Runs the inner cell on ``x``, with the wrapper's work around it."""
        raise NotImplementedError

    @contextmanager
    def _scoped(self, scope: Any = None) -> Iterator[None]:
        yield  # all variables are in the scope of the inner cell

    def _engine(self) -> Engine:
        return engine(self.cell)

    def _within(self) -> list[tuple[str, Any]]:
        return [("", self.cell)]


class DropoutWrapper(_Wrapper):
    """``tf.compat.v1.nn.rnn_cell.DropoutWrapper``: dropout of inputs, outputs and states.

    Dropout of inputs and outputs is done on whole sequences; with dropout of states, a loop runs
    the steps one by one.

    Args:
        cell: the cell to wrap.
        input_keep_prob, output_keep_prob, state_keep_prob: the share that is kept, a number or a
            tensor; kept values are divided by it.
        variational_recurrent: whether all steps of a run, and all rows, have one mask. Outside of a
            loop, it is the mask drawn when the wrapper was made.
        input_size: the width of the inputs, required for a variational dropout of inputs.
        dtype: the dtype of inputs, outputs and states; required if ``variational_recurrent``.
        seed: the seed of the masks.
        dropout_state_filter_visitor: says which parts of a state may be dropped, as in TensorFlow
            1; None: all but c of an ``LSTMStateTuple``.
    """

    def __init__(
        self, cell: Any, input_keep_prob: Any = 1.0, output_keep_prob: Any = 1.0,
        state_keep_prob: Any = 1.0, variational_recurrent: bool = False, input_size: Any = None,
        dtype: Any = None, seed: int | None = None,
        dropout_state_filter_visitor: Callable[[Any], Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(cell, dtype)
        if dropout_state_filter_visitor is not None and not callable(dropout_state_filter_visitor):
            visitor, expected = "dropout_state_filter_visitor", "a function of a part of the state"
            refuse(visitor, repr(dropout_state_filter_visitor), expected, error=TypeError)
        rates = {"input": input_keep_prob, "output": output_keep_prob, "state": state_keep_prob}
        self.keep = {role: _probability(f"{role}_keep_prob", p) for role, p in rates.items()}
        self.variational, self.seed = variational_recurrent, seed
        self._filter = dropout_state_filter_visitor or _all_but_c
        if variational_recurrent and dtype is None:
            expected = "the dtype of the inputs, because variational_recurrent is set"
            refuse("dtype", "None", expected, "Pass it.")
        if variational_recurrent and self._drops("input") and input_size is None:
            expected = "the width of the inputs, because variational_recurrent drops some of them"
            refuse("input_size", "None", expected, "Pass it.")
        self._widths = {"input": input_size, "output": self.output_size, "state": self.state_size}
        self._noise = self._drawn()

    def __call__(self, inputs: Tensor, state: Any, scope: Any = None) -> Result:
        output, new = super().__call__(inputs, state, scope)
        if self._drops("state"):
            parts = tf.__internal__.nest.get_traverse_shallow_structure(self._filter, new)
            new = self._dropped("state", new, parts)
        return output, new

    def _around(self, x: Tensor, run: Callable[[Tensor], Any]) -> Result:
        outputs, final = run(self._dropped("input", x))
        return self._dropped("output", outputs), final

    def _obstacle(self) -> str | None:
        return "state_keep_prob drops parts of each new state" if self._drops("state") else None

    def _begin(self) -> RNNCell:
        run = super()._begin()
        run._noise = self._drawn()
        return run

    def _drops(self, role: str) -> bool:
        keep = self.keep[role]
        return not isinstance(keep, float) or keep < 1.0

    def _drawn(self) -> dict[str, Any]:
        """Draws the numbers of a variational dropout, in [0, 1), the same for all rows."""
        if not self.variational:
            return {}

        def draw(role: str) -> Any:
            seeds, kind = self._seeds(role), tf.as_dtype(self.dtype)
            kind = tf.float32 if kind.size == 2 else kind
            return tf.nest.map_structure(
                lambda size: tf.random.uniform(
                    [1, *tf.TensorShape(size).as_list()], dtype=kind, seed=next(seeds)
                ),
                self._widths[role],
            )

        return {role: draw(role) for role in self.keep if self._drops(role)}

    def _dropped(self, role: str, values: Any, parts: Any = True) -> Any:
        """Returns ``values`` after dropout of those that ``parts`` marks."""
        if not self._drops(role):
            return values
        seeds, keep = self._seeds(role), self.keep[role]

        def drop(wanted: bool, value: Tensor, noise: Tensor) -> Tensor:
            seed = next(seeds)
            if not wanted:
                return value
            value = tf.convert_to_tensor(value)
            if noise is not None:
                kept = tf.floor(tf.cast(keep, noise.dtype) + noise)
                return value / tf.cast(keep, value.dtype) * tf.cast(kept, value.dtype)
            rate = 1.0 - keep
            return tf.nn.dropout(
                value, rate if isinstance(rate, float) else tf.cast(rate, value.dtype), seed=seed
            )

        if parts is True:
            parts = tf.nest.map_structure(lambda _: True, values)
        none = tf.nest.map_structure(lambda _: None, values)
        return tf.__internal__.nest.map_structure_up_to(
            parts, drop, parts, values, self._noise.get(role, none)
        )

    def _seeds(self, role: str) -> Iterator[int | None]:
        """Yields a seed for each value of a role, made from one seed as in TensorFlow 1."""
        for index in itertools.count():
            text = f"{self.seed}{role}_{index}".encode()
            digest = hashlib.md5(text, usedforsecurity=False).hexdigest()
            yield None if self.seed is None else int(digest[:8], 16) & 0x7FFFFFFF


class ResidualWrapper(_Wrapper):
    """``tf.compat.v1.nn.rnn_cell.ResidualWrapper``: adds inputs to outputs.

    Args:
        cell: the cell to wrap.
        residual_fn: makes the outputs of a step from its inputs and the cell's outputs,
            ``[B, width]`` each, both zero past a row's length; None adds the two.
    """

    def __init__(
        self, cell: Any, residual_fn: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> None:
        super().__init__(cell)
        if residual_fn is not None and not callable(residual_fn):
            expected = "a function of inputs and outputs"
            refuse("residual_fn", repr(residual_fn), expected, "Pass None to add them.", TypeError)
        self.residual_fn = residual_fn

    def _around(self, x: Tensor, run: Callable[[Tensor], Any]) -> Result:
        outputs, final = run(x)
        return (self.residual_fn or _sum)(x, outputs), final

    def _sequence(self, x: Tensor, state: Any, lengths: Tensor, reverse: bool) -> Result:
        x = masked(x, lengths)
        outputs, final = sequence(self.cell, x, state, lengths, reverse)
        if self.residual_fn is None:
            outputs = _sum(x, outputs)
        else:  # ``residual_fn`` takes single steps
            function = self.residual_fn
            outputs = tf.vectorized_map(lambda pair: function(*pair), (x, outputs), warn=False)
        return masked(outputs, lengths), final


class DeviceWrapper(_Wrapper):
    """``tf.compat.v1.nn.rnn_cell.DeviceWrapper``: runs a cell on a device.

    Args:
        cell: the cell to wrap.
        device: a device, as ``tf.device`` takes it.
    """

    def __init__(self, cell: Any, device: Any) -> None:
        super().__init__(cell)
        self.device = device

    def _around(self, x: Tensor, run: Callable[[Tensor], Any]) -> Result:
        with v1.device(self.device):
            return run(x)

    def zero_state(self, batch_size: Any, dtype: Any = None) -> Any:
        with v1.device(self.device):
            return super().zero_state(batch_size, dtype)


def _probability(name: str, value: Any) -> Any:
    """Returns a number, or a tensor or variable whose value is not known yet."""
    if isinstance(value, tf.Variable):
        return value
    number = value
    if tf.is_tensor(value):
        number = tf.get_static_value(value)
        if number is None:
            return value
    try:
        number = float(number)
    except (TypeError, ValueError):
        number = 0.0
    if not 0.0 < number <= 1.0:
        expected = "a number above 0, and at most 1, or a tensor"
        refuse(name, repr(value), expected, "Pass 1.0 to keep all.")
    return number


def _all_but_c(part: Any) -> Any:
    """Marks the parts of a state that TensorFlow 1 drops."""
    if getattr(part, "_fields", None) == ("c", "h"):
        return type(part)(c=False, h=True)
    return not isinstance(part, tf.TensorArray)


def _sum(inputs: Any, outputs: Tensor) -> Tensor:
    inputs = tf.convert_to_tensor(inputs)
    if not inputs.shape.is_compatible_with(outputs.shape):
        expected = f"{outputs.shape}, that of the outputs they are added to"
        hint = "Give the cell as many units, or the wrapper a residual_fn."
        refuse("inputs", f"shape {inputs.shape}", expected, hint)
    return inputs + outputs
