"""A layer on Keras's JAX backend: its steps as one compiled function."""

from __future__ import annotations

import functools

import jax

from anycell.keras.call import Arrays, Result
from anycell.keras.composite import composite
from anycell.plan import Call


def run(call: Call, arrays: Arrays) -> Result:
    """Runs a layer as one ``lax.scan``, compiled once for a call and its shapes.

    Without this, a scan outside of ``jax.jit`` would be compiled again each time.
    """
    return _run(call, dict(arrays))


@functools.partial(jax.jit, static_argnums=0)
def _run(call: Call, arrays: Arrays) -> Result:
    return composite(call, arrays)
