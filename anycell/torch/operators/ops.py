"""The fused engine as operators of PyTorch, for tracers, torch.compile and torch.export, and modes.

``anycell::forward`` takes a list of tensors, and a text that names the cell, the options, and the
array of the signature that each tensor is. It is a text, because a graph holds no Python objects
and outlives the process: cells are found again by a name made of what they compute. Run-time
hyperparameters are separate arguments, so that a schedule makes no new graphs. The device of a call
decides which engine runs it.

Autograd sees only ``anycell::forward``. It turns into ``anycell::run``, which may keep what the
gradient needs, and ``anycell::backward``. Compiled graphs consist of these two, so that their calls
do not pass autograd again, which would take as long as a few steps of a small layer.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # calls torch.compiler.disable at the first call
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from anycell import cells
from anycell.lang.cell import Cell
from anycell.layer import Kept, contract, gpu, keeps_state
from anycell.layer import names as array_names
from anycell.layer.checks import check_options
from anycell.layer.signature import FLAGS, places, state_names
from anycell.plan import DTYPES, OF_CALL, OPTIONS, Layer, Options, Plan, Sizes, scales_of
from anycell.plan.layer import CELLS, SEED, changed, name_of, register
from anycell.recent import add_recent
from anycell.torch.observers import (
    compiled,
    constant,
    exporting,
    transformed,
    watched,
)
from anycell.torch.operators import fused
from anycell.torch.operators.composite import Arrays, Result
from anycell.torch.operators.fused import enter
from anycell.torch.operators.native import Form, play
from anycell.torch.operators.passes import (
    as_given,
    backward_again,
    backward_form,
    form_of,
    forward_again,
    forward_form,
    of_params,
)
from anycell.torch.operators.warm import ordinary, settings

# Inductor's CUDA graphs (mode="reduce-overhead") must leave our operators out: the operators replay
# their own graphs, whose memory lasts, and read what kernels have reported. Recent PyTorch has a
# tag for this; without the tag, layers on a card do not become operators.
_TAGS = [torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else []
ON_CARDS = bool(_TAGS)
# Not by torch's own functions in Python, as in ``warm``.
_modes, _functions = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transforms, _trace = torch._C._are_functorch_transforms_active, torch._C._get_tracing_state


def known(cell: Cell, sizes: Sizes, x: Tensor) -> bool:
    """Whether the fused engine runs a registered cell on tensors like x."""
    facts = cell.name, cell.key, sizes, x.dtype, x.device.type
    return _text(*facts, tuple(Options()), ("x",)) is not None


def draws(cell: Cell) -> bool:
    """Whether a cell may draw random masks: under a compiler, any cell that is not registered."""
    return _draws(cell.name, cell.key) if torch.compiler.is_dynamo_compiling() else bool(cell.keeps)


# A compiler cannot trace these functions. Of a cell it sees only the name and the key.


def _constant_size(size: int) -> int:
    """Makes a size constant. Before PyTorch 2.6, ``dynamic=True`` makes the sizes of a module
    unknown to the compiler until it compiles a loop over them.
    """
    return len(range(size))


@constant
def _text(
    name: str,
    key: str,
    sizes: Sizes,
    dtype: torch.dtype,
    device: str,
    options: tuple[Any, ...],
    arrays: tuple[str, ...],
) -> str | None:
    """Returns the text of a call; None if no fused kernel runs it or its cell is not registered."""
    cell = CELLS.get(name_of(name, key))
    if cell is None or (device == "cuda" and not ON_CARDS):
        return None
    if isinstance(_plan_on(device, cell, sizes, dtype), str):
        return None
    kind = str(dtype).removeprefix("torch.")
    return Layer(cell, sizes, Options(*options), kind, arrays).text(hyper=False)


@constant
def plain_call(
    name: str,
    key: str,
    sizes: Sizes,
    dtype: torch.dtype,
    training: bool,
    layers: int,
    directions: int,
    given: bool,
    parameters: tuple[str, ...],
) -> str | None:
    """Returns lines for ``Recurrent._compiled``: the sizes of states, the parameters that must not
    exist, and for each layer those that it reads, and the text of the operator. None if a module is
    not to be called so.

    Args:
        given: whether there are states.
        parameters: the names of those that the module has.
    """
    cell = CELLS.get(name_of(name, key))
    if cell is None or cell.static or (training and cell.keeps) or transformed() or exporting():
        return None
    plan = fused.plan_on("cpu", cell, sizes, dtype)
    if isinstance(plan, str) or plan.engine != "cpu":
        return None
    absent, calls, kind = list[str](), list[str](), str(dtype).removeprefix("torch.")
    for k in range(layers):
        named = places(cell.learned, k, directions)
        there = {public: place for public, place in named.items() if place in parameters}
        absent += [place for place in named.values() if place not in parameters]
        options = Options((False, True)[:directions], training=training, stream=k)
        arrays = "x", *state_names("state", cell) * given, *there
        text = Layer(cell, sizes, options, kind, arrays).text(hyper=False)
        calls.append(f"{' '.join(there.values())}\t{text}")
    widths = [str(plan.sizes[state.size]) for state in cell.states]
    return "\n".join([" ".join(widths), " ".join(absent), *calls])


@constant
def _draws(name: str, key: str) -> bool:
    cell = CELLS.get(name_of(name, key))
    return cell is None or bool(cell.keeps)


# After a graph break, Dynamo would look into this function, and warn about a cache in it.
_plan_on = _disable_dynamo(fused.plan_on)


@functools.lru_cache(maxsize=4096)
def read(text: str) -> Layer:
    """Returns the layer of a text: a graph may come from a file.

    torch sets the threads. With ``checkpoint`` the forward pass keeps nothing, because the amount
    would be no simple function of the sizes; the backward pass starts by running it again.
    """
    try:
        layer = Layer.read(text)
        if layer.text(hyper=False) != text or not _sound(layer):
            raise ValueError
    except (ValueError, TypeError, KeyError):
        raise ValueError(
            f"form: given {text!r}; expected a text that anycell.torch has written for this "
            "operator. Export or trace the layer again."
        ) from None
    return layer


def _sound(layer: Layer) -> bool:
    """Whether all fields have valid types and ranges; ``_planned`` compares them with the cell."""
    options = layer.options
    check_options({n: getattr(options, n) for n in (*OF_CALL, "checkpoint")}, OPTIONS)
    likes = zip(options, Options()._replace(checkpoint=options.checkpoint), strict=True)
    return (
        layer == Layer(*layer[:5])
        and all(type(value) is type(like) for value, like in likes)
        and len(options.reverse) in (1, 2)
        and {*map(type, options.reverse)} == {bool}
        and 0 <= options.stream < 1 << 31
        and all(type(size) is int and size > 0 for _, size in layer.sizes)
        and {*map(type, layer.arrays)} == {str}
        and layer.dtype in DTYPES
        and "x" in layer.arrays
        and len({*layer.arrays}) == len(layer.arrays)
    )


@functools.lru_cache(maxsize=1024)
def _planned(text: str, hyper: tuple[float, ...], device: str) -> Layer:
    """Returns the layer of a text, whose cell has these hyperparameters, with its plan on a type of
    device.
    """
    layer = read(text)
    cell, kind = layer.cell, layer.dtype
    if tuple(cell.hyper.values()) != hyper:
        _expect("hyper", len(hyper), len(cell.hyper))
        cell = cell(**dict(zip(cell.hyper, hyper, strict=True)))
    names = (*array_names(cell, len(layer.options.reverse)), "seed")
    _expect("form, names that the cell does not have", {*layer.arrays} - {*names}, set())
    plan: Plan | str = _plan_on(device, cell, layer.sizes, getattr(torch, kind))
    if isinstance(plan, str):
        given = f"given sizes {dict(layer.sizes)} and {kind}"
        raise RuntimeError(f"anycell: the cell {cell.name} of this graph, {given}: {plan}.")
    return layer._replace(cell=cell, plan=plan)


def planned(tensors: Sequence[Tensor], text: str, hyper: Sequence[float]) -> tuple[Layer, Tensor]:
    """Returns the layer with its plan for these tensors, and x; checks the number of tensors."""
    layer = read(text)
    _expect("tensors", len(tensors), len(layer.arrays))
    x = tensors[layer.arrays.index("x")]
    _expect("x, axes", x.dim(), 3)
    return _planned(text, tuple(hyper), x.device.type), x


def unpack(
    tensors: Sequence[Tensor], text: str, hyper: Sequence[float]
) -> tuple[Layer, dict[str, Tensor]]:
    """Returns the layer with its plan and its seed, and its arrays.

    Flags and seed are checked here, all other arrays by ``anycell.layer.contract``.
    """
    layer, x = planned(tensors, text, hyper)
    arrays = layer.named(tensors)
    for name in FLAGS:
        if name in arrays:
            kind = torch.bool, tuple(x.shape[:2])
            _expect(name, (arrays[name].dtype, tuple(arrays[name].shape)), kind)
    seed = arrays.pop("seed", None)
    if seed is not None:
        _expect("seed", (seed.dtype, seed.dim()), (torch.int64, 0))
        layer = layer._replace(options=layer.options._replace(seed=int(seed)))
    return layer, arrays


def apart(layer: Layer) -> bool:
    """Whether the output is not the sequence of hidden states."""
    return layer.options.apart("mask" in layer.arrays)


def _kept_states(layer: Layer) -> list[bool]:
    """Says which states besides the first are kept: with checkpoints all, at the borders."""
    plan, borders = layer.plan, layer.options.checkpoint is not None
    keeps = gpu.keeps_state if plan.engine == "gpu" else keeps_state
    return [i > 0 and (borders or keeps(plan, i)) for i in range(len(layer.cell.states))]


def wanted_names(layer: Layer, needs: Sequence[bool]) -> set[str]:
    """Returns the names of the tensors that need a gradient."""
    return {name for name, need in zip(layer.arrays, needs, strict=True) if need}


def _expect(name: str, given: Any, expected: Any) -> None:
    """Checks an operator's arguments against its text: a graph may come from a file."""
    if given != expected:
        raise ValueError(
            f"anycell operator, {name}: given {given}; expected {expected}, from the form and the "
            "cell. Export or trace the layer again."
        )


