"""JAX: what the conformance suite does not ask of ``anycell.jax``."""

import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from processes import python
from tolerances import assert_close

import anycell
import anycell.numpy as an
from anycell import cells
from anycell.engines.cpu import threads, xla
from anycell.engines.gpu import launch
from anycell.lang import philox

jax = pytest.importorskip("jax")
jnp = jax.numpy

from jax_layers import Arrays, B, H, I, T, drawn, same  # noqa: E402

import anycell.jax as aj  # noqa: E402
from anycell.jax import composite, fused  # noqa: E402
from anycell.jax.primitive import planned, seed_words  # noqa: E402

X64 = jax if hasattr(jax, "enable_x64") else jax.experimental


@pytest.fixture
def layer() -> aj.RNN:
    return aj.LSTM(I, H, num_layers=2, bidirectional=True)


@pytest.fixture
def params(layer: aj.RNN) -> Arrays:
    return layer.init(jax.random.key(0))


@pytest.fixture
def x(rng: np.random.Generator) -> Any:
    return drawn(rng, T, B, I)


# -- the kernels -----------------------------------------------------------------------------------
def test_the_bits_are_those_of_numpys_layer(layer: aj.RNN, params: Arrays, x: Any) -> None:
    """Forward and backward, while another Python thread runs."""
    other = an.LSTM(I, H, num_layers=2, bidirectional=True)
    other.set_parameters({name: np.asarray(value) for name, value in params.items()})
    right, _ = other.forward(np.asarray(x), training=True)
    d_x, _ = other.backward(np.ones_like(right))
    step = jax.jit(jax.value_and_grad(lambda p, x: layer(p, x)[0].sum(), argnums=(0, 1)))
    turns, done = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        for _ in range(20):
            _, (d_params, d_input) = jax.block_until_ready(step(params, x))
    finally:
        done.set()
        thread.join()
    assert turns > 0
    same(jax.jit(layer)(params, x)[0], right)
    same(d_input, d_x)
    same(d_params, {name: other.grads[name] for name in d_params})


@pytest.fixture
def crowded() -> Iterator[None]:
    """Another call has the memory that calls share."""
    rooms = [room.numbers for room in xla.process().rooms]
    for numbers in rooms:
        numbers[0] += 1
    yield
    for numbers in rooms:
        numbers[0] -= 1
        assert numbers[0] == 0


def test_calls_at_the_same_time_have_memory_of_their_own(
    layer: aj.RNN, params: Arrays, x: Any, request: pytest.FixtureRequest
) -> None:
    run = jax.jit(lambda p, x: layer(p, x)[0])
    alone = run(params, x)
    request.getfixturevalue("crowded")
    same(run(params, x), alone)
    found: list[Any] = []
    calls = [threading.Thread(target=lambda: found.append(run(params, x))) for _ in range(8)]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert len(found) == 8
    for one in found:
        same(one, alone)


def test_any_number_of_threads_has_the_same_bits(rng: np.random.Generator) -> None:
    """Of a layer that is worth several, forward and backward; also in 16 bits."""
    layer = aj.LSTM(I, 40, bidirectional=True)
    for dtype in ("float32", "bfloat16"):
        params, x = layer.init(jax.random.key(0), dtype), drawn(rng, 30, 33, I).astype(dtype)
        found = []
        for count in (1, 2, 3):
            threads.set_threads(count)
            try:
                run = jax.jit(jax.value_and_grad(lambda p, x=x: (layer(p, x)[0] ** 2).sum()))
                found.append(run(params))
            finally:
                threads.set_threads(None)
        same(found[0], found[1])
        same(found[0], found[2])


@pytest.mark.parametrize("checkpoint", [1, 3, "sqrt"])
def test_checkpoints_change_no_bit(params: Arrays, x: Any, checkpoint: Any) -> None:
    def gradients(checkpoint: Any) -> Any:
        layer = aj.LSTM(I, H, num_layers=2, bidirectional=True, checkpoint=checkpoint)
        return jax.jit(jax.grad(lambda p: (layer(p, x)[0] ** 2).sum()))(params)

    same(gradients(checkpoint), gradients(None))


