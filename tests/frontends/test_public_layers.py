"""One face on every frontend: a layer for each cell, ``explain``, NumPy's layers as torch's."""

import copy
import importlib
import inspect
import pickle
from typing import Any

import numpy as np
import pytest
from tolerances import assert_close

import anycell
import anycell.numpy as an
from anycell import cells, compress

rng = np.random.default_rng(0)
X = rng.normal(size=(5, 2, 3))
# Arguments that make another graph or another number of each cell that has any.
HYPER = {
    **{"GRU": {"reset_after": False}, "IndRNN": {"nonlinearity": "tanh"}, "JANET": {"beta": 0.5}},
    **{"LSTMP": {"cell_clip": 0.5}, "LayerNormGRU": {"eps": 0.1}, "LayerNormLSTM": {"eps": 0.1}},
    **{"MGU": {"reset_after": True}, "MultiplicativeLSTM": {"gate_inside": True}},
    **{"PeepholeLSTM": {"cell_clip": 0.1}, "RecurrentDropoutLSTM": {"dropout": 0.5}},
    **{"VariationalLSTM": {"dropout": 0.5}, "ZoneoutGRU": {"zoneout": 0.5}, "sLSTM": {"heads": 2}},
    "ZoneoutLSTM": {"zoneout_c": 0.25},
}
NAMES = [name for name in cells.__all__ if name not in ("LSTM", "GRU", "RNN")]


def sizes(name: str) -> dict[str, int]:
    return {"P": 4} if name == "LSTMP" else {}


def number(array: Any) -> np.ndarray:
    return array.detach().numpy() if hasattr(array, "detach") else np.asarray(array)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("frontend", ["torch", "numpy"])
