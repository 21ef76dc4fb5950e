"""What the engine promises, each layer keeps, with matmuls, autograd and memory around its kernels.

Forks, threads and interrupts: `test_cpu_runtime.py` has the same of kernels.
"""

import importlib.util
import os
import sys

import pytest
from processes import ROOT, python

# The first lines of a process: a layer whose calls are worth two threads and warm memory, and all
# that comes out of it.
START = """
import copy, os, signal, sys, threading, warnings
warnings.simplefilter("ignore")  # Python's own, about threads and fork
import numpy as np
import anycell
from anycell.layer import products
from tolerances import error, limit

def alike(one, other):
    # The pool of another matmul does not survive a fork, and ours has other bits.
    ours = "torch" not in sys.modules or not products.rule().host
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
large = None

def solve(layer):
    output, state = layer.forward(x, training=True)
    d_x, d_state = layer.backward(output, state)
    return [output, *state, d_x, *d_state, *layer.grads.values()]
""",
    "torch": """
import torch
import anycell.torch
torch.set_num_threads(2)
generator = torch.Generator().manual_seed(0)
x = torch.randn(40, 32, 16, generator=generator, requires_grad=True)
alone = lambda layer: layer
one_thread = lambda: torch.set_num_threads(1)  # its own pool does not survive a fork

large = anycell.torch.LARGE(128, 256)

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
    "torch.LSTM": ("anycell.torch.LSTM(16, 64, bidirectional=True)", "LSTM"),
    "torch.RNN": (
        "anycell.torch.RNN(anycell.cells.PeepholeLSTM, 16, 64, bidirectional=True)",
        "GRU",
    ),
}


def start_of(kind: str) -> str:
    if kind == "numpy":
        return START + LAYERS["numpy"]
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs PyTorch")
    layer, large = KINDS[kind]
    return START + LAYERS["torch"].replace("KIND", layer).replace("LARGE", large)


each_kind = pytest.mark.parametrize(
    "kind",
    [
        "numpy",
        pytest.param("torch.LSTM", marks=pytest.mark.more),
        pytest.param("torch.RNN", marks=pytest.mark.slow),
    ],
)

PROMISES = {
    "threads call one layer, all at once: some train, some only look, at fewer rows too": """
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
    "wherever in a call an interrupt comes, nothing is left half done": """
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
    "after parallel work of torch's, whose threads a forked child has not, it trains": """
if large:
    x_large = torch.randn(12, 32, 128)

    def train():
        large.zero_grad()
        output = large(x_large)[0]
        output.square().sum().backward()
        return [output.detach(), *[p.grad.clone() for p in large.parameters()]]

    torch.randn(800, 800) @ torch.randn(800, 800)
    for _ in range(3):
        expected = train()
        child = os.fork()
        if not child:
            signal.alarm(60)
            for one, other in zip(train(), expected, strict=True):
                assert (one - other).norm() <= 1e-6 * other.norm()
            with torch.no_grad():
                for parameter in large.parameters():
                    parameter.sub_(0.001 * parameter.grad)
                large(x_large[:1])
            assert train()[0].isfinite().all()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert torch.get_num_threads() == 2
""",
    "a child trains the layer that its parent has used, and a new one: the same bits": """
layer = make()
solve(layer)
one_thread()
right = solve(layer)
child = os.fork()
if not child:
    one_thread()
    os._exit(not (alike(solve(layer), right) and alike(solve(make()), right)))