def test_only_wanted_gradients_are_computed(layer: aj.RNN, params: Arrays, x: Any) -> None:
    """Of x alone, or of some parameters; the others' are zero."""
    run = jax.jit(jax.grad(lambda p, x: layer(p, x)[0].sum(), argnums=(0, 1)))
    d_params, d_x = run(params, x)
    same(jax.jit(jax.grad(lambda x: layer(params, x)[0].sum()))(x), d_x)
    name = "weight_hh_l1_reverse"
    some = jax.jit(jax.grad(lambda w: layer({**params, name: w}, x)[0].sum()))(params[name])
    same(some, d_params[name])
    last = jax.jit(jax.grad(lambda p: layer(p, x)[1][1].sum()))(params)  # not of the output
    assert all(np.isfinite(value).all() for value in last.values())


def test_a_recurrent_mask_has_a_gradient(rng: np.random.Generator, x: Any) -> None:
    layer = aj.GRU(I, H)
    params, mask = layer.init(jax.random.key(1)), drawn(rng, B, H)
    gradients = [
        jax.jit(jax.grad(lambda m, engine=engine: layer(
            params, x, recurrent_mask=m, engine=engine)[0].sum()))(mask)
        for engine in (None, "reference")
    ]  # fmt: skip
    same(*gradients)
    assert np.abs(gradients[0]).min() > 0


# -- transformations -------------------------------------------------------------------------------
N = 3  # elements of a mapped axis
MAPPED: dict[str, Callable[[np.random.Generator], Arrays]] = {
    "x": lambda rng: {"x": drawn(rng, N, T, B, I)},
    "lengths": lambda rng: {"lengths": jnp.asarray(rng.integers(0, T, (N, B)))},
    "mask, x": lambda rng: {
        "mask": jnp.asarray(rng.random((N, T, B)) < 0.7), "x": drawn(rng, N, T, B, I)
    },
    "state": lambda rng: {"state": drawn(rng, N, 2, B, H)},
    "resets and what they restore": lambda rng: {
        "resets": jnp.asarray(rng.random((N, T, B)) < 0.3), "reset_state": drawn(rng, N, 2, B, H)
    },
    "a recurrent mask": lambda rng: {"recurrent_mask": drawn(rng, N, B, H)},
    "one per gate": lambda rng: {"recurrent_mask": drawn(rng, N, 3, B, H)},
    "parameters": lambda rng: {"weight_hh_l0": drawn(rng, N, 3 * H, H)},
}  # fmt: skip


@pytest.mark.parametrize("case", MAPPED)
@pytest.mark.sample(3)
def test_vmap(rng: np.random.Generator, x: Any, case: str) -> None:
    """Outputs and gradients of each element have the bits that they have alone."""
    layer = aj.GRU(I, H, bidirectional=True)
    params, mapped = layer.init(jax.random.key(1)), MAPPED[case](rng)

    def run(mapped: Arrays, params: Arrays) -> Any:
        given = {"x": x} | {name: a for name, a in mapped.items() if name not in params}
        learned = params | {name: a for name, a in mapped.items() if name in params}
        return layer(learned, given.pop("x"), **given)[0]

    def gradients(mapped: Arrays, params: Arrays) -> Any:
        real = {n: a for n, a in mapped.items() if jnp.issubdtype(a.dtype, jnp.floating)}
        return jax.grad(lambda r, p: (run(mapped | r, p) ** 2).sum(), (0, 1))(real, params)

    for function in (run, gradients):
        together = jax.jit(jax.vmap(function, (0, None)))(mapped, params)
        for n in range(N):
            alone = jax.jit(function)(jax.tree.map(lambda a, n=n: a[n], mapped), params)
            found = jax.tree.map(lambda a, n=n: a[n], together)
            if function is run or "recurrent_mask" not in mapped:
                same(found, alone)
                continue
            for one, other in zip(*map(jax.tree.leaves, (found, alone)), strict=True):
                assert_close(np.asarray(one), np.asarray(other), "float32", "gradient")


