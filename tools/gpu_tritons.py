"""Checks the GPU engine under every Triton: compiles some kernels of each kind, interprets tests.

    make test-tritons                      installs all versions, and runs this
    python tools/gpu_tritons.py            the installed versions, and the environment's own
    python tools/gpu_tritons.py 3.6.0      these versions

Each version is a directory of ``.venv-tritons``, named after it, which precedes the environment's
packages.
"""

import os
import subprocess
import sys
from importlib import metadata

import gpu_compile
from gpu_lines import ROOT, arguments

from anycell.engines.gpu import build

INSTALLED = ROOT / ".venv-tritons"
# The tests in the interpreter: results of all tiers, programs that wait for one another, random
# masks, inner matmuls. Until 3.6, the interpreter converts arrays of one element in a way that
# NumPy 2 deprecates.
WARNING = "ignore:Conversion of an array with ndim:DeprecationWarning"
FILES = "tests/engines/test_gpu.py", "tests/engines/test_gpu_inner.py"
TESTS = "test_plainly or test_programs_wait or test_engines_draw or test_masks_on_the"


def main() -> int:
    """Prints the compiler's reports; returns 1 if no form of a kernel fits, or a test fails."""
    here = sorted((path.name for path in INSTALLED.glob("*.*")), key=build.release)
    own = metadata.version("triton")
    parser = arguments(__doc__)
    parser.add_argument("versions", nargs="*", default=[*here, own], metavar="VERSION")
    parser.add_argument("--capabilities", nargs="+", default=["80", "90"])
    parser.add_argument("--cells", nargs="+", default=gpu_compile.FEW)
    parser.add_argument("--jobs", default="2")
    args = parser.parse_args()
    failed = []
    for version in args.versions:
        if version not in (*here, own):
            parser.error(f"Triton {version} is not in {INSTALLED}; make test-tritons installs it")
        kernels = [
            "tools/gpu_compile.py", "--jobs", args.jobs,
            "--cells", *args.cells, "--capabilities", *args.capabilities,
        ]  # fmt: skip
        tests = ["-m", "pytest", "-q", "-n", "0", "-W", WARNING]
        tests += [*FILES, "-k", TESTS]
        for what, command in (("kernels", kernels), ("tests", tests)):
            print(f"== Triton {version}: {what}", flush=True)
            environment = under(version, interpreted=what == "tests")
            if subprocess.run([sys.executable, *command], cwd=ROOT, env=environment).returncode:
                failed.append(f"Triton {version}: {what}")
    for what in failed:
        print(f"failed: {what}", file=sys.stderr)
    return int(bool(failed))


def under(version: str, interpreted: bool = False) -> dict[str, str]:
    """The environment of a process that finds this Triton, or else the installed one."""
    values = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    values["PYTHONPATH"] = os.pathsep.join([str(INSTALLED / version), str(ROOT)])
    return values | ({"TRITON_INTERPRET": "1"} if interpreted else {})


if __name__ == "__main__":
    sys.exit(main())
