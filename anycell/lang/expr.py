"""Expressions: immutable, interned nodes of the graph that a cell traces to.

Every node stands for one value per unit and batch row. A row reduction (``sum``, ``mean``, ``max``)
returns its result to every unit of its group, so it combines with every other node, and its
derivative is again a reduction.
"""

from __future__ import annotations

import contextlib
import contextvars
import linecache
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NoReturn
from weakref import WeakValueDictionary

import numpy as np

Attrs = tuple[Any, ...]
Number = int | float


class CellError(ValueError):
    """A cell that cannot be expressed, or that was called with something it does not declare."""


# The ops whose result is a condition; every other result is a number.
CONDITIONS = frozenset(
    {"lt", "le", "gt", "ge", "eq", "ne", "logical_and", "logical_or", "logical_not"}
)

# The ops that combine the units of a row (attrs: number of groups).
REDUCTIONS = frozenset({"sum", "mean", "max"})
# The ops whose result differs from unit to unit even if their arguments do not.
_PER_UNIT = frozenset({"keep", "linear", "preact", "linear_t"})

# The code object of the cell function being traced, so that an error can name its line; or, while a
# declaration is read, the text that names the line.
tracing: contextvars.ContextVar[Any] = contextvars.ContextVar("anycell_tracing", default=None)
# Parts of paths to functions that are not the user's: errors do not name their lines.
_LIBRARIES = os.path.dirname(os.__file__), "site-packages", "dist-packages"


def fail(problem: str, instead: str) -> NoReturn:
    """Raises ``CellError`` with the current line of the traced cell function, or of the user's
    function that it calls; once the cell function has returned, with its last line.
    """
    code = tracing.get()
    if code is None or isinstance(code, str):
        raise CellError(f"{code or ''}{problem}\nInstead: {instead}")
    frame, users = sys._getframe(1), None
    while frame is not None and frame.f_code is not code:
        file, inside = frame.f_code.co_filename, frame.f_globals.get("__package__") == __package__
        if users is None and not inside and not any(part in file for part in _LIBRARIES):
            users = frame
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        where = line_of(code, max(line for *_, line in code.co_lines() if line))
    elif users is None:
        where = line_of(code, frame.f_lineno)
    else:
        what = f"{users.f_code.co_name}, called in cell {code.co_name}"
        where = place(users.f_code.co_filename, users.f_lineno, what)
    raise CellError(f"{where}{problem}\nInstead: {instead}")


@contextlib.contextmanager
def said_at(where: str) -> Iterator[None]:
    """Makes the errors inside begin with ``where``, a ``place``."""
    token = tracing.set(where)
    try:
        yield
    finally:
        tracing.reset(token)


def refused(problem: str, instead: str) -> Callable[..., NoReturn]:
    """Returns a method that fails with this error."""

    def refuse(self: Any, *args: Any) -> NoReturn:
        fail(problem, instead)

    return refuse


def line_of(code: Any, number: int) -> str:
    """A line of a cell function, as errors show it."""
    return place(code.co_filename, number, f"cell {code.co_name}")


def place(file: str, number: int, context: str) -> str:
    """A line of a file, as errors show it."""
    return f"{file}:{number}: in {context}\n    {source_line(file, number)}\n"


def source_line(file: str, number: int) -> str:
    """A line of a file as it is now: the file may have been edited, and loaded again."""
    linecache.checkcache(file)
    return linecache.getline(file, number).strip()


