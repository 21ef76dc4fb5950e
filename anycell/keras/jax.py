"""A layer on Keras's JAX backend: its steps as one compiled function."""

from __future__ import annotations

import functools
from typing import Any

import jax

from anycell.keras.call import Call, Inputs, Result
from anycell.keras.composite import composite


def run(call: Call, inputs: Inputs) -> Result:
    """Runs a layer as one ``lax.scan``, compiled once for a call and its shapes.

    Outside of ``jax.jit`` a scan is otherwise compiled anew each time.
    """
    names, linears = zip(*inputs.linears, strict=True) if inputs.linears else ((), ())
    return _run(call, names, inputs._replace(linears=linears))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(call: Call, names: tuple[str, ...], inputs: Any) -> Result:
    return composite(call, inputs._replace(linears=tuple(zip(names, inputs.linears, strict=True))))
