"""The functions that layers ask of Keras's backend. Only the backend in use is imported."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import keras
from keras.src.backend import Variable as Variable  # 3.3: keras.Variable has no layer's

_HOMES = {"tensorflow": "tensorflow.fused", "torch": "torch", "jax": "jax"}

# The framework of the backend's tensors, which ``lang.namespaces`` must know.
match keras.backend.backend():
    case "tensorflow":
        import anycell.keras.tensorflow.framework
    case "torch":
        import anycell.torch.framework
    case "jax":
        import anycell.jax.framework  # noqa: F401


@functools.cache
def home() -> Any:
    """This package's module for Keras's backend, with the functions that layers ask for:

    run(layer, arrays)          runs a layer on the kernels
    composite(layer, arrays)    runs it step by step, in the backend's operations
    refusal(gpu, x)             why nothing outside the graph can be called now, for x if there is
                                one, on a GPU or not; or None
    unfit(layer)                why no kernels run a layer on a GPU, or None
    on_gpu(x), gpu_visible()    whether x is on a GPU; whether a layer would be placed on one here
    recorded(tensors)           whether a gradient may be wanted for the results of an operation on
                                them, or the backend must see the operation
    compiled()                  whether XLA compiles what is being traced, without the operations of
                                cuDNN's layers
    obstacle()                  why a layer loses its kernels where the backend compiles the whole
                                program, or None

    Where there is neither a kernel nor a GPU, nobody asks for some of them.
    """
    return import_module(f"anycell.keras.{_HOMES.get(keras.backend.backend(), 'others')}")


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
