"""8-bit weights: the functions that layers with such weights share.

    w ~ scale * q        q = round(w / scale), from -127 to 127; scale = max |w| / 127

with a scale for each output of a matmul. In a call each row of x, of the first state and of any
other operand of a matmul is rounded likewise, with a scale of its own. Products are added up in
integers; everything else is float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from anycell.lang.namespaces import Array, Namespace, namespace
from anycell.layer.checks import refuse
from anycell.plan import scales_of

STEPS = 127  # of 8 bits, on each side of 0
SCALES = scales_of("weight_ih")  # the name of an array that only calls with integer weights have


def integers(xp: Namespace, weight: Array) -> tuple[Array, Array]:
    """Rounds a weight ``[..., out, in]``; returns its integers, and their scales ``[..., out]``."""
    scales = xp.amax(xp.abs(weight), -1) / STEPS if weight.shape[-1] else xp.sum(weight, -1)
    steps = xp.where(scales > 0, scales, xp.ones_like(scales))[..., None]
    return xp.cast(xp.round(xp.clip(weight / steps, -STEPS, STEPS)), "int8"), scales


def rounded(
    weight: npt.NDArray[Any], name: str = "weight", argument: str = "model"
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Rounds a NumPy weight.

    Raises:
        ValueError: for a weight that has infinities or NaN.
    """
    if not np.isfinite(weight).all():
        hint = "Go back to weights from before they appeared."
        refuse(argument, f"one whose {name} has infinities or NaN", "numbers", hint)
    return integers(namespace(weight), weight.astype(np.float32, copy=False))


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


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces a method, or another attribute, of an object within the context."""
    before = vars(owner).get(name)
    vars(owner)[name] = value
    try:
        yield
    finally:
        if before is None:
            del vars(owner)[name]
        else:
            vars(owner)[name] = before


def measure(
    call: Callable[..., Any],
    runs: Iterable[tuple[Any, Any, Any]],
    method: str,
    outputs: Callable[[Any], Any],
    data: Iterable[Any],
    apart: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Runs a model, and other layers beside its own, and sets the ``error`` of quantized layers.

    Args:
        call: the model.
        runs: triples of a layer in the model, the layer that runs beside it on the same arguments,
            and the quantized layer whose error the difference is.
        method: the name of the method by which layers run.
        outputs: makes one float64 array of the results of a layer.
        data: batches for ``call``.
        apart: a context in which the layer beside draws the random numbers of the layer.
    """
    sums: dict[Any, list[tuple[float, float]]] = {small: [] for _, _, small in runs}

    def beside(layer: Any, other: Any, small: Any) -> Callable[..., Any]:
        run = getattr(layer, method)

        def both(*args: Any, **options: Any) -> Any:
            with apart():
                found = outputs(getattr(other, method)(*args, **options))
            results = run(*args, **options)
            right = outputs(results)
            sums[small].append((float(((found - right) ** 2).sum()), float((right**2).sum())))
            return results

        return both

    with ExitStack() as stack:
        for run in runs:
            stack.enter_context(replaced(run[0], method, beside(*run)))
        given: Sequence[Any] | None = None
        named: Mapping[str, Any]
        for batch in data:
            given, named = batch if isinstance(batch, tuple) else (batch,), {}
            if isinstance(batch, tuple) and batch and isinstance(batch[-1], dict):
                *given, named = batch
            try:
                call(*given, **named)
            except TypeError as error:
                # Python's own message does not mention data.
                if "required" in str(error) or "multiple values" in str(error):
                    raise TypeError(
                        f"data: given {len(given)} argument(s) a batch; the model says: {error}. "
                        "Make each batch a tuple of its arguments, those by name in a dict at the "
                        'end: data=[(x, {"forced": forced})]. Leave targets out.'
                    ) from error
                raise
    if given is None:
        hint = "A generator gives its batches only once: make a new one, or leave data out."
        refuse("data", "nothing to iterate over", "a batch or more", hint)
    for small, pairs in sums.items():
        wrong, size = map(sum, zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
        relative = math.sqrt(wrong / size) if size else math.inf if wrong else 0.0
        small.error = relative if pairs else None


def described(arrays: Mapping[str, Any], error: float | None) -> str:
    """Describes a quantized layer, from its arrays by name."""
    numbers = {name: math.prod(array.shape) for name, array in arrays.items()}
    sizes = {name: count * arrays[name].dtype.itemsize for name, count in numbers.items()}
    before = 4 * sum(count for name, count in numbers.items() if not name.endswith("_scales"))
    text = f"weights of 8 bits, {sum(sizes.values()):,} bytes of {before:,}"
    return text if error is None else f"{text}, error {error:.1e}"
