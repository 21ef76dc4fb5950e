"""A pass on a GPU as a recipe: arrays without addresses, the moves between kernels, the memory of a
call, and what calls of one form share. ``test_gpu.py`` holds the results of passes.
"""

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

# Before anything else that may import Triton.
from gpu import CARD, CARDS, DEVICE, Driver, Poisoned, torch
from processes import at_once

from anycell import cells
from anycell.engines.gpu import build, launch
from anycell.engines.gpu.interpreter import Interpreter, Started
from anycell.layer import Options, launches
from anycell.layer import gpu as device
from anycell.layer.launches import DeviceDraft, View
from anycell.plan import plan
from anycell.torch.framework import TorchDevice

pytestmark = pytest.mark.sample(every=2)

PLAN = plan(cells.RNN, 8, "float32", "gpu")


# -- arrays without addresses ----------------------------------------------------------------------
PARTS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda a: a,
    "a step": lambda a: a[2],
    "from the end": lambda a: a[-1],
    "steps": lambda a: a[1:3],
    "columns": lambda a: a[..., 2:5],
    "columns of a step": lambda a: a[0, :, 1:4],
    "no steps": lambda a: a[3:3],
    "turned": lambda a: a.mT,
    "rows": lambda a: a.reshape(12, 6),
    "rows of columns": lambda a: a[..., 1:4].reshape(12, 3),  # a view
    "heads": lambda a: a.reshape(4, 3, 2, 3)[:, :, 1],
    "a copy": lambda a: a.mT.reshape(24, 3),
    "an axis of one": lambda a: a[1:2].reshape(3, 6),
    "a new axis": lambda a: a[1][None],
    "a new axis within": lambda a: a[0, None, 1:],
    "any rows": lambda a: a.reshape(-1, 1, 6)[:, 0],
}


def played(run: Callable[..., Any], dtype: str = "float32", **given: Any) -> list[Any]:
    """Drafts ``run``, which takes a draft and views and returns results, and plays it."""
    host = Poisoned(getattr(torch, dtype), DEVICE)
    arrays = {name: torch.as_tensor(a, device=DEVICE) for name, a in given.items()}
    draft = DeviceDraft(host, plan(cells.RNN, 8, dtype, "gpu"), arrays)
    recipe = draft.finish(run(draft, **draft.views))
    with np.errstate(all="ignore"):
        return recipe.run(arrays, Options())


@pytest.mark.parametrize("name", PARTS)
def test_views_are_parts(name: str) -> None:
    """Slices and shapes are those of the framework: when copied, and when it sees them itself."""
    part, a = PARTS[name], torch.arange(72.0, device=DEVICE).reshape(4, 3, 6)

    def run(draft: DeviceDraft, a: View) -> list[View]:
        copy = draft.empty(part(a).shape)
        copy[:] = part(a)
        return [copy, part(a)]

    copy, view = played(run, a=a)
    right = part(a)
    assert copy.shape == view.shape == right.shape
    assert torch.equal(copy, right) and torch.equal(view, right)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_moves_round_as_the_framework_does(dtype: str, rng: np.random.Generator) -> None:
    """Copies to and from every dtype, ties, infinities and NaN among them; numbers; sums."""
    number = getattr(torch, dtype)
    bits = rng.integers(0, 1 << 32, 3000, np.uint32)
    bits[:999] = bits[:999] & 0xFFFF0000 | 0x8000  # ties of bfloat16
    wide = torch.tensor(bits.view(np.float32), device=DEVICE)
    ties = torch.arange(1.0, 4.0, 2**-11, device=DEVICE)  # of float16
    wide = torch.cat([wide, ties, torch.tensor([np.inf, -np.inf, np.nan, 0.0], device=DEVICE)])
    narrow = wide.to(number)

    def run(draft: DeviceDraft, wide: View, narrow: View) -> list[View]:
        rounded, back = draft.empty(wide.shape), draft.empty(wide.shape, wide=True)
        rounded[:], back[:] = wide, narrow
        filled = draft.empty((2, 5))
        filled[:], filled[1:] = -np.inf, 0.1
        total, sums = draft.zeros((2, 5)), draft.zeros((5,), wide=True)
        total += filled
        total[1] += total[1]
        sums += filled[1]
        return [rounded, back, filled, total, total + total, sums]

    rounded, back, filled, total, twice, sums = played(run, dtype, wide=wide, narrow=narrow)
    assert np.array_equal(*[a.float().cpu().numpy() for a in (rounded, narrow)], equal_nan=True)
    assert np.array_equal(*[a.float().cpu().numpy() for a in (back, narrow)], equal_nan=True)
    tenth = torch.tensor(0.1, dtype=number)
    expected = torch.stack([torch.full((5,), -np.inf), torch.full((5,), float(tenth))])
    assert torch.equal(filled.float().cpu(), expected)
    expected[1] *= 2
    assert torch.equal(total.float().cpu(), expected)
    assert torch.equal(twice.float().cpu(), 2 * expected)
    assert torch.equal(sums.cpu(), torch.full((5,), float(tenth)))


