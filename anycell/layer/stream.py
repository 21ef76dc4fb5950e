"""One step at a time: the weights packed once, then a call of the door per layer and step.

The kernel runs the cell with the input projection inside (``with_projection``), so that a
step is one call, and reads every weight once. The Python around it must be short: at 64
units it takes longer than the kernel.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from anycell.engines import cpu
from anycell.lang.cell import INPUT, Cell
from anycell.lang.transform import with_projection
from anycell.layer import Array, Direction, Host, contract, form, row_group
from anycell.layer.bounds import extent
from anycell.layer.signature import DENSE
from anycell.plan import plan

FORMS = 16  # numbers of rows whose tables and memory are kept


def place(
    host: Host, kernel: cpu.Kernel, entries: array[int], first: int, arrays: Mapping[str, Array]
) -> None:
    """Sets the addresses of arrays in the table of a call, and those strides that their names have.

    Args:
        first: where the entries of a direction begin.
        arrays: by name; those that the table has no entry for are left out.
    """
    each, axes, pointer = kernel.each, kernel.axes, host.pointer
    for name, value in arrays.items():
        if name in each:
            at = first + each[name]
            entries[at] = pointer(value)
            if name in axes:
                strides = array("q", host.strides(value))
                last = at + 1 + axes[name]
                entries[last - len(strides) : last] = strides


class _Layer:
    """A layer: its kernel, and its weights as that reads them."""

    def __init__(
        self, host: Host, cell: Cell, sizes: dict[str, int], dtype: str, w: Direction, threads: int
    ) -> None:
        self.inputs = w["weight_ih"].shape[1]
        self.plan = plan(
            with_projection(cell), sizes["H"], dtype, sizes={**sizes, INPUT: self.inputs}
        )
        self.kernel = kernel = cpu.compiled(self.plan)
        self.hyper, self.learned = cpu.hyperparameters(self.plan), w
        self.entries = array("q", bytes(8 * kernel.first(1)))
        self.set(
            self.entries, directions=1, steps=1, span=1, pack=1, packed=1, row_group=1,
            threads=min(threads, cpu.pool.MOST), gang=cpu.pool.gang(threads),
            least_work=form.WORTH_A_THREAD, hyper=self.hyper.__array_interface__["data"][0],
        )  # fmt: skip
        kernel.needs(self.entries.buffer_info()[0])
        at = kernel.shared
        self.packed = cpu.Block(self.entries[at["packed_bytes"]])
        self.bounds = {"packed": (self.packed.address, self.packed.address + self.packed.size)}
        self.learned_bounds = {}
        place(host, kernel, self.entries, kernel.first(0), w)
        if cpu.check.ON:
            self.learned_bounds.update({name: extent(host, weight) for name, weight in w.items()})
        # A call of no rows and no steps, behind the first, packs and does nothing else.
        scratch = cpu.Block(self.entries[at["scratch_bytes"]])
        self.set(self.entries, begin=1, scratch=scratch.address, packed=self.packed.address)
        self.bounds["scratch"] = scratch.address, scratch.address + scratch.size
        cpu.run(kernel, self.entries, (self.bounds, [self.learned_bounds]))
        self.set(self.entries, begin=0, count=1, pack=0)

    def set(self, entries: array[int], **values: int) -> None:
        """Sets entries of the whole call."""
        for name, value in values.items():
            entries[self.kernel.shared[name]] = value


class _Table(NamedTuple):
    """The table of a step of one layer, for one number of rows."""

    entries: array[int]
    address: int
    threads: int
    alive: tuple[object, ...]
    bounds: dict[str, cpu.check.Bounds]


class _Steps:
    """Values that steps on one number of rows share, and their tables, a set for each caller.

    Attributes:
        output, states: arrays of the shapes of the results.
        start: the states that the cell declares, which resets restore unless others are given.
        slots: per state an array of its shape, its entries in the tables, before and after the
            step, and the bytes of a layer.
        free: sets of tables that are not in use.
    """

    def __init__(self, stream: Stream, rows: int, threads: int) -> None:
        host, layers = stream.host, stream.layers
        sizes, itemsize = layers[0].plan.sizes, layers[0].plan.itemsize
        self.stream, self.rows, self.threads = stream, rows, threads
        self.widths = [sizes[state.size] for state in stream.states]
        self.states = [host.empty((len(layers), rows, width)) for width in self.widths]
        self.start = [host.empty((len(layers), rows, width)) for width in self.widths]
        for array_, state in zip(self.start, stream.states, strict=True):
            array_[:] = state.initial
        self.output = host.empty((rows, self.widths[0]))
        self.bytes = [rows * width * itemsize for width in self.widths]
        self.slots = list(zip(self.states, stream.before, stream.after, self.bytes, strict=True))
        self.free = [self.calls()]

    def calls(self) -> list[_Table]:
        """Tables for a step; they go to ``free`` after it."""
        return [self._call(layer, k) for k, layer in enumerate(self.stream.layers)]

    def _call(self, layer: _Layer, k: int) -> _Table:
        entries, kernel, host = layer.entries[:], layer.kernel, self.stream.host
        threads = min(self.threads, cpu.pool.MOST)
        layer.set(entries, batch=self.rows, threads=threads, row_group=row_group(self.rows))
        kernel.needs(entries.buffer_info()[0])
        threads = entries[kernel.shared["parts"]]
        # The states before and after the step: two slots that take turns.
        slots = [host.empty((2, self.rows, width)) for width in self.widths]
        block = cpu.Block(entries[kernel.shared["scratch_bytes"]])
        layer.set(
            entries, threads=threads, gang=0, scratch=block.address, hidden=host.pointer(slots[0])
        )
        entries[kernel.first(0) + kernel.each["gates rows"]] = layer.inputs
        bounds = {"scratch": (block.address, block.address + block.size)}
        for name, slot, start in zip(self.stream.names, slots, self.start, strict=True):
            # Addresses of states come with each step, strides stay.
            arrays = {f"{what} {name}": slot[0] for what in ("state", "final")}
            lasting = {f"sequence {name}": slot, f"reset_state {name}": start[k]}
            place(host, kernel, entries, kernel.first(0), {**arrays, **lasting})
            if cpu.check.ON:
                bounds.update({what: extent(host, array_) for what, array_ in lasting.items()})
        if cpu.check.ON:
            bounds["hidden"] = extent(host, slots[0])
        return _Table(entries, entries.buffer_info()[0], threads, (block, slots), bounds)


class Stream:
    """Layers of one direction, ready to step in evaluation.

    Args:
        host: array operations of the framework.
        cell: one that the CPU engine runs.
        sizes: what its size symbols stand for.
        dtype: "float32" or "float64".
        weights: what each layer learns, by name; they are copied as they are now, all but the
            parameters of the cell.
        threads: for packing.
    """

    def __init__(
        self,
        host: Host,
        cell: Cell,
        sizes: dict[str, int],
        dtype: str,
        weights: Sequence[Mapping[str, Array]],
        threads: int,
    ) -> None:
        self.host, self.states, self.static = host, cell.states, cell.static
        self.names = cell.state_names
        self._like, self._pointer, self._fit = host.like, host.pointer, host.fit
        whole = plan(cell, sizes["H"], dtype, sizes=sizes)
        self.layers = []
        for w in weights:
            fit = contract.weights(host, whole, w, w["weight_ih"].shape[1])
            self.layers.append(_Layer(host, cell, sizes, dtype, fit, threads))
        self.itemsize = self.layers[0].plan.itemsize
        self.hidden, self.width = sizes["H"], weights[0]["weight_ih"].shape[1]
        self.shape = [(len(weights), sizes[state.size]) for state in cell.states]
        # Layers differ in the size of their input, and their tables in nothing but numbers.
        kernel = self.layers[0].kernel
        first, each = kernel.first(0), kernel.each
        self._x, self._static = first + each["gates"], first + each["static"]
        self._out, self._gang = kernel.shared["out"], kernel.shared["gang"]
        self.before = [first + each[f"state {name}"] for name in self.names]
        self.after = [first + each[f"final {name}"] for name in self.names]
        self._restored = [first + each[f"reset_state {name}"] for name in self.names]
        self._resets = kernel.shared["resets"]
        self._forms: dict[tuple[int, int], _Steps] = {}

    def step(
        self,
        rows: int,
        x: Array,
        states: Sequence[Array] | None,
        static: Array | None,
        threads: int,
        resets: Array | None = None,
        reset_state: Sequence[Array] | None = None,
    ) -> tuple[Array, list[Array]]:
        """One step.

        Args:
            x: ``[rows, I]``, contiguous, as all else, but not necessarily aligned.
            states: ``[layers, rows, size]`` each; None for what the cell declares.
            static: ``[rows, H]``, for a cell that declares it.
            threads: at most this many.
            resets: ``[rows]``, of bytes, not zero where a row's states are restored before the
                step.
            reset_state: what they restore, as ``states``, but aligned; None, or empty, for what the
                cell declares.

        Returns:
            the output ``[rows, size]`` and the new states.
        """
        form = self._forms.get((rows, threads))
        if form is None:
            if len(self._forms) == FORMS:
                self._forms.clear()
            form = self._forms[rows, threads] = _Steps(self, rows, threads)
        like, pointer = self._like, self._pointer
        # A set of tables belongs to one step at a time, of all threads that step this layer.
        try:
            calls = form.free.pop()
        except IndexError:
            calls = form.calls()
        new, output, itemsize = [], like(form.output), self.itemsize
        alive = []  # the states before, as long as the kernels run
        for state, (template, before, after, size) in zip(states or form.start, form.slots):  # noqa: B905
            result = like(template)
            new.append(result)
            here, there = pointer(state), pointer(result)
            if here % itemsize:  # what comes from a file or a packed record may lie anywhere
                state = self._fit(state, DENSE)
                here = pointer(state)
            alive.append(state)
            for call in calls:
                entries = call[0]
                entries[before], entries[after] = here, there
                here, there = here + size, there + size
        at, below = pointer(x), pointer(new[0])
        if at % itemsize:
            x = self._fit(x, DENSE)
            at = pointer(x)
        if static is not None:
            static = self._fit(static, DENSE)
            for call in calls:
                call[0][self._static] = pointer(static)
        flags = 0 if resets is None else pointer(resets)
        if flags and reset_state:
            self._restore(form, calls, reset_state)
        calls[-1][0][self._out] = pointer(output)
        for layer, table in zip(self.layers, calls):  # noqa: B905
            entries, address, parts, _, _ = table
            entries[self._x], entries[self._resets] = at, flags
            if parts > 1:
                entries[self._gang] = cpu.pool.gang(parts)
            if cpu.check.ON:
                entering = x if layer is self.layers[0] else new[0]
                each = {"gates": entering, "static": static}
                restored = reset_state or () if flags else ()
                for kind, arrays in (("state", alive), ("final", new), ("reset_state", restored)):
                    each |= {f"{kind} {name}": a for name, a in zip(self.names, arrays)}  # noqa: B905
                self._check(layer, table, {"out": output, "resets": resets}, each)
            layer.kernel.door(address)
            at, below = below, below + form.bytes[0]
        if flags and reset_state:
            self._restore(form, calls, form.start)
        form.free.append(calls)
        return output, new

    def _restore(self, form: _Steps, calls: Sequence[_Table], values: Sequence[Array]) -> None:
        """Says in the tables of a step what resets restore."""
        for value, entry, size in zip(values, self._restored, form.bytes):  # noqa: B905
            at = self._pointer(value)
            for call in calls:
                call[0][entry] = at
                at += size

    def _check(
        self, layer: _Layer, table: _Table, shared: dict[str, Any], each: dict[str, Any]
    ) -> None:
        """Checks that arrays have all numbers that kernels touch."""
        both = [
            {name: extent(self.host, array) for name, array in arrays.items() if array is not None}
            for arrays in (shared, each)
        ]
        shared = {**layer.bounds, **table.bounds, **both[0]}
        each = {**layer.learned_bounds, **table.bounds, **both[1]}
        cpu.check.check(layer.kernel, table.entries, (shared, [each]))
