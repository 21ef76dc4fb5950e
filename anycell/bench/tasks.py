"""A contender is a layer that is ready to run, and has a task for each mode."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from anycell.plan import Engine

Array = npt.NDArray[np.floating]
Mode = Literal["inference", "training", "recurrence"]


class Unsupported(Exception):
    """This contender has no such layer, as ``torch.nn`` has none for a user's cell: shown as -."""


@dataclass
class Task:
    """Something to run.

    Attributes:
        work: what is timed; its result is kept until the next call is prepared.
        arrays: turns that result into the arrays that the gate compares, by name.
        ready: what must be done before each call, and is not timed.
    """

    work: Callable[[], Any]
    arrays: Callable[[Any], dict[str, Array]] = lambda output: {"output": output}
    ready: Callable[[], object] = lambda: None
    kept: Any = None

    def prepare(self) -> None:
        self.kept = None
        self.ready()

    def call(self) -> None:
        self.kept = self.work()

    def results(self) -> dict[str, Array]:
        return self.arrays(self.kept)


@dataclass
class Contender:
    """A layer that is ready to run.

    Attributes:
        tasks: what it can do.
        around: holds the settings that its calls need, such as threads.
        engine: the name of what runs it, and why, if there is a choice.
        remark: what readers must know about its results on this machine.
        again: whether it is made in fresh processes too; one that compiles for minutes is not.
    """

    tasks: dict[Mode, Task]
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    engine: Engine | None = None
    remark: str | None = None
    again: bool = True

    def task(self, mode: Mode) -> Task:
        if mode not in self.tasks:
            raise Unsupported(f"no {mode}")
        return self.tasks[mode]


@dataclass(frozen=True)
class Source:
    """A maker of contenders, which imports a framework only when it is called.

    Attributes:
        module, function: what makes it of a problem, and of ``options``.
        needs: packages beyond NumPy and PyTorch.
    """

    module: str
    function: str
    needs: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, problem: Any) -> Contender:
        make = getattr(importlib.import_module(self.module), self.function)
        contender: Contender = make(problem, **self.options)
        return contender
