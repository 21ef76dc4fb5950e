"""Row reductions and inner matmuls among programs that share a row's units: what they exchange.

A matmul that multiplies something other than h needs its vector from all programs, and backward the
gradients of its outputs. A reduction that needs the result of another one would wait for a second
exchange. Three rules make such reductions ones of values that a program already has:

- a sum is linear: the sum of ``n * v`` is ``n`` times the sum of ``v`` if ``n`` is one number per
  row, and a value less its own mean sums to 0;
- squares of distances from a number ``m``: each program sends its sum and the squares of distances
  from its own mean, which merge without cancellation (Chan, Golub & LeVeque, *Updating Formulae and
  a Pairwise Algorithm for Computing Sample Variances*, 1979), and ``m`` shifts the result;
- powers of e relative to the maximum: each program sends its maximum, and the sum relative to it.

So a layer norm takes one exchange in either pass, where its text has two reductions one after the
other. What remains is divided into *rounds*: the numbers of a round need only results of earlier
rounds.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable

from anycell.engines.gpu.text import Text, Variant, kept, stores_operand
from anycell.lang.expr import Expr, apply, const, topological
from anycell.lang.ops import is_reduction
from anycell.plan import MATMULS, Plan, gradient_roots

ALL = (1,)  # the attribute of a reduction over all units
ONE = const(1.0)
NUMBERS = frozenset({"total", "largest", "spread", "raised"})
COMPANION = {"spread": "total", "raised": "largest"}  # the number that another one is relative to


@functools.lru_cache(maxsize=1024)
def rounds_of(plan: Plan, variant: Variant) -> Rounds:
    """The rounds of a pass."""
    cell, text = plan.cell, Text(plan, variant, (1, 1), False)
    h = Expr("state", (), (cell.states[0].name,))

    def leaf(node: Expr) -> bool:
        inner = node.op in MATMULS and not variant.backward and node.args[0] is not h
        return text.is_leaf(node) and not (inner or node.op == "linear_t")

    roots = [*cell.next, *kept(plan, variant)]
    if variant.backward:
        multiplied = [l.operand for l in cell.linears if stores_operand(plan, variant, l)]
        roots = [*gradient_roots(cell, plan.gradients), *multiplied]
    return Rounds(roots, leaf, plan.hidden_size)


def grouped(roots: Iterable[Expr]) -> bool:
    """Whether a reduction combines groups of units rather than all."""
    return any(is_reduction(node) and node.attrs != ALL for node in topological(roots))


class Rounds:
    """The rounds of a pass.

    Args:
        roots: what a step computes.
        leaf: whether a value comes from memory.
        units: of a row.

    Attributes:
        rounds: the numbers of each round: nodes of the ops "total", "largest", "spread" (the sum of
            squares of distances from the mean) and "raised" (the sum of e to the distances from the
            largest), whose argument is a value of each unit.
        results: the reductions as expressions of numbers.
        matmuls: the round in which each inner matmul gets what it multiplies, by its name.
    """

    def __init__(self, roots: Iterable[Expr], leaf: Callable[[Expr], bool], units: int) -> None:
        self.leaf, self.units = leaf, units
        self.levels: dict[Expr, int] = {}  # how many rounds a value needs
        self.results: dict[Expr, Expr] = {}
        roots = list(roots)
        for node in topological(roots, leaf):
            if leaf(node):
                self.levels[node] = 0
            elif is_reduction(node):
                self.results[node] = self._formula(node)
                self.levels[node] = self._level(self.results[node])
        needed = self._needed(roots)
        self.results = {node: f for node, f in self.results.items() if node in needed}
        numbers = [node for node in needed if node.op in NUMBERS]
        inner = [node for node in needed if node.op in MATMULS and not leaf(node)]
        self.matmuls = {node.attrs[0]: self._level(node) - 1 for node in inner}
        count = max(map(self._level, [*numbers, *inner]), default=0)
        self.rounds: list[dict[Expr, None]] = [{} for _ in range(count)]
        for node in numbers:
            round_ = self.rounds[self._level(node) - 1]
            round_ |= dict.fromkeys(([companion(node)] if node.op in COMPANION else []) + [node])

    @functools.cached_property
    def numbers(self) -> dict[Expr, int]:
        """The places of the numbers of all rounds."""
        return {number: k for k, number in enumerate(itertools.chain(*self.rounds))}

    def _level(self, node: Expr) -> int:
        """The rounds that a value needs, or the result of exchanging a number or a vector."""
        if node not in self.levels:
            below = max(map(self._level, node.args), default=0)
            self.levels[node] = below + (node.op in NUMBERS or node.op in MATMULS)
        return self.levels[node]

    def _needed(self, roots: list[Expr]) -> dict[Expr, None]:
        """Everything that is computed, the numbers among it."""
        found, stack = dict[Expr, None](), roots[::-1]
        while stack:
            node = stack.pop()
            if node not in found:
                found[node] = None
                if node in self.results:
                    stack.append(self.results[node])
                elif not self.leaf(node):
                    stack += reversed(node.args)
        return found

    def _formula(self, node: Expr) -> Expr:
        """A reduction as an expression of numbers, after as few rounds as the rules allow."""
        (value,), scale = node.args, const(1.0 / self.units if node.op == "mean" else 1.0)
        if node.op == "max":
            return _number("largest", value)
        # As written first: others exchange more numbers.
        ways = [apply("mul", _number("total", value), scale), self._linear(value, scale)]
        if not any(map(self.leaf, (value, *value.args))):
            ways += [*self._squares(value, scale), *self._powers(value, scale)]
        return min(ways, key=self._level)

    def _squares(self, value: Expr, scale: Expr) -> Iterable[Expr]:
        """The sum of squares of distances from one number of the row."""
        if value.op == "mul" and value.args[0] is value.args[1] and value.args[0].op == "sub":
            (distance, _) = value.args
            of, centre = distance.args
            if centre.narrow and not of.narrow:
                spread = apply("mul", _number("spread", of), scale)
                if centre is not Expr("mean", (of,), ALL):
                    mean = apply("mul", _number("total", of), const(1.0 / self.units))
                    apart = apply("sub", mean, centre)
                    squares = apply("mul", apply("mul", apart, apart), const(self.units))
                    spread = apply("add", spread, apply("mul", squares, scale))
                yield spread

    def _powers(self, value: Expr, scale: Expr) -> Iterable[Expr]:
        """The sum of powers of e relative to the maximum."""
        if value.op == "exp" and value.args[0].op == "sub":
            of, largest = value.args[0].args
            if largest.op == "stop_gradient":
                (largest,) = largest.args
            if largest is Expr("max", (of,), ALL):
                yield apply("mul", _number("raised", of), scale)

    def _linear(self, value: Expr, scale: Expr) -> Expr:
        """The sum of a value as a sum of its terms."""
        terms = dict[Expr, Expr]()
        total = const(0.0)
        for factor, part in self._terms(value):
            if part is ONE:
                whole = apply("mul", const(self.units), scale)
                total = apply("add", total, apply("mul", factor, whole))
            else:
                terms[factor] = apply("add", terms[factor], part) if factor in terms else part
        for factor, part in terms.items():
            part = apply("mul", _number("total", part), scale)
            total = apply("add", total, apply("mul", factor, part))
        return total

    def _terms(self, value: Expr) -> list[tuple[Expr, Expr]]:
        """The terms of a value: numbers of the row, and the values of each unit they multiply."""
        if value.narrow:
            return [(value, ONE)]
        if value.op == "sub" and value.args[1] is Expr("mean", (value.args[0],), ALL):
            return []
        if value.op in ("add", "sub", "neg", "mul", "div") and self._level(value):
            first, last = value.args[0], value.args[-1]
            if value.op in ("add", "sub"):
                sign = ONE if value.op == "add" else const(-1.0)
                return self._terms(first) + _times(sign, self._terms(last))
            if value.op == "neg":
                return _times(const(-1.0), self._terms(first))
            if last.narrow:
                return _times(
                    last if value.op == "mul" else apply("div", ONE, last), self._terms(first)
                )
            if first.narrow and value.op == "mul":
                return _times(first, self._terms(last))
        return [(ONE, value)]


def _times(factor: Expr, terms: list[tuple[Expr, Expr]]) -> list[tuple[Expr, Expr]]:
    return [(apply("mul", factor, other), part) for other, part in terms]


def _number(op: str, value: Expr) -> Expr:
    return Expr(op, (value,), ALL)


def companion(number: Expr) -> Expr:
    """The number that another one is relative to."""
    return Expr(COMPANION[number.op], number.args, ALL)