def test_the_gradient_of_a_mapped_layer_is_one_pass(x: Any) -> None:
    layer = aj.GRU(I, H)
    params, several = layer.init(jax.random.key(1)), jnp.stack([x, 2 * x, -x], 1)

    def mapped(params: Arrays) -> Any:
        return (jax.vmap(lambda x: layer(params, x)[0], 1, 1)(several) ** 2).sum()

    def whole(params: Arrays) -> Any:
        return (layer(params, several.reshape(T, N * B, I))[0] ** 2).sum()

    same(jax.jit(jax.grad(mapped))(params), jax.jit(jax.grad(whole))(params))
    text = jax.jit(jax.grad(mapped)).lower(params).as_text()
    assert text.count("stablehlo.while") == 0
    nested = jax.vmap(jax.vmap(lambda x: layer(params, x[:, None])[0][:, 0], 1, 1), 1, 1)(several)
    same(nested, layer(params, several.reshape(T, N * B, I))[0].reshape(T, N, B, H))


def test_vmap_of_random_masks(x: Any) -> None:
    """A shared seed means the same masks for all elements, as elsewhere in JAX."""
    layer = aj.ZoneoutLSTM(I, H)
    params, keys = layer.init(jax.random.key(1)), jax.random.split(jax.random.key(2), N)

    def run(x: Any, key: Any) -> Any:
        return layer(params, x, training=True, seed=key)[0]

    one = jax.vmap(run, (0, None))(jnp.stack([x, x]), keys[0])
    same(one[0], one[1])
    each = jax.vmap(run, (None, 0))(x, keys)
    for n, key in enumerate(keys):
        same(each[n], run(x, key))


def test_scan_and_remat(layer: aj.RNN, params: Arrays, x: Any) -> None:
    def loss(params: Arrays, x: Any) -> Any:
        return (layer(params, x)[0] ** 2).sum()

    right = jax.grad(loss)(params, x)
    same(jax.jit(jax.grad(jax.checkpoint(loss)))(params, x), right)
    several = jnp.stack([x, 2 * x])
    _, scanned = jax.lax.scan(lambda c, one: (c, jax.grad(loss)(params, one)), 0, several)
    same(jax.tree.map(lambda a: a[0], scanned), right)


def test_derivatives_forward(x: Any) -> None:
    """``jvp`` and ``linearize`` agree with derivatives backward."""
    layer = aj.GRU(I, H)
    params = layer.init(jax.random.key(1))

    def run(x: Any) -> Any:
        return jnp.sin(layer(params, x)[0]).sum()

    d = jax.grad(run)(x)  # along it nothing cancels
    value, slope = jax.jvp(run, (x,), (d,))
    same(value, run(x))
    assert_close(np.asarray(slope), np.asarray((d * d).sum()), "float32", "gradient")
    _, linear = jax.linearize(run, x)
    assert_close(np.asarray(linear(d)), np.asarray(slope), "float32", "gradient")


@pytest.mark.more  # compiles for seconds what the test above and second derivatives compile apart
def test_forward_over_backward(x: Any) -> None:
    layer = aj.GRU(I, H)
    params, some = layer.init(jax.random.key(1)), x[:2, :2, :1]

    def of_some(some: Any) -> Any:
        return jnp.sin(layer(params, x.at[:2, :2, :1].set(some))[0]).sum()

    forward, backward = jax.jacfwd(of_some)(some), jax.jacrev(of_some)(some)
    assert_close(np.asarray(forward), np.asarray(backward), "float32", "gradient")
    twice, other = jax.hessian(of_some)(some), jax.jacrev(jax.jacrev(of_some))(some)
    assert_close(np.asarray(twice), np.asarray(other), "float32", "gradient")


