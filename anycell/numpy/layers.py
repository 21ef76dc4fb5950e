"""``RNN``, the layer of any cell, and ``LSTM``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import numpy.typing as npt

from anycell import cells
from anycell.engines import cpu
from anycell.explanation import Explained
from anycell.lang.cell import Cell
from anycell.layer import check_checkpoint, parameters, places
from anycell.layer.checks import check_one_direction, check_options, refuse
from anycell.layer.forward import draft_stack
from anycell.layer.layers import Stack, one_step
from anycell.layer.signature import of_layer, state_names
from anycell.layer.stream import FORMS
from anycell.named import shown
from anycell.numpy import base, check, initializers, passes, threads
from anycell.numpy.base import Array
from anycell.numpy.framework import Numpy
from anycell.numpy.streaming import Again, Packed
from anycell.numpy.typed import Arguments, Arrays, Names, State
from anycell.plan import Engine, Layer, Options, Plan, Returning, plan, takes
from anycell.recent import add_recent
from anycell.refusal import explained

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from anycell.lang.declare import SizeArguments


class RNN(Explained, base.Layer):
    """Layers of any cell, with the backward pass that anycell derives from the cell.

    With the cell's function ``f`` and H = ``hidden_size``, each direction of each layer computes

        x_t = W_ih input_t + b_ih                  of all gates, [B, gates * H]
        r_t = W_hh s_{t-1} + b_hh                  with s the first state, which is also the output
        state_t = f(x_t, r_t, state_{t-1}, p)

    Args:
        cell: a cell of ``@anycell.cell``, for instance one of ``anycell.cells``.
        input_size, hidden_size, num_layers: at least 1.
        bias: whether the projections have biases; ignored for a cell that adds its own.
        batch_first: arrays are ``[B, T, .]`` in place of ``[T, B, .]``; states keep their layout.
        dropout: probability that, in training, an element between two layers is zeroed; what stays
            is scaled by ``1 / (1 - dropout)`` (Srivastava et al., 2014).
        bidirectional: a second set of weights runs from the end to the start; the outputs of both
            are side by side.
        dtype: "float32", "float64", "float16" or "bfloat16" (from ml_dtypes), of the parameters
            and of all results; in 16 bits a cell computes in float32.
        initializer: of the input weights, for each gate on its own: "glorot_uniform",
            "glorot_normal", "orthogonal", "zeros", or a function ``(shape, generator) -> array``.
            "torch" draws everything as ``torch.nn`` does, U(-1/sqrt(H), 1/sqrt(H)).
        recurrent_initializer: of the recurrent weights, likewise.
        gate_bias: the initial bias of gates, by name; other gates start from 0. A forget gate
            that starts open, ``{"f": 1.0}``, lets gradients through from the first step on.
        seed: of the initial values, of dropout and of the cell's random masks; None draws one.
        checkpoint: saves memory in training, at the cost of time: the forward pass keeps x and the
            states of every ``checkpoint`` steps, with "sqrt" of about sqrt(T) steps; the backward
            pass computes everything else again, with the same bits. The number of steps is rounded
            up to what 8 MiB of projected input hold. The reference engine ignores it.
        sizes: the size of states that declare one, by its symbol: ``P=64`` for ``state="h:P c"``.

    Parameters, by name: ``weight_ih_l{k}`` ``[gates * H, in]``, ``weight_hh_l{k}``
    ``[gates * H, H]``, ``bias_ih_l{k}`` and ``bias_hh_l{k}`` ``[gates * H]``, ``{name}_l{k}``
    ``[size]`` for each parameter of the cell, ``weight_{name}_l{k}`` for a further matmul in a
    step. Where gates have sizes of their own, ``weight_ih`` and ``bias_ih`` have their sum in place
    of gates * H, ``weight_hh`` and ``bias_hh`` rows for the gates of size H.
    Names of the reverse direction end in ``_reverse``. Gates are in the cell's order. All this is
    as in ``torch.nn``, so that weights move freely between the two; see ``set_parameters``.

    The user's arrays are converted to ``dtype`` and never written to.

    Raises:
        ValueError, TypeError: naming the argument, what was given and what was expected.

    Example:
        >>> layer = RNN(anycell.cells.PeepholeLSTM, input_size=3, hidden_size=8, seed=0)
        >>> output, (h, c) = layer.forward(np.zeros((5, 2, 3)), training=True)
        >>> grad_input, (grad_h, grad_c) = layer.backward(np.ones_like(output))
        >>> layer.grads["p_i_l0"].shape
        (8,)
    """

    @explained
    def __init__(
        self,
        cell: Cell,
        input_size: int,
        hidden_size: int | None = None,  # so that RNN(3, 4) raises an error about the cell
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        dtype: npt.DTypeLike = "float32",
        initializer: str | initializers.Initializer = "glorot_uniform",
        recurrent_initializer: str | initializers.Initializer = "orthogonal",
        gate_bias: Mapping[str, float] | None = None,
        seed: int | None = None,
        checkpoint: str | int | None = None,
        **sizes: Unpack[SizeArguments],
    ) -> None:
        check.check_cell(cell, " A step in NumPy is for anycell.numpy.loop.")
        self.cell, self.sizes = cell, check.check_sizes(cell, hidden_size, sizes)
        self.input_size = check.integer("input_size", input_size)
        self.hidden_size = self.sizes["H"]
        self.num_layers = check.integer("num_layers", num_layers)
        self.bias = check.boolean("bias", bias) and cell.bias
        self.batch_first = check.boolean("batch_first", batch_first)
        self.dropout = check.number("dropout", dropout, low=0.0, below=1.0)
        self.bidirectional = check.boolean("bidirectional", bidirectional)
        self.dtype = check.real_dtype("dtype", dtype)
        self.checkpoint = check_checkpoint(checkpoint)
        self._generator = check.generator("seed", seed)
        self.grad_static: Array | None = None
        self.grad_reset_state: State | None = None
        starts = _gate_bias(cell, self.bias, gate_bias)
        super().__init__(self._initial(initializer, recurrent_initializer, starts))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(shown(self))}, dtype={self.dtype.name!r})"

    # -- parameters ------------------------------------------------------------------------------
    @property
    def plan(self) -> Plan:
        """The plan of the layer: ``plan.engine``, "cpu" or "reference", and ``plan.reason``."""
        return plan(self.cell, self.hidden_size, self.dtype.name, sizes=self.sizes)

    @property
    def engine(self) -> Engine:
        """The engine that runs this layer, and why."""
        return Engine(self.plan.engine, self.plan.reason)

    def _layer(self) -> Layer:
        options = Options((False, True)[: 1 + self.bidirectional])
        return Layer(self.cell, tuple(self.sizes.items()), options, self.plan.dtype)

    def _initial(
        self,
        initializer: str | initializers.Initializer,
        recurrent_initializer: str | initializers.Initializer,
        gate_bias: Mapping[str, float],
    ) -> dict[str, Array]:
        cell, h, rng = self.cell, self.hidden_size, self._generator
        places = cell.places(self.sizes)
        if isinstance(initializer, str) and initializer == "torch":
            other = enter = recur = initializers.uniform(h**-0.5)
        else:
            other = initializers.zeros
            enter = initializers.find(initializer, "initializer")
            recur = initializers.find(recurrent_initializer, "recurrent_initializer")
        declared = {p.name: p.initial for p in cell.params}
        outputs = {l.weight: len(l.declared) for l in cell.linears}

        def draw(name: str, shape: tuple[int, ...]) -> Array:
            if declared.get(name) is not None:
                return np.full(shape, declared[name], self.dtype)
            if len(shape) == 1:
                value = other(shape, rng)
                for gate, start in gate_bias.items() if name == "bias_ih" else ():
                    value[places[gate]] = start
                return value.astype(self.dtype)
            # Each gate and head is drawn as a matrix of its own: a rule would see stacked ones as
            # one tall matrix.
            if name == "weight_ih":
                rows = [place.stop - place.start for place in places.values()]
                drawn = [enter((count, shape[-1]), rng) for count in rows]
            else:
                blocks = outputs[name]
                size = (shape[-2] // blocks, shape[-1])
                drawn = [recur(size, rng) for _ in range(blocks * math.prod(shape[:-2]))]
            return np.concatenate(drawn).reshape(shape).astype(self.dtype)

        whole = self.input_size, self.bias, self.num_layers, 1 + self.bidirectional
        return {
            name: draw(name.rpartition("_l")[0], shape)
            for name, shape in parameters(cell, self.sizes, *whole)
        }

    def _learned(self, k: int) -> dict[str, Array]:
        """Returns the parameters of layer ``k``, by the names of ``anycell.layer.signature``."""
        return of_layer(self.cell, self._parameters, k, 1 + self.bidirectional)

    # -- use -------------------------------------------------------------------------------------
    @overload
    def forward(
        self, x: npt.ArrayLike, state: State | None = None, *,
        return_states: Literal[False] | None = None, **arguments: Unpack[Arguments],
    ) -> tuple[Array, State]: ...  # fmt: skip

    @overload
    def forward(
        self, x: npt.ArrayLike, state: State | None = None, *,
        return_states: Names, **arguments: Unpack[Arguments],
    ) -> tuple[Array, State, dict[str, Array]]: ...  # fmt: skip

    @takes(Arrays, Returning)
    def forward(
        self,
        x: npt.ArrayLike,
        state: State | None = None,
        *,
        training: bool = False,
        **arguments: Any,
    ) -> tuple[Any, ...]:
        """Runs whole sequences.

        Args:
            x: ``[T, B, input_size]``, or ``[B, T, input_size]`` if ``batch_first``.
            state: a tuple of ``[num_layers * D, B, H]`` in the cell's order, with D = 2 if
                ``bidirectional`` else 1, or a single array for a cell with one state. None starts
                from the values that the cell declares, mostly zero.
            training: applies dropout and the cell's random masks, and keeps what ``backward``
                needs. This includes x itself: do not write to x before ``backward``.
            {arguments}

        Returns:
            output: ``[T, B, D * H]``, laid out as x: the last layer's first state at every step.
            state: laid out as the argument, after each row's last step.
            a third result, if ``return_states``: a dictionary of the last layer's states by name,
                ``[T, B, D * size]``, laid out as x; ``masked_output`` sets their values at masked
                steps.
        """
        x = check.array("x", x, self._layout(self.input_size), self.dtype)
        if training is False and not arguments and (results := self._again(x, state)) is not None:
            self._saved = None
            return results
        options = self._options(training, **arguments)
        states: dict[str, Array] = {}
        if state is None:  # so that the backward pass returns their gradients
            rows = x.shape[0 if self.batch_first else 1]
            initial = self._states("state", None, rows)
            states = dict(zip(state_names("state", self.cell), initial, strict=True))
        saved, weights = _Saved(), [self._learned(k) for k in range(self.num_layers)]

        def run(layer: Layer, arrays: Mapping[str, Array]) -> Any:
            *results, pullback = passes.run(layer, arrays)
            saved.pullbacks.append(pullback)
            return results

        def drop(x: Array, k: int) -> Array:
            kept = self._generator.random(x.shape, np.float32) >= self.dropout
            saved.dropped.append(kept * self.dtype.type(1.0 / (1.0 - self.dropout)))
            return x * saved.dropped[-1]

        layer = Layer(self.cell, tuple(self.sizes.items()), options, plan=self.plan)
        drops = drop if training and self.dropout else None
        stack = Stack(Numpy, run, layer, weights, self.batch_first, drops)
        output, final, *sequences = stack.call(x, state, arguments, states)
        saved.output_shape = output.shape
        self._saved = saved if training else None
        if training or not output.flags.c_contiguous:
            output = output.copy()  # for the caller, because the backward pass reads the original
        if not sequences:
            return output, final
        saved.wanted = tuple(sequences[0])
        first = self.cell.state_names[0]
        others = {n: output if n == first else a.copy() for n, a in sequences[0].items()}
        return output, final, others

    if TYPE_CHECKING:
        __call__ = forward

    def _again(self, x: Array, state: State | None) -> tuple[Array, Any] | None:
        """Runs a call in inference with x and states alone as an earlier one; None if it cannot."""
        what = x.shape, state is None, self.batch_first, self.cell, *self.sizes.values()
        key = *what, threads.current(), cpu.isa.current(), cpu.pool.FORKED
        try:
            again = self._calls[key]
        except KeyError:
            again = add_recent(self._calls, key, self._learn(x.shape, state is None), FORMS)
        if again is None:
            return None
        results = again(x, () if state is None else state, *self._parameters.values())
        if results is None or not self.batch_first:
            return results
        return np.ascontiguousarray(results[0].swapaxes(0, 1)), results[1]

    def _learn(self, shape: tuple[int, ...], alone: bool) -> Again | None:
        """Drafts calls with an x of this shape, ``alone`` or with states; None if no kernel runs
        them as they are.
        """
        plan, x, axis = self.plan, np.empty(shape, self.dtype), int(not self.batch_first)
        if plan.engine != "cpu" or plan.types.mixed or self.cell.static is not None:
            return None
        states = [] if alone else self._states("state", None, shape[axis])
        named = dict(zip(state_names("state", self.cell), states))  # noqa: B905  (or none)
        arrays = {"x": x if axis else x.swapaxes(0, 1), **named, **self._parameters}
        how = self.num_layers, arrays, self._options(False), False
        known = draft_stack(Numpy.of(plan.dtype), plan, *how)
        if known is None:
            return None
        steps, arrays["x"] = slice(1, shape[1 - axis] + 1), x
        return Again(known.recipe, [*arrays.values()], known.out, known.finals, steps)

    def _options(self, training: Any, **arguments: Any) -> Options:
        """The options of a call, among its arguments."""
        training = check.boolean("training", training)
        return Options(
            reverse=(False, True)[: 1 + self.bidirectional],
            training=training,
            seed=int(self._generator.integers(1 << 63)) if training and self.cell.keeps else 0,
            threads=threads.current(),
            checkpoint=None if self.checkpoint is None else check_checkpoint(self.checkpoint),
            **(check_options(arguments, function=type(self).forward) if arguments else {}),
        )

    def backward(
        self,
        grad_output: npt.ArrayLike,
        grad_state: State | None = None,
        grad_states: Mapping[str, npt.ArrayLike] | None = None,
    ) -> tuple[Array, State]:
        """Returns the gradients of the last ``forward``'s arguments, given those of its results.

        Replaces ``grads``: gradients of earlier calls are not added, so nothing needs zeroing.

        Args:
            grad_output: shaped as the output.
            grad_state: shaped as the returned state; None is zero.
            grad_states: by name, shaped as ``return_states`` returned them; missing ones are zero.

        Returns:
            the gradients of x and of the initial state, shaped like them. The attributes
            ``grad_static`` and ``grad_reset_state`` hold the gradients of a static input and of
            ``reset_state``, or None. A recurrent mask has no gradient.

        Raises:
            RuntimeError: if no ``forward(..., training=True)`` came before.
        """
        saved: _Saved = self._last_forward()
        d = check.array("grad_output", grad_output, saved.output_shape, self.dtype)
        d = np.ascontiguousarray(d.swapaxes(0, 1)) if self.batch_first else d
        d_states = self._states("grad_state", grad_state, d.shape[1], start=0.0)
        d_sequences = {} if grad_states is None else self._sequences(grad_states, saved)
        if (first := d_sequences.pop(self.cell.state_names[0], None)) is not None:
            d = d + first
        results: list[dict[str, Array]] = []  # of the last layer first
        for k in reversed(range(self.num_layers)):
            result = saved.pullbacks[k](d, [s[self._directions(k)] for s in d_states], d_sequences)
            d_sequences = {}
            d = result["x"] * saved.dropped[k - 1] if k and saved.dropped else result["x"]
            results.append(result)
        grads = {
            place: result[name]
            for k, result in enumerate(reversed(results))
            for name, place in places(self.cell.learned, k, 1 + self.bidirectional).items()
            if name in result
        }
        self._grads = {name: grads[name] for name in self._parameters}
        statics = [result["static"] for result in results] if "static" in results[0] else []
        self.grad_static = sum(statics[1:], statics[0]) if statics else None
        restored = f"reset_state {self.cell.state_names[0]}" in results[0]
        self.grad_reset_state = self._joined("reset_state", results) if restored else None
        d = np.ascontiguousarray(d.swapaxes(0, 1)) if self.batch_first else d
        return d, self._joined("state", results)

    def prepare(self) -> Self:
        """Packs the weights for ``step``, once for all steps to come; returns the layer itself.

        ``step`` packs them again after ``set_parameters``, ``load`` and an optimizer's step, and
        for another ``cell``, such as one with other hyperparameters. It does not notice other
        writes into ``parameters``: call this again after them.

        Raises:
            ValueError: for a bidirectional layer, which needs the end before the start.
        """
        check_one_direction("prepare", self)
        self._prepared = Packed(self)
        return self

    def step(
        self,
        x: npt.ArrayLike,
        state: State | None = None,
        *,
        static: npt.ArrayLike | None = None,
        resets: npt.ArrayLike | None = None,
        reset_state: State | None = None,
    ) -> tuple[Array, State]:
        """Runs one step of a stream: ``forward`` of a sequence of length 1, in evaluation.

        After ``prepare()`` it is one native call on packed weights.

        Args:
            x: ``[B, input_size]``.
            state, static: as in ``forward``; pass the state that the step before returned.
            resets: bool ``[B]``, or 0 and 1: True where the state is replaced before the step, such
                as at the start of an episode.
            reset_state: the state that resets restore, shaped as ``state``; None is the initial one
                that the cell declares.

        Returns:
            output ``[B, H]`` and the state after it.

        Raises:
            ValueError: for a bidirectional layer, which needs the end before the start.
            ValueError, TypeError: naming the argument, what was given and what was expected.
        """
        packed, alone = self._prepared, static is None and resets is None and reset_state is None
        if alone and packed is not None and not packed.stale(self):
            again = packed.again.get(getattr(x, "shape", ()))
            if again is not None and (results := again(x, state)) is not None:
                return results
        check_one_direction("step", self)
        x = check.array("x", x, ("B", self.input_size), self.dtype)
        if resets is not None:
            resets = check.flags("resets", resets, (len(x),)).view(np.uint8)
        if packed is not None and packed.stale(self):
            packed = self.prepare()._prepared
        if packed is not None and packed.stream is not None:
            states = None if state is None else self._states("state", state, len(x))
            static = self._static(static, len(x))
            start = None
            if reset_state is not None:
                start = self._states("reset_state", reset_state, len(x))
            arrays = len(x), x, states, static, threads.current(), resets, start
            output, new = packed.stream.step(*arrays)
            if alone and states is not None and x.shape not in packed.again:
                packed.learn([x, *states])
            return output, tuple(new) if len(new) > 1 else new[0]
        pending = self._saved
        arguments = {"static": static, "resets": resets, "reset_state": reset_state}
        results = one_step(Numpy, self, self.forward, x, x, state, arguments)
        self._saved = pending
        return results

    # -- arguments -------------------------------------------------------------------------------
    @property
    def _width(self) -> int:
        return (1 + self.bidirectional) * self.sizes[self.cell.states[0].size]

    def _layout(self, width: int) -> tuple[int | str, ...]:
        return ("B", "T", width) if self.batch_first else ("T", "B", width)

    def _states(
        self, name: str, states: State | None, rows: int, start: float | None = None
    ) -> Sequence[Array]:
        """Checks the states; None makes them of ``start``, or else of the declared values."""
        cell, first = self.cell, (self.num_layers * (1 + self.bidirectional), rows)
        if states is not None:
            return Numpy.check_states(name, states, cell, self.sizes, first, self)
        return [
            np.full((*first, self.sizes[s.size]), s.initial if start is None else start, self.dtype)
            for s in cell.states
        ]

    def _sequences(self, gradients: Mapping[str, npt.ArrayLike], saved: _Saved) -> dict[str, Array]:
        """Checks ``grad_states``; returns them by name, ``[T, B, D * size]``."""
        arriving = {}
        for name, value in check.mapping("grad_states", gradients, "arrays by state").items():
            if name not in saved.wanted:
                asked = ", ".join(saved.wanted) or "none"
                expected = f"names that return_states asked for: {asked}"
                refuse("grad_states", repr(name), expected, "Ask for it in forward().")
            size = self.sizes[self.cell.states[self.cell.state_names.index(name)].size]
            shape = (*saved.output_shape[:2], (1 + self.bidirectional) * size)
            d = check.array(f"grad_states, {name!r}", value, shape, self.dtype)
            arriving[name] = np.ascontiguousarray(d.swapaxes(0, 1)) if self.batch_first else d
        return arriving

    def _static(self, static: npt.ArrayLike | None, rows: int) -> Array | None:
        shape = rows, self.sizes[self.cell.static_size]
        return Numpy.check_static(self.cell, static, shape, self)

    def _directions(self, k: int) -> slice:
        """The slice of a layer's directions among the directions of all layers."""
        count = 1 + self.bidirectional
        return slice(k * count, (k + 1) * count)

    def _joined(self, kind: str, results: Sequence[Mapping[str, Array]]) -> State:
        """Joins each state's values of all layers and directions; the last layer comes first."""
        names = state_names(kind, self.cell)
        states = [np.concatenate([result[n] for result in reversed(results)]) for n in names]
        return tuple(states) if len(states) > 1 else states[0]


