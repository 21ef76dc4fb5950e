"""The forward pass of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from anycell.engines.cpu.driver import GATHER, UNSCALED
from anycell.layer import contract
from anycell.layer.arguments import Array, Kept
from anycell.layer.framework import Framework
from anycell.layer.heuristics import sparse
from anycell.layer.pass_tables import DriverPass, PassTables, finish
from anycell.layer.recipe import Draft, Recipe, Row, View, recipe_of
from anycell.layer.signature import FLAGS, OF_STATES, of_layer, states
from anycell.plan import Options, Plan, scales_of


class Forward(NamedTuple):
    """A drafted forward pass. Its integers number the arrays that a call makes.

    Attributes:
        out: of the outputs; if they are the hidden states, the initial state comes before them.
        apart: whether the outputs are not the hidden states.
        finals: of the final states.
        kept: of the arrays that the backward pass will read.
    """

    recipe: Recipe
    out: int
    apart: bool
    finals: list[int]
    kept: Kept


def forward(
    host: Framework, plan: Plan, arrays: Mapping[str, Array], options: Options, *, keep: bool
) -> tuple[Array, list[Array], Kept | None]:
    """Runs a layer.

    Args:
        host: array operations of the framework.
        plan: of the cell, for the CPU engine.
        arrays: by the names of ``signature``.
        options: directions, seeds, threads.
        keep: whether to keep what ``backward`` needs.

    Returns:
        outputs ``[T, B, D * size]``, the final states ``[D, B, size]`` in declared order, and
        ``Kept`` or None.

    Raises:
        ValueError, TypeError: for an array that breaks the ``contract``.
    """
    known, fitted = drafted(host, plan, arrays, options, keep)
    recipe = known.recipe
    made = recipe.run(list(map(fitted.__getitem__, recipe.names)), options)
    finals = list(map(made.__getitem__, known.finals))
    if plan.types.mixed:
        finals = [host.narrow(state) for state in finals]
    out = made[known.out]
    if not known.apart:
        out = out[1 : fitted["x"].shape[0] + 1]
    if not keep:
        return out, finals, None
    hidden, states_, values = known.kept
    sequences = [[None if i is None else made[i] for i in numbers] for numbers in states_]
    return out, finals, Kept(made[hidden], sequences, [made[i] for i in values])


def drafted(
    host: Framework, plan: Plan, arrays: Mapping[str, Array], options: Options, keep: bool
) -> tuple[Forward, dict[str, Array]]:
    """The pass that ``forward`` runs, and the arrays that its recipe names."""
    fitted, layout = contract.fit(host, plan, arrays, options)
    holes = "mask" in fitted and host.trace is None and sparse(fitted["mask"])
    same = options.unseeded() if options.seed or options.stream else options
    key = "forward", plan, same, keep, holes, layout
    if plan.types.mixed:
        fitted = widened(host, plan, fitted)
    return recipe_of(key, lambda: _draft(host, plan, options, keep, holes, fitted)), fitted


def _draft(
    host: Framework,
    plan: Plan,
    options: Options,
    keep: bool,
    holes: bool,
    arrays: Mapping[str, Array],
) -> Forward:
    """Drafts the pass for arrays that are laid out like these."""
    tables = PassTables(Draft(host, arrays, options), plan, options, False, holes)
    draft, steps, directions = tables.draft, tables.steps, len(tables.directions)
    segment = tables.segment if keep and options.checkpoint is not None else steps
    everything = keep and segment == steps
    # Outputs zeroed under a mask are not the hidden states, which then need memory of their own,
    # for all steps or for two.
    zeroed = options.apart(tables.mask is not None)
    kept = allocate_states(tables, steps, everything, everything or not zeroed)
    out = kept.hidden
    if zeroed:
        out = draft.new((steps, tables.batch, out.shape[2]))
        tables.place("out", out)
    shapes = [(directions, tables.batch, size) for _, size in states(plan)]
    finals = [draft.new(shape, wide=bool(i)) for i, shape in enumerate(shapes)]
    named = zip(plan.cell.state_names, finals, strict=True)
    tables.place_parts({f"final {name}": final for name, final in named})
    project(tables, kept.hidden)
    moves: list[Row] = []
    if keep and not everything:
        kept, moves = _borders(tables, -(-steps // segment), finals)
    again = partial(_draft, host, plan, options, keep, holes)
    recipe = finish(draft, [DriverPass(tables, segment=segment, moves=moves)], again=again)
    number = recipe.number
    numbers = Kept(
        number(kept.hidden),
        [[None if view is None else number(view) for view in views] for views in kept.states],
        [number(view) for view in kept.values],
    )
    return Forward(recipe, number(out), zeroed, [number(final) for final in finals], numbers)


class Stacked(NamedTuple):
    """A drafted pass of layers on top of each other, see ``Forward``."""

    recipe: Recipe
    out: int
    finals: list[int]


def draft_stack(
    host: Framework,
    plan: Plan,
    layers: int,
    arrays: Mapping[str, Array],
    options: Options,
    holes: bool,
) -> Stacked | None:
    """Drafts a pass of layers on top of each other, which keeps nothing; None if a kernel cannot
    read the arrays as they are.

    Args:
        arrays: by the names of ``signature``, with the states of all layers; flags are bytes and
            contiguous, resets those of each direction, ``[D, T, B]``. Weights have the names of
            parameters.
        holes: whether the mask is ``sparse``.
    """
    count, x, layouts = len(options.reverse), arrays["x"], []
    for k in range(layers):
        layer = _of_layer(plan, arrays, k, count, lambda array, *ends: array[slice(*ends)])
        fitted, layout = contract.fit(host, plan, {"x": x, **layer}, options)
        if any(fitted.get(name) is not array for name, array in layer.items()) or (
            not k and fitted["x"] is not x
        ):
            return None
        layouts.append(layout)
        x = host.empty((*x.shape[:2], count * states(plan)[0][1]))
    key = "stack", plan, options, holes, *(name in arrays for name in FLAGS), *layouts
    arrays = _wide_states(host, plan, arrays)
    return recipe_of(key, lambda: _draft_stack(host, plan, layers, arrays, options, holes))


def _draft_stack(
    host: Framework,
    plan: Plan,
    layers: int,
    arrays: Mapping[str, Array],
    options: Options,
    holes: bool,
) -> Stacked:
    draft, count = Draft(host, arrays, options), len(options.reverse)
    x, passes = draft.views["x"], list[DriverPass]()
    flags = {n: view for n, view in draft.views.items() if n in FLAGS}
    steps, rows, _ = x.shape
    zeroed = options.apart("mask" in flags)
    finals = {
        f"final {name}": draft.new((layers * count, rows, size), wide=bool(i))
        for i, (name, size) in enumerate(states(plan))
    }
    for k in range(layers):
        views = {"x": x, **flags, **_of_layer(plan, draft.views, k, count, View.rows)}
        tables = PassTables(draft, plan, options, False, holes, views)
        hidden = allocate_states(tables, steps, False, not zeroed).hidden
        x = hidden.rows(1, steps + 1)
        if zeroed:
            x = draft.new((steps, rows, hidden.shape[2]))
            tables.place("out", x)
        first, last = k * count, (k + 1) * count
        tables.place_parts({name: final.rows(first, last) for name, final in finals.items()})
        project(tables, hidden)
        passes.append(DriverPass(tables))
    recipe = finish(draft, passes)
    return Stacked(recipe, recipe.number(x), list(map(recipe.number, finals.values())))


def _of_layer(
    plan: Plan, arrays: Mapping[str, Any], k: int, count: int, rows: Callable[[Any, int, int], Any]
) -> dict[str, Any]:
    """The arrays of layer k among those of a stack, besides x and resets."""
    first, last = k * count, (k + 1) * count
    named = {n: rows(a, first, last) for n, a in arrays.items() if n.startswith(OF_STATES)}
    if "static" in arrays:
        named["static"] = arrays["static"]
    return named | of_layer(plan.cell, arrays, k, count)


def allocate_states(tables: PassTables, steps: int, everything: bool, whole: bool) -> Kept:
    """Makes memory for what ``steps`` steps hand on to one another and to the backward pass.

    Args:
        everything: whether the backward pass will need all of it.
        whole: whether to keep the first state of all steps.
    """
    draft, plan, batch, directions = tables.draft, tables.plan, tables.batch, len(tables.directions)
    (_, first), *others = states(plan)
    slots, fill = (steps + 1 + any(tables.options.reverse), "lasting") if whole else (2, "")
    shape = slots, batch, directions * first
    hidden = draft.new(shape, fill) if whole else draft.buffer(shape, draft.host.dtype.itemsize)
    bits = int(whole)
    sequences: list[list[View | None]] = [[None] for _ in tables.directions]
    for i, (name, size) in enumerate(others, 1):
        all_of_it = everything and name in plan.states
        bits |= all_of_it << i
        shape = steps + 1, batch, size
        for d, sequence in enumerate(sequences):
            sequence.append(draft.new(shape, "lasting", True) if all_of_it else None)
            if not all_of_it:  # nothing reads the sequence: two slots, which take turns
                two = draft.buffer((2, batch, size), plan.types.math.bytes)
                tables.place_of(d, {f"sequence {name}": two})
    saved = steps, batch, plan.saved_stride
    values = [draft.new(saved, "lasting") for _ in tables.directions] if everything else []
    kept = Kept(hidden, sequences, values)
    tables.place_kept(kept)
    draft.put(tables.base + tables.kernel.shared["whole"], bits)
    return kept


def project(tables: PassTables, hidden: View | None = None) -> None:
    """Adds the projection of each chunk's gates, unless the kernel multiplies the input.

    Args:
        hidden: the first states before and after all steps, where steps of one row may be taken.
    """
    plan, x = tables.plan, tables.x
    if tables.inputs:
        tables.place("input", x)
        return
    width = plan.gates_width
    for d, w in enumerate(tables.directions):
        if not tables.projects:
            tables.place_of(d, {"gates": x})
            continue
        gates = tables.rows(width, wide=True)
        tables.place_rows(d, "gates", gates)
        integers = plan.types.quantized
        scales = w[scales_of("weight_ih")] if integers else 0
        entering, weight, to = tables.lay_out_x(tables.before, d), w["weight_ih"].T, gates
        several = tables.single and tables.steps > 1
        if several:  # all at once, as they are
            whole = tables.draft.buffer((tables.steps, 1, width), plan.types.accumulate.bytes)
            of_step = tables.over_steps(whole)
            entering, to = (v._replace(shape=(tables.steps, v.shape[1]), time=0)
                            for v in (entering, of_step))  # fmt: skip
        kind = tables.by_weight(weight, several * tables.steps)
        tables.multiply(
            tables.before, d, entering, weight, to, scales=scales, kind=kind, once=several
        )
        if tables.single:
            shape = tables.batch, width + integers  # the scale of the row follows
            product = tables.draft.buffer(shape, plan.types.accumulate.bytes)
            tables.place_of(d, {"product": product})
            product = product.columns(0, width)
            state, weight = _entering(tables, d), w["weight_hh"].T
            if several and hidden:  # the hidden states, where the first one goes before any product
                first = hidden.at(0)
                tables.multiply(tables.before, d, of_step, None, gates, kind=GATHER)
                tables.multiply(tables.before, d, state, None, first, kind=GATHER, once=True)
                state = tables.over_steps(hidden)
            scales = w[scales_of("weight_hh")] if integers else 0
            kind = UNSCALED if integers else tables.by_weight(weight)
            tables.multiply(tables.before, d, state, weight, product, scales=scales, kind=kind)


def _entering(tables: PassTables, d: int) -> View:
    """The first state before a single step, ``[B, size]``, after resets."""
    w, name = tables.directions[d], tables.plan.cell.state_names[0]
    state, restored = w.get(f"state {name}"), w.get(f"reset_state {name}")
    resets, state = w.get("resets"), state or tables.declared(0, tables.batch)
    if resets is None:
        return state
    restored = restored or tables.declared(0, 1).at(0)
    apart = restored.strides[0] if len(restored.shape) > 1 else 0
    flags = resets._replace(shape=(1, 1), strides=(1, apart))
    entering = tables.draft.buffer(state.shape, state.size)
    tables.multiply(tables.before, d, state, flags, entering, scales=restored, kind=GATHER)
    return entering


def _borders(tables: PassTables, count: int, finals: list[View]) -> tuple[Kept, list[Row]]:
    """Makes memory for the states before each segment, which the door writes like final states;
    returns it and ``DriverPass.moves``.
    """
    draft, plan, batch, directions = tables.draft, tables.plan, tables.batch, len(tables.directions)
    (_, first), *others = states(plan)
    hidden = draft.new((count, batch, directions * first))
    sequences, moves = list[list[View | None]](), list[Row]()
    for d in range(directions):
        borders = [draft.new((count, batch, size), wide=True) for _, size in others]
        sequences.append([None, *borders])
        columns = hidden.columns(d * first, (d + 1) * first)
        named = zip(plan.cell.state_names, [columns, *borders], finals, strict=True)
        for name, border, final in named:
            moves += tables.moving(d, f"final {name}", border, final.at(d))
    values = [draft.new((0, batch, plan.saved_stride)) for _ in tables.directions]
    return Kept(hidden, sequences, values), moves


def widened(host: Framework, plan: Plan, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays for a kernel of 16 bits, which takes all states but the first, and projected
    gates, in the dtype of ``host.wide``.
    """
    wide = _wide_states(host, plan, arrays)
    if "weight_ih" not in wide:
        wide["x"] = host.widen(wide["x"])
    return wide


def _wide_states(host: Framework, plan: Plan, arrays: Mapping[str, Array]) -> dict[str, Array]:
    wide = dict(arrays)
    for name in plan.cell.state_names[1:] if plan.types.mixed else ():
        for state in (f"state {name}", f"reset_state {name}"):
            if state in wide:
                wide[state] = host.widen(wide[state])
    return wide
