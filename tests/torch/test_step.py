"""``RNNCell``: one step of any cell, against the same step in operations of torch."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from processes import python
from roads import ROADS
from tolerances import assert_close

torch = pytest.importorskip("torch")

from torch_layers import CELLS, by_name  # noqa: E402

import anycell.torch as at  # noqa: E402
from anycell import cells  # noqa: E402
from anycell.layer import heuristics  # noqa: E402
from anycell.plan import plan  # noqa: E402
from anycell.torch.operators import functional  # noqa: E402

Tensor = torch.Tensor
Results = dict[str, Tensor]


def step(module: Any, *arguments: Any) -> Results:
    """New states of a step, and all gradients."""
    torch.manual_seed(0)  # of random masks
    new = module(*arguments)
    new = new if isinstance(new, tuple) else (new,)
    leaves = {name: p for name, p in module.named_parameters() if p.requires_grad}
    given = [t for a in arguments for t in (a if isinstance(a, tuple) else (a,))]
    leaves |= {f"argument {i}": t for i, t in enumerate(given) if t is not None and t.requires_grad}
    total = sum((i + 1) * s.square().sum() for i, s in enumerate(new))
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    gradients = dict(zip(leaves, found, strict=True))
    return {f"state {i}": s.detach() for i, s in enumerate(new)} | gradients


in_operations = mock.patch.object(functional, "fused_plan", lambda *_: "not in this test")


@in_operations
def by_torch(module: Any, *arguments: Any) -> Results:
    """The same in operations of torch."""
    return step(module, *arguments)


def close(ours: Results, theirs: Results) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        other = theirs[name]
        if value is None or other is None:
            assert not any(t.any() for t in (value, other) if t is not None), name
            continue
        dtype = str(value.dtype).removeprefix("torch.")
        assert_close(value, other, dtype, "gradient", name)


def arguments_of(module: Any, rows: int, state: bool, gradient: bool = True) -> tuple[Any, ...]:
    dtype = module.weight_ih.dtype
    shapes = [module.sizes[s.size] for s in module.cell.states] if state else []
    x = torch.randn(rows, module.input_size, dtype=dtype, requires_grad=gradient)
    states = tuple(torch.randn(rows, size, dtype=dtype, requires_grad=gradient) for size in shapes)
    given: tuple[Any, ...] = (x, (states if len(states) > 1 else states[0]) if state else None)
    if module.cell.static is not None:
        given += (torch.randn(rows, module.hidden_size, dtype=dtype, requires_grad=gradient),)
    return given


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", CELLS, **by_name)
@pytest.mark.sample(every=7)
def test_every_cell(kind: Any, dtype: Any, runs: list[Any]) -> None:
    """On both sides of the rows by which weights are packed."""
    sizes = (5, 1), (5, 0), (33, 50), (33, heuristics.FEW_ROWS), (33, heuristics.FEW_ROWS + 1)
    for hidden, rows in sizes[: 5 if dtype is torch.float32 else 1]:
        module = at.RNNCell(kind, 3, hidden, dtype=dtype)
        for state in (False, True):
            for training in (False, True):
                module.train(training)
                given = arguments_of(module, rows, state)
                close(step(module, *given), by_torch(module, *given))
    operators = kind in (cells.LSTM, cells.GRU, cells.RNN, cells.RNN(nonlinearity="relu"))
    few = heuristics.recurrent_alone(plan(kind, 5, str(dtype).removeprefix("torch.")))
    wanted = {False, few} if dtype is torch.float32 else {few}
    assert set(map(ROADS["a single step of few rows"], runs)) == (set() if operators else wanted)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [cells.JANET, cells.PeepholeLSTM, cells.LayerNormGRU], **by_name)
@pytest.mark.sample(every=3)
def test_which_gradients_are_wanted(kind: Any, bias: bool) -> None:
    module = at.RNNCell(kind, 4, 5, bias=bias)
    for wanted in ("weights", "state", "x", *["bias"] * (bias and module.cell.bias)):
        given = arguments_of(module, 3, True, gradient=False)
        for name, p in module.named_parameters():
            p.requires_grad_(wanted in ("weights", name.partition("_")[0]))
        given[0].requires_grad_(wanted == "x")
        for s in given[1] if isinstance(given[1], tuple) else (given[1],):
            s.requires_grad_(wanted == "state")
        results = step(module, *given)
        assert len(results) > len(module.cell.states)
        close(results, by_torch(module, *given))


def test_without_gradients() -> None:
    module = at.RNNCell(cells.PeepholeLSTM, 4, 5).eval()
    given = arguments_of(module, 3, True)
    with_gradients = module(*given)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            new = module(*given)
        assert all(torch.equal(a, b) for a, b in zip(new, with_gradients, strict=True))
        assert not any(s.requires_grad for s in new)


def turned(t: Tensor) -> Tensor:
    """The same numbers, columns first."""
    return t.t().contiguous().t()


def shifted(t: Tensor) -> Tensor:
    """The same numbers, at an address between those of numbers."""
    bytes_ = torch.empty(t.numel() * t.element_size() + 1, dtype=torch.uint8)
    places = bytes_[1:].view(torch.uint8)
    moved = torch.frombuffer(places.numpy(), dtype=t.dtype).view(t.shape)
    return moved.copy_(t)


@pytest.mark.parametrize("awkward", [turned, shifted])
def test_tensors_that_lie_otherwise(awkward: Callable[[Tensor], Tensor]) -> None:
    """What kernels cannot read is copied."""
    module = at.RNNCell(cells.PeepholeLSTM, 4, 5)
    x, state = arguments_of(module, 3, True, gradient=False)
    wanted = step(module, x, state)
    results = [step(module, awkward(x), state), step(module, x, tuple(map(awkward, state)))]
    for name in ("weight_ih", "weight_hh"):
        other = copy.deepcopy(module)
        getattr(other, name).data = awkward(getattr(other, name).data)
        results.append(step(other, x, state))
    for result in results:
        for name, value in wanted.items():
            assert_close(result[name], value, "float32", "gradient", name)


def test_a_weight_of_another_shape_is_refused() -> None:
    module = at.RNNCell(cells.PeepholeLSTM, 4, 5)
    module.weight_hh.data = torch.randn(20, 4)
    with pytest.raises(ValueError, match="weight_hh: given shape"):
        module(torch.randn(3, 4))


def test_sixteen_bits() -> None:
    module = at.RNNCell(cells.PeepholeLSTM, 4, 5, dtype=torch.bfloat16)
    given = arguments_of(module, 3, True)
    exact = at.RNNCell(cells.PeepholeLSTM, 4, 5)
    exact.load_state_dict(module.state_dict())
    wanted = exact(given[0].float(), tuple(s.float() for s in given[1]))
    assert_close(module(*given)[0].detach().float(), wanted[0].detach(), "bfloat16", "forward")


def test_gradients_that_arrive_in_other_forms() -> None:
    """Expanded, turned, negated, and at one state only."""
    module = at.RNNCell(cells.PeepholeLSTM, 4, 5)
    given = arguments_of(module, 3, True)
    leaves = [given[0], *given[1], *module.parameters()]
    arriving = torch.randn(5, 3)
    for forms in (
        (torch.ones(()).expand(3, 5), None),
        (None, arriving.t()),
        (arriving.t(), torch._neg_view(arriving.t())),
    ):
        found = []
        for how in (contextlib.nullcontext(), in_operations):
            with how:
                new = module(*given)
            pairs = [(s, g) for s, g in zip(new, forms, strict=True) if g is not None]
            outputs, gradients = zip(*pairs, strict=True)
            found.append(torch.autograd.grad(outputs, leaves, gradients, allow_unused=True))
        ours, theirs = (dict(zip(map(str, range(len(g))), g, strict=True)) for g in found)
        close(ours, theirs)


def test_derivatives_of_derivatives() -> None:
    for kind in (cells.PeepholeLSTM, cells.LayerNormGRU, cells.EALSTM):
        module = at.RNNCell(kind, 2, 5, dtype=torch.float64)
        given = arguments_of(module, 2, True)
        flat = [t for a in given for t in (a if isinstance(a, tuple) else (a,))]
        count = len(module.cell.states)

        def run(x: Any, *rest: Any, module: Any = module, count: int = count) -> Any:
            states, static = rest[:count], rest[count:]
            return module(x, states if count > 1 else states[0], *static)

        assert torch.autograd.gradcheck(run, flat, fast_mode=True)
        assert torch.autograd.gradgradcheck(run, flat, fast_mode=True)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_jacobians_and_transforms() -> None:
    """By vmap over the backward pass, and by ``torch.func``."""
    module = at.RNNCell(cells.PeepholeLSTM, 2, 5, dtype=torch.float64)
    x, (h, c) = arguments_of(module, 2, True, gradient=False)
    jacobian = torch.autograd.functional.jacobian
    plain = jacobian(lambda h: module(x, (h, c))[0], h)
    batched = jacobian(lambda h: module(x, (h, c))[0], h, vectorize=True)
    functional = torch.func.jacrev(lambda h: module(x, (h, c))[0])(h)
    forward = torch.func.jacfwd(lambda h: module(x, (h, c))[0])(h)
    for other in (batched, functional, forward):
        assert_close(other.detach(), plain, "float64", "gradient")


def test_saved_tensors_that_hooks_change() -> None:
    """Between the passes they may lie elsewhere, and in another layout."""
    module = at.RNNCell(cells.PeepholeLSTM, 4, 5)
    given = arguments_of(module, 3, True)
    wanted = step(module, *given)
    for unpack in (torch.clone, lambda t: turned(t) if t.dim() == 2 else t):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), unpack):
            found = step(module, *given)
        for name, value in wanted.items():
            assert_close(found[name], value, "float32", "gradient", name)


def test_edits_between_the_passes_are_noticed() -> None:
    module = at.RNNCell(cells.PeepholeLSTM, 4, 5)
    given = arguments_of(module, 3, True)
    h, c = module(*given)
    with torch.no_grad():
        h.add_(1)  # what the user got is his
        module.weight_hh.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (h + c).sum().backward()


def test_compiled_and_exported() -> None:
    module = at.RNNCell(cells.PeepholeLSTM, 4, 5).eval()
    x, state = arguments_of(module, 3, True, gradient=False)
    with torch.no_grad():
        wanted = module(x, state)
        exported = torch.export.export(module, (x, state)).module()(x, state)
    for a, b in zip(exported, wanted, strict=True):
        assert_close(a, b, "float32", "forward")


class OneStep(torch.nn.Module):
    """A step of a Feedback."""

    def __init__(self) -> None:
        super().__init__()
        self.feedback = at.Feedback(at.RNN(cells.PeepholeLSTM, 4, 5), torch.nn.Linear(5, 2))

    def forward(self, x: Any, h: Any, c: Any) -> Any:
        return self.feedback.step(x, (h, c), forced=False)


@pytest.mark.parametrize("kind", ["cell", "cell without a state", "feedback"])
def test_exported_for_any_number_of_rows(kind: str) -> None:
    rows = torch.export.Dim("rows", min=2)
    module: Any = OneStep() if kind == "feedback" else at.RNNCell(cells.GRU, 4, 5)
    shapes = {"cell": [(5,)], "feedback": [(1, 5), (1, 5)]}.get(kind, [])

    def given(rows: int) -> tuple[Any, ...]:
        return torch.randn(rows, 4), *(torch.randn(*s[:-1], rows, s[-1]) for s in shapes)

    dynamic = ({0: rows}, *({len(shape) - 1: rows} for shape in shapes))
    with torch.no_grad():
        program = torch.export.export(module.eval(), given(3), dynamic_shapes=dynamic).module()
        for count in (3, 7):
            results, wanted = (f(*x) for x in [given(count)] for f in (program, module))
            for a, b in zip(*map(torch.utils._pytree.tree_leaves, (results, wanted)), strict=True):
                assert_close(a, b, "float32", "forward")


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits on two, above and below the work that is worth a second one."""
    before = torch.get_num_threads()
    try:
        for rows, hidden in ((2, 16), (64, 96)):
            module = at.RNNCell(cells.LayerNormGRU, 8, hidden)
            given = arguments_of(module, rows, True)
            found = []
            for threads in (1, 2):
                torch.set_num_threads(threads)
                found.append(step(module, *given))
            for name, value in found[0].items():
                assert_close(found[1][name], value, "float32", "gradient", name)
            assert torch.equal(found[0]["state 0"], found[1]["state 0"]) or rows > 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_the_first_that_runs_is_compiled() -> None:
    """As one graph: a compiler does not see the facts of a cell that are still to be found."""
    python("""
        import torch
        import anycell.torch as at
        from anycell import cells

        x = torch.randn(3, 5)
        for kind in (cells.JANET, cells.ZoneoutLSTM):
            module = at.RNNCell(kind, 5, 4)
            torch.compile(module, backend="eager", fullgraph=True)(x)
        module = at.RNNCell(cells.PeepholeLSTM, 5, 4)
        program = torch.export.export(module, (x,), strict=True).module()
        assert torch.equal(program(x)[0], module(x)[0])
    """)
