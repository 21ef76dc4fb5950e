"""``recurrence``: one direction of one layer of any cell, on arrays that the user owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from anycell.engines import cpu
from anycell.jax import device, fused, streaming
from anycell.jax.framework import Jax, as_arrays, check_key, known
from anycell.lang.cell import Cell
from anycell.layer import checks, primitive
from anycell.layer.checks import choice, refuse
from anycell.layer.layers import Stack
from anycell.layer.primitive import check_call
from anycell.plan import Layer, Plan, RecurrenceArguments, plan, takes
from anycell.plan.dtype import dtypes

if TYPE_CHECKING:
    from typing_extensions import Unpack

Array = Any


@takes(RecurrenceArguments, about=primitive.__doc__)
def recurrence(
    cell: Cell,
    x: Array | None,
    weights: Mapping[str, Array | None],
    state: Sequence[Array | None] | Array | None = None,
    params: Mapping[str, Array] | None = None,
    **arguments: Unpack[RecurrenceArguments],
) -> tuple[Any, ...]:
    """Runs ``cell`` over a sequence: one direction of one layer, whose arrays are the user's.

    ``jit``, ``grad``, ``vmap`` and the other transformations of JAX work with it; ``shard_map``
    needs ``check_vma=False``. On the CPU a fused kernel runs it, within the compiled program and
    without Python.

    Args:
        {cell x weights state params}
        engine: "cpu", "gpu" (the kernels) or "reference" (``lax.scan``, on any device); None takes
            the kernels of JAX's default device, if there are any for the cell and dtype.
        {arguments}

    A ``seed`` may also be a key of ``jax.random``; in training, a cell that draws random masks
    needs one.

    Returns:
        {output final states}

    Kernels run float32, bfloat16, float16 and float64. Derivatives of any order run fused,
    also forwards (``jax.jvp``); with a ``recurrent_mask``, second ones, those forwards and its own
    gradient are computed step by step. Under ``jax.vmap``, elements become rows of the batch; where
    their weights or seeds differ, they run one after the other.

    Raises:
        TypeError, ValueError: with the argument, what was given, what is expected, and what to do.

    Example:
        >>> import jax.numpy as jnp
        >>> weights = {"weight_ih": jnp.ones((32, 3)), "weight_hh": jnp.ones((32, 8))}
        >>> output, (h, c) = recurrence(anycell.cells.LSTM, jnp.zeros((5, 2, 3)), weights)
        >>> output.shape, c.shape
        ((5, 2, 8), (2, 8))
    """
    key = arguments.pop("seed", None)  # which may be one of JAX
    call = check_call(
        Jax, recurrence, cell, x, weights, state, params, arguments, convert=as_arrays
    )
    if call.layer.options.training and cell.keeps:
        call.learned["seed"] = seed_words(cell, key)
    layer = planned(call.layer, call.x.dtype, call.layer.engine)
    return call.results(Stack(Jax, run, layer, [call.learned]), arguments)


def run(layer: Layer, arrays: Mapping[str, Any]) -> Any:
    """Runs a layer; see ``fused.run``."""
    layer = layer._replace(options=layer.options._replace(threads=cpu.threads.current()))
    return (streaming if "packed" in arrays else fused).run(layer, dict(arrays))


def planned(layer: Layer, dtype: Any, engine: str | None = None) -> Layer:
    """The layer with its plan, and with it the engine that runs the layer."""
    choice("engine", engine, None, "cpu", "gpu", "reference")
    name, sizes, platform = jnp.dtype(dtype).name, dict(layer.sizes), jax.default_backend()
    if engine == "gpu" or (engine is None and platform == "gpu"):
        chosen = on_card(layer, name)
        if engine == "gpu" and chosen.engine != "gpu":
            refuse("engine", "'gpu'", f"None or 'reference': {chosen.reason}", "Leave it out.")
        return layer._replace(dtype=chosen.dtype, plan=chosen)
    if engine is None and (platform != "cpu" or name not in dtypes("cpu")):
        engine = "reference"
    if name not in dtypes("cpu"):
        if engine == "cpu" or not jnp.issubdtype(dtype, jnp.floating):
            expected = f"one of {', '.join(dtypes('cpu'))}"
            refuse("x", f"dtype {name}", expected, "Convert it.", TypeError)
        name = "float32"
    return layer._replace(dtype=name, plan=plan(layer.cell, sizes["H"], name, engine, sizes))


def on_card(layer: Layer, dtype: str) -> Plan:
    """The plan of a layer on a card: of the GPU engine, or else with the reason why of none."""
    sizes = dict(layer.sizes)
    known = dtype if dtype in dtypes("gpu") else "float32"
    plain = plan(layer.cell, sizes["H"], known, sizes=sizes)
    if plain.engine == "reference":
        return plain
    chosen = plan(layer.cell, sizes["H"], known, "gpu", sizes)
    why = device.reason(chosen) if known == dtype else f"no fused kernel for {dtype} on a card"
    if why is None:
        return chosen
    return replace(plan(layer.cell, sizes["H"], known, "reference", sizes), reason=why)


def seed_words(cell: Cell, seed: Any) -> Array:
    """The seed of random masks as two words of 32 bits, the low word first.

    Args:
        seed: an int, also as an array; a key of ``jax.random``, or an array of uint32, such as old
            keys are.
    """
    expected = "an int from 0 to 2**64 - 1, or a key of jax.random"
    if seed is None:
        hint = f"In training cell {cell.name} draws masks."
        refuse("seed", "None", expected, hint)
    seed = as_arrays(seed)
    if isinstance(seed, jax.Array):
        number_of_jax = seed.shape == () and jnp.issubdtype(seed.dtype, jnp.integer)
        if not number_of_jax:
            key = check_key("seed", seed, expected)
            typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
            return (jax.random.key_data(key) if typed else key)[-2:][::-1]
        if not known(seed):
            high = seed >> 32 if seed.dtype.itemsize == 8 else jnp.zeros_like(seed)
            return jnp.stack([seed.astype(jnp.uint32), high.astype(jnp.uint32)])
        seed = int(seed)
    number = checks.seed(seed)
    return jnp.array([number & 0xFFFFFFFF, number >> 32], jnp.uint32)
