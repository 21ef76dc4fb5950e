"""A layer on TensorFlow: its own matmuls around the fused kernels, which see its tensors' memory.

The input projection, where it is not so small that the kernel does it, and the gradients of input
and weights are operations of TensorFlow's; it leaves out those that nobody asks for. The recurrence
between them is one operation of ours with a gradient. In eager mode its kernels are called at once.
In a graph they stand behind ``tf.numpy_function``, which is public, runs wherever TensorFlow does,
and hands memory over in both directions without a copy where it begins on a cache line; ours always
does. What the backward pass reads are outputs of that operation, so that loops, replicas and
pruning treat it like any other tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.python.eager import forwardprop_util, record  # open tapes have no public name
from tensorflow.python.framework import ops as graphs
from tensorflow.python.ops import control_flow_util
from tensorflow.python.saved_model import save_context

from anycell import layer
from anycell.engines import cpu
from anycell.keras.call import Call, Inputs, Result, Tensor, check, number
from anycell.keras.composite import composite
from anycell.keras.host import LINE, AlignedHost
from anycell.keras.rule import asked, planned
from anycell.lang.cell import RECURRENT, Linear, with_recurrent_mask
from anycell.plan import Plan, plan

Array = npt.NDArray[Any]


def on_gpu(x: Tensor) -> bool:
    """Whether TensorFlow would run an operation on ``x`` on a GPU."""
    if "GPU" in x.device or not tf.config.list_logical_devices("GPU"):
        return "GPU" in x.device
    return "CPU" not in x.device  # a graph places what has no device of its own


def refusal() -> str | None:
    """Why the kernels cannot be called here and now, or None: looks at what is being traced."""
    if asked() is not None or tf.executing_eagerly():
        return asked()
    if control_flow_util.GraphOrParentsInXlaContext(graphs.get_default_graph()):
        return "XLA (jit_compile=True) compiles the whole graph and calls nothing outside it"
    if save_context.in_save_context() or _exporting():
        return "an exported model must run where anycell is not installed"
    return None


def _exporting() -> bool:
    """Whether Keras's export traces the call; it says so nowhere but on the stack."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(("keras.src.export", "tf2onnx")):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def recur(call: Call, inputs: Inputs) -> Result:
    """Runs a layer on the kernels where they can be called, else step by step."""
    cell, dtype = call.cell, inputs.x.dtype.name
    found = planned(cell, call.hidden_size, dtype, dict(call.sizes))
    elsewhere = isinstance(found, str) or on_gpu(inputs.x) or refusal() is not None
    inputs = _tensors(inputs)
    check(call, inputs)
    return (composite if elsewhere else run)(call, inputs)


@tf.autograph.experimental.do_not_convert
def run(call: Call, inputs: Inputs) -> Result:
    """Runs a layer on the fused kernels, differentiable as often as wanted."""
    inputs = _tensors(inputs)
    x, mask, resets, kernel = inputs.x, inputs.mask, inputs.resets, inputs.kernel
    if kernel is not None and x.shape[-1] is None:
        x = tf.ensure_shape(x, [None, None, kernel.shape[0]])
    if _carries_tangents(tf.nest.flatten(inputs)):  # a gradient of ours knows no forward mode
        return composite(_unlooped(call, x), inputs)
    if x.shape[0] == 1 and not tf.executing_eagerly() and not (call.training and call.cell.keeps):
        # Nothing to fuse over time, and less to do than to call a kernel takes.
        return composite(call, inputs)
    if mask is not None:  # NaN under a mask must not reach a gradient
        kept = tf.where(tf.expand_dims(mask, -1), x, tf.zeros((), x.dtype))
        if not (x.shape + mask.shape).is_fully_defined():  # one step or row must not become many
            kept = tf.reshape(kept, tf.shape(x))
        x = kept
    own = _plan(call, inputs)
    if kernel is not None and not layer.projects(own, _count(x), x.shape.as_list()[-1]):
        gates = tf.matmul(_rows(x), kernel)
        x, kernel = tf.reshape(gates, [*_sizes(x, 2), gates.shape[-1]]), None
    flags = (
        None if mask is None else tf.cast(mask, tf.uint8),
        None if resets is None else tf.cast(resets, tf.uint8),
        inputs.seed,
        inputs.recurrent_mask,
    )
    entering = inputs._replace(x=x, kernel=kernel)
    given, spread = _flatten(entering)
    recurrence = _Recurrence(call, own, spread, entering, flags)
    # Whether anyone will ask for a gradient is not known; without a tape in sight it is unlikely,
    # and the backward pass then runs the forward pass again.
    keep = call.training or record.could_possibly_record()

    @tf.custom_gradient
    def fused(*flat: Tensor) -> Any:
        outputs, final, kept = recurrence.forward(flat, keep)
        results = (outputs, *final) if call.sequences else tuple(final)

        def gradient(*arriving: Tensor) -> Any:
            return _gradient(recurrence, flat, arriving, kept)

        return results, gradient

    results = fused(*given)
    outputs = results[0] if call.sequences else None
    return outputs, tuple(results[1:] if call.sequences else results)


