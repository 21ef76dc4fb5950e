"""Kernels that a device refuses fall back to the next choice: with a stub of the driver, and in
Triton's interpreter with launches that refuse.
"""

import ctypes
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

# Before anything else that may import Triton.
from gpu import ADDRESSES, CARD, CARDS, DEVICE, Driver, Poisoned, by_gpu, torch
from problems import assert_right, random_problem
from tolerances import LIMITS, assert_close

import anycell
from anycell import cells
from anycell.engines.gpu import build, capacity, launch, refusals
from anycell.engines.gpu.build import Binary
from anycell.engines.gpu.cooperative import print_cooperative
from anycell.engines.gpu.interpreter import Interpreter, Started
from anycell.engines.gpu.launch import Launch
from anycell.engines.gpu.refusals import Refused
from anycell.engines.gpu.resident import print_resident
from anycell.engines.gpu.step import print_step
from anycell.engines.gpu.text import Printed, Variant
from anycell.layer import Options
from anycell.layer.launches import DeviceDraft
from anycell.plan import Plan, plan
from anycell.torch.framework import TorchDevice
from anycell.torch.operators import functional, fused
from tests.torch.test_gpu import ran, weight  # noqa: F401


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """Forgets all refusals before and after a test."""
    refusals.forget()
    yield
    refusals.forget()


# -- the driver ------------------------------------------------------------------------------------
EIGHT = (("H", 8),)
ONE = plan(cells.RNN, 16, "float16", "gpu")
RESIDENT = print_resident(ONE, Variant(biases=(False,)))
SHARED = print_cooperative(
    ONE, Variant(biases=(False,)), capacity.choose(ONE, None, tier=2).part  # type: ignore[arg-type]
)  # fmt: skip
(STEP,) = print_step(ONE, Variant(biases=(False,))).stages[0].kernels


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Driver]]:
    """Returns a function that launches a kernel once, with this binary and a driver's results: a
    kernel of tier 3 by itself, others by a recipe.
    """

    def start(
        kernel: Printed, binary: Binary, values: dict[str, int] | None = None, **results: int
    ) -> Driver:
        driver = Driver(**results)
        driver.count = len(kernel.arguments) + binary.hidden
        monkeypatch.setattr(launch, "driver", lambda: driver)
        monkeypatch.setattr(build, "interpreted", lambda: False)
        monkeypatch.setattr(build, "binary", lambda *_: binary)
        launch.loaded.cache_clear()
        numbers = {name: 0 for name, _ in kernel.arguments} if values is None else values
        if kernel is STEP:
            Launch(kernel, numbers, (2, 3), ADDRESSES)(5)
        else:
            draft = DeviceDraft(TorchDevice(torch.float16, DEVICE), ONE, {})
            draft.launch(kernel, numbers, (2, 3))
            draft.finish([]).run({}, Options())
        return driver

    yield start
    launch.loaded.cache_clear()


def binary(shared: int = 1024, spilled: int = 0) -> Binary:
    return Binary("name", b"", "", shared, 4, 2, spilled)


@pytest.mark.parametrize("kernel", [RESIDENT, SHARED, STEP], ids=lambda k: k.name)
def test_a_kernel_that_fits_is_launched(kernel: Printed, started: Any) -> None:
    limits = binary(shared=64 << 10, spilled=build.MOST_SPILLED)
    way = "cuLaunchCooperativeKernel" if kernel is SHARED else "cuLaunchKernel"
    driver = started(kernel, limits)
    assert driver.launched == [way]
    _, grid, threads, shared, stream, _, _ = driver.last
    assert (grid, threads, shared) == ((2, 3, 1), (128, 1, 1), 64 << 10) and not stream


