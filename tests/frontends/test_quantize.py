"""Weights of 8 bits: kernels against the same rounding in float64, and layers of every frontend."""

import contextlib
import copy
import functools
import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import feedbacks
import numpy as np
import numpy.typing as npt
import pytest
import torch
from guarded import BUILT_IN, Everything, GuardedHost, guarded, scratch
from integers import by_integers, by_rounding, dequantized, quantized, round_rows
from problems import Rows, Sized, forget_passes, random_problem
from processes import python
from roads import ROADS
from tolerances import assert_close, error, limit
from torch import nn

import anycell.numpy as an
import anycell.torch as at
from anycell import cells, compress, layer
from anycell.engines import cpu
from anycell.engines.cpu import gemm, isa, kernel
from anycell.layer import heuristics, products
from anycell.layer.rounding import rounded
from anycell.numpy.framework import Numpy
from anycell.plan import plan
from anycell.plan.dtype import Dtype
from tests.engines.test_cpu_matmul import Padded

Array = npt.NDArray[Any]
FEW = [cells.LSTM, cells.GRU, cells.sLSTM, Everything, Sized, Rows]
*_NARROWER, _WIDEST = isa.available()
widest = pytest.mark.parametrize(
    "name", [*[pytest.param(name, marks=pytest.mark.slow) for name in _NARROWER], _WIDEST]
)


def small(cell: Any, shape: tuple[int, int, int], seed: int, **options: Any) -> Any:
    """Returns a float32 problem, drawn in float64."""
    rng = np.random.default_rng(seed)
    return random_problem(cell, shape, rng, "float64", **options).astype("float32")


def assert_rounded(problem: Any, **how: Any) -> None:
    """Asserts that kernels round as the reference does. Sums in another order rarely round to
    another integer, which causes an error larger than float32's."""
    wanted = by_rounding(problem, how.get("projected", False))
    with long_functions():
        solution = by_integers(problem, **how)
    for key, value in wanted.items():
        assert_close(solution[key], value, "float32", "training", key, axes=())


@contextlib.contextmanager
def long_functions() -> Iterator[None]:
    """Makes cells compute as exactly as cells of float32: the errors of short functions would round
    to other integers too often for a comparison.
    """
    with mock.patch.object(Dtype, "short", False):
        _forget()
        yield
    _forget()


def _forget() -> None:
    kernel.description.cache_clear()
    forget_passes()


# -- kernels ---------------------------------------------------------------------------------------
@widest
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))]
)
def test_cells(part: int, name: str, seed: int) -> None:
    with isa.force(name):
        for n, cell in list(enumerate(BUILT_IN))[part::6]:
            how = {"masked": True, "resets": True, "reverse": True} if n % 2 else {}
            assert_rounded(small(cell, (5, 3, 33), seed + n, **how), threads=2)


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("cell", FEW, ids=lambda cell: cell.name)
@pytest.mark.sample(every=7)
def test_sizes(part: int, cell: Any, seed: int) -> None:
    """Sizes lie around vectors and fours; there are one row, no rows, no steps, several panels."""
    sizes = [4, 60] if cell is cells.sLSTM else [1, 3, 4, 5, 16, 17, 65]
    shapes = [(3, 2, h) for h in sizes] + [(0, 3, 16), (4, 0, 16), (1, 1, 16), (2, 50, 16)]
    for n, shape in list(enumerate(shapes))[part::3]:
        problem = small(cell, shape, seed + n)
        assert_rounded(problem, threads=1 + n % 3, projected=n % 2 == 0)


@pytest.mark.parametrize("dropped", ["all", "each"])
def test_recurrent_mask(dropped: str, seed: int) -> None:
    assert_rounded(small(cells.LSTM, (4, 3, 20), seed, dropped=dropped))


