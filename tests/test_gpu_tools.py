"""What ``tools/gpu_check.sh`` runs on a card, as far as it goes without one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tolerances import assert_close

pytest.importorskip("torch")
TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_bench", TOOLS / "gpu_bench.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_plan_of_the_runs(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The targets first; then all of the grid and of the shapes, each once."""
    bench.main(["--plan"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["name"] for line in lines[:7]] == ["target"] * 7
    assert (lines[0]["cell"], lines[0]["H"], lines[0]["B"]) == ("LSTM", 768, 16)
    grid = [line for line in lines if line["name"] == "grid"]
    assert len(grid) == 8 * 5 * 3 * 2 and all(line["T"] == 1024 for line in grid)
    assert len({tuple(line.values()) for line in lines}) == len(lines)
    shapes = {line["name"] for line in lines} - {"grid", "target"}
    assert {"deepar", "ocr", "basecaller"} <= shapes
    assert {"grid", "deepar"} <= {line["name"] for line in lines[7:13]}


def test_what_time_does_not_allow_is_said(bench: Any) -> None:
    def measured(case: Any) -> Iterator[dict[str, Any]]:
        yield {"contender": "anycell", "us_per_step": 1.0}

    todo = bench.cases()[:3]
    lines = list(bench.within(60.0, todo, measured))
    assert [line["us_per_step"] for line in lines] == [1.0] * 3
    for line, case in zip(bench.within(0.0, todo, measured), todo, strict=True):
        assert line == {**case._asdict(), "skipped": "0 seconds were over"}


def test_the_picture(bench: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = [{**bench.cases()[0]._asdict(), "skipped": "0 seconds were over"}]
    for case in bench.cases():
        for n, way in enumerate(("forward", "forward+backward"), 1):
            for m, name in enumerate(("torch", "anycell", "loop"), 1):
                us = 0.001 * n * m * case.H
                lines.append(
                    {**case._asdict(), "card": "made up", "contender": name, "pass": way,
                     "us_per_step": us, "quartiles": [us, us], "peak_bytes": 1}
                )  # fmt: skip
    (tmp_path / "bench.jsonl").write_text("\n".join(map(json.dumps, lines)))
    bench.main(["--out", str(tmp_path), "--draw"])
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


@pytest.mark.parametrize("tool", ["gpu_bench.py", "gpu_stress.py"])
def test_without_a_card(tool: str, tmp_path: Path) -> None:
    """They say so, and fail."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a card")
    command = [sys.executable, str(TOOLS / tool)]
    said = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert said.returncode == 1 and "no CUDA card here" in said.stderr


def test_the_script_is_a_script() -> None:
    subprocess.run(["sh", "-n", str(TOOLS / "gpu_check.sh")], check=True)
