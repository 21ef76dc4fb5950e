"""A readout that is its layer's next input: PyTorch and NumPy against a loop in float64."""

import copy
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import problems
import pytest
from problems import Problem, Sized, by_cpu, random_problem
from tolerances import assert_close

import anycell.numpy as an
from anycell import Cell, cell, cells, compress, linear
from anycell.engines import cpu
from anycell.lang.transform import with_feedback
from anycell.layer.stream import Stream
from tests.conformance.on_numpy import named, one

torch = pytest.importorskip("torch")
at: Any = pytest.importorskip("anycell.torch")

Arrays = dict[str, np.ndarray]
CELLS = [
    cells.LSTM, cells.GRU, cells.PeepholeLSTM, cells.IndRNN, cells.LSTMP, cells.LayerNormGRU,
    cells.sLSTM, cells.GRU(reset_after=False),
]  # fmt: skip
# T, B, inputs, H, Y
SHAPES = [(9, 5, 3, 7, 2), (1, 1, 1, 1, 1), (6, 20, 4, 33, 4), (4, 3, 2, 100, 1)]


def draw(cell: Cell, shape: tuple[int, ...], *has: str, p: float = 0.4) -> Problem:
    """A problem of a layer with a readout, its "weight", "bias" and "d y", and what is "forced"."""
    *size, width = shape
    problem, rng = problems.draw(cell, tuple(size), ("state", *has)), np.random.default_rng(7)
    flags, out = problem["x"].shape[:2], problem["d output"].shape[-1]
    readout = {"weight": rng.normal(size=(width, out)) / out**0.5, "bias": rng.normal(size=width)}
    arriving = {"d y": rng.normal(size=(*flags, width))}
    return problem.but({**readout, **arriving, "forced": rng.random(flags) < p})


def poisoned(problem: Problem, dtype: str) -> np.ndarray:
    """x with NaN wherever it must not matter; under masks it is there."""
    x = problem["x"].astype(dtype)
    if problem["forced"].ndim:
        x[..., : len(problem["bias"])][~problem["forced"]] = np.nan
    return x


def states_of(problem: Problem) -> list[str]:
    return [f"state {name}" for name in problem.cell.state_names]


def by_loop(problem: Problem) -> Arrays:
    """Step by step, in float64."""
    cell, width = problem.cell, len(problem["bias"])
    given = {n: torch.tensor(np.nan_to_num(a)) for n, a in problem.arrays.items()}
    wanted = ["x", *states_of(problem), *problem.learned, "weight", "bias"]
    for name in wanted:
        given[name].requires_grad_()
    weights = {n.removesuffix("_l0"): given[n] for n in problem.learned}
    states = {s.name: given[f"state {s.name}"][0] for s in cell.states}
    declared = {s.name: torch.full_like(states[s.name], s.initial) for s in cell.states}
    steps, rows, _ = problem.shape
    valid = torch.ones(steps, rows, dtype=torch.bool)
    valid = valid if problem.valid is None else torch.tensor(problem.valid)
    resets, forced, outputs = given.get("resets", ~valid) & valid, given["forced"], []
    for t in range(steps):
        again = resets[t][:, None]
        states = {n: torch.where(again, declared[n], s) for n, s in states.items()}
        y = next(iter(states.values())) @ given["weight"].T + given["bias"]
        series = torch.where(forced[t][:, None], given["x"][t, :, :width], y)
        entering = torch.cat([series, given["x"][t, :, width:]], -1)
        _, new = at.recurrence(
            cell, entering[None], weights, list(states.values()), engine="reference"
        )
        goes = valid[t][:, None]
        pairs = zip(states.items(), new, strict=True)
        states = {n: torch.where(goes, after, before) for (n, before), after in pairs}
        output = next(iter(states.values()))
        outputs.append(torch.where(goes, output, 0.0) @ given["weight"].T + given["bias"])
    solution = {"y": torch.stack(outputs)}
    solution |= {f"final {n}": s[None] for n, s in states.items()}
    loss = sum((solution[n] * given[f"d {n}"]).sum() for n in solution)
    grads = torch.autograd.grad(loss, [given[n] for n in wanted], materialize_grads=True)
    solution |= {f"d {n}": g for n, g in zip(wanted, grads, strict=True)}
    return {n: a.detach().numpy() for n, a in solution.items()}


