"""The options of a call.

They are declared only here. A field of ``Options`` holds the name, the default, the accepted
values, how kernels read the option, and its sentence for docstrings. These rows determine the check
of user input (``layer.checks.check_options``), the entries in the tables of CPU kernels, and the
variants of GPU kernels. An option that changes a step also has code in the engines; an option that
only the layer obeys has its code in the layer.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, NamedTuple, TypedDict, TypeVar, get_type_hints

Documented = TypeVar("Documented", bound=Callable[..., Any])


class Option(NamedTuple):
    """A row of the table of options.

    Attributes:
        says: the sentence for docstrings.
        kind: the check of user input: "bool", "seed", "checkpoint", or "choice" among ``codes``.
        codes: the number for each value in the tables of CPU kernels; None if kernels get the
            option in another form, or not at all.
        printed: whether each value has GPU kernels of its own.
        attribute: whether modules have it as an attribute, so that only functions take it in calls.
        start: the default of functions, if it differs from the default in ``Options``.
    """

    says: str
    kind: str
    codes: Mapping[Any, int] | None = None
    printed: bool = False
    attribute: bool = False
    start: Any = ...


class Options(NamedTuple):
    """The options of a call: those that users pass, the layer's number, and the thread limit.

    Attributes:
        reverse: one flag per direction.
        stream: the number of the layer: layers with different numbers draw different random masks.
        threads: the largest number of threads to use.
    """

    reverse: Annotated[
        tuple[bool, ...],
        Option(
            "run from the last step to the first; a row with a length begins at its own end.",
            "bool", attribute=True, start=False,
        ),
    ] = (False,)  # fmt: skip
    masked_output: Annotated[
        str,
        Option(
            'the output at masked steps: "zero", or "repeat" for the held state.',
            "choice", {"zero": 0, "repeat": 1}, printed=True,
        ),
    ] = "zero"  # fmt: skip
    training: Annotated[
        bool,
        Option(
            "draw random masks (``keep``); otherwise their mean is used.",
            "bool", {False: 0, True: 1}, attribute=True,
        ),
    ] = False  # fmt: skip
    seed: Annotated[
        int, Option("seeds the random masks: 0 to 2**64 - 1.", "seed", attribute=True, start=None)
    ] = 0
    stream: int = 0
    threads: int = 1
    checkpoint: Annotated[
        str | int | None,
        Option("trades time for memory in training; see ``RNN``.", "checkpoint", attribute=True),
    ] = None

    def unseeded(self) -> Options:
        """The options without seed and stream, equal for calls that differ only in random masks."""
        return self._replace(seed=0, stream=0)

    def unread(self) -> Options:
        """The options of a call whose outputs at masked steps are never read. They repeat the held
        states, so that the outputs need no memory of their own.
        """
        return self._replace(**HELD)

    def printed(self, masked: bool) -> Options:
        """The options that GPU kernels depend on; the others are set to their defaults."""
        names = [name for name, option in OPTIONS.items() if option.printed]
        one = Options(**{name: getattr(self, name) for name in names})
        return one if masked else one._replace(masked_output=Options().masked_output)

    def apart(self, masked: bool) -> bool:
        """Whether outputs need an array of their own, not the hidden states: a mask zeroes them."""
        return masked and self.masked_output == "zero"


# The option of a call whose outputs at masked steps are the states that it holds.
HELD: dict[str, Any] = {"masked_output": "repeat"}


class CallOptions(TypedDict, total=False):
    """The options that a call of a module takes by keyword, for type checkers."""

    masked_output: str


class FunctionOptions(CallOptions, total=False):
    """The options that functions take by keyword: those of module calls, and module attributes."""

    reverse: bool
    training: bool
    seed: int | None
    checkpoint: str | int | None


OPTIONS: dict[str, Option] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Options, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}
CODES = {name: option.codes for name, option in OPTIONS.items() if option.codes}
OF_CALL = tuple(name for name, option in OPTIONS.items() if not option.attribute)


# Docstring sentences for the other arguments of a call.
ARRAYS = {
    "weights": "what the layer learns, by public names (``cell.learned``). W is the sum of the "
    "gates' sizes, G*H where each has H units: ``weight_ih`` ``[W, I]`` and ``weight_hh`` "
    "``[W, size of the first state]``, with rows in the cell's order of gates, in ``weight_hh`` of "
    "those of size H only; optionally ``bias_ih`` and ``bias_hh`` with the same rows; "
    "``weight_<name>`` and ``bias_<name>`` of each further matmul, ``[out, in]`` or ``[heads, "
    "out/heads, in/heads]``; each parameter of the cell, ``[size]``. A value of None means that "
    "the weight is absent.",
    "gates": "``[T, B, W]``, laid out as x, the input's projection onto the gates, side by side, "
    "in place of x: ``recurrence(cell, None, weights, gates=gates)``. ``bias_ih`` is still added, "
    "if given.",
    "mask": "bool ``[T, B]``, laid out as x, False where a step does nothing: the state is held, "
    "and values there have no influence, not even NaN.",
    "lengths": "integers ``[B]`` from 0 to T, the number of steps of each row. The reverse "
    "direction starts at each row's end. With a mask, a step runs only where both allow it.",
    "resets": "``[T, B]``, laid out as x, True where an episode starts. Each direction runs each "
    "episode by itself: it replaces the state before the first step of the episode, or the reverse "
    "direction the state before the last step of the episode that ends there. bool, or 0 and 1 of "
    "any real dtype.",
    "reset_state": "the state that resets restore, laid out as the initial state; it may be "
    "learned. Default: the values that the cell declares.",
    "static": "``[B, size]``, the input per sequence of a cell that declares one.",
    "recurrent_mask": "``[B, H]``, or ``[G, B, H]`` for one per gate, where H is the size of the "
    "first state: multiplies that state before the recurrent matmul in all layers and directions.",
    "return_states": "names of the states to return after every step, or True for all.",
}


class Engine(NamedTuple):
    """The engine of a layer, and the reason.

    Attributes:
        name: "cpu" or "gpu" (fused kernel); "torch" or "cudnn" (the framework's own layer);
            "reference", "composite" or "keras" (step by step, in operations of the framework).
        reason: in words.
    """

    name: str
    reason: str


def takes(names: Iterable[str] = OF_CALL) -> Callable[[Documented], Documented]:
    """Declares that a function takes these options by keyword, as ``**options``. Its signature
    shows them. In its docstring, or the docstring of a class, their sentences replace the line
    ``{... options}``, after the sentences of the ``ARRAYS`` that this line names.
    """

    def declare(function: Documented) -> Documented:
        lines = [line for line in (function.__doc__ or "").split("\n") if "options}" in line]
        if lines:  # none under python -OO
            *arrays, _ = lines[0].strip("{} ").split()
            says = [(name, ARRAYS[name]) for name in arrays]
            says += [(name, OPTIONS[name].says) for name in names]
            indent = " " * lines[0].index("{")
            further = indent + "    "
            entries = [textwrap.fill(f"{name}: {text}", 100, initial_indent=indent,
                    subsequent_indent=further) for name, text in says]  # fmt: skip
            function.__doc__ = (function.__doc__ or "").replace(lines[0], "\n".join(entries))
        if inspect.isfunction(function):
            signature = inspect.signature(function)
            *before, _ = signature.parameters.values()
            rows = [(name, OPTIONS[name].start) for name in names]
            defaults = Options._field_defaults
            more = [
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY,
                    default=defaults[name] if start is ... else start,
                    annotation=FunctionOptions.__annotations__[name].__forward_arg__,
                )
                for name, start in rows
            ]  # fmt: skip
            function.__signature__ = signature.replace(parameters=[*before, *more])  # type: ignore[attr-defined]
        return function

    return declare
