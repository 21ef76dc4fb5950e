"""The cell language: traces, refusals with their messages, and every derivative.

One file, because half of it is a single table of everything that is refused.
"""

import copy
import functools
import gc
import importlib
import inspect
import itertools
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems import Rows, Sized
from processes import python
from tolerances import assert_close, is_slope

import anycell
from anycell import (
    Cell,
    CellError,
    cell,
    cells,
    clip,
    gelu,
    keep,
    layer_norm,
    linear,
    sigmoid,
    tanh,
    where,
)
from anycell.engines.cpu import table
from anycell.lang.cell import ARRAYS, VARIANTS
from anycell.lang.declare import INPUT, RESERVED
from anycell.lang.expr import CONDITIONS, REDUCTIONS, Expr, apply, const, listing, show, topological
from anycell.lang.namespaces import NUMPY
from anycell.lang.ops import TABLE
from anycell.lang.text import from_text
from anycell.lang.transform import with_projection, with_recurrent_mask
from anycell.layer import names, shapes
from anycell.plan import gradient_roots, passes, plan

Function = Callable[..., Any]


def leaf(name: str) -> Expr:
    return Expr("param", (), (name,))


# -- tracing -------------------------------------------------------------------------------------
def test_a_cell_is_its_graph() -> None:
    @cell(gates="i f g o", state="h c=0.5", params="p_i p_f=1", static="e")
    def Example(x, r, s, p, e, *, rate: float = 0.1, deep: bool = False):
        i, f, g, o = x + r
        c = sigmoid(f + p.p_f * s.c) * s.c + sigmoid(i + p.p_i * e) * tanh(g) * rate
        return sigmoid(o) * (tanh(c) if deep else c), c

    assert Example.name == "Example"
    assert Example.gates == ("i", "f", "g", "o")
    assert [(s.name, s.size, s.initial) for s in Example.states] == [("h", "H", 0), ("c", "H", 0.5)]
    assert [(p.name, p.initial) for p in Example.params] == [("p_i", None), ("p_f", 1)]
    assert Example.static == "e"
    assert Example.hyper == {"rate": 0.1}
    assert Example.structure == {"deep": False}
    assert show(Example.next[0]) == "sigmoid(a.o) * " + show(Example.next[1], level=5)
    assert Example.fused == set("ifgo")
    (hh,) = Example.linears
    assert (hh.name, hh.operand, hh.outputs) == ("hh", Expr("state", (), ("h",)), Example.gates)


def test_the_same_expression_is_the_same_node() -> None:
    a, b = leaf("a"), leaf("b")
    assert apply("add", a, b) is a + b
    assert tanh(a + b) is tanh(a + b)
    assert (a + b) is not (b + a)
    assert leaf("a") is a
    assert Expr("const", (), (0.0,)) is not Expr("const", (), (-0.0,))


def test_expressions_are_freed() -> None:
    gc.collect()
    before = len(Expr._interned)
    node = tanh(leaf("nobody_else_has_this"))
    assert len(Expr._interned) == before + 2
    del node
    gc.collect()
    assert len(Expr._interned) == before


def test_identities_keep_graphs_small() -> None:
    a, b = leaf("a"), leaf("b")
    assert a + 0 is a and 0 + a is a and a - 0 is a
    assert a * 1 is a and 1 * a is a and a / 1 is a
    assert (-a).args[0] is a and (0 - (-a)) is a
    assert a + -b is a - b
    assert a - (-b) is a + b
    assert (2 * a - 2 * a).op == "sub", "it may be NaN"
    assert (a * 0).op == "mul", "it may be NaN"


def test_powers_are_products() -> None:
    a, b = leaf("a"), leaf("b")
    assert a**1 is a
    assert a**3 is a * a * a
    assert a**0.5 is anycell.sqrt(a)
    for power in (a**1.5, a**17, a**0, a**-0.5, a**b, 2**a, np.float64(2) ** a, a**math.nan):
        assert power.op == "pow"
    assert a**-2 is 1.0 / (a * a)


def test_numpy_numbers_are_numbers() -> None:
    a = leaf("a")
    for number in (2, 2.0, np.float64(2), np.float32(2), np.int64(2), np.array(2.0)):
        assert number * a is 2.0 * a
        assert number - a is 2.0 - a
        assert a / number is a / 2.0
        assert (number < a) is (a > 2.0)


def test_numpy_integers_count() -> None:
    node = traced(lambda x, r, s: anycell.mean(linear(x.a, "u", heads=np.int32(2)), np.int64(2)))
    assert node.next[0].attrs == (2,) and type(node.next[0].attrs[0]) is int
    assert node.linears[0].heads == 2
    assert leaf("a") ** np.int64(2) is leaf("a") * leaf("a")


def test_gates_have_order_and_names() -> None:
    @cell(gates="a b", state="h")
    def ByOrder(x, r, s):
        a, b = x + r
        return tanh(a) * b

    @cell(gates="a b", state="h")
    def ByName(x, r, s):
        assert len(x) == 2
        return tanh((x + r).a) * (r + x).b

    assert [show(n) for n in ByOrder.next] == [show(n) for n in ByName.next] == ["tanh(a.a) * a.b"]
    assert ByOrder.key == ByName.key


# -- fusing --------------------------------------------------------------------------------------
def traced(function: Function, **declaration: Any) -> Cell:
    return cell(**{"gates": "a b", "state": "h", **declaration})(function)


@pytest.mark.parametrize(
    ("function", "fused"),
    [
        (lambda x, r, s: tanh(x.a + r.a) * (x.b + r.b), {"a", "b"}),
        (lambda x, r, s: tanh(r.a + x.a) * sigmoid(1.0 + (x.b + r.b)), {"a", "b"}),
        (lambda x, r, s: tanh(x.a + r.b) * (x.b + r.a), set()),  # not the same gate
        (lambda x, r, s: tanh(x.a + r.a) * x.a, set()),  # the projection is also needed alone
        (lambda x, r, s: tanh(x.a + r.a) * r.a, set()),
        (lambda x, r, s: tanh(x.a - r.a), set()),
        (lambda x, r, s: (x.a + r.a) * tanh(x.a + r.a), {"a"}),  # the same sum twice is one sum
        (lambda x, r, s: x.a + r.a, {"a"}),
        (lambda x, r, s: x.a + linear(s.h, "w"), set()),  # another matmul
    ],
)
def test_sums_of_both_projections_fuse(function: Function, fused: set[str]) -> None:
    assert traced(function).fused == fused


def test_gru_keeps_its_candidate_apart() -> None:
    assert cells.GRU.fused == {"r", "z"}
    (hh,) = cells.GRU.linears
    assert hh.outputs == ("r", "z", "n")


def test_matmuls_are_found_in_order() -> None:
    without = cells.GRU(reset_after=False)
    assert [l.name for l in without.linears] == ["hh", "hn"]
    assert without.linears[0].outputs == ("r", "z")
    assert show(without.linears[1].operand) == "sigmoid(a.r) * s.h"


def test_a_matmul_with_several_outputs() -> None:
    @cell(gates="r z n", state="h:P c")
    def Several(x, r, s):
        reset, z = linear(s.h, "rz", gates="r z") + x
        three = linear(reset * s.c, "three", gates="a b c", heads=2)
        assert len(three) == 3
        return linear(three.c + three.a, "down"), z * tanh(x.n)

    rz, three, down = Several.linears
    assert (rz.outputs, rz.declared, rz.heads) == (("r", "z"), ("r", "z"), 1)
    assert (three.outputs, three.declared, three.heads) == (("a", "c"), ("a", "b", "c"), 2)
    assert (down.outputs, down.declared) == (("down",), ("down",))
    assert (rz.in_size, rz.out_size) == ("P", "H")
    assert (down.in_size, down.out_size) == ("H", "P")
    size = {"H": 6, "P": 4}
    assert [l.shape(size) for l in Several.linears] == [(12, 4), (2, 9, 3), (4, 6)]
    assert Expr("linear", (Expr("state", (), ("h",)),), ("rz", "z")) in set(
        topological(Several.next)
    )
    assert "linear(s.h, 'rz').z" in str(list(listing([("c", Several.next[1])])))


