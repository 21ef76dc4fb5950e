"""Modules of one step in PyTorch, read as cells: the numbers of a Python loop, or a reason.

One file, because its parts try the same cells in the same way.
"""

import copy
import functools
import io
import itertools
import pickle
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from loop_cells import (
    CELLS,
    B,
    Concatenated,
    H,
    I,
    Leaky,
    Normalized,
    OfTorchGRU,
    OfTorchRNN,
    One,
    ReadOut,
    Run,
    T,
    alike,
    by_hand,
    check_trees,
    inputs_of,
    lstm,
    param,
    results,
)
from tolerances import LIMITS, error
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

import anycell.torch
from anycell.torch import explain_scan, loop, loops, scan
from anycell.torch.operators.native import table
from anycell.torch.reading import planned, replayed
from anycell.torch.reading.tape import Tape

pytestmark = pytest.mark.usefixtures("torch_in_float64")


class BeforeAndAfter(Concatenated):
    """An output of the states before and after a step."""

    def forward(self, x: Tensor, state: Any) -> Any:
        y, new = super().forward(x, state)
        return y * state[1] + x.sum(-1, keepdim=True), new


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CELLS)
def test_cells_are_read(name: str) -> None:
    """Called three times: read, recorded, replayed."""
    module = CELLS[name]()
    fused = loop(module)
    for rows in (B, B, B, 1):
        x, state = inputs_of(module, rows=rows)
        alike(results(fused, module, x, state), results(by_hand(module), module, x, state))
        assert fused.engine.name == "cpu", fused.engine.reason
    tapes = [tape for plan in fused._readings.plans.values() for tape in plan.tapes.values()]
    assert [type(tape) for tape in tapes] == [Tape, bool]  # of one row there was one call


@pytest.mark.parametrize(
    ("part", "count"),
    [
        (lambda w: w.t()[2:5].t(), 1),
        (lambda w: w.t()[4:].t()[:3], 2),  # of both axes
        (lambda w: w.t()[:, None].squeeze(1).t(), 0),
        (lambda w: w.t()[::2].t(), 3),  # strides differ
        (lambda w: w.t()[2:5].neg().t(), 4),  # memory of its own
    ],
)
def test_a_tape_makes_a_slice_of_a_view_at_once(
    part: Callable[[Tensor], Tensor], count: int
) -> None:
    """Each operation takes as long as the kernel needs for a step."""
    tape = Tape(
        [torch.randn(4, 6)], lambda a: (part(a[0]), ()), {}, lambda arrays, between, kept: ()
    )
    operations: list[Any] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            operations.append(op)
            return op(*args, **(kwargs or {}))

    weight = torch.randn(4, 6)
    with Seen():
        made, _ = tape.enter([weight])
    assert torch.equal(made, part(weight)) and len(operations) == count


@pytest.mark.parametrize("learning", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    ("kind", "dtype", "native"),
    [
        (Concatenated, torch.float64, True),
        (BeforeAndAfter, torch.float64, True),  # whose kernel keeps c
        (Concatenated, torch.bfloat16, False),  # whose states are widened
    ],
)
@pytest.mark.sample(every=3)
def test_warm_calls_are_one_operator(
    monkeypatch: pytest.MonkeyPatch, kind: Any, dtype: Any, native: bool, batch_first: bool,
    learning: bool,
) -> None:  # fmt: skip
    ordinary: list[Any] = []
    run = planned.run_layer
    monkeypatch.setattr(planned, "run_layer", lambda *call: ordinary.append(call) or run(*call))
    module = kind().to(dtype)
    layer = loop(module, batch_first=batch_first)
    turned = (lambda t: t.transpose(0, 1)) if batch_first else (lambda t: t)
    for turn in range(6):
        ordinary.clear()
        x, state = inputs_of(module)
        x, state = x.to(dtype), pytree.tree_map(lambda t: t.to(dtype), state)
        with torch.set_grad_enabled(learning):
            output, last = layer(turned(x).contiguous(), state)
        if dtype is torch.float64:
            check_trees((turned(output), last), by_hand(module)(x, state))
        assert output.requires_grad == learning
        # Read, recorded, learnt; replayed from the fourth call on.
        assert turn < 3 or bool(ordinary) != (native and table() is not None)
    assert layer.engine.name == "cpu", layer.engine.reason


def test_calls_that_are_not_like_earlier_ones() -> None:
    """After warm calls: each change of module, layer and arguments is seen."""
    module = OfTorchGRU()
    layer = loop(module)
    x, h = torch.randn(T, T, I), torch.randn(T, H)

    def warm() -> None:
        for _ in range(4):
            check_trees(layer(x, h), by_hand(module)(x, h))
        assert layer.engine.name == "cpu", layer.engine.reason

    warm()
    layer.batch_first = True
    turned = by_hand(module)(x.transpose(0, 1), h)
    for _ in range(4):
        output, last = layer(x, h)
        check_trees((output.transpose(0, 1), last), turned)
    layer.batch_first = False
    warm()
    check_trees(layer(x.to_sparse(), h), by_hand(module)(x, h))
    assert "sparse" in layer.engine.reason
    check_trees(layer(x, h.t().contiguous().t()), by_hand(module)(x, h))
    module = layer.module = OfTorchGRU()
    warm()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    warm()
    torch.set_num_threads(threads)
    hooked: list[int] = []
    for register in (
        module.cell.register_forward_hook,
        nn.modules.module.register_module_forward_hook,
    ):
        handle = register(lambda *_: hooked.append(1))
        layer(x, h)
        assert "hooks" in layer.engine.reason and len(hooked) >= T
        handle.remove()
        hooked.clear()
        warm()


# -- warm calls: what the operator and the gradient lay out ----------------------------------------


