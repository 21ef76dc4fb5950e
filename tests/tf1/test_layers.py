"""TensorFlow 1's cells, against the TensorFlow kernels on which they were based.

One file, because the same few functions compare all cells and loops.
"""

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
if keras.backend.backend() != "tensorflow":
    pytest.skip("Keras runs on another backend", allow_module_level=True)

from tolerances import NO_WORSE_THAN_16, assert_close, error  # noqa: E402

import anycell  # noqa: E402
import anycell.tf1 as t1  # noqa: E402
from anycell.read.short import MOST, SHORT  # noqa: E402

STEPS, ROWS, WIDTH, UNITS = 6, 4, 3, 5


def randomize(cell: Any, rng: np.random.Generator, width: int = WIDTH) -> dict[str, Any]:
    """Sets the variables to random values, and returns the values."""
    cell.build(width)
    for variable in cell.named.values():
        variable.assign(0.5 * rng.normal(size=variable.shape))
    return {name: tf.convert_to_tensor(v) for name, v in cell.named.items()}


def random(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> Any:
    return tf.constant(rng.normal(size=shape).astype(dtype))


def peepholes(named: dict[str, Any]) -> list[Any]:
    nothing = tf.zeros((UNITS,))
    return [named.get(f"w_{gate}_diag", nothing) for gate in "ifo"]


@pytest.mark.parametrize("use_peephole", [False, True])
@pytest.mark.parametrize("cell_clip", [None, 0.3])
@pytest.mark.parametrize("forget_bias", [0.0, 1.0])
@pytest.mark.sample(every=3)
def test_fused_cell_is_block_lstm(
    use_peephole: bool, cell_clip: float | None, forget_bias: float, rng: np.random.Generator
) -> None:
    """It also equals BlockLSTMV2, which adds nothing to f and has the gates i f c o. TensorFlow's
    gradient of V2 assumes the order of V1, so it is no oracle.
    """
    cell = t1.LSTMBlockFusedCell(UNITS, forget_bias, cell_clip, use_peephole)
    named = randomize(cell, rng)
    x, c, h = random(rng, STEPS, ROWS, WIDTH), random(rng, ROWS, UNITS), random(rng, ROWS, UNITS)
    given = dict(zip(("wci", "wcf", "wco"), peepholes(named), strict=True))
    given |= {"seq_len_max": tf.constant(STEPS, tf.int64), "x": x, "cs_prev": c, "h_prev": h}
    given |= {"cell_clip": cell_clip or -1.0, "use_peephole": use_peephole}
    w, bias = named["kernel"], named["bias"]
    theirs = [tf.raw_ops.BlockLSTM(w=w, b=bias, forget_bias=forget_bias, **given)]
    if cell_clip and not forget_bias:
        i, g, f, o = tf.split(tf.concat([w, bias[None]], 0), 4, axis=-1)
        turned = tf.concat([i, f, g, o], axis=-1)
        theirs.append(tf.raw_ops.BlockLSTMV2(w=turned[:-1], b=turned[-1], **given))
    outputs, state = cell(x, t1.LSTMStateTuple(c, h))
    for _, cs, *_, hs in theirs:
        assert_close(outputs.numpy(), hs.numpy(), "float32", "forward")
        assert_close(state.c.numpy(), cs[-1].numpy(), "float32", "forward")
        assert_close(state.h.numpy(), hs[-1].numpy(), "float32", "forward")


@pytest.mark.parametrize("use_peephole", [False, True])
def test_block_cell_is_one_step(use_peephole: bool, rng: np.random.Generator) -> None:
    cell = t1.LSTMBlockCell(UNITS, 1.0, 0.5, use_peephole)
    named = randomize(cell, rng)
    x, c, h = random(rng, ROWS, WIDTH), random(rng, ROWS, UNITS), random(rng, ROWS, UNITS)
    wci, wcf, wco = peepholes(named)
    _, cs, *_, hs = tf.raw_ops.LSTMBlockCell(
        x=x, cs_prev=c, h_prev=h, w=named["kernel"], wci=wci, wcf=wcf, wco=wco, b=named["bias"],
        forget_bias=1.0, cell_clip=0.5, use_peephole=use_peephole,
    )  # fmt: skip
    output, state = cell(x, t1.LSTMStateTuple(c, h))
    assert_close(output.numpy(), hs.numpy(), "float32", "forward")
    assert_close(state.c.numpy(), cs.numpy(), "float32", "forward")


def test_gru_cell_is_gru_block_cell(rng: np.random.Generator) -> None:
    cell = t1.GRUCell(UNITS)
    named = randomize(cell, rng)
    x, h = random(rng, ROWS, WIDTH), random(rng, ROWS, UNITS)
    *_, right = tf.raw_ops.GRUBlockCell(
        x=x, h_prev=h, w_ru=named["gates/kernel"], w_c=named["candidate/kernel"],
        b_ru=named["gates/bias"], b_c=named["candidate/bias"],
    )  # fmt: skip
    output, state = cell(x, h)
    assert_close(output.numpy(), right.numpy(), "float32", "forward")
    assert np.array_equal(output, state)


# The original cells of version 1: a copy in TensorFlow, and the once public copy in tf_keras.
LEGACY = [
    "tensorflow.python.keras.layers.legacy_rnn.rnn_cell_impl",
    "tf_keras.src.layers.rnn.legacy_cells",
]
BOUNDED = {"use_peepholes": True, "cell_clip": 0.6, "num_proj": 2, "proj_clip": 0.4}
# Name in version 1, scope in a checkpoint, our class, arguments
OF_VERSION_1 = [
    ("BasicLSTMCell", "basic_lstm_cell", t1.BasicLSTMCell, {"forget_bias": 0.5}),
    ("LSTMCell", "lstm_cell", t1.LSTMCell, {}),
    ("LSTMCell", "lstm_cell", t1.LSTMCell, BOUNDED),
    ("GRUCell", "gru_cell", t1.GRUCell, {}),
    ("LSTMCell", "lstm_cell", t1.LSTMCell, {"use_peepholes": True}),
]


@pytest.fixture(params=LEGACY, ids=lambda name: name.partition(".")[0])
def legacy(request: pytest.FixtureRequest) -> Iterator[Any]:
    module = pytest.importorskip(request.param)
    tf.compat.v1.experimental.output_all_intermediates(True)  # for gradients of loops
    yield module
    tf.compat.v1.experimental.output_all_intermediates(None)


@pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed:UserWarning")
@pytest.mark.parametrize(
    ("loop", "scopes"),
    [
        ("dynamic_rnn", ["rnn"]),
        ("bidirectional_dynamic_rnn", ["bidirectional_rnn/fw", "bidirectional_rnn/bw"]),
    ],
)
@pytest.mark.parametrize(("name", "scope", "kind", "given"), OF_VERSION_1)
@pytest.mark.sample(every=7)  # a cell of each kind, and each loop
def test_cells_and_loops_of_version_1(
    legacy: Any, name: str, scope: str, kind: Any, given: Any, loop: str, scopes: list[str],
    tmp_path: Path, rng: np.random.Generator,
) -> None:  # fmt: skip
    """Outputs, states and gradients agree, with variables from a checkpoint of version 1."""
    lengths, path = [STEPS, 1, 0, 4], str(tmp_path / "model.ckpt")
    x = rng.normal(size=(ROWS, STEPS, WIDTH))
    sizes = [UNITS] if kind is t1.GRUCell else [UNITS, given.get("num_proj", UNITS)]
    draws = [0.3 * rng.normal(size=(ROWS, size)) for _ in scopes for size in sizes]

    def run(module: Any, cells: list[Any], begin: list[Any]) -> tuple[list[Any], Any]:
        """Returns all results, and a number that depends on each of them."""
        like = [cell.zero_state(ROWS, "float64") for cell in cells]
        states = tf.nest.pack_sequence_as(like, begin[1:])
        results = tf.nest.flatten(getattr(module, loop)(*cells, begin[0], lengths, *states))
        return results, sum(tf.reduce_sum(part + tf.sin(part)) for part in results)

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        begin = [tf.constant(array) for array in (x, *draws)]
        theirs = [getattr(legacy, name)(UNITS, dtype="float64", **given) for _ in scopes]
        results, total = run(v1.nn, theirs, begin)
        variables = v1.trainable_variables()
        names = [variable.op.name for variable in variables]
        session.run(v1.global_variables_initializer())
        for variable in variables:
            variable.load(0.5 * rng.normal(size=variable.shape), session)
        right = session.run([*results, *v1.gradients(total, [*begin, *variables])])
        v1.train.Saver().save(session, path)

    ours = [kind(UNITS, dtype="float64", **given) for _ in scopes]
    named = {}
    for cell, above in zip(ours, scopes, strict=True):
        cell.restore(path, f"{above}/{scope}")
        named |= {f"{above}/{scope}/{key}": variable for key, variable in cell.named.items()}
    assert sorted(named) == sorted(names)
    begin = [tf.constant(array) for array in (x, *draws)]
    with tf.GradientTape() as tape:
        tape.watch(begin)
        results, total = run(t1, ours, begin)
    found = [*results, *tape.gradient(total, [*begin, *(named[name] for name in names)])]
    for k, (a, b) in enumerate(zip(found, right, strict=True)):
        assert_close(a.numpy(), b, "float64", "forward" if k < len(results) else "gradient")


ACTIVATIONS = [
    *("elu", "exponential", "linear", "relu", "selu", "sigmoid", "softplus", "softsign", "swish"),
    # Not tf.nn.leaky_relu, whose slope is a float32.
    *(tf.nn.elu, tf.exp, tf.identity, tf.math.log_sigmoid, tf.nn.relu),
    *(tf.nn.relu6, tf.nn.selu, tf.nn.sigmoid, tf.nn.silu, tf.nn.softplus, tf.nn.softsign, tf.tanh),
    *(tf.compat.v1.nn.tanh, tf.compat.v1.math.log_sigmoid),
    *(keras.activations.hard_sigmoid, keras.activations.hard_silu, keras.activations.mish),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed:UserWarning")
@pytest.mark.parametrize("legacy", LEGACY[:1], indirect=True)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda f: getattr(f, "__name__", f))
def test_activations(legacy: Any, activation: Any, rng: np.random.Generator) -> None:
    x = tf.constant(2.0 * rng.normal(size=(ROWS, WIDTH)))
    state = tf.constant(rng.normal(size=(ROWS, UNITS)))
    results = []
    for rnn in (legacy, t1):
        cell = rnn.GRUCell(UNITS, activation, dtype="float64", kernel_initializer="ones")
        with tf.GradientTape() as tape:
            tape.watch([x, state])
            output, _ = cell(x, state)
        results.append([output, *tape.gradient(output, [x, state])])
    for k, (right, found) in enumerate(zip(*results, strict=True)):
        assert_close(found, right, "float64", "gradient" if k else "forward")


HALF = [
    ("BasicLSTMCell", {}, "float16"),
    ("BasicLSTMCell", {}, "bfloat16"),
    ("LSTMCell", BOUNDED, "bfloat16"),
    ("BasicRNNCell", {"activation": "relu"}, "float16"),
    ("GRUCell", {}, "float16"),
]


@pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed:UserWarning")
@pytest.mark.parametrize(
    ("name", "given", "dtype"),
    [
        ("BasicRNNCell", {"activation": "relu"}, "bfloat16"),
        ("GRUCell", {}, "bfloat16"),
        ("LSTMCell", BOUNDED, "float16"),
        *HALF,
    ],
)
@pytest.mark.parametrize("legacy", LEGACY[:1], indirect=True)
@pytest.mark.sample(1)
def test_half_precision(
    legacy: Any, name: str, given: Any, dtype: str, rng: np.random.Generator
) -> None:
    """In both directions, as documented, errors against float64 are no worse than those of
    TensorFlow's own cells.
    """
    steps, rows, units, v1 = 12, 6, 33, tf.compat.v1
    lengths = [steps, 1, 0, steps, 7, 5]
    x = rng.normal(size=(rows, steps, 7)).astype(tf.as_dtype(dtype).as_numpy_dtype)
    weights: dict[str, Any] = {}

    def run(rnn: Any, loops: Any, dtype: str) -> tuple[list[Any], list[str]]:
        with tf.Graph().as_default(), v1.Session() as session:
            inputs = tf.constant(x.astype(tf.as_dtype(dtype).as_numpy_dtype))
            cells = [getattr(rnn, name)(units, **given) for _ in range(2)]
            results = loops.bidirectional_dynamic_rnn(*cells, inputs, lengths, dtype=dtype)
            flat, variables = tf.nest.flatten(results), v1.trainable_variables()
            total = sum(tf.reduce_sum(tf.cast(part, tf.float64)) for part in flat)
            grads = v1.gradients(total, [inputs, *variables])
            assert {part.dtype for part in [*flat, *variables, *grads]} == {tf.as_dtype(dtype)}
            for variable in variables:
                number = rng.normal(size=variable.shape) / np.sqrt(units)
                value = weights.setdefault(variable.op.name, number.astype(x.dtype))
                session.run(variable.assign(value.astype(variable.dtype.as_numpy_dtype)))
            kinds = ["forward"] * len(flat) + ["gradient"] * len(grads)
            return session.run([*flat, *grads]), kinds

    theirs, _ = run(legacy, v1.nn, dtype)
    ours, kinds = run(t1, t1, dtype)
    right, _ = run(t1, t1, "float64")
    for k, (kind, a, b, ref) in enumerate(zip(kinds, ours, theirs, right, strict=True)):
        assert error(a, ref) <= NO_WORSE_THAN_16 * error(b, ref), f"{name}: {kind} {k}"
        assert_close(a, ref, dtype, kind, f"{name}: {kind} {k}")


def test_checkpoints_of_a_stack(tmp_path: Path, rng: np.random.Generator) -> None:
    """Eager mode writes checkpoints under the names of version 1, and reads them."""

    def stack() -> Any:
        inner = t1.MultiRNNCell([t1.ResidualWrapper(t1.BasicRNNCell(UNITS))])
        return t1.MultiRNNCell([t1.DropoutWrapper(t1.BasicLSTMCell(UNITS, name="a-b")), inner])

    x, scope, path = random(rng, ROWS, STEPS, WIDTH), "rnn/multi_rnn_cell", str(tmp_path / "model")
    cells, others = stack(), stack()
    right = t1.dynamic_rnn(cells, x)[0]
    names = [f"cell_0/a-b/{name}" for name in ("kernel", "bias")]
    names += [f"cell_1/multi_rnn_cell/cell_0/basic_rnn_cell/{name}" for name in ("kernel", "bias")]
    assert list(cells.named) == names
    assert {v.name for v in cells.trainable_variables} == {f"{scope}/{name}:0" for name in names}
    saved = {f"{scope}/{name}": variable for name, variable in cells.named.items()}
    tf.compat.v1.train.Saver(saved).save(None, path)
    others.restore(path, scope)
    assert np.array_equal(t1.dynamic_rnn(others, x)[0], right)
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match=r"restore: .*train\.Saver"):
        others.restore(path, scope)
    missing = r"scope: given 'rnn', whose kernel .* missing; .*rnn/multi_rnn_cell/cell_0/a-b"
    with pytest.raises(ValueError, match=missing):
        t1.BasicLSTMCell(UNITS).restore(path, "rnn")
    with pytest.raises(ValueError, match=r"w_f_diag in the checkpoint is missing"):
        t1.LSTMCell(UNITS, use_peepholes=True).restore(path, f"{scope}/cell_0/a-b")