def test_outputs_of_a_matmul_are_as_wide_as_each_other() -> None:
    def Wide(x, r, s):
        a, b = linear(x.a, "w", gates="a b")
        return a, b * x.b

    assert "the sizes do not match" in refused(Wide, state="h:P c")


def test_sizes_follow_from_use() -> None:
    @cell(gates="i f g o", state="h:P c")
    def Projected(x, r, s):
        i, f, g, o = x + r
        c = sigmoid(f) * s.c + sigmoid(i) * tanh(g)
        return linear(sigmoid(o) * tanh(c), "hr"), c

    hh, hr = Projected.linears
    assert (hh.in_size, hh.out_size) == ("P", "H")
    assert (hr.in_size, hr.out_size) == ("H", "P")


def test_a_matmul_may_name_its_size() -> None:
    def narrow(x, r, s, *, size: str | None = "R"):
        return tanh(x.a + linear(tanh(linear(s.h, "down", size=size)), "up", gates="k l").l)

    bottleneck = traced(narrow)
    assert [(l.name, l.in_size, l.out_size) for l in bottleneck.linears] == [
        ("down", "H", "R"),
        ("up", "R", "H"),
    ]
    assert [l.shape({"H": 100, "R": 8}) for l in bottleneck.linears] == [(8, 100), (200, 8)]
    wide = bottleneck(size=None)
    assert {(l.in_size, l.out_size) for l in wide.linears} == {("H", "H")}
    assert wide.key != bottleneck.key == bottleneck(size="R").key != bottleneck(size="P").key
    assert [l.out_size for l in with_projection(bottleneck).linears[:2]] == ["R", "H"]
    stated = traced(lambda x, r, s: (linear(x.a, "w", size="P"), x.b + r.b), state="h:P c")
    assert {l.name: l.out_size for l in stated.linears}["w"] == "P"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"H": 12}, None),
        ({"H": 9}, "given H=9 (the hidden size); expected a multiple of 4, because `mean(x.a, "),
        ({"H": 9}, "groups=4)` splits the units into 4 equal parts. Choose 8 or 12, or other"),
        ({"H": 3}, "Choose 4, or other heads or groups"),
        ({"H": 12, "R": 9}, None),
        ({"H": 12, "R": 8}, "given R=8; expected a multiple of 3, because `linear("),
        ({"H": 8, "R": 9}, "given H=8 (the hidden size); expected a multiple of 3, because"),
        ({"R": 9}, None),
    ],
)
def test_parts_divide_sizes(sizes: dict[str, int], message: str | None) -> None:
    def split(x, r, s):
        return linear(linear(s.h, "down", heads=3, size="R"), "up") + anycell.mean(x.a, groups=4)

    refusal = None
    try:
        traced(split).check_sizes(sizes)
    except ValueError as error:
        refusal = str(error)
    assert (message or "Cell split") in (refusal or "Cell split")
    assert (message is None) is (refusal is None)


SPLIT = cells.sLSTM(heads=4)


@pytest.mark.parametrize(
    ("framework", "make"),
    [
        ("numpy", lambda: anycell.numpy.RNN(SPLIT, 12, 10)),
        ("torch", lambda: anycell.torch.RNN(SPLIT, 12, 10)),
        ("torch", lambda: anycell.torch.RNNCell(SPLIT, 12, 10)),
        ("numpy", lambda: anycell.explain(SPLIT, 10)),
        ("numpy", lambda: plan(SPLIT, 10)),
    ],
)
def test_a_layer_is_refused_when_it_is_made(framework: str, make: Function) -> None:
    """test_keras.py has the same test for Keras."""
    pytest.importorskip(framework)
    with pytest.raises(ValueError, match=r"Cell sLSTM: given H=10 .*`linear\(s.h, 'r', heads=4\)`"):
        make()


def test_numbers_fit_any_size() -> None:
    @cell(gates="a", state="h:P c")
    def Scaled(x, r, s, *, scale: float = 2.0):
        half = scale / 2 + 1
        return linear(half * s.c, "down") * half, tanh(x.a + r.a) * half

    assert Scaled.sizes[Scaled.next[0]] == "P"
    assert Scaled.sizes[Scaled.next[1]] == "H"


# -- refusals: each names the line and what to write instead -------------------------------------
def refused(function: Function, **declaration: Any) -> str:
    with pytest.raises(CellError) as error:
        traced(function, **declaration)
    return str(error.value)


def branch(x, r, s):
    if x.a > 0:
        return x.a
    return x.b


def loop(x, r, s):
    return sum(gate for gate in x.a)  # HERE


leaked: dict[str, Expr] = {}


@cell(gates="q", state="h")
def Leaking(x, r, s):
    leaked.update(gate=x.q, matmul=linear(s.h, "zz"), mask=keep(0.25))
    return leaked["gate"]


