"""The rule that chooses the engine of a layer: a function of facts, asked before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from anycell.lang.cell import Cell
from anycell.plan import Engine, Plan, plan

FUSED = "tensorflow", "torch", "jax"  # Keras's backends that can call the kernels
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
        cell: the step in anycell's language; None if it cannot be expressed there.
        units: H.
        sizes: the sizes besides H that states declare, by their symbols.
        dtype: the dtype of the computation.
        backend: "tensorflow", "torch", "jax", or another of Keras's.
        gpu: whether the layer is placed on a GPU.
        cudnn: whether Keras's cuDNN path takes the layer: ``LSTM`` or ``GRU`` of default
            activations, with bias, without recurrent dropout and unrolling.
        drop_in: whether the layer is a subclass of Keras's layer, which has a loop of its own.
        obstacle: why neither the kernel nor cuDNN can run it, if there is a reason: an activation,
            recurrent dropout in training.
        traced: why no code outside the graph can be called, if there is a reason: TensorFlow's
            XLA, export, ``step_by_step``.
    """

    cell: Cell | None
    units: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    dtype: str = "float32"
    backend: str = "tensorflow"
    gpu: bool = False
    cudnn: bool = False
    drop_in: bool = False
    obstacle: str | None = None
    traced: str | None = None


def choose(facts: Facts) -> Engine:
    """Chooses the engine for these facts.

    Example:
        >>> from anycell.cells import PeepholeLSTM
        >>> choose(Facts(PeepholeLSTM, 64, gpu=True)).name
        'composite'
    """
    loop = "keras" if facts.drop_in or facts.cell is None else "composite"
    if facts.obstacle is not None:
        return Engine(loop, facts.obstacle)
    if facts.gpu:
        if facts.cudnn and facts.backend in ("tensorflow", "torch", "jax"):
            return Engine("cudnn", "a layer that cuDNN knows, through Keras")
        where = {
            "tensorflow": "TensorFlow gives kernels of others no stream; XLA compiles the loop",
            "jax": "XLA compiles the loop; no fused kernel for a GPU yet",
        }
        return Engine(loop, where.get(facts.backend, "no fused kernel for a GPU yet"))
    if facts.traced is not None:
        return Engine(loop, facts.traced)
    if facts.backend not in FUSED:
        return Engine(loop, f"no way to call the kernels from Keras's backend {facts.backend!r}")
    assert facts.cell is not None
    chosen = planned(facts.cell, facts.units, facts.dtype, facts.sizes)
    if isinstance(chosen, str):
        return Engine(loop, chosen)
    return Engine("cpu", chosen.reason)


def planned(cell: Cell, units: int, dtype: str, sizes: Mapping[str, int]) -> Plan | str:
    """Returns the plan of the fused kernel, or why the kernel cannot run the cell."""
    try:
        return plan(cell, units, dtype, "cpu", sizes)
    except ValueError as refusal:
        return str(refusal)
