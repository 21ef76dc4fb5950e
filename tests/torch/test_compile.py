"""torch.compile and torch.export: the layer as one operator, with nothing around it broken."""

import copy
import io
import sys
from pathlib import Path
from typing import Any

import pytest
from tolerances import assert_close

torch = pytest.importorskip("torch")

from torch.nn.utils.parametrizations import weight_norm  # noqa: E402
from torch_layers import CELLS, Gated, Zoned, by_name, run, whole_graphs  # noqa: E402

import anycell.torch as at  # noqa: E402
from anycell import cell, cells, compress, sigmoid, tanh  # noqa: E402
from anycell.torch.operators import native, ops, passes  # noqa: E402

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


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_gradient_that_is_differentiated_again_behind_a_break(backend: str) -> None:
    """Dynamo would compile each function of what runs step by step."""
    layer, x = at.LSTM(3, 5, **DOUBLE), torch.randn(4, 2, 3, **DOUBLE, requires_grad=True)

    def penalty(x: Tensor) -> Tensor:
        gradient = torch.autograd.grad(layer(x)[0].pow(2).sum(), x, create_graph=True)[0]
        return gradient.pow(2).sum()

    found, right = (f(x) for f in (torch.compile(penalty, backend=backend), penalty))
    assert_close(found.detach(), right.detach(), "float64", "forward")
    twice = [torch.autograd.grad(one, x)[0] for one in (found, right)]
    assert_close(*twice, "float64", "gradient")


# -- what a compiled call costs --------------------------------------------------------------------
# Modules, and whether calls of x and states alone are traced the short way.
MODULES: dict[str, tuple[Any, bool]] = {
    "LSTM": (lambda: at.LSTM(3, 5), True),
    "two layers, both directions": (
        lambda: at.LSTM(3, 5, 2, bidirectional=True, batch_first=True), True
    ),
    "no biases, and a projection": (lambda: at.LSTM(3, 5, 2, bias=False, proj_size=2), True),
    "one state, in float64": (lambda: at.GRU(3, 5, **DOUBLE), True),
    "16 bits": (lambda: at.RNN(cells.PeepholeLSTM, 3, 5, dtype=torch.bfloat16), True),
    "dropout that is off": (lambda: at.RNN(cells.GRU, 3, 5, 2, dropout=0.5).eval(), True),
    "masks that are not drawn": (lambda: at.RNN(Zoned, 3, 5).eval(), True),
    "dropout": (lambda: at.RNN(cells.GRU, 3, 5, 2, dropout=0.5), False),
    "masks": (lambda: at.RNN(Zoned, 3, 5), False),
    "checkpoints": (lambda: at.RNN(cells.GRU, 3, 5, checkpoint=2), False),
    "8 bits": (lambda: compress.quantize(at.RNN(cells.LSTM, 3, 5)), False),
    "a computed weight": (lambda: weight_norm(at.RNN(cells.LSTM, 3, 5), "weight_hh_l0"), False),
    "a computed bias": (lambda: weight_norm(at.RNN(cells.LSTM, 3, 5), "bias_hh_l0"), False),
}  # fmt: skip


