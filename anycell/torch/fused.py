"""A layer on the fused engine, under one ``torch.autograd.Function``."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anycell import device, layer
from anycell.engines.gpu import build, launch
from anycell.lang.cell import Cell
from anycell.plan import ENGINE_DTYPES, Plan, plan
from anycell.torch.composite import Call, Inputs, Sizes, States, Weights, composite, linear_names
from anycell.torch.device import DeviceHost, host_of
from anycell.torch.host import HOSTS, TorchHost
from anycell.torch.ranges import span

Flat = tuple[Tensor | None, ...]


# Which engine has the kernels, by the type of the device.
ENGINES = {"cpu": "cpu", "cuda": "gpu"}


def plan_on(
    device: str, cell: Cell, hidden_size: int, dtype: torch.dtype, sizes: Sizes = ()
) -> Plan | str:
    """The plan of the fused kernel on devices of a type, or why there is none."""
    engine = ENGINES.get(device)
    if engine is None:
        return f"no fused kernel for device {device!r} as yet"
    why = (_foreign() or build.unusable()) if engine == "gpu" else None
    return why or plan_of(cell, hidden_size, dtype, sizes, engine)


@functools.cache
def _foreign() -> str | None:
    """Why tensors of torch's "cuda" are not on a card that the GPU engine can use."""
    if torch.version.hip is not None:
        return "PyTorch is built for ROCm; the GPU engine has kernels for NVIDIA's cards only"
    return launch.missing() if torch.cuda.is_available() else None


@functools.lru_cache(maxsize=512)
def plan_of(
    cell: Cell, hidden_size: int, dtype: torch.dtype, sizes: Sizes, engine: str = "cpu"
) -> Plan | str:
    """The plan of the fused kernel on the CPU or, with engine "gpu", on a GPU; or why there is
    none.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ENGINE_DTYPES[engine]:
        return f"no fused kernel for {dtype} on the {engine.upper()} as yet"
    found = plan(cell, hidden_size, name if engine == "cpu" else "float32", sizes=dict(sizes))
    if found.engine == "reference" or engine == "cpu":
        return found if found.engine == engine else found.reason
    return plan(cell, hidden_size, name, engine, dict(sizes))


class Form(NamedTuple):
    """How a layer's inputs lie in the flat tuple that autograd wants."""

    call: Call
    plan: Plan
    directions: int
    initial: bool  # whether they are given
    reset: bool

    @classmethod
    def of(cls, call: Call, plan: Plan, inputs: Inputs) -> Form:
        """The form of these inputs."""
        given = inputs.initial is not None, inputs.reset is not None
        return cls(call, plan, len(inputs.weights), *given)

    def flatten(self, inputs: Inputs) -> Flat:
        """All tensors in a row."""
        x, static, initial, reset, weights = inputs
        flat: list[Tensor | None] = [x, static, *(initial or ()), *(reset or ())]
        for w in weights:
            flat += (w.ih, w.hh, w.bias_ih, w.bias_hh, *w.params, *[t for _, t in w.linears])
        return tuple(flat)

    def unflatten(self, flat: Sequence[Any]) -> Inputs:
        """The inverse of ``flatten``."""
        cell = self.call.cell
        states, further = len(cell.states), linear_names(cell)
        linears = 4 + len(cell.params)
        step = linears + len(further)
        reset = 2 + self.initial * states
        first = reset + self.reset * states
        starts = range(first, first + self.directions * step, step)
        groups = [flat[i : i + step] for i in starts]
        weights = [
            Weights(
                w[0],
                w[1],
                w[2],
                w[3],
                tuple(w[4:linears]),
                tuple(zip(further, w[linears:], strict=True)),
            )
            for w in groups
        ]
        given = tuple(flat[2:reset]) or None, tuple(flat[reset:first]) or None
        return Inputs(flat[0], flat[1], *given, weights)


def run(call: Call, plan: Plan, inputs: Inputs) -> tuple[Tensor, States]:
    """Output and final states, as ``composite`` gives them."""
    if torch.is_grad_enabled():
        form = Form.of(call, plan, inputs)
        flat = form.flatten(inputs)
        if any(t is not None and t.requires_grad for t in flat):
            output, *final = _Fused.apply(form, *flat)
            return output, tuple(final)
    output, final, _ = run_forward(call, plan, inputs, keep=False)
    return output, final


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: Form, *flat: Tensor | None) -> tuple[Tensor, ...]:
        output, final, saved = run_forward(form.call, form.plan, form.unflatten(flat), keep=True)
        assert saved is not None
        # As autograd's saved tensors they are guarded against edits, and reach the user's hooks.
        kept = itertools.chain(*saved.states, *saved.reset)
        ctx.save_for_backward(*flat, saved.hidden, *saved.values, *kept)
        ctx.set_materialize_grads(False)
        ctx.form, ctx.options = form, saved.options
        return output, *final

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[1:]
        if all(gradient is None for gradient in arriving):
            return None, *[None for _ in needs]
        # Once: hooks on saved tensors, as those of activation checkpoints, answer each look.
        tensors = ctx.saved_tensors
        flat, kept = tensors[: len(needs)], tensors[len(needs) :]
        with span(ctx.form.call.cell, "backward"):
            if torch.is_grad_enabled() or any(map(_batched, arriving)):
                return None, *_differentiable(ctx.form, flat, needs, arriving)
            return None, *run_backward(ctx, flat, iter(kept), arriving)


