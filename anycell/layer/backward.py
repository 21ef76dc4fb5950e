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
from anycell.layer.pass_tables import PassTables, finish
from anycell.layer.recipe import Draft, Recipe, View, recipe_of
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
    known, given = drafted_backward(
        host, plan, arrays, options, kept, d_output, d_final, d_states or {}, wanted
    )
    recipe = known.recipe
    made = recipe.run(list(map(given.__getitem__, recipe.names)), options)
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
    given, layout = contract.fit(host, plan, arrays, options, read)
    segment = _segment(plan, given, options)
    parts, further = contract.fit_gradients(
        host, plan, given["x"].shape, options.reverse, kept, d_output, d_final, d_states,
        segment=segment, keeps=keeps_state,
    )  # fmt: skip
    wants = Wanted(True, True, True)
    if wanted is not None:
        learned_too = any(map(of_a_matmul, wanted))
        wants = Wanted(learned_too, "x" in wanted, _of_first(plan) in wanted)
    same = options.unseeded() if options.seed or options.stream else options
    key = "backward", plan, same, wants, layout, further
    if plan.types.mixed:
        given = widened(host, plan, given)
        parts |= {name: host.widen(d) for name, d in parts.items() if name.startswith("d_final ")}
    given |= parts
    return recipe_of(key, lambda: _draft(host, plan, options, wants, given)), given


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
    given: Mapping[str, Array],
) -> Backward:
    """Drafts the pass for arrays that are laid out like these."""
    run = PassTables(Draft(host, given, options), plan, options, True, False)
    draft, views, count = run.draft, run.draft.views, len(run.directions)
    dx = None
    if wants.x or not run.projects:
        # Two directions add to it.
        how = "zeros" if run.projects and count > 1 else "empty"
        dx = draft.new(run.x.shape, how, wide=run.projects)
    for name, view in views.items():
        if name == "d_output" or name.startswith("d_sequence "):
            run.place(name, view)
    states_, totals = _totals(run)
    directions = [_Direction(run, d, dx, wants.weights) for d in range(count)]
    hidden = _states(run)
    for direction in directions:
        direction.multiply(hidden)
        if run.single and wants.first_state:
            direction.add_product(states_[_of_first(plan)].at(direction.d))
    recipe = finish(draft, [run])
    recipe.again = partial(_draft, host, plan, options, wants)

    def numbers(views: Mapping[str, View]) -> dict[str, int]:
        return {name: recipe.number(view) for name, view in views.items()}

    whole = {} if dx is None else {"x": dx}
    whole |= {name: state for name, state in states_.items() if name in run.directions[0]}
    turned = []
    for one in directions:
        weights = {name + ENDS[one.d]: total for name, total in one.sums.totals.items()}
        whole |= weights
        turned += [name for name, total in weights.items() if _turned(total)]
    sums = [
        SumsOfDirection(one.sums.named, numbers(one.sums.vectors), numbers(others))
        for one, others in zip(directions, totals, strict=True)
    ]
    return Backward(recipe, run.directions, numbers(whole), sums, turned)


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


def _segment(plan: Plan, given: Mapping[str, Array], options: Options) -> int:
    """The number of steps whose values the pass needs at once, as ``PassTables.segment``."""
    steps, batch, _ = given["x"].shape
    if options.checkpoint is None:
        return int(steps)
    projects = "weight_ih" in given
    chunk = chunk_of(plan, steps, batch * len(options.reverse)) if projects else max(1, steps)
    return segment_steps(options.checkpoint, steps, chunk)