def test_roads(
    seed: int, monkeypatch: pytest.MonkeyPatch, runs: list[layer.pass_tables.PassTables]
) -> None:
    """Kernel or host multiplies the inputs, in chunks or at once; threads split rows or units."""
    monkeypatch.setattr(heuristics, "WORTH_A_THREAD", 0)
    forget_passes()
    shapes = (30, 16, 16), (6, 1, 64), (3, 40, 8), (1, 2, 8)
    problems = [small(cells.LSTM, shape, seed) for shape in shapes]
    for problem, threads, chunk in itertools.product(problems, (1, 2), (None, 1 << 10)):
        with monkeypatch.context() as patch:
            if chunk is not None:
                patch.setattr(heuristics, "CHUNK_BYTES", chunk)
                forget_passes()
            for projected in (False, True):
                assert_rounded(problem, threads=threads, projected=projected)
    forget_passes()
    never = {
        "a single step",
        "a single step of few rows",
        "steps of one row",
        "threads pack the weights",
    }  # the kernel has all steps; tests below cover these
    assert {road for road, on in ROADS.items() if len({on(run) for run in runs}) == 1} <= never


def test_threads_pack(seed: int) -> None:
    problem = small(cells.LSTM, (2, 3, 300), seed)
    assert_rounded(problem, threads=2, projected=True)


def test_bits(seed: int) -> None:
    """The bits of a row do not depend on threads or on other rows."""
    problem = small(cells.LSTM, (20, 37, 70), seed)
    whole = by_integers(problem)
    for threads in (2, 3):
        assert np.array_equal(by_integers(problem, threads)["output"], whole["output"])
    one = problem.rows(slice(5, 6))
    assert np.array_equal(by_integers(one)["output"], whole["output"][:, 5:6])


def multiplied(
    x: Array, weight: Array, scales: Array, c: Array | None = None, threads: int = 1, make: Any = 0
) -> Array:
    """Computes ``x @ weight.T`` by the kernel, on arrays that ``make`` allocates."""
    make = make or (lambda shape, dtype: np.empty(shape, dtype))
    turned = not weight.flags.c_contiguous
    left, right = make(x.shape, "float32"), make(weight.T.shape if turned else weight.shape, "int8")
    left[...], right = x, right.T if turned else right
    right[...] = weight
    of_columns = make((1, len(scales)), "float32")[0]
    of_columns[...] = scales
    out = make((len(x), len(weight)), "float32")
    out[...] = np.nan if c is None else c
    at, host = of_columns.__array_interface__["data"][0], Numpy.of("float32")
    products.multiply(host, "int8", left, right.T, out, c is not None, threads, at)
    return out


# Rows, columns, and the length of the sums: around vectors, register blocks, pieces and spans.
SIZES = [
    (rows, columns, inner)
    for rows, columns in ((1, 1), (3, 17), (8, 64), (gemm.ROWS + 5, 70))
    for inner in (0, 1, 3, 4, 5, 63, 65, gemm.INNER - 1, gemm.INNER + 2)
] + [(7, gemm.SPAN_COLUMNS + 5, 9), (5, 20, gemm.SPAN_INNER + 7), (2 * gemm.ROWS, 90, 100)]


def check_products(seed: int, make: Any, every: int = 3) -> None:
    for n, ((rows, columns, inner), turned, added) in enumerate(
        itertools.product(SIZES, (False, True), (False, True))
    ):
        if (n + seed) % every:
            continue
        print(rows, columns, inner, turned, added, flush=True)
        rng = np.random.default_rng(seed + n)
        x = rng.standard_normal((rows, inner)).astype("float32")
        weight = rng.standard_normal((columns, inner)).astype("float32")
        integers, scales = rounded(weight)
        if turned:
            integers = np.asfortranarray(integers)
        c = rng.standard_normal((rows, columns)).astype("float32") if added else None
        out = multiplied(x, integers, scales, c, 1 + n % 3, make)
        wanted = round_rows(x) @ dequantized(weight).T + (0 if c is None else c)
        assert_close(out, wanted, "float32", "forward", f"{x.shape} {columns}", axes=())


def padded(shape: tuple[int, int], dtype: str) -> Array:
    """Makes an array whose rows are apart and do not begin at whole vectors."""
    if dtype == "int8":
        return np.ones((shape[0], shape[1] + 3), dtype)[:, 1:-2]
    return Padded(3, 1)(shape, dtype)


@widest
def test_products(name: str, seed: int) -> None:
    with isa.force(name):
        check_products(seed, padded)


