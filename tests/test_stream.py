"""One step at a time on packed weights: what a call on the whole sequence gives."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import numpy as np
import pytest
from tolerances import assert_close, close

import anycell.numpy as an
from anycell import cells
from anycell.engines.cpu import pool
from anycell.lang.declare import INPUT, PROJECTION
from anycell.lang.transform import with_projection
from anycell.layer import stream

EVERY = [getattr(cells, name) for name in cells.__all__]
every_cell = pytest.mark.parametrize("case", EVERY, ids=lambda c: c.name)


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the rows of each step that the packed weights took."""
    found, step = [], stream.Stream.step

    def watched(self: Any, rows: int, *arguments: Any) -> Any:
        found.append(rows)
        return step(self, rows, *arguments)

    monkeypatch.setattr(stream.Stream, "step", watched)
    return found


@every_cell
def test_the_projection_inside_the_step(case: Any) -> None:
    inside = with_projection(case)
    assert [l.name for l in inside.linears if l.name != PROJECTION] == [
        l.name for l in case.linears
    ]
    assert inside.linears[-1].name == PROJECTION and inside.linears[-1].in_size == INPUT
    assert inside.key != case.key and inside.hyper == case.hyper


# ---- NumPy ---------------------------------------------------------------------------------------


def test_numpy_weights_that_change(rng: np.random.Generator, taken: list[int]) -> None:
    layer = an.LSTM(3, 5, dtype="float64", seed=1).prepare()
    x = rng.standard_normal((2, 3))

    def right() -> bool:
        return close(layer.step(x)[0], layer.forward(x[None])[0][0], "float64", "forward")

    layer.forward(x[None], training=True)
    layer.backward(np.ones((1, 2, 5)))
    an.Adam(layer, lr=0.1).step()
    assert right()
    layer.set_parameters({name: p * 0.5 for name, p in layer.parameters.items()})
    assert right()
    layer.parameters["weight_hh_l0"][:] = 0.3
    layer.parameters["bias_ih_l0"][:] = 0.3
    assert not right()
    layer.prepare()
    assert right()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_close(other.step(x)[0], layer.step(x)[0], "float64", "forward")


def test_numpy_threads_step_one_layer(rng: np.random.Generator) -> None:
    layer = an.GRU(16, 64, 2, dtype="float64", seed=1).prepare()
    x = rng.standard_normal((40, 4, 1, 16))
    right = [run(layer, x[:, n]) for n in range(4)]
    found: dict[int, Any] = {}

    def work(n: int) -> None:
        found[n] = run(layer, x[:, n])

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(np.array_equal(found[n], right[n]) for n in range(4))


def run(layer: Any, x: Any) -> Any:
    state = None
    for step in x:
        output, state = layer.step(step, state)
    return output


def test_bits_do_not_depend_on_threads(rng: np.random.Generator) -> None:
    layer, x = an.LSTM(256, 256, 2, seed=1).prepare(), rng.standard_normal((4, 1, 256))
    found = []
    for threads in (1, 2, 3):
        pool.set_threads(threads)
        try:
            found.append(run(layer, x))
        finally:
            pool.set_threads(None)
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


def test_numpy_errors(rng: np.random.Generator) -> None:
    layer = an.LSTM(3, 5, seed=0).prepare()
    with pytest.raises(ValueError, match=r"x: given shape \(2, 4\), expected \(B, 3\)"):
        layer.step(np.zeros((2, 4)))
    with pytest.raises(ValueError, match=r"state h: given shape \(1, 3, 5\)"):
        layer.step(np.zeros((2, 3)), (np.zeros((1, 3, 5)),) * 2)
    with pytest.raises(ValueError, match="static: given an array"):
        layer.step(np.zeros((2, 3)), static=np.zeros((2, 5)))
    both = an.LSTM(3, 5, bidirectional=True)
    for method in (both.prepare, lambda: both.step(np.zeros((2, 3)))):
        with pytest.raises(ValueError, match="given bidirectional=True"):
            method()


# ---- PyTorch -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize("kind, options", [("LSTM", {}), ("GRU", {}), ("LSTM", {"proj_size": 4})])
def test_drop_ins_step(kind: str, options: dict[str, int], taken: list[int]) -> None:
    """With every way that a call may come; where the packed weights are not for it, as a call."""
    torch = pytest.importorskip("torch")
    import anycell.torch as at

    layer = getattr(at, kind)(3, 6, 2, dropout=0.5, dtype=torch.float64, **options).eval()
    layer.prepare()
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    with torch.no_grad():
        _, state = layer(x)
        rows = tuple(s[:, 0] for s in as_tuple(state))
        calls = [
            ((x[0], state), 1),
            ((x[0],), 1),
            ((torch.stack([x[0], x[1]], -1)[..., 0], state), 0),
            ((x[0, 0], rows if len(rows) > 1 else rows[0]), 0),
        ]
        for arguments, fast in calls:
            taken.clear()
            output, new = layer.step(*arguments)
            ref, final = layer(arguments[0].unsqueeze(0), *arguments[1:])
            assert len(taken) == fast
            assert_close(output.numpy(), ref[0].numpy(), "float64", "forward")
            for a, b in zip(as_tuple(new), as_tuple(final), strict=True):
                assert_close(a.numpy(), b.numpy(), "float64", "forward")
    taken.clear()
    given = x[0].requires_grad_()
    (gradient,) = torch.autograd.grad(layer.step(given, state)[0].sum(), given)
    (ref,) = torch.autograd.grad(layer(given.unsqueeze(0), state)[0].sum(), given)
    assert torch.equal(gradient, ref) and not taken
    with torch.no_grad():
        layer.train().step(x[0], state)  # draws dropout
    assert not taken


