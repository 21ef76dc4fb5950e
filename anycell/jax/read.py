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
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from anycell.jax.equations import (
    BOOL,
    Equation,
    Values,
    Variable,
    at_all_steps,
    evaluate,
    inlined,
    needed,
    origin,
    place,
    value,
)  # fmt: skip
from anycell.jax.recurrence import planned, recurrence
from anycell.jax.table import Reader
from anycell.plan import Layer, Plan
from anycell.read import Reading, Refused

Array = Any
MANY, UNITS = 32, 1024  # parts and units of cells whose states have two axes, but no batch


class Body:
    """The body of a ``lax.scan`` that was read.

    Args:
        closed: its jaxpr, whose arguments are what it closes over, the carry, and this step's x.
        consts, carries: the numbers of the first two.

    Raises:
        Refused: if it cannot be read.
    """

    def __init__(self, closed: Any, consts: int, carries: int) -> None:
        jaxpr = closed.jaxpr
        name, file = origin(jaxpr)
        self.where = Path(file).name
        if jaxpr.effects:
            self.where = next((place(eqn) for eqn in jaxpr.eqns if eqn.effects), self.where)
            self._refuse(
                "this step has side effects",
                "return what is to be printed, and print it afterwards",
            )
        arguments = [Variable(v.aval) for v in jaxpr.invars]
        self.consts, self.carry = arguments[:consts], arguments[consts:][:carries]
        self.x = arguments[consts + carries :]
        self.equations: list[Equation] = []
        variables = dict(zip(jaxpr.invars, arguments, strict=True))
        for v, array in zip(jaxpr.constvars, closed.consts, strict=True):
            variables[v] = Variable(v.aval, constant=array)
        results = inlined(jaxpr, variables, self.equations)
        self.after, self.y = results[:carries], results[carries:]
        self.ahead = self._ahead()
        self.states = [k for k in range(carries) if k not in self.ahead]
        self._classify()
        self._check()
        self.dtype = self.carry[self.states[0]].aval.dtype
        self.reading = self._read(name, _names(jaxpr, consts, carries))
        self.jitted = jax.jit(self.run, static_argnames=("steps", "reverse", "engine"))

    # -- kinds of values -------------------------------------------------------------------------
    def _ahead(self) -> list[int]:
        """The carries that are computed beforehand: counters, keys, and all else that no state
        enters; of floating point numbers only single ones, unless all carries are.
        """
        depends: dict[Variable, set[int]] = {v: {k} for k, v in enumerate(self.carry)}
        for equation in self.equations:
            into = set().union(*(depends.get(v, ()) for v in equation.operands))
            depends |= dict.fromkeys(equation.results, into)
        ranks = [len(v.shape) for v in self.carry]
        ahead = {
            k for k, v in enumerate(self.carry)
            if not v.floating or (not v.shape and max(ranks) > 0)
        }  # fmt: skip
        while late := {k for k in ahead if depends.get(self.after[k], set()) - ahead}:
            ahead -= late
        return sorted(ahead)

    def _classify(self) -> None:
        for k, v in enumerate(self.carry):
            v.kind = "X" if k in self.ahead else "S"
        for v in self.x:
            v.kind = "X"
        for equation in self.equations:
            kinds = {v.kind for v in equation.operands}
            for v in equation.results:
                v.kind = "S" if "S" in kinds else "X" if "X" in kinds else "F"

    def _check(self) -> None:
        carries = [self.carry[k] for k in self.states]
        reals = {v.aval.dtype for v in carries if v.floating}
        if not reals:
            self._refuse(
                "no real floating point numbers are carried from step to step",
                "carry them as float32, complex numbers as two such arrays",
            )
        others = {v.aval.dtype for v in carries} - reals - {BOOL}
        if others or len(reals) > 1:
            names = ", ".join(sorted(map(str, reals | others)))
            self._refuse(
                f"carries that depend on states have the dtypes {names}",
                "carry floating point numbers of one dtype, and booleans",
            )
        if any(getattr(v.aval, "weak_type", False) for v in carries):
            self._refuse(
                "a carry is weakly typed, as Python's numbers are",
                "start from an array with a dtype, such as jnp.zeros(shape, jnp.float32)",
            )
        if any(0 in v.shape for v in (*self.carry, *self.x)):
            self._refuse("an array of the loop is empty", "a loop over more than nothing")

    def _refuse(self, problem: str, instead: str) -> NoReturn:
        where = f"{self.where}: " if self.where else ""
        raise Refused(f"{where}{problem}. Instead: {instead}.")

    def _axes(self) -> list[int | None]:
        """The axes that may be the batch's, the likeliest first; None for states without one."""
        shapes = [self.carry[k].shape for k in self.states]
        rank = min(map(len, shapes))
        axes: list[int | None] = [
            axis for axis in range(rank) if len({shape[axis] for shape in shapes}) == 1
        ]
        if max(map(len, shapes)) < 2:
            return [None]
        few = sum(map(math.prod, shapes)) <= UNITS
        return [*axes, None] if few else axes or [None]

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan of the cell, which says what runs it."""
        reading = self.reading
        sizes = ("H", reading.size), *reading.sizes.items()
        return planned(Layer(reading.cell, sizes), self.dtype).plan

    def _read(self, name: str, names: Sequence[str]) -> Reading:
        refusals: list[Refused] = []
        for axis in self._axes():
            try:
                reader = Reader(self, axis)
                self.rows = reader.graph.rows or 1
                reading = reader.read(name, names)
            except Refused as refusal:
                refusals.append(refusal)
                continue
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
        states = [first[k] for k in self.states]
        every = reading.cell.state_names
        seen = [k for k in range(len(states)) if self._seen(k)]
        wanted = [n for n in every[1:] if any(n in reading.names_of(k) for k in seen)]
        output, final, *more = recurrence(
            reading.cell, **reading.call(run, states), return_states=wanted or None,
            reverse=reverse, engine=engine,
        )  # fmt: skip
        sequences = {every[0]: output} | (dict(more[0]) if more else {})
        last = list(first)
        for k, values in zip(self.ahead, run.final, strict=True):
            last[k] = values
        moving = dict(run.moving)
        for k, number in enumerate(self.states):
            before, after = self.carry[number], self.after[number]
            last[number] = self._user(k, dict(zip(every, final, strict=True)))
            if k in seen:
                sequence = self._user(k, sequences)
                start = jnp.asarray(first[number])[None]
                parts = [sequence[1:], start] if reverse else [start, sequence[:-1]]
                moving[before] = jnp.concatenate(parts)
                moving[after] = sequence
        equations = needed(self.equations, self.y, {*moving, *run.fixed})
        return [*last, *at_all_steps(equations, self.y, moving, run.fixed, steps)]

    def _user(self, k: int, values: dict[str, Array]) -> Array:
        state = self.reading.joined(k, values)
        dtype = self.carry[self.states[k]].aval.dtype
        return state > 0.5 if dtype == BOOL else state

    @functools.cached_property
    def _late(self) -> list[Equation]:
        """The equations of outputs, from the states after the steps and before."""
        known = [v for v in (*self.carry, *self.after) if v.kind == "S"]
        known += [v for e in self.equations for v in e.results if v.kind != "S"]
        return needed(self.equations, self.y, known)

    def _seen(self, k: int) -> bool:
        """Whether outputs need a sequence of the state."""
        used = {*self.y, *(v for equation in self._late for v in equation.operands)}
        number = self.states[k]
        return self.carry[number] in used or (
            self.after[number] in used and self.after[number].kind == "S"
        )


class Run:
    """The values of one call that no state enters."""

    def __init__(
        self, body: Body, consts: Sequence[Array], first: Sequence[Array], xs: Sequence[Array],
        steps: int, reverse: bool,
    ) -> None:  # fmt: skip
        self.memo: dict[Any, Any] = {}
        self.dtype, self.steps, self.rows = body.dtype, steps, body.rows
        self.fixed: Values = dict(zip(body.consts, consts, strict=True))
        evaluate([e for e in body.equations if e.results[0].kind == "F"], self.fixed)
        carried = [body.carry[k] for k in body.ahead]
        results = [body.after[k] for k in body.ahead]
        equations = needed(body.equations, results, {*carried, *body.x, *self.fixed})

        def step(carry: list[Array], x: list[Array]) -> tuple[list[Array], list[Array]]:
            values = self.fixed | dict(zip((*carried, *body.x), (*carry, *x), strict=True))
            evaluate(equations, values)
            return [value(v, values) for v in results], carry

        self.final: list[Array] = []
        self.moving: Values = dict(zip(body.x, xs, strict=True))
        if carried:
            start = [first[k] for k in body.ahead]
            self.final, ahead = jax.lax.scan(step, start, list(xs), steps, reverse)
            self.moving |= dict(zip(carried, ahead, strict=True))
        late = [e for e in body.equations if e.results[0].kind == "X"]
        wanted = [v for e in late for v in e.results]
        values = at_all_steps(late, wanted, self.moving, self.fixed, steps)
        self.moving |= dict(zip(wanted, values, strict=True))


def _names(jaxpr: Any, consts: int, carries: int) -> list[str]:
    """The names of the carries in f, "" where JAX does not tell."""
    names = getattr(getattr(jaxpr, "debug_info", None), "arg_names", None) or ()
    if len(names) != len(jaxpr.invars):
        return [""] * carries
    return [str(name or "") for name in names[consts:][:carries]]
