"""Functions of Keras's backends that layers need, but for the kernels themselves.

Only the backend in use is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import keras

from anycell.keras.call import Tensor
from anycell.keras.rule import asked
from anycell.plan import Layer

# The framework of the backend's tensors, which ``lang.namespaces`` must know.
match keras.backend.backend():
    case "tensorflow":
        import anycell.keras.framework
    case "torch":
        import anycell.torch.framework
    case "jax":
        import anycell.jax.framework  # noqa: F401


def refusal(x: Tensor | None = None, gpu: bool = False) -> str | None:
    """Returns why nothing outside the graph can be called now, for ``x`` if given, on a GPU or not,
    or None.
    """
    name = keras.backend.backend()
    if name == "tensorflow":
        from anycell.keras import tensorflow

        return tensorflow.refusal(gpu_visible() if x is None else gpu)
    if name == "jax":
        from anycell.keras import jax

        return jax.refusal(x)
    return asked()


def unfit(layer: Layer) -> str | None:
    """Why no kernels run a layer on a GPU, or None."""
    name = keras.backend.backend()
    if name == "tensorflow":
        from anycell.keras import tensorflow

        return tensorflow.unfit(layer, True)
    if name in ("torch", "jax"):
        why: str | None = import_module(f"anycell.keras.{name}").unfit(layer)
        return why
    return None


def compiled() -> bool:
    """Whether XLA compiles what is being traced, without the operations of cuDNN's layers."""
    if keras.backend.backend() != "tensorflow":
        return False
    from anycell.keras import tensor_passes

    return tensor_passes.compiled()


def obstacle_of_xla() -> str | None:
    """Why a layer loses its kernels where the backend compiles the whole program, or None."""
    if keras.backend.backend() != "tensorflow":
        return None
    from anycell.keras import tensorflow

    return tensorflow.obstacle()


def on_gpu(x: Tensor) -> bool:
    """Whether ``x`` is on a GPU."""
    name = keras.backend.backend()
    if name == "tensorflow":
        from anycell.keras import tensorflow

        return tensorflow.on_gpu(x)
    if name == "torch":
        return bool(x.device.type != "cpu")
    return gpu_visible()


def gpu_visible() -> bool:
    """Whether the backend would place a layer on a GPU here."""
    name = keras.backend.backend()
    if name == "tensorflow":
        from anycell.keras import tensorflow

        return tensorflow.gpu_visible()
    if name == "torch":
        import torch

        return bool(torch.cuda.is_available())
    if name == "jax":
        import jax

        return bool(jax.default_backend() != "cpu")
    return False


def recorded(tensors: Sequence[Any]) -> bool:
    """Whether a gradient may be wanted for the results of an operation on these tensors, or torch
    must see the operation.
    """
    if keras.backend.backend() == "tensorflow":
        from anycell.keras import tensorflow

        return tensorflow.recorded()
    import torch

    from anycell.torch.observers import observed

    wanted = torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors)
    return wanted or observed()


def uncompiled(function: Any) -> Any:
    """Keeps ``torch.compile`` out, which would spend minutes on cell, plan and printer."""
    if keras.backend.backend() != "torch":
        return function
    from torch._compile import _disable_dynamo  # torch.compiler.disable imports all of Dynamo

    return _disable_dynamo(function)


def as_written(function: Any) -> Any:
    """Keeps TensorFlow from rewriting the Python of a function that a user's graph calls."""
    if keras.backend.backend() != "tensorflow":
        return function
    import tensorflow as tf

    return tf.autograph.experimental.do_not_convert(function)


def trace_anew(layer: keras.layers.Layer) -> None:
    """Forgets the functions that a compiled model has traced, which call the old layers."""
    if not isinstance(layer, keras.Model):
        return
    layer.train_function = layer.test_function = layer.predict_function = None
    if (
        layer.compiled
        and layer.jit_compile
        and not all(inner.supports_jit for inner in layer._flatten_layers())
    ):
        layer.jit_compile = False
