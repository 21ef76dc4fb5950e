"""A layer on TensorFlow: its own matmuls around the fused kernels, which see its tensors' memory.

The input projection, unless it is so small that the kernel computes it, and the gradients of input
and weights are operations of TensorFlow's; it leaves out those that are not needed. The recurrence
between them is one operation of ours with a gradient. Eager mode calls its kernels directly.
A graph calls them through the callback of a ``tf.numpy_function``, which is public, runs wherever
TensorFlow does, and passes memory in both directions without a copy where it begins on a cache
line; ours always does. What the backward pass reads are outputs of that operation, so that loops,
replicas and pruning treat it like any other tensor.

In 16 bits the operation is the whole layer, because TensorFlow's matmuls round their sums, and with
weights of 8 bits, because it does not multiply them.

TensorFlow keeps callbacks and registered gradients for ever. So there is one callback and one
gradient for each direction, for all layers. They look up what to do for an operation by a number
in it, and the entry is freed with the last graph that has that number.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.python.eager import forwardprop_util, record  # open tapes have no public name
from tensorflow.python.framework import ops as graphs
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops import control_flow_v2_func_graphs as control_flow_graphs
from tensorflow.python.saved_model import save_context

from anycell import layer
from anycell.engines import cpu
from anycell.keras.call import (
    KERNELS,
    Arrays,
    Result,
    Tensor,
    check,
    dequantized,
    number,
    quantized,
)
from anycell.keras.composite import composite
from anycell.keras.host import LINE, AlignedHost, host_of
from anycell.keras.rule import asked, planned
from anycell.lang.cell import Linear
from anycell.lang.namespaces import namespace
from anycell.layer.rounding import with_integers
from anycell.plan import Call, Options, Plan, plan

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


def recur(call: Call, arrays: Arrays) -> Result:
    """Runs a layer on the kernels where they can be called, else step by step."""
    cell, dtype = call.cell, arrays["x"].dtype.name
    chosen = planned(cell, call.hidden_size, dtype, dict(call.sizes))
    elsewhere = isinstance(chosen, str) or on_gpu(arrays["x"]) or refusal() is not None
    arrays = _tensors(arrays)
    check(call, arrays)
    return (composite if elsewhere else run)(call, arrays)


@tf.autograph.experimental.do_not_convert
def run(call: Call, arrays: Arrays) -> Result:
    """Runs a layer on the fused kernels, differentiable as often as wanted."""
    arrays, integers = _tensors(arrays), quantized(arrays)
    if integers and (call.options.training or record.could_possibly_record()):
        arrays, integers = dequantized(arrays), False
    if integers:
        arrays = with_integers(namespace(arrays["x"]), arrays)
    x, mask, kernel = arrays["x"], arrays.get("mask"), arrays.get("kernel")
    if kernel is not None and x.shape[-1] is None:
        x = tf.ensure_shape(x, [None, None, kernel.shape[0]])
    if _carries_tangents(tf.nest.flatten(arrays)):  # a gradient of ours knows no forward mode
        return composite(_unlooped(call, x), arrays)
    draws = call.options.training and call.cell.keeps
    if x.shape[0] == 1 and not (integers or draws or tf.executing_eagerly()):
        # Nothing to fuse over time, and less to do than to call a kernel takes.
        return composite(call, arrays)
    cell = layer.stepped(call.cell, arrays.get("recurrent_mask"))
    dtype = "int8" if integers else x.dtype.name
    chosen = plan(cell, call.hidden_size, dtype, "cpu", dict(call.sizes))
    whole = chosen.types.mixed or integers
    if mask is not None and not whole:  # NaN under a mask must not reach a gradient
        kept = tf.where(tf.expand_dims(mask, -1), x, tf.zeros((), x.dtype))
        if not (x.shape + mask.shape).is_fully_defined():  # one step or row must not become many
            kept = tf.reshape(kept, tf.shape(x))
        x = kept
    projects = kernel is not None
    if projects and not whole and not layer.projects(chosen, _count(x), x.shape.as_list()[-1]):
        gates = tf.matmul(_rows(x), kernel)
        x, projects = tf.reshape(gates, [*_sizes(x, 2), gates.shape[-1]]), False
    parts = {n: t for n, t in arrays.items() if n not in _FLAGS and (projects or n != "kernel")}
    flags = {n: arrays[n] for n in _FLAGS if n in arrays}
    flags |= {n: tf.cast(t, tf.uint8) for n, t in flags.items() if n in ("mask", "resets")}
    # Whether anyone will ask for a gradient is not known; without a tape in sight it is unlikely,
    # and the backward pass then runs the forward pass again.
    keep = call.options.training or record.could_possibly_record()
    recurrence = (_Layer if whole else _Recurrence)(
        call,
        chosen,
        parts=tuple(parts),
        flags=tuple(flags),
        keep=keep,
        threads=tf.config.threading.get_intra_op_parallelism_threads() or cpu.pool.threads(),
    )
    flat, given = list((parts | {"x": x}).values()), list(flags.values())
    outputs, final, kept = recurrence.forward(flat, given)

    def gradient(*arriving: Tensor) -> Any:
        return _gradient(recurrence, flat, given, arriving, kept)

    ends = [outputs, *final] if call.outputs else final
    ends = _differentiable(FORWARD, ends, flat, gradient)
    return (ends[0], tuple(ends[1:])) if call.outputs else (None, tuple(ends))


# Of the tensors of a run those that no gradient flows to.
_FLAGS = ("mask", "resets", "seed", "recurrent_mask")


def _carries_tangents(tensors: Sequence[Any]) -> bool:
    """Whether a ``tf.autodiff.ForwardAccumulator`` watches one of the tensors."""
    given = [t for t in tensors if isinstance(t, tf.Tensor)]
    return bool(forwardprop_util.pack_tangents(given).tangents)


def _unlooped(call: Call, x: Tensor) -> Call:
    """Runs the call for forward mode, which TensorFlow's loops in a graph do not have."""
    known = x.shape.as_list()[0] is not None and not tf.executing_eagerly()
    return call._replace(unroll=call.unroll or known)


