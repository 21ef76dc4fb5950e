"""The arrays and the options of a call.

They are declared only here. A row of ``ARRAYS`` holds the name of an array, its axes, and its
sentence for docstrings. A field of ``Options`` holds the name, the default, the accepted values,
how kernels read the option, and its sentence. These rows determine the check of user input
(``layer.checks.check_options``), the entries in the tables of CPU kernels, and the variants of GPU
kernels. An option that changes a step also has code in the engines; an option that only the layer
obeys has its code in the layer.

A call takes both by name, as one dictionary, ``**arguments``. The types of a frontend's arrays are
in a ``TypedDict`` of the frontend, from which ``takes`` makes signatures and docstrings.
"""

from __future__ import annotations

import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
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


class FunctionOptions(TypedDict, total=False):
    """The options that functions take besides, which modules have as attributes."""

    reverse: bool
    training: bool
    seed: int | None


class GradientOptions(FunctionOptions, total=False):
    """The options of functions that have gradients."""

    checkpoint: str | int | None


OPTIONS: dict[str, Option] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Options, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}
CODES = {name: option.codes for name, option in OPTIONS.items() if option.codes}
OF_CALL = tuple(name for name, option in OPTIONS.items() if not option.attribute)


class Argument(NamedTuple):
    """A row of the table of arrays.

    Attributes:
        axes: its axes; T is the number of steps, B that of rows.
        says: the sentence for docstrings.
        real: whether it has the dtype of x.
        padded: whether only a padded input takes it, because a packed one has its own lengths.
    """

    axes: str
    says: str
    real: bool = False
    padded: bool = False


STEPS = "T, B"  # the axes of flags, bool or 0 and 1, which users lay out as x

ARRAYS: dict[str, Argument] = {
    "mask": Argument(
        STEPS,
        "bool, laid out as x, False where a step does nothing: the state is held, and values there "
        "have no influence, not even NaN.",
        padded=True,
    ),
    "lengths": Argument(
        "B",
        "integers from 0 to T, the number of steps of each row. The reverse direction starts at "
        "each row's end. With a mask, a step runs only where both allow it.",
        padded=True,
    ),
    "resets": Argument(
        STEPS,
        "laid out as x, True where an episode starts. Each direction runs each episode by itself: "
        "it replaces the state before the first step of the episode, or the reverse direction the "
        "state before the last step of the episode that ends there. bool, or 0 and 1 of any real "
        "dtype.",
    ),
    "reset_state": Argument(
        "",
        "the state that resets restore, laid out as the initial state; it may be learned. Default: "
        "the values that the cell declares.",
        real=True,
    ),
    "static": Argument("B, size", "the input per sequence of a cell that declares one.", real=True),
    "recurrent_mask": Argument(
        "B, H",
        "or ``[G, B, H]`` for one per gate, where H is the size of the first state: multiplies "
        "that state before the recurrent matmul in all layers and directions.",
        real=True,
    ),
    "return_states": Argument(
        "", "names of the states to return after every step, or True for all."
    ),
}
REALS = tuple(name for name, argument in ARRAYS.items() if argument.real)

Array = Any  # of a framework without types


class ArrayArguments(CallOptions, total=False):
    """The arguments of a call by name, where arrays have no types: in JAX and Keras."""

    mask: Array | None
    lengths: Array | Sequence[int] | None
    resets: Array | None
    reset_state: Array | Sequence[Array | None] | None
    static: Array | None
    recurrent_mask: Array | None


class Returning(TypedDict, total=False):
    """The argument of calls that return the states of every step."""

    return_states: bool | str | Sequence[str] | None


class Engine(NamedTuple):
    """The engine of a layer, and the reason.

    Attributes:
        name: "cpu" or "gpu" (fused kernel); "torch" or "cudnn" (the framework's own layer);
            "reference", "composite" or "keras" (step by step, in operations of the framework).
        reason: in words.
    """

    name: str
    reason: str


def takes(*typed: type, **says: str) -> Callable[[Documented], Documented]:
    """Declares that a function takes these arguments by name, as ``**arguments``. Its signature
    shows them. A function that has ``*by_position`` too takes arrays also by position, in the order
    of ``ARRAYS``.

    In its docstring, or the docstring of a class, sentences about them replace ``{arguments}``. On
    the same line, or on lines of their own, may be names of other arguments, or of results.

    Args:
        typed: a ``TypedDict`` or several, which have the types.
        says: sentences about names that are neither arrays nor options.
    """
    types = {name: hint for one in typed for name, hint in one.__annotations__.items()}
    names = [n for n in dict.fromkeys((*ARRAYS, *OPTIONS, *types)) if n in types]
    for name in names:
        if name in ARRAYS:
            axes, sentence, *_ = ARRAYS[name]
            says[name] = f"``[{axes}]``, {sentence}" if axes else sentence
        elif name in OPTIONS:
            says[name] = OPTIONS[name].says

    def entries(line: re.Match[str]) -> str:
        known = [name for name in names if name in says]
        here = [known if word == "arguments" else [word] for word in line[2].split()]
        wrap = textwrap.TextWrapper(100, line[1], line[1] + "    ")
        return "\n".join(wrap.fill(f"{n}: {says[n]}") for n in itertools.chain(*here))

    def declare(function: Documented) -> Documented:
        if function.__doc__:  # there is none under python -OO
            function.__doc__ = re.sub(
                r"^( +)\{([a-z_ ]+)\}$", entries, function.__doc__, flags=re.M
            )
        if inspect.isfunction(function):
            signature, kind, shown = inspect.signature(function), inspect.Parameter, names
            *parameters, rest = signature.parameters.values()
            how: Any = kind.KEYWORD_ONLY
            behind = []
            if parameters[-1].kind is kind.VAR_POSITIONAL:
                shown, behind = [n for n in names if n in ARRAYS], [rest.replace(name="options")]
                how, _ = kind.POSITIONAL_OR_KEYWORD, parameters.pop()
            here = [parameter.name for parameter in parameters]
            for name in shown:
                if name not in here:
                    hint = types[name].__forward_arg__
                    parameters.append(kind(name, how, default=_default(name), annotation=hint))
            whole = signature.replace(parameters=[*parameters, *behind])
            function.__signature__ = whole  # type: ignore[attr-defined]
        return function

    return declare


def _default(name: str) -> Any:
    """The default of an argument, which for arrays is None."""
    if name not in OPTIONS:
        return None
    start = OPTIONS[name].start
    return Options._field_defaults[name] if start is ... else start
