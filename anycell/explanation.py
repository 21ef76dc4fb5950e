"""``anycell.explain``: what becomes of a cell, as a page to read."""

from __future__ import annotations

import functools
import html
import inspect
import itertools
import logging
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anycell import drawing
from anycell.lang.cell import RECURRENT, Cell, Linear
from anycell.lang.expr import Expr, is_const, label, listing, rewrite, show, topological
from anycell.lang.grad import upstream
from anycell.lang.ops import is_reduction
from anycell.layer.checks import check_cell, check_names, integer, refuse
from anycell.plan import FREE, HEAVY, Engine, Layer, Plan, gradient_roots
from anycell.plan import plan as make_plan
from anycell.plan.dtype import dtypes

Names = dict[Expr, str]

# The functions that turn a gate's pre-activation into its value.
_GATE_VALUES = frozenset({"sigmoid", "tanh", "relu", "hard_sigmoid", "exp", "softplus"})
_WIDTH = 92  # columns of a line


def explain(
    cell: Cell | Explained,
    hidden_size: int | None = None,
    dtype: str | None = None,
    *,
    batch: int | None = None,
    backward: bool = True,
    llvm: bool = False,
    assembly: bool = False,
    triton: bool = False,
    engine: str | None = None,
    **sizes: int,
) -> Explanation:
    """Describes a cell: equations, derived backward pass, saved values, engine, kernel.

    Args:
        cell: a cell of ``@anycell.cell``, for instance one of ``anycell.cells``; or a layer, which
            has sizes, dtype and engine already.
        hidden_size: H. Default: 256.
        dtype: "float32", "bfloat16" or "float16"; except on the GPU also "float64" or "int8".
            Default: "float32".
        batch: also shows the memory that a batch of this many rows needs.
        backward: whether to show the backward pass, and what is saved for it.
        llvm: ends with the text that the kernels are compiled from.
        assembly: ends with the kernels' machine instructions, for which it compiles them.
        triton: ends with the source of the GPU engine's kernels.
        engine: "cpu", "gpu" or "reference"; None takes the plan's choice for the CPU.
        sizes: the cell's other sizes, such as ``P=64`` for ``LSTMP``; without them the page has no
            kernel.

    Returns:
        an ``Explanation``: a page that prints, with attributes ``plan``, ``llvm``, ``assembly``,
        ``triton``, and the method ``svg``, which draws the graphs.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what was expected.

    Example:
        >>> print(explain(anycell.cells.RNN, hidden_size=64, backward=False))
        RNN(): hidden size 64, float32
        Elman network, the cell of ``torch.nn.RNN`` and ``keras.layers.SimpleRNN``.
        ...
        >>> layer = anycell.numpy.LSTM(3, 64)
        >>> print(explain(layer))
        LSTM(3, 64, dtype='float32') runs on cpu (fused kernel, 1 matmul a step)
        ...
    """
    shown: dict[str, Any] = {"batch": batch, "backward": backward, "llvm": llvm}
    shown |= {"assembly": assembly, "triton": triton}
    if isinstance(cell, Explained):
        of_layer = {"hidden_size": hidden_size, "dtype": dtype, "engine": engine, **sizes}
        for name, value in of_layer.items():
            if value is not None:
                refuse(name, repr(value), "none with a layer, which has its own", "Leave it out.")
        return cell.explain(**shown)
    check_cell(cell, " Or pass a layer of anycell.")
    check_names(cell, sizes)
    hidden_size = 256 if hidden_size is None else hidden_size
    numbers = {"hidden_size": hidden_size, "batch": 1 if batch is None else batch, **sizes}
    for name, size in numbers.items():
        integer(name, size)
    return Explanation(make_plan(cell, hidden_size, dtype or "float32", engine, sizes), **shown)


def explain_read(loop: str, reading: Any, dtype: str, reason: str = "") -> str:
    """Returns what ``explain_scan`` of a frontend says of a body.

    Args:
        loop: what runs a body that no kernel runs.
        reading: ``anycell.read.Reading`` of the body; None if a loop runs it, for this reason.
    """
    if reading is None:
        return f"{loop} runs this body: {reason}"
    page = explain(reading.cell, reading.size, dtype, **reading.sizes)
    return f"A fused kernel runs this body.\n\nThe cell that was read:\n\n{reading.text}\n{page}"


