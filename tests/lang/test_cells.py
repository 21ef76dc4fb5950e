"""The built-in cells against the equations of their papers, written in plain torch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import pytest
from numpy.testing import assert_array_equal
from problems import Arrays, Problem, assert_right, assert_solved, by_cpu, random_problem
from tolerances import assert_close

import anycell
from anycell import Cell, cells, linear
from anycell.lang import philox
from anycell.plan import plan
from tests.engines.test_reference import by_torch

torch = pytest.importorskip("torch")
F = torch.nn.functional
sigmoid, tanh, relu, exp = torch.sigmoid, torch.tanh, torch.relu, torch.exp

Given = dict[str, Any]
Equations = Callable[[Any, Any, Given], Any]
# A step takes the input's projection of each gate, the states, and by name: the weights W, the
# parameters p, the static input e, and draw(k, rate, per), which returns the k-th random mask (in
# evaluation, its mean). It returns the new states.


# ---- equations -----------------------------------------------------------------------------------
def recur(h: Any, given: Given, name: str = "hh", parts: int = 1) -> Any:
    """Returns all blocks of a matmul, each [B, .]."""
    bias = given["W"].get(f"bias_{name}")
    return F.linear(h, given["W"][f"weight_{name}"], bias).chunk(parts, 1)


def lstm(
    coupled: bool = False,
    forget_bias: float = 0.0,
    cell_clip: float = np.inf,
    gate_clip: float = np.inf,
    peephole: bool = False,
) -> Equations:
    def step(x: Any, s: Any, given: Given) -> Any:
        h, c = s
        p = given["p"] if peephole else dict.fromkeys(("p_i", "p_f", "p_o"), 0.0)
        i, f, g, o = (a + b for a, b in zip(x, recur(h, given, parts=4), strict=True))
        f = sigmoid((f + forget_bias + p["p_f"] * c).clamp(-gate_clip, gate_clip))
        i = sigmoid((i + p["p_i"] * c).clamp(-gate_clip, gate_clip))
        i = 1 - f if coupled else i
        c = (f * c + i * tanh(g.clamp(-gate_clip, gate_clip))).clamp(-cell_clip, cell_clip)
        o = sigmoid((o + p["p_o"] * c).clamp(-gate_clip, gate_clip))
        return o * tanh(c), c

    return step


def gru(x: Any, s: Any, given: Given) -> Any:
    (h,) = s
    r, z, _ = (sigmoid(a + b) for a, b in zip(x, recur(h, given, parts=3), strict=True))
    n = tanh(x[2] + r * recur(h, given, parts=3)[2])
    return ((1 - z) * n + z * h,)


def gru_reset_before(x: Any, s: Any, given: Given) -> Any:
    (h,) = s
    rr, rz, _ = recur(h, given, parts=3)
    r, z = sigmoid(x[0] + rr), sigmoid(x[1] + rz)
    n = tanh(x[2] + (r * h) @ given["W"]["weight_hn"].T)
    return ((1 - z) * n + z * h,)


def rnn(activation: Any) -> Equations:
    return lambda x, s, given: (activation(x[0] + recur(s[0], given)[0]),)


def ind_rnn(activation: Any) -> Equations:
    return lambda x, s, given: (activation(x[0] + given["p"]["u"] * s[0]),)


def lstmp(cell_clip: float = np.inf, proj_clip: float = np.inf) -> Equations:
    def step(x: Any, s: Any, given: Given) -> Any:
        i, f, g, o = (a + b for a, b in zip(x, recur(s[0], given, parts=4), strict=True))
        c = (sigmoid(f) * s[1] + sigmoid(i) * tanh(g)).clamp(-cell_clip, cell_clip)
        return ((sigmoid(o) * tanh(c)) @ given["W"]["weight_hr"].T).clamp(-proj_clip, proj_clip), c

    return step


def layer_norm_lstm(joint: bool, keep_normed: bool, eps: float = 1e-5) -> Equations:
    def norm(a: Any, gain: Any, shift: Any) -> Any:
        return F.layer_norm(a, a.shape[1:], gain, shift, eps)

    def step(x: Any, s: Any, given: Given) -> Any:
        h, c = s
        p = {k: [given["p"][f"{k}_{gate}"] for gate in "ifgo"] for k in "xrb"}
        r = recur(h, given, parts=4)
        if joint:  # TensorFlow Addons: z = LN(x @ kernel) + LN(h @ recurrent) + bias, then split
            gain_x, gain_r, bias = (torch.cat(p[k]) for k in "xrb")
            z = norm(torch.cat(x, 1), gain_x, 0.75 * bias) + norm(torch.cat(r, 1), gain_r, None)
            i, f, g, o = (z + 0.25 * bias).chunk(4, 1)
        else:
            i, f, g, o = (
                norm(x[k], p["x"][k], None) + norm(r[k], p["r"][k], p["b"][k]) for k in range(4)
            )
        c = sigmoid(f) * c + sigmoid(i) * tanh(g)
        normed = norm(c, given["p"]["c_gain"], given["p"]["c_shift"])
        return sigmoid(o) * tanh(normed), normed if keep_normed else c

    return step


def layer_norm_gru(x: Any, s: Any, given: Given) -> Any:
    (h,), p = s, given["p"]
    norms = [
        (F.layer_norm(a, a.shape[1:]) * p[f"x_{k}"], F.layer_norm(b, b.shape[1:]) * p[f"r_{k}"])
        for k, a, b in zip("rzn", x, recur(h, given, parts=3), strict=True)
    ]
    r, z = sigmoid(sum(norms[0]) + p["b_r"]), sigmoid(sum(norms[1]) + p["b_z"])
    n = tanh(norms[2][0] + p["b_n"] + r * (norms[2][1] + p["b_hn"]))
    return ((1 - z) * n + z * h,)


def zoneout_lstm(x: Any, s: Any, given: Given) -> Any:
    h, c = lstm()(x, s, given)
    old_h, old_c = 1 - given["draw"](0, 0.95), 1 - given["draw"](1, 0.5)
    return old_h * s[0] + (1 - old_h) * h, old_c * s[1] + (1 - old_c) * c


def zoneout_gru(x: Any, s: Any, given: Given) -> Any:
    old = 1 - given["draw"](0, 0.9)
    return (old * s[0] + (1 - old) * gru(x, s, given)[0],)


def recurrent_dropout_lstm(dropout: float, per: str) -> Equations:
    def step(x: Any, s: Any, given: Given) -> Any:
        i, f, g, o = (a + b for a, b in zip(x, recur(s[0], given, parts=4), strict=True))
        d = given["draw"](0, 1 - dropout, per) / (1 - dropout)
        c = sigmoid(f) * s[1] + sigmoid(i) * d * tanh(g)
        return sigmoid(o) * tanh(c), c

    return step


def variational_lstm(x: Any, s: Any, given: Given) -> Any:
    d = given["draw"](0, 0.75, "sequence") / 0.75
    r = recur(d * s[0], given, "r", 4)
    i, f, g, o = (a + b for a, b in zip(x, r, strict=True))
    c = sigmoid(f) * s[1] + sigmoid(i) * tanh(g)
    return sigmoid(o) * tanh(c), c


def mgu(reset_after: bool) -> Equations:
    def step(x: Any, s: Any, given: Given) -> Any:
        (h,) = s
        rf, rn = recur(h, given, parts=2)
        f = sigmoid(x[0] + rf)
        n = tanh(x[1] + (f * rn if reset_after else recur(f * h, given, "hn")[0]))
        return ((1 - f) * h + f * n,)

    return step


def janet(x: Any, s: Any, given: Given) -> Any:
    f, g = (a + b for a, b in zip(x, recur(s[0], given, parts=2), strict=True))
    return (sigmoid(f) * s[0] + (1 - sigmoid(f - 1)) * tanh(g),)


def multiplicative_lstm(gate_inside: bool) -> Equations:
    def step(x: Any, s: Any, given: Given) -> Any:
        m = x[4] * recur(s[0], given, "mh")[0]
        i, f, g, o = (a + b for a, b in zip(x[:4], recur(m, given, "hm", 4), strict=True))
        c = sigmoid(f) * s[1] + sigmoid(i) * tanh(g)
        return tanh(sigmoid(o) * c) if gate_inside else sigmoid(o) * tanh(c), c

    return step


def nas(x: Any, s: Any, given: Given) -> Any:
    """The step of TensorFlow's ``NASCell``."""
    m = recur(s[0], given, parts=8)
    first = [
        function(x[k] * m[k] if k == 3 else x[k] + m[k])
        for k, function in enumerate((sigmoid, relu, sigmoid, relu, tanh, sigmoid, tanh, sigmoid))
    ]
    second = [
        tanh(tanh(first[0] * first[1]) + s[1]),
        tanh(first[2] + first[3]),
        tanh(first[4] * first[5]),
        sigmoid(first[6] + first[7]),
    ]
    c = second[0] * second[1]
    return tanh(c * tanh(second[2] + second[3])), c


