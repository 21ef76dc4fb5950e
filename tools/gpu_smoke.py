"""Checks one tier, pass and dtype of the GPU engine on very little data: it must run and be right.

    python tools/gpu_smoke.py 2 backward bfloat16

Prints a line of JSON for each cell: the largest error of results and gradients against the same
layer step by step in float64, relative to the limit of ``tests/helpers/tolerances.py``. The exit
status is 1 if a cell is wrong. Half of the calls read x at an odd address. Run each case in a
process of its own, which may lose the card. A rehearsal without a card (``gpu_check --rehearse``)
interprets the kernels of smaller layers, bfloat16 as float16, which the interpreter multiplies
rightly.
"""

import contextlib
import copy
import sys
import time
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from gpu_lines import ROOT, arguments, need_card, rehearsing, say, told

sys.path.insert(0, str(ROOT / "tests" / "helpers"))
from tolerances import error, limit

import anycell
from anycell import cells
from anycell.torch import fused
from anycell.torch.framework import TorchDevice

CELLS = (cells.LSTM, cells.GRU)
INPUTS = 24


class Sizes(NamedTuple):
    """The sizes of layers and calls: more steps than a graph of tier 3 has, more rows than a
    program has; in tier 3, the later calls replay graphs.
    """

    steps: int = 20
    batch: int = 20
    calls: int = 4
    hidden: dict[int, int] = {1: 64, 2: 256, 3: 100}  # noqa: RUF012


SMALL = Sizes(3, 3, 2, {1: 9, 2: 18, 3: 9})


class Case(NamedTuple):
    """The case that one process checks."""

    tier: int
    passes: str
    dtype: str


def main() -> None:
    """Runs one case."""
    parser = arguments(__doc__)
    parser.add_argument("tier", type=int, choices=[1, 2, 3])
    parser.add_argument("passes", choices=["forward", "backward"], metavar="pass")
    parser.add_argument("dtype", choices=["bfloat16", "float16", "float32"])
    case = Case(**vars(parser.parse_args()))
    need_card("gpu_smoke")
    right, small = True, rehearsing()
    if small and case.dtype == "bfloat16":
        case = case._replace(dtype="float16")
    with mock.patch.dict(fused.ENGINES, {"cpu": "gpu"}) if small else contextlib.nullcontext():
        for cell in CELLS:
            line = tried(cell, case, "cpu", SMALL) if small else tried(cell, case, "cuda")
            say({**case._asdict(), "cell": cell.name, **line})
            # Only float32 may have no kernels of a tier.
            right &= case.dtype == "float32" if "refused" in line else line.get("worst", 2.0) <= 1.0
    sys.exit(not right)


def tried(cell: Any, case: Case, device: str, sizes: Sizes = Sizes()) -> dict[str, Any]:  # noqa: B008
    """The largest error of a cell, relative to its limit; or its refusal or error."""
    begin, training = time.monotonic(), case.passes == "backward"
    torch.manual_seed(1997)
    dtype = getattr(torch, case.dtype)
    layer = anycell.torch.RNN(cell, INPUTS, sizes.hidden[case.tier], device=device, dtype=dtype)
    shape = sizes.steps, sizes.batch, INPUTS
    x = torch.randn(shape, device=device, dtype=dtype)
    odd = torch.empty(x.numel() + 1, device=device, dtype=dtype)[1:].view(shape).copy_(x)
    # Step by step: no engine has float64 on a card. Runs first, because kernels may lose the card.
    right = results(copy.deepcopy(layer).double(), x.double(), training)
    try:
        with mock.patch.object(TorchDevice, "tier", case.tier), np.errstate(all="ignore"):
            calls = [results(layer, (x, odd)[n % 2], training) for n in range(sizes.calls)]
    except Exception as raised:
        if "cannot run" in str(raised):  # a tier that has no such kernels
            return {"refused": str(raised)}
        return {"error": told(raised)}
    parts = {
        name: max(error(call[name], value, ()) for call in calls) / limit(case.dtype, kind_of(name))
        for name, value in right.items()
    }
    worst = max(parts, key=lambda name: parts[name])
    seconds = round(time.monotonic() - begin, 1)
    return {"worst": round(parts[worst], 3), "of": worst, "seconds": seconds}


def results(layer: Any, x: torch.Tensor, training: bool) -> dict[str, Any]:
    """Output and final states, and in training all gradients, as arrays."""
    x = x.detach().requires_grad_(training)
    with torch.set_grad_enabled(training):
        output, final = layer(x)
    named = {"output": output} | {
        f"final {i}": s for i, s in enumerate(final if isinstance(final, tuple) else (final,))
    }
    if training:
        weights = [torch.linspace(-1, 1, t.numel(), device=t.device) for t in named.values()]
        pairs = zip(named.values(), weights, strict=True)
        total = sum((t * w.view(t.shape).to(t)).sum() for t, w in pairs)
        leaves = {"d x": x, **{f"d {name}": p for name, p in layer.named_parameters()}}
        named |= zip(leaves, torch.autograd.grad(total, leaves.values()), strict=True)
    return {name: value.detach().double().cpu().numpy() for name, value in named.items()}


def kind_of(name: str) -> str:
    """The kind of an array in the table of tolerances."""
    return "gradient" if name.startswith("d ") else "forward"


if __name__ == "__main__":
    main()
