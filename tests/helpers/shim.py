"""XLA on the CPU in the place of XLA on a card: a shim puts a stream and a device's memory into the
frames that the real handler gets, and the driver interprets the kernels.
"""

import ctypes
import functools
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from gpu import CARDS

from anycell.engines.gpu import launch, xla
from anycell.engines.gpu.interpreter import Interpreter, Started
from anycell.layer import recipe
from anycell.layer.card import TracedDevice

FRAME = 176  # bytes of a frame
STREAM = 0x5EED
FUNCTION = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


def word(address: int) -> Any:
    return ctypes.c_uint64.from_address(address)


def copied(address: int, count: int) -> Any:
    return (ctypes.c_char * count).from_buffer_copy(ctypes.string_at(address, count))


class Shim:
    """A handler that calls another one with XLA's frames, some of whose functions are its own.

    Attributes:
        memory: that has not been freed, by address.
    """

    def __init__(self, handler: int) -> None:
        self.inner, self.memory = FUNCTION(handler), dict[int, Any]()
        own = {xla.STREAM_GET: self.stream, xla.ALLOCATE: self.allocate, xla.FREE: self.free}
        self.own = {offset: FUNCTION(function) for offset, function in own.items()}
        self.outer = FUNCTION(self.call)
        self.address: Any = ctypes.cast(self.outer, ctypes.c_void_p).value

    def stream(self, arguments: int) -> None:
        word(arguments + xla.OWN).value = STREAM

    def allocate(self, arguments: int) -> None:
        size, aligned = (word(arguments + xla.OWN + 8 * n).value for n in range(2))
        block = np.full(size + aligned, 255, np.uint8)  # NaN in any dtype
        address = block.ctypes.data + -block.ctypes.data % aligned
        self.memory[address] = block
        word(arguments + xla.OWN + 16).value = address

    def free(self, arguments: int) -> None:
        del self.memory[word(arguments + xla.OWN + 8).value]

    def call(self, frame: int) -> int | None:
        if word(frame + 8).value:  # XLA asks for the version
            return self.inner(frame)
        functions = word(frame + xla.API).value
        table, mine = copied(functions, word(functions).value), copied(frame, FRAME)
        for offset, function in self.own.items():
            address = ctypes.cast(function, ctypes.c_void_p).value
            word(ctypes.addressof(table) + offset).value = address
        word(ctypes.addressof(mine) + xla.API).value = ctypes.addressof(table)
        return self.inner(ctypes.addressof(mine))


class Launched(list[Started]):
    """The launches of a test, of which some may fail."""

    fails: dict[str, int]


@contextmanager
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    """Makes the driver one that interprets kernels of an H100; lists the launches."""
    seen, run = Launched(), Interpreter.launch
    seen.fails = {}

    def started(driver: Interpreter, one: Started) -> int:
        seen.append(one)
        name = driver.kernels[one.handle - 1].name
        with np.errstate(all="ignore"):
            return seen.fails.get(name) or run(driver, one)

    monkeypatch.setattr(Interpreter, "launch", started)
    monkeypatch.setattr(TracedDevice, "limits", CARDS["H100"])
    monkeypatch.setattr(launch, "missing", lambda: None)
    yield seen
    recipe.known.clear()


@functools.cache
def _target(captured: bool) -> str:
    """The name by which JAX calls the handler through a shim."""
    import jax

    name, shim = f"shim_{secrets.token_hex(8)}", Shim(xla.handler(captured))
    capsule = jax.ffi.pycapsule(ctypes.c_void_p(shim.address))
    jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    SHIMS.append(shim)
    return name


SHIMS: list[Shim] = []


@contextmanager
def jax_on_a_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    """Makes JAX run layers for a card on the CPU; lists the launches."""
    import jax

    from anycell.jax import device, fused

    monkeypatch.setitem(fused.ENGINES, "cpu", "gpu")
    monkeypatch.setattr(device, "_target", _target)
    monkeypatch.setattr(device, "doubt", lambda _: None)
    jax.clear_caches()
    fused._drafted.cache_clear()
    with launches(monkeypatch) as seen:
        yield seen
    fused._drafted.cache_clear()
    jax.clear_caches()
