"""The Keras layers where JAX traces them."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")
if keras.backend.backend() != "jax":
    pytest.skip("Keras runs on another backend", allow_module_level=True)

import jax  # noqa: E402
from processes import python  # noqa: E402
from tolerances import assert_close  # noqa: E402

import anycell.keras as ak  # noqa: E402
import anycell.keras.jax  # noqa: E402
from anycell import cells  # noqa: E402
from anycell.keras.call import lowered  # noqa: E402
from anycell.plan import Layer  # noqa: E402

LAYERS = {
    "LSTM": lambda: ak.LSTM(5, return_sequences=True),
    "GRU": lambda: ak.GRU(5, reset_after=False),
    "LayerNormLSTM": lambda: ak.RNN(cells.LayerNormLSTM, 5, go_backwards=True),
}


def equations(jaxpr: Any) -> Iterator[Any]:
    """All of a jaxpr, those inside of others too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for part in value if isinstance(value, (list, tuple)) else [value]:
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def counted(function: Any, *given: Any) -> Counter[str]:
    """How often each primitive is in the jaxpr of a function."""
    return Counter(e.primitive.name for e in equations(jax.make_jaxpr(function)(*given).jaxpr))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_one_call_of_a_kernel(name: str, masked: bool) -> None:
    """And a second one backwards; step by step, it is one scan and a second one backwards."""
    layer = LAYERS[name]()
    layer.build((3, None, 2))

    def total(x: Any, mask: Any) -> Any:
        return keras.ops.sum(layer(x, mask=mask if masked else None))

    def in_steps(x: Any, mask: Any) -> Any:
        with ak.step_by_step():
            return total(x, mask)

    given = [(np.ones((3, t, 2), "float32"), np.ones((3, t), bool)) for t in (4, 9)]
    passes = {"anycell_layer"}, {"anycell_layer", "anycell_backward"}
    for names, derived in zip(passes, (lambda function: function, jax.grad), strict=True):
        found = counted(derived(total), *given[0])
        ours = {name: n for name, n in found.items() if name.startswith("anycell")}
        assert ours == dict.fromkeys(names, 1) and not found["scan"] + found["while"]
        short, long = (counted(derived(in_steps), *some) for some in given)
        assert short["scan"] == len(names) and "anycell" not in str([*short]) and short == long


def test_eager_calls_compile_once(rng: np.random.Generator) -> None:
    layer = ak.RNN(cells.LayerNormLSTM, 4)
    x = rng.normal(size=(3, 6, 2)).astype("float32")
    traced = []
    with pytest.MonkeyPatch.context() as patch:
        own = anycell.keras.jax.fused.run
        patch.setattr(anycell.keras.jax.fused, "run", lambda *a: traced.append(1) or own(*a))
        for part in (x, 2 * x, x[:2], x[:2]):
            layer(part)
    assert len(traced) == 2  # one for each shape


def test_transformations_of_jax(rng: np.random.Generator) -> None:
    """jit, vmap, and derivatives of any order; forward mode is step by step."""
    layer = ak.RNN(cells.PeepholeLSTM, 4)
    layer.build((3, None, 2))
    x = rng.normal(size=(5, 3, 6, 2)).astype("float32")
    one_by_one = np.stack([layer(part) for part in x])
    assert_close(np.array(jax.vmap(layer)(x)), one_by_one, "float32", "forward")
    assert_close(np.array(jax.jit(layer)(x[0])), one_by_one[0], "float32", "forward")

    def total(x: Any) -> Any:
        return jax.numpy.sin(layer(x)).sum()

    v = rng.normal(size=x[0].shape).astype("float32")
    twice = jax.jacrev(jax.grad(total))(x[0])
    slope, second = (jax.jvp(f, (x[0],), (v,))[1] for f in (total, jax.grad(total)))
    assert_close(np.array(slope), np.vdot(jax.grad(total)(x[0]), v), "float32", "gradient")
    assert_close(np.tensordot(twice, v, 3), np.array(second), "float32", "gradient")


