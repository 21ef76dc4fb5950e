"""Expressions: immutable, interned nodes of the graph that a cell traces to.

Every node stands for one value per unit and batch row. A row reduction (``sum``, ``mean``, ``max``) gives its
result to every unit of its group, so that it combines with everything else and its derivative is a
reduction again.
"""

from __future__ import annotations

import contextvars
import linecache
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn
from weakref import WeakValueDictionary

Attrs = tuple[Any, ...]
Number = int | float


class CellError(ValueError):
    """A cell that cannot be expressed, or was called with what it does not declare."""


# The code object of the cell function being traced, so that an error can name its line.
tracing: contextvars.ContextVar[Any] = contextvars.ContextVar("anycell_tracing", default=None)


def fail(problem: str, instead: str) -> NoReturn:
    """Raises ``CellError`` with the line of the cell function that is being traced."""
    where = ""
    frame = sys._getframe(1)
    code = tracing.get()
    while frame is not None and code is not None:
        if frame.f_code is code:
            line = linecache.getline(code.co_filename, frame.f_lineno).strip()
            where = f"{code.co_filename}:{frame.f_lineno}: in cell {code.co_name}\n    {line}\n"
            break
        frame = frame.f_back  # type: ignore[assignment]
    raise CellError(f"{where}{problem}\nInstead: {instead}")


class Expr:
    """One node: ``op`` names a row of the op table or a leaf, ``attrs`` hold what is not an expression."""

    __slots__ = ("__weakref__", "args", "attrs", "op")
    # NumPy must hand `array + expr` to us instead of broadcasting over it.
    __array_ufunc__ = None

    op: str
    args: tuple[Expr, ...]
    attrs: Attrs

    _interned: WeakValueDictionary[tuple[Any, ...], Expr] = WeakValueDictionary()

    def __new__(cls, op: str, args: Iterable[Expr] = (), attrs: Attrs = ()) -> Expr:
        args = tuple(args)
        key = (op, tuple(map(id, args)), repr(attrs))
        node = cls._interned.get(key)
        if node is None:
            node = object.__new__(cls)
            node.op, node.args, node.attrs = op, args, attrs
            node = cls._interned.setdefault(key, node)
        return node

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        lines = list(listing([("value", self)]))
        return lines[0].removeprefix("value = ") if len(lines) == 1 else "\n".join(lines)

    # -- arithmetic -------------------------------------------------------------------------------
    def __neg__(self) -> Expr:
        return apply("neg", self)

    def __pos__(self) -> Expr:
        return self

    def __abs__(self) -> Expr:
        return apply("abs", self)

    def __add__(self, other: Expr | Number) -> Expr:
        return apply("add", self, other)

    def __radd__(self, other: Number) -> Expr:
        return apply("add", other, self)

    def __sub__(self, other: Expr | Number) -> Expr:
        return apply("sub", self, other)

    def __rsub__(self, other: Number) -> Expr:
        return apply("sub", other, self)

    def __mul__(self, other: Expr | Number) -> Expr:
        return apply("mul", self, other)

    def __rmul__(self, other: Number) -> Expr:
        return apply("mul", other, self)

    def __truediv__(self, other: Expr | Number) -> Expr:
        return apply("div", self, other)

    def __rtruediv__(self, other: Number) -> Expr:
        return apply("div", other, self)

    def __pow__(self, power: Number) -> Expr:
        if isinstance(power, Expr) or power != int(power) or not 1 <= abs(power) <= 16:
            fail(f"x ** {power!r} is outside the cell language.", "use exp(y * log(x)), sqrt(x) or products.")
        result = self
        for _ in range(int(abs(power)) - 1):
            result = result * self
        return result if power > 0 else 1.0 / result

    # -- comparisons, for where() -----------------------------------------------------------------
    def __lt__(self, other: Expr | Number) -> Expr:
        return apply("lt", self, other)

    def __le__(self, other: Expr | Number) -> Expr:
        return apply("le", self, other)

    def __gt__(self, other: Expr | Number) -> Expr:
        return apply("gt", self, other)

    def __ge__(self, other: Expr | Number) -> Expr:
        return apply("ge", self, other)

    def __eq__(self, other: object) -> Expr:  # type: ignore[override]
        return apply("eq", self, other)  # type: ignore[arg-type]

    def __ne__(self, other: object) -> Expr:  # type: ignore[override]
        return apply("ne", self, other)  # type: ignore[arg-type]

    def __and__(self, other: Expr) -> Expr:
        return apply("logical_and", self, other)

    def __or__(self, other: Expr) -> Expr:
        return apply("logical_or", self, other)

    def __invert__(self) -> Expr:
        return apply("logical_not", self)

    # -- what the language cannot say ---------------------------------------------------------------
    def __bool__(self) -> NoReturn:
        fail(
            "Control flow on a traced value: a cell is traced once, before there are numbers.",
            "use where(condition, a, b); make structural choices with a bool keyword argument.",
        )

    def __float__(self) -> NoReturn:
        fail(
            "A traced value was turned into a number (math.tanh, float(), a NumPy function?).",
            "use the functions of anycell: tanh, sigmoid, exp, log, where, ...",
        )

    __int__ = __index__ = __float__

    def __iter__(self) -> NoReturn:
        fail("A traced value cannot be unpacked: it is one gate, state or parameter.", "unpack `x + r`, or name the gate.")

    def __getitem__(self, key: object) -> NoReturn:
        fail(
            f"Indexing a traced value with [{key!r}]: units cannot be picked, shifted or sliced.",
            "declare another gate or state; row reductions are mean, sum, max and layer_norm.",
        )

    def __setitem__(self, key: object, value: object) -> NoReturn:
        fail("In-place edit of a traced value.", "compute a new value, for instance where(condition, new, old).")

    def __matmul__(self, other: object) -> NoReturn:
        fail(
            "The operator @ inside a cell: a state-dependent matrix is outside the language.",
            'use linear(value, "name"), a matmul with a learned weight of that name.',
        )

    __rmatmul__ = __matmul__

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        fail(f"A traced value has no attribute {name!r}.", "use the functions of anycell, such as tanh(v) or abs(v).")


