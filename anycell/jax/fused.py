"""A layer by the kernels of the CPU engine, as four primitives of JAX.

    layer       the results
    keeping     the results, and what a backward pass reads
    backward    the gradients of arrays, from those of the results: the derived backward pass
    linear      the derivative in a direction, whose transpose is ``backward``

So ``grad`` of a layer is ``keeping`` and ``backward``, and under ``vmap`` the elements of a layer
become rows of its batch. All else is the layer step by step: ``linear`` itself, as forward mode
needs it, derivatives of these four, and what other platforms than the CPU run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from inspect import signature
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src import dispatch
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.interpreters import batching as interpreter

from anycell import layer
from anycell.jax import batching, sharding
from anycell.jax.composite import Array, Results, composite
from anycell.jax.host import Buffer, Seed, host_of
from anycell.layer.arguments import Kept
from anycell.layer.checks import refuse
from anycell.layer.sequences import keeping as keeping_states
from anycell.layer.sequences import sequences
from anycell.plan import Options, Plan
from anycell.plan import plan as make_plan

Arrays = dict[str, Array]
Names = tuple[str, ...]
Flat = list[Array]


def run(plan: Plan, options: Options, names: Names, arrays: Arrays) -> Results:
    """Runs a layer.

    Args:
        plan: of the cell, for the engine that runs it: "cpu" or "reference".
        options: of the call; "seed" among the arrays takes the place of their seed.
        names: states besides the first whose values after every step are wanted.
        arrays: by the names of ``layer.signature``.
    """
    if "resets" not in arrays:  # then nothing reads what they restore
        arrays = {n: a for n, a in arrays.items() if not n.startswith("reset_state ")}
    if names:  # the kernel keeps them like values for the backward pass
        options = options._replace(checkpoint=None)
    of = Pass(plan, options, names, tuple(arrays))
    fixed = all(isinstance(size, int) for array in arrays.values() for size in array.shape)
    if plan.engine != "cpu" or not fixed:  # a kernel needs the sizes that an export leaves open
        return _composite(of, arrays)
    _check_shards(arrays)
    return of.results(_layer.bind(*arrays.values(), of=of))


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


class Pass(NamedTuple):
    """A layer in a program, without its arrays, whose names are ``keys``; see ``run``."""

    plan: Plan
    options: Options
    names: Names
    keys: Names

    @property
    def outcomes(self) -> list[str]:
        """The names of the results."""
        return ["output", *(f"final {name}" for name in self.plan.cell.state_names), *self.names]

    def arrays(self, flat: Sequence[Array]) -> Arrays:
        """Arrays by name."""
        return dict(zip(self.keys, flat, strict=True))

    def results(self, flat: Sequence[Array]) -> Results:
        """Results from a list."""
        output, *rest = flat
        count = len(self.plan.cell.states)
        return output, tuple(rest[:count]), tuple(rest[count:])

    def kernels(self, arrays: Arrays) -> Plan:
        """The plan of the kernels that run a call."""
        plan, mask = self.plan, arrays.get("recurrent_mask")
        if mask is not None:
            cell = layer.stepped(plan.cell, mask)
            plan = make_plan(cell, plan.hidden_size, plan.dtype, "cpu", plan.sizes)
        return keeping_states(plan, self.names)


def _composite(of: Pass, arrays: Arrays) -> Results:
    options, given = _seeded(of.options, arrays)
    return composite(of.plan.cell, options, of.names, given)


def _seeded(options: Options, arrays: Arrays) -> tuple[Options, Arrays]:
    """Moves the seed from the arrays to the options."""
    given = dict(arrays)
    seed = given.pop("seed", None)
    return (options if seed is None else options._replace(seed=Seed.of(seed))), given


# ---- the kernels ---------------------------------------------------------------------------------
def _forward(of: Pass, keep: bool, *flat: Array) -> tuple[Results, Kept | None]:
    options, arrays = _seeded(of.options, of.arrays(flat))
    plan = of.kernels(arrays)
    host = host_of(plan.dtype)
    output, finals, kept = layer.forward(host, plan, arrays, options, keep=keep or bool(of.names))
    others = sequences(of.names, plan.cell, options, arrays, kept) if kept and of.names else []
    return (output, tuple(finals), tuple(others)), kept if keep else None


def _run_layer(*flat: Array, of: Pass) -> Flat:
    return jax.tree.leaves(_forward(of, False, *flat))


def _run_keeping(*flat: Array, of: Pass) -> Flat:
    return jax.tree.leaves(_forward(of, True, *flat))


def _run_backward(*flat: Array, of: Pass, wanted: Names, arriving: Names) -> Flat:
    """Takes the arrays of the call, the gradients that arrive, and what was kept."""
    count = len(of.keys)
    options, arrays = _seeded(of.options, of.arrays(flat[:count]))
    plan = of.kernels(arrays)
    d = dict(zip(arriving, flat[count:], strict=False))
    kept = jax.tree.unflatten(_kept_tree(of, flat[:count]), flat[count + len(arriving) :])
    gradients = layer.backward(
        host_of(plan.dtype), plan, arrays, options, kept, d.get("output"),
        [d.get(f"final {name}") for name in plan.cell.state_names],
        d_states={name: d[name] for name in of.names if name in d}, wanted=wanted,
    )  # fmt: skip
    return [Buffer.read(gradients[name]) for name in wanted]


def _kept_tree(of: Pass, flat: Sequence[Array]) -> Any:
    """The structure of what ``keeping`` keeps."""
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in flat]
    _, kept = jax.eval_shape(partial(_forward, of, True), *shapes)
    return jax.tree.structure(kept)


# ---- the same step by step -----------------------------------------------------------------------
def layer_by_scan(*flat: Array, of: Pass) -> Flat:
    """The results of a layer, step by step."""
    return jax.tree.leaves(_composite(of, of.arrays(flat)))


def _keeping_by_scan(*flat: Array, of: Pass) -> Flat:
    """Keeps nothing: ``_backward_by_scan`` reads nothing."""
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in flat]
    kept = jax.eval_shape(partial(_run_keeping, of=of), *shapes)[len(of.outcomes) :]
    return [*layer_by_scan(*flat, of=of), *(jnp.zeros(one.shape, one.dtype) for one in kept)]


def _backward_by_scan(*flat: Array, of: Pass, wanted: Names, arriving: Names) -> Flat:
    count = len(of.keys)
    arrays, d = of.arrays(flat[:count]), dict(zip(arriving, flat[count:], strict=False))

    def of_wanted(*some: Array) -> Flat:
        given = arrays | dict(zip(wanted, some, strict=True))
        return jax.tree.leaves(_composite(of, given))

    results, pull_back = jax.vjp(of_wanted, *(arrays[name] for name in wanted))
    names = zip(of.outcomes, results, strict=True)
    return list(pull_back([d.get(name, jnp.zeros_like(one)) for name, one in names]))


def _linear_by_scan(*flat: Array, of: Pass, moved: Names) -> Flat:
    """Takes the arrays of the call, the tangents of those that move, and what was kept."""
    count = len(of.keys)
    arrays, tangents = of.arrays(flat[:count]), flat[count : count + len(moved)]

    def of_moved(*some: Array) -> Flat:
        given = arrays | dict(zip(moved, some, strict=True))
        return jax.tree.leaves(_composite(of, given))

    _, derivative = jax.jvp(of_moved, tuple(arrays[name] for name in moved), tangents)
    return derivative


# ---- the primitives ------------------------------------------------------------------------------
def _cut(
    flat: Sequence[Array], made: Flat, of: Pass, wanted: Names = (), arriving: Names = ()
) -> sharding.Cut:
    """Describes how a layer, its step or its backward pass may be cut for several devices."""
    arrays = of.arrays(flat[: len(of.keys)])
    axes = [batching.row_axis(name, array) for name, array in arrays.items()]
    given = [*axes, *[1] * (len(flat) - len(axes))]  # gradients of results, and what is kept
    seed = of.keys.index("seed") if "seed" in of.keys else None
    if not arriving:
        return sharding.Cut(given, [1] * len(made), [None] * len(made), seed)
    like = [of.keys.index(name) for name in wanted]
    return sharding.Cut(given, [axes[i] for i in like], like, seed)


def primitive_of(
    name: str,
    kernels: Callable[..., Flat],
    scan: Callable[..., Flat],
    cut: Callable[..., sharding.Cut] = _cut,
) -> Primitive:
    """A primitive that ``kernels`` run on the CPU, and ``scan`` elsewhere; on several devices each
    runs its part, as ``cut`` says.
    """
    primitive = Primitive(f"anycell_{name}")
    primitive.multiple_results = True
    keywords = [p.name for p in signature(kernels).parameters.values() if p.kind is p.KEYWORD_ONLY]
    primitive.def_impl(jax.jit(primitive.bind, static_argnames=keywords))

    @lru_cache(maxsize=1024)
    def made(given: tuple[Any, ...], static: tuple[Any, ...]) -> list[Any]:
        shapes = [jax.ShapeDtypeStruct(*one) for one in given]
        results = jax.eval_shape(partial(kernels, **dict(static)), *shapes)
        return [jax.core.ShapedArray(one.shape, one.dtype) for one in results]

    def shapes(*flat: Any, **static: Any) -> list[Any]:
        return made(tuple((a.shape, a.dtype) for a in flat), tuple(static.items()))

    primitive.def_abstract_eval(shapes)

    def cut_kernels(*flat: Array, **static: Any) -> Flat:
        run = partial(kernels, **static)
        return sharding.on_devices(run, cut(flat, jax.eval_shape(run, *flat), **static), flat)

    by_kernels, by_parts, by_scan = (
        mlir.lower_fun(f, multiple_results=True) for f in (kernels, cut_kernels, scan)
    )

    def on_cpu(context: Any, *values: Any, **static: Any) -> Any:
        module = context.module_context
        lower = by_kernels
        # An exported program must run where anycell is not.
        if getattr(module.lowering_parameters, "for_export", False) or kernels is scan:
            lower = by_scan
        elif getattr(module.axis_context, "num_devices", 1) > 1:  # not inside of ``shard_map``
            lower = by_parts
        return lower(context, *values, **static)

    # A rule for several devices has to know them.
    dispatch.prim_requires_devices_during_lowering.add(primitive)
    mlir.register_lowering(primitive, by_scan)
    mlir.register_lowering(primitive, on_cpu, platform="cpu")
    return primitive


_layer = primitive_of("layer", _run_layer, layer_by_scan)
_keeping = primitive_of("keeping", _run_keeping, _keeping_by_scan)
_backward = primitive_of("backward", _run_backward, _backward_by_scan)
_linear = primitive_of("linear", _linear_by_scan, _linear_by_scan)


# ---- derivatives ---------------------------------------------------------------------------------
def moved_of(tangents: Sequence[Any]) -> list[int]:
    """The arguments that have a derivative."""
    return [
        i for i, t in enumerate(tangents) if type(t) is not ad.Zero and t.dtype != jax.dtypes.float0
    ]


def _of_results(flat: Sequence[Array], tangents: Sequence[Any], of: Pass) -> tuple[Flat, Flat, Any]:
    """Results of a layer, what it keeps, and the tangents of the results."""
    moved = moved_of(tangents)
    made, count = _keeping.bind(*flat, of=of), len(of.outcomes)
    names = tuple(of.keys[i] for i in moved)
    directions = [tangents[i] for i in moved]
    kept = made[count:]
    along = _linear.bind(*flat, *directions, *kept, of=of, moved=names)
    return made[:count], kept, along


def _layer_derivative(flat: Any, tangents: Any, *, of: Pass) -> tuple[Flat, Any]:
    results, _, along = _of_results(flat, tangents, of)
    return results, along


def _keeping_derivative(flat: Any, tangents: Any, *, of: Pass) -> tuple[Flat, Any]:
    """Differentiates the results alone: ``backward`` says how gradients depend on the arrays, so
    what is kept has no derivative.
    """
    results, kept, along = _of_results(flat, tangents, of)
    return [*results, *kept], [*along, *map(jnp.zeros_like, kept)]


def derivative_by_scan(primitive: Primitive, scan: Callable[..., Flat]) -> Callable[..., Any]:
    """The derivative of a primitive, from what it is step by step."""

    def derivative(flat: Any, tangents: Any, **static: Any) -> tuple[Flat, Flat]:
        moved = moved_of(tangents)

        def of_moved(*some: Array) -> Flat:
            given = list(flat)
            for i, one in zip(moved, some, strict=True):
                given[i] = one
            return scan(*given, **static)

        _, along = jax.jvp(
            of_moved, tuple(flat[i] for i in moved), tuple(tangents[i] for i in moved)
        )
        return primitive.bind(*flat, **static), along

    return derivative


ad.primitive_jvps[_layer] = _layer_derivative
ad.primitive_jvps[_keeping] = _keeping_derivative
ad.primitive_jvps[_backward] = derivative_by_scan(_backward, _backward_by_scan)
ad.primitive_jvps[_linear] = derivative_by_scan(_linear, _linear_by_scan)


def _transposed(arriving: Sequence[Any], *flat: Any, of: Pass, moved: Names) -> list[Any]:
    """The gradients of tangents, from those of the results' tangents."""
    count = len(of.keys)
    arrays, kept = flat[:count], flat[count + len(moved) :]
    there = {n: d for n, d in zip(of.outcomes, arriving, strict=True) if type(d) is not ad.Zero}
    none: list[Any] = [None] * count
    if not there:
        return [*none, *[None] * len(moved), *[None] * len(kept)]
    operands, static = (
        (*arrays, *there.values(), *kept),
        {"wanted": moved, "arriving": tuple(there)},
    )
    if "recurrent_mask" in moved:  # whose gradient no kernel has
        gradients = _backward_by_scan(*operands, of=of, **static)
    else:
        gradients = _backward.bind(*operands, of=of, **static)
    return [*none, *gradients, *[None] * len(kept)]


