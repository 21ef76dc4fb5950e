"""The LSTM from scratch that everybody writes once: NumPy, a loop over time, backward by hand.

Here it is a peer to be beaten, so it is written well: input projection and weight gradients are one
matmul each over all steps, and a step is one matmul and the element-wise part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating]
Weights = Mapping[str, Array]


def sigmoid(v: Array) -> Array:
    """``1 / (1 + exp(-v))`` that cannot overflow."""
    return 0.5 * np.tanh(0.5 * v) + 0.5


class Scan:
    """One direction of one layer, in time order; ``forward`` keeps what ``backward`` needs."""

    peepholes: ClassVar[tuple[str, ...]] = ()
    x: Array

    def __init__(self, w: Weights) -> None:
        self.w = w

    def project(self, x: Array) -> Array:
        return x @ self.w["weight_ih"].T + (self.w["bias_ih"] + self.w["bias_hh"])

    def forward(self, x: Array, keep: bool) -> Array:
        raise NotImplementedError

    def backward(self, dy: Array) -> tuple[Array, dict[str, Array]]:
        raise NotImplementedError

    def matmul_gradients(
        self, d_input: Array, d_hidden: Array, h: Array
    ) -> tuple[Array, dict[str, Array]]:
        """Gradients of both projections from those of their results; ``h`` is each step's input."""
        gates = d_input.shape[-1]
        flat_in, flat_hid = d_input.reshape(-1, gates), d_hidden.reshape(-1, gates)
        return d_input @ self.w["weight_ih"], {
            "weight_ih": flat_in.T @ self.x.reshape(-1, self.x.shape[-1]),
            "weight_hh": flat_hid.T @ h.reshape(-1, h.shape[-1]),
            "bias_ih": flat_in.sum(0),
            "bias_hh": flat_hid.sum(0),
        }


class LSTM(Scan):
    """Gates i f g o; the peephole terms are there where the subclass names them."""

    def forward(self, x: Array, keep: bool) -> Array:
        gates, weight = self.project(x), np.ascontiguousarray(self.w["weight_hh"].T)
        steps, batch, hidden = *x.shape[:2], weight.shape[0]
        h, c = np.zeros((2, steps + 1, batch, hidden), x.dtype)
        tanh_c = np.empty((steps, batch, hidden), x.dtype)
        for t in range(steps):
            gates[t] += h[t] @ weight
            i, f, g, o = self.activate(gates[t], c[t])
            np.add(f * c[t], i * g, out=c[t + 1])
            o[:] = sigmoid(self.see(o, "p_o", c[t + 1]))
            np.tanh(c[t + 1], out=tanh_c[t])
            np.multiply(o, tanh_c[t], out=h[t + 1])
        if keep:
            self.x, self.gates, self.h, self.c, self.tanh_c = x, gates, h, c, tanh_c
        return h[1:]

    def see(self, gate: Array, name: str, c: Array) -> Array:
        return gate + self.w[name] * c if name in self.peepholes else gate

    def activate(self, gates: Array, c: Array) -> list[Array]:
        """Activates i, f, g in place; o waits for the new c."""
        i, f, g, o = np.split(gates, 4, axis=1)
        i[:] = sigmoid(self.see(i, "p_i", c))
        f[:] = sigmoid(self.see(f, "p_f", c))
        np.tanh(g, out=g)
        return [i, f, g, o]

    def backward(self, dy: Array) -> tuple[Array, dict[str, Array]]:
        weight = self.w["weight_hh"]
        d_gates = np.empty_like(self.gates)
        dh, dc = np.zeros((2, *dy.shape[1:]), dy.dtype)
        peep = {name: np.zeros_like(self.w[name]) for name in self.peepholes}
        for t in reversed(range(len(dy))):
            i, f, g, o = np.split(self.gates[t], 4, axis=1)
            di, df, dg, do = np.split(d_gates[t], 4, axis=1)
            dh += dy[t]
            do[:] = dh * self.tanh_c[t] * o * (1 - o)
            dc += dh * o * (1 - self.tanh_c[t] ** 2)
            if peep:
                dc += do * self.w["p_o"]
            di[:] = dc * g * i * (1 - i)
            df[:] = dc * self.c[t] * f * (1 - f)
            dg[:] = dc * i * (1 - g * g)
            dc *= f
            if peep:
                dc += di * self.w["p_i"] + df * self.w["p_f"]
                peep["p_i"] += (di * self.c[t]).sum(0)
                peep["p_f"] += (df * self.c[t]).sum(0)
                peep["p_o"] += (do * self.c[t + 1]).sum(0)
            dh = d_gates[t] @ weight
        dx, gradients = self.matmul_gradients(d_gates, d_gates, self.h[:-1])
        return dx, gradients | peep


class PeepholeLSTM(LSTM):
    """i and f see the old c, o the new one."""

    peepholes = ("p_i", "p_f", "p_o")


