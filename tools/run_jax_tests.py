"""Runs JAX's own tests of ``lax.scan`` with ``anycell.jax.scan`` in its place.

    python tools/run_jax_tests.py JAX [pytest arguments]

JAX is a checkout of jax-ml/jax, at the tag of the installed version: JAX's source distribution has
no tests. Nothing is fetched, and none of JAX's code is here: its file is collected in place, after
``jax.lax.scan`` is replaced; only anycell itself still calls JAX's. All tests run whose names or
code mention scan, but for `EXCLUDED`. An unexpected exception of our reader fails a test, where
users would get ``lax.scan``. Floats have 64 bits, in which JAX's tests can tell a wrong derivative
from rounding (docs/compatibility.md); ``JAX_ENABLE_X64=0`` takes 32.
"""

import inspect
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("JAX_ENABLE_X64", "1")

import jax
import pytest

import anycell.jax
from anycell.jax import composite, read, scanning

FILE = "tests/lax_control_flow_test.py"
# Reasons by the end of a test's name.
EXCLUDED = {
    "::test_scan_typecheck_param": "edits parameters of lax.scan's primitive, found in a program",
    "::test_scan_unroll": "a program grows if lax.scan unrolls it; a kernel has nothing to unroll",
}


class Substitute:
    """Replaces ``jax.lax.scan``, selects tests of it, and counts the bodies that were read."""

    def __init__(self) -> None:
        self.calls = self.fused = 0
        lax = SimpleNamespace(**vars(jax.lax))
        scanning.jax = read.jax = SimpleNamespace(**{**vars(jax), "lax": lax})
        composite.lax, scanning.STRICT = lax, True
        jax.lax.scan = anycell.jax.scan
        body = scanning.Traced.body

        def counted(traced: scanning.Traced) -> Any:
            result = body(traced)
            self.calls += 1
            self.fused += not isinstance(result, str)
            return result

        scanning.Traced.body = counted

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        others = [
            item for item in items if "scan" not in item.name + inspect.getsource(item.function)
        ]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
        for item in items:
            for name, reason in EXCLUDED.items():
                if item.nodeid.endswith(name):
                    item.add_marker(pytest.mark.skip(reason=reason))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(f"{self.calls} calls of scan, {self.fused} of them fused")


def main(arguments: list[str]) -> int:
    file = Path(arguments[0] if arguments else "").resolve() / FILE
    if not file.is_file():
        print(f"{__doc__}\n{file} is not there: give a checkout of jax-ml/jax.")
        return 2
    options = ["-q", "-rfEs", "-c", "/dev/null", "-p", "no:cacheprovider"]
    options += ["--rootdir", str(file.parent), "--import-mode=importlib", str(file)]
    return int(pytest.main([*options, *arguments[1:]], plugins=[Substitute()]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