def run(
    layer: Layer, arrays: Arrays, forward: Callable[..., Sequence[Tensor]] | None = None
) -> Result | None:
    """Runs a layer as an operator; returns None if the fused engine cannot run it.

    Args:
        forward: what to call in place of ``anycell::forward``.
    """
    cell, options, x = layer.cell, layer.options, arrays["x"]
    if "recurrent_mask" in arrays or layer.sequences:
        return None
    if isinstance(options.seed, Tensor):
        arrays, options = {**arrays, "seed": options.seed}, changed(options, SEED, 0)
    dtype = torch.int8 if scales_of("weight_ih") in arrays else x.dtype
    sizes = []
    for symbol, size in layer.sizes:
        sizes.append((symbol, _constant_size(size)))
    facts = tuple(sizes), dtype, x.device.type, tuple(options), tuple(arrays)
    text = _text(cell.name, cell.key, *facts)
    if text is None:
        return None
    hyper = list(cell.hyper.values())
    if not compiled():
        _tell_counters()
    output, *final = (forward or torch.ops.anycell.forward)(list(arrays.values()), text, hyper)
    return output, tuple(final), ()


# -- the operators ---------------------------------------------------------------------------------


def _run(tensors: Sequence[Tensor], text: str, hyper: Sequence[float], keep: bool) -> list[Tensor]:
    """Returns the output and the final states, or, if ``keep``, the final states and the arrays for
    the backward pass. The output is then a part of one of these arrays, or else comes last, because
    results of an operator must not share memory.
    """
    if results := _run_again(tensors, text, hyper, keep):
        return results
    layer, arrays = unpack(tensors, text, hyper)
    made = enter(layer.cell, "forward", fused.run_forward, layer, arrays, keep)
    _remember(_facts(text, hyper, keep, len(tensors)), layer, "forward", keep)
    return _listed(layer, *made)


