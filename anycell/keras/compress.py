"""The part of ``anycell.compress`` that knows the layers of ``anycell.keras``."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
from keras import ops, tree

from anycell.keras.backends import Variable, trace_anew
from anycell.keras.cell import RNNCell
from anycell.keras.feedback import Feedback
from anycell.keras.layers import RNN, Fused
from anycell.keras.quantized import Quantized
from anycell.keras.weights import Weight, described, directions, weights_of
from anycell.lang.cell import ONE, Cell
from anycell.layer.checks import refuse
from anycell.layer.compression import Compression, check_optimizer, numbers, replaced
from anycell.layer.rounding import rounded
from anycell.layer.signature import place
from anycell.plan import scales_of

Array = npt.NDArray[Any]
Taken = Sequence[tuple[Weight, tuple[Any, ...]]]
_HERE = "anycell.keras.quantized"  # in a config, the place of a layer that is to be replaced


class KerasCompression(Compression, of=[keras.layers.Layer]):
    """See ``Compression``."""

    framework, kinds = "anycell.keras", "LSTM, GRU, SimpleRNN or RNN"
    remedy = "anycell.keras.accelerate turns layers of Keras into these."
    layers = Fused, keras.layers.Bidirectional
    readouts = "layers that are built, keras.layers.Dense or recurrent ones, with kernels [{}, ...]"
    feedback, method = Feedback, "inner_loop"

    describe = staticmethod(described)
    weights = staticmethod(lambda layer: [weights_of(layer)])
    learned = staticmethod(lambda layer: [weights_of(layer, parts=True)])

    def reads(self, readout: Any) -> list[Weight]:
        kernels = [getattr(part, "kernel", None) for part in _inner(readout)]
        return [Weight(kernel) for kernel in kernels if isinstance(kernel, Variable)]

    def take(
        self, layer: Any, readouts: Any, taken: Taken, optimizer: Any, size: tuple[str, int]
    ) -> None:
        while hasattr(optimizer, "inner_optimizer"):  # an optimizer that scales losses
            optimizer = optimizer.inner_optimizer
        known = optimizer is not None and optimizer.built  # others have no variables yet
        slots = _slots(optimizer, taken) if known else []
        for weight, index in (*taken, *slots):
            _replace(weight.variable, weight.take(weight.variable.numpy(), index))
        if known:
            keys = map(optimizer._var_key, optimizer._trainable_variables)
            optimizer._trainable_variables_indices = {key: i for i, key in enumerate(keys)}
        for readout in readouts:
            width = self.reads(readout)[0].shape[1]
            if isinstance(readout, keras.layers.Dense):
                readout.input_spec = keras.InputSpec(min_ndim=2, axes={-1: width})
            for inner in readout._flatten_layers():  # includes the directions and their cells
                shapes = inner._build_shapes_dict
                for name, shape in dict(shapes or {}).items():  # files build layers with these
                    if name != "initial_state_shape":
                        shapes[name] = (*shape[:-1], width)
        _resize(directions(layer), *size)

    def like(
        self, layer: Any, cell: Cell, sizes: Mapping[str, int], learned: Mapping[str, Any]
    ) -> Any:
        parts = directions(layer)
        new, *back = (RNN(cell, **_arguments(part, cell, sizes)) for part in parts)
        if back:  # Bidirectional copies its layers
            new = keras.layers.Bidirectional(new, backward_layer=back[0])
        new.build(_input_shape(parts[0]))
        for name, weight in weights_of(new).items():
            values = learned.get(place(name, 0))
            # Keras has a single bias if both are only added: the other bias starts at 0.
            weight.assign(0.0 if values is None else numbers(values))
        return new

    # -- weights of 8 bits -----------------------------------------------------------------------
    def within(self, model: Any) -> list[Any]:
        return list(model._flatten_layers())

    def rounds(self, part: Any, model: Any) -> bool:
        known = isinstance(part, Fused) and super().rounds(part, model)
        return known and (part is model or not isinstance(part._step(), str))

    def quantized(self, layer: Any) -> Quantized:
        described, learned = self.describe(layer), weights_of(layer, parts=True)
        if {layer.cell.compute_dtype, *(v.dtype for v in layer.cell.weights)} != {"float32"}:
            given = f"{layer.name} of {layer.dtype_policy.name}"
            hint = "Copy its weights to a layer of that dtype."
            refuse("model", given, "float32, from which weights are rounded", hint)
        new = Quantized(described.cell, **_arguments(layer, described.cell, dict(described.sizes)))
        new.build(_input_shape(layer))
        scales = new.cell._scales
        for name, weight in weights_of(new).items():
            # Keras has a single bias if both are only added: the other bias is 0.
            values: Any = numbers(learned[name]) if name in learned else 0.0
            if scales_of(name) in scales:
                values, of_rows = rounded(values.astype(np.float32), name)
                scales[scales_of(name)].assign(of_rows)
            weight.assign(values)
        return new

    def output(self, results: Any) -> Array:
        return np.asarray(ops.convert_to_numpy(results[1]), np.float64)

    def measure(self, call: Any, runs: Any, data: Iterable[Any]) -> None:
        def run(*given: Any, **named: Any) -> None:
            if 1 < len(given) == len(getattr(call, "inputs", None) or ()):
                given = (list(given),)  # a model of several inputs takes them as one argument
            call(*given, **{"training": False, **named})

        super().measure(run, runs, data)

    def copy(self, model: Any, small: Mapping[Any, Quantized]) -> Any:
        numbered = [{**layer.get_config(), _HERE: n} for n, layer in enumerate(small)]
        marked = [(l, "get_config", lambda c=c: c) for l, c in zip(small, numbered, strict=True)]
        with replaced(marked):
            config = keras.saving.serialize_keras_object(model)
        configs = [keras.saving.serialize_keras_object(layer) for layer in small.values()]
        config = _with_quantized(config, configs)
        config.pop("compile_config", None)
        new = keras.saving.deserialize_keras_object(config, safe_mode=False)
        new.build_from_config(model.get_build_config() or {})
        instead: dict[int, Any] = {}
        for layer, quantized in small.items():
            instead |= {id(layer): quantized, id(layer.cell): quantized.cell}
        for old, made in zip(model._flatten_layers(), new._flatten_layers(), strict=True):
            source = instead.get(id(old), old)
            if isinstance(made, Quantized):
                made.error = source.error
            before, after = (
                [*l._trainable_variables, *l._non_trainable_variables] for l in (source, made)
            )
            for value, variable in zip(before, after, strict=True):
                # A copy, because on JAX a model gives up its arrays, which would be the old one's.
                variable.assign(np.array(ops.convert_to_numpy(value)))
        return new


def _inner(readout: Any) -> list[Any]:
    """The layers or cells that have a readout's kernels."""
    if isinstance(readout, keras.layers.Bidirectional):
        return [*_inner(readout.forward_layer), *_inner(readout.backward_layer)]
    if isinstance(readout, keras.layers.RNN):
        return [readout.cell]
    return [readout] if isinstance(readout, keras.layers.Dense) else []