class Parts(nn.Module):
    """A cell whose weights are joined, added, slices, transposed, or several of these."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.w, self.u = param(I, 2 * H), param(H, 2 * H)
        self.whole, self.b, self.d = param(2 * H, H + I), param(2 * H), param(2 * H)
        self.each = nn.ParameterList([param(n, m) for n in (H, H) for m in (I, H)])

    def forward(self, x: Tensor, h: Tensor) -> Any:
        kind = self.kind
        if kind == "transposed":
            a = x @ self.w + h @ self.u + self.b
        elif kind == "added":
            a = F.linear(x, self.w.t(), self.b) + F.linear(h, self.u.t(), self.d)
        elif kind == "slices":
            a = F.linear(torch.cat([h, x], -1), self.whole, self.b)
        elif kind == "a part":
            a = F.linear(x, self.whole[:, 1 : 1 + I]) + h @ self.u
        elif kind == "joined":
            e = self.each
            a = torch.cat([F.linear(x, e[0]) + F.linear(h, e[1]), x @ e[2].T + h @ e[3].T], -1)
        elif kind == "sums":
            e, b, d = self.each, self.b, self.d
            f = F.linear(x, e[0], b[:H]) + F.linear(h, e[1], d[:H])
            g = F.linear(x, e[2], b[H:]) + F.linear(h, e[3], d[H:])
            a = torch.cat([f, g], -1)
        elif kind == "halves":
            a = F.linear(x, torch.cat([self.w.t()[:H], self.w.t()[H:]]), self.b) + h @ self.u
        elif kind == "shared":
            a = x @ self.u[:I] + h @ self.u + self.b + self.b
        else:
            a = F.linear(x, self.w.t().exp(), self.b) + h @ self.u
        f, g = a.chunk(2, -1)
        h = h + torch.sigmoid(f) * (torch.tanh(g) - h)
        return h, h


@pytest.mark.parametrize(
    ("kind", "inside"),
    [
        ("transposed", True), ("added", True), ("slices", True), ("joined", True), ("sums", True),
        ("a part", False), ("shared", False), ("computed", False),
        ("halves", False),
    ],
)  # fmt: skip
def test_weights_are_laid_out_inside_of_warm_calls(kind: str, inside: bool) -> None:
    """The same bits as of a call that is not warm, with and without gradients; hooks, and what is
    saved, are torch's own. No two gradients share memory.
    """
    module = Parts(kind)
    layer, seen = loop(module), list[Any]()
    x, h = torch.randn(T, B, I, requires_grad=True), torch.randn(B, H, requires_grad=True)
    tensors = [x, h, *module.parameters()]

    def gradients(output: Tensor, last: Tensor) -> list[Tensor]:
        found = torch.autograd.grad(
            (output.sin().sum(), last.sum()), tensors, allow_unused=True, materialize_grads=True
        )
        return [output.detach(), last.detach(), *found]

    first = gradients(*layer(x, h))
    check_trees(first, gradients(*by_hand(module)(x, h)))
    for _ in range(5):
        assert all(map(torch.equal, gradients(*layer(x, h)), first))
        with torch.no_grad():
            assert all(map(torch.equal, layer(x, h), first))
    both = [*layer._readings.replays.values()]
    assert len(both) == 2  # without gradients, too
    layer(x, h)[0].sum().backward()
    held = [t.grad for t in tensors if t.grad is not None]
    for k, gradient in enumerate(held):
        copies = [other.clone() for other in held]
        gradient.fill_(k + 7.0)
        copies[k] = gradient
        assert all(map(torch.equal, held, copies))
    if table() is not None:
        assert all(known.known is not None and known.inside == inside for known in both)
    for parameter in module.parameters():
        parameter.register_hook(seen.append)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        results = layer(x, h)
    assert all(map(torch.equal, gradients(*results), first))
    assert seen
    output, _ = layer(x, h)
    (again,) = torch.autograd.grad(output.sum(), h, create_graph=True)
    expected = torch.autograd.grad(by_hand(module)(x, h)[0].sum(), h, create_graph=True)[0]
    twice = [
        torch.autograd.grad(g.square().sum(), tensors, allow_unused=True, materialize_grads=True)
        for g in (again, expected)
    ]
    check_trees(*twice)
    basis = torch.eye(3).repeat(1, output.numel() // 3 + 1)[:, : output.numel()]
    arriving = basis.reshape(3, *output.shape)
    rows = [
        torch.autograd.grad(run(x, h)[0], h, arriving, is_grads_batched=True)
        for run in (layer, by_hand(module))
    ]
    check_trees(*rows)
    if table() is None:  # joined in PyTorch's own copies, which no edit changes
        return
    output, _ = layer(x, h)
    with torch.no_grad():
        module.u.mul_(2.0)
        module.whole.mul_(2.0)
        module.each[1].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


class Twice(One):
    """A vector that is a part of a sum of biases, and is read by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.of_x, self.of_h = nn.Linear(I, H), nn.Linear(H, H, bias=False)
        self.b = nn.ParameterList([nn.Parameter(torch.randn(H))])

    def forward(self, x: Tensor, h: Tensor) -> Any:
        h = torch.tanh(self.of_x(x) + self.b[0] + self.of_h(h)) * self.b[0]
        return h, h


@pytest.mark.skipif(table() is None, reason="there is no native operator")
@pytest.mark.parametrize(
    ("make", "rows", "kinds"),
    [
        (lambda: Parts("joined"), B, {int}),
        (lambda: Parts("added"), B, {int}),  # two tensors have the same gradient
        (OfTorchGRU, B, {int, str}),  # a bias is a parameter of the cell
        (OfTorchGRU, 1, {int}),  # whose gradient is the only row of its sums
        (Twice, B, {int, str}),
        (Twice, 1, {int, str}),  # beside a gradient, a copy of its memory
        (lambda: Parts("slices"), B, {int, str}),  # a weight is in two arrays
    ],
)
@pytest.mark.parametrize("frozen", [False, True])
def test_warm_backward_passes_return_the_gradients_of_tensors(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], rows: int, kinds: set[type],
    frozen: bool,
) -> None:  # fmt: skip
    """By their places; others are made of those of arrays, by name."""
    seen, back = list[set[type]](), replayed.Pass.back
    monkeypatch.setattr(
        replayed.Pass,
        "back",
        lambda self, *call: seen.append({*map(type, call[0])}) or back(self, *call),
    )
    module = make()
    layer, x, h = loop(module), torch.randn(T, rows, I), torch.randn(rows, H)
    next(module.parameters()).requires_grad_(not frozen)
    for _ in range(6):
        alike(results(layer, module, x, h), results(by_hand(module), module, x, h))
    assert seen[-1] == kinds


@pytest.mark.parametrize("kind", ["added", "joined", "slices", "sums"])
def test_weights_are_laid_out_in_float32(kind: str) -> None:
    module = Parts(kind).float()
    layer = loop(module)
    x, h = torch.randn(T, B, I, dtype=torch.float32), torch.randn(B, H, dtype=torch.float32)
    with torch.no_grad():
        first = layer(x, h)
        for _ in range(5):
            assert all(map(torch.equal, layer(x, h), first))
    (known,) = layer._readings.replays.values()
    assert known.inside or table() is None


def run_counted(made: list[Any], run: Callable[..., Any], *arguments: Any) -> Any:
    made.append(run)
    return run(*arguments)


@pytest.mark.parametrize("learning", [False, True])
def test_parts_of_parameters_are_laid_out_inside_of_warm_calls(
    monkeypatch: pytest.MonkeyPatch, learning: bool
) -> None:
    """Of torch's GRU, whose biases are added but for those of the last gate; also of a backward
    pass.
    """
    module = OfTorchGRU()
    layer, x, h = loop(module), torch.randn(T, B, I), torch.randn(B, H)
    tensors, made = [*module.parameters()], list[Any]()
    for turn in range(7):
        if turn == 4:
            (known,) = layer._readings.replays.values()
            assert known.inside or table() is None
            counted = functools.partial(run_counted, made, known.tape.enter)
            monkeypatch.setattr(known.tape, "enter", counted)
        with torch.set_grad_enabled(learning):
            output, _ = layer(x, h)
            right, _ = by_hand(module)(x, h)
        check_trees(output.detach(), right.detach())
        if learning:
            both = [torch.autograd.grad(o.sin().sum(), tensors) for o in (output, right)]
            check_trees(*both)
    assert not made or table() is None


def test_warm_calls_with_states_in_a_dictionary() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(I, H)

        def forward(self, x: Tensor, state: dict[str, Tensor]) -> Any:
            h, c = self.cell(x, (state["h"], state["c"]))
            return h, {"h": h, "c": c}

    module = Named()
    layer, x = loop(module), torch.randn(T, B, I)
    state = {"h": torch.randn(B, H), "c": torch.randn(B, H)}
    for _ in range(3):
        check_trees(layer(x, state), by_hand(module)(x, state))
    again, turned = layer._readings.again, dict(reversed(state.items()))
    assert again(module, x, dict(state)) is not None or table() is None
    assert again(module, x, turned) is None and again(module, x, (*state.values(),)) is None
    check_trees(layer(x, turned)[0], by_hand(module)(x, turned)[0])


@pytest.mark.parametrize("engine", ["cpu", "torch"])
def test_a_state_whose_keys_come_back_in_another_order(engine: str) -> None:
    cell, x = nn.LSTMCell(I, H), torch.randn(T, B, I)

    class Named(nn.Module):
        def __init__(self, order: str) -> None:
            super().__init__()
            self.cell, self.order = cell, order

        def forward(self, x: Tensor, state: Any) -> Any:
            if engine == "torch" and x.sum() == 0:  # which cannot be read
                return x, state
            new = dict(zip("hc", self.cell(x, (state[0]["h"], state[0]["c"])), strict=True))
            return new["h"], ({name: new[name] for name in self.order},)

    state, restored = {"h": torch.randn(B, H), "c": torch.randn(B, H)}, torch.randn(2, B, H)
    further: Any = {"mask": torch.rand(T, B) < 0.5, "resets": torch.rand(T, B) < 0.5}
    further["reset_state"] = [{"c": restored[0], "h": restored[1]}]
    right, turned = loop(Named("hc")), loop(Named("ch"))
    for arguments in ({}, further):
        (y, (last,)), its = right(x, [state], **arguments), turned(x, [state], **arguments)
        check_trees(its, (y, [last]))
        assert turned.engine.name == right.engine.name == engine
    further = {**further, "mask": None, "resets": torch.ones(1, B)}
    check_trees(turned(x[:1], [state], **further)[0][0], cell(x[0], (restored[1], restored[0]))[0])


