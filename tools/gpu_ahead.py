"""Compiles the kernels of ``gpu_bench.py``'s targets in many processes, so that it finds them in
Triton's cache.

    python tools/gpu_ahead.py --seconds 60 --jobs 12 [--device "NAME,90,232448,65536,132"]

Each layer runs as in that tool, but on CPU tensors, and a stub of the CUDA driver launches nothing.
With ``--device``, which describes a card as ``anycell.engines.gpu.capacity`` does, no card is
needed. Prints a line of JSON for each layer, in training and in inference.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, TimeoutError, as_completed
from contextlib import contextmanager
from typing import Any
from unittest import mock

import gpu_bench
import torch
from gpu_lines import Line, arguments, host_of_card, over, say, told, tried

from anycell.engines.gpu import build, launch
from anycell.engines.gpu.capacity import Device
from anycell.engines.gpu.interpreter import HostDriver
from anycell.torch.framework import TorchDevice
from anycell.torch.operators import fused


def main() -> None:
    """Compiles until all kernels are done or the time is over."""
    parser = arguments(__doc__, 60.0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--device", help="name, capability, shared, registers, processors")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    os.environ["OMP_NUM_THREADS"] = "1"
    pool = ProcessPoolExecutor(args.jobs, initializer=os.nice, initargs=(5,))
    # A process that has used CUDA could not be forked for others that may use it.
    device = args.device or pool.submit(asked).result()
    runs = [pool.submit(compiled, *job, device) for job in jobs()]
    good = True
    try:
        for run in as_completed(runs, timeout=max(0.0, end - time.monotonic())):
            line = tried(run.result)  # a dead process; jobs catch their own errors
            say(line)
            good &= "error" not in line
    except TimeoutError:
        say({"skipped": sum(not run.done() for run in runs), "why": over(args.seconds)})
    for process in list((pool._processes or {}).values()):
        process.kill()
    os._exit(not good)  # without waiting for the killed processes


def jobs() -> list[tuple[gpu_bench.Case, bool]]:
    """Returns the targets' layers without duplicates, each in training and in inference."""
    todo = dict[tuple[Any, ...], gpu_bench.Case]()
    for case in gpu_bench.chosen("targets"):  # kernels depend on H alone; B decides the tier
        todo.setdefault((case.cell, case.dtype, case.B, case.H), case._replace(T=min(case.T, 64)))
    return [(case, train) for train in (True, False) for case in todo.values()]


def compiled(case: gpu_bench.Case, train: bool, device: str) -> Line:
    """Runs the kernels of a layer, without a card."""
    torch.set_num_threads(1)
    begin, line = time.monotonic(), {**case._asdict(), "train": train}
    try:
        with without_a_card(device, case.dtype == "tf32"):
            layer = gpu_bench.contenders(case, "cpu")["anycell"]
            x = torch.empty(case.T, case.B, case.I, dtype=gpu_bench.dtype_of(case))
            gpu_bench.call(layer, x, train)()
    except Exception as error:
        line["error"] = told(error)
    return {**line, "seconds": round(time.monotonic() - begin, 1)}


def asked() -> str:
    """The description of the current card by its driver."""
    return spelled(host_of_card(torch.bfloat16).limits)


def spelled(card: Any) -> str:
    """A card as ``--device`` takes it: name, capability, shared, registers, processors."""
    return ",".join(map(str, card[:5]))


class Driver(HostDriver):
    """A stub of the CUDA driver, which finds every function, launches nothing and never fails."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        # CU_DEVICE_ATTRIBUTE_..., as in ``launch``
        major, minor = divmod(device.capability, 10)
        self.attributes = {75: major, 76: minor, 97: device.shared, 82: device.registers}
        self.attributes[16] = device.processors

    def launch(self, *_: Any) -> int:
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: Any, _: Any) -> int:
        value._obj.value = self.attributes.get(getattr(attribute, "value", attribute), 0)
        return 0

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, count: Any, *_: Any) -> int:
        count._obj.value = 1
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0


@contextmanager
def without_a_card(device: str, tf32: bool) -> Iterator[None]:
    """Makes layers on the CPU use the GPU engine, whose kernels are compiled but not launched."""
    name, *numbers = device.rsplit(",", 4)
    card = Device(name, *map(int, numbers), build.compiler())
    nothing, driver = mock.Mock(return_value=None), Driver(card)
    with (
        mock.patch.dict(fused.ENGINES, {"cpu": "gpu"}),
        mock.patch.object(launch, "driver", lambda: driver),
        mock.patch.object(TorchDevice, "limits", card),
        mock.patch.object(TorchDevice, "tf32", lambda host, cell: tf32),
        mock.patch.object(TorchDevice, "matmul", nothing),
        mock.patch.object(TorchDevice, "matmul_add", nothing),
    ):
        yield


if __name__ == "__main__":
    main()
