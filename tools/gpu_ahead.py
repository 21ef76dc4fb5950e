"""Compiles the kernels that other tools will launch, in many processes, so that the tools find them
in Triton's cache.

    python tools/gpu_ahead.py --seconds 60 --jobs 12 [--device "NAME,90,232448,65536,132"]

The tools' own lists determine the kernels: each layer runs as in the tool, but on CPU tensors, and
a stub of the CUDA driver launches nothing. With ``--device``, which describes a card as
``anycell.engines.gpu.capacity`` does, no card is needed. Prints a line of JSON for each pass.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, TimeoutError, as_completed
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

from gpu_lines import Line, arguments, host_of_card, over, say, spelled, told, tried

from anycell.engines.gpu.interpreter import HostDriver


def main() -> None:
    """Compiles until all kernels are done or the time is over."""
    parser = arguments(__doc__, 60.0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--device", help="name, capability, shared, registers, processors")
    parser.add_argument("--cases", default="targets", help="of gpu_bench")
    parser.add_argument("--only", type=int, help="so many passes of layers")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    os.environ["OMP_NUM_THREADS"] = "1"
    device = args.device or asked()
    todo = jobs(args.cases)[: args.only]
    pool = ProcessPoolExecutor(args.jobs, initializer=os.nice, initargs=(5,))
    runs = [pool.submit(compiled, job, device) for job in todo]
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


class Job(NamedTuple):
    """A pass of our layer, as ``gpu_bench`` times it."""

    cell: str
    dtype: str
    T: int
    B: int
    I: int
    H: int
    L: int
    D: int
    train: bool


def jobs(cases: str = "targets") -> list[Job]:
    """Returns both passes of each layer that is timed or stressed, without duplicates."""
    import gpu_bench
    import gpu_stress

    shapes = [tuple(case)[1:] for case in gpu_bench.chosen(cases)]
    shapes[1:1] = [
        ("LSTM", "bfloat16", s.steps, gpu_stress.BATCH, s.hidden, s.hidden, 1, 1)
        for s in gpu_stress.STRAINS
    ]
    todo = dict[tuple[Any, ...], tuple[Any, ...]]()
    for cell, dtype, t, b, i, h, *_ in shapes:  # kernels depend on H alone; B decides the tier
        todo.setdefault((cell, dtype, b, h), (cell, dtype, min(t, 64), b, i, h, 1, 1))
    return [Job(*shape, train) for train in (True, False) for shape in todo.values()]


def compiled(job: Job, device: str) -> Line:
    """Runs the kernels of a job, without a card."""
    import gpu_bench
    import torch

    torch.set_num_threads(1)
    case, begin = gpu_bench.Case("target", *job[:-1]), time.monotonic()
    line = dict(job._asdict())
    try:
        with without_a_card(device, case.dtype == "tf32"):
            layer = gpu_bench.contenders(case, "cpu")["anycell"]
            x = torch.empty(case.T, case.B, case.I, dtype=gpu_bench.dtype_of(case))
            gpu_bench.call(layer, x, job.train)()
    except Exception as error:
        line["error"] = told(error)
    return {**line, "seconds": round(time.monotonic() - begin, 1)}


def asked() -> str:
    """The description of the current card by its driver."""
    import torch

    return spelled(host_of_card(torch.bfloat16).limits)


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
    from anycell.engines.gpu import build, launch
    from anycell.engines.gpu.capacity import Device
    from anycell.torch import fused
    from anycell.torch.framework import TorchDevice

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