def test_a_checkpoint_of_float64(tmp_path: Path, rng: np.random.Generator) -> None:
    """A cell without a dtype takes that of the checkpoint; a given dtype stays."""
    cell, x = t1.GRUCell(UNITS), random(rng, ROWS, STEPS, WIDTH, dtype="float64")
    right, path = t1.dynamic_rnn(cell, x)[0], str(tmp_path / "model")
    saved = {f"gru/{name}": variable for name, variable in cell.named.items()}
    tf.compat.v1.train.Saver(saved).save(None, path)
    for given, dtype in ((None, "float64"), ("float32", "float32")):
        other = t1.GRUCell(UNITS, dtype=given)
        other.restore(path, "gru")
        assert {variable.dtype for variable in other.variables} == {tf.as_dtype(dtype)}
        outputs = t1.dynamic_rnn(other, tf.cast(x, dtype))[0]
        assert_close(outputs.numpy(), right.numpy(), dtype, "forward")


def own_cells() -> list[Any]:
    """Cells of users with one step: variables from ``call``, from ``build``, and besides ours."""

    class Inline(t1.RNNCell):
        state_size = output_size = UNITS

        def call(self, inputs: Any, state: Any) -> Any:
            shape = inputs.shape[-1] + UNITS, UNITS
            w = tf.compat.v1.get_variable("w", shape, inputs.dtype)
            state = tf.tanh(tf.concat([inputs, state], 1) @ w)
            return state, state

    class Built(t1.RNNCell):
        state_size = output_size = UNITS

        def build(self, inputs_shape: Any) -> None:
            self.w = self.add_variable("w", [inputs_shape[-1] + UNITS, UNITS])
            bias = self.add_weight("bias", [UNITS], initializer="zeros", trainable=False)
            assert (bias.dtype, bias.trainable) == (self.w.dtype, False)
            self.built = True

        def call(self, inputs: Any, state: Any) -> Any:
            state = tf.tanh(tf.concat([inputs, state], 1) @ self.w)
            return state, state

    class Scaled(t1.GRUCell):
        def build(self, inputs_shape: Any) -> None:
            super().build(inputs_shape)
            self.scale = self.add_variable("scale", [UNITS], initializer="ones")

        def call(self, inputs: Any, state: Any) -> Any:
            output, state = super().call(inputs, state)
            start = tf.constant(2.0, output.dtype)
            w = tf.compat.v1.get_variable("w", None, output.dtype, start)
            return output * self.scale * w, state

    return [Inline(), Built(), Scaled(UNITS, tf.compat.v1.nn.tanh)]


