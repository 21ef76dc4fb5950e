"""The rooms of the package: imports go down only, and each framework stays in its frontend.

And files that are long say why.
"""

import ast
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from floors import (
    BUDGETS,
    LEVEL,
    PACKAGE,
    circles,
    code_lines,
    files,
    home,
    lengths,
    room,
    sources,
    tree,
)
from processes import python

from anycell.plan import DTYPES
from tools import rooms as tool

# Who may import a framework, whatever of it and however late. Keras brings its own backends.
FRAMEWORKS = {
    "torch": {"torch", "keras", "bench"},
    "keras": {"keras", "tf1", "bench"},
    "tensorflow": {"keras", "tf1", "bench"},
    "jax": {"bench", "jax", "keras"},
    "flax": {"bench", "jax"},
    "equinox": {"jax"},
    "onnx": {"onnx"},
    "triton": {"engines.gpu"},
}


def test_every_file_has_a_room() -> None:
    """One that is on the list of floors, and no floor names a room that is gone."""
    homes = {home(path) for path in sources() if path != PACKAGE / "engines" / "__init__.py"}
    assert homes == set(LEVEL)


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Imports inside functions and for type checkers included: who reads a file reads those first
    that it imports.
    """
    assert circles(files()) == []


def test_what_a_circle_is() -> None:
    known = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert circles(known) == [["a", "b", "c"], ["d", "e"]]


def test_rooms_keep_to_their_budgets() -> None:
    """Of lines of code. A room that has lost some lowers its budget, so that they stay gone."""
    budgets, now = json.loads(BUDGETS.read_text(encoding="utf-8")), lengths()
    assert budgets.keys() == now.keys(), "run `python tools/rooms.py`"
    over = {n: f"{now[n]} lines; its budget is {budgets[n]}" for n in now if now[n] > budgets[n]}
    assert not over, "delete code, or say in the change why the budget rises"
    slack = {n: f"{now[n]} of {budgets[n]}" for n in now if budgets[n] - now[n] > _slack(now[n])}
    assert not slack, "lower the budgets: run `python tools/rooms.py`"


def _slack(lines: int) -> float:
    return max(10, 0.03 * lines)


def test_which_lines_are_code() -> None:
    text = '"""Prose.\n\nMore."""\n# why\n\nx = (\n    1,  # one\n\n    2,\n)\n'
    assert code_lines(text) == 4


def test_the_picture_of_the_house_shows_the_floors() -> None:
    drawn = tool.HOUSE.read_text(encoding="utf-8")
    assert drawn == tool.house(), "run `python tools/rooms.py`"


def test_imports_go_down_only() -> None:
    upward = []
    for path, imported in sources().items():
        for line, name in imported:
            if name.split(".")[0] != "anycell" or room(name) in (home(path), "engines"):
                continue
            if LEVEL[room(name)] >= LEVEL[home(path)]:
                upward.append(f"{path.relative_to(PACKAGE)}:{line} imports {name}")
    assert upward == []


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_frameworks_stay_in_their_frontends(name: str) -> None:
    """And the list above allows nothing that nobody does."""
    places: dict[str, list[str]] = {}
    for path, imported in sources().items():
        for line, other in imported:
            if other.split(".")[0] == name:
                places.setdefault(home(path), []).append(f"{path}:{line}")
    assert places.keys() == FRAMEWORKS[name], places


# Strings that mean a type of number, and where else below the frontends they stand: as the default
# of an argument, as a cell's mask is drawn, and as LLVM's types.
REALS = [n for row in DTYPES.values() if not row.quantized for n in row[1:6]]
TYPES = {name for n in REALS for name in (n.name, n.llvm)}
SPELLED = {"plan/dtype.py", "plan/plan.py", "engines/reference.py", "engines/gpu/build.py"}
SPELLED |= {"engines/cpu/ir.py", "engines/cpu/ops.py", "engines/cpu/step.py"}
SPELLED |= {"engines/cpu/tiles.py", "engines/cpu/idioms.py"}  # by which instructions go


def test_one_place_says_what_a_dtype_means() -> None:
    """All else below the frontends asks ``Plan.types``."""
    found = set()
    for path in sources():
        place = path.relative_to(PACKAGE)
        if place.parts[0] in ("plan", "engines", "layer"):
            for node in ast.walk(tree(path)):
                if isinstance(node, ast.Constant) and node.value in TYPES:
                    found.add(place.as_posix())
    assert found == SPELLED


def set_late(parsed: ast.Module) -> list[str]:
    """The attributes that a module sets or deletes outside of constructors."""
    functions = [node for node in ast.walk(parsed) if isinstance(node, ast.FunctionDef)]
    making = [f for f in functions if f.name in ("__init__", "__post_init__")]
    inside = {node for function in making for node in ast.walk(function)}
    return [
        ast.unparse(node)
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
        if node not in inside
    ]


def test_printers_keep_no_state() -> None:
    """No class of the CPU engine sets an attribute of itself after it was made, and no printer one
    of another object. (``value`` is a property of variables: a store.)
    """
    for path in sorted((PACKAGE / "engines" / "cpu").glob("*.py")):
        others = path.name not in ("image.py", "jit.py")  # they set attributes of C's and LLVM's
        late = [
            name
            for name in set_late(tree(path))
            if name.startswith("self.") or (others and not name.endswith(".value"))
        ]
        assert late == [], path.name


def test_what_a_layer_makes_is_complete() -> None:
    """No object of ``layer`` gets an attribute after it was made: neither its own classes', nor,
    but for these, others'.
    """
    late = {
        path.name: names
        for path in sorted((PACKAGE / "layer").glob("*.py"))
        if (names := set_late(tree(path)))
    }
    assert late == {
        "card.py": ["host.tier"],  # of a copy, in the function that makes it
        "compression.py": ["small.error"],  # what users read of a quantized layer
        "foreign.py": ["seed.words"],  # in the function that makes it
        "gpu.py": ["drafted.recipe.again"],  # as recipes of the CPU, which know no draft either
    }


def test_what_sets_an_attribute_late() -> None:
    text = """
        class Pass:
            def __init__(self):
                self.a = 1

            def run(self, other):
                self.b, other.c = self.a, 2
                self.d[0] = 3
                self.e += 4
                del self.a
    """
    late = set_late(ast.parse(textwrap.dedent(text)))
    assert sorted(late) == ["other.c", "self.a", "self.b", "self.e"]


LONG = 700  # lines


@pytest.mark.parametrize("directory", ["anycell", "benchmarks", "examples", "tests", "tools"])
def test_long_files_say_why(directory: str) -> None:
    silent = []
    for path in sorted((PACKAGE.parent / directory).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if text.count("\n") <= LONG:
            continue
        if "\nOne file, because " not in (ast.get_docstring(ast.parse(text)) or ""):
            silent.append(f"{path.name}: {text.count(chr(10))} lines")
    assert silent == []


def test_only_its_command_imports_the_benchmark() -> None:
    """All else works without its extra; the floors keep the other commands' rooms from it."""
    code = """
        import sys
        from anycell import cli
        cli.build_parser()
        assert cli.main(["explain", "GRU", "--hidden", "8"]) == 0
        print("bench:", [name for name in sys.modules if name.startswith("anycell.bench")])
    """
    assert python(code).endswith("bench: []\n")


