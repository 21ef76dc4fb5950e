"""A layer by the kernels of the engines, as four primitives of JAX.

    layer       the results, and with ``keep`` what a backward pass reads
    backward    the gradients of arrays, from those of the results: the derived backward pass
    linear      the derivative in a direction, whose transpose is ``backward``
    second      the derivative of ``backward`` in a direction of the arrays: its own transpose

So ``grad`` of a layer is ``layer`` and ``backward``; derivatives in a direction, and of these two,
are layers whose cell is the cell's tangent. Under ``vmap`` the elements of a layer become rows of
its batch; if they differ in what has no rows, such as weights, they run one after the other on the
CPU, and in the same launches on a card: ``apart`` says which operands differ. Other platforms run a
layer step by step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial, wraps
from inspect import signature
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import dispatch
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.interpreters import batching as interpreter

from anycell.jax import batching, device, sharding
from anycell.jax.composite import Array, composite
from anycell.jax.framework import Buffer, Jax, Stored
from anycell.layer import backward, card, forward, stepped
from anycell.layer.checks import refuse
from anycell.layer.foreign import Seed
from anycell.layer.sequences import keeping as keeping_states
from anycell.layer.sequences import sequences
from anycell.layer.steps import Results
from anycell.layer.tangents import along, join
from anycell.plan import Layer, Plan
from anycell.plan import plan as make_plan

# The engine whose kernels run on each of JAX's platforms.
ENGINES = {"cpu": "cpu", "cuda": "gpu"}
Arrays = dict[str, Array]
Names = tuple[str, ...]
Flags = tuple[bool, ...]  # for each operand; () for False
Flat = list[Array]


def run(layer: Layer, arrays: Arrays) -> Results:
    """Runs a layer.

    Args:
        layer: with the plan of its cell for the engine that runs it. "seed"
            among the arrays takes the place of the seed in its options.
        arrays: by the names of ``layer.signature``.
    """
    if "resets" not in arrays:  # then nothing reads what they restore
        arrays = {n: a for n, a in arrays.items() if not n.startswith("reset_state ")}
    if layer.sequences:  # the kernel keeps them like values for the backward pass
        layer = layer._replace(options=layer.options._replace(checkpoint=None))
    layer = layer._replace(arrays=tuple(arrays))
    fixed = all(isinstance(size, int) for array in arrays.values() for size in array.shape)
    # A kernel needs the sizes that an export leaves open.
    if not fixed or not _fits(layer, arrays):
        return _composite(layer, arrays)
    _check_shards(arrays)
    output, *rest = _layer.bind(*arrays.values(), layer=layer, keep=False)
    count = len(layer.cell.states)
    return output, tuple(rest[:count]), tuple(rest[count:])


def _fits(layer: Layer, arrays: Arrays) -> bool:
    """Whether the plan's engine runs a call. A card's kernels return no states of all steps."""
    if layer.plan.engine != "gpu":
        return bool(layer.plan.engine == "cpu")
    shapes = tuple((a.shape, str(a.dtype)) for a in arrays.values())
    return not layer.sequences and _drafted(layer, shapes)


@lru_cache(maxsize=1024)
def _drafted(layer: Layer, shapes: tuple[tuple[tuple[int, ...], str], ...]) -> bool:
    """Drafts all passes of a layer on a card; says whether there are kernels for them."""
    flat = [jax.ShapeDtypeStruct(*spec) for spec in shapes]
    passes = [partial(_forward, layer, keep) for keep in (False, True)]
    try:
        _, (results, kept) = (jax.eval_shape(run, *flat) for run in passes)
        of_all = partial(_run_backward, layer=layer, wanted=("x",), arriving=("output",))
        jax.eval_shape(of_all, *flat, results[0], *jax.tree.leaves(kept))
    except card.Unfit:
        return False
    return True


def _check_shards(arrays: Arrays) -> None:
    """Refuses arrays that ``shard_map`` follows from device to device, as primitives must then too:
    their gradients would not be added up.
    """
    for name, array in arrays.items():
        if axes := varying(array):
            given = f"an array that varies over the mesh axes {', '.join(sorted(axes))}"
            expected = "arrays of a jax.shard_map(..., check_vma=False)"
            refuse(
                name,
                given,
                expected,
                "Pass check_vma=False; or use jit and NamedSharding, which shard the rows too.",
            )


def varying(array: Array) -> Iterable[str]:
    """The mesh axes along which ``shard_map`` knows an array to differ from device to device."""
    kind = jax.typeof(array) if hasattr(jax, "typeof") else None  # since JAX 0.6
    axes = getattr(getattr(kind, "manual_axis_type", None), "varying", ())
    return axes or getattr(kind, "vma", ())  # the older name


def _kernels(layer: Layer, arrays: Arrays) -> Plan:
    """The plan of the kernels that run a call."""
    plan, mask = layer.plan, arrays.get("recurrent_mask")
    if mask is not None:
        cell = stepped(plan.cell, mask)
        plan = make_plan(cell, plan.hidden_size, plan.dtype, plan.engine, plan.sizes)
    return keeping_states(plan, layer.sequences)


def _composite(layer: Layer, arrays: Arrays) -> Results:
    return composite(*_seeded(layer, arrays | {n: part.of(arrays[n]) for n, part in layer.stored}))


def _seeded(layer: Layer, arrays: Arrays) -> tuple[Layer, Arrays]:
    """Moves the seed from the arrays to the options."""
    seeded = dict(arrays)
    if "seed" in seeded:
        options = layer.options._replace(seed=Seed.of(seeded.pop("seed")))
        layer = layer._replace(options=options)
    return layer, seeded


def _of_elements(function: Callable[..., Flat]) -> Callable[..., Flat]:
    """Lets a function run for all elements of an axis: operands that are ``apart`` have it first,
    and so have results.
    """

    @wraps(function)
    def run(*flat: Array, apart: Flags = (), **static: Any) -> Flat:
        one = partial(function, **static)
        return jax.vmap(one, [0 if a else None for a in apart])(*flat) if apart else one(*flat)

    return run


# ---- the kernels ---------------------------------------------------------------------------------
def _read(layer: Layer, flat: Sequence[Array]) -> tuple[Layer, Arrays]:
    """The arrays of a call as the kernels read them, and the layer with the seed."""
    arrays = layer.named(flat)
    return _seeded(layer, arrays | {n: Stored(arrays[n], part) for n, part in layer.stored})


def _forward(layer: Layer, keep: bool, *flat: Array) -> tuple[Results, Any]:
    layer, arrays = _read(layer, flat)
    plan, keeps = _kernels(layer, arrays), keep or bool(layer.sequences)
    on_card = plan.engine == "gpu"
    host = (device.JaxDevice if on_card else Jax).of(plan.dtype)
    run: Any = card.forward if on_card else forward
    output, finals, kept = run(host, plan, arrays, layer.options, keep=keeps)
    others = sequences(layer, arrays, kept) if layer.sequences else []
    return (output, tuple(finals), tuple(others)), kept if keep else None


@_of_elements
def _run_layer(*flat: Array, layer: Layer, keep: bool) -> Flat:
    return jax.tree.leaves(_forward(layer, keep, *flat))


@_of_elements
def _run_backward(*flat: Array, layer: Layer, wanted: Names, arriving: Names) -> Flat:
    """Takes the arrays of the call, the gradients that arrive, and what was kept."""
    count = len(layer.arrays)
    seeded, arrays = _read(layer, flat[:count])
    plan = _kernels(layer, arrays)
    d = dict(zip(arriving, flat[count:], strict=False))
    tree = jax.tree.structure(_kept(layer, flat[:count]))
    kept = jax.tree.unflatten(tree, flat[count + len(arriving) :])
    d_final = [d.get(f"final {name}") for name in plan.cell.state_names]
    arguments = plan, arrays, seeded.options, kept, d.get("output"), d_final
    if plan.engine == "gpu":
        gradients = card.backward(device.JaxDevice.of(plan.dtype), *arguments)
    else:
        inside = {name: d[name] for name in layer.sequences if name in d}
        gradients = backward(Jax.of(plan.dtype), *arguments, d_states=inside, wanted=wanted)
    made = {name: Buffer.read(gradients[name]).astype(arrays[name].dtype) for name in wanted}
    for name, part in layer.stored:
        if name in made:
            made[name] = part.padded(made[name], arrays[name].matrix.shape)
    return list(made.values())


def _kept(layer: Layer, flat: Sequence[Array]) -> Any:
    """The tree of shapes of all that a layer keeps."""
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in flat]
    _, kept = jax.eval_shape(partial(_forward, layer, True), *shapes)
    return kept


# ---- the same step by step -----------------------------------------------------------------------
@_of_elements
def layer_by_scan(*flat: Array, layer: Layer, keep: bool = False) -> Flat:
    """The results of a layer, step by step. It keeps zeros: ``_backward_by_scan`` reads nothing."""
    results = jax.tree.leaves(_composite(layer, layer.named(flat)))
    kept = jax.tree.leaves(_kept(layer, flat)) if keep else []
    return [*results, *(jnp.zeros(k.shape, k.dtype) for k in kept)]


def _along(
    function: Callable[..., Flat], flat: Sequence[Array], moved: Sequence[int], tangents: Flat
) -> Flat:
    """The derivative of a function in the direction of the tangents of some of its arguments."""

    def of_moved(*some: Array) -> Flat:
        given = list(flat)
        for i, one in zip(moved, some, strict=True):
            given[i] = one
        return function(*given)

    _, along = jax.jvp(of_moved, tuple(flat[i] for i in moved), tuple(tangents))
    return along


@_of_elements
def _backward_by_scan(*flat: Array, layer: Layer, wanted: Names, arriving: Names) -> Flat:
    count = len(layer.arrays)
    arrays, d = layer.named(flat[:count]), dict(zip(arriving, flat[count:], strict=False))

    def of_wanted(*some: Array) -> Flat:
        changed = arrays | dict(zip(wanted, some, strict=True))
        return jax.tree.leaves(_composite(layer, changed))

    results, pull_back = jax.vjp(of_wanted, *(arrays[name] for name in wanted))
    names = zip(layer.results, results, strict=True)
    return list(pull_back([d.get(name, jnp.zeros_like(result)) for name, result in names]))


# ---- derivatives in a direction ------------------------------------------------------------------
def _tangents(layer: Layer, arrays: Arrays, dots: Arrays) -> Flat | None:
    """The tangents of the results, by layers of the cell's tangent, see ``layer.tangents``; None if
    their engine has no kernel for one.
    """
    stored = dict(layer.stored)
    whole, moved = (
        {n: stored[n].of(a) if n in stored else a for n, a in some.items()}
        for some in (arrays, dots)
    )
    with jax.numpy_rank_promotion("allow"):  # what users forbid their own code
        calls = along(layer, whole, moved)
    if calls is None:
        return None
    results = []
    for called, given in calls:
        of_old = layer.plan
        plan = make_plan(called.cell, of_old.hidden_size, of_old.dtype, of_old.engine, of_old.sizes)
        if plan.engine != of_old.engine:
            return None
        results.append(run(called._replace(plan=plan), given))
    return jax.tree.leaves(join(layer, results))


@_of_elements
def _run_linear(*flat: Array, layer: Layer, moved: Names) -> Flat:
    """Takes the arrays of the call, the tangents of those that move, and what was kept."""
    count, places = len(layer.arrays), [layer.arrays.index(name) for name in moved]
    tangents = list(flat[count : count + len(moved)])
    arrays, dots = layer.named(flat[:count]), dict(zip(moved, tangents, strict=True))
    made = _tangents(layer, arrays, dots)
    if made is None:
        made = _along(partial(layer_by_scan, layer=layer), flat[:count], places, tangents)
    return made


@_of_elements
def _run_second(*flat: Array, layer: Layer, wanted: Names, arriving: Names, moved: Names) -> Flat:
    """Takes the arrays of the call, tangents of those that move, and the gradients that arrive."""
    count, middle = len(layer.arrays), len(layer.arrays) + len(moved)
    arrays, tangents = layer.named(flat[:count]), flat[count:middle]
    d = dict(zip(arriving, flat[middle:], strict=True))

    def of_wanted(*some: Array) -> Flat:
        changed = arrays | dict(zip(wanted, some, strict=True))
        results = _run_linear(*changed.values(), *tangents, layer=layer, moved=moved)
        return [r for name, r in zip(layer.results, results, strict=True) if name in d]

    _, pull_back = jax.vjp(of_wanted, *(arrays[name] for name in wanted))
    return list(pull_back([d[name] for name in layer.results if name in d]))


# ---- the primitives ------------------------------------------------------------------------------
def _cut(
    flat: Sequence[Array], made: Flat, layer: Layer, wanted: Names = (), arriving: Names = (),
    keep: bool = False, apart: Flags = (),
) -> sharding.Cut:  # fmt: skip
    """Describes how a layer, its step or its backward pass may be cut for several devices."""
    arrays = layer.named(flat[: len(layer.arrays)])
    axes = [batching.row_axis(name, array) for name, array in arrays.items()]
    # Behind the arrays there are gradients of results, and what is kept.
    axes_of_all = [*axes, *[1] * (len(flat) - len(axes))]
    seed = layer.arrays.index("seed") if "seed" in layer.arrays else None
    if not arriving:
        return sharding.Cut(axes_of_all, [1] * len(made), [None] * len(made), seed)
    like = [layer.arrays.index(name) for name in wanted]
    return sharding.Cut(axes_of_all, [axes[i] for i in like], like, seed)


def primitive_of(
    name: str,
    kernels: Callable[..., Flat],
    scan: Callable[..., Flat],
    cut: Callable[..., sharding.Cut] = _cut,
) -> Primitive:
    """A primitive that ``kernels`` run where they can, see ``ENGINES``, and ``scan`` elsewhere; on
    several CPU devices each runs its part, as ``cut`` says.
    """
    primitive = Primitive(f"anycell_{name}")
    primitive.multiple_results = True
    keywords = [p.name for p in signature(kernels).parameters.values() if p.kind is p.KEYWORD_ONLY]
    primitive.def_impl(jax.jit(primitive.bind, static_argnames=[*keywords, "apart"]))

    @lru_cache(maxsize=1024)
    def made(specs: tuple[Any, ...], static: tuple[Any, ...]) -> list[Any]:
        shapes = [jax.ShapeDtypeStruct(*spec) for spec in specs]
        results = jax.eval_shape(partial(kernels, **dict(static)), *shapes)
        return [jax.core.ShapedArray(result.shape, result.dtype) for result in results]

    def shapes(*flat: Any, **static: Any) -> list[Any]:
        return made(tuple((a.shape, a.dtype) for a in flat), tuple(static.items()))

    primitive.def_abstract_eval(shapes)

    def cut_kernels(*flat: Array, **static: Any) -> Flat:
        run = partial(kernels, **static)
        return sharding.on_devices(run, cut(flat, jax.eval_shape(run, *flat), **static), flat)

    by_kernels, by_parts, by_scan = (
        mlir.lower_fun(f, multiple_results=True) for f in (kernels, cut_kernels, scan)
    )

    def lowered(platform: str, context: Any, *values: Any, layer: Layer, **static: Any) -> Any:
        module, engine = context.module_context, layer.plan.engine
        lower = by_kernels
        several = getattr(module.axis_context, "num_devices", 1) > 1  # not inside of ``shard_map``
        # An exported program must run where anycell is not.
        exported = getattr(module.lowering_parameters, "for_export", False)
        if exported or kernels is scan or engine != ENGINES[platform]:
            lower = by_scan
        elif several:
            lower = by_parts if engine == "cpu" else by_scan
        return lower(context, *values, layer=layer, **static)

    # A rule for several devices has to know them.
    dispatch.prim_requires_devices_during_lowering.add(primitive)
    mlir.register_lowering(primitive, by_scan)
    for platform in ENGINES:
        mlir.register_lowering(primitive, partial(lowered, platform), platform=platform)
    return primitive


_layer = primitive_of("layer", _run_layer, layer_by_scan)
_backward = primitive_of("backward", _run_backward, _backward_by_scan)
_linear = primitive_of("linear", _run_linear, _run_linear)
_second = primitive_of("second", _run_second, _run_second)


# ---- derivatives ---------------------------------------------------------------------------------
def moved_of(tangents: Sequence[Any]) -> list[int]:
    """The arguments that have a derivative."""
    return [
        i for i, t in enumerate(tangents) if type(t) is not ad.Zero and t.dtype != jax.dtypes.float0
    ]


def _layer_derivative(
    flat: Any, tangents: Any, *, layer: Layer, keep: bool, apart: Flags = ()
) -> tuple[Flat, Any]:
    """Differentiates the results alone: ``backward`` says how gradients depend on the arrays, so
    what is kept has no derivative.
    """
    moved = moved_of(tangents)
    made, count = _layer.bind(*flat, layer=layer, keep=True, apart=apart), len(layer.results)
    names = tuple(layer.arrays[i] for i in moved)
    directions, kept = [tangents[i] for i in moved], made[count:]
    if apart:
        apart = *apart, *(apart[i] for i in moved), *[True] * len(kept)
    along = _linear.bind(*flat, *directions, *kept, layer=layer, moved=names, apart=apart)
    return (made, [*along, *map(jnp.zeros_like, kept)]) if keep else (made[:count], along)


def _backward_derivative(
    flat: Any, tangents: Any, *, layer: Layer, wanted: Names, arriving: Names, apart: Flags = ()
) -> tuple[Flat, Flat]:
    """The gradients are linear in those that arrive; how they depend on the arrays, says
    ``_second``.
    """
    static: dict[str, Any] = {"layer": layer, "wanted": wanted, "arriving": arriving}
    made, count = _backward.bind(*flat, **static, apart=apart), len(layer.arrays)
    middle, moved, parts = count + len(arriving), moved_of(tangents[:count]), list[Flat]()
    if any(type(t) is not ad.Zero for t in tangents[count:middle]):
        d = map(ad.instantiate_zeros, tangents[count:middle])
        parts.append(_backward.bind(*flat[:count], *d, *flat[middle:], **static, apart=apart))
    if moved:
        if apart:
            apart = *apart[:count], *(apart[i] for i in moved), *apart[count:middle]
        given = *flat[:count], *(tangents[i] for i in moved), *flat[count:middle]
        names = tuple(layer.arrays[i] for i in moved)
        parts.append(_second.bind(*given, **static, moved=names, apart=apart))
    return made, [sum(terms[1:], terms[0]) for terms in zip(*parts, strict=True)]


def derivative_as(primitive: Primitive, function: Callable[..., Flat]) -> Callable[..., Any]:
    """The derivative of a primitive, as that of a function that computes the same."""

    def derivative(flat: Any, tangents: Any, **static: Any) -> tuple[Flat, Flat]:
        moved = moved_of(tangents)
        along = _along(partial(function, **static), flat, moved, [tangents[i] for i in moved])
        return primitive.bind(*flat, **static), along

    return derivative


ad.primitive_jvps[_layer] = _layer_derivative
ad.primitive_jvps[_backward] = _backward_derivative
for _primitive, _function in ((_linear, _run_linear), (_second, _run_second)):
    ad.primitive_jvps[_primitive] = derivative_as(_primitive, _function)


def _transposed(
    arriving: Sequence[Any], *flat: Any, layer: Layer, moved: Names, apart: Flags = ()
) -> list[Any]:
    """The gradients of tangents, from those of the results' tangents."""
    count = len(layer.arrays)
    arrays, kept = flat[:count], flat[count + len(moved) :]
    there = {n: d for n, d in zip(layer.results, arriving, strict=True) if type(d) is not ad.Zero}
    none: list[Any] = [None] * count
    if not there:
        return [*none, *[None] * len(moved), *[None] * len(kept)]
    operands = *arrays, *there.values(), *kept
    static: dict[str, Any] = {"wanted": moved, "arriving": tuple(there)}
    if apart:
        static["apart"] = *apart[:count], *[True] * (len(there) + len(kept))
    # No kernel has the gradient of ``recurrent_mask``.
    run = _backward_by_scan if "recurrent_mask" in moved else _backward.bind
    gradients = run(*operands, layer=layer, **static)
    gradients = _of_shared(gradients, apart[count : count + len(moved)])
    return [*none, *gradients, *[None] * len(kept)]


