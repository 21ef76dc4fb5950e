"""A program as C99: a readable source with the weights inside, from the template ``model.c``.

Functions such as ``tanh`` are those of the CPU engine: the instructions of its table, printed as C.
Only sine, cosine, the error function and powers are those of ``math.h``.
"""

from __future__ import annotations

import itertools
import re
import struct
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from anycell.engines.cpu.ir import Builder, Module, Target
from anycell.exporter.blob import Blob
from anycell.exporter.functions import EMIT
from anycell.exporter.model import Model, Pass, Rows
from anycell.exporter.program import Place, bfloat16, padded
from anycell.exporter.schedule import Fold, Loop, Product, Schedule
from anycell.lang.expr import Expr
from anycell.lang.ops import is_boolean

INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "eq": "==", "ne": "!=", "logical_and": "&&", "logical_or": "||",
}  # fmt: skip
PREFIX = {"neg": "-", "logical_not": "!", "stop_gradient": ""}
LIBRARY = {"sqrt": "sqrtf", "abs": "fabsf", "sin": "sinf", "cos": "cosf", "erf": "erff",
           "pow": "powf"}  # fmt: skip
SPELT = {"const", "where", *INFIX, *PREFIX, *LIBRARY}  # all others are functions of the file
# How weights are stored, and read.
NUMBERS = {
    "float32": {"number": "float", "real": "weight"},
    "bfloat16": {"number": "uint16_t", "real": "float_of((uint32_t)weight << 16)"},
}
TABLES = {"float32": "float", "uint16": "uint16_t", "int8": "int8_t"}  # names of types
WIDTH = 60  # an expression wider than this gets a line of its own


def texts(model: Model, orders: Sequence[Schedule]) -> dict[str, str]:
    """The texts that ``model.c`` lacks: functions, the steps of all passes, how they run, and the
    body of a reset. Weights go to the model's blob if it has one.
    """
    functions, steps, runs = dict[str, str](), list[str](), list[str]()
    for k, (of_pass, order) in enumerate(zip(model.passes, orders, strict=True)):
        name = f"step{k}" if model.whole else "step"
        steps += [*_step(name, of_pass, order, functions, model.blob), ""]
        runs += _run(name, of_pass, model)
    reset = [
        f"    for (int j = 0; j < {m.at.size}; j++) {_at(m.at)} = {_number(m.initial)};"
        for of_pass in model.passes
        for m in of_pass.program.memories
    ]
    lines: dict[str, Iterable[str]] = {
        "functions": functions.values(), "steps": steps[:-1], "runs": runs, "reset": reset,
    }  # fmt: skip
    if model.blob:
        model.blob.seal("\n".join(steps))
        lines["words"] = [", ".join(f"{word}u" for word in model.blob.words)]
    numbers = NUMBERS[model.weights]
    return numbers | {name: "\n".join(of_name) for name, of_name in lines.items()}


def _step(
    name: str, of_pass: Pass, order: Schedule, functions: dict[str, str], blob: Blob | None
) -> Iterator[str]:
    """The text of one step of a pass, with its tables."""
    program, body = of_pass.program, list[str]()
    tables: list[tuple[str, npt.NDArray[Any]]] = [
        (f"p{k}", array) for k, array in enumerate(program.params)
    ]
    for number, stage in enumerate(order.stages):
        if isinstance(stage, Product):
            tables += _tables(number, stage, program.weights)
            body += _product(number, stage, order)
            if any(scales is not None for scales in stage.scales):
                functions["integers"] = template("integers.c")
        elif isinstance(stage, Loop):
            body += _loop(stage, order, functions)
        else:
            body += _fold(stage, order)
    rows = "const float *restrict x, " if of_pass.reads else ""
    yield f"static void {name}("
    yield f"    float *restrict state, const float *restrict in, {rows}float *restrict out"
    yield ") {"
    yield "    (void)state, (void)in;"
    if blob:
        yield "    const unsigned char *const weights = weights_of(state);"
    words = set(re.findall(r"\w+", "\n".join(body)))
    for called, array in tables:
        if called not in words:  # as what multiplies an input that the cell ignores
            continue
        kind = TABLES[array.dtype.name]
        if blob:
            address = f"(weights + {blob.add(array)})"
            yield f"    const {kind} *const {called} = (const {kind} *){address};"
        else:
            yield textwrap.indent(table(called, array), 4 * " ")
    if order.rooms:
        rooms = ", ".join(f"{room}[{size}]" for room, size in order.rooms.items())
        yield from textwrap.wrap(f"    float {rooms};", 92, subsequent_indent=8 * " ")
    yield from body
    yield "}"


