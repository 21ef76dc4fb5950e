"""Writes what follows from the rooms of the package: ``python tools/rooms.py``

Their budgets, ``tests/helpers/budgets.json``, become what the rooms have: run this after code has
gone, and say in the change why a number rises. ``docs/house.svg`` is drawn from the floors.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from floors import BUDGETS, ROWS, lengths  # noqa: E402

HOUSE = ROOT / "docs" / "house.svg"
FLOOR, CHIP, PEN = 38, 26, 7.6  # height of a floor, of a room's name; width of a letter
GROUND, ROOF = 616, 60
COLORS = {
    "lang": "#efe6d2", "plan": "#e9e3f2", "engines.cpu": "#dcebdd", "engines.gpu": "#dcebdd",
    "layer": "#dbe7ee", "numpy": "#f4d8c8", "jax": "#f4d8c8", "keras": "#f4d8c8", "tf1": "#f4d8c8",
}  # fmt: skip

HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1120 660" font-family="Inter,Segoe UI,\
Helvetica,Arial,sans-serif" font-size="14" fill="#22303c" role="img" aria-label="The floors of \
anycell from the ground up, and the steps that turn a cell into a kernel">
<defs><style>.b{font-weight:600}.m{fill:#5b6b78;font-size:12.5px}.c{font-family:ui-monospace,Menlo,\
Consolas,DejaVu Sans Mono,monospace;font-size:12.5px}.w{fill:#fff}.r{fill:none;stroke:#c8553d;\
stroke-width:2.2}</style>
<marker id="a" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="7" markerHeight="7" \
orient="auto-start-reverse"><path d="M0 0 10 5 0 10z" fill="#c8553d"/></marker></defs>
<rect width="1120" height="660" rx="14" fill="#fbfaf7"/>
<text x="400" y="40" text-anchor="middle" class="m">A room imports only from the floors below it.\
</text>
<text x="946" y="40" text-anchor="middle" class="b">from a cell to a kernel</text>
"""
# Each step: its box's color, its name, what is there, and what leads to the next one.
STEPS = [
    ("#fff", "@cell", "a function of one step", "called once, with symbols"),
    ("#efe6d2", "graph", "the operations of a step", "reverse mode"),
    ("#efe6d2", "derived backward", "another graph", "minimum cut"),
    ("#e9e3f2", "plan", "what is saved, and which engine runs it", "printed, op by op"),
    ("#dcebdd", "LLVM or Triton text", "forward and backward", "compiled once, kept on disk"),
    ("#c8553d", "kernel", "runs whole sequences", ""),
]


def house() -> str:
    """The picture."""
    lines = [HEAD]
    for level, (rooms, _, about) in enumerate(ROWS):
        top = GROUND - (level + 1) * FLOOR
        color = next((COLORS[name] for name in rooms.split() if name in COLORS), "#eceff1")
        lines.append(f'<rect x="30" y="{top}" width="740" height="{FLOOR - 4}" rx="4" '
                     f'fill="{color}"/>\n')  # fmt: skip
        x, y = 38.0, top + (FLOOR - 4 - CHIP) / 2
        for name in rooms.split():
            width = len(name) * PEN + 16
            box = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{CHIP}" rx="5" class="w"'
            lines.append(
                f'<rect {box}/><text x="{x + 8:g}" y="{y + 17:g}" class="c">{name}</text>\n'
            )
            x += width + 6
        lines.append(f'<text x="760" y="{y + 17:g}" text-anchor="end" class="m">{about.strip()}'
                     '</text>\n')  # fmt: skip
    for n, (color, name, about, then) in enumerate(STEPS):
        y, last = ROOF + 6 + 94 * n, n == len(STEPS) - 1
        ink = ' fill="#fff"' if last else ""
        lines.append(f'<rect x="800" y="{y}" width="292" height="56" rx="8" fill="{color}" '
                     'stroke="#d8d2c4"/>'
                     f'<text x="946" y="{y + 24}" text-anchor="middle" class="b"{ink}>{name}</text>'
                     f'<text x="946" y="{y + 43}" text-anchor="middle" font-size="12.5"{ink}>'
                     f'{about}</text>\n')  # fmt: skip
        if not last:
            lines.append(f'<path d="M946 {y + 58}v32" class="r" marker-end="url(#a)"/>'
                         f'<text x="958" y="{y + 78}" class="m">{then}</text>\n')  # fmt: skip
    return "".join([*lines, "</svg>\n"])


def main() -> None:
    """Writes both files, and prints what has changed."""
    before = json.loads(BUDGETS.read_text(encoding="utf-8")) if BUDGETS.exists() else {}
    now = lengths()
    for name in [*now, *(before.keys() - now.keys())]:
        if before.get(name) != now.get(name):
            print(f"{name}: {before.get(name, 0):,} -> {now.get(name, 0):,}")
    print(f"all rooms: {sum(before.values()):,} -> {sum(now.values()):,} lines of code")
    BUDGETS.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")
    HOUSE.write_text(house(), encoding="utf-8")


if __name__ == "__main__":
    main()
