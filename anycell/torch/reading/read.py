"""The table by which recorded operations of PyTorch on states become units.

What the table lacks is decomposed by torch's own rules while it is recorded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anycell import read
from anycell.read import Equation, Outer, Rule, Value, Variable, leaves, row
from anycell.torch.reading.record import ROWS, TABLE, A, Recording, Rows, named


class Arrays(read.Arrays):
    """The functions that a reading calls on tensors."""

    reshape, broadcast = staticmethod(torch.reshape), staticmethod(torch.broadcast_to)
    transpose, cat = staticmethod(torch.permute), staticmethod(torch.cat)
    cast = staticmethod(Tensor.to)

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device=self.device)

    def constant(self, numbers: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(numbers, dtype=dtype, device=self.device)

    @staticmethod
    def gather(tensor: Tensor, at: np.ndarray) -> Tensor:
        return tensor[..., torch.as_tensor(at, device=tensor.device)]


# -- rules -----------------------------------------------------------------------------------------


def _divide(reader: Reader, a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is not None:
        reader.graph.refuse("this is a division that rounds", "a division without rounding_mode")
    return reader.op("div", a, b)


def _clamp(reader: Reader, value: Any, low: Any = None, high: Any = None, **more: Any) -> Any:
    return reader.clamp(value, more.get("min", low), more.get("max", high))


def _gelu(reader: Reader, value: Any, approximate: str = "none") -> Any:
    return reader.op("gelu" if approximate == "none" else "gelu_tanh", value)


def _hard_sigmoid(reader: Reader, value: Any) -> Any:
    made = reader.op("hard_sigmoid", value)
    if reader.dtype != "float64":
        return made
    # Its derivative is a sixth that torch rounds to float32.
    line = reader.op("mul", reader.bounded(value, -3.0, 3.0), float(np.float32(1 / 6)))
    return reader.op("add", line, reader.op("stop_gradient", reader.op("sub", made, line)))


def _softplus(reader: Reader, value: Any, beta: float = 1, threshold: float = 20) -> Any:
    """Above the threshold it is the value itself, though from 20 on the kernel's is that too."""
    made = reader.softplus(value, beta)
    if threshold >= 20:
        return made
    return reader.where(reader.op("gt", reader.scaled(value, beta), threshold), value, made)


def _pad(reader: Reader, value: Any, pads: Sequence[int], number: float = 0) -> Value:
    """A value with units of one number before and after it; a negative count leaves some out."""
    positions = torch.arange(value.ids.size).reshape(value.shape)
    at, axis = A.constant_pad_nd(positions, pads, -1).numpy(), reader.graph.view(value)[0]
    filled = reader.graph.outside(reader.filled(at.shape, float(number)), at.shape, axis)
    return Value(np.where(at < 0, filled.ids, value.ids.reshape(-1)[at]), value.boolean)


def _batch_norm(
    reader: Reader, value: Any, weight: Any, bias: Any, mean: Any, variance: Any, *more: Any
) -> list[Any]:
    """Batch normalization in evaluation, an affine map of each feature."""
    features = reader.structural(lambda ids: ids.movedim(1, -1), value)
    inverse = replace(variance, get=lambda run: torch.rsqrt(variance.get(run) + more[-1]))
    made = reader.op("mul", reader.op("sub", features, mean), inverse)
    made = made if weight is None else reader.op("mul", made, weight)
    made = made if bias is None else reader.op("add", made, bias)
    return [reader.structural(lambda ids: ids.movedim(-1, 1), made), None, None]


def _copy(reader: Reader, old: Any, new: Any, *_: Any) -> Any:
    if not isinstance(new, Value):
        new = reader.graph.outside(new, old.shape, reader.graph.view(old)[0])
    return Value(np.broadcast_to(new.ids, old.shape), new.boolean)


