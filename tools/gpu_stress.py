"""Launches tier 2 over and over next to a kernel that occupies multiprocessors.

    python tools/gpu_stress.py --launches 100000 --seconds 60

Programs of tier 2 wait for one another, so all of them must run at once: this tool looks for hangs
and wrong bits. Prints a line of JSON for each strain; the exit status is 1 if it finds any.
"""

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gpu_lines import arguments, host_of_card, need_card, over, say, tried
from torch import Tensor

import anycell
from anycell import cells
from anycell.engines.gpu import capacity
from anycell.plan import plan

BATCH = 16


class Strain(NamedTuple):
    """A layer to launch, in one pass or both, and its share of launches and time."""

    hidden: int
    steps: int
    train: bool
    share: float


# Up to 32 programs wait in one warp, more in two. Short sequences make many launches; in long
# sequences, programs drift apart.
STRAINS = (
    Strain(512, 4, False, 0.4),
    Strain(768, 4, False, 0.3),
    Strain(512, 4, True, 0.1),
    Strain(768, 4, True, 0.1),
    Strain(512, 256, True, 0.05),
    Strain(768, 256, True, 0.05),
)


def main() -> None:
    """Runs all strains, each until it has its launches or its time is over."""
    parser = arguments(__doc__, 60.0)
    parser.add_argument("--launches", type=int, default=100_000)
    args = parser.parse_args()
    need_card("gpu_stress")
    end, left, good = time.monotonic() + args.seconds, 1.0, True
    for strain in STRAINS:
        seconds = (end - time.monotonic()) * strain.share / left
        left -= strain.share
        line = tried(strained, strain, int(args.launches * strain.share), seconds)
        say({**strain._asdict(), **line})
        good &= not (line.get("wrong") or line.get("gave_up") or "error" in line)
        if "error" in line:
            torch.cuda.synchronize()  # a lost card ends the run here
    sys.exit(not good)


def strained(strain: Strain, launches: int, seconds: float) -> dict[str, Any]:
    """Launches one layer repeatedly on the same numbers; counts results whose bits differ from the
    first.
    """
    host = host_of_card(torch.bfloat16)
    one = plan(cells.LSTM, strain.hidden, "bfloat16", "gpu")
    for backward in (False, True)[: 1 + strain.train]:
        choice = capacity.choose(one, host.limits, backward, batch=BATCH)
        if choice.tier != 2:
            return {"refused": f"this card runs tier {choice.tier}: {choice.reason}"}
    run, per_call = launcher(strain), 1 + strain.train
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    side, busy = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    right = [t.clone() for t in run()]
    torch.cuda.synchronize()
    done, begin = 0, time.monotonic()
    while done < launches and time.monotonic() - begin < seconds:
        with torch.cuda.stream(side):  # some milliseconds on all multiprocessors
            torch.mm(busy, busy)
        for _ in range(max(1, 100 // strain.steps)):
            for mine, same in zip(run(), right, strict=True):
                wrong += (mine != same).any()
            done += per_call
        torch.cuda.synchronize()
    return {
        "launches": done,
        "wrong": int(wrong),
        "gave_up": int(host.trouble[0]),
        "seconds": round(time.monotonic() - begin, 1),
        "why_fewer": None if done >= launches else over(round(seconds)),
    }


def launcher(strain: Strain) -> Callable[[], list[Tensor]]:
    """Returns a function whose results must always have the same bits."""
    torch.manual_seed(1997)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    layer = anycell.torch.RNN(cells.LSTM, strain.hidden, strain.hidden, **options)
    x = torch.randn(strain.steps, BATCH, strain.hidden, **options, requires_grad=strain.train)

    def run() -> list[Tensor]:
        with torch.set_grad_enabled(strain.train):
            output, _ = layer(x)
            if not strain.train:
                return [output]
            return [output, *torch.autograd.grad(output, x, output)]

    return run


if __name__ == "__main__":
    main()