def made(module: Any, problem: Problem, dtype: str, batch_first: bool = False) -> Any:
    """The feedback of a frontend, with a problem's weights."""
    kind, like = (dtype, np.array) if module is an else (getattr(torch, dtype), torch.tensor)
    sizes = {name: size for name, size in problem.sizes.items() if name != "H"}
    options = {"dtype": kind, "batch_first": batch_first, **sizes}
    layer = module.RNN(problem.cell, problem.inputs, problem.sizes["H"], **options)
    dense = an.Dense if module is an else torch.nn.Linear
    readout = dense(*problem["weight"].shape[::-1], dtype=kind)
    layer.load_state_dict({n: like(a) for n, a in problem.learned.items()})
    readout.load_state_dict({n: like(problem[n]) for n in ("weight", "bias")})
    return module.Feedback(layer, readout)


def turned(array: Any) -> Any:
    return array.swapaxes(0, 1)


def as_it_is(array: Any) -> Any:
    return array


def by_torch(problem: Problem, dtype: str, batch_first: bool = False) -> Arrays:
    feedback, turn = made(at, problem, dtype, batch_first), turned if batch_first else as_it_is
    assert feedback.engine.name == "cpu"
    given = {"x": torch.tensor(poisoned(problem, dtype))}
    given |= {n: torch.tensor(problem[n].astype(dtype)) for n in states_of(problem)}
    for tensor in given.values():
        tensor.requires_grad_()
    flags = {
        n: torch.tensor(a) for n, a in (problem.options | {"forced": problem["forced"]}).items()
    }
    flags = {n: f if n == "lengths" else turn(f) for n, f in flags.items()}
    y, final = feedback(turn(given["x"]), one([given[n] for n in states_of(problem)]), **flags)
    results = {"y": turn(y), **named(problem, "final", final)}
    loss = sum(
        (r * torch.tensor(problem[f"d {n}"].astype(dtype))).sum() for n, r in results.items()
    )
    for part in (feedback.layer, feedback.readout):
        given |= dict(part.named_parameters())
    grads = torch.autograd.grad(loss, list(given.values()), materialize_grads=True)
    results |= {f"d {n}": g for n, g in zip(given, grads, strict=True)}
    return {n: a.detach().numpy() for n, a in results.items()}


def by_numpy(problem: Problem, dtype: str, batch_first: bool = False) -> Arrays:
    feedback, turn = made(an, problem, dtype, batch_first), turned if batch_first else as_it_is
    flags = {n: f if n == "lengths" else turn(f) for n, f in problem.options.items()}
    forced = turn(problem["forced"]) if problem["forced"].ndim else float(problem["forced"])
    x, state = turn(poisoned(problem, dtype)), one(problem.group("state"))
    y, final = feedback.forward(x, state, forced=forced, training=True, **flags)
    d_x, d_state = feedback.backward(turn(problem["d y"]), one(problem.group("d final")))
    solution = {"y": turn(y), "d x": turn(d_x), **named(problem, "final", final)}
    solution |= named(problem, "d state", d_state)
    grads = {**feedback.layer.grads, **feedback.readout.grads}
    return solution | {f"d {n}": a for n, a in grads.items()}


def assert_solved(found: Arrays, right: Arrays, dtype: str) -> None:
    assert found.keys() == right.keys()
    for name, value in right.items():
        kind = "gradient" if name.startswith("d ") else "forward"
        assert found[name].dtype == dtype
        # A bias of the readout is a sum over all steps, in which terms of both signs cancel.
        assert_close(found[name], value, dtype, kind, name, axes=())


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Any:
    cpu.threads.set_threads(request.param)
    yield request.param
    cpu.threads.set_threads(None)


SOLVERS = pytest.mark.parametrize("solve", [by_torch, by_numpy])


