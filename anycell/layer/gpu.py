"""One layer of any cell on a GPU: ``forward`` and ``backward`` with the arguments and results of
the functions for the CPU.

Arrays come through a ``DeviceFramework``. Directions run at once, see ``engines.gpu.twins``, or if
the device refuses that one after the other. A direction runs in chunks of time: forward the input
projection, then the steps; backward the steps, then the matmuls for the gradients of weights and
input. Gradients that add up over chunks are float32 in any dtype.
With checkpoints both passes go segment by segment; segments of a direction share their memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from anycell.engines import gpu
from anycell.engines.gpu import Span, Variant, Work, capacity, refusals
from anycell.engines.gpu.step import Step, print_step
from anycell.engines.gpu.steps import BLOCKS
from anycell.engines.gpu.text import Printed, keeps, stores_operand
from anycell.lang.cell import Linear
from anycell.layer import contract
from anycell.layer.arguments import Direction, Factors, Kept
from anycell.layer.framework import DeviceFramework
from anycell.layer.launches import Again, DeviceDraft, DeviceRecipe, View
from anycell.layer.recipe import forget, recipe_of
from anycell.layer.schedule import chunk_steps, segment_steps
from anycell.layer.signature import ENDS, direction, of_a_matmul
from anycell.layer.weight_gradients import WeightGradients, bias_gradients, gradients_by_name
from anycell.plan import Options, Plan

Array = Any
CHUNK_BYTES = 64 << 20  # of projected gates for one direction

Kernels = Step | Printed
# The draft, whose views fit kernels: x is ``[T, B, I]`` or ``[T, B, G*H]``, the mask uint8
# ``[T, B]``, and resets uint8 ``[D, T, B]``, see ``restarts``.
Call = tuple[DeviceDraft, Plan, Options]


@functools.lru_cache(maxsize=256)
def _printed(plan: Plan, variant: Variant, choice: capacity.Choice) -> Kernels:
    return print_step(plan, variant) if choice.tier == 3 else gpu.print_whole(plan, variant, choice)


def _exchange(draft: DeviceDraft, plan: Plan, kernels: Kernels, batch: int) -> dict[str, Any]:
    """The arguments of programs that wait for one another."""
    if not isinstance(kernels, Printed) or not kernels.cooperative:
        return {}
    groups, programs = gpu.grid(kernels, plan, batch)
    parts = kernels.parts and draft.empty((groups, kernels.parts), wide=True)
    return {
        "flags": draft.flags(2 * groups * programs),
        "parts": parts,
        "vectors": kernels.vectors and draft.empty((2, batch, kernels.vectors)),
        "trouble": draft.host.pointer(draft.host.trouble),
        "patience": draft.host.patience,
        "done": 0,  # steps that these programs have counted
    }


class Drafted(NamedTuple):
    """A drafted pass.

    Attributes:
        names: of the gradients that it returns, in order.
        states: whether the backward pass will read the sequence of each state.
    """

    recipe: DeviceRecipe
    names: Sequence[str] = ()
    states: Sequence[bool] = ()


def forward(
    host: DeviceFramework, plan: Plan, arrays: Mapping[str, Array], options: Options, *, keep: bool
) -> tuple[Array, list[Array], Kept | None]:
    """Runs a layer; arguments and results are those of ``anycell.layer.forward``.

    The plan is for engine "gpu", and all arrays are on the device, in the plan's dtype. At the
    borders of segments, all states but the first are kept in float32, as they are between steps.
    """
    fitted, layout = contract.fit(host, plan, arrays, options)
    same = options.unseeded()
    key = "forward", keep, *_facts(host, plan), same, layout
    draft = functools.partial(_draft_forward, host, plan, options=same, keep=keep)
    made, known = _played(key, fitted, options, draft)
    end = 1 + len(plan.cell.states)
    kept = Kept.of(made[end:], known.states, len(options.reverse)) if keep else None
    return made[0], made[1:end], kept


def _draft_forward(
    host: DeviceFramework, plan: Plan, arrays: Mapping[str, Array], options: Options, keep: bool
) -> Drafted:
    """Drafts the pass for arrays that are laid out like these."""
    draft = DeviceDraft(host, plan, arrays)
    fitted = draft.views
    steps, batch = fitted["x"].shape[:2]
    widths = [plan.sizes[s.size] for s in plan.cell.states]
    directions, both = len(options.reverse), len(options.reverse) * widths[0]
    segment = _segment(plan, options, steps, batch) if keep else steps
    borders, count = segment < steps, -(-steps // max(1, segment))
    # Outputs zeroed under a mask are not the hidden states, which then need memory of their own.
    zeroed = options.apart("mask" in fitted)
    slots = steps + 1 + any(options.reverse)
    hidden = None if zeroed and borders else draft.empty((slots, batch, both))
    out = None if zeroed or hidden is None else hidden[1 : steps + 1]
    out = draft.empty((steps, batch, both)) if out is None else out
    finals = [draft.empty((directions, batch, width)) for width in widths]
    first = draft.empty((count, batch, both)) if borders or hidden is None else hidden
    kept_states, kept_values = list[list[View | None]](), list[Any]()
    kept = Kept(first, kept_states, kept_values)

    def run_direction(d: int) -> None:
        run = _Forward((draft, plan, options), d, segment, keep, hidden)
        sequences, values = run.states, run.kept
        if borders:
            wide = [draft.empty((count, batch, width), wide=True) for width in widths[1:]]
            sequences, values = [None, *wide], draft.empty((0, batch, plan.saved_stride))
        kept_states.append(sequences)
        kept_values.append(values)
        # The given states, else the values that the cell declares.
        states: Sequence[View | float]
        states = [run.w.get(f"state {s.name}", s.initial) for s in plan.cell.states]
        for slot, begin in enumerate(range(0, max(1, steps), max(1, segment))):
            if borders:
                for array, value in zip(kept.border(d, slot, widths[0]), states, strict=True):
                    array[:] = value
            states = run.advance(begin, min(begin + segment, steps), states, out)
        for final, state in zip(finals, states, strict=True):
            final[d] = state

    draft.beside(functools.partial(run_direction, d) for d in range(directions))
    if not keep:
        return Drafted(draft.finish([out, *finals]))
    there = [view is not None for view in kept_states[0]]
    return Drafted(draft.finish([out, *finals, *kept.flat()]), states=there)


def backward(
    host: DeviceFramework,
    plan: Plan,
    arrays: Mapping[str, Array],
    options: Options,
    kept: Kept,
    d_output: Array | None,
    d_final: Sequence[Array | None],
    *,
    wanted: Collection[str] | None = None,
) -> dict[str, Array]:
    """The gradients of a layer; arguments and results are those of ``anycell.layer.backward``."""
    again = options.checkpoint is not None  # whether the forward pass, which may read x, runs again
    fitted, layout = contract.fit(host, plan, arrays, options, read=again)
    x, same = fitted["x"], options.unseeded()
    parts, more = contract.fit_gradients(
        host, plan, x.shape, options.reverse, kept, d_output, d_final, {},
        segment=_segment(plan, options, *x.shape[:2]) if again else x.shape[0], keeps=keeps_state,
    )  # fmt: skip
    wants_x = wanted is None or "x" in wanted or "weight_ih" not in fitted
    need = wanted is None or any(map(of_a_matmul, wanted))
    key = "backward", wants_x, need, *_facts(host, plan), same, layout, more
    draft = functools.partial(_draft_backward, host, plan, options=same, wants_x=wants_x, need=need)
    made, known = _played(key, fitted | parts, options, draft)
    return dict(zip(known.names, made, strict=True))


def _draft_backward(
    host: DeviceFramework,
    plan: Plan,
    arrays: Mapping[str, Array],
    options: Options,
    wants_x: bool,
    need: bool,
) -> Drafted:
    """Drafts the pass for arrays that are laid out like these.

    Args:
        wants_x, need: whether the gradient of x and those of weights are wanted.
    """
    draft = DeviceDraft(host, plan, arrays)
    parts, x, count = draft.views, draft.views["x"], len(options.reverse)
    names, dy = plan.cell.state_names, parts.get("d_output")
    kept = Kept(
        parts["hidden"],
        [[parts.get(f"sequence {d} {name}") for name in names] for d in range(count)],
        [parts[f"saved {d}"] for d in range(count)],
    )
    d_final = [parts.get(f"d_final {name}") for name in names]
    dx = draft.empty(x.shape) if wants_x else None
    if dy is None:
        dy = draft.zeros((1, x.shape[1], kept.hidden.shape[2]))
    directions, gradients = list[Direction](), list[Direction]()
    factors, apart = dict[str, Array](), list[Array]()

    def run_direction(d: int) -> None:
        final = [None if a is None else a[d] for a in d_final]
        run = _Backward((draft, plan, options), d, kept, final, need, dx)
        for begin, end, memory in run.parts():
            run.advance(begin, end, memory, dy)
        if run.projects:
            apart.append(run.dx)
        else:
            factors[f"x{ENDS[d]}"] = run.dx
        directions.append(run.w)
        gradients.append(run.result())
        if not host.multiplies:
            factors.update({name + ENDS[d]: a for name, a in run.buffers.items()})

    draft.beside(functools.partial(run_direction, d) for d in range(count))
    for other in apart:
        if other is not dx:
            dx += other
    named = gradients_by_name(draft.empty, directions, dx, gradients) | factors
    return Drafted(draft.finish(named.values()), list(named))


def _facts(host: DeviceFramework, plan: Plan) -> tuple[Any, ...]:
    """The facts that a recipe depends on besides options and arrays."""
    return plan, host, host.tier, host.patience, host.tf32(plan.cell), host.twins


def _played(
    key: tuple[Any, ...],
    given: Mapping[str, Array],
    options: Options,
    draft: Callable[[Mapping[str, Array]], Drafted],
) -> tuple[list[Array], Drafted]:
    """Runs a pass, and drafts it before if its form is new. It starts again if the device refuses a
    kernel: a pass changes none of its arguments, so a refused attempt leaves no trace.
    """
    while True:
        try:
            known: Drafted = recipe_of(key, functools.partial(_drafted, draft, given))
            return known.recipe.run(given, options), known
        except Again:
            forget(key)


def _drafted(
    draft: Callable[[Mapping[str, Array]], Drafted], given: Mapping[str, Array]
) -> Drafted:
    """Drafts a pass for arrays that are laid out like these, until the device refuses no kernel."""
    while True:
        try:
            drafted = draft(given)
        except Again:
            continue
        drafted.recipe.again = functools.partial(_drafted, draft)
        return drafted


class _Chunk(NamedTuple):
    """A chunk of one direction: the times ``begin`` to ``end - 1``, of which ``time`` runs first
    and ``time + sign`` next.
    """

    begin: int
    end: int
    time: int
    sign: int


class _Memory(NamedTuple):
    """Memory of a direction: its states, and the values that the backward pass reads.

    Attributes:
        hidden: the first state, from ``column`` on: the other direction's may lie beside it.
        states, values: of one direction, as in ``Kept``.
        first: the earliest time in these arrays.
    """

    hidden: Array
    column: int
    states: Sequence[Array | None]
    values: Array | None
    first: int


class _DirectionPass:
    """One direction in one pass: its kernels, and their arguments for all chunks of time.

    Args:
        d: the direction.

    Attributes:
        w: what the direction learns, starts from and restores, and what all of them share.
        projects: whether x is to be projected.
    """

    def __init__(self, call: Call, d: int, backward: bool, keep: bool = False) -> None:
        draft, plan, options = call
        arrays, host = draft.views, draft.host
        self.call, self.draft, self.plan, self.options, self.d = call, draft, plan, options, d
        self.w, self.cell, self.reverse = direction(plan, arrays, d), plan.cell, options.reverse[d]
        self.mask, self.projects = arrays.get("mask"), "weight_ih" in self.w
        self.x = arrays["x" if self.projects else f"x{ENDS[d]}"]
        self.steps, self.batch = self.x.shape[:2]
        self.widths = [plan.sizes[s.size] for s in plan.cell.states]
        self.width = len(plan.cell.gates) * plan.hidden_size
        multiplies = host.multiplies  # else there is no buffer between chunks
        self.chunk = _chunk(plan, self.steps, self.batch) if multiplies else max(1, self.steps)
        self.variant = self._variant(backward, keep)
        # The choices that may run the pass, the best first.
        how = host.tier, self.batch, host.tf32(plan.cell)
        twins = len(options.reverse) if host.twins else 1
        self.choices = capacity.choices(plan, host.limits, backward, *how, twins)
        self.choice, self.kernels = self._kernels()
        self.matrices = [_used(draft, plan, l, self.w[l.weight]) for l in plan.cell.linears]
        if backward and isinstance(self.kernels, Printed) and self.kernels.cooperative:
            self.matrices = [draft.rounded(matrix.mT) for matrix in self.matrices]
        self.values = _constants(draft, plan, self.w)
        self.values |= _exchange(draft, plan, self.kernels, self.batch)
        if "resets" in self.w:
            self.values |= _restored(draft, plan, self.w)
        self.values["turn"] = 0  # of buffers that take turns

    def _variant(self, backward: bool, keep: bool) -> Variant:
        """The variant of the kernels."""
        cell, w, masked = self.cell, self.w, self.mask is not None
        return Variant(
            backward=backward,
            mask=masked,
            resets="resets" in w,
            draw=self.options.training and bool(cell.keeps),
            keep=keep,
            input_bias="bias_ih" in w and not backward,
            biases=tuple(l.bias_name in w and not backward for l in cell.linears),
            options=self.options.printed(masked),
        )

    def _kernels(self) -> tuple[capacity.Choice, Kernels]:
        """The best choice that the device has not refused, and its kernels."""
        host, plan = self.draft.host, self.plan
        for choice in self.choices:
            kernels = _printed(plan, self.variant, choice)
            if not isinstance(kernels, Printed):
                return choice, kernels
            programs = choice.twins * math.prod(gpu.grid(kernels, plan, self.batch))
            if not refusals.refuses(host.limits, kernels, programs):
                return choice, kernels
        refused = "; ".join(map(str, refusals.of_plan(plan)))
        raise RuntimeError(f"tier={host.tier} cannot run cell {plan.cell.name} here: {refused}.")

    def chunks(self, begin: int, end: int) -> Iterator[_Chunk]:
        """Yields the chunks from ``begin`` to ``end`` steps of the direction. The backward pass has
        the same chunks, the last one first, with or without checkpoints: so sums have equal bits.
        """
        starts, backward = range(begin, end, self.chunk), self.variant.backward
        for done in reversed(starts) if backward else starts:
            count = min(self.chunk, end - done)
            first = self.steps - done - count if self.reverse else done
            if self.reverse is backward:
                yield _Chunk(first, first + count, first, 1)
            else:
                yield _Chunk(first, first + count, first + count - 1, -1)

    def slot(self, memory: _Memory, i: int, done: int) -> int:
        """The slot of state i after ``done`` steps."""
        return (self.steps + (i == 0) - done if self.reverse else done) - memory.first

    def spans(self, memory: _Memory, chunk: _Chunk) -> dict[str, Span]:
        """The states before each step of a chunk, and the values that are saved in the step."""
        done = self.steps - 1 - chunk.time if self.reverse else chunk.time
        hidden = Span(memory.hidden, self.slot(memory, 0, done), chunk.sign, memory.column)
        found = {"hidden": hidden}
        for i, (name, states) in enumerate(zip(self.cell.state_names, memory.states, strict=True)):
            if states is not None:
                found[f"sequence {name}"] = Span(states, self.slot(memory, i, done), chunk.sign)
        if memory.values is not None:
            found["saved"] = Span(memory.values, chunk.time - memory.first, chunk.sign)
        return found

    def over(self, array: Array, chunk: _Chunk) -> Span:
        """This direction's columns of an array of all times, or of one entry for all times."""
        varies = array.shape[0] == self.steps
        return Span(array, varies * chunk.time, varies * chunk.sign, self.d * self.widths[0])

    def run(self, chunk: _Chunk, spans: dict[str, Span]) -> None:
        """Runs the kernels over the steps of a chunk."""
        time, sign, options = chunk.time, chunk.sign, self.options
        flags = {"mask": self.mask, "resets": self.w.get("resets")}
        spans |= {name: Span(a, time, sign) for name, a in flags.items() if a is not None}
        # For random masks: seed, stream, time of the first step, time per step.
        draws = options.seed, 2 * options.stream + self.d, time, sign
        work = Work(
            self.draft, self.plan, self.variant, self.values, spans, self.matrices, self.batch,
            chunk.end - chunk.begin, draws if self.variant.draw else None,
        )  # fmt: skip
        if self.batch:
            self.values["turn"] += self.draft.run(self.kernels, work, self._remember)
            if "done" in self.values:
                self.values["done"] += work.steps

    def _remember(self, refused: gpu.Refused) -> None:
        """Remembers a refusal for the next attempt; raises it again if there can be no other."""
        limits = self.draft.host.limits
        if limits is None or not isinstance(self.kernels, Printed):
            raise refused
        later = self.choices[self.choices.index(self.choice) + 1 :]
        facts = self.plan, self.variant, self.choice, later[0] if later else None
        refusals.remember(
            self.kernels, refusals.Refusal(limits, *facts, refused.why, refused.programs)
        )


