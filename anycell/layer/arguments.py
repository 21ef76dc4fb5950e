"""What a layer is given, on a CPU or a GPU, and what its backward pass needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from anycell.lang.cell import RECURRENT, Cell, Linear
from anycell.plan import Plan

Array = Any


# Layouts that ``contract`` asks for: any strides, a dense last axis, dense rows or columns, or
# contiguous as a whole.
ANY, ROWS, MATRIX, DENSE = range(4)


class Arrays(Protocol):
    """What ``contract`` asks of a framework's arrays, which have ``shape`` and ``dtype``."""

    dtype: Any

    def fit(self, array: Array, layout: int, wide: bool = False) -> Array | None:
        """The array, or a contiguous copy where it does not lie so, or where its address or its
        strides are no whole elements; None for another dtype than this one (or that of ``wide``
        ones), and on other devices.
        """
        ...

    def as_flags(self, array: Array) -> Array | None:
        """Flags, bool or uint8, as contiguous uint8; None for all else, and on other devices."""
        ...


class Host(Arrays, Protocol):
    """What a layer on the CPU asks of a framework's arrays, which have the dtype of the plan.
    On a GPU it asks for ``anycell.engines.gpu.Host``.

    Besides these, arrays must slice, assign (``a[i:j] = b``), ``reshape``, transpose (``.T``) and
    ``sum(0)`` as NumPy's do.
    """

    def empty(self, shape: tuple[int, ...]) -> Array: ...

    def zeros(self, shape: tuple[int, ...]) -> Array: ...

    def lasting(self, shape: tuple[int, ...]) -> Array:
        """As ``empty``, for what is of every step; see ``engines.cpu.memory``."""
        ...

    def like(self, array: Array) -> Array:
        """As ``empty``, of the shape of a contiguous array."""
        ...

    def pointer(self, array: Array) -> int: ...

    def strides(self, array: Array) -> tuple[int, ...]:
        """In elements, of an array that fits."""
        ...

    def project(self, x: Array, weight: Array) -> Array:
        """``x @ weight.T`` as a new array, for ``x [..., I]`` and ``weight [N, I]``."""
        ...

    def matmul(self, a: Array, b: Array, out: Array) -> None:
        """``out = a @ b`` for matrices of any strides."""
        ...

    def matmul_add(self, a: Array, b: Array, out: Array) -> None:
        """``out += a @ b``."""
        ...

    def masked(self, x: Array, mask: Array) -> Array:
        """A copy of ``x [T, B, I]`` with 0 where ``mask [T, B]`` is 0, NaN or not."""
        ...


@dataclass
class Weights:
    """One direction of one layer; None where absent. Also what ``backward`` returns. Strides and
    dtypes: see ``contract``.

    Attributes:
        ih: ``[G*H, I]``; None where the input comes projected, in one direction.
        hh: ``[G*H, size of the first state]``; None for a cell without a recurrent matmul.
        bias_ih, bias_hh: ``[G*H]``.
        params: one ``[H]`` per parameter of the cell, in declared order.
        initial: one ``[B, size]`` per state, in declared order, or the number that fills it.
        reset: the values that resets restore, one ``[size]`` or ``[B, size]`` per state.
        static: ``[B, H]``, the input given once per sequence.
        recurrent_mask: ``[B, size]`` or ``[G, B, size]``, for a cell ``with_recurrent_mask``.
        linears: of further matmuls inside a step, by name; the biases as ``<name>_bias``.
        reverse: whether the direction runs from the last step to the first.
    """

    ih: Array | None
    hh: Array | None
    bias_ih: Array | None = None
    bias_hh: Array | None = None
    params: Sequence[Array] = ()
    initial: Sequence[Array] = ()
    reset: Sequence[Array] | None = None
    static: Array | None = None
    recurrent_mask: Array | None = None
    linears: Mapping[str, Array | None] = field(default_factory=dict)
    reverse: bool = False

    def matmul(self, linear: Linear) -> tuple[Array, Array | None]:
        """Weight and bias of one matmul inside a step."""
        name = linear.weight
        if name == RECURRENT:
            return self.hh, self.bias_hh
        return self.linears[name], self.linears.get(f"{name}_bias")


@dataclass
class Options:
    """What a call says beside its arrays.

    Attributes:
        mask: ``[T, B]``, 0 where the states hold.
        resets: ``[T, B]``, 1 where the states start anew before the step. Ignored under a mask.
        repeat: outputs of masked steps repeat the held state; otherwise they are 0.
        training: random masks are drawn (from ``seed`` and ``stream``), instead of their mean
            taken.
        threads: at most so many.
        checkpoint: of what the backward pass needs keep the states of every so many steps, or with
            "sqrt" of about as many as there are between two of them, and compute the rest again;
            None keeps all of it.
    """

    mask: Array | None = None
    resets: Array | None = None
    repeat: bool = False
    training: bool = False
    seed: int = 0
    stream: int = 0
    threads: int = 1
    checkpoint: str | int | None = None


