"""A call computes with the weights as they are, whoever has written to them since the last call.

`--edits N` tries more edits.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import anycell
import anycell.numpy as an
from anycell import cells, compress
from anycell.numpy.check import numpy_dtype

Array = np.ndarray[Any, Any]
STEPS, ROWS, INPUTS = 4, 3, 5


# ---- edits, in place -----------------------------------------------------------------------------
def _columns(array: Array) -> Array:
    return array.reshape(len(array), -1)


def _swap(array: Array, i: int, j: int) -> None:
    array[[i, j]] = array[[j, i]]


def _blocks(array: Array, rng: np.random.Generator) -> None:
    """Exchanges two halves, row by row."""
    half = len(array) // 2
    array[: 2 * half] = np.concatenate([array[half : 2 * half], array[:half]])


def _near(array: Array, rng: np.random.Generator) -> None:
    """Exchanges two numbers a few places apart."""
    flat = array.reshape(-1)
    i, step = rng.integers(flat.size), 2 ** rng.integers(5)
    _swap(flat, i, (i + step) % flat.size)


def _one(array: Array, rng: np.random.Generator) -> None:
    flat = array.reshape(-1)
    flat[rng.integers(flat.size)] += 1


Edit = Callable[[Array, np.random.Generator], Any]
EDITS: dict[str, Edit] = {
    "all signs": lambda a, rng: np.negative(a, out=a),
    "signs of a column": lambda a, rng: np.negative(_columns(a)[:, 0], out=_columns(a)[:, 0]),
    "signs of two rows": lambda a, rng: np.negative(a[:2], out=a[:2]),
    "signs of a half": lambda a, rng: np.negative(a[: len(a) // 2], out=a[: len(a) // 2]),
    "two rows": lambda a, rng: _swap(a, *rng.integers(len(a), size=2)),
    "rows 1 and 4": lambda a, rng: _swap(a, 1, min(4, len(a) - 1)),
    "two columns": lambda a, rng: _swap(_columns(a).T, 0, -1),
    "rows turned": lambda a, rng: a.__setitem__(slice(None), np.roll(a, 1, 0)),
    "columns turned": lambda a, rng: a.__setitem__(slice(None), np.roll(a, 4, -1)),
    "two halves": _blocks,
    "two numbers": _near,
    "one number": _one,
    "zeros": lambda a, rng: a.fill(0),
    "a constant": lambda a, rng: a.fill(1),
    "reversed": lambda a, rng: a.__setitem__(slice(None), a[::-1].copy()),
    **{
        f"times {factor}": lambda a, rng, factor=factor: np.multiply(
            a, np.asarray(factor, a.dtype), out=a, casting="unsafe"
        )
        for factor in (2, 3, 4, 16, -1)
    },
    "a half": lambda a, rng: np.multiply(a, np.asarray(0.5), out=a, casting="unsafe"),
}


# ---- layers of every frontend --------------------------------------------------------------------
class Layer:
    """What runs, and NumPy's views of what it learns, by name."""

    def __init__(self, run: Callable[[], Array], learned: dict[str, Array]) -> None:
        self.run, self.learned = run, learned


Make = Callable[[np.random.Generator, "dict[str, Array] | None"], Layer]


def draw(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, np.float32) * 0.4


def of_numpy(cell: Any, dtype: str, sizes: dict[str, int], hidden: int) -> Make:
    """``anycell.numpy.RNN`` in two directions, or of integers."""

    def make(rng: np.random.Generator, learned: dict[str, Array] | None) -> Layer:
        quantized = dtype == "int8"
        layer: Any = an.RNN(
            cell, INPUTS, hidden, bidirectional=True, dtype="float32" if quantized else dtype,
            seed=0, **sizes,
        )  # fmt: skip
        if quantized:
            layer = compress.quantize(layer)
        x = draw(np.random.default_rng(7), STEPS, ROWS, INPUTS)
        x = x.astype(numpy_dtype("float32" if quantized else dtype))
        arrays = layer.parameters
        for name in arrays:
            if learned is not None:
                arrays[name][...] = learned[name]
            elif arrays[name].dtype != np.int8:
                arrays[name][...] = draw(rng, *arrays[name].shape)
        return Layer(lambda: layer.forward(x)[0].copy(), dict(arrays))

    return make