@pytest.mark.parametrize("kernel", [RESIDENT, SHARED, STEP], ids=lambda k: k.name)
def test_what_the_driver_reads_of_arguments(kernel: Printed, started: Any) -> None:
    kinds = {"i32": ctypes.c_int32, "i64": ctypes.c_int64}
    extremes = {"i32": [-(2**31), -1, 7], "i64": [-(2**63), -16, 2**62]}
    values = {
        name: extremes.get(kind, [2**63 + 16, 2**40, 48])[i % 3]
        for i, (name, kind) in enumerate(kernel.arguments)
    }
    values |= {"t": 5} if "t" in values else {}
    arguments = started(kernel, binary(), values).arguments
    read = [
        kinds.get(kind, ctypes.c_uint64)(number).value
        for (_, kind), number in zip(kernel.arguments, arguments, strict=False)
    ]
    assert read == [values[name] for name, _ in kernel.arguments]
    assert arguments[len(read) :] == [0] * 2  # Triton's own scratch memory, which is empty


@pytest.mark.parametrize("kernel", [RESIDENT, STEP], ids=lambda k: k.name)
def test_a_new_thread_gets_a_context_first(kernel: Printed, started: Any) -> None:
    driver = started(kernel, binary(), current=0)
    assert driver.launched == ["cuLaunchKernel"] and driver.context == 1100


REFUSED: list[tuple[Binary, dict[str, int], str]] = [
    (binary(shared=69_632), {}, "it takes 69,632 bytes of shared memory, of which there are 65,53"),
    (binary(spilled=68), {}, "registers do not suffice: each thread keeps 68 bytes in memory"),
    (binary(), {"cuLibraryLoadData": 209}, "does not load it .CUDA_ERROR_NO_BINARY_FOR_GPU"),
    (binary(), {"cuKernelGetFunction": 222},
     "does not load it .CUDA_ERROR_UNSUPPORTED_PTX_VERSION"),
    (binary(shared=60 << 10), {"cuKernelSetAttribute": 1},
     "asking for 61,440 bytes of shared memory"),
    (binary(), {"cuLaunchKernel": 701},
     "does not launch 2 x 3 programs at once .*OUT_OF_RESOURCES"),
]  # fmt: skip


@pytest.mark.parametrize(("compiled", "results", "why"), REFUSED, ids=lambda p: str(p)[:40])
def test_what_does_not_fit_is_refused(
    compiled: Binary, results: dict[str, int], why: str, started: Any
) -> None:
    with pytest.raises(Refused, match=f"kernel forward_resident cannot run .*{why}") as refused:
        started(RESIDENT, compiled, **results)
    assert refused.value.programs == 0


@pytest.mark.parametrize("result", [701, 720, 801])
def test_more_programs_than_run_at_once(result: int, started: Any) -> None:
    """Under MPS or in a green context, a process has only some of the card's multiprocessors."""
    with pytest.raises(Refused, match="does not launch 2 x 3 programs at once") as refused:
        started(SHARED, binary(), cuLaunchCooperativeKernel=result)
    assert refused.value.programs == 6


def test_occupancy_is_known_before_a_launch(started: Any) -> None:
    with pytest.raises(Refused, match="6 programs do not run at once, 0 do") as refused:
        started(SHARED, binary(), together=0)
    assert refused.value.programs == 6
    assert started(SHARED, binary(), together=1).launched == ["cuLaunchCooperativeKernel"]


BROKEN = [
    {"cuLaunchKernel": 700},  # an illegal address, of this kernel or of one before
    {"cuLaunchKernel": 1},  # our own mistake
    {"cuLaunchKernel": 719},
    {"cuLibraryLoadData": 700},
    {"cuLibraryGetKernel": 2},  # out of memory
    {"cuKernelSetAttribute": 700},
]


@pytest.mark.parametrize("results", BROKEN, ids=str)
def test_other_errors_are_errors(results: dict[str, int], started: Any) -> None:
    (code,) = results.values()
    with pytest.raises(RuntimeError, match=f"driver error {code}, CUDA_ERROR_{code}") as error:
        started(RESIDENT, binary(shared=60 << 10), **results)
    assert not isinstance(error.value, Refused)


