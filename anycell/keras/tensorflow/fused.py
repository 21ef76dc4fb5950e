"""A layer on TensorFlow: one operation with a gradient, whose kernels see its tensors' memory.

The operation is the pass of ``layer.forward``, its gradient that of ``layer.backward``. Eager mode
calls them directly. A graph calls them through the operation of a ``tf.numpy_function``, which runs
on every platform of TensorFlow, and passes memory in both directions without a copy if it begins on
a cache line; our memory always begins there. The arrays for the backward pass are outputs of that
operation, so that loops, replicas and pruning treat them like any other tensor. In graphs that XLA
compiles, and anywhere on a card, XLA calls the kernels, see ``keras/tensorflow/xla.py``.

TensorFlow keeps registered gradients for ever. So there is one for each direction, for all layers,
which finds what to do for an operation as callbacks do, see ``keras/tensorflow/passes.py``.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import forwardprop_util, record  # open tapes have no public name
from tensorflow.python.framework import ops as graphs
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops.resource_variable_ops import variable_accessed
from tensorflow.python.saved_model import save_context

from anycell.engines import cpu
from anycell.keras.call import TURNED, Arrays, Result, Tensor, check, dequantized, unturned
from anycell.keras.composite import composite, linear
from anycell.keras.rule import OURS, Facts, asked, choose, planned
from anycell.keras.tensorflow import xla
from anycell.keras.tensorflow.framework import TensorFlow
from anycell.keras.tensorflow.passes import (
    CONTROL_FLOW,
    FLAGS,
    REFUSAL,
    Kernels,
    compiled,
    kernels_of,
    work,
)
from anycell.layer import card, stepped
from anycell.layer.checks import refuse
from anycell.layer.rounding import quantized, with_integers
from anycell.layer.signature import OF_STATES
from anycell.layer.tangents import along
from anycell.plan import Engine, Layer


def gpu_visible() -> bool:
    """Whether TensorFlow runs on a GPU what has no device of its own."""
    return bool(tf.config.list_logical_devices("GPU"))


def on_gpu(x: Tensor) -> bool:
    """Whether TensorFlow would run an operation on ``x`` on a GPU."""
    if "GPU" in x.device:
        return True
    return "CPU" not in x.device and gpu_visible()  # a graph places what has no device of its own


def recorded(tensors: Sequence[Any]) -> bool:
    """Whether a tape, or an accumulator of forward mode, may watch what is computed now."""
    return bool(record.could_possibly_record())


def watched(values: Sequence[Any]) -> tuple[bool, ...] | None:
    """Says which tensors and variables a tape watches; None if forward mode watches one."""
    if not record.could_possibly_record():
        return (False,) * len(values)
    tensors = []
    for value in values:
        if isinstance(value, tf.Variable):
            variable_accessed(value)
            value = value.handle
        tensors.append(value)
    if _carries_tangents(tensors):
        return None
    return tuple([bool(record.should_record_backprop([tensor])) for tensor in tensors])


def refusal(gpu: bool, x: Tensor | None = None) -> str | None:
    """Returns why the kernels cannot be called here and now, or None, from what is being traced.

    Args:
        gpu: whether the layer is placed on a GPU.
    """
    why = asked()
    if why is not None or tf.executing_eagerly():
        return why
    if save_context.in_save_context() or _exporting():
        return "an exported model must run where anycell is not installed"
    if not gpu and compiled() and (why := obstacle()) is not None:
        return f"XLA (jit_compile=True) cannot call the kernels here: {why}"
    return None


def unfit(layer: Layer) -> str | None:
    """Why no kernels run a layer on a GPU, or None."""
    chosen = planned(layer, "gpu")
    if isinstance(chosen, str):
        return chosen
    if len(tf.config.list_logical_devices("GPU")) > 1:
        return "the kernels run on one GPU, and there are several: hide all others"
    if layer.sequences:
        return "on a GPU, the kernels return no states of all steps"
    return card.reason(xla.XlaCard.of(chosen.dtype), chosen, doubt)


def engine_of(layer: Layer, x: Tensor | None = None) -> Engine:
    """The engine that runs a layer here and now, for x if there is one, and why; see ``recur``."""
    gpu = gpu_visible() if x is None else on_gpu(x)
    why = unfit(layer) if gpu else None
    return choose(Facts(layer, gpu, refusal=refusal(gpu) or why))


@functools.cache
def obstacle() -> str | None:
    """Why XLA cannot run the kernels in this process, or None; tried once, see ``xla.obstacle``."""
    return xla.obstacle(run)


@functools.cache
def doubt(tier: int) -> str | None:
    """Why the kernels of a tier are not trusted on a card, or None; tried once in a process."""
    return xla.doubt(functools.partial(run, tier=tier), tier)


def _exporting() -> bool:
    """Whether an exporter, Keras's or tf2onnx, traces the call, which only the stack shows."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(("keras.src.export", "tf2onnx")):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@tf.autograph.experimental.do_not_convert