def of_recurrence(cell: Any, hidden: int, order: Any = "C") -> Make:
    """The primitive."""

    def make(rng: np.random.Generator, learned: dict[str, Array] | None) -> Layer:
        wanted = dict.fromkeys(cell.param_names, (hidden,))
        wanted["weight_hh"] = len(cell.gates) * hidden, hidden
        arrays = {
            name: np.array(draw(rng, *shape) if learned is None else learned[name], order=order)
            for name, shape in wanted.items()
        }
        gates = draw(np.random.default_rng(7), STEPS, ROWS, len(cell.gates) * hidden)
        params = {name: arrays[name] for name in cell.param_names}
        weights = {"weight_hh": arrays["weight_hh"]}
        return Layer(lambda: recurrence(cell, gates, weights, params=params or None), arrays)

    return make


def recurrence(*args: Any, **kwargs: Any) -> Array:
    return anycell.recurrence(*args, **kwargs)[0].copy()


def of_torch(build: Callable[[Any], Any], dtype: str, steps: int = STEPS) -> Make:
    """A module; NumPy's views are of the tensors' own memory."""

    def make(rng: np.random.Generator, learned: dict[str, Array] | None) -> Layer:
        torch = pytest.importorskip("torch")
        import anycell.torch as at

        torch.manual_seed(0)
        built = build(at)
        module = compress.quantize(built) if dtype == "int8" else built.to(getattr(torch, dtype))
        kind = torch.float32 if dtype == "int8" else getattr(torch, dtype)
        x = torch.from_numpy(draw(np.random.default_rng(7), steps or 1, ROWS, INPUTS)).to(kind)
        tensors = {n: t.detach() for n, t in module.state_dict(keep_vars=True).items()}
        views = {
            name: (t.view(torch.int16) if t.dtype is torch.bfloat16 else t).numpy()
            for name, t in tensors.items()
        }
        bf16 = {n for n, t in tensors.items() if t.dtype is torch.bfloat16}
        arrays = {n: v.view(numpy_dtype("bfloat16")) if n in bf16 else v for n, v in views.items()}
        for name, array in arrays.items():
            if learned is not None:
                array[...] = learned[name]
            elif array.dtype != np.int8:
                array[...] = draw(rng, *array.shape)

        def run() -> Array:
            with torch.no_grad():
                result = module(x[0] if steps == 0 else x)
            first: Any = result[0] if isinstance(result, tuple) else result
            return first.float().numpy().copy()

        return Layer(run, arrays)

    return make