@pytest.mark.parametrize("k", range(3), ids=["call", "build", "of ours"])
def test_cells_of_users_keep_their_variables(
    k: int, tmp_path: Path, rng: np.random.Generator
) -> None:
    """In eager mode, in functions, and in a graph of version 1, by the same names."""
    x, path = random(rng, ROWS, STEPS, WIDTH, dtype="float64"), str(tmp_path / "model")
    names = [["w"], ["bias", "w"], None][k]
    cell, other, late = (own_cells()[k] for _ in range(3))
    right = t1.dynamic_rnn(cell, x)[0]
    names = names or [*t1.GRUCell(UNITS)._shapes(0), "scale", "w"]
    assert sorted(cell.named) == sorted(names)
    assert {v.name for v in cell.variables} == {f"rnn/{cell.name}/{name}:0" for name in names}
    saved = {f"rnn/{cell.name}/{name}": variable for name, variable in cell.named.items()}
    assert {variable.dtype for variable in saved.values()} == {tf.float64}
    tf.compat.v1.train.Saver(saved).save(None, path)
    for run in (cell, other):  # in the order eager, function; and function, function, eager
        first, second = (
            tf.function(lambda x, run=run: t1.dynamic_rnn(run, x)[0], autograph=False)
            for _ in range(2)
        )
        assert np.array_equal(first(x), first(x))
        assert np.array_equal(first(x), second(x))
        assert_close(t1.dynamic_rnn(run, x)[0].numpy(), first(x).numpy(), "float64", "forward")
        assert len(run.variables) == len(names)
    if k < 2:
        with pytest.raises(ValueError, match=f"restore: given a new {type(cell).__name__}"):
            late.restore(path, f"rnn/{cell.name}")
    other.restore(path, f"rnn/{cell.name}")
    assert_close(t1.dynamic_rnn(other, x)[0].numpy(), right.numpy(), "float64", "forward")
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        outputs = t1.dynamic_rnn(late, tf.constant(x.numpy()))[0]
        tf.compat.v1.train.Saver().restore(session, path)
        assert_close(session.run(outputs), right.numpy(), "float64", "forward")


