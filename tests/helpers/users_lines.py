"""Lines as users write them: type checkers must reject each line that ends in "wrong", and only it.

Nothing runs them; ``test_types.py`` has mypy and pyright read them.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import assert_type

import anycell
from anycell import cells
from anycell.torch import PeepholeLSTM

x, packed = torch.zeros(5, 2, 3), torch.nn.utils.rnn.pack_sequence([torch.zeros(5, 3)])

# The idiom of README.
layer = anycell.torch.RNN(cells.PeepholeLSTM, 3, 8, num_layers=2)
output, (h, c) = layer(x, lengths=[5, 3])
assert_type(output, torch.Tensor)
assert_type(layer(packed)[0], PackedSequence)
anycell.torch.RNN(3, 8)  # wrong
anycell.torch.RNN(cells.LSTM, 3, 8, num_layer=2)  # wrong
anycell.torch.RNN(cells.LSTMP, 3, 8, P=4, batch_first=True)
anycell.torch.RNN(cells.LSTMP, 3, 8, P="4")  # wrong
anycell.torch.RNN(cells.PeepholeLSTM(cell_clip=3.0), 3, 8)
anycell.torch.RNNCell(cells.LSTMP, 3, 8, P=4)
anycell.torch.RNNCell(cells.LSTMP, 3, 8, p=4)  # wrong
anycell.torch.RNN("LSTM", 3, 8)  # wrong
layer(x, length=[5, 3])  # wrong
layer(np.zeros((5, 2, 3)))  # wrong
print(anycell.torch.RMM)  # wrong
print(anycell.torhc)  # wrong

# Layers in place of torch's.
lstm = anycell.torch.LSTM(3, 8, num_layers=2, proj_size=4, checkpoint="sqrt")
assert_type(lstm(x), tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]])
assert_type(anycell.torch.GRU(3, 8)(x, masked_output="repeat"), tuple[torch.Tensor, torch.Tensor])
every = lstm(x, return_states=True)
assert_type(every[2], dict[str, torch.Tensor])
module: torch.nn.LSTM = lstm
assert_type(lstm.prepare(), anycell.torch.LSTM)
step, state = lstm.step(torch.zeros(2, 3), resets=torch.ones(2))
assert_type(step, torch.Tensor)
anycell.torch.LSTM(3, 8, num_layer=2)  # wrong
anycell.torch.GRU(3)  # wrong
lstm(x, resett=x)  # wrong
lstm(x)[2]  # wrong
lstm.step(x, reset=x)  # wrong
assert_type(anycell.torch.LSTMCell(3, 8)(x[0]), tuple[torch.Tensor, torch.Tensor])
assert_type(anycell.torch.GRUCell(3, 8)(x[0]), torch.Tensor)
one = anycell.torch.RNNCell(cells.GRU, 3, 8)(x[0])

# A layer for each cell.
peephole = PeepholeLSTM(3, 8, cell_clip=3.0, bidirectional=True)
assert_type(peephole(x)[0], torch.Tensor)
anycell.torch.LSTMP(3, 8, P=4)
PeepholeLSTM(3, 8, cellclip=3.0)  # wrong
anycell.torch.LSTMP(3, 8)  # wrong
anycell.keras.PeepholeLSTM(8, cell_clip=3.0, return_sequences=True)
anycell.keras.PeepholeLSTM(8, coupled="yes")  # wrong
anycell.keras.PeepholeLSTM(8, return_sequence=True)  # wrong
anycell.keras.VariationalLSTM(8, dropout=0.2, recurrent_initializer="zeros")
anycell.keras.RNN(cells.LSTMP, 8, P=4, return_sequences=True, use_bias=False, name="lstmp")
anycell.keras.RNN(cells.LSTM, 8, num_layer=2)  # wrong
anycell.keras.RNN(cells.LSTM, 8, return_sequence=True)  # wrong
anycell.keras.RNNCell(cells.LSTMP, 8, P=4, dtype="float32")
anycell.keras.RNNCell(cells.LSTM, 8, num_layer=2)  # wrong

# Functions on layers.
readout = anycell.torch.Feedback(lstm, torch.nn.Linear(4, 1))
y, _ = readout(x, forced=0.5)
assert_type(y, torch.Tensor)
readout(x)
readout(x, forced="all")  # wrong
assert_type(anycell.torch.accelerate(torch.nn.LSTM(3, 8)), torch.nn.LSTM)
assert_type(anycell.torch.restore(torch.nn.Sequential()), torch.nn.Sequential)
engine: str = layer.engine.name
print(anycell.explain(layer), anycell.explain(cells.LSTM, 64).plan, layer.explain(batch=32)[:80])
anycell.explain(cells.LSTM, hidden_size="64")  # wrong

# NumPy.
of_numpy = anycell.numpy.LSTM(3, 8, batch_first=True, forget_bias=1.0, seed=0)
array, final = of_numpy(np.zeros((2, 5, 3)), training=True)
print(array.sum(), of_numpy.state_dict()["weight_ih_l0"].shape)
loss, grad = anycell.numpy.cross_entropy(np.zeros((2, 3)), [0, 1])
assert_type(loss, float)
assert_type(anycell.numpy.check_gradients(of_numpy, array), dict[str, float])
every_state = of_numpy(array, return_states=["c"])
assert_type(every_state[2], dict[str, npt.NDArray[np.floating[Any]]])
anycell.numpy.RNN(cells.LSTMP, 3, 8, P=4, seed=0)
anycell.numpy.RNN(cells.LSTM, 3, 8, num_layer=2)  # wrong
anycell.numpy.LSTM(3, 8, num_layer=2)  # wrong
anycell.numpy.GRU(3, 8, bach_first=True)  # wrong
anycell.numpy.MGU(3, 8, reset=True)  # wrong
of_numpy(array, lenghts=[5, 3])  # wrong


@anycell.cell(gates="f g", state="h")
def mine(x: Any, r: Any, s: Any) -> Any:
    f = anycell.sigmoid(x.f + r.f)
    return f * s.h + (1.0 - f) * anycell.tanh(x.g + r.g)


anycell.torch.RNN(mine, 3, 8)
anycell.cell(gate="f g")  # wrong


# Cells with types.
@anycell.cell(gates="f g", state="h c:P", params="w", static="e")
def typed(
    x: anycell.Gates,
    r: anycell.Gates,
    s: anycell.Gates,
    p: anycell.Gates,
    e: anycell.Expr,
    *,
    rate: float = 0.5,
) -> tuple[anycell.Expr, anycell.Expr]:
    f, g = x + r
    assert_type(f, anycell.Expr)
    up, down = anycell.linear(s.h, "both", gates="up down")
    c = anycell.linear(up * e, "w", size="P") + 2.0 * s.c**0.5 + 2**s.c
    low = anycell.where((f > 0.0) & (g < rate), anycell.gelu(f), p.w * down)
    return anycell.softmax(low) * anycell.pow(g, 2.5) + e, c


def wrong_argument(f: anycell.Expr) -> anycell.Expr:
    anycell.elu(f, alpha="1")  # wrong
    anycell.gelu(f, approximation="tanh")  # wrong
    return anycell.sin("f")  # wrong


assert_type(typed, anycell.Cell)
