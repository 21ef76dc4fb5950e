"""A pass of a layer on several devices: each runs the rows of the batch that it has.

XLA partitions what ``jit`` compiles for several devices, as by ``NamedSharding``. It knows how to
cut its own operations, but no foreign functions: their arrays it gathers, and every device runs the
whole call. So a pass says here how it may be cut: arrays that have rows along these, where every
device has as many; all else is whole on every device, and gradients of it are sums over devices.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

Array = Any
Flat = list[Array]
Axes = Sequence[int | None]  # of rows, in each of several arrays; None for what all rows share


class Cut(NamedTuple):
    """The axes along which a pass may be cut.

    Attributes:
        arguments, results: their axes of rows. A result without rows is a sum over all rows.
        like: for each result, the number of the argument whose gradient it is, or None.
        seed: the number of the argument that seeds random masks, or None.
    """

    arguments: Axes
    results: Axes
    like: Sequence[int | None]
    seed: int | None


def on_devices(kernels: Callable[..., Flat], cut: Cut, flat: Sequence[Array]) -> Flat:
    """Puts a pass into a program for several devices.

    The program does not say what the pass is, as only ``partition`` knows it. So it gets a digest
    of the pass, an argument more: JAX keeps programs on disk by their text.
    """
    # The inner ``jit`` has the constants of the pass, which ``custom_partitioning`` refuses.
    run = custom_partitioning(jax.jit(lambda *flat: kernels(*flat[:-1])))
    text = jax.jit(lambda *flat: kernels(*flat)).lower(*map(_shape, flat)).as_text()
    digest = jnp.asarray(np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint32))
    cut = cut._replace(arguments=[*cut.arguments, None])

    def shardings(given: Sequence[Any], made: Sequence[Any]) -> tuple[Any, Flat, Flat]:
        """The axes of the mesh along which rows are sharded, and what this means for all arrays."""
        pairs = [*zip(given, cut.arguments, strict=True), *zip(made, cut.results, strict=False)]
        mesh = next(a.sharding.mesh for a, _ in pairs if a.sharding is not None)
        names = next(filter(None, (_rows(*pair) for pair in pairs)), ())
        if not _even(kernels, cut, given[:-1], math.prod(mesh.shape[name] for name in names)):
            names = ()

        def sharding(axis: int | None) -> NamedSharding:
            spec = [] if axis is None or not names else [*[None] * axis, names]
            return NamedSharding(mesh, PartitionSpec(*spec))

        return names, [*map(sharding, cut.arguments)], [*map(sharding, cut.results)]

    def partition(mesh: Any, given: Any, made: Any) -> tuple[Any, Any, Any, Any]:
        names, of_given, of_made = shardings(given, made)

        def part(*flat: Array) -> Flat:
            if names and cut.seed is not None:
                flat = _numbered(cut, cut.seed, flat, jax.lax.axis_index(names))
            return [
                jax.lax.psum(one, names) if names and axis is None else one
                for one, axis in zip(kernels(*flat[:-1]), cut.results, strict=True)
            ]

        return of_made[0].mesh, part, of_made, tuple(of_given)

    def of_results(mesh: Any, given: Any, made: Any) -> Flat:
        _, _, of_made = shardings(given, [])
        return [
            one if like is None or axis is not None else given[like].sharding or one
            for one, axis, like in zip(of_made, cut.results, cut.like, strict=True)
        ]

    rule: dict[str, Any] = {"infer_sharding_from_operands": of_results}
    if "sharding_rule" in signature(run.def_partition).parameters:
        both = (*flat, digest), jax.eval_shape(kernels, *flat)
        rule["sharding_rule"] = _factors(cut, *([len(one.shape) for one in many] for many in both))
    run.def_partition(partition, **rule)
    return run(*flat, digest)


def _shape(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _rows(array: Any, axis: int | None) -> tuple[str, ...]:
    """The axes of the mesh along which the rows of an array are sharded."""
    spec = () if array.sharding is None else array.sharding.spec  # None while XLA does not know
    names = None if axis is None or axis >= len(spec) else spec[axis]
    return (names,) if isinstance(names, str) else tuple(names or ())


def _numbered(cut: Cut, seed: int, flat: Sequence[Array], index: Array) -> tuple[Array, ...]:
    """The arguments of part ``index``, whose seed has a third number: the first of its rows. So a
    row has the same random numbers on any number of devices.
    """
    rows = next(
        a.shape[axis] for a, axis in zip(flat, cut.arguments, strict=True) if axis is not None
    )
    arguments = list(flat)
    arguments[seed] = jnp.append(arguments[seed], (index * rows).astype(arguments[seed].dtype))
    return tuple(arguments)


def _even(kernels: Callable[..., Flat], cut: Cut, inputs: Sequence[Any], count: int) -> bool:
    """Whether the pass of each of ``count`` equal parts of the rows makes its part of the results.

    It does not where the rows cannot be divided, or where chunks of time, on whose length the
    segments of a checkpoint depend, are others for fewer rows.
    """

    def parts(arrays: Sequence[Any], axes: Axes) -> list[Any]:
        cut_shapes = []
        for array, axis in zip(arrays, axes, strict=True):
            shape = list(array.shape)
            if axis is not None:
                shape[axis] /= count
            cut_shapes.append((tuple(shape), array.dtype))
        return cut_shapes

    shapes = parts(inputs, cut.arguments[:-1])
    if any(size != int(size) for shape, _ in shapes for size in shape):
        return False
    small = [jax.ShapeDtypeStruct(tuple(map(int, shape)), dtype) for shape, dtype in shapes]
    right = parts(jax.eval_shape(kernels, *map(_shape, inputs)), cut.results)
    return [(a.shape, a.dtype) for a in jax.eval_shape(kernels, *small)] == right


def _factors(cut: Cut, ranks: Sequence[int], made: Sequence[int]) -> str:
    """Shardy's rule, in which axes of one name are sharded alike.

    Args:
        ranks, made: the ranks of arguments and results.
    """
    numbers = itertools.count()

    def named(rank: int, axis: int | None) -> list[str]:
        return ["rows" if i == axis else f"a{next(numbers)}" for i in range(rank)]

    arguments = [*map(named, ranks, cut.arguments)]
    results = [
        named(rank, axis) if like is None else arguments[like]
        for rank, axis, like in zip(made, cut.results, cut.like, strict=True)
    ]
    return " -> ".join(", ".join(map(" ".join, many)) for many in (arguments, results))