def test_variables_have_the_names_and_shapes_of_version_1() -> None:
    cell = t1.LSTMCell(UNITS, use_peepholes=True, num_proj=2)
    with tf.compat.v1.variable_scope("rnn"):
        cell.build(WIDTH)
    assert {v.name: tuple(v.shape) for v in cell.trainable_variables} == {
        f"rnn/lstm_cell/{name}:0": shape for name, shape in {
            "kernel": (5, 20), "bias": (20,), "w_i_diag": (5,), "w_f_diag": (5,), "w_o_diag": (5,),
            "projection/kernel": (5, 2),
        }.items()
    }  # fmt: skip
    cell = t1.GRUCell(UNITS)
    cell.build(WIDTH)
    assert cell.named["gates/bias"].numpy().tolist() == [1.0] * 10


@pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed:UserWarning")
def test_variables_have_the_order_of_version_1(legacy: Any) -> None:
    """Programs list variables and assign seeds in this order; contrib's cells had another order."""
    listed = []
    for kind in (legacy.LSTMCell, t1.LSTMCell):
        with tf.Graph().as_default():
            given = {"use_peepholes": True, "num_proj": 2, "dtype": "float32", "name": "cell"}
            kind(UNITS, **given).build((None, WIDTH))
            listed.append([v.op.name for v in tf.compat.v1.trainable_variables()])
    assert [name.rpartition("cell/")[2] for name in listed[0]] == [
        name.rpartition("cell/")[2] for name in listed[1]
    ]
    block = t1.LSTMBlockCell(UNITS, use_peephole=True)
    block.build(WIDTH)
    assert [*block.named] == ["kernel", "bias", "w_i_diag", "w_f_diag", "w_o_diag"]


CELLS = "BasicLSTMCell BasicRNNCell GRUCell LSTMCell".split()
WRAPPERS = "DeviceWrapper DropoutWrapper MultiRNNCell ResidualWrapper".split()
LOOPS = "bidirectional_dynamic_rnn dynamic_rnn static_bidirectional_rnn static_rnn".split()


@pytest.mark.parametrize("name", [*CELLS, *WRAPPERS, *LOOPS])
def test_arguments_are_those_of_version_1(name: str) -> None:
    """Names, order and defaults equal those of TensorFlow's copy of version 1."""
    where, theirs = "tensorflow.python.ops.rnn" if name in LOOPS else LEGACY[0], name
    if name.endswith("Wrapper"):
        where, theirs = where.replace("cell_impl", "cell_wrapper_impl"), f"{name}Base"
    theirs = inspect.signature(getattr(importlib.import_module(where), theirs))
    right = [p for p in theirs.parameters.values() if p.kind is not p.VAR_KEYWORD]
    ours = inspect.signature(getattr(t1, name))
    found = [p for p in ours.parameters.values() if p.kind is not p.VAR_KEYWORD]
    assert [(p.name, p.default) for p in found] == [(p.name, p.default) for p in right]


def test_arguments_that_change_nothing(rng: np.random.Generator) -> None:
    cell = t1.LSTMCell(np.int64(UNITS), state_is_tuple=True, activation=tf.tanh, reuse=False)
    randomize(cell, rng)
    x = random(rng, ROWS, STEPS, WIDTH)
    right = t1.dynamic_rnn(cell, x)[0]
    found = t1.dynamic_rnn(cell, x, None, None, tf.float32, 32, True, False, "scope")[0]
    assert np.array_equal(found, right)
    both = t1.bidirectional_dynamic_rnn(cell, cell, x, None, None, None, tf.float32, scope="s")[0]
    assert np.array_equal(both[0], right)
    fused = t1.LSTMBlockFusedCell(UNITS, reuse=None, dtype=tf.float32)
    randomize(fused, rng)
    major = tf.transpose(x, (1, 0, 2))
    assert not fused(major, None, tf.float32, [1] * ROWS)[0][1:].numpy().any()


def test_what_cells_of_version_1_have_besides() -> None:
    cell = t1.LSTMCell(UNITS, name="not an identifier", trainable=False)
    cell.build((None, WIDTH))
    assert [v.shape for v in cell.variables] == [(20,), (8, 20)]
    assert cell.trainable_variables == ()
    state = cell.get_initial_state(tf.zeros((3, WIDTH), tf.float64))
    assert state.dtype == tf.float64
    assert state.c.shape == (3, UNITS)
    with pytest.raises(TypeError, match=r"given .*float32.* for c and .*float64.* for h"):
        _ = state._replace(c=tf.zeros((3, UNITS))).dtype
    with pytest.raises(TypeError, match="unexpected keyword argument 'forget'"):
        t1.GRUCell(3, forget=1.0)


