"""torch.onnx, torch.jit and torch.fx: layers on their own, and inside models."""

import functools
import io
from typing import Any

import numpy as np
import pytest
from problems import Sized
from tolerances import LIMITS, NO_WORSE_THAN, assert_close, error

torch = pytest.importorskip("torch")

from torch_layers import Gated, of_torchscript  # noqa: E402

import anycell.torch as at  # noqa: E402
from anycell import cells  # noqa: E402

nn, Tensor = torch.nn, torch.Tensor

LAYERS: dict[str, Any] = {
    "LSTM": lambda: at.LSTM(3, 5),
    "LSTM, all options": lambda: at.LSTM(3, 5, 2, batch_first=True, bidirectional=True),
    "LSTM, no bias": lambda: at.LSTM(3, 5, bias=False),
    "GRU": lambda: at.GRU(3, 5),
    "GRU, all options": lambda: at.GRU(3, 5, 2, batch_first=True, bidirectional=True),
    "RNN(PeepholeLSTM)": lambda: at.RNN(cells.PeepholeLSTM, 3, 5),
    "RNN(GRU)": lambda: at.RNN(cells.GRU, 3, 5, 2, batch_first=True, bidirectional=True),
    "RNN(sLSTM)": lambda: at.RNN(cells.sLSTM, 3, 5),
    "RNN(LayerNormLSTM)": lambda: at.RNN(cells.LayerNormLSTM, 3, 5),
    "LSTMCell": lambda: at.LSTMCell(3, 5),
    "GRUCell": lambda: at.GRUCell(3, 5),
    "RNNCell(GRU)": lambda: at.RNNCell(cells.GRU, 3, 5),
    "RNNCell(PeepholeLSTM)": lambda: at.RNNCell(cells.PeepholeLSTM, 3, 5),
    "LSTM, proj_size": lambda: at.LSTM(3, 5, 2, bidirectional=True, proj_size=4),
}
of_onnx = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::torch.jit.TracerWarning",
    "ignore:Exporting a model to ONNX with a batch_size:UserWarning",
)


