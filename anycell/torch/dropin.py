"""``LSTM`` and ``GRU``: ``torch.nn``'s own, with another forward."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.utils.rnn import PackedSequence

from anycell import cells
from anycell.engines.gpu import capacity
from anycell.lang.cell import Cell
from anycell.layer import check_checkpoint
from anycell.layer.signature import state_names
from anycell.plan import ARRAYS, Engine, Plan, Returning, Sizes, takes
from anycell.refusal import explained
from anycell.torch.framework import TorchDevice, memory
from anycell.torch.observers import (
    autocast,
    compiled,
    left_alone,
    observed,
    traced,
    transformed,
    watched,
)
from anycell.torch.operators import ops
from anycell.torch.operators.functional import autocast_dtype, engine_of
from anycell.torch.operators.fused import plan_on
from anycell.torch.operators.warm import KNOWN, again, learn, quiet
from anycell.torch.packed import parts
from anycell.torch.recurrent import Recurrent, leaf, stacked
from anycell.torch.typed import DropInArguments

if TYPE_CHECKING:
    from anycell.torch.typed import DropInCall

# On a GPU, cuDNN runs these cells in calls without our arguments, unless ``_beats_cudnn``; in fewer
# steps than CUDNN_STEPS always, because our launch from Python takes as long as some of its steps.
CUDNNS, CUDNN_STEPS = (cells.LSTM, cells.LSTMP, cells.GRU), 16


class DropIn(Recurrent):
    """The forward of ``LSTM`` and ``GRU``, in place of their parent's.

    Calls that it does not run go to the parent class, which raises its own errors. Instances have
    no attributes beyond the parent's, except for ``checkpoint`` if it is given: so ``accelerate``
    only has to set a module's ``__class__``.
    """

    _parent: type[nn.RNNBase]
    _arrays = tuple(name for name in ARRAYS if name != "static")  # which torch's cells do not read
    _parameters: dict[str, Any]
    proj_size: int

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
        proj_size: int = 0,
        device: Any = None,
        dtype: Any = None,
        *,
        checkpoint: str | int | None = None,
    ) -> None:
        sizes = input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional
        further = {"device": device, "dtype": dtype}
        if proj_size:  # nn.GRU refuses this argument, even if it is 0
            further["proj_size"] = proj_size
        super().__init__(*sizes, **further)  # type: ignore[call-arg]
        if check_checkpoint(checkpoint) is not None:
            self.checkpoint = checkpoint

    @property
    def _sizes(self) -> Sizes:
        return (("H", self.hidden_size),)

    @property
    def engine(self) -> Engine:
        """The engine that runs this layer, and why; under autocast, for autocast's dtype."""
        weight = self.weight_ih_l0
        dtype = autocast_dtype(weight)
        plan = plan_on(weight.device.type, self.cell, self._sizes, dtype)
        if isinstance(plan, Plan):
            other = self.checkpoint is not None or self.cell not in CUDNNS
            usual = CUDNN_STEPS, capacity.BATCH
            if plan.engine == "gpu" and not (other or _beats_cudnn(plan, weight.device, *usual)):
                why = f"cuDNN's layer: our kernels are not known to be faster for {usual[1]} rows"
                return Engine("torch", why)
        return engine_of(plan, "torch")

    @takes(DropInArguments, Returning)
    def forward(
        self, input: Tensor | PackedSequence, hx: Any = None, *by_position: Any, **arguments: Any
    ) -> tuple[Any, ...]:
        """Returns output, final state and, if wanted, sequences of states; see the class."""
        plain = not by_position and quiet() and KNOWN.issuperset(arguments)
        if plain:
            known = again(self, "call", input, hx, arguments)
            if known is not None:
                return known
        elif not (by_position or arguments) and (known := self._compiled(input, hx)) is not None:
            return known
        if by_position:
            arguments = self._named(by_position, arguments)
        if isinstance(input, Proxy):
            return leaf(self, input, hx, **arguments)
        if arguments:  # torch's layer may run a call that has none
            if not arguments.get("return_states", True):
                del arguments["return_states"]
            arguments = {n: v for n, v in arguments.items() if v is not None or n not in ARRAYS}
        states = None if hx is None else tuple(hx) if len(self.cell.states) > 1 else (hx,)
        results = self._ours(input, states, arguments)
        if results is None:
            return super().forward(input, hx)  # type: ignore[misc]
        if plain:
            learn(self, "call", input, hx, arguments, results)
        return results

    def _ours(
        self, x: Any, states: tuple[Any, ...] | None, arguments: dict[str, Any]
    ) -> tuple[Any, ...] | None:
        """Returns the result of a call; None if the parent must run it or raise its error.

        Args:
            arguments: those that there are and that torch's layer does not take.
        """
        looked, cell, weight = observed(), self.cell, self.weight_ih_l0
        if looked and compiled() and isinstance(x, PackedSequence):
            return torch.compiler.disable(self._ours)(x, states, arguments)
        theirs = looked and not arguments and traced()
        # ONNX has no LSTM with a projection: torch's exporters fail, or write one without it.
        if theirs and not (self.proj_size and torch.onnx.is_in_onnx_export()):
            return None
        if not self._fits(x, states, weight):
            return None
        if not arguments and not (looked and transformed()):
            plan = self._fused(x, cell, weight, looked)
            if plan is None or (weight.is_cuda and self._is_cudnns(plan, x, looked)):
                return None
        arrays = {}
        if states is not None:
            arrays = dict(zip(state_names("state", cell), states, strict=True))
        layer, weights = self._call(cell, arguments), self._weights(cell)
        stack = stacked(layer, weights, x, self.batch_first, self.dropout)
        return stack.call(x, None, arguments, arrays)

    def _fits(self, x: Any, states: Sequence[Any] | None, weight: Tensor) -> bool:
        """Returns whether input and states have the shape, device and dtype that torch requires."""
        data = x
        if isinstance(x, PackedSequence):
            data, sizes, *_ = x
            if data.dim() != 2 or int(sizes.sum()) != len(data):
                return False
            rows: tuple[int, ...] = (int(sizes[0]),)
        else:
            dims = x.dim() if isinstance(x, Tensor) else 0
            if dims not in (2, 3) or x.shape[int(self.batch_first and dims == 3)] == 0:
                return False
            rows = (x.shape[not self.batch_first],) if dims == 3 else ()
        if data.shape[-1] != self.input_size:
            return False
        tensors = [data]
        if states is not None:
            first = (self.num_layers * (1 + self.bidirectional), *rows)
            width = {"H": self.hidden_size, "P": self.proj_size}
            wanted = [(*first, width[state.size]) for state in self.cell.states]
            if wanted != [tuple(s.shape) if isinstance(s, Tensor) else None for s in states]:
                return False
            tensors += states
        # Under autocast, the dtype of the input may differ from the one the layer computes in.
        device, dtype, any_dtype = weight.device, weight.dtype, autocast()
        return all(t.device == device and (any_dtype or t.dtype is dtype) for t in tensors)

    def _fused(self, x: Tensor | PackedSequence, cell: Cell, weight: Tensor, looked: bool) -> Any:
        """Returns the fused kernel's plan, True for its operator, or None if neither can run x."""
        data = parts(x)[0] if isinstance(x, PackedSequence) else x
        if looked and (compiled() or watched()):
            return ops.known(cell, self._sizes, data) or None
        plan = plan_on(weight.device.type, cell, self._sizes, autocast_dtype(weight))
        return plan if isinstance(plan, Plan) and memory(data) else None

    def _is_cudnns(self, plan: Any, x: Tensor | PackedSequence, looked: bool) -> bool:
        """Returns whether cuDNN runs a call on a card that has none of our arguments."""
        if self.checkpoint is not None or self.cell not in CUDNNS:
            return False
        if looked or isinstance(x, PackedSequence):
            return True
        steps, rows = x.shape[:2] if x.dim() == 3 else (len(x), 1)
        if x.dim() == 3 and self.batch_first:
            steps, rows = rows, steps
        return not _beats_cudnn(plan, x.device, steps, rows)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters of torch's layer."""
        # Opacus asks each module for its parameters, and then looks up exactly its class in tables
        # of what to refuse and to replace. The entries of torch's class must hold for ours too.
        opacus = sys.modules.get("opacus.validators.module_validator")
        if opacus is not None:
            for table in (opacus.ModuleValidator.VALIDATORS, opacus.ModuleValidator.FIXERS):
                if self._parent in table:
                    table.setdefault(type(self), table[self._parent])
        return super().parameters(recurse)  # type: ignore[misc]

    def extra_repr(self) -> str:
        """Returns torch's text, and ``checkpoint`` if it is set."""
        shown: str = super().extra_repr()  # type: ignore[misc]
        if self.checkpoint is not None:
            shown += f", checkpoint={self.checkpoint!r}"
        return shown

    def __prepare_scriptable__(self) -> nn.Module:
        """TorchScript compiles the parent's forward, on the same parameters."""
        plain: Any = copy.copy(self)
        plain.__class__ = self._parent
        return plain


