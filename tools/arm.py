"""Tests on an emulated 64-bit ARM: `make test-arm`, or `python tools/arm.py tests/numpy`.

QEMU emulates one process, whose system calls reach the host's Linux. `out/arm` holds Debian's
Python for ARM and its wheels from PyPI; nothing is installed.

Emulated, LLVM takes ten times as long. So the host's LLVM compiles the kernels of the tests, with
the same release of llvmlite; processes that tests start compile their own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE / "out" / "arm"
PACKAGES = ROOT / "packages"  # wheels
PYTHON = ROOT / "usr" / "bin" / "python"  # emulates the Python next to it, also for subprocesses
COMPILER = "ANYCELL_TEST_ARM_COMPILER"  # the host's Python, within the emulation

# The layers of NumPy, of PyTorch, and of Keras on TensorFlow, without tests that take minutes; and
# tests of ARM's instructions. Other files may be named on the command line, but not all of their
# tests are known to pass here, and some need a newer PyTorch.
OF_ENGINE = (
    *("runtime.py::test_no_machine_runs_what_another_kind_of_processor_has", "math.py::test_dot"),
    *("math.py::test_dot_of_pairs", "matmul.py::test_sizes_and_layouts"),
)
TESTS = ["-q", "-k", "not slopes and not two_derivatives and not jacobian"]
TESTS += [f"tests/{frontend}/test_layers.py" for frontend in ("numpy", "torch")]
TESTS += ["tests/keras/test_tensorflow.py", *(f"tests/engines/test_cpu_{t}" for t in OF_ENGINE)]
TESTS += ["-m", "not slow and not more and not gpu"]


# ------------------------------------------------------------------------------------------- set up


def set_up() -> None:
    """Fetches Python and its libraries for ARM from the system's Debian, the wheels from PyPI."""
    for program, package in (("qemu-aarch64", "qemu-user"), ("apt-get", "apt"), ("dpkg", "dpkg")):
        if shutil.which(program) is None:
            sys.exit(
                f"{program}: not found; expected on Debian. Instead: apt-get install {package}."
            )
    state = ROOT / "apt"
    (state / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    (state / "cache" / "archives" / "partial").mkdir(parents=True, exist_ok=True)
    (state / "status").touch()  # nothing is installed
    options = {
        **{"APT::Architecture": "arm64", "APT::Architectures": "arm64", "Debug::NoLocking": "1"},
        **{"Dir::State::lists": state / "lists", "Dir::State::status": state / "status"},
        **{"Dir::Cache": state / "cache", "APT::Keep-Downloaded-Packages": "1"},
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    _run(*apt, "update")
    packages = "--no-install-recommends --download-only install python3.11 libstdc++6"
    _run(*apt, "-y", *packages.split())
    for archive in sorted((state / "cache" / "archives").glob("*.deb")):
        _run("dpkg", "-x", archive, ROOT)
    PYTHON.write_text(
        f'#!/bin/sh\nexec qemu-aarch64 -L "{ROOT}" -cpu "${{ARM_CPU:-max}}" -0 "$0" "$0"3.11 "$@"\n'
    )
    PYTHON.chmod(0o755)
    # The host's pip runs emulated, because PyTorch's dependencies depend on the machine.
    how = "--quiet --disable-pip-version-check --no-compile --upgrade --only-binary=:all:"
    pip: list[Any] = ["env", f"PYTHONPATH={sysconfig.get_path('purelib')}", PYTHON, "-m", "pip"]
    pip += ["install", *how.split(), "--target", PACKAGES]
    _run(*pip, "-r", HERE / "requirements" / "arm.txt")


def _run(*command: Any) -> None:
    subprocess.run([str(word) for word in command], check=True)


# --------------------------------------------------------------------------------------------- run


def test(arguments: Sequence[str]) -> int:
    environment = {
        **os.environ,
        **{"PYTHONPATH": f"{HERE}:{HERE / 'tools'}:{PACKAGES}", COMPILER: sys.executable},
        "ANYCELL_CACHE_DIR": str(ROOT / "kernels"),
        # With OpenBLAS's own choice for `-cpu max`, a float32 QR was wrong under QEMU 7.2.
        "OPENBLAS_CORETYPE": "ARMV8",
    }
    pytest = [PYTHON, "-m", "pytest", "-p", "arm", "-p", "no:cacheprovider", *arguments]
    return subprocess.run([str(word) for word in pytest], cwd=HERE, env=environment).returncode


# ----------------------------------------------------------------------------------------- compile


def compile_on_host() -> None:
    """Replaces a step of the JIT, within the emulation, by a call of the host's LLVM."""
    from anycell.engines.cpu import isa, jit

    def compiled(text: str, symbols: Sequence[str], target: Any) -> bytes:
        cpu, features, _ = isa.machine(target)
        command = [os.environ[COMPILER], __file__, "--compile", cpu, features]
        # The environment is empty, because its paths lead to wheels for ARM.
        done = subprocess.run(command, input=text.encode(), env={}, capture_output=True)
        if done.returncode:
            return emulated(text, symbols, target)  # for its error
        return done.stdout

    emulated, jit.object_code = jit.object_code, compiled


def compile_here(cpu: str, features: str) -> None:
    sys.path.insert(0, str(HERE))
    import llvmlite.binding as llvm

    from anycell.engines.cpu import jit

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple("aarch64-unknown-linux-gnu").create_target_machine(
        cpu=cpu, features=features, opt=3, reloc="pic", codemodel="small"
    )
    module = jit.optimised(sys.stdin.read(), machine)
    sys.stdout.buffer.write(machine.emit_object(module))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--set-up"]:
            set_up()
        case ["--compile", cpu, features]:
            compile_here(cpu, features)
        case arguments:
            sys.exit(test(arguments or TESTS))
elif COMPILER in os.environ:
    compile_on_host()