def test_records_have_one_class_each() -> None:
    """``Plan`` and the like mean one thing, wherever they are read."""
    classes = [
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
    ]
    names = "Engine", "Framework", "Option", "Options", "Plan"
    assert {name: classes.count(name) for name in names} == dict.fromkeys(names, 1)


def test_a_framework_has_one_class() -> None:
    """In the file of that name in its frontend, with subclasses beside it, and no other class of
    the package has so many of its methods.
    """
    classes = [
        (path.relative_to(PACKAGE).as_posix(), node)
        for path in sources()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
    ]
    bases = {"Framework", "DeviceFramework", "Numpy", "TracedFramework", "TracedDevice"}
    heirs = [(place, node.name) for place, node in classes if bases & _names(node.bases)]
    assert heirs == [
        ("jax/device.py", "JaxDevice"),
        ("jax/framework.py", "Jax"),
        ("keras/tensorflow/framework.py", "TensorFlow"),
        ("keras/tensorflow/xla.py", "Xla"),
        ("keras/tensorflow/xla.py", "XlaCard"),
        ("layer/card.py", "TracedDevice"),
        ("layer/foreign.py", "TracedFramework"),
        ("layer/framework.py", "DeviceFramework"),
        ("numpy/framework.py", "Numpy"),
        ("numpy/framework.py", "Strict"),
        ("torch/framework.py", "Torch"),
        ("torch/framework.py", "TorchDevice"),
    ]
    (operations,) = (_methods(node) for _, node in classes if node.name == "Framework")
    alike = {place for place, node in classes if len(_methods(node) & operations) > 3}
    assert alike <= {place for place, _ in heirs}


