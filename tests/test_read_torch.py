"""Recurrent steps written in PyTorch, through ``anycell.torch.loop``, against a loop over time.

Outputs, last states and the gradients of weights, initial states and inputs are compared in
float64. The cells are in ``cells_torch.py``, written by another hand than the reader.
"""

import copy
from typing import Any

import numpy as np
import pytest
from corpus import Numbers

torch = pytest.importorskip("torch")

from cells_torch import corpus  # noqa: E402
from tolerances import assert_close  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

import anycell.torch as at  # noqa: E402


def plain_loop(module: Any) -> Any:
    """The loop that ``anycell.torch.loop`` takes the place of."""

    def run(x: Any, state: Any) -> Any:
        outputs = []
        for t in range(pytree.tree_leaves(x)[0].shape[0]):
            new = module(pytree.tree_map(lambda leaf, t=t: leaf[t], x), state)
            if pytree.tree_structure(new) == pytree.tree_structure(state):
                new = pytree.tree_leaves(new)[0], new
            output, state = new
            outputs.append(output)
        return pytree.tree_map(lambda *leaves: torch.stack(leaves), *outputs), state

    return run


def results(made: Any, loop: Any) -> dict[str, np.ndarray]:
    """The outputs and last states of a loop, and the gradients of all that it is called with."""
    module, x, state = made
    module = copy.deepcopy(module)
    leaves, tree = pytree.tree_flatten((x, state))
    leaves = [leaf.detach().clone() for leaf in leaves]
    wanted = {f"argument {k}": leaf for k, leaf in enumerate(leaves) if leaf.is_floating_point()}
    for leaf in wanted.values():
        leaf.requires_grad_()
    wanted |= dict(module.named_parameters())
    torch.manual_seed(0)
    out = loop(module)(*pytree.tree_unflatten(leaves, tree))
    floats = [leaf for leaf in pytree.tree_leaves(out) if leaf.is_floating_point()]
    random = Numbers("cotangents")
    total = sum((leaf * torch.as_tensor(random(*leaf.shape))).sum() for leaf in floats)
    slopes = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
    got = {f"output {k}": leaf.detach().numpy() for k, leaf in enumerate(floats)}
    for (name, leaf), slope in zip(wanted.items(), slopes, strict=True):
        slope = torch.zeros_like(leaf) if slope is None else slope
        got[f"gradient of {name}"] = slope.numpy()
    return got
