"""The base of modules: brings a user's tensors to ``[T, B, ...]``, through layers, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Proxy
from torch.nn.modules import module as modules
from torch.nn.utils.rnn import PackedSequence

from anycell.explanation import Explained
from anycell.lang.cell import Cell
from anycell.layer import ENDS, check_checkpoint
from anycell.layer.checks import Layout, check_one_direction, check_options, describe, refuse
from anycell.layer.rounding import quantized
from anycell.layer.sequences import besides_output, by_name, check_return_states
from anycell.layer.signature import FLAGS, state_names
from anycell.plan import Layer, Options, Plan, Sizes
from anycell.torch import ops
from anycell.torch.arguments import (
    TORCH,
    check_flags,
    check_recurrent_mask,
    check_states,
    check_tensor,
)
from anycell.torch.composite import Arrays, Result, States
from anycell.torch.functional import autocast_dtype, stack
from anycell.torch.fused import autocast
from anycell.torch.observers import compiled, exporting, watched
from anycell.torch.packed import Packing, parts
from anycell.torch.streaming import Packed, elsewhere

if TYPE_CHECKING:
    from typing_extensions import Self

Lengths = Tensor | Sequence[int]


class Recurrent(Explained):
    """Mixin of the modules that run whole sequences. It adds no attribute to an instance."""

    cell: Cell
    input_size: int
    hidden_size: int
    num_layers: int
    bidirectional: bool
    batch_first: bool
    dropout: float
    training: bool
    weight_ih_l0: Tensor
    checkpoint: str | int | None = None  # see RNN
    _forward_pre_hooks: dict[int, Any]
    _forward_hooks: dict[int, Any]
    _sizes: Any

    @property
    def _like(self) -> Tensor:
        """A tensor that has the dtype and the device of all tensors of a call."""
        return self.weight_ih_l0

    def _weights(self, cell: Cell) -> list[Arrays]:
        """Returns the weights of each layer, by the names of ``anycell.layer.signature``."""
        layers: list[Arrays] = []
        for k in range(self.num_layers):  # a comprehension would be one more call
            layers.append(learned(self, cell, f"_l{k}", 1 + self.bidirectional))
        return layers

    def _layer(self) -> Layer:
        return layer_of(self.cell, self._sizes, self.weight_ih_l0, 1 + self.bidirectional)

    def prepare(self) -> Self:
        """Packs the weights for ``step``, once for all steps to come; returns the module itself.

        ``step`` packs them again when ``cell`` or a weight was replaced, or when a weight was
        written to in a way that autograd notices: by an optimizer, ``load_state_dict``, ``copy_``.
        A write in place through ``.data`` or ``torch.distributed``, to a weight made in inference
        mode, or to an attribute of a parametrisation goes unnoticed: call this method again. A step
        is an ordinary call if the module, or torch for all modules, has forward hooks, which the
        older ``weight_norm`` sets, and in training if weights are parametrised.

        Raises:
            ValueError: for a bidirectional layer, which needs the end before the start.
        """
        check_one_direction("prepare", self)
        object.__setattr__(self, "_prepared", Packed(self))
        return self

    def step(
        self,
        x: Tensor,
        state: Tensor | States | None = None,
        *,
        static: Tensor | None = None,
        resets: Tensor | None = None,
        reset_state: Tensor | States | None = None,
    ) -> tuple[Tensor, Any]:
        """Runs one time step; returns the results of a call for a sequence of one step.

        After ``prepare()``, and if no gradient is wanted (under ``torch.no_grad()`` or
        ``torch.inference_mode()``), a step in float32 or float64 on the CPU is one native call on
        packed weights. Any other step is an ordinary call.

        Args:
            x: ``[B, input_size]``, or without a batch ``[input_size]``.
            state: ``[num_layers, B, size]`` per state, as a call takes and returns it; without a
                batch ``[num_layers, size]``. None for the state with which a call begins.
            static: as a call takes it.
            resets: ``[B]``, or without a batch ``[]``, True where the state is replaced before the
                step, for instance where an episode starts. bool, or 0 and 1 of any real dtype.
            reset_state: the state that resets restore; None for the values that the cell declares.

        Returns:
            output ``[B, size]``, and the new state; never tensors that were passed in.

        Raises:
            ValueError: for a bidirectional layer, which needs the end before the start.
            TypeError, ValueError: for arguments of another kind, shape or dtype.

        Example:
            >>> layer = anycell.torch.LSTM(3, 8).prepare()
            >>> with torch.no_grad():
            ...     output, state = layer.step(torch.zeros(1, 3))
            ...     output, state = layer.step(torch.zeros(1, 3), state, resets=torch.ones(1))
            >>> output.shape
            torch.Size([1, 8])
        """
        prepared = self.__dict__.get("_prepared")
        hooks = self._forward_pre_hooks or self._forward_hooks  # what forward() would run
        hooks = hooks or modules._global_forward_pre_hooks or modules._global_forward_hooks
        if prepared is not None and not hooks and not elsewhere():
            if prepared.stale(self):
                prepared = self.prepare().__dict__["_prepared"]
            if not (self.training and (self.dropout or prepared.draws)):
                results = prepared.step(x, state, static, resets, reset_state)
                if results is not None:
                    return results
        check_one_direction("step", self)
        rows = tuple(x.shape[:-1]) if isinstance(x, Tensor) and x.dim() == 2 else ()
        axes = "one step of the input"
        check_tensor("x", x, (*rows, self.input_size), axes, self._like)
        time = 1 if rows and self.batch_first else 0
        if resets is not None:
            resets = check_flags("resets", resets, rows and rows[:1], "one per row", x)
            resets = resets.unsqueeze(time)
        further = {"static": static, "resets": resets, "reset_state": reset_state}
        further = {name: value for name, value in further.items() if value is not None}
        output, new = self(x.unsqueeze(time), state, **further)  # type: ignore[operator]
        return output.squeeze(time), new

    def _run_cell(
        self,
        cell: Cell,
        x: Tensor | PackedSequence,
        arrays: Arrays,
        *,
        plan: Plan | None = None,
        mask: Tensor | None = None,
        lengths: Lengths | None = None,
        resets: Tensor | PackedSequence | None = None,
        reset_state: Tensor | States | None = None,
        recurrent_mask: Tensor | None = None,
        return_states: bool | str | Sequence[str] | None = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Runs a cell, and returns the result of the call.

        Args:
            cell: the module's cell.
            x: as users pass it, checked.
            arrays: states and static by their public names, checked.
            plan: see ``Layer``.
            mask, lengths, resets, reset_state, recurrent_mask, return_states, options: as users
                pass them.
        """
        like = parts(x)[0] if isinstance(x, PackedSequence) else x
        if recurrent_mask is not None:
            check_recurrent_mask(cell, recurrent_mask, dict(self._sizes), self._rows(x), like)
            arrays = {**arrays, "recurrent_mask": recurrent_mask}
        if reset_state is not None:
            arrays = {**arrays, **self._named("reset_state", reset_state, self._rows(x), like)}
        wanted = check_return_states(cell, return_states) if return_states else ()
        output, final, others = sequence(
            self._call(cell, options, besides_output(wanted, cell) if wanted else (), plan),
            x,
            arrays,
            self._weights(cell),
            batch_first=self.batch_first,
            dropout=self.dropout,
            mask=mask,
            lengths=lengths,
            resets=resets,
        )
        if not wanted:
            return output, final if len(final) > 1 else final[0]
        sequences = by_name(wanted, cell, output, others)
        return output, final if len(final) > 1 else final[0], sequences

    def _rows(self, x: Tensor | PackedSequence) -> tuple[int, ...]:
        """Returns the batch axis of other tensors, such as states: ``(B,)``, or () without one."""
        if isinstance(x, PackedSequence):
            return (int(parts(x)[1][0]),)
        return (x.shape[0 if self.batch_first else 1],) if x.dim() == 3 else ()

    def _named(
        self, kind: str, states: Any, rows: tuple[int, ...], like: Tensor
    ) -> dict[str, Tensor]:
        """Checks ``state`` or ``reset_state``; returns its tensors by public names."""
        first = (self.num_layers * (1 + self.bidirectional), *rows)
        checked = check_states(kind, states, self.cell, dict(self._sizes), first, like)
        return dict(zip(state_names(kind, self.cell), checked, strict=True))

    def _call(
        self,
        cell: Cell,
        given: dict[str, Any],
        sequences: tuple[str, ...] = (),
        plan: Plan | None = None,
    ) -> Layer:
        """The arguments of a call of this module besides its tensors; ``given`` are options."""
        training, seed = self.training, 0
        if training and (ops.draws(cell) if plan is None and compiled() else cell.keeps):
            seed = draw_seed()
        checkpoint, reverse = self.checkpoint, (False, True) if self.bidirectional else (False,)
        if checkpoint is not None:
            check_checkpoint(checkpoint)
        kind: Any = type(self)
        named = check_options(given, function=kind.forward) if given else given
        options = Options(reverse, training=training, seed=seed, checkpoint=checkpoint, **named)
        sizes = self._sizes if plan is None else tuple(plan.sizes.items())  # saves a call
        return Layer(cell, sizes, options, sequences=sequences, plan=plan)