def ea_lstm(x: Any, s: Any, given: Given) -> Any:
    f, g, o = (a + b for a, b in zip(x, recur(s[0], given, parts=3), strict=True))
    c = sigmoid(f) * s[1] + sigmoid(given["e"]) * tanh(g)
    return sigmoid(o) * tanh(c), c


def gru_d(x: Any, s: Any, given: Given) -> Any:
    h = exp(-torch.clamp(x[3], min=0)) * s[0]
    r, z = (sigmoid(a + b) for a, b in zip(x[:2], recur(h, given, "k", 2), strict=True))
    n = tanh(x[2] + recur(r * h, given, "kn")[0])
    return ((1 - z) * h + z * n,)


def slstm(heads: int, forget: Any) -> Equations:
    """Returns a step that computes all gates of one head after the other."""

    def step(x: Any, s: Any, given: Given) -> Any:
        h, c, n, m = s
        weight = given["W"]["weight_r"].reshape(heads, -1, h.shape[1] // heads)
        parts = [a @ w.T for a, w in zip(h.chunk(heads, 1), weight, strict=True)]
        r = [torch.cat(gate, 1) for gate in zip(*(p.chunk(4, 1) for p in parts), strict=True)]
        i, f, z, o = (a + b for a, b in zip(x, r, strict=True))
        f = forget(f) + m
        m = torch.maximum(f, i)
        c = exp(f - m) * c + exp(i - m) * tanh(z)
        n = exp(f - m) * n + exp(i - m)
        return sigmoid(o) * c / n, c, n, m

    return step


CELLS: list[tuple[Cell, Equations]] = [
    (cells.EALSTM, ea_lstm),
    (cells.GRU, gru),
    (cells.GRU(reset_after=False), gru_reset_before),
    (cells.GRUD, gru_d),
    (cells.IndRNN, ind_rnn(relu)),
    (cells.IndRNN(nonlinearity="tanh"), ind_rnn(tanh)),
    (cells.JANET, janet),
    (cells.LSTM, lstm()),
    (cells.LSTM(coupled=True, forget_bias=1.0), lstm(coupled=True, forget_bias=1.0)),
    (cells.LSTM(cell_clip=0.8, gate_clip=1.5), lstm(cell_clip=0.8, gate_clip=1.5)),
    (cells.LSTMP, lstmp()),
    (cells.LSTMP(cell_clip=0.8, proj_clip=0.4), lstmp(0.8, 0.4)),
    (cells.LayerNormGRU, layer_norm_gru),
    (cells.LayerNormLSTM, layer_norm_lstm(joint=False, keep_normed=False)),
    (cells.LayerNormLSTM(form="ba"), layer_norm_lstm(joint=True, keep_normed=False)),
    (cells.LayerNormLSTM(form="addons", eps=1e-3), layer_norm_lstm(True, True, 1e-3)),
    (cells.MGU, mgu(reset_after=False)),
    (cells.MGU(reset_after=True), mgu(reset_after=True)),
    (cells.MultiplicativeLSTM, multiplicative_lstm(gate_inside=False)),
    (cells.MultiplicativeLSTM(gate_inside=True), multiplicative_lstm(gate_inside=True)),
    (cells.NAS, nas),
    (cells.PeepholeLSTM, lstm(peephole=True)),
    (cells.PeepholeLSTM(coupled=True, forget_bias=1.0, cell_clip=0.8),
     lstm(coupled=True, forget_bias=1.0, cell_clip=0.8, peephole=True)),
    (cells.PeepholeLSTM(gate_clip=1.5), lstm(gate_clip=1.5, peephole=True)),
    (cells.RNN, rnn(tanh)),
    (cells.RNN(nonlinearity="relu"), rnn(relu)),
    (cells.RecurrentDropoutLSTM, recurrent_dropout_lstm(0.25, "step")),
    (cells.RecurrentDropoutLSTM(dropout=0.5, per="sequence"),
     recurrent_dropout_lstm(0.5, "sequence")),
    (cells.VariationalLSTM, variational_lstm),
    (cells.ZoneoutGRU, zoneout_gru),
    (cells.ZoneoutLSTM, zoneout_lstm),
    (cells.sLSTM, slstm(1, F.logsigmoid)),
    (cells.sLSTM(heads=2, forget="exp"), slstm(2, lambda f: f)),
]  # fmt: skip
EVERY = [cell for cell, _ in CELLS]


# ---- the loop ------------------------------------------------------------------------------------
def by_equations(problem: Problem, equations: Equations) -> Arrays:
    """Solves a problem by a loop in torch and its autograd."""
    cell, drawing = problem.cell, problem.drawing

    def run(given: Problem) -> Any:
        arguments = given.arguments()
        x, state, restored = (arguments[name] for name in ("gates_x", "state", "reset_state"))
        mask = given.arrays.get("mask", torch.ones(x.shape[:2], dtype=torch.bool))
        resets = given.arrays.get("resets", torch.zeros(x.shape[:2], dtype=torch.bool))
        outputs = []
        for t in range(len(x)):

            def draw(k: int, rate: float, per: str = "step", t: int = t) -> Any:
                if not drawing.get("training"):
                    return rate
                step = t if per == "step" else 0
                uniform = philox.uniform(drawing["seed"], 0, k, step, x.shape[1], x.shape[2])
                units = x.shape[2] // len(cell.gates)
                return torch.tensor(uniform < np.float32(rate), dtype=x.dtype)[:, :units]

            world = {
                "W": arguments["weights"],
                "p": arguments["params"],
                "e": arguments["static"],
                "draw": draw,
            }
            there, reset = mask[t][:, None], (mask[t] & resets[t])[:, None]
            if restored:
                state = [torch.where(reset, r, s) for r, s in zip(restored, state, strict=True)]
            gates = torch.where(there, x[t], 0.0).chunk(len(cell.gates), 1)
            new = equations(gates, state, world)
            state = [torch.where(there, a, b) for a, b in zip(new, state, strict=True)]
            outputs.append(torch.where(there, state[0], 0.0))
        return torch.stack(outputs), state

    return by_torch(problem, run)


@pytest.mark.parametrize(
    "situation",
    [{"masked": True, "resets": True}, {"training": True, "seed": 11}],
    ids=["evaluation", "training"],
)
@pytest.mark.parametrize(("cell", "equations"), CELLS, ids=map(repr, EVERY))
@pytest.mark.sample(every=3)
def test_cells_are_their_equations(
    cell: Cell, equations: Equations, situation: dict[str, Any], rng: np.random.Generator
) -> None:
    problem = random_problem(cell, (5, 3, 6), rng, **situation)
    solution = by_equations(problem, equations)
    assert_solved(solution, problem)


FUSED = sorted((c for c in EVERY if plan(c, 34).engine == "cpu"), key=lambda c: not c.keeps)


@pytest.mark.parametrize("cell", FUSED, ids=repr)
@pytest.mark.sample(2)  # cells with random masks; frontends' tests run all others
def test_fused_kernels(cell: Cell, rng: np.random.Generator) -> None:
    """Each cell has one problem; ``test_engines.py`` has many problems for some cells."""
    situation = {"masked": True, "resets": True, "training": True, "seed": 3}
    problem = random_problem(cell, (4, 5, 34), rng, **situation)
    assert_right(by_cpu(problem), problem)


def test_every_option_is_tested() -> None:
    """Each option that changes the graph is tested with a value that is not its default."""
    for name in cells.__all__:
        cell = getattr(cells, name)
        listed = [other for other in EVERY if other.name == name]
        assert cell in listed
        for option in cell.structure:
            assert any(option in other.given for other in listed), (name, option)


# ---- sLSTM ---------------------------------------------------------------------------------------
def test_the_stabiliser_changes_nothing(rng: np.random.Generator) -> None:
    """From the declared initial values, results equal the paper's equations without m."""
    cell = cells.sLSTM(forget="exp")
    gates_x = torch.tensor(rng.standard_normal((9, 3, 24)), requires_grad=True)
    weight = torch.tensor(0.3 * rng.standard_normal((24, 6)), requires_grad=True)
    d_outputs = rng.standard_normal((9, 3, 6))
    resets = np.zeros((9, 3), bool)
    resets[4, 1] = resets[0, 2] = True
    h, c, n = (torch.zeros(3, 6, dtype=torch.float64) for _ in range(3))
    outputs = []
    for t in range(9):
        h, c, n = (torch.where(torch.tensor(resets[t])[:, None], 0.0, s) for s in (h, c, n))
        i, f, z, o = (gates_x[t] + h @ weight.T).chunk(4, 1)
        c = exp(f) * c + exp(i) * tanh(z)
        n = exp(f) * n + exp(i)
        h = sigmoid(o) * c / n
        outputs.append(h)
    expected = torch.stack(outputs)
    expected.backward(torch.tensor(d_outputs))
    arguments = (cell, gates_x.detach().numpy(), {"weight_r": weight.detach().numpy()})
    found, final = oracle.run(*arguments, resets=resets)
    grads = oracle.backward(*arguments, resets=resets, d_outputs=d_outputs)
    assert_close(found, expected.detach(), "float64", "forward")
    assert_close(grads.gates_x, gates_x.grad, "float64", "gradient")
    assert_close(grads.weights["weight_r"], weight.grad, "float64", "gradient")
    assert all(np.isfinite(s).all() for s in final)


@pytest.mark.parametrize("forget", ["sigmoid", "exp"])
def test_the_stabiliser_at_its_limits(forget: str, rng: np.random.Generator) -> None:
    """Results and gradients have no NaN if m is -inf at the start, after a reset and in a row
    without steps, or if the exp of a gate is infinite or zero.
    """
    cell = cells.sLSTM(heads=3, forget=forget)
    gates_x = rng.standard_normal((6, 5, 24))
    gates_x[2:, 1] *= 1e4
    gates_x[3, 2] = -1e5
    mask, resets = np.ones((6, 5), bool), np.zeros((6, 5), bool)
    mask[:, 3] = False  # m stays where it was
    resets[3, 4] = resets[0, 0] = True
    weights = {"weight_r": rng.standard_normal((3, 8, 2))}
    d_outputs, d_final = rng.standard_normal((6, 5, 6)), list(rng.standard_normal((4, 5, 6)))
    options = {"mask": mask, "resets": resets}
    for state in (None, [None, None, None, np.full((5, 6), -np.inf)]):
        outputs, final = oracle.run(cell, gates_x, weights, state, **options)
        grads = oracle.backward(
            cell, gates_x, weights, state, **options, d_outputs=d_outputs, d_final=d_final
        )
        assert np.isfinite(outputs).all()
        assert (final[3][3] == -np.inf).all() and np.isfinite(np.delete(final[3], 3, 0)).all()
        for found in (grads.gates_x, *grads.weights.values(), *grads.state):
            assert np.isfinite(found).all()
    tensor = torch.tensor(gates_x, requires_grad=True)
    given = {name: torch.tensor(a) for name, a in options.items()}
    again, _ = oracle.run(cell, tensor, {"weight_r": torch.tensor(weights["weight_r"])}, **given)
    (again * torch.tensor(d_outputs)).sum().backward()
    assert_close(again.detach(), outputs, "float64", "forward")
    grads = oracle.backward(cell, gates_x, weights, **options, d_outputs=d_outputs)
    assert_close(tensor.grad, grads.gates_x, "float64", "gradient")


# ---- gains of a norm -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("cell", "gain", "calm"),
    [
        (cells.LayerNormLSTM, None, True),
        (cells.LayerNormLSTM, 1.0, False),
        (cells.LayerNormGRU, None, True),
    ],
    ids=repr,
)
def test_the_recurrent_gains_start_where_long_sequences_are_calm(
    cell: Cell, gain: float | None, calm: bool, rng: np.random.Generator
) -> None:
    """A change of the first input by 1e-9 fades or grows by orders of magnitude."""
    layer = anycell.numpy.RNN(cell, 8, 128, dtype="float64", seed=0)
    if gain is not None:
        gains = {n: np.full_like(p, gain) for n, p in layer.parameters.items() if n[:2] == "r_"}
        layer.set_parameters({**layer.parameters, **gains})
    x = np.repeat(rng.standard_normal((600, 1, 8)), 2, axis=1)
    x[0, 1] += 1e-9
    output, _ = layer.forward(x)
    apart = np.abs(output[-1, 0] - output[-1, 1]).max()
    assert apart < 1e-12 if calm else apart > 1e-6