def recur(layer: Layer, arrays: Arrays, sure: bool = False) -> Result:
    """Runs a layer on the kernels where they can be called, else step by step.

    Args:
        sure: whether no gradients can be wanted but those that a tape of now records.
    """
    x = arrays["x"]
    engine, why = engine_of(layer._replace(dtype=x.dtype.name), x)
    if layer.engine == "cpu" and engine != "cpu":
        why = "x is on a GPU" if engine == "gpu" else why
        refuse("engine", f"'cpu', but {why}", "None or 'reference'", "Leave it out.")
    elsewhere = layer.engine == "reference" or engine not in OURS
    # Variables are read here, outside the gradient.
    arrays = {name: tf.convert_to_tensor(array) for name, array in arrays.items()}
    check(layer, arrays)
    return composite(layer, arrays) if elsewhere else run(layer, arrays, sure)


@tf.autograph.experimental.do_not_convert
def run(layer: Layer, arrays: Arrays, sure: bool = False, tier: int | None = None) -> Result:
    """Runs a layer on the fused kernels, differentiable as often as wanted; see ``recur``.

    Args:
        tier: that kernels on a card must have; None lets them have the best.
    """
    x, kernel, integers = arrays["x"], arrays.get(TURNED + "weight_ih"), quantized(arrays)
    engine = "gpu" if on_gpu(x) else "cpu"
    # It is unknown whether a gradient will be wanted. Without a tape, and outside of training, that
    # is unlikely: nothing is kept, and a backward pass would run the forward pass again.
    taped = record.could_possibly_record()
    keep = layer.options.training or taped or bool(layer.sequences)
    # With sequences, what the kernels keep for the backward pass has them. And XLA could not tell
    # how much checkpoints of unknown steps keep.
    open_sizes = None in x.shape.as_list()[:2] and compiled()
    if layer.sequences or open_sizes or engine == "gpu":
        layer = layer._replace(options=layer.options._replace(checkpoint=None))
    if integers and (keep or engine == "gpu"):
        arrays, integers = dequantized(arrays), False
    if integers:
        arrays = with_integers(TensorFlow.xp, arrays)
    if kernel is not None and x.shape[-1] is None:
        x = tf.ensure_shape(x, [None, None, kernel.shape[0]])
    if taped and _carries_tangents(arrays.values()):  # our gradients do not support forward mode
        return composite(_unlooped(layer, x), arrays)
    draws = layer.options.training and layer.cell.keeps
    if x.shape[0] == 1 and not (integers or draws or tf.executing_eagerly()):
        # Nothing to fuse over time, and less work than calling a kernel.
        return composite(layer, arrays)
    parts = {"x": x} | {n: t for n, t in arrays.items() if n not in _OF_NO_GRADIENT}
    flags = {n: arrays[n] for n in FLAGS if n in arrays}
    wanted = names = tuple(parts)
    tensors = [*parts.values(), *flags.values()]
    if taped:
        wanted = tuple([n for n in names if record.should_record_backprop([parts[n]])])
    threads = cpu.threads.within() or tf.config.threading.get_intra_op_parallelism_threads()
    threads = threads or cpu.threads.current()
    layer = layer._replace(options=layer.options._replace(threads=threads))
    cell = stepped(layer.cell, arrays.get("recurrent_mask"))
    dtype = "int8" if integers else x.dtype.name
    of_run = names, tuple(flags), wanted, keep, sure, tier
    kernels = kernels_of(layer, cell, dtype, engine, *of_run)
    if engine == "gpu":
        ends = _ends_on_card(kernels, tensors, functools.partial(composite, layer, arrays))
    else:
        ends = _ends(kernels, *tensors)
    return (ends[0], tuple(ends[1:])) if layer.outputs else (None, tuple(ends))


