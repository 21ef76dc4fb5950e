"""The dtypes, one row each: the only place that interprets the name of a dtype."""

from __future__ import annotations

import functools
from typing import NamedTuple


class Number(NamedTuple):
    """A type of number, in memory or in a register.

    Attributes:
        name: as frameworks call it.
        bytes: of one number.
        llvm, triton: as the languages of kernels call it.
    """

    name: str
    bytes: int
    llvm: str
    triton: str


class Dtype(NamedTuple):
    """A dtype of a layer: the types of its numbers in memory and in arithmetic.

    Attributes:
        name: as frameworks call it.
        storage: type of the arrays of a call: input, weights, outputs, states, their gradients.
        operands: type of what matmuls multiply. If it is an integer type, a call's weights are
            integers with a scale per output, and kernels round the rows that they multiply. If it
            is a narrower float type than the storage, kernels round both operands.
        accumulate: type of the sums of matmuls, and of gradients that add up over time.
        math: type of the cell's elementwise arithmetic.
        saved: type of the values that the forward pass saves for the backward pass.
        engines: those that have kernels for it. The reference engine computes in any dtype.
        mixed: whether the storage type is narrower than the type of the cell's arithmetic.
        quantized: whether matmuls multiply integers; there are no gradients then.
        precision: the float32 precision that the framework must allow: "highest", "high", "medium".
    """

    name: str
    storage: Number
    operands: Number
    accumulate: Number
    math: Number
    saved: Number
    engines: tuple[str, ...]
    mixed: bool
    quantized: bool
    precision: str = "highest"

    @property
    def weights(self) -> Number:
        """The type of a call's weights."""
        return self.operands if self.quantized else self.storage

    @property
    def pieces(self) -> int:
        """Counts the numbers whose sum is one operand of a multiplication in a matmul."""
        return 2 if self.operands is _TWO_BFLOAT16 else 1

    @property
    def plain(self) -> bool:
        """Whether matmuls multiply numbers as they are stored, and add up in the same type."""
        return self.storage is self.operands is self.accumulate

    @property
    def short(self) -> bool:
        """Whether 16-bit accuracy is enough for the cell's functions."""
        return self.mixed or self.quantized


_FLOAT32 = Number("float32", 4, "float", "fp32")
_FLOAT64 = Number("float64", 8, "double", "fp64")
_BFLOAT16 = Number("bfloat16", 2, "bfloat", "bf16")
_FLOAT16 = Number("float16", 2, "half", "fp16")
_INT8 = Number("int8", 1, "i8", "int8")
FLAG = Number("uint8", 1, "i8", "int8")
COUNT, WORD = Number("int32", 4, "i32", "i32"), Number("int64", 8, "i64", "i64")
_TWO_BFLOAT16 = Number("sums of two bfloat16", 4, "bfloat", "bf16")


def _row(
    storage: Number,
    wide: Number,
    *engines: str,
    operands: Number | None = None,
    precision: str = "highest",
) -> Dtype:
    operands = operands or storage
    name = operands.name if precision == "highest" else f"{storage.name} {precision}"
    return Dtype(
        name, storage, operands, accumulate=wide, math=wide, saved=storage, engines=engines,
        mixed=storage is not wide, quantized=operands is _INT8, precision=precision,
    )  # fmt: skip


DTYPES = {
    "float32": _row(_FLOAT32, _FLOAT32, "cpu", "gpu"),
    "float64": _row(_FLOAT64, _FLOAT64, "cpu"),
    "bfloat16": _row(_BFLOAT16, _FLOAT32, "cpu", "gpu"),
    "float16": _row(_FLOAT16, _FLOAT32, "cpu", "gpu"),
    "int8": _row(_FLOAT32, _FLOAT32, "cpu", operands=_INT8),
    # float32 where the framework lets matmuls round it, see ``engines.cpu.rounded``.
    "float32 high": _row(_FLOAT32, _FLOAT32, "cpu", operands=_TWO_BFLOAT16, precision="high"),
    "float32 medium": _row(_FLOAT32, _FLOAT32, "cpu", operands=_BFLOAT16, precision="medium"),
}


@functools.cache
def dtypes(engine: str, *, quantized: bool = False) -> tuple[str, ...]:
    """The dtypes that an engine has kernels for: dtypes of all arrays of a layer, and with
    ``quantized`` also dtypes that only its weights can have.
    """
    rows = [r for r in DTYPES.values() if engine in r.engines and r.precision == "highest"]
    return tuple(row.name for row in rows if quantized or not row.quantized)


def scales_of(weight: str) -> str:
    """The name of the scales of an integer weight, one number per output."""
    return f"scales {weight}"
