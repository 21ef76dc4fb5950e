"""``LSTM``, ``GRU``, ``SimpleRNN`` and ``RNN(cell, units)``: Keras's layers with another loop.

All are subclasses of Keras's layers, which keep masks, states, configuration and weights; the
subclasses replace ``inner_loop``.

One file, because these classes share what decides which engine runs a layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops, tree

from anycell.explanation import Explained, Explanation, about_layer
from anycell.keras import cells, reading
from anycell.keras.backends import home, uncompiled
from anycell.keras.call import (
    Arrays,
    Tensor,
    attached_mask,
    check,
    expect,
    flags,
    for_all,
    real,
    tensor,
)
from anycell.keras.cell import RNNCell, check_cell_and_units, deserialize, gathered
from anycell.keras.rule import FUSED, OURS, Facts, asked, choose
from anycell.keras.streaming import Keywords, Steps
from anycell.keras.weights import REWRITE
from anycell.lang.cell import Cell
from anycell.layer.checks import declared_sizes, refuse
from anycell.layer.layers import NOTHING
from anycell.plan import Engine, Layer, Options
from anycell.refusal import did_you_mean

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from anycell.keras.typed import RNNArguments

# The arguments of a call that Keras's `call` does not know, by name, on their way to `inner_loop`.
_arguments: ContextVar[Mapping[str, Tensor]] = ContextVar("arguments", default=NOTHING)
_DROPPED = "in training, recurrent dropout multiplies the state on its way into every gate"


@dataclass(frozen=True)
class Kind:
    """A cell of Keras's whose step is known.

    Attributes:
        symbolic: the step in anycell's language.
        layer: Keras's layer of this cell, which has its own loop for it.
    """

    symbolic: Cell
    layer: type[keras.layers.RNN]


# The cell of a layer decides what runs, because it can be replaced after the layer was made.
_KINDS = {
    keras.layers.LSTMCell: Kind(cells.LSTM, keras.layers.LSTM),
    keras.layers.GRUCell: Kind(cells.GRU, keras.layers.GRU),
    keras.layers.SimpleRNNCell: Kind(cells.SimpleRNN, keras.layers.SimpleRNN),
}
CALLS = {kind: kind.call for kind in (*_KINDS, RNNCell)}  # before anyone could replace them
_WRAPPED = {"build", "quantize"}  # by Keras, in every layer


def changed(cell: Any) -> str | None:
    """Returns why the step of ``cell`` is unknown; None for unchanged cells, Keras's or ours."""
    kind = type(cell)
    if kind not in CALLS:
        return f"the cell is of class {kind.__name__}, whose step and weights are its own"
    replaced = {n for n in vars(cell) if callable(getattr(kind, n, None))} - _WRAPPED
    if kind.call is not CALLS[kind]:
        replaced.add("call")
    if replaced:
        return f"{', '.join(sorted(replaced))} of the {kind.__name__} has been replaced"
    return None


