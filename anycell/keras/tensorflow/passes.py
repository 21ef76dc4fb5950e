"""The passes of a layer on TensorFlow's tensors: now, or when a graph runs.

TensorFlow keeps callbacks for ever. So there is one callback for all layers. It looks up what to do
for an operation by a number in the operation, and the entry is freed with the last graph that has
that number.
"""

from __future__ import annotations

import functools
import itertools
import secrets
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.python.eager import record  # open tapes have no public name
from tensorflow.python.framework import ops as graphs
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops import control_flow_util, script_ops
from tensorflow.python.ops import control_flow_v2_func_graphs as control_flow_graphs

from anycell.keras.call import TURNED, Tensor, check, lowered
from anycell.keras.tensorflow import xla
from anycell.keras.tensorflow.framework import TensorFlow, as_tensor
from anycell.lang.cell import Cell
from anycell.layer import Kept, backward, card, forward, keeps_state
from anycell.layer.framework import Framework
from anycell.layer.gpu import keeps_state as kept_on_card
from anycell.layer.sequences import keeping
from anycell.layer.signature import OF_STATES, state_names
from anycell.plan import Layer, Options, plan, recurrent_masks

Array = npt.NDArray[Any]
# The tensors of a run to which no gradient flows.
FLAGS = "mask", "resets", "seed", "recurrent_mask"
CONTROL_FLOW = control_flow_graphs.ControlFlowFuncGraph  # the body of a loop, or a branch