class Spelled(nn.Module):
    """A cell of square matrices, each a parameter or its transpose, as they are or joined rows."""

    def __init__(self, *spelling: str) -> None:
        super().__init__()
        self.spelling = spelling
        self.first, self.second = (
            nn.ParameterList([param(H, H)] if how != "joined" else [param(2, H), param(H - 2, H)])
            for how in spelling
        )

    def forward(self, x: Tensor, h: Tensor) -> Any:
        matrices = []
        for how, parts in zip(self.spelling, (self.first, self.second), strict=True):
            matrix = torch.cat([*parts]) if how == "joined" else parts[0]
            matrices.append(matrix.t() if how == "turned" else matrix)
        h = torch.tanh(F.linear(x, matrices[0]) + torch.sigmoid(F.linear(h, matrices[1])))
        return h, h


def test_warm_calls_of_square_weights() -> None:
    """Cells that differ only in what is transposed have calls of their own, in one process."""
    x, h = torch.randn(T, B, H, requires_grad=True), torch.randn(B, H)
    for spelling in itertools.product(("plain", "turned", "joined"), repeat=2):
        module = Spelled(*spelling)
        layer, tensors = loop(module), [x, *module.parameters()]
        right, _ = by_hand(module)(x, h)
        expected = torch.autograd.grad(right.sin().sum(), tensors)
        for _ in range(4):
            output, _ = layer(x, h)
            check_trees(output, right)
            check_trees(torch.autograd.grad(output.sin().sum(), tensors), expected)
            with torch.no_grad():
                check_trees(layer(x, h)[0], right)
        for known in layer._readings.replays.values():
            assert known.inside or table() is None


class OfTwoDtypes(nn.Module):
    """A cell whose bias is made of parameters of float64 and float32."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, size = how, H if how == "added" else H // 2
        self.w, self.u, self.wide = param(I, H), param(H, H), param(H - size or H)
        self.narrow = nn.Parameter(torch.randn(size, dtype=torch.float32))

    def forward(self, x: Tensor, h: Tensor) -> Any:
        pair = self.narrow, self.wide
        bias = pair[0] + pair[1] if self.how == "added" else torch.cat(pair)
        h = torch.tanh(x @ self.w + h @ self.u + bias)
        return h, h


@pytest.mark.parametrize("how", ["added", "joined"])
def test_weights_of_two_dtypes(how: str) -> None:
    """They are converted before the operator, which would read past the end of the narrow ones."""
    module = OfTwoDtypes(how)
    layer, x, h = loop(module), torch.randn(T, B, I), torch.randn(B, H)
    right, _ = by_hand(module)(x, h)
    for _ in range(4):
        with torch.no_grad():
            check_trees(layer(x, h)[0], right)
        check_trees(layer(x, h)[0], right)
    assert layer.engine.name == "cpu", layer.engine.reason


class Gated(nn.Module):
    """A cell whose output also reads x, after the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.v = nn.GRUCell(I, H), param(H, I)

    def forward(self, x: Tensor, h: Tensor) -> Any:
        h = self.cell(x, h)
        return h * F.linear(x, self.v), h


@pytest.mark.parametrize("grad", [False, True])
def test_x_in_other_memory_is_read_after_the_loop(grad: bool) -> None:
    """What is computed after the kernel depends on the layout of x, too."""
    module = Gated()
    layer, h = loop(module), torch.randn(B, H)
    layouts = (
        torch.randn(T, B, I), torch.randn(B, T, I).transpose(0, 1),
        torch.randn(T, 2 * B, I)[:, ::2], torch.randn(T, B, 2 * I)[..., ::2],
    )  # fmt: skip
    with torch.set_grad_enabled(grad):
        for x in (*layouts, *reversed(layouts)):
            for _ in range(3):
                check_trees(layer(x, h), by_hand(module)(x, h))
    assert layer.engine.name == "cpu", layer.engine.reason


