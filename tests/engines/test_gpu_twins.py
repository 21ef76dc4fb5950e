"""Both directions of a layer in one launch of a kernel's twin: the bits of two launches, fewer
launches, and what happens where a device refuses them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

# Before anything else that may import Triton.
from gpu import CARD, CARDS, DEVICE, Poisoned, reports, torch, without_a_card
from problems import draw, layer_options
from tolerances import assert_close

from anycell import Cell, cells
from anycell.engines.gpu import capacity, cooperative, launch, refusals
from anycell.engines.gpu.interpreter import Interpreter, Started
from anycell.engines.gpu.launch import Loaded
from anycell.engines.gpu.moves import print_move
from anycell.engines.gpu.player import NUMBER, Argument
from anycell.engines.gpu.player import Launched as Launch
from anycell.engines.gpu.twins import print_twins
from anycell.layer import gpu as device
from anycell.layer import recipe
from anycell.layer.twins import of_calls
from anycell.plan import plan
from tests.engines.test_gpu import SHARED, assert_fits

BUILT_IN = [c for c in vars(cells).values() if isinstance(c, Cell)]
FLAGS = "state", "mask", "resets", "reset_state"
DTYPES = "float32", "float16", "bfloat16"
CASES = [
    (cells.PeepholeLSTM, 1, "float16", FLAGS),
    (cells.GRU, 2, "float32", FLAGS),
    *(
        pytest.param(cell, tier, dtype, has, marks=pytest.mark.slow)
        for cell in BUILT_IN
        for tier in (1, 2)
        if tier == 1 or cell.name in {c.name for c in SHARED}
        for dtype, has in (("float32", ()), *((dtype, FLAGS) for dtype in DTYPES))
    ),
]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels of all launches."""
    names, run = list[str](), Interpreter.launch

    def started(driver: Interpreter, one: Started) -> int:
        names.append(driver.kernels[one.handle - 1].name)
        return run(driver, one)

    monkeypatch.setattr(Interpreter, "launch", started)
    return names


@pytest.fixture
def anew() -> Iterator[None]:
    """Without refusals of other tests."""
    refusals.forget()
    recipe.known.clear()
    yield
    refusals.forget()
    recipe.known.clear()


def solve(
    cell: Cell,
    tier: int | None,
    twins: bool,
    has: tuple[str, ...] = (),
    dtype: str = "float32",
    size: tuple[int, int, int, int] = (2, 3, 2, 18),
    checkpoint: int | None = None,
    limits: Any = None,
) -> dict[str, Any]:
    """Results and gradients of a layer of two directions."""
    problem = draw(cell, size, (*has, "bidirectional"), "float32", solvable=False)
    one = plan(cell, problem.sizes["H"], dtype, "gpu", problem.sizes)
    host = Poisoned(getattr(torch, dtype), DEVICE)
    host.tier, host.twins = tier, twins
    if limits:
        host.limits = limits

    def array(value: Any) -> Any:
        flags = value.dtype == bool
        return torch.tensor(value.view(np.uint8) if flags else value, device=DEVICE).to(
            torch.uint8 if flags else host.dtype
        )

    every = {name.replace("_l0", ""): array(a) for name, a in problem.arrays.items()}
    arrays = {name: a for name, a in every.items() if not name.startswith("d ")}
    drawn = {"training": bool(cell.keeps), "seed": 5 * bool(cell.keeps)}
    how = layer_options(problem)._replace(checkpoint=checkpoint, **drawn)
    with np.errstate(all="ignore"):
        output, finals, kept = device.forward(host, one, arrays, how, keep=True)
        ends = [every[f"d final {name}"] for name in cell.state_names]
        d = device.backward(host, one, arrays, how, kept, every["d output"], ends)
    return {"output": output, **dict(zip(cell.state_names, finals, strict=True))} | {
        f"d {name}": a for name, a in d.items()
    }


def assert_bits(some: dict[str, Any], others: dict[str, Any]) -> None:
    assert some.keys() == others.keys()
    for name, value in some.items():
        assert torch.equal(value.nan_to_num(7.0), others[name].nan_to_num(7.0)), name


