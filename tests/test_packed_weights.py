"""Inference keeps packed weights from call to call: a call packs what has changed since."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from tolerances import assert_close

import anycell.numpy
from anycell import cells, layer
from anycell.engines import cpu
from anycell.lang.cell import Cell
from anycell.layer import names, shapes
from anycell.numpy.host import NumpyHost
from anycell.plan import plan

STEPS, ROWS, INPUTS = 6, 3, 5
CELLS = {
    "LSTM": (cells.LSTM, {}),
    "GRU": (cells.GRU, {}),
    "LSTMP": (cells.LSTMP, {"P": 12}),
    "MultiplicativeLSTM": (cells.MultiplicativeLSTM, {"M": 9}),
    "sLSTM": (cells.sLSTM(heads=2), {}),
    "IndRNN": (cells.IndRNN, {}),  # nothing to pack
}


@pytest.fixture
def weights_kept(monkeypatch: pytest.MonkeyPatch) -> cpu.PackedWeights:
    """What calls of this test keep."""
    kept = cpu.PackedWeights()
    monkeypatch.setattr(cpu, "packed_weights", kept)
    return kept


class Problem:
    """A layer of both directions, its weights in NumPy's or in Fortran's order."""

    def __init__(
        self, cell: Cell, sizes: dict[str, int], dtype: str, order: str, projected: bool
    ) -> None:
        self.rng, self.host = np.random.default_rng(0), NumpyHost(dtype)
        self.cell, hidden = cell, 18
        self.plan = plan(cell, hidden, dtype, sizes=sizes)
        learned = shapes(cell, dict(self.plan.sizes), INPUTS, True)
        self.arrays: dict[str, Any] = {}
        for name in names(cell, 2):
            shape = learned.get(name.removesuffix("_reverse"))
            if shape is not None:
                self.arrays[name] = np.asarray(self.draw(shape), order=order)  # type: ignore[call-overload]
        width = INPUTS if projected else len(cell.gates) * hidden
        if not projected:
            for end in ("", "_reverse"):
                del self.arrays[f"weight_ih{end}"]
        self.arrays["x"] = self.draw((STEPS, ROWS, width))

    def draw(self, shape: tuple[int, ...]) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(self.host.dtype) * 0.3

    def run(self, threads: int = 1, keep_weights: bool = True) -> list[np.ndarray]:
        options = layer.Options((False, True), threads=threads, keep_weights=keep_weights)
        output, finals, _ = layer.forward(self.host, self.plan, self.arrays, options, keep=False)
        return [output.copy(), *finals]

    def anew(self) -> list[np.ndarray]:
        """The same, with nothing kept."""
        return self.run(keep_weights=False)


def same(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("inside", [False, True], ids=["host projects", "kernel projects"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "name",
    [n if n in ("LSTM", "IndRNN") else pytest.param(n, marks=pytest.mark.more) for n in CELLS],
)
def test_every_change_is_seen(
    name: str, dtype: str, order: str, inside: bool, set_layer: Any, weights_kept: cpu.PackedWeights
) -> None:
    """Of one number of any array, whoever writes it."""
    set_layer(projects=lambda *_: inside)
    problem = Problem(*CELLS[name], dtype, order, projected=True)
    right = problem.anew()
    for _ in range(2):
        assert same(problem.run(), right)
    # Copies of weights that do not fit may lie elsewhere in every call: none is kept, or several.
    certain = order == "C" or name == "IndRNN"
    assert not certain or len(weights_kept.blocks) == (name != "IndRNN")
    seen = 0
    for label, array in problem.arrays.items():
        if label == "x":
            continue
        for place in (0, array.size // 2, array.size - 1):
            before = right
            array[np.unravel_index(place, array.shape)] += 0.5
            right = problem.anew()
            assert same(problem.run(), right), f"{label}, number {place}"
            seen += not same(right, before)
    assert seen > 2 * len(problem.arrays), "most numbers matter"
    assert not certain or len(weights_kept.blocks) == (name != "IndRNN")


def test_what_has_not_changed_is_not_packed(weights_kept: cpu.PackedWeights) -> None:
    problem = Problem(cells.LSTM, {}, "float32", "C", projected=False)
    right = problem.run()
    assert not weights_kept.blocks  # weights may lie elsewhere in every call
    assert same(problem.run(), right)
    (block,) = weights_kept.blocks.values()
    # What somebody spoils, behind the row of biases, stays spoilt.
    start = block.address - block.memory.ctypes.data
    row = 4 * cpu.isa.current().lanes("float") * 4
    block.memory[start + row : start + row + 4].view(np.float32)[0] += 1.0
    assert not same(problem.run(), right)
    # And is right again when the weight changes.
    problem.arrays["weight_hh"][0, 0] += 1.0
    assert same(problem.run(), problem.anew())


def test_a_weight_and_its_transpose(weights_kept: cpu.PackedWeights) -> None:
    """They lie at one address; of as many units as a vector has, even in the same rows."""
    for units in (1, 4, 8, 16, 32):
        host, one = NumpyHost("float32"), plan(cells.RNN, units)
        rng = np.random.default_rng(0)
        w = rng.standard_normal((units, units), np.float32)
        x = rng.standard_normal((4, 2, units), np.float32)
        for weight in (w, w, w.T, w.T, w, w.T):
            results = []
            for keep in (True, False):
                arrays, options = {"x": x, "weight_hh": weight}, layer.Options(keep_weights=keep)
                results.append(layer.forward(host, one, arrays, options, keep=False)[0])
            assert np.array_equal(*results), units


def test_threads_do_not_share_a_block(weights_kept: cpu.PackedWeights) -> None:
    problem = Problem(cells.LSTM, {}, "float32", "C", projected=False)
    right, wrong = problem.anew(), []

    def loop() -> None:
        for _ in range(50):
            if not same(problem.run(), right):
                wrong.append(1)

    threads = [threading.Thread(target=loop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    problem.run()
    assert not wrong and len(weights_kept.blocks) == 1


def test_memory_is_bounded(weights_kept: cpu.PackedWeights) -> None:
    weights_kept.limit = 100_000
    for _ in range(8):
        problem = Problem(cells.LSTM, {}, "float32", "C", projected=False)
        for _ in range(3):
            assert same(problem.run(), problem.anew())
        assert sum(block.size for block in weights_kept.blocks.values()) <= 100_000
    assert weights_kept.blocks
    weights_kept.limit = 0
    problem = Problem(cells.GRU, {}, "float32", "C", projected=False)
    for _ in range(3):
        assert same(problem.run(), problem.anew())
    assert not weights_kept.blocks


def test_numpy_keeps_none_where_it_is_told(weights_kept: cpu.PackedWeights) -> None:
    x = np.random.default_rng(0).standard_normal((STEPS, ROWS, INPUTS), np.float32)
    gates = np.concatenate([x] * 4, 2)
    weights = {"weight_hh": np.ones((4 * INPUTS, INPUTS), np.float32)}
    one = anycell.numpy.RNN(cells.LSTM, INPUTS, 18, seed=0, keep_weights=False)
    assert "keep_weights=False" in repr(one)
    for _ in range(3):
        right = one.forward(x)[0]
        anycell.recurrence(cells.LSTM, gates, weights, keep_weights=False)
    assert not weights_kept.blocks
    one.keep_weights = True
    for count in (1, 2):
        for _ in range(3):
            assert np.array_equal(one.forward(x)[0], right)
        assert len(weights_kept.blocks) == count
        for _ in range(3):
            anycell.recurrence(cells.LSTM, gates, weights)
        assert len(weights_kept.blocks) == 2
    with pytest.raises(ValueError, match=r"keep_weights: given 'no', expected"):
        anycell.recurrence(cells.LSTM, gates, weights, keep_weights="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("road", ["RNN", "LSTM", "swapped", "recurrence", "operator"])
def test_torch_keeps_none_where_it_is_told(road: str, weights_kept: cpu.PackedWeights) -> None:
    torch = pytest.importorskip("torch")
    import anycell.torch as at

    x = torch.randn(STEPS, ROWS, INPUTS)
    module: Any
    if road == "LSTM":
        module = at.LSTM(INPUTS, 18, keep_weights=False)
    elif road == "swapped":
        module = at.accelerate(torch.nn.LSTM(INPUTS, 18))
        module.keep_weights = False
    else:
        module = at.RNN(cells.LSTM, INPUTS, 18, keep_weights=False)
    assert "keep_weights=False" in repr(module)
    weights = {n.removesuffix("_l0"): p for n, p in module.named_parameters()}
    run: Any = module
    if road == "operator":
        torch._dynamo.reset()
        run = torch.compile(module, backend="aot_eager")
    elif road == "recurrence":

        def run(x: Any) -> Any:
            return at.recurrence(cells.LSTM, x, weights, keep_weights=module.keep_weights)

    with torch.no_grad():
        for _ in range(3):
            right = run(x)[0]
        assert not weights_kept.blocks
        module.keep_weights = True
        for _ in range(3):
            assert torch.equal(run(x)[0], right)
        assert len(weights_kept.blocks) == 1


def test_weights_of_torch() -> None:
    """By every means that torch has, autograd's notice or not."""
    torch = pytest.importorskip("torch")
    import anycell.torch as at

    module, twin = at.LSTM(5, 18), torch.nn.LSTM(5, 18)
    x = torch.randn(7, 3, 5)

    def assert_same() -> None:
        twin.load_state_dict(module.state_dict())
        with torch.no_grad():
            assert_close(module(x)[0], twin(x)[0], "float32", "forward")

    assert_same()
    with torch.no_grad():
        module.weight_hh_l0.mul_(1.5)
    assert_same()
    module.weight_hh_l0.data.mul_(0.5)
    assert_same()
    module.weight_hh_l0.data = torch.randn_like(module.weight_hh_l0)
    assert_same()
    module.weight_hh_l0.detach().numpy()[3, 4] = 2.0
    assert_same()
    module.load_state_dict(torch.nn.LSTM(5, 18).state_dict())
    assert_same()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    module(x)[0].sum().backward()
    optimizer.step()
    assert_same()
    with torch.inference_mode():
        first = module(x)[0]
        module.bias_hh_l0.add_(1.0)
        assert not torch.equal(first, module(x)[0])
    assert_same()
