"""Layouts: equal outputs, by each framework's own equations, out of converted weights."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tolerances import assert_close

from anycell.layouts import LAYOUTS, convert

WIDTH, UNITS, STEPS, ROWS = 3, 4, 5, 2
Arrays = dict[str, np.ndarray]


def sigmoid(a: Any) -> Any:
    return 1 / (1 + np.exp(-a))


def lstm(x: Any, project: Callable[[Any, Any], dict[str, Any]], p: dict[str, Any]) -> Any:
    """Outputs, where ``project(x, h)`` is what arrives at each gate."""
    h = c = np.zeros((ROWS, UNITS))
    outputs = []
    for step in x:
        a = project(step, h)
        i, f = a["i"] + p.get("i", 0) * c, a["f"] + p.get("f", 0) * c
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(a["g"])
        h = sigmoid(a["o"] + p.get("o", 0) * c) * np.tanh(c)
        outputs.append(h)
    return np.stack(outputs)


Projection = Callable[[Any], dict[str, Any]]


def gru(x: Any, first: Projection, second: Projection, after: bool) -> Any:
    """Outputs, from the two projections of each gate."""
    h = np.zeros((ROWS, UNITS))
    outputs = []
    for step in x:
        a, b = first(step), second(h)
        r, z = sigmoid(a["r"] + b["r"]), sigmoid(a["z"] + b["z"])
        n = np.tanh(a["n"] + (r * b["n"] if after else second(r * h)["n"]))
        h = z * h + (1 - z) * n
        outputs.append(h)
    return np.stack(outputs)


def split(a: Any, gates: str) -> dict[str, Any]:
    return dict(zip(gates.split(), np.split(a, len(gates.split()), axis=-1), strict=True))


def outputs(layout: str, kind: str, w: Arrays, x: np.ndarray) -> Any:
    """By the equations in the framework's own words: names, orders, axes."""
    if kind == "LSTM":
        if layout == "torch":
            both = lambda x, h: split(  # noqa: E731
                x @ w["weight_ih_l0"].T + w["bias_ih_l0"] + h @ w["weight_hh_l0"].T
                + w["bias_hh_l0"], "i f g o",
            )  # fmt: skip
            return lstm(x, both, {g: w[f"p_{g}_l0"] for g in "ifo" if f"p_{g}_l0" in w})
        if layout == "keras":
            both = lambda x, h: split(  # noqa: E731
                x @ w["kernel"] + h @ w["recurrent_kernel"] + w["bias"], "i f g o"
            )
            return lstm(x, both, {g: w[f"p_{g}"] for g in "ifo" if f"p_{g}" in w})
        if layout == "onnx":
            wb, rb = np.split(w["B"][0], 2)
            both = lambda x, h: split(  # noqa: E731
                x @ w["W"][0].T + wb + h @ w["R"][0].T + rb, "i o f g"
            )
            return lstm(x, both, split(w["P"][0], "i o f") if "P" in w else {})
        if layout in ("tf1", "block_v2"):
            v1 = layout == "tf1"
            kernel, bias = (w["kernel"], w["bias"]) if v1 else (w["w"], w["b"])

            def joint(x: Any, h: Any) -> Any:
                a = split(
                    np.concatenate([x, h], -1) @ kernel + bias, "i g f o" if v1 else "i f g o"
                )
                return {**a, "f": a["f"] + (1.0 if v1 else 0.0)}

            name = "w_{}_diag" if v1 else "wc{}"
            return lstm(x, joint, {g: w[name.format(g)] for g in "ifo" if name.format(g) in w})
        if layout == "flax_lstm":
            return lstm(x, lambda x, h: {
                g: x @ w[f"i{g}{'_' * (g == 'f')}/kernel"] + h @ w[f"h{g}/kernel"] + w[f"h{g}/bias"]
                for g in "ifgo"
            }, {})  # fmt: skip
        if layout == "equinox":
            both = lambda x, h: split(  # noqa: E731
                x @ w["weight_ih"].T + h @ w["weight_hh"].T + w["bias"], "i f g o"
            )
            return lstm(x, both, {})
        both = lambda x, h: split(  # noqa: E731
            x @ w["dense_i/kernel"] + h @ w["dense_h/kernel"] + w["dense_h/bias"], "i f g o"
        )
        return lstm(x, both, {})
    if layout == "torch":
        return gru(
            x,
            lambda x: split(x @ w["weight_ih_l0"].T + w["bias_ih_l0"], "r z n"),
            lambda h: split(h @ w["weight_hh_l0"].T + w["bias_hh_l0"], "r z n"), True,
        )  # fmt: skip
    if layout == "keras":
        bias = w["bias"] if w["bias"].ndim == 2 else np.stack([w["bias"], 0 * w["bias"]])
        return gru(
            x,
            lambda x: split(x @ w["kernel"] + bias[0], "z r n"),
            lambda h: split(h @ w["recurrent_kernel"] + bias[1], "z r n"), w["bias"].ndim == 2,
        )  # fmt: skip
    if layout == "flax":
        return gru(
            x,
            lambda x: split(x @ w["dense_i/kernel"] + w["dense_i/bias"], "r z n"),
            lambda h: split(h @ w["dense_h/kernel"], "r z n"), True,
        )  # fmt: skip
    if layout == "equinox":
        none = np.zeros(2 * UNITS)
        return gru(
            x,
            lambda x: split(x @ w["weight_ih"].T + w["bias"], "r z n"),
            lambda h: split(h @ w["weight_hh"].T + np.append(none, w["bias_n"]), "r z n"), True,
        )  # fmt: skip
    if layout == "onnx":
        wb, rb = np.split(w["B"][0], 2)
        return gru(
            x,
            lambda x: split(x @ w["W"][0].T + wb, "z r n"),
            lambda h: split(h @ w["R"][0].T + rb, "z r n"), bool(w["linear_before_reset"]),
        )  # fmt: skip
    h, outputs = np.zeros((ROWS, UNITS)), []
    for step in x:
        ru = sigmoid(np.concatenate([step, h], -1) @ w["gates/kernel"] + w["gates/bias"])
        r, u = np.split(ru, 2, -1)
        c = np.concatenate([step, r * h], -1) @ w["candidate/kernel"] + w["candidate/bias"]
        h = u * h + (1 - u) * np.tanh(c)
        outputs.append(h)
    return np.stack(outputs)


