"""Layers on a CUDA card for JAX: the passes of ``layer/gpu.py`` in JAX's graphs.

XLA plays the launches of a pass by a foreign function, see ``engines/gpu/xla.py``. The products
that are parallel in time are XLA's, outside of it: the projection of x before a pass, the gradients
of x and of weights after it.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anycell import cells
from anycell.engines.gpu import build, capacity, launch, xla
from anycell.engines.gpu.capacity import Device
from anycell.jax.composite import composite
from anycell.jax.framework import Buffer, Jax
from anycell.lang.cell import Cell
from anycell.layer import Kept, gpu
from anycell.layer.arguments import Factors
from anycell.layer.foreign import Seed
from anycell.layer.framework import DeviceFramework
from anycell.layer.launches import SEED, DeviceRecipe, Launches, gave_up
from anycell.layer.signature import ENDS, Shape
from anycell.layer.weight_gradients import WeightGradients, bias_gradients
from anycell.plan import Layer, Options, Plan, no_kernel_on_gpu
from anycell.plan import plan as make_plan

Array = Any
PLATFORM = "CUDA"  # as XLA calls it
DOUBTFUL = 0.05  # an error of results near 1 that no rounding to TF32 explains


class Unfit(Exception):
    """No recipe of launches runs a pass here: the device refuses the kernels of tiers 1 and 2."""


class JaxDevice(DeviceFramework, Jax):
    """JAX's arrays of one dtype on cards, of which the first stands for all."""

    multiplies = False
    patience = 10_000_000_000
    ordinal = 0

    @functools.cached_property
    def limits(self) -> Device | None:
        return launch.limits(self.ordinal)

    @functools.cached_property
    def trouble(self) -> Any:
        return launch.shared_word()

    def tf32(self, cell: Cell) -> bool:
        """Whether JAX's own matmuls may round float32 to TF32, as they do by default."""
        config: Any = jax.config
        precision = config.jax_default_matmul_precision
        return self.dtype == np.float32 and precision not in ("float32", "highest")

    def pointer(self, array: Any, /) -> int:
        """The address of ``trouble``; that of others is not known, but aligned."""
        return ctypes.addressof(array) if isinstance(array, ctypes.c_int32) else 0

    def empty(self, shape: Shape, wide: bool = False) -> Any:
        raise AssertionError("XLA allocates")

    def template(self, shape: Shape, wide: bool = False) -> Any:
        return jax.ShapeDtypeStruct(shape, (self.wide if wide else self).dtype)

    def numbers(self, values: Sequence[float]) -> Array:
        return np.array(values, np.float32)

    def part(self, array: Array, shape: Shape, strides: Shape, offset: int) -> Array:
        size = int(np.prod(shape))
        return array.reshape(-1)[offset : offset + size].reshape(shape)

    def trace(self, recipe: Any, given: Any, options: Options) -> list[Array]:
        """Puts a pass into the graph; see ``Framework``."""
        if len(recipe.parts) > 1 or not isinstance(recipe.parts[0], Launches):
            raise Unfit
        words = options.seed.words if isinstance(options.seed, Seed) else None
        operands = [words if name == SEED else given[name] for name in recipe.names]
        operands += recipe.constants
        memory = jax.ShapeDtypeStruct((recipe.bytes,), np.uint8)
        call = jax.ffi.ffi_call(_target(not recipe.waits), [*recipe.templates, memory])
        return [*operands, *call(*operands, record=np.int64(_record(recipe).address))]


@functools.cache
def _target(captured: bool) -> str:
    """The name of the foreign function: another one in each process, because a program has the
    addresses of records. XLA may capture it where no programs wait for one another.
    """
    name = f"anycell_gpu_{secrets.token_hex(8)}"
    handler = jax.ffi.pycapsule(ctypes.c_void_p(xla.handler(captured)))
    jax.ffi.register_ffi_target(name, handler, platform=PLATFORM)
    return name


@functools.cache
def _record(recipe: DeviceRecipe) -> xla.Record:
    """Describes a pass for the foreign function, for as long as the process lives."""
    (played,) = recipe.parts
    return xla.Record(played.tables, recipe.told, gave_up(recipe.host))  # type: ignore[union-attr]


def reason(plan: Plan, batch: int = capacity.BATCH) -> str | None:
    """Why no kernels of the GPU engine run a plan for a batch; None if they do."""
    why = build.unusable() or launch.missing() or no_kernel_on_gpu(plan.cell)
    if why is not None:
        return why
    host = JaxDevice.of(plan.dtype)
    for backward in (False, True):
        best, *_ = capacity.choices(
            plan, host.limits, backward, host.tier, batch, host.tf32(plan.cell)
        )
        if best.tier == 3:
            return f"one step per launch would be as slow as lax.scan: {best.reason}"
        if why := doubt(best.tier):
            return why
    return None


@functools.cache
def doubt(tier: int) -> str | None:
    """Why the kernels of a tier are not trusted in this process; None if a small layer has the
    results and the gradients of ``lax.scan``.
    """
    rng, names = np.random.default_rng(0), ("x", "weight_ih", "weight_hh", "bias_hh")
    shapes = (4, 3, 5), (64, 5), (64, 16), (64,)
    given = {n: rng.normal(size=s).astype("f") for n, s in zip(names, shapes, strict=True)}
    one = make_plan(cells.LSTM, 16, engine="gpu")
    host = copy.copy(JaxDevice.of(one.dtype))
    host.tier, options = tier, Options()
    layer = Layer(cells.LSTM, (("H", 16),), options, one.dtype, names, plan=one)

    def by_kernels(arrays: dict[str, Array]) -> Any:
        output, final, kept = forward(host, one, arrays, options, True)
        assert kept is not None
        d = backward(host, one, arrays, options, kept, output, [None, None], names)
        return output, tuple(final), d

    def by_scan(arrays: dict[str, Array]) -> Any:
        (output, final, _), pull_back = jax.vjp(lambda some: composite(layer, some), arrays)
        (d,) = pull_back((output, tuple(map(jnp.zeros_like, final)), ()))
        return output, final, d

    try:
        with jax.ensure_compile_time_eval():
            found, right = (jax.tree.leaves(jax.jit(f)(given)) for f in (by_kernels, by_scan))
        pairs = zip(found, right, strict=True)
        apart = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)
    except Exception as error:
        return f"the kernels of tier {tier} failed at a small layer here: {error}"
    if apart < DOUBTFUL:
        return None
    return f"the kernels of tier {tier} computed a small layer wrongly here, by {apart:.2g}"


