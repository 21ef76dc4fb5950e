"""Passes that are drafted once: in what later calls may differ, and what asks for another draft;
layouts that the contract has accepted: others are still copied, or refused.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from problems import Adding, forget_passes
from processes import at_once
from tolerances import assert_close
from variants import variants

import anycell.numpy
from anycell import Cell, cells, layer
from anycell.engines import cpu
from anycell.engines.cpu import driver
from anycell.layer import contract, recipe
from anycell.numpy.framework import Numpy
from anycell.plan import plan

Array = npt.NDArray[Any]
T, B, I, H = 5, 3, 4, 6
HOST, PLAN = Numpy("float64"), plan(cells.PeepholeLSTM, H, "float64")


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    recipe.known.clear()
    yield
    recipe.known.clear()


def arrays(rng: np.random.Generator, steps: int = T) -> dict[str, Array]:
    shapes = {"x": (steps, B, I)} | layer.shapes(PLAN.cell, {"H": H}, I, True)
    shapes |= {"state h": (1, B, H), "state c": (1, B, H)}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def solve(
    given: dict[str, Array], shift: Callable[[Array], Array] = np.copy, **options: Any
) -> dict[str, Array]:
    """Outputs, final states, and gradients; what is kept, and what arrives at the final states, is
    laid out as ``shift`` says.
    """
    how = layer.Options(training=True, **options)
    out, (h, c), kept = layer.forward(HOST, PLAN, given, how, keep=True)
    assert kept is not None
    kept = kept._replace(hidden=shift(kept.hidden), values=[shift(v) for v in kept.values])
    gradients = layer.backward(HOST, PLAN, given, how, kept, out, [shift(h), None])
    return {"out": out, "h": h, "c": c, **{f"d {name}": d for name, d in gradients.items()}}


def copies(given: dict[str, Array]) -> dict[str, Array]:
    """The same numbers elsewhere."""
    return {name: array.copy() for name, array in given.items()}


def same(ours: dict[str, Array], theirs: dict[str, Array]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_a_later_call_fills_in_other_addresses(rng: np.random.Generator) -> None:
    given = arrays(rng)
    first = solve(given)
    count = len(recipe.known)
    assert count == 2  # forward and backward
    kept = {name: array.copy() for name, array in first.items()}
    other = solve(arrays(rng))
    same(solve(copies(given)), kept)
    same(first, kept)  # results are arrays of their own
    assert not np.array_equal(other["out"], kept["out"])
    assert len(recipe.known) == count


def test_one_array_in_two_places(rng: np.random.Generator) -> None:
    """That two names stood for one array in the first call says nothing of the next."""
    given = arrays(rng)
    solve(given | {"bias_hh": given["bias_ih"], "state c": given["state h"]})
    later = solve(given)
    recipe.known.clear()
    same(later, solve(given))


@pytest.mark.parametrize(
    "change",
    [
        {"reverse": (True,)}, {"checkpoint": 2}, {"threads": 2}, {"masked_output": "repeat"},
    ],
    ids=str,
)  # fmt: skip
def test_options_that_ask_for_another(change: dict[str, Any], rng: np.random.Generator) -> None:
    given = arrays(rng) | {"mask": rng.integers(0, 2, (T, B)).astype(bool)}
    solve(given)
    count = len(recipe.known)
    ours = solve(given, **change)
    assert len(recipe.known) == 2 * count
    recipe.known.clear()
    same(ours, solve(given, **change))


def test_seeds_do_not(rng: np.random.Generator) -> None:
    """Of a cell that draws: every seed, and every layer's number, has masks of its own. Seeds have
    64 bits, and come as they are: those of a framework are signed.
    """
    chosen = plan(cells.ZoneoutLSTM(zoneout_h=0.5), H, "float64")
    given = arrays(rng)
    found = [
        layer.forward(HOST, chosen, given, layer.Options(training=True, seed=seed, stream=stream),
                      keep=False)[0]
        for seed, stream in ((0, 0), (1, 0), (0, 1), (2**64 - 7, 0), (-7, 0), (0, 0))
    ]  # fmt: skip
    assert len(recipe.known) == 1
    assert np.array_equal(found[0], found[-1]) and np.array_equal(found[3], found[4])
    assert len({out.tobytes() for out in found}) == 4


def test_layouts_that_ask_for_another(rng: np.random.Generator) -> None:
    """Strides and shapes; a copy is made of what lies as no kernel reads it."""
    given = arrays(rng)
    exact = solve(given)
    turned = {
        "x": given["x"].transpose(1, 0, 2).copy().transpose(1, 0, 2),
        "weight_ih": np.asfortranarray(given["weight_ih"]),
        "state h": np.repeat(given["state h"], 2, -1)[:, :, ::2],
        "bias_hh": np.repeat(given["bias_hh"], 2)[::2],
    }
    for name, array in turned.items():
        for _ in range(2):
            ours = solve(given | {name: array})
            for key, value in ours.items():
                assert_close(value, exact[key], "float64", "gradient", f"{name}: {key}")
    assert len(recipe.known) == 2 * 4  # that of a bias is the same, once it is copied
    solve(arrays(rng, T + 1))
    assert len(recipe.known) == 2 * 5


def unaligned(a: Array) -> Array:
    return dict(variants(a))["1 bytes past an element"]


@pytest.mark.parametrize("shift", [np.asfortranarray, unaligned])
def test_layouts_are_looked_at_again(
    shift: Callable[[Array], Array], rng: np.random.Generator
) -> None:
    """One that is copied is never among those that go as they are."""
    given = arrays(rng)
    expected, known = solve(given), len(contract._accepted)
    for _ in range(2):
        for name, array in given.items():
            same(solve(given | {name: shift(array)}), expected)
        same(solve(given, shift), expected)
    # Weights lie well either way, and so do states of any strides.
    assert len(contract._accepted) - known < 2 * len(given)


def test_a_state_that_is_kept_for_nothing_is_left_out_each_time(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "_accepted", {})  # which forgets one for each, when it is full
    one = plan(Adding, H, "float64")
    assert "c" not in one.states
    shapes = contract.kept_shapes(one, T, B, (False,), [False, True])
    hidden, sequence, values = (
        rng.standard_normal(shape)
        for shape in (shapes.hidden, shapes.states[0][1], shapes.values[0])
    )
    for states, accepted in ([None, sequence], False), ([None, None], True):
        known = len(contract._accepted)
        for _ in range(2):
            parts, _ = contract.fit_gradients(
                HOST, one, (T, B, I), (False,), layer.Kept(hidden, [states], [values]), None,
                [None, None], {}, segment=T, keeps=layer.keeps_state,
            )  # fmt: skip
            assert list(parts) == ["hidden", "saved 0"]
        assert len(contract._accepted) - known == accepted


def test_others_are_refused_as_before(rng: np.random.Generator) -> None:
    given = arrays(rng)
    solve(given)
    for name, array in given.items():
        with pytest.raises(TypeError, match="float32"):
            solve(given | {name: array.astype(np.float32)})
        if name != "x":
            with pytest.raises(ValueError, match="given shape"):
                solve(given | {name: array[..., :-1]})


@pytest.mark.parametrize("name", ["static", "recurrent_mask"])
def test_arrays_that_a_cell_does_not_take_are_refused(name: str, rng: np.random.Generator) -> None:
    with pytest.raises(ValueError, match=f"{name}: given float64; expected nothing: .*Peephole"):
        solve(arrays(rng) | {name: np.ones((B, H))})


def test_so_many_layouts_are_known(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arrays(rng)
    expected = solve(given)
    monkeypatch.setattr(contract, "_MOST", 1)
    for _ in range(2):
        same(solve(given), expected)
    contract._accepted.clear()
    solve(given)
    assert len(contract._accepted) == 1


def test_instruction_sets_and_forks_ask_for_another(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arrays(rng)
    solve(given)
    names = {cpu.isa.available()[0], cpu.isa.current().name}
    for name in names:
        with cpu.isa.force(name):
            solve(given)
    assert len(recipe.known) == 2 * len(names)
    monkeypatch.setattr(cpu.pool, "FORKED", not cpu.pool.FORKED)
    count = len(recipe.known)
    solve(given)
    assert len(recipe.known) == count + 2


def test_so_many_are_known(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest one goes, and no other."""
    monkeypatch.setattr(recipe, "_RECIPES", 4)
    for steps in range(1, 8):
        given, before = arrays(rng, steps), list(recipe.known)
        ours = solve(given)
        assert list(recipe.known)[:-2] == before[-2:]
        same(ours, solve(given))
        assert len(recipe.known) == min(2 * steps, 4)


