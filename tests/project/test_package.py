"""The package as it is shipped: what importing it costs, and what the wheel holds."""

import email
import inspect
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from processes import ROOT, python

import anycell
from anycell.requirement import install, installed

PACKAGE = ROOT / "anycell"
OPTIONAL = (
    "equinox flax jax keras matplotlib onnx onnxruntime rich scipy tensorflow torch triton".split()
)


def fresh(code: str) -> str:
    """What `code` prints in an interpreter that keeps bytecode as an installed one does."""
    return python(code, PYTHONDONTWRITEBYTECODE=None)


def test_a_star_brings_no_framework() -> None:
    code = "from anycell import *; import sys; print(cell, linear, *sys.modules)"
    assert not set(OPTIONAL) & set(fresh(code).split())


def test_names_that_are_not_there() -> None:
    for name, hint in [("tau", "Cells may use abs, clip, "), ("sigmiod", "Close to it: sig")]:
        with pytest.raises(AttributeError, match=rf"'anycell' has no attribute '{name}'\. {hint}"):
            getattr(anycell, name)
    with pytest.raises(AttributeError, match=r"'dropout'\. In a cell write keep\(rate\) / rate"):
        anycell.dropout  # noqa: B018
    with pytest.raises(
        AttributeError, match=r"anycell also has Cell, .*keras, .*tf1, threads, torch\.$"
    ):
        anycell.flax  # noqa: B018
    with pytest.raises(AttributeError, match=r"^module 'anycell' has no attribute '__wrapped__'$"):
        anycell.__wrapped__  # noqa: B018
    assert not hasattr(anycell, "tau")
    with pytest.raises(AttributeError, match=r"is a cell: anycell\.cells\.GRU\..*RNN\(cells\.GRU"):
        anycell.GRU  # noqa: B018


@pytest.mark.parametrize("frontend", ["torch", "keras", "numpy", "jax"])
def test_a_misspelt_layer_is_near_to_others(frontend: str) -> None:
    module = pytest.importorskip(f"anycell.{frontend}")
    with pytest.raises(AttributeError, match=r"'LayerNormLSTMM'\. Close to it: LayerNormLSTM"):
        module.LayerNormLSTMM  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'Qqq'$"):
        module.Qqq  # noqa: B018
    assert not hasattr(module, "__wrapped__")


def test_the_language_has_one_list_of_names() -> None:
    """Whatever takes traced values: functions of the op table, and those that the tracer knows."""
    from anycell import lang
    from anycell.lang import ops

    written = [
        f for f in vars(ops).values() if inspect.isfunction(f) and f.__module__ == ops.__name__
    ]
    public = {f.__name__ for f in written if not f.__name__.startswith("_")} - {"<lambda>"}
    helpers = {"is_boolean", "is_reduction"}
    assert public - helpers | {"keep", "linear"} == set(lang.VOCABULARY)
    assert set(lang.__all__) <= set(anycell.__all__)
    assert {name for name in dir(anycell) if name in vars(lang)} >= set(lang.VOCABULARY)


@pytest.mark.parametrize(
    ("frontend", "missing", "begin", "instead"),
    [
        ("torch", "torch", "torch, which is not installed.\n", install("torch") + "."),
        ("keras", "keras", "keras, which is not installed.\n", install("keras") + "."),
        (
            "keras", "tensorflow", "keras, and keras needs tensorflow, which is",
            "pip install tensorflow, or choose another backend by KERAS_BACK",
        ),
        ("onnx", "onnx", "onnx, which is not installed.\n", install("onnx") + "."),
        ("tf1", "tensorflow", "tensorflow, which is", install("tensorflow") + "."),
    ],
)  # fmt: skip
def test_a_frontend_says_what_to_install(
    frontend: str, missing: str, begin: str, instead: str
) -> None:
    if frontend == "keras" != missing:
        pytest.importorskip("keras")
    code = f"""
        import importlib, os, sys
        os.environ["KERAS_BACKEND"] = "tensorflow"
        sys.modules[{missing!r}] = None  # as if it were not installed
        import anycell
        name = "anycell.{frontend}"
        for find in (lambda: anycell.{frontend}, lambda: importlib.import_module(name)):
            try:
                find()
            except ModuleNotFoundError as error:
                print(error)
    """
    said = fresh(code)
    assert said.count(f"anycell.{frontend} needs {begin}") == 2
    assert said.count(f"Instead: {instead}") == 2


