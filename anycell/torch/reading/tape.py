"""The tape of a call of a step of PyTorch; see ``anycell.read.tape``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anycell.layer.signature import Shape
from anycell.read import Equation, Refused, Variable, leaves, mapped, tape
from anycell.torch.reading.record import A, Like, Recorder, storage

Tree = Any  # tensors and other values in tuples, lists and dictionaries


# Operations as torch's own functions, which are called in half the time.
_VIEWS = {
    A.narrow.default: torch.narrow, A.permute.default: torch.permute, A.select.int: torch.select,
    A.squeeze.dim: torch.squeeze, A.t.default: torch.t, A.transpose.int: torch.transpose,
    A.unsqueeze.default: torch.unsqueeze, A.view.default: Tensor.view,
}  # fmt: skip
_BOUND = _VIEWS | {
    A.add.Tensor: torch.add, A.cat.default: torch.cat, A.expand.default: Tensor.expand,
    A.mul.Tensor: torch.mul,
}  # fmt: skip


class View(NamedTuple):
    """A view of the tensor at a place, from element ``offset`` of its memory on."""

    place: int
    shape: Shape
    strides: Shape
    offset: int


Source = tuple[tuple[View, ...], ...]  # pieces, joined along their first axis: sums of views
Sources = dict[str, Source]


class Tape(tape.Tape):
    """The work before a kernel and after it, on tensors.

    Args:
        arrays: the tensors of a call.
        enter: arrays -> (results, memory).
        between: what the kernel makes.
        leave: (arrays, between, memory) -> results.

    Attributes:
        passed: the places of the arrays that are results of ``enter`` as they are.
        later: the places of those that ``leave`` reads.
        sources: of each result, by name, how it is made of arrays; None if it takes more than
            views that are added, and joined.

    Raises:
        Refused: for operations or results that cannot be printed.
    """

    sources: Sources | None = None

    def __init__(
        self, arrays: Sequence[Tensor], enter: Callable[[list[Tensor]], tuple[Tree, Any]],
        between: Sequence[Tensor], leave: Callable[[list[Tensor], Sequence[Tensor], Any], Tree],
    ) -> None:  # fmt: skip
        inputs, between = ([tensor.detach() for tensor in part] for part in (arrays, between))
        recorder = self._recorder = Recorder([("F", t) for t in (*inputs, *between)])
        self._tensors, self._device = recorder.tensors, inputs[0].device
        names = [f"a[{k}]" for k in range(len(inputs))] + [f"b[{k}]" for k in range(len(between))]
        with recorder:
            entered, memory = enter(inputs)
            split = len(recorder.equations)
            left = leave(inputs, between, memory)
        places = dict[Variable, str](zip(recorder.inputs, names, strict=True))
        entered, left = self._vars(entered), self._vars(left)
        self._inputs = recorder.inputs[: len(inputs)]
        super().__init__(recorder.equations, places, entered, left, split)
        del self._recorder, self._tensors, self._inputs

    def _print(self, nodes: Sequence[Equation], entered: Tree, left: Tree, split: int) -> Any:
        made = super()._print(nodes, entered, left, split)
        results = {self._real(var) for var in leaves(entered, Variable)}
        self.passed = frozenset(k for k, var in enumerate(self._inputs) if var in results)
        self.later = frozenset(k for k, var in enumerate(self._inputs) if var in self._late)
        if isinstance(entered, dict) and not self.memory:
            self.sources = self._sources(nodes[:split], entered)
        return made

    def _sources(self, nodes: Sequence[Equation], entered: dict[str, Variable]) -> Sources | None:
        known = dict[Variable, Source]()

        def view(var: Variable, place: int) -> None:
            t, base = self._tensors[var], self._tensors[self._inputs[place]]
            offset = int(t.storage_offset() - base.storage_offset())
            known[var] = ((View(place, tuple(t.shape), t.stride(), offset),),)

        for place, array in enumerate(self._inputs):
            view(array, place)
        for node in nodes:
            var, of = node.results[0], [self._real(operand) for operand in node.operands]
            if not of or not known.keys() >= {*of}:
                continue
            pieces = [piece for one in of for piece in known[one]]
            if node.source in _VIEWS and len(pieces) == 1 == len(pieces[0]):
                view(var, pieces[0][0].place)
            elif node.source is A.cat.default and node.arguments[1:] in ((), (0,)):
                known[var] = _joined(pieces)
            elif node.source is A.add.Tensor and len(pieces) == 2 == len(of) and not node.options:
                first, second = pieces
                if len(second) == 1 and first[0].shape == second[0].shape:
                    known[var] = ((*first, *second),)
        sources = {
            name: known[v] for name, var in entered.items() if (v := self._real(var)) in known
        }
        return sources if len(sources) == len(entered) else None

    def _vars(self, tree: Tree) -> Tree:
        def var(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self._recorder.var(leaf)
            if not isinstance(leaf, (bool, int, float, str)):
                raise Refused(f"a {type(leaf).__name__} cannot be printed")
            return leaf

        return mapped(var, tree)

    def _fold(self, node: Equation, results: set[Variable]) -> None:
        """Finds also what is a slice of an earlier tensor."""
        inputs = node.operands
        if node.random:
            return
        if all(self._real(var).constant is not None for var in inputs):
            if not any(var in results for var in node.results):
                for var in node.results:
                    var.constant = self._tensors.get(var)
            return
        if len(node.results) != 1 or node.op in (A.detach, A.lift_fresh):
            return
        made, before = self._tensors[node.results[0]], inputs[0]
        while True:
            tensor = self._tensors[before]
            if tensor is made or storage(tensor) != storage(made):  # an edit in place, no view
                return
            if _same(made, tensor):
                self._alias[node.results[0]] = self._real(before)
                return
            if (place := _slice(made, tensor)) is not None:
                node.source, node.arguments, node.options = A.narrow.default, (before, *place), {}
                vars(node).pop("operands", None)  # those of the operation that it was
            elif node.source is A.permute.default and [*node.arguments[1]] == [1, 0]:
                node.source, node.arguments = A.t.default, (before,)
            source = before.equation
            if source is None or source.op is A.detach or not source.operands:
                return
            before = source.operands[0]
            if self._tensors[before] is tensor:
                return

    def _single(self, node: Equation) -> bool:
        returns = node.source._schema.returns
        return len(returns) == 1 and returns[0].type.kind() == "TensorType"

    def _function(self, node: Equation) -> Any:
        return _BOUND.get(node.source, node.source)

    def _text(self, value: Any) -> str:
        if isinstance(value, Like):
            like = torch.empty((), dtype=value.dtype, device=self._device)
            return self._constant(like.expand(value.shape))
        return super()._text(value)


def _joined(pieces: Sequence[tuple[View, ...]]) -> Source:
    """Pieces of which those that follow each other in a tensor are one."""
    joined = [pieces[0]]
    for piece in pieces[1:]:
        (one, *more), (other, *others) = joined[-1], piece
        rows, *sizes = one.shape
        end = one._replace(shape=other.shape, offset=one.offset + rows * one.strides[0])
        if more or others or end != other or sizes != [*other.shape[1:]]:
            joined.append(piece)
        else:
            joined[-1] = (one._replace(shape=(rows + other.shape[0], *sizes)),)
    return tuple(joined)


def _slice(part: Tensor, whole: Tensor) -> tuple[int, int, int] | None:
    """The axis, the start and the length of a view that is a slice of another."""
    if part.stride() != whole.stride() or part.dtype != whole.dtype:
        return None
    axes = [k for k, (a, b) in enumerate(zip(part.shape, whole.shape, strict=True)) if a != b]
    if len(axes) != 1 or not (step := part.stride(axes[0])):
        return None
    start, rest = divmod(int(part.storage_offset()) - int(whole.storage_offset()), step)
    end = start + part.shape[axes[0]]
    inside = not rest and start >= 0 and end <= whole.shape[axes[0]]
    return (axes[0], start, end - start) if inside else None


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same numbers in the same memory."""
    one, other = ((t.shape, t.stride(), t.dtype, t.data_ptr(), storage(t)) for t in (a, b))
    return one == other