def test_seeds_are_those_of_other_backends(rng: np.random.Generator) -> None:
    layer = Layer(cells.ZoneoutLSTM, (("H", 4),))
    for drawn in (0, 0), (2**32 - 1, 2**32 - 1), *rng.integers(0, 2**32, (9, 2)):
        states = {f"state {name}": np.zeros((1, 4)) for name in "hc"}
        how, _ = lowered(layer, {"seed": drawn, **states})
        low, high = anycell.keras.jax._words(jax.numpy.array(drawn, "uint32"))
        assert int(low) + (int(high) << 32) == how.options.seed


def test_masks_are_the_same_forward_and_backward() -> None:
    """What a step dropped has no gradient."""
    layer = ak.RNN(cells.ZoneoutLSTM(zoneout_h=0.5, zoneout_c=0.0), 8, seed=3)
    x = np.ones((4, 1, 2), "float32")
    layer.build(x.shape)
    weights, fixed = (
        [v.value for v in some]
        for some in (layer.trainable_variables, layer.non_trainable_variables)
    )

    def run(x: Any) -> tuple[Any, Any]:
        y, _ = layer.stateless_call(weights, fixed, x, training=True)
        return y, y

    slopes, y = jax.jit(jax.jacrev(run, has_aux=True))(x)
    kept = np.any(slopes, (2, 3, 4))
    assert np.array_equal(kept, np.array(y) != 0) and 0 < kept.mean() < 1


def test_symbolic_sizes_run_step_by_step() -> None:
    """Where Keras or JAX ask for shapes alone."""

    class Mine(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = ak.PeepholeLSTM(4, return_sequences=True)

        def call(self, x: Any) -> Any:
            return self.layer(x)

    model = Mine()
    assert model(keras.Input((None, 3))).shape == (None, None, 4)
    rows = jax.export.symbolic_shape("rows, 5, 3")
    assert jax.eval_shape(model, jax.ShapeDtypeStruct(rows, "float32")).shape == (rows[0], 5, 4)
    assert model.layer.engine.name == "cpu"


@pytest.mark.filterwarnings(
    "ignore:The `native_serialization`:DeprecationWarning"
)  # Keras passes it
@pytest.mark.parametrize("rows", [None, 2])
def test_exported_models_run_elsewhere(rows: int | None, tmp_path: Path) -> None:
    """Without anycell, whatever was traced before."""
    pytest.importorskip("tensorflow")
    model = keras.Sequential([keras.Input(batch_shape=(rows, 5, 3)), ak.PeepholeLSTM(4)])
    x = np.ones((2, 5, 3), "float32")
    right = model.predict(x, verbose=0)
    path = str(tmp_path / "model")
    model.export(path, verbose=False)
    found = python(f"""
        import json, sys, numpy as np, tensorflow as tf
        found = tf.saved_model.load({path!r})
        y = found.serve(np.ones((2, 5, 3), "float32"))
        assert not any(name.startswith("anycell") for name in sys.modules)
        print(json.dumps(np.asarray(y).tolist()))
    """)
    assert_close(np.float32(json.loads(found.splitlines()[-1])), right, "float32", "forward")


def test_exports_of_jax() -> None:
    """They are written step by step, also what was traced before."""
    layer, x = ak.LSTM(4), np.ones((2, 5, 3), "float32")
    right = np.array(layer(x))
    traced = jax.jit(lambda x: layer(x))
    traced(x)
    for function in (jax.jit(lambda x: layer(x)), traced):
        exported = jax.export.export(function)(x)
        assert "@anycell" not in exported.mlir_module()
        assert_close(np.array(exported.call(x)), right, "float32", "forward")


# -- a card ----------------------------------------------------------------------------------------
def test_layers_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of ``anycell.jax``; here XLA on the CPU calls the handler of cards."""
    pytest.importorskip("gpu")
    from problems import assert_solved, draw
    from shim import jax_on_a_card

    from tests.conformance import on_keras

    problem = draw(cells.PeepholeLSTM, (3, 3, 4, 9), ("state", "mask", "resets"), "float32")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with jax_on_a_card(monkeypatch) as launched:
        assert ak.RNN(cells.PeepholeLSTM, 6).engine.name == "gpu"
        assert "float64" in ak.RNN(cells.PeepholeLSTM, 6, dtype="float64").engine.reason
        assert_solved(on_keras.by_layer()(problem), problem)
    assert launched
