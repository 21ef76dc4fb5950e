"""What the modules share: from a user's tensors to ``[T, B, ...]``, through layers, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from anycell.lang.cell import Cell
from anycell.layer import Options, check_checkpoint
from anycell.torch import ops
from anycell.torch.arguments import Layout, check_tensor, describe
from anycell.torch.composite import Arrays, Call, States
from anycell.torch.functional import autocast, autocast_dtype, compiled, exporting, stack
from anycell.torch.packed import Packing
from anycell.torch.streaming import Prepared, elsewhere

Lengths = Tensor | Sequence[int]
_DIRECTIONS = (False,), (False, True)  # which of them run backwards


class Recurrent:
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
    _sizes: Any = ()

    def _weights(self) -> list[Arrays]:
        """What each layer learns, by the names of ``anycell.layer.signature``."""
        raise NotImplementedError

    def prepare(self) -> Any:
        """Packs the weights for ``step``, once for all steps to come; gives the module itself.

        ``step`` packs them anew by itself when a weight has been replaced, or written to in any way
        that autograd notices: by an optimizer, ``load_state_dict``, ``copy_``; and for another
        ``cell``. A write in place through ``.data``, or to a weight made in inference mode, goes
        unnoticed: call this again. Where the module has forward hooks, as of ``weight_norm`` in its
        older form, a step is an ordinary call.

        Raises:
            ValueError: for a bidirectional layer, which needs the end before the start.
        """
        self._one_direction("prepare")
        object.__setattr__(self, "_prepared", Prepared(self))
        return self

    def step(
        self, x: Tensor, state: Tensor | States | None = None, *, static: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """One step, as they arrive: what a call gives for a sequence of one step.

        After ``prepare()``, and where no gradient is wanted (under ``torch.no_grad()`` or
        ``torch.inference_mode()``), it is one native call per layer on packed weights. That is for
        float32 and float64 on the CPU; all else is an ordinary call.

        Args:
            x: ``[B, input_size]``, or with no batch ``[input_size]``.
            state: ``[num_layers, B, size]`` per state, as a call takes and gives it; without a
                batch ``[num_layers, size]``. None for what a call begins with.
            static: as a call takes it.

        Returns:
            output ``[B, size]``, and the new state; never arrays that were given.

        Raises:
            ValueError: for a bidirectional layer, which needs the end before the start.
            TypeError, ValueError: for arguments of another kind, shape or dtype.

        Example:
            >>> layer = anycell.torch.LSTM(3, 8).prepare()
            >>> with torch.no_grad():
            ...     output, state = layer.step(torch.zeros(1, 3))
            ...     output, state = layer.step(torch.zeros(1, 3), state)
            >>> output.shape
            torch.Size([1, 8])
        """
        prepared = self.__dict__.get("_prepared")
        hooks = self._forward_pre_hooks or self._forward_hooks  # what forward() would run
        if prepared is not None and not hooks and not elsewhere():
            if prepared.stale(self):
                prepared = self.prepare()._prepared
            if not (self.training and (self.dropout or prepared.keeps)):
                found = prepared.step(x, state, static)
                if found is not None:
                    return found
        self._one_direction("step")
        rows = tuple(x.shape[:-1]) if isinstance(x, Tensor) and x.dim() == 2 else ()
        axes = "one step of the input"
        check_tensor("x", x, (*rows, self.input_size), axes, self.weight_ih_l0)
        time = 1 if rows and self.batch_first else 0
        given: dict[str, Any] = {} if static is None else {"static": static}
        output, new = self(x.unsqueeze(time), state, **given)  # type: ignore[operator]
        return output.squeeze(time), new

    def _one_direction(self, method: str) -> None:
        if self.bidirectional:
            raise ValueError(
                f"{method}: given bidirectional=True; expected a layer of one direction. The other "
                "one begins at the end of the sequence: call the layer on all of it."
            )

    def _run(
        self,
        x: Tensor | PackedSequence,
        state: States | None,
        *,
        mask: Tensor | None = None,
        lengths: Lengths | None = None,
        resets: Tensor | PackedSequence | None = None,
        reset_state: States | None = None,
        static: Tensor | None = None,
        masked_output: str = "zero",
    ) -> tuple[Any, States]:
        """Input and states, which have been checked, through the layers."""
        if isinstance(x, PackedSequence):
            refuse_beside_packed(mask=mask, lengths=lengths)
            run = torch.compiler.disable(self._run_packed) if compiled() else self._run_packed
            return run(x, state, resets, reset_state, static)
        batched = x.dim() == 3
        if not batched:
            x, static = x.unsqueeze(1), None if static is None else static.unsqueeze(0)
            state, reset_state = (_each(s, lambda t: t.unsqueeze(1)) for s in (state, reset_state))
        elif self.batch_first:
            x = x.transpose(0, 1)
        flags = {}
        if mask is not None or lengths is not None or resets is not None:
            layout = Layout(x.shape[0], x.shape[1], self.batch_first, batched, x.device)
            flags = {
                "mask": layout.valid(mask, lengths),
                "resets": None if resets is None else layout.flags("resets", resets),
            }
        arrays = {"x": x, "static": static, **flags}
        output, final = self._layers(arrays, state, reset_state, masked_output == "repeat")
        if not batched:
            return output.squeeze(1), tuple(s.squeeze(1) for s in final)
        return (output.transpose(0, 1) if self.batch_first else output), final

    def _run_packed(
        self,
        x: PackedSequence,
        state: States | None,
        resets: Tensor | PackedSequence | None,
        reset_state: States | None,
        static: Tensor | None,
    ) -> tuple[PackedSequence, States]:
        """Padded, under a mask, and packed again."""
        packing = Packing.of(x)

        def rows(given: Tensor, order: Tensor | None, axis: int) -> Tensor:
            return given if order is None else given.index_select(axis, order)

        arrays = {
            "x": packing.pad(x.data),
            "static": None if static is None else rows(static, packing.order, 0),
            "mask": packing.mask,
            "resets": None if resets is None else packing.alike("resets", resets, x),
        }
        output, final = self._layers(
            arrays,
            _each(state, lambda s: rows(s, packing.order, 1)),
            _each(reset_state, lambda s: rows(s, packing.order, 1)),
            True,  # outputs of masked steps are not read, and these take no memory of their own
            lambda t: packing.pad(F.dropout(packing.pack(t), self.dropout)),
        )
        final = tuple(rows(s, packing.back, 1) for s in final)
        return PackedSequence(packing.pack(output), *x[1:]), final

    def _layers(
        self,
        arrays: dict[str, Tensor | None],
        state: States | None,
        reset_state: States | None,
        repeat: bool,
        drop: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, States]:
        """From and to ``[T, B, ...]``; ``drop`` between layers is torch's own by default."""
        cell = self.cell
        options = Options(
            reverse=_DIRECTIONS[self.bidirectional],
            repeat=repeat,
            training=self.training,
            checkpoint=check_checkpoint(self.checkpoint),
        )
        if self.training and (ops.draws(cell) if compiled() else cell.keeps):
            options = options._replace(seed=draw_seed())
        if not (self.training and self.dropout):
            drop = None
        elif drop is None:
            drop = functools.partial(F.dropout, p=self.dropout)
        tensors = {name: t for name, t in arrays.items() if t is not None}
        for kind, states in (("state", state), ("reset_state", reset_state)):
            if states is not None:
                names = [f"{kind} {name}" for name in cell.state_names]
                tensors.update(zip(names, states, strict=True))
        weights = self._weights()
        call = Call(cell, self.hidden_size, options, self._sizes)
        if not autocast():
            return stack(call, tensors, weights, drop)
        # What other layers hand on may be of 16 bits, whatever the dtype of this one.
        dtype = autocast_dtype(self.weight_ih_l0)
        if dtype is not self.weight_ih_l0.dtype:
            weights = [{n: t.to(dtype) for n, t in learned.items()} for learned in weights]
        with torch.autocast(tensors["x"].device.type, enabled=False):
            flags = "mask", "resets"
            tensors = {n: t if n in flags else t.to(dtype) for n, t in tensors.items()}
            return stack(call, tensors, weights, drop)


def refuse_beside_packed(**arguments: Any) -> None:
    """A ``PackedSequence`` has its lengths."""
    for name, given in arguments.items():
        if given is not None:
            raise ValueError(
                f"{name}: given {describe(given)}; expected None with a PackedSequence, which has "
                "its lengths. Pass a padded tensor, or leave it out."
            )


def draw_seed() -> Any:
    """The seed of one call's random masks, from torch's default generator; traced as a tensor."""
    seed = torch.randint(2**63 - 1, (), device="cpu")
    return seed if compiled() or exporting() else int(seed)


def _each(states: States | None, change: Callable[[Tensor], Tensor]) -> States | None:
    return states and tuple(map(change, states))
