"""The recurrent cells of TensorFlow 1 on TensorFlow 2, for old graphs and old checkpoints.

Variables have the names, shapes and gate order of TensorFlow 1, and ``cell.restore(checkpoint,
scope)`` reads them. On the CPU cells, and stacks of them, run on a fused kernel over whole
sequences, forward and backward; ``cell.engine`` says what runs, and why.

Example:
    >>> cell = LSTMBlockFusedCell(8, use_peephole=True)
    >>> outputs, (c, h) = cell(tf.zeros((5, 2, 3)), sequence_length=[5, 3])
    >>> tuple(outputs.shape)
    (5, 2, 8)
"""

from anycell.requirement import require

require("tensorflow", "anycell.tf1", extra="tensorflow")
require("keras", "anycell.tf1", extra="tensorflow")

from anycell.tf1.base import LSTMStateTuple, RNNCell
from anycell.tf1.loops import (
    bidirectional_dynamic_rnn,
    dynamic_rnn,
    stack_bidirectional_dynamic_rnn,
    static_bidirectional_rnn,
    static_rnn,
)
from anycell.tf1.modules import (
    BasicLSTMCell,
    BasicRNNCell,
    GRUCell,
    LSTMBlockCell,
    LSTMBlockFusedCell,
    LSTMCell,
)
from anycell.tf1.wrappers import DeviceWrapper, DropoutWrapper, MultiRNNCell, ResidualWrapper

__all__ = [
    "BasicLSTMCell",
    "BasicRNNCell",
    "GRUCell",
    "LSTMBlockCell",
    "LSTMBlockFusedCell",
    "LSTMCell",
    "LSTMStateTuple",
    "RNNCell",
    "MultiRNNCell",
    "DeviceWrapper",
    "DropoutWrapper",
    "ResidualWrapper",
    "bidirectional_dynamic_rnn",
    "dynamic_rnn",
    "stack_bidirectional_dynamic_rnn",
    "static_bidirectional_rnn",
    "static_rnn",
]
