"""``Feedback``: a layer of Keras whose readout is its own next input."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops, tree

from anycell.explanation import Explained
from anycell.keras.backends import as_written, uncompiled
from anycell.keras.call import Arrays, Tensor, attached_mask, expect, flags, unturned
from anycell.keras.layers import Fused
from anycell.keras.streaming import Keywords, one_step
from anycell.keras.weights import known
from anycell.lang.cell import Cell
from anycell.lang.namespaces import Namespace, namespace
from anycell.lang.transform import OUTPUT, with_feedback
from anycell.layer.checks import refuse
from anycell.layer.feedback import Fed, check_width, entering, fed
from anycell.plan import Engine, Layer


@keras.saving.register_keras_serializable("anycell")
class Feedback(Fed, Keywords, Explained, keras.layers.Layer):
    """Runs a layer whose input is a series or, at steps without one, the layer's own readout.

        y_t     = output_t @ readout.kernel + readout.bias
        input_t = [series_t where forced_t, else y_{t-1}; others_t]

    Forcing all steps is teacher forcing, ``readout(layer(x))``; forcing no step is a free run;
    forcing steps by chance is scheduled sampling. Before the first step, y is the readout of the
    initial state.

    Args:
        layer: ``LSTM``, ``GRU``, ``SimpleRNN`` or ``RNN`` of anycell.keras, without dropout, not
            stateful, not backwards, and of a cell without a static input.
        readout: ``keras.layers.Dense`` without activation, to the Y numbers of the series. Layer
            and readout keep their own weights.
        return_state: whether to return the final states after y.
        seed: the seed for steps that are forced by chance.
        kwargs: the arguments of every layer of Keras.

    Called with
        sequences: ``[B, T, in]``, the series in the first Y columns. Where a step is not forced,
            the series has no influence, and may be NaN.
        forced: where the series is given: bool ``[B, T]``, or ``[T]``, the same for all rows. Or a
            number in [0, 1], the probability that a step of a row is forced. Default: True, all.
        initial_state, mask, training, resets: as for the layer.

    Returns y ``[B, T, Y]``, or ``[y, *states]``.

    Example:
        >>> layer, readout = LSTM(8), keras.layers.Dense(1)
        >>> tuple(Feedback(layer, readout)(np.zeros((2, 5, 3), "float32"), forced=0.5).shape)
        (2, 5, 1)
    """

    def __init__(
        self,
        layer: Any,
        readout: keras.layers.Dense,
        *,
        return_state: bool = False,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        _check(layer, readout)
        self.layer, self.readout = layer, readout
        self.return_state, self.seed = bool(return_state), seed
        self.seed_generator = keras.random.SeedGenerator(seed=seed)
        self.supports_masking, self.input_spec = True, keras.layers.InputSpec(ndim=3)
        self.supports_jit = layer.supports_jit

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Creates the weights of layer and readout for inputs ``[B, T, input_shape[-1]]``."""
        if not self.layer.built:
            self.layer.build(input_shape)
        if not self.readout.built:
            self.readout.build((*input_shape[:2], self._widths()[0]))
        check_width(self.readout, self.readout.units, input_shape[-1])  # type: ignore[arg-type]
        self.built = True

    def compute_output_shape(self, sequences_shape: Any, **_: Any) -> Any:
        """The shapes of y and the states."""
        rows, steps = sequences_shape[:2]
        y = (rows, steps, self.readout.units)
        if not self.return_state:
            return y
        return [y, *((rows, width) for width in self._widths())]

    def _widths(self) -> list[int]:
        """The sizes of the states."""
        step, sizes = _Fed(self.layer, self.readout)._step(), dict(self.layer._sizes())
        return [sizes[s.size] for s in step.states]

    @uncompiled
    def call(
        self,
        sequences: Tensor,
        forced: Any = True,
        initial_state: Any = None,
        mask: Any = None,
        training: bool = False,
        resets: Tensor = None,
    ) -> Any:
        """Runs the layer; see the class."""
        mask = attached_mask(sequences) if mask is None else mask
        mask = None if mask is None else ops.cast(mask, "bool")
        if initial_state is None:
            initial_state = self.layer.get_initial_state(ops.shape(sequences)[0])
        states = list(initial_state) if tree.is_nested(initial_state) else [initial_state]
        given = self._forced(forced, sequences, True)
        with self.layer._beside(resets=resets):
            _, y, final = self.inner_loop(sequences, states, mask, bool(training), given=given)
        return [y, *(ops.cast(s, self.compute_dtype) for s in final)] if self.return_state else y

    def inner_loop(
        self, sequences: Tensor, states: Any, mask: Any, training: bool, *, given: Tensor
    ) -> Any:
        """Runs whole sequences as a layer's call does; ``given`` is ``[B, T]``."""
        integers = getattr(self.layer, "rounded", False)
        sequences = entering(namespace(sequences), sequences, given, self.readout.units, integers)
        fed = _Fed(self.layer, self.readout)
        _, outputs, final = fed.inner_loop(sequences, states, mask, training)
        return None, self.readout(ops.cast(outputs, self.compute_dtype)), final

    @property
    def engine(self) -> Engine:
        """The engine that runs the layer in inference, here and now, and why."""
        return _Fed(self.layer, self.readout).engine

    def _layer(self) -> Layer | None:
        return _Fed(self.layer, self.readout)._layer()

    def _about(self) -> str:
        return f"{self.name}: inference"

    @as_written
    def step(
        self, x: Tensor, states: Any = None, *, forced: Any = True, resets: Tensor = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs one time step in inference; returns the results of a call for one step.

        Only the states have to be kept. After ``prepare()`` it is a fast step, without gradients.

        Args:
            x: ``[B, in]``, the series in the first Y columns.
            states: as the previous step returned them; None for the initial states of a call.
            forced: whether the series is given: True or False, or bool ``[B]``.
            resets: bool ``[B]``, True where the state is replaced, before the step, by the initial
                state of a call.

        Returns:
            y ``[B, Y]``, and a list of the new states.

        Raises:
            ValueError: for arguments of another shape.
        """
        return super().step(x, states, forced=forced, resets=resets)

    def _xp(self, array: Tensor) -> Namespace:
        return namespace(array)

    def _one_step(self, x: Any) -> Tensor:
        return one_step(self, x, self.layer.cell.compute_dtype)

    def _before(self, x: Tensor, state: Any) -> list[Tensor]:
        return self.layer._begin(x, state, None)

    def _flags(self, name: str, value: Any, shape: Any, axes: str, x: Tensor) -> Tensor:
        values = flags(name, value)
        expect(name, values.shape, shape, "rows, steps" if len(shape) == 2 else axes)
        return values

    def _read_state(self, state: Tensor) -> Tensor:
        return ops.cast(self.readout(state), self.layer.cell.compute_dtype)

    @property
    def _width(self) -> int:
        return self.readout.units

    def _draw(self, like: Tensor) -> Tensor:
        return keras.random.uniform(ops.shape(like), seed=self.seed_generator)

    def get_config(self) -> dict[str, Any]:
        """All arguments, for ``from_config``."""
        both = {"layer": self.layer, "readout": self.readout}
        both = {name: keras.saving.serialize_keras_object(part) for name, part in both.items()}
        return super().get_config() | both | {"return_state": self.return_state, "seed": self.seed}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Feedback:
        """The layer that ``get_config`` described."""
        read = functools.partial(
            keras.saving.deserialize_keras_object, custom_objects=custom_objects
        )
        return cls(**{n: read(v) if n in ("layer", "readout") else v for n, v in config.items()})


class _Fed(Fused):
    """The layer of a ``Feedback``, run with the cell whose readout is fed back."""

    _drop_in, return_sequences = False, True

    def __init__(self, layer: Any, readout: Any) -> None:
        self.layer, self.readout = layer, readout

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def _step(self) -> Cell:
        return with_feedback(known(self.layer))

    def _sizes(self) -> tuple[tuple[str, int], ...]:
        return tuple(sorted([*self.layer._sizes(), (OUTPUT, self.readout.units)]))

    def _arrays(self, *args: Any) -> Arrays:
        arrays, readout = self.layer._arrays(*args), self.readout
        dtype = keras.backend.standardize_dtype(arrays["x"].dtype)
        learned = unturned(arrays)
        weight, bias = ops.cast(ops.transpose(readout.kernel), dtype), readout.bias
        bias = None if bias is None else ops.cast(ops.convert_to_tensor(bias), dtype)
        return fed(namespace(arrays["x"]), learned, self.layer.cell.units, weight, bias)


def _check(layer: Any, readout: Any) -> None:
    if not isinstance(layer, Fused):
        hint = "anycell.keras.accelerate turns layers of Keras into these."
        expected = "LSTM, GRU, SimpleRNN or RNN of anycell.keras"
        refuse("layer", type(layer).__name__, expected, hint, TypeError)
    outer, cell = ("go_backwards", "stateful"), ("dropout", "recurrent_dropout")
    step = known(layer)
    options = {n: getattr(layer, n) for n in outer} | {n: getattr(layer.cell, n) for n in cell}
    faults = [f"{name}={value}" for name, value in options.items() if value]
    if step.static is not None:
        faults.append(f"a cell with the static input {step.static!r}")
    if faults:
        refuse("layer", ", ".join(faults), "a layer without these", "Make another layer.")
    with_feedback(step)
    linear, dense = keras.activations.linear, keras.layers.Dense
    usual = isinstance(readout, dense) and type(readout).call is dense.call
    if not usual or readout.activation is not linear:
        hint = "The readout is fed back as it is."
        refuse("readout", str(readout), "keras.layers.Dense without activation", hint)
