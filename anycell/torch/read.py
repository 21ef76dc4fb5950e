"""A step of PyTorch, recorded as ATen operations, and the table by which they become units.

The step runs twice, with batches of two sizes, under ``functionalize``: where the two recordings
differ, a shape or an argument follows the batch. What the table lacks is decomposed by torch's own
rules. Tensors that need no state are computed by the recorded operations, on the caller's own
tensors and so with torch's own derivatives: once a call, or for all steps at once.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.func import functionalize
from torch.utils._python_dispatch import TorchDispatchMode

from anycell.read import Graph, Outer, Refused, Value, read

A = torch.ops.aten
ROWS = (3, 5)  # of the two recordings
_SKIPPED = tuple(str(Path(module.__file__).parent) for module in (torch, sys.modules["anycell"]))


@dataclass(eq=False)
class Var:
    """A tensor of a recording.

    Attributes:
        kind: "F", the same at all steps; "X", which the step's input enters; "S", a state.
        shape, dtype: those of the first recording.
        axis: the axis of the batch, if there is one.
        alike: whether it is known to be the same for all rows of the batch.
        node, place: which operation made it, and which of its results it is.
        data: the tensor itself, if the step took it from elsewhere.
        inside: whether the step makes that tensor itself, out of numbers.
        number: its value, if that is one known number.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    axis: int | None = None
    alike: bool = False
    node: Node | None = None
    place: int = 0
    data: Tensor | None = None
    inside: bool = False
    number: float | None = None


@dataclass(eq=False)
class Node:
    """An operation of a recording."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    where: str
    made: list[Any] = field(default_factory=list)

    @property
    def inputs(self) -> list[Var]:
        return list(_vars((self.args, list(self.kwargs.values()))))

    @property
    def packet(self) -> Any:
        return self.op.overloadpacket


@dataclass(frozen=True)
class Rows:
    """An argument that is a multiple of the batch."""

    times: int


@dataclass(frozen=True)
class Like:
    """An argument of which only shape and dtype are read."""

    shape: tuple[Any, ...]
    dtype: torch.dtype


def _vars(value: Any) -> Any:
    if isinstance(value, Var):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _vars(item)


TABLE: dict[Any, Callable[..., Any]] = {}  # by packets of ATen; filled below


# -- recording -------------------------------------------------------------------------------------

_RANDOM_LIKE = {A.rand_like, A.randn_like, A.randint_like}
_FILLED = {
    A.zeros: 0.0, A.ones: 1.0, A.zeros_like: 0.0, A.ones_like: 1.0, A.new_zeros: 0.0,
    A.new_ones: 1.0, A.empty: None, A.empty_like: None, A.new_empty: None, A.full: None,
    A.full_like: None, A.new_full: None, A.scalar_tensor: None, A.empty_strided: None,
    A.new_empty_strided: None,
}  # fmt: skip
_LIKE = {
    op for op in {*_FILLED, *_RANDOM_LIKE} if str(op).endswith("_like") or "new_" in str(op)
}
_STATISTICS = {
    A.native_batch_norm: 5, A._native_batch_norm_legit: 5, A.cudnn_batch_norm: 5,
    A._batch_norm_with_update: None,
}  # fmt: skip


class Recorder(TorchDispatchMode):
    """Records the operations of a step. It refuses edits of tensors that the step did not make, and
    values that Python reads.

    Args:
        inputs: the kind and the tensor of each input.
    """

    def __init__(self, inputs: Sequence[tuple[str, Tensor]]) -> None:
        super().__init__()
        self.vars: dict[int, Var] = {}
        self.held: list[Tensor] = []  # so that no two tensors have one id
        self.nodes: list[Node] = []
        self.stale: set[Var] = set()
        self.inputs = [self._var(tensor, Var(kind, *_meta(tensor))) for kind, tensor in inputs]

    def _var(self, tensor: Tensor, var: Var) -> Var:
        self.held.append(tensor)
        self.vars[id(tensor)] = var
        return var

    def var(self, tensor: Tensor) -> Var:
        """What a tensor is; one that the step took from elsewhere is a constant."""
        made = self.vars.get(id(tensor))
        return self._var(tensor, Var("F", *_meta(tensor), data=tensor)) if made is None else made

    def _recorded(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            var = self.var(value)
            if var in self.stale:
                _refuse("an edit in place also changed this view", "assign a new tensor instead")
            return var
        if isinstance(value, (tuple, list)):
            return [self._recorded(item) for item in value]
        return value

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = op.overloadpacket
        if packet in (A._local_scalar_dense, A.equal, A.is_nonzero):
            _refuse(
                "Python reads the value of a tensor here, for a branch or a number",
                "choose with torch.where, or compute with tensors",
            )
        if torch.Tag.dynamic_output_shape in op.tags:
            _refuse(f"{packet} makes a tensor whose shape depends on values", "use torch.where")
        if packet in _STATISTICS and (_STATISTICS[packet] is None or args[_STATISTICS[packet]]):
            _refuse(
                "batch normalization in training mixes rows and edits its buffers",
                "call eval() on it, or use nn.LayerNorm",
            )
        if op._schema.is_mutable:
            return self._edit(op, args, kwargs)
        if packet is A.native_dropout and args[2]:
            with self:  # as the product with a mask, which needs no state
                kept = A.bernoulli.p(args[0], 1 - args[1])
                scale = 1 / (1 - args[1]) if args[1] < 1 else 0.0
                return args[0] * (kept * scale), kept != 0
        recorded = [self._recorded(arg) for arg in args]
        if packet not in TABLE and op in decomposition_table:
            if any(var.kind == "S" for var in _vars(recorded)) and packet not in _LIKE:
                with self:
                    return decomposition_table[op](*args, **kwargs)
        made = op(*args, **kwargs)
        self._note(op, recorded, {k: self._recorded(v) for k, v in kwargs.items()}, made)
        return made

    def _note(self, op: Any, args: list[Any], kwargs: dict[str, Any], made: Any) -> None:
        node = Node(op, tuple(args), kwargs, line())
        if op.overloadpacket in (A.lift_fresh, A.lift_fresh_copy, A.lift):
            args[0].inside = args[0].data is not None
        random = torch.Tag.nondeterministic_seeded in op.tags
        if op.overloadpacket in _LIKE or op is A.bernoulli.p:
            node.args = (Like(*_meta_of(args[0])), *args[1:])
        kinds = {var.kind for var in node.inputs}
        kind = "S" if "S" in kinds else "X" if "X" in kinds or random else "F"
        for place, tensor in enumerate(made if isinstance(made, (tuple, list)) else [made]):
            if isinstance(tensor, Tensor):
                var = Var(kind, *_meta(tensor), node=node, place=place)
                node.made.append(self._var(tensor, var))
            else:
                node.made.append(None)
        self.nodes.append(node)

    def _edit(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Records an edit in place as the operation that makes a new tensor."""
        target, name = args[0], op._schema.name.removeprefix("aten::")
        var = self.vars.get(id(target))
        if var is None or var.node is None:
            _refuse(
                "the step edits a tensor that it did not make: a buffer, an argument or a constant",
                "return what changes as a part of the state",
            )
        new = getattr(getattr(A, name.removesuffix("_"), None), op._overloadname, None)
        if new is None or not name.endswith("_"):
            _refuse(f"{op.overloadpacket} edits a tensor in place", "assign a new tensor instead")
        recorded = [self._recorded(arg) for arg in args]
        named = {k: self._recorded(v) for k, v in kwargs.items()}
        places = _places(target)
        for other in self.held:
            same = other is not target and id(other) in self.vars
            if same and _storage(other) == _storage(target):
                if np.intersect1d(places, _places(other)).size:
                    self.stale.add(self.vars[id(other)])
        self.stale.discard(var)
        made = op(*args, **kwargs)
        self._note(new, recorded, named, made)
        return made