def test_a_layer_for_each_cell(frontend: str, name: str) -> None:
    """It is ``RNN`` of the cell, with its hyperparameters; a pickle and a copy are the same."""
    pytest.importorskip(frontend)
    module, cell, hyper = getattr(anycell, frontend), getattr(cells, name), HYPER.get(name, {})
    kind = getattr(module, name)
    x, static, double = X, np.ones((2, 6)), "float64"  # of size 6, as the kernels of other tests
    if frontend == "torch":
        torch = importlib.import_module("torch")
        x, static, double = torch.from_numpy(x), torch.from_numpy(static), torch.float64
    layer = kind(3, 6, num_layers=2, dtype=double, **sizes(name), **hyper)
    same = module.RNN(cell(**hyper), 3, 6, 2, dtype=double, **sizes(name))
    if frontend == "torch":
        layer.eval(), same.eval()
    same.load_state_dict(layer.state_dict())
    further = {} if cell.static is None else {"static": static}
    for other in (same, pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert np.array_equal(number(other(x, **further)[0]), number(layer(x, **further)[0]))
        assert type(other) is kind or other is same
    text = repr(layer)
    assert text.startswith(f"{name}(3, 6, num_layers=2") and f"{name}(" not in text[1:]
    assert all(f"{key}={value!r}" in text for key, value in hyper.items())
    assert layer.cell == cell(**hyper) and isinstance(layer, module.RNN)
    with pytest.raises(TypeError, match="num_layer: given 2; expected no such argument"):
        kind(3, 6, num_layer=2, **sizes(name))
    shown = inspect.signature(kind).parameters
    assert [*shown][:3] == ["input_size", "hidden_size", "num_layers"] and "sizes" not in shown
    for argument in inspect.signature(cell.function).parameters.values():
        if argument.kind is argument.KEYWORD_ONLY:
            assert shown[argument.name].default == argument.default


def test_an_argument_of_both_is_the_cells() -> None:
    layer = an.VariationalLSTM(3, 8, dropout=0.5)
    assert layer.cell.hyper == {"dropout": 0.5} and layer.dropout == 0.0
    assert inspect.signature(an.VariationalLSTM).parameters["dropout"].default == 0.25


def test_another_cell_is_shown() -> None:
    layer = an.PeepholeLSTM(3, 8)
    assert (
        repr(layer) == "PeepholeLSTM(3, 8, dtype='float32')"
        and repr(an.LSTM(3, 8))[:9] == "LSTM(3, 8"
    )
    layer.cell = cells.JANET
    assert repr(layer).startswith("PeepholeLSTM(JANET(), 3, 8")


# -- explain ---------------------------------------------------------------------------------------
def explained() -> dict[str, Any]:
    layers = {
        "numpy": an.LSTM(3, 8),
        "numpy in 8 bits": compress.quantize(an.GRU(3, 8)),
        "numpy fed back": an.Feedback(an.GRU(3, 8), an.Dense(8, 1)),
    }
    try:
        import torch
    except ImportError:
        return layers
    at = anycell.torch
    return {
        **layers,
        "torch": at.LSTM(3, 8),
        "projected": at.LSTM(3, 8, proj_size=4),
        "float64": at.RNN(cells.sLSTM, 3, 8).double(),
        "16 bits": at.PeepholeLSTM(3, 8, dtype=torch.bfloat16),
        "8 bits": compress.quantize(at.GRU(3, 8)),
        "no kernel": at.GRU(3, 8, device="meta"),
        "one step": at.RNNCell(cells.MGU, 3, 8),
        "one step of torch": at.LSTMCell(3, 8),
        "fed back": at.Feedback(at.LSTM(3, 8), torch.nn.Linear(8, 1)),
    }


@pytest.mark.parametrize("which", explained())
def test_a_layer_is_explained(which: str) -> None:
    """By what runs it, and why; then by the page of its cell, in its sizes and dtype."""
    layer = explained()[which]
    page = anycell.explain(layer, batch=4)
    engine = layer.engine
    first, _, heading, *_ = str(page).splitlines()
    assert first.endswith(f" runs on {engine.name} ({engine.reason})")
    assert type(layer).__name__ in first and f": hidden size 8, {page.plan.dtype}" in heading
    assert f"\nengine: {engine.name}\n" in page and ("forward kernel" in page) is (
        engine.name == "cpu"
    )
    assert "of 4 rows" in page and str(page) == str(layer.explain(batch=4))
    kind = {
        "float64": "float64",
        "16 bits": "bfloat16",
        "8 bits": "int8",
        "numpy in 8 bits": "int8",
    }
    assert page.plan.dtype == kind.get(which, "float32")
    assert "backward" not in str(layer.explain(backward=False)).replace("backward pass", "")
    assert (layer.explain(llvm=True).llvm is None) is (engine.name != "cpu")


def test_what_a_layer_has_is_not_asked_for() -> None:
    layer = an.LSTM(3, 8)
    for given in ({"hidden_size": 8}, {"dtype": "float32"}, {"engine": "cpu"}, {"P": 3}):
        with pytest.raises(ValueError, match="expected none with a layer, which has its own"):
            anycell.explain(layer, **given)
    with pytest.raises(TypeError, match=r"cell: given .*; expected a cell.*Or pass a layer"):
        anycell.explain(an.Dense(3, 1))


def test_a_page_is_read_like_a_text() -> None:
    page = anycell.explain(cells.LSTM, 8)
    assert "engine: cpu" in page and "engine: gpu" not in page
    assert page[:6] == "LSTM()" and page[0] == "L"


def test_what_numpys_things_show() -> None:
    layer = an.LSTM(3, 8)
    assert str(layer.plan) == "Plan(LSTM(), H=8, float32: cpu, fused kernel, 1 matmul a step)"
    assert repr(an.Adam(layer, lr=0.5)) == f"Adam([{layer!r}], lr=0.5, steps=0)"


# -- NumPy's layers --------------------------------------------------------------------------------
def test_numpy_layers_are_called() -> None:
    for layer, given in (
        (an.LSTM(3, 8), {"lengths": [5, 3]}),
        (an.Feedback(an.GRU(3, 8), an.Dense(8, 1)), {"forced": [True] * 3 + [False] * 2}),
        (compress.quantize(an.GRU(3, 8)), {}),
    ):
        output, state = layer(X, **given)
        right = layer.forward(X, **given)
        assert np.array_equal(output, right[0]) and np.array_equal(state[0], right[1][0])
    assert np.array_equal(an.Dense(3, 2, seed=0)(X), an.Dense(3, 2, seed=0).forward(X))
    assert an.BatchNorm(3)(X, training=True).shape == X.shape


def test_states_move_between_numpy_and_torch() -> None:
    torch = pytest.importorskip("torch")
    shape, options = (3, 8, 2), {"bidirectional": True}
    ours, theirs = an.LSTM(*shape, seed=0, **options), torch.nn.LSTM(*shape, **options)
    assert list(ours.parameters) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    right = theirs(torch.from_numpy(X.astype("float32")))[0].detach().numpy()
    assert_close(ours(X)[0], right, "float32", "forward")
    kept = an.LSTM(*shape, seed=1, **options).state_dict()
    theirs.load_state_dict({name: torch.from_numpy(a) for name, a in kept.items()})
    assert np.array_equal(theirs.weight_hh_l1.detach().numpy(), kept["weight_hh_l1"])


def test_a_state_is_a_copy() -> None:
    layer = an.BatchNorm(3)
    before = layer.state_dict()
    layer(X, training=True)
    layer.parameters["bias"][:] = 1.0
    assert not before["bias"].any() and not before["running_mean"].any()
    assert layer.arrays["running_mean"].any()
    layer.load_state_dict(before)
    assert not layer.parameters["bias"].any() and not layer.arrays["running_mean"].any()
    with pytest.raises(KeyError, match="missing running_var"):
        layer.load_state_dict({k: v for k, v in before.items() if k != "running_var"})


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("masked", [False, True])
def test_cross_entropy(masked: bool, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    logits = rng.normal(size=(5, 2, 7)).astype(dtype) * 30
    target = rng.integers(0, 7, (5, 2))
    mask = rng.random((5, 2)) < 0.5 if masked else None
    if masked:
        logits[~mask], target[~mask] = np.nan, -1
    given = torch.from_numpy(logits.astype("float64")).requires_grad_()
    chosen = torch.from_numpy(np.where(target < 0, -100, target))
    right = torch.nn.functional.cross_entropy(given.reshape(-1, 7), chosen.reshape(-1))
    right.backward()
    loss, grad = an.cross_entropy(logits, target, mask)
    assert isinstance(loss, float) and grad.dtype == dtype
    assert_close(np.array(loss), right.detach(), dtype, "forward")
    assert_close(grad, np.nan_to_num(given.grad.numpy()), dtype, "gradient")


def test_cross_entropy_of_a_single_step() -> None:
    loss, grad = an.cross_entropy([0.0, 0.0, 1.0], 2)
    several, grads = an.cross_entropy([[0.0, 0.0, 1.0]], [2])
    assert loss == several and np.array_equal(grad, grads[0])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((X, np.zeros((5, 3), int)), ValueError, r"target: given shape \[5, 3\]; expected shape"),
        ((X, np.zeros((5, 2))), TypeError, r"target: given dtype float64; expected integers"),
        ((X, np.full((5, 2), 3)), ValueError, r"target: .*; expected 0 to 2\. Add outputs"),
        ((X, np.full((5, 2), -1)), ValueError, r"target: given an unknown class"),
        ((X, np.zeros((5, 2), int), np.zeros((5, 2), bool)), ValueError, "no step that counts"),
        ((X[:0], np.zeros((0, 2), int)), ValueError, "no step that counts"),
        ((1.0, 1), ValueError, r"logits: given shape \[\]; expected shape \[\.\.\., C\]"),
    ],
)
def test_cross_entropy_refuses(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        an.cross_entropy(*given)


CHECKED = {
    "LSTM": (
        an.LSTM(3, 4, num_layers=2, dropout=0.5, bidirectional=True, seed=0),
        {"lengths": [5, 3]},
    ),
    "random masks": (an.ZoneoutLSTM(3, 4, seed=0, dtype="float64"), {}),
    "one state": (an.GRU(3, 4, batch_first=True, seed=0), {}),
    "states of every step": (
        an.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True, checkpoint=2, seed=0),
        {"lengths": [5, 3], "return_states": ("c", "h")},
    ),
    "Dense": (an.Dense(3, 4, seed=0), {}),
    "BatchNorm": (an.BatchNorm(3), {"mask": np.arange(10).reshape(5, 2) > 2}),
    "Feedback": (
        an.Feedback(an.LSTM(3, 4, seed=0), an.Dense(4, 2, seed=0), seed=0),
        {"forced": 0.5},
    ),
}


