"""``loop``: a step written in NumPy, run over a sequence by a compiled kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from anycell.layer.checks import describe, refuse
from anycell.numpy import passes, threads
from anycell.numpy.read import Recording, Traced, execute, read_step, start
from anycell.plan import Options, plan
from anycell.plan.dtype import dtypes
from anycell.read import (
    SHORT,
    Refused,
    Values,
    Variable,
    definition,
    mapped,
    one_way,
    short,
    trees,
)
from anycell.read.proof import STEPS, tried

Tree = Any  # an array, or a tuple, list or dict of trees
Step = Callable[[Tree, Tree], tuple[Tree, Tree]]


class loop:
    """A step over a sequence: ``outputs, state = loop(step)(x, state)`` in place of ::

        for t in range(len(x)):
            output, state = step(x[t], state)
            outputs.append(output)

    ``step`` is a function, or an object that can be called, in NumPy; x, states and outputs are
    arrays, or tuples, lists and dicts of them. It is called once, with arrays that record what it
    does, and the record is read as a cell. The cell is tried against ``step`` for three steps, from
    random states and from zeros; then a compiled kernel runs it. A step that cannot be read, or
    that has other effects than its results, runs as the loop above, and ``reason`` says why.

    The weights are the arrays that the step uses, with the numbers that they have in each call.
    There is no backward pass: NumPy has none. ``RNN(cell, ...)`` learns.

    Args:
        step: ``step(x[t], state) -> output, state``.

    Attributes:
        text: the ``@cell`` that the step was read as in the last call; None if it was not read.
        reason: why the last call ran step by step; None if it did not.

    Example:
        >>> weight = np.ones((3 + 4, 4)) / 8
        >>> def step(x, h):
        ...     h = np.tanh(np.concatenate([x, h], axis=-1) @ weight)
        ...     return h, h
        >>> outputs, h = loop(step)(np.zeros((10, 2, 3)), np.ones((2, 4)))
        >>> outputs.shape
        (10, 2, 4)
    """

    def __init__(self, step: Step) -> None:
        if not callable(step):
            hint = "Pass step(x, state) -> output, state."
            refuse("step", describe(step), "a function", hint, TypeError)
        self.step = step
        self.text: str | None = None
        self.reason: str | None = None
        self._read: dict[Any, Recording | Refused] = {}

    def __call__(self, x: Tree, state: Tree) -> tuple[Tree, Tree]:
        """Runs the step over all of ``x[0], x[1], ...``.

        Args:
            x: arrays ``[T, ...]``, mostly ``[T, B, I]``.
            state: the state before the first step, mostly ``[B, H]``.

        Returns:
            the outputs ``[T, ...]`` of all steps, and the state after the last one.

        Raises:
            ValueError: if x has no array, or its arrays differ in their number of steps.
        """
        xs = leaves(x)
        steps = {len(array) if np.ndim(array) else 0 for array in xs}
        if len(steps) != 1 or 0 in steps:
            shown = ", ".join(map(describe, xs)) or "no array"
            refuse("x", shown, "arrays [T, ...] of one T, at least 1", "Pass all steps.")
        self.text = self.reason = None
        if short("numpy", len(xs[0]), sum(map(np.size, leaves(state)))):
            self.reason = SHORT
            return self._loop(x, state)
        try:
            call = _Call(self, x, state)
            result = call.results(call.read, call.xs, call.first)
        except Refused as error:
            self.reason = str(error.at(definition(self.step)))
            return self._loop(x, state)
        self.text = call.read.reading.text
        return result

    def _loop(self, x: Tree, state: Tree) -> tuple[Tree, Tree]:
        outputs = []
        for t in range(len(leaves(x)[0])):
            output, state = self.step(mapped(lambda array: array[t], x), state)  # noqa: B023
            outputs.append(output)
        stacked = [np.stack(arrays) for arrays in zip(*map(leaves, outputs), strict=True)]
        return filled(outputs[0], stacked), state


def leaves(tree: Tree) -> list[Any]:
    """The arrays of a tree."""
    return list(trees.leaves(tree))


def filled(tree: Tree, values: Sequence[Any]) -> Tree:
    """The tree with other leaves."""
    left = iter(values)
    return mapped(lambda _: next(left), tree)


class _Run:
    """The arrays of a call, for the reading.

    Args:
        arrays: of ``Recording.arrays``.
    """

    def __init__(
        self, body: Recording, arrays: Sequence[np.ndarray], xs: Sequence[np.ndarray],
        first: Sequence[np.ndarray],
    ) -> None:  # fmt: skip
        self.memo: dict[Any, Any] = {}
        self.steps = len(xs[0])
        self.dtype = next(a.dtype for a, v in zip(first, body.states, strict=True) if v.floating)
        self.rows = first[body.moving[0]].shape[0] if body.reading.axis == 0 else 1
        self._fixed: dict[Variable, Any] = dict(zip(body.fixed, arrays, strict=True))
        self._fixed |= {v: first[k] for k, v in enumerate(body.states) if v.kind == "F"}
        self._x = dict(zip(body.x, xs, strict=True))
        self.known = [
            Values({v: x[t] for v, x in self._x.items()}, execute, self._fixed.get)
            for t in range(self.steps)
        ]
        self.last = [first[k] for k in body.ahead]  # the counters, which no float enters
        for values in self.known:
            values.update(
                (body.states[k], now) for k, now in zip(body.ahead, self.last, strict=True)
            )
            self.last = [values[body.after[k]] for k in body.ahead]

    def fixed(self, v: Variable) -> np.ndarray:
        """A value of kind F."""
        array: np.ndarray = self.known[0][v]
        return array

    def moving(self, v: Variable) -> np.ndarray:
        """A result that depends on no state, at all steps."""
        return self._x[v] if v in self._x else np.stack([values[v] for values in self.known])


class _Call:
    """One call, whose step is recorded and read."""

    def __init__(self, owner: loop, x: Tree, state: Tree) -> None:
        self.owner, self.x, self.state = owner, x, state
        self.xs, self.first = leaves(x), leaves(state)
        for leaf in (*self.xs, *self.first):
            counter = isinstance(leaf, (int, np.integer)) and any(leaf is s for s in self.first)
            if not isinstance(leaf, np.ndarray) and not counter:
                raise Refused(f"x and states have {describe(leaf)}; only arrays are read")
        self.numbers = [isinstance(leaf, int) for leaf in self.first]
        self.first = list(map(np.asarray, self.first))
        reals = {a.dtype for a in self.first if a.dtype.kind not in "iub"}
        if len(reals) != 1 or next(iter(reals)).name not in dtypes("cpu"):
            raise Refused(
                f"states have one dtype of {', '.join(dtypes('cpu'))} where they are read, "
                "besides counters"
            )
        (self.dtype,) = reals
        self.recording, traced = start([array[0] for array in self.xs], self.first)
        count = len(self.xs)
        before = filled(state, traced[count:])
        output, after = owner.step(filled(x, traced[:count]), before)
        if [*map(id, leaves(before))] != [*map(id, traced[count:])]:
            raise Refused(
                "the step changes the dictionary or list that holds its state",
                "return the new state in a new one, such as {**state, 'h': h}",
            )
        self.output, self.after = output, after
        self.recording.after += map(_variable, leaves(after))
        self.recording.outputs += map(_variable, leaves(output))
        if len(self.recording.after) != len(self.first):
            raise Refused("the step returns a state of another structure than it is given")
        for leaf, old in zip(leaves(after), self.first, strict=True):
            if leaf.dtype != old.dtype:
                raise Refused(
                    f"the step makes a {leaf.dtype} state of a {old.dtype} one",
                    "give x, states and weights one dtype",
                )
        self.read = self._known()

    def _known(self) -> Recording:
        """The reading of the step, from an earlier call or proven now."""
        name = getattr(self.owner.step, "__name__", type(self.owner.step).__name__)
        key = tuple(self.recording.lines())
        if key not in self.owner._read:
            try:
                read_step(self.recording, name)
                self._prove()
                self.owner._read[key] = self.recording
            except Refused as error:
                self.owner._read[key] = error
        known = self.owner._read[key]
        if isinstance(known, Refused):
            raise known.with_traceback(None)
        return known

    def _prove(self) -> None:
        short = [array[:STEPS] for array in self.xs]
        x = filled(self.x, short)

        def both(states: list[np.ndarray]) -> Any:
            first = [
                array if array.dtype != self.dtype else state.astype(self.dtype)
                for array, state in zip(self.first, states, strict=True)
            ]
            with np.errstate(all="ignore"):
                step = self.owner._loop(x, filled(self.state, first))
                mine = self.results(self.recording, short, first, "reference")
            return [
                {f"result {i} of the step": array for i, array in enumerate(leaves(results))}
                for results in (step, mine)
            ]

        reason = tried([array.shape for array in self.first], both, self.dtype.name)
        if reason is not None:
            raise Refused(reason)

    def results(
        self, body: Recording, xs: Sequence[Any], first: Sequence[Any], engine: str | None = None
    ) -> tuple[Tree, Tree]:
        reading, run = body.reading, _Run(body, self.recording.arrays, xs, first)
        wanted, start = body.seen(), [first[k] for k in body.moving]
        arrays = {
            name: array if array.dtype == bool else np.ascontiguousarray(array, run.dtype)
            for name, array in reading.arrays_of(run, start).items()
        }
        finals, sequences = reading.ran(
            one_way(passes.run), arrays, wanted, Options(threads=threads.current()),
            plan=plan(reading.cell, reading.size, run.dtype.name, engine, reading.sizes),
        )  # fmt: skip
        last, known = body.unpacked(reading, first, finals, sequences, wanted)
        for k, value in zip(body.ahead, run.last, strict=True):
            last[k] = value.item() if self.numbers[k] else value
        if any(v not in known for v in body.outputs):
            for t, values in enumerate(run.known):
                values |= {v: series[t] for v, series in known.items()}
            known = {v: np.stack([values[v] for values in run.known]) for v in body.outputs}
        return filled(self.output, [known[v] for v in body.outputs]), filled(self.after, last)


def _variable(leaf: Any) -> Variable:
    if isinstance(leaf, Traced):
        return leaf.variable
    raise Refused("a result of the step depends neither on x nor on a state")


__all__ = ["loop"]
