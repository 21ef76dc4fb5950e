"""Prints expressions as Triton source: what all tiers of the engine share.

A kernel owns a tile, some rows of the batch times some units, and prints as it reads:

    a_f = tl.load(x_at + (256 + units_H), mask=in_H, other=0.0) + ...
    f = sigmoid(a_f)

Everything that a launch does not change (sizes, tiles, which arrays there are) is a number in the
text; addresses, strides, steps and rows are arguments.
"""

from __future__ import annotations

import functools
import keyword
import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from anycell.lang.cell import Cell, Linear
from anycell.lang.expr import Expr, listing, show, topological
from anycell.lang.ops import is_boolean, is_reduction
from anycell.plan import DTYPES, FREE, MATMULS, Options, Plan, arrays
from anycell.plan.step import evaluate, frame

WIDTH = 96  # columns of a line of text
# The ops of ``plan.step`` as text.
FRAME_OPS: dict[str, Callable[..., str]] = {
    "where": "tl.where({}, {}, {})".format, "add": "{} + {}".format, "const": str,
}  # fmt: skip
# Types by the name in their pointers: a kernel takes ``*bf16`` and says ``tl.bfloat16``.
NUMBERS = {n.triton: n for row in DTYPES.values() for n in (row.storage, row.math)}


class Variant(NamedTuple):
    """The facts that, together with the plan, determine the text of a kernel.

    Attributes:
        backward: the derived backward pass.
        mask, resets: whether there are such flags.
        draw: random masks are drawn; otherwise their mean is taken.
        keep: forward, whether values are saved for the backward pass.
        input_bias: whether a bias joins the input projection here.
        biases: for each matmul of the cell, whether it has a bias.
        options: those that kernels are printed for; see ``Options.printed``.
    """

    backward: bool = False
    mask: bool = False
    resets: bool = False
    draw: bool = False
    keep: bool = False
    input_bias: bool = False
    biases: tuple[bool, ...] = ()
    options: Options = Options()

    @classmethod
    def training(cls, cell: Cell, backward: bool, **more: Any) -> Variant:
        """The variant of training without masks, whose matmuls have their biases."""
        biases = tuple(l.bias and not backward for l in cell.linears)
        return cls(backward, draw=bool(cell.keeps), keep=not backward, biases=biases, **more)

    @property
    def way(self) -> str:
        """The pass, in a word."""
        return "backward" if self.backward else "forward"

    @property
    def separate_output(self) -> bool:
        """Whether the outputs are not the sequence of hidden states."""
        return self.options.apart(self.mask)


class Printed(NamedTuple):
    """A kernel as text.

    Attributes:
        name: of its function.
        source: the whole file.
        arguments: name and Triton's type of each, in order.
        tile: the rows and units of a program; all units if the grid has one dimension.
        size: the symbol of these units.
        warps: of 32 threads each.
        cooperative: whether its programs wait for one another, and so must all run at once.
        alone: whether a program takes the better part of a multiprocessor.
        parts: float32 numbers that each group of programs exchanges for row reductions.
        vectors: numbers of a row that programs exchange for inner matmuls.
        apart: of a twin, the arguments whose distances come last, see ``twins``.
    """

    name: str
    source: str
    arguments: tuple[tuple[str, str], ...]
    tile: tuple[int, int]
    size: str
    warps: int
    cooperative: bool = False
    alone: bool = False
    parts: int = 0
    vectors: int = 0
    apart: tuple[str, ...] = ()


