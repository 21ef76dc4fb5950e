"""What the documents show runs; the recipes of CONTRIBUTING.md work, on a copy of the package."""

import importlib
import json
import re
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path

import processes
import pytest

import anycell
from anycell.lang.ops import TABLE

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "benchmarks" / "results" / "README.md",
]


def rows_of_cards() -> Iterator[str]:
    """The rows of the table of what a card has run, from the results of our kernels on cards."""
    before = "PyTorch, before passes were recipes"
    for frontend in (before, "PyTorch", "JAX", "Keras on TensorFlow"):
        lines, links = [], []
        for file in sorted((ROOT / "benchmarks" / "results").glob("*_gpu.jsonl")):
            day, card, _ = file.stem.split("_")
            known = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            default = before if day < "2026-11-28" else "PyTorch"
            ran = [l for l in known if l.get("frontend", default) == frontend and l.get("tier")]
            links += [f"[{card}](../benchmarks/results/{file.name})"] * bool(ran)
            lines += ran
        columns = [
            ", ".join(sorted({str(line[name]) for line in lines}))
            for name in ("cell", "dtype", "tier")
        ]
        row = [*columns, ", ".join(links)] if lines else ["nothing", "", "", ""]
        yield f"| {' | '.join([frontend, *row])} |"


def test_what_a_card_has_run() -> None:
    """The table says it, of every frontend, and no more."""
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    section = page.partition("### What a card has run")[2].partition("###")[0]
    table = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert [row.replace("| |", "|  |").replace("| |", "|  |") for row in table] == [
        *rows_of_cards()
    ]


EXAMPLES = [
    "README.md", "docs/faq.md", "docs/cells.md", "docs/compress.md", "docs/sequences.md",
    "docs/training.md", "docs/your-own-cell.md", "docs/start/pytorch.md", "docs/start/keras.md",
    "docs/start/numpy.md", "docs/start/jax.md", "docs/guides/forecasting.md",
    "docs/guides/streaming.md", "docs/guides/existing-models.md", "docs/guides/deploying.md",
    "docs/guides/literature.md",
]  # fmt: skip