def test_torch_weights_that_change(taken: list[int]) -> None:
    torch = pytest.importorskip("torch")
    import anycell.torch as at

    layer, x = at.RNN(cells.LSTM, 3, 5, dtype=torch.float64), torch.randn(2, 3).double()

    def right() -> bool:
        taken.clear()
        with torch.no_grad():
            output, ref = layer.step(x)[0], layer(x[None])[0][0]
        return close(output, ref, "float64", "forward") and taken == [2]

    layer.prepare()
    layer(x[None])[0].sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.5).step()
    assert right()
    layer.load_state_dict({name: p * 0.5 for name, p in layer.state_dict().items()})
    assert right()
    layer.weight_hh_l0 = torch.nn.Parameter(layer.weight_hh_l0.detach() * 2)
    assert right()
    layer.weight_ih_l0.data = layer.weight_ih_l0.detach() * 3
    assert right()
    for change in (layer.float, layer.double):
        change()
        x = x.to(layer.weight_ih_l0.dtype)
        taken.clear()
        with torch.no_grad():
            dtype = str(x.dtype).removeprefix("torch.")
            assert_close(layer.step(x)[0], layer(x[None])[0][0], dtype, "forward")
        assert taken == [2]
    torch.nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0")
    layer.prepare()
    assert right()
    with torch.no_grad():
        layer.parametrizations.weight_hh_l0.original0.mul_(2)
    assert right()
    torch.nn.utils.parametrize.register_parametrization(layer, "weight_ih_l0", _halved())
    layer.prepare()
    assert right()
    layer.train(not layer.training)
    assert right()
    layer.bias_ih_l0.data.add_(1)  # goes unnoticed, as documented
    assert not right()
    layer.prepare()
    assert right()


def _halved() -> Any:
    torch = pytest.importorskip("torch")

    class Halved(torch.nn.Module):
        """In training another, as weight dropout is."""

        def forward(self, weight: Any) -> Any:
            return weight * 0.5 if self.training else weight

    return Halved()


def test_other_than_parameters(taken: list[int]) -> None:
    """A cell with other hyperparameters, weights that are buffers or attributes, and hooks."""
    torch = pytest.importorskip("torch")
    import anycell.torch as at

    layer = at.RNN(cells.LSTM(cell_clip=0.5), 3, 5, dtype=torch.float64).prepare()
    x = torch.randn(2, 3).double()

    def right(steps: int = 1) -> bool:
        taken.clear()
        with torch.no_grad():
            output, ref = layer.step(x)[0], layer(x[None])[0][0]
        return close(output, ref, "float64", "forward") and len(taken) == steps

    assert right()
    layer.cell = layer.cell(cell_clip=0.01)
    assert right()
    for name, hold in (("bias_ih_l0", layer.register_buffer), ("bias_hh_l0", layer.__setattr__)):
        value = getattr(layer, name).detach().clone()
        delattr(layer, name)
        hold(name, value)
        assert right()
        value.mul_(3)
        assert right()
    seen: list[int] = []
    layer.register_forward_hook(lambda *_: seen.append(1))
    assert right(0)
    assert len(seen) == 2
    plain = an.RNN(cells.LSTM(cell_clip=0.5), 3, 5).prepare()
    plain.cell = plain.cell(cell_clip=0.01)
    given = x.float().numpy()
    assert_close(plain.step(given)[0], plain.forward(given[None])[0][0], "float32", "forward")


def test_copies_of_a_prepared_module(taken: list[int]) -> None:
    torch = pytest.importorskip("torch")
    import anycell.torch as at

    layer, x = at.GRU(3, 5).prepare(), torch.randn(2, 3)
    assert list(layer.state_dict()) == list(at.GRU(3, 5).state_dict())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with torch.no_grad():
            other.weight_ih_l0.zero_()
            assert_close(other.step(x)[0], other(x[None])[0][0], "float32", "forward")
            assert_close(layer.step(x)[0], layer(x[None])[0][0], "float32", "forward")
    assert taken == [2] * 4


def test_inference_mode_and_other_dtypes(taken: list[int]) -> None:
    torch = pytest.importorskip("torch")
    import anycell.torch as at

    with torch.inference_mode():
        layer, x = at.LSTM(3, 5).prepare(), torch.randn(2, 3)
        assert close(layer.step(x)[0], layer(x[None])[0][0], "float32", "forward") and taken == [2]
        half = at.RNN(cells.LSTM, 3, 5, dtype=torch.bfloat16).prepare()
        assert torch.equal(half.step(x.bfloat16())[0], half(x.bfloat16()[None])[0][0])
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer.step(x)[0], layer(x[None])[0][0])
    assert taken == [2]


def test_torch_errors() -> None:
    torch = pytest.importorskip("torch")
    import anycell.torch as at

    x = torch.zeros(2, 3)
    for layer in (at.RNN(cells.LSTM, 3, 5).prepare(), at.LSTM(3, 5).prepare()):
        with torch.no_grad():
            for given in (x[:, :2], x.double(), x[None], [1.0]):
                with pytest.raises(
                    (TypeError, ValueError), match=r"x: given .*expected torch\.float32"
                ):
                    layer.step(given)
            with pytest.raises((RuntimeError, ValueError)):
                layer.step(x, (torch.zeros(1, 3, 5),) * 2)
    with torch.no_grad(), pytest.raises(TypeError, match="static: given"):
        at.RNN(cells.LSTM, 3, 5).prepare().step(x, static=torch.zeros(2, 5))
    both = at.GRU(3, 5, bidirectional=True)
    for call in (both.prepare, lambda: both.step(x)):
        with pytest.raises(ValueError, match="given bidirectional=True"):
            call()