def test_what_warm_calls_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thing that the printed comparison looks at; an equal number or word is no change."""
    module = Parts("added")
    module.register_parameter("none", None)
    layer = loop(module)
    x, h = torch.randn(T, B, I), torch.randn(B, H)

    def again() -> Any:
        around = layer._readings.around
        assert around is not None
        return around.again(module)

    for _ in range(4):
        layer(x, h)
    around: Any = layer._readings.around
    assert [*map(id, again())] == [*map(id, around.tensors())]
    assert around._compared(True) is not None and around.again(Parts("added")) is None
    kind = module.kind
    monkeypatch.setattr(module, "kind", "".join([*kind]))
    assert module.kind is not kind and again() is not None
    module.kind = "joined"
    assert again() is None
    module.kind = kind
    for name, value in (("none", param(3)), ("more", 1), ("child", nn.Identity())):
        setattr(module, name, value)
        assert again() is None
        setattr(module, name, None) if name == "none" else delattr(module, name)
        assert again() is not None
    handle = module.register_forward_pre_hook(lambda *_: None)
    assert again() is None and around.again(module, unhooked=False) is not None
    handle.remove()
    w = module.w
    del module.w
    assert again() is None
    module.w = w
    module.eval()
    assert again() is None


@pytest.mark.parametrize("kind", ["slices", "joined", "sums", "computed"])
@pytest.mark.parametrize("learning", [False, True])
def test_weights_that_are_laid_out_otherwise(kind: str, learning: bool) -> None:
    """After warm calls: other memory, strides, shapes and dtypes of the same parameters."""
    module = Parts(kind)
    layer = loop(module)
    x, h = torch.randn(T, B, I), torch.randn(B, H)

    def check() -> None:
        for _ in range(5):
            with torch.set_grad_enabled(learning):
                check_trees(layer(x, h), by_hand(module)(x, h))

    check()
    for parameter in module.parameters():
        parameter.data = parameter.data.t().contiguous().t() if parameter.dim() > 1 else parameter
    check()
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()
    check()
    x = torch.randn(T, I, B).transpose(1, 2)
    check()
    module.kind, module.w.data = "computed", torch.randn(2 * I, 2 * H)[::2]
    check()
    module.w.data = torch.randn(I + 1, 2 * H)
    with pytest.raises(RuntimeError):
        layer(x, h)
    module.w.data = torch.randn(I, 2 * H)
    check()
    with torch.no_grad():
        module.u = None  # type: ignore[assignment]
        with pytest.raises(TypeError):
            layer(x, h)
        module.u = param(H, 2 * H)
    check()


# -- what a call takes -----------------------------------------------------------------------------


def masked_by_hand(
    module: Any, mask: Tensor, resets: Tensor | None = None, reverse: bool = False
) -> Run:
    """The Python loop with a mask; resets restore zeros."""

    def run(x: Tensor, state: Any) -> tuple[Any, Any]:
        outputs: list[Any] = [None] * len(x)
        starts = resets
        pending = torch.zeros(x.shape[1], dtype=torch.bool)
        for t in reversed(range(len(x))) if reverse else range(len(x)):
            valid = mask[t].unsqueeze(-1)
            if starts is not None:
                enters = (pending if reverse else starts[t]) & mask[t]
                state = tuple(torch.where(enters.unsqueeze(-1), 0.0, s) for s in state)
                pending = torch.where(mask[t], starts[t], pending)
            clean = torch.where(valid, x[t], 0.0)
            y, new = module(clean, state)
            state = tuple(torch.where(valid, a, b) for a, b in zip(new, state, strict=True))
            outputs[t] = torch.where(valid, y, 0.0)
        return torch.stack(outputs), state

    return run


LENGTHS = torch.tensor([6, 0, 3, 5])
MASK = torch.arange(T).unsqueeze(1) < LENGTHS
HOLES = MASK & (torch.arange(T * B).reshape(T, B) % 3 != 1)
RESETS = torch.arange(T * B).reshape(T, B) % 4 == 2
HOOKED = "has hooks"


@pytest.mark.sample(4)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", [Concatenated, BeforeAndAfter])
def test_masks_resets_and_direction(kind: type[nn.Module], reverse: bool, fused: bool) -> None:
    """Both roads; what lies under a mask has no influence, not even NaN."""
    module = kind()
    layer = loop(module)
    if not fused:
        module.register_forward_hook(lambda *_: None)
    x, state = inputs_of(module)
    dirty = torch.where(HOLES.unsqueeze(-1), x, torch.nan)
    for flags, mask in (
        ({}, torch.ones(T, B, dtype=torch.bool)),
        ({"lengths": LENGTHS}, MASK),
        ({"mask": HOLES, "resets": RESETS}, HOLES),
        ({"mask": HOLES, "lengths": LENGTHS}, HOLES),
    ):
        values = dirty if mask is HOLES else x
        resets = RESETS if "resets" in flags else None
        hand = masked_by_hand(module, mask, resets, reverse)
        expected = results(hand, module, torch.where(mask.unsqueeze(-1), x, 0.0), state)
        for _ in range(3):
            run = lambda x, s: layer(x, s, reverse=reverse, **flags)  # noqa: B023,E731
            alike(results(run, module, values, state), expected)
        assert layer.engine.name == ("cpu" if fused else "torch"), layer.engine.reason
        assert fused or HOOKED in layer.engine.reason


@pytest.mark.parametrize("fused", [True, False])
def test_a_state_of_your_own_is_restored(fused: bool) -> None:
    module = Concatenated()
    layer = loop(module)
    if not fused:
        module.register_forward_hook(lambda *_: None)
    x, state = inputs_of(module)
    ones = tuple(torch.ones(H) * k for k in (1, 2))
    resets = torch.zeros(T, B, dtype=torch.bool)
    resets[2] = True
    for _ in range(3):
        output, last = layer(x, state, resets=resets, reset_state=ones)
        tail, end = by_hand(module)(x[2:], tuple(t.expand(B, H) for t in ones))
        check_trees((output[2:], last), (tail, end))


def test_batch_first() -> None:
    module = ReadOut()
    layer = loop(module, batch_first=True)
    x, h = inputs_of(module)
    expected, last = by_hand(module)(x, h)
    output, end = layer(x.transpose(0, 1), h)
    for name in ("p", "e", "x"):
        check_trees(output[name], expected[name].transpose(0, 1))
    check_trees(end, last)
    assert layer.engine.name == "cpu", layer.engine.reason


@pytest.mark.parametrize("kind", [OfTorchGRU, Concatenated])
def test_without_a_batch(kind: Any) -> None:
    module = kind()
    if kind is Concatenated:

        def forward(x: Tensor, state: Any) -> Any:
            h, c = state
            h, c = lstm(module.lin(torch.cat([h, x], -1)).chunk(4, -1), c)
            return h, (h, c)

        module.forward = forward
    layer = loop(module)
    x, state = inputs_of(module)
    x, state = x[:, 0], pytree.tree_map(lambda t: t[0], state)
    for _ in range(3):
        alike(results(layer, module, x, state), results(by_hand(module), module, x, state))
    assert layer.engine.name == "cpu", layer.engine.reason
    with_mask = layer(x, state, mask=torch.tensor([True] * 4 + [False] * 2))
    check_trees(with_mask[1], layer(x[:4], state)[1])


@pytest.mark.parametrize("module", [nn.GRUCell(I, H), nn.LSTMCell(I, H), nn.RNNCell(I, H)])
def test_cells_of_torch_themselves(module: nn.Module) -> None:
    module = module.double()
    layer = loop(module)
    start = torch.randn(B, H)
    state: Any = (start, start * 0.5) if isinstance(module, nn.LSTMCell) else start

    def pair(x: Tensor, state: Any) -> Any:
        new = module(x, state)
        return pytree.tree_leaves(new)[0], new

    x = torch.randn(T, B, I)
    alike(results(layer, module, x, state), results(by_hand(pair), module, x, state))
    assert layer.engine.name == "cpu", layer.engine.reason


def test_wrong_arguments() -> None:
    layer = loop(OfTorchGRU())
    x, h = torch.zeros(T, B, I), torch.zeros(B, H)
    for call, says in (
        (lambda: loop(lambda x, s: (x, s)), "module: given function"),
        (
            lambda: anycell.torch.RNN(OfTorchGRU(), I, H),
            "cell: given OfTorchGRU.*is for anycell.torch.loop",
        ),
        (lambda: layer(x[:0], h), "x: given torch.float64.*one step or more"),
        (lambda: layer((x, x[1:]), h), "the same of all tensors of x"),
        (lambda: layer(x, h, lengths=[7, 1, 1, 1]), "lengths: given a length of 7"),
        (lambda: layer(x, h, mask=torch.ones(B, T, dtype=torch.bool)), "mask: given torch.bool"),
        (lambda: layer(x, h, reset_state=(h, h)), "reset_state: given"),
        (lambda: loop(nn.Linear(I, H))(x, h), "takes 2 positional arguments"),
        (lambda: loop(nn.Bilinear(I, H, 3))(x, (h, h)), "must be Tensor|expected"),
        (lambda: scan(1, h, x), "step: given int 1"),
        (lambda: scan(lambda c, x: (c, x), h, x, dim=3), "dim: given 3"),
    ):
        with pytest.raises((TypeError, ValueError), match=says):
            call()


def test_a_module_that_returns_something_else() -> None:
    class Odd(One):
        def forward(self, x: Tensor, h: Tensor) -> Any:
            return h, h, h

    with pytest.raises(TypeError, match="module: given one that returns tuple"):
        loop(Odd())(torch.zeros(T, B, I), torch.zeros(B, H))


# -- what is read again ----------------------------------------------------------------------------


class Switched(One):
    """With things that a program may change between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.drop = nn.Linear(I + H, H), nn.Dropout(0.5)
        self.gain, self.rates = 1.0, [1.0, 2.0]
        self.plain = torch.ones(H)

    def forward(self, x: Tensor, h: Tensor) -> Any:
        new = torch.tanh(self.lin(torch.cat([x, h], -1))) * self.plain * self.rates[0]
        h = self.gain * self.drop(new) + 0.5 * h
        return h, h


@pytest.mark.more
def test_a_module_that_changes() -> None:
    """Attributes, lists in place, train and eval, weights of every kind of change."""
    module = Switched().eval()
    layer = loop(module)
    x, h = inputs_of(module)

    def check() -> None:
        for _ in range(4):
            alike(results(layer, module, x, h), results(by_hand(module), module, x, h))
        assert layer.engine.name == "cpu", layer.engine.reason

    check()
    module.gain = 0.7
    check()
    module.rates[0] = 0.3
    check()
    module.plain = torch.rand(H)
    check()
    with torch.no_grad():
        module.lin.weight.mul_(0.5)
    check()
    module.lin.weight = param(H, I + H)
    check()
    module.lin.bias = None
    check()
    module.lin = nn.Linear(I + H, H)
    check()
    module.lin.weight.requires_grad_(False)
    check()
    nn.utils.parametrizations.weight_norm(module.lin)
    check()
    module.train()
    output, _ = layer(x, h)
    assert not torch.equal(output, layer(x, h)[0])  # drops
    module.eval()
    check()


def test_tensors_of_an_object_are_read() -> None:
    """As those of a module: what replaces them is seen, and they have gradients."""

    class Holding(OfTorchGRU):
        def __init__(self) -> None:
            super().__init__()
            self.held = SimpleNamespace(gain=torch.ones(H))

        def forward(self, x: Tensor, h: Tensor) -> Any:
            h = self.cell(x, h) * self.held.gain
            return h, h

    module = Holding()
    layer = loop(module)
    x, h = inputs_of(module)
    for _ in range(3):
        gain = module.held.gain = torch.rand(H).requires_grad_()
        made, expected = (run(x, h)[0] for run in (layer, by_hand(module)))
        check_trees(made, expected)
        slopes = [torch.autograd.grad(output.sin().sum(), gain) for output in (made, expected)]
        check_trees(*slopes)
        assert layer.engine.name == "cpu", layer.engine.reason


GAIN = 1.0