@pytest.mark.parametrize("which", CHECKED)
def test_gradients_are_checked(which: str) -> None:
    layer, given = CHECKED[which]
    x = X.swapaxes(0, 1) if getattr(layer, "batch_first", False) else X
    before = layer.state_dict()
    errors = an.check_gradients(layer, x, count=8, **given)
    assert [*errors] == ["x", *layer.parameters] and max(errors.values()) < 1e-6
    # And the layer stays as it is.
    assert all(np.array_equal(array, before[name]) for name, array in layer.arrays.items())
    assert not layer.grads


@anycell.cell(gates="r c", state="h")
def Named(x: Any, r: Any, s: Any) -> Any:
    reset = anycell.sigmoid(x.r + anycell.linear(s.h, "gates"))
    return anycell.tanh(x.c + anycell.linear(reset * s.h, "d_gates"))


def test_a_matmul_may_be_named_as_arrays_of_the_engine_are() -> None:
    """The gradient of the projection's bias was once the sum of another matmul's, silently."""
    assert max(an.check_gradients(an.RNN(Named, 3, 4, seed=0), X).values()) < 1e-6


def test_a_wrong_gradient_is_found() -> None:
    class Wrong(an.Dense):
        def backward(self, grad_output: Any) -> Any:
            d = super().backward(grad_output)
            self._grads["weight"] = 1.01 * self._grads["weight"]
            return d

    errors = an.check_gradients(Wrong(3, 2), X)
    assert errors["weight"] > 5e-3 and errors["bias"] < 1e-6 and errors["x"] < 1e-6
    for layer in (an.Standardise(3), compress.quantize(an.GRU(3, 8)), X):
        with pytest.raises(TypeError, match=r"layer: given .*; expected a layer of .* that trains"):
            an.check_gradients(layer, X)