def blocks(document: str, language: str = "python") -> list[str]:
    """The blocks of a document in a language."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def run(script: Path, *paths: Path) -> str:
    """What a script prints. It is a file, as cells are, whose errors name their lines."""
    return processes.run(str(script), cwd=script.parent, paths=paths)


@pytest.mark.parametrize("document", EXAMPLES)
@pytest.mark.sample(1)
def test_the_examples_run(document: str, tmp_path: Path) -> None:
    """And print what the document says that they print."""
    pytest.importorskip("torch")
    if document in ("docs/start/jax.md", "docs/guides/literature.md"):
        pytest.importorskip("jax")
    if document == "docs/guides/literature.md":
        pytest.importorskip("tensorflow")
    script = tmp_path / "example.py"
    script.write_text("\n".join(blocks(document)), encoding="utf-8")
    printed = run(script, ROOT)
    for shown in blocks(document, "text"):
        assert shown in printed


def test_the_documents_link_to_what_is_there() -> None:
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for target, heading in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
            path = document.parent / target if target else document
            assert path.is_file(), f"{document.name}: {target}"  # of a directory there is no page
            if heading:
                assert heading in headings(path), f"{document.name}: {target}#{heading}"


def headings(document: Path) -> set[str]:
    """Of a Markdown file, as links name them."""
    text = document.read_text(encoding="utf-8")
    lines = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    entries = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines} | {*entries}


def test_pages_stay_short() -> None:
    """Figures of old machines, and what was tried, are in benchmarks/."""
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in DOCUMENTS}
    docs = ROOT / "docs"
    for name, most in {"performance.md": 250, "gpu.md": 150, "architecture.md": 60}.items():
        assert lengths[docs / name] <= most, name
    assert sum(n for path, n in lengths.items() if docs in path.parents) <= 5_510


PUBLIC = [f"anycell.{name}" for name in ("cells", "compress", "jax", "numpy", "onnx", "torch")]
KERAS = pytest.param("anycell.keras", marks=pytest.mark.slow)


@pytest.mark.parametrize("module", ["anycell", *PUBLIC, KERAS])
def test_every_public_name_has_an_entry(module: str) -> None:
    if module in ("anycell.jax", "anycell.keras", "anycell.onnx", "anycell.torch"):
        pytest.importorskip(module.removeprefix("anycell."))
    page = ROOT / "docs" / "api" / f"{module.rpartition('.')[2]}.md"
    entries = re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    names = {f"{module}.{name}" for name in importlib.import_module(module).__all__}
    if module == "anycell.jax":  # modules of frameworks that it does not import
        names |= {"anycell.jax.equinox.RNN", "anycell.jax.nnx.Loop", "anycell.jax.nnx.RNN"}
    cells = {f"{module}.{name}" for name in anycell.cells.__all__}
    if f"{module}.*" in entries:  # one for each cell that has none
        entries = [e for e in entries if e != f"{module}.*"] + sorted(cells - {*entries})
    assert sorted(entries) == sorted(names)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, which builds strictly."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("keras")
    folder = tmp_path_factory.mktemp("site")
    quiet = {"NO_MKDOCS_2_WARNING": "1", "KERAS_BACKEND": "torch"}
    processes.run("-m", "mkdocs", "build", "--site-dir", str(folder), **quiet)
    return folder


MAIN_PAGES = [
    "index.html", "start/pytorch.html", "guides/reinforcement-learning.html", "faq.html",
    "notebooks/forecast.html", "gallery/index.html", "gallery/LSTM.html", "api/torch.html",
    "performance.html", "architecture.html",
]  # fmt: skip


@pytest.mark.slow
def test_the_main_pages_in_a_browser(site: Path) -> None:
    """Wide and as a phone: no message on the console, no request elsewhere, nothing cut off."""
    pytest.importorskip("playwright")
    if not (shutil.which("chromium") or shutil.which("google-chrome")):
        pytest.skip("no Chromium here")
    said = processes.run("tools/site_browser.py", str(site), *MAIN_PAGES)
    assert f"{len(MAIN_PAGES)} pages are right" in said


@pytest.mark.slow
def test_the_site(site: Path, tmp_path: Path) -> None:
    """It loads nothing from elsewhere, and each entry shows its arguments."""
    script = tmp_path / "entries.py"
    script.write_text(ENTRIES, encoding="utf-8")
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(
            r"<(?:script|img|link rel=\"stylesheet\")[^>]*(?:src|href)=\"(\S+?)\"", text
        )
        assert loaded and not [path for path in loaded if path.startswith(("http", "//"))], page
    for entry in run(script, ROOT).splitlines():
        name, *arguments = entry.split()
        page = site / "api" / f"{name.split('.')[-2]}.html"
        shown = page.read_text(encoding="utf-8").split(f'id="{name}"')[1].split('<h3 id="')[0]
        words = set(re.findall(r"\w+", re.sub("<[^>]*>", " ", shown)))
        assert {*arguments} <= words, name


ENTRIES = """
import importlib
import inspect
import os

os.environ["KERAS_BACKEND"] = "torch"
import anycell

# Nobody but anycell makes errors of cells, expressions and gates.
for module in "anycell", *(f"anycell.{n}" for n in "torch keras jax numpy compress".split()):
    imported = importlib.import_module(module)
    for name in imported.__all__:
        public = getattr(imported, name)
        if callable(public) and public not in (anycell.CellError, anycell.Expr, anycell.Gates):
            shown = [*inspect.signature(public).parameters]
            if shown == ["args", "kwargs"] and "__init__" in vars(public):  # they are of __new__
                shown = [*inspect.signature(public.__init__).parameters][1:]
            print(f"{module}.{name}", *shown)
cells = importlib.import_module("anycell.cells")
for name in cells.__all__:
    given = inspect.signature(getattr(cells, name).function).parameters.values()
    print(f"anycell.cells.{name}", *(p.name for p in given if p.kind is p.KEYWORD_ONLY))
"""


def test_the_list_of_cells_is_complete() -> None:
    text = (ROOT / "docs" / "cells.md").read_text(encoding="utf-8")
    for name in anycell.cells.__all__:
        assert re.search(rf"^\| `{name}[(`]", text, re.MULTILINE), name


def test_the_vocabulary_is_complete() -> None:
    text = (ROOT / "docs" / "cells.md").read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", text))
    frontends = {"compress", "jax", "keras", "layouts", "numpy", "tf1", "torch"}
    other = {"Cell", "CellError", "cells", "recurrence", "explain", "export", "threads", *frontends}
    assert set(anycell.__all__) - other <= words


# ---- the recipes of CONTRIBUTING.md --------------------------------------------------------------
CHECK = """
import numpy as np
from problems import by_cpu, random_problem
from tolerances import assert_close

import anycell
from anycell.plan import plan

assert anycell.__file__.startswith(ROOT)