def _listed(
    layer: Layer, output: Tensor, final: Sequence[Tensor], kept: Kept | None
) -> list[Tensor]:
    """The results of ``_run``."""
    if kept is None:
        return [output, *final]
    return [*final, *kept.flat(), *([output] if apart(layer) else [])]


def _run_again(
    tensors: Sequence[Tensor], text: str, hyper: Sequence[float], keep: bool
) -> list[Tensor]:
    """The results of ``_run``, as of an earlier call; none if there was none like it."""
    known = _known.get(_facts(text, hyper, keep, len(tensors)))
    if known is None or not ordinary(map(type, tensors)):
        return []
    layer, form = known
    if form is not None:
        return play(tensors, form.number, 0)
    arrays = layer.named(tensors)
    form = forward_form(layer, arrays, keep) if _flagged(arrays) else None
    results = None if form is None else forward_again(form, layer, arrays, keep)
    return [] if results is None else _listed(layer, *results)


class _Pass(NamedTuple):
    """A pass that was run: the layer as ``passes`` takes it, and its form, if the operator reads
    the tensors of the call themselves.
    """

    layer: Layer
    form: Form | None


_known: dict[tuple[Any, ...], _Pass] = {}  # by what calls of the operators say of them


def _facts(text: str, hyper: Sequence[float], *others: Any) -> tuple[Any, ...]:
    """The key of a pass in ``_known``."""
    return text, tuple(hyper), *others, settings(), torch._C._autograd._profiler_enabled()


