"""Prints a speed table from results of the benchmark, or writes it to the documentation.

python tools/speed_table.py benchmarks/results/DATE_CPU_THREADS.json [PEER]
python tools/speed_table.py benchmarks/results/DATE_CPU_THREADS.json --write
python tools/speed_table.py docs/gallery/results.json --loops

``--write`` puts the table between the marks of docs/performance.md, and draws docs/speed.png, a
chart of the README. ``--loops`` draws the other one, docs/loops.png: cells against a loop.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TIMED = "T32 B16 I64 H64"  # as tools/gallery.py times cells
TORCHS = {"LSTM", "GRU", "RNN"}  # cells of torch.nn
BEGIN, END = "<!-- speed table: begin -->\n", "<!-- speed table: end -->"
MARK = "!"  # next to a time that differs when the contender runs alone


def table(report: dict[str, Any], peer: str = "torch.nn") -> str:
    """A line per shape, a column per cell and mode: milliseconds of the peer / ours = times faster.

    A time is marked if it differs when the contender runs alone; that time is below the table.
    """
    rows = {(row["cell"], row["mode"], row["shape"]["name"]): row for row in report["rows"]}
    shapes = {row["shape"]["name"]: row["shape"] for row in report["rows"]}
    columns = list(dict.fromkeys((cell, mode) for cell, mode, _ in rows))
    lines = ["| | " + " | ".join(f"{cell} {mode}" for cell, mode in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    found, apart = ratios(report, peer), []
    for name, s in shapes.items():
        cells = [f"{name} ({s['T']}, {s['B']}, {s['I']}, {s['H']}, {s['L']} x {s['D']})"]
        for column in columns:
            ratio = found.get(" ".join(column), {}).get(name)
            if ratio is None:
                cells.append("")
                continue
            contenders = rows[(*column, name)]["contenders"]
            ours, theirs = (contenders[who] for who in (report["settings"]["subject"], peer))
            cells.append(f"{_time(theirs)} / {_time(ours)} = **{ratio:.2f}**")
            for who, entry in ((peer, theirs), ("ours", ours)):
                if entry.get("disagrees"):
                    alone = _digits(entry["alone_ms"])
                    apart.append(f"{' '.join(column)} of {name}, {who}: {alone} ms")
        lines.append("| " + " | ".join(cells) + " |")
    every = [found.get(" ".join(column), {}).values() for column in columns]
    means = [statistics.geometric_mean(values) if values else None for values in every]
    lines.append(_last("geometric mean", means))
    alone = {
        (mean["cell"], mean["mode"]): mean.get("ratios_alone", {}).get(peer)
        for mean in report["geometric_means"]
    }
    if any(alone.values()):
        lines.append(_last("the same, alone", [alone[column] for column in columns]))
    if apart:
        lines += ["", f"{MARK} another time alone: {'; '.join(apart)}."]
    return "\n".join(lines)


def into(document: str, lines: str) -> str:
    """The document with these lines between its marks."""
    before, rest = document.split(BEGIN)
    return f"{before}{BEGIN}\n{lines}\n\n{END}{rest.split(END)[1]}"


def ratios(report: dict[str, Any], peer: str) -> dict[str, dict[str, float]]:
    """The speed ratios by shape, under keys such as "LSTM inference"."""
    found: dict[str, dict[str, float]] = {}
    for row in report["rows"]:
        ours, theirs = (row["contenders"].get(who) for who in (report["settings"]["subject"], peer))
        if ours and theirs and ours["samples_ms"] and theirs["samples_ms"]:
            pairs = zip(ours["samples_ms"], theirs["samples_ms"], strict=True)
            column = found.setdefault(f"{row['cell']} {row['mode']}", {})
            column[row["shape"]["name"]] = statistics.median(b / a for a, b in pairs)
    return found


def draw(report: dict[str, Any], path: Path, peer: str = "torch.nn") -> None:
    """Draws a panel per cell and mode, a bar per shape, on white: for light and dark pages."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    columns = ratios(report, peer)
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    most = max(max(column.values()) for column in columns.values())
    figure, panels = plt.subplots(
        1, len(columns), figsize=(11, 1.4 + 0.36 * len(names)), sharey=True, layout="constrained"
    )
    threads = report["settings"]["threads"]
    machine = f"{report['machine']['cpu']}, {threads} threads, {report['settings']['dtype']}"
    figure.suptitle(f"times faster than {peer}: {machine}, {report['date'][:10]}", fontsize=12)
    shapes = {row["shape"]["name"]: row["shape"] for row in report["rows"]}
    for axes, (title, column) in zip(panels, columns.items(), strict=True):
        for name, ratio in column.items():
            place, faster = names.index(name), ratio >= 1
            color = "#2f6fb3" if faster else "#c8643c"
            axes.barh(place, ratio - 1, left=1, height=0.72, color=color)
            text = f" {ratio:.1f}" if faster else f"{ratio:.2f} "
            side = "left" if faster else "right"
            axes.text(ratio, place, text, ha=side, va="center", fontsize=8.5, color="#1f2933")
        mean = statistics.geometric_mean(column.values())
        axes.set_title(f"{title}\nmean {mean:.2f}x", fontsize=11, loc="left")
        axes.set_xscale("log")
        axes.set_xlim(0.25, 2.2 * most)
        ticks = [tick for tick in (0.5, 1, 2, 4, 8, 16, 32) if tick < 1.9 * most]
        axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks], fontsize=8)
        axes.set_xticks([], minor=True)
        axes.grid(axis="x", color="#e4e7eb")
        axes.set_axisbelow(True)
        axes.axvline(1, color="#1f2933", linewidth=1)
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
    labels = [f"{name}\n{_sizes(shapes[name])}" for name in names]
    panels[0].set_yticks(range(len(names)), labels, fontsize=8)
    panels[0].set_ylim(len(names) - 0.4, -0.6)
    figure.savefig(path, dpi=130, facecolor="white")
    plt.close(figure)