def test_other_platforms_run_the_scan(x: Any) -> None:
    """Also where the program is made on a machine whose own device is the CPU."""
    layer = aj.GRU(I, H)
    params = layer.init(jax.random.key(1))
    both = jax.jit(jax.value_and_grad(lambda p: layer(p, x)[0].sum())).trace(params)
    assert "anycell" in both.lower().as_text()
    text = both.lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.while" in text and "custom_call @anycell" not in text
    of, flat = layer_of(layer, params, x), [*params.values(), x]
    right = fused._layer.bind(*flat, layer=of, keep=False)
    made = fused.layer_by_scan(*flat, layer=of, keep=True)
    kept = fused._layer.bind(*flat, layer=of, keep=True)
    assert [a.shape for a in made] == [a.shape for a in kept]
    for one, other in zip(made, right, strict=False):
        assert_close(np.asarray(one), np.asarray(other), "float32", "forward")
    static = {"layer": of, "wanted": of.arrays, "arriving": ("output",)}
    d = jnp.ones_like(right[0])
    pairs = zip(
        fused._backward_by_scan(*flat, d, *made[2:], **static),
        fused._backward.bind(*flat, d, *kept[2:], **static), strict=True,
    )  # fmt: skip
    for one, other in pairs:
        assert_close(np.asarray(one), np.asarray(other), "float32", "gradient")


def test_an_exported_program_needs_no_kernels(layer: aj.RNN, params: Arrays, x: Any) -> None:
    """It runs where anycell is not installed, and elsewhere than on this machine."""
    export = pytest.importorskip("jax.export")
    pytest.importorskip("flatbuffers")
    run = jax.jit(jax.value_and_grad(lambda p, x: layer(p, x)[0].sum()))
    exported = export.export(run, platforms=("cpu", "cuda"))(params, x)
    assert "@anycell" not in exported.mlir_module()
    again = export.deserialize(exported.serialize())
    for one, other in zip(
        jax.tree.leaves(again.call(params, x)), jax.tree.leaves(run(params, x)), strict=True
    ):
        assert_close(np.asarray(one), np.asarray(other), "float32", "gradient")


def layer_of(layer: aj.RNN, params: Arrays, x: Any) -> Any:
    keys = *(name.removesuffix("_l0") for name in params), "x"
    return planned(layer._layer(), x.dtype)._replace(arrays=keys)


def test_a_layer_may_be_static(layer: aj.RNN, params: Arrays, x: Any) -> None:
    traced: list[int] = []

    def run(layer: aj.RNN, params: Arrays, x: Any) -> Any:
        traced.append(1)
        return layer(params, x)[0]

    compiled = jax.jit(run, static_argnums=0)
    for _ in range(2):
        compiled(aj.LSTM(I, H, num_layers=2, bidirectional=True), params, x)
    assert len(traced) == 1
    assert layer != aj.LSTM(I, H) != aj.RNN(cells.LSTM, I, H)
    assert aj.RNN(cells.LSTMP, I, H, P=2) != aj.RNN(cells.LSTMP, I, H, P=3)
    with pytest.raises(AttributeError, match=r"hidden_size: given int 9; .* Make another"):
        layer.hidden_size = 9
    assert layer.hidden_size == H


@pytest.mark.slow
def test_shard_map(params: Arrays) -> None:
    """It is right or refused: on two devices, in a process of its own."""
    code = """
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import Mesh, PartitionSpec as P
        import anycell.jax as aj
        layer = aj.LSTM(3, 6)
        params = layer.init(jax.random.key(0))
        x = jax.random.normal(jax.random.key(1), (5, 4, 3))
        right = jax.grad(lambda p: (layer(p, x)[0] ** 2).sum())(params)
        mesh = Mesh(np.array(jax.devices()), ("d",))
        def part(p, x):
            d = jax.grad(lambda p: (layer(p, x)[0] ** 2).sum())(p)
            return jax.lax.psum(d, "d")
        if hasattr(jax, "shard_map"):
            how = dict(mesh=mesh, in_specs=(P(), P(None, "d")), out_specs=P())
            try:
                jax.jit(jax.shard_map(part, **how))(params, x)
            except ValueError as error:
                assert "Pass check_vma=False" in str(error), error
                found = jax.jit(jax.shard_map(part, **how, check_vma=False))(params, x)
                assert all(jnp.allclose(found[n], right[n], 1e-5, 1e-5) for n in right)
                print("right", jax.device_count())
        else:
            print("right 2")
    """
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    assert "right 2" in python(textwrap.dedent(code), **flags)


