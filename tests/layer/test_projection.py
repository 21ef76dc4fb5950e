"""The input projection, by the framework's matmul or by the kernel: who does it must not show."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from integers import by_integers  # noqa: E402
from problems import assert_solved, draw, forget_passes, random_problem  # noqa: E402
from tolerances import assert_close  # noqa: E402

import anycell  # noqa: E402
import anycell.torch as at  # noqa: E402
from anycell import cells  # noqa: E402
from anycell import layer as layers  # noqa: E402
from anycell.engines import cpu  # noqa: E402
from anycell.engines.cpu.isa import current  # noqa: E402
from anycell.engines.cpu.layout import Layout  # noqa: E402
from anycell.layer.recipe import View  # noqa: E402
from anycell.plan import plan  # noqa: E402
from tests.conformance.on_torch import by_rnn  # noqa: E402

SIZES = {"LSTMP": {"P": 3}}
NAMES = [
    name
    for name in cells.__all__
    if Layout(plan(getattr(cells, name), 5, sizes=SIZES.get(name, {})), False, current()).projecting
]


@pytest.fixture
def by(set_layer: Callable[..., None]) -> Callable[[str, Callable[[], Any]], Any]:
    """Calls a function with the projection "by the kernel" or "by the host"."""

    def call(who: str, function: Callable[[], Any]) -> Any:
        asked = []

        def projects(*_: Any) -> bool:
            asked.append(who)
            return who == "kernel"

        set_layer(projects=projects)
        found = function()
        assert asked, "no layer has run on the kernels"
        return found

    return call


def test_which_cells() -> None:
    """Those that need nothing of the projection but its sum with the recurrent one."""
    assert {"LSTM", "PeepholeLSTM", "RNN", "JANET", "ZoneoutLSTM"} <= set(NAMES)
    assert not {"GRU", "LayerNormLSTM", "IndRNN", "sLSTM"} & set(NAMES)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.more), "float64"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sample(every=11)
def test_same_results(name: str, dtype: str, by: Any) -> None:
    many = 300 if dtype == "float64" else 40  # more than a block of the sum
    for size in ((5, 3, 7, 1), (2, 1, 1, 33), (4, 9, many, 33)):
        for has in ((), ("mask",), ("mask", "resets")):
            problem = draw(getattr(cells, name), size, (*has, "bidirectional", "layers"), dtype)
            assert_solved(by("kernel", lambda: by_rnn(problem)), problem)  # noqa: B023


def test_same_bits(by: Any) -> None:
    """For any number of threads, slice of the batch, and lie of the input in memory."""
    layer, x = at.LSTM(20, 40, batch_first=True), torch.randn(70, 9, 20)

    def solve() -> None:
        right, _ = layer(x)
        threads = torch.get_num_threads()
        try:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                assert torch.equal(layer(x)[0], right)
        finally:
            torch.set_num_threads(threads)
        for part in (slice(0, 1), slice(5, 40), slice(69, 70)):
            assert torch.equal(layer(x[part])[0], right[part])
        wide = torch.full((9, 70, 50), float("nan"))
        wide[:, :, 20:40] = x.transpose(0, 1)
        assert torch.equal(layer(wide[:, :, 20:40].transpose(0, 1))[0], right)

    by("kernel", solve)


def test_who_projects() -> None:
    """The kernel, if both weights stay in a core's own cache and there is work for packing one."""
    chosen = plan(cells.LSTM, 128)
    recurrent = cpu.compiled(chosen).projecting
    assert layers.heuristics.projects(chosen, recurrent, 96 * 128, 128)
    assert not layers.heuristics.projects(chosen, recurrent, 96 * 128, 1024)
    assert layers.heuristics.projects(chosen, recurrent, 96 * 128, 1024, holes=True)
    assert not layers.heuristics.projects(chosen, recurrent, 20, 128, holes=True)


@pytest.mark.parametrize("name", ["LSTM", "GRU", "LayerNormLSTM", "MGU", "IndRNN", "sLSTM"])
@pytest.mark.sample(3)
def test_no_choice_makes_a_kernel_project_that_cannot(
    name: str, set_layer: Callable[..., None], runs: list[layers.pass_tables.PassTables]
) -> None:
    """Neither forward, nor backward, whose kernels read gradients."""
    set_layer(projects=lambda *_: True)
    problem = draw(getattr(cells, name), (5, 3, 7, 33), ("mask", "bidirectional"))
    assert_solved(by_rnn(problem), problem)
    inside = {run.backward: run.inputs for run in runs}
    assert inside == {False: 7 if name in NAMES else 0, True: 0}


def test_a_single_step_with_resets(runs: list[Any]) -> None:
    """Weights are not packed, but by a backward pass."""
    for has in ((), ("state",), ("reset_state",), ("state", "reset_state", "mask")):
        for name in ("GRU", "PeepholeLSTM"):
            words = "resets", "bidirectional", *has
            problem = draw(getattr(cells, name), (1, 5, 7, 33), words, "float64")
            assert_solved(by_rnn(problem), problem)
    assert {(run.backward, run.single) for run in runs} == {(False, True), (True, False)}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["LSTM", "GRU", "JANET"])
