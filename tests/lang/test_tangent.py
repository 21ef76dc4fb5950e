"""The tangent of a cell against finite differences, and the cells that have none."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from tolerances import assert_close, is_slope

import anycell
from anycell import (
    CellError,
    cell,
    cells,
    layer_norm,
    linear,
    maximum,
    mean,
    sigmoid,
    softmax,
    tanh,
)
from anycell import max as most
from anycell import sum as total
from anycell.lang.cell import Cell
from anycell.lang.tangent import Tangent, tangent
from anycell.layer import shapes
from anycell.layer.checks import declared_sizes

T, B = 3, 2


@cell(gates="i g done:1", state="h n:1", params="w b:1", static="e:E")
def OfOne(x, r, s, p, e):
    """Values of one number per row, also where their tangent is one and they are not."""
    n = 0.5 * s.n + p.b * mean(s.h) + linear(e, "of_e", size="1")
    wide = n + 0.0 * x.i + p.w
    h = tanh(x.g + r.g + total(wide) * x.done + mean(wide)) * sigmoid(n)
    return h, tanh(n + linear(h, "of_h", size="1", bias=True))


@cell(gates="a b", state="h_dot")
def Named_dot(x, r, s, *, rate: float = 0.5):
    """Names that end as those of tangents do, groups, and ties."""
    a = softmax(x.a + r.a, groups=2)
    tie = most(maximum(s.h_dot, 0.0 * s.h_dot), groups=2)
    return rate * a + tanh(layer_norm(x.b + linear(s.h_dot, "w", heads=2))) * tie


@cell(gates="g", state="h")
def Shared(x, r, s):
    """One weight with a bias for two matmuls, and the recurrent one."""
    first = linear(s.h, "w", bias=True)
    return tanh(x.g + r.g + linear(tanh(first), "w", bias=True))


BUILT_IN = [value for value in vars(cells).values() if isinstance(value, Cell)]


def drawn(cell: Cell, rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of a recurrence, and their tangents."""
    sizes = dict.fromkeys(declared_sizes(cell), 4) | {"H": 8, "1": 1}
    shaped: dict[str, Any] = {
        name: shape for name, shape in shapes(cell, sizes, 1, True).items() if name in cell.learned
    }
    shaped |= {s.name: (B, sizes[s.size]) for s in cell.states}
    shaped["x"] = (T, B, cell.width(sizes))
    if cell.static:
        shaped["static"] = (B, sizes[cell.static_size])
    del shaped["weight_ih"], shaped["bias_ih"]
    arrays, dots = (
        {name: 0.5 * rng.standard_normal(shape) for name, shape in shaped.items()} for _ in range(2)
    )
    return arrays, dots


def run(cell: Cell, arrays: dict[str, Any], engine: str = "reference") -> Any:
    """The output and the final states, one after the other."""
    further = {"static": arrays["static"]} if cell.static else {}
    weights = {n: a for n, a in arrays.items() if n in cell.learned}
    states = [arrays[name] for name in cell.state_names]
    output, final, *_ = anycell.recurrence(
        cell, arrays["x"], weights, states, engine=engine, **further
    )
    return [output, *final]


def with_tangents(cell: Cell, arrays: Any, dots: Any, varied: set[str]) -> tuple[Tangent, Any]:
    """The tangent of a cell, and its arrays."""
    derived = tangent(cell, frozenset(varied))
    given = {**arrays, **{n + derived.dot: d for n, d in dots.items()}}
    parts = [arrays["x"], dots["x"]]
    if "static" in varied:
        parts.append(np.broadcast_to(dots["static"], (T, *dots["static"].shape)))
    return derived, {**given, "x": np.concatenate(parts, -1)}


