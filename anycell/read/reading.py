"""A step that was read: its cell, and how the arrays of a call follow from the user's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anycell import lang
from anycell.layer.sequences import besides_output, by_name
from anycell.layer.signature import state_names
from anycell.plan import Layer, Options
from anycell.read.affine import Affine, Matrix
from anycell.read.arrays import merged, neighbours
from anycell.read.units import Run, Source

STATES = "state", "reset_state"  # as the names of states in a call begin


def one_way(run: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function that runs a layer one whose states have no axis of directions."""

    def one(layer: Layer, arrays: Mapping[str, Any]) -> tuple[Any, list[Any], Sequence[Any]]:
        named = {n: a[None] if n.startswith(STATES) else a for n, a in arrays.items()}
        output, final, others, *_ = run(layer, named)
        return output, [state[0] for state in final], others

    return one


@dataclass(frozen=True, eq=False)
class Piece:
    """Units of the user's state ``state``, at these positions: a state of the cell."""

    state: int
    at: np.ndarray
    name: str

    @property
    def size(self) -> int:
        return len(self.at)


@dataclass(frozen=True, eq=False)
class Flags:
    """A condition on x, for each row, that says at which steps states are held or start anew.

    Attributes:
        source, unit: where it comes from; it holds where the number is 1.
        inverted: whether the flags are where it does not hold.
        restored: for each state of the cell, what resets restore; None for a mask.
    """

    source: Source
    unit: int
    inverted: bool
    restored: tuple[Affine, ...] | None = None

    def array(self, run: Run, arrays: Any) -> Any:
        """``[time, rows]``, boolean."""
        values = arrays.take(self.source.fetch(run), 2, self.unit, 1)
        values = arrays.broadcast(values, (run.steps, run.rows, 1))
        values = arrays.reshape(values, (run.steps, run.rows))
        return values < 0.5 if self.inverted else values > 0.5


