"""What surrounds training on NumPy: schedules, early stopping, normalisation; against PyTorch's."""

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import load
from tolerances import assert_close

import anycell.numpy as an
from anycell.numpy.check import numpy_dtype


# -- schedules -------------------------------------------------------------------------------------
def of_torch(make: Any, losses: list[float] | None = None, steps: int = 40) -> list[float]:
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler, rates = make(torch, optimizer), []
    for step in range(steps):
        if losses is None:
            rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step() if losses is None else scheduler.step(losses[step])
        if losses is not None:
            rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_cosine_is_that_of_torch() -> None:
    def make(torch: Any, optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40, eta_min=0.01)

    schedule = an.cosine(0.1, 40, final=0.01)
    assert [schedule(step) for step in range(40)] == pytest.approx(of_torch(make))
    assert schedule(40) == schedule(1000) == 0.01


def test_a_warmup_rises_to_the_peak() -> None:
    schedule = an.cosine(1.0, 10, warmup=4)
    rising = [0.2, 0.4, 0.6, 0.8, 1.0]
    assert [schedule(step) for step in range(5)] == pytest.approx(rising)
    assert schedule(7) == pytest.approx(0.5) and schedule(10) == 0.0


@pytest.mark.parametrize("rise", [0.3, 0.5, 0.025])
def test_one_cycle_is_that_of_torch(rise: float) -> None:
    def make(torch: Any, optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.7, total_steps=40, pct_start=rise, cycle_momentum=False
        )

    if rise * 40 > 1:
        schedule = an.one_cycle(0.7, 40, rise=rise)
        rates = [schedule(step) for step in range(39)]
        assert rates == pytest.approx(of_torch(make, steps=39))
    else:  # there torch divides by zero
        assert an.one_cycle(0.7, 40, rise=rise)(0) == 0.7


def test_a_plateau_is_that_of_torch() -> None:
    rng = np.random.default_rng(0)
    losses = [*np.abs(rng.normal(size=36) + 1.0), math.nan, 1.0, 1.0, 1.0]

    def make(torch: Any, optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=2, min_lr=0.02
        )

    plateau = an.Plateau(0.1, factor=0.5, patience=2, lowest=0.02)
    rates = [plateau(loss) for loss in losses]
    assert rates == pytest.approx(of_torch(make, losses)) and rates[-1] == 0.02


def test_inverse_sigmoid_falls_from_one_to_zero() -> None:
    schedule = an.inverse_sigmoid(10.0)
    values = [schedule(step) for step in range(200)]
    assert values == sorted(values, reverse=True) and values[0] == pytest.approx(10 / 11)
    assert schedule(10**9) < 1e-300


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: an.cosine(-1.0, 10), "peak: given -1.0"),
        (lambda: an.cosine(1.0, 10, warmup=10), "warmup: given 10"),
        (lambda: an.one_cycle(1.0, 1), "steps: given 1"),
        (lambda: an.one_cycle(1.0, 10, rise=1.0), "rise: given 1.0"),
        (lambda: an.inverse_sigmoid(0.5), "scale: given 0.5"),
        (lambda: an.Plateau(0.1, factor=1.0), "factor: given 1.0"),
        (lambda: an.EarlyStopping(an.Dense(1, 1), 0), "patience: given 0"),
        (lambda: an.BatchNorm(2, momentum=1.5), "momentum: given 1.5"),
        (lambda: an.BatchNorm(2).forward(np.ones((1, 1, 2)), training=True), "given 1 step"),
        (lambda: an.Standardise(2).fit([[1.0, np.nan]]), r"feature\(s\) \[1\]"),
        (lambda: an.Standardise(2).fit([[np.inf, 1.0]]), r"feature\(s\) \[0\]"),
        (lambda: an.Standardise(2).forward([1.0]), r"x: given shape \[1\]"),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# -- early stopping --------------------------------------------------------------------------------
def test_the_best_arrays_come_back() -> None:
    layers = [an.LSTM(2, 4, seed=0), an.BatchNorm(2)]
    stop = an.EarlyStopping(layers, patience=3)
    with pytest.raises(RuntimeError, match="a finite loss"):
        stop.restore()
    stops, kept = [], []
    for loss in (2.0, 1.0, math.nan, 1.0, 1.5):
        for layer in layers:
            for array in layer.arrays.values():
                array += 1.0
        stops.append(stop(loss))
        kept.append([{n: a.copy() for n, a in layer.arrays.items()} for layer in layers])
    assert stops == [False, False, False, False, True]
    before = layers[0].prepare().step(np.ones((1, 2)))[0]
    stop.restore()
    assert not np.array_equal(layers[0].step(np.ones((1, 2)))[0], before)  # it packs again
    for layer, best in zip(layers, kept[1], strict=True):
        assert all(np.array_equal(layer.arrays[name], best[name]) for name in best)


# -- normalisation ---------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int32"])
def test_standardised_data_have_their_dtype(dtype: str) -> None:
    x = np.array([[1.0], [3.0]]).astype(numpy_dtype(dtype) if dtype != "int32" else dtype)
    y = an.Standardise(1).fit(x).forward(x)
    assert y.dtype.name == (dtype if dtype != "int32" else "float64")
    assert y.tolist() == [[-1.0], [1.0]]


