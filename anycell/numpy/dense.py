"""The linear readout, and the losses that go with it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from anycell.layer.checks import refuse
from anycell.numpy import check, initializers
from anycell.numpy.base import Array, Layer
from anycell.numpy.framework import Numpy


class Dense(Layer):
    """``y = x W^T + b`` over the last axis.

    Parameters, as in ``torch.nn.Linear``: ``weight`` ``[output_size, input_size]`` and ``bias``
    ``[output_size]``, which starts from zero.

    Args:
        input_size, output_size: at least 1.
        bias: whether there is a ``b``.
        dtype: "float32", "float64", "float16" or "bfloat16" (from ml_dtypes).
        initializer: of ``weight``; see ``anycell.numpy.initializers``.
        seed: of the initial values.

    Example:
        >>> Dense(64, 1).forward(np.zeros((32, 64))).shape
        (32, 1)
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        dtype: npt.DTypeLike = "float32",
        initializer: str | initializers.Initializer = "glorot_uniform",
        seed: int | None = None,
    ) -> None:
        self.input_size = check.integer("input_size", input_size)
        self.output_size = check.integer("output_size", output_size)
        self.dtype = check.real_dtype("dtype", dtype)
        draw = initializers.find(initializer, "initializer")
        weight = draw((self.output_size, self.input_size), check.generator("seed", seed))
        parameters = {"weight": weight.astype(self.dtype)}
        if check.boolean("bias", bias):
            parameters["bias"] = np.zeros(self.output_size, self.dtype)
        super().__init__(parameters)

    def __repr__(self) -> str:
        return f"Dense({self.input_size}, {self.output_size}, bias={'bias' in self._parameters})"

    def forward(self, x: npt.ArrayLike, *, training: bool = False) -> Array:
        """Maps ``[..., input_size]`` to ``[..., output_size]``; training keeps x for backward."""
        x = check.features("x", x, self.input_size, self.dtype)
        self._saved = x if check.boolean("training", training) else None
        rows = x.reshape(math.prod(x.shape[:-1]), self.input_size)
        return self._read(rows).reshape(*x.shape[:-1], self.output_size)

    if TYPE_CHECKING:
        __call__ = forward

    def _read(self, rows: Array) -> Array:
        host = Numpy.of(self.dtype.name)
        y = host.matmul(rows, self._parameters["weight"].T)
        return host.narrow(y + self._parameters["bias"] if "bias" in self._parameters else y)

    def backward(self, grad_output: npt.ArrayLike) -> Array:
        """Returns the gradient of the input, from the gradient of the output, and fills ``grads``.

        Raises:
            RuntimeError: if no ``forward(..., training=True)`` came before.
        """
        x: Array = self._last_forward()
        shape = (*x.shape[:-1], self.output_size)
        grad = check.array("grad_output", grad_output, shape, self.dtype)
        flat, rows = grad.reshape(-1, self.output_size), x.reshape(-1, self.input_size)
        weight, host = self._parameters["weight"], Numpy.of(self.dtype.name)
        grads: dict[str, Array] = {"weight": host.narrow(host.matmul(flat.T, rows))}
        if "bias" in self._parameters:
            grads["bias"] = host.narrow(flat.sum(0, dtype=host.wide.dtype))
        self._grads = grads
        return host.narrow(host.matmul(flat, weight)).reshape(x.shape)


def mse(prediction: npt.ArrayLike, target: npt.ArrayLike) -> tuple[float, Array]:
    """The mean squared error, and its gradient with respect to ``prediction``.

    Args:
        prediction, target: of the same shape, not empty. The gradient has the dtype of
            ``prediction``, or float64 for integers.

    Example:
        >>> mse(np.array([1.0, 2.0]), np.array([1.0, 4.0]))
        (2.0, array([ 0., -2.]))
    """
    prediction = check.numbers("prediction", prediction)
    if prediction.dtype.kind in "biu":  # or the gradient would be cut to whole numbers
        prediction = prediction.astype(np.float64)
    # In float16 squares overflow at 256, and in 16 bits a mean has at most three digits.
    wide = np.result_type(prediction.dtype, np.float32)
    target = check.array("target", target, prediction.shape, wide)
    if not prediction.size:
        raise ValueError("prediction: given an empty array, expected at least one number.")
    difference = prediction.astype(wide) - target
    grad = difference * (2.0 / difference.size)
    return float(np.mean(np.square(difference))), grad.astype(prediction.dtype)


def cross_entropy(
    logits: npt.ArrayLike, target: npt.ArrayLike, mask: npt.ArrayLike | None = None
) -> tuple[float, Array]:
    """The mean cross-entropy of softmax, and its gradient with respect to ``logits``.

        loss = mean of log(sum of exp(logits)) - logits[target]

    Args:
        logits: ``[..., C]`` for C classes. The gradient has the same dtype, or float64 for
            integers.
        target: integers ``[...]`` from 0 to C - 1, such as the next character.
        mask: bool ``[...]``, False where a step does not count; values there have no influence.

    Example:
        >>> loss, grad = cross_entropy([[0.0, 0.0], [5.0, -5.0]], [1, 0], mask=[True, False])
        >>> round(loss, 4), grad.tolist()
        (0.6931, [[0.5, -0.5], [0.0, 0.0]])
    """
    logits = check.numbers("logits", logits)
    if not logits.ndim:
        refuse("logits", "shape []", "shape [..., C]", "Pass a number for each class.")
    target, shape = check.numbers("target", target), logits.shape[:-1]
    if target.dtype.kind not in "iu":
        refuse("target", f"dtype {target.dtype}", "integers", "Pass class numbers.", TypeError)
    chosen = check.array("target", target, shape, np.int64)
    counts = np.ones(shape, bool) if mask is None else check.flags("mask", mask, shape)
    if not counts.any():
        refuse("logits", "no step that counts", "one or more", "Skip the call.")
    if ((chosen < 0) | (chosen >= logits.shape[-1]))[counts].any():
        refuse("target", "an unknown class", f"0 to {logits.shape[-1] - 1}", "Add outputs.")
    wide = np.where(counts[..., None], logits, 0.0).astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    places = np.where(counts, chosen, 0)[..., None]
    total, count = np.exp(wide).sum(-1, keepdims=True), counts.sum()
    losses = np.log(total) - np.take_along_axis(wide, places, -1)
    grad = np.exp(wide) / total
    np.put_along_axis(grad, places, np.take_along_axis(grad, places, -1) - 1.0, -1)
    grad = np.where(counts[..., None], grad / count, 0.0)
    real = logits.dtype.kind not in "biu"
    return float(losses[counts].sum() / count), grad.astype(logits.dtype) if real else grad
