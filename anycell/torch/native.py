"""``anycell::play``: passes as calls of one operator whose kernel is native.

A ``Form`` stands for all calls that differ only in the layout of their arrays. The first call of
each layout runs as Python drafts it, and is learnt; ``play`` runs the later ones. It knows nothing
of autograd, modes or other tensors than memory, so its callers have excluded these.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anycell.engines import cpu
from anycell.engines.cpu import aten
from anycell.layer.recipe import Recipe, dense
from anycell.layer.signature import Shape
from anycell.torch.threads import address, function

_ABI = 2 << 56 | 10 << 48  # of PyTorch 2.10, whose stable interface the kernel uses
_library = torch.library.Library("anycell", "FRAGMENT")
_library.define("play(Tensor[] arrays, int form, int seed) -> Tensor[]")
# For all tensors but dense ones on the CPU, which have the native kernel.
_library.impl("play", lambda arrays, form, seed: [], "CompositeExplicitAutograd")
# Not called through a function of torch's, which would be one more call of each layer.
play: Any = torch.ops.anycell.play.default._op


class Part(NamedTuple):
    """A result of a pass: the array that the pass makes under this number, or a part of it from
    element ``offset`` on.
    """

    number: int
    shape: Shape
    strides: Shape
    offset: int = 0


class Form:
    """The calls that ``play`` runs under one number, as one thread limit and processor run them.

    Attributes:
        further: what the callers need to know of the form.
    """

    def __init__(self, further: Any = None) -> None:
        table = _table()
        self.number = -1 if table is None else table.form()
        self.further = further
        self._tried: set[Recipe] = set()

    def learn(
        self,
        recipe: Recipe,
        given: Iterable[tuple[str, Tensor]],
        results: Sequence[Part],
        stream: int = 0,
        copied: Sequence[tuple[Part, int]] = (),
    ) -> None:
        """Lets ``play`` run the calls whose arrays are laid out like these.

        Args:
            given: the arrays of the call in order, with the names that the recipe has for them.
            results: in order; all of them distinct memory.
            stream: see ``Options``.
            copied: ...
        """
        table = _table()
        if table is None or recipe in self._tried or "lasting" in recipe.hows:
            return
        self._tried.add(recipe)
        named = list(given)
        rows = [
            aten.Given(
                _number(t.dtype), tuple(t.shape), t.stride(),
                recipe.names.index(name) if name in recipe.names else -1, t.element_size(),
            )
            for name, t in named
        ]  # fmt: skip
        made = []
        for (_, what), how, dtype in zip(recipe.made, recipe.hows, recipe.dtypes, strict=True):
            shape = tuple(getattr(what, "shape", what))
            zeros = math.prod(shape) * dtype.itemsize if how == "zeros" else 0
            made.append(aten.Made(_number(dtype), shape, dense(shape), zeros=zeros))
        placed, numbers = len(made), []
        for part in results:
            whole = made[part.number]
            same = math.prod(part.shape) == math.prod(whole.shape)
            if same and part.strides == dense(part.shape):
                made[part.number] = whole._replace(shape=part.shape, strides=part.strides)
                numbers.append(part.number)
            else:
                numbers.append(len(made))
                made.append(aten.Made(whole.dtype, *part[1:3], part.number, part.offset))
        options = recipe.options
        if not aten.fits(rows, made, recipe.fixed):
            return
        if cpu.check.ON:  # what a pass touches follows from the layout of its arrays
            arrays = dict(named)
            recipe.run([arrays[name] for name in recipe.names], options)
        values = {
            "placed": placed, "bytes": recipe.bytes, "table": recipe.table, "head": recipe.address,
            "execute": ctypes.cast(recipe.native, ctypes.c_void_p).value or 0, "stream": stream,
            "gang": cpu.pool.gang(options.threads) if options.threads > 1 else 0,
        }  # fmt: skip
        table.add(self.number, rows, made, numbers, (), recipe.fixed, values, recipe)


@functools.cache
def _table() -> aten.Table | None:
    """The records of this process, with the operator's kernel; None for PyTorch before 2.10."""
    functions = {name: address(name) for name in aten.TORCH}
    implement: Any = function("torch_library_impl")
    if implement is None or not all(functions.values()):
        return None
    libc = ctypes.CDLL(None)
    functions |= {name: ctypes.cast(libc[name], ctypes.c_void_p).value or 0 for name in aten.C}
    table = aten.Table(functions)
    of_cpu, begin = ctypes.c_void_p(), function("aoti_torch_library_init_impl")
    begin(b"anycell", b"CPU", __file__.encode(), 0, ctypes.byref(of_cpu))
    implement(of_cpu, b"play", ctypes.c_void_p(table.kernel), ctypes.c_uint64(_ABI))
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=table.enter_process)
    return table


@functools.cache
def _number(dtype: torch.dtype) -> int:
    """PyTorch's number of a dtype."""
    number: int = function(f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")()
    return number