class Load(NamedTuple):
    """A load of a tile.

    Attributes:
        where: addresses.
        rows: the mask of rows.
        size: the symbol of its units; None for one number per row.
        other: the value beyond the mask.
    """

    where: str
    rows: str = "is_row"
    size: str | None = None
    other: str = "0.0"

    def text(self, mask: str) -> str:
        return f"tl.load({self.where}, mask={mask}, other={self.other})"


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is neither below ``n`` nor below ``least``."""
    return max(least, 1 << (n - 1).bit_length())


class Text:
    """A kernel that is being printed.

    Subclasses say where leaves come from (``load_<op>``) and where results go.
    """

    begins = True  # whether arrays over time begin before the first step of the call
    shared = alone = False  # see ``Printed``: cooperative, alone
    parts = vectors = 0
    writes_rows = "is_row"  # where it stores numbers of whole rows

    def __init__(self, plan: Plan, variant: Variant, tile: tuple[int, int], whole: bool) -> None:
        self.plan, self.cell, self.variant = plan, plan.cell, variant
        self.frame = frame(variant.mask, variant.resets, variant.separate_output)
        self.rows, self.width, self.whole = *tile, whole  # whole: a tile has all units of a row
        self.io, self.half = plan.types.storage, plan.types.mixed  # half: of 16 bits
        self.states = {name: i for i, name in enumerate(self.cell.state_names)}
        self.widths = [plan.sizes[s.size] for s in self.cell.states]
        self.warps = 0  # as many as the tile needs
        self.arguments: dict[str, str] = {}
        self.lines: list[str] = []
        self.depth = 1
        self.names: dict[Expr, str] = {}
        self.variables: list[str] = []  # by number: how ``assign`` would name them
        self.taken: set[str] = set()  # names that mean one value
        self.tiled: list[str] = []  # sizes of whose units it has a tile
        self.said: dict[str, str] = {}  # lines that are printed once, by what they assign
        self.saved = plan.saved_places  # what the backward pass finds in memory
        kept = zip(self.cell.states, self.cell.next, strict=True)
        self.after = {n: s.name for s, n in kept if s.name in plan.states and n.op not in FREE}
        self.hyper = {name: i for i, name in enumerate(self.cell.hyper)}
        # The arrays of states over time, in the order of the states.
        self.sequences = [
            n for n, a in arrays(plan, variant.backward).items() if a.begins == "states"
        ]
        self.numbers = {l.name: k for k, l in enumerate(self.cell.linears)}

    # -- lines -----------------------------------------------------------------------------------
    def say(self, line: str = "") -> None:
        """Adds a line."""
        self.lines.append("    " * self.depth + line if line else "")

    @contextmanager
    def indented(self) -> Iterator[None]:
        """Indents the lines that are added in the context."""
        self.depth += 1
        yield
        self.depth -= 1

    def once(self, name: str, expression: str) -> str:
        """Assigns a name, unless that has been done already, and returns it."""
        if name not in self.said:
            self.said[name] = expression
            self.taken.add(name)
            self.say(f"{name} = {expression}")
        return name

    def assign(self, wanted: str, expression: str) -> str:
        """A new variable of that name or a similar one; an expression that is a name stays so.

        Gates, states and matmuls may have any name, even ``rows`` or ``d_h``. So free names are
        chosen at the end, when all others are known; until then the variable is ``wanted@n``.
        """
        if expression in self.taken:
            return expression
        wanted = re.sub(r"\W", "_", wanted)
        name = f"{wanted}@{len(self.variables)}"
        self.variables.append(wanted)
        self.taken.add(name)
        self.say(f"{name} = {expression}")
        return name

    def argument(self, name: str, kind: str) -> str:
        """An argument of the kernel; an array goes by the name in ``anycell.plan.arrays``."""
        name = symbol(name)
        self.arguments.setdefault(name, kind)
        return name

    def of_state(self, what: str, i: int) -> str:
        """The name of an array of state i of the kind ``what``, such as "d_state"."""
        return f"{what} {self.cell.state_names[i]}"

    def array(self, name: str, wide: bool = False) -> str:
        """An argument that points to numbers: float32 if wide, else of the plan's dtype."""
        number = self.plan.types.accumulate if wide else self.io
        return self.argument(name, f"*{number.triton}")

    # -- the tile --------------------------------------------------------------------------------
    def units(self, size: str) -> str:
        """The units of the tile, ``[1, units]``."""
        name = f"units_{size}"
        if size in self.tiled:
            return name
        self.tiled.append(size)
        width = power_of_two(self.plan.sizes[size], self.width) if self.whole else self.width
        first = "" if self.whole else f"tl.program_id(1) * {width} + "
        self.once(name, f"({first}tl.arange(0, {width}))[None, :]")
        self.once(f"is_{size}", f"{name} < {self.plan.sizes[size]}")
        self.once(f"in_{size}", f"is_row & is_{size}")
        return name

    def begin(self) -> None:
        """The rows of the tile, ``[rows, 1]``."""
        batch = self.argument("batch", "i64")
        first = f"tl.program_id(0) * {self.rows} + " if self.rows > 1 else "tl.program_id(0) + "
        self.once("rows", f"({first}tl.arange(0, {self.rows})).to(tl.int64)[:, None]")
        self.once("is_row", f"rows < {batch}")

    def place(self, name: str, step: str, rows: str = "rows", wide: bool = False) -> str:
        """The address of rows in an array over time."""
        array = self.array(name, wide)
        time = self._time(array, step)
        return f"{array} + ({time} + {rows} * {self.stride(array, 'b')})"

    def _time(self, array: str, step: str) -> str:
        """The place of a step in an array over time."""
        begin = f"{self.stride(array, '0')} + " if self.begins else ""
        return f"{begin}({step}) * {self.stride(array, 't')}".replace("(t)", "t")

    def stride(self, array: str, axis: str) -> str:
        """An argument: from step to step (t), from row to row (b), or to the first step (0)."""
        # Two underscores: no value of a gate, such as x_b, has such a name.
        return self.argument(f"{array}__{axis}", "i64")

    def row(self, name: str, step: str = "t", wide: bool = False, tag: str = "") -> str:
        """The address of the tile's first row in an array over time."""
        return self.once(f"{symbol(name)}_at{tag}", self.place(name, step, wide=wide))

    def flags(self, name: str, step: str = "t", mask: str = "is_row", rows: str = "rows") -> str:
        """The flags of the rows at a step, ``[rows, 1]``, from memory ``[T, B]``."""
        where = f"{self.argument(name, '*u8')} + ({self._time(name, step)} + {rows})"
        return f"{self.read(Load(where, mask, other='0'))} != 0"

    def read(self, load: Load) -> str:
        """A load in the step that needs it. Loops may issue it a step earlier."""
        return load.text(load.rows if load.size is None else f"in_{load.size}")

    def load(self, where: str, size: str | None, wide: bool = False) -> str:
        """Numbers of the tile, as float32; of ``[rows, 1]`` where size is None."""
        text = self.read(Load(where, size=size))
        return text if wide or not self.half else f"{text}.to(tl.float32)"

    def load_units(self, name: str, size: str, column: int = 0) -> str:
        """One number per unit, the same for all rows, ``[1, units]``."""
        units = self.units(size)
        where = f"{self.array(name)} + {plus(column, units)}"
        text = f"tl.load({where}, mask=is_{size}, other=0.0)"
        return f"{text}.to(tl.float32)" if self.half else text

    def store(self, where: str, value: str, size: str) -> None:
        """Writes the tile."""
        self.say(f"tl.store({where}, {value}, mask=in_{size})")

    def at(self, base: str, column: int, size: str) -> str:
        """The address of the tile's units, in rows that begin at ``base``."""
        return f"{base} + {plus(column, self.units(size))}"

    def of_rows(self, name: str, size: str, wide: bool = True) -> str:
        """The address of the tile in an array ``[B, units]``."""
        return self.at(f"{self.array(name, wide)} + rows * {self.plan.sizes[size]}", 0, size)

    def in_turn(self, name: str, i: int, turn: str) -> str:
        """The address of state i, or of its gradient, between steps or calls, float32: two arrays
        ``[B, units]`` take turns.
        """
        array, width = self.array(name, wide=True), self.widths[i]
        self.argument("turn", "i32")
        slot = f"(({turn}) & 1) * (batch * {width})"
        return self.at(f"{array} + {slot} + rows * {width}", 0, self.cell.states[i].size)

    def reset_row(self, i: int, rows: str = "rows") -> str:
        """The address of the rows that a reset puts in the place of state i."""
        name = self.of_state("reset_state", i)
        return f"{self.array(name)} + {rows} * {self.stride(name, 'b')}"

    # -- the graph -------------------------------------------------------------------------------
    def is_leaf(self, node: Expr) -> bool:
        """Whether the value comes from elsewhere."""
        if node in self.names or not node.args:
            return True
        if node.op == "max":
            # Computed again in the backward pass too, from the values that are compared with it:
            # Triton may round these differently in the two passes.
            return False
        if self.variant.backward and (node in self.saved or node in self.after):
            return True
        return node.op in ("linear", "preact", "linear_t")

    def evaluate(self, roots: Iterable[Expr], labels: Mapping[Expr, str] | None = None) -> None:
        """Prints what the roots need; each then has a name in ``names``."""
        roots, labels = list(roots), labels or {}
        order = topological(roots, self.is_leaf)
        wanted = set(roots)
        uses = dict.fromkeys(order, 0)
        for node in order:
            if not self.is_leaf(node):
                for arg in node.args:
                    uses[arg] += 1
        for node in order:
            if node in self.names:
                continue
            if node.op == "const":
                self.names[node] = number(node.attrs[0])
            elif self.is_leaf(node):
                self.names[node] = self.assign(*self._leaf(node))
            elif node.op == "keep":
                self.names[node] = self._keep(node)
            elif is_reduction(node):
                self.names[node] = self._reduction(node)
            elif node.op in MATMULS:
                self.names[node] = self.assign(*self.product(node))
            elif node in wanted or uses[node] > 1:
                self._name(node, labels.get(node) or gate_of(node) or "v")

    def value(self, node: Expr) -> str:
        """The name of an evaluated node."""
        return self.names[node]

    def _name(self, node: Expr, wanted: str) -> None:
        while len(show(node, self.names)) > WIDTH - 16:
            open_ = [arg for arg in node.args if arg not in self.names]
            longest = max(open_, key=lambda arg: len(show(arg, self.names)), default=None)
            if longest is None:
                break
            self._name(longest, "v")
        self.names[node] = self.assign(wanted, show(node, self.names))

    def _argument_of(self, node: Expr) -> str:
        (arg,) = node.args
        return self.names.get(arg) or show(arg, self.names)

    def _keep(self, node: Expr) -> str:
        index, per = node.attrs
        rate = self._argument_of(node)
        if not self.variant.draw:
            return self.assign(f"keep_{index}", rate)
        units, draws = self.units(self.plan.symbol(node)), self.argument("draws", "*i64")
        return self.assign(
            f"keep_{index}", f"keep({rate}, {draws}, t, rows, {units}, {index}, {per == 'step'})"
        )

    def _reduction(self, node: Expr) -> str:
        size, (groups,) = self.plan.symbol(node), node.attrs
        units, each = self.units(size), self.plan.sizes[size] // groups
        inner = f"{self._argument_of(node)}, {units}, in_{size}, {groups}, {each}"
        return self.assign(f"row_{node.op}", f"{node.op}({inner})")

    def _leaf(self, node: Expr) -> tuple[str, str]:
        """A name for a leaf, and where it comes from."""
        if self.variant.backward and node in self.saved:
            column, row = self.saved[node], self.row("saved")
            name = gate_of(node) or "saved_v"
            size = None if node.narrow else self.plan.symbol(node)
            where = f"{row} + {column}" if size is None else self.at(row, column, size)
            text = self.load(where, size)
            return name, f"{text} != 0.0" if is_boolean(node) else text
        if self.variant.backward and node in self.after:
            name = self.after[node]
            return f"new_{name}", self.load_after(name)
        return getattr(self, f"load_{node.op}")(node)

    def product(self, node: Expr) -> tuple[str, str]:
        """A name for an output of a matmul in the kernel, and the matmul."""
        raise NotImplementedError

    def load_after(self, state: str) -> str:
        """The new value of a state, in the backward pass."""
        i = self.states[state]
        next_ = self.argument(f"{self.sequences[i]}__next", "i64")
        where = f"{self.row(self.sequences[i])} + {next_}"
        return self.load(self.at(where, 0, self.cell.states[i].size), self.cell.states[i].size)

    def load_hyper(self, node: Expr) -> tuple[str, str]:
        """A run-time hyperparameter."""
        array = self.array("hyper", wide=True)
        return node.attrs[0], f"tl.load({array} + {self.hyper[node.attrs[0]]})"

    def load_param(self, node: Expr) -> tuple[str, str]:
        """A parameter of the units."""
        (name,) = node.attrs
        return f"p_{name}", self.load_units(f"param {name}", "H")

    def load_static(self, node: Expr) -> tuple[str, str]:
        """The input given once per sequence."""
        return node.attrs[0], self.load(self.of_rows("static", "H", wide=False), "H")

    def load_recurrent_mask(self, node: Expr) -> tuple[str, str]:
        """The mask of the first state before the recurrent matmul, of all gates or of one."""
        (gate,), size = node.attrs, self.cell.states[0].size
        row = f"({gate} * batch + rows) * {self.widths[0]}" if gate else f"rows * {self.widths[0]}"
        where = self.at(f"{self.array('recurrent_mask')} + {row}", 0, size)
        return f"dropped_{gate}", self.load(where, size)

    def load_x(self, node: Expr) -> tuple[str, str]:
        """The input projection of a gate."""
        (gate,) = node.attrs
        text = self.projected(gate)
        bias = f" + {self.input_bias(gate)}" if self.variant.input_bias else ""
        return f"x_{gate}", f"{text}{bias}"

    def projected(self, gate: str) -> str:
        """The input projection of a gate, without its bias."""
        return self.load(self.at(self.row("gates"), self._column(gate), "H"), "H")

    def _column(self, gate: str) -> int:
        return self.cell.gates.index(gate) * self.plan.hidden_size

    def input_bias(self, gate: str) -> str:
        """The bias of the input projection of a gate."""
        return self.load_units("bias_ih", "H", self._column(gate))

    def bias(self, l: Linear, output: str) -> str:
        """The bias of an output of a matmul."""
        column = l.declared.index(output) * self.plan.sizes[l.out_size]
        return self.load_units(l.bias_name, l.out_size, column)

    def load_state(self, node: Expr) -> tuple[str, str]:
        """A state before the step; after a reset, the value that the reset restores."""
        (name,) = node.attrs
        i, size = self.states[name], self.cell.states[self.states[name]].size
        text = self.load(self.before_step(i), size, wide=bool(i) and not self.variant.backward)
        if not self.variant.resets:
            return f"s_{name}", text
        self.once("reset", self.flags("resets"))
        return f"s_{name}", self.framed("entered", restored=self.restored(i), before=text)

    def before_step(self, i: int) -> str:
        """The address of state i before the step."""
        return self.at(self.row(self.sequences[i]), 0, self.cell.states[i].size)

    def restored(self, i: int) -> str:
        """The value that a reset puts in the place of state i."""
        size = self.cell.states[i].size
        where = self.at(self.reset_row(i), 0, size)
        text = f"tl.load({where}, mask=in_{size} & reset, other=0.0)"
        return f"{text}.to(tl.float32)" if self.half else text

    def load_grad(self, node: Expr) -> tuple[str, str]:
        """The gradient that reaches a new state."""
        text = self.upstream(self.states[node.attrs[0]])
        self.taken.add(text)
        return text, text

    def upstream(self, i: int) -> str:
        """The gradient that reaches the new state i, its output included."""
        later, size = self.later(i), self.cell.states[i].size
        if i:
            return later
        dy = self.load(self.at(self.row("d_output"), 0, size), size)
        d_new = self.framed("d_new", d_after=later, d_output=dy)
        return self.once(f"d_{self.cell.state_names[0]}", d_new)

    def under_mask(self, i: int) -> str:
        """The gradient of state i in a row under a mask, which holds its states."""
        repeats = self.variant.mask and self.frame["d_held"] is self.frame["d_new"]
        return self.upstream(i) if repeats else self.later(i)

    def later(self, i: int) -> str:
        """The gradient of the new state i from the steps after it."""
        raise NotImplementedError

    # -- results ---------------------------------------------------------------------------------
    def framed(self, name: str, **leaves: str) -> str:
        """An expression of the frame of a step."""
        leaves = {"valid": "valid", "reset": "reset", **leaves}
        return evaluate(self.frame[name], leaves, FRAME_OPS)

    def valid(self, value: str) -> str:
        """The value, or 0 under a mask."""
        return self.framed("alive", value=value)

    def labels(self) -> dict[Expr, str]:
        """Names for the results of the backward pass."""
        g = self.plan.gradients
        labels = {d: f"d_x_{gate}" for gate, d in g.x.items()}
        return labels | {d: f"d_s_{name}" for name, d in g.state.items()}

    def store_state(self, i: int, value: str) -> None:
        """Stores the new value of a state, into its sequence."""
        size, row = self.cell.states[i].size, self.row(self.sequences[i], "t + 1", tag="_after")
        self.store(self.at(row, 0, size), value, size)

    def store_output(self) -> None:
        """Stores the output, unless it is the new state."""
        if self.variant.separate_output:
            size, after = self.cell.states[0].size, self.value(self.cell.next[0])
            self.store(self.at(self.row("out"), 0, size), self.framed("output", after=after), size)

    def store_saved(self, nodes: Iterable[Expr]) -> None:
        """Stores the values that the backward pass reads."""
        for node in nodes:
            column, row, size = self.saved[node], self.row("saved"), self.plan.symbol(node)
            value = self.value(node)
            if is_boolean(node):  # memory holds numbers
                value = f"tl.where({value}, 1.0, 0.0)"
            if node.narrow:
                self.say(f"tl.store({row} + {column}, {value}, mask={self.writes_rows})")
            else:
                self.store(self.at(row, column, size), value, size)

    def store_gradients(self, sizes: Container[str], inside: bool) -> None:
        """Stores the gradients of the gates, and the factors of the weights' gradients.

        ``sizes``: of what is stored. ``inside``: also for matmuls that a step carries back itself.
        """
        plan, cell = self.plan, self.cell
        if "H" in sizes:
            self.store_gates()
        for l in cell.linears:
            direct = inside or l.name not in plan.carried_back
            if direct and l.out_size in sizes and not plan.shares_gradient(l):
                self.store_outputs(l)
            if stores_operand(plan, self.variant, l) and l.in_size in sizes:
                where = self.at(self.row(f"operand {l.name}"), 0, l.in_size)
                self.store(where, self.valid(self.value(l.operand)), l.in_size)

    def store_gates(self) -> None:
        """The gradients of the gates."""
        for n, d in enumerate(self.plan.gradients.x.values()):
            self.store_gradient("d_gates", n * self.plan.hidden_size, self.value(d), "H")

    def store_outputs(self, l: Linear) -> None:
        """The gradients of a matmul's outputs."""
        name, size = gradients_of(self.plan, l), self.plan.sizes[l.out_size]
        for n, d in enumerate(self.plan.gradients.linear[l.name].values()):
            self.store_gradient(name, n * size, self.value(d), l.out_size)

    def store_gradient(self, name: str, column: int, value: str, size: str) -> None:
        """Stores the gradient of a gate or of an output, from some column of an array on."""
        self.store(self.at(self.row(name), column, size), self.valid(value), size)

    def add(self, where: str, value: str, mask: str, name: str = "so_far") -> None:
        """Adds to numbers in memory that no other program touches."""
        so_far = self.assign(name, f"tl.load({where}, mask={mask}, other=0.0)")
        self.say(f"tl.store({where}, {so_far} + {value}, mask={mask})")

    def add_param(self, n: int, value: str) -> None:
        """Adds to the gradient of a parameter what the rows of the tile have, ``[1, units]``."""
        h, count = self.plan.hidden_size, len(self.plan.gradients.param)
        base = f"{self.array('d_params', wide=True)} + tl.program_id(0) * {h * count}"
        self.add(self.at(base, n * h, "H"), value, "is_H")

    # -- the file --------------------------------------------------------------------------------
    def finish(self, name: str, about: str) -> Printed:
        """The complete kernel, whose name is the name of the pass and ``name``."""
        way = self.variant.way
        name, about = f"{way}_{name}", f"{self.cell.name}, {way}, {about}"
        body = self._named("\n".join(self.lines))
        used = [f for f in FUNCTIONS if re.search(rf"(?<![.\w]){f}\(", body)]
        short = [f"{f}_16 as {f}" if self.half and f"{f}_16" in FUNCTIONS else f for f in used]
        imports = f"from anycell.engines.gpu.library import {', '.join(short)}\n" if used else ""
        about = f"{about}\n\n{self.equations()}\n"
        text = source(name, about, self.arguments, body, f"{imports}\n" if imports else "")
        size, tile = self.tiled[0] if self.tiled else "H", (self.rows, self.lanes)
        warps = self.warps or (4 if self.lanes <= 4096 else 8 if self.lanes <= 16384 else 16)
        arguments = tuple(self.arguments.items())
        how = self.shared, self.alone, self.parts, self.vectors
        return Printed(name, text, arguments, tile, size, warps, *how)

    def _named(self, body: str) -> str:
        """The text with names for its variables."""
        used = {*keyword.kwlist, *FUNCTIONS, *self.arguments, "tl", "triton"}
        used.update(re.findall(r"\b[A-Za-z_]\w*\b(?!@)", body))
        names = []
        for wanted in self.variables:
            name, number = wanted, 1
            while name in used:
                number += 1
                name = f"{wanted}_{number}"
            used.add(name)
            names.append(name)
        return re.sub(r"\w+@(\d+)", lambda match: names[int(match[1])], body)

    @property
    def lanes(self) -> int:
        """Units of the widest tile."""
        if not self.whole:
            return self.width
        return max(power_of_two(self.plan.sizes[s], self.width) for s in self.tiled or ["H"])

    def equations(self) -> str:
        """The cell's own lines, for the head of the file."""
        named = [(f"{s}'", n) for s, n in zip(self.cell.state_names, self.cell.next, strict=True)]
        return "\n".join(f"    {line}" for line in listing(named))