def test_torch_layers_do_not_import_the_compiler() -> None:
    """It takes as long as the rest of torch, and most programs never call it."""
    pytest.importorskip("torch")
    assert "torch._dynamo" not in fresh("import sys, anycell.torch; print(*sys.modules)").split()


def test_importing_costs_little() -> None:
    """By what it does, not by the clock: NumPy, a part of the standard library, our own modules,
    and no more calls of Python functions than for NumPy twice."""
    code = """
        import sys
        calls = [0]
        def count(frame, event, argument):
            calls[-1] += event == "call"
        sys.setprofile(count)
        import numpy
        modules = set(sys.modules)
        calls.append(0)
        import anycell
        sys.setprofile(None)
        added = {name.split(".")[0] for name in set(sys.modules) - modules}
        print(*calls, *added - sys.stdlib_module_names)
    """
    fresh(code)  # compiles the bytecode
    for_numpy, for_us, *added = fresh(code).split()
    assert added == ["anycell"]
    assert int(for_us) <= 2 * int(for_numpy)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    into = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", str(ROOT)]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(into)]
    subprocess.check_call([*pip, *options])
    (path,) = into.iterdir()
    return zipfile.ZipFile(path)


def version(wheel: zipfile.ZipFile) -> str:
    """The version in the name of a wheel for any machine."""
    named = re.fullmatch(r"anycell-([^-]+)-py3-none-any\.whl", Path(wheel.filename).name)
    assert named
    return named[1]


def test_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    info = f"anycell-{version(wheel)}.dist-info/"
    shipped = {name for name in wheel.namelist() if not name.startswith(info)}
    sources = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.[pl][yl]")}
    assert sources <= shipped
    assert "anycell/engines/cpu/gang.ll" in shipped  # what threads run
    assert "anycell/py.typed" in shipped
    assert {name.split("/")[0] for name in shipped} == {"anycell"}
    assert {Path(name).suffix for name in shipped} <= {
        ".py", ".pyi", ".json", ".ll", ".typed", ".c", ".h", ".hpp", ".mjs", ".txt",
    }  # fmt: skip
    assert f"{info}licenses/LICENSE" in wheel.namelist()


def test_metadata(wheel: zipfile.ZipFile) -> None:
    text = wheel.read(f"anycell-{version(wheel)}.dist-info/METADATA").decode()
    metadata = email.message_from_string(text)
    assert metadata["Version"] == version(wheel)
    assert anycell.__version__ == installed()
    assert {"Homepage", "Documentation", "Changelog", "Issues", "Source"} == {
        link.partition(",")[0] for link in metadata.get_all("Project-URL")
    }
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    needed = [need for need in metadata.get_all("Requires-Dist") if "extra ==" not in need]
    assert {re.match(r"[\w-]+", need)[0] for need in needed} == {"numpy", "llvmlite"}


def floors() -> dict[str, str]:
    """The oldest version of each package, as listed for ``make test-oldest``."""
    text = (ROOT / "requirements" / "oldest.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w-]+)==([\d.]+)", text, re.MULTILINE))


@pytest.mark.parametrize("package", "numpy llvmlite torch keras tensorflow tensorflow-cpu".split())
def test_what_is_required_is_the_oldest_that_is_tested(package: str) -> None:
    """Up to the last number: 1.24 is what 1.24.0 is."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    required = set(re.findall(rf'"{package}>=([\d.]+)"', text))
    assert required == {floors()[package].rpartition(".")[0]} or required == {floors()[package]}


@pytest.mark.parametrize(
    ("name", "package"),
    [("PyTorch", "torch"), ("NumPy", "numpy"), ("Keras", "keras"), ("TensorFlow", "tensorflow")],
)
def test_the_documents_name_the_oldest_that_is_tested(name: str, package: str) -> None:
    text = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    (stated,) = re.findall(rf"^\| {name} \| ([\d.]+) and newer", text, re.MULTILINE)
    assert stated in (floors()[package], floors()[package].rpartition(".")[0])
