"""MkDocs hooks of ``make docs``: pages of files outside docs/, of notebooks, and the gallery's."""

from __future__ import annotations

import json
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

import anycell  # noqa: E402

HOME = "README.md"
LINK = re.compile(r"(\]\()(?!\w+:)([^)#\s]+)")
LANGUAGES = {".py": "python", ".sh": "bash"}
# A badge, an image from another site, such as a test's result; our site omits badges.
BADGE = re.compile(r"^\[!\[.*\n", re.MULTILINE)
# griffe reads __all__ from the source, where *LAYERS is no string; site_docstrings.py adds them.
logging.getLogger("mkdocs.plugins.griffe").addFilter(lambda r: "LAYERS" not in r.getMessage())
paths = {"index.md": HOME}  # of the pages that do not come from docs/


def on_config(config: Any) -> Any:
    """Adds the gallery to the navigation, behind the language of cells."""
    pages = [f"gallery/{name}" for name in site_gallery.names()]
    section = next(entry["Cells"] for entry in config.nav if "Cells" in entry)
    section.append({"Gallery": pages})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds README as the home page, notebooks, the gallery, and all files that pages link to."""
    pages = {f"docs/{file.src_uri}" for file in files if file.src_uri.endswith(".md")}
    waiting = [HOME, "CONTRIBUTING.md", "CHANGELOG.md", *pages]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        text = (ROOT / path).read_text(encoding="utf-8")
        if path not in pages:
            files.append(File.generated(config, _place(path), content=_page(path, text)))
        for target in _targets(path, text) if path.endswith(".md") else ():
            if target not in seen and not target.startswith("docs/"):
                seen.add(target)
                waiting.append(target)
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        place = _place(f"docs/{file.src_uri}")
        files.append(File.generated(config, place, content=_notebook(Path(file.abs_src_path))))
    for name, text in site_gallery.pages().items():
        files.append(File.generated(config, f"gallery/{name}", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links between files of the repository into links between pages, and an entry for all
    cells into an entry for each cell that has none.
    """
    place = page.file.src_uri
    folder = posixpath.dirname(paths.get(place, f"docs/{place}"))

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        if not (ROOT / target).is_file():
            return match[0]
        return match[1] + posixpath.relpath(_place(target), posixpath.dirname(place) or ".")

    def each(match: re.Match[str]) -> str:
        entries = [f"::: {match[1]}.{name}" for name in anycell.cells.__all__]
        return "\n\n".join(entry for entry in entries if f"{entry}\n" not in markdown)

    return LINK.sub(moved, re.sub(r"^::: (\S+)\.\*$", each, markdown, flags=re.MULTILINE))


def _place(path: str) -> str:
    """The place of a repository's file on the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/").replace(".ipynb", ".md")
    if path == HOME:
        return "index.md"
    place = f"repository/{path}" if path.endswith((".md", ".json")) else f"repository/{path}.md"
    paths[place] = path
    return place


def _page(path: str, text: str) -> str:
    """The page of a file: Markdown as it is, source code in a block."""
    if path.endswith((".md", ".json")):
        return BADGE.sub("", text)
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"# {path}\n\n````{language}\n{text}````\n"


def _notebook(path: Path) -> str:
    """A notebook as Markdown, with its output and a link to it."""
    first, *cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    link = f'<a href="{path.name}" download>This notebook</a> runs in a checkout.'
    parts = ["".join(first["source"]), link]
    for cell in cells:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data") or {"text/plain": output["text"]}
            if "image/png" in data:
                picture = f"data:image/png;base64,{''.join(data['image/png']).strip()}"
                parts.append(f'<img alt="What the code above draws" src="{picture}">')
            else:
                parts.append(f"```text\n{''.join(data['text/plain'])}\n```")
    return "\n\n".join(parts)


def _targets(path: str, text: str) -> list[str]:
    """The files of the repository that a Markdown file links to."""
    folder = posixpath.dirname(path)
    found = [posixpath.normpath(posixpath.join(folder, target)) for _, target in LINK.findall(text)]
    return [target for target in found if (ROOT / target).is_file()]
