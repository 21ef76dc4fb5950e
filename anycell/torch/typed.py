"""Types of the calls of layers, for type checkers: ``torch.nn.Module`` declares no such types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from anycell.plan import CallOptions, GradientOptions, Returning

if TYPE_CHECKING:
    from typing_extensions import Unpack

State = TypeVar("State")
Given = TypeVar("Given", Tensor, PackedSequence)
Names = Literal[True] | str | Sequence[str]


class DropInArguments(CallOptions, total=False):
    """The arguments of ``LSTM`` and ``GRU`` by name, but for ``return_states``."""

    mask: Tensor | None
    lengths: Tensor | Sequence[int] | None
    resets: Tensor | PackedSequence | None
    reset_state: Any
    recurrent_mask: Tensor | None


class Arguments(DropInArguments, total=False):
    """The arguments of ``RNN`` by name, but for ``return_states``."""

    static: Tensor | None


class RecurrenceArguments(Arguments, Returning, GradientOptions, total=False):
    """The arguments of ``recurrence`` by name."""

    gates: Tensor | PackedSequence | None
    engine: str | None


class DropInCall(Protocol[State]):
    """Calls ``LSTM`` or ``GRU``."""

    @overload
    def __call__(
        self, input: Given, hx: State | None = None, *,
        return_states: Literal[False] | None = None, **arguments: Unpack[DropInArguments],
    ) -> tuple[Given, State]: ...  # fmt: skip

    @overload
    def __call__(
        self, input: Given, hx: State | None = None, *,
        return_states: Names, **arguments: Unpack[DropInArguments],
    ) -> tuple[Given, State, dict[str, Given]]: ...  # fmt: skip


class CellCall(Protocol):
    """Calls ``RNN``: the cell decides whether the state is a tensor or a tuple."""

    @overload
    def __call__(
        self, x: Given, state: Any = None, *,
        return_states: Literal[False] | None = None, **arguments: Unpack[Arguments],
    ) -> tuple[Given, Any]: ...  # fmt: skip

    @overload
    def __call__(
        self, x: Given, state: Any = None, *,
        return_states: Names, **arguments: Unpack[Arguments],
    ) -> tuple[Given, Any, dict[str, Given]]: ...  # fmt: skip
