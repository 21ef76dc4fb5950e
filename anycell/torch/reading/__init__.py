"""Steps that users have written, run over time; the files in the order of a call.

- ``stepwise``: the tensors of a call, and the Python loop that runs steps that cannot be read.
- ``surroundings``: tensors and modules that the step reads, and all else that decides what it does.
- ``replayed``: a call like an earlier one, as one native operator; any other goes on below.
- ``proven``: reads the step, and compares the reading with it before it is used. ``record`` has
  its operations and computes those that need no state; ``read`` has the table for all others.
- ``planned``: the step that was read, and how a call of it runs around its kernel.
- ``tape``: what is done around the kernel, recorded and printed as two functions.
"""