class Model(nn.Module):
    """A layer among others."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.before, self.layer, self.after = nn.Linear(3, 3), layer, nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.layer(self.before(x).tanh())
        return self.after(output)


class Called(nn.Module):
    """The output of a layer that is called with further arguments."""

    def __init__(self, layer: nn.Module, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.layer, self.arguments = layer, arguments

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, **self.arguments)[0]


def given_to(layer: nn.Module) -> Tensor:
    steps = isinstance(layer, (nn.RNNCellBase, at.RNNCell))
    return torch.randn(2, 3) if steps else torch.randn(3, 2, 3)


def leaves(found: Any) -> list[Any]:
    return [t.detach().numpy() for t in torch.utils._pytree.tree_leaves(found)]


# -- ONNX ------------------------------------------------------------------------------------------
def session(layer: nn.Module, x: Tensor, **options: Any) -> Any:
    onnxruntime = pytest.importorskip("onnxruntime")
    file = io.BytesIO()
    torch.onnx.export(layer, (x,), file, input_names=["x"], verbose=False, **options)
    return onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])


def assert_onnx(layer: nn.Module, **options: Any) -> None:
    """What ONNX Runtime computes is right."""
    x = given_to(layer)
    found = session(layer.eval(), x, **options).run(None, {"x": x.numpy()})
    own, ref = leaves(layer(x)), leaves(layer.double()(x.double()))
    for one, mine, exact in zip(found, own, ref, strict=True):
        limit = max(LIMITS["float32", "forward"], NO_WORSE_THAN * error(mine, exact))
        assert error(one, exact) <= limit


@of_onnx
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.sample(every=3)
def test_onnx_by_torchscript(name: str) -> None:
    """The older exporter passes all arguments of a bare layer by position."""
    pytest.importorskip("onnx")
    assert_onnx(LAYERS[name](), dynamo=False)


@of_onnx
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of torch's exporter
@pytest.mark.parametrize(
    "name",
    ["LSTM, all options", "GRU", "RNN(PeepholeLSTM)", "RNNCell(GRU)", "LSTM, proj_size"],
)
def test_onnx_by_export(name: str) -> None:
    pytest.importorskip("onnxscript")
    assert_onnx(LAYERS[name](), dynamo=True)


@of_onnx
@pytest.mark.parametrize("kind", ["LSTM", "RNN"])
def test_onnx_of_other_lengths(kind: str) -> None:
    """A drop-in is one node, of any number of steps; a loop refuses all but its own."""
    pytest.importorskip("onnx")
    layer = at.LSTM(3, 5) if kind == "LSTM" else at.RNN(cells.PeepholeLSTM, 3, 5)
    model = Model(layer).eval()
    axes = {"x": {0: "steps", 1: "rows"}}
    run = session(model, torch.randn(3, 2, 3), dynamo=False, dynamic_axes=axes).run
    for steps in (3, 1, 2, 4):
        x = torch.randn(steps, 3, 3)
        if kind == "RNN" and steps != 3:
            with pytest.raises(Exception, match="Split"):
                run(None, {"x": x.numpy()})
        else:
            (output,) = run(None, {"x": x.numpy()})
            assert_close(output, model(x).detach(), "float32", "forward")


@of_onnx
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of torch's exporter
@pytest.mark.parametrize("dynamo", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_cells_that_onnx_has(dynamo: bool) -> None:
    """They become nodes, of any number of steps with the older exporter; not with a mask."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    x, mask = torch.randn(4, 2, 3), torch.ones(4, 2, dtype=torch.bool)
    options = {} if dynamo else {"dynamic_axes": {"x": {0: "steps", 1: "rows"}}}
    for cell, kind in (
        (cells.LSTM, "LSTM"), (cells.GRU, "GRU"), (cells.RNN(nonlinearity="relu"), "RNN"),
        (cells.GRU(reset_after=False), None), ("masked", None),
    ):  # fmt: skip
        masked = {"mask": mask} if cell == "masked" else {}
        layers = 2 if kind else 1  # without a node, each is a long graph
        layer = at.RNN(cells.LSTM if masked else cell, 3, 5, layers, bidirectional=True)
        model, file = Called(layer, masked).eval(), io.BytesIO()
        torch.onnx.export(
            model, (x,), file, input_names=["x"], dynamo=dynamo, verbose=False,
            **(options if kind else {}),
        )  # fmt: skip
        nodes = [node.op_type for node in onnx.load_from_string(file.getvalue()).graph.node]
        if dynamo and kind in ("RNN", None):  # the newer exporter would unroll the node
            assert nodes.count("Scan") == 2 * layers
        else:
            assert nodes.count(kind) == (2 if kind else 0) and ("Tanh" in nodes) is (kind is None)
        runtime = pytest.importorskip("onnxruntime")
        run = runtime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"]).run
        for other in (x,) if dynamo or kind is None else (x, torch.randn(6, 3, 3)):
            (output,) = run(None, {"x": other.numpy()})
            assert_close(output, model(other).detach(), "float32", "runtime")


class WithInputs(nn.Module):
    """A layer whose further arguments are inputs."""

    def __init__(self, layer: nn.Module, names: str) -> None:
        super().__init__()
        self.layer, self.names = layer, names.split()
        self.more = {} if isinstance(layer, at.Feedback) else {"return_states": True}

    def forward(self, x: Tensor, *given: Tensor) -> Any:
        return self.layer(x, **dict(zip(self.names, given, strict=True)), **self.more)


def arguments(names: str, steps: int, rows: int) -> list[Tensor]:
    draw = {
        "mask": lambda: torch.rand(steps, rows) < 0.4,
        "forced": lambda: torch.rand(steps, rows) < 0.4,
        "resets": lambda: torch.rand(steps, rows) < 0.4,
        "lengths": lambda: torch.randint(steps + 1, (rows,)),
        "static": lambda: torch.randn(rows, 5),
    }
    return [draw[name]() for name in names.split()]


SCANS: dict[str, Any] = {
    "a cell": (lambda: at.RNN(cells.LayerNormGRU, 3, 5, 2, bidirectional=True), ""),
    "lengths": (lambda: at.RNN(cells.JANET, 3, 5, bidirectional=True, batch_first=True), "lengths"),
    "mask and resets": (lambda: at.RNN(cells.sLSTM, 3, 5, bidirectional=True), "mask resets"),
    "resets": (lambda: at.RNN(Sized, 3, 5, bidirectional=True, P=4, E=5), "resets static"),
    "a cell with a node": (lambda: at.RNN(cells.LSTM, 3, 5), ""),
    "a drop-in": (lambda: at.LSTM(3, 5), "mask"),
    "a feedback": (
        lambda: at.Feedback(at.RNN(Gated, 3, 5), nn.Linear(5, 2)), "forced static",
    ),
    "a feedback, masked": (
        lambda: at.Feedback(at.GRU(3, 5), nn.Linear(5, 2)), "forced mask resets",
    ),
}  # fmt: skip