def _ends_on_card(
    kernels: Kernels, tensors: Sequence[Tensor], steps: Callable[[], Result]
) -> list[Tensor]:
    """The results of ``_ends``: by kernels on a card where they run so many rows, or by ``steps``.

    A graph may not know how many rows there are. Then it has both ways, if one will be needed.
    """

    def by_kernels() -> list[Tensor]:
        return _ends(kernels, *tensors)

    def by_step() -> list[Tensor]:
        output, ends = steps()
        return [output, *ends] if kernels.layer.outputs else list(ends)

    if not _fits(kernels, tuple((t.shape, t.dtype) for t in tensors)):
        return by_step()
    plan: Any = kernels.layer.plan
    most = card.most_rows(kernels.host, plan)
    if tensors[0].shape[1] is not None or most == card.ANY:
        return by_kernels()
    return list(tf.cond(tf.shape(tensors[0])[1] <= most, by_kernels, by_step))


@functools.lru_cache(maxsize=1024)
def _fits(kernels: Kernels, specs: Sequence[tuple[Any, Any]]) -> bool:
    """Drafts all passes of a layer on a card; says whether there are kernels for them."""
    keeping = replace(kernels, keep=True, wanted=kernels.parts)
    with tf.Graph().as_default():
        tensors = [tf.compat.v1.placeholder(dtype, shape) for shape, dtype in specs]
        try:
            kernels.forward(tensors)
            outputs, final, kept = keeping.forward(tensors)
            keeping.backward(tensors, [outputs, *final] if kernels.layer.outputs else final, kept)
        except card.Unfit:
            return False
    return True


_OF_NO_GRADIENT = {"x", *FLAGS}  # x has a gradient, but its own place, before all others


def _carries_tangents(tensors: Iterable[Any]) -> bool:
    """Whether a ``tf.autodiff.ForwardAccumulator`` watches one of the tensors."""
    present = [t for t in tensors if isinstance(t, tf.Tensor)]
    return bool(forwardprop_util.pack_tangents(present).tangents)


def _unlooped(layer: Layer, x: Tensor) -> Layer:
    """Unrolls a call of known steps in a graph, whose loops have no forward mode in TensorFlow."""
    known = x.shape.as_list()[0] is not None and not tf.executing_eagerly()
    return layer._replace(unroll=layer.unroll or known)


# -- derivatives -----------------------------------------------------------------------------------

FORWARD, BACKWARD = "AnycellRecurrence", "AnycellRecurrenceGradient"


def _differentiable(
    name: str,
    results: Sequence[Tensor],
    args: Sequence[Tensor],
    others: Sequence[Tensor],
    gradient: Callable[..., Any],
    again: Callable[..., list[Tensor]],
) -> list[Tensor]:
    """Gives ``results`` the gradient ``gradient`` for ``args``; ``again(*args, *others)`` computes
    the results again.

    ``tf.custom_gradient`` does the same, but registers a function for every graph, which keeps the
    graph for ever. Our gradients are registered once, by ``name``, and find all that they need from
    the operation.
    """
    if tf.executing_eagerly():
        record.record_operation(name, results, args, gradient)
        return list(results)
    inputs, count = [*results, *args, *others], len(results)
    with graphs.get_default_graph().gradient_override_map({"IdentityN": name}):
        outputs = list(tf.identity_n(inputs))
    # ``tf.vectorized_map`` and Jacobians would make an operation without this gradient.
    outputs[0].op.pfor_converter = functools.partial(_one_by_one, count, again)

    def recorded(*arriving: Tensor) -> list[Tensor]:
        return [None] * count + list(gradient(*arriving[:count])) + [None] * len(others)

    record.record_operation(name, outputs, inputs, recorded)
    return outputs[:count]


