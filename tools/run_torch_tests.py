"""Runs PyTorch's own tests of recurrent layers with anycell's classes in place of torch's.

    python tools/run_torch_tests.py PYTORCH [pytest arguments]

PYTORCH is a checkout of pytorch/pytorch, preferably of the installed version; its tests need `pip
install expecttest hypothesis`. Nothing is fetched, and none of PyTorch's code is here: its files
are collected in place, after ``torch.nn.LSTM`` and similar classes are replaced. Second derivatives
of LSTM take half an hour of one core; `-k "not gradgrad_nn_LSTM"` leaves them out.

All tests run whose names or code mention recurrent layers or packed sequences. None of these is
left out; the end of the output lists tests that skip themselves, for lack of a GPU for example.
"""

import ast
import importlib
import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import anycell.torch

SUBSTITUTED = ("LSTM", "GRU", "LSTMCell", "GRUCell")
FILES = ("test/nn/test_packed_sequence.py", "test/test_nn.py", "test/test_modules.py")
RECURRENT = re.compile(r"rnn|lstm|gru|packed", re.IGNORECASE)


def substitute() -> None:
    """Replaces torch's classes by anycell's, before any test is imported."""
    for name in SUBSTITUTED:
        for namespace in (torch.nn, torch.nn.modules, torch.nn.modules.rnn):
            setattr(namespace, name, getattr(anycell.torch, name))


def fill_gaps(file: Path) -> None:
    """Defines names that a file imports from ``torch.testing._internal`` but this version lacks.

    Such names are tables of modules that are not recurrent, and decorators for other devices.
    """
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and "torch.testing._internal" in (node.module or ""):
            module = importlib.import_module(str(node.module))
            for name in (alias.name for alias in node.names if not hasattr(module, alias.name)):
                print(f"not in torch {torch.__version__}: {node.module}.{name}")
                setattr(module, name, [] if name.endswith("_tests") else decorator)


def decorator(given: Any = None, *_: Any, **__: Any) -> Any:
    """A decorator that does nothing, with or without arguments."""
    return given if callable(given) else lambda function: function


class Selection:
    """A pytest plugin that selects the tests of recurrent layers."""

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        config.hook.pytest_deselected(items=[item for item in items if not counts(item)])
        items[:] = [item for item in items if counts(item)]


def counts(item: Any) -> bool:
    name, file = item.name, item.path.name
    if file == "test_modules.py":  # one test for each module, named after it
        return any(f"_nn_{own}_" in name for own in SUBSTITUTED)
    if file == "test_packed_sequence.py" or RECURRENT.search(name):
        return True
    return bool(RECURRENT.search(inspect.getsource(item.function)))


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        print(__doc__)
        return 2
    source = Path(arguments[0]).resolve()
    files = [source / name for name in FILES]
    for file in files:
        if not file.is_file():
            print(f"{file} is not there: is {source} a checkout of pytorch/pytorch?")
            return 2
    substitute()
    for file in files:
        fill_gaps(file)
    sys.path.insert(0, str(source / "test"))
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # older tests load whole modules
    options = ["-q", "-rfEs", "-c", "/dev/null", "-p", "no:cacheprovider"]
    options += ["--import-mode=importlib", *map(str, files), *arguments[1:]]
    return int(pytest.main(options, plugins=[Selection()]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
