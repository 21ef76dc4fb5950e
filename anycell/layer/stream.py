"""One step at a time: the weights packed once, then one native call for all layers.

The kernel runs the cell with the input projection inside (``with_projection``), so that it reads
every weight once. The Python around it must be short: at 64 units it takes longer than the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from anycell.engines import cpu
from anycell.lang.cell import INPUT
from anycell.lang.transform import with_projection
from anycell.layer import Array, contract
from anycell.layer.checks import refuse
from anycell.layer.forward import allocate_states, project
from anycell.layer.framework import Framework, extent
from anycell.layer.pass_tables import PassTables, finish
from anycell.layer.recipe import Draft, Recipe, View, dense
from anycell.layer.signature import DENSE, state_names
from anycell.layer.signature import states as states_of
from anycell.plan import Options, Plan, plan
from anycell.recent import add_recent

FORMS = 32  # the largest number of kept recipes, which depend on rows and on what is given


class _Layer:
    """A layer: its plan, and its weights as its kernel reads them."""

    def __init__(self, host: Framework, whole: Plan, w: Mapping[str, Array], threads: int) -> None:
        inputs = w["weight_ih"].shape[1]
        self.host, self.learned = host, contract.weights(host, whole, w, inputs)
        self.plan = projecting(whole, inputs)
        self.packed: cpu.Block | None = None
        draft = Draft(host, {}, Options(threads=threads))
        run = self.run(draft, {"x": draft.constant(host.empty((1, 1, inputs)))})
        run.begin = run.steps
        finish(draft, [run]).run([], draft.options)

    def run(self, draft: Draft, views: dict[str, View]) -> PassTables:
        """A pass of the layer, which packs its weights if it is the first.

        Args:
            views: all arrays except those that the layer learns.
        """
        for name, array in self.learned.items():
            view = draft.keep(array, *extent(self.host, array))
            strides = self.host.strides(array)
            views[name] = view._replace(shape=tuple(array.shape), strides=strides)
        known = self.packed is not None

        def packed(size: int) -> View:
            block = self.packed = self.packed or cpu.Block(size)
            return draft.keep(block, block.address, block.address + block.size)

        run = PassTables(draft, self.plan, draft.options, False, False, views, packed)
        if known:
            draft.put(run.base + run.kernel.shared["pack"], 0)
        return run


def projecting(whole: Plan, inputs: int) -> Plan:
    """The plan of a step: the kernel also multiplies the input, of this width, unless gates have
    sizes of their own.
    """
    if set(whole.cell.gate_sizes.values()) != {"H"}:
        return whole
    sizes = {**whole.sizes, INPUT: inputs}
    return plan(with_projection(whole.cell), sizes["H"], whole.dtype, sizes=sizes)


class _Step(NamedTuple):
    """A drafted step, and the numbers of its results among the arrays that it makes."""

    recipe: Recipe
    output: int
    finals: list[int]


class Stream:
    """Layers of one direction, ready to step in evaluation.

    Args:
        host: array operations of the framework.
        plan: of the CPU engine; the cell must compute in the storage type.
        weights: what each layer learns, by name; copied as they are now, except for the parameters
            of the cell.
        threads: for packing.
    """

    def __init__(
        self,
        host: Framework,
        plan: Plan,
        weights: Sequence[Mapping[str, Array]],
        threads: int,
    ) -> None:
        self.host, self.plan, cell = host, plan, plan.cell
        self.static, self.static_width = cell.static, plan.static_width
        self.target = cpu.isa.current()
        self.layers = [_Layer(host, plan, w, threads) for w in weights]
        self.width = weights[0]["weight_ih"].shape[1]
        self.shape = [(len(weights), size) for _, size in states_of(plan)]
        self.before, self.restored = (state_names(k, cell) for k in ("state", "reset_state"))
        self._steps: dict[tuple[Any, ...], _Step] = {}

    def step(
        self,
        rows: int,
        x: Array,
        states: Sequence[Array] | None,
        static: Array | None,
        threads: int,
        resets: Array | None = None,
        reset_state: Sequence[Array] | None = None,
    ) -> tuple[Array, list[Array]]:
        """Runs one step.

        Args:
            x: ``[rows, I]``; like all other arrays contiguous, but not necessarily aligned.
            states: ``[layers, rows, size]`` each; None for what the cell declares.
            static: ``[rows, H]``, for a cell that declares it.
            threads: at most this many.
            resets: ``[rows]``, bytes that are not zero where a row's states are restored before the
                step.
            reset_state: what resets restore, laid out as ``states``; None, or empty, for what the
                cell declares.

        Returns:
            the output ``[rows, size]`` and the new states.
        """
        given = [x]
        if static is not None:
            given.append(static)
        if states:
            given += states
        if resets is not None and reset_state:
            given += reset_state
        if self.host.misaligned(given):  # as arrays from a file or a record may be
            given = [self.host.fit(array, DENSE) for array in given]
        if resets is not None:
            given.append(resets)
        key = rows, threads, not states, resets is None, not reset_state
        try:
            recipe, output, finals = self._steps[key]
        except KeyError:
            names = ["x", *["static"] * (static is not None), *self.before * bool(states)]
            if resets is not None:
                names += [*self.restored * bool(reset_state), "resets"]
            step = self._draft(rows, threads, dict(zip(names, given, strict=True)))
            recipe, output, finals = add_recent(self._steps, key, step, FORMS)
        made = recipe.run(given, recipe.options)
        return made[output], [made[final] for final in finals]

    def _draft(self, rows: int, threads: int, given: Mapping[str, Array]) -> _Step:
        """Drafts the step for this number of rows, and for arrays of these names."""
        if cpu.isa.current() is not self.target:
            current = f"{cpu.isa.current().name!r} as the instruction set"
            expected = f"{self.target.name!r}, for which the weights are packed"
            refuse("step", current, expected, "Call prepare() again.", RuntimeError)
        draft = Draft(self.host, given, Options(threads=threads))
        shapes = [(len(self.layers), rows, size) for _, size in self.shape]
        finals = [draft.new(shape) for shape in shapes]
        views = {name: _dense(view) for name, view in draft.views.items()}
        if "resets" in views:
            views["resets"] = views["resets"]._replace(shape=(1, 1, rows), strides=(rows, rows, 1))
        entering, runs = views.pop("x"), []
        parted = {*self.before, *self.restored}
        for k, layer in enumerate(self.layers):
            of_layer = {n: _part(v, k) if n in parted else v for n, v in views.items()}
            run = layer.run(draft, of_layer | {"x": _one(entering)})
            project(run)
            allocate_states(run, 1, False, False)
            after = [_part(final, k) for final in finals]
            names = (f"final {name}" for name in self.plan.cell.state_names)
            run.place_parts(dict(zip(names, after, strict=True)))
            entering = finals[0].at(k)
            runs.append(run)
        output = draft.new((rows, self.shape[0][1]))
        runs[-1].place("out", output)
        if threads > 1 and all(run.parts < 2 for run in runs):
            return self._draft(rows, 1, given)  # without a gang of threads
        recipe = finish(draft, runs)
        return _Step(recipe, recipe.number(output), [recipe.number(final) for final in finals])


# ---- packed weights among the arrays of a call ---------------------------------------------------
def draft_packing(
    host: Framework, whole: Plan, weights: Mapping[str, Array], threads: int
) -> Recipe:
    """Drafts the packing of a layer's weights, which makes one array of bytes.

    Args:
        host: of arrays of bytes.
        whole: the plan of the layer, see ``projecting``.
        weights: what the layer learns, by name.
    """
    draft = Draft(host, weights, Options(threads=threads))
    inputs = weights["weight_ih"].shape[1]
    x = draft.constant(host.empty((1, 1, inputs)))
    views = draft.views | {"x": x}
    run = PassTables(
        draft, projecting(whole, inputs), draft.options, False, False, views,
        lambda size: draft.new((size,), "zeros"),  # also between and after the weights
    )  # fmt: skip
    run.begin = run.steps
    return finish(draft, [run])


def draft_step(host: Framework, whole: Plan, arrays: Mapping[str, Array], threads: int) -> Recipe:
    """Drafts a step of one layer, which makes the states after it, ``[1, B, size]`` each.

    Args:
        whole: the plan of the layer, see ``projecting``.
        arrays: by the names of ``signature``, with the weights as ``packed``; x is ``[1, B, I]``.
    """
    draft = Draft(host, arrays, Options(threads=threads))
    views = dict(draft.views)
    packed, (_, rows, inputs) = views.pop("packed"), views["x"].shape
    run = PassTables(
        draft, projecting(whole, inputs), draft.options, False, False, views, lambda _: packed
    )
    draft.put(run.base + run.kernel.shared["pack"], 0)
    if threads > 1 and run.parts < 2:
        return draft_step(host, whole, arrays, 1)  # without a gang of threads
    project(run)
    allocate_states(run, 1, False, False)
    names = run.plan.cell.state_names
    finals = [draft.new((1, rows, size)) for _, size in states_of(run.plan)]
    run.place_parts({f"final {n}": final for n, final in zip(names, finals, strict=True)})
    recipe = finish(draft, [run])
    for name, final in zip(names, finals, strict=True):
        if f"state {name}" in arrays:
            recipe.aliases[recipe.names.index(f"state {name}")] = recipe.number(final)
    return recipe


def _dense(view: View) -> View:
    """The view of a contiguous array, whose axes of one element may have come with any stride."""
    return view._replace(strides=dense(view.shape))


def _one(view: View) -> View:
    """The view with an axis of one element before the others."""
    return view._replace(
        shape=(1, *view.shape), strides=(view.shape[0] * view.strides[0], *view.strides)
    )


def _part(view: View, k: int) -> View:
    """A part along the first axis, which stays as an axis of one element."""
    return _one(view.at(k))