def _one_by_one(count: int, again: Callable[..., list[Tensor]], operation: Any) -> list[Any]:
    """Converts an operation of ``_differentiable`` in a loop that TensorFlow vectorizes: into a
    loop, in which the operation keeps its gradient.
    """
    from tensorflow.python.ops.parallel_for.pfor import wrap

    graph = outer = graphs.get_default_graph()
    while isinstance(outer, FuncGraph) and not isinstance(outer, CONTROL_FLOW):
        outer = outer.outer_graph
    # TensorFlow turns a loop that is vectorized from outside into branches, without a gradient.
    nested = isinstance(outer, CONTROL_FLOW) and graph is not operation.op.graph
    if nested and record.could_possibly_record():
        refuse(
            "vectorized_map",
            "a loop or a branch with a layer of anycell, under a tape",
            "the layer alone",
            "Call tf.map_fn in its place, or the layer within anycell.keras.step_by_step().",
            NotImplementedError,
        )
    arriving = operation.inputs[count:]
    kinds = [output.dtype for output in operation.outputs[:count]]

    def one(i: Tensor) -> list[Tensor]:
        return again(*(part.t[i] if part.is_stacked else part.t for part in arriving))

    iterations = tf.range(operation.pfor.loop_len_vector[0])
    results = tf.map_fn(one, iterations, fn_output_signature=kinds)
    for result, output in zip(results, operation.outputs, strict=False):
        result.set_shape([None, *output.shape])
    return [*(wrap(result) for result in results), *arriving]


def _ends(kernels: Kernels, *tensors: Tensor) -> list[Tensor]:
    """Returns outputs, if they are wanted, and final states; tensors may be followed by others."""
    tensors = tensors[: len(kernels.names)]
    outputs, final, kept = kernels.forward(tensors)
    if not tf.executing_eagerly():
        kernels = _behind(kept[-1])

    def gradient(*arriving: Tensor) -> Any:
        return _gradient(kernels, tensors, arriving, kept)

    ends, parts = [outputs, *final] if kernels.layer.outputs else final, len(kernels.parts)
    again = functools.partial(_ends, kernels)
    others = [*tensors[parts:], *kept]
    return _differentiable(FORWARD, ends, tensors[:parts], others, gradient, again)


def _behind(number: Tensor) -> Kernels:
    """The kernels of a run by its number, the last input of an operation of ``_differentiable``."""
    return work(int(tf.get_static_value(number))).__self__


def _inputs(op: Any) -> list[Tensor]:
    """The inputs of an operation of ``_differentiable``."""
    if op is None:  # so TensorFlow asks for gradients where it saves a function
        raise NotImplementedError(REFUSAL)
    return list(op.inputs)


@tf.RegisterGradient(FORWARD)
def _of_forward(op: Any, *arriving: Tensor) -> list[Tensor]:
    *inputs, number = _inputs(op)
    kernels = _behind(number)
    if not kernels.sure:
        kernels = replace(kernels, wanted=kernels.parts)
    count = kernels.ends
    kept = count + len(kernels.names)
    grads = _gradient(kernels, inputs[count:kept], arriving[:count], inputs[kept:])
    return [None] * count + grads + [None] * (len(inputs) + 1 - count - len(grads))


@tf.RegisterGradient(BACKWARD)
def _of_backward(op: Any, *seconds: Tensor) -> list[Tensor]:
    inputs = _inputs(op)
    kernels = _behind(inputs[-1])
    count = len(kernels.wanted)
    tensors, arriving, _ = _parted(kernels, inputs[count:])
    grads = [*_second(kernels, tensors, arriving, seconds[:count])]
    return [None] * count + grads + [None] * (len(inputs) - count - len(grads))


def _parted(kernels: Kernels, inputs: Sequence[Tensor]) -> tuple[list[Tensor], ...]:
    """The tensors of the run, the gradients that arrive, and what was kept, among the args and
    others of the operation of a gradient.
    """
    counts = len(kernels.parts), kernels.ends, len(kernels.flags)
    at = [0, *itertools.accumulate(counts), len(inputs)]
    parts, arriving, flags, kept = ([*inputs[a:b]] for a, b in itertools.pairwise(at))
    return [*parts, *flags], arriving, kept


