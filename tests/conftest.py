"""What every test file shares: the command line options, the random seeds and the guards."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator

import numpy as np
import pytest

if not os.path.exists("/dev/nvidiactl"):
    os.environ["TRITON_INTERPRET"] = "1"
# Triton reads that now; and it must come before TensorFlow: both bring an LLVM, and Triton's aborts
# the process when it is the second.
with contextlib.suppress(ImportError):
    import triton  # noqa: F401


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("anycell")
    group.addoption(
        "--seed", type=int, default=1997, help="seed of everything random (default: %(default)s)"
    )
    group.addoption(
        "--random-cells",
        type=int,
        default=25,
        metavar="N",
        help="how many random cells the property test builds (default: %(default)s)",
    )
    group.addoption(
        "--mutations",
        type=int,
        default=100,
        metavar="N",
        help="how many damaged files of a kind are tried, and 10 times as many where slow tests "
        "run (default: %(default)s)",
    )


def pytest_report_header(config: pytest.Config) -> str:
    isa = os.environ.get("ANYCELL_ISA", "widest")
    cells = config.getoption("random_cells")
    return f"anycell: seed {config.getoption('seed')}, {cells} random cells, instruction set: {isa}"


# -- randomness ----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("seed")


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """Each test draws from the start of the same stream, whatever ran before it."""
    return np.random.default_rng(seed)


@pytest.fixture(params=[1, pytest.param(10, marks=pytest.mark.slow)], ids=["sample", "all"])
def mutation_seeds(request: pytest.FixtureRequest, seed: int) -> range:
    """One for each damaged file, so that the one of seed 2005 is seen again, alone, with `--seed
    2005 --mutations 1`.
    """
    return range(seed, seed + request.config.getoption("mutations") * request.param)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with a `cell_seed` argument runs `--random-cells` times, from `--seed` upwards.

    So the case `[2005]` is seen again, alone, with `--seed 2005 --random-cells 1`.
    """
    if "cell_seed" in metafunc.fixturenames:
        first = metafunc.config.getoption("seed")
        count = metafunc.config.getoption("random_cells")
        metafunc.parametrize("cell_seed", range(first, first + count))


# -- layers -------------------------------------------------------------------------------------


@pytest.fixture
def set_layer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Has layers on the CPU decide otherwise: ``set_layer(chunk_steps=lambda *_: 2)``.

    Every module of the package that knows a name gets the new value.
    """
    from anycell import layer

    modules = layer, layer.form

    def change(**values: object) -> None:
        for name, value in values.items():
            for module in modules:
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, value)
        layer.form.form_of.cache_clear()

    yield change
    layer.form.form_of.cache_clear()


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


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not _cuda():
        pytest.skip("no CUDA device")


@functools.cache
def _cuda() -> bool:
    torch = pytest.importorskip("torch")
    return torch.cuda.is_available()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run whose tests were all skipped has shown nothing, and fails as one without tests."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus or reporter is None or session.config.option.collectonly:
        return
    if not reporter.stats.get("passed"):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
