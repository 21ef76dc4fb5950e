"""What differs between the Tritons that PyTorch brings, as far as one of them can show it; whether
one is usable, in words; and the tools that compile kernels with all of them (`make test-tritons`).
"""

import ctypes
import os
import re
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu import (  # before anything else that may import Triton
    ADDRESSES,
    CARD,
    COMPILES,
    by_gpu,
    choose_gpu,
    reports,
)
from problems import assert_right, random_problem
from processes import ROOT, load, python

import anycell
from anycell import cells
from anycell.engines.gpu import build, launch
from anycell.engines.gpu.refusals import Refused
from anycell.engines.gpu.step import print_step
from anycell.engines.gpu.text import Printed, Variant
from anycell.plan import Plan, plan
from anycell.torch.operators import functional


@pytest.fixture(scope="module")
def kernel() -> Printed:
    """Of tier 3."""
    step = print_step(plan(cells.LSTM, 8, "float32", "gpu"), Variant(biases=(True,)))
    return step.stages[0].kernels[0]


# -- arguments that Triton adds --------------------------------------------------------------------
def compiler(kernel: Printed, more: int, **metadata: int) -> Any:
    """What stands in for ``triton.compile``: a kernel that takes so many arguments more."""
    count = len(kernel.arguments) + more
    parameters = ",\n".join(f"\t.param .u64 .ptr .global .align 1 p_{n}" for n in range(count))
    text = f".visible .entry {kernel.name}(\n{parameters}\n)\n{{\n ld.param.b64 %rd1, [p_0];\n}}"
    sizes = {"name": kernel.name, "shared": 0, "num_warps": 4, "global_scratch_size": 0}
    made = SimpleNamespace(
        metadata=SimpleNamespace(**sizes | metadata), asm={"ptx": text, "cubin": b"code"}
    )
    return lambda *_, **__: made