def test_zeros_lie_under_a_mask() -> None:
    x = torch.full((3, 2, 4), torch.nan, device=DEVICE)
    mask = torch.tensor([[1, 0], [0, 0], [1, 1]], dtype=torch.uint8, device=DEVICE)
    x[mask.bool()] = 7.0
    (found,) = played(lambda draft, x, mask: [draft.masked(x, mask)], x=x, mask=mask)
    assert torch.equal(found, x.nan_to_num(0.0))


def test_sums_repeat_a_row(rng: np.random.Generator) -> None:
    """The sum of the rows; a value of fewer axes goes to each row."""
    a = torch.tensor(rng.normal(size=(40, 3)), dtype=torch.float32, device=DEVICE)

    def run(draft: DeviceDraft, a: View) -> list[View]:
        repeated = draft.empty((2, 4, 3))
        repeated[:] = a.sum(0)
        return [repeated]

    (found,) = played(run, a=a)
    assert torch.equal(found, a.sum(0).expand(2, 4, 3))
    with pytest.raises(AssertionError):
        played(lambda draft, a: draft.move(draft.empty((5, 3)), a), a=a)


# -- the memory of a call --------------------------------------------------------------------------
def test_arrays_share_memory_after_their_last_use(rng: np.random.Generator) -> None:
    shared = 0
    for _ in range(50):
        count = int(rng.integers(1, 12))
        sizes = {s: int(n) for s, n in enumerate(rng.integers(0, 2000, count))}
        ends = np.sort(rng.integers(0, 20, (count, 2)))
        lives = {s: (int(a), int(b)) for s, (a, b) in enumerate(ends)}
        begins, total = launches._packed(sizes, lives)
        shared += total < sum(sizes.values())
        for s, begin in begins.items():
            assert begin % 256 == 0 and begin + sizes[s] <= total
            for other in range(s):
                at_once = lives[s][0] <= lives[other][1] and lives[other][0] <= lives[s][1]
                apart = begin + sizes[s] <= begins[other] or begins[other] + sizes[other] <= begin
                assert apart or not at_once
    assert shared > 10


def test_results_keep_nothing_else_alive() -> None:
    """Not even gradients of states, which begin as zeros beside others."""

    def run(draft: DeviceDraft, a: View) -> list[View]:
        other, zeros = draft.zeros((1000,)), draft.zeros((2, 3))
        zeros[1] = a
        other += other
        return [zeros[1]]

    (found,) = played(run, a=torch.ones(3, device=DEVICE))
    assert found.tolist() == [1.0] * 3 and found.untyped_storage().nbytes() == 12


