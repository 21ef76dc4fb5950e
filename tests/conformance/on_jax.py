"""JAX: ``anycell.jax.RNN`` and ``recurrence``, inside ``jax.jit``."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from problems import LEARNED, Arrays, Problem

import anycell.jax as aj
from tests.conformance.frontend import Frontend
from tests.conformance.on_numpy import one

X64 = jax if hasattr(jax, "enable_x64") else jax.experimental
exact = partial(X64.enable_x64, True)
Run = Callable[[Arrays], tuple[Any, ...]]


def layer_of(problem: Problem, engine: str | None) -> Run:
    """A call of a layer, as a function of its arrays."""
    sizes = {name: size for name, size in problem.sizes.items() if name != "H"}
    layer = aj.RNN(
        problem.cell, problem.inputs, problem.sizes["H"], problem.layers, bias=problem.bias,
        bidirectional=len(problem.reverse) > 1, **sizes,
    )  # fmt: skip

    def run(arrays: Arrays) -> tuple[Any, ...]:
        params = {name: array for name, array in arrays.items() if LEARNED.search(name)}
        return layer(
            params, arrays["x"], state_of(problem, "state", arrays), engine=engine,
            **options_of(problem, arrays), reset_state=state_of(problem, "reset_state", arrays),
        )  # fmt: skip

    return run


def recurrence_of(problem: Problem, engine: str | None) -> Run:
    """A call of the primitive, as a function of its arrays."""
    cell = problem.cell

    def run(arrays: Arrays) -> tuple[Any, ...]:
        named = {name.removesuffix("_l0"): array for name, array in arrays.items()}
        state, reset = (
            [named[f"{kind} {n}"][0] for n in cell.state_names if f"{kind} {n}" in named] or None
            for kind in ("state", "reset_state")
        )
        output, final, *others = aj.recurrence(
            cell, named["x"], {n: named[n] for n in cell.learned if n in named}, state,
            reverse=problem.reverse[0], engine=engine, reset_state=reset,
            **options_of(problem, named),
        )  # fmt: skip
        return output, tuple(s[None] for s in final), *others

    return run


def options_of(problem: Problem, arrays: Arrays) -> dict[str, Any]:
    """The arguments of a call by name, except the states."""
    options = {n: a for n, a in problem.options.items() if n != "reset_state"}
    return {name: arrays.get(name, value) for name, value in options.items()}


def state_of(problem: Problem, kind: str, arrays: Arrays) -> Any:
    """The states of a call as layers take them."""
    names = (f"{kind} {name}" for name in problem.cell.state_names)
    return one([arrays[name] for name in names if name in arrays])


def solve(
    make: Callable[[Problem, str | None], Run],
    engine: str | None,
    problem: Problem,
    along: Arrays | None = None,
) -> Arrays:
    with exact():
        call, names = make(problem, engine), problem.cell.state_names

        def run(arrays: Arrays) -> Arrays:
            output, final, *sequences = call(arrays)
            final = final if isinstance(final, tuple) else (final,)
            results = {"output": output}
            results |= {f"final {name}": s for name, s in zip(names, final, strict=True)}
            if sequences:
                kept = [name for name in names if f"d sequence {name}" in problem.arrays]
                results |= {f"sequence {name}": sequences[0][name] for name in kept}
            return results

        def gradients(arrays: Arrays) -> tuple[Arrays, Arrays]:
            results, pull_back = jax.vjp(run, arrays)
            return results, pull_back({name: arriving[name] for name in results})[0]

        def slope(arrays: Arrays) -> Any:
            assert along is not None
            _, first = gradients(arrays)
            return sum((first[name] * along[name]).sum() for name in first)

        real = [name.removeprefix("d ") for name in problem.right if name[:2] == "d "]
        given = {name: jnp.asarray(problem.arrays[name]) for name in real}
        arriving = {n[2:]: jnp.asarray(a) for n, a in problem.arrays.items() if n[:2] == "d "}
        results, first = {}, {}
        if along is None:
            results, first = jax.jit(gradients)(given)
        else:
            first = jax.jit(jax.grad(slope))(given)
        solution = {**results, **{f"d {name}": value for name, value in first.items()}}
        return {name: np.asarray(value) for name, value in solution.items()}


LAYER = {"reverse": "a layer runs forwards, or both ways"}
PRIMITIVE = dict.fromkeys(("layers", "bidirectional"), "it is one direction of one layer")
FRONTENDS = [
    Frontend("jax.RNN", partial(solve, layer_of, None), LAYER, alike=True),
    Frontend(
        "jax.recurrence", partial(solve, recurrence_of, None), PRIMITIVE, alike=True, variant=True
    ),
    Frontend(
        "jax.RNN by scan", partial(solve, layer_of, "reference"), LAYER, alike=True, variant=True,
        fused=False,
    ),
]  # fmt: skip
