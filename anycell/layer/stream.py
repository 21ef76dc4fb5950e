"""One step at a time: the weights packed once, then one native call for all layers.

The kernel runs the cell with the input projection inside (``with_projection``), so that it reads
every weight once. The Python around it must be short: at 64 units it takes longer than the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from anycell.engines import cpu
from anycell.lang.cell import INPUT
from anycell.lang.transform import with_projection
from anycell.layer import Array, contract
from anycell.layer.checks import refuse
from anycell.layer.forward import allocate_states, project
from anycell.layer.framework import Framework
from anycell.layer.pass_tables import DriverPass, PassTables, Views, finish
from anycell.layer.recipe import Draft, Recipe, View, dense
from anycell.layer.signature import DENSE, of_a_matmul, places, state_names
from anycell.layer.signature import states as states_of
from anycell.plan import Options, Plan, plan
from anycell.recent import add_recent

FORMS = 32  # the largest number of kept recipes, which depend on rows and on what is given
Place = tuple[dict[str, Any], str]


class Prepared:
    """The packed weights of a layer, for its steps, and what they were packed from.

    It serves that layer only, and only while the layer has this cell and finds the very arrays, in
    the very places, that it had. Libraries copy layers, and their attributes, in many ways; a copy
    may bring this object along, but it is stale there. Copies by ``deepcopy`` and pickles do not
    carry the weights.

    Args:
        layer: None for an object that is stale from the start.
        places: dictionaries in which the layer looks for arrays, with a name.
        writes: those that a framework makes known.
        stream: runs the steps; None where no kernel does.
    """

    def __init__(
        self,
        layer: Any = None,
        places: Iterable[Place] = (),
        writes: Iterable[Writes] = (),
        stream: Stream | None = None,
    ) -> None:
        self.stream, self.cell = stream, getattr(layer, "cell", None)
        self.attributes = None if layer is None else layer.__dict__
        self.places = [(place, name, place.get(name)) for place, name in places]
        self.counts = [(counted, counted.count) for counted in writes]

    def stale(self, layer: Any) -> bool:
        """Whether the weights are another layer's, or have changed, as far as one can tell."""
        if layer.__dict__ is not self.attributes or layer.cell is not self.cell:
            return True
        for place, name, value in self.places:
            if place.get(name) is not value:
                return True
        for writes, count in self.counts:  # noqa: SIM110  (runs at every step)
            if writes.count != count:
                return True
        return False

    def __reduce__(self) -> tuple[Any, ...]:
        return Prepared, ()


class Writes:
    """Counts writes to arrays, by those who make them."""

    count = 0


def names_of(layer: Any) -> list[str]:
    """The names of all that the layers of one direction may learn."""
    learned, layers = layer.cell.learned, range(layer.num_layers)
    return [name for k in layers for name in places(learned, k, 1).values()]


def steps(plan: Plan | str) -> bool:
    """Whether a kernel steps by a plan, which may be the reason why there is none."""
    return isinstance(plan, Plan) and plan.engine == "cpu" and not plan.types.mixed


class _Packed(NamedTuple):
    """A layer: the plan of its step, its packed weights, and the arrays that are not packed."""

    plan: Plan
    block: cpu.Block
    others: dict[str, Array]

    def views(self, draft: Draft) -> dict[str, View]:
        """The arrays of the layer, in a draft."""
        first = self.block.address
        packed = draft.keep(self.block, first, first + self.block.size)
        return {name: draft.constant(a) for name, a in self.others.items()} | {"packed": packed}


def projecting(whole: Plan, inputs: int) -> Plan:
    """The plan of a step: the kernel also multiplies the input, of this width, unless gates have
    sizes of their own.
    """
    if not _can_project(whole):
        return whole
    sizes = {**whole.sizes, INPUT: inputs}
    return plan(with_projection(whole.cell), sizes["H"], whole.dtype, sizes=sizes)


