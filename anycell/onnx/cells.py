"""The cells of ONNX's recurrent nodes: those of ``anycell.cells``, or with any activations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from anycell import cells
from anycell.lang.cell import Cell, Gates, cell, linear
from anycell.lang.expr import Expr
from anycell.lang.ops import clip, elu, leaky_relu, relu, sigmoid, softplus, softsign, tanh, where

Array = npt.NDArray[Any]
Activation = tuple[Any, ...]  # its name, then the numbers that it takes


class Function(NamedTuple):
    """An activation.

    Attributes:
        of: computes it from a value and its numbers.
        alpha, beta: the default of each number; None if it must be given, ... if it takes none.
    """

    of: Callable[..., Expr]
    alpha: Any = ...
    beta: Any = ...


# With the defaults of ONNX's operators. ONNX Runtime takes 0 for those that must be given here, and
# for the alpha of ThresholdedRelu.
FUNCTIONS = {
    "Affine": Function(lambda v, alpha, beta: alpha * v + beta, None, None),
    "Elu": Function(elu, 1.0),
    "HardSigmoid": Function(lambda v, alpha, beta: clip(alpha * v + beta, 0.0, 1.0), 0.2, 0.5),
    "LeakyRelu": Function(leaky_relu, 0.01),
    "Relu": Function(relu),
    "ScaledTanh": Function(lambda v, alpha, beta: alpha * tanh(beta * v), None, None),
    "Sigmoid": Function(sigmoid),
    "Softplus": Function(softplus),
    "Softsign": Function(softsign),
    "Tanh": Function(tanh),
    "ThresholdedRelu": Function(lambda v, alpha: where(v >= alpha, v, 0.0), 1.0),
}
SIGMOID, TANH = ("Sigmoid",), ("Tanh",)
USUAL = {"LSTM": (SIGMOID, TANH, TANH), "GRU": (SIGMOID, TANH), "RNN": (TANH,)}
FLAGS = {"LSTM": "input_forget", "GRU": "linear_before_reset", "RNN": ""}
ORDERS = {"LSTM": "i o f c".split(), "GRU": "z r h".split(), "RNN": ["h"]}  # of gates in weights


class Form(NamedTuple):
    """A step as a node of ONNX computes it.

    Attributes:
        op: "LSTM", "GRU" or "RNN".
        activations: of one direction.
        clip: bounds the arguments of gates; or None.
        flag: the attribute that ``FLAGS`` names.
        peepholes: whether an LSTM has them.
    """

    op: str
    activations: tuple[Activation, ...]
    clip: float | None = None
    flag: bool = False
    peepholes: bool = False

    def gate(self, k: int, value: Expr) -> Expr:
        """The activation number k of the argument of a gate."""
        return self.activate(k, value if self.clip is None else clip(value, -self.clip, self.clip))

    def activate(self, k: int, value: Expr) -> Expr:
        """The activation number k."""
        name, *numbers = self.activations[k]
        return FUNCTIONS[name].of(value, *numbers)

    def cell(self) -> Cell:
        """The cell, one of ``anycell.cells`` where one fits."""
        usual, plain = self.activations == USUAL[self.op], self.clip is None
        match self.op:
            case "LSTM" if usual and not self.flag:
                made = cells.PeepholeLSTM if self.peepholes else cells.LSTM
                return made if plain else made(gate_clip=self.clip)
            case "GRU" if usual and plain:
                return cells.GRU if self.flag else cells.GRU(reset_after=False)
            case "RNN" if plain and self.activations in (USUAL["RNN"], (("Relu",),)):
                return cells.RNN if usual else cells.RNN(nonlinearity="relu")
        return self.written()

    def written(self) -> Cell:
        """The cell of this module."""
        return (PeepholeLSTM if self.peepholes else _CELLS[self.op])(form=self)


_LSTM, _GRU, _RNN = (Form(op, activations) for op, activations in USUAL.items())


def _lstm(gates: Gates, s: Gates, p: Any, form: Form) -> tuple[Expr, Expr]:
    def seen(a: Expr, name: str, c: Expr) -> Expr:
        return a if p is None else a + getattr(p, name) * c

    i, f, inner, o = gates
    enter = form.gate(0, seen(i, "p_i", s.c))
    stay = 1.0 - enter if form.flag else form.gate(0, seen(f, "p_f", s.c))
    c = stay * s.c + enter * form.gate(1, inner)
    return form.gate(0, seen(o, "p_o", c)) * form.activate(2, c), c


@cell(gates="i f c o", state="h c")
def LSTM(x: Gates, r: Gates, s: Gates, *, form: Form = _LSTM) -> tuple[Expr, Expr]:
    """LSTM with activations f, g, h.

    i, f, o = f(x + r), or f = 1 - i with ``input_forget``
    c' = f c + i g(x_c + r_c)
    h' = o h(c')

    ``clip`` bounds the arguments of f and g, not that of h, as in ONNX Runtime.

    Source: the operators of ONNX, https://onnx.ai/onnx/operators.
    """
    return _lstm(x + r, s, None, form)


@cell(gates="i f c o", state="h c", params="p_i p_f p_o")
def PeepholeLSTM(
    x: Gates, r: Gates, s: Gates, p: Gates, *, form: Form = _LSTM
) -> tuple[Expr, Expr]:
    """LSTM like the one above, whose gates i and f also see ``p c``, and o sees ``p_o c'``."""
    return _lstm(x + r, s, p, form)


