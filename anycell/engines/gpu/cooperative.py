"""Tier 2: one launch per sequence, by programs that exchange h every step.

A program owns a tile of rows and a slice of units with all their gates. Its weights, the rows of W
that belong to these units, stay on chip for the whole sequence, in registers as far as there is
room, and so do its other states. Once a step it needs all of h from the other programs:

    for t:  wait until every program of these rows has published h[t]
            r = dot(W, h[t].T), k shared out over warps;  the cell;  h[t + 1] = ...
            store its slice of h[t + 1], publish it;  store what the backward pass needs

The backward pass gathers. A program holds the columns of W that belong to its units, and needs the
gradients of all gates of all units, which are stored anyway, for the gradient of W:

    for t:  wait until every program has published d_gates[t + 1]
            d_h = dot(W.T, d_gates[t + 1].T), likewise;  the derived backward pass
            store its slice of d_gates[t], publish it

Programs of the same rows are a group. Groups share nothing, so few programs wait for one another.

**The exchange.** h goes through the sequence of hidden states, gradients through the array of gate
gradients: a step reads the slot that the step before has written, and no slot is written twice in a
launch. The loads bypass the first-level cache, which is of no use for what is read only once.
Flags, two of each program, count its steps: docs/internals.md says why two are enough, when what is
loaded, and why no program hangs. ``publish`` and ``wait`` in ``library`` order memory accesses.

A program whose wait takes longer than ``patience`` nanoseconds gives up; all its threads agree on
that. It goes on with NaN and without waiting; the others find its flags set, and finish too. If a
program never began, the others find no flag set, and each of them gives up once.

**Row reductions.** Each program stores the numbers of its units, such as their sum, tells the
others, waits for theirs, and merges the numbers of all programs in one order: so all have the same
bits. ``rounds`` says how often a step does that. Two buffers take turns from step to step: what a
program stores for a step, no other program can still be reading.

**Inner matmuls**, of something other than h, are rounds too: each program stores its units of the
vector, tells the others, waits for theirs, and multiplies the whole vector by its part of a second
matrix. Backward, the vector is that of the gradients of the outputs, in the memory that the
gradient of the matrix needs anyway. If no matmul multiplies h itself, a step ends without an
exchange.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

from anycell.engines.gpu.resident import LEAST, NEXT, Loop
from anycell.engines.gpu.rounds import COMPANION, NUMBERS, companion, grouped, rounds_of
from anycell.engines.gpu.text import Load, Printed, Variant, gradients_of, plus, power_of_two
from anycell.lang.cell import Linear
from anycell.lang.expr import Expr, topological
from anycell.lang.ops import is_reduction
from anycell.plan import Plan, gradient_roots


class Slice(NamedTuple):
    """The slice of units that a program owns.

    Attributes:
        rows, units: of its tile.
        chunk: the part of k that its warps multiply at once, each of them a share.
        ahead: chunks that are being loaded at the same time.
        warps: of 32 threads.
        held: chunks whose weights are in registers; other weights are in shared memory.
    """

    rows: int
    units: int
    chunk: int
    ahead: int
    warps: int
    held: int


SIMPLE = {"total": "sum", "largest": "max"}  # numbers, and the functions that reduce them
MERGED = {"sum": "{} + {}".format, "max": "tl.maximum({}, {})".format}
FIRST_OF = {"largest": 'float("-inf")'}  # the number of no units, where it is not 0
CHAINS = 4  # of matrix instructions between which a warp alternates


def shape(plan: Plan, l: Linear, units: int, backward: bool) -> tuple[int, int]:
    """The length of k of a matmul, and its columns for this number of units."""
    out, into, outputs = plan.sizes[l.out_size], plan.sizes[l.in_size], len(l.outputs)
    return (outputs * out, units) if backward else (into, outputs * units)


def programs_of(plan: Plan, units: int) -> int:
    """Counts the programs of a group."""
    return -(-max(plan.sizes[size] for size in sizes_of(plan)) // units)


def sizes_of(plan: Plan) -> list[str]:
    """The sizes of what programs share, the largest first."""
    sizes = ["H", *(s.size for s in plan.cell.states)]
    sizes += [size for l in plan.cell.linears for size in (l.in_size, l.out_size)]
    return sorted(dict.fromkeys(sizes), key=lambda size: -plan.sizes[size])


def sums_of(rows: int, columns: int) -> int:
    """Counts the sets of sums of all columns that a warp has: an instruction waits for the previous
    instruction on the same sums.
    """
    chains = columns // LEAST * (rows // 8)
    return max(1, CHAINS // max(1, chains))


def print_cooperative(
    plan: Plan, variant: Variant, part: Slice, precision: str = "ieee"
) -> Printed:
    """The kernel of a plan, for programs that own slices like ``part``, whose dots of float32 have
    that ``precision``.
    """
    return _Slice(plan, variant, part, precision).printed()


def refusal(plan: Plan) -> str | None:
    """Why programs cannot share a step of this cell; None if they can."""
    cell = plan.cell
    if not cell.linears:
        return "no matmul"
    roots = [*cell.next, *gradient_roots(cell, plan.gradients)]
    if grouped(roots):
        return "a row reduction of groups of units"
    if any(is_reduction(node) and plan.symbol(node) != "H" for node in topological(roots)):
        return "a row reduction of a size other than H"
    return None


class _Slice(Loop):
    name, shared = "cooperative", True

    def __init__(self, plan: Plan, variant: Variant, part: Slice, precision: str) -> None:
        super().__init__(plan, variant, part.warps, precision, (part.rows, part.units), False)
        self.chunk, self.ahead, self.held = part.chunk, part.ahead, part.held
        self.pair = max(1, 4 // plan.itemsize)  # numbers of a thread's register
        self.programs = programs_of(plan, part.units)  # of a group
        self.rounds = rounds_of(plan, variant)
        self.arrived = 0  # rounds of this step that are over
        # The matmuls whose vectors come at the end of a step: forward those of h; backward those of
        # states, by the state that gets the gradient.
        self.owed: dict[str, list[tuple[int, Linear]]] = {}
        for k, l in enumerate(self.linears):
            if l.name not in self.rounds.matmuls and l.operand.op == "state":
                self.owed.setdefault(l.operand.attrs[0], []).append((k, l))
        # Where the vectors of inner matmuls lie in a row of their array, forward.
        self.columns_of: dict[Expr, int] = {}
        for l in self.linears if not variant.backward else ():
            if l.name in self.rounds.matmuls and l.operand not in self.columns_of:
                self.columns_of[l.operand] = self.vectors
                self.vectors += -(-plan.sizes[l.in_size] // LEAST) * LEAST
        owed = sum(map(len, self.owed.values()))
        self.products = owed + len(self.rounds.matmuls)  # yet to be printed
        self.stored: set[tuple[str, int]] = set()  # gradients, by array and column
        self.mine: dict[Expr, str] = {}  # the numbers of this program's units
        self.buffer = len(self.rounds.numbers) * part.rows * self.lanes_of_parts
        self.parts = 2 * self.buffer
        self.writes_rows = "is_row & (rows * 0 + tl.program_id(1) == 0)"  # all have these numbers

    @property
    def _sizes(self) -> dict[str, None]:
        return dict.fromkeys(sizes_of(self.plan))

    @property
    def turns(self) -> str:
        return "count + 1" if self.owed else "count"

    def padded(self, size: str) -> int:
        """Units of the tile."""
        return self.width

    # -- matmuls ---------------------------------------------------------------------------------
    def outputs(self, l: Linear) -> list[tuple[int, int]]:
        """The first output and the number of outputs in each bundle that is multiplied at once.
        Forward, these lie side by side in a matrix, 6 as 4 and 2; backward, their units are one k.
        """
        if self.variant.backward:
            return [(0, len(l.outputs))]
        bundles, first = [], 0
        for bit in reversed(range(len(l.outputs).bit_length())):
            if len(l.outputs) >> bit & 1:
                bundles.append((first, 1 << bit))
                first += 1 << bit
        return bundles

    def chunks(self, l: Linear) -> range:
        """The first k of the chunks."""
        depth, _ = shape(self.plan, l, self.width, self.variant.backward)
        return range(0, depth, self.chunk)

    def columns(self, count: int) -> int:
        """Columns of a matmul of ``count`` outputs."""
        return self.width if self.variant.backward else self.width * count

    def load_weights(self) -> None:
        """Loads this slice's part of the weights, for each chunk ``[warps, columns, k]``."""
        for k, l in enumerate(self.linears):
            for first, count in self.outputs(l):
                for n, start in enumerate(self.chunks(l)):
                    self._load_part(k, l, first, count, start, n < self.held)
        self.once("is_theirs", f"{self._their_rows()} < batch")

    def _spread(self, rows: int, held: bool = True) -> tuple[str, str]:
        """Spreads the loads of a chunk over a program: which rows, or columns, and which k.

        ``held``: in the layout of ``left`` and ``right``, otherwise of ``left_shared``.
        """
        warps, name = self.warps, f"{rows}" if held else f"{rows}_shared"
        all_ = self.once(f"all_{rows}", f"tl.arange(0, {rows * warps})[:, None]")
        row = f"{all_} // {8 * warps} * 8 + {all_} % 8" if held else f"{all_} % {rows}"
        warp = f"{all_} // 8 % {warps}" if held else f"{all_} // {rows}"
        share = self.chunk // warps
        lanes = f"{warp} * {share} + tl.arange(0, {share})[None, :]"
        return self.once(f"of_{name}", row), self.once(f"lanes_{name}", lanes)

    def _load_part(self, k: int, l: Linear, first: int, count: int, start: int, held: bool) -> None:
        columns, outputs = self.columns(count), len(l.outputs)
        out, into = self.plan.sizes[l.out_size], self.plan.sizes[l.in_size]
        rows, width = out // l.heads, into // l.heads
        column, lanes = self._spread(columns, held)
        i, size = f"({plus(start, lanes)})", outputs * out if self.variant.backward else into
        if self.variant.backward:
            # From the transposed weight: units of h, and k over all units of all outputs.
            o = f"(tl.program_id(1) * {self.width} + {column})"
            inside, where = f"({o} < {into})", f"{o} * {outputs * rows} + {i}"
            if l.heads > 1:
                where = f"{o} * {outputs * rows} + {i} // {out} * {rows} + {i} % {rows}"
                inside += f" & ({o} // {width} == {i} % {out} // {rows})"
        else:
            o, g = f"(tl.program_id(1) * {self.width} + {column} // {count})", f"{column} % {count}"
            inside, where = f"({o} < {out})", f"(({first} + {g}) * {out} + {o}) * {into} + {i}"
            if l.heads > 1:
                row = f"{o} // {rows} * {outputs * rows}"
                row += f" + ({first} + {g}) * {rows} + {o} % {rows}"
                where = f"({row}) * {width} + {i} % {width}"
                inside += f" & ({o} // {rows} == {i} // {width})"
        if start + self.chunk > size:
            inside += f" & ({i} < {size})"
        loaded = f"tl.load({self.array(f'weight{k}')} + {where}, mask={inside}, other=0.0)"
        lay = "left" if held else "left_shared"
        self.once(f"w{k}_{first}_{start}", f"{lay}({loaded}, {self.warps}, {self.pair})")

    def _sums(self, k: int, l: Linear, operand: str, load: Callable[[int], None]) -> list[str]:
        """Prints the matmuls of all chunks; returns the warps' sums for each bundle of outputs."""
        starts, sums = self.chunks(l), list[str]()
        for n, start in enumerate(starts):
            for ahead in starts[n:][: self.ahead]:
                load(ahead)
            value = self._restored(f"{operand}_{start}")
            if n == 0:
                # Otherwise the assembler would issue some loads after the first matmuls, to save
                # registers, and each would cost another trip to the second-level cache.
                self.say("tl.debug_barrier()")
            right = f"{operand}_{start}_right"
            self.once(right, f"right({value}, {self.warps}, {self.pair})")
            for first, count in self.outputs(l):
                sum_ = f"sum{k}_{first}_{n % sums_of(self.rows, self.columns(count))}"
                more = f", {sum_}" if sum_ in sums else ""
                dot = self._dot(f"w{k}_{first}_{start}", f"{right}{more}")
                self.say(f"{sum_} = {dot}")
                sums += [sum_] * (sum_ not in sums)
        self.products -= 1
        if not self.products:
            self.after_exchange()
        return [
            " + ".join(s for s in sums if s.startswith(f"sum{k}_{first}_"))
            for first, _ in self.outputs(l)
        ]

    def multiply(self, k: int, l: Linear, output: str, node: Expr) -> str:
        """One output of a matmul; the first call prints all outputs."""
        if f"r{k}_{output}" not in self.said:
            name, load = "h", self._load_h
            if l.operand in self.columns_of:
                name = f"vector{self.columns_of[l.operand]}"
                load = functools.partial(self._load_vector, name, l)
            sums = self._sums(k, l, name, load)
            for (first, count), parts in zip(self.outputs(l), sums, strict=True):
                self.say(f"r{k}_{first} = total({parts}, {count})")
                self._split(f"r{k}_{first}", [f"r{k}_{o}" for o in l.outputs[first:][:count]])
        return f"r{k}_{output}"

    def _their_rows(self) -> str:
        """The rows of a chunk. Rows beyond the batch repeat its last row: their results are never
        read, and loads without a mask need no zeros.
        """
        of, _ = self._spread(self.rows)
        rows = f"(tl.program_id(0) * {self.rows} + {of}).to(tl.int64)"
        return self.once("their_rows", f"tl.minimum({rows}, batch - 1)")

    def _place_h(self) -> str:
        """The address of the first chunk of h."""
        return self._place_theirs("h_at", "hidden", "t")

    def _place_gates(self, k: int, l: Linear) -> str:
        """The address of the first chunk of the gates' gradients, for an inner matmul those of this
        step. Before the first step and after the last there are none: what the kernel reads then is
        not used.
        """
        step = (
            "tl.minimum(t, count - 1)" if l.name in self.rounds.matmuls else "tl.maximum(t - 1, 0)"
        )
        return self._place_theirs(f"d{k}_at", gradients_of(self.plan, l), step)

    def _place_theirs(self, at: str, name: str, step: str) -> str:
        place, (_, lanes) = self.place(name, step, self._their_rows()), self._spread(self.rows)
        return self.once(at, f"{place} + {lanes}")

    def _fetch(self, name: str, at: str, start: int, size: int) -> None:
        """Loads a chunk that others have written, past the first-level cache."""
        _, lanes = self._spread(self.rows)
        mask = f", mask={start} + {lanes} < {size}, other=0.0" if start + self.chunk > size else ""
        self.once(name, f'tl.load({plus(start, at)}{mask}, cache_modifier=".cg")')

    def _load_h(self, start: int) -> None:
        """Loads a chunk of h, and what resets put in its place."""
        h = self.widths[0]
        self._fetch(f"h_{start}", self._place_h(), start, h)
        if self.variant.resets:
            rows, (_, lanes) = self._their_rows(), self._spread(self.rows)
            reset = self.once("their_reset", self.flags("resets", rows=rows, mask="is_theirs"))
            at, inside = self.reset_row(0, rows), f"{reset} & ({start} + {lanes} < {h})"
            at = f"tl.load({at} + ({plus(start, lanes)}), mask={inside}, other=0.0)"
            self.once(f"h_{start}_reset", at)

    def _load_vector(self, name: str, l: Linear, start: int) -> None:
        """Loads a chunk of what an inner matmul multiplies."""
        rows, (_, lanes) = self._vectors(self._their_rows()), self._spread(self.rows)
        at = self.once(f"{name}_at", f"{rows} + {plus(self.columns_of[l.operand], lanes)}")
        self._fetch(f"{name}_{start}", at, start, self.plan.sizes[l.in_size])

    def _vectors(self, rows: str) -> str:
        """The address of the vectors of rows, of which two buffers take turns."""
        turn = f"(({self.argument('done', 'i32')} + t) & 1)"
        return f"{self.array('vectors')} + ({turn} * batch + {rows}) * {self.vectors}"

    def _restored(self, name: str) -> str:
        """A chunk that has been loaded, with what resets put in its place."""
        if f"{name}_reset" not in self.said:
            return name
        leaves = {"restored": f"{name}_reset", "before": name, "reset": "their_reset"}
        return self.once(f"{name}_kept", self.framed("entered", **leaves))

    def _split(self, value: str, names: list[str]) -> None:
        """Splits ``[rows, units * outputs]`` into a tile for each output."""
        if len(names) == 1:
            self.once(names[0], f"settled({value})" if self.rounds.numbers else value)
            return
        half = len(names) // 2
        shape = f"[{self.rows}, {self.width * half}, 2]"
        even, odd = f"{value}_even", f"{value}_odd"
        self.say(f"{even}, {odd} = tl.split(tl.reshape({value}, {shape}))")
        self._split(even, names[::2])
        self._split(odd, names[1::2])

    def _gather(self, matmuls: Iterable[tuple[int, Linear]]) -> str:
        """The gradient of what matmuls multiply, from those of all their outputs,
        ``[rows, units]``.
        """
        terms = []
        for k, l in matmuls:
            load = functools.partial(self._load_gates, k, l)
            terms += self._sums(k, l, f"d{k}", load)
        return f"total({' + '.join(terms)}, 1)"

    def _load_gates(self, k: int, l: Linear, start: int) -> None:
        """Loads a chunk of the gradients of all outputs."""
        size, _ = shape(self.plan, l, 0, backward=True)
        self._fetch(f"d{k}_{start}", self._place_gates(k, l), start, size)

    def _transposed(self, k: int, l: Linear) -> str:
        name = self.once(f"gathered{k}", self._gather([(k, l)]))
        self.hand_over(name)
        return name

    # -- the exchange ----------------------------------------------------------------------------
    def _flag(self, exchange: str, program: str) -> str:
        """The flags of an exchange."""
        self.argument("flags", "*i32")
        group = f"(({exchange}) & 1) * tl.num_programs(0) + tl.program_id(0)"
        return f"flags + ({group}) * {self.programs} + {program}"

    def _exchange(self, number: int) -> str:
        """The number of an exchange of this step among all: rounds come first, then h or the gates,
        if a matmul of the next step needs them; -1 is the last one of the step before.
        """
        count = len(self.rounds.rounds) + bool(self.owed)
        first = f"({self.argument('done', 'i32')} + t)" + f" * {count}" * (count > 1)
        return f"{first} {'-' if number < 0 else '+'} {abs(number)}" if number else first

    @property
    def early(self) -> frozenset[str]:
        """Arrays loaded a step early: backward, all but what the step after has written."""
        if not self.variant.backward:
            return super().early
        return frozenset({"mask", "resets", "d_output", "saved", "gates", *self.sequences})

    def after_exchange(self) -> None:
        """Prints the next step's loads once all results of others have arrived: earlier they would
        delay these and take their registers.
        """
        if NEXT not in self.said:
            self.said[NEXT] = ""
            self.say(NEXT)

    def _before(
        self, roots: list[Expr], arriving: Callable[[Expr], bool] = lambda _: False
    ) -> None:
        """Computes everything that does not depend on values yet to come from other programs, row
        reductions and inner matmuls among them.
        """
        numbers = self.rounds.numbers
        roots = [*roots, *(number.args[0] for number in numbers)]
        order = topological(roots, self.is_leaf)
        late = set[Expr]()
        for node in order:
            reduces = is_reduction(node) and not self.is_leaf(node)
            if (
                reduces
                or self._comes_later(node)
                or arriving(node)
                or (not self.is_leaf(node) and not late.isdisjoint(node.args))
            ):
                late.add(node)
        wanted = dict.fromkeys(n for n in roots if n not in late)
        for node in order:
            if node in late and not self.is_leaf(node):
                wanted |= dict.fromkeys(arg for arg in node.args if arg not in late)
        self.evaluate([n for n in wanted if n.op != "const"], self.labels())
        for number in self.rounds.rounds[0] if numbers else ():
            if number.args[0] in self.names:
                self._store_part(number)
        for node in () if self.variant.backward else order:
            if node.op == "preact":
                self.before(node)

    def _comes_later(self, node: Expr) -> bool:
        """Whether a node is an inner matmul of a round that is not over."""
        products = ("linear_t",) if self.variant.backward else ("linear", "preact")
        return node.op in products and self.rounds.matmuls.get(node.attrs[0], -1) >= self.arrived

    def before_wait(self) -> None:
        """Computes what does not depend on other programs, while they finish the previous step. If
        nothing will come from them, the vectors that they wait for have precedence.
        """
        if self.owed:
            roots = [*self.cell.next, *self.kept]
            self._before(roots, lambda node: node.op in ("linear", "preact"))
            self._place_h()

    def wait(self) -> None:
        """Waits until all programs of the group have done the step before, if a matmul needs it."""
        if self.owed:
            self._wait(-1, f"{self.argument('done', 'i32')} + t > 0")

    def _wait(self, number: int, due: str) -> None:
        """Waits for an exchange, if it is due.

        Every thread has a lane of its own; lanes beyond the programs poll this program's flag.
        """
        patience, exchange = self.argument("patience", "i64"), self._exchange(number)
        lanes = f"tl.arange(0, {power_of_two(self.programs, 32 * self.warps)})"
        peers = f"tl.where({lanes} < {self.programs}, {lanes}, tl.program_id(1))"
        self.say(f"if ({due}) & (alive > 0):")
        with self.indented():
            value = self._exchange(number + 1)
            self.say(f"alive = wait({self._flag(exchange, peers)}, {value}, {patience})")

    def wait_backward(self, roots: list[Expr]) -> None:
        """Waits likewise; then adds what the step before still owes."""
        if not self.owed:
            return
        self._before(roots, lambda n: n.op == "grad" and n.attrs[0] in self.owed)
        for k, l in itertools.chain(*self.owed.values()):
            self._place_gates(k, l)
        self.wait()
        self.once("is_before", "(rows < batch) & (rows * 0 + t > 0)")
        for name, matmuls in self.owed.items():
            gathered = self.once(f"gathered_{name}", self._gather(matmuls))
            self.say(f"{gathered} = tl.where(is_before, {gathered}, 0.0)")
            self.hand_over(gathered)
            if self.variant.resets:
                # If the step before began with a reset, its gradient goes to what that restored.
                self.once("diverted", self.flags("resets", "t - 1", "is_before"))
                leaves = {"d_entered": gathered, "reset": "diverted"}
                self.say(f"restored_{name} += {self.framed('d_restored', **leaves)}")
                self.say(f"{gathered} = {self.framed('d_before', **leaves)}")
            self.say(f"g_{name} += {gathered}")

    def hand_over(self, value: str) -> None:
        """Turns a result into NaN after a failed wait, since it is based on an old h."""
        self.say(f'{value} = tl.where(alive > 0, {value}, float("nan"))')

    def publish(self) -> None:
        """Tells the other programs of these rows that the step is done, if they wait for that."""
        self.after_exchange()  # of a step without products
        if self.owed:
            self._publish(len(self.rounds.rounds))

    def _publish(self, number: int) -> None:
        """Tells the other programs that its part of an exchange is there."""
        exchange, value = self._exchange(number), self._exchange(number + 1)
        text = f"publish({self._flag(exchange, 'tl.program_id(1)')}, {value})"
        if not self.variant.backward:
            self.say(text)
            return
        self.say("if t < count:")
        with self.indented():
            self.say(text)

    # -- rounds ----------------------------------------------------------------------------------
    @property
    def lanes_of_parts(self) -> int:
        """The length of a row of parts, one for each program."""
        return -(-self.programs // self.width) * self.width

    def reduce(self, roots: list[Expr]) -> None:
        """Computes the row reductions and inner matmuls, round by round."""
        self._settle()
        if not self.rounds.matmuls:  # otherwise vectors, which others wait for, come first
            self._before(roots)
        some = [*roots, *(number.args[0] for number in self.rounds.numbers)]
        some += self.rounds.results.values()
        for k, numbers in enumerate(self.rounds.rounds):
            inner = [l for l in self.linears if self.rounds.matmuls.get(l.name) == k]
            multiplied = itertools.chain(*map(self._multiplied, inner))
            self._evaluate_once([*(number.args[0] for number in numbers), *multiplied], some)
            for number in numbers:
                self._store_part(number)
            for l in inner:
                self._store_vector(l)
            self._publish(k)
            self._before(roots)
            if inner:
                self._store_known()
            self._wait(k, "t < count")
            self.arrived = k + 1
            theirs = dict[Expr, list[str]]()
            for number in numbers:
                self._merge(number, theirs)
                self._settle()
                self._before(roots)

    def _multiplied(self, l: Linear) -> list[Expr]:
        """The values whose vectors a pass multiplies by a matmul's weights."""
        return (
            [*self.plan.gradients.linear[l.name].values()] if self.variant.backward else [l.operand]
        )

    def _store_vector(self, l: Linear) -> None:
        """Stores this program's units of what an inner matmul multiplies."""
        if not self.variant.backward:
            (operand,) = self._multiplied(l)
            at = self.at(self._vectors("rows"), self.columns_of[operand], l.in_size)
            self.store(at, self.value(operand), l.in_size)
        elif self.plan.shares_gradient(l):
            self.store_gates()
        else:
            self.store_outputs(l)

    def _store_known(self) -> None:
        """Stores the results that are there, which would take registers during the product."""
        self.store_saved([node for node in self.kept if node in self.names])
        for n, d in enumerate(self.plan.gradients.x.values() if self.variant.backward else ()):
            if d in self.names:
                self.store_gradient("d_gates", n * self.plan.hidden_size, self.value(d), "H")

    def store_saved(self, nodes: Iterable[Expr]) -> None:
        """Stores values for the backward pass unless a round has done so."""
        for node in nodes:
            if ("saved", self.saved[node]) not in self.stored:
                self.stored.add(("saved", self.saved[node]))
                super().store_saved([node])

    def store_gradient(self, name: str, column: int, value: str, size: str) -> None:
        """Stores a gradient unless a round has done so."""
        if (name, column) not in self.stored:
            self.stored.add((name, column))
            super().store_gradient(name, column, value, size)

    def _settle(self) -> None:
        """Computes the reductions whose numbers are there, and what depends on them alone: so few
        numbers are alive at once.
        """
        for node, formula in self.rounds.results.items():
            order = topological([formula], self.is_leaf)
            if node not in self.names and all(
                n in self.names or not (n.op in NUMBERS or is_reduction(n)) for n in order
            ):
                self.evaluate([formula])
                self.names[node] = self.names[formula]

    def _evaluate_once(self, some: list[Expr], all_: list[Expr]) -> None:
        """Computes some of all values, and gives names to those that others will need again."""
        order = dict.fromkeys(topological(some, self.is_leaf))
        later = [node for node in topological(all_, self.is_leaf) if node not in order]
        again = dict.fromkeys(arg for node in later for arg in node.args if arg in order)
        self.evaluate([*some, *(node for node in again if node.op != "const")])

    def _parts(self, number: Expr, program: str) -> str:
        """The address of the parts of a number."""
        row, lanes = self.array("parts", wide=True), self.lanes_of_parts
        turn = f"tl.program_id(0) * 2 + (({self.argument('done', 'i32')} + t) & 1)"
        here = f"tl.arange(0, {self.rows})[:, None] * {lanes}"
        at = self.once("parts_at", f"{row} + ({turn}) * {self.buffer} + {here}")
        place = self.rounds.numbers[number] * self.rows * lanes
        return f"{at} + ({place} + {program})"

    def _store_part(self, number: Expr) -> None:
        """Stores the number of this program's units."""
        if number in self.mine:
            return
        value, program = self.value(number.args[0]), "tl.program_id(1)"
        if number.op == "spread":
            count = self.once("units_here", self._units(program))
            text = f"spread({value}, in_H, {self.mine[companion(number)]}, {count})"
        elif number.op == "raised":
            text = f"raised({value}, in_H, {self.mine[companion(number)]})"
        else:
            units, h = self.units("H"), self.plan.hidden_size
            text = f"{SIMPLE[number.op]}({value}, {units}, in_H, 1, {h})"
        name = self.mine[number] = self.assign(f"my_{number.op}", text)
        self.say(f"tl.store({self._parts(number, program)}, {name}, mask=is_row)")

    def _merge(self, number: Expr, theirs: dict[Expr, list[str]]) -> None:
        """Merges the numbers of all programs, in tiles like that of the units: so the compiler
        lays them out alike.
        """
        lanes = self.once("peers", f"tl.arange(0, {self.width})[None, :]")
        simple = SIMPLE.get(number.op, "sum")
        theirs[number], parts = [], list[str]()
        for first in range(0, self.programs, self.width):
            full, peers = first + self.width <= self.programs, plus(first, lanes)
            mask = "is_row" if full else f"is_row & ({peers} < {self.programs})"
            load = Load(self._parts(number, peers), mask, None, FIRST_OF.get(number.op, "0.0"))
            text = load.text(mask).removesuffix(")") + ', cache_modifier=".cg")'
            theirs[number].append(self.assign(f"their_{number.op}", text))
            parts.append(theirs[number][-1])
            if number.op in COMPANION:
                other = companion(number)
                given = [parts[-1], theirs[other][len(parts) - 1], self.names[other]]
                if number.op == "spread":
                    count = self.once(f"units_of_{first}", self._units(peers))
                    given += [count, str(self.plan.hidden_size)]
                parts[-1] = f"merged_{number.op}({', '.join(given)})"
        all_ = functools.reduce(MERGED[simple], parts)
        text = f"tl.{simple}({all_}, axis=1, keep_dims=True)"
        name = self.names[number] = self.assign(f"row_{number.op}", text)
        self.hand_over(name)

    def _units(self, programs: str) -> str:
        """The units of programs, 0 beyond the last one."""
        left = f"{self.plan.hidden_size} - {programs} * {self.width}"
        return f"tl.minimum(tl.maximum({left}, 0), {self.width}).to(tl.float32)"

    def begin_step(self) -> None:
        """Backward, the loop has one more turn than there are steps, to collect what the last step
        owes. In that turn there are no rows.
        """
        if self.variant.backward:
            self._there("(rows < batch) & (rows * 0 + t < count)")

    def _there(self, rows: str) -> None:
        self.say(f"is_row = {rows}")
        for size in self._sizes:
            self.say(f"in_{size} = is_row & is_{size}")

    def live(self, value: str, other: str) -> str:
        return f"tl.where(is_row, {value}, {other})"

    def begin(self) -> None:
        """Begins as all kernels do; no wait has failed so far."""
        super().begin()
        self.once("alive", "tl.full([], 1, tl.int32)")

    def after_steps(self) -> None:
        """Makes all rows valid again."""
        if self.variant.backward:
            self._there("rows < batch")

    def end(self) -> None:
        """Tells the host whether a wait has failed."""
        trouble = self.argument("trouble", "*i32")
        self.say("if alive == 0:")
        with self.indented():
            self.say(f"tl.store({trouble}, 1)")
