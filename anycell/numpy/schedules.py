"""Schedules of training, and when to stop it: learning rates, plateaus, early stopping.

A schedule is a function of the step, from 0 on: ``optimizer.lr = schedule(step)`` before each
``optimizer.step()``. It may also give the probability with which ``Feedback`` forces a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from anycell.numpy import check
from anycell.numpy.base import Array, Layer
from anycell.numpy.optim import Layers, as_layers
from anycell.numpy.streaming import writing

Schedule = Callable[[int], float]


def cosine(peak: float, steps: int, *, warmup: int = 0, final: float = 0.0) -> Schedule:
    """Half a cosine down, after a linear rise.

        peak (s + 1) / (warmup + 1)                                                 s < warmup
        final + (peak - final) (1 + cos(pi (s - warmup) / (steps - warmup))) / 2    up to ``steps``

    and ``final`` from then on.

    Args:
        peak, final: not negative.
        steps: the number of steps of the whole training.
        warmup: how many steps the rise takes, fewer than ``steps``.

    Example:
        >>> schedule = cosine(0.1, 100, warmup=4)
        >>> [round(schedule(step), 3) for step in (0, 4, 52, 100)]
        [0.02, 0.1, 0.05, 0.0]

    Source: Loshchilov & Hutter, *SGDR: Stochastic Gradient Descent with Warm Restarts*, 2017; the
    rise is from Goyal et al., *Accurate, Large Minibatch SGD*, 2017.
    """
    peak, final = (check.number(n, v, low=0.0) for n, v in (("peak", peak), ("final", final)))
    steps = check.integer("steps", steps)
    warmup = check.integer("warmup", warmup, low=0, high=steps - 1)

    def schedule(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / (warmup + 1)
        return _eased(peak, final, (step - warmup) / (steps - warmup))

    return schedule


def one_cycle(
    peak: float, steps: int, *, rise: float = 0.3, start: float = 25.0, end: float = 1e4
) -> Schedule:
    """Up from ``peak / start``, and down to ``peak / start / end``, each by half a cosine.

    The rates equal ``torch.optim.lr_scheduler.OneCycleLR``'s; the momentum does not change.

    Args:
        peak: not negative; reached after ``rise * steps - 1`` steps.
        steps: of the whole training, at least 2; the last step reaches the end, which then stays.
        rise: the fraction of steps that goes up, in (0, 1).
        start, end: above 0.

    Example:
        >>> schedule = one_cycle(0.1, 100)
        >>> [round(schedule(step), 4) for step in (0, 29, 99)]
        [0.004, 0.1, 0.0]

    Source: Smith & Topin, *Super-Convergence: Very Fast Training of Neural Networks Using Large
    Learning Rates*, 2018.
    """
    peak, steps = check.number("peak", peak, low=0.0), check.integer("steps", steps, low=2)
    tiny = np.nextafter(0.0, 1.0)
    rise = check.number("rise", rise, low=tiny, below=1.0)
    first = peak / check.number("start", start, low=tiny)
    last, top = first / check.number("end", end, low=tiny), rise * steps - 1.0

    def schedule(step: int) -> float:
        if step <= top:
            return _eased(first, peak, step / top if top else 1.0)
        return _eased(peak, last, (step - top) / (steps - 1 - top))

    return schedule


def inverse_sigmoid(scale: float) -> Schedule:
    """``scale / (scale + exp(step / scale))``, for scheduled sampling: from almost 1 down to 0.

    Args:
        scale: at least 1; the probability is 1/2 at ``scale * log(scale)``.

    Example:
        >>> forced = inverse_sigmoid(100.0)
        >>> [round(forced(step), 2) for step in (0, 461, 1000)]
        [0.99, 0.5, 0.0]

    Source: Bengio et al., *Scheduled Sampling for Sequence Prediction with Recurrent Neural
    Networks*, 2015.
    """
    scale = check.number("scale", scale, low=1.0)
    # Written as a logistic function, whose exp is bounded.
    return lambda step: 1.0 / (1.0 + math.exp(min(step / scale - math.log(scale), 700.0)))


def _eased(start: float, end: float, part: float) -> float:
    """Half a cosine from ``start`` to ``end``."""
    return end + (start - end) * (1.0 + math.cos(math.pi * min(max(part, 0.0), 1.0))) / 2.0


class Plateau:
    """Lowers a learning rate when a loss no longer falls; called with a loss, it returns the rate.

    A loss counts as better below ``best * (1 - threshold)``. After more than ``patience`` calls
    without a better loss, the rate is multiplied by ``factor``. This is the rule of
    ``torch.optim.lr_scheduler.ReduceLROnPlateau``. NaN is never better.

    Args:
        lr: the initial rate, not negative.
        factor: in [0, 1).
        patience: at least 0.
        threshold: in [0, 1).
        lowest: the rate does not fall below this.

    Example:
        >>> plateau = Plateau(0.1, factor=0.5, patience=1)
        >>> [plateau(loss) for loss in (1.0, 1.0, 1.0)]
        [0.1, 0.1, 0.05]
    """

    def __init__(
        self,
        lr: float,
        *,
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        lowest: float = 0.0,
    ) -> None:
        self.lr = check.number("lr", lr, low=0.0)
        self.factor = check.number("factor", factor, low=0.0, below=1.0)
        self.patience = check.integer("patience", patience, low=0)
        self.threshold = check.number("threshold", threshold, low=0.0, below=1.0)
        self.lowest = check.number("lowest", lowest, low=0.0)
        self.best, self._waited = math.inf, 0

    def __call__(self, loss: float) -> float:
        if loss < self.best * (1.0 - self.threshold):
            self.best, self._waited = float(loss), 0
        else:
            self._waited += 1
        if self._waited > self.patience:
            self.lr, self._waited = max(self.lr * self.factor, min(self.lowest, self.lr)), 0
        return self.lr


class EarlyStopping:
    """Says when a loss has stopped falling, and keeps the arrays of the layers at their best.

    Called with a loss, it returns whether the last ``patience`` calls were no better than the best
    one. ``restore`` then writes the arrays of the best call back: parameters, and other arrays that
    layers save, such as the statistics of ``BatchNorm``. NaN is never better.

    Args:
        layers: one layer or several.
        patience: at least 1.
        least: by how much a better loss must be below the best, not negative.

    Example:
        >>> layer = Dense(3, 1)
        >>> stop = EarlyStopping(layer, patience=2)
        >>> [stop(loss) for loss in (1.0, 0.5, 0.6, 0.7)]
        [False, False, False, True]
        >>> stop.restore(), stop.best
        (None, 0.5)
    """

    def __init__(self, layers: Layers, patience: int, *, least: float = 0.0) -> None:
        self.layers = as_layers(layers)
        self.patience = check.integer("patience", patience)
        self.least = check.number("least", least, low=0.0)
        self.best, self._waited = math.inf, 0
        self._kept: list[dict[str, Array]] = []

    def __call__(self, loss: float) -> bool:
        if loss < self.best - self.least:
            self._kept = [{n: a.copy() for n, a in named.items()} for named in self._arrays()]
            self.best, self._waited = float(loss), 0
        else:
            self._waited += 1
        return self._waited >= self.patience

    def restore(self) -> None:
        """Writes the arrays of the best call back.

        Raises:
            RuntimeError: before a first call with a finite loss.
        """
        if not self._kept:
            raise RuntimeError("EarlyStopping.restore() needs a call with a finite loss before it.")
        for named, kept in zip(self._arrays(), self._kept, strict=True):
            with writing(named):
                for name, array in named.items():
                    array[...] = kept[name]

    def _arrays(self) -> list[Mapping[str, Array]]:
        return [l.arrays if isinstance(l, Layer) else l.parameters for l in self.layers]
