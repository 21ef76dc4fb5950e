"""``check_gradients`` compares a backward pass with differences of the forward pass."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt

from anycell.layer.checks import describe, refuse
from anycell.numpy import check
from anycell.numpy.base import Layer
from anycell.numpy.feedback import Feedback
from anycell.read.trees import leaves, mapped


def check_gradients(
    layer: Layer, x: npt.ArrayLike, *, count: int = 20, seed: int = 0, **options: Any
) -> dict[str, float]:
    """Compares the gradients of ``backward`` with central differences of ``forward``, in float64.

    Both are gradients of a randomly weighted sum of all results that are not infinite. The layer
    and its gradients do not change, because a copy is compared. Random masks and dropout draw the
    same numbers in each run.

    Args:
        layer: a layer of this module, or of your own class derived from ``Layer``.
        x: the first argument of ``forward``.
        count: how many numbers of each array are compared; they are drawn at random.
        seed: of all random draws.
        options: further arguments of ``forward``, such as ``lengths``.

    Returns:
        for ``"x"`` and each parameter, by name, the largest difference of the two, relative to the
        largest gradient of the array: some 1e-9 if they agree. Near kinks, such as
        ``relu``'s, single numbers may differ.

    Raises:
        ValueError, TypeError: naming the argument, what was given and what was expected.

    Example:
        >>> errors = check_gradients(LSTM(3, 8, seed=0), np.ones((5, 2, 3)), lengths=[5, 3])
        >>> max(errors.values()) < 1e-6
        True
    """
    # Jumps ahead, because the same seed may have drawn x: weights equal to x would test nothing.
    rng = np.random.Generator(check.generator("seed", seed).bit_generator.jumped())  # type: ignore[attr-defined]
    count = check.integer("count", count)
    twin, x = _wide(layer), np.array(check.numbers("x", x), np.float64)

    run = copy.deepcopy(twin)
    results = run.forward(x, training=True, **options)
    # Infinite results, such as a maximum over no steps, get weight 0: their differences are NaN.
    weights = mapped(lambda r: np.where(np.isinf(r), 0.0, rng.normal(size=r.shape)), results)
    back = run.backward(*(weights if isinstance(weights, tuple) else (weights,)))
    arrays = {"x": (x, back[0] if isinstance(back, tuple) else back)}
    arrays |= {name: (array, run.grads[name]) for name, array in twin.parameters.items()}

    def loss() -> float:
        # A fresh copy each time, so that its generators draw the same numbers.
        results = copy.deepcopy(twin).forward(x, training=True, **options)
        pairs = zip(leaves(weights), leaves(results), strict=True)
        return sum(float((w * np.where(w, result, 0.0)).sum()) for w, result in pairs)

    errors, far = {}, 1e-6
    for name, (array, gradient) in arrays.items():
        worst, largest = 0.0, np.abs(gradient).max(initial=0.0)
        for place in rng.permutation(array.size)[:count]:
            at = np.unravel_index(place, array.shape)
            before, sides = array[at], []
            for step in (far, -far):
                array[at] = before + step
                sides.append(loss())
            array[at] = before
            difference = (sides[0] - sides[1]) / (2 * far)
            worst = np.maximum(worst, abs(difference - gradient[at]))  # NaN stays
            largest = np.maximum(largest, abs(difference))
        errors[name] = float(worst / largest) if largest else 0.0
    return errors


def _wide(layer: Any) -> Any:
    """Returns a copy of a layer in float64."""
    trains = hasattr(layer, "backward") and not hasattr(layer, "rounded")
    if not isinstance(layer, Layer) or not trains:
        expected = "a layer of anycell.numpy that trains"
        refuse("layer", describe(layer), expected, "Pass RNN(...), or Dense(...).", TypeError)
    twin = copy.deepcopy(layer)
    for part in (twin.layer, twin.readout) if isinstance(twin, Feedback) else (twin,):
        part.dtype = np.dtype(np.float64)
        for arrays in (part._parameters, part._statistics):
            arrays.update({name: array.astype(np.float64) for name, array in arrays.items()})
    return twin
