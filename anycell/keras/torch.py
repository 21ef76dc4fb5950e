"""A layer on Keras's torch backend: the operations of ``anycell.torch``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import torch
import torch.utils._pytree as pytree
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.torch.core import get_device

from anycell.keras.call import Arrays, Result, Tensor, lowered
from anycell.keras.composite import composite as composite
from anycell.keras.reading import CellStep, LoopCall, masked, over_time
from anycell.keras.rule import asked
from anycell.plan import Layer
from anycell.read import Reading, places
from anycell.torch.loops import obstacle as unread
from anycell.torch.observers import observed
from anycell.torch.operators import functional
from anycell.torch.operators.fused import plan_on
from anycell.torch.reading.planned import ReadStep
from anycell.torch.reading.proven import plan_of, unlike
from anycell.torch.reading.stepwise import Steps, stepwise
from anycell.torch.reading.surroundings import Surroundings


def run(layer: Layer, arrays: Arrays) -> Result:
    """Runs a layer as ``anycell.torch`` does, on the fused kernels or step by step."""
    layer, tensors = lowered(layer, arrays)
    for name in tensors.keys() & {"mask", "resets", "recurrent_mask"}:
        tensors[name] = tensors[name].contiguous()
    with torch.autocast(tensors["x"].device.type, enabled=False):
        outputs, final, _ = functional.run_layer(layer, tensors)
    return outputs if layer.outputs else None, tuple(state[0] for state in final)


def refusal(gpu: bool, x: Tensor | None = None) -> str | None:
    """Why the kernels cannot be called here and now, or None."""
    return asked()


def on_gpu(x: Tensor) -> bool:
    """Whether ``x`` is on a GPU."""
    return bool(x.device.type != "cpu")


def gpu_visible() -> bool:
    """Whether layers are placed on a GPU."""
    return bool(torch.cuda.is_available())


def compiled() -> bool:
    """Never: XLA does not leave out cuDNN's layers here."""
    return False


def obstacle() -> None:
    """None: nothing is lost where the whole program is compiled."""
    return None


def recorded(tensors: Sequence[Any]) -> bool:
    """Whether a gradient may be wanted of these, or torch must see the operation."""
    wanted = torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors)
    return wanted or observed()


def unfit(layer: Layer) -> str | None:
    """Why no kernels run a layer on Keras's device, or None."""
    dtype = getattr(torch, layer.dtype, None)
    if dtype is None:
        return f"no fused kernel for {layer.dtype} on a GPU"
    chosen = plan_on(get_device(), layer.cell, layer.sizes, dtype)
    return chosen if isinstance(chosen, str) else None


# -- cells that users wrote ------------------------------------------------------------------------

_LEAF = pytree.tree_structure(0)
_ROWS = 4  # of the call that is read
places.skip(keras)


@dataclass(frozen=True, eq=False)
class Step:
    """A step that was read, what is around it, and the cell's variables."""

    plan: ReadStep
    around: Surroundings
    variables: Sequence[Any]

    @property
    def reading(self) -> Reading:
        return self.plan.reading

    def run(self, call: Steps, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The outputs and the last states; the cell's own if it branches on the batch's size."""
        if call.rows not in self.plan.rows:
            with self.around.swapped(tensors):
                unlike(self.plan, self.around, call)
        if self.plan.rows[call.rows] is None:
            return self.plan.replay(call, tensors)
        with self.around.swapped(tensors):
            return stepwise(self.around.run, call)


def unreadable() -> str | None:
    """Why steps that were read cannot run here and now, or None."""
    if in_stateless_scope():
        return "a StatelessScope of Keras has values of its own for variables"
    return unread()


def read_step(step: CellStep, x: Any, states: Sequence[Any], others: Sequence[Any]) -> Step | str:
    """Reads a step by ``anycell.torch``'s reader, and proves it; see ``keras.jax.read_step``."""
    if (why := unreadable()) is not None:
        return why

    def ones(spec: Any, *lead: int) -> Tensor:
        shape, dtype = spec
        sizes = [_ROWS if size is None else size for size in shape]
        return keras.ops.ones((*lead, *sizes), dtype)

    masks = dict(enumerate(map(ones, others)))
    sample = _steps(ones(x, 1), list(map(ones, states)))
    variables = step.variables()

    def one(x: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        if states[0].dtype != sample.state[0].dtype:  # Keras would cast the trial's numbers
            raise TypeError("a cell of Keras computes in its own dtype")
        return step(x, states, list(masks.values()))

    around = Surroundings(one, one)
    places = [(vars(variable), "_value", variable.path) for variable in variables]
    for holder, name, label in [*places, *((masks, k, f"mask {k}") for k in masks)]:
        around.add(holder, name, label)
    one.__name__ = step.__name__
    plan = plan_of(around, sample)
    return plan if isinstance(plan, str) else Step(plan, around, variables)


def _steps(x: Tensor, states: list[Tensor], *more: Any) -> Steps:
    """A call over ``x`` ``[T, B, ...]``."""
    tree = pytree.tree_structure([0] * len(states))
    return Steps([x], _LEAF, states, tree, True, x.shape[1], *more)


def loop(read: Step, call: LoopCall) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Runs a step that was read, see ``reading.loop``."""
    tensors = [*(vars(variable)["_value"] for variable in read.variables), *call.masks]
    options = call.options

    def run(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, list[Tensor]]:
        steps = _steps(x, list(call.states), mask, None, None, options.reverse)
        outputs, final = read.run(steps, tensors)
        if mask is not None and not options.zero:
            outputs = masked(outputs, mask, options, False)
        return outputs[0 if options.reverse else -1], outputs, final

    return over_time(run, call.sequences, call.mask, options)