# The method of the right operand that answers a ufunc with a NumPy number on the left.
_REFLECTED = {
    "add": "__radd__", "subtract": "__rsub__", "multiply": "__rmul__", "divide": "__rtruediv__",
    "less": "__gt__", "less_equal": "__ge__", "greater": "__lt__", "greater_equal": "__le__",
    "equal": "__eq__", "not_equal": "__ne__", "power": "__rpow__",
}  # fmt: skip
# Other libraries' names for arithmetic, and for products with a matrix.
_ARITHMETIC = frozenset("add sub mul div true_divide rsub".split())
_MATMULS = frozenset(
    "matmul rmatmul dot inner vdot tensordot einsum linear mm mv bmm addmm baddbmm".split()
)
# What to write for their functions that have another name here, or no equivalent.
RENAMED = {
    "absolute": "abs(v)", "fabs": "abs(v)", "amax": "max(v)", "amin": "-max(-v)", "min": "-max(-v)",
    "fmax": "maximum(a, b)", "fmin": "minimum(a, b)", "clamp": "clip(v, low, high)",
    "expit": "sigmoid(v)", "logsigmoid": "log_sigmoid(v)", "hardsigmoid": "hard_sigmoid(v)",
    "square": "v * v", "reciprocal": "1 / v", "negative": "-v", "detach": "stop_gradient(v)",
    "power": "a ** b", "float_power": "a ** b", "exp2": "2 ** v", "expm1": "exp(v) - 1",
    "log1p": "log(1 + v)", "log2": "log(v) / log(2)", "rsqrt": "1 / sqrt(v)",
    "tan": "sin(v) / cos(v)", "sinh": "(exp(v) - exp(-v)) / 2", "cosh": "(exp(v) + exp(-v)) / 2",
    "erfc": "1 - erf(v)", "swish": "silu(v)", "mish": "v * tanh(softplus(v))",
    "relu6": "clip(v, 0, 6)", "hardtanh": "clip(v, -1, 1)", "hard_tanh": "clip(v, -1, 1)",
    "hardswish": "v * hard_sigmoid(v)", "hard_silu": "v * hard_sigmoid(v)",
    "log_softmax": "v - max(v) - log(sum(exp(v - max(v))))",
    "dropout": "keep(rate) / rate * v", "bernoulli": "keep(rate)",
}  # fmt: skip

LINEAR = (
    'use linear(value, "name"), a matmul with a learned weight of that name; '
    "for a fixed matrix, set that weight and do not train it."
)


# The functions that have a meaning in a cell, as ``anycell.lang`` exports them.
VOCABULARY: list[str] = []


def instead_of(name: str) -> str:
    """Says what to write in a cell for the function that another library calls ``name``."""
    name = name.strip("_")
    if name in _MATMULS:
        return LINEAR
    if name in VOCABULARY:
        return f"use anycell.{name}."
    if name in RENAMED:
        return f"write {RENAMED[name]}, with the functions of anycell."
    return f"use the functions of anycell: {', '.join(VOCABULARY)}."


class Traced:
    """Refuses the functions of NumPy and PyTorch, which dispatch to arguments of foreign types."""

    __slots__ = ()

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        reflected = getattr(self, _REFLECTED.get(ufunc.__name__, "__none__"), None)
        if reflected is None or method != "__call__" or inputs[-1] is not self:
            _foreign(f"numpy.{ufunc.__name__}")
        return reflected(inputs[0])

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> NoReturn:
        _foreign(f"numpy.{function.__name__}")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _foreign("numpy.array")

    def __format__(self, spec: str) -> str:
        if spec:
            problem = f"A traced value was formatted with {spec!r}: it has no digits yet."
            fail(problem, 'print its expression, f"{value}".')
        return str(self)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), *_: Any) -> NoReturn:
        if function.__name__ in _ARITHMETIC:
            for arg in args:
                as_expr(arg)  # refuses the tensor
        _foreign(f"torch.{function.__name__}")


def _foreign(function: str) -> NoReturn:
    fail(
        f"{function}() was called with a traced value: a cell is traced before there are numbers.",
        instead_of(function.rpartition(".")[2]),
    )


# The error about gates, states or parameters that have not been unpacked.
ALL_AT_ONCE = (
    "All gates at once where one value was expected.",
    "unpack them first: `i, f, g, o = x + r`, or use x.i.",
)


def _operators(op: str) -> tuple[Callable[[Expr, Expr | Number], Expr], ...]:
    """The methods of a binary operator, for a node on its left and on its right."""
    return (lambda self, other: apply(op, self, other), lambda self, other: apply(op, other, self))


