"""Twins: kernels that run several passes in one launch, such as both directions of a layer, or the
same layer with other weights.

A kernel's twin has a third axis of programs, the number of the pass. What differs from pass to pass
comes with its distance, in bytes or as a number: so passes are evenly spaced, as two always are.

    weight0 = of_pass(weight0, weight0__apart, tl.program_id(2))
    gates__t += tl.program_id(2) * gates__t__apart

Twins have twins themselves: calls of a layer with two directions, each with arrays of its own.
Programs of different passes share nothing, so the results have the same bits as those of a launch
for each pass.
"""

from __future__ import annotations

import functools

from anycell.engines.gpu.text import Printed

_SHARED = {"mask", "static", "recurrent_mask"}  # what directions have in common
_OF_TIME = "__0", "__t", "__next"  # ends of the numbers that say where and which way a pass begins
_NUMBER = "tl.program_id(2)"
_HELPER = "from anycell.engines.gpu.library import of_pass\n"


@functools.lru_cache(maxsize=256)
def print_twins(printed: Printed, calls: bool = False, inside: int = 1) -> Printed:
    """The twin of a kernel: after its own arguments come the distances of those in ``apart``.

    Args:
        calls: whether the passes are calls with arrays of their own, rather than directions.
        inside: of a kernel that is a twin already, its number of passes.
    """
    end, number = "__call" if calls else "__apart", _NUMBER
    some = {
        name: kind
        for name, kind in printed.arguments
        if (kind[0] == "*" and name != "trouble" and (calls or name not in _SHARED))
        or (name.endswith(_OF_TIME) and not calls)
    }
    head, body = printed.source.split("\n):\n", 1)
    about, declared = head.split("\n@triton.jit\n")
    if inside > 1:
        about, body = about.replace(_HELPER, ""), body.replace(number, f"{number} % {inside}")
        number += f" // {inside}"
    lines = [
        f"    {n} = of_pass({n}, {n}{end}, {number})\n"
        if kind[0] == "*"
        else f"    {n} += {number} * {n}{end}\n"
        for n, kind in some.items()
    ]
    name = f"{printed.name}_{'calls' if calls else 'twins'}"
    declared = declared.removeprefix(f"def {printed.name}")
    more = "".join(f"\n    {n}{end},  # i64" for n in some)
    head = f"{about}{_HELPER}\n\n@triton.jit\ndef {name}{declared}{more}\n):\n"
    text = f"{head}{''.join(lines)}{body}"
    arguments = *printed.arguments, *((f"{n}{end}", "i64") for n in some)
    return printed._replace(name=name, source=text, arguments=arguments, apart=tuple(some))