class _Forward(_DirectionPass):
    """The forward pass, run for the first time, or again from a border on, by the same kernels.

    Args:
        segment: the number of steps whose values it keeps at the same time, if it keeps any.
        hidden: ``Kept.hidden`` of all steps; None for memory of one segment.
    """

    def __init__(self, call: Call, d: int, segment: int, keep: bool, hidden: Any) -> None:
        super().__init__(call, d, backward=False, keep=keep)
        draft, plan, batch = self.draft, self.plan, self.batch
        self.whole = hidden is not None
        if not self.whole:
            hidden = draft.empty((segment + 1 + self.reverse, batch, self.widths[0]))
        self.hidden = hidden
        self.states = [
            draft.empty((segment + 1, batch, width)) if i and keeps(plan, self.variant, i) else None
            for i, width in enumerate(self.widths)
        ]
        self.kept = draft.empty((segment, batch, plan.saved_stride)) if keep else None
        for i, width in enumerate(self.widths[1:], 1):
            self.values[f"work{i}"] = draft.empty((2, batch, width), wide=True)
        self.projected = draft.empty((self.chunk, batch, self.width)) if self.projects else None

    def memory(self, begin: int, end: int) -> _Memory:
        """The memory for the steps of a segment."""
        first = self.steps - end if self.reverse else begin
        hidden = self.hidden[first:] if self.whole else self.hidden
        column = self.d * self.widths[0] if self.whole else 0
        return _Memory(hidden, column, self.states, self.kept, first)

    def advance(
        self, begin: int, end: int, states: Sequence[Array | float], out: Array
    ) -> list[Array]:
        """Runs a segment from the states before it; returns the states after it."""
        memory, draft = self.memory(begin, end), self.draft
        self._hidden(memory, begin)[:] = states[0]
        for i, state in enumerate(states[1:], 1):
            self.values[f"work{i}"][self.values["turn"] & 1] = state
            sequence = memory.states[i]
            if sequence is not None:
                sequence[self.slot(memory, i, begin)] = state
        for chunk in self.chunks(begin, end):
            spans = self.spans(memory, chunk)
            spans["gates"] = Span(self.x, chunk.time, chunk.sign)
            if self.projected is not None:
                count = chunk.end - chunk.begin
                rows = self.x[chunk.begin : chunk.end].reshape(count * self.batch, self.x.shape[2])
                into = self.projected[:count].reshape(count * self.batch, self.width)
                draft.matmul(rows, self.w["weight_ih"].mT, into)
                spans["gates"] = Span(self.projected, chunk.time - chunk.begin, chunk.sign)
            if self.variant.separate_output:
                spans["out"] = self.over(out, chunk)
            self.run(chunk, spans)
        slot = self.values["turn"] & 1
        work = [self.values[f"work{i}"][slot] for i in range(1, len(self.widths))]
        return [self._hidden(memory, end), *work]

    def _hidden(self, memory: _Memory, done: int) -> Array:
        """The first state after ``done`` steps."""
        slot = self.slot(memory, 0, done)
        return Span(memory.hidden, slot, 1, memory.column).at(0, self.widths[0])


