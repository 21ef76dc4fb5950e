"""A call computes with the weights as they are, whoever has written to them since the last call."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import anycell
import anycell.numpy as an
from anycell import cells, compress

Array = np.ndarray[Any, Any]
STEPS, ROWS, INPUTS, UNITS = 4, 3, 5, 18


def draw(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, np.float32) * 0.4


def recurrence(*args: Any, **kwargs: Any) -> Array:
    return anycell.recurrence(*args, **kwargs)[0].copy()


# ---- NumPy ---------------------------------------------------------------------------------------
def layer_of(cell: Any, dtype: str = "float32", hidden: int = UNITS, **sizes: int) -> Any:
    return an.RNN(cell, INPUTS, hidden, bidirectional=True, dtype=dtype, seed=0, **sizes)


LAYERS: dict[str, Callable[[], Any]] = {
    **{f"LSTM {dtype}": lambda dtype=dtype: layer_of(cells.LSTM, dtype)  # type: ignore[misc]
       for dtype in ("float32", "float64", "float16", "bfloat16")},
    "8 bits": lambda: compress.quantize(layer_of(cells.LSTM)),
    "wide": lambda: layer_of(cells.LSTM, hidden=128),
    "GRU": lambda: layer_of(cells.GRU),
    "several matmuls": lambda: layer_of(cells.LSTMP, P=12),
    "heads": lambda: layer_of(cells.sLSTM(heads=2)),
    "parameters": lambda: layer_of(cells.PeepholeLSTM),
    "no matmul": lambda: layer_of(cells.IndRNN),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.sample(every=4)
def test_arrays_of_numpy_layers(name: str, rng: np.random.Generator) -> None:
    """Written in place, a layer has the bits of one that was made with these weights."""
    layer, fresh = LAYERS[name](), LAYERS[name]()
    x = draw(rng, STEPS, ROWS, INPUTS).astype(fresh.forward(np.zeros((1, 1, INPUTS)))[0].dtype)
    before = layer.forward(x)[0].copy()
    for label, array in layer.arrays.items():
        array[...] = rng.permutation(array.reshape(-1)).reshape(array.shape) / 2 + 0.1
        after = layer.forward(x)[0].copy()
        fresh.set_parameters(layer.state_dict())
        assert np.array_equal(after, fresh.forward(x)[0]), label
        assert not np.array_equal(after, before), label
        before = after


def test_a_weight_and_its_transpose() -> None:
    """They lie at one address; of as many units as a vector has, even in the same rows."""
    for units in (1, 4, 8, 16, 32):
        rng = np.random.default_rng(0)
        w, x = draw(rng, units, units), draw(rng, 4, 2, units)
        for weight in (w, w, w.T, w.T, w, w.T):
            result = recurrence(cells.RNN, x, {"weight_hh": weight})
            right = recurrence(cells.RNN, x, {"weight_hh": weight.copy()})
            assert np.array_equal(result, right), units


def test_a_weight_of_the_primitive(rng: np.random.Generator) -> None:
    w, x = draw(rng, UNITS, UNITS), draw(rng, STEPS, ROWS, UNITS)
    for order in "CF":
        weight = np.array(w, order=order)  # type: ignore[call-overload]
        recurrence(cells.RNN, x, {"weight_hh": weight})
        weight *= -1
        result = recurrence(cells.RNN, x, {"weight_hh": weight})
        assert np.array_equal(result, recurrence(cells.RNN, x, {"weight_hh": -w}))


# ---- PyTorch and Keras ---------------------------------------------------------------------------
MODULES: dict[str, tuple[Callable[[Any], Any], int]] = {  # and how many steps; none of a cell
    "LSTM": (lambda at: at.LSTM(INPUTS, UNITS), STEPS),
    "RNN": (lambda at: at.RNN(cells.LSTM, INPUTS, UNITS), STEPS),
    "bfloat16": (lambda at: at.LSTM(INPUTS, UNITS).bfloat16(), STEPS),
    "one step": (lambda at: at.LSTM(INPUTS, UNITS), 1),
    "one step of RNN": (lambda at: at.RNN(cells.LSTM, INPUTS, UNITS), 1),
    "cell": (lambda at: at.RNNCell(cells.LSTM, INPUTS, UNITS), 0),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.sample(every=5)
def test_weights_of_torch(name: str) -> None:
    """By every means that torch has, autograd's notice or not."""
    torch = pytest.importorskip("torch")
    import anycell.torch as at

    make, steps = MODULES[name]
    module, end = make(at), "_l0" if steps else ""
    weight = f"weight_hh{end}"
    shape = (steps, ROWS, INPUTS) if steps else (ROWS, INPUTS)
    x = torch.randn(shape).to(getattr(module, weight).dtype)

    def assert_fresh(context: Any = torch.no_grad) -> None:
        fresh = make(at)
        fresh.load_state_dict(module.state_dict())
        with context():
            for mine, right in zip(module(x), fresh(x), strict=True):
                assert all(map(torch.equal, mine, right))

    def sgd() -> None:
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        module(x)[0].sum().backward()
        optimizer.step()

    def shared() -> None:
        module.share_memory()
        getattr(module, weight).data.view(-1)[::3] *= -1

    def replaced() -> None:
        getattr(module, weight).data = torch.randn_like(getattr(module, weight))

    def turned() -> None:
        data = getattr(module, weight).data.T
        data.copy_(data.flip(0))

    edits: list[Callable[[], Any]] = [
        lambda: getattr(module, weight).data.neg_(),
        lambda: getattr(module, weight).data.mul_(0.5),
        turned,
        replaced,
        lambda: getattr(module, f"weight_ih{end}").detach().view(-1)[3:5].zero_(),
        lambda: module.load_state_dict(make(at).state_dict()),
        sgd,
        shared,
        lambda: torch.nn.utils.vector_to_parameters(
            torch.ones(sum(p.numel() for p in module.parameters()), dtype=x.dtype),
            module.parameters(),
        ),
    ]
    assert_fresh()
    for edit in edits:
        edit()
        assert_fresh()
        assert_fresh(torch.inference_mode)


def test_weights_of_torch_in_8_bits() -> None:
    torch = pytest.importorskip("torch")
    import anycell.torch as at

    module, x = compress.quantize(at.LSTM(INPUTS, UNITS)), torch.randn(STEPS, ROWS, INPUTS)
    fresh = compress.quantize(at.LSTM(INPUTS, UNITS))
    before = module(x)[0]
    for name, tensor in module.state_dict(keep_vars=True).items():
        tensor.detach().copy_(tensor.detach().flip(0).clone())
        fresh.load_state_dict(module.state_dict())
        after = module(x)[0]
        assert torch.equal(after, fresh(x)[0]) and not torch.equal(after, before), name
        before = after


def test_weights_of_keras(rng: np.random.Generator) -> None:
    keras = pytest.importorskip("keras")
    import anycell.keras as ak

    to_numpy = keras.ops.convert_to_numpy
    layer, fresh, x = ak.LSTM(UNITS), ak.LSTM(UNITS), draw(rng, ROWS, STEPS, INPUTS)
    fresh(x)
    before = to_numpy(layer(x))
    for variable in layer.trainable_variables:
        variable.assign(draw(rng, *variable.shape))
        fresh.set_weights(layer.get_weights())
        after = to_numpy(layer(x))
        assert np.array_equal(after, to_numpy(fresh(x))) and not np.array_equal(after, before)
        before = after