def sequence(
    layer: Layer,
    x: Tensor | PackedSequence,
    arrays: Arrays,
    weights: Sequence[Arrays],
    *,
    mask: Tensor | None = None,
    lengths: Lengths | None = None,
    resets: Tensor | PackedSequence | None = None,
    batch_first: bool = False,
    dropout: float = 0.0,
) -> tuple[Any, States, tuple[Any, ...]]:
    """Runs layers of a cell on a user's tensors, which were checked; returns a call's results.

    Args:
        layer: the first layer.
        x: ``[T, B, width]``, ``[B, T, width]`` if ``batch_first``, ``[T, width]``, or packed.
        arrays: states, static and recurrent_mask by their public names, without an axis of rows if
            x has no such axis.
        weights: the weights of each layer.
        mask, lengths, resets: as users pass them.
        dropout: between layers, in training.

    Returns:
        the output and ``layer.sequences``, laid out as x; and the final states.
    """
    if isinstance(x, PackedSequence):
        for name, value in (("mask", mask), ("lengths", lengths)):
            if value is not None:
                expected = "None with a PackedSequence, which has its own lengths"
                refuse(name, describe(value), expected, "Pass a padded tensor, or leave it out.")
        run = torch.compiler.disable(_packed) if compiled() else _packed
        return run(layer, x, arrays, weights, resets, dropout)
    batched = x.dim() == 3
    if not batched:
        x, arrays = x.unsqueeze(1), {name: t.unsqueeze(-2) for name, t in arrays.items()}
    elif batch_first:
        x = x.transpose(0, 1)
    tensors = {"x": x, **arrays}
    if mask is not None or lengths is not None or resets is not None:
        layout = Layout(TORCH, x, x.shape[0], x.shape[1], batch_first, batched)
        valid = layout.valid(mask, lengths)
        if valid is not None:
            tensors["mask"] = valid
        if resets is not None:
            tensors["resets"] = layout.flags("resets", resets)
    drop = functools.partial(F.dropout, p=dropout) if dropout and layer.options.training else None
    run = _in_its_dtype if autocast() else stack
    output, final, others = run(layer, tensors, weights, drop)
    if not batched:
        final = tuple([s.squeeze(1) for s in final])
        return output.squeeze(1), final, tuple([t.squeeze(1) for t in others])
    if batch_first:
        return output.transpose(0, 1), final, tuple([t.transpose(0, 1) for t in others])
    return output, final, others


