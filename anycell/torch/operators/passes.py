"""Both passes of a layer on the CPU, as earlier ones: by the native operator, see ``native``.

The layers have their plan and the number of threads, see ``fused.ready``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anycell.engines import cpu
from anycell.layer import Kept, keeps_state
from anycell.layer.backward import drafted_backward, held
from anycell.layer.forward import drafted, widened
from anycell.layer.heuristics import sparse
from anycell.layer.signature import ENDS, FLAGS, OF_STATES
from anycell.plan import Layer, Plan
from anycell.recent import add_recent
from anycell.torch.framework import Torch
from anycell.torch.operators.composite import Arrays, States
from anycell.torch.operators.native import Form, Item, Part, made_by, play

_MOST = 512  # forms
_FORMS: dict[tuple[Any, ...], Form] = {}


Result = tuple[Tensor, States, Kept | None]
Ends = Sequence[Tensor | None]  # gradients of the output and of final states


def forward_form(layer: Layer, arrays: Arrays, keep: bool) -> Form | None:
    """The form of a forward pass; None if it is not one of the operator's."""
    if keep and layer.options.checkpoint is not None:
        return None
    for name in FLAGS:  # wrong ones are refused the ordinary way, and not read before
        flags = arrays.get(name)
        if flags is not None and not (flags.is_cpu and flags.shape == arrays["x"].shape[:2]):
            return None
        if flags is not None and flags.dtype not in (torch.bool, torch.uint8):
            return None
    holes = ["holes"] * sparse(arrays.get("mask"))
    return form_of(layer, arrays, "forward", keep, *holes)


def forward_again(form: Form, layer: Layer, arrays: Arrays, keep: bool) -> Result | None:
    """Runs one layer like an earlier one; None if there was none."""
    read = as_read(layer, arrays)
    results = play([*read.values()], form.number, _signed(layer.options.seed))
    if not results:
        return None
    if not keep:
        return results[0], narrowed(layer.plan, results[1:]), None
    apart = layer.options.apart("mask" in arrays)
    output, final, kept = as_kept(layer, arrays["x"].shape[0], results, apart)
    return output, narrowed(layer.plan, final), kept


def as_kept(
    layer: Layer, steps: int, results: list[Tensor], apart: bool
) -> tuple[Tensor, States, Kept]:
    """Output, final states, and what the backward pass reads, from the operator's results; if
    outputs are ``apart`` from the states, they come last. Final states may be wide.
    """
    states = len(layer.cell.states)
    there = [i > 0 and keeps_state(layer.plan, i) for i in range(states)]
    output = results.pop() if apart else None
    kept = Kept.of(results[states:], there, len(layer.options.reverse))
    if output is None:  # detached, so that autograd does not take it for a view of what is kept
        output = kept.hidden[1 : 1 + steps].detach()
    return output, tuple(results[:states]), kept


def narrowed(plan: Plan, states: Sequence[Tensor]) -> States:
    """Final states in the dtype of the layer."""
    return tuple(map(Torch.of(plan.dtype).narrow, states) if plan.types.mixed else states)


def learn_forward(
    form: Form, layer: Layer, arrays: Arrays, keep: bool,
    items: Sequence[tuple[Tensor, Item]] = (),
) -> None:  # fmt: skip
    """Learns a pass that has run; of a step, whose states have no axis of directions, with the
    ``items`` of ``Form.learn``.
    """
    plan, options = layer.plan, layer.options
    known, given = drafted(Torch.of(plan.dtype), plan, arrays, options, keep)
    arrays = as_read(layer, arrays)
    if not _laid_out(arrays, given):
        return
    whole = [Part(i, made.shape, made.strides) for i, made in enumerate(made_by(known.recipe))]
    finals = [whole[i] for i in known.finals]
    if items:
        arrays = {n: t[0] if n.startswith(OF_STATES) else t for n, t in arrays.items()}
        finals = [part._replace(shape=part.shape[1:], strides=part.strides[1:]) for part in finals]
    if keep:
        outputs = [whole[known.out]] * known.apart
        parts = finals + [whole[i] for i in known.kept.flat()] + outputs
    else:
        output = whole[known.out]
        if not known.apart:
            shape = arrays["x"].shape[0], *output.shape[1:]
            output = output._replace(shape=shape, offset=output.strides[0])
        parts = [output, *finals]
    form.learn(known.recipe, arrays, parts, options.stream, items)


def backward_form(
    layer: Layer, arrays: Iterable[Any], arriving: Ends, wanted: Iterable[Any], *facts: Any
) -> Form | None:
    """The form of a backward pass; None if it is not one of the operator's."""
    if layer.options.checkpoint is not None:
        return None
    there = tuple([d is None for d in arriving])
    return form_of(layer, arrays, "backward", there, frozenset(wanted), *facts)


