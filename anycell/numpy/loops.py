"""``loop``: a step written in NumPy, run over a sequence by a compiled kernel."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from anycell.layer.checks import describe, refuse
from anycell.numpy import passes, threads
from anycell.numpy.mirror import Mirror
from anycell.numpy.read import Arrays, Recording, Tape, Taped, Traced, execute, read_step, shaped
from anycell.plan import Layer, Options, plan
from anycell.plan.dtype import dtypes
from anycell.read import Refused, Values, Variable, definition, mapped, one_way, places, trees
from anycell.read.proof import STEPS, tried
from anycell.read.short import SHORT, short
from anycell.read.trees import filled
from anycell.read.units import CHANGES_STATE
from anycell.recent import add_recent

Tree = Any  # an array, or a tuple, list or dict of trees
Step = Callable[[Tree, Tree], tuple[Tree, Tree]]
_MOST = 4  # surroundings of calls of one kind, as in training and in evaluation
_READINGS = 64
_RESTLESS = 16  # readings for calls of one kind
_LONG = 512  # operations of a tape after the kernel
_QUIET = frozenset({"ignore", "warn"})  # of ``np.geterr``


class loop:
    """A step over a sequence: ``outputs, state = loop(step)(x, state)`` in place of ::

        for t in range(len(x)):
            output, state = step(x[t], state)
            outputs.append(output)

    ``step`` is a function, or an object that can be called, in NumPy; x, states and outputs are
    arrays, or tuples, lists and dicts of them. A copy of it is called once, with arrays that record
    what it does, and the record is read as a cell. The cell is tried against ``step`` for three
    steps, from random states and from zeros; then a compiled kernel runs it. A step that cannot be
    read, that has other effects than its results, or that reads what cannot be compared from call
    to call, runs as the loop above, and ``reason`` says why.

    The weights are the arrays that the step uses, with the numbers that they have in each call.
    What else it reads (functions, numbers, flags, attributes, entries of lists) is compared in each
    call with what it was. If something has changed, the step is recorded anew. There is no backward
    pass: NumPy has none. ``RNN(cell, ...)`` learns.

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
        self._known: dict[Any, list[_Known]] = {}  # by what calls are like
        self._reads: Counter[Any] = Counter()
        self._calls: dict[Any, int] = {}  # of NumPy, that a step makes
        self._short = set[Any]()  # the calls that run as they are written

    def __reduce__(self) -> tuple[Any, ...]:
        return loop, (self.step,)

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
        self.text, self.reason = None, SHORT
        if self._short and (x.shape if type(x) is np.ndarray else _kind(x)) in self._short:
            return self._loop(x, state)
        xs = leaves(x)
        steps = {len(array) if np.ndim(array) else 0 for array in xs}
        if len(steps) != 1 or 0 in steps:
            shown = ", ".join(map(describe, xs)) or "no array"
            refuse("x", shown, "arrays [T, ...] of one T, at least 1", "Pass all steps.")
        first, key = leaves(state), (_kind(x, 1), _kind(state))
        ready = SHORT if 1 in steps else self._ready(x, state, key, steps.pop(), first)
        if isinstance(ready, str):
            self.reason = ready
            if ready is SHORT and {*map(type, (*xs, *first))} == {np.ndarray}:
                self._short.add(x.shape if type(x) is np.ndarray else _kind(x))
            return self._loop(x, state)
        (read, arrays), self.reason = ready, None
        try:
            results = read.run(arrays, xs, list(map(np.asarray, first)))
        except Refused as error:
            self.reason = str(error)
            return self._loop(x, state)
        self.text = read.body.reading.text
        return results

    def _ready(self, x: Tree, state: Tree, key: Any, steps: int, first: list[Any]) -> _Found | str:
        """The reading for a call, and the arrays that the step has from elsewhere; or why the step
        itself runs.
        """
        numbers = sum([np.size(a) for a in first])
        if short("numpy", steps, numbers, self._calls.get(key, math.inf)):
            return SHORT
        if not _QUIET.issuperset(np.geterr().values()):
            return "np.errstate asks for errors, which a kernel does not raise"
        for known in self._known.get(key, ()):
            if (ready := known.now()) is not None:
                return ready
        if self._reads[key] >= _RESTLESS:
            return (
                f"what is around the step was something else in each of {_RESTLESS} calls. "
                "Instead: keep what changes in an array, or in the state."
            )
        return self._recorded(x, state, key)

    def _recorded(self, x: Tree, state: Tree, key: Any) -> _Found | str:
        """The result of ``_ready`` for a call like no other, for which a copy is recorded."""
        mirror: Mirror | None = None
        try:
            call, slots = _Call(self, x, state), list[int]()
            mirror = Mirror(vars(self), "step", call.stand_in(slots))
            call.record(mirror)
            read = call.read(key)
            self._keep(key, _Known(mirror, read, call.arrays, slots))
            return read, call.arrays
        except Refused as error:
            reason = str(error.at(definition(self.step)))
            if mirror is not None:  # the results of the loop are right, whatever the reason
                self._keep(key, _Known(mirror, reason))
                self._reads[key] += 1
            return reason

    def _keep(self, key: Any, known: _Known) -> None:
        self._known[key] = [known, *self._known.get(key, ())][:_MOST]

    def _loop(self, x: Tree, state: Tree) -> tuple[Tree, Tree]:
        step, outputs, parts = self.step, [], x
        if type(x) is not np.ndarray:
            parts = [filled(x, part) for part in zip(*leaves(x), strict=True)]
        for part in parts:
            output, state = step(part, state)
            outputs.append(output)
        if type(output) is np.ndarray:
            return np.array(outputs), state  # as ``np.stack``, in a fourth of its time
        stacked = [np.stack(arrays) for arrays in zip(*map(leaves, outputs), strict=True)]
        return filled(outputs[0], stacked), state


