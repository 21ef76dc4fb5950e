"""Threads where other processes want the cores: a thread stands still for a while, at any place.

The places are reached without a busy machine, by workers that never begin, and by kernels that
choose how long their parts take.
"""

import ctypes
import itertools
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from roads import ROADS

import anycell.numpy as an
from anycell import cells, layer
from anycell.engines import cpu
from anycell.engines.cpu import ir, isa, jit, pool
from anycell.engines.cpu.layout import Layout
from tests.engines.test_cpu_runtime import parallel

FOREVER = 1 << 62  # nanoseconds
GANG = {"begun": 1, "lost": 2, "workers": 3, "until": 4, "patience": 5, "rest": 6}


class Phantoms:
    """A gang whose workers are threads that never begin.

    Attributes:
        lines: the table of ``gang.ll``, as numbers.
        record: what ``pool.gang`` returns the address of.
    """

    def __init__(self, workers: int) -> None:
        real = (ctypes.c_int64 * 5).from_address(pool.own_gang(2))
        memory = np.zeros(8 * (workers + 2), np.int64)
        self.lines = memory[-memory.ctypes.data // 8 % 8 :][: 8 * (workers + 1)].reshape(-1, 8)
        self[0, "workers"], self[0, "patience"] = workers, FOREVER
        self.record = (ctypes.c_int64 * 5)(real[0], self.lines.ctypes.data, *real[2:])
        self.address = ctypes.addressof(self.record)
        self.meet = ctypes.CFUNCTYPE(
            *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 4
        )(real[4])

    @property
    def states(self) -> Any:
        """The states of the gang and of its workers."""
        return self.lines.view(np.int32)[:, 0]

    def __getitem__(self, name: tuple[int, str]) -> int:
        return int(self.lines[name[0], GANG[name[1]]])

    def __setitem__(self, name: tuple[int, str], value: int) -> None:
        self.lines[name[0], GANG[name[1]]] = value


@pytest.fixture
def phantoms(monkeypatch: pytest.MonkeyPatch, patch_threads: Any) -> dict[int, Phantoms]:
    """Gives all layers of NumPy a gang of phantoms, of any number of threads."""
    gangs: dict[int, Phantoms] = {}

    def gang(parts: int) -> int:
        return gangs.setdefault(parts, Phantoms(parts - 1)).address if parts > 1 else 0

    monkeypatch.setattr(cpu.pool, "gang", gang)
    return gangs


@pytest.fixture
def patch_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sets the number of threads, which the smallest calls take too."""
    monkeypatch.setattr(layer.heuristics, "WORTH_A_THREAD", 0)
    layer.recipe.known.clear()
    yield cpu.threads.set_threads
    cpu.threads.set_threads(None)
    layer.recipe.known.clear()


# -- one meeting -----------------------------------------------------------------------------------
class Step:
    """A step of some pieces: the count of pieces that are done, and a line for each piece."""

    def __init__(self, gang: Phantoms, pieces: int, step: int = 3) -> None:
        self.gang, self.step, self.pieces = gang, step, pieces
        self.words = np.zeros((pieces + 1, 8), np.int64)
        self.words[:, 0] = step + 1  # all are begun
        self.words[pieces, 0] = step * pieces  # the count

    def meet(self, part: int) -> int:
        count = self.words[self.pieces :].ctypes.data
        table = self.gang.address, count, self.words.ctypes.data
        return int(self.gang.meet(*table, 64, self.step, part, self.pieces))

    def done(self, pieces: int) -> None:
        self.words[self.pieces, 0] += pieces


def test_a_step_that_is_done_is_passed() -> None:
    step = Step(Phantoms(1), 2)
    step.done(2)
    assert [step.meet(part) for part in (0, 1)] == [-1, -1]
    assert step.gang[0, "lost"] == 0


@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.parametrize("piece", [0, 1, 2])
def test_a_piece_that_nobody_has_begun_is_taken(part: int, piece: int) -> None:
    step = Step(Phantoms(2), 3)
    step.words[piece, 0] = step.step
    assert step.meet(part) == piece
    # It waits no more at the next step, until it finds the others at work there.
    assert step.words[part, 1] == step.step + 1


def test_a_piece_at_work_is_waited_for() -> None:
    step = Step(Phantoms(1), 2)
    step.gang[0, "begun"] = FOREVER  # so that no time lost is too much
    for waits in (0.0, 0.02):
        timer = threading.Timer(waits, step.done, [2])
        timer.start()
        assert step.meet(0) == -1
        timer.join()
        step.step += 1
        step.words[:2, 0] += 1
    assert (step.gang[0, "lost"] > 1e6) is (now() > 0)


def now() -> int:
    """Whether time passes, as ``gang.ll`` counts it: 0 on processors that are not known."""
    return int(ir.X86 or ir.ARM)


@pytest.mark.parametrize(("part", "expected"), [(0, 1), (1, -2)])
def test_workers_leave_and_the_first_part_stays(part: int, expected: int) -> None:
    step = Step(Phantoms(1), 2)
    step.gang.lines[0, 0] = 1 + (1 << 32)  # at work; leave
    step.words[1, 0] = step.step
    assert step.meet(part) == expected


# -- a gang ----------------------------------------------------------------------------------------
def test_the_caller_runs_parts_that_no_worker_has_begun() -> None:
    text = """
define void @mark(ptr %args, i64 %part, i64 %parts) {
  %at = getelementptr i64, ptr %args, i64 %part
  %old = load i64, ptr %at
  %new = add i64 %old, %parts
  store i64 %new, ptr %at
  ret void
}
"""
    address = jit.compile(text, ["mark"], isa.TARGETS["generic"]).address("mark")
    for workers, wanted in itertools.product((1, 2, 5), (2, 3)):
        gang, marks = Phantoms(workers), np.zeros(8, np.int64)
        run = ctypes.CFUNCTYPE(*[ctypes.c_int64] * 6)(gang.record[0])
        parts = run(gang.record[1], address, marks.ctypes.data, wanted, 0)
        assert parts == min(wanted, workers + 1)
        assert marks.tolist() == [parts] * parts + [0] * (8 - parts)
        assert not gang.states.any(), "a state is left behind"


@pytest.mark.parametrize(("ahead", "parts"), [(pool.REST // 2, 1), (2 * pool.REST, 2), (-1, 2)])
def test_a_rest_ends(ahead: int, parts: int, line: Any) -> None:
    """Also where the clock was set back, so that it would end in days."""
    kernel = Uneven()

    def team() -> int:
        line[GANG["until"]] = 0
        assert kernel.run(1, 1) == 2
        line[GANG["until"]] = line[GANG["begun"]] + ahead
        return kernel.run(1, 1)

    assert parts in (team() for _ in range(10))  # on a busy machine a rest may be over by then


class Uneven:
    """A kernel whose caller waits until the worker has begun; then each part takes its time."""

    def __init__(self) -> None:
        module = ir.Module(isa.TARGETS["generic"], "double")
        b = module.function("uneven", "ptr turns, i64 part, i64 parts")
        turns, part, parts = b.args
        b.atomic_add(b.gep(turns, 2, "i64"), parts)
        # The caller waits for the worker to begin, if there is one.
        with b.when(part.eq(0)), b.repeat() as again:
            b.call(b.load(b.gep(turns, 4, "i64"), "ptr"), returns="i32")
            again((b.atomic_load(b.gep(turns, 3, "i64")) < 1) & (parts > 1))
        with b.when(part > 0):
            b.atomic_add(b.gep(turns, 3, "i64"), 1)
        spent = b.variable(0)
        with b.loop(0, b.load(b.gep(turns, part, "i64"), "i64")) as i:
            b.pause()
            spent.value = spent.value + i
        self.address = jit.compile(str(module), ["uneven"], isa.TARGETS["generic"]).address(
            "uneven"
        )

    def run(self, of_caller: int, of_worker: int) -> int:
        """Runs a gang of two; returns how many parts there were."""
        turns = np.array([of_caller, of_worker, 0, 0, pool.yield_address()], np.int64)
        team = parallel(self.address, turns.ctypes.data, 2)
        assert turns[2] == team * team, "a part ran twice or not at all"
        return team


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The gang's line of this process, with little patience; calls have two threads again."""
    if not now():
        pytest.skip("time stands still on this processor")
    pool.own_gang(2)
    line = pool._current().workers._lines[0]
    patience = int(line[GANG["patience"]])
    line[GANG["patience"]], line[GANG["until"]], line[GANG["rest"]] = 50_000, 0, 0
    yield line
    line[GANG["patience"]], line[GANG["until"]] = patience, 0


def test_a_gang_that_loses_time_rests_and_tries_again(line: Any) -> None:
    """Once, and twice as long if it soon loses time again; never for more than ``REST``."""
    kernel = Uneven()

    def lose(ago: int, rest: int) -> tuple[int, int, bool]:
        """Loses time, ``ago`` after a rest; returns how long it lost and will rest, and whether
        that rest was over for less time than it took."""
        for time in range(10):  # a worker may begin late on a busy machine
            line[GANG["until"]] = line[GANG["begun"]] - ago
            line[GANG["rest"]] = rest
            until = int(line[GANG["until"]])
            assert kernel.run(1, 50_000 << time) == 2
            if line[GANG["until"]] != until:
                soon = int(line[GANG["begun"]]) - until < rest
                lost, length = int(line[GANG["lost"]]), int(line[GANG["rest"]])
                line[GANG["until"]] += pool.REST - length  # or it may be over before the next call
                assert kernel.run(1, 1) == 1, "it does not rest"
                return lost, length, soon
        pytest.fail("no time was lost")

    lost, rest, _ = lose(0, 0)
    assert rest == min(2 * lost, pool.REST)
    _, rest, soon = lose(0, last := 3 * 10**9)
    assert soon and rest == pool.REST < last
    lost, rest, soon = lose(10**10, 10**9)  # a rest that ended long ago is forgotten
    assert not soon and rest == min(2 * lost, pool.REST)
    for _ in range(10):  # the call may begin late, too
        lost, rest, soon = lose(0, last := 10**8)
        assert rest == min(2 * max(lost, soon * last), pool.REST)
        if soon:
            return
    pytest.fail("no time was lost soon after a rest")


def test_a_gang_that_gains_does_not_rest(line: Any) -> None:
    kernel = Uneven()
    line[GANG["patience"]] = 0
    for _ in range(3):  # the worker takes hardly longer
        assert kernel.run(3_000_000, 3_000_100) == 2
        if line[GANG["until"]] == 0:
            return
        line[GANG["until"]] = 0  # this machine was busy itself
    pytest.skip("this machine is busy")


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("units", [8, 64, 128])
@pytest.mark.sample(every=3)
def test_threads_are_no_more_than_there_is_to_share(
    units: int, bidirectional: bool, runs: list[layer.pass_tables.PassTables], patch_threads: Any
) -> None:
    """A thread has rows of its own, or spans of units."""
    one = an.LSTM(3, units, bidirectional=bidirectional)
    for threads, rows in itertools.product((1, 2, 3, 4), (0, 1, 2, 40)):
        patch_threads(threads)
        runs.clear()
        one.backward(np.ones_like(one.forward(np.ones((4, rows, 3)), training=True)[0]))
        for run, backward in zip(runs, (False, True), strict=True):
            spans = Layout(run.kernel.plan, backward, isa.current()).geometry.spans
            directions = 2 if bidirectional and threads % 2 == 0 else 1
            sides = run.parts // directions
            if ROADS["threads split the units"](run):
                assert 1 < sides == threads // directions <= spans
            else:
                assert 1 <= sides <= max(rows, 1)
            if rows >= threads:
                assert run.parts == threads


# -- layers ----------------------------------------------------------------------------------------
class Call(NamedTuple):
    cell: Any
    dtype: Any
    units: int
    rows: int
    options: dict[str, Any]


MASK = {"lengths": np.array([5, 2, 0])}
RESETS = {"resets": np.array([[0, 1, 0], [0, 0, 1], [1, 0, 0], [0, 0, 0], [0, 1, 1]])}
CALLS = [
    Call(cells.LSTM, "float32", 200, 3, {}),
    Call(cells.GRU, "float32", 200, 3, RESETS | MASK),
    Call(cells.PeepholeLSTM, "float64", 64, 3, RESETS),
    Call(cells.LSTM, "bfloat16", 200, 3, MASK),
    Call(cells.ZoneoutLSTM, "float32", 200, 3, {}),
    Call(cells.LayerNormLSTM, "float32", 64, 3, MASK),
    Call(cells.GRU, "float32", 33, 40, {}),
]  # fmt: skip


def solve(call: Call, threads: int) -> list[Any]:
    """The bits of outputs, final states and all gradients."""
    cpu.threads.set_threads(threads)
    rng = np.random.default_rng(0)
    one = an.RNN(call.cell, 5, call.units, dtype=call.dtype, seed=0)
    x = rng.normal(size=(5, call.rows, 5)).astype(one.dtype)
    output, state = one.forward(x, training=True, **call.options)
    d_x, d_state = one.backward(np.ones_like(output))
    arrays = [output, d_x, *_leaves(state), *_leaves(d_state), *one.grads.values()]
    return [array.tobytes() for array in arrays]


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [] if value is None else [value]


@pytest.mark.parametrize("call", CALLS, ids=lambda c: f"{c.cell.name}-{c.dtype}-{c.units}")
@pytest.mark.sample(every=5)
def test_one_thread_does_all_where_no_worker_begins(
    call: Call, phantoms: dict[int, Phantoms]
) -> None:
    """The caller takes over the pieces of every step, with the same bits."""
    expected = solve(call, 1)
    for threads in (2, 3):
        layer.recipe.known.clear()
        assert solve(call, threads) == expected
        assert phantoms[threads].lines[0, GANG["begun"]] != 0, "no gang began"
        assert not phantoms[threads].states.any()
