"""A layer on TensorFlow: the fused kernels on the memory of its tensors, under one gradient.

In eager mode the kernels are called at once. In a graph they stand behind ``tf.numpy_function``,
which is public, runs wherever TensorFlow does, and hands memory over in both directions without a
copy where it begins on a cache line; ours always does. What the backward pass reads are outputs of
that operation, so that loops, replicas and pruning treat it like any other tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.python.eager import record  # which tapes are open has no public name
from tensorflow.python.framework import ops as graphs
from tensorflow.python.ops import control_flow_util
from tensorflow.python.saved_model import save_context

from anycell import layer
from anycell.engines import cpu
from anycell.keras import blas
from anycell.keras.call import Call, Inputs, Result, Tensor
from anycell.keras.composite import composite
from anycell.keras.host import LINE, AlignedHost
from anycell.keras.rule import planned
from anycell.plan import Plan, plan

Array = npt.NDArray[Any]


def on_gpu(x: Tensor) -> bool:
    """Whether TensorFlow would run an operation on ``x`` on a GPU."""
    if "GPU" in x.device or not tf.config.list_logical_devices("GPU"):
        return "GPU" in x.device
    return "CPU" not in x.device  # a graph places what has no device of its own


def refusal() -> str | None:
    """Why the kernels cannot be called here and now, or None: looks at what is being traced."""
    if tf.executing_eagerly():
        return None
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
    return (composite if elsewhere else run)(call, _tensors(inputs))


@tf.autograph.experimental.do_not_convert
def run(call: Call, inputs: Inputs) -> Result:
    """Runs a layer on the fused kernels, differentiable as often as wanted."""
    chosen = plan(call.cell, call.hidden_size, inputs.x.dtype.name, "cpu", dict(call.sizes))
    inputs = _tensors(inputs)
    given, spread = _flatten(inputs)
    kernel = _Kernel(call, chosen, spread, [name for name, _ in inputs.linears])
    mask, resets = [
        None if f is None else tf.cast(f, tf.uint8) for f in (inputs.mask, inputs.resets)
    ]
    flags = _Flags(mask, resets, inputs.seed)
    # Whether anyone will ask for a gradient is not known; without a tape in sight it is unlikely,
    # and the backward pass then runs the forward pass again.
    keep = call.training or record.could_possibly_record()
    need_x = not record.could_possibly_record() or record.should_record_backprop([inputs.x])
    steps, rows = inputs.x.shape[:2]
    step = _Eager(kernel, flags) if tf.executing_eagerly() else _Graph(kernel, flags, steps, rows)

    @tf.custom_gradient
    def fused(*flat: Tensor) -> Any:
        results, saved = step.forward(flat, keep)

        def gradient(*arriving: Tensor) -> Any:
            return _gradient(step, inputs, flat, arriving, saved, need_x)

        return results, gradient

    results = fused(*given)
    outputs = results[0] if call.sequences else None
    return outputs, tuple(results[1:] if call.sequences else results)


def _tensors(inputs: Inputs) -> Inputs:
    """All of them plain tensors: variables are read here, outside the gradient."""
    return tf.nest.map_structure(
        lambda t: t if t is None or isinstance(t, str) else tf.convert_to_tensor(t), inputs
    )


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
    step: _Eager | _Graph,
    inputs: Inputs,
    flat: Sequence[Tensor],
    arriving: Sequence[Tensor],
    saved: Any,
    need_x: bool,
) -> Any:
    """The gradients of ``flat``, which can be differentiated again: through the composite."""
    if isinstance(step, _Eager) and not record.could_possibly_record():
        return step.backward(flat, arriving, saved, need_x)
    count = len(flat)
    need_x = need_x or isinstance(step, _Eager)  # an open tape may want it now

    @tf.custom_gradient
    def once(*args: Tensor) -> Any:
        found = step.backward(args[:count], args[count:], saved, need_x)

        def twice(*seconds: Tensor) -> Any:
            return _second(step.kernel, inputs, args, count, seconds)

        return found, twice

    return once(*flat, *arriving)


def _second(
    kernel: _Kernel, inputs: Inputs, args: Sequence[Tensor], count: int, seconds: Sequence[Tensor]
) -> Any:
    call = kernel.call
    if call.training and call.cell.keeps:
        raise NotImplementedError(
            f"second derivatives of {call.cell.name} in training: its random masks are drawn by "
            "the kernels. Take them with training=False."
        )
    flags = {"mask": inputs.mask, "resets": inputs.resets}
    with tf.GradientTape() as outer:
        outer.watch(args)
        with tf.GradientTape() as inner:
            inner.watch(args[:count])
            outputs, final = composite(call, kernel.spread(args[:count])._replace(**flags))
            ends = (outputs, *final) if call.sequences else final
        first = inner.gradient(ends, args[:count], args[count:], tf.UnconnectedGradients.ZERO)
    return outer.gradient(first, args, seconds, tf.UnconnectedGradients.ZERO)


# -- the two ways to call a kernel -----------------------------------------------------------------


class _Flags(NamedTuple):
    mask: Tensor
    resets: Tensor
    seed: Tensor


class _Kernel:
    """A layer as functions of NumPy arrays, which are views of TensorFlow's memory."""

    def __init__(self, call: Call, chosen: Plan, spread: Spread, linears: Sequence[str]) -> None:
        self.call, self.plan, self.spread, self.linears = call, chosen, spread, linears
        self.threads = tf.config.threading.get_intra_op_parallelism_threads() or cpu.pool.threads()

    def _weights(self, flat: Sequence[Array], resets: bool) -> layer.Weights:
        given, cell = self.spread(flat), self.call.cell
        initial = [np.full(self.call.size(s.size), s.initial, self.plan.dtype) for s in cell.states]
        hh = given.recurrent_kernel
        return layer.Weights(
            ih=given.kernel.T,
            hh=None if hh is None else hh.T,
            bias_ih=given.bias,
            bias_hh=given.recurrent_bias,
            params=given.params,
            initial=given.initial,
            reset=initial if resets else None,
            static=given.static,
            linears=dict(given.linears),
            reverse=self.call.reverse,
        )

    def _options(self, flags: _Flags) -> layer.Options:
        return layer.Options(
            mask=flags.mask,
            resets=flags.resets,
            repeat=self.call.repeat,
            training=self.call.training,
            seed=0 if flags.seed is None else int(flags.seed),
            threads=self.threads,
        )

    def forward(
        self, flat: Sequence[Array], flags: _Flags, keep: bool, whole: bool = False
    ) -> tuple[Array, list[Array], layer.Saved | None]:
        """Outputs, final states, and what the backward pass needs.

        What is handed on without a copy are the outputs or, if ``whole``, all hidden states.
        """
        weights = self._weights(flat, flags.resets is not None)
        x = self.spread(flat).x
        options = self._options(flags)
        second = not whole and (flags.mask is None or options.repeat)
        host = AlignedHost(self.plan.dtype, self.threads, second)
        with blas.alone():
            out, finals, saved = layer.forward(host, self.plan, x, [weights], options, keep=keep)
        return out, [final[0] for final in finals], saved

    def again(self, flat: Sequence[Array], flags: _Flags, kept: Sequence[Array]) -> layer.Saved:
        """What the forward pass saved, from the arrays of ``keepsake``."""
        weights = self._weights(flat, flags.resets is not None)
        hidden, values, *rest = kept
        later = iter(rest)
        states = [
            next(later) if i and state.name in self.plan.states else None
            for i, state in enumerate(self.call.cell.states)
        ]
        options = self._options(flags)
        if flags.mask is not None and flags.resets is not None:
            options = replace(options, resets=flags.resets & flags.mask)
        reset = [] if flags.resets is None else [list(weights.reset or ())]
        x = self.spread(flat).x
        return layer.Saved(x, [weights], options, hidden, [states], [values], reset)

    def keepsake(self, saved: layer.Saved) -> list[Array]:
        """The arrays that a graph carries to the backward pass."""
        names = self.call.cell.state_names
        kept = [s for s, n in zip(saved.states[0], names, strict=True) if n in self.plan.states]
        return [saved.hidden, saved.values[0], *[s for s in kept[1:] if s is not None]]

    def backward(
        self, saved: layer.Saved, dy: Array | None, d_final: Sequence[Array], need_x: bool
    ) -> Inputs:
        """The gradients; those of matrices are transposed."""
        host = AlignedHost(self.plan.dtype, self.threads)
        with blas.alone():
            dx, (g,) = layer.backward(host, self.plan, saved, dy, [d_final], need_x=need_x)
        biases, states = (g.bias_ih, g.bias_hh), tuple(g.initial)
        linears = tuple((name, g.linears[name]) for name in self.linears)
        return Inputs(dx, g.ih, g.hh, *biases, tuple(g.params), linears, states, g.static)

    def split(self, arriving: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        """The gradient of the outputs, if there are any, and those of the final states."""
        return (arriving[0], arriving[1:]) if self.call.sequences else (None, arriving)


class _Eager:
    """At once."""

    def __init__(self, kernel: _Kernel, flags: _Flags) -> None:
        self.kernel = kernel
        self.flags = _Flags(*(None if f is None else np.asarray(f) for f in flags))

    def forward(self, flat: Sequence[Tensor], keep: bool) -> tuple[Any, Any]:
        """The results as tensors, and what was saved."""
        arrays = [np.asarray(t) for t in flat]
        out, final, saved = self.kernel.forward(arrays, self.flags, keep)
        results = [out, *final] if self.kernel.call.sequences else final
        return tuple(map(_tensor, results)), saved

    def backward(
        self, flat: Sequence[Tensor], arriving: Sequence[Tensor], saved: Any, need_x: bool
    ) -> list[Tensor]:
        """The gradient of each of ``flat``."""
        kernel = self.kernel
        if saved is None:
            _, _, saved = kernel.forward([np.asarray(t) for t in flat], self.flags, True)
        dy, d_final = kernel.split([np.asarray(d) for d in arriving])
        grads = _flatten(kernel.backward(saved, dy, d_final, need_x))[0]
        shaped = [_tensor(g) for g in grads] if need_x else [None, *map(_tensor, grads)]
        found = _flatten(_keras_layout(kernel.spread(shaped)))[0]
        return found if need_x else [None, *found]


class _Graph:
    """Behind an operation of the graph."""

    def __init__(self, kernel: _Kernel, flags: _Flags, steps: int | None, rows: int | None) -> None:
        self.kernel, self.steps, self.rows = kernel, steps, rows
        self.flags = [f for f in flags if f is not None]
        self.there = [f is not None for f in flags]

    def _arrays(self, args: Sequence[Array]) -> tuple[Sequence[Array], _Flags]:
        """The arguments of an operation, apart."""
        count = len(self.flags)
        flags = iter(args[len(args) - count :])
        flat = args[: len(args) - count]
        return flat, _Flags(*(next(flags) if there else None for there in self.there))

    def forward(self, flat: Sequence[Tensor], keep: bool) -> tuple[Any, Any]:
        """The results, and the tensors that the backward pass reads."""
        kernel, call = self.kernel, self.kernel.call
        apart = self.there[0] and not call.repeat  # the outputs are not the hidden states

        def compute(*args: Array) -> list[Array]:
            arrays, flags = self._arrays(args)
            out, final, saved = kernel.forward(arrays, flags, keep, whole=keep and not apart)
            if not keep:
                return [out, *final] if call.sequences else final
            assert saved is not None
            own = [out] if apart and call.sequences else []
            return [*own, *final, *kernel.keepsake(saved)]

        states = len(call.cell.states)
        own = call.sequences and (apart or not keep)
        count = own + states + (1 + len(kernel.plan.states) if keep else 0)
        found = tf.numpy_function(
            compute, [*flat, *self.flags], [kernel.plan.dtype] * count, stateful=False
        )
        found = list(found) if isinstance(found, (list, tuple)) else [found]
        final, kept = found[own : own + states], found[own + states :]
        sizes = [call.size(s.size) for s in call.cell.states]
        for state, size in zip(final, sizes, strict=True):
            state.set_shape([self.rows, size])
        if not call.sequences:
            return tuple(final), kept or None
        # Where kept, a view of the hidden states, made by TensorFlow: it then knows them shared.
        out = found[0] if own else kept[0][1 : tf.shape(flat[0])[0] + 1]
        out.set_shape([self.steps, self.rows, sizes[0]])
        return (out, *final), kept or None

    def backward(
        self, flat: Sequence[Tensor], arriving: Sequence[Tensor], saved: Any, need_x: bool
    ) -> list[Tensor]:
        """The gradient of each of ``flat``."""
        rest = self._backward(flat, arriving, saved, need_x, not need_x)
        if need_x:
            return rest
        # Nobody seems to want it. If someone does after all, it is an operation of its own, which
        # the graph drops where it leads nowhere.
        return [self._backward(flat, arriving, saved, True, False)[0], *rest]

    def _backward(
        self,
        flat: Sequence[Tensor],
        arriving: Sequence[Tensor],
        saved: Any,
        need_x: bool,
        without: bool,
    ) -> list[Tensor]:
        kernel, kept, final = self.kernel, saved or (), len(arriving)

        def compute(*args: Array) -> list[Array]:
            given, ends, own = args[:first], args[first : first + final], args[first + final :]
            arrays, flags = self._arrays(given)
            if own:
                state = kernel.again(arrays, flags, own)
            else:
                _, _, state = kernel.forward(arrays, flags, True)  # type: ignore[assignment]
            dy, d_final = kernel.split(ends)
            grads, _ = _flatten(kernel.backward(state, dy, d_final, need_x))
            return grads

        first = len(flat) + len(self.flags)
        count = len(flat) - without
        found = tf.numpy_function(
            compute,
            [*flat, *self.flags, *arriving, *kept],
            [kernel.plan.dtype] * count,
            stateful=False,
        )
        found = list(found) if isinstance(found, (list, tuple)) else [found]
        shaped = [None, *found] if without else found
        grads, _ = _flatten(_keras_layout(kernel.spread(shaped)))
        for grad, like in zip(grads, flat[without:], strict=True):
            grad.set_shape(like.shape)
        return grads


def _keras_layout(grads: Inputs) -> Inputs:
    """Matrices as Keras has them, ``[in, out]``."""
    hh = grads.recurrent_kernel
    return grads._replace(
        kernel=tf.transpose(grads.kernel), recurrent_kernel=None if hh is None else tf.transpose(hh)
    )


def _tensor(array: Array) -> Tensor:
    """An eager tensor, on the array's own memory where that may be."""
    if array.nbytes < 1 << 14 or array.ctypes.data % LINE or not array.flags.c_contiguous:
        return tf.constant(array)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
