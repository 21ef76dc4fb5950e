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
import torch.utils._pytree as pytree
from torch import Tensor

from anycell.engines.cpu.aten import AXES
from anycell.layer.recipe import dense
from anycell.layer.sequences import keeping
from anycell.layer.signature import OF_STATES
from anycell.plan import LINE, Layer, Plan
from anycell.torch import fused
from anycell.torch.composite import Arrays
from anycell.torch.fused import Fused, layered, plan_on
from anycell.torch.native import Item, play, table
from anycell.torch.passes import Result, as_given, as_kept, form_of, learn_forward
from anycell.torch.planned import ReadStep
from anycell.torch.stepwise import Steps
from anycell.torch.surroundings import Surroundings
from anycell.torch.tape import Sources, Tape, View
from anycell.torch.warm import Unknown, ordinary, settings, wanted

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


def time_first(x: Tensor) -> Tensor:
    """``[B, T, ...]`` as ``[T, B, ...]``; ``[T]`` as it is."""
    return x.transpose(0, 1) if x.dim() > 1 else x


def batch_first(output: Any, rows: int) -> Any:
    """Tensors ``[T, B, ...]`` as ``[B, T, ...]``; those without rows as they are."""

    def swapped(t: Tensor) -> Tensor:
        return t.transpose(0, 1) if t.dim() > 1 and t.shape[1] == rows else t

    return pytree.tree_map_only(Tensor, swapped, output)


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
        passed: the places of the tensors that are nothing but arrays.
        rows: of the pieces of which arrays consist.
        forms: by settings: of calls that keep nothing, and of those that keep what a backward pass
            reads.
    """

    def __init__(
        self, layer: Layer, enter: Callable[[Any], Arrays], sources: Sources,
        tensors: Sequence[Tensor], arrays: Arrays, items: Sequence[tuple[int, Item]],
        ways: Sequence[Way],
    ) -> None:  # fmt: skip
        self.layer, self.enter, self.sources, self.ways = layer, enter, sources, ways
        self.order, self.items = zip(*items, strict=True)
        self.steps, self.forms = arrays["x"].shape[0], dict[Any, tuple[Any, Any]]()
        self.needed = dict[tuple[bool, ...], set[str]]()
        views = [(n, view.place) for n, of in sources.items() for piece in of for view in piece]
        others = {place for name, place in views if arrays[name] is not tensors[place]}
        self.passed = {place for _, place in views} - others
        self.like = self._facts(tensors)
        joined = [(name, pieces) for name, pieces in sources.items() if len(pieces) > 1]
        self.rows = {name: [piece[0].shape[0] for piece in pieces] for name, pieces in joined}

    def run(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The output, the final states, and the sequences that the layer returns."""
        keep = bool(self.layer.sequences)
        if not keep and (results := self._play(tensors, False)):
            return results
        output, final, kept = self.again(self.layer, tensors, keep)
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
        form, given = self.forms[settings()][keep], self.given(tensors)
        learn_forward(form, fused.ready(layer), whole, keep, given)
        return output, tuple([state.squeeze(0) for state in final]), kept

    def given(self, tensors: Any) -> list[tuple[Tensor, Item]]:
        """The tensors that the operator reads, and what it makes of them."""
        return list(zip([tensors[k] for k in self.order], self.items, strict=True))

    def _play(self, tensors: Sequence[Tensor], keep: bool) -> list[Tensor]:
        now = settings()
        if now not in self.forms:
            facts = fused.ready(self.layer), self.sources, "of a step", self.items
            self.forms[now] = form_of(*facts), form_of(*facts, "keeping")
        number = self.forms[now][keep].number
        results: list[Tensor] = play([tensors[k] for k in self.order], number, 0)
        return results

    def _facts(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Facts that calls share: ``enter`` is for the strides of what it does not pass on."""
        return [
            (t.shape, t.dtype, t.device, k in self.passed or t.is_sparse or t.stride(), t.layout)
            for k, t in enumerate(tensors)
        ]

    def wanted(self, needs: tuple[bool, ...]) -> set[str]:
        """The arrays whose gradients those of the tensors need."""
        if (known := self.needed.get(needs)) is None:
            sources = self.sources.items()
            known = {n for n, of in sources if any(needs[view.place] for p in of for view in p)}
            self.needed[needs] = known
        return known

    def back(self, gradients: Mapping[str, Tensor]) -> list[Tensor | None]:
        """The gradients of the tensors, from those of the layer's arrays that are wanted."""
        found, known = list[Any](), dict[Key, Tensor]()
        for name, gradient in gradients.items():
            known[name] = whole = gradient[0] if name.startswith(OF_STATES) else gradient
            if rows := self.rows.get(name):
                for number, piece in enumerate(torch.split_with_sizes(whole, rows)):
                    known[name, number] = piece
        for axis, parts in self.ways:
            made = [turn(known[key]) for key, turn in parts if key in known]
            if not made or len(made) < len(parts):  # nobody needs it
                found.append(None)
            elif axis is None:
                found.append(made[0] if len(made) == 1 else sum(made[1:], made[0]))
            else:
                found.append(torch.cat(made, axis))
        return found


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
