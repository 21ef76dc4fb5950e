"""The operators ``anycell::forward``, ``run`` and ``backward``, which graphs call: they
refuse every tensor that their text does not describe, and every text that nobody has written.
"""

import itertools
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from tolerances import assert_close
from variants import variants

torch = pytest.importorskip("torch")

from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch_layers import Zoned, by_name, forget_forms, given_to_forward  # noqa: E402

import anycell.torch as at  # noqa: E402
from anycell import cells  # noqa: E402
from anycell.layer import Options  # noqa: E402
from anycell.plan import Layer  # noqa: E402
from anycell.torch.operators import fused, native, ops  # noqa: E402

Tensor = torch.Tensor
STEPS, ROWS = 40, 9  # so many that the kernel reads the input itself


def arguments(
    kind: Any,
    steps: int = 4,
    rows: int = 2,
    states: bool = False,
    checkpoint: int | None = None,
    **flags: Tensor,
) -> tuple[Any, ...]:
    """What a call gives to the operator ``anycell::forward``."""
    sizes = {"P": 4} if kind is cells.LSTMP else {}
    layer = at.RNN(kind, 3, 5, bidirectional=True, dtype=torch.float64, **sizes)
    x = torch.randn(steps, rows, 3, dtype=torch.float64, requires_grad=True)
    arrays = {"x": x, **flags, **layer._weights(layer.cell)[0]}
    for state in kind.states if states else ():
        for what in ("state", "reset_state"):
            shape = 2, rows, sizes.get(state.size, 5)
            arrays[f"{what} {state.name}"] = torch.randn(shape, dtype=torch.float64)
    if kind.static:
        arrays["static"] = torch.randn(rows, 5, dtype=torch.float64)
    seed = torch.tensor(7) if kind.keeps else 0
    options = Options((False, True), seed=seed, training=True, checkpoint=checkpoint)  # type: ignore[arg-type]
    return given_to_forward(Layer(kind, layer._sizes, options), arrays)


def flags(steps: int, rows: int) -> dict[str, Tensor]:
    return {"mask": torch.rand(steps, rows) < 0.4, "resets": torch.rand(steps, rows) < 0.3}


def names(text: str) -> list[str]:
    """What the tensors of a call are called in errors."""
    return [re.sub(r"state (\w+)", r"state '\1'", name) for name in ops.read(text).arrays]


@pytest.mark.parametrize("kind", [cells.LSTM, cells.GRU, cells.LayerNormLSTM, Zoned], **by_name)
@pytest.mark.sample(1)
def test_opcheck(kind: Any, set_layer: Callable[..., None]) -> None:
    set_layer(chunk_steps=lambda *_: 2)  # a segment between checkpoints is one or more
    for call, checkpoint in itertools.product(({}, flags(4, 2)), (None, 2)):
        tensors, text, hyper = arguments(kind, checkpoint=checkpoint, **call)
        assert ops.read(text).options.checkpoint == checkpoint
        if call:  # weights in columns, whose gradients are computed in columns
            tensors = [t.mT.contiguous().mT if t.dim() == 2 else t for t in tensors]
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
        torch.library.opcheck(torch.ops.anycell.forward.default, (leaves, text, hyper))
        if checkpoint:
            continue
        # What is kept has corners that nothing writes or reads: there numbers cannot be compared.
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        for keep in (False, True):
            run = torch.ops.anycell.run.default
            torch.library.opcheck(run, (tensors, text, hyper, keep), test_utils=tests)
        backward = torch.ops.anycell.backward.default
        torch.library.opcheck(backward, backward_arguments(tensors, text, hyper))


def backward_arguments(tensors: list[Tensor], text: str, hyper: list[float]) -> tuple[Any, ...]:
    """What autograd would give to the operator ``anycell::backward``."""
    form, plain = ops.read(text), [t.detach() for t in tensors]
    results = torch.ops.anycell.forward(plain, text, hyper)
    kept = torch.ops.anycell.run(plain, text, hyper, True)[len(results) - 1 :]
    kept = kept[:-1] if ops.apart(form) else kept
    arriving = [torch.randn_like(r) for r in results]
    needs = [t.is_floating_point() for t in plain]
    return plain, kept, arriving, text, hyper, [True] * len(arriving), needs


def test_a_cell_that_is_not_known() -> None:
    tensors, text, hyper = arguments(cells.GRU)
    with pytest.raises(RuntimeError, match=r"cell Other-0 of this graph is not known.*Import"):
        torch.ops.anycell.forward(tensors, re.sub(r"GRU-\w+", "Other-0", text), hyper)