LINES: list[tuple[Function, str, str]] = [
    (branch, "Control flow on a traced value", "where(condition, a, b)"),
    (lambda x, r, s: x.a if x.a == 0 else x.b, "Control flow", "where(condition, a, b)"),
    (lambda x, r, s: x.a and x.b, "Control flow", "where(condition, a, b)"),
    (lambda x, r, s: max(x.a, x.b), "Control flow", "maximum(a, b) for Python's max(a, b)"),
    (lambda x, r, s: min(x.a, 0), "Control flow", "minimum(a, b) for its min(a, b)"),
    (lambda x, r, s: where(0 < x.a < 1, 1, 0), "Control flow", "(0 < a) & (a < 1) for 0 < a < 1"),
    (lambda x, r, s: sorted([x.a, x.b])[0], "Control flow", "where(condition, a, b)"),
    (lambda x, r, s: anycell.max(x.a, x.b), "max(value, groups=x.b)", "maximum(a, b) of two"),
    (lambda x, r, s: anycell.max(x.a, 0), "max(value, groups=0)", "maximum(a, b) of two"),
    (lambda x, r, s: anycell.sum(x.a, x.b), "sum(value, groups=x.b)", "a + b of two values"),
    (lambda x, r, s: anycell.mean(x.a, x.b), "mean(value, groups=x.b)", "(a + b) / 2 of two"),
    (lambda x, r, s: anycell.max([x.a, x.b]), "list [x.a, x.b]", "a + b, maximum(a, b)"),
    (lambda x, r, s: x.a // 2, "with remainder (//, %, divmod)", "use a / b"),
    (lambda x, r, s: 2 % x.a, "with remainder (//, %, divmod)", "use a / b"),
    (lambda x, r, s: divmod(x.a, 2), "with remainder (//, %, divmod)", "use a / b"),
    (lambda x, r, s: round(x.a), "Rounding", "comparisons and where(condition, a, b)"),
    (lambda x, r, s: math.floor(x.a), "Rounding", "comparisons and where(condition, a, b)"),
    (lambda x, r, s: (x.a > 0) ^ (x.b > 0), "operators ^, <<", "(a & ~b) | (~a & b)"),
    (lambda x, r, s: where(True & (x.a > 0), 1, 0), "got `1`, a number", "where(a > b, yes, no)"),
    (lambda x, r, s: where(True | (x.a > 0), 1, 0), "got `1`, a number", "where(a > b, yes, no)"),
    (lambda x, r, s: f"{x.a:.2f}", "formatted with '.2f'", 'f"{value}"'),
    (lambda x, r, s: f"{x:.2f}", "formatted with '.2f'", 'f"{value}"'),
    (loop, "cannot be unpacked", "name the gate"),
    (lambda x, r, s: max(x.a), "cannot be unpacked", "anycell's sum, mean and max"),
    (lambda x, r, s: len(x.a), "cannot be unpacked", "anycell's sum, mean and max"),
    (lambda x, r, s: reversed(x.a), "cannot be unpacked", "anycell's sum, mean and max"),
    (lambda x, r, s: 0 in x.a, "cannot be unpacked", "anycell's sum, mean and max"),
    (lambda x, r, s: x.a[0], "Indexing a traced value with [0]", "declare another gate or state"),
    (lambda x, r, s: s.h[:, 1:], "Indexing", "mean, sum, max and layer_norm"),
    (lambda x, r, s: x.a.__setitem__(0, 1.0), "In-place edit", "compute a new value"),
    (lambda x, r, s: x.a.__delitem__(0), "In-place edit", "compute a new value"),
    (lambda x, r, s: setattr(s, "h", x.a), "In-place edit of the state 'h'", "its own: h = ..."),
    (lambda x, r, s: x.a @ s.h, "operator @", 'linear(value, "name")'),
    (lambda x, r, s: np.eye(3) @ s.h, "numpy.matmul()", 'linear(value, "name")'),
    (lambda x, r, s: s.h @ np.eye(3), "operator @", 'linear(value, "name")'),
    (lambda x, r, s: np.dot(np.eye(3), s.h), "numpy.dot()", 'linear(value, "name")'),
    (lambda x, r, s: np.einsum("i,i", x.a, s.h), "numpy.einsum()", 'linear(value, "name")'),
    (lambda x, r, s: np.eye(3) @ s, "numpy.matmul()", 'linear(value, "name")'),
    (lambda x, r, s: np.tanh(x.a), "numpy.tanh()", "use anycell.tanh."),
    (lambda x, r, s: np.tanh(x + r), "numpy.tanh()", "use anycell.tanh."),
    (lambda x, r, s: np.mean(x.a), "numpy.mean()", "use anycell.mean."),
    (lambda x, r, s: np.where(x.a > 0, x.a, 0), "numpy.where()", "use anycell.where."),
    (lambda x, r, s: np.abs(x.a), "numpy.absolute()", "write abs(v)"),
    (lambda x, r, s: np.square(x.a), "numpy.square()", "write v * v"),
    (lambda x, r, s: np.power(x.a, 2), "numpy.power()", "write a ** b"),
    (lambda x, r, s: np.sin(x.a), "numpy.sin()", "use anycell.sin."),
    (lambda x, r, s: np.tan(x.a), "numpy.tan()", "write sin(v) / cos(v)"),
    (lambda x, r, s: np.arctan(x.a), "numpy.arctan()", "functions of anycell: abs, clip, cos, "),
    (lambda x, r, s: x.a.dropout(0.1), "no attribute 'dropout'", "write keep(rate) / rate * v"),
    (lambda x, r, s: gelu(x.a, "erf"), "approximate='erf'", '"none" or "tanh"'),
    (lambda x, r, s: np.asarray(x.a), "numpy.array()", "functions of anycell: abs, clip, cos, "),
    (lambda x, r, s: math.exp(x.a), "turned into a number", "of anycell: abs, clip, cos, "),
    (lambda x, r, s: complex(x.a), "turned into a number", "of anycell: abs, clip, cos, "),
    (lambda x, r, s: float(x.a), "turned into a number", "functions of anycell"),
    (lambda x, r, s: x.a.sigmoid(), "no attribute 'sigmoid'", "use anycell.sigmoid."),
    (lambda x, r, s: x.a.clamp(0, 1), "no attribute 'clamp'", "write clip(v, low, high)"),
    (lambda x, r, s: x.a.shape, "no attribute 'shape'", "functions of anycell: abs, clip"),
    (lambda x, r, s: x.a * np.ones(3), "ndarray array([1., 1., 1.])", "per-unit parameter"),
    (lambda x, r, s: np.ones(3) * x.a, "ndarray array([1., 1., 1.])", "per-unit parameter"),
    (lambda x, r, s: x.a * "2", "str '2' inside a cell", "hyperparameter"),
    (lambda x, r, s: tanh(x + r), "All gates at once", "unpack them first"),
    (lambda x, r, s: x.a**None, "NoneType None inside a cell", "hyperparameter"),
    (lambda x, r, s: x.a ** (x.b > 0), "a condition, where it takes a number", "1.0, 0.0)"),
    (lambda x, r, s: x.a**10**400, "beyond the range of a double", 'write float("inf")'),
    (lambda x, r, s: pow(x.a, 2, 3), "pow(x, 2, 3) is outside", "use x ** y"),
    (lambda x, r, s: x.a + 10**400, "beyond the range of a double", 'float("inf")'),
    (lambda x, r, s: x.a + np.array(1j), "ndarray array(0.+1.j)", "hyperparameter"),
    (lambda x, r, s: -x, "All gates at once", "unpack them first"),
    (lambda x, r, s: x / 2, "All gates at once", "unpack them first"),
    (lambda x, r, s: 1 - x, "All gates at once", "unpack them first"),
    (lambda x, r, s: np.float32(1) - x, "All gates at once", "unpack them first"),
    (lambda x, r, s: x**2, "All gates at once", "unpack them first"),
    (lambda x, r, s: x["a"], "All gates at once", "or use x.i"),
    (lambda x, r, s: x[0], "All gates at once", "or use x.i"),
    (lambda x, r, s: x > 0, "All gates at once", "or use x.i"),
    (lambda x, r, s: x and r, "All gates at once", "or use x.i"),
    (lambda x, r, s: cells.RNN(x, r, s), "RNN was called with 3 positional",
     "RNN.function(x, r, s)"),
    (lambda x, r, s: x.a + cells.RNN, "Cell RNN() inside a cell", "hyperparameter"),
    (lambda x, r, s: x.c, "No gate is named 'c'; this cell declares: a b", "use one of: a b"),
    (lambda x, r, s: s.c, "No state is named 'c'; this cell declares: h", "use one of: h"),
    (lambda x, r, s: (x + s).a, "No state is named 'a'", "use one of: h"),
    (lambda x, r, s: where(x.a, 1.0, 0.0), "got `x.a`, a number", "where(a > b, yes, no)"),
    (lambda x, r, s: where(True, x.a, 0.0), "got `1`, a number", "where(a > b, yes, no)"),
    (lambda x, r, s: (x.a > 0) + x.b, "got `x.a > 0`, a condition", "where(condition, 1.0, 0.0)"),
    (lambda x, r, s: where((x.a > 0) & x.b, 1, 0), "got `x.b`, a number", "&, | and ~"),
    (lambda x, r, s: keep(1.5), "outside [0, 1]", "a rate in [0, 1]"),
    (lambda x, r, s: keep(math.nan), "outside [0, 1]", "a rate in [0, 1]"),
    (lambda x, r, s: keep("a"), "str 'a' inside a cell", "hyperparameter"),
    (lambda x, r, s: keep(None), "NoneType None inside a cell", "hyperparameter"),
    (lambda x, r, s: keep(x), "All gates at once", "unpack them first"),
    (lambda x, r, s: keep(s.h > 0), "keep() got `s.h > 0`, a condition", "1.0, 0.0)"),
    (lambda x, r, s: linear(s.h > 0, "u"), "linear() got `s.h > 0`, a condition", "1.0, 0.0)"),
    (lambda x, r, s: keep(0.5, per="batch"), "per='batch'", 'per="sequence"'),
    (lambda x, r, s: linear(s.h, "w") + linear(x.a, "w", bias=True), "name share a weight",
     "another name is another weight, learned separately"),
    (lambda x, r, s: linear("w", s.h), "linear(..., s.h): the weight needs", 'linear(value, "na'),
    (lambda x, r, s: linear(s.h, "w", bias="no"), "bias='no'): expected True or", "bias=True"),
    (lambda x, r, s: linear(s.h, "w", size=8), "size=8): expected a symbol", "RNN(cell, 12, 100,"),
    (lambda x, r, s: linear(s.h, "w", size="P=8"), "'P=8'): expected a symbol", 'size="R"'),
    (lambda x, r, s: linear(s.h, "w", size="dropout"), "cannot be named 'dropout'", "such as P"),
    (lambda x, r, s: linear(s.h, "hh"), "this name is taken", "another name"),
    (lambda x, r, s: linear(s.h, "ih"), "this name is taken", "another name"),
    (lambda x, r, s: linear(s.h, "u") + linear(s.h, "u_bias"), "(..._bias)", "another name"),
    (lambda x, r, s: linear(s.h, "hh_bias"), "(..._bias)", "another name"),
    (lambda x, r, s: linear(s.h, "w", heads="2"), "heads='2'", "a positive integer"),
    (lambda x, r, s: linear(s.h, "w", gates=3).a, "gates=3", 'one string: gates="r z"'),
    (lambda x, r, s: linear(s.h, ""), "needs a name", 'linear(value, "name")'),
    (lambda x, r, s: linear(s.h, "w", heads=0), "heads=0", "a positive integer"),
    (lambda x, r, s: linear(r.a), "linear(...): the weight needs a name", 'linear(value, "name")'),
    (lambda x, r, s: linear(s.h, "w", gates="a a").a, "gates='a a'", 'gates="r z"'),
    (lambda x, r, s: linear(s.h, "w", gates="").a, "gates=''", 'gates="r z"'),
    (lambda x, r, s: linear(s.h, "w", gates="a b").c, "No output is named 'c'", "use one of: a b"),
    (lambda x, r, s: anycell.mean(x.a, groups=0), "groups=0", "a positive integer"),
    (lambda x, r, s: anycell.mean(x.a, groups=2.0), "groups=2.0", "a positive integer"),
    (lambda x, r, s: layer_norm(x.a, groups=x.b), "groups=", "a positive integer"),
    # Errors found after the function returned name its last line.
    (lambda x, r, s: x, "returned all gates at once; it declares 1 state(s): h", "`return h`"),
    (lambda x, r, s: (x.a, x.b), "returned 2 value(s); it declares 1 state(s): h", "`return h`"),
    (lambda x, r, s: None, "returned NoneType for the new state 'h'", "a traced value"),
    (lambda x, r, s: x.a > 0, "returned a condition", "where(condition, 1.0, 0.0)"),
    (lambda x, r, s: x.a / 0, "a value is divided by 0; expected another", "the expression"),
    (lambda x, r, s: clip(x.a, 1, 0), "clipped to between 1 and 0", "the bounds"),
    (lambda x, r, s: layer_norm(x.a, eps=-1e-5), "of a mean of squares plus -1e-05", "the express"),
    (lambda x, r, s: layer_norm(x.a, eps=np.nan), "of a mean of squares plus nan", "expression"),
    (lambda x, r, s: clip(x.a, np.nan, 1), "clipped to between nan and 1", "the bounds"),
    (lambda x, r, s: x.a + leaked["gate"], "made of `x.q`, which belongs to another", "is given"),
    (lambda x, r, s: leaked["matmul"], "made of `linear(s.h, 'zz')`, which", "is given"),
    (lambda x, r, s: leaked["mask"] * x.a, "made of `keep_0(0.25)`, which", "is given"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "problem", "instead"), LINES)
def test_refusals_name_line_and_remedy(function: Function, problem: str, instead: str) -> None:
    message = refused(function)
    assert f"{__file__}:" in message
    where_, _, rest = message.partition("\n    ")
    line, _, said = rest.partition("\n")
    assert where_.endswith(f"in cell {function.__name__}")
    first = function.__code__.co_firstlineno
    number = int(where_.split(":")[-2])
    assert first <= number <= first + 2
    with open(__file__) as source:
        assert line == source.read().splitlines()[number - 1].strip()
    assert problem in said
    assert instead in said.partition("Instead: ")[2]


def helper(value: Expr) -> Expr:
    if value > 0:
        return value
    return -value


def test_a_refusal_names_the_line_of_the_function_that_the_cell_calls() -> None:
    line = helper.__code__.co_firstlineno + 1
    for function in (lambda x, r, s: helper(x.a), lambda x, r, s: sorted(map(helper, x))):
        said = refused(function)
        place = f"{__file__}:{line}: in helper, called in cell <lambda>\n    if value > 0:\n"
        assert said.startswith(f"{place}Control flow on a traced value")


def test_a_declaration_is_refused_with_its_line() -> None:
    with pytest.raises(CellError, match="in a declaration") as error:
        cell(gates="a", states="h c")  # type: ignore[call-overload]
    said = str(error.value)
    assert said.startswith(f"{__file__}:") and '    cell(gates="a", states="h c")' in said
    assert "@cell(states=...): expected one of gates, state, params, static, bias." in said
    assert "Instead: write state='h c'." in said
    with pytest.raises(
        CellError, match=r'in a declaration\n    cell.gates="a 2b"(.|\n)*cannot read'
    ):
        cell(gates="a 2b")
    with pytest.raises(
        CellError, match=r"in cell Few\n    def Few\(x, r\)(.|\n)*takes 2 positional"
    ):

        @cell(gates="a", state="h")
        def Few(x, r):
            return x.a

    with pytest.raises(CellError, match=r"takes \(x, r, s, e, p\), .* order \(x, r, s, p, e\)"):

        @cell(gates="a", params="w", static="e")
        def Swapped(x, r, s, e, p):
            return x.a


def test_torch_functions_are_refused() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.ones(3, 3)
    for function, instead in [
        (lambda x, r, s: torch.tanh(x.a), "use anycell.tanh."),
        (lambda x, r, s: torch.sigmoid(x + r), "use anycell.sigmoid."),
        (lambda x, r, s: torch.nn.ReLU()(x.a), "use anycell.relu."),
        (lambda x, r, s: torch.where(x.a > 0, x.a, 0), "use anycell.where."),
        (lambda x, r, s: torch.clamp(x.a, 0, 1), "write clip(v, low, high)"),
        (lambda x, r, s: torch.softmax(x.a, -1), "use anycell.softmax."),
        (lambda x, r, s: torch.dropout(x.a, 0.5, True), "write keep(rate) / rate * v"),
        (lambda x, r, s: torch.cat([x.a, x.b]), "functions of anycell: abs, clip, "),
        (lambda x, r, s: weight @ s.h, 'linear(value, "name")'),
        (lambda x, r, s: torch.nn.Linear(3, 3)(s.h), 'linear(value, "name")'),
    ]:
        said = refused(function)
        assert "torch." in said and instead in said.partition("Instead: ")[2]
    for function in (lambda x, r, s: weight * s.h, lambda x, r, s: s.h - weight):
        assert "params=" in refused(function)


@pytest.mark.more  # importing jax takes seconds
def test_functions_of_other_libraries_are_refused() -> None:
    """Such functions inspect a value's attributes before they try to convert it."""
    jnp = pytest.importorskip("jax.numpy")
    for function in (lambda x, r, s: jnp.tanh(x.a), lambda x, r, s: jnp.ones(3) * x.a):
        assert "\nInstead: " in refused(function)
    assert 'linear(value, "name")' in refused(lambda x, r, s: jnp.ones((3, 3)) @ s.h)


@pytest.mark.parametrize(
    ("function", "declaration", "message"),
    [
        (lambda x, r, s: x.a, {"state": "h c"}, "return the new states in the declared order"),
        (lambda x, r, s: x + r, {"state": "h c"}, "`return h, c`"),
        (lambda x, r, s: x.a + s.h, {"state": "h:P"}, "one of size"),
        (lambda x, r, s: x.a, {"state": "h:P"}, 'change the size with linear(value, "name")'),
        (lambda x, r, s: (s.c, tanh(x.a)), {"state": "h:P c"}, "do not match"),
        (lambda x, r, s: (s.h * (k := keep(0.5)), s.c * k), {"state": "h:P c"}, "do not match"),
        (lambda x, r: x.a, {}, "takes 2 positional arguments"),
        (lambda x, r, s: x.a, {"params": "p"}, "(x, r, s, p)"),
        (lambda x, r, s, p: x.a, {"params": "p", "static": "e"}, "(x, r, s, p, e)"),
        (lambda x, r, s: x.a, {"state": ""}, "at least one state"),
        (lambda x, r, s: x.a, {"state": " ".join(f"s{k}" for k in range(49))}, "at most 48"),
        (lambda x, r, s: sum(linear(s.h, f"w{k}") for k in range(49)), {}, "at most 48"),
        (lambda x, r, s: x.a, {"gates": "a a"}, "a name appears twice"),
        (lambda x, r, s: x.a, {"state": "h h"}, "a name appears twice"),
        (lambda x, r, s, p: x.a, {"params": "p p"}, "a name appears twice"),
        (lambda x, r, s: x.a, {"gates": "a 2b"}, "cannot read '2b'"),
        (lambda x, r, s: x.a, {"gates": "a=3 b"}, "'a=3'; expected name or name:size."),
        (lambda x, r, s: x.a, {"gates": "a b:2"}, "cannot read 'b:2'; expected name or name:size"),
        (lambda x, r, s: x.a, {"gates": "a b:Q=1"}, "Instead: write 'b:Q'. Only states"),
        (lambda x, r, s: x.a, {"gates": "a b=1"}, "Instead: write 'b'. Only states"),
        (lambda x, r, s, p: x.a, {"params": "w:units"}, "named 'units': layers take sizes"),
        (lambda x, r, s, e: x.a, {"static": "e=1"}, "'e=1'; expected name or name:size."),
        (lambda x, r, s, e: x.a, {"static": "e f"}, "static='e f'): expected one name"),
        (lambda x, r, s, e: x.a, {"static": "e f"}, 'Instead: name one, static="e"'),
        (lambda x, r, s: x.a, {"bias": "no"}, "bias='no'): expected True or False"),
        (lambda x, r, s: x.a, {"bias": 1}, "bias=1): expected True or False"),
        (lambda x, r, s: x.a, {"bias": None}, "bias=None): expected True or False"),
        (lambda x, r, s: (linear(x.a, "w", size="P"), x.b), {"state": "h:Q c"}, "do not match"),
        (lambda x, r, s: linear(x.a, "w", size="P") * x.b, {}, "do not match"),
        (lambda x, r, s, e: x.a, {"static": ""}, "static=''): expected one name"),
        (lambda x, r, s, e: x.a, {"static": True}, "static=True): expected one string"),
        (lambda x, r, s, e: x.a, {"static": ["e"]}, "static=['e']): expected one string"),
        (lambda x, r, s: x.a, {"gates": ["a", 2]}, "gates=['a', 2]): expected one string"),
        (lambda x, r, s: x.a, {"gates": ["a", "a"]}, "a name appears twice"),
        (lambda x, r, s: x.a, {"state": "h:dropout c"}, "named 'dropout': layers take sizes"),
        (lambda x, r, s, **k: x.a, {}, "takes **k, but nothing is ever passed to it"),
        (lambda x, r, s, *k: x.a, {}, "takes *k, but nothing is ever passed to it"),
        (functools.partial(lambda x, r, s: x.a), {}, "was given functools.partial("),
        (cells.LSTM, {}, "was given LSTM()"),
        (lambda x, r, s: x.a, {"state": "h=nan"}, "'nan' is not a number"),
        (lambda x, r, s: x.a, {"state": "h=zero"}, "'zero' is not a number"),
        (lambda x, r, s, *, k: x.a, {}, "hyperparameter k has no default value"),
        (lambda x, r, s, *, k=math.nan: x.a, {}, "hyperparameter k is NaN"),
        (lambda x, r, s, *, k=b"": x.a, {}, "hyperparameter k is a bytes"),
    ],
)
def test_declarations_are_checked(function: Function, declaration: Any, message: str) -> None:
    said = refused(function, **declaration)
    assert message in said
    assert "\nInstead: " in said


# -- sizes of gates, parameters and static inputs --------------------------------------------------
def test_gates_have_places_in_the_projected_input() -> None:
    sizes = {"H": 6, "P": 4, "1": 1}
    assert Rows.gate_sizes == {"done": "1", "i": "H", "g": "P"}
    assert [(p.name, p.size) for p in Rows.params] == [("k", "1"), ("w", "P"), ("u", "H")]
    assert (Rows.static, Rows.static_size) == ("e", "1")
    assert Rows.places(sizes) == {"done": slice(0, 1), "i": slice(1, 7), "g": slice(7, 11)}
    assert (Rows.width(sizes), Rows.shown_width) == (11, "1 + H + P")
    assert (Sized.shown_width, cells.LSTM.shown_width) == ("2 * P + 2 * H", "4 * H")
    assert plan(Rows, 6, sizes={"P": 4}).places == Rows.places(sizes)
    alike = shapes(Rows, sizes, 3, True)
    assert (alike["weight_ih"], alike["bias_ih"]) == ((11, 3), (11,))
    assert (alike["weight_hh"], alike["bias_hh"]) == ((6, 4), (6,))
    assert [alike[name] for name in Rows.param_names] == [(1,), (4,), (6,)]


def test_sizes_are_part_of_the_computation() -> None:
    def step(x, r, s, p):
        return tanh(x.a + r.a) * p.b

    plain = cell(gates="a b", params="b")(step)
    assert "sizes" not in plain.key
    for declaration in ({"gates": "a b:P"}, {"gates": "a b:1"}, {"gates": "a", "params": "b:1"}):
        assert cell(**{"gates": "a b", "params": "b", **declaration})(step).key != plain.key


def test_only_gates_of_size_h_have_a_recurrent_projection() -> None:
    said = refused(lambda x, r, s: (x + r).a, gates="a b:P")
    assert "The gate 'b' has the size P, and `r` only gates of size H." in said
    assert 'size="P"); add the others one by one: x.a + r.a.' in said
    assert "has the size 1" in refused(lambda x, r, s: r.b, gates="b:1")
    only = traced(lambda x, r, s: tanh((r + x).a) * x.b, gates="a b:1")
    (hh,) = only.linears
    assert hh.declared == ("a",)


def test_a_value_of_size_1_meets_every_size() -> None:
    @cell(gates="a k:1", state="h:P c")
    def Both(x, r, s):
        k = sigmoid(x.k)
        return k * tanh(linear(s.c, "w")), k * s.c + x.a

    assert Both.broadcasts and not traced(lambda x, r, s: x.a).broadcasts
    k = next(node for node in topological(Both.next) if node.op == "sigmoid")
    assert k.narrow and Both.sizes[k] == "1"
    assert [Both.sizes[node] for node in Both.next] == ["P", "H"]


def test_reductions_are_of_size_1_where_a_size_of_1_is_declared() -> None:
    def step(x, r, s):
        return x.a + r.a, anycell.mean(s.h) + x.k

    one = cell(gates="a k:1", state="h n:1")(step)
    assert one.sizes[one.next[1]] == "1"
    plain = cell(gates="a k", state="h n")(step)
    assert plain.sizes[plain.next[1]] == "H"
    # Without any size of 1 they have the size of what they reduce.
    function = lambda x, r, s: (x.a + r.a, anycell.mean(s.h) * s.c)  # noqa: E731
    assert "the sizes do not match" in refused(function, state="h c:P")
    fitting = cell(gates="a k:1", state="h c:P")(function)
    assert fitting.sizes[fitting.next[1]] == "P"


@pytest.mark.parametrize(
    ("function", "declaration", "message"),
    [
        (lambda x, r, s: (x.a, s.h), {"state": "h n:1"}, "joins a value of size 1 with one"),
        (lambda x, r, s: s.h + anycell.sum(x.k, groups=2), {"gates": "k:1"}, "into 2 groups"),
        (lambda x, r, s: s.h + linear(x.k, "w", heads=2), {"gates": "k:1"}, "into 2 heads"),
        (lambda x, r, s: s.h + linear(s.h, "w", heads=3, size="1"), {}, "into 3 heads"),
        (lambda x, r, s: s.h + linear(s.h, "w", size="2"), {}, "expected a symbol, or 1."),
    ],
)
def test_sizes_of_1_are_checked(function: Function, declaration: Any, message: str) -> None:
    said = refused(function, **declaration)
    assert message in said
    assert "\nInstead: " in said


def test_a_cell_may_have_no_gates() -> None:
    still = cell(gates="", state="h")(lambda x, r, s: tanh(linear(s.h, "w")))
    assert (still.gates, still.shown_width, still.width({"H": 3})) == ((), "0", 0)
    assert "W_ih" not in str(anycell.explain(still, 6))
    with pytest.raises(ValueError, match=r"cell: given <lambda>, which has no gates; expected"):
        anycell.numpy.RNN(still, 3, 6)
    assert "No gate is named 'a'; this cell declares: none." in refused(
        lambda x, r, s: x.a + s.h, gates=""
    )


def test_the_page_shows_the_sizes() -> None:
    page = str(anycell.explain(Rows, 8, P=5))
    assert "W_ih     [1 + H + P, inputs]: [14, inputs]" in page
    assert "W_hh     [1 H, P]: [8, 5]" in page
    assert "d_W_ih += (d_x.done, d_x.i, d_x.g).T @ input" in page
    assert "W_ih     [2 P + 2 H, inputs]\n" in str(anycell.explain(Sized))


def test_names_may_be_a_list() -> None:
    def step(x, r, s, p):
        i, g = x + r
        both = linear(s.h, "w", gates=["i", "g"])
        return sigmoid(i + both.i) * s.c + p.p, tanh(g + both.g)

    listed = cell(gates=["i", "g"], state=("h", "c=1"), params=["p=2"])(step)
    assert listed.key == cell(gates="i g", state="h c=1", params="p=2")(step).key
    assert listed.gates == ("i", "g") and listed.states[1].initial == 1.0


def test_a_wrong_return_is_told_by_the_line_that_returns() -> None:
    with pytest.raises(anycell.CellError, match=r"return first \+ x\.b\nCell Wrong returned 1"):

        @cell(gates="a b", state="h c")
        def Wrong(x, r, s):
            first = x.a + r.a
            return first + x.b


@pytest.mark.parametrize(
    ("function", "params", "message"),
    [
        (lambda u: u, "bias_hh", "the bias of the projection of the first state and the parameter"),
        (lambda u: u, "weight_ih", "the parameter 'weight_ih', both by the name weight_ih"),
        (lambda u: linear(u, "u"), "weight_u", "the weight of linear(..., 'u') and the parameter"),
        (lambda u: linear(u, "u", bias=True), "bias_u", "both by the name bias_u"),
    ],
)
def test_what_a_layer_learns_has_a_name_of_its_own(
    function: Function, params: str, message: str
) -> None:
    def named(x, r, s, p):
        return function(x.a)

    said = refused(named, params=params)
    assert message in said and "rename one of them" in said
    assert (
        f"{__file__}:{named.__code__.co_firstlineno + 1}: in cell named" in said
    )  # what it returns


def test_no_parameter_has_the_name_of_an_array() -> None:
    """One entry of a call's table would mean two arrays."""
    for name in sorted(ARRAYS):
        with pytest.raises(CellError, match=f"the parameter '{name}' has the name of an array"):
            traced(lambda x, r, s, p: s.h, params=name)
    for backward in (False, True):
        learned = {*cells.EALSTM.learned, "bias_ih", "bias_hh"}
        entries = set(table.names(plan(cells.EALSTM, 8), backward).each)
        assert {name for name in entries if name.isidentifier()} - learned <= ARRAYS


def test_a_bias_that_is_not_there_takes_no_name() -> None:
    assert traced(lambda x, r, s, p: linear(x.a, "u") * p.bias_u, params="bias_u").linears


def test_names_of_the_reverse_direction() -> None:
    """Arrays of the reverse direction have such names, so no other array may."""
    message = r"names that end in '_reverse' belong to the reverse direction(.|\n)*rename it"
    with pytest.raises(CellError, match=message):
        traced(lambda x, r, s: linear(s.h, "u_reverse"))
    with pytest.raises(CellError, match=message):
        traced(lambda x, r, s, p: s.h * p.p_reverse, params="p_reverse")


def test_names_of_all_that_a_layer_learns() -> None:
    for one in (cells.LSTM, cells.IndRNN, cells.GRUD, cells.LSTMP, cells.sLSTM(heads=2)):
        sizes = dict.fromkeys([*one.sizes.values(), "H"], 4)
        for masked in (one, with_recurrent_mask(one, True)):
            assert set(masked.learned) == set(shapes(masked, sizes, 3, True))
    assert names(cells.GRU(reset_after=False), 2) == (
        *("x", "static", "mask", "resets", "recurrent_mask", "state h", "reset_state h"),
        *("weight_ih", "bias_ih", "weight_hh", "bias_hh", "weight_hn"),
        *(f"{kind}_reverse" for kind in ("weight_ih", "bias_ih", "weight_hh", "bias_hh")),
        "weight_hn_reverse",
        *("scales weight_ih", "scales weight_hh", "scales weight_hn"),
        *(f"scales {kind}_reverse" for kind in ("weight_ih", "weight_hh", "weight_hn")),
    )


def test_any_name_is_a_gate_s() -> None:
    assert show(traced(lambda x, r, s: x.is_gates, gates="is_gates").next[0]) == "x.is_gates"


@pytest.mark.parametrize("frontend", ["torch", "numpy"])
def test_no_size_is_named_as_an_argument_of_a_layer(frontend: str) -> None:
    pytest.importorskip(frontend)
    layer = importlib.import_module(f"anycell.{frontend}").RNN
    named = {
        p.name for p in inspect.signature(layer).parameters.values() if p.kind != p.VAR_KEYWORD
    }
    assert named and named <= RESERVED


def test_a_size_may_have_any_other_name() -> None:
    sized = traced(lambda x, r, s: (linear(x.a, "w"), x.b + r.b), state="h:input c")
    (w, hh) = sorted(with_projection(sized).linears[:2], key=lambda l: l.name != "w")
    assert (w.out_size, hh.in_size) == ("input", "input")
    assert with_projection(sized).linears[-1].in_size == INPUT != "input"


def test_functions_of_a_step_need_a_cell() -> None:
    for function in (lambda: keep(0.5), lambda: linear(leaf("a"), "w")):
        with pytest.raises(CellError, match="outside a cell"):
            function()


def test_a_refusal_leaves_nothing_behind() -> None:
    refused(branch)
    with pytest.raises(CellError, match=r"^Control flow"):
        bool(leaf("a"))  # no cell is being traced: no line to name
    assert traced(lambda x, r, s: x.a).next


# -- hyperparameters -----------------------------------------------------------------------------
@cell(gates="a b", state="h")
def Tuned(x, r, s, *, rate: float = 0.5, bound: float | None = None, deep: bool = False):
    """A cell at module level, so that it can be imported."""
    value = rate * tanh(x.a + r.a)
    if bound is not None:
        value = clip(value, -bound, bound)
    return tanh(value) if deep else value


def test_run_time_hyperparameters_share_a_graph() -> None:
    assert Tuned(rate=0.25).key == Tuned.key
    assert Tuned(rate=0.25).hyper == {"rate": 0.25}
    assert Tuned(rate=0.25) != Tuned
    assert Tuned() is Tuned
    assert Tuned(rate=0.5) == Tuned
    assert Tuned(rate=1).hyper == {"rate": 1.0}, "an int where a float is declared"
    assert Tuned(bound=3).hyper == {"rate": 0.5, "bound": 3.0}


def test_structural_hyperparameters_make_another_graph() -> None:
    assert Tuned(deep=True).key != Tuned.key
    assert Tuned(bound=1.0).key != Tuned.key
    assert Tuned(deep=True)(rate=0.1).structure == {"bound": None, "deep": True}
    assert Tuned(deep=True)(rate=0.1).key == Tuned(deep=True).key


def test_numpy_numbers_are_hyperparameters() -> None:
    for number in (np.float32(2), np.float64(2), np.int64(2), np.array(2.0)):
        assert Tuned(rate=number).hyper == {"rate": 2.0}
    assert Tuned(deep=np.bool_(True)).structure == {"bound": None, "deep": True}
    assert repr(Tuned(rate=np.float32(2))) == "Tuned(rate=2.0)"


def test_names_for_all_gates() -> None:
    def few(x, r, s):
        i, f, g = x + r
        return i * f * g

    def many(x, r, s):
        i, f, g, o, p = r
        return i * f * g * o * p

    for function, said in ((few, "too many"), (many, "not enough")):
        with pytest.raises(CellError) as error:
            cell(gates="i f g o", state="h")(function)
        message = str(error.value)
        assert f"in cell {function.__name__}" in message and said in message
        assert "in the declared order: gates i f g o; states h." in message
        assert " = x + r" in message or " = r" in message

    def other(x, r, s):
        raise ValueError("of one's own")

    with pytest.raises(ValueError, match="of one's own") as own:
        cell(gates="i", state="h")(other)
    assert not isinstance(own.value, CellError)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cells.LSTM(1, 2), "LSTM was called with 2 positional argument(s)"),
        (lambda: cell(lambda x, r, s: x.a), "in place of a declaration"),
        (lambda: cell("a b"), "was given 'a b' in place of a declaration"),
        (lambda: cell()(lambda x, r, s: x.a), "this cell declares: none"),
        (lambda: Tuned(rate=np.bool_(True)), "rate is the bool True; expected a number"),
        (lambda: Tuned(rate=np.str_("half")), "rate is the str 'half'; expected a number"),
        (lambda: Tuned(rate=math.nan), "rate is NaN; expected a number"),
        (lambda: Tuned(speed=1.0), "no hyperparameter 'speed'; it has: rate, bound, deep"),
        (lambda: Tuned(speed=1.0), "Instead: leave it out, or add a keyword-only argument"),
        (lambda: Tuned(bond=1.0), "Instead: write bound=1.0."),
        (lambda: Tuned(rate=np.ones(2)), "rate is a ndarray; expected a float"),
        (lambda: Tuned(rate="half"), "rate is the str 'half'; expected a number"),
        (lambda: Tuned(rate=True), "rate is the bool True; expected a number"),
        (lambda: cells.ZoneoutLSTM(zoneout_h=1.5), "zoneout_h=1.5, zoneout_c=0.5, the probability"),
        (lambda: cells.ZoneoutGRU(zoneout=-0.1), "1 - zoneout, is 1.1; expected one in [0, 1]"),
        (lambda: cells.VariationalLSTM(dropout=2), "is -1; expected one in [0, 1]"),
        (lambda: cells.VariationalLSTM(dropout=1), "divided by 1 - dropout, which is 0"),
        (lambda: Tuned(bound=-1.0), "clipped to between 1 and -1; expected a lower bound"),
        (lambda: cells.PeepholeLSTM(cell_clip=-2), "clipped to between 2 and -2"),
        (
            lambda: cells.LayerNormGRU(eps=-1.0),
            "given eps=-1, a root is taken of a mean of squares",
        ),
        (lambda: cells.PeepholeLSTM(coupled="no"), "coupled is 'no'; expected True or False"),
    ],
)
def test_calls_are_checked(make: Function, message: str) -> None:
    with pytest.raises(CellError) as error:
        make()
    assert message in str(error.value)


