"""The primitive: any cell over a sequence of projected inputs, on NumPy arrays.

It is what lies between the two large matmuls of a layer, the input projection before and the weight
gradients after. Layers with weights, gradients and training are in ``anycell.numpy``,
``anycell.torch`` and the other frontends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from anycell import layer
from anycell.engines import cpu, reference
from anycell.lang.cell import RECURRENT, Cell
from anycell.lang.ops import is_reduction
from anycell.numpy import check
from anycell.numpy.host import NumpyHost
from anycell.plan import DTYPES, Plan, plan

Array = npt.NDArray[np.floating]
Flags = npt.NDArray[np.bool_]
Shape = tuple[int, ...]


def recurrence(
    cell: Cell,
    gates_x: Array,
    weights: Mapping[str, Array | None],
    state: Sequence[Array | None] | Array | None = None,
    params: Mapping[str, Array] | None = None,
    *,
    mask: npt.ArrayLike | None = None,
    lengths: npt.ArrayLike | None = None,
    resets: npt.ArrayLike | None = None,
    reset_state: Sequence[Array | None] | Array | None = None,
    masked_output: str = "zero",
    recurrent_mask: Array | None = None,
    static: Array | None = None,
    reverse: bool = False,
    training: bool = False,
    seed: int | None = None,
    engine: str | None = None,
) -> tuple[Array, tuple[Array, ...]]:
    """Runs ``cell`` over a sequence whose input projection is done.

    All arrays have one dtype, float32 or float64, and any strides.

    Args:
        cell: a cell of G gates; its hidden size H follows from ``gates_x``.
        gates_x: ``[T, B, G*H]``, the input projection of each gate, in the declared order.
        weights: of the matmuls inside a step, by name: ``"hh"`` ``[G*H, H]`` for all declared gates,
            others ``[out, in]`` or ``[heads, out/heads, in/heads]``; biases as ``"hh_bias"``.
        state: ``[B, size]`` per state (for one state one array will do); None, for all or for one of
            them, starts from the declared initial value.
        params: the cell's per-unit parameters by name, ``[H]``.
        mask: ``[T, B]``, False where a step does not exist: it holds the state, and what lies
            beneath never matters.
        lengths: ``[B]``, the number of steps of each row: a mask in short. With ``mask``, a step
            exists where both say so.
        resets: ``[T, B]``, True where the state is reset before the step.
        reset_state: what resets restore, ``[size]`` or ``[B, size]`` per state; None restores the
            declared initial value.
        masked_output: "zero", or "repeat" for the held state.
        recurrent_mask: ``[B, H]``, or ``[G, B, H]`` for one per gate; multiplies the hidden state
            that enters the recurrent matmul.
        static: ``[B, H]``, the input given once per sequence, for a cell that declares it.
        reverse: from the last step to the first; a row with a length starts at its own end.
        training: random masks (``keep``) are drawn from ``seed``, instead of their mean taken.
        seed: 0 to 2**64 - 1; the same numbers on every engine.
        engine: "cpu" or "reference"; None takes what the plan says, see ``anycell.explain``.

    Returns:
        the outputs ``[T, B, size of the first state]`` and a tuple of the final states.

    Raises:
        ValueError, TypeError: naming the argument, what was given and what was expected.

    Example:
        >>> from anycell.cells import GRU
        >>> rng = np.random.default_rng(0)
        >>> gates_x, weights = rng.normal(size=(10, 2, 3 * 8)), {"hh": rng.normal(size=(3 * 8, 8))}
        >>> outputs, (h,) = recurrence(GRU, gates_x, weights, lengths=[10, 4])
        >>> outputs.shape, np.array_equal(h[1], outputs[3, 1])
        ((10, 2, 8), True)
    """
    steps, rows, hidden = _problem(cell, gates_x)
    dtype = gates_x.dtype
    given = _weights(cell, weights)
    states = _per_state(cell, "state", state)
    restored = _per_state(cell, "reset_state", reset_state)
    size = reference.sizes(cell, hidden, given, states)
    _check_groups(cell, size)

    for name, shape in _weight_shapes(cell, size).items():
        _check(f"weights[{name!r}]", given.get(name), dtype, shape)
    for declared, value, reset in zip(cell.states, states, restored, strict=True):
        units = size[declared.size]
        _check(f"state {declared.name!r}", value, dtype, (rows, units))
        _check(f"reset_state {declared.name!r}", reset, dtype, (units,), (rows, units))
    _check_names("params", params or {}, cell.param_names)
    for name, value in (params or {}).items():
        _check(f"params[{name!r}]", value, dtype, (hidden,))
    if (static is None) != (cell.static is None):
        raise ValueError(
            f"static: given {'none' if static is None else 'an array'}, "
            f"expected {cell.static or 'none'}, as cell {cell.name} declares."
        )
    _check("static", static, dtype, (rows, hidden))
    operand = size[cell.states[0].size]
    per_gate = (len(cell.gates), rows, operand)
    _check("recurrent_mask", recurrent_mask, dtype, (rows, operand), per_gate)

    call = reference.Recurrence(
        cell,
        gates_x,
        given,
        states,
        params or {},
        static=static,
        mask=_mask(mask, lengths, steps, rows),
        resets=None if resets is None else check.flags("resets", resets, (steps, rows)),
        reset_state=restored,
        masked_output=_choice("masked_output", masked_output, "zero", "repeat"),
        recurrent_mask=recurrent_mask,
        reverse=_choice("reverse", reverse, False, True),
        training=_choice("training", training, False, True),
        seed=None if seed is None else check.integer("seed", seed, 0, 1 << 64),
    )
    chosen = plan(cell, hidden, dtype.name, engine)
    if recurrent_mask is not None and engine == "cpu":
        raise ValueError("engine='cpu' takes no recurrent_mask as yet; expected engine=None.")
    fused = chosen.engine == "cpu" and recurrent_mask is None
    return _fused(chosen, call) if fused else call.forward()


def _fused(plan: Plan, call: reference.Recurrence) -> tuple[Array, tuple[Array, ...]]:
    """The same call on the CPU engine."""
    dense = np.ascontiguousarray
    initial = [dense(value) for value in call._initial(call.state)]
    weights = layer.Weights(
        ih=None,
        hh=call.weights.get(RECURRENT),
        bias_hh=call.weights.get(f"{RECURRENT}_bias"),
        params=[dense(call.params[name]) for name in plan.cell.param_names],
        initial=initial,
        reset=[dense(value) for value in call._initial(call.reset_state)],
        static=None if call.static is None else dense(call.static),
        reverse=call.reverse,
    )
