"""The examples for Keras, in their short form."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from tolerances import LIMITS

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
pytest.importorskip("keras")

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str) -> float:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(["--quick"])


def test_forecast_beats_the_last_season() -> None:
    assert run("keras_forecast") < 0.9


@pytest.mark.slow
def test_text_is_told_apart() -> None:
    assert run("keras_text") > 0.08


@pytest.mark.slow
def test_translation_without_a_teacher() -> None:
    assert run("keras_translate") > 0.5


def test_chunks_are_the_stream() -> None:
    assert run("keras_stream") <= LIMITS["float32", "forward"]
