"""A layer on Keras's torch backend: the operations of ``anycell.torch``."""

from __future__ import annotations

import torch

from anycell.keras.call import KERNELS, Arrays, Result, number
from anycell.plan import Call
from anycell.torch import functional


def run(call: Call, arrays: Arrays) -> Result:
    """Runs a layer as ``anycell.torch`` does, on the fused kernels or step by step."""
    tensors = dict(arrays)
    for theirs, ours in KERNELS.items():
        if theirs in tensors:
            tensors[ours] = tensors.pop(theirs).T
    seed = tensors.pop("seed", None)
    for name, tensor in tensors.items():
        if name.startswith("state "):
            tensors[name] = tensor.unsqueeze(0)
        elif name in ("mask", "resets", "recurrent_mask"):
            tensors[name] = tensor.contiguous()
    if seed is not None:
        call = call._replace(options=call.options._replace(seed=number(seed)))
    with torch.autocast(tensors["x"].device.type, enabled=False):
        outputs, final, _ = functional.layer(call, tensors)
    return outputs if call.outputs else None, tuple(state[0] for state in final)
