"""Sequences in PyTorch: packed, masked, reset, in chunks and one step at a time."""

import inspect
from typing import Any

import pytest
from tolerances import assert_close

torch = pytest.importorskip("torch")

from torch_layers import (  # noqa: E402
    CELLS,
    LAYERS,
    STATES,
    Gated,
    assert_same,
    assert_same_error,
    by_name,
    fused,
    run,
    tensors_of,
    twins,
)

import anycell.torch as at  # noqa: E402
from anycell import cells  # noqa: E402

nn, Tensor = torch.nn, torch.Tensor
rnn = nn.utils.rnn
DOUBLE = {"dtype": torch.float64}


# -- PackedSequence --------------------------------------------------------------------------------
LENGTHS = [[6, 4, 4, 1], [3, 6, 1, 6], [5, 5, 5], [1, 1], [4]]


def pack(x: Tensor, lengths: Any, batch_first: bool = False) -> Any:
    return rnn.pack_padded_sequence(x, lengths, batch_first, enforce_sorted=False)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("with_state", [False, True], ids=["", "state"])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.sample(every=3)
def test_packed_is_torchs(kind: str, with_state: bool, lengths: list[int]) -> None:
    flags = {"num_layers": 2, "bidirectional": True, "dropout": 0.4, **DOUBLE}
    ours, theirs = twins(kind, 3, 5, **flags)
    rows = len(lengths)
    state = tuple(torch.randn(4, rows, 5, **DOUBLE) for _ in range(STATES[kind]))
    given = (state if len(state) > 1 else state[0]) if with_state else None
    x = torch.randn(max(lengths), rows, 3, **DOUBLE)
    inputs = [pack(x, lengths)]
    if lengths == sorted(lengths, reverse=True):
        inputs.append(rnn.pack_padded_sequence(x, lengths))
    for packed in inputs:
        found = []
        for layer in (ours, theirs):
            torch.manual_seed(5)  # dropout draws per packed element, as torch does
            found.append(run(layer, packed, given))
        assert_same(*found, "float64")
        assert fused(ours(packed)[0].data)


def test_lengths_of_any_integers() -> None:
    layer, x = at.LSTM(3, 5, **DOUBLE), torch.randn(4, 2, 3, **DOUBLE)
    wanted, _ = layer(x, lengths=[3, 1])
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.uint16, torch.uint32):
        output, _ = layer(x, lengths=torch.tensor([3, 1]).to(dtype))
        assert torch.equal(output, wanted)


@pytest.mark.parametrize("kind", [*CELLS, Gated], **by_name)
@pytest.mark.sample(every=2)
def test_packed_is_lengths(kind: Any) -> None:
    layer = at.RNN(kind, 3, 5, num_layers=2, bidirectional=True, **DOUBLE)
    static = {"static": torch.randn(4, 5, **DOUBLE)} if kind.static else {}
    lengths = torch.tensor([2, 6, 1, 4])
    x, resets = torch.randn(6, 4, 3, **DOUBLE), torch.rand(6, 4) < 0.3
    start = tuple(torch.randn(4, 4, 5, **DOUBLE) for _ in kind.states)
    start = start if len(start) > 1 else start[0]
    options = {"reset_state": start, **static}
    ref, last = layer(x, start, lengths=lengths, resets=resets, **options)
    output, final = layer(pack(x, lengths), start, resets=pack(resets, lengths), **options)
    padded, seen = rnn.pad_packed_sequence(output)
    assert torch.equal(seen, lengths) and torch.equal(padded, ref)
    pairs = zip(final, last, strict=True) if isinstance(final, tuple) else [(final, last)]
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("kind", LAYERS)
def test_packed_errors_are_torchs(kind: str) -> None:
    ours, theirs = twins(kind, 3, 5, num_layers=2)
    x, h = torch.randn(4, 2, 3), torch.randn(2, 2, 5)
    wrap = (lambda s: (s, s)) if kind == "LSTM" else (lambda s: s)
    good = pack(x, [4, 2])
    calls: list[tuple[Any, ...]] = [
        (pack(x[..., :2], [4, 2]),),
        (pack(x.double(), [4, 2]),),
        (pack(x[..., None], [4, 2]),),
        (good, wrap(h[:1])),
        (good, wrap(h[:, :1])),
        (good, wrap(h[..., :3])),
        (good, wrap(h[0])),
        (good, wrap(h.double())),
        (rnn.PackedSequence(good.data[:3], good.batch_sizes),),
    ]
    for arguments in calls:
        assert_same_error(ours, theirs, *arguments)


