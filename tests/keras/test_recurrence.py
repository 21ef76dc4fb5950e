"""``anycell.keras.recurrence``: what is special to it; the conformance tests have all else."""

import sys
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")

from keras_layers import BACKEND, number  # noqa: E402
from tolerances import assert_close  # noqa: E402

import anycell  # noqa: E402
import anycell.keras as ak  # noqa: E402
from anycell import cells  # noqa: E402

T, B, I, H = 5, 3, 4, 6
tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="about tensors of TensorFlow")
ops = keras.ops


def arrays(cell: Any = cells.LSTM) -> dict[str, np.ndarray]:
    rng, gates = np.random.default_rng(0), len(cell.gates) * H
    shapes = {"weight_ih": (gates, I), "weight_hh": (gates, H), "bias_ih": (gates,)}
    return {n: (rng.normal(size=s) / 3).astype("float32") for n, s in shapes.items()}


def inputs() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(T, B, I)).astype("float32")


def right(cell: Any = cells.LSTM, **given: Any) -> Any:
    weights = arrays(cell)
    gates = inputs() @ weights.pop("weight_ih").T + weights.pop("bias_ih")
    return anycell.recurrence(cell, gates, weights, **given)


def variables(cell: Any = cells.LSTM) -> dict[str, Any]:
    return {name: keras.Variable(value, name=name) for name, value in arrays(cell).items()}


def test_on_every_backend() -> None:
    """On variables of Keras; with lengths and states."""
    output, (h, c), states = ak.recurrence(
        cells.LSTM, ops.convert_to_tensor(inputs()), variables(), lengths=np.array([5, 2, 0]),
        return_states="c",
    )  # fmt: skip
    expected, (last, _) = right(lengths=np.array([5, 2, 0]))
    assert_close(number(output), expected, "float32", "forward")
    assert_close(number(h), last, "float32", "forward")
    assert tuple(states["c"].shape) == (T, B, H) and tuple(c.shape) == (B, H)


@tensorflow
@pytest.mark.parametrize("known", [True, False], ids=["known sizes", "unknown sizes"])
def test_in_a_graph(known: bool) -> None:
    """With lengths that only the running graph knows, and gradients of the user's variables."""
    import tensorflow as tf

    weights = {name: tf.Variable(value) for name, value in arrays().items()}
    sizes = (T, B) if known else (None, None)

    def derived(x: Any, lengths: Any) -> Any:
        with tf.GradientTape() as tape:
            output, _ = ak.recurrence(cells.LSTM, x, weights, lengths=lengths)
            total = tf.reduce_sum(tf.sin(output))
        return output, tape.gradient(total, weights)

    lengths = np.array([5, 2, 0])
    signature = [tf.TensorSpec((*sizes, I)), tf.TensorSpec(sizes[1:], tf.int64)]
    output, grads = tf.function(derived, input_signature=signature, autograph=False)(
        inputs(), lengths
    )
    assert_close(output, right(lengths=lengths)[0], "float32", "forward")
    _, eager = derived(tf.constant(inputs()), lengths)
    for name, grad in eager.items():
        assert_close(grads[name], grad, "float32", "gradient", name)


