"""The exchange of a step among programs of tier 2: text, machine code, and the code around them.

``tests/helpers/exchange.py`` and ``tests/engines/test_gpu.py`` test the results of these programs.
"""

import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

# Before anything else that may import Triton.
from gpu import COMPILES, DEVICE, Driver, Poisoned, by_gpu, torch
from problems import random_problem
from processes import at_once, run

import anycell
from anycell import cells
from anycell.engines.gpu import Span, launch
from anycell.engines.gpu.cooperative import CHAINS
from anycell.torch.framework import TorchDevice

# -- machine code ----------------------------------------------------------------------------------
KERNELS = [(768, "forward"), (768, "backward")]
# Kernels with fewer flags than a warp has threads, or as many; ``KERNELS`` have more.
NARROW = [(256, "forward"), (512, "forward"), (512, "backward")]


class Instruction:
    """A line of machine code; ``kind`` is its name without modifiers."""

    def __init__(self, line: str) -> None:
        address, text = re.fullmatch(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?);.*", line).groups()  # type: ignore[union-attr]
        self.address, self.text = int(address, 16), text.strip()
        self.guarded = self.text.startswith("@")
        self.name, _, operands = re.sub(r"^@\S+\s+", "", self.text).partition(" ")
        self.kind = self.name.partition(".")[0]
        self.operands = [operand.strip() for operand in operands.split(",")]

    def written(self) -> range:
        """The numbers of the registers that the instruction writes."""
        if self.kind in ("STG", "STS", "BAR", "MEMBAR", "BRA", "RED", "ST", "CCTL"):
            return range(0)
        wide = 4 if self.kind == "HMMA" else 1
        if self.kind in ("LDG", "LDS"):
            wide = next((n // 32 for n in (64, 128) if str(n) in self.name.split(".")), 1)
        if ".WIDE" in self.name or (self.kind == "CS2R" and ".32" not in self.name):
            wide = 2
        first = re.match(r"R(\d+)", self.operands[0])
        return range(int(first[1]), int(first[1]) + wide) if first else range(0)


class Code:
    """A kernel, and the order of its instructions."""

    def __init__(self, text: str) -> None:
        lines = [line for line in text.splitlines() if re.match(r"\s+/\*[0-9a-f]{4,}\*/\s", line)]
        self.lines = [Instruction(line) for line in lines]
        self.places = {line.address: n for n, line in enumerate(self.lines)}

    def next(self, n: int) -> Iterator[int]:
        """The places of instructions that may follow."""
        line = self.lines[n]
        if line.name == "BRA":
            yield self.places[int(re.findall(r"0x([0-9a-f]+)", line.text)[-1], 16)]
        if line.guarded or line.name not in ("BRA", "EXIT"):
            yield from [n + 1] * (n + 1 < len(self.lines))

    def without(self, start: int, stop: str) -> set[int]:
        """The places that can follow an instruction before an instruction named ``stop`` runs."""
        found, todo = set[int](), list(self.next(start))
        while todo:
            n = todo.pop()
            if n not in found and not self.lines[n].name.startswith(stop):
                found.add(n)
                todo += self.next(n)
        return found

    def named(self, pattern: str) -> list[int]:
        """The places of all instructions whose name matches."""
        return [n for n, line in enumerate(self.lines) if re.match(pattern, line.name)]

    def loops(self) -> list[range]:
        """The places of all loops, inner loops before outer ones."""
        jumps = [(min(self.next(n)), n) for n in self.named("BRA")]
        return [range(begin, n + 1) for begin, n in jumps if begin <= n]

    def poll(self) -> int:
        """The place of the load of flags: an acquire, which invalidates the first-level cache."""
        forgotten = self.named("CCTL.IVALL")
        (place,) = [n for n in self.named(r"LDG\.E\.STRONG\.GPU") if n + 1 in forgotten]
        return place


Kernel = tuple[int, str]


def compiled(kernels: list[Kernel]) -> dict[Kernel, Code]:
    words = [str(word) for kernel in kernels for word in kernel]
    found = json.loads(run("tests/helpers/machine_code.py", *words, **COMPILES))
    return dict(zip(kernels, map(Code, found), strict=True))


@pytest.fixture(scope="module")
def codes() -> dict[Kernel, Code]:
    return compiled(KERNELS)


@pytest.fixture(scope="module")
def narrow() -> dict[Kernel, Code]:
    return compiled(NARROW)


@pytest.mark.parametrize("kernel", NARROW, ids=str)
@pytest.mark.slow
def test_a_barrier_stands_between_flags_and_what_they_are_for(
    kernel: Kernel, narrow: dict[Kernel, Code]
) -> None:
    """A flag that one thread saw counts for all threads, however few programs there are."""
    code = narrow[kernel]
    poll = code.poll()
    arriving = set(code.named(r"LDG\.E\.128\.STRONG\.GPU"))
    assert arriving and not arriving & code.without(poll, "BAR")
    # Warps share what they saw; otherwise one of them might give up alone.
    assert not arriving & code.without(poll, "STS")


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.slow
def test_what_a_flag_costs(kernel: Kernel, codes: dict[Kernel, Code]) -> None:
    """A flag costs a fence and an atomic exchange; h and gradients are stored normally."""
    code = codes[kernel]
    assert code.named("MEMBAR") and len(code.named("ATOM")) == 1
    assert not code.named(r"STG\.\S*STRONG")


@pytest.mark.more  # the processes that run tests would each compile what it reads
def test_the_clock_is_read_now_and_then(codes: dict[Kernel, Code]) -> None:
    """After a look at a flag that is not set, the next look follows directly, 63 of 64 times."""
    code = codes[KERNELS[0]]
    (clock,) = [n for n, line in enumerate(code.lines) if "GLOBALTIMER" in line.text]
    poll = code.poll()
    assert any(code.lines[n].name == "BRA" and poll in code.next(n) for n in range(poll, clock))


def chains(steps: list[Instruction]) -> tuple[int, int]:
    """The number of chains of matrix instructions, in which each adds to the sum of the one before,
    and the length of the longest chain; sums may move between registers.
    """
    depth, begun, longest = dict[int, int](), 0, 0
    for step in steps:
        matrix = step.kind == "HMMA"
        summed = step.operands[3 if matrix else 1] if matrix or step.kind == "MOV" else ""
        register = re.match(r"R(\d+)", summed)
        before = depth.get(int(register[1]), 0) if register else 0
        begun += matrix and before == 0
        longest = max(longest, before + matrix)
        depth |= dict.fromkeys(step.written(), before + matrix)
    return begun, longest


def assert_swift(code: Code) -> None:
    """Asserts the properties of a step of tier 2 for which the engine relies on the compiler."""
    matrices = set(code.named("HMMA"))
    step = max((l for l in code.loops() if matrices & {*l}), key=len)
    matrices &= {*step}
    begun, longest = chains([code.lines[n] for n in step])
    assert begun >= CHAINS and begun * longest == len(matrices)
    # h is loaded in the layout of matrix instructions, and weights stay in registers.
    assert not code.named("LDSM") and len(code.named("MEMBAR")) == 1
    # Nothing is loaded before the programs have waited for one another; then all loads from other
    # programs start before the first matrix instruction.
    loads = {n for n in code.named("LDG") if n in step}
    waiting = next(l for l in code.loops() if l[0] in step and loads & {*l})
    assert min(loads) in waiting
    after = {n for n in loads if waiting[-1] < n < max(matrices)}
    assert after and not any("STRONG" in code.lines[n].name for n in loads if n > min(matrices))


@pytest.mark.more  # as above
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_the_machine_code_of_a_step(way: str, codes: dict[Kernel, Code]) -> None:
    assert_swift(codes[768, way])


# -- the context of a thread -----------------------------------------------------------------------
@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    one = Driver(current=0)  # no thread has a context at first
    monkeypatch.setattr(launch, "driver", lambda: one)
    launch._primary.cache_clear()
    yield one
    launch._primary.cache_clear()


def test_a_thread_without_a_context_gets_that_of_the_device(driver: Driver) -> None:
    launch.use_context(1)
    assert driver.context == 1101
    driver.context = 0  # another thread
    launch.use_context(1)
    assert driver.context == 1101
    assert driver.kept == [101]  # once for all threads


def test_the_context_of_a_thread_stays(driver: Driver) -> None:
    driver.context = 7
    launch.use_context(1)
    assert driver.context == 7
    assert not driver.kept


def test_a_device_that_is_not_there(driver: Driver) -> None:
    with pytest.raises(RuntimeError, match=r"cuDeviceGet failed: .* 101, CUDA_ERROR_101"):
        launch.use_context(2)


@pytest.mark.gpu
def test_a_new_thread_on_a_card() -> None:
    """A thread has no context until its first kernel, which may be ours."""
    layer = anycell.torch.RNN(cells.LSTM, 8, 8, device=DEVICE)
    x, found = torch.randn(3, 2, 8, device=DEVICE), list[Any]()

    def run() -> None:
        host = TorchDevice(torch.float32, DEVICE)
        found.append(launch.limits(host.ordinal))
        launch.use_context(host.ordinal)
        with torch.no_grad():
            found.append(layer(x)[0].cpu())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    limits, output = found
    assert limits.processors and torch.equal(output, layer(x)[0].detach().cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(("hidden", "steps"), [(512, 4), (768, 4), (512, 256), (768, 256)])
def test_programs_beside_a_kernel_that_takes_the_card(
    hidden: int, steps: int, train: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of tier 2 wait for one another, so all must run at once: for seconds, none gives up,
    and the bits stay. Up to 32 programs wait in one warp, more in two. Short sequences make many
    launches; in long ones programs drift apart.
    """
    options: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16}
    monkeypatch.setattr(TorchDevice, "tier", 2)
    layer = anycell.torch.RNN(cells.LSTM, hidden, hidden, **options)
    x = torch.randn(steps, 16, hidden, **options, requires_grad=train)

    def results() -> list[Any]:
        with torch.set_grad_enabled(train):
            output, _ = layer(x)
            return [output, *(torch.autograd.grad(output, x, output) if train else ())]

    right, wrong = results(), torch.zeros((), dtype=torch.int64, device=DEVICE)
    side, busy = torch.cuda.Stream(), torch.randn(4096, 4096, device=DEVICE)
    end = time.monotonic() + 4
    while time.monotonic() < end:
        with torch.cuda.stream(side):  # some milliseconds on all multiprocessors
            torch.mm(busy, busy)
        for _ in range(max(1, 100 // steps)):
            for mine, same in zip(results(), right, strict=True):
                wrong += (mine != same).any()
        torch.cuda.synchronize()
    results()  # a call tells of kernels before it that gave up
    assert not int(wrong)


# -- trouble ---------------------------------------------------------------------------------------
def test_trouble_is_told_whoever_calls_next() -> None:
    """Threads and streams share a host: each call reports a failure that happened before it."""
    problem = random_problem(cells.LSTM, (1, 2, 5), np.random.default_rng(0), "float32")
    told = list[str]()

    class Troubled(Poisoned):
        @property
        def trouble(self) -> Any:  # type: ignore[override]
            return flag

    def call() -> None:
        try:
            by_gpu(problem, tier=2, host_class=Troubled)
        except RuntimeError as error:
            told.append(str(error))

    flag = torch.ones(1, dtype=torch.int32)
    at_once(call, call)
    assert told and "results of that call are NaN" in told[0]
    assert not int(flag[0])
    told.clear()
    call()
    assert not told


# -- arrays over time -----------------------------------------------------------------------------
def test_a_span_over_time() -> None:
    array = np.arange(7)[:, None, None] + np.zeros((1, 1, 4))
    for sign, first, right in ((1, 2, [3, 4, 5]), (-1, 5, [2, 3, 4])):
        span = Span(array, first, sign, column=1)
        assert span.over(1, 3, 2)[:, 0, 0].tolist() == right
        assert span.over(1, 3, 2).shape == (3, 1, 2)
        assert span.over(1, 0, 2).shape[0] == 0
