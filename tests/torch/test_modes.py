"""Modes and types of torch that see operations: no call of a layer may pass them by.

Each entrance to the layers is called under each mode, forward and with gradients. Its numbers are
those of an ordinary call, or the call is refused; a trace, called with other tensors, gives theirs.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
from problems import forget_passes
from tolerances import assert_close
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode
from torch_layers import of_torchscript

import anycell.torch as at
from anycell import cells, compress
from anycell.torch.operators import functional

STEPS, ROWS, WIDTH, SIZE = 4, 2, 3, 7
MASK = torch.tensor([[1, 1], [1, 0], [0, 1], [1, 0]], dtype=torch.bool)
LENGTHS, START = torch.tensor([2, 4]), torch.ones(1, ROWS, SIZE)


# -- entrances -------------------------------------------------------------------------------------
class Entrance(nn.Module):
    """A module whose only input and output are tensors."""

    def __init__(self, inner: nn.Module, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.run = inner, run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.inner, x)


def _fed() -> nn.Module:
    return at.Feedback(at.LSTM(WIDTH, SIZE), nn.Linear(SIZE, 1))


def _weights() -> nn.Module:
    """What ``recurrence`` takes, as the parameters of a module."""
    return at.RNN(cells.MGU, WIDTH, SIZE)


def _recurrence(module: Any, x: Tensor) -> Tensor:
    weights = {name: getattr(module, f"{name}_l0") for name in cells.MGU.learned}
    output, (h,) = at.recurrence(cells.MGU, x, weights, resets=~MASK)
    return output + h


def _unrolled(module: Any, x: Tensor) -> Tensor:
    states = [module(x[0])]
    for step in x[1:]:
        states.append(module(step, states[-1]))
    return torch.stack([s if isinstance(s, Tensor) else s[0] for s in states])


def _steps(module: Any, x: Tensor) -> Tensor:
    """Single steps, which are one native call without gradients."""
    outputs, state = [], None
    for step in x:
        output, state = module.step(step, state)
        outputs.append(output)
    return torch.stack(outputs)


def _packed(module: Any, x: Tensor) -> Tensor:
    rows = PackedSequence(x.flatten(0, 1)[:6], torch.tensor([2, 2, 1, 1]))
    packed, _ = module(rows)
    return packed.data


def _zoneout() -> nn.Module:
    return at.RNN(cells.ZoneoutGRU, WIDTH, SIZE).eval()


ENTRANCES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]] = {
    "LSTM": (lambda: at.LSTM(WIDTH, SIZE), lambda m, x: m(x)[0]),
    "RNN(cell)": (
        lambda: at.RNN(cells.PeepholeLSTM, WIDTH, SIZE),
        lambda m, x: m(x, mask=MASK, masked_output="repeat")[0],
    ),
    "GRU": (
        lambda: at.GRU(WIDTH, SIZE, 2, bidirectional=True),
        lambda m, x: m(x, lengths=LENGTHS)[0] + m(x, START.expand(4, -1, -1))[1].sum(),
    ),
    "states": (
        lambda: at.LSTM(WIDTH, SIZE),
        lambda m, x: m(x, lengths=[4, 1], return_states="c")[2]["c"],
    ),
    "checkpoint": (lambda: at.LSTM(WIDTH, SIZE, checkpoint="sqrt"), lambda m, x: m(x)[0]),
    "eval": (_zoneout, lambda m, x: m(x, reset_state=START, resets=~MASK)[0]),
    "RNNCell": (lambda: at.RNNCell(cells.PeepholeLSTM, WIDTH, SIZE), _unrolled),
    "LSTMCell": (lambda: at.LSTMCell(WIDTH, SIZE), _unrolled),
    "Feedback": (_fed, lambda m, x: m(x, forced=MASK[:, 0])[0]),
    "accelerate": (lambda: at.accelerate(nn.GRU(WIDTH, SIZE)), lambda m, x: m(x)[0]),
    "step": (lambda: at.LSTM(WIDTH, SIZE), _steps),
    "recurrence": (_weights, _recurrence),
    "quantized": (lambda: compress.quantize(at.LSTM(WIDTH, SIZE)), lambda m, x: m(x)[0]),
    "packed": (lambda: at.LSTM(WIDTH, SIZE), _packed),
}
# Most run in ``make test-all`` only.
MARKS: dict[str, list[Any]] = {"states": [pytest.mark.slow], "LSTM": [], "RNN(cell)": []}
entrances = pytest.mark.parametrize(
    "entrance", [pytest.param(n, marks=MARKS.get(n, [pytest.mark.more])) for n in ENTRANCES]
)


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(STEPS, ROWS, WIDTH), torch.randn(STEPS, ROWS, WIDTH)


def made(entrance: str) -> Entrance:
    make, run = ENTRANCES[entrance]
    return Entrance(make(), run)


def forward(module: Entrance) -> Callable[..., tuple[Tensor, ...]]:
    """The output of a module, as a function of its input."""

    def call(x: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (module(x),)

    return call


def gradients(module: Entrance) -> Callable[..., tuple[Tensor, ...]]:
    """The output, and the gradients of input and weights, as a function of both."""
    names = [name for name, _ in module.named_parameters()]

    def call(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        output = torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x,))
        return output, *torch.autograd.grad(output.square().sum(), (x, *weights))

    return call


def arguments(module: Entrance, x: Tensor, scale: float = 1.0) -> tuple[Tensor, ...]:
    """The arguments of ``gradients``."""
    leaves = x, *[p.detach() * scale for p in module.parameters()]
    return tuple([t.clone().requires_grad_() for t in leaves])


def assert_same(results: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> None:
    for k, (result, expected) in enumerate(zip(results, right, strict=True)):
        kind = "gradient" if k else "forward"
        assert_close(result.detach(), expected.detach(), "float32", kind)


# -- traces ----------------------------------------------------------------------------------------
TRACES: dict[str, dict[str, Any]] = {
    "real": {},
    "fake": {"tracing_mode": "fake", "_allow_non_fake_inputs": True},
    "symbolic": {"tracing_mode": "symbolic", "_allow_non_fake_inputs": True},
    "before autograd": {"pre_dispatch": True},
}


FEW_TRACES = [pytest.param(m, marks=[] if m == "real" else pytest.mark.more) for m in TRACES]


def traced(call: Any, mode: str, *tensors: Tensor) -> Any:
    return make_fx(call, **TRACES[mode])(*tensors)


@entrances
@pytest.mark.parametrize("mode", FEW_TRACES)
@pytest.mark.sample(1)
def test_a_trace_of_other_inputs(mode: str, entrance: str, inputs: tuple[Tensor, Tensor]) -> None:
    module, (x, y) = made(entrance), inputs
    call = forward(module)
    if entrance == "packed":  # nor does torch's layer: it reads the numbers of rows
        with pytest.raises((RuntimeError, AssertionError), match=r"tracing tensor|[fF]ake|symbol"):
            traced(call, mode, x)
        return
    graph = traced(call, mode, x)
    assert_same(graph(x), call(x))
    assert_same(graph(y), call(y))


@entrances
@pytest.mark.parametrize("mode", FEW_TRACES[:3])
@pytest.mark.sample(1)
def test_a_trace_of_gradients(mode: str, entrance: str, inputs: tuple[Tensor, Tensor]) -> None:
    if entrance == "packed":
        pytest.skip("no trace reads its numbers of rows")
    module, (x, y) = made(entrance), inputs
    call = gradients(module)
    graph = traced(call, mode, *arguments(module, x))
    assert_same(graph(*arguments(module, y, 0.5)), call(*arguments(module, y, 0.5)))


def test_a_trace_of_another_number_of_steps() -> None:
    """The layer is one operator of the graph, which has no number of steps."""
    layer = at.LSTM(WIDTH, SIZE)
    graph = traced(lambda x: layer(x)[0].detach(), "symbolic", torch.randn(STEPS, ROWS, WIDTH))
    assert [str(n.target) for n in graph.graph.nodes if "anycell" in str(n.target)] == [
        "anycell.run.default"
    ]
    x = torch.randn(9, ROWS, WIDTH)
    assert_same((graph(x),), (layer(x)[0],))


@pytest.mark.parametrize("around", ["both passes", "the backward pass"])
def test_no_backward_pass_before_autograd(around: str, inputs: tuple[Tensor, Tensor]) -> None:
    """Of torch's own layer, the graph would be wrong."""
    layer, (x, _) = at.LSTM(WIDTH, SIZE), inputs
    output = layer(x)[0]

    def call(x: Tensor) -> Tensor:
        loss = (layer(x)[0] if around == "both passes" else output) * x[..., :1]
        return torch.autograd.grad(loss.sum(), layer.weight_hh_l0)[0]

    with pytest.raises(ValueError, match="backward: given a trace with pre_dispatch=True"):
        traced(call, "before autograd", x)


