"""Row reductions of tier 2: what programs exchange, in which rounds, and the results."""

import builtins

import numpy as np
import pytest

# Before anything else that may import Triton.
from gpu import assert_launches_count_on, by_gpu
from problems import assert_right, error, random_problem

from anycell import (
    Cell,
    cell,
    cells,
    layer_norm,
    max,
    mean,
    sigmoid,
    softmax,
    sqrt,
    sum,
    tanh,
    where,
)
from anycell.engines.gpu import capacity
from anycell.engines.gpu.cooperative import Slice, print_cooperative, refusal
from anycell.engines.gpu.interpreter import Turns
from anycell.engines.gpu.rounds import COMPANION, companion, rounds_of
from anycell.engines.gpu.text import Variant
from anycell.lang.expr import topological
from anycell.plan import plan

HARD = {"masked": True, "resets": True}


@cell(gates="i g", state="h c")
def Attending(x, r, s):
    """A softmax over the units, and their maximum."""
    i, g = x + r
    c = 0.5 * s.c + softmax(i) * tanh(g)
    return tanh(c * max(g)), c


@cell(gates="i g", state="h")
def Nested(x, r, s):
    """Reductions of reductions, linear in them and not."""
    i, g = x + r
    a = g - mean(sigmoid(i) * g)
    b = layer_norm(a + mean(tanh(a)) * g * g)
    return tanh(0.5 * s.h * sigmoid(i) + 0.3 * b * mean(b * a))


@cell(gates="g", state="h", params="p")
def Linear(x, r, s, p):
    """Sums of a state, and of what each sum that is known multiplies or shifts."""
    g = x.g + r.g
    n = mean(g * p.p)
    return tanh(g - mean(0.5 * g / (1.0 + n * n) - p.p * n - n) + sum(s.h * s.h) / 50.0)


@cell(gates="g", state="h")
def Shifted(x, r, s):
    """Squares of distances from a number other than the mean."""
    g = x.g + r.g
    centre = 0.5 * mean(g) + 0.1
    return tanh((g - centre) / sqrt(1.0 + sum((g - centre) ** 2) / 20.0) + mean(1.0 + 0.0 * s.h))


@cell(gates="g", state="h")
def Grouped(x, r, s):
    """A norm of groups of units."""
    return tanh(layer_norm(x.g + r.g, groups=2))


@cell(gates="g", state="h", params="there")
def Partial(x, r, s, p):
    """A softmax of which some units have no part."""
    return tanh(9.0 * softmax(where(p.there > 0.0, x.g + r.g, float("-inf"))) + s.h)


USERS = [Attending, Nested, Linear, Shifted]
NORMS = [cells.LayerNormLSTM, cells.LayerNormLSTM(form="ba"), cells.LayerNormGRU]


def counts(one: Cell, dtype: str = "float32", backward: bool = False) -> list[int]:
    """How many numbers the programs exchange in each round."""
    chosen = plan(one, 18, dtype, "gpu")
    return [*map(len, rounds_of(chosen, Variant.training(one, backward)).rounds)]


# -- what is exchanged -----------------------------------------------------------------------------
def test_a_layer_norm_is_one_round() -> None:
    """Forward a sum and the squares of each norm; backward two sums."""
    assert counts(cells.LayerNormLSTM) == [16, 2]
    assert counts(cells.LayerNormLSTM, backward=True) == [6, 12]
    assert counts(cells.LayerNormGRU) == [12]
    assert counts(cells.LayerNormGRU, backward=True) == [12]
    assert counts(cells.LSTM) == counts(cells.LSTM, backward=True) == []
    # In 16 bits the backward pass computes reductions again.
    assert counts(cells.LayerNormLSTM, "bfloat16", backward=True) == [1, 6, 12]


def test_rounds_of_users_cells() -> None:
    assert counts(Attending) == [3]  # a softmax: the maximum and the powers; another maximum
    assert counts(Attending, backward=True) == [2, 2]
    # The sum of squares of h, that of n, and those of the two terms that n divides or multiplies.
    assert counts(Linear) == [4]
    # The squares and the sum, and the sum of zeros.
    assert counts(Shifted) == [3]
    # The first mean; that of the tanh; the sum and the squares of the norm; the last mean.
    assert counts(Nested) == [1, 1, 2, 1]


def test_numbers_need_only_earlier_rounds() -> None:
    for one in (*USERS, *NORMS):
        for backward in (False, True):
            rounds = rounds_of(plan(one, 18, "float16", "gpu"), Variant.training(one, backward))
            for k, numbers in enumerate(rounds.rounds):
                inside = topological([n.args[0] for n in numbers], rounds.leaf)
                needed = [rounds.levels[n] for n in inside if n in rounds.results]
                assert builtins.max(needed, default=0) <= k
                assert all(companion(n) in numbers for n in numbers if n.op in COMPANION)


def test_groups_are_refused() -> None:
    assert refusal(plan(Grouped, 18, "float32", "gpu")) == "a row reduction of groups of units"
    assert refusal(plan(cells.LayerNormGRU, 18, "float32", "gpu")) is None
    with pytest.raises(
        ValueError, match="tier=2 cannot run cell Grouped: a row reduction of groups"
    ):
        capacity.choose(plan(Grouped, 18, "float32", "gpu"), None, tier=2)


