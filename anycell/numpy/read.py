"""Steps written in NumPy, recorded by calling them once, and read as a cell."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from anycell import read
from anycell.read import places, tape
from anycell.read.body import Body, Equation, Rule, Values, Variable, row
from anycell.read.reading import Reading
from anycell.read.trees import leaves, mapped
from anycell.read.units import Refused, Value

places.skip(np)


class Arrays(read.Arrays):
    """The functions that a reading calls on arrays."""

    reshape, broadcast, transpose = np.reshape, np.broadcast_to, np.transpose
    zeros, constant, cat = np.zeros, np.asarray, np.concatenate

    @staticmethod
    def cast(array: Any, dtype: Any) -> Any:
        return array.astype(dtype, copy=False)


# Run as they are, on arrays of ids.
STRUCTURAL = {
    np.reshape, np.transpose, np.moveaxis, np.swapaxes, np.squeeze, np.expand_dims, np.ravel,
    np.broadcast_to, np.split, np.array_split, np.hsplit, np.concatenate, np.hstack, np.stack,
    np.flip, np.repeat, np.tile, np.roll, np.take, np.copy, operator.getitem,
}  # fmt: skip
_METHODS = "clip copy cumsum dot max mean min ravel repeat squeeze std sum swapaxes take var"
METHODS: dict[str, Any] = {name: getattr(np, name) for name in _METHODS.split()} | {
    "reshape": lambda a, *shape, **k: np.reshape(a, shape[0] if len(shape) == 1 else shape, **k),
    "transpose": lambda a, *axes: np.transpose(a, axes or None), "flatten": np.ravel,
}  # fmt: skip
_LISTS = np.split, np.array_split, np.hsplit  # which return lists, also of one array
_OF_SHAPES = np.zeros_like, np.ones_like, np.full_like, np.shape, np.ndim, np.size
_REDUCED = {np.add: np.sum, np.maximum: np.max, np.minimum: np.min}  # by ``ufunc.reduce``


@dataclass(eq=False)
class Recording(Body):
    """A step, called once.

    Attributes:
        arrays: those that the step has from elsewhere, in the order of ``fixed``.
        refusal: of what the step has done, which it may have caught.
        reading: of this recording, and so of all with the same lines.
    """

    arrays: list[np.ndarray] = field(default_factory=list)
    refusal: Refused | None = None
    reading: Reading = field(init=False)

    @classmethod
    def of_step(
        cls, xs: Sequence[np.ndarray], states: Sequence[np.ndarray]
    ) -> tuple[Recording, list[Traced]]:
        """A recording, and the arrays to call the step with: those of x, then the states."""
        made = cls([], list(map(_variable, xs)), list(map(_variable, states)), [], [], [])
        return made, made.traced([*made.x, *made.states], [*xs, *states])

    def traced(self, variables: Sequence[Variable], arrays: Sequence[Any]) -> list[Traced]:
        """The stand-ins of arrays."""
        return [Traced(self, v, array) for v, array in zip(variables, arrays, strict=True)]

    def of(self, array: np.ndarray) -> Variable:
        """An array that the step has from elsewhere."""
        for v, other in zip(self.fixed, self.arrays, strict=True):
            if other is array:
                return v
        self.arrays.append(array)
        self.fixed.append(_variable(array))
        return self.fixed[-1]


def _variable(array: Any) -> Variable:
    return Variable(array.shape, _name(array.dtype))


_name = functools.cache(operator.attrgetter("name"))  # NumPy spells it anew each time


def execute(equation: Equation, values: Values) -> Sequence[Any]:
    """The results of a call of NumPy."""

    def get(leaf: Any) -> Any:
        return values[leaf] if isinstance(leaf, Variable) else leaf

    args, options = mapped(get, (equation.arguments, equation.options))
    made = equation.source(*args, **options)
    made = made if isinstance(made, (list, tuple)) else [made]
    if [np.shape(part) for part in made] != [v.shape for v in equation.results]:
        raise Refused(f"the shape of {equation.name} depends on numbers", "", equation.where)
    return made


class Traced(NDArrayOperatorsMixin):
    """An array of the step that is recorded; ``sample`` is what it is at the first step."""

    def __init__(self, recording: Recording, variable: Variable, sample: Any) -> None:
        if isinstance(sample, np.ndarray):  # which is the user's own: nothing may write into it
            sample = sample.view()
            sample.flags.writeable = False
        self.recording, self.variable, self.sample = recording, variable, sample

    __class__ = property(lambda self: np.ndarray)  # for isinstance
    shape = property(lambda self: self.sample.shape)
    dtype = property(lambda self: self.sample.dtype)
    ndim = property(lambda self: self.sample.ndim)
    size = property(lambda self: self.sample.size)
    T = property(lambda self: _record(np.transpose, (self,), {}))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method == "reduce" and ufunc in _REDUCED:
            return _record(_REDUCED[ufunc], inputs, options)
        if method != "__call__" or options.get("out") is not None:
            self._refuse(f"np.{ufunc.__name__}.{method} into an array that exists")
        return _record(ufunc, inputs, options)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _record(function, args, kwargs)

    def __getitem__(self, key: Any) -> Any:
        return _record(operator.getitem, (self, key), {})

    def __len__(self) -> int:
        return len(self.sample)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        if self.sample.size == 1:
            self._refuse("a branch on a number of x or of a state", "np.where(condition, a, b)")
        raise ValueError("The truth value of an array with several elements is ambiguous.")

    def __setitem__(self, key: Any, value: Any) -> None:
        self._refuse("an edit in place", "compute a new array, by np.where or np.concatenate")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse(
            "x or a state written into an array that exists, or given to a function that is not "
            "NumPy's", "new arrays, by functions of NumPy"
        )  # fmt: skip

    __float__ = __int__ = __index__ = __hash__ = __str__ = __format__ = __array__

    def __getattr__(self, name: str) -> Any:
        function = METHODS.get(name)
        if name.startswith("__array"):  # NumPy asks for an array's memory
            self.__array__()
        if function is None:
            if hasattr(np.ndarray, name) or hasattr(np.float64, name):
                self._refuse(f"the method {name}() of x or of a state")
            raise AttributeError(name)
        return lambda *args, **kwargs: function(self, *args, **kwargs)

    def astype(self, dtype: Any, **options: Any) -> Any:
        if np.dtype(dtype) == self.dtype:
            return self
        if type(self.recording) is Taped:
            return _record(np.ndarray.astype, (self, dtype), {})
        if self.dtype.kind == "b" and np.dtype(dtype).kind == "f":
            return _record(np.where, (self, 1.0, 0.0), {})
        self._refuse(f"a conversion from {self.dtype} to {np.dtype(dtype)}")

    def _refuse(self, problem: str, instead: str = "the same in functions of NumPy") -> Any:
        refusal = Refused(f"this step has {problem}", instead, places.here())
        self.recording.refusal = self.recording.refusal or refusal
        raise refusal


def _record(function: Any, args: Any, kwargs: Any) -> Any:
    """Runs a function on the samples, and records the call."""
    if function in _OF_SHAPES:
        return function(args[0].sample, *args[1:], **kwargs)
    recording = next(leaves((args, kwargs), Traced)).recording

    def converted(leaf: Any) -> Any:
        if isinstance(leaf, Traced):
            return leaf.variable
        if isinstance(leaf, np.ndarray) and leaf.ndim:
            places = function in STRUCTURAL and leaf.dtype.kind in "iub"
            return leaf if places else recording.of(leaf)
        return leaf.item() if isinstance(leaf, (np.ndarray, np.generic)) else leaf

    def sample(leaf: Any) -> Any:
        return leaf.sample if isinstance(leaf, Traced) else leaf

    positional, named = mapped(sample, (tuple(args), kwargs))
    samples = function(*positional, **named)
    several = isinstance(samples, (list, tuple))
    parts = list(samples) if several else [samples]
    name = f"np.{getattr(function, '__name__', function)}"
    arguments, options = mapped(converted, (tuple(args), kwargs))
    results = list(map(_variable, parts))
    recording.equations.append(
        Equation(function, arguments, options, results, places.here(), name, function)
    )
    made = recording.traced(results, parts)
    return made if several else made[0]


def shaped(equation: Equation) -> bool:
    """Whether the shape of the result follows from those of the operands."""
    op, args = equation.op, equation.arguments
    if op is operator.getitem:
        return not any(v.boolean for v in leaves(args[1], Variable))
    arrays = args[1:2] if op is np.repeat else ()
    return op in TABLE and (op is not np.where or len(args) > 2) and not [*leaves(arrays, Variable)]


class Taped(Recording):
    """The work of a call around its kernel, recorded for a ``Tape``.

    Args:
        arrays: of the call, or made by its kernel.
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        super().__init__(list(map(_variable, arrays)), [], [], [], [], [])
        self.stand_ins = self.traced(self.fixed, arrays)

    def of(self, array: np.ndarray) -> Variable:
        variable = _variable(array)
        variable.constant = array
        return variable