@SOLVERS
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("cell", CELLS, ids=str)
@pytest.mark.sample(8)
def test_cells(cell: Cell, masked: bool, solve: Any) -> None:
    problem = draw(cell, SHAPES[0], *(("mask", "lengths", "resets") if masked else ()))
    assert_solved(solve(problem, "float64", masked), by_loop(problem), "float64")


@SOLVERS
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.sample(every=9)
def test_shapes(shape: tuple[int, ...], dtype: str, solve: Any, threads: int) -> None:
    problem = draw(cells.LSTM, shape)
    assert_solved(solve(problem, dtype), by_loop(problem), dtype)


@SOLVERS
@pytest.mark.parametrize("p", [0.0, 1.0])
def test_teachers_and_free_runs(p: float, solve: Any) -> None:
    """Of no step forced, and of all: with the number, too, what comes out are these."""
    problem = draw(cells.LSTM, SHAPES[0], p=p)
    assert problem["forced"].all() == bool(p) and problem["forced"].any() == bool(p)
    right, by_flags = by_loop(problem), solve(problem, "float64")
    assert_solved(by_flags, right, "float64")
    if solve is by_numpy:
        found = solve(problem.but({"forced": np.array(p)}), "float64")
        assert all(np.array_equal(found[n], by_flags[n]) for n in right)


def layer_and_readout() -> tuple[Any, Any]:
    torch.manual_seed(0)
    return at.LSTM(3, 8), torch.nn.Linear(8, 2)


# -- one step at a time ----------------------------------------------------------------------------
def torchs_steps(problem: Problem, wanted: bool) -> Any:
    feedback = made(at, problem, "float64")
    assert feedback.prepare() is feedback

    def step(x: Any, state: Any, **flags: Any) -> Any:
        state = one([torch.as_tensor(s) for s in named(problem, "", state).values()])
        flags = {n: torch.as_tensor(f) for n, f in flags.items()}
        with torch.set_grad_enabled(wanted):
            y, state = feedback.step(torch.tensor(x), state, **flags)
        assert y.requires_grad is wanted
        return y.detach().numpy(), one(
            [s.detach().numpy() for s in named(problem, "", state).values()]
        )

    return step


def numpys_steps(problem: Problem, prepared: bool) -> Any:
    feedback = made(an, problem, "float64")
    return (feedback.prepare() if prepared else feedback).step


@pytest.mark.parametrize("more", [False, True], ids=["plain", "with gradients, or prepared"])
@pytest.mark.parametrize("steps", [torchs_steps, numpys_steps])
@pytest.mark.parametrize("cell", CELLS, ids=str)
@pytest.mark.sample(8)
def test_steps(cell: Cell, steps: Any, more: bool) -> None:
    """Forced and free, with resets, from a state that is given; NumPy's on packed weights."""
    problem = draw(cell, SHAPES[0], "resets")
    right, x = by_loop(problem), poisoned(problem, "float64")
    step = steps(problem, more)
    state, found = one(problem.group("state")), []
    with mock.patch.object(Stream, "step", autospec=True, side_effect=Stream.step) as native:
        for t in range(len(x)):
            flags = {"forced": problem["forced"][t], "resets": problem["resets"][t]}
            y, state = step(x[t], state, **flags)
            found.append(y)
    assert native.call_count == (len(x) if more and steps is numpys_steps else 0)
    assert_close(np.stack(found), right["y"], "float64", "forward")
    for name, value in named(problem, "final", state).items():
        assert_close(value, right[name], "float64", "forward", name)


