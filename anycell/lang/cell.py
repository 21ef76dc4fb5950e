"""``@cell`` traces a Python function once into a ``Cell``:
graph, gates, states, parameters, matmuls.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
import inspect
import math
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn, overload

from anycell.lang.expr import (
    ALL_AT_ONCE,
    REDUCTIONS,
    CellError,
    Expr,
    Number,
    Traced,
    apply,
    as_expr,
    boolean,
    brief,
    fail,
    is_const,
    line_of,
    operand,
    plain,
    positive,
    refused,
    rewrite,
    topological,
    tracing,
)
from anycell.lang.ops import TABLE, is_boolean

RECURRENT = "hh"  # the matmul behind `r`
PROJECTION = "ih"  # that behind `x`, where it is one of the step's; see `with_projection`
INPUT = "(input)"  # the size of its operand: a symbol that no cell can declare

# Keyword arguments of the layers of every frontend, which take sizes by keyword as well: names that
# no size can have.
RESERVED = frozenset(
    "cell input_size hidden_size num_layers units bias use_bias batch_first dropout "
    "recurrent_dropout bidirectional device dtype checkpoint seed initializer gate_bias "
    "unit_forget_bias kernel_initializer recurrent_initializer bias_initializer param_initializer "
    "kernel_regularizer recurrent_regularizer bias_regularizer param_regularizer "
    "kernel_constraint recurrent_constraint bias_constraint param_constraint "
    "activity_regularizer return_sequences return_state go_backwards stateful unroll "
    "zero_output_for_mask name trainable autocast self".split()
)


@dataclass(frozen=True)
class State:
    """A state: ``size`` is a symbol ("H" is the hidden size),
    ``initial`` the value it starts from and resets to.
    """

    name: str
    size: str = "H"
    initial: float = 0.0


@dataclass(frozen=True)
class Param:
    """A per-unit parameter ``[H]``.

    ``initial`` None leaves its initial value to the framework's convention.
    """

    name: str
    initial: float | None = None


@dataclass(frozen=True)
class Linear:
    """One matmul inside a step: ``outputs`` blocks of ``out_size`` from ``operand``,
    block-diagonal with ``heads``.

    Each output is a node ``linear(operand)`` with attributes ``(name, output)``; a matmul without
    ``gates`` has one, of its own name. Weight and bias have rows for each of ``declared``, used or
    not, in that order: for each head a block per output, in the bias for each output its heads.
    Matmuls may share a weight, with outputs of their own: "hh.i" and "hh.f" have "weight_hh".
    """

    name: str
    operand: Expr
    outputs: tuple[str, ...]  # those that the step uses, in declared order
    heads: int
    bias: bool
    in_size: str
    out_size: str
    declared: tuple[str, ...]

    @functools.cached_property
    def weight(self) -> str:
        """The public name of its weight: of "hh" it is "weight_hh"."""
        return "weight_" + self.name.partition(".")[0]

    @functools.cached_property
    def bias_name(self) -> str:
        """The public name of its bias."""
        return "bias_" + self.name.partition(".")[0]

    @property
    def recurrent(self) -> bool:
        """Whether it is the matmul behind `r`, or one of those that share its weight."""
        return self.name.partition(".")[0] == RECURRENT

    def __str__(self) -> str:
        heads = f", heads={self.heads}" * (self.heads > 1)
        return f"linear({self.operand!r}, {self.name!r}{heads})"

    def shape(self, size: Mapping[str, int]) -> tuple[int, ...]:
        """Of the weight: ``[out, in]`` or ``[heads, out/heads, in/heads]``, out of all outputs.

        Heads divide both; see ``Cell.check_sizes``.
        """
        out, into = size[self.out_size], size[self.in_size]
        rows, columns = len(self.declared) * out // self.heads, into // self.heads
        return (rows, columns) if self.heads == 1 else (self.heads, rows, columns)


class Gates(Traced):
    """The values of all gates: unpacks in the declared order, names them,
    adds element by element.
    """

    _what: str
    _values: dict[str, Expr]

    def __init__(self, what: str, values: dict[str, Expr]) -> None:
        self.__dict__.update(_what=what, _values=values)

    def __iter__(self) -> Iterator[Expr]:
        return iter(self._values.values())

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> Expr:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            given = " ".join(self._values) or "none"
            fail(
                f"No {self._what} is named {name!r}; this cell declares: {given}.",
                f"declare it, or use one of: {given}.",
            )

    def __setattr__(self, name: str, value: object) -> NoReturn:
        fail(
            f"In-place edit of the {self._what} {name!r}.",
            f"compute a new value with a name of its own: {name} = ...",
        )

    def _combine(self, op: str, left: Any, right: Any) -> Gates:
        def pick(side: Any, name: str) -> Any:
            return getattr(side, name) if isinstance(side, Gates) else side

        return Gates(
            self._what, {n: apply(op, pick(left, n), pick(right, n)) for n in self._values}
        )

    def __add__(self, other: Any) -> Gates:
        return self._combine("add", self, other)

    def __radd__(self, other: Any) -> Gates:
        return self._combine("add", other, self)

    def __sub__(self, other: Any) -> Gates:
        return self._combine("sub", self, other)

    def __mul__(self, other: Any) -> Gates:
        return self._combine("mul", self, other)

    def __rmul__(self, other: Any) -> Gates:
        return self._combine("mul", other, self)


for _operator in (
    "neg pos abs invert bool int float index round trunc floor ceil getitem setitem lt le gt ge "
    "rsub truediv rtruediv floordiv rfloordiv mod rmod divmod rdivmod pow rpow matmul rmatmul "
    "and rand or ror xor rxor lshift rlshift rshift rrshift complex delitem contains"
).split():
    setattr(Gates, f"__{_operator}__", refused(*ALL_AT_ONCE))


@dataclass
class _Trace:
    given: set[Expr]  # the leaves, matmuls and masks that the function was handed
    keeps: int = 0
    linears: dict[str, _Declared] = field(default_factory=dict)


class _Declared(NamedTuple):
    """What ``linear`` was told of a matmul."""

    outputs: tuple[str, ...]
    heads: int
    bias: bool
    size: str | None  # of each output, where it was named


_current: contextvars.ContextVar[_Trace | None] = contextvars.ContextVar(
    "anycell_trace", default=None
)


def _trace(function: str) -> _Trace:
    trace = _current.get()
    if trace is None:
        fail(
            f"{function}() was called outside a cell.",
            "call it in a function under @cell, where it has a meaning.",
        )
    return trace


@overload
def linear(
    value: Expr | Number,
    name: str,
    *,
    gates: None = None,
    heads: int = 1,
    bias: bool = False,
    size: str | None = None,
) -> Expr: ...
@overload
def linear(
    value: Expr | Number,
    name: str,
    *,
    gates: str,
    heads: int = 1,
    bias: bool = False,
    size: str | None = None,
) -> Gates: ...
def linear(
    value: Expr | Number,
    name: str,
    *,
    gates: str | None = None,
    heads: int = 1,
    bias: bool = False,
    size: str | None = None,
) -> Expr | Gates:
    """A further matmul inside the step: ``value @ W_name.T`` with a learned weight.

    Args:
        value: the operand, ``[B, in]``.
        name: names the weight. A name stands for one weight, and one matmul has it: two matmuls
            cannot share a weight.
        gates: names the outputs of a matmul that has several, all of one size; they come together,
            as ``r`` does: ``r, z = linear(v, "rz", gates="r z")``.
        heads: block-diagonal weight with that many equal blocks.
        bias: whether the matmul has a learned bias.
        size: a symbol for the size of the result (of each output), which layers then take by
            keyword. ``linear(tanh(linear(s.h, "down", size="R")), "up")`` is a bottleneck of R
            units: ``RNN(cell, 12, 100, R=8)``.

    Without ``size`` the result is as wide as what it is combined with: of H units, the hidden size,
    or of a state's declared size. So ``linear(tanh(linear(s.h, "down")), "up")`` is twice a weight
    ``[H, H]``. ``explain`` says the shape of every weight.

    Raises:
        CellError: for a name that is taken, and for arguments of other kinds.
    """
    trace = _trace("linear")
    if not isinstance(name, str) or not name.isidentifier():
        fail(f"linear(..., {brief(name)}): the weight needs a name.", 'linear(value, "name").')
    node = operand("linear", value)
    if name in trace.linears:
        fail(
            f"linear(..., {name!r}): this cell has a matmul of that name, and each has a weight of "
            "its own: two matmuls cannot share one.",
            "where two products are added, multiply once: linear(a + b, ...) is the sum of both "
            "with one weight; where both are of one value, use the first result again. Another "
            "name is another weight, learned apart from this one.",
        )
    if name in (RECURRENT, PROJECTION) or name.endswith("_bias"):
        fail(
            f"linear(..., {name!r}): this name is taken, by the layer's own matmuls "
            f"({PROJECTION}, {RECURRENT}) or a bias (..._bias).",
            "choose another name.",
        )
    heads = positive(
        heads,
        f"linear(..., heads={brief(heads)}).",
        "give a positive integer that divides the sizes.",
    )
    bias = boolean(bias, f"linear(..., {name!r}, bias={brief(bias)})")
    if gates is not None and not isinstance(gates, str):
        fail(f"linear(..., gates={gates!r}).", 'name the outputs in one string: gates="r z".')
    outputs = (name,) if gates is None else tuple(gates.split())
    named = all(output.isidentifier() for output in outputs)
    if not outputs or len(set(outputs)) < len(outputs) or not named:
        fail(
            f"linear(..., {name!r}, gates={gates!r}).",
            'name each output once, with blanks between: gates="r z".',
        )
    if size is not None:
        if not isinstance(size, str) or not _SYMBOL.fullmatch(size):
            fail(
                f"linear(..., {name!r}, size={brief(size)}): expected a symbol.",
                'size="R", and the number where a layer is made: RNN(cell, 12, 100, R=8).',
            )
        _check_symbol(size, f"linear(..., {name!r}, size={size!r})")
    trace.linears[name] = _Declared(outputs, heads, bias, size)
    nodes = {output: Expr("linear", (node,), (name, output)) for output in outputs}
    trace.given.update(nodes.values())
    return nodes[name] if gates is None else Gates("output", nodes)


def keep(rate: Expr | Number, per: str = "step") -> Expr:
    """A random mask that keeps with probability ``rate``.

    In training 1 with probability ``rate``, else 0, drawn anew ``per`` "step" or once per
    "sequence" for each unit and row; in evaluation its mean, ``rate``. So
    ``keep(1 - z) * new + (1 - keep(1 - z)) * old`` is zoneout, and ``keep(k) / k * value`` is
    inverted dropout. Draws are counter-based (Philox4x32-10, Salmon et al., 2011): the same on
    every engine for the same seed, and drawn again in the backward pass.
    """
    trace = _trace("keep")
    if per not in ("step", "sequence"):
        fail(f"keep(..., per={per!r}).", 'per="step" or per="sequence".')
    probability = operand("keep", rate)
    if is_const(probability) and not 0.0 <= probability.attrs[0] <= 1.0:
        fail(
            f"keep({rate!r}): the probability of keeping is outside [0, 1].",
            "give a rate in [0, 1].",
        )
    node = Expr("keep", (probability,), (trace.keeps, per))
    trace.given.add(node)
    trace.keeps += 1
    return node


class Cell:
    """A recurrent cell: what happens between the input projection and the next state, as a graph.

    Made by ``@cell``. Calling a cell with keyword arguments gives the cell with those
    hyperparameters: ``PeepholeLSTM(coupled=True, cell_clip=3.0)``.

    Attributes:
        name: of the function.
        gates, states, params, static: as declared.
        hyper: run-time hyperparameters (floats), by name; a change of value compiles nothing.
        structure: the other keyword arguments, which select the graph.
        bias: whether the projections of the layer carry biases.
        next: one expression per state, the new states.
        linears: every matmul of a step, in order of evaluation.
        learned: the public names of all that one direction of a layer may learn.
        fused: gates whose input and recurrent projection are only ever added.
        sizes: the size symbol of each node of the graph, of all but plain numbers.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        gates: tuple[str, ...],
        states: tuple[State, ...],
        params: tuple[Param, ...],
        static: str | None,
        bias: bool,
        given: dict[str, Any],
    ) -> None:
        self.function, self.gates, self.states = function, gates, states
        self.params, self.static, self.bias = params, static, bias
        self.name = function.__name__
        self.__name__, self.__qualname__, self.__module__ = (
            self.name,
            function.__qualname__,
            function.__module__,
        )
        self.__doc__ = function.__doc__
        self.given = given = {name: plain(value) for name, value in given.items()}
        self.hyper, self.structure = _sort_hyperparameters(function, given)
        self._trace()

    # -- use -------------------------------------------------------------------------------------
    def __call__(self, *args: Any, **hyper: Any) -> Cell:
        """The same cell with other hyperparameters; see the signature of its function."""
        if args:
            fail(
                f"Cell {self.name} was called with {len(args)} positional argument(s); "
                "it takes its hyperparameters, by name.",
                f"give them by name; inside a cell, call {self.name}.function(x, r, s).",
            )
        if not hyper:
            return self
        given = {**self.given, **hyper}
        return Cell(
            self.function, self.gates, self.states, self.params, self.static, self.bias, given
        )

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.given.items())})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cell) and (self.key, self.hyper, self.name) == (
            other.key,
            other.hyper,
            other.name,
        )

    def __hash__(self) -> int:
        return hash((self.key, self.name))

    def __copy__(self) -> Cell:
        return self

    def __deepcopy__(self, memo: Any) -> Cell:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        where = self.function.__module__, self.function.__qualname__
        try:
            _find(*where)
        except (CellError, ImportError) as error:  # now, not when the file is read
            raise pickle.PicklingError(
                f"{error}\nInstead: define the cell at the top level of a module, by its own name; "
                "or save what the layer has learned, its state_dict() or parameters."
            ) from None
        return _restore, (*where, self.given)

    @property
    def state_names(self) -> tuple[str, ...]:
        return tuple(state.name for state in self.states)

    @property
    def param_names(self) -> tuple[str, ...]:
        return tuple(param.name for param in self.params)

    @functools.cached_property
    def keeps(self) -> tuple[Expr, ...]:
        """The random masks of the graph."""
        return tuple(node for node in topological(self.next) if node.op == "keep")

    # -- tracing ---------------------------------------------------------------------------------
    def _trace(self) -> None:
        states = {s.name: Expr("state", (), (s.name,)) for s in self.states}
        first = states[self.states[0].name]
        x = {g: Expr("x", (), (g,)) for g in self.gates}
        r = {g: Expr("linear", (first,), (RECURRENT, g)) for g in self.gates}
        args: list[Any] = [
            Gates("gate", x),
            Gates("gate", r),
            Gates("state", states),
        ]
        if self.params:
            args.append(
                Gates("parameter", {p.name: Expr("param", (), (p.name,)) for p in self.params})
            )
        if self.static is not None:
            args.append(Expr("static", (), (self.static,)))
        hyper = {name: Expr("hyper", (), (name,)) for name in self.hyper}
        keywords = {**self.structure, **hyper}
        values = [value for arg in args for value in (arg if isinstance(arg, Gates) else (arg,))]
        trace = _Trace({*values, *hyper.values()})
        code, current = tracing.set(self.function.__code__), _current.set(trace)
        try:
            result = self.function(*args, **keywords)
            self._finish(self._check_result(result, trace.given), trace)
        except ValueError as error:
            if isinstance(error, CellError) or "to unpack" not in str(error):
                raise
            raise CellError(self._unpacked(error)) from None
        finally:
            tracing.reset(code)
            _current.reset(current)

    def _finish(self, results: tuple[Expr, ...], trace: _Trace) -> None:
        self.next = _fuse(results)
        self.linears = _linears(self.next, trace, self.gates)
        used = topological(self.next)
        self.fused = frozenset(node.attrs[1] for node in used if node.op == "preact")
        self._check_names()
        self.learned = _learned(self)
        self._sizes()
        self._check_numbers()
        self.key = _canonical(self)

    def _check_names(self) -> None:
        """All that a layer learns must have names of their own; see ``layer.shapes``."""
        learned = [
            (f"{kind}_{name}", f"the {kind} of the projection of the {what}")
            for name, what in ((PROJECTION, "input"), (RECURRENT, "first state"))
            for kind in ("weight", "bias")
        ]
        for l in self.linears:
            if l.name != RECURRENT:
                kinds = ("weight", "bias") if l.bias else ("weight",)
                learned += [(f"{k}_{l.name}", f"the {k} of linear(..., {l.name!r})") for k in kinds]
        learned += [(name, f"the parameter {name!r}") for name in self.param_names]
        taken: dict[str, str] = {}
        for name, what in learned:
            if name.endswith("_reverse"):
                fail(
                    f"Cell {self.name}: a layer learns {what}; names that end in '_reverse' are "
                    "those of the reverse direction.",
                    "rename it.",
                )
            if name in taken:
                fail(
                    f"Cell {self.name}: a layer learns {taken[name]} and {what}, both by the name "
                    f"{name}.",
                    "rename one of them.",
                )
            taken[name] = what

    def _unpacked(self, error: ValueError) -> str:
        """Python's error about the number of names, with those that there are."""
        where, trace = "", error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code is self.function.__code__:
                where = line_of(trace.tb_frame.f_code, trace.tb_lineno)
            trace = trace.tb_next
        declared = {"gates": self.gates, "states": self.state_names, "params": self.param_names}
        shown = "; ".join(f"{what} {' '.join(names)}" for what, names in declared.items() if names)
        return f"{where}{error}.\nInstead: unpack all of them, in the declared order: {shown}."

    def _check_numbers(self) -> None:
        """Probabilities, bounds and divisors that follow from hyperparameters must be some."""
        values = ", ".join(f"{name}={value:g}" for name, value in self.hyper.items())
        given = f"Cell {self.name}: " + (f"given {values}, " if values else "")
        known: dict[Expr, float | None] = {}
        for node in topological(self.next):
            known[node] = _known(node, [known[arg] for arg in node.args], self.hyper)
            rate = known[node.args[0]] if node.op == "keep" else None
            if rate is not None and not 0.0 <= rate <= 1.0:
                fail(
                    f"{given}the probability of keeping, "
                    f"{node.args[0]}, is {rate:g}; expected one in [0, 1].",
                    "change the hyperparameter, or the expression.",
                )
            if node.op == "div" and known[divisor := node.args[1]] == 0.0:
                shown = "0" if is_const(divisor) else f"{divisor}, which is 0"
                fail(
                    f"{given}a value is divided by {shown}; expected another number.",
                    "change the hyperparameter, or the expression.",
                )
            if node.op == "minimum" and node.args[0].op == "maximum":  # clip
                low, high = known[node.args[0].args[1]], known[node.args[1]]
                if low is not None and high is not None and low > high:
                    fail(
                        f"{given}a value is clipped to between {low:g} "
                        f"and {high:g}; expected a lower bound that is not above the upper one.",
                        "change the hyperparameter, or the bounds.",
                    )

    def _check_result(self, result: Any, given: set[Expr]) -> tuple[Expr, ...]:
        """One node per state, made of what the function was ``given``."""
        names = " ".join(self.state_names)
        results = result if isinstance(result, (tuple, list)) else (result,)
        if isinstance(result, Gates) or len(results) != len(self.states):
            several = isinstance(result, Gates)
            found = f"all {result._what}s at once" if several else f"{len(results)} value(s)"
            fail(
                f"Cell {self.name} returned {found}, its states are {len(self.states)}: {names}.",
                "return the new states in the declared order, "
                f"`return {', '.join(self.state_names)}`.",
            )
        out = []
        for state, value in zip(self.states, results, strict=True):
            if not isinstance(value, (Expr, int, float)):
                fail(
                    f"Cell {self.name} returned {type(value).__name__} "
                    f"for the new state {state.name!r}.",
                    "return a traced value.",
                )
            node = as_expr(value)
            if is_boolean(node):
                fail(
                    f"Cell {self.name} returned a condition for the new state {state.name!r}.",
                    "where(condition, 1.0, 0.0).",
                )
            out.append(node)
        for node in topological(out):
            if node.op not in TABLE and node.op != "const" and node not in given:
                fail(
                    f"Cell {self.name} returned a value made of `{node}`, which belongs to another "
                    "cell.",
                    "use only what the function is given, and what it computes from that.",
                )
        return tuple(out)

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Refuses sizes that heads of a matmul, or groups of a reduction, do not divide.

        Args:
            sizes: what the size symbols stand for, those that are known.

        Raises:
            ValueError: naming the size, what splits it, and sizes to choose.
        """
        parts: list[tuple[str, int, object]] = []
        for l in self.linears:
            parts += [(l.in_size, l.heads, l), (l.out_size, l.heads, l)]
        parts += [(s, n.attrs[0], n) for n, s in self.sizes.items() if n.op in REDUCTIONS]
        for symbol, count, what in parts:
            size = sizes.get(symbol, 0)
            if size % count:
                below = size - size % count
                choice = f"{below} or {below + count}" if below else f"{count}"
                raise ValueError(
                    f"Cell {self.name}: given {symbol}={size}"
                    f"{' (the hidden size)' * (symbol == 'H')}; expected a multiple of {count}, "
                    f"because `{what}` splits the units into {count} equal parts. Choose {choice}, "
                    "or other heads or groups in the cell."
                )

    def _sizes(self) -> None:
        """Every value has one size: element-wise ops tie sizes together, matmuls change them."""
        parent: dict[Any, Any] = {}

        def find(item: Any) -> Any:
            parent.setdefault(item, item)
            while parent[item] is not item:
                item = parent[item]
            return item

        def tie(a: Any, b: Any, where: Expr | str) -> None:
            a, b = find(a), find(b)
            if a is b:
                return
            if isinstance(a, str) and isinstance(b, str):
                place = where if isinstance(where, str) else f"`{where}`"
                fail(
                    f"Cell {self.name}: the sizes do not close: {place} joins a value of size {a} "
                    f"with one of size {b}.",
                    'change the size with linear(value, "name"), '
                    "or declare the state with the size it has.",
                )
            if isinstance(a, str):
                a, b = b, a
            parent[a] = b

        sizes = {state.name: state.size for state in self.states}
        named = {l.name: l.out_size for l in self.linears if l.out_size}
        order = topological(self.next)
        numbers: set[Expr] = set()  # and what is computed from numbers alone: they fit any size
        for node in order:
            if node.op in ("const", "hyper") or (
                node.op in TABLE
                and node.op not in REDUCTIONS
                and all(arg in numbers for arg in node.args)
            ):
                numbers.add(node)
            elif node.op in ("x", "param", "static", "preact"):
                tie(node, "H", node)
            elif node.op == "input":
                tie(node, INPUT, node)
            elif node.op == "recurrent_mask":
                tie(node, self.states[0].size, node)
            elif node.op == "linear":
                name = node.attrs[0]  # all outputs of a matmul are of one size
                tie(node, "H" if _is_recurrent(node) else ("linear", name), node)
                if name in named:
                    tie(node, named[name], node)
            elif node.op == "state":
                tie(node, sizes[node.attrs[0]], node)
            else:
                for arg in node.args:
                    if arg not in numbers:
                        tie(node, arg, node)
        for state, node in zip(self.states, self.next, strict=True):
            if node not in numbers:
                tie(node, state.size, f"the new state {state.name!r}")

        def size(node: Expr) -> str:
            root = find(node)
            return root if isinstance(root, str) else "H"

        self.sizes = {node: size(node) for node in order if node not in numbers}
        outputs = {n.attrs[0]: n for n in order if n.op in ("linear", "preact")}
        self.linears = tuple(
            replace(l, in_size=size(l.operand), out_size=size(outputs[l.name]))
            for l in self.linears
        )


def with_projection(cell: Cell) -> Cell:
    """The cell whose step begins with the input projection, as one more matmul, the last.

    Its operand is a leaf ``input`` of the size ``INPUT``. It is for engines alone: nothing is
    derived of it, and it cannot be pickled.
    """
    raw = Expr("input")

    def rule(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if node.op == "x":
            return Expr("linear", (raw,), (PROJECTION, *node.attrs))
        if node.op == "preact":
            enters = Expr("linear", (raw,), (PROJECTION, node.attrs[1]))
            return apply("add", enters, Expr("linear", args, node.attrs))
        return None

    new = _rewritten(cell, rule)
    operands = _operands(new)
    linears = [replace(l, operand=operands[l.name]) for l in cell.linears]
    used = {n.attrs for n in topological(new.next) if n.op == "linear"}
    entering = tuple(gate for gate in cell.gates if (PROJECTION, gate) in used)
    if entering:
        last = Linear(PROJECTION, raw, entering, 1, True, INPUT, "H", cell.gates)
        linears.append(last)
    new.linears, new.fused = tuple(linears), frozenset()
    return _finished(new)


@functools.lru_cache(maxsize=64)
def with_recurrent_mask(cell: Cell, per_gate: bool) -> Cell:
    """The cell whose recurrent matmul multiplies the first state times a mask, given per sequence.

    The mask is a leaf ``recurrent_mask`` of the first state's size. One ``per_gate`` makes a matmul
    per gate, each on its own rows of the one weight. For engines alone, as ``with_projection``.
    """

    def rule(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if not _is_recurrent(node):
            return None
        (state,), (name, gate) = args, node.attrs
        index = cell.gates.index(gate) if per_gate else 0
        masked = apply("mul", state, Expr("recurrent_mask", (), (index,)))
        return Expr(node.op, (masked,), (f"{name}.{gate}" if per_gate else name, gate))

    new = _rewritten(cell, rule)
    operands = _operands(new)
    linears: list[Linear] = []
    for l in cell.linears:
        each = [l]
        if per_gate and l.name == RECURRENT:
            each = [replace(l, name=f"{l.name}.{gate}", outputs=(gate,)) for gate in l.outputs]
        linears += [replace(one, operand=operands[one.name]) for one in each]
    new.linears = tuple(linears)
    return _finished(new)


def _learned(cell: Cell) -> tuple[str, ...]:
    """Public names of all that one direction of a layer may learn."""
    recurrent = any(l.recurrent for l in cell.linears)
    names = [f"{kind}_ih" for kind in ("weight", "bias")]
    names += [f"{kind}_hh" for kind in ("weight", "bias") if recurrent]
    for l in cell.linears:
        if not l.recurrent:
            names += [l.weight, l.bias_name] if l.bias else [l.weight]
    return (*names, *cell.param_names)


def _is_recurrent(node: Expr) -> bool:
    """Whether a node is an output of the matmul behind `r`."""
    return node.op in ("linear", "preact") and node.attrs[0].partition(".")[0] == RECURRENT


def _rewritten(cell: Cell, rule: Callable[[Expr, tuple[Expr, ...]], Expr | None]) -> Cell:
    new = object.__new__(Cell)
    new.__dict__ |= cell.__dict__
    new.next = tuple(rewrite(cell.next, rule))
    return new


def _operands(cell: Cell) -> dict[str, Expr]:
    matmuls = (n for n in topological(cell.next) if n.op in ("linear", "preact"))
    return {n.attrs[0]: n.args[0] for n in matmuls}


def _finished(cell: Cell) -> Cell:
    cell._sizes()
    cell.key = _canonical(cell)
    cell.__dict__.pop("keeps", None)  # a cached property of the cell before
    return cell


def _fuse(results: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Turns ``x.k + r.k`` into one pre-activation where neither appears anywhere else.

    The matmul then accumulates onto the input projection, and one gradient serves both.
    """
    users: dict[Expr, set[Expr]] = {}
    for node in topological(results):
        for arg in node.args:
            users.setdefault(arg, set()).add(node)
    roots = set(results)

    def rule(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if node.op == "add" and {arg.op for arg in node.args} == {"x", "linear"}:
            x, r = sorted(node.args, key=lambda arg: arg.op != "x")
            alone = all(len(users[arg]) == 1 and arg not in roots for arg in (x, r))
            if alone and r.attrs == (RECURRENT, x.attrs[0]):
                return Expr(
                    "preact",
                    next(n for n, old in zip(args, node.args, strict=True) if old is r).args,
                    r.attrs,
                )
        return None

    return tuple(rewrite(results, rule))


def _linears(
    results: tuple[Expr, ...], trace: _Trace, gates: tuple[str, ...]
) -> tuple[Linear, ...]:
    found: dict[str, tuple[Expr, set[str]]] = {}
    for node in topological(results):
        if node.op in ("linear", "preact"):
            name, output = node.attrs
            found.setdefault(name, (node.args[0], set()))[1].add(output)
    out = []
    for name, (value, used) in found.items():
        declared, heads, bias, out_size = trace.linears.get(name, (gates, 1, True, None))
        outputs = tuple(output for output in declared if output in used)
        out.append(Linear(name, value, outputs, heads, bias, "", out_size or "", declared))
    return tuple(out)


def _known(node: Expr, values: Sequence[float | None], hyper: Mapping[str, float]) -> float | None:
    """The value of a number that follows from hyperparameters by plain arithmetic, and so from the
    ``values`` of its arguments.
    """
    if node.op == "const":
        return float(node.attrs[0])
    if node.op == "hyper":
        return hyper[node.attrs[0]]
    if node.op not in ("neg", "add", "sub", "mul", "div"):
        return None
    if None in values or (node.op == "div" and values[1] == 0.0):
        return None
    found: float = TABLE[node.op].meaning(None, *values)
    return found


def _canonical(cell: Cell) -> str:
    """The cell as text: equal for equal computations, whatever the names of function and file."""
    order = topological(cell.next)
    index = {node: i for i, node in enumerate(order)}
    lines = [f"{i} {n.op} {n.attrs!r} {[index[a] for a in n.args]}" for i, n in enumerate(order)]
    lines.append(f"next {[index[n] for n in cell.next]}")
    lines.append(f"{cell.gates} {cell.states} {cell.param_names} {cell.static} {cell.bias}")
    for l in cell.linears:
        lines.append(f"{(l.name, l.declared, l.outputs, l.heads, l.bias, l.in_size, l.out_size)}")
    return "\n".join(lines)


def _sort_hyperparameters(
    function: Callable[..., Any], given: dict[str, Any]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Keyword-only arguments: floats are run-time values, everything else selects the graph."""
    signature = inspect.signature(function)
    keyword = {p.name: p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY}
    for name in given:
        if name not in keyword:
            fail(
                f"Cell {function.__name__} has no hyperparameter {name!r}; "
                f"it has: {', '.join(keyword) or 'none'}.",
                "add a keyword-only argument to its function.",
            )
    hyper: dict[str, float] = {}
    structure: dict[str, Any] = {}
    for name, parameter in keyword.items():
        value = plain(given.get(name, parameter.default))
        said = f"Cell {function.__name__}: hyperparameter {name}"
        if value is parameter.empty:
            fail(f"{said} has no default value.", f"write one where it is declared: {name}=0.5.")
        annotated = str(parameter.annotation)
        declared_float = "float" in annotated or isinstance(plain(parameter.default), float)
        if declared_float and isinstance(value, (str, bool)):
            kind = type(value).__name__
            if kind not in annotated:
                fail(f"{said} is the {kind} {value!r}; expected a number.", f"{name}=0.5.")
        if isinstance(value, float) or (
            declared_float and isinstance(value, int) and not isinstance(value, bool)
        ):
            if math.isnan(value):
                fail(f"{said} is NaN; expected a number.", f"{name}=0.5.")
            hyper[name] = float(value)
        elif value is None or isinstance(value, (bool, int, str, tuple)):
            structure[name] = value
        else:
            fail(
                f"{said} is a {type(value).__name__}; expected a float (a run-time value), or a "
                "bool, int, str, tuple or None (which select the graph).",
                "give one of these; an array is a per-unit parameter, params=.",
            )
    return hyper, structure


def _find(module: str, qualname: str) -> Cell:
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, Cell):
        fail(
            f"Cannot restore cell {qualname!r}: "
            f"module {module!r} has no such cell at its top level.",
            "define it there, by its own name.",
        )
    return found


def _restore(module: str, qualname: str, given: dict[str, Any]) -> Cell:
    return _find(module, qualname)(**given)


# What a word of a declaration may say, and an example.
_FORMS = {
    "gates": ("name", "i f g o"),
    "state": ("name, name:size or name=value", "h:P c m=-inf"),
    "params": ("name or name=value", "p_i gain=1"),
    "static": ("name", "e"),
}
_SYMBOL = re.compile(r"[A-Za-z]\w*")


def _words(text: str, what: str) -> list[tuple[str, str | None, str | None]]:
    """Splits ``"h:P c m=-inf"`` into (name, size, value)."""
    declared = f"@cell({what}={brief(text)})"
    form, example = _FORMS[what]
    example = f'{what}="{example}"'
    if not isinstance(text, str):
        fail(f"{declared}: expected one string.", f"write {example}, with blanks between.")
    out: list[tuple[str, str | None, str | None]] = []
    for word in text.split():
        match = re.fullmatch(rf"({_SYMBOL.pattern})(?::({_SYMBOL.pattern}))?(?:=(\S+))?", word)
        if match is None:
            fail(f"{declared}: cannot read {word!r}; expected {form}.", f"write {example}.")
        name, size, value = match.groups()
        if size and "size" not in form:
            fail(
                f"{declared}: cannot read {word!r}; expected {form}.",
                f'write {name!r}: it has H units. Of another size are states, state="h:P c", and '
                'results of linear(value, "name", size="P").',
            )
        if value and "value" not in form:
            fail(
                f"{declared}: cannot read {word!r}; expected {form}.",
                f'write {name!r}. Initial values have states, state="h c=1", and params="p=1".',
            )
        if size:
            _check_symbol(size, declared)
        out.append((name, size, value))
    names = [name for name, _, _ in out]
    if len(set(names)) != len(names):
        fail(f"{declared}: a name appears twice.", "give each a name of its own.")
    return out


def _check_symbol(size: str, shown: str) -> None:
    """Layers take sizes by keyword."""
    if size in RESERVED:
        fail(
            f"{shown}: a size cannot be named {size!r}: layers take sizes by keyword, and have an "
            "argument of that name.",
            "choose another symbol, such as P.",
        )


def _number(text: str | None, what: str) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        fail(
            f"@cell({what}): initial value {text!r} is not a number.",
            "write digits, or inf: name=0.5, name=-inf.",
        )
    return value


def cell(
    function: None = None,
    /,
    *,
    gates: str = "",
    state: str = "h",
    params: str = "",
    static: str | None = None,
    bias: bool = True,
) -> Callable[[Callable[..., Any]], Cell]:
    """Makes a recurrent cell out of a function ``f(x, r, s[, p][, e])`` of one time step.

    Args:
        gates: names of the gates, in the order of the weights; ``x`` and ``r`` unpack in this
            order.
        state: names of the states, ``name[:size][=initial]``; the first is the output.
        params: names of per-unit parameters, ``name[=initial]``; without any the function has no
            ``p``.
        static: name of an input given once per sequence, ``[B, H]``; the function's last argument.
        bias: whether the layer's projections carry biases; a cell that places its own sets False.

    Raises:
        CellError: for what a cell cannot say, naming the line and what to write instead.

    Example:
        >>> from anycell import cell, sigmoid, tanh
        >>> @cell(gates="f g", state="h")
        ... def MGU2(x, r, s):
        ...     f = sigmoid(r.f)
        ...     return (1 - f) * s.h + f * tanh(x.g + r.g)
    """
    if function is not None:
        fail(
            f"@cell was given {function!r} in place of a declaration.",
            '@cell(gates="i f g o", state="h c") above the function.',
        )
    gate_names = tuple(name for name, _, _ in _words(gates, "gates"))
    states = tuple(
        State(n, z or "H", _number(v, "state") or 0.0) for n, z, v in _words(state, "state")
    )
    parameters = tuple(Param(n, _number(v, "params")) for n, _, v in _words(params, "params"))
    if not gate_names:
        fail(
            "@cell(gates=''): a cell needs at least one gate, or the input never enters it.",
            'name one: gates="a".',
        )
    if not states:
        fail(
            "@cell(state=''): a cell needs at least one state; the first is its output.",
            'name one: state="h".',
        )
    if static is not None and len(_words(static, "static")) != 1:
        fail(
            f"@cell(static={static!r}): expected one name, or None.",
            'name one, static="e", [B, H]; where it stands for several, compute them from it with '
            'linear(e, "name", gates="i f").',
        )
    bias = boolean(bias, f"@cell(bias={brief(bias)})")
    expected = ["x", "r", "s"] + ["p"] * bool(parameters) + ["e"] * (static is not None)

    def decorate(function: Callable[..., Any]) -> Cell:
        if not (inspect.isfunction(function) or inspect.ismethod(function)):
            fail(
                f"@cell(...) was given {function!r}.",
                "decorate a function, written with def or lambda.",
            )
        kinds = inspect.Parameter
        arguments = inspect.signature(function).parameters.values()
        for p in arguments:
            if p.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD):
                fail(
                    f"Cell {function.__name__} takes {p}, to which nothing is ever given.",
                    "name each hyperparameter, as a keyword-only argument with a default.",
                )
        positional = [
            p for p in arguments if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        ]
        if len(positional) != len(expected):
            fail(
                f"Cell {function.__name__} takes {len(positional)} positional arguments; "
                f"with this declaration it must take {len(expected)}: ({', '.join(expected)}).",
                f"write def {function.__name__}({', '.join(expected)}), hyperparameters behind a *,"
                " and declare what is missing: gates=, state=, params=, static=.",
            )
        return Cell(function, gate_names, states, parameters, static, bias, {})

    return decorate