def _slots(optimizer: Any, taken: Taken) -> list[tuple[Weight, tuple[Any, ...]]]:
    """Finds the variables in which an optimizer keeps a number for each number of a parameter."""
    parameters = optimizer._trainable_variables
    indices = {id(weight.variable): (weight, index) for weight, index in taken}
    slots, known = {}, {id(parameter) for parameter in parameters}
    for row in vars(optimizer).values():
        if isinstance(row, list) and len(row) == len(parameters) and row is not parameters:
            for parameter, slot in zip(parameters, row, strict=True):
                if isinstance(slot, Variable) and slot.shape == parameter.shape:
                    known.add(id(slot))
                    if id(parameter) in indices:
                        weight, index = indices[id(parameter)]
                        slots[id(slot)] = weight._replace(variable=slot), index
    follows = all(id(v) in known or not len(v.shape) for v in optimizer.variables)
    trains = not indices.keys().isdisjoint(map(id, parameters))
    check_optimizer(optimizer, trains, follows, "compile the model anew")
    return list(slots.values())


def _replace(variable: Any, value: Array) -> None:
    """Gives a variable a value of another shape, for which Keras has no public call."""
    variable._shape = variable._validate_shape(value.shape)
    variable._initialize(ops.convert_to_tensor(value, variable.dtype))


def _resize(parts: Sequence[Any], size: str, count: int) -> None:
    """Sets sizes of layers; stateful layers start again, and models with them trace again."""
    for part in parts:
        cell = part.cell
        if isinstance(cell, RNNCell):
            cell.resize(size, count)
        else:
            cell.units = cell.output_size = count
            cell.state_size = tree.map_structure(lambda _: count, cell.state_size)
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
    changed = set(map(id, parts))
    for model in gc.get_objects():
        if not issubclass(type(model), keras.Model):
            continue
        inside = list(model._flatten_layers())
        if not changed.isdisjoint(map(id, inside)):
            trace_anew(model)
            for inner in inside:
                if hasattr(inner, "_torch_params"):
                    inner._track_variables()


def _input_shape(part: Any) -> tuple[int | None, ...]:
    """Returns the shape that a layer is built for; stateful layers have a number of rows."""
    rows = part.states[0].shape[0] if part.stateful else None
    return rows, None, part.cell.kernel.shape[0]


def _arguments(part: Any, cell: Cell, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Returns the arguments for an ``RNN`` of another cell that is otherwise like the layer."""
    named = {name: size for name, size in sizes.items() if name != ONE}
    of_cell: dict[str, Any] = {"units" if n == "H" else n: size for n, size in named.items()}
    known = RNN(cell, **of_cell).get_config().keys() - {"cell"} | {"activity_regularizer"}
    config = part.cell.get_config() | part.get_config()  # RNN(LSTMCell(4)) lacks the cell's
    return {n: v for n, v in config.items() if n in known} | of_cell


def _with_quantized(config: Any, small: list[Any]) -> Any:
    """Returns a config with the configs of quantized layers in their places."""
    if isinstance(config, list):
        return [_with_quantized(item, small) for item in config]
    if not isinstance(config, dict):
        return config
    inner = config.get("config")
    if isinstance(inner, dict) and _HERE in inner:
        # In a functional model, a layer's config also says how the layer is connected.
        return {**config, **small[inner[_HERE]]}
    return {key: _with_quantized(value, small) for key, value in config.items()}
