"""Puts the fragments of ``changes/`` into CHANGELOG.md: ``python tools/changelog.py 0.2.0``

The version gets a section with today's date, or the section that it has already gets the date, and
the fragments are removed. CITATION.cff gets both too.
"""

import argparse
import datetime
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHANGES, CHANGELOG, CITATION = (ROOT / n for n in ("changes", "CHANGELOG.md", "CITATION.cff"))
KINDS = "added", "changed", "fixed"


def fragments(folder: Path = CHANGES) -> dict[Path, str]:
    """The fragments: by file, its kind.

    Raises:
        ValueError: for a file whose name says no kind, and for one that is not a few sentences.
    """
    found = {}
    for path in sorted(folder.glob("*")):
        if path.name == "README.md":
            continue
        name = re.fullmatch(r"[\w-]+\.(\w+)\.md", path.name)
        if name is None or name[1] not in KINDS:
            names = ", ".join(f"name.{kind}.md" for kind in KINDS)
            raise ValueError(f"{path.name}: expected {names}. Rename it.")
        text = path.read_text(encoding="utf-8").strip()
        if not re.fullmatch(r"(?s)[^#\s-].*\S", text) or "\n\n" in text:
            raise ValueError(
                f"{path.name}: expected a few sentences. Leave out headings and lists."
            )
        found[path] = name[1]
    return found


def with_version(changelog: str, version: str, date: str, entries: list[tuple[str, str]]) -> str:
    """The changelog with a section for a version.

    Args:
        entries: kinds and texts.
    """
    lines = []
    for kind in KINDS:
        texts = [text.strip().replace("\n", "\n  ") for of, text in entries if of == kind]
        lines += [f"### {kind.title()}\n\n", *(f"- {text}\n" for text in texts), "\n"] * bool(texts)
    head, mark, rest = changelog.partition("\n## ")
    about, (title, _, body) = "".join(lines), rest.partition("\n")
    if title == version:  # its section is there already, and says what the version is
        text, _, rest = body.partition("\n## ")
        body = f"{text.rstrip()}\n\n{about}".rstrip() + (f"\n\n## {rest}" if rest else "\n")
        return f"{head}\n## [{version}] - {date}\n{body}"
    return f"{head}\n## [{version}] - {date}\n\n{about.rstrip()}\n{mark}{rest}"


def main() -> None:
    """Writes both files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version")
    version, date = parser.parse_args().version, datetime.date.today().isoformat()
    kinds = fragments()
    entries = [(kind, path.read_text(encoding="utf-8")) for path, kind in kinds.items()]
    text = CHANGELOG.read_text(encoding="utf-8")
    CHANGELOG.write_text(with_version(text, version, date, entries), encoding="utf-8")
    cited = re.sub(r"(?m)^(version|date-released):.*\n", "", CITATION.read_text(encoding="utf-8"))
    cited = f'{cited}version: "{version}"\ndate-released: {date}\n'
    CITATION.write_text(cited, encoding="utf-8")
    for path in kinds:
        path.unlink()


if __name__ == "__main__":
    main()
