"""``tools/gpu_check.py`` and the tools that it runs on a card, tested without a card."""

import ast
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpu import (  # before anything else that may import Triton
    COMPILES,
    DEVICE,
    choose_gpu,
    without_a_card,
)
from processes import ROOT, load, python, run
from tolerances import assert_close

from anycell import cells
from anycell.engines.gpu import build, capacity
from anycell.layer import gpu as device
from anycell.torch import fused
from anycell.torch.framework import TorchDevice


@pytest.fixture(scope="module")
def bench() -> Any:
    return load("tools/gpu_bench.py")


# -- what is timed ---------------------------------------------------------------------------------
def test_the_plan_of_the_runs(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The targets come first, then all cases of the grid and of the shapes, each once."""
    bench.main(["--plan"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    targets = bench.chosen("targets")
    assert [line["name"] for line in lines[: len(targets)]] == ["target"] * len(targets)
    first = [(line["cell"], line["dtype"], line["H"], line["B"]) for line in lines[:3]]
    assert first == [(cell, "bfloat16", 768, 16) for cell in ("LSTM", "PeepholeLSTM", "Own")]
    assert {case.dtype for case in targets} == {"bfloat16", "float32", "tf32"}
    assert [tuple(line.values()) for line in lines] == [*targets, *bench.chosen("rest")]
    grid = [line for line in lines if line["name"] == "grid"]
    assert len(grid) == 8 * 5 * 4 * 2 and all(line["T"] == 1024 for line in grid)
    assert len({tuple(line.values()) for line in lines}) == len(lines)
    shapes = {line["name"] for line in lines} - {"grid", "target"}
    assert {"deepar", "ocr", "basecaller"} <= shapes
    assert {"grid", "deepar"} <= {line["name"] for line in lines[len(targets) :][:6]}
    bench.main(["--plan", "--cases", "targets", "--after", "2"])
    later = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert later == lines[2 : len(targets)]


def test_what_time_does_not_allow_is_said(bench: Any) -> None:
    def measured(case: Any) -> Iterator[dict[str, Any]]:
        yield {"contender": "anycell", "us_per_step": 1.0}

    todo = bench.cases()[:3]
    lines = list(bench.within(60.0, todo, measured))
    assert [line["us_per_step"] for line in lines] == [1.0] * 3
    assert list(bench.within(0.0, todo, measured)) == [{"skipped": 3, "why": "0 seconds were over"}]


def test_errors_are_lines(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of contenders and cases become lines; only a lost card ends the run."""
    import torch

    def measured(case: Any) -> Iterator[dict[str, Any]]:
        yield {"contender": "loop", "error": "ValueError: no"}
        yield {"contender": "anycell", "us_per_step": 1.0}
        if case == todo[1]:
            raise torch.OutOfMemoryError("no memory")

    def synchronize() -> None:
        if lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    todo, lost = bench.cases()[:3], False
    lines = list(bench.within(60.0, todo, measured))
    said = [line.get("error", line.get("us_per_step")) for line in lines]
    fine = ["ValueError: no", 1.0]
    assert said == [*fine, *fine, "OutOfMemoryError: no memory", *fine] and len(emptied) == 4
    lost = True
    error, last = bench.within(60.0, todo, measured)
    assert error["error"] == "ValueError: no" and last["done"] == 1
    assert last["lost"] == "RuntimeError: CUDA error: an illegal memory access was encountered"


def test_contenders_are_timed(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, with a stub of the clock: both passes of each contender that agrees are timed,
    and a contender that raises or is wrong does not affect the others.
    """
    import torch

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...
        def record(self) -> None: ...
        def elapsed_time(self, _: Any) -> float:
            return 2.0

    case = bench.Case("target", "LSTM", "float32", 20, 1, 3, 5)
    contenders = bench.contenders

    def some(case: Any) -> dict[str, Any]:
        layers = contenders(case, "cpu")
        wrong = torch.nn.LSTM(3, 5)
        return {**layers, "wrong": wrong, "refuses": torch.nn.LSTM(4, 5)}

    def graphed(run: Any) -> Any:
        raise RuntimeError("no graphs")

    monkeypatch.setattr(bench, "contenders", some)
    monkeypatch.setattr(bench, "graphed", graphed)
    monkeypatch.setattr(bench, "tier", lambda *_: 2)
    monkeypatch.setattr(bench, "longest_kernel", lambda _: "a kernel")
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 7)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a stand-in")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *s, **o: randn(*s, **{**o, "device": "cpu"}))
    lines = list(bench.within(60.0, [case], bench.measured))
    times = {(n["contender"], n["pass"]): n["us_per_step"] for n in lines if "us_per_step" in n}
    names = ("torch", "anycell", "drop-in", "loop")
    assert times == {(name, p): 100.0 for name in names for p in bench.PASSES}
    (wrong,) = [line for line in lines if "wrong" in line]
    assert wrong["contender"] == "wrong" and wrong["wrong"] > bench.AGREE["float32"]
    errors = {(line["contender"], line.get("pass")) for line in lines if "error" in line}
    assert errors == {("refuses", None), *[("loop, graph", p) for p in bench.PASSES]}
    assert {n.get("tier") for n in lines if n["contender"] == "anycell"} == {2}


def test_the_picture(bench: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = [{"skipped": 3, "why": "0 seconds were over"}]
    for case in [case for case in bench.cases() if case.cell in ("LSTM", "GRU")]:
        for n, way in enumerate(bench.PASSES, 1):
            for m, name in enumerate(("torch", "anycell", "loop"), 1):
                us = 0.001 * n * m * case.H
                lines.append(
                    {**case._asdict(), "card": "made up", "contender": name, "pass": way,
                     "us_per_step": us, "quartiles": [us, us], "peak_bytes": 1}
                )  # fmt: skip
    (tmp_path / "bench.txt").write_text("\n".join(map(json.dumps, lines)))
    bench.main(["--draw", str(tmp_path / "bench.txt")])
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_loop_computes_what_the_layer_does(bench: Any) -> None:
    import torch

    import anycell

    for name in bench.LOOPS:
        torch.manual_seed(0)
        layer = anycell.torch.RNN(bench.CELLS[name], 4, 5)
        x = torch.randn(3, 2, 4)
        loop = bench.Loop(bench.LOOPS[name], layer)
        assert_close(loop(x)[0].detach(), layer(x)[0].detach(), "float32", "forward")


# -- what else runs on a card ----------------------------------------------------------------------
TOOLS_OF_A_CARD = {
    "gpu_bench": (),
    "gpu_exchange": (),
    "gpu_stress": (),
    "gpu_card": (),
    "gpu_smoke": ("2", "forward", "bfloat16"),
}


@pytest.mark.parametrize(
    "tool",
    [pytest.param(t, marks=[pytest.mark.slow] * (n > 0)) for n, t in enumerate(TOOLS_OF_A_CARD)],
)
@without_a_card
@pytest.mark.slow
def test_without_a_card(tool: str, tmp_path: Path) -> None:
    """Without a card, tools print the reason and fail."""
    path, status = str(ROOT / f"tools/{tool}.py"), 3 if tool == "gpu_card" else 1
    said = run(path, *TOOLS_OF_A_CARD[tool], cwd=tmp_path, status=status)
    assert f"{tool}: no CUDA card here" in said


@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_smoke(passes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, the tool reports right, refused, wrong and broken kernels."""
    smoke = load("tools/gpu_smoke.py")
    tried = functools.partial(smoke.tried, sizes=smoke.SMALL)
    choose_gpu(monkeypatch)
    case = smoke.Case(3, passes, "float32")
    line = tried(cells.LSTM, case, DEVICE.type)
    assert 0 < line["worst"] <= 1.0
    assert tried(cells.LSTM, case._replace(tier=1), DEVICE.type)["worst"] <= 1.0
    refused = tried(cells.GRU(reset_after=False), case._replace(tier=2), DEVICE.type)
    assert "tier=2 cannot run cell GRU" in refused["refused"]
    forward = fused.gpu.forward

    def doubled(*args: Any, **options: Any) -> Any:
        out, *rest = forward(*args, **options)
        return out * 2, *rest

    monkeypatch.setattr(fused, "gpu", SimpleNamespace(**{**vars(device), "forward": doubled}))
    assert tried(cells.LSTM, case, DEVICE.type)["worst"] > 1.0

    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(fused, "gpu", SimpleNamespace(**{**vars(device), "forward": broken}))
    assert tried(cells.LSTM, case, DEVICE.type) == {"error": "RuntimeError: CUDA error"}


def test_stress_counts_wrong_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, with stubs of launches: the fourth launch returns another bit."""
    import torch

    stress = load("tools/gpu_stress.py")
    calls: list[int] = []

    def launcher(_: Any) -> Any:
        def run() -> list[Any]:
            calls.append(1)
            return [torch.ones(3), torch.full((2,), float(len(calls) == 4))]

        return run

    class Stream:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: Any) -> None: ...

    host = SimpleNamespace(limits=None, trouble=torch.zeros(1))
    tiers: list[int] = [2]
    monkeypatch.setattr(stress, "host_of_card", lambda _: host)
    monkeypatch.setattr(stress, "launcher", launcher)
    monkeypatch.setattr(
        stress.capacity, "choose",
        lambda *_, **__: SimpleNamespace(tier=tiers[-1], reason="too large"),
    )  # fmt: skip
    for name in ("zeros", "randn"):
        make = getattr(torch, name)
        monkeypatch.setattr(
            torch, name,
            lambda *s, make=make, **o: make(*s, **{**o, "device": "cpu"}),
        )  # fmt: skip
    monkeypatch.setattr(torch, "mm", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    line = stress.strained(stress.Strain(512, 50, True, 1.0), 8, 60.0)
    assert (line["launches"], line["wrong"], line["gave_up"]) == (8, 1, 0)
    assert line["why_fewer"] is None
    line = stress.strained(stress.Strain(512, 50, False, 1.0), 8, 0.0)
    assert (line["launches"], line["why_fewer"]) == (0, "0 seconds were over")
    tiers.append(3)
    line = stress.strained(stress.STRAINS[0], 8, 60.0)
    assert line == {"refused": "this card runs tier 3: too large"}
    assert sum(strain.share for strain in stress.STRAINS) == pytest.approx(1.0)
    assert {(strain.hidden, strain.train) for strain in stress.STRAINS} == {
        (hidden, train) for hidden in (512, 768) for train in (False, True)
    }


@pytest.mark.parametrize("numbers", [False, True])
@without_a_card
def test_the_exchange_alone(numbers: bool) -> None:
    """A single program exchanges with itself: each step reads what the step before wrote."""
    import torch

    exchange, host = load("tools/gpu_exchange.py"), TorchDevice(torch.float32, DEVICE)
    values = {
        "data": torch.zeros(5, exchange.ROWS, exchange.UNITS),
        "flags": torch.zeros(2, dtype=torch.int32),
        "trouble": host.trouble,
        "patience": 20_000_000,
    }
    exchange.alone("numbers" if numbers else "barrier", 1, 4, host, values)()
    assert values["data"][:, 0, 0].tolist() == ([0, 1, 2, 3, 4] if numbers else [0] * 5)
    assert values["flags"].tolist() == [3, 4] and not host.trouble


EXCHANGE = """
import sys
sys.path.insert(0, "tools")
import gpu_exchange
from anycell.engines.gpu import build
for numbers in (False, True):
    made = build.binary(gpu_exchange.printed(48, numbers), 90)
    print(made.ptx.count("ld.acquire.gpu"), made.shared < 48 << 10)
"""


@pytest.mark.more  # it compiles for seconds
def test_the_exchange_compiles() -> None:
    assert python(EXCHANGE, **COMPILES).split() == ["1", "True"] * 2


AHEAD = """
import sys
sys.path.insert(0, "tools")
import gpu_ahead
from anycell.engines.gpu import build
job = gpu_ahead.Job("LSTM", "bfloat16", 9, 16, 256, 256, 1, 1, True)
assert build.unusable() is None  # compiles its probe
made, binary = [], build.binary
def noted(printed, capability, aligned=frozenset()):
    made.append((printed.name, capability))
    return binary(printed, capability, aligned)
build.binary = noted
line = gpu_ahead.compiled(job, "a card,90,232448,65536,132")
assert "error" not in line, line
print(made)
wrong = gpu_ahead.compiled(job._replace(cell="NoSuchCell"), "a card,90,232448,65536,132")
print(wrong["error"])
every = gpu_ahead.jobs()
assert len(set(every)) == len(every) and every[0].H == 768 and every[1].H == 512
"""


@pytest.mark.parametrize("card", capacity.DEVICES, ids=lambda card: card.name)
def test_what_the_driver_says_of_a_card_is_understood(card: Any) -> None:
    ahead = load("tools/gpu_ahead.py")
    with ahead.without_a_card(ahead.spelled(card), False):
        assert TorchDevice.limits == card._replace(compiler=build.compiler())


@pytest.mark.slow
def test_kernels_are_compiled_ahead() -> None:
    """The tool compiles a layer's kernels for a card of which only the numbers are known."""
    made, wrong = python(AHEAD, **COMPILES).splitlines()
    names = [name for name, capability in ast.literal_eval(made) if capability == 90]
    assert [name for name in names if name != "move"] == [
        "forward_cooperative",
        "backward_cooperative",
    ]
    assert made.count("(") == len(names)  # nothing for another card
    assert wrong.startswith("KeyError")
    card = ("--device", "a card,90,232448,65536,132", "--jobs", "1")
    late = run("tools/gpu_ahead.py", *card, "--only", "2", "--seconds", "0", **COMPILES)
    assert json.loads(late) == {"skipped": 2, "why": "0 seconds were over"}


# -- the whole run ---------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def check() -> Any:
    return load("tools/gpu_check.py")


def test_the_plan_of_the_check(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes at most nine minutes, most important parts first, and its programs exist."""
    parts = check.plan()
    order = "card smoke host frames ahead exchange targets stress tests keras engine sanitizer rest"
    assert [part.name for part in parts] == order.split()
    assert sum(part.seconds for part in parts) <= 540
    assert parts[0].seconds >= 120 and all(part.most >= part.seconds for part in parts)
    commands = [command for part in parts for command in part.commands]
    assert len({command.name for command in commands}) == len(commands)
    assert check.of_a_card()[:2] == ["tests/torch/test_card.py", "tests/engines/test_gpu.py"]
    smoke = [command.name for command in parts[1].commands]
    assert len(smoke) == 3 * 2 * 2 and smoke[0] == "smoke-2-forward-bfloat16"
    for command in commands:
        for word in command.words:
            assert not word.endswith((".py", ".sh")) or (ROOT / word).exists(), word
    find = importlib.util.find_spec
    for there in (True, False):
        module = object() if there else None
        monkeypatch.setattr(
            check.importlib.util, "find_spec", lambda n, m=module: m if n == "xdist" else find(n)
        )
        (tests,) = [c for part in check.plan() for c in part.commands if c.name == "tests"]
        assert ("--max-worker-restart" in tests.words) is there


@without_a_card
@pytest.mark.slow
def test_the_rehearsal(tmp_path: Path) -> None:
    """Without a card, the first parts of a card's run end well, and say what they found."""
    said = run("tools/gpu_check.py", "--rehearse", str(tmp_path))
    assert "| smoke | 12 of 12 passed |" in said and "| host | passed |" in said
    assert "| frames | passed |" in said
    lines = [json.loads(line) for line in (tmp_path / "host.txt").read_text().splitlines()]
    assert {line["cell"] for line in lines} == {"LSTM", "PeepholeLSTM", "GRU"}
    for line in lines:
        assert 0 < line["forward"] < line["forward+backward"]
        assert line["forward"] < line["call"] < line["training"]


HANGS = "import time; print('begins', flush=True); time.sleep(600)"
DEAF = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + HANGS
DIES = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
LEAVES = (
    "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c',"
    " 'import time; time.sleep(600)']); print('{\"child\": %d}' % child.pid)"
)
# A process that loses the card in its first two cases and succeeds in the third.
LOSES = """
import json, sys
after = int(sys.argv[-1]) if "--after" in sys.argv else 0
line = {"cell": "LSTM", "dtype": "bfloat16", "T": 9, "B": 16, "I": 768, "H": 768, "L": 1, "D": 1}
line |= {"contender": "anycell", "pass": "forward"}
line |= {"us_per_step": 1.25, "tier": 2} if after == 2 else {"lost": "CUDA error", "done": 1}
print(json.dumps(line))
sys.exit(70 if after < 2 else 0)
"""
SAYS = """
print('{"launches": 9, "wrong": 1, "error": "RuntimeError: no"}')
print('tests/test_a.py::test_d ')
print('[gw0] [ 33%] PASSED tests/test_a.py::test_a[x y] ')
print('FAILED tests/test_a.py::test_b - AssertionError: no')
raise SystemExit(1)
"""
# Processes by name: code, options of the command, and result.
FATES: dict[str, tuple[str, dict[str, Any], str]] = {
    "smoke-dies": (DIES, {}, "killed by SIGKILL"),
    "ahead": (LEAVES, {}, "passed"),
    "targets": (LOSES, {"goes_on": True}, "passed"),
    "stress": (SAYS, {}, "failed, status 1"),
    "tests": (SAYS, {}, "failed, status 1"),
    "absent": ("", {"needs": ("a_module_that_is_not_there",)}, "missing"),
    "sanitizer-2": ("raise SystemExit(255)", {"fails": (9,)}, "refused"),
    "sanitizer-3": ("raise SystemExit(9)", {"fails": (9,)}, "failed, status 9"),
    "smoke-hangs": (HANGS, {}, "out of time"),
    "smoke-deaf": (DEAF, {}, "out of time"),
}


@pytest.fixture
def begun(check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that makes a check of ``FATES``; its seconds are for hanging processes."""
    # Otherwise, children of a background run would ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(check, "LAST_WORDS", ((signal.SIGINT, 0.7), (signal.SIGABRT, 2.0)))

    def begin(seconds: float) -> Any:
        commands = [
            check.Command(name, (sys.executable, "-c", text.replace("{", "{{").replace("}", "}}")),
                          **options)
            for name, (text, options, _) in FATES.items()
        ]  # fmt: skip
        commands.append(check.Command("no program", ("a-tool-that-is-not-there",)))
        hang = tuple(
            command for command in commands if command.name in ("smoke-hangs", "smoke-deaf")
        )
        end = tuple(command for command in commands if command not in hang)
        parts = [check.Part("end", 60, 60, end), check.Part("hang", seconds, seconds, hang)]
        return check.Check([*parts, check.Part("late", 0, 0, end)], tmp_path / "results")

    return begin


@pytest.mark.more  # it waits for seconds
def test_whatever_happens_the_results_are_kept(check: Any, begun: Any) -> None:
    """Processes fail, hang, ignore signals, die, are missing, lose the card, or lack time."""
    run = begun(3.0)
    assert not run.run()
    results = check.Results.read(run.folder)
    late = [record["result"] for record in results.records if record["part"] == "late"]
    said = [record for record in results.records if record["part"] != "late"]
    right = {name: fate for name, (*_, fate) in FATES.items()} | {"no program": "missing"}
    assert {r["name"]: r["result"] for r in said if r["result"] != "lost the card"} == right
    assert len(said) == len(right) + 2 and set(late) == {"no time left"}  # two cards were lost
    # The third run skipped two cases; a process that ignored SIGINT printed its stack.
    assert sum(line.get("done", 0) for line in results.lines("targets")) == 2
    assert "KeyboardInterrupt" in results.texts["smoke-hangs"]
    assert "Fatal Python error: Aborted" in results.texts["smoke-deaf"]
    (child,) = results.lines("ahead")
    status = Path(f"/proc/{child['child']}/stat")  # no process of a part outlives it
    assert not status.exists() or status.read_text().split()[2] == "Z"
    summary = (run.folder / "summary.md").read_text()
    for text in (
        "| 9 | 1 | error: RuntimeError: no |",
        "| LSTM | bfloat16 | 9x16x768x768 | - | 1.25 (t2) / - |",
        "lost the card: CUDA error",
        "tests: 1 passed\n- not finished: tests/test_a.py::test_d\n- FAILED tests/test_a.py",
    ):
        assert text in summary, text


def test_a_signal_ends_it_with_all_that_it_has(check: Any, begun: Any) -> None:
    run = begun(60.0)

    def stop() -> None:
        while "begins" not in check.Results.read(run.folder).texts.get("smoke-hangs", ""):
            time.sleep(0.02)
        run._stop(signal.SIGTERM, None)

    threading.Thread(target=stop, daemon=True).start()
    assert not run.run() and time.monotonic() - run.begin < 30
    results = check.Results.read(run.folder)
    fates = {record["name"]: record["result"] for record in results.records}
    assert fates["smoke-hangs"] == results.records[-1]["result"] == "stopped by SIGTERM"
    assert (run.folder / "summary.md").exists()


def test_a_line_that_nobody_expected(check: Any) -> None:
    page = check.markdown(check.Results({"targets": '{"cell": "LSTM"}'}))
    assert "unreadable: KeyError" in page and "## What failed" in page


@without_a_card
@pytest.mark.slow
def test_no_card_ends_the_check(check: Any, tmp_path: Path) -> None:
    script = [str(ROOT / "tools/gpu_check.sh"), str(tmp_path)]
    said = subprocess.run(["sh", *script], capture_output=True, text=True,
                          env={**os.environ, "PYTHON": sys.executable})  # fmt: skip
    assert said.returncode == 1, said.stderr
    results = check.Results.read(tmp_path)
    first, *others = results.records
    assert first["result"] == "failed, status 3" and "no CUDA card" in results.texts["card"]
    assert {record["result"] for record in others} == {"no card"} and len(others) > 20