def test_sizes_that_an_export_leaves_open(layer: aj.RNN, params: Arrays, x: Any) -> None:
    export = pytest.importorskip("jax.export")
    for sizes in ("7, b", "t, 5", "t, b"):
        shape = (*export.symbolic_shape(sizes), I)
        lengths = jax.ShapeDtypeStruct(shape[1:2], jnp.int32)
        run = jax.jit(lambda p, x, lengths: layer(p, x, lengths=lengths)[0])
        exported = export.export(run)(params, jax.ShapeDtypeStruct(shape, x.dtype), lengths)
        given = params, x, jnp.asarray([7, 3, 0, 5, 1])
        found, right = exported.call(*given), run(*given)
        assert_close(np.asarray(found), np.asarray(right), "float32", "forward")


def test_no_rank_is_promoted(layer: aj.RNN, params: Arrays, x: Any) -> None:
    def squares(p: Arrays) -> Any:
        return (layer(p, x)[0] ** 2).sum()

    with jax.numpy_rank_promotion("raise"):
        jax.grad(squares)(params)
        jax.jvp(squares, (params,), (params,))
        jax.jvp(jax.grad(squares), (params,), (params,))


# -- random masks ----------------------------------------------------------------------------------
def test_the_numbers_are_philoxs() -> None:
    for seed in (0, 7, 2**64 - 3):
        words = seed_words(cells.ZoneoutLSTM, seed)
        drawn = composite.uniform(words, 5, 6, 9, 4, 33)
        assert np.array_equal(drawn, philox.uniform(seed, 5, 6, 9, 4, 33))


def test_a_seed_means_the_same_masks_everywhere(rng: np.random.Generator) -> None:
    cell, gates = cells.ZoneoutLSTM, rng.standard_normal((T, B, 4 * H)).astype("f")
    weights = {"weight_hh": rng.standard_normal((4 * H, H)).astype("f")}
    seed = 2**63 + 12345
    right, _ = anycell.recurrence(cell, gates, weights, training=True, seed=seed)
    for engine in ("cpu", "reference"):
        run = jax.jit(lambda g, w, engine=engine: aj.recurrence(
            cell, None, w, gates=g, training=True, seed=seed, engine=engine)[0])  # fmt: skip
        assert_close(np.asarray(run(gates, weights)), right, "float32", "forward")


def test_keys_are_seeds(x: Any) -> None:
    """Of both kinds, also traced; another key draws other masks, forward and backward alike."""
    layer = aj.ZoneoutLSTM(I, H, num_layers=2, dropout=0.5)
    params = layer.init(jax.random.key(0))

    @jax.jit
    def run(key: Any) -> Any:
        return jax.value_and_grad(lambda p: layer(p, x, training=True, seed=key)[0].sum())(params)

    same(run(jax.random.key(3)), run(jax.random.key(3)))
    same(run(jax.random.key(3)), run(jax.random.PRNGKey(3)))
    assert run(jax.random.key(3))[0] != run(jax.random.key(4))[0]
    same(run(jax.random.key(3, impl="rbg")), run(jax.random.key(3, impl="rbg")))
    same(layer(params, x), layer(params, x, seed=jax.random.key(1)))  # not in training


