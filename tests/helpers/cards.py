"""Selects the tests that a CUDA card runs, and ends a process whose card no longer answers."""

import ctypes
import functools
import inspect
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

STUCK = 70  # exit status of a process whose CUDA context is lost


@functools.cache
def is_there() -> bool:
    """Whether PyTorch sees a card; without a driver, PyTorch is not imported."""
    try:
        ctypes.CDLL("libcuda.so.1")
        import torch
    except (OSError, ImportError):
        return False
    return torch.cuda.is_available()


def choose_interpreter() -> None:
    """Makes Triton interpret kernels if there is no card. Call it before Triton is imported."""
    if is_there():
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests marked ``gpu`` if there is no card; they never run in the interpreter."""
    if not item.get_closest_marker("gpu"):
        return
    if not is_there():
        pytest.skip("no CUDA device")
    from anycell.engines.gpu import build

    assert not build.interpreted(), "Triton's interpreter is on, although there is a card"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[pytest.TestReport]:
    """Records on the item that it failed."""
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[bool]:
    """Ends the process after a CUDA error that would make all of its later tests fail.

    pytest-xdist replaces a worker that ends. Without workers, the run stops and prints its reports.
    """
    done = yield
    if item.stash.get(_FAILED, False):
        lost = _lost()
        if lost is not None and hasattr(item.config, "workerinput"):
            os._exit(STUCK)  # the main process has its reports by now
        if lost is not None:
            item.session.shouldstop = f"CUDA does not recover from what {item.nodeid} did: {lost}"
    return done


_FAILED = pytest.StashKey[bool]()


def _lost() -> str | None:
    """The error of a card that no longer works, or None."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


def hasten_interpreter() -> None:
    """Makes Triton's interpreter look up once what it replaces at every call of a function."""
    from triton.runtime import interpreter

    @functools.cache
    def replaced(where: object) -> list[str]:
        members = inspect.getmembers(where)
        return [name for name, member in members if interpreter.tl.core.is_builtin(member)]

    def members(where: object) -> list[tuple[str, object]]:
        return [(name, getattr(where, name)) for name in replaced(where)]

    interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getmembers": members})