def _tensors(arrays: Arrays) -> Arrays:
    """All of them plain tensors: variables are read here, outside the gradient."""
    return {name: tf.convert_to_tensor(array) for name, array in arrays.items()}


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


# -- derivatives -----------------------------------------------------------------------------------

FORWARD, BACKWARD = "AnycellRecurrence", "AnycellRecurrenceGradient"


def _differentiable(
    name: str, results: Sequence[Tensor], args: Sequence[Tensor], gradient: Callable[..., Any]
) -> list[Tensor]:
    """``results``, whose gradient for ``args`` is ``gradient``.

    As ``tf.custom_gradient`` does it, but that registers a function for every graph, which keeps
    the graph for ever. Ours are registered once, by ``name``, and find all they need from the
    operation.
    """
    if tf.executing_eagerly():
        outputs = [tf.identity(result) for result in results]
        record.record_operation(name, outputs, [*args], gradient)
        return outputs
    inputs, count = [*results, *args], len(results)
    with graphs.get_default_graph().gradient_override_map({"IdentityN": name}):
        outputs = list(tf.identity_n(inputs))

    def recorded(*arriving: Tensor) -> list[Tensor]:
        return [None] * count + list(gradient(*arriving[:count]))

    record.record_operation(name, outputs, inputs, recorded)
    return outputs[:count]


def _kernels(op: Any) -> tuple[_Recurrence, list[Tensor], list[Tensor]]:
    """The kernels behind an operation of ``_differentiable``, their inputs and outputs."""
    source = next(t.op for t in op.inputs if t.op.type == "PyFuncStateless")  # results come first
    number, *inputs = source.inputs
    return _work[int(tf.get_static_value(number))].__self__, inputs, list(source.outputs)


@tf.RegisterGradient(FORWARD)
def _of_forward(op: Any, *arriving: Tensor) -> list[Tensor]:
    recurrence, inputs, outputs = _kernels(op)
    flat, flags, _ = recurrence.sort(inputs)
    count = len(op.inputs) - len(flat)
    kept = outputs[len(outputs) - recurrence.kept :]
    return [None] * count + list(_gradient(recurrence, flat, flags, arriving[:count], kept))


@tf.RegisterGradient(BACKWARD)
def _of_backward(op: Any, *seconds: Tensor) -> list[Tensor]:
    recurrence, inputs, _ = _kernels(op)
    flat, flags, rest = recurrence.sort(inputs)
    count = len(flat)
    arriving = rest[: len(op.inputs) - 2 * count]
    return [None] * count + list(
        _second(recurrence, flags, [*flat, *arriving], count, seconds[:count])
    )