def test_cells_print_as_they_are_made() -> None:
    assert repr(Tuned) == "Tuned()"
    assert repr(Tuned(rate=0.25, deep=True)) == "Tuned(rate=0.25, deep=True)"


def test_cells_pickle_by_name() -> None:
    here = pickle.loads(pickle.dumps(cells.PeepholeLSTM(coupled=True, cell_clip=3.0)))
    assert here == cells.PeepholeLSTM(coupled=True, cell_clip=3.0)
    assert hash(here) == hash(cells.PeepholeLSTM(coupled=True, cell_clip=3.0))
    assert pickle.loads(pickle.dumps(cells.LSTM)) is cells.LSTM


def test_a_cell_that_no_module_holds_is_refused_when_it_is_pickled() -> None:
    with pytest.raises(pickle.PicklingError, match=r"no such cell at its top level") as error:
        pickle.dumps(traced(lambda x, r, s: x.a))
    assert "Instead: define the cell at the top level" in str(error.value)


PRINTED = """
@cell(gates="a", state="h")
def Printed(x, r, s, *, rate: float = 0.5):
    return rate * s.h + tanh(x.a + r.a)
"""


def test_a_cell_made_from_text_pickles_as_its_text() -> None:
    made = from_text(PRINTED)
    assert made is from_text(PRINTED) and made.text == PRINTED and Tuned.text is None
    assert made(rate=0.25).text == PRINTED
    assert pickle.loads(pickle.dumps(made)) is made
    assert pickle.loads(pickle.dumps(made(rate=0.25))) is made(rate=0.25)
    assert copy.deepcopy(made) is made
    assert "h' = rate * s.h + a\n" in str(anycell.explain(made))


