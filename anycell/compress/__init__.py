"""Smaller layers: with fewer units, really removed; with weights of low rank; with 8-bit weights.

``unit_norms`` is a term for training that drives whole units to zero (group lasso), ``shrink``
removes units from a layer and its readouts, and ``gradual`` says how many should be left at a step
of training. ``factorize`` turns the weights in a step into products of two smaller matrices, and
``quantize`` rounds all weights. They take the layers of ``anycell.torch``, ``anycell.keras`` and
``anycell.numpy``, with any cell: its graph says what belongs to a unit, and lists the matmuls.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from anycell.compress import units
from anycell.compress.units import Indices
from anycell.lang.cell import INPUT, ONE
from anycell.lang.namespaces import namespace
from anycell.lang.transform import RANK, low_rank
from anycell.layer.checks import integer, refuse
from anycell.layer.compression import array_of, compression, numbers
from anycell.layer.signature import ENDS, place

__all__ = ["factorize", "fake_quantize", "gradual", "low_rank", "quantize", "shrink", "unit_norms"]


def unit_norms(layer: Any, *, readouts: Sequence[Any] = (), size: str = "H") -> Any:
    """Computes the norm of all weights that belong to a unit.

        norm_u = sqrt(sum of w**2 over the weights in the rows and columns of unit u)

    These are the unit's rows of the input and recurrent weights, for all gates, and its columns of
    the weights that read it: recurrent, the next layer's input, and readouts. Biases and the cell's
    parameters do not count. The sum of norms is the group-lasso term of Wen et al.: added to a
    loss, it drives whole units to zero, which ``shrink`` then removes.

    Args:
        layer, readouts, size: as in ``shrink``.

    Returns:
        ``[num_layers * D, units]``, D directions, in the order of the states. In PyTorch and Keras
        it has a gradient (0 for a unit whose weights are all 0), in NumPy none.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what was expected.

    Source: Wen et al., *Learning Intrinsic Sparse Structures within Long Short-Term Memory*, 2018.
    """
    return _Model(layer, readouts, size).norms()


def shrink(
    layer: Any,
    keep: int | float | Sequence[int] | npt.NDArray[np.integer[Any]],
    *,
    readouts: Sequence[Any] = (),
    optimizer: Any = None,
    multiple: int = 8,
    size: str = "H",
) -> Indices:
    """Removes units from a layer, and from its readouts, in place.

    This removes a unit's rows and columns of every weight, bias and parameter, in all layers and
    directions, and its columns of the readouts. If the weights that read the unit are zero, and the
    cell has no sums over units, the outputs of the other units do not change.

    Args:
        layer: of ``anycell.torch`` (``RNN``, ``LSTM``, ``GRU``), ``anycell.keras`` (also in
            ``Bidirectional``) or ``anycell.numpy``.
        keep: how many units stay: a number from 1, or a fraction in (0, 1), rounded up to
            ``multiple`` and at most all. The units of the largest ``unit_norms`` stay. Or the
            indices of units, not rounded: ``[units]`` for all layers and directions, or one row for
            each, ``[num_layers * D, units]``.
        readouts: layers that read the output of the last layer (D directions side by side):
            ``torch.nn.Linear``, ``anycell.numpy.Dense``, or Keras's ``Dense`` and recurrent layers.
            Adapt other readers of the output yourself: the returned indices say which inputs
            remain.
        optimizer: an optimizer of ``torch.optim`` or Keras, or ``anycell.numpy.Adam``, that will
            continue training: it gets the new parameters, and the matching parts of its momenta.
            Any other optimizer of PyTorch or Keras for this layer must be made anew.
        multiple: a multiple of the units in a vector of the machine: other numbers of units cost
            as much as the next multiple. 8 float32 fill 32 bytes (AVX2), 16 fill 64 (AVX-512).
        size: the size symbol of the units, if the cell has several: "P" in ``state="h:P c"``. Each
            size needs a call of its own.

    Returns:
        the units that stayed, ``[num_layers * D, kept]``, ascending.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what was expected. Nothing
            is changed then.

    Example:
        >>> layer = anycell.numpy.LSTM(3, 64, seed=0)
        >>> anycell.compress.shrink(layer, 0.5).shape, layer.hidden_size
        ((1, 32), 32)
    """
    model = _Model(layer, readouts, size)
    if model.unsaid():
        gc.collect()  # a Feedback that has been dropped reads nothing
        for readout in model.unsaid():
            expected = f"{readout!r} among them, which reads this layer in a Feedback"
            refuse("readouts", repr([*readouts]), expected, "Pass readouts=[feedback.readout].")
    multiple = integer("multiple", multiple)
    if np.ndim(keep) == 0:
        kept = model.strongest(_number(keep, model.count), multiple)
    else:
        kept = _indices(keep, model.count, len(model.places), model.split)
    indices: dict[int, tuple[Any, tuple[Any, ...]]] = {}
    for weight, index in model.taken(kept):
        place = id(getattr(weight, "variable", weight))  # two biases may be one variable
        _, before = indices.setdefault(place, (weight, index))
        if any(not np.array_equal(a, b) for a, b in zip(before, index, strict=True)):
            expected = "a parameter for each, because both places would have to keep the same units"
            given, hint = "one with a parameter in two places", "Give each its own copy first."
            refuse("layer", given, expected, hint)
    taken = [*indices.values()]
    model.framework.take(layer, model.readouts, taken, optimizer, (size, kept.shape[1]))
    return kept


def gradual(final: float, begin: int, end: int, *, initial: float = 1.0) -> Any:
    """Makes a schedule of the fraction of units to keep, for gradual pruning.

        keep(t) = final + (initial - final) * (1 - (t - begin) / (end - begin))**3

    between the steps ``begin`` and ``end`` of training; ``initial`` before, ``final`` after. Both
    are fractions in (0, 1].

    Returns:
        a function of the step that returns the fraction to keep.

    Raises:
        ValueError: naming the argument, what was given and what was expected.

    Source: Zhu & Gupta, *To Prune, or Not to Prune: Exploring the Efficacy of Pruning for Model
    Compression*, 2017.

    Example:
        >>> keep = gradual(0.25, begin=0, end=100)
        >>> keep(0), keep(100)
        (1.0, 0.25)
    """
    for name, value in (("final", final), ("initial", initial)):
        if not 0.0 < value <= 1.0:
            refuse(name, repr(value), "a part in (0, 1]", "Pass one in that range.")
    if not begin < end:
        hint = "Pass steps of training."
        refuse("begin, end", f"{begin!r}, {end!r}", "begin before end", hint)

    def keep(step: float) -> float:
        left = min(1.0, max(0.0, 1.0 - (step - begin) / (end - begin)))
        return final + (initial - final) * left**3

    return keep


def factorize(layer: Any, rank: int, *, matmuls: Sequence[str] | None = None) -> Any:
    """Makes a layer with weights of low rank in its step: W becomes U V, its best approximation.

    W = U V is the truncated singular value decomposition, with the roots of the singular values in
    both factors, so that both train alike. ``||W - U V||`` is the root of the sum of the squares of
    the singular values left out (over all heads, if there are several). At full rank the layer
    computes the same, up to rounding.

    It pays off if ``rank * (out + in) < out * in``: for an LSTM of H units, below rank 4/5 H. Input
    weights do not change, because they are not multiplied step by step.

    Args:
        layer: as in ``shrink``.
        rank: the rank of each weight, at most the smaller of its sizes. With heads it is the sum
            over all heads, a multiple of their number. Best is a multiple of 16, a machine vector.
        matmuls: names of the matmuls that change, as in ``low_rank``; None means all in the step.

    Returns:
        a new layer, an ``RNN`` of ``low_rank(layer.cell, matmuls)``, with copies of all else that
        the layer has learned. U and V are trained, even if W was frozen. Hooks are not copied, and
        further training needs a new optimizer.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what was expected.

    Source: Xue, Li & Gong, *Restructuring of Deep Neural Network Acoustic Models with Singular
    Value Decomposition*, 2013; Prabhavalkar et al., *On the Compression of Recurrent Neural
    Networks with an Application to LVCSR Acoustic Modeling for Embedded Speech Recognition*, 2016.

    Example:
        >>> layer = anycell.numpy.GRU(3, 64, seed=0)
        >>> smaller = anycell.compress.factorize(layer, 16)
        >>> {n: a.shape for n, a in smaller.parameters.items() if n.startswith("weight_hh")}
        {'weight_hh_v_l0': (16, 64), 'weight_hh_u_l0': (192, 16)}
    """
    framework = _framework("layer", layer)
    learned, described = framework.learned(layer), framework.describe(layer)
    whole, ends = described.cell, ENDS[: len(described.options.reverse)]
    cell = low_rank(whole, matmuls, bias="bias_ih" in learned[0])
    rank = integer("rank", rank)
    sizes, linears = {**dict(described.sizes), RANK: rank}, []
    for l in whole.by_weight.values():
        most = min(l.shape(sizes)[-2:]) * l.heads
        if l.shared in cell.matmuls and rank > most:
            expected = f"at most {most}, the full rank of {l.weight} {list(l.shape(sizes))}"
            refuse("rank", str(rank), expected, "Choose a lower one, or other matmuls.")
        linears += [(l, end) for end in ends if l.shared in cell.matmuls]
    cell.check_sizes(sizes)
    new: dict[str, Any] = {}
    for k, arrays in enumerate(learned):
        # Kept apart: a matmul may have the name of another matmul's factor.
        arrays, made = dict(arrays), dict[str, Any]()
        for l, end in linears:
            weight = numbers(arrays.pop(l.weight + end))
            if not np.isfinite(weight).all():
                given = f"one whose {place(l.weight + end, k)} has infinities or NaN"
                hint = "Other weights have no singular value decomposition."
                refuse("layer", given, "finite numbers", hint)
            factors = _factors(weight, rank // l.heads)
            made |= zip((f"{l.weight}_u{end}", f"{l.weight}_v{end}"), factors, strict=True)
            if l.bias_name + end in arrays:
                made[f"{l.bias_name}_u{end}"] = arrays.pop(l.bias_name + end)
        new |= {place(name, k): array for name, array in (arrays | made).items()}
    return framework.like(layer, cell, sizes, new)


def quantize(model: Any, *, data: Iterable[Any] | None = None) -> Any:
    """Rounds the weights of a model's recurrent layers to 8 bits, for inference on the CPU.

    Args:
        model: a layer as in ``shrink``, a ``Feedback`` around one, or a ``torch.nn.Module`` or
            ``keras.Model`` that has such layers. It does not change.
        data: inputs on which to measure the error, at least one: each a batch, or a tuple of
            arguments, the last of which may be a dictionary of keyword arguments. Do not include
            targets. To see progress, wrap a loader in a progress bar.

    Returns:
        a ``Quantized`` layer, or a copy of the model with such layers in place of its own: of a
        ``keras.Model`` a copy by its config, not compiled; of a torch module one in eval mode.
        Their ``error`` is ``norm(quantized - float) / norm(float)`` of the output over ``data``,
        for each layer's own input; None without data, and for a layer that did not run.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what was expected.

    Example:
        >>> import numpy as np
        >>> import anycell.numpy
        >>> layer = anycell.numpy.LSTM(3, 64, seed=0)
        >>> small = quantize(layer, data=[np.ones((20, 8, 3))])
        >>> small.arrays["weight_hh_l0"].dtype, small.error < 0.02
        (dtype('int8'), True)
    """
    return _framework("model", model).quantize(model, data)


def fake_quantize(layer: Any) -> Any:
    """Makes a layer of ``anycell.torch`` train with the weights that ``quantize`` would give it.

        forward     scale * round(w / scale)
        backward    as if the weight had not been rounded (straight through)

    Each weight gets a parametrization of ``torch.nn.utils.parametrize``. The layer still runs
    fused, and ``quantize`` accepts it.

    Args:
        layer: ``RNN``, ``LSTM`` or ``GRU`` of ``anycell.torch``, changed in place and returned.

    Raises:
        TypeError, ValueError: for another kind of layer, or a layer that has parametrizations.

    Source: Jacob et al., *Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference*, 2018.
    """
    framework = compression(layer)
    if not hasattr(framework, "fake_quantize") or not framework.rounds(layer, layer):
        expected = "RNN, LSTM or GRU of anycell.torch"
        refuse("layer", type(layer).__name__, expected, "Quantize others once trained.", TypeError)
    return framework.fake_quantize(layer)


class _Model:
    """A layer and its readouts, of any framework.

    Attributes:
        size, count: symbol and number of the units.
        split: the number of equal parts into which heads and groups divide the units.
        places: layer and direction, in the order of states.
        columns: whether the layer's output consists of these units.
        reads: the weights of the readouts.
    """

    def __init__(self, layer: Any, readouts: Sequence[Any], size: str) -> None:
        self.framework, self.size = _framework("layer", layer), size
        several = isinstance(readouts, Sequence)
        for readout in readouts if several else ():
            _refuse_quantized(readout)
        self.layer, self.weights = layer, self.framework.weights(layer)
        described = self.framework.describe(layer)
        self.cell, self.sizes = described.cell, dict(described.sizes)
        self.axes, self.layers = units.axes(self.cell), len(self.weights)
        self.directions = len(described.options.reverse)
        self.places = [*itertools.product(range(self.layers), range(self.directions))]
        known = [symbol for symbol in self.sizes if symbol != ONE]
        if size not in known:
            refuse("size", repr(size), f"one of {', '.join(known)}", "Pass one of them.")
        if not several:
            hint = "Put them in one."
            refuse("readouts", type(readouts).__name__, "a list of layers", hint, TypeError)
        first = self.cell.states[0].size
        width, self.reads, self.readouts = self.sizes[first] * self.directions, [], list(readouts)
        for readout in readouts:
            weights = self.framework.reads(readout)
            if not weights or any(weight.shape[1] != width for weight in weights):
                hint = "That is the width of the layer's output."
                expected = self.framework.readouts.format(width)
                refuse("readouts", repr(readout), expected, hint, TypeError)
            self.reads += weights
        self.count, self.split = self.sizes[size], units.parts(self.cell, size)
        self.columns = size == first

    def learned(self, k: int, d: int) -> dict[str, Any]:
        """The arrays that a direction of a layer learns, by their names."""
        arrays, end = self.weights[k], ENDS[d]
        return {n: arrays[n + end] for n in self.cell.learned if n + end in arrays}

    def readers(self, k: int) -> list[Any]:
        """The weights that read the output of a layer."""
        if not self.columns or k + 1 == self.layers:
            return self.reads if self.columns else []
        return [self.learned(k + 1, d)["weight_ih"] for d in range(self.directions)]

    def unsaid(self) -> list[Any]:
        """Readouts of a ``Feedback`` around the layer, not passed, that would become too wide."""
        if not self.columns:
            return []
        kind, parts = self.framework.feedback, _directions(self.layer)
        feedbacks = [o for o in gc.get_objects() if type(o) is kind and hasattr(o, "readout")]
        reading = [f.readout for f in feedbacks if f.layer in parts]
        return [readout for readout in reading if all(readout is not r for r in self.readouts)]

    def norms(self) -> Any:
        """Computes the norm of each unit, with gradient 0 at 0: a unit whose weights are zero keeps
        them.
        """
        totals = []
        for k, d in self.places:
            parts = []
            for name, weight in self.learned(k, d).items():
                if len(weight.shape) > 1:
                    sizes = {**self.sizes, INPUT: weight.shape[-1]}
                    square = array_of(weight) ** 2
                    parts += units.sums(self.axes[name], sizes, square, self.size)
            columns = slice(d * self.count, (d + 1) * self.count)
            readers = [array_of(weight)[:, columns] ** 2 for weight in self.readers(k)]
            totals.append(sum([*parts, *(namespace(r).sum(r, 0) for r in readers)]))
        xp = namespace(totals[0])
        total = xp.stack(totals)
        zeros = xp.zeros_like(total)
        return xp.where(total > 0, xp.sqrt(xp.where(total > 0, total, zeros + 1.0)), zeros)

    def strongest(self, wanted: int, multiple: int) -> Indices:
        """The units with the largest norms, per layer and direction."""
        step = math.lcm(multiple, self.split)
        wanted = min(self.count, -(-wanted // step) * step)
        norms = numbers(self.norms())
        return np.stack([units.select(row, wanted, self.split) for row in norms])

    def taken(self, kept: Indices) -> list[tuple[Any, tuple[Any, ...]]]:
        """Every array that may lose elements, and the index that takes the others."""
        indices = []
        for (k, d), units_kept in zip(self.places, kept, strict=True):
            learned = self.learned(k, d)
            sizes = {**self.sizes, INPUT: learned["weight_ih"].shape[1]}
            here = {self.size: units_kept}
            if k and self.columns:
                here[INPUT] = self.outputs(kept, k - 1)
            for name, array in learned.items():
                indices.append((array, units.taken(self.axes[name], sizes, here)))
        last = self.outputs(kept, self.layers - 1)
        for weight in self.readers(self.layers - 1):
            indices.append((weight, (np.arange(weight.shape[0])[:, None], last)))
        return indices

    def outputs(self, kept: Indices, k: int) -> Indices:
        """The outputs of a layer that stay, its directions side by side."""
        rows = kept[k * self.directions : (k + 1) * self.directions]
        return (rows + self.count * np.arange(self.directions)[:, None]).reshape(-1)


def _framework(argument: str, layer: Any) -> Any:
    """Looks up the ``Compression`` of a layer, or of a model with layers; refuses others."""
    framework = compression(layer)
    if framework is not None and (argument == "model" or isinstance(layer, framework.layers)):
        if argument == "layer":
            _refuse_quantized(layer)
        return framework
    expected = "a layer of anycell.torch (RNN, LSTM, GRU), anycell.keras or anycell.numpy"
    expected += ", or a torch.nn.Module or keras.Model with such layers" * (argument == "model")
    hint = (
        "anycell.torch.accelerate and anycell.keras.accelerate turn layers of torch.nn and Keras "
        "into ours."
    )
    if hasattr(layer, "readout") and hasattr(layer, "layer"):
        expected = "its layer"
        hint = (
            "Pass the layer, and the readout separately: shrink(feedback.layer, ..., "
            "readouts=[feedback.readout])."
        )
    refuse(argument, type(layer).__name__, expected, hint, TypeError)


def _directions(layer: Any) -> list[Any]:
    """The layers of both directions of Keras's ``Bidirectional``; other layers themselves."""
    return [getattr(layer, name, layer) for name in ("forward_layer", "backward_layer")]


