"""What type checkers and editors see: users' lines, right and wrong; the members of modules."""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT, load

import anycell

LINES = ROOT / "tests" / "helpers" / "users_lines.py"
FRONTENDS = [
    "torch", "numpy", "jax.nnx", "jax.equinox",
    *(pytest.param(name, marks=pytest.mark.more) for name in ("jax", "keras")),
]  # fmt: skip
FRAMEWORKS = {"jax.nnx": "flax", "jax.equinox": "equinox"}


def mypy(folder: Path) -> set[int]:
    pytest.importorskip("mypy")
    options = ["--config-file=", "--follow-imports=silent", "--cache-dir", str(folder / "cache")]
    said = run("mypy", *options, "--no-error-summary", str(LINES), folder=folder)
    errors = [line.split(":") for line in said.splitlines() if ": error:" in line]
    assert {Path(file).name for file, *_ in errors} <= {LINES.name}, said
    return {int(line) for _, line, *_ in errors}


def pyright(folder: Path) -> set[int]:
    pytest.importorskip("pyright")
    if shutil.which("node") is None:
        pytest.skip("pyright needs Node.js, which is not installed")
    shutil.copy(LINES, folder)
    settings = {"typeCheckingMode": "standard", "extraPaths": [str(ROOT)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    options = ["--outputjson", "--pythonpath", sys.executable, "--project", str(folder)]
    found = json.loads(run("pyright", *options, folder=folder))["generalDiagnostics"]
    return {d["range"]["start"]["line"] + 1 for d in found if d["severity"] == "error"}


def run(checker: str, *options: str, folder: Path) -> str:
    command = [sys.executable, "-m", checker, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("checker", [pyright, mypy])
@pytest.mark.slow
def test_users_lines(checker, tmp_path: Path) -> None:
    """Each line that is wrong has an error, and no other line."""
    pytest.importorskip("torch")
    text = LINES.read_text(encoding="utf-8").splitlines()
    wrong = {number for number, line in enumerate(text, 1) if line.endswith("# wrong")}
    assert len(wrong) > 20 and checker(tmp_path) == wrong


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_members_are_listed(frontend: str) -> None:
    """``dir`` has the public names and nothing else; each cell has a layer."""
    pytest.importorskip(FRAMEWORKS.get(frontend, frontend))
    module = importlib.import_module(f"anycell.{frontend}")
    assert dir(module) == sorted(set(module.__all__))
    assert set(anycell.cells.__all__) <= set(dir(module))


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_stubs_are_those_of_the_cells(frontend: str) -> None:
    pytest.importorskip(FRAMEWORKS.get(frontend, frontend))
    path = ROOT / "anycell" / frontend.replace(".", "/") / "named.pyi"
    text = path.read_text(encoding="utf-8")
    assert text == load("tools/stubs.py").stub(frontend), "make format writes it anew"
