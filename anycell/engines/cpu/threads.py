"""The largest number of threads of a call.

The first of these that says a number:

- ``with anycell.threads(1):`` around the call
- what the frontend has a setting for, such as ``torch.set_num_threads``
- ``set_threads``, then ``ANYCELL_NUM_THREADS``, then ``OMP_NUM_THREADS``
- the CPUs that this process may use, and the quota of its control groups
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path, PurePosixPath

import numpy as np

from anycell import environment
from anycell.refusal import refuse

MOST = 1024  # the most threads of a call

_chosen: int | None = None
_within: ContextVar[int | None] = ContextVar("anycell.threads", default=None)
# Returns the number of the innermost ``threads`` around this code; None without one. It is not a
# Python function, because every call of a layer asks.
within = _within.get


def threads(count: int) -> contextlib.AbstractContextManager[None]:
    """A context in which calls of layers take at most this many threads.

    It overrides all other settings, ``torch.set_num_threads`` among them, for the layers of every
    frontend, and it changes nothing else: the framework's own operations keep their threads.
    It holds for calls that this thread (or this asyncio task) makes within the ``with`` block. A
    backward pass takes the number that holds when it runs. A program that is traced (``jax.jit``,
    ``tf.function``) keeps the number that held when it was traced.

    Args:
        count: a whole number from 1 to 1024.

    Raises:
        ValueError: for another count.

    Example:
        >>> with anycell.threads(1):
        ...     output, state = layer(x)
    """
    return _threads(_checked("count", count))


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    token = _within.set(count)
    try:
        yield
    finally:
        _within.reset(token)


def current(limit: Callable[[], int] | None = None, usual: int = 0) -> int:
    """The most threads of a call, unless the frontend has a setting of its own.

    All but the quota of control groups is read at every call.

    Args:
        limit: returns the threads of a library that users can limit. While it has fewer than
            ``usual``, a call takes no more than the library.

    Raises:
        ValueError: if `ANYCELL_NUM_THREADS` is not a whole number from 1 to `MOST`.
    """
    if count := within():
        return count
    variables = map(os.environ.get, ("ANYCELL_NUM_THREADS", "OMP_NUM_THREADS"))
    count = _chosen or _requested(*variables)
    if not count and hasattr(os, "sched_getaffinity"):
        count = max(1, min(len(os.sched_getaffinity(0)), _quota()))
    count = count or os.cpu_count() or 1
    if limit is not None and (most := limit()) < usual:
        return max(1, min(count, most))
    return count


@lru_cache(maxsize=64)
def _requested(ours: str | None, openmps: str | None) -> int | None:
    """The number that the two variables set, if any; their texts are the key of its cache."""
    if count := environment.whole_number("ANYCELL_NUM_THREADS", MOST):
        return count
    # OpenMP allows a list, one number per nesting level, and ignores what it cannot read.
    return environment.number((openmps or "").split(",")[0], MOST)


def set_threads(count: int | None) -> None:
    """Sets what `current()` returns; None goes back to the environment and the machine.

    Raises:
        ValueError: if `count` is neither None nor a whole number from 1 to `MOST`.
    """
    global _chosen
    _chosen = None if count is None else _checked("threads", count, ", or None")


def _checked(name: str, count: int, otherwise: str = "") -> int:
    whole = isinstance(count, (int, np.integer)) and not isinstance(count, bool)
    if not (whole and 1 <= count <= MOST):
        refuse(name, repr(count), f"a whole number from 1 to {MOST}{otherwise}")
    return int(count)


@lru_cache(maxsize=1)
def _quota(root: Path = Path("/")) -> int:
    """The CPUs in the quota of this process; more threads would only stop each other.

    A control group, and each group around it, may have a quota: the smallest counts. In a container
    the paths of groups may be those of the host, of which only the root is visible.
    """
    smallest = MOST
    with contextlib.suppress(OSError):  # not Linux
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:  # version 2
                mount, names = root / "sys/fs/cgroup", ["cpu.max"]
            elif "cpu" in controllers.split(","):
                mount, names = root / "sys/fs/cgroup/cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
            else:
                continue
            group = PurePosixPath(path)
            for place in (group, *group.parents):
                with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                    texts = [(mount / f".{place}" / name).read_text() for name in names]
                    quota, period = map(int, " ".join(texts).split())
                    if quota > 0:
                        smallest = min(smallest, -(-quota // period))
    return smallest
