"""The LSTM from scratch that everybody writes once: NumPy, a loop over time, backward by hand.

Here it is a peer to be beaten, so it is written well: input projection and weight gradients are one
matmul each over all steps, and a step is one matmul and the element-wise part.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from anycell.bench.numpy_layers import blas_threads
from anycell.bench.problem import Problem, by_direction, rounds, suffix
from anycell.bench.tasks import Array, Contender, Mode, Task, Unsupported

Weights = Mapping[str, Array]


def sigmoid(v: Array) -> Array:
    """``1 / (1 + exp(-v))`` that cannot overflow."""
    return 0.5 * np.tanh(0.5 * v) + 0.5


class Scan:
    """One direction of one layer, in time order; ``forward`` keeps what ``backward`` needs.

    A subclass defines a step and its derivative: `step` writes ``h[t + 1]``, `back` writes the
    gradients of both projections and returns the gradient of h that bypasses the matmul, if any.

    Attributes:
        gates: ``[T, B, G * H]``, first projected inputs, then the activated gates.
        h, c: the states, ``[T + 1, B, H]``, from the initial ones on.
        aside: ``[T + 1, B, H]``, another value that a step keeps.
        learned: gradients of parameters that a step multiplies itself, which `back` adds up.
        apart: whether the gradients of the two projections differ, as a GRU's do.
    """

    apart = False
    x: Array
    gates: Array
    h: Array
    c: Array
    aside: Array
    dc: Array

    def __init__(self, w: Weights) -> None:
        self.w = w
        self.learned: dict[str, Array] = {}

    def step(self, t: int, recurrent: Array) -> None:
        raise NotImplementedError

    def back(self, t: int, dh: Array, d_input: Array, d_hidden: Array) -> Array | None:
        raise NotImplementedError

    def forward(self, x: Array) -> Array:
        """``[T, B, in] -> [T, B, H]``."""
        w, hidden = self.w, self.w["weight_hh"].shape[1]
        bias = w["bias_ih"] if self.apart else w["bias_ih"] + w["bias_hh"]
        self.x, self.gates = x, x @ w["weight_ih"].T + bias
        self.h, self.c, self.aside = np.zeros((3, len(x) + 1, x.shape[1], hidden), x.dtype)
        weight = np.ascontiguousarray(w["weight_hh"].T)
        for t in range(len(x)):
            self.step(t, self.h[t] @ weight)
        return self.h[1:]

    def backward(self, dy: Array) -> tuple[Array, dict[str, Array]]:
        """The gradients of the input and, by name, of everything learned."""
        d_input = np.empty_like(self.gates)
        d_hidden = np.empty_like(self.gates) if self.apart else d_input
        dh, self.dc = np.zeros((2, *dy.shape[1:]), dy.dtype)
        self.learned = {n: np.zeros_like(p) for n, p in self.w.items() if n.startswith("p_")}
        for t in reversed(range(len(dy))):
            past = self.back(t, dh + dy[t], d_input[t], d_hidden[t])
            dh = d_hidden[t] @ self.w["weight_hh"]
            if past is not None:
                dh += past
        flat = [d.reshape(-1, d.shape[-1]) for d in (d_input, d_hidden)]
        return d_input @ self.w["weight_ih"], {
            "weight_ih": flat[0].T @ self.x.reshape(-1, self.x.shape[-1]),
            "weight_hh": flat[1].T @ self.h[:-1].reshape(-1, self.h.shape[-1]),
            "bias_ih": flat[0].sum(0),
            "bias_hh": flat[1].sum(0),
            **self.learned,
        }


class LSTM(Scan):
    """Gates i f g o, with peepholes where there are weights for them; tanh(c) is kept aside."""

    def step(self, t: int, recurrent: Array) -> None:
        old, new = self.c[t : t + 2]
        self.gates[t] += recurrent
        i, f, g, o = np.split(self.gates[t], 4, axis=1)
        i[:] = sigmoid(self.see(i, "p_i", old))
        f[:] = sigmoid(self.see(f, "p_f", old))
        np.tanh(g, out=g)
        np.add(f * old, i * g, out=new)
        o[:] = sigmoid(self.see(o, "p_o", new))
        np.tanh(new, out=self.aside[t])
        np.multiply(o, self.aside[t], out=self.h[t + 1])

    def see(self, gate: Array, name: str, c: Array) -> Array:
        return gate + self.w[name] * c if name in self.w else gate

    def back(self, t: int, dh: Array, d_input: Array, d_hidden: Array) -> None:
        i, f, g, o = np.split(self.gates[t], 4, axis=1)
        di, df, dg, do = np.split(d_input, 4, axis=1)
        old, new = self.c[t : t + 2]
        dc = self.dc
        do[:] = dh * self.aside[t] * o * (1 - o)
        dc += dh * o * (1 - self.aside[t] ** 2)
        if self.learned:
            dc += do * self.w["p_o"]
        di[:] = dc * g * i * (1 - i)
        df[:] = dc * old * f * (1 - f)
        dg[:] = dc * i * (1 - g * g)
        dc *= f
        if self.learned:
            dc += di * self.w["p_i"] + df * self.w["p_f"]
            for name, gradient, c in (("p_i", di, old), ("p_f", df, old), ("p_o", do, new)):
                self.learned[name] += (gradient * c).sum(0)


class GRU(Scan):
    """Gates r z n, the reset after the matmul; the recurrent part of n is kept aside."""

    apart = True

    def step(self, t: int, recurrent: Array) -> None:
        recurrent += self.w["bias_hh"]
        r, z, n = np.split(self.gates[t], 3, axis=1)
        h_r, h_z, self.aside[t] = np.split(recurrent, 3, axis=1)
        r[:], z[:] = sigmoid(r + h_r), sigmoid(z + h_z)
        np.tanh(n + r * self.aside[t], out=n)
        np.add(n, z * (self.h[t] - n), out=self.h[t + 1])

    def back(self, t: int, dh: Array, d_input: Array, d_hidden: Array) -> Array:
        r, z, n = np.split(self.gates[t], 3, axis=1)
        dr, dz, dn = np.split(d_input, 3, axis=1)
        dz[:] = dh * (self.h[t] - n) * z * (1 - z)
        dn[:] = dh * (1 - z) * (1 - n * n)
        dr[:] = dn * self.aside[t] * r * (1 - r)
        d_hidden[:] = d_input
        d_hidden[:, -n.shape[1] :] *= r
        return dh * z


class RNN(Scan):
    """Elman's network, with tanh."""

    def step(self, t: int, recurrent: Array) -> None:
        np.tanh(self.gates[t] + recurrent, out=self.h[t + 1])

    def back(self, t: int, dh: Array, d_input: Array, d_hidden: Array) -> None:
        np.multiply(dh, 1 - self.h[t + 1] ** 2, out=d_input)