def between_pages(seed: int, every: int) -> None:
    """Checks products and layers in memory next to forbidden pages; needs a process of its own."""
    layer.heuristics.WORTH_A_THREAD = 0
    for end in (True, False):
        with (
            mock.patch.object(cpu.Scratch, "take", scratch(end)),
            mock.patch.object(cpu.scratch, "give_back", lambda _: None),
        ):
            make: Any = functools.partial(guarded, end=end)
            check_products(seed, make, every)
            for n, (cell, hidden) in enumerate(itertools.product(FEW, (4, 33, 60))):
                if (cell is cells.sLSTM and hidden % 4) or n % min(every, 2):
                    continue
                for shape, projected in itertools.product([(3, 5), (1, 1), (2, 49)], (False, True)):
                    print(cell, hidden, shape, projected, end, flush=True)
                    problem = small(cell, (*shape, hidden), seed + n, masked=n % 2 == 1)
                    host = GuardedHost("float32", end)
                    assert_rounded(problem, threads=1 + n % 3, projected=projected, host=host)


@widest
@pytest.mark.parametrize("every", [5, 1])
@pytest.mark.slow
def test_it_stays_within_its_arrays(name: str, every: int, seed: int) -> None:
    python(
        f"from tests.frontends.test_quantize import *; between_pages({seed}, {every})",
        ANYCELL_ISA=name,
    )


# -- numbers that are hard to round ----------------------------------------------------------------
def lstm(x: Array, weights: dict[str, Array]) -> Array:
    """The outputs of an LSTM with weights of 8 bits."""
    plan_ = plan(cells.LSTM, 8, "int8", "cpu", {})
    arrays = quantized({"x": x.astype("float32"), **weights})
    return layer.forward(Numpy.of("int8"), plan_, arrays, layer.Options(), keep=False)[0]


@pytest.fixture
def weights(rng: np.random.Generator) -> dict[str, Array]:
    shapes = {"weight_ih": (32, 5), "weight_hh": (32, 8), "bias_ih": (32,)}
    return {n: rng.standard_normal(shape).astype("float32") for n, shape in shapes.items()}


@pytest.mark.parametrize("steps", [3, 300])  # the kernel multiplies the input, or not
def test_awkward_rows(steps: int, weights: dict[str, Array], rng: np.random.Generator) -> None:
    """Only rows with NaN or an infinity are NaN, from that step on; rows of zeros, of tiny and of
    huge numbers are right."""
    x = rng.standard_normal((steps, 6, 5))
    clean = lstm(x, weights)
    x[1, 0, 2], x[1, 1, 0], x[1, 2, 4] = np.nan, np.inf, -np.inf
    out = lstm(x, weights)
    assert np.isnan(out[1:, :3]).all()
    assert np.array_equal(out[:1], clean[:1]) and np.array_equal(out[:, 3:], clean[:, 3:])
    for scale in (0.0, 1e-45, 1e-38, 1e-30, 1e30):
        x = rng.standard_normal((steps, 6, 5)) * scale
        rows = round_rows(x.astype("float32")) @ dequantized(weights["weight_ih"]).T
        small_x = {"x": (rows + weights["bias_ih"]).astype("float32")}
        gates = quantized({**small_x, "weight_hh": weights["weight_hh"]})
        plan_ = plan(cells.LSTM, 8, "int8", "cpu", {})
        wanted = layer.forward(Numpy.of("int8"), plan_, gates, layer.Options(), keep=False)[0]
        assert np.isfinite(wanted).all()
        assert_close(lstm(x, weights), wanted, "float32", "training", f"{scale}", axes=())


def test_a_channel_of_zeros(weights: dict[str, Array], rng: np.random.Generator) -> None:
    weights["weight_ih"][3] = weights["weight_hh"][3] = 0.0
    integers, scales = rounded(weights["weight_hh"])
    assert scales[3] == 0.0 and not integers[3].any() and np.abs(integers).max() == 127
    assert np.isfinite(lstm(rng.standard_normal((4, 2, 5)), weights)).all()


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_weights_must_be_numbers(wrong: float) -> None:
    array = np.array([[1.0, wrong]], "float32")
    (broken := at.LSTM(1, 1)).weight_hh_l0.data.fill_(wrong)
    for round_ in (lambda: rounded(array), lambda: compress.quantize(broken)):
        with pytest.raises(
            ValueError, match=r"model: given one whose weight.* has infinities or NaN"
        ):
            round_()


