"""A layer on Keras's torch backend: the operations of ``anycell.torch``."""

from __future__ import annotations

import torch

from anycell.keras.call import Call, Inputs, Result, number
from anycell.torch import composite as steps
from anycell.torch import functional


def run(call: Call, inputs: Inputs) -> Result:
    """Runs a layer as ``anycell.torch`` does, on the fused kernels or step by step."""
    x, mask, resets = inputs.x, inputs.mask, inputs.resets
    if call.reverse:  # there, only the second of two directions runs backwards
        x, mask, resets = (t if t is None else t.flip(0) for t in (x, mask, resets))
    hh, linears, dropped = inputs.recurrent_kernel, dict(inputs.linears), inputs.recurrent_mask
    weights = steps.Weights(
        None if inputs.kernel is None else inputs.kernel.T,
        None if hh is None else hh.T,
        inputs.bias,
        inputs.recurrent_bias,
        inputs.params,
        tuple([(name, linears.get(name)) for name in steps.linear_names(call.cell)]),
    )
    options = steps.Options(
        mask=None if mask is None else mask.contiguous(),
        resets=None if resets is None else resets.contiguous(),
        masked_output="repeat" if call.repeat else "zero",
        training=call.training,
        seed=0 if inputs.seed is None else number(inputs.seed),
        recurrent_mask=None if dropped is None else dropped.contiguous(),
    )
    initial = tuple(state.unsqueeze(0) for state in inputs.initial)
    given = steps.Inputs(x, inputs.static, initial, None, [weights])
    with torch.autocast(x.device.type, enabled=False):
        own = steps.Call(call.cell, call.hidden_size, options, sizes=call.sizes)
        outputs, final = functional.layer(own, given)
    if not call.sequences:
        return None, tuple(state[0] for state in final)
    return outputs.flip(0) if call.reverse else outputs, tuple(state[0] for state in final)