class Expr(Traced):
    """One node: ``op`` names a row of the op table or a leaf,
    ``attrs`` hold what is not an expression.

    It is ``narrow`` if all units of a row share the value: a number, a reduction over one group, or
    an element-wise function of narrow nodes. The leaf ``units`` is the number of units of a size.
    """

    __slots__ = ("__weakref__", "args", "attrs", "narrow", "op")

    op: str
    args: tuple[Expr, ...]
    attrs: Attrs
    narrow: bool

    _interned: ClassVar[WeakValueDictionary[tuple[Any, ...], Expr]] = WeakValueDictionary()

    def __new__(cls, op: str, args: Iterable[Expr] = (), attrs: Attrs = ()) -> Expr:
        args = tuple(args)
        key = (op, tuple(map(id, args)), repr(attrs))
        node = cls._interned.get(key)
        if node is None:
            node = object.__new__(cls)
            node.op, node.args, node.attrs = op, args, attrs
            if op in REDUCTIONS:
                node.narrow = attrs == (1,)
            elif args:
                node.narrow = op not in _PER_UNIT and all(arg.narrow for arg in args)
            else:
                node.narrow = op in ("const", "hyper", "units")
            node = cls._interned.setdefault(key, node)
        return node

    __hash__ = object.__hash__  # which defining __eq__ takes away

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

    __add__, __radd__ = _operators("add")
    __sub__, __rsub__ = _operators("sub")
    __mul__, __rmul__ = _operators("mul")
    __truediv__, __rtruediv__ = _operators("div")

    def __pow__(self, power: Expr | Number, modulo: object = None) -> Expr:
        if modulo is not None:
            problem = f"pow(x, {power!r}, {modulo!r}) is outside the cell language."
            fail(problem, "use x ** y, without division with remainder.")
        number: Any = plain(power)
        if not isinstance(number, (int, float)):
            return apply("pow", self, power)
        if number == 0.5:
            return apply("sqrt", self)
        if not (1 <= abs(number) <= 16 and number == int(number)):
            return apply("pow", self, number)
        result = self
        for _ in range(int(abs(number)) - 1):
            result = result * self
        return result if number > 0 else 1.0 / result

    # -- conditions, for where() ------------------------------------------------------------------
    __lt__, __gt__ = _operators("lt")[0], _operators("gt")[0]
    __le__, __ge__ = _operators("le")[0], _operators("ge")[0]

    def __eq__(self, other: object) -> Expr:  # type: ignore[override]
        return apply("eq", self, other)  # type: ignore[arg-type]

    def __ne__(self, other: object) -> Expr:  # type: ignore[override]
        return apply("ne", self, other)  # type: ignore[arg-type]

    __and__, __rand__ = _operators("logical_and")
    __or__, __ror__ = _operators("logical_or")

    def __invert__(self) -> Expr:
        return apply("logical_not", self)

    # -- what the language cannot express ----------------------------------------------------------
    __bool__ = refused(
        "Control flow on a traced value: a cell is traced once, before there are numbers.",
        "use where(condition, a, b); maximum(a, b) for Python's max(a, b), minimum(a, b) for "
        "its min(a, b); (0 < a) & (a < 1) for 0 < a < 1; &, | and ~ for and, or and not. "
        "Make structural choices with a bool keyword argument.",
    )
    __iter__ = __len__ = __reversed__ = __contains__ = refused(
        "A traced value cannot be unpacked or iterated over: it is one gate, state or parameter.",
        "unpack `x + r`, or name the gate; to combine the units of a row, use anycell's sum, "
        "mean and max.",
    )

    def __float__(self) -> NoReturn:
        problem = "A traced value was turned into a number (math.tanh, float(), a NumPy function?)."
        fail(problem, instead_of(""))

    __int__ = __index__ = __complex__ = __float__

    def __getitem__(self, key: object) -> NoReturn:
        fail(
            f"Indexing a traced value with [{key!r}]: units cannot be picked, shifted or sliced.",
            "declare another gate or state; row reductions are mean, sum, max and layer_norm.",
        )

    __setitem__ = __delitem__ = refused(
        "In-place edit of a traced value.",
        "compute a new value, for instance where(condition, new, old).",
    )
    __matmul__ = __rmatmul__ = refused(
        "The operator @ inside a cell: a state-dependent matrix is outside the language.", LINEAR
    )
    __xor__ = __rxor__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = refused(
        "The operators ^, << and >> are outside the cell language.",
        "combine conditions with &, | and ~: a ^ b is (a & ~b) | (~a & b).",
    )
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = refused(
        "Division with remainder (//, %, divmod) is outside the cell language.",
        "use a / b, or comparisons and where(condition, a, b).",
    )
    __round__ = __trunc__ = __floor__ = __ceil__ = refused(
        "Rounding is outside the cell language: its derivative is 0.",
        "use comparisons and where(condition, a, b).",
    )

    def __rpow__(self, base: Number) -> Expr:
        return apply("pow", base, self)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        fail(
            f"A traced value has no attribute {name!r}, which this line, or a function of another "
            "library that it calls, asks for.",
            instead_of(name),
        )


