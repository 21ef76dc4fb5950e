"""What every test file shares: the command line options, the random seeds and the guards."""

import collections
import contextlib
import datetime
import gc
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import cards
import numpy as np
import pytest
from cards import (  # noqa: F401 (hooks)
    pytest_runtest_makereport,
    pytest_runtest_protocol,
    pytest_runtest_setup,
)

os.environ.setdefault("ANYCELL_CHECK", "1")  # every native call is held against its arrays
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
cards.choose_interpreter()
# Triton reads that now; and it must come before TensorFlow: both bring an LLVM, and Triton's aborts
# the process when it is the second.
with contextlib.suppress(ImportError):
    import triton  # noqa: F401


OPTIONS = {
    "seed": (1997, "seed of everything random"),
    "random-cells": (3, "how many random cells the property test builds"),
    "random-calls": (20, "how many random calls of layers, in groups of a cell and dtype"),
    "edits": (30, "how many edits of weights are tried per layer"),
    "days": (1, "spread slow cases, and those of grids, over N days (1: run all now)"),
    "day": (datetime.date.today().toordinal(), "which day's share of them"),
    "mutations": (100, "how many damaged files of a kind; 10 times as many where slow tests run"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("anycell")
    for name, (default, about) in OPTIONS.items():
        about += " (default: %(default)s)"
        group.addoption(f"--{name}", type=int, default=default, metavar="N", help=about)


def pytest_report_header(config: pytest.Config) -> str:
    isa = os.environ.get("ANYCELL_ISA", "widest")
    seed, cells, day, days = map(config.getoption, ("seed", "random_cells", "day", "days"))
    share = f"day {day} of every {days}" if days > 1 else "all slow cases"
    return f"anycell: seed {seed}, {cells} random cells, {share}, instruction set: {isa}"


# -- selection -----------------------------------------------------------------------------------
def day_of(item: str, days: int) -> int:
    """On which of ``days`` a case runs, by its name: so many days in a row run all."""
    return zlib.crc32(item.encode()) % days


# Files that one instruction set is enough for. Any other file runs under each.
FIXED_ISA = {
    # They choose it themselves, and try all.
    *("test_cpu_math.py", "test_properties.py", "test_random_calls.py"),
    # They reach no kernel of the CPU engine.
    *("test_cards.py", "test_gpu.py", "test_gpu_tools.py", "test_lang.py", "test_layouts.py"),
    *("test_package.py", "test_rooms.py", "test_same_bits.py"),
    *("test_reference.py", "test_selection.py", "test_tolerances.py", "test_torch_gpu.py"),
    # They look at what is around a kernel, which is the same one on both sides.
    *("test_bench.py", "test_demo.py", "test_docs.py", "test_gallery.py", "test_keras_examples.py"),
    *("test_torch_compile.py", "test_torch_distributed.py", "test_types.py"),
}


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests of those files, and as slow the cases that are not of a sample; leaves out
    what other days run: of a slow test with parameters, and of a grid, most cases.
    """
    cases: collections.Counter[tuple[object, str]] = collections.Counter()
    for item in items:
        if item.path.name in FIXED_ISA:
            item.add_marker("fixed_isa")
        sample = item.get_closest_marker("sample")
        if sample and not item.get_closest_marker("slow"):
            function = item.path, item.name.partition("[")[0]
            number, every = cases[function], sample.kwargs.get("every")
            cases[function] += 1
            if number % every if every else number >= sample.args[0]:
                item.add_marker("slow")
    day, days = map(config.getoption, ("day", "days"))

    def due(item: pytest.Item) -> bool:
        many = "[" in item.name and any(map(item.get_closest_marker, ("slow", "grid")))
        return not many or day_of(item.name, days) == day % days

    config.hook.pytest_deselected(items=[item for item in items if not due(item)])
    items[:] = [item for item in items if due(item)]


# -- randomness ----------------------------------------------------------------------------------
@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("seed")


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """Each test draws from the start of the same stream, whatever ran before it."""
    return np.random.default_rng(seed)


@pytest.fixture(autouse=True)
def seeded(seed: int) -> None:
    """The frameworks that are there draw anew as well."""
    if (keras := sys.modules.get("keras")) is not None:
        keras.utils.set_random_seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


@pytest.fixture(params=[1, pytest.param(10, marks=pytest.mark.slow)], ids=["sample", "all"])
def mutation_seeds(request: pytest.FixtureRequest, seed: int) -> range:
    """One for each damaged file, so that the one of seed 2005 is seen again, alone, with `--seed
    2005 --mutations 1`.
    """
    return range(seed, seed + request.config.getoption("mutations") * request.param)


@pytest.fixture
def calls_of_cell(request: pytest.FixtureRequest) -> int:
    return _calls_of_cell(request.config)


def _calls_of_cell(config: pytest.Config) -> int:
    """So many random calls share a compiled cell: compiling takes longer than most of them.

    More calls repeat the fewer ones first, so a case fails again with any larger number.
    """
    return max(10, config.getoption("random_calls") // 200)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with a `cell_seed` argument runs `--random-cells` times, from `--seed` upwards.

    So the case `[2005]` is seen again, alone, with `--seed 2005 --random-cells 1`.
    """
    if "cell_seed" in metafunc.fixturenames:
        first = metafunc.config.getoption("seed")
        count = metafunc.config.getoption("random_cells")
        metafunc.parametrize("cell_seed", range(first, first + count))
    if "calls_seed" in metafunc.fixturenames:
        first = metafunc.config.getoption("seed")
        groups = -(-metafunc.config.getoption("random_calls") // _calls_of_cell(metafunc.config))
        metafunc.parametrize("calls_seed", range(first, first + groups))


# -- layers -------------------------------------------------------------------------------------
@pytest.fixture
def set_layer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Has layers on the CPU decide otherwise: ``set_layer(chunk_steps=lambda *_: 2)``.

    Every module of the package that knows a name gets the new value.
    """
    from problems import forget_passes

    from anycell import layer

    modules = layer, layer.choices

    def change(**values: object) -> None:
        for name, value in values.items():
            homes = [module for module in modules if hasattr(module, name)]
            assert homes, f"no layer decides by {name}"
            for module in homes:
                monkeypatch.setattr(module, name, value)
        forget_passes()

    yield change
    forget_passes()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The passes of all calls of layers on the CPU that are drafted from here on."""
    from anycell import layer

    layer.recipe.known.clear()  # a pass that is known is not drafted
    begin, taken = layer.run.Run._begin, []

    def spy(run: Any, *args: Any) -> None:
        begin(run, *args)
        taken.append(run)

    monkeypatch.setattr(layer.run.Run, "_begin", spy)
    return taken


@pytest.fixture
def two_threads() -> Iterator[None]:
    """As many for torch and for the engine."""
    import torch

    from anycell.engines import cpu

    before, ours = torch.get_num_threads(), cpu.pool.threads()
    torch.set_num_threads(2)
    cpu.pool.set_threads(2)
    yield
    torch.set_num_threads(before)
    cpu.pool.set_threads(ours)


# -- guards --------------------------------------------------------------------------------------
@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Iterator[None]:
    """Kernels compiled by tests neither come from the user's cache nor end up there.

    The workers of one run share a cache; set ANYCELL_CACHE_DIR to keep one between runs.
    """
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as empty:
        if "ANYCELL_CACHE_DIR" not in os.environ:
            patch.setenv("ANYCELL_CACHE_DIR", empty)
        return (yield)


def pytest_collection_finish() -> None:
    """What is imported by now stays: searching it for garbage takes an eighth of all time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run whose tests were all skipped has shown nothing, and fails as one without tests."""
    gc.unfreeze()
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus or reporter is None or session.config.option.collectonly:
        return
    if not reporter.stats.get("passed"):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
