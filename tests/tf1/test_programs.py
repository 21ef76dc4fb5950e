"""Programs of TensorFlow 1 as its tutorials have them, with nothing but the import changed.

Each is a function of a namespace ``rnn``: TensorFlow's own cells and loops, or ours. Both run in a
graph of TensorFlow 1, from one checkpoint, and must give the same results and gradients.
"""

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
if keras.backend.backend() != "tensorflow":
    pytest.skip("Keras runs on another backend", allow_module_level=True)

from processes import python  # noqa: E402
from tolerances import assert_close  # noqa: E402

import anycell.tf1 as t1  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed:UserWarning"),
]
v1 = tf.compat.v1
STEPS, ROWS, WIDTH, UNITS = 4, 4, 5, 5
LENGTHS = [STEPS, 1, 0, 3]
DTYPE = "float64"


def stack_of_tensorflow(cells_fw: Any, cells_bw: Any, inputs: Any, **given: Any) -> Any:
    """``tf.contrib.rnn.stack_bidirectional_dynamic_rnn``, which left with contrib, in short."""
    final = []
    with v1.variable_scope("stack_bidirectional_rnn"):
        for k, (forwards, backwards) in enumerate(zip(cells_fw, cells_bw, strict=True)):
            with v1.variable_scope(f"cell_{k}"):
                outputs, states = v1.nn.bidirectional_dynamic_rnn(
                    forwards, backwards, inputs, **given
                )
            inputs = tf.concat(outputs, 2)
            final.append(states)
    return inputs, *zip(*final, strict=True)


THEIRS = SimpleNamespace(
    **{
        name: getattr(v1.nn, name)
        for name in (
            "dynamic_rnn", "bidirectional_dynamic_rnn", "static_rnn", "static_bidirectional_rnn",
            "raw_rnn", "static_state_saving_rnn",
        )
    },
    **vars(importlib.import_module("tensorflow.python.keras.layers.legacy_rnn.rnn_cell_impl")),
    stack_bidirectional_dynamic_rnn=stack_of_tensorflow,
)  # fmt: skip


# -- the programs ----------------------------------------------------------------------------------
def language_model(rnn: Any, x: Any, unroll: bool) -> Any:
    """Zaremba's, on the Penn Treebank; the model that validates shares the weights."""

    def model(is_training: bool) -> Any:
        def cell() -> Any:
            one = rnn.BasicLSTMCell(
                UNITS, forget_bias=0.0, state_is_tuple=True, reuse=not is_training
            )
            return rnn.DropoutWrapper(one, output_keep_prob=1.0)

        cells = rnn.MultiRNNCell([cell() for _ in range(2)], state_is_tuple=True)
        state = cells.zero_state(ROWS, tf.float64)
        if unroll:
            return rnn.static_rnn(cells, tf.unstack(x, num=STEPS, axis=1), initial_state=state)
        outputs = []
        with v1.variable_scope("RNN"):
            for step in range(STEPS):
                if step > 0:
                    v1.get_variable_scope().reuse_variables()
                output, state = cells(x[:, step, :], state)
                outputs.append(output)
        return outputs, state

    start = v1.random_uniform_initializer(-0.1, 0.1)
    with v1.variable_scope("Model", reuse=None, initializer=start):
        training = model(True)
    with v1.variable_scope("Model", reuse=True, initializer=start):
        return training, model(False)


def deep_relu(rnn: Any, x: Any) -> Any:
    """Layers of the most basic cell, with another activation."""
    layers = [rnn.BasicRNNCell(num_units=UNITS + k, activation=tf.nn.relu) for k in range(3)]
    return rnn.dynamic_rnn(rnn.MultiRNNCell(layers), x, dtype=tf.float64)


def tagger(rnn: Any, x: Any, static: bool) -> Any:
    """A tagger of words."""
    with v1.variable_scope("bi-lstm"):
        forwards = rnn.LSTMCell(UNITS, state_is_tuple=True)
        backwards = rnn.LSTMCell(UNITS, use_peepholes=True, num_proj=3, activation="softsign")
        if static:
            steps = tf.unstack(x, STEPS, 1)
            return rnn.static_bidirectional_rnn(
                forwards, backwards, steps, dtype=tf.float64, sequence_length=LENGTHS
            )
        (out_fw, out_bw), states = rnn.bidirectional_dynamic_rnn(
            forwards, backwards, x, sequence_length=LENGTHS, dtype=tf.float64
        )
        return tf.concat([out_fw, out_bw], axis=-1), states


