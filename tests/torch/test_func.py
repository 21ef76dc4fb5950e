"""Derivatives of all kinds of the layers: ``torch.func``, double backward, dual numbers."""

from typing import Any

import pytest
import torch
from tolerances import assert_close, is_slope
from torch_layers import Zoned, of_torchscript

import anycell
import anycell.torch as at
from anycell import cell, cells, tanh, where
from anycell.lang import Expr, Gates
from anycell.torch.operators import derivatives, functional, fused
from tests.torch.test_functional import DOUBLE, ENTERING, ROWS, SIZE, STEPS, assert_same, given_by


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list of the calls that go step by step from here on."""
    calls = list[Any]()
    for module in (functional, fused, derivatives):
        composite = module.composite
        monkeypatch.setattr(
            module, "composite", lambda *given, run=composite: calls.append(given) or run(*given)
        )
    return calls


@of_torchscript
def test_function_transforms() -> None:
    cell, x, weights, _ = given_by(cells.LSTM)
    several = torch.randn(2, *x.shape, **DOUBLE)

    def c(x: torch.Tensor) -> torch.Tensor:
        return at.recurrence(cell, x, weights, return_states="c")[2]["c"]

    found = torch.func.vmap(c)(several)
    assert_same(list(found), [c(one) for one in several], "forward")
    _, tangent = torch.func.jvp(c, (several[0],), (several[1],))
    rows = torch.autograd.functional.jvp(c, several[0], several[1])[1]
    assert_same([tangent], [rows])


@of_torchscript
@pytest.mark.parametrize("nested", [False, True])
def test_elements_of_a_vmap_with_weights_of_their_own(
    nested: bool, steps: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run fused, one after the other, with the bits of calls by themselves; gradients too.
    More of them than pays run step by step.
    """
    layer, count = at.RNN(cells.PeepholeLSTM, ENTERING, SIZE, bidirectional=True, **DOUBLE), 3
    x = torch.randn(count, STEPS, ROWS, ENTERING, **DOUBLE)
    lengths = torch.tensor([[6, 2, 0], [1, 6, 3], [4, 4, 4]])
    weights = {
        name: torch.randn(count, *p.shape, **DOUBLE, requires_grad=True)
        for name, p in layer.named_parameters()
    }

    def loss(weights: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        output, states = torch.func.functional_call(layer, weights, (x,), {"lengths": lengths})
        return output.square().sum() + states[1].sum()

    of_one = torch.func.vmap(loss, (None, 0, 0)) if nested else loss
    calls = count**2 if nested else count
    every = torch.func.vmap(of_one, (0, None, None) if nested else 0)
    losses = every(weights, x, lengths)
    assert not steps

    def gradients(losses: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(losses.sum(), list(weights.values()))

    found = losses, *gradients(losses)
    alone = [
        loss({name: w[n] for name, w in weights.items()}, x[m], lengths[m])
        for n in range(count)
        for m in (range(count) if nested else [n])
    ]
    right = torch.stack(alone).reshape(losses.shape)
    assert nested or torch.equal(losses, right)  # those within become rows of one batch
    assert_same([*found], [right, *gradients(right)])
    monkeypatch.setattr(derivatives, "ELEMENTS_A_STEP", (calls - 1) / STEPS)
    assert_same([losses], [every(weights, x, lengths)], "forward")
    assert len(steps) == 1


F = torch.func
INPUT = torch.randn(3, STEPS, ROWS, ENTERING, **DOUBLE)
# Each takes the output and the loss as functions of weights and x, the weights, and those of three
# layers.
TRANSFORMS: dict[str, Any] = {
    "grad": lambda out, loss, w, ws: F.grad(loss, (0, 1))(w, INPUT[0]),
    "vjp": lambda out, loss, w, ws: F.vjp(out, w, INPUT[0])[1](
        INPUT[0, ..., :1] + 0 * out(w, INPUT[0])
    ),
    "rows": lambda out, loss, w, ws: F.vmap(out, (None, 2), 1)(w, INPUT.movedim(0, 2)),
    "gradients per element": lambda out, loss, w, ws: F.vmap(F.grad(loss), (None, 0))(w, INPUT),
    "gradients of rows": lambda out, loss, w, ws: F.vmap(F.grad(loss, 1), (None, 0))(w, INPUT),
    "gradient of rows": lambda out, loss, w, ws: F.grad(
        lambda w: F.vmap(loss, (None, 0))(w, INPUT).sum()
    )(w),
    "ensemble": lambda out, loss, w, ws: F.vmap(F.grad(loss), (0, None))(ws, INPUT[0]),
    "nested": lambda out, loss, w, ws: F.vmap(F.vmap(F.grad(loss), (None, 0)), (0, None))(
        ws, INPUT
    ),
    "jacrev": lambda out, loss, w, ws: F.jacrev(lambda x: out(w, x)[-1, 0])(INPUT[0]),
    "jacrev of a weight": lambda out, loss, w, ws: F.jacrev(
        lambda v: out({**w, "weight_hh_l0": v}, INPUT[0])[-1, 0]
    )(w["weight_hh_l0"]),
    "a step of gradients within": lambda out, loss, w, ws: F.grad(
        lambda w: loss(
            {
                n: v - 0.1 * g
                for (n, v), g in zip(w.items(), F.grad(loss)(w, INPUT[0]).values(), strict=True)
            },
            INPUT[1],
        )
    )(w),
    "second derivatives of rows": lambda out, loss, w, ws: F.vmap(
        F.grad(lambda x: F.grad(loss, 1)(w, x).square().sum())
    )(INPUT),
    "jacrev of jacrev": lambda out, loss, w, ws: F.jacrev(F.jacrev(lambda x: loss(w, x)))(
        INPUT[0, :1]
    ),
    "hessian": lambda out, loss, w, ws: F.hessian(lambda x: loss(w, x))(INPUT[0, :2]),
    "jvp": lambda out, loss, w, ws: F.jvp(lambda x: out(w, x), (INPUT[0],), (INPUT[1],)),
    "jvp of weights": lambda out, loss, w, ws: F.jvp(
        lambda w: out(w, INPUT[0]), (w,), ({n: v[1] for n, v in ws.items()},)
    ),
    "jvp of some weights": lambda out, loss, w, ws: F.jvp(
        lambda v: loss({**w, "weight_hh_l0": v}, INPUT[0]),
        (w["weight_hh_l0"],),
        (ws["weight_hh_l0"][1],),
    ),
    "jacfwd": lambda out, loss, w, ws: F.jacfwd(lambda x: out(w, x)[-1, 0])(INPUT[0, :2]),
    "jvp of rows": lambda out, loss, w, ws: F.vmap(
        lambda x, d: F.jvp(lambda x: out(w, x), (x,), (d,))[1]
    )(INPUT, INPUT.flip(0)),
    "jvp of gradients": lambda out, loss, w, ws: F.jvp(
        F.grad(loss), (w, INPUT[0]), ({n: v[1] for n, v in ws.items()}, INPUT[1])
    ),
    "gradient of a jvp": lambda out, loss, w, ws: F.grad(
        lambda w: F.jvp(lambda x: loss(w, x), (INPUT[0],), (INPUT[1],))[1]
    )(w),
    "third derivatives": lambda out, loss, w, ws: F.grad(
        lambda w: F.grad(lambda x: F.grad(loss, 1)(w, x).square().sum())(INPUT[0]).square().sum()
    )(w),
}


@of_torchscript
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(
    ("cell", "options"),
    [
        (cells.LSTM, {}),
        pytest.param(cells.PeepholeLSTM, {"bidirectional": True}, marks=pytest.mark.more),
        pytest.param(cells.LayerNormLSTM, {"checkpoint": 2}, marks=pytest.mark.more),
    ],
    ids=repr,
)
def test_transforms(
    cell: Any, options: Any, transform: str, steps: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run fused, with the numbers of a run step by step."""
    layer = at.RNN(cell, ENTERING, SIZE, **options, **DOUBLE)
    lengths, resets = torch.tensor([6, 2, 0]), torch.rand(STEPS, ROWS) < 0.3
    flags = {"lengths": lengths, "resets": resets}
    weights = {name: p.detach() for name, p in layer.named_parameters()}
    several = {name: torch.stack([w, 1.1 * w, 0.8 * w]) for name, w in weights.items()}

    def out(weights: Any, x: torch.Tensor) -> torch.Tensor:
        named = flags if len(x) == STEPS else {}
        return torch.func.functional_call(layer, weights, (x,), named)[0]

    def loss(weights: Any, x: torch.Tensor) -> torch.Tensor:
        output, (h, *_) = torch.func.functional_call(layer, weights, (x,))
        return output.square().sum() + h.tanh().sum()

    run = TRANSFORMS[transform]
    found = torch.utils._pytree.tree_leaves(run(out, loss, weights, several))
    assert not steps
    monkeypatch.setattr(derivatives, "fits", lambda *_: False)
    right = torch.utils._pytree.tree_leaves(run(out, loss, weights, several))
    assert_same(found, right)


@of_torchscript
def test_a_jvp_of_a_jvp(steps: list[Any]) -> None:
    """It goes step by step: PyTorch takes the inner derivative of an operator for a constant."""
    layer = at.RNN(cells.LSTM, ENTERING, SIZE, **DOUBLE)

    def second(run: Any) -> torch.Tensor:
        def slope(x: torch.Tensor) -> torch.Tensor:
            return torch.func.jvp(run, (x,), (INPUT[1],))[1]

        return torch.func.jvp(slope, (INPUT[0],), (INPUT[2],))[1]

    found = second(lambda x: layer(x)[0])
    assert steps
    right = torch.func.jvp(  # by gradients
        lambda x: torch.func.vjp(
            lambda dot: torch.func.jvp(layer, (x,), (dot,))[1][0], INPUT[1]
        )[0],
        (INPUT[0],), (INPUT[2],),
    )[1]  # fmt: skip
    assert_same([found], [right])


@of_torchscript
@pytest.mark.parametrize("forward", [False, True], ids=["double backward", "dual numbers"])
@pytest.mark.parametrize(
    ("cell", "options"),
    [
        (cells.LSTM, {"num_layers": 2, "bidirectional": True}),
        pytest.param(cells.EALSTM, {}, marks=pytest.mark.more),
        pytest.param(cells.ZoneoutGRU, {}, marks=pytest.mark.more),
        pytest.param(cells.GRU, {"checkpoint": 2}, marks=pytest.mark.more),
    ],
    ids=repr,
)
def test_derivatives_of_autograd(
    cell: Any, options: Any, forward: bool, steps: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of ``torch.func``: double backward, and dual numbers, with all arrays of a call."""
    layer = at.RNN(cell, ENTERING, SIZE, **options, **DOUBLE)
    x, d = INPUT[0].clone().requires_grad_(), INPUT[1]
    static = (
        {"static": torch.randn(ROWS, SIZE, requires_grad=True, **DOUBLE)} if cell.static else {}
    )
    flags = {"lengths": torch.tensor([6, 2, 4]), "resets": torch.rand(STEPS, ROWS) < 0.3}
    given = [x, *layer.parameters(), *static.values()]

    def out() -> torch.Tensor:
        torch.manual_seed(7)  # the same random masks
        output, (h, *_) = layer(x, **flags, **static)
        return output.square().sum() + h.tanh().sum()

    def derive() -> list[torch.Tensor]:
        if not forward:
            slopes = torch.autograd.grad(out(), given, create_graph=True)
            return [*slopes, *torch.autograd.grad(sum(s.square().sum() for s in slopes), given)]
        nonlocal x
        plain = x
        with torch.autograd.forward_ad.dual_level():
            x = torch.autograd.forward_ad.make_dual(plain, d)
            tangent = torch.autograd.forward_ad.unpack_dual(out()).tangent
        x = plain
        return [tangent, *torch.autograd.grad(tangent, given[1:])]

    with monkeypatch.context() as patch:
        patch.setattr(functional, "_plan_for", lambda *_: "for this test")
        patch.setattr(derivatives, "fits", lambda *_: False)
        right = derive()
    assert steps
    steps.clear()
    assert_same(derive(), right)
    assert not steps


@of_torchscript
@pytest.mark.parametrize("after", [False, True], ids=["now", "after a transform"])
def test_a_vmap_of_autograd_over_second_derivatives(after: bool) -> None:
    """Its tensors know no operators of ours; nor do those of a transform that has ended."""
    layer, x = at.RNN(cells.LSTM, ENTERING, SIZE, **DOUBLE), INPUT[0].clone().requires_grad_()

    def loss(x: torch.Tensor) -> torch.Tensor:
        output = layer(x)[0].square().sum()
        return output + layer(layer.weight_ih_l0[None])[0].sum() if after else output

    def gradient(x: torch.Tensor) -> torch.Tensor:
        if after:
            return torch.func.grad(loss)(x)
        (made,) = torch.autograd.grad(loss(x), x, create_graph=True)
        return made

    some = gradient(x).flatten()[:3]
    (found,) = torch.autograd.grad(
        some, x, torch.eye(3, **DOUBLE), is_grads_batched=True, retain_graph=True
    )
    assert_same([*found], [torch.autograd.grad(one, x, retain_graph=True)[0] for one in some])
    # and once more differentiated
    (second,) = torch.autograd.grad(
        some, x, torch.eye(3, **DOUBLE), is_grads_batched=True, create_graph=True
    )
    (third,) = torch.autograd.grad(second.square().sum(), x)
    right = torch.autograd.grad(
        sum(
            torch.autograd.grad(one, x, create_graph=True)[0].square().sum()
            for one in gradient(x).flatten()[:3]
        ),
        x,
    )
    assert_same([third], [*right])


@of_torchscript
@pytest.mark.parametrize("derive", ["jacobian", "hessian", "gradient"])
def test_a_vmap_of_autograd_over_dual_numbers(derive: str) -> None:
    layer, x = at.RNN(cells.LSTM, ENTERING, SIZE, **DOUBLE), INPUT[0, :2].clone()
    ways = torch.autograd.functional

    def last(x: torch.Tensor) -> torch.Tensor:
        return layer(x)[0][-1].square().sum(0)

    def weighted(weight: torch.Tensor) -> torch.Tensor:  # dual numbers arrive as gradients alone
        there = x.clone().requires_grad_()
        given = (last(there) * weight).sum()
        return torch.autograd.grad(given, there, create_graph=True)[0]

    if derive == "hessian":
        options = {"outer_jacobian_strategy": "forward-mode"}
        found = ways.hessian(lambda x: last(x).sum(), x, vectorize=True, **options)
        right = ways.hessian(lambda x: last(x).sum(), x)
    else:
        of_last = derive == "jacobian"
        run, at_point = (last, x) if of_last else (weighted, torch.ones(SIZE, **DOUBLE))
        found = ways.jacobian(run, at_point, vectorize=True, strategy="forward-mode")
        right = ways.jacobian(run, at_point)
    assert_same([found], [right])


@of_torchscript
def test_second_derivatives_within_a_checkpoint() -> None:
    """What a pass has saved is read once."""
    layer, x = at.RNN(cells.LSTM, ENTERING, SIZE, **DOUBLE), INPUT[0].clone().requires_grad_()

    def penalty(x: torch.Tensor) -> torch.Tensor:
        slopes = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
        return slopes[0].square().sum()

    found = torch.utils.checkpoint.checkpoint(penalty, x, use_reentrant=False)
    given = [x, *layer.parameters()]
    found, right = (
        torch.autograd.grad(one, given, allow_unused=True) for one in (found, penalty(x))
    )
    pairs = [pair for pair in zip(found, right, strict=True) if pair[1] is not None]
    assert_same(*zip(*pairs, strict=True))


@cell(gates="f g", state="h")
def Choice(x: Any, r: Any, s: Any) -> Any:
    """Its recurrent weights have no derivative."""
    return tanh(where(r.f > 0, x.f, x.g) + 0.5 * s.h)


@of_torchscript
def test_weights_that_have_no_derivative(steps: list[Any]) -> None:
    layer, x = at.RNN(Choice, ENTERING, SIZE, **DOUBLE), INPUT[0].clone().requires_grad_()

    def penalty(x: torch.Tensor) -> torch.Tensor:
        given = [x, *layer.parameters()]
        slopes = torch.autograd.grad(layer(x)[0].square().sum(), given, create_graph=True)
        return sum(slope.square().sum() for slope in slopes)

    found, *of_weights = torch.autograd.grad(penalty(x), [x, *layer.parameters()])
    assert not steps
    assert [bool(one.any()) for one in of_weights] == [True, False, True, False]
    step = 2.0**-20
    after, before = (
        float(penalty((x + s * INPUT[1]).detach().requires_grad_()).detach()) for s in (step, -step)
    )
    slope = (after - before) / (2 * step)
    assert is_slope(float((found * INPUT[1]).detach().sum()), slope, "layer")


@of_torchscript
def test_second_derivatives_of_a_result_without_weights() -> None:
    """A final state may depend on no array whose gradient is wanted."""
    layer = at.RNN(Choice, ENTERING, SIZE, **DOUBLE).requires_grad_(False)
    weight, x = layer.weight_hh_l0.requires_grad_(), INPUT[0, :1]
    output = layer(x, torch.randn(1, ROWS, SIZE, **DOUBLE))[0]
    arriving = torch.ones_like(output).requires_grad_()
    (slope,) = torch.autograd.grad(output, weight, arriving, create_graph=True, allow_unused=True)
    assert slope is None or not slope.any()


@of_torchscript
@pytest.mark.parametrize("count", [fused.FEWEST_STEPS - 1, fused.FEWEST_STEPS])
def test_second_derivatives_of_few_steps(count: int, steps: list[Any]) -> None:
    """They run step by step, which takes less time."""
    layer, x = at.RNN(cells.GRU, ENTERING, SIZE, **DOUBLE), INPUT[0, :count].clone()
    loss = layer(x.requires_grad_())[0].square().sum()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (found,) = torch.autograd.grad(slope.square().sum(), x)
    assert bool(steps) == (count < fused.FEWEST_STEPS)

    def penalty(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda x: layer(x)[0].square().sum())(x).square().sum()

    assert_same([found], [torch.func.grad(penalty)(x.detach())])


@of_torchscript
def test_dual_numbers_where_no_tangent_runs() -> None:
    """Each direction draws masks of its own."""
    layer = at.RNN(Zoned, ENTERING, SIZE, bidirectional=True, **DOUBLE).train()

    def output(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(7)
        return layer(x)[0]

    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(INPUT[0], INPUT[1])
        found = torch.autograd.forward_ad.unpack_dual(output(dual)).tangent
    step = 2.0**-20
    after, before = (float(output(INPUT[0] + s * INPUT[1]).detach().sum()) for s in (step, -step))
    assert is_slope(float(found.detach().sum()), (after - before) / (2 * step), "layer")
    assert_same([found], [torch.func.jvp(output, (INPUT[0],), (INPUT[1],))[1]])


@of_torchscript
def test_a_cell_without_a_tangent(steps: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its derivatives run step by step; the layer itself and its gradients run fused."""
    layer = at.RNN(cells.GRU, ENTERING, SIZE, **DOUBLE)

    def of_duals(run: Any) -> Any:
        """A derivative of a gradient, and of it the gradient of a weight."""

        def derive(x: torch.Tensor) -> torch.Tensor:
            with torch.autograd.forward_ad.dual_level():
                x = torch.autograd.forward_ad.make_dual(x.clone().requires_grad_(), x.cos())
                slope = torch.autograd.grad(run(x), x, create_graph=True)[0]
                tangent = torch.autograd.forward_ad.unpack_dual(slope).tangent
            return torch.autograd.grad(tangent.square().sum(), layer.weight_hh_l0)[0]

        return derive

    derived = [torch.func.hessian, lambda f: torch.func.jacrev(torch.func.jacrev(f)), of_duals]
    right = [derive(lambda x: layer(x)[0].square().sum())(INPUT[0, :2]) for derive in derived]
    assert not steps
    monkeypatch.setattr(derivatives, "along", lambda *_: None)
    for derive, expected in zip(derived, right, strict=True):
        assert_same([derive(lambda x: layer(x)[0].square().sum())(INPUT[0, :2])], [expected])
        assert steps
        steps.clear()


@of_torchscript
@pytest.mark.parametrize("has", [True, False], ids=["", "without a tangent"])
def test_hooks_on_saved_tensors(
    has: bool, steps: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Double backward takes them, whose tensors ``torch.func`` refuses."""
    layer, x = at.RNN(cells.GRU, ENTERING, SIZE, **DOUBLE), INPUT[0].clone().requires_grad_()

    def penalty() -> list[torch.Tensor]:
        slope = torch.autograd.grad(layer(x)[0].sum(), x, create_graph=True)[0]
        return list(torch.autograd.grad(slope.square().sum(), [x, layer.weight_hh_l0]))

    right = penalty()
    if not has:
        monkeypatch.setattr(derivatives, "along", lambda *_: None)
    with torch.autograd.graph.save_on_cpu():
        assert_same(penalty(), right)
    assert has is not bool(steps)


VECTORIZED = [{}, {"outer_jacobian_strategy": "forward-mode"}]


@of_torchscript
@pytest.mark.parametrize("how", VECTORIZED, ids=["backwards", "forwards"])
def test_a_hessian_of_autograd_at_once(how: Any, steps: list[Any]) -> None:
    """Its vmap is not that of ``torch.func``, and has no rules for operators: it goes by steps."""
    layer = at.RNN(cells.LSTM, ENTERING, SIZE, **DOUBLE)

    def hessian(**options: Any) -> torch.Tensor:
        return torch.autograd.functional.hessian(
            lambda x: layer(x)[0].square().sum(), INPUT[0, :2], **options
        )

    right = hessian()
    assert not steps
    assert_same([hessian(vectorize=True, **how)], [right])
    assert steps


@cell(gates="a", state="h")
def Linear(x: Gates, r: Gates, s: Gates) -> Expr:
    return x.a + r.a + 0.5 * s.h


@of_torchscript
@pytest.mark.parametrize("has", [True, False], ids=["", "without a tangent"])
def test_second_derivatives_that_are_zero(
    has: bool, steps: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What arrives for a gradient goes on to what it is of, and the gradient's own is 0."""
    layer = at.RNN(Linear, ENTERING, SIZE, **DOUBLE).requires_grad_(False)
    x, arriving = INPUT[0].clone().requires_grad_(), torch.ones(STEPS, ROWS, SIZE, **DOUBLE)
    if not has:
        monkeypatch.setattr(derivatives, "along", lambda *_: None)
    (slope,) = torch.autograd.grad(layer(x)[0], x, arriving.requires_grad_(), create_graph=True)
    second = torch.autograd.grad(slope.square().sum(), [x, arriving], allow_unused=True)
    assert second[0] is None or not second[0].any()
    assert_same([second[1]], [2 * layer(slope.detach())[0] - 2 * layer(0 * slope.detach())[0]])
    assert has is not bool(steps)


def test_a_backward_pass_after_its_transform(steps: list[Any]) -> None:
    """What the transform wrapped is memory again, also where nobody derives further."""
    cell, x, weights, _ = given_by(cells.LSTM)
    output, pull = torch.func.vjp(lambda x: at.recurrence(cell, x, weights)[0], x.detach())
    rights = torch.autograd.grad(at.recurrence(cell, x, weights)[0].sum(), x)
    ones = torch.ones_like(output)
    with torch.no_grad():
        assert_same([*pull(ones)], [*rights])
    assert_same([*pull(ones)], [*rights])
    assert_same([*torch.func.vmap(pull)(ones[None])], [rights[0][None]])
    assert not steps


@of_torchscript
def test_a_gradient_of_many_elements(steps: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a weight they would run one after the other: of more than pays, step by step."""
    layer = at.RNN(cells.LSTM, ENTERING, SIZE, **DOUBLE)
    x, weight = INPUT[0], layer.weight_hh_l0.detach()

    def last(weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"weight_hh_l0": weight}, (x,))[0][-1].sum(0)

    found = torch.func.jacrev(last)(weight)
    assert not steps
    monkeypatch.setattr(derivatives, "ELEMENTS_A_STEP", (SIZE - 1) / STEPS)
    assert_same([found], [torch.func.jacrev(last)(weight)])
    assert len(steps) == 1


@of_torchscript
@pytest.mark.parametrize("name", ["x", "state", "static", "mask", "resets", "reset_state"])
def test_elements_of_each_array(name: str, steps: list[Any]) -> None:
    """What differs alone has rows, which become rows of one batch."""
    layer = at.RNN(cells.EALSTM, ENTERING, SIZE, **DOUBLE)
    torch.manual_seed(3)
    shapes = {"x": (STEPS, ROWS, ENTERING), "static": (ROWS, SIZE)}
    arrays = {n: torch.randn(shape, **DOUBLE) for n, shape in shapes.items()}
    arrays |= {n: torch.rand(STEPS, ROWS) < 0.6 for n in ("mask", "resets")}
    arrays |= {n: torch.randn(1, ROWS, SIZE, **DOUBLE) for n in ("state", "reset_state")}
    elements = torch.rand(3, *arrays[name].shape, **DOUBLE)
    if name in ("mask", "resets"):
        elements = elements < 0.6

    def output(one: torch.Tensor) -> torch.Tensor:
        given = {**arrays, name: one}
        pairs = {n: (given.pop(n),) * 2 for n in ("state", "reset_state")}
        return layer(given.pop("x"), pairs.pop("state"), **given, **pairs)[0]

    assert_same([*torch.func.vmap(output)(elements)], [*map(output, elements)], "forward")
    if elements.dtype is not torch.bool:
        found = torch.func.vmap(torch.func.grad(lambda one: output(one).square().sum()))(elements)
        right = [torch.func.grad(lambda one: output(one).square().sum())(one) for one in elements]
        assert_same([*found], right)
    assert not steps


@of_torchscript
def test_elements_of_a_restored_state_without_rows(steps: list[Any]) -> None:
    """It has no axis on which elements could be rows: they run one after the other."""
    cell, x, weights, _ = given_by(cells.LSTM)
    x, weights = x.detach(), {name: weight.detach() for name, weight in weights.items()}
    resets, elements = torch.rand(STEPS, ROWS) < 0.5, torch.randn(3, SIZE, **DOUBLE)

    def output(one: torch.Tensor) -> torch.Tensor:
        both = one, torch.zeros(ROWS, SIZE, **DOUBLE)
        return at.recurrence(cell, x, weights, resets=resets, reset_state=both)[0]

    gradient = torch.func.grad(lambda one: output(one).square().sum())
    for call, kind in ((output, "forward"), (gradient, "gradient")):
        right = [*map(call, elements)]
        assert not torch.equal(*right[:2])
        assert_same([*torch.func.vmap(call)(elements)], right, kind)
    assert not steps


@of_torchscript
def test_weights_of_8_bits(steps: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of integers have no gradients: where these are taken, real weights run."""
    layer = anycell.compress.quantize(at.RNN(cells.GRU, 8, 8).eval())
    x = torch.randn(3, STEPS, ROWS, 8)
    found = torch.func.vmap(lambda one: layer(one)[0])(x)
    for one, other in zip(found, x, strict=True):
        assert_close(one.detach().numpy(), layer(other)[0].detach().numpy(), "float32", "forward")

    def gradient(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda x: torch.func.vmap(lambda one: layer(one)[0])(x).sum())(x)

    found = gradient(x)
    assert not steps
    monkeypatch.setattr(derivatives, "fits", lambda *_: False)
    assert_close(found.numpy(), gradient(x).numpy(), "float32", "gradient")


@of_torchscript
def test_no_elements() -> None:
    layer = at.RNN(cells.LSTM, ENTERING, SIZE, **DOUBLE)
    assert torch.func.vmap(lambda x: layer(x)[0])(INPUT[:0]).shape == (0, STEPS, ROWS, SIZE)
    jacobian = torch.func.jacrev(lambda x: layer(x)[0][0, :0, 0])(INPUT[0])
    assert jacobian.shape == (0, *INPUT[0].shape)


@of_torchscript
def test_elements_have_the_same_random_masks(steps: list[Any]) -> None:
    """As of calls by themselves: they become no rows of a batch."""
    layer = at.RNN(Zoned, ENTERING, SIZE, **DOUBLE).train()

    def loss(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(7)
        return layer(x)[0].square().sum()

    found = torch.func.vmap(torch.func.grad(loss), randomness="same")(INPUT)
    assert not steps
    assert_same([*found], [torch.func.grad(loss)(x) for x in INPUT])