def _carries_tangents(tensors: Sequence[Any]) -> bool:
    """Whether a ``tf.autodiff.ForwardAccumulator`` watches one of the tensors."""
    given = [t for t in tensors if isinstance(t, tf.Tensor)]
    return bool(forwardprop_util.pack_tangents(given).tangents)


def _unlooped(call: Call, x: Tensor) -> Call:
    """The same call for forward mode: TensorFlow's loops in a graph have none."""
    known = x.shape.as_list()[0] is not None and not tf.executing_eagerly()
    return replace(call, unroll=call.unroll or known)


def _tensors(inputs: Inputs) -> Inputs:
    """All of them plain tensors: variables are read here, outside the gradient."""
    return tf.nest.map_structure(
        lambda t: t if t is None or isinstance(t, str) else tf.convert_to_tensor(t), inputs
    )


def _plan(call: Call, inputs: Inputs) -> Plan:
    """Of the cell that the kernel runs: with masks on what recurs, one that multiplies by them."""
    cell, masks = call.cell, inputs.recurrent_mask
    if masks is not None:
        cell = with_recurrent_mask(cell, len(masks.shape) == 3)
    return plan(cell, call.hidden_size, inputs.x.dtype.name, "cpu", dict(call.sizes))


def _count(x: Tensor) -> int | None:
    """Rows of all steps, if they are known before the graph runs."""
    steps, rows = x.shape.as_list()[:2]  # in a graph of TensorFlow 1 a shape has no plain numbers
    return None if steps is None or rows is None else steps * rows


def _rows(x: Tensor) -> Tensor:
    """All rows of all steps as a matrix."""
    return tf.reshape(x, [-1, x.shape[-1]])


def _sizes(x: Tensor, axes: int) -> list[Any]:
    """The first sizes of a tensor: numbers, where they are known before the graph runs."""
    return [tf.shape(x)[i] if n is None else n for i, n in enumerate(x.shape.as_list()[:axes])]


Spread = Callable[[Sequence[Any]], Inputs]


def _flatten(inputs: Inputs) -> tuple[list[Tensor], Spread]:
    """What gradients flow to, without what is absent, and the way back."""
    names = [name for name, _ in inputs.linears]
    linears = [weight for _, weight in inputs.linears]
    parts: list[Tensor] = [*inputs[:5], *inputs.params, *linears, *inputs.initial, inputs.static]
    there = [i for i, part in enumerate(parts) if part is not None]
    params = 5 + len(inputs.params)
    states = params + len(names)

    def spread(flat: Sequence[Any]) -> Inputs:
        full: list[Any] = [None] * len(parts)
        for i, value in zip(there, flat, strict=True):
            full[i] = value
        linears = tuple(zip(names, full[params:states], strict=True))
        own, initial = tuple(full[5:params]), tuple(full[states:-1])
        x, kernel, recurrent_kernel, bias, recurrent_bias = full[:5]
        return Inputs(
            x, kernel, recurrent_kernel, bias, recurrent_bias, own, linears, initial, full[-1]
        )

    return [parts[i] for i in there], spread


