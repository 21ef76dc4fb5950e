"""anycell for PyTorch: recurrent layers of any cell, at fused-kernel speed.

- ``LSTM``, ``GRU``, ``LSTMCell``, ``GRUCell`` replace those of ``torch.nn`` (they are subclasses):
  same constructors, ``state_dict``, shapes, initial weights and errors; the layers also take
  masks, lengths and resets.
- ``RNN(cell, ...)`` and ``RNNCell(cell, ...)`` run any cell, yours included; the cells of
  ``anycell.cells`` also have layers of their own names: ``PeepholeLSTM(3, 8, cell_clip=3.0)``.
- ``Feedback(layer, readout)`` feeds a readout back to its layer: scheduled sampling, forecasts.
- ``recurrence(cell, x, weights, ...)`` is the function behind them, on tensors of your own.
- ``loop(module)`` and ``scan(step, init, xs)`` run steps as they are written, fused if they can be
  read; ``explain_scan`` says whether they can.
- ``Quantized`` layers have weights of 8 bits; ``anycell.compress.quantize`` makes them.
- ``accelerate(model)`` swaps the layers inside a model, ``restore(model)`` puts torch's own back;
  ``recurrent_layers(model)`` says what runs.

Layers run on a fused kernel, forward and backward, on the CPU and on GPUs with Triton (float64 on
the CPU only), or else as torch's own layer or step by step; ``layer.engine`` says which, and why.
Second derivatives, ``torch.func``, deepcopy, pickle, hooks and parametrisations work as with
``torch.nn``.
"""

# Files here are doors (the layers, ``primitive`` for ``recurrence``, ``loops``, ``accelerate``),
# what other rooms look up by name (``compress``, ``exported``, ``packaged``, ``onnx``), and torch
# itself (``framework``, with ``observers``, ``graphs`` and ``threads``). ``operators/`` runs
# layers, ``reading/`` runs steps of users.

from typing import TYPE_CHECKING

from anycell.requirement import require

require("torch", "anycell.torch", extra="torch")

from anycell.plan import Engine
from anycell.refusal import missing
from anycell.torch import compress as _compress  # noqa: F401  (anycell.compress looks it up)
from anycell.torch import named
from anycell.torch.accelerate import accelerate, recurrent_layers, restore
from anycell.torch.dropin import GRU, LSTM
from anycell.torch.feedback import Feedback
from anycell.torch.loops import explain_scan, loop, scan
from anycell.torch.named import *  # noqa: F403
from anycell.torch.primitive import recurrence
from anycell.torch.quantized import Quantized
from anycell.torch.rnn import RNN
from anycell.torch.step import GRUCell, LSTMCell, RNNCell

__all__ = [
    "GRU", "LSTM", "RNN", "Engine", "Feedback", "GRUCell", "LSTMCell", "Quantized", "RNNCell",
    "accelerate", "explain_scan", "loop", "recurrence", "recurrent_layers", "restore", "scan",
]  # fmt: skip
__all__ += named.__all__


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # with it, type checkers would accept any name
    __getattr__ = missing(__name__, __all__)