# -- results ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(("cell", "tier", "dtype", "has"), CASES)
def test_the_bits_of_two_launches(
    cell: Cell, tier: int, dtype: str, has: Any, launched: list[str]
) -> None:
    """Of every cell, in about half as many launches."""
    twins = solve(cell, tier, True, has, dtype)
    together = [*launched]
    launched.clear()
    assert_bits(twins, solve(cell, tier, False, has, dtype))
    if not CARD:
        both = [name for name in together if name.endswith("_twins")]
        assert {name.partition("_")[0] for name in both} == {"forward", "backward", "move"}
        assert not any(name.endswith("_twins") for name in launched)
        others = [name for name in together if name not in {*both, "fill"}]  # fill: random masks
        assert len(launched) - len(together) == len(both) > len(others)


@pytest.mark.parametrize("checkpoint", [None, pytest.param(16, marks=pytest.mark.slow)])
def test_chunks_of_time(checkpoint: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several chunks the gradient of x is a sum in another order."""
    monkeypatch.setattr(device, "CHUNK_BYTES", 1)
    how: dict[str, Any] = {"size": (20, 2, 2, 3), "checkpoint": checkpoint}
    twins, apart = (solve(cells.RNN, 1, both, **how) for both in (True, False))
    close = [some.pop("d x").cpu().numpy() for some in (twins, apart)]
    assert_bits(twins, apart)
    assert_close(*close, "float32", "gradient")


# -- where a device has no room for them -----------------------------------------------------------
@without_a_card
@pytest.mark.parametrize("by", ["the driver", "its occupancy"])
def test_refused_twins_are_two_launches(
    by: str, launched: list[str], anew: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results stay, and the reason is told."""
    right = solve(cells.RNN, 2, False, dtype="float16")
    launched.clear()
    if by == "the driver":
        run = Interpreter.launch

        def refuse(driver: Interpreter, one: Started) -> int:
            return 720 if one.cooperative and one.grid[2] > 1 else run(driver, one)

        monkeypatch.setattr(Interpreter, "launch", refuse)
    else:
        loaded: Callable[..., Loaded] = launch.loaded
        monkeypatch.setattr(launch, "loaded", lambda *given: loaded(*given)._replace(together=1))
    found = solve(cells.RNN, 2, True, dtype="float16", limits=CARDS["H100"])
    assert_bits(found, right)
    assert not any(name.endswith("_twins") for name in {*launched} - {"move_twins"})
    forward, *_ = map(str, refusals.of_plan(plan(cells.RNN, 18, "float16", "gpu", {"H": 18})))
    assert "2 passes in a launch, forward: " in forward
    assert ("programs do not run at once, 1 do" in forward) is (by == "its occupancy")


def test_twins_that_do_not_fit_by_the_model() -> None:
    """They are not tried, and the choice says why; smaller layers take other slices for twins."""
    one, card = plan(cells.LSTM, 1500, "bfloat16", "gpu"), CARDS["H100"]
    best = capacity.choose(one, card, twins=2)
    assert best.twins == 1 and best.part == capacity.choose(one, card).part
    why = "; its 2 passes one after the other: 16 rows take 188 programs, of which 132 run at once"
    assert best.reason.endswith(why)
    rows = {row[:2]: row[2] for row in capacity.table(one)}
    assert rows["H100", "forward"].endswith(why)
    for hidden in (64, 768):
        one = plan(cells.LSTM, hidden, "bfloat16", "gpu")
        every = capacity.choices(one, card, twins=2)
        assert every[0].twins == 2 and "2 passes in a launch" in str(every[0])
        singles = [choice for choice in every if choice.twins == 1]
        assert singles == list(capacity.choices(one, card))
        assert {row[2].rpartition("; ")[2] for row in capacity.table(one) if row[0] == "H100"} == {
            "both directions in a launch"
        }
    assert capacity.choose(plan(cells.LSTM, 5000, "bfloat16", "gpu"), card, twins=2).tier == 3


# -- the text --------------------------------------------------------------------------------------
def test_what_differs_between_twins() -> None:
    """Addresses and the way of time; not sizes, flags of steps, masks and what is shared."""
    one = plan(cells.LSTM, 64, "float32", "gpu")
    form = device.Variant(mask=True, keep=True, biases=(True,))
    part = cooperative.Slice(16, 16, 128, 1, 4, 0)
    kernel = cooperative.print_cooperative(one, form, part)
    twin = print_twins(kernel)
    same = {name for name, _ in kernel.arguments} - {*twin.apart}
    shared = "batch count turn done patience trouble mask".split()
    assert same == {*shared, *(name for name in same if name.endswith("__b"))}
    assert {"weight0", "hidden", "flags", "mask__0", "mask__t"} <= {*twin.apart}
    assert twin.source.startswith(kernel.source.partition("\n\nimport")[0])
    addresses = {name for name, kind in kernel.arguments if kind[0] == "*"}
    assert {*print_twins(kernel, calls=True).apart} == addresses - {"trouble"}
    both = print_twins(twin, calls=True, inside=2)
    assert {*both.apart} == addresses - {"trouble"}
    for line in (
        "weight0 = of_pass(weight0, weight0__call, tl.program_id(2) // 2)",
        "weight0 = of_pass(weight0, weight0__apart, tl.program_id(2) % 2)",
        "hidden__t += tl.program_id(2) % 2 * hidden__t__apart",
    ):
        assert f"    {line}\n" in both.source


@without_a_card
@pytest.mark.slow
@pytest.mark.parametrize("cell", ["LSTM", "GRU", "PeepholeLSTM"])
def test_twins_compile_without_spills(cell: str) -> None:
    """Up to 256 units on sm_90, in both tiers, in bfloat16; others spill a little, as float32 does
    in a launch for each direction.
    """
    given = "--dtypes float32 tf32 bfloat16 --capabilities 90 --largest 256 --directions 2"
    found = reports("--cells", cell, "--tiers", "1", "2", *given.split())
    assert_fits(found)
    assert {report["tier"] for report in found} == {1, 2}
    for report in found:
        assert report["kernel"].endswith("_twins")
        assert report["dtype"] != "bfloat16" or report["spilled"] == 0, report


def test_what_is_known_of_addresses_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """In launches one after the other, an address is as aligned as its array's place, and one of
    which nothing is known stays so.
    """
    kernel = print_move("fp32", "fp32", True, False)
    numbers = {"y": Argument(0, 32, 32), "x": Argument(1, 0, 16), "m": Argument(2, 0, 1)}
    arguments = tuple(numbers.get(name, Argument(NUMBER, 5, 5)) for name, _ in kernel.arguments)
    one = Launch(kernel, (1, 1), arguments)

    def refused(self: Launch, device: int) -> None:
        raise refusals.Refused(self.printed, "the test says so")

    monkeypatch.setattr(Launch, "loaded", refused)
    names = [name for name, _ in kernel.arguments]
    found = [
        dict(zip(names, launched.arguments, strict=True))
        for launched in of_calls(one, 3, [8, 64, 15], 0)
    ]
    assert [call["y"].offset for call in found] == [32, 40, 48]
    assert [call["x"].offset for call in found] == [0, 64, 128]
    assert [call["m"].offset for call in found] == [0, 15, 30]
    assert [call["y"].known % 16 for call in found] == [0, 8, 0]
    assert all(call["x"].known % 16 == 0 and call["m"].known % 16 for call in found)
    assert all(call["count"] == Argument(NUMBER, 5, 5) for call in found)


def test_calls_whose_directions_differ_from_one_another() -> None:
    """They are launches of their own, where the distance from direction to direction is another in
    each call.
    """
    kernel = print_twins(print_move("fp32", None))
    own = tuple(
        Argument(0, 0, 0) if n == "y" else Argument(NUMBER, 5, 5) for n, _ in kernel.arguments[:-1]
    )
    both = Launch(kernel, (1, 1, 2), (*own, Argument(1, 0, 16, 0)))
    (together,) = of_calls(both, 3, [8, 8], 0)
    assert together.grid == (1, 1, 6) and together.arguments[-1] == Argument(NUMBER, 8, 8)
    each = of_calls(both, 3, [0, 8], 0)
    assert [one.grid for one in each] == [(1, 1, 2)] * 3
    assert [one.arguments[-1].offset for one in each] == [0, 8, 16]