# ---- what dropout leaves alone -------------------------------------------------------------------
@pytest.mark.parametrize(
    "cell",
    [cells.RecurrentDropoutLSTM, cells.VariationalLSTM, cells.ZoneoutLSTM, cells.ZoneoutGRU],
    ids=repr,
)
def test_masks_of_evaluation_and_of_rate_zero(cell: Cell, rng: np.random.Generator) -> None:
    """In evaluation or at rate 0, dropout cells equal the plain cell; zoneout only at rate 0."""
    plain = cells.GRU if cell is cells.ZoneoutGRU else cells.LSTM
    problem = random_problem(plain, (5, 3, 6), rng)
    arguments = problem.arguments()
    weights = arguments.pop("weights")
    if cell is cells.VariationalLSTM:
        arguments["gates_x"] = arguments["gates_x"] + weights["bias_hh"]
        weights = {"weight_r": weights["weight_hh"]}
    zero = dict.fromkeys(cell.hyper, 0.0)
    evaluation = {} if cell.name.startswith("Zoneout") else {"seed": 3}
    for same, options in ((cell(**zero), {"training": True, "seed": 3}), (cell, evaluation)):
        found, _ = oracle.run(same, weights=weights, **{**arguments, **options})
        if options:
            assert_close(found, problem.right["output"], "float64", "forward")
        else:
            assert np.abs(found - problem.right["output"]).max() > 1e-3


