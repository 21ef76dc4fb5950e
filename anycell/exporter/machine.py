"""A program as machine code: an object file for one row, printed for LLVM like the CPU's kernels.

Vectors hold units. A product keeps its sums in registers while it reads its weights once, in their
order in memory. What lies beyond the last unit of a vector is never read by another unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from anycell.engines.cpu import jit
from anycell.engines.cpu.idioms import dot, widen
from anycell.engines.cpu.ir import Builder, Module, Target, Value, Variable, vector
from anycell.engines.cpu.matmul import ROUNDING
from anycell.exporter.blob import CODES, FACTOR, LINE, SEED, Blob
from anycell.exporter.functions import EMIT
from anycell.exporter.model import CACHE, Model, Rows
from anycell.exporter.program import VERSION, Array, Place, Program, bfloat16, padded
from anycell.exporter.schedule import Fold, Loop, Product, Schedule
from anycell.lang.expr import Expr, topological
from anycell.layer.rounding import STEPS
from anycell.plan.passes import HEAVY

FUNCTIONS = "load", "version", "state_size", "reset", "step", "process"  # the last ones of a file
NARROW = 8  # vectors
# Bits of a float, 2^-100: where nothing is smaller, no result of simple operations is below 1e-38
# unless it no longer matters.
TINY = 27 << 23
COSTLY = HEAVY - {"sigmoid", "tanh"}
TABLES = {"float32": "float", "uint16": "i16", "uint32": "i32", "int32": "i32"}  # types of LLVM


class Platform(NamedTuple):
    """LLVM's names of a machine, and its vectors: their bits and how many registers there are."""

    triple: str
    cpu: str
    features: str = ""
    bits: int = 128
    registers: int = 16
    word: str = "i64"  # size_t
    abi: str = ""

    @property
    def lanes(self) -> int:
        """Floats in a vector."""
        return self.bits // 32


_LINUX, _AVX2, _AVX512 = "x86_64-unknown-linux-gnu", "x86-64-v3", "x86-64-v4"
PLATFORMS = {
    "x86-64": Platform(_LINUX, "x86-64"),
    "x86-64-avx2": Platform(_LINUX, _AVX2, "", 256),
    "x86-64-avx512": Platform(_LINUX, _AVX512, "", 256, 32),
    "x86-64-macos": Platform("x86_64-apple-macosx11.0", _AVX2, "", 256),
    "x86-64-windows": Platform("x86_64-pc-windows-msvc", _AVX2, "", 256),
    "aarch64": Platform("aarch64-unknown-linux-gnu", "generic", "+neon", 128, 32),
    "aarch64-macos": Platform("arm64-apple-macosx11.0", "apple-m1", "", 128, 32),
    "aarch64-windows": Platform("aarch64-pc-windows-msvc", "generic", "+neon", 128, 32),
    "armv7": Platform("armv7-unknown-linux-gnueabihf", "cortex-a7", "+neon", word="i32"),
    "cortex-m4": Platform("thumbv7em-unknown-none-eabihf", "cortex-m4", "", 32, 16, "i32"),
    "cortex-m55": Platform("thumbv8.1m.main-unknown-none-eabihf", "cortex-m55", "", 128, 8, "i32"),
    "riscv64": Platform("riscv64-unknown-linux-gnu", "generic-rv64", "+m,+a,+f,+d,+c", 32, 32,
                        abi="lp64d"),
    "wasm32": Platform("wasm32-unknown-unknown", "generic", "+simd128", word="i32"),
}  # fmt: skip