def test_a_variable_of_the_file_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Global(OfTorchGRU):
        def forward(self, x: Tensor, h: Tensor) -> Any:
            h = self.cell(x, h) * GAIN
            return h, h

    module = Global()
    layer = loop(module)
    x, h = inputs_of(module)
    for gain in (1.0, 0.5):
        monkeypatch.setitem(globals(), "GAIN", gain)
        for _ in range(3):
            check_trees(layer(x, h), by_hand(module)(x, h))
        assert layer.engine.name == "cpu", layer.engine.reason


def test_a_number_that_changes_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not read again and again."""
    monkeypatch.setattr(sys.modules["anycell.torch.loops"], "_RESTLESS", 3)
    module = Switched().eval()
    layer = loop(module)
    x, h = inputs_of(module, steps=3)
    for k in range(5):
        module.gain = 1.0 + k
        check_trees(layer(x, h), by_hand(module)(x, h))
    assert "such as a buffer" in layer.engine.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.sample(1)
def test_dtype_moves(dtype: torch.dtype) -> None:
    module = Concatenated()
    layer = loop(module)
    x, state = inputs_of(module)
    layer(x, state)
    layer.to(dtype)
    x, state = pytree.tree_map(lambda t: t.to(dtype), (x, state))
    for _ in range(3):
        output, _ = layer(x, state)
        expected, _ = by_hand(copy.deepcopy(module).double())(
            x.double(), pytree.tree_map(Tensor.double, state)
        )
        assert output.dtype is dtype
        limit = LIMITS[str(dtype).removeprefix("torch."), "forward"]
        assert error(output.detach().double(), expected.detach()) <= limit
    assert layer.engine.name == "cpu", layer.engine.reason


def test_other_weights_for_a_call() -> None:
    """``torch.func.functional_call`` puts them in, with gradients."""
    module = Concatenated()
    layer = loop(module)
    x, state = inputs_of(module)
    layer(x, state)
    weights = {n: torch.randn_like(p).requires_grad_() for n, p in layer.named_parameters()}
    other = copy.deepcopy(module)
    with torch.no_grad():
        for name, p in other.named_parameters():
            p.copy_(weights[f"module.{name}"])
    for _ in range(3):
        output, _ = functional_call(layer, weights, (x, state))
        gradients = torch.autograd.grad(output.sin().sum(), list(weights.values()))
    expected, _ = by_hand(other)(x, state)
    known = torch.autograd.grad(expected.sin().sum(), list(other.parameters()))
    check_trees(output, expected)
    check_trees(gradients, known)
    assert layer.engine.name == "cpu", layer.engine.reason


def test_copies_pickles_and_state_dicts() -> None:
    module = Concatenated()
    layer = loop(module)
    x, state = inputs_of(module)
    expected = layer(x, state)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    stream = io.BytesIO()
    torch.save(layer.state_dict(), stream)
    stream.seek(0)
    fresh = loop(Concatenated())
    fresh.load_state_dict(torch.load(stream))
    for other in (*copies, fresh):
        check_trees(other(x, state), expected)
        assert other.engine.name == "cpu", other.engine.reason
    assert {name.removeprefix("module.") for name in layer.state_dict()} == {*module.state_dict()}


# -- random numbers --------------------------------------------------------------------------------


class Dropped(Concatenated):
    """Dropout of x, of h and of the candidate; zoneout of c."""

    def forward(self, x: Tensor, state: Any) -> Any:
        h, c = state
        joined = torch.cat([F.dropout(x, 0.2, self.training), F.dropout(h, 0.3, self.training)], 1)
        new, after = lstm(self.lin(joined).chunk(4, 1), c)
        if self.training:
            after = torch.where(torch.rand_like(c) < 0.25, c, after)
        return new, (new, after)


def test_dropout_is_exact_in_evaluation_and_seeded_in_training() -> None:
    module = Dropped()
    layer = loop(module)
    x, state = inputs_of(module)
    torch.manual_seed(1)
    one = layer(x, state)
    assert layer.engine.name == "cpu", layer.engine.reason
    for _ in range(2):
        torch.manual_seed(1)
        again = layer(x, state)
        check_trees(again, one)
    assert not torch.equal(layer(x, state)[0], one[0])
    module.eval()
    alike(results(layer, module, x, state), results(by_hand(module), module, x, state))


def test_masks_of_dropout_have_their_distribution() -> None:
    """Each step, row and unit has its own, and as many as said."""

    class Mean(One):
        def forward(self, x: Tensor, h: Tensor) -> Any:
            kept = F.dropout(torch.ones_like(h), 0.25, self.training)
            return kept, 0.5 * h + kept

    layer = loop(Mean())
    for _ in range(3):
        kept, _ = layer(torch.zeros(50, 40, 1), torch.zeros(40, H))
        assert layer.engine.name == "cpu", layer.engine.reason
        assert {*kept.unique().tolist()} == {0.0, 1 / 0.75}
        rates = [(kept > 0).double().mean(axis) for axis in ((1, 2), (0, 2), (0, 1))]
        for rate in rates:
            assert (rate - 0.75).abs().max() < 0.15
            assert rate.std() > 0


# -- what cannot be read ---------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


HERE = []
STEPS: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], str]] = {
    "branch": (lambda m, x, h: h * 2 if h.mean() > 0 else h, "Python reads the value"),
    "number": (lambda m, x, h: h * h.sum().item(), "Python reads the value"),
    "statistics": (lambda m, x, h: h - h.mean(0), "the sum over the rows of the batch"),
    "batch norm": (lambda m, x, h: m.norm(h), "batch normalization in training"),
    "buffer": (lambda m, x, h: h + m.count.add_(1), "edits a tensor in place"),
    "new buffer": (
        lambda m, x, h: (setattr(m, "count", m.count + 1), h)[1],
        "assigns a new tensor",
    ),
    "argument": (lambda m, x, h: h + x.mul_(2).sum(-1, True), "edits a tensor in place"),
    "attribute": (lambda m, x, h: (setattr(m, "seen", h), h)[1], "the step changes seen"),
    "list": (lambda m, x, h: (HERE.append(h), h)[1], "the step changes a list"),
    "function": (lambda m, x, h: Doubled.apply(h), "calls a torch.autograd.Function"),
    "fewer bits": (lambda m, x, h: h.float().double(), "from float64 to float32"),
    "matrix of x": (
        lambda m, x, h: torch.einsum("bi,bij->bj", h, x[:, :1, None] * m.u),
        "the matrix of this product",
    ),
    "attention": (lambda m, x, h: (h @ h.T).softmax(-1) @ h, "two axes|mixes the rows"),
    "no rule": (lambda m, x, h: torch.special.bessel_j0(h), "special_bessel_j0"),
    "sorted": (lambda m, x, h: h.sort(-1).values, "aten.sort"),
    "size of the batch": (lambda m, x, h: h / len(h), "the size of the batch"),
    "elsewhere": (lambda m, x, h: h * m.held.there, "no parameter, buffer or attribute"),
    "shape of values": (lambda m, x, h: h + h[h > 0].sum(), "shape depends on values"),
    "size of the call": (lambda m, x, h: h * 2 if len(h) > 2 else h, "else for another batch"),
    "autocast inside": (lambda m, x, h: autocast_inside(m, h), "is converted|differs by"),
}


def autocast_inside(m: Any, h: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (h.float() @ m.u.float()).double()


def no_gradient(h: Tensor) -> Tensor:
    with torch.no_grad():
        return h * 2


class Holder:
    there = torch.ones(())


class Refusing(One):
    def __init__(self, step: Any) -> None:
        super().__init__()
        self.lin, self.norm, self.u = nn.Linear(I + H, H), nn.BatchNorm1d(H), param(H, H)
        self.register_buffer("count", torch.zeros(()))
        self.step, self.held = step, Holder

    def forward(self, x: Tensor, h: Tensor) -> Any:
        h = self.step(self, x, torch.tanh(self.lin(torch.cat([x, h], -1))))
        return h, h


@pytest.mark.parametrize("name", STEPS)
def test_refusals_say_why_and_run_the_loop(name: str) -> None:
    step, says = STEPS[name]
    one = Refusing(step)
    two = copy.deepcopy(one)
    x, h = inputs_of(one)
    layer = loop(one)
    HERE.clear()
    made = layer(x.clone(), h)
    assert layer.engine.name == "torch"
    assert re.search(says, layer.engine.reason), layer.engine.reason
    assert " Instead: " in layer.engine.reason
    assert len(HERE) == (T if name == "list" else 0)
    check_trees(made, by_hand(two)(x.clone(), h))
    for (label, a), b in zip(one.named_buffers(), two.buffers(), strict=True):
        assert torch.equal(a, b), label  # edited as often as by the loop
    assert says in str(layer.explain()) or "|" in says


LINES = {
    "branch",
    "number",
    "buffer",
    "argument",
    "batch norm",
    "statistics",
    "function",
    "no rule",
}


@pytest.mark.parametrize("name", sorted(LINES))
def test_refusals_name_the_line(name: str) -> None:
    step, _ = STEPS[name]
    layer = loop(Refusing(step))
    layer(*inputs_of(layer.module))
    place = f"test_loop.py:{step.__code__.co_firstlineno}: "
    assert layer.engine.reason.startswith(place), layer.engine.reason


@pytest.mark.parametrize(
    "hook", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
def test_hooks_are_called_at_every_step(hook: str) -> None:
    module = OfTorchGRU()
    layer = loop(module)
    x, h = inputs_of(module)
    layer(x, h)
    assert layer.engine.name == "cpu", layer.engine.reason
    calls = []
    handle = getattr(module.cell, hook)(lambda *_: calls.append(1))
    layer(x.requires_grad_(), h)[0].sum().backward()
    assert len(calls) == T
    assert HOOKED in layer.engine.reason
    handle.remove()
    layer(x, h)
    assert layer.engine.name == "cpu", layer.engine.reason


def test_a_reading_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a table with an error."""
    from anycell.torch.reading import read

    monkeypatch.setitem(read.TABLE, torch.ops.aten.tanh, read.TABLE[torch.ops.aten.sigmoid])
    module = OfTorchGRU()
    layer = loop(module)
    x, h = inputs_of(module)
    check_trees(layer(x, h), by_hand(module)(x, h))
    assert "was tried against the step" in layer.engine.reason


