"""``RNNCell(cell, units)``: the weights of any cell, and one step of it, as a layer of Keras."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
from keras import constraints, initializers, ops, regularizers
from keras.src.layers.rnn.dropout_rnn_cell import DropoutRNNCell  # keras.layers.RNN looks for it

from anycell import cells
from anycell.keras import cells as of_keras
from anycell.keras.call import TURNED, Arrays, Tensor, named_states
from anycell.keras.composite import composite
from anycell.lang.cell import ONE, RECURRENT, Cell
from anycell.lang.transform import LowRank, low_rank
from anycell.layer.checks import boolean, check_cell, check_sizes, declared_sizes, number, refuse
from anycell.plan import Layer, Options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from anycell.keras.typed import LayerArguments

_KINDS = {"initializer": initializers, "regularizer": regularizers, "constraint": constraints}
# The arguments that Keras has for each role of a weight, with Keras's module for them.
_OF_WEIGHTS: dict[str, Any] = {
    f"{role}_{kind}": module
    for role in ("kernel", "recurrent", "bias", "param")
    for kind, module in _KINDS.items()
}


@keras.saving.register_keras_serializable("anycell")
class RNNCell(keras.layers.Layer, DropoutRNNCell):
    """One step of any cell, as ``RNN(cell, units)`` runs it.

    With the cell's function ``f`` and H = ``units``

        x = inputs @ kernel + bias                       of all gates, [B, gates * H]
        r = s @ recurrent_kernel                         s is the first state, also the output
        new states = f(x, r, states, params)

    Args:
        cell: what ``@anycell.cell`` made, for instance one of ``anycell.cells``. Saved models,
            ``clone_model`` and ``Bidirectional`` find a cell of your own if it is registered with
            ``@keras.saving.register_keras_serializable()`` above ``@anycell.cell(...)``.
        units: H.
        use_bias: whether the projections have biases. They have none if the cell places its own.
        unit_forget_bias: whether the bias of a gate ``f``, of a cell with a state ``c``, starts at
            1, as in ``keras.layers.LSTM``.
        kernel_initializer, recurrent_initializer, bias_initializer, and the regularizers and
            constraints of these: as in ``keras.layers.LSTM``.
        param_initializer, param_regularizer, param_constraint: for the cell's parameters; an
            initial value that the cell declares comes first.
        dropout: the rate of dropout of the inputs, one mask for all steps.
        recurrent_dropout: the rate of dropout of the state that enters the recurrent matmul, one
            mask per gate for all steps.
        seed: the seed of dropout and of the cell's random masks.
        kwargs: the sizes that states declare, by their symbol, ``P=64`` for ``state="h:P c"``, and
            the arguments of every layer of Keras.

    Weights, in this order: ``kernel`` ``[in, gates * H]``, ``recurrent_kernel``
    ``[size of s, gates * H]``, ``bias`` ``[gates * H]``, or ``[2, gates * H]`` (of x and of r) for
    a cell that uses the two apart, as GRU does; for each further matmul ``{name}_kernel``
    ``[in, out]``, or ``[heads, in/heads, out/heads]``, and ``{name}_bias``; each parameter
    ``[size]`` by its name. Where gates have sizes of their own, ``kernel`` and ``bias`` have their
    sum in place of gates * H, ``recurrent_kernel`` has columns for the gates of size H, and a bias
    of r is a weight of its own, ``recurrent_bias``.
    """

    def __init__(
        self,
        cell: Cell,
        units: int,
        *,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        recurrent_initializer: Any = "orthogonal",
        bias_initializer: Any = "zeros",
        param_initializer: Any = "glorot_uniform",
        unit_forget_bias: bool = True,
        kernel_regularizer: Any = None,
        recurrent_regularizer: Any = None,
        bias_regularizer: Any = None,
        param_regularizer: Any = None,
        kernel_constraint: Any = None,
        recurrent_constraint: Any = None,
        bias_constraint: Any = None,
        param_constraint: Any = None,
        dropout: float = 0.0,
        recurrent_dropout: float = 0.0,
        seed: int | None = None,
        **kwargs: Unpack[LayerArguments],
    ) -> None:
        given = dict(locals())
        check_cell_and_units(cell, units)
        others: dict[str, Any] = {**kwargs}
        self.sizes = {name: others.pop(name) for name in declared_sizes(cell) if name in others}
        check_sizes(cell, units, self.sizes)
        super().__init__(**others)
        self.cell, self.units = cell, units
        self.use_bias = boolean("use_bias", use_bias) and cell.bias
        self.unit_forget_bias = unit_forget_bias
        for name, module in _OF_WEIGHTS.items():
            setattr(self, name, module.get(given[name]))
        self.dropout = number("dropout", dropout, 0.0, 1.0, closed=True)
        self.recurrent_dropout = number(
            "recurrent_dropout", recurrent_dropout, 0.0, 1.0, closed=True
        )
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed=seed)
        self._seed: Tensor = None  # of the masks that the steps of one sequence share
        if self.recurrent_dropout:
            self.dropout_mask_count = len(cell.gates)
        self._resized()

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Creates the weights for inputs ``[B, input_shape[-1]]``."""
        cell, gates = self.cell, self.cell.width(self._all)
        recurrent = cell.by_weight.get(f"weight_{RECURRENT}")
        self.kernel = self._weight("kernel", (input_shape[-1], gates), "kernel")
        self.recurrent_kernel = self.bias = None
        self._further: dict[str, Any] = {}  # what else is learned, by the names below
        if recurrent:
            shape = recurrent.shape(self._all)[::-1]
            self.recurrent_kernel = self._weight("recurrent_kernel", shape, "recurrent")
        if self.use_bias:
            of_r = recurrent.shape(self._all)[:1] if recurrent else ()
            apart = recurrent and not cell.fused.issuperset(recurrent.declared)
            bias = (2, gates) if apart and of_r == (gates,) else (gates,)
            self.bias = self._weight("bias", bias, "bias", self._bias_initializer())
            if apart and of_r != (gates,):  # for the gates of size H only
                self._further["bias_hh"] = self._weight("recurrent_bias", of_r, "bias")
        for l in cell.by_weight.values():
            if l.recurrent:
                continue
            *heads, out, into = l.shape(self._all)
            turned = (*heads, into, out)
            kernel = self._weight(f"{l.shared}_kernel", turned, "recurrent", self._per_head)
            self._further[l.weight] = kernel
            if l.bias:
                rows = (len(l.declared) * self._all[l.out_size],)
                self._further[l.bias_name] = self._weight(f"{l.shared}_bias", rows, "bias")
        for p in cell.params:
            first = None if p.initial is None else initializers.Constant(p.initial)
            self._further[p.name] = self._weight(p.name, (self._all[p.size],), "param", first)
        self.built = True

    def _weight(self, name: str, shape: Any, role: str, initializer: Any = None) -> Any:
        return self.add_weight(
            shape=shape,
            name=name,
            initializer=initializer or getattr(self, f"{role}_initializer"),
            regularizer=getattr(self, f"{role}_regularizer"),
            constraint=getattr(self, f"{role}_constraint"),
        )

    def _per_head(self, shape: Any, dtype: Any = None, **_: Any) -> Tensor:
        """Initializes each block of a block-diagonal weight as a separate matrix."""
        if len(shape) == 2:
            return self.recurrent_initializer(shape, dtype=dtype)
        heads = [self.recurrent_initializer(shape[1:], dtype=dtype) for _ in range(shape[0])]
        return ops.stack(heads)

    def _bias_initializer(self) -> Any:
        """Returns an initializer with ones for the forget gate of cells like an LSTM, else None."""
        cell, usual = self.cell, self.bias_initializer
        if not (self.unit_forget_bias and "f" in cell.gates and "c" in cell.state_names):
            return None

        def initial(shape: Any, dtype: Any = None, **_: Any) -> Tensor:
            ones = initializers.get("ones")
            rows = [
                (ones if gate == "f" else usual)((self._all[size],), dtype=dtype)
                for gate, size in cell.gate_sizes.items()
            ]
            row = ops.concatenate(rows)
            return row if len(shape) == 1 else ops.stack([row, usual(shape[1:], dtype=dtype)])

        return initial

    @property
    def all_sizes(self) -> tuple[tuple[str, int], ...]:
        """The numbers that the size symbols stand for."""
        return tuple(self._all.items())

    def resize(self, symbol: str, count: int) -> None:
        """Sets the number that a size symbol stands for; the caller replaces the weights."""
        if symbol == "H":
            self.units = count
        else:
            self.sizes[symbol] = count
        self._resized()

    def _resized(self) -> None:
        self._all = {"H": self.units, **self.sizes, **({ONE: 1} if self.cell.broadcasts else {})}
        states = [self._all[s.size] for s in self.cell.states]
        self.state_size = states if len(states) > 1 else states[0]
        self.output_size = states[0]

    # -- use -------------------------------------------------------------------------------------
    def gather(self, x: Tensor, states: Sequence[Tensor], **more: Any) -> Arrays:
        """Returns the tensors of a run over ``x [T, B, I]``, in the dtype of the computation, and
        those of ``masks``.
        """
        if (factor := more.pop("factor", None)) is not None:
            x = x * factor
        return gathered(self, self.cell, {"x": x}, states, self._read) | more

    def _read(self, array: Any) -> Tensor:
        return ops.cast(ops.convert_to_tensor(array), self.compute_dtype)

    def call(self, inputs: Tensor, states: Any, training: bool = False) -> tuple[Tensor, Any]:
        """Returns output ``[B, size]`` and new states for inputs ``[B, I]`` and previous states."""
        nested = isinstance(states, (list, tuple))
        before = list(states) if nested else [states]
        options = Options(training=bool(training))
        layer = Layer(self.cell, self.all_sizes, options, outputs=False)
        if training:
            self._check_masks(inputs)
        more = self.masks(inputs, before[0], bool(training))
        _, new = composite(layer, self.gather(ops.expand_dims(inputs, 0), before, **more))
        return new[0], (list(new) if nested else new[0])

    def masks(self, x: Tensor, state: Tensor, training: bool) -> dict[str, Tensor]:
        """Draws the masks of training: ``factor`` ``[B, I]`` of the inputs, ``recurrent_mask``,
        ``seed``."""
        drawn: dict[str, Tensor] = {}
        if not training:
            return drawn
        if 0.0 < self.dropout < 1.0:
            mask = self.get_dropout_mask(x)
            drawn["factor"] = mask[0] if isinstance(mask, list) else mask
        if 0.0 < self.recurrent_dropout < 1.0:
            masks = self.get_recurrent_dropout_mask(state)
            masks = ops.stack(masks) if isinstance(masks, list) else masks  # before Keras 3.5
            drawn["recurrent_mask"] = ops.cast(masks, self.compute_dtype)
        if self.cell.keeps:
            if self._seed is None:
                self._seed = self.seed_generator.next()
            drawn["seed"] = self._seed
            if any(node.attrs[1] == "step" for node in self.cell.keeps):
                self._seed = None
        return drawn

    def reset_dropout_mask(self) -> None:
        """Drops the masks of a sequence; ``keras.layers.RNN`` calls this after each sequence."""
        super().reset_dropout_mask()
        self._seed = None

    def _check_masks(self, inputs: Tensor) -> None:
        """Refuses random masks that cannot be drawn within a loop around single steps."""
        obstacle = None
        if len({node.attrs[1] for node in self.cell.keeps}) > 1:
            obstacle = 'masks per="step" and per="sequence" in one cell'
        elif keras.backend.backend() == "jax":
            import jax

            drops = any(0.0 < rate < 1.0 for rate in (self.dropout, self.recurrent_dropout))
            if isinstance(inputs, jax.core.Tracer) and (drops or self.cell.keeps):
                obstacle = "random masks within a compiled loop of JAX, which cannot return a seed"
        if obstacle is not None:
            expected = "none in training one step at a time, as in keras.layers.RNN"
            hint = "Use anycell.keras.RNN, which draws before its loop."
            refuse(self.name, obstacle, expected, hint, NotImplementedError)

    def get_initial_state(self, batch_size: Any = None) -> list[Tensor]:
        """The values that the cell declares, ``[B, size]`` each."""
        return [
            ops.full((batch_size, self._all[s.size]), s.initial, dtype=self.compute_dtype)
            for s in self.cell.states
        ]

    # -- saving ----------------------------------------------------------------------------------
    def get_config(self) -> dict[str, Any]:
        """All arguments, for ``from_config``."""
        config = super().get_config()
        config |= {"cell": serialize(self.cell), "units": self.units, "use_bias": self.use_bias}
        config["unit_forget_bias"] = self.unit_forget_bias
        for name, module in _OF_WEIGHTS.items():
            config[name] = module.serialize(getattr(self, name))
        config |= {"dropout": self.dropout, "recurrent_dropout": self.recurrent_dropout}
        return config | {"seed": self.seed, **self.sizes}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> RNNCell:
        """The layer that ``get_config`` described."""
        return cls(deserialize(config["cell"]), **{k: v for k, v in config.items() if k != "cell"})