def _refuse_quantized(layer: Any) -> None:
    """Refuses a layer or readout whose weights are integers."""
    if any(getattr(part, "rounded", False) for part in _directions(layer)):
        hint = "Change the float32 layer, and quantize it afterwards."
        given = f"{type(layer).__name__} with weights of 8 bits"
        refuse("layer", given, "float32", hint, TypeError)


def _factors(weight: npt.NDArray[Any], rank: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """U ``[..., out, rank]`` and V ``[..., rank, in]`` whose product is nearest to the weight."""
    u, s, v = np.linalg.svd(weight, full_matrices=False)
    roots = np.sqrt(s[..., :rank])
    return u[..., :rank] * roots[..., None, :], roots[..., None] * v[..., :rank, :]


def _number(keep: Any, count: int) -> int:
    """Returns the number of units to keep, from a number or a fraction of all."""
    part = isinstance(keep, (float, np.floating)) and 0.0 < keep < 1.0
    whole = isinstance(keep, (int, np.integer)) and not isinstance(keep, bool)
    if part:
        return max(1, math.ceil(keep * count))
    if whole and 1 <= keep <= count:
        return int(keep)
    expected = f"a number of units from 1 to {count}, or a part of them in (0, 1)"
    refuse("keep", repr(keep), expected, "Or pass the indices of the units that stay.")


def _indices(keep: Any, count: int, rows: int, split: int) -> Indices:
    """Checks the indices of units to keep; returns them ascending per layer and direction."""
    kept = np.asarray(keep)
    whole, single = kept.dtype.kind in "iu" and kept.size, kept.ndim == 1
    if not whole or not (single or (kept.ndim == 2 and len(kept) == rows)):
        given = f"an array of shape {kept.shape} and dtype {kept.dtype}"
        expected = f"indices of units, [units], or [{rows}, units] for each layer and direction"
        refuse("keep", given, expected, "Or pass a number of units.")
    kept = np.sort(np.broadcast_to(kept, (rows, kept.shape[-1])))
    if kept[:, 0].min() < 0 or kept[:, -1].max() >= count or not np.diff(kept).all():
        expected = f"each at most once, from 0 to {count - 1}"
        refuse("keep", f"the units {keep!r}", expected, "Leave out the others.")
    counts = (kept[:, :, None] // (count // split) == np.arange(split)).sum(1)
    if len(np.unique(counts)) > 1:
        given = f"units of which {counts.tolist()} lie in the {split} parts of heads or groups"
        refuse("keep", given, "the same number in each", "Choose others.")
    return kept.astype(np.int64)