@pytest.mark.sample(every=3)
def test_steps_of_one_row(name: str, dtype: str, runs: list[Any], set_layer: Any) -> None:
    """Forward passes of few steps take weights as they are; others are right beside them."""
    set_layer(UNPACKED_BYTES=1)
    most = layers.heuristics.UNPACKED_STEPS
    for steps, batch, has in (
        (2, 1, ()), (most, 1, ("state",)), (5, 1, ("layers", "state")),
        (most + 1, 1, ()), (2, 2, ()), (5, 1, ("bidirectional",)), (5, 1, ("mask",)),
        (5, 1, ("resets",)),
    ):  # fmt: skip
        runs.clear()
        problem = draw(getattr(cells, name), (steps, batch, 7, 33), has, dtype)
        assert_solved(by_rnn(problem), problem)
        alone = steps <= most and batch == 1 and not {"bidirectional", "mask", "resets"} & {*has}
        assert {run.single for run in runs if not run.backward} == {alone}, (steps, batch, has)
        assert not any(run.single for run in runs if run.backward)


def test_steps_of_one_row_in_threads(runs: list[Any], set_layer: Any) -> None:
    """They share the columns of products, with the same bits; checkpoints pack the weights."""
    set_layer(WORTH_A_THREAD=0)
    layer, x, results = at.LSTM(64, 200), torch.randn(9, 1, 64), []
    for count in (1, 2, 3):
        with anycell.threads(count):
            results.append(layer(x)[0])
    assert torch.equal(results[1], results[0]) and torch.equal(results[2], results[0])
    assert all(run.single for run in runs) and runs
    runs.clear()
    again = at.LSTM(64, 200, checkpoint=3)
    again.load_state_dict(layer.state_dict())
    assert_close(again(x)[0].detach(), results[0].detach(), "float32", "forward")
    assert runs and not any(run.single for run in runs)


def test_which_steps_of_one_row_are_packed() -> None:
    """Those of small weights, and many; and those whose packed weights have pairs of numbers."""
    unpacked, many = layers.heuristics.unpacked, layers.heuristics.UNPACKED_STEPS
    large, small = plan(cells.LSTM, 256), plan(cells.LSTM, 64)
    assert unpacked(large, 2, 256) and unpacked(large, many, 256)
    assert not unpacked(large, many + 1, 256) and not unpacked(large, 1, 256)
    assert unpacked(small, 4, 64) and not unpacked(small, 5, 64)
    assert not unpacked(plan(cells.LSTM, 256, "bfloat16"), 2, 256)


@pytest.mark.parametrize("isa", cpu.isa.available())
def test_which_steps_of_integers_are_packed(isa: str) -> None:
    """More are not where no instruction adds up four of their products."""
    unpacked, many = layers.heuristics.unpacked, layers.heuristics.UNPACKED_STEPS
    large, small = plan(cells.LSTM, 256, "int8"), plan(cells.LSTM, 128, "int8")
    with cpu.isa.force(isa) as target:
        for layer, inputs, steps in ((large, 256, 16), (small, 128, 4)):
            most = steps if target.dot else many
            assert unpacked(layer, most, inputs) and not unpacked(layer, most + 1, inputs)


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
@pytest.mark.sample(1)
def test_bits_of_integers_without_packing(
    name: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch,
    runs: list[layers.pass_tables.PassTables],
) -> None:  # fmt: skip
    """A single step of few rows, and few steps of one row, have the bits of packed weights."""
    monkeypatch.setattr(layers.heuristics, "WORTH_A_THREAD", 0)
    monkeypatch.setattr(layers.heuristics, "UNPACKED_BYTES", 1)
    monkeypatch.setattr(layers.heuristics, "UNPACKED_BYTES_IN_PARTS", 1)
    few, most = layers.heuristics.few, layers.heuristics.UNPACKED_STEPS
    for n, (shape, how, single) in enumerate((
        ((1, 1, 33), {}, True), ((1, 4, 33), {}, True), ((1, 3, 300), {}, True),
        ((1, 2, 33), {"masked": True, "reverse": True}, True),
        ((1, 2, 33), {"resets": True}, True), ((1, 16, 300), {}, True),
        ((7, 1, 300), {}, True), ((most, 1, 20), {}, True),
        ((1, 200, 33), {}, False), ((most + 1, 1, 20), {}, False), ((2, 2, 20), {}, False),
    )):  # fmt: skip
        problem = random_problem(getattr(cells, name), shape, rng, "float64", **how)
        problem = problem.astype("float32")
        results = []
        for road in (few, lambda *_: False):
            monkeypatch.setattr(layers.heuristics, "few", road)
            forget_passes()
            runs.clear()
            results.append(by_integers(problem, threads=1 + n % 3, projected=True))
            assert {run.single for run in runs} == {single and road is few}, (shape, how)
        for key, value in results[0].items():
            assert np.array_equal(value, results[1][key]), (shape, how, key)
    forget_passes()


def test_weights_with_dense_rows_are_packed() -> None:
    """Products without packing multiply dense columns of integers alone."""
    of_view = functools.partial(View, 0, (64, 128))
    one, eight = plan(cells.LSTM, 32, "float32", "cpu"), plan(cells.LSTM, 32, "int8", "cpu")
    rows, columns = of_view((128, 1), 4), of_view((1, 64), 4)
    assert layers.heuristics.few(one, 1, rows) and layers.heuristics.few(one, 1, columns)
    assert layers.heuristics.few(eight, 1, columns) and not layers.heuristics.few(eight, 1, rows)
    assert not layers.heuristics.few(eight, layers.heuristics.FEW_ROWS_TURNED + 1, columns)