def side_by_side(rnn: Any, x: Any) -> Any:
    """States that are no tuples, of before TensorFlow 1.0."""
    lstm = rnn.LSTMCell(UNITS, num_proj=3, state_is_tuple=False)
    basic = rnn.BasicLSTMCell(4, state_is_tuple=False)
    cells = rnn.MultiRNNCell([lstm, basic, rnn.GRUCell(2)], state_is_tuple=False)
    state = tf.reshape(tf.linspace(tf.constant(-1.0, tf.float64), 1.0, ROWS * 18), (ROWS, 18))
    return rnn.dynamic_rnn(cells, x, LENGTHS, state)


def translator(rnn: Any, x: Any) -> Any:
    """The encoder of Google's, whose residual function cuts the inputs to the outputs."""

    def cut(inputs: Any, outputs: Any) -> Any:
        size = outputs.get_shape().as_list()[-1]
        kept, _ = tf.split(inputs, [size, inputs.get_shape().as_list()[-1] - size], axis=1)
        return outputs + kept

    def cell(k: int) -> Any:
        one = rnn.GRUCell(UNITS - k)
        one = rnn.DropoutWrapper(cell=one, input_keep_prob=1.0)
        return rnn.DeviceWrapper(rnn.ResidualWrapper(one, residual_fn=cut if k else None), "/cpu:0")

    both = [rnn.MultiRNNCell([cell(k) for k in range(2)]) for _ in range(2)]
    return rnn.bidirectional_dynamic_rnn(
        *both, tf.transpose(x, (1, 0, 2)), LENGTHS, dtype=tf.float64, time_major=True
    )


def rows_together(rnn: Any, x: Any) -> Any:
    """A residual function that looks at all rows of a step: it must be given one step."""
    cell = rnn.ResidualWrapper(
        rnn.GRUCell(UNITS), lambda i, o: o + i - tf.reduce_mean(i * o, axis=0, keepdims=True)
    )
    return rnn.dynamic_rnn(cell, x, dtype=tf.float64)


def deep_speech(rnn: Any, x: Any) -> Any:
    """Layers of which each reads both directions of the one before."""
    forwards, backwards = ([rnn.LSTMCell(UNITS - k) for k in range(2)] for _ in range(2))
    return rnn.stack_bidirectional_dynamic_rnn(
        forwards, backwards, x, sequence_length=LENGTHS, dtype=tf.float64
    )


def variational(rnn: Any, x: Any, state: float) -> Any:
    """Gal's dropout: with a seed TensorFlow's masks are ours, for one operation draws each."""
    keep = v1.placeholder_with_default(tf.constant(0.7, tf.float64), ())
    cells = [
        rnn.DropoutWrapper(
            rnn.LSTMCell(UNITS), 0.6, keep, state, True, tf.TensorShape([WIDTH]), tf.float64, k
        )
        for k in range(2)
    ]  # fmt: skip
    return rnn.dynamic_rnn(rnn.MultiRNNCell(cells), x, LENGTHS, dtype=tf.float64)


def own_cell(rnn: Any, x: Any) -> Any:
    """A cell of the program's between two others."""

    class Leaky(rnn.RNNCell):
        @property
        def state_size(self) -> int:
            return UNITS

        @property
        def output_size(self) -> int:
            return UNITS

        def call(self, inputs: Any, state: Any) -> Any:
            w = v1.get_variable("w", (WIDTH, UNITS), inputs.dtype)
            state = 0.9 * state + tf.sin(inputs @ w)
            return state, state

    cells = rnn.MultiRNNCell([rnn.GRUCell(WIDTH), Leaky(), rnn.BasicLSTMCell(3)])
    return rnn.bidirectional_dynamic_rnn(
        cells, rnn.GRUCell(3), x, sequence_length=LENGTHS, dtype=tf.float64
    )


def subclass(rnn: Any, x: Any) -> Any:
    """A cell that does a little more than the one it is made of."""

    class Twice(rnn.GRUCell):
        def call(self, inputs: Any, state: Any) -> Any:
            output, state = super().call(inputs, state)
            return 2.0 * output, state

    return rnn.dynamic_rnn(Twice(UNITS), x, LENGTHS, dtype=tf.float64)


PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "ptb": lambda rnn, x: language_model(rnn, x, False),
    "ptb, static": lambda rnn, x: language_model(rnn, x, True),
    "deep relu": deep_relu,
    "tagger": lambda rnn, x: tagger(rnn, x, False),
    "tagger, static": lambda rnn, x: tagger(rnn, x, True),
    "side by side": side_by_side,
    "translator": translator,
    "rows together": rows_together,
    "deep speech": deep_speech,
    "variational": lambda rnn, x: variational(rnn, x, 1.0),
    "variational states": lambda rnn, x: variational(rnn, x, 0.8),
    "own cell": own_cell,
    "subclass": subclass,
}


FAST = {"deep relu"}


@pytest.fixture(autouse=True)
def intermediates() -> Iterator[None]:
    v1.experimental.output_all_intermediates(True)  # or no session differentiates a loop
    yield
    v1.experimental.output_all_intermediates(None)


