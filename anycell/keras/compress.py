"""The part of ``anycell.compress`` that knows the layers of ``anycell.keras``."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
from keras import ops

from anycell.keras.backends import trace_anew
from anycell.keras.cell import RNNCell
from anycell.keras.layers import RNN, Fused
from anycell.keras.weights import Weight, view_of
from anycell.lang.cell import ONE, Cell
from anycell.layer.checks import refuse
from anycell.layer.signature import place
from anycell.layer.view import View, check_optimizer, numbers

Array = npt.NDArray[Any]
KINDS = (Fused, keras.layers.Bidirectional)
READOUTS = "layers that are built, keras.layers.Dense or recurrent ones, with kernels [{}, ...]"


def reads(readout: Any) -> list[Weight]:
    """The weights ``[out, in]`` by which a readout that is built multiplies its input."""
    kernels = [getattr(part, "kernel", None) for part in _inner(readout)]
    return [Weight(kernel) for kernel in kernels if isinstance(kernel, keras.Variable)]


def _inner(readout: Any) -> list[Any]:
    """The layers or cells that have a readout's kernels."""
    if isinstance(readout, keras.layers.Bidirectional):
        return [*_inner(readout.forward_layer), *_inner(readout.backward_layer)]
    if isinstance(readout, keras.layers.RNN):
        return [readout.cell]
    return [readout] if isinstance(readout, keras.layers.Dense) else []


def take(
    view: View,
    readouts: Sequence[Any],
    taken: Sequence[tuple[Weight, tuple[Any, ...]]],
    optimizer: Any,
    size: str,
    count: int,
) -> None:
    """Makes variables smaller in place, an optimizer's among them."""
    indices: dict[int, tuple[Weight, tuple[Any, ...]]] = {}
    for weight, index in taken:
        _, before = indices.setdefault(id(weight.variable), (weight, index))
        if any(not np.array_equal(a, b) for a, b in zip(before, index, strict=True)):
            given = f"one with the variable {weight.variable.path} in two places"
            why = "both places would have to keep the same units"
            refuse("layer", given, f"a variable for each, because {why}")
    while hasattr(optimizer, "inner_optimizer"):  # an optimizer that scales losses
        optimizer = optimizer.inner_optimizer
    known = optimizer is not None and optimizer.built  # others have no variables yet
    if known:
        indices |= _slots(optimizer, indices)
    for weight, index in indices.values():
        _replace(weight.variable, weight.take(weight.variable.numpy(), index))
    if known:
        keys = map(optimizer._var_key, optimizer._trainable_variables)
        optimizer._trainable_variables_indices = {key: i for i, key in enumerate(keys)}
    for readout in readouts:
        width = reads(readout)[0].shape[1]
        if isinstance(readout, keras.layers.Dense):
            readout.input_spec = keras.InputSpec(min_ndim=2, axes={-1: width})
        for inner in readout._flatten_layers():  # includes the directions and their cells
            shapes = inner._build_shapes_dict
            for name, shape in dict(shapes or {}).items():  # files build layers with these
                if name != "initial_state_shape":
                    shapes[name] = (*shape[:-1], width)
    _resize(view, size, count)


def _slots(
    optimizer: Any, indices: Mapping[int, tuple[Weight, tuple[Any, ...]]]
) -> dict[int, tuple[Weight, tuple[Any, ...]]]:
    """Finds the variables in which an optimizer keeps a number for each number of a parameter."""
    parameters = optimizer._trainable_variables
    slots, known = {}, {id(parameter) for parameter in parameters}
    for row in vars(optimizer).values():
        if isinstance(row, list) and len(row) == len(parameters) and row is not parameters:
            for parameter, slot in zip(parameters, row, strict=True):
                if isinstance(slot, keras.Variable) and slot.shape == parameter.shape:
                    known.add(id(slot))
                    if id(parameter) in indices:
                        weight, index = indices[id(parameter)]
                        slots[id(slot)] = weight._replace(variable=slot), index
    follows = all(id(v) in known or not len(v.shape) for v in optimizer.variables)
    trains = not indices.keys().isdisjoint(map(id, parameters))
    check_optimizer(optimizer, trains, follows, "compile the model anew")
    return slots


def _replace(variable: Any, value: Array) -> None:
    """Gives a variable a value of another shape, for which Keras has no public call."""
    variable._shape = variable._validate_shape(value.shape)
    variable._initialize(ops.convert_to_tensor(value, variable.dtype))


def _resize(view: View, size: str, count: int) -> None:
    """Sets a layer's sizes; stateful layers start again, and models with the layer trace again."""
    for part in view.parts:
        cell = part.cell
        if isinstance(cell, RNNCell):
            cell.resize(size, count)
        else:
            states = [count] * len(view.layer.cell.states)
            cell.units = cell.output_size = count
            cell.state_size = states if len(states) > 1 else count
        part.state_size = list(np.ravel(cell.state_size).tolist())
        cell.reset_dropout_mask()
        for variable, width in zip(part.states or (), part.state_size, strict=False):
            _replace(variable, np.zeros((variable.shape[0], width)))
        if part.states is not None:
            part.reset_state()
        if part._prepared.stream is not None:
            part.prepare()
    # A compiled model has traced the old variables, and would go on with them. Layers do not know
    # which models contain them, so all models in this process are searched.
    changed = {id(part) for part in view.parts}
    for model in gc.get_objects():
        if not issubclass(type(model), keras.Model):
            continue
        inside = list(model._flatten_layers())
        if not changed.isdisjoint(map(id, inside)):
            trace_anew(model)
            for inner in inside:
                if hasattr(inner, "_torch_params"):
                    inner._track_variables()


def like(view: View, cell: Cell, sizes: Mapping[str, int], learned: Mapping[str, Any]) -> Any:
    """Makes a layer of another cell with those sizes and weights; all else is as in the view."""
    new, *back = (RNN(cell, **told(part, cell, sizes)) for part in view.parts)
    if back:  # Bidirectional copies its layers
        new = keras.layers.Bidirectional(new, backward_layer=back[0])
    new.build(input_shape(view.parts[0]))
    for name, weight in view_of(new).weights[0].items():
        given = learned.get(place(name, 0))
        # Keras has a single bias if both are only added: the other bias starts at 0.
        weight.assign(0.0 if given is None else numbers(given))
    return new


def input_shape(part: Any) -> tuple[int | None, ...]:
    """Returns the shape that a layer is built for; stateful layers have a number of rows."""
    rows = part.states[0].shape[0] if part.stateful else None
    return rows, None, part.cell.kernel.shape[0]


def told(part: Any, cell: Cell, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Returns the arguments for an ``RNN`` of another cell that is otherwise like the layer."""
    named = {name: size for name, size in sizes.items() if name != ONE}
    of_cell: dict[str, Any] = {"units" if n == "H" else n: size for n, size in named.items()}
    known = RNN(cell, **of_cell).get_config().keys() - {"cell"} | {"activity_regularizer"}
    config = part.cell.get_config() | part.get_config()  # RNN(LSTMCell(4)) lacks the cell's
    return {n: v for n, v in config.items() if n in known} | of_cell