def _ordered(node: Equation) -> bool:
    """Whether the result has the numbers of its only operand, in their order."""
    if len(node.operands) != 1 or math.prod(node.operands[0].shape) != math.prod(
        node.results[0].shape
    ):
        return False
    if node.source is operator.getitem:
        keys = node.arguments[1] if type(node.arguments[1]) is tuple else node.arguments[1:]
        return all(k is None or type(k) is int or getattr(k, "step", 0) is None for k in keys)
    return node.source in (np.reshape, np.broadcast_to)


class Tape(tape.Tape):
    """The tape of a call of NumPy."""

    def _fold(self, node: Equation, results: set[Variable]) -> None:
        before = made = node.results[0]
        while before.equation is not None and _ordered(before.equation):
            (before,) = before.equation.operands
            if before.shape == made.shape:
                self._alias[made] = self._real(before)
                return

    def _single(self, node: Equation) -> bool:
        return super()._single(node) and node.source not in _LISTS


# -- rules -----------------------------------------------------------------------------------------


def _reduced(name: str) -> Rule:
    def rule(
        reader: Reader, value: Any, axis: Any = None, *, keepdims: Any = False, ddof: float = 0,
        **rest: Any,
    ) -> Any:  # fmt: skip
        if any(option is not None for option in rest.values()):
            reader.graph.refuse(f"this is {reader.equation.name} with the options {rest}")
        less = {"less": ddof} if ddof else {}
        return getattr(reader, name)(value, axis, bool(keepdims), **less)

    return rule