def _reduced(name: str) -> Rule:
    def rule(reader: Reader, value: Any, axes: Any = None, keep: bool = False, **_: Any) -> Any:
        made = getattr(reader, name)(value, None if axes == [] else axes, keep)
        return [made, None] if len(reader.equation.results) > 1 else made

    return rule


def _variance(reader: Reader, value: Any, *args: Any, **options: Any) -> Any:
    names = [argument.name for argument in reader.equation.source._schema.arguments[1:]]
    options |= zip(names, args, strict=False)
    axes, keep = options.get("dim") or None, bool(options.get("keepdim"))
    less = options.get("correction")
    less = float(options.get("unbiased", True)) if less is None else less
    total = reader.variance(value, axes, keep, less)
    if reader.equation.op in (A.std, A.std_mean):
        total = reader.root(total)
    both = len(reader.equation.results) > 1
    return [total, reader.mean(value, axes, keep)] if both else total


def _norm(reader: Reader, value: Any, order: float = 2, *args: Any, **_: Any) -> Any:
    if order == 2:
        return reader.root(reader.sum(reader.op("square", value), *args))
    if order not in (1, math.inf):
        reader.graph.refuse(f"this is a norm of order {order}", "a norm of order 1, 2 or infinity")
    return getattr(reader, "sum" if order == 1 else "max")(reader.op("abs", value), *args)


def _layer_norm(reader: Reader, value: Any, shape: Any, *more: Any) -> list[Any]:
    return [reader.layer_norm(value, range(-len(shape), 0), *more), None, None]


def _picked(reader: Reader, value: Any, axis: int, place: Any) -> Value:
    """Units at places that are the same at all steps, by a matrix of zeros and ones."""
    if not isinstance(place, Outer) or place.kind != "F" or len(place.shape) != 1:
        reader.graph.refuse("this picks units by an index that changes", "use torch.where")
    index = next(leaves(reader.equation.arguments[1:], Variable))
    size = value.shape[axis]

    def matrix(run: Any) -> Tensor:
        places = run.fixed(index) % size
        return torch.nn.functional.one_hot(places, size).T.to(run.dtype)

    return reader.picked(value, axis, place.shape[0], matrix)


def _index(reader: Reader, value: Any, at: Sequence[Any]) -> Value:
    axes = [axis for axis, place in enumerate(at) if place is not None]
    if len(axes) != 1:
        reader.graph.refuse("this picks units by several indices", "use one index")
    return _picked(reader, value, axes[0], at[axes[0]])


def _product(equation: str) -> Rule:
    return lambda reader, a, b: reader.einsum(equation, a, b)