class Fused(Steps, Keywords, Explained):
    """The base of the layers: one ``inner_loop``, on the engine that fits."""

    cell: Any
    _drop_in = True

    # -- which engine ----------------------------------------------------------------------------
    def _step(self) -> Cell | str:
        """Returns the cell in anycell's language, or why it cannot be expressed there."""
        raise NotImplementedError

    def _facts(self, training: bool, gpu: bool, refusal: str | None) -> Facts:
        step, cell = self._step(), self.cell
        if isinstance(step, str):
            return Facts(None, gpu, obstacle=step)
        dropped = training and cell.recurrent_dropout and not self._dropped_by_kernel(step)
        # Keras's loops cannot reset.
        reset = _arguments.get().get("resets") is not None and not dropped
        # JAX runs the real numbers that integers stand for.
        integers = hasattr(cell, "numbers") and keras.backend.backend() != "jax"
        me: Any = self
        layer = Layer(
            step,
            self._sizes(),
            Options((me.go_backwards,), "zero" if me.zero_output_for_mask else "repeat", training),
            cell.numbers if integers else cell.compute_dtype,
            outputs=me.return_sequences,
            unroll=me.unroll,
        )
        return Facts(
            layer,
            gpu,
            cudnn=gpu and self._cudnn() and not reset and not home().compiled(),
            drop_in=self._drop_in and not reset,
            obstacle=_DROPPED if dropped else None,
            refusal=refusal or (home().unfit(layer) if gpu else None),
        )

    def _here(self, training: bool = False) -> Facts:
        """The facts here and now."""
        gpu = home().gpu_visible()
        return self._facts(training, gpu, home().refusal(gpu))

    def _dropped_by_kernel(self, step: Cell) -> bool:
        """Whether the kernel can apply the masks of recurrent dropout in the recurrent matmul."""
        return keras.backend.backend() in FUSED

    def _cudnn(self) -> bool:
        return False

    def _sizes(self) -> tuple[tuple[str, int], ...]:
        """The numbers that the size symbols of the cell stand for."""
        return (("H", self.cell.units),)

    @property
    def engine(self) -> Engine:
        """The engine that runs the layer in inference, here and now, and why."""
        return choose(self._here())

    def explain(self, training: bool = True, **shown: Any) -> Explanation:
        """Describes this layer before it runs: the engine that runs it, in training or inference,
        and why; then what ``anycell.explain`` says of its cell. See there for ``shown``.
        """
        facts = self._here(training)
        about = f"{self.name}: {'training' if training else 'inference'}"  # type: ignore[attr-defined]
        return about_layer(about, choose(facts), facts.layer, **shown)

    def _layer(self) -> Layer | None:
        return self._here().layer

    @property
    def supports_jit(self) -> bool:
        """Whether XLA may compile a model with this layer, which must not lose its kernels."""
        fused = choose(self._facts(False, home().gpu_visible(), asked())).name == "cpu"
        return vars(self).get("supports_jit", True) and not (fused and home().obstacle())

    @supports_jit.setter
    def supports_jit(self, value: bool) -> None:
        vars(self)["supports_jit"] = value

    # -- the loop --------------------------------------------------------------------------------
    @contextmanager
    def _beside(self, **arguments: Tensor) -> Iterator[None]:
        """Gives runs within it the arguments that Keras's ``call`` does not know."""
        step, static = self._step(), arguments.get("static")
        wanted = step.static if isinstance(step, Cell) else None
        if (static is None) != (wanted is None):
            given = "None" if static is None else f"of shape {tuple(tensor(static).shape)}"
            expected = f"[B, {self.cell.units}], its {wanted}" if wanted else "None"
            runner = f"cell {step.name}" if isinstance(step, Cell) else f"Keras's loop: {step}"
            raise ValueError(f"static: given {given}; expected {expected}, for {runner}.")
        token = _arguments.set(arguments)
        try:
            yield
        finally:
            _arguments.reset(token)

    @uncompiled
    def inner_loop(
        self, sequences: Tensor, initial_state: Any, mask: Any, training: bool = False
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Keras's hook; returns last output, all outputs in order of processing, final states."""
        training = bool(training)
        if "complex" in str(sequences.dtype):  # saves other dtypes a call
            real("sequences", sequences)
        here = home()
        gpu = here.on_gpu(sequences)
        facts = self._facts(training, gpu, here.refusal(gpu, sequences))
        engine, reason = choose(facts)
        resets = _arguments.get().get("resets")
        if engine in ("keras", "cudnn") and resets is not None:
            why = f"None, because Keras's loop, which cannot reset states, would run it: {reason}"
            hint = "Leave recurrent dropout out." if facts.layer else REWRITE
            refuse("resets", "a tensor", why, hint)
        if mask is not None:
            mask = _as_tensor(mask, sequences)
        if engine in ("keras", "cudnn"):
            if mask is not None and engine == "keras":
                sequences = reading.zeroed(sequences, mask)
            return self._loop_of_keras()(sequences, initial_state, mask=mask, training=training)
        states = list(initial_state) if tree.is_nested(initial_state) else [initial_state]
        states = [for_all(tensor(state, self.cell.compute_dtype), sequences) for state in states]
        states = self._lasting(states)
        x = ops.transpose(sequences, (1, 0, 2))
        layer: Any = facts.layer  # without one, Keras's loop has run it
        arrays = dict(self._arrays(x, states, training))
        if mask is not None:
            mask = arrays["mask"] = ops.swapaxes(for_all(mask, sequences), 0, -1)
        if resets is not None:
            arrays["resets"] = ops.swapaxes(flags("resets", resets), 0, -1)
        check(layer, arrays)
        outputs, final = (here.run if engine in OURS else here.composite)(layer, arrays)
        return self._as_keras(layer, outputs, final, mask)

    def _lasting(self, states: Any) -> Any:
        """States, in a stateful layer on torch copies: Keras overwrites them before backward."""
        if self.stateful and keras.backend.backend() == "torch":  # type: ignore[attr-defined]
            return tree.map_structure(ops.copy, states)
        return states

    def _loop_of_keras(self) -> Any:
        """Runs Keras's loop around calls of the cell."""
        return keras.layers.RNN.inner_loop.__get__(self)

    def _arrays(self, x: Tensor, states: Sequence[Tensor], training: bool) -> Arrays:
        """Returns the tensors of a run over ``x [T, B, I]``, except its mask and resets."""
        raise NotImplementedError

    def _as_keras(
        self, layer: Layer, outputs: Tensor, final: Sequence[Tensor], mask: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Returns results like Keras's loop: batch first, steps in the order of processing."""
        last, (reverse,) = final[0], layer.options.reverse
        if mask is not None and not self._begins_held(layer):
            loop = reading.LoopOptions(reverse, layer.options.apart(True), outputs is not None)
            last = reading.last_output(last, mask, loop)
            if loop.every and not loop.zero:  # else the kernel has set them to zero
                outputs = reading.masked(outputs, mask, loop, held=True)
        if outputs is None:
            return last, ops.expand_dims(last, 1), list(final)
        outputs = ops.transpose(outputs, (1, 0, 2))
        if reverse:
            outputs = ops.flip(outputs, axis=1)
        return last, outputs, list(final)

    def _begins_held(self, layer: Layer) -> bool:
        """Whether the outputs before a row's first step repeat the initial state, as in Keras's
        layers on JAX.
        """
        as_on_jax = keras.backend.backend() == "jax" and self._drop_in and not layer.unroll
        return as_on_jax and not layer.options.apart(True)


def _as_tensor(mask: Any, sequences: Tensor) -> Tensor:
    """Converts a mask, a list of one mask (as Keras passes it), or of rows, to bool ``[B, T]``."""
    first = tree.flatten(mask)[0]
    if mask is not first and len(getattr(first, "shape", ())) < 2:
        mask = ops.stack([tensor(row) for row in mask])
    else:
        mask = tensor(first)
    mask = ops.squeeze(mask, -1) if len(mask.shape) == 3 and mask.shape[-1] == 1 else mask
    if len(mask.shape) != 2:
        expect("mask", mask.shape, tuple(sequences.shape[:2]), "rows, steps")
    return ops.cast(mask, "bool")


class DropIn(Fused):
    """The base of ``LSTM``, ``GRU`` and ``SimpleRNN``: Keras's weights, and Keras's loop to fall
    back on."""

    @uncompiled
    def call(
        self,
        sequences: Tensor,
        initial_state: Any = None,
        mask: Any = None,
        training: bool = False,
        resets: Tensor = None,
    ) -> Any:
        """Runs the layer as Keras's does, and with ``resets`` as ``RNN`` does."""
        named = {"initial_state": initial_state, "training": training}
        if resets is None:
            return super().call(sequences, mask=mask, **named)  # type: ignore[misc]
        mask = attached_mask(sequences) if mask is None else mask  # see `RNN.call`
        with self._beside(resets=resets):
            return super().call(sequences, mask=mask, **named)  # type: ignore[misc]

    def _step(self) -> Cell | str:
        obstacle, kind = changed(self.cell), _KINDS.get(type(self.cell))
        if obstacle is not None or kind is None:
            return obstacle or "a cell of anycell runs in anycell.keras.RNN(cell, units)"
        named = {}
        for argument in ("activation", "recurrent_activation"):
            if (value := getattr(self.cell, argument, None)) is not None:
                if (name := cells.activation_name(value)) is None:
                    shown = getattr(value, "__name__", type(value).__name__)
                    return f"{argument}={shown} is not in the cell language"
                named[argument] = name
        structure = {n: getattr(self.cell, n) for n in kind.symbolic.structure if n not in named}
        return kind.symbolic(**named, **structure)

    def _loop_of_keras(self) -> Any:
        # Keras's loop of LSTM and GRU may bypass the cell.
        kind = _KINDS.get(type(self.cell))
        if kind is not None and changed(self.cell) is None and isinstance(self, kind.layer):
            return kind.layer.inner_loop.__get__(self)
        return super()._loop_of_keras()

    def _dropped_by_kernel(self, step: Cell) -> bool:
        if isinstance(self.cell, keras.layers.GRUCell) and not hasattr(
            self.cell, "dropout_mask_count"
        ):
            return False  # before Keras 3.8, the mask also applies to the state that z keeps
        masked = [l.outputs for l in step.linears if l.recurrent]
        return masked == [step.gates] and super()._dropped_by_kernel(step)

    def _cudnn(self) -> bool:
        cell, name = self.cell, cells.activation_name
        return (
            isinstance(self, (keras.layers.LSTM, keras.layers.GRU))
            and isinstance(self, _KINDS[type(cell)].layer)
            and (name(cell.activation), name(cell.recurrent_activation)) == ("tanh", "sigmoid")
            and cell.use_bias
            and not self.unroll
            and not cell.recurrent_dropout
            and getattr(cell, "reset_after", True)
            and vars(self).get("use_cudnn", "auto") is not False
        )

    @property
    def use_cudnn(self) -> bool | str:
        """The argument, but False for "auto" if our kernel runs the layer or its step is unknown:
        then ``Bidirectional`` does not run both directions by cuDNN, past ``inner_loop``.
        """
        given: bool | str = vars(self).get("use_cudnn", "auto")
        facts = self._facts(False, home().gpu_visible(), None)
        past = facts.layer is None or choose(facts).name in OURS
        return False if given == "auto" and past else given

    @use_cudnn.setter
    def use_cudnn(self, value: bool | str) -> None:
        vars(self)["use_cudnn"] = value

    def _drops(self, rate: float) -> bool:
        """Whether Keras draws masks; its gated cells draw no masks at a rate of 1."""
        return 0.0 < rate < 1.0 or (rate == 1.0 and type(self.cell) in _PLAIN)

    def _further(self) -> dict[str, Tensor]:
        """Returns the kernels of further matmuls in a step."""
        if getattr(self.cell, "reset_after", True):
            return {}
        recurrent = ops.convert_to_tensor(self.cell.recurrent_kernel)
        return {"weight_h": recurrent[:, 2 * self.cell.units :]}

    def _arrays(self, x: Tensor, states: Sequence[Tensor], training: bool) -> Arrays:
        cell, more = self.cell, dict[str, Tensor]()

        def read(array: Any) -> Tensor:
            return ops.cast(ops.convert_to_tensor(array), cell.compute_dtype)

        # Keras draws the masks, before the loop, so that a seed gives Keras's masks: one for all
        # gates, or a list of one per gate.
        if training and self._drops(cell.dropout):
            masks = cell.get_dropout_mask(x[0])
            if isinstance(masks, list):  # each gate has its own input, and so its own projection
                parts = zip(masks, ops.split(read(cell.kernel), len(masks), axis=1), strict=True)
                x = ops.concatenate([ops.matmul(x * m, k) for m, k in parts], axis=-1)
                more["weight_ih"] = None
            else:
                x = x * masks
        if training and self._drops(cell.recurrent_dropout):
            masks = cell.get_recurrent_dropout_mask(states[0])
            more["recurrent_mask"] = ops.stack(masks) if isinstance(masks, list) else masks
        named = _KINDS[type(cell)].symbolic  # whatever its activations, the states are these
        more |= {"x": x, **self._further()}
        return gathered(cell, named, more, states, read)


@keras.saving.register_keras_serializable("anycell")
class LSTM(DropIn, keras.layers.LSTM):
    """``keras.layers.LSTM`` on a fused kernel: its arguments, weights, results and errors.

        i, f, o = sigmoid(kernel x + recurrent_kernel h + bias)        each with its own columns
        c' = f c + i tanh(kernel x + recurrent_kernel h + bias)
        h' = o tanh(c')

    Weights: ``kernel`` ``[in, 4 * units]``, ``recurrent_kernel`` ``[units, 4 * units]``, ``bias``
    ``[4 * units]``, gates in the order i f c o; states ``[h, c]``. Fused on the CPU, in
    training and inference; activations that the cell language does not have run in Keras's loop.
    ``layer.engine`` says which, and why.

    Example:
        >>> layer = LSTM(8, return_sequences=True)
        >>> tuple(layer(np.zeros((2, 5, 3), "float32")).shape)
        (2, 5, 8)
    """


@keras.saving.register_keras_serializable("anycell")
class GRU(DropIn, keras.layers.GRU):
    """``keras.layers.GRU`` on a fused kernel: its arguments, weights, results and errors.

        z, r = sigmoid(kernel x + bias[0] + recurrent_kernel h + bias[1])
        n = tanh(kernel x + bias[0] + r (recurrent_kernel h + bias[1]))
        h' = z h + (1 - z) n

    Weights as in Keras, gates in the order z r h. The same calls run fused as for ``LSTM``, also
    with ``reset_after=False``, which has two matmuls in a step.
    """


@keras.saving.register_keras_serializable("anycell")
class SimpleRNN(DropIn, keras.layers.SimpleRNN):
    """``keras.layers.SimpleRNN`` on a fused kernel: its arguments, weights, results and errors.

    h' = tanh(kernel x + recurrent_kernel h + bias)
    """


@keras.saving.register_keras_serializable("anycell")
class LSTMCell(keras.layers.LSTMCell):
    """``keras.layers.LSTMCell``, one step of ``LSTM``: as Keras runs it."""


@keras.saving.register_keras_serializable("anycell")
class GRUCell(keras.layers.GRUCell):
    """``keras.layers.GRUCell``, one step of ``GRU``: as Keras runs it."""


@keras.saving.register_keras_serializable("anycell")
class SimpleRNNCell(keras.layers.SimpleRNNCell):
    """``keras.layers.SimpleRNNCell``, one step of ``SimpleRNN``: as Keras runs it."""


for _ours in (LSTMCell, GRUCell, SimpleRNNCell):
    _KINDS[_ours], CALLS[_ours] = _KINDS[_ours.__base__], _ours.call
_PLAIN = (keras.layers.SimpleRNNCell, SimpleRNNCell)


def _readings(layer: Any) -> reading.Readings:
    return vars(layer).setdefault("_readings", reading.Readings())


def read_of(layer: Any, training: bool) -> Any:
    """The step that was read of a layer's cell, for calls like the last one; or why it is not."""
    readings, cell = _readings(layer), layer.cell
    why = reading.elsewhere(cell)
    if why is not None:
        return why
    known = readings.last.get(training) or readings.last.get(not training)
    if known is None:
        shapes = getattr(layer, "_build_shapes_dict", None) or {}
        features = tuple(next(iter(shapes.values()), ()) or ())[2:]
        if not features or None in features:
            return f"the cell {type(cell).__name__} is read once the layer is built"
        x = keras.KerasTensor((None, None, *features), layer.compute_dtype)
        known = reading.Sort.of(x, layer.get_initial_state(1), reading.masks_of(cell))
    return readings.step(cell, training, known if training else known._replace(masks=()))


@keras.saving.register_keras_serializable("anycell", "RNN of a cell of Keras")
class OfCell(DropIn, keras.layers.RNN):
    """``keras.layers.RNN(cell)`` of a cell of Keras's, or of one that users wrote for it.

    The step of a user's cell is read as it is written, and proved, for each sort of call; a call
    whose step cannot be read runs in Keras's loop, and ``engine`` says why.
    """

    def _facts(self, training: bool, gpu: bool, refusal: str | None) -> Facts:
        if changed(self.cell) is None or _arguments.get().get("resets") is not None:
            return super()._facts(training, gpu, refusal)
        return self._facts_of(read_of(self, training), gpu, refusal)

    def _facts_of(self, step: Any, gpu: bool, refusal: str | None) -> Facts:
        if isinstance(step, str):
            return Facts(None, gpu, obstacle=step)
        layer = step.reading.layer._replace(dtype=self.cell.compute_dtype)
        refusal = refusal or reading.unreadable() or (home().unfit(layer) if gpu else None)
        return Facts(layer, gpu, drop_in=True, refusal=refusal)

    def inner_loop(
        self, sequences: Tensor, initial_state: Any, mask: Any, training: bool = False
    ) -> tuple[Tensor, Tensor, Any]:
        """Keras's hook; see ``Fused``."""
        training = bool(training)
        if changed(self.cell) is None or "complex" in str(sequences.dtype):
            return super().inner_loop(sequences, initial_state, mask, training)
        masks = reading.masks_of(self.cell) if training else []
        states = initial_state if tree.is_nested(initial_state) else [initial_state]
        sort = reading.Sort.of(sequences, states, masks)
        step = reading.elsewhere(self.cell) or _readings(self).step(self.cell, training, sort)
        gpu = home().on_gpu(sequences)
        facts = self._facts_of(step, gpu, home().refusal(gpu, sequences))
        if choose(facts).name not in OURS or _arguments.get().get("resets") is not None:
            return super().inner_loop(sequences, initial_state, mask, training)
        # Perhaps the step was not read when it was called first.
        if isinstance(step, str) or reading.short(sequences, states):
            return self._loop_of_keras()(sequences, initial_state, mask=mask, training=training)
        if mask is not None:
            mask = for_all(_as_tensor(mask, sequences), sequences)
            sequences = reading.zeroed(sequences, mask)
        loop = reading.LoopOptions(
            self.go_backwards, self.zero_output_for_mask, self.return_sequences
        )
        of_cell = reading.CellStep(self.cell, training, sort.structure)
        flat = tree.flatten(self._lasting(states))
        return reading.loop(step, reading.LoopCall(of_cell, sequences, flat, masks, mask, loop))

    @property
    def text(self) -> str | None:
        """The step of a user's cell as an ``@anycell.cell``, to keep; None if it is not read."""
        step = None if changed(self.cell) is None else read_of(self, False)
        return None if step is None or isinstance(step, str) else step.reading.text


OfCell.__name__ = "RNN"  # Keras's files of weights use this name


_OF_THE_LAYER = """
    return_sequences return_state go_backwards stateful unroll zero_output_for_mask
    activity_regularizer name input_shape input_dim
""".split()
_OF_BOTH = ("dtype", "trainable", "autocast")


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, np.integer) else value


@keras.saving.register_keras_serializable("anycell")
class RNN(Fused, keras.layers.RNN):
    """Runs any cell over a sequence, as a layer of Keras, on a fused kernel.

    Args:
        cell: what ``@anycell.cell`` made, for instance one of ``anycell.cells``. A cell of Keras,
            or one that you wrote for ``keras.layers.RNN``, a layer with ``state_size`` and
            ``call(inputs, states)``, or a list of such cells, is read as it is written; then there
            are no ``units``, and the other arguments are those of ``keras.layers.RNN``.
        units: H.
        return_sequences, return_state, go_backwards, stateful, unroll, zero_output_for_mask,
            activity_regularizer: as in ``keras.layers.RNN``.
        kwargs: the arguments of ``RNNCell``: initializers, regularizers, constraints, dropout.

    Called as ``keras.layers.LSTM`` is, with ``initial_state``, ``mask`` and ``training``, on
    ``[B, T, in]``; states are passed and returned in the order that the cell declares. Calls also
    take ``static`` ``[B, units]``, the input that a cell like ``EALSTM`` reads once per sequence,
    and ``resets`` ``[B, T]``, true where an episode starts in the sequence as it is passed: there
    the states are set to the values that the cell declares, before the step. With ``go_backwards``
    this happens before the last step of the episode that ends there.

    Example:
        >>> from anycell import cells
        >>> layer = RNN(cells.PeepholeLSTM, 8, return_state=True)
        >>> output, h, c = layer(np.zeros((2, 5, 3), "float32"))
        >>> tuple(output.shape), [w.name for w in layer.weights][3:]
        ((2, 8), ['p_i', 'p_f', 'p_o'])
    """

    _drop_in = False
    _cell_class = RNNCell

    if not TYPE_CHECKING:  # which would not check the arguments any more

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            """Returns a layer of Keras's arguments for a cell of Keras, or one written for it."""
            # Subclasses have other arguments, and copies are made without any.
            cell = args[0] if args else kwargs.get("cell")
            of_keras = isinstance(cell, (list, tuple)) or hasattr(cell, "state_size")
            units = kwargs.get("units", args[1] if len(args) > 1 else None)
            if cls is not RNN or not of_keras or isinstance(cell, (Cell, RNNCell)):
                if cls is RNN and cell is not None and units is None:
                    if "hidden_size" in kwargs:
                        given, hint = repr(kwargs["hidden_size"]), "Did you mean units?"
                        refuse("hidden_size", given, "no such argument", hint, TypeError)
                    check_cell_and_units(cell, units)
                return super().__new__(cls, *args, **kwargs)
            if units is not None and not isinstance(units, bool):  # which is `return_sequences`
                hint = "Leave it out: cells of Keras, and cells in a list, have units of their own."
                refuse("units", repr(units), f"None with {type(cell).__name__}", hint, TypeError)
            return OfCell(*args, **kwargs)

    def __init__(self, cell: Cell, units: int, **kwargs: Unpack[RNNArguments]) -> None:
        # A config is JSON, which cannot store NumPy's integers.
        units, given = _plain(units), {k: _plain(v) for k, v in kwargs.items()}
        of_layer = {k: given.pop(k) for k in _OF_THE_LAYER if k in given}
        of_both = {k: given.pop(k) for k in _OF_BOTH if k in given}
        if isinstance(cell, Cell):
            self._refuse_unknown(cell, given)
        inner = self._cell_class(cell, units, **given, **of_both)
        super().__init__(inner, **of_layer, **of_both)
        self.input_spec = keras.InputSpec(ndim=3)

    def _refuse_unknown(self, cell: Cell, named: Mapping[str, Any]) -> None:
        known = {*inspect.signature(RNNCell).parameters, *declared_sizes(cell)}
        for name in sorted(named.keys() - known):
            remedy = did_you_mean(name, sorted(known.union(_OF_THE_LAYER, _OF_BOTH)))
            remedy = remedy or f"Arguments are those of {type(self).__name__} and RNNCell."
            if name in (*cell.hyper, *cell.structure):
                remedy = f"The cell takes it: write {cell.name}({name}={named[name]!r})."
            raise ValueError(
                f"{type(self).__name__}: given an unknown keyword argument {name!r}. {remedy}"
            )

    @property
    def units(self) -> int:
        """H."""
        return self.cell.units

    @uncompiled
    def call(
        self,
        sequences: Tensor,
        initial_state: Any = None,
        mask: Any = None,
        training: bool = False,
        static: Tensor = None,
        resets: Tensor = None,
    ) -> Any:
        """Runs the layer; see the class."""
        if mask is None:  # Keras looks for a mask only if sequences are the only tensor
            mask = attached_mask(sequences)
        with self._beside(static=static, resets=resets):
            return super().call(sequences, initial_state, mask=mask, training=training)

    def _step(self) -> Cell | str:
        if isinstance(self.cell, RNNCell):
            return changed(self.cell) or self.cell.cell
        return changed(self.cell) or "a cell of Keras, in a layer for cells of anycell"

    def _sizes(self) -> tuple[tuple[str, int], ...]:
        return self.cell.all_sizes

    def _arrays(self, x: Tensor, states: Sequence[Tensor], training: bool) -> Arrays:
        drawn = self.cell.masks(x[0], states[0], training)
        static = _arguments.get().get("static")
        if static is not None:
            values = real("static", tensor(static, self.cell.compute_dtype))
            drawn["static"] = ops.cast(values, self.cell.compute_dtype)
        return self.cell.gather(x, states, **drawn)

    def reset_state(self) -> None:
        """Sets the states of a stateful layer to the values that the cell declares."""
        if not isinstance(self.cell, RNNCell):
            super().reset_state()
        elif self.states is not None:
            for variable, s in zip(self.states, self.cell.cell.states, strict=True):
                variable.assign(ops.full(variable.shape, s.initial, variable.dtype))

    def get_config(self) -> dict[str, Any]:
        """All arguments, for ``from_config``."""
        config = super().get_config()
        del config["cell"]
        inner = self.cell.get_config()
        for name in ("name", *_OF_BOTH):
            inner.pop(name, None)
        config["trainable"] = self.trainable and self.cell.trainable  # the cell has all weights
        return {**inner, **config}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> RNN:
        """The layer that ``get_config`` described."""
        # A scope hides the scope around it, so an empty one must not be opened.
        scope = (
            keras.saving.custom_object_scope(custom_objects) if custom_objects else nullcontext()
        )
        with scope:
            cell = deserialize(config["cell"])
        return cls(cell, **{k: v for k, v in config.items() if k != "cell"})