@whole_graphs
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.sample(every=4)
def test_plain_calls_have_a_short_trace(
    name: str, given: bool, allow_rnn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, plain = MODULES[name]
    layer, short = make(), list[bool]()
    whole = type(layer)._compiled

    def looked_at(*arguments: Any) -> Any:
        results = whole(*arguments)
        short.append(results is not None)
        return results

    monkeypatch.setattr(type(layer), "_compiled", looked_at)
    dtype = torch.float32 if name == "8 bits" else layer.weight_ih_l0.dtype
    x, state = torch.randn(2, 2, 3, dtype=dtype), None
    if given:
        _, state = layer(x)
        state = tuple(map(torch.randn_like, state)) if isinstance(state, tuple) else state.sin()
    results = []
    with allow_rnn:
        for module in (layer, Compiled(layer)):
            torch.manual_seed(0)
            if name == "8 bits":
                output, final = module(x, state)
                results.append({"output": output, "final": final[0]})
            else:
                results.append(run(module, x, state))
    same_bits(*results)
    assert short and set(short) == {plain}


@whole_graphs
def test_calls_that_are_not_plain_keep_their_errors() -> None:
    layer, x, h = at.RNN(cells.LSTM, 3, 5), torch.randn(4, 2, 3), torch.zeros(1, 2, 5)
    wrong: list[tuple[Any, Any]] = [
        (x[..., :2], None), (x.double(), None), (x[:0], None), (x, h), (x, (h,)), (x, (h, h[0])),
        (x, (h, h.double())), (x, (h, torch.zeros(1, 3, 5))), (x[0, 0], None),
    ]  # fmt: skip
    for arguments in wrong:
        with pytest.raises((TypeError, ValueError)) as plain:
            layer(*arguments)
        torch._dynamo.reset()
        with pytest.raises(Exception) as raised:
            compiled(layer)(*arguments)
        assert str(plain.value).partition(":")[0] in str(raised.value), arguments
    torch._dynamo.reset()
    one = at.RNN(cells.GRU, 3, 5)
    assert torch.equal(compiled(one)(x, (h,))[0], one(x, (h,))[0])


def checked(layer: Any) -> int:
    """The objects that a compiled call checks."""
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(type(layer).forward.__code__)
    return str(entries[0].guard_manager).count("+- ")


@whole_graphs
def test_a_plain_call_checks_few_objects(allow_rnn: Any) -> None:
    for layer in (at.LSTM(3, 5), at.RNN(cells.LSTM, 3, 5)):
        counts, x = list[int](), torch.randn(4, 2, 3)
        for arguments in ({}, {"mask": torch.ones(4, 2).bool()}):
            torch._dynamo.reset()
            with allow_rnn:
                compiled(layer)(x, **arguments)
            counts.append(checked(layer))
        assert counts[0] < 0.6 * counts[1], counts


@whole_graphs
@pytest.mark.skipif(native.table() is None, reason="PyTorch has no stable interface as yet")
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.more)]
)
def test_a_warm_graph_plays_its_passes(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the flags are, without the operators' kernels in Python; a wrong flag is refused."""
    layer = at.RNN(cells.PeepholeLSTM, 3, 5, bidirectional=True, dtype=dtype)
    model, x = Compiled(layer), torch.randn(4, 2, 3, dtype=dtype)
    flags = torch.tensor([[1, 0, 0, 1], [1, 1, 1, 0]]).T.bool()
    hits: list[bool] = []
    play = native.play

    def counted(*arguments: Any) -> Any:
        results = play(*arguments)
        hits.append(bool(results))
        return results

    for module in (ops, passes):
        monkeypatch.setattr(module, "play", counted)
    monkeypatch.setattr(ops, "_known", {})
    for arguments in ({}, {"mask": flags}, {"resets": flags, "lengths": torch.tensor([4, 2])}):
        ref, names = run(layer, x, **arguments), list[str]()
        for _ in range(3):
            hits.clear()
            names.clear()
            sys.setprofile(lambda frame, *_: names.append(frame.f_code.co_name))  # noqa: B023
            try:
                found = run(model, x, **arguments)
            finally:
                sys.setprofile(None)
            same_bits(found, ref)
        assert hits == [True, True]
        assert not {"_run", "_backward", "unpack"} & {*names}
        assert {"_run_again", "_backward_again"} <= {*names}
        plain = not arguments and dtype == torch.float32
        assert plain == ("backward_form" not in names), "no form is looked up"
    text, hyper = next(key[:2] for key in ops._known if key[2] is True and '"mask"' in key[0])
    named = {"x": x, "mask": flags.float(), "resets": flags, **layer._weights(layer.cell)[0]}
    tensors = [named[name] for name in ops.read(text).arrays]
    with pytest.raises(ValueError, match=r"mask.*given"), torch.no_grad():
        torch.ops.anycell.run.default(tensors, text, list(hyper), True)


@whole_graphs
def test_graphs_without_the_stable_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before PyTorch 2.10 passes go the ordinary way."""
    monkeypatch.setattr(native, "_table", lambda: None)
    monkeypatch.setattr(passes, "_FORMS", {})
    monkeypatch.setattr(ops, "_known", {})
    layer, x, flags = at.RNN(cells.GRU, 3, 5), torch.randn(4, 2, 3), torch.ones(4, 2).bool()
    for arguments in ({}, {"mask": flags}):
        model, ref = Compiled(layer), run(layer, x, **arguments)
        for _ in range(2):
            same_bits(run(model, x, **arguments), ref)


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