def source(
    name: str, about: str, arguments: Mapping[str, str], body: str, imports: str = ""
) -> str:
    """The file of a kernel."""
    head = "".join(f"    {argument},  # {kind}\n" for argument, kind in arguments.items())
    return (
        f'"""{about}"""\n\nimport triton\nimport triton.language as tl\n\n{imports}\n'
        f"@triton.jit\ndef {name}(\n{head}):\n{body}\n"
    )


def stores_operand(plan: Plan, variant: Variant, linear: Linear) -> bool:
    """Whether a matmul multiplied something other than the sequence of hidden states."""
    return variant.resets or linear.operand is not Expr("state", (), (plan.cell.state_names[0],))


def gradients_of(plan: Plan, linear: Linear) -> str:
    """The array with the gradients of a matmul's outputs."""
    return "d_gates" if plan.shares_gradient(linear) else f"d_outputs {linear.name}"


def kept(plan: Plan, variant: Variant) -> list[Expr]:
    """The values that a forward pass saves for the backward pass."""
    return [*plan.saved, *plan.saved_rows] if variant.keep and not variant.backward else []


def keeps(plan: Plan, variant: Variant, i: int) -> bool:
    """Whether a forward pass writes the whole sequence of state i > 0, in the plan's dtype.

    The backward pass reads it, or a matmul multiplies it.
    """
    name = plan.cell.states[i].name
    multiplied = any(l.operand is Expr("state", (), (name,)) for l in plan.cell.linears)
    return multiplied or (variant.keep and name in plan.states)


@functools.lru_cache(maxsize=1024)
def symbol(name: str) -> str:
    """The name of an array as an identifier of Python and C."""
    return re.sub(r"\W", "_", name)


def gate_of(node: Expr) -> str | None:
    """The gate whose value this is: the function of one gate's projections."""
    if len(node.args) == 1 and node.args[0].op in ("x", "preact"):
        return node.args[0].attrs[-1]
    return None


def plus(column: int, units: str) -> str:
    """An offset of units that begin at a column."""
    return f"({column} + {units})" if column else units


def number(value: float) -> str:
    """A constant of the program text."""
    return repr(value) if math.isfinite(value) else f'float("{value}")'


# The functions of ``library`` that a kernel may import; the file is read here, but not imported.
_library = Path(__file__).with_name("library.py").read_text(encoding="utf-8")
FUNCTIONS = tuple(re.findall(r"^def ([a-z]\w*)\(", _library, re.MULTILINE))