def _gradient(
    kernels: Kernels, tensors: Sequence[Tensor], arriving: Sequence[Tensor], kept: Sequence[Tensor]
) -> list[Tensor]:
    """Returns the gradients of ``parts``, None for unwanted ones. They can be differentiated again,
    by the tangent of the cell.
    """
    if not kernels.wanted:
        return [None] * len(kernels.parts)
    arriving = [tf.convert_to_tensor(part) for part in arriving]  # a gather passes IndexedSlices
    taped = record.could_possibly_record()
    if taped and _carries_tangents(arriving):
        grads = _first(kernels, tensors, arriving)
    else:
        grads, number = kernels.backward(tensors, arriving, kept)
        if taped or not tf.executing_eagerly():

            def twice(*seconds: Tensor) -> Any:
                return _second(kernels, tensors, arriving, seconds)

            parts = len(kernels.parts)
            args, others = [*tensors[:parts], *arriving], [*tensors[parts:], *kept, *number]
            again = functools.partial(_gradient_again, kernels)
            grads = _differentiable(BACKWARD, grads, args, others, twice, again)
    named = dict(zip(kernels.wanted, grads, strict=True))
    return [named.get(name) for name in kernels.parts]


def _gradient_again(kernels: Kernels, *inputs: Tensor) -> list[Tensor]:
    """Computes the wanted gradients; ``inputs`` are the args and others of the operation."""
    grads = _gradient(kernels, *_parted(kernels, inputs))
    return [grad for grad in grads if grad is not None]


def _second(
    kernels: Kernels,
    tensors: Sequence[Tensor],
    arriving: Sequence[Tensor],
    seconds: Sequence[Tensor],
) -> list[Tensor]:
    """The gradients of the parts and of ``arriving``, from those of the wanted gradients."""
    tensors, arriving = _here(tensors), _here(arriving)
    parts, seconds = tensors[: len(kernels.parts)], [*map(tf.convert_to_tensor, seconds)]
    with tf.GradientTape() as tape:
        tape.watch(parts)
        # Those of ``arriving`` are the results' tangents, whose gradients are those of the parts.
        ends = _tangents(kernels, tensors, seconds)
    if ends is not None:
        return [*tape.gradient(ends, parts, arriving, tf.UnconnectedGradients.ZERO), *ends]
    args = [*parts, *arriving]
    with tf.GradientTape() as tape:
        tape.watch(args)
        first = _first(kernels, tensors, arriving)
    return [*tape.gradient(first, args, seconds, tf.UnconnectedGradients.ZERO)]


def _tangents(
    kernels: Kernels, tensors: Sequence[Tensor], dots: Sequence[Tensor]
) -> list[Tensor] | None:
    """The tangents of the results, where those of the wanted parts are ``dots``, from the cell's
    tangent; None if it has none.
    """
    layer, states = kernels.layer, len(kernels.layer.cell.states)
    named = zip(kernels.names, tensors, strict=True), zip(kernels.wanted, dots, strict=True)
    arrays, moved = (
        {n: t[None] if n.startswith(OF_STATES) else t for n, t in unturned(dict(pairs)).items()}
        for pairs in named
    )
    calls = along(layer, arrays, moved, linear)
    if calls is None:
        return None
    ((called, given),) = calls  # a layer of Keras has one direction
    below = {n: t[0] if n.startswith(OF_STATES) else t for n, t in given.items()}
    engine, _ = engine_of(called._replace(dtype=below["x"].dtype.name), below["x"])
    if engine not in OURS and layer.options.training and layer.cell.keeps:
        return None  # step by step, it would draw other masks
    outputs, ends = recur(called, below)
    ends = [*ends[:states], *ends[2 * states :]]
    return [outputs, *ends] if layer.outputs else ends


def _here(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies the tensors into the graph that is being made: no tape follows tensors that the graph
    of a gradient, of a loop or a branch, captures from other graphs.
    """
    return [tf.identity(tensor) for tensor in tensors]


def _first(kernels: Kernels, tensors: Sequence[Tensor], arriving: Sequence[Tensor]) -> Any:
    """Computes the gradients by the composite."""
    layer = kernels.layer
    if layer.options.training and layer.cell.keeps:
        raise NotImplementedError(
            f"second derivatives of {layer.cell.name} in training: its random masks are drawn by "
            "the kernels. Take them with training=False."
        )
    if _carries_tangents([*tensors, *arriving]):
        layer = _unlooped(layer, tensors[0])
    named = dict(zip(kernels.names, _here(tensors), strict=True))
    wanted = [named[name] for name in kernels.wanted]
    with tf.GradientTape() as inner:
        inner.watch(wanted)
        outputs, final = composite(layer, named)
        ends = (outputs, *final) if layer.outputs else final
    return inner.gradient(ends, wanted, arriving, tf.UnconnectedGradients.ZERO)
