"""The built-in cells, one file each: equations, source and the function.

Pure definitions, no device.
"""

from typing import TYPE_CHECKING

from anycell.cells.ea_lstm import EALSTM
from anycell.cells.gru import GRU
from anycell.cells.gru_d import GRUD
from anycell.cells.ind_rnn import IndRNN
from anycell.cells.janet import JANET
from anycell.cells.layer_norm_gru import LayerNormGRU
from anycell.cells.layer_norm_lstm import LayerNormLSTM
from anycell.cells.lstm import LSTM
from anycell.cells.lstmp import LSTMP
from anycell.cells.mgu import MGU
from anycell.cells.multiplicative_lstm import MultiplicativeLSTM
from anycell.cells.nas import NAS
from anycell.cells.peephole_lstm import PeepholeLSTM
from anycell.cells.recurrent_dropout_lstm import RecurrentDropoutLSTM
from anycell.cells.rnn import RNN
from anycell.cells.slstm import sLSTM
from anycell.cells.variational_lstm import VariationalLSTM
from anycell.cells.zoneout_gru import ZoneoutGRU
from anycell.cells.zoneout_lstm import ZoneoutLSTM
from anycell.refusal import missing

__all__ = [
    "EALSTM", "GRU", "GRUD", "IndRNN", "JANET", "LSTM", "LSTMP", "LayerNormGRU", "LayerNormLSTM",
    "MGU", "MultiplicativeLSTM", "NAS", "PeepholeLSTM", "RNN", "RecurrentDropoutLSTM",
    "VariationalLSTM", "ZoneoutGRU", "ZoneoutLSTM", "sLSTM",
]  # fmt: skip

if not TYPE_CHECKING:  # with it, type checkers would accept any name
    __getattr__ = missing(__name__, __all__)