def test_numbers_are_seeds(x: Any) -> None:
    """Also as arrays, of which JAX may know no value."""
    layer = aj.ZoneoutLSTM(I, H)
    params = layer.init(jax.random.key(0))

    def run(seed: Any) -> Any:
        return layer(params, x, training=True, seed=seed)[0]

    same(jax.jit(run)(7), run(7))
    same(run(np.uint32(2**32 - 1)), run(2**32 - 1))
    with X64.enable_x64(True):
        words = seed_words(layer.cell, jnp.asarray(2**40 + 3))
    same(words, seed_words(layer.cell, 2**40 + 3))


def test_dropout(rng: np.random.Generator) -> None:
    layer = aj.RNN(cells.RNN, I, H, num_layers=2, dropout=0.25)
    x = drawn(rng, 400, 40, H)
    words = seed_words(layer.cell, 5)
    dropped = layer._dropped(x, 1, words)
    kept = np.asarray(dropped != 0)
    assert 0.745 < kept.mean() < 0.755
    assert_close(np.asarray(dropped[kept]), np.asarray(x[kept]) / 0.75, "float32", "forward")
    assert (kept != np.asarray(layer._dropped(x, 2, words) != 0)).any()
    with pytest.warns(UserWarning, match="num_layers=1 it does nothing"):
        aj.RNN(cells.RNN, I, H, dropout=0.25)


def test_the_body_of_a_scan_is_no_cell() -> None:
    with pytest.raises(TypeError, match=r"cell: given .*is for anycell\.jax\.scan"):
        aj.RNN(lambda carry, x: (carry, x), I, H)


def test_training_needs_a_seed(x: Any) -> None:
    layer = aj.ZoneoutLSTM(I, H)
    params = layer.init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"seed: given None; .*a key of jax\.random"):
        layer(params, x, training=True)
    with pytest.raises(TypeError, match="Pass a single key"):
        layer(params, x, training=True, seed=jax.random.split(jax.random.key(0)))
    for seed in (-1, jnp.int32(-1), np.int64(-1)):
        with pytest.raises(ValueError, match=r"seed: given .*-1"):
            layer(params, x, training=True, seed=seed)


# -- layers ----------------------------------------------------------------------------------------
def test_parameters(layer: aj.RNN, params: Arrays) -> None:
    """Their names and shapes are PyTorch's, their initial values the cell's or uniform."""
    torch = pytest.importorskip("torch")
    theirs = torch.nn.LSTM(I, H, num_layers=2, bidirectional=True).state_dict()
    assert {n: tuple(t.shape) for n, t in theirs.items()} == layer.shapes
    assert [*params] == [*layer.shapes]
    bound = H**-0.5
    assert all(np.abs(value).max() <= bound for value in params.values())
    assert 0.9 * bound < np.abs(params["weight_ih_l1"]).max()
    other = aj.RNN(anycell.cells.PeepholeLSTM, I, H).init(jax.random.key(0), jnp.bfloat16)
    assert all(value.dtype == jnp.bfloat16 for value in other.values())


def test_orders_of_axes(layer: aj.RNN, params: Arrays, x: Any) -> None:
    right, (h, c) = layer(params, x, lengths=[7, 3, 0, 5, 1], return_states=True)[:2]
    first = aj.LSTM(I, H, num_layers=2, bidirectional=True, batch_first=True)
    turned, state, sequences = first(
        params, x.swapaxes(0, 1), lengths=[7, 3, 0, 5, 1], return_states="c"
    )
    same((turned.swapaxes(0, 1), state), (right, (h, c)))
    assert sequences["c"].shape == (B, T, 2 * H)
    for one in (layer, first):
        alone, (last, _) = one(params, x[:3, 1], (h[:, 1], c[:, 1]), resets=jnp.ones(3))
        again = layer(params, x[:3, 1:2], (h[:, 1:2], c[:, 1:2]), resets=jnp.ones((3, 1)))
        same((alone, last), (again[0][:, 0], again[1][0][:, 0]))


