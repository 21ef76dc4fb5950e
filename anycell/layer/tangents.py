"""A layer's derivative along a direction, as a call of a layer whose cell is a tangent cell.

So first derivatives forwards, and second ones in any order, run on the engines that run the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from anycell.lang.namespaces import namespace
from anycell.lang.tangent import DOT, tangent
from anycell.layer import steps
from anycell.layer.arguments import Array
from anycell.layer.signature import ENDS, FLAGS, OF_STATES
from anycell.plan import Layer


def along(
    layer: Layer,
    arrays: Mapping[str, Array],
    dots: Mapping[str, Array],
    linear: Callable[..., Array] = steps.linear,
) -> tuple[Layer, dict[str, Array]]:
    """Returns the layer whose output, and first final states, are the tangents of those of
    ``layer``, and its arrays. Their sequences are the tangents of ``layer.sequences``.

    Args:
        arrays: by the names of ``signature``.
        dots: the tangents of some of the arrays, by the same names; of others they are 0.
        linear: computes ``x @ weight.T + bias`` from ``(x, weight, bias)``; the bias may be None.

    Raises:
        ValueError: if the cell has no tangent, see ``lang.tangent``; or for a recurrent mask.
    """
    cell, ends = layer.cell, ENDS[: len(layer.options.reverse)]
    if "recurrent_mask" in arrays:
        raise ValueError("recurrent_mask")
    varied = {name.removesuffix(ENDS[1]) for name in dots} & {*cell.learned, "static"}
    derived = tangent(cell, frozenset(varied - {"weight_ih", "bias_ih"}))
    xp, made = namespace(arrays["x"]), {n: arrays[n] for n in FLAGS if n in arrays}
    for name, array in arrays.items():
        if name.startswith(OF_STATES):
            made |= {name: array, name + DOT: dots.get(name, xp.zeros_like(array))}
    if "static" in arrays:
        made["static"] = arrays["static"]
    for end in ends:
        for name in (n for n in cell.learned if n + end in arrays and n not in _INPUT):
            array = arrays[name + end]
            made[name + end] = array
            if name in varied:
                made[name + DOT + end] = dots.get(name + end, xp.zeros_like(array))
        made["x" + end] = _gates(layer, arrays, dots, end, linear)
    sequences = tuple(name + DOT for name in layer.sequences)
    changes = {"arrays": tuple(made), "sequences": sequences, "plan": None}
    return layer._replace(cell=derived, **changes), made


_INPUT = "weight_ih", "bias_ih"


def _gates(
    layer: Layer,
    arrays: Mapping[str, Array],
    dots: Mapping[str, Array],
    end: str,
    linear: Callable[..., Array],
) -> Array:
    """The projected input of one direction, its tangent, and that of the static input."""
    name = "x" + end if "x" + end in arrays else "x"
    x = steps.unmasked({**arrays, "x": arrays[name]})
    weight, bias = (arrays.get(n + end) for n in _INPUT)
    d_weight, d_bias = (dots.get(n + end) for n in _INPUT)
    if weight is not None:
        gates = linear(x, weight, bias)
    else:
        gates = x if bias is None else x + bias
    d_gates = namespace(gates).zeros_like(gates)
    if name in dots:
        d_x = steps.unmasked({**arrays, "x": dots[name]})
        d_gates = d_gates + (d_x if weight is None else linear(d_x, weight, None))
    if d_weight is not None:
        d_gates = d_gates + linear(x, d_weight, None)
    if d_bias is not None:
        d_gates = d_gates + d_bias
    parts = [gates, d_gates]
    if "static" in dots:
        d_static = dots["static"]
        parts.append(namespace(gates).broadcast_to(d_static, (x.shape[0], *d_static.shape)))
    return namespace(gates).concatenate(parts, axis=-1)
