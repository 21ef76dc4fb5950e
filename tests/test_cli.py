"""The command line: what it prints, and how it says no."""

import os
import re
import time
from pathlib import Path

import processes
import pytest

import anycell
from anycell import cells, cli, doctor, machine
from anycell.engines.cpu import isa, jit

OWN = """
from anycell import cell, sigmoid, tanh

@cell(gates="f g", state="h", params="a=1")
def Own(x, r, s, p):
    "Leaks, and learns how fast."
    f, g = x + r
    f = sigmoid(f)
    return f * s.h + (1 - f) * tanh(p.a * g)

_Draft = Own
NotACell = 1
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return str(path)


def says(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    try:
        status = cli.main(arguments)
    except SystemExit as leave:
        status = int(leave.code or 0)
    return status, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["benhc"], "invalid choice: 'benhc'"),
        (["bench", "--seconds", "soon"], "expected a positive number, got 'soon'"),
        (["bench", "--threads", "0"], "expected a positive number, got '0'"),
        (["bench", "--shapes", ","], "expected names separated by commas"),
        (["bench", "--sahpes", "sb3"], "unknown arguments: --sahpes sb3"),
        (["bench", "--shapes", "sb4"], "unknown shape 'sb4' (did you mean sb3?)"),
        (["bench", "--cells", "lstm"], "unknown cell 'lstm' (did you mean LSTM"),
        (["bench", "--peers", "torch"], "unknown 'torch' (did you mean torch"),
        (["bench", "--cell", "nowhere.py:Cell"], "there is no file nowhere.py"),
        (["bench", "--dtype", "int4"], "invalid choice: 'int4'"),
        (["bench", "--dtype", "int8", "--mode", "training"], "8 bits are for inference only"),
        (["bench", "--threads", "1025"], "--threads 1025: expected at most 1024"),
        (["bench", "--quick", "--out", f"{__file__}/out"], "/out cannot be used: Not a directory"),
        (["explain", "LSMT"], "did you mean LSTM"),
        (["explain", "LSTM", "--size", "Q=3"], "Q: given 3; expected no such argument"),
        (["explain", "LSTM", "--hidden", "9999999999"], "hidden_size: given 9999999999"),
        (
            ["explain", "LSTM", "64"],
            "64; a hidden size is --hidden 64\ntry: anycell explain --help",
        ),
        (["explain", "LSTM", "x"], "unknown arguments: x\ntry: anycell explain --help"),
        (["doctor", "64"], "unknown arguments: 64\ntry: anycell doctor --help"),
        (["explain", "--svg"], "--svg draws one cell"),
        (["explain", "LSTM", "--svg", "/nowhere/at.svg"], "--svg /nowhere/at.svg: No such file"),
        (["export", "model.py:net"], "the following arguments are required: --out"),
        (["export", "LSTM", "--out", "out"], "LSTM: expected path/to/file.py:NAME of a model"),
        (["export", "nowhere.py:net", "--out", "out"], "there is no file nowhere.py"),
        (["export", "nowhere.keras", "--out", "out"], "there is no file nowhere.keras"),
    ],
)
def test_errors_are_kind(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    status, error = says(arguments, capsys)
    assert status == 2
    assert message in error
    assert "Traceback" not in error and len(error.splitlines()) <= 2


def test_graphs_are_printed_or_written(
    own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.svg"
    assert cli.main(["explain", f"{own}:Own", "--svg", str(file)]) == 0
    assert not capsys.readouterr().out
    assert cli.main(["explain", f"{own}:Own", "--svg"]) == 0
    assert capsys.readouterr().out.strip() == file.read_text().strip()
    assert file.read_text().count("<text") > 20


def test_errors_about_a_cell_in_a_file(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They list cells, and nothing else that the file has."""
    for name, problem in [
        ("Owm", "defines no 'Owm' (did you mean Own?)"),
        ("NotACell", "NotACell: given a value of type int; expected a cell"),
        ("sigmoid", "sigmoid: given a value of type function; expected a cell"),
        ("", "expected the name of one of its cells"),
    ]:
        said = says(["explain", f"{own}:{name}"], capsys)[1]
        assert problem in said and said.endswith("; choose from: Own\n")
    assert "choose from: Own\n" in says(["bench", "--cell", own], capsys)[1]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = (", "x.py:1: '(' was never closed"),
        (
            "import anycell\nimport nowhere",
            "x.py:2: ModuleNotFoundError: No module named 'nowhere'",
        ),
        ("x = 1", "has no cell; expected a function under @anycell.cell"),
        (OWN.replace("return f * s.h", "return f * s.g"), "x.py:9: in cell Own"),
    ],
)
def test_a_file_that_does_not_run_is_told_without_a_traceback(
    text: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.py").write_text(text)
    status, said = says(["explain", str(tmp_path / "x.py")], capsys)
    assert status == 2 and problem in said and "Traceback" not in said


def test_explain(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("GRU", f"{own}:Own"):
        assert cli.main(["explain", name, "--hidden", "32"]) == 0
        assert name.rpartition(":")[2] in capsys.readouterr().out


def test_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "train.py", tmp_path / "out"
    file.write_text("from anycell.numpy import GRU\nnet = GRU(1, 4)\nepochs = 3\n")
    options = ["--out", str(out), "--name", "gru"]
    assert cli.main(["export", f"{file}:net", *options]) == 0
    assert capsys.readouterr().out.split()[1:] == [
        f"{out}/gru.c,", f"{out}/gru.h,", f"{out}/gru.hpp,", f"{out}/gru_test.c,",
        f"{out}/CMakeLists.txt",
    ]  # fmt: skip
    further = ["--target", "cortex-m4"], ["--weights", "bfloat16"]
    assert all(cli.main(["export", f"{file}:net", *options, *one]) == 0 for one in further)
    assert (out / "gru.o").read_bytes()[:4] == b"\x7fELF" and capsys.readouterr()
    assert "const uint16_t w0_0" in (out / "gru.c").read_text()
    for model, folder, problem in (
        (f"{file}:ney", out, "defines no 'ney' (did you mean net"),
        (f"{file}:epochs", out, "model: given int; expected a layer or model"),
        (f"{file}:net", file / "out", f"--out {file}/out cannot be used: Not a directory"),
    ):
        status, said = says(["export", model, "--out", str(folder)], capsys)
        assert status == 2 and problem in said and len(said.splitlines()) == 1


def test_explain_lists_cells(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", own]) == 0
    assert capsys.readouterr().out.split(maxsplit=1) == ["Own", "Leaks, and learns how fast.\n"]
    assert cli.main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == set(cells.__all__)
    assert all(len(line.split()) > 3 for line in lines)


def test_cache(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "kernels"
    monkeypatch.setenv("ANYCELL_CACHE_DIR", str(folder))

    def told(*arguments: str) -> str:
        assert cli.main(["cache", *arguments]) == 0
        return capsys.readouterr().out

    assert told("path") == f"{folder}\n"
    assert f"{folder}: 0 kernels, 0.0 MB\n" in told()
    assert told("clear") == f"{folder}: 0 kernels, 0.0 MB deleted\n"

    texts = [f"define i64 @probe() {{ ret i64 {number} }}" for number in range(3)]
    for text in texts:
        jit.compile(text, ["probe"], isa.current())
    (folder / "triton").mkdir()
    (folder / "triton" / f"lstm_{8 * 'ab'}.py").write_text("x")
    theirs = [folder / "notes.txt", folder / ("0" * 64), folder / "triton" / "mine.py"]
    for path in theirs:
        path.write_text("somebody's")
    assert re.match(rf"{re.escape(str(folder))}: 4 kernels, 0\.0 MB\nAt most 268 MB", told())
    assert told("clear").startswith(f"{folder}: 4 kernels, ")
    assert sorted(path for path in folder.rglob("*") if path.is_file()) == sorted(theirs)
    assert not jit.compile(texts[0], ["probe"], isa.current()).cached

    monkeypatch.setenv("ANYCELL_CACHE", "no")
    status, said = says(["cache"], capsys)
    assert status == 2 and "ANYCELL_CACHE='no': expected 0 or 1" in said
    monkeypatch.setenv("ANYCELL_CACHE", "0")
    assert "neither read" in told()
    folder.chmod(0o777)
    status, said = says(["cache", "clear"], capsys)
    assert status == 2 and "cannot be used: others can write it" in said


def test_the_demo_is_offered_where_it_works(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "demo" in cli.build_parser().format_help()
    called: list[list[str]] = []
    monkeypatch.setattr("subprocess.call", lambda command: called.append(command[1:]) or 0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert cli.main(["demo", "--quick"]) == 0
    assert called == [[str(processes.ROOT / "examples" / "demo.py"), "--quick"]]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "demo needs matplotlib" in says(["demo"], capsys)[1]
    monkeypatch.setattr(cli, "DEMO", tmp_path / "demo.py")  # as in an installed package
    assert "demo" not in cli.build_parser().format_help()
    assert "clone the repository" in says(["demo"], capsys)[1]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs sched_getaffinity")
def test_busy_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the cores that this process may use, what is neither idle nor waits for a disk."""
    stat = tmp_path / "stat"
    lines = "cpu  9 9 9 9\ncpu0 {} 0 0 {} 5 0 0 0 7 7\ncpu1 0 0 {} 3 0 0 0 1\ncpu9 {} 0 0 0\n"
    stat.write_text(lines.format(10, 20, 30, 40))
    later = lines.format(10 + 30, 20 + 70, 30 + 100, 999)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(time, "sleep", lambda _: stat.write_text(later))
    assert machine.busy_cores(0.1, str(stat)) == pytest.approx(1.3)
    assert machine.busy_cores(0.1, str(stat)) is None  # the clock has not moved
    assert machine.busy_cores(0.1, str(tmp_path / "none")) is None


def test_doctor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ANYCELL_CACHE_DIR", str(tmp_path / "kernels"))
    assert cli.main(["doctor"]) == 0
    healthy = capsys.readouterr().out
    assert str(tmp_path) in healthy and "fused LSTM" in healthy and "kernels for" in healthy
    assert re.search(r"large products, \d+ threads?: ours \d+, numpy's \d+", healthy)
    revision = machine.revision()
    told = f"{anycell.__version__}, revision {revision}," if revision else anycell.__version__
    assert f"anycell {told}" in healthy

    monkeypatch.setenv("ANYCELL_NUM_THREADS", "2")
    monkeypatch.setattr("anycell.doctor.usable_cores", lambda: 2)
    for busy, advised in ((0.1, False), (1.1, True), (None, False)):
        monkeypatch.setattr("anycell.doctor.busy_cores", lambda _, busy=busy: busy)
        findings = dict(map(reversed, doctor._threads()))
        assert [verdict for verdict in findings.values() if verdict == "note"] == ["note"] * advised
        assert any("ANYCELL_NUM_THREADS=1 does" in text for text in findings) == advised
        assert any(f"keeps {busy} of 2" in text for text in findings) == (busy is not None)

    monkeypatch.setattr("anycell.doctor._seconds", lambda _: 1e-3)  # told above
    (tmp_path / "kernels").chmod(0o777)  # anybody could put code there
    assert cli.main(["doctor"]) == 0
    assert "others can write it" in capsys.readouterr().out

    monkeypatch.setattr("anycell.doctor.LIMIT", 0.0)
    assert cli.main(["doctor"]) == 1
