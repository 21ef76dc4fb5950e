"""The declaration of a cell, and its parser: states, parameters, matmuls, sizes, rates."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

from anycell.lang.expr import Expr, brief, fail, plain, shared_name

RECURRENT = "hh"  # the matmul behind `r`
PROJECTION = "ih"  # the matmul behind `x`, if the step computes it; see `with_projection`
MOST = 48  # states of a cell, for each of which kernels have a bit of a word; and its linears
ONE = "1"  # a size: one unit; such values combine with values of any size
INPUT = "(input)"  # the size of that matmul's operand: a symbol that no cell can declare

# The sizes that type checkers let layers take by keyword: single capital letters.
SizeArguments = TypedDict(  # noqa: UP013 - as a class it would take a line for each letter
    "SizeArguments",
    {
        "A": int, "B": int, "C": int, "D": int, "E": int, "F": int, "G": int, "I": int, "J": int,
        "K": int, "L": int, "M": int, "N": int, "O": int, "P": int, "Q": int, "R": int, "S": int,
        "T": int, "U": int, "V": int, "W": int, "X": int, "Y": int, "Z": int,
    },
    total=False,
)  # fmt: skip

# Names that no size can have, because layers take sizes by keyword, and the layers of some frontend
# have a keyword argument of that name.
RESERVED = frozenset(
    "cell input_size hidden_size num_layers units bias use_bias batch_first dropout "
    "recurrent_dropout bidirectional device dtype checkpoint seed initializer gate_bias "
    "unit_forget_bias kernel_initializer recurrent_initializer bias_initializer param_initializer "
    "kernel_regularizer recurrent_regularizer bias_regularizer param_regularizer "
    "kernel_constraint recurrent_constraint bias_constraint param_constraint "
    "activity_regularizer return_sequences return_state go_backwards stateful unroll "
    "zero_output_for_mask name trainable autocast self".split()
)


@dataclass(frozen=True)
class Gate:
    """A gate, or the static input: ``size`` is a symbol, as for states."""

    name: str
    size: str = "H"


@dataclass(frozen=True)
class State:
    """A state: ``size`` is a symbol ("H" is the hidden size), ``initial`` the value that it starts
    from and resets to.
    """

    name: str
    size: str = "H"
    initial: float = 0.0


@dataclass(frozen=True)
class Param:
    """A per-unit parameter ``[size]``.

    If ``initial`` is None, the framework's convention sets the initial value.
    """

    name: str
    initial: float | None = None
    size: str = "H"


class Declaration(NamedTuple):
    """The arguments of ``@cell``."""

    gates: tuple[Gate, ...]
    states: tuple[State, ...]
    params: tuple[Param, ...]
    static: Gate | None
    bias: bool


@dataclass(frozen=True)
class Linear:
    """One matmul inside a step: ``outputs`` blocks of ``out_size`` from ``operand``,
    block-diagonal with ``heads``.

    Each output is a node ``linear(operand)`` with attributes ``(name, output)``; a matmul without
    ``gates`` has one output, named like the matmul. Weight and bias have rows for each output in
    ``declared``, used or not: the weight by head, then output, the bias by output, then head.
    Matmuls share the weight that their names have before a dot: "hh.i" and "hh.f" are matmuls by
    rows of "weight_hh", and "w" and "w.1" by all of "weight_w".
    """

    name: str
    operand: Expr
    outputs: tuple[str, ...]  # the outputs that the step uses, in declared order
    heads: int
    bias: bool
    in_size: str
    out_size: str
    declared: tuple[str, ...]

    @functools.cached_property
    def shared(self) -> str:
        """The name that the weight has in the cell: "hh" for "hh" and "hh.i"."""
        return shared_name(self.name)

    @functools.cached_property
    def weight(self) -> str:
        """The public name of the weight: "weight_hh" for "hh"."""
        return f"weight_{self.shared}"

    @functools.cached_property
    def bias_name(self) -> str:
        """The public name of the bias; of a matmul without one, a name that no array has."""
        return f"bias_{self.shared if self.bias else self.name}"

    @property
    def recurrent(self) -> bool:
        """Whether this is the matmul behind `r`, or a matmul that shares its weight."""
        return self.shared == RECURRENT

    def __str__(self) -> str:
        heads = f", heads={self.heads}" * (self.heads > 1)
        return f"linear({self.operand!r}, {self.shared!r}{heads})"

    def shape(self, size: Mapping[str, int]) -> tuple[int, ...]:
        """The weight's shape for all outputs: ``[out, in]`` or ``[heads, out/heads, in/heads]``.

        The number of heads divides both sizes; see ``Cell.check_sizes``.
        """
        out, into = size[self.out_size], size[self.in_size]
        rows, columns = len(self.declared) * out // self.heads, into // self.heads
        return (rows, columns) if self.heads == 1 else (self.heads, rows, columns)


def is_recurrent(node: Expr) -> bool:
    """Whether a node is an output of the matmul behind `r`."""
    return node.op in ("linear", "preact") and shared_name(node.attrs[0]) == RECURRENT


def sort_hyperparameters(
    function: Callable[..., Any], given: dict[str, Any]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Splits keyword-only arguments into run-time values (floats) and what selects the graph."""
    signature = inspect.signature(function)
    keyword = {p.name: p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY}
    for name in given:
        if name not in keyword:
            instead = "leave it out, or add a keyword-only argument to its function."
            if close := difflib.get_close_matches(name, keyword, 1):
                instead = f"write {close[0]}={given[name]!r}."
            fail(
                f"Cell {function.__name__} has no hyperparameter {name!r}; "
                f"it has: {', '.join(keyword) or 'none'}.",
                instead,
            )
    hyper: dict[str, float] = {}
    structure: dict[str, Any] = {}
    for name, parameter in keyword.items():
        value = plain(given.get(name, parameter.default))
        subject = f"Cell {function.__name__}: hyperparameter {name}"
        if value is parameter.empty:
            fail(f"{subject} has no default value.", f"write one where it is declared: {name}=0.5.")
        annotated = str(parameter.annotation)
        declared_float = "float" in annotated or isinstance(plain(parameter.default), float)
        kind = type(value).__name__
        if declared_float and isinstance(value, (str, bool)) and kind not in annotated:
            fail(f"{subject} is the {kind} {value!r}; expected a number.", f"{name}=0.5.")
        if isinstance(parameter.default, bool) and not isinstance(value, bool):
            fail(f"{subject} is {value!r}; expected True or False.", f"{name}={parameter.default}.")
        whole = isinstance(value, int) and not isinstance(value, bool)
        if isinstance(value, float) or (declared_float and whole):
            if math.isnan(value):
                fail(f"{subject} is NaN; expected a number.", f"{name}=0.5.")
            hyper[name] = float(value)
        elif value is None or isinstance(value, (bool, int, str, tuple)):
            structure[name] = value
        else:
            fail(
                f"{subject} is a {kind}; expected a float (a run-time value), or a "
                "bool, int, str, tuple or None (which select the graph).",
                "give one of these; declare an array as a per-unit parameter, params=.",
            )
    return hyper, structure


