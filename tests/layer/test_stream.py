"""Single steps on packed weights equal a call on the whole sequence."""

import copy
import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
from processes import HAS_TORCH, at_once, needs_torch
from tolerances import assert_close, close

import anycell.numpy as an
from anycell import cells
from anycell.engines import cpu
from anycell.engines.cpu import isa
from anycell.lang.declare import INPUT, PROJECTION
from anycell.lang.transform import with_projection
from anycell.layer import stream

if HAS_TORCH:
    import torch

    import anycell.torch as at

EVERY = [getattr(cells, name) for name in cells.__all__]
every_cell = pytest.mark.parametrize("case", EVERY, ids=lambda c: c.name)


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list of the number of rows of each step that ran on packed weights."""
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
    found = at_once(*[partial(run, layer, x[:, n]) for n in range(4)])
    assert all(map(np.array_equal, found, right))


def run(layer: Any, x: Any) -> Any:
    state = None
    for step in x:
        output, state = layer.step(step, state)
    return output


@pytest.mark.parametrize("units", [16, 256])
def test_bits_do_not_depend_on_threads(rng: np.random.Generator, units: int) -> None:
    """Bits are equal for any number of threads; steps of few units use a single thread."""
    layer, x = an.LSTM(units, units, 2, seed=1).prepare(), rng.standard_normal((4, 1, units))
    found = []
    for threads in (1, 2, 3):
        cpu.threads.set_threads(threads)
        try:
            found.append(run(layer, x))
        finally:
            cpu.threads.set_threads(None)
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])
    asked = {step.recipe.options.threads for step in layer._prepared.stream._steps.values()}
    assert asked == ({1} if units == 16 else {1, 2, 3})


def test_another_instruction_set(rng: np.random.Generator) -> None:
    """A step under another instruction set is refused until the weights are packed again."""
    if isa.current().name == "generic":
        pytest.skip("there is no narrower one")
    layer, x = an.LSTM(3, 5, dtype="float64", seed=0).prepare(), rng.standard_normal((2, 3))
    with isa.force("generic"):
        with pytest.raises(RuntimeError, match=r"given 'generic' .* Call prepare\(\) again"):
            layer.step(x)
        layer.prepare()
        assert_close(layer.step(x)[0], layer.forward(x[None])[0][0], "float64", "forward")


def test_numpy_from_any_address(rng: np.random.Generator, taken: list[int]) -> None:
    """Each array of a step in turn has an odd address, as in a packed record."""
    layer = an.RNN(cells.EALSTM, 3, 5, 2, dtype="float64", seed=1).prepare()
    shapes = [(4, 3), (4, 5), *[(2, 4, 5)] * 4]
    arrays, resets = [rng.standard_normal(shape) for shape in shapes], np.array([1, 0, 1, 0])

    def step(x: Any, static: Any, h: Any, c: Any, *start: Any) -> Any:
        output, new = layer.step(x, (h, c), static=static, resets=resets, reset_state=start)
        return output, *new

    right = step(*arrays)
    for i, array in enumerate(arrays):
        odd = np.zeros(array.nbytes + 1, np.uint8)[1:].view(np.float64).reshape(array.shape)
        odd[:] = array
        assert all(map(np.array_equal, step(*arrays[:i], odd, *arrays[i + 1 :]), right))
    assert taken == [4] * (1 + len(arrays))


def test_many_forms(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more numbers of rows than recipes that are kept."""
    monkeypatch.setattr(stream, "FORMS", 3)
    layer = an.GRU(3, 5, 2, dtype="float64", seed=0).prepare()
    for rows in (*range(9), 0, 3):
        x = rng.standard_normal((rows, 3))
        assert_close(layer.step(x)[0], layer.forward(x[None])[0][0], "float64", "forward")
        assert len(layer._prepared.stream._steps) <= 3


def test_numpy_errors(rng: np.random.Generator) -> None:
    layer = an.LSTM(3, 5, seed=0).prepare()
    with pytest.raises(ValueError, match=r"x: given shape \[2, 4\]; expected shape \[B, 3\]"):
        layer.step(np.zeros((2, 4)))
    with pytest.raises(ValueError, match=r"state: given shape \[1, 3, 5\].*state 'h'"):
        layer.step(np.zeros((2, 3)), (np.zeros((1, 3, 5)),) * 2)
    with pytest.raises(TypeError, match="static: given ndarray"):
        layer.step(np.zeros((2, 3)), static=np.zeros((2, 5)))
    both = an.LSTM(3, 5, bidirectional=True)
    for method in (both.prepare, lambda: both.step(np.zeros((2, 3)))):
        with pytest.raises(ValueError, match="given bidirectional=True"):
            method()


