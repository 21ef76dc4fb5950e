"""``accelerate(model)``: the layers of ``torch.nn`` inside a model become anycell's."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torch import nn

from anycell.torch.dropin import GRU, LSTM

logger = logging.getLogger("anycell")

_SWAPS: dict[type[nn.Module], type[nn.Module]] = {nn.LSTM: LSTM, nn.GRU: GRU}
