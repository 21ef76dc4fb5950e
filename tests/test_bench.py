"""The benchmark: its statistics, its gate, its peers, its reports, and its refusals.

One file, because most tests run the same small problem, or read the same report.
"""

import contextlib
import functools
import importlib
import importlib.util
import itertools
import json
import math
import operator
import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import numpy as np
import pytest
import tolerances
from processes import load, python

from anycell import cli
from anycell.machine import usable_cores
from anycell.requirement import install
from anycell.usage import UsageError, need

torch = pytest.importorskip("torch")  # without which nothing is measured
from torch_layers import lacks  # noqa: E402

from anycell.bench import (  # noqa: E402
    chart,
    command,
    estimate,
    gate,
    machine,
    memory,
    probe,
    report,
    results,
    runner,
    stats,
    timing,
    torch_layers,
)
from anycell.bench.contenders import CONTENDERS, make  # noqa: E402
from anycell.bench.problem import Problem, find_cell  # noqa: E402
from anycell.bench.shapes import GPU_SIZED, QUICK, Shape, all_shapes, select  # noqa: E402
from anycell.bench.tasks import Unsupported  # noqa: E402

SMALL = Shape("small", "this test", T=6, B=3, I=5, H=7, L=2, D=2)
CLASSICS = "LSTM", "GRU", "RNN", "PeepholeLSTM", "LayerNormLSTM"
OWN_CELL = """
from anycell import cell, sigmoid, tanh

@cell(gates="f g", state="h", params="a=1")
def Own(x, r, s, p):
    f, g = x + r
    f = sigmoid(f)
    return f * s.h + (1 - f) * tanh(p.a * g)

NotACell = 1
"""


@pytest.fixture
def own_cell(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(OWN_CELL)
    return f"{path}:Own"


# -- statistics ------------------------------------------------------------------------------------
def test_statistics_ignore_one_preempted_run() -> None:
    calm = [1.0, 1.1, 0.9, 1.0, 1.05]
    assert stats.median([*calm[:4], 50.0]) == pytest.approx(1.0)
    assert stats.iqr([*calm[:4], 50.0]) < 0.2
    assert stats.iqr([1.0]) == 0.0


def test_ratio_is_taken_round_by_round() -> None:
    # The machine is ten times slower in some rounds; the ratio of the two contenders is always 2.
    pace = [1.0, 10.0, 1.0, 10.0, 1.0]
    assert stats.paired_ratio([2 * p for p in pace], pace) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="unpaired"):
        stats.paired_ratio([1.0], [1.0, 2.0])


def test_geometric_mean() -> None:
    assert stats.geometric_mean([0.5, 2.0, 1.0]) == pytest.approx(1.0)
    assert math.isnan(stats.geometric_mean([]))


class Clock:
    """A stub of the module ``time``, which only the contenders advance."""

    now = 0.0
    used = 0.0  # of the processor, by threads that spin in the background
    spinner = ""
    spins_until = 0.0

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.used

    def sleep(self, seconds: float) -> None:
        self.used += min(max(self.spins_until - self.now, 0.0), seconds)
        self.now += seconds


@dataclass
class Worker:
    name: str
    seconds: float
    clock: Clock
    log: list[str]
    spins: float = 0.0  # seconds after a call
    pause: float = 1.0  # not timed

    def prepare(self) -> None:
        self.log.append(f"prepare {self.name}")
        self.clock.now += self.pause

    def call(self) -> None:
        self.log.append(self.name)
        if self.clock.spinner != self.name and self.clock.now < self.clock.spins_until:
            self.log.append(f"{self.clock.spinner} takes a core from {self.name}")
        self.clock.now += self.seconds
        self.clock.spinner, self.clock.spins_until = self.name, self.clock.now + self.spins


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(timing, "time", fake)
    return fake


def test_runs_interleave_and_rotate(clock: Clock) -> None:
    log: list[str] = []
    contenders = {name: Worker(name, 0.25, clock, log) for name in "abc"}
    samples = timing.interleave(contenders, seconds=0.0)
    assert samples == {name: [0.25] * timing.MIN_ROUNDS for name in "abc"}
    calls = [entry for entry in log if not entry.startswith("prepare")]
    assert "".join(calls) == "aabbcc" + "abc" + "bca" + "cab" + "abc" + "bca"
    # Every single call is prepared, warm-ups included.
    assert all(a == f"prepare {b}" for a, b in zip(log[::2], log[1::2], strict=True))


def test_short_calls_are_timed_in_blocks(clock: Clock) -> None:
    log: list[str] = []
    samples = timing.interleave({"a": Worker("a", 1e-4, clock, log)}, seconds=0.0)
    assert samples["a"] == pytest.approx([1e-4] * timing.MIN_ROUNDS)
    assert log.count("a") >= timing.MIN_ROUNDS * timing.BLOCK_S / 1e-4


def test_rounds_go_on_until_the_time_is_spent(clock: Clock) -> None:
    samples = timing.interleave({"a": Worker("a", 1.0, clock, [])}, seconds=40.0)
    assert 15 <= len(samples["a"]) <= 25  # a second to prepare, a second to run


@pytest.mark.parametrize("spins", [0.0, 5e-3, 33e-3, 0.1])
@pytest.mark.sample(1)
def test_nobody_is_timed_while_anothers_threads_spin(clock: Clock, spins: float) -> None:
    log: list[str] = []
    contenders = {
        "spinner": Worker("spinner", 0.25, clock, log, spins, pause=0.0),
        "next": Worker("next", 0.25, clock, log, pause=0.0),
    }
    samples = timing.interleave(contenders, seconds=0.0)
    assert samples["next"] == [0.25] * timing.MIN_ROUNDS
    timed = log[2 * 2 * len(contenders) + bool(spins) :]  # after two calls of each to warm up
    assert [entry for entry in timed if "takes a core" in entry] == []