@pytest.fixture
def compile_as(kernel: Printed, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has Triton compile as another version does."""
    import triton

    monkeypatch.setenv("ANYCELL_CACHE", "0")

    def change(more: int, **metadata: int) -> None:
        monkeypatch.setattr(triton, "compile", compiler(kernel, more, **metadata))
        build.binary.cache_clear()

    yield change
    build.binary.cache_clear()


@pytest.mark.parametrize("hidden", [0, 1, 2])
def test_hidden_arguments_are_counted(kernel: Printed, compile_as: Any, hidden: int) -> None:
    """Triton 3.3 and 3.4 add one and know no memory of a profiler; later ones add two."""
    compile_as(hidden)
    assert build.binary(kernel, 90).hidden == hidden
    compile_as(hidden, profile_scratch_size=0)
    assert build.binary(kernel, 90).hidden == hidden


@pytest.mark.parametrize("hidden", [-1, 3])
def test_other_hidden_arguments_are_refused(kernel: Printed, compile_as: Any, hidden: int) -> None:
    compile_as(hidden)
    ours = len(kernel.arguments)
    expected = f"takes {ours + hidden} arguments; expected its {ours} and at most 2 of Triton's own"
    with pytest.raises(Refused, match=expected):
        build.binary(kernel, 90)


@pytest.mark.parametrize("name", ["global_scratch_size", "profile_scratch_size"])
def test_scratch_memory_is_refused(kernel: Printed, compile_as: Any, name: str) -> None:
    compile_as(2, **{name: 128})
    with pytest.raises(Refused, match="wants scratch memory"):
        build.binary(kernel, 90)


@pytest.mark.parametrize("hidden", [0, 1, 2])
def test_a_launch_passes_them(
    kernel: Printed, monkeypatch: pytest.MonkeyPatch, hidden: int
) -> None:
    """Null pointers, after the kernel's own arguments."""
    passed: list[list[int]] = []

    def launched(*arguments: Any) -> int:
        parameters = arguments[-2]
        passed.append([ctypes.c_int64.from_address(p).value for p in parameters[-3:]])
        assert len(parameters) == len(kernel.arguments) + hidden
        return 0

    binary = build.Binary(kernel.name, b"", "", 0, 4, hidden, 0)
    monkeypatch.setattr(build, "interpreted", lambda: False)
    monkeypatch.setattr(launch, "use_context", lambda device: None)
    monkeypatch.setattr(launch, "loaded", lambda *_: launch.Loaded(binary, 1))
    monkeypatch.setattr(launch, "driver", lambda: SimpleNamespace(cuLaunchKernel=launched))
    numbers = {name: n << 40 for n, (name, kind) in enumerate(kernel.arguments) if kind != "i32"}
    wide = [name for name, kind in kernel.arguments[-3:] if kind != "i32"]
    assert len(wide) == 3  # all of 64 bits, so that they can be read back alike
    launch.Launch(kernel, numbers, (1, 1), ADDRESSES)(0)
    own = [numbers[name] for name in wide[hidden:]]
    assert passed == [own + [0] * hidden]


def test_a_refusal_says_what_is_wrong(kernel: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cause, and not the mark under the place where it is."""
    import triton

    def fails(*_: Any, **__: Any) -> Any:
        try:
            raise ValueError("at 10:28:\n    f(x)\n      ^\nthere is no f\n  ^\n")
        except ValueError as error:
            raise RuntimeError("at 1:2:\n    g(x)\n    ^") from error

    def silent(*_: Any, **__: Any) -> Any:
        raise AssertionError

    monkeypatch.setenv("ANYCELL_CACHE", "0")
    build.binary.cache_clear()
    for compile_, said in ((fails, "there is no f"), (silent, "AssertionError")):
        monkeypatch.setattr(triton, "compile", compile_)
        with pytest.raises(Refused, match=f"does not compile it for sm_90: {said}"):
            build.binary(kernel, 90)


# -- registers -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("registers", "spills", "form", "asked"),
    [
        (128, 24, {"alone": True}, [None, 255]),  # room for two programs: told that there is one
        (255, 584, {"alone": True}, [None]),  # no other result to come
        (128, 0, {"alone": True}, [None]),
        (128, 24, {}, [None]),
        (255, 24, {"alone": True, "cooperative": True}, [255, None]),
        (255, 0, {"alone": True, "cooperative": True}, [255]),
    ],
)
def test_when_a_kernel_is_compiled_once_more(
    kernel: Printed,
    compile_as: Any,
    monkeypatch: pytest.MonkeyPatch,
    registers: int,
    spills: int,
    form: dict[str, bool],
    asked: list[int | None],
) -> None:
    """Where it spills though registers are left."""
    compile_as(2)
    made, limits = build._made, list[int | None]()

    def recorded(printed: Any, capability: int, aligned: Any, limit: int | None) -> Any:
        limits.append(limit)
        return made(printed, capability, aligned, limit)

    monkeypatch.setattr(build, "_made", recorded)
    monkeypatch.setattr(build, "usage", lambda cubin: {"REG": registers, "STACK": spills})
    binary = build.binary(kernel._replace(**form), 90)
    assert limits == asked and binary.spilled == spills * form.get("alone", False)


# -- the interpreter -------------------------------------------------------------------------------
def test_who_interprets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own answer; that of 3.3, which has none, is in the variable."""
    import triton

    assert build.interpreted() is not CARD
    for value in (True, False):
        monkeypatch.setattr(
            triton, "knobs", SimpleNamespace(runtime=SimpleNamespace(interpret=value))
        )
        assert build.interpreted() is value
    monkeypatch.delattr(triton, "knobs")
    for value in ("1", "0"):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        assert build.interpreted() is (value == "1")
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not build.interpreted()


@pytest.mark.skipif(CARD, reason="a card interprets nothing")
def test_types_of_arguments_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.3 makes them of a name alone."""
    import triton.language as tl

    newer, rng = tl.str_to_ty, np.random.default_rng(0)
    small = random_problem(cells.RNN, (2, 2, 3), rng, "float32")

    def older(name: str) -> Any:
        with monkeypatch.context() as inside:  # it calls itself
            inside.setattr(tl, "str_to_ty", newer)
            return newer(name, None)

    monkeypatch.setattr(tl, "str_to_ty", older)
    assert_right(by_gpu(small, tier=1), small)


# -- whether Triton is usable ----------------------------------------------------------------------
UNUSABLE = "from anycell.engines.gpu import build; print(build.unusable())"


@pytest.mark.parametrize(
    ("package", "expected"),
    [
        (None, "the GPU engine needs Triton, which is not installed; pip install '.[gpu]'"),
        ("__version__ = '3.2.0'", "the GPU engine needs Triton 3.3 or newer; this is Triton 3.2.0"),
        ("__version__ = '2.3.1+git'", "needs Triton 3.3 or newer; this is Triton 2.3.1+git"),
        ("", "needs Triton 3.3 or newer; this is Triton of an unknown version"),
        ("__version__ = '4.0.0'", "Triton compiles no kernel of the GPU engine: "),
        # A version that no other test names: the cache may have what that one compiled.
        ("__version__ = '3.8.7'\nimport triton.missing", "ModuleNotFoundError: No module named"),
        ("__version__ = '3.10.0'", "; this is Triton 3.10.0"),
    ],
)
def test_another_triton(package: str | None, expected: str, tmp_path: Path) -> None:
    """A reason, whatever is wrong with it, and never an exception; what one Triton has compiled
    another does not run.
    """
    code = UNUSABLE
    if package is None:
        code = f"import sys; sys.modules['triton'] = None; {code}"
    else:
        (tmp_path / "triton").mkdir()
        (tmp_path / "triton" / "__init__.py").write_text(package + "\n")
    said = python(code, paths=[tmp_path], **COMPILES).strip()
    assert expected in said and "\n" not in said


COMPILE = """
    import sys, os
    from anycell import cells
    from anycell.engines.gpu import build
    from anycell.engines.gpu.refusals import Refused
    from anycell.engines.gpu.step import print_step
    from anycell.engines.gpu.text import Variant
    from anycell.plan import plan

    step = print_step(plan(cells.LSTM, 8, "float32", "gpu"), Variant(biases=(True,)))
    kernel = step.stages[0].kernels[0]
"""


@pytest.mark.slow
def test_processes_share_a_cubin(tmp_path: Path) -> None:
    """Whatever the seeds of their hashes, in which sets of names are ordered; the second imports no
    Triton.
    """
    code = (
        COMPILE
        + """
    aligned = frozenset(name for name, kind in kernel.arguments if kind != "i32")
    print(len(build.binary(kernel, 90, aligned).cubin), "triton" in sys.modules)
    """
    )
    env = {"ANYCELL_CACHE_DIR": str(tmp_path), **COMPILES}
    first, *others = (python(code, PYTHONHASHSEED=seed, **env).split() for seed in "123")
    assert first[1] == "True" and others == [[first[0], "False"]] * 2


@pytest.mark.slow
def test_a_child_compiles_beside_tensorflow(tmp_path: Path) -> None:
    """Triton would end a process that has TensorFlow's LLVM."""
    pytest.importorskip("tensorflow")
    code = (
        "import tensorflow\n"
        + textwrap.dedent(COMPILE)
        + textwrap.dedent("""
        print(build.unusable(), len(build.binary(kernel, 90).cubin) > 1000)
        try:
            build.binary(kernel._replace(source=kernel.source.replace("tl.store", "f")), 90)
        except Refused as refused:
            print(refused)
        sys.executable = "/bin/false"
        try:
            build.binary(kernel, 80)
        except Refused as refused:
            print(refused)
        os.environ["TRITON_INTERPRET"] = "1"
        print(build.unusable.__wrapped__(), "triton" in sys.modules)
    """)
    )
    usable, error, died, interpreter = python(
        code, ANYCELL_CACHE_DIR=str(tmp_path), **COMPILES
    ).splitlines()
    assert usable == "None True"
    assert "does not compile it for sm_90: " in error and "f" in error
    assert died.endswith("the process that compiles ended with 1: it said nothing.")
    assert "import triton before tensorflow" in interpreter and interpreter.endswith(" False")


@pytest.mark.slow
def test_triton_is_imported_when_a_layer_on_a_card_asks(tmp_path: Path) -> None:
    """And this one is usable, which a kernel shows; a later process finds that kernel on disk."""
    code = """
        import sys
        from types import SimpleNamespace
        import torch, anycell
        from anycell.torch.operators import functional
        layer = anycell.torch.RNN(anycell.cells.PeepholeLSTM, 2, 3)
        layer(torch.zeros(2, 1, 2))
        print(layer.engine.name, "triton" in sys.modules)
        card = SimpleNamespace(device=SimpleNamespace(type="cuda"), dtype=torch.float32)
        plan = functional.fused_plan(anycell.cells.PeepholeLSTM, (("H", 3),), card)
        print(getattr(plan, "engine", plan), "triton" in sys.modules)
    """
    env = {"ANYCELL_CACHE_DIR": str(tmp_path), **COMPILES}
    imported = [python(code, **env).splitlines() for _ in range(2)]
    assert imported == [["cpu False", "gpu True"], ["cpu False", "gpu False"]]


def test_a_layer_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step by step, and the reason; asked again, the kernels."""
    import torch

    weight = SimpleNamespace(device=SimpleNamespace(type="cuda"), dtype=torch.float32)
    monkeypatch.setattr(build, "unusable", lambda: "there is none")
    assert functional.fused_plan(cells.LSTM, (("H", 8),), weight) == "there is none"
    assert isinstance(
        functional.fused_plan(cells.LSTM, (("H", 8),), torch.zeros(1)), Plan
    )  # on the CPU
    choose_gpu(monkeypatch)
    layer = anycell.torch.RNN(cells.PeepholeLSTM, 2, 3)
    assert layer.engine == ("reference", "there is none")
    y, _ = layer(torch.zeros(2, 1, 2))
    assert y.shape == (2, 1, 3)
    monkeypatch.setattr(build, "unusable", lambda: None)
    assert layer.engine.name == "gpu"


# -- the tools -------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def gpu_compile() -> Any:
    return load("tools/gpu_compile.py")


@pytest.fixture(scope="module")
def gpu_tritons(gpu_compile: Any) -> Any:
    return load("tools/gpu_tritons.py")


def test_the_grid_is_for_cards_that_the_model_knows(gpu_compile: Any) -> None:
    """The smallest of each capability; every point of the grid has kernels of tier 3."""
    assert set(gpu_compile.GRID) == {75, 80, 90, 100, 120}
    for capability, card in gpu_compile.CARDS.items():
        assert card.capability == capability
        forms = list(gpu_compile.kernels(3, capability, "float32", "LSTM", 1, 1))
        assert {form[0][1].kernel for form in forms} >= {"forward_step_0_H", "backward_step_0_H"}
        assert {form[0][1].limit for form in forms} == {card.shared}


def test_the_largest_size_that_the_model_allows(gpu_compile: Any) -> None:
    def sizes(tier: int, largest: int) -> set[int]:
        forms = gpu_compile.kernels(tier, 90, "bfloat16", "LSTM", largest, 1)
        return {form[0][1].hidden for form in forms}

    assert sizes(1, 1 << 20) == {128} and sizes(1, 64) == {64}
    assert max(sizes(2, 1 << 20)) > 1024 and sizes(2, 512) <= {512, 384, 256}


def test_the_next_choice_where_one_does_not_fit(
    gpu_compile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = next(gpu_compile.kernels(2, 90, "bfloat16", "LSTM", 512, 3))
    assert len(forms) == 3
    seen = []

    def compiled(kernel: Any, report: Any) -> Any:
        seen.append(report.choice)
        return report._replace(fits=report.choice == forms[1][1].choice)

    monkeypatch.setattr(gpu_compile, "compiled", compiled)
    reports = gpu_compile.first_that_fits(forms)
    assert seen == [0, forms[1][1].choice] and [r.fits for r in reports] == [False, True]
    one = next(gpu_compile.kernels(2, 90, "bfloat16", "LSTM", 512, 1))
    assert len(one) == 1  # no more choices than asked for


def test_a_kernel_that_fails_is_reported(gpu_compile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence says what fails, and what is beyond the limits."""
    ((kernel, report), *_), *_ = gpu_compile.kernels(3, 90, "float32", "LSTM", 1, 1)

    def fails(*_: Any) -> Any:
        raise RuntimeError("out of\nluck")

    def spills(*_: Any) -> Any:
        return build.Binary("k", b"", "wgmma", 1 << 20, 4, 2, 0)

    monkeypatch.setattr(build, "usage", lambda cubin: {"REG": 255, "STACK": 72})
    monkeypatch.setattr(build, "binary", fails)
    failed = gpu_compile.compiled(kernel, report)
    assert failed.error == "RuntimeError: out of luck" and not failed.fits
    monkeypatch.setattr(build, "binary", spills)
    large = gpu_compile.compiled(kernel, report)._replace(cell="GRU")
    assert (large.registers, large.spilled, large.matrices, large.fits) == (255, 72, "wgmma", False)
    assert gpu_compile.sentence(failed).endswith("FAILS, RuntimeError: out of luck")
    said = gpu_compile.sentence(large)
    assert "72 of 64 bytes spilled, shared 1,048,576 of 232,448" in said and "NOT FIT" in said


@pytest.mark.slow
def test_a_kernel_under_this_triton() -> None:
    """For real, in a process of its own."""
    arguments = ["--cells", "RNN", "--tiers", "3", "--dtypes", "float32", "--capabilities", "80"]
    found = reports(*arguments)
    assert {r["kernel"].partition("_")[0] for r in found} == {"forward", "backward"}
    for r in found:
        assert r["fits"] and not r["error"]
        assert 0 < r["registers"] < 255 and r["hidden_arguments"] == 2


def pins(file: str) -> list[tuple[int, ...]]:
    text = (ROOT / "requirements" / file).read_text()
    return [tuple(map(int, v.split("."))) for v in re.findall(r"^triton==([\d.]+)", text, re.M)]


def test_every_triton_is_pinned(gpu_tritons: Any) -> None:
    """One of each release from the oldest to that of the environment; each is another directory."""
    both = pins("tritons.txt") + pins("dev.txt")
    assert [v[:2] for v in both] == [(3, minor) for minor in range(3, 10)]
    assert both[0][:2] == build.OLDEST
    environment = gpu_tritons.under("3.6.0")
    first, second = environment["PYTHONPATH"].split(os.pathsep)
    assert first == str(ROOT / ".venv-tritons" / "3.6.0") and second == str(ROOT)
    assert "TRITON_INTERPRET" not in environment
    assert gpu_tritons.under("3.6.0", interpreted=True)["TRITON_INTERPRET"] == "1"


def test_the_tools_run_under_each(
    gpu_tritons: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Kernels and tests under every one; a failure is said, and the others still run."""
    ran = []

    def run(command: list[str], env: dict[str, str], **_: Any) -> Any:
        ran.append((env["PYTHONPATH"].split(os.pathsep)[0].rpartition("/")[2], "pytest" in command))
        return SimpleNamespace(returncode=int(ran[-1] == ("3.3.1", True)))

    for version in ("3.10.0", "3.3.1"):
        (tmp_path / version).mkdir()
    monkeypatch.setattr(gpu_tritons, "INSTALLED", tmp_path)
    monkeypatch.setattr(gpu_tritons.subprocess, "run", run)
    monkeypatch.setattr(gpu_tritons.metadata, "version", lambda name: "3.9.0")
    monkeypatch.setattr(sys, "argv", ["x"])
    assert gpu_tritons.main() == 1
    assert ran == [(v, t) for v in ("3.3.1", "3.10.0", "3.9.0") for t in (False, True)]
    assert capsys.readouterr().err.strip() == "failed: Triton 3.3.1: tests"
    monkeypatch.setattr(sys, "argv", ["x", "3.9.0"])
    assert gpu_tritons.main() == 0
    monkeypatch.setattr(sys, "argv", ["x", "3.5.1"])
    with pytest.raises(SystemExit):
        gpu_tritons.main()
    assert "Triton 3.5.1 is not in" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
@pytest.mark.parametrize("capability", [75, 120])
def test_older_and_newer_cards(capability: int, cell: str) -> None:
    """64 KiB and 99 KiB of shared memory suffice for what the model chooses there."""
    found = reports("--cells", cell, "--capabilities", str(capability))
    assert {r["dtype"] for r in found} == {"float32", "bfloat16"}
    assert {r["limit"] for r in found} == {{75: 64 << 10, 120: 99 << 10}[capability]}
    assert {1, 3} <= {r["tier"] for r in found if r["fits"] and r["shared"] <= r["limit"]}


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.6.0", "3.3.1"])
def test_another_triton_compiles(version: str) -> None:
    """That of the first card to be met, and the oldest, where they are installed."""
    directory = ROOT / ".venv-tritons" / version
    if not (directory / "triton").is_dir():
        pytest.skip(f"no Triton {version} in {directory}; make test-tritons installs it")
    code = f"import triton; print(triton.__version__); {UNUSABLE}"
    assert python(code, paths=[directory], **COMPILES).splitlines() == [version, "None"]
    sample = ["--cells", "LSTM", "--dtypes", "bfloat16", "--capabilities", "90"]
    found = reports(*sample, "--largest", "512", paths=[directory])
    assert "forward_cooperative" in {r["kernel"] for r in found}
