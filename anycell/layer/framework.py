"""The operations of a framework that layers need: one class in ``framework.py`` of each frontend.

An instance handles arrays of one dtype. Those of ``Framework`` lie in the memory of the CPU, those
of ``DeviceFramework`` on one device. What needs no dtype belongs to the class, which the checks of
users' arguments take as it is. A method without a body is the framework's to define.
"""
# mypy: disable-error-code="empty-body"

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from anycell.engines.cpu.check import Bounds, reach
from anycell.engines.gpu.arrays import DeviceArrays
from anycell.lang.cell import Cell
from anycell.lang.namespaces import Array, Namespace, namespace
from anycell.layer.checks import describe, per_state, refuse
from anycell.layer.restarts import restarts
from anycell.layer.signature import Shape
from anycell.plan import DTYPES

if TYPE_CHECKING:
    from typing_extensions import Self


class Framework:
    """A framework's arrays of one dtype, on the CPU.

    Arrays have ``shape`` and ``dtype``, and slice, assign (``a[i:j] = b``), ``reshape`` and
    ``sum(0)`` as in NumPy.

    Attributes:
        kind: the class of its arrays.
        xp: its functions of arrays, by NumPy's names.
        dtype: the framework's own dtype of the arrays.
        wide: the framework for the dtype of the cell's arithmetic; itself if its dtype is the same.
        objects: where native code finds the address of an array's numbers: so many bytes after the
            begin of its Python object; 0 if it cannot.
        wide_states: whether all states but the first are kept in the dtype of ``wide``.
        trace: None, or for arrays that have no memory yet, the function that puts a pass into the
            framework's graph: it takes what ``Recipe.run`` takes, and returns the arrays that the
            pass will make.
    """

    kind: ClassVar[Any]
    xp: ClassVar[Namespace]
    objects = 0
    wide_states = True
    trace: Any = None

    def __init__(self, dtype: Any, wide: Self | None = None) -> None:
        self.dtype = dtype
        self.wide = self if wide is None else wide

    @classmethod
    @functools.cache
    def of(cls, dtype: str) -> Self:
        """The framework for the arrays of a layer, by the layer's dtype: a name in ``DTYPES``."""
        types = DTYPES[dtype]
        if types.storage.name != dtype:
            return cls.of(types.storage.name)
        return cls(cls.dtype_named(dtype), cls.of(types.math.name) if types.mixed else None)

    @classmethod
    def dtype_named(cls, name: str) -> Any:
        """The framework's dtype of that name."""

    @functools.cached_property
    def eight_bits(self) -> Self:
        """The framework for 8-bit weights."""
        return type(self)(self.dtype_named("int8"))

    @property
    def blas(self) -> int:
        """The address of the library's Fortran gemm for this dtype; 0 if there is none."""
        return 0

    # -- arrays that users pass --------------------------------------------------------------------

    def fit(self, array: Array, layout: int, wide: bool = False) -> Array | None:
        """Returns the array, or a contiguous copy if its layout differs, or if its address or
        strides are not multiples of its element size. Returns None for dtypes other than this one
        (or with ``wide``, the one of ``wide`` arrays), and for other devices.
        """

    def layout(self, arrays: Mapping[Any, Array]) -> tuple[Any, ...]:
        """A hashable key of all that ``fit`` looks at, for all arrays except flags."""

    def as_flags(self, array: Array) -> Array | None:
        """Returns bool or uint8 flags as contiguous uint8; None for other dtypes and devices."""

    def restarts(self, resets: Array, mask: Array | None, reverse: Sequence[bool]) -> Array:
        """The ``restarts`` of each direction, ``[D, T, B]``, as ``as_flags`` returns them."""
        ways = [restarts(resets, mask, way) for way in reverse]
        return self.as_flags(ways[0][None] if len(ways) == 1 else namespace(ways[0]).stack(ways))

    def widen(self, array: Array) -> Array:
        """Returns the array in the dtype of ``wide``; the array itself if it has that dtype."""

    def narrow(self, array: Array) -> Array:
        """Returns the array in this dtype; the array itself if it has that dtype."""

    def split(self, array: Array, sizes: Sequence[int], /) -> Sequence[Array]:
        """The parts of an array of one axis, of these sizes."""
        ends = itertools.accumulate(sizes)
        return [array[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    # -- arrays that a pass makes ------------------------------------------------------------------

    def empty(self, shape: Shape) -> Array:
        """An array of that shape, whose numbers may be anything."""

    def zeros(self, shape: Shape) -> Array:
        """An array of zeros."""

    def lasting(self, shape: Shape) -> Array:
        """An array like ``empty``'s, for values of every step; see ``engines.cpu.memory``."""

    def template(self, shape: Shape) -> Array:
        """A stand-in for an array of that shape, with at most one number; for ``like``."""

    def like(self, array: Array, /) -> Array:
        """An array like ``empty``'s, with the shape of a contiguous array or a ``template``; made
        in half the time.
        """

    # -- addresses ---------------------------------------------------------------------------------

    def pointer(self, array: Array, /) -> int:
        """The address of the first element."""

    def pointers(self, arrays: Iterable[Array]) -> Iterable[int]:
        """The addresses of several arrays, faster than by calls of ``pointer``."""

    def strides(self, array: Array, /) -> Shape:
        """The strides of an array that fits, in elements."""

    def offset(self, array: Array, /) -> int:
        """The elements of its memory before its first: 0 where ``pointer`` has counted them."""
        return 0

    def misaligned(self, arrays: Iterable[Array]) -> bool:
        """Whether the address of any array is not a multiple of its element size."""

    # -- arguments of users' calls -----------------------------------------------------------------
    # ``like`` has the dtype and the device that arrays must have. Errors describe an array by
    # ``axes``.

    @classmethod
    def check_array(
        cls, name: str, value: Any, shape: Sequence[Any], axes: str, like: Any
    ) -> Array:
        """Converts an argument to an array of that shape, with the dtype and the device of
        ``like``.
        """

    @classmethod
    def check_flags(
        cls, name: str, value: Any, shape: Sequence[Any], axes: str, like: Any
    ) -> Array:
        """Converts an argument to booleans of that shape."""

    @classmethod
    def check_counts(cls, name: str, value: Any, expected: str) -> tuple[Array, bool]:
        """Converts an argument to whole numbers, and says whether their values can be read."""

    @classmethod
    def copy_flags(cls, flags: Array) -> Array:
        """A contiguous copy of flags, if they could change: the backward pass reads them again."""
        return flags

    @classmethod
    def below(cls, steps: int, counts: Array, like: Any) -> Array:
        """Whether each step is below each of ``counts [1, B]``, ``[T, B]``."""

    @classmethod
    def check_states(
        cls, kind: str, states: Any, cell: Cell, sizes: Mapping[str, int], first: Shape, like: Any
    ) -> tuple[Array, ...]:
        """``states`` as a tuple; each must be ``[*first, size]``."""
        values = states if isinstance(states, (tuple, list)) else (states,)
        if len(values) != len(cell.states):
            per_state(kind, states, cell)  # raises
        fitted: tuple[Any, ...] = ()
        for state, value in zip(cell.states, values, strict=True):
            shape = (*first, sizes[state.size])
            fitted += (cls.check_array(kind, value, shape, f"the state {state.name!r}", like),)
        return fitted

    @classmethod
    def check_static(cls, cell: Cell, static: Any, shape: Shape, like: Any) -> Array:
        """The input per sequence; it must be given if, and only if, the cell declares one."""
        if cell.static is not None:
            axes = f"the input {cell.static!r} of cell {cell.name}, once per sequence"
            return cls.check_array("static", static, shape, axes, like)
        if static is not None:
            expected = f"None, because cell {cell.name} declares no static input"
            hint = 'Declare it, @cell(static="e"), or leave it out.'
            refuse("static", describe(static), expected, hint, TypeError)
        return None

    @classmethod
    def check_recurrent_mask(
        cls, cell: Cell, mask: Any, sizes: Mapping[str, int], rows: Shape, like: Any
    ) -> Array:
        """The mask, ``[*rows, size]``, or ``[G, *rows, size]`` for one per gate. Refuses it if the
        cell has no matmul behind `r`.
        """
        if not any(l.recurrent for l in cell.linears):
            named = ", ".join(l.name for l in cell.linears) or "none"
            expected = (
                f"None for cell {cell.name}, which has no matmul behind `r` to mask (its matmuls: "
                f"{named})"
            )
            hint = "Draw the mask in the cell, with keep()."
            refuse("recurrent_mask", describe(mask), expected, hint)
        first, count = cell.states[0], len(cell.gates)
        shape = (*rows, sizes[first.size])
        axes = f"of the state {first.name!r}, optionally after an axis of {count} gates"
        if len(getattr(mask, "shape", ())) == len(shape) + 1:
            shape = (count, *shape)
        return cls.check_array("recurrent_mask", mask, shape, axes, like)


class DeviceFramework(Framework, DeviceArrays):
    """A framework's arrays of one dtype on one device, for the GPU engine.

    Arrays also have ``mT``. ``wide`` arrays are float32, others of the plan's dtype.

    Attributes:
        wide_states: False: states are kept in the plan's dtype, and only at borders in float32.
        multiplies: whether it multiplies in the midst of a pass. If not, x is projected before the
            pass, which then has one chunk of time and launches only; ``backward`` returns the
            factors of the gradients of weights.
        tier: forces a tier; None lets ``capacity`` choose.
        twins: whether one launch may run both directions.
        patience: the nanoseconds after which a program gives up.
    """

    wide_states = False
    multiplies = True
    tier: int | None = None
    twins = True
    patience: int

    def tf32(self, cell: Cell) -> bool:
        """Whether a cell's matmuls may round float32 operands to 19 bits."""

    @property
    def trouble(self) -> Array:
        """An int32 in memory that host and device both reach; kernels of tier 2 set it when their
        programs give up waiting for one another.
        """

    def empty(self, shape: Shape, wide: bool = False) -> Array:
        """An array of that shape, whose numbers may be anything."""

    def template(self, shape: Shape, wide: bool = False) -> Array:
        """A stand-in for an array of that shape, with at most one number; for ``like``."""

    def block(self, count: int) -> Array:
        """Memory of that many bytes, as an array of uint8."""

    def typed(self, block: Array, dtype: str) -> Array:
        """A block as an array of numbers of a dtype."""

    def part(self, array: Array, shape: Shape, strides: Shape, offset: int) -> Array:
        """A part of an array; strides and offset in elements."""

    def numbers(self, values: Sequence[float]) -> Array:
        """A float32 array on the device."""

    def matmul_add(self, a: Array, b: Array, out: Array) -> None:
        """``out += a @ b``, as ``matmul``."""

    def summed(self, array: Array, total: Array) -> None:
        """``total = array.sum(0)`` of a matrix: wide, and never rounded on the way."""


def extent(host: Framework, array: Array) -> Bounds:
    """The address of an array's first byte, and the address after its last byte."""
    address, axes = host.pointer(array), zip(array.shape, host.strides(array), strict=True)
    for span in reach("", address, array.dtype.itemsize, 1, tuple(axes)):
        return span.first, span.last
    return address, address