class GRU(Scan):
    """Gates r z n, the reset after the matmul."""

    def forward(self, x: Array, keep: bool) -> Array:
        gates = x @ self.w["weight_ih"].T + self.w["bias_ih"]
        weight = np.ascontiguousarray(self.w["weight_hh"].T)
        steps, batch, hidden = *x.shape[:2], weight.shape[0]
        h = np.zeros((steps + 1, batch, hidden), x.dtype)
        h_n = np.empty((steps, batch, hidden), x.dtype)
        for t in range(steps):
            recurrent = h[t] @ weight + self.w["bias_hh"]
            r, z, n = np.split(gates[t], 3, axis=1)
            h_r, h_z, h_n[t] = np.split(recurrent, 3, axis=1)
            r[:], z[:] = sigmoid(r + h_r), sigmoid(z + h_z)
            np.tanh(n + r * h_n[t], out=n)
            np.add(n, z * (h[t] - n), out=h[t + 1])
        if keep:
            self.x, self.gates, self.h, self.h_n = x, gates, h, h_n
        return h[1:]

    def backward(self, dy: Array) -> tuple[Array, dict[str, Array]]:
        weight, hidden = self.w["weight_hh"], dy.shape[-1]
        d_input, d_hidden = np.empty((2, *self.gates.shape), dy.dtype)
        dh = np.zeros(dy.shape[1:], dy.dtype)
        for t in reversed(range(len(dy))):
            r, z, n = np.split(self.gates[t], 3, axis=1)
            dr, dz, dn = np.split(d_input[t], 3, axis=1)
            dh += dy[t]
            dz[:] = dh * (self.h[t] - n) * z * (1 - z)
            dn[:] = dh * (1 - z) * (1 - n * n)
            dr[:] = dn * self.h_n[t] * r * (1 - r)
            d_hidden[t, :, : 2 * hidden] = d_input[t, :, : 2 * hidden]
            d_hidden[t, :, 2 * hidden :] = dn * r
            dh = dh * z + d_hidden[t] @ weight
        return self.matmul_gradients(d_input, d_hidden, self.h[:-1])


class RNN(Scan):
    """Elman's, with tanh."""

    def forward(self, x: Array, keep: bool) -> Array:
        gates, weight = self.project(x), np.ascontiguousarray(self.w["weight_hh"].T)
        h = np.zeros((len(x) + 1, x.shape[1], weight.shape[0]), x.dtype)
        for t in range(len(x)):
            np.tanh(gates[t] + h[t] @ weight, out=h[t + 1])
        if keep:
            self.x, self.h = x, h
        return h[1:]

    def backward(self, dy: Array) -> tuple[Array, dict[str, Array]]:
        d_gates = np.empty_like(dy)
        dh = np.zeros(dy.shape[1:], dy.dtype)
        for t in reversed(range(len(dy))):
            np.multiply(dh + dy[t], 1 - self.h[t + 1] ** 2, out=d_gates[t])
            dh = d_gates[t] @ self.w["weight_hh"]
        return self.matmul_gradients(d_gates, d_gates, self.h[:-1])


SCANS: dict[str, type[Scan]] = {
    "LSTM": LSTM,
    "GRU": GRU,
    "RNN": RNN,
    "PeepholeLSTM": PeepholeLSTM,
}


class Stack:
    """Layers and directions around scans; weights have ``torch.nn``'s names."""

    def __init__(self, cell: str, weights: Weights, layers: int, directions: int) -> None:
        def scan(suffix: str) -> Scan:
            return SCANS[cell](
                {k.removesuffix(suffix): v for k, v in weights.items() if k.endswith(suffix)}
            )

        self.suffixes = [
            [f"_l{layer}" + "_reverse" * direction for direction in range(directions)]
            for layer in range(layers)
        ]
        self.scans = {suffix: scan(suffix) for layer in self.suffixes for suffix in layer}

    def forward(self, x: Array, keep: bool = False) -> Array:
        """``[T, B, I] -> [T, B, D * H]``."""
        for layer in self.suffixes:
            outputs = []
            for suffix in layer:
                flip = slice(None, None, -1 if suffix.endswith("_reverse") else 1)
                outputs.append(self.scans[suffix].forward(x[flip], keep)[flip])
            x = np.concatenate(outputs, 2) if len(outputs) > 1 else outputs[0]
        return x

    def backward(self, dy: Array) -> dict[str, Array]:
        """Gradients by name, the input's as ``x``; only after ``forward(keep=True)``."""
        gradients: dict[str, Array] = {}
        for layer in reversed(self.suffixes):
            dx: Array | float = 0.0
            for suffix, part in zip(layer, np.split(dy, len(layer), axis=2), strict=True):
                flip = slice(None, None, -1 if suffix.endswith("_reverse") else 1)
                d_input, learned = self.scans[suffix].backward(part[flip])
                dx = dx + d_input[flip]
                gradients |= {name + suffix: value for name, value in learned.items()}
            dy = np.asarray(dx)
        return gradients | {"x": dy}
