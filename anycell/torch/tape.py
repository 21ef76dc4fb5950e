"""The work of a call around its kernel, recorded once and printed as two flat functions.

A fused call of a step that was read makes some ten small operations: slices of weights, their
joined parts, the user's states out of the cell's. Looking up again which they are takes longer than
they do. For tensors of the same shapes and strides they are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from anycell.read import Equation, Refused, Variable, leaves, mapped
from anycell.torch.record import A, Like, Recorder, Var, storage

Tree = Any  # tensors and other values in tuples, lists and dictionaries


class Tape:
    """The work before a kernel and after it, as ``enter`` and ``leave`` print it.

    Args:
        arrays: the tensors of a call.
        enter: arrays -> (results, memory).
        between: what the kernel makes, a tree of tensors.
        leave: (arrays, between, memory) -> results.

    Raises:
        Refused: for operations or results that cannot be printed.
    """

    def __init__(
        self, arrays: Sequence[Tensor], enter: Callable[[list[Tensor]], tuple[Tree, Any]],
        between: Tree, leave: Callable[[list[Tensor], Tree, Any], Tree],
    ) -> None:  # fmt: skip
        self._names: dict[Variable, str] = {}
        self._space: dict[str, Any] = {}
        inputs = [tensor.detach() for tensor in arrays]
        made: dict[str, Tensor] = {}
        between = _detached(between, "b", made)
        recorder = self._recorder = Recorder([("F", t) for t in (*inputs, *made.values())])
        self._tensors, self._device = recorder.tensors, inputs[0].device
        names = [f"a[{k}]" for k in range(len(inputs))]
        self._names.update(zip(recorder.inputs, [*names, *made], strict=True))
        with recorder:
            entered, memory = enter(inputs)
            split = len(recorder.equations)
            left = leave(inputs, between, memory)
        self._alias: dict[Variable, Variable] = {}
        self.enter, self.leave = self._print(self._vars(entered), self._vars(left), split)
        del self._recorder, self._names, self._space, self._tensors, self._alias

    def _vars(self, tree: Tree) -> Tree:
        def var(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self._recorder.var(leaf)
            if not isinstance(leaf, (bool, int, float, str)):
                raise Refused(f"a {type(leaf).__name__} cannot be printed")
            return leaf

        return mapped(var, tree)

    def _print(self, entered: Tree, left: Tree, split: int) -> tuple[Any, Any]:
        nodes = self._recorder.equations
        results = set(leaves(left, Variable))
        for node in nodes:
            self._fold(node, results)
        needed = {self._real(var) for var in (*leaves(entered, Variable), *results)}
        used = []
        for place in reversed(range(len(nodes))):
            if any(var in needed for var in nodes[place].results):
                used.append(place)
                needed.update(map(self._real, nodes[place].operands))
        lines: tuple[list[str], list[str]] = [], []
        early: set[Variable] = set()
        for place in reversed(used):
            lines[place >= split].append(self._line(nodes[place], needed))
            if place < split:
                early.update(var for var in nodes[place].results if var in needed)
        late = {self._real(v) for p in used if p >= split for v in nodes[p].operands}
        late |= {self._real(var) for var in results}
        kept = [var for var in self._names if var in early and var in late]
        memory = self._text(tuple(kept))
        text = ["def enter(a):", *lines[0], f"return {self._text(entered)}, {memory}"]
        after = [f"{memory} = k"] if kept else []
        more = ["def leave(a, b, k):", *after, *lines[1], f"return {self._text(left)}"]
        whole = "\n\n".join("\n    ".join(part) for part in (text, more))
        exec(compile(whole + "\n", "<tape>", "exec"), self._space)
        return self._space["enter"], self._space["leave"]

    def _fold(self, node: Equation, results: set[Variable]) -> None:
        """Finds what is an earlier tensor, or a slice of one, and what is the same in all calls."""
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
            if before is not inputs[0] and (place := _slice(made, tensor)) is not None:
                node.source, node.arguments, node.options = A.slice.Tensor, (before, *place), {}
                vars(node).pop("operands", None)  # those of the operation that it was
            source = before.equation
            if source is None or source.op is A.detach or not source.operands:
                return
            before = source.operands[0]
            if self._tensors[before] is tensor:
                return

    def _real(self, var: Variable) -> Variable:
        return self._alias.get(var, var)

    def _line(self, node: Equation, needed: set[Variable]) -> str:
        targets = []
        for var in node.results:
            if var in needed:
                self._names[var] = f"v{len(self._names)}"
            targets.append(self._names[var] if var in needed else "_")
        arguments = [self._text(value) for value in node.arguments]
        arguments += [f"{name}={self._text(value)}" for name, value in node.options.items()]
        returns = node.source._schema.returns
        single = len(returns) == 1 and returns[0].type.kind() == "TensorType"
        left = targets[0] if single else f"[{', '.join(targets)}]"
        return f"{left} = {self._constant(node.source)}({', '.join(arguments)})"

    def _text(self, value: Any) -> str:
        if isinstance(value, Var):
            value = self._real(value)
            return self._names[value] if value.constant is None else self._constant(value.constant)
        if isinstance(value, dict):
            return f"{{{', '.join(f'{k!r}: {self._text(v)}' for k, v in value.items())}}}"
        if isinstance(value, tuple):
            inside = "".join(f"{self._text(v)}, " for v in value)
            return f"{self._constant(type(value)) if hasattr(value, '_fields') else ''}({inside})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._text, value))}]"
        if isinstance(value, Like):
            like = torch.empty((), dtype=value.dtype, device=self._device)
            return self._constant(like.expand(value.shape))
        if value is None or type(value) in (int, bool, str):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._space)}"
        self._space[name] = value
        return name


def _detached(tree: Tree, name: str, made: dict[str, Tensor]) -> Tree:
    """The tree with detached tensors, which are noted by the expressions that find them."""
    if isinstance(tree, Tensor):
        made[name] = tree.detach()
        return made[name]
    if isinstance(tree, dict):
        return {key: _detached(value, f"{name}[{key!r}]", made) for key, value in tree.items()}
    return tuple(_detached(value, f"{name}[{k}]", made) for k, value in enumerate(tree))


def _slice(part: Tensor, whole: Tensor) -> tuple[int, int, int] | None:
    """The axis, the start and the end of a view that is a slice of another."""
    if part.stride() != whole.stride() or part.dtype != whole.dtype:
        return None
    axes = [k for k, (a, b) in enumerate(zip(part.shape, whole.shape, strict=True)) if a != b]
    if len(axes) != 1 or not (step := part.stride(axes[0])):
        return None
    start, rest = divmod(int(part.storage_offset()) - int(whole.storage_offset()), step)
    end = start + part.shape[axes[0]]
    return None if rest or start < 0 or end > whole.shape[axes[0]] else (axes[0], start, end)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same numbers in the same memory."""
    one, other = ((t.shape, t.stride(), t.dtype, t.data_ptr(), storage(t)) for t in (a, b))
    return one == other
