"""Runs one layer in one or two directions; also returns its backward pass, the pullback.

``fused`` runs the compiled kernel. ``composite`` runs the reference engine step by step, for cells
that have no kernel. Both take arrays by the names of ``anycell.layer.signature``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from anycell.layer import ENDS, backward, forward, stepped, steps
from anycell.layer.sequences import keeping, sequences
from anycell.layer.signature import state_names
from anycell.numpy.framework import Numpy
from anycell.plan import Layer
from anycell.plan import plan as make_plan

Array = npt.NDArray[np.floating]
Named = Mapping[str, Any]
States = Sequence[Array]  # ``[D, B, size]`` per state
# Maps the gradients of the output, of the final states and, by name, of the sequences of further
# states to the gradients of the arrays, by name.
Pullback = Callable[[Array, States, Named], dict[str, Array]]
Result = tuple[Array, States, Sequence[Array], Pullback]


def run(layer: Layer, arrays: Named, keep: bool = True) -> Result:
    """Runs a layer on the engine of its plan.

    Args:
        layer: with its plan.
        arrays: by name.
        keep: whether the pullback is wanted, in training.

    Returns:
        outputs ``[T, B, D * size]``, the final states ``[D, B, size]``, the wanted sequences, laid
        out as the outputs, and the pullback. The pullback may be called repeatedly, but only in
        training.
    """
    if layer.plan.engine == "cpu":
        return fused(layer, arrays, keep)
    return composite(layer, arrays, keep)


def fused(layer: Layer, arrays: Named, keep: bool = True) -> Result:
    """Runs a layer with the compiled kernel; see ``run``."""
    plan, options, wanted = layer.plan, layer.options, layer.sequences
    mask = arrays.get("recurrent_mask")
    if mask is not None:
        cell = stepped(plan.cell, mask)
        plan = make_plan(cell, plan.hidden_size, plan.dtype, "cpu", plan.sizes)
    if wanted:  # the kernel keeps them like values for the backward pass
        plan, options = keeping(plan, wanted), options._replace(checkpoint=None)
    host, keep = Numpy.of(plan.dtype), (keep and options.training) or bool(wanted)
    output, final, kept = forward(host, plan, arrays, options, keep=keep)
    others = sequences(layer, arrays, kept) if kept and wanted else []

    def pullback(d_output: Array, d_final: States, d_states: Named) -> dict[str, Array]:
        assert kept is not None, "only in training"
        arguments = host, plan, arrays, options, kept, d_output, d_final
        return backward(*arguments, d_states=d_states)

    return output, final, others, pullback


def composite(layer: Layer, arrays: Named, keep: bool = True) -> Result:
    """Runs a layer with the reference engine; the pullback computes the forward pass again, so it
    is there whether or not it is wanted.
    """
    cell, ends = layer.cell, ENDS[: len(layer.options.reverse)]
    runs = steps.directions(layer, arrays)
    output, final, others = steps.run(layer, runs)

    def pullback(d_output: Array, d_final: States, d_states: Named) -> dict[str, Array]:
        parts = np.split(d_output, len(runs), axis=-1)
        further = {name: np.split(d, len(runs), axis=-1) for name, d in d_states.items()}
        x = steps.unmasked(arrays)
        gradients: dict[str, Array] = {"x": np.zeros_like(x)}
        states = []  # gradients of initial states and of states that resets restore
        for d, (end, run, part) in enumerate(zip(ends, runs, parts, strict=True)):
            arriving = {name: parts_[d] for name, parts_ in further.items()}
            grad = run.backward(part, [s[d] for s in d_final], arriving)
            gradients["x"] += grad.gates_x @ arrays[f"weight_ih{end}"]
            flat = grad.gates_x.reshape(-1, grad.gates_x.shape[-1])
            learned = {"weight_ih": flat.T @ x.reshape(-1, x.shape[-1]), "bias_ih": flat.sum(0)}
            learned |= {**grad.weights, **grad.params}
            gradients |= {name + end: value for name, value in learned.items()}
            states.append((*grad.state, *grad.reset_state))
            if grad.static is not None:
                gradients["static"] = gradients.get("static", 0.0) + grad.static
        kinds = state_names("state", cell) + state_names("reset_state", cell)
        for name, parts_ in zip(kinds, zip(*states, strict=True), strict=True):
            if parts_[0] is not None:
                gradients[name] = np.stack(parts_)
        return gradients

    return output, final, others, pullback