def test_a_new_process_restores_a_cell_from_its_text() -> None:
    data = pickle.dumps(from_text(PRINTED)(rate=0.25))
    printed = python(f"import pickle; made = pickle.loads({data!r}); print(made, made.key)")
    assert printed == f"Printed(rate=0.25) {from_text(PRINTED).key}\n"


def test_errors_show_the_lines_of_a_text() -> None:
    with pytest.raises(CellError, match=r"<cell \w+>:4: in cell Printed") as error:
        from_text(PRINTED.replace("tanh(x.a", "tanh(x.b"))
    assert "\n    return rate * s.h + tanh(x.b + r.a)\n" in str(error.value)


def test_a_text_defines_one_cell() -> None:
    imported = "from anycell.cells import LSTM\n"
    assert from_text(imported + PRINTED).name == "Printed"
    for text, count in (imported, 0), (PRINTED + PRINTED.replace("Printed", "Other"), 2):
        with pytest.raises(CellError, match=f"a text that defines {count} cells; expected one"):
            from_text(text)


def test_copies_of_a_cell_are_the_cell() -> None:
    local = traced(lambda x, r, s: x.a)
    assert copy.copy(local) is local
    assert copy.deepcopy({"cell": local})["cell"] is local


def test_equal_computations_are_equal_whatever_their_names() -> None:
    one, two = (traced(lambda x, r, s: tanh(x.a + r.a) * s.h) for _ in range(2))
    assert one == two and hash(one) == hash(two)
    assert one != traced(lambda x, r, s: tanh(x.b + r.b) * s.h)
    assert one != traced(lambda x, r, s: tanh(x.a + r.a) * s.h, state="h=1")
    assert one != "a cell"


