"""Steps written in NumPy, recorded by calling them once, and read as a cell."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from anycell.read import Graph, Outer, Reading, Refused, Value, read

PACKAGE = str(Path(__file__).parent.parent)


class Arrays:
    """The functions that a reading calls on arrays."""

    reshape, broadcast, move = np.reshape, np.broadcast_to, np.moveaxis
    zeros, constant, cat = np.zeros, np.asarray, np.concatenate

    @staticmethod
    def cast(array: Any, dtype: Any) -> Any:
        return array.astype(dtype, copy=False)

    @staticmethod
    def take(array: Any, axis: int, start: int, size: int) -> Any:
        return array[(slice(None),) * axis + (slice(start, start + size),)]

    @staticmethod
    def index(array: Any, at: np.ndarray) -> Any:
        neighbours = len(at) > 1 and (np.diff(at) == 1).all()
        return array[..., at[0] : at[-1] + 1] if neighbours else array[..., at]


ELEMENTWISE: dict[Any, str] = {
    np.add: "add", np.subtract: "sub", np.multiply: "mul", np.divide: "div", np.negative: "neg",
    np.positive: "identity", np.exp: "exp", np.log: "log", np.log1p: "log1p", np.expm1: "expm1",
    np.sqrt: "sqrt", np.absolute: "abs", np.sign: "sign", np.square: "square", np.sin: "sin",
    np.cos: "cos", np.tanh: "tanh", np.reciprocal: "reciprocal", np.maximum: "maximum",
    np.minimum: "minimum", np.less: "lt", np.less_equal: "le", np.greater: "gt",
    np.greater_equal: "ge", np.equal: "eq", np.not_equal: "ne", np.logical_and: "logical_and",
    np.logical_or: "logical_or", np.logical_not: "logical_not", np.logical_xor: "logical_xor",
    np.bitwise_and: "logical_and", np.bitwise_or: "logical_or", np.invert: "logical_not",
    np.where: "where",
}  # fmt: skip
CONDITIONS = frozenset("lt le gt ge eq ne logical_and logical_or logical_not logical_xor".split())
# Run as they are, on arrays of ids.
STRUCTURAL = {
    np.reshape, np.transpose, np.moveaxis, np.swapaxes, np.squeeze, np.expand_dims, np.ravel,
    np.broadcast_to, np.split, np.array_split, np.hsplit, np.concatenate, np.hstack, np.stack,
    np.flip, np.repeat, np.tile, np.roll, np.take, np.copy, operator.getitem,
}  # fmt: skip
REDUCED = {np.sum: "sum", np.mean: "sum", np.max: "max", np.amax: "max"}
AFFINE = frozenset("add sub neg mul div identity".split())
METHODS: dict[str, Any] = {
    "reshape": lambda a, *shape, **k: np.reshape(a, shape[0] if len(shape) == 1 else shape, **k),
    "transpose": lambda a, *axes: np.transpose(a, axes or None),
    "clip": np.clip, "copy": np.copy, "dot": np.matmul, "flatten": np.ravel, "max": np.max,
    "mean": np.mean, "ravel": np.ravel, "repeat": np.repeat, "squeeze": np.squeeze, "sum": np.sum,
    "swapaxes": np.swapaxes, "take": np.take, "var": np.var,
}  # fmt: skip


@dataclass(frozen=True)
class Ref:
    """A result in the record of a step, or an array that the step has from elsewhere."""

    number: int
    fixed: bool = False


@dataclass
class Record:
    """One call of a function of NumPy."""

    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    where: str
    parts: list[tuple[tuple[int, ...], Any]]  # shape and dtype of each of several results


@dataclass
class Recording:
    """A step, called once: its inputs, calls, and the arrays that it has from elsewhere."""

    inputs: int  # arrays of x
    states: int
    records: list[Record] = field(default_factory=list)
    fixed: list[np.ndarray] = field(default_factory=list)
    shapes: list[tuple[tuple[int, ...], Any]] = field(default_factory=list)  # of all results

    def key(self, results: Sequence[Ref]) -> str:
        """Text that is equal for the same step, whatever the numbers in its arrays."""
        lines = [f"{self.inputs} {self.states} {self.shapes} {results}"]
        lines += [f"{array.shape} {array.dtype}" for array in self.fixed]
        for record in self.records:
            name = getattr(record.function, "__name__", record.function)
            lines.append(f"{name} {record.arguments} {record.options}")
        return "\n".join(lines)

    def evaluate(self, values: dict[int, Any], wanted: Sequence[Ref]) -> list[Any]:
        """Computes results from others that are known, of one step."""

        def get(ref: Ref) -> Any:
            if ref.fixed:
                return self.fixed[ref.number]
            if ref.number not in values:
                record = self.records[ref.number - self.inputs - self.states]
                arguments = [_mapped(get, argument) for argument in record.arguments]
                values[ref.number] = record.function(*arguments, **record.options)
            return values[ref.number]

        return [get(ref) for ref in wanted]


def _mapped(function: Callable[[Ref], Any], argument: Any) -> Any:
    if isinstance(argument, Ref):
        return function(argument)
    if isinstance(argument, (tuple, list)):
        return type(argument)([_mapped(function, part) for part in argument])
    return argument


def _refs(argument: Any) -> Iterator[Ref]:
    if isinstance(argument, Ref):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for part in argument:
            yield from _refs(part)


class Traced(NDArrayOperatorsMixin):
    """An array of the step that is recorded; ``sample`` is what it is at the first step."""

    def __init__(self, recording: Recording, number: int, sample: Any) -> None:
        self.recording, self.number, self.sample = recording, number, sample

    shape = property(lambda self: self.sample.shape)
    dtype = property(lambda self: self.sample.dtype)
    ndim = property(lambda self: self.sample.ndim)
    size = property(lambda self: self.sample.size)
    T = property(lambda self: _record(np.transpose, (self,), {}))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method == "reduce" and ufunc in (np.add, np.maximum):
            function = np.sum if ufunc is np.add else np.max
            return _record(function, inputs, options)
        if method != "__call__" or options.get("out") is not None:
            _refuse(f"np.{ufunc.__name__}.{method} into an array that exists")
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
            _refuse("a branch on a number of x or of a state", "np.where(condition, a, b)")
        raise ValueError("The truth value of an array with several elements is ambiguous.")

    def __setitem__(self, key: Any, value: Any) -> None:
        _refuse("an edit in place", "compute a new array, by np.where or np.concatenate")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        _refuse("a conversion of x or of a state by a function that is not NumPy's")

    __float__ = __int__ = __index__ = __array__

    def __getattr__(self, name: str) -> Any:
        function = METHODS.get(name)
        if function is None:
            if hasattr(np.ndarray, name):
                _refuse(f"the method {name}() of x or of a state")
            raise AttributeError(name)
        return lambda *args, **kwargs: function(self, *args, **kwargs)

    def astype(self, dtype: Any, **options: Any) -> Any:
        if np.dtype(dtype) == self.dtype:
            return self
        if self.dtype.kind == "b" and np.dtype(dtype).kind == "f":
            return _record(np.where, (self, 1.0, 0.0), {})
        _refuse(f"a conversion from {self.dtype} to {np.dtype(dtype)}")


def place() -> str:
    """The user's file and line that is being run."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE) and "numpy" not in Path(file).parts:
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def _refuse(problem: str, instead: str = "the same in functions of NumPy") -> Any:
    raise Refused(f"{place()}: this step has {problem}. Instead: {instead}.")