def test_steps_begin_as_a_call_does() -> None:
    """With no state, and all rows forced or free."""
    layer, readout = layer_and_readout()
    x, feedback = torch.randn(5, 4, 3), at.Feedback(layer, readout).prepare()
    ours = an.Feedback(an.LSTM(3, 8), an.Dense(8, 2))
    ours.layer.set_parameters({n: p.detach().numpy() for n, p in layer.named_parameters()})
    ours.readout.set_parameters({n: p.detach().numpy() for n, p in readout.named_parameters()})
    for forced in (True, False, 1.0, 0.0):
        with torch.no_grad():
            right, _ = feedback(x, forced=float(forced))
            state = others = None
            for t in range(5):
                y, state = feedback.step(x[t], state, forced=forced)
                also, others = ours.step(x[t].numpy(), others, forced=forced)
                assert_close(y.numpy(), right[t].numpy(), "float32", "forward")
                assert_close(also, right[t].numpy(), "float32", "forward")


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_steps_of_the_layers_that_torch_has(name: str) -> None:
    """A cell of one state takes it as it returned it."""
    torch, at = pytest.importorskip("torch"), pytest.importorskip("anycell.torch")
    model = at.Feedback(getattr(at, name)(2, 4), torch.nn.Linear(4, 1)).eval()
    x, state = torch.randn(5, 3, 2), None
    forced = torch.tensor([True, True, False, False, False])
    with torch.no_grad():
        wanted, _ = model(x, forced=forced)
        for now, is_forced, right in zip(x, forced.tolist(), wanted, strict=True):
            y, state = model.step(now, state, forced=is_forced)
            assert_close(y, right, "float32", "forward")


def test_a_step_leaves_a_pending_backward() -> None:
    runs = []
    for stepping in (False, True):
        ours = an.Feedback(an.LSTM(2, 4, seed=0), an.Dense(4, 1, seed=0))
        y, _ = ours.forward(np.ones((3, 2, 2)), forced=0.0, training=True)
        if stepping:
            ours.prepare().step(np.ones((2, 2)), forced=False)
        ours.backward(y)
        runs.append({**ours.layer.grads, **ours.readout.grads})
    assert all(np.array_equal(a, runs[1][n]) for n, a in runs[0].items())


def test_steps_of_8_bits() -> None:
    """To within the rounding of what is fed back."""
    layer, readout = layer_and_readout()
    x = torch.randn(9, 4, 3)
    small = compress.quantize(at.Feedback(layer, readout)).prepare()
    with torch.no_grad():
        right, state = small(x, forced=torch.arange(9) < 4)[0], None
        for t in range(9):
            y, state = small.step(x[t], state, forced=t < 4)
            assert_close(y.numpy(), right[t].numpy(), "int8", "forward", axes=())


def test_teacher_forcing_is_the_layer_itself() -> None:
    layer, readout = layer_and_readout()
    x = torch.randn(7, 4, 3)
    y, (h, c) = at.Feedback(layer, readout)(x, forced=1.0)
    right, (right_h, right_c) = layer(x)
    for value, other in ((y, readout(right)), (h, right_h), (c, right_c)):
        assert_close(value.detach(), other.detach(), "float32", "forward")


def test_a_forecast_goes_on_from_any_state() -> None:
    """A free run after a call of the layer is one call whose first steps are forced."""
    layer, readout = layer_and_readout()
    x, feedback = torch.randn(7, 4, 3), at.Feedback(layer, readout)
    whole, _ = feedback(x, forced=(torch.arange(7) < 3)[:, None].expand(7, 4))
    _, state = layer(x[:3])
    ahead, _ = feedback(x[3:], state, forced=0.0)
    assert_close(ahead.detach(), whole[3:].detach(), "float32", "forward")


def test_probabilities_follow_the_seed() -> None:
    layer, readout = layer_and_readout()
    x, feedback = torch.randn(40, 30, 3), at.Feedback(layer, readout)
    torch.manual_seed(1)
    first = feedback(x, forced=0.3)[0]
    torch.manual_seed(1)
    forced = torch.rand(40, 30) < 0.3
    assert torch.equal(first, feedback(x, forced=forced)[0])
    assert not torch.equal(first, feedback(x, forced=0.3)[0])
    ours, dense = an.LSTM(3, 8, seed=0), an.Dense(8, 2, seed=1)
    runs = [an.Feedback(ours, dense, seed=s).forward(x.numpy(), forced=0.3)[0] for s in (1, 1, 2)]
    assert np.array_equal(runs[0], runs[1]) and not np.array_equal(runs[0], runs[2])
    drawn = an.Feedback(ours, dense, seed=1)._forced(0.3, x.numpy(), False)
    assert abs(drawn.mean() - 0.3) < 0.05


