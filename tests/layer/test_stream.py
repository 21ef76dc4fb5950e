"""Single steps on packed weights equal a call on the whole sequence."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from processes import at_once
from tolerances import assert_close, close

import anycell.numpy as an
from anycell import cells
from anycell.engines import cpu
from anycell.engines.cpu import isa
from anycell.lang.declare import INPUT, PROJECTION
from anycell.lang.transform import with_projection
from anycell.layer import stream

EVERY = [getattr(cells, name) for name in cells.__all__]
every_cell = pytest.mark.parametrize("case", EVERY, ids=lambda c: c.name)


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


@every_cell
def test_the_projection_inside_the_step(case: Any) -> None:
    inside = with_projection(case)
    assert [l.name for l in inside.linears if l.name != PROJECTION] == [
        l.name for l in case.linears
    ]
    assert inside.linears[-1].name == PROJECTION and inside.linears[-1].in_size == INPUT
    assert inside.key != case.key and inside.hyper == case.hyper


# ---- NumPy ---------------------------------------------------------------------------------------
def test_numpy_weights_written_in_place(rng: np.random.Generator) -> None:
    """They are packed by ``prepare``; ``test_copied_layers`` has all other ways to change them."""
    layer = an.LSTM(3, 5, dtype="float64", seed=1).prepare()
    x = rng.standard_normal((2, 3))

    def right() -> bool:
        return close(layer.step(x)[0], layer.forward(x[None])[0][0], "float64", "forward")

    assert right()
    layer.parameters["weight_hh_l0"][:] = 0.3
    layer.parameters["bias_ih_l0"][:] = 0.3
    assert not right()
    layer.prepare()
    assert right()


def test_numpy_threads_step_one_layer(rng: np.random.Generator) -> None:
    layer = an.GRU(16, 64, 2, dtype="float64", seed=1).prepare()
    x = rng.standard_normal((40, 4, 1, 16))
    right = [run(layer, x[:, n]) for n in range(4)]
    found = at_once(*[partial(run, layer, x[:, n]) for n in range(4)])
    assert all(map(np.array_equal, found, right))


def run(layer: Any, x: Any) -> Any:
    state = None
    for step in x:
        output, state = layer.step(step, state)
    return output


@pytest.mark.parametrize("units", [16, 256])
def test_bits_do_not_depend_on_threads(rng: np.random.Generator, units: int) -> None:
    """Bits are equal for any number of threads; steps of few units use a single thread."""
    layer, x = an.LSTM(units, units, 2, seed=1).prepare(), rng.standard_normal((4, 1, units))
    found = []
    for threads in (1, 2, 3):
        cpu.threads.set_threads(threads)
        try:
            found.append(run(layer, x))
        finally:
            cpu.threads.set_threads(None)
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])
    asked = {step.recipe.options.threads for step in layer._prepared.stream._steps.values()}
    assert asked == ({1} if units == 16 else {1, 2, 3})


def test_another_instruction_set(rng: np.random.Generator) -> None:
    """A step under another instruction set is refused until the weights are packed again."""
    if isa.current().name == "generic":
        pytest.skip("there is no narrower one")
    layer, x = an.LSTM(3, 5, dtype="float64", seed=0).prepare(), rng.standard_normal((2, 3))
    with isa.force("generic"):
        with pytest.raises(RuntimeError, match=r"given 'generic' .* Call prepare\(\) again"):
            layer.step(x)
        layer.prepare()
        assert_close(layer.step(x)[0], layer.forward(x[None])[0][0], "float64", "forward")


def test_numpy_from_any_address(rng: np.random.Generator, taken: list[int]) -> None:
    """Each array of a step in turn has an odd address, as in a packed record."""
    layer = an.RNN(cells.EALSTM, 3, 5, 2, dtype="float64", seed=1).prepare()
    shapes = [(4, 3), (4, 5), *[(2, 4, 5)] * 4]
    arrays, resets = [rng.standard_normal(shape) for shape in shapes], np.array([1, 0, 1, 0])

    def step(x: Any, static: Any, h: Any, c: Any, *start: Any) -> Any:
        output, new = layer.step(x, (h, c), static=static, resets=resets, reset_state=start)
        return output, *new

    right = step(*arrays)
    for i, array in enumerate(arrays):
        odd = np.zeros(array.nbytes + 1, np.uint8)[1:].view(np.float64).reshape(array.shape)
        odd[:] = array
        assert all(map(np.array_equal, step(*arrays[:i], odd, *arrays[i + 1 :]), right))
    assert taken == [4] * (1 + len(arrays))


def test_many_forms(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more numbers of rows than recipes that are kept."""
    monkeypatch.setattr(stream, "FORMS", 3)
    layer = an.GRU(3, 5, 2, dtype="float64", seed=0).prepare()
    for rows in (*range(9), 0, 3):
        x = rng.standard_normal((rows, 3))
        assert_close(layer.step(x)[0], layer.forward(x[None])[0][0], "float64", "forward")
        assert len(layer._prepared.stream._steps) <= 3


def test_numpy_errors(rng: np.random.Generator) -> None:
    layer = an.LSTM(3, 5, seed=0).prepare()
    with pytest.raises(ValueError, match=r"x: given shape \[2, 4\]; expected shape \[B, 3\]"):
        layer.step(np.zeros((2, 4)))
    with pytest.raises(ValueError, match=r"state: given shape \[1, 3, 5\].*state 'h'"):
        layer.step(np.zeros((2, 3)), (np.zeros((1, 3, 5)),) * 2)
    with pytest.raises(TypeError, match="static: given ndarray"):
        layer.step(np.zeros((2, 3)), static=np.zeros((2, 5)))
    both = an.LSTM(3, 5, bidirectional=True)
    for method in (both.prepare, lambda: both.step(np.zeros((2, 3)))):
        with pytest.raises(ValueError, match="given bidirectional=True"):
            method()


def test_numpy_resets(rng: np.random.Generator, taken: list[int]) -> None:
    """Resets may have any dtype, prepared or not; they do not affect the next step."""
    x, flags = rng.standard_normal((2, 3)), np.array([True, False])
    for batch_first in (False, True):
        layer = an.RNN(cells.LSTM, 3, 5, 2, dtype="float64", seed=1, batch_first=batch_first)
        state = tuple(rng.standard_normal((2, 2, 5)) for _ in range(2))
        once = x[:, None] if batch_first else x[None]
        column = flags[:, None] if batch_first else flags[None]
        wanted, final = layer.forward(once, state, resets=column)
        without, _ = layer.forward(once, state)
        for prepared in (False, True):
            taken.clear()
            for given in (flags, flags.astype(float), flags.astype(int), flags.tolist()):
                output, new = layer.step(x, state, resets=given)
                assert_close(output, wanted.reshape(2, 5), "float64", "forward")
                for a, b in zip(new, final, strict=True):
                    assert_close(a, b, "float64", "forward")
                output, _ = layer.step(x, state)
                assert_close(output, without.reshape(2, 5), "float64", "forward")
            assert len(taken) == 8 * prepared
            for bad, kind in (([0, 0.5], ValueError), ([[1, 0]], ValueError), ("ab", TypeError)):
                with pytest.raises(kind, match="resets: given"):
                    layer.step(x, state, resets=bad)
            layer.prepare()