def _remember(key: tuple[Any, ...], layer: Layer, *facts: Any) -> None:
    """Lets later calls find a pass, unless a profiler wants to see its range."""
    if key[-1] or layer.plan.engine != "cpu" or layer.options.seed or "seed" in layer.arrays:
        return
    layer, form = fused.ready(layer), None
    if as_given(layer.plan, layer.arrays):
        form = form_of(layer, layer.arrays, *facts)
        if form is None:
            return
    _known.pop(key, None)  # whose form may be an older one
    add_recent(_known, key, _Pass(layer, form), 512)


def _flagged(arrays: Arrays) -> bool:
    """Whether all flags of a call are as the operators take them."""
    shape = arrays["x"].shape[:2]
    flags = [arrays[name] for name in FLAGS if name in arrays]
    return all(one.dtype is torch.bool and one.shape == shape for one in flags)


def _run_fake(
    tensors: Sequence[Tensor], text: str, hyper: Sequence[float], keep: bool
) -> list[Tensor]:
    layer, x = planned(tensors, text, hyper)
    _expect_one_device(layer, tensors)
    plan, directions = layer.plan, layer.options.reverse
    steps, rows, _ = x.shape
    kept = contract.kept_shapes(plan, steps, rows, directions, _kept_states(layer))
    separate = x.new_empty(steps, rows, kept.hidden[2]) if apart(layer) else None
    final = [x.new_empty(len(directions), rows, layer.size(s.size)) for s in layer.cell.states]
    if not keep:
        return [x.new_empty(kept.hidden)[1 : 1 + steps] if separate is None else separate, *final]
    # States besides the first are kept in the dtype in which the cell computes.
    wide = getattr(torch, plan.types.math.name) if plan.engine == "cpu" else x.dtype
    memory = [x.new_empty(shape) for shape in (kept.hidden, *kept.values)]
    memory += [x.new_empty(shape, dtype=wide) for shape in kept.flat()[len(memory) :]]
    return [*final, *memory, *([] if separate is None else [separate])]


def _expect_one_device(layer: Layer, tensors: Sequence[Tensor]) -> None:
    """Refuses tensors on other devices than x: with one on "meta", results are mere shapes."""
    arrays = layer.named(tensors)
    for name, tensor in arrays.items():
        if name != "seed":  # the seed is always on the CPU
            _expect("device of a tensor", str(tensor.device), str(arrays["x"].device))