@cell(gates="z r h", state="h")
def GRU(x: Gates, r: Gates, s: Gates, *, form: Form = _GRU) -> Expr:
    """GRU with activations f and g.

    z, r = f(x + r)
    n = g(x_h + W_h (r h)), or g(x_h + r r_h) with ``linear_before_reset``
    h' = z h + (1 - z) n
    """
    z, reset = form.gate(0, x.z + r.z), form.gate(0, x.r + r.r)
    n = form.gate(1, x.h + (reset * r.h if form.flag else linear(reset * s.h, "h")))
    return z * s.h + (1.0 - z) * n


@cell(gates="h", state="h")
def RNN(x: Gates, r: Gates, s: Gates, *, form: Form = _RNN) -> Expr:
    """Elman network with any activation: h' = f(x + r)."""
    return form.gate(0, x.h + r.h)


_CELLS = {"LSTM": LSTM, "GRU": GRU, "RNN": RNN}


def form_of(cell: Cell) -> Form | None:
    """The form whose cell this is, or computes the same in gates of other names; else None."""
    known, usual = _known().get(cell.key, (cell.structure.get("form"), cell.hyper))
    if not isinstance(known, Form) or cell.hyper.keys() != usual.keys():
        return None
    bound = cell.hyper.get("gate_clip", known.clip)
    same = all(name == "gate_clip" or usual[name] == v for name, v in cell.hyper.items())
    return known._replace(clip=bound) if same else None


@functools.cache
def _known() -> Mapping[str, tuple[Form, Mapping[str, float]]]:
    """The forms that cells of other modules have, by the keys of these cells."""
    plain = [(name,) for name, function in FUNCTIONS.items() if function.alpha is ...]
    forms = [Form("LSTM", (SIGMOID, f, f)) for f in plain] + [Form("RNN", (f,)) for f in plain]
    forms += [Form("GRU", (SIGMOID, f), None, after) for f in plain for after in (False, True)]
    forms.append(_LSTM._replace(peepholes=True))
    bounded = [_LSTM._replace(clip=1.0, peepholes=seen) for seen in (False, True)]
    made = [(form, form.written()) for form in forms]
    made += [(form, form.cell()) for form in forms + bounded]
    return {c.key: (form, c.hyper) for form, c in made}


def rows(cell: Cell) -> list[str]:
    """The gates of a cell that has a form, as ONNX calls them."""
    return [{"g": "c", "n": "h"}.get(gate, gate) for gate in cell.gates]


def reordered(stacked: Array, before: Sequence[str], after: Sequence[str]) -> Array:
    """A weight or bias with the rows of its gates in another order."""
    parts = dict(zip(before, np.split(stacked, len(before)), strict=True))
    return np.concatenate([parts[gate] for gate in after])