def test_a_pause_lasts_as_long_as_threads_spin(clock: Clock) -> None:
    clock.spins_until = 33e-3
    timing.settle()
    assert 33e-3 <= clock.now <= 33e-3 + 2 * timing.WINDOW_S
    clock.spins_until = math.inf
    with pytest.warns(RuntimeWarning, match="still at work 0.5 s.*Unset OMP_WAIT_POLICY"):
        timing.settle()


# -- the gate --------------------------------------------------------------------------------------
def test_limits_are_those_of_the_test_suite() -> None:
    assert gate.LIMITS.items() <= tolerances.LIMITS.items()


def test_relative_error() -> None:
    one = np.ones(4)
    assert gate.relative_error(one, one) == 0.0
    assert gate.relative_error(1.01 * one, one) == pytest.approx(0.01)
    assert gate.relative_error(one[:3], one) == math.inf
    assert gate.relative_error(np.full(4, np.nan), one) == math.inf
    assert gate.relative_error(0 * one, 0 * one) == 0.0
    assert gate.relative_error(one, 0 * one) == math.inf


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "int8"])
def test_gate_refuses_what_is_just_beyond_the_limit(dtype: str) -> None:
    limits = {"output": gate.LIMITS[dtype, "forward"]}
    if dtype != "int8":  # which has no gradients
        limits["weight_hh_l0"] = gate.LIMITS[dtype, "gradient"]
    want = dict.fromkeys(limits, np.ones(3))
    for name, limit in limits.items():
        gate.check(gate.errors({**want, name: want[name] * (1 + 0.9 * limit)}, want), dtype)
        with pytest.raises(gate.Wrong, match=f"{name} is off by"):
            gate.check(gate.errors({**want, name: want[name] * (1 + 1.2 * limit)}, want), dtype)
        with pytest.raises(gate.Wrong, match=f"{name} is missing"):
            gate.check(gate.errors({n: want[n] for n in want if n != name}, want), dtype)


# -- shapes and problems ---------------------------------------------------------------------------
def test_shapes() -> None:
    assert len(all_shapes()) == 13
    assert {s.name for s in select(["all"])} == set(all_shapes()) - GPU_SIZED
    assert [s.name for s in select(["sb3", "basecaller", "sb3"])] == ["sb3", "basecaller"]
    name = "T20B4I64H128"
    assert select([name]) == [Shape(name, "sizes as given", 20, 4, 64, 128, 1, 1)]
    assert str(select(["T2B3I4H5L6D2"])[0]) == "T2 B3 I4 H5 L6 D2"
    # Two layers and directions: the second layer reads both directions of the first.
    lstm = Problem(find_cell("LSTM"), SMALL)
    assert lstm.flops("inference") == 2 * 6 * 3 * 28 * ((5 + 7) + (14 + 7)) * 2
    assert lstm.flops("training") == 3 * lstm.flops("inference")
    assert lstm.flops("recurrence") == 2 * 6 * 3 * 28 * 7
    projected = Problem(find_cell("LSTMP"), SMALL)  # 7 units, projected to 3
    assert projected.flops("inference") == 2 * 6 * 3 * 2 * (28 * (5 + 3 + 6 + 3) + 2 * 7 * 3)
    with pytest.raises(UsageError, match="did you mean deepar"):
        select(["depar"])
    with pytest.raises(UsageError, match="at least 1"):
        select(["T20B0I64H128"])
    for name in ("T20B4I64", "T20B4I64H128D3", "xT20B4I64H128"):
        with pytest.raises(UsageError, match="unknown shape"):
            select([name])


def test_problem_is_the_same_for_everybody() -> None:
    cell = find_cell("PeepholeLSTM")
    a, b = Problem(cell, SMALL), Problem(cell, SMALL)
    assert a.dy.shape == (6, 3, 14)  # dy is drawn first here
    assert np.array_equal(a.x, b.x) and np.array_equal(a.dy, b.dy)
    assert a.weights.keys() == b.weights.keys()
    assert a.weights["weight_ih_l1_reverse"].shape == (28, 14)
    assert all(np.array_equal(a.weights[k], b.weights[k]) for k in a.weights)
    assert {v.dtype.name for v in Problem(cell, SMALL, "float64").weights.values()} == {"float64"}


# -- contenders ------------------------------------------------------------------------------------
reference = functools.cache(torch_layers.reference)


def solved(name: str, problem: Problem, mode: str) -> dict[str, np.ndarray]:
    contender = make(name, problem)
    task = contender.task(mode)
    with contender.around():
        timing.once(task)
        return task.results()


def passes(
    name: str, problem: Problem, mode: str = "training", slack: float | None = None
) -> dict[str, float]:
    """Solves a problem, and returns the errors, which the gate accepts."""
    errors = gate.errors(solved(name, problem, mode), reference(problem, mode))
    ours = 1.0 if name.startswith("anycell") else gate.PEERS
    gate.check(errors, problem.dtype, slack or ours)
    return errors


def torchs_lack(cell: str, dtype: str) -> str | None:
    """The reason why torch's own layer does not train in 16 bits on this machine, or None."""
    lack: str | None = lacks(getattr(torch.nn, cell)(1, 1), getattr(torch, dtype))
    return lack


