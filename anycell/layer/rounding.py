"""8-bit weights: the functions that layers with such weights share.

    w ~ scale * q        q = round(w / scale), from -127 to 127; scale = max |w| / 127

with a scale for each output of a matmul. In a call each row of x, of the first state and of any
other operand of a matmul is rounded likewise, with a scale of its own. Products are added up in
integers; everything else is float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from anycell.lang.namespaces import Array, Namespace, namespace
from anycell.layer.checks import refuse
from anycell.plan import DTYPES, scales_of

STEPS = 127  # of 8 bits, on each side of 0
SCALES = scales_of("weight_ih")  # the name of an array that only calls with integer weights have


def integers(xp: Namespace, weight: Array) -> tuple[Array, Array]:
    """Rounds a weight ``[..., out, in]``; returns its integers, and their scales ``[..., out]``."""
    scales = xp.amax(xp.abs(weight), -1) / STEPS if weight.shape[-1] else xp.sum(weight, -1)
    steps = xp.where(scales > 0, scales, xp.ones_like(scales))[..., None]
    return xp.cast(xp.round(xp.clip(weight / steps, -STEPS, STEPS)), "int8"), scales


def rounded(weight: Array, name: str = "weight", argument: str = "model") -> tuple[Array, Array]:
    """Rounds a weight of a frontend; an error says whose ``name`` it is.

    Raises:
        ValueError: for a weight of another dtype, and for one that has infinities or NaN.
    """
    xp, real = namespace(weight), DTYPES["int8"].storage.name
    dtype = str(weight.dtype).removeprefix("torch.")
    if dtype != real:
        hint = "Pass a float32 layer with the same numbers, in PyTorch model.float()."
        refuse(argument, f"one whose {name} is {dtype}", f"{real}, which is rounded", hint)
    if not xp.isfinite(weight).all():
        hint = "Go back to weights from before they appeared."
        refuse(argument, f"one whose {name} has infinities or NaN", "numbers", hint)
    return integers(xp, weight)


def rounded_weights(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Rounds the weights among the parameters of a layer; their scales are ``{name}_scales``."""
    both: dict[str, Array] = {}
    for name, array in arrays.items():
        both[name] = array
        if len(array.shape) > 1:
            both[name], both[f"{name}_scales"] = rounded(array, name)
    return both


def quantized(arrays: Mapping[str, Array]) -> bool:
    """Whether the weights are integers with scales."""
    return SCALES in arrays


def with_integers(xp: Namespace, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Rounds the weights that are still real numbers in a call with integer weights."""
    both = dict(arrays)
    for name, array in arrays.items():
        if name.startswith("weight_") and scales_of(name) not in arrays:
            both[name], both[scales_of(name)] = integers(xp, array)
    return both


def described(arrays: Mapping[str, Any], error: float | None) -> str:
    """Describes a quantized layer, from its arrays by name."""
    numbers = {name: math.prod(array.shape) for name, array in arrays.items()}
    sizes = {name: count * arrays[name].dtype.itemsize for name, count in numbers.items()}
    before = 4 * sum(count for name, count in numbers.items() if not name.endswith("_scales"))
    text = f"weights of 8 bits, {sum(sizes.values()):,} bytes of {before:,}"
    return text if error is None else f"{text}, error {error:.1e}"