def _gradient(
    recurrence: _Recurrence,
    flat: Sequence[Tensor],
    arriving: Sequence[Tensor],
    kept: Sequence[Tensor],
) -> Any:
    """The gradients of ``flat``, which can be differentiated again: through the composite."""
    arriving = [tf.convert_to_tensor(part) for part in arriving]  # behind a gather they are slices
    if _carries_tangents(arriving):
        return _first(recurrence, [*flat, *arriving], len(flat))
    if tf.executing_eagerly() and not record.could_possibly_record():
        return recurrence.backward(flat, arriving, kept)
    count = len(flat)

    @tf.custom_gradient
    def once(*args: Tensor) -> Any:
        found = recurrence.backward(args[:count], args[count:], kept)

        def twice(*seconds: Tensor) -> Any:
            return _second(recurrence, args, count, seconds)

        return found, twice

    return once(*flat, *arriving)


def _second(
    recurrence: _Recurrence, args: Sequence[Tensor], count: int, seconds: Sequence[Tensor]
) -> Any:
    with tf.GradientTape() as outer:
        outer.watch(args)
        first = _first(recurrence, args, count)
    return outer.gradient(first, args, seconds, tf.UnconnectedGradients.ZERO)


def _first(recurrence: _Recurrence, args: Sequence[Tensor], count: int) -> Any:
    """The gradients by the composite: of the first ``count`` of ``args``, for the others."""
    call, inputs = recurrence.call, recurrence.inputs
    if call.training and call.cell.keeps:
        raise NotImplementedError(
            f"second derivatives of {call.cell.name} in training: its random masks are drawn by "
            "the kernels. Take them with training=False."
        )
    if _carries_tangents(args):
        call = _unlooped(call, args[0])
    flags = {name: getattr(inputs, name) for name in ("mask", "resets", "recurrent_mask")}
    with tf.GradientTape() as inner:
        inner.watch(args[:count])
        outputs, final = composite(call, recurrence.spread(args[:count])._replace(**flags))
        ends = (outputs, *final) if call.sequences else final
    return inner.gradient(ends, args[:count], args[count:], tf.UnconnectedGradients.ZERO)


