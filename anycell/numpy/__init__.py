"""Recurrent layers on NumPy arrays, and what it takes to train them: no framework needed.

    from anycell.numpy import LSTM, Adam, Dense, clip_by_global_norm, mse

    lstm, readout = LSTM(1, 64, seed=0), Dense(64, 1, seed=1)
    optimizer = Adam([lstm, readout], lr=3e-3)
    for x, y in batches:                                       # [T, B, 1] and [B, 1]
        output, _ = lstm.forward(x, training=True)
        loss, grad = mse(readout.forward(output[-1], training=True), y)
        grad_output = np.zeros_like(output)
        grad_output[-1] = readout.backward(grad)
        lstm.backward(grad_output)
        clip_by_global_norm([lstm, readout], 1.0)
        optimizer.step()

Any cell runs like this: ``RNN(cell, input_size, hidden_size)``. Each cell of ``anycell.cells`` also
has a layer of its name, ``PeepholeLSTM(1, 64, cell_clip=3.0)``. ``loop(step)`` runs a step that is
written in NumPy.
"""

from typing import TYPE_CHECKING

from anycell.numpy import compress as _compress  # noqa: F401  (anycell.compress looks it up)
from anycell.numpy import initializers, named
from anycell.numpy.base import Layer
from anycell.numpy.dense import Dense, cross_entropy, mse
from anycell.numpy.feedback import Feedback
from anycell.numpy.gradients import check_gradients
from anycell.numpy.layers import LSTM, RNN
from anycell.numpy.loops import loop
from anycell.numpy.named import *  # noqa: F403
from anycell.numpy.normalise import BatchNorm, Standardise
from anycell.numpy.optim import Adam, Trainable, clip_by_global_norm, clip_by_value
from anycell.numpy.quantized import Quantized
from anycell.numpy.schedules import EarlyStopping, Plateau, cosine, inverse_sigmoid, one_cycle
from anycell.refusal import missing

__all__ = [
    "LSTM", "RNN", "Adam", "BatchNorm", "Dense", "EarlyStopping", "Feedback", "Layer",
    "Plateau", "Quantized", "Standardise", "Trainable", "check_gradients", "clip_by_global_norm",
    "clip_by_value", "cosine", "cross_entropy", "initializers", "inverse_sigmoid", "loop",
    "mse", "one_cycle",
]  # fmt: skip
__all__ += named.__all__


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # with it, type checkers would accept any name
    __getattr__ = missing(__name__, __all__)
