"""A program as C99: a readable source with the weights inside.

Functions such as ``tanh`` are those of the CPU engine: ``Functions`` prints the instructions of its
table as C. Only sine, cosine, the error function and powers are those of ``math.h``.
"""

from __future__ import annotations

import itertools
import re
import struct
import textwrap
from collections import Counter
from collections.abc import Iterator

import numpy as np

from anycell.engines.cpu.ir import Builder, Module, Target, Value
from anycell.engines.cpu.ops import EMIT
from anycell.exporter.program import Array, Place, Program
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
WIDTH = 60  # an expression wider than this gets a line of its own

# Numbers below 1e-38 take a processor a hundred times as long, and a decaying state ends there.
FLUSH = """\
#if defined(__SSE__) || defined(_M_X64)
#include <xmmintrin.h>
#define FLUSH(run) do { \\
        const unsigned mode = _mm_getcsr(); \\
        _mm_setcsr(mode | 0x8040u); \\
        run; \\
        _mm_setcsr(mode); \\
    } while (0)
#elif defined(__aarch64__) && defined(__GNUC__)
#define FLUSH(run) do { \\
        unsigned long mode; \\
        __asm__ __volatile__("mrs %0, fpcr" : "=r"(mode)); \\
        __asm__ __volatile__("msr fpcr, %0" : : "r"(mode | 1ul << 24) : "memory"); \\
        run; \\
        __asm__ __volatile__("msr fpcr, %0" : : "r"(mode) : "memory"); \\
    } while (0)
#else
#define FLUSH(run) do { run; } while (0)
#endif
"""
MULTIPLY = """\
/* to += weight x, with the weight by columns */
static void multiply(const float *weight, const float *x, float *restrict to, int in, int out) {
    int i = 0;
    for (; i + 4 <= in; i += 4, weight += 4 * out)
        for (int j = 0; j < out; j++)
            to[j] += (x[i] * weight[j] + x[i + 1] * weight[out + j])
                + (x[i + 2] * weight[2 * out + j] + x[i + 3] * weight[3 * out + j]);
    for (; i < in; i++, weight += out)
        for (int j = 0; j < out; j++)
            to[j] += x[i] * weight[j];
}
"""
STEP = """\
static void step(float *restrict state, const float *restrict in, float *restrict out) {{
{body}
}}
"""
CALLS = """\
int {name}_version(void) {{ return {upper}_VERSION; }}

size_t {name}_state_size(void) {{ return {upper}_STATE_SIZE * sizeof(float); }}

void {name}_reset(float *state) {{
{reset}
}}

void {name}_step(float *state, const float *in, float *out) {{
    FLUSH(step(state, in, out));
}}

void {name}_process(float *state, const float *in, float *out, size_t steps) {{
    FLUSH(for (size_t t = 0; t < steps; t++)
        step(state, in + {inputs} * t, out + {outputs} * t));
}}
"""


def source(program: Program, schedule: Schedule, name: str) -> str:
    """The text of the file: tables, functions, and the calls of the header."""
    body, functions = list[str](), Functions()
    tables = [f'#include "{name}.h"\n#include <math.h>\n#include <stdint.h>\n\n{FLUSH}']
    for number, stage in enumerate(schedule.stages):
        if isinstance(stage, Product):
            tables.append(table(f"b{number}", stage.bias))
            tables += [table(f"w{number}_{k}", w) for k, w in enumerate(stage.weights)]
            body += _product(number, stage, schedule)
        elif isinstance(stage, Loop):
            body += _Turn(stage, schedule, functions).lines()
        else:
            body += _fold(stage, schedule)
    tables += [table(f"p{k}", array) for k, array in enumerate(program.params)]
    if schedule.rooms:
        rooms = ", ".join(f"{room}[{size}]" for room, size in schedule.rooms.items()) + ";"
        body.insert(0, textwrap.fill(f"float {rooms}", 92, initial_indent=4 * " ",
                                     subsequent_indent=8 * " "))  # fmt: skip
    for array in ("state", "in"):
        if not any(re.search(rf"\b{array}\b", line) for line in body):
            body.insert(0, f"    (void){array};")
    reset = [
        f"    for (int j = 0; j < {m.at.size}; j++) {_at(m.at)} = {_number(m.initial)};"
        for m in program.memories
    ]
    multiply = [MULTIPLY] * any(isinstance(stage, Product) for stage in schedule.stages)
    return "\n".join([
        *tables, "", *functions.texts(), *multiply, STEP.format(body="\n".join(body)),
        CALLS.format(
            name=name, upper=name.upper(), reset="\n".join(reset or ["    (void)state;"]),
            inputs=program.inputs, outputs=program.outputs,
        ),
    ])  # fmt: skip