class Explained:
    """The base of layers that ``explain`` describes."""

    engine: Any

    def _layer(self) -> Layer | None:
        """The layer as a value; None if no cell describes it."""
        raise NotImplementedError

    def _about(self) -> str:
        """The layer and what it does, as the subject of a sentence whose end is its engine."""
        return repr(self).splitlines()[0]

    def explain(
        self,
        *,
        batch: int | None = None,
        backward: bool = True,
        llvm: bool = False,
        assembly: bool = False,
        triton: bool = False,
    ) -> Explanation:
        """Describes this layer: the engine that runs it, and why; then its cell. The arguments are
        as in ``anycell.explain``.
        """
        shown: dict[str, Any] = {"batch": batch, "backward": backward, "llvm": llvm}
        # The text is that of a cell that was read.
        shown |= {"assembly": assembly, "triton": triton, "text": getattr(self, "text", None)}
        return about_layer(self._about(), self.engine, self._layer(), **shown)


def about_layer(
    about: str,
    engine: Engine,
    layer: Layer | None,
    text: str | None = None,
    batch: int | None = None,
    backward: bool = True,
    **asked: bool,
) -> Explanation:
    """The page about a layer.

    Args:
        about: see ``Explained``.
        engine: what runs it, and why.
        layer: None if no cell describes it.
        text: the cell as users would write it, if it was read from other code.
    """
    about = f"{about} runs on {engine.name} ({engine.reason})"
    if text:
        about += f"\n\nread as\n\n{text.rstrip()}"
    if layer is None:
        return Explanation(None, batch, backward, about, engine, **asked)
    kind = engine.name if engine.name in ("cpu", "gpu") else "reference"
    known = dtypes("gpu" if kind == "gpu" else "cpu", quantized=True)
    dtype, sizes = layer.dtype if layer.dtype in known else "float32", dict(layer.sizes)
    chosen = make_plan(layer.cell, sizes["H"], dtype, kind, sizes)
    return Explanation(chosen, batch, backward, about, engine, **asked)


@dataclass(frozen=True)
class Found:
    """A recurrent layer or cell of a model; ``recurrent_layers`` of a frontend finds them.

    Attributes:
        name: its path in the model, "" for the model itself.
        kind: its class, and the library of the class.
        engine: the name of ``layer.engine``, or "torch" or "keras" if the framework runs it.
        reason: why this engine runs it.
        calls: how many times one call of the model called it; None if no call was watched.
    """

    name: str
    kind: str
    engine: str
    reason: str
    calls: int | None = None

    def __str__(self) -> str:
        return f"{self.name or 'the model'}: {self.kind} runs on {self.engine} ({self.reason})"


def log_swapped(layers: Sequence[Found], logger: logging.Logger) -> None:
    """Logs the layers of a model after ``accelerate``; warns if none of them is anycell's."""
    for layer in layers:
        logger.info("%s", layer)
    if not any(" of anycell" in layer.kind for layer in layers):
        left = "; ".join(map(str, layers)) or "the model has no recurrent layers"
        logger.warning("accelerate has swapped nothing: %s", left)


def often(calls: Sequence[int], one_step: bool, layer: str) -> str:
    """Returns the end of a reason, which says how often one call of the model called a module.

    Args:
        calls: the number of steps of each call.
        one_step: whether the module is a cell, which runs one step in each call.
        layer: the layer that a loop over the steps can become.
    """
    if len(calls) < 2:
        return "" if calls else "; not called"
    low, high = min(calls), max(calls)
    steps = "1 step" if high == 1 else f"{low} steps" if low == high else f"{low} to {high} steps"
    called = f"; called {len(calls)} times, {steps} each"
    if high > 1 or one_step:
        return called
    return (
        f"{called}: call it once with all steps, or, if a step needs the previous output, write "
        f"the loop's body as a cell for {layer}"
    )