def test_second_derivatives() -> None:
    torch.manual_seed(0)
    layer, readout = at.RNN(cells.GRU, 2, 3), torch.nn.Linear(3, 1)
    feedback = at.Feedback(layer, readout).double()
    x, forced = torch.randn(3, 2, 2, dtype=torch.float64), torch.rand(3, 2) < 0.5

    def run(x: Any) -> Any:
        return feedback(x, forced=forced)[0]

    assert torch.autograd.gradgradcheck(run, x.requires_grad_())


@pytest.mark.parametrize("batch_first", [False, True])
def test_a_readout_without_a_bias(batch_first: bool) -> None:
    """It is one whose bias is 0, which is not learned."""
    rng, runs = np.random.default_rng(0), []
    x, forced = rng.normal(size=(5, 4, 3)), rng.random((5, 4)) < 0.5
    for bias in (False, True):
        layer = an.GRU(3, 8, dtype="float64", seed=0, batch_first=batch_first)
        dense = an.Dense(8, 2, bias=bias, dtype="float64", seed=1)
        ours = an.Feedback(layer, dense)
        y, state = ours.forward(x, forced=forced, training=True)
        d_x, d_state = ours.backward(np.ones_like(y))
        learned = {**layer.grads, **dense.grads}
        assert ("bias" in learned) is bias
        theirs = at.GRU(3, 8, dtype=torch.float64, batch_first=batch_first)
        readout = torch.nn.Linear(8, 2, bias=bias, dtype=torch.float64)
        for module, own in ((theirs, layer), (readout, dense)):
            module.load_state_dict({n: torch.tensor(a) for n, a in own.parameters.items()})
        given = torch.tensor(x), torch.tensor(forced)
        right = at.Feedback(theirs, readout)(given[0], forced=given[1])[0].detach()
        assert_close(y, right, "float64", "forward")
        runs.append({"y": y, "state": state, "d x": d_x, "d state": d_state, **learned})
    for name, value in runs[0].items():
        assert_close(value, runs[1][name], "float64", "gradient", name)


def test_copies_and_pickles_run() -> None:
    layer, readout = layer_and_readout()
    x, feedback = torch.randn(5, 2, 3), at.Feedback(layer, readout)
    right = feedback(x, forced=0.0)[0]
    for other in (copy.deepcopy(feedback), pickle.loads(pickle.dumps(feedback))):
        assert torch.equal(other(x, forced=0.0)[0], right)
    ours = an.Feedback(an.LSTM(3, 8, seed=0), an.Dense(8, 2, seed=1))
    right = ours.forward(x.numpy(), forced=0.0)[0]
    other = pickle.loads(pickle.dumps(ours))
    assert np.array_equal(other.forward(x.numpy(), forced=0.0)[0], right)


def test_other_hyperparameters_count() -> None:
    layer = at.RNN(cells.PeepholeLSTM(cell_clip=3.0), 3, 8)
    x, feedback = torch.randn(5, 2, 3), at.Feedback(layer, torch.nn.Linear(8, 2))
    before = feedback(x, forced=0.0)[0]
    layer.cell = cells.PeepholeLSTM(cell_clip=0.01)
    assert not torch.equal(feedback(x, forced=0.0)[0], before)


@pytest.mark.slow
def test_it_compiles_into_one_graph() -> None:
    torch.manual_seed(0)
    feedback = at.Feedback(at.RNN(cells.LSTM, 3, 8), torch.nn.Linear(8, 2))
    x, forced = torch.randn(5, 2, 3), torch.rand(5, 2) < 0.5
    compiled = torch.compile(feedback, fullgraph=True, backend="aot_eager")
    outputs, expected = (run(x, forced=forced)[0].detach() for run in (compiled, feedback))
    assert_close(outputs, expected, "float32", "forward")


@cell(gates="a", state="h")
def Reads(x, r, s):
    """Has a matmul of a name that is taken."""
    return x.a + r.a + linear(s.h, "readout")


