"""``RNN(cell, ...)``: layers of any cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anycell.lang.cell import RECURRENT, Cell
from anycell.torch.arguments import check_device, check_layer, check_tensor, describe
from anycell.torch.functional import Engine, States, Weights, autocast, fused_plan
from anycell.torch.recurrent import Recurrent, shapes

_MASKED_OUTPUT = ("zero", "repeat")


class RNN(Recurrent, nn.Module):
    r"""Layers of a cell, as ``torch.nn.LSTM`` is layers of an LSTM.

    With the cell's function ``f`` and H = ``hidden_size``, each direction of each layer computes

        x_t = W_ih input_t + b_ih                  of all gates, [B, gates * H]
        r_t = W_hh s_{t-1} + b_hh                  with s the first state, which is also the output
        state_t = f(x_t, r_t, state_{t-1}, p)

    Args:
        cell: what ``@anycell.cell`` made, for instance one of ``anycell.cells``.
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype: as in
            ``torch.nn.LSTM``. A cell that places its own biases has none here, whatever ``bias`` says.
        sizes: the size of states that declare one, by its symbol: ``P=64`` for ``state="h:P c"``.

    ``forward(x, state=None, *, mask, lengths, resets, static, masked_output)`` returns output and final state:
        x: ``[T, B, input_size]``; ``[B, T, input_size]`` if ``batch_first``; ``[T, input_size]`` unbatched.
        state: a tuple in the cell's order, each ``[num_layers * D, B, H]``, D = 2 if bidirectional else 1;
            the tensor alone if it is the only one. Default: the initial values that the cell declares.
        mask: bool ``[T, B]``, laid out as x: False where a step does nothing. The state is held, and what
            lies there has no influence, not even NaN.
        lengths: integers ``[B]``, how many steps of each row count; the reverse direction starts at each
            row's end. With a mask too, a step must pass both.
        resets: bool ``[T, B]``, laid out as x: True where the declared initial values replace the state
            before the step, as where an episode starts.
        static: ``[B, H]``, of a cell that declares a static input.
        masked_output: "zero" or "repeat" (the held state), what the output is at masked steps.
        output: ``[T, B, D * H]``, laid out as x: the first state of the last layer at every step.
        final state: as ``state``, after each row's last step.

    Parameters: ``weight_ih_l{k}`` ``[gates * H, in]``, ``weight_hh_l{k}`` ``[gates * H, H]``, ``bias_ih_l{k}`` and
    ``bias_hh_l{k}`` ``[gates * H]``, ``weight_{name}_l{k}`` of a further matmul of the cell, and ``{name}_l{k}``
    ``[H]`` of its parameters; those of the reverse direction end in ``_reverse``. The gates lie in the cell's
    order, which for LSTM and GRU is torch's: checkpoints load unchanged. Initial values are those that
    the cell declares, all others U(-1/sqrt(H), 1/sqrt(H)) in torch's order.

    Dtypes: that of the weights for all. float32 and float64 on the CPU run fused, everything else step by
    step; ``engine`` says which, and why. Random masks of the cell (``keep``) take one seed per call from
    torch's default generator.

    Raises:
        TypeError, ValueError, RuntimeError: naming the argument, what was given, expected, and what to do.

    Example:
        >>> layer = RNN(anycell.cells.PeepholeLSTM, input_size=3, hidden_size=8)
        >>> output, (h, c) = layer(torch.zeros(5, 2, 3), lengths=[5, 3])
        >>> output.shape, h.shape, c.shape
        (torch.Size([5, 2, 8]), torch.Size([1, 2, 8]), torch.Size([1, 2, 8]))
    """

    def __init__(
        self,
        cell: Cell,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: Any = None,
        **sizes: int,
    ) -> None:
        super().__init__()
        check_layer(
            cell, sizes, dropout, input_size=input_size, hidden_size=hidden_size, num_layers=num_layers
        )
        self.cell = cell
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.bias = bool(bias) and cell.bias
        self.batch_first = batch_first
        self.dropout = float(dropout)
        self.bidirectional = bidirectional
        self.sizes = {"H": hidden_size, **sizes}
        for k, suffixes in enumerate(self._suffixes()):
            width = input_size if k == 0 else len(suffixes) * self.sizes[cell.states[0].size]
            for suffix in suffixes:
                for name, shape in shapes(cell, self.sizes, width, self.bias).items():
                    empty = torch.empty(shape, device=device, dtype=dtype)
                    self.register_parameter(name + suffix, nn.Parameter(empty))
        self.reset_parameters()

    def _suffixes(self) -> list[list[str]]:
        directions = ("", "_reverse") if self.bidirectional else ("",)
        return [[f"_l{k}{d}" for d in directions] for k in range(self.num_layers)]

    def reset_parameters(self) -> None:
        """Draws the parameters anew; those with a declared initial value take it."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        declared = {p.name: p.initial for p in self.cell.params}
        for name, parameter in self.named_parameters():
            value = declared.get(name.rpartition("_l")[0])
            if value is None:
                nn.init.uniform_(parameter, -bound, bound)
            else:
                nn.init.constant_(parameter, value)

    def extra_repr(self) -> str:
        shown = [repr(self.cell), str(self.input_size), str(self.hidden_size)]
        shown += [f"{k}={v}" for k, v in self.sizes.items() if k != "H"]
        defaults = {"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0}
        for name, default in {**defaults, "bidirectional": False}.items():
            if getattr(self, name) != default:
                shown.append(f"{name}={getattr(self, name)}")
        return ", ".join(shown)

    @property
    def engine(self) -> Engine:
        """What runs this layer, and why."""
        plan = fused_plan(self.cell, self.hidden_size, self.weight_ih_l0)
        return Engine("reference", plan) if isinstance(plan, str) else Engine("cpu", plan.reason)

    def forward(
        self,
        x: Tensor,
        state: Tensor | States | None = None,
        *,
        mask: Tensor | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        resets: Tensor | None = None,
        static: Tensor | None = None,
        masked_output: str = "zero",
    ) -> tuple[Tensor, Tensor | States]:
        """Output and final state; shapes are those of the class's docstring."""
        self._check_input(x, masked_output)
        batched = x.dim() == 3
        rows = (x.shape[0 if self.batch_first else 1],) if batched else ()
        states = None if state is None else self._check_state(x, state, rows)
        self._check_static(x, static, rows)
        output, final = self._run(x, states, mask, lengths, resets, static, masked_output)
        return output, final if len(final) > 1 else final[0]

    def _check_input(self, x: Any, masked_output: str) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(
                f"x: given {describe(x)}; expected a tensor [time, batch, {self.input_size}]. "
                "Pad sequences of several lengths, and pass lengths=."
            )
        weight = self.weight_ih_l0
        if x.dim() not in (2, 3) or x.shape[-1] != self.input_size:
            axes = "batch, time" if self.batch_first else "time, batch"
            raise ValueError(
                f"x: given {describe(x)}; expected [{axes}, {self.input_size}], or [time, {self.input_size}] "
                "without a batch. The last axis is input_size."
            )
        if x.dtype != weight.dtype and not autocast():
            raise ValueError(
                f"x: given {describe(x)}; expected {weight.dtype}, as the weights. "
                f"Convert it: x.to({weight.dtype}), or the layer: layer.to({x.dtype})."
            )
        check_device("x", x, weight.device)
        if x.shape[1 if self.batch_first and x.dim() == 3 else 0] == 0:
            raise ValueError(f"x: given {describe(x)}; expected one time step or more. Skip the call.")
        if masked_output not in _MASKED_OUTPUT:
            raise ValueError(
                f"masked_output: given {masked_output!r}; expected 'zero' or 'repeat'. "
                "'zero' is the default."
            )

    def _check_state(self, x: Tensor, state: Any, rows: tuple[int, ...]) -> States:
        names = self.cell.state_names
        given = (state,) if isinstance(state, Tensor) else state
        if not isinstance(given, (tuple, list)) or len(given) != len(names):
            wanted = f"a tuple ({', '.join(names)})" if len(names) > 1 else "one tensor"
            raise TypeError(
                f"state: given {describe(state)}; expected {wanted} for cell {self.cell.name}. "
                "Pass what an earlier call returned, or None."
            )
        axes = "(layers * directions, batch, size)" if rows else "(layers * directions, size)"
        first = self.num_layers * (2 if self.bidirectional else 1)
        for declared, value in zip(self.cell.states, given, strict=True):
            shape = (first, *rows, self.sizes[declared.size])
            check_tensor(f"state {declared.name}", value, shape, axes, x)
        return tuple(given)

    def _check_static(self, x: Tensor, static: Any, rows: tuple[int, ...]) -> None:
        name = self.cell.static
        if name is not None:
            axes = f"(batch, hidden size), the input {name!r} of cell {self.cell.name}"
            check_tensor("static", static, (*rows, self.hidden_size), axes, x)
        elif static is not None:
            raise TypeError(
                f"static: given {describe(static)}; expected None, cell {self.cell.name} declares no static "
                'input. Declare one: @cell(static="e").'
            )

    def _weights(self) -> list[list[Weights]]:
        return [[self._learned(suffix) for suffix in suffixes] for suffixes in self._suffixes()]

    def _learned(self, suffix: str) -> Weights:
        cell, mine = self.cell, self._parameters

        def get(name: str) -> Any:
            name += suffix
            return mine[name] if name in mine else getattr(self, name, None)

        return Weights(
            get("weight_ih"),
            get("weight_hh"),
            get("bias_ih"),
            get("bias_hh"),
            {name: get(name) for name in cell.param_names},
            {
                key: get(f"{kind}_{l.name}")
                for l in cell.linears
                if l.name != RECURRENT
                for key, kind in ((l.name, "weight"), (f"{l.name}_bias", "bias"))
            },
        )
