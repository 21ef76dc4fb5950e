"""CUDA graphs of the GPU engine's tier 3: some steps captured once, and replayed for any T.

A step of tier 3 is a matmul and a kernel or two, each of some microseconds: started one by one from
Python, the launches would take longer than the work. A graph starts many steps at once. It serves
all layers of one form: kernels read what differs from call to call from a table; only the weights
are copied, once a call, into memory that belongs to the graph.

A new form, such as a new number of rows, is launched step by step at first: a capture waits for all
work on the device, and takes as long as the launches that it records. Only launches that have run
once can be captured: by then all kernels are loaded, including the matmul library's.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from anycell.engines.gpu import Work
from anycell.engines.gpu.step import Step
from anycell.engines.gpu.steps import BLOCKS, Steps, arguments, run_plainly
from anycell.recent import add_recent

PLAIN = 2  # calls of a form that are launched step by step, before it gets graphs
KEPT = 32  # forms with graphs, for a device and dtype; the least recently used one goes
COUNTED = 256  # forms without graphs, whose calls are counted

Run = Callable[[], None]


def captured(run: Run) -> Run:
    """Captures what ``run`` launches, without running it; calling the result replays it."""
    torch.cuda.current_blas_handle()  # makes this thread's handle, which a capture cannot make
    side = _side(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        run()
    return graph.replay


@functools.lru_cache(maxsize=64)
def _side(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """Returns the stream on which graphs for ``stream`` are captured.

    A graph refers to the workspace that the matmul library has for the stream of the capture. So
    graphs for one stream share a workspace, and graphs that may run at once have different ones.
    """
    return torch.cuda.Stream(stream.device)


class Replays:
    """The graphs of one device and dtype. Threads may share it: a lock runs calls one by one.

    Args:
        capture: turns a function into one that replays its launches; ``captured`` on a card.
        blocks: the numbers of steps of graphs, the largest first.
        plain: calls of a form before it gets graphs.
    """

    def __init__(
        self, capture: Callable[[Run], Run], blocks: tuple[int, ...] = BLOCKS, plain: int = PLAIN
    ) -> None:
        self.capture, self.blocks, self.plain = capture, blocks, plain
        # Held from filling the table to the last launch: calls of a form and stream share a table.
        self.lock = threading.Lock()
        self.graphs: OrderedDict[Any, _Graphs] = OrderedDict()
        self.calls: dict[Any, tuple[int, Step]] = {}
        # Memory by stream, name and shape, shared by the forms that use it.
        self.memory: WeakValueDictionary[Any, Tensor] = WeakValueDictionary()

    def __call__(self, kernels: Step, work: Work) -> None:
        """Runs a call."""
        short = work.steps < self.blocks[-1]
        # A user's capture must record launches, not a graph of ours whose memory may be freed.
        if short or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return run_plainly(kernels, work)
        numbers, table = arguments(kernels, work)
        with self.lock:
            graphs = self._graphs(kernels, work, numbers)
            if graphs is not None:
                return graphs.run(work, table)
        return run_plainly(kernels, work)

    def _graphs(self, kernels: Step, work: Work, numbers: dict[str, int]) -> _Graphs | None:
        """Returns the graphs of the call's form; None until it has been called often enough."""
        stream = work.host.stream()
        key = id(kernels), stream, *numbers.values()  # the kernels live as long as the key
        if key not in self.graphs:
            before, _ = self.calls.pop(key, (0, kernels))
            if before < self.plain:
                add_recent(self.calls, key, (before + 1, kernels), COUNTED)
                return None
            memory = functools.partial(self._made, stream)
            steps = Steps(kernels, work, numbers, memory)
            add_recent(self.graphs, key, _Graphs(self, kernels, steps), KEPT)
        self.graphs.move_to_end(key)
        return self.graphs[key]

    def _made(self, stream: int, name: str, make: Callable[..., Tensor], *shape: Any) -> Tensor:
        """Returns memory of that name and shape. It is made outside of ``inference_mode``, because
        calls outside of that mode write to it too.
        """
        key = stream, name, shape
        tensor = self.memory.get(key)
        if tensor is None:
            with torch.inference_mode(False), torch.no_grad():
                self.memory[key] = tensor = make(*shape)
        return tensor


class _Graphs:
    """The graphs of one form, one of each length."""

    def __init__(self, replays: Replays, kernels: Step, steps: Steps) -> None:
        self.replays, self.kernels, self.steps = replays, kernels, steps
        self.captured: dict[int, Run] = {}

    def run(self, work: Work, table: list[int]) -> None:
        """Runs a call: the longest graphs that fit, then the remaining steps one by one."""
        with torch.no_grad():
            self.steps.load(work, table)
            left = work.steps
            for block in self.replays.blocks:
                for _ in range(left // block):
                    self._replay(block)
                left %= block
            self.steps.run(left)
            self.steps.close(left)

    def _replay(self, block: int) -> None:
        if block not in self.captured:
            self.steps.advance(0)  # loads this kernel too
            self.captured[block] = self.replays.capture(functools.partial(self._block, block))
        self.captured[block]()

    def _block(self, block: int) -> None:
        self.steps.run(block)
        self.steps.advance(block)
