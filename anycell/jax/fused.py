"""A layer by the kernels of the CPU engine, as a differentiable function of JAX.

Its gradient is the derived backward pass. Gradients of that gradient are those of the layer step by
step, so they have any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from anycell import layer
from anycell.engines.cpu import pool
from anycell.jax.composite import Array, Results, composite
from anycell.jax.host import Buffer, Seed, host_of
from anycell.layer.arguments import Kept
from anycell.layer.sequences import keeping, sequences
from anycell.plan import Options, Plan
from anycell.plan import plan as make_plan

Arrays = dict[str, Array]
Names = tuple[str, ...]
_differentiable = partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))


threads = pool.threads


def run(plan: Plan, options: Options, names: Names, arrays: Arrays) -> Results:
    """Runs a layer.

    Args:
        plan: of the cell, for the engine that runs it: "cpu" or "reference".
        options: of the call; "seed" among the arrays takes the place of their seed.
        names: states besides the first whose values after every step are wanted.
        arrays: by the names of ``layer.signature``.
    """
    if names:  # the kernel keeps them like values for the backward pass
        options = options._replace(checkpoint=None)
    return (_run if plan.engine == "cpu" else _composite)(plan, options, names, arrays)


def _composite(plan: Plan, options: Options, names: Names, arrays: Arrays) -> Results:
    options, arrays = _seeded(options, arrays)
    return composite(plan.cell, options, names, arrays)


def _seeded(options: Options, arrays: Arrays) -> tuple[Options, Arrays]:
    """Moves the seed from the arrays to the options."""
    arrays = dict(arrays)
    seed = arrays.pop("seed", None)
    return (options if seed is None else options._replace(seed=Seed.of(seed))), arrays


# ---- the kernels ---------------------------------------------------------------------------------
def _forward(
    plan: Plan, options: Options, names: Names, arrays: Arrays, keep: bool
) -> tuple[Results, Kept | None]:
    options, arrays = _seeded(options, arrays)
    plan = _kernels(plan, names, arrays)
    host = host_of(plan.dtype)
    output, finals, kept = layer.forward(host, plan, arrays, options, keep=keep or bool(names))
    others = sequences(names, plan.cell, options, arrays, kept) if kept and names else []
    return (output, tuple(finals), tuple(others)), kept


def _backward(
    plan: Plan, options: Options, names: Names, arrays: Arrays, kept: Kept, arriving: Arrays,
    wanted: Names,
) -> Arrays:  # fmt: skip
    options, arrays = _seeded(options, arrays)
    plan = _kernels(plan, names, arrays)
    d_final = [arriving.get(f"final {name}") for name in plan.cell.state_names]
    d_states = {name: arriving[name] for name in names if name in arriving}
    gradients = layer.backward(
        host_of(plan.dtype), plan, arrays, options, kept, arriving.get("output"), d_final,
        d_states=d_states, wanted=wanted,
    )  # fmt: skip
    return {name: Buffer.read(gradients[name]) for name in wanted}


def _kernels(plan: Plan, names: Names, arrays: Arrays) -> Plan:
    """The plan of the kernels that run a call."""
    mask = arrays.get("recurrent_mask")
    if mask is not None:
        cell = layer.stepped(plan.cell, mask)
        plan = make_plan(cell, plan.hidden_size, plan.dtype, "cpu", plan.sizes)
    return keeping(plan, names)


# ---- their derivatives ---------------------------------------------------------------------------
@_differentiable
def _run(plan: Plan, options: Options, names: Names, arrays: Arrays) -> Results:
    results, _ = _forward(plan, options, names, arrays, False)
    return results


def _run_forward(plan: Plan, options: Options, names: Names, primals: Any) -> Any:
    arrays = {name: primal.value for name, primal in primals.items()}
    wanted = tuple(n for n, primal in primals.items() if primal.perturbed and _is_real(arrays[n]))
    if "recurrent_mask" in wanted:  # its gradient is derived step by step alone
        return _run(plan, options, names, arrays), (arrays, None, dict.fromkeys(wanted, ()))
    results, kept = _keeping(plan, options, names, arrays)
    return results, (arrays, kept, dict.fromkeys(wanted, ()))


def _run_backward(plan: Plan, options: Options, names: Names, residuals: Any, d: Results) -> Any:
    arrays, kept, wanted = residuals
    arriving = _named(plan, names, d)
    if kept is None:
        gradients = _pull_back(plan, options, names, tuple(wanted), arrays, arriving)
    else:
        given = arrays, kept, arriving
        gradients = _gradients(plan, options, (names, tuple(wanted)), given)
    return ({name: gradients.get(name) for name in arrays},)


_run.defvjp(_run_forward, _run_backward, symbolic_zeros=True)


@_differentiable
def _keeping(
    plan: Plan, options: Options, names: Names, arrays: Arrays
) -> tuple[Results, Kept | None]:
    """Results, and what the backward pass needs; its derivative is that of the results alone,
    since ``_gradients`` accounts for all that depends on the arrays.
    """
    return _forward(plan, options, names, arrays, True)


def _keeping_backward(plan: Plan, options: Options, names: Names, arrays: Arrays, d: Any) -> Any:
    results, _ = d
    wanted = tuple(name for name, array in arrays.items() if _is_real(array))
    arriving = _named(plan, names, results)
    gradients = _pull_back(plan, options, names, wanted, arrays, arriving)
    return ({name: gradients.get(name) for name in arrays},)


_keeping.defvjp(lambda *call: (_keeping(*call), call[3]), _keeping_backward)


@_differentiable
def _gradients(plan: Plan, options: Options, both: tuple[Names, Names], given: Any) -> Arrays:
    """The gradients of the arrays that are ``wanted``: ``both`` is names and wanted."""
    names, wanted = both
    arrays, kept, arriving = given
    return _backward(plan, options, names, arrays, kept, arriving, wanted)


def _gradients_backward(
    plan: Plan, options: Options, both: tuple[Names, Names], given: Any, d: Arrays
) -> Any:
    names, wanted = both
    arrays, kept, arriving = given
    real = {name: array for name, array in arrays.items() if _is_real(array)}

    def first(real: Arrays, arriving: Arrays) -> Arrays:
        return _pull_back(plan, options, names, wanted, arrays | real, arriving)

    _, pull_back = jax.vjp(first, real, arriving)
    d_real, d_arriving = pull_back(d)
    nothing = jax.tree.map(lambda _: None, kept)
    return (({name: d_real.get(name) for name in arrays}, nothing, d_arriving),)


_gradients.defvjp(lambda *call: (_gradients(*call), call[3]), _gradients_backward)


def _pull_back(
    plan: Plan, options: Options, names: Names, wanted: Names, arrays: Arrays, arriving: Arrays
) -> Arrays:
    """The gradients of the wanted arrays, step by step."""

    def of_wanted(some: Arrays) -> Results:
        return _composite(plan, options, names, arrays | some)

    results, pull_back = jax.vjp(of_wanted, {name: arrays[name] for name in wanted})
    keys = _keys(plan, names)
    flat, tree = jax.tree.flatten(results)
    d = [arriving.get(key, jnp.zeros_like(one)) for key, one in zip(keys, flat, strict=True)]
    (gradients,) = pull_back(jax.tree.unflatten(tree, d))
    return gradients


def _keys(plan: Plan, names: Sequence[str]) -> list[str]:
    """The names of results, in order."""
    return ["output", *(f"final {name}" for name in plan.cell.state_names), *names]


def _named(plan: Plan, names: Names, d: Results) -> Arrays:
    """The gradients of results by name, without those that are known to be zero."""
    flat = jax.tree.leaves(d, is_leaf=lambda leaf: isinstance(leaf, SymbolicZero))
    pairs = zip(_keys(plan, names), flat, strict=True)
    return {name: one for name, one in pairs if not isinstance(one, SymbolicZero)}


def _is_real(array: Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.floating))
