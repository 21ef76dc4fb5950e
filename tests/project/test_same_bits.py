"""``tools/same_bits.py`` compares the bits of layers with those of another revision."""

import numpy as np
import pytest
from roads import ROADS

from anycell import layer
from tools import same_bits

torch = pytest.importorskip("torch")


def test_digests_tell_bits_dtypes_and_shapes_apart() -> None:
    arrays = [np.zeros(4, "float32"), np.zeros(2, "float64"), np.zeros((2, 2), "float32")]
    arrays.append(-arrays[0])  # equal, but of other bits
    assert len({same_bits.digest(array) for array in arrays}) == len(arrays)
    assert same_bits.digest(arrays[2].T) == same_bits.digest(arrays[2])


def test_differences() -> None:
    before = {"same": {"x": "1"}, "other": {"x": "1", "y": "2"}, "gone": {"x": "1"}}
    now = {"same": {"x": "1"}, "other": {"x": "3", "y": "2"}, "new": {"x": "1"}}
    different = {"gone": ["x"], "new": ["x"], "other": ["x"]}
    assert same_bits.differences(before, now) == different


def test_each_layer_has_a_name_of_its_own() -> None:
    names = [name for name, _ in same_bits.layers()]
    assert len(names) == len(set(names)) > 500


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
def test_the_layers_take_both_sides_of_every_road(runs: list[layer.pass_tables.PassTables]) -> None:
    assert same_bits.digests(r"^(torch|numpy)\.RNN (LSTM|GRU) .* float32( state mask| steps)?$")
    taken = {(road, bool(on(run))) for road, on in ROADS.items() for run in runs}
    assert taken == {(road, side) for road in ROADS for side in (True, False)}


@pytest.mark.slow
def test_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    """A revision has its own bits, whoever asks."""
    if not (same_bits.ROOT / ".git").exists():
        pytest.skip("this is no checkout of git")
    some = ["--threads", "1", "--only", r"RNN GRU T7 .*float64( steps)?$"]
    assert same_bits.main(some) == 0, capsys.readouterr().out
    assert "layers: 4, " in capsys.readouterr().out
