"""``@cell`` traces a Python function once into a ``Cell``, a checked graph with sizes."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import pickle
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from anycell.lang.declare import (
    INPUT,
    MOST,
    ONE,
    PROJECTION,
    RECURRENT,
    Declaration,
    Gate,
    Linear,
    Param,
    State,
    number,
    sort_hyperparameters,
    words,
)
from anycell.lang.expr import (
    REDUCTIONS,
    CellError,
    Expr,
    as_expr,
    boolean,
    brief,
    fail,
    is_const,
    line_of,
    place,
    plain,
    rewrite,
    said_at,
    source_line,
    topological,
    tracing,
)
from anycell.lang.ops import TABLE, is_boolean
from anycell.lang.sizes import sizes_of
from anycell.lang.trace import Declared, Gates, Trace, current, keep, linear, of_row
from anycell.recent import add_recent

# The names that other modules import from here; `declare` and `trace` define some of them.
__all__ = [
    "INPUT", "ONE", "RECURRENT", "Cell", "Gates", "Linear", "Param", "State", "cell", "keep",
    "linear",
]  # fmt: skip

# Names of the arrays of each call, as in ``anycell.plan.arrays``: no parameter may take one.
ARRAYS = frozenset(
    "x mask resets static recurrent_mask gates d_gates product saved d_params d_static".split()
)
Rewritten = TypeVar("Rewritten", bound="Cell")
Declaring = TypeVar("Declaring", bound="Callable[..., Any]")
VARIANTS = 64  # how many cells with other hyperparameters a cell remembers


def _exactly(given: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Returns a key that tells hyperparameters apart: True from 1, 0.0 from -0.0, but not two NaN.
    Returns None unless every value is None, a bool, an int, a float or a str.
    """
    if all(value is None or type(value) in (bool, int, float, str) for value in given.values()):
        return tuple([(name, repr(value)) for name, value in given.items()])
    return None


