"""The reference engine: one loop over the steps, for arrays of any framework.

Slow and obviously right. It is the oracle of the tests, and it runs the cells that other engines
refuse. Since it edits nothing in place, it is also the differentiable composite behind a
framework's double backward, ``vmap``, ``jvp`` and export. ``Recurrence.backward`` runs the derived
backward pass, without any framework's autograd.

Rules for every engine:
- A masked step does nothing: the states are held, and values under the mask (input, reset, NaN)
  have no influence on outputs or gradients.
- A reset says that an episode starts at its step. A direction restarts where it enters an episode:
  it replaces the states that *enter* the episode's first step with ``reset_state``; or in reverse,
  those that enter the last step of the episode before. Masked steps belong to no episode.
- ``reverse`` runs from the last step to the first; all arrays keep their order in time.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

from anycell.lang import grad, philox
from anycell.lang.cell import ONE, Linear
from anycell.lang.expr import Expr, topological
from anycell.lang.namespaces import Array, namespace
from anycell.lang.ops import TABLE, is_reduction
from anycell.plan.layer import Layer
from anycell.plan.step import evaluate, frame

States = Sequence[Array]  # an entry may be None
Values = dict[Expr, Array]
_GATES = Expr("x", (), ())  # all of them


class Gradients(NamedTuple):
    """A gradient for each array of ``Recurrence``; None where the array was None."""

    gates_x: Array
    weights: dict[str, Array]
    state: tuple[Array, ...]
    params: dict[str, Array]
    static: Array | None
    reset_state: tuple[Array | None, ...]


@dataclass
class Recurrence:
    """One run of a cell over a sequence.

    Attributes:
        layer: its cell has G gates and hidden size H.
        gates_x: ``[T, B, G*H]``, the input projection of each gate, in the declared order: the sum
            of the gates' sizes, where they declare some.
        weights: by name. ``weight_hh`` is ``[G*H, H]``, for all gates of size H; any other
            ``weight_<name>`` is ``[out, in]`` or ``[heads, out/heads, in/heads]``, where out counts
            all of its outputs in turn. Biases: ``bias_hh`` ``[G*H]``, ``bias_<name>``.
        state: ``[B, size]`` per state; None starts from the declared initial value.
        params: the cell's per-unit parameters, ``[size]``.
        static: the cell's input per sequence, ``[B, size]``.
        mask: ``[T, B]``, False where the step does not exist.
        resets: ``[T, B]``, True where an episode starts.
        reset_state: ``[size]`` or ``[B, size]`` per state; None restores the declared initials.
        recurrent_mask: ``[B, H]``, or ``[G, B, H]`` for one per gate; multiplies the hidden state
            that enters the recurrent matmul.
        direction: its number, for ``options.reverse`` and the random masks.
        begin: the time of the first step, for the random masks.
        uniform: draws their numbers; it takes what ``philox.uniform`` takes.
        kernels: the transposed weights of the matmuls that are done for all outputs at once; made
            of ``weights``.
    """

    layer: Layer
    gates_x: Array
    weights: Mapping[str, Array]
    state: States | None
    params: Mapping[str, Array]
    _: KW_ONLY
    static: Array | None = None
    mask: Array | None = None
    resets: Array | None = None
    reset_state: States | None = None
    recurrent_mask: Array | None = None
    direction: int = 0
    begin: Any = 0
    uniform: Callable[..., Array] = philox.uniform
    kernels: Mapping[str, Array] | None = None

    def __post_init__(self) -> None:
        self.cell, self.size = self.layer.cell, {ONE: 1, **dict(self.layer.sizes)}
        self.xp = namespace(self.gates_x)
        self.steps, self.rows, _ = self.gates_x.shape
        self.order = topological(self.cell.next)
        self.blocks: dict[tuple[str, str], Array] = {}
        self.zero, self.one = self._number(0.0), self._number(1.0)
        mask, apart = self.mask is not None, self.layer.options.apart(True)
        self.frame = frame(mask, self.resets is not None, apart)
        self.ops = {"where": self.xp.where, "add": operator.add, "const": self._number}
        if self.kernels is None:  # with a mask, gates may have operands of their own
            masked = self.recurrent_mask is not None
            self.kernels = {
                l.name: self.xp.swapaxes(self.weights[l.weight], -1, -2)
                for l in self.cell.linears
                if l.heads == 1 and not (masked and l.recurrent)
            }

    # -- the loop --------------------------------------------------------------------------------
    @functools.cached_property
    def gates(self) -> Sequence[Array]:
        """``gates_x`` at each step."""
        return self.xp.steps(self.gates_x)

    @property
    def times(self) -> range:
        """The steps in the order in which they run. JAX, which exports programs of any number of
        steps, has a loop of its own.
        """
        return range(self.steps)[:: -1 if self.layer.options.reverse[self.direction] else 1]

    def forward(self) -> tuple[Array, tuple[Array, ...]]:
        """Returns the outputs and the final states."""
        (outputs,), final = self.sequences(self.cell.state_names[:1])
        return outputs, final

    def sequences(self, names: Sequence[str]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Returns the values of these states after every step, ``[T, B, size]``, and the final
        states. The options say what a sequence has at masked steps.
        """
        with self.xp.unchecked():
            sequences, final, _ = self._loop(names)
        return sequences, final

    def _loop(
        self, names: Sequence[str] = ()
    ) -> tuple[tuple[Array, ...], tuple[Array, ...], dict[int, tuple[Array, ...]]]:
        """Returns sequences of these states, final states, and the states that enter each step."""
        states, restored = self.initial(self.state), self.initial(self.reset_state)
        places = [self.cell.state_names.index(name) for name in names]
        entering: dict[int, tuple[Array, ...]] = {}
        after: list[dict[int, Array]] = [{} for _ in places]
        for t in self.times:
            entering[t] = self._framed("entered", t, restored=restored, before=states)
            values = self._step(t, entering[t])
            new = self._full(values[node] for node in self.cell.next)
            states = self._framed("after", t, new=new, entered=entering[t])
            outputs = self._framed("output", t, after=states)
            for i, steps in zip(places, after, strict=True):
                steps[t] = outputs[i]
        sizes = [self.size[self.cell.states[i].size] for i in places]
        return tuple(map(self._stack, after, sizes)), states, entering

    def backward(
        self,
        d_outputs: Array | None,
        d_final: States,
        d_sequences: Mapping[str, Array] | None = None,
    ) -> Gradients:
        """Returns the gradients of all arrays from those of the outputs, the final states, and the
        sequences of other states, by name.
        """
        arriving = {self.cell.state_names[0]: d_outputs, **(d_sequences or {})}
        with self.xp.unchecked():
            return self._backward([arriving.get(name) for name in self.cell.state_names], d_final)

    def _backward(self, d_sequences: States, d_final: States) -> Gradients:
        cell, derived = self.cell, grad.backward(self.cell)
        static = {} if derived.static is None else {cell.static: derived.static}
        roots: list[Mapping[Any, Expr]] = [
            derived.x,
            derived.state,
            derived.param,
            static,
            *derived.linear.values(),
        ]
        order = topological(node for named in roots for node in named.values())
        _, _, entering = self._loop()

        none = [None] * len(cell.states)
        d_restored = self._full([self.zero] * len(cell.states))
        d_states = self._full(self.zero if d is None else d for d in d_final)
        d_gates: dict[int, Array] = {}
        of_param = {param.name: param.size for param in cell.params}
        d_params = {name: self._rows(self.zero, size) for name, size in of_param.items()}
        d_static = dict.fromkeys(static, self._rows(self.zero, cell.static_size))
        tape: dict[tuple[str, str], list[tuple[Array, Array]]] = {}

        for t in reversed(self.times):
            d_outputs = [self.zero if d is None else d[t] for d in d_sequences]
            arriving = {"d_after": d_states, "d_output": d_outputs}
            d_new = self._framed("d_new", t, **arriving)
            values = self._step(t, entering[t])
            for state, upstream in zip(cell.states, d_new, strict=True):
                values[grad.upstream(state.name)] = self._guard(t, upstream)
            self._evaluate(order, t, values)

            def of(node: Expr, size: str, t: int = t, values: Values = values) -> Array:
                return self._guard(t, self._rows(values[node], size))

            parts = [of(derived.x[g], size) for g, size in cell.gate_sizes.items()]
            d_gates[t] = self.xp.concatenate(parts, axis=-1) if parts else self.gates[t]
            d_params = {p: d + of(derived.param[p], of_param[p]) for p, d in d_params.items()}
            d_static = {e: d + of(static[e], cell.static_size) for e, d in d_static.items()}
            d_old = {s.name: of(derived.state[s.name], s.size) for s in cell.states}
            for l in cell.linears:
                d = {output: of(g, l.out_size) for output, g in derived.linear[l.name].items()}
                if l.operand.op == "state":
                    name = l.operand.attrs[0]
                    d_old[name] = d_old[name] + self._transposed(l, d)
                for output in l.outputs:
                    operand = self._operand(l, output, t, values)
                    tape.setdefault((l.name, output), []).append((d[output], operand))

            d_held = self._framed("d_held", t, **arriving)
            d_entered = self._framed("d_entered", t, d_function=d_old.values(), d_held=d_held)
            d_states = self._framed("d_before", t, d_entered=d_entered)
            d_reset = self._framed("d_restored", t, d_entered=d_entered)
            d_restored = tuple(map(operator.add, d_restored, d_reset))

        return Gradients(
            gates_x=self._stack(d_gates, cell.width(self.size)),
            weights=self._weight_gradients(tape),
            state=d_states,
            params={p: self._like(self.params[p], d) for p, d in d_params.items()},
            static=None if self.static is None else d_static.get(cell.static),
            reset_state=tuple(map(self._like, self.reset_state or none, d_restored)),
        )

    # -- one step --------------------------------------------------------------------------------
    def _step(self, t: int, states: Iterable[Array]) -> Values:
        """The value of each node of the cell.

        Values that enter a masked row are replaced by zero, and so are the gradients that leave it:
        where() keeps the held values, but without this its gradient might be zero times NaN.
        """
        values: Values = {}
        for name, state in zip(self.cell.state_names, states, strict=True):
            values[Expr("state", (), (name,))] = self._guard(t, state)
        self._evaluate(self.order, t, values)
        return values

    def _evaluate(self, order: Iterable[Expr], t: int, values: Values) -> None:
        for node in order:
            if node not in values:
                values[node] = self._value(node, t, values)

    def _value(self, node: Expr, t: int, values: Values) -> Array:
        args = [values[arg] for arg in node.args]
        match node.op:
            case "const":
                return self._number(node.attrs[0])
            case "hyper":
                return self._number(self.cell.hyper[node.attrs[0]])
            case "units":
                return self._number(self.size[node.attrs[0]])
            case "param":
                size = self.cell.sizes[node]
                return self._guard(t, self._rows(self.params[node.attrs[0]], size))
            case "static":
                return self._guard(t, self._rows(self.static, self.cell.static_size))
            case "x":
                return self._guard(t, self._gate(node.attrs[0], t, values))
            case "linear":
                return self._guard(t, self._linear(node, t, values))
            case "preact":
                fused = self._gate(node.attrs[1], t, values) + self._linear(node, t, values)
                return self._guard(t, fused)
            case "linear_t":
                l = self._matmul(node.attrs[0])
                d = [self._guard(t, self._rows(arg, l.out_size)) for arg in args]
                return self._transposed(l, dict(zip(l.outputs, d, strict=True)))
            case "keep":
                mask = self._keep(node, t, self.xp.stop_gradient(*args))
                # In evaluation it may be one number, which a sum must count for each unit.
                return self._rows(mask, self.cell.sizes[node]) if self.cell.broadcasts else mask
        if not is_reduction(node):
            return TABLE[node.op].meaning(self.xp, *args, *node.attrs)
        narrow = self.cell.broadcasts and node.narrow
        if len(args[0].shape) == 0:  # one number stands for a row of equal numbers
            args = [self._rows(args[0], "H" if narrow else self.cell.sizes[node])]
        reduced = TABLE[node.op].meaning(self.xp, *args, *node.attrs)
        return reduced[:, :1] if narrow else reduced

    def _keep(self, node: Expr, t: int, rate: Array) -> Array:
        options = self.layer.options
        if not options.training:
            return rate
        index, per = node.attrs
        units = self.size[self.cell.sizes[node]]
        step = self.begin + t if per == "step" else 0
        stream = 2 * options.stream + self.direction
        draw = self.uniform(options.seed, stream, index, step, self.rows, units)
        rate = self.xp.cast(rate, "float32")
        return self.xp.where(self.xp.array(draw, rate) < rate, self.one, self.zero)

    # -- matmuls ---------------------------------------------------------------------------------
    def _matmul(self, name: str) -> Linear:
        return next(l for l in self.cell.linears if l.name == name)

    def _gate(self, gate: str, t: int, values: Values) -> Array:
        """The input projection of a gate."""
        if _GATES not in values:
            sizes = [self.size[size] for size in self.cell.gate_sizes.values()]
            values[_GATES] = self.xp.split(self.gates[t], sizes)
        return values[_GATES][self.cell.gates.index(gate)]

    def _linear(self, node: Expr, t: int, values: Values) -> Array:
        name, output = node.attrs
        l, kernels = self._matmul(name), self.kernels or {}
        bias = self.weights.get(l.bias_name)
        if name not in kernels:
            weight = self.xp.swapaxes(self._block(l, output), -1, -2)
            product = self._per_head(self._operand(l, output, t, values), weight)
            return product if bias is None else product + bias[self._span(l, output)]
        every = Expr("linear", node.args, (name,))
        if every not in values:
            product = self.xp.matmul(self._operand(l, output, t, values), kernels[name])
            sizes = [self.size[l.out_size]] * len(l.declared)
            values[every] = self.xp.split(product if bias is None else product + bias, sizes)
        return values[every][l.declared.index(output)]

    def _operand(self, l: Linear, output: str, t: int, values: Values) -> Array:
        """The operand that the weight of one output of a matmul multiplies."""
        operand = values[l.operand]
        if l.operand.op != "state":  # states have all rows, and zeros in masked ones
            operand = self._guard(t, self._rows(operand, l.in_size))
        masked = l.recurrent and self.recurrent_mask is not None
        return operand * self._recurrent(l, output) if masked else operand

    def _transposed(self, l: Linear, d: Mapping[str, Array]) -> Array:
        """The gradient of a matmul's operand from the gradients of its outputs."""
        parts = (
            self._per_head(d[output], self._block(l, output)) * self._recurrent(l, output)
            for output in l.outputs
        )
        return functools.reduce(operator.add, parts)

    def _recurrent(self, l: Linear, output: str) -> Array:
        """The mask that multiplies the operand of the recurrent matmul; 1 for other matmuls."""
        mask = self.recurrent_mask
        if mask is None or not l.recurrent:
            return self.one
        return mask[self.cell.gates.index(output)] if len(mask.shape) == 3 else mask

    def _block(self, l: Linear, output: str) -> Array:
        """The weight of one output, ``[heads, out/heads, in/heads]``; it is sliced only once."""
        block = self.blocks.get((l.name, output))
        if block is None:
            weight = self.weights[l.weight]
            if l.heads == 1:
                rows = weight[self._span(l, output)]
                block = self.xp.reshape(rows, (1, -1, weight.shape[-1]))
            else:
                block = weight[:, self._span(l, output, l.heads)]
            self.blocks[l.name, output] = block
        return block

    def _span(self, l: Linear, output: str, heads: int = 1) -> slice:
        """The rows of one output in the bias, in the weight, or in one head of the weight."""
        k, size = l.declared.index(output), self.size[l.out_size] // heads
        return slice(k * size, (k + 1) * size)

    def _per_head(self, a: Array, weight: Array) -> Array:
        heads, inner, outer = weight.shape
        split = self.xp.swapaxes(self.xp.reshape(a, (self.rows, heads, inner)), 0, 1)
        product = self.xp.swapaxes(self.xp.matmul(split, weight), 0, 1)
        return self.xp.reshape(product, (self.rows, heads * outer))

    def _weight_gradients(
        self, tape: Mapping[tuple[str, str], list[tuple[Array, Array]]]
    ) -> dict[str, Array]:
        """Multiplies once per output, over all steps, from pairs of its gradient and operand."""
        out: dict[str, Array] = {}
        for l in self.cell.linears:
            blocks, sums = [], []
            for output in l.declared:
                heads, outer, inner = self._block(l, output).shape
                pairs = tape.get((l.name, output))
                if pairs is None:  # an unused gate, or no steps
                    blocks.append(self.xp.broadcast_to(self.zero, (heads, outer, inner)))
                    sums.append(self.xp.broadcast_to(self.zero, (heads * outer,)))
                    continue
                d, operand = (self.xp.stack(side, axis=0) for side in zip(*pairs, strict=True))
                d_split = self.xp.reshape(d, (-1, heads, outer))
                split = self.xp.reshape(operand, (-1, heads, inner))
                blocks.append(self.xp.einsum("nho,nhi->hoi", d_split, split))
                sums.append(self.xp.sum(d, axis=(0, 1)))
            weight = self.xp.concatenate(blocks, axis=1)
            made = {l.weight: self.xp.reshape(weight, self.weights[l.weight].shape)}
            if self.weights.get(l.bias_name) is not None:
                made[l.bias_name] = self.xp.concatenate(sums, axis=0)
            for name, part in made.items():  # matmuls may share a weight
                out[name] = out[name] + part if name in out else part
        return out

    # -- arrays ----------------------------------------------------------------------------------
    def _number(self, value: float) -> Array:
        return self.xp.array(value, self.gates_x)

    def _rows(self, value: Array, size: str) -> Array:
        return self.xp.broadcast_to(value, (self.rows, self.size[size]))

    def _full(self, values: Iterable[Array]) -> tuple[Array, ...]:
        """One ``[B, size]`` per state."""
        pairs = zip(values, self.cell.states, strict=True)
        return tuple(self._rows(value, state.size) for value, state in pairs)

    def initial(self, states: States | None) -> tuple[Array, ...]:
        """Values for the states, ``[B, size]`` each: the given values, else the declared ones."""
        declared = [self._number(state.initial) for state in self.cell.states]
        pairs = zip(states or declared, declared, strict=True)
        return self._full(default if value is None else value for value, default in pairs)

    def _like(self, array: Array | None, d: Array) -> Array | None:
        """The gradient of an array, which may have one value for all rows."""
        if array is None:
            return None
        return self.xp.sum(d, axis=0) if len(array.shape) == 1 else d

    def _valid(self, t: int) -> Array | bool:
        return True if self.mask is None else self.xp.reshape(self.mask[t], (self.rows, 1))

    @functools.cached_property
    def restarts(self) -> Mapping[int, Array | bool]:
        """Whether the states that enter a step are replaced, ``[B, 1]``; False for nowhere."""
        if self.resets is None or not self.steps:
            return dict.fromkeys(self.times, False)
        at, shape = {}, (self.rows, 1)
        # Whether an episode starts at the unmasked step that ran last.
        last = self.xp.zeros_like(self.xp.reshape(self.resets[0], shape))
        for t in self.times:
            starts = self.xp.reshape(self.resets[t], shape)
            at[t] = last if self.layer.options.reverse[self.direction] else starts
            if self.mask is not None:
                at[t] = self.xp.logical_and(at[t], self._valid(t))
                starts = self.xp.where(self._valid(t), starts, last)
            last = starts
        return at

    def _framed(self, name: str, t: int, **leaves: Iterable[Array]) -> tuple[Array, ...]:
        """An expression of the frame of a step, for values of each state."""
        node, of_states = self.frame[name], zip(*leaves.values(), strict=True)
        flags = {"valid": self._valid(t), "reset": self.restarts[t]}
        named = [{**flags, **dict(zip(leaves, values, strict=True))} for values in of_states]
        return tuple([evaluate(node, values, self.ops) for values in named])

    def _guard(self, t: int, value: Array) -> Array:
        return evaluate(self.frame["alive"], {"valid": self._valid(t), "value": value}, self.ops)

    def _stack(self, steps: Mapping[int, Array], size: int) -> Array:
        if not steps:
            return self.xp.broadcast_to(self.zero, (0, self.rows, size))
        return self.xp.stack([steps[t] for t in range(self.steps)], axis=0)
