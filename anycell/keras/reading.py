"""Layers of cells as users write them: what was read of a cell, and its run over a sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
from keras import ops, tree
from keras.src.layers.rnn.dropout_rnn_cell import DropoutRNNCell  # keras.layers.RNN looks for it

from anycell.keras.call import Tensor

_MASKS = "_dropout_mask", "_recurrent_dropout_mask"  # which Keras draws once a call
_PLAIN = (int, float, bool, str, type(None))
MOST = 16  # readings that a layer keeps
_Key = tuple[Any, ...]


class Readings:
    """What was read of the cell of a layer, for each sort of call. Copies begin without."""

    def __init__(self) -> None:
        self.known: dict[_Key, Any] = {}
        self.last: dict[bool, tuple[Any, ...]] = {}  # by training: what the last call was like

    def __reduce__(self) -> tuple[Any, ...]:
        return Readings, ()

    def step(self, cell: Any, training: bool, x: Any, states: Any, masks: Sequence[Any]) -> Any:
        """The step that was read, or why it is not.

        Args:
            x, states, masks: tensors, or specs of them; only shapes and dtypes matter.
        """
        specs = [_spec(t) for t in (x, *tree.flatten(states), *masks)]
        structure = tree.map_structure(lambda _: 0, states)
        key = training, _state_of(cell), repr(structure), *specs
        if key not in self.known:
            if len(self.known) >= MOST:
                self.known.clear()
            self.known[key] = _read(cell, training, structure, specs, len(masks))
        self.last[training] = x, states, masks
        return self.known[key]


def elsewhere(cell: Any) -> str | None:
    """Returns why cells are not read on Keras's backend, or None."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        return None
    return (
        f"the cell is of class {type(cell).__name__}, which is read on Keras's TensorFlow backend, "
        f"not on {backend}: write its step as @anycell.cell, for anycell.keras.RNN"
    )


def _spec(tensor: Any) -> tuple[tuple[int | None, ...], str]:
    """The shape of a tensor without the batch, and its dtype."""
    sizes = tuple(tensor.shape)[1:]
    return (None, *sizes), keras.backend.standardize_dtype(tensor.dtype)


def _read(cell: Any, training: bool, structure: Any, specs: Sequence[_Key], masks: int) -> Any:
    import tensorflow as tf

    from anycell.keras.graph import Traced
    from anycell.keras.read import read_step
    from anycell.read import Refused

    if tf.distribute.has_strategy():
        return "within a tf.distribute strategy cells are not read"
    for layer in _layers(cell):
        if isinstance(layer, keras.Layer) and not layer.built:
            return f"{type(layer).__name__} is read once it is built"
    x, *rest = [tf.TensorSpec(shape, dtype) for shape, dtype in specs]
    states, others = rest[: len(rest) - masks], rest[len(rest) - masks :]
    before, losses = _state_of(cell), _losses(cell)
    try:
        traced = Traced(_step(cell, training, structure), x, states, others)
        changed = _state_of(cell)
        if changed != before or _losses(cell) != losses:
            names = {a[:2] for a in {*changed} ^ {*before}}
            shown = ", ".join(sorted(f"{kind}.{name}" for kind, name in names)) or "add_loss"
            raise Refused(f"a call of the cell has an effect on {shown}.")
        return read_step(traced, type(cell).__name__)
    except Refused as why:
        return f"the cell {type(cell).__name__} cannot be read: {str(why).rstrip('.')}"
    except Exception as error:  # the user's loop runs whatever goes wrong here
        return f"reading the cell {type(cell).__name__} fails: {type(error).__name__}: {error}"
    finally:
        for layer, count in losses:
            del layer._losses[count:]


