"""``prepare`` and ``step``: one step at a time, on weights packed once, as two primitives of JAX.

    pack        the packed weights of a layer, an array of bytes
    stepping    the states after a step of a layer

Packed weights are a function of the parameters, so they lie beside them in a tree,
``layers.Prepared``. What no kernel runs, such as derivatives and other platforms, reads the
parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad
from jax.interpreters import batching as interpreter

from anycell.engines import cpu
from anycell.jax import fused, sharding
from anycell.jax.composite import Array
from anycell.jax.framework import Jax
from anycell.jax.fused import Arrays, Flat
from anycell.layer.checks import refuse
from anycell.layer.recipe import Draft, Recipe, recipe_of
from anycell.layer.signature import FLAGS, of_layer
from anycell.layer.steps import Results
from anycell.layer.stream import draft_packing, draft_step, projecting, steps, unpacked
from anycell.plan import Layer, Options

_BYTES: Any = Jax(np.dtype(np.uint8))


def pack(layer: Layer, layers: int, params: Mapping[str, Array]) -> tuple[Array, ...]:
    """Packs the weights of each layer, if a kernel steps in the parameters' dtype."""
    if not steps(layer.plan):
        return ()
    packed = []
    for k in range(layers):
        learned = of_layer(layer.cell, params, k, 1)
        options = Options(threads=cpu.threads.current())
        this = layer._replace(options=options, arrays=tuple(learned))
        packed += _pack.bind(*learned.values(), layer=this)
    return tuple(packed)


def run(layer: Layer, arrays: Arrays) -> Results:
    """Runs a step of a layer with weights that are ``packed``, see ``fused.run``."""
    if layer.plan.engine != "cpu" or any(not isinstance(n, int) for n in arrays["x"].shape):
        unpacked = {name: array for name, array in arrays.items() if name != "packed"}
        return fused.run(layer, unpacked)
    states = _stepping.bind(*arrays.values(), layer=layer._replace(arrays=tuple(arrays)))
    return states[0], tuple(states), ()


# ---- the primitives ------------------------------------------------------------------------------
def _run_pack(*flat: Array, layer: Layer) -> Flat:
    arrays, threads = layer.named(flat), layer.options.threads
    key = "packing", layer.plan, threads, _BYTES.layout(arrays)

    def draft() -> Recipe:
        inputs = arrays["weight_ih"].shape[1]
        of_bytes = Draft(_BYTES, arrays, layer.options)
        return draft_packing(of_bytes, projecting(layer.plan, inputs), inputs)

    recipe = recipe_of(key, draft)
    return list(recipe.run([arrays[name] for name in recipe.names], layer.options))


def _pack_elsewhere(*flat: Array, layer: Layer) -> Flat:
    """Bytes that nothing reads."""
    (packed,) = jax.eval_shape(lambda *given: _run_pack(*given, layer=layer), *flat)
    return [jnp.zeros(packed.shape, packed.dtype)]


def _run_step(*flat: Array, layer: Layer) -> Flat:
    arrays = unpacked(layer.plan, layer.named(flat))
    host, threads = Jax.of(layer.plan.dtype), layer.options.threads
    flags = tuple(name for name in FLAGS if name in arrays)
    key = "stepping", layer.plan, threads, host.layout(arrays), flags
    recipe = recipe_of(key, lambda: draft_step(host, layer.plan, arrays, threads))
    return list(recipe.run([arrays[name] for name in recipe.names], layer.options))


def _step_by_scan(*flat: Array, layer: Layer) -> Flat:
    _, *states = fused.layer_by_scan(*flat, layer=layer)
    return states


def _whole(flat: Flat, made: Flat, layer: Layer) -> sharding.Cut:
    """Every device packs all weights."""
    return sharding.Cut([None] * len(flat), [None] * len(made), [None] * len(made), None)


_pack = fused.primitive_of("pack", _run_pack, _pack_elsewhere, _whole)
_stepping = fused.primitive_of("stepping", _run_step, _step_by_scan)
_of_step = fused.derivative_as(_stepping, _step_by_scan)


def _pack_derivative(flat: Any, tangents: Any, *, layer: Layer) -> NoReturn:
    hint = "Pass the parameters themselves to step, or call the layer on the sequence."
    refuse("params", "prepared weights", "parameters, to differentiate by them", hint, TypeError)


def _step_derivative(flat: Any, tangents: Any, *, layer: Layer) -> tuple[Flat, Flat]:
    """Differentiates by input and states alone."""
    learned = {"packed", *layer.cell.learned}
    if learned.intersection(layer.arrays[i] for i in fused.moved_of(tangents)):
        _pack_derivative(flat, tangents, layer=layer)
    return _of_step(flat, tangents, layer=layer)


ad.primitive_jvps[_pack] = _pack_derivative
ad.primitive_jvps[_stepping] = _step_derivative
for _primitive in (_pack, _stepping):
    interpreter.primitive_batchers[_primitive] = fused.rule_of_vmap(_primitive)