class _Backward(_DirectionPass):
    """The backward pass, segment by segment from the last.

    Attributes:
        dx: where its gradient of x goes: the first direction overwrites it, the second adds to it,
            unless both run at once over several chunks; then it has memory of its own. So it has
            for the gradient of its projected gates.
    """

    def __init__(
        self, call: Call, d: int, kept: Kept, d_final: Sequence[Array | None], need: bool, dx: Array
    ) -> None:
        super().__init__(call, d, backward=True)
        draft, plan, cell = self.draft, self.plan, self.cell
        self.kept, values, batch = kept, self.values, self.batch
        for name, size, arriving in zip(cell.state_names, self.widths, d_final, strict=True):
            values[f"d_state {name}"] = draft.zeros((2, batch, size), wide=True)
            if arriving is not None:
                values[f"d_state {name}"][0] = arriving
            if "resets" in self.w:
                values[f"d_reset {name}"] = draft.zeros((batch, size), wide=True)
        if cell.params:
            rows = _row_blocks(self.kernels, batch)
            values["d_params"] = draft.zeros((rows, len(cell.params) * plan.hidden_size), wide=True)
        if cell.static is not None:
            values["d_static"] = draft.zeros((batch, plan.hidden_size), wide=True)
        rows = self.steps * batch
        self.need, self.sums = need, _DeviceGradients(draft, plan, self.w, need, fresh=rows > 0)
        again = self.options.checkpoint is not None and draft.host.twins
        at_once = (again or self.choice.twins > 1) and self.steps > self.chunk
        alone = dx is not None and self.d > 0 and (at_once or not self.projects)
        self.dx = draft.empty(dx.shape, wide=self.projects) if alone else dx
        self.adds = self.d > 0 and not alone
        # For a chunk: gradients of the projected gates, and for each matmul the gradients of its
        # outputs and what it multiplied, unless other arrays hold these.
        sizes = {"d_gates": self.width} if self.projects else {}
        for l in cell.linears:
            if not plan.shares_gradient(l):
                sizes[f"d_outputs {l.name}"] = len(l.outputs) * plan.sizes[l.out_size]
            if stores_operand(plan, self.variant, l):
                sizes[f"operand {l.name}"] = plan.sizes[l.in_size]
        self.buffers = {name: draft.empty((self.chunk, batch, n)) for name, n in sizes.items()}

    def parts(self) -> Iterator[tuple[int, int, _Memory]]:
        """Yields for each segment, the last one first, the numbers of steps that are done before
        and after it, and the values that the backward pass reads, kept or computed again.
        """
        kept, d, first, steps = self.kept, self.d, self.widths[0], self.steps
        segment = _segment(self.plan, self.options, steps, self.batch)
        if segment == steps:
            yield 0, steps, _Memory(kept.hidden, d * first, kept.states[d], kept.values[d], 0)
            return
        again = _Forward(self.call, d, segment, True, None)
        nowhere = self.draft.empty((1, *kept.hidden.shape[1:]))
        for slot in reversed(range(kept.hidden.shape[0])):
            begin, end = slot * segment, min(slot * segment + segment, steps)
            again.advance(begin, end, kept.border(d, slot, first), nowhere)
            yield begin, end, again.memory(begin, end)

    def advance(self, begin: int, end: int, memory: _Memory, dy: Array) -> None:
        """Runs a segment."""
        draft, dx = self.draft, self.dx
        for chunk in self.chunks(begin, end):
            spans = self.spans(memory, chunk)
            for name in set(spans) - {"saved"}:  # from a state before a step to the state after it
                self.values[f"{name}__next"] = -chunk.sign * draft.strides(spans[name].array)[0]
            time = chunk.time - chunk.begin
            spans |= {name: Span(b, time, chunk.sign) for name, b in self.buffers.items()}
            if not self.projects:
                spans["d_gates"] = Span(dx, chunk.time, chunk.sign)
            spans["d_output"] = self.over(dy, chunk)
            self.run(chunk, spans)
            rows = (chunk.end - chunk.begin) * self.batch
            dg = self._dense("d_gates", rows)
            if dg is None:
                dg = dx[chunk.begin : chunk.end].reshape(rows, self.width)
            if self.need:
                width = self.widths[0]
                hidden = spans["hidden"].over(0, chunk.end - chunk.begin, width)
                factors = [self._factors(l.name, rows) for l in self.cell.linears]
                first = chunk.begin == 0 if self.reverse else chunk.end == self.steps
                x, hidden = self._input(chunk, rows), hidden.reshape(rows, width)
                self.sums.add(dg, x, hidden, factors, first=first and rows > 0)
            if self.projects and dx is not None:
                into = dx[chunk.begin : chunk.end].reshape(rows, dx.shape[2])
                (draft.matmul_add if self.adds else draft.matmul)(dg, self.w["weight_ih"], into)

    def _input(self, chunk: _Chunk, rows: int) -> Array:
        """The rows of the input of a chunk."""
        x, mask = self.x[chunk.begin : chunk.end], self.mask
        if mask is not None:
            # What lies under a mask may be NaN, and NaN times a zero gradient is NaN.
            x = self.draft.masked(x, mask[chunk.begin : chunk.end])
        return x.reshape(rows, x.shape[2])

    def _dense(self, name: str, rows: int) -> Array | None:
        """The rows of a buffer that a chunk has filled; None where there is no such buffer."""
        if name not in self.buffers:
            return None
        buffer = self.buffers[name]
        return buffer.reshape(self.chunk * self.batch, buffer.shape[2])[:rows]

    def _factors(self, name: str, rows: int) -> Factors:
        return Factors(*(self._dense(f"{what} {name}", rows) for what in ("d_outputs", "operand")))

    def result(self) -> Direction:
        """All gradients, after the last segment, in the plan's dtype."""
        draft, cell, h, values = self.draft, self.cell, self.plan.hidden_size, self.values
        s = self.sums
        named: dict[str, Array | None] = dict(
            bias_gradients(self.plan, s.biases, s.totals, s.vectors, s.empty, s.zeros)
        )
        total: Any = draft.summed(values["d_params"]) if cell.params else None
        for i, name in enumerate(cell.param_names):
            named[name] = total[i * h : (i + 1) * h]
        for name in cell.state_names:
            named[f"state {name}"] = values[f"d_state {name}"][values["turn"] & 1]
            named[f"reset_state {name}"] = values.get(f"d_reset {name}")
        named["static"] = values.get("d_static")
        return {n: draft.rounded(array) for n, array in named.items() if array is not None}


