"""A layer on TensorFlow: one operation with a gradient, whose kernels see its tensors' memory.

The operation is the pass of ``layer.forward``, its gradient that of ``layer.backward``. Eager mode
calls them directly. A graph calls them through the callback of a ``tf.numpy_function``, which is
public, runs on every platform of TensorFlow, and passes memory in both directions without a copy if
it begins on a cache line; our memory always begins there. The arrays for the backward pass are
outputs of that operation, so that loops, replicas and pruning treat them like any other tensor. In
graphs that XLA compiles, and anywhere on a card, XLA calls the kernels, see ``keras/xla.py``.

TensorFlow keeps callbacks and registered gradients for ever. So there is one callback and one
gradient for each direction, for all layers. They look up what to do for an operation by a number in
the operation, and the entry is freed with the last graph that has that number.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.python.eager import forwardprop_util, record  # open tapes have no public name
from tensorflow.python.framework import ops as graphs
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops import control_flow_v2_func_graphs as control_flow_graphs
from tensorflow.python.ops.resource_variable_ops import variable_accessed
from tensorflow.python.saved_model import save_context

from anycell.engines import cpu
from anycell.keras import xla
from anycell.keras.call import (
    KERNELS,
    Arrays,
    Result,
    Tensor,
    check,
    dequantized,
    lowered,
)
from anycell.keras.composite import composite
from anycell.keras.framework import TensorFlow, as_tensor
from anycell.keras.rule import asked, planned
from anycell.lang.cell import Cell
from anycell.layer import Kept, backward, card, forward, keeps_state, stepped
from anycell.layer.checks import refuse
from anycell.layer.framework import Framework
from anycell.layer.gpu import keeps_state as kept_on_card
from anycell.layer.rounding import quantized, with_integers
from anycell.layer.sequences import keeping
from anycell.layer.signature import OF_STATES, state_names
from anycell.plan import Layer, Options, plan, recurrent_masks

Array = npt.NDArray[Any]
NOTHING: Mapping[str, Tensor] = MappingProxyType({})
_CONTROL_FLOW = control_flow_graphs.ControlFlowFuncGraph  # the body of a loop, or a branch


def gpu_visible() -> bool:
    """Whether TensorFlow runs on a GPU what has no device of its own."""
    return bool(tf.config.list_logical_devices("GPU"))


def on_gpu(x: Tensor) -> bool:
    """Whether TensorFlow would run an operation on ``x`` on a GPU."""
    if "GPU" in x.device or not gpu_visible():
        return "GPU" in x.device
    return "CPU" not in x.device  # a graph places what has no device of its own


def recorded() -> bool:
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


def refusal(gpu: bool) -> str | None:
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


def unfit(layer: Layer, gpu: bool) -> str | None:
    """Why no kernels run a layer here, or None."""
    chosen = planned(layer, "gpu" if gpu else "cpu")
    if isinstance(chosen, str):
        return chosen
    if not gpu:
        return None
    if len(tf.config.list_logical_devices("GPU")) > 1:
        return "the kernels run on one GPU, and there are several: hide all others"
    if layer.sequences:
        return "on a GPU, the kernels return no states of all steps"
    return card.reason(xla.XlaCard.of(chosen.dtype), chosen, doubt)


def compiled() -> bool:
    """Whether XLA will compile the graph that is being traced."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(graphs.get_default_graph()))


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


def recur(
    layer: Layer, arrays: Arrays, plain: Mapping[str, Tensor] = NOTHING, sure: bool = False
) -> Result:
    """Runs a layer on the kernels where they can be called, else step by step.

    Args:
        plain: tensors whose last two axes were swapped to make the weights of these names. Kernels
            read them as they are, so that no operation has to copy them.
        sure: whether no gradients can be wanted but those that a tape of now records.
    """
    gpu = on_gpu(arrays["x"])
    why = unfit(layer._replace(dtype=arrays["x"].dtype.name), gpu) or refusal(gpu)
    if layer.engine == "cpu" and (gpu or why is not None):
        why = why or "x is on a GPU"
        refuse("engine", f"'cpu', but {why}", "None or 'reference'", "Leave it out.")
    elsewhere = layer.engine == "reference" or why is not None
    # Variables are read here, outside the gradient.
    arrays = {name: tf.convert_to_tensor(array) for name, array in arrays.items()}
    check(layer, arrays)
    return composite(layer, arrays) if elsewhere else run(layer, arrays, plain, sure)


