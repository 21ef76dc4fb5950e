"""A small builder of LLVM IR as plain text.

Nothing here knows cells, plans or llvmlite: a `Module` collects functions and declarations, and
`str(module)` is the text that the compiler reads. Text is the same for every version of llvmlite,
the explain page shows it unchanged, and printing it takes milliseconds.

    >>> module = Module(Target("avx2", bits=256, registers=16, fma=True), "float")
    >>> b = module.function("axpy", "double a, ptr x, ptr y, i64 n")
    >>> a, x, y, n = b.args
    >>> a = b.splat(b.fptrunc(a, "float"))
    >>> with b.loop(0, n, step=b.lanes) as i:
    ...     here = b.gep(y, i)
    ...     b.store(b.fma(a, b.load(b.gep(x, i)), b.load(here)), here)
    >>> print(module)                                                       # doctest: +SKIP

Rules of the house:

- There are no fast-math flags, so the same text computes the same bits. `fma` is `llvm.fmuladd`:
  one instruction if the target has it, else a product and a sum, but never a library call.
- Values are immutable. What a loop carries from one turn to the next lives in a `variable`, which
  the optimiser turns into a register.
- Memory is accessed at element alignment unless `align=` says more.
- Operators of values emit instructions; a Python number among their operands becomes a constant of
  the other operand's type.

One file, because the builder is one class with a short method per instruction.
"""

from __future__ import annotations

import functools
import itertools
import operator
import platform
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

X86 = platform.machine().lower() in {"x86_64", "amd64"}
ARM = platform.machine().lower() in {"aarch64", "arm64"}


@dataclass(frozen=True, eq=False)
class Target:
    """The vector geometry of one instruction set (`isa.py` lists the known sets). Every set has
    one object, because calls look up their kernels by its identity.
    """

    name: str
    bits: int  # width of a vector register
    registers: int  # the number of vector registers that a function can name
    fma: bool
    half: bool = False  # whether it converts float16
    masks: bool = False  # whether it writes some lanes as fast as all lanes
    dot: str = ""  # the intrinsic that adds four products of 8-bit integers per lane
    pairs: str = ""  # the intrinsic that adds two products of bfloat16 per lane
    bfloat: bool = False  # whether it converts to bfloat16 (subnormal numbers to 0)
    tiles: str = ""  # "amx" if it has matrix tiles, "emulated" if vectors stand in for them
    x86: bool = X86

    def lanes(self, real: str) -> int:
        """Elements of type `real` in one register: 16 floats in 512 bits."""
        return self.bits // element_bits(real)


def _operator(integer: str, real: str = "") -> Callable[[Value, Operand], Value]:
    """The operator that emits one instruction for integers, another one for reals."""
    return lambda x, y: x._builder(y).binary(x._opcode(integer, real), x, y)


def _reflected(integer: str, real: str = "") -> Callable[[Value, Number], Value]:
    """An operator with a Python number on the left."""
    return lambda y, x: y._builder(x).binary(y._opcode(integer, real), x, y)


def _comparison(integer: str, real: str) -> Callable[[Value, Operand], Value]:
    """The operator that emits a comparison, of integers or of reals."""
    return lambda x, y: x._builder(y).compare(x._opcode(integer, real), x, y)


