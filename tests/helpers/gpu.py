"""Solves random problems on the GPU engine: on a card, or in Triton's interpreter."""

import ctypes
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cards
import numpy as np
import pytest
from problems import (
    Arrays,
    Problem,
    assert_same,
    from_layer,
    layer_options,
    random_problem,
    results,
    to_layer,
)
from processes import run

torch = pytest.importorskip("torch")
CARD = cards.is_there()
cards.choose_interpreter()
pytest.importorskip("triton")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from anycell import Cell  # noqa: E402
from anycell.engines.gpu import capacity, library  # noqa: E402
from anycell.engines.gpu.interpreter import HostDriver, Started  # noqa: E402
from anycell.layer import gpu as device  # noqa: E402  (Triton reads the variable when it is imported)
from anycell.plan import plan  # noqa: E402
from anycell.torch.framework import TorchDevice  # noqa: E402
from anycell.torch.operators import fused, warm  # noqa: E402

CARDS = {device.name: device for device in capacity.DEVICES}
DEVICE = torch.device("cuda", torch.cuda.current_device()) if CARD else torch.device("cpu")
if CARD:  # as installed, layers that cuDNN has may round to TF32, which tests of float32 must not
    torch.backends.cudnn.allow_tf32 = False
SLOW = [] if CARD else [pytest.mark.slow]  # marks of tests that are slow in the interpreter only
# The environment of a new process, in which Triton compiles instead of interpreting.
COMPILES = {"TRITON_INTERPRET": None, "OMP_NUM_THREADS": "1"}
without_a_card = pytest.mark.skipif(CARD, reason="a card shows more")


def reports(*words: str, **how: Any) -> list[dict[str, Any]]:
    """Returns the compiler's reports on kernels; the tool fails if a kernel does not fit."""
    said = run("tools/gpu_compile.py", "--json", *words, limit=1800, **COMPILES, **how)
    return [json.loads(line) for line in said.splitlines()]