def _run(name: str, of_pass: Pass, model: Model) -> Iterator[str]:
    """A pass over all steps."""
    backwards = "size_t t = steps; t-- > 0;"
    yield f"    for ({backwards if of_pass.reverse else 'size_t t = 0; t < steps; t++'})"
    to = "t" if of_pass.flipped == of_pass.reverse else "(steps - 1 - t)"
    of_samples = Rows("in", 0, model.inputs)
    at = [_rows(rows, model) for rows in (of_samples, of_pass.reads) if rows]
    yield f"        {name}(state, {', '.join([*at, _rows(of_pass.writes, model, to)])});"


def _rows(rows: Rows, model: Model, t: str = "t") -> str:
    """The address of row t."""
    array, first = rows.array, [str(rows.column)] * bool(rows.column)
    if array in model.memory:
        first = [f"steps * {model.before(array)}"] * bool(model.before(array)) + first
        array = "memory"
    return " + ".join([array, *first, f"{rows.stride} * {t}"])


def template(file: str) -> str:
    """The text of a file of this folder."""
    return (Path(__file__).parent / file).read_text(encoding="utf-8")


def filled(text: str, values: Mapping[str, Any]) -> str:
    """A template with values in place of their names, as ``@name@``."""
    return re.sub(r"@(\w+)@", lambda found: str(values[found[1]]), text)


def _number(value: float) -> str:
    """A float as C spells it."""
    value = float(np.float32(value))
    if value != value:
        return "NAN"
    if value in (float("inf"), float("-inf")):
        return "INFINITY" if value > 0 else "-INFINITY"
    text = str(np.float32(value))
    return text + ("f" if re.search(r"[.e]", text) else ".0f")


def table(name: str, array: npt.NDArray[Any]) -> str:
    """An array as C spells it."""
    kind = TABLES[array.dtype.name]
    numbers = [_number(v) if kind == "float" else str(v) for v in array.ravel().tolist()]
    lines = [", ".join(numbers[k : k + 8]) for k in range(0, len(numbers), 8)]
    return f"static const {kind} {name}[{len(numbers)}] = {{\n    " + ",\n    ".join(lines) + "};"


def _tables(number: int, stage: Product, weights: str) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """The tables of a product: its bias and weights; of integers fours of rows, and scales."""
    yield f"b{number}", stage.bias
    for k, (weight, scales) in enumerate(zip(stage.weights, stage.scales, strict=True)):
        name = f"w{number}_{k}"
        if scales is not None:
            further = padded(len(scales), 4) - len(scales)
            yield name, np.pad(weight.T, ((0, further), (0, 0))).astype(np.int8)
            yield f"s{number}_{k}", scales
        else:
            yield name, bfloat16(weight) if weights == "bfloat16" else weight


def _at(place: Place, index: str = "j") -> str:
    """An element of an array."""
    index = "0" if place.size == 1 else index
    parts = [part for part in (str(place.first or ""), index) if part not in ("", "0")]
    return f"{place.array}[{' + '.join(parts) or '0'}]"