def unpacked(whole: Plan, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays that a step reads beside the packed weights, see ``projecting``."""
    inside = _can_project(whole)
    return {name: array for name, array in arrays.items() if not (inside and of_a_matmul(name))}


def _can_project(whole: Plan) -> bool:
    return set(whole.cell.gate_sizes.values()) == {"H"}


class DraftedStep(NamedTuple):
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
        self.layers = [self._pack(w, threads) for w in weights]
        self.width = weights[0]["weight_ih"].shape[1]
        self.shape = [(len(weights), size) for _, size in states_of(plan)]
        self.before, self.restored = (state_names(k, cell) for k in ("state", "reset_state"))
        self._steps: dict[tuple[Any, ...], DraftedStep] = {}

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
        arrays = [x]
        if static is not None:
            arrays.append(static)
        if states:
            arrays += states
        if resets is not None and reset_state:
            arrays += reset_state
        if self.host.misaligned(arrays):  # as arrays from a file or a record may be
            arrays = [self.host.fit(array, DENSE) for array in arrays]
        if resets is not None:
            arrays.append(resets)
        key = rows, threads, not states, resets is None, not reset_state
        try:
            recipe, output, finals = self._steps[key]
        except KeyError:
            names = ["x", *["static"] * (static is not None), *self.before * bool(states)]
            if resets is not None:
                names += [*self.restored * bool(reset_state), "resets"]
            step = self._draft(rows, threads, dict(zip(names, arrays, strict=True)))
            recipe, output, finals = add_recent(self._steps, key, step, FORMS)
        made = recipe.run(arrays, recipe.options)
        return made[output], [made[final] for final in finals]

    def step_of(self, threads: int, arrays: Sequence[Array]) -> DraftedStep:
        """The drafted step of x and states like these, which is not kept."""
        return self._draft(
            len(arrays[0]), threads, dict(zip(("x", *self.before), arrays, strict=True))
        )

    def _pack(self, weights: Mapping[str, Array], threads: int) -> _Packed:
        """Packs the weights of a layer."""
        inputs = weights["weight_ih"].shape[1]
        learned = contract.weights(self.host, self.plan, weights, inputs)
        plan = projecting(self.plan, inputs)
        block = pack(self.host, plan, learned, inputs, Options(threads=threads))
        return _Packed(plan, block, unpacked(self.plan, learned))

    def _draft(self, rows: int, threads: int, arrays: Mapping[str, Array]) -> DraftedStep:
        """Drafts the step for this number of rows, and for arrays of these names."""
        if cpu.isa.current() is not self.target:
            current = f"{cpu.isa.current().name!r} as the instruction set"
            expected = f"{self.target.name!r}, for which the weights are packed"
            refuse("step", current, expected, "Call prepare() again.", RuntimeError)
        draft = Draft(self.host, arrays, Options(threads=threads))
        # Axes of one element may have come with any stride.
        views = {n: view._replace(strides=dense(view.shape)) for n, view in draft.views.items()}
        if "resets" in views:
            views["resets"] = views["resets"]._replace(shape=(1, 1, rows), strides=(rows, rows, 1))
        layers = [layer.views(draft) for layer in self.layers]
        tables, finals = _steps(draft, [layer.plan for layer in self.layers], views, layers)
        output = draft.new((rows, self.shape[0][1]))
        tables[-1].place("out", output)
        if threads > 1 and all(of_layer.parts < 2 for of_layer in tables):
            return self._draft(rows, 1, arrays)  # without a gang of threads
        recipe = finish(draft, list(map(DriverPass, tables)))
        return DraftedStep(
            recipe, recipe.number(output), [recipe.number(final) for final in finals]
        )


def pack(
    host: Framework, plan: Plan, learned: Mapping[str, Array], inputs: int, options: Options
) -> cpu.Block:
    """Packs what a layer learns for its kernel; see ``draft_packing``."""
    draft, blocks = Draft(host, learned, options), list[cpu.Block]()

    def packed(size: int) -> View:
        blocks.append(cpu.Block(size))
        return draft.keep(blocks[0], blocks[0].address, blocks[0].address + size)

    recipe = draft_packing(draft, plan, inputs, packed)
    recipe.run([learned[name] for name in recipe.names], options)
    return blocks[0]


def draft_packing(
    draft: Draft, plan: Plan, inputs: int, packed: Callable[[int], View] | None = None
) -> Recipe:
    """Ends a draft of the packing of a layer's weights, which are the arrays of the draft.

    Args:
        plan: of the kernel that reads them.
        inputs: the last axis of x.
        packed: returns the memory of packed weights from its size; None for an array that the call
            makes.
    """
    views = dict(draft.views)
    views["x"] = draft.constant(draft.host.empty((1, 1, inputs)))
    packed = packed or (lambda size: draft.new((size,), "zeros"))  # also what is between weights
    tables = PassTables(draft, plan, draft.options, False, False, views, packed)
    return finish(draft, [DriverPass(tables, begin=tables.steps)])


def draft_step(host: Framework, whole: Plan, arrays: Mapping[str, Array], threads: int) -> Recipe:
    """Drafts a step of one layer, which makes the states after it, ``[1, B, size]`` each.

    Args:
        whole: the plan of the layer, see ``projecting``.
        arrays: by the names of ``signature``, with the weights as ``packed``; x is ``[1, B, I]``.
    """
    draft = Draft(host, arrays, Options(threads=threads))
    views = dict(draft.views)
    layer = {name: views.pop(name) for name in ("packed", *whole.cell.learned) if name in views}
    views["x"] = views["x"].at(0)
    plan = projecting(whole, views["x"].shape[1])
    (tables,), finals = _steps(draft, [plan], views, [layer])
    if threads > 1 and tables.parts < 2:
        return draft_step(host, whole, arrays, 1)  # without a gang of threads
    named = zip(state_names("state", whole.cell), finals, strict=True)
    overwrites = {name: final for name, final in named if name in arrays}
    return finish(draft, [DriverPass(tables)], overwrites=overwrites)


def _steps(
    draft: Draft, plans: Sequence[Plan], views: Views, layers: Sequence[Views]
) -> tuple[list[PassTables], list[View]]:
    """The tables of a step, layer by layer, and the states after it, ``[layers, rows, size]`` each.

    Args:
        views: the arrays that the layers share, and the states of all; x is ``[rows, I]``.
        layers: the others, with the packed weights as ``packed``.
    """
    entering, of_layers, cell = views["x"], [], plans[0].cell
    finals = [draft.new((len(layers), entering.shape[0], n)) for _, n in states_of(plans[0])]
    parted = {*state_names("state", cell), *state_names("reset_state", cell)}
    for k, (of_step, layer) in enumerate(zip(plans, layers, strict=True)):
        arrays = {n: _part(v, k) if n in parted else v for n, v in views.items()}
        arrays |= {**layer, "x": _one(entering)}
        packed = arrays.pop("packed")
        tables = PassTables(
            draft, of_step, draft.options, False, False, arrays,
            lambda _: packed,  # noqa: B023  (called at once)
        )  # fmt: skip
        draft.put(tables.base + tables.kernel.shared["pack"], 0)
        project(tables)
        allocate_states(tables, 1, False, False)
        names = [f"final {name}" for name in cell.state_names]
        tables.place_parts({n: _part(final, k) for n, final in zip(names, finals, strict=True)})
        entering = finals[0].at(k)
        of_layers.append(tables)
    return of_layers, finals


def _one(view: View) -> View:
    """The view with an axis of one element before the others."""
    return view._replace(
        shape=(1, *view.shape), strides=(view.shape[0] * view.strides[0], *view.strides)
    )


def _part(view: View, k: int) -> View:
    """A part along the first axis, which stays as an axis of one element."""
    return _one(view.at(k))
