"""A layer step by step: one step of the reference engine in ``lax.scan``, on any device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from anycell.engines.reference import Recurrence
from anycell.lang.philox import philox4x32
from anycell.layer import steps
from anycell.layer.restarts import restarts
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
    options, reverse = run.layer.options, run.layer.options.reverse[run.direction]
    sequences = {"gates_x": run.gates_x, "mask": run.mask}
    if run.resets is not None:
        sequences["resets"] = restarts(run.resets, run.mask, reverse)
    forwards = options._replace(reverse=(False,) * len(options.reverse))
    layer = run.layer._replace(options=forwards)  # of one step
    over_time = {name: array for name, array in sequences.items() if array is not None}

    def step(states: Any, now: Any) -> tuple[Any, Any]:
        t, parts = now
        recurrence = replace(
            run, layer=layer, state=states, **{name: part[None] for name, part in parts.items()},
            begin=t, uniform=lambda seed, *of_mask: uniform(seed.words, *of_mask),
        )  # fmt: skip
        after, final = recurrence.sequences(names)
        return final, tuple(values[0] for values in after)

    first, times = run.initial(run.state), jnp.arange(run.steps, dtype=jnp.uint32)
    final, after = lax.scan(step, first, (times, over_time), reverse=reverse)
    return after, final


def uniform(seed: Array, stream: int, index: int, step: Any, rows: int, units: int) -> Array:
    """The numbers of ``lang.philox.uniform``, at a step that only the running program knows.

    Args:
        seed: its low and its high word.
    """
    words = (jnp.arange(units)[None], jnp.arange(rows)[:, None], step, stream << 8 | index // 4)
    counter = [jnp.broadcast_to(jnp.asarray(word, jnp.uint32), (rows, units)) for word in words]
    word = philox4x32(counter, seed)[index % 4]
    return (word >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
