"""Modules of Flax and Equinox share the arguments that they hand to ``anycell.jax.RNN``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from anycell.jax.layers import RNN
from anycell.lang.declare import SizeArguments
from anycell.layer.checks import check_options, describe, refuse

Call = TypeVar("Call", bound=Callable[..., Any])


class Arguments(SizeArguments, total=False):
    """The arguments of ``anycell.jax.RNN`` that modules take by keyword, for type checkers."""

    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool
    checkpoint: str | int | None


def call_of_module(**elsewhere: str) -> Callable[[Call], Call]:
    """Declares the call of a module: besides its own arguments it takes those of a call of
    ``anycell.jax.RNN``, as its signature shows and its errors say.

    Args:
        elsewhere: arguments of ``anycell.jax.RNN`` that the module does not take, and what users
            should do in place of each.
    """

    def declare(call: Call) -> Call:
        signature = inspect.signature(call)
        *before, _ = signature.parameters.values()
        parameters = inspect.signature(RNN.__call__).parameters.values()
        known = {*signature.parameters, *elsewhere}
        whole = [*before, *(p for p in parameters if p.name not in known)]

        @functools.wraps(call)
        def checked(self: Any, *args: Any, **named: Any) -> Any:
            for name, value in named.items():
                if name in elsewhere:
                    expected = "no such argument of a module"
                    refuse(name, describe(value), expected, elsewhere[name], TypeError)
            taken = checked.__signature__.parameters  # type: ignore[attr-defined]
            unknown = {name: value for name, value in named.items() if name not in taken}
            check_options(unknown, (), checked)
            return call(self, *args, **named)

        checked.__signature__ = signature.replace(parameters=whole)  # type: ignore[attr-defined]
        return checked  # type: ignore[return-value]

    return declare