assert os.waitpid(child, 0)[1] == 0
assert alike(solve(layer), right)
""",
}
if os.name != "posix":
    PROMISES = {name: body for name, body in PROMISES.items() if "threads call" in name}


def run(kind: str, body: str, **env: str) -> None:
    python(start_of(kind) + body, ANYCELL_NUM_THREADS="2", **env)


@each_kind
def test_promises(kind: str) -> None:
    """All of them in one process; what it prints last has failed."""
    run(kind, "".join(f"print({name!r}, flush=True)\n{body}" for name, body in PROMISES.items()))


@pytest.mark.skipif(os.name != "posix", reason="needs fork")
@pytest.mark.parametrize(
    "kind",
    ["numpy", *(pytest.param(f"torch.{n}", marks=pytest.mark.more) for n in ("LSTM", "RNN"))],
)
def test_fork_while_a_thread_trains(kind: str) -> None:
    """Whatever that thread holds, the child has it not."""
    body = """
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
"""
    # OpenBLAS's own threads stop at any fork, and a matmul waits for ever.
    run(kind, body, OPENBLAS_NUM_THREADS="1")


@pytest.mark.skipif(os.name != "posix", reason="needs fork")
@pytest.mark.parametrize("ends", [True, False], ids=["the runtime ends its threads", "it cannot"])
@pytest.mark.sample(1)
def test_threads_of_a_forked_child(ends: bool) -> None:
    """A child keeps torch's number of threads, even if the parent has used them, and layers follow
    torch's setting. Where GNU's runtime cannot end its threads before a fork, torch gets one.
    """
    pytest.importorskip("torch")
    body = """
import warnings
warnings.simplefilter("ignore")
import os, signal, sys, torch, anycell.torch
from anycell.plan import Options
from anycell.torch.operators import fused
from anycell.torch import threads

ends = sys.argv[1] == "True"
if ends and threads.function("omp_pause_resource_all") is None:
    sys.exit()  # an older runtime
if not ends:
    threads.function = lambda name: None
torch.set_num_threads(2)
layer, x = anycell.torch.RNN(anycell.cells.GRU, 6, 33), torch.randn(20, 32, 6)
of_layers = lambda: fused.on_threads(Options()).threads

def work():
    layer(x)[0].sum().backward()
    return torch.randn(500, 500) @ torch.randn(500, 500), torch.ones(1 << 20).sum()

for used in (False, True):
    if used:
        work()
    child = os.fork()
    if not child:
        signal.alarm(60)
        most = 2 if ends else 1
        assert threads.forks.safe == ends
        assert torch.get_num_threads() == of_layers() == most
        work()
        assert torch.get_num_threads() == most
        torch.set_num_threads(3 - most)
        assert of_layers() == 3 - most
        layer(x)
        assert torch.get_num_threads() == 3 - most
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.get_num_threads() == of_layers() == 2 and threads.forks.safe
"""
    python(body, str(ends), OMP_NUM_THREADS="2")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and fork")
@pytest.mark.slow
def test_torch_has_one_thread_where_it_was_imported_after_a_fork() -> None:
    """Whether the parent has used OpenMP cannot be found out."""
    pytest.importorskip("torch")
    python(
        """
        import os
        child = os.fork()
        if not child:
            import torch
            torch.set_num_threads(2)
            from anycell.torch.threads import forks
            os._exit(not (torch.get_num_threads() == 1 and not forks.safe))
        assert os.waitpid(child, 0)[1] == 0
        """
    )


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked")
@pytest.mark.slow
def test_workers_of_a_data_loader_take_the_threads_that_they_are_told() -> None:
    """The recipe of docs/faq.md, for layers of NumPy; those of torch follow torch by themselves."""
    pytest.importorskip("torch")
    page = (ROOT / "docs/faq.md").read_text(encoding="utf-8")
    (text,) = (part for part in page.split("```python\n") if "worker_init_fn" in part)
    text = text.partition("```")[0]
    body = """
import anycell.numpy, anycell.torch
from anycell.numpy import threads
from anycell.plan import Options
from anycell.torch.operators import fused

class Numbers(torch.utils.data.Dataset):
    __len__ = lambda self: 2
    __getitem__ = lambda self, _: (threads.current(), fused.on_threads(Options()).threads)

for init, expected in ((None, 3), (one_thread, 1)):
    loader = torch.utils.data.DataLoader(Numbers(), num_workers=1, worker_init_fn=init)
    numpys, torchs = next(iter(loader))
    assert numpys.tolist() == [expected] and torchs.tolist() == [1], (numpys, torchs)
"""
    python("import torch\n" + text + body, ANYCELL_NUM_THREADS="3")
