"""Tier 2: one launch per sequence, by programs that exchange h every step.

A program owns a tile of rows and a slice of units with all their gates. Its weights, the rows of W
that belong to these units, stay on chip for the whole sequence, and so do its other states. What it
needs from the others is h, all of it, once a step:

    for t:  wait until every program of these rows has published h[t]
            r = dot(h[t], W.T), in chunks of k;  the cell;  h[t + 1] = ...
            store its slice of h[t + 1], publish it;  store what the backward pass needs

The backward pass gathers. A program holds the columns of W that belong to its units, and needs the
gradients of all gates of all units, which are stored anyway, for the gradient of W:

    for t:  wait until every program has published d_gates[t + 1]
            d_h = dot(d_gates[t + 1], W), in chunks of k;  the derived backward pass
            store its slice of d_gates[t], publish it

The programs of some rows are a group. Groups share nothing, so few programs meet in one.

**The exchange.** h goes through the sequence of hidden states, gradients through those of the
gates: a step reads the slot that the one before has written, and no slot is written twice in a
launch.
Each program has two flags, for steps by turns; it sets one to the number of steps that it has done.
Two are enough: to set a flag again, a program must have seen all others finish the step between,
and whoever finished that had seen the flag. They count on from launch to launch of a call.

A release orders the slice before the flag, an acquire the flag before the loads (``publish`` and
``wait`` in ``library``). The loads bypass the first-level cache, which has nothing to gain from
what is read once. All flags are seen before the first load: each wait is a trip to the second-level
cache, dearer than what an early start with some chunks would save. What does not hang on the others
is loaded before the wait, and stored after the flag is set.

**No hang.** All programs must run at once, so the launch is cooperative: the driver refuses what
does not fit. A wait that takes longer than ``patience`` nanoseconds gives up. The program then
waits for nobody any more, its results become NaN, it says so in ``trouble``, and the others, which
find its flags set, come to an end too.

Cells of one stage only: every matmul multiplies h, and no row reduction needs other units.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from anycell.engines.gpu.resident import Loop
from anycell.engines.gpu.text import Form, Printed, Where, plus, power_of_two
from anycell.lang.cell import Linear
from anycell.lang.expr import Expr, topological
from anycell.lang.ops import is_reduction
from anycell.plan import Plan


class Slice(NamedTuple):
    """What a program owns.

    Attributes:
        rows, units: of its tile.
        chunk: units of the others that it multiplies at once.
        ahead: chunks that are on their way at the same time.
        warps: of 32 threads.
    """

    rows: int
    units: int
    chunk: int
    ahead: int
    warps: int


_ARRIVING = frozenset({"grad", "linear_t"})  # what hangs on the step after


def print_cooperative(plan: Plan, form: Form, part: Slice) -> Printed:
    """The kernel of a plan, for programs that own such slices."""
    return _Slice(plan, form, part).printed()._replace(cooperative=True)


def exchanged(plan: Plan, backward: bool) -> dict[str, int]:
    """The arrays over time by which programs tell each other a step, and the width of each."""
    h = plan.hidden_size
    if not backward:
        return {"state0": h}
    widths = {}
    for k, l in enumerate(plan.cell.linears):
        shared = plan.shares_gradient(l)
        widths["dx" if shared else f"dr{k}"] = h * len(plan.cell.gates if shared else l.outputs)
    return widths


def refusal(plan: Plan) -> str | None:
    """Why programs cannot share a step of this cell; None if they can."""
    cell = plan.cell
    h = cell.states[0]
    if not cell.linears:
        return "no matmul"
    if any(l.operand is not Expr("state", (), (h.name,)) for l in cell.linears):
        return "a matmul multiplies something else than h"
    sizes = {s.size for s in cell.states}
    sizes |= {size for l in cell.linears for size in (l.in_size, l.out_size)}
    if sizes != {"H"}:
        return "states of several sizes"
    if any(map(is_reduction, topological([*cell.next, *plan.saved, *plan.saved_rows]))):
        return "a row reduction needs all units"
    return None


class _Slice(Loop):
    name, shared = "cooperative", True

    def __init__(self, plan: Plan, form: Form, part: Slice) -> None:
        super().__init__(plan, form, part.warps, (part.rows, part.units), False)
        self.chunk, self.ahead = part.chunk, part.ahead
        self.programs = -(-plan.hidden_size // part.units)  # of a group
        # Where data are flags: the numbers of a word, and what Triton calls it.
        self.pair = 2 if form.by_data and self.narrow and plan.hidden_size % 2 == 0 else 1
        self.word = "tl.uint16" if self.narrow and self.pair == 1 else "tl.uint32"
        self.looks: dict[str, str] = {}  # at words, by the name of what they will be

    @property
    def turns(self) -> str:
        """Of the loop, backward."""
        return f"count + {self.argument('close', 'i32')}" if self.form.backward else "count"

    def padded(self, size: str) -> int:
        """Units of the tile."""
        return self.width

    # -- matmuls ---------------------------------------------------------------------------------
    @property
    def chunks(self) -> range:
        """The first units of the chunks."""
        return range(0, self.plan.hidden_size, self.chunk)

    def bundles(self, l: Linear) -> list[tuple[int, int]]:
        """First output and number of those that are multiplied at once: 6 of them as 4 and 2.

        Side by side they make a matrix wide enough to keep all warps busy.
        """
        found, first = [], 0
        for bit in reversed(range(len(l.outputs).bit_length())):
            if len(l.outputs) >> bit & 1:
                found.append((first, 1 << bit))
                first += 1 << bit
        return found

    def load_weights(self) -> None:
        """What belongs to this slice: of a bundle ``[k, units * outputs]``, backward, where each
        output multiplies something else, ``[outputs, k, units]``.
        """
        for k, l in enumerate(self.linears):
            for first, count in self.bundles(l):
                for start in self.chunks:
                    self._load_part(k, l, first, count, start)

    def _load_part(self, k: int, l: Linear, first: int, count: int, start: int) -> None:
        h, wide = self.plan.hidden_size, self.width * count
        lanes = f"{start} + tl.arange(0, {self.chunk})"
        if self.form.backward:
            outputs = f"({first} + tl.arange(0, {count}))[:, None, None]"
            g = self.once(f"output_{first}_{count}", outputs)
            o = self.once(f"k_{start}", f"({lanes})[None, :, None]")
            i = self.once("unit", "units_H[None, :, :]")
        else:
            column = self.once(f"column_{wide}", f"tl.arange(0, {wide})[None, :]")
            o = self.once(f"unit_{count}", f"tl.program_id(1) * {self.width} + {column} // {count}")
            g = self.once(f"output_{first}_{count}", f"{first} + {column} % {count}")
            i = self.once(f"k_{start}", f"({lanes})[:, None]")
        inside, each = f"({o} < {h}) & ({i} < {h})", h // l.heads
        if l.heads == 1:
            where = f"({g} * {h} + {o}) * {h} + {i}"
        else:
            row = f"{o} // {each} * {len(l.outputs) * each} + {g} * {each} + {o} % {each}"
            where = f"({row}) * {each} + {i} % {each}"
            inside += f" & ({o} // {each} == {i} // {each})"
        where = f"{self.array(f'weight{k}')} + {where}"
        self.once(f"w{k}_{first}_{start}", f"tl.load({where}, mask={inside}, other=0.0)")

    def multiply(self, k: int, l: Linear, output: str, node: Expr) -> str:
        """One output of a matmul; the first one brings all others."""
        if f"r{k}_{output}" not in self.said:
            bundles = self.bundles(l)
            for start in self.chunks:
                operand = self._load_h(start)
                for first, _ in bundles:
                    more = f", r{k}_{first}" if start else ""
                    dot = self._dot(operand, f"w{k}_{first}_{start}{more}")
                    self.say(f"r{k}_{first} = {dot}")
            for first, count in bundles:
                self._split(f"r{k}_{first}", [f"r{k}_{o}" for o in l.outputs[first:][:count]])
        return f"r{k}_{output}"

    def _load_h(self, start: int) -> str:
        """A chunk of h, and those after it ahead of time."""
        h, pair = self.plan.hidden_size, self.pair
        for ahead in self.chunks[start // self.chunk :][: self.ahead]:
            lanes = self.once("lanes", f"tl.arange(0, {self.chunk // pair})[None, :]")
            where, inside = f"({ahead // pair} + {lanes})", "is_row"
            if ahead + self.chunk > h:
                inside += f" & ({where} < {h // pair})"
            self._fetch(f"h_{ahead}", f"{self._sent('state0', 't')} + {where}", inside)
            if self.form.resets:
                units = self.once("units", f"tl.arange(0, {self.chunk})[None, :]")
                inside = f"is_row & reset & ({ahead} + {units} < {h})"
                at = f"reset0 + rows * reset0__b + ({ahead} + {units})"
                self.once(f"reset_{ahead}", f"tl.load({at}, mask={inside}, other=0.0)")
        self._arrive(f"h_{start}", [f"h_{first}" for first in self.chunks[: self.ahead]])
        if not self.form.resets:
            return f"h_{start}"
        return self.once(f"h_{start}_reset", f"tl.where(reset, reset_{start}, h_{start})")

    def _split(self, value: str, names: list[str]) -> None:
        """``[rows, units * outputs]`` into a tile for each output."""
        if len(names) == 1:
            self.once(names[0], value)
            return
        half = len(names) // 2
        shape = f"[{self.rows}, {self.width * half}, 2]"
        even, odd = f"{value}_even", f"{value}_odd"
        self.say(f"{even}, {odd} = tl.split(tl.reshape({value}, {shape}))")
        self._split(even, names[::2])
        self._split(odd, names[1::2])

    def _gather(self) -> str:
        """What reaches h from the gates of all units in the step before, ``[rows, units]``."""
        terms = []
        for k, l in enumerate(self.linears):
            bundles = self.bundles(l)
            parts = [(*bundle, start) for start in self.chunks for bundle in bundles]
            for n, (first, _, start) in enumerate(parts):
                for part in parts[n:][: self.ahead * len(bundles)]:
                    self._load_gates(k, l, *part)
                together = [f"d{k}_{first}_{s}" for s in self.chunks[: self.ahead]]
                self._arrive(f"d{k}_{first}_{start}", together)
                more = f", back{k}_{first}" if start else ""
                dot = self._dot(f"d{k}_{first}_{start}", f"w{k}_{first}_{start}{more}")
                self.say(f"back{k}_{first} = {dot}")
            terms += [f"tl.sum(back{k}_{first}, axis=0)" for first, _ in bundles]
        return " + ".join(terms)

    def _load_gates(self, k: int, l: Linear, first: int, count: int, start: int) -> None:
        """The gradients of some outputs, ``[outputs, rows, k]``."""
        h, pair = self.plan.hidden_size, self.pair
        name = "dx" if self.plan.shares_gradient(l) else f"dr{k}"
        lanes = f"({start // pair} + tl.arange(0, {self.chunk // pair}))[None, None, :]"
        o, inside = self.once(f"lanes_{start}", lanes), "is_before[None, :, :]"
        if start + self.chunk > h:
            inside += f" & ({o} < {h // pair})"
        row = self._sent(name, "t - 1", "_before")
        where = f"({row})[None, :, :] + (output_{first}_{count} * {h // pair} + {o})"
        self._fetch(f"d{k}_{first}_{start}", where, inside)

    # -- the exchange ----------------------------------------------------------------------------
    def _flag(self, step: str, program: str) -> str:
        """The flags of a step."""
        self.argument("flags", "*i32")
        group = f"(({step}) & 1) * tl.num_programs(0) + tl.program_id(0)"
        return f"flags + ({group}) * {self.programs} + {program}"

    def wait(self) -> None:
        """Until the step before is done everywhere, if flags say so.

        Every thread has a lane of its own: lanes beyond the programs look at this program's flag.
        """
        if self.form.by_data:
            return
        done, patience = self.argument("done", "i32"), self.argument("patience", "i64")
        lanes = f"tl.arange(0, {power_of_two(self.programs, 32 * self.warps)})"
        peers = f"tl.where({lanes} < {self.programs}, {lanes}, tl.program_id(1))"
        self.say(f"if ({done} + t > 0) & (alive > 0):")
        with self.indented():
            where = self._flag(f"{done} + t - 1", peers)
            self.say(f"alive = wait({where}, {done} + t, {patience})")

    def wait_backward(self, roots: list[Expr]) -> None:
        """Likewise; then adds what the step before still owes."""
        leaves = Where(self.is_leaf)
        early = [n for n in topological(roots, leaves) if n in leaves and n.op not in _ARRIVING]
        self.evaluate(early)
        self.wait()
        behind, h = self.argument("behind", "i32"), self.cell.states[0].name
        self.once("is_before", f"(rows < batch) & (rows * 0 + t + {behind} > 0)")
        self.once("gathered", self._gather())
        self.hand_over("gathered")
        if self.form.resets:
            # The step before may have begun with a reset: then it goes to what that restored.
            self.once("diverted", self.flags("resets", "t - 1", "is_before"))
            self.say(f"restored_{h} += tl.where(diverted, gathered, 0.0)")
            self.say("gathered = tl.where(diverted, 0.0, gathered)")
        self.say(f"g_{h} += gathered")

    def _sent(self, name: str, step: str, tag: str = "") -> str:
        """Where the rows of the tile begin in what programs exchange."""
        row = self.row(name, step, tag=tag)
        if not self.form.by_data:
            return row
        return self.once(f"{row}_words", f"{row}.to(tl.pointer_type({self.word}))")

    def _fetch(self, name: str, where: str, inside: str) -> None:
        """Loads what the others have computed, or looks whether they have."""
        if self.form.by_data:
            self.looks[name] = f"look({where}, {inside})"
            self.once(f"{name}_words", self.looks[name])
        else:
            text = f'tl.load({where}, mask={inside}, other=0.0, cache_modifier=".cg")'
            self.once(name, text)

    def _arrive(self, name: str, together: list[str]) -> None:
        """Looks again and again until this is there, and what is fetched together with it."""
        if not self.form.by_data or name in self.said:
            return
        names = together if name in together else [name]
        patience = self.argument("patience", "i64")
        latest = functools.reduce(lambda a, b: f"tl.maximum({a}, {b})", [f"{n}_words" for n in names])
        call = f"again({latest}, (t > 0) & (alive > 0), looks, begin, {patience})"
        self.say("looks, begin = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64)")
        self.say(f"looks, begin, waiting = {call}")
        self.say("while waiting == 1:")
        with self.indented():
            for n in names:
                self.say(f"{n}_words = {self.looks[n]}")
            self.say(f"looks, begin, waiting = {call}")
        self.say("alive = tl.where(waiting == 2, 0, alive)")
        for n in names:
            self.once(n, f"numbers({n}_words, {self.kind})")

    def _send(self, name: str, step: str, tag: str, column: int, value: str) -> None:
        """Stores a part of what programs exchange."""
        where = self._sent(name, step, tag)
        lanes = f"tl.program_id(1) * {self.width // self.pair} + tl.arange(0, {self.width // self.pair})"
        words = self.once("words", f"({lanes})[None, :]")
        inside = f"is_row & ({words} < {self.plan.hidden_size // self.pair})"
        value = f"tl.where(in_H, {value}, 0.0)"
        text = f"{where} + {plus(column // self.pair, words)}, {value}, {inside}"
        self.say(f"send({text}, {self.kind}, {self.pair == 2})")

    def store_gradient(self, name: str, column: int, value: str, size: str) -> None:
        """The other programs may need it."""
        if self.form.by_data and name in exchanged(self.plan, True):
            self.units(size)
            self._send(name, "t", "", column, self.valid(value))
        else:
            super().store_gradient(name, column, value, size)

    def store_state(self, i: int) -> None:
        """The other programs need the first one."""
        if self.form.by_data and i == 0:
            self._send("state0", "t + 1", "_after", 0, f"after_{self.cell.states[0].name}")
        else:
            super().store_state(i)

    def hand_over(self, value: str) -> None:
        """Nobody takes a result for right that rests on h as it was before."""
        self.say(f'{value} = tl.where(alive > 0, {value}, float("nan"))')

    def publish(self) -> None:
        """For the other programs of these rows, if flags say so."""
        if self.form.by_data:
            return
        text = f"publish({self._flag('done + t', 'tl.program_id(1)')}, done + t + 1)"
        if not self.form.backward:
            self.say(text)
            return
        self.say("if t < count:")
        with self.indented():
            self.say(text)

    def begin_step(self) -> None:
        """Backward, one more turn than there are steps collects what the last one owes: in that
        turn there are no rows.
        """
        if self.form.backward:
            self.say("is_row = (rows < batch) & (rows * 0 + t < count)")
            self.say("in_H = is_row & is_H")

    def live(self, value: str, other: str) -> str:
        """What a turn leaves behind."""
        return f"tl.where(is_row, {value}, {other})"

    def begin(self) -> None:
        """As in all kernels; so far nobody has been waited for in vain."""
        super().begin()
        self.once("alive", "tl.full([], 1, tl.int32)")

    def after_steps(self) -> None:
        """All rows are there again."""
        if self.form.backward:
            self.say("is_row = rows < batch")
            self.say("in_H = is_row & is_H")

    def end(self) -> None:
        """Says whether somebody was waited for in vain."""
        trouble = self.argument("trouble", "*i32")
        self.say("if alive == 0:")
        with self.indented():
            self.say(f"tl.store({trouble}, 1)")


__all__ = ["Slice", "print_cooperative", "refusal"]
