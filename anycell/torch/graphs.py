"""CUDA graphs of the GPU engine's tier 3: some steps captured once, and replayed for any T.

A step of tier 3 is a matmul and a kernel or two, each of some microseconds: started one by one from
Python, the launches would take longer than the work. A graph starts many steps at once. It serves
all layers of one form: what differs from call to call is in a table that kernels read, but for
weights, which are copied once a call into memory of the graph's own.

A new form (a new number of rows is one) is launched step by step at first: a capture waits for all
that the device does, and takes as long as the launches that it holds. Only what has run once can be
captured: by then all kernels are loaded, the matmul library's too.
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

PLAIN = 2  # calls of a form that are launched step by step, before it gets graphs
KEPT = 32  # forms with graphs, of a device and dtype; the one that was not used for longest goes
COUNTED = 256  # forms without, whose calls are counted

Run = Callable[[], None]


def captured(run: Run) -> Run:
    """A graph of what ``run`` launches; calling it replays that. Nothing runs yet."""
    torch.cuda.current_blas_handle()  # of this thread: none can be made during a capture
    side = _side(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        run()
    return graph.replay


@functools.lru_cache(maxsize=64)
def _side(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """The stream on which graphs for that stream are captured.

    All graphs name the work space that the matmul library has for one stream: so one is enough, and
    graphs that may run at once have two.
    """
    return torch.cuda.Stream(stream.device)


class Replays:
    """The graphs of one device and dtype. Threads may share it: its calls go one by one.

    Args:
        capture: makes something to replay of a function; ``captured`` on a card.
        blocks: steps of graphs, the longest first.
        plain: calls of a form before it gets graphs.
    """

    def __init__(
        self, capture: Callable[[Run], Run], blocks: tuple[int, ...] = BLOCKS, plain: int = PLAIN
    ) -> None:
        self.capture, self.blocks, self.plain = capture, blocks, plain
        # From filling the table to the last launch: on one stream, calls of a form share it.
        self.lock = threading.Lock()
        self.graphs: OrderedDict[Any, _Graphs] = OrderedDict()
        self.calls: OrderedDict[Any, tuple[int, Step]] = OrderedDict()
        # Memory by stream, name and shape, shared by the forms that use it.
        self.memory: WeakValueDictionary[Any, Tensor] = WeakValueDictionary()

    def __call__(self, kernels: Step, work: Work) -> None:
        """Runs a call."""
        short = work.steps < self.blocks[-1]
        # What a user captures is launches, not a graph of ours whose memory may go.
        if short or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return run_plainly(kernels, work)
        numbers, table = arguments(kernels, work)
        with self.lock:
            graphs = self._graphs(kernels, work, numbers)
            if graphs is not None:
                return graphs.run(work, table)
        return run_plainly(kernels, work)

    def _graphs(self, kernels: Step, work: Work, numbers: dict[str, int]) -> _Graphs | None:
        """The graphs of the call's form; None, as long as it was not called often enough."""
        stream = work.host.stream()
        key = id(kernels), stream, *numbers.values()  # the kernels live as long as the key
        if key not in self.graphs:
            before, _ = self.calls.pop(key, (0, kernels))
            if before < self.plain:
                _put(self.calls, key, (before + 1, kernels), COUNTED)
                return None
            memory = functools.partial(self._made, stream)
            steps = Steps(kernels, work, numbers, memory)
            _put(self.graphs, key, _Graphs(self, kernels, steps), KEPT)
        self.graphs.move_to_end(key)
        return self.graphs[key]

    def _made(self, stream: int, name: str, make: Callable[..., Tensor], *shape: Any) -> Tensor:
        """Memory of that name and shape. It must not come from ``inference_mode``: calls outside of
        that write it too.
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
        """Runs a call: the longest graphs that fit, then what is left step by step."""
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


def _put(kept: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Keeps a value, and at most ``most`` in all: the one least recently used goes."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)
