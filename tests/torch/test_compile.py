"""torch.compile and torch.export: the layer as one operator, with nothing around it broken."""

import copy
import io
import sys
from pathlib import Path
from typing import Any

import pytest
from tolerances import assert_close

torch = pytest.importorskip("torch")

from torch_layers import CELLS, Gated, Zoned, by_name, run, whole_graphs  # noqa: E402

import anycell.torch as at  # noqa: E402
from anycell import cell, cells, sigmoid, tanh  # noqa: E402

nn, Tensor = torch.nn, torch.Tensor
DOUBLE = {"dtype": torch.float64}

# Of torch's own compiler.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(layer: Any, backend: str = "aot_eager", **options: Any) -> Any:
    return torch.compile(layer, fullgraph=True, backend=backend, **options)


def same_bits(found: dict[str, Tensor], ref: dict[str, Tensor]) -> None:
    assert found.keys() == ref.keys()
    for name, value in found.items():
        assert torch.equal(value, ref[name]), name


class Compiled(nn.Module):
    """With the parameters of a layer under their own names, for ``run``."""

    def __init__(self, layer: Any, **options: Any) -> None:
        super().__init__()
        self.layer, self.call = layer, compiled(layer, **options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer.named_parameters(*args, **kwargs)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind.name == "Odd" else pytest.mark.slow) for kind in CELLS],
    **by_name,
)
def test_one_graph(kind: Any) -> None:
    """Training and inference, with everything a call takes: the bits of the plain call."""
    layer = at.RNN(kind, 3, 5, bidirectional=True, batch_first=True)
    model = Compiled(layer)
    x, resets = torch.randn(2, 4, 3), torch.rand(2, 4) < 0.4
    state = tuple(torch.randn(2, 2, 5) for _ in kind.states)
    state = state if len(state) > 1 else state[0]
    calls: list[tuple[Any, dict[str, Any]]] = [
        (None, {}),
        (state, {"lengths": torch.tensor([4, 2])}),
        (state, {"mask": ~resets, "resets": resets, "masked_output": "repeat"}),
        (None, {"resets": resets, "reset_state": state}),
    ]
    for given, arguments in calls:
        same_bits(run(model, x, given, **arguments), run(layer, x, given, **arguments))
        with torch.no_grad():
            assert torch.equal(model(x, given, **arguments)[0], layer(x, given, **arguments)[0])


@whole_graphs
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.sample(1)
def test_no_compilation_for_other_lengths_and_batches(training: bool, dynamic: bool | None) -> None:
    layer = at.RNN(cells.PeepholeLSTM, 3, 5, num_layers=2)
    model = Compiled(layer, dynamic=dynamic)
    for count, (steps, rows) in enumerate([(4, 2), (5, 3), (9, 7), (64, 2), (2, 40)]):
        x, lengths = torch.randn(steps, rows, 3), torch.randint(1, steps + 1, (rows,))
        free = 1 if dynamic else 2  # without dynamic=True the second shape shows what changes
        with torch._dynamo.config.patch(error_on_recompile=count >= free):
            if training:
                same_bits(run(model, x, lengths=lengths), run(layer, x, lengths=lengths))
            else:
                with torch.inference_mode():
                    output, _ = model(x, lengths=lengths)
                    assert torch.equal(output, layer(x, lengths=lengths)[0])


@whole_graphs
@pytest.mark.slow
def test_in_a_model() -> None:
    """Among other layers, which the compiler changes; unbatched; under autocast."""
    layer = at.RNN(cells.GRU, 8, 5, dropout=0.5, num_layers=2).eval()
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), layer)
    graph = compiled(model)
    for x in (torch.randn(4, 2, 3), torch.randn(4, 3)):
        output, final = graph(x)
        ref, last = model(x)
        assert_close(output.detach(), ref.detach(), "float32", "forward")
        assert_close(final.detach(), last.detach(), "float32", "forward")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(graph(x)[0], model(x)[0])
        assert graph(x)[0].dtype == torch.bfloat16


def test_static_input() -> None:
    layer = at.RNN(Gated, 3, 5)
    x, e = torch.randn(4, 2, 3), torch.randn(2, 5)
    assert torch.equal(compiled(layer)(x, static=e)[0], layer(x, static=e)[0])


def test_random_masks() -> None:
    """Drawn from torch's generator, and the same ones in the backward pass."""
    layer = at.RNN(Zoned, 3, 5, **DOUBLE)
    model, x = compiled(layer), torch.randn(6, 2, 3, **DOUBLE)
    torch.manual_seed(1)
    first, second = model(x)[0], model(x)[0]
    torch.manual_seed(1)
    assert torch.equal(model(x)[0], first) and not torch.equal(first, second)
    leaf = x.clone().requires_grad_()

    def function(leaf: Tensor) -> Tensor:
        torch.manual_seed(1)
        return model(leaf)[0]

    assert torch.autograd.gradcheck(function, (leaf,), fast_mode=True)
    layer.eval()
    assert torch.equal(model(x)[0], layer(x)[0])


@cell(gates="f g", state="h")
def Leaky(x: Any, r: Any, s: Any, *, leak: float = 0.9, gate: bool = True) -> Any:
    """A run-time number, and one that selects the graph."""
    f, g = x + r
    return (leak * sigmoid(f) if gate else leak) * s.h + tanh(g)


