"""A layer on the fused engine, as one ``torch.autograd.Function``; the entry to all engines."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from anycell.engines import cpu
from anycell.engines.gpu import build, launch
from anycell.lang.cell import Cell
from anycell.layer import Kept, backward, forward, gpu
from anycell.layer.sequences import keeping, sequences
from anycell.layer.signature import OF_STATES, ROWS
from anycell.plan import Layer, Options, Plan, Sizes, no_kernel_on_gpu, plan
from anycell.plan.dtype import dtypes
from anycell.torch.framework import ENGINES, Returned, Torch, TorchDevice
from anycell.torch.observers import ORDINARY, autocast, left_alone, unlike_memory, watched
from anycell.torch.operators import passes
from anycell.torch.operators.composite import Arrays, Result, States, composite
from anycell.torch.threads import threads


def plan_on(device: str, cell: Cell, sizes: Sizes, dtype: torch.dtype) -> Plan | str:
    """Returns the plan of the fused kernel for a type of device, or why there is no plan."""
    engine = ENGINES.get(device)
    if engine is None:
        return f"no fused kernel for device {device!r} as yet"
    why = (_foreign() or build.unusable()) if engine == "gpu" else None
    return why or plan_of(cell, sizes, dtype, engine)


@functools.cache
def _foreign() -> str | None:
    """Returns why the GPU engine cannot use torch's "cuda" device, or None if it can use it."""
    if torch.version.hip is not None:
        return "PyTorch is built for ROCm; the GPU engine has kernels for NVIDIA's cards only"
    return launch.missing() if torch.cuda.is_available() else None


@functools.lru_cache(maxsize=512)
def plan_of(cell: Cell, sizes: Sizes, dtype: torch.dtype, engine: str) -> Plan | str:
    """Returns the plan of the fused kernel on the engine "cpu" or "gpu", or why there is none."""
    name = str(dtype).removeprefix("torch.")
    if name not in dtypes(engine, quantized=True):
        return f"no fused kernel for {dtype} on the {engine.upper()} as yet"
    known = dict(sizes)
    chosen = plan(cell, known["H"], name if engine == "cpu" else "float32", sizes=known)
    if chosen.engine == "reference" or engine == "cpu":
        return chosen if chosen.engine == engine else chosen.reason
    if why := no_kernel_on_gpu(cell):
        return why
    return plan(cell, known["H"], name, engine, known)


# Of fewer steps, second derivatives take less time step by step: of one, two thirds.
FEWEST_STEPS = 2
Forward = Callable[[Layer, Arrays, bool], tuple[Tensor, States, Kept | None]]


def run(layer: Layer, arrays: Arrays) -> Result:
    """Runs a layer, which has its plan, on the fused engine; returns the same results as
    ``composite``.
    """
    if layer.sequences:  # the kernel keeps them, as it does for the backward pass
        plan = keeping(layer.plan, layer.sequences)
        layer = layer._replace(plan=plan, options=layer.options._replace(checkpoint=None))
    if torch.is_grad_enabled():
        for tensor in arrays.values():
            if tensor.requires_grad:
                given = layer, run_forward, tuple(arrays), *arrays.values()
                output, *rest = Fused.apply(*given)
                states = len(layer.cell.states)
                return output, tuple(rest[:states]), tuple(rest[states:])
    output, final, kept = run_forward(layer, arrays, bool(layer.sequences))
    return output, final, () if kept is None else series(layer, arrays, kept)


def series(layer: Layer, arrays: Arrays, kept: Kept) -> States:
    """``layer.sequences``, from what the forward pass has kept."""
    return tuple([whole.detach() for whole in sequences(layer, arrays, kept)])


