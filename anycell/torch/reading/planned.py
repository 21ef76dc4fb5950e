"""A step that was read, and all that its calls have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from anycell.layer.restarts import restarts
from anycell.layer.signature import state_names
from anycell.plan import Engine, Layer, Options
from anycell.plan.layer import register
from anycell.read import Refused, Value, Variable
from anycell.recent import add_recent
from anycell.torch.operators.functional import engine_of, fused_plan, run_layer
from anycell.torch.operators.fused import layered
from anycell.torch.reading.read import Reader
from anycell.torch.reading.record import ROWS, A, Recording, Run
from anycell.torch.reading.stepwise import Steps, stepwise, unmasked, wide
from anycell.torch.reading.tape import Tape

_MOST = 64  # tapes that a plan keeps


class ReadStep:
    """A step that was read, and all that its calls have in common.

    Args:
        recording, reader: of the step.
        trees: the structure of the output and of the state after a step, and the leaves of the
            output that are no tensors, with their places.
        merged: see ``Run``.

    Attributes:
        seen: the places in ``moving`` of the states that outputs are computed from.
        parts: the outputs that are a part of such a state, and ``later``, others that are none.
        around: the number of operations that torch runs once a call, before and after the kernel.
        rows: by size of a batch, why the step itself runs; None if it is as recorded.
    """

    def __init__(
        self, recording: Recording, reader: Reader, trees: Sequence[Any], merged: bool
    ) -> None:
        self.recording, self.reading, self.merged = recording, reader.reading, merged
        self.output_tree, self.state_tree, self.others = trees
        self.moving = recording.moving
        before, after = ([s[k] for k in self.moving] for s in (recording.states, recording.after))
        known = {*before, *after}
        # Outputs that are no part of a state are computed after the loop, from all states.
        others = [v for v in recording.outputs if v.kind == "S" and v not in known]
        # States that are only detached get no gradient, not one of zeros.
        tied = {v for e in recording.equations if e.op is not A.detach for v in e.operands}
        tied |= {*recording.outputs, *recording.after}
        self.loose = {k for k, v in zip(self.moving, before, strict=True) if v not in tied}
        self.parts = {v: part for v in others if (part := _part(reader, v, after))}
        self.later = list(dict.fromkeys(v for v in others if v not in self.parts))
        outer = "F" if self.reading.projected else "FX"
        lone = [e for e in recording.equations if e.results[0].kind in outer]
        lone += recording.needed(self.later, known)
        self.around = len({e for e in lone if e.op is not A.t})
        used = recording.sources(self.later, known) | {*recording.outputs}
        pairs = enumerate(zip(before, after, strict=True))
        seen = {place for place, ends in pairs if not used.isdisjoint(ends)}
        self.seen = sorted(seen | {place for place, _ in self.parts.values()})
        # Whether the kernel itself can write the zeros of outputs under a mask.
        direct = not self.later and used.isdisjoint(before) and self.reading.flags is None
        self.direct = direct and {*recording.outputs} <= {*after, *self.parts}
        self.rows: dict[int, str | None] = dict.fromkeys((1, 2, *ROWS))  # as tried, as recorded
        self.layers: dict[Any, Layer] = {}
        self.tapes: dict[Any, Tape | bool] = {}
        register(self.reading.cell)

    def unfit(self, call: Steps) -> str | None:
        """Why the kernel cannot run a call of this step, if it cannot."""
        flags = self.reading.flags
        if call.resets is not None and flags is not None:
            return "resets= for a step that holds or resets its own state"
        changing = len(self.moving) + len(self.recording.ahead)
        if call.resets is not None and changing < len(call.state):
            return "resets= with a state that the step never changes"
        if call.reverse and flags is not None and flags.restored is not None:
            return "reverse= for a step that resets its own state"
        return None

    @property
    def engine(self) -> Engine:
        """The engine that runs it, and why."""
        like = torch.empty(0, dtype=self.recording.dtype, device=self.recording.device)
        return engine_of(fused_plan(self.reading.cell, self.layer.sizes, like))

    @property
    def layer(self) -> Layer:
        """The layer of its cell."""
        return self.reading.layer._replace(dtype=str(self.recording.dtype).removeprefix("torch."))

    # -- a call ----------------------------------------------------------------------------------
    def run(
        self, call: Steps, tensors: Sequence[Tensor], engine: str | None = None,
        drawn: Mapping[Variable, Tensor] | None = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Returns the output and the last state.

        Args:
            tensors: those of the step's surroundings.
            drawn: random numbers of all steps that are drawn already.
        """
        run = self.values(call, tensors)
        run.series |= drawn or {}
        return self._leave(call, run, self.recur(call, self._enter(call, run), engine))

    def replay(self, call: Steps, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        """Returns the same as ``run``. What it does around the kernel is recorded in the second
        call with tensors of the same shapes and strides, and replayed in all that follow.
        """
        key, arrays = self._key(call, tensors)
        tape = self.tapes.get(key)
        if isinstance(tape, Tape):
            named, memory = tape.enter(arrays)
            return tape.leave(arrays, self.recur(call, named), memory)
        run = self.values(call, tensors)
        results = self.recur(call, self._enter(call, run))
        if tape is None:  # many calls come once, with a number of steps of their own
            add_recent(self.tapes, key, True, _MOST)
        elif tape:
            self.tapes[key] = self._tape(call, len(tensors), arrays, results)
        return self._leave(call, run, results)

    @staticmethod
    def _key(call: Steps, tensors: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        """Returns the facts that a tape depends on, and the tensors of a call."""
        arrays = [*tensors, *call.tensors]
        return (
            tuple([(t.shape, t.stride()) for t in arrays]),
            call.mask is None, call.resets is None, call.restored is None, call.reverse,
        ), arrays  # fmt: skip

    def tape(self, call: Steps, tensors: Sequence[Tensor]) -> Tape | None:
        """Returns the tape of calls like this one, if there is one."""
        tape = self.tapes.get(self._key(call, tensors)[0])
        return tape if isinstance(tape, Tape) else None

    def _tape(
        self, call: Steps, count: int, arrays: Sequence[Tensor], results: Sequence[Tensor]
    ) -> Tape | bool:
        def enter(arrays: Sequence[Tensor]) -> tuple[Any, Any]:
            tensors, this = arrays[:count], call.filled(arrays[count:])
            run = self.values(this, tensors)
            return self._enter(this, run), (this, run)

        def leave(
            arrays: Sequence[Tensor], results: Sequence[Tensor], memory: tuple[Steps, Run]
        ) -> Any:
            return self._leave(*memory, results)

        try:
            drawn = bool(self.recording.random)
            with (
                torch.random.fork_rng([], enabled=drawn), torch.inference_mode(False),
                torch.enable_grad(),
            ):  # fmt: skip
                return Tape(arrays, enter, results, leave)
        except Exception:  # then calls stay as they are
            return False

    def values(self, call: Steps, tensors: Sequence[Tensor]) -> Run:
        """The values of a call that need no state of floats."""
        step, xs = self.recording, unmasked(call)
        run = Run(step, tensors, xs, call.state, call.rows, self.merged)
        if step.ahead:
            before = [step.states[k] for k in step.ahead]
            moving = dict(zip(step.x, xs, strict=True))
            series, run.last = self._stepwise(call, run, moving, step.ahead, before)
            run.series |= zip(before, series, strict=True)
        return run

    def repeat(
        self, call: Steps, tensors: Sequence[Tensor], drawn: Mapping[Variable, Tensor]
    ) -> tuple[Any, Any]:
        """The results of the recorded operations, step by step, with these random numbers."""
        step = self.recording
        moving = {**dict(zip(step.x, call.xs, strict=True)), **drawn}
        run, places = self.values(call, tensors), range(len(step.states))
        return self._stepwise(call, run, moving, places, step.outputs)

    def _stepwise(
        self, call: Steps, run: Run, moving: Mapping[Variable, Tensor], places: Sequence[int],
        outputs: Sequence[Variable],
    ) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
        """Outputs at all steps and the last states, of the states at these places."""
        step = self.recording
        before, after = ([group[k] for k in places] for group in (step.states, step.after))

        def one(x: list[Tensor], state: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            known = dict(zip((*moving, *before), (*x, *state), strict=True))
            made = run.one(known, [*outputs, *after])
            return made[: len(outputs)], made[len(outputs) :]

        first = [call.state[k] for k in places]
        restored = call.restored and [call.restored[k] for k in places]
        trees = (pytree.tree_structure([0] * len(group)) for group in (moving, first))
        steps = Steps([*moving.values()], next(trees), first, next(trees), *call[4:])
        return stepwise(one, steps._replace(restored=restored, turned=()))

    def _enter(self, call: Steps, run: Run) -> dict[str, Tensor]:
        """The arrays of the layer, states without the axis of directions."""
        reading, mask = self.reading, call.mask
        loose = self.loose if mask is None else ()
        first = [call.state[k].detach() if k in loose else call.state[k] for k in self.moving]
        named = reading.arrays_of(run, first)
        inner = named.pop("mask", None)  # the step's own
        if mask is not None or inner is not None:
            both = [flags for flags in (mask, inner) if flags is not None]
            named["mask"] = both[0] if len(both) == 1 else both[0] & both[1]
        if call.resets is not None:
            named["resets"] = call.resets
            if call.restored is not None:
                restored = reading.start(run, [call.restored[k] for k in self.moving])
                named |= zip(state_names("reset_state", reading.cell), restored, strict=True)
        return named

    def layer_for(
        self, call: Steps, arrays: Mapping[str, Tensor], engine: str | None = None
    ) -> Layer:
        """The layer of a call with these arrays."""
        masked = "mask" in arrays and not self.direct
        key = masked, call.reverse, engine
        if key not in self.layers:
            options = Options(reverse=(call.reverse,))
            options = options.unread() if masked else options  # what is held, not zeros
            dtype = self.layer.dtype
            self.layers[key] = self.reading.called(self.seen, options, engine=engine, dtype=dtype)
        return self.layers[key]

    def recur(
        self, call: Steps, arrays: Mapping[str, Tensor], engine: str | None = None
    ) -> Sequence[Tensor]:
        """The output of the layer, the last states, and the states of all steps that it returns."""
        layer = self.layer_for(call, arrays, engine)
        output, last, series = run_layer(layer, layered(arrays))
        return output, *[state.squeeze(0) for state in last], *series

    def _leave(self, call: Steps, run: Run, results: Sequence[Tensor]) -> tuple[Any, Any]:
        """The user's output and last state, from what ``recur`` returns."""
        step, count = self.recording, 1 + len(self.reading.cell.states)
        parts = results[0], results[1:count], results[count:]
        ends, every = self.reading.named(parts, self.seen)
        last, known = step.unpacked(self.reading, call.state, ends, every, self.seen, call.reverse)
        for place, k in enumerate(step.ahead):
            last[k] = run.last[place]
        if call.resets is not None:
            self._restart(call, known)
        for var, (place, start) in self.parts.items():
            whole = known[step.after[self.moving[place]]]
            lead, shape = whole.shape[: 1 + call.batched], var.shape[call.batched :]
            flat = whole.reshape(*lead, -1).narrow(-1, start, math.prod(shape))
            known[var] = flat.reshape(*lead, *shape)
        run.series |= known
        if self.later:
            run.compute(self.later)
        outputs: list[Any] = [self._output(call, run, var) for var in step.outputs]
        for place, value in self.others:
            outputs.insert(place, value)
        return (
            pytree.tree_unflatten(outputs, self.output_tree),
            call.state_of(last, self.state_tree),
        )

    def _output(self, call: Steps, run: Run, var: Variable) -> Tensor:
        if var.kind == "F":
            tensor = run.fixed(var)
            tensor = tensor.expand(run.steps, *tensor.shape)
        else:
            tensor = run.moving(var)
        if call.mask is None or self.direct:
            return tensor
        return torch.where(wide(call.mask, tensor, call), tensor, torch.zeros_like(tensor))

    def _restart(self, call: Steps, known: dict[Variable, Tensor]) -> None:
        """Restores the states before those steps at which episodes start."""
        assert call.resets is not None
        starts = restarts(call.resets, call.mask, call.reverse)
        for k in (self.moving[place] for place in self.seen):
            before = known[self.recording.states[k]]
            restored = call.restored[k] if call.restored else torch.zeros_like(call.state[k])
            chosen = torch.where(wide(starts, before, call), restored, before)
            known[self.recording.states[k]] = chosen


def _part(reader: Reader, var: Variable, after: Sequence[Variable]) -> tuple[int, int] | None:
    """Finds the new state that an output is a part of, and where the part begins; None for none."""
    value = reader.values.get(var)
    if not isinstance(value, Value) or not value.ids.size:
        return None
    try:
        axis, _, units = reader.graph.view(value)
    except Refused:  # it has no axis of the batch, and no state is like that
        return None
    for place, state in enumerate(after):
        whole = reader.values.get(state)
        if isinstance(whole, Value) and whole.boolean == value.boolean:
            at, _, every = reader.graph.view(whole)
            start = int((every == units[0]).argmax())
            if at == axis and not axis and np.array_equal(every[start:][: len(units)], units):
                return place, start
    return None
