"""MkDocs hooks of ``make docs``: pages from files outside docs/, and the gallery's."""

from __future__ import annotations

import logging
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))
import site_gallery  # noqa: E402

# griffe reads the text of __all__, where *LAYERS is no string; site_docstrings.py adds these.
logging.getLogger("mkdocs.plugins.griffe").addFilter(lambda r: "LAYERS" not in r.getMessage())
LINK = re.compile(r"(\]\()(?!\w+:)([^)#\s]+)")
HOME = "README.md"


def on_files(files: Files, config: Any) -> Files:
    """Adds README as the home page, the gallery, and whatever files the pages link to."""
    pages = {f"docs/{f.src_uri}": f for f in files if f.src_uri.endswith(".md")}
    waiting = [HOME, "CONTRIBUTING.md", "CHANGELOG.md", *pages]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        text = (ROOT / path).read_text(encoding="utf-8")
        if path not in pages:
            content = (ROOT / path).read_bytes() if path.endswith(".json") else _page(path, text)
            files.append(File.generated(config, _place(path), content=content))
        for target in _targets(path, text) if path.endswith(".md") else ():
            if target not in seen and not target.startswith("docs/"):
                seen.add(target)
                waiting.append(target)
    for name, text in site_gallery.pages().items():
        files.append(File.generated(config, f"gallery/{name}", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links between files of the repository become links between pages."""
    place = page.file.src_uri
    path = _PATHS.get(place, f"docs/{place}")

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))
        return match[1] + posixpath.relpath(_place(target), posixpath.dirname(place) or ".")

    return LINK.sub(moved, markdown)


_PATHS: dict[str, str] = {}  # of the pages that do not come from docs/


def _place(path: str) -> str:
    """Where a file of the repository is on the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path == HOME:
        return "index.md"
    place = f"repository/{path}" if path.endswith((".md", ".json")) else f"repository/{path}.md"
    _PATHS[place] = path
    return place


_PATHS["index.md"] = HOME


def _page(path: str, text: str) -> str:
    if path.endswith(".md"):
        return text
    language = {".py": "python", ".txt": "text", ".sh": "bash"}.get(Path(path).suffix, "text")
    return f"# {path}\n\n````{language}\n{text}````\n"


def _targets(path: str, text: str) -> list[str]:
    """The files of the repository that a Markdown file links to."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    found = [
        posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        for _, target in LINK.findall(text)
    ]
    return [target for target in found if (ROOT / target).is_file()]