class Fused(torch.autograd.Function):
    """A layer and its gradient.

    Instead of the tensors' names there may be the calls of a step, see ``replayed.Pass``, which
    make the layer's arrays of the tensors. States have no axis of directions there.
    """

    @staticmethod
    def forward(
        ctx: Any, layer: Layer, forward_pass: Forward, names: Any, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        of_step = type(names) is not tuple
        arrays: Any = tensors if of_step else dict(zip(names, tensors, strict=True))
        output, final, kept = forward_pass(layer, arrays, True)
        assert kept is not None
        # Saved by autograd, they are guarded against edits, and pass through the user's hooks.
        ctx.save_for_backward(*tensors, *kept.flat())
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.names = layer, names
        ctx.states = [array is not None for array in kept.states[0]]
        if not layer.sequences:
            return output, *final
        arrays = names.enter(tensors) if of_step else arrays
        return output, *final, *series(layer, arrays, kept)

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Any, ...]:
        layer, names, needs = ctx.layer, ctx.names, ctx.needs_input_grad[3:]
        if all(gradient is None for gradient in arriving):
            return None, None, None, *[None for _ in needs]
        # Read once: hooks on saved tensors, such as activation checkpoints', run at each read.
        saved, ends = ctx.saved_tensors, 1 + len(layer.cell.states)
        tensors, of_step = saved[: len(needs)], type(names) is not tuple
        if of_step:
            final = [None if d is None else d.unsqueeze(0) for d in arriving[1:ends]]
            arriving = arriving[0], *final, *arriving[ends:]
        pairs = zip(layer.sequences, arriving[ends:], strict=True)
        inside = {name: gradient.resolve_neg() for name, gradient in pairs if gradient is not None}
        # The GPU's kernels take gradients of outputs and final states, but of no other sequence.
        elsewhere = bool(inside) and layer.plan.engine == "gpu"
        unlike = unlike_memory(arriving, saved, ORDINARY) or watched() or elsewhere
        by_torch = unlike or torch.is_grad_enabled()
        if of_step and not by_torch:
            known = tensors, saved[len(needs) :], ctx.states, arriving[:ends], needs, inside
            return None, None, None, *enter(layer.cell, "backward", names.backward, layer, *known)
        given = dict(zip(range(len(needs)) if of_step else names, tensors, strict=True))
        wanted = {name for name, need in zip(given, needs, strict=True) if need}
        by_name: Mapping[Any, Tensor | None]
        if by_torch:
            run: Any = differentiable
            lay = (lambda given: layered(names.enter([*given.values()]))) if of_step else dict
            fits = not (unlike or layer.sequences or "recurrent_mask" in given)
            call = layer, given, wanted, arriving, saved[len(needs) :], fits, lay
            by_name = enter(layer.cell, "backward", run, *call)
        else:
            kept = Kept.of(saved[len(needs) :], ctx.states, len(layer.options.reverse))
            by_name = enter(
                layer.cell, "backward", run_backward,
                layer, given, kept, arriving[:ends], wanted, inside,
            )  # fmt: skip
        found = [by_name.get(n) if n in wanted else None for n in given]
        return None, None, None, *found


left_alone(Fused.backward)  # a compiled function may take gradients of a layer behind a break


def run_forward(layer: Layer, arrays: Arrays, keep: bool) -> tuple[Tensor, States, Kept | None]:
    """Runs one layer; returns its output, final states, and what the backward pass reads."""
    finals: Sequence[Tensor]
    if layer.plan.engine == "cpu":
        layer = ready(layer)
        form = passes.forward_form(layer, arrays, keep)
        if form is not None:
            known = passes.forward_again(form, layer, arrays, keep)
            if known is not None:
                return known
        host = Torch.of(layer.plan.dtype)
        output, finals, kept = forward(host, layer.plan, arrays, layer.options, keep=keep)
        if form is not None:
            passes.learn_forward(form, layer, arrays, keep)
    else:
        device = TorchDevice.on(layer.plan.dtype, arrays["x"].device)
        options = on_threads(layer.options)
        output, finals, kept = device.run(gpu.forward, layer.plan, arrays, options, keep=keep)
    # Detached, so that autograd does not take them for views of what is kept.
    return output.detach(), tuple(finals), kept