def learned(cell: Any) -> dict[str, Any]:
    """The variables of a cell, Keras's or ours, by the names of ``anycell.layer.signature``, laid
    out as Keras does; ``bias_ih`` may have two rows, the second of r.
    """
    named = {"weight_ih": cell.kernel, "weight_hh": cell.recurrent_kernel, "bias_ih": cell.bias}
    named |= getattr(cell, "_further", {})
    return {name: variable for name, variable in named.items() if variable is not None}


def gathered(
    cell: Any, step: Cell, arrays: Arrays, states: Sequence[Tensor], read: Callable[[Any], Tensor]
) -> dict[str, Tensor]:
    """Returns the tensors of a run, by ``read``: the variables of a cell, or in their place, laid
    out as Keras does, those of ``arrays``, of which None is left out; and the states.
    """
    named = {**learned(cell), **arrays, **named_states(step, states)}
    tensors, params = {}, step.param_names
    for name, array in named.items():
        if array is not None:
            kernel = name.startswith("weight_") and name not in params
            tensors[TURNED + name if kernel else name] = read(array)
    bias = tensors.get("bias_ih")
    if bias is not None and len(bias.shape) == 2:
        tensors["bias_ih"], tensors["bias_hh"] = bias[0], bias[1]
    return tensors


def check_cell_and_units(cell: Any, units: Any) -> None:
    """Checks ``cell``, and ``units`` with the message of Keras's own layers."""
    check_cell(cell, " A cell that is a layer of Keras, with state_size, is passed without units.")
    if isinstance(units, bool) or not isinstance(units, int) or units <= 0:
        raise ValueError(
            "Received an invalid value for argument `units`, "
            f"expected a positive integer, got {units}."
        )


