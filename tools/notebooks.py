"""Runs the notebooks of the site, and saves their output: ``make notebooks``.

    python tools/notebooks.py [NAME...] [--check]     (of docs/notebooks; --check saves nothing)

An error in a cell ends the run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="those to run; all")
    parser.add_argument("--check", action="store_true", help="keep nothing")
    arguments = parser.parse_args()
    for name in arguments.names or sorted(path.stem for path in FOLDER.glob("*.ipynb")):
        notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
        where = {"metadata": {"path": str(FOLDER)}}
        NotebookClient(notebook, timeout=300, record_timing=False, resources=where).execute()
        print(f"{name}: {sum(cell.cell_type == 'code' for cell in notebook.cells)} cells have run")
        if not arguments.check:
            notebook.metadata.language_info = {"name": "python"}  # without its version
            nbformat.write(notebook, FOLDER / f"{name}.ipynb")


if __name__ == "__main__":
    main()