@pytest.mark.parametrize("cell", CLASSICS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.sample(every=3)
def test_everybody_solves_the_same_problem(cell: str, dtype: str) -> None:
    problem = Problem(find_cell(cell), SMALL, dtype)
    # A norm over 7 units amplifies rounding errors more than the norms of benchmarked layers.
    slack = 20.0 if cell == "LayerNormLSTM" else gate.PEERS
    tried = 0
    for name in ("anycell", "anycell.numpy", "torch.nn", "torch-loop", "numpy-loop"):
        with contextlib.suppress(Unsupported):
            passes(name, problem, slack=slack)
            tried += 1
    assert tried >= 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
@pytest.mark.sample(every=3)
def test_everybody_in_16_bits(cell: str, dtype: str) -> None:
    problem = Problem(find_cell(cell), SMALL, dtype)
    assert problem.x.dtype == problem.weights["weight_hh_l0"].dtype == np.float32
    assert reference(problem, "training")["output"].dtype == np.float64
    for name in ("anycell", "anycell.numpy", "torch.nn", "torch-loop"):
        for mode in ("inference", "training"):
            try:
                errors = passes(name, problem, mode, gate.PEERS)
            except Unsupported as reason:
                assert (name, mode) == ("torch.nn", "training")
                assert str(reason) == torchs_lack(cell, dtype)
                continue
            # The error shows that it was computed in 16 bits: float32 would be closer.
            assert errors["output"] > 100 * gate.LIMITS["float32", "forward"], name
    for name in ("numpy-loop", "onnxruntime"):
        with pytest.raises(Unsupported, match=dtype):
            make(name, problem)
    passes("anycell", problem, "recurrence")


@pytest.mark.more
def test_everybody_in_8_bits() -> None:
    for cell, peers in {"LSTM": ["torch.nn"], "GRU": ["torch.nn"], "PeepholeLSTM": []}.items():
        problem = Problem(find_cell(cell), SMALL, "int8")
        for name in ("anycell", "anycell.numpy", *peers):
            errors = passes(name, problem, "inference", slack=1.0)
            assert errors["output"] > 100 * gate.LIMITS["float32", "forward"], name
            for mode in ("training", "recurrence"):
                with pytest.raises(Unsupported, match=f"no {mode}"):
                    solved(name, problem, mode)
        for name in ("torch-loop", "numpy-loop", "openvino"):
            with pytest.raises(Unsupported, match="int8"):
                make(name, problem)
    with pytest.raises(Unsupported, match=r"torch\.ao\.quantization has no RNN"):
        make("torch.nn", Problem(find_cell("RNN"), SMALL, "int8"))


@pytest.mark.parametrize("cell", ["LSTM", "PeepholeLSTM"])
def test_onnx_graph_in_8_bits(cell: str, caplog: pytest.LogCaptureFixture) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    onnx_graph = importlib.import_module("rivals.onnx_graph")
    for shape in (SMALL, replace(SMALL, L=1, D=1)):
        problem = Problem(find_cell(cell), shape, "int8")
        for reduced in (False, True):
            model = onnx_graph.quantized(onnx_graph.build(problem), reduced)
            graph = onnx.load_from_string(model).graph
            assert [n.op_type for n in graph.node][::3] == ["DynamicQuantizeLSTM"] * shape.L
            arrays = {i.name: onnx.numpy_helper.to_array(i) for i in graph.initializer}
            assert arrays["R0_scale"].shape == (shape.D, 4 * shape.H)  # one for each output
            largest = max(np.abs(arrays[f"{w}0_quantized"].astype(int)).max() for w in "WR")
            assert largest == (64 if reduced else 127)
        for name in ("onnxruntime", "onnxruntime-calm"):
            passes(name, problem, "inference")
    with pytest.raises(Unsupported, match="ONNX Runtime has no int8 GRU"):
        make("onnxruntime", Problem(find_cell("GRU"), SMALL, "int8"))
    assert not caplog.records  # ONNX Runtime does not ask for preprocessing


@pytest.mark.parametrize(
    ("x86", "flags", "saturates"),
    [
        (True, ["avx2", "fma"], True),
        (True, ["avx2", "fma", "avx512f"], True),
        (True, [], True),  # a system that names none
        (True, ["avx2", "fma", "avx_vnni"], False),
        (True, ["avx2", "fma", "avx512f", "avx512_vnni"], False),
        (False, ["asimd"], False),
    ],
)
@pytest.mark.sample(every=5)  # both answers
def test_onnxruntime_has_7_bits_where_8_saturate(
    x86: bool, flags: list[str], saturates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    onnx_graph = importlib.import_module("rivals.onnx_graph")
    monkeypatch.setattr(onnx_graph, "X86", x86)
    monkeypatch.setattr(onnx_graph, "instruction_sets", lambda: flags)
    quantized, chosen = onnx_graph.quantized, []

    def watched(model: bytes, reduce_range: bool) -> bytes:
        chosen.append(reduce_range)
        return quantized(model, reduce_range)

    monkeypatch.setattr(onnx_graph, "quantized", watched)
    result = measure(dtype="int8", modes=["inference"], peers=["onnxruntime"])
    entry = result.rows[0].entries["onnxruntime"]
    assert chosen == [saturates] and onnx_graph.saturates() is saturates
    said = [note for note in report.notes(result) if "weights of 7 bits" in note]
    assert len(said) == len(entry.remarks) == int(saturates)
    assert entry.timed or not saturates  # a machine that saturates refuses 8 bits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_openvino_on_the_same_graph(dtype: str) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("openvino")
    for cell, shape in itertools.product(CLASSICS[:3], (SMALL, replace(SMALL, L=1, D=1))):
        problem = Problem(find_cell(cell), shape, dtype)
        try:
            passes("openvino", problem, "inference")
        except Unsupported as reason:
            pytest.skip(str(reason))  # this processor has no bfloat16
    with pytest.raises(Unsupported, match="peepholes"):
        make("openvino", Problem(find_cell("PeepholeLSTM"), SMALL, dtype))


def test_without_openvino_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    result = measure(modes=["inference"], peers=["openvino"])
    assert result.ok and result.rows[0].entries["anycell"].timed
    hint = "openvino is left out: the openvino peer needs openvino, which is not installed: "
    assert hint + "pip install openvino" in report.notes(result)


def test_what_torch_has_no_kernel_for_is_not_a_failure() -> None:

    class Lacking(torch.nn.Module):
        def forward(self, x):
            raise RuntimeError(words)

    contender = torch_layers.from_module(Lacking, Problem(find_cell("RNN"), SMALL))
    for words, expected in (
        ("\"mm\" not implemented for 'Half'", Unsupported),
        ("!", RuntimeError),
    ):
        with pytest.raises(expected, match=words):
            contender.task("inference").call()


def test_onnx_graph_has_torchs_gates() -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    for cell, shape in itertools.product(CLASSICS[:4], (SMALL, replace(SMALL, L=1, D=1))):
        problem = Problem(find_cell(cell), shape)
        passes("onnxruntime", problem, "inference", slack=1.0)
    with pytest.raises(Unsupported, match="no training"):
        solved("onnxruntime", problem, "training")
    with pytest.raises(Unsupported, match="LayerNormLSTM"):
        solved("onnxruntime", Problem(find_cell("LayerNormLSTM"), SMALL), "inference")


def test_onnxruntime_runs_as_its_users_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets as many threads as the others, and otherwise its default settings."""
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    chosen = []

    class Options(runtime.SessionOptions):
        def add_session_config_entry(self, key: str, value: str) -> None:
            super().add_session_config_entry(key, value)
            self.entries = {**getattr(self, "entries", {}), key: value}

    def session(model: bytes, options: Options, providers: list[str]) -> SimpleNamespace:
        chosen.append(options)
        return SimpleNamespace()

    monkeypatch.setattr(runtime, "SessionOptions", Options)
    monkeypatch.setattr(runtime, "InferenceSession", session)
    problem, calm = Problem(find_cell("LSTM"), SMALL, threads=3), "session.intra_op.allow_spinning"
    make("onnxruntime", problem)
    make("onnxruntime-calm", problem)
    theirs, ours = chosen
    assert not hasattr(theirs, "entries") and ours.entries == {calm: "0"}
    assert ours.get_session_config_entry(calm) == "0"
    assert [(o.intra_op_num_threads, o.inter_op_num_threads) for o in chosen] == [(3, 1)] * 2


@pytest.mark.filterwarnings("ignore")  # those of TensorFlow and Keras
@pytest.mark.parametrize(
    ("cell", "names"),
    [
        ("LSTM", ["anycell.keras", "keras", "tf-block"]),
        pytest.param("LSTMP", ["anycell.keras", "keras-loop"], marks=pytest.mark.slow),
        pytest.param("GRU", ["anycell.keras", "keras", "keras-loop"], marks=pytest.mark.slow),
        pytest.param(
            "PeepholeLSTM", ["anycell.keras", "keras-loop", "tf-block"], marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.slow
def test_everybody_on_tensorflow(
    cell: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorflow")
    # TensorFlow accepts a number of threads once in a process, before it runs anything.
    monkeypatch.setattr("anycell.bench.keras_layers.set_threads", lambda count: None)
    problem = Problem(find_cell(cell), SMALL)
    for name in names:
        passes(name, problem, slack=gate.PEERS)


@pytest.mark.parametrize("cell", ["LSTM", "GRU", "PeepholeLSTM", "RNN", "EALSTM"])
@pytest.mark.slow
def test_everybody_on_jax(cell: str) -> None:
    pytest.importorskip("jax")
    problem = Problem(find_cell(cell), SMALL, threads=usable_cores())
    peers = ["jax-scan"] if cell != "EALSTM" else []
    if cell == "LSTM" and importlib.util.find_spec("flax"):
        peers.append("flax")
    for name in ("anycell.jax", *peers):
        passes(name, problem, slack=gate.PEERS)
    with pytest.raises(Unsupported, match="XLA takes all cores"):
        other = replace(problem, cell=find_cell("LSTM"), threads=problem.threads + 1)
        make("jax-scan", other)


def test_a_cell_of_the_users_own(own_cell: str) -> None:
    problem = Problem(find_cell(own_cell), SMALL)
    for name in ("anycell", "torch-loop"):
        assert "a_l1_reverse" in passes(name, problem, slack=1.0)
    with pytest.raises(Unsupported, match=r"torch\.nn has no Own"):
        make("torch.nn", problem)


@pytest.mark.parametrize("cell", ["LSTMP", "EALSTM", "MultiplicativeLSTM", "ZoneoutGRU"])
@pytest.mark.sample(1)
def test_cells_of_many_matmuls_sizes_and_inputs(cell: str) -> None:
    problem = Problem(find_cell(cell), replace(SMALL, D=1))
    for name in ("anycell", "anycell.numpy"):
        if name == "anycell" or not problem.cell.definition.keeps:
            passes(name, problem)


def test_a_cell_beside_what_its_file_imports(own_cell: str) -> None:
    path = Path(own_cell.rpartition(":")[0])
    path.with_name("lies_beside_it.py").write_text('gates = "f g"')
    path.write_text("import lies_beside_it\n" + OWN_CELL.replace('"f g"', "lies_beside_it.gates"))
    before = list(sys.path)
    assert len(find_cell(own_cell).definition.gates) == 2
    assert sys.path == before


def test_a_cell_whose_recurrence_does_not_stand_alone() -> None:
    result = measure(cells=[find_cell("LSTMP")], modes=["recurrence"], peers=["anycell-LSTM"])
    ours, lstm = result.rows[0].entries.values()
    assert (ours.status, ours.reason) == ("unsupported", "no recurrence")
    assert lstm.status == "ok" and not lstm.timed  # without us, there is nothing to compare


def test_the_recurrence_alone() -> None:
    passes("anycell", Problem(find_cell("GRU"), SMALL), "recurrence")


# -- the whole -------------------------------------------------------------------------------------
def measure(**changes):
    settings = results.Settings(
        cells=[find_cell("LSTM")],
        shapes=[SMALL],
        peers=["torch-loop"],
        seconds=0.01,
        alone=False,
        first_call=False,
    )
    return runner.run(replace(settings, **changes))


def cheating(monkeypatch: pytest.MonkeyPatch, cheat: str) -> None:
    """Makes one contender return numbers that are slightly wrong."""
    source = CONTENDERS[cheat]
    module = importlib.import_module(source.module)
    honest = getattr(module, source.function)

    def wrong(problem: Problem):
        contender = honest(problem)
        for task in contender.tasks.values():
            task.results = lambda right=task.results: {k: 1.0001 * v for k, v in right().items()}
        return contender

    monkeypatch.setattr(module, source.function, wrong)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anycell.bench.machine.Matmul.SIZE", 64)
    monkeypatch.setattr(timing, "BLOCK_S", 2e-3)
    monkeypatch.setattr(timing, "WINDOW_S", 1e-3)


def test_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = measure()
    assert result.ok
    written = json.loads(results.write_json(result, tmp_path / "new" / "folder").read_text())
    assert written["schema"] == results.SCHEMA
    assert {"cpu", "cores", "isa", "python", "versions", "revision"} <= written["machine"].keys()
    assert written["settings"]["threads"] == 1
    assert [row["mode"] for row in written["rows"]] == ["inference", "training"]
    for row in written["rows"]:
        ours, loop = row["contenders"]["anycell"], row["contenders"]["torch-loop"]
        assert len(ours["samples_ms"]) == len(loop["samples_ms"]) >= timing.MIN_ROUNDS
        assert ours["status"] == "ok" and ours["engine"]["name"] == "cpu"
        assert loop["ratio"] == pytest.approx(
            stats.paired_ratio(loop["samples_ms"], ours["samples_ms"])
        )
        assert row["bound_ms"] == pytest.approx(row["flops"] / row["matmul_gflops"] * 1e-6)
    assert "weight_hh_l1_reverse" in written["rows"][1]["contenders"]["anycell"]["errors"]
    assert [mean["ratios"].keys() for mean in written["geometric_means"]] == [{"torch-loop"}] * 2

    report.show(result)
    shown = capsys.readouterr().out
    assert "LSTM inference, float32, 1 thread" in shown and "geometric mean" in shown
    assert "small" in shown and "torch-loop" in shown and "REFUSED" not in shown


@pytest.mark.slow
def test_errors_beside_the_times_of_fewer_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    result = measure(dtype="bfloat16", peers=["torch.nn", "anycell-float32"])
    lack = torchs_lack("LSTM", "bfloat16")
    assert result.ok
    left_out = f"torch.nn is left out of LSTM training: {lack}"
    assert (left_out in report.notes(result)) is (lack is not None)
    for row, (_, headers, body) in zip(result.rows, report.tables(result), strict=True):
        names = ["anycell", "torch.nn", "anycell-float32"]
        if lack and row.mode == "training":
            names.remove("torch.nn")
            assert row.entries["torch.nn"].status == "unsupported"
        assert {headers[headers.index(f"{name} ms") + 1] for name in names} == {"error"}
        for name in names:
            errors = row.entries[name].errors
            shown = body[0][headers.index(f"{name} ms") + 1].split(" / ")
            assert shown[0] == f"{errors['output']:.0e}"
            worst = max([e for k, e in errors.items() if k != "output"], default=None)
            assert shown[1:] == ([] if worst is None else [f"{worst:.0e}"])
        assert row.entries["anycell"].errors["output"] > 1e-4
        assert row.entries["anycell-float32"].errors["output"] < gate.LIMITS["float32", "forward"]
        assert {len(line) for line in body} == {len(headers)}

    monkeypatch.setitem(gate.LIMITS, ("bfloat16", "forward"), 1e-5)
    result = measure(dtype="bfloat16", modes=["inference"], peers=["anycell-float32"])
    assert not result.ok
    (_, headers, body), *_ = report.tables(result)
    assert body[0][headers.index("anycell ms")] == "REFUSED"
    assert any("output is off by" in note for note in report.notes(result))
    assert "error" not in report.tables(measure(modes=["inference"]))[0][1]


@pytest.mark.parametrize("cheat", ["anycell", "torch-loop"])
def test_no_speed_for_wrong_results(
    cheat: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cheating(monkeypatch, cheat)
    result = measure()
    assert not result.ok
    for row in result.rows:
        entry = row.entries[cheat]
        assert entry.status == "wrong" and not entry.samples_ms
        assert math.isnan(row.ratio("torch-loop"))
        assert row.entries["anycell"].timed is (cheat != "anycell")
    report.show(result)
    shown = capsys.readouterr().out
    assert "REFUSED" in shown and "off by 1.0e-04" in shown
    assert "NaN" not in json.dumps(results.as_json(result), allow_nan=False)


def test_a_contender_that_fails_does_not_end_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(problem: Problem):
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setitem(CONTENDERS, "torch-loop", broken)
    result = measure(modes=["inference"])
    entry = result.rows[0].entries["torch-loop"]
    assert entry.status == "failed" and "RuntimeError: out of luck (test_bench" in entry.reason
    assert result.rows[0].entries["anycell"].timed and not result.ok


def test_an_interrupt_keeps_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    settings = results.Settings(
        [find_cell("RNN")], [SMALL], seconds=0.01, alone=False, first_call=False
    )

    def interrupt(row) -> None:
        raise KeyboardInterrupt

    result = runner.run(settings, done=interrupt)
    assert len(result.rows) == 1 and not result.ok
    report.show(result)
    assert "interrupted after 1 rows" in capsys.readouterr().out


@pytest.mark.slow
def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = chart.draw(measure(), tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert chart.draw(measure(peers=[]), tmp_path) is None  # nothing to compare


@pytest.mark.skipif(not memory.supported(), reason="Linux tells, others do not")
def test_memory_is_measured() -> None:
    size = 64 << 20  # smaller arrays may lie in memory that other tests have freed

    def step() -> None:
        np.ones(size, np.uint8)

    step()
    assert size * 0.95 <= memory.growth(step) <= size * 1.5


@pytest.mark.slow
def test_probes_run_in_a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(find_cell("GRU"), SMALL)
    ask, kernels = probe._ask, []

    def asked(*args):
        answer = ask(*args)
        folder = Path(args[0]["ANYCELL_CACHE_DIR"])
        kernels.append({path.name: path.stat().st_ino for path in folder.iterdir()})
        return answer

    monkeypatch.setattr(probe, "_ask", asked)
    assert probe.first_call("anycell", problem, "inference").keys() == {"cold", "warm"}
    cold, warm = kernels
    assert cold and warm == cold  # the second process found the kernels on disk, and made none


# -- alone -----------------------------------------------------------------------------------------
def test_alone_is_a_process_with_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of a contender without torch has neither torch nor its threads."""
    code = """
        import os, sys
        from anycell.bench import probe

        def spy(*arguments):
            count = len(probe.samples(*arguments))
            others = sys.modules.keys() & {"torch", "tensorflow", "onnxruntime"}
            return count >= 5, os.environ["OF_ITS_OWN"], sorted(others)

        def dies(*arguments):
            os._exit(3)
    """
    (tmp_path / "spying.py").write_text(dedent(code))
    monkeypatch.syspath_prepend(tmp_path)
    spy, dies = operator.attrgetter("spy", "dies")(importlib.import_module("spying"))
    arguments = "anycell.numpy", Problem(find_cell("LSTM"), SMALL), "training", 0.01
    assert probe._ask({"OF_ITS_OWN": "1"}, spy, *arguments) == (True, "1", [])
    assert "OF_ITS_OWN" not in os.environ
    with pytest.raises(probe.ProbeError, match="spy of torch-Loop: 'torch-Loop'"):
        probe._ask({}, spy, "torch-Loop", *arguments[1:])
    with pytest.raises(probe.ProbeError, match=r"dies of anycell\.numpy: .* ended with status 3"):
        probe._ask({}, dies, *arguments)
    monkeypatch.setattr(probe, "TIMEOUT_S", 0.01)
    with pytest.raises(probe.ProbeError, match=r"spy of anycell\.numpy: nothing after 0\.01 s"):
        probe._ask({}, spy, *arguments)


@pytest.mark.slow
def test_alone_has_the_same_threads() -> None:
    code = """
        from anycell.bench import probe
        from anycell.bench.problem import Problem, find_cell
        from anycell.bench.shapes import Shape
        problem = Problem(find_cell("LSTM"), Shape("", "", 6, 3, 5, 7, 1, 1), threads=3)
        probe.interleave = lambda tasks, seconds: dict.fromkeys(
            tasks, [__import__("torch").get_num_threads()])
        print(probe.samples("torch.nn", problem, "training", 0.01))
    """
    assert python(code) == "[3]\n"


@pytest.mark.slow
def test_each_runs_alone_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def alone(name: str, problem: Problem, mode: str, seconds: float) -> list[float]:
        asked.append((name, mode, seconds))
        if name == "numpy-loop":
            raise probe.ProbeError("it would not start")
        return [1.0, 3.0, 2.0]

    monkeypatch.setattr(probe, "alone", alone)
    cheating(monkeypatch, "torch-loop")
    once = functools.partial(make, "torch.nn")
    monkeypatch.setitem(CONTENDERS, "flax", lambda problem: replace(once(problem), again=False))
    result = measure(alone=True, peers=["torch.nn", "torch-loop", "numpy-loop", "flax"])
    names = ("anycell", "torch.nn", "numpy-loop")  # not the cheater, nor who is made once
    assert asked == [(n, mode, 0.01) for mode in ("inference", "training") for n in names]
    for row in result.rows:
        assert row.entries["torch.nn"].alone_ms == 2.0
        assert row.ratio("torch.nn", alone=True) == 1.0
        assert math.isnan(row.ratio("numpy-loop", alone=True))
        assert row.entries["numpy-loop"].remarks == ["it would not start"]
    asked.clear()
    assert measure(modes=["inference"]).rows[0].entries["anycell"].disagrees is None
    assert not asked


def reported(**times: tuple[list[float], list[float]]):
    """A report with these times, in turns and alone, and of nothing that ran."""
    ours, *peers = times
    settings = results.Settings(
        [find_cell("LSTM")], [SMALL], ["inference"], subject=ours, peers=peers
    )
    row = results.Row("LSTM", "inference", SMALL, ours, flops=1000, matmul_gflops=1.0)
    for name, (turns, alone) in times.items():
        row.entries[name] = results.Entry(samples_ms=turns, alone_samples_ms=alone)
    machine = dict.fromkeys(("cpu", "cores", "python", "revision"), 2) | {"versions": {}, "load": 0}
    return results.Report(settings, machine, "today", [row])


def test_a_time_that_is_another_one_alone_is_marked() -> None:
    result = reported(
        ours=([1.0, 1.0, 9.0], [1.05, 1.0, 1.09]),
        slower=([2.3, 2.2, 9.0], [2.0]),  # by a tenth and more in turns
        quicker=([3.0, 3.0, 3.0], [3.4, 3.2, 3.5]),  # and in its own process
        unasked=([4.0, 4.0, 4.0], []),
    )
    row = result.rows[0]
    disagree = {name: entry.disagrees for name, entry in row.entries.items()}
    assert disagree == {"ours": False, "slower": True, "quicker": True, "unasked": None}
    assert row.ratio("slower", alone=True) == pytest.approx(2.0 / 1.05)

    written = results.as_json(result)
    entries = written["rows"][0]["contenders"]
    assert {name: entry["disagrees"] for name, entry in entries.items()} == disagree
    assert entries["quicker"]["alone_samples_ms"] == [3.4, 3.2, 3.5]
    assert entries["quicker"]["alone_ms"] == 3.4 and entries["unasked"]["alone_ms"] is None
    (means,) = written["geometric_means"]
    assert means["ratios_alone"] == pytest.approx({"slower": 2 / 1.05, "quicker": 3.4 / 1.05})

    ((_, headers, body),) = report.tables(result)
    shown = dict(zip(headers, body[0], strict=True))
    marked = {name: report.MARK in shown[f"{name} ms"] for name in row.entries}
    assert marked == {name: bool(value) for name, value in disagree.items()}
    assert body[-1][:1] + body[-1][-5:] == ["the same, alone", "1.90x", "", "3.24x", "", ""]
    assert report.notes(result) == [
        "LSTM inference, small, slower: 2.3 ms in turns, 2 ms alone",
        "LSTM inference, small, quicker: 3 ms in turns, 3.4 ms alone",
    ]

    page = load("tools/speed_table.py").table(json.loads(json.dumps(written)), "quicker")
    lines = page.splitlines()
    assert "| small (6, 3, 5, 7, 2 x 2) | 3! / 1 = **3.00** |" in lines
    assert "| the same, alone | **3.24** |" in lines
    assert lines[-1] == "! another time alone: LSTM inference of small, quicker: 3.4 ms."


def test_there_is_no_mean_of_what_a_busy_machine_gave() -> None:
    """In turns 3 times faster, alone 40 times slower: neither may be the result."""
    result = reported(ours=([1.0], [100.0]), peer=([3.0], [2.5]), calm=([2.0], [190.0]))
    (means,) = results.as_json(result)["geometric_means"]
    assert means["ratios"] == pytest.approx({"calm": 2.0})
    assert means["ratios_alone"] == pytest.approx({"calm": 1.9})
    ((_, headers, body),) = report.tables(result)
    ratios = [k for k, header in enumerate(headers) if header == "ratio"]
    assert [[line[k] for k in ratios] for line in body[-2:]] == [["", "2.00x"], ["", "1.90x"]]
    (said,) = [note for note in report.notes(result) if "no mean" in note]
    assert said.startswith("LSTM inference: no mean for peer, because of small: 3.00x in turns")


def test_a_busy_machine_is_told_first(capsys: pytest.CaptureFixture[str]) -> None:
    result = reported(ours=([1.0], [1.0]), peer=([3.0], [3.0]))
    assert machine.busy(result.machine) == ""
    result.machine["load"] = 1.5
    assert "busy (load 1.5 on 2 cores)" in machine.busy(result.machine)
    result.matmul_gflops = 100.0
    report.show(result)
    said = capsys.readouterr().out
    assert said.index("grain of salt") < said.index("geometric mean")


def test_the_estimate_grows_with_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    steady = type("Matmul", (), {"SIZE": 2048, "gflops": 100.0, "__init__": lambda *_: None})
    monkeypatch.setattr(estimate, "Matmul", steady)
    monkeypatch.setattr(estimate, "load", lambda: 0.0)
    whole = results.Settings([find_cell("LSTM"), find_cell("GRU")], select(["all"]))
    quick = replace(whole, shapes=select(QUICK), seconds=0.5, alone=False, first_call=False)
    costs = {name: estimate.seconds(s) for name, s in [("whole", whole), ("quick", quick)]}
    assert [len(costs[name]) for name in costs] == [4 * 12, 4 * 3]
    assert 15 < sum(costs["quick"]) < 120 < 600 < sum(costs["whole"]) < 7200
    monkeypatch.setattr(estimate, "load", lambda: 20.0 * usable_cores())
    assert sum(estimate.seconds(quick)) > 10 * sum(costs["quick"])  # a busy machine
    monkeypatch.setattr(estimate, "load", lambda: math.nan)
    for more in (
        {"memory": True}, {"seconds": 60.0}, {"alone": True}, {"first_call": True},
        {"peers": ("torch.nn", "torch-loop", "numpy-loop")}, {"shapes": select(["all"])},
    ):  # fmt: skip
        assert sum(estimate.seconds(replace(quick, **more))) > sum(costs["quick"]) + 1


# -- the command line ------------------------------------------------------------------------------
@pytest.mark.parametrize("terminal", [False, True])
def test_progress(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    progress, (row,) = command.Progress([1.0, 1.0]), reported(ours=([1.0], [])).rows
    progress.say("LSTM small inference: checking ours")
    progress.advance(row)
    progress.advance(row)
    lines = ["LSTM small inference: checking ours"] * terminal
    lines += ["1/2 LSTM small inference, about 10 s left", "2/2 LSTM small inference"]
    said = capsys.readouterr().err
    assert [line.strip() for line in said.splitlines() if line] == lines
    assert said.startswith("\r") is terminal


def test_all_peers_are_those_beside_the_subject(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of TensorFlow and of PyTorch would wait for each other."""
    monkeypatch.setattr(command, "check_installed", lambda *_: None)
    chosen = {
        subject: command._peers(SimpleNamespace(subject=subject, peers=["all"]))
        for subject in ("anycell", "keras")
    }
    assert {"anycell.keras", "keras-loop"} <= {*chosen["keras"]} and "keras" not in chosen["keras"]
    assert {"torch.nn", "flax"} <= {*chosen["anycell"]} and "anycell" not in chosen["anycell"]
    assert not {*chosen["keras"]} & {*chosen["anycell"]}


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"chart needs matplotlib.*pip install '\S+\[bench\]'"):
        need("matplotlib", "the chart")


WITHOUT = """
    import sys, importlib.util as u; find = u.find_spec
    for name in {packages}: sys.modules[name] = None
    u.find_spec = lambda name, *a: None if name in {packages} else find(name, *a)
    from anycell.cli import main; sys.exit(main({arguments}))
"""


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        pytest.param("torch", [], id="torch"),
        pytest.param(
            "threadpoolctl", ["--peers", "numpy-loop"], marks=pytest.mark.more, id="threadpoolctl"
        ),
    ],
)
def test_without_a_package_bench_says_what_to_install(package: str, arguments: list[str]) -> None:
    code = WITHOUT.format(packages=[package], arguments=["bench", *arguments])
    said = python(code, status=2)
    assert f"{package}, which is not installed: {install('bench')}" in said


@pytest.mark.slow
def test_bench_needs_only_torch(tmp_path: Path) -> None:
    arguments = "bench --cells GRU --shapes T2B1I8H8 --mode inference --seconds 0.01 --threads 1"
    arguments += f" --no-alone --no-first-call --out {tmp_path}"
    code = WITHOUT.format(
        packages=["rich", "psutil", "threadpoolctl", "matplotlib", "onnx"],
        arguments=arguments.split(),
    )
    said = python(f"import anycell.bench.machine as m; m.Matmul.SIZE = 64\n{dedent(code)}")
    lines = said.splitlines()
    title = lines.index("GRU inference, float32, 1 thread")
    headers = ["shape", "T B I H L D", "bound ms", "anycell ms", "of bound", "torch.nn ms", "ratio"]
    assert re.split("  +", lines[title + 1])[:7] == headers
    assert re.match(r"T2B1I8H8  +2 1 8 8 1 1  +\S+ +\S+ ±\d+% +<?\d+% +\S+ ±", lines[title + 3])
    assert f"written: {tmp_path}/bench.json" in said


def test_an_installed_package_has_the_layers_of_frameworks() -> None:
    """Loops by hand and other runtimes are in a checkout only."""
    code = """
        from pathlib import Path
        import anycell.machine
        anycell.machine.ROOT = Path("/nowhere")
        from anycell.bench import contenders, problem, shapes, timing
        assert contenders.DEFAULT_PEERS == ("torch.nn",)
        (shape,), lstm = shapes.select(["T2B1I3H4"]), problem.find_cell("LSTM")
        for name in contenders.DEFAULT_PEERS:
            timing.once(contenders.make(name, problem.Problem(lstm, shape)).task("training"))
        other = problem.Problem(problem.find_cell("PeepholeLSTM"), shape)
        from anycell.bench.torch_layers import reference
        print(reference(other, "inference")["output"].shape, *contenders.CONTENDERS)
    """
    said = python(code)
    assert said.startswith("(2, 1, 4) anycell ")
    sources = CONTENDERS.items()
    layers = {name for name, source in sources if source.module.startswith("anycell.")}
    assert {*said.split()[3:]} == layers < CONTENDERS.keys()


def test_the_legend_explains_what_is_shown() -> None:
    result = reported(ours=([1.0], [1.0]), peer=([3.0], [3.0]))
    words = ("ratio:", "of bound:", "error:", "first call:", "MiB:", report.MARKED)
    said = report.legend(report.tables(result))
    assert [word in said for word in words] == [True, True, False, False, False, False]
    entry = result.rows[0].entries["ours"]
    entry.fresh_process_extra_ms, entry.training_peak_bytes = {"cold": 1.0, "warm": 1.0}, 1 << 20
    entry.alone_samples_ms = [2.0]
    said = report.legend(report.tables(result))
    assert [word in said for word in words] == [True, True, False, True, True, True]


def test_the_bound_is_shown_as_a_part_of_our_time() -> None:
    for ms, shown in ((0.001, "100%"), (0.0025, "40%"), (0.9, "<1%")):
        result = reported(ours=([ms], []), peer=([3.0], []))
        result.rows[0].flops = 1000  # at 1 GFLOP/s, 1 microsecond
        ((_, headers, body),) = report.tables(result)
        assert [line[headers.index("of bound")] for line in body] == [shown, shown, ""]


@pytest.mark.slow
def test_bench_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["bench", "--shapes", "stream", "--cells", "GRU", "--mode", "inference"]
    arguments += ["--seconds", "0.05", "--threads", "1", "--no-alone", "--no-first-call"]
    arguments += ["--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    assert json.loads((tmp_path / "bench.json").read_text())["ok"]
    cheating(monkeypatch, "anycell")
    assert cli.main(arguments) == 1
    assert "REFUSED" in capsys.readouterr().out
    monkeypatch.undo()
    both = [a for a in arguments if a not in ("--mode", "inference")]
    assert cli.main([*both, "--dtype", "int8", "--peers", "torch.nn"]) == 0
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [row["mode"] for row in rows] == ["inference"]


@pytest.mark.more
def test_quick(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says how long it takes before it starts, and what is left after each row."""
    monkeypatch.setattr("anycell.bench.shapes.QUICK", ("stream",))
    monkeypatch.setattr("anycell.bench.report.show", lambda result: None)
    arguments = ["bench", "--quick", "--threads", "1", "--peers", "torch.nn", "--cells", "GRU"]
    assert cli.main([*arguments, "--seconds", "0.05", "--out", str(tmp_path)]) == 0
    *_, before, first, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"anycell: 2 rows, about \d+ s", before)
    assert re.fullmatch(r"1/2 GRU stream inference, about \d+ s left", first)
    assert last == "2/2 GRU stream training"
    written = json.loads((tmp_path / "bench.json").read_text())
    assert written["settings"]["shapes"] == ["stream"] and written["settings"]["seconds"] == 0.05
    for row in written["rows"]:
        assert not row["contenders"]["anycell"]["alone_samples_ms"]
