"""The NumPy layers, against torch if it is installed, and against finite differences.

One file, because layers, losses, optimizers and files are used and tested together.
"""

import copy
import doctest
import importlib.util
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from guarded import Everything
from problems import NORMALISERS, Odd, Rows
from processes import calls_of_ours, python
from tolerances import assert_close, is_slope

import anycell
import anycell.numpy as an
from anycell import cell, cells, keep, sigmoid, tanh
from anycell.compress import quantize
from anycell.engines import cpu
from anycell.numpy import base, initializers, passes
from anycell.numpy.streaming import Packed
from anycell.plan import LINE

ROOT = Path(__file__).parents[2]


@cell(gates="f g", state="h", params="rate=0.5")
def Zoneout(x, r, s, p):
    """A cell that leaves a random part of the state unchanged."""
    f, g = x + r
    kept = keep(0.7)
    return kept * (sigmoid(f) * s.h + p.rate * tanh(g)) + (1.0 - kept) * s.h


# -- solving the same problem in different ways ----------------------------------------------------
Results = dict[str, np.ndarray]


def as_tuple(state: Any) -> tuple[Any, ...]:
    return state if isinstance(state, tuple) else (state,)


def like_cell(layer: an.RNN, arrays: tuple[Any, ...]) -> Any:
    return arrays if len(layer.cell.states) > 1 else arrays[0]


def solve(layer: an.RNN, x: Any, state: Any, d: tuple[Any, Any], **arguments: Any) -> Results:
    """Returns output, final state, and all gradients, given the gradients of the results."""
    output, final = layer.forward(x, state, training=True, **arguments)
    dx, d_state = layer.backward(d[0], d[1])
    found = {"output": output, "d x": dx}
    found |= {f"final {i}": s for i, s in enumerate(as_tuple(final))}
    found |= {f"d state {i}": s for i, s in enumerate(as_tuple(d_state))}
    found |= {f"d {name}": grad for name, grad in layer.grads.items()}
    assert all(value.dtype == layer.dtype for value in found.values())
    return found


def problem(
    layer: an.RNN, steps: int, rows: int, rng: np.random.Generator
) -> tuple[np.ndarray, Any, tuple[np.ndarray, Any]]:
    """Draws an input, an initial state, and gradients of output and final state."""
    directions = 1 + layer.bidirectional
    sizes = [layer.sizes[s.size] for s in layer.cell.states]
    outer = (rows, steps) if layer.batch_first else (steps, rows)
    x = rng.standard_normal((*outer, layer.input_size))
    d_output = rng.standard_normal((*outer, directions * sizes[0]))
    first = layer.num_layers * directions
    state, d_state = ([rng.standard_normal((first, rows, n)) for n in sizes] for _ in range(2))
    for i, name in enumerate(layer.cell.state_names):
        if name in NORMALISERS:  # division by values near 0 has slopes beyond differences
            state[i] = 0.5 + abs(state[i])
    state, d_state = (like_cell(layer, tuple(arrays)) for arrays in (state, d_state))
    return x, state, (d_output, d_state)


# -- against finite differences --------------------------------------------------------------------
EVERY_CELL = [
    *(getattr(cells, name) for name in cells.__all__),
    cells.GRU(reset_after=False),
    cells.PeepholeLSTM(coupled=True, forget_bias=1.0, cell_clip=0.6),
    Zoneout,
    Odd,
    Everything,
]


DRAWN = [pytest.param(c, marks=[] if c.keeps else pytest.mark.more, id=repr(c)) for c in EVERY_CELL]


@pytest.mark.parametrize("case", [cells.LSTM, *DRAWN])
def test_gradients_are_slopes(case: Any, rng: np.random.Generator) -> None:
    """All gradients of all cells are slopes, with lengths, resets, layers, directions, dropout."""
    sizes = {"P": 4} if case in (Odd, Everything, cells.LSTMP) else {}
    options = {"dropout": 0.3, "bidirectional": True, "batch_first": True, **sizes}
    layer = an.RNN(case, 3, 6, 2, dtype="float64", seed=1, **options)
    for parameter in layer.parameters.values():
        parameter += 0.2 * rng.standard_normal(parameter.shape)
    x, state, d = problem(layer, 5, 3, rng)
    arguments = {"lengths": [5, 2, 4], "resets": rng.random((3, 5)) < 0.3}
    if case.static:
        arguments["static"] = rng.standard_normal((3, 6))
    layer.forward(x, state, training=True, **arguments)  # not the layer's first call
    before = copy.deepcopy(layer._generator)

    def objective() -> float:
        layer._generator = copy.deepcopy(before)  # the same dropout, the same random masks
        output, final = layer.forward(x, state, training=True, **arguments)
        pairs = zip((output, *as_tuple(final)), (d[0], *as_tuple(d[1])), strict=True)
        return float(sum(np.vdot(a, b) for a, b in pairs))

    objective()
    dx, d_state = layer.backward(*d)
    pairs = {"x": (x, dx), **{n: (p, layer.grads[n]) for n, p in layer.parameters.items()}}
    both = zip(as_tuple(state), as_tuple(d_state), strict=True)
    pairs |= {f"state {i}": pair for i, pair in enumerate(both)}
    if case.static:
        pairs["static"] = (arguments["static"], layer.grad_static)
    for name, (array, gradient) in pairs.items():
        for _ in range(2):
            direction = rng.standard_normal(array.shape)
            slope = 0.0
            for sign in (1.0, -1.0):
                array += sign * 1e-5 * direction
                slope += sign * objective() / 2e-5
                array -= sign * 1e-5 * direction
            assert is_slope(np.vdot(gradient, direction), slope, "layer"), name


# -- steps --------------------------------------------------------------------------
@pytest.mark.parametrize("case", [cells.GRU, Zoneout], ids=repr)
def test_step_by_step(case: Any, rng: np.random.Generator) -> None:
    layer = an.RNN(case, 3, 8, 2, batch_first=True, dtype="float64", seed=1)
    x, state, _ = problem(layer, 7, 4, rng)
    whole, final = layer.forward(x, state)
    for t in range(7):
        output, state = layer.step(x[:, t], state)
        assert_close(output, whole[:, t], "float64", "forward")
    for a, b in zip(as_tuple(state), as_tuple(final), strict=True):
        assert_close(a, b, "float64", "forward")