def compiled() -> bool:
    """Whether XLA will compile the graph that is being traced."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(graphs.get_default_graph()))


# The functions that the numbers in operations stand for. No other process has the same numbers,
# because TensorFlow 1 saves them with its graphs.
WORK: dict[int, Any] = {}
_first = secrets.randbits(62)
_numbers = itertools.count(_first)
REFUSAL = (
    "anycell: this function calls fused kernels, which only the process that traced it has. To "
    "save it, trace it within anycell.keras.step_by_step()"
)
TOKEN = f"{REFUSAL} (process {_first})"  # of the one callback; TensorFlow quotes it if it has none


def work(number: int) -> Any:
    """The function that a number in an operation stands for."""
    if number not in WORK:
        raise RuntimeError(REFUSAL)
    return WORK[number]


def _out_of_graph(
    kernels: Kernels, compute: str, tensors: Sequence[Tensor], kinds: Sequence[Any]
) -> list[Tensor]:
    """Adds a method of ``kernels`` on arrays as an operation to the graph that is being traced;
    returns its results and its number.
    """
    number, graph = next(_numbers), graphs.get_default_graph()
    while isinstance(graph, CONTROL_FLOW):
        graph = graph.outer_graph  # a loop or branch lives as long as its function
    if isinstance(graph, FuncGraph):  # not one of TensorFlow 1, which keeps its callbacks for ever
        handle = kernels.life() if kernels.life else None
        if handle is None:
            with tf.init_scope(), tf.device("CPU:0"):
                # There is no variable behind the handle. It lives as long as a graph that captures
                # it, and TensorFlow refuses to save a function that captures it, in an error with
                # its name. Each call makes its own handle, because XLA takes no handle twice.
                name = f"{REFUSAL} (call {number})"
                handle = tf.raw_ops.VarHandleOp(dtype=tf.bool, shape=[], shared_name=name)
            graph.capture(handle, name=xla.TARGET)
            kernels = replace(kernels, life=weakref.ref(handle))
        else:  # the gradient of a loop or a branch captures nothing from outside its graph
            weakref.finalize(graph, id, handle).atexit = False
        weakref.finalize(handle, WORK.pop, number).atexit = False
    WORK[number] = getattr(kernels, compute)
    first = tf.constant(number, tf.int64)
    results = list(
        tf.raw_ops.PyFuncStateless(  # TensorFlow Lite? Trace it in anycell.keras.step_by_step()
            # Its errors quote the line above, and no name of a node.
            input=[first, *tensors],
            token=TOKEN,
            Tout=[tf.as_dtype(kind) for kind in kinds],
            name=xla.TARGET,
        )
    )
    return [*results, first]


@functools.cache
def _lasting(kernels: Kernels) -> int:
    """The number of kernels that XLA calls. They stay, as its programs do."""
    number = next(_numbers)
    WORK[number] = kernels.forward
    return number


def _called(number: Array, *arrays: Array) -> list[Array]:
    compute = work(int(number))
    kernels = compute.__self__
    named = zip(kernels.names, arrays, strict=False)
    check(kernels.layer, dict(named))  # now that all sizes are known
    return list(compute(*arrays))


script_ops._py_funcs._funcs[TOKEN] = _called  # a ``tf.numpy_function`` names it pyfunc_0, as others


@dataclass(frozen=True)
class Kernels:
    """The passes of a layer, on NumPy's views of tensors. It holds no tensors, because it outlives
    them.

    Attributes:
        layer: with the plan of its kernels.
        parts: the names of the tensors to which gradients flow, x first.
        flags: the names of the other tensors, from ``FLAGS``; they come last in ``tensors``.
        wanted: the names among ``parts`` whose gradients are wanted.
        keep: whether the forward pass keeps what the backward pass reads.
        sure: whether no other gradients than ``wanted`` can be asked for later.
        tier: that kernels on a card must have, see ``run``.
        life: in a graph, refers to the handle that lives as long as graphs that call the kernels.
    """

    layer: Layer
    parts: tuple[str, ...]
    flags: tuple[str, ...]
    wanted: tuple[str, ...]
    keep: bool
    sure: bool = False
    tier: int | None = None
    life: weakref.ref[Any] | None = None

    @functools.cached_property
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
        results, number = self._run(self._forward, tensors, self._described)
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
        return self._run(self._backward, read, self._described_back)

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

    def _run(
        self, compute: Callable[..., list[Array]], tensors: Sequence[Tensor], describe: Any
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Runs ``compute``, one of the methods below, on the memory of tensors: now, or when the
        graph runs.

        Args:
            describe: returns the dtype of each result for these tensors, and its shape as far as it
                is known.

        Returns:
            the results, and in a graph one number, by which gradients find the passes.
        """
        if tf.executing_eagerly():
            if self.on_card:
                with record.stop_recording(), tf.device(xla.CARD.device):
                    return xla.run(compute, tensors, self._leading), []
            return [as_tensor(array) for array in compute(*map(np.asarray, tensors))], []
        kinds, shapes = zip(*describe(*tensors), strict=True)
        if self.on_card or compiled():
            results = xla.run(compute, tensors, self._leading)
            number = tf.constant(_lasting(self), tf.int64)
        else:
            *results, number = _out_of_graph(self, compute.__name__, tensors, kinds)
        for result, shape in zip(results, shapes, strict=True):
            result.set_shape(shape)
        return results, [number]

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
        wanted = {name.removeprefix(TURNED) for name in self.wanted}
        given = arrays, options, kept, d_output, [d[None] for d in arriving[: len(names)]]
        if self.on_card:
            grads = card.backward(host, self.layer.plan, *given)
            grads = {name: host.narrow(grad) for name, grad in grads.items()}
        else:
            grads = backward(host, self.layer.plan, *given, d_states=inside, wanted=wanted)
        return [self._as_given(name, grads) for name in self.wanted]

    def _as_given(self, name: str, gradients: dict[str, Array]) -> Array:
        """Returns a gradient laid out like its tensor, see ``Arrays``."""
        gradient = gradients[name.removeprefix(TURNED)]
        if name.startswith(TURNED):
            return gradient.swapaxes(-1, -2)
        return gradient[0] if name.startswith(OF_STATES) else gradient

    def _arguments(self, tensors: Sequence[Array]) -> tuple[Framework, Options, dict[str, Array]]:
        """Returns the arguments of ``anycell.layer``."""
        named = dict(zip(self.names, tensors, strict=False))
        seed, kind = None, TensorFlow
        if isinstance(tensors[0], xla.Buffer):
            seed, kind = named.pop("seed", None), xla.Xla
        layer, arrays = lowered(self.layer, named)
        options = layer.options if seed is None else layer.options._replace(seed=xla.seed(seed))
        host = self.host if self.on_card else kind.of(layer.plan.dtype)
        return host, options, arrays


@functools.lru_cache(maxsize=512)
def kernels_of(layer: Layer, cell: Cell, dtype: str, engine: str, *more: Any) -> Kernels:
    """Returns the kernels of an engine for a layer whose step is ``cell``."""
    sizes = dict(layer.sizes)
    chosen = keeping(plan(cell, sizes["H"], dtype, engine, sizes), layer.sequences)
    return Kernels(layer._replace(plan=chosen), *more)
