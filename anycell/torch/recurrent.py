"""The base of modules that run whole sequences, and what their stack of layers is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Proxy
from torch.nn.modules import module as modules
from torch.nn.utils.rnn import PackedSequence
from torch.torch_version import TorchVersion

from anycell.explanation import Explained
from anycell.lang.cell import Cell
from anycell.layer import ENDS, check_checkpoint
from anycell.layer.checks import check_one_direction, check_options, refuse
from anycell.layer.layers import Stack, one_step
from anycell.plan import ARRAYS, Layer, Options, Sizes
from anycell.torch.framework import Torch
from anycell.torch.observers import autocast, compiled, exporting, watched
from anycell.torch.operators import ops
from anycell.torch.operators.composite import Arrays, States
from anycell.torch.operators.functional import autocast_dtype, in_its_dtype, run_layer
from anycell.torch.operators.warm import again, learn, quiet
from anycell.torch.packed import Packing

if TYPE_CHECKING:
    from typing_extensions import Self

Lengths = Tensor | Sequence[int]
# Before, Dynamo takes some numbers of a module for unknown ones, see ``ops``.
_SHORT = torch.__version__ >= TorchVersion("2.8")


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
    _arrays = ARRAYS  # that a call takes
    _parameters: dict[str, Any]
    _forward_pre_hooks: dict[int, Any]
    _forward_hooks: dict[int, Any]
    _sizes: Any

    @property
    def _like(self) -> Tensor:
        """A tensor that has the dtype and the device of all tensors of a call."""
        return self.weight_ih_l0

    def _weights(self, cell: Cell) -> list[Arrays]:
        """Returns the weights of each layer, by the names of ``anycell.layer.signature``."""
        directions = 1 + self.bidirectional
        return [learned(self, cell, f"_l{k}", directions) for k in range(self.num_layers)]

    def _layer(self) -> Layer:
        return layer_of(self.cell, self._sizes, self.weight_ih_l0, 1 + self.bidirectional)

    def prepare(self) -> Self:
        """Returns the module itself: steps read the weights as they are, and need no preparation.

        Raises:
            ValueError: for a bidirectional layer, which needs the end before the start.
        """
        check_one_direction("prepare", self)
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

        Under ``torch.no_grad()`` or ``torch.inference_mode()``, a step on the CPU that is like
        an earlier one is one native call. Any other step is an ordinary call.

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
            >>> layer = anycell.torch.LSTM(3, 8)
            >>> with torch.no_grad():
            ...     output, state = layer.step(torch.zeros(1, 3))
            ...     output, state = layer.step(torch.zeros(1, 3), state, resets=torch.ones(1))
            >>> output.shape
            torch.Size([1, 8])
        """
        hooks = self._forward_pre_hooks or self._forward_hooks  # what forward() would run
        hooks = hooks or modules._global_forward_pre_hooks or modules._global_forward_hooks
        arguments = {"static": static, "resets": resets, "reset_state": reset_state}
        alone, plain = not hooks and quiet(), arguments
        if alone:
            if type(resets) is Tensor:
                plain = {**arguments, "resets": _plain_flags(resets)}
            known = again(self, "step", x, state, plain)
            if known is not None:
                return known
        check_one_direction("step", self)
        results = one_step(Torch, self, self, x, self._like, state, arguments)
        if alone:
            learn(self, "step", x, state, plain, results)
        return results

    def _compiled(self, x: Any, state: Any) -> Any:
        """The results of a call with x and states alone, as torch.compile traces it; None for one
        that the ordinary way has to look at, and outside of traces.

        It touches few objects and calls few functions: a compiled call checks again whatever the
        trace has read, which for the ordinary way takes as long as a step of a small layer.
        """
        if not (_SHORT and compiled()) or autocast():
            return None
        if not isinstance(x, Tensor) or x.dim() != 3 or not x.is_cpu:
            return None
        layers, directions, cell = self.num_layers, 1 + self.bidirectional, self.cell
        training, mine = self.training, self._parameters
        if self.checkpoint is not None or (self.dropout and training):
            return None
        states: Any = ()
        if state is not None:
            states = tuple(state) if isinstance(state, (tuple, list)) else (state,)
        steps, rows = x.shape[self.batch_first], x.shape[not self.batch_first]
        if x.shape[2] != self.input_size or steps == 0:
            return None
        of_cell = cell.name, cell.key, self._sizes, x.dtype, training
        plan = ops.plain_call(*of_cell, layers, directions, bool(states), tuple(mine))
        if plan is None:
            return None
        widths, absent, *calls = plan.split("\n")
        if states:
            sizes = widths.split()
            if (len(sizes), len(sizes) == 1) != (len(states), isinstance(state, Tensor)):
                return None
            for tensor, size in zip(states, sizes, strict=True):
                shape = layers * directions, rows, int(size)
                if not isinstance(tensor, Tensor) or tensor.shape != shape:
                    return None
        for name in absent.split():
            if getattr(self, name, None) is not None:
                return None
        output = x.swapaxes(0, 1) if self.batch_first else x
        hyper, ends = list(cell.hyper.values()), []
        for k in range(layers):  # each further function of Python would be checked too
            there, text = calls[k].split("\t")
            tensors = [output]
            for tensor in states:
                part = slice(k * directions, (k + 1) * directions)
                tensors.append(tensor[part] if layers > 1 else tensor)
            tensors += [mine[name] for name in there.split()]
            for tensor in tensors:
                if tensor is None or tensor.dtype != x.dtype or not tensor.is_cpu:
                    return None
            output, *last = ops.FORWARD(tensors, text, hyper)
            ends.append(last)
        if layers == 1:
            final = tuple(ends[0])
        else:
            final = tuple([torch.cat(parts) for parts in zip(*ends, strict=True)])
        if self.batch_first:
            output = output.swapaxes(0, 1)
        return output, final if len(final) > 1 else final[0]

    def _named(self, by_position: Sequence[Any], arguments: dict[str, Any]) -> dict[str, Any]:
        """All arguments of a call by name: torch.onnx's older exporter passes each by position.

        Args:
            by_position: of the arrays that follow the state, the first ones.
            arguments: those that went by name.
        """
        first = dict(zip(self._arrays, by_position, strict=False))
        if len({**first, **arguments}) < len(by_position) + len(arguments):
            given = f"{len(by_position)} by position, and {', '.join(arguments) or 'none'} by name"
            expected = f"each of {', '.join(self._arrays)} once or less"
            refuse("arguments", given, expected, "Pass all by name.", TypeError)
        return {**first, **arguments}

    def _call(self, cell: Cell, arguments: dict[str, Any]) -> Layer:
        """The layer of a call of this module, with the options that it takes out of the call's
        arguments.
        """
        training = self.training
        seed = draw_seed() if training and ops.draws(cell) else 0
        checkpoint, reverse = self.checkpoint, (False, True) if self.bidirectional else (False,)
        if checkpoint is not None:
            check_checkpoint(checkpoint)
        kind: Any = type(self)
        named: dict[str, Any] = {}
        if arguments:
            named = check_options(arguments, function=kind.forward, others=kind._arrays)
            for name in named:
                del arguments[name]
        options = Options(reverse, training=training, seed=seed, checkpoint=checkpoint, **named)
        return Layer(cell, self._sizes, options)