def _record(function: Any, args: Any, kwargs: Any) -> Any:
    """Runs a function on the samples, and records the call."""
    if function is np.clip:
        low, high = (*args[1:], kwargs.get("a_min"), kwargs.get("a_max"))[:2]
        value = args[0] if low is None else np.maximum(args[0], low)
        return value if high is None else np.minimum(value, high)
    if function is np.var:
        centred = args[0] - np.mean(*args, **{**kwargs, "keepdims": True})
        return np.mean(centred * centred, *args[1:], **kwargs)
    if function in (np.zeros_like, np.ones_like, np.full_like):
        return function(args[0].sample, *args[1:], **kwargs)
    if function is np.dot:
        function = np.matmul
    recording = next(_traced((args, kwargs))).recording
    samples: list[Any] = []

    def converted(argument: Any) -> Any:
        if isinstance(argument, Traced):
            return Ref(argument.number)
        if isinstance(argument, (tuple, list)):
            return type(argument)([converted(part) for part in argument])
        if isinstance(argument, np.ndarray) and argument.ndim:
            for number, array in enumerate(recording.fixed):
                if array is argument:
                    return Ref(number, True)
            recording.fixed.append(argument)
            return Ref(len(recording.fixed) - 1, True)
        if isinstance(argument, (np.ndarray, np.generic)):
            return argument.item()
        return argument

    def sample(argument: Any) -> Any:
        if isinstance(argument, Traced):
            return argument.sample
        if isinstance(argument, (tuple, list)):
            return type(argument)([sample(part) for part in argument])
        return argument

    if any(isinstance(value, Traced) for value in kwargs.values()):
        _refuse(f"{function.__name__}() with x or a state as a keyword argument")
    samples = function(*sample(args), **kwargs)
    several = samples if isinstance(samples, (list, tuple)) else []
    parts = [(part.shape, part.dtype) for part in several]
    record = Record(function, converted(tuple(args)), dict(kwargs), place(), parts)
    recording.records.append(record)
    number = _append(recording, samples)
    if isinstance(samples, (list, tuple)):
        return [
            _record(operator.getitem, (Traced(recording, number, samples), i), {})
            for i in range(len(samples))
        ]
    return Traced(recording, number, samples)