def const(value: Number) -> Expr:
    return Expr("const", (), (float(value),))


def as_expr(value: Any) -> Expr:
    if isinstance(value, Expr):
        return value
    if isinstance(value, (int, float)):
        return const(value)
    if getattr(value, "is_gates", False):
        fail("All gates at once where one value was expected.", "unpack them first: `i, f, g, o = x + r`, or use x.i.")
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return const(value.item())
    fail(
        f"{type(value).__name__} {value!r} inside a cell: only traced values and numbers combine.",
        'declare a per-unit parameter with params="name", or a keyword-only hyperparameter.',
    )


def is_const(node: Expr, value: float | None = None) -> bool:
    return node.op == "const" and (value is None or node.attrs[0] == value)


def apply(op: str, *args: Expr | Number, attrs: Attrs = ()) -> Expr:
    """The node ``op(*args)``, with the identities that keep derived graphs readable."""
    nodes = [as_expr(arg) for arg in args]
    if op == "add":
        a, b = nodes
        if is_const(a, 0.0):
            return b
        if is_const(b, 0.0):
            return a
        if b.op == "neg":
            return apply("sub", a, b.args[0])
        if a.op == "neg":
            return apply("sub", b, a.args[0])
    elif op == "sub":
        a, b = nodes
        if is_const(b, 0.0):
            return a
        if is_const(a, 0.0):
            return apply("neg", b)
        if b.op == "neg":
            return apply("add", a, b.args[0])
    elif op == "mul":
        a, b = nodes
        for one, other in ((a, b), (b, a)):
            if is_const(one, 1.0):
                return other
            if is_const(one, -1.0):
                return apply("neg", other)
            if one.op == "neg":
                return apply("neg", apply("mul", *((one.args[0], other) if one is a else (other, one.args[0]))))
    elif op == "div" and is_const(nodes[1], 1.0):
        return nodes[0]
    elif op == "neg":
        if nodes[0].op == "neg":
            return nodes[0].args[0]
        if is_const(nodes[0]):
            return const(-nodes[0].attrs[0])
    if op in ("add", "sub", "mul") and all(map(is_const, nodes)):
        a, b = (node.attrs[0] for node in nodes)
        return const({"add": a + b, "sub": a - b, "mul": a * b}[op])
    return Expr(op, nodes, attrs)