def session_of(
    rnn: Any, program: Callable[[Any, Any], Any], array: Any, path: str, load: bool,
    rng: np.random.Generator, shape: Any = (ROWS, STEPS, WIDTH),
) -> tuple[list[Any], list[Any], list[str]]:  # fmt: skip
    """Results, gradients and names of variables, which are loaded from a checkpoint, or made and
    saved there; of the inputs the graph knows ``shape``.
    """
    with tf.Graph().as_default(), v1.Session() as session:
        v1.set_random_seed(5)
        x = v1.placeholder(tf.float64, shape)
        results = tf.nest.flatten(program(rnn, x))
        variables = sorted(v1.trainable_variables(), key=lambda v: v.op.name)
        total = sum(tf.reduce_sum(part + tf.sin(part)) for part in results)
        grads = v1.gradients(total, [x, *variables])
        saver = v1.train.Saver()
        if load:
            saver.restore(session, path)
        else:
            session.run(v1.global_variables_initializer())
            for variable in variables:
                variable.load(0.5 * rng.normal(size=variable.shape), session)
            saver.save(session, path)
        results, grads = session.run([results, grads], {x: array})
        return results, grads, [v.op.name for v in variables]


def compare(found: Any, right: Any) -> None:
    assert found[2] == right[2]
    for kind, k in (("forward", 0), ("gradient", 1)):
        for i, (a, b) in enumerate(zip(found[k], right[k], strict=True)):
            assert_close(a, b, DTYPE, kind, f"{kind} {i}")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in PROGRAMS]
)
def test_program(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """From theirs to ours; the names are the same, and so the way back is."""
    array, path = rng.normal(size=(ROWS, STEPS, WIDTH)), str(tmp_path / "model.ckpt")
    right = session_of(THEIRS, PROGRAMS[name], array, path, False, rng)
    compare(session_of(t1, PROGRAMS[name], array, path, True, rng), right)


def test_a_checkpoint_of_ours_is_one_of_theirs(tmp_path: Path, rng: np.random.Generator) -> None:
    array, path = rng.normal(size=(ROWS, STEPS, WIDTH)), str(tmp_path / "model.ckpt")
    found = session_of(t1, PROGRAMS["tagger"], array, path, False, rng)
    compare(found, session_of(THEIRS, PROGRAMS["tagger"], array, path, True, rng))


@pytest.mark.more
def test_shapes_of_version_1(tmp_path: Path, rng: np.random.Generator) -> None:
    """Sizes that are no numbers, and unknown."""
    array, path = rng.normal(size=(ROWS, STEPS, WIDTH)), str(tmp_path / "model.ckpt")
    right = session_of(t1, PROGRAMS["translator"], array, path, False, rng)
    v1.disable_v2_tensorshape()
    try:
        shape = (None, None, WIDTH)
        compare(session_of(t1, PROGRAMS["translator"], array, path, True, rng, shape), right)
    finally:
        v1.enable_v2_tensorshape()


OLD = """
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()

import pathlib, sys, tempfile
import numpy as np
from tests.tf1 import test_programs as tests

for name in ('ptb', 'translator', 'variational states', 'own cell'):
    rng, path = np.random.default_rng(3), pathlib.Path(tempfile.mkdtemp())
    tests.test_program(name, path, rng)
tests.test_state_is_fed(rng)
print("as in version 1")
"""


@pytest.mark.slow
def test_programs_without_version_2() -> None:
    """As old code on TensorFlow 2 begins: ``tf.disable_v2_behavior()``."""
    assert python(OLD).endswith("as in version 1\n")


def test_state_is_fed(rng: np.random.Generator) -> None:
    """A model of characters: the state that it begins with is fed, chunk by chunk."""
    x = rng.normal(size=(ROWS, 3 * STEPS, WIDTH)).astype("float32")

    def whole(session: Any) -> Any:
        cells = t1.MultiRNNCell([t1.BasicLSTMCell(UNITS), t1.LSTMCell(3)])
        start = cells.zero_state(ROWS, tf.float32)
        chunk = v1.placeholder(tf.float32, (ROWS, None, WIDTH))
        outputs, last = t1.dynamic_rnn(cells, chunk, initial_state=start)
        session.run(v1.global_variables_initializer())
        right, state = session.run([outputs, start], {chunk: x}), session.run(start)
        found = []
        for k in range(3):
            feed = {chunk: x[:, k * STEPS : (k + 1) * STEPS]}
            for (c, h), (c_now, h_now) in zip(start, state, strict=True):
                feed |= {c: c_now, h: h_now}
            part, state = session.run([outputs, last], feed)
            found.append(part)
        return np.concatenate(found, axis=1), right[0]

    with tf.Graph().as_default(), v1.Session() as session:
        assert_close(*whole(session), "float32", "forward")


@pytest.mark.slow
def test_loops_of_tensorflow_take_our_cells(rng: np.random.Generator) -> None:
    """``raw_rnn`` and ``static_state_saving_rnn`` ask after every step what the next one is."""
    array = rng.normal(size=(ROWS, STEPS, WIDTH))

    class Saver:
        kept: dict[str, Any]

        def state(self, name: str) -> Any:
            return self.kept[name]

        def save_state(self, name: str, value: Any) -> Any:
            self.kept[name] = value
            return tf.no_op()

    with tf.Graph().as_default(), v1.Session() as session:
        x = tf.constant(array)
        steps = tf.TensorArray(tf.float64, STEPS).unstack(tf.transpose(x, (1, 0, 2)))
        cell = t1.MultiRNNCell([t1.LSTMCell(UNITS), t1.ResidualWrapper(t1.GRUCell(UNITS))])

        def loop(time: Any, output: Any, state: Any, _: Any) -> Any:
            state = cell.zero_state(ROWS, tf.float64) if output is None else state
            over = time >= tf.constant(LENGTHS)
            following = steps.read(tf.minimum(time, STEPS - 1))
            return over, following, state, output, None

        right = t1.dynamic_rnn(cell, x, LENGTHS, scope="all")
        outputs, state, _ = v1.nn.raw_rnn(cell, loop)
        raw = tf.transpose(outputs.stack(), (1, 0, 2)), state
        saver = Saver()
        zeros = tf.nest.flatten(cell.zero_state(ROWS, tf.float64))
        saver.kept = dict(zip("chg", zeros, strict=True))
        saving = v1.nn.static_state_saving_rnn(
            cell, tf.unstack(x, axis=1), saver, (("c", "h"), "g"), LENGTHS
        )
        saving = tf.stack(saving[0], axis=1), saving[1]
        session.run(v1.global_variables_initializer())
        right, raw, saving = session.run([tf.nest.flatten(r) for r in (right, raw, saving)])
    for found in (raw, saving):
        for a, b in zip(found, right, strict=True):
            assert_close(a, b, DTYPE, "forward")


SAVE = """
    import json, numpy as np, tensorflow.compat.v1 as tf
    import anycell.tf1 as rnn, anycell.keras
    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.placeholder(tf.float32, [None, None, 3], name="x")
        run = lambda: rnn.dynamic_rnn(rnn.BasicRNNCell(5, activation="relu"), x)[0]
        fused = tf.identity(run(), "fused")
        with anycell.keras.step_by_step(), tf.variable_scope("", reuse=True):
            stepped = tf.identity(run(), "stepped")
        session.run(tf.global_variables_initializer())
        tf.saved_model.simple_save(session, {path!r}, {{"x": x}}, {{"y": fused}})
        tf.train.Saver().save(session, {path!r} + "/meta")
        print(json.dumps(session.run(fused, {{x: np.ones((2, 6, 3))}}).tolist()))
"""


def test_a_saved_graph_calls_no_kernels_of_another_process(tmp_path: Path) -> None:
    """It refuses to run, and what was traced step by step runs."""
    path, given = str(tmp_path / "model"), {"x:0": np.ones((2, 6, 3))}
    right = np.float32(json.loads(python(SAVE.format(path=path)).splitlines()[-1]))
    remedy = r"trace it within anycell\.keras\.step_by_step\(\)"
    for load in (
        lambda session: v1.saved_model.load(session, ["serve"], path),
        lambda session: v1.train.import_meta_graph(f"{path}/meta.meta").restore(
            session, f"{path}/meta"
        ),
    ):
        with tf.Graph().as_default() as graph, v1.Session() as session:
            # Cells of this process, whose kernels the graph must not take for its own.
            cell, x = t1.BasicRNNCell(5), tf.ones((2, 6, 3))
            own = [t1.dynamic_rnn(cell, x, scope="own") for _ in range(3)]
            session.run(v1.global_variables_initializer())
            session.run(own)
            load(session)
            assert_close(session.run("stepped:0", given), right, "float32", "forward")
            with pytest.raises(tf.errors.InvalidArgumentError, match=remedy):
                session.run("fused:0", given)
            with pytest.raises(RuntimeError, match=remedy):
                tf.gradients(graph.get_tensor_by_name("fused:0"), graph.get_tensor_by_name("x:0"))


def test_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    """Its first program runs, and prints what it says."""
    text = (Path(__file__).parents[2] / "docs" / "tf1.md").read_text(encoding="utf-8")
    program, printed = (
        text.split(f"```{kind}\n")[1].split("```")[0] for kind in ("python", "text")
    )
    exec(compile(program, "docs/tf1.md", "exec"), {"__name__": "document"})
    assert capsys.readouterr().out == printed