def test_what_triton_does_not_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("first line\nptxas fatal: PTX version 9.9 is too new")

    monkeypatch.setattr(triton, "compile", fails)
    why = f"Triton {triton.__version__} does not compile it for sm_75: ptxas fatal: PTX"
    with pytest.raises(Refused, match=why):
        build.binary(print_resident(plan(cells.IndRNN, 24, "float16", "gpu"), Variant()), 75)


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(build, "interpreted", lambda: False)
    for find, words in (
        (none, "found no CUDA driver"),
        (lambda _: SimpleNamespace(), "older than 12.0"),
        (lambda _: Driver(), None),
    ):
        launch.driver.cache_clear()
        monkeypatch.setattr(ctypes, "CDLL", find)
        why = launch.missing()
        assert why is None if words is None else why is not None and words in why
    launch.driver.cache_clear()


# -- a pass that begins anew -----------------------------------------------------------------------
class H100(Poisoned):
    """A host whose kernels are chosen as for an H100."""

    limits = CARDS["H100"]


class Launches:
    """Makes the driver refuse some launches, and run the others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuse: Callable[[Printed], bool]) -> None:
        self.refused: list[str] = []
        self.ran: set[str] = set()
        run = Interpreter.launch

        def start(driver: Interpreter, one: Started) -> int:
            printed = driver.kernels[one.handle - 1]
            if refuse(printed):
                self.refused.append(printed.name)
                return 701
            self.ran.add(printed.name)
            return run(driver, one)

        monkeypatch.setattr(Interpreter, "launch", start)


def whole(printed: Printed) -> bool:
    return printed.alone


@pytest.mark.skipif(CARD, reason="the kernels are interpreted")
@pytest.mark.parametrize("cell", [cells.LSTM, cells.ZoneoutGRU], ids=repr)
@pytest.mark.sample(1)
def test_what_is_refused_falls_to_the_next(
    cell: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both passes fall to tier 3 with the right results; each choice is tried only once."""
    options = {"training": True, "seed": 3} if cell.keeps else {}
    problem = random_problem(cell, (3, 3, 18), rng, "float32", masked=True, resets=True, **options)
    launches = Launches(monkeypatch, whole)
    assert_right(by_gpu(problem, tier=None, host_class=H100), problem)
    kinds = {"forward_resident", "forward_cooperative", "backward_resident", "backward_cooperative"}
    assert set(launches.refused) == kinds
    assert not any(name.endswith(("resident", "cooperative")) for name in launches.ran), (
        launches.ran
    )
    asked = len(launches.refused)
    one = plan(cell, 18, "float32", "gpu")
    known = refusals.of_plan(one)
    assert asked == len(known)
    for backward in (False, True):
        choices = capacity.choices(one, H100.limits, backward, batch=3)
        mine = [r for r in known if r.variant.backward == backward]
        assert [r.choice for r in mine] == list(choices[:-1])
        assert [r.instead for r in mine] == list(choices[1:])
        assert choices[-1].tier == 3
    assert_right(by_gpu(problem, tier=None, host_class=H100), problem)
    assert len(launches.refused) == asked


