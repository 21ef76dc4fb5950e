"""``accelerate``: the layers that it swaps or leaves, its messages, and models of real projects."""

import abc
import contextlib
import copy
import gc
import io
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")

from processes import python  # noqa: E402
from tolerances import LIMITS, NO_WORSE_THAN, assert_close, error  # noqa: E402
from torch_layers import assert_same, fused, of_torchscript, run, weighted  # noqa: E402

import anycell.torch as at  # noqa: E402
from anycell import cells, compress  # noqa: E402
from anycell.bench.shapes import all_shapes  # noqa: E402

nn, Tensor, DOUBLE = torch.nn, torch.Tensor, torch.float64
EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ["deepar", "amp-model", "pyannote", "hydrology", "denoise", "unmix"]


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """The script as a module; its folder is on the path, as in a run of the script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        import accelerated

        yield accelerated


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sample(every=2)
def test_models_of_real_projects(example: Any, name: str) -> None:
    """Outputs and training curves are the same, with narrow layers, few steps and few rows."""
    full = all_shapes()[name]
    shape = replace(full, T=12, B=3, I=max(1, full.I // 8), H=max(4, full.H // 8))
    found = example.compare(name, shape, steps=4, dtype=torch.float64)
    assert found.error <= LIMITS["float64", "forward"]
    for ours, theirs in zip(found.ours, found.theirs, strict=True):
        assert_close(ours, theirs, "float64", "training")
    assert len({*found.ours}) == len(
        found.ours
    )  # weights change; few steps under dropout may not help
    layers = at.recurrent_layers(at.accelerate(example.MODELS[name](shape)))
    assert [layer.engine for layer in layers] == ["cpu"]


def test_the_table_it_prints(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(example.MODELS) == NAMES
    example.main(["deepar", "--steps", "3"])
    head, _, row = capsys.readouterr().out.splitlines()
    assert head.startswith("torch ") and "times as fast" in row
    with pytest.raises(SystemExit):
        example.main(["deeper"])
    assert "model 'deeper': expected one of deepar, amp-model" in capsys.readouterr().err


# -- between convolutions --------------------------------------------------------------------------
class Convolved(nn.Module):
    """A layer between convolutions, as in Demucs, Encodec, CRNN and Deep Speech 2. Time is last in
    convolutions, so the layer's inputs and arriving gradients are views.
    """

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.before, self.rnn = nn.Conv1d(3, 16, 5, 2, padding=2), kind(16, 16, 2, **options)
        self.after = nn.Conv1d(16 * (1 + self.rnn.bidirectional), 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        first, back = ((0, 2, 1),) * 2 if self.rnn.batch_first else ((2, 0, 1), (1, 2, 0))
        return self.after(self.rnn(self.before(x).permute(first))[0].permute(back))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "length"), [(2, 40), (4, 200)], ids=["few rows", "many rows"])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("options", [{"bidirectional": True}, {"batch_first": True}], ids=repr)
@pytest.mark.sample(every=5)
def test_between_convolutions(
    layer: Any, options: dict[str, bool], rows: int, length: int, dtype: torch.dtype
) -> None:
    """Outputs and all gradients are right."""
    torch.manual_seed(0)
    theirs, x = Convolved(layer, **options), torch.randn(rows, 3, length)
    ours, exact = at.accelerate(copy.deepcopy(theirs)), copy.deepcopy(theirs).double()
    assert [found.engine for found in at.recurrent_layers(ours)] == ["cpu"]
    seen: list[Tensor] = []
    ours.rnn.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    mine, own, ref = (
        outcome(model, x.to(kind))
        for model, kind in ((ours.to(dtype), dtype), (theirs.to(dtype), dtype), (exact, DOUBLE))
    )
    assert seen[0].stride(-1) != 1
    assert (seen[0].numel() >= 256 * 16) is (rows == 4)  # from where on there is more to project
    for what, value in ref.items():
        kind = "forward" if what == "output" else "gradient"
        # In float32, torch's convolutions have errors of their own.
        theirs_off = error(own[what], value, axes=()) if dtype is torch.float32 else 0.0
        limit = max(LIMITS[str(dtype).removeprefix("torch."), kind], NO_WORSE_THAN * theirs_off)
        assert error(mine[what], value, axes=()) <= limit, what


def outcome(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    output = model(x)
    weighted([output]).backward()
    found = {"output": output.detach(), "d x": x.grad}
    return found | {f"d {name}": p.grad for name, p in model.named_parameters()}


# -- what is swapped -------------------------------------------------------------------------------
def test_a_model_stays_what_it_was(caplog: pytest.LogCaptureFixture) -> None:
    """It keeps its modules, shared or not, parameters, hooks and modes; each layer is logged."""
    model = nn.Sequential(nn.LSTM(3, 4), nn.ModuleDict({"a": nn.GRU(4, 4)})).eval()
    model.shared, parameters, x = model[0], dict(model.named_parameters()), torch.ones(5, 2, 3)
    seen: list[type] = []
    model[0].register_forward_hook(lambda module, *_: seen.append(type(module)))
    ref, state = model[0](x)[0], copy.deepcopy(model.state_dict())
    with caplog.at_level("INFO", "anycell"):
        assert at.accelerate(model) is model
    assert [type(module) for module in (model[0], model[1]["a"])] == [at.LSTM, at.GRU]
    assert model.shared is model[0] and not model[1]["a"].training
    assert all(p is parameters[name] for name, p in model.named_parameters())
    model.load_state_dict(state, strict=True)
    assert_close(model[0](x)[0].detach(), ref.detach(), "float32", "forward")
    assert seen == [nn.LSTM, at.LSTM]
    layers = {found.name: found.engine for found in at.recurrent_layers(model)}
    assert layers == {"0": "cpu", "1.a": "cpu"}
    assert caplog.messages == [str(found) for found in at.recurrent_layers(model)]
    assert type(at.accelerate(model)[0]) is at.LSTM  # a second call changes nothing
    assert type(at.accelerate(nn.GRU(3, 4))) is at.GRU  # the model itself
    for bad, hint in ((nn.LSTM, "Call it first"), (len, "Pass a model")):
        with pytest.raises(TypeError, match=f"model: given .*expected a torch.nn.Module. {hint}"):
            at.accelerate(bad)  # type: ignore[type-var]


def test_a_model_without_a_layer_to_swap_is_told(caplog: pytest.LogCaptureFixture) -> None:
    at.accelerate(nn.Sequential(nn.Linear(3, 4)))
    assert caplog.messages == ["accelerate has swapped nothing: the model has no recurrent layers"]
    caplog.clear()
    at.accelerate(nn.ModuleDict({"cell": nn.LSTMCell(3, 4)}))
    (said,) = caplog.messages
    assert said.startswith("accelerate has swapped nothing: cell: LSTMCell of torch runs on torch")
    caplog.clear()
    at.accelerate(at.accelerate(nn.Sequential(nn.LSTM(3, 4))))
    assert not caplog.messages


# -- subclasses ------------------------------------------------------------------------------------
class Amp(nn.LSTM):
    """A subclass as in amp modelers: its own constructor and methods, but no forward."""

    def __init__(self, hidden: int, note: str = "") -> None:
        super().__init__(1, hidden, batch_first=True)
        self.note = note

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, note={self.note}"

    def play(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class Further(Amp, abc.ABC):
    pass


@pytest.mark.parametrize("kind", [Amp, Further])
def test_a_subclass_is_swapped(kind: type[Amp]) -> None:
    theirs, x = kind(4, "clean").double(), torch.randn(2, 7, 1, dtype=DOUBLE)
    ours = at.accelerate(copy.deepcopy(theirs))
    assert isinstance(ours, kind) and isinstance(ours, at.LSTM) and type(theirs) is kind
    assert repr(ours) == repr(theirs) and vars(ours).keys() == vars(theirs).keys()
    assert_same(run(ours, x), run(theirs, x), "float64")
    assert fused(ours(x)[0]) and fused(ours.play(x)) and torch.equal(ours.play(x), ours(x)[0])
    [layer] = at.recurrent_layers(ours)
    assert (layer.kind, layer.engine) == (f"{kind.__name__} (LSTM of anycell)", "cpu")
    assert type(at.accelerate(kind(5))) is type(at.accelerate(ours)) is type(ours)
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        output, _ = ours.prepare().step(x[:, 0])
        assert_close(output, ours(x[:, :1])[0][:, 0], "float64", "forward")


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, Amp, Further], ids=lambda kind: kind.__name__)
@pytest.mark.sample(every=2)
def test_the_way_back(make: Any) -> None:
    """``restore`` keeps the objects and their current weights, and restores their classes."""
    model = nn.Sequential(make(4) if make in (Amp, Further) else make(1, 4)).double()
    layer, x = model[0], torch.randn(7, 2, 1, dtype=DOUBLE)
    before = {name: id(p) for name, p in model.named_parameters()}, vars(layer).keys()
    at.accelerate(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    layer(x)[0].sum().backward()
    optimizer.step()
    layer.checkpoint = 4
    layer.prepare()
    with torch.no_grad():
        right = layer(x)[0]
        assert at.restore(model) is model and model[0] is layer and type(layer) is make
        assert before == ({n: id(p) for n, p in model.named_parameters()}, vars(layer).keys())
        assert not fused(layer(x)[0])
        assert_close(layer(x)[0], right, "float64", "forward")
    assert at.recurrent_layers(model)[0].reason == "accelerate(model) has not been called"
    assert type(at.accelerate(at.restore(model))[0]) is not make


def test_what_has_no_way_back(caplog: pytest.LogCaptureFixture) -> None:
    """Such modules stay, work as before, and are logged."""

    class Mine(at.LSTM):
        pass

    parametrised = nn.utils.parametrizations.weight_norm(at.GRU(3, 4), "weight_hh_l0")
    small = compress.quantize(at.LSTM(3, 8))
    model = nn.ModuleList(
        [Mine(3, 4), at.RNN(cells.LSTM, 3, 4), at.PeepholeLSTM(3, 4), parametrised, small]
    )
    kinds = [type(module) for module in model]
    with caplog.at_level("WARNING", "anycell"):
        assert [type(module) for module in at.restore(model)] == kinds
    assert len(caplog.messages) == 5
    assert caplog.messages[1] == "1: RNN of anycell stays: torch has no layer in its place"
    feedback = at.restore(at.Feedback(at.LSTM(3, 4), nn.Linear(4, 1)))
    assert feedback(torch.zeros(5, 2, 3))[0].shape == (5, 2, 1)
    steps = at.restore(nn.ModuleList([at.LSTMCell(3, 4), at.GRUCell(3, 4), at.LSTM(3, 4)]))
    assert [type(module) for module in steps] == [nn.LSTMCell, nn.GRUCell, nn.LSTM]
    with pytest.raises(TypeError, match=r"model: given .*Call it first: restore\(Model\(\)\)"):
        at.restore(nn.LSTM)  # type: ignore[type-var]


def test_a_restored_model_needs_no_anycell(tmp_path: Path) -> None:
    """Files of restored models do not name anycell; loading a file imports the modules it names."""
    model, path = nn.Sequential(nn.LSTM(3, 4), nn.ModuleList([nn.GRU(4, 4)])), tmp_path / "model.pt"
    for change, named in ((at.accelerate, True), (at.restore, False)):
        torch.save(change(model), path)
        assert (b"anycell" in path.read_bytes()) is named
    assert repr(torch.load(path, weights_only=False)) == repr(model)


def saved(layer: Any) -> Any:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, saved, *range(pickle.HIGHEST_PROTOCOL + 1)],
    ids=lambda how: getattr(how, "__name__", f"protocol {how}"),
)
@pytest.mark.parametrize("make", [lambda: nn.LSTM(1, 4, batch_first=True), lambda: Amp(4, "a")])
def test_copies_and_files_of_what_was_swapped(make: Callable[[], Any], copied: Any) -> None:
    ours, x = at.accelerate(nn.ModuleList([make()])), torch.randn(2, 7, 1)
    ref = ours[0](x)[0]
    if isinstance(copied, int):
        again = pickle.loads(pickle.dumps(ours, copied))[0]
    else:
        again = copied(ours)[0]
    assert type(again) is type(ours[0]) and vars(again).keys() == vars(ours[0]).keys()
    assert torch.equal(again(x)[0], ref) and fused(again(x)[0])


@pytest.mark.slow
def test_a_file_in_another_process(tmp_path: Path) -> None:
    """A file names only the user's module and anycell, and loads in another process."""
    (tmp_path / "amps.py").write_text("from torch import nn\n\n\nclass Amp(nn.GRU):\n    pass\n")
    script = """
        import sys, torch, amps, anycell.torch as at
        if sys.argv[1] == "save":
            torch.manual_seed(0)
            torch.save(at.accelerate(amps.Amp(3, 4)), "model.pt")
        else:
            model = torch.load("model.pt", weights_only=False)
            assert isinstance(model, amps.Amp) and model.engine.name == "cpu", type(model)
            print(float(model(torch.ones(2, 2, 3))[0].sum().detach()))
    """
    _, printed = (python(script, what, cwd=tmp_path, paths=[tmp_path]) for what in ("save", "load"))
    torch.manual_seed(0)
    assert float(printed) == pytest.approx(
        nn.GRU(3, 4)(torch.ones(2, 2, 3))[0].sum().item(), rel=1e-5
    )