class Explanation:
    """A page to read about a cell or a layer: ``print`` it, or let the interpreter show it.
    ``"engine: cpu" in page`` and ``page[:80]`` act on its text.

    Attributes:
        plan: the ``anycell.plan.Plan`` that the page is about; None for a layer that no cell
            describes.
        llvm: the LLVM text of the kernels; None unless the plan's engine is the CPU's.
        assembly: their assembly on this machine, compiled when first asked for; None likewise.
        triton: the source of the GPU engine's kernels; None if the plan has another engine.
        page: the sections, and the names of the inputs and results of the backward pass.
    """

    def __init__(
        self,
        plan: Plan | None,
        batch: int | None,
        backward: bool,
        about: str = "",
        engine: Engine | None = None,
        **asked: bool,
    ) -> None:
        self.plan, self.batch, self.backward = plan, batch, backward
        self._about, self._engine, self._asked = about, engine, asked

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__

    def __contains__(self, text: str) -> bool:
        return text in self._text

    def __getitem__(self, place: int | slice) -> str:
        return self._text[place]

    @functools.cached_property
    def llvm(self) -> str | None:
        return self._texts("llvm")

    @functools.cached_property
    def assembly(self) -> str | None:
        return self._texts("assembly")

    def _texts(self, kind: str) -> str | None:
        """The texts of the kernels; None unless the plan's engine is the CPU's."""
        if self.plan is None or self.plan.engine != "cpu":
            return None
        from anycell.engines.cpu import describe

        text, names = getattr(describe, kind), ("forward", "backward")[: 1 + self.backward]
        return "\n".join(f"; ---- {n}\n{text(self.plan, n == 'backward')}" for n in names)

    @functools.cached_property
    def triton(self) -> str | None:
        if self.plan is None or self.plan.engine != "gpu":
            return None
        from anycell.engines.gpu import sources

        return "\n\n".join(sources(self.plan, self.backward))

    @functools.cached_property
    def page(self) -> _Page:
        assert self.plan is not None, "a layer that no cell describes has no page"
        return _Page(self.plan, self.batch)

    def svg(self) -> str:
        """The graph of the cell's step, and below it that of the derived backward pass, as SVG:

            pathlib.Path("cell.svg").write_text(anycell.explain(cell).svg())

        Inputs are at the top, new states or gradients at the bottom.

        Raises:
            ValueError: for a layer that no cell describes.
        """
        if self.plan is None:
            expected = "a cell, or a layer of one: its step has a graph"
            refuse("svg", self._about, expected, "Pass the cell to anycell.explain.")
        page, name = self.page, self.page.cell.name
        parts = [(f"A step of {name}", page.step_graph())]
        if self.backward:
            parts.append((f"The backward pass of a step of {name}", page.backward_graph()))
        return drawing.svg(*parts)

    def _repr_html_(self) -> str:
        """The page in a notebook: sections under their headings, the code of kernels and the
        graphs folded.
        """
        parts = []
        for title, *lines in self._sections:
            shown = "" if title in self._asked else " open"
            body = f"<pre>{html.escape(chr(10).join(lines))}</pre>" * bool(lines)
            parts.append(f"<details{shown}><summary>{html.escape(title)}</summary>{body}</details>")
        if self.plan is not None:
            parts.append(f"<details><summary>graphs</summary>{self.svg()}</details>")
        return "\n".join(parts)

    @functools.cached_property
    def _text(self) -> str:
        return "\n\n".join("\n".join(section) for section in self._sections)

    @functools.cached_property
    def _sections(self) -> list[list[str]]:
        """The sections, each a heading and its lines."""
        if self.plan is None:
            return [[self._about]]
        page = self.page
        # The sources come first: they may compile kernels, and the section on kernels says so.
        sources = {name: getattr(self, name) for name, asked in self._asked.items() if asked}
        sections = [[self._about] if self._about else [], page.heading(), page.forward()]
        if self.backward:
            sections += [page.saved(), page.derived()]
        engine = self._engine or Engine(self.plan.engine, self.plan.reason)
        sections += [page.engine(engine), page.kernels(self.backward)]
        for name, source in sources.items():
            missing = f"none: the {engine.name} engine has no kernel of its own"
            sections.append([name, *(source or f"    {missing}").splitlines()])
        return [section for section in sections if section]


