"""JAX layers on several devices and in several processes: shardings, and the programs on disk."""

import itertools
import json
import socket
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import python

from anycell.engines.cpu import xla

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

import anycell.jax as aj
from anycell.layer import recipe

TWO = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
START = """
    import json, re, sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    import anycell.jax as aj
    from anycell import cells

    mesh = Mesh(np.array(jax.devices()), ("d",))
    steps, rows, inputs, units = 7, 4, 3, 6
    x = jax.random.normal(jax.random.key(1), (steps, rows, inputs))

    def shard(a, *axes):
        return jax.device_put(a, NamedSharding(mesh, P(*axes)))

    def spread(a):
        return "d" in jax.tree.leaves(tuple(a.sharding.spec))

    def moved(function, *arrays):
        text = jax.jit(function).lower(*arrays).compile().as_text()
        return sorted(set(re.findall(r"(all-gather|all-to-all|all-reduce)(?:-start)?[(]", text)))

    def far(one, other):
        pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
        return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)
"""


def on_two(code: str, *arguments: str, **environment: str) -> Any:
    """What a program with two devices prints as JSON."""
    program = textwrap.dedent(START) + textwrap.dedent(code)
    return json.loads(python(program, *arguments, **TWO, **environment).splitlines()[-1])


PROGRAMS = """
    layer = aj.RNN(getattr(cells, sys.argv[1]), inputs, units, bidirectional=True)
    params = layer.init(jax.random.key(0))
    names = [n for n in ("h", "c") if n in layer.cell.state_names]
    state = tuple(jnp.ones((2, rows, units)) / 3 for _ in names)
    given = dict(resets=x[..., 0] > 1, lengths=jnp.array([7, 3, 5, 1]))
    if layer.draws:
        given |= dict(training=True, seed=5)

    def run(params, x, state):
        output, final, others = layer(params, x, state, return_states=True, **given)
        return output, final, others

    def loss(*arrays):
        return sum((one**2).sum() for one in jax.tree.leaves(run(*arrays)))

    def by_hand(params, x):
        def step(h, now):
            h = jnp.tanh(now @ params["w"].T + h @ params["u"].T)
            return h, h
        return (jax.lax.scan(step, jnp.zeros((x.shape[1], units)), x)[1] ** 2).sum()

    state = state if len(state) > 1 else state[0]
    whole = params, x, state
    parts = shard(params), shard(x, None, "d"), jax.tree.map(lambda s: shard(s, None, "d"), state)
    gradients = jax.grad(loss, (0, 1, 2))
    d = jax.jit(gradients)(*parts)
    cut = shard(params, "d"), *parts[1:]
    hand = dict(w=jnp.ones((units, inputs)), u=jnp.ones((units, units)) / 9)
    d_hand = jax.jit(jax.grad(by_hand, (0, 1)))(shard(hand), parts[1])
    d_cut_hand = jax.jit(jax.grad(by_hand))(shard(hand, "d"), parts[1])
    d_cut = jax.jit(gradients)(*cut)
    constrained = lambda params, x, state: run(
        params, jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, "d"))), state
    )
    odd = lambda params, x, state: layer(params, x[:, :3])[0]
    print(json.dumps({
        "far": [
            far(jax.jit(run)(*parts), run(*whole)), far(d, gradients(*whole)),
            far(d_cut, gradients(*whole)), far(jax.jit(constrained)(*whole), run(*whole)),
            far(run(*parts), run(*whole)), far(jax.jit(odd)(*parts), odd(*whole)),
        ],
        "spread": [
            [*map(spread, jax.tree.leaves(jax.jit(run)(*parts)))],
            [*map(spread, jax.tree.leaves(run(*parts)))],
            [*map(spread, jax.tree.leaves(jax.jit(constrained)(*whole)))],
            [*map(spread, jax.tree.leaves(d[1:]))],
        ],
        "weights": [[*map(spread, jax.tree.leaves(one))] for one in (d[0], d_cut[0])],
        "weights by hand": [*map(spread, jax.tree.leaves((d_hand[0], d_cut_hand)))],
        "moved": [moved(run, *parts), moved(gradients, *parts)],
        "moved by hand": moved(jax.grad(by_hand, (0, 1)), shard(hand), parts[1]),
    }))
"""


@pytest.mark.parametrize(
    ("cell", "shardy"), [("ZoneoutLSTM", "1"), ("GRU", "1"), ("ZoneoutLSTM", "0")]
)
@pytest.mark.slow
def test_rows_stay_where_they_are(cell: str, shardy: str) -> None:
    """As in a ``lax.scan``: outputs and gradients are sharded, and only gradients of weights cross,
    by either partitioner of XLA.
    """
    seen = on_two(PROGRAMS, cell, JAX_USE_SHARDY_PARTITIONER=shardy)
    assert max(seen["far"]) < 1e-5
    assert all(map(all, seen["spread"]))
    whole, cut = seen["weights"]
    assert not any(whole) and all(cut)
    if shardy == "1":  # the older partitioner leaves one of the scan's whole
        assert seen["weights by hand"] == [False] * 2 + [True] * 2
    assert seen["moved"] == [[], ["all-reduce"]] and seen["moved by hand"] == ["all-reduce"]


