"""Layers of cells as users write them: the steps that were read, and their runs."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, NamedTuple

import keras
from keras import ops, tree
from keras.src.layers.rnn.dropout_rnn_cell import DropoutRNNCell  # keras.layers.RNN looks for it

from anycell.keras.call import Tensor
from anycell.layer.compression import replaced
from anycell.read import Refused, definition
from anycell.read.places import module_variables
from anycell.read.watched import Watched, same, value_of
from anycell.recent import add_recent

_MASKS = "_dropout_mask", "_recurrent_dropout_mask"  # which Keras draws once a call
_HOMES = {"tensorflow": "tensorflow.read", "jax": "jax", "torch": "torch"}
_PLAIN = (int, float, bool, str, type(None))
MOST = 16  # readings that a layer keeps
_Key = tuple[Any, ...]


class Sort(NamedTuple):
    """The shapes, with None for the batch, and dtypes of a call's tensors, on which a reading
    depends.

    Attributes:
        structure: of the states.
    """

    structure: Any
    x: _Key
    states: tuple[_Key, ...]
    masks: tuple[_Key, ...]

    @classmethod
    def of(cls, x: Any, states: Any, masks: Sequence[Any]) -> Sort:
        """The sort of a call over ``x`` ``[B, T, ...]``."""
        (rows, _, *features), dtype = _spec(x)
        structure = tree.map_structure(lambda _: 0, states)
        flat = tuple(map(_spec, tree.flatten(states)))
        return cls(structure, ((rows, *features), dtype), flat, tuple(map(_spec, masks)))


class Readings:
    """The steps that were read of a layer's cell, for each sort of call. Copies begin without."""

    def __init__(self) -> None:
        self.known: dict[_Key, Any] = {}
        self.last: dict[bool, Sort] = {}  # by training: what the last call was like
        self.state: _State | None = None  # of the cell

    def __reduce__(self) -> tuple[Any, ...]:
        return Readings, ()

    def step(self, cell: Any, training: bool, sort: Sort) -> Any:
        """The step that was read, or why it is not."""
        if self.state is None or self.state.cell is not cell or not self.state.fresh:
            self.state = _State(cell)
        key = training, self.state.key, repr(sort.structure), *sort[1:]
        if key not in self.known:
            add_recent(self.known, key, _read(cell, training, sort), MOST)
        self.last[training] = sort
        return self.known[key]


class LoopOptions(NamedTuple):
    """The options of a layer on which its loop depends.

    Attributes:
        reverse: whether it goes backwards.
        zero: whether outputs at masked steps are zero.
        every: whether all outputs are wanted, not the last one alone.
    """

    reverse: bool
    zero: bool
    every: bool


class LoopCall(NamedTuple):
    """A call of a user's cell over a sequence.

    Attributes:
        step: the cell's own, with the structure of the states.
        sequences: ``[B, T, ...]``.
        states: before the first step, flat.
        masks: of dropout.
        mask: bool ``[B, T]``, or None.
    """

    step: CellStep
    sequences: Tensor
    states: Sequence[Tensor]
    masks: Sequence[Tensor]
    mask: Tensor | None
    options: LoopOptions


def _home() -> Any:
    """Returns the module that reads and runs steps on the backend."""
    return import_module(f"anycell.keras.{_HOMES[keras.backend.backend()]}")


def elsewhere(cell: Any) -> str | None:
    """Returns why cells are not read on Keras's backend, or None."""
    backend = keras.backend.backend()
    if backend in _HOMES:
        return None
    return (
        f"the cell is of class {type(cell).__name__}, which is not read on Keras's backend "
        f"{backend}: write its step as @anycell.cell, for anycell.keras.RNN(cell, units)"
    )


def unreadable() -> str | None:
    """Returns why steps that were read cannot run here and now, or None."""
    return _home().unreadable() if keras.backend.backend() == "torch" else None


def short(sequences: Tensor, states: Any) -> bool:
    """Whether Keras's loop over ``sequences`` ``[B, T, ...]`` takes less time than a kernel."""
    rows, steps = sequences.shape[:2]
    on_tensorflow = keras.backend.backend() == "tensorflow"
    return on_tensorflow and _home().short(steps, rows, tree.flatten(states))


def _spec(tensor: Any) -> tuple[tuple[int | None, ...], str]:
    """The shape of a tensor without the batch, and its dtype."""
    sizes = tuple(tensor.shape)[1:]
    return (None, *sizes), keras.backend.standardize_dtype(tensor.dtype)


