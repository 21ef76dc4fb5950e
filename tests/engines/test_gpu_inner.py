"""Inner matmuls of tier 2, which multiply what programs compute in the same step: the vectors that
programs exchange, the results, and what the model counts.
"""

import re
from dataclasses import replace

import numpy as np
import problems
import pytest

# Before anything else that may import Triton.
from gpu import CARDS, assert_launches_count_on, by_gpu
from problems import assert_right, random_problem

from anycell import Cell, cell, cells, layer_norm, linear, mean, sigmoid, tanh
from anycell.engines.gpu import capacity
from anycell.engines.gpu.cooperative import Slice, print_cooperative, programs_of, refusal
from anycell.engines.gpu.rounds import rounds_of
from anycell.engines.gpu.text import Variant
from anycell.lang.transform import low_rank, with_recurrent_mask
from anycell.plan import Plan, plan
from tests.engines.test_engines import Detached, LowRank, Small
from tests.engines.test_gpu import assert_sixteen

HARD = {"masked": True, "resets": True}


@cell(gates="g", state="h c")
def OfCell(x, r, s):
    """A matmul of a state that is not the first."""
    c = 0.5 * s.c + 0.5 * tanh(x.g + r.g + linear(s.c, "memory"))
    return tanh(c + linear(c, "out", heads=2)), c


@cell(gates="g f", state="h")
def Normed(x, r, s):
    """Row reductions before, after and beside an inner matmul."""
    n = layer_norm(x.g + r.g)
    v = linear(tanh(n), "first", gates="a b")
    w = linear(tanh(n) * sigmoid(x.f), "second", bias=True)
    return tanh(layer_norm(v.a + w) + mean(v.b * r.f) + 0.3 * s.h)


@cell(gates="g", state="h")
def Deep(x, r, s):
    """Three matmuls, one after the other, of which the first two multiply one vector."""
    a = tanh(x.g + r.g)
    b = tanh(linear(a, "one") * linear(a, "two", bias=True))
    return 0.5 * s.h + 0.5 * tanh(a + linear(b, "three"))


@cell(gates="g", state="h:P c")
def NormOfStates(x, r, s):
    """A row reduction of a size other than H."""
    return layer_norm(linear(tanh(x.g + r.g), "out")), s.c


USERS = [OfCell, Normed, Deep, LowRank, Small, Detached, low_rank(cells.GRU)]
BUILT_IN = [
    cells.MultiplicativeLSTM,
    cells.GRU(reset_after=False),
    cells.LSTMP,
    cells.GRUD,
    cells.MGU,
    cells.VariationalLSTM,
]


