"""The functions of the cell language in an exported program: the CPU engine's, but for two.

A step waits for a sigmoid and a tanh, one after the other. So these are quotients of polynomials,
whose parts are computed side by side, in place of exponentials. With u = x^2 and up to the x where
the result is 1 in float32,

    tanh x = x P(u) / Q(u)        sigmoid x = 1/2 + tanh(x / 2) / 2

Errors are at most 4e-7, those of tanh x also relative to it. P and Q are the least-squares fit of
the relative error with Lawson's weights, which level its peaks.
"""

from __future__ import annotations

from anycell.engines.cpu import ops
from anycell.engines.cpu.ir import Builder, Value

LARGEST = 9.1  # tanh x rounds to 1 above
UPPER = 1.0, 0.13374473, 0.0034878084, 2.0481144e-05, 1.3177466e-08
LOWER = 1.0, 0.46707788, 0.02584738, 0.0003272916, 7.704023e-07


def _quotient(b: Builder, x: Value, scale: float) -> Value:
    """tanh(scale x) * scale, for a scale that is a power of 2."""
    limit = LARGEST / scale
    x = b.fmax(-limit, b.fmin(limit, x))
    u = x * x
    square = u * u
    first, *upper = (c * scale ** (2 * k + 2) for k, c in enumerate(UPPER))
    lower = [c * scale ** (2 * k) for k, c in enumerate(LOWER)]
    high, odd = b.fma(square, upper[3], b.fma(u, upper[2], b.value(upper[1], x.type))), square * x
    numerator = b.fma(odd, high, x * b.fma(u, upper[0], b.value(first, x.type)))
    high = b.fma(square, lower[4], b.fma(u, lower[3], b.value(lower[2], x.type)))
    return numerator / b.fma(square, high, b.fma(u, lower[1], b.value(lower[0], x.type)))


def tanh(b: Builder, x: Value) -> Value:
    """The hyperbolic tangent."""
    return b.fmax(-1.0, b.fmin(1.0, _quotient(b, x, 1.0)))


def sigmoid(b: Builder, x: Value) -> Value:
    """1 / (1 + e^-x)."""
    return b.fmax(0.0, b.fmin(1.0, _quotient(b, x, 0.5) + 0.5))


EMIT = {**ops.EMIT, "tanh": tanh, "sigmoid": sigmoid}
