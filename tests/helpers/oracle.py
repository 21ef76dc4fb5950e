"""Runs the reference engine by one call, given attributes of ``Recurrence`` and ``Options``."""

from typing import Any

from anycell.engines.reference import Gradients, Recurrence
from anycell.lang.cell import Cell
from anycell.lang.namespaces import namespace
from anycell.layer.primitive import sizes_of
from anycell.plan import Layer, Options


def recurrence(
    cell: Cell, gates_x: Any, weights: Any, state: Any = None, params: Any = None, **further: Any
) -> Recurrence:
    """Returns the loop over the steps of one direction."""
    options = {name: value for name, value in further.items() if name in Options._fields}
    if "reverse" in options:
        options["reverse"] = (options["reverse"],)
    arrays = {name: value for name, value in further.items() if name not in options}
    params = params or {}
    known = {**weights, **params, "static": arrays.get("static")}
    namespace(gates_x)  # which refuses unknown kinds of arrays
    found = sizes_of(cell, gates_x.shape[-1], known, state)
    layer = Layer(cell, tuple(found.items()), Options(**options))
    return Recurrence(layer, gates_x, weights, state, params, **arrays)


def run(*arrays: Any, **further: Any) -> tuple[Any, tuple[Any, ...]]:
    """The outputs ``[T, B, size of the first state]`` and the final states."""
    return recurrence(*arrays, **further).forward()


def backward(*arrays: Any, d_outputs: Any = None, d_final: Any = None, **further: Any) -> Gradients:
    """The gradients by the derived backward pass, given the gradients of the results of ``run``."""
    loop = recurrence(*arrays, **further)
    return loop.backward(d_outputs, d_final or [None] * len(loop.cell.states))