def test_a_step_leaves_a_pending_backward(rng: np.random.Generator) -> None:
    layer = an.GRU(3, 4, dtype="float64", seed=1)
    x, state, d = problem(layer, 5, 2, rng)
    ref = solve(layer, x, state, d)
    layer.forward(x, state, training=True)
    layer.step(x[0])
    assert np.array_equal(layer.backward(*d)[0], ref["d x"])


# -- randomness ------------------------------------------------------------------------------------
def test_dropout_between_layers() -> None:
    options = {"num_layers": 2, "dropout": 0.25, "seed": 3}
    x = np.random.default_rng(0).standard_normal((50, 40, 3))
    one, other, plain = an.GRU(3, 16, **options), an.GRU(3, 16, **options), an.GRU(3, 16, 2, seed=3)
    assert np.array_equal(one.forward(x)[0], plain.forward(x)[0])
    first, _ = one.forward(x, training=True)
    assert not np.array_equal(first, plain.forward(x)[0])
    assert np.array_equal(first, other.forward(x, training=True)[0])  # the seed says it all
    assert not np.array_equal(first, one.forward(x, training=True)[0])
    (dropped,) = one._saved.dropped
    assert set(np.unique(dropped)) == {np.float32(0.0), np.float32(4 / 3)}
    assert 0.24 < (dropped == 0.0).mean() < 0.26


def test_random_masks_of_a_cell() -> None:
    x = np.random.default_rng(0).standard_normal((20, 8, 3))
    one, other = (an.RNN(Zoneout, 3, 16, 2, seed=3) for _ in range(2))
    assert np.array_equal(one.forward(x)[0], one.forward(x)[0])
    first, _ = one.forward(x, training=True)
    assert np.array_equal(first, other.forward(x, training=True)[0])
    assert not np.array_equal(first, one.forward(x, training=True)[0])


# -- initial values --------------------------------------------------------------------------------
def test_initial_values() -> None:
    layer = an.LSTM(30, 20, 2, seed=1)
    assert {p.dtype for p in layer.parameters.values()} == {np.dtype("float32")}
    for k, width in ((0, 30), (1, 20)):
        for gate in np.split(layer.parameters[f"weight_hh_l{k}"], 4):
            assert_close(gate @ gate.T, np.eye(20), "float32", "forward")
        bound = np.sqrt(6 / (width + 20))
        entering = np.abs(layer.parameters[f"weight_ih_l{k}"])
        assert 0.98 * bound < entering.max() <= bound
        i, f, g, o = np.split(layer.parameters[f"bias_ih_l{k}"], 4)
        assert (f == 1.0).all() and not (i.any() or g.any() or o.any())
        assert not layer.parameters[f"bias_hh_l{k}"].any()
    again, other = an.LSTM(30, 20, 2, seed=1), an.LSTM(30, 20, 2, seed=2)
    name = "weight_hh_l1"
    assert np.array_equal(layer.parameters[name], again.parameters[name])
    assert not np.array_equal(layer.parameters[name], other.parameters[name])


def test_parameters_begin_with_a_line_of_the_cache() -> None:
    """Also in 8 bits, whose arrays are others."""
    layers = an.LSTM(5, 7, 2), an.Dense(3, 9), quantize(an.GRU(5, 7))
    arrays = [array for layer in layers for array in layer.parameters.values()]
    assert [array.ctypes.data % LINE for array in arrays] == [0] * len(arrays)


def test_initial_values_of_torch() -> None:
    layer = an.LSTM(30, 25, initializer="torch", seed=1)
    for parameter in layer.parameters.values():
        assert 0.18 < np.abs(parameter).max() <= 0.2 and np.abs(parameter.mean()) < 0.03
    forget = an.LSTM(30, 25, initializer="torch", forget_bias=2.0).parameters["bias_ih_l0"][25:50]
    assert (forget == 2.0).all()


def test_initial_values_of_cells() -> None:
    layer = an.RNN(cells.LayerNormLSTM, 3, 4, bidirectional=True)
    assert (layer.parameters["x_i_l0_reverse"] == 1.0).all()
    assert (layer.parameters["b_f_l0"] == 1.0).all()
    assert (layer.parameters["b_i_l0"] == 0.0).all()
    assert not any(name.startswith("bias") for name in layer.parameters)
    peephole = an.RNN(cells.PeepholeLSTM, 3, 4, gate_bias={"f": 1.0, "o": -1.0})
    assert not peephole.parameters["p_i_l0"].any()
    expected = np.repeat([0.0, 1.0, 0.0, -1.0], 4)
    assert np.array_equal(peephole.parameters["bias_ih_l0"], expected)
    given = an.GRU(3, 4, recurrent_initializer=lambda shape, rng: np.full(shape, 0.5))
    assert (given.parameters["weight_hh_l0"] == 0.5).all()


def test_initial_values_of_gates_of_several_sizes() -> None:
    """Each gate is drawn by itself, where its rows lie."""
    layer = an.RNN(Rows, 9, 8, P=5, gate_bias={"i": 2.0}, initializer="orthogonal", seed=0)
    weight, bias = layer.parameters["weight_ih_l0"], layer.parameters["bias_ih_l0"]
    for rows in (slice(0, 1), slice(1, 9), slice(9, 14)):  # done, i, g
        assert_close(weight[rows] @ weight[rows].T, np.eye(len(weight[rows])), "float32", "forward")
    assert np.array_equal(bias, np.repeat([0.0, 2.0, 0.0], [1, 8, 5]))
    assert layer.parameters["weight_hh_l0"].shape == (8, 5)
    assert repr(layer) == "RNN(Rows(), 9, 8, P=5, dtype='float32')"


