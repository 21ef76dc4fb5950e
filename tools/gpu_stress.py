"""Launches tier 2 over and over beside a kernel that takes multiprocessors away.

    python tools/gpu_stress.py --launches 100000 --seconds 60

Programs of tier 2 wait for one another, so all of them must run at once: this looks for a hang and
for a wrong bit. Prints a line of JSON; the exit status is 1 if there was either.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import anycell
from anycell import cells
from anycell.engines.gpu import capacity
from anycell.plan import plan
from anycell.torch.device import host_of

HIDDEN, BATCH, STEPS = 768, 16, 4


def main() -> None:
    """Runs until there were so many launches, or the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launches", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_stress: no CUDA card here.")
    host = host_of(torch.bfloat16, torch.device("cuda", torch.cuda.current_device()))
    choice = capacity.choose(plan(cells.LSTM, HIDDEN, "bfloat16", "gpu"), host.limits, batch=BATCH)
    if choice.tier != 2:
        sys.exit(f"gpu_stress: this card runs tier {choice.tier}: {choice.reason}")
    layer = anycell.torch.RNN(cells.LSTM, HIDDEN, HIDDEN, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(STEPS, BATCH, HIDDEN, device="cuda", dtype=torch.bfloat16)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    side, busy = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    done, begin = 0, time.monotonic()
    with torch.no_grad():
        right = layer(x)[0].clone()
        torch.cuda.synchronize()
        while done < args.launches and time.monotonic() - begin < args.seconds:
            with torch.cuda.stream(side):  # some milliseconds on all multiprocessors
                torch.mm(busy, busy)
            for _ in range(100):
                wrong += (layer(x)[0] != right).any()
                done += 1
            torch.cuda.synchronize()
    result = {
        "launches": done,
        "wrong": int(wrong),
        "gave_up": int(host.trouble[0]),
        "seconds": round(time.monotonic() - begin, 1),
        "why_fewer": None if done >= args.launches else f"{args.seconds:g} seconds were over",
    }
    print(json.dumps(result))
    sys.exit(bool(result["wrong"] or result["gave_up"]))


if __name__ == "__main__":
    main()