# -- cells in a config ----------------------------------------------------------------------------

# The modules of built-in cells. Neither users' cells nor names registered with Keras begin so.
_BUILT_IN = {"anycell.cells.": cells, "anycell.keras.cells.": of_keras}


def serialize(cell: Cell) -> dict[str, Any]:
    """Returns the config of a cell: its name, and the hyperparameters that were given."""
    if isinstance(cell, LowRank):
        return {"low_rank": serialize(cell.full), "matmuls": cell.matmuls, "bias": cell.bias}
    plain = Cell(cell.function, cell.declaration, {})
    for prefix, module in _BUILT_IN.items():
        namesake = getattr(module, cell.name, None)
        if isinstance(namesake, Cell) and namesake.function is cell.function:
            return {"name": prefix + cell.name, "given": dict(cell.given)}
    return {"name": keras.saving.get_registered_name(plain), "given": dict(cell.given)}


def deserialize(config: Any) -> Cell:
    """Returns the cell of a config: one of ``anycell.cells``, or one registered with Keras.

    Raises:
        ValueError: for any other name.
    """
    if isinstance(config, Cell):
        return config
    if "low_rank" in config:
        full = deserialize(config["low_rank"])
        return low_rank(full, config["matmuls"], bias=config["bias"])
    name = config["name"]
    for prefix, module in _BUILT_IN.items():
        if name.startswith(prefix):
            cell = getattr(module, name.removeprefix(prefix), None)
            break
    else:
        cell = keras.saving.get_registered_object(name)
    if not isinstance(cell, Cell):
        raise ValueError(
            f"cell: given the name {name!r} in a config; expected one of anycell.cells, or a cell "
            "that Keras can find by its name, as saved models, clone_model and Bidirectional need: "
            "put @keras.saving.register_keras_serializable() above its @anycell.cell(...), or "
            f"load with custom_objects={{{name!r}: the_cell}}."
        )
    return cell(**as_given(config["given"]))


def as_given(hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Restores the hyperparameters of a config, which has lists in place of tuples."""
    return {k: _as_tuples(v) for k, v in hyper.items()}


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