@dataclass
class _Saved:
    """The values that a forward pass in training keeps for the backward pass; ``wanted`` names the
    states whose sequences it returned.
    """

    wanted: tuple[str, ...] = ()
    output_shape: tuple[int, ...] = ()
    pullbacks: list[passes.Pullback] = field(default_factory=list)
    dropped: list[Array] = field(default_factory=list)  # between layers: 0, or 1 / (1 - dropout)


def _gate_bias(cell: Cell, bias: bool, starts: Mapping[str, float] | None) -> dict[str, float]:
    starts = check.mapping("gate_bias", {} if starts is None else starts, "numbers by gate")
    for name in starts:
        if name not in cell.gates or not bias:
            expected = ", ".join(cell.gates) if bias else "none, there is no bias"
            refuse("gate_bias", f"a value for {name!r}", expected, "Leave it out.")
    return {name: check.number("gate_bias", value) for name, value in starts.items()}


class LSTM(RNN):
    """Long short-term memory; its equations are in ``anycell.cells.LSTM``.

    Args:
        forget_bias: the initial bias of the forget gate. None means 1 (Gers, Schmidhuber & Cummins,
            2000; Jozefowicz, Zaremba & Sutskever, 2015), but with ``initializer="torch"`` the bias
            that is drawn.
        all else: as in ``RNN``. The state is ``(h, c)``, the order of gates is i f g o.

    Example:
        >>> layer = LSTM(input_size=1, hidden_size=32, seed=0)
        >>> output, (h, c) = layer.forward(np.zeros((104, 8, 1)))
        >>> output.shape, h.shape, c.shape
        ((104, 8, 32), (1, 8, 32), (1, 8, 32))
    """

    of = cells.LSTM

    @explained
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        dtype: npt.DTypeLike = "float32",
        initializer: str | initializers.Initializer = "glorot_uniform",
        recurrent_initializer: str | initializers.Initializer = "orthogonal",
        gate_bias: Mapping[str, float] | None = None,
        seed: int | None = None,
        checkpoint: str | int | None = None,
        *,
        forget_bias: float | None = None,
    ) -> None:
        if forget_bias is None and bias and initializer != "torch":
            forget_bias = 1.0
        if forget_bias is not None:
            others = {} if gate_bias is None else gate_bias
            others = check.mapping("gate_bias", others, "numbers by gate")
            gate_bias = {"f": check.number("forget_bias", forget_bias), **others}
        super().__init__(
            self.of, input_size, hidden_size, num_layers, bias, batch_first, dropout,
            bidirectional, dtype, initializer, recurrent_initializer, gate_bias, seed, checkpoint,
        )  # fmt: skip