@dataclass(frozen=True, eq=False)
class Reading:
    """A step that was read: a cell, and how the arrays of its call follow from the user's.

    Attributes:
        text: the cell, as users would write it.
        cell: the cell.
        size: the hidden size.
        sizes: the other sizes, by their symbols.
        gates, params, static: what the cell sees of x and of the weights, by the cell's names.
        weights: heads of each ``linear``, and the matrices of its outputs.
        pieces: the states of the cell.
        flags: resets or a mask, if the step has such a condition on all of its states.
        axis, shapes, boolean: of the user's states: the axis of the batch; of each its shape, and
            whether it is boolean.
    """

    text: str
    cell: lang.Cell
    arrays: Any
    size: int
    sizes: Mapping[str, int]
    gates: tuple[Affine, ...]
    params: Mapping[str, Affine]
    static: Affine | None
    weights: Mapping[str, tuple[int, tuple[Matrix, ...]]]
    pieces: tuple[Piece, ...]
    flags: Flags | None
    axis: int | None
    shapes: tuple[tuple[int, ...], ...]
    boolean: tuple[bool, ...]

    @functools.cached_property
    def layer(self) -> Layer:
        """The layer of the cell."""
        return Layer(self.cell, (("H", self.size), *self.sizes.items()))

    # -- the arrays of a call --------------------------------------------------------------------
    def arrays_of(self, run: Run, first: Sequence[Any]) -> dict[str, Any]:
        """The arrays of the layer, by name; those of states without the axis of directions.

        Args:
            run: with ``dtype``, ``steps``, ``rows`` and ``memo``.
            first: the user's states before the first step.
        """
        arrays = self.arrays
        named = {
            f"weight_{name}": _weight(arrays, run, heads, matrices)
            for name, (heads, matrices) in self.weights.items()
        }
        for name, part in self.params.items():
            named[name] = arrays.reshape(part.constant(run, arrays), (part.size,))
        named |= zip(state_names("state", self.cell), self.start(run, first), strict=True)
        if self.flags is not None:
            named |= self._flags(self.flags, run)
        if self.static is not None:
            value = self.static.constant(run, arrays)
            named["static"] = arrays.broadcast(value, (run.rows, self.static.size))
        return named | {"x": self._input(run, named) if self.projected else self._gates(run)}

    def ran(
        self, run: Callable[..., Any], arrays: Mapping[str, Any], wanted: Sequence[int],
        options: Options, **how: Any,
    ) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
        """The states of the cell after the last step, and those that the user's ``wanted`` states
        consist of after all steps, by name.

        Args:
            run: (layer, arrays) -> the output, the final states, the sequences of other states.
            arrays: of ``arrays_of``.
            how: further fields of the layer.
        """
        return self.named(run(self.called(wanted, options.unread(), **how), arrays), wanted)

    def called(self, wanted: Sequence[int], options: Options, **how: Any) -> Layer:
        """The layer that returns the sequences of these states; see ``ran``."""
        sequences = besides_output(self._names(wanted), self.cell)
        return self.layer._replace(options=options, sequences=sequences, **how)

    def named(
        self, results: tuple[Any, Any, Any], wanted: Sequence[int]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The results of ``ran``, from those of the layer."""
        output, final, others = results
        ends = dict(zip(self.cell.state_names, final, strict=True))
        return ends, by_name(self._names(wanted), self.cell, output, others)

    def _names(self, wanted: Sequence[int]) -> list[str]:
        return [name for k in wanted for name in self.names_of(k)]

    def _flags(self, flags: Flags, run: Run) -> dict[str, Any]:
        arrays, values = self.arrays, flags.array(run, self.arrays)
        if flags.restored is None:
            return {"mask": values}
        restored = []
        for part, piece in zip(flags.restored, self.pieces, strict=True):
            state = part.constant(run, arrays)
            restored.append(arrays.broadcast(state, (run.rows, piece.size)))
        named = dict(zip(state_names("reset_state", self.cell), restored, strict=True))
        return named | {"resets": values}

    @functools.cached_property
    def projected(self) -> bool:
        """Whether the layer projects x: each gate is a matrix times what comes from outside."""
        whole = not any(part.direct or part.per_row for part in self.gates)
        return whole and bool(self._sources)

    @property
    def joins(self) -> bool:
        """Whether a weight of the layer is joined of several matrices in each call."""
        several = self.projected and len(self._merged) > 1
        return several or any(len(matrices) > 1 for _, matrices in self.weights.values())

    @functools.cached_property
    def _sources(self) -> tuple[Source, ...]:
        """The inputs that gates are affine in, in the order of their use."""
        return tuple(dict.fromkeys(source for part in self.gates for source, _ in part.terms))

    @functools.cached_property
    def _merged(self) -> list[Affine]:
        """The gates, with neighbours that are columns of the same matrices as one."""
        return merged(self.gates, Affine.followed)

    def _input(self, run: Run, weights: dict[str, Any]) -> Any:
        """The input of the layer; adds the weights of its projection to ``weights``."""
        arrays, inputs, rows = self.arrays, [], []
        for source in self._sources:
            shape = run.steps, run.rows, source.size
            inputs.append(arrays.broadcast(source.fetch(run), shape))
        for part in self._merged:
            blocks = []
            for source in self._sources:
                matrices = [m.transposed(run, arrays) for s, m in part.terms if s is source]
                matrices = matrices or [arrays.zeros((part.size, source.size), run.dtype)]
                blocks.append(sum(matrices[1:], matrices[0]))
            rows.append(_joined(arrays, 1, blocks))
        weights["weight_ih"] = _joined(arrays, 0, rows)
        if any(part.constants for part in self._merged):
            biases = []
            for part in self._merged:
                bias, size = part.constant(run, arrays), (part.size,)
                bias = arrays.zeros(size, run.dtype) if bias is None else arrays.reshape(bias, size)
                biases.append(bias)
            weights["bias_ih"] = _joined(arrays, 0, biases)
        return _joined(arrays, 2, inputs)

    def _gates(self, run: Run) -> Any:
        """All gates of all steps: ``[time, rows, sum of their sizes]``."""
        arrays, shape = self.arrays, (run.steps, run.rows)
        parts = [part.value(run, arrays) for part in self._merged]
        parts = [arrays.broadcast(part, (*shape, part.shape[-1])) for part in parts]
        return _joined(arrays, 2, parts)

    # -- states ----------------------------------------------------------------------------------
    def start(self, run: Run, first: Sequence[Any]) -> list[Any]:
        """The states of the cell, from the user's."""
        arrays, start = self.arrays, []
        for piece in self.pieces:
            state = arrays.cast(first[piece.state], run.dtype)
            if self.axis:
                state = arrays.move(state, self.axis, 0)
            state = arrays.reshape(state, (run.rows, -1))
            if piece.size != state.shape[1]:
                state = arrays.index(state, piece.at)
            start.append(state)
        return start

    def joined(self, state: int, values: Mapping[str, Any]) -> Any:
        """The user's state, from the values of the cell's states by name, ``[..., rows, size]``."""
        arrays, parts, order = self.arrays, [], []
        for piece in self.pieces:
            if piece.state == state:
                order.append(piece.at)
                parts.append(values[piece.name])
        whole = _joined(arrays, len(parts[0].shape) - 1, parts)
        if not neighbours(at := np.concatenate(order)):
            whole = arrays.index(whole, np.argsort(at))
        whole = whole > 0.5 if self.boolean[state] else whole
        lead, rows = tuple(whole.shape[:-2]), whole.shape[-2]
        units = tuple(n for i, n in enumerate(self.shapes[state]) if i != self.axis)
        if self.axis is None:
            return arrays.reshape(whole, (*lead, *units))
        whole = arrays.reshape(whole, (*lead, rows, *units))
        return arrays.move(whole, len(lead), len(lead) + self.axis) if self.axis else whole

    def names_of(self, state: int) -> tuple[str, ...]:
        """The names of the cell's states that the user's state consists of."""
        return tuple(piece.name for piece in self.pieces if piece.state == state)


def _joined(arrays: Any, axis: int, parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else arrays.cat(list(parts), axis)


def _weight(arrays: Any, run: Run, heads: int, matrices: Sequence[Matrix]) -> Any:
    """The weight of a ``linear``: ``[out, in]``, or ``[heads, out, in]`` for one head."""
    if heads == 1:
        return _joined(arrays, 0, [matrix.transposed(run, arrays) for matrix in matrices])
    columns = [arrays.index(matrix.fetch(run), matrix.columns) for matrix in matrices]
    return _joined(arrays, 1, [arrays.move(block, 1, 2) for block in columns])
