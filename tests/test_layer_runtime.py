"""What the engine promises, each layer keeps, with matmuls, autograd and memory around its kernels.

Forks, threads, interrupts and a cache that fails: `test_cpu_runtime.py` has the same of kernels.
"""

import importlib.util
import os
import textwrap
from pathlib import Path

import pytest
from processes import python

posix = pytest.mark.skipif(os.name != "posix", reason="needs signals and fork")

# The first lines of a process: a layer whose calls are worth two threads and warm memory, and all
# that comes out of it.
START = """
import copy, hashlib, multiprocessing, os, signal, threading, warnings
import numpy as np
import anycell
from anycell.layer import products
from tolerances import error, limit

def alike(one, other):
    # The pool of another matmul does not survive a fork, and ours has other bits.
    ours = not any(rule.host for rule in products.CHOSEN.values())
    most = 0.0 if ours else limit("float32", "gradient")
    return all(error(a, b, ()) <= most for a, b in zip(one, other, strict=True))
"""
LAYERS = {
    "numpy": """
rng = np.random.default_rng(0)
x = rng.standard_normal((40, 32, 16))
make = lambda: anycell.numpy.RNN(anycell.cells.PeepholeLSTM, 16, 64, bidirectional=True, seed=0)
alone = copy.deepcopy  # the backward pass belongs to the last forward pass of a layer
one_thread = lambda: None

def solve(layer):
    output, state = layer.forward(x, training=True)
    d_x, d_state = layer.backward(output, state)
    return [output, *state, d_x, *d_state, *layer.grads.values()]
""",
    "torch": """
import torch
torch.set_num_threads(2)
generator = torch.Generator().manual_seed(0)
x = torch.randn(40, 32, 16, generator=generator, requires_grad=True)
alone = lambda layer: layer
one_thread = lambda: torch.set_num_threads(1)  # its own pool does not survive a fork

def make():
    torch.manual_seed(0)
    return KIND

def solve(layer):
    output, state = layer(x)
    results = [output, *state]
    given = [result.detach().clone() for result in results]
    gradients = torch.autograd.grad(results, [x, *layer.parameters()], given)
    return [a.detach().numpy() for a in (*results, *gradients)]
""",
}
KINDS = {
    "torch.LSTM": "anycell.torch.LSTM(16, 64, bidirectional=True)",
    "torch.RNN": "anycell.torch.RNN(anycell.cells.PeepholeLSTM, 16, 64, bidirectional=True)",
}


@pytest.fixture(params=["numpy", "torch.LSTM", pytest.param("torch.RNN", marks=pytest.mark.slow)])
def start(request: pytest.FixtureRequest) -> str:
    if request.param == "numpy":
        return START + LAYERS["numpy"]
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs PyTorch")
    return START + LAYERS["torch"].replace("KIND", KINDS[request.param])


def case(start: str, body: str, **env: str) -> str:
    return python(start + textwrap.dedent(body), **{"ANYCELL_NUM_THREADS": "2", **env})


@posix
def test_fork_after_use(start: str) -> None:
    """A child trains the layer that its parent has used, and a new one: the same bits."""
    case(
        start,
        """
        layer = make()
        solve(layer)
        one_thread()
        right = solve(layer)

        def child():
            one_thread()
            assert alike(solve(layer), right)
            assert alike(solve(make()), right)

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 0
        assert alike(solve(layer), right)
        """,
    )


@posix
def test_fork_while_a_thread_trains(start: str) -> None:
    """Whatever that thread holds, the child has it not."""
    case(
        start,
        """
        warnings.simplefilter("ignore")  # Python's own, about threads and fork
        one_thread()
        layer, stop = make(), threading.Event()
        right = solve(layer)

        def work():
            one_thread()
            own = alone(layer)
            while not stop.is_set():
                solve(own)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            for _ in range(5):
                child = os.fork()
                if not child:
                    one_thread()
                    os._exit(0 if alike(solve(alone(layer)), right) else 1)
                assert os.waitpid(child, 0)[1] == 0
        finally:
            stop.set()
            thread.join()
        """,
        OPENBLAS_NUM_THREADS="1",  # its own threads stop at any fork, and a matmul waits for ever
    )


