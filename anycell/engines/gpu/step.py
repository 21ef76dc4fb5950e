"""Tier 3: one step per launch. Any cell, any size.

Between two launches the framework multiplies: its matmul leaves float32 products in a buffer, and
one kernel does everything else on a tile of rows times units.

    forward     product = state[t] @ W.T         kernel: new states, what the backward pass needs
    backward    kernel: d_gates[t], gradients of the states       back = d_gates[t] @ W

A matmul inside the step (its operand is computed in the step) begins a new *stage*, with a kernel
of its own. The kernel computes the values of earlier stages again, except for operands: that costs
less than storing and loading them. A row reduction needs all units of a row in one program;
without one, units are split over programs too. Values of different sizes meet only in a
matmul, so a kernel writes results of one size.

A launch that a CUDA graph holds has the same arguments each time. So kernels read what changes from
call to call, addresses above all, and the number of steps that are done, from a *table* in device
memory that ``steps`` fills. Only the arrays that matmuls read and write have fixed addresses:
kernels write the left sides of matmuls there, in addition to the sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Container
from typing import NamedTuple

from anycell.engines.gpu.text import (
    NUMBERS,
    Printed,
    Text,
    Variant,
    keeps,
    kept,
    power_of_two,
    source,
    stores_operand,
    symbol,
)
from anycell.lang.cell import Linear
from anycell.lang.expr import Expr, topological
from anycell.lang.ops import is_reduction
from anycell.plan import Plan, gradient_roots

ELEMENTS = 512  # of a tile: four for each of 128 threads
FILLED = 32  # places of a table that one launch fills
DONE = "done"  # what a table holds first: how many steps of the call are done


class Stage(NamedTuple):
    """A part of a step.

    Attributes:
        matmuls: by number, those whose results it reads, and no earlier stage.
        kernels: one per size of its results.
    """

    matmuls: tuple[int, ...]
    kernels: tuple[Printed, ...]


class Step(NamedTuple):
    """All kernels of a step.

    Attributes:
        stages: in order.
        close: backward, the kernels that add up the gradients of the states after the last step of
            a call, one per size; else empty.
        table: what the table holds, by place: a name, and Triton's type of it.
    """

    stages: tuple[Stage, ...]
    close: tuple[Printed, ...]
    table: tuple[tuple[str, str], ...]

    @property
    def all(self) -> tuple[Printed, ...]:
        """Every kernel."""
        return (*(kernel for stage in self.stages for kernel in stage.kernels), *self.close)


def staged(plan: Plan, variant: Variant, linear: Linear) -> bool:
    """Whether a matmul's operand (backward: its gradient) is computed inside the step.

    A state is known before the step, unless a reset may replace it.
    """
    inside = linear.operand.op != "state"
    return inside if variant.backward else inside or variant.resets


def multiplied(plan: Plan, variant: Variant, linear: Linear) -> bool:
    """Whether a pass has this matmul. The backward pass does not have it if nothing before its
    operand needs a gradient.
    """
    return (
        not (variant.backward and staged(plan, variant, linear)) or linear.name in plan.carried_back
    )


def print_step(plan: Plan, variant: Variant) -> Step:
    """The kernels of a plan."""
    table = {DONE: "i64"}
    levels, roots = _levels(plan, variant), _roots(plan, variant)
    depth = max((levels[root] for root in roots), default=0)
    numbers = {l.name: k for k, l in enumerate(plan.cell.linears)}
    level_of = {
        numbers[node.attrs[0]]: level
        for node, level in levels.items()
        if _is_product(node, variant)
    }
    stages = []
    for s in range(depth + 1):
        matmuls = tuple(k for k in sorted(level_of) if level_of[k] == s)
        # The matmuls whose operands this stage computes.
        ahead = [plan.cell.linears[k] for k in sorted(level_of) if level_of[k] == s + 1]
        last = s == depth
        side = "out_size" if variant.backward else "in_size"
        sizes = dict.fromkeys(getattr(l, side) for l in ahead)
        if last:  # some of these kernels have nothing to write
            sizes |= dict.fromkeys([*(state.size for state in plan.cell.states), *plan.sizes])
        kernels = [
            _Kernel(
                plan, variant, size, [l for l in ahead if getattr(l, side) == size], last, table
            )
            for size in sizes
        ]
        where = f"stage {s + 1} of {depth + 1}" if depth else "one step"
        printed = (kernel.printed(f"step_{s}_{kernel.of}", where) for kernel in kernels)
        stages.append(Stage(matmuls, tuple(k for k in printed if k is not None)))
    close = []
    if variant.backward:
        for size in dict.fromkeys(state.size for state in plan.cell.states):
            close.append(_Kernel(plan, variant, size, [], False, table).closing(f"close_{size}"))
    return Step(tuple(stages), tuple(close), tuple(table.items()))


@functools.cache
def print_fill() -> Printed:
    """The kernel that fills a part of a table with numbers. They are arguments, so that a CUDA
    graph that a user captures holds them, and no host memory has to outlive the call.
    """
    names = [f"value{n}" for n in range(FILLED)]
    lines = [f"tl.store(table + first + {n}, {name})" for n, name in enumerate(names)]
    # Unsigned: the compiler is told of signed numbers of 64 bits whether 16 divides them, which
    # would make a kernel for each pattern.
    arguments = {"table": "*i64", "first": "i32", **dict.fromkeys(names, "u64")}
    return _small("fill", "Fills a part of a table.", arguments, lines)


@functools.cache
def print_advance() -> Printed:
    """The kernel that counts t steps as done."""
    lines = ["tl.store(table, tl.load(table) + t)"]
    return _small("advance", "Counts steps as done.", {"table": "*i64", "t": "i32"}, lines)


def _small(name: str, about: str, arguments: dict[str, str], lines: list[str]) -> Printed:
    """A kernel of one program."""
    text = source(name, about, arguments, "\n".join(f"    {line}" for line in lines))
    return Printed(name, text, tuple(arguments.items()), (1, 1), "", 1)


def _is_product(node: Expr, variant: Variant) -> bool:
    """Whether a matmul computes the value in this pass; products of the other pass are saved."""
    return node.op == "linear_t" if variant.backward else node.op in ("linear", "preact")


def _roots(plan: Plan, variant: Variant) -> list[Expr]:
    if variant.backward:
        return gradient_roots(plan.cell, plan.gradients)
    return [*plan.cell.next, *kept(plan, variant)]


def _levels(plan: Plan, variant: Variant) -> dict[Expr, int]:
    """For every node the first stage that can compute it."""
    text = Text(plan, variant, (1, 1), False)
    linears = {l.name: l for l in plan.cell.linears}
    level: dict[Expr, int] = {}

    def leaf(node: Expr) -> bool:
        if not _is_product(node, variant):
            return text.is_leaf(node)
        return not variant.backward and not staged(plan, variant, linears[node.attrs[0]])

    for node in topological(_roots(plan, variant), leaf):
        if leaf(node):
            level[node] = 0
        else:
            below = max((level[arg] for arg in node.args), default=0)
            level[node] = below + _is_product(node, variant)
    return level


class _Kernel(Text):
    """The kernel of one stage, for the results of one size."""

    begins = False  # of arrays over time the table holds the address of the call's first step

    def __init__(
        self,
        plan: Plan,
        variant: Variant,
        of: str,
        ahead: list[Linear],
        last: bool,
        table: dict[str, str],
    ) -> None:
        self.of, self.ahead, self.last, self.table = of, ahead, last, table
        self.tabled: dict[str, str] = {}  # what comes from the table, by name
        units = plan.sizes[of]
        self.kept = [n for n in kept(plan, variant) if last and plan.symbol(n) == of]
        self.targets = self._targets(plan, variant)
        whole = any(map(is_reduction, topological(self.targets)))
        width = power_of_two(units) if whole else min(128, power_of_two(units))
        super().__init__(plan, variant, (max(1, ELEMENTS // width), width), whole)
        if ELEMENTS < width <= 16 * ELEMENTS:
            self.warps = 8  # a row of many units has more values than 128 threads have registers

    def _targets(self, plan: Plan, variant: Variant) -> list[Expr]:
        """All that the kernel writes."""
        cell, g, of = plan.cell, plan.gradients, self.of
        sizes = {s.name: s.size for s in cell.states}
        if not variant.backward:
            targets = [l.operand for l in self.ahead]
            if self.last:
                targets += [n for s, n in zip(cell.states, cell.next, strict=True) if s.size == of]
            return targets + self.kept
        targets = [d for l in self.ahead for d in g.linear[l.name].values()]
        if self.last:
            targets += [d for name, d in g.state.items() if sizes[name] == of]
            for l in cell.linears:
                if l.name not in plan.carried_back and l.out_size == of:
                    targets += g.linear[l.name].values()
                if stores_operand(plan, variant, l) and l.in_size == of:
                    targets.append(l.operand)
            if of == "H":
                targets += [*g.x.values(), *g.param.values()]
                targets += [] if g.static is None else [g.static]
        return targets

    def printed(self, name: str, where: str) -> Printed | None:
        """The kernel; None where it has nothing to write."""
        if not self.targets:
            return None
        self._start()
        if self.variant.mask:
            self.once("valid", self.flags("mask"))
        if self.variant.backward:
            self._backward()
        else:
            self._forward()
        of = "" if len(set(self.plan.sizes.values())) == 1 else f", results of size {self.of}"
        about = f"{where}{of}: {self.plan.sizes[self.of]} units, {self.plan.dtype}."
        return self.finish(name, about)

    def _start(self) -> None:
        super().argument("table", "*i64")
        super().argument("t", "i32")
        self.begin()
        self.units(self.of)

    # -- the table -------------------------------------------------------------------------------
    def argument(self, name: str, kind: str) -> str:
        """Numbers of the form, and arrays that matmuls read and write, are arguments; everything
        else comes from the table.
        """
        name = symbol(name)
        if name in self.tabled:
            return name
        if name == "draws":  # four numbers
            first, *_ = [self._entry(f"draws{n}", "i64") for n in range(4)]
            self.tabled[name] = f"table + {first}"
        elif name == "turn":
            self.tabled[name] = f"tl.load(table + {self._entry(name, 'i64')})"
        elif kind == "*u8":
            number = f"tl.load(table + {self._entry(name, kind)})"
            self.tabled[name] = f"{number}.to(tl.pointer_type(tl.uint8))"
        elif kind[0] == "*" and name not in self._own():
            odd, place = super().argument("odd", "i64"), self._entry(name, kind)
            self.tabled[name] = f"address(table, {place}, {odd}, tl.{NUMBERS[kind[1:]].name})"
        else:
            return super().argument(name, kind)
        return name

    def _entry(self, name: str, kind: str) -> int:
        """The place of an entry in the table."""
        self.table.setdefault(name, kind)
        return list(self.table).index(name)

    def _own(self) -> Container[str]:
        """The arrays that matmuls read or write."""
        stems = ("outputs", "back") if self.variant.backward else ("operand", "product")
        return {f"{stem}{k}" for stem in stems for k in self.numbers.values()}

    def finish(self, name: str, about: str) -> Printed:
        """The whole text: the table is read first."""
        read = {"t": f"tl.load(table + {self._entry(DONE, 'i64')}) + t", **self.tabled}
        self.lines[:0] = [f"    {variable} = {value}" for variable, value in read.items()]
        return super().finish(name, about)

    def _at_outputs(self, array: str, output: int, outputs: int, heads: int) -> str:
        """The address of units in the arrays of matmuls: ``[rows, outputs * units]``, or with
        several heads ``[heads, rows, ...]``.
        """
        size, units = self.plan.sizes[self.of], self.units(self.of)
        if heads == 1:
            return self.at(f"{array} + rows * {outputs * size}", output * size, self.of)
        width = size // heads
        head = f"({units} // {width} * batch + rows) * {outputs * width}"
        return f"{array} + {head} + ({output * width} + {units} % {width})"

    # -- forward ---------------------------------------------------------------------------------
    def _forward(self) -> None:
        cell, of = self.cell, self.of
        states = [i for i, s in enumerate(cell.states) if s.size == of and self.last]
        labels = {cell.next[i]: f"{cell.states[i].name}_new" for i in states}
        self.evaluate(self.targets, labels)
        olds = {}
        if self.variant.mask:  # a masked row holds its states
            for i in states:
                old = Expr("state", (), (cell.states[i].name,))
                self.evaluate([old])
                olds[i] = self.value(old)
        for l in self.ahead:
            self._store_operand(l, self.value(l.operand))
        for i in states:
            new = self.framed("after", new=self.value(cell.next[i]), entered=olds.get(i, ""))
            for l in cell.linears:  # that the next step begins with
                begins = not staged(self.plan, self.variant, l)
                if begins and l.operand.attrs == (cell.states[i].name,):
                    self._store_operand(l, new)
            if i:
                self.store(self.in_turn(f"work{i}", i, "t + 1 + turn"), new, of)
            if i == 0 or keeps(self.plan, self.variant, i):
                self.store_state(i, new)
            if i == 0:
                self.store_output()
        self.store_saved(self.kept)

    def _store_operand(self, l: Linear, value: str) -> None:
        """Stores the operand of the next matmul."""
        array = self.array(f"operand{self.numbers[l.name]}")
        self.store(self._at_outputs(array, 0, 1, l.heads), value, self.of)

    def before_step(self, i: int) -> str:
        """The address of state i before the step."""
        working = i and not self.variant.backward
        return self.in_turn(f"work{i}", i, "t + turn") if working else super().before_step(i)

    def load_linear(self, node: Expr) -> tuple[str, str]:
        """An output of a matmul, with its bias."""
        name, output = node.attrs
        k = self.numbers[name]
        l = self.cell.linears[k]
        text = self._product(f"product{k}", l.outputs.index(output), len(l.outputs), l.heads)
        if self.variant.biases[k]:
            text += f" + {self.bias(l, output)}"
        return f"r_{output}" if output != name else output, text

    def _product(self, array: str, output: int, outputs: int, heads: int) -> str:
        """An output of a matmul, in float32."""
        where = self._at_outputs(self.array(array, wide=True), output, outputs, heads)
        return self.load(where, self.of, wide=True)

    def load_preact(self, node: Expr) -> tuple[str, str]:
        """A gate's input projection and its part of the recurrent matmul."""
        gate = node.attrs[1]
        x = self.assign(*self.load_x(Expr("x", (), (gate,))))
        r = self.assign(*self.load_linear(node))
        return f"a_{gate}", f"{x} + {r}"

    # -- backward --------------------------------------------------------------------------------
    def _backward(self) -> None:
        cell, of, g = self.cell, self.of, self.plan.gradients
        self.evaluate(self.targets, self.labels())
        for l in self.ahead:
            self.store_outputs(l)
            self._store_gradients(l)
        if not self.last:
            return
        self.store_gradients({of}, inside=False)
        for l in cell.linears:
            if l.out_size == of and l.name not in self.plan.carried_back:
                self._store_gradients(l)
        for i, s in enumerate(cell.states):
            if s.size == of:
                self.later(i)
                self._divert(i)
                d_function, d_held = self.value(g.state[s.name]), self.under_mask(i)
                new = self.framed("d_entered", d_function=d_function, d_held=d_held)
                self.store(self._gradient(i, "t + 1"), new, of)
        if of == "H":
            self._sums()

    def _store_gradients(self, l: Linear) -> None:
        """The gradients of a matmul's outputs, for the matmul that carries them back."""
        if multiplied(self.plan, self.variant, l):
            array = self.array(f"outputs{self.numbers[l.name]}")
            for n, d in enumerate(self.plan.gradients.linear[l.name].values()):
                where = self._at_outputs(array, n, len(l.outputs), l.heads)
                self.store(where, self.valid(self.value(d)), self.of)

    def _sums(self) -> None:
        """Gradients that add up over the steps, in memory that no other program touches."""
        g = self.plan.gradients
        for n, d in enumerate(g.param.values()):
            rows = f"tl.where(is_row, {self.valid(self.value(d))}, 0.0)"
            full = f"tl.sum({rows} + tl.zeros([{self.rows}, {self.lanes}], tl.float32), axis=0)"
            self.add_param(n, f"{full}[None, :]")
        if g.static is not None:
            self.add(self.of_rows("d_static", "H"), self.valid(self.value(g.static)), "in_H")

    def _gradient(self, i: int, step: str) -> str:
        """The address of the gradient of state i from later steps."""
        return self.in_turn(self.of_state("d_state", i), i, f"{step} + turn")

    def later(self, i: int) -> str:
        """The gradient of the new state i from the step after, if no reset comes between."""
        name = f"later_{self.cell.state_names[i]}"
        if name in self.said:
            return name
        parts = [self.load(self._gradient(i, "t"), self.of, wide=True)]
        for k, l in enumerate(self.cell.linears):
            if l.operand is Expr("state", (), (self.cell.state_names[i],)):
                # The product of the step that was run before this one, if there was one.
                self.once("in_later", f"in_{self.of} & {self._not_first()}")
                product = self._product(f"back{k}", 0, 1, l.heads)
                parts.append(product.replace(f"mask=in_{self.of}", "mask=in_later"))
        if not self.variant.resets:
            return self.once(name, " + ".join(parts))
        self.once("diverted", self.flags("resets", "t - 1", f"is_row & {self._not_first()}"))
        total = self.once(f"all_{name}", " + ".join(parts))
        return self.once(name, self.framed("d_before", d_entered=total, reset="diverted"))

    def _not_first(self) -> str:
        """Whether the call has run another step before, for each row."""
        return self.once("later", "rows * 0 + t > 0")

    def _divert(self, i: int) -> None:
        """Adds the later gradient to what a reset restored, if the step after began with one."""
        if self.variant.resets:
            name = self.cell.state_names[i]
            where = self.of_rows(self.of_state("d_reset", i), self.of)
            total = f"all_later_{name}"
            value = self.framed("d_restored", d_entered=total, reset="diverted")
            self.add(where, value, f"in_{self.of}", f"restored_{name}")

    def load_linear_t(self, node: Expr) -> tuple[str, str]:
        """The gradient that reaches the operand of a matmul inside the step."""
        l = self.cell.linears[self.numbers[node.attrs[0]]]
        return f"d_{l.name}", self._product(f"back{self.numbers[l.name]}", 0, 1, l.heads)

    def closing(self, name: str) -> Printed:
        """The kernel after the last step: what the first step's matmuls and resets still add."""
        self._start()
        for i, s in enumerate(self.cell.states):
            if s.size == self.of:
                later = self.later(i)
                self._divert(i)
                self.store(self._gradient(i, "t + 1"), later, self.of)
        return self.finish(name, "after the last step.")