def _addmm(reader: Reader, bias: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    return reader.add(reader.scaled(reader.einsum("xy,yz->xz", a, b), alpha), bias, beta)


_STRUCTURAL = named(
    "view reshape _unsafe_view slice select permute t transpose unsqueeze squeeze expand split "
    "split_with_sizes unsafe_split unsafe_split_with_sizes chunk unsafe_chunk unbind flip repeat "
    "roll unflatten movedim _reshape_alias diagonal repeat_interleave as_strided cat stack "
    "slice_scatter select_scatter"
)
# Their results are alike in all rows where the operands are, as those of pointwise operations.
_SAME = named(
    "expand clone detach alias view reshape _unsafe_view _to_copy lift_fresh lift_fresh_copy "
    "unsqueeze squeeze"
)
# Those that have their names in the language.
_OPS = named(
    "sigmoid tanh relu exp log log1p expm1 sqrt rsqrt abs neg sign reciprocal silu sin cos erf mul "
    "lt le gt ge eq ne logical_not logical_and logical_or logical_xor"
)
TABLE |= dict.fromkeys(_STRUCTURAL, read.Reader.moved)
TABLE |= dict.fromkeys(named("_to_copy clone alias lift_fresh contiguous"), row("convert"))
TABLE |= {op: op.__name__ for op in _OPS} | {
    A.sgn: "sign", A.detach: "stop_gradient", A.bitwise_not: "logical_not",
    A.bitwise_and: "logical_and", A.bitwise_or: "logical_or", A.bitwise_xor: "logical_xor",
}  # fmt: skip
TABLE |= {
    A.add: read.Reader.add, A.amax: _reduced("max"), A.amin: _reduced("min"),
    A.bmm: _product("bxy,byz->bxz"), A.cumsum: row("cumsum"), A.dot: _product("x,x->"),
    A.elu: read.Reader.elu, A.erfc: row("erfc"),
    A.isfinite: row("is_finite"), A.lerp: read.Reader.lerp, A.logaddexp: row("logaddexp"),
    A.logsumexp: read.Reader.logsumexp, A.max: _reduced("max"), A.maximum: row("larger"),
    A.mean: _reduced("mean"), A.min: _reduced("min"), A.minimum: row("smaller"),
    A.mm: _product("xy,yz->xz"), A.mv: _product("xy,y->x"), A.pow: row("power"),
    A.sub: read.Reader.subtract, A.sum: _reduced("sum"), A.where: read.Reader.where,
}  # fmt: skip
TABLE |= dict.fromkeys((A.std, A.std_mean, A.var, A.var_mean), _variance)
TABLE |= {
    A.addmm: _addmm, A.clamp: _clamp, A.constant_pad_nd: _pad, A.copy: _copy, A.div: _divide,
    A.gelu: _gelu, A.hardsigmoid: _hard_sigmoid, A.index: _index, A.index_select: _picked,
    A.linalg_vector_norm: _norm, A.native_batch_norm: _batch_norm,
    A.native_layer_norm: _layer_norm, A.softplus: _softplus,
}  # fmt: skip
TABLE |= {
    A._log_softmax: lambda reader, value, axis, *_: reader.log_softmax(value, axis),
    A._softmax: lambda reader, value, axis, *_: reader.softmax(value, axis),
    A.clamp_max: lambda reader, value, high: reader.clamp(value, None, high),
    A.clamp_min: lambda reader, value, low: reader.clamp(value, low),
    A.hardtanh: lambda reader, value, low=-1, high=1: reader.bounded(value, low, high),
    A.leaky_relu: lambda reader, value, slope=0.01: reader.op("leaky_relu", value, slope),
    A.log_sigmoid_forward: lambda reader, value: [reader.op("log_sigmoid", value), None],
    A.masked_fill: lambda reader, value, mask, filled: reader.where(mask, filled, value),
    A.rsub: lambda reader, a, b, alpha=1: reader.subtract(b, a, alpha),
}

# What to write in place of operations that people use in cells.
INSTEAD = dict.fromkeys((A.sort, A.topk, A.kthvalue, A.median), "a cell without sorting")
INSTEAD |= {
    A.convolution: "a product with the matrix of the convolution",
    A._fft_r2c: "a product with the matrix of the transform, in real numbers",
    A._trilinear: "products of each of the two alone, and then the product of both results",
}


class Reader(read.Reader):
    """Turns the operations of a recording on states into units.

    Args:
        names: of the states, "" where there is none.
    """

    table, instead = TABLE, INSTEAD

    def __init__(self, step: Recording, names: Sequence[str], title: str) -> None:
        axis = None if step.rows is None else 0
        dtype = str(step.dtype).removeprefix("torch.")
        super().__init__(step, Arrays(step.device), axis, dtype)
        self.reading = self.read(names, title)

    def pointwise(self, equation: Equation) -> bool:
        return equation.op in _SAME or torch.Tag.pointwise in equation.source.tags

    def axis_of(self, v: Variable) -> int | None:
        return v.axis

    def argument(self, leaf: Any) -> Any:
        if not isinstance(leaf, Rows):
            return leaf
        if self.equation.op not in _STRUCTURAL:
            self.graph.refuse(
                "this computes with the size of the batch", "leave it out of the step"
            )
        return leaf.times * ROWS[0]

    def packed(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(ids, order="C"))
