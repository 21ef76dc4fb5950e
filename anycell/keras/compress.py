"""The layers of ``anycell.keras`` as ``anycell.compress`` sees them."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np
import numpy.typing as npt
from keras import ops

from anycell.keras.accelerate import trace_anew
from anycell.keras.call import Tensor
from anycell.keras.cell import RNNCell
from anycell.keras.layers import RNN, DropIn, Fused
from anycell.lang.cell import Cell
from anycell.layer import ENDS

Array = npt.NDArray[Any]
KINDS = (Fused, keras.layers.Bidirectional)


@dataclass(frozen=True)
class Opened:
    """A layer, or the two of ``Bidirectional``.

    Attributes:
        parts: the layer of each direction.
        cell: the step in anycell's language.
    """

    parts: tuple[Any, ...]
    cell: Cell
    num_layers: int = 1

    @property
    def bidirectional(self) -> bool:
        """Whether there are two directions."""
        return len(self.parts) > 1

    @property
    def bias(self) -> bool:
        """Whether the projections have biases."""
        return self.parts[0].cell.bias is not None


class Weight(NamedTuple):
    """A variable in the layout of ``anycell.layer.signature``: ``[out, in]``, which Keras turns.

    Attributes:
        row: which of the two biases of a variable; None where it is all one array.
    """

    variable: Any
    row: int | None = None

    @property
    def value(self) -> Tensor:
        """As a tensor."""
        tensor = ops.convert_to_tensor(self.variable)
        if self.row is not None:
            return tensor[self.row]
        return ops.swapaxes(tensor, -1, -2) if len(tensor.shape) > 1 else tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in that layout."""
        sizes = tuple(self.variable.shape)
        if self.row is not None:
            return sizes[1:]
        return (*sizes[:-2], sizes[-1], sizes[-2]) if len(sizes) > 1 else sizes

    def place(self, index: tuple[Any, ...]) -> tuple[Any, ...]:
        """An index of that layout as one of the variable."""
        if self.row is not None:
            return slice(None), *index
        if len(index) == 1:
            return index
        *heads, rows, columns = (i.swapaxes(-1, -2) for i in np.broadcast_arrays(*index))
        return *heads, columns, rows

    def assign(self, value: Array) -> None:
        """Sets it to an array of that layout."""
        if self.row is not None:
            row, value = value, _numpy(self.variable).copy()
            value[self.row] = row
        elif value.ndim > 1:
            value = value.swapaxes(-1, -2)
        self.variable.assign(value)