# -- long and shared -----------------------------------------------------------------------------
def repeated(times: int, update: Function, start: Function) -> Function:
    def long(x, r, s):
        value = start(x)
        for _ in range(times):
            value = update(value)
        return x.b * value

    return long


@pytest.mark.parametrize(
    ("times", "update", "start", "narrow"),
    [
        (1200, lambda v: 0.9 * v + 0.1, lambda x: x.a, False),
        (1200, tanh, lambda x: x.a, False),
        (1200, tanh, lambda x: anycell.mean(x.a), True),
        (60, lambda v: v * v * v + v, lambda x: anycell.mean(x.a), True),  # 4**60 paths
        (60, lambda v: 0.5 * (v + 2.0 / v), lambda x: x.a, False),
    ],
)
def test_long_and_shared_computations(
    times: int, update: Function, start: Function, narrow: bool
) -> None:
    """They are traced, differentiated, planned and split into passes without recursion, which ends
    at 1000 calls.
    """
    long = traced(repeated(times, update, start))
    assert long.next[0].args[1].narrow is narrow
    found = plan(long, 8)
    assert found.engine == "cpu"
    assert len(topological(gradient_roots(long, found.gradients))) > times
    assert len(passes(long.next)) == 1 + narrow
    assert passes(gradient_roots(long, found.gradients))


