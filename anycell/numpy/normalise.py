"""Layers that scale inputs by statistics of the training data, or of each batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from anycell.layer.checks import refuse
from anycell.layer.layers import Layout
from anycell.numpy import check
from anycell.numpy.base import Array, Layer
from anycell.numpy.check import numpy_dtype
from anycell.numpy.framework import Numpy
from anycell.numpy.streaming import writing
from anycell.plan.dtype import dtypes

Valid = npt.NDArray[np.bool_]


class Standardise(Layer):
    """``(x - mean) / std`` of each feature, with the mean and the deviation of the training data.

    NaN stands for a missing value: it does not count, and stays NaN. A constant feature is divided
    by 1. Nothing is learned; ``save`` and ``load`` keep ``mean`` and ``std``, float64 ``[size]``.

    Args:
        size: number of features, the last axis.
        dtype: of the results, a dtype of layers. If None, ``inverse`` returns float64, because
            float32 has too few digits for data far from 0, and ``forward`` the dtype of x, or
            float64 for integers.

    Example:
        >>> scale = Standardise(1).fit([[1.0], [3.0], [np.nan]])
        >>> scale.forward([[1.0], [5.0]]).tolist(), scale.inverse([[-1.0]]).tolist()
        ([[-1.0], [3.0]], [[1.0]])
    """

    def __init__(self, size: int, dtype: npt.DTypeLike | None = None) -> None:
        self.size = check.integer("size", size)
        self._results = None if dtype is None else check.real_dtype("dtype", dtype)
        self.dtype = np.dtype(np.float64) if self._results is None else self._results
        super().__init__({}, _statistics(self.size, np.dtype(np.float64), "mean", "std"))

    def __repr__(self) -> str:
        dtype = "" if self._results is None else f", dtype={self.dtype.name!r}"
        return f"Standardise({self.size}{dtype})"

    def fit(self, x: npt.ArrayLike, *, mask: npt.ArrayLike | None = None) -> Standardise:
        """Computes mean and deviation of ``x [..., size]``; returns the layer itself.

        Args:
            x: every element that is not NaN counts, along all axes but the last.
            mask: bool, shaped like x without its last axis: False where nothing counts.

        Raises:
            ValueError: for a feature with no value, or an infinite one.
        """
        # In float64, whatever the layer's dtype: around a large mean float32 has few digits.
        x = check.features("x", x, self.size, np.float64)
        counts = ~np.isnan(x)
        if mask is not None:
            counts &= check.flags("mask", mask, x.shape[:-1])[..., None]
        mean, variance, count = _moments(x, counts)
        wrong = np.flatnonzero((count == 0) | ~np.isfinite(variance))
        if wrong.size:
            given = f"no value, or an infinite one, of feature(s) {wrong.tolist()}"
            refuse("x", given, "one or more, all finite")
        std = np.sqrt(variance)
        with writing(self.arrays):
            self.arrays["mean"][:] = mean
            self.arrays["std"][:] = np.where(std > 0.0, std, 1.0)
        return self

    def forward(self, x: npt.ArrayLike) -> Array:
        """``(x - mean) / std`` of ``x [..., size]``."""
        dtype = getattr(getattr(x, "dtype", None), "name", "")
        known = self._results is None and dtype in dtypes("cpu")
        x = check.features("x", x, self.size, np.float64)
        y = (x - self.arrays["mean"]) / self.arrays["std"]
        return y.astype(numpy_dtype(dtype) if known else self.dtype)

    if TYPE_CHECKING:
        __call__ = forward

    def inverse(self, y: npt.ArrayLike) -> Array:
        """``y * std + mean``: a forecast in the units of the data."""
        y = check.features("y", y, self.size, np.float64)
        return (y * self.arrays["std"] + self.arrays["mean"]).astype(self.dtype)


class BatchNorm(Layer):
    """Batch norm of the features of sequences, over all their steps and rows.

        y = weight (x - mean) / sqrt(var + eps) + bias

    Training uses the mean and variance of the batch, and updates the running ones, ``r <- (1 -
    momentum) r + momentum batch``; evaluation uses the running ones. Steps under a mask, or beyond
    a row's length, do not count, and are 0 in y. Names and arithmetic follow
    ``torch.nn.BatchNorm1d``: the parameters ``weight`` and ``bias``, and ``running_mean`` and
    ``running_var``, which ``save`` and ``load`` keep too.

    Args:
        size: number of features, the last axis.
        momentum: in [0, 1].
        eps: not negative.
        batch_first: x is ``[B, T, size]`` in place of ``[T, B, size]``.
        dtype: "float32" or "float64".

    Example:
        >>> norm = BatchNorm(1, dtype="float64")
        >>> norm.forward([[[1.0]], [[3.0]]], training=True).round(2).tolist()
        [[[-1.0]], [[1.0]]]

    Source: Ioffe & Szegedy, *Batch Normalization: Accelerating Deep Network Training by Reducing
    Internal Covariate Shift*, 2015.
    """

    def __init__(
        self,
        size: int,
        *,
        momentum: float = 0.1,
        eps: float = 1e-5,
        batch_first: bool = False,
        dtype: npt.DTypeLike = "float32",
    ) -> None:
        self.size, self.dtype = check.integer("size", size), check.real_dtype("dtype", dtype)
        self.momentum = check.number("momentum", momentum, 0.0, 1.0, closed=True)
        self.eps = check.number("eps", eps, low=0.0)
        self.batch_first = check.boolean("batch_first", batch_first)
        super().__init__(
            {"weight": np.ones(self.size, self.dtype), "bias": np.zeros(self.size, self.dtype)},
            _statistics(self.size, self.dtype, "running_mean", "running_var"),
        )

    def __repr__(self) -> str:
        return f"BatchNorm({self.size}, momentum={self.momentum}, eps={self.eps})"

    def forward(
        self,
        x: npt.ArrayLike,
        *,
        mask: npt.ArrayLike | None = None,
        lengths: npt.ArrayLike | None = None,
        training: bool = False,
    ) -> Array:
        """Returns y, shaped like ``x [T, B, size]``; ``training`` keeps what ``backward`` needs.

        Args:
            mask: bool, laid out as x without its last axis.
            lengths: integers ``[B]``. With a mask too, a step counts only if both include it.

        Raises:
            ValueError: in training, if fewer than two steps count.
        """
        axes = ("B", "T") if self.batch_first else ("T", "B")
        x = check.array("x", x, (*axes, self.size), self.dtype)
        valid = self._valid(x, mask, lengths)
        x = np.where(valid, x, np.zeros_like(x))
        if training := check.boolean("training", training):
            mean, variance, count = _moments(x, np.broadcast_to(valid, x.shape))
            if count[0] < 2:
                hint = "Training takes mean and variance of the batch."
                refuse("x", f"{count[0]} step(s) that count", "two or more", hint)
            unbiased = variance * (count / (count - 1))
            with writing(self._statistics):
                for name, batch in (("running_mean", mean), ("running_var", unbiased)):
                    running = self.arrays[name]
                    running += self.momentum * (batch.astype(self.dtype) - running)
        else:
            mean, variance = self.arrays["running_mean"], self.arrays["running_var"]
        scale = (1.0 / np.sqrt(variance.astype(np.float64) + self.eps)).astype(self.dtype)
        normal = (x - mean.astype(self.dtype)) * scale * valid
        self._saved = (normal, scale, valid) if training else None
        return normal * self._parameters["weight"] + self._parameters["bias"] * valid

    if TYPE_CHECKING:
        __call__ = forward

    def backward(self, grad_output: npt.ArrayLike) -> Array:
        """Returns the gradient of x, from the gradient of y, and fills ``grads``.

        Raises:
            RuntimeError: if no ``forward(..., training=True)`` came before.
        """
        normal, scale, valid = self._last_forward()
        grad = check.array("grad_output", grad_output, normal.shape, self.dtype)
        grad = np.where(valid, grad, np.zeros_like(grad))
        by_weight, by_bias = ((grad * a).sum((0, 1), dtype=np.float64) for a in (normal, 1.0))
        summed = {"weight": by_weight, "bias": by_bias}
        self._grads = {name: total.astype(self.dtype) for name, total in summed.items()}
        count = valid.sum()
        mean, slope = (by_bias / count).astype(self.dtype), (by_weight / count).astype(self.dtype)
        return (grad - mean - normal * slope) * (scale * self._parameters["weight"]) * valid

    def _valid(self, x: Array, mask: npt.ArrayLike | None, lengths: npt.ArrayLike | None) -> Valid:
        """Returns the steps that count, as flags ``[., ., 1]`` laid out as x."""
        rows, steps = x.shape[:2] if self.batch_first else x.shape[1::-1]
        valid = Layout(Numpy, x, steps, (rows,), self.batch_first).valid(mask, lengths)
        valid = np.ones((steps, rows), bool) if valid is None else valid
        return (valid.T if self.batch_first else valid)[..., None]


def _statistics(size: int, dtype: np.dtype, mean: str, spread: str) -> dict[str, Array]:
    return {mean: np.zeros(size, dtype), spread: np.ones(size, dtype)}


def _moments(x: Array, counts: Valid) -> tuple[Array, Array, npt.NDArray[np.int64]]:
    """Mean and variance of each feature in float64, over the elements that count, and how many."""
    axes = tuple(range(x.ndim - 1))
    count = counts.sum(axes)
    divisor = np.maximum(count, 1)
    with np.errstate(invalid="ignore"):  # infinite values give NaN
        mean = np.where(counts, x, 0.0).sum(axes, dtype=np.float64) / divisor
        # Rounding may put the mean beyond all values; after clipping, equal values have variance 0.
        least = np.min(x, axes, initial=np.inf, where=counts)
        mean = np.clip(mean, least, np.max(x, axes, initial=-np.inf, where=counts))
        centred = np.where(counts, x - mean, 0.0)
        return mean, np.square(centred).sum(axes) / divisor, count