def test_parametrised_and_back() -> None:
    layer, x = at.accelerate(Amp(4)), torch.randn(2, 7, 1)
    kind, ref = type(layer), layer(x)[0]
    nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0")
    assert at.recurrent_layers(layer)[0].engine == "cpu" and isinstance(layer, Amp)
    assert_close(layer(x)[0].detach(), ref.detach(), "float32", "forward")
    copy.deepcopy(layer)
    with pytest.raises(RuntimeError, match="only supported through state_dict"):
        pickle.dumps(layer)
    nn.utils.parametrize.remove_parametrizations(layer, "weight_hh_l0")
    assert type(layer) is kind


def test_classes_do_not_outlive_their_modules() -> None:
    class Short(nn.LSTM):
        pass

    kind = weakref.ref(type(at.accelerate(Short(2, 2))))
    gc.collect()
    assert kind() is None


# -- what is left, and why -------------------------------------------------------------------------
class Forward(nn.LSTM):
    def forward(self, *args: Any) -> Any:
        return super().forward(*args)


class Checks(nn.GRU):
    def check_forward_args(self, *args: Any) -> None:
        pass


class Calls(nn.GRU):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(2 * x)


class Rewrites(nn.GRU):
    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


class Reduces(nn.LSTM):
    def __reduce__(self) -> Any:
        return Reduces, (2, 2)


