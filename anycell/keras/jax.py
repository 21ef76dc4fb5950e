"""A layer on Keras's JAX backend: the primitives of ``anycell.jax``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import keras
from keras import tree
from keras.src.backend.common.stateless_scope import in_stateless_scope

import anycell.jax
from anycell.engines import cpu
from anycell.jax import fused
from anycell.jax.primitive import on_card, planned
from anycell.jax.scanning import Traced
from anycell.keras.call import Arrays, Result, Tensor, dequantized, lowered
from anycell.keras.reading import MOST, CellStep, LoopCall, over_time
from anycell.keras.rule import asked
from anycell.layer.rounding import quantized
from anycell.plan import Layer
from anycell.read import Reading
from anycell.recent import add_recent


def refusal(gpu: bool, x: Tensor | None = None) -> str | None:
    """Why the kernels cannot be called here and now, or None."""
    why = asked()
    if why is not None:
        return why
    if not hasattr(jax, "ffi"):
        return "JAX calls foreign functions, such as the kernels, since 0.5"
    if x is not None and not all(isinstance(size, int) for size in x.shape):
        return f"kernels need the sizes of {x.shape}, which are symbols"
    return None


def on_gpu(x: Tensor) -> bool:
    """Whether ``x`` is on a GPU."""
    return gpu_visible()


def gpu_visible() -> bool:
    """Whether layers are placed on a GPU."""
    return bool(jax.default_backend() != "cpu")


def compiled() -> bool:
    """Never: XLA does not leave out cuDNN's layers here."""
    return False


def obstacle() -> None:
    """None: nothing is lost where the whole program is compiled."""
    return None


def unfit(layer: Layer) -> str | None:
    """Why no kernels run a layer on a card, or None."""
    chosen = on_card(layer, layer.dtype)
    return None if chosen.engine == "gpu" else chosen.reason


def run(layer: Layer, arrays: Arrays) -> Result:
    """Runs a layer on the fused kernels; outside of ``jax.jit``, compiled once for each shape."""
    options = layer.options if layer.outputs else layer.options.unread()
    return _run(
        layer._replace(options=options._replace(threads=cpu.threads.current())), dict(arrays)
    )


def composite(layer: Layer, arrays: Arrays) -> Result:
    """Runs a layer step by step, within one loop of JAX."""
    return run(layer._replace(engine="reference"), arrays)


@functools.partial(jax.jit, static_argnums=0)
def _run(layer: Layer, arrays: Arrays) -> Result:
    plain = dict(dequantized(arrays) if quantized(arrays) else arrays)
    drawn = plain.pop("seed", None)
    layer, below = lowered(layer, plain)
    if drawn is not None:
        below["seed"] = _words(drawn)
    outputs, final, _ = fused.run(planned(layer, below["x"].dtype, layer.engine), below)
    return outputs if layer.outputs else None, tuple(state[0] for state in final)


def _words(drawn: Tensor) -> Tensor:
    """The seed of ``lowered`` as two words of 32 bits, the low one first."""
    first, second = drawn.astype(jnp.uint32)
    low = first + (second << 31)
    return jnp.stack([low, (second >> 1) + (low < first)])


def read_step(step: CellStep, x: Any, states: Sequence[Any], others: Sequence[Any]) -> Any:
    """Reads a user's step; returns an object with a ``reading``, or why it is not read.

    Args:
        step: from x, the states and further tensors, to the output and the new states.
        x, states, others: shapes, with None for the batch, and dtypes.
    """

    def zeros(spec: Any, *lead: int) -> Tensor:
        shape, dtype = spec
        return jnp.zeros((*lead, *(2 if size is None else size for size in shape)), dtype)

    first, masks = list(map(zeros, states)), list(map(zeros, others))
    body = _body(step, masks, False)
    with keras.StatelessScope():
        looped = functools.partial(jax.lax.scan, body, first, (zeros(x, 2), None))
        body = Traced(looped).body()
    return body if isinstance(body, str) else Step(body.reading)


@dataclass(frozen=True, eq=False)
class Step:
    """A step that was read, and its loops outside of stateless scopes, compiled once for each shape
    of their arrays.
    """

    reading: Reading
    functions: dict[Any, Any] = field(default_factory=dict)


def loop(read: Step, call: LoopCall) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Runs a user's step by ``anycell.jax.scan``, which reads it again, see ``reading.loop``."""
    if in_stateless_scope():
        return _loop(call)
    variables, sort = call.step.variables(), (call.options, cpu.threads.current())
    if sort not in read.functions:

        @jax.jit
        def looped(values: Sequence[Tensor], *arrays: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
            names = "sequences", "states", "masks", "mask"
            traced = call._replace(**dict(zip(names, arrays, strict=True)))
            with keras.StatelessScope(list(zip(variables, values, strict=True))):
                return _loop(traced)  # a step that is traced must update no variable

        add_recent(read.functions, sort, looped, MOST)
    values = [variable.value for variable in variables]
    arrays = call.sequences, list(call.states), list(call.masks), call.mask
    return read.functions[sort](values, *arrays)


def _loop(call: LoopCall) -> tuple[Tensor, Tensor, list[Tensor]]:
    def run(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, list[Tensor]]:
        body = _body(call.step, call.masks, call.options.zero)
        inputs, reverse = (x, None if mask is None else mask[..., None]), call.options.reverse
        final, outputs = anycell.jax.scan(body, list(call.states), inputs, reverse=reverse)
        return outputs[0 if reverse else -1], outputs, final

    return over_time(run, call.sequences, call.mask, call.options)


def _body(step: CellStep, others: Sequence[Tensor], zero: bool) -> Any:
    """A step as ``scan`` takes it, which does at masked steps what Keras's loop does on JAX."""
    structure = step.structure
    parts = structure if isinstance(structure, (list, tuple)) else [structure]
    count, ends = len(tree.flatten(structure)), len(tree.flatten(parts[-1]))
    first = count - ends if tree.is_nested(parts[0]) else 0  # the state that it repeats

    def body(states: list[Tensor], now: Any) -> tuple[list[Tensor], Tensor]:
        x, present = now
        output, new = step(x, states, list(others))
        if present is None:
            return new, output
        held = jnp.zeros_like(output) if zero else states[first]
        output = jnp.where(present, output, held)
        return [jnp.where(present, n, s) for n, s in zip(new, states, strict=True)], output

    body.__name__ = step.__name__
    return body
