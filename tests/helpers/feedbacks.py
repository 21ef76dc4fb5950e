"""The right results of a fed-back readout with weights of 8 bits, for tests of all frontends."""

import numpy as np
from integers import dequantized, round_rows

Array = np.ndarray


def sigmoid(a: Array) -> Array:
    return 0.5 + 0.5 * np.tanh(0.5 * a)


def by_rounding(weights: dict[str, Array], x: Array, forced: Array) -> Array:
    """Returns y ``[T, B, Y]`` of an LSTM in float64, with every operand of a matmul rounded.

    Args:
        weights: those of a torch.nn.LSTM, without the layer's number in their names, and
            ``weight`` and ``bias`` of a readout.
    """
    given = {n: dequantized(w) if w.ndim > 1 else w.astype(float) for n, w in weights.items()}
    width, (steps, rows, _) = len(weights["bias"]), x.shape
    h = c = np.zeros((rows, given["weight_hh"].shape[1]))
    outputs = []
    for t in range(steps):
        entering, free = x[t].copy(), ~forced[t][:, None]
        entering[:, :width] = np.where(free, 0.0, entering[:, :width])
        y = round_rows(h) @ given["weight"].T + given["bias"]
        gates = round_rows(entering) @ given["weight_ih"].T
        gates += np.where(free, round_rows(y) @ given["weight_ih"][:, :width].T, 0.0)
        gates += round_rows(h) @ given["weight_hh"].T + given["bias_ih"] + given["bias_hh"]
        i, f, g, o = np.split(gates, 4, axis=1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        outputs.append(h @ weights["weight"].astype(float).T + given["bias"])
    return np.stack(outputs)
