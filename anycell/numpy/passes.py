"""One layer of one or two directions: the forward pass, and with it the backward: its pullback.

``fused`` runs the compiled kernel, ``composite`` the reference engine step by step, for the cells
that the kernel refuses. Both take and give the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from anycell import layer
from anycell.engines import reference
from anycell.lang.cell import Cell
from anycell.layer import Options
from anycell.numpy.host import NumpyHost
from anycell.plan import Plan

Array = npt.NDArray[np.floating]
Named = dict[str, Array]  # of one direction of one layer: "weight_ih", ..., without the suffix
States = Sequence[Array]  # of one direction: ``[B, size]`` per state


class Cotangents(NamedTuple):
    """What a pullback gives: the gradients of input, weights, initial states and static input."""

    x: Any
    weights: list[Named]
    initial: Sequence[States]
    static: Array | None


Pullback = Callable[[Array, Sequence[States]], Cotangents]
Result = tuple[Array, Sequence[States], Pullback]


def run(
    plan: Plan,
    x: Array,
    weights: Sequence[Named],
    initial: Sequence[States],
    static: Array | None,
    options: Options,
) -> Result:
    """Runs a layer on the engine of its plan.

    Args:
        plan: of the cell.
        x: ``[T, B, I]``, last axis contiguous.
        weights: per direction.
        initial: per direction and state ``[B, size]``.
        static: ``[B, H]``, for a cell that declares it.
        options: masks and resets, uint8 ``[T, B]``, and what else the directions share.

    Returns:
        outputs ``[T, B, D * size]``, the final states as ``initial``, and the pullback: from the
        gradients of both to ``Cotangents``. It may be called again, and is of use only in training.
    """
    engine = fused if plan.engine == "cpu" else composite
    return engine(plan, x, weights, initial, static, options)


def fused(
    plan: Plan,
    x: Array,
    weights: Sequence[Named],
    initial: Sequence[States],
    static: Array | None,
    options: Options,
) -> Result:
    """``run`` on the compiled kernel."""
    host, params = NumpyHost(plan.dtype), plan.cell.param_names
    both = directions(plan.cell, weights, initial, static)
    output, finals, saved = layer.forward(host, plan, x, both, options, keep=options.training)

    def pullback(d_output: Array, d_finals: Sequence[States]) -> Cotangents:
        assert saved is not None, "only in training"
        dx, grads = layer.backward(host, plan, saved, d_output, d_finals)
        named = []
        for w, grad in zip(weights, grads, strict=True):
            every: dict[str, Any] = {
                "weight_ih": grad.ih,
                "weight_hh": grad.hh,
                "bias_ih": grad.bias_ih,
                "bias_hh": grad.bias_hh,
                **dict(zip(params, grad.params, strict=True)),
                **{_name(key): value for key, value in grad.linears.items()},
            }
            named.append({name: every[name] for name in w})
        return Cotangents(
            dx, named, [grad.initial for grad in grads], _total(grad.static for grad in grads)
        )

    return output, [[s[d] for s in finals] for d in range(len(weights))], pullback


def directions(
    cell: Cell,
    weights: Sequence[Named],
    initial: Sequence[States],
    static: Array | None = None,
) -> list[layer.Weights]:
    """The weights of each direction as the engine takes them."""
    return [
        layer.Weights(
            ih=w["weight_ih"],
            hh=w.get("weight_hh"),
            bias_ih=w.get("bias_ih"),
            bias_hh=w.get("bias_hh"),
            params=[w[name] for name in cell.param_names],
            initial=states,
            static=static,
            linears=_matmuls(cell, w),
            reverse=d == 1,
        )
        for d, (w, states) in enumerate(zip(weights, initial, strict=True))
    ]


def composite(
    plan: Plan,
    x: Array,
    weights: Sequence[Named],
    initial: Sequence[States],
    static: Array | None,
    options: Options,
) -> Result:
    """``run`` on the reference engine; its pullback computes the forward pass once more."""
    cell = plan.cell
    if options.mask is not None:
        x = NumpyHost(plan.dtype).masked(x, options.mask)
    calls: list[dict[str, Any]] = []
    for d, (w, states) in enumerate(zip(weights, initial, strict=True)):
        gates = x @ w["weight_ih"].T
        calls.append(
            {
                "cell": cell,
                "gates_x": gates + w["bias_ih"] if "bias_ih" in w else gates,
                "weights": _matmuls(cell, w),
                "state": states,
                "params": {name: w[name] for name in cell.param_names},
                "static": static,
                "mask": None if options.mask is None else options.mask.astype(bool),
                "resets": None if options.resets is None else options.resets.astype(bool),
                "masked_output": "repeat" if options.repeat else "zero",
                "reverse": d == 1,
                "training": options.training,
                "seed": options.seed,
                "stream": 2 * options.stream + d,
            }
        )
    outputs, finals = zip(*(reference.run(**call) for call in calls), strict=True)

    def pullback(d_output: Array, d_finals: Sequence[States]) -> Cotangents:
        parts = np.split(d_output, len(calls), axis=-1)
        grads = [
            reference.backward(**call, d_outputs=part, d_final=d_final)
            for call, part, d_final in zip(calls, parts, d_finals, strict=True)
        ]
        dx, named = np.zeros_like(x), []
        for w, grad in zip(weights, grads, strict=True):
            dx += grad.gates_x @ w["weight_ih"]
            flat = grad.gates_x.reshape(-1, grad.gates_x.shape[-1])
            every = {"weight_ih": flat.T @ x.reshape(-1, x.shape[-1]), "bias_ih": flat.sum(0)}
            for key, value in grad.weights.items():
                every[_name(key)] = value
            every |= grad.params
            named.append({name: every[name].reshape(array.shape) for name, array in w.items()})
        return Cotangents(
            dx, named, [grad.state for grad in grads], _total(grad.static for grad in grads)
        )

    return np.concatenate(outputs, axis=-1), finals, pullback


def _total(parts: Iterable[Array | None]) -> Array | None:
    """What the directions add to the gradient of what they share."""
    given = [part for part in parts if part is not None]
    return np.sum(given, axis=0) if given else None


def _name(key: str) -> str:
    """The reference engine's ``hh`` and ``hh_bias`` are a layer's ``weight_hh`` and ``bias_hh``."""
    return f"bias_{key.removesuffix('_bias')}" if key.endswith("_bias") else f"weight_{key}"


def _matmuls(cell: Cell, w: Named) -> dict[str, Array | None]:
    """The weights of all matmuls inside a step, as the reference engine names them."""
    found: dict[str, Array | None] = {}
    for l in cell.linears:
        found[l.name] = w[f"weight_{l.name}"]
        found[f"{l.name}_bias"] = w.get(f"bias_{l.name}")
    return found