def _std(reader: Reader, *arguments: Any, **options: Any) -> Any:
    variance: Any = TABLE[np.var]
    return reader.op("sqrt", variance(reader, *arguments, **options))


def _clip(
    reader: Reader, value: Any, low: Any = None, high: Any = None, a_min: Any = None,
    a_max: Any = None, **_: Any,
) -> Any:  # fmt: skip
    return reader.clamp(value, a_min if low is None else low, a_max if high is None else high)


def _cumsum(reader: Reader, value: Value, axis: int | None = None, **_: Any) -> Any:
    if axis is None:
        reader.graph.refuse("this is a cumsum of all axes", "axis=-1")
    return reader.cumsum(value, axis)


def _einsum(reader: Reader, equation: str, *operands: Any, **_: Any) -> Any:
    if len(operands) != 2 or "->" not in equation or "." in equation:
        reader.graph.refuse(f"this is einsum({equation!r})", "products of two arrays, 'ij,jk->ik'")
    return reader.einsum(equation, *operands)


# Those that have their names in the language.
_OPS = (
    "add exp log log1p expm1 sqrt sign square sin cos tanh reciprocal maximum minimum logical_and "
    "logical_or logical_not logical_xor"
)
TABLE: dict[Any, Rule] = dict.fromkeys(STRUCTURAL, read.Reader.moved)
TABLE |= {getattr(np, name): name for name in _OPS.split()}
TABLE |= {
    np.subtract: "sub", np.multiply: "mul", np.divide: "div", np.negative: "neg",
    np.positive: "identity", np.absolute: "abs", np.less: "lt", np.less_equal: "le",
    np.greater: "gt", np.greater_equal: "ge", np.equal: "eq", np.not_equal: "ne",
    np.bitwise_and: "logical_and", np.bitwise_or: "logical_or", np.invert: "logical_not",
    np.bitwise_xor: "logical_xor",
}  # fmt: skip
TABLE |= {
    np.clip: _clip, np.cumsum: _cumsum, np.dot: row("matmul"), np.einsum: _einsum,
    np.isfinite: row("is_finite"), np.matmul: row("matmul"), np.max: _reduced("max"),
    np.mean: _reduced("mean"), np.min: _reduced("min"), np.power: row("power"), np.std: _std,
    np.sum: _reduced("sum"), np.var: _reduced("variance"), np.where: row("where"),
    np.exp2: lambda reader, value: reader.power(2.0, value),
}  # fmt: skip


class Reader(read.Reader):
    """Reads the calls of NumPy of a step."""

    table = TABLE


def read_step(recording: Recording, name: str) -> None:
    """Adds the reading of a step to its recording.

    Raises:
        Refused: if it cannot be read.
    """
    recording.sort(k for k, v in enumerate(recording.states) if not v.floating)
    states = [recording.states[k] for k in recording.moving]
    batch = {v.shape[:1] for v in states}
    axis = 0 if len(batch) == 1 and max(len(v.shape) for v in states) > 1 else None
    dtype = next(v.dtype for v in recording.states if v.floating)
    reader = Reader(recording, Arrays, axis, dtype)
    recording.reading = reader.read([""] * len(recording.states), name)
