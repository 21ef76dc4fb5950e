"""A failure of any single call, for files or for memory, leaves nothing wrong behind."""

import contextlib
import errno
import gc
import hashlib
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import Fault, Memory, until_it_succeeds
from processes import python

import anycell.numpy as an
from anycell import cells, recurrence
from anycell.engines import cpu
from anycell.engines.cpu import jit, kernel, sources
from anycell.engines.cpu import memory as blocks
from anycell.numpy import base

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX files and fork")

ERRORS: dict[str, Callable[[], BaseException]] = {
    name: lambda name=name: OSError(getattr(errno, name), name)  # type: ignore[misc]
    for name in ("ENOSPC", "EACCES", "EIO", "ENOENT", "EEXIST", "ESTALE", "EINTR")
}
# These errors concern the caller, and must reach the caller.
PASSED_ON: dict[str, Callable[[], BaseException]] = {
    "memory": MemoryError,
    "interrupt": KeyboardInterrupt,
}

# -- the cache -----------------------------------------------------------------------------------
CODE = bytes(range(256)) * 9
NAME = hashlib.sha256(b"the entry").hexdigest()
OTHER = hashlib.sha256(b"another").hexdigest()
STRANGER = "thesis.tar"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANYCELL_CACHE_DIR", str(tmp_path / "parent" / "cache"))
    monkeypatch.delenv("ANYCELL_CACHE", raising=False)
    return tmp_path / "parent" / "cache"


def cold(cache: Path) -> None:
    """Starts without the directory and its parent."""


def empty(cache: Path) -> None:
    cache.mkdir(0o700, parents=True)


def warm(cache: Path) -> None:
    empty(cache)
    (cache / NAME).write_bytes(jit._sealed(NAME, CODE))


def damaged(cache: Path) -> None:
    warm(cache)
    (cache / NAME).write_bytes(jit._sealed(NAME, CODE)[:-1])


def crowded(cache: Path) -> None:
    """Creates old entries, and drafts of a process that died."""
    empty(cache)
    for number in range(4):
        name = hashlib.sha256(bytes([number])).hexdigest()
        (cache / name).write_bytes(jit._sealed(name, CODE))
        (cache / f"{name}.{number:016x}").write_bytes(jit._sealed(name, CODE)[: 5 * number])
    for path in cache.iterdir():
        os.utime(path, (1, 1))


STARTS = [cold, empty, warm, damaged, crowded]


def fetch(name: str = NAME) -> tuple[bytes, bool]:
    return jit.cached(name, lambda: CODE)


def clear(cache: Path) -> None:
    if cache.exists():
        for path in cache.iterdir():
            path.unlink()
        cache.rmdir()
    if cache.parent.exists():
        cache.parent.rmdir()


def check_left(cache: Path, start: Callable[[Path], None]) -> None:
    """Asserts that a failure left nothing wrong, and that the next calls work as usual."""
    stranger = cache / STRANGER
    if start is not cold:
        assert stranger.read_bytes() == CODE * 4
    with jit._Cache(str(cache)) as opened:
        assert opened.read(NAME) in (None, CODE)
    assert fetch()[0] == CODE
    assert fetch() == (CODE, True)
    now = time.time()
    for path in cache.iterdir():
        if "." in path.name and path != stranger:
            os.utime(path, (now - 7200,) * 2)
    assert fetch(OTHER) == (CODE, False)
    names = {path.name for path in cache.iterdir()} - {STRANGER}
    assert all(len(name) == 64 for name in names), "a draft stays for ever"


def open_files(below: Path) -> int:
    """The number of open files in a directory; the process may open others meanwhile."""
    count, descriptors = 0, Path("/proc/self/fd")
    for descriptor in os.listdir(descriptors) if sys.platform == "linux" else ():
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(descriptors / descriptor).startswith(str(below))
    return count