class _Page:
    """The sections of the page, each a list of lines."""

    def __init__(self, plan: Plan, batch: int | None) -> None:
        self.plan, self.cell, self.batch = plan, plan.cell, batch
        self.states = list(zip(self.cell.state_names, self.cell.next, strict=True))
        self.new = {n: f"{s}'" for s, n in self.states}
        self.gate_values = _gate_values(self.cell, self.new)
        self.names: Names = {**self.gate_values, **self.new}

    # -- the cell ----------------------------------------------------------------------------------
    def heading(self) -> list[str]:
        cell, plan = self.cell, self.plan
        about = (inspect.getdoc(cell) or "").splitlines()
        return [f"{cell!r}: hidden size {plan.hidden_size}, {plan.dtype}", *about[:1]]

    def folded(self) -> list[tuple[str, Expr]]:
        """The values of gates, then the new states, with ``layer_norm`` and ``clip`` by name."""
        node_of = {name: node for node, name in self.gate_values.items()}
        named = [(gate, node_of[gate]) for gate in self.cell.gates if gate in node_of]
        named += [(f"{s}'", node) for s, node in self.states]
        folded = rewrite([node for _, node in named], _fold)
        return [(name, node) for (name, _), node in zip(named, folded, strict=True)]

    def step_graph(self) -> drawing.Graph:
        """The graph of a step, down to its new states."""
        states = self.folded()[-len(self.states) :]
        return drawing.graph([(name, node, "new") for name, node in states], {})

    def backward_graph(self) -> drawing.Graph:
        """The graph of a step's backward pass, from saved values and arriving gradients."""
        arriving = self.arriving().items()
        known = {n: (name, "state" if n.op == "grad" else "saved") for n, name in arriving}
        kinds = {"s": "new", "p": "param", "a": "gate", "x": "gate", "r": "gate"}
        roots = []
        for name, node in self.gradients():
            part = name.removeprefix("d_").partition(".")
            kind = "static" if name == f"d_{self.cell.static}" else "matmul"
            roots.append((name, node, kinds.get(part[0], kind) if part[1] else kind))
        return drawing.graph(roots, known)

    def forward(self) -> list[str]:
        lines = _indent(listing(self.folded()))
        return ["forward, one step", *lines, "", *_indent(self._legend(), "    ")]

    def _legend(self) -> Iterator[str]:
        cell = self.cell
        ops: dict[str, Expr] = {}
        for node in topological(cell.next):
            ops.setdefault("r" if label(node) and node.op == "linear" else node.op, node)
        first, b = cell.state_names[0], " + b_{}" if cell.bias else ""
        rows, known, gates = [], self.plan.sizes, cell.shown_width.replace(" * ", " ")
        if "x" in ops or "preact" in ops:
            rows.append(("x.k", f"gate k's part of input @ W_ih.T{b.format('ih')}"))
        if "r" in ops or "preact" in ops:
            rows.append(("r.k", f"gate k's part of s.{first} @ W_hh.T{b.format('hh')}"))
        if "preact" in ops:
            rows.append(("a.k", "x.k + r.k: the matmul adds onto the input projection"))
        sized = known.keys() >= {*cell.gate_sizes.values()}
        shape = f": [{cell.width(known)}, inputs]" if sized else ""
        rows += [("W_ih", f"[{gates}, inputs]{shape}")] * bool(cell.gates)
        for l in cell.by_weight.values():
            if l.name == RECURRENT:
                width, count = known.get(l.in_size, l.in_size), len(l.declared)
                rows.append(("W_hh", f"[{count} H, {l.in_size}]: [{count * known['H']}, {width}]"))
            else:
                rows.append((f"W_{l.shared}", self._weight(l)))
        rows.append(("s.k, k'", f"state k before and after the step{self._initial()}"))
        if "param" in ops:
            rows.append(("p.k", "per-unit parameter k"))
        if cell.static is not None:
            rows.append((cell.static, "static input, given once per sequence"))
        rows += [(name, f"{value!r}, a run-time value") for name, value in cell.hyper.items()]
        if "keep" in ops:
            rows.append(("keep_n(q)", "in training 1 with probability q, else 0; in evaluation q"))
        if unused := self._unused():
            rows.append(("not used", f"{', '.join(unused)}: no new state depends on them"))
        column = max(len(name) for name, _ in rows)
        yield from (f"{name:{column}}  {meaning}" for name, meaning in rows)

    def _unused(self) -> list[str]:
        """The declared gates, parameters and inputs that no new state depends on."""
        cell, read = self.cell, {label(node) for node in topological(self.cell.next)}
        idle = [g for g in cell.gates if read.isdisjoint({f"x.{g}", f"r.{g}", f"a.{g}"})]
        unused = [f"the gate {gate}" for gate in idle]
        unused += [f"the parameter {name}" for name in cell.param_names if f"p.{name}" not in read]
        return unused + [f"the static input {cell.static}"] * (cell.static not in read)

    def _weight(self, l: Linear) -> str:
        """The shape of a weight, in symbols and in numbers."""
        outputs = f"{len(l.declared)} {l.out_size}" if len(l.declared) > 1 else l.out_size
        shown = f"the weight of linear(..., {l.name!r}), [{outputs}, {l.in_size}]"
        bias = f", and a bias b_{l.name}" * l.bias
        if l.heads > 1:
            shown += f" of {l.heads} blocks along its diagonal"
        known = {l.in_size, l.out_size} <= self.plan.sizes.keys()
        return f"{shown}: {list(l.shape(self.plan.sizes))}{bias}" if known else shown + bias

    def _initial(self) -> str:
        declared = [f"{s.name}: {s.initial:g}" for s in self.cell.states if s.initial]
        return f"; initial values {', '.join(declared)}, else 0" if declared else ""

    # -- the backward pass -------------------------------------------------------------------------
    @functools.cached_property
    def saved_names(self) -> dict[Expr, str]:
        """Names of saved values: the gate whose value it is, or a leaf's name, else v1, v2, ..."""
        number, names = itertools.count(1), self.names
        saved = dict.fromkeys([*self.plan.saved, *self.plan.saved_rows])
        return {n: names.get(n) or label(n) or f"v{next(number)}" for n in saved}

    def arriving(self) -> Names:
        """Names of the inputs of the backward pass: saved values, states, gradients."""
        kept = {n: f"{s}'" for s, n in self.states if s in self.plan.states and n.op not in FREE}
        gradients = {upstream(name): f"d_{name}'" for name in self.cell.state_names}
        return {**self.saved_names, **kept, **gradients}

    def gradients(self) -> list[tuple[str, Expr]]:
        """The gradients that the backward pass of a step computes, by name."""
        cell, g, named = self.cell, self.plan.gradients, []
        recurrent = g.linear.get(RECURRENT, {})
        for gate in cell.gates:
            named.append((self._into(gate, "x"), g.x[gate]))
            if gate in recurrent and gate not in cell.fused:
                named.append((f"d_r.{gate}", recurrent[gate]))
        for l in cell.linears:
            if l.name != RECURRENT:
                named += [(_gradient(l.name, o), e) for o, e in g.linear[l.name].items()]
        named += [(f"d_s.{name}", e) for name, e in self._direct().items()]
        named += [(f"d_p.{name}", e) for name, e in g.param.items()]
        return named + ([(f"d_{cell.static}", g.static)] if g.static is not None else [])

    def _into(self, gate: str, projection: str) -> str:
        """The name of a gate's gradient: of the sum ``a`` of its projections, or of one of them."""
        return f"d_{'a' if gate in self.cell.fused else projection}.{gate}"

    def _direct(self) -> dict[str, Expr]:
        """Gradients of states that do not come through a matmul."""
        return {n: e for n, e in self.plan.gradients.state.items() if not is_const(e, 0.0)}

    def derived(self) -> list[str]:
        known = self.arriving()
        reached = _reached(gradient_roots(self.cell, self.plan.gradients), known)
        again = [(n, e) for e, n in self.gate_values.items() if e in reached and e not in known]
        lines = ["backward, one step, derived", *_indent(self._arriving(self._direct())), ""]
        lines += _indent(listing([*again, *self.gradients()], known))
        return [*lines, "", *_indent(self._sums())]

    def _gradient_of(self, l: Linear) -> str:
        """The gradients of all outputs of a matmul, side by side."""
        recurrent = l.name == RECURRENT
        return _beside(self._into(o, "r") if recurrent else _gradient(l.name, o) for o in l.outputs)

    def _arriving(self, direct: Mapping[str, Expr]) -> Iterator[str]:
        """The gradients that arrive at the new states: from the output, and from the step after."""
        yield "d_output belongs to this step, all else on the right to the step after:"
        for i, name in enumerate(self.cell.state_names):
            terms = ["d_output"] * (i == 0) + [f"d_s.{name}"] * (name in direct)
            for l in self.cell.linears:
                if l.operand is Expr("state", (), (name,)):
                    terms.append(f"{self._gradient_of(l)} @ W_{l.shared}")
            yield from _indent(_wrap(f"d_{name}' = {' + '.join(terms) or '0'}"))

    def _sums(self) -> Iterator[str]:
        cell = self.cell
        yield "summed over rows and steps, by matmuls that each take many steps:"
        sums = [("ih", _beside(self._into(gate, "x") for gate in cell.gates), "input", cell.bias)]
        for l in cell.linears:
            operand = show(l.operand, self.names, 5, False)
            bias = cell.bias if l.name == RECURRENT else l.bias
            sums.append((l.shared, self._gradient_of(l), operand, bias))
        for name, gradient, operand, bias in sums[not cell.gates :]:
            rows = f"    d_b_{name} += its rows" * bias
            yield from _indent(_wrap(f"d_W_{name} += {gradient}.T @ {operand}{rows}"))
        yield from _indent(_wrap(", ".join(f"d_p.{name}" for name in cell.param_names)))

    # -- memory ------------------------------------------------------------------------------------
    def saved(self) -> list[str]:
        plan, cell = self.plan, self.cell
        sizes = {s.name: s.size for s in cell.states}
        rows: list[tuple[str, str]] = []  # what, size symbol
        for node, name in self.saved_names.items():
            size = "1" if node.narrow else self.plan.symbol(node)
            rows.append((self._definition(node, name), size))
        for name in plan.states:
            output = " (the output)" if name == cell.state_names[0] else ""
            rows.append((f"the sequence of states {name}{output}", sizes[name]))
        column = min(max(len(text) for text, _ in rows), _WIDTH - 16)
        kept = [size for _, size in rows]
        table = [(text, self._bytes([size])) for text, size in rows]
        table.append(("together", self._bytes(kept)))
        if self.batch is not None:
            table.append((f"of {self.batch} rows", self._bytes(kept, self.batch)))
        lines = []
        for text, count in table:
            *above, last = _wrap(text, column)
            lines += [*above, f"{last:{column}}  {count:>9}"]
        title = "kept for the backward pass, in bytes per step and batch row"
        return [title, *_indent([*lines, *self._again(kept)])]

    def _definition(self, node: Expr, name: str) -> str:
        known = {n: k for n, k in {**self.names, **self.saved_names}.items() if n is not node}
        text = show(node, known)
        return name if text == name else f"{name} = {text}"

    def _bytes(self, sizes: Sequence[str], rows: int = 1) -> str:
        """Shows sizes in bytes; a size that the plan does not know appears as its symbol."""
        number = {"1": 1, **self.plan.sizes}
        item = self.plan.itemsize * rows
        total = item * sum(number[s] for s in sizes if s in number)
        others = {s: item * sizes.count(s) for s in sizes if s not in number}
        terms = [f"{total:,}"] * bool(total or not others)
        return " + ".join([*terms, *(f"{count} {s}" for s, count in others.items())])

    def _again(self, kept: Sequence[str]) -> Iterator[str]:
        """The values that are computed again, and the cost of saving them."""
        again = self.plan.recomputed
        yield ""
        if not again:
            yield "nothing is computed again"
            return
        costly = [node for node in again if node.op in HEAVY or len(again) <= 2]
        known = {**self.names, **self.saved_names}
        shown = [known.get(node) or show(node, known) for node in costly]
        light = len(again) - len(costly)
        rest = [f"{light} value{'s' * (light > 1)} of plain arithmetic"] if light else []
        yield from _wrap(f"computed again from these: {', '.join(shown + rest)}")
        # A value that all units and rows share takes no memory.
        sizes = ["1" if node.narrow else self.plan.symbol(node) for node in again if _varies(node)]
        yield f"were they kept as well: {self._bytes([*kept, *sizes])}"

    # -- the engine --------------------------------------------------------------------------------
    def engine(self, engine: Engine) -> list[str]:
        lines = [f"engine: {engine.name}", *_indent(_wrap(engine.reason))]
        if engine.name == "reference":
            lines += [
                "    step by step, with the array functions of the framework; what it keeps for",
                "    the backward pass is not the list above: the NumPy layers keep the arguments",
                "    and run the steps again, PyTorch's autograd keeps what it needs",
            ]
        return lines

    def kernels(self, backward: bool) -> list[str]:
        """The engine's description of its kernels."""
        if self.plan.engine == "cpu":
            from anycell.engines.cpu.describe import describe

            lines: list[str] = []
            for name in ("forward", "backward")[: 1 + backward]:
                lines += lines and [""]
                lines += [f"{name} kernel"]
                lines += _indent(describe(self.plan, name == "backward", self.batch))
            return lines
        if self.plan.engine == "gpu":
            from anycell.engines.gpu.describe import describe as table

            title, *rows = table(self.plan)
            return [title, *(line for row in rows for line in _indent(_wrap(row)))]
        return []


