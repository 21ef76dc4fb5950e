"""Which tests a CUDA card runs, and what becomes of them when it fails for good."""

import ctypes
import functools
import os
import sys
from collections.abc import Iterator

import pytest

STUCK = 70  # exit status of a process whose CUDA context is lost


@functools.cache
def is_there() -> bool:
    """Whether PyTorch sees a card; where there is no driver it is not asked."""
    try:
        ctypes.CDLL("libcuda.so.1")
        import torch
    except (OSError, ImportError):
        return False
    return torch.cuda.is_available()


def choose_interpreter() -> None:
    """Has Triton interpret kernels where there is no card. Comes before the import of Triton."""
    if is_there():
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of a card run on one, and never in the interpreter."""
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
    """Notes on the item that it has failed."""
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[bool]:
    """After an error that CUDA does not recover from, each later test of the process would fail.

    So a worker of pytest-xdist ends, and another one takes its place; without workers the run ends,
    with its reports.
    """
    done = yield
    if item.stash.get(_FAILED, False):
        lost = _lost()
        if lost is not None and hasattr(item.config, "workerinput"):
            os._exit(STUCK)  # its reports are with the main process by now
        if lost is not None:
            item.session.shouldstop = f"CUDA does not recover from what {item.nodeid} did: {lost}"
    return done


_FAILED = pytest.StashKey[bool]()


def _lost() -> str | None:
    """What the card says, if it no longer works."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None