# -- torch around it -------------------------------------------------------------------------------


def test_autocast_runs_the_loop() -> None:
    module = Concatenated().float()
    layer = loop(module)
    x, state = inputs_of(module)
    x, state = x.float(), pytree.tree_map(Tensor.float, state)
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = layer(x, state)
        expected, _ = by_hand(module)(x, state)
    assert torch.equal(output, expected)
    assert "autocast" in layer.engine.reason


def test_transformations_run_the_loop() -> None:
    module = Leaky()
    layer = loop(module)
    x, h = inputs_of(module)
    _, tangent = torch.func.jvp(lambda x: layer(x, h)[0], (x,), (torch.ones_like(x),))
    assert "torch.func" in layer.engine.reason
    mapped = torch.vmap(lambda row: layer(row.unsqueeze(1), h[:1])[0], 1)(x)
    assert tangent.shape == (T, B, H)
    assert mapped.shape == (B, T, 1, H)


@pytest.mark.more
def test_second_derivatives() -> None:
    layer = loop(Leaky())
    x, h = torch.randn(5, 1, I, requires_grad=True), torch.randn(1, H, requires_grad=True)
    layer(x, h)
    assert layer.engine.name == "cpu", layer.engine.reason
    assert torch.autograd.gradgradcheck(lambda x, h: layer(x, h), (x, h))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_models_call_it() -> None:
    module = OfTorchGRU()
    layer = loop(module)
    x, h = inputs_of(module)
    compiled = torch.compile(lambda x, h: layer(x * 2, h)[0] + 1, backend="eager")
    check_trees(compiled(x, h), by_hand(module)(x * 2, h)[0] + 1)
    assert layer.engine.name == "cpu", layer.engine.reason


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    module = Concatenated()
    layer = loop(module)
    x, state = inputs_of(module)
    expected = by_hand(module)(x, state)
    with mode():
        for _ in range(3):
            output, last = layer(x, state)
            assert not output.requires_grad
    check_trees((output, last), expected)
    check_trees(layer(x, state), expected)
    assert layer.engine.name == "cpu", layer.engine.reason


def test_training_learns_what_the_loop_learns() -> None:
    one = Normalized()
    two, layer = copy.deepcopy(one), loop(one)
    optimizers = [torch.optim.Adam(m.parameters(), 0.01) for m in (one, two)]
    x, state = inputs_of(one)
    for _ in range(5):
        losses = []
        for run, optimizer in zip((layer, by_hand(two)), optimizers, strict=True):
            optimizer.zero_grad()
            loss = (run(x, state)[0] - 0.3).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert abs(losses[0] - losses[1]) <= LIMITS["float64", "training"] * losses[1]


def test_reading_does_not_draw() -> None:
    """Torch's generator is where it was."""
    module = Dropped().eval()
    x, state = inputs_of(module)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    layer = loop(module)
    for _ in range(3):
        layer(x, state)
    assert torch.equal(torch.rand(3), expected)


def test_explain_shows_the_cell() -> None:
    """Which runs by itself, with the same numbers."""
    layer = loop(OfTorchGRU())
    assert "has been made" in str(layer.explain())
    x, h = inputs_of(layer.module)
    expected, _ = layer(x, h)
    page = str(layer.explain())
    assert "loop(OfTorchGRU) runs on cpu" in page
    text = layer.text
    assert text is not None
    assert all(line in page for line in text.split("\n"))
    kept = anycell.lang.text.from_text(text)
    weights = layer.module.cell
    assert len(kept.states) == 1 and expected.shape == (T, B, weights.hidden_size)


# -- what else a step may have ---------------------------------------------------------------------


class Counting(OfTorchGRU):
    """A counter of whole numbers, and a flag that a state turns off."""

    def start(self, rows: int) -> Any:
        ones = torch.ones(rows, dtype=torch.bool)
        return torch.zeros(rows, dtype=torch.long), ones, torch.randn(rows, H)

    def forward(self, x: Tensor, state: Any) -> Any:
        n, alive, h = state
        new = self.cell(x * (1 + 0.1 * n.unsqueeze(-1)), h)
        h = torch.where((alive & (n % 3 != 1)).unsqueeze(-1), new, h)
        return h + n.unsqueeze(-1), (n + 1, alive & (new[:, 0] < 0.6), h)


class ClockOfAll(OfTorchGRU):
    """A counter without rows."""

    def start(self, rows: int) -> Any:
        return torch.tensor(0), torch.randn(rows, H)

    def forward(self, x: Tensor, state: Any) -> Any:
        n, h = state
        h = torch.where(n % 2 == 0, self.cell(x, h), h)
        return h, (n + 1, h)


class Locked(OfTorchGRU):
    """A mask of dropout for all steps, kept by the module."""

    def forward(self, x: Tensor, h: Tensor) -> Any:
        h = self.cell(x, h * self.locked)
        return h, h