def test_forms_of_the_norm_are_named() -> None:
    with pytest.raises(ValueError, match="form: given 'tf'; expected one of gate, ba, addons"):
        cells.LayerNormLSTM(form="tf")
    with pytest.raises(ValueError, match="forget: given 'relu'; expected one of sigmoid, exp"):
        cells.sLSTM(forget="relu")
    with pytest.raises(ValueError, match="nonlinearity: given 'sin'; expected one of relu, tanh"):
        cells.IndRNN(nonlinearity="sin")
    with pytest.raises(ValueError, match=r"given H=6 .* a multiple of 4, .*heads=4"):
        anycell.numpy.RNN(cells.sLSTM(heads=4), 3, 6)


def test_zoneout_keeps_old_values_exactly() -> None:
    cell = cells.ZoneoutLSTM(zoneout_c=1.0, zoneout_h=1.0)
    gates_x, state = np.ones((4, 2, 12)), [np.full((2, 3), 0.5), np.full((2, 3), -0.5)]
    outputs, (h, c) = oracle.run(cell, gates_x, {"weight_hh": np.ones((12, 3))}, state)
    assert (outputs == 0.5).all()
    assert_array_equal((h, c), state)


# ---- cells that need fixed matrices --------------------------------------------------------------
# docs/cells.md says that such cells can be written: a fixed matrix is the weight of a matmul, which
# is set but not trained.


