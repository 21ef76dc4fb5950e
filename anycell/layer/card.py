"""Passes of ``layer/gpu.py`` in the programs of frameworks that compile with XLA.

XLA plays the launches of a pass by a foreign function, see ``engines/gpu/xla.py``. The products
that are parallel in time are XLA's, outside of it: the projection of x before a pass, the gradients
of x and of weights after it.
"""
# mypy: disable-error-code="empty-body"

from __future__ import annotations

import copy
import ctypes
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from anycell.engines.gpu import build, capacity, launch, xla
from anycell.engines.gpu.capacity import Device
from anycell.engines.gpu.player import Tables
from anycell.layer import gpu
from anycell.layer.arguments import Array, Factors, Kept
from anycell.layer.foreign import TracedFramework
from anycell.layer.framework import DeviceFramework
from anycell.layer.launches import DeviceRecipe, Launches, gave_up
from anycell.layer.signature import ENDS, Shape
from anycell.layer.twins import of_calls
from anycell.layer.weight_gradients import WeightGradients, bias_gradients
from anycell.plan import Options, Plan, no_kernel_on_gpu

if TYPE_CHECKING:
    from typing_extensions import Self

PLATFORM = "CUDA"  # as XLA calls it
ANY = 1 << 30  # rows
FACTORS = "d_outputs", "operand"  # of the gradients of weights
DOUBTFUL = 0.05  # an error of results near 1 that no rounding to TF32 explains


class Unfit(Exception):
    """No recipe of launches runs a pass here: the device refuses the kernels of tiers 1 and 2."""


class TracedDevice(DeviceFramework, TracedFramework):
    """The arrays of one dtype of a program that is traced, on cards: the first stands for all."""

    multiplies = False
    patience = 10_000_000_000
    ordinal = 0

    @classmethod
    @functools.cache
    def forced(cls, dtype: str, tier: int) -> Self:
        """The framework for a layer of a dtype, whose kernels are of that tier."""
        host = copy.copy(cls.of(dtype))
        host.tier = tier
        return host

    @functools.cached_property
    def limits(self) -> Device | None:
        return launch.limits(self.ordinal)

    @functools.cached_property
    def trouble(self) -> Any:
        return launch.shared_word()

    def pointer(self, array: Any, /) -> int:
        """The address of ``trouble``; that of others is not known, but aligned."""
        return ctypes.addressof(array) if isinstance(array, ctypes.c_int32) else 0

    def empty(self, shape: Shape, wide: bool = False) -> Any:
        raise AssertionError("XLA allocates")

    def numbers(self, values: Sequence[float]) -> Array:
        return np.array(values, np.float32)

    # -- by the framework, outside of a pass -------------------------------------------------------

    def product(self, a: Array, b: Array) -> Array:
        """``a @ b``, whose sums are float32."""

    def row_sum(self, array: Array) -> Array:
        """The sum of the rows of a matrix, in float32."""

    def add_blocks(self, d: Array, operand: Array, weight: Array, heads: int, first: int) -> None:
        """See ``WeightGradients.add_blocks``."""

    def zeroed(self, x: Array, mask: Array) -> Array:
        """x with zeros where the mask is 0."""

    def stand_in(self, x: Array, shape: Shape) -> Array:
        """An array in the place of x, of another shape, whose numbers no kernel reads."""


def played(recipe: DeviceRecipe) -> Tables:
    """The tables of the launches that are a pass.

    Raises:
        Unfit: for a pass that is not launches alone.
    """
    if not all(isinstance(part, Launches) for part in recipe.parts):
        raise Unfit("one step per launch, with products between them")
    tables = [part.tables for part in recipe.parts if isinstance(part, Launches)]
    return tables[0] if tables else Tables((), (), recipe.host.ordinal, 0)


def _played_at_once(recipe: DeviceRecipe, calls: int, apart: Sequence[bool]) -> Tables:
    """The tables of the launches that are several calls of a pass."""
    spaced = *apart, *[True] * len(recipe.templates)
    spacing = [0] * len(recipe.slots)
    for slot, (entry, _) in enumerate(recipe.places):
        if 0 <= entry < len(spaced):
            spacing[slot] = spaced[entry] * recipe.slots[slot].bytes
        elif entry == len(spaced):
            spacing[slot] = recipe.bytes
    device, one = recipe.host.ordinal, played(recipe)
    every = [row for part in recipe.parts if isinstance(part, Launches) for row in part.launches]
    rows = [part for row in every for part in of_calls(row, calls, spacing, device)]
    return Tables(rows, recipe.places, device, one.trouble)


@functools.cache
def record(recipe: DeviceRecipe, calls: int = 0, apart: tuple[bool, ...] = ()) -> xla.Record:
    """Describes a pass for the foreign function, for as long as the process lives.

    Args:
        calls: how many calls one call of the function plays; 0 for one without an axis of calls.
        apart: for each array that a call gives, and each constant, whether it has a first axis of
            calls, as all results and the memory have.
    """
    tables = _played_at_once(recipe, calls, apart) if calls else played(recipe)
    return xla.Record(tables, recipe.told, gave_up(recipe.host), (calls or 1) * recipe.bytes)


def reason(host: TracedDevice, plan: Plan, doubt: Callable[[int], str | None]) -> str | None:
    """Why no kernels of the GPU engine run a plan; None if they do.

    Args:
        doubt: why kernels of a tier are not trusted in this process, or None.
    """
    why = build.unusable() or launch.missing() or no_kernel_on_gpu(plan.cell)
    if why is not None:
        return why
    for backward in (False, True):
        best = choice(host, plan, backward)
        if best.tier == 3:
            return f"one step per launch would be as slow as a loop of XLA: {best.reason}"
        if why := doubt(best.tier):
            return why
    return None