def _transposed_backward(
    cotangents: Sequence[Any], *flat: Any, layer: Layer, wanted: Names, arriving: Names,
    apart: Flags = (),
) -> list[Any]:  # fmt: skip
    """The gradients of those that arrive are tangents of the results."""
    count, middle = len(layer.arrays), len(layer.arrays) + len(arriving)
    there = {n: u for n, u in zip(wanted, cotangents, strict=True) if type(u) is not ad.Zero}
    if not there:
        return [None] * len(flat)
    kept, of_all = flat[middle:], [*apart[:count], *[True] * (len(there) + len(flat) - middle)]
    static: dict[str, Any] = {"layer": layer, "moved": tuple(there)}
    static |= {"apart": tuple(of_all)} if apart else {}
    made = _linear.bind(*flat[:count], *there.values(), *kept, **static)
    named = dict(zip(layer.results, made, strict=True))
    gradients = _of_shared([named[name] for name in arriving], apart[count:middle])
    return [*[None] * count, *gradients, *[None] * len(kept)]


def _transposed_second(
    cotangents: Sequence[Any], *flat: Any, layer: Layer, wanted: Names, arriving: Names,
    moved: Names, apart: Flags = (),
) -> list[Any]:  # fmt: skip
    """Second derivatives are symmetric."""
    count, middle = len(layer.arrays), len(layer.arrays) + len(moved)
    there = {n: u for n, u in zip(wanted, cotangents, strict=True) if type(u) is not ad.Zero}
    if not there:
        return [None] * len(flat)
    static: dict[str, Any] = {"layer": layer, "arriving": arriving}
    if apart:
        static["apart"] = *apart[:count], *[True] * len(there), *apart[middle:]
    given = *flat[:count], *there.values(), *flat[middle:]
    gradients = _second.bind(*given, wanted=moved, moved=tuple(there), **static)
    made = _of_shared(gradients, apart[count:middle])
    return [*[None] * count, *made, *[None] * len(arriving)]


