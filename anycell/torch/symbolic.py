"""``torch.fx`` and TorchScript, which look at modules before there is a call."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.fx import Proxy


def leaf(module: Any, x: Proxy, state: Any, **arguments: Any) -> Any:
    """The call of a module as one node of a graph of ``torch.fx``, as of ``torch.nn``'s modules."""
    named = {name: value for name, value in arguments.items() if value is not None}
    positional = (x,) if state is None else (x, state)
    tracer: Any = x.tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(module), positional, named)


def refuse_script(module: Any) -> NoReturn:
    """TorchScript compiles no kernel, nor the Python that runs a cell step by step."""
    name = type(module).__name__
    raise TypeError(
        f"torch.jit.script: given anycell's {name}; expected modules of torch. Use torch.compile "
        f"or torch.export, or torch.jit.trace for one number of steps; of {name}(cells.LSTM, ...) "
        "and of cells.GRU the layers anycell.torch.LSTM and GRU, which load its weights, can be "
        "scripted."
    )