@tensorflow
def test_autograph_leaves_it_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewriting our Python would take seconds, and add nothing to the graph."""
    import tensorflow as tf

    from anycell.keras import primitive
    from anycell.keras.tensorflow import primitive as on_tensors

    callers, run = [], on_tensors.recurrence

    def spy(*args: Any, **kwargs: Any) -> Any:
        callers.append(sys._getframe(1).f_code.co_filename)
        return run(*args, **kwargs)

    monkeypatch.setattr(on_tensors, "recurrence", spy)
    x, weights = tf.constant(inputs()), arrays()
    graph = tf.function(lambda: ak.recurrence(cells.LSTM, x, weights)[0])
    assert_close(number(graph()), right()[0], "float32", "forward")
    assert callers == [primitive.__file__]


@tensorflow
def test_seeds() -> None:
    """A number seeds the masks of every frontend; without one, each run draws others."""
    import tensorflow as tf

    cell = cells.ZoneoutGRU
    x, weights = tf.constant(inputs()), {**arrays(cell), "bias_hh": None}
    seeded = ak.recurrence(cell, x, weights, training=True, seed=(1 << 63) + 5)[0]
    expected = right(cell, training=True, seed=(1 << 63) + 5)[0]
    assert_close(seeded, expected, "float32", "forward")
    run = tf.function(lambda: ak.recurrence(cell, x, weights, training=True)[0], autograph=False)
    assert float(tf.norm(run() - run())) > 1e-3


@tensorflow
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_checkpoints_change_no_gradient(graph: bool) -> None:
    import tensorflow as tf

    weights = {name: tf.Variable(value) for name, value in arrays().items()}

    def derived(checkpoint: Any) -> Any:
        with tf.GradientTape() as tape:
            output, (_, c) = ak.recurrence(
                cells.LSTM, tf.constant(inputs()), weights, checkpoint=checkpoint
            )
            total = tf.reduce_sum(output * output) + tf.reduce_sum(c)
        return [output, *tape.gradient(total, list(weights.values()))]

    run = tf.function(derived, autograph=False) if graph else derived
    for a, b in zip(run(None), run(2), strict=True):
        assert_close(b, a, "float32", "gradient")


@tensorflow
def test_engines() -> None:
    import tensorflow as tf

    x, weights = tf.constant(inputs()), arrays()
    kernel = ak.recurrence(cells.LSTM, x, weights, engine="cpu")[0]
    steps = ak.recurrence(cells.LSTM, x, weights, engine="reference")[0]
    assert_close(kernel, steps, "float32", "forward")
    with (
        ak.step_by_step(),
        pytest.raises(ValueError, match=r"engine: given 'cpu', but .*asks for it"),
    ):
        ak.recurrence(cells.LSTM, x, weights, engine="cpu")
    xla = tf.function(
        lambda x: ak.recurrence(cells.LSTM, x, weights)[0], jit_compile=True, autograph=False
    )
    assert_close(xla(x), steps, "float32", "forward")


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"cell": "LSTM"}, TypeError, "cell: given str 'LSTM'; expected a cell"),
    ({"x": None}, TypeError, "x, gates: given neither"),
    ({"x": [1.0]}, TypeError, "x: given list [1.0]; expected [time, batch, input size], a Tensor"),
    ({"x": np.zeros((T, B, I))}, ValueError, "x: given float64 [5, 3, 4]; expected float32 [5, 3"),
    ({"x": np.zeros((T, B), "f4")}, ValueError, "x: given float32 [5, 3]; expected [time, batch"),
    ({"weights": {}}, ValueError, "weight_hh: given nothing; expected [out, in]"),
    ({"weights": {"kernel": np.zeros(3)}}, ValueError, "weights: given 'kernel', unknown"),
    ({"state": (np.zeros((B, 5), "f4"), None)}, ValueError,
     "state: given float32 [3, 5]; expected float32 [3, 6], the state 'h'"),
    ({"state": (np.zeros((2, H), "f4"), None)}, ValueError,
     "state: given float32 [2, 6]; expected float32 [3, 6], the state 'h'"),
    ({"mask": np.ones((B, T), bool)}, ValueError,
     "mask: given bool [3, 5]; expected bool [5, 3], (time, batch). Transpose it"),
    ({"resets": np.full((T, B), 0.5)}, ValueError, "resets: given a value of 0.5; expected bool"),
    ({"lengths": [5, 6, 1]}, ValueError, "lengths: given a length of 6; expected 0 to 5"),
    ({"lengths": [5.0, 1.0, 1.0]}, TypeError, "lengths: given ndarray float64 [3]; expected int"),
    ({"lengths": [5, 1]}, ValueError, "lengths: given ndarray int64 [2]; expected integers [3]"),
    ({"engine": "gpu"}, ValueError, "engine: given 'gpu'; expected None, 'cpu' or 'reference'"),
    ({"initial_state": 1}, TypeError, "Did you mean state?"),
]  # fmt: skip


@tensorflow
@pytest.mark.parametrize(("changed", "error", "message"), WRONG, ids=[m for _, _, m in WRONG])
def test_refusals(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"cell": cells.LSTM, "x": inputs(), "weights": arrays(), **changed}
    with pytest.raises(error) as raised:
        ak.recurrence(**given)
    assert message in str(raised.value)


@tensorflow
def test_a_graph_must_know_the_features() -> None:
    import tensorflow as tf

    unknown = tf.function(
        lambda x: ak.recurrence(cells.LSTM, x, arrays()),
        input_signature=[tf.TensorSpec((None, None, None))],
        autograph=False,
    )
    with pytest.raises(ValueError, match=r"x: given shape \(None, None, None\); expected \[time"):
        unknown.get_concrete_function()
