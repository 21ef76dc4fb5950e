"""The plan: how one cell runs. An engine reads a plan, and does not change one.

plan.py      the plan of a cell: which engine and why, what is kept
cut.py       what is saved for the backward pass, what is computed again: a minimum cut
arrays.py    the arrays of a kernel, a row each
call.py      a call besides its arrays, and its options, a row each
passes.py    the passes over a row that reductions and matmuls inside the step need
dtype.py     the dtypes, a row each
"""

from anycell.plan.arrays import Array, arrays, multiplies_input
from anycell.plan.call import (
    CODES,
    OF_CALL,
    OPTIONS,
    Call,
    CallOptions,
    Engine,
    FunctionOptions,
    Options,
    Sizes,
    takes,
)
from anycell.plan.cut import FREE, gradient_roots
from anycell.plan.dtype import DTYPES, Dtype, Number, scales_of
from anycell.plan.passes import HEAVY, MATMULS, Pass, passes
from anycell.plan.plan import LINE, Plan, padded, plan

__all__ = [
    "CODES",
    "DTYPES",
    "FREE",
    "HEAVY",
    "LINE",
    "MATMULS",
    "OF_CALL",
    "OPTIONS",
    "Array",
    "Call",
    "CallOptions",
    "Dtype",
    "Engine",
    "FunctionOptions",
    "Number",
    "Options",
    "Pass",
    "Plan",
    "Sizes",
    "arrays",
    "gradient_roots",
    "multiplies_input",
    "padded",
    "passes",
    "plan",
    "scales_of",
    "takes",
]