def backward_again(
    form: Form, layer: Layer, arrays: Mapping[Any, Tensor], kept: Sequence[Tensor], arriving: Ends
) -> dict[Any, Tensor] | None:
    """Returns the gradients of a layer's tensors by name, as an earlier pass; None if there was
    none. ``kept`` is ``Kept.flat()``.
    """
    plan = layer.plan
    if not as_given(plan, arrays):
        arrays, arriving = as_read(layer, arrays), _widened(plan, arriving)
    inputs = [*arrays.values(), *kept, *[d for d in arriving if d is not None]]
    results = play(inputs, form.number, _signed(layer.options.seed))
    if not results:
        return None
    gradients = dict(zip(form.names, results, strict=True))
    if plan.cell.params:
        gradients.update(of_params(plan, gradients))
    if plan.types.mixed:
        narrow = Torch.of(plan.dtype).narrow
        gradients = {name: narrow(gradient) for name, gradient in gradients.items()}
    return gradients


def of_params(plan: Plan, gradients: dict[Any, Tensor]) -> dict[Any, Tensor]:
    """The gradients of a cell's parameters, by name, in the memory of one tensor: the sums of what
    is taken out of ``gradients``, which has groups of rows.
    """
    parts = dict[Any, Tensor]()
    for end in ENDS:
        sums = gradients.pop(f"d_params{end}", None)
        if sums is not None:
            names = [name + end for name in plan.cell.param_names]
            parts.update(zip(names, Torch.split(sums.sum(0), plan.param_sizes), strict=True))
    return parts


def learn_backward(
    form: Form, layer: Layer, arrays: Arrays, kept: Kept, arriving: Ends, wanted: set[str],
    items: Sequence[tuple[Tensor, Item]] = (),
    divide: Callable[[dict[str, Part]], dict[Any, Part]] = dict,
) -> None:  # fmt: skip
    """Learns a pass that has run; of a step, with the ``items`` of its arrays.

    Args:
        divide: the results by name -> those that the operator returns.
    """
    plan, (d_output, *d_final) = layer.plan, arriving
    known, given = drafted_backward(
        Torch.of(plan.dtype), plan, arrays, layer.options, kept, d_output, d_final, {}, wanted
    )
    gradients = held(plan, known)
    if gradients is None:
        form.never = True
        return
    names, d = plan.cell.state_names, len(layer.options.reverse)
    further = {"hidden": kept.hidden}
    further |= {f"saved {i}": values for i, values in enumerate(kept.values)}
    for i in range(d):
        for name, sequence in zip(names, kept.states[i], strict=True):
            if sequence is not None:
                further[f"sequence {i} {name}"] = sequence
    arrays, arriving = as_read(layer, arrays), _widened(plan, arriving)
    ends = dict(zip(["d_output", *(f"d_final {n}" for n in names)], arriving, strict=True))
    inputs = {**arrays, **further, **{n: t for n, t in ends.items() if t is not None}}
    if not _laid_out(inputs, given):
        return
    made, whole = made_by(known.recipe), dict[str, Part]()
    for name, (number, turned, copy) in gradients.items():
        order = slice(None, None, -1 if turned else 1)
        shape, strides = made[number].shape[order], made[number].strides[order]
        pieces = ((number, 0, math.prod(shape)),) if copy else ()
        whole[name] = Part(number, shape, strides, 0, pieces)
    form.names = tuple(parts := divide(whole))
    if items:
        items = [*items, *[(t, Item(n)) for n, t in inputs.items() if n not in arrays]]
    form.learn(known.recipe, inputs, [*parts.values()], layer.options.stream, items)


def form_of(layer: Layer, arrays: Iterable[Any], *facts: Any) -> Form | None:
    """The form of a pass; None if it is not one of the operator's."""
    options = layer.options
    same = options._replace(seed=0) if options.seed else options
    key = facts, layer.plan, same, tuple(arrays), cpu.isa.current()
    form = _FORMS.get(key) or add_recent(_FORMS, key, Form(), _MOST)
    return None if form.never else form


def as_given(plan: Plan, arrays: Iterable[Any]) -> bool:
    """Whether a kernel reads the arrays of a call themselves: none is a flag, or widened."""
    return not plan.types.mixed and {*arrays}.isdisjoint(FLAGS)


def as_read(layer: Layer, arrays: Arrays) -> Arrays:
    """The arrays of a call as a kernel reads them, as ``contract.fit`` and ``widened`` return them:
    flags as bytes, resets of each direction, and wide states.
    """
    plan, reverse = layer.plan, layer.options.reverse
    if as_given(plan, arrays):
        return arrays
    host = Torch.of(plan.dtype)
    read = widened(host, plan, arrays)
    for name in FLAGS:
        if name in read:
            read[name] = host.as_flags(read[name])
    if "resets" in read:
        read["resets"] = host.restarts(read["resets"], read.get("mask"), reverse)
    return read


def _widened(plan: Plan, arriving: Ends) -> Ends:
    """Gradients as a kernel reads them: wide, but for those of the output."""
    first, *others = arriving
    return [first, *[None if d is None else Torch.of(plan.dtype).widen(d) for d in others]]


def _laid_out(arrays: Arrays, given: Arrays) -> bool:
    """Whether the arrays of a pass are laid out as these: none was copied to fit."""
    if any(array.data_ptr() % array.element_size() for array in arrays.values()):
        return False  # a copy has the same strides
    for name, array in arrays.items():
        other = given.get(name)
        if other is None or (other.dtype, other.stride()) != (array.dtype, array.stride()):
            return False
    return True


def _signed(seed: int) -> int:
    """A seed of 64 bits as PyTorch's integer."""
    return seed - (1 << 64) if seed >> 63 else seed