class WrongLSTM(an.sLSTM):  # type: ignore[misc, valid-type]
    def backward(self, *grads: Any) -> Any:
        results = super().backward(*grads)
        self._grads = {name: 3 * array for name, array in self._grads.items()}
        return results


def test_check_gradients_where_a_state_is_infinite() -> None:
    lengths = [5, 0]
    layer = an.sLSTM(3, 4, seed=0)
    assert not np.isfinite(layer.forward(X, lengths=lengths)[1][-1]).all()
    assert max(an.check_gradients(layer, X, lengths=lengths).values()) < 1e-6
    errors = an.check_gradients(WrongLSTM(3, 4, seed=0), X, lengths=lengths)
    assert errors.pop("x") < 1e-6 and min(errors.values()) > 0.1


def test_integers_do_not_become_the_weights_of_a_float_layer() -> None:
    small = compress.quantize(an.LSTM(3, 8, seed=0))
    with pytest.raises(KeyError, match=r"weights of 8 bits: load them into compress.quantize"):
        an.LSTM(3, 8).load_state_dict(small.state_dict())


def test_inputs_of_other_axes_are_told_what_to_do() -> None:
    """Several steps where one is expected; ids where there are numbers of each step."""
    torch = pytest.importorskip("torch")
    at = pytest.importorskip("anycell.torch")
    x, ids = np.zeros((1, 2, 3), np.float32), np.zeros((5, 2), int)
    layers = an.LSTM(3, 4), at.LSTM(3, 4), at.RNN(anycell.cells.GRU, 3, 4)
    for layer, given in zip(layers, (x, torch.from_numpy(x), torch.from_numpy(x)), strict=True):
        with pytest.raises(ValueError, match=r"x: given .* Take out one step: x\[t\], or"):
            layer.step(given)
    for layer, several in ((layers[0], ids), (layers[2], torch.from_numpy(ids))):
        with pytest.raises(ValueError, match=r"x: given .* If these are ids, embed them first"):
            layer(several)