def made(kind: str, after: bool, peepholes: bool, rng: np.random.Generator) -> Arrays:
    """Random weights, in Keras's layout."""
    gates = 4 if kind == "LSTM" else 3
    shapes: dict[str, tuple[int, ...]] = {
        "kernel": (WIDTH, gates * UNITS), "recurrent_kernel": (UNITS, gates * UNITS),
        "bias": (2, gates * UNITS) if after else (gates * UNITS,),
    }  # fmt: skip
    if peepholes:
        shapes |= dict.fromkeys(["p_i", "p_f", "p_o"], (UNITS,))
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def one_bias(kind: str, after: bool, peepholes: bool, rng: np.random.Generator) -> Arrays:
    """The same without a bias of the recurrent projection, which Flax's GRU lacks."""
    weights = made(kind, after, peepholes, rng)
    if after:
        weights["bias"][1] = 0
    return weights


CASES = {
    "LSTM": ("LSTM", False, False, list(LAYOUTS)),
    "peephole LSTM": ("LSTM", False, True, ["torch", "keras", "onnx", "tf1", "block_v2"]),
    "GRU, reset after": ("GRU", True, False, ["torch", "keras", "onnx", "equinox"]),
    "GRU, one bias": ("GRU", True, False, ["torch", "keras", "flax", "equinox"]),
    "GRU, reset before": ("GRU", False, False, ["keras", "onnx", "tf1"]),
}


@pytest.mark.parametrize("case", CASES)
def test_equal_outputs(case: str, rng: np.random.Generator) -> None:
    kind, after, peepholes, layouts = CASES[case]
    make = one_bias if case == "GRU, one bias" else made
    weights = make(kind, after, peepholes, rng)
    x = rng.normal(size=(STEPS, ROWS, WIDTH))
    right = outputs("keras", kind, weights, x)
    for source, target in itertools.product(layouts, repeat=2):
        first = convert(weights, kind, "keras", source)
        second = convert(first, kind, source, target)
        for layout, arrays in ((source, first), (target, second)):
            found = outputs(layout, kind, arrays, x)
            assert_close(found, right, "float64", "forward", f"{source} to {target}")