def _packed(
    layer: Layer,
    x: PackedSequence,
    arrays: Arrays,
    weights: Sequence[Arrays],
    resets: Tensor | PackedSequence | None,
    dropout: float,
) -> tuple[PackedSequence, States, tuple[PackedSequence, ...]]:
    """Pads a sequence, runs the layers under a mask, and packs the results."""
    packing = Packing.of(x)
    tensors = {"x": packing.pad(parts(x)[0])}
    for name, t in arrays.items():
        for_all = name.startswith("reset_state ") and t.dim() == 2  # one value for all rows
        tensors[name] = t if for_all else _rows(t, packing.order)
    if packing.mask is not None:
        tensors["mask"] = packing.mask
    if resets is not None:
        tensors["resets"] = packing.alike("resets", resets, x)
    layer = layer._replace(options=layer.options.unread())

    def drop(t: Tensor) -> Tensor:
        return packing.pad(F.dropout(packing.pack(t), dropout))

    drops = dropout and layer.options.training
    run = _in_its_dtype if autocast() else stack
    output, final, others = run(layer, tensors, weights, drop if drops else None)
    packed, *sequences = [PackedSequence(packing.pack(t), *x[1:]) for t in (output, *others)]
    return packed, tuple([_rows(s, packing.back) for s in final]), tuple(sequences)