def run_backward(
    layer: Layer,
    arrays: Mapping[str, Tensor],
    kept: Kept,
    arriving: Sequence[Tensor | None],
    wanted: set[str],
    inside: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Returns the gradients of a layer's arrays by name; ``inside`` are of ``layer.sequences``."""
    if layer.plan.engine == "gpu":
        d_output, *d_final = arrived(None, arriving)
        given = layer.plan, arrays, on_threads(layer.options), kept, d_output, d_final
        device = TorchDevice.on(layer.plan.dtype, arrays["x"].device)
        return device.run(gpu.backward, *given, wanted=wanted)
    layer = ready(layer)
    host = Torch.of(layer.plan.dtype)
    ends = arrived(host, arriving)
    form = None if inside else passes.backward_form(layer, arrays, ends, wanted)
    if form is not None:
        known = passes.backward_again(form, layer, arrays, kept.flat(), ends)
        if known is not None:
            return known
    given = layer.plan, arrays, layer.options, kept, ends[0], ends[1:]
    gradients = backward(host, *given, d_states=inside, wanted=wanted)
    if form is not None:
        passes.learn_backward(form, layer, arrays, kept, ends, wanted)
    return gradients


def arrived(host: Torch | None, arriving: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients of the output and of final states as kernels read them."""
    # Autograd may pass lazily negated tensors, whose memory holds the negatives of their numbers.
    d_output, *others = [None if d is None else d.resolve_neg() for d in arriving]
    if d_output is not None and host and (fitted := host.fit(d_output, ROWS)) is not None:
        d_output = fitted  # often one expanded number, which is copied each time
    return [d_output, *others]


def ready(layer: Layer) -> Layer:
    """The layer as its passes on the CPU run it now: with torch's number of threads, and with
    matmuls that round as torch's setting allows.
    """
    plan, options = rounded(layer.plan), on_threads(layer.options)
    if plan is layer.plan and options is layer.options:  # as in calls like an earlier one
        return layer
    return layer._replace(plan=plan, options=options)


def rounded(plan: Plan) -> Plan:
    """The plan whose matmuls round as torch's setting allows."""
    precision = torch.get_float32_matmul_precision()
    return plan if precision == "highest" else cpu.rounded(plan, precision)


def differentiable(
    layer: Layer, tensors: Mapping[Any, Tensor], wanted: set[Any],
    arriving: Sequence[Tensor | None], kept: Sequence[Tensor] = (), fits: bool = False,
    lay: Callable[[Any], Arrays] = dict,
) -> dict[Any, Tensor | None]:  # fmt: skip
    """Returns gradients that can be differentiated again, and seen: by ``anycell::backward`` if
    that ``fits``, otherwise through the composite, by autograd, which takes hooks on saved tensors,
    or by ``torch.func``, whose tensors autograd takes for constants.

    Args:
        kept: by the forward pass.
        lay: makes the layer's arrays of the tensors.
    """
    inputs = {name: t for name, t in tensors.items() if name in wanted}
    present = tuple([gradient for gradient in arriving if gradient is not None])

    def laid(some: Sequence[Tensor]) -> Arrays:
        return lay({**tensors, **dict(zip(inputs, some, strict=True))})

    def reached(*some: Tensor) -> tuple[Tensor, ...]:
        """The results whose gradients arrive."""
        output, final, others = composite(layer, laid(some))
        ends = zip((output, *final, *others), arriving, strict=True)
        return tuple([result for result, gradient in ends if gradient is not None])

    gradients: Sequence[Tensor | None]
    if torch._C._are_functorch_transforms_active():
        pull: Any = torch.func.vjp(reached, *inputs.values())[1]
        gradients = pull(present)
        return dict(zip(inputs, gradients, strict=True))
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Differentiates for views of the inputs, because one input may depend on another. One of
        # a transform of torch.func that has ended need not require a gradient outside of it.
        places = [t.view_as(t).requires_grad_() for t in inputs.values()]
        if again and fits and len((arrays := laid(places))["x"]) >= FEWEST_STEPS:
            results, present = zip(*_by_operator(layer, arrays, kept, arriving), strict=True)
        else:
            results = reached(*places)
        gradients = gradients_of(results, places, present, again)
    return dict(zip(inputs, gradients, strict=True))


def gradients_of(
    results: Iterable[Tensor | None], places: Sequence[Tensor],
    arriving: Iterable[Tensor | None], again: bool,
) -> Sequence[Tensor | None]:  # fmt: skip
    """Does ``torch.autograd.grad``, where results may depend on none of the places."""
    pairs = [
        (result, gradient)
        for result, gradient in zip(results, arriving, strict=True)
        if gradient is not None and result is not None and result.requires_grad
    ]
    if not pairs:
        return [None] * len(places)
    ends, present = zip(*pairs, strict=True)
    return torch.autograd.grad(ends, places, present, create_graph=again, allow_unused=True)


def _by_operator(
    layer: Layer, arrays: Arrays, kept: Sequence[Tensor], arriving: Sequence[Tensor | None]
) -> Iterable[tuple[Tensor, Tensor]]:
    """A layer's arrays that require a gradient, each with it, by ``anycell::backward``."""
    there, needs = [g is not None for g in arriving], [t.requires_grad for t in arrays.values()]
    kind, options = str(arrays["x"].dtype).removeprefix("torch."), layer.options
    called = Layer(layer.cell, layer.sizes, options._replace(threads=1), kind, tuple(arrays))
    if options.checkpoint is not None:  # the operator runs forwards again
        kept = ()
    made = torch.ops.anycell.backward(
        [*arrays.values()], kept, [g for g in arriving if g is not None],
        called.text(hyper=False), [*layer.cell.hyper.values()], there, needs,
    )  # fmt: skip
    return zip(itertools.compress(arrays.values(), needs), made, strict=True)


def enter(cell: Cell, what: str, run: Callable[..., Returned], *arguments: Any) -> Returned:
    """Calls ``run(*arguments)``; if a profiler is on, in a range with the name of the cell.

    Turns autocast off, under which matmuls return another dtype than the kernels read. Inputs have
    been cast by now, but a backward pass, or an exported program, can be called under autocast too.
    """
    if autocast():
        with torch._C._DisableAutocast():
            return _ranged(cell, what, run, *arguments)
    if not torch._C._autograd._profiler_enabled():  # a range alone takes microseconds
        return run(*arguments)
    return _ranged(cell, what, run, *arguments)


def _ranged(cell: Cell, what: str, run: Callable[..., Returned], *arguments: Any) -> Returned:
    with record_function(f"anycell.{cell.name}.{what}"):
        return run(*arguments)


# -- between torch and the engine ------------------------------------------------------------------


def layered(arrays: Arrays) -> Arrays:
    """The arrays as a layer has them, from states without an axis of directions."""
    return {n: t.unsqueeze(0) if n.startswith(OF_STATES) else t for n, t in arrays.items()}


def on_threads(options: Options) -> Options:
    """Returns the options of a call with torch's number of threads."""
    count = threads()
    return options if options.threads == count else options._replace(threads=count)
