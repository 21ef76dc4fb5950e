"""A layer on Keras's torch backend: the operations of ``anycell.torch``."""

from __future__ import annotations

import torch

from anycell.keras.call import Arrays, Result, lowered
from anycell.plan import Layer
from anycell.torch import functional


def run(layer: Layer, arrays: Arrays) -> Result:
    """Runs a layer as ``anycell.torch`` does, on the fused kernels or step by step."""
    layer, tensors = lowered(layer, arrays)
    for name in tensors.keys() & {"mask", "resets", "recurrent_mask"}:
        tensors[name] = tensors[name].contiguous()
    with torch.autocast(tensors["x"].device.type, enabled=False):
        outputs, final, _ = functional.run_layer(layer, tensors)
    return outputs if layer.outputs else None, tuple(state[0] for state in final)