@dataclass(unsafe_hash=True, slots=True)
class Value:
    """An SSA value or a constant: its name in the text, and its LLVM type.

    Operators emit instructions into the function of an operand. For integers `//`, `%` and `<` are
    signed (the quotient is rounded towards 0), and `>>` shifts in zeros; `Builder` has the other
    variants. For reals, comparisons other than `ne` are false if either operand is NaN.
    `==` compares values as Python objects; `x.eq(y)` is the instruction.
    """

    text: str
    type: str
    builder: Builder | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.type} {self.text}"

    def __bool__(self) -> bool:
        raise TypeError(f"{self} is not known before the function runs; use `when` or `select`")

    def _builder(self, other: Operand) -> Builder:
        builder = self.builder or (other.builder if isinstance(other, Value) else None)
        if builder is None:
            raise TypeError(f"no operand belongs to a function: {self}, {other}")
        return builder

    def _opcode(self, integer: str, real: str) -> str:
        opcode = real if is_real(self.type) else integer
        if not opcode:
            raise TypeError(f"{self}: this operator has no instruction for its type")
        return opcode

    __add__, __radd__ = _operator("add", "fadd"), _reflected("add", "fadd")
    __sub__, __rsub__ = _operator("sub", "fsub"), _reflected("sub", "fsub")
    __mul__, __rmul__ = _operator("mul", "fmul"), _reflected("mul", "fmul")
    __truediv__, __rtruediv__ = _operator("", "fdiv"), _reflected("", "fdiv")
    __floordiv__, __mod__ = _operator("sdiv"), _operator("srem")
    __and__, __or__, __xor__ = _operator("and"), _operator("or"), _operator("xor")
    __lshift__, __rshift__ = _operator("shl"), _operator("lshr")
    __lt__, __le__ = _comparison("slt", "olt"), _comparison("sle", "ole")
    __gt__, __ge__ = _comparison("sgt", "ogt"), _comparison("sge", "oge")
    eq, ne = _comparison("eq", "oeq"), _comparison("ne", "une")

    def __neg__(self) -> Value:
        """The negative; for a real, the sign bit flips, also in a zero and a NaN."""
        if not is_real(self.type):
            return 0 - self
        return self._builder(self)._emit(self.type, f"fneg {self}")

    def __invert__(self) -> Value:
        """The value with every bit flipped; for a mask, the lanes that it leaves out."""
        return self ^ -1


Number = float  # int too: the type checker takes an int for a float
Operand = Value | Number

# ---------------------------------------------------------------------------------- types

_BITS = {"half": 16, "bfloat": 16, "float": 32, "double": 64, "ptr": 64}
_MANGLED = {"half": "f16", "bfloat": "bf16", "float": "f32", "double": "f64", "ptr": "p0"}
_VECTOR = re.compile(r"<(\d+) x (\w+)>")
_NAME = re.compile(r"@([\w.]+)")


def vector(lanes: int, element: str) -> str:
    """The type of `lanes` elements: `vector(16, "float")` is `<16 x float>`."""
    return f"<{lanes} x {element}>"


@functools.lru_cache(maxsize=256)
def shape(type: str) -> tuple[int, str]:
    """(lanes, element) of a vector type, and (1, type) of a scalar one."""
    match = _VECTOR.fullmatch(type)
    return (int(match[1]), match[2]) if match else (1, type)


def with_element(type: str, element: str) -> str:
    """The type of the same shape with another element: `("<8 x float>", "i1")` is `<8 x i1>`."""
    return vector(shape(type)[0], element) if type.startswith("<") else element


@functools.lru_cache(maxsize=256)
def element_bits(type: str) -> int:
    """Bits of one element."""
    element = shape(type)[1]
    return _BITS.get(element) or int(element[1:])


def integer_of(type: str) -> str:
    """The integer type of the same shape and width, to which a bitcast is possible."""
    return with_element(type, f"i{element_bits(type)}")


def is_real(type: str) -> bool:
    """Whether the elements are floating point."""
    return shape(type)[1] in {"half", "bfloat", "float", "double"}


def mangle(type: str) -> str:
    """The suffix by which an intrinsic is overloaded: `<16 x float>` is `v16f32`."""
    lanes, element = shape(type)
    return (f"v{lanes}" if type.startswith("<") else "") + _MANGLED.get(element, element)


# ------------------------------------------------------------------------------ constants


def constant(value: Number, type: str) -> Value:
    """A number as a constant of `type`, in every lane of a vector."""
    element = shape(type)[1]
    text = _literal(value, element)
    return Value(text if element == type else f"splat ({element} {text})", type)


def constants(values: Sequence[Number], element: str) -> Value:
    """A constant vector, one number per lane."""
    lanes = ", ".join(f"{element} {_literal(value, element)}" for value in values)
    return Value(f"<{lanes}>", vector(len(values), element))


def _literal(value: Number, element: str) -> str:
    if is_real(element):
        # The text spells a float as the bits of the double that equals it: exact, inf and NaN too.
        if element == "float":
            try:
                value = struct.unpack("<f", struct.pack("<f", value))[0]
            except OverflowError:
                raise ValueError(f"{value!r} does not fit in a float") from None
        elif element != "double":
            raise TypeError(f"constants of type {element} are not supported; use a float constant")
        return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"
    if element == "i1":
        return "true" if value else "false"
    if element == "ptr":
        return "null"
    if not isinstance(value, int):
        raise TypeError(f"a constant of type {element} must be an int, got {value!r}")
    half = 1 << (int(element[1:]) - 1)
    return str((value + half) % (2 * half) - half)  # wrapped to the signed range


