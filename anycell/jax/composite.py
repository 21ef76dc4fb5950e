"""A layer step by step: one step of the reference engine in ``lax.scan``, on any device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from anycell.engines import reference
from anycell.jax.framework import Seed
from anycell.lang.expr import Expr
from anycell.lang.philox import MULTIPLIERS, ROUNDS, WEYL
from anycell.layer.restarts import restarts
from anycell.layer.steps import directions
from anycell.plan import DTYPES, Layer

Array = Any
Arrays = Mapping[str, Array]
# Output ``[T, B, D * size]``, final states ``[D, B, size]``, and sequences of further states.
Results = tuple[Array, tuple[Array, ...], tuple[Array, ...]]


def composite(layer: Layer, arrays: Arrays) -> Results:
    """Runs a layer: with arrays of 16 bits in float32, narrowing the results again."""
    narrow = str(arrays["x"].dtype)
    if DTYPES.get(narrow, DTYPES["float32"]).mixed:
        wide = {n: a.astype(DTYPES[narrow].math.name) if a.dtype == narrow else a
                for n, a in arrays.items()}  # fmt: skip
        return jax.tree.map(lambda a: a.astype(narrow), composite(layer, wide))
    with jax.numpy_rank_promotion("allow"):
        return _run(layer, arrays)


def _run(layer: Layer, arrays: Arrays) -> Results:
    x, mask = arrays["x"], arrays.get("mask")
    if mask is not None:  # NaN under a mask must not reach a gradient
        x = jnp.where(mask[..., None], x, 0)
    runs = directions(layer, {**arrays, "x": x}, _linear)
    wanted = (layer.cell.state_names[0], *layer.sequences)
    sequences, finals = zip(*(_scan(run, wanted) for run in runs), strict=True)
    output, *others = (jnp.concatenate(parts, -1) for parts in zip(*sequences, strict=True))
    return output, tuple(map(jnp.stack, zip(*finals, strict=True))), tuple(others)


def _linear(x: Array, weight: Array, bias: Array | None) -> Array:
    return x @ weight.T if bias is None else x @ weight.T + bias


def _scan(run: reference.Recurrence, names: Sequence[str]) -> tuple[Any, Any]:
    """The sequences of these states, and the final states, of one direction."""
    options, reverse = run.layer.options, run.layer.options.reverse[run.direction]
    sequences = {"gates": run.gates_x, "mask": run.mask}
    if run.resets is not None:
        sequences["resets"] = restarts(run.resets, run.mask, reverse)
    forwards = options._replace(reverse=(False,) * len(options.reverse))
    layer = run.layer._replace(options=forwards)  # of one step
    steps = {name: array for name, array in sequences.items() if array is not None}

    def step(states: Any, now: Any) -> tuple[Any, Any]:
        t, parts = now
        one = _Step(
            layer, parts["gates"][None], run.weights, states, run.params, static=run.static,
            mask=parts["mask"][None] if "mask" in parts else None,
            resets=parts["resets"][None] if "resets" in parts else None,
            reset_state=run.reset_state, recurrent_mask=run.recurrent_mask,
            direction=run.direction,
        )  # fmt: skip
        one.time = t
        after, final = one.sequences(names)
        return final, tuple(values[0] for values in after)

    first, times = run.initial(run.state), jnp.arange(run.steps, dtype=jnp.uint32)
    final, after = lax.scan(step, first, (times, steps), reverse=reverse)
    return after, final


class _Step(reference.Recurrence):
    """One step, at a ``time`` that only the running program knows."""

    time: Array

    def _keep(self, node: Expr, t: int, rate: Array) -> Array:
        options = self.layer.options
        if not options.training:
            return rate
        index, per = node.attrs
        seed, stream = options.seed, 2 * options.stream + self.direction
        assert isinstance(seed, Seed)
        draw = uniform(
            seed.words, stream, index, self.time if per == "step" else 0, self.rows,
            self.size[self.cell.sizes[node]],
        )  # fmt: skip
        return self.xp.where(draw < rate.astype(jnp.float32), self.one, self.zero)


def uniform(seed: Array, stream: int, index: int, step: Any, rows: int, units: int) -> Array:
    """The numbers of ``lang.philox.uniform``, in operations of 32 bits.

    Args:
        seed: its low and its high word.
    """
    words = (jnp.arange(units)[None], jnp.arange(rows)[:, None], step, stream << 8 | index // 4)
    a, b, c, d = (jnp.broadcast_to(jnp.asarray(word, jnp.uint32), (rows, units)) for word in words)
    low, high = seed
    for number in range(ROUNDS):
        if number:
            low, high = low + jnp.uint32(WEYL[0]), high + jnp.uint32(WEYL[1])
        (high_a, low_a), (high_c, low_c) = _product(a, MULTIPLIERS[0]), _product(c, MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ low, low_c, high_a ^ d ^ high, low_a
    word = (a, b, c, d)[index % 4]
    return (word >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def _product(x: Array, factor: int) -> tuple[Array, Array]:
    """The high and the low words of a product, by halves of the factors."""
    half = jnp.uint32(0xFFFF)
    x0, x1 = x & half, x >> 16
    f0, f1 = jnp.uint32(factor & 0xFFFF), jnp.uint32(factor >> 16)
    middle = x1 * f0 + (x0 * f0 >> 16)
    high = x1 * f1 + (middle >> 16) + ((x0 * f1 + (middle & half)) >> 16)
    return high, x * jnp.uint32(factor)