def check(cell):
    assert plan(cell, 33).engine == "cpu"
    for dtype in ("float64", "float32"):
        for shape in [(9, 5, 33), (1, 1, 33)]:
            rng = np.random.default_rng(0)
            problem = random_problem(cell, shape, rng, masked=True, resets=True).astype(dtype)
            for name, value in by_cpu(problem).items():
                kind = "gradient" if name.startswith("d ") else "forward"
                assert_close(value, problem.right[name], dtype, kind, name)
"""

JANET = """
check(anycell.cells.JANET)
check(anycell.cells.JANET(beta=0.0))
assert anycell.numpy.JANET(3, 8, beta=0.0).cell == anycell.cells.JANET(beta=0.0)
print(anycell.explain(anycell.cells.JANET, 33))
"""

ROOTED = """
from pathlib import Path

from tests.project import test_docs
from anycell import cell, rsqrt


@cell(gates="f g")
def Rooted(x, r, s):
    return rsqrt(1.0 + x.f * x.f) * s.h + rsqrt(2.0 + abs(x.g + r.g))


check(Rooted)
test_docs.ROOT = Path(ROOT)
test_docs.test_every_public_name_has_an_entry("anycell")
test_docs.test_the_vocabulary_is_complete()
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout in which the recipes have been followed, word for word; as it was in "before"."""
    root = tmp_path_factory.mktemp("copy")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "anycell", root / "anycell", ignore=ignore)
    parts = blocks("CONTRIBUTING.md")
    janet, export, _, row, function, emit, kernel, exported, *parts = parts
    dtype, field, name, line, about, untyped, of_torch, of_numpy, act, *_ = parts
    (root / "anycell/cells/janet.py").unlink()
    remove(root / "anycell/cells/__init__.py", export, ' "JANET",')
    remove(root / "anycell/plan/dtype.py", dtype)
    shutil.copytree(root / "anycell", root / "before" / "anycell")

    (root / "anycell/cells/janet.py").write_text(janet, encoding="utf-8")
    insert(root / "anycell/cells/__init__.py", "from anycell.cells.gru", export)
    insert(root / "anycell/cells/__init__.py", "]", '    "JANET",\n')

    insert(root / "anycell/plan/call.py", "\n    def unread(", field)
    insert(root / "anycell/plan/call.py", "\n\nclass FunctionOptions", name)
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (above,) = re.findall(r"`forward` above `([^`]+)`", text)
    insert(root / "anycell/layer/forward.py", f"    {above}:", textwrap.indent(line, "    "))
    insert(root / "anycell/plan/call.py", '    """\n\n    mask: Array', about)
    insert(root / "anycell/plan/call.py", "\n\nclass Returning", untyped)
    insert(root / "anycell/torch/typed.py", "\n\nclass Arguments", of_torch)
    insert(root / "anycell/numpy/typed.py", "\n\nclass Arguments", of_numpy)
    (above,) = re.findall(r"`Layout.of_steps` above `([^`]+)`", text)
    act = textwrap.indent(act, " " * 8)
    insert(root / "anycell/layer/layers.py", f"        {above}:", act)
    insert(root / "anycell/plan/dtype.py", "}\n\n\n@functools.cache\ndef dtypes", dtype)
    insert(root / "anycell/lang/ops.py", "    # conditions", row)
    with open(root / "anycell/lang/ops.py", "a", encoding="utf-8") as file:
        file.write(f"\n\n{function}")
    insert(root / "anycell/engines/cpu/ops.py", "    # conditions", emit)
    insert(root / "anycell/engines/gpu/library.py", "# ---- row reductions", f"{kernel}\n\n")
    insert(root / "anycell/lang/__init__.py", "\n__all__", exported)
    insert(root / "anycell/lang/__init__.py", "]  # fmt: skip", '    "rsqrt",\n')
    shutil.copytree(ROOT / "docs" / "api", root / "docs" / "api")
    shutil.copy(ROOT / "docs" / "cells.md", root / "docs")
    _, entry = blocks("CONTRIBUTING.md", "markdown")
    insert(root / "docs/api/anycell.md", "## Over the units of a row", f"{entry}\n")
    insert(root / "docs/cells.md", " sqrt abs ", " rsqrt")
    return root


def insert(path: Path, before: str, new: str) -> None:
    """Puts a text in front of the last place where another stands."""
    text = path.read_text(encoding="utf-8")
    at = text.rindex(before)
    path.write_text(text[:at] + new + text[at:], encoding="utf-8")


