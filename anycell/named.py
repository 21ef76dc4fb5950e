"""A layer named after each cell of ``anycell.cells``, made by one rule in every frontend."""

from __future__ import annotations

import inspect
from collections.abc import Container
from typing import Any, TypeVar

from anycell import cells
from anycell.lang.cell import ONE, Cell
from anycell.layer.checks import declared_sizes

Layer = TypeVar("Layer", bound=type)
_DEFAULTS = {  # the arguments that a repr shows if they differ from these values
    "num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False,
    "checkpoint": None,
}  # fmt: skip


class Named:
    """Mixin in front of a frontend's ``RNN``: the layer of one cell, which takes the cell's
    hyperparameters by keyword. If cell and layer share a name, such as ``dropout``, it sets the
    cell's.
    """

    of: Cell

    def __init__(self, *sizes: Any, **options: Any) -> None:
        names = (*self.of.hyper, *self.of.structure)
        of_cell = {name: options.pop(name) for name in names if name in options}
        super().__init__(self.of(**of_cell), *sizes, **options)  # type: ignore[call-arg]


def layers(base: Layer, module: str, taken: Container[str]) -> dict[str, Layer]:
    """Makes the layers that users find in ``module``: one per cell whose name is not ``taken``.

    Args:
        base: a ``Named`` class of the frontend.
    """
    made: dict[str, Layer] = {}
    for name in cells.__all__:
        if name not in taken:
            cell = getattr(cells, name)
            about = f"``RNN({name}, ...)``; see ``anycell.cells.{name}``.\n\n"
            body = {"of": cell, "__module__": module, "__signature__": _signature(base, cell)}
            body["__doc__"] = about + inspect.cleandoc(cell.__doc__ or "")
            made[name] = type(base)(name, (base,), body)
    return made


def _signature(base: type, cell: Cell) -> inspect.Signature:
    """The arguments of a cell's layer: ``RNN``'s, then the cell's, which replace those of the same
    name. All arguments after the first replaced one are keyword-only.
    """
    kind = inspect.Parameter
    hyper = inspect.signature(cell.function).parameters.values()
    of_cell = {p.name: p for p in hyper if p.kind is kind.KEYWORD_ONLY}
    for size in declared_sizes(cell):
        of_cell[size] = kind(size, kind.KEYWORD_ONLY, annotation="int")
    rnn: Any = base.__mro__[base.__mro__.index(Named) + 1]
    shared, by_name = [], False
    # Of its function, as metaclasses and decorators show other signatures of a class.
    _, *parameters = inspect.signature(rnn.__init__).parameters.values()
    for parameter in parameters:
        by_name |= parameter.name in of_cell
        if parameter.name == "hidden_size":
            parameter = parameter.replace(default=kind.empty, annotation="int")
        if by_name and parameter.kind is kind.POSITIONAL_OR_KEYWORD:
            parameter = parameter.replace(kind=kind.KEYWORD_ONLY)
        if parameter.name not in ("cell", "sizes", *of_cell):
            shared.append(parameter)
    behind = len(shared) - (shared[-1].kind is kind.VAR_KEYWORD)
    return inspect.Signature([*shared[:behind], *of_cell.values(), *shared[behind:]])


def shown(layer: Any) -> list[str]:
    """The arguments of a layer that its repr shows: cell, sizes, and what is not the default."""
    cell, of = layer.cell, getattr(layer, "of", None)
    named = of is not None and cell.function is of.function
    arguments = [*([] if named else [repr(cell)]), str(layer.input_size), str(layer.hidden_size)]
    for name, default in {**_DEFAULTS, "bias": cell.bias}.items():
        value = getattr(layer, name, default)
        if value != default:
            arguments.append(f"{name}={value!r}")
    settings = {**(cell.given if named else {}), **layer.sizes}
    hidden = "H", ONE
    return arguments + [
        f"{name}={value!r}" for name, value in settings.items() if name not in hidden
    ]