@of_onnx
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of torch's exporter
@pytest.mark.parametrize("case", SCANS)
def test_onnx_of_any_length_by_export(case: str) -> None:
    """A ``Scan`` runs any number of steps and rows, also where a mask leaves few steps."""
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    make, names = SCANS[case]
    model, file = WithInputs(make(), names).eval(), io.BytesIO()
    first = getattr(model.layer, "batch_first", False)
    steps, rows = torch.export.Dim("steps"), torch.export.Dim("rows")
    over_time = {0: rows, 1: steps} if first else {0: steps, 1: rows}
    shapes = [{0: rows} if n in ("lengths", "static") else over_time for n in names.split()]

    def given(steps: int, rows: int) -> list[Tensor]:
        return [torch.randn(*((rows, steps) if first else (steps, rows)), 3),
                *arguments(names, steps, rows)]  # fmt: skip

    torch.onnx.export(
        model, tuple(given(4, 2)), file, dynamo=True, verbose=False,
        dynamic_shapes=(over_time, *[tuple(shapes)] * bool(names)),
    )  # fmt: skip
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    for size in ((4, 2), (1, 1), (40, 3)):
        inputs = given(*size)
        feeds = {i.name: t.numpy() for i, t in zip(session.get_inputs(), inputs, strict=True)}
        for one, right in zip(session.run(None, feeds), leaves(model(*inputs)), strict=True):
            assert_close(one, right, "float32", "runtime")


@of_onnx
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of torch's exporter
def test_one_step_needs_no_scan() -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    model, file = Called(at.RNN(cells.JANET, 3, 5), {}).eval(), io.BytesIO()
    torch.onnx.export(model, (torch.randn(1, 2, 3),), file, dynamo=True, verbose=False)
    nodes = {node.op_type for node in onnx.load_from_string(file.getvalue()).graph.node}
    assert "Tanh" in nodes and "Scan" not in nodes


@of_onnx
def test_onnx_of_a_loop() -> None:
    """The older exporter writes a module that calls one, not one alone. So it does a Feedback."""
    pytest.importorskip("onnx")
    loop, x, h = at.loop(nn.GRUCell(3, 5)), torch.randn(4, 2, 3), torch.zeros(2, 5)
    feedback = at.Feedback(at.GRU(3, 5), nn.Linear(5, 1))
    for module, name in ((loop, "loop"), (feedback, "Feedback")):
        message = f"x, state: given 5 .* by position.*dynamo=True, or .* calls the {name}"
        with pytest.raises(TypeError, match=message):
            torch.onnx.export(module, (x, h), io.BytesIO(), dynamo=False)
    model = nn.ModuleList([loop])
    model.forward = lambda x: loop(x, h)[0]
    (y,) = session(model, x, dynamo=False).run(None, {"x": 2 * x.numpy()})
    with torch.no_grad():
        assert_close(y, loop(2 * x, h)[0].numpy(), "float32", "forward")


@of_onnx
@pytest.mark.parametrize("make", [at.LSTM, functools.partial(at.RNN, cells.PeepholeLSTM)], ids=str)
@pytest.mark.sample(1)
def test_onnx_of_a_feedback(make: Any) -> None:
    """Of all steps at once, and of one, which takes and gives the states; prepared or not."""
    pytest.importorskip("onnx")
    feedback, x = at.Feedback(make(3, 5), nn.Linear(5, 1)).eval(), torch.randn(4, 2, 3)
    model, one = nn.ModuleList([feedback]), nn.ModuleList([feedback])
    model.forward = lambda x: feedback(x, forced=False)[0]
    with torch.no_grad():
        right = feedback(2 * x, forced=False)[0].numpy()
    (y,) = session(model, x, dynamo=False).run(None, {"x": 2 * x.numpy()})
    assert_close(y, right, "float32", "forward")

    def step(x: Tensor, h: Tensor, c: Tensor) -> Any:
        return feedback.step(x, (h, c), forced=False)

    one.forward = step
    file, zeros, names = io.BytesIO(), torch.zeros(1, 2, 5), ["x", "h", "c"]
    feedback.prepare()
    with torch.no_grad():
        given = (x[0], zeros, zeros.clone())
        torch.onnx.export(one, given, file, input_names=names, dynamo=False, verbose=False)
    onnxruntime = pytest.importorskip("onnxruntime")
    run = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"]).run
    h = c = zeros.numpy()
    for x_t, y_t in zip(2 * x.numpy(), right, strict=True):
        y, h, c = run(None, dict(zip(names, (x_t, h, c), strict=True)))
        assert_close(y, y_t, "float32", "forward")