def _meta(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.dtype


def _meta_of(var: Var) -> tuple[tuple[int, ...], torch.dtype]:
    return var.shape, var.dtype


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _places(tensor: Tensor) -> np.ndarray:
    """Where the numbers of a tensor lie in its storage."""
    places = np.full((), tensor.storage_offset())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places[..., None] + np.arange(size) * stride
    return places.reshape(-1)


def line() -> str:
    """The file and line of the user's code that runs."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_SKIPPED, "<")):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _refuse(problem: str, instead: str = "", where: str | None = None) -> Any:
    where = line() if where is None else where
    raise Refused(f"{where}: {problem}." + (f" Instead: {instead}." if instead else ""))


@dataclass(eq=False)
class Recording:
    """A step: its inputs and outputs, and the operations between them.

    Attributes:
        tensors: weights, buffers and other tensors that are the same at all steps.
        xs, states: the input of a step and the states before it.
        outputs, after: what the step returns: its output, and the states after it.
        dtype: that of the states.
        rows: the batch of the recording; None if the states have no axis of a batch.
    """

    tensors: list[Var]
    xs: list[Var]
    states: list[Var]
    outputs: list[Var]
    after: list[Var]
    nodes: list[Node]
    dtype: torch.dtype
    device: torch.device
    rows: int | None
    plans: dict[Any, list[Node]] = field(default_factory=dict)

    @property
    def constants(self) -> list[Var]:
        """Tensors from elsewhere that are no inputs."""
        used = {var for node in self.nodes for var in node.inputs} | {*self.outputs, *self.after}
        return [var for var in used if var.data is not None and not var.inside]

    def plan(self, wanted: Sequence[Var], known: frozenset[Var] = frozenset()) -> list[Node]:
        """The operations that compute values from those that are known."""
        key = (*wanted, None, *known)
        if key not in self.plans:
            needed = {var for var in wanted if var not in known}
            nodes = []
            for node in reversed(self.nodes):
                if any(var in needed for var in node.made):
                    nodes.append(node)
                    needed.update(var for var in node.inputs if var not in known)
            self.plans[key] = nodes[::-1]
        return self.plans[key]


Step = Callable[[list[Tensor], list[Tensor], list[Tensor]], tuple[list[Tensor], list[Tensor]]]


def record(
    step: Step,
    tensors: Sequence[Tensor],
    xs: Sequence[Sequence[Tensor]],
    states: Sequence[Sequence[Tensor]],
    batched: bool,
) -> Recording:
    """Records a step.

    Args:
        step: (tensors, xs, states) -> (outputs, new states).
        tensors: what is the same at all steps.
        xs, states: the arguments of two calls, of ``ROWS`` rows each if ``batched``.

    Raises:
        Refused: if the step does what no recording can show.
    """
    one, other = (_record(step, tensors, *call) for call in zip(xs, states, strict=True))
    if len(one.nodes) != len(other.nodes):
        raise Refused("the step does something else for another batch or other numbers")
    pairs = [(one.tensors, other.tensors), (one.xs, other.xs), (one.states, other.states)]
    known: dict[Var, Var] = {}
    for ours, theirs in pairs:
        for var, twin in zip(ours, theirs, strict=True):
            _join(var, twin, known, "")
    for node, twin in zip(one.nodes, other.nodes, strict=True):
        if node.op is not twin.op or len(node.made) != len(twin.made):
            _refuse("the step does something else for another batch", where=node.where)
        node.args = _joined(node.args, twin.args, known, node.where)
        node.kwargs = {k: _joined(v, twin.kwargs[k], known, node.where) for k, v in node.kwargs.items()}
        for var, same in zip(node.made, twin.made, strict=True):
            if var is not None:
                _join(var, same, known, node.where)
    for ours, theirs in ((one.outputs, other.outputs), (one.after, other.after)):
        if len(ours) != len(theirs):
            raise Refused("the step returns something else for another batch")
        for var, twin in zip(ours, theirs, strict=True):
            _joined(var, twin, known, "")
    one.rows = ROWS[0] if batched else None
    _classify(one)
    return one


def _record(
    step: Step, tensors: Sequence[Tensor], xs: Sequence[Tensor], states: Sequence[Tensor]
) -> Recording:
    sorts = [("F", tensors), ("X", xs), ("S", states)]
    inputs = [(kind, tensor) for kind, group in sorts for tensor in group]
    made: list[tuple[list[Tensor], list[Tensor]]] = []

    def run(*arguments: list[Tensor]) -> list[Tensor]:
        made.append(step(*arguments))
        return [*made[0][0], *made[0][1]]

    with Recorder(inputs) as recorder, torch.enable_grad():
        results = functionalize(run)(list(tensors), list(xs), list(states))
    variables, count = [recorder.var(tensor) for tensor in results], len(made[0][0])
    a, b = len(tensors), len(tensors) + len(xs)
    known = recorder.inputs
    return Recording(
        known[:a], known[a:b], known[b:], variables[:count], variables[count:], recorder.nodes,
        next(state.dtype for state in states if state.is_floating_point()), states[0].device, None,
    )  # fmt: skip


def _join(var: Var, twin: Var, known: dict[Var, Var], where: str) -> None:
    """Notes the batch's axis of a tensor, which the second recording has in another size."""
    known[twin] = var
    if len(var.shape) != len(twin.shape) or var.dtype != twin.dtype:
        _refuse("this has another shape or dtype for another batch", where=where)
    axes = [i for i, (n, m) in enumerate(zip(var.shape, twin.shape, strict=True)) if n != m]
    if len(axes) > 1:
        _refuse("this has the batch in two axes", "compute each row from itself", where)
    var.axis = axes[0] if axes else None


def _joined(a: Any, b: Any, known: dict[Var, Var], where: str) -> Any:
    """An argument of an operation, from those of both recordings."""
    if isinstance(a, Var):
        if b not in known and isinstance(b, Var) and a.data is not None and b.data is not None:
            same = a.data is b.data or (a.inside and torch.equal(a.data, b.data))
            if not same:
                _refuse("the step reads numbers out of tensors", "compute with tensors", where)
            known[b] = a
        if known.get(b) is not a:
            _refuse("the step does something else for another batch", where=where)
        return a
    if isinstance(a, Like):
        return Like(_joined(a.shape, b.shape, known, where), a.dtype)
    if isinstance(a, (tuple, list)):
        if len(a) != len(b):
            _refuse("the step does something else for another batch", where=where)
        return type(a)([_joined(x, y, known, where) for x, y in zip(a, b, strict=True)])
    if a == b or a is b or (a != a and b != b):
        return a
    if type(a) is int and type(b) is int and a % ROWS[0] == 0 and a * ROWS[1] == b * ROWS[0]:
        return Rows(a // ROWS[0])
    return _refuse(
        "a number here follows the size of the batch, or values that Python has read",
        "compute each row from itself alone, with tensors", where,
    )  # fmt: skip


_SAME = {A.expand, A.clone, A.detach, A.alias, A.view, A.reshape, A._unsafe_view, A._to_copy}
_SAME |= {A.lift_fresh, A.lift_fresh_copy, A.unsqueeze, A.squeeze}


def _classify(step: Recording) -> None:
    """Says of what kind each value is. A state that the step returns as it was is no state."""
    for before, after in zip(step.states, step.after, strict=True):
        if before is after:
            before.kind = "F"
    for node in step.nodes:
        inputs, packet = node.inputs, node.packet
        kinds = {var.kind for var in inputs}
        random = torch.Tag.nondeterministic_seeded in node.op.tags
        alike = packet in _FILLED or (
            (packet in _SAME or torch.Tag.pointwise in node.op.tags)
            and all(var.axis is None or var.alike for var in inputs)
        )
        for var in node.made:
            if var is not None:
                var.kind = "S" if "S" in kinds else "X" if "X" in kinds or random else "F"
                var.alike = alike and not random
                var.number = _number(node) if var.kind == "F" else None


def _number(node: Node) -> float | None:
    """The number that all elements of a tensor of kind F are, if it is known."""
    packet, args = node.packet, node.args
    if packet in (A.full, A.full_like, A.new_full, A.scalar_tensor):
        value = args[0] if packet is A.scalar_tensor else args[2 if packet is A.new_full else 1]
        return float(value) if isinstance(value, (int, float)) else None
    if packet in (A.lift_fresh, A.lift_fresh_copy) and args[0].inside and not args[0].shape:
        return float(args[0].data)
    if packet in _SAME and args and isinstance(args[0], Var):
        return args[0].number
    return _FILLED.get(packet)


# -- computing what needs no state -----------------------------------------------------------------


class Run:
    """The tensors of one call of a step that was recorded.

    Args:
        tensors: of ``Recording.tensors``.
        xs: ``[T, B, ...]``, without a batch ``[T, ...]``.
        first: the states before the first step.
        merged: whether all steps are computed as one batch of T * B rows; else by ``vmap``.
    """

    def __init__(
        self, step: Recording, tensors: Sequence[Tensor], xs: Sequence[Tensor],
        first: Sequence[Tensor], merged: bool,
    ) -> None:  # fmt: skip
        self.step, self.merged = step, merged
        self.dtype = next(t.dtype for t in first if t.is_floating_point())
        self.steps = xs[0].shape[0]
        self.batch = 1 if step.rows is None else xs[0].shape[1]
        self.rows = self.batch
        self.memo: dict[Any, Any] = {}
        self.env: dict[Var, Tensor] = dict(zip(step.tensors, tensors, strict=True))
        self.series: dict[Var, Tensor] = dict(zip(step.xs, xs, strict=True))  # [T, ...]
        self.flat: dict[Var, Tensor] = {}  # [T * B, ...]
        for var, tensor in zip(step.states, first, strict=True):
            if var.kind == "F":
                self.env[var] = tensor

    def fixed(self, var: Var) -> Tensor:
        """A value of kind F."""
        if var not in self.env:
            if var.data is not None:
                return var.data
            for node in self.step.plan([var]):
                self._apply(node, self.env, self.batch, self.fixed)
        return self.env[var]

    def moving(self, var: Var) -> Tensor:
        """A value of kind X, at all steps: ``[T, ...]``."""
        if var not in self.series:
            self.compute([var])
        return self.series[var]

    def compute(self, wanted: Sequence[Var]) -> None:
        """Adds values of kind X or S at all steps to ``series``; S from states that are there."""
        step = self.step
        missing = [var for var in dict.fromkeys(wanted) if var not in self.series]
        known = frozenset(self.flat if self.merged else self.series)
        if not self.merged:
            self._map(missing, step.plan(missing, known))
            return
        rows = self.steps * self.batch
        known |= {*self.series}
        for node in step.plan(missing, known):
            self._apply(node, self.flat, rows, self._flat)
        for var in missing:
            self.series[var] = self._unflat(var, self._flat(var))

    def drawn(self) -> dict[Var, Tensor]:
        """The random numbers of all steps."""
        random = [
            var
            for node in self.step.plan([*self.step.outputs, *self.step.after])
            if torch.Tag.nondeterministic_seeded in node.op.tags
            for var in node.made
        ]
        if random:
            self.compute(random)
        return {var: self.series[var] for var in random}

    def replay(
        self, drawn: Mapping[Var, Tensor], states: Sequence[Tensor]
    ) -> tuple[list[Tensor], Sequence[Tensor]]:
        """The step's own operations, step by step: the outputs ``[T, ...]``, the last states."""
        step, outputs = self.step, []
        nodes = step.plan([*step.outputs, *step.after], frozenset(drawn))
        for t in range(self.steps):
            env = {var: series[t] for var, series in drawn.items()}
            env |= {var: self.series[var][t] for var in step.xs}
            env |= zip(step.states, states, strict=True)
            find = lambda var: env[var] if var in env else self.fixed(var)  # noqa: B023,E731
            for node in nodes:
                self._apply(node, env, self.batch, find)
            outputs.append([find(var) for var in step.outputs])
            states = [find(var) for var in step.after]
        return [torch.stack(parts) for parts in zip(*outputs, strict=True)], states

    def _flat(self, var: Var) -> Tensor:
        if var not in self.flat:
            axis = var.axis
            if var.kind == "F":
                tensor = self.fixed(var)
                if axis is not None:
                    shape = list(tensor.shape)
                    shape.insert(axis, self.steps)
                    tensor = tensor.unsqueeze(axis).expand(shape).flatten(axis, axis + 1)
            else:
                tensor = self.series[var]
                if axis:
                    tensor = tensor.movedim(0, axis)
                tensor = tensor.flatten(axis, axis + 1)
            self.flat[var] = tensor
        return self.flat[var]

    def _unflat(self, var: Var, tensor: Tensor) -> Tensor:
        axis = var.axis
        assert axis is not None
        times = tensor.shape[axis] // self.steps
        tensor = tensor.unflatten(axis, (self.steps, times))
        return tensor.movedim(axis, 0) if axis else tensor

    def _map(self, wanted: Sequence[Var], nodes: Sequence[Node]) -> None:
        inputs = list(self.series)

        def one(_: Any, *tensors: Tensor) -> list[Tensor]:
            env = dict(zip(inputs, tensors, strict=True))
            find = lambda var: env[var] if var in env else self.fixed(var)  # noqa: E731
            for node in nodes:
                self._apply(node, env, self.batch, find)
            return [env[var] for var in wanted]

        clock = torch.empty(self.steps, device=self.step.device)
        made = torch.vmap(one, randomness="different")(clock, *self.series.values())
        self.series |= zip(wanted, made, strict=True)

    def _apply(
        self, node: Node, env: dict[Var, Tensor], rows: int, find: Callable[[Var], Tensor]
    ) -> None:
        if node.made[0] in env:
            return

        def fill(value: Any) -> Any:
            kind = type(value)
            if kind is Var:
                return env[value] if value in env else find(value)
            if kind is Rows:
                return value.times * rows
            if kind in (tuple, list):
                return kind([fill(item) for item in value])
            if kind is Like:
                like = torch.empty((), dtype=fill(value.dtype), device=self.step.device)
                return like.expand(fill(value.shape))
            if kind is torch.dtype and value is self.step.dtype:
                return self.dtype
            return value

        args = [fill(value) for value in node.args]
        made = node.op(*args, **{name: fill(value) for name, value in node.kwargs.items()})
        if len(node.made) == 1 and not isinstance(made, (tuple, list)):
            env[node.made[0]] = made
        else:
            env.update((v, t) for v, t in zip(node.made, made, strict=True) if v is not None)


class Arrays:
    """What a reading does with tensors."""

    reshape, broadcast = staticmethod(torch.reshape), staticmethod(torch.broadcast_to)
    cat, take, move = map(staticmethod, (torch.cat, torch.narrow, torch.movedim))

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.picks: dict[int, Any] = {}  # by the ids of arrays that a reading holds

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device=self.device)

    def constant(self, numbers: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(numbers, dtype=dtype, device=self.device)

    @staticmethod
    def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(dtype)

    def index(self, tensor: Tensor, at: np.ndarray) -> Tensor:
        """The columns ``at`` of the last axis."""
        known = self.picks.get(id(at))
        if known is None or known[0] is not at:
            neighbours = bool((at == at[0] + np.arange(len(at))).all())
            pick: Any = (int(at[0]), len(at)) if neighbours else torch.as_tensor(at)
            known = self.picks[id(at)] = at, pick
        pick = known[1]
        if isinstance(pick, tuple):
            whole = pick == (0, tensor.shape[-1])
            return tensor if whole else tensor.narrow(tensor.dim() - 1, *pick)
        return tensor[..., pick.to(tensor.device)]


# -- the table -------------------------------------------------------------------------------------

Table = Callable[..., Any]


class Reader:
    """Turns the operations of a recording on states into units.

    Args:
        names: of the states, "" where there is none.
    """

    def __init__(self, step: Recording, names: Sequence[str], title: str) -> None:
        self.step = step
        graph = self.graph = Graph(Arrays(step.device), step.rows)
        self.values: dict[Var, Any] = {}
        states = []
        for var, name in zip(step.states, names, strict=True):
            if var.kind == "S":
                self._check(var)
                axis = None if step.rows is None else 0
                self.values[var] = graph.state(var.shape, axis, var.dtype is torch.bool, name)
                states.append(var)
        if not states:
            raise Refused("the step returns its state as it was, and so needs no loop")
        pairs = [(b, a) for b, a in zip(step.states, step.after, strict=True) if b in states]
        for node in step.plan([after for _, after in pairs]):
            if any(var is not None and var.kind == "S" for var in node.made):
                graph.where = node.where
                self._read(node)
        graph.where = ""
        self.states = states
        self.reading = read(graph, [(self.values[b], self.value(a)) for b, a in pairs], title)

    def _check(self, var: Var) -> None:
        if var.dtype not in (self.step.dtype, torch.bool):
            self.graph.refuse(
                f"a value that depends on a state is {var.dtype}, and the first state "
                f"{self.step.dtype}", "compute the whole step in one dtype",
            )  # fmt: skip

    def _read(self, node: Node) -> None:
        made = self.apply(node, self.value)
        for var, value in zip(node.made, made if isinstance(made, list) else [made], strict=False):
            if var is not None and value is not None:
                self._check(var)
                self.values[var] = value

    def value(self, var: Any) -> Any:
        """A value as the graph takes it."""
        if isinstance(var, Var):
            if var not in self.values:
                self.values[var] = self._outer(var)
            return self.values[var]
        if isinstance(var, (tuple, list)):
            return type(var)([self.value(item) for item in var])
        return var.times * ROWS[0] if isinstance(var, Rows) else var

    def apply(self, node: Node, value: Callable[[Any], Any]) -> Any:
        rule = TABLE.get(node.packet)
        if rule is None:
            self.graph.refuse(f"{node.packet} of a value that depends on a state")
        kwargs = {name: value(v) for name, v in node.kwargs.items()}
        return rule(self, node, *[value(v) for v in node.args], **kwargs)

    def _outer(self, var: Var) -> Outer:
        real = var.dtype is not torch.bool

        def get(run: Run) -> Tensor:
            tensor = run.fixed(var) if var.kind == "F" else run.moving(var)
            return tensor.to(run.dtype) if real and tensor.dtype is not run.dtype else tensor

        outer = Outer(var.kind, var.shape, get, not real, not var.alike, var.number)
        if var.kind == "X" and var.node is not None and real:
            outer.units = self._affine(var)
        return outer

    def _affine(self, var: Var) -> Value | None:
        """The units of a value that is affine in others of kind X."""
        node = var.node
        assert node is not None
        if node.packet not in _AFFINE:
            return None

        def based(item: Any) -> Any:
            if isinstance(item, Var) and item.kind == "X":
                if not item.dtype.is_floating_point:
                    raise Refused("no float")
                return self.graph.base(self.value(item), item.axis)
            if isinstance(item, (tuple, list)):
                return type(item)([based(part) for part in item])
            return self.value(item)

        try:
            made = self.apply(node, based)
        except Refused:
            return None
        made = made[var.place] if isinstance(made, list) else made
        return made if isinstance(made, Value) else None

    # -- rules -----------------------------------------------------------------------------------
    def elementwise(self, op: str, *operands: Any) -> Value:
        return self.graph.elementwise(op, *operands, boolean=op in CONDITIONS)

    def identity(self, node: Node, value: Any, *_: Any, **__: Any) -> Any:
        return value

    def structural(self, node: Node, value: Any, *args: Any, **kwargs: Any) -> Any:
        def run(ids: np.ndarray) -> Any:
            return node.op(torch.as_tensor(np.ascontiguousarray(ids)), *args, **kwargs)

        return self.graph.structural(run, value)

    def joined(self, node: Node, values: Sequence[Any], dim: int = 0) -> Value:
        join = np.concatenate if node.packet is A.cat else np.stack
        return self.graph.structural(lambda *ids: join(ids, dim), *values)

    def scattered(self, node: Node, value: Any, part: Any, *args: Any, **kwargs: Any) -> Value:
        def run(*ids: np.ndarray) -> Any:
            tensors = [torch.as_tensor(np.array(i)) for i in ids]
            return node.op(*tensors, *args, **kwargs)

        return self.graph.structural(run, value, part)

    def add(self, node: Node, a: Any, b: Any, alpha: float = 1) -> Value:
        a, b = (b, a) if node.packet is A.rsub else (a, b)
        if alpha != 1:
            if node.packet is A.rsub:
                a, b = a, self.scaled(b, alpha)
            else:
                b = self.scaled(b, alpha)
        return self.elementwise("add" if node.packet is A.add else "sub", a, b)

    def scaled(self, value: Any, factor: float) -> Any:
        if isinstance(value, Value):
            return self.elementwise("mul", value, float(factor))
        if isinstance(value, Outer):
            get = value.get
            return Outer(
                value.kind, value.shape, lambda run: get(run) * factor, False, value.per_row
            )
        return value * factor

    def where(self, node: Node, condition: Any, a: Any, b: Any) -> Value:
        return self.elementwise("where", condition, a, b)

    def masked_fill(self, node: Node, value: Any, mask: Any, filled: Any) -> Value:
        return self.elementwise("where", mask, filled, value)

    def clamp(self, node: Node, value: Any, low: Any = None, high: Any = None, **k: Any) -> Any:
        low, high = k.get("min", low), k.get("max", high)
        low, high = (None, low) if node.packet is A.clamp_max else (low, high)
        value = value if low is None else self.elementwise("maximum", value, low)
        return value if high is None else self.elementwise("minimum", value, high)

    def lerp(self, node: Node, start: Any, end: Any, weight: Any) -> Value:
        if not isinstance(start, Value) and not isinstance(end, Value):
            self.graph.refuse("lerp between values without a state")
        part = self.elementwise("mul", self.elementwise("sub", end, start), weight)
        return self.elementwise("add", start, part)

    def power(self, node: Node, base: Any, exponent: Any) -> Value:
        if isinstance(base, (int, float)):
            return self.elementwise("exp", self.elementwise("mul", exponent, math.log(base)))
        if not isinstance(exponent, (int, float)):
            return self.elementwise("pow", base, exponent)
        if exponent == int(exponent) and 1 <= exponent <= 16:
            result = base
            for _ in range(int(exponent) - 1):
                result = self.elementwise("mul", result, base)
            return result
        named = {0.5: "sqrt", -1.0: "reciprocal", -0.5: "rsqrt"}.get(float(exponent))
        return self.elementwise(named, base) if named else self.elementwise("pow", base, exponent)

    def elu(self, node: Node, value: Any, alpha: float = 1.0, *rest: Any) -> Value:
        if any(factor != 1 for factor in rest):
            self.graph.refuse("elu with a scale")
        return (
            self.elementwise("elu", value)
            if alpha == 1
            else self.elementwise("elu_alpha", value, alpha)
        )

    def gelu(self, node: Node, value: Any, *, approximate: str = "none") -> Value:
        return self.elementwise("gelu" if approximate == "none" else "gelu_tanh", value)

    def softplus(self, node: Node, value: Any, beta: float = 1, threshold: float = 20) -> Value:
        if beta == 1:
            return self.elementwise("softplus", value)
        made = self.elementwise("softplus", self.elementwise("mul", value, beta))
        return self.elementwise("mul", made, 1 / beta)

    def leaky_relu(self, node: Node, value: Any, slope: float = 0.01) -> Value:
        return self.elementwise("leaky_relu", value, slope)

    def log_sigmoid(self, node: Node, value: Any) -> list[Any]:
        return [self.elementwise("log_sigmoid", value), None]

    def copy(self, node: Node, old: Any, new: Any, *_: Any) -> Any:
        if not isinstance(new, Value) or new.shape != old.shape:
            self.graph.refuse("this copies a tensor of another shape or kind")
        return new

    def convert(self, node: Node, value: Any, **_: Any) -> Any:
        old, new = node.args[0].dtype, node.made[0].dtype
        if old is new:
            return value
        if old is torch.bool and new is self.step.dtype:
            return self.elementwise("number", value)
        if new is torch.bool and old.is_floating_point:
            return self.elementwise("truth", value)
        return self.graph.refuse(
            f"this converts a value that depends on a state from {old} to {new}",
            "compute the whole step in one dtype",
        )

    def reduced(
        self, node: Node, value: Any, axes: Any = None, keep: bool = False, **_: Any
    ) -> Any:
        axes = [axes] if isinstance(axes, int) else axes
        axes = tuple(axes or range(len(value.shape)))
        packet = node.packet
        if packet in (A.amax, A.max):
            made = self.graph.reduce("max", value, axes, keep)
            return [made, None] if packet is A.max and len(node.made) > 1 else made
        if packet in (A.amin, A.min):
            made = self.graph.reduce("max", self.elementwise("neg", value), axes, keep)
            made = self.elementwise("neg", made)
            return [made, None] if packet is A.min and len(node.made) > 1 else made
        total = self.graph.reduce("sum", value, axes, keep)
        return total if packet is A.sum else self._over(total, value, axes)

    def _over(self, total: Value, value: Value, axes: Sequence[int], less: float = 0) -> Value:
        count = math.prod(value.shape[i] for i in axes)
        return self.elementwise("mul", total, 1.0 / (count - less))

    def _mean(self, value: Value, axes: tuple[int, ...], keep: bool = True) -> Value:
        return self._over(self.graph.reduce("sum", value, axes, keep), value, axes)

    def variance(
        self, node: Node, value: Any, axes: Any = None, *, correction: float | None = None,
        keepdim: bool = False,
    ) -> Any:  # fmt: skip
        axes = tuple(axes or range(len(value.shape)))
        centred = self.elementwise("sub", value, self._mean(value, axes))
        squares = self.elementwise("mul", centred, centred)
        less = 1 if correction is None else correction
        total = self._over(self.graph.reduce("sum", squares, axes, keepdim), value, axes, less)
        if node.packet in (A.std, A.std_mean):
            total = self.elementwise("sqrt", total)
        mean = self._mean(value, axes, keepdim)
        return [total, mean] if node.packet in (A.var_mean, A.std_mean) else total

    def layer_norm(
        self, node: Node, value: Any, shape: Any, weight: Any, bias: Any, eps: float
    ) -> list[Any]:
        axes = tuple(range(-len(shape), 0))
        axes = tuple(axis % len(value.shape) for axis in axes)
        centred = self.elementwise("sub", value, self._mean(value, axes))
        variance = self._mean(self.elementwise("mul", centred, centred), axes)
        scale = self.elementwise("rsqrt", self.elementwise("add", variance, eps))
        made = self.elementwise("mul", centred, scale)
        made = made if weight is None else self.elementwise("mul", made, weight)
        return [made if bias is None else self.elementwise("add", made, bias), None, None]

    def softmax(self, node: Node, value: Any, axis: int, *_: Any) -> Value:
        top = self.graph.reduce("max", value, (axis,), True)
        parts = self.elementwise("exp", self.elementwise("sub", value, top))
        return self.elementwise("div", parts, self.graph.reduce("sum", parts, (axis,), True))

    def matmul(self, node: Node, a: Any, b: Any) -> Value:
        graph, swapped = self.graph, not isinstance(a, Value)
        value, weight = (b, a) if swapped else (a, b)
        if not isinstance(weight, Outer) or weight.kind != "F":
            graph.refuse(
                "this multiplies a state by a matrix that depends on x or on a state",
                "multiply by weights, or gate the product element by element",
            )
        if node.packet in (A.mv, A.dot):
            out, axis = weight.shape[:-1], len(value.shape) - 1
            return graph.product(value, (axis,), out, _matrix(weight.get, turned=len(out) > 0))
        if node.packet is A.bmm:
            return self._products(value, weight, swapped)
        if swapped:
            made = graph.product(value, (0,), weight.shape[:1], _matrix(weight.get, turned=True))
            return Value(np.moveaxis(made.ids, -1, 0))
        return graph.product(value, (1,), weight.shape[1:], weight.get)

    def _products(self, value: Value, weight: Outer, swapped: bool) -> Value:
        """The products of a batch of matrices."""
        graph = self.graph
        out = (weight.shape[1] if swapped else weight.shape[2],)
        axis = 1 if swapped else 2
        if graph.view(value)[0] == 0:  # the same matrix for all rows, or refused
            if weight.per_row:
                graph.refuse("each row of the batch has a matrix of its own")
            made = graph.product(value, (axis,), out, _matrix(weight.get, 0, swapped))
            return Value(np.moveaxis(made.ids, -1, 1) if swapped else made.ids)
        made = graph.heads(value, 0, (axis,), out, _matrices(weight.get, swapped))
        return Value(np.moveaxis(made.ids, -1, 1) if swapped else made.ids)

    def addmm(
        self, node: Node, bias: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1
    ) -> Value:
        made = self.matmul(node, a, b)
        made = made if alpha == 1 else self.scaled(made, alpha)
        return self.elementwise("add", made, bias if beta == 1 else self.scaled(bias, beta))


def _matrix(
    get: Callable[[Any], Tensor], number: int | None = None, turned: bool = False
) -> Callable[[Any], Tensor]:
    """One of several matrices, transposed if ``turned``, as ``[in, out]``."""

    def matrix(run: Any) -> Tensor:
        tensor = get(run) if number is None else get(run)[number]
        tensor = tensor if tensor.dim() > 1 else tensor.unsqueeze(-1)
        return tensor.mT if turned else tensor

    return matrix


def _matrices(get: Callable[[Any], Tensor], turned: bool) -> Callable[[Any], Tensor]:
    return lambda run: get(run).mT if turned else get(run)


_UNARY = {
    A.sigmoid: "sigmoid", A.tanh: "tanh", A.relu: "relu", A.exp: "exp", A.log: "log",
    A.log1p: "log1p", A.expm1: "expm1", A.sqrt: "sqrt", A.rsqrt: "rsqrt", A.abs: "abs",
    A.neg: "neg", A.sign: "sign", A.sgn: "sign", A.reciprocal: "reciprocal", A.silu: "silu",
    A.hardsigmoid: "hard_sigmoid", A.logical_not: "logical_not", A.bitwise_not: "logical_not",
    A.detach: "stop_gradient", A.sin: "sin", A.cos: "cos", A.erf: "erf",
}  # fmt: skip
_BINARY = {
    A.mul: "mul", A.div: "div", A.maximum: "maximum", A.minimum: "minimum", A.lt: "lt",
    A.le: "le", A.gt: "gt", A.ge: "ge", A.eq: "eq", A.ne: "ne", A.logical_and: "logical_and",
    A.logical_or: "logical_or", A.logical_xor: "logical_xor", A.bitwise_and: "logical_and",
    A.bitwise_or: "logical_or", A.bitwise_xor: "logical_xor",
}  # fmt: skip
CONDITIONS = frozenset("lt le gt ge eq ne logical_and logical_or logical_not logical_xor truth".split())
_STRUCTURAL = (
    A.view, A.reshape, A._unsafe_view, A.slice, A.select, A.permute, A.t, A.transpose, A.unsqueeze,
    A.squeeze, A.expand, A.split, A.split_with_sizes, A.unsafe_split, A.unsafe_split_with_sizes,
    A.chunk, A.unsafe_chunk, A.unbind, A.flip, A.repeat, A.roll, A.unflatten, A.movedim,
    A._reshape_alias, A.diagonal, A.repeat_interleave,
)  # fmt: skip


def _unary(op: str) -> Table:
    return lambda reader, node, value, **_: reader.elementwise(op, value)


def _binary(op: str) -> Table:
    def rule(reader: Reader, node: Node, a: Any, b: Any, **options: Any) -> Any:
        if options.get("rounding_mode") is not None:
            reader.graph.refuse("a division that rounds")
        return reader.elementwise(op, a, b)

    return rule


TABLE |= {packet: _unary(op) for packet, op in _UNARY.items()}
TABLE |= {packet: _binary(op) for packet, op in _BINARY.items()}
TABLE |= dict.fromkeys(_STRUCTURAL, Reader.structural)
TABLE |= dict.fromkeys((A.clone, A.alias, A.lift_fresh, A.contiguous), Reader.identity)
TABLE |= dict.fromkeys((A.cat, A.stack), Reader.joined)
TABLE |= dict.fromkeys((A.slice_scatter, A.select_scatter), Reader.scattered)
TABLE |= dict.fromkeys((A.add, A.sub, A.rsub), Reader.add)
TABLE |= dict.fromkeys((A.clamp, A.clamp_min, A.clamp_max, A.hardtanh), Reader.clamp)
TABLE |= dict.fromkeys((A.sum, A.mean, A.amax, A.amin, A.max, A.min), Reader.reduced)
TABLE |= dict.fromkeys((A.var, A.std, A.var_mean, A.std_mean), Reader.variance)
TABLE |= dict.fromkeys((A.mm, A.bmm, A.mv, A.dot), Reader.matmul)
TABLE |= {
    A.where: Reader.where, A.masked_fill: Reader.masked_fill, A.lerp: Reader.lerp,
    A.pow: Reader.power, A.elu: Reader.elu, A.gelu: Reader.gelu, A.softplus: Reader.softplus,
    A.leaky_relu: Reader.leaky_relu, A.log_sigmoid_forward: Reader.log_sigmoid,
    A.copy: Reader.copy, A._to_copy: Reader.convert, A.native_layer_norm: Reader.layer_norm,
    A._softmax: Reader.softmax, A.addmm: Reader.addmm,
}  # fmt: skip
_AFFINE = {
    *_STRUCTURAL, A.clone, A.alias, A.cat, A.stack, A.add, A.sub, A.rsub, A.neg, A.mul, A.div, A.mm,
    A.addmm, A.bmm, A.mv, A.lerp,
}  # fmt: skip