def test_packed_errors_of_our_own() -> None:
    x, lengths = torch.randn(4, 2, 3), [2, 4]
    packed, flags = pack(x, lengths), torch.zeros(4, 2).bool()
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"lengths": lengths}, ValueError, "lengths: given list.*None with a PackedSequence"),
        ({"mask": flags}, ValueError, "mask: given torch.bool .*None with a PackedSequence"),
        ({"resets": flags}, TypeError, "resets: given torch.bool .*expected a PackedSequence"),
        ({"resets": pack(flags, [1, 4])}, ValueError, "resets: given .*other lengths or order"),
        ({"resets": pack(x[..., 0], lengths)}, ValueError, r"resets: .*float32.*resets > 0\.5"),
    ]
    for layer in (at.RNN(cells.LSTM, 3, 5), at.LSTM(3, 5)):
        for arguments, kind, message in cases:
            with pytest.raises(kind, match=message):
                layer(packed, **arguments)
    layer = at.RNN(cells.LSTM, 3, 5)
    for data, message in (
        (x, r"x: given torch.float32 \[6, 2\]; expected .*\[steps of all rows, 3\]"),
        (x.double(), "x: given torch.float64"),
    ):
        bad = pack(data[..., :2] if data is x else data, lengths)
        with pytest.raises(ValueError, match=message):
            layer(bad)
    with pytest.raises(ValueError, match=r"state: given .*expected torch.float32 \[1, 2, 5\]"):
        layer(packed, (torch.zeros(1, 3, 5),) * 2)


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("kind", LAYERS)
def test_packed_in_16_bits(kind: str, autocast: bool) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    layer, _ = twins(kind, 3, 5, dtype=dtype)
    x, lengths = torch.randn(4, 2, 3, dtype=dtype), [2, 4]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output, _ = rnn.pad_packed_sequence(layer(pack(x, lengths))[0])
        ref, _ = layer(x, lengths=torch.tensor(lengths))
    assert output.dtype == torch.bfloat16 and torch.equal(output, ref) and fused(ref)


# -- projection ------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
def test_projection_with_lengths_and_resets() -> None:
    flags = {"num_layers": 2, "bidirectional": True, "proj_size": 4, **DOUBLE}
    ours, theirs = twins("LSTM", 3, 6, **flags)
    general = at.RNN(cells.LSTMP, 3, 6, num_layers=2, bidirectional=True, P=4, **DOUBLE)
    assert list(general.state_dict()) == list(ours.state_dict())
    general.load_state_dict(ours.state_dict())
    x, lengths = torch.randn(5, 3, 3, **DOUBLE), torch.tensor([2, 5, 3])
    state = torch.randn(4, 3, 4, **DOUBLE), torch.randn(4, 3, 6, **DOUBLE)
    ref = run(theirs, pack(x, lengths), state)
    assert ours.engine.name == general.engine.name == "cpu"
    assert_same(run(ours, pack(x, lengths), state), ref, "float64")
    assert_same(run(general, pack(x, lengths), state), ref, "float64")
    padded, last = theirs(pack(x, lengths), state)
    padded, _ = rnn.pad_packed_sequence(padded)
    for layer in (ours, general):
        output, final = layer(x, state, lengths=lengths)
        for a, b in zip((output, *final), (padded, *last), strict=True):
            assert_close(a.detach(), b.detach(), "float64", "forward")
    output, (h, c) = ours(x[:, 0], lengths=3)
    assert (output.shape, h.shape, c.shape) == ((5, 8), (4, 4), (4, 6))