# --------------------------------------------------------------------------------- module


class Module:
    """The functions of one compilation, and the declarations of external functions they call."""

    def __init__(self, target: Target, real: str = "float", short: bool = False) -> None:
        self.target = target
        self.real = real
        self.short = short  # whether functions need no more precision than 16-bit numbers have
        self._declarations: dict[str, tuple[str, str]] = {}  # name -> (return type, text)
        self._globals: list[str] = []
        self._functions: dict[str, Builder] = {}
        self._part_of: dict[str, str] = {}  # by names of functions
        self._open = [""]  # the part in which functions start is the last

    def function(self, name: str, params: str = "", returns: str = "void") -> Builder:
        """Starts a function; parameters are declared as in `"ptr noalias x, i64 count"`."""
        return self._start(Builder(self, name, params, returns))

    def private(
        self, name: str, params: str, returns: str = "void", *, vectors: int = 1
    ) -> Builder:
        """Starts a function that only this module sees and that LLVM does not inline. It works on
        `vectors` registers at once; its `lanes` and `vec` cover all of them.
        """
        return self._start(Builder(self, name, params, returns, True, vectors))

    def _start(self, function: Builder) -> Builder:
        if function.name in self._functions:
            raise ValueError(f"function {function.name!r} is defined twice")
        self._functions[function.name] = function
        self._part_of[function.name] = self._open[-1]
        return function

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The functions that start within the block are compiled apart, see ``parts``."""
        self._open.append(name)
        yield
        self._open.pop()

    def declare(self, name: str, returns: str, params: Sequence[str]) -> None:
        """Declares a function that this module calls but does not define; it may be repeated."""
        text = f"declare {returns} @{name}({', '.join(params)})"
        if self._declarations.setdefault(name, (returns, text))[1] != text:
            raise ValueError(f"{name} is declared twice: {text}; {self._declarations[name][1]}")

    def defines(self, name: str) -> bool:
        """Whether a function of this name has been started."""
        return name in self._functions

    def returns(self, name: str) -> str:
        """The type that the function of this name returns."""
        if name in self._functions:
            return self._functions[name].returns
        if name not in self._declarations:
            raise KeyError(f"{name!r} is neither defined nor declared")
        return self._declarations[name][0]

    def table(self, values: Sequence[Number], element: str) -> Value:
        """Puts read-only numbers in memory; returns their address."""
        name = f"@table{len(self._globals)}"
        body = ", ".join(f"{element} {_literal(value, element)}" for value in values)
        numbers = f"[{len(values)} x {element}] [{body}]"
        self._globals.append(f"{name} = private unnamed_addr constant {numbers}, align 64")
        return Value(name, "ptr")

    def word(self) -> Value:
        """The address of a number, at first 0, that lives as long as the code."""
        name = f"@word{len(self._globals)}"
        self._globals.append(f"{name} = internal global i64 0, align 8")
        return Value(name, "ptr")

    def parts(self) -> tuple[str, list[str]]:
        """The module as modules that are compiled apart and then linked: the text of the functions
        of no part, and a text for each part, which may be that of a part of other modules.
        """
        texts = {name: self._text(name) for name in dict.fromkeys(("", *self._part_of.values()))}
        return texts.pop(""), [*texts.values()]

    def __str__(self) -> str:
        return self._text(None)

    def _text(self, part: str | None) -> str:
        """The functions of a part; None stands for the whole module."""
        chosen = [f for n, f in self._functions.items() if part in (None, self._part_of[n])]
        functions, declared = [str(function) for function in chosen], []
        if part is not None:
            functions = [text.replace("define internal", "define hidden", 1) for text in functions]
            declared = [f.declared for f in self._functions.values() if f not in chosen]
        declared += [text for _, text in self._declarations.values()]
        if part is not None:
            used = set(_NAME.findall("\n".join(functions)))
            declared = [text for text in declared if _NAME.findall(text)[0] in used]
            tables = [text for text in self._globals if _NAME.findall(text)[0] in used]
        else:
            tables = self._globals
        # no-builtins: the optimiser must not turn a loop into a call of memset or memcpy, so that
        # the machine code refers to nothing outside itself and can be cached.
        width = f'"prefer-vector-width"="{self.target.bits}"'
        attributes = [
            f'attributes #0 = {{ nounwind "no-builtins" {width} }}',
            # Of all loops: kernels are printed unrolled and vectorised; doing it again costs time,
            # changes bits.
            "!0 = distinct !{!0, !1, !2}",
            '!1 = !{!"llvm.loop.unroll.disable"}',
            '!2 = !{!"llvm.loop.vectorize.enable", i1 false}',
        ]
        parts = ["\n".join(tables), *functions, "\n".join(declared + attributes)]
        return "\n\n".join(part for part in parts if part) + "\n"


# -------------------------------------------------------------------------------- builder


class _Block(NamedTuple):
    """A basic block: a label and its lines, the last of them a branch once it is complete."""

    label: str
    lines: list[str]


def _conversion(opcode: str) -> Callable[[Builder, Value, str], Value]:
    """The emitter of a conversion between types of one shape; it emits nothing for equal types."""

    def emit(self: Builder, x: Value, to: str) -> Value:
        to = with_element(x.type, shape(to)[1])
        return x if x.type == to else self._emit(to, f"{opcode} {x} to {to}")

    return emit


def _binary(opcode: str) -> Callable[[Builder, Operand, Operand], Value]:
    """The emitter of an instruction with two operands of one type."""
    return lambda self, x, y: self.binary(opcode, x, y)


def _choice(comparison: str) -> Callable[[Builder, Operand, Operand], Value]:
    """The emitter of x where a comparison holds, else y."""
    return lambda self, x, y: self.select(self.compare(comparison, x, y), x, y)


def _function(name: str) -> Callable[..., Value]:
    """The emitter of an intrinsic of operands of one type."""
    return lambda self, *operands: self.intrinsic(name, *self._same(*operands))


class Variable:
    """A place in memory for a value that a loop carries to its next turn, or that branches set."""

    def __init__(self, b: Builder, address: Value, type: str, align: int | None = None) -> None:
        self.b, self.address, self.type, self.align = b, address, type, align

    @property
    def value(self) -> Value:
        """The value that was stored last. Each access is an instruction."""
        return self.b.load(self.address, self.type, self.align)

    @value.setter
    def value(self, value: Value) -> None:
        self.b.store(value, self.address, self.align)


class Builder:
    """Writes the body of one function. Every emitter returns the `Value` that it made."""

    def __init__(
        self, module: Module, name: str, params: str, returns: str, private: bool = False,
        vectors: int = 1,
    ) -> None:  # fmt: skip
        self.module, self.target, self.real = module, module.target, module.real
        self.name, self.returns = name, returns
        self.lanes = self.target.lanes(self.real) * vectors
        self.vec = vector(self.lanes, self.real)
        self.ivec = integer_of(self.vec)
        self.mask = vector(self.lanes, "i1")
        typed = [param.strip().rsplit(" ", 1) for param in params.split(",") if param]
        self.args = tuple(Value(f"%{key}", kind.split()[0], self) for kind, key in typed)
        self._head = (
            f"define {'internal ' if private else ''}{returns} "
            f"@{name}({', '.join(f'{kind} %{key}' for kind, key in typed)}) "
            f"{'noinline ' if private else ''}#0"
        )
        self.declared = f"declare hidden {returns} @{name}({', '.join(k for k, _ in typed)})"
        self._allocas: list[str] = []
        self._blocks = [_Block("entry", [])]
        self._numbers = itertools.count(1)

    # ---- plumbing

    def _fresh(self, stem: str) -> str:
        return f"{stem}.{next(self._numbers)}"

    def _line(self, text: str) -> None:
        self._blocks[-1].lines.append(text)

    def _emit(self, type: str, text: str) -> Value:
        value = Value("%" + self._fresh("v"), type, self)
        self._line(f"{value.text} = {text}")
        return value

    def _same(self, *operands: Operand) -> tuple[Value, ...]:
        """Operands of one instruction: numbers take the type of the values, which must agree."""
        types = {operand.type for operand in operands if isinstance(operand, Value)}
        if len(types) != 1:
            raise TypeError(f"operands must share one type, got {', '.join(map(str, operands))}")
        (type,) = types
        return tuple(self.value(operand, type) for operand in operands)

    def value(self, operand: Operand, type: str = "i64") -> Value:
        """`operand` as a value of `type`: a number becomes a constant."""
        if not isinstance(operand, Value):
            return Value(constant(operand, type).text, type, self)
        if operand.type != type:
            raise TypeError(f"expected a value of type {type}, got {operand}")
        return operand

    # ---- arithmetic

    def binary(self, opcode: str, x: Operand, y: Operand) -> Value:
        """An instruction with two operands of one type; most are operators of `Value`."""
        x, y = self._same(x, y)
        return self._emit(x.type, f"{opcode} {x}, {y.text}")

    udiv, ashr = _binary("udiv"), _binary("ashr")  # unsigned division; shift that keeps the sign
    smin, smax = _choice("slt"), _choice("sgt")
    # One instruction each: x if the comparison holds, else y. So the result is y if either is NaN
    # or both are 0.
    fmin, fmax = _choice("olt"), _choice("ogt")
    fma = _function("llvm.fmuladd")  # x * y + z, fused where the target has the instruction
    fabs, copysign = _function("llvm.fabs"), _function("llvm.copysign")
    sqrt = _function("llvm.sqrt")  # correctly rounded; NaN below zero

    # ---- comparison and choice

    def compare(self, comparison: str, x: Operand, y: Operand) -> Value:
        """`how` is eq, ne, slt, sle, sgt, sge, ult, ... of integers; oeq, olt, ... of reals (false
        where either is NaN) or une, ult, uno, ... (true there). Most are operators of `Value`.
        """
        x, y = self._same(x, y)
        opcode = "fcmp" if is_real(x.type) else "icmp"
        return self._emit(with_element(x.type, "i1"), f"{opcode} {comparison} {x}, {y.text}")

    def select(self, condition: Value, x: Operand, y: Operand) -> Value:
        """Lane by lane: x where the condition holds, else y. Two Python numbers are of type i64, or
        of `real` where one is a float.
        """
        if not isinstance(x, Value) and not isinstance(y, Value):
            element = "i64" if isinstance(x, int) and isinstance(y, int) else self.real
            x = self.value(x, with_element(condition.type, element))
        x, y = self._same(x, y)
        return self._emit(x.type, f"select {condition}, {x}, {y}")

    # ---- conversion (the element alone may be named: `b.fpext(x, "double")` for any shape)

    trunc, zext = _conversion("trunc"), _conversion("zext")
    sitofp, uitofp = _conversion("sitofp"), _conversion("uitofp")
    fpext, fptrunc = _conversion("fpext"), _conversion("fptrunc")
    ptrtoint, inttoptr = _conversion("ptrtoint"), _conversion("inttoptr")

    def bitcast(self, x: Value, to: str) -> Value:
        """Reinterprets the bits as another type."""
        return x if x.type == to else self._emit(to, f"bitcast {x} to {to}")

    def bits(self, x: Value) -> Value:
        """The bits of a real as integers of the same shape."""
        return self.bitcast(x, integer_of(x.type))

    # ---- lanes

    def splat(self, x: Value, lanes: int | None = None) -> Value:
        """A scalar in every lane."""
        lanes = lanes or self.lanes
        type, first_lane = vector(lanes, x.type), f"<{lanes} x i32> zeroinitializer"
        first = self._emit(type, f"insertelement {type} poison, {x}, i64 0")
        return self._emit(type, f"shufflevector {first}, {type} poison, {first_lane}")

    def shuffle(self, x: Value, y: Value | None, lanes: Sequence[int]) -> Value:
        """Picks lanes, in the given order, from x and y put side by side."""
        other = Value("poison", x.type) if y is None else y
        picks = constants(list(lanes), "i32")
        type = vector(len(lanes), shape(x.type)[1])
        return self._emit(type, f"shufflevector {x}, {other}, {picks}")

    def extract(self, x: Value, lane: int | Value) -> Value:
        """One lane as a scalar."""
        return self._emit(shape(x.type)[1], f"extractelement {x}, {self.value(lane, 'i64')}")

    def iota(self, type: str | None = None) -> Value:
        """0, 1, 2, ... as lanes of integers (of `ivec` by default)."""
        lanes, element = shape(type or self.ivec)
        return constants(range(lanes), element)

    def lane_mask(
        self, count: Value, lanes: int | None = None, element: str | None = None
    ) -> Value:
        """The mask of the first `count` lanes; `count` is an i64 of any size and sign. Lanes are
        compared as integers of type `element`, by default of the width of `real`.
        """
        lanes, element = lanes or self.lanes, element or shape(self.ivec)[1]
        few = self.trunc(self.smin(count, lanes), element)
        return self.iota(vector(lanes, element)) < self.splat(few, lanes)

    def _reduce(self, x: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """Folds the upper half onto the lower until one lane is left, always in the same order."""
        lanes = shape(x.type)[0]
        while lanes > 1:
            lanes //= 2
            upper = self.shuffle(x, None, range(lanes, 2 * lanes))
            x = combine(self.shuffle(x, None, range(lanes)), upper)
        return self.extract(x, 0)

    def reduce_add(self, x: Value) -> Value:
        """The sum of all lanes."""
        return self._reduce(x, operator.add)

    def reduce_each(self, vectors: Sequence[Value]) -> Value:
        """The sum of all lanes of each vector, as lanes; reals in the order of ``reduce_add``.

        Args:
            vectors: a power of two of them. Two share one while their sums are folded.
        """
        lanes, least = shape(vectors[0].type)[0], 1
        if not is_real(vectors[0].type) and len(vectors) >= 4:
            least = 4  # neighbours first, which do not cross 128 bits
            lower = [n + i for n in range(0, lanes, 4) for i in (0, 2, lanes, lanes + 2)]
            upper = [i + 1 for i in lower]
            for _ in range(2):
                halves = zip(vectors[::2], vectors[1::2], strict=True)
                vectors = [self.shuffle(x, y, lower) + self.shuffle(x, y, upper) for x, y in halves]
        while lanes > least:
            lanes //= 2
            seconds: Sequence[Value | None] = vectors[1::2] or [None]
            count = shape(vectors[0].type)[0] * min(len(vectors), 2)
            lower = [i for i in range(count) if not i & lanes]
            upper = [i + lanes for i in lower]
            pairs = zip(vectors[::2], seconds, strict=True)
            vectors = [self.shuffle(x, y, lower) + self.shuffle(x, y, upper) for x, y in pairs]
        while len(vectors) > 1:
            width = range(2 * shape(vectors[0].type)[0])
            halves = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [self.shuffle(x, y, width) for x, y in halves]
        return vectors[0]

    def reduce_max(self, x: Value) -> Value:
        """The largest lane; a NaN may be lost (see `fmax`)."""
        return self._reduce(x, self.fmax if is_real(x.type) else self.smax)

    def transpose(self, rows: Sequence[Value]) -> list[Value]:
        """N vectors of N lanes: lane j of row i becomes lane i of row j.

        Takes log2(N) stages of N shuffles, each one cheap instruction. A transpose exchanges the
        bits of the row number and the lane number. Within 128 bits, interleaving two rows moves a
        row bit in at the bottom of the lane number and the top lane bit out, so the high row bits
        go first. Above, separating even from odd blocks of 128 bits moves a row bit in at the top
        and the bottom lane bit out, so the low row bits go first.
        """
        lanes, rows = len(rows), list(rows)
        if any(shape(row.type)[0] != lanes for row in rows):
            raise ValueError(
                f"{lanes} rows to transpose must have {lanes} lanes, got {rows[0].type}"
            )
        block = min(lanes, 128 // element_bits(rows[0].type))
        stages, apart = [], block // 2
        while apart:
            half = [
                start + lane + side * lanes
                for start in range(0, lanes, block)
                for lane in range(block // 2)
                for side in (0, 1)
            ]
            stages.append((apart, half, [lane + block // 2 for lane in half]))
            apart //= 2
        apart = block
        while apart < lanes:
            even = [
                start + lane for start in range(0, 2 * lanes, 2 * block) for lane in range(block)
            ]
            stages.append((apart, even, [lane + block for lane in even]))
            apart *= 2
        for apart, low, high in stages:
            for i in range(lanes):
                if not i & apart:
                    x, y = rows[i], rows[i + apart]
                    rows[i], rows[i + apart] = self.shuffle(x, y, low), self.shuffle(x, y, high)
        return rows

    # ---- memory

    def gep(self, base: Value, index: Operand, element: str | None = None) -> Value:
        """The address `index` elements (of `real` by default; "i8" counts bytes) after `base`."""
        index = self.value(index)
        return self._emit("ptr", f"getelementptr inbounds {element or self.real}, {base}, {index}")

    def load(self, address: Value, type: str | None = None, align: int | None = None) -> Value:
        """Loads one value of `type`, by default of `vec`."""
        type = type or self.vec
        return self._emit(type, f"load {type}, {address}, align {align or _natural(type)}")

    def store(self, value: Value, address: Value, align: int | None = None) -> None:
        """Writes one value."""
        self._line(f"store {value}, {address}, align {align or _natural(value.type)}")

    def masked_load(
        self, address: Value, mask: Value, passthru: Operand = 0, type: str | None = None
    ) -> Value:
        """Loads the lanes of the mask; the other lanes are from `passthru` and touch no memory."""
        type = type or self.vec
        align = constant(_natural(type), "i32")
        values = address, align, mask, self.value(passthru, type)
        return self.intrinsic("llvm.masked.load", *values, returns=type, overload=[type, "ptr"])

    def masked_store(self, value: Value, address: Value, mask: Value) -> None:
        """Writes the lanes of the mask and touches no other memory."""
        values = value, address, constant(_natural(value.type), "i32"), mask
        types = [value.type, "ptr"]
        self.intrinsic("llvm.masked.store", *values, returns="void", overload=types)

    def store_first(self, value: Value, address: Value, count: Value) -> None:
        """Writes the first `count` lanes (an i64 of any size and sign); touches no other memory.

        Without `Target.masks`, a full vector takes a plain store: a masked store takes 20 cycles on
        AMD's processors with AVX2, and a branch for each lane on others.
        """
        (lanes, type), register = shape(value.type), self.target.lanes(self.real)
        if self.target.masks:
            self.masked_store(value, address, self.lane_mask(count, lanes))
            return
        with self.when(count >= lanes) as otherwise:
            self.store(value, address)
        with otherwise, self.when(count > 0):
            if lanes == register:
                self.masked_store(value, address, self.lane_mask(count, lanes))
                return
            for first in range(0, lanes, register):
                part = self.shuffle(value, None, range(first, first + register))
                self.store_first(part, self.gep(address, first, type), count - first)

    def alloca(self, type: str, count: int = 1) -> Value:
        """Allocates stack memory for the whole call, wherever in the function this is called."""
        value = Value("%" + self._fresh("slot"), "ptr", self)
        alignment = max(_natural(type), min(64, shape(type)[0] * element_bits(type) // 8))
        self._allocas.append(f"{value.text} = alloca {type}, i64 {count}, align {alignment}")
        return value

    def variable(self, first: Operand, type: str = "i64") -> Variable:
        """A variable on the stack that begins with a value, or with a number of type `type`."""
        value = first if isinstance(first, Value) else self.value(first, type)
        variable = self.unset(value.type)
        variable.value = value
        return variable

    def unset(self, type: str) -> Variable:
        """A variable on the stack that has no value yet."""
        return Variable(self, self.alloca(type), type)

    def prefetch(self, address: Value, locality: int = 3) -> None:
        """Prefetches a cache line to read; locality 3 keeps it close, 0 expects a single use."""
        hints = [constant(hint, "i32") for hint in (0, locality, 1)]
        self.intrinsic("llvm.prefetch", address, *hints, returns="void", overload=["ptr"])

    # ---- threads

    def atomic_add(self, address: Value, value: Operand) -> Value:
        """Adds to an i64 that threads share, and returns its old value (acquire and release)."""
        value = self.value(value)
        return self._emit("i64", f"atomicrmw add {address}, {value} acq_rel, align 8")

    def atomic_turn(self, address: Value, old: Value, new: Value) -> Value:
        """Replaces an i64 that threads share if it is ``old``, and returns whether it was."""
        swap = f"cmpxchg {address}, {old}, {new} acq_rel monotonic, align 8"
        return self._emit("i1", f"extractvalue {self._emit('{ i64, i1 }', swap)}, 1")

    def atomic_load(self, address: Value) -> Value:
        """Loads an i64, and makes visible all that its writer wrote before (acquire)."""
        return self._emit("i64", f"load atomic i64, {address} acquire, align 8")

    def pause(self) -> None:
        """A hint that this is a spin loop."""
        if self.target.x86:
            self.intrinsic("llvm.x86.sse2.pause", returns="void", overload=[])
        elif ARM:
            self.intrinsic("llvm.aarch64.hint", constant(1, "i32"), returns="void", overload=[])

    # ---- calls

    def call(self, callee: str | Value, *args: Value | int, returns: str | None = None) -> Value:
        """Calls a function by its name in this module, or by any address, which needs `returns`.
        Python numbers are passed as i64.
        """
        values = [arg if isinstance(arg, Value) else self.value(arg) for arg in args]
        if isinstance(callee, str):
            returns = self.module.returns(callee)
            callee = Value(f"@{callee}", "ptr")
        text = f"call {returns} {callee.text}({', '.join(map(str, values))})"
        if returns is None:
            raise TypeError("a call through an address needs returns=")
        if returns == "void":
            self._line(text)
            return Value("void", "void")
        return self._emit(returns, text)

    def intrinsic(
        self,
        name: str,
        *args: Value,
        returns: str | None = None,
        overload: Sequence[str] | None = None,
    ) -> Value:
        """Calls `name`, mangled by the overload types (by default the first operand's). It returns
        the type of the first operand unless `returns` is given.
        """
        types = [args[0].type] if overload is None else overload
        full = ".".join([name, *map(mangle, types)])
        self.module.declare(full, returns or args[0].type, [arg.type for arg in args])
        return self.call(full, *args)

    # ---- control flow

    def _start(self, label: str) -> None:
        self._blocks.append(_Block(label, []))

    @contextmanager
    def loop(self, lo: Operand, hi: Operand, step: Operand = 1) -> Iterator[Value]:
        """`for i in range(lo, hi, step)` with i64 and a positive step."""
        lo, hi, step = (self.value(operand) for operand in (lo, hi, step))
        head, body, done = (self._fresh(stem) for stem in ("loop", "body", "done"))
        before, index, more = self._blocks[-1].label, f"%{self._fresh('i')}", self._fresh("%more")
        self._line(f"br label %{head}")
        self._start(head)
        heading = self._blocks[-1]
        self._start(body)
        turn = Value(index, "i64", self)
        yield turn
        following = turn + step
        again = f"[ {following.text}, %{self._blocks[-1].label} ]"
        heading.lines.extend((
            f"{index} = phi i64 [ {lo.text}, %{before} ], {again}",
            f"{more} = icmp slt i64 {index}, {hi.text}",
            f"br i1 {more}, label %{body}, label %{done}",
        ))  # fmt: skip
        self._line(f"br label %{head}, !llvm.loop !0")
        self._start(done)

    @contextmanager
    def repeat(self) -> Iterator[Callable[[Value], None]]:
        """A body that repeats while the condition that it passes to `again` at its end holds::

        with b.repeat() as again:
            b.pause()
            again(b.atomic_load(arrived) < threads)
        """
        body, done = self._fresh("repeat"), self._fresh("done")
        conditions: list[Value] = []
        self._line(f"br label %{body}")
        self._start(body)
        yield conditions.append
        (condition,) = conditions
        self._line(f"br {condition}, label %{body}, label %{done}")
        self._start(done)

    @contextmanager
    def when(self, condition: Value) -> Iterator[AbstractContextManager[None]]:
        """The body runs if the condition (an i1) holds, and `otherwise` if it does not::

        with b.when(n.eq(0)) as otherwise:
            b.store(zero, out)
        with otherwise:
            b.store(sum, out)
        """
        then, join = self._fresh("then"), self._fresh("join")
        fork = self._blocks[-1]
        self._start(then)
        yield self._otherwise(fork, condition, then, join)
        self._line(f"br label %{join}")
        self._start(join)
        fork.lines.append(f"br {condition}, label %{then}, label %{join}")

    @contextmanager
    def _otherwise(self, fork: _Block, condition: Value, then: str, join: str) -> Iterator[None]:
        if self._blocks[-1].label != join or self._blocks[-1].lines:
            raise RuntimeError("`with otherwise:` must follow its `with b.when(...):` at once")
        other = self._fresh("else")
        fork.lines[-1] = f"br {condition}, label %{then}, label %{other}"
        self._blocks[-1] = _Block(other, [])
        yield
        self._line(f"br label %{join}")
        self._start(join)

    def ret(self, value: Value | None = None) -> None:
        """Returns from the function; a void function also returns at its end by itself."""
        self._line("ret void" if value is None else f"ret {value}")
        self._start(self._fresh("unreached"))

    def __str__(self) -> str:
        lines = [self._head + " {"]
        for number, block in enumerate(self._blocks):
            lines.append(f"{block.label}:")
            lines += [f"  {line}" for line in (self._allocas if number == 0 else [])]
            lines += [f"  {line}" for line in block.lines]
        # If every path has returned, no branch leads to the last block.
        lines += ["  ret void" if self.returns == "void" else "  unreachable", "}"]
        return "\n".join(lines)


def _natural(type: str) -> int:
    """The alignment of one element in bytes."""
    return max(1, element_bits(type) // 8)