@pytest.mark.more  # steps on devices are transformed there, too
def test_transformations_on_devices() -> None:
    """Checkpoints, ``vmap`` and loops; meshes of two axes, and explicit ones."""
    seen = on_two("""
        layer = aj.GRU(inputs, units)
        params = layer.init(jax.random.key(0))
        chunked = aj.GRU(inputs, units, checkpoint=2)
        loss = lambda p, x, layer=layer: (layer(p, x)[0] ** 2).sum()
        many = jax.random.normal(jax.random.key(2), (4, steps, rows, inputs))
        each = lambda p, many: jax.vmap(lambda x: layer(p, x)[0], spmd_axis_name="d")(many)
        total = lambda p, many: (each(p, many) ** 2).sum()
        per_element = lambda p, many: jax.vmap(jax.grad(loss), (None, 0))(p, many)
        by_steps = lambda p, x: jax.lax.scan(
            lambda h, now: layer(p, now[None], h)[::-1], jnp.zeros((1, x.shape[1], units)), x
        )[1]
        square = Mesh(np.array(jax.devices()).reshape(1, 2), ("a", "b"))
        both = jax.device_put(x, NamedSharding(square, P(None, ("a", "b"))))
        on_rows, on_many = shard(x, None, "d"), shard(many, "d")
        explicit = True
        if hasattr(jax.sharding, "AxisType"):
            kinds = (jax.sharding.AxisType.Explicit,)
            mine = jax.make_mesh((2,), ("d",), axis_types=kinds)
            typed = jax.device_put(x, NamedSharding(mine, P(None, "d")))
            alike = jax.device_put(params, NamedSharding(mine, P()))
            explicit = spread(jax.jit(jax.grad(loss, 1))(alike, typed))
        pairs = [
            (jax.jit(jax.grad(lambda p, x: loss(p, x, chunked), (0, 1)))(params, on_rows),
             jax.grad(loss, (0, 1))(params, x)),
            (jax.jit(each)(params, on_many), each(params, many)),
            (jax.jit(jax.grad(total))(params, on_many), jax.grad(total)(params, many)),
            (jax.jit(per_element)(params, on_many), per_element(params, many)),
            (jax.jit(by_steps)(params, on_rows), by_steps(params, x)),
            (jax.jit(jax.grad(loss))(params, both), jax.grad(loss)(params, x)),
        ]
        spreads = [explicit, spread(jax.jit(each)(params, on_many))]
        print(json.dumps([max(far(*pair) for pair in pairs), spreads]))
    """)
    assert seen[0] < 1e-5 and all(seen[1])


@pytest.mark.slow
def test_two_processes() -> None:
    """Each has half of the rows; the gradients are those of one process."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    code = """
        import sys
        import jax, jax.numpy as jnp, numpy as np
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, int(sys.argv[1]))
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        import anycell.jax as aj
        from anycell import cells
        layer = aj.RNN(cells.ZoneoutLSTM, 3, 6)
        params = layer.init(jax.random.key(0))
        x = np.asarray(jax.random.normal(jax.random.key(1), (7, 4, 3)))
        loss = lambda p, x: (layer(p, x, training=True, seed=3)[0] ** 2).sum()
        right = jax.grad(loss)(params, jnp.asarray(x))
        mesh = Mesh(np.array(jax.devices()), ("d",))
        def shard(a, *axes):
            a, sharding = np.asarray(a), NamedSharding(mesh, P(*axes))
            return jax.make_array_from_callback(a.shape, sharding, lambda part: a[part])
        spread = jax.tree.map(shard, params)
        d = jax.jit(jax.grad(loss))(spread, shard(x, None, "d"))
        far = [np.abs(np.asarray(d[n].addressable_data(0)) - right[n]).max() for n in d]
        assert max(far) < 1e-5, far
        print("right", jax.device_count())
    """
    one = {"XLA_FLAGS": None, "JAX_PLATFORMS": "cpu"}
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(python, code, str(i), port, **one) for i in range(2)]
        assert all("right 2" in run.result() for run in runs)


# -- programs on disk ------------------------------------------------------------------------------
CACHED = """
    import hashlib, os, sys
    import jax, numpy as np
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    import anycell.jax as aj
    from anycell import cells
    sharded = jax.device_count() > 1
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", sharded)
    x = jax.random.normal(jax.random.key(1), (7, 4, 3))
    if sharded:
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
        spec = jax.sharding.PartitionSpec(None, "d")
        x = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
    bits = hashlib.sha256()
    for clip in (0.0, 0.1):  # the programs have the same arrays
        layer = aj.RNN(cells.ZoneoutLSTM(zoneout_c=clip), 3, 6, bidirectional=True)
        params = layer.init(jax.random.key(0))
        how = dict(training=True, seed=4, resets=x[..., 0] > 1)
        d = jax.jit(jax.grad(lambda p, x: (layer(p, x, **how)[0] ** 2).sum()))(params, x)
        for one in jax.tree.leaves(d):
            bits.update(np.asarray(one).tobytes())
    print(bits.hexdigest(), len(os.listdir(sys.argv[1])))
