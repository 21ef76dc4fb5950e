"""Layouts that the contract has accepted: others are still copied, or refused."""

from collections.abc import Callable

import numpy as np
import pytest

from anycell import cells, layer
from anycell.layer import contract
from anycell.numpy.host import NumpyHost
from anycell.plan import plan

PLAN = plan(cells.PeepholeLSTM, 8)
Arrays = dict[str, np.ndarray]


def arrays() -> Arrays:
    rng = np.random.default_rng(0)
    shapes = {"x": (5, 3, 4)} | layer.shapes(PLAN.cell, {"H": 8}, 4, True)
    shapes |= {"state h": (1, 3, 8), "state c": (1, 3, 8)}
    return {n: rng.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}


def solve(named: Arrays, shift: Callable[[np.ndarray], np.ndarray] = np.copy) -> list[np.ndarray]:
    """Results and gradients; what arrives at the final states is laid out as ``shift`` says."""
    host, options = NumpyHost("float32"), layer.Options()
    output, finals, kept = layer.forward(host, PLAN, named, options, keep=True)
    assert kept is not None
    kept = kept._replace(hidden=shift(kept.hidden), values=[shift(v) for v in kept.values])
    d = layer.backward(host, PLAN, named, options, kept, output, [shift(f) for f in finals])
    return [output, *finals, *[d[name] for name in sorted(d)]]


def turned(a: np.ndarray) -> np.ndarray:
    return np.asfortranarray(a)


def unaligned(a: np.ndarray) -> np.ndarray:
    memory = np.empty(a.nbytes + 1, np.uint8)
    view = memory[1:].view(a.dtype).reshape(a.shape)
    view[...] = a
    return view


@pytest.mark.parametrize("shift", [turned, unaligned])
def test_other_layouts_are_looked_at_again(shift: Callable[[np.ndarray], np.ndarray]) -> None:
    expected = solve(arrays())
    known = len(contract._accepted)
    for _ in range(2):  # a layout that is copied is never among those that go as they are
        for name, array in arrays().items():
            results = solve(arrays() | {name: shift(array)})
            for result, wanted in zip(results, expected, strict=True):
                np.testing.assert_array_equal(result, wanted)
        for result, wanted in zip(solve(arrays(), shift), expected, strict=True):
            np.testing.assert_array_equal(result, wanted)
    # Weights lie well either way, and so do states of any strides.
    assert len(contract._accepted) - known < 2 * len(arrays())


def test_others_are_refused_as_before() -> None:
    solve(arrays())
    for name, array in arrays().items():
        with pytest.raises(TypeError, match="float64"):
            solve(arrays() | {name: array.astype(np.float64)})
        if name != "x":
            with pytest.raises(ValueError, match="given shape"):
                solve(arrays() | {name: array[..., :-1]})


def test_no_more_layouts_are_kept_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = solve(arrays())
    monkeypatch.setattr(contract, "_MOST", 1)
    for _ in range(2):
        for result, wanted in zip(solve(arrays()), expected, strict=True):
            np.testing.assert_array_equal(result, wanted)
    contract._accepted.clear()
    solve(arrays())
    assert len(contract._accepted) == 1
