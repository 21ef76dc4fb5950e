"""Prints the element-wise work on a row that takes a step: the graph of the cell or of its
derivative, in passes over the units.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from anycell.engines.cpu import ops
from anycell.engines.cpu.geometry import Matmul
from anycell.engines.cpu.ir import Value, Variable, constant
from anycell.engines.cpu.rows import Lanes, Rows, Task
from anycell.lang.expr import Expr, is_const, topological
from anycell.lang.ops import is_boolean, is_reduction
from anycell.plan import MATMULS


class Known(NamedTuple):
    """The values of a row that earlier passes have computed: ``reduced`` values are one number in
    every lane, ``stored`` values are in scratch memory.
    """

    reduced: dict[Expr, Value]
    stored: set[Expr]


class Step:
    """The passes of a step."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.b, self.layout = rows, rows.b, rows.layout
        self.plan, self.cell = self.layout.plan, self.layout.cell
        b = self.b
        self.hyper = {
            n: b.splat(b.load(b.gep(rows.arg["hyper"], i), b.real))
            for i, n in enumerate(self.cell.hyper)
        }

    def print(self, task: Task, stage: int) -> None:
        """Prints the passes of one stage of the step."""
        b, layout = self.b, self.layout
        begin, *following = layout.stages[stage:]
        known = Known({}, set())
        for part in layout.passes[:begin]:  # results of earlier stages
            for node in part.reductions:
                if node.attrs == (1,):
                    at = b.gep(task.scratch, layout.scratch["narrow", node])
                    known.reduced[node] = b.splat(b.load(at, b.real))
            known.stored.update(part.stores, (n for n in part.reductions if n.attrs != (1,)))
        for number in range(begin, [*following, len(layout.passes)][0]):
            self._pass(number, task, known)

    def _pass(self, number: int, task: Task, known: Known) -> None:
        """Prints one pass over the units of a row; the last pass computes the results."""
        b, layout, rows = self.b, self.layout, self.rows
        part, last = layout.passes[number], number == len(layout.passes) - 1
        operands = [] if last else self._operands(layout.passes[number + 1].matmuls)
        arguments = [node.args[0] for node in part.reductions]
        roots = [*(layout.roots if last else ()), *arguments, *(node for _, node, _ in operands)]
        # The sizes of the arrays that the values are written to; a number fits every size.
        sizes = [*(layout.symbols if last else ()), *map(layout.plan.reduced, part.reductions)]
        sizes += [layout.operand_symbol(m) for m, _, _ in operands]
        # Values that all units share are computed once, before the loop.
        zero = b.value(0)
        shared = Values(self, task, Lanes(None, zero, zero, None, None), known)
        for node in topological(roots):
            if node in known.reduced or (node.narrow and self._ready(node, known)):
                shared.get(node)
        row_wide = [node for node in part.reductions if node.attrs == (1,)]
        sums = {node: b.variable(_empty(node), b.vec) for node in row_wide}
        for size in dict.fromkeys(sizes):
            with rows.vectors(task.span, self.plan.sizes[size]) as lanes:
                values = Values(self, task, lanes, known, shared.known)
                for node in part.reductions:
                    if layout.plan.reduced(node) == size:
                        value = values.get(node.args[0])
                        if node in sums:
                            self._fold(node, value, lanes, sums[node])
                        else:
                            b.store(value, self.scratch("argument", node, task, lanes))
                for m, node, column in operands:
                    if layout.operand_symbol(m) == size:
                        self._store_operand(m, values.get(node), values, column)
                if last and layout.backward:
                    self._gradients(size, values)
                elif last:
                    self._results(size, values)
                for node in part.stores:
                    if layout.plan.symbol(node) == size:
                        b.store(values.get(node), self.scratch("kept", node, task, lanes))
        known.stored.update(part.stores)
        for node in part.reductions:
            if node in sums:
                known.reduced[node] = self._reduced(node, sums[node].value, task)
            else:
                self._reduce_groups(node, task)
                known.stored.add(node)

    def scratch(self, use: str, node: Expr, task: Task, lanes: Lanes) -> Value:
        """The address of a value in scratch memory, for the vector of units at hand."""
        return self.b.gep(task.scratch, lanes.unit + self.layout.scratch[use, node])

    # ---- operands of matmuls inside the step -----------------------------------------------------
    def _operands(self, names: tuple[str, ...]) -> list[tuple[Matmul, Expr, int]]:
        """The operands of these matmuls, and their columns in the operand's row."""
        operands = []
        for m in map(self.layout.by_name.__getitem__, names):
            if self.layout.backward:
                parts = self.plan.gradients.linear[m.linear.name].values()
                width = m.inner // m.parts
                operands += [(m, node, n * width) for n, node in enumerate(parts)]
            else:
                operands.append((m, m.linear.operand, 0))
        return operands

    def _store_operand(self, m: Matmul, value: Value, values: Values, column: int) -> None:
        task, lanes = values.task, values.lanes
        if self.layout.backward:
            row = self.rows.at(self.layout.gradient(m), task.at)
            self.rows.store(value, row, lanes, column)
        else:
            self.b.store(value, self.scratch("operand", m.linear.operand, task, lanes))

    # ---- reductions ------------------------------------------------------------------------------
    def _ready(self, node: Expr, known: Known) -> bool:
        """Whether a narrow value can be computed from finished reductions and loaded values."""
        if node in self.layout.new_states:
            return False  # memory holds one number per unit
        if node in known.reduced or node in self.layout.loaded:
            return True
        return not is_reduction(node) and all(self._ready(arg, known) for arg in node.args)

    def _both(self, node: Expr, x: Value, y: Value) -> Value:
        """A reduction of two numbers, lane by lane."""
        return ops.maximum(self.b, x, y) if node.op == "max" else x + y

    def _whole(self, node: Expr, lanes: Value, count: int) -> Value:
        """A reduction of ``count`` numbers, from the partial results in the lanes."""
        whole = self.b.reduce_max(lanes) if node.op == "max" else self.b.reduce_add(lanes)
        return whole * (1.0 / count) if node.op == "mean" else whole

    def _reduced(self, node: Expr, sums: Value, task: Task) -> Value:
        """The reduction of a row, in every lane; also stores it if later stages may need it."""
        b, scratch = self.b, self.layout.scratch
        whole = self._whole(node, sums, self.plan.sizes[self.plan.reduced(node)])
        if ("narrow", node) in scratch:
            b.store(whole, b.gep(task.scratch, scratch["narrow", node]))
        return b.splat(whole)

    def _fold(self, node: Expr, value: Value, lanes: Lanes, into: Variable) -> None:
        total = into.value
        folded = self._both(node, total, value)
        # Lanes after the last unit do not count.
        into.value = folded if lanes.mask is None else self.b.select(lanes.mask, folded, total)

    def _reduce_groups(self, node: Expr, task: Task) -> None:
        """Reduces equal groups of units, and writes a group's result for each of its units."""
        b, (groups,) = self.b, node.attrs
        size = self.layout.plan.width(node) // groups
        source, target = (
            b.gep(task.scratch, self.layout.scratch[use, node]) for use in ("argument", "kept")
        )
        empty, total = _empty(node), b.unset(b.vec)
        with b.loop(0, groups) as group:
            start = group * size
            total.value = b.value(empty, b.vec)
            with b.loop(0, size, b.lanes) as i:
                lanes = b.lane_mask(size - i)
                part = b.masked_load(b.gep(source, start + i), lanes, empty)
                total.value = self._both(node, total.value, part)
            result = b.splat(self._whole(node, total.value, size))
            with b.loop(0, size, b.lanes) as i:
                b.store_first(result, b.gep(target, start + i), size - i)

    # ---- what a step writes ----------------------------------------------------------------------
    def _results(self, size: str, values: Values) -> None:
        """Writes a forward step's results of one size, for the vector of units at hand."""
        b, rows, layout, lanes, at = self.b, self.rows, self.layout, values.lanes, values.task.at
        states = {
            i: values.get(node)
            for i, (node, state) in enumerate(zip(self.cell.next, self.cell.states, strict=True))
            if state.size == size
        }
        for i, value in states.items():
            rows.store(value, rows.state(i, at, after=True), lanes)
        if 0 in states:
            with b.when(rows.given("out")):
                rows.store(states[0], rows.at("out", at), lanes)
        kept = {
            node: values.number(node) for node in layout.saved if layout.plan.symbol(node) == size
        }
        if kept:
            with b.when(rows.given("saved")):
                row = rows.at("saved", at)
                for node, value in kept.items():
                    if node.narrow:
                        rows.store_one(value, row, layout.saved[node])
                    else:
                        rows.store(value, row, lanes, layout.saved[node])

    def _gradients(self, size: str, values: Values) -> None:
        """Writes a step's gradients of one size, for the vector of units at hand."""
        rows, layout, plan, get = self.rows, self.layout, self.plan, values.get
        lanes, task, at = values.lanes, values.task, values.task.at
        # All values are computed first: writing state gradients overwrites inputs of the others.
        gradients, cell = plan.gradients, self.cell
        d_gates = {n: get(g) for n, g in gradients.x.items() if cell.gate_sizes[n] == size}
        d_outputs = {
            m: [get(g) for g in gradients.linear[m.linear.name].values()]
            for m in layout.matmuls
            if m.linear.out_size == size and m.linear.name not in plan.carried_back
        }
        d_states = {
            s.name: get(gradients.state[s.name]) for s in self.cell.states if s.size == size
        }
        d_params = {p.name: get(gradients.param[p.name]) for p in cell.params if p.size == size}
        once = gradients.static if cell.static_size == size else None
        d_static = None if once is None else get(once)
        for m in layout.matmuls:
            if m.linear.in_size == size:
                # Computed outside the branch of `keep_operand`: other matmuls may share its values.
                operand = get(m.linear.operand) if m.state is None else None
                rows.keep_operand(m, task, lanes, operand)
        for gate, value in d_gates.items():
            rows.store(value, rows.at("d_gates", at), lanes, plan.places[gate].start)
        for m, parts in d_outputs.items():
            if not plan.shares_gradient(m.linear):
                for n, value in enumerate(parts):
                    row = rows.at(layout.gradient(m), at)
                    rows.store(value, row, lanes, n * plan.sizes[size])
        for name, value in d_states.items():
            rows.store(value, rows.of(f"d_state {name}", at.row), lanes)
        for name, value in d_params.items():
            # Each group of rows has its own sum. One thread computes it, so the order of additions
            # does not depend on the number of threads.
            place = plan.param_places[name].start
            rows.add(value, rows.of("d_params", task.group), lanes, place)
        if d_static is not None:
            rows.add(d_static, rows.of("d_static", at.row), lanes)