"""


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.slow
def test_another_process_finds_programs_on_disk(tmp_path: Path, devices: int) -> None:
    """It adds no file, and has the same bits; and two layers of equal arrays are two programs."""
    environment = TWO if devices == 2 else {"XLA_FLAGS": None, "JAX_PLATFORMS": "cpu"}
    first, second, alone = (
        python(CACHED, str(tmp_path / name), **environment).split() for name in ("a", "a", "b")
    )
    assert first == second == alone


@pytest.mark.slow
def test_a_program_of_another_process_runs_or_is_refused(tmp_path: Path) -> None:
    code = """
        import pickle, sys
        from pathlib import Path
        import jax, jax.numpy as jnp
        from jax.experimental import serialize_executable
        import anycell.jax as aj
        file, how = Path(sys.argv[1]), sys.argv[2]
        layer, x = aj.LSTM(3, 6), jnp.ones((7, 4, 3))
        params = layer.init(jax.random.key(0))
        run = jax.jit(lambda p, x: layer(p, x)[0])
        if how == "save":
            compiled = run.lower(params, x).compile()
            file.write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))
        elif how == "same":
            run(params, x[:5])
        elif how == "other":
            aj.GRU(3, 6)(aj.GRU(3, 6).init(jax.random.key(0)), x)
        try:
            load = serialize_executable.deserialize_and_load
            print(float(load(*pickle.loads(file.read_bytes()))(params, x).sum()))
        except Exception as error:
            print("refused:", error)
    """
    seen = {
        how: python(code, str(tmp_path / "program"), how) for how in "save same other no".split()
    }
    assert float(seen["save"]) == float(seen["same"])
    assert "has a layer of anycell that this process has not compiled" in seen["other"]
    assert "No FFI handler registered" in seen["no"]


# -- memory ----------------------------------------------------------------------------------------
@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two recipes are kept for the next call with the same shapes."""
    monkeypatch.setattr(recipe, "_RECIPES", 2)
    before = dict(recipe.known)
    recipe.known.clear()
    yield
    recipe.known.clear()
    recipe.known.update(before)


@pytest.mark.usefixtures("few")
def test_programs_outlive_recipes() -> None:
    """Programs need no recipe of this process; one room serves all sizes of calls."""
    layer = aj.LSTM(3, 6)
    params = layer.init(jax.random.key(0))
    run = jax.jit(lambda p, x: layer(p, x)[0])
    inputs = [jnp.ones((steps, 5, 3)) for steps in range(1, 7)]
    first = [np.asarray(run(params, x)) for x in inputs]
    assert len(recipe.known) <= 2
    for x, output in zip(inputs, first, strict=True):
        assert np.array_equal(run(params, x), output)
    sizes = [room.size for room in xla.process().rooms]
    assert all(2 * a <= b for a, b in itertools.pairwise(sizes[1:]))


def test_names() -> None:
    """A table of names grows; a name has its latest address."""
    process = xla.Process()
    names = [process.name(f"kernel {i}", i + 1) for i in range(100)]
    assert len(set(names)) == 100 and process.name("kernel 7", 700) == names[7]
    table = process._tables[-1]
    rows = [tuple(table[1 + 2 * i : 3 + 2 * i]) for i in range(table[0])]
    assert len(table) == 1 + 2 * table[0] and table[0] >= 2 * 100
    right = {name: i + 1 for i, name in enumerate(names)} | {names[7]: 700}
    assert {name: address for name, address in rows if name} == right


def test_steps_on_devices() -> None:
    """Weights are packed whole on each device, and a step takes the rows of each."""
    seen = on_two("""
        layer = aj.LSTM(inputs, units)
        params, resets = shard(layer.init(jax.random.key(0))), x[0, :, 0] > 0

        def rollout(params, x, resets):
            prepared = layer.prepare(params)

            def step(state, now):
                return layer.step(prepared, now, state, resets=resets)[::-1]

            return jax.lax.scan(step, layer.initial_state(rows), x)

        parts = params, shard(x, None, "d"), shard(resets, "d")
        made = jax.jit(rollout)(*parts)
        whole = rollout(params, x, resets)
        print(json.dumps([far(made, whole), [*map(spread, jax.tree.leaves(made))],
                          moved(rollout, *parts)]))
    """)
    error, spread, moved = seen
    assert error < 1e-6 and all(spread) and not moved