@tf.autograph.experimental.do_not_convert
def run(
    layer: Layer,
    arrays: Arrays,
    plain: Mapping[str, Tensor] = NOTHING,
    sure: bool = False,
    tier: int | None = None,
) -> Result:
    """Runs a layer on the fused kernels, differentiable as often as wanted; see ``recur``.

    Args:
        tier: that kernels on a card must have; None lets them have the best.
    """
    x, kernel, integers = arrays["x"], arrays.get("kernel"), quantized(arrays)
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
    flags = {n: arrays[n] for n in _FLAGS if n in arrays}
    parts |= plain
    wanted = names = tuple(parts)
    flat = list(parts.values())
    tensors = [*flat, *flags.values()]
    if taped:
        wanted = tuple([n for n in names if record.should_record_backprop([parts[n]])])
    threads = cpu.threads.within() or tf.config.threading.get_intra_op_parallelism_threads()
    threads = threads or cpu.threads.current()
    layer = layer._replace(options=layer.options._replace(threads=threads))
    cell = stepped(layer.cell, arrays.get("recurrent_mask"))
    dtype = "int8" if integers else x.dtype.name
    turned = frozenset(plain)
    more = names, tuple(flags), wanted, keep, sure, turned, tier
    kernels = _kernels(layer, cell, dtype, engine, *more)
    if engine == "gpu":
        ends = _ends_on_card(kernels, tensors, functools.partial(composite, layer, arrays))
    else:
        ends = _ends(kernels, *tensors)
    return (ends[0], tuple(ends[1:])) if layer.outputs else (None, tuple(ends))


def _ends_on_card(
    kernels: _Kernels, tensors: Sequence[Tensor], steps: Callable[[], Result]
) -> list[Tensor]:
    """What ``_ends`` returns, by kernels on a card where they run so many rows, else by ``steps``.

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
def _fits(kernels: _Kernels, specs: Sequence[tuple[Any, Any]]) -> bool:
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


# The tensors of a run to which no gradient flows.
_FLAGS = "mask", "resets", "seed", "recurrent_mask"
_OF_NO_GRADIENT = {"x", *_FLAGS}  # x has a gradient, but its own place, before all others


def _carries_tangents(tensors: Iterable[Any]) -> bool:
    """Whether a ``tf.autodiff.ForwardAccumulator`` watches one of the tensors."""
    given = [t for t in tensors if isinstance(t, tf.Tensor)]
    return bool(forwardprop_util.pack_tangents(given).tangents)


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
    while isinstance(outer, FuncGraph) and not isinstance(outer, _CONTROL_FLOW):
        outer = outer.outer_graph
    # TensorFlow turns a loop that is vectorized from outside into branches, without a gradient.
    nested = isinstance(outer, _CONTROL_FLOW) and graph is not operation.op.graph
    if nested and record.could_possibly_record():
        refuse(
            "vectorized_map",
            "a loop or a branch with a layer of anycell, under a tape",
            "the layer alone",
            "Call tf.map_fn in its place, or the layer within anycell.keras.step_by_step().",
            NotImplementedError,
        )
    given = operation.inputs[count:]
    kinds = [output.dtype for output in operation.outputs[:count]]

    def one(i: Tensor) -> list[Tensor]:
        return again(*(part.t[i] if part.is_stacked else part.t for part in given))

    iterations = tf.range(operation.pfor.loop_len_vector[0])
    results = tf.map_fn(one, iterations, fn_output_signature=kinds)
    for result, output in zip(results, operation.outputs, strict=False):
        result.set_shape([None, *output.shape])
    return [*(wrap(result) for result in results), *given]


def _ends(kernels: _Kernels, *tensors: Tensor) -> list[Tensor]:
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


def _behind(number: Tensor) -> _Kernels:
    """The kernels of a run by its number, the last input of an operation of ``_differentiable``."""
    kernels: _Kernels = _work[int(tf.get_static_value(number))].__self__
    return kernels


def _inputs(op: Any) -> list[Tensor]:
    """The inputs of an operation of ``_differentiable``."""
    if op is None:  # so TensorFlow asks for gradients where it saves a function
        raise NotImplementedError(_REFUSAL)
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


def _parted(kernels: _Kernels, inputs: Sequence[Tensor]) -> tuple[list[Tensor], ...]:
    """The tensors of the run, the gradients that arrive, and what was kept, among the args and
    others of the operation of a gradient.
    """
    counts = len(kernels.parts), kernels.ends, len(kernels.flags)
    at = [0, *itertools.accumulate(counts), len(inputs)]
    parts, arriving, flags, kept = ([*inputs[a:b]] for a, b in itertools.pairwise(at))
    return [*parts, *flags], arriving, kept


def _gradient(
    kernels: _Kernels, tensors: Sequence[Tensor], arriving: Sequence[Tensor], kept: Sequence[Tensor]
) -> list[Tensor]:
    """Returns the gradients of ``parts``, None for unwanted ones. They can be differentiated again,
    through the composite.
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