class Steps(nn.LSTM):
    def step(self) -> str:
        return "mine"


class Registry(type):
    pass


class Registered(nn.LSTM, metaclass=Registry):
    pass


class Listed(nn.LSTM):
    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise AssertionError("a subclass")


class OfTheBase(nn.RNNBase):
    def __init__(self) -> None:
        super().__init__("LSTM", 2, 2)


def with_attribute(layer: nn.Module, **attributes: Any) -> nn.Module:
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


of_quantization = pytest.mark.filterwarnings(
    "ignore:torch.ao.quantization is deprecated:DeprecationWarning",
    "ignore:torch.quantize_per_tensor:UserWarning",
)


def quantized(layer: nn.Module) -> nn.Module:
    kinds = {nn.LSTM, nn.GRUCell}
    [changed] = torch.ao.quantization.quantize_dynamic(nn.Sequential(layer), kinds)
    return changed


LEFT: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "forward": (lambda: Forward(2, 2), "Forward (LSTM of torch)", "Forward has a forward of its"),
    "checks": (lambda: Checks(2, 2), "Checks (GRU of torch)", "has a check_forward_args of its"),
    "calls": (lambda: Calls(2, 2), "Calls (GRU of torch)", "Calls has a __call__ of its own"),
    "getattr": (lambda: Rewrites(2, 2), "Rewrites (GRU of torch)", "has a __getattr__ of its own"),
    "reduce": (lambda: Reduces(2, 2), "Reduces (LSTM of torch)", "has a __reduce__ of its own"),
    "name": (lambda: Steps(2, 2), "Steps (LSTM of torch)", "'step', which in anycell's LSTM"),
    "metaclass": (lambda: Registered(2, 2), "Registered (LSTM of torch)", "metaclass, Registry"),
    "registry": (lambda: Listed(2, 2), "Listed (LSTM of torch)", "has a __init_subclass__ of"),
    "base": (OfTheBase, "OfTheBase (RNNBase of torch)", "only nn.LSTM and nn.GRU are swapped"),
    "nn.RNN": (lambda: nn.RNN(2, 2), "RNN of torch", "anycell.torch.RNN with anycell.cells.RNN"),
    "attribute": (lambda: with_attribute(nn.GRU(2, 2), cell="a"), "GRU of torch",
                  "'cell', which in anycell's GRU is another"),
    "replaced": (lambda: with_attribute(nn.GRU(2, 2), forward=lambda x: x), "GRU of torch",
                 "its forward has been replaced on the instance"),
    "parametrised": (
        lambda: nn.utils.parametrizations.weight_norm(nn.LSTM(2, 2), "weight_hh_l0"),
        "ParametrizedLSTM (LSTM of torch)",
        "torch.nn.utils.parametrize has changed its class: accelerate the model before",
    ),
    "LSTMCell": (lambda: nn.LSTMCell(2, 2), "LSTMCell of torch", "call anycell.torch.LSTM once"),
    "GRUCell": (lambda: nn.GRUCell(2, 2), "GRUCell of torch", "call anycell.torch.GRU once"),
    "RNNCell": (lambda: nn.RNNCell(2, 2), "RNNCell of torch", "with anycell.cells.RNN once"),
    "scripted": (lambda: torch.jit.script(nn.LSTM(2, 2)), "LSTM of TorchScript",
                 "TorchScript has compiled torch's own layer"),
    "traced": (lambda: torch.jit.trace(nn.GRU(2, 2), (torch.zeros(2, 2, 2),)),
               "GRU of TorchScript", "TorchScript has compiled torch's own layer"),
    "quantized": (lambda: quantized(nn.LSTM(2, 2)), "LSTM of torch", "torch has quantized it"),
    "quantized cell": (lambda: quantized(nn.GRUCell(2, 2)), "GRUCell of torch",
                       "torch has quantized it"),
}  # fmt: skip


