"""``torch.fx``, which looks at modules before there is a call."""

from __future__ import annotations

from typing import Any

from torch.fx import Proxy


def leaf(module: Any, x: Proxy, state: Any, **arguments: Any) -> Any:
    """The call of a module as one node of a graph of ``torch.fx``, as of ``torch.nn``'s modules."""
    named = {name: value for name, value in arguments.items() if value is not None}
    positional = (x,) if state is None else (x, state)
    tracer: Any = x.tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(module), positional, named)