def test_numpy_resets(rng: np.random.Generator, taken: list[int]) -> None:
    """Resets may have any dtype, prepared or not; they do not affect the next step."""
    x, flags = rng.standard_normal((2, 3)), np.array([True, False])
    for batch_first in (False, True):
        layer = an.RNN(cells.LSTM, 3, 5, 2, dtype="float64", seed=1, batch_first=batch_first)
        state = tuple(rng.standard_normal((2, 2, 5)) for _ in range(2))
        once = x[:, None] if batch_first else x[None]
        column = flags[:, None] if batch_first else flags[None]
        wanted, final = layer.forward(once, state, resets=column)
        without, _ = layer.forward(once, state)
        for prepared in (False, True):
            taken.clear()
            for given in (flags, flags.astype(float), flags.astype(int), flags.tolist()):
                output, new = layer.step(x, state, resets=given)
                assert_close(output, wanted.reshape(2, 5), "float64", "forward")
                for a, b in zip(new, final, strict=True):
                    assert_close(a, b, "float64", "forward")
                output, _ = layer.step(x, state)
                assert_close(output, without.reshape(2, 5), "float64", "forward")
            assert len(taken) == 8 * prepared
            for bad, kind in (([0, 0.5], ValueError), ([[1, 0]], ValueError), ("ab", TypeError)):
                with pytest.raises(kind, match="resets: given"):
                    layer.step(x, state, resets=bad)
            layer.prepare()


# ---- PyTorch -------------------------------------------------------------------------------------
@needs_torch
@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize("kind, options", [("LSTM", {}), ("GRU", {}), ("LSTM", {"proj_size": 4})])
def test_drop_ins_step(kind: str, options: dict[str, int], taken: list[int]) -> None:
    """Steps equal calls for all kinds of arguments; some kinds do not use the packed weights."""
    layer = getattr(at, kind)(3, 5, 2, dropout=0.5, dtype=torch.float64, **options).eval()
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


def resets_of() -> dict[str, Any]:
    """Returns the same flags in all accepted dtypes and layouts."""
    flags = torch.tensor([True, False, True])
    kinds = ("float32", "float64", "bfloat16", "float16", "uint8", "int64", "bool")
    rows = torch.stack([flags, ~flags], 1)
    return {kind: flags.to(getattr(torch, kind)) for kind in kinds} | {
        "strided": rows[:, 0],
        "strided floats": rows.float()[:, 0],
    }