def share(v: Any) -> Any:
    """The softmax over the units of a row."""
    e = anycell.exp(v - anycell.max(v))
    return e / anycell.sum(e)


@anycell.cell(gates="i f g o mi mf", state="h c")
def ONLSTM(x, r, s):
    """Shen et al., *Ordered Neurons*, 2019."""
    i, f, g, o, mi, mf = x + r
    mf, mi = linear(share(mf), "sum_f"), 1 - linear(share(mi), "sum_i")
    both = mf * mi
    f, i = anycell.sigmoid(f) * both + mf - both, anycell.sigmoid(i) * both + mi - both
    c = f * s.c + i * anycell.tanh(g)
    return anycell.sigmoid(o) * anycell.tanh(c), c


@anycell.cell(gates="q k v i f o", state="h C:M n")
def MatrixLSTM(x, r, s):
    """mLSTM of Beck et al., *xLSTM*, 2024: its matrix C, H x H, is a state of M = H * H units."""
    i, f = anycell.exp(anycell.mean(x.i)), anycell.sigmoid(anycell.mean(x.f))
    new = linear(i * x.v, "rows", size="M") * linear(x.k, "columns", size="M")
    C, n = linear(f, "everywhere", size="M") * s.C + new, f * s.n + i * x.k
    read = linear(C * linear(x.q, "columns_q", size="M"), "over_columns")
    return anycell.sigmoid(x.o) * read / anycell.maximum(abs(anycell.sum(n * x.q)), 1.0), C, n