@pytest.mark.skipif(CARD, reason="the kernels are interpreted")
def test_only_what_is_refused_falls(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first number of warps is refused; the next number runs, in tier 1."""
    problem = random_problem(cells.RNN, (3, 3, 40), rng, "float32")
    first: list[Printed] = []

    def refuse(printed: Printed) -> bool:
        if printed.alone and not first:
            first.append(printed)
        return printed in first

    launches = Launches(monkeypatch, refuse)
    assert_right(by_gpu(problem, tier=None, host_class=H100), problem)
    assert launches.refused == ["forward_resident"]
    assert launches.ran - {"move"} == {"forward_resident", "backward_resident"}


@pytest.mark.skipif(CARD, reason="the kernels are interpreted")
def test_a_tier_that_was_asked_for_is_not_left(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = random_problem(cells.RNN, (2, 3, 18), rng, "float32")
    Launches(monkeypatch, whole)
    with pytest.raises(RuntimeError, match="tier=1 cannot run cell RNN here: H100 refused tier 1"):
        by_gpu(problem, tier=1, host_class=H100)


@pytest.mark.skipif(CARD, reason="the kernels are interpreted")
def test_tier_3_has_no_next(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(cells.RNN, (2, 3, 18), rng, "float32")
    Launches(monkeypatch, lambda _: True)
    with pytest.raises(Refused, match=r"kernel \w+ cannot run on this device: the driver does not"):
        by_gpu(problem, tier=3, host_class=H100)


def test_fewer_programs_are_not_refused() -> None:
    """Kernels refused for too many programs may run on fewer rows; misfits never run."""
    one, card = plan(cells.LSTM, 768, "bfloat16", "gpu"), CARDS["H100"]
    choice, other = capacity.choices(one, card)[:2]
    about = card, one, Variant(), choice, other, "too large"
    refusals.remember(SHARED, refusals.Refusal(*about, 96))
    assert [refusals.refuses(card, SHARED, n) for n in (48, 96, 192)] == [False, True, True]
    refusals.remember(SHARED, refusals.Refusal(*about, 48))
    refusals.remember(SHARED, refusals.Refusal(*about, 64))  # says nothing new
    assert refusals.refuses(card, SHARED, 48)
    refusals.remember(RESIDENT, refusals.Refusal(*about, 0))
    assert refusals.refuses(card, RESIDENT, 1)
    assert not refusals.refuses(CARDS["A100"], RESIDENT, 1)
    assert not refusals.refuses(None, RESIDENT, 1)


@pytest.mark.skipif(CARD, reason="the kernels are interpreted")
def test_layers_say_what_was_refused(
    ran: list[str],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If a direction is refused, the whole pass of both directions starts again."""
    monkeypatch.setattr(TorchDevice, "limits", CARDS["T4"])
    TorchDevice.on.cache_clear()  # its hosts hold their limits
    layer = anycell.torch.RNN(cells.MGU, 3, 6, bidirectional=True, device=DEVICE)
    cell = anycell.torch.RNNCell(cells.MGU, 3, 6, device=DEVICE)
    x = torch.randn(4, 2, 3, device=DEVICE)
    plain = layer.engine.reason
    right, _ = layer(x)
    Launches(monkeypatch, whole)
    found, _ = layer(x)
    assert_close(found.detach().cpu(), right.detach().cpu(), "float32", "forward")
    why = "the driver does not launch 1 x 1 x 2 programs at once"
    why = f"{why} (CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES)"
    one = f"T4 refused tier 1 of 4 warps, 2 passes in a launch, forward: {why}; next comes tier"
    for engine in (layer.engine, cell.engine):
        assert engine.name == "gpu"
        assert engine.reason.startswith(f"{plain}; {one}")
    TorchDevice.on.cache_clear()
    page = str(anycell.explain(cells.MGU, 6, "float32", engine="gpu"))
    assert one in " ".join(page.split())


# -- what devices there are ------------------------------------------------------------------------
@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    fused._foreign.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    fused._foreign.cache_clear()


def test_cards_of_others(cards: pytest.MonkeyPatch) -> None:
    """PyTorch for ROCm also calls its device "cuda"."""
    assert isinstance(functional.fused_plan(cells.LSTM, EIGHT, weight("cuda", torch.float32)), Plan)
    fused._foreign.cache_clear()
    cards.setattr(torch.version, "hip", "6.4")
    why = functional.fused_plan(cells.LSTM, EIGHT, weight("cuda", torch.float32))
    assert why == "PyTorch is built for ROCm; the GPU engine has kernels for NVIDIA's cards only"
    assert isinstance(functional.fused_plan(cells.LSTM, EIGHT, weight("cpu", torch.float32)), Plan)


@pytest.mark.parametrize("there", [False, True])
def test_a_card_without_a_driver(there: bool, cards: pytest.MonkeyPatch) -> None:
    cards.setattr(torch.cuda, "is_available", lambda: True)
    cards.setattr(launch, "missing", lambda: None if there else "no driver")
    found = functional.fused_plan(cells.LSTM, EIGHT, weight("cuda", torch.float32))
    assert isinstance(found, Plan) if there else found == "no driver"


# -- float32 ---------------------------------------------------------------------------------------
@pytest.fixture
def precision() -> Iterator[None]:
    """Resets torch's precision settings, and restores them after a test."""
    backends = torch.backends
    cudnn = backends.cudnn
    parts = [getattr(cudnn, name, None) for name in ("conv", "rnn")]
    places = [backends, backends.cuda.matmul, cudnn, *parts]
    before = [getattr(p, "fp32_precision", None) for p in places]
    older = [(place, place.allow_tf32) for place in (cudnn, backends.cuda.matmul)]
    enabled = cudnn.enabled

    def choose(values: list[str | None]) -> None:
        for place, value in zip(places, values, strict=True):
            if value is not None:
                place.fp32_precision = value

    # A setting of matmuls alone, left by other tests, would hide the setting of everything.
    choose([value and "none" for value in before[:2]] + before[2:])
    yield
    for place, allowed in older:  # torch remembers these apart: unequal ones are unreadable
        place.allow_tf32 = allowed
    choose(before)
    cudnn.enabled = enabled
    assert [place.allow_tf32 for place, _ in older] == [allowed for _, allowed in older]


NEWER = pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="PyTorch is too old"
)