def test_hyperparameters_may_change() -> None:
    layer, x = at.RNN(Leaky, 3, 5), torch.randn(4, 2, 3)
    model, seen = compiled(layer), []
    for leak in (0.9, 0.5, 0.25, 0.125):
        layer.cell = Leaky(leak=leak)
        seen.append(model(x)[0])
        assert torch.equal(seen[-1], layer(x)[0])
    assert not torch.equal(seen[0], seen[1])


@pytest.fixture
def allow_rnn() -> Any:
    """Dynamo's setting, set. Not a mark: importing Dynamo takes seconds, also where others run."""
    if not hasattr(torch._dynamo.config, "allow_rnn"):
        pytest.skip("Dynamo has no such setting as yet")
    return torch._dynamo.config.patch(allow_rnn=True)


@whole_graphs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.sample(1)
@pytest.mark.more
def test_drop_ins_under_autocast(kind: str, dtype: Any, allow_rnn: Any) -> None:
    layer = getattr(at, kind)(3, 5)
    for x in (torch.randn(4, 2, 3), torch.randn(1, 2, 3)):
        with allow_rnn, torch.autocast("cpu", dtype):
            output, ref = compiled(layer)(x)[0], layer(x)[0]
        assert output.dtype == dtype and torch.equal(output, ref)
        wanted = torch.autograd.grad(ref.float().sum(), layer.weight_hh_l0)
        found = torch.autograd.grad(output.float().sum(), layer.weight_hh_l0)
        assert torch.equal(*wanted, *found)


@whole_graphs
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.sample(1)
def test_drop_ins(kind: str, allow_rnn: Any) -> None:
    """Dynamo breaks its graph at any nn.LSTM, unless told otherwise; ours runs fused then too."""
    layer, x = getattr(at, kind)(3, 5, 2), torch.randn(4, 2, 3)
    ref = run(layer, x)
    with allow_rnn:
        same_bits(run(Compiled(layer), x), ref)
        one = compiled(layer)(x[:1])[0]
        assert_close(one.detach(), layer(x[:1])[0].detach(), "float32", "forward")
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(layer)(x)
    torch._dynamo.reset()
    broken = torch.compile(layer, backend="aot_eager")
    assert torch.equal(broken(x)[0], ref["output"])


@pytest.mark.skipif(
    not hasattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy"),
    reason="Dynamo takes no such wish as yet",
)
def test_behind_a_break_of_the_graph_no_function_of_a_layer_is_compiled_by_itself() -> None:
    layer, x = at.LSTM(3, 5), torch.randn(4, 2, 3)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, seen = torch.compile(layer, backend="aot_eager"), []

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            seen.append((frame.f_code.co_name, Path(frame.f_code.co_filename).name))

    model(x)
    sys.setprofile(look)
    try:
        model(x)
    finally:
        sys.setprofile(None)
    after = seen[seen.index(("again", "warm.py")) :]
    assert not any(file == "guards.py" or name == "_fn" for name, file in after)


def test_packed_sequences_break_the_graph() -> None:
    layer, x = at.RNN(cells.GRU, 3, 5), torch.randn(4, 2, 3)
    packed = nn.utils.rnn.pack_padded_sequence(x, [4, 2])
    model = torch.compile(layer, backend="aot_eager")
    assert torch.equal(model(packed)[0].data, layer(packed)[0].data)


@pytest.mark.slow
def test_inductor() -> None:
    layer = at.RNN(cells.LayerNormLSTM, 3, 5, num_layers=2, bidirectional=True)
    model = Compiled(layer, backend="inductor", dynamic=True)
    for steps, rows in ((4, 2), (7, 3)):
        x, lengths = torch.randn(steps, rows, 3), torch.randint(1, steps + 1, (rows,))
        same_bits(run(model, x, lengths=lengths), run(layer, x, lengths=lengths))


# -- export ----------------------------------------------------------------------------------------
@whole_graphs
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.sample(1)
def test_export(strict: bool) -> None:
    """One operator in the graph, for any T and B; saved and loaded; still to be trained."""
    layer = at.RNN(cells.PeepholeLSTM, 3, 5, num_layers=2, **DOUBLE)
    dims = {0: torch.export.Dim("steps", min=2), 1: torch.export.Dim("rows", min=2)}
    program = torch.export.export(
        layer, (torch.randn(4, 3, 3, **DOUBLE),), dynamic_shapes=({**dims},), strict=strict
    )
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("anycell.forward.default") == 2
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for module in (program.module(), torch.export.load(file).module()):
        for steps, rows in ((4, 3), (9, 2)):
            x = torch.randn(steps, rows, 3, **DOUBLE)
            assert torch.equal(module(x)[0], layer(x)[0])
        names = [name for name, _ in layer.named_parameters()]
        leaves = [module.get_parameter(name) for name in names]
        found = torch.autograd.grad(module(x)[0].square().sum(), leaves)
        ref = torch.autograd.grad(layer(x)[0].square().sum(), list(layer.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(found, ref, strict=True))


@whole_graphs
@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")
def test_export_of_drop_ins_is_torchs() -> None:
    layer, x = at.LSTM(3, 5), torch.randn(4, 2, 3)
    program = torch.export.export(layer, (x,), strict=False)
    assert not any("anycell" in str(node.target) for node in program.graph.nodes)
    output = program.module()(x)[0]
    assert_close(output.detach(), layer(x)[0].detach(), "float32", "forward")


def test_fake_tensors() -> None:
    layer = at.RNN(cells.LSTM, 3, 5, bidirectional=True)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        output, (h, _) = copy.deepcopy(layer)(torch.empty(4, 2, 3))
    assert output.shape == (4, 2, 10) and h.shape == (2, 2, 5)