def topological(roots: Iterable[Expr]) -> list[Expr]:
    """All nodes under ``roots``, arguments before their users, in a fixed order."""
    order: dict[Expr, None] = {}
    stack: list[tuple[Expr, bool]] = [(root, False) for root in reversed(list(roots))]
    while stack:
        node, done = stack.pop()
        if node in order:
            continue
        if done:
            order[node] = None
        else:
            stack.append((node, True))
            stack.extend((arg, False) for arg in reversed(node.args))
    return list(order)


def rewrite(roots: Iterable[Expr], rule: Callable[[Expr, tuple[Expr, ...]], Expr | None]) -> list[Expr]:
    """Rebuilds the graph bottom-up; ``rule(node, new_args)`` returns a replacement or None to keep the node."""
    roots = list(roots)
    new: dict[Expr, Expr] = {}
    for node in topological(roots):
        args = tuple(new[arg] for arg in node.args)
        replacement = rule(node, args)
        new[node] = Expr(node.op, args, node.attrs) if replacement is None else replacement
    return [new[root] for root in roots]


_INFIX = {
    "add": ("+", 1), "sub": ("-", 1), "mul": ("*", 2), "div": ("/", 2),
    "lt": ("<", 0), "le": ("<=", 0), "gt": (">", 0), "ge": (">=", 0), "eq": ("==", 0), "ne": ("!=", 0),
    "logical_and": ("&", 0), "logical_or": ("|", 0),
}  # fmt: skip


def label(node: Expr) -> str | None:
    """The name of a leaf as a reader knows it, None for an operation."""
    if node.op == "const":
        value = node.attrs[0]
        return str(int(value)) if math.isfinite(value) and value == int(value) else repr(value)
    if node.op == "x":
        return f"x.{node.attrs[0]}"
    if node.op == "linear":
        return f"r.{node.attrs[1]}" if node.attrs[0] == "hh" else f"{node.attrs[0]}({show(node.args[0])})"
    if node.op == "preact":
        return f"a.{node.attrs[1]}"
    if node.op == "state":
        return f"s.{node.attrs[0]}"
    if node.op == "param":
        return f"p.{node.attrs[0]}"
    if node.op in ("static", "hyper"):
        return str(node.attrs[0])
    if node.op == "grad":
        return f"d_{node.attrs[0]}"
    if node.op == "keep":
        return f"keep_{node.attrs[0]}({show(node.args[0])}, per={node.attrs[1]!r})"
    return None


def show(node: Expr, names: dict[Expr, str] | None = None, level: int = -1, top: bool = True) -> str:
    """The expression as Python source; nodes in ``names`` print as their name."""
    if names and not top and node in names:
        return names[node]
    text = label(node)
    if text is not None:
        return text
    if node.op in _INFIX:
        sign, precedence = _INFIX[node.op]
        left = show(node.args[0], names, precedence, False)
        right = show(node.args[1], names, precedence + 1, False)
        text = f"{left} {sign} {right}"
        return f"({text})" if precedence < level else text
    if node.op == "neg":
        return f"-{show(node.args[0], names, 3, False)}"
    inner = [show(arg, names, -1, False) for arg in node.args]
    if node.op in ("sum", "mean", "max") and node.attrs[0] != 1:
        inner.append(f"groups={node.attrs[0]}")
    return f"{node.op}({', '.join(inner)})"


def listing(named: Iterable[tuple[str, Expr]], min_uses: int = 2) -> Iterator[str]:
    """Lines ``name = expression``; a shared sub-expression gets a line of its own (t1, t2, ...)."""
    named = list(named)
    order = topological(root for _, root in named)
    uses = dict.fromkeys(order, 0)
    for node in order:
        for arg in node.args:
            uses[arg] += 1
    names: dict[Expr, str] = {}
    targets = {root: name for name, root in reversed(named)}
    for node in order:
        if node in targets and label(node) is None:
            names[node] = targets[node]
            yield f"{targets[node]} = {show(node, names)}"
        elif label(node) is None and uses[node] >= min_uses:
            names[node] = f"t{sum(name.startswith('t') and name[1:].isdigit() for name in names.values()) + 1}"
            yield f"{names[node]} = {show(node, names)}"
    for name, root in named:
        if names.get(root) != name:
            yield f"{name} = {names.get(root) or show(root, names)}"