H = 5  # the units of these cells


@anycell.cell(gates=" ".join(["m i o", *(f"r{k}" for k in range(H))]), state="h c")
def MassLSTM(x, r, s):
    """MC-LSTM of Hoedt et al., 2021, with a gate per column of its matrix, and x.m the mass."""
    shares = [f"r{k}" for k in range(H)]
    u = linear(s.c / anycell.sum(abs(s.c)), "u", gates=" ".join(["i", "o", *shares]))
    old = linear(s.c, "each", gates=" ".join(shares))
    mass = share(x.i + u.i) * x.m
    for k in shares:
        mass = mass + share(getattr(x, k) + getattr(u, k)) * getattr(old, k)
    o = anycell.sigmoid(x.o + u.o)
    return o * mass, (1 - o) * mass


def on_lstm(a: Any, s: Any, w: Given) -> Any:
    i, f, g, o, mi, mf = (a + F.linear(s[0], w["weight_hh"], w["bias_hh"])).chunk(6, -1)
    mf, mi = mf.softmax(-1).cumsum(-1), 1 - mi.softmax(-1).cumsum(-1)
    both = mf * mi
    c = (sigmoid(f) * both + mf - both) * s[1] + (sigmoid(i) * both + mi - both) * tanh(g)
    return sigmoid(o) * tanh(c), c


