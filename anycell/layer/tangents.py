"""A layer's derivative along a direction, as calls of layers whose cell is a tangent cell.

So first derivatives forwards, and second ones in any order, run on the engines that run the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from anycell.lang.expr import CellError
from anycell.lang.namespaces import namespace
from anycell.lang.tangent import tangent
from anycell.layer import steps
from anycell.layer.arguments import Array
from anycell.layer.signature import ENDS, FLAGS, OF_STATES
from anycell.plan import Layer

Arrays = Mapping[str, Array]  # by the names of ``signature``
_INPUT = "weight_ih", "bias_ih"


def along(
    layer: Layer, arrays: Arrays, dots: Arrays, linear: Callable[..., Array] = steps.linear
) -> list[tuple[Layer, dict[str, Array]]] | None:
    """Returns for each direction the layer whose output and first final states are the tangents of
    those of ``layer``, and its arrays; see ``join``. None if no kernel could run them.

    Args:
        dots: the tangents of some of the arrays; of the others they are 0.
        linear: computes ``x @ weight.T + bias`` from ``(x, weight, bias)``; the bias may be None.
    """
    cell, options = layer.cell, layer.options
    # Alone, a second direction would draw the random masks of a first one.
    drawn = len(options.reverse) > 1 and options.training and cell.keeps
    if drawn or "recurrent_mask" in arrays:
        return None
    varied = {name.removesuffix(ENDS[1]) for name in dots} & {*cell.learned, "static"}
    varied |= {l.weight for l in cell.linears if l.bias_name in varied}
    try:
        derived = tangent(cell, frozenset(varied.difference(_INPUT)))
    except CellError:
        return None
    made = []
    for d, reverse in enumerate(options.reverse):
        named, changes = _direction(layer, arrays, d), _direction(layer, dots, d)
        xp = namespace(named["x"])
        given = {n: a for n, a in named.items() if n not in ("x", *_INPUT)}
        given["x"] = _gates(named, changes, linear)
        for name, array in named.items():
            dotted = name + derived.dot
            if dotted in derived.learned or name.startswith(OF_STATES):
                given[dotted] = changes.get(name, xp.zeros_like(array))
        of_one = options._replace(reverse=(reverse,))
        made.append(
            (
                layer._replace(
                    cell=derived, options=of_one, arrays=tuple(given), stored=(), plan=None,
                    sequences=tuple(name + derived.dot for name in layer.sequences),
                ),
                given,
            )
        )  # fmt: skip
    return made


def join(layer: Layer, results: Sequence[steps.Results]) -> steps.Results:
    """The tangents of the results of a layer, from the results of the calls of ``along``."""
    outputs, finals, others = zip(*results, strict=True)

    def joined(parts: Sequence[Array], axis: int) -> Array:
        return parts[0] if len(parts) == 1 else namespace(parts[0]).concatenate(parts, axis=axis)

    states = [joined(parts, 0) for parts in zip(*finals, strict=True)][: len(layer.cell.states)]
    sequences = [joined(parts, -1) for parts in zip(*others, strict=True)]
    return joined(outputs, -1), tuple(states), tuple(sequences)


def _direction(layer: Layer, arrays: Arrays, d: int) -> dict[str, Array]:
    """The arrays of one direction of a layer, by their names in a layer of one."""
    named, learned = dict[str, Array](), {name + ENDS[d]: name for name in layer.cell.learned}
    for name, array in arrays.items():
        if name.startswith(OF_STATES):
            named[name] = array[d : d + 1]
        elif name in learned:
            named[learned[name]] = array
        elif name in ("x", "static", "seed", *FLAGS):
            named[name] = array
    return named


def _gates(arrays: Arrays, dots: Arrays, linear: Callable[..., Array]) -> Array:
    """The projected input of one direction, its tangent, and that of the static input."""
    x, xp = steps.unmasked(arrays), namespace(arrays["x"])
    weight, bias = map(arrays.get, _INPUT)

    def projected(x: Array, weight: Array | None, bias: Array | None) -> Array:
        if weight is not None:
            return linear(x, weight, bias)
        return x if bias is None else x + bias

    gates = projected(x, weight, bias)
    d_gates = xp.zeros_like(gates)
    if "x" in dots:
        d_gates = projected(steps.unmasked({**arrays, "x": dots["x"]}), weight, None)
    d_weight, d_bias = map(dots.get, _INPUT)
    if d_weight is not None:
        d_gates = d_gates + linear(x, d_weight, None)
    if d_bias is not None:
        d_gates = d_gates + d_bias
    parts = [gates, d_gates]
    if "static" in dots:
        static = dots["static"]
        parts.append(xp.broadcast_to(static, (x.shape[0], *static.shape)))
    return xp.concatenate(parts, axis=-1)