def _product(number: int, stage: Product, schedule: Schedule) -> Iterator[str]:
    to = stage.to
    yield f"    for (int j = 0; j < {to.size}; j++) {to.array}[j] = b{number}[j];"
    for k, (operand, weight) in enumerate(zip(stage.operands, stage.weights, strict=True)):
        place, (into, out) = schedule.places[operand], weight.shape
        if stage.scales[k] is not None:
            yield "    {"
            yield f"        int16_t q[{into}];"
            yield f"        const float scale = rounded(&{_at(place, '0')}, q, {place.size});"
            if place.size < into:
                yield f"        for (int i = 1; i < {into}; i++) q[i] = q[0];"
            of = f"w{number}_{k}, s{number}_{k}, scale, q, {to.array}, {into}, {out}"
            yield f"        multiply_integers({of});"
            yield "    }"
        elif place.size == into:
            x = f"{place.array} + {place.first}" if place.first else place.array
            yield f"    multiply(w{number}_{k}, {x}, {to.array}, {into}, {out});"
        else:  # one number in place of many
            yield f"    for (int i = 0; i < {into}; i++)"
            x = f"&{_at(place)}"
            yield f"        multiply(w{number}_{k} + {out} * i, {x}, {to.array}, 1, {out});"


def _fold(stage: Fold, schedule: Schedule) -> Iterator[str]:
    groups, width = stage.nodes[0].attrs
    count = width // groups
    yield "    {" if groups == 1 else f"    for (int g = 0; g < {groups}; g++) {{"
    index = "j" if groups == 1 else f"{count} * g + j"
    values = [_at(schedule.places[node.args[0]], index) for node in stage.nodes]
    for k, node in enumerate(stage.nodes):
        yield f"        float t{k} = {'-INFINITY' if node.op == 'max' else '0.0f'};"
    yield f"        for (int j = 0; j < {count}; j++) {{"
    for k, (node, value) in enumerate(zip(stage.nodes, values, strict=True)):
        largest = f"t{k} = {value} > t{k} ? {value} : t{k};"
        yield f"            {largest if node.op == 'max' else f't{k} += {value};'}"
    yield "        }"
    each = "" if groups == 1 else f"for (int j = 0; j < {count}; j++) "
    for k, node in enumerate(stage.nodes):
        total = f"t{k} / {_number(count)}" if node.op == "mean" else f"t{k}"
        yield f"        {each}{_at(schedule.places[node], index)} = {total};"
    yield "    }"


def _loop(loop: Loop, schedule: Schedule, functions: dict[str, str]) -> Iterator[str]:
    """The text of a loop over units; adds the functions that it calls."""
    texts, names = dict[Expr, str](), itertools.count()
    uses = Counter(arg for node in loop.nodes for arg in node.args)
    stored = {node for node, _ in loop.stores}

    def value(node: Expr) -> str:
        if node not in texts and node.op != "const":
            return _at(schedule.places[node])
        return texts[node] if node in texts else _number(node.attrs[0])

    def named(node: Expr, text: str) -> str:
        texts[node] = f"t{next(names)}"
        text = text[1:-1] if text[0] == "(" else text
        kind = "int" if is_boolean(node) else "float"
        return f"        const {kind} {texts[node]} = {text};"

    yield "    {" if loop.size == 1 else f"    for (int j = 0; j < {loop.size}; j++) {{"
    for node in loop.nodes:
        text = value(node) if node.op == "const" else _call(node.op, map(value, node.args))
        texts[node] = text
        if node.op not in SPELT and node.op not in functions:
            functions[node.op] = _function(node.op, len(node.args))
        if uses[node] > 1 or node in stored or len(text) > WIDTH:
            yield named(node, text)
    for node, _ in loop.stores:
        if node not in texts:  # an old value, before another overwrites it
            yield named(node, value(node))
    for node, place in loop.stores:
        yield f"        {_at(place)} = {texts[node]};"
    yield "    }"