def _gradient(matmul: str, output: str) -> str:
    """The name of an output's gradient; the only output of a matmul is named like the matmul."""
    return f"d_{matmul}" if output == matmul else f"d_{matmul}.{output}"


def _beside(parts: Iterable[str]) -> str:
    """Shows a single part as it is, several parts in brackets."""
    shown = list(parts)
    return shown[0] if len(shown) == 1 else f"({', '.join(shown)})"


# ---- names and forms -----------------------------------------------------------------------------


def _gate_values(cell: Cell, new: Mapping[Expr, str]) -> Names:
    """Names for the values of gates: ``f = sigmoid(a.f)``.

    A gate lends its name to the first squashing function that depends on no other gate. Gates that
    it reaches only through named values or new states do not count.
    """
    taken = {*cell.hyper, cell.static}
    names: Names = {}
    for node in topological(cell.next):
        if node.op not in _GATE_VALUES or node in new:
            continue
        beneath = _reached(node.args, {**names, **new})
        gates = {
            n.attrs[-1]: None
            for n in beneath
            if n.op in ("x", "preact") or (n.op == "linear" and n.attrs[0] == RECURRENT)
        }
        if len(gates) == 1:
            (gate,) = gates
            if gate not in taken and not re.fullmatch(r"[tv]\d+", gate):
                taken.add(gate)
                names[node] = gate
    return names


