"""anycell for PyTorch."""

from anycell.torch.dropin import GRU, LSTM
from anycell.torch.functional import Engine
from anycell.torch.rnn import RNN

__all__ = ["GRU", "LSTM", "RNN", "Engine"]