@pytest.mark.parametrize("mode", FEW_TRACES)
def test_masks_are_drawn_anew_in_each_run_of_a_trace(mode: str) -> None:
    layer, x = at.RNN(cells.ZoneoutLSTM, WIDTH, SIZE).train(), torch.randn(STEPS, ROWS, WIDTH)
    with torch.no_grad():
        graph = traced(lambda x: layer(x)[0], mode, x)
        assert not torch.equal(graph(x), graph(x))
        torch.manual_seed(3)
        result = graph(x)
        torch.manual_seed(3)
        assert torch.equal(result, layer(x)[0])
        # Step by step, they would be constants of the graph.
        with pytest.raises(ValueError, match="keep: given random masks in a trace"):
            traced(lambda x: layer(x, return_states="c")[2]["c"], mode, x)


# -- modes around a call ---------------------------------------------------------------------------
class Seen:
    """What a user's mode, which torch does not know, has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def see(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Log(Seen, TorchDispatchMode):
    __torch_dispatch__ = Seen.see


class LogOfFunctions(Seen, TorchFunctionMode):
    __torch_function__ = Seen.see


MODES: dict[str, Callable[[], Any]] = {
    "a user's": Log,
    "a user's, of functions": LogOfFunctions,
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "allow_mutation": torch.autograd.graph.allow_mutation_on_saved_tensors,
    "two": lambda: Nested(Log(), Log()),
}


class Nested:
    def __init__(self, *modes: Any) -> None:
        self.modes = modes

    def __enter__(self) -> None:
        for mode in self.modes:
            mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self.modes):
            mode.__exit__(*error)


@pytest.fixture
def natives(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists the native calls that no operator makes."""
    forget_passes()  # a call like an earlier one is another road
    made: list[str] = []
    run = functional.fused.run

    def noted(call: Any, *others: Any) -> Any:
        made.append(call.cell.name)
        return run(call, *others)

    monkeypatch.setattr(functional.fused, "run", noted)
    return made