def matrix_lstm(a: Any, s: Any, w: Given) -> Any:
    (q, k, v, i, f, o), (_, C, n) = a.chunk(6, -1), s
    i, f = exp(i.mean(-1, keepdim=True)), sigmoid(f.mean(-1, keepdim=True))
    C = f[..., None] * C.reshape(-1, H, H) + (i * v)[..., None] * k[:, None]
    n = f * n + i * k
    read = (C @ q[..., None])[..., 0] / (n * q).sum(-1, keepdim=True).abs().clamp(min=1)
    return sigmoid(o) * read, C.flatten(1), n


def mass_lstm(a: Any, s: Any, w: Given) -> Any:
    c, (m, ai, ao, *_) = s[1], a.chunk(3 + H, -1)
    ui, uo, *_ = u = F.linear(c / c.abs().sum(-1, keepdim=True), w["weight_u"]).chunk(2 + H, -1)
    columns = torch.stack([b + d for b, d in zip(a.chunk(3 + H, -1)[3:], u[2:], strict=True)], -1)
    mass = (columns.softmax(1) @ c[..., None])[..., 0] + (ai + ui).softmax(-1) * m
    o = sigmoid(ao + uo)
    return o * mass, (1 - o) * mass


def fixed(name: str) -> dict[str, Any]:
    """The fixed matrices of a cell."""
    one, ones = torch.eye(H), torch.ones(H, 1)
    if name == "ONLSTM":
        return dict.fromkeys(("sum_f", "sum_i"), torch.ones(H, H).tril())
    if name == "MassLSTM":
        return {"each": torch.kron(one, ones)}
    rows, columns = torch.kron(one, ones), torch.kron(ones, one)
    return {
        "rows": rows,
        "columns": columns,
        "columns_q": columns,
        "over_columns": rows.T,
        "everywhere": torch.ones(H * H, H, dtype=torch.float64) / H,
    }