@dataclass
class Saved:
    """What the forward pass keeps for the backward pass; read, never written, by it.

    Attributes:
        hidden: ``[T+1 or T+2, B, D*size]``: the first state; initial values in the first slot, or
            the last where a direction is reversed.
        states: per direction, the sequences ``[T+1, B, size]`` of the other states that the plan
            keeps.
        values: per direction ``[T, B, n]``, the values that the plan saves.
        reset: per direction the values that resets restore, ``[size]`` or ``[B, size]`` each; empty
            without resets.

    Of S segments, with ``Options.checkpoint``, only the states before the first step of each are
    kept: ``hidden [S, B, D*size]`` and all other states, ``[S, B, size]``, in the order in which a
    direction runs; ``values`` are of no steps.
    """

    x: Array
    weights: Sequence[Weights]
    options: Options
    hidden: Array
    states: list[list[Array | None]]
    values: list[Array]
    reset: list[list[Array]]


class Factors(NamedTuple):
    """The gradient of the weight of a matmul inside the steps is ``outputs.T @ operand``.

    Attributes:
        outputs: gradients of the matmul's outputs, ``[T * B, out]``; None where they are those of
            the projected gates.
        operand: what it multiplied, ``[T * B, in]``; None where that is the first state before
            each step, as it was without resets.
    """

    outputs: Array | None
    operand: Array | None


class Chunk(NamedTuple):
    """Where a chunk lies for one direction: from which time to before which, its first step to run,
    and which way it goes.
    """

    begin: int
    end: int
    time: int
    sign: int

    @classmethod
    def of(cls, reverse: bool, steps: int, done: int, count: int) -> Chunk:
        """The next so many of all steps, after those that are done."""
        if reverse:
            end = steps - done
            return cls(end - count, end, end - 1, -1)
        return cls(done, done + count, done, 1)


def chunk_steps(plan: Plan, steps: int, rows: int, limit: int) -> int:
    """Steps per chunk of the projection, such that its gates take about ``limit`` bytes at most."""
    width = len(plan.cell.gates) * plan.hidden_size * plan.itemsize
    count = max(1, -(-steps * rows * width // limit))
    return max(1, -(-steps // count))


def check_checkpoint(value: Any) -> str | int | None:
    """The value, if ``Options.checkpoint`` takes it."""
    word = isinstance(value, str) and value == "sqrt"
    number = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if value is None or word or number:
        return value
    raise ValueError(
        f"checkpoint: given {value!r}; expected 'sqrt', a number of steps from 1, or None to keep "
        "all that the backward pass needs."
    )


def segment_steps(wished: str | int | None, steps: int, chunk: int) -> int:
    """Steps of which the backward pass needs all at once, with ``Options.checkpoint``.

    They are whole chunks of the projection. So every matmul is the one that it would be without
    checkpoints, and so are the bits; and shorter ones would save nothing beside a chunk's buffer.
    """
    if wished is None:
        return steps
    if wished == "sqrt":
        wished = math.isqrt(steps)
    assert isinstance(wished, int), wished
    return min(steps, max(1, -(-wished // chunk)) * chunk)


def shapes(cell: Cell, sizes: dict[str, int], width: int, bias: bool) -> dict[str, tuple[int, ...]]:
    """Name and shape of what one direction of one layer learns, in the order of creation.

    Raises:
        ValueError: for sizes that heads or groups of the cell do not divide.
    """
    cell.check_sizes(sizes)
    gates = len(cell.gates) * sizes["H"]
    recurrent = any(l.name == RECURRENT for l in cell.linears)
    found: dict[str, tuple[int, ...]] = {"weight_ih": (gates, width)}
    if recurrent:
        found["weight_hh"] = (gates, sizes[cell.states[0].size])
    if bias:
        found["bias_ih"] = (gates,)
        if recurrent:
            found["bias_hh"] = (gates,)
    for l in cell.linears:
        if l.name != RECURRENT:
            found[f"weight_{l.name}"] = l.shape(sizes)
            if l.bias:
                found[f"bias_{l.name}"] = (len(l.declared) * sizes[l.out_size],)
    return found | dict.fromkeys(cell.param_names, (sizes["H"],))


def reset_values(empty: Callable[[tuple[int, ...]], Array], plan: Plan, w: Weights) -> list[Array]:
    """What resets restore: as given, else the declared initial values."""
    if w.reset is not None:
        return list(w.reset)
    values = []
    for state in plan.cell.states:
        value = empty((plan.sizes[state.size],))
        value[:] = state.initial
        values.append(value)
    return values