def _number(value: float) -> str:
    """A float as C spells it."""
    value = float(np.float32(value))
    if value != value:
        return "NAN"
    if value in (float("inf"), float("-inf")):
        return "INFINITY" if value > 0 else "-INFINITY"
    text = str(np.float32(value))
    return text + ("f" if re.search(r"[.e]", text) else ".0f")


def table(name: str, array: Array) -> str:
    """An array as C spells it."""
    numbers = [_number(value) for value in array.ravel().tolist()]
    lines = [", ".join(numbers[k : k + 8]) for k in range(0, len(numbers), 8)]
    return f"static const float {name}[{len(numbers)}] = {{\n    " + ",\n    ".join(lines) + "};"


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
        if place.size == into:
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


class _Turn:
    """The text of a loop over units."""

    def __init__(self, loop: Loop, schedule: Schedule, functions: Functions) -> None:
        self.loop, self.schedule, self.functions = loop, schedule, functions
        self.names: dict[Expr, str] = {}

    def lines(self) -> Iterator[str]:
        loop, names = self.loop, itertools.count()
        uses = Counter(arg for node in loop.nodes for arg in node.args)
        stored = {node for node, _ in loop.stores}

        def named(node: Expr, text: str) -> str:
            self.names[node] = f"t{next(names)}"
            text = text[1:-1] if text[0] == "(" else text
            kind = "int" if is_boolean(node) else "float"
            return f"        const {kind} {self.names[node]} = {text};"

        yield "    {" if loop.size == 1 else f"    for (int j = 0; j < {loop.size}; j++) {{"
        for node in loop.nodes:
            text = self.names[node] = self._text(node)
            if uses[node] > 1 or node in stored or len(text) > WIDTH:
                yield named(node, text)
        for node, _ in loop.stores:
            if node not in self.names:  # an old value, before another overwrites it
                yield named(node, self._value(node))
        for node, place in loop.stores:
            yield f"        {_at(place)} = {self.names[node]};"
        yield "    }"

    def _value(self, node: Expr) -> str:
        if node in self.names:
            return self.names[node]
        if node.op == "const":
            return _number(node.attrs[0])
        return _at(self.schedule.places[node])

    def _text(self, node: Expr) -> str:
        args = [self._value(arg) for arg in node.args]
        if node.op == "const":
            return _number(node.attrs[0])
        if node.op in INFIX:
            return f"({args[0]} {INFIX[node.op]} {args[1]})"
        if node.op in PREFIX:
            return f"({PREFIX[node.op]}{args[0]})" if PREFIX[node.op] else args[0]
        if node.op == "where":
            return f"({' '.join([args[0], '?', args[1], ':', args[2]])})"
        name = LIBRARY.get(node.op) or self.functions.name(node.op, len(args))
        return f"{name}({', '.join(args)})"


# -- functions -------------------------------------------------------------------------------------