def _read(cell: Any, training: bool, sort: Sort) -> Any:
    for layer in _layers(cell):
        if isinstance(layer, keras.Layer) and not layer.built:
            return f"{type(layer).__name__} is read once it is built"
    before, losses = _State(cell).key, _losses(cell)
    try:
        step = _home().read_step(CellStep(cell, training, sort.structure), *sort[1:])
        changed = _State(cell).key
        if changed != before or _losses(cell) != losses:
            names = {a[:2] for a in {*changed} ^ {*before}}
            shown = ", ".join(sorted(f"{kind}.{name}" for kind, name in names)) or "add_loss"
            raise Refused(f"a call of the cell has an effect on {shown}")
        if isinstance(step, str):
            raise Refused(step)
        return step
    except Refused as why:
        # Keras raises errors again, in words of its own around ours.
        while isinstance(why.__context__, Refused):
            why = why.__context__
        said = str(why.at(definition(type(cell).call))).rstrip(".")
        return f"the cell {type(cell).__name__} cannot be read: {said}"
    except Exception as error:  # the user's loop runs whatever goes wrong here
        return f"reading the cell {type(cell).__name__} fails: {type(error).__name__}: {error}"
    finally:
        for layer, count in losses:
            del layer._losses[count:]


class CellStep:
    """The cell's call as a function of flat tensors, with the masks of its dropout.

    Args:
        structure: of the states.
    """

    def __init__(self, cell: Any, training: bool, structure: Any) -> None:
        self.cell, self.structure, self.more = cell, structure, dict[str, bool]()
        self.__name__ = type(cell).__name__
        if isinstance(cell, keras.Layer) and cell._call_has_training_arg:
            self.more["training"] = training

    def __call__(
        self, x: Tensor, states: list[Tensor], others: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        with _masked_by(self.cell, others):
            states = tree.pack_sequence_as(self.structure, states)
            output, new = self.cell(x, states, **self.more)
        return output, tree.flatten(new)

    def variables(self) -> list[Any]:
        """The variables of the cell's layers, each once."""
        layers = [layer for layer in _layers(self.cell) if isinstance(layer, keras.Layer)]
        return list({id(v): v for layer in layers for v in layer.variables}.values())


def _layers(cell: Any) -> list[Any]:
    return list(cell._flatten_layers()) if isinstance(cell, keras.Layer) else [cell]


def _losses(cell: Any) -> list[tuple[Any, int]]:
    """Counts the losses that each layer has added."""
    return [(c, len(c._losses)) for c in _layers(cell) if isinstance(c, keras.Layer)]


class _State(Watched):
    """The attributes of a cell, on which a trace depends and which no call may change.

    Attributes:
        key: all of them; numbers and words count by value, all else by identity.
        names: the dictionaries in which they are, and their names there.
    """

    def __init__(self, cell: Any) -> None:
        super().__init__()
        self.cell, self.names = cell, list[tuple[Any, list[str]]]()
        state: list[_Key] = []
        for layer in _layers(cell):
            kind = type(layer)
            self.watched.append((layer, "__class__", kind))
            # Of classes all but Keras's and object, which is the last.
            kinds = [k for k in kind.__mro__[:-1] if not k.__module__.startswith("keras.")]
            for of, holder in [*((k, vars(k)) for k in kinds), (kind, vars(layer))]:
                skipped = _OF_KERAS if holder is vars(layer) else ()
                self.names.append((holder, [*holder]))
                for name in holder:
                    if not name.startswith("__") and name not in skipped:
                        state.append((of.__name__, name, self._of(holder, name)))
        self.key = tuple(state)

    @property
    def fresh(self) -> bool:
        """Whether all of it is what it was."""
        return all(same([*holder], names) for holder, names in self.names) and super().fresh

    def _of(self, holder: Any, name: Any, depth: int = 3) -> Any:
        """A number or a word; the parts of a short collection; of a function also the variables
        around it that it reads; for all else its identity.
        """
        value = value_of(holder, name)
        self.watched.append((holder, name, value))
        if isinstance(value, _PLAIN):
            return value
        parts: list[tuple[Any, Any]] = []
        facts: list[Any] = [id(value)]
        if isinstance(value, types.FunctionType):
            space = value.__globals__
            facts += [self._of(value, n, 1) for n in ("__code__", "__defaults__", "__kwdefaults__")]
            parts += [(cell, "cell_contents") for cell in value.__closure__ or () if cell != _EMPTY]
            parts += [(space, n) for n in sorted(module_variables(value.__code__) & space.keys())]
        elif isinstance(value, (list, tuple, dict)):
            if isinstance(value, (list, dict)):
                self.containers.append((value, value.copy()))
            parts += [(value, n) for n in (value if isinstance(value, dict) else range(len(value)))]
            facts.append(len(value))
        few = depth > 0 and len(parts) <= MOST
        return *facts, *([self._of(*part, depth - 1) for part in parts] if few else [len(parts)])


_EMPTY = types.CellType()  # of a variable without a value
# Attributes that Keras itself sets while it calls a layer.
_OF_KERAS = {"_losses", "_loss_ids", "_parent_path", "built", "_called", "_lock", *_MASKS}


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


def _masked_by(cell: Any, masks: Sequence[Tensor]) -> AbstractContextManager[None]:
    """A context with other masks in the place of those that were drawn."""
    places, left = _places(cell) if masks else (), iter(masks)
    return replaced(
        (layer, name, tree.map_structure(lambda _: next(left), drawn))
        for layer, name, drawn in places
    )


# -- runs ------------------------------------------------------------------------------------------


def loop(read: Any, call: LoopCall) -> tuple[Tensor, Tensor, Any]:
    """Runs a step that was read, like Keras's loop.

    Returns:
        the last output, all outputs in the order of processing, or the last one, and final states.
    """
    last, outputs, final = _home().loop(read, call)
    return last, outputs, tree.pack_sequence_as(call.step.structure, final)


def over_time(
    run: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None, list[Tensor]]],
    sequences: Tensor, mask: Tensor | None, options: LoopOptions,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Runs a function of sequences ``[B, T, ...]`` as Keras lays them out.

    Args:
        run: from x and a mask, time first, to the last output, all outputs in the order of time,
            or None if the options do not ask for them, and final states.

    Returns:
        see ``loop``.
    """
    x = ops.swapaxes(sequences, 0, 1)
    last, outputs, final = run(x, None if mask is None else ops.swapaxes(mask, 0, 1))
    if not options.every:
        return last, ops.expand_dims(last, 1), final
    outputs = ops.flip(outputs, axis=0) if options.reverse else outputs
    return last, ops.swapaxes(outputs, 0, 1), final


def last_output(last: Tensor, mask: Tensor, options: LoopOptions) -> Tensor:
    """The last output like that of Keras's loop, see ``masked``, from the last state."""
    seen = mask[0 if options.reverse else -1] if options.zero else ops.any(mask, axis=0)
    return zeroed(last, seen)


