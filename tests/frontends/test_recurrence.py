"""``anycell.recurrence``: what its arguments mean, and what it says of wrong ones."""

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from problems import Sized as Unequal
from problems import assert_same, assert_solved, by_cpu, by_recurrence, random_problem

import anycell
from anycell import Cell, cell, cells, keep, linear, tanh
from anycell.plan import Options

T, B, H = 5, 3, 4
ENGINES = pytest.mark.parametrize("engine", ["cpu", "reference"])


@cell(gates="a b", state="h:P c", params="p", static="e")
def Sized(x, r, s, p, e, *, rate: float = 0.5):
    """Two sizes, a matmul with heads and a bias, a parameter, a static input, a random mask."""
    c = tanh(x.a + r.a) * p.p + s.c * keep(rate) + linear(e, "mix", heads=2)
    return linear(c, "down", bias=True), c


@cell(gates="a b:P", state="h c:P")
def Alone(x, r, s):
    """No weight tells its sizes."""
    return tanh(x.a) * s.h, x.b + s.c


def arguments(cell: Cell = cells.LSTM, dtype: str = "float64") -> dict[str, Any]:
    given = random_problem(cell, (T, B, H), np.random.default_rng(0)).astype(dtype).arguments()
    return {"cell": cell, **{name: given[name] for name in ("gates_x", "weights", "params")}}


