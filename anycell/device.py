"""One layer of any cell on a GPU: what ``anycell.layer`` is on the CPU, with the same arguments.

Arrays come through the ``Host`` of ``anycell.engines.gpu``. Directions run one after the other, in
chunks of time: the input projection of a chunk, its steps; backward its steps, then the matmuls for
the gradients of weights and input. Gradients that add up over chunks are float32 in any dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from anycell.engines import gpu
from anycell.engines.gpu import Call, Form, Host, Span, capacity
from anycell.engines.gpu.step import Step, print_step, staged
from anycell.engines.gpu.text import Printed, apart, keeps
from anycell.lang.cell import RECURRENT, Linear
from anycell.layer import Options, Saved, Weights, reset_values
from anycell.plan import Plan, is_narrow

Array = Any
CHUNK_BYTES = 64 << 20  # of projected gates for one direction


Kernels = Step | Printed


@functools.lru_cache(maxsize=256)
def _printed(plan: Plan, form: Form, choice: capacity.Choice) -> Kernels:
    return print_step(plan, form) if choice.tier == 3 else gpu.print_whole(plan, form, choice)


def _kernels(host: Host, plan: Plan, form: Form, batch: int) -> Kernels:
    """The kernels of the tier that fits."""
    choice = capacity.choose(plan, host.limits, form.backward, host.tier, batch)
    return _printed(plan, form, choice)


def _exchange(host: Host, plan: Plan, kernels: Kernels, batch: int) -> dict[str, Any]:
    """What programs that wait for one another need; first, whether those before waited in vain."""
    if not isinstance(kernels, Printed) or not kernels.cooperative:
        return {}
    if int(host.trouble[0]):
        host.trouble[0] = 0
        raise RuntimeError(
            "GPU kernels of an earlier call (tier 2) gave up: their programs, which must all run "
            f"at once, waited for one another for {host.patience / 1e9:g} s. The results of that "
            "call are NaN. Is the device shared, or a debugger attached? "
            "anycell.torch.device.DeviceHost.tier = 3 does without such kernels."
        )
    groups, programs = gpu.grid(kernels, plan, batch)
    return {
        "flags": host.flags(2 * groups * programs),
        "trouble": host.trouble,
        "patience": host.patience,
        "done": 0,
        "behind": 0,
        "close": 1,
    }


def forward(
    host: Host, plan: Plan, x: Array, weights: Sequence[Weights], options: Options, *, keep: bool
) -> tuple[Array, list[Array], Saved | None]:
    """Runs a layer; arguments and results are those of ``anycell.layer.forward``.

    The plan is one for engine "gpu", and all arrays are on the device, of the plan's dtype.
    """
    if options.mask is not None and options.resets is not None:
        options = replace(options, resets=options.resets & options.mask)
    steps, batch = x.shape[0], x.shape[1]
    widths = [plan.sizes[s.size] for s in plan.cell.states]
    first, directions = widths[0], len(weights)
    zeroed = options.mask is not None and not options.repeat
    slots = steps + 1 + any(w.reverse for w in weights)
    hidden = host.empty((slots, batch, directions * first))
    out = host.empty((steps, batch, directions * first)) if zeroed else hidden[1 : steps + 1]
    saved = Saved(x, weights, options, hidden, [], [], [])
    finals = [host.empty((directions, batch, width)) for width in widths]
    for d in range(directions):
        for states, final in zip(finals, _forward(host, plan, saved, d, out, keep), strict=True):
            states[d] = final
    return out, finals, saved if keep else None


def _forward(host: Host, plan: Plan, saved: Saved, d: int, out: Array, keep: bool) -> list[Array]:
    """One direction; adds to ``saved`` what is kept of it, and returns the final states."""
    x, w, options, cell = saved.x, saved.weights[d], saved.options, plan.cell
    steps, batch, reverse = x.shape[0], x.shape[1], w.reverse
    form = _form(host, plan, w, options, backward=False, keep=keep)
    widths = [plan.sizes[s.size] for s in cell.states]
    column, sign = d * widths[0], -1 if reverse else 1
    values = _constants(host, plan, w, options, d)
    saved.hidden[steps + 1 if reverse else 0, :, column : column + widths[0]] = w.initial[0]
    sequences: list[Array | None] = [None]
    for i, width in enumerate(widths[1:], 1):
        work = values[f"work{i}"] = host.empty((2, batch, width), wide=True)
        work[0] = w.initial[i]
        sequence = host.empty((steps + 1, batch, width)) if keeps(plan, form, i) else None
        if sequence is not None:
            sequence[steps if reverse else 0] = w.initial[i]
        sequences.append(sequence)
    if options.resets is not None:
        saved.reset.append(reset_values(host.empty, plan, w))
        _point_resets(values, saved.reset[-1])
    kept = host.empty((steps, batch, _saved_width(plan))) if keep else None
    values |= _products(host, plan, form, batch)
    width = len(cell.gates) * plan.hidden_size
    matrices = [_used(host, plan, l, w.matmul(l)[0]) for l in cell.linears]

    kernels, turn = _kernels(host, plan, form, batch), 0
    values |= _exchange(host, plan, kernels, batch)
    projected: Array | None = None
    limit = CHUNK_BYTES if w.ih is not None else 1 << 62
    for done, count in gpu.chunks(steps, batch * width * plan.itemsize, limit):
        begin = steps - done - count if reverse else done
        time = begin + count - 1 if reverse else begin
        spans = {"state0": Span(saved.hidden, steps + 1 - done if reverse else done, sign, column)}
        for i, sequence in enumerate(sequences):
            if sequence is not None:
                spans[f"state{i}"] = Span(sequence, steps - done if reverse else done, sign)
        spans["x"] = Span(x, time, sign)
        if w.ih is not None:
            if projected is None:
                projected = host.empty((count, batch, width))
            rows = x[begin : begin + count].reshape(count * batch, x.shape[2])
            into = projected[:count].reshape(count * batch, width)
            host.matmul(rows, host.turned(w.ih), into)
            spans["x"] = Span(projected, time - begin, sign)
        if form.apart:
            spans["out"] = Span(out, time, sign, column)
        if kept is not None:
            spans["saved"] = Span(kept, time, sign)
        spans |= _flags(options, time, sign)
        values["turn"] = turn
        if "done" in values:
            values["done"] = done
        call = Call(
                host, plan, form, values, spans, matrices, batch, count,
                _draws(options, d, time, sign, form),
            )  # fmt: skip
        if batch:
            turn += gpu.run(kernels, call)
    if keep:
        saved.states.append(sequences)
        saved.values.append(kept)
    end = 1 if reverse else steps
    final = [host.rounded(saved.hidden[end, :, column : column + widths[0]], copy=True)]
    return final + [
        host.rounded(values[f"work{i}"][turn & 1], copy=True) for i in range(1, len(widths))
    ]


def backward(
    host: Host,
    plan: Plan,
    saved: Saved,
    dy: Array | None,
    dfinal: Sequence[Sequence[Array | None]],
    *,
    need_x: bool = True,
    need_weights: bool = True,
) -> tuple[Array | None, list[Weights]]:
    """The gradients of a layer; arguments and results are those of ``anycell.layer.backward``."""
    x, weights = saved.x, saved.weights
    project = weights[0].ih is not None
    dx = host.empty(tuple(x.shape)) if need_x or not project else None
    if dy is None:
        dy = host.zeros((1, x.shape[1], saved.hidden.shape[2]))
    found = [
        _backward(host, plan, saved, d, dy, dfinal[d], dx, need_weights)
        for d in range(len(weights))
    ]
    return dx, found


def _backward(
    host: Host,
    plan: Plan,
    saved: Saved,
    d: int,
    dy: Array,
    dfinal: Sequence[Array | None],
    dx: Array | None,
    need_weights: bool,
) -> Weights:
    """One direction. Its part of ``dx`` overwrites that, or adds to what the first one left."""
    x, w, options, cell = saved.x, saved.weights[d], saved.options, plan.cell
    steps, batch, reverse = x.shape[0], x.shape[1], w.reverse
    form = _form(host, plan, w, options, backward=True)
    kernels = _kernels(host, plan, form, batch)
    widths = [plan.sizes[s.size] for s in cell.states]
    column, sign = d * widths[0], 1 if reverse else -1  # against the direction
    width, project = len(cell.gates) * plan.hidden_size, w.ih is not None
    values = _constants(host, plan, w, options, d) | _exchange(host, plan, kernels, batch)
    if saved.reset:
        _point_resets(values, saved.reset[d])
    for i, (size, given) in enumerate(zip(widths, dfinal, strict=True)):
        values[f"dstate{i}"] = host.zeros((2, batch, size), wide=True)
        if given is not None:
            values[f"dstate{i}"][0] = given
        if saved.reset:
            values[f"dreset{i}"] = host.zeros((batch, size), wide=True)
    if cell.params:
        values["dparam"] = host.zeros(
            (_row_blocks(kernels, batch), len(cell.params) * plan.hidden_size), wide=True
        )
    if cell.static is not None:
        values["dstatic"] = host.zeros((batch, plan.hidden_size), wide=True)
    values |= _products(host, plan, form, batch)
    sums = _Sums(host, plan, w, need_weights)
    matrices = [_used(host, plan, l, w.matmul(l)[0]) for l in cell.linears]
    for i, sequence in enumerate(saved.states[d]):
        if sequence is not None:
            values[f"state{i}__next"] = -sign * host.strides(sequence)[0]
    values["state0__next"] = -sign * host.strides(saved.hidden)[0]

    shared = {k: plan.shares_gradient(l) for k, l in enumerate(cell.linears)}
    own = {k: apart(plan, form, l) for k, l in enumerate(cell.linears)}
    buffers: dict[str, Array] = {}
    turn = 0
    for done, count in gpu.chunks(steps, batch * width * plan.itemsize, CHUNK_BYTES):
        begin = done if reverse else steps - done - count
        end = begin + count
        time = begin if reverse else end - 1
        if not buffers:
            if project:
                buffers["dx"] = host.empty((count, batch, width))
            for k, l in enumerate(cell.linears):
                if not shared[k]:
                    size = len(l.outputs) * plan.sizes[l.out_size]
                    buffers[f"dr{k}"] = host.empty((count, batch, size))
                if own[k]:
                    size = plan.sizes[l.in_size]
                    buffers[f"operand{k}"] = host.empty((count, batch, size))
        spans = {name: Span(buffer, time - begin, sign) for name, buffer in buffers.items()}
        if not project:
            spans["dx"] = Span(dx, time, sign)
        spans["saved"] = Span(saved.values[d], time, sign)
        spans["dy"] = Span(dy, *((time, sign) if dy.shape[0] == steps else (0, 0)), column)
        # The slot of a state before a step, and next to it, where the direction goes, after it.
        spans["state0"] = Span(saved.hidden, time + 2 * reverse, sign, column)
        for i, sequence in enumerate(saved.states[d]):
            if sequence is not None:
                spans[f"state{i}"] = Span(sequence, time + reverse, sign)
        spans |= _flags(options, time, sign)
        values["turn"] = turn
        if "done" in values:
            values["done"] = done
        if batch:
            call = Call(
                host, plan, form, values, spans, matrices, batch, count,
                _draws(options, d, time, sign, form),
            )  # fmt: skip
            turn += gpu.run(kernels, call)

        rows = count * batch
        dg: Any = (buffers["dx"][:count] if project else dx[begin:end]).reshape(rows, width)  # type: ignore[index]
        if need_weights:
            part = None
            if project:
                part = x[begin:end]
                if options.mask is not None:
                    part = host.masked(part, options.mask[begin:end])
                part = part.reshape(rows, x.shape[2])
            shift = 2 * reverse
            hidden = saved.hidden[begin + shift : end + shift, :, column : column + widths[0]]
            pairs = []
            for k, l in enumerate(cell.linears):
                size = len(l.outputs) * plan.sizes[l.out_size]
                dr = dg if shared[k] else buffers[f"dr{k}"][:count].reshape(rows, size)
                operand = buffers[f"operand{k}"][:count] if own[k] else hidden
                pairs.append((dr, operand.reshape(rows, plan.sizes[l.in_size])))
            sums.add(dg, part, pairs)
        if project and dx is not None:
            into = dx[begin:end].reshape(rows, x.shape[2])
            (host.matmul_add if d else host.matmul)(dg, w.ih, into)
    return sums.result(values, turn & 1)


# -- what both passes share ------------------------------------------------------------------------


def _form(
    host: Host, plan: Plan, w: Weights, options: Options, backward: bool, keep: bool = False
) -> Form:
    cell = plan.cell
    return Form(
        backward=backward,
        mask=options.mask is not None,
        resets=options.resets is not None,
        repeat=options.mask is not None and options.repeat,
        draw=options.training and bool(cell.keeps),
        keep=keep,
        bias_x=w.bias_ih is not None and not backward,
        biases=tuple(w.matmul(l)[1] is not None and not backward for l in cell.linears),
        tf32=host.tf32 and plan.dtype == "float32",
    )


def _constants(host: Host, plan: Plan, w: Weights, options: Options, d: int) -> dict[str, Any]:
    """Arguments that are the same for all chunks."""
    cell = plan.cell
    values: dict[str, Any] = {f"param{i}": p for i, p in enumerate(w.params)}
    values |= {f"bias{k}": w.matmul(l)[1] for k, l in enumerate(cell.linears)}
    values |= {"bias_x": w.bias_ih, "static": w.static}
    if cell.hyper:
        values["hyper"] = host.numbers(list(cell.hyper.values()))
    return values


def _draws(
    options: Options, d: int, time: int, sign: int, form: Form
) -> tuple[int, int, int, int] | None:
    """What random masks count from."""
    return (options.seed, 2 * options.stream + d, time, sign) if form.draw else None


def _flags(options: Options, time: int, sign: int) -> dict[str, Span]:
    found = {"mask": options.mask, "resets": options.resets}
    return {name: Span(a, time, sign) for name, a in found.items() if a is not None}


def _products(host: Host, plan: Plan, form: Form, batch: int) -> dict[str, Array]:
    """Buffers between matmuls and kernels: float32 results, and operands computed in the step."""
    found = {}
    for k, l in enumerate(plan.cell.linears):
        out, into = len(l.outputs) * plan.sizes[l.out_size], plan.sizes[l.in_size]
        width, name = (into, f"back{k}") if form.backward else (out, f"product{k}")
        shape = (batch, width) if l.heads == 1 else (l.heads, batch, width // l.heads)
        found[name] = host.empty(shape, wide=True)
        if not form.backward and staged(plan, form, l):
            found[f"operand{k}"] = host.empty((batch, into))
    return found


def _used(host: Host, plan: Plan, l: Linear, weight: Array) -> Array:
    """The rows of a weight that belong to outputs which the cell uses."""
    if l.outputs == l.declared:
        return host.rounded(weight)
    each, axis = plan.sizes[l.out_size] // l.heads, len(weight.shape) - 2
    shape = list(weight.shape)
    shape[axis] = each * len(l.outputs)
    used = host.empty(tuple(shape))
    for n, output in enumerate(l.outputs):
        k = l.declared.index(output)
        rows = slice(k * each, (k + 1) * each)
        used[..., n * each : (n + 1) * each, :] = weight[..., rows, :]
    return used


def _point_resets(values: dict[str, Any], restored: Sequence[Array]) -> None:
    for i, value in enumerate(restored):
        row = value.shape[1] if len(value.shape) == 2 else 0
        values |= {f"reset{i}": value, f"reset{i}__b": row}


def _saved_width(plan: Plan) -> int:
    nodes = (*plan.saved, *plan.saved_rows)
    return sum(1 if is_narrow(node) else plan.width(node) for node in nodes)


def _row_blocks(kernels: Kernels, batch: int) -> int:
    """How many programs share out the rows, where the gradients of parameters are summed."""
    every = [kernels] if isinstance(kernels, Printed) else kernels.stages[-1].kernels
    rows = next(k.tile[0] for k in every if "dparam" in dict(k.arguments))
    return -(-batch // rows)


class _Sums:
    """Gradients of one direction that add up over time."""

    def __init__(self, host: Host, plan: Plan, w: Weights, need: bool) -> None:
        self.host, self.plan, self.w, self.need = host, plan, w, need
        wide = functools.partial(host.zeros, wide=True)
        self.ih = wide(tuple(w.ih.shape)) if need and w.ih is not None else None
        self.bias_ih = wide(tuple(w.bias_ih.shape)) if need and w.bias_ih is not None else None
        self.weights, self.biases = [], []
        for l in plan.cell.linears if need else ():
            weight, bias = w.matmul(l)
            self.weights.append(wide(tuple(weight.shape)))
            self.biases.append(None if bias is None else wide(tuple(bias.shape)))

    def add(self, dg: Array, x: Array | None, pairs: Sequence[tuple[Array, Array]]) -> None:
        """Adds a chunk: gradients of the projected gates, what was projected, and for each matmul
        the gradients of its outputs and its operand.
        """
        host = self.host
        if self.ih is not None:
            host.matmul_add(host.turned(dg), x, self.ih)
        if self.bias_ih is not None:
            self.bias_ih += dg.sum(0)
        for k, (l, (d, operand)) in enumerate(zip(self.plan.cell.linears, pairs, strict=True)):
            weight, bias = self.weights[k], self.biases[k]
            size = self.plan.sizes[l.out_size]
            out, into = size // l.heads, operand.shape[1] // l.heads
            total: Any = None if bias is None else d.sum(0)
            if l.outputs == l.declared and l.heads == 1:
                host.matmul_add(host.turned(d), operand, weight)
                if bias is not None:
                    bias += total
                continue
            blocks = weight.reshape(l.heads, -1, into)
            for n, output in enumerate(l.outputs):
                row, column = l.declared.index(output), n * size
                if bias is not None:
                    bias[row * size : (row + 1) * size] += total[column : column + size]
                one = host.by_head(d[:, column : column + size].reshape(-1, 1, size), l.heads)
                parts = host.by_head(operand.reshape(-1, 1, operand.shape[1]), l.heads)
                part = blocks[:, row * out : (row + 1) * out]
                host.matmul_add(host.turned(one), parts, part)

    def result(self, values: dict[str, Any], turn: int) -> Weights:
        """All gradients, in the plan's dtype."""
        rounded, cell = self.host.rounded, self.plan.cell
        found: dict[str, Array | None] = {}
        for k, l in enumerate(cell.linears if self.need else ()):
            bias = self.biases[k]
            found[l.name] = rounded(self.weights[k])
            found[f"{l.name}_bias"] = None if bias is None else rounded(bias)
        h, states = self.plan.hidden_size, range(len(cell.states))
        total: Any = values["dparam"].sum(0) if cell.params else None
        return Weights(
            ih=None if self.ih is None else rounded(self.ih),
            hh=found.pop(RECURRENT, None),
            bias_ih=None if self.bias_ih is None else rounded(self.bias_ih),
            bias_hh=found.pop(f"{RECURRENT}_bias", None),
            params=[rounded(total[i * h : (i + 1) * h]) for i in range(len(cell.params))],
            initial=[rounded(values[f"dstate{i}"][turn]) for i in states],
            reset=[rounded(values[f"dreset{i}"]) for i in states] if "dreset0" in values else None,
            static=rounded(values["dstatic"]) if cell.static is not None else None,
            linears=found,
        )


__all__ = ["backward", "forward"]