class Bounded(torch.nn.Linear):
    """Computes something else than its weights say."""

    def forward(self, x):
        return super().forward(x).tanh()


LAYER = an.LSTM(2, 4, seed=0)
READOUT = an.Dense(4, 1, seed=0)
OF_SIZES = r"cell: given Sized, .* 2 \* P \+ 2 \* H units .* hidden size H. Call the layer's step"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: an.Feedback(an.LSTM(2, 4, 2), READOUT), "layer: given .* a single layer"),
        (lambda: an.Feedback(an.LSTM(2, 4, bidirectional=True), READOUT), "layer: given"),
        (lambda: an.Feedback(LAYER, an.Dense(5, 1)), r"readout: given .* expected Dense\(4"),
        (lambda: an.Feedback(LAYER, an.Dense(4, 3)), "readout: given .* at most 2 outputs"),
        (lambda: an.Feedback(an.RNN(Reads, 2, 4), READOUT), "cell: given Reads"),
        (lambda: an.Feedback(an.RNN(Sized, 2, 4, P=4, E=2), READOUT), OF_SIZES),
        (lambda: at.Feedback(at.RNN(Sized, 2, 4, P=4, E=2), torch.nn.Linear(4, 1)), OF_SIZES),
        (lambda: run_numpy(forced=1.5), "forced: given 1.5"),
        (lambda: run_numpy(forced=np.ones((2, 3))), r"forced: given shape \[2, 3\]"),
        (lambda: an.Feedback(LAYER, READOUT).backward(0.0), "backward.. needs"),
        (lambda: at.Feedback(torch.nn.LSTM(2, 4), torch.nn.Linear(4, 1)), "layer: given LSTM"),
        (lambda: at.Feedback(at.LSTM(2, 4, 2), torch.nn.Linear(4, 1)), "layer: given"),
        (lambda: at.Feedback(at.LSTM(2, 4), torch.nn.Linear(5, 1)), "readout: given"),
        (lambda: at.Feedback(at.LSTM(2, 4), Bounded(4, 1)), r"readout: given Bounded.* fed back\."),
        (lambda: at.Feedback(at.LSTM(2, 4), torch.nn.Linear(4, 3)), "at most 2 outputs"),
        (lambda: run_torch(forced=-0.5), "forced: given -0.5"),
        (
            lambda: run_torch(forced="all"),
            r"forced: given str 'all'; expected torch.bool .* or a probability",
        ),
        (lambda: run_torch(forced=torch.ones(3, 2) / 2), "forced: given .* value of 0.5"),
        (lambda: run_torch(forced=torch.ones(2, 3)), r"forced: given .*\[3, 2\], laid out as x"),
        (lambda: run_torch(forced=torch.ones(2)), r"forced: given .*\[3\], of all rows"),
        (
            lambda: run_torch(torch.zeros(3, 2, 1), forced=1.0),
            r"x: given .* expected torch.float32 \[time",
        ),
        (lambda: step_numpy(forced=0.5), "forced: given 0.5; expected True or False, or a bool"),
        (lambda: step_numpy(forced=np.ones((3, 1))), r"forced: given shape \[3, 1\]"),
        (lambda: step_numpy(forced=True, state=0.0), "state: given"),
        (lambda: step_torch(forced=0.5), "forced: given 0.5; expected True or False, or a bool"),
        (lambda: step_torch(forced=torch.ones(2, dtype=torch.bool)), r"forced: given .*\[3\]"),
        (lambda: step_torch(forced=True, state=torch.zeros(1, 3, 4)), "state: given"),
        (
            lambda: step_torch(torch.zeros(2), forced=True),
            r"x: given .*\[rows, 2\], one step of",
        ),
        (lambda: step_torch(np.zeros((3, 2)), forced=True), r"x: given ndarray"),
        (lambda: step_torch(forced=True, resets=torch.ones(3) * 2), "resets: given"),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        call()


