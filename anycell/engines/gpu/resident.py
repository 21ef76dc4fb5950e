"""Tier 1: one launch per sequence. Weights stay on chip; for hidden sizes that fit.

A program owns a tile of rows and all their units, and loops over the steps by itself: it needs no
barrier and waits for no other program, and row reductions cost nothing extra. Weights are read
once. States and their gradients stay in registers, and are stored only where they are kept.

    forward     for t: r = dot(h, W.T), then the cell; h and c go from turn to turn
    backward    for t: the derived backward pass, then d_h = dot(d_gates, W) + ...

Block-diagonal weights are held as whole matrices with zeros: their heads are too narrow for the
matrix units. The projected gates of the next step are loaded while this one is computed.
"""

from __future__ import annotations

from collections.abc import Iterable

from anycell.engines.gpu.text import (
    Load,
    Printed,
    Text,
    Variant,
    keeps,
    kept,
    power_of_two,
    stores_operand,
)
from anycell.lang.cell import Linear
from anycell.lang.expr import Expr, topological
from anycell.plan import Plan, gradient_roots

# STEP stands for a step in the text of a load. The others mark places: for the loads before the
# loop, for the loads in it, and for what happens at its end.
STEP, FIRST, NEXT, TURN = "{t}", "@first", "@next", "@turn"
LEAST = 16  # rows and units of the smallest matrices that the matrix units take


def print_resident(
    plan: Plan, variant: Variant, warps: int = 4, precision: str = "ieee"
) -> Printed:
    """The kernel of a plan, for programs of ``warps`` warps, whose dots of float32 have that
    ``precision``.
    """
    return Loop(plan, variant, warps, precision).printed()