def choice(
    host: TracedDevice, plan: Plan, backward: bool, rows: int = capacity.BATCH
) -> capacity.Choice:
    """The best choice for a pass."""
    return capacity.choose(plan, host.limits, backward, host.tier, rows, host.tf32(plan.cell))


@functools.lru_cache(maxsize=256)
def most_rows(host: TracedDevice, plan: Plan) -> int:
    """The most rows that kernels run other than one step per launch; ``ANY`` for any number, or if
    the tier is forced.
    """

    def fits(rows: int) -> bool:
        return all(choice(host, plan, backward, rows).tier < 3 for backward in (False, True))

    fitting, too_many = 0, ANY
    if host.tier is not None or fits(ANY):
        return ANY
    while too_many - fitting > 1:
        rows = (fitting + too_many) // 2
        fitting, too_many = (rows, too_many) if fits(rows) else (fitting, rows)
    return fitting


def doubt_of(tier: int, results: Callable[[], Iterable[tuple[Array, Array]]]) -> str | None:
    """Why the kernels of a tier are not trusted in this process, or None.

    Args:
        results: returns results and gradients of a small layer, each with the same step by step.
    """
    try:
        apart = np.max([np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in results()])
    except Exception as error:
        return f"the kernels of tier {tier} failed at a small layer here: {error}"
    if apart < DOUBTFUL:
        return None
    return f"the kernels of tier {tier} computed a small layer wrongly here, by {apart:.2g}"


# -- a layer ---------------------------------------------------------------------------------------


def forward(
    host: TracedDevice, plan: Plan, arrays: Mapping[str, Array], options: Options, keep: bool
) -> tuple[Array, list[Array], Kept | None]:
    """Runs a layer; arguments and results are those of ``anycell.layer.forward``. Checkpoints are
    not made: gradients of weights, outside of the pass, need what all steps have kept.
    """
    given = _projected(arrays)
    if len(given) < len(arrays):
        for end in ENDS[: len(options.reverse)]:
            product = host.product(arrays["x"], arrays[f"weight_ih{end}"].T)
            given[f"x{end}"] = product.astype(host.dtype)
    return gpu.forward(host, plan, given, options._replace(checkpoint=None), keep=keep)


def backward(
    host: TracedDevice,
    plan: Plan,
    arrays: Mapping[str, Array],
    options: Options,
    kept: Kept,
    d_output: Array | None,
    d_final: Sequence[Array | None],
) -> dict[str, Array]:
    """The gradients of all arrays; see ``anycell.layer.backward``. Some may be float32."""
    x, ends = arrays["x"], ENDS[: len(options.reverse)]
    steps, size = x.shape[0], plan.sizes[plan.cell.states[0].size]
    gates = host.stand_in(x, (*x.shape[:2], plan.gates_width))
    given = _projected(arrays) | {f"x{end}": gates for end in ends}
    how = options._replace(checkpoint=None)
    named = gpu.backward(host, plan, given, how, kept, d_output, d_final, wanted=["x"])
    if "mask" in arrays:  # what lies under a mask may be NaN
        x = host.zeroed(x, arrays["mask"])

    def rows(array: Array | None) -> Any:
        return None if array is None else array.reshape(-1, array.shape[-1])

    inputs = []
    for d, end in enumerate(ends):
        w = {n: arrays[n + end] for n in plan.cell.learned if n + end in arrays}
        sums, dg, first = _Gradients(host, plan, w), named.pop(f"x{end}"), 2 * options.reverse[d]
        factors = [
            Factors(*(rows(named.pop(f"{what} {l.name}{end}", None)) for what in FACTORS))
            for l in plan.cell.linears
        ]
        hidden = rows(kept.hidden[first : first + steps])[:, d * size : (d + 1) * size]
        sums.add(rows(dg), rows(x), hidden, factors, first=True)
        found = bias_gradients(plan, sums.biases, sums.totals, sums.vectors, sums.zeros, sums.zeros)
        named |= {name + end: gradient for name, gradient in found.items()}
        inputs.append(host.product(dg, w["weight_ih"]) if "weight_ih" in w else dg)
    return named | {"x": sum(inputs[1:], inputs[0])}


def _projected(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays of a layer whose x is projected already."""
    return {name: array for name, array in arrays.items() if not name.startswith("weight_ih")}


class _Gradients(WeightGradients):
    """Gradients of weights and biases in float32, by the products of XLA."""

    def __init__(self, host: TracedDevice, plan: Plan, w: Mapping[str, Array]) -> None:
        self.host = host
        super().__init__(plan, dict(w), need=True, fresh=True)

    def zeros(self, shape: Shape) -> Array:
        return self.host.buffer(np.zeros(shape, np.float32))

    def new(self, shape: Shape, overwritten: bool) -> Array:
        return self.zeros(shape)

    def multiply(self, d: Array, operand: Array, weight: Array, first: bool) -> None:
        weight[:] = self.host.product(d.T, operand)

    def add_blocks(self, d: Array, operand: Array, weight: Array, heads: int, first: int) -> None:
        self.host.add_blocks(d, operand, weight, heads, first)

    def add_rows(self, d: Array, vector: Array, first: bool) -> None:
        vector[:] = self.host.row_sum(d)
