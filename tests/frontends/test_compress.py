"""``anycell.compress``: fewer units for any cell, derived from its graph."""

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from problems import assert_right, by_cpu, random_problem
from processes import load
from tolerances import assert_close
from torch import nn

import anycell.numpy as an
import anycell.torch as at
from anycell import Cell, cell, cells, compress
from anycell.compress import units
from anycell.lang import linear, mean, sigmoid, tanh
from anycell.lang.transform import low_rank

COUNT = 16  # units of every size


@cell(gates="i f g o", state="h:P c")
def Blocks(x: Any, r: Any, s: Any) -> Any:
    """A cell with heads in its step, and two sizes."""
    i, f, g, o = x + r
    c = sigmoid(f) * s.c + sigmoid(i) * tanh(linear(g, "mix", heads=2, bias=True))
    return linear(sigmoid(o) * tanh(c), "hr", heads=4), c


@cell(gates="i done:1 f g:P", state="h:P c n:1", params="w:P k:1")
def Unequal(x: Any, r: Any, s: Any, p: Any) -> Any:
    """A cell whose gates and parameters have several sizes."""
    n = sigmoid(x.done + p.k) * s.n
    c = sigmoid(x.f + r.f) * s.c + sigmoid(x.i + r.i) * (1 - n)
    return tanh(x.g + linear(c, "down") + linear(n, "up")) * p.w, c, n


@cell(gates="f g", state="h", params="p")
def Grouped(x: Any, r: Any, s: Any, p: Any) -> Any:
    a = x.f + r.f
    return sigmoid(a) * s.h + p.p * tanh(x.g + r.g) - mean(s.h, groups=4)


TORCH: dict[str, Callable[[], Any]] = {
    "LSTM of both directions": lambda: at.LSTM(3, COUNT, 2, bidirectional=True),
    "GRU without biases": lambda: at.GRU(3, COUNT, 2, bias=False, batch_first=True),
    "projected LSTM": lambda: at.LSTM(3, COUNT, 2, proj_size=6),
    "LSTMP": lambda: at.RNN(cells.LSTMP, 3, COUNT, 2, P=8, bidirectional=True),
    "PeepholeLSTM": lambda: at.RNN(cells.PeepholeLSTM, 3, COUNT),
    "sLSTM": lambda: at.RNN(cells.sLSTM(heads=2), 3, COUNT),
    "MultiplicativeLSTM": lambda: at.RNN(cells.MultiplicativeLSTM, 3, COUNT, 2),
    "Blocks": lambda: at.RNN(Blocks, 3, COUNT, 2, P=8),
    "Unequal": lambda: at.RNN(Unequal, 3, COUNT, 2, P=8),
}


def silence(layer: Any, readouts: list[Any], size: str, kept: np.ndarray) -> None:
    """Sets the weights that read the removed units to 0."""
    for weight, index in compress._Model(layer, readouts, size).taken(kept):
        if weight.dim() < 2:
            continue
        rows = np.arange(weight.shape[-2])
        if weight.dim() == 3:
            heads, _, columns = index
            full = heads, rows[None, :, None], columns
        else:
            full = rows[:, None], index[1]
        reads = torch.zeros_like(weight)
        reads[tuple(map(torch.from_numpy, full))] = 1.0
        with torch.no_grad():
            weight *= reads


def sizes(name: str) -> list[str]:
    return [size for size in compress._Model(TORCH[name](), [], "H").sizes if size != "1"]