def test_numbers_are_known_without_trying_every_path() -> None:
    def newton(x, r, s, *, k: float = 4.0):
        root = k
        for _ in range(60):
            root = 0.5 * (root + k / root)
        return x.a / (root - 2.0)

    with pytest.raises(CellError, match="k=4, a value is divided by"):
        traced(newton)


def test_light_values_are_found_without_trying_every_path() -> None:
    def shared(x, r, s):
        value = x.a
        for _ in range(60):
            value = value * value + value
        return value * anycell.mean(value)

    first, _ = passes(traced(shared).next)
    assert not first.stores, "products cost no more than a load"


# -- printing ------------------------------------------------------------------------------------
def test_expressions_print_as_python() -> None:
    a, b, c = map(leaf, "abc")
    names = {"p": type("p", (), {"a": a, "b": b, "c": c})}
    scope = {**vars(anycell), **names}
    for node in (
        a - (b - c),
        a - b - c,
        a / (b * c),
        a / b * c,
        -(a + b) * c,
        -a * -b,
        -(a * b),
        (a + b) * (b - c) ** 2,
        where((a > b) & (b <= c) | ~(a != c), tanh(a), -1.5),
        anycell.mean(a * b, groups=2) + anycell.sum(c),
        1 / (1 + anycell.exp(-a)),
    ):
        assert eval(show(node), scope) is node, show(node)


