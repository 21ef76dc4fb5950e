"""Calls the handler of JAX's programs on a card without JAX: by frames of our own, with PyTorch's
arrays and stream.

    python tools/gpu_frames.py

Prints a line of JSON for each tier and place: the calling thread, a thread that is new to CUDA, and
two threads on two streams at once. Results and gradients must have the bits of the recipe that
PyTorch plays. A rehearsal without a card (``gpu_check --rehearse``) interprets the kernels of
smaller layers.
"""

import contextlib
import ctypes
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from gpu_lines import Line, arguments, need_card, rehearsing, say, tried

from anycell import cells
from anycell.engines.cpu.xla import (
    API,
    ARGUMENTS,
    ATTRIBUTES,
    CREATE_ERROR,
    DATA,
    GIVEN,
    MADE,
    MESSAGE,
    RESULTS,
)
from anycell.engines.gpu import xla
from anycell.layer import Options, gpu
from anycell.layer.launches import gave_up
from anycell.plan import plan
from anycell.torch.framework import TorchDevice

WORD, POINTER = ctypes.c_uint64, ctypes.c_void_p
FUNCTION = ctypes.CFUNCTYPE(POINTER, POINTER)
STEPS, BATCH = 12, 20
HIDDEN = {1: 64, 2: 256}


class Frame:
    """A call frame of XLA, whose functions know a stream and list errors."""

    def __init__(self, operands: Sequence[int], made: Sequence[int], record: int, stream: int):
        self.stream, self.errors, self.kept = stream, list[str](), list[Any]()
        functions = {CREATE_ERROR: self.error, xla.STREAM_GET: self.answer}
        self.kept += [FUNCTION(f) for f in functions.values()]
        addresses = [ctypes.cast(f, POINTER).value for f in self.kept]
        table = self.words(192, dict(zip(functions, addresses, strict=True)))
        number = self.words(8, {0: record})
        attributes = self.words(8, {0: self.words(16, {xla.NUMBER: number})})
        fields = {0: 176, API: table, GIVEN: len(operands), ARGUMENTS: self.buffers(operands)}
        fields |= {MADE: len(made), RESULTS: self.buffers(made), ATTRIBUTES: attributes}
        self.address = self.words(176, fields)

    def words(self, count: int, values: dict[int, Any]) -> int:
        """Memory of ``count`` bytes with these words at these bytes."""
        memory = (WORD * (count // 8))(*[values.get(8 * i, 0) for i in range(count // 8)])
        self.kept.append(memory)
        return ctypes.addressof(memory)

    def buffers(self, addresses: Sequence[int]) -> int:
        rows = [self.words(48, {DATA: address}) for address in addresses]
        return self.words(8 * max(1, len(rows)), {8 * i: row for i, row in enumerate(rows)})

    def answer(self, asked: int) -> None:
        WORD.from_address(asked + xla.OWN).value = self.stream

    def error(self, asked: int) -> int:
        text = ctypes.string_at(WORD.from_address(asked + MESSAGE).value)
        self.errors.append(text.decode())
        return 1


class Framed(TorchDevice):
    """PyTorch's tensors, on which the handler runs a pass."""

    multiplies = False

    def trace(self, recipe: Any, given: Any, options: Options) -> list[Any]:
        operands = [*[given[name] for name in recipe.names], *recipe.constants]
        made = [*map(self.like, recipe.templates), self.block(recipe.bytes)]
        (run,) = recipe.parts
        record = xla.Record(run.tables, recipe.told, gave_up(self), recipe.bytes)
        addresses = (list(self.pointers(tensors)) for tensors in (operands, made))
        frame = Frame(*addresses, record.address, self.stream())
        failed = FUNCTION(xla.handler(not recipe.waits))(frame.address)
        assert not failed, frame.errors
        return [*operands, *made]


def main() -> None:
    """Runs both tiers in all places."""
    arguments(__doc__).parse_args()
    need_card("gpu_frames")
    right = True
    for tier in (1, 2):
        line = {"tier": tier, **tried(compared, tier)}
        say(line)
        right &= all(line.get(place, False) for place in ("here", "new thread", "two streams"))
    sys.exit(not right)


def compared(tier: int) -> Line:
    """Says for each place whether the bits are the same."""
    small = rehearsing()
    device, dtype = torch.device("cpu" if small else "cuda"), "float32" if small else "bfloat16"
    hidden, steps, batch = (9 * tier, 3, 3) if small else (HIDDEN[tier], STEPS, BATCH)
    one = plan(cells.LSTM, hidden, dtype, "gpu")
    hosts = [kind(getattr(torch, dtype), device) for kind in (TorchDevice, Framed)]
    shapes = {"x": (steps, batch, 4 * hidden), "weight_hh": (4 * hidden, hidden)}
    options = {"dtype": getattr(torch, dtype), "device": device}
    given = {n: torch.randn(s, **options) / hidden**0.5 for n, s in shapes.items()}

    def run(host: TorchDevice) -> list[Any]:
        host.tier = tier
        with np.errstate(all="ignore"):
            passes = forward_and_backward(host, one, given)
        if not small:
            torch.cuda.current_stream().synchronize()
        return passes

    first, framed = map(run, hosts)
    lock = threading.Lock() if small else contextlib.nullcontext()  # the interpreter's own

    def elsewhere() -> list[Any]:
        with contextlib.nullcontext() if small else torch.cuda.stream(torch.cuda.Stream()), lock:
            return run(hosts[1])

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(run, hosts[1]).result()
    with ThreadPoolExecutor(2) as pool:
        both = [work.result() for work in [pool.submit(elsewhere) for _ in range(2)]]

    def same(found: list[Any]) -> bool:
        return all(map(torch.equal, found, first))

    return {"here": same(framed), "new thread": same(other), "two streams": all(map(same, both))}


def forward_and_backward(host: TorchDevice, one: Any, given: dict[str, Any]) -> list[Any]:
    """All results of a layer whose input is projected, and the gradient of that."""
    options = Options()
    output, finals, kept = host.run(gpu.forward, one, given, options, keep=True)
    d_final = [None] * len(finals)
    d = host.run(gpu.backward, one, given, options, kept, output, d_final, wanted=["x"])
    return [output, *finals, d["x"]]


if __name__ == "__main__":
    main()