@pytest.mark.sample(2)
def test_threads_call_one_layer(start: str) -> None:
    """All at once: some train, some only look, at fewer rows too."""
    case(
        start,
        """
        from tolerances import assert_close
        from processes import at_once
        layer = make()
        right = solve(layer)

        def train():
            own = alone(layer)
            for _ in range(3):
                for value, ref in zip(solve(own), right, strict=True):
                    # A host's matmul may add in another order in another thread.
                    assert_close(value, ref, "float32", "gradient")

        def look(rows=32):
            for _ in range(5):
                output, _ = layer.forward(x[:, :rows])
                output = output if isinstance(output, np.ndarray) else output.detach().numpy()
                assert_close(output, right[0][:, :rows], "float32", "forward")

        at_once(train, look, train, lambda: look(9))
        assert alike(solve(layer), right)
        """,
    )


@posix
@pytest.mark.sample(1)
def test_interrupts(start: str) -> None:
    """Wherever in a call they come, nothing is left half done."""
    case(
        start,
        """
        layer, came = make(), threading.Event()
        right = solve(layer)

        def interrupt(*_):
            came.set()
            raise KeyboardInterrupt

        signal.signal(signal.SIGINT, interrupt)
        for turn in range(8):
            came.clear()
            timer = threading.Timer(0.004 * turn, os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                while not came.is_set():  # raised in a finaliser, it is only printed
                    solve(layer)
            except KeyboardInterrupt:
                pass
            timer.join()
            assert alike(solve(layer), right)
        """,
    )


def test_the_cache_may_fail(tmp_path: Path) -> None:
    """Cut entries are made anew; where no cache can be had, one warning and the same results."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    body = """
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            solution = solve(make())
            anycell.numpy.GRU(2, 3).forward(np.zeros((2, 2, 2)))
        print(hashlib.sha256(b"".join(a.tobytes() for a in solution)).hexdigest())
        print(*(warning.category.__name__ for warning in seen))
        """
    start = START + LAYERS["numpy"]
    right = case(start, body, ANYCELL_CACHE_DIR=str(good))
    assert right.endswith("\n\n"), right
    whole = {entry: entry.read_bytes() for entry in good.iterdir()}
    for entry, content in whole.items():
        entry.write_bytes(content[: len(content) // 2])
    assert case(start, body, ANYCELL_CACHE_DIR=str(good)) == right
    assert {entry: entry.read_bytes() for entry in good.iterdir()} == whole
    warned = right.rstrip() + "\nCacheWarning\n"
    bad.write_text("not a directory")
    assert case(start, body, ANYCELL_CACHE_DIR=str(bad)) == warned
    if os.name == "posix":
        good.chmod(0o777)
        assert case(start, body, ANYCELL_CACHE_DIR=str(good)) == warned


@posix
@pytest.mark.parametrize("kind", ["LSTM", pytest.param("GRU", marks=pytest.mark.slow)])
def test_a_forked_child_trains(kind: str) -> None:
    """After parallel work in the parent, whose OpenMP threads the child has not."""
    pytest.importorskip("torch")
    python(
        f"""
        import os, signal, warnings
        import torch, anycell.torch
        warnings.simplefilter("ignore")  # Python's own, about threads and fork
        torch.set_num_threads(2)
        layer = anycell.torch.{kind}(128, 256)
        optimizer = torch.optim.Adam(layer.parameters())  # its first imports a compiler
        x = torch.randn(12, 32, 128)

        def train():
            layer.zero_grad()
            output = layer(x)[0]
            output.square().sum().backward()
            return [output.detach(), *[p.grad.clone() for p in layer.parameters()]]

        torch.randn(800, 800) @ torch.randn(800, 800)
        for _ in range(3):
            right = train()
            child = os.fork()
            if not child:
                signal.alarm(60)
                for one, other in zip(train(), right):
                    assert (one - other).norm() <= 1e-6 * other.norm()
                optimizer.step()
                with torch.no_grad():
                    layer(x[:1])
                assert train()[0].isfinite().all()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        assert torch.get_num_threads() == 2
        """
    )
