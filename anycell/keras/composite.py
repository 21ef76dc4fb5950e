"""A layer in the backend's own operations: Keras's loop around one step of the reference engine.

It is slow, and can do what the backend can: XLA, export, any device, any order of derivative. The
loop is ``tf.while_loop`` on TensorFlow, ``lax.scan`` on JAX, and a Python loop on torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import keras
from keras import ops
from keras.src import backend  # the loop of keras.layers.RNN has no public name

from anycell.engines.reference import Recurrence
from anycell.keras.call import INTEGERS, KERNELS, Arrays, Result, Tensor, dequantized
from anycell.lang.cell import RECURRENT
from anycell.lang.expr import Expr
from anycell.layer.rounding import quantized
from anycell.layer.steps import unmasked
from anycell.plan import DTYPES, Layer, Options
from anycell.plan.step import evaluate, frame

FRAME_OPS = {"where": ops.where, "const": float}  # of ``plan.step``


def composite(layer: Layer, arrays: Arrays) -> Result:
    """Runs a layer step by step: with arrays of 16 bits in float32, narrowing the results again,
    and with the real weights that weights of 8 bits stand for.
    """
    if quantized(arrays):
        arrays = dequantized(arrays)
    arrays = dict(arrays)
    for keras_name, our_name in KERNELS.items():
        if our_name in arrays:
            arrays[keras_name] = ops.transpose(arrays.pop(our_name))
    narrow = backend.standardize_dtype(arrays["x"].dtype)
    if DTYPES.get(narrow, DTYPES["float32"]).mixed:
        wide = DTYPES[narrow].math.name
        arrays = {n: a if n in INTEGERS else ops.cast(a, wide) for n, a in arrays.items()}
        results = composite(layer, arrays)
        return keras.tree.map_structure(
            lambda result: None if result is None else ops.cast(result, narrow), results
        )
    cell, get = layer.cell, arrays.get
    mask, resets_, kernel, bias = map(get, ("mask", "resets", "kernel", "bias_ih"))
    initial = [arrays[f"state {name}"] for name in cell.state_names]
    x = unmasked(arrays)
    # What a step reads besides the states is concatenated: Keras's loop takes one sequence.
    within = keras.backend.backend() == "jax"
    parts = [x if within else project(x, kernel, bias)]
    width = parts[0].shape[-1]
    (reverse,) = layer.options.reverse
    around = frame(mask is not None, False, layer.options.apart(True))
    for flags in (mask, resets_):
        if flags is not None:
            parts.append(ops.expand_dims(ops.cast(flags, x.dtype), -1))
    if resets_ is not None and reverse:
        # A step is reset by the flag of the step that ran last, which is a state here.
        initial.append(ops.zeros_like(parts[-1][0]))
    drawn = layer.options.training and bool(cell.keeps)
    once: dict[int, Tensor] = {}
    if drawn:
        steps, rows = ops.shape(x)[:2]
        for k, node in enumerate(cell.keeps):
            index, per = node.attrs
            seed = _Seed(arrays["seed"], k, len(cell.keeps))
            shape = (rows, layer.size(cell.sizes[node]))
            if per == "step":
                parts.append(keras.random.uniform((steps, *shape), dtype=x.dtype, seed=seed))
            else:
                once[index] = keras.random.uniform(shape, dtype=x.dtype, seed=seed)
    after = [cell.state_names.index(name) for name in (cell.state_names[0], *layer.sequences)]
    weights = {n: get(n) for l in cell.linears for n in (l.weight, l.bias_name)}
    turned = {l.name: w for l in cell.linears if (w := get(l.weight)) is not None and l.heads == 1}
    kernels = {name: ops.swapaxes(w, -1, -2) for name, w in turned.items()}
    if "recurrent_kernel" in arrays:
        weights["weight_hh"] = ops.transpose(arrays["recurrent_kernel"])
        if "recurrent_mask" not in arrays:  # with one, gates may have operands of their own
            kernels[RECURRENT] = arrays["recurrent_kernel"]

    of_any_step = _Step(
        layer._replace(options=Options(training=drawn)),
        parts[0][:1],
        weights,
        initial[: len(cell.states)],
        {name: arrays[name] for name in cell.param_names},
        static=get("static"),
        reset_state=[get(f"reset_state {name}") for name in cell.state_names],
        recurrent_mask=get("recurrent_mask"),
        kernels=kernels,
    )

    def step(t: Tensor, states: Any) -> tuple[Tensor, list[Tensor]]:
        at, resets, uniform = width, None, dict(once)
        before, present = list(states), None
        states, last = states[: len(cell.states)], list(states[len(cell.states) :])
        if mask is not None:  # Keras's loop would begin the outputs with zeros, not with the state
            present, at = t[:, at : at + 1] > 0.5, at + 1
        if resets_ is not None:
            flag, at = t[:, at : at + 1], at + 1
            resets = ops.transpose((last[0] if reverse else flag) > 0.5)
            last = [flag] * reverse
        for node in cell.keeps if drawn else ():
            if node.attrs[1] == "step":
                size = layer.size(cell.sizes[node])
                uniform[node.attrs[0]] = t[:, at : at + size]
                at += size
        gates = t[:, :width]
        gates = project(gates, kernel, bias) if within else gates
        one = replace(
            of_any_step, gates_x=ops.expand_dims(gates, 0), state=states, resets=resets,
            uniform=lambda seed, stream, index, *_: ops.cast(uniform[index], "float32"),
        )  # fmt: skip
        _, final = one.forward()

        def framed(name: str, **leaves: Tensor) -> Tensor:
            return evaluate(around[name], {"valid": present, **leaves}, FRAME_OPS)

        pairs = zip([*final, *last], before, strict=True)
        new = [framed("after", new=value, entered=held) for value, held in pairs]
        outputs = [framed("output", after=new[k]) for k in after]
        return outputs[0] if len(outputs) == 1 else ops.concatenate(outputs, axis=-1), new

    sequence = parts[0] if len(parts) == 1 else ops.concatenate(parts, axis=-1)
    if x.shape[0] == 1:  # no loop
        output, final = step(sequence[0], initial)
        output = ops.expand_dims(output, 0)
        return _ends(layer, output, final)
    # Batch first: with time-major input, Keras 3 mistakes the batch for the number of steps.
    _, outputs, final = backend.rnn(
        step,
        ops.swapaxes(sequence, 0, 1),
        list(initial),
        go_backwards=reverse,
        unroll=layer.unroll,
        return_all_outputs=layer.outputs or bool(layer.sequences),
    )
    outputs = ops.swapaxes(outputs, 0, 1)
    return _ends(layer, ops.flip(outputs, axis=0) if reverse else outputs, final)


def _ends(layer: Layer, outputs: Tensor, final: Sequence[Tensor]) -> Result:
    """The results of a run whose steps return their states, the wanted ones side by side."""
    sizes, parts, at = {s.name: layer.size(s.size) for s in layer.cell.states}, [], 0
    for name in (layer.cell.state_names[0], *layer.sequences):
        parts.append(outputs[..., at : at + sizes[name]] if layer.sequences else outputs)
        at += sizes[name]
    first, *others = parts
    return first if layer.outputs else None, (*final[: len(sizes)], *others)


def project(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """``x @ kernel + bias``; without a kernel ``x`` is projected already."""
    gates = x if kernel is None else ops.matmul(x, kernel)
    return gates if bias is None else gates + bias


@dataclass
class _Step(Recurrence):
    """One step, for any number of rows, even if only the running graph knows the number.

    Attributes:
        kernels: of the matmuls that can be done for all outputs at once.
    """

    kernels: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rows = ops.shape(self.gates_x)[1]

    def _rows(self, value: Tensor, size: str) -> Tensor:
        """Adds zeros where the oracle broadcasts to a shape: XLA has no gradient of a broadcast to
        a shape that only the running graph knows."""
        if len(value.shape) == 2 and (value.shape[0] != 1 or self.gates_x.shape[1] == 1):
            return value
        rows = self.gates_x[0] if self.state is None else self.state[0]
        zero = self.xp.zeros_like(rows[:, :1])
        return value + (zero + ops.zeros((self.size[size],), zero.dtype))

    def _linear(self, node: Expr, t: int, values: Any) -> Tensor:
        """Does one matmul for all outputs of the node's matmul; the oracle does one for each."""
        name, output = node.attrs
        if name not in self.kernels:
            return super()._linear(node, t, values)
        linear, product = self._matmul(name), Expr("linear", node.args, (name,))
        if product not in values:
            operand, bias = values[linear.operand], self.weights.get(linear.bias_name)
            operand = self._rows(operand, linear.in_size)
            values[product] = project(operand, self.kernels[name], bias)
        return values[product][:, self._span(linear, output)]


class _Seed(keras.random.SeedGenerator):
    """The seed of the k-th of ``count`` random masks: Keras takes a generator, but no tensor."""

    def __init__(self, drawn: Tensor, k: int, count: int) -> None:
        # A generator counts its draws in the second number. Here each mask gets a count of its own.
        scale, shift = (ops.convert_to_tensor(pair, drawn.dtype) for pair in ([1, count], [0, k]))
        self.drawn = drawn * scale + shift

    def next(self, ordered: bool = True) -> Tensor:
        return self.drawn
