"""Layers of tensors, run by operators of PyTorch; the files in the order of a call.

- ``warm``: a call like an earlier one, as one native operator; any other call goes on below.
- ``functional``: the layer as a function, which picks the engine and says why.
- ``ops``: for tracers, ``torch.compile``, ``torch.export`` and modes, the operators
  ``anycell::forward``, ``run`` and ``backward``; ``derivatives``: these under autograd and
  ``torch.func``.
- ``fused``: else an ``autograd.Function`` around both passes; ``passes``: a pass as an earlier one.
- ``native``: ``anycell::play``, the operator that runs what ``warm`` and ``passes`` have learnt.
- ``composite``: where there is no kernel, operations of torch; ``nodes``: those of exports to ONNX.
"""