def zeroed(values: Tensor, shown: Tensor) -> Tensor:
    """The values where flags, which have the first axes alone, are true; zeros elsewhere, even in
    place of NaN, which must reach no gradient.
    """
    return ops.where(_spread(shown, values), values, ops.zeros_like(values))


def _spread(flags: Tensor, like: Tensor) -> Tensor:
    """Flags, or positions, with further axes of one element, as many as ``like`` has."""
    for _ in range(len(like.shape) - len(flags.shape)):
        flags = ops.expand_dims(flags, -1)
    return flags


def masked(outputs: Tensor, mask: Tensor, options: LoopOptions, held: bool) -> Tensor:
    """Outputs ``[T, B, ...]`` like those of Keras's loop at masked steps: zero, or the output of
    the step before, and zero before a row's first step.

    Args:
        held: whether they are states, which are held already.
    """

    def count(flags: Tensor) -> Tensor:
        """The number of flags up to each step, in the order of processing."""
        ahead = ops.flip(flags, axis=0) if options.reverse else flags
        counts = ops.cumsum(ops.cast(ahead, "int32"), axis=0)
        return ops.flip(counts, axis=0) if options.reverse else counts

    counts = count(mask)
    if not (options.zero or held):
        # The k-th of a row's steps that are not masked is the k-th in this order.
        time = count(ops.ones_like(mask))
        order = ops.argsort(ops.where(mask, time, time + ops.shape(mask)[0]), axis=0)
        at = ops.take_along_axis(order, ops.maximum(counts - 1, 0), axis=0)
        outputs = ops.take_along_axis(outputs, _spread(at, outputs), axis=0)
    return zeroed(outputs, mask if options.zero else counts > 0)
