"""Initial values: functions of a shape ``(out, in)`` and a random generator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from anycell.layer.checks import refuse
from anycell.numpy import check

Array = npt.NDArray[np.floating]
Initializer = Callable[[tuple[int, ...], np.random.Generator], Array]


def _fans(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[int, int]:
    if not isinstance(shape, (tuple, list)) or len(shape) != 2:
        raise ValueError(f"shape: given {shape!r}, expected (out, in) with both at least 1.")
    if not isinstance(rng, (np.random.Generator, np.random.RandomState)):
        raise TypeError(f"rng: given {rng!r}, expected what numpy.random.default_rng() makes.")
    return check.integer("shape", shape[0]), check.integer("shape", shape[1])


def glorot_uniform(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """U(-a, a) with ``a = sqrt(6 / (in + out))``: signals keep their variance both ways.

    Source: Glorot & Bengio, *Understanding the Difficulty of Training Deep Feedforward Neural
    Networks*, 2010.
    """
    bound = np.sqrt(6.0 / sum(_fans(shape, rng)))
    return rng.uniform(-bound, bound, shape)


def glorot_normal(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """N(0, 2 / (in + out)); source as for ``glorot_uniform``."""
    deviation = np.sqrt(2.0 / sum(_fans(shape, rng)))
    return rng.normal(0.0, deviation, shape)


def orthogonal(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """A random matrix with orthonormal rows, or columns if there are fewer columns.

    A product of many such matrices neither grows nor fades, and a recurrent weight is multiplied
    once per step. The Q of a Gaussian matrix's QR decomposition is uniform over the orthogonal
    matrices once the signs of R's diagonal are fixed.

    Sources: Saxe, McClelland & Ganguli, *Exact Solutions to the Nonlinear Dynamics of Learning in
    Deep Linear Networks*, 2014; Mezzadri, *How to Generate Random Matrices from the Classical
    Compact Groups*, 2007.
    """
    rows, columns = _fans(shape, rng)
    q, r = np.linalg.qr(rng.normal(size=(max(rows, columns), min(rows, columns))))
    q *= np.where(np.diagonal(r) < 0.0, -1.0, 1.0)
    return q if rows >= columns else np.ascontiguousarray(q.T)


def uniform(bound: float) -> Initializer:
    """U(-bound, bound); ``torch.nn`` draws every parameter of a layer with ``1 / sqrt(hidden)``."""
    limit = check.number("bound", bound, low=0.0)
    return lambda shape, rng: rng.uniform(-limit, limit, shape)


def zeros(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """All zeros."""
    if not isinstance(shape, (tuple, list)):
        raise TypeError(f"shape: given {shape!r}, expected a tuple of sizes.")
    return np.zeros([check.integer("shape", size) for size in shape])


_RULES = glorot_uniform, glorot_normal, orthogonal, zeros
NAMED: dict[str, Initializer] = {rule.__name__: rule for rule in _RULES}


def find(initializer: str | Initializer, argument: str) -> Initializer:
    """Returns the initializer of a name, or a function that checks what the given one returns."""
    if isinstance(initializer, str) and initializer in NAMED:
        return NAMED[initializer]
    if isinstance(initializer, str) or not callable(initializer):
        expected = f"{', '.join(map(repr, NAMED))}, or a function (shape, generator) -> array"
        kind = ValueError if isinstance(initializer, str) else TypeError
        refuse(argument, repr(initializer), expected, "Pass one of them.", kind)
    function = initializer

    def draw(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
        return check.array(f"{argument}(shape, generator)", function(shape, rng), shape, float)

    return draw