def some(layer: Any, size: str, rng: np.random.Generator) -> np.ndarray:
    """Half of the units, at random per layer and direction, equally many of each part."""
    model = compress._Model(layer, [], size)
    each = model.count // model.split
    rows = [
        [part * each + rng.permutation(each)[: each // 2] for part in range(model.split)]
        for _ in range(model.layers * model.directions)
    ]
    return np.sort(np.array(rows).reshape(len(rows), -1))


CASES = [(name, size) for name in TORCH for size in sizes(name)]


@pytest.mark.parametrize(("name", "size"), CASES)
@pytest.mark.sample(2)
def test_units_that_nothing_reads(name: str, size: str) -> None:
    """Their removal leaves the outputs of other units, and gradients, unchanged."""
    torch.manual_seed(0)
    layer, rng = TORCH[name]().double(), np.random.default_rng(0)
    width = layer(torch.zeros(2, 1, 3).double())[0].shape[-1]
    head = nn.Linear(width, 2).double()
    kept = some(layer, size, rng)
    silence(layer, [head], size, kept)
    x = torch.randn(5, 4, 3, dtype=torch.float64)
    before, states = layer(x)
    before = head(before)
    before.sum().backward()
    indices = {id(p): i for p, i in compress._Model(layer, [head], size).taken(kept)}
    right = {}
    for name, parameter in (*layer.named_parameters(), ("head", head.weight)):
        places = map(torch.from_numpy, map(np.array, indices.get(id(parameter), ())))
        right[name] = parameter.grad[tuple(places)].clone()
    stayed = compress.shrink(layer, kept, readouts=[head], size=size)
    assert np.array_equal(stayed, kept)
    shrunk, others = layer(x)
    after = head(shrunk)
    assert_close(after.detach(), before.detach(), "float64", "forward")
    for state, other, declared in zip(
        *[(s,) if isinstance(s, torch.Tensor) else s for s in (states, others)],
        layer.cell.states,
        strict=True,
    ):
        if declared.size == size:
            index = torch.from_numpy(kept)[:, None, :].expand(-1, state.shape[1], -1)
            state = state.gather(2, index)
        assert_close(other.detach(), state.detach(), "float64", "forward")
    names = {id(p): name for name, p in layer.named_parameters()} | {id(head.weight): "head"}
    parameters = [*layer.parameters(), head.weight]
    for parameter in parameters:  # ``shrink`` kept the gradients
        assert torch.equal(parameter.grad, right[names[id(parameter)]])
        parameter.grad = None
    after.sum().backward()
    for parameter in parameters:
        assert_close(parameter.grad, right[names[id(parameter)]], "float64", "gradient")


@pytest.mark.parametrize("name", [*TORCH][::-1])
@pytest.mark.sample(every=4)
def test_a_shrunk_layer_is_one_of_that_size(name: str) -> None:
    """It prints, saves, loads, prepares and trains like a layer created with that size."""
    layer = TORCH[name]()
    compress.shrink(layer, 12, multiple=4)
    again = copy.deepcopy(layer)
    text = repr(layer)
    fresh = type(layer).__new__(type(layer))
    sized = {k: v for k, v in getattr(layer, "sizes", {}).items() if k not in "H1"}
    if isinstance(layer, nn.RNNBase):
        sized = {"proj_size": layer.proj_size} if layer.proj_size else {}
        first: tuple[Any, ...] = ()
    else:
        first = (layer.cell,)
    fresh.__init__(
        *first, 3, layer.hidden_size, layer.num_layers, bias=layer.bias,
        batch_first=layer.batch_first, bidirectional=layer.bidirectional, **sized,
    )  # fmt: skip
    assert repr(fresh) == text
    fresh.load_state_dict(layer.state_dict())
    x = torch.randn(4, 4, 3)
    for other in (again, fresh):
        assert torch.equal(layer(x)[0], other(x)[0])
    if not layer.bidirectional:
        with torch.no_grad():
            stepped = layer.prepare().step(x[0])[0]
            once = layer(x[0][:, None] if layer.batch_first else x[:1])[0]
        assert_close(stepped, once[:, 0] if layer.batch_first else once[0], "float32", "forward")


def test_a_prepared_layer_packs_again() -> None:
    layer = at.LSTM(3, COUNT).prepare()
    with torch.no_grad():
        layer.step(torch.zeros(2, 3))
        compress.shrink(layer, 8)
        x = torch.randn(2, 3)
        assert_close(layer.step(x)[0], layer(x[None])[0][0], "float32", "forward")


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD], ids=["Adam", "SGD"])
def test_the_optimizer_follows(make: Any) -> None:
    """Training continues as if the units had never existed."""
    torch.manual_seed(0)
    layer, head = at.LSTM(3, COUNT).double(), nn.Linear(COUNT, 1).double()
    kept = np.arange(0, COUNT, 2)[None]
    options = {"momentum": 0.9} if make is torch.optim.SGD else {}
    optimizer = make([*layer.parameters(), *head.parameters()], lr=0.1, **options)
    x = torch.randn(5, 4, 3, dtype=torch.float64)
    head(layer(x)[0]).square().mean().backward()
    optimizer.step()
    state = optimizer.state[layer.weight_hh_l0]
    name = "exp_avg" if "exp_avg" in state else "momentum_buffer"
    rows = (np.arange(4)[:, None] * COUNT + kept).reshape(-1)
    right = state[name][rows][:, kept[0]].clone()
    compress.shrink(layer, kept[0], readouts=[head], optimizer=optimizer)
    assert torch.equal(optimizer.state[layer.weight_hh_l0][name], right)
    assert head.in_features == 8 and optimizer.state[head.weight][name].shape == (1, 8)
    optimizer.zero_grad()
    head(layer(x)[0]).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "make", [torch.optim.LBFGS, torch.optim.Adafactor], ids=["L-BFGS", "Adafactor"]
)
def test_optimizers_that_cannot_follow_are_refused(make: Any) -> None:
    """Their state is not per number of a parameter; the refusal changes nothing."""
    layer, x = at.LSTM(3, 32), torch.randn(5, 2, 3)
    optimizer = make(layer.parameters(), lr=0.1)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = layer(x)[0].square().mean()
        value.backward()
        return value

    optimizer.step(loss)
    before = layer(x)[0]
    with pytest.raises(ValueError, match=f"optimizer: given {make.__name__}, whose state"):
        compress.shrink(layer, 8, optimizer=optimizer)
    assert layer.hidden_size == 32 and torch.equal(layer(x)[0], before)
    optimizer.step(loss)


