"""Accelerates models of real projects with ``accelerate(model)``: same outputs, faster training.

    python examples/accelerated.py [deepar amp-model ...] [--steps 20]

Each model is built once and copied; the copy is accelerated. Both then train on the same batches in
turns, with the same seeds for dropout. Times are of whole training steps, including all layers that
are not recurrent.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from dataclasses import dataclass

import torch
from models import MODELS, Model
from torch import Tensor

import anycell.torch
from anycell.bench.shapes import Shape, all_shapes


@dataclass
class Comparison:
    """The comparison of a model as it is ("theirs") with its accelerated copy ("ours").

    Attributes:
        error: of the outputs before training, norm(ours - theirs) / norm(theirs).
        theirs, ours: the loss of each training step, before its update.
        times: median milliseconds of a step, theirs and ours.
    """

    error: float
    theirs: list[float]
    ours: list[float]
    times: tuple[float, float]


def data(model: Model, shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns noise, and targets that need memory: mixed features, averaged over the past."""
    x = torch.randn(shape.B, shape.T, model.inputs, dtype=dtype)
    mixed = x @ torch.randn(model.inputs, model.outputs, dtype=dtype) / model.inputs**0.5
    past, averages = torch.zeros_like(mixed[:, 0]), []
    for now in mixed.unbind(1):
        past = 0.8 * past + 0.6 * now
        averages.append(past)
    return x, torch.stack(averages, 1).tanh()


def step(model: Model, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    loss = model.loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def compare(name: str, shape: Shape, steps: int, dtype: torch.dtype = torch.float32) -> Comparison:
    """Trains the model called ``name``, as it is and accelerated."""
    torch.manual_seed(0)
    theirs = MODELS[name](shape).to(dtype)
    ours = anycell.torch.accelerate(copy.deepcopy(theirs))
    models = theirs, ours
    x, y = data(theirs, shape, dtype)

    with torch.no_grad():
        expected, found = (model.eval()(x) for model in models)
    error = ((found - expected).norm() / expected.norm()).item()

    losses: tuple[list[float], list[float]] = [], []
    times: tuple[list[float], list[float]] = [], []
    optimizers = [torch.optim.Adam(model.train().parameters(), 3e-3) for model in models]
    for i in range(steps):
        for k, model in enumerate(models):
            torch.manual_seed(i)
            start = time.perf_counter()
            losses[k].append(step(model, optimizers[k], x, y))
            times[k].append(1e3 * (time.perf_counter() - start))
    return Comparison(error, *losses, (statistics.median(times[0]), statistics.median(times[1])))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", metavar="model", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--steps", type=int, default=20, help="of training (default: 20)")
    options = parser.parse_args(arguments)
    for name in options.models or MODELS:
        if name not in MODELS:
            parser.error(f"model {name!r}: expected one of {', '.join(MODELS)}")
    print(f"torch {torch.__version__}, float32, {torch.get_num_threads()} threads")
    print(f"{'model':24}{'shape':>28}  {'outputs':>8}  {'loss':>16}  curves  ms per step")
    for name in options.models or MODELS:
        shape = all_shapes()[name]
        found = compare(name, shape, options.steps)
        gap = max(abs(a - b) / abs(a) for a, b in zip(found.theirs, found.ours, strict=True))
        theirs, ours = found.times
        print(
            f"{MODELS[name].__name__ + ' (' + name + ')':24}{shape!s:>28}  {found.error:8.0e}  "
            f"{found.ours[0]:7.4f} {found.ours[-1]:8.4f}  {gap:6.0e}  "
            f"{theirs:.1f} / {ours:.1f} = {theirs / ours:.2f} times as fast",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
