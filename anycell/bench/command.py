"""``anycell bench``: from the options of the command line to what it prints and writes."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from anycell.bench import chart, estimate, machine, report, results, runner, shapes
from anycell.bench.contenders import CONTENDERS, DEFAULT_PEERS
from anycell.bench.problem import find_cell
from anycell.plan.dtype import DTYPES
from anycell.requirement import install
from anycell.usage import UsageError, check_installed, did_you_mean


def main(options: argparse.Namespace) -> int:
    """Runs the benchmark, prints the tables and writes the files."""
    settings = _settings(options)
    try:
        options.out.mkdir(parents=True, exist_ok=True)  # fails before it measures
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"--out {options.out} cannot be used: {reason}") from None
    if warning := machine.busy(machine.describe()):
        print(f"anycell: {warning}", file=sys.stderr)
    with runner.all_threads(settings.threads):
        costs = estimate.seconds(settings)
    hurry = "" if options.quick or sum(costs) < 120 else "; --quick takes a few minutes"
    plan = f"{len(costs)} row{'s' * (len(costs) != 1)}, about {estimate.duration(sum(costs))}"
    print(f"anycell: {plan}{hurry}", file=sys.stderr, flush=True)
    progress = Progress(costs)
    result = runner.run(settings, progress.say, progress.advance)
    report.show(result)
    written = [results.write_json(result, options.out)]
    try:
        if (picture := chart.draw(result, options.out)) is not None:
            written.append(picture)
    except UsageError as error:  # the numbers are written; only the chart is missing
        print(f"anycell: {error}", file=sys.stderr)
    print("written:", ", ".join(map(str, written)))
    return 0 if result.ok else 1


def _settings(options: argparse.Namespace) -> results.Settings:
    quick, quantized = options.quick, DTYPES[options.dtype].quantized
    if quantized and options.mode not in ("inference", "both"):
        raise UsageError(
            f"--mode {options.mode}: weights of 8 bits are for inference only; leave it out"
        )
    modes = results.MODES if options.mode == "both" else [options.mode]
    cells = options.cells or ([] if options.cell else ["LSTM", "GRU"])
    return results.Settings(
        cells=[find_cell(name) for name in [*cells, *options.cell]],
        shapes=shapes.select(options.shapes or (shapes.QUICK if quick else ["all"])),
        modes=["inference"] if quantized else modes,
        dtype=options.dtype,
        threads=options.threads,
        subject=options.subject,
        peers=_peers(options),
        seconds=options.seconds or (0.5 if quick else 5.0),
        alone=options.alone and not quick,
        first_call=options.first_call and not quick,
        memory=options.memory,
    )


def _peers(options: argparse.Namespace) -> list[str]:
    """The peers by name; each of them, and the subject, is known and installed."""
    peers = options.peers or list(DEFAULT_PEERS)
    if peers == ["all"] and options.subject in CONTENDERS:
        # Only of the subject's framework: if both ran, each would wait for the other's threads.
        tensorflow = {n: "tensorflow" in source.needs for n, source in CONTENDERS.items()}
        peers = [n for n, on in tensorflow.items() if on is tensorflow[options.subject]]
        peers.remove(options.subject)
    for option, name in [("--subject", options.subject), *(("--peers", peer) for peer in peers)]:
        if name not in CONTENDERS:
            raise UsageError(f"{option}: unknown {name!r}{did_you_mean(name, list(CONTENDERS))}")
        needs = CONTENDERS[name].needs
        check_installed(name, needs, install("tensorflow" if "tensorflow" in needs else "bench"))
    return peers


class Progress:
    """Says on stderr which rows are done and how long the others take, by their estimated costs;
    in a terminal also what is at work.
    """

    def __init__(self, costs: Sequence[float]) -> None:
        self.costs, self.done = costs, 0
        self.began, self.terminal = time.perf_counter(), sys.stderr.isatty()

    def say(self, text: str) -> None:
        if self.terminal:  # in place of the last such line
            print(f"\r{text[:79]:<79}", end="", file=sys.stderr, flush=True)

    def advance(self, row: results.Row) -> None:
        self.done += 1
        rest = sum(self.costs[self.done :])
        spent = (time.perf_counter() - self.began) / sum(self.costs[: self.done])
        left = f", about {estimate.duration(spent * rest)} left" if rest else ""
        line = f"{self.done}/{len(self.costs)} {row.title}{left}"
        print(f"\r{line:<79}" if self.terminal else line, file=sys.stderr, flush=True)
