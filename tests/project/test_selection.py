"""Which tests run when: what is left out today runs on another day."""

import subprocess
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from anycell.engines.cpu.isa import TARGETS
from tests import conftest

NAMES = [f"test_every_cell_compiles[{k}]" for k in range(200)]


def selected(*items: Any, **options: int) -> list[Any]:
    """Those of some cases that a run with these options keeps, "--days 1" unless they say so."""
    kept, left_out = [*items], list[Any]()
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    config: Any = SimpleNamespace(getoption={"day": 0, "days": 1, **options}.get, hook=hook)
    conftest.pytest_collection_modifyitems(config, kept)
    assert {item.name for item in (*kept, *left_out)} == {item.name for item in items}
    return kept


class Case:
    """A case that has some marks, and what it is marked as."""

    def __init__(self, name: str, file: str = "test_new.py", **marks: Any) -> None:
        self.name, self.path, self.marked = name, conftest.HERE / file, list[str]()
        self.get_closest_marker, self.marks = marks.get, marks

    def add_marker(self, name: str) -> None:
        self.marked.append(name)
        self.marks[name] = True


def chosen(names: list[str] = NAMES, *, marks: dict[str, Any], **options: int) -> list[str]:
    """The names of the cases that a run with these options keeps."""
    return [case.name for case in selected(*(Case(n, **marks) for n in names), **options)]


def test_cases_behind_a_sample_are_slow() -> None:
    sample = SimpleNamespace(args=(3,), kwargs={})
    cases = [Case(name, sample=sample) for name in (*NAMES[:5], "test_another[0]")]
    selected(*cases)
    marked = {case.name: case.marked for case in cases if case.marked}
    assert marked == {name: ["slow"] for name in NAMES[3:5]}


def test_new_files_run_under_every_instruction_set() -> None:
    """What does not is listed, and is there."""
    files = {p.relative_to(conftest.HERE).as_posix() for p in conftest.HERE.rglob("test_*.py")}
    assert files > conftest.FIXED_ISA
    cases = [Case(name, name) for name in (*files, "test_new.py")]
    selected(*cases)
    marked = {case.name: case.marked for case in cases if case.marked}
    assert marked == {name: ["fixed_isa"] for name in conftest.FIXED_ISA}


@pytest.mark.parametrize("days", [1, 2, 7])
@pytest.mark.parametrize("first", [0, 739000])
@pytest.mark.parametrize(
    ("mark", "args"), [("slow", ()), ("grid", ()), ("grid", (4,)), ("sample", (0,))]
)
def test_days_in_a_row_run_every_case_once(
    days: int, first: int, mark: str, args: tuple[int, ...]
) -> None:
    """A grid of a number N takes N times as many days."""
    marks = {mark: SimpleNamespace(args=args, kwargs={})}
    span = days * (sum(args) or 1) if days > 1 else 1
    ran = Counter(
        name
        for day in range(first, first + span)
        for name in chosen(marks=marks, day=day, days=days)
    )
    assert ran == Counter(NAMES)


def test_a_day_runs_about_its_share() -> None:
    for day in range(7):
        assert 15 <= len(chosen(marks={"slow": True}, day=day, days=7)) <= 45


def test_other_tests_run_every_day() -> None:
    assert chosen(marks={"more": True}, day=3, days=7) == NAMES
    without = ["test_a_thing", "test_another"]
    assert chosen(without, marks={"slow": True}, day=3, days=7) == without


@pytest.mark.parametrize("names", ["NARROWER", "UNTILED", "OTHER_MATMUL"])
def test_what_make_asks_for_is_printed(names: str) -> None:
    """``test-all`` runs some tests again under what these programs of the Makefile print."""
    asked = f'asked:; @{sys.executable} -c "$({names})"'
    make = ["make", "--no-print-directory", "--eval", asked, "asked"]
    here = conftest.HERE.parent
    printed = subprocess.run(make, cwd=here, capture_output=True, text=True, check=True).stdout
    assert {*printed.split()} <= {*TARGETS, "ours", "host"}
