"""Calls that run as earlier ones did: ``anycell/torch/operators/warm.py``, and its operator.

One file, because all tests share how they count the calls that the operator has run.
"""

import copy
import gc
import os
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems import forget_passes
from processes import at_once
from tolerances import assert_close, close
from torch_layers import forget_forms

import anycell
import anycell.torch as at
from anycell import cells, compress
from anycell.engines import cpu
from anycell.engines.cpu import aten
from anycell.torch.operators import native, passes, warm
from anycell.torch.operators.functional import run_layer

pytestmark = pytest.mark.sample(every=3)

Module = Any
MODULES: dict[str, Callable[[], Module]] = {
    "LSTM": lambda: at.LSTM(5, 8),
    "LSTM of three layers, both directions": lambda: at.LSTM(
        5, 8, 3, bidirectional=True, batch_first=True
    ),
    "LSTM with a projection": lambda: at.LSTM(5, 8, 2, proj_size=3),
    "LSTM without biases": lambda: at.LSTM(5, 8, bias=False),
    "LSTM in float64": lambda: at.LSTM(5, 8, dtype=torch.float64),
    "LSTM with dropout": lambda: at.LSTM(5, 8, 2, dropout=0.5).eval(),
    "GRU": lambda: at.GRU(5, 8, 2, batch_first=True),
    "peepholes": lambda: at.RNN(cells.PeepholeLSTM, 5, 8, bidirectional=True),
    "layer norm": lambda: at.RNN(cells.LayerNormLSTM, 5, 8, 2),
    "zoneout in evaluation": lambda: at.RNN(cells.ZoneoutLSTM, 5, 8).eval(),
    "heads": lambda: at.RNN(cells.sLSTM, 5, 8),
    "8 bits": lambda: compress.quantize(at.LSTM(5, 8, 2)),
}


def count(patch: pytest.MonkeyPatch, *modules: Any) -> list[bool]:
    """Whether each call of the operator by these modules found a record."""
    calls: list[bool] = []
    play = warm.play

    def counted(*arguments: Any) -> Any:
        results = play(*arguments)
        calls.append(bool(results))
        return results

    for module in modules:
        patch.setattr(module, "play", counted)
    return calls