class _DeviceGradients(WeightGradients):
    """Gradients of weights and biases in float32, by the matmuls of the framework."""

    def __init__(
        self, draft: DeviceDraft, plan: Plan, w: Direction, need: bool, fresh: bool
    ) -> None:
        self.draft = draft
        self.empty = functools.partial(draft.empty, wide=True)
        self.zeros = functools.partial(draft.zeros, wide=True)
        super().__init__(plan, w, need, fresh)

    def new(self, shape: tuple[int, ...], overwritten: bool) -> Array:
        return (self.empty if overwritten else self.zeros)(shape)

    def multiply(self, d: Array, operand: Array, weight: Array, first: bool) -> None:
        (self.draft.matmul if first else self.draft.matmul_add)(d.mT, operand, weight)

    def add_blocks(self, d: Array, operand: Array, weight: Array, heads: int, first: int) -> None:
        draft, out = self.draft, d.shape[1] // heads
        blocks = weight.reshape(heads, -1, weight.shape[-1])[:, first : first + out]
        one, parts = (draft.by_head(a.reshape(-1, 1, a.shape[1]), heads) for a in (d, operand))
        draft.matmul_add(one.mT, parts, blocks)

    def add_rows(self, d: View, vector: View, first: bool) -> None:
        if first:
            self.draft.summed(d, vector)
        else:
            vector += self.draft.summed(d)


