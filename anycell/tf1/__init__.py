"""The recurrent cells of TensorFlow 1 on TensorFlow 2, for old graphs and old checkpoints.

Variables have the names, shapes and gate order of TensorFlow 1, and ``cell.restore(checkpoint,
scope)`` reads them. On the CPU, cells and stacks of cells run on a fused kernel over whole
sequences, forward and backward; ``cell.engine`` says what runs, and why.

Example:
    >>> cell = LSTMBlockFusedCell(8, use_peephole=True)
    >>> outputs, (c, h) = cell(tf.zeros((5, 2, 3)), sequence_length=[5, 3])
    >>> tuple(outputs.shape)
    (5, 2, 8)
"""

from typing import Any

from anycell.refusal import missing
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
    "BasicLSTMCell", "BasicRNNCell", "GRUCell", "LSTMBlockCell", "LSTMBlockFusedCell", "LSTMCell",
    "LSTMStateTuple", "RNNCell", "MultiRNNCell", "DeviceWrapper", "DropoutWrapper",
    "ResidualWrapper", "bidirectional_dynamic_rnn", "dynamic_rnn",
    "stack_bidirectional_dynamic_rnn", "static_bidirectional_rnn", "static_rnn",
]  # fmt: skip

# Names of TensorFlow 1 that this package lacks, and the nearest replacement.
_INSTEAD = {
    "AttentionCellWrapper": "anycell.keras.LSTM(units) (keras.layers.Attention reads its outputs)",
    "CoupledInputForgetGateLSTMCell": "anycell.keras.PeepholeLSTM(units, coupled=True)",
    "CudnnGRU": "anycell.keras.GRU(units) (one for each of its layers)",
    "CudnnLSTM": "anycell.keras.LSTM(units) (one for each of its layers)",
    "CudnnCompatibleGRUCell": "anycell.keras.GRU (its default)",
    "CudnnCompatibleLSTMCell": "LSTMBlockCell(units, forget_bias=0.0)",
    "GRUBlockCell": "GRUCell",
    "GRUBlockCellV2": "GRUCell",
    "IndRNNCell": "anycell.keras.IndRNN(units)",
    "LayerNormBasicLSTMCell": "anycell.keras.LayerNormLSTM(units, form='addons')",
    "NASCell": "anycell.keras.NAS(units)",
    "raw_rnn": "tf.compat.v1.nn.raw_rnn (step by step)",
    "static_state_saving_rnn": "tf.compat.v1.nn.static_state_saving_rnn (step by step)",
}


_missing = missing(__name__, __all__)


def __getattr__(name: str) -> Any:
    if name in _INSTEAD:
        problem = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(f"{problem}. Nearest to it: {_INSTEAD[name]}.", name=name)
    return _missing(name)
