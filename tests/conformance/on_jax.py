"""JAX: ``anycell.jax.recurrence``, inside ``jax.jit``."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from problems import Arrays, Problem

import anycell.jax as aj
from conformance.frontend import Frontend


def exact() -> Any:
    """A context in which JAX keeps numbers of 64 bits."""
    return jax.enable_x64(True)


def by_recurrence(
    problem: Problem, along: Arrays | None = None, engine: str | None = None
) -> Arrays:
    cell, states = problem.cell, problem.cell.state_names
    options: dict[str, Any] = {n: a for n, a in problem.options.items() if n != "reset_state"}
    options |= {"reverse": problem.reverse[0], "engine": engine}
    kept = [name for name in states if f"d sequence {name}" in problem.arrays]

    def run(arrays: Arrays) -> Arrays:
        named = {name.removesuffix("_l0"): array for name, array in arrays.items()}
        state, reset = (
            [named[f"{kind} {n}"][0] for n in states if f"{kind} {n}" in named] or None
            for kind in ("state", "reset_state")
        )
        output, final, *sequences = aj.recurrence(
            cell, named["x"], {n: named[n] for n in cell.learned if n in named}, state,
            **{**options, **{n: a for n, a in named.items() if n in options}, "reset_state": reset},
        )  # fmt: skip
        results = {"output": output}
        results |= {f"final {n}": s[None] for n, s in zip(states, final, strict=True)}
        return results | {f"sequence {n}": sequences[0][n] for n in kept}

    reals = {name.removeprefix("d ") for name in problem.right if name[:2] == "d "}
    given = {name: jnp.asarray(problem.arrays[name]) for name in reals}
    arriving = {n[2:]: jnp.asarray(a) for n, a in problem.arrays.items() if n[:2] == "d "}

    def gradients(arrays: Arrays) -> tuple[Arrays, Arrays]:
        results, pull_back = jax.vjp(run, arrays)
        return results, pull_back({name: arriving[name] for name in results})[0]

    def slope(arrays: Arrays) -> Any:
        _, first = gradients(arrays)
        return sum((first[name] * along[f"{name}"]).sum() for name in first)

    if along is not None:
        second = jax.jit(jax.grad(slope))(given)
        return {f"d {name}": np.asarray(value) for name, value in second.items()}
    results, first = jax.jit(gradients)(given)
    solution = {**results, **{f"d {name}": value for name, value in first.items()}}
    return {name: np.asarray(value) for name, value in solution.items()}


def on_cpu(problem: Problem, along: Arrays | None = None) -> Arrays:
    with exact():
        return by_recurrence(problem, along)


def step_by_step(problem: Problem, along: Arrays | None = None) -> Arrays:
    with exact():
        return by_recurrence(problem, along, "reference")


PRIMITIVE = dict.fromkeys(("layers", "bidirectional"), "it is one direction of one layer")
FRONTENDS = [
    Frontend("jax.recurrence", on_cpu, PRIMITIVE),
    Frontend("jax.recurrence by scan", step_by_step, PRIMITIVE, variant=True, fused=False),
]