class _BackwardCall(NamedTuple):
    """The arguments of ``anycell::backward``.

    Attributes:
        tensors, text, hyper: of the forward pass, and what it has kept: nothing if it runs again.
        arriving: gradients; ``given`` says which of the output and the final states have one.
        needs: whether each tensor needs a gradient.
    """

    tensors: Sequence[Tensor]
    kept: Sequence[Tensor]
    arriving: Sequence[Tensor]
    text: str
    hyper: Sequence[float]
    given: Sequence[bool]
    needs: Sequence[bool]

    @property
    def key(self) -> tuple[Any, ...]:
        """The key of the pass in ``_known``."""
        counts = len(self.tensors), len(self.kept), len(self.arriving)
        return _facts(self.text, self.hyper, tuple(self.given), tuple(self.needs), counts)

    @property
    def gradients(self) -> list[Tensor | None]:
        """The gradients of the output and of each final state; None for what has none."""
        present = iter(self.arriving)
        return [next(present) if one else None for one in self.given]

    def before(self, layer: Layer) -> Kept:
        """The values that the forward pass has kept."""
        return Kept.of(self.kept, _kept_states(layer), len(layer.options.reverse))


def _backward(*arguments: Any) -> list[Tensor]:
    """Returns the gradients of the tensors that need one."""
    if results := _backward_again(*arguments):
        return results
    call = _BackwardCall(*arguments)
    layer, arrays = unpack(call.tensors, call.text, call.hyper)
    cell = layer.cell
    _expect("given", len(call.given), 1 + len(cell.states))
    _expect("arriving", len(call.arriving), sum(call.given))
    _expect("needs", len(call.needs), len(call.tensors))
    if call.kept:
        before: Kept | None = call.before(layer)
    else:
        _, _, before = enter(cell, "forward", fused.run_forward, layer, arrays, True)
    wanted, gradients, run = wanted_names(layer, call.needs), call.gradients, fused.run_backward
    assert before is not None
    by_name = enter(cell, "backward", run, layer, arrays, before, gradients, wanted)
    if call.kept and wanted <= by_name.keys():
        there = tuple([gradient is None for gradient in gradients])
        _remember(call.key, layer, "backward", there, frozenset(wanted))
    return [
        _alone(by_name[name], layer.plan) if name in by_name else t.new_zeros(t.shape)
        for name, t in zip(layer.arrays, call.tensors, strict=True)
        if name in wanted
    ]


def _backward_again(*arguments: Any) -> list[Tensor]:
    """The results of ``_backward``, as of an earlier call; none if there was none like it."""
    call = _BackwardCall(*arguments)
    known, inputs = _known.get(call.key), [*call.tensors, *call.kept, *call.arriving]
    if known is None or not call.kept or not ordinary(map(type, inputs)):
        return []
    layer, form = known
    names = itertools.compress(layer.arrays, call.needs)
    if form is not None:
        if not (made := play(inputs, form.number, 0)):
            return []
        by_name = dict(zip(form.names, made, strict=True))
        if layer.cell.params:
            parts = of_params(layer.plan, by_name)
            by_name.update({name: part.clone() for name, part in parts.items()})
        return [by_name[name].contiguous() for name in names]
    arrays, gradients = layer.named(call.tensors), call.gradients
    form = backward_form(layer, arrays, gradients, wanted_names(layer, call.needs))
    if form is None or not _flagged(arrays):
        return []
    again = backward_again(form, layer, arrays, call.before(layer).flat(), gradients)
    return [] if again is None else [_alone(again[name], layer.plan) for name in names]


def _alone(gradient: Tensor, plan: Plan) -> Tensor:
    """Returns the gradient in memory of its own, which operators require: gradients of a cell's
    parameters are parts of one tensor, and on a GPU others may be too. Makes it contiguous, as the
    fake says: the gradient of a weight stored by columns comes in columns.
    """
    whole = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
    if whole and plan.engine == "cpu":
        return gradient.contiguous()
    return gradient.clone(memory_format=torch.contiguous_format)


def _backward_fake(*arguments: Any) -> list[Tensor]:
    call = _BackwardCall(*arguments)
    _expect_one_device(read(call.text), call.tensors)
    return [t.new_empty(t.shape) for t in itertools.compress(call.tensors, call.needs)]


