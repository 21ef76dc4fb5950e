"""The rooms of the package: the floors that they lie on, what they import, and their lengths."""

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "anycell"
BUDGETS = Path(__file__).with_name("budgets.json")

# From the ground up, and what a floor is for. A room imports only what lies on a floor below; rooms
# of one floor do not know each other. "anycell" is the package's own names. `python tools/rooms.py`
# draws docs/house.svg from this list.
FLOORS = """
    environment machine recent refusal requirement | variables, processors, words of errors
    lang | cells as graphs, and their derivatives
    cells drawing layouts plan | how a cell runs: its arrays, dtypes, options
    engines.cpu engines.reference | plans as machine code; the oracle
    engines.gpu | plans as Triton kernels
    layer | a layer of any cell on arrays of any framework
    explanation named read | reports, layers of cells, steps read as written
    numpy torch | names, weights, defaults and errors of a framework
    jax
    compress exporter keras onnx | smaller layers, layers without Python
    tf1
    anycell | the package's own names
    usage
    bench cache doctor | what the command does
    cli
    __main__
"""
ROWS = [line.partition("|") for line in FLOORS.strip().splitlines()]
LEVEL = {room: level for level, (rooms, _, _) in enumerate(ROWS) for room in rooms.split()}
BY_NAME = {"import_module", "need", "require"}  # functions that import what they are told


def room(module: str) -> str:
    """The room of a module or of a name in it: ``anycell.engines.cpu.jit`` is in engines.cpu."""
    parts = module.split(".")[1:] or ["anycell"]
    name = ".".join(parts[: 2 if parts[0] == "engines" else 1])
    return name if name in LEVEL or name == "engines" else "anycell"


def module_of(path: Path) -> str:
    """The name by which a file of the package is imported."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(["anycell", *(part for part in parts if part != "__init__")])


def home(path: Path) -> str:
    """The room that a file lies in."""
    return room(module_of(path))


@functools.cache
def tree(path: Path) -> ast.Module:
    """A file, parsed once."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of all that a module imports, late imports and those by name included."""
    inside = ["anycell", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = inside[: len(inside) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func
            name = (
                function.attr
                if isinstance(function, ast.Attribute)
                else getattr(function, "id", "")
            )
            if name in BY_NAME and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


@functools.cache
def sources() -> dict[Path, list[tuple[int, str]]]:
    """What each file of the package imports, read by the first caller."""
    return {path: list(imports(path)) for path in sorted(PACKAGE.rglob("*.py"))}


def circles(known: dict[str, set[str]]) -> list[list[str]]:
    """The modules that import each other, directly or by way of others.

    Args:
        known: by module, what it imports.
    """

    @functools.cache
    def reached(module: str) -> frozenset[str]:
        seen, new = set[str](), set(known[module])
        while new:
            seen |= new
            new = {name for module in new for name in known[module]} - seen
        return frozenset(seen)

    inside = [module for module in known if module in reached(module)]
    groups = {tuple(m for m in inside if m in reached(n) and n in reached(m)) for n in inside}
    return sorted(map(list, groups))


def files() -> dict[str, set[str]]:
    """By module, the modules of the package that it imports, deferred and for types included."""
    names = {module_of(path): path for path in sources()}
    known: dict[str, set[str]] = {name: set() for name in names}
    for module, path in names.items():
        for _, name in sources()[path]:
            if name.partition(".")[0] == "anycell":
                while name not in names:
                    name = name.rpartition(".")[0]
                known[module] |= {name} - {module}
    return known


def code_lines(text: str, parsed: ast.Module | None = None) -> int:
    """The lines of code of a module, without docstrings, comments and blank lines."""
    prose = set[int]()
    for node in ast.walk(parsed or ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            prose |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(1 for n, line in lines if line and line[0] != "#" and n not in prose)


def lengths() -> dict[str, int]:
    """The lines of code of each room, from the ground up."""
    total = Counter[str]()
    for path in sources():
        total[home(path)] += code_lines(path.read_text(encoding="utf-8"), tree(path))
    return {name: total[name] for name in LEVEL}
