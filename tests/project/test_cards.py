"""What ``cards`` does with the tests of a card: here CUDA is a stub."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cards
import pytest

torch = pytest.importorskip("torch")
HERE = Path(cards.__file__).parent

# A card that is lost once a test has broken it, as a process with its context would be.
CONFTEST = """
import sys
from types import SimpleNamespace

from cards import pytest_runtest_makereport, pytest_runtest_protocol, pytest_runtest_setup

class Card:
    lost = False

def synchronize():
    if Card.lost:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\\nand more")

cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
sys.modules["torch"] = SimpleNamespace(cuda=cuda)
"""
TESTS = """
import os
from pathlib import Path

import pytest
from conftest import Card

def test_passes(): pass

def test_fails(): assert 1 == 2

def test_breaks():
    Card.lost = True
    assert "the result" == "something else"

@pytest.mark.parametrize("n", range(6))
def test_after(n): assert not Card.lost
"""


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Pytest, in a process of its own, on the files of a folder."""
    paths = os.pathsep.join([str(HERE), str(folder), str(HERE.parents[1])])
    # Names of tests begin at the root, which a stray file above the folder would move.
    options = "-p", "no:cacheprovider", "-v", "--rootdir", str(folder), *arguments
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "PYTEST_ADDOPTS": "", **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_stub.py").write_text(TESTS)
    return tmp_path


@pytest.mark.slow
def test_workers_end_with_a_lost_card(broken: Path) -> None:
    """Another one runs the tests that are left; what the failing test said is kept."""
    pytest.importorskip("xdist")
    said = run(broken, "-n", "1", "--max-worker-restart", "3").stdout
    assert said.count("PASSED") == 7 and "worker 'gw0' crashed" in said
    assert "something else" in said and "assert 1 == 2" in said
    assert "replacing crashed worker gw0" in said and "crashed worker gw1" not in said


def test_without_workers_the_run_ends(broken: Path) -> None:
    done = run(broken, "-p", "no:xdist")
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert "does not recover from what test_stub.py::test_breaks did: CUDA error" in done.stdout
    assert "something else" in done.stdout and "assert 1 == 2" in done.stdout
    assert done.stdout.count("PASSED") == 1


INTERPRETED = """
import cards, pytest
from cards import pytest_runtest_setup
cards.is_there = lambda: {there}
def pytest_configure(config): config.addinivalue_line("markers", "gpu: ")
"""


@pytest.mark.parametrize(
    ("there", "interpreted", "outcome"),
    [(True, "0", "1 passed"), (True, "1", "1 error"), (False, "1", "1 skipped")],
    ids=["card", "interpreter", "none"],
)
def test_a_card_interprets_nothing(
    there: bool, interpreted: str, outcome: str, tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text(INTERPRETED.format(there=there))
    (tmp_path / "test_stub.py").write_text(
        "import pytest\n@pytest.mark.gpu\ndef test_on_a_card(): pass\n"
    )
    said = run(tmp_path, "-p", "no:xdist", TRITON_INTERPRET=interpreted).stdout
    assert outcome in said
    assert ("although there is a card" in said) is (outcome == "1 error")


@pytest.mark.parametrize(("driver", "available"), [(False, True), (True, False), (True, True)])
def test_torch_says_whether_there_is_a_card(
    driver: bool, available: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> Any:
        if not driver:
            raise OSError(name)

    monkeypatch.setattr(cards.ctypes, "CDLL", load)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    there = cards.is_there.__wrapped__()
    assert there is (driver and available)
    monkeypatch.setattr(cards, "is_there", lambda: there)
    for before in ("0", "1"):
        monkeypatch.setenv("TRITON_INTERPRET", before)
        cards.choose_interpreter()
        assert os.environ.get("TRITON_INTERPRET") == (None if there else "1")
