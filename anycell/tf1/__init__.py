"""The recurrent cells of TensorFlow 1 on TensorFlow 2, for old graphs and old checkpoints.

Variables have the names, shapes and gate order of TensorFlow 1, and ``cell.restore(checkpoint,
scope)`` reads them. On the CPU the cells run on a fused kernel, forward and backward.

Example:
    >>> cell = LSTMBlockFusedCell(8, use_peephole=True)
    >>> outputs, (c, h) = cell(tf.zeros((5, 2, 3)), sequence_length=[5, 3])
    >>> tuple(outputs.shape)
    (5, 2, 8)
"""

from anycell.requirement import require

require("tensorflow", "anycell.tf1", extra="tensorflow")
require("keras", "anycell.tf1", extra="tensorflow")

from anycell.tf1.loops import bidirectional_dynamic_rnn, dynamic_rnn
from anycell.tf1.modules import (
    GRUCell,
    LSTMBlockCell,
    LSTMBlockFusedCell,
    LSTMCell,
    LSTMStateTuple,
    RNNCell,
)

__all__ = [
    "GRUCell",
    "LSTMBlockCell",
    "LSTMBlockFusedCell",
    "LSTMCell",
    "LSTMStateTuple",
    "RNNCell",
    "bidirectional_dynamic_rnn",
    "dynamic_rnn",
]