def _of_shared(gradients: Flat, apart: Flags) -> Flat:
    """The gradients of operands that may be ``apart``: of what elements share it is a sum."""
    if not apart:
        return gradients
    return [g if several else g.sum(0) for g, several in zip(gradients, apart, strict=True)]


ad.primitive_transposes[_linear] = _transposed
ad.primitive_transposes[_backward] = _transposed_backward
ad.primitive_transposes[_second] = _transposed_second


# ---- batches -------------------------------------------------------------------------------------
def rule_of_vmap(primitive: Primitive, together: bool = False) -> Callable[..., Any]:
    """The rule of ``vmap`` for a primitive; see ``batching``.

    Args:
        together: whether a card runs elements ``apart`` in the same launches.
    """

    def rule(flat: Any, dims: Any, *, layer: Layer, **static: Any) -> tuple[Flat, list[int]]:
        pairs = list(zip(flat, dims, strict=True))
        batched = [d is not None for d in dims]
        size = next(a.shape[d] for a, d in pairs if d is not None)
        flat = [a if d is None else jnp.moveaxis(a, d, 0) for a, d in pairs]
        inner, count = static.pop("apart", ()), len(layer.arrays)  # elements of another axis
        bind = partial(primitive.bind, layer=layer, **static)
        if inner:
            nested = list(zip(flat, batched, inner, strict=True))
            sizes = size, next(a.shape[outer] for a, outer, apart in nested if apart)
            if not 0 < math.prod(sizes) <= batching.MOST:
                made = batching.one_by_one(partial(bind, apart=inner), flat, batched)
                return made, [0] * len(made)
            every = [batching.of_both(*one, sizes) for one in nested]
            made = bind(*every, apart=tuple(map(or_, batched, inner)))
            return [a.reshape(*sizes, *a.shape[1:]) for a in made], [0] * len(made)
        mapped = dict(zip(layer.arrays, batched, strict=False))
        arrays = layer.named(flat[:count])
        wanted = static.get("wanted", ())  # by ``backward``
        one = batching.element(arrays, mapped)
        if not batching.foldable(one, mapped, wanted):
            if together and layer.plan.engine == "gpu" and 0 < size <= batching.MOST:
                made = bind(*flat, apart=tuple(batched))
            else:
                made = batching.one_by_one(bind, flat, batched)
            return made, [0] * len(made)
        folded = batching.fold_all(arrays, mapped, size)
        rest = [
            batching.fold(array, 1, several, size)
            for array, several in zip(flat[count:], batched[count:], strict=True)
        ]
        made = bind(*folded.values(), *rest)
        axes = [batching.row_axis(name, folded[name]) or 0 for name in wanted] or [1] * len(made)
        rows = one["x"].shape[1]
        unfolded = [
            batching.unfold(a, axis, size, rows) for a, axis in zip(made, axes, strict=True)
        ]
        return unfolded, [0] * len(made)

    return rule


for _primitive in (_layer, _backward):
    interpreter.primitive_batchers[_primitive] = rule_of_vmap(_primitive, together=True)


def _several(
    function: Callable[..., Flat], flat: Any, dims: Any, **static: Any
) -> tuple[Flat, list[int]]:
    made = jax.vmap(partial(function, **static), list(dims))(*flat)
    return made, [0] * len(made)


for _primitive, _function in ((_linear, _run_linear), (_second, _run_second)):
    interpreter.primitive_batchers[_primitive] = partial(_several, _function)
