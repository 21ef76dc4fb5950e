"""Times ``anycell.numpy.LSTM`` and ``anycell.torch.LSTM``, in turns and in processes of their own.

A process has the threads of its framework, and nothing of the other's: OpenMP for one, our own for
the other.

    python tools/numpy_and_torch.py 128,64,256,256 150,16,512,512 --turns 30

Prints milliseconds (medians over turns) of inference and training per shape ``T,B,I,H``, and the
speed of NumPy's layer in parts of torch's.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

SHAPES = "128,64,256,256", "150,16,512,512", "1000,8,32,128"


def calls(framework: str, shape: list[int]) -> tuple[Callable[[], object], Callable[[], object]]:
    """Inference and training (forward and backward, no optimizer) of one layer."""
    import numpy as np

    steps, batch, inputs, hidden = shape
    rng = np.random.default_rng(0)
    x = rng.standard_normal((steps, batch, inputs)).astype("float32")
    d = rng.standard_normal((steps, batch, hidden)).astype("float32")
    if framework == "numpy":
        import anycell.numpy

        layer = anycell.numpy.LSTM(inputs, hidden, seed=0)

        def train() -> None:
            layer.forward(x, training=True)
            layer.backward(d)

        return lambda: layer.forward(x), train
    import torch

    import anycell.torch

    module = anycell.torch.LSTM(inputs, hidden)
    tensor, arriving = torch.from_numpy(x).requires_grad_(), torch.from_numpy(d)

    def infer() -> None:
        with torch.inference_mode():
            module(tensor)

    def step() -> None:
        module.zero_grad()
        tensor.grad = None
        module(tensor)[0].backward(arriving)

    return infer, step


def serve(framework: str, shape: list[int]) -> None:
    """Times the call that each line of the standard input names: 0 inference, 1 training."""
    both = calls(framework, shape)
    for line in sys.stdin:
        call = both[int(line)]
        call()  # what another process has evicted
        begin = time.perf_counter()
        call()
        call()
        print((time.perf_counter() - begin) / 2, flush=True)


def main() -> None:
    """Runs the processes in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, [int(size) for size in options.shapes[0].split(",")])
        return
    threads = str(options.threads)
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "ANYCELL_NUM_THREADS": threads}
    for shape in options.shapes:
        servers = [
            subprocess.Popen(
                [sys.executable, __file__, shape, "--serve", framework],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            )
            for framework in ("numpy", "torch")
        ]  # fmt: skip
        for what, name in enumerate(("inference", "training")):
            taken: list[list[float]] = [[], []]
            for turn in range(options.turns + 2):
                for server, times in zip(servers, taken, strict=True):
                    assert server.stdin is not None and server.stdout is not None
                    print(what, file=server.stdin, flush=True)
                    times += [float(server.stdout.readline())] * (turn > 1)
            ours, torch = (1e3 * statistics.median(times) for times in taken)
            print(f"{shape:16} {name:9} numpy {ours:7.2f} torch {torch:7.2f} {torch / ours:5.2f}")
        for server in servers:
            server.communicate()


if __name__ == "__main__":
    main()