def _totals(run: PassTables) -> tuple[dict[str, View], list[dict[str, View]]]:
    """Makes memory for the gradients that the kernel itself adds up. The first call of the door
    sets them to 0, or to the gradients of the final states.

    Returns:
        the gradients of states, and all others per direction.
    """
    draft, plan, batch, count = run.draft, run.plan, run.batch, len(run.directions)
    cell = plan.cell
    of_states, whole, others = {}, {}, {}
    for name, size in states(plan):
        shape = count, batch, size
        of_states[f"state {name}"] = whole[f"d_state {name}"] = draft.new(shape, wide=True)
        if f"d_final {name}" in draft.views:
            whole[f"d_final {name}"] = draft.views[f"d_final {name}"]
        if run.resets is not None:
            reset = draft.new(shape, wide=True)
            others[f"reset_state {name}"] = whole[f"d_reset {name}"] = reset
    run.place_parts(whole)
    totals = []
    for d in range(count):
        named = dict(others)
        if cell.params:
            groups = -(-batch // row_group(batch))
            named["d_params"] = draft.new((groups, sum(plan.param_sizes)), wide=True)
            run.place_of(d, {"d_params": named["d_params"]})
        if "static" in run.directions[d]:
            named["static"] = draft.new((batch, plan.static_width), wide=True)
            run.place_of(d, {"d_static": named["static"]})
        totals.append(named)
    return of_states, totals


class _NativeGradients(WeightGradients):
    """Gradients of weights and biases that the driver adds up, chunk by chunk."""

    def __init__(self, run: PassTables, d: int, need: bool) -> None:
        self.run, self.d = run, d
        super().__init__(run.plan, run.directions[d], need, run.steps > 0)

    def new(self, shape: tuple[int, ...], overwritten: bool) -> View:
        return self.run.draft.new(shape, "empty" if overwritten else "zeros", wide=True)

    def like(self, weight: View, overwritten: bool) -> View:
        if _turned(weight):
            return self.new(weight.shape[::-1], overwritten).T
        return self.new(weight.shape, overwritten)

    def multiply(self, d: View, operand: View, weight: View, whole: bool) -> None:
        a, b, out = (operand, d, weight.T) if _turned(weight) else (d, operand, weight)
        self.run.multiply(self.run.after, self.d, a.T, b, out, not whole, True)

    def add_blocks(self, d: View, operand: View, weight: View, heads: int, first: int) -> None:
        out, into = d.shape[1] // heads, operand.shape[1] // heads
        for i in range(heads):
            block = weight.at(i) if heads > 1 else weight
            rows = block.T.columns(first, first + out).T
            columns = operand.columns(i * into, (i + 1) * into)
            self.multiply(d.columns(i * out, (i + 1) * out), columns, rows, False)

    def add_rows(self, d: View, vector: View) -> None:
        total = vector._replace(shape=(1, *vector.shape), strides=(1, 1))
        self.run.multiply(self.run.after, self.d, d, d, total, False, True, kind=SUM)

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
        pairs: for each matmul the gradients of its outputs and what it multiplied; None for either
            that another array holds.
    """

    def __init__(self, run: PassTables, d: int, dx: View | None, need: bool) -> None:
        plan, self.w, cell = run.plan, run.directions[d], run.plan.cell
        self.run, self.d, self.need, self.dx = run, d, need, dx
        self.sums = _NativeGradients(run, d, need)
        if run.projects:
            self.gates = run.rows(plan.gates_width)
            run.place_rows(d, "d_gates", self.gates)
        else:
            assert dx is not None
            self.gates = run.over_steps(dx)
            run.place_of(d, {"d_gates": dx})
        self.pairs: list[tuple[View | None, View | None]] = []
        for l in cell.linears:
            outputs = operand = None
            if not plan.shares_gradient(l):
                outputs = run.rows(len(l.outputs) * plan.sizes[l.out_size])
                run.place_rows(d, f"d_outputs {l.name}", outputs)
            state = l.operand.op == "state" and l.operand.attrs[0] == cell.state_names[0]
            if run.resets is not None or not state:
                operand = run.rows(plan.sizes[l.in_size])
                run.place_rows(d, f"operand {l.name}", operand)
            self.pairs.append((outputs, operand))

    def multiply(self, hidden: View) -> None:
        """Has the driver multiply after each chunk.

        Args:
            hidden: the first states of all directions, see ``Kept``.
        """
        run, plan = self.run, self.run.plan
        if self.need:
            # What lies under a mask may be NaN, and NaN times a zero gradient is NaN.
            x = run.lay_out_x(run.after, self.d, masked=True) if run.projects else None
            first = plan.sizes[plan.cell.states[0].size]
            columns = hidden.columns(self.d * first, (self.d + 1) * first)
            before = run.over_steps(columns, window=True, first=2 * run.options.reverse[self.d])
            self.sums.add(self.gates, x, before, [Factors(*pair) for pair in self.pairs])
        if run.projects and self.dx is not None:
            both, into = len(run.directions) > 1, run.over_steps(self.dx)
            weight = self.w["weight_ih"]
            run.multiply(
                run.after, self.d, self.gates, weight, into, add=both, sums=both,
                kind=run.by_weight(weight),
            )  # fmt: skip

    def add_product(self, d_state: View) -> None:
        """Adds to the first state's gradient what comes through the recurrent matmul of a single
        step, which the kernel leaves out.
        """
        run, (outputs, _) = self.run, self.pairs[0]
        d = self.gates if outputs is None else outputs
        weight, kind = self.w["weight_hh"], run.by_weight(self.w["weight_hh"])
        run.multiply(run.after, self.d, d, weight, d_state, add=True, kind=kind)


def _states(run: PassTables) -> View:
    """The first states of all directions along the steps of a segment, either kept or computed
    again before each segment.
    """
    views, names, plan = run.draft.views, run.plan.cell.state_names, run.plan
    sequences = [
        [views.get(f"sequence {d} {name}") for name in names] for d in range(len(run.directions))
    ]
    kept = Kept(views["hidden"], sequences, [views[f"saved {d}"] for d in range(len(sequences))])
    if run.segment == run.steps:
        run.place_kept(kept)
        return views["hidden"]
    run.segment_length = run.segment
    run.recompute = again = PassTables(run.draft, plan, run.options, False, False)
    memory = allocate_states(again, run.segment, True, True)
    run.place_kept(memory)
    project(again)
    first = plan.sizes[plan.cell.states[0].size]
    for d, borders in enumerate(sequences):
        columns = kept.hidden.columns(d * first, (d + 1) * first)
        for name, border in zip(names, [columns, *borders[1:]], strict=True):
            assert border is not None
            again.place_of(d, {f"state {name}": border.at(0)})
            run.moves += again.moving(d, f"state {name}", border)
    hidden: View = memory.hidden
    return hidden


def keeps_state(plan: Plan, i: int) -> bool:
    """Whether the forward pass keeps the sequence of state i > 0, without checkpoints."""
    return plan.cell.states[i].name in plan.states
