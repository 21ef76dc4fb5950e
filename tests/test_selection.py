"""Which tests run when: what is left out today runs on another day."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conftest
import pytest

NAMES = [f"test_every_cell_compiles[{k}]" for k in range(200)]


def chosen(grid: bool, **options: int) -> list[str]:
    """The names of the cases that a run with these options keeps."""
    items: Any = [
        SimpleNamespace(
            name=name,
            path=Path("test_new.py"),
            get_closest_marker=lambda mark: mark == "grid" and grid,
        )
        for name in NAMES
    ]
    left_out: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    config: Any = SimpleNamespace(getoption=options.__getitem__, hook=hook)
    conftest.pytest_collection_modifyitems(config, items)
    assert {item.name for item in (*items, *left_out)} == set(NAMES)
    return [item.name for item in items]


def test_cases_behind_a_sample_are_slow() -> None:
    marked: list[str] = []
    marks = {"sample": SimpleNamespace(args=(3,), kwargs={})}
    items: Any = [
        SimpleNamespace(
            name=name,
            path=Path("test_new.py"),
            get_closest_marker=marks.get,
            add_marker=lambda mark, name=name: marked.append(f"{name} {mark}"),
        )
        for name in (*NAMES[:5], "test_another[0]")
    ]
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    config: Any = SimpleNamespace(getoption={"day": 0, "days": 1}.__getitem__, hook=hook)
    conftest.pytest_collection_modifyitems(config, items)
    assert marked == [f"{name} slow" for name in NAMES[3:5]]


def test_new_files_run_under_every_instruction_set() -> None:
    """What does not is listed, and is there."""
    files = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    assert files > conftest.FIXED_ISA
    marks: list[tuple[str, str]] = []
    items: Any = [
        SimpleNamespace(
            path=Path(name),
            add_marker=lambda mark, name=name: marks.append((name, mark)),
            get_closest_marker=lambda mark: None,
        )
        for name in (*files, "test_new.py")
    ]
    config: Any = SimpleNamespace(
        getoption=lambda name: 1, hook=SimpleNamespace(pytest_deselected=lambda items: None)
    )
    conftest.pytest_collection_modifyitems(config, items)
    assert set(marks) == {(name, "fixed_isa") for name in conftest.FIXED_ISA}


@pytest.mark.parametrize("days", [1, 2, 7])
@pytest.mark.parametrize("first", [0, 739000])
def test_days_in_a_row_run_every_case_once(days: int, first: int) -> None:
    ran = Counter(
        name for day in range(first, first + days) for name in chosen(True, day=day, days=days)
    )
    assert ran == Counter(NAMES)


def test_a_day_runs_about_its_share() -> None:
    for day in range(7):
        assert 15 <= len(chosen(True, day=day, days=7)) <= 45


def test_other_tests_run_every_day() -> None:
    assert chosen(False, day=3, days=7) == NAMES
