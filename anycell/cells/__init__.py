"""The built-in cells, one file each: equations, source and the function.

Pure definitions, no device.
"""

from anycell.cells.gru import GRU
from anycell.cells.layer_norm_lstm import LayerNormLSTM
from anycell.cells.lstm import LSTM
from anycell.cells.peephole_lstm import PeepholeLSTM
from anycell.cells.rnn import RNN

__all__ = ["GRU", "LSTM", "RNN", "LayerNormLSTM", "PeepholeLSTM"]