def strike(cache: Path, start: Callable[[Path], None], error: Callable[[], BaseException],
           **options: Any) -> int:  # fmt: skip
    """Fails every call that a fetch makes, one after the other; returns their number."""
    passed_on, files = error in PASSED_ON.values(), open_files(cache.parent)
    for fault in until_it_succeeds(error):
        clear(cache)
        start(cache)
        if start is not cold:
            (cache / STRANGER).write_bytes(CODE * 4)
            os.utime(cache / STRANGER, (1, 1))
        with warnings.catch_warnings(record=True) as seen, fault.of_files(jit, **options):
            warnings.simplefilter("always")
            jit._warned.clear()
            try:
                code, _ = fetch()
                assert code == CODE
                assert fetch()[0] == CODE  # one fault may affect the next call
            except (MemoryError, KeyboardInterrupt):
                assert passed_on
            fault.active = False
        assert len(seen) <= 1
        for warning in seen:
            assert warning.category is jit.CacheWarning
            assert str(warning.message).startswith(f"compiled kernels are not kept in '{cache}': ")
        check_left(cache, start)
        assert open_files(cache.parent) == files
    return fault.calls


@posix
@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.__name__)
@pytest.mark.parametrize(
    ("errors", "dir_fd"),
    [
        pytest.param(["ENOSPC"], True, id="sample"),
        pytest.param([*ERRORS, *PASSED_ON], True, id="descriptor", marks=pytest.mark.slow),
        pytest.param(["EIO", *PASSED_ON], False, id="path", marks=pytest.mark.slow),
    ],
)
def test_every_file_call_of_the_cache(
    cache: Path, monkeypatch: pytest.MonkeyPatch, start: Any, errors: list[str], dir_fd: bool
) -> None:
    monkeypatch.setattr(jit, "LIMIT", 3 * len(CODE))
    for error in errors:
        assert strike(cache, start, (ERRORS | PASSED_ON)[error], dir_fd=dir_fd) >= 5


@posix
@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.__name__)
def test_reads_and_writes_that_do_a_part(cache: Path, start: Callable[[Path], None]) -> None:
    start(cache)
    with Fault(10**9, OSError).of_files(jit, most=100):
        assert fetch() == (CODE, start is warm)
        assert fetch() == (CODE, True)
    assert fetch() == (CODE, True)
    clear(cache)
    assert strike(cache, start, ERRORS["ENOSPC"], most=500) >= 5


@posix
@pytest.mark.parametrize(
    "starts", ["empty", pytest.param("cold warm damaged crowded", marks=pytest.mark.slow)]
)
def test_a_crash_at_every_file_call_of_the_cache(cache: Path, starts: str) -> None:
    """A process that ends at the call cleans nothing up."""
    out = python(
        """
        import itertools, os, sys
        from pathlib import Path
        from tests.layer import test_faults as t
        from faults import Fault

        cache = Path(os.environ["ANYCELL_CACHE_DIR"])
        t.jit.LIMIT = 3 * len(t.CODE)
        for start in map(vars(t).get, os.environ["STARTS"].split()):
            for at in itertools.count(1):
                t.clear(cache)
                start(cache)
                if start is not t.cold:
                    (cache / t.STRANGER).write_bytes(t.CODE * 4)
                child = os.fork()
                if not child:
                    with Fault(at, lambda: os._exit(9)).of_files(t.jit):
                        t.fetch()
                    os._exit(0)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                assert code in (0, 9), code
                t.check_left(cache, start)
                if not code:
                    break
            print(at - 1)
        """,
        STARTS=starts,
    )
    assert [int(count) >= 5 for count in out.split()] == [True] * len(starts.split())


