"""Shared by all test files: the command line options, the random seeds and the guards."""

import atexit
import collections
import contextlib
import datetime
import gc
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import cards
import numpy as np
import pytest
from cards import (  # noqa: F401 (hooks)
    pytest_runtest_makereport,
    pytest_runtest_protocol,
    pytest_runtest_setup,
)

os.environ.setdefault("ANYCELL_CHECK", "1")  # checks every native call against its arrays
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
cards.choose_interpreter()
# Triton reads the variable at its import. It must come before TensorFlow: both bring an LLVM, and
# Triton's aborts the process if it is loaded second.
with contextlib.suppress(ImportError):
    import triton  # noqa: F401

    cards.hasten_interpreter()

HERE = Path(__file__).parent

OPTIONS = {
    "seed": (1997, "seed of everything random"),
    "random-cells": (2, "how many random cells the property test builds"),
    "random-calls": (10, "how many random calls of layers, in groups of a cell and dtype"),
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
    """Returns the day of ``days`` on which a case runs: ``days`` days in a row run all cases."""
    return zlib.crc32(item.encode()) % days


# Files whose tests run under one instruction set. All other files run under each of them.
FIXED_ISA = {
    # They choose the instruction set themselves, and try all.
    *("engines/test_cpu_math.py", "engines/test_properties.py", "frontends/test_random_calls.py"),
    # They reach no kernel of the CPU engine.
    *("engines/test_gpu.py", "engines/test_gpu_exchange.py", "engines/test_gpu_inner.py"),
    *("engines/test_gpu_refusals.py", "engines/test_gpu_rounds.py", "engines/test_gpu_twins.py"),
    *("engines/test_reference.py", "engines/test_tritons.py", "frontends/test_layouts.py"),
    *("lang/test_functions.py", "lang/test_lang.py", "project/test_cards.py"),
    *("project/test_gpu_tools.py", "project/test_package.py", "project/test_release.py"),
    *("project/test_rooms.py", "project/test_same_bits.py", "project/test_selection.py"),
    *("project/test_tolerances.py", "project/test_words.py", "exporter/test_export.py"),
    *("exporter/test_machines.py", "jax/test_card.py", "torch/test_gpu.py"),
    # They test the code around a kernel; the kernel is the same on both sides.
    *("keras/test_examples.py", "project/test_demo.py", "project/test_docs.py"),
    *("project/test_gallery.py", "project/test_guides.py", "project/test_types.py"),
    *("frontends/test_malformed.py", "frontends/test_users_programs.py", "jax/test_devices.py"),
    *("test_bench.py", "test_cli.py", "tf1/test_programs.py"),
    *("torch/test_compile.py", "torch/test_distributed.py", "torch/test_modes.py"),
    # They test how cells are read; other tests run such cells under each instruction set.
    *("read/test_body.py", "read/test_changes.py", "read/test_jax.py", "read/test_keras.py"),
    *("read/test_proof.py", "read/test_torch.py"),
}


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests of ``FIXED_ISA``, and marks cases outside of a sample as slow. Deselects the
    cases that other days run: most cases of a grid and of a slow test with parameters.
    """
    cases: collections.Counter[tuple[object, str]] = collections.Counter()
    for item in items:
        if item.path.relative_to(HERE).as_posix() in FIXED_ISA:
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
        grid = item.get_closest_marker("grid")
        many = "[" in item.name and (grid or item.get_closest_marker("slow"))
        span = days * (grid.args[0] if grid and grid.args and days > 1 else 1)
        return not many or day_of(item.name, span) == day % span

    config.hook.pytest_deselected(items=[item for item in items if not due(item)])
    items[:] = [item for item in items if due(item)]


# -- randomness ----------------------------------------------------------------------------------
@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("seed")


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """A generator at the start of the same stream for each test, whatever ran before it."""
    return np.random.default_rng(seed)


@pytest.fixture(autouse=True)
def seeded(seed: int) -> None:
    """Seeds the frameworks that are imported."""
    if (keras := sys.modules.get("keras")) is not None:
        keras.utils.set_random_seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def kernels_run_short_sequences() -> None:
    """Kernels run what loops do in less time: tests have few steps of few numbers."""
    if (short := sys.modules.get("anycell.read.short")) is not None:
        short.MOST |= {"numpy": 0, "tensorflow": 0}


@pytest.fixture
def torch_in_float64() -> Iterator[None]:
    """Makes PyTorch's numbers float64 that a test gives no dtype."""
    import torch

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=[1, pytest.param(10, marks=pytest.mark.slow)], ids=["sample", "all"])
def mutation_seeds(request: pytest.FixtureRequest, seed: int) -> range:
    """A seed for each damaged file. `--seed 2005 --mutations 1` repeats the file of seed 2005
    alone.
    """
    return range(seed, seed + request.config.getoption("mutations") * request.param)


@pytest.fixture
def calls_of_cell(request: pytest.FixtureRequest) -> int:
    return _calls_of_cell(request.config)


def _calls_of_cell(config: pytest.Config) -> int:
    """The number of random calls that share a compiled cell: compiling takes longer than most.

    A larger number repeats the calls of a smaller one first, so a case that failed fails again.
    """
    return max(10, config.getoption("random_calls") // 200)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test with a `cell_seed` argument `--random-cells` times, from `--seed` upwards.

    `--seed 2005 --random-cells 1` repeats the case `[2005]` alone.
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
    """Overrides choices of layers on the CPU: ``set_layer(chunk_steps=lambda *_: 2)``.

    The new value is set in ``layer`` and ``layer.heuristics``, wherever the name exists.
    """
    from problems import forget_passes

    from anycell import layer

    modules = layer, layer.heuristics

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
    """A list of all passes that layers on the CPU draft from here on."""
    from problems import forget_passes

    from anycell import layer

    forget_passes()  # known passes are not drafted again
    make, taken = layer.pass_tables.PassTables.__init__, []

    def spy(run: Any, *args: Any) -> None:
        make(run, *args)
        taken.append(run)

    monkeypatch.setattr(layer.pass_tables.PassTables, "__init__", spy)
    return taken


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list of the number of rows of each step that ran on packed weights."""
    from anycell.layer.stream import Stream

    found, step = list[int](), Stream.step

    def watched(stream: Stream, rows: int, *arguments: Any) -> Any:
        found.append(rows)
        return step(stream, rows, *arguments)

    monkeypatch.setattr(Stream, "step", watched)
    return found


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Gives both torch and the CPU engine two threads."""
    import torch

    from anycell.engines import cpu

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    cpu.threads.set_threads(2)
    yield
    torch.set_num_threads(before)
    cpu.threads.set_threads(None)


@pytest.fixture(scope="session", autouse=True)
def patient() -> None:
    """Gives calls the threads that tests ask for, however busy the machine is."""
    from anycell.engines import cpu

    cpu.pool.LOSS = 1 << 62


# -- guards --------------------------------------------------------------------------------------
@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Iterator[None]:
    """Keeps the kernels that tests compile apart from the user's cache.

    The workers of one run share a cache; set ANYCELL_CACHE_DIR to keep it between runs.
    """
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as empty:
        if "ANYCELL_CACHE_DIR" not in os.environ:
            patch.setenv("ANYCELL_CACHE_DIR", empty)
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freezes what is imported: searching it for garbage takes an eighth of all time."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # else extensions report what is never deleted as leaks
    return collected


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fails a run whose tests were all skipped, as pytest fails a run without tests."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus or reporter is None or session.config.option.collectonly:
        return
    if not reporter.stats.get("passed"):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
