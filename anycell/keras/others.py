"""Keras's backends that cannot call the kernels, see ``backends.home``."""

from __future__ import annotations

import keras

from anycell.keras.call import Tensor
from anycell.keras.composite import composite as composite
from anycell.keras.rule import asked


def refusal(gpu: bool, x: Tensor | None = None) -> str:
    """Why the kernels cannot be called."""
    name = keras.backend.backend()
    return asked() or f"no way to call the kernels from Keras's backend {name!r}"


def on_gpu(x: Tensor) -> bool:
    """False: layers run as the backend places them."""
    return False


def gpu_visible() -> bool:
    """False: layers run as the backend places them."""
    return False


def obstacle() -> None:
    """None: nothing is lost where the whole program is compiled."""
    return None