WAYS = (1, -1)  # through time, by direction
SCANS: dict[str, type[Scan]] = {"LSTM": LSTM, "GRU": GRU, "RNN": RNN, "PeepholeLSTM": LSTM}


class Stack:
    """Layers and directions around scans; weights have ``torch.nn``'s names."""

    def __init__(self, problem: Problem) -> None:
        scan = SCANS[problem.cell.name]
        self.scans = [list(map(scan, l)) for l in by_direction(problem.weights, problem.shape)]

    def forward(self, x: Array) -> Array:
        """``[T, B, I] -> [T, B, D * H]``."""
        for layer in self.scans:
            outputs = [scan.forward(x[::w])[::w] for scan, w in zip(layer, WAYS, strict=False)]
            x = np.concatenate(outputs, 2) if len(outputs) > 1 else outputs[0]
        return x

    def backward(self, dy: Array) -> dict[str, Array]:
        """Gradients by name, the input's as ``x``; only after `forward`."""
        gradients: dict[str, Array] = {}
        for number, layer in reversed(list(enumerate(self.scans))):
            inputs = []
            for d, part in enumerate(np.split(dy, len(layer), axis=2)):
                dx, learned = layer[d].backward(part[:: WAYS[d]])
                inputs.append(dx[:: WAYS[d]])
                gradients |= {name + suffix(number, d): value for name, value in learned.items()}
            dy = np.asarray(sum(inputs))
        return {**gradients, "x": dy}


def loop(problem: Problem) -> Contender:
    """The LSTM from scratch: a Python loop over time, backward by hand."""
    if problem.cell.origin not in SCANS:
        raise Unsupported(f"no NumPy loop for {problem.cell.name}")
    if rounds(problem.dtype):
        raise Unsupported(f"no NumPy loop in {problem.dtype}")
    stack = Stack(problem)

    def train() -> dict[str, Array]:
        return {"output": stack.forward(problem.x), **stack.backward(problem.dy)}

    tasks: dict[Mode, Task] = {
        "inference": Task(lambda: stack.forward(problem.x)),
        "training": Task(train, dict),
    }
    return Contender(tasks, functools.partial(blas_threads, problem.threads))
