"""A layer on Keras's torch backend: the operations of ``anycell.torch``."""

from __future__ import annotations

import torch

from anycell.keras.call import Arrays, Result, lowered
from anycell.plan import Call
from anycell.torch import functional


def run(call: Call, arrays: Arrays) -> Result:
    """Runs a layer as ``anycell.torch`` does, on the fused kernels or step by step."""
    call, tensors = lowered(call, arrays)
    for name in tensors.keys() & {"mask", "resets", "recurrent_mask"}:
        tensors[name] = tensors[name].contiguous()
    with torch.autocast(tensors["x"].device.type, enabled=False):
        outputs, final, _ = functional.layer(call, tensors)
    return outputs if call.outputs else None, tuple(state[0] for state in final)