@needs_torch
@pytest.mark.parametrize("layout", ["", "batch_first", "unbatched"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN of PeepholeLSTM", "RNN of EALSTM"])
@pytest.mark.sample(every=5)  # each layout
def test_torch_resets(kind: str, layout: str, taken: list[int]) -> None:
    """A step equals a call of one step with the same resets, on all its paths."""
    options = {"num_layers": 2, "batch_first": layout == "batch_first", "dtype": torch.float64}
    cell = getattr(cells, kind.rpartition(" ")[2])
    make = getattr(at, kind) if kind in ("LSTM", "GRU") else lambda *a, **o: at.RNN(cell, *a, **o)
    layer, rows = make(3, 5, **options), () if layout == "unbatched" else (3,)
    time = 1 if layout == "batch_first" else 0
    x = torch.randn(*rows, 3, dtype=torch.float64)
    state, restored = (
        tuple(torch.randn(2, *rows, 5, dtype=torch.float64) for _ in cell.states) for _ in range(2)
    )
    state, restored = (s if len(s) > 1 else s[0] for s in (state, restored))
    static = {"static": torch.randn(*rows, 5).double()} if cell.static else {}
    for prepared, gradients in ((False, False), (True, False), (True, True)):
        if prepared:
            layer.prepare()
        for resets in resets_of().values():
            resets = resets if rows else resets[0]
            for given in ({}, {"reset_state": restored}):
                taken.clear()
                with torch.set_grad_enabled(gradients):
                    output, new = layer.step(x, state, resets=resets, **given, **static)
                assert len(taken) == (prepared and not gradients and bool(rows))
                ref, final = layer(
                    x.unsqueeze(time), state, resets=resets.unsqueeze(time), **given, **static
                )
                if gradients:
                    learned = list(layer.parameters())
                    slopes = (
                        torch.autograd.grad(each.sum(), learned, materialize_grads=True)
                        for each in (output, ref)
                    )
                    assert all(map(torch.equal, *slopes))
                found, right = (output, *as_tuple(new)), (ref.squeeze(time), *as_tuple(final))
                for a, b in zip(found, right, strict=True):
                    assert_close(a.detach(), b.detach(), "float64", "forward")
                with torch.no_grad():  # resets leave nothing behind
                    a, b = layer.step(x, state, **static), layer(x.unsqueeze(time), state, **static)
                assert_close(a[0], b[0].squeeze(time), "float64", "forward")
                a, b = ref.squeeze(time).detach(), b[0].squeeze(time)
                assert not close(a, b, "float64", "forward")


@needs_torch
def test_a_step_from_any_address(taken: list[int]) -> None:
    """Arrays at odd addresses, as in a packed record, still step on packed weights."""

    def odd(*shape: int) -> Any:
        values = torch.randn(shape, dtype=torch.float64)
        place = np.zeros(8 * values.numel() + 1, np.uint8)[1:].view(np.float64).reshape(shape)
        return values, torch.from_numpy(place).copy_(values)

    layer = at.RNN(cells.EALSTM, 3, 5, dtype=torch.float64).prepare()
    arrays = [odd(4, 3), odd(1, 4, 5), odd(1, 4, 5), odd(4, 5)]
    with torch.no_grad():
        (at_lines, _), (anywhere, _) = (
            layer.step(x, (h, c), static=static) for x, h, c, static in zip(*arrays, strict=True)
        )
        assert torch.equal(at_lines, anywhere) and taken == [4, 4]
        # The same holds if resets restore such an array.
        (x, _), hs, (c, _), (static, _) = arrays
        resets = torch.tensor([True, False, True, False])
        outputs = [
            layer.step(x, resets=resets, reset_state=(h, c), static=static)[0] for h in (*hs, hs[0])
        ]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    assert taken == [4] * 5


@needs_torch
def test_threads_step_with_resets() -> None:
    layer, x = at.LSTM(16, 64, 2).prepare(), torch.randn(40, 4, 3, 16)
    resets = torch.rand(40, 4, 3) < 0.3
    resets[:, ::2] = False  # two of the threads have none

    def steps(n: int) -> Any:
        state = None
        with torch.no_grad():
            for step, flags in zip(x[:, n], resets[:, n], strict=True):
                given = {"resets": flags} if n % 2 else {}
                output, state = layer.step(step, state, **given)
        return output

    right = [steps(n) for n in range(4)]
    assert all(map(torch.equal, at_once(*[partial(steps, n) for n in range(4)]), right))


@needs_torch
def test_torch_weights_that_change(taken: list[int]) -> None:
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
    torch.nn.utils.parametrizations.weight_norm(layer.eval(), "weight_hh_l0")
    layer.prepare()
    assert right()
    with torch.no_grad():
        layer.parametrizations.weight_hh_l0.original0.mul_(2)
    assert right()
    torch.nn.utils.parametrize.register_parametrization(layer.train(), "weight_ih_l0", _dropped())
    layer.prepare()
    assert not right() and not taken  # an ordinary call, which may drop weights
    layer.eval()
    assert right()
    layer.bias_ih_l0.data.add_(1)  # goes unnoticed, as documented
    assert not right()
    layer.prepare()
    assert right()


@needs_torch
def test_parametrisations_come_and_go(taken: list[int]) -> None:
    """Steps notice parametrisations that come and go, with the same original tensors."""
    layer, x = at.GRU(3, 5, dtype=torch.float64).eval(), torch.randn(2, 3).double()
    parametrize, given = torch.nn.utils.parametrize, ("weight_ih_l0", torch.nn.Softplus())
    layer.prepare()
    for change in (
        lambda: parametrize.register_parametrization(layer, *given),
        lambda: parametrize.register_parametrization(layer, *given),
        lambda: layer.parametrizations.weight_ih_l0.__setitem__(0, torch.nn.Tanh()),
        lambda: parametrize.remove_parametrizations(layer, "weight_ih_l0", False),
    ):
        change()
        with torch.no_grad():
            assert_close(layer.step(x)[0], layer(x[None])[0][0], "float64", "forward")
        assert taken.pop() == 2


def _dropped() -> Any:
    class Dropped(torch.nn.Module):
        """DropConnect: in training, each call drops other weights."""

        def forward(self, weight: Any) -> Any:
            return torch.nn.functional.dropout(weight, 0.5, self.training)

    return Dropped()


@needs_torch
@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
def test_steps_of_fused_optimizers(kind: str, taken: list[int]) -> None:
    """Their kernels write in place, which autograd does not count."""
    layer, x = at.LSTM(3, 5, dtype=torch.float64).prepare(), torch.randn(2, 3).double()
    optimizer = getattr(torch.optim, kind)(layer.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        layer(x[None])[0].sum().backward()
        optimizer.step()
        with torch.no_grad():
            assert_close(layer.step(x)[0], layer(x[None])[0][0], "float64", "forward")
    assert taken == [2, 2]


@needs_torch
def test_torch_weights_dropped_anew_in_each_step_of_training() -> None:
    layer, x = at.LSTM(3, 5), torch.randn(2, 3)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight_ih_l0", _dropped())
    layer.prepare()
    with torch.no_grad():
        first, second = layer.step(x)[0], layer.step(x)[0]
    assert not torch.equal(first, second)


@needs_torch
def test_other_than_parameters(taken: list[int]) -> None:
    """Steps notice new hyperparameters, weights that are buffers or attributes, and hooks."""
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


@needs_torch
def test_hooks_of_all_modules_see_each_step(taken: list[int]) -> None:
    layer, x, seen = at.GRU(3, 5).prepare(), torch.randn(2, 3), []
    modules = torch.nn.modules.module
    with torch.no_grad():
        for register in (
            modules.register_module_forward_pre_hook,
            modules.register_module_forward_hook,
        ):
            handle = register(lambda module, *_: seen.append(module))
            try:
                layer.step(x)
            finally:
                handle.remove()
        assert seen == [layer, layer] and not taken
        layer.step(x)
    assert len(taken) == 1


@needs_torch
def test_copies_of_a_prepared_module(taken: list[int]) -> None:
    layer, x = at.GRU(3, 5).prepare(), torch.randn(2, 3)
    assert list(layer.state_dict()) == list(at.GRU(3, 5).state_dict())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with torch.no_grad():
            other.weight_ih_l0.zero_()
            assert_close(other.step(x)[0], other(x[None])[0][0], "float32", "forward")
            assert_close(layer.step(x)[0], layer(x[None])[0][0], "float32", "forward")
    assert taken == [2] * 4


@needs_torch
def test_inference_mode_and_other_dtypes(taken: list[int]) -> None:
    with torch.inference_mode():
        layer, x = at.LSTM(3, 5).prepare(), torch.randn(2, 3)
        assert close(layer.step(x)[0], layer(x[None])[0][0], "float32", "forward") and taken == [2]
        half = at.RNN(cells.LSTM, 3, 5, dtype=torch.bfloat16).prepare()
        assert torch.equal(half.step(x.bfloat16())[0], half(x.bfloat16()[None])[0][0])
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer.step(x)[0], layer(x[None])[0][0])
    assert taken == [2]


@needs_torch
def test_torch_errors() -> None:
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
            state = tuple(torch.zeros(1, 2, 5) for _ in range(2))
            for resets, kind, message in (
                (torch.tensor([0.0, 0.5]), ValueError, "with a value of 0.5"),
                (torch.tensor([0.0, torch.inf]), ValueError, "with a value of inf"),
                (torch.tensor([1.0, torch.nan]), ValueError, "with a value of nan"),
                (torch.ones(2) + 0j, TypeError, "complex64"),
                (
                    torch.ones(3),
                    ValueError,
                    r"float32 \[3\]; expected torch.bool \[2\], a flag per row",
                ),
                ([True, False], TypeError, "Pass torch.as_tensor"),
            ):
                with pytest.raises(kind, match=f"resets: given .*{message}"):
                    layer.step(x, state, resets=resets)
            with pytest.raises(ValueError, match=r"reset_state: given .*\[1, 3, 5\]"):
                layer.step(x, state, reset_state=(torch.zeros(1, 3, 5),) * 2)
            with pytest.raises(TypeError, match=r"reset_state: given .*tuple \(h, c\)"):
                layer.step(x, state, resets=torch.ones(2), reset_state=state[0])
            with pytest.raises((RuntimeError, TypeError, ValueError)):  # as many as both need
                layer.step(x, (*state, state[0]), reset_state=state[:1])
    with torch.no_grad(), pytest.raises(TypeError, match="static: given"):
        at.RNN(cells.LSTM, 3, 5).prepare().step(x, static=torch.zeros(2, 5))
    both = at.GRU(3, 5, bidirectional=True)
    for call in (both.prepare, lambda: both.step(x)):
        with pytest.raises(ValueError, match="given bidirectional=True"):
            call()