# -- layers ----------------------------------------------------------------------------------------
TORCH = {
    "LSTM": lambda: at.LSTM(6, 20, 2, bidirectional=True),
    "GRU": lambda: at.GRU(6, 20, bias=False, batch_first=True),
    "projected LSTM": lambda: at.LSTM(6, 20, proj_size=8),
    "PeepholeLSTM": lambda: at.RNN(cells.PeepholeLSTM, 6, 20, 2, bidirectional=True),
    "sLSTM": lambda: at.RNN(cells.sLSTM(heads=2), 6, 20),
    "MGU": lambda: at.RNN(cells.MGU, 6, 20),
}
every_layer = pytest.mark.parametrize("kind", TORCH)


@every_layer
@pytest.mark.sample(3)
def test_torch_layers(kind: str) -> None:
    layer_ = TORCH[kind]()
    x, lengths = torch.randn(7, 7, 6), torch.tensor([1, 2, 3, 4, 5, 6, 7])
    small_ = compress.quantize(layer_, data=[x, (x, None)])
    with torch.no_grad():
        for arguments in ({}, {"lengths": lengths}, {"resets": torch.rand(7, 7) < 0.3}):
            outputs, wanted = small_(x, **arguments)[0], layer_(x, **arguments)[0]
            assert not torch.equal(outputs, wanted)
            assert error(outputs, wanted, axes=()) < limit("int8", "forward")
    assert 0 < small_.error < limit("int8", "forward")
    assert "weights of 8 bits" in repr(small_) and f"error {small_.error:.1e}" in repr(small_)
    assert small_.engine.name == "cpu" and not list(small_.parameters())
    assert small_.weight_ih_l0.dtype is torch.int8


def test_numpy_and_torch_are_one(rng: np.random.Generator) -> None:
    theirs = at.RNN(cells.PeepholeLSTM, 6, 20, 2, bidirectional=True)
    ours = an.RNN(cells.PeepholeLSTM, 6, 20, 2, bidirectional=True)
    ours.set_parameters({name: p.detach().numpy() for name, p in theirs.named_parameters()})
    x = rng.standard_normal((5, 3, 6)).astype("float32")
    quantized_ = compress.quantize(ours), compress.quantize(theirs)
    with torch.no_grad():
        outputs = quantized_[0].forward(x)[0], quantized_[1](torch.from_numpy(x))[0].numpy()
    assert np.array_equal(*outputs)
    arrays, buffers = quantized_[0].arrays, dict(quantized_[1].named_buffers())
    assert arrays.keys() == buffers.keys()
    assert all(np.array_equal(arrays[name], buffers[name].numpy()) for name in arrays)


def test_numpy_layers(tmp_path: Path, rng: np.random.Generator) -> None:
    layer_ = an.LSTM(6, 20, seed=0)
    x = rng.standard_normal((5, 3, 6)).astype("float32")
    small_ = compress.quantize(layer_, data=[x, (x, None)])
    output, _ = small_.forward(x)
    assert_close(output, layer_.forward(x)[0], "int8", "forward", axes=())
    assert small_.error == pytest.approx(error(output, layer_.forward(x)[0], axes=()))
    assert "weights of 8 bits, 3,360 bytes of 8,960, error" in repr(small_)
    *_, states = small_.forward(x, return_states="c")
    small_.prepare()
    steps, carried = [], None
    for row in x:
        one, carried = small_.step(row, carried)
        steps.append(one)
    assert_close(np.stack(steps), output, "float32", "training", axes=())
    assert_close(carried[1][0], states["c"][-1], "float32", "training", axes=())
    small_.save(tmp_path / "small.npz")
    again = compress.quantize(an.LSTM(6, 20, seed=1))
    again.load(tmp_path / "small.npz")
    assert np.array_equal(again.forward(x)[0], output)
    for twin in (copy.deepcopy(small_), pickle.loads(pickle.dumps(small_))):
        assert np.array_equal(twin.forward(x)[0], output)
    for call in (lambda: small_.forward(x, training=True), lambda: small_.backward(output)):
        with pytest.raises(NotImplementedError, match="weights of 8 bits, which have no gradients"):
            call()
    with pytest.raises(TypeError, match="weight_ih_l0: given dtype float32; expected int8"):
        small_.set_parameters(dict(small_.arrays) | {"weight_ih_l0": np.ones((80, 6), "f4")})


