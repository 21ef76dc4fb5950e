"""The arguments and results of one run of a layer over a sequence, for every backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keras import backend, ops
from keras.src import backend as inside  # the mask of a tensor has no public name

from anycell.lang.cell import Cell
from anycell.layer.checks import refuse
from anycell.layer.signature import OF_STATES, state_names
from anycell.plan import Layer, scales_of

Tensor = Any  # of the backend


# The tensors of a run by name, in the dtype in which the layer computes. Absent tensors have no
# entry.
#
#     x                  [T, B, I], or the projected gates [T, B, G*H] where there is no weight_ih
#     turned weight_*    [in, out], as Keras lays kernels out: a weight with its last axes swapped
#     all others         as ``anycell.layer.signature`` names and shapes them, for one direction,
#                        also weights that are not turned; but states and what resets restore are
#                        [B, size], mask and resets are bool; weights of 8 bits are int8, and their
#                        scales float32
#     seed               [2] integers, as ``keras.random.SeedGenerator`` draws them
Arrays = Mapping[str, Tensor]
INTEGERS = "mask", "resets", "seed"  # which have dtypes of their own
TURNED = "turned "


def check(layer: Layer, arrays: Arrays) -> None:
    """Refuses x, states, a mask, resets or a static input of another shape than ``Arrays`` says.

    Kernels address memory by these shapes. Unknown sizes (None, in a graph) pass: they are checked
    again once they are known.

    Raises:
        ValueError: with the argument's name and the shapes given and expected, batch first.
    """
    x, kernel = arrays["x"], arrays.get(TURNED + "weight_ih")
    steps, rows = x.shape[:2]
    if kernel is not None:
        width, meaning = kernel.shape[0], "rows, steps, features of the kernel"
        expect("sequences", (rows, steps, x.shape[2]), (rows, steps, width), meaning)
    for state in layer.cell.states:
        size = layer.size(state.size)
        given = arrays[f"state {state.name}"].shape
        expect(f"initial_state, {state.name}", given, (rows, size), "rows, size of state")
    if "static" in arrays:
        width = layer.size(layer.cell.static_size)
        expect("static", arrays["static"].shape, (rows, width), "rows, size of the static input")
    for name in ("mask", "resets"):
        if name in arrays:
            expect(name, arrays[name].shape[::-1], (rows, steps), "rows, steps")


def tensor(value: Any, dtype: str | None = None) -> Tensor:
    """Converts ``value`` to a tensor; ``keras.ops`` alone leaves TensorFlow's variables unchanged.

    Args:
        dtype: the dtype for lists and tuples of numbers, which would otherwise become float32.
    """
    read = getattr(value, "read_value", None)
    if read is not None:
        return read()
    return ops.convert_to_tensor(value, dtype if isinstance(value, (list, tuple)) else None)


def real(name: str, value: Tensor) -> Tensor:
    """Returns ``value``; refuses complex numbers, of which a cast silently keeps the real part.

    Raises:
        TypeError: for complex numbers.
    """
    if "complex" in str(value.dtype):
        kind = "complex128" if "128" in str(value.dtype) else "complex64"
        hint = "Pass its parts as features: keras.ops.real(x), keras.ops.imag(x)."
        refuse(name, kind, "real numbers", hint, TypeError)
    return value


def for_all(value: Tensor, like: Tensor) -> Tensor:
    """Repeats a single row for all rows of ``like``, like Keras's loop."""
    if value.shape[:1] != (1,) or len(value.shape) != 2 or like.shape[0] == 1:
        return value
    return ops.broadcast_to(value, (ops.shape(like)[0], ops.shape(value)[1]))


def flags(name: str, values: Tensor) -> Tensor:
    """Converts flags to bool. Outside of graphs, refuses values of other dtypes but 0 and 1.

    Raises:
        ValueError: for other values.
    """
    given = tensor(values)
    concrete = hasattr(given, "numpy")  # neither symbols nor JAX's arrays have it
    if concrete and backend.standardize_dtype(given.dtype) != "bool":
        known = ops.convert_to_numpy(given)
        other = known[(known != 0) & (known != 1)]
        if other.size:
            hint = f"Say which values are meant, as in {name} > 0.5."
            shown = repr(other[0]) if isinstance(other[0], bytes) else f"{other[0]:g}"
            refuse(name, f"a value of {shown}", "bool, or 0 and 1", hint)
    return ops.cast(given, "bool")


def dequantized(arrays: Arrays) -> Arrays:
    """Returns the weights with the real numbers that the integers stand for."""
    real = {}
    for name, tensor in arrays.items():
        scales = arrays.get(scales_of(name.removeprefix(TURNED)))
        if scales is not None:
            scales = ops.expand_dims(scales, -2 if name.startswith(TURNED) else -1)
            tensor = ops.cast(tensor, scales.dtype) * scales
        if not name.startswith(scales_of("")):
            real[name] = tensor
    return real


def unturned(arrays: Arrays) -> dict[str, Tensor]:
    """The arrays with weights as ``layer.signature`` lays them out, by an operation for each."""
    return {
        name.removeprefix(TURNED): ops.swapaxes(array, -1, -2) if name.startswith(TURNED) else array
        for name, array in arrays.items()
    }


def named_states(cell: Cell, states: Sequence[Tensor]) -> dict[str, Tensor]:
    """Initial states by name.

    Raises:
        ValueError: for another number of states.
    """
    if len(states) != len(cell.states):
        hint = f"Pass a list of the states of {cell.name}: {', '.join(cell.state_names)}."
        refuse("initial_state", f"{len(states)} tensor(s)", f"{len(cell.states)}", hint)
    return dict(zip(state_names("state", cell), states, strict=True))


def expect(name: str, value: Any, expected: tuple[int | None, ...], meaning: str) -> None:
    """Refuses any shape but the expected one; ``meaning`` names its axes."""
    if getattr(value, "rank", 0) is None:  # TensorFlow does not know its shape yet
        return
    sizes = tuple(value)
    if sizes == expected:
        return
    pairs = zip(sizes, expected, strict=False)
    if len(sizes) != len(expected) or any(None not in (g, e) and g != e for g, e in pairs):
        wanted = f"{expected}, that is [{meaning}] of this call"
        refuse(name, f"shape {sizes}", wanted, "Pass a tensor of that shape.")


def lowered(layer: Layer, arrays: Arrays) -> tuple[Layer, dict[str, Tensor]]:
    """Returns the call and its arrays with the names and layouts of ``anycell.layer``."""
    below: dict[str, Tensor] = {}
    for name, array in arrays.items():
        if name.startswith(TURNED):
            below[name.removeprefix(TURNED)] = array.swapaxes(-1, -2)
        else:
            below[name] = array[None] if name.startswith(OF_STATES) else array
    if "seed" in below:  # two numbers in Keras
        low, high = (int(part) for part in below.pop("seed"))
        layer = layer._replace(options=layer.options._replace(seed=low + high * 2**31))
    return layer, below


# Outputs ``[T, B, H]`` or None; the final states, and after them the ``sequences`` of the call.
Result = tuple[Tensor, tuple[Tensor, ...]]


def attached_mask(x: Tensor) -> Tensor:
    """Returns the mask that an earlier layer, such as ``Embedding(mask_zero=True)``, left on x."""
    if hasattr(inside, "get_keras_mask"):  # since Keras 3.6
        return inside.get_keras_mask(x)
    return getattr(x, "_keras_mask", None)