def sized() -> dict[str, Any]:
    weights = {
        "weight_hh": np.ones((2 * H, 6)),
        "weight_down": np.ones((6, H)),
        "bias_down": np.ones(6),
        "weight_mix": np.ones((2, H // 2, H // 2)),
    }
    return {
        "cell": Sized,
        "gates_x": np.ones((T, B, 2 * H)),
        "weights": weights,
        "params": {"p": np.ones(H)},
        "static": np.ones((B, H)),
    }


# -- meaning -------------------------------------------------------------------------------------
@ENGINES
def test_one_state_may_come_alone(engine: str) -> None:
    given, h = arguments(cells.GRU), np.ones((B, H))
    alone, _ = anycell.recurrence(**given, state=h, engine=engine)
    assert_array_equal(alone, anycell.recurrence(**given, state=(h,), engine=engine)[0])


@pytest.mark.parametrize("axis", [0, 1])
def test_16_bits_may_be_broadcast(axis: int) -> None:
    """Gates over steps or rows, and a state over rows: copies in float32 have dense rows."""
    given = arguments(dtype="float16")
    gates = np.broadcast_to(given["gates_x"].take([0], axis), given["gates_x"].shape)
    c = np.broadcast_to(given["gates_x"][0, :1, :H], (B, H))
    same, (_, last) = anycell.recurrence(**{**given, "gates_x": gates}, state=(None, c))
    given["gates_x"] = gates.copy()
    output, (_, right) = anycell.recurrence(**given, state=(None, c.copy()))
    assert_array_equal(same, output)
    assert_array_equal(last, right)


@ENGINES
def test_each_state_may_be_absent(engine: str) -> None:
    given, c = arguments(), np.ones((B, H))
    some, _ = anycell.recurrence(**given, state=(None, c), engine=engine)
    zero = np.zeros((B, H))
    assert_array_equal(some, anycell.recurrence(**given, state=(zero, c), engine=engine)[0])


def test_sizes_come_from_weights_or_state() -> None:
    outputs, (h, c) = anycell.recurrence(**sized())
    assert outputs.shape == (T, B, 6) and h.shape == (B, 6) and c.shape == (B, H)


def named(problem: Any) -> Any:
    """The arguments of a call for a random problem of ``Unequal``."""
    return {"cell": Unequal, **problem.arguments()}


def test_sizes_of_gates_come_from_all_arrays(rng: np.random.Generator) -> None:
    problem = random_problem(Unequal, (T, B, H), rng)
    given = {**named(problem), "state": None}
    assert anycell.recurrence(**given)[0].shape == (T, B, 3)
    one = random_problem(Alone, (T, B, H), rng)
    gates = one.arguments()["gates_x"]
    _, (h, c) = anycell.recurrence(Alone, gates, {}, [None, np.ones((B, 3))])
    assert (h.shape, c.shape) == ((B, H), (B, 3))
    with pytest.raises(ValueError, match=r"size H of state 'h' is unknown\. Pass an initial"):
        anycell.recurrence(Alone, gates, {})


def test_a_cell_without_gates_takes_no_columns(rng: np.random.Generator) -> None:
    @cell(gates="", state="h")
    def Still(x, r, s):
        return tanh(linear(s.h, "w"))

    for situation in ({}, {"masked": True, "resets": True, "reverse": True}):
        problem = random_problem(Still, (T, B, 6), rng, **situation)
        assert problem.shape == (T, B, 0)
        solution = by_cpu(problem)
        assert_solved(solution, problem)
        assert_same(solution, by_recurrence(problem))
    given = {"weights": {"weight_w": np.eye(H)}, "state": np.ones((B, H))}
    with pytest.raises(ValueError, match=r"float64 \[5, 3, 2\]; expected \[time, batch, 0\], with"):
        anycell.recurrence(Still, np.ones((T, B, 2)), **given)


def test_gates_of_another_width_are_refused(rng: np.random.Generator) -> None:
    problem = random_problem(Unequal, (T, B, H), rng)
    given = {**named(problem), "gates_x": np.ones((T, B, 13))}
    with pytest.raises(ValueError) as error:
        anycell.recurrence(**given)
    expected = "[time, batch, 2 * P + 2 * H], with P = 3, H = 4, E = 3"
    assert f"gates: given ndarray float64 [5, 3, 13]; expected {expected}." in str(error.value)
    with pytest.raises(ValueError, match=r"expected \[time, batch, 2 \* P \+ 2 \* H\]"):
        anycell.recurrence(**{**given, "gates_x": np.ones((T, B, 3))})


# -- refusals: argument, what was given, what was expected ---------------------------------------
def change(**by: Any) -> Any:
    """A call with other arguments; a tuple (name, value) replaces an entry of a dictionary."""
    given = arguments(by.pop("cell", cells.LSTM))
    for name, value in by.items():
        if isinstance(value, tuple) and name in ("weights", "params"):
            given[name] = {**given[name], value[0]: value[1]}
        else:
            given[name] = value
    return given


def resized(**by: Any) -> Any:
    given = sized()
    for name, value in by.items():
        given[name] = {**given[name], **value} if isinstance(value, dict) else value
    return given


ones = np.ones
WRONG: list[tuple[Any, type[Exception], str]] = [
    (change(cell=cells.LSTM) | {"cell": "LSTM"}, TypeError,
     "cell: given str 'LSTM'; expected a cell"),
    (change(gates_x=[[[1.0]]]), TypeError, "gates_x: given list [[[1.0]]]; expected"),
    (change(gates_x=ones((T, B, 16), int)), TypeError,
     "gates_x: given dtype int64; expected one of float"),
    (change(gates_x=ones((T, B, 16), "i4")), TypeError,
     "given dtype int32; expected one of float32, float64,"),
    (change(gates_x=ones((T, B, 16), ">f8")), TypeError, "gates_x: given dtype >f8; expected"),
    (change(gates_x=ones((B, 16))), ValueError, "float64 [3, 16]; expected [time, batch, 4 * H]"),
    (change(gates_x=ones((T, B, 15))), ValueError,
     "float64 [5, 3, 15]; expected [time, batch, 4 * H]"),
    (change(gates_x=ones((T, B, 0))), ValueError, "[5, 3, 0]; expected [time, batch, 4 * H]"),
    (change(weights=None), TypeError, "weights: given None; expected a dictionary"),
    (change(weights={}), ValueError, "weight_hh: given nothing; expected [out, in]"),
    (change(weights=("W", ones(3))), ValueError, "weights: given 'W', unknown; expected each name"),
    (resized(gates_x=ones((T, B, 3)), weights={"weight_ih": ones((16, 3))}), ValueError,
     "weights: given 'weight_ih', unknown; expected each name of cell"),
    (change(gates_x=ones((T, B, 3))), ValueError,
     "[5, 3, 3]; expected [time, batch, 4 * H]. Project the input onto the gates i f g o."),
    (change(weights=("weight_hh", None)), ValueError, "weight_hh: given nothing"),
    (change(weights=("weight_hh", ones(16))), ValueError,
     "weight_hh: given ndarray float64 [16]; expected [out, in]"),
    (change(weights=("weight_hh", ones((16, 4), "f4"))), TypeError,
     "weight_hh: given dtype float32; expected float64"),
    (change(state=ones((B, H))), TypeError, "[3, 4]; expected a tuple (h, c)"),
    (change(state=(ones((B, H)),)), TypeError, "state: given tuple"),
    (change(state=(None, ones((B, H), "f4"))), TypeError, "state: given dtype float32; expected"),
    (change(state={"h": None}), TypeError, "dict {'h': None}; expected a tuple (h, c)"),
    (change(params={"p": ones(H)}), ValueError, "params: given 'p', unknown; expected each name"),
    (change(cell=cells.PeepholeLSTM, params={"p_i": ones(H)}), ValueError,
     "p_f: given nothing; expected float64 [4], which"),
    (change(cell=cells.PeepholeLSTM, params=("p_f", ones((1, H)))), ValueError,
     "p_f: given shape [1, 4]; expected shape [4]"),
    (change(mask=np.full((T, B), 0.5)), ValueError,
     "mask: given numbers other than 0 and 1; expected"),
    (change(mask=np.full((T, B), np.nan)), ValueError,
     "mask: given numbers other than 0 and 1; expected"),
    (change(lengths=[5, 6, 2]), ValueError, "lengths: given a length of 6; expected 0 to 5"),
    (change(lengths=[5, -1, 2]), ValueError, "lengths: given a length of -1; expected 0 to 5"),
    (change(lengths=[5.0, 2.0, 1.0]), TypeError, "float64 [3]; expected integers [3]"),
    (change(reset_state=(ones(H), ones((2, H)))), ValueError,
     "[2, 4]; expected shape [3, 4], the state 'c'"),
    (change(masked_output="hold"), ValueError, "masked_output: given 'hold'; expected 'zero' or"),
    (change(recurrent_mask=ones((3, B, H))), ValueError,
     "recurrent_mask: given shape [3, 3, 4]; expected shape [4, 3, 4]"),
    (change(static=ones((B, H))), TypeError, "[3, 4]; expected None, because cell LSTM"),
    (change(reverse="yes"), TypeError, "reverse: given str 'yes'; expected True or False"),
    (change(training=2), TypeError, "training: given int 2; expected True or False"),
    (change(seed=-1), ValueError, "seed: given -1; expected an int from 0 to"),
    (change(seed=1 << 64), ValueError, f"expected an int from 0 to {(1 << 64) - 1}"),
    (change(seed=1.5), TypeError, "seed: given float 1.5; expected an int"),
    (change(engine="gpu"), ValueError, "engine: given 'gpu'; expected None, 'cpu' or"),
    (resized(static=None), TypeError, "static: given None; expected"),
    (resized(training=True), ValueError, "seed: given None; expected an int. Pass a seed"),
    (resized(weights={"bias_down": None}), ValueError, "bias_down: given nothing"),
    (resized(weights={"weight_down": ones((6, 5))}), ValueError,
     "weight_down: given shape [6, 5]; expected shape [6, 4]"),
    (resized(weights={"weight_hh": ones((2 * H, 5))}), ValueError,
     "weight_down: given shape [6, 4]; expected shape [5, 4]"),
    (resized(weights={"weight_mix": ones((4, 4))}), ValueError,
     "weight_mix: given ndarray float64 [4, 4]; expected [heads, out/heads, in/heads]"),
    (resized(gates_x=ones((T, B, 6)), weights={"weight_hh": ones((6, 6))}), ValueError,
     "given H=3 (the hidden size); expected a multiple of 2, because `linear(e, 'mix', heads=2)"),
    (resized(state=(ones((B, 7)), None)), ValueError,
     "weight_hh: given shape [8, 6]; expected shape [8, 7]"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "error", "message"), WRONG, ids=[m for _, _, m in WRONG])
def test_refusals(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        anycell.recurrence(**given)
    assert message in str(raised.value)


def test_a_recurrent_mask_needs_something_to_mask() -> None:
    gates_x, weights = np.ones((2, 3, 4 * H)), {"weight_r": np.ones((4 * H, H))}
    with pytest.raises(ValueError, match=r"cell sLSTM, which has no matmul behind `r` .*: r\)"):
        anycell.recurrence(anycell.cells.sLSTM, gates_x, weights, recurrent_mask=np.ones((3, H)))


def test_arrays_of_a_framework_are_refused() -> None:
    torch = pytest.importorskip("torch")
    given = arguments()
    with pytest.raises(TypeError, match=r"gates_x: given torch.float64 .*expected .*, a ndarray"):
        anycell.recurrence(**{**given, "gates_x": torch.tensor(given["gates_x"])})


@pytest.mark.parametrize("name", ["lenghts", "lengths_"])
def test_misspelt_arguments_are_named(name: str) -> None:
    """Of every entrance, also where what is meant is no option."""
    torch = pytest.importorskip("torch")
    import anycell.numpy
    import anycell.torch as at

    x, gates = np.zeros((3, 2, 4), "float32"), np.zeros((3, 2, 16), "float32")
    weights = {"weight_hh": np.zeros((16, 4), "float32")}
    tensors = {"weight_hh": torch.zeros(16, 4)}
    given: dict[str, object] = {name: [3, 1]}
    for call in (
        lambda: anycell.recurrence(cells.LSTM, gates, weights, **given),
        lambda: anycell.numpy.LSTM(4, 4).forward(x, **given),
        lambda: at.recurrence(cells.LSTM, torch.from_numpy(gates), tensors, **given),
        lambda: at.RNN(cells.LSTM, 4, 4)(torch.from_numpy(x), **given),
        lambda: at.LSTM(4, 4)(torch.from_numpy(x), **given),
    ):
        with pytest.raises(TypeError, match=rf"{name}: given list .*Did you mean lengths\?"):
            call()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("word", ["zero", "repeat"])
@pytest.mark.parametrize("masked", [False, True])
def test_what_kernels_make_of_masked_output(word: str, masked: bool) -> None:
    """Without a mask it compiles nothing of its own on a GPU, and takes no memory."""
    options = Options(masked_output=word, training=True, seed=3, threads=2)
    assert options.apart(masked) is (masked and word == "zero")
    assert options.printed(masked) == Options(masked_output=word if masked else "zero")
    assert not options.unread().apart(masked)


@cell(gates="g:1", state="h n:1")
def OneGate(x, r, s):
    """Its ``weight_ih`` has one row."""
    return tanh(s.h + x.g), s.n


@pytest.mark.parametrize(("inputs", "columns"), [(1, 1), (6, 1), (6, 3)])
def test_gradients_of_one_row_of_a_matrix_by_columns(inputs: int, columns: int) -> None:
    """Its strides do not say whether it is stored by rows or by columns."""
    torch = pytest.importorskip("torch")
    from anycell.torch import recurrence

    whole = torch.randn(inputs, columns, dtype=torch.float64, requires_grad=True)
    x, h = torch.randn(T, B, inputs, dtype=torch.float64), torch.zeros(B, H, dtype=torch.float64)
    gradients = []
    for weight in (whole.t()[:1], whole.t()[:1].clone(memory_format=torch.contiguous_format)):
        output, _ = recurrence(OneGate, x, {"weight_ih": weight}, state=(h, None))
        gradients += torch.autograd.grad(output.sum(), whole)
    assert torch.equal(*gradients) and gradients[0][:, 0].abs().min() > 0