@cache
def _binding() -> Any:
    """llvmlite's binding, for all machines."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm


def functions(model: Model) -> list[str]:
    """The functions of the header: the last ones of a file."""
    present = {"load": model.blob is not None, "step": not model.whole}
    return [name for name in FUNCTIONS if present.get(name, True)]


def compiled(model: Model, orders: Sequence[Schedule], platform: Platform, name: str) -> bytes:
    """Compiles a model to an object file."""
    target = _binding().Target.from_triple(platform.triple)
    bare = "none" in platform.triple or "wasm" in platform.triple
    machine = target.create_target_machine(
        cpu=platform.cpu, features=platform.features, opt=3, codemodel="small",
        reloc="static" if bare else "pic", abiname=platform.abi,
    )  # fmt: skip
    fma, x86 = platform.bits > 32 and platform.cpu != "x86-64", platform.triple.startswith("x86")
    vectors = Target(name, 32 * model.lanes, platform.registers, fma, x86=x86)
    module = Module(vectors, "float")
    for k, (of_pass, order) in enumerate(zip(model.passes, orders, strict=True)):
        _Printer(module, f"step{k}", of_pass.program, order, platform, model.blob)
    if model.blob:
        model.blob.seal(str(module))
        _print_load(module, model.blob.words, platform, name)
    _print_calls(module, model, platform, name)
    text = str(module)
    code: bytes = machine.emit_object(jit.optimised(text, machine))
    return code


class _Printer:
    """Prints the step of a program as a function.

    Attributes:
        bases: the address of each array.
        flip: whether a step takes blocks in reverse.
        narrow: whether weights are stored in 16 bits.
        rounded: values as integers; see ``_rounded``.
    """

    def __init__(
        self, module: Module, name: str, program: Program, order: Schedule, platform: Platform,
        blob: Blob | None,
    ) -> None:  # fmt: skip
        self.module, self.order, self.lanes = module, order, program.lanes
        self.registers, self.narrow = platform.registers, program.weights == "bfloat16"
        self.rounded: dict[tuple[Expr, int], tuple[Value, Value]] = {}
        arrays = "state", "in", "x", "out"
        params = ", ".join(f"ptr noalias {array}" for array in arrays)
        b = self.b = module.private(name, f"{params}, i64 flip")
        self.bases, self.flip = dict(zip(arrays, b.args, strict=False)), b.args[-1]
        self.blob = blob
        if blob:
            self.weights = b.load(self.bases["state"], "ptr", align=4)
        sizes = {room: padded(size, self.lanes) // self.lanes for room, size in order.rooms.items()}
        products = [stage for stage in order.stages if isinstance(stage, Product)]
        sizes |= {stage.to.array: math.prod(self._split(stage)) for stage in products}
        for room, vectors in sizes.items():
            self.bases[room] = b.alloca(b.vec, vectors)
        for k, array in enumerate(program.params):
            self.bases[f"p{k}"] = self._table(array[None])
        for stage in order.stages:
            if isinstance(stage, Product):
                self._product(stage)
            elif isinstance(stage, Loop):
                self._loop(stage)
            else:
                self._fold(stage)

    def _table(self, rows: npt.NDArray[Any]) -> Value:
        """Numbers in memory, each row filled up to whole vectors."""
        beyond = padded(rows.shape[1], self.lanes) - rows.shape[1]
        rows = np.pad(rows, ((0, 0), (0, beyond)))
        if self.blob:
            return self.b.gep(self.weights, self.blob.add(rows), "i8")
        return self.module.table(rows.ravel().tolist(), TABLES[rows.dtype.name])

    def _stored(self, weight: Array) -> npt.NDArray[Any]:
        return bfloat16(weight) if self.narrow else weight

    def _address(self, place: Place, j: Value | int = 0) -> Value:
        return self.b.gep(self.b.gep(self.bases[place.array], place.first), j)

    def _number(self, place: Place, j: Value | int) -> Value:
        """A number in all lanes."""
        address = self._address(place, 0 if place.size == 1 else j)
        return self.b.splat(self.b.load(address, "float"))

    # -- products ----------------------------------------------------------------------------------
    def _split(self, stage: Product) -> tuple[int, int]:
        """The numbers of blocks of a product's columns, and of vectors in each; together these may
        be more than the columns.
        """
        most, vectors = self.registers * 3 // 4, len(stage.bias) // self.lanes
        if any(scales is not None for scales in stage.scales):
            most //= 2  # sums of integers are beside those of reals
        if sum(weight.nbytes for weight in stage.weights) > CACHE:
            most = min(most, NARROW)
        blocks = -(-vectors // most)
        return blocks, -(-vectors // blocks)

    def _product(self, stage: Product) -> None:
        """Every other step takes the blocks in reverse: weights that the step before has read last
        are still in the cache.
        """
        if stage.to.size == 1 < self.lanes and stage.scales == (None,) * len(stage.scales):
            return self._number_of(stage)
        blocks, count = self._split(stage)
        for operand, weight, scales in zip(*stage[:3], strict=True):
            if scales is not None:
                self._rounded(operand, len(weight))
        ways = 2 if count <= self.registers * 3 // 8 else 1
        if blocks == 1:
            self._block(stage, 0, 1, count, ways)
            return
        with self.b.loop(0, blocks) as i:
            n = self.b.select(self.flip.ne(0), blocks - 1 - i, i)
            self._block(stage, n, blocks, count, ways)

    def _number_of(self, stage: Product) -> None:
        """A product of one column: lanes hold its rows."""
        b, stored = self.b, "i16" if self.narrow else "float"
        total = b.variable(b.value(0.0, b.vec))
        for operand, weight in zip(stage.operands, stage.weights, strict=True):
            table = self._table(self._stored(weight[:, :1].T))
            for j, count in self._turns(len(weight)):
                x = self._value(operand, j, count)
                if count < self.lanes:
                    x = b.select(b.lane_mask(b.value(count)), x, 0.0)
                w = b.load(b.gep(table, j, stored), vector(self.lanes, stored))
                total.value = b.fma(x, widen(b, w, "bfloat") if self.narrow else w, total.value)
        bias = b.load(self._table(stage.bias[None, :1]), "float")
        b.store(b.reduce_add(total.value) + bias, self._address(stage.to))

    def _blocks(self, rows: npt.NDArray[Any], blocks: int, width: int, n: Value | int) -> Value:
        """The address of block n of a table ``[rows, columns]``, whose columns are filled up."""
        rows = np.pad(rows, ((0, 0), (0, blocks * width - rows.shape[1])))
        table = self._table(np.concatenate(np.split(rows, blocks, 1)))
        return self.b.gep(table, n * (len(rows) * width * rows.itemsize), "i8")

    def _block(self, stage: Product, n: Value | int, blocks: int, count: int, ways: int) -> None:
        """Block n of a product, ``count`` vectors of columns. The sums of every other operand are
        apart if there are two ``ways``: each sum waits for the one before.
        """
        b, width = self.b, count * self.lanes
        bias = self._blocks(stage.bias[None], blocks, width, n)
        sums = [b.variable(b.load(b.gep(bias, i * self.lanes))) for i in range(count)]
        sums += [b.variable(b.value(0.0, b.vec)) for _ in range(count * (ways - 1))]
        stored = "i16" if self.narrow else "float"

        def add(k: Value | int, way: int) -> None:
            x, row = self._number(place, k), b.gep(table, b.value(width) * k, stored)
            for i, total in enumerate(sums[way * count : (way + 1) * count]):
                w = b.load(b.gep(row, i * self.lanes, stored), vector(self.lanes, stored))
                total.value = b.fma(x, widen(b, w, "bfloat") if self.narrow else w, total.value)

        for operand, weight, scales in zip(*stage[:3], strict=True):
            if scales is not None:
                self._integers(operand, weight, scales, sums[:count], blocks, n)
                continue
            table = self._blocks(self._stored(weight), blocks, width, n)
            place, whole = self.order.places[operand], len(weight) // 2 * 2
            with b.loop(0, whole, 2) as k:
                add(k, 0)
                add(k + 1, ways - 1)
            if whole < len(weight):
                add(b.value(whole), 0)
        for i in range(count):
            total = sums[i].value + sums[count + i].value if ways > 1 else sums[i].value
            b.store(total, self._address(stage.to, n * width + i * self.lanes))

    def _rounded(self, operand: Expr, size: int) -> tuple[Value, Value]:
        """The address of a value as integers with 128 added, of which four share a lane, and what
        1 of them stands for; see ``anycell.engines.cpu.matmul``.
        """
        if (operand, size) in self.rounded:
            return self.rounded[operand, size]
        b, most = self.b, self.b.variable(0, self.b.ivec)
        for j, count in self._turns(size):
            bits = b.bits(self._value(operand, j, count)) & 0x7FFFFFFF
            if count < self.lanes:
                bits = b.select(b.lane_mask(b.value(count)), bits, 0)
            most.value = b.smax(most.value, bits)
        largest = b.reduce_max(most.value)
        real = b.bitcast(largest, "float")
        scale = b.select(largest < 0x7F800000, real * (1 / STEPS), math.nan)
        inverse, room = b.splat(STEPS / real), b.alloca("i32", padded(size, self.lanes * 4) // 4)
        b.store(b.value(0, "i32"), b.gep(room, (size - 1) // 4 * 4, "i8"))
        for j, count in self._turns(size):
            bits = b.bits(self._value(operand, j, count) * inverse + ROUNDING)
            b.store(b.trunc(bits, "i8") ^ -128, b.gep(room, j, "i8"))
        self.rounded[operand, size] = room, b.splat(scale)
        return self.rounded[operand, size]

    def _integers(
        self, operand: Expr, weight: Array, of: Array, sums: list[Variable], blocks: int,
        n: Value | int,
    ) -> None:  # fmt: skip
        """Adds products of integers to sums."""
        b, width, (size, columns) = self.b, len(sums) * self.lanes, weight.shape
        room, scale = self._rounded(operand, size)
        quads = np.zeros((padded(size, 4), columns), np.int64)
        quads[:size] = weight
        packed = np.add.reduce(quads.reshape(-1, 4, columns) % 256 << np.r_[:32:8][:, None], 1)
        offset = (-128 * quads.sum(0)[None]).astype(np.int32)
        table, offsets, scales = (
            self._blocks(rows, blocks, width, n)
            for rows in (packed.astype(np.uint32), offset, of[None])
        )
        places = range(0, width, self.lanes)
        totals = [b.variable(b.load(b.gep(offsets, j), b.ivec)) for j in places]
        with b.loop(0, len(packed)) as k:
            x = b.splat(b.load(b.gep(room, k), "i32"))
            for j, total in zip(places, totals, strict=True):
                w = b.load(b.gep(table, k * width + j), b.ivec)
                total.value = dot(b, total.value, x, w)
        for j, total, real in zip(places, totals, sums, strict=True):
            product = b.sitofp(total.value, "float") * (scale * b.load(b.gep(scales, j)))
            real.value += product

    # -- loops over units --------------------------------------------------------------------------
    def _turns(self, size: int) -> Iterator[tuple[Value | int, int]]:
        """The first unit of each vector, and how many units it has; all but the last are full."""
        full = size // self.lanes * self.lanes if size > 1 else 0
        if full > 2 * self.lanes:
            with self.b.loop(0, full, self.lanes) as j:
                yield j, self.lanes
        else:
            for first in range(0, full, self.lanes):
                yield first, self.lanes
        if full < size:
            yield full, size - full

    def _loop(self, stage: Loop) -> None:
        for j, count in self._turns(stage.size):
            self._turn(stage, j, count)

    def _turn(self, stage: Loop, j: Value | int, count: int) -> None:
        """The values of ``count`` units from j on."""
        b, values = self.b, dict[Expr, Value]()

        def get(node: Expr) -> Value:
            return values[node] if node in values else self._value(node, j, count)

        for node in _by_height(stage.nodes):
            args = [*map(get, node.args)]
            values[node] = EMIT[node.op](b, *args) if node.args else get(node)
            if node.op == "add" and node.args[1].op == "mul":
                values[node] = b.fma(*map(get, node.args[1].args), args[0])
        stored = [get(node) for node, _ in stage.stores]
        for value, (_, place) in zip(stored, stage.stores, strict=True):
            address = self._address(place, j)
            if place.size == 1:
                b.store(b.extract(value, 0), address)
            elif place.array == "out" and count < self.lanes:
                b.masked_store(value, address, b.lane_mask(b.value(count)))
            else:
                b.store(value, address)

    def _value(self, node: Expr, j: Value | int, count: int) -> Value:
        """A value that another stage has left, from unit j on."""
        b = self.b
        if node.op == "const":
            return b.value(node.attrs[0], b.vec)
        place = self.order.places[node]
        if place.size == 1:
            return self._number(place, 0)
        if place.array in ("in", "x") and count < self.lanes:
            mask = b.lane_mask(b.value(count))
            return b.masked_load(self._address(place, j), mask, b.value(0.0, b.vec))
        return b.load(self._address(place, j))

    # -- reductions --------------------------------------------------------------------------------
    def _fold(self, stage: Fold) -> None:
        b, (groups, width) = self.b, stage.nodes[0].attrs
        count = width // groups
        for node in stage.nodes:
            empty, to = -float("inf") if node.op == "max" else 0.0, self.order.places[node]
            both = b.fmax if node.op == "max" else lambda x, y: x + y
            if groups > 1:
                self._fold_groups(node, groups, count, empty)
                continue
            total = b.variable(b.value(empty, b.vec))
            for j, left in self._turns(width):
                value = self._value(node.args[0], j, left)
                if left < self.lanes:
                    value = b.select(b.lane_mask(b.value(left)), value, empty)
                total.value = both(total.value, value)
            reduced = (b.reduce_max if node.op == "max" else b.reduce_add)(total.value)
            b.store(reduced * (1.0 / count) if node.op == "mean" else reduced, self._address(to))

    def _fold_groups(self, node: Expr, groups: int, count: int, empty: float) -> None:
        """One number after the other."""
        b, of, to = self.b, self.order.places[node.args[0]], self.order.places[node]
        if tail := to.size % self.lanes:  # the lanes beyond the last unit have a value, too
            b.store(b.value(0.0, b.vec), self._address(to, to.size - tail))
        with b.loop(0, groups * count, count) as first:
            total = b.variable(empty, "float")
            with b.loop(first, first + count) as j:
                value = b.load(self._address(of, 0 if of.size == 1 else j), "float")
                both = b.fmax(total.value, value) if node.op == "max" else total.value + value
                total.value = both
            reduced = total.value * (1.0 / count) if node.op == "mean" else total.value
            with b.loop(first, first + count) as j:
                b.store(reduced, self._address(to, j))


def _by_height(nodes: list[Expr]) -> list[Expr]:
    """Values in the order in which a processor should begin with them: first what has the longest
    way of others, which wait for it, ahead.
    """
    heights = dict.fromkeys(nodes, 0)
    for node in reversed(nodes):
        for arg in node.args:
            if arg in heights:
                steps = heights[node] + (10 if node.op in HEAVY else 1)
                heights[arg] = max(heights[arg], steps)
    return sorted(nodes, key=lambda node: -heights[node])


# -- calls -----------------------------------------------------------------------------------------
def _print_load(module: Module, expected: list[int], platform: Platform, name: str) -> None:
    """Adds the function that checks weights and enters their address in a state."""
    b = module.function(f"{name}_load", f"ptr state, ptr weights, {platform.word} size", "i32")
    state, weights, count = b.args
    size, codes = b.zext(count, "i64"), {code: k + 1 for k, code in enumerate(CODES)}

    def refuse(wrong: Value, code: str) -> None:
        with b.when(wrong):
            b.ret(b.value(codes[code], "i32"))

    refuse((b.ptrtoint(weights, "i64") & 3).ne(0), "MISALIGNED")
    refuse(size < LINE, "TRUNCATED")
    kinds = "NO_WEIGHTS", "OTHER_VERSION", *["OTHER_MODEL"] * 3
    for k, (word, code) in enumerate(zip(expected, kinds, strict=True)):
        refuse(b.load(b.gep(weights, k), "i32").ne(word), code)
    refuse(size < expected[-1], "TRUNCATED")
    total = b.variable(SEED, "i32")
    with b.loop(len(expected) + 1, expected[-1] // 4) as at:
        mixed = (total.value ^ b.load(b.gep(weights, at), "i32")) * FACTOR
        total.value = mixed ^ mixed >> 15
    refuse(total.value.ne(b.load(b.gep(weights, len(expected)), "i32")), "DAMAGED")
    b.store(weights, state, align=4)
    b.ret(b.value(0, "i32"))


def _print_calls(module: Module, model: Model, platform: Platform, name: str) -> None:
    """Adds the functions of the header."""
    word, lanes = platform.word, model.lanes
    b = module.function(f"{name}_version", "", "i32")
    b.ret(b.value(VERSION, "i32"))
    b = module.function(f"{name}_state_size", "", word)
    b.ret(b.value(4 * model.state_size, word))
    b = module.function(f"{name}_reset", "ptr state")
    for of in (memory for of_pass in model.passes for memory in of_pass.program.memories):
        first = b.value(of.initial, b.vec)
        with b.loop(0, padded(of.at.size, lanes), lanes) as j:
            b.store(first, b.gep(b.gep(b.args[0], of.at.first), j))
    if model.turns:
        b.store(b.value(0, "i32"), b.gep(b.args[0], model.state_size - 1))
    arrays = "ptr state, ptr in, ptr out"
    if not model.whole:
        b = module.function(f"{name}_step", arrays)
        state, sample, out = b.args
        turn = b.value(0, "i64")
        if model.turns:
            last = b.gep(state, model.state_size - 1)
            turn = b.zext(b.load(last, "i32"), "i64")
            b.store(b.trunc(1 - turn, "i32"), last)
        program = model.passes[0].program
        nodes = topological([program.output, *(of.new for of in program.memories)])
        if platform.triple.startswith("x86") and not {node.op for node in nodes} & COSTLY:
            with b.when(_has_tiny(b, model, state, sample).eq(0)):
                b.call("step0", state, sample, sample, out, turn)
                b.ret()
        with _flushed(b, platform):
            b.call("step0", state, sample, sample, out, turn)
    memory = ", ptr memory" * model.whole
    b = module.function(f"{name}_process", f"{arrays}, {word} steps{memory}")
    state, sample, out, count, *_ = b.args
    steps, bases = b.zext(count, "i64"), {"in": sample, "out": out}
    for array in model.memory:
        bases[array] = b.gep(b.args[-1], steps * model.before(array))
    samples = Rows("in", 0, model.inputs)
    with _flushed(b, platform):
        for k, of_pass in enumerate(model.passes):
            with b.loop(0, steps) as i:
                ways = of_pass.reverse, of_pass.flipped
                t, to = (steps - i - 1 if back else i for back in ways)
                rows = (samples, t), (of_pass.reads or samples, t), (of_pass.writes, to)
                at = [b.gep(b.gep(bases[r.array], r.column), k * r.stride) for r, k in rows]
                b.call(f"step{k}", state, *at, i & 1)


@contextmanager
def _flushed(b: Builder, platform: Platform) -> Iterator[None]:
    """The context in which a function treats numbers below 1e-38 as 0, where a machine can."""
    kind = platform.triple.partition("-")[0]
    if kind == "x86_64":
        before, within = b.alloca("i32"), b.alloca("i32")
        b.intrinsic("llvm.x86.sse.stmxcsr", before, returns="void", overload=())
        b.store(b.load(before, "i32") | 0x8040, within)
        change = "llvm.x86.sse.ldmxcsr"
    elif kind in ("aarch64", "arm64"):
        before = b.intrinsic("llvm.aarch64.get.fpcr", returns="i64", overload=())
        within, change = before | 1 << 24, "llvm.aarch64.set.fpcr"
    elif kind.startswith(("arm", "thumb")):
        before = b.intrinsic("llvm.arm.get.fpscr", returns="i32", overload=())
        within, change = before | 1 << 24, "llvm.arm.set.fpscr"
    else:
        yield
        return
    b.intrinsic(change, within, returns="void", overload=())
    yield
    b.intrinsic(change, before, returns="void", overload=())


def _has_tiny(b: Builder, model: Model, state: Value, sample: Value) -> Value:
    """Whether a number of a state or sample is below ``TINY``, but not 0."""
    largest, lanes, least = b.variable(0, b.ivec), model.lanes, 1 << 31

    def add(numbers: Value) -> None:
        largest.value = b.smax(largest.value, (~b.bits(numbers) & (least - 1)) + 1)

    whole = model.inputs // lanes * lanes
    arrays = [(sample, 0, whole)]
    for of in model.passes[0].program.memories:
        arrays.append((state, of.at.first, of.at.first + padded(of.at.size, lanes)))
    for array, first, end in arrays:
        with b.loop(first, end, lanes) as j:
            add(b.load(b.gep(array, j)))
    if whole < model.inputs:
        mask = b.lane_mask(b.value(model.inputs - whole))
        add(b.masked_load(b.gep(sample, whole), mask, b.value(0.0, b.vec)))
    return b.reduce_max(largest.value) > least - TINY