def test_data_are_standardised_and_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal([5.0, -2.0, 3.0], [2.0, 0.1, 0.0], (30, 4, 3))
    x[3, 1, 0] = np.nan
    mask = rng.random((30, 4)) < 0.8
    scale = an.Standardise(3, dtype="float64").fit(x, mask=mask)
    y = scale.forward(x)
    assert np.isnan(y).sum() == 1 and not y[..., 2].any()
    assert_close(np.nanmean(y[mask][:, :2], 0) + 1.0, np.ones(2), "float64", "forward")
    assert_close(np.nanstd(y[mask][:, :2], 0), np.ones(2), "float64", "forward")
    assert_close(
        scale.inverse(np.nan_to_num(y)),
        np.where(np.isnan(x), scale.arrays["mean"], x),
        "float64",
        "forward",
    )
    scale.save(tmp_path / "scale.npz")
    again = an.Standardise(3, dtype="float64")
    again.load(tmp_path / "scale.npz")
    assert np.array_equal(again.forward(x), y, equal_nan=True)


@pytest.mark.parametrize("value", [0.1, np.float32(-0.3), 1e10 + 0.1])
def test_what_is_constant_is_divided_by_1(value: float) -> None:
    """Also a number whose mean, added up, is another one."""
    x = np.full((1000, 2), value)
    x[3, 0] = np.nan
    scale = an.Standardise(2).fit(x)
    assert (scale.arrays["mean"] == value).all() and (scale.arrays["std"] == 1.0).all()


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_batch_norm_is_that_of_torch(batch_first: bool, masked: bool, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    steps, rows, size = 7, 4, 3
    norm = an.BatchNorm(size, batch_first=batch_first, dtype=dtype)
    theirs = torch.nn.BatchNorm1d(size, dtype=torch.float64)
    norm.set_parameters({name: rng.normal(size=size) ** 2 + 0.1 for name in norm.arrays})
    state = {name: torch.tensor(array, dtype=torch.float64) for name, array in norm.arrays.items()}
    theirs.load_state_dict(state | {"num_batches_tracked": torch.tensor(0)})
    for training in (True, True, False):
        x = rng.normal(3.0, 2.0, (steps, rows, size)).astype(dtype)
        grad = rng.normal(size=x.shape).astype(dtype)
        valid, options = np.ones((steps, rows), bool), {}
        if masked:
            mask, lengths = rng.random((steps, rows)) < 0.7, np.array([7, 3, 0, 5])
            valid = mask & (np.arange(steps)[:, None] < lengths)
            options = {"mask": mask.T if batch_first else mask, "lengths": lengths}
        ours = np.where(valid[..., None], x, np.nan).astype(dtype)
        turn = (lambda a: a.swapaxes(0, 1)) if batch_first else (lambda a: a)
        y = turn(norm.forward(turn(ours), training=training, **options))
        theirs.train(training)
        rows_in = torch.tensor(x[valid], dtype=torch.float64, requires_grad=True)
        right = theirs(rows_in)
        assert y.dtype == dtype and not y[~valid].any()
        assert_close(y[valid], right.detach(), dtype, "forward")
        for name in ("running_mean", "running_var"):
            assert_close(norm.arrays[name], getattr(theirs, name), dtype, "forward", name)
        if training:
            theirs.zero_grad()
            right.backward(torch.tensor(grad[valid], dtype=torch.float64))
            unmasked = np.where(valid[..., None], grad, np.nan).astype(dtype)
            d_x = turn(norm.backward(turn(unmasked)))
            assert d_x.dtype == dtype and not d_x[~valid].any()
            assert_close(d_x[valid], rows_in.grad, dtype, "gradient")
            for name in ("weight", "bias"):
                assert_close(norm.grads[name], getattr(theirs, name).grad, dtype, "gradient", name)


def test_statistics_are_saved_and_not_learned(tmp_path: Path) -> None:
    norm = an.BatchNorm(2)
    norm.forward(np.random.default_rng(0).normal(2.0, 1.0, (5, 3, 2)), training=True)
    norm.save(tmp_path / "norm.npz")
    other = an.BatchNorm(2)
    other.load(tmp_path / "norm.npz")
    assert other.arrays["running_mean"].all() and list(other.parameters) == ["weight", "bias"]
    copy = pickle.loads(pickle.dumps(norm))
    assert np.array_equal(copy.arrays["running_var"], norm.arrays["running_var"])
    an.Adam(norm).layers[0].backward(np.ones((5, 3, 2)))


# -- all of it, on a series ------------------------------------------------------------------------
@pytest.mark.slow
def test_the_example_looks_a_year_ahead() -> None:
    pytest.importorskip("statsmodels")
    teacher, sampling, repeat = load("examples/free_run.py").main(["--quick"])
    assert teacher < 0.7 * repeat and sampling < 0.7 * repeat


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_data_far_from_zero_keep_their_digits(dtype: str) -> None:
    """Statistics are of float64, whatever the data; results have the data's dtype."""
    x = np.random.default_rng(0).normal(1e6, 5.0, (200, 3)).astype(dtype)
    scale = an.Standardise(3).fit(x)
    y, wide = scale.forward(x), x.astype("float64")
    assert y.dtype == dtype and scale.inverse(y).dtype == np.float64
    assert_close(y, (wide - wide.mean(0)) / wide.std(0), dtype, "forward")
    assert np.abs(scale.inverse(y) - wide).max() < (1e-8 if dtype == "float64" else 1e-5)
    assert an.Standardise(3, dtype="float32").fit(x).forward(x).dtype == np.float32
    assert repr(scale) == "Standardise(3)" and "float32" in repr(an.Standardise(3, "float32"))