@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case: str, rng: np.random.Generator) -> None:
    kind, after, peepholes, layouts = CASES[case]
    make = one_bias if case == "GRU, one bias" else made
    weights = {k: v.astype("float32") for k, v in make(kind, after, peepholes, rng).items()}
    for layout in layouts:
        if (case, layout) == ("GRU, reset after", "equinox"):
            continue  # which holds the sums of two biases
        there = convert(weights, kind, "keras", layout)
        back = convert(there, kind, layout, "keras")
        assert {a.dtype for n, a in there.items() if a.ndim} == {np.dtype("float32")}
        for name, value in weights.items():
            assert_close(back[name], value, "float32", "forward", name)
            assert not np.shares_memory(back[name], value)


def test_torch_and_keras_run_them(rng: np.random.Generator) -> None:
    """The equations above are those of the frameworks."""
    torch = pytest.importorskip("torch")
    import anycell.numpy as an

    for kind in ("LSTM", "GRU"):
        weights = made(kind, kind == "GRU", False, rng)
        x = rng.normal(size=(STEPS, ROWS, WIDTH))
        layer = getattr(torch.nn, kind)(WIDTH, UNITS, dtype=torch.float64)
        arrays = convert(weights, kind, "keras", "torch")
        layer.load_state_dict({name: torch.from_numpy(a) for name, a in arrays.items()})
        with torch.no_grad():
            found = layer(torch.from_numpy(x))[0].numpy()
        assert_close(found, outputs("keras", kind, weights, x), "float64", "forward")
        ours = getattr(an, kind)(WIDTH, UNITS, dtype="float64")
        ours.set_parameters(arrays)
        assert_close(ours.forward(x)[0], found, "float64", "forward")


@pytest.mark.parametrize("name", ["LSTMCell", "OptimizedLSTMCell", "GRUCell"])
def test_flax_runs_them(rng: np.random.Generator, name: str) -> None:
    nnx, jax = pytest.importorskip("flax.nnx"), pytest.importorskip("jax")
    kind = "GRU" if name == "GRUCell" else "LSTM"
    layout = "flax_lstm" if name == "LSTMCell" else "flax"
    weights = {n: a.astype("f") for n, a in one_bias(kind, kind == "GRU", False, rng).items()}
    cell = getattr(nnx, name)(WIDTH, UNITS, rngs=nnx.Rngs(0))
    for path, array in convert(weights, kind, "keras", layout).items():
        part, parameter = path.split("/")
        getattr(getattr(cell, part), parameter)[...] = jax.numpy.asarray(array)
    x = rng.normal(size=(STEPS, ROWS, WIDTH)).astype("f")
    carry, found = cell.initialize_carry((ROWS, WIDTH), nnx.Rngs(0)), []
    carry = jax.tree.map(lambda a: 0 * a, carry)
    for step in x:
        carry, output = cell(carry, step)
        found.append(np.asarray(output))
    assert_close(np.stack(found), outputs("keras", kind, weights, x), "float32", "forward")


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_equinox_runs_them(rng: np.random.Generator, kind: str) -> None:
    eqx, jax = pytest.importorskip("equinox"), pytest.importorskip("jax")
    weights = {n: a.astype("f") for n, a in made(kind, kind == "GRU", False, rng).items()}
    cell = getattr(eqx.nn, f"{kind}Cell")(WIDTH, UNITS, key=jax.random.key(0))
    arrays = convert(weights, kind, "keras", "equinox")
    names = list(arrays)
    cell = eqx.tree_at(lambda c: [getattr(c, n) for n in names], cell, list(arrays.values()))
    x = rng.normal(size=(STEPS, ROWS, WIDTH)).astype("f")
    found = []
    for row in range(ROWS):
        none = np.zeros(UNITS, "f")
        state, hidden = (none, none) if kind == "LSTM" else none, []
        for step in x[:, row]:
            state = cell(step, state)
            hidden.append(np.asarray(state[0] if kind == "LSTM" else state))
        found.append(hidden)
    right = outputs("keras", kind, weights, x)
    assert_close(np.stack(found, 1), right, "float32", "forward")


