"""Compresses trained models to 16 bits, 8 bits, fewer units, and both; shows costs and gains.

    pip install -e . --group demo
    python examples/smaller.py             (--quick: seconds, with models that learn little)

There are two models, each an LSTM of 256 units and a linear readout: one forecasts a year of CO2,
the other tells documentation of NumPy from documentation of PyTorch. Each trains twice: once as it
is, and once with a loss that drives whole units to zero; these units are removed during training.

The CO2 series ships with statsmodels and is in the public domain: Keeling & Whorf, *Atmospheric CO2
Concentrations*, Oak Ridge National Laboratory, 2004.
"""

from __future__ import annotations

import argparse
import copy
import io
import re
from collections import Counter
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import anycell.torch as at
from anycell import compress

UNITS = 256
YEAR, WEEKS, PPM = 52, 4 * 52, 3.0


class Task(NamedTuple):
    """A task for a model to learn.

    Attributes:
        model: the model, with a ``layer`` and its ``readout``.
        batch: draws inputs and targets for a training step.
        loss: of outputs and targets.
        inputs: held-out inputs, on which quality and time are measured.
        quality: of outputs; larger is better.
        measure: the name of the quality, and a function that formats it.
    """

    model: Model
    batch: Callable[[], tuple[Any, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    inputs: Any
    quality: Callable[[Tensor], float]
    measure: tuple[str, Callable[[float], str]]


class Row(NamedTuple):
    """A row of a table; size and time are of the layer."""

    name: str
    quality: float
    size: int
    milliseconds: float


class Model(nn.Module):
    """An LSTM on words or numbers, and a readout of its last steps."""

    def __init__(self, words: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, inputs) if words else nn.Identity()
        self.layer = at.LSTM(inputs, UNITS, batch_first=True)
        self.readout = nn.Linear(UNITS, outputs)

    def forward(self, x: Tensor, lengths: Tensor | None = None, last: int = 1) -> Tensor:
        given = self.words(x)
        if lengths is None:
            return self.readout(self.layer(given)[0][:, -last:].to(self.readout.weight.dtype))
        _, (h, _) = self.layer(given, lengths=lengths)
        return self.readout(h[0].to(self.readout.weight.dtype))


# -- two tasks -------------------------------------------------------------------------------------


def forecast() -> Task:
    """The task to forecast the changes in the year ahead from four years of weekly means."""
    from statsmodels.datasets import co2

    series = co2.load_pandas().data["co2"].interpolate().to_numpy(np.float32)
    split, rng = len(series) - 10 * YEAR, np.random.default_rng(0)

    def windows(first: Any) -> tuple[Tensor, Tensor]:
        seen = series[first[:, None] + np.arange(WEEKS)]
        made = first[:, None] + np.arange(WEEKS - YEAR, WEEKS)
        ahead = series[made[..., None] + np.arange(1, YEAR + 1)] - series[made][..., None]
        x = (seen - seen[:, :1])[..., None] / PPM
        return torch.from_numpy(x.astype("f4")), torch.from_numpy((ahead / PPM).astype("f4"))

    def batch() -> tuple[Any, Tensor]:
        x, y = windows(rng.integers(0, split - WEEKS - YEAR, 48))
        return (x, None, YEAR), y

    x, truth = windows(np.arange(split - WEEKS, len(series) - WEEKS - YEAR, 4))

    def quality(outputs: Tensor) -> float:
        return -PPM * float((outputs[:, -1] - truth[:, -1]).square().mean().sqrt())

    measure = "error, ppm", lambda value: f"{-value:.3f}"
    return Task(Model(0, 1, YEAR), batch, nn.functional.mse_loss, (x, None, YEAR), quality, measure)


def sentences(module: ModuleType) -> Iterator[list[str]]:
    """Yields sentences of five or more words from the docstrings of a module's public names."""
    for name in sorted(vars(module)):
        text = getattr(module, name).__doc__ if not name.startswith("_") else None
        for sentence in re.split(r"[.:]\s", text if isinstance(text, str) else ""):
            words = re.findall(r"[a-z]+", sentence.lower())
            if len(words) >= 5:
                yield words[:40]


def text() -> Task:
    """The task to tell which of two libraries a sentence of documentation comes from."""
    texts, rng = [list(sentences(module)) for module in (np, torch)], np.random.default_rng(0)
    most = min(map(len, texts))
    chosen = [(words, label) for label, each in enumerate(texts) for words in each[:most]]
    chosen = [chosen[i] for i in rng.permutation(len(chosen))]
    own = {"numpy", "np", "ndarray", "torch", "tensor", "tensors"}
    counts = Counter(word for words, _ in chosen for word in words if word not in own)
    known = {word: k + 2 for k, (word, _) in enumerate(counts.most_common(2000))}
    x = torch.zeros(len(chosen), 40, dtype=torch.long)
    for row, (words, _) in enumerate(chosen):
        x[row, : len(words)] = torch.tensor([known.get(word, 1) for word in words])
    lengths = torch.tensor([len(words) for words, _ in chosen])
    labels, split = torch.tensor([label for _, label in chosen]), int(0.8 * len(chosen))

    def batch() -> tuple[Any, Tensor]:
        rows = torch.from_numpy(rng.integers(0, split, 48))
        return (x[rows], lengths[rows]), labels[rows]

    def quality(outputs: Tensor) -> float:
        return float((outputs.argmax(-1) == labels[split:]).float().mean())

    measure = "right", lambda value: f"{value:.1%}"
    model, inputs = Model(len(known) + 2, 32, 2), (x[split:], lengths[split:])
    return Task(model, batch, nn.functional.cross_entropy, inputs, quality, measure)


# -- training and measuring ------------------------------------------------------------------------


def train(task: Task, steps: int, left: float | None = None) -> Model:
    """Trains a model; with ``left``, only this share of its units is left at the end."""
    torch.manual_seed(0)
    model = copy.deepcopy(task.model).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
    keep = compress.gradual(left or 1.0, begin=steps // 5, end=3 * steps // 5)
    for step in range(steps):
        inputs, targets = task.batch()
        loss = task.loss(model(*inputs), targets)
        if left is not None and step < 3 * steps // 5:
            norms = compress.unit_norms(model.layer, readouts=[model.readout])
            loss = loss + 1e-4 * norms.sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if left is not None and step % max(1, steps // 20) == 0:
            units = max(8, round(UNITS * keep(step)))
            if units < model.layer.hidden_size:
                compress.shrink(model.layer, units, readouts=[model.readout], optimizer=optimizer)
    return model.eval()


def half(model: Model) -> Model:
    """Returns a copy whose layer and words have 16 bits."""
    copied = copy.deepcopy(model)
    copied.layer.to(torch.bfloat16)
    copied.words.to(torch.bfloat16)
    return copied


def saved(model: Model) -> int:
    """The size of the layer's file in bytes."""
    file = io.BytesIO()
    torch.save(model.layer.state_dict(), file)
    return file.tell()


@torch.no_grad()
def measure(task: Task, models: dict[str, Model], turns: int) -> list[Row]:
    """Measures models in turns: a row for each, with quality, and bytes and time of its layer."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    x, *rest = task.inputs
    lengths = {"lengths": rest[0]} if rest[0] is not None else {}
    for _ in range(turns):
        for name, model in models.items():
            given = model.words(x).to(torch.bfloat16 if name == "bfloat16" else torch.float32)
            start = perf_counter()
            model.layer(given, **lengths)
            seconds[name].append(perf_counter() - start)
    rows = []
    for name, model in models.items():
        real = x.bfloat16() if name == "bfloat16" and x.is_floating_point() else x
        quality = task.quality(model(real, *rest).float())
        rows.append(Row(name, quality, saved(model), 1e3 * median(seconds[name])))
    return rows


def main(arguments: list[str] | None = None) -> dict[str, list[Row]]:
    """Trains and measures; prints both tables and returns their rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a short run")
    quick = parser.parse_args(arguments).quick
    console, results = Console(), {}
    for name, make, steps, left in (("forecast", forecast, 600, 1 / 2), ("text", text, 700, 3 / 8)):
        torch.manual_seed(0)
        task = make()
        steps = 10 if quick else steps
        whole, fewer = train(task, steps), train(task, steps, left)
        models = {
            "float32": whole,
            "bfloat16": half(whole),
            "8 bits": compress.quantize(whole),
            f"{fewer.layer.hidden_size} of {UNITS} units": fewer,
            "both": compress.quantize(fewer),
        }
        rows = results[name] = measure(task, models, 3 if quick else 15)
        table = Table("", task.measure[0], "bytes", "milliseconds", "times as fast", title=name)
        for row in rows:
            faster = f"{rows[0].milliseconds / row.milliseconds:.1f}"
            quality, time = task.measure[1](row.quality), f"{row.milliseconds:.1f}"
            table.add_row(row.name, quality, f"{row.size:,}", time, faster)
        console.print(table)
    return results


if __name__ == "__main__":
    main()
