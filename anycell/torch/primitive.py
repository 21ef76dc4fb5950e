"""``recurrence``: one direction of one layer of any cell, on tensors that the user owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from anycell.engines import reference
from anycell.lang.cell import Cell
from anycell.layer import Options, check_checkpoint, shapes
from anycell.layer.checks import check_cell, describe
from anycell.torch import ops
from anycell.torch.arguments import (
    check_masked_output,
    check_recurrent_mask,
    check_return_states,
    check_static,
    check_tensor,
)
from anycell.torch.composite import Call
from anycell.torch.functional import compiled, exporting
from anycell.torch.packed import parts
from anycell.torch.recurrent import (
    Lengths,
    besides_output,
    by_name,
    draw_seed,
    sequence,
    state_names,
)

Given = Tensor | None
_ENGINES = (None, "cpu", "gpu", "reference")


def recurrence(
    cell: Cell,
    x: Tensor | PackedSequence | None,
    weights: Mapping[str, Given],
    state: Tensor | Sequence[Given] | None = None,
    params: Mapping[str, Given] | None = None,
    *,
    gates: Tensor | PackedSequence | None = None,
    mask: Tensor | None = None,
    lengths: Lengths | None = None,
    resets: Tensor | PackedSequence | None = None,
    reset_state: Tensor | Sequence[Given] | None = None,
    masked_output: str = "zero",
    recurrent_mask: Tensor | None = None,
    static: Tensor | None = None,
    reverse: bool = False,
    training: bool = False,
    seed: int | None = None,
    checkpoint: str | int | None = None,
    return_states: bool | str | Sequence[str] | None = None,
    engine: str | None = None,
) -> tuple[Any, ...]:
    r"""Runs ``cell`` over a sequence: one direction of one layer, whose tensors are the user's.

    Differentiable in every float tensor that it is given, twice too. What ``anycell.recurrence`` is
    on NumPy's arrays; ``RNN(cell, ...)`` is a module around it, with layers and directions.

    Args:
        cell: a cell of G gates. Its hidden size H, and its other sizes, follow from the tensors.
        x: ``[T, B, I]``, or a ``PackedSequence`` of rows of I. Where ``weights`` have no
            ``weight_ih``, it is projected already: the same as ``gates``.
        weights: what the layer learns, by public names (``cell.learned``): ``weight_ih``
            ``[G*H, I]`` and ``weight_hh`` ``[G*H, size of the first state]``, with rows in the
            cell's order of gates; optionally ``bias_ih`` and ``bias_hh`` ``[G*H]``;
            ``weight_<name>`` and ``bias_<name>`` of each further matmul, ``[out, in]`` or
            ``[heads, out/heads, in/heads]``; each parameter of the cell, ``[H]``. None means that
            there is none.
        state: ``[B, size]`` per state, or the tensor itself for one state; None, for all or for one
            of them, begins with the declared value.
        params: the cell's parameters, where they are kept apart from the weights.
        gates: ``[T, B, G*H]`` or packed, the input's projection onto each gate, in the place of x:
            ``recurrence(cell, None, weights, gates=gates)``. ``bias_ih`` is still added, if given.
        mask: bool ``[T, B]``, False where a step does nothing: the states are held, and what lies
            there has no influence, not even NaN.
        lengths: integers ``[B]``, how many steps of each row count.
        resets: ``[T, B]``, or packed as x, True where the states before the step are replaced:
            bool, or 0 and 1 of any real dtype. Other values are an error on the CPU; elsewhere, and
            in a trace, where nobody looks, all but 0 are resets.
        reset_state: what resets restore, ``[size]`` or ``[B, size]`` per state, as ``state``.
        masked_output: "zero", or "repeat" for the held state.
        recurrent_mask: ``[B, size of the first state]``, or ``[G, B, size]`` for one per gate;
            multiplies the first state on its way into the recurrent matmul.
        static: ``[B, H]``, the input per sequence of a cell that declares one.
        reverse: from the last step to the first; a row with a length begins at its own end.
        training: random masks (``keep``) are drawn, instead of their mean taken.
        seed: of these, 0 to 2**64 - 1; None draws one from torch's default generator.
        checkpoint: less memory for more time, see ``RNN``.
        return_states: the names of states whose values after every step are wanted, or True for
            all states.
        engine: "cpu", "gpu" or "reference" (step by step); None takes what fits.

    Returns:
        the output ``[T, B, size of the first state]``, packed if x is, and a tuple of the final
        states ``[B, size]``. With ``return_states`` a third: a dictionary of ``[T, B, size]`` by
        names of states, packed if x is; at masked steps as ``masked_output`` says.

    What runs fused is as for ``RNN``: float32 and float64 on the CPU, and on a GPU with Triton also
    16 bits. Step by step go ``torch.func``, traces and second derivatives; on a GPU the
    backward pass of a gradient at a sequence of ``return_states`` other than the output's; and a
    call whose ``recurrent_mask`` wants a gradient. Where there are such sequences, ``checkpoint``
    has no effect.

    Raises:
        TypeError, ValueError: with the argument, what was given, what is expected, and what to do.

    Example:
        >>> weights = {"weight_ih": torch.randn(32, 3), "weight_hh": torch.randn(32, 8)}
        >>> output, (h, c), states = recurrence(
        ...     anycell.cells.LSTM, torch.zeros(5, 2, 3), weights, return_states="c"
        ... )
        >>> output.shape, c.shape, states["c"].shape
        (torch.Size([5, 2, 8]), torch.Size([2, 8]), torch.Size([5, 2, 8]))
    """
    check_cell(cell)
    if not compiled():
        ops.register(cell)
    named = _named(cell, weights, params)
    x, name = _input(cell, x, gates, named)
    if isinstance(x, PackedSequence):
        data, counts = parts(x)
        rows = int(counts[0])
    else:
        data, rows = x, x.shape[1]
    like = named.get("weight_hh", [*named.values(), data][0])
    states = {
        kind: _per_state(cell, kind, given, like)
        for kind, given in (("state", state), ("reset_state", reset_state))
    }
    hidden, sizes = _sizes(cell, data, name, named, states["state"])
    _check_weights(cell, data, name, named, sizes, like)
    arrays = _arrays(cell, states, sizes, rows, like)
    if static is not None or cell.static is not None:
        arrays["static"] = check_static(cell, static, (rows, hidden), like)
    if recurrent_mask is not None:
        check_recurrent_mask(cell, recurrent_mask, sizes, (rows,), like)
        arrays["recurrent_mask"] = recurrent_mask
    for switch, value in (("reverse", reverse), ("training", training)):
        if not isinstance(value, bool):
            raise TypeError(f"{switch}: given {describe(value)}; expected True or False.")
    if engine not in _ENGINES:
        raise ValueError(f"engine: given {engine!r}; expected {', '.join(map(repr, _ENGINES))}.")
    options = Options(
        reverse=(reverse,),
        repeat=check_masked_output(masked_output),
        training=training,
        seed=_seed(cell, training, seed),
        checkpoint=check_checkpoint(checkpoint),
    )
    wanted = check_return_states(cell, return_states)
    others = tuple([(symbol, size) for symbol, size in sizes.items() if symbol != "H"])
    call = Call(cell, hidden, options, others, besides_output(wanted, cell), engine)
    output, final, rest = sequence(
        call, x, arrays, [named], mask=mask, lengths=lengths, resets=resets
    )
    last = tuple([s.squeeze(0) for s in final])
    return (output, last, by_name(wanted, cell, output, rest)) if wanted else (output, last)


# -- arguments -------------------------------------------------------------------------------------


def _named(cell: Cell, weights: Any, params: Any) -> dict[str, Tensor]:
    """What is learned, by public names, without those that are None."""
    named: dict[str, Tensor] = {}
    known = ", ".join(cell.learned)
    for argument, mapping in (("weights", weights), ("params", {} if params is None else params)):
        if not isinstance(mapping, Mapping):
            raise TypeError(
                f"{argument}: given {describe(mapping)}; expected a dictionary of tensors by name: "
                f"{known}."
            )
        for name, value in mapping.items():
            if name not in cell.learned or (name in named and value is not None):
                problem = "twice" if name in cell.learned else "unknown"
                raise ValueError(
                    f"{argument}: given {name!r}, {problem}; expected each name of cell "
                    f"{cell.name} once: {known}. Leave it out."
                )
            if value is not None:
                if not isinstance(value, Tensor):
                    raise TypeError(f"{name}: given {describe(value)}; expected a tensor.")
                named[name] = value
    return named


def _input(
    cell: Cell, x: Any, gates: Any, named: Mapping[str, Tensor]
) -> tuple[Tensor | PackedSequence, str]:
    """The input, and by which name it came: "gates" where it is projected already."""
    if (x is None) is (gates is None):
        count = "neither" if x is None else "both"
        raise TypeError(
            f"x, gates: given {count}; expected one of them. Pass x, or None and gates=... where "
            "the input is projected already."
        )
    if gates is not None and "weight_ih" in named:
        raise ValueError(
            "weights: given weight_ih with gates; expected none, for gates are projected already. "
            "Pass x, or leave weight_ih out."
        )
    name, given = ("x", x) if gates is None else ("gates", gates)
    packed = isinstance(given, PackedSequence)
    data = parts(given)[0] if packed else given
    projected = "weight_ih" not in named
    last = f"{len(cell.gates)} * H" if projected else "input size"
    wanted = (
        f"expected [steps of all rows, {last}]" if packed else f"expected [time, batch, {last}]"
    )
    hint = (
        f"Without weight_ih the input is the projection onto the gates {' '.join(cell.gates)}."
        if projected
        else "Other layouts are those of RNN(cell, ...)."
    )
    if not isinstance(data, Tensor):
        raise TypeError(f"{name}: given {describe(data)}; {wanted}. {hint}")
    width = data.shape[-1] if data.dim() == 3 - packed else 0
    if width == 0 or (projected and width % len(cell.gates)):
        raise ValueError(f"{name}: given {describe(data)}; {wanted}. {hint}")
    return given, name


def _per_state(cell: Cell, kind: str, given: Any, like: Tensor) -> list[Given]:
    """One entry per state."""
    if given is None:
        return [None] * len(cell.states)
    values = (given,) if isinstance(given, Tensor) and len(cell.states) == 1 else given
    names = ", ".join(cell.state_names)
    if not isinstance(values, (tuple, list)) or len(values) != len(cell.states):
        raise TypeError(
            f"{kind}: given {describe(given)}; expected a tuple ({names}), the state of cell "
            f"{cell.name}. Pass None for those that begin with what the cell declares."
        )
    for name, value in zip(cell.state_names, values, strict=True):
        if value is None:
            continue
        dims = (2,) if kind == "state" else (1, 2)
        if not isinstance(value, Tensor) or value.dim() not in dims:
            raise TypeError(
                f"{kind}: given {describe(value)} for {name!r}; expected {like.dtype} [B, size]."
            )
    return list(values)


def _sizes(
    cell: Cell, x: Tensor, name: str, named: Mapping[str, Tensor], states: Sequence[Given]
) -> tuple[int, dict[str, int]]:
    """H, and what all size symbols stand for."""
    gates, weight = len(cell.gates), named.get("weight_ih")
    for l in cell.linears:
        axes = 2 if l.heads == 1 else 3
        given = named.get(l.weight)
        if given is None or given.dim() != axes:
            layout = "[out, in]" if l.heads == 1 else "[heads, out/heads, in/heads]"
            shown = "nothing" if given is None else describe(given)
            raise ValueError(f"{l.weight}: given {shown}; expected {layout}, as {l} multiplies.")
    if weight is not None and (weight.dim() != 2 or weight.shape[0] % gates or not weight.shape[0]):
        raise ValueError(
            f"weight_ih: given {describe(weight)}; expected [{gates} * H, input size], with rows "
            f"for the gates {' '.join(cell.gates)}."
        )
    hidden = (x.shape[-1] if weight is None else weight.shape[0]) // gates
    return hidden, reference.sizes(cell, hidden, named, states)


def _check_weights(
    cell: Cell,
    x: Tensor,
    name: str,
    named: Mapping[str, Tensor],
    sizes: dict[str, int],
    like: Tensor,
) -> None:
    """All that must be there is, and is of the shapes that follow from the sizes."""
    expected = shapes(cell, sizes, x.shape[-1], True)
    for weight, shape in expected.items():
        value, optional = named.get(weight), weight in ("weight_ih", "bias_ih", "bias_hh")
        if value is not None:
            axes = f"for a cell of {len(cell.gates)} gates with H = {sizes['H']}"
            check_tensor(weight, value, shape, axes, like)
        elif not optional:
            raise ValueError(
                f"{weight}: given nothing; expected {like.dtype} {list(shape)}, which cell "
                f"{cell.name} learns. Pass it among the weights."
            )
    check_tensor(name, x, x.shape, "as the weights", like)


def _arrays(
    cell: Cell,
    states: Mapping[str, Sequence[Given]],
    sizes: Mapping[str, int],
    rows: int,
    like: Tensor,
) -> dict[str, Tensor]:
    """States by their public names, with an axis of one direction."""
    arrays = {}
    for kind, values in states.items():
        names = state_names(kind, cell)
        for state, name, value in zip(cell.states, names, values, strict=True):
            if value is not None:
                size = sizes[state.size]
                shape = (size,) if value.dim() == 1 else (rows, size)
                check_tensor(kind, value, shape, f"the state {state.name!r}", like)
                arrays[name] = value.unsqueeze(0)
    return arrays


def _seed(cell: Cell, training: bool, seed: Any) -> Any:
    """The seed of the random masks, if any are drawn; traced as a tensor."""
    if seed is not None:
        number = isinstance(seed, int) and not isinstance(seed, bool)
        if not number or not 0 <= seed < 1 << 64:
            raise ValueError(
                f"seed: given {describe(seed)}; expected an int from 0 to 2**64 - 1, or None to "
                "draw one from torch's default generator."
            )
    if not (training and ops.draws(cell)):
        return 0
    if seed is None:
        return draw_seed()
    if compiled() or exporting():  # as a signed number of 64 bits, which has the same bits
        return torch.tensor(seed - (seed >> 63 << 64), dtype=torch.int64)
    return seed


__all__ = ["recurrence"]
