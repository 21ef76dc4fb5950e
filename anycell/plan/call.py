"""A call of a layer besides its arrays: one record, from the user's call to the kernels.

An option is declared here and nowhere else: a field of ``Options`` has its name, its default, what
it takes, how kernels read it, and the sentence of docstrings. From these rows come the check of
what users pass (``layer.checks.check_options``), the entries of the tables of the CPU's kernels,
and the facts that a GPU's kernels are printed for. What changes a step is in the engines besides;
what only the layer heeds is where the layer heeds it.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, NamedTuple, TypedDict, TypeVar, get_type_hints

from anycell.lang.cell import Cell
from anycell.plan.plan import Plan

Sizes = tuple[tuple[str, int], ...]  # what the size symbols of a cell besides H stand for
Documented = TypeVar("Documented", bound=Callable[..., Any])


class Option(NamedTuple):
    """A row of the table of options.

    Attributes:
        says: the sentence of docstrings.
        kind: the check of what users pass: "bool", "seed", "checkpoint", or "choice" of ``codes``.
        codes: the number that a table of the CPU's kernels has for each value; None where no kernel
            reads the option as it is.
        printed: whether a GPU's kernels are printed for one value.
        attribute: whether modules have it as an attribute, and only functions take it in a call.
        start: the default of functions, where it is not that of ``Options``.
    """

    says: str
    kind: str
    codes: Mapping[Any, int] | None = None
    printed: bool = False
    attribute: bool = False
    start: Any = ...


class Options(NamedTuple):
    """The options of a call: those that users pass, and

    Attributes:
        reverse: one for each direction.
        stream: the number of the layer, in whose random masks no other layer's repeat.
        threads: at most this many.
    """

    reverse: Annotated[
        tuple[bool, ...],
        Option(
            "from the last step to the first; a row with a length begins at its own end.",
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
            "random masks (``keep``) are drawn, instead of their mean taken.",
            "bool", {False: 0, True: 1}, attribute=True,
        ),
    ] = False  # fmt: skip
    seed: Annotated[
        int, Option("of the random masks, 0 to 2**64 - 1.", "seed", attribute=True, start=None)
    ] = 0
    stream: int = 0
    threads: int = 1
    checkpoint: Annotated[
        str | int | None,
        Option("less memory for more time in training; see ``RNN``.", "checkpoint", attribute=True),
    ] = None

    def unseeded(self) -> Options:
        """The options of all calls that differ in random masks alone."""
        return self._replace(seed=0, stream=0)

    def unread(self) -> Options:
        """The options of a call whose outputs at masked steps nobody reads: where these are the
        held states, they take no memory of their own.
        """
        return self._replace(masked_output="repeat")

    def printed(self, masked: bool) -> Options:
        """The options that a GPU's kernels are printed for; the others have their default."""
        names = [name for name, option in OPTIONS.items() if option.printed]
        one = Options(**{name: getattr(self, name) for name in names})
        return one if masked else one._replace(masked_output=Options().masked_output)

    def apart(self, masked: bool) -> bool:
        """Whether the outputs are an array apart from the hidden states: a mask zeroes them."""
        return masked and self.masked_output == "zero"


class CallOptions(TypedDict, total=False):
    """The options that a call of a module takes by keyword, for type checkers."""

    masked_output: str


class FunctionOptions(CallOptions, total=False):
    """The options that functions take by keyword: those of modules, and their attributes."""

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


# The sentences of docstrings on what else a call takes.
ARRAYS = {
    "mask": "bool ``[T, B]``, laid out as x, False where a step does nothing: the state is held, "
    "and what lies there has no influence, not even NaN.",
    "lengths": "integers ``[B]`` from 0 to T, how many steps of each row count. The reverse "
    "direction starts at each row's end. With a mask too, both must let a step pass.",
    "resets": "``[T, B]``, laid out as x, True where the state before the step is replaced: where "
    "an episode starts. bool, or 0 and 1 of any real dtype.",
    "reset_state": "what resets restore, as the state, for instance a learned one. Default: the "
    "values that the cell declares.",
    "static": "``[B, H]``, the input per sequence of a cell that declares one.",
    "recurrent_mask": "``[B, H]``, or ``[G, B, H]`` for one per gate, of the size of the first "
    "state: multiplies it on its way into the recurrent matmul, of all layers and directions.",
    "return_states": "names of states whose values after every step are wanted, or True for all.",
}


class Call(NamedTuple):
    """A call of a layer besides its arrays.

    Attributes:
        cell, hidden_size: the step, and H.
        sizes: what the other size symbols of the cell stand for, in pairs.
        sequences: the states besides the first whose values after each step are wanted.
        engine: the engine that must run it; None takes the one that fits.
        plan: of the fused kernel that runs it, where the caller knows that nothing looks at the
            call for which pointers tell nothing.
        outputs: whether the outputs of all steps are wanted.
        unroll: a hint to engines that go step by step.
    """

    cell: Cell
    hidden_size: int
    options: Options = Options()
    sizes: Sizes = ()
    sequences: tuple[str, ...] = ()
    engine: str | None = None
    plan: Plan | None = None
    outputs: bool = True
    unroll: bool = False

    def size(self, symbol: str) -> int:
        """The number that a size symbol of the cell stands for."""
        return self.hidden_size if symbol == "H" else dict(self.sizes)[symbol]


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
    """Declares that a function takes these options by keyword, as ``**options``: its signature
    shows them, and its docstring (or that of a class) explains them where it says ``{options}``;
    and of ``ARRAYS`` those that it names there too.
    """

    def declare(function: Documented) -> Documented:
        lines = [line for line in (function.__doc__ or "").split("\n") if "options}" in line]
        if lines:  # none under python -OO
            *arrays, _ = lines[0].strip("{} ").split()
            says = [(name, ARRAYS[name]) for name in arrays]
            says += [(name, OPTIONS[name].says) for name in names]
            indent = " " * lines[0].index("{")
            further = indent + "    "
            said = [textwrap.fill(f"{name}: {text}", 100, initial_indent=indent,
                    subsequent_indent=further) for name, text in says]  # fmt: skip
            function.__doc__ = (function.__doc__ or "").replace(lines[0], "\n".join(said))
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
