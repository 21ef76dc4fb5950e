"""Passes of layers in what XLA compiles for TensorFlow, as by ``jit_compile=True``.

TensorFlow's operation ``XlaCallModule`` takes the text of a program. Ours is one call of the
foreign function that also serves JAX, ``anycell/engines/cpu/xla.py``. On a card, where the
operation also works in eager mode and in graphs that XLA does not compile, it is the one of
``anycell/engines/gpu/xla.py``. TensorFlow has no public function that registers a foreign function.
So ``obstacle`` and ``doubt`` try once in a process that it works.

A graph may not know how many steps and rows there are, and is compiled for any. So passes are
drafted for numbers that stand for unknown sizes, and once more when the graph runs. The text
computes the shapes of results from the sizes of x.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.python.xla import call_module

from anycell import cells
from anycell.engines.cpu import xla
from anycell.engines.gpu import xla as of_card
from anycell.keras.composite import composite
from anycell.keras.tensorflow.framework import NAMESPACE, sizes_of
from anycell.lang.cell import Cell
from anycell.layer import card, foreign
from anycell.layer.card import TracedDevice
from anycell.layer.foreign import Seed, TracedFramework
from anycell.layer.launches import SEED, DeviceRecipe
from anycell.layer.recipe import Recipe, dense
from anycell.layer.restarts import restarts
from anycell.layer.signature import Shape
from anycell.numpy.check import numpy_dtype
from anycell.plan import Layer, Options

Tensor = Any
# The numbers that stand for unknown steps and rows, and others to see which sizes depend on which.
STEPS, ROWS = (5, 7), (65, 100)
# By the pair of numbers that it has for these, the name of a size in the text of the program.
SIZES = {
    STEPS: "%steps", (6, 8): "%slots", (7, 9): "%more", ROWS: "%rows", (33, 34): "%groups"
}  # fmt: skip
# The names' values: slots of states, one or two more than steps; and as ``heuristics.row_group``.
COMPUTED = """
    %steps = "stablehlo.get_dimension_size"(%0) {{dimension = 0 : i64}} : ({x}) -> tensor<i32>
    %rows = "stablehlo.get_dimension_size"(%0) {{dimension = 1 : i64}} : ({x}) -> tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %group = stablehlo.constant dense<32> : tensor<i32>
    %slots = stablehlo.add %steps, %one : tensor<i32>
    %more = stablehlo.add %slots, %one : tensor<i32>
    %whole = stablehlo.divide %rows, %group : tensor<i32>
    %size = stablehlo.maximum %whole, %one : tensor<i32>
    %least = stablehlo.subtract %size, %one : tensor<i32>
    %ahead = stablehlo.add %rows, %least : tensor<i32>
    %groups = stablehlo.divide %ahead, %size : tensor<i32>"""
TYPES = {"bfloat16": "bf16", "uint8": "ui8", "uint32": "ui32", "int8": "i8"}  # others: f and bits
# Errors of XLA elsewhere, of TensorFlow Lite and TensorFlow Serving quote this name.
TARGET = "anycell.keras.step_by_step_traces_it_without"


class Place(NamedTuple):
    """The devices of a kind, for which XLA compiles.

    Attributes:
        device: TensorFlow's name of the first one.
        module: the kind as programs name it.
        platform: the kind as foreign functions are registered for it.
        target: the name of the foreign function.
    """

    device: str
    module: str
    platform: str
    target: str = TARGET


CPU = Place("CPU:0", "CPU", "Host")
CARD = Place("GPU:0", "CUDA", card.PLATFORM)


class Buffer:
    """An array of a graph, as passes handle arrays.

    Attributes:
        tensor: TensorFlow's; or NumPy's, until a tensor is written to it.
        shape: with numbers in place of sizes that the graph does not know.
        turned: whether the last two axes are those of ``tensor`` in the other order.
    """

    def __init__(self, tensor: Any, shape: Sequence[int] | None = None, turned: bool = False):
        self.tensor, self.turned, dtype = tensor, turned, tensor.dtype
        self.shape: Shape = tuple(tensor.shape if shape is None else shape)
        self.dtype = np.dtype(getattr(dtype, "as_numpy_dtype", dtype))

    @property
    def T(self) -> Buffer:
        """The transpose of a matrix."""
        return self.swapaxes(-1, -2)

    def swapaxes(self, *last: int) -> Buffer:
        """The array with its last two axes swapped."""
        return Buffer(self.tensor, _swapped(self.shape), not self.turned)

    @property
    def plain(self) -> Tensor:
        """The tensor of this shape."""
        return tf.linalg.matrix_transpose(self.tensor) if self.turned else self.tensor

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.tensor

    def reshape(self, _: int, width: int) -> Buffer:
        """The array as a matrix with rows of that width."""
        rows = math.prod(self.shape) // max(1, width)
        return Buffer(tf.reshape(self.plain, [-1, width]), (rows, width))

    def __getitem__(self, index: Any) -> Buffer:
        if index is None:
            return Buffer(self.tensor[None], (1, *self.shape))
        size, *others = self.shape
        if isinstance(index, tuple):  # columns of a matrix
            columns = self.plain[index]
            return Buffer(columns, (size, columns.shape[1]))
        if isinstance(index, int):
            return Buffer(self.tensor[index], others)
        start, stop, _ = index.indices(size)
        part = self.tensor[start : stop - size or None]  # from the end, which the graph will know
        return Buffer(part, (stop - start, *others))

    def __setitem__(self, index: slice, value: Any) -> None:
        start, stop, _ = index.indices(self.shape[0])
        if isinstance(value, Buffer) and stop - start == self.shape[0]:
            self.tensor = value.plain
        elif isinstance(value, Buffer):
            self.tensor = tf.concat([self.tensor[:start], value.tensor, self.tensor[stop:]], 0)
        else:
            self.tensor[index] = value

    def __add__(self, other: Buffer) -> Buffer:
        return Buffer(self.tensor + other.tensor, self.shape)

    def sum(self, axis: int) -> Buffer:
        """The sum over an axis, the first one."""
        return Buffer(tf.reduce_sum(self.tensor, axis), self.shape[1:])

    def astype(self, dtype: Any) -> Buffer:
        """The array in another dtype."""
        return Buffer(tf.cast(self.tensor, dtype), self.shape, self.turned)


def _swapped(shape: Shape) -> Shape:
    return (*shape[:-2], shape[-1], shape[-2])


class Spec(NamedTuple):
    """A description of an array, without a tensor.

    Attributes:
        shape: of the tensor; with numbers in place of sizes that the graph does not know, which
            are ``open``.
    """

    shape: Shape
    open: tuple[bool, ...]
    dtype: Any
    turned: bool

    @classmethod
    def of(cls, array: Buffer) -> Spec:
        whole = _swapped(array.shape) if array.turned else array.shape
        return cls(whole, tuple(n is None for n in array.tensor.shape), array.dtype, array.turned)

    def stand_in(self, sizes: Mapping[int, int]) -> Buffer:
        """A buffer of no memory with these sizes in place of the open ones."""
        pairs = zip(self.shape, self.open, strict=True)
        buffer = _empty([sizes[n] if unknown else n for n, unknown in pairs], self.dtype)
        return buffer.T if self.turned else buffer


def _empty(shape: Sequence[int], dtype: Any) -> Buffer:
    return Buffer(np.broadcast_to(np.zeros((), dtype), shape))


class Form(NamedTuple):
    """A pass in programs.

    Attributes:
        attribute: of the call, see ``xla.FORM``.
        shapes, dtypes: of the results.
        sized: the shapes with names in place of numbers that stand for sizes.
    """

    attribute: tuple[int, ...]
    shapes: tuple[Shape, ...]
    sized: tuple[Any, ...]
    dtypes: tuple[Any, ...]


class Xla(TracedFramework):
    """The tensors of one dtype of a graph that XLA compiles."""

    kind, xp, buffer = Buffer, NAMESPACE, Buffer
    dtype_named = staticmethod(numpy_dtype)

    def as_flags(self, array: Buffer) -> Buffer | None:
        return array.astype(np.uint8)

    def restarts(self, resets: Buffer, mask: Buffer | None, reverse: Sequence[bool]) -> Buffer:
        flags = resets.tensor, None if mask is None else mask.tensor
        ways = tf.stack([tf.cast(restarts(*flags, way), tf.uint8) for way in reverse])
        return Buffer(ways, (len(reverse), *resets.shape))

    def narrow(self, array: Buffer) -> Buffer:
        return array.astype(self.dtype)

    def strides(self, array: Buffer, /) -> Shape:
        return _swapped(dense(_swapped(array.shape))) if array.turned else dense(array.shape)

    @property
    def place(self) -> Place:
        """The place where passes run."""
        return CPU

    def results(self, recipe: Any) -> Sequence[tuple[Shape, Any]]:
        """The shapes and dtypes of the arrays that a pass makes."""
        return foreign.results(recipe)

    def record(self, recipe: Any, stream: int) -> Any:
        """Describes a pass for the foreign function."""
        return foreign.record(recipe, stream)

    def trace(self, recipe: Recipe, given: list[Buffer], options: Options) -> list[Buffer]:
        """Puts a pass into the graph; see ``Framework``."""
        operands = [array.tensor for array in given]
        if isinstance(options.seed, Seed):
            operands.append(tf.concat([options.seed.words, [0]], 0))
        named = dict(zip(recipe.names, given, strict=True))
        return self.call(recipe, named, operands, options.stream)

    def call(
        self, recipe: Any, given: Mapping[str, Buffer], operands: Sequence[Tensor], stream: int
    ) -> list[Buffer]:
        """The results of the call that plays a recipe.

        Args:
            given: the arrays for which it was drafted.
            operands: of the call; the first two axes of the first one are steps and rows.
        """
        specs = tuple((name, Spec.of(array)) for name, array in given.items())
        form = _form(self, recipe, specs, stream)
        types = tuple(_type(tensor.shape, tensor.dtype.name) for tensor in operands)
        made = call_module(
            operands,
            version=9,
            module=_text(form.attribute, types, form.sized, form.dtypes, self.place.target),
            Sout=[[n if isinstance(n, int) else None for n in shape] for shape in form.sized],
            Tout=[tf.as_dtype(dtype) for dtype in form.dtypes],
            platforms=[self.place.module],
            function_list=[],
            disabled_checks=[],
        )
        return [Buffer(tensor, shape) for tensor, shape in zip(made, form.shapes, strict=True)]


@functools.lru_cache(maxsize=512)
def _form(host: Xla, recipe: Any, specs: Sequence[tuple[str, Spec]], stream: int) -> Form:
    """The form of a pass, drafted for arrays like these."""
    again = recipe.again
    shapes, dtypes = zip(*host.results(recipe), strict=True)

    def drafted(sizes: Mapping[int, int]) -> Any:
        return again({name: spec.stand_in(sizes) for name, spec in specs}).recipe

    def record(given: xla.Buffers, made: xla.Buffers) -> Any:
        steps, rows = given[0][:2]
        first = STEPS[0]
        sizes = {first: steps, first + 1: steps + 1, first + 2: steps + 2, ROWS[0]: rows}
        one = drafted(sizes)
        assert [shape for shape, _ in host.results(one)] == list(made)
        return host.record(one, stream)

    others = shapes
    if any(unknown for _, spec in specs for unknown in spec.open):
        others = tuple(shape for shape, _ in host.results(drafted(dict([*SIZES]))))
    sized = tuple(
        tuple(n if n == m else SIZES[n, m] for n, m in zip(*pair, strict=True))
        for pair in zip(shapes, others, strict=True)
    )
    return Form(tuple(xla.process().form(record).tolist()), shapes, sized, dtypes)


class XlaCard(TracedDevice, Xla):
    """The tensors of one dtype on a card, in eager mode or in a graph."""

    @property
    def place(self) -> Place:
        return CARD

    def tf32(self, cell: Cell) -> bool:
        """Whether TensorFlow's own matmuls may round float32 to TF32, as they do by default."""
        return self.dtype == np.float32 and bool(
            tf.config.experimental.tensor_float_32_execution_enabled()
        )

    def template(self, shape: Shape, wide: bool = False) -> Any:
        return _empty(shape, (self.wide if wide else self).dtype)

    def results(self, recipe: DeviceRecipe) -> Sequence[tuple[Shape, Any]]:
        return [(one.shape, one.dtype) for one in recipe.templates]

    def record(self, recipe: DeviceRecipe, stream: int) -> Any:
        return np.frombuffer(card.record(recipe).numbers, np.int64)

    def part(self, array: Buffer, shape: Shape, strides: Shape, offset: int) -> Buffer:
        """A part along the first axis, or all of the array with one more axis."""
        if len(shape) > len(array.shape):
            return array[None]
        assert shape[1:] == array.shape[1:]
        first = offset // max(1, math.prod(shape[1:]))
        return array[first : first + shape[0]]

    def trace(  # type: ignore[override]
        self, recipe: DeviceRecipe, given: Mapping[str, Buffer], options: Options
    ) -> list[Buffer]:
        card.played(recipe)  # refuses a pass that is more than launches
        named = dict(given)
        if isinstance(options.seed, Seed):
            words = tf.concat([options.seed.words, [2 * options.stream]], 0)
            named[SEED] = Buffer(words)
        operands = [named[name] for name in recipe.names]
        operands += [Buffer(tf.constant(values)) for values in recipe.constants]
        tensors = [array.tensor for array in (given["x"], *operands)]
        return [*operands, *self.call(recipe, given, tensors, options.stream)]

    # -- by TensorFlow, outside of a pass ----------------------------------------------------------

    def product(self, a: Buffer, b: Buffer) -> Buffer:
        rows = a.reshape(-1, a.shape[-1]) if len(a.shape) > 2 else a
        turned = {"transpose_a": rows.turned, "transpose_b": b.turned}
        made = tf.matmul(rows.tensor, b.tensor, **turned)
        if len(a.shape) > 2:
            lead = sizes_of(a.tensor, len(a.shape) - 1)
            made = tf.reshape(made, [*lead, b.shape[-1]])
        return Buffer(made, (*a.shape[:-1], b.shape[-1]))

    def row_sum(self, array: Buffer) -> Buffer:
        return array.astype(np.float32).sum(0)

    def add_blocks(
        self, d: Buffer, operand: Buffer, weight: Buffer, heads: int, first: int
    ) -> None:
        parts = [tf.reshape(a.plain, [-1, heads, a.shape[-1] // heads]) for a in (d, operand)]
        whole = tf.reshape(weight.tensor, [heads, -1, weight.shape[-1]])
        blocks = tf.cast(tf.einsum("nho,nhi->hoi", *parts), whole.dtype)
        end = first + blocks.shape[1]
        rows = whole[:, :first], whole[:, first:end] + blocks, whole[:, end:]
        weight[:] = Buffer(tf.reshape(tf.concat(rows, 1), weight.shape))

    def zeroed(self, x: Buffer, mask: Buffer) -> Buffer:
        there = tf.cast(mask.tensor, tf.bool)[..., None]
        return Buffer(tf.where(there, x.tensor, tf.zeros((), x.tensor.dtype)), x.shape)

    def stand_in(self, x: Buffer, shape: Shape) -> Buffer:
        return Buffer(x.tensor, shape)


def _type(shape: Sequence[int | str | None], dtype: str) -> str:
    sizes = "".join(f"{n}x" if isinstance(n, int) else "?x" for n in shape)
    return f"tensor<{sizes}{TYPES.get(dtype, dtype.replace('float', 'f'))}>"


@functools.lru_cache(maxsize=512)
def _text(
    form: Sequence[int], given: Sequence[str], shapes: Sequence[Shape], dtypes: Sequence[Any],
    target: str,
) -> bytes:  # fmt: skip
    """The program that calls the handler.

    Args:
        form: the attribute of the call.
        target: the handler's name.
        given: the types of the arguments.
        shapes, dtypes: of the results, with names in place of sizes that are not known.
    """
    made = [_type(*result) for result in zip(shapes, map(str, dtypes), strict=True)]
    lines, operands, types = list[str](), [f"%{i}" for i in range(len(given))], list(given)
    for i, shape in enumerate(shapes):  # XLA wants all of them
        for k, n in enumerate(shape):
            lines.append(
                f"%s{i}_{k} = stablehlo.constant dense<{n}> : tensor<1xi32>"
                if isinstance(n, int)
                else f"%s{i}_{k} = stablehlo.reshape {n} : (tensor<i32>) -> tensor<1xi32>"
            )
        parts = ", ".join(f"%s{i}_{k}" for k in range(len(shape)))
        of_parts = ", ".join(["tensor<1xi32>"] * len(shape))
        size = f"tensor<{len(shape)}xi32>"
        lines.append(f"%s{i} = stablehlo.concatenate {parts}, dim = 0 : ({of_parts}) -> {size}")
        operands.append(f"%s{i}")
        types.append(size)
    at = f"dense<{[*range(len(given), len(types))]}> : tensor<{len(made)}xi64>"
    inputs = ", ".join(f"%{i}: {kind}" for i, kind in enumerate(given))
    outputs, results = ", ".join(made), ", ".join(f"%r#{i}" for i in range(len(made)))
    return f"""module @anycell attributes {{jax.uses_shape_polymorphism = true}} {{
  func.func public @main({inputs}) -> ({outputs}) {{
    {COMPUTED.format(x=given[0]).strip()}
    {f"{chr(10)}    ".join(lines)}
    %r:{len(made)} = "stablehlo.custom_call"({", ".join(operands)}) {{
      api_version = 4 : i32, backend_config = {{recipe = array<i64: {form[0]}, {form[1]}>}},
      call_target_name = "{target}", operand_layouts = [{_layouts(types)}],
      result_layouts = [{_layouts(made)}], indices_of_shape_operands = {at}
    }} : ({", ".join(types)}) -> ({outputs})
    return {results} : {outputs}
  }}
}}""".encode()


def _layouts(types: Sequence[str]) -> str:
    """Dense rows for arrays of these types."""
    axes = [[*reversed(range(kind.count("x")))] for kind in types]
    return ", ".join(f"dense<{one}> : tensor<{len(one)}xindex>" for one in axes)


def seed(drawn: Buffer) -> Seed:
    """The seed of ``keras.call.lowered``, from two numbers that only the graph knows."""
    low, high = tf.unstack(tf.cast(drawn.tensor, tf.int64))
    return Seed.of(tf.bitcast(low + high * 2**31, tf.uint32))


def run(
    compute: Callable[..., list[Any]],
    tensors: Sequence[Tensor],
    leading: Callable[[int, int], Sequence[Sequence[int]]],
) -> list[Tensor]:
    """Puts ``compute``, a function of passes on arrays, into the graph.

    Args:
        tensors: x first.
        leading: returns the sizes of the tensors' first axes, from numbers of steps and rows.
    """
    tensors, first = [*map(tf.convert_to_tensor, tensors)], leading(STEPS[0], ROWS[0])
    first = [n if t.shape.rank > 1 else () for t, n in zip(tensors, first, strict=False)]
    known = {
        number: size
        for tensor, numbers in zip(tensors, first, strict=False)
        for number, size in zip(numbers, tensor.shape, strict=False)
        if size is not None
    }
    if not {STEPS[0], ROWS[0]}.issubset(known):
        steps, rows = tf.unstack(tf.shape(tensors[0])[:2])
        known = {STEPS[0]: steps, ROWS[0]: rows} | known
    steps = known[STEPS[0]]
    sizes = known | {STEPS[0] + 1: steps + 1, STEPS[0] + 2: steps + 2}
    arrays = []
    for tensor, numbers in zip(tensors, first, strict=False):
        whole = tensor.shape.as_list()
        if None in whole:  # kernels check no bounds: what has not the sizes of x stops here
            shape = [sizes[numbers[k]] if n is None else n for k, n in enumerate(whole)]
            tensor = tf.reshape(tensor, shape)
            whole = [numbers[k] if n is None else n for k, n in enumerate(tensor.shape)]
        arrays.append(Buffer(tensor, whole))
    # TensorFlow looks for the gradient of the operation in vectorized loops, and finds none.
    return [tf.stop_gradient(array.plain) for array in compute(*arrays)]


# -- whether the road works ------------------------------------------------------------------------

SYMBOLS = "XLA_FFI_GetApi", "_ZN3xla3ffi12GetXlaFfiApiEv"  # since TensorFlow 2.21, and since 2.18
# Among XLA's functions: the bytes of the structure with the version, and the number of the version
# that must not differ; and the function that registers a handler, whose arguments are 84 bytes.
VERSION, VERSION_BYTES, MAJOR, REGISTER, ARGUMENTS_BYTES = 16, 24, 32, 72, 84


def obstacle(run: Callable[..., Any]) -> str | None:
    """Why XLA cannot run passes in this process, or None: runs both passes of a small LSTM.

    Args:
        run: a layer on the kernels, in a graph that XLA compiles.
    """

    def results() -> bool:
        if tf.config.list_logical_devices("TPU"):
            raise OSError("the kernels run on the CPU alone, and there is a TPU")
        _register(CPU, xla.handler())
        pairs = _tried(run, CPU, True)
        return all(np.allclose(made, right, rtol=1e-4, atol=1e-5) for made, right in pairs)

    try:
        return None if _alone(results) else "its results differ from those step by step"
    except Exception as error:  # of any kind: TensorFlow promises nothing of this road
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def doubt(run: Callable[..., Any], tier: int) -> str | None:
    """Why the kernels of a tier are not trusted on a card, or None: see ``obstacle``.

    Args:
        run: a layer on the kernels of that tier.
    """

    def results() -> Any:
        _register(CARD, of_card.handler(False, forms=True))
        return [pair for by_xla in (False, True) for pair in _tried(run, CARD, by_xla)]

    why = card.doubt_of(tier, functools.partial(_alone, results))
    return None if why is None else " ".join(why.split())


def _alone(results: Callable[[], Any]) -> Any:
    """Calls a function in a thread, which is in no graph, and under no tape."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(results).result()


def _tried(run: Callable[..., Any], place: Place, by_xla: bool) -> Iterator[tuple[Any, Any]]:
    """Results and gradients of a small LSTM of open sizes, each with the same step by step."""
    layer = Layer(cells.LSTM, (("H", 16),), Options(), "float32", outputs=True, unroll=True)
    shapes = {
        "x": (3, 2, 5), "turned weight_ih": (5, 64), "turned weight_hh": (16, 64),
        "bias_ih": (64,), "state h": (2, 16), "state c": (2, 16),
    }  # fmt: skip
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(layer.dtype) for shape in shapes.values()]
    open_sizes = [tf.TensorSpec([None, None, 5]), *map(tf.TensorSpec, [*shapes.values()][1:])]

    def passes(by: Callable[..., Any], *flat: Tensor) -> list[Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(flat)
            output, states = by(layer, dict(zip(shapes, flat, strict=True)))
        ends = [output, *states]
        return [*ends, *tape.gradient(ends, flat)]

    with tf.device(place.device):
        ours = functools.partial(passes, run)
        made = tf.function(ours, open_sizes, autograph=False, jit_compile=by_xla)(*arrays)
        right = passes(composite, *map(tf.constant, arrays))
    return zip(made, right, strict=True)


def _register(place: Place, handler: int) -> None:
    """Registers a handler with TensorFlow's XLA."""
    paths = sorted(Path(tf.sysconfig.get_lib()).glob("libtensorflow_*"))
    libraries = [ctypes.CDLL(str(path)) for path in paths]
    functions = [getattr(one, symbol, None) for one in libraries for symbol in SYMBOLS]
    api = next((function for function in functions if function is not None), None)
    if api is None:
        raise OSError(f"TensorFlow {tf.__version__} exports no function of XLA's foreign functions")
    api.restype = ctypes.c_void_p
    address = api()
    known = ctypes.c_size_t.from_address(address + VERSION).value == VERSION_BYTES
    if not known or ctypes.c_int.from_address(address + MAJOR).value != 0:
        raise OSError("XLA's foreign functions have another version than 0")
    register = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(
        ctypes.c_size_t.from_address(address + REGISTER).value
    )
    texts = place.target, place.platform
    name, platform = (ctypes.create_string_buffer(text.encode()) for text in texts)
    of_name, of_platform = ((ctypes.addressof(s), len(s) - 1) for s in (name, platform))
    words = ARGUMENTS_BYTES, 0, *of_name, *of_platform, 0, 0, 0, handler, 0
    if register((ctypes.c_size_t * len(words))(*words)):
        raise OSError("XLA did not register the handler")
