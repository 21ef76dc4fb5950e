"""The backward pass of a layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from anycell.engines.cpu.driver import SUM
from anycell.layer import contract
from anycell.layer.arguments import Array, Factors, Kept
from anycell.layer.forward import allocate_states, project, widened
from anycell.layer.framework import Framework
from anycell.layer.heuristics import chunk_of, row_group
from anycell.layer.pass_tables import DriverPass, PassTables, finish
from anycell.layer.recipe import Draft, Recipe, Row, View, recipe_of
from anycell.layer.schedule import segment_steps
from anycell.layer.signature import ENDS, of_a_matmul, states
from anycell.layer.weight_gradients import (
    WeightGradients,
    bias_gradients,
    gradients_by_name,
    vector_of,
)
from anycell.plan import Options, Plan


def backward(
    host: Framework,
    plan: Plan,
    arrays: Mapping[str, Array],
    options: Options,
    kept: Kept,
    d_output: Array | None,
    d_final: Sequence[Array | None],
    *,
    d_states: Mapping[str, Array] | None = None,
    wanted: Collection[str] | None = None,
) -> dict[str, Array]:
    """The gradients of a layer.

    Args:
        host, plan, arrays, options: as given to ``forward``.
        kept: from ``forward``; may be used again.
        d_output: gradient of the outputs ``[T, B, D*size]``, or None.
        d_final: gradients of the final states ``[D, B, size]``, None where there is none.
        d_states: gradients of the sequences ``[T, B, D*size]`` of states besides the first, by
            name.
        wanted: names of the arrays whose gradients are wanted; None for all.

    Returns:
        the gradients by the names of the arrays, of all that were given except masks; not wanted
        ones may be missing. Without ``weight_ih``, x is the projected gates.

    Raises:
        ValueError, TypeError: for an array that breaks the ``contract``.
    """
    known, fitted = drafted_backward(
        host, plan, arrays, options, kept, d_output, d_final, d_states or {}, wanted
    )
    recipe = known.recipe
    made = recipe.run(list(map(fitted.__getitem__, recipe.names)), options)
    gradients = {name: made[i] for name, i in known.whole.items()}
    wide, learned = host.wide, []
    for d, (biases, vector_numbers, total_numbers) in enumerate(known.sums):
        vectors = {name: made[i] for name, i in vector_numbers.items()}
        named = {name: made[i] for name, i in total_numbers.items()}
        params = named.pop("d_params", None)
        for name in named:
            if name.startswith("reset_state "):
                named[name] = named[name][d]
        if params is not None:
            parts_ = host.split(params.sum(0), plan.param_sizes)
            named.update(zip(plan.cell.param_names, parts_, strict=True))
        learned.append(named | bias_gradients(plan, biases, {}, vectors, wide.empty, wide.zeros))
    gradients |= gradients_by_name(wide.empty, known.directions, None, learned)
    if plan.types.mixed:
        gradients = {name: host.narrow(gradient) for name, gradient in gradients.items()}
    for name in known.turned:
        gradients[name] = gradients[name].T
    return gradients


def drafted_backward(
    host: Framework,
    plan: Plan,
    arrays: Mapping[str, Array],
    options: Options,
    kept: Kept,
    d_output: Array | None,
    d_final: Sequence[Array | None],
    d_states: Mapping[str, Array],
    wanted: Collection[str] | None,
) -> tuple[Backward, dict[str, Array]]:
    """The pass that ``backward`` runs, and the arrays that its recipe names."""
    read = options.checkpoint is not None  # the forward pass runs again, and may read x
    fitted, layout = contract.fit(host, plan, arrays, options, read)
    segment = _segment(plan, fitted, options)
    parts, further = contract.fit_gradients(
        host, plan, fitted["x"].shape, options.reverse, kept, d_output, d_final, d_states,
        segment=segment, keeps=keeps_state,
    )  # fmt: skip
    wants = Wanted(True, True, True)
    if wanted is not None:
        learned_too = any(map(of_a_matmul, wanted))
        wants = Wanted(learned_too, "x" in wanted, _of_first(plan) in wanted)
    same = options.unseeded() if options.seed or options.stream else options
    key = "backward", plan, same, wants, layout, further
    if plan.types.mixed:
        fitted = widened(host, plan, fitted)
        parts |= {name: host.widen(d) for name, d in parts.items() if name.startswith("d_final ")}
    fitted |= parts
    return recipe_of(key, lambda: _draft(host, plan, options, wants, fitted)), fitted


class Wanted(NamedTuple):
    """Whether the gradients of weights and biases, of x, and of the first state are wanted."""

    weights: bool
    x: bool
    first_state: bool


class SumsOfDirection(NamedTuple):
    """The names of biases; and by name the vectors of the ``WeightGradients`` of a direction, and
    the sums of the kernel: "d_params", "static", and what resets restore, for all directions.
    """

    biases: list[str]
    vectors: dict[str, int]
    totals: dict[str, int]


class Backward(NamedTuple):
    """A drafted backward pass. Its integers number the arrays that a call makes.

    Attributes:
        directions: the arrays that each direction was given.
        whole: by name, the gradients that one array holds: of x, if it is wanted, of states
            ``[D, B, size]``, and of weights.
        sums: of each direction.
        turned: weights whose gradients are stored transposed, like the weights.
    """

    recipe: Recipe
    directions: list[dict[str, View]]
    whole: dict[str, int]
    sums: list[SumsOfDirection]
    turned: list[str]


def _draft(
    host: Framework,
    plan: Plan,
    options: Options,
    wants: Wanted,
    arrays: Mapping[str, Array],
) -> Backward:
    """Drafts the pass for arrays that are laid out like these."""
    tables = PassTables(Draft(host, arrays, options), plan, options, True, False)
    draft, views, count = tables.draft, tables.draft.views, len(tables.directions)
    dx = None
    if wants.x or not tables.projects:
        # Two directions add to it.
        fill = "zeros" if tables.projects and count > 1 else "empty"
        dx = draft.new(tables.x.shape, fill, wide=tables.projects)
    for name, view in views.items():
        if name == "d_output" or name.startswith("d_sequence "):
            tables.place(name, view)
    states_, totals = _totals(tables)
    directions = [_Direction(tables, d, dx, wants.weights) for d in range(count)]
    hidden, of_driver = _states(tables)
    for direction in directions:
        direction.multiply(hidden)
        if tables.single and wants.first_state:
            direction.add_product(states_[_of_first(plan)].at(direction.d))
    recipe = finish(draft, [of_driver], again=partial(_draft, host, plan, options, wants))

    def numbers(views: Mapping[str, View]) -> dict[str, int]:
        return {name: recipe.number(view) for name, view in views.items()}

    whole = {} if dx is None else {"x": dx}
    whole |= {name: state for name, state in states_.items() if name in tables.directions[0]}
    turned = []
    for direction in directions:
        sums = direction.sums
        weights = {name + ENDS[direction.d]: total for name, total in sums.totals.items()}
        whole |= weights
        turned += [name for name, total in weights.items() if _turned(total)]
    sums_of_directions = [
        SumsOfDirection(direction.sums.biases, numbers(direction.sums.vectors), numbers(others))
        for direction, others in zip(directions, totals, strict=True)
    ]
    return Backward(recipe, tables.directions, numbers(whole), sums_of_directions, turned)


class Gradient(NamedTuple):
    """A gradient that an array of a pass holds as it is: the array's number, whether it is
    transposed, and whether the gradient is a copy, because another one is the array itself.
    """

    number: int
    turned: bool = False
    copy: bool = False


def held(plan: Plan, known: Backward) -> dict[str, Gradient] | None:
    """The gradients of a pass, by name, and "d_params" of each direction; None if any is made of
    several arrays.
    """
    named = {name: Gradient(i, name in known.turned) for name, i in known.whole.items()}
    used = set[int]()
    for d, (biases, vectors, totals) in enumerate(known.sums):
        for name, number in totals.items():
            if name.startswith("reset_state ") and name not in known.directions[d]:
                continue  # of a value that the cell declares
            if name not in ({"d_params"} if d else {"d_params", "static"}):
                return None
            named[name + ENDS[d] * (name != "static")] = Gradient(number)
        for name in biases:
            vector = vector_of(plan, name)
            if vector is None:
                return None
            number = vectors[vector]
            named[name + ENDS[d]] = Gradient(number, copy=number in used)
            used.add(number)
    return named


def _of_first(plan: Plan) -> str:
    """The name of the first state's array."""
    return f"state {plan.cell.state_names[0]}"


