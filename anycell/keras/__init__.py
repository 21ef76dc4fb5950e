"""anycell for Keras 3: recurrent layers of any cell, at fused-kernel speed.

- ``LSTM``, ``GRU``, ``SimpleRNN`` replace those of ``keras.layers`` (they are subclasses): same
  arguments, weights, results and errors.
- ``RNN(cell, units)`` and ``RNNCell(cell, units)`` run any cell, yours included; the cells of
  ``anycell.cells`` also have layers of their own names: ``PeepholeLSTM(units, cell_clip=3.0)``.
- ``Quantized`` layers have weights of 8 bits; ``anycell.compress.quantize`` makes them.
- ``Feedback(layer, readout)`` feeds a readout back to its layer: scheduled sampling, forecasts.
- ``recurrence(cell, x, weights)`` is one direction of one layer, on tensors of your own.
- ``accelerate(model)`` turns Keras's layers inside a model into these; ``recurrent_layers(model)``
  says what runs each of its layers, and ``restore(model)`` puts Keras's own back.

On the TensorFlow and torch backends the layers run on a fused kernel, forward and backward, on the
CPU; otherwise on cuDNN or step by step in the backend's operations. See ``layer.engine``.
"""

from typing import TYPE_CHECKING

from anycell.requirement import require

require("keras", "anycell.keras", "keras", ", or choose another backend by KERAS_BACKEND")

from anycell.keras import compress as _compress  # noqa: F401  (anycell.compress looks it up)
from anycell.keras import named
from anycell.keras.accelerate import accelerate, recurrent_layers, restore
from anycell.keras.cell import RNNCell
from anycell.keras.feedback import Feedback
from anycell.keras.layers import GRU, LSTM, RNN, GRUCell, LSTMCell, SimpleRNN, SimpleRNNCell
from anycell.keras.named import *  # noqa: F403
from anycell.keras.primitive import recurrence
from anycell.keras.quantized import Quantized
from anycell.keras.rule import step_by_step
from anycell.refusal import missing

__all__ = [
    "GRU", "LSTM", "RNN", "Feedback", "GRUCell", "LSTMCell", "Quantized", "RNNCell", "SimpleRNN",
    "SimpleRNNCell", "accelerate", "recurrence", "recurrent_layers", "restore", "step_by_step",
]  # fmt: skip
__all__ += named.__all__


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # with it, type checkers would accept any name
    __getattr__ = missing(__name__, __all__)
