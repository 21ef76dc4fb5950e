"""Both passes of a layer on the CPU: by the native operator if there were such passes before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from anycell.engines import cpu
from anycell.layer import Kept, backward, forward, keeps_state
from anycell.layer.backward import drafted_backward, held
from anycell.layer.forward import drafted
from anycell.layer.signature import ENDS, FLAGS, ROWS
from anycell.plan import Options, Plan
from anycell.recent import add_recent
from anycell.torch.composite import Arrays, States
from anycell.torch.framework import Torch
from anycell.torch.native import Form, Part, made_by, play

_MOST = 512  # forms
_FORMS: dict[tuple[Any, ...], Form] = {}


def run_forward(
    plan: Plan, arrays: Arrays, options: Options, keep: bool
) -> tuple[Tensor, States, Kept | None]:
    """Runs one layer; returns its output, final states, and what the backward pass reads."""
    form = None
    if not (keep and options.checkpoint is not None):
        form = form_of(plan, arrays, options, "forward", keep)
    if form is not None:
        results = play([*arrays.values()], form.number, _signed(options.seed))
        if results and not keep:
            return results[0], tuple(results[1:]), None
        if results:
            return as_kept(plan, arrays["x"].shape[0], results, options)
    host = Torch.of(plan.dtype)
    output, final, kept = forward(host, plan, arrays, options, keep=keep)
    if form is not None:
        _learn_forward(form, host, plan, arrays, options, keep)
    return output, tuple(final), kept


def as_kept(
    plan: Plan, steps: int, results: list[Tensor], options: Options
) -> tuple[Tensor, States, Kept]:
    """What a forward pass returns that keeps what the backward pass reads."""
    states = len(plan.cell.states)
    there = [i > 0 and keeps_state(plan, i) for i in range(states)]
    kept = Kept.of(results[states:], there, len(options.reverse))
    return kept.hidden[1 : 1 + steps], tuple(results[:states]), kept


def _learn_forward(
    form: Form, host: Torch, plan: Plan, arrays: Arrays, options: Options, keep: bool
) -> None:
    known, given = drafted(host, plan, arrays, options, keep)
    if any(given[name] is not array for name, array in arrays.items()):
        return  # a copy
    whole = [Part(i, made.shape, made.strides) for i, made in enumerate(made_by(known.recipe))]
    finals = [whole[i] for i in known.finals]
    if keep:
        parts = finals + [whole[i] for i in known.kept.flat()]
    else:
        output = whole[known.out]
        shape = arrays["x"].shape[0], *output.shape[1:]
        parts = [output._replace(shape=shape, offset=output.strides[0]), *finals]
    form.learn(known.recipe, arrays, parts, options.stream)


def run_backward(
    plan: Plan,
    arrays: Arrays,
    options: Options,
    kept: Kept,
    arriving: Sequence[Tensor | None],
    wanted: set[str],
    inside: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Returns the gradients of a layer's tensors by name; ``inside`` are of sequences of states."""
    host, form = Torch.of(plan.dtype), None
    d_output, *d_final = arriving
    if d_output is not None and (fitted := host.fit(d_output, ROWS)) is not None:
        d_output = fitted  # often one expanded number, which is copied each time
    if options.checkpoint is None and not inside:
        there = tuple([d is None for d in arriving])
        form = form_of(plan, arrays, options, "backward", there, frozenset(wanted))
    if form is not None:
        present = [d for d in (d_output, *d_final) if d is not None]
        inputs = [*arrays.values(), *kept.flat(), *present]
        results = play(inputs, form.number, _signed(options.seed))
        if results:
            return _as_gradients(host, plan, dict(zip(form.names, results, strict=True)))
    gradients = backward(
        host, plan, arrays, options, kept, d_output, d_final, d_states=inside, wanted=wanted
    )
    if form is not None:
        ends = [d_output, *d_final]
        _learn_backward(form, host, plan, arrays, options, kept, ends, wanted)
    return gradients


def _as_gradients(host: Torch, plan: Plan, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients by the names of arrays: of parameters, they are sums over groups of rows."""
    if plan.cell.params:
        for end in ENDS:
            sums = gradients.pop(f"d_params{end}", None)
            if sums is not None:
                parts = host.split(sums.sum(0), plan.param_sizes)
                names = [name + end for name in plan.cell.param_names]
                gradients.update(zip(names, parts, strict=True))
    return gradients


def _learn_backward(
    form: Form,
    host: Torch,
    plan: Plan,
    arrays: Arrays,
    options: Options,
    kept: Kept,
    arriving: Sequence[Tensor | None],
    wanted: set[str],
) -> None:
    d_output, *d_final = arriving
    known, given = drafted_backward(
        host, plan, arrays, options, kept, d_output, d_final, {}, wanted
    )
    gradients = held(plan, known)
    if gradients is None:
        form.never = True
        return
    names, d = plan.cell.state_names, len(options.reverse)
    further = {"hidden": kept.hidden}
    further |= {f"saved {i}": values for i, values in enumerate(kept.values)}
    for i in range(d):
        for name, sequence in zip(names, kept.states[i], strict=True):
            if sequence is not None:
                further[f"sequence {i} {name}"] = sequence
    ends = dict(zip(["d_output", *(f"d_final {n}" for n in names)], arriving, strict=True))
    inputs = {**arrays, **further, **{n: t for n, t in ends.items() if t is not None}}
    if any(given.get(name) is not array for name, array in inputs.items()):
        return  # a copy
    made, parts = made_by(known.recipe), []
    for number, turned, copy in gradients.values():
        shape, strides = made[number].shape, made[number].strides
        parts.append(
            Part(number, shape[::-1], strides[::-1], 0, copy)
            if turned
            else Part(number, shape, strides, 0, copy)
        )
    form.names = tuple(gradients)
    form.learn(known.recipe, inputs, parts, options.stream)


def form_of(plan: Plan, arrays: Iterable[str], options: Options, *facts: Any) -> Form | None:
    """The form of a pass; None if it is not one of the operator's."""
    if plan.types.mixed or not {*arrays}.isdisjoint(FLAGS):
        return None
    same = options._replace(seed=0) if options.seed else options
    key = facts, plan, same, tuple(arrays), cpu.isa.current()
    form = _FORMS.get(key) or add_recent(_FORMS, key, Form(), _MOST)
    return None if form.never else form


def _signed(seed: int) -> int:
    """A seed of 64 bits as PyTorch's integer."""
    return seed - (1 << 64) if seed >> 63 else seed