class _Tensor:
    """A tensor with the methods that arrays of NumPy and of PyTorch share."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def reshape(self, *shape: int) -> _Tensor:
        return _Tensor(ops.reshape(self.value, shape))

    def sum(self, axis: int) -> _Tensor:
        return _Tensor(ops.sum(self.value, axis))

    def diagonal(self, offset: int, first: int, second: int) -> _Tensor:
        return _Tensor(ops.diagonal(self.value, offset, first, second))

    def __getitem__(self, index: Any) -> _Tensor:
        return _Tensor(self.value[index])

    def __add__(self, other: Any) -> _Tensor:
        return _Tensor(self.value + (other.value if isinstance(other, _Tensor) else other))

    __radd__ = __add__

    def __sub__(self, other: _Tensor) -> _Tensor:
        return _Tensor(self.value - other.value)


def opened(layer: Any) -> Opened:
    """The layer, which is built, with the cell that its weights belong to.

    Raises:
        ValueError: for one that is not built, whose cell is Keras's alone, or whose directions are
            not side by side.
    """
    parts: tuple[Any, ...] = (layer,)
    if isinstance(layer, keras.layers.Bidirectional):
        parts = layer.forward_layer, layer.backward_layer
        if layer.merge_mode != "concat":
            raise ValueError(
                f"layer: given Bidirectional with merge_mode={layer.merge_mode!r}; expected "
                "'concat', where each direction has outputs of its own."
            )
    steps = [part._step() if isinstance(part, Fused) else "a layer of Keras" for part in parts]
    for step in steps:
        if isinstance(step, str):
            raise ValueError(
                f"layer: given {layer.name}, whose step is unknown ({step}); expected a layer of "
                "anycell.keras. anycell.keras.accelerate turns those of Keras into ours."
            )
    for part in parts:
        if not part.cell.built:
            raise ValueError(f"layer: given {layer.name}, which has no weights yet. Call it first.")
    return Opened(parts, parts[0]._step())


def sizes(layer: Opened) -> dict[str, int]:
    """By size symbol."""
    return {"H": layer.parts[0].cell.units, **dict(layer.parts[0]._sizes())}


def check(layer: Opened, readouts: Sequence[Any], width: int) -> None:
    """That the readouts read outputs of that width."""
    if isinstance(readouts, keras.layers.Layer):
        raise TypeError("readouts: given a layer; expected a list of them.")
    for readout in readouts:
        kernels = [kernel for kernel in _kernels(readout) if isinstance(kernel, keras.Variable)]
        if not kernels or any(kernel.shape[0] != width for kernel in kernels):
            raise TypeError(
                f"readouts: given {readout!r}; expected layers that are built, keras.layers.Dense "
                f"or recurrent ones, with kernels [{width}, ...], the width of the layer's output."
            )


def _kernels(readout: Any) -> list[Any]:
    """What a layer multiplies its input by."""
    if isinstance(readout, keras.layers.Bidirectional):
        return [*_kernels(readout.forward_layer), *_kernels(readout.backward_layer)]
    if isinstance(readout, keras.layers.RNN):
        readout = readout.cell
    elif not isinstance(readout, keras.layers.Dense):
        return []
    return [getattr(readout, "kernel", None)]


def weights(layer: Opened) -> list[dict[str, Weight]]:
    """What each layer learns."""
    arrays: dict[str, Weight] = {}
    for part, end in zip(layer.parts, ENDS, strict=False):
        cell, bias = part.cell, part.cell.bias
        variables = {"weight_ih": Weight(cell.kernel)}
        if cell.recurrent_kernel is not None:
            variables["weight_hh"] = Weight(cell.recurrent_kernel)
        if bias is not None and len(bias.shape) == 2:
            variables |= {"bias_ih": Weight(bias, 0), "bias_hh": Weight(bias, 1)}
        elif bias is not None:
            variables["bias_ih"] = Weight(bias)
        if isinstance(cell, RNNCell):
            variables |= {name: Weight(variable) for name, variable in cell._further.items()}
        arrays |= {name + end: weight for name, weight in variables.items()}
    return [arrays]


def learned(layer: Opened) -> list[dict[str, Any]]:
    """The same, and what a GRU with the reset before the matmul has within another variable."""
    (arrays,) = weights(layer)
    parts: dict[str, Any] = {}
    for part, end in zip(layer.parts, ENDS, strict=False):
        if isinstance(part, DropIn) and part.cell.recurrent_kernel is not None:
            further = part._further(ops.convert_to_tensor(part.cell.recurrent_kernel))
            parts |= {name + end: matrix for name, matrix in further.items()}
    return [arrays | parts]


def readers(readouts: Sequence[Any]) -> list[Weight]:
    """Their weights ``[out, in]``."""
    return [Weight(kernel) for readout in readouts for kernel in _kernels(readout)]


def square(weight: Weight) -> _Tensor:
    """Of every number."""
    return _Tensor(ops.square(weight.value))


def norms(squares: Sequence[_Tensor]) -> Tensor:
    """The roots, with the slope 0 at 0: a unit that is gone stays where it is."""
    total = ops.stack([square.value for square in squares])
    tiny = float(np.finfo(keras.backend.standardize_dtype(total.dtype)).tiny)
    return ops.where(total > 0, ops.sqrt(ops.maximum(total, tiny)), ops.zeros_like(total))


def numbers(values: Any) -> Array:
    """As an array of NumPy."""
    return _numpy(values.value if isinstance(values, Weight) else values).astype(np.float64)


def _numpy(value: Any) -> Array:
    variable = isinstance(value, keras.Variable)
    array: Array = value.numpy() if variable else ops.convert_to_numpy(value)
    return array


def take(
    layer: Opened,
    readouts: Sequence[Any],
    taken: Sequence[tuple[Weight, tuple[Any, ...]]],
    optimizer: keras.optimizers.Optimizer | None,
) -> None:
    """Smaller variables, the same objects, also of an optimizer."""
    indices: dict[int, tuple[Any, tuple[Any, ...]]] = {}
    for weight, index in taken:
        variable, place = weight.variable, weight.place(index)
        _, before = indices.setdefault(id(variable), (variable, place))
        if any(not np.array_equal(a, b) for a, b in zip(before, place, strict=True)):
            raise ValueError(
                f"layer: given one with the variable {variable.path} in two places; expected a "
                "variable for each, since units of both places would have to be the same."
            )
    inner = _inner(optimizer)
    if inner is not None:
        indices |= _slots(inner, indices)
    for variable, place in indices.values():
        _replace(variable, _numpy(variable)[place])
    if inner is not None:
        keys = map(inner._var_key, inner._trainable_variables)
        inner._trainable_variables_indices = {key: i for i, key in enumerate(keys)}
    for readout in readouts:
        width = _kernels(readout)[0].shape[0]
        if isinstance(readout, keras.layers.Dense):
            readout.input_spec = keras.InputSpec(min_ndim=2, axes={-1: width})
        shapes = readout._build_shapes_dict
        for name, shape in dict(shapes or {}).items():  # with which a file builds it again
            if name != "initial_state_shape":
                shapes[name] = (*shape[:-1], width)


def _inner(optimizer: Any) -> Any:
    """The optimizer behind one that scales losses; None for one that has no variables yet."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return None if optimizer is None or not optimizer.built else optimizer


