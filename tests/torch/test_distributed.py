"""Two processes under torchrun, on CPUs: gradients and training are those of one process."""

import copy
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from processes import ROOT, python  # noqa: E402
from tolerances import assert_close  # noqa: E402

import anycell.torch as at  # noqa: E402
from anycell import cells  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed"),
]
LAYERS = {
    "LSTM": lambda: at.LSTM(3, 8, 2, bidirectional=True, proj_size=5),
    "GRU": lambda: at.GRU(3, 8, 2),
    "LayerNormLSTM": lambda: at.RNN(cells.LayerNormLSTM, 3, 8, 2),
}


def torchrun(script: Path, *arguments: str) -> str:
    """What two processes print that run a script."""
    call = ["--standalone", "--nproc-per-node=2", str(script), *arguments]
    code = f"from torch.distributed.run import main; main({call!r})"
    return python(code, OMP_NUM_THREADS="1", PYTHONWARNINGS="error")


def test_gradients_of_one_process() -> None:
    said = torchrun(Path(__file__))
    assert said.splitlines() == [f"{name} {way}" for name in LAYERS for way in WAYS]


@pytest.mark.parametrize("way", ["ddp", "fsdp", "accelerate"])
def test_the_example(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "accelerate":
        pytest.importorskip("accelerate")
    monkeypatch.syspath_prepend(ROOT / "examples")
    import distributed

    alone = " ".join(f"{loss:.6f}" for loss in distributed.train())
    printed = torchrun(ROOT / "examples" / "distributed.py", way)
    assert printed.strip() == f"2 processes: {alone}"


def test_sharded_weights_and_distributed_tensors() -> None:
    """torch's own, in one process: what is refused, and what runs."""
    python(
        """
        import pytest, torch, torch.distributed as dist
        from tolerances import assert_close
        from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor

        import anycell.torch as at
        from anycell import cells, compress

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = dist.init_device_mesh("cpu", (1,))

        def spread(t):
            return distribute_tensor(t, mesh, [Replicate()])

        layer, x = at.RNN(cells.PeepholeLSTM, 3, 8), torch.randn(4, 2, 3)
        state = torch.randn(1, 2, 8), torch.randn(1, 2, 8)
        right = layer(x, state)[0]
        with pytest.raises(TypeError, match="x: given a DTensor"):
            layer(spread(x))
        distribute_module(layer, mesh)
        with pytest.raises(TypeError, match="weight_ih: given a DTensor"):
            layer(x)
        output = layer(spread(x), tuple(map(spread, state)))[0].full_tensor()
        assert_close(output.detach().numpy(), right.detach().numpy(), "float32", "forward")

        layer = at.RNN(cells.PeepholeLSTM, 3, 8)
        small = compress.quantize(layer)
        dist.fsdp.fully_shard(layer)
        with pytest.raises(ValueError, match="weight_ih_l0 is sharded.*Quantize the model first"):
            compress.quantize(layer)
        dist.destroy_process_group()
        """
    )


# -- what each process does ------------------------------------------------------------------------
WAYS: dict[str, Callable[[Any], Any]] = {
    "ddp": lambda layer: torch.nn.parallel.DistributedDataParallel(layer),
    "fsdp": lambda layer: dist.fsdp.fully_shard(layer),
}


def gradients(model: Any, x: Any, lengths: Any) -> list[Any]:
    output, _ = model(x, lengths=lengths)
    output.square().mean().backward()
    return [p.grad for p in model.parameters()]


def work(name: str, way: str) -> None:
    """Gradients of this process's rows, averaged over all, against those of all rows."""
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    x, lengths = torch.randn(6, 4, 3, dtype=torch.float64), torch.tensor([6, 3, 5, 0])
    alone = gradients(copy.deepcopy(layer), x, lengths)
    assert layer.engine.name == "cpu"
    rows = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    found = gradients(WAYS[way](layer), x[:, rows], lengths[rows])
    for own, value in zip(alone, found, strict=True):
        whole = value.full_tensor() if way == "fsdp" else value
        assert_close(whole, own, "float64", "gradient", f"{name} {way}")
    if dist.get_rank() == 0:
        print(f"{name} {way}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name in LAYERS:
        for way in WAYS:
            work(name, way)
    dist.barrier()  # see the example
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of gloo's may ask for the interpreter while it ends, which aborts