def trained(module: Entrance, x: Tensor) -> tuple[Tensor, ...]:
    """The gradients of input and weights, by ``backward``."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    module(x).square().sum().backward()
    return tuple([t.grad for t in (x, *module.parameters()) if t.grad is not None])


@entrances
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_around_a_call(
    mode: str, entrance: str, inputs: tuple[Tensor, Tensor], natives: list[str]
) -> None:
    module, (x, _) = made(entrance), inputs
    right = forward(module)(x) + trained(module, x)
    natives.clear()
    with MODES[mode]() as on:
        results = forward(module)(x) + trained(module, x)
    assert_same(results, right)
    assert not natives
    if isinstance(on, (Log, LogOfFunctions)):
        assert any(part in name for name in on.seen for part in ("anycell", "mm", "linear", "lstm"))


@pytest.mark.parametrize("mode", [m for m in MODES if m != "allow_mutation"])
def test_a_mode_around_the_backward_pass(mode: str, inputs: tuple[Tensor, Tensor]) -> None:
    """Of a native call; it then consists of torch's operations."""
    layer, (x, _) = at.LSTM(WIDTH, SIZE), inputs
    output = layer(x)[0]
    (right,) = torch.autograd.grad(output.sum(), layer.weight_hh_l0, retain_graph=True)
    with MODES[mode]() as on:
        (gradient,) = torch.autograd.grad(output.sum(), layer.weight_hh_l0)
    assert_close(gradient, right, "float32", "gradient")
    if isinstance(on, Log):
        assert "aten.mm.default" in on.seen