def leaves(tree: Tree) -> list[Any]:
    """The arrays of a tree."""
    kind = type(tree)
    if kind is np.ndarray:
        return [tree]
    arrays = kind is tuple and set(map(type, tree)) == {np.ndarray}
    return [*(tree if arrays else trees.leaves(tree))]


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
        self.body, self.first, self.steps = body, first, len(xs[0])
        self.dtype = next(a.dtype for a, v in zip(first, body.states, strict=True) if v.floating)
        self.rows = first[body.moving[0]].shape[0] if body.reading.axis == 0 else 1
        self._once = Values(dict(zip(body.fixed, arrays, strict=True)), execute)
        self._once.update((v, first[k]) for k, v in enumerate(body.states) if v.kind == "F")
        self._x = dict(zip(body.x, xs, strict=True))

    @functools.cached_property
    def known(self) -> list[Values]:
        """The values of each step that no float state enters."""
        body, steps = self.body, range(self.steps)
        fixed = lambda v: self._once[v] if v.kind == "F" else None  # noqa: E731
        known = [Values({v: x[t] for v, x in self._x.items()}, execute, fixed) for t in steps]
        self.last = [self.first[k] for k in body.ahead]  # the counters
        for values in known:
            values.update(
                (body.states[k], now) for k, now in zip(body.ahead, self.last, strict=True)
            )
            self.last = [values[body.after[k]] for k in body.ahead]
        return known

    def fixed(self, v: Variable) -> np.ndarray:
        """A value of kind F."""
        return self._once[v]

    def moving(self, v: Variable) -> np.ndarray:
        """A result that depends on no state, at all steps."""
        return self._x[v] if v in self._x else np.stack([values[v] for values in self.known])


States = tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]


