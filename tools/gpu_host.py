"""Measures what a call of the GPU engine costs on the host: Python, allocations, launches.

    python tools/gpu_host.py [--calls 200]

On a card, the time until all launches of a call are queued. Without a card, kernels are chosen as
for an H100, and a stub of the driver, machine code that returns at once, stands for the real one:
then launches and products cost nothing. Prints a line of JSON for each layer: microseconds of the
passes alone, and of calls of the layer.
"""

import contextlib
import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from gpu_ahead import Driver
from gpu_lines import Line, arguments, say, tried

import anycell
from anycell import cells
from anycell.engines.cpu import isa, jit
from anycell.engines.gpu import build, capacity, launch
from anycell.layer import Options, gpu
from anycell.plan import plan
from anycell.torch import fused
from anycell.torch.framework import TorchDevice

CASES = [  # cell, dtype, units, steps
    (cells.LSTM, "bfloat16", 64, 16),
    (cells.LSTM, "bfloat16", 768, 64),
    (cells.PeepholeLSTM, "bfloat16", 768, 64),
    (cells.GRU, "bfloat16", 768, 64),
    (cells.LSTM, "float32", 40, 16),
]
BATCH, INPUTS = 16, 16
TEXT = """
define i32 @start() {
  ret i32 0
}
define i32 @current(ptr %context) {
  store i64 1, ptr %context
  ret i32 0
}
"""


class Idle(Driver):
    """A stub of the driver whose functions that start kernels are machine code."""

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        library = jit.compile(lambda: TEXT, ["start", "current"], isa.current(), None)
        start = ctypes.CFUNCTYPE(ctypes.c_int32)(library.address("start"))
        self.cuLaunchKernel = self.cuLaunchCooperativeKernel = start  # type: ignore[assignment]
        kind = type(self.cuCtxGetCurrent)
        self.cuCtxGetCurrent = kind(library.address("current"))


def main() -> None:
    """Measures all layers."""
    parser = arguments(__doc__)
    parser.add_argument("--calls", type=int, default=200)
    calls = parser.parse_args().calls
    with contextlib.nullcontext() if torch.cuda.is_available() else without_a_card():
        for case in CASES:
            cell, dtype, hidden, steps = case
            line = {"cell": cell.name, "dtype": dtype, "H": hidden, "T": steps, "B": BATCH}
            say(line | tried(measured, *case, calls))


@contextlib.contextmanager
def without_a_card() -> Iterator[None]:
    """Layers on the CPU use the GPU engine, whose kernels are neither compiled nor launched."""
    card = {d.name: d for d in capacity.DEVICES}["H100"]
    driver, nothing = Idle(card), lambda *_: None
    binary = build.Binary("", b"", "", 0, 4, 2, 0)
    launch.loaded.cache_clear()
    TorchDevice.on.cache_clear()
    with (
        mock.patch.dict(fused.ENGINES, {"cpu": "gpu"}),
        mock.patch.object(launch, "driver", lambda: driver),
        mock.patch.object(build, "interpreted", lambda: False),
        mock.patch.object(build, "binary", lambda *_: binary),
        mock.patch.object(TorchDevice, "limits", card),
        mock.patch.object(TorchDevice, "matmul", nothing),
        mock.patch.object(TorchDevice, "matmul_add", nothing),
        mock.patch.object(TorchDevice, "summed", nothing),
    ):
        yield
    launch.loaded.cache_clear()
    TorchDevice.on.cache_clear()


def measured(cell: Any, dtype: str, hidden: int, steps: int, calls: int) -> Line:
    """The microseconds of a layer's passes and calls."""
    number = getattr(torch, dtype)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layer = anycell.torch.RNN(cell, INPUTS, hidden, device=device, dtype=number)
    x = torch.randn(steps, BATCH, INPUTS, device=device, dtype=number)
    with torch.no_grad():
        found = {"call": median(lambda: layer(x), calls)}
    leaves = [*layer.parameters(), x.requires_grad_()]

    def train() -> None:
        output, _ = layer(x)
        torch.autograd.grad(output, leaves, output)

    found["training"] = median(train, calls)
    host = TorchDevice.on(dtype, device)
    one, options = plan(cell, hidden, dtype, "gpu"), Options()
    names = {name.removesuffix("_l0"): p.detach() for name, p in layer.named_parameters()}
    given = {name: p for name, p in names.items() if not name.endswith("_ih")}
    given["x"] = torch.randn(steps, BATCH, one.gates_width, device=device, dtype=number)
    wanted = ["x", *cell.param_names]

    def forward() -> Any:
        return gpu.forward(host, one, given, options, keep=True)

    output, _, kept = forward()
    assert kept is not None
    dy, none = torch.ones_like(output), [None] * len(cell.states)

    def both() -> None:
        forward()
        gpu.backward(host, one, given, options, kept, dy, none, wanted=wanted)

    return found | {"forward": median(forward, calls), "forward+backward": median(both, calls)}


def median(run: Callable[[], Any], calls: int) -> float:
    """The median of the microseconds of a call, after some calls that nobody times."""
    times = []
    for n in range(calls + 5):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
        if torch.cuda.is_available() and n % 16 == 0:  # the queue must not fill up
            torch.cuda.synchronize()
    return round(1e6 * statistics.median(times[5:]), 1)


if __name__ == "__main__":
    main()