def _batched(gradient: Tensor | None) -> bool:
    """Whether a vmap runs over the backward pass, as for a Jacobian."""
    kinds = torch._C._functorch
    return gradient is not None and (
        kinds.is_functorch_wrapped_tensor(gradient) or kinds.is_legacy_batchedtensor(gradient)
    )


def run_forward(
    call: Call, plan: Plan, inputs: Inputs, keep: bool
) -> tuple[Tensor, States, layer.Saved | None]:
    """Output, final states, and what the backward pass reads, of one layer."""
    weights, options = layer_weights(call, inputs), layer_options(call)
    engine, host = engine_of(plan, inputs.x)
    with host.active():
        output, finals, saved = engine.forward(host, plan, inputs.x, weights, options, keep=keep)
    # Detached: for autograd they are no views of what is saved.
    return output.detach(), tuple(finals), saved


def run_backward(
    ctx: Any, flat: Flat, kept: Iterator[Tensor], arriving: Sequence[Tensor | None]
) -> Flat:
    """The gradients of a layer's tensors, in their order."""
    form, options = ctx.form, ctx.options
    inputs, need = form.unflatten(flat), form.unflatten(ctx.needs_input_grad[1:])
    weights = layer_weights(form.call, inputs)
    directions, states = range(form.directions), form.call.cell.states
    hidden, values = next(kept), [next(kept) for _ in directions]
    sequences: list[list[Tensor | None]] = [[next(kept) for _ in states] for _ in directions]
    resets = [] if options.resets is None else [[next(kept) for _ in states] for _ in directions]
    d_output, *d_final = arriving
    engine, host = engine_of(form.plan, inputs.x)
    with host.active():
        computed: Any = engine.backward(
            host,
            form.plan,
            layer.Saved(inputs.x, weights, options, hidden, sequences, values, resets),
            d_output,
            [[None if d is None else d[i] for d in d_final] for i in directions],
            need_x=need.x,
            need_weights=any(any((*w[:4], *dict(w.linears).values())) for w in need.weights),
        )
    dx, found = computed
    names = linear_names(form.call.cell)
    learned = [
        Weights(g.ih, g.hh, g.bias_ih, g.bias_hh, tuple(g.params))._replace(
            linears=tuple([(name, g.linears.get(name)) for name in names])
        )
        for g in found
    ]
    gradients = Inputs(
        dx,
        None if inputs.static is None else torch.stack([g.static for g in found]).sum(0),
        _states(form.initial, [g.initial for g in found]),
        _states(form.reset, [g.reset for g in found]),
        learned,
    )
    return form.flatten(gradients)


def _differentiable(
    form: Form, flat: Flat, needs: Sequence[bool], arriving: Sequence[Tensor | None]
) -> Flat:
    """The gradients as something to differentiate again: by autograd, through the composite."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # A view stands for each input at this place of the graph: one input may hang on another.
        pairs = zip(flat, needs, strict=True)
        places = [t.view_as(t) if t is not None and need else t for t, need in pairs]
        output, final = composite(form.call, form.unflatten(places))
        ends = zip((output, *final), arriving, strict=True)
        outputs, gradients = zip(*[(o, g) for o, g in ends if g is not None], strict=True)
        wanted = [t for t, need in zip(places, needs, strict=True) if t is not None and need]
        found = iter(
            torch.autograd.grad(outputs, wanted, gradients, create_graph=again, allow_unused=True)
        )
    return tuple(next(found) if need else None for need in needs)


# -- between torch and the engine ------------------------------------------------------------------


def engine_of(plan: Plan, x: Tensor) -> tuple[Any, TorchHost | DeviceHost]:
    """The module that runs the plan's layers, and torch's arrays as it wants them."""
    if plan.engine == "gpu":
        return device, host_of(getattr(torch, plan.dtype), x.device)
    return layer, HOSTS[plan.dtype]


def layer_weights(call: Call, inputs: Inputs) -> list[layer.Weights]:
    """The weights as the engine takes them."""
    declared = [s.initial for s in call.cell.states]
    return [
        layer.Weights(
            ih=w.ih,
            hh=w.hh,
            bias_ih=w.bias_ih,
            bias_hh=w.bias_hh,
            params=w.params,
            initial=declared if inputs.initial is None else [s[d] for s in inputs.initial],
            reset=None if inputs.reset is None else [s[d] for s in inputs.reset],
            static=inputs.static,
            recurrent_mask=call.options.recurrent_mask,
            linears=dict(w.linears),
            reverse=d == 1,
        )
        for d, w in enumerate(inputs.weights)
    ]


def layer_options(call: Call) -> layer.Options:
    """What a call says beside its tensors, as ``anycell.layer`` takes it."""
    options = call.options
    return layer.Options(
        mask=options.mask,
        resets=options.resets,
        repeat=options.masked_output == "repeat",
        training=options.training,
        seed=options.seed,
        stream=call.layer,
        threads=torch.get_num_threads(),
        checkpoint=options.checkpoint,
    )


def _stack(parts: Sequence[Tensor]) -> Tensor:
    """What each direction has, along a new first axis."""
    return parts[0].unsqueeze_(0) if len(parts) == 1 else torch.stack(tuple(parts))


def _states(given: bool, parts: Sequence[Sequence[Tensor] | None]) -> States | None:
    if not given or parts[0] is None:
        return None
    return tuple(map(_stack, zip(*parts, strict=True)))
