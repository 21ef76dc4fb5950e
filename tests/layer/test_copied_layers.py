"""A prepared layer steps with the weights that it has now, however it, or they, were copied.

Libraries copy modules in many ways: for data-parallel replicas, for MAML, for averages of weights.
Each test has a few layers that are copies of one another, copies one of them, edits one of them,
and compares the steps of all with calls of fresh layers that have the same weights. It begins with
each way once, and goes on with random ones: `--edits N` tries N of them.
"""

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from processes import HAS_TORCH, needs_torch
from tolerances import assert_close

import anycell.numpy as an
from anycell import cells, compress

if HAS_TORCH:
    import torch
    from torch import nn

    import anycell.torch as at

INPUTS, UNITS, ROWS, POOL = 4, 4, 2, 3
Way = Callable[[Any, np.random.Generator], Any]


def try_all(
    first: Any,
    copies: dict[str, Way],
    edits: dict[str, Way],
    step: Callable[[Any], Any],
    right: Callable[[Any], Any],
    request: pytest.FixtureRequest,
) -> None:
    """Copies and edits layers, beginning with ``first``; compares their steps with what is right.

    Args:
        copies: each returns a copy of a layer.
        edits: each changes weights of a layer, or of those that share them.
    """
    seed = [request.config.getoption("--seed"), *request.node.name.encode()]
    rng = np.random.default_rng(seed)
    pool, changes = [first], 0
    count = max(request.config.getoption("--edits") // 2, len(copies), len(edits))
    for n in range(count):
        way, edit = (turn(ways, n, rng) for ways in (copies, edits))
        made = copies[way](some(pool, rng), rng)
        pool = [made, *rng.permutation(np.array([*pool, None], object))[: POOL - 1]]
        pool = [layer for layer in pool if layer is not None]
        before = step(made)
        for done in (way, edit):
            if done == edit:
                edits[edit](some(pool, rng), rng)
            for layer in pool:
                about = f"turn {n}, after {done!r} of {way!r} and {edit!r}"
                assert_close(step(layer), right(layer), "float32", "forward", about)
        changes += not np.array_equal(before, step(made))
    assert changes > count / 8, "many edits change the step of the last copy"


def turn(ways: dict[str, Way], n: int, rng: np.random.Generator) -> str:
    """Each way in turn, and then random ones."""
    return [*ways][n] if n < len(ways) else str(rng.choice([*ways]))


def some(pool: list[Any], rng: np.random.Generator) -> Any:
    return pool[rng.integers(len(pool))]


def inner(layer: Any) -> Any:
    """The layer itself, or that of a model or a ``Feedback``."""
    return getattr(layer, "layer", layer)


# ---- PyTorch -------------------------------------------------------------------------------------
def like(tensor: Any, name: str) -> Any:
    """Other values for a weight."""
    if tensor.dtype is torch.int8:
        return torch.randint_like(tensor, -127, 127)
    values = torch.rand_like(tensor)
    return values * 0.01 if name.endswith("_scales") else values - 0.5


def holder(module: Any, rng: np.random.Generator) -> tuple[Any, str, str, Any]:
    """A random weight of a module, or of one within it: who has it, in which of its attributes (""
    if it is one itself, as in replicas), its name, and the tensor.
    """
    every = []
    for owner in module.modules():
        places = {kind: owner.__dict__[kind] for kind in ("_parameters", "_buffers")}
        for kind, place in {**places, "": owner.__dict__}.items():
            tensors = {n: t for n, t in place.items() if isinstance(t, torch.Tensor)}
            every += [(owner, kind, name, tensor) for name, tensor in tensors.items()]
    return some(every, rng)


def weight(edit: Callable[[Any, Any], Any]) -> Way:
    """An edit of a random weight, from a function of it and of other values for it."""

    def run(module: Any, rng: np.random.Generator) -> None:
        _, _, name, tensor = holder(module, rng)
        with torch.no_grad():
            edit(tensor, like(tensor, name))

    return run


def held(edit: Callable[[Any, str, str, Any], Any]) -> Way:
    """An edit of the place of a random weight: its owner, where it is, its name, another weight."""

    def run(module: Any, rng: np.random.Generator) -> None:
        owner, kind, name, tensor = holder(module, rng)
        values = like(tensor.detach(), name)
        edit(owner, kind, name, nn.Parameter(values) if kind == "_parameters" else values)

    return run


def replace(owner: Any, kind: str, name: str, new: Any) -> None:
    """Puts another dictionary in the place of the weights, or of all attributes."""
    if kind:
        owner.__dict__[kind] = {**owner.__dict__[kind], name: new}
    else:
        owner.__dict__ = {**owner.__dict__, name: new}


def enter(owner: Any, kind: str, name: str, new: Any) -> None:
    """Puts another weight into the same dictionary."""
    (owner.__dict__[kind] if kind else owner.__dict__)[name] = new


def data(tensor: Any, values: Any) -> None:
    tensor.data = values


def data_twice(tensor: Any, values: Any) -> None:
    """The second may lie where the weight was before the first."""
    version = tensor._version
    for other in (torch.zeros_like(values), values):
        tensor.data = other.clone()
    assert tensor._version == version


def turned(tensor: Any, values: Any) -> None:
    """The same memory, with its axes in another order."""
    if tensor.dim() > 1:
        rows, columns = tensor.shape
        strides = (1, rows) if tensor.is_contiguous() else (columns, 1)
        tensor.data = tensor.data.as_strided(tensor.shape, strides)


def swapped(tensor: Any, values: Any) -> None:
    other = nn.Parameter(values) if isinstance(tensor, nn.Parameter) else values
    if not weakref.getweakrefs(tensor):  # torch's layers have some, of which torch complains
        torch.utils.swap_tensors(tensor, other)


def loaded(assign: bool) -> Way:
    def run(module: Any, rng: np.random.Generator) -> None:
        state = {name: like(t, name) for name, t in module.state_dict().items()}
        if assign:
            learned = dict(module.named_parameters())
            state = {n: nn.Parameter(t) if n in learned else t for n, t in state.items()}
        module.load_state_dict(state, assign=assign)

    return run


def trained(**options: Any) -> Way:
    def run(module: Any, rng: np.random.Generator) -> None:
        learned = [p for p in module.parameters() if p.is_leaf and p.requires_grad]
        if learned:
            optimizer = torch.optim.SGD(learned, lr=0.05, **options)
            for p in learned:
                p.grad = torch.rand_like(p) - 0.5
            optimizer.step()

    return run


def moved(module: Any, rng: np.random.Generator) -> None:
    module.to(torch.float64).to(torch.float32)


def updated(module: Any, rng: np.random.Generator) -> None:
    """The module becomes another one that was prepared, by its attributes."""
    other = copy.deepcopy(module)
    loaded(False)(other, rng)
    prepared(other)
    module.__dict__.update(other.__dict__)


def average(module: Any, rng: np.random.Generator) -> None:
    learned = [p for p in module.parameters() if p.is_contiguous()]  # the function needs it
    with torch.no_grad():
        vector = nn.utils.parameters_to_vector(learned) * 0.9 if learned else None
    if vector is not None:
        nn.utils.vector_to_parameters(vector, learned)


def dictionary(module: Any, rng: np.random.Generator) -> Any:
    made = module.__new__(type(module))
    made.__dict__ = module.__dict__.copy()
    return made


def own(module: Any, rng: np.random.Generator) -> Any:
    """A clone with weights of its own, at every level, as libraries for MAML make it."""
    made = dictionary(module, rng)
    for kind in ("_parameters", "_buffers"):
        tensors = made.__dict__[kind].items()
        made.__dict__[kind] = {n: None if t is None else t.detach().clone() for n, t in tensors}
    made._modules = {n: own(inner, rng) for n, inner in module._modules.items()}
    return made


def replica(module: Any, rng: np.random.Generator) -> Any:
    """As ``torch.nn.parallel.replicate`` makes it: weights are plain attributes."""
    made = module._replicate_for_data_parallel()
    for kind in ("_parameters", "_buffers"):
        for name, tensor in module.__dict__[kind].items():
            if kind == "_buffers":
                made._buffers[name] = tensor.clone()
            elif tensor is not None:
                setattr(made, name, tensor.detach().clone())
    for name, inner in module._modules.items():
        setattr(made, name, replica(inner, rng))
    return made


def set_state(module: Any, rng: np.random.Generator) -> Any:
    made = own(module, rng)
    prepared(made)
    made.__setstate__(module.__dict__.copy())
    return made


def with_own(make: Way) -> Way:
    """A way to copy, followed by weights of the copy's own."""

    def run(module: Any, rng: np.random.Generator) -> Any:
        made = make(module, rng)
        made._modules = {n: dictionary(inner, rng) for n, inner in module._modules.items()}
        for owner in (made, *made._modules.values()):
            owner._parameters = {
                n: None if p is None else nn.Parameter(p.detach() * 0.9)
                for n, p in owner._parameters.items()
            }
        return made

    return run


COPIES: dict[str, Way] = {
    "dictionary": dictionary,
    "dictionary, own parameters": with_own(dictionary),
    "copy": lambda module, rng: copy.copy(module),
    "copy, own parameters": with_own(lambda module, rng: copy.copy(module)),
    "deepcopy": lambda module, rng: copy.deepcopy(module),
    "pickle": lambda module, rng: pickle.loads(pickle.dumps(module)),
    "__setstate__": set_state,
    "replica": replica,
    "MAML": own,
}
REDUCE = "copy", "pickle"  # by ``__reduce_ex__``
EDITS: dict[str, Way] = {
    "_parameters": held(replace),
    "an entry of _parameters": held(enter),
    "setattr": held(lambda owner, kind, name, new: setattr(owner, name, new)),
    "data": weight(data),
    "data, twice": weight(data_twice),
    "data, turned": weight(turned),
    "copy_": weight(lambda tensor, values: tensor.copy_(values)),
    "swap_tensors": weight(swapped),
    "load_state_dict": loaded(False),
    "load_state_dict, assigned": loaded(True),
    "SGD": trained(),
    "SGD, fused": trained(fused=True),
    "to": moved,
    "__dict__.update": updated,
    "vector_to_parameters": average,
}


class Nested(nn.Module if HAS_TORCH else object):  # type: ignore[misc]
    """A model with a layer of torch, accelerated, in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = at.accelerate(nn.LSTM(INPUTS, UNITS))

    def forward(self, x: Any, state: Any) -> Any:
        return self.layer(x, state)

    def step(self, x: Any, state: Any) -> Any:
        return self.layer.step(x, state)


def parametrised() -> Any:
    return nn.utils.parametrizations.weight_norm(at.LSTM(INPUTS, UNITS), "weight_hh_l0").eval()


MODULES: dict[str, Callable[[], Any]] = {
    "LSTM": lambda: at.LSTM(INPUTS, UNITS),
    "Feedback": lambda: at.Feedback(at.LSTM(INPUTS, UNITS), nn.Linear(UNITS, 2)),
    "parametrised": parametrised,
    "accelerated, nested": lambda: Nested(),
    "RNN": lambda: at.RNN(cells.PeepholeLSTM, INPUTS, UNITS),
    "two layers": lambda: at.LSTM(INPUTS, UNITS, 2),
    "without biases": lambda: at.GRU(INPUTS, UNITS, bias=False),
    "8 bits": lambda: compress.quantize(at.LSTM(INPUTS, UNITS)),
}


def prepared(module: Any) -> Any:
    return inner(module).prepare()


def state_of(module: Any) -> Any:
    """A state, without which recurrent weights would make no difference."""
    layer, rng = inner(module), np.random.default_rng(1)
    shape = layer.num_layers, ROWS, UNITS
    states = [rng.standard_normal(shape).astype(np.float32) for _ in layer.cell.states]
    if not isinstance(layer, an.RNN):
        states = [torch.from_numpy(state) for state in states]
    return tuple(states) if len(states) > 1 else states[0]


class Forced(nn.Module if HAS_TORCH else object):  # type: ignore[misc]
    """What a ``Feedback`` computes if every step is forced."""

    def __init__(self, fed: Any) -> None:
        super().__init__()
        self.layer, self.readout = fed.layer, fed.readout

    def forward(self, x: Any, state: Any) -> Any:
        return self.readout(self.layer(x, state)[0]), None


def plain(name: str) -> Any:
    """A fresh module of a kind, without parametrisations."""
    if name == "Feedback":
        return Forced(MODULES[name]())
    return at.LSTM(INPUTS, UNITS) if name == "parametrised" else MODULES[name]()


def weights(module: Any, fresh: Any) -> dict[str, Any]:
    """What a module has now, by the names of a fresh one."""
    by_name = {}
    for name in [*dict(fresh.named_parameters()), *dict(fresh.named_buffers())]:
        value = module
        for part in name.split("."):
            value = getattr(value, part)
        by_name[name] = value.detach().clone()
    return by_name


@needs_torch
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.sample(4)
def test_copies_of_torch_modules(
    name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    from anycell.torch.operators import warm

    native, play = list[bool](), warm.play

    def counted(*arguments: Any) -> Any:
        results = play(*arguments)
        native.append(bool(results))
        return results

    monkeypatch.setattr(warm, "play", counted)
    torch.manual_seed(0)
    module, fresh, x = MODULES[name](), plain(name), torch.randn(ROWS, INPUTS)
    state = state_of(prepared(module))
    copies = dict(COPIES)
    if name == "parametrised":  # which torch does not pickle, nor copy
        copies = {way: make for way, make in COPIES.items() if way.partition(",")[0] not in REDUCE}

    def step(module: Any) -> Any:
        with torch.no_grad():
            return module.step(x, state)[0].numpy()

    def right(module: Any) -> Any:
        with torch.no_grad():
            return torch.func.functional_call(fresh, weights(module, fresh), (x[None], state))[0][
                0
            ].numpy()

    try_all(module, copies, EDITS, step, right, request)
    assert name == "parametrised" or sum(native) > 20, "steps are native calls"


@needs_torch
def test_a_weight_appears_beside_the_others() -> None:
    """A layer without biases gets some, as a parameter, a buffer or an attribute."""
    x = torch.randn(ROWS, INPUTS)
    for enters in ("register_parameter", "register_buffer", "__setattr__"):
        layer = at.LSTM(INPUTS, UNITS, bias=False).prepare()
        for name in ("bias_ih_l0", "bias_hh_l0"):
            value = torch.randn(4 * UNITS)
            value = nn.Parameter(value) if enters == "register_parameter" else value
            with torch.no_grad():
                layer.step(x)
                getattr(layer, enters)(name, value)
                assert_close(layer.step(x)[0], layer(x[None])[0][0], "float32", "forward", enters)


@needs_torch
def test_steps_with_weights_for_a_while() -> None:
    """``torch.func`` exchanges the weights of a module within a context, and puts them back."""
    layer, x = at.GRU(INPUTS, UNITS).prepare(), torch.randn(ROWS, INPUTS)
    state = state_of(layer)
    other = {name: p.detach() * 2 for name, p in layer.named_parameters()}
    with torch.no_grad():
        before = layer.step(x, state)[0]
        with nn.utils.stateless._reparametrize_module(layer, other):
            assert_close(layer.step(x, state)[0], layer(x[None], state)[0][0], "float32", "forward")
            assert not torch.equal(layer.step(x, state)[0], before)
        assert torch.equal(layer.step(x, state)[0], before)


@needs_torch
def test_a_module_within_is_exchanged() -> None:
    """The original of a parametrised weight, in a child whose attributes are replaced."""
    layer, x = parametrised().prepare(), torch.randn(ROWS, INPUTS)
    child, state = layer.parametrizations.weight_hh_l0, state_of(layer)
    changed = {name: nn.Parameter(p.detach() * 2) for name, p in child._parameters.items()}
    with torch.no_grad():
        before = layer.step(x, state)[0]
        child.__dict__ = {**child.__dict__, "_parameters": changed}
        assert_close(layer.step(x, state)[0], layer(x[None], state)[0][0], "float32", "forward")
        assert not torch.equal(layer.step(x, state)[0], before)


# ---- NumPy ---------------------------------------------------------------------------------------
X = np.random.default_rng(0).standard_normal((ROWS, INPUTS)).astype(np.float32)


def others(arrays: Any, rng: np.random.Generator) -> dict[str, Any]:
    """Other values for the arrays of a layer."""

    def drawn(name: str, array: Any) -> Any:
        if array.dtype == np.int8:
            return rng.integers(-127, 128, array.shape, np.int8)
        scale = 0.01 if name.endswith("_scales") else 1.0
        return (scale * (rng.random(array.shape) - (scale == 1.0) / 2)).astype(array.dtype)

    return {name: drawn(name, array) for name, array in arrays.items()}


class Views:
    """A model of the user's own, whose parameters are views of the layer's."""

    def __init__(self, layer: Any, rng: np.random.Generator) -> None:
        self.parameters = {name: array[:] for name, array in layer.parameters.items()}
        self.grads = others(self.parameters, rng)


def of_adam(layer: Any, rng: np.random.Generator) -> None:
    inner(layer)._grads = others(inner(layer).parameters, rng)
    an.Adam(inner(layer), lr=0.05).step()


def of_views(layer: Any, rng: np.random.Generator) -> None:
    an.Adam(Views(inner(layer), rng), lr=0.05).step()


def restored(layer: Any, rng: np.random.Generator) -> None:
    stop = an.EarlyStopping(inner(layer), patience=1)
    stop(1.0)
    for name, array in others(inner(layer).arrays, rng).items():
        inner(layer).arrays[name][...] = array
    inner(layer).prepare()
    stop.restore()


def written(layer: Any, rng: np.random.Generator) -> None:
    inner(layer).set_parameters(others(inner(layer).arrays, rng))


def array_entered(layer: Any, rng: np.random.Generator) -> None:
    name, array = some([*others(inner(layer).arrays, rng).items()], rng)
    inner(layer)._parameters[name] = array


def arrays_replaced(layer: Any, rng: np.random.Generator) -> None:
    inner(layer)._parameters = others(inner(layer).arrays, rng)


def became(layer: Any, rng: np.random.Generator) -> None:
    other = copy.deepcopy(layer)
    written(other, rng)
    inner(other).prepare()
    layer.__dict__.update(other.__dict__)


def by_dictionary(layer: Any, rng: np.random.Generator) -> Any:
    made = dictionary(layer, rng)
    if "layer" in made.__dict__:
        made.layer = dictionary(made.layer, rng)
    return made


def by_views(layer: Any, rng: np.random.Generator) -> Any:
    """The copy has other arrays, which show the same memory."""
    made = by_dictionary(layer, rng)
    inner(made)._parameters = {name: array[:] for name, array in inner(made).arrays.items()}
    return made


def numpy_with_own(make: Way) -> Way:
    def run(layer: Any, rng: np.random.Generator) -> Any:
        made = make(layer, rng)
        if made is not layer and inner(made) is inner(layer):
            made.layer = copy.copy(made.layer)
        arrays_replaced(made, rng)
        return made

    return run


NUMPY_COPIES: dict[str, Way] = {
    "dictionary": by_dictionary,
    "dictionary, own arrays": numpy_with_own(by_dictionary),
    "views": by_views,
    "copy": lambda layer, rng: copy.copy(layer),
    "copy, own arrays": numpy_with_own(lambda layer, rng: copy.copy(layer)),
    "deepcopy": lambda layer, rng: copy.deepcopy(layer),
    "pickle": lambda layer, rng: pickle.loads(pickle.dumps(layer)),
}
NUMPY_EDITS: dict[str, Way] = {
    "set_parameters": written,
    "Adam": of_adam,
    "Adam of views": of_views,
    "EarlyStopping": restored,
    "an entry of _parameters": array_entered,
    "_parameters": arrays_replaced,
    "__dict__.update": became,
}
NUMPY_LAYERS: dict[str, Callable[[], Any]] = {
    "LSTM": lambda: an.LSTM(INPUTS, UNITS, seed=0),
    "Feedback": lambda: an.Feedback(an.LSTM(INPUTS, UNITS, seed=0), an.Dense(UNITS, 2, seed=0)),
    "two layers": lambda: an.GRU(INPUTS, UNITS, 2, seed=0),
    "RNN": lambda: an.RNN(cells.PeepholeLSTM, INPUTS, UNITS, seed=0),
    "8 bits": lambda: compress.quantize(an.LSTM(INPUTS, UNITS, seed=0)),
}


@pytest.mark.parametrize("name", NUMPY_LAYERS)
@pytest.mark.sample(2)
def test_copies_of_numpy_layers(
    name: str, taken: list[int], request: pytest.FixtureRequest
) -> None:
    layer, fresh = NUMPY_LAYERS[name](), NUMPY_LAYERS[name]()
    state = state_of(prepared(layer))
    floats = name != "8 bits"
    edits = {edit: run for edit, run in NUMPY_EDITS.items() if floats or "Adam" not in edit}

    def step(layer: Any) -> Any:
        inner(layer).prepare() if inner(layer)._prepared is None else None
        return layer.step(X, state)[0]

    def right(layer: Any) -> Any:
        fresh.set_parameters(layer.state_dict())
        output = inner(fresh).forward(X[None], state)[0]
        return (fresh.readout.forward(output) if name == "Feedback" else output)[0]

    try_all(layer, NUMPY_COPIES, edits, step, right, request)
    assert len(taken) > 20, "steps run on packed weights"


def test_an_array_appears_beside_the_others() -> None:
    layer, rng = an.GRU(INPUTS, UNITS, bias=False, seed=0).prepare(), np.random.default_rng(0)
    before = layer.step(X)[0]
    for name in ("bias_ih_l0", "bias_hh_l0"):
        layer._parameters[name] = rng.standard_normal(3 * UNITS).astype(np.float32)
    assert_close(layer.step(X)[0], layer.forward(X[None])[0][0], "float32", "forward")
    assert not np.array_equal(layer.step(X)[0], before)


def test_a_shallow_copy_keeps_its_units() -> None:
    """Units that are removed from a layer stay in a copy of it."""
    layer = an.LSTM(INPUTS, 2 * UNITS, seed=0).prepare()
    other = copy.copy(layer).prepare()
    right = other.forward(X[None])[0][0]
    compress.shrink(layer, UNITS, multiple=1)
    assert_close(other.step(X)[0], right, "float32", "forward")
    assert_close(layer.step(X)[0], layer.forward(X[None])[0][0], "float32", "forward")
    assert other.sizes == {"H": 2 * UNITS} and layer.sizes == {"H": UNITS}


# ---- read-only arrays ----------------------------------------------------------------------------
def read_only(layer: Any) -> Any:
    """A layer as it comes from an object store such as Ray's: its arrays show shared memory."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(layer, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[bytes(buffer) for buffer in buffers])


def test_a_read_only_layer_runs_and_says_what_to_do_in_training() -> None:
    layer, sequence = read_only(an.LSTM(INPUTS, UNITS, seed=0)), X[None]
    assert not layer.parameters["weight_ih_l0"].flags.writeable
    right = layer.forward(sequence)[0][0]
    assert_close(layer.prepare().step(X)[0], right, "float32", "forward")
    optimizer, kept = an.Adam(layer), layer.state_dict()
    says = (
        r"weight_ih_l0: given a read-only array, .*; expected an array that can be written to\. "
        r"Copy the layer first: copy\.deepcopy\(layer\)"
    )
    layer.forward(sequence, training=True)
    layer.backward(np.ones((1, ROWS, UNITS)))
    stop = an.EarlyStopping(layer, patience=1)
    stop(1.0)
    for write in (optimizer.step, stop.restore, lambda: layer.set_parameters(kept)):
        with pytest.raises(ValueError, match=says):
            write()
    assert optimizer.steps == 0
    copied = copy.deepcopy(layer)
    copied.set_parameters({name: 2 * array for name, array in kept.items()})
    assert_close(layer.step(X)[0], right, "float32", "forward")


@pytest.mark.parametrize("kind", ["BatchNorm", "Standardise"])
def test_read_only_statistics(kind: str) -> None:
    norm = read_only(getattr(an, kind)(INPUTS))
    fit = {
        "BatchNorm": lambda norm: norm.forward(X[None], training=True),
        "Standardise": lambda norm: norm.fit(X),
    }[kind]
    norm.forward(X[None])
    with pytest.raises(ValueError, match="mean: given a read-only array"):
        fit(norm)
    fit(copy.deepcopy(norm))