@pytest.mark.more
def test_a_trace_of_the_backward_pass(inputs: tuple[Tensor, Tensor]) -> None:
    layer, (x, _) = at.LSTM(WIDTH, SIZE), inputs
    output = layer(x)[0]

    def call(gradient: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, [layer.weight_hh_l0], gradient, retain_graph=True)

    graph = make_fx(call)(torch.ones_like(output))
    other = torch.randn_like(output)
    assert_close(graph(other)[0].detach(), call(other)[0], "float32", "gradient")


def test_second_derivatives_under_a_mode(inputs: tuple[Tensor, Tensor]) -> None:
    layer, (x, _) = at.RNN(cells.GRU, WIDTH, SIZE), inputs
    results = []
    for around in (nullcontext, Log):
        with around():
            leaf = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(layer(leaf)[0].square().sum(), leaf, create_graph=True)
            results.append(torch.autograd.grad(slope.square().sum(), layer.weight_hh_l0)[0])
    assert_close(results[1], results[0], "float32", "gradient")


def test_gradients_in_a_vmap_under_a_mode(inputs: tuple[Tensor, Tensor]) -> None:
    layer, (x, _) = at.RNN(cells.GRU, WIDTH, SIZE), inputs
    results = []
    for around in (nullcontext, Log):
        with around():
            output = layer(x)[0]
            vectors = torch.stack([torch.ones_like(output), output.detach()])
            found = torch.autograd.grad(output, layer.weight_hh_l0, vectors, is_grads_batched=True)
            results.append(found[0])
    assert_close(results[1], results[0], "float32", "gradient")


@pytest.mark.parametrize("where", ["torch.device", "set_default_device"])
def test_a_default_device_is_no_observer(where: str, natives: list[str]) -> None:
    layer, x = at.LSTM(WIDTH, SIZE), torch.randn(STEPS, ROWS, WIDTH)
    if where == "torch.device":
        with torch.device("cpu"):
            layer(x, mask=MASK)
    else:
        torch.set_default_device("cpu")
        try:
            layer(x, mask=MASK)
        finally:
            torch.set_default_device(None)
    assert natives == ["LSTM"]


def test_a_step_under_a_mode_after_steps_without() -> None:
    """The mode sees an operator that has a rule for it."""
    layer, x = at.LSTM(WIDTH, SIZE), torch.randn(ROWS, WIDTH)
    with torch.no_grad():
        right = layer(x[None])[0][0]
        for _ in range(2):
            assert_close(layer.step(x)[0], right, "float32", "forward")
        with Log() as log:
            assert_close(layer.step(x)[0], right, "float32", "forward")
        assert "anycell.run.default" in log.seen


@pytest.mark.parametrize("bidirectional", [False, pytest.param(True, marks=pytest.mark.more)])
@pytest.mark.parametrize("wanted", [False, True])
def test_operations_are_counted(bidirectional: bool, wanted: bool) -> None:
    """As those of a call step by step."""
    layer, counts = at.RNN(cells.LSTMP, WIDTH, SIZE, 2, P=4, bidirectional=bidirectional), []
    for options in ({}, {"return_states": True}):
        with FlopCounterMode(display=False) as counter:
            x = torch.randn(STEPS, ROWS, WIDTH, requires_grad=wanted)
            output = layer(x, **options)[0]
            counts.append(counter.get_total_flops())
            output.square().sum().backward()
            counts.append(counter.get_total_flops())
    assert counts[:2] == counts[2:] and counts[0] > 0


# -- edits under allow_mutation_on_saved_tensors ---------------------------------------------------
@pytest.mark.parametrize("edited", ["output", "final state", "x", "first state"])
@pytest.mark.parametrize("kind", ["LSTM", "RNN", "states"])
def test_edits_between_loss_and_backward(
    kind: str, edited: str, inputs: tuple[Tensor, Tensor]
) -> None:
    make = at.RNN(cells.LSTM, WIDTH, SIZE) if kind == "RNN" else at.LSTM(WIDTH, SIZE)
    options = {"return_states": "h"} if kind == "states" else {}
    found = []
    for edit in (False, True):
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            x, first = inputs[0].clone(), START.clone()
            output, (h, c) = make(x, (first, START), **options)[:2]
            loss = output.square().sum() + (h * c).sum()
            if edit:
                tensors = {"output": output, "final state": h, "x": x, "first state": first}
                tensors[edited].detach().zero_()
            found.append(torch.autograd.grad(loss, list(make.parameters())))
    for gradient, right in zip(*reversed(found), strict=True):
        assert_close(gradient, right, "float32", "gradient")