# The forms that a word of a declaration may have, and an example.
_FORMS = {
    "gates": ("name or name:size", "i f g:P done:1"),
    "state": ("name, name:size or name=value", "h:P c m=-inf"),
    "params": ("name, name:size or name=value", "p_i b:P gain=1"),
    "static": ("name or name:size", "e:E"),
}
SYMBOL = re.compile(r"[A-Za-z]\w*")
SIZE = re.compile(rf"{SYMBOL.pattern}|{ONE}")


def words(text: str | Sequence[str], argument: str) -> list[tuple[str, str | None, str | None]]:
    """Splits ``"h:P c m=-inf"``, or a list of such words, into (name, size, value)."""
    declared = f"@cell({argument}={brief(text)})"
    form, example = _FORMS[argument]
    example = f'{argument}="{example}"'
    several = isinstance(text, (list, tuple)) and argument != "static"
    if several and all(isinstance(word, str) for word in text):
        text = " ".join(text)
    if not isinstance(text, str):
        fail(f"{declared}: expected one string.", f"write {example}, with blanks between.")
    out: list[tuple[str, str | None, str | None]] = []
    for word in text.split():
        match = re.fullmatch(rf"({SYMBOL.pattern})(?::({SIZE.pattern}))?(?:=(\S+))?", word)
        if match is None:
            fail(f"{declared}: cannot read {word!r}; expected {form}.", f"write {example}.")
        name, size, value = match.groups()
        if value and "value" not in form:
            fail(
                f"{declared}: cannot read {word!r}; expected {form}.",
                f'write {word.partition("=")[0]!r}. Only states, state="h c=1", and '
                'params="p=1" have initial values.',
            )
        if size:
            check_symbol(size, declared)
        out.append((name, size, value))
    names = [name for name, _, _ in out]
    if len(set(names)) != len(names):
        fail(f"{declared}: a name appears twice.", "give each a name of its own.")
    return out


def check_symbol(size: str, shown: str) -> None:
    """Refuses a size that is named like an argument of layers."""
    if size in RESERVED:
        fail(
            f"{shown}: a size cannot be named {size!r}: layers take sizes by keyword, and have an "
            "argument of that name.",
            "choose another symbol, such as P.",
        )


def number(text: str | None, argument: str) -> float | None:
    """Reads an initial value; returns None if the declaration has none."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        problem = f"@cell({argument}): initial value {text!r} is not a number."
        fail(problem, "write digits, or inf: name=0.5, name=-inf.")
    return value
