"""Runs code that could hang, crash or leave traces in a process of its own, with a time limit."""

import cProfile
import importlib.util
import os
import pstats
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 300  # seconds: far more than processes need on a busy machine, but for compilers


def python(code: str, *arguments: str, **how: Any) -> str:
    """Runs `code` in a new process, which must succeed, and returns what it prints."""
    return run("-c", textwrap.dedent(code), *arguments, **how)


def run(
    *arguments: str,
    status: int = 0,
    quiet: bool = False,
    limit: float = LIMIT,
    cwd: Path = ROOT,
    paths: Sequence[Path] = (),
    **env: str | None,
) -> str:
    """Runs Python with these arguments and returns its standard output; if the expected ``status``
    is not 0, followed by its standard error.

    Args:
        quiet: asserts that nothing goes to standard error.
        limit: seconds after which it is ended, and the test fails.
        paths: directories before all others on PYTHONPATH; the checkout, its tests and this
            process's own PYTHONPATH follow, which may name another Triton.
        env: further variables of the environment; None unsets one.
    """
    found = filter(None, [os.environ.get("PYTHONPATH")])
    here = os.pathsep.join([*map(str, (*paths, ROOT, ROOT / "tests" / "helpers")), *found])
    variables = {**os.environ, "PYTHONPATH": here, **env}
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env={name: value for name, value in variables.items() if value is not None},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            # A hanging grandchild would keep the pipes open. torchrun's children are in sessions of
            # their own; SIGTERM makes torchrun end them.
            os.killpg(process.pid, signal.SIGTERM)
            time.sleep(5)
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"still running after {limit:g} s\n{out}\n{err}")
    assert process.returncode == status, f"ended with {process.returncode}\n{out}\n{err}"
    assert not (quiet and err), err
    return out + err if status else out


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """Runs functions at the same time, a thread each; returns their results or raises an error."""
    ready = threading.Barrier(len(works))
    with ThreadPoolExecutor(len(works)) as pool:
        runs = [pool.submit(lambda work=work: (ready.wait(), work())[1]) for work in works]
        return [run.result() for run in runs]


def load(path: str) -> Any:
    """Imports a script of the checkout as a module; the script can import its neighbours."""
    name, folder = Path(path).stem, str((ROOT / path).parent)
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="needs PyTorch")


def calls_of_ours(call: Callable[[], Any]) -> int:
    """Returns how many calls of the package's Python functions a warm call makes."""
    for _ in range(3):
        call()
    profile = cProfile.Profile(builtins=False)
    profile.enable()
    call()
    profile.disable()
    package = str(ROOT / "anycell")
    stats: Any = pstats.Stats(profile)
    return sum(row[1] for (file, *_), row in stats.stats.items() if file.startswith(package))
