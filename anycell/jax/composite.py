"""A layer step by step: one step of the reference engine in ``lax.scan``, on any device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from anycell.engines.reference import Recurrence
from anycell.lang.philox import philox4x32
from anycell.layer import steps
from anycell.layer.steps import Results
from anycell.plan import DTYPES, Layer

Array = Any
Arrays = Mapping[str, Array]


def composite(layer: Layer, arrays: Arrays) -> Results:
    """Runs a layer: with arrays of 16 bits in float32, narrowing the results again."""
    narrow = str(arrays["x"].dtype)
    if DTYPES.get(narrow, DTYPES["float32"]).mixed:
        wide = {n: a.astype(DTYPES[narrow].math.name) if a.dtype == narrow else a
                for n, a in arrays.items()}  # fmt: skip
        return jax.tree.map(lambda a: a.astype(narrow), composite(layer, wide))
    with jax.numpy_rank_promotion("allow"):
        return steps.run(layer, steps.directions(layer, arrays), _scan)


def _scan(run: Recurrence, names: Sequence[str]) -> tuple[Any, Any]:
    """The sequences of these states, and the final states, of one direction."""
    step, first, sequences = steps.one_step(
        run, names, uniform=lambda seed, *of_mask: uniform(seed.words, *of_mask)
    )
    times = jnp.arange(run.steps, dtype=jnp.uint32)
    final, after = lax.scan(
        lambda entering, now: step(entering, now[1], now[0]), first, (times, sequences),
        reverse=run.layer.options.reverse[run.direction],
    )  # fmt: skip
    return after, final[: len(run.cell.states)]


def uniform(seed: Array, stream: int, index: int, step: Any, rows: int, units: int) -> Array:
    """The numbers of ``lang.philox.uniform``, at a step that only the running program knows.

    Args:
        seed: its low and its high word.
    """
    words = (jnp.arange(units)[None], jnp.arange(rows)[:, None], step, stream << 8 | index // 4)
    counter = [jnp.broadcast_to(jnp.asarray(word, jnp.uint32), (rows, units)) for word in words]
    word = philox4x32(counter, seed)[index % 4]
    return (word >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