def forward(
    host: JaxDevice, plan: Plan, arrays: Mapping[str, Array], options: Options, keep: bool
) -> tuple[Array, list[Array], Kept | None]:
    """Runs a layer: outputs, final states, and what the backward pass reads."""
    given = _without_weight_ih(arrays)
    if len(given) < len(arrays):
        for end in ENDS[: len(options.reverse)]:
            product = _product(arrays["x"], arrays[f"weight_ih{end}"].T)
            given[f"x{end}"] = product.astype(host.dtype)
    return gpu.forward(host, plan, given, _drawn(options), keep=keep)


def backward(
    host: JaxDevice,
    plan: Plan,
    arrays: Mapping[str, Array],
    options: Options,
    kept: Kept,
    d_output: Array | None,
    d_final: Sequence[Array | None],
    wanted: Sequence[str],
) -> dict[str, Array]:
    """The gradients of a layer's arrays, from what ``forward`` kept."""
    x, ends = arrays["x"], ENDS[: len(options.reverse)]
    gates = jax.ShapeDtypeStruct((*x.shape[:2], plan.gates_width), x.dtype)  # which none reads
    given = _without_weight_ih(arrays) | {f"x{end}": gates for end in ends}
    named = gpu.backward(host, plan, given, _drawn(options), kept, d_output, d_final, wanted=["x"])
    inputs = []
    for d, end in enumerate(ends):
        w = {n: arrays[n + end] for n in plan.cell.learned if n + end in arrays}
        dg = named[f"x{end}"]
        factors = {n.removesuffix(end): a for n, a in named.items() if n.endswith(end)}
        hidden = kept.hidden[2 * options.reverse[d] :][: x.shape[0]]
        size = hidden.shape[-1] // len(ends)
        found = _of_weights(
            plan, w, arrays.get("mask"), x, dg, hidden[..., d * size :][..., :size], factors
        )
        named |= {name + end: gradient for name, gradient in found.items()}
        inputs.append(_product(dg, w["weight_ih"]) if "weight_ih" in w else dg)
    named["x"] = sum(inputs[1:], inputs[0])
    return {name: named[name].astype(arrays[name].dtype) for name in wanted}


def _without_weight_ih(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name: array for name, array in arrays.items() if not name.startswith("weight_ih")}


def _of_weights(
    plan: Plan, w: Mapping[str, Array], mask: Array | None, x: Array, dg: Array, hidden: Array,
    factors: Mapping[str, Array],
) -> dict[str, Array]:  # fmt: skip
    """The gradients of weights and biases of a direction, from the factors of the pass."""
    sums = _Gradients(plan, {**w}, True, fresh=True)
    if mask is not None:  # what lies under a mask may be NaN
        x = jnp.where(mask.astype(bool)[..., None], x, 0)

    def rows(array: Array | None) -> Any:
        return None if array is None else array.reshape(-1, array.shape[-1])

    named = [
        Factors(rows(factors.get(f"d_outputs {l.name}")), rows(factors.get(f"operand {l.name}")))
        for l in plan.cell.linears
    ]
    sums.add(rows(dg), rows(x), rows(hidden), named)
    totals = bias_gradients(plan, sums.named, sums.totals, sums.vectors, sums.zeros, sums.zeros)
    return {name: Buffer.read(total) for name, total in totals.items()}


class _Gradients(WeightGradients):
    """Gradients of weights and biases in float32, by the products of XLA."""

    def zeros(self, shape: Shape) -> Buffer:
        return Buffer(np.zeros(shape, np.float32))

    def new(self, shape: Shape, overwritten: bool) -> Buffer:
        return self.zeros(shape)

    def multiply(self, d: Array, operand: Array, weight: Buffer, whole: bool) -> None:
        weight[:] = weight[:] + _product(d.T, operand)

    def add_blocks(self, d: Array, operand: Array, weight: Buffer, heads: int, first: int) -> None:
        d, operand = (a.reshape(a.shape[0], heads, -1) for a in (d, operand))
        blocks = jnp.einsum("nho,nhi->hoi", d, operand, preferred_element_type=np.float32)
        whole = jnp.asarray(weight[:]).reshape(heads, -1, weight.shape[-1])
        whole = whole.at[:, first : first + blocks.shape[1]].add(blocks)
        weight[:] = whole.reshape(weight.shape)

    def add_rows(self, d: Array, vector: Buffer) -> None:
        vector[:] = vector[:] + d.sum(0, dtype=np.float32)


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, preferred_element_type=np.float32)


def _drawn(options: Options) -> Options:
    """The options of a pass, whose random masks are drawn by the layer's number too."""
    seed = options.seed
    if isinstance(seed, Seed):
        stream = jnp.array([2 * options.stream], seed.words.dtype)
        seed = Seed.of(jnp.concatenate([seed.words[:2], stream]))
    return options._replace(seed=seed)