def _names(bases: list[ast.expr]) -> set[str]:
    return {base.id for base in bases if isinstance(base, ast.Name)}


def _methods(class_: ast.ClassDef) -> set[str]:
    return {n.name for n in class_.body if isinstance(n, ast.FunctionDef) and n.name[0] != "_"}


def fields(class_: ast.ClassDef) -> set[str]:
    """The fields of a class, and the attributes that its constructor sets."""
    names = {ast.unparse(node.target) for node in class_.body if isinstance(node, ast.AnnAssign)}
    for function in class_.body:
        if getattr(function, "name", "") in ("__init__", "__post_init__"):
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    names.add(ast.unparse(node).removeprefix("self."))
    return names


def test_one_record_describes_a_layer() -> None:
    """Whatever its name, no other class than ``plan.Layer`` has a cell, its sizes and options."""
    records = [
        f"{path.relative_to(PACKAGE).as_posix()}: {node.name}"
        for path in sources()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
        and fields(node) >= {"cell", "options"}
        and fields(node) & {"sizes", "size", "hidden_size", "units"}
    ]
    assert records == ["plan/layer.py: Layer"]


def by_torch() -> None:
    torch = pytest.importorskip("torch")
    from anycell import torch as at

    at.LSTM(32, 64)(torch.zeros(20, 8, 32))


def by_torch_without_gradients() -> None:
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        by_torch()


def by_jax() -> None:
    jax = pytest.importorskip("jax")
    from anycell import jax as aj

    layer = aj.LSTM(32, 64)
    layer(layer.init(jax.random.key(0)), np.zeros((20, 8, 32), np.float32))


def by_numpy() -> None:
    from anycell import numpy as an

    an.LSTM(32, 64).forward(np.zeros((20, 8, 32)), training=True)


def by_keras() -> None:
    pytest.importorskip("tensorflow")
    from anycell import keras as ak

    ak.LSTM(64)(np.zeros((8, 20, 32), np.float32))


@pytest.mark.parametrize(
    ("column", "call"),
    [
        ("PyTorch", by_torch),
        ("PyTorch", by_torch_without_gradients),
        ("NumPy", by_numpy),
        pytest.param("JAX", by_jax, marks=pytest.mark.slow),
        pytest.param("Keras on TensorFlow", by_keras, marks=pytest.mark.slow),
    ],
)
def test_the_way_of_a_call(
    column: str, call: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who call on each other until machine code runs are in the files that the frontend's
    column in docs/architecture.md lists, in that order.
    """
    from anycell.layer.recipe import Recipe

    text = (PACKAGE.parent / "docs/architecture.md").read_text(encoding="utf-8")
    section = text.split("## The way of a call")[1].split("\n## ")[0]
    head, _, *rows = [line.split("|") for line in section.splitlines() if line.startswith("|")]
    place = [cell.strip() for cell in head].index(column)
    cells = [re.findall(r"`([\w/]+\.py)`", row[place])[0] for row in rows]
    listed = [name for name, _ in itertools.groupby(cells)]
    way: list[str] = []
    run = Recipe.run

    def looked(*arguments: Any) -> Any:
        frames = [(PACKAGE / listed[-1]).as_posix()]
        frame = sys._getframe(1)
        while frame is not None:
            frames.append(frame.f_code.co_filename)
            frame = frame.f_back  # type: ignore[assignment]
        inside = [Path(f).relative_to(PACKAGE).as_posix() for f in frames if str(PACKAGE) in f]
        if not way:  # PyTorch's calls are learnt afterwards, and then checked
            way[:] = [name for name, _ in itertools.groupby(reversed(inside))]
        return run(*arguments)

    monkeypatch.setattr(Recipe, "run", looked)
    call()
    assert way == listed and len(listed) <= 6
