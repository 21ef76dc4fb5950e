"""The operators as autograd and ``torch.func`` see them: their derivatives, and elements of a vmap.

Under ``vmap``, elements become rows of the batch if what differs between them has rows. Else they
run one after the other.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from anycell.layer.rounding import SCALES
from anycell.layer.signature import FLAGS, OF_STATES
from anycell.layer.tangents import along, join
from anycell.plan import Layer
from anycell.plan.layer import register
from anycell.torch.observers import (
    ORDINARY,
    TRACERS,
    left_alone,
    mapped,
    mapped_tangent,
    requires_grad,
    transformed,
    transforms,
    unlike_memory,
    unwrapped,
)
from anycell.torch.operators import ops
from anycell.torch.operators.composite import Arrays, composite
from anycell.torch.operators.fused import differentiable, enter, gradients_of

_functional = torch._C._are_functorch_transforms_active
Item = TypeVar("Item")
Elements = tuple[tuple[Tensor, ...], tuple[int, ...]]  # results, and their axes of elements

# The most elements of a vmap for each step that run one after the other, fused: of more than that,
# of layers of any size, a training step takes no less time together, step by step.
ELEMENTS_A_STEP = 16


def fits(layer: Layer, arrays: Arrays) -> bool:
    """Whether a call under ``torch.func`` is to run as operators."""
    around = transforms()
    if around is None:
        return False
    if around.derived and (SCALES in arrays or any(map(mapped_tangent, arrays.values()))):
        return False
    elements = around.elements
    in_turns = (
        around.derived
        or draws(layer)
        or any(mapped(t) for name, t in arrays.items() if row_axis(name, t.dim()) is None)
    )
    return elements > 0 and (elements <= ELEMENTS_A_STEP * len(arrays["x"]) or not in_turns)


def draws(layer: Layer) -> bool:
    """Whether a call draws random masks."""
    return layer.options.training and bool(layer.cell.keeps)


def row_axis(name: str, axes: int) -> int | None:
    """The axis of the rows of the batch in a layer's array of so many axes, if it has one."""
    if name.startswith(OF_STATES):
        return 1 if axes == 3 else None
    return {"static": 0, **dict.fromkeys(("x", *FLAGS), 1)}.get(name)


def forward(tensors: Sequence[Tensor], text: str, hyper: Sequence[float]) -> list[Tensor]:
    """``anycell::forward`` where autograd or ``torch.func`` looks on."""
    layer, around = ops.read(text), transforms()
    differentiated = around is not None and around.gradients
    differentiated |= torch.is_grad_enabled() and any(map(requires_grad, tensors))
    if not (differentiated or around):
        results: list[Tensor] = torch.ops.anycell.run(tensors, text, hyper, False)
        return results
    keep = differentiated and layer.options.checkpoint is None
    made = Forward.apply(text, hyper, keep, *tensors)
    return list(made[: 1 + len(layer.cell.states)])