ad.primitive_transposes[_linear] = _transposed


# ---- batches -------------------------------------------------------------------------------------
def rule_of_vmap(primitive: Primitive, of_backward: bool) -> Callable[..., Any]:
    """The rule of ``vmap`` for a primitive; see ``batching``."""

    def rule(flat: Any, dims: Any, *, of: Pass, **static: Any) -> tuple[Flat, list[int]]:
        pairs = list(zip(flat, dims, strict=True))
        batched = [d is not None for d in dims]
        size = next(a.shape[d] for a, d in pairs if d is not None)
        flat = [a if d is None else jnp.moveaxis(a, d, 0) for a, d in pairs]
        bind, count = partial(primitive.bind, of=of, **static), len(of.keys)
        mapped = dict(zip(of.keys, batched, strict=False))
        arrays = of.arrays(flat[:count])
        wanted = static.get("wanted", ())
        one = batching.element(arrays, mapped)
        if not batching.foldable(one, mapped, wanted):
            made = batching.one_by_one(bind, flat, batched)
            return made, [0] * len(made)
        folded = batching.fold_all(arrays, mapped, size)
        rest = [
            batching.fold(array, 1, several, size)
            for array, several in zip(flat[count:], batched[count:], strict=True)
        ]
        made = bind(*folded.values(), *rest)
        axes = [1] * len(made)
        if of_backward:
            axes = [batching.row_axis(name, folded[name]) or 0 for name in wanted]
        rows = one["x"].shape[1]
        unfolded = [
            batching.unfold(a, axis, size, rows) for a, axis in zip(made, axes, strict=True)
        ]
        return unfolded, [0] * len(made)

    return rule


interpreter.primitive_batchers[_layer] = rule_of_vmap(_layer, False)
interpreter.primitive_batchers[_keeping] = rule_of_vmap(_keeping, False)
interpreter.primitive_batchers[_backward] = rule_of_vmap(_backward, True)


def _linear_several(flat: Any, dims: Any, **static: Any) -> tuple[Flat, list[int]]:
    made = jax.vmap(partial(_linear_by_scan, **static), list(dims))(*flat)
    return made, [0] * len(made)


interpreter.primitive_batchers[_linear] = _linear_several