def test_initializers() -> None:
    one = tf.compat.v1.constant_initializer(0.5)
    cell = t1.LSTMCell(UNITS, True, None, one, 2)
    cell.build(WIDTH)
    for name, variable in cell.named.items():
        assert np.all(variable.numpy() == (0.0 if name == "bias" else 0.5)), name
    cell = t1.GRUCell(UNITS, None, None, "zeros", one)
    cell.build(WIDTH)
    for name, variable in cell.named.items():
        assert np.all(variable.numpy() == (0.5 if name.endswith("bias") else 0.0)), name
    for initializer in (None, "normal", keras.initializers.RandomNormal()):
        cell = t1.LSTMCell(UNITS, True, initializer=initializer)
        cell.build(WIDTH)
        assert not np.array_equal(cell.named["w_i_diag"], cell.named["w_f_diag"])


def test_names_of_version_1_that_are_not_here_have_a_hint() -> None:
    """Each hint names something that exists and takes these arguments."""
    import anycell.keras

    known = {"tf": tf, "anycell": anycell, "units": UNITS, **vars(t1)}
    for name, nearest in t1._INSTEAD.items():
        with pytest.raises(AttributeError, match=f"no attribute {name!r}. Nearest to it: "):
            getattr(t1, name)
        assert eval(nearest.partition(" (")[0], known)
    with pytest.raises(AttributeError, match=r"no attribute 'LSTMCel'. Close to it: LSTMCell, "):
        t1.LSTMCel  # noqa: B018


def test_refusals() -> None:
    with pytest.raises(ValueError, match="num_units: given 0; expected an int from 1"):
        t1.LSTMCell(0)
    with pytest.raises(ValueError, match="dtype: given int32; expected float16, bfloat16, float32"):
        t1.GRUCell(3, dtype=tf.int32)
    with pytest.raises(ValueError, match=r"inputs: given shape \(2, 3\); expected \[T, B, width\]"):
        t1.LSTMBlockFusedCell(3)(tf.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"shape \(4, 2, 3\).*dynamic_rnn\(cell, inputs\)\.$"):
        t1.LSTMBlockCell(3)(tf.zeros((4, 2, 3)), t1.LSTMStateTuple(*[tf.zeros((2, 3))] * 2))
    with pytest.raises(ValueError, match=r"shape \(1, 4, 2, 3\).*Reshape them\.$"):
        t1.LSTMBlockFusedCell(3)(tf.zeros((1, 4, 2, 3)))


def test_tf_scan_runs_a_cell_and_not_a_whole_sequence() -> None:
    x = np.random.default_rng(0).normal(size=(5, 2, 3)).astype("float32")
    start = t1.LSTMStateTuple(tf.zeros((2, 4)), tf.zeros((2, 4)))
    whole = t1.LSTMBlockFusedCell(4)
    remedy = r"call it once, with all steps, in place of a loop such as tf\.scan; .*LSTMBlockCell"
    with pytest.raises(ValueError, match=rf"\(2, 3\); expected \[T, B, width\].*{remedy}"):
        tf.scan(lambda state, row: whole(row, state)[1], tf.constant(x), start)
    cell = t1.LSTMBlockCell(4)
    states = tf.scan(lambda state, row: cell(row, state)[1], tf.constant(x), start)
    outputs, _ = t1.dynamic_rnn(cell, tf.constant(x), time_major=True, initial_state=start)
    assert_close(states.h, outputs, "float32", "forward")
    with pytest.raises(TypeError, match=r"cell: given LSTMCell; expected a cell of anycell.tf1"):
        t1.dynamic_rnn(keras.layers.LSTMCell(3), tf.zeros((1, 2, 3)))
    with pytest.raises(ValueError, match="num_proj: given 0; expected an int from 1"):
        t1.LSTMCell(3, num_proj=0)
    with pytest.raises(
        ValueError, match=r"activation: given .*abs.*; expected None or one of .*elu"
    ):
        t1.GRUCell(3, tf.abs)
    with pytest.raises(ValueError, match="activation: given 'hard_sigmoid'; expected None or"):
        t1.GRUCell(3, "hard_sigmoid")  # another function in TensorFlow 1
    with pytest.raises(ValueError, match="reuse: given True; expected None"):
        t1.LSTMBlockCell(3, reuse=True)
    with pytest.raises(
        ValueError, match="dtype: given float64; expected float32, that of the cell"
    ):
        t1.dynamic_rnn(t1.GRUCell(3, dtype=tf.float32), tf.zeros((2, 4, 3)), dtype=tf.float64)
    with pytest.raises(ValueError, match=r"inputs: given float32; expected float64\. Cast it"):
        t1.dynamic_rnn(t1.GRUCell(3), tf.zeros((2, 4, 3)), dtype=tf.float64)
    with pytest.raises(ValueError, match="dtype: given int64; expected float16"):
        t1.dynamic_rnn(t1.GRUCell(3), tf.zeros((2, 4, 3), tf.int64))
    with pytest.raises(TypeError, match="cell: given the class LSTMCell; expected a cell"):
        t1.dynamic_rnn(t1.LSTMCell, tf.zeros((2, 4, 3)))