class Forward(torch.autograd.Function):
    """``anycell::run``. Its results are the output, the final states, and what it keeps."""

    @staticmethod
    def forward(text: str, hyper: list[float], keep: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = torch.ops.anycell.run(tensors, text, hyper, keep)
        if not keep:
            return tuple(results)
        layer = ops.read(text)
        states, separate = len(layer.cell.states), ops.apart(layer)
        final, kept = results[:states], results[states:]
        x = layer.named(tensors)["x"]
        output = kept.pop() if separate else kept[0][1 : 1 + x.shape[0]].detach()
        if type(x) in ORDINARY and not separate:
            # allow_mutation_on_saved_tensors, a mode, finds what an edit changes by its address
            output = output.clone()
        return output, *final, *kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.text, ctx.hyper, _, *tensors = inputs
        ctx.results = 1 + len(ops.read(ctx.text).cell.states)
        ctx.mark_non_differentiable(*output[ctx.results :])
        ctx.kept = len(output) - ctx.results
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output[ctx.results :])
        ctx.save_for_forward(*tensors)
        ctx.count = len(tensors)

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Any, ...]:
        needs, there = ctx.needs_input_grad[3:], [g is not None for g in arriving[: ctx.results]]
        present = [g for g in arriving[: ctx.results] if g is not None]
        saved, kinds = ctx.saved_tensors, (*ORDINARY, *TRACERS)  # hooks run at each read
        if not _functional() and unlike_memory(present, saved, kinds):
            tensors = saved[: ctx.count]
            gradients = by_steps(ctx.text, ctx.hyper, there, needs, tensors, present)
        else:
            counts = ctx.count, len(saved) - ctx.count
            gradients = Backward.apply(ctx.text, ctx.hyper, there, needs, counts, *saved, *present)
        made = iter(gradients)
        return None, None, None, *[next(made) if need else None for need in needs]

    @staticmethod
    def jvp(ctx: Any, *dots: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors[: ctx.count]
        made = tangents(ctx.text, ctx.hyper, tensors, dots[3:])
        return *made, *[None] * ctx.kept

    @staticmethod
    def vmap(
        info: Any, dims: tuple[Any, ...], text: str, hyper: Any, keep: bool, *tensors: Tensor
    ) -> Elements:
        layer = ops.read(text)
        rows = _row_axes(layer, tensors, dims[3:])
        run = functools.partial(Forward.apply, text, hyper, keep)
        return _elements(run, layer, info.batch_size, dims[3:], rows, tensors)


class Backward(torch.autograd.Function):
    """``anycell::backward``."""

    @staticmethod
    def forward(
        text: str, hyper: list[float], there: list[bool], needs: Sequence[bool],
        counts: tuple[int, int], *arrays: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        # Of a transform that has ended, as ``torch.func.vjp``'s, tensors are mere wrappers.
        tensors, kept, arriving = _parts([*map(unwrapped, arrays)], counts)
        kept = [t.contiguous() for t in kept]  # of an element
        with torch._C._AutoDispatchBelowAutograd():
            made = torch.ops.anycell.backward(tensors, kept, arriving, text, hyper, there, needs)
        return tuple(made)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.facts = inputs[:5]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[5:])
        ctx.save_for_forward(*inputs[5:])

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Any, ...]:
        text, hyper, there, given, counts = ctx.facts
        saved = ctx.saved_tensors  # hooks run at each read
        tensors, _, first = _parts([*map(unwrapped, saved)], counts)
        needs, _, first_needs = _parts(ctx.needs_input_grad[5:], counts)
        along = iter(arriving)
        dots = [next(along) if need else None for need in given]
        if not any(dot is not None for dot in dots):
            return (None,) * len(ctx.needs_input_grad)
        present = [dot for dot in dots if dot is not None]
        if not _functional() and unlike_memory(present, saved, (*ORDINARY, *TRACERS)):
            wanted = [*needs, *first_needs]
            found = _second_by_steps(text, hyper, there, given, wanted, tensors, first, dots)
            of_tensors, of_first = found[: len(needs)], found[len(needs) :]
        else:
            # The derivative, along the gradient's gradient, of what the gradients arrive for.
            ends, pull = _derived(text, hyper, there, needs, tensors, dots)
            made = iter(pull(tuple(first)))
            of_tensors = [next(made) if need else None for need in needs]
            of_first = [end if need else None for end, need in zip(ends, first_needs, strict=True)]
        return *[None] * 5, *of_tensors, *[None] * counts[1], *of_first

    @staticmethod
    def jvp(ctx: Any, *dots: Tensor | None) -> tuple[Tensor, ...]:
        text, hyper, there, given, counts = ctx.facts
        tensors, kept, first = _parts(ctx.saved_tensors, counts)
        along, _, d_first = _parts(dots[5:], counts)
        parts = list[Sequence[Tensor]]()
        if any(dot is not None for dot in along):
            parts.append(_derived(text, hyper, there, given, tensors, along)[1](tuple(first)))
        if any(dot is not None for dot in d_first):
            changes = [
                torch.zeros_like(g) if d is None else d for g, d in zip(first, d_first, strict=True)
            ]
            parts.append(Backward.apply(*ctx.facts, *tensors, *kept, *changes))
        return tuple(functools.reduce(torch.add, terms) for terms in zip(*parts, strict=True))

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> Elements:
        (text, hyper, there, needs, counts), arrays, dims = inputs[:5], inputs[5:], dims[5:]
        layer, of_tensors = ops.read(text), counts[0]
        rows = _row_axes(layer, arrays[:of_tensors], dims)
        made = [axis for axis, need in zip(rows, needs, strict=True) if need]
        rows += [1] * (len(arrays) - of_tensors)
        x, axis = layer.named(arrays[:of_tensors])["x"], dims[layer.arrays.index("x")]
        steps = x.shape[0] if axis is None else x.movedim(axis, 0).shape[1]
        many = None in made and info.batch_size > ELEMENTS_A_STEP * steps
        if many or not info.batch_size:

            def stepped(*arrays: Tensor) -> tuple[Tensor, ...]:
                tensors, _, arriving = _parts(arrays, counts)
                return by_steps(text, hyper, there, needs, tensors, arriving)

            gradients = torch.func.vmap(stepped, dims)(*arrays)
            return gradients, (0,) * len(gradients)
        run = functools.partial(Backward.apply, *inputs[:5])
        return _elements(run, layer, info.batch_size, dims, rows, arrays, made)


