"""Calls of a step that was read, as earlier ones: their tape, and one native operator.

What a reading depends on is compared in a few steps of C: the objects around the step by their
identity, tensors by their shapes, and by the operator by their layouts. A call that differs goes
the ordinary way, which reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from anycell.engines.cpu.aten import AXES
from anycell.layer import Kept, backward
from anycell.layer.recipe import dense
from anycell.layer.sequences import keeping
from anycell.layer.signature import OF_STATES
from anycell.plan import LINE, Layer, Plan
from anycell.torch.framework import Torch
from anycell.torch.operators import fused, passes
from anycell.torch.operators.composite import Arrays
from anycell.torch.operators.fused import Fused, layered, plan_on
from anycell.torch.operators.native import Item, Part, play, table
from anycell.torch.operators.passes import Ends, Result, as_given, as_kept, form_of
from anycell.torch.operators.warm import Unknown, ordinary, settings, wanted
from anycell.torch.reading.planned import ReadStep
from anycell.torch.reading.stepwise import Steps, batch_first, time_first
from anycell.torch.reading.surroundings import Surroundings
from anycell.torch.reading.tape import Sources, Tape, View

Turn = Callable[[Tensor], Tensor]
Key = str | tuple[str, int]  # an array, or one of its pieces
Way = tuple[int | None, Sequence[tuple[Key, Turn]]]


def layouts(tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    """Returns the facts of tensors that a tape depends on; None if one is no plain memory."""
    if not ordinary(map(type, tensors)):
        return None
    try:
        return tuple([(t.shape, t.stride(), t.dtype) for t in tensors])
    except RuntimeError:  # a sparse tensor
        return None


class Pass:
    """Calls of a kernel that do not look at their tensors.

    Args:
        layer: of the calls, with the plan.
        enter, sources: tensors -> the arrays of the layer, whose states have no axis of directions;
            and how it makes them, see ``Tape``.
        tensors, arrays: of a call.
        items: what the operator is given: places of tensors, and what it makes of them.
        ways: of the gradients, see ``ways_of``.

    Attributes:
        uses: the names of the arrays with the places of the tensors that they are made of;
            ``passed``, the places of those that are nothing but arrays.
        rows: of the pieces of which arrays consist.
        forms: by settings, of calls that keep nothing, and of those that keep what a backward pass
            reads; and of backward passes.
    """

    def __init__(
        self, layer: Layer, enter: Callable[[Any], Arrays], sources: Sources,
        tensors: Sequence[Tensor], arrays: Arrays, items: Sequence[tuple[int, Item]],
        ways: Sequence[Way],
    ) -> None:  # fmt: skip
        self.layer, self.enter, self.sources, self.ways = layer, enter, sources, ways
        self.order, self.items = zip(*items, strict=True)
        self.steps, self.forms = arrays["x"].shape[0], dict[Any, Any]()
        self.uses = [(n, view.place) for n, of in sources.items() for p in of for view in p]
        others = {place for name, place in self.uses if arrays[name] is not tensors[place]}
        self.passed = {place for _, place in self.uses} - others
        self.like = self._facts(tensors)
        joined = [(name, pieces) for name, pieces in sources.items() if len(pieces) > 1]
        self.rows = {name: [piece[0].shape[0] for piece in pieces] for name, pieces in joined}

    def run(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The output, the final states, and the sequences that the layer returns."""
        output, final, kept = self.again(self.layer, tensors, bool(self.layer.sequences))
        if kept is None:
            return output, *final
        return output, *final, *fused.series(self.layer, self.enter(tensors), kept)

    def again(self, layer: Layer, tensors: Any, keep: bool) -> Result:
        """Does what ``run_forward`` does, as an earlier pass did it; one like it is learnt."""
        if results := self._play(tensors, keep):
            if keep:
                return as_kept(layer, self.steps, results, False)
            return results[0], tuple(results[1:]), None
        if self._facts(tensors) != self.like:
            raise Unknown
        whole = layered(self.enter(tensors))
        output, final, kept = fused.run_forward(layer, whole, keep)
        form, given = self.forms[settings(), keep], self.given(tensors)
        passes.learn_forward(form, fused.ready(layer), whole, keep, given)
        return output, tuple([state.squeeze(0) for state in final]), kept

    def given(self, tensors: Any) -> list[tuple[Tensor, Item]]:
        """The tensors that the operator reads, and what it makes of them."""
        return list(zip([tensors[k] for k in self.order], self.items, strict=True))

    def _play(self, tensors: Sequence[Tensor], keep: bool) -> list[Tensor]:
        key = settings(), keep
        if key not in self.forms:
            facts = self.sources, "of a step", keep, self.items
            self.forms[key] = form_of(fused.ready(self.layer), *facts)
        results: list[Tensor] = play([tensors[k] for k in self.order], self.forms[key].number, 0)
        return results

    def _facts(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Facts that calls share: ``enter`` is for the strides of what it does not pass on."""
        return [
            (t.shape, t.dtype, t.device, k in self.passed or t.is_sparse or t.stride(), t.layout)
            for k, t in enumerate(tensors)
        ]

    def backward(
        self, layer: Layer, tensors: Sequence[Tensor], kept: Sequence[Tensor],
        states: Sequence[bool], arriving: Ends, needs: tuple[bool, ...],
        inside: Mapping[str, Tensor],
    ) -> list[Tensor | None]:  # fmt: skip
        """The gradients of the tensors; ``inside`` are those of ``layer.sequences``."""
        layer, host = fused.ready(layer), Torch.of(layer.plan.dtype)
        ends = fused.arrived(host, arriving)
        key = settings(), needs, *[d is None for d in ends]
        if key not in self.forms:
            facts = "of a step", needs, *self.sources.values(), self.items, tuple(self.like)
            self.forms[key] = passes.backward_form(layer, self.sources, ends, (), *facts)
        form = None if inside else self.forms[key]
        if form is not None and form.names:
            read = dict(enumerate([tensors[k] for k in self.order]))
            if (known := passes.backward_again(form, layer, read, kept, ends)) is not None:
                return self.back(known, needs)
        arrays, saved = layered(self.enter(tensors)), Kept.of(kept, states, 1)
        wanted = {name for name, place in self.uses if needs[place]}
        given = layer.plan, arrays, layer.options, saved, ends[0], ends[1:]
        gradients = backward(host, *given, d_states=inside, wanted=wanted)
        if form is not None and not form.never:
            items, divide = self.given(tensors), partial(self.divide, needs)
            passes.learn_backward(form, layer, arrays, saved, ends, wanted, items, divide)
        return self.back(gradients, needs)

    def back(self, gradients: Mapping[Any, Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
        """The gradients of the tensors that need them: given by place; or made of those of the
        layer's arrays that are wanted, given by name.
        """
        found, known = list[Any](), dict[Any, Tensor](gradients)
        for name, gradient in gradients.items():
            if type(name) is not str:
                continue
            known[name] = whole = gradient[0] if name.startswith(OF_STATES) else gradient
            if rows := self.rows.get(name):
                for number, piece in enumerate(torch.split_with_sizes(whole, rows)):
                    known[name, number] = piece
        for place, need in enumerate(needs):
            if not need or place in known:
                found.append(known[place] if need else None)
                continue
            axis, parts = self.ways[place]
            made = [turn(known[key]) for key, turn in parts if key in known]
            if len(made) < len(parts) or not made:
                found.append(None)
            elif axis is None:
                found.append(made[0] if len(made) == 1 else sum(made[1:], made[0]))
            else:
                found.append(torch.cat(made, axis))
        return found

    def divide(self, needs: Sequence[bool], arrays: dict[str, Part]) -> dict[Any, Part]:
        """Parts of a pass's arrays that are a tensor's gradient as they are, by its place; arrays
        that the other gradients are made of, by name.
        """
        total, end = arrays.get("d_params"), 0
        if total is not None and total.shape[0] == 1:  # the sums of the only group of rows
            del arrays["d_params"]
            plan = self.layer.plan
            for name, size in zip(plan.cell.param_names, plan.param_sizes, strict=True):
                arrays[name] = Part(total.number, (size,), (1,), end)
                end += size
        of = {n: p for n, p in arrays.items() if n in self.sources}
        like = {n: torch.empty_strided(p.shape, p.strides, device="meta") for n, p in of.items()}
        names, parts, used = {id(t): n for n, t in like.items()}, dict[Any, Part](), set[Key]()
        left = arrays.keys() - self.sources
        for place, t in enumerate(self.back(like, needs)):
            axis, ways = self.ways[place] if needs[place] else (None, ())
            keys, pieces = {key for key, _ in ways}, list[tuple[int, int, int]]()
            name = None if t is None else names.get(id(t if t._base is None else t._base))
            if t is not None and axis == 0:
                pieces = self._pieces([key for key, _ in ways], of)
            elif t is not None and name is not None:
                pieces = [(of[name].number, of[name].offset + int(t.storage_offset()), t.numel())]
            arrays_of = {key if isinstance(key, str) else key[0] for key in keys}
            whole = len(pieces) == 1 and used.isdisjoint(keys)
            whole = whole and not any(of[name].pieces for name in arrays_of)
            if t is None or not pieces or not (whole or t.is_contiguous()):
                left |= arrays_of
                continue
            number, offset, _ = pieces[0]
            layout = tuple(t.shape), t.stride(), offset * whole
            parts[place] = Part(number, *layout, () if whole else tuple(pieces))
            used |= keys if whole else set()
        held = {part.number for part in parts.values() if not part.pieces}
        for name in left & arrays.keys():  # beside a tensor's gradient in its memory, a copy
            part = arrays[name]
            pieces = [(part.number, part.offset, math.prod(part.shape))] * (part.number in held)
            parts[name] = part._replace(pieces=part.pieces or tuple(pieces))
        return parts

    def _pieces(self, keys: Sequence[Key], of: Mapping[str, Part]) -> list[tuple[int, int, int]]:
        """Pieces of memory that are joined to a gradient; none if there are others."""
        pieces = list[tuple[int, int, int]]()
        for key in keys:
            name, k = key if isinstance(key, tuple) else (key, 0)
            if (part := of.get(name)) is None or part.strides != dense(part.shape):
                return []
            shape = part.shape[1:] if name.startswith(OF_STATES) else part.shape
            rows, row = self.rows.get(name, shape[:1]), math.prod(shape[1:])
            number, start, size = part.number, part.offset + sum(rows[:k]) * row, rows[k] * row
            if pieces and pieces[-1][0] == number and sum(pieces[-1][1:]) == start:
                _, start, before = pieces.pop()
                size += before
            pieces.append((number, start, size))
        return pieces


def ways_of(sources: Sources, tensors: Sequence[Tensor], arrays: Arrays) -> list[Way] | None:
    """Ways in which tensors' gradients follow from those of arrays: parts that are joined along an
    axis, or with None added; None if it takes more.
    """
    ways, uses = list[Way](), [list[tuple[View, Key]]() for _ in tensors]
    for name, pieces in sources.items():
        for number, piece in enumerate(pieces):
            for view in piece:
                uses[view.place].append((view, (name, number) if len(pieces) > 1 else name))
    for k, t in enumerate(tensors):
        own = View(k, t.shape, t.stride(), 0)
        turns = [(key, _turn(view, own)) for view, key in uses[k]]
        parts, axis = [(key, turn) for key, turn in turns if turn], None
        if len(parts) < len(turns):
            slices = sorted(uses[k], key=lambda use: use[0].offset)
            shape = slices[0][0].shape
            if parts or any(len(view.shape) != t.dim() for view, _ in slices):
                return None
            axis = next((i for i, size in enumerate(shape) if size != t.shape[i]), 0)
            ends = [*accumulate(view.shape[axis] for view, _ in slices)]
            if ends[-1] != t.shape[axis]:
                return None
            for (start, end), (view, key) in zip(pairwise([0, *ends]), slices, strict=True):
                sizes = *t.shape[:axis], end - start, *t.shape[axis + 1 :]
                if view != View(k, sizes, t.stride(), start * t.stride(axis)):
                    return None
                parts.append((key, _same))
        ways.append((axis, parts))
    return ways


def _same(gradient: Tensor) -> Tensor:
    return gradient


def _turn(view: View, own: View) -> Turn | None:
    """Makes a tensor's gradient of that of a view; None if that is a part of the tensor."""
    if view == own:
        return _same
    if (view.shape, view.strides) == (own.shape[::-1], own.strides[::-1]):
        return torch.t
    whole = math.prod(view.shape) == math.prod(own.shape) and view.strides == dense(view.shape)
    return partial(torch.reshape, shape=own.shape) if whole else None


def items_of(
    sources: Sources, tensors: Sequence[Tensor], arrays: Arrays
) -> list[tuple[int, Item]] | None:
    """Items that the operator is given: places of tensors, and how it makes arrays of them; None if
    it cannot.
    """
    items, end = list[tuple[int, Item]](), 0
    for name, pieces in sources.items():
        whole, views = arrays[name], [view for piece in pieces for view in piece]
        parts, size = [tensors[view.place] for view in views], whole.element_size()
        if whole is parts[0]:
            items.append((views[0].place, Item(name)))
            continue
        # The operator converts nothing.
        if any(t.dtype is not whole.dtype or t.dim() > AXES for t in parts):
            return None
        if len(views) == 1 and views[0].strides == whole.stride():
            place, _, strides, offset = views[0]
            items.append((place, Item(name, strides, size * offset)))
            continue
        if not whole.is_contiguous() or any(v.strides != dense(v.shape) for v in views):
            return None
        for piece in pieces:
            count = math.prod(piece[0].shape)
            for number, (place, _, _, offset) in enumerate(piece):
                item = Item(name, (), size * offset, end, count, min(number, 1))
                items.append((place, item))
                name = ""
            end += size * count
        end = -(-end // LINE) * LINE
    return items


class Replayed:
    """A call that was replayed, for all that are like it.

    Args:
        tensors: those around the step, of x and of the state, with time first.
        first: whether users have the batch as the first axis of x and the output.

    Attributes:
        facts: what calls have in common besides the first tensor of x.
        known: the calls of the kernel; None if it must look at its arrays. ``inside``: whether they
            make the arrays of the tensors.
        seen: the layouts of the tensors that these calls do not look at, at these ``places``.
    """

    def __init__(
        self, plan: ReadStep, tape: Tape, around: Surroundings, call: Steps,
        tensors: list[Tensor], first: bool,
    ) -> None:  # fmt: skip
        self.plan, self.tape = plan, tape
        self.facts = [around, call.x_tree, call.state_tree]
        self.rows = call.rows if first and call.batched else 0
        self.call = call._replace(xs=[], state=[])
        self.xs = slice(-len(call.xs) - len(call.state), -len(call.state))
        device = [tensors[-1].device] if tensors[-1].is_cuda else []
        with torch.random.fork_rng(device), torch.no_grad():
            arrays = tape.enter(tensors)[0]
        self.known, self.inside = self._pass(tensors, arrays), False
        looked: Any = ()
        if self.known is not None:
            self.inside = self.known.sources is tape.sources
            looked = self.known.order if self.inside else tape.passed
        self.places = [k for k in range(len(tensors)) if k in tape.later or k not in looked]
        self.seen = layouts([tensors[k] for k in self.places])

    def _pass(self, tensors: list[Tensor], arrays: Arrays) -> Pass | None:
        layer, x, tape = self.plan.layer_for(self.call, arrays), arrays["x"], self.tape
        plan = plan_on(x.device.type, layer.cell, layer.sizes, x.dtype)
        if not isinstance(plan, Plan) or plan.engine != "cpu" or not as_given(plan, arrays):
            return None
        if table() is None or any(t.dtype is not x.dtype for t in arrays.values()):
            return None
        layer, sources = layer._replace(plan=keeping(plan, layer.sequences)), tape.sources
        items = items_of(sources or {}, tensors, arrays)
        if sources and items and (ways := ways_of(sources, tensors, arrays)):
            enter = lambda given: tape.enter(given)[0]  # noqa: E731
            return Pass(layer, enter, sources, tensors, arrays, items, ways)
        names, tensors = tuple(arrays), [*arrays.values()]
        sources = {
            name: ((View(k, arrays[name].shape, arrays[name].stride(), 0),),)
            for k, name in enumerate(names)
        }
        items = [(k, Item(name)) for k, name in enumerate(names)]
        enter = lambda given: dict(zip(names, given, strict=False))  # noqa: E731
        ways = ways_of(sources, tensors, arrays) or []
        return Pass(layer, enter, sources, tensors, arrays, items, ways)

    def run(self, tensors: list[Tensor]) -> tuple[Any, Any] | None:
        """Returns the output and the last state of a call with these tensors; None if it is not
        like the one that was replayed.
        """
        if self.rows:
            tensors[self.xs] = [time_first(t) for t in tensors[self.xs]]
        if self.places and layouts([tensors[k] for k in self.places]) != self.seen:
            return None
        known, memory, given = self.known, (), tensors
        if not self.inside or known is None:
            arrays, memory = self.tape.enter(tensors)
            given = [*arrays.values()]
        results: Sequence[Tensor]
        try:
            if known is None:
                results = self.plan.recur(self.call, arrays)
            elif torch.is_grad_enabled() and wanted(given):
                results = Fused.apply(known.layer, known.again, known, *given)
            else:
                results = known.run(given)
        except Unknown:
            return None
        output, last = self.tape.leave(tensors, results, memory)
        return (batch_first(output, self.rows) if self.rows else output), last