def test_nothing_of_a_call_stays(rng: np.random.Generator) -> None:
    given = arrays(rng)
    results = solve(given)
    left = [weakref.ref(array) for array in (*given.values(), *results.values())]
    assert recipe.known
    del given, results
    gc.collect()
    assert not [ref() for ref in left if ref() is not None]


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (2, 1, 1), (1,), (0, 3), (3, 0, 2), (5, 1, 3), (7, 2)]
)
def test_arrays_of_templates_are_dense(shape: tuple[int, ...]) -> None:
    """Also those of one number or none, whose strides nobody reads but a compiler."""
    made = HOST.like(HOST.template(shape))
    assert made.shape == shape and made.strides == np.empty(shape, made.dtype).strides
    torch = pytest.importorskip("torch")
    from anycell.torch.framework import Torch

    made = Torch.of("float32").like(Torch.of("float32").template(shape))
    assert made.shape == shape and made.stride() == torch.empty(shape).stride()


def test_threads_share_a_recipe(rng: np.random.Generator) -> None:
    problems = [arrays(rng) for _ in range(8)]
    wanted = [solve(problem) for problem in problems]

    def work(k: int) -> None:
        for _ in range(30):
            same(solve(problems[k]), wanted[k])

    at_once(*[partial(work, k) for k in range(8)])


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(
    "cell", [cells.LSTM, cells.GRU(reset_after=False), cells.PeepholeLSTM, cells.sLSTM(heads=2)],
    ids=str,
)  # fmt: skip
@pytest.mark.sample(every=8)
def test_bits_do_not_depend_on_threads(
    cell: Cell, dtype: str, rng: np.random.Generator, set_layer: Callable[..., None]
) -> None:
    """Neither those of outputs nor those of any gradient, weights and biases included."""
    set_layer(WORTH_A_THREAD=0, CHUNK_BYTES=1 << 14)
    hidden, host, chosen = 40, Numpy.of(dtype), plan(cell, 40, dtype, "cpu")
    for rows, inputs, directions in ((1, 3, 1), (9, 20, 2), (40, 100, 1)):
        reverse = (False, True)[:directions]
        learned = {
            name + end: rng.standard_normal(shape).astype(host.dtype)
            for end in layer.ENDS[:directions]
            for name, shape in layer.shapes(cell, {"H": hidden}, inputs, True).items()
        }
        x = rng.standard_normal((20, rows, inputs)).astype(host.dtype)
        given = {**learned, "x": x, "mask": rng.integers(0, 4, (20, rows)) > 0}
        found = []
        for threads in (1, 2, 3):
            how = layer.Options(reverse=reverse, training=True, threads=threads)
            out, finals, kept = layer.forward(host, chosen, given, how, keep=True)
            assert kept is not None
            gradients = layer.backward(host, chosen, given, how, kept, out, finals)
            found.append({"out": out, **gradients})
        for other in found[1:]:
            for name, value in found[0].items():
                assert value.tobytes() == other[name].tobytes(), (rows, name)


def test_a_pass_compiles_the_matmuls_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    names, compiled = set[str](), driver.matmul

    def matmul(name: str, *rest: Any) -> driver.Matmul:
        names.add(name)
        return compiled(name, *rest)

    monkeypatch.setattr(driver, "matmul", matmul)
    forget_passes()
    for inputs, hidden, shape, wanted in (
        (8, 200, (300, 16), set()),  # the kernel multiplies the input
        (300, 160, (1, 1), {"few"}),
        (300, 12, (5, 7), {"gemm"}),
    ):
        names.clear()
        layer = anycell.numpy.LSTM(inputs, hidden, seed=0)
        layer(np.zeros((*shape, inputs), "float32"))
        assert names == wanted
    output, _ = layer(np.ones((5, 7, 300), "float32"), training=True)
    layer.backward(output)
    assert names == {"gemm", "columns"}