def by_steps(
    text: str, hyper: Sequence[float], there: Sequence[bool], needs: Sequence[bool],
    tensors: Sequence[Tensor], arriving: Sequence[Tensor],
) -> tuple[Tensor, ...]:  # fmt: skip
    """The results of ``anycell::backward`` by torch's operations."""
    layer, arrays = ops.unpack(tensors, text, hyper)
    wanted, present = ops.wanted_names(layer, needs), iter(arriving)
    ends = [next(present) if one else None for one in there]
    gradients = enter(layer.cell, "backward", differentiable, layer, arrays, wanted, ends)
    return tuple(gradients.values())  # type: ignore[arg-type]


def _second_by_steps(
    text: str, hyper: Sequence[float], there: Sequence[bool], given: Sequence[bool],
    needs: Sequence[bool], tensors: Sequence[Tensor], first: Sequence[Tensor],
    dots: Sequence[Tensor | None],
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of tensors and of ``first``, which arrive, from ``dots`` of those ``given``."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Differentiates for views, because one may depend on another.
        places = [t.view_as(t) for t in (*tensors, *first)]
        count = len(tensors)
        made = iter(by_steps(text, hyper, there, given, places[:count], places[count:]))
        ends = [next(made) if need else None for need in given]
        found = iter(gradients_of(ends, [*itertools.compress(places, needs)], dots, again))
    return [next(found) if need else None for need in needs]


def tangents(
    text: str, hyper: Sequence[float], tensors: Sequence[Tensor], dots: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """The tangents of the output and of the final states, where those of ``tensors`` are ``dots``;
    None is 0.
    """
    layer, arrays = ops.unpack(tensors, text, hyper)
    varied = {
        n: d for n, d in zip(layer.arrays, dots, strict=True) if d is not None and n in arrays
    }
    calls = along(layer, arrays, varied, F.linear)
    if calls is None:

        def run(*some: Tensor) -> tuple[Tensor, ...]:
            output, final, _ = composite(layer, {**arrays, **dict(zip(varied, some, strict=True))})
            return output, *final

        primals, made = tuple(arrays[name] for name in varied), tuple(varied.values())
        # By gradients: PyTorch has no forward mode within that of dual numbers.
        if not _functional():
            again = torch.is_grad_enabled()
            made = torch.autograd.functional.jvp(run, primals, made, create_graph=again)[1]
            return made
        ends, pull, *_ = torch.func.vjp(run, *primals)
        made = torch.func.vjp(pull, tuple(map(torch.zeros_like, ends)))[1](made)[0]
        return made
    results = []
    for call in calls:
        register(call[0].cell)
        results.append(ops.run(*call, forward) or composite(*call))
    output, final, _ = join(layer, results)
    return output, *final


def _derived(
    text: str, hyper: Sequence[float], there: Sequence[bool], needs: Sequence[bool],
    tensors: Sequence[Tensor], dots: Sequence[Tensor | None],
) -> tuple[tuple[Tensor, ...], Any]:  # fmt: skip
    """The ``tangents`` that are ``there``, and the function from their gradients to those of the
    tensors that need one.
    """

    def run(*some: Tensor) -> tuple[Tensor, ...]:
        varied = iter(some)
        given = [next(varied) if need else t for t, need in zip(tensors, needs, strict=True)]
        return tuple(itertools.compress(tangents(text, hyper, given, dots), there))

    inputs = [*itertools.compress(tensors, needs)]
    if transformed():
        ends, pull, *_ = torch.func.vjp(run, *inputs)
        return ends, pull
    again = torch.is_grad_enabled()  # autograd alone takes half the time
    with torch.enable_grad():
        places = [t.view_as(t).requires_grad_() for t in inputs]
        ends = run(*places)

    def pulled(first: tuple[Tensor, ...]) -> Sequence[Tensor | None]:
        return gradients_of(ends, places, first, again) if places else ()

    return tuple(end if again else end.detach() for end in ends), pulled


def _parts(arrays: Sequence[Item], counts: tuple[int, int]) -> list[Sequence[Item]]:
    """The parts of a list: of tensors of a call, of what it has kept, of gradients that arrive."""
    first, second = counts[0], sum(counts)
    return [arrays[:first], arrays[first:second], arrays[second:]]


# -- elements of a vmap ----------------------------------------------------------------------------


def _row_axes(
    layer: Layer, tensors: Sequence[Tensor], dims: Sequence[int | None]
) -> list[int | None]:
    """``row_axis`` of each tensor of an element."""
    triples = zip(layer.arrays, tensors, dims, strict=False)
    return [row_axis(name, t.dim() - (axis is not None)) for name, t, axis in triples]


def _elements(
    run: Callable[..., tuple[Tensor, ...]],
    layer: Layer,
    count: int,
    dims: Sequence[int | None],
    rows: Sequence[int | None],
    arrays: Sequence[Tensor],
    results: Sequence[int | None] = (),
) -> Elements:
    """The results of ``run`` for each of ``count`` elements, and their axes of elements.

    Args:
        dims: the axis of the elements in each array.
        rows: the axis of the rows in an array of one element.
        results: the same for each result; by default the second.
    """
    differ = [axis for axis, rows_at in zip(dims, rows, strict=True) if rows_at is None]
    # Each element has the same random masks.
    if {*differ} <= {None} and None not in results and not draws(layer):
        made = run(*map(functools.partial(_join, count), arrays, dims, rows))
        axes = tuple(axis for axis in results if axis is not None) or (1,) * len(made)
        pairs = zip(made, axes, strict=True)
        return tuple(t.unflatten(n, (count, t.shape[n] // count)) for t, n in pairs), axes
    parts = [
        [t] * count if axis is None else t.movedim(axis, 0).unbind()
        for t, axis in zip(arrays, dims, strict=True)
    ]
    each = [run(*one) for one in zip(*parts, strict=True)]
    return tuple(map(torch.stack, zip(*each, strict=True))), (0,) * len(each[0])


def _join(count: int, array: Tensor, axis: int | None, rows: int | None) -> Tensor:
    """An array with the rows of all elements."""
    if rows is None:
        return array
    every = array.expand(count, *array.shape) if axis is None else array.movedim(axis, 0)
    return every.movedim(0, rows).flatten(rows, rows + 1)


def backward(
    tensors: Sequence[Tensor], kept: Sequence[Tensor], arriving: Sequence[Tensor], *facts: Any
) -> list[Tensor]:
    """``anycell::backward`` where autograd or ``torch.func`` looks on."""
    given = *facts, (len(tensors), len(kept)), *tensors, *kept, *arriving
    return list((Backward.apply if torch.is_grad_enabled() else Backward.forward)(*given))


ops.library.impl("forward", forward, "Autograd")
ops.library.impl("backward", backward, "Autograd")
for _kind in (Forward, Backward):  # torch.func calls them outside of a graph that breaks
    for _name in ("forward", "setup_context", "backward", "jvp", "vmap"):
        left_alone(getattr(_kind, _name))