class Values:
    """The values of the graph for a vector of units of a row, each computed once."""

    def __init__(
        self, step: Step, task: Task, lanes: Lanes, before: Known,
        known: Mapping[Expr, Value] | None = None,
    ) -> None:  # fmt: skip
        self.step, self.rows, self.b, self.layout = step, step.rows, step.b, step.layout
        self.task, self.lanes, self.before = task, lanes, before
        self.known = dict(known or {})
        self.words: dict[tuple[int, str], list[Variable]] = {}  # of random masks

    def get(self, node: Expr) -> Value:
        """The value of a node."""
        stack = [node]
        while stack:
            top = stack[-1]
            if top in self.known:
                stack.pop()
            elif self._is_leaf(top):
                self.known[top] = self._leaf(top)
            elif missing := [arg for arg in top.args if arg not in self.known]:
                stack.extend(missing)
            else:
                args = [self.known[arg] for arg in top.args]
                emit = ops.EMIT[top.op] if top.op != "keep" else None
                self.known[top] = emit(self.b, *args) if emit else self._keep(top, *args)
        return self.known[node]

    def number(self, node: Expr) -> Value:
        """The value of a node as memory holds it: a condition is 1 or 0."""
        value = self.get(node)
        return self.b.select(value, 1.0, 0.0) if is_boolean(node) else value

    def _is_leaf(self, node: Expr) -> bool:
        return (
            not node.args
            or node in self.layout.loaded
            or node in self.before.stored
            or is_reduction(node)
            or node.op in MATMULS
        )

    def _leaf(self, node: Expr) -> Value:
        b, layout, rows, lanes, at = self.b, self.layout, self.rows, self.lanes, self.task.at
        if is_const(node):
            return b.value(node.attrs[0], b.vec)
        if node.op == "hyper":
            return self.step.hyper[node.attrs[0]]
        if node.op == "units":
            return b.value(float(layout.plan.sizes[node.attrs[0]]), b.vec)
        if node in layout.saved and layout.backward:
            value = self._saved(node)
            return value.ne(0.0) if is_boolean(node) else value
        if node in layout.new_states:
            return rows.load(rows.state(layout.new_states[node], at, after=True), lanes)
        if node in self.before.reduced:
            return self.before.reduced[node]
        if node in self.before.stored:
            return b.load(self.step.scratch("kept", node, self.task, lanes))
        (name, *_) = node.attrs
        if node.op == "state":
            i = layout.cell.state_names.index(name)
            return rows.load(rows.before(i, at, self.task.reset), lanes)
        if node.op == "param":
            return rows.load(rows.array(f"param {name}"), lanes)
        if node.op == "static":
            return rows.load(rows.of("static", at.row), lanes)
        if node.op == "recurrent_mask":
            row = at.row + rows.arg["batch"] * node.attrs[0]
            return rows.load(rows.array("recurrent_mask", row * layout.plan.width(node)), lanes)
        if node.op == "grad":
            return self._upstream(layout.cell.state_names.index(name))
        if node.op == "x":
            return self._entering(name, biased=True)
        if node.op in MATMULS:
            m = layout.by_name[name]
            output = m.outputs.index("" if layout.backward else node.attrs[1])
            result = rows.result(m, output, self.task, lanes)
            if node.op != "preact":
                return result
            return self._entering(node.attrs[1], biased=False) + result
        raise NotImplementedError(f"the CPU kernel has no instructions for the op {node.op!r}")

    def _saved(self, node: Expr) -> Value:
        """A value that the forward pass has saved; conditions are numbers."""
        rows, at, place = self.rows, self.task.at, self.layout.saved[node]
        if node.narrow:
            return rows.load_one(rows.at("saved", at), place)
        return rows.stream("saved", at, self.lanes, place)

    def _entering(self, gate: str, biased: bool) -> Value:
        """The input's part of a gate; ``biased`` if no matmul's sum begins with the gate's bias."""
        b, layout, rows = self.b, self.layout, self.rows
        n = layout.cell.gates.index(gate)
        place, m = layout.plan.places[gate].start, layout.projecting

        def projected() -> Value:
            value = rows.stream("gates", self.task.at, self.lanes, place)
            return rows.biased(value, "bias_ih", self.lanes, place) if biased else value

        if m is None or not layout.apart:
            return projected()
        entering = b.unset(b.vec)
        with b.when(rows.given("input")) as otherwise:
            at = layout.results.input + n * layout.results.strides[m.linear.name]
            entering.value = b.load(rows.result_at(at, self.task, self.lanes))
        with otherwise:
            entering.value = projected()
        return entering.value

    def _upstream(self, i: int) -> Value:
        """The gradient that reaches new state i from the following step and from its sequence."""
        rows, at, lanes = self.rows, self.task.at, self.lanes
        name, arriving = self.layout.cell.state_names[i], rows.arriving(i)
        value = rows.load(rows.of(f"d_state {name}", at.row), lanes)
        for m in self.layout.matmuls:
            if m.state == i:
                value += rows.result(m, 0, self.task, lanes)
        total = self.b.variable(value)
        with self.b.when(rows.given(arriving)):
            total.value = value + rows.stream(arriving, at, lanes)
        return total.value

    def _keep(self, node: Expr, rate: Value) -> Value:
        """A random mask, drawn from counters, in training; its keep rate in evaluation.

        See ``anycell.lang.philox``.
        """
        b, (index, per) = self.b, node.attrs
        training = self.rows.arg["training"].ne(0)
        # Four masks share the words of one draw.
        block = index // 4, per
        if block not in self.words:
            self.words[block] = self._draw(training, *block)
        mask = b.variable(rate)
        with b.when(training):
            word = self.words[block][index % 4].value
            # Compared in float32 for every dtype, so that all engines keep the same units.
            draw = b.uitofp(word >> 8, "float") * 2.0**-24
            kept = draw < b.fptrunc(rate, "float")
            mask.value = b.select(kept, 1.0, 0.0)
        return mask.value

    def _draw(self, training: Value, number: int, per: str) -> list[Variable]:
        """The variables with the four random words of a block of masks; set only in training."""
        b, arg, (t, row) = self.b, self.rows.arg, self.task.at
        lanes = f"<{b.lanes} x i32>"
        slots = [b.unset(lanes) for _ in range(4)]
        with b.when(training):
            low = {
                name: b.trunc(arg[name], "i32") for name in ("seed", "stream", "time", "time_step")
            }
            high = b.trunc(arg["seed"] >> 32, "i32")
            step = low["time"] + low["time_step"] * b.trunc(t, "i32")
            unit = b.iota(lanes) + b.splat(b.trunc(self.lanes.unit, "i32"))
            stream = low["stream"] << 8 | number
            step = step if per == "step" else constant(0, "i32")
            scalars = b.trunc(arg["first_row"] + row, "i32"), step, stream, low["seed"], high
            words = ops.philox(b, unit, *map(b.splat, scalars))
            for word, slot in zip(words, slots, strict=True):
                slot.value = word
        return slots


def _empty(node: Expr) -> float:
    """The value with which a reduction begins."""
    return float("-inf") if node.op == "max" else 0.0