KINDS = [cells.LSTMP, cells.EALSTM, cells.PeepholeLSTM, Zoned]


@pytest.mark.parametrize("kind", KINDS, **by_name)
@pytest.mark.sample(1)
@pytest.mark.more
def test_every_tensor_in_every_guise(kind: Any) -> None:
    """Whatever the strides and the alignment, results and gradients are those of a plain copy."""
    tensors, text, hyper = arguments(kind, STEPS, ROWS, states=True, **flags(STEPS, ROWS))

    def solve(given: list[Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        call = backward_arguments(given, text, hyper)
        forward = torch.ops.anycell.forward(call[0], text, hyper)
        return [*forward, *torch.ops.anycell.backward(*call)]

    same = solve(tensors)
    for i, name in enumerate(names(text)):
        if name == "seed":
            continue
        own = tensors[i].detach().numpy()
        for guise, variant in variants(own, torch=True):
            ours, copied = (
                [*tensors[:i], torch.from_numpy(array), *tensors[i + 1 :]]
                for array in (variant, variant.copy())
            )
            right = same if np.array_equal(variant, own) else solve(copied)
            for k, (value, plain) in enumerate(zip(solve(ours), right, strict=True)):
                said = f"{name}, {guise}: result {k}"
                assert_close(value.numpy(), plain.numpy(), "float64", "gradient", said, ())


@pytest.mark.parametrize("kind", KINDS, **by_name)
def test_every_tensor_that_is_another_one(kind: Any) -> None:
    """Of another shape, dtype or number of axes: refused by name, forward and backward."""
    tensors, text, hyper = arguments(kind, STEPS, ROWS, states=True, **flags(STEPS, ROWS))
    backward = backward_arguments(tensors, text, hyper)
    for i, name in enumerate(names(text)):
        whole = tensors[i].detach()
        others = [whole.unsqueeze(0), whole.to(torch.float16), whole.to(torch.complex64)]
        for axis in range(whole.dim()):
            others += [whole.narrow(axis, 0, whole.shape[axis] - 1), torch.cat([whole] * 2, axis)]
            others.append(whole.narrow(axis, 0, 0))
            if not (name.startswith("reset_state") and axis == 1):  # one value for all rows will do
                others.append(whole.select(axis, 0))
        for other in others:
            if name == "seed" and other.dtype is torch.float16:
                continue
            given = [*tensors[:i], other, *tensors[i + 1 :]]
            # A longer or shorter x is another call, in which all that comes per step or row is
            # wrong instead.
            wanted = re.escape(name) if name != "x" else r"(x|state|weight|mask|resets|static)"
            for operator, call in (
                (torch.ops.anycell.forward, (given, text, hyper)),
                (torch.ops.anycell.backward, (given, *backward[1:])),
            ):
                with pytest.raises((ValueError, TypeError), match=rf"{wanted}.*given.*expected"):
                    operator(*call)


@pytest.mark.parametrize("kind", KINDS, **by_name)
def test_a_tensor_without_numbers(kind: Any) -> None:
    """On "meta", as where one weight of a program was not loaded: else results would be garbage."""
    tensors, text, hyper = arguments(kind, states=True, **flags(4, 2))
    plain = [t.detach() for t in tensors]
    backward = backward_arguments(tensors, text, hyper)
    for i in range(1, len(names(text)) - ("seed" in names(text))):
        given = [*plain[:i], plain[i].to("meta"), *plain[i + 1 :]]
        with pytest.raises(ValueError, match=r"device of a tensor: given meta; expected cpu"):
            torch.ops.anycell.forward(given, text, hyper)
        with pytest.raises(ValueError, match=r"device of a tensor: given meta; expected cpu"):
            torch.ops.anycell.backward(given, *backward[1:])


@pytest.mark.parametrize("kind", [cells.LSTM, cells.LSTMP], **by_name)
@pytest.mark.parametrize("masked", [False, True])
def test_backward_refuses_what_forward_did_not_keep(kind: Any, masked: bool) -> None:
    tensors, text, hyper = arguments(kind, **(flags(4, 2) if masked else {}))
    plain, kept, arriving, *rest = backward_arguments(tensors, text, hyper)
    backward = torch.ops.anycell.backward
    backward(plain, kept, arriving, *rest)
    for i, one in enumerate(kept):
        for other in (one[:-1], one.float(), torch.cat([one, one], 1)):
            call = plain, [*kept[:i], other, *kept[i + 1 :]], arriving, *rest
            with pytest.raises((ValueError, TypeError), match=r"given .*expected"):
                backward(*call)
    for i, gradient in enumerate(arriving):
        for other in (gradient[:-1], gradient.float(), gradient[..., :-1], gradient[None]):
            call = plain, kept, [*arriving[:i], other, *arriving[i + 1 :]], *rest
            with pytest.raises((ValueError, TypeError, IndexError), match=r"d_|given|index"):
                backward(*call)
    for wrong in (
        (plain[:-1], kept, arriving, *rest),
        (plain, kept[:-1], arriving, *rest),
        (plain, kept, arriving[:-1], *rest),
        (plain, kept, arriving, *rest[:2], [True], rest[-1]),
        (plain, kept, arriving, *rest[:3], rest[-1][:-1]),
        ([], kept, arriving, *rest),
    ):
        with pytest.raises(ValueError, match=r"(anycell operator|kept arrays).*given .*expected"):
            backward(*wrong)


def test_texts_that_nobody_has_written(seed: int) -> None:
    """Mutations of a text: refused, or the call that they describe."""
    rng, letters = np.random.default_rng(seed), "0123456789 -=,.PHxfloat_\n\0é"
    counts = {"refused": 0, "run": 0}
    for kind in (cells.LSTM, cells.LSTMP, cells.ZoneoutLSTM):
        tensors, text, hyper = arguments(kind, **flags(4, 2))
        plain = [t.detach() for t in tensors]
        for _ in range(200):
            mutant = list(text)
            for _ in range(rng.integers(1, 4)):
                place = int(rng.integers(len(mutant) + 1))
                new = list(rng.choice(list(letters), int(rng.integers(0, 3))))
                mutant[place : place + int(rng.integers(0, 3))] = new
            try:
                results = torch.ops.anycell.forward(plain, "".join(mutant), hyper)
            except (ValueError, TypeError, RuntimeError) as error:
                assert "given" in str(error) or "not known" in str(error), mutant
                counts["refused"] += 1
            else:
                widths = {results[0].shape[-1], tensors[0].shape[1]}
                assert widths == {2 * kind_width(kind), 2}, mutant
                counts["run"] += 1
    assert counts["refused"] > 500 and counts["run"], counts
    tensors, text, hyper = arguments(cells.ZoneoutLSTM)
    with pytest.raises(ValueError, match=r"hyper: given 3; expected 2"):
        torch.ops.anycell.forward([t.detach() for t in tensors], text, [*hyper, 0.5])


def kind_width(kind: Any) -> int:
    return 4 if kind is cells.LSTMP else 5


def test_a_layer_and_its_operator_take_the_same_road() -> None:
    """The check of an operator is that of the engine, and costs no second walk."""
    tensors, text, hyper = arguments(cells.LSTM)
    layer, arrays = ops.unpack(tensors, text, hyper)
    output, *_ = fused.run_forward(layer, arrays, keep=False)
    assert torch.equal(output, torch.ops.anycell.forward(tensors, text, hyper)[0])


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Own(Tensor):
    pass


@pytest.mark.skipif(native.table() is None, reason="PyTorch has no stable interface as yet")
@pytest.mark.parametrize(
    "context, direct",
    [
        (nullcontext, True), (lambda: torch.device("cpu"), True), (torch.inference_mode, True),
        (Dispatched, False), (Called, False), (torch.enable_grad, False),
        (torch.autograd.forward_ad.dual_level, False), (torch.profiler.profile, False),
    ],
)  # fmt: skip
def test_calls_that_nobody_observes_need_no_dispatcher(context: Any, direct: bool) -> None:
    """The others reach the modes, or the kernels in Python, with the same bits."""
    tensors, text, hyper = arguments(cells.LSTM)
    tensors = [t.detach() for t in tensors]
    run, codes = torch.ops.anycell.run.default, list[Any]()
    others = {ops._run.__code__}
    others |= {Dispatched.__torch_dispatch__.__code__, Called.__torch_function__.__code__}

    def look(*given: Any, **named: Any) -> bool:
        codes.clear()
        sys.setprofile(lambda frame, *_: codes.append(frame.f_code))
        try:
            results = run(*given, **named)
        finally:
            sys.setprofile(None)
        # What is kept has corners that nothing writes.
        assert all(map(torch.equal, results[:2], right[:2]))
        return not others & {*codes}

    with torch.no_grad():
        right = run(tensors, text, hyper, True)
        with context():
            assert look(tensors, text, hyper, True) is direct
        assert look(tensors, text, hyper, True)
        forget_forms()
        assert not look(tensors, text, hyper, True) and look(tensors, text, hyper, True)
        assert not look(tensors, text, hyper, keep=True)
        assert not look([tensors[0].as_subclass(Own), *tensors[1:]], text, hyper, True)
