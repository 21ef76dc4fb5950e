"""The backward pass of a layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from anycell.engines.cpu.driver import FEW, SUM
from anycell.layer import contract
from anycell.layer.arguments import Array, Factors, Host, Kept
from anycell.layer.forward import project, remember
from anycell.layer.matrix import Matrix
from anycell.layer.run import Rows, Run, keeps_state
from anycell.layer.signature import of_a_matmul
from anycell.layer.sums import Sums, Totals, leaving
from anycell.plan import Options, Plan


def backward(
    host: Host,
    plan: Plan,
    arrays: Mapping[str, Array],
    options: Options,
    kept: Kept,
    d_output: Array | None,
    d_final: Sequence[Array | None],
    *,
    d_states: Mapping[str, Array] | None = None,
    wanted: Collection[str] | None = None,
    factors: list[list[Factors]] | None = None,
) -> dict[str, Array]:
    """The gradients of a layer.

    Args:
        host, plan, arrays, options: as given to ``forward``.
        kept: from ``forward``; may be used again.
        d_output: gradient of the outputs ``[T, B, D*size]``, or None.
        d_final: gradients of the final states ``[D, B, size]``, None where there is none.
        d_states: gradients of the sequences ``[T, B, D*size]`` of states besides the first, by
            name.
        wanted: names of the arrays whose gradients are wanted; None for all. There may be more.
        factors: gets per direction, for each matmul inside a step, what its weight's gradient is
            the product of, for hosts that multiply themselves. Without checkpoints, and where the
            input comes projected: then they are of all steps.

    Returns:
        the gradients, by the names of the arrays: of all that were given but masks. That of x is
        of the projected gates where there is no ``weight_ih``.

    Raises:
        ValueError, TypeError: for an array that breaks the ``contract``.
    """
    read = options.checkpoint is not None  # by the forward pass, once more
    given = contract.entering(host, plan, arrays, options, read=read)
    run = Run(host, plan, given, options, backward=True)
    kept, d_output, d_final, d_states = contract.arriving(
        host, plan, given.x.shape, options.reverse, kept, d_output, d_final, d_states or {},
        segment=run.segment, keeps=keeps_state,
    )  # fmt: skip
    count, dx, into = len(run.directions), None, host if not given.projects else host.wide
    if wanted is None or "x" in wanted or not given.projects:
        # Two directions add to it.
        dx = (into.zeros if given.projects and count > 1 else into.empty)(tuple(given.x.shape))
    need = factors is None and (wanted is None or any(map(of_a_matmul, wanted)))
    if d_output is not None:
        run.place("d_output", d_output, axes=2)
    for name, arriving in d_states.items():
        run.place(f"d_sequence {name}", arriving, axes=2)
    totals = Totals(run, [None if d is None else host.widen(d) for d in d_final])
    directions = [_Direction(run, d, dx, need, dense=factors is not None) for d in range(count)]
    if factors is not None:
        factors += [direction.factors() for direction in directions]
    hidden = _states(run, kept)
    for direction in directions:
        direction.multiply(hidden)
        if run.form.few and (wanted is None or of_first(plan) in wanted):
            direction.add_product(totals.states[0][direction.d])
    run.call()
    learned = [one.sums.finish() | totals.result(d) for d, one in enumerate(directions)]
    gradients = leaving(host.wide.empty, given, dx, learned, totals.of_states())
    return {name: host.narrow(gradient) for name, gradient in gradients.items()}


def of_first(plan: Plan) -> str:
    """The name of the first state's array."""
    return f"state {plan.cell.state_names[0]}"


class _Sums(Sums):
    """Gradients of weights and biases that the driver adds up, chunk by chunk."""

    def __init__(self, run: Run, d: int, need: bool) -> None:
        self.run, self.d, self.host = run, d, run.host
        super().__init__(run.plan, run.given.directions[d], need, run.steps > 0)

    def new(self, shape: tuple[int, ...], overwritten: bool) -> Array:
        return (self.host.wide.empty if overwritten else self.host.wide.zeros)(shape)

    def multiply(self, d: Matrix, operand: Matrix, weight: Array, whole: bool) -> None:
        total = Matrix.of(self.host.wide, weight)
        self.run.multiply(self.run.after, self.d, d.T, operand, total, not whole, True)

    def add_blocks(self, d: Matrix, operand: Matrix, blocks: Array) -> None:
        heads, out, into = blocks.shape
        for i in range(heads):
            columns = operand.columns(i * into, (i + 1) * into)
            self.multiply(d.columns(i * out, (i + 1) * out), columns, blocks[i], False)

    def add_rows(self, d: Matrix, vector: Array) -> None:
        total = Matrix.of(self.host.wide, vector.reshape(1, -1))
        self.run.multiply(self.run.after, self.d, d, d, total, False, True, kind=SUM)

    def columns(self, d: Matrix, begin: int, end: int) -> Matrix:
        return d.columns(begin, end)