def const(value: Number) -> Expr:
    """A number of the program text as a node."""
    return Expr("const", (), (float(value),))


def plain(value: Any) -> Any:
    """Turns a NumPy number, or array without dimensions, into Python's; keeps other values."""
    numpys = isinstance(value, (np.generic, np.ndarray)) and value.shape == ()
    return value.item() if numpys else value


def positive(value: Any, problem: str, instead: str) -> int:
    """Returns a positive integer of Python or NumPy as an int, else raises ``CellError``."""
    try:
        number = 0 if isinstance(value, Traced) else int(operator.index(value))
    except TypeError:
        number = 0
    if number < 1:
        fail(problem, instead)
    return number


def boolean(value: Any, shown: str) -> bool:
    """Returns a bool of Python or NumPy as a bool, else raises ``CellError``."""
    flag = plain(value)
    if not isinstance(flag, bool):
        fail(f"{shown}: expected True or False.", "bias=True or bias=False.")
    return flag


def brief(value: Any) -> str:
    """Describes a value on one short line."""
    shown = " ".join(repr(value).split())
    return shown if len(shown) < 60 else f"{shown[:56]} ..."


def as_expr(value: Any) -> Expr:
    """Returns a traced value as it is, and a number as a constant; else raises ``CellError``."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, Traced):
        fail(*ALL_AT_ONCE)
    number = plain(value)
    if isinstance(number, (int, float)):
        try:
            return const(number)
        except OverflowError:
            fail("An integer beyond the range of a double, 1.8e308.", 'write float("inf").')
    instead = 'declare a per-unit parameter with params="name", or a keyword-only hyperparameter.'
    if isinstance(value, (list, tuple)):
        instead = "combine its elements one by one: a + b, maximum(a, b)."
    given = f"{type(value).__name__} {brief(value)}"
    fail(f"{given} inside a cell: only traced values and numbers combine.", instead)


def is_const(node: Expr, value: float | None = None) -> bool:
    """Whether the node is a constant, and equals ``value`` if that is given."""
    return node.op == "const" and (value is None or node.attrs[0] == value)


def apply(op: str, *args: Expr | Number, attrs: Attrs = ()) -> Expr:
    """Returns the node ``op(*args)``, after identities that keep derived graphs readable."""
    nodes = [
        operand(op, arg, op.startswith("logical_") or (op == "where" and position == 0))
        for position, arg in enumerate(args)
    ]
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
                product = (one.args[0], b) if one is a else (a, one.args[0])
                return apply("neg", apply("mul", *product))
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


def operand(op: str, value: Any, condition: bool = False) -> Expr:
    """Returns the value as a node, which must be a condition if ``condition``, else a number."""
    node = as_expr(value)
    if (node.op in CONDITIONS) is condition:
        return node
    if condition:
        instead = "write where(a > b, yes, no), and combine comparisons with &, | and ~."
        fail(f"{op}() got `{node}`, a number, where it takes a condition.", instead)
    instead = "where(condition, 1.0, 0.0) makes a number of it."
    fail(f"{op}() got `{node}`, a condition, where it takes a number.", instead)


def topological(roots: Iterable[Expr], leaf: Callable[[Expr], bool] | None = None) -> list[Expr]:
    """All nodes under ``roots``, arguments before their users, in a fixed order.

    The arguments of a ``leaf`` are left out unless other nodes depend on them.
    """
    order: dict[Expr, None] = {}
    stack: list[tuple[Expr, bool]] = [(root, False) for root in reversed(list(roots))]
    while stack:
        node, done = stack.pop()
        if node in order:
            continue
        if done or (leaf is not None and leaf(node)):
            order[node] = None
        else:
            stack.append((node, True))
            stack.extend((arg, False) for arg in reversed(node.args))
    return list(order)


def rewrite(
    roots: Iterable[Expr], rule: Callable[[Expr, tuple[Expr, ...]], Expr | None]
) -> list[Expr]:
    """Rebuilds the graph bottom-up.

    ``rule(node, new_args)`` returns a replacement or None to keep the node.
    """
    roots = list(roots)
    new: dict[Expr, Expr] = {}
    for node in topological(roots):
        args = tuple(new[arg] for arg in node.args)
        replacement = rule(node, args)
        new[node] = Expr(node.op, args, node.attrs) if replacement is None else replacement
    return [new[root] for root in roots]


# Precedence as in Python: & and | bind tighter than comparisons.
_INFIX = {
    "lt": ("<", 0), "le": ("<=", 0), "gt": (">", 0), "ge": (">=", 0),
    "eq": ("==", 0), "ne": ("!=", 0),
    "logical_or": ("|", 1), "logical_and": ("&", 2),
    "add": ("+", 3), "sub": ("-", 3), "mul": ("*", 4), "div": ("/", 4),
}  # fmt: skip
_PREFIX = {"neg": "-", "logical_not": "~"}
_LEAVES = {
    "x": "x.", "preact": "a.", "state": "s.", "param": "p.", "grad": "d_", "static": "", "hyper": ""
}  # fmt: skip


def label(node: Expr) -> str | None:
    """The name of a leaf as users write it; None for an operation."""
    if node.op == "const":
        value = node.attrs[0]
        whole = abs(value) < 1e16 and value == int(value) and str(value) != "-0.0"
        return str(int(value)) if whole else repr(value)
    if node.op == "linear":
        return f"r.{node.attrs[1]}" if node.attrs[0] == "hh" else None
    if node.op == "units":
        return f"units({node.attrs[0]})"
    return f"{_LEAVES[node.op]}{node.attrs[-1]}" if node.op in _LEAVES else None


def shared_name(matmul: str) -> str:
    """The name of a matmul's weight, which the names of all matmuls by it begin with."""
    return matmul.partition(".")[0]