def refuse_more(more: Sequence[Any], module: str) -> NoReturn:
    """Refuses what follows the state by position in a call that takes it by name."""
    hint = (
        "torch.onnx.export passes all with dynamo=False. Export with dynamo=True, or a "
        f"module that calls the {module}."
    )
    given = f"{len(more)} further arguments by position"
    refuse("x, state", given, "others by name", hint, TypeError)


def _plain_flags(flags: Tensor) -> Tensor:
    """Flags as contiguous bool; the tensor itself if any is neither 0 nor 1."""
    whole = flags.bool().contiguous()
    if flags.dtype is torch.bool or flags.is_complex():
        return whole if flags.dtype is torch.bool else flags
    return whole if torch.equal(whole.to(flags.dtype), flags) else flags


def stacked(
    layer: Layer,
    weights: Sequence[Arrays],
    x: Tensor | PackedSequence,
    batch_first: bool = False,
    dropout: float = 0.0,
) -> Stack:
    """Layers of these weights, as they run x; ``dropout`` acts between them, in training."""
    packing = drop = None
    if isinstance(x, PackedSequence):
        packing = Packing.of(x)
        layer = layer._replace(options=layer.options.unread())
    if dropout and layer.options.training:

        def drop(t: Tensor, k: int) -> Tensor:
            if packing is None:
                return F.dropout(t, dropout)
            return packing.pad(F.dropout(packing.pack(t), dropout))

    run = in_its_dtype if autocast() else run_layer
    return Stack(Torch, run, layer, weights, batch_first, drop, packing)


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