def test_an_optimizer_of_something_else_is_refused() -> None:
    optimizer = torch.optim.SGD(at.LSTM(3, 32).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="optimizer: given SGD without parameters of the layer"):
        compress.shrink(at.LSTM(3, 32), 8, optimizer=optimizer)


def test_the_name_of_an_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="optimizer: given str 'adam'; expected an optimizer of"):
        compress.shrink(at.LSTM(3, 32), 8, optimizer="adam")


def test_a_parameter_in_two_places_is_refused() -> None:
    layer = at.RNN(cells.LSTM, 16, 16, num_layers=2)
    layer.weight_ih_l1 = layer.weight_ih_l0
    with pytest.raises(ValueError, match="layer: given one with a parameter in two places"):
        compress.shrink(layer, 8)
    assert layer(torch.zeros(3, 2, 16))[0].shape == (3, 2, 16)
    tied = an.RNN(cells.LSTM, 16, 16, num_layers=2, seed=0)
    tied._parameters["weight_ih_l1"] = tied._parameters["weight_ih_l0"]
    with pytest.raises(ValueError, match="layer: given one with a parameter in two places"):
        compress.shrink(tied, 8)


def test_the_strongest_stay() -> None:
    layer = at.GRU(3, COUNT, 2)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.rand_like(parameter) * 0.01 + 0.01)
            if name == "weight_ih_l1":
                parameter[:, 5] = 1.0  # reads unit 5 of the first layer
            if name == "weight_hh_l1":
                parameter[2 * COUNT + 7] = 1.0  # a gate of unit 7 of the second
    kept = compress.shrink(layer, 1, multiple=1)
    assert kept.tolist() == [[5], [7]]


def test_norms_are_of_rows_and_columns() -> None:
    torch.manual_seed(0)
    layer, head = at.LSTM(3, 5, 2, bidirectional=True).double(), nn.Linear(10, 2).double()
    norms = compress.unit_norms(layer, readouts=[head])
    assert norms.shape == (4, 5)
    for k in range(2):
        for d, end in enumerate(("", "_reverse")):
            ih, hh = (getattr(layer, f"weight_{n}_l{k}{end}") for n in ("ih", "hh"))
            readers = [head.weight] if k else [layer.weight_ih_l1, layer.weight_ih_l1_reverse]
            for u in range(5):
                mine = torch.zeros_like(hh, dtype=torch.bool)
                mine[u::5] = True
                mine[:, u] = True
                total = (ih[u::5] ** 2).sum() + (hh[mine] ** 2).sum()
                total = total + sum((w[:, d * 5 + u] ** 2).sum() for w in readers)
                assert_close(norms[2 * k + d, u].item(), total.sqrt().item(), "float64", "forward")
    norms.sum().backward()
    weight = layer.weight_hh_l0
    expected = weight / norms[0].repeat(4)[:, None] + weight / norms[0][None]
    units_of = torch.arange(20) % 5
    diagonal = units_of[:, None] == torch.arange(5)
    expected = torch.where(diagonal, weight / norms[0].repeat(4)[:, None], expected)
    assert_close(weight.grad, expected.detach(), "float64", "gradient")


