"""Models of real projects, accelerated, and the examples that show it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tolerances import LIMITS, assert_close  # noqa: E402

import anycell.torch as at  # noqa: E402
from anycell.bench.shapes import all_shapes  # noqa: E402

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = ["deepar", "amp-model", "pyannote", "hydrology", "denoise", "unmix"]


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """The script as a module; its folder is on the path, as when it is run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        import accelerated

        yield accelerated


@pytest.mark.parametrize("name", NAMES)
def test_models_of_real_projects(example: Any, name: str) -> None:
    """Same outputs and same training curves, on narrow layers, few steps and few rows."""
    full = all_shapes()[name]
    shape = replace(full, T=12, B=3, I=max(1, full.I // 8), H=max(4, full.H // 8))
    found = example.compare(name, shape, steps=4, dtype=torch.float64)
    assert found.error <= LIMITS["float64", "forward"]
    for ours, theirs in zip(found.ours, found.theirs, strict=True):
        assert_close(ours, theirs, "float64", "training")
    assert found.ours[-1] < found.ours[0]
    layers = at.recurrent_layers(at.accelerate(example.MODELS[name](shape)))
    assert [layer.engine for layer in layers] == ["cpu"]


def test_the_table_it_prints(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(example.MODELS) == NAMES
    example.main(["deepar", "--steps", "3"])
    head, _, row = capsys.readouterr().out.splitlines()
    assert head.startswith("torch ") and "times as fast" in row
    with pytest.raises(SystemExit):
        example.main(["deeper"])
    assert "model 'deeper': expected one of deepar, amp-model" in capsys.readouterr().err