LAYERS: dict[str, Make] = {
    **{f"NumPy LSTM {d}": of_numpy(cells.LSTM, d, {}, 18)
       for d in ("float32", "float64", "float16", "bfloat16", "int8")},
    "NumPy LSTM, wide": of_numpy(cells.LSTM, "float32", {}, 128),
    "NumPy GRU": of_numpy(cells.GRU, "float32", {}, 18),
    "NumPy LSTMP": of_numpy(cells.LSTMP, "float32", {"P": 12}, 18),
    "NumPy MultiplicativeLSTM": of_numpy(cells.MultiplicativeLSTM, "float32", {}, 18),
    "NumPy sLSTM": of_numpy(cells.sLSTM(heads=2), "float32", {}, 18),
    "NumPy PeepholeLSTM": of_numpy(cells.PeepholeLSTM, "float32", {}, 18),
    "NumPy IndRNN": of_numpy(cells.IndRNN, "float32", {}, 18),
    "recurrence": of_recurrence(cells.LSTM, 16),
    "recurrence, transposed": of_recurrence(cells.PeepholeLSTM, 18, "F"),
    **{f"torch LSTM {d}": of_torch(lambda at: at.LSTM(INPUTS, 18, 2, bidirectional=True), d)
       for d in ("float32", "float64", "float16", "bfloat16", "int8")},
    "torch RNN": of_torch(lambda at: at.RNN(cells.LSTM, INPUTS, 18), "float32"),
    "torch GRU": of_torch(lambda at: at.GRU(INPUTS, 16), "float32"),
    "torch LSTM, one step": of_torch(lambda at: at.LSTM(INPUTS, 18), "float32", 1),
    "torch RNN, one step": of_torch(lambda at: at.RNN(cells.GRU, INPUTS, 18), "float32", 1),
    "torch RNNCell": of_torch(lambda at: at.RNNCell(cells.GRU, INPUTS, 18), "float32", 0),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.sample(every=3)
def test_every_edit_counts(name: str, request: pytest.FixtureRequest) -> None:
    """Edit after edit, a layer has the bits of one that was made with these weights."""
    rng = np.random.default_rng([request.config.getoption("--seed"), *name.encode()])
    count = request.config.getoption("--edits")
    layer = LAYERS[name](rng, None)
    start = {label: array.copy() for label, array in layer.learned.items()}
    before, effects = layer.run(), 0
    with np.errstate(all="ignore"):
        for n in range(count):
            if n % 25 == 0:  # edits add up: to zeros, or to infinity
                for label, array in layer.learned.items():
                    array[...] = start[label]
                before = layer.run()
            label, edit = rng.choice([*layer.learned]), rng.choice([*EDITS])
            EDITS[edit](layer.learned[label], rng)
            after = layer.run()
            fresh = LAYERS[name](rng, layer.learned).run()
            assert np.array_equal(after, fresh, equal_nan=True), f"{edit} of {label}, edit {n}"
            effects += not np.array_equal(after, before, equal_nan=True)
            before = after
    assert effects > count / 4, "most edits change a result"


def test_a_weight_and_its_transpose() -> None:
    """They lie at one address; of as many units as a vector has, even in the same rows."""
    for units in (1, 4, 8, 16, 32):
        rng = np.random.default_rng(0)
        w, x = draw(rng, units, units), draw(rng, 4, 2, units)
        for weight in (w, w, w.T, w.T, w, w.T):
            result = recurrence(cells.RNN, x, {"weight_hh": weight})
            right = recurrence(cells.RNN, x, {"weight_hh": weight.copy()})
            assert np.array_equal(result, right), units


def test_weights_of_torch() -> None:
    """By every means that torch has, autograd's notice or not."""
    torch = pytest.importorskip("torch")
    import anycell.torch as at

    module, x = at.LSTM(5, 18), torch.randn(7, 3, 5)

    def assert_fresh(context: Any = torch.no_grad) -> None:
        fresh = at.LSTM(5, 18)
        fresh.load_state_dict(module.state_dict())
        with context():
            assert torch.equal(module(x)[0], fresh(x)[0])

    def sgd() -> None:
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        module(x)[0].sum().backward()
        optimizer.step()

    def shared() -> None:
        module.share_memory()
        module.weight_hh_l0.data.view(-1)[::3] *= -1

    def replaced() -> None:
        module.weight_hh_l0.data = torch.randn_like(module.weight_hh_l0)

    edits: list[Callable[[], Any]] = [
        lambda: module.weight_hh_l0.data.neg_(),
        lambda: module.weight_hh_l0.data.mul_(0.5),
        lambda: module.weight_hh_l0.data.T.copy_(module.weight_hh_l0.data.T.flip(0)),
        replaced,
        lambda: module.weight_ih_l0.detach().numpy().__setitem__((3, 4), 2.0),
        lambda: module.load_state_dict(torch.nn.LSTM(5, 18).state_dict()),
        sgd,
        shared,
        lambda: torch.nn.utils.vector_to_parameters(torch.ones(1800), module.parameters()),
    ]
    assert_fresh()
    for edit in edits:
        edit()
        assert_fresh()
        assert_fresh(torch.inference_mode)


def test_weights_of_keras() -> None:
    keras = pytest.importorskip("keras")
    import anycell.keras as ak

    to_numpy = keras.ops.convert_to_numpy
    rng = np.random.default_rng(0)
    layer, x = ak.LSTM(18), draw(rng, ROWS, STEPS, INPUTS)
    layer(x)
    for name, edit in EDITS.items():
        for variable in layer.weights:
            if "seed" in variable.path:
                continue
            value = np.array(to_numpy(variable.value))
            edit(value, rng)
            variable.assign(value)
        fresh = ak.LSTM(18)
        fresh(x)
        fresh.set_weights(layer.get_weights())
        results = [to_numpy(kind(x)) for kind in (layer, fresh)]
        assert np.array_equal(*results), name
        layer.set_weights([draw(rng, *w.shape) for w in layer.get_weights()])
