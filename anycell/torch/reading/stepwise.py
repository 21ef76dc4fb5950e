"""A call of a step over time, and the Python loop that runs it step by step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from anycell.layer.checks import describe, refuse
from anycell.layer.restarts import restarts
from anycell.read.trees import filled, leaves

Step = Callable[[Any, Any], tuple[Any, Any]]  # (x, state) -> (output, state)
_LEAF = pytree.tree_structure(0)


def _hashed(tree: Any) -> bool:
    try:
        return hash(tree) is not None
    except TypeError:
        return False


# Structures of older PyTorch have no hash.
of_tree: Callable[[Any], Any] = (
    (lambda tree: tree) if _hashed(pytree.tree_structure({"h": 0})) else repr
)
all_tensors = frozenset([Tensor]).issuperset


def flat(tree: Any) -> tuple[list[Any], Any]:
    """``pytree.tree_flatten``, at once for a tensor and a tuple of tensors."""
    if type(tree) is Tensor:
        return [tree], _LEAF
    if type(tree) is tuple and all_tensors(map(type, tree)):
        return list(tree), _of_tuple(len(tree))
    return pytree.tree_flatten(tree)


@functools.cache
def _of_tuple(size: int) -> Any:
    return pytree.tree_structure((0,) * size)


class Steps(NamedTuple):
    """The tensors of a call, with time first.

    Attributes:
        xs, x_tree: the leaves of x, ``[T, B, ...]`` or ``[T, ...]``, and their structure.
        state, state_tree: the leaves of the state before the first step, and their structure.
        rows: the size of the batch, 1 without an axis of rows.
        batched: whether there is such an axis; x may have tensors ``[T]`` without it.
        mask: bool ``[T, B]``, or None; B is 1 without an axis of rows.
        resets: bool ``[T, B]``, or None: where episodes start.
        restored: the leaves of the state that resets restore; None for zeros.
        reverse: whether the loop runs from the last step to the first.
        turned: the places in ``state`` of tensors whose first two axes are swapped here: the
            module's have the batch as the second, as stacks of layers do.
        why: why the user's step runs, if that is known; "" otherwise.
    """

    xs: list[Tensor]
    x_tree: Any
    state: list[Tensor]
    state_tree: Any
    batched: bool
    rows: int
    mask: Tensor | None = None
    resets: Tensor | None = None
    restored: list[Tensor] | None = None
    reverse: bool = False
    turned: tuple[int, ...] = ()
    why: str = ""

    def state_of(self, leaves: Sequence[Any], tree: Any = None) -> Any:
        """The state as the module has it."""
        return pytree.tree_unflatten(self.swapped(leaves), tree or self.state_tree)

    def leaves_of(self, state: Any) -> tuple[list[Any], Any]:
        """The leaves of a state of the module's, with the batch first, and its structure."""
        leaves, tree = flat(state)
        if tree != self.state_tree:
            first = pytree.tree_unflatten(self.state, self.state_tree)
            places, named = (dict(pytree.tree_leaves_with_path(t)) for t in (first, state))
            if named.keys() == places.keys() and [*named] != [*places]:  # keys in another order
                leaves, tree = [named[place] for place in places], self.state_tree
        return self.swapped(leaves), tree

    def swapped(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves of a state from the module's axes to those here, or back."""
        return [t.transpose(0, 1) if k in self.turned else t for k, t in enumerate(leaves)]

    @property
    def tensors(self) -> list[Tensor]:
        """All of its tensors."""
        return [*leaves(self._trees)]

    def filled(self, tensors: Iterable[Tensor]) -> Steps:
        """The call with other tensors."""
        xs, state, mask, resets, restored = filled(self._trees, tensors)
        return self._replace(xs=xs, state=state, mask=mask, resets=resets, restored=restored)

    @property
    def _trees(self) -> Any:
        return self.xs, self.state, self.mask, self.resets, self.restored

    def signature(self, tensors: Sequence[Tensor]) -> Any:
        """Returns what a reading depends on."""
        shape = self.shape_of_row
        return (
            of_tree(self.x_tree), of_tree(self.state_tree), self.turned, self.batched,
            self.batched and self.rows == 1,
            tuple([(shape(t, 1), t.dtype, t.device) for t in self.xs]),
            tuple([(shape(t, 0), t.dtype) for t in self.state]),
            tuple([(t.shape, t.dtype) for t in tensors]),
        )  # fmt: skip

    def has_rows(self, tensor: Tensor, axis: int) -> bool:
        """Whether a tensor of x or of the state has the batch as an axis."""
        return self.batched and tensor.dim() > axis and tensor.shape[axis] == self.rows

    def shape_of_row(self, tensor: Tensor, axis: int) -> tuple[Any, ...]:
        rows = self.has_rows(tensor, axis)
        return rows, tensor.shape[axis + rows :]


def stepwise(step: Step, call: Steps) -> tuple[Any, Any]:
    """Runs a step over time as a Python loop does."""
    mask, xs, steps = call.mask, unmasked(call), range(len(call.xs[0]))
    starts = None if call.resets is None else restarts(call.resets, mask, call.reverse)

    def one(t: int, state: Any) -> tuple[Any, Any]:
        leaves, structure = call.leaves_of(state)
        if starts is not None:
            restored = call.restored or [_zeros(leaf) for leaf in leaves]
            leaves = _chosen(starts[t], restored, leaves, call)
        before = call.state_of(leaves, structure)
        output, state = step(pytree.tree_unflatten([x[t] for x in xs], call.x_tree), before)
        if mask is not None:
            after, structure = call.leaves_of(state)
            state = call.state_of(_chosen(mask[t], after, leaves, call), structure)
            parts, tree = flat(output)
            parts = _chosen(mask[t], parts, [_zeros(part) for part in parts], call)
            output = pytree.tree_unflatten(parts, tree)
        return output, state

    order = reversed(steps) if call.reverse else steps
    outputs, state = as_written(one, order, call.state_of(call.state), call.reverse)
    return outputs, call.state_of(*call.leaves_of(state))


def as_written(step: Step, xs: Iterable[Any], state: Any, reverse: bool = False) -> tuple[Any, Any]:
    """Runs a step for inputs one after the other; its outputs are stacked, in reverse if asked."""
    outputs = []
    for x in xs:
        output, state = step(x, state)
        outputs.append(output)
    if reverse:
        outputs.reverse()
    if type(output) is Tensor:
        return torch.stack(outputs), state
    parts = map(list, zip(*[flat(one)[0] for one in outputs], strict=True))
    series = [torch.stack(p) if isinstance(p[0], Tensor) else p[-1] for p in parts]
    return pytree.tree_unflatten(series, flat(output)[1]), state


def time_first(x: Tensor) -> Tensor:
    """``[B, T, ...]`` as ``[T, B, ...]``; ``[T]`` as it is."""
    return x.transpose(0, 1) if x.dim() > 1 else x


def batch_first(output: Any, rows: int) -> Any:
    """Tensors ``[T, B, ...]`` as ``[B, T, ...]``; those without rows as they are."""

    def swapped(t: Tensor) -> Tensor:
        return t.transpose(0, 1) if t.dim() > 1 and t.shape[1] == rows else t

    return pytree.tree_map_only(Tensor, swapped, output)


def parts_of(x: Any, rows: int) -> Sequence[Any]:
    """The input of each step; with rows, ``x`` has the batch as its first axis."""
    xs, tree = flat(x)
    series = [(time_first(part) if rows else part).unbind() for part in xs]
    return [pytree.tree_unflatten(parts, tree) for parts in zip(*series, strict=True)]


def _zeros(leaf: Any) -> Any:
    return torch.zeros_like(leaf) if isinstance(leaf, Tensor) else leaf


def unmasked(call: Steps) -> list[Tensor]:
    """The input with zeros under the mask, where a NaN would reach gradients."""
    if call.mask is None:
        return call.xs
    clean = []
    for x in call.xs:
        if call.has_rows(x, 1) or not call.batched:
            x = torch.where(wide(call.mask, x, call), x, torch.zeros_like(x[:1, ...]))
        clean.append(x)
    return clean


def wide(flags: Tensor, like: Tensor, call: Steps) -> Tensor:
    """Flags ``[T, B]`` or ``[B]`` in a shape that broadcasts against a tensor."""
    flags = flags if call.batched else flags.squeeze(-1)
    return flags.reshape(*flags.shape, *[1] * (like.dim() - flags.dim()))


def _chosen(flags: Tensor, a: Sequence[Any], b: Sequence[Any], call: Steps) -> list[Any]:
    """Leaves of ``a`` for the rows with flags, and of ``b`` for the others."""
    chosen = []
    for one, other in zip(a, b, strict=True):
        if one is other:
            chosen.append(one)
            continue
        if not isinstance(other, Tensor) or (call.batched and not call.has_rows(other, 0)):
            refuse(
                "mask, lengths, resets", f"with a state or an output {describe(other)}",
                f"tensors whose first axis is the batch of {call.rows}", "Expand it to all rows.",
            )  # fmt: skip
        chosen.append(torch.where(wide(flags, other, call), one, other))
    return chosen
