"""Docstrings begin with what a thing does or is."""

import ast
from pathlib import Path

import anycell

PACKAGE = Path(anycell.__file__).parent
# A sentence that begins so has no subject, or hides it behind a clause.
VAGUE = (
    *("Of ", "What ", "The same ", "Those ", "As ", "By ", "Where ", "Its ", "That ", "How "),
    *("Which ", "Whose "),
)


def test_docstrings_begin_with_their_subject() -> None:
    vague = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node) or ""
                if text.startswith(VAGUE):
                    vague.append(f"{path.relative_to(PACKAGE)}: {text.splitlines()[0]}")
    assert not vague, "\n".join(vague)
