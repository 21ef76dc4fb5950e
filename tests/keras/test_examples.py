"""The examples for Keras, in their short form."""

import pytest
from processes import load
from tolerances import LIMITS

pytest.importorskip("keras")


def run(name: str) -> float:
    return load(f"examples/{name}.py").main(["--quick"])


@pytest.mark.more  # it trains for seconds
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
