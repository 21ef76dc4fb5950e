"""The table by which recorded operations of PyTorch on states become units.

What the table lacks is decomposed by torch's own rules while it is recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anycell.read import Graph, Outer, Refused, Value, read
from anycell.torch.record import ROWS, TABLE, A, Node, Recording, Rows, Run, Var


class Arrays:
    """The functions that a reading calls on tensors."""

    reshape, broadcast = staticmethod(torch.reshape), staticmethod(torch.broadcast_to)
    cat, take = staticmethod(torch.cat), staticmethod(torch.narrow)
    move = staticmethod(torch.movedim)

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.picks: dict[int, Any] = {}  # by the ids of arrays that a reading holds

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device=self.device)

    def constant(self, numbers: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(numbers, dtype=dtype, device=self.device)

    @staticmethod
    def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(dtype)

    def index(self, tensor: Tensor, at: np.ndarray) -> Tensor:
        """The columns ``at`` of the last axis."""
        known = self.picks.get(id(at))
        if known is None or known[0] is not at:
            neighbours = bool((at == at[0] + np.arange(len(at))).all())
            pick: Any = (int(at[0]), len(at)) if neighbours else torch.as_tensor(at)
            known = self.picks[id(at)] = at, pick
        pick = known[1]
        if isinstance(pick, tuple):
            whole = pick == (0, tensor.shape[-1])
            return tensor if whole else tensor.narrow(tensor.dim() - 1, *pick)
        return tensor[..., pick.to(tensor.device)]


# -- the table -------------------------------------------------------------------------------------

Table = Callable[..., Any]


class Reader:
    """Turns the operations of a recording on states into units.

    Args:
        names: of the states, "" where there is none.
    """

    def __init__(self, step: Recording, names: Sequence[str], title: str) -> None:
        self.step = step
        graph = self.graph = Graph(Arrays(step.device), step.rows)
        self.values: dict[Var, Any] = {}
        states = []
        for var, after, name in zip(step.states, step.after, names, strict=True):
            if var.kind == "S":
                graph.where = "" if after.node is None else after.node.where
                self._check(var)
                axis = None if step.rows is None else 0
                self.values[var] = graph.state(var.shape, axis, var.dtype is torch.bool, name)
                states.append(var)
        if not states:
            raise Refused("the step returns its state as it was, and so needs no loop")
        pairs = [(b, a) for b, a in zip(step.states, step.after, strict=True) if b in states]
        for node in step.plan([after for _, after in pairs]):
            if any(var is not None and var.kind == "S" for var in node.made):
                graph.where = node.where
                self._read(node)
        graph.where = ""
        self.states = states
        self.reading = read(graph, [(self.values[b], self.value(a)) for b, a in pairs], title)

    def _check(self, var: Var) -> None:
        if var.dtype not in (self.step.dtype, torch.bool):
            self.graph.refuse(
                f"a value that depends on a state is {var.dtype}, and the first state "
                f"{self.step.dtype}", "compute the whole step in one dtype, counters too",
            )  # fmt: skip

    def _read(self, node: Node) -> None:
        made = self.apply(node, self.value)
        for var, value in zip(node.made, made if isinstance(made, list) else [made], strict=False):
            if var is not None and value is not None:
                self._check(var)
                self.values[var] = value

    def value(self, var: Any) -> Any:
        """A value as the graph takes it."""
        if isinstance(var, Var):
            if var not in self.values:
                self.values[var] = self._outer(var)
            return self.values[var]
        if isinstance(var, (tuple, list)):
            return type(var)([self.value(item) for item in var])
        return var.times * ROWS[0] if isinstance(var, Rows) else var

    def apply(self, node: Node, value: Callable[[Any], Any]) -> Any:
        rule = TABLE.get(node.packet)
        if rule is None:
            self.graph.refuse(
                f"this is {node.name} of a value that depends on a state",
                "the same in operations that a cell has",
            )
        arguments = [*node.args, *node.kwargs.values()]
        if node.packet not in _STRUCTURAL and any(isinstance(v, Rows) for v in arguments):
            self.graph.refuse(
                "this computes with the size of the batch", "leave it out of the step"
            )
        kwargs = {name: value(v) for name, v in node.kwargs.items()}
        return rule(self, node, *[value(v) for v in node.args], **kwargs)

    def _outer(self, var: Var) -> Outer:
        real = var.dtype is not torch.bool

        def get(run: Run) -> Tensor:
            tensor = run.fixed(var) if var.kind == "F" else run.moving(var)
            return tensor.to(run.dtype) if real and tensor.dtype is not run.dtype else tensor

        outer = Outer(var.kind, var.shape, get, not real, not var.alike, var.number)
        if var.kind == "X" and var.node is not None and real:
            outer.units = self._affine(var)
        return outer

    def _affine(self, var: Var) -> Value | None:
        """The units of a value that is affine in others of kind X."""
        node = var.node
        assert node is not None
        if node.packet not in _AFFINE:
            return None

        def based(item: Any) -> Any:
            if isinstance(item, Var) and item.kind == "X":
                if not item.dtype.is_floating_point:
                    raise Refused("no float")
                return self.graph.base(self.value(item), item.axis)
            if isinstance(item, (tuple, list)):
                return type(item)([based(part) for part in item])
            return self.value(item)

        try:
            made = self.apply(node, based)
        except Refused:
            return None
        made = made[var.place] if isinstance(made, list) else made
        return made if isinstance(made, Value) else None

    # -- rules -----------------------------------------------------------------------------------
    def elementwise(self, op: str, *operands: Any) -> Value:
        return self.graph.elementwise(op, *operands, boolean=op in CONDITIONS)

    def identity(self, node: Node, value: Any, *_: Any, **__: Any) -> Any:
        return value

    def structural(self, node: Node, value: Any, *args: Any, **kwargs: Any) -> Any:
        def run(ids: np.ndarray) -> Any:
            return node.op(torch.as_tensor(np.ascontiguousarray(ids)), *args, **kwargs)

        return self.graph.structural(run, value)

    def joined(self, node: Node, values: Sequence[Any], dim: int = 0) -> Value:
        join = np.concatenate if node.packet is A.cat else np.stack
        return self.graph.structural(lambda *ids: join(ids, dim), *values)

    def scattered(self, node: Node, value: Any, part: Any, *args: Any, **kwargs: Any) -> Value:
        def run(*ids: np.ndarray) -> Any:
            tensors = [torch.as_tensor(np.array(i)) for i in ids]
            return node.op(*tensors, *args, **kwargs)

        return self.graph.structural(run, value, part)

    def add(self, node: Node, a: Any, b: Any, alpha: float = 1) -> Value:
        a, b = (b, a) if node.packet is A.rsub else (a, b)
        if alpha != 1:
            if node.packet is A.rsub:
                a, b = a, self.scaled(b, alpha)
            else:
                b = self.scaled(b, alpha)
        return self.elementwise("add" if node.packet is A.add else "sub", a, b)

    def scaled(self, value: Any, factor: float) -> Any:
        if isinstance(value, Value):
            return self.elementwise("mul", value, float(factor))
        if isinstance(value, Outer):
            get = value.get
            return Outer(
                value.kind, value.shape, lambda run: get(run) * factor, False, value.per_row
            )
        return value * factor

    def where(self, node: Node, condition: Any, a: Any, b: Any) -> Value:
        return self.elementwise("where", condition, a, b)

    def masked_fill(self, node: Node, value: Any, mask: Any, filled: Any) -> Value:
        return self.elementwise("where", mask, filled, value)

    def clamp(self, node: Node, value: Any, low: Any = None, high: Any = None, **k: Any) -> Any:
        low, high = k.get("min", low), k.get("max", high)
        low, high = (None, low) if node.packet is A.clamp_max else (low, high)
        value = value if low is None else self.elementwise("maximum", value, low)
        return value if high is None else self.elementwise("minimum", value, high)

    def lerp(self, node: Node, start: Any, end: Any, weight: Any) -> Value:
        if not isinstance(start, Value) and not isinstance(end, Value):
            self.graph.refuse("lerp between values without a state")
        part = self.elementwise("mul", self.elementwise("sub", end, start), weight)
        return self.elementwise("add", start, part)

    def power(self, node: Node, base: Any, exponent: Any) -> Value:
        if isinstance(base, (int, float)):
            return self.elementwise("exp", self.elementwise("mul", exponent, math.log(base)))
        if not isinstance(exponent, (int, float)):
            return self.elementwise("pow", base, exponent)
        if exponent == int(exponent) and 1 <= exponent <= 16:
            result = base
            for _ in range(int(exponent) - 1):
                result = self.elementwise("mul", result, base)
            return result
        named = {0.5: "sqrt", -1.0: "reciprocal", -0.5: "rsqrt"}.get(float(exponent))
        return self.elementwise(named, base) if named else self.elementwise("pow", base, exponent)

    def elu(self, node: Node, value: Any, alpha: float = 1.0, *rest: Any) -> Value:
        if any(factor != 1 for factor in rest):
            self.graph.refuse("elu with a scale")
        return (
            self.elementwise("elu", value)
            if alpha == 1
            else self.elementwise("elu_alpha", value, alpha)
        )

    def gelu(self, node: Node, value: Any, *, approximate: str = "none") -> Value:
        return self.elementwise("gelu" if approximate == "none" else "gelu_tanh", value)

    def softplus(self, node: Node, value: Any, beta: float = 1, threshold: float = 20) -> Value:
        if beta == 1:
            return self.elementwise("softplus", value)
        made = self.elementwise("softplus", self.elementwise("mul", value, beta))
        return self.elementwise("mul", made, 1 / beta)

    def leaky_relu(self, node: Node, value: Any, slope: float = 0.01) -> Value:
        return self.elementwise("leaky_relu", value, slope)

    def hard_sigmoid(self, node: Node, value: Any) -> Value:
        if self.step.dtype is torch.float64:
            self.graph.refuse(
                "the derivative of torch's hardsigmoid is a sixth that is rounded to float32",
                "F.relu6(x + 3) / 6",
            )
        return self.elementwise("hard_sigmoid", value)

    def log_sigmoid(self, node: Node, value: Any) -> list[Any]:
        return [self.elementwise("log_sigmoid", value), None]

    def copy(self, node: Node, old: Any, new: Any, *_: Any) -> Any:
        if not isinstance(new, Value):
            new = self.graph.outside(new, old.shape, self.graph.view(old)[0])
        return Value(np.broadcast_to(new.ids, old.shape), new.boolean)

    def convert(self, node: Node, value: Any, **_: Any) -> Any:
        old, new = node.args[0].dtype, node.made[0].dtype
        if old is new:
            return value
        if old is torch.bool and new is self.step.dtype:
            return self.elementwise("number", value)
        if new is torch.bool and old.is_floating_point:
            return self.elementwise("truth", value)
        return self.graph.refuse(
            f"this converts a value that depends on a state from {old} to {new}",
            "compute the whole step in one dtype",
        )

    def reduced(
        self, node: Node, value: Any, axes: Any = None, keep: bool = False, **_: Any
    ) -> Any:
        axes = [axes] if isinstance(axes, int) else axes
        axes = tuple(axes or range(len(value.shape)))
        packet = node.packet
        if packet in (A.amax, A.max):
            made = self.graph.reduce("max", value, axes, keep)
            return [made, None] if packet is A.max and len(node.made) > 1 else made
        if packet in (A.amin, A.min):
            made = self.graph.reduce("max", self.elementwise("neg", value), axes, keep)
            made = self.elementwise("neg", made)
            return [made, None] if packet is A.min and len(node.made) > 1 else made
        total = self.graph.reduce("sum", value, axes, keep)
        return total if packet is A.sum else self._over(total, value, axes)

    def _over(self, total: Value, value: Value, axes: Sequence[int], less: float = 0) -> Value:
        count = math.prod(value.shape[i] for i in axes)
        return self.elementwise("mul", total, 1.0 / (count - less))

    def _mean(self, value: Value, axes: tuple[int, ...], keep: bool = True) -> Value:
        return self._over(self.graph.reduce("sum", value, axes, keep), value, axes)

    def variance(self, node: Node, value: Any, *args: Any, **options: Any) -> Any:
        names = [argument.name for argument in node.op._schema.arguments[1:]]
        options |= zip(names, args, strict=False)
        axes, keep = tuple(options.get("dim") or range(len(value.shape))), options.get("keepdim")
        less = options.get("correction")
        less = float(options.get("unbiased", True)) if less is None else less
        centred = self.elementwise("sub", value, self._mean(value, axes))
        squares = self.elementwise("mul", centred, centred)
        total = self._over(self.graph.reduce("sum", squares, axes, bool(keep)), value, axes, less)
        if node.packet in (A.std, A.std_mean):
            total = self.elementwise("sqrt", total)
        mean = self._mean(value, axes, bool(keep))
        return [total, mean] if node.packet in (A.var_mean, A.std_mean) else total

    def layer_norm(
        self, node: Node, value: Any, shape: Any, weight: Any, bias: Any, eps: float
    ) -> list[Any]:
        axes = tuple(range(-len(shape), 0))
        axes = tuple(axis % len(value.shape) for axis in axes)
        centred = self.elementwise("sub", value, self._mean(value, axes))
        variance = self._mean(self.elementwise("mul", centred, centred), axes)
        scale = self.elementwise("rsqrt", self.elementwise("add", variance, eps))
        made = self.elementwise("mul", centred, scale)
        made = made if weight is None else self.elementwise("mul", made, weight)
        return [made if bias is None else self.elementwise("add", made, bias), None, None]

    def cumsum(self, node: Node, value: Any, axis: int, **_: Any) -> Value:
        size, arrays = value.shape[axis], self.graph.arrays
        ones = np.triu(np.ones((size, size)))
        made = self.graph.product(
            value, (axis % len(value.shape),), (size,), lambda run: arrays.constant(ones, run.dtype)
        )
        return Value(np.moveaxis(made.ids, -1, axis))

    def picked(self, node: Node, value: Any, at: Any, *more: Any) -> Value:
        """Units at places that are the same at all steps, by a matrix of zeros and ones."""
        if node.packet is A.index_select:
            axis, place = at, more[0]
        else:
            given = [k for k, one in enumerate(at) if one is not None]
            if len(given) != 1:
                self.graph.refuse("this picks units by several indices", "use one index")
            axis, place = given[0], at[given[0]]
        if not isinstance(place, Outer) or place.kind != "F" or len(place.shape) != 1:
            self.graph.refuse("this picks units by an index that changes", "use torch.where")
        size, index = value.shape[axis], node.args[1] if node.packet is A.index else node.args[2:]
        index = next(var for var in index if isinstance(var, Var))

        def matrix(run: Run) -> Tensor:
            places = run.fixed(index) % size
            return torch.nn.functional.one_hot(places, size).T.to(run.dtype)

        made = self.graph.product(value, (axis,), place.shape, matrix)
        return Value(np.moveaxis(made.ids, -1, axis))

    def logsumexp(self, node: Node, value: Any, axes: Any, keep: bool = False) -> Value:
        axes = [axes] if isinstance(axes, int) else axes
        top = self.graph.reduce("max", value, axes, True)
        parts = self.elementwise("exp", self.elementwise("sub", value, top))
        total = self.elementwise("log", self.graph.reduce("sum", parts, axes, True))
        made = self.elementwise("add", total, top)
        return made if keep else Value(np.squeeze(made.ids, tuple(axes)))

    def softmax(self, node: Node, value: Any, axis: int, *_: Any) -> Value:
        top = self.graph.reduce("max", value, (axis,), True)
        parts = self.elementwise("exp", self.elementwise("sub", value, top))
        return self.elementwise("div", parts, self.graph.reduce("sum", parts, (axis,), True))

    def matmul(self, node: Node, a: Any, b: Any) -> Value:
        graph, swapped = self.graph, not isinstance(a, Value)
        value, weight = (b, a) if swapped else (a, b)
        if not isinstance(weight, Outer) or weight.kind != "F":
            graph.refuse(
                "this multiplies a state by a matrix that depends on x or on a state",
                "multiply by weights, or gate the product element by element",
            )
        if node.packet in (A.mv, A.dot):
            out, axis = weight.shape[:-1], len(value.shape) - 1
            return graph.product(value, (axis,), out, _matrix(weight.get, turned=len(out) > 0))
        if node.packet is A.bmm:
            return self._products(value, weight, swapped)
        if swapped:
            made = graph.product(value, (0,), weight.shape[:1], _matrix(weight.get, turned=True))
            return Value(np.moveaxis(made.ids, -1, 0))
        return graph.product(value, (1,), weight.shape[1:], weight.get)

    def _products(self, value: Value, weight: Outer, swapped: bool) -> Value:
        """The products of a batch of matrices."""
        graph = self.graph
        out = (weight.shape[1] if swapped else weight.shape[2],)
        axis = 1 if swapped else 2
        if graph.view(value)[0] == 0:  # the same matrix for all rows, or refused
            if weight.per_row:
                graph.refuse("each row of the batch has a matrix of its own")
            made = graph.product(value, (axis,), out, _matrix(weight.get, 0, swapped))
            return Value(np.moveaxis(made.ids, -1, 1) if swapped else made.ids)
        made = graph.heads(value, 0, (axis,), out, _matrices(weight.get, swapped))
        return Value(np.moveaxis(made.ids, -1, 1) if swapped else made.ids)

    def addmm(
        self, node: Node, bias: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1
    ) -> Value:
        made = self.matmul(node, a, b)
        made = made if alpha == 1 else self.scaled(made, alpha)
        return self.elementwise("add", made, bias if beta == 1 else self.scaled(bias, beta))


def _matrix(
    get: Callable[[Any], Tensor], number: int | None = None, turned: bool = False
) -> Callable[[Any], Tensor]:
    """One of several matrices, transposed if ``turned``, as ``[in, out]``."""

    def matrix(run: Any) -> Tensor:
        tensor = get(run) if number is None else get(run)[number]
        tensor = tensor if tensor.dim() > 1 else tensor.unsqueeze(-1)
        return tensor.mT if turned else tensor

    return matrix


def _matrices(get: Callable[[Any], Tensor], turned: bool) -> Callable[[Any], Tensor]:
    return lambda run: get(run).mT if turned else get(run)


_UNARY = {
    A.sigmoid: "sigmoid", A.tanh: "tanh", A.relu: "relu", A.exp: "exp", A.log: "log",
    A.log1p: "log1p", A.expm1: "expm1", A.sqrt: "sqrt", A.rsqrt: "rsqrt", A.abs: "abs",
    A.neg: "neg", A.sign: "sign", A.sgn: "sign", A.reciprocal: "reciprocal", A.silu: "silu",
    A.logical_not: "logical_not", A.bitwise_not: "logical_not",
    A.detach: "stop_gradient", A.sin: "sin", A.cos: "cos", A.erf: "erf",
}  # fmt: skip
_BINARY = {
    A.mul: "mul", A.div: "div", A.maximum: "maximum", A.minimum: "minimum", A.lt: "lt",
    A.le: "le", A.gt: "gt", A.ge: "ge", A.eq: "eq", A.ne: "ne", A.logical_and: "logical_and",
    A.logical_or: "logical_or", A.logical_xor: "logical_xor", A.bitwise_and: "logical_and",
    A.bitwise_or: "logical_or", A.bitwise_xor: "logical_xor",
}  # fmt: skip
CONDITIONS = frozenset(
    "lt le gt ge eq ne logical_and logical_or logical_not logical_xor truth".split()
)
_STRUCTURAL = (
    A.view, A.reshape, A._unsafe_view, A.slice, A.select, A.permute, A.t, A.transpose, A.unsqueeze,
    A.squeeze, A.expand, A.split, A.split_with_sizes, A.unsafe_split, A.unsafe_split_with_sizes,
    A.chunk, A.unsafe_chunk, A.unbind, A.flip, A.repeat, A.roll, A.unflatten, A.movedim,
    A._reshape_alias, A.diagonal, A.repeat_interleave, A.as_strided,
)  # fmt: skip


def _unary(op: str) -> Table:
    return lambda reader, node, value, **_: reader.elementwise(op, value)


def _binary(op: str) -> Table:
    def rule(reader: Reader, node: Node, a: Any, b: Any, **options: Any) -> Any:
        if options.get("rounding_mode") is not None:
            reader.graph.refuse("a division that rounds")
        return reader.elementwise(op, a, b)

    return rule


TABLE |= {packet: _unary(op) for packet, op in _UNARY.items()}
TABLE |= {packet: _binary(op) for packet, op in _BINARY.items()}
TABLE |= dict.fromkeys(_STRUCTURAL, Reader.structural)
TABLE |= dict.fromkeys((A.clone, A.alias, A.lift_fresh, A.contiguous), Reader.identity)
TABLE |= dict.fromkeys((A.cat, A.stack), Reader.joined)
TABLE |= dict.fromkeys((A.slice_scatter, A.select_scatter), Reader.scattered)
TABLE |= dict.fromkeys((A.add, A.sub, A.rsub), Reader.add)
TABLE |= dict.fromkeys((A.clamp, A.clamp_min, A.clamp_max, A.hardtanh), Reader.clamp)
TABLE |= dict.fromkeys((A.sum, A.mean, A.amax, A.amin, A.max, A.min), Reader.reduced)
TABLE |= dict.fromkeys((A.var, A.std, A.var_mean, A.std_mean), Reader.variance)
TABLE |= dict.fromkeys((A.mm, A.bmm, A.mv, A.dot), Reader.matmul)
TABLE |= {
    A.where: Reader.where, A.masked_fill: Reader.masked_fill, A.lerp: Reader.lerp,
    A.pow: Reader.power, A.elu: Reader.elu, A.gelu: Reader.gelu, A.softplus: Reader.softplus,
    A.leaky_relu: Reader.leaky_relu,
    A.hardsigmoid: Reader.hard_sigmoid, A.log_sigmoid_forward: Reader.log_sigmoid,
    A.copy: Reader.copy, A._to_copy: Reader.convert, A.native_layer_norm: Reader.layer_norm,
    A._softmax: Reader.softmax, A.addmm: Reader.addmm, A.cumsum: Reader.cumsum,
    A.logsumexp: Reader.logsumexp,
    A.index: Reader.picked, A.index_select: Reader.picked,
}  # fmt: skip
_AFFINE = {
    *_STRUCTURAL, A.clone, A.alias, A.cat, A.stack, A.add, A.sub, A.rsub, A.neg, A.mul, A.div, A.mm,
    A.addmm, A.bmm, A.mv, A.lerp,
}  # fmt: skip