def choose_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torch's layers on the CPU take the GPU's engine, and forget earlier calls."""
    monkeypatch.setitem(fused.ENGINES, "cpu", "gpu")
    monkeypatch.setattr(warm, "FRONTS", {})


class Poisoned(TorchDevice):
    """A host whose memory starts as NaN, which shows reads of memory not yet written."""

    def empty(self, shape: tuple[int, ...], wide: bool = False) -> Any:
        return super().empty(shape, wide).fill_(float("nan"))

    def like(self, array: Any) -> Any:  # type: ignore[override]
        return torch.empty_like(array).fill_(float("nan"))

    def block(self, count: int) -> Any:
        return super().block(count).fill_(255)  # NaN in any dtype


def by_gpu(
    problem: Problem,
    dtype: str | None = None,
    tier: int | None = 3,
    projected: bool = False,
    backwards: int = 1,
    replays: Any = None,
    host_class: type[TorchDevice] = Poisoned,
    checkpoint: int | None = None,
) -> Arrays:
    """Solves a problem by the kernels of the GPU engine.

    Args:
        dtype: of the plan; None takes the problem's.
        tier: of the kernels.
        projected: adds an input projection whose weight is the unit matrix.
        backwards: how many times the backward pass runs.
        replays: graphs of tier 3, as ``interpreted_graphs`` makes them.
        host_class: allocates the arrays.
        checkpoint: the number of steps of a segment.
    """
    dtype = dtype or problem.dtype
    chosen = plan(problem.cell, problem.sizes["H"], dtype, "gpu", problem.sizes)
    host = host_class(getattr(torch, dtype), DEVICE)
    host.tier, host.replay = tier, replays

    def array(given: Any) -> Any:
        if given is None or given.dtype == bool:
            return None if given is None else torch.tensor(given.view(np.uint8), device=DEVICE)
        return torch.tensor(given, dtype=host.dtype, device=DEVICE)

    arrays = {name: array(a) for name, a in to_layer(problem, projected).items()}
    d_final = [array(d) for d in problem.group("d final")]
    how = layer_options(problem)._replace(checkpoint=checkpoint)
    # The interpreter also computes, with NumPy, masked elements outside of arrays.
    with np.errstate(all="ignore"):
        output, finals, kept = device.forward(host, chosen, arrays, how, keep=True)
        for _ in range(backwards):
            d_output = array(problem["d output"])
            d = device.backward(host, chosen, arrays, how, kept, d_output, d_final)

    def numbers(tensor: Any) -> Any:
        return tensor.float().cpu().numpy().astype(problem["x"].dtype)

    solution = results(problem, numbers(output), map(numbers, finals))
    return solution | from_layer(problem, {name: numbers(t) for name, t in d.items()})


def assert_launches_count_on(cell: Cell, rng: np.random.Generator) -> None:
    """Launches and segments of tier 2 count on: the results have the bits of one launch."""
    problem = random_problem(cell, (3, 3, 18), rng, "float32", nearby=6, resets=True)
    whole = by_gpu(problem, tier=2)
    again = by_gpu(problem, tier=2, checkpoint=2)
    sums = {name for name in whole if name.endswith("_l0")}  # over time, in another order
    assert_same(again, whole, *(whole.keys() - sums))


# A host whose arrays are plain addresses.
ADDRESSES = SimpleNamespace(pointer=int, stream=lambda: 0, ordinal=0)


class Driver(HostDriver):
    """A stub of the CUDA driver with two T4.

    Args:
        current: the context of the thread; 0 for none.
        together: programs of a kernel that run at once on a multiprocessor.
        results: results of functions, by name; others return 0.

    Attributes:
        launched: the launches that succeeded.
        kept: the devices whose contexts are kept.
        count: how many arguments to read.
        last: the last of them.
        arguments: of the last launch, 64 bits of each.
    """

    count = 0
    last: Started

    def __init__(self, current: int = 1, together: int = 1, **results: int) -> None:
        super().__init__()
        self.context, self.together, self.results = current, together, results
        self.launched, self.kept = list[str](), list[int]()
        self.arguments = list[int]()

    def launch(self, one: Started) -> int:
        name = "cuLaunchCooperativeKernel" if one.cooperative else "cuLaunchKernel"
        if not self.results.get(name, 0):
            self.launched.append(name)
            places = one.parameters[: self.count]
            self.arguments = [ctypes.c_uint64.from_address(place).value for place in places]
            self.last = one
        return self.results.get(name, 0)

    def current(self, context: Any) -> int:
        context[0] = self.context
        return 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*given: Any) -> int:
            result = self.results.get(name, 0)
            match name, given:
                case "cuCtxSetCurrent", (context,):
                    self.context = context.value
                case "cuDeviceGet", (handle, ordinal):
                    handle._obj.value = 100 + ordinal
                    result = 0 if ordinal < 2 else 101
                case "cuDevicePrimaryCtxRetain", (context, handle):
                    self.kept.append(handle.value)
                    context._obj.value = 1000 + handle.value
                case "cuLibraryLoadData" | "cuLibraryGetKernel" | "cuKernelGetFunction", (one, *_):
                    one._obj.value = 1
                case "cuOccupancyMaxActiveBlocksPerMultiprocessor", (count, *_):
                    count._obj.value = self.together
                case "cuDeviceGetAttribute", (value, attribute, _):
                    limits = {75: 7, 76: 5, 97: 64 << 10, 82: 1 << 16, 16: 40}
                    value._obj.value = limits[attribute]
                case "cuDeviceGetName", (text, *_):
                    text.value = b"Stub T4"
                case "cuGetErrorName", (code, text):
                    text._obj.value = f"CUDA_ERROR_{code}".encode()
            return result

        return call


@triton.jit
def functions_of_16_bits(x, y, count):
    """Stores sigmoid and tanh, both in their form for 16 bits and in their exact form."""
    place = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    inside = place < count
    values = tl.load(x + place, mask=inside, other=0.0)
    tl.store(y + place, library.sigmoid_16(values), mask=inside)
    tl.store(y + count + place, library.tanh_16(values), mask=inside)
    tl.store(y + 2 * count + place, library.sigmoid(values), mask=inside)
    tl.store(y + 3 * count + place, library.tanh(values), mask=inside)