def test_every_cell_has_a_layer_of_its_name() -> None:
    assert {*cells.__all__, "recurrence"} <= set(dir(aj))
    layer = aj.PeepholeLSTM(I, H, cell_clip=0.5)
    assert (layer.cell.hyper["cell_clip"], repr(layer)) == (
        0.5,
        "PeepholeLSTM(3, 6, cell_clip=0.5)",
    )
    assert "PeepholeLSTM(3, 6, cell_clip=0.5) runs on cpu" in str(anycell.explain(layer))


def test_numpys_arrays_are_taken(layer: aj.RNN, params: Arrays, x: Any) -> None:
    there = {name: np.asarray(value) for name, value in params.items()}
    same(layer(there, np.asarray(x)), layer(params, x))


# -- which engine ----------------------------------------------------------------------------------
def test_other_devices_run_the_scan(monkeypatch: pytest.MonkeyPatch, x: Any) -> None:
    layer = aj.LSTM(I, H)
    assert layer.engine.name == "cpu"
    right = layer(layer.init(jax.random.key(0)), x)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(launch, "missing", lambda: "there is no driver")
    assert layer.engine == ("reference", "there is no driver")
    found = layer(layer.init(jax.random.key(0)), x)
    assert_close(np.asarray(found[0]), np.asarray(right[0]), "float32", "forward")


def test_narrow_floats_that_no_kernel_has(x: Any) -> None:
    layer = aj.LSTM(I, H)
    params = layer.init(jax.random.key(0), jnp.float8_e4m3fn)
    with pytest.raises(TypeError, match="x: given dtype float8_e4m3fn; expected one of"):
        layer(params, x.astype(jnp.float8_e4m3fn), engine="cpu")