def _reached(roots: Iterable[Expr], stop: Mapping[Expr, Any]) -> dict[Expr, None]:
    """The nodes under ``roots``, without the arguments of nodes in ``stop``."""
    return dict.fromkeys(topological(roots, stop.__contains__))


def _varies(node: Expr) -> bool:
    """Whether the value may differ between units, rows or steps."""
    return any(leaf.op not in ("const", "hyper") for leaf in topological([node]) if not leaf.args)


def _fold(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
    """Turns the expansions of ``layer_norm`` and ``clip`` back into calls."""
    if node.op == "mul":
        centred, scale = node.args
        norm = _norm(centred, scale)
        if norm is not None:
            new = args[0].args[0]  # the rewritten value, before it is centred
            return Expr("layer_norm", (new, norm[0]), norm[1:])
    if node.op == "minimum" and args[0].op == "maximum":
        return Expr("clip", (*args[0].args, args[1]))
    return None


def _norm(centred: Expr, scale: Expr) -> tuple[Any, ...] | None:
    """Returns eps and groups if the product of the two is a layer norm, else None."""
    if centred.op != "sub" or scale.op != "div" or scale.args[1].op != "sqrt":
        return None
    value, average = centred.args
    inside = scale.args[1].args[0]
    if inside.op != "add" or inside.args[0].op != "mean" or not is_reduction(average):
        return None
    square, eps = inside.args[0].args[0], inside.args[1]
    fits = square is Expr("mul", (centred, centred)) and average.args[0] is value
    return (eps, *average.attrs) if fits and average.attrs == inside.args[0].attrs else None


# ---- layout --------------------------------------------------------------------------------------


def _indent(lines: Iterable[str], by: str = "    ") -> list[str]:
    return [f"{by}{line}" if line else "" for line in lines]


def _wrap(text: str, width: int = _WIDTH - 4) -> list[str]:
    """Breaks text at spaces, and indents all lines but the first."""
    whole: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, width, subsequent_indent="    ", **whole)
