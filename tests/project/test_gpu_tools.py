"""``tools/gpu_check.py`` and the tools that it runs on a card, tested without a card."""

import ast
import importlib.util
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu import (  # before anything else that may import Triton
    COMPILES,
    without_a_card,
)
from processes import ROOT, load, python, run
from tolerances import assert_close

from anycell.engines.gpu import build, capacity
from anycell.torch.framework import TorchDevice


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The tool, which chooses how torch rounds, as other tests must not see."""
    from torch import backends

    places = backends.cudnn, backends.cuda.matmul
    allowed = [place.allow_tf32 for place in places]
    yield load("tools/gpu_bench.py")
    for place, value in zip(places, allowed, strict=True):
        place.allow_tf32 = value


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
    assert all(line["host_us_per_call"] > 0 for line in lines if "us_per_step" in line)


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
@pytest.mark.parametrize("tool", ["gpu_bench", "gpu_check"])
@without_a_card
@pytest.mark.slow
def test_without_a_card(tool: str, tmp_path: Path) -> None:
    """Without a card, tools print the reason and fail."""
    said = run(str(ROOT / f"tools/{tool}.py"), cwd=tmp_path, status=1)
    assert f"{tool}: no CUDA card here" in said


AHEAD = """
import sys
sys.path.insert(0, "tools")
import gpu_ahead
from anycell.engines.gpu import build
case = gpu_ahead.gpu_bench.Case("target", "LSTM", "bfloat16", 9, 16, 256, 256)
assert build.unusable() is None  # compiles its probe
made, binary = [], build.binary
def noted(printed, capability, aligned=frozenset()):
    made.append((printed.name, capability))
    return binary(printed, capability, aligned)
build.binary = noted
line = gpu_ahead.compiled(case, True, "a card,90,232448,65536,132")
assert "error" not in line, line
print(made)
wrong = gpu_ahead.compiled(case._replace(cell="NoSuchCell"), True, "a card,90,232448,65536,132")
print(wrong["error"])
every = gpu_ahead.jobs()
assert len(set(every)) == len(every) == 34 and every[0][0].H == 768, len(every)
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
    late = run("tools/gpu_ahead.py", *card, "--seconds", "0", **COMPILES)
    assert json.loads(late) == {"skipped": 34, "why": "0 seconds were over"}


# -- the whole run ---------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def check() -> Any:
    return load("tools/gpu_check.py")


def test_the_plan_of_the_check(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes at most nine minutes, most important parts first, and its programs exist."""
    parts = check.plan()
    order = "card doctor ahead targets tests keras engine sanitizer rest"
    assert [part.name for part in parts] == order.split()
    assert sum(part.seconds for part in parts) <= 540
    assert all(part.most >= part.seconds for part in parts)
    assert check.of_a_card()[:2] == ["tests/torch/test_card.py", "tests/engines/test_gpu.py"]
    for part in parts:
        for word in part.words:
            assert not word.endswith(".py") or (ROOT / word).exists(), word
    find = importlib.util.find_spec
    for there in (True, False):
        module = object() if there else None
        monkeypatch.setattr(
            check.importlib.util, "find_spec", lambda n, m=module: m if n == "xdist" else find(n)
        )
        (tests,) = [part for part in check.plan() if part.name == "tests"]
        assert ("--max-worker-restart" in tests.words) is there


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
# Processes by name: code and result.
FATES = {
    "dies": (DIES, "killed by SIGKILL"),
    "leaves": (LEAVES, "passed"),
    "targets": (LOSES, "passed"),
    "fails": ("print('no'); raise SystemExit(1)", "failed, status 1"),
    "hangs": (HANGS, "out of time"),
    "deaf": (DEAF, "out of time"),
}


@pytest.fixture
def begun(check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that makes a check of ``FATES``; its seconds are for hanging processes."""
    # Otherwise, children of a background run would ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    *first, last = check.LAST_WORDS
    monkeypatch.setattr(check, "LAST_WORDS", (*[(number, 1.0) for number, _ in first], last))

    def begin(seconds: float) -> Any:
        parts = [
            check.Part(name, 60, seconds if outcome == "out of time" else 60,
                       (sys.executable, "-c", text.replace("{", "{{").replace("}", "}}")))
            for name, (text, outcome) in FATES.items()
        ]  # fmt: skip
        parts.append(check.Part("no module", 0, 60, parts[0].words, "a_module_that_is_not_there"))
        parts.append(check.Part("no program", 0, 60, ("a-tool-that-is-not-there",)))
        parts.append(check.Part("late", 0, 0, parts[0].words))
        return check.Check(parts, tmp_path / "results")

    return begin


@pytest.mark.more  # it waits for seconds
def test_whatever_happens_the_results_are_kept(check: Any, begun: Any) -> None:
    """Processes fail, hang, ignore signals, die, are missing, lose the card, or lack time."""
    run = begun(2.0)
    assert not run.run()
    summary = (run.folder / "summary.md").read_text()
    missing = "", "missing"
    for name, (_, outcome) in {
        **FATES, "no module": missing, "no program": missing, "late": ("", "no time left"),
    }.items():  # fmt: skip
        assert f"| {name} | {outcome} |" in summary
    texts = {file.stem: file.read_text() for file in run.folder.glob("*.txt")}
    lines = {name: check.lines_of(text) for name, text in texts.items()}
    # The third run skipped two cases; a process that ignored SIGINT printed its stack.
    assert [line.get("done") for line in lines["targets"]] == [1, 1, None]
    assert "KeyboardInterrupt" in texts["hangs"] and "Aborted" in texts["deaf"]
    status = Path(f"/proc/{lines['leaves'][0]['child']}/stat")  # no process of a part outlives it
    assert not status.exists() or status.read_text().split()[2] == "Z"
    for text in (
        "| LSTM | bfloat16 | 9x16x768x768 | - | 1.25 (t2) / - |",
        "lost the card: CUDA error",
        "## fails: failed, status 1\n\n    no\n",
    ):
        assert text in summary, text


def test_a_signal_ends_it_with_all_that_it_has(check: Any, begun: Any) -> None:
    run = begun(60.0)

    def stop() -> None:
        hangs = run.folder / "hangs.txt"
        while not hangs.exists() or "begins" not in hangs.read_text():
            time.sleep(0.02)
        run.stop(signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    begin = time.monotonic()
    assert not run.run() and time.monotonic() - begin < 30
    summary = (run.folder / "summary.md").read_text()
    assert (
        "| hangs | stopped by SIGTERM |" in summary and "| late | stopped by SIGTERM |" in summary
    )