@pytest.mark.parametrize("kind", [t1.LSTMCell, t1.GRUCell])
def test_refuses_what_does_not_fit(kind: Any) -> None:
    """Kernels would read memory past its end."""
    cell, x = kind(4), tf.zeros((2, 5, 3))
    t1.dynamic_rnn(cell, x)
    for lengths in ([5], [5, 3, 2], [[5], [3]], 5):
        with pytest.raises(ValueError, match=r"sequence_length: given shape .*; expected \(2,\)"):
            t1.dynamic_rnn(cell, x, lengths)
    for rows in (1, 3):
        with pytest.raises(ValueError, match=rf"given shapes \({rows}, 4\).*expected \(2, 4\)"):
            t1.dynamic_rnn(cell, x, initial_state=cell.zero_state(rows, tf.float32))
    with pytest.raises(ValueError, match="state: given shapes"):
        t1.dynamic_rnn(cell, x, initial_state=tf.zeros((2, 8)))
    with pytest.raises(ValueError, match="state: given shapes"):
        t1.dynamic_rnn(cell, x, initial_state=(tf.zeros((2, 4)),) * 3)
    with pytest.raises(ValueError, match=r"state: given float64; expected float32\. Cast it"):
        t1.dynamic_rnn(cell, x, initial_state=cell.zero_state(2, tf.float64))
    with pytest.raises(ValueError, match="sequence_length: given float32; expected integers"):
        t1.dynamic_rnn(cell, x, tf.constant([5.0, 3.0]))
    with pytest.raises(ValueError, match="inputs: given width 2; expected 3"):
        t1.dynamic_rnn(cell, x[..., :2])
    with pytest.raises(ValueError, match=r"inputs: given shape \(2, 5, 3\); expected \[B, width"):
        cell(x, cell.zero_state(2))


def test_refuses_in_a_graph_what_does_not_fit() -> None:
    cell = t1.LSTMCell(4)

    @tf.function(input_signature=[tf.TensorSpec(None)], autograph=False)
    def unknown(x: Any) -> Any:
        return t1.dynamic_rnn(cell, x)[0]

    with pytest.raises(
        ValueError, match=r"inputs: given shape <unknown>; expected \[B, T, width\]"
    ):
        unknown(tf.zeros((2, 5, 3)))

    some = [tf.TensorSpec((None, None, 3)), tf.TensorSpec(None, tf.int32)]

    @tf.function(input_signature=some, autograph=False)
    def run(x: Any, lengths: Any) -> Any:
        return t1.dynamic_rnn(cell, x, lengths)[0]

    x = tf.ones((2, 5, 3))
    assert np.array_equal(run(x, [5, 2]), t1.dynamic_rnn(cell, x, [5, 2])[0])
    for lengths in ([5], [5, 3, 2], 5):
        with pytest.raises(tf.errors.InvalidArgumentError, match="a length for each row"):
            run(x, lengths)


# ---- stacks, wrappers and what runs them ---------------------------------------------------------
def sequences(rng: np.random.Generator) -> Any:
    return random(rng, ROWS, STEPS, UNITS)


def test_engines(rng: np.random.Generator) -> None:
    """The engine named is the engine that runs: kernels have one operation for all steps."""

    class Patched(t1.GRUCell):
        def call(self, inputs: Any, state: Any) -> Any:
            return super().call(inputs, state)

    fused = t1.MultiRNNCell(
        [t1.DropoutWrapper(t1.ResidualWrapper(t1.GRUCell(UNITS)), 0.5, 0.5) for _ in range(2)]
    )
    states = t1.DropoutWrapper(t1.GRUCell(UNITS), state_keep_prob=0.5)
    x = sequences(rng)
    for cell, name, reason in (
        (fused, "cpu", "layer by layer; fused kernel"),
        (states, "composite", "state_keep_prob"),
        (Patched(UNITS), "composite", "Patched.call is not anycell's"),
        (t1.MultiRNNCell([fused, states]), "composite", "run on cpu, composite; of cell_1: state"),
        (t1.GRUCell(UNITS, dtype=tf.float16), "cpu", "float16 computes in float32"),
    ):
        assert cell.engine.name == name
        assert reason in cell.engine.reason
        inputs = tf.cast(x, cell.dtype or tf.float32)
        traced = tf.function(lambda x, cell=cell: t1.dynamic_rnn(cell, x)[0], autograph=False)
        graph = traced.get_concrete_function(inputs).graph.as_graph_def()
        kinds = {node.op for node in graph.node}
        assert any("While" in kind for kind in kinds) is (name == "composite")
    with keras_step_by_step():
        assert fused.engine.name == "composite"