def _gradient_again(kernels: _Kernels, *inputs: Tensor) -> list[Tensor]:
    """Computes the wanted gradients; ``inputs`` are the args and others of the operation."""
    grads = _gradient(kernels, *_parted(kernels, inputs))
    return [grad for grad in grads if grad is not None]


def _second(
    kernels: _Kernels,
    tensors: Sequence[Tensor],
    arriving: Sequence[Tensor],
    seconds: Sequence[Tensor],
) -> Any:
    tensors, arriving = _here(tensors), _here(arriving)
    args = [*tensors[: len(kernels.parts)], *arriving]
    with tf.GradientTape() as outer:
        outer.watch(args)
        first = _first(kernels, tensors, arriving)
    return outer.gradient(first, args, seconds, tf.UnconnectedGradients.ZERO)


def _here(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies the tensors into the graph that is being made: no tape follows tensors that the graph
    of a gradient, of a loop or a branch, captures from other graphs.
    """
    return [tf.identity(tensor) for tensor in tensors]


def _first(kernels: _Kernels, tensors: Sequence[Tensor], arriving: Sequence[Tensor]) -> Any:
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
        named |= {name: tf.linalg.matrix_transpose(named[name]) for name in kernels.turned}
        outputs, final = composite(layer, named)
        ends = (outputs, *final) if layer.outputs else final
    return inner.gradient(ends, wanted, arriving, tf.UnconnectedGradients.ZERO)


# -- the way out of a graph ------------------------------------------------------------------------

# The functions that the numbers in operations stand for.
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
    """Adds ``compute``, a method of ``_Kernels`` on arrays, as an operation to the graph that is
    being traced; returns its results and its number.
    """
    kernels: _Kernels = compute.__self__  # type: ignore[attr-defined]
    number, graph = next(_numbers), graphs.get_default_graph()
    while isinstance(graph, _CONTROL_FLOW):
        graph = graph.outer_graph  # a loop or branch lives as long as its function
    if isinstance(graph, FuncGraph):  # not one of TensorFlow 1, which keeps its callbacks for ever
        handle = kernels.life() if kernels.life else None
        if handle is None:
            with tf.init_scope(), tf.device("CPU:0"):
                # There is no variable behind the handle. It lives as long as a graph that captures
                # it, and TensorFlow refuses to save a function that captures it, in an error with
                # its name. Each call makes its own handle, because XLA takes no handle twice.
                name = f"{_REFUSAL} (call {number})"
                handle = tf.raw_ops.VarHandleOp(dtype=tf.bool, shape=[], shared_name=name)
            graph.capture(handle, name=_NODE)
            kernels = replace(kernels, life=weakref.ref(handle))
        else:  # the gradient of a loop or a branch captures nothing from outside its graph
            weakref.finalize(graph, id, handle).atexit = False
        weakref.finalize(handle, _work.pop, number).atexit = False
    _work[number] = getattr(kernels, compute.__name__)
    first = tf.constant(number, tf.int64)
    results = list(
        tf.raw_ops.PyFuncStateless(  # TensorFlow Lite? Trace it in anycell.keras.step_by_step()
            # Its errors quote the line above, and no name of a node.
            input=[first, *tensors],
            token=_callback()[0],
            Tout=[tf.as_dtype(kind) for kind in kinds],
            name=_NODE,
        )
    )
    return [*results, first]


@functools.cache
def _lasting(kernels: _Kernels) -> int:
    """The number of kernels that XLA calls. They stay, as its programs do."""
    number = next(_numbers)
    _work[number] = kernels.forward
    return number


@functools.cache
def _callback() -> tuple[bytes, Any]:
    """The token of the one callback, and the graph with which TensorFlow would forget it."""
    graph = tf.Graph()
    with graph.as_default():
        (output,) = tf.numpy_function(_called, [0], [tf.float32], stateful=False)
    return output.op.get_attr("token"), graph


def _called(number: Array, *arrays: Array) -> list[Array]:
    compute = _work[int(number)]
    kernels = compute.__self__
    named = zip(kernels.names, arrays, strict=False)
    check(kernels.layer, dict(named))  # now that all sizes are known
    return list(compute(*arrays))


@dataclass(frozen=True)
class _Kernels:
    """The passes of a layer, on NumPy's views of tensors. It holds no tensors, because it outlives
    them.

    Attributes:
        layer: with the plan of its kernels.
        parts: the names of the tensors to which gradients flow, x first.
        flags: the names of the other tensors, from ``_FLAGS``; they come last in ``tensors``.
        wanted: the names among ``parts`` whose gradients are wanted.
        keep: whether the forward pass keeps what the backward pass reads.
        sure: whether no other gradients than ``wanted`` can be asked for later.
        turned: the names of weights whose last two axes are swapped, see ``recur``.
        tier: that kernels on a card must have, see ``run``.
        life: in a graph, refers to the handle that lives as long as graphs that call the kernels.
    """

    layer: Layer
    parts: tuple[str, ...]
    flags: tuple[str, ...]
    wanted: tuple[str, ...]
    keep: bool
    sure: bool = False
    turned: frozenset[str] = frozenset()
    tier: int | None = None
    life: weakref.ref[Any] | None = None

    @property
    def on_card(self) -> bool:
        """Whether they are kernels of a card."""
        return self.layer.plan.engine == "gpu"

    @property
    def host(self) -> xla.XlaCard:
        """The tensors on a card."""
        dtype = self.layer.plan.dtype
        return xla.XlaCard.of(dtype) if self.tier is None else xla.XlaCard.forced(dtype, self.tier)

    @property
    def ends(self) -> int:
        """Counts the results that have a gradient: outputs, where they are wanted, states, and
        their sequences."""
        return len(self.layer.cell.states) + self.layer.outputs + len(self.layer.sequences)

    @functools.cached_property
    def separate(self) -> bool:
        """Whether the outputs are an array apart from those that are kept."""
        layer, options = self.layer, self.layer.options
        whole = self.keep and options.checkpoint is None
        return layer.outputs and (not whole or options.apart("mask" in self.flags))

    @functools.cached_property
    def others(self) -> list[str]:
        """The states besides the first that are kept: sequences, or what checkpoints need."""
        names = self.layer.cell.state_names[1:]
        if self.layer.options.checkpoint is not None:
            return list(names)
        keeps = kept_on_card if self.on_card else keeps_state
        return [name for i, name in enumerate(names, 1) if keeps(self.layer.plan, i)]

    @functools.cached_property
    def kept(self) -> int:
        """Counts the last outputs of the forward pass that the backward pass reads."""
        return (2 + len(self.others)) * self.keep

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of all ``tensors``."""
        return self.parts + self.flags

    # -- on tensors --------------------------------------------------------------------------------

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Returns outputs, final states, and what the backward pass reads, in a graph with the
        number of the run.
        """
        results, number = _run(self._forward, tensors, self._described, self._leading)
        ends = len(results) - self.kept
        kept, results = [*results[ends:], *number], results[:ends]
        outputs = results.pop(0) if self.separate else None
        for name in self.layer.sequences:
            results.append(self._sequence(name, tensors, kept))
        if not self.layer.outputs or self.separate:
            return outputs, results, kept
        # TensorFlow makes the view, so that it knows that memory is shared.
        outputs = kept[0][1:-1] if self.layer.options.reverse[0] else kept[0][1:]
        if not tf.executing_eagerly():
            outputs.set_shape([*tensors[0].shape[:2], outputs.shape[2]])
        return outputs, results, kept

    def _sequence(self, name: str, tensors: Sequence[Tensor], kept: Sequence[Tensor]) -> Tensor:
        """Returns one of ``layer.sequences``, from what the forward pass has kept."""
        x, options = tensors[0], self.layer.options
        slots = kept[2 + self.others.index(name)]
        whole = tf.cast(slots[:-1] if options.reverse[0] else slots[1:], x.dtype)
        if options.apart("mask" in self.flags):
            mask = tensors[len(self.parts) + self.flags.index("mask")]
            whole = tf.where(mask[..., None], whole, tf.zeros((), x.dtype))
        sizes = {state.name: self.layer.size(state.size) for state in self.layer.cell.states}
        return tf.ensure_shape(whole, [*x.shape[:2], sizes[name]])

    def _described(self, x: Tensor, *_: Tensor) -> list[tuple[str, Any]]:
        """Returns the dtypes of the forward pass's results in a graph, and the known shapes."""
        (steps, rows, _), types = x.shape, self.layer.plan.types
        ends = [(rows, self.layer.size(state.size)) for state in self.layer.cell.states]
        storage, math = types.storage.name, types.math.name
        described: list[tuple[str, Any]] = [(storage, (steps, *ends[0]))] * self.separate
        described += [(storage, shape) for shape in ends]
        if self.keep:
            hidden = None, rows, ends[0][1]
            described += [(storage, hidden), (storage, None)] + [(math, None)] * len(self.others)
        return described

    def backward(
        self, tensors: Sequence[Tensor], arriving: Sequence[Tensor], kept: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the wanted gradients, and in a graph the number of the run."""
        if self.layer.plan.types.quantized:
            raise NotImplementedError(
                "gradients: asked for outside of a tape, for a layer with weights of 8 bits. Call "
                "the layer within a GradientTape, where it runs with the real weights."
            )
        keeping = replace(self, keep=True)
        kept = kept if self.keep else keeping.forward(tensors)[2]
        read = [*tensors, *arriving, *kept[: keeping.kept]]
        return _run(self._backward, read, self._described_back, self._leading)

    def _described_back(self, *tensors: Tensor) -> list[tuple[str, Any]]:
        """Describes the wanted gradients, like ``_described``."""
        pairs, storage = zip(self.parts, tensors, strict=False), self.layer.plan.types.storage.name
        return [(storage, like.shape) for name, like in pairs if name in self.wanted]

    def _leading(self, steps: int, rows: int) -> list[tuple[int, ...]]:
        """The sizes of the first axes of ``tensors``, of the gradients that arrive, and of what is
        kept, as far as they are steps and rows.
        """
        layer, step, row = self.layer, (steps, rows), (rows,)
        of_names = {"x": step, "mask": step, "resets": step, "static": row, "recurrent_mask": row}
        if recurrent_masks(layer.plan) > 1:
            of_names["recurrent_mask"] = len(layer.cell.gates), rows
        for kind in ("state", "reset_state"):
            of_names |= dict.fromkeys(state_names(kind, layer.cell), row)
        sequences = [step] * len(layer.sequences)
        return [
            *(of_names.get(name, ()) for name in self.names),
            *[step] * layer.outputs, *[row] * len(layer.cell.states), *sequences,
            (steps + 1 + any(layer.options.reverse), rows), step,
            *[(steps + 1, rows)] * len(self.others),
        ]  # fmt: skip

    # -- on arrays ---------------------------------------------------------------------------------

    def _forward(self, *tensors: Array) -> list[Array]:
        host, options, arrays = self._arguments(tensors)
        run: Any = card.forward if self.on_card else forward
        out, final, kept = run(host, self.layer.plan, arrays, options, keep=self.keep)
        results = [out] * self.separate + [state[0] for state in final]
        return results if kept is None else results + kept.flat()

    def _backward(self, *tensors: Array) -> list[Array]:
        host: Any
        host, options, arrays = self._arguments(tensors)
        names, others = self.layer.cell.state_names, self.others
        first = len(self.names)
        last = first + self.ends
        arriving = list(tensors[first:last])
        kept = Kept.of(tensors[last:], [n in others for n in names], 1)
        d_output = arriving.pop(0) if self.layer.outputs else None
        inside = dict(zip(self.layer.sequences, arriving[len(names) :], strict=True))
        wanted = {KERNELS.get(name, name) for name in self.wanted}
        given = arrays, options, kept, d_output, [d[None] for d in arriving[: len(names)]]
        if self.on_card:
            grads = card.backward(host, self.layer.plan, *given)
            grads = {name: host.narrow(grad) for name, grad in grads.items()}
        else:
            grads = backward(host, self.layer.plan, *given, d_states=inside, wanted=wanted)
        return [self._as_given(name, grads) for name in self.wanted]

    def _as_given(self, name: str, gradients: dict[str, Array]) -> Array:
        """Returns a gradient laid out like its tensor, see ``Arrays`` and ``turned``."""
        if name in self.turned:
            return gradients[name].swapaxes(-1, -2)
        if name in KERNELS:
            return gradients[KERNELS[name]].T
        return gradients[name][0] if name.startswith(OF_STATES) else gradients[name]

    def _arguments(self, tensors: Sequence[Array]) -> tuple[Framework, Options, dict[str, Array]]:
        """Returns the arguments of ``anycell.layer``."""
        named = dict(zip(self.names, tensors, strict=False))
        named |= {name: named[name].swapaxes(-1, -2) for name in self.turned}
        seed, kind = None, TensorFlow
        if isinstance(tensors[0], xla.Buffer):
            seed, kind = named.pop("seed", None), xla.Xla
        layer, arrays = lowered(self.layer, named)
        options = layer.options if seed is None else layer.options._replace(seed=xla.seed(seed))
        host = self.host if self.on_card else kind.of(layer.plan.dtype)
        return host, options, arrays


@functools.lru_cache(maxsize=512)
def _kernels(layer: Layer, cell: Cell, dtype: str, engine: str, *more: Any) -> _Kernels:
    """Returns the kernels of an engine for a layer whose step is ``cell``."""
    sizes = dict(layer.sizes)
    chosen = keeping(plan(cell, sizes["H"], dtype, engine, sizes), layer.sequences)
    return _Kernels(layer._replace(plan=chosen), *more)


def _run(
    compute: Callable[..., list[Array]],
    tensors: Sequence[Tensor],
    describe: Callable[..., Any],
    leading: Callable[..., Any],
) -> tuple[list[Tensor], list[Tensor]]:
    """Runs ``compute``, a method of ``_Kernels``, on the memory of tensors: now, or when the graph
    runs.

    Args:
        describe: returns the dtype of each result for these tensors, and its shape as far as it is
            known.
        leading: returns the sizes of the tensors' first axes, from numbers of steps and rows.

    Returns:
        the results, and in a graph one number, for ``_behind``.
    """
    kernels: _Kernels = compute.__self__  # type: ignore[attr-defined]
    if tf.executing_eagerly():
        if kernels.on_card:
            with record.stop_recording(), tf.device(xla.CARD.device):
                return xla.run(compute, tensors, leading), []
        return [as_tensor(array) for array in compute(*map(np.asarray, tensors))], []
    kinds, shapes = zip(*describe(*tensors), strict=True)
    if kernels.on_card or compiled():
        results = xla.run(compute, tensors, leading)
        number = tf.constant(_lasting(kernels), tf.int64)
    else:
        *results, number = _out_of_graph(compute, tensors, kinds)
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return results, [number]