# -- TorchScript -----------------------------------------------------------------------------------
@of_torchscript
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.sample(every=3)
def test_trace(name: str) -> None:
    layer = LAYERS[name]().double().eval()
    x = given_to(layer).double()
    traced = torch.jit.trace(layer, (x,))
    for one, ref in zip(leaves(traced(x)), leaves(layer(x)), strict=True):
        assert_close(one, ref, "float64", "forward")
    if isinstance(layer, at.RNN):
        for steps in (1, 4) if not layer.batch_first else (1, 3):
            other = torch.randn(3, steps, 3) if layer.batch_first else torch.randn(steps, 2, 3)
            with pytest.raises(RuntimeError, match=f"found {steps}"):
                traced(other.double())
    elif x.dim() == 3:
        other = torch.randn(9, 4, 3, dtype=torch.float64)
        assert_close(leaves(traced(other))[0], leaves(layer(other))[0], "float64", "forward")


@of_torchscript
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_trace_of_one_step_is_of_any(kind: str) -> None:
    layer = getattr(at, kind)(3, 5, dtype=torch.float64)
    traced = torch.jit.trace(layer, (torch.randn(1, 2, 3, dtype=torch.float64),))
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    assert_close(leaves(traced(x))[0], leaves(layer(x))[0], "float64", "forward")


@of_torchscript
@pytest.mark.parametrize(
    "name", ["LSTM", "LSTM, all options", "GRU", "GRU, all options", "LSTMCell", "GRUCell"]
)
def test_script(name: str) -> None:
    layer = LAYERS[name]().double()
    x = given_to(layer).double()
    scripted = torch.jit.script(nn.Sequential(layer))  # a bare nn.LSTM has no forward there
    for one, ref in zip(leaves(scripted(x)), leaves(layer(x)), strict=True):
        assert_close(one, ref, "float64", "forward")


@of_torchscript
@pytest.mark.parametrize("name", ["RNN(GRU)", "RNNCell(GRU)"])
def test_script_is_refused(name: str) -> None:
    for module in (LAYERS[name](), nn.Sequential(nn.Linear(3, 3), LAYERS[name]())):
        with pytest.raises(
            TypeError, match=r"torch.jit.script: given anycell's RNN.*Use torch.com"
        ):
            torch.jit.script(module)


# -- torch.fx --------------------------------------------------------------------------------------
class Everything(nn.Module):
    """What a call takes beside its input, as names too."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = at.LSTM(3, 5), at.GRU(5, 5)
        self.rnn, self.step = at.RNN(Gated, 5, 5), at.RNNCell(cells.LSTM, 5, 5)

    def forward(self, x: Tensor, h: Tensor, lengths: Tensor) -> Any:
        output, (final, _), states = self.lstm(x, (h, h), lengths=lengths, return_states="c")
        output, last = self.gru(output + states["c"], final, masked_output="repeat")
        output, _ = self.rnn(output, static=last[0])
        return self.step(output[-1])


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_symbolic_trace(kind: str) -> None:
    """An accelerated layer is a node of the graph, as it was before."""
    model, x = Model(getattr(nn, kind)(3, 5)), torch.randn(6, 2, 3)
    before = torch.fx.symbolic_trace(model)
    after = torch.fx.symbolic_trace(at.accelerate(model))
    assert [str(node) for node in after.graph.nodes] == [str(node) for node in before.graph.nodes]
    assert torch.equal(after(x), model(x))


def test_symbolic_trace_of_every_argument() -> None:
    model = Everything()
    x, h, lengths = torch.randn(6, 2, 3), torch.randn(1, 2, 5), torch.tensor([6, 3])
    graph = torch.fx.symbolic_trace(model)
    calls = [node.target for node in graph.graph.nodes if node.op == "call_module"]
    assert calls == ["lstm", "gru", "rnn", "step"]
    for one, ref in zip(graph(x, h, lengths), model(x, h, lengths), strict=True):
        assert np.array_equal(one.detach(), ref.detach())