# -- what torch's layers do not take ---------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize("layout", ["", "batch_first", "unbatched", "packed"])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("kind", ["LSTM", "LSTMP", "GRU"])
@pytest.mark.sample(every=5)
def test_drop_ins_take_what_rnn_takes(kind: str, gradients: bool, layout: str) -> None:
    """Each argument alone, and all together: the bits of ``RNN``, by fused kernels."""
    options = {"num_layers": 2, "bidirectional": True, "batch_first": layout == "batch_first"}
    sizes = {"P": 4} if kind == "LSTMP" else {}
    projected = {"proj_size": 4} if sizes else {}
    ours = LAYERS[kind.removesuffix("P")][0](3, 5, **options, **projected)
    theirs = at.RNN(ours.cell, 3, 5, **options, **sizes)
    theirs.load_state_dict(ours.state_dict())

    def per_state(*shape: int) -> Any:
        widths = [theirs.sizes[state.size] for state in ours.cell.states]
        drawn = tuple(torch.randn(*shape, width) for width in widths)
        return drawn if len(drawn) > 1 else drawn[0]

    rows = () if layout == "unbatched" else (2,)
    steps = (2, 6) if layout == "batch_first" else (6, *rows)
    x, state = torch.randn(*steps, 3), per_state(4, *rows)
    given: dict[str, Any] = {
        "mask": torch.rand(steps) < 0.7,
        "masked_output": "repeat",
        "resets": (torch.rand(steps) < 0.3).float(),
        "reset_state": per_state(4, *rows),
        "recurrent_mask": 2 * torch.rand(*rows, 4 if sizes else 5).round(),
        "return_states": True,
    }
    if layout == "packed":
        x, given["resets"] = pack(x, [6, 4]), pack(given["resets"], [6, 4])
        del given["mask"]
    some = {name: given[name] for name in ("resets", "reset_state")}
    for arguments in (*({name: value} for name, value in given.items()), some, given):
        found = []
        for layer in (ours, theirs):
            with torch.set_grad_enabled(gradients):
                results = tensors_of(layer(x, state, **arguments))
            if gradients:
                total = torch.stack([k * r.square().sum() for k, r in enumerate(results, 1)]).sum()
                assert fused(total)
                results += torch.autograd.grad(total, list(layer.parameters()))
            found.append(results)
        for mine, other in zip(*found, strict=True):
            assert torch.equal(mine, other), list(arguments)
    assert len(ours(x, state, **given)) == 3


@pytest.mark.parametrize("kind", LAYERS)
def test_arguments_of_a_swapped_layer(kind: str) -> None:
    """And by position, as the older exporter of ONNX passes them."""

    class Mine(LAYERS[kind][1]):  # type: ignore[misc]
        pass

    layer, x = at.accelerate(Mine(3, 5)), torch.randn(6, 2, 3)
    resets, state = torch.rand(6, 2) < 0.3, torch.randn(1, 2, 5)
    restored = (state, state) if kind == "LSTM" else state
    by_name = layer(x, resets=resets, reset_state=restored, return_states="h")
    by_place = layer(x, None, None, None, resets, restored, None, "h")
    for one, other in zip(tensors_of(by_name), tensors_of(by_place), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(by_name[2]["h"], by_name[0])
    with pytest.raises(RuntimeError, match=r"input\.size"):  # torch's own, whatever else is given
        layer(torch.randn(6, 2, 4), resets=resets, return_states=True)


@pytest.mark.parametrize("kind", ["LSTM", "RNN"])
def test_arguments_by_position(kind: str) -> None:
    """In the order of the signature; each once."""
    layer = at.LSTM(3, 5) if kind == "LSTM" else at.RNN(cells.PeepholeLSTM, 3, 5)
    x, mask = torch.randn(6, 2, 3), torch.rand(6, 2) < 0.7
    *names, options = inspect.signature(layer.forward).parameters
    assert tuple(names[2:]) == layer._arrays and options == "options"
    assert ("static" in names) is (kind == "RNN")
    right = tensors_of(layer(x, mask=mask))
    for arguments in ((None, mask), (None, mask, *[None] * (len(names) - 3))):
        for one, other in zip(right, tensors_of(layer(x, *arguments)), strict=True):
            assert torch.equal(one, other)
    twice = "arguments: given 1 by position, and mask by name; expected each of mask, lengths, "
    with pytest.raises(TypeError, match=twice):
        layer(x, None, mask, mask=mask)
    with pytest.raises(TypeError, match=rf"given {len(names) - 1} by position, and none by name"):
        layer(x, None, *[None] * (len(names) - 1))
    with pytest.raises(TypeError, match=r"lenghts: given .*Did you mean lengths"):
        layer(x, lenghts=[6, 6])


@pytest.mark.parametrize(
    ("layer", "name", "known"),
    [
        (at.LSTM(3, 5), "static", "input, hx, mask, lengths"),
        (at.GRU(3, 5), "return_state", "input, hx, mask, lengths"),
        (at.RNN(cells.LSTM, 3, 5), "hx", "x, state, mask, lengths, resets, reset_state, static"),
    ],
)
def test_arguments_that_a_layer_does_not_have(layer: nn.Module, name: str, known: str) -> None:
    expected = rf"{name}: given .*expected no such argument; this call takes {known}"
    with pytest.raises(TypeError, match=expected):
        layer(torch.randn(6, 2, 3), **{name: torch.zeros(2, 5)})


def test_without_resets_what_they_restore_has_no_gradient() -> None:
    restored = torch.ones(1, 2, 5, requires_grad=True)
    at.RNN(cells.GRU, 3, 5)(torch.ones(6, 2, 3), reset_state=restored)[0].sum().backward()
    assert restored.grad is None