@pytest.mark.parametrize("shape", [(7, 7), (3, 9), (9, 3), (1, 1)])
def test_orthogonal(shape: tuple[int, int], rng: np.random.Generator) -> None:
    w = initializers.orthogonal(shape, rng)
    product = w @ w.T if shape[0] <= shape[1] else w.T @ w
    assert w.shape == shape
    assert_close(product, np.eye(min(shape)), "float64", "forward")


def test_orthogonal_is_uniform(rng: np.random.Generator) -> None:
    """Without a correction of signs, QR prefers one sign on its diagonal."""
    corners = [initializers.orthogonal((2, 2), rng)[0, 0] for _ in range(4000)]
    assert abs(np.mean(corners)) < 0.05 and 0.475 < np.mean(np.square(corners)) < 0.525


def test_glorot(rng: np.random.Generator) -> None:
    for draw in (initializers.glorot_uniform, initializers.glorot_normal):
        assert 0.98 < draw((300, 200), rng).var() * 500 / 2 < 1.02


# -- training --------------------------------------------------------------------------------------
def pair_of_gradients(rng: np.random.Generator, scale: float = 1.0) -> Iterator[Any]:
    """Yields a stub layer of ours and torch parameters, with equal values and new gradients."""
    torch = pytest.importorskip("torch")
    arrays = {f"p{i}": rng.standard_normal(shape) for i, shape in enumerate([(4, 3), (5,), ()])}
    mine = SimpleNamespace(parameters={k: np.array(v) for k, v in arrays.items()}, grads={})
    theirs = [torch.nn.Parameter(torch.tensor(v)) for v in arrays.values()]
    while True:
        for (name, array), p in zip(arrays.items(), theirs, strict=True):
            mine.grads[name] = np.array(scale * rng.standard_normal(array.shape))
            p.grad = torch.tensor(mine.grads[name])
        yield mine, theirs


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-3},
        {"weight_decay": 0.3},
        {"betas": (0.0, 0.0)},
    ],
    ids=str,
)
def test_adam_is_torchs(options: dict[str, Any], rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    gradients = pair_of_gradients(rng)
    mine, theirs = next(gradients)
    ours, other = an.Adam(mine, **options), torch.optim.Adam(theirs, **options)
    for step in range(30):
        if step == 15:
            ours.lr = other.param_groups[0]["lr"] = 0.01  # a schedule
        next(gradients)
        ours.step()
        other.step()
    for array, p in zip(mine.parameters.values(), theirs, strict=True):
        assert_close(array, p.detach().numpy(), "float64", "forward")


@pytest.mark.parametrize("decay", [0.0, 1e-3])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_adam_of_16_bits_is_that_of_float32(decay: float, dtype: str) -> None:
    """Steps are rounded float32 steps, also if float16 cannot hold the square of a gradient."""
    layer, wide = (an.Dense(3, 2, dtype=each, seed=1) for each in (dtype, "float32"))
    wide.load_state_dict({n: p.astype("float32") for n, p in layer.parameters.items()})
    ours, other = (an.Adam(one, lr=1e-2, weight_decay=decay) for one in (layer, wide))
    x = np.float16([[0.0, 1e-4, 300.0]])
    for one, optimizer in ((layer, ours), (wide, other)):
        one.forward(x.astype(one.parameters["weight"].dtype), training=True)
        one.backward(np.ones((1, 2), one.parameters["weight"].dtype))
        optimizer.step()
    for name, parameter in layer.parameters.items():
        assert np.isfinite(parameter.astype("float32")).all()
        assert_close(parameter, wide.parameters[name], dtype, "forward")


@pytest.mark.parametrize("limit", [0.0, 0.3, 1e9])
def test_clipping_is_torchs(limit: float, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    gradients = pair_of_gradients(rng)
    mine, theirs = next(gradients)
    norm = an.clip_by_global_norm(mine, limit)
    right = torch.nn.utils.clip_grad_norm_(theirs, limit).item()
    assert_close(norm, right, "float64", "forward")
    for grad, p in zip(mine.grads.values(), theirs, strict=True):
        assert_close(grad, p.grad.numpy(), "float64", "forward")
    mine, theirs = next(gradients)
    an.clip_by_value([mine], limit)
    torch.nn.utils.clip_grad_value_(theirs, limit)
    for grad, p in zip(mine.grads.values(), theirs, strict=True):
        assert np.array_equal(grad, p.grad.numpy())


def test_norms_that_are_no_numbers() -> None:
    for bad in (np.nan, np.inf):
        mine = SimpleNamespace(parameters={"p": np.ones(2)}, grads={"p": np.array([1.0, bad])})
        assert not np.isfinite(an.clip_by_global_norm(mine, 1.0))
        assert mine.grads["p"][0] == 1.0
    huge = SimpleNamespace(parameters={"p": np.ones(2, "f4")}, grads={"p": np.full(2, 3e30, "f4")})
    assert an.clip_by_global_norm(huge, 1.0) == pytest.approx(3e30 * np.sqrt(2))
    assert np.linalg.norm(huge.grads["p"]) == pytest.approx(1.0)


def test_dense_is_torchs(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    for bias in (True, False):
        ours = an.Dense(4, 3, bias=bias, dtype="float64", seed=1)
        theirs = torch.nn.Linear(4, 3, bias=bias, dtype=torch.float64)
        theirs.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in ours.parameters.items()})
        x, y = rng.standard_normal((6, 2, 4)), rng.standard_normal((6, 2, 3))
        loss, grad = an.mse(ours.forward(x, training=True), y)
        given = torch.tensor(x, requires_grad=True)
        ref = torch.nn.functional.mse_loss(theirs(given), torch.tensor(y))
        ref.backward()
        assert_close(loss, ref.item(), "float64", "forward")
        assert_close(ours.backward(grad), given.grad.numpy(), "float64", "gradient")
        for name, p in theirs.named_parameters():
            assert_close(ours.grads[name], p.grad.numpy(), "float64", "gradient", name)


@pytest.mark.parametrize("case", [cells.PeepholeLSTM, cells.LSTM, cells.GRU], ids=repr)
@pytest.mark.sample(1)
def test_training_learns(case: Any) -> None:
    """Layers learn to add the two marked numbers of a sequence (Hochreiter & Schmidhuber, 1997)."""
    rng = np.random.default_rng(0)
    layer, readout = an.RNN(case, 2, 16, seed=0), an.Dense(16, 1, seed=1)
    optimizer = an.Adam([layer, readout], lr=0.02)
    losses = []
    for _ in range(200):
        x = np.zeros((8, 64, 2))
        x[:, :, 0] = rng.uniform(0.0, 1.0, (8, 64))
        marks = np.argsort(rng.random((8, 64)), axis=0)[:2]
        np.put_along_axis(x[:, :, 1], marks, 1.0, axis=0)
        y = np.take_along_axis(x[:, :, 0], marks, axis=0).sum(0)[:, None]
        output, _ = layer.forward(x, training=True)
        loss, grad = an.mse(readout.forward(output[-1], training=True), y)
        grad_output = np.zeros_like(output)
        grad_output[-1] = readout.backward(grad)
        layer.backward(grad_output)
        an.clip_by_global_norm([layer, readout], 1.0)
        optimizer.step()
        losses.append(loss)
    chance = 1 / 6  # the variance of the sum
    assert losses[0] > chance
    assert np.mean(losses[-10:]) < 0.15 * chance


# -- keeping ---------------------------------------------------------------------------------------
def test_without_resets_what_they_restore_has_no_gradient(rng: np.random.Generator) -> None:
    layer = an.GRU(3, 6)
    x = rng.standard_normal((5, 2, 3)).astype("f")
    output, _ = layer.forward(x, reset_state=np.ones((1, 2, 6), "f"), training=True)
    layer.backward(output)
    assert layer.grad_reset_state is None


def test_save_and_load(tmp_path: Path) -> None:
    one, other = (an.LSTM(3, 5, 2, bidirectional=True, seed=s) for s in (1, 2))
    x = np.random.default_rng(0).standard_normal((4, 2, 3))
    one.save(tmp_path / "layer")  # the name is taken as given
    kept = other.parameters["weight_hh_l1"]
    other.load(tmp_path / "layer")
    assert np.array_equal(one.forward(x)[0], other.forward(x)[0])
    assert kept is other.parameters["weight_hh_l1"]  # optimisers hold on to the arrays
    assert [path.name for path in tmp_path.iterdir()] == ["layer"]
    with np.load(tmp_path / "layer", allow_pickle=False) as archive:
        assert list(archive.files) == list(one.parameters)
    wide = an.LSTM(3, 5, 2, bidirectional=True, dtype="float64")
    wide.load(tmp_path / "layer")
    assert np.array_equal(wide.parameters["bias_ih_l0"], one.parameters["bias_ih_l0"])


def test_a_load_that_fails_changes_nothing(tmp_path: Path) -> None:
    layer = an.GRU(3, 5, seed=1)
    before = {name: p.copy() for name, p in layer.parameters.items()}
    path = tmp_path / "layer.npz"

    def refused(kind: type[Exception], *words: str, **arrays: Any) -> None:
        if arrays:
            np.savez(path, **arrays)
        with pytest.raises(kind) as caught:
            layer.load(path)
        assert all(word in str(caught.value) for word in words), caught.value
        assert all(np.array_equal(p, before[name]) for name, p in layer.parameters.items())

    refused(FileNotFoundError, "layer.npz")
    others = {name: p for name, p in before.items() if name != "bias_hh_l0"}
    refused(KeyError, "missing bias_hh_l0", "one bias, pass it as bias_ih, and zeros", **others)
    refused(KeyError, "unknown extra", **before, extra=np.zeros(3))
    with pytest.raises(KeyError, match=r"missing weight_hh_l0; expected [^.]*\.'$"):
        layer.set_parameters({name: p for name, p in before.items() if name != "weight_hh_l0"})
    wrong = {**before, "bias_hh_l0": np.zeros(16)}
    refused(ValueError, "bias_hh_l0", "given shape (16,)", "expected (15,)", **wrong)
    words = {**before, "bias_hh_l0": np.array(["a"] * 15)}
    refused(TypeError, "bias_hh_l0", "given dtype <U1", "expected real numbers", **words)
    objects = {**before, "bias_hh_l0": np.array([object()] * 15)}
    refused(ValueError, "layer.npz", "written by GRU.save()", **objects)
    for content in (b"", b"no archive", path.read_bytes()[:500]):
        path.write_bytes(content)
        refused(ValueError, "layer.npz", "written by GRU.save()")


def test_parameters_of_the_layer_itself() -> None:
    """The arrays to set may be the layer's own arrays."""
    layer = an.LSTM(3, 5, initializer="torch", seed=1)
    before = {name: p.copy() for name, p in layer.parameters.items()}
    other = {"bias_ih_l0": "bias_hh_l0", "bias_hh_l0": "bias_ih_l0"}
    layer.set_parameters({name: layer.parameters[other.get(name, name)] for name in before})
    for name, parameter in layer.parameters.items():
        assert np.array_equal(parameter, before[other.get(name, name)])


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_the_order_of_bytes_is_the_machines(name: str) -> None:
    """Kernels only support the machine's byte order."""
    x, other = np.ones((4, 2, 3)), np.dtype(name).newbyteorder()
    layer, ref = (an.LSTM(3, 5, dtype=dtype, seed=1) for dtype in (other, name))
    assert layer.dtype == np.dtype(name)
    assert np.array_equal(layer.forward(x.astype(other))[0], ref.forward(x)[0])


def test_an_optimizer_step_that_is_refused_changes_nothing() -> None:
    layer = an.Dense(3, 2, seed=1)
    layer.backward(np.ones_like(layer.forward(np.ones((4, 3)), training=True)))
    before = {name: p.copy() for name, p in layer.parameters.items()}
    optimizer = an.Adam(layer)
    optimizer.lr = "fast"  # type: ignore[assignment]
    with pytest.raises(ValueError, match="lr: given str 'fast'"):
        optimizer.step()
    optimizer.lr = 0.1
    layer._grads["bias"] = np.zeros(3)
    with pytest.raises(ValueError, match=r"grads\['bias'\]: given shape \(3,\); expected \(2,\)"):
        optimizer.step()
    assert optimizer.steps == 0
    assert all(np.array_equal(p, before[name]) for name, p in layer.parameters.items())


def test_save_is_as_any_file(tmp_path: Path) -> None:
    """Files have the permissions of a new file, and a link stays a link."""
    layer = an.Dense(2, 1)
    plain, link = tmp_path / "plain", tmp_path / "link"
    plain.touch()
    mode = plain.stat().st_mode
    link.symlink_to(plain)
    layer.save(link)
    assert plain.stat().st_mode == mode
    assert link.is_symlink()
    layer.load(plain)
    assert sorted(tmp_path.iterdir()) == [link, plain]
    with pytest.raises(FileNotFoundError, match=r"path: given '.*nowhere.*folder that exists"):
        layer.save(tmp_path / "nowhere" / "x.npz")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mse_of_16_bits(dtype: str) -> None:
    """The square exceeds 65,504, and 16 bits cannot represent the target."""
    prediction = np.zeros(4).astype(base.numpy_dtype(dtype))
    loss, grad = an.mse(prediction, np.full(4, 300.3))
    assert loss == pytest.approx(300.3**2) and grad.dtype == prediction.dtype
    assert_close(grad, np.full(4, -150.15), dtype, "forward")


def test_mse_of_integers() -> None:
    loss, grad = an.mse([1, 2], [1.5, 2.5])
    assert loss == 0.25
    assert grad.tolist() == [-0.5, -0.5]


def test_a_save_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = an.Dense(3, 2, seed=1)
    layer.save(tmp_path / "dense.npz")
    old = (tmp_path / "dense.npz").read_bytes()

    def full(file: Any, **arrays: Any) -> None:
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(base.np, "savez", full)
    with pytest.raises(OSError, match="disk full"):
        layer.save(tmp_path / "dense.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["dense.npz"]
    assert (tmp_path / "dense.npz").read_bytes() == old


def test_copies_and_pickles(rng: np.random.Generator) -> None:
    layer = an.RNN(cells.PeepholeLSTM, 3, 4, 2, dropout=0.5, seed=1)
    x, _, d = problem(layer, 5, 2, rng)
    layer.forward(x, training=True)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with pytest.raises(RuntimeError, match="forward"):
            twin.backward(d[0])
        assert np.array_equal(twin.forward(x)[0], layer.forward(x)[0])
        twin.parameters["bias_hh_l0"][:] = 7.0
        assert not np.array_equal(twin.forward(x)[0], layer.forward(x)[0])


# -- what belongs to the user ----------------------------------------------------------------------
@pytest.mark.parametrize("way", [passes.fused, passes.composite])
def test_results_may_be_written(
    way: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users may overwrite results, and a backward pass may run twice."""
    monkeypatch.setattr(passes, "fused", way)
    for batch_first in (False, True):
        layer = an.LSTM(3, 4, batch_first=batch_first, dtype="float64", seed=1)
        x, state, d = problem(layer, 5, 2, rng)
        ref = solve(layer, x, state, d)
        output, final, states = layer.forward(x, state, training=True, return_states=True)
        assert states["h"] is output
        for array in (output, *final, states["c"]):
            assert array.flags.c_contiguous
            array[:] = np.nan
        for _ in range(2):
            dx, d_state = layer.backward(*d)
            found = {"d x": dx, "d state 0": d_state[0], "d state 1": d_state[1]}
            found |= {f"d {name}": grad for name, grad in layer.grads.items()}
            for name, value in found.items():
                assert np.array_equal(value, ref[name]), name
            for array in found.values():
                array[:] = np.nan


def test_lists(rng: np.random.Generator) -> None:
    layer, x = an.GRU(3, 4, dtype="float64", seed=1), rng.standard_normal((5, 2, 3))
    assert np.array_equal(layer.forward(x.tolist())[0], layer.forward(x)[0])


def test_no_framework_is_imported() -> None:
    code = "import sys, anycell; anycell.numpy.LSTM(1, 1); print(*sys.modules)"
    assert not {"torch", "tensorflow", "jax", "scipy"} & set(python(code).split())


# -- refusals --------------------------------------------------------------------------------------
def lstm(**options: Any) -> an.LSTM:
    return an.LSTM(3, 4, seed=1, **options)


def after(return_states: Any, grad_states: Any) -> Any:
    layer = lstm()
    output, *_ = layer.forward(X, training=True, return_states=return_states)
    return layer.backward(output, None, grad_states)


X, LAYER = np.zeros((5, 2, 3)), an.Dense(3, 2)
MASKED = np.ma.masked_array(X, mask=np.arange(30).reshape(X.shape) == 7)
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    # constructors
    (lambda: an.RNN("LSTM", 3, 4), TypeError, r"cell: given str 'LSTM'; expected a cell.*\.loop"),
    (lambda: an.RNN(3, 4), TypeError, r"cell: given int 3; expected a cell"),
    (lambda: an.RNN(cells.LSTM, 3), TypeError, r"hidden_size: given None; .*Pass hidden_size"),
    (lambda: an.LSTM(0, 4), ValueError, r"input_size: given 0; expected an int from 1"),
    (lambda: an.LSTM(3, 2.5), TypeError, r"hidden_size: given float 2.5; expected"),
    (lambda: an.LSTM(3, 4, True), TypeError, r"num_layers: given bool True; expected"),
    (lambda: lstm(dropout=1.0), ValueError, r"dropout: given 1.0; .* \[0, 1\)"),
    (lambda: lstm(dropout=np.nan), ValueError, r"dropout: given nan; expected"),
    (lambda: lstm(dtype="float8"), ValueError, r"dtype: given 'float8'; expected 'float32', 'fl"),
    (lambda: lstm(dtype=None), ValueError, r"dtype: given None; expected 'float32', 'float64', "),
    (lambda: lstm(dtype="flaot32"), ValueError, r"dtype: given 'flaot32'; expected 'float32', "),
    (lambda: lstm(initializer="he"), ValueError, r"initializer: given 'he'; expected 'glorot_uni"),
    (lambda: lstm(gate_bias={"z": 1}), ValueError, r"gate_bias: .*'z'; expected i, f, g, o"),
    (lambda: lstm(bias=False, forget_bias=1.0), ValueError, r"gate_bias: .* there is no bias"),
    (lambda: lstm(gate_bias="f"), TypeError, r"gate_bias: given str 'f'; .*a dict, .* by gate"),
    (lambda: lstm(forget_bias="1"), ValueError, r"forget_bias: given str '1'; expected a number"),
    (lambda: lstm(dropout=10**400), ValueError, r"dropout: given 10+; expected a number"),
    (lambda: lstm(initializer=3), TypeError, r"initializer: given 3; expected 'glorot_uniform'"),
    (lambda: lstm(initializer=lambda shape, rng: np.zeros(shape[::-1])), ValueError,
     r"initializer\(shape, generator\): given shape \[3, 4\]; expected shape \[4, 3\]"),
    (lambda: an.LSTM(3, 4, seed=-1), ValueError, r"seed: given -1 .*; expected an integer from 0"),
    (lambda: an.LSTM(3, 4, bias="no"), TypeError, r"bias: given str 'no'; expected True or False"),
    (lambda: an.LSTM(1 << 31, 4), ValueError, r"input_size: given 2147483648; .* to 2147483647"),
    (lambda: an.RNN(cells.LSTMP, 3, 4, P=10**30), ValueError, r"P: given 10+; .* to 2147"),
    (
        lambda: lstm(dropuot=0.1), TypeError,
        r"^dropuot: given 0.1; .* no such argument; LSTM takes input_size, .* mean dropout\?",
    ),
    (lambda: an.LSTM(3, units=4), TypeError, r"^units: .* Did you mean hidden_size\?"),
    (lambda: an.LSTM(3), TypeError, r"^hidden_size: given nothing; .*LSTM takes .* Pass hidden_si"),
    (lambda: an.JANET(3, units=4), TypeError, r"^units: given 4; .* Did you mean hidden_size\?"),
    (lambda: an.JANET(3), TypeError, r"^hidden_size: given None; expected an int .* Pass hidden"),
    (
        lambda: an.RNN(cells.LSTM, 3, 4, dropuot=0.1), TypeError,
        r"dropuot: given 0.1; expected no such argument. Did you mean dropout\?",
    ),
    (
        lambda: an.RNN(cells.LSTM, 3, 4, units=4), TypeError,
        r"units: given 4; expected no such argument.* Leave it out: layers of other frameworks",
    ),
    (lambda: an.RNN(Odd, 3, 4, p=2), TypeError, r"^p: given 2; .* Did you mean P\?"),
    (lambda: an.RNN(cells.LSTM, 3, hiden_size=4), TypeError, r"^hiden_size: .* mean hidden_size\?"),
    (lambda: an.PeepholeLSTM(3, 4, coupld=True), TypeError, r"^coupld: .* Did you mean coupled\?"),
    (
        lambda: an.RNN(cells.PeepholeLSTM, 3, 4, coupled=True), TypeError,
        r"coupled: .* The cell takes it: PeepholeLSTM\(coupled=True\)",
    ),
    (lambda: an.RNN(Odd, 3, 4), TypeError, r"P: given nothing; .*size P that cell Odd"),
    (lambda: initializers.orthogonal((3,), None), ValueError, r"shape: given \(3,\), expected"),
    # forward
    (lambda: lstm().forward(X[0]), ValueError, r"x: .*\[2, 3\]; expected shape \[T, B, 3\]"),
    (lambda: lstm().forward(X[..., :2]), ValueError, r"x: given shape \[5, 2, 2\]; expected"),
    (lambda: lstm(batch_first=True).forward(X[0]), ValueError, r"expected shape \[B, T, 3\]"),
    (lambda: lstm().forward(X.astype(str)), TypeError, r"x: given .* expected an array of real"),
    (lambda: lstm().forward([[1], [1, 2]]), TypeError, r"x: given list, which is no array"),
    (lambda: lstm().forward(MASKED), ValueError, r"x: given a masked array; .* without a mask"),
    (lambda: lstm().forward(X + 1j), TypeError, r"x: given .*complex128; expected"),
    (lambda: lstm().forward(X, X), TypeError, r"state: .*expected a tuple \(h, c\)"),
    (lambda: lstm().forward(X, (np.zeros((1, 2, 4)), np.zeros((2, 4)))), ValueError,
     r"state: .* \[2, 4\]; .* \[1, 2, 4\], the state 'c'"),
    (lambda: lstm().forward(X, mask=np.ones((2, 5))), ValueError,
     r"mask: .*\[5, 2\], \(time, batch\)"),
    (lambda: lstm().forward(X, mask=np.full((5, 2), 2)), ValueError, r"mask: .* expected booleans"),
    (lambda: lstm().forward(X, resets=[1, 0]), ValueError, r"resets: given shape \[2\]; expected"),
    (lambda: lstm().forward(X, lengths=[6, 1]), ValueError,
     r"lengths: given a length of 6; .* 0 to 5"),
    (lambda: lstm().forward(X, lengths=[1, -1]), ValueError, r"lengths: given a length of -1"),
    (lambda: lstm().forward(X, lengths=[5]), ValueError, r"lengths: given .*\[1\]; .*\[2\]"),
    (lambda: lstm().forward(X, lengths=[1.0, 2.0]), TypeError, r"lengths: given ndarray float64"),
    (lambda: lstm().forward(X, masked_output="no"), ValueError, r"masked_output: given 'no'"),
    (lambda: lstm().forward(X, masked_output=X), ValueError, r"masked_output: given ndarray"),
    (lambda: lstm().forward(X, training=X), TypeError, r"training: given ndarray"),
    (lambda: lstm(checkpoint=X), ValueError, r"checkpoint: given array"),
    (lambda: lstm().forward(X, static=X), TypeError, r"static: given ndarray .*; expected None"),
    (lambda: an.RNN(Everything, 3, 4, P=2).forward(X), TypeError,
     r"static: given None; .*\[2, 4\], the input 'e'"),
    (lambda: lstm().forward(X, return_states="d"), ValueError,
     r"return_states: given 'd'; .*cell LSTM: h, c. Pass True"),
    # backward and step
    (lambda: after("c", {"h": X}), ValueError, r"grad_states: given 'h'; .* asked for: c"),
    (lambda: after("c", {"c": X}), ValueError, r"grad_states, 'c': .*\[5, 2, 3\]; .*\[5, 2, 4\]"),
    (lambda: after(None, {"c": X}), ValueError, r"grad_states: given 'c'; .* asked for: none"),
    (lambda: after("c", X), TypeError, r"grad_states: given ndarray .*; expected a dict"),
    (lambda: lstm().backward(X), RuntimeError, r"LSTM.backward\(\) needs a forward"),
    (lambda: an.Dense(2, 2).backward(X), RuntimeError, r"Dense.backward\(\) needs a forward"),
    (lambda: lstm(bidirectional=True).step(X[0]), ValueError, r"given bidirectional=True"),
    (lambda: lstm().step(X), ValueError, r"x: given shape \[5, 2, 3\]; expected shape \[B, 3\]"),
    # the rest
    (lambda: an.Dense(2, 3).forward(X), ValueError, r"x: .*expected shape \[axis 0, axis 1, 2\]"),
    (lambda: an.mse(X, X[0]), ValueError, r"target: .* \[2, 3\]; .* \[5, 2, 3\]"),
    (lambda: an.mse(X[:0], X[:0]), ValueError, r"prediction: given an empty array"),
    (lambda: an.Adam([]), ValueError, r"layers: given none, expected at least one"),
    (lambda: an.Adam([3]), TypeError, r"layers: given 3; expected a layer, or several"),
    (lambda: an.Adam("lstm"), TypeError, r"layers: given 'l'; expected a layer"),
    (lambda: an.Adam(np.zeros(())), TypeError, r"layers: given array\(0.\); expected a layer"),
    (lambda: an.clip_by_global_norm([None], 1.0), TypeError, r"layers: given None; expected a"),
    (lambda: an.Adam([LAYER, LAYER]), ValueError, r"layers: given one layer twice"),
    (lambda: an.Adam(lstm(), betas=0.9), TypeError, r"betas: given 0.9, expected two numbers"),
    (lambda: an.Adam(lstm(), betas=(0.9,)), TypeError, r"betas: given \(0.9,\), expected two"),
    (lambda: an.Adam(lstm(), lr=-1.0), ValueError, r"lr: given -1.0; expected a number"),
    (lambda: an.Adam(lstm(), betas=(0.9, 1.0)), ValueError, r"betas: given 1.0; expected"),
    (lambda: an.Adam(lstm()).step(), RuntimeError, r"LSTM has no gradient for 'weight_ih_l0' yet"),
    (lambda: an.clip_by_global_norm(lstm(), 1.0), RuntimeError, r"LSTM has no gradient"),
    (lambda: an.clip_by_value(lstm(), np.nan), ValueError, r"limit: given nan; expected a number"),
    (lambda: lstm().set_parameters([1]), TypeError, r"values: given list .*; expected a dict"),
    (lambda: lstm().set_parameters({1: 2, "a": 3}), KeyError, r"unknown 1, a; expected weight_ih"),
    (lambda: an.mse(["a"], [1.0]), TypeError, r"prediction: given list of dtype <U1"),
    (lambda: an.mse([1j], [1.0]), TypeError, r"prediction: given list of dtype complex128"),
    (lambda: lstm().set_parameters({}), KeyError, r"missing bias_hh_l0, .* expected weight_ih_l0"),
]  # fmt: skip


@pytest.mark.parametrize("call, kind, message", REFUSED, ids=lambda v: v if type(v) is str else "")
def test_refusals(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_a_refused_call_changes_nothing(rng: np.random.Generator) -> None:
    layer = lstm(dtype="float64")
    x, state, d = problem(layer, 5, 2, rng)
    ref = solve(layer, x, state, d)
    layer.forward(x, state, training=True)
    with pytest.raises(ValueError, match="grad_output: given shape"):
        layer.backward(d[0][:4])
    with pytest.raises(ValueError, match="grad_state: given shape"):
        layer.backward(d[0], (d[1][0], d[1][1][:, :1]))
    with pytest.raises(ValueError, match="lengths"):
        layer.forward(x, lengths=[9, 9])
    assert np.array_equal(layer.backward(*d)[0], ref["d x"])
    with pytest.raises(TypeError):
        layer.parameters["bias_hh_l0"] = np.zeros(3)


MODULES = "base dense feedback initializers layers normalise optim schedules".split()


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings(name: str) -> None:
    module = importlib.import_module(f"anycell.numpy.{name}")
    rng = np.random.default_rng(0)
    examples = {"np": np, "anycell": anycell, "x": rng.normal(size=(4, 3)), "y": np.ones((4, 1))}
    examples |= {name: getattr(an, name) for name in an.__all__}
    failed, _ = doctest.testmod(module, extraglobs=examples)
    assert not failed


@pytest.mark.parametrize("ours", [1, 3])
def test_threads_follow_a_limit_of_numpys_own(ours: int) -> None:
    """``threadpool_limits`` limits layers as it limits ``a @ b``, and never gives them more."""
    if importlib.util.find_spec("threadpoolctl") is None:
        pytest.skip("needs threadpoolctl")
    python(
        f"""
        import threadpoolctl
        import anycell
        from anycell.numpy import threads

        several = max(one["num_threads"] for one in threadpoolctl.threadpool_info())
        assert several == threads._blas()
        assert threads.current() == {ours}
        with threadpoolctl.threadpool_limits(1):
            assert threads.current() == (1 if several > 1 else {ours})
            with anycell.threads(4):
                assert threads.current() == 4
        assert threads.current() == {ours}
        """,
        ANYCELL_NUM_THREADS=str(ours),
        OPENBLAS_NUM_THREADS="2",
        OMP_NUM_THREADS=None,
    )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cell", [cells.LSTM, cells.PeepholeLSTM], ids=lambda cell: cell.name)
def test_a_call_is_few_calls(
    cell: Any, threads: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The number of calls determines the time of a small layer."""
    monkeypatch.setattr(cpu.check, "ON", False)
    request.addfinalizer(lambda: cpu.threads.set_threads(None))
    cpu.threads.set_threads(threads)
    layer, x = an.RNN(cell, 32, 64), np.ones((20, 8, 32), np.float32)
    assert calls_of_ours(lambda: layer.forward(x)) <= 16
    d = np.ones((20, 8, 64), np.float32)

    def train() -> None:
        layer.forward(x, training=True)
        layer.backward(d)

    assert calls_of_ours(train) <= 88


WARM: dict[str, Callable[[], Any]] = {
    "LSTM": lambda: an.LSTM(5, 7, 2, bidirectional=True, seed=0),
    "float64, rows first": lambda: an.LSTM(5, 7, batch_first=True, dtype="float64", seed=0),
    "one state": lambda: an.GRU(5, 7, bias=False, seed=0),
    "sizes": lambda: an.RNN(cells.LSTMP, 5, 8, P=3, seed=0),
    "8 bits": lambda: anycell.compress.quantize(an.LSTM(5, 64, seed=0)),
    "large": lambda: an.LSTM(33, 100, seed=0),
    "16 bits": lambda: an.LSTM(5, 7, dtype="float16", seed=0),
}


@pytest.mark.parametrize("name", WARM)
@pytest.mark.parametrize("checked", [False, True])
def test_calls_like_an_earlier_one(
    name: str, checked: bool, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """They have the bits of ordinary calls, and take no array as it is that differs."""
    monkeypatch.setattr(cpu.check, "ON", checked)  # else native code reads the addresses
    layer, other = WARM[name](), WARM[name]()
    monkeypatch.setattr(other, "_again", lambda *_: None)
    rows = 3
    count = layer.num_layers * (1 + layer.bidirectional)
    sizes = [layer.sizes[s.size] for s in layer.cell.states]

    def check(steps: int, *state: Any) -> Any:
        shape = (rows, steps) if layer.batch_first else (steps, rows)
        x = rng.standard_normal((*shape, layer.input_size)).astype(layer.dtype)
        strided, odd = np.repeat(x, 2, 1)[:, ::2], np.empty(x.nbytes + 1, np.uint8)[1:]
        odd = odd.view(x.dtype).reshape(x.shape)
        odd[...] = x
        right = other.forward(x, *state)
        for given in (x, x, strided, odd, x.astype("f8")):
            results = layer.forward(given, *state)
            for mine, theirs in zip(parts(results), parts(right), strict=True):
                assert np.array_equal(mine, theirs) and mine.dtype == theirs.dtype
                assert mine.flags.writeable and not np.shares_memory(mine, x)
            assert results[0].flags.c_contiguous and results[0].shape == right[0].shape
        return right[1]

    def parts(results: Any) -> tuple[Any, ...]:
        return (results[0], *as_tuple(results[1]))

    for steps in (4, 1, 0, 3):
        state = check(steps)
        check(steps, state)
        check(steps, like_cell(layer, [s.astype("f8") for s in as_tuple(state)]))
    assert all((again is None) == (name == "16 bits") for again in layer._calls.values())
    for array, theirs in zip(layer.arrays.values(), other.arrays.values(), strict=True):
        array[...] = theirs[...] = np.roll(array, 1)
    check(4, state)
    for array in layer.arrays.values():
        array.flags.writeable = False
    check(4, state)
    layer.batch_first = other.batch_first = not layer.batch_first
    check(4)
    with anycell.threads(2):
        check(4, state)
    layer = pickle.loads(pickle.dumps(layer))
    check(4, state)
    wrong = like_cell(layer, tuple(np.zeros((count, rows, size + 1)) for size in sizes))
    with pytest.raises(ValueError, match=r"state.*shape"):
        check(4, wrong)
    output, _ = layer.forward(np.ones((2, 2, layer.input_size)), training=name != "8 bits")
    layer.forward(np.ones((2, 2, layer.input_size)))
    why = "have no gradients" if name == "8 bits" else "no other call of forward between"
    with pytest.raises(RuntimeError, match=why):  # a NotImplementedError is one, too
        layer.backward(output)


def test_prepared_steps_like_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the bits of ordinary ones, see new weights, and take no other arrays."""
    layer, other = (an.LSTM(5, 7, num_layers=2, seed=0).prepare() for _ in range(2))
    monkeypatch.setattr(Packed, "learn", lambda *_: None)
    expected, x = [], np.random.default_rng(0).standard_normal((6, 2, 5)).astype(np.float32)
    state = None
    for row in x:
        output, state = other.step(row, state)
        expected.append((output, *state))
    monkeypatch.undo()
    monkeypatch.setattr(cpu.check, "ON", False)  # so that native code reads the addresses

    def check() -> None:
        state = None
        for row, results in zip(x, expected, strict=True):
            output, state = layer.step(row, state)
            for one, result in zip((output, *state), results, strict=True):
                assert np.array_equal(one, result)

    check()
    (again,) = layer._prepared.again.values()
    assert again is not None
    check()
    _, state = layer.step(x[0])
    strided, writable = np.repeat(x[1], 2, 1)[:, ::2], x[1].copy()
    writable.flags.writeable = False
    for odd in (strided, x[1].astype(">f4"), x[1].tolist(), x[1, :1]):
        assert again(odd, state) is None
    assert np.array_equal(again(writable, state)[0], again(x[1], state)[0])
    for odd in ((state[0],), (state[0], state[1][:1]), None):
        assert again(x[1], odd) is None
    assert np.array_equal(layer.step(strided, state)[0], layer.step(x[1], state)[0])
    layer.set_parameters({name: 0.0 * array for name, array in layer.parameters.items()})
    assert not layer.step(x[1], tuple(map(np.zeros_like, state)))[0].any()
    large = an.LSTM(33, 100, seed=0).prepare()
    rows = np.zeros((64, 33), np.float32)
    _, state = large.step(rows)
    large.step(rows, state)
    assert [*large._prepared.again.values()] == [None]  # threads would share it