def _sizes(shape: dict[str, Any]) -> str:
    layers = f", {shape['L']} layers" if shape["L"] > 1 else ""
    both = ", both ways" if shape["D"] > 1 else ""
    return f"T{shape['T']} B{shape['B']} I{shape['I']} H{shape['H']}{layers}{both}"


def draw_loops(results: dict[str, Any], path: Path) -> None:
    """Draws a bar for each cell that torch.nn does not have: a loop's time over the layer's."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    speeds = {name: of["speed"] for name, of in results.items() if name not in TORCHS}
    faster = {name: speed["loop"] / speed["ours"] for name, speed in speeds.items()}
    names = sorted(faster, key=lambda name: -faster[name])
    (machine,) = {speed["on"] for speed in speeds.values()}
    figure, axes = plt.subplots(figsize=(8, 0.9 + 0.28 * len(names)), layout="constrained")
    axes.barh(range(len(names)), [faster[name] for name in names], height=0.72, color="#2f6fb3")
    for place, name in enumerate(names):
        ours, loop = (f"{speeds[name][who]:.3g} ms" for who in ("ours", "loop"))
        text = f" {faster[name]:.1f}x   {ours}, loop {loop}"
        axes.text(faster[name], place, text, va="center", fontsize=8.5, color="#1f2933")
    axes.set_title(
        "a step of training, times faster than a PyTorch loop over the cell\n"
        f"{TIMED}, float32, {machine}, 1 thread",
        fontsize=10, loc="left",
    )  # fmt: skip
    axes.set_xlim(0, 1.35 * max(faster.values()))
    axes.set_xticks([])
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.savefig(path, dpi=130, facecolor="white")
    plt.close(figure)


def _last(title: str, means: list[float | None]) -> str:
    return " | ".join([f"| {title}", *(f"**{mean:.2f}**" if mean else "" for mean in means)]) + " |"


def _time(entry: dict[str, Any]) -> str:
    return _digits(entry["median_ms"]) + MARK * bool(entry.get("disagrees"))


def _digits(milliseconds: float) -> str:
    """A time with three digits (all digits from 1000 on), without an exponent."""
    return f"{milliseconds:.3g}" if milliseconds < 1000 else f"{milliseconds:.0f}"


if __name__ == "__main__":
    report = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if sys.argv[2:] == ["--loops"]:
        draw_loops(report, ROOT / "docs" / "loops.png")
    elif sys.argv[2:] == ["--write"]:
        page = ROOT / "docs" / "performance.md"
        lines = f"From `benchmarks/results/{Path(sys.argv[1]).name}`.\n\n{table(report)}"
        page.write_text(into(page.read_text(encoding="utf-8"), lines), encoding="utf-8")
        draw(report, ROOT / "docs" / "speed.png")
    else:
        print(table(report, *sys.argv[2:]))