def _beats_cudnn(plan: Plan, device: torch.device, steps: int, rows: int) -> bool:
    """Returns whether our kernels run a call faster than cuDNN, as measured (docs/gpu.md).

    In bfloat16 they are faster if one launch runs a whole sequence (tiers 1 and 2). In float16 and
    TF32 only tier 2 is faster: for the smaller sizes of tier 1, cuDNN has such kernels too.
    """
    host = TorchDevice.on(plan.dtype, device)
    tf32 = host.tf32(plan.cell)
    if steps < CUDNN_STEPS or plan.cell is cells.LSTMP or not (plan.types.mixed or tf32):
        return False
    whole = (1, 2) if plan.dtype == "bfloat16" else (2,)
    passes = (False, True) if torch.is_grad_enabled() else (False,)
    return all(
        capacity.choose(plan, host.limits, backward, batch=rows, tf32=tf32).tier in whole
        for backward in passes
    )


# Dynamo breaks the graph at each ``torch.nn.LSTM``, and would then compile the functions that our
# forward calls one by one, with guards around each, which take longer than the call.
for _function in (DropIn._ours, quiet, again, learn):
    left_alone(_function)


@takes(DropInArguments, Returning)
class LSTM(DropIn, nn.LSTM):
    r"""``torch.nn.LSTM`` on a fused kernel: its constructor, weights, shapes, defaults and errors.

        i, f, o = sigmoid(W_i x_t + b_i + W_h h + b_h)      each with its own rows of W and b
        g = tanh(W_i x_t + b_i + W_h h + b_h)
        c' = f c + i g
        h' = o tanh(c')

    ``forward`` takes ``input`` and ``hx`` and returns ``(output, (h, c))``, like torch's layer. For
    a ``PackedSequence``, which has its own lengths, output and resets are packed too. Pass the
    further arguments by name; ``return_states`` adds a third result, as in ``RNN``:
        {arguments}

    ``checkpoint="sqrt"``, or a number of steps, as an argument of the constructor or an attribute,
    trades time for memory in training; see ``RNN``.

    On the CPU all calls run fused, in float32, float64, bfloat16, float16 and under autocast; on a
    GPU with Triton, calls in float32 or 16 bits with one of these arguments or ``checkpoint``, and
    calls of 16 steps or more, in 16 bits or TF32, that our kernels run faster than cuDNN. Other
    calls without these arguments, also on other devices and in traces (jit, export), run torch's
    layer. Derivatives of any order and ``torch.func`` are fused; all else runs step by step. See
    ``engine``.

    Raises:
        What ``torch.nn.LSTM`` raises; TypeError or ValueError for the arguments above.

    Example:
        >>> lstm = LSTM(input_size=3, hidden_size=8, num_layers=2)
        >>> isinstance(lstm, torch.nn.LSTM)
        True
        >>> output, (h, c) = lstm(torch.zeros(5, 2, 3), lengths=[5, 3])
        >>> output.shape, h.shape
        (torch.Size([5, 2, 8]), torch.Size([2, 2, 8]))
    """

    _parent = nn.LSTM
    if TYPE_CHECKING:
        __call__: DropInCall[tuple[Tensor, Tensor]]

    @property
    def cell(self) -> Cell:  # type: ignore[override]
        """The cell of one step."""
        return cells.LSTMP if self.proj_size else cells.LSTM

    @property
    def _sizes(self) -> Sizes:
        hidden = "H", self.hidden_size
        return (hidden, ("P", self.proj_size)) if self.proj_size else (hidden,)


class GRU(DropIn, nn.GRU):
    r"""``torch.nn.GRU`` on a fused kernel: its constructor, weights, shapes, defaults and errors.

        r, z = sigmoid(W_i x_t + b_i + W_h h + b_h)         each with its own rows of W and b
        n = tanh(W_i x_t + b_i + r (W_h h + b_h))
        h' = (1 - z) n + z h

    ``forward`` returns ``(output, h)``, like torch's layer. The further arguments, the calls that
    run fused, and the errors are those of ``LSTM``.

    Example:
        >>> gru = GRU(input_size=3, hidden_size=8, batch_first=True)
        >>> output, h = gru(torch.zeros(2, 5, 3), lengths=[5, 3])
        >>> output.shape, h.shape
        (torch.Size([2, 5, 8]), torch.Size([1, 2, 8]))
    """

    cell: Cell = cells.GRU
    _parent = nn.GRU
    if TYPE_CHECKING:
        __call__: DropInCall[Tensor]