def _slots(
    optimizer: Any, indices: Mapping[int, tuple[Any, tuple[Any, ...]]]
) -> dict[int, tuple[Any, tuple[Any, ...]]]:
    """The variables in which an optimizer keeps something for each number of a parameter."""
    parameters, kind = optimizer._trainable_variables, type(optimizer).__name__
    if not any(id(parameter) in indices for parameter in parameters):
        raise ValueError(
            f"optimizer: given {kind} of none of the parameters; expected the one that trains the "
            "layer. Leave it out if there is none."
        )
    slots, known = {}, {id(parameter) for parameter in parameters}
    for row in vars(optimizer).values():
        if isinstance(row, list) and len(row) == len(parameters) and row is not parameters:
            for parameter, slot in zip(parameters, row, strict=True):
                if isinstance(slot, keras.Variable) and slot.shape == parameter.shape:
                    known.add(id(slot))
                    if id(parameter) in indices:
                        slots[id(slot)] = slot, indices[id(parameter)][1]
    if any(len(v.shape) and id(v) not in known for v in optimizer.variables):
        raise ValueError(
            f"optimizer: given {kind}, whose state does not follow each number of a parameter; "
            "expected one such as Adam or SGD. Leave it out, and compile the model anew."
        )
    return slots


def _replace(variable: Any, value: Array) -> None:
    """Gives a variable a value of another shape, for which Keras has no public call."""
    variable._shape = variable._validate_shape(value.shape)
    variable._initialize(ops.convert_to_tensor(value, variable.dtype))


def resize(layer: Opened, size: str, count: int) -> None:
    """The layer's own idea of its sizes; stateful ones start anew, and models trace anew."""
    for part in layer.parts:
        cell = part.cell
        if isinstance(cell, RNNCell):
            cell.resize(size, count)
        else:
            cell.units = cell.output_size = count
            cell.state_size = [count] * len(layer.cell.states)
            if len(cell.state_size) == 1:
                cell.state_size = count
        part.state_size = list(np.ravel(cell.state_size).tolist())
        cell.reset_dropout_mask()
        for variable, width in zip(part.states or (), part.state_size, strict=False):
            _replace(variable, np.zeros((variable.shape[0], width)))
        if part.states is not None:
            part.reset_state()
    changed = {id(part) for part in layer.parts}
    # A compiled model has traced the old variables, and would go on with them.
    for model in [each for each in gc.get_objects() if issubclass(type(each), keras.Model)]:
        inside = list(model._flatten_layers())
        if any(id(each) in changed for each in inside):
            trace_anew(model)
            for each in inside:
                if hasattr(each, "_torch_params"):
                    each._track_variables()


def like(layer: Opened, cell: Cell, sizes: Mapping[str, int], learned: Mapping[str, Any]) -> Any:
    """A layer of another cell with those sizes and weights; all else is the layer's."""
    new, *back = (RNN(cell, **told(part, cell, sizes)) for part in layer.parts)
    if layer.bidirectional:  # which makes copies of what it is given
        new = keras.layers.Bidirectional(new, backward_layer=back[0])
    new.build(input_shape(layer.parts[0]))
    parts = (new.forward_layer, new.backward_layer) if layer.bidirectional else (new,)
    for made, end in zip(parts, ENDS, strict=False):
        for name, weight in weights(Opened((made,), cell))[0].items():
            # Keras has one bias where both are only added: the other one starts at 0.
            value = learned.get(f"{name}_l0{end}", np.zeros(weight.shape))
            weight.assign(numbers(value) if isinstance(value, Weight) else value)
    return new


def input_shape(part: Any) -> tuple[int | None, ...]:
    """What a layer is built for; a stateful one for so many rows."""
    rows = part.states[0].shape[0] if part.stateful else None
    return rows, None, part.cell.kernel.shape[0]


def told(part: Any, cell: Cell, sizes: Mapping[str, int]) -> dict[str, Any]:
    """What a layer was told, for an ``RNN`` of another cell."""
    of_cell = {"units" if name == "H" else name: size for name, size in sizes.items()}
    known = RNN(cell, **of_cell).get_config().keys() - {"cell"}
    return {n: v for n, v in part.get_config().items() if n in known} | of_cell
