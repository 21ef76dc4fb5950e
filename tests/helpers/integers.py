"""Problems with weights of 8 bits, and their right results."""

from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
from problems import Arrays, Problem, by_reference, layer_options, results, to_layer

from anycell import layer
from anycell.engines import reference
from anycell.layer.rounding import rounded
from anycell.numpy.framework import Numpy
from anycell.plan import plan, scales_of

Array = npt.NDArray[Any]


def round_rows(rows: Array) -> Array:
    """Rounds rows as the kernels do: to -127 ... 127 times a scale, in float32 arithmetic."""
    with np.errstate(all="ignore"):
        rows = rows.astype(np.float32)
        most = np.abs(rows).max(-1, keepdims=True, initial=0.0)
        integers = np.rint(rows * (np.float32(127) / most)).astype(np.float64)
        scales = (most * np.float32(1 / 127)).astype(np.float64)
        integers[~np.isfinite(integers)] = 0.0  # rows of almost 0
        return np.where(np.isfinite(most), integers * scales, np.nan)


def dequantized(weight: Array) -> Array:
    """Returns the values that the integers of a weight represent."""
    integers, scales = rounded(weight.astype(np.float32))
    return integers * scales.astype(np.float64)[..., None]


def by_rounding(problem: Problem, projected: bool = False) -> Arrays:
    """Solves a problem by the reference engine in float64, with all operands of matmuls rounded."""
    operand = reference.Recurrence._operand

    def rounding(*args: Any) -> Array:
        return round_rows(operand(*args))

    changed = {n: dequantized(w) for n, w in problem.learned.items() if w.ndim > 1}
    if projected:
        x = problem["x"]
        changed["x"] = round_rows(x) @ dequantized(np.eye(x.shape[2])).T
    with mock.patch.object(reference.Recurrence, "_operand", rounding):
        solution = by_reference(problem.but(changed))
    return {name: value for name, value in solution.items() if not name.startswith("d ")}


def by_integers(
    problem: Problem, threads: int = 1, projected: bool = False, host: Numpy | None = None
) -> Arrays:
    """Runs the forward pass by the kernels, with the arguments of ``by_cpu``."""
    problem = problem.astype("float32")
    arrays, how = quantized(to_layer(problem, projected)), layer_options(problem, threads)
    runs = layer.stepped(problem.cell, arrays.get("recurrent_mask"))
    chosen = plan(runs, problem.sizes["H"], "int8", "cpu", problem.sizes)
    if host is not None:
        arrays = {name: host.copy(array) for name, array in arrays.items()}  # type: ignore[attr-defined]
    output, finals, _ = layer.forward(host or Numpy.of("int8"), chosen, arrays, how, keep=False)
    return results(problem, output, finals)


def quantized(arrays: Arrays) -> Arrays:
    """Returns the arrays of a layer with its weights as integers and scales."""
    integers = dict(arrays)
    for name, array in arrays.items():
        if name.startswith("weight_"):
            integers[name], integers[scales_of(name)] = rounded(array)
    return integers
