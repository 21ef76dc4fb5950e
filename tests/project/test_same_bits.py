"""``tools/same_bits.py``: layers have the bits that they had, unless it lists them and says why."""

import re
import subprocess

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
    changed = [same_bits.Changed("^torch ", "^grad ", "why"), same_bits.Changed("T1", "", "other")]
    for layer_, arrays, why in (
        ("torch LSTM", ["grad x"], "why"),
        ("torch LSTM T1", ["grad x", "output"], "why; other"),
        ("torch LSTM", ["grad x", "output"], None),
        ("numpy LSTM", ["grad x"], None),
    ):
        assert same_bits.reason(layer_, arrays, changed) == why


def test_each_layer_has_a_name_of_its_own() -> None:
    names = [one.name for one in same_bits.layers()]
    assert len(names) == len(set(names))
    for changed in same_bits.CHANGED:
        assert any(re.search(changed.layers, name) for name in names)


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
def test_the_layers_take_both_sides_of_every_road(runs: list[layer.pass_tables.PassTables]) -> None:
    assert same_bits.digests("^torch (LSTM|GRU) .* float32( mask)?$")
    taken = {(road, bool(on(run))) for road, on in ROADS.items() for run in runs}
    assert taken == {(road, side) for road in ROADS for side in (True, False)}


@pytest.mark.slow
def test_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    """As at the revision that the tool is about."""
    commit = f"{same_bits.BASELINE}^{{commit}}"
    looked = subprocess.run(
        ["git", "-C", str(same_bits.ROOT), "cat-file", "-e", commit], capture_output=True
    )
    if looked.returncode:
        pytest.skip(f"revision {same_bits.BASELINE} is not in this clone: it may be a shallow one")
    assert same_bits.main([]) == 0, capsys.readouterr().out
