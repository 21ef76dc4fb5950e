"""The work of a call around its kernel, recorded once and printed as two flat functions.

A fused call of a step that was read makes some ten small operations: slices of weights, their
joined parts, the user's states out of the cell's. Looking up again which they are takes longer than
they do. For arrays of the same shapes and strides they are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anycell.read.body import Equation, Variable
from anycell.read.trees import leaves

Tree = Any  # variables and other values in tuples, lists and dictionaries


class Tape:
    """The work before a kernel and after it, as functions.

    Args:
        nodes: the operations, of which the first ``split`` come before the kernel.
        names: expressions in ``a``, what the call has, and ``b``, what the kernel makes, by the
            variables that they are.
        entered, left: the results of both.

    Attributes:
        enter: a -> (results, memory).
        leave: (a, b, memory) -> results.
        memory: whether ``leave`` reads what ``enter`` has made.
    """

    def __init__(
        self, nodes: Sequence[Equation], names: dict[Variable, str], entered: Tree, left: Tree,
        split: int,
    ) -> None:  # fmt: skip
        self._names, self._space = names, dict[str, Any]()
        self._alias: dict[Variable, Variable] = {}
        self.enter, self.leave = self._print(nodes, entered, left, split)
        del self._names, self._space, self._alias, self._late

    def _print(
        self, nodes: Sequence[Equation], entered: Tree, left: Tree, split: int
    ) -> tuple[Any, Any]:
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
        self._late = late
        kept = [var for var in self._names if var in early and var in late]
        memory, self.memory = self._text(tuple(kept)), bool(kept)
        text = ["def enter(a):", *lines[0], f"return {self._text(entered)}, {memory}"]
        after = [f"{memory} = k"] if kept else []
        more = ["def leave(a, b, k):", *after, *lines[1], f"return {self._text(left)}"]
        whole = "\n\n".join("\n    ".join(part) for part in (text, more))
        exec(compile(whole + "\n", "<tape>", "exec"), self._space)
        return self._space["enter"], self._space["leave"]

    def _fold(self, node: Equation, results: set[Variable]) -> None:
        """Finds what is an earlier array, or the same in all calls."""

    def _single(self, node: Equation) -> bool:
        """Whether an operation returns one array."""
        return len(node.results) == 1

    def _function(self, node: Equation) -> Any:
        """The function that computes an operation."""
        return node.source

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
        left = targets[0] if self._single(node) else f"[{', '.join(targets)}]"
        return f"{left} = {self._constant(self._function(node))}({', '.join(arguments)})"

    def _text(self, value: Any) -> str:
        if isinstance(value, Variable):
            value = self._real(value)
            return self._names[value] if value.constant is None else self._constant(value.constant)
        if isinstance(value, dict):
            return f"{{{', '.join(f'{k!r}: {self._text(v)}' for k, v in value.items())}}}"
        if isinstance(value, tuple):
            inside = "".join(f"{self._text(v)}, " for v in value)
            return f"{self._constant(type(value)) if hasattr(value, '_fields') else ''}({inside})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._text, value))}]"
        if value is None or type(value) in (int, bool, str):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._space)}"
        self._space[name] = value
        return name