@pytest.mark.parametrize("cell", [*BUILT_IN, OfOne, Named_dot, Shared], ids=repr)
def test_tangents(cell: Cell, rng: np.random.Generator) -> None:
    """The states of the tangent are the slopes of the states, then the states themselves."""
    arrays, dots = drawn(cell, rng)
    varied = {*cell.learned, "static"} & {*arrays}
    derived, given = with_tangents(cell, arrays, dots, varied)
    output, *final = run(derived, given)
    before, after = (
        run(cell, {n: a + step * dots[n] for n, a in arrays.items()}) for step in (-1e-5, 1e-5)
    )
    weight = rng.standard_normal(output.shape)
    slopes = [(b - a) / 2e-5 for a, b in zip(before, after, strict=True)]
    assert is_slope((output * weight).sum(), (slopes[0] * weight).sum(), "layer")
    count = len(cell.states)
    for found, slope in zip(final[:count], slopes[1:], strict=True):
        assert is_slope(found.sum(), slope.sum(), "layer")
    for found, right in zip(final[count:], run(cell, arrays)[1:], strict=True):
        np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize("cell", [OfOne, Shared], ids=repr)
def test_one_weight_with_and_without_its_bias(cell: Cell, rng: np.random.Generator) -> None:
    """Of matmuls that share a weight, only those of the cell itself add the bias, also packed."""
    varied = {*cell.learned} - {"weight_ih", "bias_ih"}
    derived, given = with_tangents(cell, *drawn(cell, rng), varied)
    for found, right in zip(*(run(derived, given, e) for e in ("cpu", "reference")), strict=True):
        assert_close(found, right, "float64", "forward")


@pytest.mark.parametrize(
    "name", ["weight_hh", "bias_hh", "w", "bias_of_h", "weight_of_e", "static"]
)
def test_what_does_not_vary_has_no_tangent(name: str, rng: np.random.Generator) -> None:
    """A tangent of some arrays is that of all with zeros, and has no other arrays."""
    arrays, dots = drawn(OfOne, rng)
    varied = {*OfOne.learned, "static"} & {*arrays}
    zeros = {n: d if n in (name, "x", "h", "n") else 0 * d for n, d in dots.items()}
    right = run(*with_tangents(OfOne, arrays, zeros, varied))
    some = {name} | ({"weight_of_h"} if name == "bias_of_h" else set())
    some |= {"weight_hh"} if name == "bias_hh" else set()
    derived, given = with_tangents(OfOne, arrays, zeros, some)
    learned = {n.removesuffix(derived.dot) for n in derived.learned if n.endswith(derived.dot)}
    assert learned == some - {"static"}
    for found, expected in zip(run(derived, given), right, strict=True):
        assert_close(found, expected, "float64", "forward")


def test_a_tangent_of_a_tangent() -> None:
    twice = tangent(tangent(cells.LSTM, frozenset()), frozenset({"weight_hh"}))
    assert twice.state_names[:4] == ("h_dot_dot2", "c_dot_dot2", "h_dot2", "c_dot2")
    assert tangent(Named_dot, frozenset()).state_names == ("h_dot_dot2", "h_dot")


def test_a_tangent_is_a_cell() -> None:
    """With other hyperparameters, copied and pickled, and equal to another of its kind."""
    derived = tangent(Named_dot, frozenset({"weight_w"}))
    assert tangent(Named_dot, frozenset({"weight_w"})) is derived
    assert derived(rate=0.25).hyper == {"rate": 0.25}
    assert derived(rate=0.25).full == Named_dot(rate=0.25)
    for other in (copy.deepcopy(derived), pickle.loads(pickle.dumps(derived))):
        assert other == derived and hash(other) == hash(derived)


def test_too_many_states() -> None:
    @cell(gates="", state=" ".join(f"s{n}" for n in range(25)))
    def Long(x, r, s):
        return tuple(s)

    with pytest.raises(CellError, match="50 states; at most 48"):
        tangent(Long, frozenset())


def test_too_many_matmuls() -> None:
    @cell(gates="", state="h")
    def Wide(x, r, s):
        return total(sum(linear(s.h, f"w{n}") for n in range(25))) + s.h

    with pytest.raises(CellError, match="linears"):
        tangent(Wide, frozenset())
