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
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anycell.engines import cpu
from anycell.engines.cpu import aten
from anycell.layer.recipe import Recipe, dense
from anycell.layer.signature import Shape
from anycell.plan import LINE
from anycell.torch.threads import address, address_of, function

_ABI = 2 << 56 | 10 << 48  # of PyTorch 2.10, whose stable interface the kernel uses
_library = torch.library.Library("anycell", "FRAGMENT")
_library.define("play(Tensor[] arrays, int form, int seed) -> Tensor[]")
# For all tensors but dense ones on the CPU, which have the native kernel.
_library.impl("play", lambda arrays, form, seed: [], "CompositeExplicitAutograd")
# Not called through a function of torch's, which would be one more call of each layer.
play: Any = torch.ops.anycell.play.default._op


class Part(NamedTuple):
    """A result of a pass: of array ``number`` of those that the pass makes, the part of this layout
    from element ``offset`` on; or memory to which ``pieces`` of arrays are copied, one after the
    other: (number, first element, size).
    """

    number: int
    shape: Shape
    strides: Shape
    offset: int = 0
    pieces: tuple[tuple[int, int, int], ...] = ()


class Item(NamedTuple):
    """A tensor of a call, from byte ``offset`` on: array ``name`` of its pass, if it is a view with
    these ``strides``; or a part of an array that ``play`` makes in memory, see ``aten.GIVEN``; ""
    for a further part.
    """

    name: str
    strides: Shape = ()
    offset: int = 0
    into: int = -1
    size: int = 0
    added: int = 0


class Form:
    """The calls that ``play`` runs under one number.

    Attributes:
        names: of its results, for a caller who needs them.
        never: whether the operator can run none of them.
    """

    def __init__(self) -> None:
        records = table()
        self.number = -1 if records is None else records.form()
        self.names, self.never = tuple[Any, ...](), records is None

    def learn(
        self, recipe: Recipe, given: Mapping[str, Tensor], results: Sequence[Part], stream: int = 0,
        items: Sequence[tuple[Tensor, Item]] = (),
    ) -> None:  # fmt: skip
        """Lets ``play`` run the calls whose arrays are laid out like these.

        Args:
            given: the arrays of the call, in order; the recipe names some of them.
            stream: see ``Options``.
            items: what the call has instead, of which ``play`` makes these arrays.
        """
        records, attempt = table(), (self.number, recipe)
        if records is None or attempt in records.tried or "lasting" in recipe.hows:
            return
        records.tried.add(attempt)
        places = {name: place for place, name in enumerate(recipe.names)}
        room = -(-recipe.bytes // LINE) * LINE  # what ``play`` makes is behind the pass's own
        rows, bytes, read = list[aten.Given](), recipe.bytes, True
        for t, item in items or [(t, Item(n)) for n, t in given.items()]:
            name, _, offset, into, size, added = item
            read = name in places if name else read
            into = room + into if into >= 0 and read else -1
            if into >= 0:
                bytes = max(bytes, into + size * t.element_size())
            layout = _number(t.dtype), tuple(t.shape), t.stride()
            place = places.get(name, -1), t.element_size()
            rows.append(aten.Given(*layout, *place, offset, into, size, added))
        made, copied = made_by(recipe), list[Sequence[int]]()
        placed, numbers = len(made), list[int]()
        for part in results:
            whole = made[part.number]
            same = math.prod(part.shape) == math.prod(whole.shape)
            numbers.append(part.number)
            if part.pieces:
                itemsize, at = recipe.dtypes[part.number].itemsize, 0
                for number, offset, size in part.pieces:
                    line = number, offset * itemsize, len(made), at, size * itemsize
                    copied.append(line)
                    at += size * itemsize
            elif same and part.strides == dense(part.shape):
                made[part.number] = whole._replace(shape=part.shape, strides=part.strides)
                continue
            base = () if part.pieces else (part.number, part.offset)
            numbers[-1] = len(made)
            made.append(aten.Made(whole.dtype, part.shape, part.strides, *base))
        if not aten.fits(rows, made, recipe.fixed):
            return
        threads = recipe.options.threads
        if cpu.check.ON:  # what a pass touches follows from the layout of its arrays
            recipe.run([given[name] for name in recipe.names], recipe.options)
        values = {
            "placed": placed, "bytes": bytes, "table": recipe.table, "head": recipe.address,
            "execute": address_of(recipe.native), "stream": stream,
            "gang": cpu.pool.gang(threads) if threads > 1 else 0,
        }  # fmt: skip
        records.add(self.number, rows, made, numbers, copied, recipe.fixed, values, recipe)


def made_by(recipe: Recipe) -> list[aten.Made]:
    """The arrays that a recipe makes."""
    made = []
    for (_, what), how, dtype in zip(recipe.made, recipe.hows, recipe.dtypes, strict=True):
        shape = tuple(getattr(what, "shape", what))
        zeros = math.prod(shape) * dtype.itemsize if how == "zeros" else 0
        made.append(aten.Made(_number(dtype), shape, dense(shape), zeros=zeros))
    return made


def table() -> aten.Table | None:
    """The records of this process, with the operator's kernel; None for PyTorch before 2.10."""
    with _lock:
        return _table()


_lock = threading.Lock()


@functools.cache
def _table() -> aten.Table | None:
    functions = {name: address(name) for name in aten.TORCH}
    implement: Any = function("torch_library_impl")
    if implement is None or not all(functions.values()):
        return None
    functions |= {name: address_of(ctypes.CDLL(None)[name]) for name in aten.C}
    records = aten.Table(functions)
    of_cpu, begin = ctypes.c_void_p(), function("aoti_torch_library_init_impl")
    begin(b"anycell", b"CPU", __file__.encode(), 0, ctypes.byref(of_cpu))
    implement(of_cpu, b"play", ctypes.c_void_p(records.kernel), ctypes.c_uint64(_ABI))
    cpu.pool.CHANGED.append(records.forget)
    if hasattr(os, "register_at_fork"):
        lock = records.lock
        os.register_at_fork(
            before=lock.acquire, after_in_parent=lock.release, after_in_child=records.enter_process
        )
    return records


@functools.cache
def _number(dtype: torch.dtype) -> int:
    """PyTorch's number of a dtype."""
    number: int = function(f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")()
    return number