# -- tensors without numbers -----------------------------------------------------------------------
@entrances
def test_shapes_under_fake_tensors(entrance: str, inputs: tuple[Tensor, Tensor]) -> None:
    module, (x, _) = made(entrance), inputs
    right = forward(module)(x)[0].shape
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x)
        if entrance == "packed":
            with pytest.raises(RuntimeError):
                module(fake)
            return
        output = module(fake)
    assert output.shape == right and type(output) is not Tensor
    output.sum().backward() if output.requires_grad else None


@pytest.mark.parametrize("entrance", ["LSTM", "RNN(cell)"])
def test_functional_tensors(entrance: str, inputs: tuple[Tensor, Tensor]) -> None:
    module, (x, _) = made(entrance), inputs
    with torch.no_grad(), FunctionalTensorMode():
        output = module(FunctionalTensor.to_functional(x))
    assert_same((torch._from_functional_tensor(output.elem),), forward(module)(x))


# -- types of tensors ------------------------------------------------------------------------------
class Wrapper(Tensor):
    """A user's type, which knows torch's operations only."""

    seen: list[str]
    inner: Tensor
    # PyTorch 2.4 may lose the attributes of those that autograd alone holds.
    alive: ClassVar[list[Tensor]] = []

    @staticmethod
    def __new__(cls, inner: Tensor, seen: list[str]) -> "Wrapper":
        made: Any = Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )
        made.inner, made.seen = inner.detach(), seen
        cls.alive.append(made)
        return made

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert function.namespace == "aten", function
        seen: list[list[str]] = []

        def bare(t: Any) -> Any:
            if isinstance(t, Wrapper):
                seen.append(t.seen)
            return t.inner if isinstance(t, Wrapper) else t

        results = function(*tree_map(bare, args), **tree_map(bare, kwargs or {}))
        seen[0].append(str(function))
        return tree_map(lambda t: Wrapper(t, seen[0]) if isinstance(t, Tensor) else t, results)


@entrances
@pytest.mark.parametrize("around", [nullcontext, Log], ids=["alone", "under a mode"])
@pytest.mark.parametrize("which", ["x", "weights", "both"])
@pytest.mark.sample(every=5)
def test_types_of_tensors(
    which: str, around: Any, entrance: str, inputs: tuple[Tensor, Tensor]
) -> None:
    module, (x, _) = made(entrance), inputs
    if entrance == "quantized" and which != "x":
        pytest.skip("its weights are buffers")
    names = [name for name, _ in module.named_parameters()]
    values = arguments(module, x)
    right = gradients(module)(*values)
    seen: list[str] = []
    wrapped = [
        Wrapper(t, seen) if which in ("both", "weights" if k else "x") else t
        for k, t in enumerate(values)
    ]
    with around():
        output = torch.func.functional_call(
            module, dict(zip(names, wrapped[1:], strict=True)), (wrapped[0],)
        )
        results = output, *torch.autograd.grad(output.square().sum(), wrapped)
    assert seen
    # torch's own operators, which run these two, write results in place of a plain tensor.
    assert isinstance(output, Wrapper) or entrance in ("LSTMCell", "packed")
    bare = tuple([t.inner if isinstance(t, Wrapper) else t for t in results])
    assert_same(bare, right)


def test_a_gradient_of_another_type(inputs: tuple[Tensor, Tensor]) -> None:
    layer, (x, _) = at.LSTM(WIDTH, SIZE), inputs
    output, seen = layer(x)[0], list[str]()
    ones = torch.ones_like(output)
    (right,) = torch.autograd.grad(output, layer.weight_hh_l0, ones, retain_graph=True)
    (found,) = torch.autograd.grad(output, layer.weight_hh_l0, Wrapper(ones, seen))
    assert isinstance(found, Wrapper) and seen
    assert_close(found.inner, right, "float32", "gradient")