def _segment(plan: Plan, arrays: Mapping[str, Array], options: Options) -> int:
    """The number of steps whose values the pass needs at once, as ``PassTables.segment``."""
    steps, batch, _ = arrays["x"].shape
    if options.checkpoint is None:
        return int(steps)
    projects = "weight_ih" in arrays
    chunk = chunk_of(plan, steps, batch * len(options.reverse)) if projects else max(1, steps)
    return segment_steps(options.checkpoint, steps, chunk)


def _totals(tables: PassTables) -> tuple[dict[str, View], list[dict[str, View]]]:
    """Makes memory for the gradients that the kernel itself adds up. The first call of the door
    sets them to 0, or to the gradients of the final states.

    Returns:
        the gradients of states, and all others per direction.
    """
    draft, plan, batch, count = tables.draft, tables.plan, tables.batch, len(tables.directions)
    cell = plan.cell
    of_states, whole, others = {}, {}, {}
    for name, size in states(plan):
        shape = count, batch, size
        of_states[f"state {name}"] = whole[f"d_state {name}"] = draft.new(shape, wide=True)
        if f"d_final {name}" in draft.views:
            whole[f"d_final {name}"] = draft.views[f"d_final {name}"]
        if tables.resets is not None:
            reset = draft.new(shape, wide=True)
            others[f"reset_state {name}"] = whole[f"d_reset {name}"] = reset
    tables.place_parts(whole)
    totals = []
    for d in range(count):
        named = dict(others)
        if cell.params:
            groups = -(-batch // row_group(batch))
            named["d_params"] = draft.new((groups, sum(plan.param_sizes)), wide=True)
            tables.place_of(d, {"d_params": named["d_params"]})
        if "static" in tables.directions[d]:
            named["static"] = draft.new((batch, plan.static_width), wide=True)
            tables.place_of(d, {"d_static": named["static"]})
        totals.append(named)
    return of_states, totals


class _NativeGradients(WeightGradients):
    """Gradients of weights and biases that the driver adds up, chunk by chunk."""

    def __init__(self, tables: PassTables, d: int, need: bool) -> None:
        self.tables, self.d = tables, d
        super().__init__(tables.plan, tables.directions[d], need, tables.steps > 0)

    def new(self, shape: tuple[int, ...], overwritten: bool) -> View:
        return self.tables.draft.new(shape, "empty" if overwritten else "zeros", wide=True)

    def like(self, weight: View, overwritten: bool) -> View:
        if _turned(weight):
            return self.new(weight.shape[::-1], overwritten).T
        return self.new(weight.shape, overwritten)

    def multiply(self, d: View, operand: View, weight: View, first: bool) -> None:
        a, b, out = (operand, d, weight.T) if _turned(weight) else (d, operand, weight)
        self.tables.multiply(self.tables.after, self.d, a.T, b, out, not first, True)

    def add_blocks(self, d: View, operand: View, weight: View, heads: int, first: int) -> None:
        out, into = d.shape[1] // heads, operand.shape[1] // heads
        for i in range(heads):
            block = weight.at(i) if heads > 1 else weight
            rows = block.T.columns(first, first + out).T
            columns = operand.columns(i * into, (i + 1) * into)
            self.multiply(d.columns(i * out, (i + 1) * out), columns, rows, False)

    def add_rows(self, d: View, vector: View, first: bool) -> None:
        total = vector._replace(shape=(1, *vector.shape), strides=(1, 1))
        self.tables.multiply(self.tables.after, self.d, d, d, total, not first, True, kind=SUM)

    def columns(self, d: View, begin: int, end: int) -> View:
        return d.columns(begin, end)


def _turned(weight: View) -> bool:
    """Whether a matrix is stored by columns, as in Keras; one row is stored either way."""
    return (
        len(weight.shape) == 2
        and weight.shape[0] > 1
        and weight.strides[0] == 1 != weight.strides[1]
    )


class _Direction:
    """One direction: its gradients, and a chunk's buffers for the factors of their products.

    Attributes:
        gates: the gradients of the projected gates, ``[rows, G*H]``.
        factors: of each matmul; None for what another array holds.
    """

    def __init__(self, tables: PassTables, d: int, dx: View | None, need: bool) -> None:
        plan, self.w, cell = tables.plan, tables.directions[d], tables.plan.cell
        self.tables, self.d, self.need, self.dx = tables, d, need, dx
        self.sums = _NativeGradients(tables, d, need)
        if tables.projects:
            self.gates = tables.rows(plan.gates_width)
            tables.place_rows(d, "d_gates", self.gates)
        else:
            assert dx is not None
            self.gates = tables.over_steps(dx)
            tables.place_of(d, {"d_gates": dx})
        self.factors: list[Factors] = []
        for l in cell.linears:
            outputs = operand = None
            if not plan.shares_gradient(l):
                outputs = tables.rows(len(l.outputs) * plan.sizes[l.out_size])
                tables.place_rows(d, f"d_outputs {l.name}", outputs)
            state = l.operand.op == "state" and l.operand.attrs[0] == cell.state_names[0]
            if tables.resets is not None or not state:
                operand = tables.rows(plan.sizes[l.in_size])
                tables.place_rows(d, f"operand {l.name}", operand)
            self.factors.append(Factors(outputs, operand))

    def multiply(self, hidden: View) -> None:
        """Has the driver multiply after each chunk.

        Args:
            hidden: the first states of all directions, see ``Kept``.
        """
        tables, plan = self.tables, self.tables.plan
        if self.need:
            # What lies under a mask may be NaN, and NaN times a zero gradient is NaN.
            x = tables.lay_out_x(tables.after, self.d, masked=True) if tables.projects else None
            first = plan.sizes[plan.cell.states[0].size]
            columns = hidden.columns(self.d * first, (self.d + 1) * first)
            slot = 2 * tables.options.reverse[self.d]
            before = tables.over_steps(columns, window=True, first=slot)
            self.sums.add(self.gates, x, before, self.factors, first=True)
        if tables.projects and self.dx is not None:
            both, into = len(tables.directions) > 1, tables.over_steps(self.dx)
            weight = self.w["weight_ih"]
            tables.multiply(
                tables.after, self.d, self.gates, weight, into, add=both, sums=both,
                kind=tables.by_weight(weight),
            )  # fmt: skip

    def add_product(self, d_state: View) -> None:
        """Adds to the first state's gradient what comes through the recurrent matmul of a single
        step, which the kernel leaves out.
        """
        tables, (outputs, _) = self.tables, self.factors[0]
        d = self.gates if outputs is None else outputs
        weight, kind = self.w["weight_hh"], tables.by_weight(self.w["weight_hh"])
        tables.multiply(tables.after, self.d, d, weight, d_state, add=True, kind=kind)


def _states(tables: PassTables) -> tuple[View, DriverPass]:
    """The first states of all directions along the steps of a segment, either kept or computed
    again before each segment; and the pass.
    """
    views, names, plan = tables.draft.views, tables.plan.cell.state_names, tables.plan
    sequences = [
        [views.get(f"sequence {d} {name}") for name in names] for d in range(len(tables.directions))
    ]
    kept = Kept(views["hidden"], sequences, [views[f"saved {d}"] for d in range(len(sequences))])
    if tables.segment == tables.steps:
        tables.place_kept(kept)
        return views["hidden"], DriverPass(tables)
    again, moves = PassTables(tables.draft, plan, tables.options, False, False), list[Row]()
    memory = allocate_states(again, tables.segment, True, True)
    tables.place_kept(memory)
    project(again)
    first = plan.sizes[plan.cell.states[0].size]
    for d, borders in enumerate(sequences):
        columns = kept.hidden.columns(d * first, (d + 1) * first)
        for name, border in zip(names, [columns, *borders[1:]], strict=True):
            assert border is not None
            again.place_of(d, {f"state {name}": border.at(0)})
            moves += again.moving(d, f"state {name}", border)
    return memory.hidden, DriverPass(tables, segment=tables.segment, moves=moves, recompute=again)


def keeps_state(plan: Plan, i: int) -> bool:
    """Whether the forward pass keeps the sequence of state i > 0, without checkpoints."""
    return plan.cell.states[i].name in plan.states