# -- how FlopCounterMode counts them ---------------------------------------------------------------


def _tell_counters() -> None:
    """Adds the operators to the list of each FlopCounterMode that is on; to add them to torch's own
    list, we would have to import its module, which imports Triton.
    """
    for mode in _get_current_dispatch_mode_stack():
        known = getattr(getattr(mode, "counter", mode), "flop_registry", None)
        if known is not None:
            known.setdefault(torch.ops.anycell.run, _flops)
            known.setdefault(torch.ops.anycell.backward, _backward_flops)


def _matmuls(tensors: Sequence[Tensor], text: str) -> dict[str, int]:
    """The operations of the product with each weight, in one step of all rows."""
    arrays = read(text).named(tensors)
    rows = 2 * arrays["x"].shape[1]
    weights = {n: t for n, t in arrays.items() if n.startswith("weight_") and t.dim() > 1}
    return {name: rows * weight.numel() for name, weight in weights.items()}


def _flops(tensors: Sequence[Tensor], text: str, *_: Any, out_val: Any = None) -> int:
    steps = read(text).named(tensors)["x"].shape[0]
    return steps * sum(_matmuls(tensors, text).values())


def _backward_flops(*arguments: Any, out_val: Any = None) -> int:
    """Counts the products for the gradients of each weight, and of what it multiplies."""
    call = _BackwardCall(*arguments)
    layer = read(call.text)
    wanted, steps = wanted_names(layer, call.needs), layer.named(call.tensors)["x"].shape[0]
    count = 0 if call.kept else _flops(call.tensors, call.text)
    for name, flops in _matmuls(call.tensors, call.text).items():
        count += steps * flops * (name in wanted)
        if name.startswith("weight_ih"):
            count += steps * flops * ("x" in wanted)
        elif name.startswith("weight_hh"):  # the first step's state may be a constant
            count += (steps - 1 + any(n.startswith("state ") for n in wanted)) * flops
        else:
            count += steps * flops
    return count


def _directly(operator: Any, again: Callable[..., list[Tensor]]) -> None:
    """Lets calls from Python, as those of compiled graphs, run as earlier ones without PyTorch's
    dispatcher. It would convert all arguments and results twice, because ``_run`` and ``_backward``
    are Python; this takes as long as a step of a small layer.
    """
    dispatched = operator._op

    def call(*arguments: Any, **named: Any) -> Any:
        if not (
            named
            or _modes()
            or _transforms()
            or (_functions() and watched())  # more than a default device
            or torch.is_grad_enabled()
            or forward_ad._current_level >= 0
            or _trace() is not None
        ) and (results := again(*arguments)):
            return results
        return dispatched(*arguments, **named)

    operator._op = call


library = torch.library.Library("anycell", "DEF")
for _schema in (
    "forward(Tensor[] tensors, str form, float[] hyper) -> Tensor[]",
    "run(Tensor[] tensors, str form, float[] hyper, bool keep) -> Tensor[]",
    "backward(Tensor[] tensors, Tensor[] kept, Tensor[] arriving, str form, float[] hyper, "
    "bool[] given, bool[] needs) -> Tensor[]",
):
    library.define(_schema, tags=_TAGS)
for _name, _again in (("run", _run_again), ("backward", _backward_again)):
    _directly(getattr(torch.ops.anycell, _name).default, _again)
FORWARD: Any = torch.ops.anycell.forward  # a name for traces, which check what leads to an object
for _key in ("CPU", "CUDA"):
    library.impl("forward", functools.partial(_run, keep=False), _key)
    library.impl("run", _run, _key)
    library.impl("backward", _backward, _key)
_fake = functools.partial(torch.library.register_fake, lib=library)
_fake("anycell::forward", functools.partial(_run_fake, keep=False))
_fake("anycell::run", _run_fake)
_fake("anycell::backward", _backward_fake)
for _cell in vars(cells).values():
    if isinstance(_cell, Cell):
        register(_cell)