@pytest.fixture
def hits(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of calls of modules."""
    return count(monkeypatch, warm)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of calls of modules, and of single passes."""
    return count(monkeypatch, warm, passes)


def flat(results: Any) -> list[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        return [results]
    return [tensor for part in results for tensor in flat(part)]


def same(one: Any, other: Any) -> None:
    """Both have the same structure, layouts and bits."""
    assert type(one) is type(other)
    for a, b in zip(flat(one), flat(other), strict=True):
        assert a.stride() == b.stride() and torch.equal(a, b)


def problem(module: Module, batched: bool = True) -> tuple[torch.Tensor, Any]:
    """x and a state of a module."""
    dtype = module._like.dtype
    rows = (3,) if batched else ()
    x = torch.randn((3, 4, 5) if batched else (4, 5), dtype=dtype)
    x = x if not batched or module.batch_first else x.swapaxes(0, 1).contiguous()
    count = module.num_layers * (1 + module.bidirectional)
    sizes = dict(module._sizes)
    states = tuple(torch.rand(count, *rows, sizes[s.size], dtype=dtype) for s in module.cell.states)
    return x, states if len(states) > 1 else states[0]


def test_a_layer_and_its_quantized_copy_learn_calls_of_their_own(hits: list[bool]) -> None:
    torch.manual_seed(0)
    whole = at.LSTM(5, 8)
    modules, x = [whole, compress.quantize(whole), whole], torch.randn(4, 3, 5)
    with torch.no_grad():
        for module in modules:
            results = [module(x) for _ in range(3)]
            assert hits[-1]
            same(results[0], results[2])


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_a_second_call_has_the_bits_of_the_first(
    name: str, batched: bool, given: bool, hits: list[bool]
) -> None:
    torch.manual_seed(0)
    module = MODULES[name]()
    x, state = problem(module, batched)
    arguments = (x, state) if given else (x,)
    with torch.no_grad():
        results = [module(*arguments) for _ in range(3)]
        x.mul_(2)  # not a constant
        other = module(*arguments)
        assert hits[-3:] == [True] * 3
        with anycell.threads(2):  # another form, which is learnt by itself
            for _ in range(2):
                same(other, module(*arguments))
    same(results[0], results[1])
    same(results[0], results[2])
    assert not torch.equal(results[0][0], other[0]) and hits[-1]


TRAINED: dict[str, Callable[[], Module]] = {
    "static": lambda: at.RNN(cells.EALSTM, 5, 8),
    "GRU, both directions": lambda: at.GRU(5, 8, bidirectional=True, batch_first=True),
    "gates of several matmuls": lambda: at.RNN(cells.MGU, 5, 8),
    **{n: m for n, m in MODULES.items() if not n.startswith(("8 bits", "zoneout"))},
}


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.sample(every=3)
def test_gradients_of_a_second_call_have_the_bits_of_the_first(
    name: str, given: bool, played: list[bool]
) -> None:
    torch.manual_seed(0)
    module = TRAINED[name]()
    x, state = problem(module)
    static = {"static": torch.randn(3, 8)} if module.cell.static else {}
    inputs = [x, *as_tuple(state)] if given else [x]
    for tensor in inputs:
        tensor.requires_grad_()
    weights = list(module.parameters())

    def run(arriving: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        results = flat(module(x, state, **static) if given else module(x, **static))
        ends = [arriving(result) for result in results]
        gradients = torch.autograd.grad(results, [*inputs, *weights], ends)
        return [*(result.detach() for result in results), *gradients]

    for arriving in (torch.ones_like, torch.cos):
        first, *others = [run(arriving) for _ in range(3)]
        for other in others:
            same(first, other)
    assert played[-1]


@pytest.mark.parametrize("training", [True, False])
def test_forms_that_are_made_again(training: bool, hits: list[bool]) -> None:
    """As where so many layers run that the oldest forms go: later calls find their passes again."""
    layer, x = at.LSTM(5, 8), torch.randn(3, 4, 5)
    for _ in range(2):
        with torch.set_grad_enabled(training):
            right, _ = layer(x)
            assert torch.equal(layer(x)[0], right) and hits[-1]
            forget_forms()
            layer(x)
            layer(x)
            assert torch.equal(layer(x)[0], right) and hits[-1]


def test_calls_with_flags_and_of_16_bits(
    played: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole calls are as earlier ones, or, with options, their passes."""
    hits = count(monkeypatch, warm)
    for kind, dtype, both, masked_output in (
        ("PeepholeLSTM", torch.float32, True, "zero"),
        ("GRU", torch.float64, False, "repeat"),
        ("LSTM", torch.bfloat16, False, "repeat"),
        ("EALSTM", torch.float16, True, "zero"),
    ):
        torch.manual_seed(0)
        cell = getattr(cells, kind)
        module = at.RNN(cell, 5, 8, bidirectional=both, dtype=dtype)
        x, state = problem(module)
        inputs = [x, *as_tuple(state), *module.parameters()]
        for tensor in inputs:
            tensor.requires_grad_()
        static = {"static": torch.randn(3, 8, dtype=dtype)} if cell.static else {}
        masks = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1]]).T.bool()
        flags: list[dict[str, Any]] = [
            {},
            {"mask": masks},
            {"mask": ~masks},
            {"mask": masks.mT.contiguous().mT, "masked_output": masked_output},
            {"lengths": [4, 2, 1]},
            {"resets": masks},
            {"resets": ~masks, "lengths": torch.tensor([3, 4, 2])},
        ]
        for arguments in flags:
            results = list[Any]()
            for fresh in (True, False, False):
                if fresh:  # an ordinary call of the same passes
                    forget_passes()
                played.clear()
                hits.clear()
                with torch.no_grad():
                    alone = flat(module(x, state, **static, **arguments))
                ends = flat(module(x, state, **static, **arguments))
                slopes = [torch.cos(end.detach()) for end in ends]
                results.append([*alone, *ends, *torch.autograd.grad(ends, inputs, slopes)])
                assert set(played) == {not fresh}
            assert hits == [True, True] * ("masked_output" not in arguments)
            for other in results[1:]:
                same(results[0], other)
        with pytest.raises(ValueError, match="lengths: given a length of 5"):
            module(x, state, **static, lengths=torch.tensor([5, 4, 2]))


@pytest.mark.parametrize(
    "flags", [torch.ones(4, 3, dtype=torch.int64), torch.ones(3, 4).bool(), None]
)
def test_flags_of_a_pass(flags: torch.Tensor | None, played: list[bool]) -> None:
    """The operator reads bytes, one for each step and row; all else is refused before."""
    module, x = at.LSTM(5, 8), torch.randn(4, 3, 5)
    arrays = {"x": x, **module._weights(cells.LSTM)[0]}
    right = run_layer(module._layer(), {**arrays, "mask": torch.ones(4, 3).bool()})
    played.clear()
    if flags is None:
        flags = torch.ones(4, 3, dtype=torch.uint8)
        same(right[0], run_layer(module._layer(), {**arrays, "mask": flags})[0])
        assert played
        return
    for name in ("mask", "resets"):
        with pytest.raises((TypeError, ValueError), match=f"{name}: given"):
            run_layer(module._layer(), {**arrays, name: flags})
    assert not played


def test_packed_sequences_and_autocast(played: list[bool]) -> None:
    module = at.LSTM(5, 8)
    packed = torch.nn.utils.rnn.pack_sequence([torch.randn(n, 5) for n in (4, 2, 1)])

    def run(x: Any) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=isinstance(x, torch.Tensor)):
            output, final = module(x)
        ends = [output if isinstance(x, torch.Tensor) else output.data, *final]
        return [*ends, *torch.autograd.grad(ends, [*module.parameters()], ends)]

    for x in (packed, torch.randn(4, 3, 5)):
        first, second = (run(x) for _ in range(2))
        same(first, second)
        assert played[-2:] == [True, True]


# -- the operator ----------------------------------------------------------------------------------
def known(steps: int = 1) -> tuple[list[torch.Tensor], int, Any]:
    """Tensors and the form of a call that the operator knows, and its results."""
    module, x = at.LSTM(5, 8), torch.randn(steps, 2, 5)
    calls: list[Any] = []
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        right = flat(module(x))
        play = warm.play

        def seen(tensors: list[torch.Tensor], form: int, seed: int) -> Any:
            calls.append(([t.detach() for t in tensors], form))
            return play(tensors, form, seed)

        patch.setattr(warm, "play", seen)
        module(x)
    return *calls[-1], right


def test_the_schema_of_the_operator() -> None:
    tensors, form, _ = known()
    play = torch.ops.anycell.play.default
    torch.library.opcheck(play, (tensors, form, 0), test_utils="test_schema")


def test_wrong_calls_of_the_operator() -> None:
    """It returns nothing, and holds nothing."""
    tensors, form, right = known()
    x, *weights = tensors
    odd = torch.zeros(81, dtype=torch.uint8)[1:].view(torch.uint8)
    wrong: list[tuple[Any, int]] = [
        (tensors, -1), (tensors, 1 << 40), (tensors, form + 1000), ([], form), ([x], form),
        ([*tensors, x], form), ([x] * 65, form), ([x] * 1000, form),
        ([x.double(), *weights], form), ([x[:, :1], *weights], form),
        ([x.expand(1, 2, 5)[:, :, ::2], *weights], form), ([x[0], *weights], form),
        ([x.mT.contiguous().mT, *weights], form), ([x.to("meta"), *weights], form),
        ([x.to_sparse(), *weights], form), ([odd, *weights], form),
    ]  # fmt: skip
    for _ in range(3):
        for arrays, number in wrong:
            assert native.play(arrays, number, 0) == []
        same(native.play(tensors, form, 0), right)
    gone = [weakref.ref(t) for t in tensors]
    del x, weights, tensors, wrong, arrays
    assert not any(ref() is not None for ref in gone)


def test_the_operator_without_memory() -> None:
    """A pass whose results PyTorch cannot make returns nothing, and what it has made is freed."""
    tensors, form, right = known()
    records = native.table()
    assert records is not None
    given = [aten.Given(6, tuple(t.shape), t.stride(), -1, 4) for t in tensors]
    made = [aten.Made(6, (3,), (1,)), aten.Made(6, (1 << 60,), (1,)), aten.Made(6, (3,), (1,), 0)]
    numbers = dict.fromkeys(aten.RECORD, 0)
    number = records.form()
    records.add(number, given, made, [1, 2], [], [], numbers, None)
    for _ in range(3):
        assert native.play(tensors, number, 0) == []
    same(native.play(tensors, form, 0), right)


@pytest.mark.parametrize("calls", [3_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_memory_stays_flat(calls: int) -> None:
    module, x = at.LSTM(5, 8), torch.randn(1, 2, 5)
    wide, flags = torch.randn(1, 2, 6), torch.tensor([[True, False]])

    def run(count: int) -> int:
        """The pages of memory after some calls, of which some are wrong, and some train."""
        for n in range(count):
            with torch.no_grad():
                module(x)
                module.step(x[0])
            if n % 10 == 0:
                module(x)[0].sum().backward()
                module(x, lengths=[1, 0], resets=flags)[0].sum().backward()
                assert native.play([x, wide], -1, 0) == []
                with pytest.raises(RuntimeError, match="input"):
                    module(wide)
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1])

    before = run(1_000)
    assert run(calls) - before < 256  # pages: a megabyte


def test_many_layouts_in_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """While records are forgotten and learnt, all threads at once, more than there are rooms."""
    monkeypatch.setattr(aten, "RECORDS", 5)
    modules = [at.LSTM(5, 8), at.GRU(5, 8, 2)]
    lengths = range(1, 9)
    inputs = [torch.randn(n, 2, 5) for n in lengths]
    with torch.no_grad(), anycell.threads(1):
        right = [[flat(m(x)) for x in inputs] for m in modules]

    def run(first: int) -> None:
        with torch.no_grad(), anycell.threads(1 + first % 2):
            for n in range(40):
                which, k = (first + n) % 2, (first * n) % len(inputs)
                for a, b in zip(flat(modules[which](inputs[k])), right[which][k], strict=True):
                    assert torch.equal(a, b)

    at_once(*[partial(run, n) for n in range(aten.ROOMS + 4)])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of other tests' frameworks
def test_a_forked_child_learns_by_itself() -> None:
    module, x = at.LSTM(5, 8), torch.randn(3, 2, 5)
    with torch.no_grad(), anycell.threads(2):
        right = flat(module(x))
        module(x)
        child = os.fork()
        if not child:
            good = all(
                torch.equal(a, b)
                for _ in range(3)
                for a, b in zip(flat(module(x)), right)  # noqa: B905
            )
            os._exit(0 if good else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        same(flat(module(x)), right)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_workers_of_a_data_loader() -> None:
    """Forked workers run layers whose calls their parent has learnt, at the same time."""
    module, inputs = at.LSTM(5, 8), torch.randn(64, 3, 2, 5)

    class Outputs(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return len(inputs)

        def __getitem__(self, i: int) -> torch.Tensor:
            with torch.no_grad():
                output: torch.Tensor = module(inputs[i])[0]
            return output

    data = Outputs()
    with anycell.threads(2):
        right = torch.stack([data[i] for i in range(len(inputs))])
        for _ in range(2):
            loader = torch.utils.data.DataLoader(
                data, batch_size=4, num_workers=2, multiprocessing_context="fork"
            )
            assert torch.equal(torch.cat([*loader]), right)
            assert torch.equal(data[0], right[0])


def test_another_openmp_runtime(hits: list[bool]) -> None:
    """Gangs of threads change their addresses: calls are learnt anew."""
    module, x = at.LSTM(5, 8), torch.randn(3, 2, 5)
    with torch.no_grad(), anycell.threads(2):
        right, _ = (flat(module(x)) for _ in range(2))
        hits.clear()
        try:
            cpu.pool.attach(None)
            for _ in range(3):
                same(flat(module(x)), right)
        finally:
            cpu.pool.attach("torch")
    assert hits == [False, True, True]


def test_pytorch_without_the_stable_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before PyTorch 2.10 all calls go the ordinary way."""
    monkeypatch.setattr(native, "function", lambda name: None)
    assert native._table.__wrapped__() is None
    monkeypatch.setattr(native, "_table", lambda: None)
    monkeypatch.setattr(warm, "FRONTS", {})
    monkeypatch.setattr(passes, "_FORMS", {})
    calls = count(monkeypatch, warm, passes)
    module, x = at.LSTM(5, 8), torch.randn(3, 2, 5)
    first, second = (flat(module(x)) for _ in range(2))
    assert all(map(torch.equal, first, second)) and not calls


# -- steps -----------------------------------------------------------------------------------------
def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize("kind, options", [("LSTM", {}), ("GRU", {}), ("LSTM", {"proj_size": 4})])
def test_drop_ins_step(kind: str, options: dict[str, int], hits: list[bool]) -> None:
    """Steps equal calls for all kinds of arguments; the second of a kind is the operator."""
    layer = getattr(at, kind)(3, 5, 2, dropout=0.5, dtype=torch.float64, **options).eval()
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    with torch.no_grad():
        _, state = layer(x)
        rows = tuple(s[:, 0] for s in as_tuple(state))
        calls = [
            ((x[0], state), True),
            ((x[0],), True),
            ((torch.stack([x[0], x[1]], -1)[..., 0], state), False),  # a kernel needs a copy
            ((x[0, 0], rows if len(rows) > 1 else rows[0]), True),
        ]
        for arguments, known in calls:
            layer.step(*arguments)
            output, new = layer.step(*arguments)
            assert hits[-1] is known
            ref, final = layer(arguments[0].unsqueeze(0), *arguments[1:])
            assert_close(output.numpy(), ref[0].numpy(), "float64", "forward")
            for a, b in zip(as_tuple(new), as_tuple(final), strict=True):
                assert_close(a.numpy(), b.numpy(), "float64", "forward")
    hits.clear()
    given = x[0].requires_grad_()
    (gradient,) = torch.autograd.grad(layer.step(given, state)[0].sum(), given)
    (ref,) = torch.autograd.grad(layer(given.unsqueeze(0), state)[0].sum(), given)
    assert torch.equal(gradient, ref) and not hits
    with torch.no_grad():
        layer.train().step(x[0], state)  # draws dropout
    assert not hits


def resets_of() -> dict[str, Any]:
    """Returns the same flags in all accepted dtypes and layouts."""
    flags = torch.tensor([True, False, True])
    kinds = ("float32", "float64", "bfloat16", "float16", "uint8", "int64", "bool")
    rows = torch.stack([flags, ~flags], 1)
    return {kind: flags.to(getattr(torch, kind)) for kind in kinds} | {
        "strided": rows[:, 0],
        "strided floats": rows.float()[:, 0],
    }


@pytest.mark.parametrize("layout", ["", "batch_first", "unbatched"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN of PeepholeLSTM", "RNN of EALSTM"])
@pytest.mark.sample(every=5)  # each layout
def test_torch_resets(kind: str, layout: str, hits: list[bool]) -> None:
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
    for gradients in (False, True):
        for resets in resets_of().values():
            resets = resets if rows else resets[0]
            for given in ({}, {"reset_state": restored}):
                with torch.set_grad_enabled(gradients):
                    for _ in range(2):
                        hits.clear()
                        output, new = layer.step(x, state, resets=resets, **given, **static)
                assert any(hits) is not gradients
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


def test_a_step_from_any_address(hits: list[bool]) -> None:
    """Arrays at odd addresses, as in a packed record, are copied first."""

    def odd(*shape: int) -> Any:
        values = torch.randn(shape, dtype=torch.float64)
        place = np.zeros(8 * values.numel() + 1, np.uint8)[1:].view(np.float64).reshape(shape)
        return values, torch.from_numpy(place).copy_(values)

    layer = at.RNN(cells.EALSTM, 3, 5, dtype=torch.float64)
    arrays = [odd(4, 3), odd(1, 4, 5), odd(1, 4, 5), odd(4, 5)]
    with torch.no_grad():
        (at_lines, _), (anywhere, _) = (
            layer.step(x, (h, c), static=static) for x, h, c, static in zip(*arrays, strict=True)
        )
        assert torch.equal(at_lines, anywhere) and hits and not any(hits)
        # The same holds if resets restore such an array.
        (x, _), hs, (c, _), (static, _) = arrays
        resets = torch.tensor([True, False, True, False])
        outputs = [
            layer.step(x, resets=resets, reset_state=(h, c), static=static)[0] for h in (*hs, hs[0])
        ]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_threads_step_with_resets() -> None:
    layer, x = at.LSTM(16, 64, 2), torch.randn(40, 4, 3, 16)
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


def test_torch_weights_that_change(hits: list[bool]) -> None:
    layer, x = at.RNN(cells.LSTM, 3, 5, dtype=torch.float64), torch.randn(2, 3).double()

    def right() -> bool:
        with torch.no_grad():
            output, ref = layer.step(x)[0], layer(x[None])[0][0]
        return close(output, ref, "float64", "forward")

    assert right()
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
        with torch.no_grad():
            dtype = str(x.dtype).removeprefix("torch.")
            assert_close(layer.step(x)[0], layer(x[None])[0][0], dtype, "forward")
    assert all(hits[-2:])
    torch.nn.utils.parametrizations.weight_norm(layer.eval(), "weight_hh_l0")
    assert right()
    with torch.no_grad():
        layer.parametrizations.weight_hh_l0.original0.mul_(2)
    assert right()
    torch.nn.utils.parametrize.register_parametrization(layer.train(), "weight_ih_l0", _dropped())
    assert not right()  # drops weights
    layer.eval()
    assert right()
    layer.bias_ih_l0.data.add_(1)
    assert right()


def test_parametrisations_come_and_go() -> None:
    """Steps notice parametrisations that come and go, with the same original tensors."""
    layer, x = at.GRU(3, 5, dtype=torch.float64).eval(), torch.randn(2, 3).double()
    parametrize, given = torch.nn.utils.parametrize, ("weight_ih_l0", torch.nn.Softplus())
    for change in (
        lambda: parametrize.register_parametrization(layer, *given),
        lambda: parametrize.register_parametrization(layer, *given),
        lambda: layer.parametrizations.weight_ih_l0.__setitem__(0, torch.nn.Tanh()),
        lambda: parametrize.remove_parametrizations(layer, "weight_ih_l0", False),
    ):
        change()
        with torch.no_grad():
            assert_close(layer.step(x)[0], layer(x[None])[0][0], "float64", "forward")


def _dropped() -> Any:
    class Dropped(torch.nn.Module):
        """DropConnect: in training, each call drops other weights."""

        def forward(self, weight: Any) -> Any:
            return torch.nn.functional.dropout(weight, 0.5, self.training)

    return Dropped()


def test_torch_weights_dropped_anew_in_each_step_of_training() -> None:
    layer, x = at.LSTM(3, 5), torch.randn(2, 3)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight_ih_l0", _dropped())
    with torch.no_grad():
        first, second = layer.step(x)[0], layer.step(x)[0]
    assert not torch.equal(first, second)


def test_other_than_parameters() -> None:
    """Steps notice new hyperparameters, weights that are buffers or attributes, and hooks."""
    layer = at.RNN(cells.LSTM(cell_clip=0.5), 3, 5, dtype=torch.float64)
    x = torch.randn(2, 3).double()

    def right() -> bool:
        with torch.no_grad():
            output, ref = layer.step(x)[0], layer(x[None])[0][0]
        return close(output, ref, "float64", "forward")

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
    assert right()
    assert len(seen) == 2


def test_hooks_of_all_modules_see_each_step(hits: list[bool]) -> None:
    layer, x, seen = at.GRU(3, 5), torch.randn(2, 3), []
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
        assert seen == [layer, layer]
        hits.clear()
        layer.step(x)
        layer.step(x)
    assert hits[-1]


def test_copies_of_a_module_step() -> None:
    layer, x = at.GRU(3, 5), torch.randn(2, 3)
    assert list(layer.state_dict()) == list(at.GRU(3, 5).state_dict())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with torch.no_grad():
            other.weight_ih_l0.zero_()
            assert_close(other.step(x)[0], other(x[None])[0][0], "float32", "forward")
            assert_close(layer.step(x)[0], layer(x[None])[0][0], "float32", "forward")


def test_inference_mode_and_other_dtypes(hits: list[bool]) -> None:
    with torch.inference_mode():
        layer, x = at.LSTM(3, 5), torch.randn(2, 3)
        for _ in range(2):
            assert torch.equal(layer.step(x)[0], layer(x[None])[0][0])
        assert all(hits[-2:])
        half = at.RNN(cells.LSTM, 3, 5, dtype=torch.bfloat16)
        for _ in range(2):
            assert torch.equal(half.step(x.bfloat16())[0], half(x.bfloat16()[None])[0][0])
        assert all(hits[-2:])
        hits.clear()
        resets = torch.tensor([True, False])
        for _ in range(2):  # a kernel of 16 bits reads other states and flags
            once = half.step(x.bfloat16(), resets=resets)[0]
            assert torch.equal(once, half(x.bfloat16()[None], resets=resets[None])[0][0])
        hits.clear()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer.step(x)[0], layer(x[None])[0][0])
    assert not any(hits)


def test_torch_errors() -> None:
    x = torch.zeros(2, 3)
    for layer in (at.RNN(cells.LSTM, 3, 5), at.LSTM(3, 5)):
        with torch.no_grad():
            layer.step(x, tuple(torch.zeros(1, 2, 5) for _ in range(2)))
            layer.step(x)
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
        at.RNN(cells.LSTM, 3, 5).step(x, static=torch.zeros(2, 5))
    both = at.GRU(3, 5, bidirectional=True)
    for call in (both.prepare, lambda: both.step(x)):
        with pytest.raises(ValueError, match="given bidirectional=True"):
            call()