def show(
    node: Expr, names: Mapping[Expr, str] | None = None, level: int = -1, top: bool = True
) -> str:
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
    if node.op in _PREFIX:
        return f"{_PREFIX[node.op]}{show(node.args[0], names, 5, False)}"
    if node.op == "linear_t":
        alone = len(node.args) == 1
        operands = ", ".join(show(arg, names, 4 if alone else -1, False) for arg in node.args)
        text = f"{operands if alone else f'({operands})'} @ W_{shared_name(node.attrs[0])}"
        return f"({text})" if level >= 4 else text
    name, inner = node.op, [show(arg, names, -1, False) for arg in node.args]
    if node.op in ("sum", "mean", "max", "layer_norm") and node.attrs[0] != 1:
        inner.append(f"groups={node.attrs[0]}")
    elif node.op == "linear":
        matmul, output = shared_name(node.attrs[0]), node.attrs[1]
        return f"linear({inner[0]}, {matmul!r})" + (f".{output}" if output != matmul else "")
    elif node.op == "keep":  # numbered, because two masks with the same rate differ
        name = f"keep_{node.attrs[0]}"
        inner += [f"per={node.attrs[1]!r}"] * (node.attrs[1] != "step")
    return f"{name}({', '.join(inner)})"


def listing(
    named: Iterable[tuple[str, Expr]], known: Mapping[Expr, str] | None = None, width: int = 76
) -> Iterator[str]:
    """Lines ``name = expression``.

    A sub-expression that is used twice, or would make an expression wider than ``width``, gets a
    line of its own: t1, t2, ... Nodes in ``known`` print as their name; what they depend on is left
    out.
    """
    named = list(named)
    known = known or {}
    order = topological((root for _, root in named), known.__contains__)
    uses = dict.fromkeys(order, 0)
    for node in order:
        if node not in known:
            for arg in node.args:
                uses[arg] += 1
    targets = {root: name for name, root in reversed(named)}
    names = dict(known)
    count = 0

    def line(node: Expr) -> str:
        nonlocal count
        if node not in targets:
            count += 1
        names[node] = targets.get(node) or f"t{count}"
        return f"{names[node]} = {show(node, names)}"

    for node in order:
        if node in known or label(node) is not None:
            continue
        while len(show(node, names)) > width:
            open_ = [arg for arg in node.args if arg not in names and label(arg) is None]
            longest = max(open_, key=lambda arg: len(show(arg, names)), default=None)
            if longest is None:
                break
            yield line(longest)
        small = node.op == "neg" and label(node.args[0]) is not None
        if node in targets or (uses[node] >= 2 and not small):
            yield line(node)
    for name, root in named:
        if names.get(root) != name:
            yield f"{name} = {names.get(root) or show(root, names)}"
