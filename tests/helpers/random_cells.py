"""Random cells from the op table: bounded, smooth almost everywhere, and of any shape.

A cell grows turn by turn from gates, states, parameters and numbers: each turn applies a row of the
op table to existing values. The values are mapped into the row's domain first, and the range of the
result is sampled, so a new row of the table needs no change here.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from anycell import Cell, cell, clip, keep, layer_norm, linear, mean, sigmoid, tanh, where
from anycell.lang.cell import Gates
from anycell.lang.expr import CONDITIONS, REDUCTIONS, Expr, apply, listing
from anycell.lang.namespaces import NUMPY
from anycell.lang.ops import TABLE, is_reduction

Interval = tuple[float, float]

# Finite differences see through stop_gradient.
ROWS = [op for op in TABLE if op not in CONDITIONS and op not in ("where", "stop_gradient")]
COMPARISONS = ["lt", "le", "gt", "ge", "eq", "ne"]


class Value(NamedTuple):
    """A traced value, and the range in which it mostly lies."""

    node: Expr
    range: Interval


def random_cell(seed: int, hidden: int, ones: bool = False) -> Cell:
    """Returns the random cell number ``seed``, for ``hidden`` units.

    It has 1 to 4 gates, 1 to 3 states, 0 to 3 parameters, up to 3 matmuls besides the recurrent
    one, a static input or none, and the hyperparameters ``rate`` and ``bound``. With ``ones`` each
    of these may have size 1.
    """
    rng = np.random.default_rng([seed, hidden])
    gates = ["a", "b", "c", "d"][: rng.integers(1, 5)]
    states = ["h", "c", "n=0.5"][: rng.integers(1, 4)]
    params = ["p=1", "q", "w"][: rng.integers(4)]
    static = "e" if rng.random() < 0.3 else None
    names = list(gates)
    if ones:

        def sized(word: str) -> str:
            name, *value = word.split("=")
            return "=".join([name + ":1" * bool(rng.random() < 0.4), *value])

        gates, states, params = ([*map(sized, words)] for words in (gates, states, params))
        static = static and sized(static)

    def step(x: Gates, r: Gates, s: Gates, *more: Any, rate: Expr, bound: Expr) -> Any:
        garden = Garden(np.random.default_rng([seed, hidden, 1]), hidden, rate, bound, ones)
        for name, gate in zip(names, gates, strict=True):
            if gate == name:
                garden.plant_gate(getattr(x, name), getattr(r, name))
            else:
                garden.plant([getattr(x, name)], (-2.5, 2.5))
        garden.plant(s, (-1.5, 1.5))
        for leaves in more:
            garden.plant(leaves if isinstance(leaves, Gates) else [leaves], (-2.0, 2.0))
        for _ in range(garden.rng.integers(4, 16)):
            garden.grow()
        new = [garden.state(old) for old in s]
        return tuple(new) if len(new) > 1 else new[0]

    kinds = inspect.Parameter
    places = ["x", "r", "s"] + ["p"] * bool(params) + ["e"] * bool(static)
    numbers = {"rate": 0.7, "bound": 1.2}
    step.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [kinds(name, kinds.POSITIONAL_ONLY) for name in places]
        + [kinds(name, kinds.KEYWORD_ONLY, default=value) for name, value in numbers.items()]
    )
    step.__name__ = f"Random{seed}"
    declare = cell(
        gates=" ".join(gates), state=" ".join(states), params=" ".join(params), static=static
    )
    return declare(step)


def source(random: Cell) -> str:
    """Returns a listing of a random cell, for reports of failures."""
    named = zip(random.state_names, random.next, strict=True)
    return "\n".join([f"{random} of {random.gates}:", *listing(named)])


@functools.cache
def level(node: Expr, groups: int) -> bool:
    """Whether all units of a group have the same value, for each of ``groups`` groups.

    Their norm would be 0, and its derivative nothing but rounding errors.
    """
    if is_reduction(node):
        return groups % node.attrs[0] == 0
    if node.op in ("const", "hyper"):
        return True
    return bool(node.args) and node.op != "keep" and all(level(a, groups) for a in node.args)


class Garden:
    """The values of a cell that grows."""

    def __init__(
        self, rng: np.random.Generator, hidden: int, rate: Expr, bound: Expr, ones: bool
    ) -> None:
        self.rng, self.hidden, self.rate, self.bound, self.ones = rng, hidden, rate, bound, ones
        self.groups = [k for k in (1, 2, 3) if hidden % k == 0]
        self.values = [Value(rate, (0.0, 1.0)), Value(bound, (0.5, 2.0))]
        self.picked: set[int] = set()
        self.norms: set[Expr] = set()
        self.matmuls: list[tuple[str, dict[str, Any]]] = []
        self.turns: list[Callable[[], None]] = [
            *[self.row] * 8, self.branch, self.bounds, self.norm, self.mask, self.matmul,
        ]  # fmt: skip

    def plant(self, nodes: Any, interval: Interval) -> None:
        self.values += [Value(node, interval) for node in nodes]

    def plant_gate(self, x: Expr, r: Expr) -> None:
        """Adds both projections of a gate, in one of the ways that cells use them."""
        ways = [[x + r], [x + r], [x + r, r], [x, r], [x], [r], [x - r, x]]
        self.plant(ways[self.rng.integers(len(ways))], (-2.5, 2.5))

    def pick(self) -> Value:
        """Returns a random value, more often one that was not picked before."""
        idle = [i for i in range(len(self.values)) if i not in self.picked]
        some = idle if idle and self.rng.random() < 0.7 else range(len(self.values))
        chosen = int(self.rng.choice(some))
        self.picked.add(chosen)
        return self.values[chosen]

    def fit(self, value: Value, domain: Interval) -> Value:
        """Returns the value if it lies in the domain, else a smooth map of it into the domain."""
        (low, high), (least, most) = domain, value.range
        if low <= least and most <= high:
            return value
        slope = 4.0 / max(abs(least), abs(most), 0.1)
        return Value(low + (high - low) * sigmoid(value.node * slope), domain)

    def state(self, old: Expr) -> Expr:
        """Returns a new state, bounded so that long sequences stay bounded."""
        new = self.fit(self.pick(), (-2.0, 2.0)).node
        for _ in range(self.rng.integers(4)):
            new = new + self.fit(self.pick(), (-1.0, 1.0)).node
        new = tanh(new)
        if self.ones and old.narrow:
            new = new if new.narrow else mean(new)
        if self.rng.random() < 0.5:
            return new
        gate = self.fit(self.pick(), (0.1, 0.9)).node
        if self.ones and old.narrow and not gate.narrow:
            gate = mean(gate)
        return gate * old + (1.0 - gate) * new

    # -- turns -----------------------------------------------------------------------------------
    def grow(self) -> None:
        self.turns[self.rng.integers(len(self.turns))]()

    def row(self) -> None:
        """Applies a random row of the op table to random values."""
        name = ROWS[self.rng.integers(len(ROWS))]
        op = TABLE[name]
        args = [self.fit(self.pick(), domain) for domain in op.domain]
        if name in REDUCTIONS and args[0].node in self.norms:
            return  # the mean of normed values is 0, its derivative nothing but rounding errors
        attrs = (int(self.rng.choice(self.groups)),) if name in REDUCTIONS else ()
        if attrs and self.ones and args[0].node.narrow:
            attrs = (1,)
        samples = [self.rng.uniform(*arg.range, (100, self.hidden)) for arg in args]
        found = op.meaning(NUMPY, *samples, *attrs)
        node = apply(name, *(arg.node for arg in args), attrs=attrs)
        self.values.append(Value(node, (float(found.min()), float(found.max()))))

    def branch(self) -> None:
        a, b, c, d = (self.pick() for _ in range(4))
        condition = apply(COMPARISONS[self.rng.integers(len(COMPARISONS))], a.node, b.node)
        if self.rng.random() < 0.4:
            other = c.node > 0.2
            condition = (condition & ~other) if self.rng.random() < 0.5 else (condition | other)
        interval = (min(c.range[0], d.range[0]), max(c.range[1], d.range[1]))
        self.values.append(Value(where(condition, c.node, d.node), interval))

    def bounds(self) -> None:
        self.values.append(Value(clip(self.pick().node, -self.bound, self.bound), (-2.0, 2.0)))

    def norm(self) -> None:
        groups = int(self.rng.choice(self.groups))
        # A row of equal values is divided by the root of eps, which must not be tiny for float32.
        value = self.pick().node
        if not level(value, groups):
            normed = layer_norm(value, 0.1, groups)
            self.norms.add(normed)
            self.values.append(Value(normed, (-3.0, 3.0)))

    def matmul(self) -> None:
        """Adds a matmul of a random value, with or without gates of its own, by a weight of its own
        or by an earlier one: at most three."""
        if len(self.matmuls) == 3:
            return
        operand, name = self.fit(self.pick(), (-2.0, 2.0)).node, f"u{len(self.matmuls) + 1}"
        heads, bias = int(self.rng.choice(self.groups)), bool(self.rng.random() < 0.5)
        gates = "k l" if self.rng.random() < 0.3 else None
        matmul: tuple[str, dict[str, Any]] = name, {"heads": heads, "bias": bias, "gates": gates}
        if self.ones:
            size = "1" if self.rng.random() < 0.4 else None
            alone = operand.narrow or size == "1"
            name = f"{name}_{operand.narrow}"  # operands of one weight have one size
            matmul = name, {**matmul[1], "heads": 1 if alone else heads, "size": size}
        elif self.matmuls and self.rng.random() < 0.4:
            matmul = self.matmuls[-1]
        self.matmuls.append(matmul)
        found = linear(operand, matmul[0], **matmul[1])
        self.plant(found if isinstance(found, Gates) else [found], (-2.5, 2.5))

    def mask(self) -> None:
        per = "step" if self.rng.random() < 0.7 else "sequence"
        kept, value = keep(self.rate, per), self.pick()
        low, high = value.range
        self.values.append(Value(kept / self.rate * value.node, (min(low, 0.0), max(high, 0.0))))