def remove(path: Path, *parts: str) -> None:
    text = path.read_text(encoding="utf-8")
    for part in parts:
        assert text.count(part) == 1
        text = text.replace(part, "")
    path.write_text(text, encoding="utf-8")


def follow(copy: Path, script: Path, code: str) -> str:
    """What a script prints that runs in the copy, with the helpers of the tests at hand."""
    script.write_text(f"ROOT = {str(copy)!r}\n{CHECK}{code}", encoding="utf-8")
    return run(script, copy, ROOT / "tests" / "helpers")


def test_adding_a_cell(copy: Path, tmp_path: Path) -> None:
    page = follow(copy, tmp_path / "janet.py", JANET)
    assert "LSTM with nothing but its forget gate." in page
    assert len((copy / "anycell/cells/janet.py").read_text(encoding="utf-8").splitlines()) < 60


HALF = """
from gpu import by_gpu

rng = np.random.default_rng(0)
for cell in (anycell.cells.LSTM, anycell.cells.LayerNormGRU):
    problem = random_problem(cell, (4, 3, 9), rng, masked=True, resets=True).astype("float16")
    for name, value in by_gpu(problem).items():
        kind = "gradient" if name.startswith("d ") else "forward"
        assert_close(np.asarray(value), problem.right[name], "float16", kind, name)
print("solved")
"""


@pytest.mark.more  # an op and an option are added too
def test_adding_a_dtype(copy: Path, tmp_path: Path) -> None:
    """Without its row there is none."""
    pytest.importorskip("triton")
    assert "solved" in follow(copy, tmp_path / "half.py", HALF)
    code = """
        from anycell import cells
        from anycell.plan import plan
        try:
            plan(cells.LSTM, 9, "float16", "gpu")
        except ValueError as error:
            print(error)
    """
    script = tmp_path / "before.py"
    script.write_text(textwrap.dedent(code), encoding="utf-8")
    assert "float16" in run(script, copy / "before")


FINITE = """
import inspect

import torch
import anycell.numpy
import anycell.torch


def refuses(call, *arguments):
    call(*arguments)
    call(*arguments, finite=False)
    try:
        call(*arguments, finite=True)
    except FloatingPointError:
        return True


x = np.full((3, 2, 4), np.nan, np.float32)
weights = {"weight_hh": np.zeros((8, 2), np.float32)}
given = torch.from_numpy(x)
tensors = {"weight_ih": torch.zeros(8, 4), "weight_hh": torch.zeros(8, 2)}
assert refuses(anycell.numpy.LSTM(4, 5).forward, x)
assert refuses(anycell.recurrence, anycell.cells.LSTM, np.tile(x, 2), weights)
assert refuses(anycell.torch.LSTM(4, 5), given)
assert refuses(anycell.torch.RNN(anycell.cells.PeepholeLSTM, 4, 5), given)
assert refuses(anycell.torch.recurrence, anycell.cells.LSTM, given, tensors)
for call in (anycell.recurrence, anycell.torch.recurrence, anycell.numpy.LSTM.forward):
    assert inspect.signature(call).parameters["finite"].default is False
    assert "finite: raises FloatingPointError" in call.__doc__
try:
    anycell.numpy.LSTM(4, 5).forward(x, finite="yes")
except TypeError as error:
    assert str(error).startswith("finite: given str 'yes'; expected True or False"), error
print("refused")
"""


@pytest.mark.slow
def test_adding_an_option(copy: Path, tmp_path: Path) -> None:
    """Every entrance takes it, checks it and documents it."""
    pytest.importorskip("torch")
    assert "refused" in follow(copy, tmp_path / "finite.py", FINITE)