def test_a_model() -> None:
    """``quantize`` copies a model; the copy can be copied and loaded like any model."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.recurrent = nn.Linear(3, 6), at.LSTM(6, 20)
            self.shared, self.readout = self.recurrent, nn.Linear(20, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.readout(self.recurrent(self.enter(x))[0])

    model, x = Model().train(), torch.randn(5, 2, 3)
    before = {name: p.clone() for name, p in model.named_parameters()}
    small_ = compress.quantize(model, data=[x])
    assert isinstance(small_.recurrent, at.Quantized) and small_.shared is small_.recurrent
    assert isinstance(model.recurrent, at.LSTM) and model.training and model.recurrent.training
    assert not small_.training and not compress.quantize(at.LSTM(3, 4)).training
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    with torch.no_grad():
        wanted = small_(x)
        again = compress.quantize(Model())
        again.load_state_dict(small_.state_dict())
        assert all(torch.equal(twin(x), wanted) for twin in (copy.deepcopy(small_), again))
        twin = pickle.loads(pickle.dumps(small_.recurrent))
        assert torch.equal(twin(small_.enter(x))[0], small_.recurrent(small_.enter(x))[0])
        with torch.autocast("cpu", torch.bfloat16):
            assert small_.recurrent(torch.randn(5, 2, 6).bfloat16())[0].dtype is torch.float32
    with pytest.raises(TypeError, match="without a float32 layer"):
        compress.quantize(small_)


def test_measuring_leaves_no_trace() -> None:
    """Measuring runs an instance's own ``forward``, and leaves it in place."""
    layer_, other = at.LSTM(3, 8), an.GRU(3, 8, seed=0)
    layer_.forward = own = mock.Mock(wraps=layer_.forward)
    assert compress.quantize(layer_, data=[torch.randn(5, 2, 3)]).error > 0
    assert own.call_count == 1 and layer_.forward is own
    assert compress.quantize(other, data=[np.ones((5, 2, 3))]).error > 0
    assert "forward" not in vars(other)


