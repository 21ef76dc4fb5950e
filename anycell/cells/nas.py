"""The cell that a neural architecture search found."""

from anycell.lang.cell import Gates, cell
from anycell.lang.expr import Expr
from anycell.lang.ops import relu, sigmoid, tanh


@cell(gates="g0 g1 g2 g3 g4 g5 g6 g7", state="h c")
def NAS(x: Gates, r: Gates, s: Gates) -> tuple[Expr, Expr]:
    """Cell found by neural architecture search, the ``NASCell`` of TensorFlow.

    a_k = x_k + r_k, but a_3 = x_3 r_3
    u = tanh(sigmoid(a_0) relu(a_1)),  v = tanh(sigmoid(a_2) + relu(a_3))
    c' = tanh(u + c) v
    w = tanh(tanh(a_4) sigmoid(a_5)),  y = sigmoid(tanh(a_6) + sigmoid(a_7))
    h' = tanh(c' tanh(w + y))

    TensorFlow's cell has no bias, or with ``use_bias`` one that corresponds to ``bias_hh``.

    Source: Zoph & Le, *Neural Architecture Search with Reinforcement Learning*, 2017.
    """
    a0, a1, a2, _, a4, a5, a6, a7 = x + r
    u = tanh(sigmoid(a0) * relu(a1))
    v = tanh(sigmoid(a2) + relu(x.g3 * r.g3))
    w = tanh(tanh(a4) * sigmoid(a5))
    y = sigmoid(tanh(a6) + sigmoid(a7))
    c = tanh(u + s.c) * v
    return tanh(c * tanh(w + y)), c