def _gradient(
    recurrence: _Recurrence,
    flat: Sequence[Tensor],
    flags: Sequence[Tensor],
    arriving: Sequence[Tensor],
    kept: Sequence[Tensor],
) -> Any:
    """The gradients of ``flat``, which can be differentiated again: through the composite."""
    arriving = [tf.convert_to_tensor(part) for part in arriving]  # behind a gather they are slices
    args = [*flat, *arriving]
    if _carries_tangents(arriving):
        return _first(recurrence, flags, args, len(flat))
    grads = recurrence.backward(flat, flags, arriving, kept)
    if tf.executing_eagerly() and not record.could_possibly_record():
        return grads

    def twice(*seconds: Tensor) -> Any:
        return _second(recurrence, flags, args, len(flat), seconds)

    return _differentiable(BACKWARD, grads, args, twice)


def _second(
    recurrence: _Recurrence,
    flags: Sequence[Tensor],
    args: Sequence[Tensor],
    count: int,
    seconds: Sequence[Tensor],
) -> Any:
    with tf.GradientTape() as outer:
        outer.watch(args)
        first = _first(recurrence, flags, args, count)
    return outer.gradient(first, args, seconds, tf.UnconnectedGradients.ZERO)


def _first(
    recurrence: _Recurrence, flags: Sequence[Tensor], args: Sequence[Tensor], count: int
) -> Any:
    """The gradients by the composite: of the first ``count`` of ``args``, for the others."""
    call = recurrence.call
    if call.options.training and call.cell.keeps:
        raise NotImplementedError(
            f"second derivatives of {call.cell.name} in training: its random masks are drawn by "
            "the kernels. Take them with training=False."
        )
    if _carries_tangents(args):
        call = _unlooped(call, args[0])
    given = dict(zip(recurrence.flags, flags, strict=True))
    given |= {n: tf.cast(t, "bool") for n, t in given.items() if n in ("mask", "resets")}
    with tf.GradientTape() as inner:
        inner.watch(args[:count])
        parts = dict(zip(recurrence.parts, args[:count], strict=True))
        outputs, final = composite(call, parts | given)
        ends = (outputs, *final) if call.outputs else final
    return inner.gradient(ends, args[:count], args[count:], tf.UnconnectedGradients.ZERO)


# -- the way out of a graph ------------------------------------------------------------------------

# What the numbers in operations stand for.
_work: dict[int, Any] = {}
_numbers = itertools.count()
# Names of nodes appear in the errors of XLA, TensorFlow Lite and TensorFlow Serving.
_NODE = "anycell.keras.step_by_step_traces_it_without"
_REFUSAL = (
    "anycell: this function calls fused kernels, which only this process has. To save it, trace it "
    "within anycell.keras.step_by_step()"
)


def _out_of_graph(
    compute: Callable[..., list[Array]], tensors: Sequence[Tensor], kinds: Sequence[Any]
) -> list[Tensor]:
    """``compute``, a method on arrays, as an operation of the graph that is being traced."""
    number, graph = next(_numbers), graphs.get_default_graph()
    _work[number] = compute
    while isinstance(graph, control_flow_graphs.ControlFlowFuncGraph):
        graph = graph.outer_graph  # a loop or branch has no life of its own, but its function
    if isinstance(graph, FuncGraph):  # not one of TensorFlow 1, which keeps its callbacks for ever
        with tf.init_scope(), tf.device("CPU:0"):
            # No variable is behind it. It is there to live as long as a graph that captures it, and
            # TensorFlow refuses to save a function that does, in words that contain its name.
            # Of each call another one: XLA takes none twice.
            name = f"{_REFUSAL} (call {number})"
            handle = tf.raw_ops.VarHandleOp(dtype=tf.bool, shape=[], shared_name=name)
        weakref.finalize(handle, _work.pop, number).atexit = False
        graph.capture(handle, name=_NODE)
    return list(
        tf.raw_ops.PyFuncStateless(  # TensorFlow Lite? Trace it in anycell.keras.step_by_step()
            # Its errors quote the line above, and no name of a node.
            input=[tf.constant(number, tf.int64), *tensors],
            token=_callback()[0],
            Tout=kinds,
            name=_NODE,
        )
    )