@of_torchscript
@of_quantization
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("what", LEFT)
def test_what_is_left_is_listed_with_the_reason(what: str) -> None:
    make, kind, reason = LEFT[what]
    model = nn.ModuleDict({"rnn": make()})
    before = type(model["rnn"])
    layers = [layer for layer in at.recurrent_layers(at.accelerate(model)) if layer.name == "rnn"]
    assert type(model["rnn"]) is before
    assert [(layer.kind, layer.engine) for layer in layers] == [(kind, "torch")]
    assert reason in layers[0].reason and str(layers[0]).startswith(f"rnn: {kind} runs on torch (")


def test_steps_of_ours_are_listed() -> None:
    steps = [at.LSTMCell(2, 2), at.GRUCell(2, 2), at.RNNCell(cells.PeepholeLSTM, 2, 2)]
    layers = at.recurrent_layers(at.accelerate(nn.ModuleList(steps)))
    assert [layer.kind.split()[0] for layer in layers] == ["LSTMCell", "GRUCell", "RNNCell"]
    assert [layer.engine for layer in layers] == ["torch", "torch", "cpu"]
    assert all(layer.kind.endswith("of anycell") for layer in layers)


class Loops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(3, 4)
        self.layer = nn.GRU(4, 4, batch_first=True)
        self.whole = nn.LSTM(4, 4)
        self.windows = nn.LSTM(4, 4)
        self.idle = nn.GRU(4, 4)

    def forward(self, x: Tensor, *, twice: bool = False) -> Tensor:
        state = hidden = None
        outputs = []
        for now in x:
            state = self.cell(now, state)
            output, hidden = self.layer(state[0].unsqueeze(1), hidden)
            outputs.append(output[:, 0])
        output, _ = self.whole(nn.utils.rnn.pack_sequence(torch.stack(outputs).unbind(1)))
        padded, _ = nn.utils.rnn.pad_packed_sequence(output)
        for size in (2, 3) if twice else (2,):
            padded, _ = self.windows(hx=None, input=padded[:size])
        return padded


