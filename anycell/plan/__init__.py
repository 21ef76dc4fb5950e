"""The plan: how one cell runs. Engines read plans and never change them.

``docs/internals.md`` says what each file does.
"""

from anycell.plan.arrays import Array, arrays, multiplies_input, recurrent_masks
from anycell.plan.call import (
    ARRAYS,
    CODES,
    OF_CALL,
    OPTIONS,
    REALS,
    ArrayArguments,
    CallOptions,
    Engine,
    FunctionOptions,
    GradientOptions,
    Options,
    RecurrenceArguments,
    Returning,
    takes,
)
from anycell.plan.cut import FREE, gradient_roots, in_sequence, root_sizes
from anycell.plan.dtype import DTYPES, Dtype, scales_of
from anycell.plan.layer import Layer, Sizes
from anycell.plan.passes import HEAVY, MATMULS, passes
from anycell.plan.plan import LINE, Plan, no_kernel_on_gpu, padded, plan

__all__ = [
    "ARRAYS", "CODES", "DTYPES", "FREE", "HEAVY", "LINE", "MATMULS", "OF_CALL", "OPTIONS", "REALS",
    "Array", "ArrayArguments", "CallOptions", "Dtype", "Engine", "FunctionOptions",
    "GradientOptions", "Layer", "Options", "Plan", "RecurrenceArguments", "Returning", "Sizes",
    "arrays", "gradient_roots", "in_sequence", "multiplies_input", "no_kernel_on_gpu", "padded",
    "passes", "plan", "recurrent_masks", "root_sizes", "scales_of", "takes",
]  # fmt: skip