def _step(cell: Any, training: bool, structure: Any) -> Callable[..., Any]:
    """The cell's call as a function of flat tensors, with the masks of its dropout."""
    more = {}
    if isinstance(cell, keras.Layer) and cell._call_has_training_arg:
        more["training"] = training

    def step(x: Tensor, states: list[Tensor], others: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        with _given(cell, others):
            output, new = cell(x, tree.pack_sequence_as(structure, states), **more)
        return output, tree.flatten(new)

    return step


def _layers(cell: Any) -> list[Any]:
    return list(cell._flatten_layers()) if isinstance(cell, keras.Layer) else [cell]


def _losses(cell: Any) -> list[tuple[Any, int]]:
    """How many losses each layer has added."""
    return [(c, len(c._losses)) for c in _layers(cell) if isinstance(c, keras.Layer)]


def _state_of(cell: Any) -> tuple[_Key, ...]:
    """What a trace of the cell depends on, and a call must not change: its attributes.

    Numbers and words count by value, all else by identity.
    """
    state: list[_Key] = []
    for layer in _layers(cell):
        kind = type(layer)
        state.append((kind.__name__, "call", id(kind.call)))
        for name, value in vars(layer).items():
            if name not in _MASKS and name not in _OF_KERAS:
                plain = value if isinstance(value, _PLAIN) else id(value)
                length = len(value) if isinstance(value, (list, tuple, dict)) else 0
                state.append((kind.__name__, name, plain, length))
    return tuple(state)


# Attributes that Keras itself sets while it calls a layer.
_OF_KERAS = {"_losses", "_loss_ids", "built", "_called", "_lock"}


# -- dropout ---------------------------------------------------------------------------------------


def masks_of(cell: Any) -> list[Tensor]:
    """The masks of dropout that Keras has drawn for this call, in a fixed order."""
    return [mask for _, _, masks in _places(cell) for mask in tree.flatten(masks)]


def _places(cell: Any) -> Iterator[tuple[Any, str, Any]]:
    for layer in _layers(cell):
        for name in _MASKS if isinstance(layer, DropoutRNNCell) else ():
            masks = getattr(layer, name, None)
            if masks is not None:
                yield layer, name, masks


@contextmanager
def _given(cell: Any, masks: Sequence[Tensor]) -> Iterator[None]:
    """Puts other masks in the place of those that were drawn."""
    places, left = list(_places(cell)), iter(masks)
    try:
        for layer, name, drawn in places:
            setattr(layer, name, tree.map_structure(lambda _: next(left), drawn))
        yield
    finally:
        for layer, name, drawn in places:
            setattr(layer, name, drawn)


# -- runs ------------------------------------------------------------------------------------------


def loop(
    step: Any,
    sequences: Tensor,
    states: Any,
    mask: Tensor | None,
    masks: Sequence[Tensor],
    options: Mapping[str, bool],
) -> tuple[Tensor, Tensor, Any]:
    """Runs a step that was read over ``[B, T, ...]``, like Keras's loop.

    Args:
        mask: bool ``[B, T]``.
        masks: of dropout.
        options: reverse, zero (outputs at masked steps) and sequences (whether all are wanted).

    Returns:
        the last output, all outputs in the order of processing, or the last one, and final states.
    """
    x = ops.swapaxes(sequences, 0, 1)
    reverse, wanted = options["reverse"], options["sequences"]
    if mask is not None:
        mask = ops.swapaxes(mask, 0, 1)
    outputs, final = step.run(
        x, tree.flatten(states), masks, mask=mask, reverse=reverse, sequences=wanted
    )
    end = 0 if reverse else -1
    if outputs is None:  # the output is a state, which is held under a mask
        last = final[step.of_state]
        if mask is not None:
            seen = mask[end] if options["zero"] else ops.any(mask, axis=0)
            last = ops.where(ops.expand_dims(seen, -1), last, ops.zeros_like(last))
        outputs = last[None]
    else:
        if reverse:
            outputs = ops.flip(outputs, axis=0)
            mask = None if mask is None else ops.flip(mask, axis=0)
        if mask is not None:
            outputs = _masked(outputs, mask, options["zero"], step.of_state is not None)
        last = outputs[-1]
        outputs = outputs if wanted else last[None]
    return last, ops.swapaxes(outputs, 0, 1), tree.pack_sequence_as(states, final)


def _masked(outputs: Tensor, mask: Tensor, zero: bool, held: bool) -> Tensor:
    """Outputs ``[T, B, ...]`` like those of Keras's loop at masked steps: zero, or the output of
    the step before, and zero before a row's first step.

    Args:
        held: whether they are states, which are held already.
    """
    counts = ops.cumsum(ops.cast(mask, "int32"), axis=0)
    shown = mask if zero else counts > 0
    if not (zero or held):
        # The k-th of a row's steps that are not masked is the k-th in this order.
        time = ops.cumsum(ops.ones_like(counts), axis=0)
        order = ops.argsort(ops.where(mask, time, time + ops.shape(mask)[0]), axis=0)
        at = ops.take_along_axis(order, ops.maximum(counts - 1, 0), axis=0)
        lead = tuple(range(2, len(outputs.shape)))
        outputs = ops.take_along_axis(outputs, ops.expand_dims(at, lead), axis=0)
    shown = ops.reshape(shown, (*ops.shape(shown), *[1] * (len(outputs.shape) - 2)))
    return ops.where(shown, outputs, ops.zeros_like(outputs))