# -- lengths that cannot be read -------------------------------------------------------------------
def per_row(layer: Any) -> Callable[..., Any]:
    weights = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(weights: Any, x: Tensor, length: Tensor) -> Tensor:
        options = {"lengths": length[None]}
        output, _ = torch.func.functional_call(layer, weights, (x[:, None],), options)
        return output.square().sum()

    def gradients(x: Tensor, lengths: Tensor) -> Any:
        return torch.func.vmap(torch.func.grad(loss), (None, 1, 0))(weights, x, lengths)

    return gradients


@pytest.mark.parametrize("kind", ["LSTM", "RNN"])
def test_lengths_in_a_vmap(kind: str, inputs: tuple[Tensor, Tensor]) -> None:
    layer = at.LSTM(WIDTH, SIZE) if kind == "LSTM" else at.RNN(cells.MGU, WIDTH, SIZE)
    found = per_row(layer)(inputs[0], LENGTHS)
    for row, length in enumerate(LENGTHS.tolist()):
        layer.zero_grad()
        layer(inputs[0][:length, row : row + 1])[0].square().sum().backward()
        for name, parameter in layer.named_parameters():
            assert_close(found[name][row], parameter.grad, "float32", "gradient")


def test_lengths_that_are_known_in_a_vmap_are_checked() -> None:
    layer, x = at.LSTM(WIDTH, SIZE), torch.zeros(2, STEPS, ROWS, WIDTH)
    with pytest.raises(ValueError, match="lengths: given a length of 5; expected 0 to 4"):
        torch.func.vmap(lambda x: layer(x, lengths=[1, 5])[0])(x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")
def test_a_compiled_vmap_of_lengths(inputs: tuple[Tensor, Tensor]) -> None:
    gradients = per_row(at.RNN(cells.MGU, WIDTH, SIZE))
    right = gradients(inputs[0], LENGTHS)
    torch._dynamo.reset()
    found = torch.compile(gradients, backend="aot_eager")(inputs[0], LENGTHS)
    for name, gradient in right.items():
        assert_close(found[name], gradient, "float32", "gradient")


# -- torch.func over packed sequences --------------------------------------------------------------
TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": torch.func.grad,
    "jacrev": torch.func.jacrev,
    "jacfwd": torch.func.jacfwd,
}


@pytest.fixture
def packed() -> Iterator[tuple[Any, Any, Any]]:
    """A loss of weights over packed rows, the weights, and their gradients by autograd."""
    layer = at.RNN(cells.LSTM, WIDTH, SIZE, 2)
    rows = pack_sequence([torch.randn(2, WIDTH), torch.randn(3, WIDTH)], enforce_sorted=False)

    def loss(weights: Any) -> Tensor:
        output, (h, _) = torch.func.functional_call(layer, weights, (rows,))
        return output.data.square().sum() + h.sum()

    weights = {name: p.detach() for name, p in layer.named_parameters()}
    loss(dict(layer.named_parameters())).backward()
    yield loss, weights, {name: p.grad for name, p in layer.named_parameters()}


@of_torchscript
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_packed_sequences(transform: str, packed: tuple[Any, Any, Any]) -> None:
    loss, weights, right = packed
    found = TRANSFORMS[transform](loss)(weights)
    for name, gradient in right.items():
        assert_close(found[name], gradient, "float32", "gradient")


@of_torchscript
def test_packed_sequences_in_a_vmap_and_in_forward_mode(packed: tuple[Any, Any, Any]) -> None:
    loss, weights, right = packed
    stacked = {name: torch.stack([w, 0.5 * w]) for name, w in weights.items()}
    halves = {name: 0.5 * w for name, w in weights.items()}
    losses = torch.func.vmap(loss)(stacked)
    assert_close(losses, torch.stack([loss(weights), loss(halves)]), "float32", "forward")
    _, slope = torch.func.jvp(loss, (weights,), (halves,))
    expected = sum((right[name] * half).sum() for name, half in halves.items())
    assert_close(slope, expected, "float32", "gradient")