class Picked(OfTorchGRU):
    """Units in another order, by numbers and by a buffer; sums so far; a queue that moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.tensor([1, 0, 2, 4, 3, 5]))

    def forward(self, x: Tensor, h: Tensor) -> Any:
        h = 0.3 * h[:, [5, 0, 1, 2, 3, 4]] + h[:, self.order].tanh() + 0.1 * h.cumsum(-1)
        h = self.cell(x, h.roll(1, -1) + h.logsumexp(-1, keepdim=True))
        h[:, -1] = x.sum(-1)
        return h, h


@pytest.mark.parametrize("kind", [Counting, ClockOfAll, Locked, Picked])
@pytest.mark.sample(every=3)
def test_further_steps(kind: Any) -> None:
    module = kind()
    module.locked = (torch.rand(B, H) > 0.3).double()
    layer = loop(module)
    x, state = inputs_of(module)
    for _ in range(3):
        alike(results(layer, module, x, state), results(by_hand(module), module, x, state))
    assert layer.engine.name == "cpu", layer.engine.reason


def test_counters_are_held_under_a_mask() -> None:
    module = Counting()
    layer = loop(module)
    x, state = inputs_of(module)
    _, (n, alive, h) = layer(x, state, lengths=LENGTHS)
    assert n.tolist() == LENGTHS.tolist()
    for k, length in enumerate(LENGTHS.tolist()):
        one = pytree.tree_map(lambda t: t[k : k + 1], state)  # noqa: B023
        last = by_hand(module)(x[:length, k : k + 1], one)[1] if length else one
        check_trees((alive[k : k + 1], h[k : k + 1]), last[1:])
    assert layer.engine.name == "cpu", layer.engine.reason


def test_one_hot_ids_and_numbers_of_a_step() -> None:
    """x may have a number for each step, beside those of rows."""

    class Forced(One):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = nn.GRUCell(7, H), nn.Linear(H, 7)

        def forward(self, x: Any, h: Tensor) -> Any:
            ids, forced = x
            seen = torch.where(forced, F.one_hot(ids, 7).to(h), self.out(h).softmax(-1))
            h = self.cell(seen, h)
            return self.out(h), h

    module = Forced()
    layer = loop(module)
    ids, forced = torch.randint(0, 7, (T, B)), torch.rand(T) < 0.5
    h = torch.randn(B, H)
    expected, last = [], h
    for t in range(T):
        y, last = module((ids[t], forced[t]), last)
        expected.append(y)
    for _ in range(3):
        check_trees(layer((ids, forced), h), (torch.stack(expected), last))
    assert layer.engine.name == "cpu", layer.engine.reason
    masked, _ = layer((ids, forced), h, lengths=LENGTHS)
    check_trees(masked[:, 0], torch.stack(expected)[:, 0])


ORDINARY: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "softplus": lambda m, x, h: F.softplus(3 * h, beta=2.0),
    "softplus up to a threshold": lambda m, x, h: F.softplus(3 * h, beta=2.0, threshold=3.0),
    "zeros around": lambda m, x, h: F.pad(h[:, 1:-1] @ m.u[1:-1, 1:-1], (1, 1)),
    "a number at the end": lambda m, x, h: F.pad(h @ m.u, (-1, 1), value=0.5),
    "batch norm": lambda m, x, h: m.norm(h),
    "a condition on the state": lambda m, x, h: h * (h > x[:, :1]),
    "a condition on x": lambda m, x, h: h + (x[:, :1] > 0),
    "without a gradient": lambda m, x, h: h * no_gradient(h),
    "hardsigmoid": lambda m, x, h: F.hardsigmoid(4 * h),
    "its own dtype": lambda m, x, h: (h * 0.5).to(h.dtype) + x[:, :1].to(m.u),
}


@pytest.mark.parametrize("name", ORDINARY)
@pytest.mark.sample(every=5)
def test_ordinary_things_are_read(name: str) -> None:
    module = Refusing(ORDINARY[name]).eval()
    module.norm.running_mean, module.norm.running_var = torch.randn(H), 1 + torch.rand(H)
    layer = loop(module)
    x, h = inputs_of(module)
    for _ in range(3):
        alike(results(layer, module, x, h), results(by_hand(module), module, x, h))
    assert layer.engine.name == "cpu", layer.engine.reason


@pytest.mark.parametrize("cast", [
    lambda h: h.float(),
    lambda h: h.to(torch.float32),
    lambda h: h * torch.tensor(0.3, dtype=torch.float32),
])  # fmt: skip
def test_a_step_may_name_its_dtype(cast: Callable[[Tensor], Tensor]) -> None:
    """It is tried in float64, where the name would be a cast, or another constant."""
    module = Refusing(lambda m, x, h: cast(h * 0.5)).float()
    layer = loop(module)
    x, h = (t.float() for t in inputs_of(module))
    check_trees(layer(x, h), by_hand(module)(x, h))
    assert layer.engine.name == "cpu", layer.engine.reason


def test_a_state_that_is_detached_has_no_gradient() -> None:
    """As in the loop, where it is None; under a mask the state itself may be returned."""
    module = Refusing(lambda m, x, h: h)
    module.step = lambda m, x, h: m.lin(torch.cat([x, h.detach()], -1)).tanh()
    module.forward = lambda x, h: (module.step(module, x, h),) * 2
    layer = loop(module)
    x, h = inputs_of(module)
    h.requires_grad_()
    for _ in range(3):
        output, _ = layer(x, h)
        assert layer.engine.name == "cpu", layer.engine.reason
        assert torch.autograd.grad(output.sum(), h, allow_unused=True) == (None,)
        _, last = layer(x, h, lengths=[T, 0, 1, 2])
        (gradient,) = torch.autograd.grad(last.sum(), h)
        assert gradient.sum(-1).tolist() == [0, H, 0, 0]


class Counted(One):
    """A state of a tensor, a number of Python and nothing."""

    def forward(self, x: Tensor, state: Any) -> Any:
        h, count, nothing = state
        h = torch.tanh(h + x.sum(-1, True) * count)
        return h, (h, count + 1, nothing)


def test_states_that_are_no_tensors_run_in_the_loop() -> None:
    layer = loop(Counted())
    x, h = inputs_of(layer.module)
    output, last = layer(x, (h, 1, None))
    expected, end = by_hand(layer.module)(x, (h, 1, None))
    check_trees((output, last[0]), (expected, end[0]))
    assert last[1:] == (1 + T, None)
    assert layer.engine.name == "torch" and "the state has int 1" in layer.engine.reason
    with pytest.raises(ValueError, match="with a state or an output int 1"):
        layer(x, (h, 1, None), lengths=[T, 0, 1, 2])
    resets = torch.zeros(T, B, dtype=torch.bool)
    check_trees(layer(x, (h, 1, None), resets=resets)[0], expected)
    made, _ = loop(OfTorchGRU())(x, None)
    assert made.shape == (T, B, H)


class Layers(One):
    """Two layers in one tensor of states, ``[layers, B, H]``."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.GRUCell(I, H), nn.GRUCell(H, H)])

    def start(self, rows: int) -> Any:
        return torch.randn(2, rows, H)

    def forward(self, x: Tensor, state: Tensor) -> Any:
        new = []
        for cell, h in zip(self.cells, state, strict=True):
            new.append(x := cell(x, h))
        return x, torch.stack(new)


@pytest.mark.parametrize("fused", [True, False])
def test_layers_in_one_tensor_of_states(fused: bool) -> None:
    module = Layers()
    layer = loop(module)
    if not fused:
        module.register_forward_hook(lambda *_: None)
    x, state = inputs_of(module)
    for _ in range(3):
        alike(results(layer, module, x, state), results(by_hand(module), module, x, state))
    assert layer.engine.name == ("cpu" if fused else "torch"), layer.engine.reason
    one, start = inputs_of(module, rows=1)
    check_trees(layer(one, start), by_hand(module)(one, start))
    short, end = layer(x, state, lengths=[2] * B)
    check_trees((short[:2], end), by_hand(module)(x[:2], state))
    resets = torch.zeros(T, B, dtype=torch.bool)
    resets[2] = True
    restored = torch.ones(2, B, H)
    output, end = layer(x, state, resets=resets, reset_state=restored)
    check_trees((output[2:], end), by_hand(module)(x[2:], restored))


class Beside(One):
    def __init__(self) -> None:
        super().__init__()
        self.of_x, self.of_h = nn.Linear(I, 4 * H), nn.Linear(H, 4 * H)
        self.norm, self.norm_h = nn.LayerNorm(4 * H), nn.LayerNorm(4 * H)

    def forward(self, x: Tensor, h: Tensor) -> Any:
        parts = (self.norm(self.of_x(x)) + self.norm_h(self.of_h(h))).chunk(4, -1)
        a, b, c, d = map(torch.sigmoid, parts)
        h = torch.tanh(a * b + c * h) * d
        return h, h


class Joined(One):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(I + H, H)

    def forward(self, x: Tensor, h: Tensor) -> Any:
        h = torch.tanh(self.lin(torch.cat([x, h], -1)))
        return h, h


def test_gates_that_are_neighbours_in_what_torch_computes_are_one() -> None:
    layer = loop(Beside())
    x, h = inputs_of(layer.module)
    check_trees(layer(x, h), by_hand(layer.module)(x, h))
    assert len(layer._readings.last.reading._merged) == 1