TYPES = {"float": "float", "double": "double", "i1": "int", "i32": "uint32_t", "i64": "uint64_t"}
SIGNS = {
    "fadd": "+", "fsub": "-", "fmul": "*", "fdiv": "/", "add": "+", "sub": "-", "mul": "*",
    "shl": "<<", "lshr": ">>", "and": "&", "or": "|", "xor": "^",
}  # fmt: skip
COMPARISONS = {
    "oeq": "{} == {}", "olt": "{} < {}", "ole": "{} <= {}", "ogt": "{} > {}", "oge": "{} >= {}",
    "une": "{} != {}", "eq": "{} == {}", "ne": "{} != {}", "ult": "!({} >= {})",
    "uno": "{0} != {0} || {1} != {1}", "one": "{0} < {1} || {0} > {1}",
}  # fmt: skip
CASTS = {
    name: f"""\
static inline {to} {name}({of} x) {{
    union {{ {of} of; {to} to; }} both;
    both.of = x;
    return both.to;
}}
"""
    for name, of, to in (("float_of", "uint32_t", "float"), ("bits_of", "float", "uint32_t"))
}


class Functions:
    """The functions of the language that a source calls."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def name(self, op: str, arguments: int) -> str:
        """The name of a function; it will be printed."""
        if op not in self._names:
            names = ["x", "y", "z"][:arguments]
            module = Module(Target("c", bits=32, registers=16, fma=False, x86=False), "float")
            params = ", ".join(f"float {name}" for name in names)
            b = _InC(module, op, params)
            result = EMIT[op](b, *b.args)
            head = f"static inline float {op}_({params}) {{"
            last = f"    return {b.c(result.text, 'float')};"
            self._names[op] = "\n".join([head, *b.texts, last, "}\n"])
        return f"{op}_"

    def texts(self) -> list[str]:
        """The text of each function, and before them what they call."""
        text = "\n".join(self._names.values())
        return [*(cast for name, cast in CASTS.items() if name in text), text]


class _InC(Builder):
    """A builder that writes each instruction as a line of C; for scalars, without branches."""

    def __init__(self, module: Module, name: str, params: str) -> None:
        super().__init__(module, name, params, "float")
        self.texts: list[str] = []

    def _emit(self, type: str, text: str) -> Value:
        value = super()._emit(type, text)
        self.texts.append(
            f"    const {TYPES[type]} {self.c(value.text, type)} = {self._in_c(text)};"
        )
        return value

    def c(self, text: str, type: str) -> str:
        """A value or a constant."""
        if text.startswith("%"):
            return text[1:].replace(".", "")
        if type == "float":
            return _number(struct.unpack("<d", struct.pack("<Q", int(text, 16)))[0])
        if type == "i1":
            return str(int(text == "true"))
        return f"{int(text) % 2**32}u"

    def _in_c(self, text: str) -> str:
        opcode, _, rest = text.partition(" ")
        if opcode == "call":
            function, values = rest.partition("@llvm.")[2].rstrip(")").split("(")
            args = [self.c(*reversed(value.split(" "))) for value in values.split(", ")]
            called = function.partition(".")[0]
            return (
                "{} * {} + {}".format(*args)
                if called == "fmuladd"
                else f"{called}f({', '.join(args)})"
            )
        if opcode == "bitcast":
            (type, value), to = rest.partition(" to ")[0].split(" "), rest.rpartition(" ")[2]
            return f"{'float' if to == 'float' else 'bits'}_of({self.c(value, type)})"
        if opcode == "select":
            args = [self.c(*reversed(value.split(" "))) for value in rest.split(", ")]
            return "{} ? {} : {}".format(*args)
        how = ""
        if opcode in ("fcmp", "icmp"):
            how, _, rest = rest.partition(" ")
        type, _, values = rest.partition(" ")
        args = [self.c(value, type) for value in values.split(", ")]
        if opcode == "fneg":
            return f"-{args[0]}"
        return COMPARISONS[how].format(*args) if how else f"{args[0]} {SIGNS[opcode]} {args[1]}"