def test_how_often_one_call_of_the_model_calls() -> None:
    model, x = at.accelerate(Loops()), torch.randn(5, 2, 3)
    assert all(layer.calls is None for layer in at.recurrent_layers(model))
    layers = {layer.name: layer for layer in at.recurrent_layers(model, x, twice=True)}
    calls = {name: layer.calls for name, layer in layers.items()}
    assert calls == {"cell": 5, "layer": 5, "whole": 1, "windows": 2, "idle": 0}
    assert layers["cell"].reason.endswith("; called 5 times, 1 step each")
    assert "called 5 times, 1 step each: call it once with all steps" in layers["layer"].reason
    assert "called" not in layers["whole"].reason
    assert layers["windows"].reason.endswith("; called 2 times, 2 steps each")
    assert layers["idle"].reason.endswith("; not called")
    assert not any(module._forward_pre_hooks for module in model.modules())
    with pytest.raises(RuntimeError):
        at.recurrent_layers(model, x[..., :2])
    assert not any(module._forward_pre_hooks for module in model.modules())


# -- what goes by a module's class -----------------------------------------------------------------
@pytest.fixture
def opacus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Opacus's validator; without Opacus, a stub of the parts on which anycell relies."""
    with contextlib.suppress(ImportError):
        from opacus.validators import ModuleValidator

        return ModuleValidator

    class Validator:
        VALIDATORS: ClassVar[dict[type, Any]] = {
            nn.LSTM: lambda m: ["LSTM"],
            nn.GRU: lambda m: ["GRU"],
        }
        FIXERS: ClassVar[dict[type, Any]] = {nn.LSTM: lambda m: nn.Identity()}

        @classmethod
        def is_valid(cls, model: nn.Module) -> bool:
            errors: list[str] = []
            for module in model.modules():
                if any(p.requires_grad for p in module.parameters(recurse=False)):
                    errors += cls.VALIDATORS.get(type(module), lambda m: [])(module)
            return not errors

        @classmethod
        def fix(cls, model: nn.Module) -> nn.Module:
            for name, module in list(model.named_children()):
                if any(p.requires_grad for p in module.parameters(recurse=False)):
                    setattr(model, name, cls.FIXERS.get(type(module), lambda m: m)(module))
            return model

    module = SimpleNamespace(ModuleValidator=Validator)
    monkeypatch.setitem(sys.modules, "opacus.validators.module_validator", module)  # type: ignore[arg-type]
    return Validator