@pytest.mark.parametrize(
    ("name", "value", "matmuls", "layers"),
    [
        ("cuda.matmul.allow_tf32", True, True, True),
        ("cuda.matmul.allow_tf32", False, False, True),
        ("cudnn.allow_tf32", False, False, False),
        ("cudnn.enabled", False, False, False),
        pytest.param("cuda.matmul.fp32_precision", "tf32", True, True, marks=NEWER),
        pytest.param("cuda.matmul.fp32_precision", "ieee", False, True, marks=NEWER),
        pytest.param("cudnn.rnn.fp32_precision", "ieee", False, False, marks=NEWER),
        pytest.param("fp32_precision", "tf32", True, True, marks=NEWER),
    ],
)
def test_tf32_follows_torch(
    name: str, value: Any, matmuls: bool, layers: bool, precision: None
) -> None:
    """TF32 follows all of torch's settings; the old ones are unreadable after a new one is set.
    Layers that cuDNN has follow its own setting, which allows TF32 as installed.
    """
    *path, last = name.split(".")
    place: Any = torch.backends
    for part in path:
        place = getattr(place, part)
    setattr(place, last, value)
    host = TorchDevice(torch.float32, torch.device("cuda"))
    assert host.tf32(cells.PeepholeLSTM) is matmuls
    assert {host.tf32(cell) for cell in (cells.LSTM, cells.GRU, cells.LSTMP)} == {layers}
    assert not TorchDevice(torch.bfloat16, torch.device("cuda")).tf32(cells.LSTM)
    assert not TorchDevice(torch.float32, torch.device("cpu")).tf32(cells.LSTM)


def test_few_are_tried() -> None:
    """A first call must not compile for minutes if a device refuses one choice after another."""
    for cell, hidden, batch in itertools.product((cells.LSTM, cells.GRU), (64, 512), (16, 128)):
        for dtype in ("float32", "bfloat16"):
            one = plan(cell, hidden, dtype, "gpu")
            tiers = [choice.tier for choice in capacity.choices(one, CARDS["H100"], batch=batch)]
            assert tiers == sorted(tiers) and tiers.count(3) == 1
            assert max(map(tiers.count, tiers)) <= capacity.TRIES