@posix
@pytest.mark.slow
def test_every_file_call_of_a_layer(
    cache: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """The layer's results keep their bits; the calls include the sources' fingerprint."""
    gates, weight = rng.standard_normal((5, 3, 4)), rng.standard_normal((4, 4))

    def solve() -> Any:
        monkeypatch.setattr(kernel, "_kernels", {})
        sources.fingerprint.cache_clear()
        jit._toolchain.cache_clear()
        outputs, _ = recurrence(cells.RNN, gates, {"weight_hh": weight}, engine="cpu")
        return outputs

    ref = solve()
    for start in ("cold", "warm"):
        for fault in until_it_succeeds(ERRORS["EIO"]):
            if start == "cold" and cache.exists():
                for path in cache.iterdir():
                    path.unlink()
            with warnings.catch_warnings(record=True) as seen, fault.of_files(jit, sources):
                warnings.simplefilter("always")
                jit._warned.clear()
                assert np.array_equal(solve(), ref)
            assert len(seen) <= 1
            assert np.array_equal(solve(), ref)
            assert all(len(path.name) == 64 for path in cache.iterdir())


@posix
@pytest.mark.parametrize("error", ERRORS | PASSED_ON)
def test_every_file_call_of_save_and_load(tmp_path: Path, error: str) -> None:
    """A failure raises an error, and leaves the old file or parameters, and no other files."""
    old, new = (flat(dict(an.Dense(3, 2, seed=seed).parameters)) for seed in range(2))
    path, raised = tmp_path / "layer.npz", (ERRORS | PASSED_ON)[error]
    an.Dense(3, 2, seed=0).save(tmp_path / "old.npz")
    an.Dense(3, 2, seed=1).save(tmp_path / "new.npz")
    for action in ("save", "load"):
        for fault in until_it_succeeds(raised):
            layer, failed = an.Dense(3, 2, seed=int(action == "save")), False
            shutil.copy(tmp_path / ("old.npz" if action == "save" else "new.npz"), path)
            with fault.of_files(base):
                try:
                    getattr(layer, action)(path)
                except (type(raised()), ValueError):  # zipfile does not tell the two apart
                    failed = True
                fault.active = False
            if action == "save":
                layer.load(path)
            for array, expected in zip(
                flat(dict(layer.parameters)), old if failed else new, strict=True
            ):
                assert np.array_equal(array, expected)
            assert len(list(tmp_path.iterdir())) == 3, "a draft was left behind"
        assert fault.calls >= 5


# -- memory --------------------------------------------------------------------------------------
def free_locks() -> bool:
    """Whether another thread can take all of our locks."""
    taken = []

    def take() -> None:
        for lock in (jit.lock, blocks._lock):
            if lock.acquire(timeout=5):
                taken.append(lock)
                lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return len(taken) == 2


def flat(value: Any) -> list[Any]:
    """Returns copies of all arrays in a result."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return [array for part in value for array in flat(part)]
    return [np.array(value.detach().numpy() if hasattr(value, "detach") else value)]


def check_memory(memory: Memory, call: Callable[[], Any]) -> int:
    """Refuses every allocation of a call in turn; returns their number.

    Args:
        call: returns the same values each time.
    """
    ref, taken = flat(call()), []
    idle = len(cpu.scratch.idle)
    for _ in range(2):
        for fault in until_it_succeeds(MemoryError):
            memory.fault = fault
            try:
                result = flat(call())
            except MemoryError:
                memory.fault = None
                result = flat(call())
            else:
                memory.fault = None
                assert not fault.struck, "a failed allocation was passed over"
            for array, expected in zip(result, ref, strict=True):
                assert np.array_equal(array, expected)
            assert len(cpu.scratch.idle) <= idle
            assert free_locks()
        gc.collect()
        taken.append(memory.taken())
    assert taken[0] == taken[1], "failed calls keep memory"
    return fault.calls


LAYERS: dict[str, Callable[[], an.RNN]] = {
    "LSTM": lambda: an.LSTM(3, 5, seed=0),
    "two ways, two layers": lambda: an.GRU(3, 5, 2, bidirectional=True, dtype="float64", seed=0),
    "checkpoints": lambda: an.RNN(cells.LayerNormLSTM, 3, 5, checkpoint=2, seed=0),
    "further matmuls": lambda: an.RNN(cells.LSTMP, 3, 5, P=2, batch_first=True, seed=0),
    "resets": lambda: an.RNN(cells.PeepholeLSTM, 3, 5, seed=0),
}
USES = ("forward", "training", "backward", "step", "prepared", "prepare")


def used(layer: an.RNN, use: str, kind: str, rng: np.random.Generator) -> Callable[[], Any]:
    """Returns a call of a layer with the same results each time."""
    steps, rows = (7, 4)
    x = rng.standard_normal((rows, steps, 3) if layer.batch_first else (steps, rows, 3))
    flags: dict[str, Any] = {}
    if kind == "resets":
        flags = {"resets": rng.random((steps, rows)) < 0.3, "lengths": [7, 0, 3, 5]}

    def forward(training: bool = False) -> Any:
        return layer.forward(x, training=training, **flags)

    if use in ("forward", "training"):
        return lambda: forward(use == "training")
    if use == "backward":
        d = rng.standard_normal(forward(True)[0].shape)
        return lambda: (layer.backward(d), dict(layer.grads))
    if use == "prepared":
        layer.prepare()
    elif use == "prepare":
        return lambda: (layer.prepare(), layer.step(x[0]))[1]
    one = x[:, 0] if layer.batch_first else x[0]
    return lambda: layer.step(one)


def _sample(kind: str, use: str) -> Any:
    """A test case; fast cases include each kind and each use."""
    fast = [*LAYERS].index(kind) == USES.index(use) % len(LAYERS)
    return pytest.param(kind, use, marks=[] if fast else pytest.mark.slow)


@posix
@pytest.mark.parametrize("kind, use", [_sample(kind, use) for kind in LAYERS for use in USES])
def test_every_allocation_of_a_layer(kind: str, use: str, rng: np.random.Generator) -> None:
    layer = LAYERS[kind]()
    if layer.bidirectional and use.startswith(("step", "prepare")):
        layer = an.GRU(3, 5, 2, dtype="float64", seed=0)
    call = used(layer, use, kind, rng)
    call()  # compiles, which takes several times as long where memory is traced
    with Memory() as memory:
        assert check_memory(memory, call) >= 2


@posix
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_allocation_of_an_optimizer(dtype: str, rng: np.random.Generator) -> None:
    """A step happens completely or not at all."""

    def start() -> tuple[an.LSTM, an.Adam]:
        layer = an.LSTM(3, 5, dtype=dtype, seed=0)
        x = np.random.default_rng(0).standard_normal((4, 2, 3))
        layer.backward(np.ones_like(layer.forward(x, training=True)[0]))
        return layer, an.Adam(layer, weight_decay=0.1)

    def all_of(layer: an.LSTM, optimizer: an.Adam) -> list[Any]:
        return flat((dict(layer.parameters), optimizer._moments, optimizer.steps))

    layer, optimizer = start()
    before = all_of(layer, optimizer)
    optimizer.step()
    after = all_of(layer, optimizer)
    with Memory() as memory:
        for fault in until_it_succeeds(MemoryError):
            layer, optimizer = start()
            memory.fault = fault
            try:
                optimizer.step()
            except MemoryError:
                memory.fault = None
                for array, expected in zip(all_of(layer, optimizer), before, strict=True):
                    assert np.array_equal(array, expected)
                optimizer.step()
            memory.fault = None
            for array, expected in zip(all_of(layer, optimizer), after, strict=True):
                assert np.array_equal(array, expected)
    assert fault.calls >= 2


@posix
@pytest.mark.parametrize("layers", ["one", pytest.param("two", marks=pytest.mark.slow)])
def test_every_allocation_of_a_torch_layer(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, layers: str
) -> None:
    """The allocations are NumPy's, and those that the layer requests from torch."""
    torch = pytest.importorskip("torch")
    import anycell.torch
    from anycell.torch.framework import Torch

    memory, host = Memory(), Torch.of("float32")

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if memory.fault is not None:
                memory.fault.tick()
            return function(*args)

        return call

    for name in ("empty", "zeros", "like", "lasting"):
        monkeypatch.setattr(host, name, counted(getattr(host, name)))
    torch.manual_seed(0)
    layer = anycell.torch.LSTM(3, 5, 1 + (layers == "two"), bidirectional=layers == "two")
    x = torch.from_numpy(rng.standard_normal((7, 4, 3), np.float32)).requires_grad_()

    def backward() -> Any:
        layer.zero_grad()
        x.grad = None
        layer(x)[0].sum().backward()
        return [x.grad, *(p.grad for p in layer.parameters())]

    @torch.no_grad()
    def forward() -> Any:
        return layer(x)

    prepared = anycell.torch.LSTM(3, 5).prepare()

    @torch.no_grad()
    def step() -> Any:
        return prepared.step(x[0])

    for call in (forward, backward, step):
        call()
        with memory:
            assert check_memory(memory, call) >= 2


@posix
@pytest.mark.parametrize("error", ERRORS)
def test_every_file_call_of_texts_for_triton(
    cache: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    build = pytest.importorskip("anycell.engines.gpu.build")
    text = pytest.importorskip("anycell.engines.gpu.text")
    printed = text.Printed("kernel", "# a kernel\n" * 50, (), (1, 1), "H", 4)
    private = cache.parent / "private"
    private.mkdir(parents=True)
    monkeypatch.setattr(build, "_private", lambda: str(private))
    for fault in until_it_succeeds(ERRORS[error]):
        with fault.of_files(build):
            path = Path(build._written(printed))
        assert path.read_text() == printed.source
        directories = [cache / "triton", private]
        left = [name for d in directories if d.exists() for name in d.iterdir()]
        assert error in ("EEXIST",) or all(name.suffix == ".py" for name in left)
