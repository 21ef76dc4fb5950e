"""Docstrings begin with what a thing does or is."""

import ast
import re
from collections import Counter
from pathlib import Path

from floors import tree

import anycell

PACKAGE = Path(anycell.__file__).parent
# A sentence that begins so has no subject, or hides it behind a clause.
VAGUE = (
    *("Of ", "What ", "The same ", "Those ", "As ", "By ", "Where ", "Its ", "That ", "How "),
    *("Which ", "Whose "),
)


# Names that meant several things, or nothing to a newcomer.
GIVEN_UP = {"face", "form", "play", "run", "sums"}
BELOW_FRONTENDS = "lang", "plan", "engines", "layer"


def glossary() -> list[str]:
    text = (PACKAGE.parent / "docs" / "internals.md").read_text(encoding="utf-8")
    return re.findall(r"^\| (\w+) \| ", text.partition("\n## ")[0], re.MULTILINE)[1:]


def names() -> list[tuple[str, str]]:
    """Modules and classes below the frontends, each with its file."""
    named = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        if place.parts[0] in BELOW_FRONTENDS:
            named.append((path.stem, str(place)))
            found = (node.name for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef))
            named += [(name.strip("_").lower(), str(place)) for name in found]
    return named


def test_the_glossary_is_short_and_its_words_name_one_thing() -> None:
    words = glossary()
    assert 20 <= len(words) == len(set(words)) <= 25
    classes = Counter(name for name, place in names() if Path(place).stem != name)
    assert {word: classes[word] for word in words if classes[word] > 1} == {}


def test_names_that_were_given_up() -> None:
    assert [f"{place}: {name}" for name, place in names() if name in GIVEN_UP] == []


def test_docstrings_begin_with_their_subject() -> None:
    vague = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node) or ""
                if text.startswith(VAGUE):
                    vague.append(f"{path.relative_to(PACKAGE)}: {text.splitlines()[0]}")
    assert not vague, "\n".join(vague)
