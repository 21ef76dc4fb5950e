"""The body of a ``lax.scan``, read as a cell and run as one.

Values of the body that no state enters are JAX's own, with its derivatives: those of weights alone
are computed once a call, those of this step's input for all steps at once, by ``vmap``. Carries
that no state enters, such as counters and keys, are computed in a loop of their own beforehand, and
count as input. Outputs are computed after the loop, for all steps at once. Only what is left, from
states to states, needs the table.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from anycell import read
from anycell.jax.equations import execute, inlined, origin, place, variable
from anycell.jax.framework import Stored
from anycell.jax.primitive import planned
from anycell.jax.primitive import run as run_layer
from anycell.jax.table import Arrays, Reader
from anycell.plan import Options, Plan
from anycell.read import Equation, Reading, Refused, Values, Variable, one_way

Array = Any
SPREAD, LEAST = 4, 64  # times as many numbers as x has, and how few never matter
MANY, UNITS = 32, 1024  # parts and units of cells whose states have two axes, but no batch


class Body(read.Body):
    """The body of a ``lax.scan`` that was read.

    Args:
        closed: its jaxpr, whose arguments are what it closes over, the carry, and this step's x.
        consts, carries: the numbers of the first two.

    Raises:
        Refused: if it cannot be read.
    """

    def __init__(self, closed: Any, consts: int, carries: int) -> None:
        jaxpr = closed.jaxpr
        name, _ = origin(jaxpr)
        if jaxpr.effects:
            instead = "return what is to be printed, and print it afterwards"
            where = next((place(eqn) for eqn in jaxpr.eqns if eqn.effects), "")
            raise Refused("this step has side effects", instead, where)
        arguments = [variable(v.aval) for v in jaxpr.invars]
        equations: list[Equation] = []
        variables = dict(zip(jaxpr.invars, arguments, strict=True))
        for v, array in zip(jaxpr.constvars, closed.consts, strict=True):
            variables[v] = variable(v.aval, constant=array)
        for k, v in enumerate(arguments[consts:]):
            v.kind = "S" if k < carries else "X"
        results = inlined(jaxpr, variables, equations)
        super().__init__(
            arguments[:consts], arguments[consts + carries :], arguments[consts:][:carries],
            results[carries:], results[:carries], equations,
        )  # fmt: skip
        # Counters and keys; of floating point numbers only single ones, unless all carries are.
        ranks = [len(v.shape) for v in self.states]
        self.sort(
            k for k, v in enumerate(self.states)
            if not v.floating or (not v.shape and max(ranks) > 0)
        )  # fmt: skip
        carried = jaxpr.invars[consts:][:carries]
        self.dtype = self._checked([getattr(v.aval, "weak_type", False) for v in carried])
        self.reading = self._read(name, _names(jaxpr, consts, carries))
        self.jitted = jax.jit(self.run, static_argnames=("steps", "reverse", "engine"))

    def _checked(self, weak: Sequence[bool]) -> str:
        """The dtype of the states."""
        carries = [self.states[k] for k in self.moving]
        reals = {v.dtype for v in carries if v.floating}
        if not reals:
            raise Refused(
                "no real floating point numbers are carried from step to step",
                "carry them as float32, complex numbers as two such arrays",
            )
        others = {v.dtype for v in carries if not v.boolean} - reals
        if others or len(reals) > 1:
            dtypes = ", ".join(sorted(reals | others))
            raise Refused(
                f"carries that depend on states have the dtypes {dtypes}",
                "carry floating point numbers of one dtype, and booleans",
            )
        if any(weak[k] for k in self.moving):
            raise Refused(
                "a carry is weakly typed, as Python's numbers are",
                "start from an array with a dtype, such as jnp.zeros(shape, jnp.float32)",
            )
        if any(0 in v.shape for v in (*self.states, *self.x)):
            raise Refused("an array of the loop is empty", "a loop over more than nothing")
        return reals.pop()

    def _axes(self) -> list[int | None]:
        """The axes that may be the batch's, the likeliest first; None for states without one."""
        shapes = [self.states[k].shape for k in self.moving]
        rank = min(map(len, shapes))
        axes: list[int | None] = [
            axis for axis in range(rank) if len({shape[axis] for shape in shapes}) == 1
        ]
        if max(map(len, shapes)) < 2:
            return [None]
        few = sum(map(math.prod, shapes)) <= UNITS
        return [*axes, None] if few else axes or [None]

    def spread(self) -> int | None:
        """The count of numbers that the cell sees of a row of x, if x has far fewer; else None."""
        reading = self.reading
        seen = sum(part.size for part in reading.gates)
        have = sum(math.prod(v.shape) for v in self.x) / self.rows
        many = not reading.projected and not reading.weights and 0 < SPREAD * have < seen
        return seen if many and seen > LEAST else None

    @property
    def weights(self) -> int:
        """The count of numbers in all that is the same at all steps."""
        return sum(math.prod(v.shape) for v in self.fixed)

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan of the cell, which says what runs it."""
        return planned(self.reading.layer, self.dtype).plan

    def _read(self, name: str, names: Sequence[str]) -> Reading:
        refusals: list[Refused] = []
        for axis in self._axes():
            try:
                reader = Reader(self, axis)
                self.rows = reader.graph.rows or 1
                reading = reader.read(names, name)
            except Refused as refusal:
                refusals.append(refusal)
                continue
            self.moved = [v for v in reader.values if v.kind == "X"]
            # Rows that are read as units may have states, weights and products of their own.
            parts = len(reading.pieces) + len(reading.params) + len(reading.weights)
            if axis is not None or parts <= MANY:
                return reading
        raise refusals[0]

    # -- a call ----------------------------------------------------------------------------------
    def run(
        self, consts: Sequence[Array], first: Sequence[Array], xs: Sequence[Array], *,
        steps: int, reverse: bool, engine: str | None = None,
    ) -> list[Array]:  # fmt: skip
        """The final carry and the stacked outputs."""
        reading, carries = self.reading, len(first)
        if reverse and reading.flags is not None:  # resets of a reverse direction mean another step
            flipped = [jnp.flip(x, 0) for x in xs]
            results = self.run(consts, first, flipped, steps=steps, reverse=False, engine=engine)
            return [*results[:carries], *(jnp.flip(y, 0) for y in results[carries:])]
        run = Run(self, consts, first, xs, steps, reverse)
        arrays = reading.arrays_of(run, [first[k] for k in self.moving])
        seen, layer = self.seen(), planned(reading.layer, self.dtype, engine)
        stored = {name: a for name, a in arrays.items() if isinstance(a, Stored)}
        arrays |= {name: array.matrix for name, array in stored.items()}
        ends, sequences = reading.ran(
            one_way(run_layer), arrays, seen, Options((reverse,)), dtype=layer.dtype,
            plan=layer.plan, stored=tuple((name, a.part) for name, a in stored.items()),
        )  # fmt: skip
        last, known = self.unpacked(reading, first, ends, sequences, seen, reverse)
        run.series |= known
        for k, values in zip(self.ahead, run.final, strict=True):
            last[k] = values
        final = list(map(jnp.asarray, last))  # what is transposed is ``Stored``
        return [*final, *run.at_all_steps(self.outputs)]


class Run:
    """The values of one call that no state enters."""

    def __init__(
        self, body: Body, consts: Sequence[Array], first: Sequence[Array], xs: Sequence[Array],
        steps: int, reverse: bool,
    ) -> None:  # fmt: skip
        self.body, self.memo = body, dict[Any, Any]()
        self.dtype, self.steps, self.rows = jnp.dtype(body.dtype), steps, body.rows
        self.values = Values(dict(zip(body.fixed, consts, strict=True)), execute)
        self.values.update((v, first[k]) for k, v in enumerate(body.states) if v.kind == "F")
        for equation in body.equations:
            if equation.results[0].kind == "F":
                self.values[equation.results[0]]
        carried = [body.states[k] for k in body.ahead]
        results = [body.after[k] for k in body.ahead]

        def step(carry: list[Array], x: list[Array]) -> tuple[list[Array], list[Array]]:
            values = self._one_step(dict(zip((*carried, *body.x), (*carry, *x), strict=True)))
            return [values[v] for v in results], carry

        self.final: list[Array] = []
        self.series = Values(dict(zip(body.x, xs, strict=True)), execute)  # of all steps
        if carried:
            start = [first[k] for k in body.ahead]
            self.final, ahead = jax.lax.scan(step, start, list(xs), steps, reverse)
            self.series |= dict(zip(carried, ahead, strict=True))

    def fixed(self, v: Variable) -> Array:
        """A value of kind F."""
        made = v.equation
        if made is not None and made.name == "transpose" and made.options["permutation"] == (1, 0):
            return Arrays.transpose(self.fixed(made.operands[0]), (1, 0))
        return jnp.asarray(self.values.get(v, v.constant))

    def moving(self, v: Variable) -> Array:
        """A value of kind X at all steps; with it, all that are needed."""
        if v not in self.series:
            wanted = self.body.moved
            self.series |= dict(zip(wanted, self.at_all_steps(wanted), strict=True))
        return self.series[v]

    def at_all_steps(self, wanted: Sequence[Variable]) -> list[Array]:
        """The values of variables at all steps."""

        def one(*parts: Array) -> list[Array]:
            values = self._one_step(dict(zip(self.series, parts, strict=True)))
            return [jnp.asarray(values[v]) for v in wanted]

        return jax.vmap(one, axis_size=self.steps)(*self.series.values()) if wanted else []

    def _one_step(self, known: dict[Variable, Array]) -> Values:
        """The values of one step, from these and those that are the same at all steps."""
        return Values(known, execute, lambda v: self.values.get(v, v.constant))


def _names(jaxpr: Any, consts: int, carries: int) -> list[str]:
    """The names of the carries in f, "" where JAX does not tell."""
    names = getattr(getattr(jaxpr, "debug_info", None), "arg_names", None) or ()
    if len(names) != len(jaxpr.invars):
        return [""] * carries
    return [str(name or "") for name in names[consts:][:carries]]
