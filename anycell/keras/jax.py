"""A layer on Keras's JAX backend: the kernels of ``anycell.jax``, or its steps by ``lax.scan``."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from anycell.engines import cpu
from anycell.jax import fused
from anycell.jax.primitive import planned
from anycell.keras.call import Arrays, Result, Tensor, dequantized, lowered
from anycell.keras.composite import composite
from anycell.keras.rule import asked
from anycell.layer.rounding import quantized
from anycell.plan import Call


def refusal(x: Tensor | None = None) -> str | None:
    """Returns why the kernels cannot be called here and now, or None.

    Args:
        x: the input, if there is one yet.
    """
    why = asked()
    if why is not None:
        return why
    if not hasattr(jax, "ffi"):
        return "JAX calls foreign functions, such as the kernels, since 0.5"
    if x is not None and not all(isinstance(size, int) for size in x.shape):
        return f"kernels need the sizes of {x.shape}, which are symbols"
    return None


def run(call: Call, arrays: Arrays) -> Result:
    """Runs a layer on the fused kernels; outside of ``jax.jit``, compiled once for each shape."""
    options = call.options if call.outputs else call.options.unread()
    return _run(
        call._replace(options=options._replace(threads=cpu.threads.current())), dict(arrays)
    )


@functools.partial(jax.jit, static_argnums=0)
def _run(call: Call, arrays: Arrays) -> Result:
    given = dict(dequantized(arrays) if quantized(arrays) else arrays)
    drawn = given.pop("seed", None)
    call, below = lowered(call, given)
    if drawn is not None:
        below["seed"] = _words(drawn)
    plan = planned(call.cell, call.hidden_size, below["x"].dtype, "cpu", dict(call.sizes))
    outputs, final, _ = fused.run(plan, call.options, (), below)
    return outputs if call.outputs else None, tuple(state[0] for state in final)


def _words(drawn: Tensor) -> Tensor:
    """The seed of ``lowered`` as two words of 32 bits, the low one first."""
    first, second = drawn.astype(jnp.uint32)
    low = first + (second << 31)
    return jnp.stack([low, (second >> 1) + (low < first)])


def scan(call: Call, arrays: Arrays) -> Result:
    """Runs a layer as one ``lax.scan``, compiled once for a call and its shapes.

    Without this, a scan outside of ``jax.jit`` would be compiled again each time.
    """
    return _scan(call, dict(arrays))


@functools.partial(jax.jit, static_argnums=0)
def _scan(call: Call, arrays: Arrays) -> Result:
    return composite(call, arrays)
