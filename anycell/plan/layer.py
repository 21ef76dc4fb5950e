"""A layer as a value: one record, from the user's call to the kernels.

It holds no arrays. A graph that outlives the process holds it as JSON, in which a cell has a name
made of what the cell computes; whoever reads the text must have registered the cell.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

from anycell.lang.cell import ONE, Cell
from anycell.plan.call import Options
from anycell.plan.plan import Plan

Sizes = tuple[tuple[str, int], ...]  # what the size symbols of a cell stand for
CELLS: dict[str, Cell] = {}  # the registered ones, by their names in texts
_FURTHER = "sequences", "outputs", "unroll", "engine"  # in JSON unless they have their defaults


class Layer(NamedTuple):
    """A layer, as a call runs it, without arrays.

    Attributes:
        cell: the step.
        sizes: what the size symbols of the cell stand for, in pairs.
        options: of the call; they have a flag per direction.
        dtype: of the plan; "" if only the arrays of a call say it.
        arrays: their names, as in ``layer.signature``, or "seed"; () if each call has its own.
        sequences: the states besides the first whose values after each step are wanted.
        outputs: whether the outputs of all steps are wanted.
        unroll: a hint to engines that go step by step.
        engine: the engine that must run it; None chooses one.
        stored: the weights that are parts of the matrices that are given in their place, each with
            the part: by frontends whose arrays have no strides.
        plan: of the kernels that run it, once they are chosen. A frontend that sets it before knows
            that all arrays have memory (no compiler, no tracer, no transformation).
    """

    cell: Cell
    sizes: Sizes
    options: Options = Options()
    dtype: str = ""
    arrays: tuple[str, ...] = ()
    sequences: tuple[str, ...] = ()
    outputs: bool = True
    unroll: bool = False
    engine: str | None = None
    stored: tuple[tuple[str, Any], ...] = ()
    plan: Plan | Any = None

    def size(self, symbol: str) -> int:
        """The number that a size symbol of the cell stands for."""
        return 1 if symbol == ONE else dict(self.sizes)[symbol]

    @property
    def results(self) -> list[str]:
        """The names of the output, the final states and the sequences."""
        return ["output", *(f"final {name}" for name in self.cell.state_names), *self.sequences]

    def named(self, arrays: Iterable[Any]) -> dict[str, Any]:
        """Arrays by their names."""
        return dict(zip(self.arrays, arrays, strict=True))

    def text(self, hyper: bool = True) -> str:
        """The layer as JSON, without its plan.

        Args:
            hyper: whether to write the cell's run-time hyperparameters, too.
        """
        others = dict(self.sizes)
        facts: dict[str, Any] = {
            "cell": register(self.cell), "hidden_size": others.pop("H"), "sizes": [*others.items()],
            "dtype": self.dtype, "options": self.options._asdict(), "arrays": self.arrays,
        }  # fmt: skip
        usual = self._field_defaults
        facts |= {n: v for n in _FURTHER if (v := getattr(self, n)) != usual[n]}
        if hyper and self.cell.hyper:
            facts["hyper"] = self.cell.hyper
        return json.dumps(facts)

    @classmethod
    def read(cls, text: str) -> Layer:
        """The layer that ``text`` has written.

        Raises:
            ValueError, TypeError, KeyError: for another text.
            RuntimeError: for a cell that is not registered.
        """
        facts = dict(json.loads(text))
        name, hyper = facts.pop("cell"), facts.pop("hyper", {})
        cell = CELLS.get(name)
        if cell is None:
            raise RuntimeError(
                f"anycell: the cell {name} of this graph is not known in this process. Import the "
                "module that defines it, and make a layer of it, before the graph runs."
            )
        options = Options(**facts.pop("options"))
        sizes = ("H", facts.pop("hidden_size")), *map(tuple, facts.pop("sizes"))
        facts |= {n: tuple(v) for n, v in facts.items() if isinstance(v, list)}
        options = options._replace(reverse=tuple(options.reverse))
        layer = cls(cell(**hyper) if hyper else cell, sizes, options, **facts)
        if layer.text(bool(hyper)) != text:
            raise ValueError(text)
        return layer


OPTIONS, SEQUENCES = map(Layer._fields.index, ("options", "sequences"))
SEED, STREAM = map(Options._fields.index, ("seed", "stream"))
Record = TypeVar("Record", Layer, Options)


def changed(record: Record, place: int, value: Any) -> Record:
    """Does ``record._replace`` for one field, in a way that old PyTorch can compile in a layer."""
    make: Any = type(record)
    fields = tuple(record)
    return make(*fields[:place], value, *fields[place + 1 :])


def register(cell: Cell) -> str:
    """Lets texts name a cell; returns its name in them."""
    name = name_of(cell.name, cell.key)
    CELLS.setdefault(name, cell)
    return name


@functools.lru_cache(maxsize=1024)
def name_of(name: str, key: str) -> str:
    """The name in texts of a cell of this name and key."""
    return f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