class Loop(Text):
    """A kernel that loops over time; tier 2 overrides the methods for what it does differently."""

    name = "resident"
    alone = True

    def __init__(
        self,
        plan: Plan,
        variant: Variant,
        warps: int,
        precision: str,
        tile: tuple[int, int] = (LEAST, LEAST),
        whole: bool = True,
    ) -> None:
        super().__init__(plan, variant, tile, whole)
        self.warps, self.precision = warps, precision
        self.linears = plan.cell.linears
        self.loads: dict[Load, str] = {}  # loads a step early, and the names of their values
        self.kept = kept(plan, variant)
        self.kind = f"tl.{self.io.name}"

    def printed(self) -> Printed:
        """The whole kernel."""
        self.begin()
        self.argument("count", "i32")
        self.argument("turn", "i32")
        # A value that a loop carries keeps its shape, so it enters the loop as a whole tile.
        for size in self._sizes:
            self.units(size)
            self.once(f"zero_{size}", f"tl.zeros([{self.rows}, {self.padded(size)}], tl.float32)")
        self.load_weights()
        (self._backward if self.variant.backward else self._forward)()
        self._say_early()
        about = f"all steps: {self.plan.hidden_size} units, {self.plan.dtype}."
        return self.finish(self.name, about)

    @property
    def _sizes(self) -> dict[str, None]:
        sizes = [s.size for s in self.cell.states] + ["H"]
        return dict.fromkeys(sizes + [n for l in self.linears for n in (l.in_size, l.out_size)])

    @property
    def turns(self) -> str:
        """The number of turns of the loop, backward."""
        return "count"

    def padded(self, size: str) -> int:
        """Units of a tile."""
        return power_of_two(self.plan.sizes[size], LEAST)

    # -- loads a step early ----------------------------------------------------------------------
    @property
    def early(self) -> frozenset[str]:
        """Arrays whose numbers of the next step are loaded during this one."""
        return frozenset() if self.variant.backward else frozenset({"gates", "mask", "resets"})

    def row(self, name: str, step: str = "t", wide: bool = False, tag: str = "") -> str:
        if name in self.early and step == "t":
            return self.place(name, STEP, wide=wide)
        return super().row(name, step, wide, tag)

    def flags(self, name: str, step: str = "t", mask: str = "is_row", rows: str = "rows") -> str:
        step = STEP if name in self.early and step == "t" else step
        return super().flags(name, step, mask, rows)

    def read(self, load: Load) -> str:
        """A load in the step that needs it, or the value loaded in the previous step, unconverted:
        any operation on it would wait for it.
        """
        if STEP not in load.where:
            return super().read(load)
        return self.loads.setdefault(load, f"now_{len(self.loads)}")

    def _say_early(self) -> None:
        """Puts the loads of the first step before the loop, and loads of the next step into it."""

        def at(load: Load, step: str) -> str:
            rows = "their_rows" if load.rows == "is_theirs" else "rows"
            mask = f"{load.rows} & ({rows} * 0 + {step} < count)"
            units = "" if load.size is None else f" & is_{load.size}"
            return load._replace(where=load.where.replace(STEP, step)).text(mask + units)

        def lines(name: str, step: str) -> list[str]:
            return [f"{name}_{n} = {at(load, step)}" for n, load in enumerate(self.loads)]

        parts = {
            FIRST: lines("now", "0"),
            NEXT: lines("next", "t + 1"),
            TURN: [f"now_{n} = next_{n}" for n in range(len(self.loads))],
        }
        expanded = []
        for line in self.lines:
            part = parts.get(line.strip())
            indent = line[: len(line) - len(line.lstrip())]
            expanded += [line] if part is None else [indent + inner for inner in part]
        self.lines = expanded

    # -- matmuls ---------------------------------------------------------------------------------
    def load_weights(self) -> None:
        """Brings all weights on chip."""
        for k, l in enumerate(self.linears):
            for output in l.outputs:
                self._load_weight(k, l, output)

    def _load_weight(self, k: int, l: Linear, output: str) -> None:
        """One output's weights: ``[in, out]`` forward, ``[out, in]`` backward."""
        out, into = self.plan.sizes[l.out_size], self.plan.sizes[l.in_size]
        axes = ("[:, None]", "[None, :]") if self.variant.backward else ("[None, :]", "[:, None]")
        o = self.once(f"out_{l.out_size}", f"tl.arange(0, {self.padded(l.out_size)}){axes[0]}")
        i = self.once(f"into_{l.in_size}", f"tl.arange(0, {self.padded(l.in_size)}){axes[1]}")
        n, weight = l.outputs.index(output), self.array(f"weight{k}")
        inside = f"({o} < {out}) & ({i} < {into})"
        if l.heads == 1:
            where = f"({n * out} + {o}) * {into} + {i}"
        else:
            rows, columns = out // l.heads, into // l.heads
            where = f"({o} // {rows} * {len(l.outputs) * rows} + {n * rows} + {o} % {rows})"
            where += f" * {columns} + {i} % {columns}"
            inside += f" & ({o} // {rows} == {i} // {columns})"
        self.once(f"w{k}_{output}", f"tl.load({weight} + {where}, mask={inside}, other=0.0)")

    def _dot(self, operand: str, weight: str) -> str:
        precision = ""
        if not self.half:
            precision = f", input_precision={self.precision!r}"
        return f"tl.dot({operand}, {weight}{precision})"

    def _operand(self, name: str, value: str, size: str) -> str:
        """The left side of a matmul; lanes beyond the units are 0, since 0 times NaN is NaN."""
        full = self.plan.sizes[size] == self.padded(size)
        text = f"zero_{size} + {value}" if full else f"tl.where(is_{size}, {value}, zero_{size})"
        return self.once(name, f"({text}).to({self.kind})" if self.half else text)

    def is_leaf(self, node: Expr) -> bool:
        """Whether the value comes from elsewhere; the kernel computes the matmuls of its pass."""
        products = ("linear_t",) if self.variant.backward else ("linear", "preact")
        return super().is_leaf(node) if node.op not in products else node in self.names

    def product(self, node: Expr) -> tuple[str, str]:
        """Forward, an output of a matmul; backward, the gradient that reaches the operand."""
        k = self.numbers[node.attrs[0]]
        l = self.linears[k]
        if self.variant.backward:
            return f"d_{l.name}", self._transposed(k, l)
        output = node.attrs[1]
        text = self.multiply(k, l, output, node)
        if node.op == "preact":
            return f"a_{output}", f"{self.before(node)} + {text}"
        if self.variant.biases[k]:
            text += f" + b{k}_{output}"
        return f"r_{output}" if output != l.name else output, text

    def before(self, node: Expr) -> str:
        """The terms of a gate besides its matmul, the biases of both included."""
        k, gate = self.numbers[node.attrs[0]], node.attrs[1]
        x = self.projected(gate)
        bias = f" + bias_{gate}" if self.variant.input_bias or self.variant.biases[k] else ""
        return self.once(f"x_{gate}", x + bias)

    def input_bias(self, gate: str) -> str:
        """The bias of the input projection of a gate, loaded before the loop."""
        return self.once(f"bias_ih_{gate}", super().input_bias(gate))

    def _load_biases(self) -> None:
        """Brings all biases on chip, for a gate that sums two of them as one."""
        variant, nodes = self.variant, topological(self.cell.next)
        gates = dict.fromkeys(n.attrs[-1] for n in nodes if n.op in ("x", "preact"))
        for gate in gates if variant.input_bias else ():
            self.input_bias(gate)
        for k, l in enumerate(self.linears):
            for output in l.outputs if variant.biases[k] else ():
                self.once(f"b{k}_{output}", self.bias(l, output))
        for node in nodes:
            if node.op == "preact":
                k, gate = self.numbers[node.attrs[0]], node.attrs[1]
                terms = [f"bias_ih_{gate}"] * variant.input_bias
                terms += [f"b{k}_{gate}"] * variant.biases[k]
                if terms:
                    self.once(f"bias_{gate}", " + ".join(terms))

    def multiply(self, k: int, l: Linear, output: str, node: Expr) -> str:
        """One output of a matmul, without its bias."""
        operand = self._operand(f"operand_{k}", self._argument_of(node), l.in_size)
        return self._dot(operand, f"w{k}_{output}")

    def _transposed(self, k: int, l: Linear) -> str:
        parts = []
        for output, d in self.plan.gradients.linear[l.name].items():
            value = self.valid(self.names[d])
            left = self._operand(f"d{k}_{output}", value, l.out_size)
            parts.append(self._dot(left, f"w{k}_{output}"))
        return " + ".join(parts)

    # -- forward ---------------------------------------------------------------------------------
    def _forward(self) -> None:
        cell, variant = self.cell, self.variant
        self._load_biases()
        self._constants(cell.next)
        for i, s in enumerate(cell.states):
            if i:
                text = self.load(self.in_turn(f"work{i}", i, "turn"), s.size, wide=True)
            else:
                text = self.load(self.at(self.place("hidden", "0"), 0, s.size), s.size)
            self.say(f"s_{s.name} = {text}")
        self.say(FIRST)
        self.say("for t in range(count):")
        with self.indented():
            self._flags()
            for i, s in enumerate(cell.states):
                if variant.resets:
                    leaves = {"restored": self.restored(i), "before": f"s_{s.name}"}
                    self.say(f"s_{s.name} = {self.framed('entered', **leaves)}")
                self.names[Expr("state", (), (s.name,))] = f"s_{s.name}"
                self.taken.add(f"s_{s.name}")
            self.before_wait()
            self.wait()
            self._step()
            self.say(TURN)
        for i, s in enumerate(cell.states[1:], 1):
            self.store(self.in_turn(f"work{i}", i, "turn + 1"), f"s_{s.name}", s.size)
        self.end()

    def _step(self) -> None:
        cell, variant, plan = self.cell, self.variant, self.plan
        states = list(zip(cell.states, cell.next, strict=True))
        self.reduce([*cell.next, *self.kept])
        self.evaluate([*cell.next, *self.kept], {n: f"{s.name}_new" for s, n in states})
        for s, node in states:  # all, before the first of them takes its new value
            new = f"zero_{s.size} + {self.value(node)}"
            after = self.framed("after", new=new, entered=f"s_{s.name}")
            self.once(f"after_{s.name}", after)
        h = cell.states[0]
        self.hand_over(f"after_{h.name}")
        if self.half:
            self.say(f"after_{h.name} = after_{h.name}.to({self.kind}).to(tl.float32)")
        self.store_state(0, f"after_{h.name}")
        self.publish()
        self.store_output()
        self.store_saved(self.kept)
        for i, s in enumerate(cell.states):
            self.say(f"s_{s.name} = after_{s.name}")
            if i and keeps(plan, variant, i):
                self.store_state(i, f"after_{s.name}")

    # Hooks for tier 2. Programs of tier 1 need no results of one another, and never wait.

    def before_wait(self) -> None:
        """Prints the part of a step before it waits."""
        self.say(NEXT)

    def wait(self) -> None:
        """Waits before a step until what it reads has been written."""

    def wait_backward(self, roots: list[Expr]) -> None:
        """Waits likewise, before the step that computes these."""
        self.say(NEXT)

    def reduce(self, roots: list[Expr]) -> None:
        """Called before these values of a step are computed, for their row reductions."""

    def hand_over(self, value: str) -> None:
        """Called before the result of a step, of that name, is stored."""

    def publish(self) -> None:
        """Called after the results of a step have been stored."""

    def begin_step(self) -> None:
        """Called at the beginning of a turn of the loop, backward."""

    def live(self, value: str, other: str) -> str:
        """The value that such a turn leaves behind; ``other`` in a turn without rows."""
        return value

    def after_steps(self) -> None:
        """Called after the loop, backward."""

    def end(self) -> None:
        """Called at the end of the kernel."""

    # -- what both passes share ------------------------------------------------------------------
    def _flags(self) -> None:
        if self.variant.mask:
            self.once("valid", self.flags("mask"))
        if self.variant.resets:
            self.once("reset", self.flags("resets"))

    def _constants(self, roots: Iterable[Expr]) -> None:
        """Loads what no step changes."""
        constant = ["param", "hyper", *(["static", "recurrent_mask"] if self.shared else [])]
        for node in topological(roots):
            if node.op in constant:
                self.evaluate([node])

    # -- backward --------------------------------------------------------------------------------
    def _backward(self) -> None:
        cell, variant, g = self.cell, self.variant, self.plan.gradients
        roots = gradient_roots(cell, g)
        self._constants(roots)
        for i, s in enumerate(cell.states):
            self.say(f"g_{s.name} = {self.load(self._gradient(i, 'turn'), s.size, wide=True)}")
            if variant.resets:
                self.say(f"restored_{s.name} = {self.load(self._reset_sum(i), s.size, wide=True)}")
        totals = {f"sum_p_{name}": d for name, d in g.param.items()}
        for name in totals:
            self.say(f"{name} = zero_H")
        if g.static is not None:
            totals["sum_static"] = g.static
            self.say(f"sum_static = {self.load(self.of_rows('d_static', 'H'), 'H', wide=True)}")
        self.say(FIRST)
        self.say(f"for t in range({self.turns}):")
        with self.indented():
            self.begin_step()
            self._flags()
            operands = [l.operand for l in self.linears if stores_operand(self.plan, variant, l)]
            self.wait_backward([*roots, *operands])
            self.reduce([*roots, *operands])
            self.evaluate([*roots, *operands], self.labels())
            self.store_gradients(self._sizes, inside=True)
            self.publish()
            for name, d in totals.items():
                self.say(f"{name} += {self.live(self.valid(self.value(d)), '0.0')}")
            for i in range(len(cell.states)):
                self._carry(i)
            self.say(TURN)
        self.after_steps()
        self._hand_on(totals)
        self.end()

    def _carry(self, i: int) -> None:
        """Computes the gradient of state i for the step before."""
        s = self.cell.states[i]
        parts = [f"zero_{s.size} + {self.value(self.plan.gradients.state[s.name])}"]
        for k, l in enumerate(self.linears):
            if l.operand is Expr("state", (), (s.name,)) and not self.shared:
                parts.append(self._transposed(k, l))
        g, function, held = f"g_{s.name}", " + ".join(parts), self.under_mask(i)
        d_entered = self.framed("d_entered", d_function=function, d_held=held)
        self.say(f"{g} = {self.live(d_entered, g)}")
        if self.variant.resets:
            self.say(f"restored_{s.name} += {self.framed('d_restored', d_entered=g)}")
            self.say(f"{g} = {self.framed('d_before', d_entered=g)}")

    def _hand_on(self, totals: dict[str, Expr]) -> None:
        """Hands on what the loop carried."""
        for i, s in enumerate(self.cell.states):
            self.store(self._gradient(i, "turn + 1"), f"g_{s.name}", s.size)
            if self.variant.resets:
                self.store(self._reset_sum(i), f"restored_{s.name}", s.size)
        for n, name in enumerate(totals):
            if name == "sum_static":
                self.store(self.of_rows("d_static", "H"), name, "H")
            else:
                self.add_param(n, f"tl.sum(tl.where(is_row, {name}, 0.0), axis=0, keep_dims=True)")

    def _reset_sum(self, i: int) -> str:
        """The address of the gradient of what resets restore, of each row."""
        return self.of_rows(self.of_state("d_reset", i), self.cell.states[i].size)

    def _gradient(self, i: int, turn: str) -> str:
        """The address of the gradient of state i from later calls."""
        return self.in_turn(self.of_state("d_state", i), i, turn)

    def later(self, i: int) -> str:
        """The gradient of state i, which goes from turn to turn."""
        return f"g_{self.cell.state_names[i]}"
