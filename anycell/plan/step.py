"""The frame of a step: what surrounds a cell's function, as expressions of the cell language.

    entered = where(reset, restored, before)         the states that enter the function
    after   = where(valid, new, entered)             the states that leave the step
    output  = where(valid, after, 0), or ``after`` with ``masked_output="repeat"``

Backward, ``d_after`` comes from the steps that run later, ``d_output`` from the outputs, and
``d_function`` is what the derived backward pass of the cell makes of ``d_new``:

    d_new     = d_after + d_output                   nothing reads it under a mask
    d_held    = d_after, plus the gradient of an output that repeats the state
    d_entered = where(valid, d_function, d_held)
    d_before, d_restored = ``d_entered`` at steps without, and with a reset; else 0

``alive`` is a ``value``, or 0 under the mask. A call without a mask is always ``valid``, and one
without resets has none: their part is left out. Engines have their own names for the leaves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TypeVar

from anycell.lang.expr import Expr, const

T = TypeVar("T")


@functools.lru_cache(maxsize=8)
def frame(mask: bool, resets: bool, separate: bool) -> dict[str, Expr]:
    """The expressions by name.

    Args:
        mask, resets: whether a call has such flags.
        separate: whether its outputs are not the states, see ``Options.apart``.
    """

    def leaf(name: str) -> Expr:
        return Expr("frame", (), (name,))

    def where(flag: str, given: bool, yes: Expr, no: Expr, otherwise: Expr) -> Expr:
        return Expr("where", (leaf(flag), yes, no)) if given else otherwise

    def alive(name: str) -> Expr:
        return where("valid", mask, leaf(name), zero, leaf(name))

    zero, d_after, d_output = const(0.0), leaf("d_after"), leaf("d_output")
    new, entered, function, d_entered = map(leaf, ("new", "entered", "d_function", "d_entered"))
    return {
        "entered": where("reset", resets, leaf("restored"), leaf("before"), leaf("before")),
        "after": where("valid", mask, new, entered, new),
        "output": alive("after") if separate else leaf("after"),
        "d_new": d_after + (alive("d_output") if separate else d_output),
        "d_held": d_after if separate else d_after + d_output,
        "d_entered": where("valid", mask, function, leaf("d_held"), function),
        "d_before": where("reset", resets, zero, d_entered, d_entered),
        "d_restored": where("reset", resets, d_entered, zero, zero),
        "alive": alive("value"),
    }


def evaluate(node: Expr, leaves: Mapping[str, T], ops: Mapping[str, Callable[..., T]]) -> T:
    """The value of an expression of the frame, or its text.

    Args:
        leaves: by name.
        ops: the functions "where", "add" and "const" on such values.
    """
    if node.op == "frame":
        return leaves[node.attrs[0]]
    return ops[node.op](*[evaluate(arg, leaves, ops) for arg in node.args], *node.attrs)