def _rows(t: Tensor, order: Tensor | None) -> Tensor:
    """Reorders the rows of ``[..., B, size]``."""
    return t if order is None else t.index_select(-2, order)


def _in_its_dtype(
    layer: Layer, arrays: Arrays, weights: Sequence[Arrays], drop: Callable[[Tensor], Tensor] | None
) -> Result:
    """Calls ``stack`` in the dtype that autocast asks for."""
    # Inputs from other layers may have 16 bits, whatever the dtype of this layer.
    like = [*weights[0].values(), arrays["x"]][0]
    dtype = torch.float32 if quantized(weights[0]) else autocast_dtype(like)
    if dtype is not like.dtype and not quantized(weights[0]):
        weights = [{name: t.to(dtype) for name, t in learned.items()} for learned in weights]
    arrays = {name: t if name in FLAGS else t.to(dtype) for name, t in arrays.items()}
    return stack(layer, arrays, weights, drop)


def learned(module: Any, cell: Cell, layer: str = "", directions: int = 1) -> Arrays:
    """Returns the weights of one layer of a module; their names end in ``layer``."""
    # Like ``layer.places``, but without its cache, which Dynamo does not accept.
    mine, arrays = module._parameters, {}
    for end in ENDS[:directions]:
        for name in cell.learned:
            place = name + layer + end
            # A parametrised weight is not a parameter of the module; an attribute computes it.
            tensor = mine[place] if place in mine else getattr(module, place, None)
            if tensor is not None:
                arrays[name + end] = tensor
    return arrays


def layer_of(cell: Cell, sizes: Sizes, weight: Tensor, directions: int = 1) -> Layer:
    """The layer of a module with this weight."""
    dtype = str(autocast_dtype(weight)).removeprefix("torch.")
    return Layer(cell, sizes, Options((False, True)[:directions]), dtype)


def leaf(module: Any, x: Proxy, state: Any, **arguments: Any) -> Any:
    """Adds a module's call to a ``torch.fx`` graph as one node, like the calls of ``torch.nn``."""
    named = {name: value for name, value in arguments.items() if value is not None}
    positional = (x,) if state is None else (x, state)
    tracer: Any = x.tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(module), positional, named)


def draw_seed() -> Any:
    """Draws the seed of a call's random masks from torch's generator; a tensor when traced."""
    seed = torch.randint(2**63 - 1, (), device="cpu")
    return seed if compiled() or exporting() or watched() else int(seed)