class Idle(nn.Module):
    """A model that runs one of its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.runs, self.rests = at.GRU(3, 4), at.GRU(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.runs(x)[0]


def test_an_error_is_measured_or_none() -> None:
    """Data without a batch, such as an exhausted generator, is refused; unused layers have none."""
    for float_layer in (at.LSTM(3, 4), an.LSTM(3, 4)):
        for data in ([], iter([])):
            with pytest.raises(ValueError, match=r"data: given nothing .* A generator gives"):
                compress.quantize(float_layer, data=data)
    small_ = compress.quantize(Idle(), data=[torch.zeros(2, 1, 3), torch.randn(2, 1, 3)])
    assert small_.runs.error > 0 and small_.rests.error is None
    assert "error" in str(small_.runs) and "error" not in str(small_.rests)


def test_steps_and_packed_sequences() -> None:
    small_, x = compress.quantize(at.GRU(6, 20)), torch.randn(5, 3, 6)
    pack = nn.utils.rnn.pack_padded_sequence(x, [5, 4, 2])
    with torch.no_grad():
        output, _ = small_(x)
        packed, _ = nn.utils.rnn.pad_packed_sequence(small_(pack)[0])
        assert torch.equal(packed[:, 0], output[:, 0])
        for prepared in (False, True):
            steps, state = [], None
            for row in x:
                one, state = (small_.prepare() if prepared else small_).step(row, state)
                steps.append(one)
            assert_close(torch.stack(steps), output, "float32", "training", axes=())


def test_gradients_are_those_of_the_weights_in_float() -> None:
    float_ = at.LSTM(6, 20)
    small_, x = compress.quantize(float_), torch.randn(5, 3, 6, requires_grad=True)
    with torch.no_grad():
        for p in float_.parameters():
            if p.dim() > 1:
                p.copy_(torch.from_numpy(dequantized(p.numpy())))
    for run in (small_, float_):
        run(x)[0].square().sum().backward()
    twice = x.grad.clone()
    x.grad = None
    float_(x)[0].square().sum().backward()
    assert_close(twice, 2 * x.grad, "float32", "gradient")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_have_real_weights(dtype: torch.dtype) -> None:
    small_, x = compress.quantize(at.LSTM(6, 20)), torch.randn(5, 3, 6)
    with torch.no_grad():
        wanted = small_(x)[0]
        small_.flatten_parameters()
        output, (h, c) = small_.to(dtype)(x.to(dtype))
    assert {output.dtype, h.dtype, c.dtype} == {dtype} and small_.weight_hh_l0.dtype is torch.int8
    assert error(output.double(), wanted.double(), axes=()) < limit("int8", "forward")


@pytest.mark.slow
def test_it_compiles_into_one_graph() -> None:
    torch._dynamo.reset()  # after so many layers of other tests it compiles no more
    small_, x = compress.quantize(at.RNN(cells.PeepholeLSTM, 6, 20)), torch.randn(5, 3, 6)
    compiled = torch.compile(small_, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x)[0], small_(x)[0])


@every_layer
@pytest.mark.sample(3)
def test_training_with_rounded_weights(kind: str) -> None:
    layer_, x = TORCH[kind](), torch.randn(5, 5, 6)
    plain = copy.deepcopy(layer_)
    assert compress.fake_quantize(layer_) is layer_
    names = [n for n, p in plain.named_parameters() if p.dim() > 1]
    for name in names:
        wanted = dequantized(getattr(plain, name).detach().numpy())
        assert_close(getattr(layer_, name).detach(), wanted, "float32", "forward")
    layer_(x)[0].square().sum().backward()
    originals = {n: getattr(layer_.parametrizations, n).original for n in names}
    assert all(p.grad is not None and p.grad.any() for p in originals.values())
    small_ = compress.quantize(layer_)
    integers, scales = rounded(originals["weight_ih_l0"].detach().numpy())
    assert_close(small_.weight_ih_l0_scales, scales, "float32", "forward")
    assert np.array_equal(small_.weight_ih_l0.numpy(), integers)
    with pytest.raises(ValueError, match="with parametrizations"):
        compress.fake_quantize(layer_)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: compress.quantize(3), TypeError, "model: given int; expected a layer"),
        (lambda: compress.quantize(nn.LSTM(2, 3)), TypeError, "anycell.torch.accelerate"),
        (
            lambda: compress.quantize(at.LSTM(2, 3).double()),
            ValueError,
            r"float64; expected float32, which is rounded.*model\.float\(\)",
        ),
        (
            lambda: compress.quantize(an.LSTM(2, 3, dtype="float64")),
            ValueError,
            "float64; expected",
        ),
        (
            lambda: compress.quantize(compress.quantize(an.LSTM(2, 3))),
            TypeError,
            "given Quantized without a float32 layer of anycell.numpy",
        ),
        (
            lambda: an.Quantized(compress.quantize(an.LSTM(2, 3))),
            ValueError,
            "whose weight_ih_l0 is int8; expected float32",
        ),
        (lambda: compress.fake_quantize(nn.LSTM(2, 3)), TypeError, "layer: given LSTM; expected"),
        (lambda: compress.fake_quantize(an.LSTM(2, 3)), TypeError, "layer: given LSTM; expected"),
        (lambda: plan(cells.LSTM, 8, "int8", "gpu"), ValueError, "expected one of float32, bfloat"),
        (lambda: cpu.compiled(plan(cells.LSTM, 8, "int8"), backward=True), ValueError, "int8"),
    ],
)
def test_refusals(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


# -- with a readout that is fed back ---------------------------------------------------------------
def fed(kind: str = "LSTM", **options: Any) -> tuple[Any, Any]:
    """Returns a torch ``Feedback``, and the same one in NumPy."""
    torch.manual_seed(0)
    cell, sizes = getattr(cells, kind), {"P": 10} if kind == "LSTMP" else {}
    layer_ = at.RNN(cell, 4, 20, **sizes, **options)
    theirs = at.Feedback(layer_, nn.Linear(sizes.get("P", 20), 2))
    ours = an.RNN(cell, 4, 20, **sizes, **options)
    dense = an.Dense(sizes.get("P", 20), 2)
    ours.set_parameters({n: p.detach().numpy() for n, p in layer_.named_parameters()})
    dense.set_parameters({n: p.detach().numpy() for n, p in theirs.readout.named_parameters()})
    return theirs, an.Feedback(ours, dense, seed=1)


FORCED = {"forced": 1.0, "free": 0.0, "gaps": np.random.default_rng(0).random((9, 5)) < 0.4}


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "PeepholeLSTM", "LSTMP", "IndRNN"])
@pytest.mark.parametrize("forced", FORCED)
@pytest.mark.sample(every=7)
def test_feedback_in_8_bits(kind: str, forced: str, rng: np.random.Generator) -> None:
    """Both frontends have the same states and leave the originals unchanged."""
    theirs, ours = fed(kind)
    x, given = rng.standard_normal((9, 5, 4)).astype("float32"), FORCED[forced]
    tensor = torch.from_numpy(given) if isinstance(given, np.ndarray) else given
    small_ = compress.quantize(theirs, data=[(torch.from_numpy(x), {"forced": tensor})])
    small_ours = compress.quantize(ours, data=[(x, {"forced": given})])
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(x), forced=tensor)[0].numpy()
        y, state = small_(torch.from_numpy(x), forced=tensor)
    ours_y, ours_state = small_ours.forward(x, forced=given)
    assert not np.array_equal(y.numpy(), wanted)
    assert_close(y.numpy(), wanted, "int8", "forward", axes=())
    assert_close(ours_y, y.numpy(), "float32", "forward")
    many = isinstance(state, tuple)
    for s, other in zip(*[(v if many else (v,)) for v in (state, ours_state)], strict=True):
        assert np.array_equal(s.numpy(), other)
    for layer_ in (small_.layer, small_ours.layer):
        assert 0 < layer_.error < limit("int8", "forward")
        assert f"error {layer_.error:.1e}" in repr(layer_)
    assert not isinstance(theirs.layer, at.Quantized) and not isinstance(ours.layer, an.Quantized)


def test_feedback_is_measured_on_the_same_steps(rng: np.random.Generator) -> None:
    """Steps forced at random are drawn once, for both the layer and its quantized copy."""
    theirs, ours = fed()
    x = rng.standard_normal((40, 5, 4)).astype("float32")
    state = copy.deepcopy(ours._generator.bit_generator.state)
    small_ = compress.quantize(theirs, data=[(torch.from_numpy(x), {"forced": 0.5})])
    small_ours = compress.quantize(ours, data=[(x, {"forced": 0.5})])
    assert ours._generator.bit_generator.state == state
    for layer_ in (small_.layer, small_ours.layer):
        assert 0 < layer_.error < limit("int8", "forward")


def test_feedback_is_what_rounding_makes_of_it(rng: np.random.Generator) -> None:
    theirs, _ = fed()
    x, forced = rng.standard_normal((9, 5, 4)).astype("float32"), FORCED["gaps"]
    weights = {n.removesuffix("_l0"): p for n, p in theirs.layer.named_parameters()}
    weights |= dict(theirs.readout.named_parameters())
    arrays = {n: p.detach().numpy() for n, p in weights.items()}
    small_ = compress.quantize(theirs)
    # Scales of a row's numbers, next to the number that marks the row as free.
    for scale in (1.0, 1e-3, 1e3, 0.0, 1e-25):
        scaled = x * np.float32(scale)
        with long_functions(), torch.no_grad():
            y, _ = small_(torch.from_numpy(scaled), forced=torch.from_numpy(forced))
        wanted = feedbacks.by_rounding(arrays, scaled, forced)
        assert_close(y.numpy(), wanted, "float32", "training", f"{scale}", axes=())


def test_feedback_is_made_of_quantized_layers_and_goes_where_models_go(tmp_path: Path) -> None:
    theirs, ours = fed()
    x, forced = torch.randn(9, 5, 4), torch.arange(9) < 4
    small_ = compress.quantize(theirs)
    with torch.no_grad():
        right = small_(x, forced=forced)[0]
        made = at.Feedback(compress.quantize(theirs.layer), theirs.readout)
        torch.save(small_.state_dict(), tmp_path / "small.pt")
        loaded = compress.quantize(fed()[0])
        for buffer in loaded.layer.buffers():
            buffer.zero_()
        loaded.load_state_dict(torch.load(tmp_path / "small.pt"))
        twins = [made, loaded, copy.deepcopy(small_), pickle.loads(pickle.dumps(small_))]
        assert all(torch.equal(twin(x, forced=forced)[0], right) for twin in twins)
        assert small_(x, forced=forced[:, None].expand(9, 5))[0].equal(right)
    small_ours = compress.quantize(ours)
    right = small_ours.forward(x.numpy(), forced=forced.numpy())[0]
    twins = [pickle.loads(pickle.dumps(small_ours)), copy.deepcopy(small_ours)]
    twins += [an.Feedback(compress.quantize(ours.layer), ours.readout)]
    for twin in twins:
        assert np.array_equal(twin.forward(x.numpy(), forced=forced.numpy())[0], right)
    with pytest.raises(NotImplementedError, match="weights of 8 bits, which have no gradients"):
        small_ours.forward(x.numpy(), forced=0.5, training=True)
    ours.readout.parameters["weight"][0, 0] = np.nan
    with pytest.raises(ValueError, match="readout: given one whose weight has infinities or NaN"):
        compress.quantize(ours)


def test_gradients_through_feedback_are_those_of_real_weights() -> None:
    theirs, _ = fed()
    small_, x, forced = compress.quantize(theirs), torch.randn(9, 5, 4), torch.arange(9) < 4
    with torch.no_grad():
        for p in theirs.layer.parameters():
            if p.dim() > 1:
                p.copy_(torch.from_numpy(dequantized(p.numpy())))
    for run in (small_, theirs):
        run(x, forced=forced)[0].square().sum().backward()
    for mine, right in zip(small_.readout.parameters(), theirs.readout.parameters(), strict=True):
        assert_close(mine.grad, right.grad, "float32", "gradient")


def test_what_a_loader_yields() -> None:
    series = torch.utils.data.TensorDataset(torch.randn(4, 5, 3), torch.randn(4, 1))
    loader = torch.utils.data.DataLoader(series, 2)
    float_ = at.LSTM(3, 8, batch_first=True)
    with pytest.raises(TypeError, match=r"data: given a list of 2, .* data=\(x for x, _ in loader"):
        compress.quantize(float_, data=loader)
    assert compress.quantize(float_, data=(x for x, _ in loader)).error > 0


def test_a_batch_that_lacks_an_argument() -> None:
    model = nn.Sequential(at.LSTM(4, 8))
    model.forward = lambda x, forced: model[0](x)
    with pytest.raises(TypeError, match=r"data: given 1 argument.*'forced'. Make each batch a"):
        compress.quantize(model, data=[torch.randn(9, 5, 4)])


def test_real_numbers_are_not_cut_down_to_integers() -> None:
    """Models and layers refuse to load real numbers as integers, strict or not."""
    float_ = nn.Sequential(nn.Linear(3, 3), at.LSTM(3, 8))
    small_ = compress.quantize(float_)
    before = {name: t.clone() for name, t in small_[1].state_dict().items()}
    for model, state in ((small_, float_.state_dict()), (small_[1], float_[1].state_dict())):
        for strict in (True, False):
            with pytest.raises(RuntimeError, match=r"ih_l0: given torch\.float32; expected"):
                model.load_state_dict(state, strict=strict)
    assert all(torch.equal(t, before[name]) for name, t in small_[1].state_dict().items())
    small_.load_state_dict(compress.quantize(float_).state_dict())
    small_.load_state_dict({"0.weight": torch.zeros(3, 3)}, strict=False)