class _Read:
    """A step that was read, for calls of one kind.

    Args:
        output, after: the trees of its results.
        numbers: which of its states are whole numbers of Python.

    Attributes:
        tapes: by the number of steps: the tape; or whether the next call makes it.
    """

    def __init__(self, body: Recording, output: Tree, after: Tree, numbers: list[bool]) -> None:
        self.body, self.output, self.after, self.numbers = body, output, after, numbers
        self.wanted, self._layers = body.seen(), dict[Any, Layer]()
        self.tapes: dict[int, Tape | bool] = {}
        self.dtype = next(v.dtype for v in body.states if v.floating)
        self.stable = not body.ahead and all(map(shaped, body.equations))

    def run(
        self, arrays: Sequence[Any], xs: Sequence[Any], first: Sequence[Any],
        engine: str | None = None,
    ) -> tuple[Tree, Tree]:  # fmt: skip
        """The outputs and the last state."""
        steps = len(xs[0])
        tape = self.tapes.get(steps)
        if isinstance(tape, Tape):
            all_arrays = [*arrays, *xs, *first]
            named, memory = tape.enter(all_arrays)
            output, last = tape.leave(all_arrays, self.recur(named), memory)
        else:
            run = _Run(self.body, arrays, xs, first)
            states = self.recur(self.enter(run, first), engine)
            if tape is None:  # many calls come once, with a number of steps of their own
                add_recent(self.tapes, steps, True, _MOST)
            elif tape:
                self.tapes[steps] = self.stable and self.taped(arrays, xs, first, states)
            output, last = self.leave(run, first, states)
        return filled(self.output, output), filled(self.after, last)

    def enter(self, run: _Run, first: Sequence[Any]) -> dict[str, Any]:
        """The arrays of the layer."""
        named = self.body.reading.arrays_of(run, [first[k] for k in self.body.moving])
        return {
            name: array if array.dtype == bool else Arrays.cast(array, run.dtype)
            for name, array in named.items()
        }

    def recur(self, named: Mapping[str, Any], engine: str | None = None) -> States:
        """The cell's last states, and those of all steps that outputs need."""
        reading, how = self.body.reading, (threads.current(), engine)
        layer = self._layers.get(how)
        if layer is None:
            made = plan(reading.cell, reading.size, self.dtype, engine, reading.sizes)
            options = Options(threads=how[0]).unread()
            layer = reading.called(self.wanted, options, plan=made)
            self._layers[how] = layer
        return reading.named(one_way(passes.run)(layer, named), self.wanted)

    def leave(self, run: _Run, first: Sequence[Any], states: States) -> tuple[list[Any], list[Any]]:
        """The outputs and the last states of the user."""
        body = self.body
        last, known = body.unpacked(body.reading, first, *states, self.wanted)
        if body.ahead:
            assert run.known
            for k, value in zip(body.ahead, run.last, strict=True):
                last[k] = value.item() if self.numbers[k] else value
        if any(v not in known for v in body.outputs):
            for t, values in enumerate(run.known):
                values |= {v: series[t] for v, series in known.items()}
            known = {v: np.stack([values[v] for values in run.known]) for v in body.outputs}
        return [known[v] for v in body.outputs], last

    def taped(
        self, arrays: Sequence[Any], xs: Sequence[Any], first: Sequence[Any], states: States
    ) -> Tape | bool:
        """The tape of calls of so many steps; False if there is none."""
        tree = [*arrays], [*xs], [*first], states
        record = Taped([*trees.leaves(tree)])
        arrays, xs, first, states = filled(tree, record.stand_ins)
        names = [f"a[{k}]" for k in range(len(arrays) + len(xs) + len(first))]
        names += [f"b[{k}][{name!r}]" for k, part in enumerate(states) for name in sorted(part)]
        try:
            run = _Run(self.body, arrays, xs, first)
            entered = self.enter(run, first)
            split = len(record.equations)
            results = self.leave(run, first, states)
            if len(record.equations) - split > _LONG:
                return False
            into, out = (mapped(lambda leaf: leaf.variable, tree) for tree in (entered, results))
            places = dict(zip(record.fixed, names, strict=True))
            return Tape(record.equations, places, into, out, split)
        except Exception:  # then calls stay as they are
            return False


# A reading for a call, and the arrays that the step has from elsewhere, see ``Recording.arrays``.
_Found = tuple[_Read, Sequence[np.ndarray]]


