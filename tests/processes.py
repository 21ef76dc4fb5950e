"""Whatever could hang, crash or leave a mark runs in a process of its own, under a time limit."""

import cProfile
import os
import pstats
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LIMIT = 300  # seconds that a process may take: far more than it needs on a busy machine


def python(code: str, **env: str) -> str:
    """What `code` prints in a process of its own, which must end by itself and well."""
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            # A hanging grandchild would keep the pipes open. torchrun's are in sessions of their
            # own, and it ends them itself when asked to.
            os.killpg(process.pid, signal.SIGTERM)
            time.sleep(5)
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"still running after {LIMIT} s\n{out}\n{err}")
    assert process.returncode == 0, f"ended with {process.returncode}\n{out}\n{err}"
    return out


def calls_of_ours(call: Callable[[], Any]) -> int:
    """How many calls of the package's Python functions a warm call makes, as a profiler counts."""
    for _ in range(3):
        call()
    profile = cProfile.Profile(builtins=False)
    profile.enable()
    call()
    profile.disable()
    package = str(ROOT / "anycell")
    stats: Any = pstats.Stats(profile)
    return sum(row[1] for (file, *_), row in stats.stats.items() if file.startswith(package))