def _call(op: str, arguments: Iterable[str]) -> str:
    """An operation of the language as C spells it."""
    args = [*arguments]
    if op in INFIX:
        return f"({args[0]} {INFIX[op]} {args[1]})"
    if op in PREFIX:
        return f"({PREFIX[op]}{args[0]})" if PREFIX[op] else args[0]
    if op == "where":
        return f"({' '.join([args[0], '?', args[1], ':', args[2]])})"
    return f"{LIBRARY.get(op, f'{op}_')}({', '.join(args)})"


# -- functions -------------------------------------------------------------------------------------

TYPES = {"float": "float", "i1": "int", "i32": "uint32_t"}
SIGNS = {
    "fadd": "+", "fsub": "-", "fmul": "*", "fdiv": "/", "add": "+", "sub": "-", "mul": "*",
    "shl": "<<", "lshr": ">>", "and": "&", "or": "|", "xor": "^",
}  # fmt: skip
COMPARISONS = {
    "oeq": "{} == {}", "olt": "{} < {}", "ole": "{} <= {}", "ogt": "{} > {}", "oge": "{} >= {}",
    "une": "{} != {}", "eq": "{} == {}", "ne": "{} != {}", "ult": "!({} >= {})",
    "uno": "{0} != {0} || {1} != {1}", "one": "{0} < {1} || {0} > {1}",
}  # fmt: skip


def _function(op: str, arguments: int) -> str:
    """The text of a function of the language."""
    params = ", ".join(f"float {name}" for name in "xyz"[:arguments])
    module = Module(Target("c", bits=32, registers=16, fma=False, x86=False), "float")
    b = _InC(module, op, params, "float")
    result = EMIT[op](b, *b.args)
    head = f"static inline float {op}_({params}) {{"
    return "\n".join([head, *b.texts(), f"    return {_operand(result.text, 'float')};", "}\n"])


class _InC(Builder):
    """A builder whose instructions can be read as lines of C: scalars, without branches."""

    def texts(self) -> Iterator[str]:
        """The lines."""
        (block,) = self._blocks
        for line in block.lines:
            name, _, instruction = line.partition(" = ")
            type, text = _instruction(instruction)
            yield f"    const {TYPES[type]} {_operand(name, type)} = {text};"


def _operand(text: str, type: str) -> str:
    """A value or a constant of LLVM as C spells it."""
    if text.startswith("%"):
        return text[1:].replace(".", "")
    if type == "float":
        return _number(struct.unpack("<d", struct.pack("<Q", int(text, 16)))[0])
    return str(int(text == "true")) if type == "i1" else f"{int(text) % 2**32}u"


def _instruction(text: str) -> tuple[str, str]:
    """The type and the expression of an instruction of LLVM."""
    opcode, _, rest = text.partition(" ")
    how, rest = rest.split(" ", 1) if opcode in ("fcmp", "icmp") else ("", rest)
    if opcode == "call":  # float @llvm.fabs.f32(float %x)
        opcode, rest = re.findall(r"@llvm\.(\w+)[.\w]*\((.*)\)", rest)[0]
    values = rest.partition(" to ")[0].split(", ")
    type = values[0].partition(" ")[0]
    args = []
    for value in values:  # a type that is not repeated is that of the first
        kind, _, name = value.rpartition(" ")
        args.append(_operand(name, kind or type))
    if opcode == "bitcast":
        to = rest.rpartition(" ")[2]
        return to, f"{'float' if to == 'float' else 'bits'}_of({args[0]})"
    if how:
        return "i1", COMPARISONS[how].format(*args)
    if opcode == "select":
        return values[1].partition(" ")[0], "{} ? {} : {}".format(*args)
    if opcode == "fmuladd":
        return type, "{} * {} + {}".format(*args)
    if opcode == "fneg":
        return type, f"-{args[0]}"
    if opcode in SIGNS:
        return type, f"{args[0]} {SIGNS[opcode]} {args[1]}"
    return type, f"{opcode}f({', '.join(args)})"