STARTS = """
import inspect

import torch
import anycell.numpy
import anycell.torch

x = torch.randn(4, 2, 3)
mask = torch.tensor([[True, False], [True, False], [True, True], [True, False]])
both = {"starts": [0, 2], "lengths": [4, 3]}
weights = {"weight_ih": torch.ones(20, 3), "weight_hh": torch.ones(20, 5)}
recurrence, cell = anycell.torch.recurrence, anycell.cells.LSTM
for layer in (
    anycell.torch.LSTM(3, 5), anycell.torch.RNN(cell, 3, 5), anycell.numpy.LSTM(3, 5),
    lambda x, **arguments: recurrence(cell, x, weights, **arguments),
):
    given = x.numpy() if isinstance(layer, anycell.numpy.RNN) else x
    found, right = layer(given, **both)[0], layer(given, mask=mask)[0]
    assert bool((found == right).all()) and not bool((right == layer(given)[0]).all())
gates = np.random.default_rng(0).normal(size=(4, 2, 20))
learned = {"weight_hh": np.ones((20, 5))}
found = anycell.recurrence(cell, gates, learned, **both)[0]
assert (found == anycell.recurrence(cell, gates, learned, mask=mask.numpy())[0]).all()
for call in (
    recurrence, anycell.recurrence, anycell.numpy.LSTM.forward,
    anycell.torch.LSTM.forward, anycell.torch.RNN.forward,
):
    assert inspect.signature(call).parameters["starts"].default is None
for documented in (recurrence, anycell.recurrence, anycell.torch.LSTM, anycell.torch.RNN):
    assert "starts: ``[B]``, integers from 0 to T" in documented.__doc__
for layer in (anycell.torch.LSTM(3, 5), anycell.torch.RNN(cell, 3, 5)):
    by_position = [None] * (len(inspect.signature(layer.forward).parameters) - 4)
    assert torch.equal(layer(x, *by_position, [0, 2])[0], layer(x, starts=[0, 2])[0])
    try:
        layer(torch.nn.utils.rnn.pack_sequence([x[:, 0]]), starts=[0])
    except ValueError as error:
        assert str(error).startswith("starts: given list"), error
    else:
        raise AssertionError
try:
    anycell.numpy.LSTM(3, 5)(x.numpy(), starts=[0, 5])
except ValueError as error:
    assert str(error).startswith("starts: given a length of 5"), error
print("begun")
"""


@pytest.mark.slow
def test_adding_an_array(copy: Path, tmp_path: Path) -> None:
    """Every entrance takes it, by name and by position, checks it and documents it."""
    pytest.importorskip("torch")
    assert "begun" in follow(copy, tmp_path / "starts.py", STARTS)


def test_the_files_of_an_array() -> None:
    """Those that the recipe lists; nobody else declares one."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split("## Adding an array of a call")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| `")]
    listed = re.findall(r"`(anycell/[\w/]+\.py)`", "\n".join(table))
    assert len(listed) <= 4
    for name in ("lengths", "return_states"):
        declared = re.compile(rf"^    {name}: ", re.MULTILINE)
        package = ROOT / "anycell"
        where = [path for path in package.rglob("*.py") if declared.search(path.read_text("utf-8"))]
        assert {path.relative_to(ROOT).as_posix() for path in where} <= {*listed}, name


def test_the_files_of_an_option() -> None:
    """One that changes a step is in four files, and those are listed."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split("## Adding an option of a call")[1].split("\n## ")[0]
    listed = set(re.findall(r"`((?:plan|engines)/[\w/]+\.py)`", section))
    package = ROOT / "anycell"
    knows = re.compile(r"masked_output(?!``)|variant\.separate_output\b")
    known = {
        path.relative_to(package).as_posix()
        for path in (package / "engines").rglob("*.py")
        if knows.search(path.read_text(encoding="utf-8"))
    }
    assert known | {"plan/call.py", "plan/step.py"} == listed
    assert len(listed) <= 4
    elsewhere = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(r"masked_output(?!``)", path.read_text(encoding="utf-8"))
    ]
    assert set(elsewhere) <= listed


def test_adding_an_op(copy: Path, tmp_path: Path) -> None:
    """With its export and its entries in the documents, as the tests of the documents ask."""
    follow(copy, tmp_path / "rooted.py", ROOTED)


def test_the_recipes_touch_the_files_that_they_list(copy: Path) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    touched = []
    for path in (copy / "anycell").rglob("*.py"):
        name = path.relative_to(copy)
        before = copy / "before" / name
        if not before.exists() or path.read_bytes() != before.read_bytes():
            touched.append(name.as_posix())
    assert len(touched) == 12
    for name in touched:
        assert re.search(rf"^\| .*`{name}`.* \|", text, re.MULTILINE), name


def test_the_recipe_of_a_cell_is_how_it_was_done() -> None:
    janet, _, equations, *_ = blocks("CONTRIBUTING.md")
    row, *_ = blocks("CONTRIBUTING.md", "markdown")
    (entry,) = blocks("CONTRIBUTING.md", "text")
    for file, part in [
        ("anycell/cells/janet.py", janet),
        ("docs/cells.md", row),
        ("tests/lang/test_cells.py", equations),
        ("tests/lang/test_cells.py", entry),
    ]:
        assert part in (ROOT / file).read_text(encoding="utf-8"), file


def test_the_recipe_of_an_op_is_of_something_new() -> None:
    assert "rsqrt" not in TABLE