@pytest.mark.parametrize(
    ("kind", "steps", "rows", "grad", "read"),
    [
        (OfTorchGRU, 1, B, True, True),
        (OfTorchRNN, 1, B, True, False),
        (OfTorchRNN, 2, B, True, True),
        (Joined, 2, B, True, False),
        (Joined, 3, B, True, True),
        (OfTorchRNN, 1, 4000, True, True),
        (Beside, 1, B, True, False),  # of as many operations as are read, but two beside the kernel
        (Beside, 2, B, True, True),
        (OfTorchRNN, 1, B, False, True),
    ],
)
def test_few_steps_are_the_module(kind: Any, steps: int, rows: int, grad: bool, read: bool) -> None:
    """Steps of few operations and few numbers, with gradients."""
    layer = loop(kind())
    x, state = inputs_of(layer.module, steps=steps, rows=rows)
    for other in (grad, not grad, grad):
        with torch.set_grad_enabled(other):
            check_trees(layer(x, state), by_hand(layer.module)(x, state))
    assert ("so few steps take less time" in layer.engine.reason) != read
    assert (layer.engine.name == "cpu") == read, layer.engine.reason


@pytest.mark.parametrize("batch_first", [False, True])
def test_warm_calls_of_few_steps_are_only_the_module(
    monkeypatch: pytest.MonkeyPatch, batch_first: bool
) -> None:
    """As long as a call is like an earlier one: else it is looked at."""
    module, ordinary = OfTorchRNN(), list[Any]()
    layer = loop(module, batch_first)
    monkeypatch.setattr(loops, "_call", functools.partial(run_counted, ordinary, loops._call))
    x, h = torch.randn(1, B, I), torch.randn(B, H)

    def run(x: Tensor, h: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        output, last = layer(x.transpose(0, 1) if batch_first else x, h, **more)
        return output.transpose(0, 1) if batch_first else output, last

    def check(looked_at: bool, x: Tensor = x, **more: Any) -> None:
        ordinary.clear()
        check_trees(run(x, h, **more), by_hand(layer.module)(x, h))
        assert bool(ordinary) == looked_at

    check(True)
    for _ in range(2):
        check(False, torch.randn(1, B, I))
        assert "so few steps" in layer.engine.reason
    alike(results(run, module, x, h), results(by_hand(module), module, x, h))
    check(False)
    check(True, reverse=True)
    with torch.no_grad():
        check(True)
    assert layer.engine.name == "cpu"
    check(True, torch.randn(2, B, I))
    layer.module = OfTorchRNN()
    check(True)
    check(False)
    layer.module.extra = 1.0  # whatever is around it
    check(False)
    hook = layer.register_forward_hook(lambda *call: (2.0 * call[-1][0], call[-1][1]))
    ordinary.clear()
    assert torch.equal(run(x, h)[0], 2.0 * by_hand(layer.module)(x, h)[0]) and not ordinary
    hook.remove()
    check(False)


@pytest.mark.parametrize("batch_first", [False, True])
def test_warm_calls_of_few_steps_with_trees(
    monkeypatch: pytest.MonkeyPatch, batch_first: bool
) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(H))

        def forward(self, x: Any, state: Any) -> Any:
            h = torch.tanh(x["a"] + x["b"] * state["h"][0] * self.weight)
            return {"y": (h, 2.0), "none": None}, {"h": [h]}

    layer, shape = loop(Nested(), batch_first), (B, 2, H) if batch_first else (2, B, H)
    x, state = {"a": torch.randn(shape), "b": torch.randn(shape)}, {"h": [torch.randn(B, H)]}
    first, made = layer(x, state), list[Any]()
    monkeypatch.setattr(loops, "_call", functools.partial(run_counted, made, loops._call))
    for _ in range(2):
        again = layer(x, state)
        assert "so few steps" in layer.engine.reason and not made
        assert pytree.tree_structure(again) == pytree.tree_structure(first)
        assert again[0]["y"][1] == first[0]["y"][1] == 2.0 and again[0]["y"][0].shape == shape
        check_trees((again[0]["y"][0], again[1]), (first[0]["y"][0], first[1]))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("scanned", [False, True])
def test_batches_without_rows(scanned: bool, train: bool) -> None:
    """First, and after calls that were recorded and replayed; other calls stay as they are."""
    module = Concatenated()
    layer, plain = loop(module), by_hand(module)

    def step(state: Any, x: Tensor) -> Any:
        output, state = module(x, state)
        return state, output

    for rows in (0, B, B, B, B, 0, 0, B):
        x, state = inputs_of(module, rows=rows)
        with torch.set_grad_enabled(train):
            made = scan(step, state, x)[::-1] if scanned else layer(x, state)
        check_trees(made, plain(x, state))
        why = explain_scan(step, state, x) if scanned else layer.engine.reason
        assert ("fused kernel" if rows else "the batch has no rows") in why
        if train:
            gradients = torch.autograd.grad(made[0].sum(), [*module.parameters()])
            assert all(bool(gradient.any()) == bool(rows) for gradient in gradients)


@pytest.mark.parametrize("other", [torch.sin, lambda h: h * 0.5], ids=["operation", "number"])
def test_a_branch_on_a_larger_batch_than_the_trial(other: Any) -> None:
    """Read for all batches on its one side, in any order."""

    class Branched(OfTorchGRU):
        def forward(self, x: Tensor, h: Tensor) -> Any:
            h = self.cell(x, h)
            h = other(h) if len(x) * H > 50 else h * 0.25
            return h, h

    module = Branched()
    for sizes in ((4, 40, 6, 40, 4), (40, 6)):
        layer = loop(module)
        for rows in sizes:
            x, h = inputs_of(module, rows=rows)
            check_trees(layer(x, h), by_hand(module)(x, h))
            assert layer.engine.name == ("torch" if rows == 40 else "cpu"), layer.engine.reason
            said = re.search("batch.* Instead: compute each row from itself", layer.engine.reason)
            assert bool(said) == (rows == 40)


def test_hardsigmoid_in_float32() -> None:
    module = Refusing(ORDINARY["hardsigmoid"]).eval().float()
    layer = loop(module)
    x, h = (t.float() for t in inputs_of(module))
    output, _ = layer(x, h)
    expected, _ = by_hand(copy.deepcopy(module).double())(x.double(), h.double())
    assert error(output.detach(), expected.detach()) <= LIMITS["float32", "forward"]
    assert layer.engine.name == "cpu", layer.engine.reason


@pytest.mark.parametrize(("file", "place"), [("<stdin>", "<stdin>:1: "), ("<string>", "")])
def test_a_step_that_was_typed(file: str, place: str) -> None:
    """Typed in a console it has a line; made from text it has none, and the reason no colon."""
    names: dict[str, Any] = {}
    code = compile("step = lambda x, h: (h, h * 2 if h.sum() > 0 else h)", file, "exec")
    exec(code, names)

    class Typed(nn.Module):
        forward = staticmethod(names["step"])

    layer = loop(Typed())
    layer(torch.ones(3, 2, 4), torch.ones(2, 4))
    said = re.sub(r"\S*test_loop.py:\d+: ", "", layer.engine.reason)
    assert said.startswith(f"{place}Python reads the value of a tensor")


@pytest.mark.parametrize("steps", [1, T])
def test_hooks_of_all_modules_see_warm_loops(steps: int) -> None:
    layer, seen = loop(OfTorchRNN()), list[Any]()
    x, h = inputs_of(layer.module, steps=steps)
    for _ in range(4):
        layer(x, h)
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        check_trees(layer(x, h), by_hand(layer.module)(x, h))
    finally:
        hook.remove()
    assert layer in seen


def test_constants_of_calls_without_gradients_serve_those_with_gradients() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(H))

        def forward(self, x: Tensor, h: Tensor) -> Any:
            h = torch.tanh(x * torch.arange(1.0, H + 1.0, dtype=x.dtype) * self.weight + h)
            return h, h

    module = Shifted()
    layer, x, h = loop(module), torch.randn(T, B, H), torch.randn(B, H)
    with torch.inference_mode():
        for _ in range(3):
            layer(x, h)
    alike(results(layer, module, x, h), results(by_hand(module), module, x, h))