def test_forced_is_all_by_default_and_takes_what_masks_are(rng: np.random.Generator) -> None:
    """True and 1.0 are the same, and so are 0 and 1 of floats, in PyTorch and NumPy."""
    x, flags = rng.normal(size=(5, 3, 2)).astype("float32"), rng.random((5, 3)) < 0.5
    ours, theirs = an.Feedback(LAYER, READOUT), at.Feedback(at.LSTM(2, 4), torch.nn.Linear(4, 1))
    theirs.load_state_dict({n: torch.as_tensor(a) for n, a in ours.state_dict().items()})
    ways: list[Any] = [True, False, flags, flags.astype("float32"), flags[:, 0].astype("float32")]
    for forced in ways:
        given = forced if isinstance(forced, bool) else torch.as_tensor(forced)
        y = theirs(torch.as_tensor(x), forced=given)[0].detach()
        assert_close(ours(x, forced=forced)[0], y.numpy(), "float32", "forward")
    assert np.array_equal(ours(x)[0], ours(x, forced=1.0)[0])
    assert torch.equal(theirs(torch.as_tensor(x))[0], theirs(torch.as_tensor(x), forced=1.0)[0])
    assert not np.allclose(ours(x)[0], ours(x, forced=False)[0])


def test_numpys_is_a_layer_like_any_other(tmp_path: Path, rng: np.random.Generator) -> None:
    """It trains as one, and is saved with both of its parts, under the names of PyTorch."""
    x = rng.normal(size=(6, 2, 2)).astype("float32")
    feedback, apart = (an.Feedback(an.LSTM(2, 4, seed=0), an.Dense(4, 1, seed=1)) for _ in range(2))
    optimizers = an.Adam(feedback), an.Adam([apart.layer, apart.readout])
    for each, optimizer in zip((feedback, apart), optimizers, strict=True):
        y, _ = each(x, forced=0.0, training=True)
        each.backward(y)
        optimizer.step()
    assert np.array_equal(feedback(x, forced=0.0)[0], apart(x, forced=0.0)[0])
    feedback.save(tmp_path / "forecast.npz")
    other = an.Feedback(an.LSTM(2, 4), an.Dense(4, 1)).prepare()
    other.load(tmp_path / "forecast.npz")
    assert np.array_equal(other(x, forced=0.0)[0], feedback(x, forced=0.0)[0])
    stepped = other.step(x[0])[0]  # which packs anew
    assert_close(stepped, feedback.step(x[0])[0], "float32", "forward")
    with pytest.raises(ValueError, match="given one layer twice"):
        an.Adam([feedback, feedback.readout])


def run_numpy(**options: Any) -> Any:
    return an.Feedback(LAYER, READOUT).forward(np.zeros((3, 2, 2)), **options)


def step_numpy(**options: Any) -> Any:
    return an.Feedback(LAYER, READOUT).step(np.zeros((3, 2)), **options)


def step_torch(x: Any = None, **options: Any) -> Any:
    x = torch.zeros(3, 2) if x is None else x
    return at.Feedback(at.LSTM(2, 4), torch.nn.Linear(4, 1)).step(x, **options)


def run_torch(x: Any = None, **options: Any) -> Any:
    x = torch.zeros(3, 2, 2) if x is None else x
    return at.Feedback(at.LSTM(2, 4), torch.nn.Linear(4, 1))(x, **options)


# -- the engines -----------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["cpu", "gpu"])
@pytest.mark.parametrize("cell", [cells.LSTM, cells.GRU, cells.LayerNormLSTM], ids=str)
@pytest.mark.sample(every=5)  # each engine
def test_engines(cell: Cell, engine: str, rng: np.random.Generator) -> None:
    """The cell with its readout is one like any other; on a GPU's engine by its interpreter."""
    if engine == "gpu":
        pytest.importorskip("triton")
        from gpu import by_gpu as solve
    else:
        solve = by_cpu
    options = {"masked": True, "resets": True}
    problem = random_problem(with_feedback(cell), (4, 3, 9), rng, "float32", **options)
    right = problem.right
    for name, value in solve(problem).items():
        kind = "gradient" if name.startswith("d ") else "forward"
        assert_close(np.asarray(value), right[name], "float32", kind, name)