class _Recurrence:
    """The steps of a layer, and the input projection if it is the kernel's: on NumPy's views of
    tensors.
    """

    def __init__(
        self, call: Call, own: Plan, spread: Spread, inputs: Inputs, flags: Sequence[Tensor]
    ) -> None:
        self.call, self.plan, self.spread, self.inputs = call, own, spread, inputs
        self.flags = [flag for flag in flags if flag is not None]
        self.given = [flag is not None for flag in flags]
        self.threads = tf.config.threading.get_intra_op_parallelism_threads() or cpu.pool.threads()
        # Outputs that are zero under a mask are not the hidden states.
        self.apart = call.sequences and inputs.mask is not None and not call.repeat
        # States, besides the first, of whose sequence the backward pass reads.
        self.others = [name for name in call.cell.state_names[1:] if name in own.states]

    # -- on tensors --------------------------------------------------------------------------------

    def forward(
        self, flat: Sequence[Tensor], keep: bool
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Outputs, final states, and what the backward pass reads."""
        call, states = self.call, self.call.cell.states

        def compute(*args: Array) -> list[Array]:
            return self._forward(args[: len(flat)], args[len(flat) :], keep)

        own = call.sequences and (self.apart or not keep)  # outputs that the kernel hands on
        count = own + len(states) + (2 + len(self.others)) * keep
        found = self._call(compute, [*flat, *self.flags], count)
        outputs = found.pop(0) if own else None
        final, kept = found[: len(states)], found[len(states) :]
        if call.sequences and not own:
            # A view, made by TensorFlow: it then knows the memory shared.
            outputs = kept[0][1 : _sizes(flat[0], 1)[0] + 1]
        steps, rows = self.inputs.x.shape[:2]
        if outputs is not None:
            outputs.set_shape([steps, rows, call.size(states[0].size)])
        for state, declared in zip(final, states, strict=True):
            state.set_shape([rows, call.size(declared.size)])
        return outputs, final, kept

    def backward(
        self, flat: Sequence[Tensor], arriving: Sequence[Tensor], kept: Sequence[Tensor]
    ) -> list[Tensor]:
        """The gradient of each of ``flat``."""
        kept = kept or self.forward(flat, True)[2]
        first, last = len(flat), len(flat) + len(self.flags)

        def compute(*args: Array) -> list[Array]:
            ends, own = args[last : last + len(arriving)], args[last + len(arriving) :]
            return self._backward(args[:first], args[first:last], ends, own)

        call, cell, given = self.call, self.plan.cell, self.inputs
        factors = [self._factors(linear) for linear in cell.linears]
        count = 1 + len(cell.params) + len(cell.states) + (given.static is not None)
        count += sum(outputs + operand for outputs, operand in factors)
        found = iter(self._call(compute, [*flat, *self.flags, *arriving, *kept], count))
        dgates = next(found)
        dgates.set_shape([*given.x.shape[:2], len(cell.gates) * call.hidden_size])
        params = tuple([next(found) for _ in cell.params])
        initial = tuple([next(found) for _ in cell.states])
        static = None if given.static is None else next(found)
        rows, parts = _rows(dgates), dict[str, dict[str, Tensor]]()
        for linear, (outputs, operand) in zip(cell.linears, factors, strict=True):
            d = next(found) if outputs else rows
            before = next(found) if operand else self._before(kept[0])
            for name, own in self._products(linear, d, before).items():
                parts.setdefault(name, {}).update(own)
        declared = {l.weight: l.declared for l in cell.linears}
        columns = {l.weight for l in cell.linears if l.heads > 1} | {RECURRENT}
        weights = {
            name: _declared(declared[name.removesuffix("_bias")], own, int(name in columns))
            for name, own in parts.items()
        }
        dx, dkernel = dgates, None
        if given.kernel is not None:
            x, kernel = flat[:2]
            dx = tf.reshape(tf.matmul(rows, kernel, transpose_b=True), tf.shape(x))
            dkernel = tf.matmul(_rows(x), rows, transpose_a=True)
        grads = Inputs(
            dx,
            dkernel,
            weights.get(RECURRENT),
            None if given.bias is None else tf.reduce_sum(rows, axis=0),
            weights.get(f"{RECURRENT}_bias"),
            params,
            tuple([(name, weights[name]) for name, _ in given.linears]),
            initial,
            static,
        )
        wanted = _flatten(grads)[0]
        for grad, like in zip(wanted, flat, strict=True):
            grad.set_shape(like.shape)
        return wanted

    def _factors(self, linear: Linear) -> tuple[bool, bool]:
        """Which factors of a weight's gradient the kernel writes; see ``layer.Factors``."""
        operand = linear.operand
        first = operand.op == "state" and operand.attrs[0] == self.call.cell.state_names[0]
        return not self.plan.shares_gradient(linear), not first or self.inputs.resets is not None

    def _before(self, hidden: Tensor) -> Tensor:
        """The first state before each step, from its sequence."""
        before = hidden[2:] if self.call.reverse else hidden[:-1]
        return tf.reshape(before, [-1, self.call.size(self.call.cell.states[0].size)])

    def _products(self, linear: Linear, d: Tensor, operand: Tensor) -> dict[str, dict[str, Tensor]]:
        """The gradients of a matmul's weight and bias, by the matmul's outputs."""
        outputs, size = len(linear.outputs), self.call.size(linear.out_size)
        d.set_shape([None, outputs * size])
        found, name = {}, linear.weight
        biases = {f"{RECURRENT}_bias": self.inputs.recurrent_bias, **dict(self.inputs.linears)}
        if biases.get(f"{name}_bias") is not None:
            found[f"{name}_bias"] = tf.split(tf.reduce_sum(d, axis=0), outputs)
        if linear.heads > 1:
            d = tf.reshape(d, [-1, outputs, linear.heads, size // linear.heads])
            into = self.call.size(linear.in_size) // linear.heads
            operand = tf.reshape(operand, [-1, linear.heads, into])
            found[name] = tf.unstack(tf.einsum("rnho,rhi->nhoi", d, operand))
        elif name == RECURRENT:  # Keras's own: [in, out]
            found[name] = tf.split(tf.matmul(operand, d, transpose_a=True), outputs, axis=1)
        else:
            found[name] = tf.split(tf.matmul(d, operand, transpose_a=True), outputs)
        return {k: dict(zip(linear.outputs, own, strict=True)) for k, own in found.items()}

    def _call(
        self, compute: Callable[..., list[Array]], tensors: Sequence[Tensor], count: int
    ) -> list[Tensor]:
        """``compute`` on the memory of tensors: now, or where the graph runs."""
        if tf.executing_eagerly():
            return [_tensor(array) for array in compute(*map(np.asarray, tensors))]
        kinds = [self.plan.dtype] * count
        return list(tf.numpy_function(compute, tensors, kinds, stateful=False))

    # -- on arrays ---------------------------------------------------------------------------------

    def _forward(self, flat: Sequence[Array], flags: Sequence[Array], keep: bool) -> list[Array]:
        gates, weights, options = self._arguments(flat, flags)
        host = AlignedHost(self.plan.dtype)
        out, final, saved = layer.forward(host, self.plan, gates, [weights], options, keep=keep)
        found = [out] if self.call.sequences and (self.apart or not keep) else []
        found += [state[0] for state in final]
        if saved is not None:
            found += [saved.hidden, saved.values[0]]
            names = self.call.cell.state_names
            states = dict(zip(names, saved.states[0], strict=True))
            found += [states[name] for name in self.others]
        return found

    def _backward(
        self,
        flat: Sequence[Array],
        flags: Sequence[Array],
        arriving: Sequence[Array],
        kept: Sequence[Array],
    ) -> list[Array]:
        x, weights, options = self._arguments(flat, flags)
        # The gradient of the gates is asked for, as if they had been projected outside.
        weights.ih, width = None, len(self.call.cell.gates) * self.call.hidden_size
        gates = np.broadcast_to(x[:, :, :1], (*x.shape[:2], width))
        hidden, values, *others = kept
        sequences = dict(zip(self.others, others, strict=True))
        states = [sequences.get(name) for name in self.call.cell.state_names]
        reset = [] if weights.reset is None else [list(weights.reset)]
        saved = layer.Saved(gates, [weights], options, hidden, [states], [values], reset)
        dy, final = (arriving[0], arriving[1:]) if self.call.sequences else (None, arriving)
        host, factors = AlignedHost(self.plan.dtype), list[list[layer.Factors]]()
        dgates, (g,) = layer.backward(host, self.plan, saved, dy, [final], factors=factors)
        found = [dgates, *g.params, *g.initial, *([] if g.static is None else [g.static])]
        return found + [factor for pair in factors[0] for factor in pair if factor is not None]

    def _arguments(
        self, flat: Sequence[Array], flags: Sequence[Array]
    ) -> tuple[Array, layer.Weights, layer.Options]:
        given, call, later = self.spread(flat), self.call, iter(flags)
        mask, resets, seed, dropped = [next(later) if there else None for there in self.given]
        check(call, given._replace(mask=mask, resets=resets))  # of sizes that no graph knows
        ih, hh, reset = given.kernel, given.recurrent_kernel, None
        if resets is not None:
            resets = resets if mask is None else resets & mask
            states, dtype = call.cell.states, self.plan.dtype
            reset = [np.full(call.size(s.size), s.initial, dtype) for s in states]
        weights = layer.Weights(
            ih=None if ih is None else ih.T,
            hh=None if hh is None else hh.T,
            bias_ih=given.bias,
            bias_hh=given.recurrent_bias,
            params=given.params,
            initial=given.initial,
            reset=reset,
            static=given.static,
            recurrent_mask=dropped,
            linears=dict(given.linears),
            reverse=call.reverse,
        )
        options = layer.Options(
            mask=mask,
            resets=resets,
            repeat=call.repeat,
            training=call.training,
            seed=0 if seed is None else number(seed),
            threads=self.threads,
        )
        return given.x, weights, options


def _declared(declared: Sequence[str], used: dict[str, Tensor], axis: int) -> Tensor:
    """Gradients of a weight's outputs side by side, zero for those that the step does not use."""
    zero = tf.zeros_like(next(iter(used.values())))
    return tf.concat([used.get(name, zero) for name in declared], axis)


def _tensor(array: Array) -> Tensor:
    """An eager tensor, on the array's own memory where that may be."""
    if array.nbytes < 1 << 14 or array.ctypes.data % LINE or not array.flags.c_contiguous:
        return tf.constant(array)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