def of(one: Cell, hidden: int, dtype: str = "bfloat16") -> Plan:
    return plan(one, hidden, dtype, "gpu", {"P": hidden // 2, "rank": hidden // 4})


def matmuls(one: Cell, backward: bool = False) -> dict[str, int]:
    """The round of each inner matmul."""
    return rounds_of(of(one, 18), Variant.training(one, backward)).matmuls


def text(one: Cell, backward: bool) -> str:
    part = Slice(16, 16, 128, 2, 4, 1)
    return print_cooperative(of(one, 264), Variant.training(one, backward), part).source


# -- what is exchanged -----------------------------------------------------------------------------
def test_an_inner_matmul_is_a_round() -> None:
    """Backward, of the gradients of its outputs, unless the gradient goes to a state alone."""
    assert matmuls(cells.LSTM) == matmuls(cells.LSTM, True) == {}
    assert matmuls(cells.MultiplicativeLSTM) == {"hm": 0}
    assert matmuls(cells.MultiplicativeLSTM, True) == {"hm": 0}
    assert matmuls(Deep) == {"one": 0, "two": 0, "three": 1}
    assert matmuls(Deep, True) == {"three": 0, "one": 1, "two": 1}
    assert matmuls(OfCell) == {"memory": 0, "out": 1}
    assert matmuls(OfCell, True) == {"out": 0}  # what "memory" owes comes with the next step
    assert matmuls(Detached, True) == {"alive": 0}
    # Sums, then vectors, then sums.
    rounds = rounds_of(of(Normed, 18), Variant.training(Normed, False))
    assert rounds.matmuls == {"first": 1, "second": 1}
    assert [len(numbers) for numbers in rounds.rounds] == [2, 0, 3]


def test_a_step_waits_only_for_what_it_multiplies() -> None:
    """A vector is sent once; where no matmul multiplies h, nobody waits for h."""
    waits = {
        cells.LSTM: (1, 1),
        cells.VariationalLSTM: (1, 1),
        cells.MultiplicativeLSTM: (2, 2),
        cells.GRUD: (2, 2),
        Deep: (3, 3),
        OfCell: (3, 2),
    }
    for one, counts in waits.items():
        for backward in (False, True):
            printed = text(one, backward)
            assert printed.count("alive = wait(") == counts[backward], one
            assert printed.count("publish(flags") == counts[backward], one
            assert ("range(count + 1)" in printed) is (backward and one in (
                cells.LSTM, cells.MultiplicativeLSTM, Deep, OfCell,
            )), one  # fmt: skip
    # Loaded once for both matmuls.
    assert len(re.findall(r"vector0_0 = tl\.load", text(Deep, False))) == 1


def test_memory_of_the_vectors() -> None:
    """Rows of numbers of the plan's dtype, each vector a multiple of 16: loads take 16 bytes."""

    def vectors(one: Cell, units: int, backward: bool = False) -> int:
        part = Slice(16, 16, 32, 1, 2, 1)
        return print_cooperative(of(one, units), Variant.training(one, backward), part).vectors

    assert vectors(cells.LSTM, 33) == vectors(cells.LayerNormLSTM, 33) == 0
    assert vectors(cells.MultiplicativeLSTM, 33) == 48
    assert vectors(Deep, 33) == 96
    # Backward, gradients are in memory that the gradients of weights need anyway.
    assert vectors(cells.MultiplicativeLSTM, 33, backward=True) == 0


def test_programs_cover_the_largest_size() -> None:
    one = plan(cells.LSTMP, 32, "bfloat16", "gpu", {"P": 100})
    assert programs_of(one, 16) == 7
    printed = print_cooperative(
        one, Variant.training(cells.LSTMP, False), Slice(16, 16, 32, 1, 2, 1)
    )
    assert printed.size == "P"


def test_what_is_refused() -> None:
    for one in (*BUILT_IN, *USERS):
        assert refusal(of(one, 36)) is None, one
    assert refusal(of(cells.IndRNN, 36)) == "no matmul"
    assert refusal(of(NormOfStates, 36)) == "a row reduction of a size other than H"
    with pytest.raises(
        ValueError, match="tier=2 cannot run cell NormOfStates: a row reduction of a"
    ):
        capacity.choose(of(NormOfStates, 36), None, tier=2)
    assert (
        "a row reduction of a size other than H"
        in capacity.choose(of(NormOfStates, 512), CARDS["H100"]).reason
    )


# -- what fits -------------------------------------------------------------------------------------
def test_the_model_counts_the_second_matrix() -> None:
    part = Slice(16, 16, 128, 4, 4, 0)
    inner, plain = of(cells.MultiplicativeLSTM, 512), of(cells.LSTM, 512)
    for backward in (False, True):
        count = 512 * 16 * 2  # bytes of a matrix of one gate, of a program's units
        more = capacity.slice_bytes(inner, part, backward)
        assert more == capacity.slice_bytes(plain, part, backward) + count
        assert capacity.cycles(inner, part, 32, backward) > (
            capacity.cycles(plain, part, 32, backward) + capacity.TRIP
        )
        # In registers: of each matrix, the chunks that are held, if it has so many.
        for held, registers in ((1, 40), (4, 160), (8, 160)) if not backward else ((16, 160),):
            holding = part._replace(held=held)
            assert capacity.slice_numbers(inner, holding, backward) == registers + (
                capacity.slice_numbers(inner, part, backward)
            )


def test_the_tier_follows_the_size() -> None:
    """Tier 2 up to the size at which the weights of both matrices no longer fit."""

    def tiers(one: Cell, hidden: int, card: str = "H100") -> set[int]:
        passes = (False, True)
        return {capacity.choose(of(one, hidden), CARDS[card], b).tier for b in passes}

    for one in BUILT_IN:
        assert tiers(one, 512) == {2}, one
    assert tiers(cells.MultiplicativeLSTM, 1536) == {2}
    assert tiers(cells.MultiplicativeLSTM, 2048) == {2, 3}
    assert tiers(cells.MultiplicativeLSTM, 1024, "T4") == {3}
    # The projection of the LSTM makes room: h has half the units.
    assert tiers(cells.LSTMP, 2048) == {2}


# -- results ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("one", "how"),
    [
        (one, how)
        for how in (HARD, {"reverse": True})
        for one in (*USERS[:3], *BUILT_IN, *USERS[3:])
    ],
    ids=str,
)
@pytest.mark.sample(3)
def test_results(one: Cell, how: dict[str, bool], rng: np.random.Generator) -> None:
    """Two groups of two programs, the last of which has two units, and none of a smaller size."""
    problem = random_problem(one, (2, 17, 18), rng, "float32", nearby=6, **how)
    assert_right(by_gpu(problem, tier=2), problem)


def test_a_size_beyond_h(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Three programs, of which the last has no units of size H."""
    monkeypatch.setattr(problems, "width", lambda size, hidden: 40 if size == "P" else hidden)
    problem = random_problem(cells.LSTMP, (2, 3, 18), rng, "float32", nearby=6, **HARD)
    assert problem.sizes == {"H": 18, "P": 40}
    assert_right(by_gpu(problem, tier=2), problem)


@pytest.mark.parametrize("dropped", ["each", pytest.param("all", marks=pytest.mark.slow)])
def test_masks_on_the_recurrent_matmul(dropped: str, rng: np.random.Generator) -> None:
    """A matmul of h times a mask is an inner one; the masks are loaded before the loop."""
    one = cells.GRU(reset_after=False)
    problem = random_problem(one, (2, 17, 18), rng, "float32", nearby=6, dropped=dropped, **HARD)
    masked = with_recurrent_mask(one, dropped == "each")
    assert_right(by_gpu(replace(problem, cell=masked), tier=2), problem)
    for backward in (False, True):
        before, _, step = text(masked, backward).partition("    for t in range(")
        assert "tl.load(recurrent_mask" in before and "recurrent_mask" not in step


@pytest.mark.parametrize("one", [*BUILT_IN, *USERS], ids=str)
@pytest.mark.sample(1)
def test_sixteen_bits(one: Cell, rng: np.random.Generator) -> None:
    """float16 alone: the interpreter multiplies bfloat16 wrongly, so tests on a card cover that."""
    problem = random_problem(one, (3, 17, 34), rng, "float16", nearby=6, **HARD)
    assert_sixteen(problem.astype("float32"), "float16", 2)


@pytest.mark.parametrize("one", [cells.MultiplicativeLSTM, OfCell, *BUILT_IN[1:], Normed], ids=str)
@pytest.mark.sample(1)
def test_chunks_of_time(one: Cell, rng: np.random.Generator) -> None:
    assert_launches_count_on(one, rng)