# -- the op table --------------------------------------------------------------------------------
SMOOTH = {name: op for name, op in TABLE.items() if name not in CONDITIONS}


def evaluate(root: Expr, leaves: dict[Expr, np.ndarray]) -> np.ndarray:
    values = dict(leaves)
    xp = NUMPY
    for node in topological([root]):
        if node.op == "const":
            values[node] = np.array(node.attrs[0])
        elif node not in values:
            values[node] = TABLE[node.op].meaning(xp, *(values[a] for a in node.args), *node.attrs)
    return values[root]


@pytest.mark.parametrize(
    ("name", "groups"),
    [(name, k) for name in SMOOTH for k in ((1, 2, 3) if name in REDUCTIONS else (1,))],
)
def test_derivatives(name: str, groups: int, rng: np.random.Generator) -> None:
    """Each row of the table against finite differences, on the domain that it declares."""
    op = TABLE[name]
    leaves = [leaf(f"v{i}") for i in range(len(op.domain))]
    values = {v: rng.uniform(*d, 6) for v, d in zip(leaves, op.domain, strict=True)}
    args = [apply("gt", leaves[0], 0.0), *leaves[1:]] if name == "where" else leaves
    attrs = (groups,) if name in REDUCTIONS else ()
    node, g = apply(name, *args, attrs=attrs), leaf("g")
    values[g] = rng.standard_normal(6)
    parts = op.derivative(g, node, *node.args, *node.attrs)
    step = 1e-6
    for v, arg, part in zip(leaves, node.args, parts, strict=True):
        ahead = {**values, v: values[v] + step * (direction := rng.standard_normal(6))}
        behind = {**values, v: values[v] - step * direction}
        change = (evaluate(node, ahead) - evaluate(node, behind)) / (2 * step)
        expected = np.sum(values[g] * change)
        if name == "stop_gradient":
            assert part is None
        elif part is None:
            assert arg.op in CONDITIONS or np.all(change == 0)
        else:
            found = np.sum(evaluate(part, values) * direction)
            assert is_slope(found, expected, "op")


@pytest.mark.parametrize("name", SMOOTH)
def test_derivatives_are_those_of_torch(name: str, rng: np.random.Generator) -> None:
    """torch's autograd of an op's meaning is the table's derivative, also at ties and bounds."""
    torch = pytest.importorskip("torch")
    op = TABLE[name]
    corners = itertools.product([-3.0, -1.0, 0.0, 0.5, 3.0], repeat=len(op.domain))
    points = [p for p in corners if all(_inside(name, i, v) for i, v in enumerate(p))]
    columns = [np.array(c) for c in zip(*points, strict=True)]
    leaves = [leaf(f"v{i}") for i in range(len(columns))]
    g = leaf("g")
    args = [apply("gt", leaves[0], 0.0), *leaves[1:]] if name == "where" else leaves
    node = apply(name, *args, attrs=(1,) if name in REDUCTIONS else ())
    tensors = [torch.tensor(c, requires_grad=True) for c in columns]
    given = [tensors[0] > 0, *tensors[1:]] if name == "where" else tensors
    y = op.meaning(anycell.torch.framework.NAMESPACE, *given, *node.attrs)
    values = dict(zip(leaves, columns, strict=True)) | {g: rng.standard_normal(len(points))}
    if y.requires_grad:
        y.backward(torch.tensor(values[g]))
    parts = op.derivative(g, node, *node.args, *node.attrs)
    for arg, tensor, part in zip(node.args, tensors, parts, strict=True):
        if arg.op in CONDITIONS:
            continue
        expected = np.zeros(len(points)) if tensor.grad is None else tensor.grad.numpy()
        found = np.zeros(len(points)) if part is None else evaluate(part, values)
        assert_close(found, expected, "float64", "forward")


def test_softplus_of_torch_on_both_sides_of_its_threshold() -> None:
    """Above 40, softplus is its argument, and its derivative is 1."""
    torch = pytest.importorskip("torch")
    points = np.array([-800.0, -40.0, 39.0, 40.0, 41.0, 800.0])
    tensor = torch.tensor(points, requires_grad=True)
    y = TABLE["softplus"].meaning(anycell.torch.framework.NAMESPACE, tensor)
    y.sum().backward()
    assert_close(y.detach().numpy(), np.logaddexp(points, 0.0), "float64", "forward")
    assert_close(tensor.grad.numpy(), np.exp(-np.logaddexp(0.0, -points)), "float64", "forward")


def test_powers_of_zero_and_of_negative_numbers() -> None:
    """The derivatives of torch also where a formula would say 0 times infinity."""
    torch = pytest.importorskip("torch")
    points = itertools.product([-2.0, -0.0, 0.0, 1.0], [-1.0, 0.0, 1.0, 2.0])
    columns = [np.array(c) for c in zip(*points, strict=True)]
    a, b, g = leaf("a"), leaf("b"), leaf("g")
    tensors = [torch.tensor(c, requires_grad=True) for c in columns]
    torch.pow(*tensors).sum().backward()
    values = {a: columns[0], b: columns[1], g: np.ones(len(columns[0]))}
    with np.errstate(all="ignore"):
        for part, tensor in zip(TABLE["pow"].derivative(g, a**b, a, b), tensors, strict=True):
            np.testing.assert_array_equal(evaluate(part, values), tensor.grad.numpy())
        for exponent in (0.0, 2.5):  # where the exponent is a number, its slope is not asked for
            slope = TABLE["pow"].derivative(g, anycell.pow(a, exponent), a, const(exponent))[0]
            zero = evaluate(slope, {a: np.zeros(1), g: np.ones(1)})
            np.testing.assert_array_equal(zero, [0.0])


def _inside(name: str, i: int, value: float) -> bool:
    positive = {"log": (0,), "sqrt": (0,), "div": (1,), "pow": (0,)}
    return value > 0 or i not in positive.get(name, ())


# -- variants of a cell ----------------------------------------------------------------------------
seen: list[Any] = []


@cell(gates="a")
def Variant(x, r, s, *, rate: float = 0.5, deep: bool = False, size: Any = 1):  # type: ignore[no-untyped-def]
    seen.append((rate, deep, size))
    return tanh(x.a + r.a) * rate + (1.0 if deep else 0.0)


def test_the_same_hyperparameters_are_not_traced_again() -> None:
    one = Variant(rate=0.25)
    count = len(seen)
    assert Variant(rate=0.25) is one and Variant(rate=np.float64(0.25)) is one
    assert len(seen) == count
    assert Variant(deep=True).key != Variant(deep=False).key
    # Values that are equal, but not identical.
    values = [1, True, 1.0, "1", 0.0, -0.0, None]
    given = [Variant(size=value).given["size"] for value in values]
    assert [repr(value) for value in given] == [repr(value) for value in values]
    assert Variant(size=(1,)) == Variant(size=(1,))  # traced each time
    # A schedule of values keeps only some variants, and one kernel.
    keys = {Variant(rate=n / 999).key for n in range(300)}
    assert len(keys) == 1 and len(Variant._variants) <= VARIANTS
    assert Variant(rate=0.5).hyper != Variant(rate=0.25).hyper
    with pytest.raises(CellError):
        Variant(wrong=1)
    with pytest.raises(CellError):
        Variant(wrong=1)


# -- errors after an edit ------------------------------------------------------------------------
def test_errors_show_the_line_as_it_is_now(tmp_path: Path) -> None:
    """A file that was edited and loaded again, as notebooks do."""
    file = tmp_path / "edited.py"
    for line in ("    return tanh(x)", "    return 2 * tanh(x + r)"):
        text = f"from anycell import cell, tanh\n@cell(gates='a')\ndef C(x, r, s):\n{line}\n"
        file.write_text(text, encoding="utf-8")
        with pytest.raises(CellError) as caught:
            exec(compile(text, str(file), "exec"), {"__name__": "edited"})
        assert str(caught.value).splitlines()[1] == line
