"""The rule that chooses the engine of a layer: a function of facts, asked before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from anycell.plan import Engine, Layer, Plan, plan

FUSED = "tensorflow", "torch", "jax"  # Keras's backends that can call the kernels
OURS = "cpu", "gpu"  # the engines that are kernels of ours
_asked: ContextVar[bool] = ContextVar("asked", default=False)


@contextmanager
def step_by_step() -> Iterator[None]:
    """Makes layers run in operations of the backend, within it and in this thread, on any backend.

    Use it for a graph that will run where anycell is not installed, which tracing cannot know, such
    as a concrete function that is saved or frozen later.

    Example:
        >>> import anycell.keras
        >>> layer = anycell.keras.LSTM(4)
        >>> with anycell.keras.step_by_step():
        ...     layer.engine.name
        'keras'
    """
    token = _asked.set(True)
    try:
        yield
    finally:
        _asked.reset(token)


def asked() -> str | None:
    """Returns the reason for running step by step inside ``step_by_step``, None outside of it."""
    return "anycell.keras.step_by_step() asks for it" if _asked.get() else None


@dataclass(frozen=True)
class Facts:
    """The facts on which the choice depends.

    Attributes:
        layer: its step in anycell's language, in the dtype of the computation; None if the step
            cannot be expressed there.
        gpu: whether the layer is placed on a GPU.
        cudnn: whether Keras's cuDNN path takes the layer: ``LSTM`` or ``GRU`` of default
            activations, with bias, without recurrent dropout and unrolling.
        drop_in: whether the layer is a subclass of Keras's layer, which has a loop of its own.
        obstacle: why neither the kernel nor cuDNN can run it, if there is a reason: an activation,
            recurrent dropout in training.
        refusal: why no kernel can be called here, if there is a reason: the backend, TensorFlow's
            XLA, export, ``step_by_step``; or why none on a GPU runs the layer.
    """

    layer: Layer | None
    gpu: bool = False
    cudnn: bool = False
    drop_in: bool = False
    obstacle: str | None = None
    refusal: str | None = None


def choose(facts: Facts) -> Engine:
    """Chooses the engine for these facts.

    Example:
        >>> from anycell.cells import PeepholeLSTM
        >>> choose(Facts(Layer(PeepholeLSTM, (("H", 64),), dtype="float32"), gpu=True)).name
        'gpu'
    """
    loop = "keras" if facts.drop_in or facts.layer is None else "composite"
    if facts.obstacle is not None:
        return Engine(loop, facts.obstacle)
    if facts.cudnn:
        return Engine("cudnn", "a layer that cuDNN knows, through Keras")
    if facts.refusal is not None:
        return Engine(loop, facts.refusal)
    assert facts.layer is not None
    engine = "gpu" if facts.gpu else "cpu"
    chosen = planned(facts.layer, engine)
    if isinstance(chosen, str):
        return Engine(loop, chosen)
    return Engine(engine, chosen.reason)


def planned(layer: Layer, engine: str = "cpu") -> Plan | str:
    """Returns the plan of the fused kernel, or why the kernel cannot run the cell."""
    sizes = dict(layer.sizes)
    try:
        return plan(layer.cell, sizes["H"], layer.dtype, engine, sizes)
    except ValueError as refusal:
        return str(refusal)
