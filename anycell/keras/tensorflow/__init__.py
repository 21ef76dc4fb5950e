"""Layers of Keras on TensorFlow's tensors; the files in the order of a call.

- ``fused``: one layer as an operation with a gradient, or the reason why it runs step by step.
- ``passes``: a pass of that operation now, or when a graph runs; ``framework``: its arrays.
- ``xla``: a pass in what XLA compiles, and on a card.
- ``primitive``: ``recurrence`` on tensors of the user's.
- ``read``: the table that reads users' steps; ``graph``: a step, traced and run on other numbers;
  ``steps``: the step that was read, and its runs over a sequence.
"""
