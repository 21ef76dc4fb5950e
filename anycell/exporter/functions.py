"""The functions of the cell language in an exported program: the CPU engine's, but for two.

A step waits for a sigmoid and a tanh, one after the other, and their multiplications take it as
long as small products. So these are quotients of polynomials, whose parts are computed side by
side, in place of exponentials. With u = x^2, and u constant beyond an x from where the quotient,
which then grows with x, reaches the limits of the function at once,

    tanh x = x P(u) / Q(u)        sigmoid x = 1/2 + x R(u) / S(u)

Sums are cheaper than products, so R and S are products of sums, with three roundings more; sigmoid
has half the error of tanh. Errors are at most 4e-7, those of tanh x also relative to it. The
coefficients minimise the largest relative error (linear programs, whose weights are the Q before).
"""

from __future__ import annotations

from anycell.engines.cpu import ops
from anycell.engines.cpu.ir import Builder, Value

P = 1.0, 0.13454925, 0.00358369, 2.2080028e-05, 1.5458209e-08
Q = 1.0, 0.46788257, 0.026211226, 0.00034305025, 8.6220075e-07
R = 46.094704, 39.514225, 171.96527, 810.23047  # a factor, and what is added to u in each sum
S = 9.869813, 90.01378, 337.12048, 3389.3062
LARGEST = 62.41, 243.36  # squares: of 7.9 for tanh, of 15.6 for sigmoid


def tanh(b: Builder, x: Value) -> Value:
    """The hyperbolic tangent."""
    u = b.fmin(LARGEST[0], x * x)
    square = u * u
    (low, high), (below, above) = (
        (b.fma(u, c1, b.value(c0, x.type)), b.fma(square, c4, b.fma(u, c3, b.value(c2, x.type))))
        for c0, c1, c2, c3, c4 in (P, Q)
    )
    quotient = b.fma(square * x, high, x * low) / b.fma(square, above, below)
    return b.fmax(-1.0, b.fmin(1.0, quotient))


def sigmoid(b: Builder, x: Value) -> Value:
    """1 / (1 + e^-x)."""
    u = b.fmin(LARGEST[1], x * x)
    numerator = (u + R[1]) * (x * R[0]) * ((u + R[2]) * (u + R[3]))
    quotient = numerator / ((u + S[0]) * (u + S[1]) * ((u + S[2]) * (u + S[3])))
    return b.fmax(0.0, b.fmin(1.0, quotient + 0.5))


EMIT = {**ops.EMIT, "tanh": tanh, "sigmoid": sigmoid}
