"""The Keras layers where JAX traces them."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")
if keras.backend.backend() != "jax":
    pytest.skip("Keras runs on another backend", allow_module_level=True)

import jax  # noqa: E402
from tolerances import assert_close  # noqa: E402

import anycell.keras as ak  # noqa: E402
import anycell.keras.jax  # noqa: E402
from anycell import cells  # noqa: E402


def equations(jaxpr: Any) -> Iterator[Any]:
    """All of a jaxpr, those inside of others too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for part in value if isinstance(value, (list, tuple)) else [value]:
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "layer",
    [
        lambda: ak.LSTM(5, return_sequences=True),
        lambda: ak.GRU(5, reset_after=False),
        lambda: ak.RNN(cells.LayerNormLSTM, 5, go_backwards=True),
    ],
    ids=["LSTM", "GRU", "LayerNormLSTM"],
)
def test_a_layer_is_one_scan(layer: Any, masked: bool) -> None:
    """One over time, of one step, and a second one backwards: not a step per step."""
    layer = layer()
    layer.build((3, None, 2))

    def total(x: Any, mask: Any) -> Any:
        return keras.ops.sum(layer(x, mask=mask if masked else None))

    for function, scans in ((total, 1), (jax.grad(total), 2)):
        found = []
        for steps in (4, 9):
            given = np.ones((3, steps, 2), "float32"), np.ones((3, steps), bool)
            own = list(equations(jax.make_jaxpr(function)(*given).jaxpr))
            loops = [e for e in own if e.primitive.name in ("scan", "while")]
            assert [e.params["length"] for e in loops] == [steps] * scans
            found.append(Counter(e.primitive.name for e in own))
        assert found[0] == found[1]


def test_eager_calls_compile_once(rng: np.random.Generator) -> None:
    layer = ak.RNN(cells.LayerNormLSTM, 4)
    x = rng.normal(size=(3, 6, 2)).astype("float32")
    traced = []
    with pytest.MonkeyPatch.context() as patch:
        own = anycell.keras.jax.composite
        patch.setattr(anycell.keras.jax, "composite", lambda *args: traced.append(1) or own(*args))
        for part in (x, 2 * x, x[:2], x[:2]):
            layer(part)
    assert len(traced) == 2  # one for each shape


def test_transformations_of_jax(rng: np.random.Generator) -> None:
    """What keeps the layers off the kernels: jit, vmap, and forward mode."""
    layer = ak.RNN(cells.PeepholeLSTM, 4)
    layer.build((3, None, 2))
    x = rng.normal(size=(5, 3, 6, 2)).astype("float32")
    one_by_one = np.stack([layer(part) for part in x])
    assert_close(np.array(jax.vmap(layer)(x)), one_by_one, "float32", "forward")
    assert_close(np.array(jax.jit(layer)(x[0])), one_by_one[0], "float32", "forward")

    def total(x: Any) -> Any:
        return jax.numpy.sin(layer(x)).sum()

    v = rng.normal(size=x[0].shape).astype("float32")
    slope = jax.jvp(total, (x[0],), (v,))[1]
    assert_close(np.array(slope), np.vdot(jax.grad(total)(x[0]), v), "float32", "gradient")
