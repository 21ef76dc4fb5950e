"""The arrays and the options of a call.

They are declared only here. A field of ``ArrayArguments`` holds the name of an array, and its
docstring the axes and a sentence for docstrings of calls. A field of ``Options`` holds the name,
the default, the accepted values, how kernels read the option, and its sentence. These rows
determine the check of user input (``layer.checks.check_options``), the entries in the tables of CPU
kernels, and the variants of GPU kernels. An option that changes a step also has code in the
engines; an option that only the layer obeys has its code in the layer.

A call takes both by name, as one dictionary, ``**arguments``. Where arrays have types, these are in
a ``TypedDict`` of the frontend. From all this ``takes`` makes signatures and docstrings.
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
        options = Options(**{name: getattr(self, name) for name in names})
        return options if masked else options._replace(masked_output=Options().masked_output)

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


Array = Any  # of a framework whose arrays have no type


class ArrayArguments(CallOptions, total=False):
    """The arrays of a call by name, with their axes: T is the number of steps, B that of rows.

    Attributes:
        mask: ``[T, B]``, bool, laid out as x, False where a step does nothing: the state is held,
            and values there have no influence, not even NaN.
        lengths: ``[B]``, integers from 0 to T, the number of steps of each row. The reverse
            direction starts at each row's end. With a mask, a step runs only where both allow it.
        resets: ``[T, B]``, laid out as x, True where an episode starts. Each direction runs each
            episode by itself: it replaces the state before the first step of the episode, or the
            reverse direction the state before the last step of the episode that ends there. bool,
            or 0 and 1 of any real dtype.
        reset_state: the state that resets restore, laid out as the initial state; it may be
            learned. Default: the values that the cell declares.
        static: ``[B, size]``, the input per sequence of a cell that declares one.
        recurrent_mask: ``[B, H]``, or ``[G, B, H]`` for one per gate, where H is the size of the
            first state: multiplies that state before the recurrent matmul in all layers and
            directions.
    """

    mask: Array | None
    lengths: Array | Sequence[int] | None
    resets: Array | None
    reset_state: Array | Sequence[Array | None] | None
    static: Array | None
    recurrent_mask: Array | None


class Returning(TypedDict, total=False):
    """The argument of calls that can return the states of every step.

    Attributes:
        return_states: names of the states to return after every step, or True for all.
    """

    return_states: bool | str | Sequence[str] | None


class RecurrenceArguments(ArrayArguments, Returning, GradientOptions, total=False):
    """The arguments of ``recurrence`` by name, where arrays have no types."""

    gates: Array | None
    engine: str | None


ARRAYS = *(n for n in ArrayArguments.__annotations__ if n not in OPTIONS), "return_states"
REALS = "reset_state", "static", "recurrent_mask"  # which have the dtype of x


class Engine(NamedTuple):
    """The engine of a layer, and the reason.

    Attributes:
        name: "cpu" or "gpu" (fused kernel); "torch" or "cudnn" (the framework's own layer);
            "reference", "composite" or "keras" (step by step, in operations of the framework).
        reason: in words.
    """

    name: str
    reason: str


# In a docstring, what it says about a name.
_SENTENCE = re.compile(r"^( +)(\w+): (.+(?:\n\1 +.+)*)", re.MULTILINE)


def takes(*typed: type, about: str | None = None) -> Callable[[Documented], Documented]:
    """Declares that a function takes these arguments by name, as ``**arguments``. Its signature
    shows them. A function that has ``*by_position`` too takes arrays also by position, in the order
    of ``ARRAYS``.

    In its docstring, or the docstring of a class, sentences about them replace ``{arguments}``. On
    the same line, or on lines of their own, may be names of other arguments, or of results.

    Args:
        typed: a ``TypedDict`` or several, which have the types.
        about: a docstring with sentences about names that are neither arrays nor options.
    """
    types = {name: hint for hints in typed for name, hint in hints.__annotations__.items()}
    names = [n for n in dict.fromkeys((*ARRAYS, *OPTIONS, *types)) if n in types]
    says = {name: option.says for name, option in OPTIONS.items()}
    for text in (ArrayArguments.__doc__, Returning.__doc__, about):
        for _, name, sentence in _SENTENCE.findall(text or ""):
            says[name] = " ".join(sentence.split())

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
            kinds, signature = inspect.Parameter, inspect.signature(function)
            *parameters, rest = signature.parameters.values()
            kind: Any = kinds.KEYWORD_ONLY
            shown = [name for name in names if name not in signature.parameters]
            if parameters[-1].kind is kinds.VAR_POSITIONAL:
                kind, shown = kinds.POSITIONAL_OR_KEYWORD, [n for n in shown if n in ARRAYS]
                parameters[-1] = rest.replace(name="options")
            for name in shown:
                start = OPTIONS[name].start if name in OPTIONS else ...
                default = Options._field_defaults.get(name) if start is ... else start
                hint = types[name].__forward_arg__
                parameters.append(kinds(name, kind, default=default, annotation=hint))
            by_name = kinds.KEYWORD_ONLY
            parameters.sort(key=lambda p: (p.kind, p.kind is by_name and p.name not in ARRAYS))
            whole = signature.replace(parameters=parameters)
            function.__signature__ = whole  # type: ignore[attr-defined]
        return function

    return declare
