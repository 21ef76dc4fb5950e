"""JAX: modules of Flax and Equinox."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tolerances import assert_close

from anycell import cells

jax = pytest.importorskip("jax")

from jax_layers import B, H, I, T, drawn, same  # noqa: E402

import anycell.jax as aj  # noqa: E402


@pytest.fixture
def x(rng: np.random.Generator) -> Any:
    return drawn(rng, T, B, I)


def falls(losses: list[float]) -> bool:
    return losses[-1] < 0.5 * losses[0]


def test_flax(x: Any) -> None:
    pytest.importorskip("flax")
    from flax import nnx

    from anycell.jax.nnx import RNN

    model = RNN(cells.ZoneoutLSTM, I, H, num_layers=2, dropout=0.1, rngs=nnx.Rngs(0))
    assert model.weight_ih_l0[...].shape == (4 * H, I)
    first, second = model(x)[0], model(x)[0]
    assert (first != second).any()
    other = RNN(cells.ZoneoutLSTM, I, H, rngs=(rngs := nnx.Rngs(1)))
    twin = RNN(cells.ZoneoutLSTM, I, H, rngs=rngs)
    before = int(other.rngs.dropout.count[...])
    twin(x)
    assert int(other.rngs.dropout.count[...]) == before
    model.eval()
    same(model(x), model(x))
    params = {name: getattr(model, name)[...] for name in model.layers.shapes}
    same(model(x, lengths=[7, 1, 2, 3, 0]), model.layers(params, x, lengths=[7, 1, 2, 3, 0]))
    model.train()

    @nnx.jit
    def step(model: Any) -> Any:
        loss, d = nnx.value_and_grad(lambda m: ((m(x)[0] - 0.3) ** 2).mean())(model)
        moved = jax.tree.map(lambda p, g: p - g, nnx.state(model, nnx.Param), d)
        nnx.update(model, moved)
        return loss

    assert falls([float(step(model)) for _ in range(40)])


# -- Flax: whether a module draws masks ------------------------------------------------------------
def noisy(alone: bool = True) -> Any:
    """A module that draws masks, alone or beside one of Flax's that takes the same word."""
    nnx = pytest.importorskip("flax.nnx")
    from anycell.jax.nnx import ZoneoutLSTM

    class Model(nnx.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            self.rnn = ZoneoutLSTM(I, H, rngs=nnx.Rngs(0))
            if not alone:
                self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

        def __call__(self, x: Any, **options: Any) -> Any:
            return self.rnn(x, **options)[0]

    return Model()


def draws(model: Any, x: Any) -> bool:
    return bool((model(x) != model(x)).any())


@pytest.mark.parametrize("alone", [True, False])
def test_views(x: Any, alone: bool) -> None:
    """Flax 0.12's way to a model that does not train, which shares the arrays of one that does."""
    nnx = pytest.importorskip("flax.nnx")
    if not hasattr(nnx, "view"):
        pytest.skip("nnx.view came with Flax 0.12")
    model = noisy(alone)
    still = nnx.view(model, deterministic=True)
    assert draws(model, x) and not draws(still, x)
    same(still(x), model(x, deterministic=True))
    assert draws(nnx.view(still, deterministic=False), x)
    other = nnx.view(still, only=lambda path, node: False, deterministic=False,
                          raise_if_not_found=False)  # fmt: skip
    assert not draws(other, x)


def test_attributes(x: Any) -> None:
    nnx = pytest.importorskip("flax.nnx")
    model = noisy(alone=False)
    for still in (True, False):
        model.set_attributes(deterministic=still)
        assert draws(model, x) is not still
        (model.train if still else model.eval)()
        assert draws(model, x) is still
        if hasattr(nnx, "with_attributes"):
            assert draws(nnx.with_attributes(model, deterministic=still), x) is not still


def test_the_call_says_what_draws(x: Any) -> None:
    """``deterministic`` and ``rngs`` in a call, as layers of Flax take them."""
    nnx = pytest.importorskip("flax.nnx")
    model = noisy()
    key = jax.random.key(3)
    right = model.rnn.layers(
        {n: getattr(model.rnn, n)[...] for n in model.rnn.layers.shapes}, x, training=True, seed=key
    )[0]
    same(model(x, rngs=key), right)
    same(model(x, rngs=nnx.Rngs(5)), model(x, rngs=nnx.Rngs(5).dropout))
    assert (model(x, rngs=nnx.Rngs(5)) != model(x, rngs=nnx.Rngs(6))).any()
    model.eval()
    same(model(x, rngs=key), model(x))
    same(model(x, deterministic=False, rngs=key), right)


def module(kind: str) -> Any:
    """A module of Flax or Equinox."""
    if kind == "nnx":
        nnx = pytest.importorskip("flax.nnx")
        from anycell.jax import nnx as ours

        return ours.ZoneoutLSTM(I, H, rngs=nnx.Rngs(0))
    pytest.importorskip("equinox")
    from anycell.jax import equinox as theirs

    return theirs.ZoneoutLSTM(I, H, key=jax.random.key(0))


REFUSED: dict[str, tuple[str, Callable[[Any, Any], Any], str]] = {
    "a word": ("nnx", lambda m, x: m(x, foo=1), "takes x, state, deterministic, rngs, mask"),
    "a word to Equinox": ("equinox", lambda m, x: m(x, foo=1), "takes x, state, key, mask"),
    "a close word": ("nnx", lambda m, x: m(x, length=[1]), "Did you mean lengths?"),
    "training": ("nnx", lambda m, x: m(x, training=True), "training: .*Pass deterministic="),
    "a seed": ("nnx", lambda m, x: m(x, seed=1), r"seed: given int 1; .*Pass rngs=\."),
    "parameters": ("nnx", lambda m, x: m(x, params={}), "params: .*The module holds them"),
    "training of Equinox": (
        "equinox", lambda m, x: m(x, training=True), "Use equinox.nn.inference_mode",
    ),
    "no flag": ("nnx", lambda m, x: m(x, deterministic="no"), "deterministic: given str 'no'"),
    "a number as rngs": ("nnx", lambda m, x: m(x, rngs=3), "rngs: given int 3; expected nnx.Rngs"),
    "rngs that are a number": (
        "nnx", lambda m, x: type(m)(I, H, rngs=0), r"rngs: given int 0; .*nnx\.Rngs\(0\)",
    ),
    "rngs that are a key": (
        "nnx", lambda m, x: type(m)(I, H, rngs=jax.random.key(0)), "rngs: given key.*of a key",
    ),
    "rngs for a key": ("nnx", lambda m, x: m.layers.init(m.rngs), "key: given Rngs Rngs"),
    "several keys": (
        "equinox", lambda m, x: m(x, key=jax.random.split(jax.random.key(0), 2)), "several keys",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(x: Any, case: str) -> None:
    kind, call, says = REFUSED[case]
    with pytest.raises(TypeError, match=says):
        call(module(kind), x)


@pytest.mark.parametrize("kind", ["nnx", "equinox"])
def test_every_cell_has_a_module_of_its_name(x: Any, kind: str) -> None:
    of = module(kind)
    key = jax.random.key(0)
    drawn = (
        {"key": key} if kind == "equinox" else {"rngs": pytest.importorskip("flax.nnx").Rngs(key)}
    )
    assert type(of).__name__ == "ZoneoutLSTM" and repr(of.layers.cell) == "ZoneoutLSTM()"
    other = type(of)(I, H, zoneout_c=0.25, num_layers=2, **drawn)
    assert repr(other.layers) == "RNN(ZoneoutLSTM(zoneout_c=0.25), 3, 6, num_layers=2)"


# -- Linen -----------------------------------------------------------------------------------------
def linen(layer: aj.RNN) -> Any:
    """A module of Linen, as the start page has it."""
    nn = pytest.importorskip("flax.linen")

    class Model(nn.Module):  # type: ignore[misc]
        @nn.compact
        def __call__(self, x: Any, lengths: Any = None) -> Any:
            return layer(self.param("rnn", layer.init), x, lengths=lengths)[0]

    return Model


def test_linen(x: Any) -> None:
    """Also with ``remat``, and in a train state."""
    layer, nn = aj.GRU(I, H), pytest.importorskip("flax.linen")
    Model = linen(layer)
    variables = Model().init(jax.random.key(0), x)
    params = variables["params"]["rnn"]
    assert {name: value.shape for name, value in params.items()} == layer.shapes
    lengths = [7, 1, 2, 3, 0]
    right = layer(params, x, lengths=lengths)[0]
    same(Model().apply(variables, x, lengths), right)

    def loss(model: Any) -> Any:
        return lambda v: (model.apply(v, x) ** 2).sum()

    same(jax.grad(loss(nn.remat(Model)()))(variables), jax.grad(loss(Model()))(variables))
    optax = pytest.importorskip("optax")
    train_state = pytest.importorskip("flax.training.train_state")
    state = train_state.TrainState.create(
        apply_fn=Model().apply, params=variables["params"], tx=optax.sgd(0.1)
    )
    d = jax.grad(loss(Model()))(variables)["params"]
    moved = state.apply_gradients(grads=d).params["rnn"]
    for name, value in params.items():
        right = np.asarray(value - 0.1 * d["rnn"][name])
        assert_close(np.asarray(moved[name]), right, "float32", "forward")


@pytest.mark.more
def test_members_in_linen(x: Any) -> None:
    nn, Model = pytest.importorskip("flax.linen"), linen(aj.GRU(I, H))
    several = nn.vmap(
        Model, in_axes=None, axis_size=2, variable_axes={"params": 0}, split_rngs={"params": True}
    )()
    members = several.init(jax.random.key(0), x)
    for n in range(2):
        one = jax.tree.map(lambda a, n=n: a[n], members)
        same(several.apply(members, x)[n], Model().apply(one, x))


# -- Equinox ---------------------------------------------------------------------------------------
def test_equinox(x: Any) -> None:
    equinox = pytest.importorskip("equinox")
    from anycell.jax.equinox import RNN

    model = RNN(cells.ZoneoutLSTM, I, H, num_layers=2, dropout=0.1, key=jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), 40)
    assert (model(x, key=keys[0])[0] != model(x, key=keys[1])[0]).any()
    with pytest.raises(ValueError, match=r"key: given None; expected a key"):
        model(x)
    with pytest.raises(TypeError, match=r"seed: given int 4; .* Pass key="):
        model(x, seed=4)
    still = equinox.nn.inference_mode(model)
    same(still(x), model.layers(model.params, x))
    rows = jax.vmap(lambda row: still(row)[0], 1, 1)(x)
    assert_close(np.asarray(rows), np.asarray(still(x)[0]), "float32", "forward")

    @equinox.filter_jit
    def step(model: Any, key: Any) -> Any:
        def loss(model: Any) -> Any:
            return ((model(x, key=key)[0] - 0.3) ** 2).mean()

        value, d = equinox.filter_value_and_grad(loss)(model)
        return value, equinox.apply_updates(model, jax.tree.map(lambda g: -g, d))

    losses = []
    for key in keys:
        loss, model = step(model, key)
        losses.append(float(loss))
    assert falls(losses)