def test_memory_of_the_parts() -> None:
    """Two buffers of a tile for each number, whose rows hold as many programs as a tile units."""

    def parts(one: Cell, units: int) -> int:
        part = Slice(16, 16, 32, 1, 2, 1)
        chosen = plan(one, units, "float32", "gpu")
        return print_cooperative(chosen, Variant.training(one, False), part).parts

    assert parts(cells.LSTM, 33) == 0
    assert parts(cells.LayerNormGRU, 33) == 2 * 12 * 16 * 16
    assert parts(cells.LayerNormGRU, 16 * 17) == 2 * 12 * 16 * 32


def test_the_model_counts_numbers_of_rows() -> None:
    part = Slice(16, 16, 128, 4, 4, 4)
    norm, plain = (plan(one, 512, "bfloat16", "gpu") for one in (cells.LayerNormGRU, cells.GRU))
    for backward in (False, True):
        tiles = 2 * capacity.tiles(norm, backward)
        assert capacity.slice_numbers(norm, part, backward) >= tiles + 12
        assert capacity.cycles(norm, part, 32, backward) > capacity.cycles(
            plain, part, 32, backward
        )
    h100 = next(d for d in capacity.DEVICES if d.name == "H100")
    for one, warps in ((cells.GRU, {8, 16}), (cells.LayerNormGRU, {8})):
        chosen = capacity.choices(plan(one, 256, "float32", "gpu"), h100, True)
        assert {c.part.warps for c in chosen if c.part} == warps


# -- results ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("one", "how"),
    [(one, how) for how in (HARD, {"reverse": True}) for one in (*NORMS[::-1], *USERS)],
    ids=str,
)
@pytest.mark.sample(1)
def test_results(one: Cell, how: dict[str, bool], rng: np.random.Generator) -> None:
    """Two groups of two programs, the last of which has two units."""
    problem = random_problem(one, (2, 17, 18), rng, "float32", nearby=6, **how)
    assert_right(by_gpu(problem, tier=2), problem)


@pytest.mark.parametrize("one", [*USERS, *NORMS[:1]], ids=str)
@pytest.mark.sample(1)
def test_chunks_of_time(one: Cell, rng: np.random.Generator) -> None:
    assert_launches_count_on(one, rng)


@pytest.mark.parametrize("one", [*NORMS, Attending], ids=str)
@pytest.mark.slow
def test_sixteen_bits(one: Cell, rng: np.random.Generator) -> None:
    """Tier 2 agrees with tier 1, whose programs have whole rows."""
    problem = random_problem(one, (3, 17, 33), rng, "float16", nearby=6, **HARD).astype("float32")
    whole, shared = (by_gpu(problem, "float16", tier) for tier in (1, 2))
    for name, value in shared.items():
        worst = error(whole[name], problem.right[name], ())
        assert error(value, problem.right[name], ()) <= 1.5 * worst + 1e-4, name


@pytest.mark.slow
def test_a_norm_of_large_numbers(rng: np.random.Generator) -> None:
    """Squares are of distances from means: sums of squares would lose all digits."""

    @cell(gates="g", state="h")
    def Far(x, r, s):
        return layer_norm(x.g + r.g)

    problem = random_problem(Far, (1, 3, 33), rng, "float32")
    problem["x"][:] += 1000.0
    whole, shared = (by_gpu(problem, tier=n)["output"] for n in (1, 2))
    assert error(shared, whole, ()) < 1e-3


@pytest.mark.slow
def test_programs_without_a_part_of_a_softmax(rng: np.random.Generator) -> None:
    problem = random_problem(Partial, (2, 3, 33), rng, "float32")
    problem["there_l0"][:] = np.arange(33) % 16 > 3
    problem["there_l0"][16:32] = 0.0  # all units of a program
    right, shared = (by_gpu(problem, tier=n)["output"] for n in (1, 2))
    assert np.isfinite(shared).all() and error(shared, right, ()) < 1e-6


# -- programs by turns -----------------------------------------------------------------------------
class Builder:
    """The interpreter's builder, as far as turns use it."""

    place: tuple[int, int, int]

    def set_grid_idx(self, *place: int) -> None:
        self.place = place

    def set_grid_dim(self, *shape: int) -> None:
        self.shape = shape


def test_programs_run_by_turns() -> None:
    """Until their barriers; NumPy's treatment of errors is that of the caller."""
    builder, seen = Builder(), list[tuple[int, int]]()

    def program() -> None:
        for part in range(2):
            seen.append((builder.place[1], part))
            with np.errstate():
                assert np.geterr()["divide"] == "call"
            builder.create_barrier()  # type: ignore[attr-defined]

    with np.errstate(divide="call"):
        Turns(program, (1, 3), builder).run()
    assert builder.shape == (1, 3, 1)
    assert seen == [(n, part) for part in range(2) for n in range(3)]
    assert not hasattr(builder, "create_barrier")


def test_an_error_of_a_program_ends_the_others() -> None:
    builder, seen = Builder(), list[int]()

    def program() -> None:
        if builder.place[0] == 1:
            raise ValueError("no")
        while True:
            seen.append(builder.place[0])
            builder.create_barrier()  # type: ignore[attr-defined]

    with pytest.raises(ValueError, match="no"):
        Turns(program, (3, 1), builder).run()
    assert seen == [0]