# -- what both passes share ------------------------------------------------------------------------


def _segment(plan: Plan, options: Options, steps: int, batch: int) -> int:
    """The number of steps whose values the backward pass needs at the same time."""
    return segment_steps(options.checkpoint, steps, _chunk(plan, steps, batch))


def _chunk(plan: Plan, steps: int, batch: int) -> int:
    """The steps of a chunk: all, or one or more whole graphs, whatever memory they take."""
    count = chunk_steps(plan, steps, batch, CHUNK_BYTES)
    block = next((block for block in BLOCKS if block <= count), BLOCKS[-1])
    return min(max(1, steps), -(-count // block) * block)


def _constants(draft: DeviceDraft, plan: Plan, w: Direction) -> dict[str, Any]:
    """Arguments that are the same for all chunks."""
    cell = plan.cell
    values: dict[str, Any] = {f"param {name}": w[name] for name in cell.param_names}
    names = ["bias_ih", *(l.bias_name for l in cell.linears), "static", "recurrent_mask"]
    values |= {name: w.get(name) for name in names}
    if cell.hyper:
        values["hyper"] = draft.numbers(list(cell.hyper.values()))
    return values


def _restored(draft: DeviceDraft, plan: Plan, w: Direction) -> dict[str, Any]:
    """The values that resets restore, given or else declared, for each row or for all rows."""
    values: dict[str, Any] = {}
    for state in plan.cell.states:
        name = f"reset_state {state.name}"
        value = w.get(name)
        if value is None:
            value = draft.empty((plan.sizes[state.size],))
            value[:] = state.initial
        values |= {name: value, f"{name}__b": value.shape[1] if len(value.shape) == 2 else 0}
    return values


def _used(draft: DeviceDraft, plan: Plan, l: Linear, weight: Array) -> Array:
    """The rows of a weight that belong to outputs which the cell uses."""
    if l.outputs == l.declared:
        return draft.rounded(weight)
    count, axis = plan.sizes[l.out_size] // l.heads, len(weight.shape) - 2
    shape = list(weight.shape)
    shape[axis] = count * len(l.outputs)
    used = draft.empty(tuple(shape))
    for n, output in enumerate(l.outputs):
        k = l.declared.index(output)
        rows = slice(k * count, (k + 1) * count)
        used[..., n * count : (n + 1) * count, :] = weight[..., rows, :]
    return used


def keeps_state(plan: Plan, i: int) -> bool:
    """Whether the forward pass keeps the sequence of state i > 0, without checkpoints."""
    return keeps(plan, Variant(keep=True), i)


def _row_blocks(kernels: Kernels, batch: int) -> int:
    """Counts the programs along the rows, each of which has its own sums for parameters."""
    last = (kernels,) if isinstance(kernels, Printed) else kernels.stages[-1].kernels
    # Of several kernels, the one that writes results of size H, as parameters are.
    rows = next(k.tile[0] for k in last if k.size == "H" or len(last) == 1)
    return -(-batch // rows)