class _Known:
    """The finding of a recording of a copy of the step: valid while all that the copy read stays.

    Args:
        arrays: those that the step makes itself, in the places that they have among the others.
        slots: the places of those that it reads, in the mirror's order.
    """

    def __init__(
        self, mirror: Mirror, read: _Read | str, arrays: Sequence[np.ndarray] = (),
        slots: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.mirror, self.read, self.slots = mirror, read, slots
        self.arrays = [None if k in slots else array for k, array in enumerate(arrays)]

    def now(self) -> _Found | str | None:
        """The reading with the arrays of a call; None if something is not what it was."""
        if isinstance(self.read, str):
            return self.read if self.mirror.fresh else None
        read = self.mirror.arrays
        if read is None:
            return None
        arrays: list[Any] = self.arrays.copy()
        for slot, array in zip(self.slots, read, strict=True):
            arrays[slot] = array
        return self.read, arrays


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
        self.recording, self.traced = Recording.of_step([x[0] for x in self.xs], self.first)
        self.arrays = self.recording.arrays

    def stand_in(self, slots: list[int]) -> Callable[[np.ndarray], Traced]:
        """A function that makes stand-ins of arrays, and notes their places among all arrays."""

        def of(array: np.ndarray) -> Traced:
            slots.append(len(self.arrays))
            return Traced(self.recording, self.recording.of(array), array)

        return of

    def record(self, mirror: Mirror) -> None:
        """Records a copy of the step.

        Raises:
            Refused: if it does what no recording can show.
        """
        count = len(self.xs)
        before = filled(self.state, self.traced[count:])
        try:
            output, after = mirror.begin()(filled(self.x, self.traced[:count]), before)
            mirror.finish()
        except Refused:
            raise
        except Exception as error:  # the step raises it itself, or it is one of the recording
            if mirror.why is not None:
                raise Refused(
                    f"the step {mirror.why}, which no recording can follow",
                    "give the step what it reads as arrays and numbers, and keep what it changes "
                    "in the state",
                ) from None
            problem = f"this cannot be recorded. {type(error).__name__}: {error}"
            raise Refused(problem, where=places.raised(error)) from None
        if self.recording.refusal is not None:
            raise self.recording.refusal
        if [*map(id, leaves(before))] != [*map(id, self.traced[count:])]:
            raise Refused(*CHANGES_STATE)
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
        self.output, self.after = (mapped(lambda _: True, tree) for tree in (output, after))

    def read(self, kind: Any) -> _Read:
        """The reading of the step, from an earlier call or proven now."""
        owner, key = self.owner, tuple(self.recording.lines())
        if key not in owner._read:
            owner._reads[kind] += 1
            name = getattr(owner.step, "__name__", type(owner.step).__name__)
            outcome: Recording | Refused = self.recording
            try:
                read_step(self.recording, name)
                self._prove()
                self.recording.arrays = []  # which calls bring
            except Refused as error:
                outcome = error.with_traceback(None)
            add_recent(owner._read, key, outcome, _READINGS)
        owner._calls[kind] = len(self.recording.equations)
        owner._short.clear()
        known = owner._read[key]
        if isinstance(known, Refused):
            raise known.with_traceback(None)
        return _Read(known, self.output, self.after, self.numbers)

    def _prove(self) -> None:
        short = [array[:STEPS] for array in self.xs]
        read = _Read(self.recording, self.output, self.after, self.numbers)
        x = filled(self.x, short)

        def both(states: list[np.ndarray]) -> Any:
            first = [
                array if array.dtype != self.dtype else state.astype(self.dtype)
                for array, state in zip(self.first, states, strict=True)
            ]
            with np.errstate(all="ignore"):
                step = self.owner._loop(x, filled(self.state, first))
                reading = read.run(self.arrays, short, first, "reference")
            return [
                {f"result {i} of the step": array for i, array in enumerate(leaves(results))}
                for results in (step, reading)
            ]

        reason = tried([array.shape for array in self.first], both, self.dtype.name)
        if reason is not None:
            raise Refused(reason)


def _kind(tree: Tree, skipped: int = 0) -> Any:
    """The sort of x or of states on which a reading depends: structure, shapes and dtypes.

    Args:
        skipped: axes at the front that make no difference.
    """
    kind = type(tree)
    if kind is np.ndarray:
        return tree.shape[skipped:], tree.dtype
    if isinstance(tree, dict):
        return kind, *[(key, _kind(part, skipped)) for key, part in tree.items()]
    if isinstance(tree, (tuple, list)):
        return kind, *[_kind(part, skipped) for part in tree]
    return kind


def _variable(leaf: Any) -> Variable:
    if isinstance(leaf, Traced):
        return leaf.variable
    raise Refused("a result of the step depends neither on x nor on a state")


__all__ = ["loop"]