# -- what is refused -------------------------------------------------------------------------------
Call = Callable[[aj.RNN, Arrays, Any], Any]
REFUSED: dict[str, tuple[Call, str]] = {
    "no key": (lambda l, p, x: l.init(0), "key: given int 0; .* Pass jax.random.key"),
    "integers": (lambda l, p, x: l.init(jax.random.key(0), int), "dtype: given .*floating point"),
    "an input to init": (
        lambda l, p, x: l.init(jax.random.key(0), x), "dtype: given float32 .*Leave it out",
    ),
    "several keys": (
        lambda l, p, x: l.init(jax.random.split(jax.random.key(0))), r"key: given key<fry> \[2\]",
    ),
    "several old keys": (
        lambda l, p, x: l.init(jax.random.split(jax.random.PRNGKey(0))), "use jax.vmap",
    ),
    "no key of uint32": (lambda l, p, x: l.init(jnp.zeros((), "uint32")), "key: given uint32"),
    "parameters of another layer": (
        lambda l, p, x: aj.LSTM(I, 8)(aj.LSTM(I, H).init(jax.random.key(0)), x),
        r"expected float32 \[32, 3\], by the sizes of",
    ),
    "shapes": (
        lambda l, p, x: l(p, jax.ShapeDtypeStruct(x.shape, x.dtype)), "x: given ShapeDtypeStruct .*"
        "eval_shape",
    ),
    "one step of a batch": (
        lambda l, p, x: l(p, x[0], (jnp.zeros((4, B, H)),) * 2), r"state: given .*pass x\[None\]",
    ),
    "a state of four axes": (
        lambda l, p, x: l(p, x, (jnp.zeros((4, B, H, 1)),) * 2), "state: given .*Reshape it",
    ),
    "no weights": (
        lambda l, p, x: aj.recurrence(cells.LSTM, x, None), "weights: given None; expected a dict",
    ),
    "lengths beyond 32 bits": (
        lambda l, p, x: l(p, x, lengths=[2**40] * B), "lengths: given a length of 1099511627776",
    ),
    "no parameters": (lambda l, p, x: l(x, x), "params: .* The layer holds none"),
    "a missing one": (
        lambda l, p, x: l({n: p[n] for n in [*p][1:]}, x), "params: given 'weight_ih_l0', missing",
    ),
    "an unknown one": (lambda l, p, x: l({**p, "w": x}, x), "params: given 'w', unknown"),
    "a wrong shape": (
        lambda l, p, x: l({**p, "bias_ih_l0": x}, x), r"bias_ih_l0: given float32 \[7, 5, 3\]",
    ),
    "another dtype": (lambda l, p, x: l(p, x.astype("bfloat16")), r"Convert it: x.astype\(float32"),
    "ids": (lambda l, p, x: l(p, jnp.ones((5, 4), int)), "embed them first"),
    "a list": (lambda l, p, x: l(p, [[1.0]]), "x: given list"),
    "a wide x": (lambda l, p, x: l(p, x[..., :2]), "The last axis is input_size"),
    "a real mask": (lambda l, p, x: l(p, x, mask=x[..., 0]), r"Cast it: mask.astype\(bool\)"),
    "a turned mask": (lambda l, p, x: l(p, x, mask=x[..., 0].T > 0), "Transpose it: mask.T"),
    "real resets": (lambda l, p, x: l(p, x, resets=x[..., 0]), "resets > 0.5"),
    "long lengths": (lambda l, p, x: l(p, x, lengths=[9] * B), "lengths: given a length of 9"),
    "bytes above 1": (lambda l, p, x: l(p, x, mask=jnp.full((T, B), 2, "uint8")), "or 0 and 1"),
    "real lengths": (lambda l, p, x: l(p, x, lengths=[0.5] * B), "Cast them: lengths.astype"),
    "an engine": (lambda l, p, x: l(p, x, engine="gpu"), "engine: given 'gpu'; expected None"),
    "an option": (lambda l, p, x: l(p, x, hx=x), "hx: .*Did you mean state?"),
    "a state": (lambda l, p, x: l(p, x, x), "state: given float32"),
    "two inputs": (
        lambda l, p, x: aj.recurrence(cells.LSTM, x, {}, gates=x), "x, gates: given both",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(
    layer: aj.RNN, params: Arrays, x: Any, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "missing", lambda: "there is no driver")
    call, says = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=says):
        call(layer, params, x)


@pytest.mark.parametrize("dtype", ["int16", "float32", "bool"])
def test_known_values_are_checked_in_a_trace(
    layer: aj.RNN, params: Arrays, x: Any, dtype: str
) -> None:
    """JAX traces its operations on arrays that it knows, too."""
    flags, lengths = jnp.zeros((T, B), dtype).at[2].set(jnp.ones(B, dtype)), jnp.full(B, 3, "int16")
    right = layer(params, x, resets=flags, lengths=lengths)[0]
    same(jax.jit(lambda x: layer(params, x, resets=flags, lengths=lengths)[0])(x), right)
    with pytest.raises(ValueError, match="a length of 9"):
        jax.jit(lambda x: layer(params, x, lengths=3 * np.asarray(lengths)))(x)
    if dtype != "bool":
        with pytest.raises(ValueError, match=r"resets > 0\.5"):
            jax.jit(lambda x, flags=3 * flags: layer(params, x, resets=flags))(x)


def test_traced_values_cannot_be_checked(layer: aj.RNN, params: Arrays, x: Any) -> None:
    """Of lengths and resets: all resets but 0 are resets, and lengths are clipped by comparing."""
    run = jax.jit(lambda resets, lengths: layer(params, x, resets=resets, lengths=lengths)[0])
    flags, lengths = jnp.zeros((T, B)).at[2].set(3.0), jnp.full(B, 9)
    same(run(flags, lengths), layer(params, x, resets=flags != 0)[0])


@pytest.mark.parametrize("dtype", ["int64", "uint32", "int8"])
def test_traced_lengths_are_clipped(params: Arrays, layer: aj.RNN, x: Any, dtype: str) -> None:
    """Also those beyond 32 bits."""
    most = np.iinfo(dtype).max
    lengths = np.array([most, most - 1, np.iinfo(dtype).min, 3, most], dtype)
    right = layer(params, x, lengths=[T, T, 0, 3, T])[0]
    with X64.enable_x64(True):
        same(jax.jit(lambda lengths: layer(params, x, lengths=lengths)[0])(lengths), right)
