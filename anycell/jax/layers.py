"""``RNN(cell, ...)``: layers of any cell, as functions of their parameters."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from anycell.engines.cpu import isa
from anycell.explanation import Explained
from anycell.jax import streaming
from anycell.jax.framework import Jax, as_arrays, check_key
from anycell.jax.primitive import planned, run, seed_words
from anycell.lang.cell import Cell
from anycell.layer import check_checkpoint, parameters
from anycell.layer.checks import (
    boolean,
    check_cell,
    check_one_direction,
    check_options,
    check_sizes,
    describe,
    integer,
    is_array,
    number,
    refuse,
)
from anycell.layer.layers import AXES, Stack, check_input, one_step
from anycell.layer.signature import of_layer
from anycell.named import shown
from anycell.plan import REALS, ArrayArguments, Engine, Layer, Options, Returning, takes
from anycell.refusal import explained

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from anycell.lang.declare import SizeArguments

Array = Any
State = Any  # a tuple of arrays, or the array of a cell with one state
_DROPPED = 1 << 20  # added to a layer's number: the key of its dropout is folded with this


def check_dtype(dtype: Any) -> None:
    """Refuses all but floating point dtypes."""
    expected = "a floating point dtype"
    if is_array(dtype):
        hint = "Leave it out: the layer knows its sizes, and needs no input."
        refuse("dtype", describe(dtype), expected, hint, TypeError)
    if not jnp.issubdtype(dtype, jnp.floating):
        refuse("dtype", describe(dtype), expected, "Pass jnp.float32.", TypeError)


class RNN(Explained):
    """Layers of any cell, as ``torch.nn.LSTM`` runs layers of one cell.

    The object holds no arrays: ``init`` draws the parameters, and a call takes them. It may be
    static in ``jax.jit``. ``anycell.jax.nnx.RNN`` and ``anycell.jax.equinox.RNN`` are modules.

    With the cell's function f and H = ``hidden_size``, each direction of each layer computes

        x_t = W_ih input_t + b_ih              of all gates, [B, gates * H]
        r_t = W_hh s_{t-1} + b_hh              s is the first state, which is also the output
        state_t = f(x_t, r_t, state_{t-1}, p)

    Args:
        cell: what ``@anycell.cell`` made, for instance one of ``anycell.cells``.
        input_size, hidden_size, num_layers: at least 1.
        bias: whether the projections have biases; does nothing if the cell places its own.
        batch_first: arrays are ``[B, T, .]`` in place of ``[T, B, .]``; states keep their layout.
        dropout: probability that, in training, an element between two layers is zeroed; what stays
            is scaled by ``1 / (1 - dropout)`` (Srivastava et al., 2014).
        bidirectional: a second set of weights runs from the end to the start; the outputs of both
            are side by side.
        checkpoint: saves memory in training, at the cost of time: the forward pass keeps x and the
            states of every ``checkpoint`` steps, with "sqrt" of about sqrt(T) steps; the backward
            pass computes everything else again, with the same bits.
        sizes: the size of states that declare one, by its symbol: ``P=64`` for ``state="h:P c"``.

    Parameters, by name: ``weight_ih_l{k}`` ``[gates * H, in]``, ``weight_hh_l{k}``
    ``[gates * H, H]``, ``bias_ih_l{k}`` and ``bias_hh_l{k}`` ``[gates * H]``, ``{name}_l{k}``
    ``[size]`` for each parameter of the cell, ``weight_{name}_l{k}`` for a further matmul in a
    step. Where gates have sizes of their own, ``weight_ih`` and ``bias_ih`` have their sum in place
    of gates * H, ``weight_hh`` and ``bias_hh`` rows for the gates of size H.
    Names of the reverse direction end in ``_reverse``. Gates are in the cell's order. All this is
    as in ``torch.nn``, so that weights move freely between the two.

    Raises:
        TypeError, ValueError: with the argument, what was given, what is expected, and what to do.

    Example:
        >>> import jax
        >>> layer = RNN(anycell.cells.PeepholeLSTM, input_size=3, hidden_size=8)
        >>> params = layer.init(jax.random.key(0))
        >>> output, (h, c) = layer(params, jax.numpy.zeros((5, 2, 3)), lengths=[5, 3])
        >>> output.shape, h.shape, c.shape
        ((5, 2, 8), (1, 2, 8), (1, 2, 8))
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
        checkpoint: str | int | None = None,
        **sizes: Unpack[SizeArguments],
    ) -> None:
        check_cell(cell, " The body of a lax.scan is for anycell.jax.scan.")
        self.cell, self.sizes = cell, check_sizes(cell, hidden_size, sizes)
        self.input_size = integer("input_size", input_size)
        self.hidden_size = self.sizes["H"]
        self.num_layers = integer("num_layers", num_layers)
        self.bias = boolean("bias", bias) and cell.bias
        self.batch_first = boolean("batch_first", batch_first)
        self.dropout = number("dropout", dropout, 0.0, 1.0)
        self.bidirectional = boolean("bidirectional", bidirectional)
        self.checkpoint = check_checkpoint(checkpoint)
        if self.dropout and self.num_layers == 1:
            message = f"dropout={dropout} acts between layers; with num_layers=1 it does nothing."
            warnings.warn(message, stacklevel=3)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):  # a compiled program may be remembered by the layer's hash
            refuse(name, describe(value), "no change of a layer", "Make another.", AttributeError)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(shown(self))})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[Any, ...]:
        return (*(v for n, v in vars(self).items() if n != "sizes"), *self.sizes.items())

    @property
    def engine(self) -> Engine:
        """The engine that runs this layer in float32, and why."""
        plan = planned(self._layer(), jnp.float32).plan
        return Engine(plan.engine, plan.reason)

    def _layer(self) -> Layer:
        options = Options((False, True)[: 1 + self.bidirectional])
        return Layer(self.cell, tuple(self.sizes.items()), options, "float32")

    @property
    def draws(self) -> bool:
        """Whether a call draws random masks in training, and so needs a seed."""
        return bool(self.cell.keeps or (self.dropout and self.num_layers > 1))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter."""
        whole = self.input_size, self.bias, self.num_layers, 1 + self.bidirectional
        return dict(parameters(self.cell, self.sizes, *whole))

    def init(self, key: Array, dtype: Any = jnp.float32) -> dict[str, Array]:
        """Draws the parameters: the value that the cell declares, or U(-1/sqrt(H), 1/sqrt(H)).

        Args:
            key: of ``jax.random``.
            dtype: of all parameters: float32, bfloat16, float16 or float64.
        """
        key = check_key("key", key, "a key of jax.random")
        check_dtype(dtype)
        declared, bound = {p.name: p.initial for p in self.cell.params}, self.hidden_size**-0.5
        keys = jax.random.split(key, len(self.shapes))
        params = {}
        for (name, shape), seed in zip(self.shapes.items(), keys, strict=True):
            value = declared.get(name.rpartition("_l")[0])
            if value is None:
                params[name] = jax.random.uniform(seed, shape, dtype, -bound, bound)
            else:
                params[name] = jnp.full(shape, value, dtype)
        return params

    @takes(ArrayArguments, Returning)
    def __call__(
        self,
        params: Mapping[str, Array],
        x: Array,
        state: State | None = None,
        *,
        training: bool = False,
        seed: Any = None,
        engine: str | None = None,
        **arguments: Any,
    ) -> tuple[Any, ...]:
        """Runs whole sequences.

        Args:
            params: what ``init`` returned, or arrays of these names and shapes.
            x: ``[T, B, input_size]``, or ``[B, T, input_size]`` if ``batch_first``; without a
                batch, ``[T, input_size]``. One step of a batch is
                ``x[None]``.
            state: a tuple of ``[num_layers * D, B, H]`` in the cell's order, with D = 2 if
                ``bidirectional`` else 1, or a single array for a cell with one state. None starts
                from the values that the cell declares, mostly zero.
            training: applies dropout and the cell's random masks, which need a ``seed``: a key of
                ``jax.random``, or an int.
            engine: "cpu", "reference" or None, see ``recurrence``.
            {arguments}

        Returns:
            output: ``[T, B, D * H]``, laid out as x: the last layer's first state at every step.
            state: laid out as the argument, after each row's last step.
            a third result, if ``return_states``: a dictionary of the last layer's states by name,
                ``[T, B, D * size]``, laid out as x.

        Raises:
            TypeError, ValueError: with the argument, what was given, what is expected, and what to
                do.
        """
        params, (x, state) = self._params(params), as_arrays((x, state))
        arguments |= as_arrays({n: a for n, a in arguments.items() if n in REALS})
        like, directions = params["weight_ih_l0"], 1 + self.bidirectional
        check_input(Jax, x, (*AXES[self.batch_first], self.input_size), like)
        training = boolean("training", training)
        options = Options(
            reverse=(False, True)[:directions], training=training, checkpoint=self.checkpoint,
            **check_options(arguments, function=type(self).__call__),
        )  # fmt: skip
        layer = planned(self._layer()._replace(options=options), like.dtype, engine)
        words = seed_words(self.cell, seed) if training and self.draws else None
        weights = []
        for k in range(self.num_layers):
            weights.append(of_layer(self.cell, params, k, directions))
            if training and self.cell.keeps:
                weights[k]["seed"] = words
            if f"packed_l{k}" in params:
                weights[k]["packed"] = params[f"packed_l{k}"]
        drop = partial(self._dropped, words=words) if training and self.dropout else None
        stack = Stack(Jax, run, layer, weights, self.batch_first, drop)
        return stack.call(x, state, arguments)

    def initial_state(self, batch: int | None, dtype: Any = jnp.float32) -> State:
        """The state from which a call without one starts, laid out as a call takes and returns it.

        It is what the cell declares, mostly zero: the first carry of a ``lax.scan`` over steps.

        Args:
            batch: the number of rows; None for a call without a batch.
            dtype: of the parameters.
        """
        rows = () if batch is None else (integer("batch", batch, 0),)
        check_dtype(dtype)
        layers = self.num_layers * (1 + self.bidirectional)
        states = tuple(
            jnp.full((layers, *rows, self.sizes[s.size]), s.initial, dtype)
            for s in self.cell.states
        )
        return states if len(states) > 1 else states[0]

    def prepare(self, params: Mapping[str, Array]) -> Prepared:
        """Packs the weights for ``step``, once for all steps to come.

        Call it outside of the loop over the steps. It returns a tree of arrays, a function of the
        parameters: prepare the new ones after an update. Where no kernel steps (on a GPU, in 16
        bits) it packs nothing, and steps are calls of the layer. ``step`` with the result has
        derivatives by x and by states; to differentiate by parameters, pass these to ``step``.

        Args:
            params: as for a call.

        Raises:
            ValueError: for a bidirectional layer, which needs the end before the start.
        """
        check_one_direction("prepare", self)
        params = self._params(params)
        layer = planned(self._layer(), params["weight_ih_l0"].dtype)
        packed = streaming.pack(layer, self.num_layers, params)
        return Prepared(params, packed, self, isa.current().name)

    def step(
        self,
        params: Mapping[str, Array] | Prepared,
        x: Array,
        state: State | None = None,
        *,
        static: Array | None = None,
        resets: Array | None = None,
        reset_state: State | None = None,
    ) -> tuple[Array, State]:
        """Runs one step, in evaluation: a call with a sequence of length 1.

        Args:
            params: as for a call, or what ``prepare`` returned, whose step is faster.
            x: ``[B, input_size]``; without a batch, ``[input_size]``.
            state, static: as for a call; pass the state that the step before returned.
            resets: ``[B]``, bool or 0 and 1: True where the state is replaced before the step, such
                as at the start of an episode.
            reset_state: the state that resets restore, laid out as ``state``; None is the initial
                one that the cell declares.

        Returns:
            output: ``[B, H]``.
            state: after the step, laid out as the argument.

        Raises:
            ValueError: for a bidirectional layer, which needs the end before the start.
            ValueError, TypeError: naming the argument, what was given and what was expected.

        Example:
            >>> import jax
            >>> layer = RNN(anycell.cells.LSTM, input_size=3, hidden_size=8)
            >>> prepared = layer.prepare(layer.init(jax.random.key(0)))
            >>> def step(state, x):
            ...     output, state = layer.step(prepared, x, state)
            ...     return state, output
            >>> x = jax.numpy.zeros((5, 2, 3))
            >>> state, output = jax.lax.scan(step, layer.initial_state(2), x)
            >>> output.shape
            (5, 2, 8)
        """
        check_one_direction("step", self)
        if isinstance(params, Prepared):
            params = params.of_step(self)
        params = self._params(params)
        arguments = {"static": static, "resets": resets, "reset_state": reset_state}
        call, like = partial(self, params), params["weight_ih_l0"]
        return one_step(Jax, self, call, as_arrays(x), like, state, arguments)

    def _params(self, params: Any) -> dict[str, Array]:
        """Checks parameters."""
        if isinstance(params, Packed):
            return params
        shapes, expected = self.shapes, "the parameters of `init`, by name"
        if not isinstance(params, Mapping):
            hint = "The layer holds none: pass what its `init` returned first, then x."
            refuse("params", describe(params), expected, hint, TypeError)
        if faults := sorted(params.keys() ^ shapes.keys()):
            kind = "unknown" if faults[0] in params else "missing"
            known = f"{expected}: {', '.join(shapes)}"
            refuse("params", f"{faults[0]!r}, {kind}", known, "Pass all of them, and no other.")
        params = as_arrays(dict(params))
        first, *_ = shapes
        axes = f"by the sizes of the layer and the dtype of {first}"
        for name, shape in shapes.items():
            Jax.check_array(name, params[name], shape, axes, params[first])
        return params

    def _dropped(self, x: Array, k: int, words: Array) -> Array:
        """The input of layer k > 0 in training."""
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        key = jax.random.fold_in(key, _DROPPED + k)
        kept = jax.random.bernoulli(key, 1 - self.dropout, x.shape)
        return jnp.where(kept, x / (1 - self.dropout), 0)


@dataclass(frozen=True)
class Prepared:
    """Parameters of a layer for its ``step``, with their weights packed: a tree of arrays.

    Pickles and copies by ``copy`` do not carry the packed weights, which are packed again.

    Attributes:
        params: the parameters.
        packed: the packed weights of each layer; none where no kernel steps.
        layer: the layer.
        target: the instruction set for which the weights are packed.
    """

    params: dict[str, Array]
    packed: tuple[Array, ...]
    layer: RNN
    target: str

    def __reduce__(self) -> tuple[Any, ...]:
        return self.layer.prepare, (self.params,)

    def of_step(self, layer: RNN) -> Mapping[str, Array]:
        """The arrays for a step of this layer, by name."""
        if layer != self.layer:
            hint = "Call prepare() of the layer that steps."
            refuse("params", f"weights prepared by {self.layer!r}", repr(layer), hint)
        current = isa.current().name
        if self.packed and current != self.target:
            given = f"weights packed for the instruction set {self.target!r}"
            refuse("params", given, f"{current!r}, which is in use", "Call prepare() again.")
        return Packed(self.params | {f"packed_l{k}": w for k, w in enumerate(self.packed)})


jax.tree_util.register_dataclass(
    Prepared, data_fields=["params", "packed"], meta_fields=["layer", "target"]
)


class Packed(dict[str, Array]):
    """Parameters that ``prepare`` has checked, and their packed weights."""
