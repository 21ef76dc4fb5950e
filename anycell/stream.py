"""One step at a time: the weights packed once, then a kernel call per layer and step.

The kernel is that of the cell with the input projection inside (``with_projection``), so that a
step is one call, and reads every weight once. What lies around that call is to be as short: at 64
units it takes longer than the kernel.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from anycell.engines import cpu
from anycell.lang.cell import INPUT, Cell
from anycell.lang.transform import with_projection
from anycell.layer import Array, Direction, Host, contract, row_group, share
from anycell.layer.run import extent
from anycell.layer.signature import DENSE
from anycell.plan import plan

FORMS = 16  # numbers of rows whose tables and memory are kept


class _Layer:
    """A layer: its kernel, and its weights as that reads them."""

    def __init__(
        self, host: Host, cell: Cell, sizes: dict[str, int], dtype: str, w: Direction, threads: int
    ) -> None:
        self.plan = plan(
            with_projection(cell),
            sizes["H"],
            dtype,
            sizes={**sizes, INPUT: w["weight_ih"].shape[1]},
        )
        self.kernel = kernel = cpu.compiled(self.plan)
        self.hyper = cpu.hyperparameters(self.plan)
        self.keeps_alive = w
        itemsize = self.plan.itemsize
        counts = [n * itemsize for n in kernel.packed_elements]
        self.block, places = cpu.Scratch().take(counts)
        self.table = cpu.Table(kernel.index)
        self.table.set(
            steps=1,
            yield_to=cpu.pool.yield_address(),
            hyper=self.hyper.__array_interface__["data"][0],
        )
        for i, name in enumerate(cell.param_names):
            self.table.set(**{f"param{i}": host.pointer(w[name])})
        for k, linear in enumerate(self.plan.cell.linears):
            weight, bias = w[linear.weight], w.get(linear.bias_name)
            source, strides = host.pointer(weight), host.strides(weight)
            address = 0 if bias is None else host.pointer(bias)
            bounds = extent(host, weight) if cpu.check.ON else None
            cpu.pack(kernel, k, places[k], source, strides, 0, address, threads, bounds=bounds)
            self.table.set(**{f"weights{k}": places[k]})


class _Call(NamedTuple):
    """What a step of one layer needs, for so many rows."""

    entries: array[int]
    run: Callable[[int, int, int], object]  # of the header's address, 0, and the number of threads
    address: int
    threads: int
    alive: tuple[object, ...]


class _Form:
    """What steps on so many rows share, and their argument tables: a set for each caller at a time.

    Attributes:
        output, states: arrays of the shapes of the results.
        start: the states that the cell declares.
        bytes: of a layer, per state.
        slots: per state an array of its shape, its entry in the tables, and those bytes.
        free: sets of tables that are not in use.
    """

    def __init__(self, stream: Stream, rows: int, threads: int) -> None:
        host, layers = stream.host, stream.layers
        sizes = layers[0].plan.sizes
        self.stream, self.rows, self.threads = stream, rows, threads
        self.widths = [sizes[state.size] for state in stream.states]
        self.states = [host.empty((len(layers), rows, width)) for width in self.widths]
        self.start = [host.empty((len(layers), rows, width)) for width in self.widths]
        for array_, state in zip(self.start, stream.states, strict=True):
            array_[:] = state.initial
        self.output = host.empty((rows, self.widths[0]))
        self.bytes = [rows * width * layers[0].plan.itemsize for width in self.widths]
        self.slots = list(zip(self.states, stream.places, self.bytes, strict=True))
        self.free = [self.calls()]

    def calls(self) -> list[_Call]:
        """Tables for a step; they go to ``free`` after it."""
        return [self._call(layer, layer is self.stream.layers[-1]) for layer in self.stream.layers]

    def _call(self, layer: _Layer, last: bool) -> _Call:
        table, kernel = layer.table.copy(), layer.kernel
        threads, units = share(kernel, kernel.work * self.rows, self.rows, 1, self.threads)
        workspace = cpu.Block(kernel.workspace(self.rows) * threads + cpu.LINE)
        table.set(
            batch=self.rows, row_group=row_group(self.rows), units_split=units,
            workspace=workspace.address + -workspace.address % cpu.LINE,
            workspace_stride=kernel.workspace(self.rows), x_b=layer.plan.sizes[INPUT],
            out_b=self.widths[0] if last else 0,
        )  # fmt: skip
        for i, width in enumerate(self.widths):
            table.set(**{f"state{i}_b": width})
        header = array("q", [1, table.address])
        run, alive = cpu.pool.entry(kernel.run, threads), (table, header, workspace)
        return _Call(table.entries, run, header.buffer_info()[0], threads, alive)


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
        self._like, self._pointer = host.like, host.pointer
        self._fit = host.fit
        whole = plan(cell, sizes["H"], dtype, sizes=sizes)
        self.layers = []
        for w in weights:
            fit = contract.weights(host, whole, w, w["weight_ih"].shape[1])
            self.layers.append(_Layer(host, cell, sizes, dtype, fit, threads))
        self.itemsize = self.layers[0].plan.itemsize
        self.hidden, self.width = sizes["H"], weights[0]["weight_ih"].shape[1]
        self.shape = [(len(weights), sizes[state.size]) for state in cell.states]
        index = self.layers[0].kernel.index
        self._x, self._out, self._static = index["x"], index["out"], index["static"]
        self._barrier = len(index) + cpu.LINE // 8
        # Of each state the entry of its address; that of its stride follows.
        self.places = [index[f"state{i}"] for i in range(len(cell.states))]
        self._forms: dict[tuple[int, int], _Form] = {}

    def step(
        self,
        rows: int,
        x: Array,
        states: Sequence[Array] | None,
        static: Array | None,
        threads: int,
    ) -> tuple[Array, list[Array]]:
        """One step.

        Args:
            x: ``[rows, I]``, contiguous, as all else, but not necessarily aligned.
            states: ``[layers, rows, size]`` each; None for what the cell declares.
            static: ``[rows, H]``, for a cell that declares it.
            threads: at most so many.

        Returns:
            the output ``[rows, size]`` and the new states.
        """
        form = self._forms.get((rows, threads))
        if form is None:
            if len(self._forms) == FORMS:
                self._forms.clear()
            form = self._forms[rows, threads] = _Form(self, rows, threads)
        like, pointer = self._like, self._pointer
        # A set of tables belongs to one step at a time, of all threads that step this layer.
        try:
            calls = form.free.pop()
        except IndexError:
            calls = form.calls()
        new, output, itemsize = [], like(form.output), self.itemsize
        alive = []  # the states before, as long as the kernels run
        for before, (template, place, size) in zip(states or form.start, form.slots):  # noqa: B905
            after = like(template)
            new.append(after)
            here = pointer(before)
            if here % itemsize:  # what comes from a file or a packed record may lie anywhere
                before = self._fit(before, DENSE)
                here = pointer(before)
            alive.append(before)
            # From the state before to the one after is one step of the kernel.
            stride = (pointer(after) - here) // itemsize
            for call in calls:
                entries = call[0]
                entries[place], entries[place + 1] = here, stride
                here += size
        at, below, out = pointer(x), pointer(new[0]), pointer(output)
        if at % itemsize:
            x = self._fit(x, DENSE)
            at = pointer(x)
        if static is not None:
            static = self._fit(static, DENSE)
        if cpu.check.ON:
            self._check(rows, x, alive, static, [*new, output])
        for entries, run, address, parts, _ in calls:
            entries[self._x], entries[self._out], entries[self._barrier] = at, out, 0
            if static is not None:
                entries[self._static] = pointer(static)
            run(address, 0, parts)
            at, below = below, below + form.bytes[0]
        form.free.append(calls)
        return output, new

    def _check(
        self,
        rows: int,
        x: Array,
        states: Sequence[Array],
        static: Array | None,
        results: Sequence[Array],
    ) -> None:
        """That kernels find as many numbers as they touch, all of them one after the other."""
        shapes = [(layers, rows, width) for layers, width in self.shape]
        wanted = [(rows, self.width), *shapes, *shapes, (rows, shapes[0][2])]
        arrays = [x, *states, *results]
        if static is not None:
            arrays, wanted = [*arrays, static], [*wanted, (rows, self.hidden)]
        for array_, shape in zip(arrays, wanted, strict=True):
            first, last = extent(self.host, array_)
            size = math.prod(shape) * self.itemsize
            span = cpu.check.Span("an array of a step", first, first + size, self.itemsize)
            cpu.check.inside(span, (first, last))