@pytest.mark.parametrize(
    ("cell", "step"),
    [(ONLSTM, on_lstm), (MatrixLSTM, matrix_lstm), (MassLSTM, mass_lstm)],
    ids=["ONLSTM", "MatrixLSTM", "MassLSTM"],
)
@pytest.mark.sample(1)
def test_cells_of_fixed_matrices(cell: Cell, step: Equations) -> None:
    sizes = {s.size: H * H for s in cell.states if s.size != "H"}
    layer = anycell.torch.RNN(cell, 3, H, dtype=torch.float64, **sizes)
    for name, matrix in fixed(cell.name).items():
        getattr(layer, f"weight_{name}_l0").requires_grad_(False).copy_(matrix)
    assert layer.engine.name == "cpu"
    x = torch.randn(6, 4, 3, dtype=torch.float64, requires_grad=True)
    widths = {"H": H, **sizes}
    state = tuple(torch.rand(1, 4, widths[s.size], dtype=torch.float64) for s in cell.states)
    output, _ = layer(x, state)
    w = {name.removesuffix("_l0"): p for name, p in layer.named_parameters()}
    states, steps = [s[0] for s in state], []
    for part in F.linear(x, w["weight_ih"], w["bias_ih"]):
        states = step(part, states, w)
        steps.append(states[0])
    right = torch.stack(steps)
    assert_close(output.detach(), right.detach(), "float64", "forward")
    learned = [x, *(p for p in layer.parameters() if p.requires_grad)]
    d = torch.randn_like(right)
    for ours, theirs in zip(
        *(torch.autograd.grad(out, learned, d) for out in (output, right)), strict=True
    ):
        assert_close(ours, theirs, "float64", "gradient")
