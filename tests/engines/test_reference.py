"""The reference engine: against PyTorch's layers and autograd, and against what it promises."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import oracle
import pytest
from numpy.testing import assert_array_equal
from problems import (
    Arrays,
    Problem,
    Rows,
    Sized,
    assert_right,
    assert_same,
    assert_solved,
    by_reference,
    random_problem,
    results,
)
from tolerances import assert_close, is_slope

from anycell import (
    Cell,
    cell,
    cells,
    keep,
    linear,
    mean,
    softplus,
    stop_gradient,
    tanh,
    where,
)
from anycell.lang import philox
from anycell.layer.restarts import restarts

torch = pytest.importorskip("torch")
import anycell.torch  # noqa: E402, F401  (whose framework the engine then knows)


@cell(gates="a b", state="h c", params="p=1 q", static="e")
def Everything(x, r, s, p, e, *, rate: float = 0.3, stopped: bool = True):
    """More matmuls, on values and on a state, with heads and with several outputs; reductions,
    masks, a static input.
    """
    a, b = x + r
    kept = keep(1 - rate)
    c = tanh(p.p * b + linear(s.c, "cc", heads=3)) * mean(softplus(s.c + e), groups=3)
    mix = linear(kept * tanh(a) + (1 - kept) * s.h, "mix", gates="u v w", heads=3, bias=True)
    held = stop_gradient(x.a) if stopped else x.a  # what is stopped has a slope, but no gradient
    h = where(mix.w > p.q, mix.w, held * linear(tanh(mix.u), "out")) * keep(0.5, per="sequence")
    return h, c


CELLS = [
    cells.LSTM,
    cells.GRU,
    cells.GRU(reset_after=False),
    cells.RNN,
    cells.RNN(nonlinearity="relu"),
    cells.PeepholeLSTM,
    cells.PeepholeLSTM(coupled=True, forget_bias=1.0, cell_clip=0.8),
    cells.LayerNormLSTM,
    cells.LSTMP,
    cells.MultiplicativeLSTM,
    cells.VariationalLSTM,
    cells.sLSTM(heads=2),
    Everything,
    Sized,
    Rows(bias=False),  # NumPy adds up a single column in another order
]
SITUATIONS: list[dict[str, Any]] = [
    {},
    {"reverse": True},
    {"masked": True},
    {"masked": True, "masked_output": "repeat", "reverse": True},
    {"resets": True},
    {"masked": True, "resets": True, "training": True, "seed": 7},
    {"resets": True, "reverse": True, "training": True, "seed": 1 << 60, "stream": 5},
]
each_cell = pytest.mark.parametrize("cell", CELLS, ids=repr)
each_situation = pytest.mark.parametrize(
    "situation", SITUATIONS, ids=lambda s: " ".join(s) or "plain"
)


def run(problem: Problem) -> Any:
    return oracle.run(problem.cell, **problem.arguments())


def by_torch(problem: Problem, run: Callable[[Problem], Any] = run) -> Arrays:
    """Results on tensors, by the reference engine or another function, and their gradients by
    PyTorch's autograd.
    """
    tensors = {
        name: torch.tensor(a, requires_grad=a.dtype != bool and not name.startswith("d "))
        for name, a in problem.arrays.items()
    }
    output, final = run(problem.but(tensors))
    solution = results(problem, output, [s[None] for s in final])
    arriving = {name: tensors[f"d {name}"] for name in solution}
    if "mask" in tensors and not problem.repeat:
        arriving["output"] = torch.where(tensors["mask"][..., None], arriving["output"], 0.0)
    pairs = [(solution[name], d) for name, d in arriving.items() if solution[name].requires_grad]
    torch.autograd.backward(*zip(*pairs, strict=True))
    for name, tensor in tensors.items():
        if tensor.requires_grad:
            grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            solution[f"d {name}"] = grad
    return {name: value.detach().numpy() for name, value in solution.items()}


# -- the derived backward pass -------------------------------------------------------------------
@each_situation
@each_cell
@pytest.mark.sample(every=2)
def test_numpy_equals_torch_and_the_derived_backward_equals_autograd(
    cell: Cell, situation: dict[str, Any], rng: np.random.Generator
) -> None:
    problem = random_problem(cell, (6, 4, 6), rng, **situation)
    assert_solved(by_torch(problem), problem)


@pytest.mark.parametrize("per_gate", [False, True])
@each_cell
@pytest.mark.sample(every=3)
def test_recurrent_mask(cell: Cell, per_gate: bool, rng: np.random.Generator) -> None:
    dropped = "each" if per_gate else "all"
    problem = random_problem(cell, (5, 4, 6), rng, masked=True, dropped=dropped)
    solution = by_torch(problem)
    del solution["d recurrent_mask"]  # which kernels have not
    assert_solved(solution, problem)
    ones = problem.but({"recurrent_mask": np.ones_like(problem["recurrent_mask"])})
    left = {name: a for name, a in ones.arrays.items() if name != "recurrent_mask"}
    assert_same(ones.right, replace(ones, arrays=left).right)


@pytest.mark.parametrize("shape", [(1, 1, 6), (1, 3, 6), (3, 0, 6), (0, 3, 6)])
@each_cell
def test_short_and_empty(cell: Cell, shape: Any, rng: np.random.Generator) -> None:
    problem = random_problem(cell, shape, rng, masked=True, resets=True)
    for name, array in problem.right.items():
        if name.startswith("d "):
            assert array.shape == problem.arrays[name[2:]].shape, name
    assert problem.right["output"].shape == problem["d output"].shape
    if 0 not in shape:
        assert_right(by_torch(problem), problem)
    elif shape[0] == 0:
        for s in cell.state_names:
            assert_array_equal(problem.right[f"final {s}"], problem[f"state {s}"])
            assert_array_equal(problem.right[f"d state {s}"], problem[f"d final {s}"])


def test_gradients_are_differences(rng: np.random.Generator) -> None:
    """Of the whole function, in a random direction: no autograd involved."""
    cell = Everything(stopped=False)
    problem = random_problem(cell, (4, 3, 6), rng, resets=True, training=True, seed=3)

    def loss(p: Problem) -> float:
        outputs, final = run(p)
        pairs = zip((outputs, *final), (p["d output"], *p.group("d final")), strict=True)
        return sum(float((value * d).sum()) for value, d in pairs)

    for name, array in problem.arrays.items():
        if array.dtype == bool or name.startswith("d "):
            continue
        direction, step = rng.standard_normal(array.shape), 1e-6
        ahead, behind = (
            loss(problem.but({name: array + sign * step * direction})) for sign in (1, -1)
        )
        found = float((problem.right[f"d {name}"] * direction).sum())
        assert is_slope(found, (ahead - behind) / (2 * step), "layer"), name


# -- masks, lengths, resets ----------------------------------------------------------------------
@each_cell
def test_masked_steps_do_not_exist(cell: Cell, rng: np.random.Generator) -> None:
    """A row with holes gives what the row without those steps gives."""
    problem = random_problem(cell, (9, 3, 6), rng, masked=True)
    for row in range(3):
        alone = problem.rows(slice(row, row + 1))
        there = alone["mask"][:, 0]
        names = ("x", "d output", "mask")
        short = alone.map(lambda name, a: a[there] if name in names else a)  # noqa: B023
        for name, value in short.right.items():
            whole = alone.right[name]
            if name in ("output", "d x"):
                assert not whole[~there].any()
                whole = whole[there]
            assert_array_equal(whole, value, err_msg=name)


@each_cell
def test_masked_outputs_repeat_the_held_state(cell: Cell, rng: np.random.Generator) -> None:
    problem = random_problem(cell, (9, 3, 6), rng, masked=True, masked_output="repeat")
    zero = replace(problem, repeat=False).right["output"]
    held = problem["state h"][0]
    for t, there in enumerate(problem["mask"]):
        held = np.where(there[:, None], zero[t], held)
        assert_array_equal(problem.right["output"][t], held)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
@each_cell
@pytest.mark.sample(every=2)
def test_what_lies_under_a_mask_never_matters(
    cell: Cell, value: float, rng: np.random.Generator
) -> None:
    problem = random_problem(cell, (6, 4, 6), rng, masked=True, resets=True)
    beneath = ~problem["mask"]
    garbage = {name: problem[name].copy() for name in ("x", "d output", "resets")}
    garbage["x"][beneath] = garbage["d output"][beneath] = value
    garbage["resets"] ^= beneath
    other = problem.but(garbage)
    assert_same(other.right, problem.right)
    assert_same(by_torch(other), by_torch(problem))


@each_cell
def test_a_row_without_steps_passes_its_state_through(cell: Cell, rng: np.random.Generator) -> None:
    """Even a state that is NaN, without a trace in any gradient but its own."""
    problem = random_problem(cell, (5, 3, 6), rng)
    problem = problem.but({"mask": np.tile([True, False, True], (5, 1))})
    states = {f"state {s}": problem[f"state {s}"].copy() for s in cell.state_names}
    for s in states.values():
        s[0, 1] = np.nan
    other = problem.but(states)
    for name, value in other.right.items():
        expected = problem.right[name].copy()
        if name.startswith("final"):
            expected[0, 1] = np.nan
        assert_array_equal(value, expected, err_msg=name)


@pytest.mark.parametrize("reverse", [False, True])
@each_cell
def test_resets_cut_a_sequence(cell: Cell, reverse: bool, rng: np.random.Generator) -> None:
    """The episode that runs last is what a call of its own from ``reset_state`` gives."""
    problem = random_problem(cell, (8, 3, 6), rng, resets=True, reverse=reverse)
    cut = 5
    problem["resets"][:] = np.arange(8)[:, None] == cut
    after = slice(None, cut) if reverse else slice(cut, None)
    alone = problem.map(lambda name, a: a[after] if name in ("x", "d output") else a)
    restored = {}
    for s in cell.state_names:
        value = problem[f"reset_state {s}"]
        value = value if value.ndim == 3 else value[:, None]
        restored[f"state {s}"] = np.broadcast_to(value, problem[f"state {s}"].shape)
    alone = alone.but({**restored, "resets": np.zeros((8, 3), bool)[after]})
    for name in ("output", "d x"):
        assert_array_equal(problem.right[name][after], alone.right[name])
    for s in cell.state_names:
        assert_array_equal(problem.right[f"final {s}"], alone.right[f"final {s}"])
        d, each = problem.right[f"d reset_state {s}"], alone.right[f"d state {s}"]
        assert_array_equal(d, each if d.ndim == 3 else each.sum(1))


def test_layers_restart_where_the_loop_does(rng: np.random.Generator) -> None:
    """Layers find the steps at once, the loop one after the other; holes are of all lengths."""
    for steps in (0, 1, 2, 3, 8, 21):
        resets, mask = rng.random((2, steps, 64)) < rng.random((2, 1, 64))
        for reverse, masked in itertools.product((False, True), repeat=2):
            there = mask if masked else None
            loop = oracle.recurrence(
                cells.RNN, np.zeros((steps, 64, 2)), {"weight_hh": np.zeros((2, 2))},
                mask=there, resets=resets, reverse=reverse,
            )  # fmt: skip
            wanted = [np.broadcast_to(loop.restarts[t], (64, 1))[:, 0] for t in range(steps)]
            flags = restarts(resets, there, reverse)
            assert np.array_equal(flags, np.reshape(wanted, (steps, 64)))
            if reverse and steps:  # no step runs before step 0
                resets[0] = ~resets[0]
                assert np.array_equal(restarts(resets, there, reverse), flags)


def test_states_start_and_reset_as_declared(rng: np.random.Generator) -> None:
    @cell(gates="a", state="h=0.25 m=-inf")
    def Declared(x, r, s):
        return tanh(x.a + r.a) + where(s.m < -1e30, 1.0, 0.0) + 0 * s.h, tanh(x.a)

    gates_x, weights = rng.standard_normal((3, 2, 4)), {"weight_hh": np.zeros((4, 4))}
    resets = np.array([[0, 0], [0, 1], [0, 0]], bool)
    outputs, (h, m) = oracle.run(Declared, gates_x, weights, resets=resets)
    first = np.array([[1, 1], [0, 1], [0, 0]])[:, :, None]
    assert_array_equal(outputs, np.tanh(gates_x) + first)
    assert_array_equal(m, np.tanh(gates_x[-1]))
    outputs, (h, m) = oracle.run(Declared, gates_x, weights, mask=np.zeros((3, 2), bool))
    assert (h == 0.25).all() and (m == -np.inf).all() and not outputs.any()
    start = [np.full((2, 4), 0.25), None]
    same, _ = oracle.run(Declared, gates_x, weights, start, mask=np.ones((3, 2), bool))
    assert_array_equal(same, oracle.run(Declared, gates_x, weights)[0])


# -- random masks --------------------------------------------------------------------------------
@cell(gates="a b", state="h c")
def Masks(x, r, s, *, rate: float = 0.3):
    return keep(rate), keep(1 - rate, per="sequence") + 0 * (x.a + s.c)


def masks(rate: float = 0.3, training: bool = True, **options: Any) -> tuple[Any, Any]:
    gates_x = np.zeros((50, 40, 2 * 30), np.float32)
    outputs, (_, c) = oracle.run(
        Masks(rate=rate), gates_x, {}, training=training, **{"seed": 11, **options}
    )
    return outputs, c


def test_masks_follow_the_convention() -> None:
    outputs, c = masks(seed=(5 << 32) + 9, stream=3)
    key = np.array([9, 5], np.uint32)
    for t, row, unit in ((0, 0, 0), (7, 3, 29), (49, 39, 1)):
        words = philox.philox4x32(np.array([unit, row, t, 6 << 8], np.uint32), key)
        assert outputs[t, row, unit] == ((int(words[0]) >> 8) * 2.0**-24 < np.float32(0.3))
        words = philox.philox4x32(np.array([unit, row, 0, 6 << 8], np.uint32), key)
        assert c[row, unit] == ((int(words[1]) >> 8) * 2.0**-24 < np.float32(0.7))


def test_masks_keep_their_share() -> None:
    outputs, c = masks()
    assert set(np.unique(outputs)) == set(np.unique(c)) == {0, 1}
    for mask, rate in ((outputs, 0.3), (c, 0.7)):
        assert abs(mask.mean() - rate) < 5 * (rate * (1 - rate) / mask.size) ** 0.5
    assert abs(np.corrcoef(outputs[0].ravel(), outputs[1].ravel())[0, 1]) < 0.1
    assert abs(np.corrcoef(outputs[:, :, 0].ravel(), outputs[:, :, 1].ravel())[0, 1]) < 0.1


def test_masks_differ_by_seed_and_stream_alone() -> None:
    first, _ = masks()
    assert_array_equal(first, masks()[0])
    assert_array_equal(first, masks(reverse=True)[0])
    for other in ({"seed": 12}, {"stream": 1}, {"seed": 11 + (1 << 32)}):
        assert (first != masks(**other)[0]).mean() > 0.3


def test_evaluation_takes_the_mean() -> None:
    outputs, c = masks(training=False)
    assert (outputs == np.float32(0.3)).all() and (c == np.float32(0.7)).all()


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_certain_masks(rate: float) -> None:
    assert (masks(rate)[0] == rate).all()


# -- namespaces ----------------------------------------------------------------------------------
def test_second_derivatives(rng: np.random.Generator) -> None:
    cell = Everything(stopped=False)
    problem = random_problem(cell, (3, 2, 3), rng, masked=True, resets=True)
    names = [n for n, a in problem.arrays.items() if a.dtype != bool and not n.startswith("d ")]

    def outputs(*tensors: Any) -> Any:
        given = problem.map(lambda _, a: torch.tensor(a)).but(
            dict(zip(names, tensors, strict=True))
        )
        found, final = run(given)
        return (found, *final)

    tensors = [torch.tensor(np.nan_to_num(problem[n]), requires_grad=True) for n in names]
    assert torch.autograd.gradcheck(outputs, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(outputs, tensors, fast_mode=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_transforms_of_torch(rng: np.random.Generator) -> None:
    gates_x = torch.tensor(rng.standard_normal((3, 5, 2, 4 * 6)))  # [T, copies, B, G*H]
    weights = {"weight_hh": torch.tensor(rng.standard_normal((24, 6)))}

    def outputs(gates: Any) -> Any:
        return oracle.run(cells.LSTM, gates, weights)[0]

    together = torch.func.vmap(outputs, in_dims=1, out_dims=1)(gates_x)
    for copy in range(5):
        assert_close(together[:, copy], outputs(gates_x[:, copy]), "float64", "forward")
    direction = torch.randn_like(gates_x[:, 0])
    _, forward = torch.func.jvp(outputs, (gates_x[:, 0],), (direction,))
    jacobian = torch.func.jacrev(outputs)(gates_x[:, 0])
    assert_close(forward, torch.einsum("...tbg,tbg", jacobian, direction), "float64", "gradient")


def test_half_precision(rng: np.random.Generator) -> None:
    gates_x = torch.tensor(rng.standard_normal((5, 2, 4 * 6)), dtype=torch.bfloat16)
    weights = {"weight_hh": torch.tensor(rng.standard_normal((24, 6)), dtype=torch.bfloat16)}
    outputs, final = oracle.run(cells.LSTM, gates_x, weights)
    assert outputs.dtype == final[1].dtype == torch.bfloat16


def test_float32_stays_float32(rng: np.random.Generator) -> None:
    for situation in SITUATIONS:
        problem = random_problem(Everything, (4, 3, 6), rng, **situation).astype("float32")
        assert {a.dtype.name for a in by_reference(problem, "float32").values()} == {"float32"}


def test_unknown_arrays_are_refused() -> None:
    with pytest.raises(TypeError, match=r"given list"):
        oracle.run(cells.RNN, [[[0.0]]], {})