def test_cells_of_users_are_read_in_graphs_of_version_1(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Without a loop in the graph; what cannot be read keeps TensorFlow's loop, and few steps."""

    class Leaky(t1.RNNCell):
        state_size = output_size = UNITS

        def call(self, inputs: Any, state: Any) -> Any:
            w = tf.compat.v1.get_variable("w", (UNITS, UNITS), inputs.dtype)
            state = 0.9 * state + tf.sin(inputs @ w)
            return state * state, state

    class Centred(Leaky):
        def call(self, inputs: Any, state: Any) -> Any:
            state = tf.tanh(inputs + state - tf.reduce_mean(state, 0))
            return state, state

    array = rng.normal(size=(ROWS, STEPS, UNITS)).astype("float32")
    for kind, name in ((Leaky, "cpu"), (Centred, "composite")):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            cell, x = kind(), tf.compat.v1.placeholder(tf.float32, (None, None, UNITS))
            assert cell.engine.name == "composite"
            outputs, state = t1.dynamic_rnn(cell, x, [6, 2, 0, 5])
            gradient = tf.gradients(tf.reduce_sum(outputs), x)[0]
            theirs, last = tf.compat.v1.nn.dynamic_rnn(
                cell, x, [6, 2, 0, 5], dtype=tf.float32, scope="rnn"
            )
            expected = theirs, last, tf.gradients(tf.reduce_sum(theirs), x)[0]
            session.run(tf.compat.v1.global_variables_initializer())
            assert len(tf.compat.v1.global_variables()) == (kind is Leaky)
            assert cell.engine.name == name, cell.engine.reason
            found, right = session.run([(outputs, state, gradient), expected], {x: array})
            for a, b in zip(found, right, strict=True):
                assert_close(a, b, "float32", "forward")
    assert "over the rows of the batch" in cell.engine.reason
    monkeypatch.setitem(MOST, "tensorflow", STEPS)
    for steps, name in ((STEPS, "composite"), (STEPS + 1, "cpu"), (None, "cpu"), (1, "cpu")):
        with tf.Graph().as_default():
            cell, x = Leaky(), tf.compat.v1.placeholder(tf.float32, (ROWS, steps, UNITS))
            t1.dynamic_rnn(cell, x)
            assert (cell.engine.name, SHORT in cell.engine.reason) == (name, name != "cpu")


def keras_step_by_step() -> Any:
    from anycell.keras import step_by_step

    return step_by_step()


def test_a_cell_is_explained() -> None:
    """``explain`` shows the cell's engine, then the page of its kernels in its dtype and sizes."""
    for cell, dtype in (
        (t1.LSTMCell(8, num_proj=4, use_peepholes=True), "float32"),
        (t1.GRUCell(8, dtype=tf.float64), "float64"),
    ):
        page = anycell.explain(cell)
        first, _, heading, *_ = str(page).splitlines()
        assert first == f"{cell.name} runs on cpu ({cell.engine.reason})"
        assert heading.endswith(f": hidden size 8, {dtype}") and "forward kernel" in page
        assert page.plan.sizes == {"H": 8, **({"P": 4} if dtype == "float32" else {})}


def test_a_patched_cell_is_honoured(rng: np.random.Generator) -> None:
    cell, x = t1.GRUCell(UNITS), sequences(rng)
    right = t1.dynamic_rnn(cell, x)[0]
    call = cell.call
    cell.call = lambda inputs, state: (2.0 * call(inputs, state)[0], call(inputs, state)[1])
    for whole in (cell, t1.MultiRNNCell([t1.DropoutWrapper(cell)])):
        assert_close(t1.dynamic_rnn(whole, x)[0], 2.0 * right, "float32", "forward")
        assert whole.engine.name == "composite"


@pytest.mark.parametrize("xla", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_stacks_in_every_mode(xla: bool, rng: np.random.Generator) -> None:
    """Results agree eagerly, in graphs, under XLA and step by step; NaN past lengths is ignored."""
    cells = t1.MultiRNNCell([
        t1.ResidualWrapper(t1.LSTMCell(UNITS), lambda i, o: i * o),
        t1.ResidualWrapper(t1.DropoutWrapper(t1.GRUCell(UNITS))),
    ])  # fmt: skip
    lengths = np.array([STEPS, 2, 0, 4])
    x = sequences(rng)
    x = tf.where(tf.range(STEPS)[:, None] < lengths[:, None, None], x, np.nan)

    def run(x: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            results = tf.nest.flatten(t1.dynamic_rnn(cells, x, lengths))
            total = sum(tf.reduce_sum(tf.sin(part)) for part in results)
        return [*results, *tape.gradient(total, [x, *cells.trainable_variables])]

    right = run(x)
    assert len(right) == 4 + 1 + 6
    for k, (a, b) in enumerate(
        zip(tf.function(run, autograph=False, jit_compile=xla)(x), right, strict=True)
    ):
        assert_close(a, b, "float32", "forward" if k < 4 else "gradient")
    state, outputs = cells.zero_state(ROWS), []
    for step in tf.unstack(tf.where(tf.math.is_nan(x), 0.0, x), axis=1):
        output, state = cells(step, state)
        outputs.append(output)
    assert_close(outputs[0][0], right[0][0, 0], "float32", "forward")
    assert_close(tf.stack(outputs, 1)[0], right[0][0], "float32", "forward")


def dropped(cell: Any, x: Any, length: int | None = None) -> Any:
    """Returns the factors of dropout: sends ``x`` of ones through a cell that copies its inputs."""
    inner = cell.cell
    inner.build(UNITS)
    inner.named["kernel"].assign(np.vstack([np.eye(UNITS), np.zeros((UNITS, UNITS))]))
    lengths = None if length is None else [length] * x.shape[0]
    return t1.dynamic_rnn(cell, x, lengths)[0].numpy()


@pytest.mark.parametrize("role", ["input", "output"])
@pytest.mark.parametrize("variational", [False, True])
def test_dropout(role: str, variational: bool) -> None:
    """Each step and row, or each run, has a new mask; kept values are scaled up."""
    tf.random.set_seed(3)
    cell = t1.DropoutWrapper(
        t1.BasicRNNCell(UNITS, tf.identity), **{f"{role}_keep_prob": 0.8},
        variational_recurrent=variational, dtype=tf.float32, input_size=UNITS,
    )  # fmt: skip
    assert cell.engine.name == "cpu"
    ones = tf.ones((50, 40, UNITS))
    runs = np.stack([dropped(cell, ones) for _ in range(20)])
    kept = runs != 0
    assert_close(runs[kept], np.full(kept.sum(), 1.25), "float32", "forward")
    if variational:
        assert np.array_equal(kept, np.broadcast_to(kept[:, :1, :1], kept.shape))
        kept = kept[:, 0, 0]
        assert not np.array_equal(kept[0], kept[1]) or not np.array_equal(kept[0], kept[2])
    else:
        for axis in range(kept.ndim):  # no axis shares its masks
            assert not np.array_equal(*np.take(kept, [0, 1], axis=axis).swapaxes(0, axis))
    spread = 5 * np.sqrt(0.8 * 0.2 / kept.size)
    assert abs(kept.mean() - 0.8) < spread
    assert not dropped(cell, ones, 7)[:, 7:].any()


def test_dropout_of_states(rng: np.random.Generator) -> None:
    """Dropout applies to h, not to c; a filter can exclude both."""
    x = sequences(rng)
    state = t1.LSTMStateTuple(*(random(rng, ROWS, UNITS) for _ in "ch"))

    def final(visitor: Any = None, kind: Any = t1.LSTMCell) -> Any:
        cell = t1.DropoutWrapper(
            kind(UNITS), state_keep_prob=0.5, dropout_state_filter_visitor=visitor
        )
        begin = state if kind is t1.LSTMCell else state.h
        return t1.dynamic_rnn(cell, x, initial_state=begin)[1]

    c, h = (part.numpy() == 0 for part in final())
    assert 0 < h.mean() < 1
    assert not c.any()
    assert 0 < (final(kind=t1.GRUCell).numpy() == 0).mean() < 1
    c, h = (part.numpy() == 0 for part in final(lambda part: not isinstance(part, tuple)))
    assert not c.any()
    assert not h.any()


def test_probabilities_that_change(rng: np.random.Generator) -> None:
    """Probabilities may be a variable or a tensor that is fed."""
    x, keep = sequences(rng), tf.Variable(1.0)
    cell = t1.DropoutWrapper(t1.GRUCell(UNITS), output_keep_prob=keep)
    assert t1.dynamic_rnn(cell, x)[0].numpy().all()
    keep.assign(0.3)
    assert not t1.dynamic_rnn(cell, x)[0].numpy().all()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        fed = tf.compat.v1.placeholder_with_default(1.0, ())
        cell = t1.DropoutWrapper(t1.GRUCell(UNITS), fed, fed)
        outputs = t1.dynamic_rnn(cell, tf.ones((ROWS, STEPS, UNITS), tf.float16))[0]
        session.run(tf.compat.v1.global_variables_initializer())
        assert session.run(outputs).all()
        assert not session.run(outputs, {fed: 0.3}).all()


def test_behind_a_gather(rng: np.random.Generator) -> None:
    """The gradient of a gather is an IndexedSlices."""
    cell, x = t1.GRUCell(UNITS), tf.transpose(sequences(rng), (1, 0, 2))

    @tf.function
    def grads(gather: bool) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = t1.dynamic_rnn(cell, x, time_major=True)[0]
            total = tf.reduce_sum(tf.gather(outputs, STEPS - 2) if gather else outputs[STEPS - 2])
        return tape.gradient(total, x)

    assert_close(grads(True), grads(False), "float32", "gradient")


def test_no_steps_and_no_rows(rng: np.random.Generator) -> None:
    x = sequences(rng)
    for cell in (
        t1.MultiRNNCell([t1.LSTMCell(UNITS), t1.GRUCell(UNITS)]),
        t1.ResidualWrapper(t1.GRUCell(UNITS), lambda i, o: i + o),
        t1.DropoutWrapper(t1.BasicRNNCell(UNITS), 0.5, 0.5),
    ):
        assert t1.dynamic_rnn(cell, x[:, :0])[0].shape == (ROWS, 0, UNITS)
        assert t1.dynamic_rnn(cell, x[:0])[0].shape == (0, STEPS, UNITS)


def test_a_step_adds_inputs_of_numpy_to_its_outputs() -> None:
    cell, x = t1.ResidualWrapper(t1.GRUCell(UNITS)), np.ones((ROWS, UNITS), "float32")
    state = cell.zero_state(ROWS, tf.float32)
    assert np.array_equal(cell(x, state)[0], cell(tf.constant(x), state)[0])


def test_lengths_beyond_the_steps(rng: np.random.Generator) -> None:
    cell, x = t1.GRUCell(UNITS), sequences(rng)
    for lengths in (tf.constant([2**33 + 1, -3, 3, 9], tf.int64), np.array([9, 0, 3, 7], "uint8")):
        found = t1.bidirectional_dynamic_rnn(cell, cell, x, lengths)[0]
        right = t1.bidirectional_dynamic_rnn(cell, cell, x, [STEPS, 0, 3, STEPS])[0]
        assert np.array_equal(found, right)


def test_refusals_of_wrappers(rng: np.random.Generator) -> None:
    x, gru = sequences(rng), t1.GRUCell(UNITS)
    cases: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "cells: given none", lambda: t1.MultiRNNCell([])),
        (TypeError, "cells: given GRUCell; expected a list", lambda: t1.MultiRNNCell(gru)),
        (
            TypeError, r"cells\[1\]: given LSTMCell; .*keras.layers.RNN",
            lambda: t1.MultiRNNCell([gru, keras.layers.LSTMCell(3)]),
        ),
        (
            ValueError, "state_is_tuple: given False, with cells whose states are of sizes",
            lambda: t1.MultiRNNCell([t1.LSTMCell(3)], state_is_tuple=False),
        ),
        (
            ValueError, "state: given one tensor; expected a tuple of 1",
            lambda: t1.dynamic_rnn(t1.MultiRNNCell([gru]), x, initial_state=x[:, 0]),
        ),
        (
            ValueError, r"inputs: given width 7; expected 5, .*Make a cell for each layer",
            lambda: t1.dynamic_rnn(t1.MultiRNNCell([t1.GRUCell(7)] * 2), x),
        ),
        (
            ValueError, "input_keep_prob: given 1.5; expected a number above 0, and at most 1",
            lambda: t1.DropoutWrapper(gru, 1.5),
        ),
        (ValueError, "output_keep_prob: given 0", lambda: t1.DropoutWrapper(gru, 1.0, 0)),
        (ValueError, "state_keep_prob: given None", lambda: t1.DropoutWrapper(gru, 1.0, 1.0, None)),
        (
            ValueError, "dtype: given None; expected the dtype of the inputs",
            lambda: t1.DropoutWrapper(gru, 0.5, variational_recurrent=True),
        ),
        (
            ValueError, "input_size: given None; expected the width",
            lambda: t1.DropoutWrapper(gru, 0.5, variational_recurrent=True, dtype=tf.float32),
        ),
        (
            TypeError, "dropout_state_filter_visitor: given True",
            lambda: t1.DropoutWrapper(gru, dropout_state_filter_visitor=True),  # type: ignore
        ),
        (TypeError, "residual_fn: given 3", lambda: t1.ResidualWrapper(gru, 3)),  # type: ignore
        (
            ValueError, r"inputs: given shape \(6, 4, 5\); expected \(6, 4, 7\), that of the out",
            lambda: t1.dynamic_rnn(t1.ResidualWrapper(t1.GRUCell(7)), x),
        ),
        (TypeError, "inputs: given EagerTensor; expected a list", lambda: t1.static_rnn(gru, x)),
        (ValueError, "inputs: given no steps", lambda: t1.static_rnn(gru, [])),
        (
            ValueError, "cells_fw: given tuple; expected a list of cells",
            lambda: t1.stack_bidirectional_dynamic_rnn((gru,), [gru], x),  # type: ignore
        ),
        (
            ValueError, "cells_bw: given a list of 2; expected 1 cells",
            lambda: t1.stack_bidirectional_dynamic_rnn([gru], [gru, gru], x),
        ),
        (
            ValueError, "initial_states_bw: given EagerTensor; expected a list of 1",
            lambda: t1.stack_bidirectional_dynamic_rnn([gru], [gru], x, None, x),  # type: ignore
        ),
    ]  # fmt: skip
    for kind, text, attempt in cases:
        with pytest.raises(kind, match=text):
            attempt()