def test_how_float32_is_multiplied() -> None:
    """Threads multiply if that is short, matrix units multiply three bfloat16, or TF32 only if it
    is allowed; a T4 has neither of the latter.
    """

    def ways(hidden: int, card: str, **options: Any) -> dict[int, list[str]]:
        one = plan(cells.LSTM, hidden, "float32", "gpu")
        found: dict[int, list[str]] = {1: [], 2: [], 3: []}
        for choice in capacity.choices(one, CARDS[card], **options):
            found[choice.tier].append(choice.precision)
        return {tier: list(dict.fromkeys(every)) for tier, every in found.items()}

    assert ways(64, "H100") == {1: ["ieee", "bf16x6"], 2: ["bf16x6"], 3: ["ieee"]}
    assert ways(64, "H100", tf32=True) == {1: ["tf32"], 2: ["tf32"], 3: ["ieee"]}
    assert ways(512, "H100") == {1: [], 2: ["bf16x6"], 3: ["ieee"]}
    assert ways(768, "H100") == {1: [], 2: [], 3: ["ieee"]}
    assert ways(768, "H100", tf32=True) == {1: [], 2: ["tf32"], 3: ["ieee"]}
    assert ways(2048, "A100", tf32=True) == {1: [], 2: [], 3: ["ieee"]}
    assert ways(32, "T4", tf32=True) == {1: ["ieee"], 2: [], 3: ["ieee"]}
    assert ways(64, "T4") == {1: [], 2: [], 3: ["ieee"]}
    half = plan(cells.LSTM, 64, "float16", "gpu")
    (only,) = capacity.choices(half, CARDS["T4"])
    assert only.tier == 3 and "no matrix instructions of 16 bits before sm_80" in only.reason
    assert {c.precision for c in capacity.choices(half, CARDS["H100"], tf32=True)} == {"ieee"}
    for choice in capacity.choices(plan(cells.LSTM, 64, "float32", "gpu"), CARDS["H100"]):
        if choice.tier < 3:
            text = gpu_text(choice)
            assert f"input_precision='{choice.precision}'" in text


def gpu_text(choice: capacity.Choice) -> str:
    from anycell.engines.gpu import print_whole

    one = plan(cells.LSTM, 64, "float32", "gpu")
    return print_whole(one, Variant(biases=(False,)), choice).source


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [40, 128, 384])
def test_float32_on_a_card(hidden: int, rng: np.random.Generator) -> None:
    """Results have float32 accuracy, however the card's tier multiplies; only a card shows the
    accuracy of three bfloat16.
    """
    for cell in (cells.LSTM, cells.GRU):
        problem = random_problem(cell, (20, 16, hidden), rng, "float32")
        assert_right(by_gpu(problem, tier=None), problem)


def test_three_bfloat16_are_a_float32(rng: np.random.Generator) -> None:
    """Emulates the worst arithmetic of "bf16x6": in sums of 16 products and the sum so far, terms
    lose all bits 24 below the largest; chunks are added as float32.
    """
    a = rng.normal(size=(8, 512)).astype("float32")
    b = rng.uniform(-1, 1, (512, 64)).astype("float32")
    right = a.astype("float64") @ b
    size = np.linalg.norm(right)
    forward = LIMITS["float32", "forward"]
    assert np.linalg.norm(by_parts(a, b, 8, 3) - right) / size < forward / 4
    assert np.linalg.norm(by_parts(a, b, 11, 1) - right) / size > 100 * forward  # TF32
    assert np.linalg.norm(by_parts(a, b, 8, 2) - right) / size > forward


def by_parts(a: Any, b: Any, bits: int, parts: int, chunk: int = 32) -> Any:
    """Computes ``a @ b`` from ``parts`` parts of ``bits`` bits of each operand, by chunks of k."""
    total = np.zeros((a.shape[0], b.shape[1]), "float32")
    for k in range(0, a.shape[1], chunk):
        left, right = (
            split(m.astype("float64"), bits, parts) for m in (a[:, k:][:, :chunk], b[k:][:chunk])
        )
        pairs = [(i, j) for i in range(parts) for j in range(parts) if i + j < parts]
        sums = np.zeros(total.shape)
        for i, j in sorted(pairs, key=sum, reverse=True):
            for n in range(0, chunk, 16):
                products = left[i][:, n : n + 16, None] * right[j][n : n + 16]
                terms = np.concatenate([products, sums[:, None]], axis=1)
                least = np.frexp(np.abs(terms).max(axis=1, keepdims=True))[1] - 24
                sums = np.ldexp(np.trunc(np.ldexp(terms, -least)), least).sum(axis=1)
        total += sums.astype("float32")
    return total


def split(values: Any, bits: int, parts: int) -> list[Any]:
    """Splits values into parts of ``bits`` bits, the largest first, with almost the same sum."""
    found = []
    for _ in range(parts):
        mantissa, exponent = np.frexp(values)
        found.append(np.ldexp(np.rint(np.ldexp(mantissa, bits)), exponent - bits))
        values = values - found[-1]
    return found