def test_refusals(rng: np.random.Generator) -> None:
    weights = made("LSTM", False, True, rng)
    with pytest.raises(ValueError, match=r"target: given 'caffe' of kind 'LSTM'; expected one of"):
        convert(weights, "LSTM", "keras", "caffe")
    with pytest.raises(ValueError, match=r"source: given 'keras' of kind 'RNN'; .* LSTM and GRU"):
        convert(weights, "RNN", "keras", "torch")
    with pytest.raises(ValueError, match="target: given 'flax' for weights with peepholes"):
        convert(weights, "LSTM", "keras", "flax")
    with pytest.raises(ValueError, match=r"expected weight_ih_l0 among them"):
        convert(weights, "LSTM", "torch", "keras")
    before, after = made("GRU", False, False, rng), made("GRU", True, False, rng)
    with pytest.raises(ValueError, match="reset before the matmul"):
        convert(before, "GRU", "keras", "torch")
    with pytest.raises(ValueError, match="reset after the matmul"):
        convert(after, "GRU", "keras", "tf1")
    with pytest.raises(ValueError, match="two biases: torch, keras, onnx or equinox"):
        convert(after, "GRU", "keras", "flax")


K = {"kernel": np.ones((3, 8)), "recurrent_kernel": np.ones((2, 8)), "bias": np.ones(8)}
T = {"weight_ih_l0": np.ones((8, 3)), "weight_hh_l0": np.ones((8, 2))}
O = {"W": np.ones((1, 6, 3)), "R": np.ones((1, 6, 2))}
F = {"gates/kernel": np.ones((5, 4)), "gates/bias": np.ones(4)}
REFUSED: list[tuple[Any, str, type[Exception], str]] = [
    ([1], "LSTM torch", TypeError, "given list; expected a dict"),
    (None, "LSTM torch", TypeError, "weights: given NoneType; expected a dict"),
    ({**K, "kernel": np.float64(3)}, "LSTM keras", ValueError,
     r"'kernel' of shape \(\); .*in, 4H"),
    ({**K, "bias": np.float64(3)}, "LSTM keras", ValueError, r"shape \(\); expected \(4H"),
    ({**K, "bias": "x"}, "LSTM keras", TypeError, "given 'bias' of dtype <U1; expected"),
    ({**K, "bias": None}, "LSTM keras", TypeError, "given 'bias' of dtype object; expected"),
    ({**K, "bias": [[1], [1, 2]]}, "LSTM keras", TypeError, "'bias' as list, which is no array"),
    ({**K, "bais": K["bias"]}, "LSTM keras", ValueError, "given bais; expected only kernel"),
    ({**K, "bias": np.ones((2, 8))}, "LSTM keras", ValueError, r"shape \(2, 8\); expected \(4H\)"),
    ({**K, "kernel": np.ones((3, 7))}, "LSTM keras", ValueError, r"\(3, 7\); expected \(in, 4H\)"),
    ({**K, "kernel": np.ones((0, 8))}, "LSTM keras", ValueError, r"\(0, 8\); expected \(in, 4H\)"),
    ({**T, "weight_hh_l0": np.ones((0, 2))}, "LSTM torch", ValueError,
     r"'weight_hh_l0' of shape \(0, 2\); expected \(4H, H\) with H = 2, in = 3, as in"),
    ({name: np.ones((0, 3)) for name in T}, "LSTM torch", ValueError,
     r"'weight_ih_l0' of shape \(0, 3\); expected \(4H, in\)"),
    ({**T, "weight_ih_l1": 1}, "LSTM torch", ValueError, "given weight_ih_l1; .* of one"),
    (O, "GRU onnx", ValueError, "expected linear_before_reset among them"),
    ({**O, "linear_before_reset": 2}, "GRU onnx", ValueError, "reset = 2; expected 0 or 1"),
    (F, "GRU tf1", ValueError, "expected candidate/kernel among them"),
]  # fmt: skip


@pytest.mark.parametrize("weights, source, error, message", REFUSED)
def test_refused_weights(weights: Any, source: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        convert(weights, *source.split(), "keras")


def test_refused_words() -> None:
    for word in ([], {}, None, np.zeros(2)):
        with pytest.raises(ValueError, match="source: given"):
            convert(K, "LSTM", word, "torch")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="source: given 'keras' of kind"):
            convert(K, word, "keras", "torch")  # type: ignore[arg-type]


def test_some_peepholes(rng: np.random.Generator) -> None:
    """One that is absent adds nothing."""
    weights = made("LSTM", False, True, rng)
    del weights["p_f"]
    found = convert(weights, "LSTM", "keras", "onnx")["P"]
    expected = [weights["p_i"], weights["p_o"], np.zeros(UNITS)]
    assert np.array_equal(found, np.concatenate(expected)[None])