@functools.cache
def _callback() -> tuple[bytes, Any]:
    """The token of the one callback, and the graph with which TensorFlow would forget it."""
    graph = tf.Graph()
    with graph.as_default():
        (output,) = tf.numpy_function(_called, [0], [tf.float32], stateful=False)
    return output.op.get_attr("token"), graph


def _called(number: Array, *arrays: Array) -> list[Array]:
    return list(_work[int(number)](*arrays))


@dataclass(frozen=True)
class _Recurrence:
    """The steps of a layer, and the input projection if the kernel computes it, on NumPy's views of
    tensors. It holds no tensors, because it outlives them.

    Attributes:
        call: what is run.
        plan: of its kernels.
        parts: the names of what gradients flow to; the tensors are ``flat`` below, x the first.
        flags: the names of the others, of ``_FLAGS``.
        keep: whether the forward pass keeps what the backward pass reads.
        threads: how many at most.
    """

    call: Call
    plan: Plan
    parts: tuple[str, ...]
    flags: tuple[str, ...]
    keep: bool
    threads: int

    @property
    def apart(self) -> bool:
        """Whether outputs, zero under a mask, are not the hidden states."""
        return self.call.outputs and self.call.options.apart("mask" in self.flags)

    @property
    def others(self) -> list[str]:
        """States, besides the first, of whose sequence the backward pass reads."""
        return [name for name in self.call.cell.state_names[1:] if name in self.plan.states]

    @property
    def kept(self) -> int:
        """Counts the last outputs of the forward pass that the backward pass reads."""
        return (2 + len(self.others)) * self.keep

    def sort(self, tensors: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """``flat``, flags and what follows them."""
        first, last = len(self.parts), len(self.parts) + len(self.flags)
        return list(tensors[:first]), list(tensors[first:last]), list(tensors[last:])

    # -- on tensors --------------------------------------------------------------------------------

    def forward(
        self, flat: Sequence[Tensor], flags: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Outputs, final states, and what the backward pass reads."""
        call, states = self.call, self.call.cell.states
        # Whether the outputs are an array apart from the states, which the kernel returns too.
        separate = call.outputs and (self.apart or not self.keep)
        kinds = [self._kind] * (separate + len(states) + self.kept)
        if self.keep and self.others:
            kinds[-len(self.others) :] = [tf.as_dtype(self.plan.types.math.name)] * len(self.others)
        results = self._run(self._forward, [*flat, *flags], kinds)
        outputs = results.pop(0) if separate else None
        final, kept = results[: len(states)], results[len(states) :]
        if call.outputs and not separate:
            # A view, made by TensorFlow: it then knows the memory shared.
            outputs = kept[0][1 : _sizes(flat[0], 1)[0] + 1]
        steps, rows = flat[0].shape[:2]
        if outputs is not None:
            outputs.set_shape([steps, rows, call.size(states[0].size)])
        for state, declared in zip(final, states, strict=True):
            state.set_shape([rows, call.size(declared.size)])
        return outputs, final, kept

    def backward(
        self,
        flat: Sequence[Tensor],
        flags: Sequence[Tensor],
        arriving: Sequence[Tensor],
        kept: Sequence[Tensor],
    ) -> list[Tensor]:
        """The gradient of each of ``flat``."""
        kept = kept or replace(self, keep=True).forward(flat, flags)[2]
        call, cell = self.call, self.plan.cell
        given = dict(zip(self.parts, flat, strict=True))
        factors = [self._factors(linear) for linear in cell.linears]
        direct = self._direct
        count = 1 + len(direct) + sum(outputs + operand for outputs, operand in factors)
        tensors = [*flat, *flags, *arriving, *kept]
        results = iter(self._run(self._backward, tensors, [self._kind] * count))
        dgates = next(results)
        dgates.set_shape([*given["x"].shape[:2], len(cell.gates) * call.hidden_size])
        grads = {name: next(results) for name in direct}
        rows, parts = _rows(dgates), dict[str, dict[str, Tensor]]()
        for linear, (outputs, operand) in zip(cell.linears, factors, strict=True):
            d = next(results) if outputs else rows
            before = next(results) if operand else self._before(kept[0])
            for name, products in self._products(given, linear, d, before).items():
                parts.setdefault(name, {}).update(products)
        for linear in {l.weight: l for l in cell.linears}.values():
            weight = "recurrent_kernel" if linear.recurrent else linear.weight
            columns = int(linear.recurrent or linear.heads > 1)
            for name, axis in ((weight, columns), (linear.bias_name, 0)):
                if name in parts:
                    grads[name] = _declared(linear.declared, parts[name], axis)
        grads["x"] = dgates
        if "kernel" in given:
            x, kernel = given["x"], given["kernel"]
            grads["x"] = tf.reshape(tf.matmul(rows, kernel, transpose_b=True), tf.shape(x))
            grads["kernel"] = tf.matmul(_rows(x), rows, transpose_a=True)
        if "bias_ih" in given:
            grads["bias_ih"] = tf.reduce_sum(rows, axis=0)
        for name, like in given.items():
            if name not in grads:  # of a matmul that the step does not use
                grads[name] = tf.zeros_like(like)
            grads[name].set_shape(like.shape)
        return [grads[name] for name in self.parts]

    @property
    def _direct(self) -> list[str]:
        """Names arrays whose gradients the kernel sums: parameters, states, the static input."""
        cell = self.plan.cell
        states = [f"state {name}" for name in cell.state_names]
        names = [*cell.param_names, *states, "static"]
        return [name for name in names if name in self.parts]

    def _factors(self, linear: Linear) -> tuple[bool, bool]:
        """The factors of a weight's gradient that the kernel writes; see ``layer.Factors``."""
        operand = linear.operand
        first = operand.op == "state" and operand.attrs[0] == self.call.cell.state_names[0]
        return not self.plan.shares_gradient(linear), not first or "resets" in self.flags

    def _before(self, hidden: Tensor) -> Tensor:
        """The first state before each step, from its sequence."""
        before = hidden[2:] if self.call.options.reverse[0] else hidden[:-1]
        return tf.reshape(before, [-1, self.call.size(self.call.cell.states[0].size)])

    def _products(
        self, given: Arrays, linear: Linear, d: Tensor, operand: Tensor
    ) -> dict[str, dict[str, Tensor]]:
        """The gradients of a matmul's weight and bias, by the matmul's outputs."""
        outputs, size = len(linear.outputs), self.call.size(linear.out_size)
        d.set_shape([None, outputs * size])
        products = {}
        if linear.bias_name in given:
            products[linear.bias_name] = tf.split(tf.reduce_sum(d, axis=0), outputs)
        if linear.heads > 1:
            d = tf.reshape(d, [-1, outputs, linear.heads, size // linear.heads])
            into = self.call.size(linear.in_size) // linear.heads
            operand = tf.reshape(operand, [-1, linear.heads, into])
            products[linear.weight] = tf.unstack(tf.einsum("rnho,rhi->nhoi", d, operand))
        elif linear.recurrent:  # Keras's own: [in, out]
            product = tf.matmul(operand, d, transpose_a=True)
            products["recurrent_kernel"] = tf.split(product, outputs, axis=1)
        else:
            products[linear.weight] = tf.split(tf.matmul(d, operand, transpose_a=True), outputs)
        return {k: dict(zip(linear.outputs, parts, strict=True)) for k, parts in products.items()}

    @property
    def _kind(self) -> Any:
        return tf.as_dtype(self.plan.types.storage.name)

    def _run(
        self, compute: Callable[..., list[Array]], tensors: Sequence[Tensor], kinds: Sequence[Any]
    ) -> list[Tensor]:
        """``compute`` on the memory of tensors: now, or where the graph runs, where what it returns
        must have such dtypes.
        """
        if tf.executing_eagerly():
            return [_tensor(array) for array in compute(*map(np.asarray, tensors))]
        return _out_of_graph(compute, tensors, kinds)

    # -- on arrays ---------------------------------------------------------------------------------

    def _forward(self, *tensors: Array) -> list[Array]:
        flat, flags, _ = self.sort(tensors)
        arrays, options = self._arguments(flat, flags)
        keep = self.keep
        out, final, kept = layer.forward(self._host, self.plan, arrays, options, keep=keep)
        results = [out] if self.call.outputs and (self.apart or not keep) else []
        results += [state[0] for state in final]
        return results if kept is None else [*results, *kept.flat()]

    def _backward(self, *tensors: Array) -> list[Array]:
        arrays, options, *rest = self._arriving(tensors)
        # The gradient of the gates is asked for, as if they had been projected outside.
        if arrays.pop("weight_ih", None) is not None:
            x, width = arrays["x"], len(self.call.cell.gates) * self.call.hidden_size
            arrays["x"] = np.broadcast_to(x[:, :, :1], (*x.shape[:2], width))
        factors = list[list[layer.Factors]]()
        grads = layer.backward(self._host, self.plan, arrays, options, *rest, factors=factors)
        results = [_gradient_of(name, grads) for name in ("x", *self._direct)]
        return results + [factor for pair in factors[0] for factor in pair if factor is not None]

    @property
    def _host(self) -> AlignedHost:
        return host_of(self.plan.types)

    def _arriving(self, tensors: Sequence[Array]) -> tuple[Any, ...]:
        """The arguments of ``layer.backward`` besides host and plan."""
        flat, flags, rest = self.sort(tensors)
        ends, names = len(self.call.cell.states) + self.call.outputs, self.call.cell.state_names
        arriving, kept = rest[:ends], rest[ends:]
        dy, final = (arriving[0], arriving[1:]) if self.call.outputs else (None, arriving)
        there = [name in self.others for name in names]
        return (
            *self._arguments(flat, flags),
            layer.Kept.of(kept, there, 1),
            dy,
            [d[None] for d in final],
        )

    def _arguments(
        self, flat: Sequence[Array], flags: Sequence[Array]
    ) -> tuple[dict[str, Array], Options]:
        """The arguments of ``anycell.layer``, which knows no kernels of Keras's."""
        call, arrays = self.call, dict(zip(self.parts, flat, strict=True))
        arrays |= dict(zip(self.flags, flags, strict=True))
        check(call, arrays)  # of sizes that no graph knows
        for theirs, ours in KERNELS.items():
            if theirs in arrays:
                arrays[ours] = arrays.pop(theirs).T
        seed = arrays.pop("seed", None)
        for name in call.cell.state_names:
            arrays[f"state {name}"] = arrays[f"state {name}"][None]
        drawn = 0 if seed is None else number(seed)
        return arrays, call.options._replace(seed=drawn, threads=self.threads)


class _Layer(_Recurrence):
    """A whole layer: its matmuls too are ours."""

    def backward(
        self,
        flat: Sequence[Tensor],
        flags: Sequence[Tensor],
        arriving: Sequence[Tensor],
        kept: Sequence[Tensor],
    ) -> list[Tensor]:
        """The gradient of each of ``flat``."""
        if self.plan.types.quantized:
            raise NotImplementedError(
                "gradients: asked for outside of a tape, of a layer with weights of 8 bits. Call "
                "it within a GradientTape, where it runs with the real weights."
            )
        kept = kept or replace(self, keep=True).forward(flat, flags)[2]
        tensors = [*flat, *flags, *arriving, *kept]
        grads = self._run(self._backward, tensors, [self._kind] * len(flat))
        for i, (name, like) in enumerate(zip(self.parts, flat, strict=True)):
            if name in KERNELS:
                grads[i] = tf.transpose(grads[i])
            grads[i].set_shape(like.shape)
        return grads

    def _backward(self, *tensors: Array) -> list[Array]:
        grads = layer.backward(self._host, self.plan, *self._arriving(tensors))
        return [_gradient_of(KERNELS.get(name, name), grads) for name in self.parts]


def _gradient_of(name: str, gradients: dict[str, Array]) -> Array:
    """One of a layer's gradients; states have an axis of directions there."""
    return gradients[name][0] if name.startswith("state ") else gradients[name]


def _declared(declared: Sequence[str], used: dict[str, Tensor], axis: int) -> Tensor:
    """Gradients of a weight's outputs side by side, zero for those that the step does not use."""
    zero = tf.zeros_like(next(iter(used.values())))
    return tf.concat([used.get(name, zero) for name in declared], axis)


def _tensor(array: Array) -> Tensor:
    """An eager tensor, on the array's own memory where that may be."""
    if array.nbytes < 1 << 14 or array.ctypes.data % LINE or not array.flags.c_contiguous:
        return tf.constant(array)
    if array.dtype.kind == "V":  # bfloat16, which NumPy does not hand over by that name
        return tf.bitcast(_shared(array.view(np.uint16)), tf.bfloat16)
    return _shared(array)


def _shared(array: Array) -> Tensor:
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