# -- what calls share ------------------------------------------------------------------------------
@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has an entry for each pass that is drafted."""
    drafted: list[str] = []
    for name in ("_draft_forward", "_draft_backward"):
        run = getattr(device, name)

        def noted(*given: Any, run: Any = run, **options: Any) -> Any:
            drafted.append("")
            return run(*given, **options)

        monkeypatch.setattr(device, name, noted)
    return drafted


def test_calls_of_one_form_share_a_recipe(drafts: list[str], rng: np.random.Generator) -> None:
    """Seeds, numbers and addresses differ from call to call; shapes make another form."""
    one = TorchDevice(torch.float32, DEVICE)
    one.tier = 1
    chosen = plan(cells.ZoneoutLSTM, 5, "float32", "gpu")

    def run(rows: int, seed: int, stream: int = 0) -> Any:
        generator = torch.Generator().manual_seed(1)
        shapes = {"x": (3, rows, 20), "weight_hh": (20, 5), "bias_hh": (20,)}
        given = {
            name: torch.randn(shape, generator=generator).to(DEVICE)
            for name, shape in shapes.items()
        }
        how = Options(training=True, seed=seed, stream=stream)
        return device.forward(one, chosen, given, how, keep=False)[0]

    first = run(2, 5)
    assert torch.equal(run(2, 5), first) and not torch.equal(run(2, 6), first)
    assert not torch.equal(run(2, 5, stream=1), first)
    assert torch.equal(run(2, -1), run(2, (1 << 64) - 1))  # 64 bits, signed or not
    assert len(drafts) == 1
    run(3, 5)
    one.patience = 7
    run(3, 5)
    assert len(drafts) == 3


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """A driver that launches nothing, for a card that is not there."""
    driver = Driver()
    binary = build.Binary("", b"", "", 0, 4, 2, 0)
    monkeypatch.setattr(launch, "driver", lambda: driver)
    monkeypatch.setattr(build, "interpreted", lambda: False)
    monkeypatch.setattr(build, "binary", lambda *_: binary)
    monkeypatch.setattr(TorchDevice, "limits", CARDS["H100"])
    launch.loaded.cache_clear()
    yield driver
    launch.loaded.cache_clear()


def test_threads_share_a_recipe_but_no_arguments(
    idle: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []  # stream, address of x

    def started(one: Started) -> int:
        seen.append((one.stream or 0, ctypes.c_uint64.from_address(one.parameters[1]).value))
        return 0

    class Host(TorchDevice):
        def stream(self) -> int:
            return streams[threading.get_ident()]

    streams: dict[int, int] = {}
    monkeypatch.setattr(idle, "launch", started)
    host = Host(torch.float32, torch.device("cpu"))
    draft = DeviceDraft(host, PLAN, {"x": torch.zeros(3)})
    results = [draft.empty((3,)) for _ in range(20)]
    for result in results:
        result[:] = draft.views["x"]
    recipe = draft.finish(results)

    def run(number: int) -> int:
        streams[threading.get_ident()] = number
        x = torch.zeros(3)
        for _ in range(50):
            recipe.run({"x": x}, Options())
        return x.data_ptr()

    addresses = at_once(lambda: run(1), lambda: run(2))
    assert sorted(seen) == sorted(
        [(n, address) for n, address in enumerate(addresses, 1)] * 50 * len(results)
    )


@pytest.mark.parametrize("place", [0, 1])
def test_what_the_compiler_is_told_of_addresses(place: int, idle: Driver) -> None:
    """A kernel for arrays at odd addresses is another one."""
    x = torch.zeros(9)[place:][:8]
    draft = DeviceDraft(TorchDevice(torch.float32, torch.device("cpu")), PLAN, {"x": x})
    made = draft.empty((8,))
    made[:], made[4:] = draft.views["x"], draft.views["x"][:4]
    whole, part = [row.aligned for row in draft.rows]
    assert {"y"} <= whole and {"y"} <= part
    assert ("x" in whole) is ("x" in part) is (place == 0)
    made[1:4] = draft.views["x"][4:7]  # 4 bytes on, and 16
    assert "y" not in draft.rows[-1].aligned and ("x" in draft.rows[-1].aligned) is (place == 0)


CALLS = {"forward": 60, "backward": 100}  # of Python functions


def test_a_warm_call_is_short(idle: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the calls of Python functions, as the clock depends on the machine."""
    cell, counts = cells.PeepholeLSTM, dict.fromkeys(CALLS, 0)
    for name in ("matmul", "matmul_add", "summed"):
        monkeypatch.setattr(TorchDevice, name, lambda *_: None)
    monkeypatch.setattr(Driver, "launch", lambda *_: 0)
    host, one = TorchDevice(torch.float32, torch.device("cpu")), plan(cell, 40, "float32", "gpu")
    shapes = {"x": (4, 3, 160), "weight_hh": (160, 40), "bias_hh": (160,)}
    given = {n: torch.zeros(s) for n, s in shapes.items()} | {
        name: torch.zeros(40) for name in cell.param_names
    }
    runs: dict[str, Callable[[], Any]] = {
        "forward": lambda: device.forward(host, one, given, Options(), keep=True)
    }
    output, _, kept = runs["forward"]()
    wanted = ["x", *cell.param_names]
    runs["backward"] = lambda: device.backward(
        host, one, given, Options(), kept, output, [None, None], wanted=wanted
    )
    for name, run in runs.items():
        run()

        def count(frame: Any, event: str, _: Any, name: str = name) -> None:
            own = "launch" not in frame.f_code.co_name and frame.f_code.co_filename != __file__
            counts[name] += event == "call" and own

        sys.setprofile(count)
        run()
        sys.setprofile(None)
    assert 10 < counts["forward"] <= CALLS["forward"], counts
    assert counts["forward"] < counts["backward"] <= CALLS["backward"], counts


# -- what goes wrong -------------------------------------------------------------------------------
@pytest.mark.skipif(CARD, reason="the kernels are interpreted")
def test_a_refusal_of_a_move_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no other kernel for it; the launch is named, whichever it is."""
    number = 0

    def refused(driver: Interpreter, one: Started) -> int:
        nonlocal number
        number += 1
        return 701 if number == 3 else 0

    monkeypatch.setattr(Interpreter, "launch", refused)

    def run(draft: DeviceDraft, a: View) -> list[View]:
        copies = [draft.empty((5,)) for _ in range(4)]
        for copy in copies:
            copy[:] = a
        return copies

    with pytest.raises(launch.Refused, match=r"kernel move cannot run .* does not launch 1 x 1"):
        played(run, a=torch.zeros(5))
    assert number == 3


@pytest.mark.skipif(CARD, reason="the kernels are interpreted")
def test_an_error_of_the_interpreter_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("of the kernel")

    monkeypatch.setattr(Interpreter, "start", broken)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="of the kernel"):
            played(lambda draft, a: [a + a], a=torch.zeros(5))
