"""Types of the arguments of layers, for type checkers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anycell.lang.declare import SizeArguments


class LayerArguments(SizeArguments, total=False):
    """The arguments of ``RNNCell`` that its own signature does not name: sizes, and the arguments
    of every layer of Keras.
    """

    name: str | None
    dtype: Any
    trainable: bool
    autocast: bool
    activity_regularizer: Any
    input_shape: Sequence[int | None]
    input_dim: int


class CellArguments(LayerArguments, total=False):
    """The arguments of ``RNNCell`` by name."""

    use_bias: bool
    kernel_initializer: Any
    recurrent_initializer: Any
    bias_initializer: Any
    param_initializer: Any
    unit_forget_bias: bool
    kernel_regularizer: Any
    recurrent_regularizer: Any
    bias_regularizer: Any
    param_regularizer: Any
    kernel_constraint: Any
    recurrent_constraint: Any
    bias_constraint: Any
    param_constraint: Any
    dropout: float
    recurrent_dropout: float
    seed: int | None


class RNNArguments(CellArguments, total=False):
    """The arguments of ``RNN`` by name."""

    return_sequences: bool
    return_state: bool
    go_backwards: bool
    stateful: bool
    unroll: bool
    zero_output_for_mask: bool
