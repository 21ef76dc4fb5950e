"""Adam, and clipping of gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from anycell.layer.checks import number, refuse
from anycell.numpy.streaming import writing
from anycell.plan.dtype import dtypes

Array = npt.NDArray[np.floating]


class Trainable(Protocol):
    """Anything with parameters and their gradients by the same names: layers, or your own class."""

    @property
    def parameters(self) -> Mapping[str, Array]: ...

    @property
    def grads(self) -> Mapping[str, Array]: ...


Layers = Trainable | Iterable[Trainable]


def as_layers(layers: Layers) -> list[Trainable]:
    """Returns one layer, or several, as a list."""
    several = isinstance(layers, Iterable) and not isinstance(layers, np.ndarray)
    chosen: list[Any] = list(layers) if several else [layers]  # type: ignore[arg-type]
    if not chosen:
        raise ValueError("layers: given none, expected at least one layer.")
    for layer in chosen:
        arrays = getattr(layer, "parameters", None), getattr(layer, "grads", None)
        if not all(isinstance(named, Mapping) for named in arrays):
            expected = "a layer, or several, whose `parameters` and `grads` are arrays by name"
            refuse("layers", repr(layer), expected, "Pass one, or a list of them.", TypeError)
    parameters = [{id(array) for array in layer.parameters.values()} for layer in chosen]
    # A Feedback has the parameters of two layers.
    twice = len(set().union(*parameters)) < sum(map(len, parameters))
    if twice or len({id(layer) for layer in chosen}) < len(chosen):
        raise ValueError("layers: given one layer twice, expected each once.")
    return chosen


def _pairs(layers: list[Trainable]) -> Iterator[tuple[Array, Array]]:
    """Yields every parameter with its gradient."""
    for layer in layers:
        for name, parameter in layer.parameters.items():
            if name not in layer.grads:
                raise RuntimeError(
                    f"{type(layer).__name__} has no gradient for {name!r} yet: "
                    "run forward(..., training=True), then backward(...), first."
                )
            grad = layer.grads[name]
            if np.shape(grad) != np.shape(parameter):
                expected = f"{np.shape(parameter)}, the shape of the parameter"
                refuse(f"grads[{name!r}]", f"shape {np.shape(grad)}", expected, "Reshape it.")
            yield _floats(f"parameters[{name!r}]", parameter), _floats(f"grads[{name!r}]", grad)


def _floats(name: str, array: Array) -> Array:
    if getattr(array, "dtype", None) == np.int8:
        hint = "Train the float32 layer, and quantize it afterwards."
        refuse(name, "weights of 8 bits", "floats, which can be trained", hint, TypeError)
    floats = isinstance(array, np.ndarray) and (
        array.dtype.kind == "f" or array.dtype.name in dtypes("cpu")
    )
    if not floats:
        raise TypeError(f"{name}: given {array!r}, expected a NumPy array of floats.")
    return array


def clip_by_value(layers: Layers, limit: float) -> None:
    """Clips every element of the gradients of ``layers`` to ``[-limit, limit]``, in place.

    Args:
        layers: one layer or several, whose ``grads`` are clipped.
        limit: not negative.

    Source: Mikolov, *Statistical Language Models Based on Neural Networks*, 2012.
    """
    number("limit", limit, low=0.0)
    for _, grad in list(_pairs(as_layers(layers))):  # checks all before it clips the first
        np.clip(grad, -limit, limit, out=grad)


def clip_by_global_norm(layers: Layers, max_norm: float) -> float:
    """Scales all gradients of ``layers``, in place, to a joint norm of at most ``max_norm``.

    ``g <- g * min(1, max_norm / (norm + 1e-6))`` with ``norm`` the root of the sum of all squared
    elements of all gradients, as in ``torch.nn.utils.clip_grad_norm_``.

    Args:
        layers: one layer or several, scaled together, which keeps the direction of the step.
        max_norm: not negative.

    Returns:
        The norm before clipping. NaN or infinity mean that the step should not be taken; the
        gradients then do not change.

    Source: Pascanu, Mikolov & Bengio, *On the Difficulty of Training Recurrent Neural Networks*,
    2013.
    """
    number("max_norm", max_norm, low=0.0)
    grads = [grad for _, grad in _pairs(as_layers(layers))]
    # Summed in float64: squares overflow float32 at 1.8e19, which exploding gradients can reach.
    norm = float(np.sqrt(sum(float(np.sum(np.square(g, dtype=np.float64))) for g in grads)))
    scale = max_norm / (norm + 1e-6)
    if np.isfinite(norm) and scale < 1.0:
        for grad in grads:
            grad *= scale
    return norm


class Adam:
    """Adam, with bias correction.

    With the gradient ``g`` of step ``t = 1, 2, ...`` (``weight_decay * w`` added to it):

        m <- beta1 m + (1 - beta1) g              m^ = m / (1 - beta1^t)
        v <- beta2 v + (1 - beta2) g^2            v^ = v / (1 - beta2^t)
        w <- w - lr m^ / (sqrt(v^) + eps)

    This is the arithmetic of ``torch.optim.Adam``. Parameters are updated in place. For 16-bit
    parameters it runs in float32, because 16 bits hold neither ``eps`` nor small squares.

    Args:
        layers: one layer or several.
        lr: step size; an attribute, so that a schedule may set it between steps.
        betas: decay of the two averages, each in ``[0, 1)``.
        eps: not negative.
        weight_decay: not negative; L2 regularisation.

    Raises:
        ValueError: for a number out of its range, or a layer given twice.
        TypeError: for anything that is not a layer.

    Example:
        >>> layer = Dense(3, 1)
        >>> optimizer = Adam(layer, lr=0.01)
        >>> loss, grad = mse(layer.forward(x, training=True), y)
        >>> grad_x = layer.backward(grad)
        >>> optimizer.step()

    Source: Kingma & Ba, *Adam: A Method for Stochastic Optimization*, 2015.
    """

    def __init__(
        self,
        layers: Layers,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.layers = as_layers(layers)
        self.lr = number("lr", lr, low=0.0)
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise TypeError(f"betas: given {betas!r}, expected two numbers.")
        self.betas = tuple(number("betas", beta, low=0.0, below=1.0) for beta in betas)
        self.eps = number("eps", eps, low=0.0)
        self.weight_decay = number("weight_decay", weight_decay, low=0.0)
        self.steps = 0
        self._moments: list[tuple[Array, Array]] = []
        for layer in self.layers:
            for name, p in layer.parameters.items():
                kind = np.result_type(_floats(f"parameters[{name!r}]", p).dtype, np.float32)
                self._moments.append((np.zeros(p.shape, kind), np.zeros(p.shape, kind)))

    def __repr__(self) -> str:
        return f"Adam({self.layers}, lr={self.lr}, steps={self.steps})"

    def step(self) -> None:
        """Takes one step along the gradients of the last ``backward`` of every layer.

        Raises:
            RuntimeError: when a layer has no gradients yet.
            ValueError, TypeError: when a gradient does not fit its parameter.
            MemoryError: when memory runs out. A step that fails changes nothing.
        """
        pairs = list(_pairs(self.layers))
        if [p.shape for p, _ in pairs] != [m.shape for m, _ in self._moments]:
            raise ValueError("layers: parameters were added, removed or reshaped since the start.")
        lr = number("lr", self.lr, low=0.0)
        (beta1, beta2), steps = self.betas, self.steps + 1
        size = lr / (1.0 - beta1**steps)
        root = (1.0 - beta2**steps) ** 0.5
        # Allocates all the memory of the step, even for numbers, before it changes anything.
        values = self.weight_decay, 1.0 - beta1, beta2, 1.0 - beta2, root, self.eps, size
        kinds = {m.dtype for m, _ in self._moments}
        scalars = {kind: [np.array(value, kind) for value in values] for kind in kinds}
        most = max([m.nbytes for m, _ in self._moments], default=0)
        rooms = [np.empty(most, np.uint8) for _ in range(2)]
        with writing(*(layer.parameters for layer in self.layers)):
            self.steps = steps
            for (parameter, grad), (m, v) in zip(pairs, self._moments, strict=True):
                decay, of_grad, kept, of_square, by, eps, rate = scalars[m.dtype]
                a, b = (room[: m.nbytes].view(m.dtype).reshape(m.shape) for room in rooms)
                if self.weight_decay:
                    grad = np.add(np.multiply(parameter, decay, out=b, dtype=m.dtype), grad, out=b)
                m += np.multiply(np.subtract(grad, m, out=a), of_grad, out=a)
                v *= kept
                v += np.multiply(np.square(grad, out=a, dtype=m.dtype), of_square, out=a)
                np.add(np.divide(np.sqrt(v, out=b), by, out=b), eps, out=b)
                parameter -= np.divide(np.multiply(m, rate, out=a), b, out=a)