@pytest.mark.parametrize("name", ["sLSTM", "Blocks"])
def test_norms_of_heads(name: str) -> None:
    """Norms of blocks equal the norms of the whole matrix that they represent."""
    layer = TORCH[name]().double()
    model = compress._Model(layer, [], "H")
    for label, weight in model.learned(0, 0).items():
        counted = model.axes[label]
        if counted.heads == 1 or counted.columns is None:
            continue
        of_rows, count = counted.blocks[0], len(counted.blocks)
        n, inside = model.sizes[of_rows], model.sizes[counted.columns]
        whole = torch.zeros(count, n, inside, dtype=weight.dtype)
        parts = weight.reshape(counted.heads, count, n // counted.heads, -1)
        for head, part in enumerate(parts):
            rows = slice(head * part.shape[1], (head + 1) * part.shape[1])
            whole[:, rows, head * part.shape[2] : (head + 1) * part.shape[2]] = part
        plain = units.Axes(counted.blocks, counted.columns)
        for size in {of_rows, counted.columns}:
            found, right = (
                sum(units.sums(c, model.sizes, w * w, size))
                for c, w in ((counted, weight), (plain, whole.reshape(-1, inside)))
            )
            assert_close(found.detach(), right.detach(), "float64", "forward")


def test_a_unit_that_is_gone_has_no_slope() -> None:
    layer = at.GRU(3, 4)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    norms = compress.unit_norms(layer)
    norms.sum().backward()
    assert not norms.any() and not layer.weight_hh_l0.grad.any()


@pytest.mark.parametrize(
    ("keep", "multiple", "count"),
    [(5, 8, 8), (0.5, 8, 8), (9, 8, 16), (0.6, 8, 16), (7, 1, 7), (16, 3, 16), (0.01, 1, 1)],
)
def test_rounding(keep: Any, multiple: int, count: int) -> None:
    layer = an.GRU(3, COUNT, seed=0)
    assert compress.shrink(layer, keep, multiple=multiple).shape == (1, count)
    assert layer.hidden_size == count


def test_parts_keep_as_many() -> None:
    layer = at.RNN(cells.sLSTM(heads=4), 3, COUNT)
    kept = compress.shrink(layer, 6, multiple=1)
    assert (np.bincount(kept[0] // 4, minlength=4) == 2).all()  # 6 is not a multiple of 4
    grouped = at.RNN(Grouped, 3, COUNT)
    kept = compress.shrink(grouped, 8)
    assert (np.bincount(kept[0] // 4) == 2).all()
    grouped(torch.zeros(2, 1, 3))


# -- NumPy -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", [cells.LSTM, cells.LSTMP, cells.sLSTM(heads=2)], ids=repr)
def test_numpy_is_torch(case: Cell, rng: np.random.Generator) -> None:
    sized = {"P": 8} if case is cells.LSTMP else {}
    layer = an.RNN(case, 3, COUNT, 2, bidirectional=True, dtype="float64", seed=0, **sized)
    module = at.RNN(case, 3, COUNT, 2, bidirectional=True, **sized).double()
    module.load_state_dict({n: torch.from_numpy(a.copy()) for n, a in layer.parameters.items()})
    width = 2 * layer.sizes[case.states[0].size]
    dense, head = an.Dense(width, 2, dtype="float64", seed=1), nn.Linear(width, 2).double()
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(dense.parameters["weight"]))
    for size in layer.sizes:
        norms = compress.unit_norms(module, readouts=[head], size=size)
        assert_close(
            compress.unit_norms(layer, readouts=[dense], size=size),
            norms.detach(),
            "float64",
            "forward",
        )
        kept = compress.shrink(module, 0.5, readouts=[head], size=size, multiple=2)
        mine = compress.shrink(layer, 0.5, readouts=[dense], size=size, multiple=2)
        assert np.array_equal(kept, mine)
    x = rng.standard_normal((5, 4, 3))
    output, _ = layer.forward(x)
    assert_close(output, module(torch.from_numpy(x))[0].detach(), "float64", "forward")
    assert_close(dense.parameters["weight"], head.weight.detach(), "float64", "forward")
    assert dense.forward(output).shape == (5, 4, 2)


def test_adam_of_numpy_follows(rng: np.random.Generator) -> None:
    layer, dense = an.LSTM(3, COUNT, seed=0), an.Dense(COUNT, 1, seed=1)
    adam, x = an.Adam([layer, dense], lr=0.01), rng.standard_normal((5, 4, 3))

    def train() -> None:
        _, grad = an.mse(
            dense.forward(layer.forward(x, training=True)[0], training=True), x[..., :1]
        )
        layer.backward(dense.backward(grad))
        adam.step()

    train()
    shapes = [m.shape for m, _ in adam._moments]
    old = adam._moments[1][0]
    kept = compress.shrink(layer, 8, readouts=[dense], optimizer=adam)
    rows = (np.arange(4)[:, None] * COUNT + kept).reshape(-1)
    assert np.array_equal(adam._moments[1][0], old[rows][:, kept[0]])
    assert [m.shape for m, _ in adam._moments] != shapes
    layer.prepare()
    train()
    assert layer.step(x[0])[0].shape == (4, 8)


def test_a_backward_pass_that_is_under_way_is_refused(rng: np.random.Generator) -> None:
    layer = an.LSTM(3, COUNT, seed=0)
    output, _ = layer.forward(rng.standard_normal((5, 4, 3)), training=True)
    compress.shrink(layer, 8)
    with pytest.raises(RuntimeError, match="needs a forward"):
        layer.backward(output)


# -- schedules, refusals ---------------------------------------------------------------------------
def test_gradual() -> None:
    keep = compress.gradual(0.25, begin=10, end=110)
    assert [keep(step) for step in (0, 10, 110, 500)] == [1.0, 1.0, 0.25, 0.25]
    assert keep(60) == pytest.approx(0.25 + 0.75 * 0.5**3)
    steps = [keep(step) for step in range(10, 111)]
    assert steps == sorted(steps, reverse=True)


def refused() -> Iterator[Any]:
    layer = at.LSTM(3, COUNT)
    heads = at.RNN(cells.sLSTM(heads=2), 3, COUNT)
    yield lambda: compress.shrink(layer, 0), ValueError, "keep: given 0; expected a number of units"
    yield lambda: compress.shrink(layer, 17), ValueError, "from 1 to 16"
    yield lambda: compress.shrink(layer, 1.5), ValueError, "a part of them"
    yield lambda: compress.shrink(layer, True), ValueError, "keep: given True"
    yield lambda: compress.shrink(layer, [1, 1]), ValueError, "each at most once"
    yield lambda: compress.shrink(layer, [-1, 1]), ValueError, "from 0 to 15"
    yield lambda: compress.shrink(layer, [1, 16]), ValueError, "from 0 to 15"
    yield lambda: compress.shrink(layer, []), ValueError, "expected indices"
    yield lambda: compress.shrink(layer, [0.5]), ValueError, "expected indices"
    yield lambda: compress.shrink(layer, [[1], [2]]), ValueError, "for each layer"
    yield lambda: compress.shrink(heads, [0, 1]), ValueError, "the same number in each"
    yield lambda: compress.shrink(layer, 8, multiple=0), ValueError, "multiple: given 0"
    yield lambda: compress.shrink(layer, 8, size="P"), ValueError, "size: given 'P'"
    projected = at.LSTM(3, COUNT, proj_size=8)
    yield lambda: compress.shrink(projected, 8), ValueError, "keep: given 8 .* more than proj_size"
    yield lambda: compress.shrink(layer, 8, readouts=[nn.Linear(5, 1)]), TypeError, "in_features=16"
    yield lambda: compress.shrink(layer, 8, readouts=nn.Linear(16, 1)), TypeError, "a list"
    yield lambda: compress.shrink(layer, 8, readouts=iter([])), TypeError, "a list of layers"
    yield lambda: compress.shrink(nn.LSTM(3, 4), 2), TypeError, "accelerate"
    yield lambda: compress.unit_norms(an.Dense(3, 4)), TypeError, "given Dense"
    fed = at.Feedback(at.GRU(3, 4), nn.Linear(4, 1))
    yield lambda: compress.shrink(fed, 2), TypeError, r"its layer.*readouts=\[feedback.readout\]"
    yield lambda: compress.shrink(an.GRU(3, 4), 2, readouts=[an.Dense(3, 1)]), TypeError, "size=4"
    yield lambda: compress.gradual(0.0, 0, 1), ValueError, "final: given 0.0"
    yield lambda: compress.gradual(0.5, 1, 1), ValueError, "begin before end"
    for small in map(compress.quantize, (layer, an.LSTM(3, COUNT, seed=0))):
        for change in (
            lambda small: compress.shrink(small, 8),
            lambda small: compress.unit_norms(small),
            lambda small: compress.factorize(small, 4),
        ):
            call = functools.partial(change, small)
            yield call, TypeError, "layer: given Quantized with weights of 8 bits; expected float32"
    yield lambda: an.Adam(compress.quantize(an.LSTM(3, 4))), TypeError, "given weights of 8 bits"
    for kind, broken in (("torch", at.GRU(3, 4)), ("NumPy", an.GRU(3, 4, seed=0))):
        if kind == "torch":
            broken.weight_hh_l0.data[1, 2] = np.nan
        else:
            broken.parameters["weight_hh_l0"][1, 2] = np.nan
        call = functools.partial(compress.factorize, broken, 2)
        yield call, ValueError, "layer: given one whose weight_hh_l0 has infinities or NaN"


@pytest.mark.parametrize(("call", "error", "says"), [*refused()])
def test_refusals(call: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        call()


def test_the_layer_of_a_feedback_takes_its_readout_along() -> None:
    for fed in (
        at.Feedback(at.GRU(3, 16), nn.Linear(16, 1)),
        an.Feedback(an.GRU(3, 16), an.Dense(16, 1)),
    ):
        with pytest.raises(ValueError, match=r"readouts: given \[\].*=\[feedback.readout\]"):
            compress.shrink(fed.layer, 8)
        assert fed.layer.hidden_size == 16
        compress.shrink(fed.layer, 8, readouts=[fed.readout])
        assert fed.layer.hidden_size == 8
    layer = at.GRU(3, 16)
    at.Feedback(layer, nn.Linear(16, 1))  # it is garbage at once
    assert compress.shrink(layer, 8).shape == (1, 8)


def test_parametrized_weights_are_refused() -> None:
    layer = nn.utils.parametrizations.weight_norm(at.LSTM(3, 4), "weight_hh_l0")
    with pytest.raises(ValueError, match="remove_parametrizations"):
        compress.shrink(layer, 2)


# -- weights of low rank ---------------------------------------------------------------------------
def full_rank(layer: Any) -> Iterator[Any]:
    """Yields the layer with lossless factors, for each group of weights of equal full rank."""
    sizes = dict(layer._sizes) if hasattr(layer, "_sizes") else layer.sizes
    linears = layer.cell.linears
    rows = {l.name: min(l.shape({"H": layer.hidden_size, **sizes})[-2:]) * l.heads for l in linears}
    for name, rank in rows.items():
        some = [other for other in rows if rows[other] == rank]
        if name == some[0]:
            yield compress.factorize(layer, rank, matmuls=some)


FAST = {"sLSTM", "GRU without biases"}


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in TORCH]
)
@pytest.mark.sample(1)
def test_full_rank_is_the_same_layer(name: str) -> None:
    """Outputs, and gradients of all parameters that both layers have, are equal."""
    torch.manual_seed(0)
    layer = TORCH[name]().double()
    x = torch.randn(5, 4, 3, dtype=torch.float64)
    before = layer(x)[0]
    before.sum().backward()
    for factored in full_rank(layer):
        assert factored.engine.name == "cpu"
        after = factored(x)[0]
        after.sum().backward()
        assert_close(after.detach(), before.detach(), "float64", "forward")
        learned = dict(factored.named_parameters())
        for name, parameter in layer.named_parameters():
            same = learned.get(name, learned.get(name.replace("_hh_l", "_hh_u_l")))
            if same is not None and same.shape == parameter.shape and "weight_hh" not in name:
                assert_close(same.grad, parameter.grad, "float64", "gradient", name)


@pytest.mark.parametrize(
    "cell",
    [
        cells.GRU,
        pytest.param(cells.LayerNormLSTM, marks=pytest.mark.slow),
        pytest.param(cells.sLSTM(heads=3), marks=pytest.mark.slow),
        pytest.param(cells.MGU, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_cells_of_low_rank_are_like_any_other(cell: Cell, rng: np.random.Generator) -> None:
    for dtype in ("float64", "float32"):
        problem = random_problem(
            low_rank(cell), (4, 3, 9), rng, dtype, masked=True, resets=True, nearby=2
        )
        assert_right(by_cpu(problem, threads=2), problem)


@pytest.mark.parametrize("rank", [1, 4, 15, 16])
def test_what_is_left_out_are_singular_values(rank: int) -> None:
    for layer in (an.LSTM(3, COUNT, 2, seed=0, bidirectional=True), at.LSTM(3, COUNT)):
        factored = compress.factorize(layer, rank)
        names = [name for name, _ in parameters(layer).items() if name.startswith("weight_hh")]
        for name in names:
            weight = parameters(layer)[name]
            u, v = (parameters(factored)[name.replace("hh", f"hh_{f}")] for f in "uv")
            assert u.shape == (4 * COUNT, rank) and v.shape == (rank, COUNT)
            assert_close(u @ v, nearest(weight, rank), "float32", "forward")
            assert_close(np.linalg.norm(u), np.linalg.norm(v), "float32", "forward")


def nearest(weight: np.ndarray, rank: int) -> np.ndarray:
    """Returns the matrix (or matrices) of ``rank`` nearest to ``weight``."""
    u, values, v = np.linalg.svd(weight.astype(np.float64), full_matrices=False)
    return (u[..., :rank] * values[..., None, :rank]) @ v[..., :rank, :]


def parameters(layer: Any) -> dict[str, np.ndarray]:
    if isinstance(layer, nn.Module):
        return {name: p.detach().double().numpy() for name, p in layer.named_parameters()}
    return {name: array.astype(np.float64) for name, array in layer.parameters.items()}


def test_heads_have_a_rank_of_their_own() -> None:
    layer = an.RNN(cells.sLSTM(heads=4), 3, COUNT, seed=0)
    factored = compress.factorize(layer, 8)
    weight = layer.parameters["weight_r_l0"]
    u, v = (factored.parameters[f"weight_r_{f}_l0"] for f in "uv")
    assert u.shape == (4, COUNT, 2) and v.shape == (4, 2, 4)
    assert_close(u @ v, nearest(weight, 2), "float32", "forward")


def test_a_layer_of_low_rank_is_like_any_other() -> None:
    """It supports copies, pickles, checkpoints, other hyperparameters and training."""
    torch.manual_seed(0)
    layer = at.RNN(cells.ZoneoutGRU(zoneout=0.2), 3, COUNT, 2, bidirectional=True, batch_first=True)
    before = copy.deepcopy(layer.state_dict())
    factored = compress.factorize(layer.eval(), 4)
    assert not factored.training and factored.batch_first and factored.bidirectional
    x = torch.randn(5, 4, 3)
    right = factored(x)[0]
    again = at.RNN(
        compress.low_rank(cells.ZoneoutGRU(zoneout=0.2)),
        3, COUNT, 2, bidirectional=True, batch_first=True, rank=4,
    ).eval()  # fmt: skip
    assert again.load_state_dict(factored.state_dict()).missing_keys == []
    for other in (again, copy.deepcopy(factored), pickle.loads(pickle.dumps(factored))):
        assert torch.equal(other(x)[0], right)
        assert other.cell == factored.cell and repr(other) == repr(factored)
    more = factored.cell(zoneout=0.9)
    assert more.hyper == {"zoneout": 0.9} and more.learned == factored.cell.learned
    optimizer = torch.optim.Adam(factored.train().parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        losses.append(factored(x)[0].square().mean())
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert compress.shrink(factored, 8).shape == (4, 8)
    assert compress.shrink(factored, 2, size="rank", multiple=1).shape == (4, 2)


@pytest.mark.more
def test_numpys_layers_of_low_rank(rng: np.random.Generator) -> None:
    for bias in (True, False):
        layer = an.GRU(3, COUNT, 2, bias=bias, bidirectional=True, seed=0, dtype="float64")
        x = rng.standard_normal((5, 4, 3))
        factored = compress.factorize(layer, COUNT)
        assert any("bias" in name for name in factored.parameters) is bias
        assert_close(factored.forward(x)[0], layer.forward(x)[0], "float64", "forward")
        small = compress.factorize(layer, 4)
        optimizer = an.Adam([small], lr=1e-2)
        losses = []
        for _ in range(15):
            output, _ = small.forward(x, training=True)
            losses.append((output**2).mean())
            small.backward(2 * output / output.size)
            optimizer.step()
        assert losses[-1] < 0.7 * losses[0]


def test_layers_that_cannot_be_factorized() -> None:
    layer = an.GRU(3, COUNT, seed=0)
    for rank in (0, 1.5, True, "all"):
        with pytest.raises((TypeError, ValueError), match=r"rank: .*expected an int from 1"):
            compress.factorize(layer, rank)
    with pytest.raises(ValueError, match="rank: given 17; expected at most 16, the full rank of"):
        compress.factorize(layer, 17)
    with pytest.raises(ValueError, match=r"matmuls: given \['uh'\]; expected .* of GRU: hh"):
        compress.factorize(layer, 4, matmuls=["uh"])
    with pytest.raises(ValueError, match="IndRNN: it has none"):
        compress.factorize(an.RNN(cells.IndRNN, 3, COUNT), 4)
    with pytest.raises(ValueError, match="which has the size 'rank'"):
        compress.factorize(compress.factorize(layer, 4), 2)
    with pytest.raises(ValueError, match="multiple of 4"):
        compress.factorize(an.RNN(cells.sLSTM(heads=4), 3, COUNT), 6)
    with pytest.raises(TypeError, match="layer: given Linear"):
        compress.factorize(nn.Linear(3, 3), 2)


def test_a_matmul_with_the_name_of_a_factor(rng: np.random.Generator) -> None:
    @cell(gates="a", state="h")
    def Named(x, r, s):
        return tanh(x.a + r.a + linear(s.h, "hh_u"))

    layer = an.RNN(Named, 3, 8, dtype="float64", seed=0)
    x = rng.standard_normal((4, 2, 3))
    assert_close(compress.factorize(layer, 8)(x)[0], layer(x)[0], "float64", "forward")
    with pytest.raises(ValueError, match=r"which has a matmul 'hh_u'; expected a cell without it"):
        compress.factorize(layer, 4, matmuls=["hh"])


def test_gates_apart_keep_their_bias() -> None:
    """GRU's candidate multiplies its recurrent part, including the bias, by the reset gate."""
    cell = low_rank(cells.GRU)
    assert cell.learned == (
        "weight_ih", "bias_ih", "weight_hh_v", "weight_hh_u", "bias_hh_u",
    )  # fmt: skip
    assert low_rank(cells.MGU, ["hn"]).fused == cells.MGU.fused
    assert low_rank(cells.GRU, bias=False)() is low_rank(cells.GRU, bias=False)


# -- all of it, on a series and on sentences -------------------------------------------------------
@pytest.mark.slow
def test_the_example() -> None:
    """Models of 8 and 16 bits agree with float32, and each way is smaller."""
    pytest.importorskip("statsmodels")
    pytest.importorskip("rich")
    for whole, half, eight, fewer, both in load("examples/smaller.py").main(["--quick"]).values():
        for row in (half, eight):
            assert abs(row.quality - whole.quality) < 0.02 * abs(whole.quality)
        assert abs(both.quality - fewer.quality) < 0.02 * abs(fewer.quality)
        assert half.size < 0.6 * whole.size and eight.size < 0.3 * whole.size
        assert both.size < 0.4 * fewer.size < 0.2 * whole.size


def test_a_refusal_changes_nothing() -> None:
    """A refused quantized layer keeps its size and its readout."""
    torch.manual_seed(0)
    small, head, x = compress.quantize(at.LSTM(3, COUNT)), nn.Linear(COUNT, 2), torch.randn(4, 2, 3)
    with torch.no_grad():
        right = head(small(x)[0])
        with pytest.raises(TypeError, match="weights of 8 bits"):
            compress.shrink(small, 8, readouts=[head])
        assert small.hidden_size == COUNT and torch.equal(head(small(x)[0]), right)