@pytest.mark.parametrize("make", [lambda: nn.LSTM(2, 2), lambda: nn.GRU(2, 2), lambda: Amp(2)])
def test_opacus_refuses_ours_as_it_does_torchs(opacus: Any, make: Callable[[], Any]) -> None:
    """Opacus refuses layers whose gradients it cannot separate by samples. It does not recognize
    subclasses, accelerated or not.
    """
    valid = type(make()) is Amp
    assert opacus.is_valid(nn.Sequential(make())) is valid
    assert opacus.is_valid(nn.Sequential(at.accelerate(make()))) is valid
    assert not opacus.is_valid(nn.Sequential(at.LSTM(2, 2)))
    assert not opacus.is_valid(nn.Sequential(at.GRU(2, 2)))
    assert not isinstance(opacus.fix(nn.Sequential(at.LSTM(2, 2)))[0], nn.LSTM)


def assert_wrapped(wrap: Any) -> None:
    """Asserts that models work if wrapped before or after ``accelerate``."""
    theirs, x = nn.Sequential(Amp(4)).double(), torch.randn(2, 7, 1, dtype=torch.float64)
    theirs(x)[0].sum().backward()
    for ours in (
        wrap(at.accelerate(copy.deepcopy(theirs))),
        at.accelerate(wrap(copy.deepcopy(theirs))),
    ):
        ours.zero_grad()
        output = ours(x)[0]
        output.sum().backward()
        assert fused(output)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert_close(a.grad, b.grad, "float64", "gradient")


def test_data_parallel() -> None:
    assert_wrapped(nn.DataParallel)


@pytest.mark.slow
def test_distributed_data_parallel() -> None:
    said = python("""
        import os, torch
        from tests.torch.test_accelerate import assert_wrapped
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        assert_wrapped(torch.nn.parallel.DistributedDataParallel)
        print("right", flush=True)
        os._exit(0)  # the destructor of gloo's group may wait for a thread that waits for Python
    """)
    assert said.endswith("right\n")


class _Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 8)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.cell(x, h)
        return h, h


class _ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step, self.once = _Step(), _Step()
        self.fused = at.loop(_Step())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(2, 8)
        y, h = self.once(x[0], h)
        for t in range(len(x)):
            y, h = self.step(x[t], h)
        return self.fused(x, h)[0] + y


def test_loops_over_time_are_found() -> None:
    """A call of the model shows which modules are steps; a ``loop`` is anycell's already."""
    model = at.accelerate(_ByHand())
    before = {layer.name: layer for layer in at.recurrent_layers(model)}
    assert before.keys() == {"step.cell", "once.cell", "fused"}
    assert before["fused"].kind == "loop(_Step) of anycell"
    assert "anycell.torch.loop(module)" in before["step.cell"].reason
    layers = {layer.name: layer for layer in at.recurrent_layers(model, torch.zeros(5, 2, 3))}
    assert layers["step"].calls == 5
    assert "call anycell.torch.loop(module) once" in layers["step"].reason
    assert "once" not in layers  # called once, which is no loop
    assert (layers["fused"].calls, layers["fused"].engine) == (1, "cpu")
    assert "step.cell" in layers and "fused.module.cell" not in layers
