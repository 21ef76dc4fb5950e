"""CUDA graphs of the GPU engine's tier 3: a few steps captured once, and replayed for any T.

A step of tier 3 is a matmul and a kernel or two, each of some microseconds: started one by one from
Python, the launches would take longer than the work. A graph starts them all at once, but always
with the arguments that it was captured with. So each graph has memory of its own, the same for all
layers of one form. Before a replay the inputs of its steps are copied there, and after it their
results from there, a small part of what the steps themselves move.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anycell.engines.gpu import Call, Span

Run = Callable[[Call], None]
KEPT = 32  # graphs of a device and dtype; the one that was not used for longest goes

# What the steps write, by the name without its number. Scratch is written before it is read.
_RESULTS = {
    False: frozenset({"state", "out", "saved"}),
    True: frozenset({"dx", "dr", "operand"}),
}
_CARRIED = frozenset({"work", "dstate", "dreset", "dparam", "dstatic"})
_SCRATCH = frozenset({"product", "back", "operand"})


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """A graph of what ``run`` launches; calling it replays that."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()  # loads the kernels, which a capture must not
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


class Replays:
    """The graphs of one device and dtype.

    Args:
        capture: makes something to replay of a function; ``captured`` on a card.
    """

    def __init__(self, capture: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
        self.capture = capture
        self.graphs: OrderedDict[Any, _Graph] = OrderedDict()

    def __call__(self, run: Run, kernels: Any, call: Call, first: bool) -> None:
        """Runs the call; ``first`` of several with the same weights and other constants."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return run(call)  # into the graph that the user captures
        key = _key(kernels, call)
        graph = self.graphs.get(key)
        if graph is None:
            graph, first = _Graph(kernels, call), True
            graph.replay = self.capture(functools.partial(run, graph.call))
            self.graphs[key] = graph
            if len(self.graphs) > KEPT:
                self.graphs.popitem(last=False)
        self.graphs.move_to_end(key)
        graph.load(call, first)
        graph.replay()
        graph.store(call)


def _key(kernels: Any, call: Call) -> Any:
    """What graphs hang on beside numbers in memory."""
    arrays = {n: v for n, v in call.values.items() if isinstance(v, Tensor)}
    shapes = tuple((n, tuple(a.shape)) for n, a in sorted(arrays.items()))
    numbers = tuple(
        (n, v & 1 if n == "turn" else v)
        for n, v in sorted(call.values.items())
        if isinstance(v, int)
    )
    spans = tuple((n, s.sign, s.column, tuple(s.array.shape[1:])) for n, s in call.spans.items())
    weights = tuple(tuple(w.shape) for w in call.weights)
    return id(kernels), call.host.stream(), call.batch, shapes, numbers, spans, weights


class _Graph:
    """Memory of a graph, and the call that it was captured with."""

    replay: Callable[[], None]

    def __init__(self, kernels: Any, call: Call) -> None:
        self.kernels = kernels  # its id is part of the key
        spans, values = {}, dict(call.values)
        for name, span in call.spans.items():
            begin, end = _window(span, call.steps)
            own = span.array.new_zeros((end - begin, *span.array.shape[1:]))
            spans[name] = span._replace(array=own, first=span.first - begin)
        for name, value in values.items():
            if isinstance(value, Tensor):
                values[name] = torch.zeros_like(value, memory_format=torch.contiguous_format)
        if call.draws is not None:
            values["draws"] = call.host.integers(call.draws)
        weights = [torch.zeros_like(w) for w in call.weights]
        self.call = call._replace(values=values, spans=spans, weights=weights)

    def load(self, call: Call, first: bool) -> None:
        """Copies what the steps read."""
        mine = self.call
        for name, span in call.spans.items():
            if _stem(name) not in _RESULTS[call.form.backward] or _stem(name) == "state":
                start, end = _window(span, call.steps)
                begin, end = max(0, start), min(span.array.shape[0], end)
                mine.spans[name].array[begin - start : end - start] = span.array[begin:end]
        for name, value in call.values.items():
            stem = _stem(name)
            if isinstance(value, Tensor) and stem not in _SCRATCH and (first or stem in _CARRIED):
                mine.values[name].copy_(value)
        if call.draws is not None:
            mine.values["draws"].copy_(call.host.integers(call.draws))
        for own, weight in zip(mine.weights, call.weights if first else (), strict=first):
            own.copy_(weight)

    def store(self, call: Call) -> None:
        """Copies what the steps have written to where it belongs."""
        for name, span in call.spans.items():
            if _stem(name) in _RESULTS[call.form.backward]:
                shift = span.sign * (_stem(name) == "state")  # the state after each step
                ends = span.first + shift, span.first + shift + span.sign * (call.steps - 1)
                begin, end = min(ends), max(ends) + 1
                own = self.call.spans[name]
                offset = own.first - span.first
                columns = slice(None)
                if name in ("state0", "out"):  # which the directions of a layer share
                    columns = slice(
                        span.column, span.column + call.plan.sizes[call.plan.cell.states[0].size]
                    )
                part = own.array[begin + offset : end + offset, :, columns]
                span.array[begin:end, :, columns].copy_(part)
        for name, value in call.values.items():
            if _stem(name) in _CARRIED:
                value.copy_(self.call.values[name])


def _stem(name: str) -> str:
    return name.rstrip("0123456789")


def _window(span: Span, steps: int) -> tuple[int, int]:
    """The times that steps may touch: their own and one more on either side, there or not."""
    ends = span.first, span.first + span.sign * (steps - 1)
    return min(ends) - 1, max(ends) + 2