class _Direction:
    """One direction: its gradients, and buffers of a chunk for what they are products of.

    Attributes:
        gates: the gradients of the projected gates, where x is not projected already.
        pairs: for each matmul the gradients of its outputs and what it multiplied, where they are
            not at hand.
    """

    def __init__(self, run: Run, d: int, dx: Array | None, need: bool, dense: bool) -> None:
        host, plan, self.w = run.host, run.plan, run.directions[d]
        cell, rows = plan.cell, run.form.chunk * run.batch
        self.run, self.d, self.need, self.dx = run, d, need, dx
        resets = run.given.resets is not None
        self.sums = _Sums(run, d, need)
        self.kind = FEW if run.form.few else None  # of products by a weight
        self.gates: Rows | None = None
        if run.given.projects:
            self.gates = Rows(host, rows, len(cell.gates) * plan.hidden_size)
            run.place_rows(d, "d_gates", self.gates)
        else:
            run.place_steps(d, "d_gates", dx, *host.strides(dx)[:2])
        self.pairs: list[tuple[Rows | None, Rows | None]] = []
        for l in cell.linears:
            outputs = operand = None
            if not plan.shares_gradient(l):
                outputs = Rows(host, rows, len(l.outputs) * plan.sizes[l.out_size], dense)
                run.place_rows(d, f"d_outputs {l.name}", outputs)
            state = l.operand.op == "state" and l.operand.attrs[0] == cell.state_names[0]
            if resets or not state:
                operand = Rows(host, rows, plan.sizes[l.in_size], dense)
                run.place_rows(d, f"operand {l.name}", operand)
            self.pairs.append((outputs, operand))

    def factors(self) -> list[Factors]:
        """The factors of the weights' gradients, for hosts that multiply themselves."""
        rows = self.run.steps * self.run.batch
        return [Factors(*[one and one[rows] for one in pair]) for pair in self.pairs]

    def dgates(self) -> Matrix:
        """Gradients of the projected gates, ``[rows, G*H]``."""
        run = self.run
        return run.over_steps(self.dx) if self.gates is None else run.rows(self.gates)

    def multiply(self, hidden: Array) -> None:
        """Has the driver multiply after each chunk.

        Args:
            hidden: the first states of all directions, see ``Kept``.
        """
        run, plan, given = self.run, self.run.plan, self.run.given
        dg = self.dgates()
        if self.need:
            x: Matrix | None = None
            if given.projects:
                # What lies under a mask may be NaN, and NaN times a zero gradient is NaN.
                x = run.entering(run.after, self.d, given.mask)
            first = plan.sizes[plan.cell.states[0].size]
            before = run.over_steps(hidden, window=True, first=2 * run.options.reverse[self.d])
            factors = [Factors(*[one and run.rows(one) for one in pair]) for pair in self.pairs]
            columns = before.columns(self.d * first, (self.d + 1) * first)
            self.sums.add(dg, x, columns, factors)
        if given.projects and self.dx is not None:
            both = len(run.directions) > 1
            weight, into = Matrix.of(run.host, self.w["weight_ih"]), run.over_steps(self.dx)
            run.multiply(run.after, self.d, dg, weight, into, add=both, sums=both, kind=self.kind)

    def add_product(self, d_state: Array) -> None:
        """Adds the part of the recurrent matmul of a single step, which the kernel leaves out, to
        the first state's gradient.
        """
        run, (outputs, _) = self.run, self.pairs[0]
        d = self.dgates() if outputs is None else run.rows(outputs)
        weight, into = Matrix.of(run.host, self.w["weight_hh"]), Matrix.of(run.host.wide, d_state)
        run.multiply(run.after, self.d, d, weight, into, add=True, kind=self.kind)


def _states(run: Run, kept: Kept) -> Array:
    """The first states of all directions, along the steps of a segment: kept, or computed once more
    before each.
    """
    if run.segment == run.steps:
        run.place_kept(kept)
        return kept.hidden
    run.segment_length = run.segment
    run.again = again = Run(run.host, run.plan, run.given, run.options, backward=False)
    memory = remember(again, run.segment, True, True)
    run.place_kept(memory)
    project(again)
    first = run.plan.sizes[run.plan.cell.states[0].size]
    for d, sequences in enumerate(kept.states):
        columns = kept.hidden[:, :, d * first : (d + 1) * first]
        borders = [columns, *[sequence for sequence in sequences if sequence is not None]]
        for name, border in zip(run.plan.cell.state_names, borders, strict=True):
            again.place_of(d, {f"state {name}": border[0]})
            run.moves += again.moving(d, f"state {name}", border)
    run.moved = again.moved
    return memory.hidden