def _append(recording: Recording, sample: Any) -> int:
    known = None if isinstance(sample, (list, tuple)) else (np.shape(sample), sample.dtype)
    recording.shapes.append(known)  # type: ignore[arg-type]
    return len(recording.shapes) - 1


def _traced(argument: Any) -> Iterator[Traced]:
    if isinstance(argument, Traced):
        yield argument
    elif isinstance(argument, dict):
        yield from _traced(list(argument.values()))
    elif isinstance(argument, (tuple, list)):
        for part in argument:
            yield from _traced(part)


def start(xs: Sequence[np.ndarray], states: Sequence[np.ndarray]) -> tuple[Recording, list[Traced]]:
    """A recording, and the arrays to call the step with: those of x, then the states."""
    recording = Recording(len(xs), len(states))
    return recording, [Traced(recording, _append(recording, a), a) for a in (*xs, *states)]


@dataclass
class Read:
    """A recording that was read, for all recordings of the same key."""

    reading: Reading
    kinds: list[str]  # F, X or S of all results


def read_step(recording: Recording, after: Sequence[Ref], name: str) -> Read:
    """Reads a step, whose new states are ``after``.

    Raises:
        Refused: if it cannot be read.
    """
    return _Reader(recording, after, name).read


class _Reader:
    def __init__(self, recording: Recording, after: Sequence[Ref], name: str) -> None:
        self.recording = recording
        count, states = recording.inputs, recording.states
        shapes = [shape for shape, _ in recording.shapes[count : count + states]]
        batch = {shape[:1] for shape in shapes}
        self.axis = 0 if max(map(len, shapes)) > 1 and len(batch) == 1 else None
        rows = None if self.axis is None else shapes[0][0]
        graph = self.graph = Graph(Arrays, rows)
        self.values: list[Any] = [
            self._outer("X", number, shape, dtype)
            for number, (shape, dtype) in enumerate(recording.shapes[:count])
        ]
        before = [graph.state(shape, self.axis) for shape in shapes]
        self.values += before
        for number, record in enumerate(recording.records, count + states):
            self.values.append(self._result(number, record))
        graph.where = ""
        pairs = [(old, self._value(ref)) for old, ref in zip(before, after, strict=True)]
        kinds = [
            "S" if isinstance(v, (Value, list)) and not isinstance(v, Outer) else "X"
            for v in self.values
        ]
        self.read = Read(read(graph, pairs, name), kinds)

    def _value(self, ref: Any) -> Any:
        if not isinstance(ref, Ref):
            return ref
        if not ref.fixed:
            return self.values[ref.number]
        array = self.recording.fixed[ref.number]
        return Outer("F", array.shape, lambda run: run.fixed[ref.number], array.dtype.kind == "b")

    def _outer(self, kind: str, number: int, shape: tuple[int, ...], dtype: Any) -> Outer:
        return Outer(kind, shape, lambda run: run.moving(number), dtype.kind == "b")

    def _result(self, number: int, record: Record) -> Any:
        graph = self.graph
        graph.where = record.where
        arguments = [_mapped(self._value, argument) for argument in record.arguments]
        if any(isinstance(v, Value) for v in _values(arguments)):  # of kind S
            return self._apply(record, arguments)
        if record.function is operator.getitem and isinstance(arguments[0], list):
            return arguments[0][arguments[1]]
        try:
            units = self._affine(record, arguments)
        except Refused:
            units = None
        known = self.recording.shapes[number]
        if known is None:  # several results
            parts = units if isinstance(units, list) else [None] * len(record.parts)
            return [
                Outer(
                    "X",
                    shape,
                    lambda run, i=i: run.moving(number, i),
                    dtype.kind == "b",
                    units=part,
                )
                for i, ((shape, dtype), part) in enumerate(zip(record.parts, parts, strict=True))
            ]
        outer = self._outer("X", number, *known)
        outer.units = units if isinstance(units, Value) else None
        return outer

    def _affine(self, record: Record, arguments: Sequence[Any]) -> Any:
        """The units of an X value that is affine in others."""
        function = record.function
        if ELEMENTWISE.get(function) not in AFFINE and function not in {*STRUCTURAL, np.matmul}:
            return None

        def based(value: Any) -> Any:
            if isinstance(value, Outer) and value.kind == "X":
                return self.graph.base(value, self.axis)
            if isinstance(value, (tuple, list)):
                return type(value)([based(part) for part in value])
            return value

        return self._apply(record, [based(argument) for argument in arguments])

    def _apply(self, record: Record, arguments: Sequence[Any]) -> Any:
        graph, function, options = self.graph, record.function, record.options
        if function is operator.getitem and isinstance(arguments[0], list):
            return arguments[0][arguments[1]]
        if function in ELEMENTWISE:
            op = ELEMENTWISE[function]
            return graph.elementwise(op, *arguments, boolean=op in CONDITIONS)
        if function is np.power:
            return self._power(*arguments)
        if function in STRUCTURAL:
            operands = list(_values(arguments))

            def run(*ids: np.ndarray) -> Any:
                left = iter(ids)

                def placed(argument: Any) -> Any:
                    if isinstance(argument, (Value, Outer)):
                        return next(left)
                    if isinstance(argument, (tuple, list)):
                        return type(argument)([placed(part) for part in argument])
                    return argument

                return function(*[placed(argument) for argument in arguments], **options)

            return graph.structural(run, *operands)
        if function in REDUCED:
            return self._reduce(function, *arguments, **options)
        if function is np.matmul:
            return self._matmul(*arguments)
        return graph.refuse(f"this is np.{function.__name__} of a value that depends on a state")

    def _power(self, base: Any, exponent: Any) -> Any:
        if not isinstance(exponent, (int, float)):
            self.graph.refuse("this is a power whose exponent is no number", "anycell.pow in @cell")
        whole = int(exponent)
        if whole == exponent and 1 <= whole <= 16:
            result = base
            for _ in range(whole - 1):
                result = self.graph.elementwise("mul", result, base)
            return result
        return self.graph.elementwise("pow", base, float(exponent))

    def _reduce(
        self, function: Any, value: Any, axis: Any = None, *, keepdims: bool = False, **rest: Any
    ) -> Any:
        if any(option is not None for option in rest.values()):
            self.graph.refuse(f"this is np.{function.__name__} with the options {rest}")
        axes = range(len(value.shape)) if axis is None else np.atleast_1d(axis).tolist()
        total = self.graph.reduce(REDUCED[function], value, tuple(axes), keepdims)
        if function is not np.mean:
            return total
        count = int(np.prod([value.shape[a] for a in axes]))
        return self.graph.elementwise("mul", total, 1.0 / count)

    def _matmul(self, left: Any, right: Any) -> Any:
        graph, swapped = self.graph, not isinstance(left, Value)
        value, weight = (right, left) if swapped else (left, right)
        if not (isinstance(weight, Outer) and weight.kind == "F" and len(weight.shape) == 2):
            graph.refuse(
                "this multiplies a state by a matrix that depends on x or on a state, or has "
                "other than two axes", "multiply by a matrix of weights",
            )  # fmt: skip
        if swapped:
            axis = len(value.shape) - 2 if len(value.shape) > 1 else 0
            made = graph.product(value, (axis,), weight.shape[:1], lambda run: weight.get(run).T)
            return Value(np.moveaxis(made.ids, -1, axis), made.boolean)
        axis = len(value.shape) - 1
        return graph.product(value, (axis,), weight.shape[1:], weight.get)


def _values(argument: Any) -> Iterator[Any]:
    if isinstance(argument, (Value, Outer)):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for part in argument:
            yield from _values(part)
