"""Turns docstrings into Markdown, for the site."""

from __future__ import annotations

import re

EQUATION = re.compile(r"[\w']+(, [\w']+)* = ")  # how a line of equations begins
NAMED = re.compile(r"[\w* .,`]+: ")  # how a row of a list begins


def markdown(text: str) -> str:
    """Converts a docstring: its sections, such as ``Args:``, become lists or sentences, and its
    equations become code.
    """
    lines, out, at = text.split("\n"), [], 0
    while at < len(lines):
        line, at = lines[at], at + 1
        following = lines[at] if at < len(lines) else ""
        if EQUATION.match(line) and out and not out[-1]:
            end = lines.index("", at) if "" in lines[at:] else len(lines)
            out += ["```text", line, *lines[at:end], "```"]
            at = end
            continue
        titled = line.endswith(":") and not line.startswith((" ", ">>>"))
        if not titled or not following.startswith("    "):
            out.append(line)
            continue
        section = []
        while at < len(lines) and (lines[at].startswith("    ") or not lines[at]):
            section.append(lines[at])
            at += 1
        title = line if " " in line else f"**{line}**"
        out += ["", title, "", *_section(section), ""]
    return "\n".join(out)


def _section(lines: list[str]) -> list[str]:
    if lines[0].lstrip().startswith(">>>"):
        return ["```pycon", *(line[4:] for line in lines if line), "```"]
    if not NAMED.match(lines[0].lstrip()):  # a sentence over several lines
        return [" ".join(line.strip() for line in lines if line)]
    rows: list[str] = []
    for line in lines:
        if line.startswith("     ") and rows:
            rows[-1] += " " + line.strip()
        elif line.strip():
            rows.append(line.strip())
    return [_row(row) for row in rows]


def _row(text: str) -> str:
    """A list item from ``name, name: description``, with names as code."""
    names, colon, rest = text.partition(": ")
    if not colon or names.count("`") % 2:
        return f"- {text}"
    coded = (f"`{n}`" if re.fullmatch(r"[\w*.]+", n) else n for n in names.split(", "))
    return f"- {', '.join(coded)}: {rest}"