class Cell:
    """A recurrent cell: what happens between the input projection and the next state, as a graph.

    Made by ``@cell``. Calling a cell with keyword arguments returns the cell with those
    hyperparameters: ``PeepholeLSTM(coupled=True, cell_clip=3.0)``.

    Attributes:
        name: the name of the function.
        gates, states, params, static: as declared, gates and the static input by name.
        gate_sizes, static_size: their size symbols.
        broadcasts: whether a size of 1 is declared. Then a value of one number per row (``narrow``)
            has the size 1, and combines with values of any size; in other cells it has the size of
            the values that it was computed from.
        hyper: run-time hyperparameters (floats), by name; a new value compiles nothing.
        structure: the other keyword arguments, which select the graph.
        bias: whether the projections of the layer carry biases.
        next: one expression per state, the new states.
        declared: the declaration of each matmul of a step, by name, in order of evaluation.
        linears: these matmuls, with their operands, used outputs and sizes from the graph.
        by_weight: the first matmul by each weight, by the weight's public name.
        learned: the public names of all arrays that one direction of a layer may learn.
        fused: gates whose input and recurrent projection are only ever added.
        sizes: the size symbol of each node of the graph except plain numbers.
        text: what ``from_text`` made the cell from; None for other cells.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        declaration: Declaration,
        given: dict[str, Any],
    ) -> None:
        self.function, self.declaration = function, declaration
        gates, self.states, self.params, static, self.bias = declaration
        self.gates = tuple(gate.name for gate in gates)
        self.gate_sizes = {gate.name: gate.size for gate in gates}
        self.static = None if static is None else static.name
        self.static_size = "H" if static is None else static.size
        self.name, self.text = function.__name__, function.__globals__.get("__text__")
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(self, name, getattr(function, name))
        self.given = given = {name: plain(value) for name, value in given.items()}
        self.hyper, self.structure = sort_hyperparameters(function, given)
        self._variants: dict[Any, Cell] = {}
        self._trace()

    # -- use -------------------------------------------------------------------------------------
    def __call__(self, *args: Any, **hyper: Any) -> Cell:
        """Returns the cell with other hyperparameters; see the signature of its function.

        Layers ask for the same few cells again and again, so up to ``VARIANTS`` are remembered.
        """
        if args:
            fail(
                f"Cell {self.name} was called with {len(args)} positional argument(s); "
                "it takes only hyperparameters, by name.",
                f"give them by name; inside a cell, call {self.name}.function(x, r, s).",
            )
        if not hyper:
            return self
        given = {**self.given, **{name: plain(value) for name, value in hyper.items()}}
        key = _exactly(given)
        if key in self._variants:
            return self._variants[key]
        new = Cell(self.function, self.declaration, given)
        if key is not None:
            add_recent(self._variants, key, new, VARIANTS)
        return new

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.given.items())})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cell) and all(
            getattr(self, part) == getattr(other, part) for part in ("key", "hyper", "name")
        )

    def __hash__(self) -> int:
        return hash((self.key, self.name))

    def __copy__(self) -> Cell:
        return self

    def __deepcopy__(self, memo: Any) -> Cell:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.text is not None:
            return self.function.__globals__["__restore__"], (self.text, self.given)
        where = self.function.__module__, self.function.__qualname__
        try:
            _find(*where)
        except (CellError, ImportError) as error:  # now, not when the file is read
            raise pickle.PicklingError(
                f"{error}\nInstead: define the cell at the top level of a module, by its own name; "
                "or save what the layer has learned, its state_dict() or parameters."
            ) from None
        return _restore, (*where, self.given)

    @functools.cached_property
    def state_names(self) -> tuple[str, ...]:
        return tuple(state.name for state in self.states)

    @functools.cached_property
    def param_names(self) -> tuple[str, ...]:
        return tuple(param.name for param in self.params)

    @functools.cached_property
    def keeps(self) -> tuple[Expr, ...]:
        """The random masks of the graph."""
        return tuple(node for node in topological(self.next) if node.op == "keep")

    @functools.cached_property
    def declared_sizes(self) -> set[str]:
        """The size symbols of gates, states, parameters and the static input."""
        sizes = {*self.gate_sizes.values(), self.static_size}
        return sizes | {s.size for s in self.states} | {p.size for p in self.params}

    # -- the input projection ----------------------------------------------------------------------
    def places(self, sizes: Mapping[str, int]) -> dict[str, slice]:
        """The columns of each gate in the projected input: its rows in ``weight_ih``."""
        places, at = dict[str, slice](), 0
        for gate, size in self.gate_sizes.items():
            places[gate] = slice(at, at + sizes[size])
            at = at + sizes[size]  # not in place: in traces sizes are tensors
        return places

    def width(self, sizes: Mapping[str, int]) -> int:
        """The columns of the projected input: those of all gates."""
        total = 0
        for size in self.gate_sizes.values():
            total = total + sizes[size]
        return total

    @functools.cached_property
    def shown_width(self) -> str:
        """The columns of the projected input in symbols: "4 * H", or "2 * H + P + 1"."""
        counts = Counter(self.gate_sizes.values())
        terms = [f"{n} * {s}" if n > 1 or len(counts) == 1 else s for s, n in counts.items()]
        return " + ".join(terms) or "0"

    # -- tracing ---------------------------------------------------------------------------------
    def _trace(self) -> None:
        def leaves(op: str, names: Iterable[str]) -> dict[str, Expr]:
            return {name: Expr(op, (), (name,)) for name in names}

        gates, declared, params, static, _ = self.declaration
        x, states = leaves("x", self.gates), leaves("state", self.state_names)
        first = states[self.state_names[0]]
        of_h = tuple(gate.name for gate in gates if gate.size == "H")
        r = {g: Expr("linear", (first,), (RECURRENT, g)) for g in of_h}
        parameters, hyper = leaves("param", self.param_names), leaves("hyper", self.hyper)
        once = leaves("static", () if self.static is None else (self.static,))
        kinds = x, r, states, parameters, once, hyper
        trace = Trace({leaf for named in kinds for leaf in named.values()})

        def seen(named: Mapping[str, Expr], sizes: Iterable[Gate | State | Param]) -> Any:
            return {item.name: of_row(named[item.name], item.size) for item in sizes}

        args: list[Any] = [
            Gates("gate", seen(x, gates)),
            Gates("gate", r, {g.name: self._without_r(g) for g in gates if g.name not in r}),
            Gates("state", seen(states, declared)),
        ]
        args += [Gates("parameter", seen(parameters, params))] * bool(params)
        args += seen(once, (static,)).values() if static else ()
        code, outer = tracing.set(self.function.__code__), current.set(trace)
        try:
            result = self.function(*args, **self.structure, **hyper)
            graph = _fuse(self._check_result(result, trace.given))
            matmuls = (n.attrs[0] for n in topological(graph) if n.op in ("linear", "preact"))
            recurrent = Declared(of_h, 1, True, None)
            self._derive(graph, {name: trace.linears.get(name, recurrent) for name in matmuls})
            self._check_names()
            self._check_numbers()
        except ValueError as error:
            if isinstance(error, CellError) or "to unpack" not in str(error):
                raise
            raise CellError(self._unpacked(error)) from None
        finally:
            tracing.reset(code)
            current.reset(outer)

    def _without_r(self, gate: Gate) -> tuple[str, str]:
        """The error about ``r`` of a gate that has no recurrent projection."""
        of_h = ", ".join(f"x.{name} + r.{name}" for name, s in self.gate_sizes.items() if s == "H")
        return (
            f"The gate {gate.name!r} has the size {gate.size}, and `r` only gates of size H.",
            f'use x.{gate.name} alone, or with linear(s.{self.states[0].name}, "name", '
            f'size="{gate.size}"); add the others one by one{of_h and ": "}{of_h}.',
        )

    def _derive(self, graph: tuple[Expr, ...], declared: Mapping[str, Declared]) -> None:
        """Sets the graph, whose matmuls are ``declared``, and everything derived from it."""
        self.next, self.declared = graph, dict(declared)
        self.broadcasts = ONE in self.declared_sizes | {d.size for d in declared.values()}
        self.linears = _linears(graph, declared)
        if len(self.linears) > MOST:
            problem = (
                f"Cell {self.name} has {len(self.linears)} linears; a cell has at most {MOST}."
            )
            fail(problem, 'compute several outputs by one: linear(v, "name", gates="a b c").')
        self.fused = frozenset(n.attrs[1] for n in topological(graph) if n.op == "preact")
        self.learned = learned(self)
        leaves: dict[str, dict[Any, str]] = {
            "x": self.gate_sizes, "static": {self.static: self.static_size},
            "state": {state.name: state.size for state in self.states},
            "param": {param.name: param.size for param in self.params},
        }  # fmt: skip
        self.sizes, self.linears = sizes_of(
            self.name, self.states, leaves, graph, self.linears, self.broadcasts
        )
        self.by_weight: dict[str, Linear] = {}
        for l in self.linears:
            self.by_weight.setdefault(l.weight, l)
        # Each split size, its number of parts, and what splits it. They are listed here because
        # torch.compile of PyTorch 2.10 cannot trace a walk over ``sizes`` in a call.
        split: list[tuple[str, int, object]] = []
        for l in self.linears:
            split += [(l.in_size, l.heads, l), (l.out_size, l.heads, l)]
        split += [(s, n.attrs[0], n) for n, s in self.sizes.items() if n.op in REDUCTIONS]
        for size, count, op in split:
            if size == ONE and count > 1:
                problem = f"Cell {self.name}: `{op}` splits a value of size 1 into {count} heads."
                fail(problem, "leave out heads=.")
        self._split = split
        self.key: str = _canonical(self)

    def _check_names(self) -> None:
        """Refuses reserved names, and a name for two learned arrays; see ``layer.signature``."""
        matmuls = [(PROJECTION, "the projection of the input", True)]
        matmuls += [(RECURRENT, "the projection of the first state", True)]
        further = {l.shared: l.bias for l in self.linears if l.name != RECURRENT}
        matmuls += [(name, f"linear(..., {name!r})", bias) for name, bias in further.items()]
        learned = [
            (f"{kind}_{name}", f"the {kind} of {label}")
            for name, label, bias in matmuls
            for kind in ("weight", "bias")[: 1 + bias]
        ]
        learned += [(name, f"the parameter {name!r}") for name in self.param_names]
        taken: dict[str, str] = {}
        for name in set(self.param_names) & ARRAYS:
            fail(
                f"Cell {self.name}: the parameter {name!r} has the name of an array of each call.",
                f"rename it; these names are taken: {', '.join(sorted(ARRAYS))}.",
            )
        for name, label in learned:
            if name.endswith("_reverse"):
                fail(
                    f"Cell {self.name}: a layer learns {label}; names that end in '_reverse' "
                    "belong to the reverse direction.",
                    "rename it.",
                )
            if name in taken:
                fail(
                    f"Cell {self.name}: a layer learns {taken[name]} and {label}, both by the name "
                    f"{name}.",
                    "rename one of them.",
                )
            taken[name] = label

    def _unpacked(self, error: ValueError) -> str:
        """Python's error about unpacking, with the line of the cell and the declared names."""
        where, code = "", self.function.__code__
        for frame, line in traceback.walk_tb(error.__traceback__):
            if frame.f_code is code:
                where = line_of(code, line)
        declared = {"gates": self.gates, "states": self.state_names, "params": self.param_names}
        shown = "; ".join(f"{what} {' '.join(names)}" for what, names in declared.items() if names)
        return f"{where}{error}.\nInstead: unpack all of them, in the declared order: {shown}."

    def _check_numbers(self) -> None:
        """Refuses hyperparameters that make a probability, a divisor or clipping bounds invalid."""
        values = ", ".join(f"{name}={value:g}" for name, value in self.hyper.items())
        given = f"Cell {self.name}: " + (f"given {values}, " if values else "")
        known: dict[Expr, float | None] = {}
        for node in topological(self.next):
            known[node] = _known(node, [known[arg] for arg in node.args], self.hyper)
            rate = known[node.args[0]] if node.op == "keep" else None
            remedy = "change the hyperparameter, or the expression."
            if rate is not None and not 0.0 <= rate <= 1.0:
                problem = f"{node.args[0]}, is {rate:g}; expected one in [0, 1]."
                fail(f"{given}the probability of keeping, {problem}", remedy)
            if node.op == "div" and known[divisor := node.args[1]] == 0.0:
                shown = "0" if is_const(divisor) else f"{divisor}, which is 0"
                fail(f"{given}a value is divided by {shown}; expected another number.", remedy)
            if node.op == "sqrt" and (inside := node.args[0]).op == "add":  # layer_norm
                average, eps = inside.args[0], known[inside.args[1]]
                squares = average.op == "mean" and (square := average.args[0]).op == "mul"
                if (
                    squares
                    and square.args[0] is square.args[1]
                    and eps is not None
                    and not eps >= 0
                ):
                    problem = (
                        f"mean of squares plus {eps:g}; expected a number that is not negative."
                    )
                    fail(f"{given}a root is taken of a {problem}", remedy)
            if node.op == "minimum" and node.args[0].op == "maximum":  # clip
                low, high = known[node.args[0].args[1]], known[node.args[1]]
                if low is not None and high is not None and not low <= high:
                    fail(
                        f"{given}a value is clipped to between {low:g} "
                        f"and {high:g}; expected a lower bound that is not above the upper one.",
                        "change the hyperparameter, or the bounds.",
                    )

    def _check_result(self, result: Any, known: set[Expr]) -> tuple[Expr, ...]:
        """Returns one node per state, made only from ``known`` nodes, those of the arguments."""
        names = " ".join(self.state_names)
        results = result if isinstance(result, (tuple, list)) else (result,)
        if isinstance(result, Gates) or len(results) != len(self.states):
            several = isinstance(result, Gates)
            returned = f"all {result._what}s at once" if several else f"{len(results)} value(s)"
            fail(
                f"Cell {self.name} returned {returned}; "
                f"it declares {len(self.states)} state(s): {names}.",
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
                problem = f"Cell {self.name} returned a condition for the new state {state.name!r}."
                fail(problem, "where(condition, 1.0, 0.0).")
            out.append(node)
        for node in topological(out):
            if node.op not in TABLE and node.op != "const" and node not in known:
                fail(
                    f"Cell {self.name} returned a value made of `{node}`, which belongs to another "
                    "cell.",
                    "use only what the function is given, and what it computes from that.",
                )
        return tuple(out)

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Refuses sizes that heads of a matmul, or groups of a reduction, do not divide.

        Args:
            sizes: the numbers that the known size symbols stand for.

        Raises:
            ValueError: naming the size, what splits it, and sizes to choose.
        """
        for symbol, count, label in self._split:
            size = sizes.get(symbol, 0)
            if size % count:
                below = size - size % count
                choice = f"{below} or {below + count}" if below else f"{count}"
                raise ValueError(
                    f"Cell {self.name}: given {symbol}={size}"
                    f"{' (the hidden size)' * (symbol == 'H')}; expected a multiple of {count}, "
                    f"because `{label}` splits the units into {count} equal parts. Choose "
                    f"{choice}, or other heads or groups in the cell."
                )


_CACHED = {n for n, v in vars(Cell).items() if isinstance(v, functools.cached_property)}


def learned(cell: Cell) -> tuple[str, ...]:
    """Returns the public names of all arrays that one direction of a layer may learn."""
    names = [f"weight_{PROJECTION}", f"bias_{PROJECTION}"]
    for l in sorted(cell.linears, key=lambda l: not l.recurrent):
        names += [l.weight, l.bias_name][: 1 + l.bias]
    return tuple(dict.fromkeys((*names, *cell.param_names)))


def rewritten(
    cell: Cell,
    rule: Callable[[Expr, tuple[Expr, ...]], Expr | None],
    declared: Mapping[str, Declared],
    kind: type[Rewritten] = Cell,  # type: ignore[assignment]
    **changes: Any,
) -> Rewritten:
    """Returns a copy of a cell whose graph ``rule`` rewrites; see ``remade``."""
    return remade(cell, tuple(rewrite(cell.next, rule)), declared, kind, **changes)


def remade(
    cell: Cell,
    graph: tuple[Expr, ...],
    declared: Mapping[str, Declared],
    kind: type[Rewritten] = Cell,  # type: ignore[assignment]
    **changes: Any,
) -> Rewritten:
    """Returns a copy of a cell with another graph, whose matmuls ``declared`` orders.

    Args:
        kind: the class of the copy.
        changes: new values of attributes.
    """
    new = object.__new__(kind)
    kept = {n: v for n, v in vars(cell).items() if n not in _CACHED}
    new.__dict__ |= kept | changes
    new._derive(graph, declared)
    return new


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
                return Expr("preact", args[0 if node.args[0] is r else 1].args, r.attrs)
        return None

    return tuple(rewrite(results, rule))


def _linears(graph: tuple[Expr, ...], declared: Mapping[str, Declared]) -> tuple[Linear, ...]:
    """The matmuls of a graph, in the order of their declarations; sizes are found later."""
    operands: dict[str, Expr] = {}
    used: dict[str, set[str]] = {}
    for node in topological(graph):
        if node.op in ("linear", "preact"):
            name, output = node.attrs
            operands[name] = node.args[0]
            used.setdefault(name, set()).add(output)
    return tuple(
        Linear(
            name, operands[name], tuple(output for output in d.outputs if output in used[name]),
            d.heads, d.bias, "", d.size or "", d.outputs,
        )
        for name, d in declared.items()
        if name in used
    )  # fmt: skip


def _known(node: Expr, values: Sequence[float | None], hyper: Mapping[str, float]) -> float | None:
    """The value of a node that plain arithmetic computes from numbers and hyperparameters, with the
    ``values`` of its arguments; None for other nodes, and for a division by 0.
    """
    if node.op == "const":
        return float(node.attrs[0])
    if node.op == "hyper":
        return hyper[node.attrs[0]]
    if node.op not in ("neg", "add", "sub", "mul", "div"):
        return None
    if None in values or (node.op == "div" and values[1] == 0.0):
        return None
    return TABLE[node.op].meaning(None, *values)


def _canonical(cell: Cell) -> str:
    """The cell as text: equal for equal computations, whatever the names of function and file."""
    order = topological(cell.next)
    index = {node: i for i, node in enumerate(order)}
    lines = [f"{i} {n.op} {n.attrs!r} {[index[a] for a in n.args]}" for i, n in enumerate(order)]
    lines.append(f"next {[index[n] for n in cell.next]}")
    lines.append(f"{cell.gates} {cell.states} {cell.param_names} {cell.static} {cell.bias}")
    sizes = [*cell.gate_sizes.values(), *[p.size for p in cell.params], cell.static_size]
    lines += [f"sizes {sizes}"] * (set(sizes) != {"H"})
    for l in cell.linears:
        lines.append(f"{(l.name, l.declared, l.outputs, l.heads, l.bias, l.in_size, l.out_size)}")
    return "\n".join(lines)


def _find(module: str, qualname: str) -> Cell:
    value: Any = importlib.import_module(module)
    for part in qualname.split("."):
        value = getattr(value, part, None)
    if not isinstance(value, Cell):
        fail(
            f"Cannot restore cell {qualname!r}: "
            f"module {module!r} has no such cell at its top level.",
            "define it there, by its own name.",
        )
    return value


def _restore(module: str, qualname: str, given: dict[str, Any]) -> Cell:
    return _find(module, qualname)(**given)


def _declaration(function: Declaring) -> Declaring:
    """Wraps a declaration so that its errors name its line, also errors about unknown arguments."""
    names = [name for name in inspect.signature(function).parameters if name != "function"]

    @functools.wraps(function)
    def declare(*args: Any, **given: Any) -> Any:
        caller = sys._getframe(1)
        with said_at(place(caller.f_code.co_filename, caller.f_lineno, "a declaration")):
            for name in given:
                if name not in names:
                    close = difflib.get_close_matches(name, names, 1)
                    remedy = f"write {close[0]}={brief(given[name])}." if close else "leave it out."
                    fail(f"@cell({name}=...): expected one of {', '.join(names)}.", remedy)
            return function(*args, **given)

    return declare  # type: ignore[return-value]


@_declaration
def cell(
    function: None = None,
    /,
    *,
    gates: str | Sequence[str] = "",
    state: str | Sequence[str] = "h",
    params: str | Sequence[str] = "",
    static: str | None = None,
    bias: bool = True,
) -> Callable[[Callable[..., Any]], Cell]:
    """Makes a recurrent cell out of a function ``f(x, r, s[, p][, e])`` of one time step.

    Args:
        gates: names of the gates, ``name[:size]``, in the order of the weights; ``x`` and ``r``
            unpack in this order. Gates, states and parameters may also be lists of names. A cell
            without gates has no input: it runs in ``recurrence``, on gates ``[T, B, 0]``.
        state: names of the states, ``name[:size][=initial]``; the first is the output.
        params: names of per-unit parameters, ``name[:size][=initial]``; without any the function
            has no ``p``.
        static: name of an input given once per sequence, ``name[:size]``; the function's last
            argument.
        bias: whether the layer's projections carry biases; False for a cell that adds its own.

    A size is a symbol, which layers take by keyword, or 1; without one it is H, the hidden size. A
    value of size 1 is one number of each row, and combines with values of any size. Only gates of
    size H have a recurrent projection: ``r`` has no others.

    Raises:
        CellError: for what a cell cannot express; it names the line and what to write instead.

    Example:
        >>> from anycell import cell, sigmoid, tanh
        >>> @cell(gates="f g", state="h")
        ... def MGU2(x, r, s):
        ...     f = sigmoid(r.f)
        ...     return (1 - f) * s.h + f * tanh(x.g + r.g)
    """
    if function is not None:
        problem = f"@cell was given {function!r} in place of a declaration."
        fail(problem, '@cell(gates="i f g o", state="h c") above the function.')
    named = tuple(Gate(n, z or "H") for n, z, _ in words(gates, "gates"))
    states = tuple(
        State(n, z or "H", number(v, "state") or 0.0) for n, z, v in words(state, "state")
    )
    parameters = tuple(
        Param(n, number(v, "params"), z or "H") for n, z, v in words(params, "params")
    )
    if not states:
        problem = "@cell(state=''): a cell needs at least one state; the first is its output."
        fail(problem, 'name one: state="h".')
    if len(states) > MOST:
        problem = f"@cell declares {len(states)} states; a cell has at most {MOST}."
        fail(problem, 'give one of them a size of its own, such as state="h buffer:N".')
    once = () if static is None else tuple(Gate(n, z or "H") for n, z, _ in words(static, "static"))
    if static is not None and len(once) != 1:
        fail(
            f"@cell(static={static!r}): expected one name, or None.",
            'name one, static="e", [B, H]; if you need several values, compute them from it with '
            'linear(e, "name", gates="i f").',
        )
    bias = boolean(bias, f"@cell(bias={brief(bias)})")
    declaration = Declaration(named, states, parameters, once[0] if once else None, bias)
    expected = ["x", "r", "s"] + ["p"] * bool(parameters) + ["e"] * (static is not None)

    def decorate(function: Callable[..., Any]) -> Cell:
        if not (inspect.isfunction(function) or inspect.ismethod(function)):
            problem = f"@cell(...) was given {function!r}."
            fail(problem, "decorate a function, written with def or lambda.")
        with said_at(line_of(function.__code__, _line_of_def(function.__code__))):
            check(function)
            return Cell(function, declaration, {})

    def check(function: Callable[..., Any]) -> None:
        kinds = inspect.Parameter
        arguments = inspect.signature(function).parameters.values()
        for p in arguments:
            if p.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD):
                fail(
                    f"Cell {function.__name__} takes {p}, but nothing is ever passed to it.",
                    "name each hyperparameter, as a keyword-only argument with a default.",
                )
        positional = kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD
        names = [p.name for p in arguments if p.kind in positional]
        if len(names) == len(expected) and names != expected and {*names} == {*expected}:
            fail(
                f"Cell {function.__name__} takes ({', '.join(names)}), but is called in the order "
                f"({', '.join(expected)}).",
                f"write def {function.__name__}({', '.join(expected)}).",
            )
        if len(names) != len(expected):
            fail(
                f"Cell {function.__name__} takes {len(names)} positional arguments; "
                f"with this declaration it must take {len(expected)}: ({', '.join(expected)}).",
                f"write def {function.__name__}({', '.join(expected)}), hyperparameters behind a *,"
                " and declare what is missing: gates=, state=, params=, static=.",
            )

    return decorate


def _line_of_def(code: Any) -> int:
    """The line of a function's ``def``, after its decorators; the first line of a lambda."""
    first, last = code.co_firstlineno, max(line for *_, line in code.co_lines() if line)
    for line in range(first, last + 1):
        if source_line(code.co_filename, line).startswith("def "):
            return line
    return int(first)
