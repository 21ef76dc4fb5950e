"""Layers on a CUDA card for JAX: the passes of ``layer/card.py`` in JAX's graphs."""

from __future__ import annotations

import ctypes
import functools
import secrets
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anycell import cells
from anycell.engines.gpu import xla
from anycell.jax.composite import composite
from anycell.jax.framework import Buffer, Jax
from anycell.lang.cell import Cell
from anycell.layer import card
from anycell.layer.card import TracedDevice, played, record
from anycell.layer.foreign import Seed
from anycell.layer.launches import SEED, DeviceRecipe
from anycell.layer.signature import Shape
from anycell.plan import Layer, Options, Plan
from anycell.plan import plan as make_plan

Array = Any


class JaxDevice(TracedDevice, Jax):
    """JAX's arrays of one dtype on cards."""

    def tf32(self, cell: Cell) -> bool:
        """Whether JAX's own matmuls may round float32 to TF32, as they do by default."""
        config: Any = jax.config
        precision = config.jax_default_matmul_precision
        return self.dtype == np.float32 and precision not in ("float32", "highest")

    def template(self, shape: Shape, wide: bool = False) -> Any:
        return jax.ShapeDtypeStruct(shape, (self.wide if wide else self).dtype)

    def part(self, array: Array, shape: Shape, strides: Shape, offset: int) -> Array:
        size = int(np.prod(shape))
        return array.reshape(-1)[offset : offset + size].reshape(shape)

    def product(self, a: Array, b: Array) -> Array:
        return jnp.matmul(a, b, preferred_element_type=np.float32)

    def row_sum(self, array: Array) -> Array:
        return array.sum(0, dtype=np.float32)

    def add_blocks(self, d: Array, operand: Array, weight: Buffer, heads: int, first: int) -> None:
        d, operand = (a.reshape(a.shape[0], heads, -1) for a in (d, operand))
        blocks = jnp.einsum("nho,nhi->hoi", d, operand, preferred_element_type=np.float32)
        whole = jnp.asarray(weight[:]).reshape(heads, -1, weight.shape[-1])
        whole = whole.at[:, first : first + blocks.shape[1]].add(blocks)
        weight[:] = whole.reshape(weight.shape)

    def zeroed(self, x: Array, mask: Array) -> Array:
        return jnp.where(mask.astype(bool)[..., None], x, 0)

    def stand_in(self, x: Array, shape: Shape) -> Any:
        return jax.ShapeDtypeStruct(shape, x.dtype)

    def trace(self, recipe: Any, given: Any, options: Options) -> list[Array]:
        """Puts a pass into the graph; see ``Framework``."""
        played(recipe)  # refuses what JAX would trace in vain
        named = dict(given)
        if isinstance(options.seed, Seed):
            words = options.seed.words[:2]
            named[SEED] = jnp.append(words, np.array(2 * options.stream, words.dtype))
        operands = [*(named[name] for name in recipe.names), *recipe.constants]
        return [*operands, *_played(recipe)(*operands)]


def _played(recipe: DeviceRecipe, calls: int = 0, apart: tuple[bool, ...] = ()) -> Any:
    """The function of a recipe's arrays that plays it, see ``record``. Under ``vmap`` all elements
    are played at once.
    """
    axis, memory = (calls,) * bool(calls), jax.ShapeDtypeStruct((recipe.bytes,), np.uint8)
    made = [jax.ShapeDtypeStruct((*axis, *a.shape), a.dtype) for a in (*recipe.templates, memory)]

    @jax.custom_batching.custom_vmap
    def play(*operands: Array) -> Any:
        call = jax.ffi.ffi_call(_target(not recipe.waits), made)
        return call(*operands, record=np.int64(record(recipe, calls, apart).address))

    @play.def_vmap
    def every(size: int, apart: list[bool], *operands: Array) -> Any:
        return _played(recipe, size, tuple(apart))(*operands), [True] * len(made)

    return play


@functools.cache
def _target(captured: bool) -> str:
    """The name of the foreign function: another one in each process, because a program has the
    addresses of records. XLA may capture it where no programs wait for one another.
    """
    name = f"anycell_gpu_{secrets.token_hex(8)}"
    handler = jax.ffi.pycapsule(ctypes.c_void_p(xla.handler(captured)))
    jax.ffi.register_ffi_target(name, handler, platform=card.PLATFORM)
    return name


def reason(plan: Plan) -> str | None:
    """Why no kernels of the GPU engine run a plan; None if they do."""
    return card.reason(JaxDevice.of(plan.dtype), plan, doubt)


@functools.cache
def doubt(tier: int) -> str | None:
    """Why the kernels of a tier are not trusted in this process; None if a small layer has the
    results and the gradients of ``lax.scan``.
    """
    rng, names = np.random.default_rng(0), ("x", "weight_ih", "weight_hh", "bias_hh")
    shapes = (4, 3, 5), (64, 5), (64, 16), (64,)
    given = {n: rng.normal(size=s).astype("f") for n, s in zip(names, shapes, strict=True)}
    one, options = make_plan(cells.LSTM, 16, engine="gpu"), Options()
    host = JaxDevice.forced(one.dtype, tier)
    layer = Layer(cells.LSTM, (("H", 16),), options, one.dtype, names, plan=one)

    def by_kernels(arrays: dict[str, Array]) -> Any:
        output, final, kept = card.forward(host, one, arrays, options, True)
        assert kept is not None
        d = card.backward(host, one, arrays, options, kept, output, [None, None])
        return output, tuple(final), {name: Buffer.read(d[name]) for name in names}

    def by_scan(arrays: dict[str, Array]) -> Any:
        (output, final, _), pull_back = jax.vjp(lambda some: composite(layer, some), arrays)
        (d,) = pull_back((output, tuple(map(jnp.zeros_like, final)), ()))
        return output, final, d

    def results() -> Any:
        with jax.ensure_compile_time_eval():
            found, right = (jax.tree.leaves(jax.jit(f)(given)) for f in (by_kernels, by_scan))
        return zip(found, right, strict=True)

    return card.doubt_of(tier, results)
