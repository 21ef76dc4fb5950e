"""Trains a model of anycell's layers in several processes, with the usual tools for PyTorch.

    torchrun --standalone --nproc-per-node 2 examples/distributed.py ddp
    torchrun --standalone --nproc-per-node 2 examples/distributed.py fsdp
    torchrun --standalone --nproc-per-node 2 examples/distributed.py accelerate

``ddp`` is DistributedDataParallel, ``fsdp`` is ``fully_shard`` (FSDP2), ``accelerate`` is Hugging
Face Accelerate. Each process trains on its rows of the batch. The printed losses equal the losses
of a single process that trains on all rows.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn

import anycell
import anycell.torch


class Tagger(nn.Module):
    """A model from ``[T, B, 8]`` to ``[T, B, 1]``."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = anycell.torch.RNN(anycell.cells.PeepholeLSTM, 8, 32, num_layers=2)
        self.lstm = anycell.torch.LSTM(32, 16, bidirectional=True)
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.rnn(x)[0])[0]).tanh()


def train(way: str | None = None, steps: int = 5) -> list[float]:
    """Returns the loss over the whole batch before each step; without ``way``, in this process."""
    torch.manual_seed(0)  # the same weights and data everywhere
    model: nn.Module = Tagger()
    x = torch.randn(20, 8, 8)
    y = x.mean(-1, keepdim=True).cumsum(0).tanh()
    backward = torch.Tensor.backward
    if way == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif way == "fsdp":
        from torch.distributed.fsdp import fully_shard  # since PyTorch 2.6

        for layer in (model.rnn, model.lstm, model):  # each is gathered when it runs
            fully_shard(layer)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    if way == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        backward = accelerator.backward
    rank, world = (dist.get_rank(), dist.get_world_size()) if way else (0, 1)
    x, y, losses = x.tensor_split(world, 1)[rank], y.tensor_split(world, 1)[rank], []
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
        total = loss.detach() / world
        if way:
            dist.all_reduce(total)
        losses.append(total.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("way", choices=["ddp", "fsdp", "accelerate"])
    way = parser.parse_args().way
    dist.init_process_group("gloo")  # of CPUs
    losses = train(way)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes:", *[f"{loss:.6f}" for loss in losses])
    # A thread of gloo may still have to free a tensor, and needs Python for it: a process that ends
    # before is aborted. These two lines make this rare, not impossible: see "Several machines" in
    # docs/compatibility.md.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
