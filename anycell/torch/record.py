"""A step of PyTorch, recorded as ATen operations, and the values that need no state.

The step runs twice, with batches of two sizes, under ``functionalize``: where the two recordings
differ, a shape or an argument follows the batch. Tensors that need no state are computed by the
recorded operations, on the caller's own tensors and so with torch's own derivatives: once a call,
or for all steps at once.
"""

from __future__ import annotations

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
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from anycell.read import Refused

A = torch.ops.aten
ROWS = (3, 5)  # of the two recordings
_SKIPPED = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


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
    """An operation of a recording; ``name`` is that of the operation that the user called."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    where: str
    made: list[Any] = field(default_factory=list)
    name: str = ""

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


TABLE: dict[Any, Callable[..., Any]] = {}  # rules of ``read``, by packets of ATen


# -- recording -------------------------------------------------------------------------------------

_RANDOM_LIKE = {A.rand_like, A.randn_like, A.randint_like}
_FILLED = {
    A.zeros: 0.0, A.ones: 1.0, A.zeros_like: 0.0, A.ones_like: 1.0, A.new_zeros: 0.0,
    A.new_ones: 1.0, A.empty: None, A.empty_like: None, A.new_empty: None, A.full: None,
    A.full_like: None, A.new_full: None, A.scalar_tensor: None, A.empty_strided: None,
    A.new_empty_strided: None,
}  # fmt: skip
_LIKE = {op for op in {*_FILLED, *_RANDOM_LIKE} if str(op).endswith("_like") or "new_" in str(op)}
_STATISTICS = {
    A.native_batch_norm: 5, A._native_batch_norm_legit: 5, A.cudnn_batch_norm: 5,
    A._batch_norm_with_update: None,
}  # fmt: skip


class _OneHot(TorchFunctionMode):
    """Lets ``one_hot`` compare, where torch's own reads the values to check them."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        count = (kwargs or {}).get("num_classes", args[1] if len(args) > 1 else -1)
        if function is torch.nn.functional.one_hot and args and count > 0:
            classes = torch.arange(count, device=args[0].device)
            return (args[0].unsqueeze(-1) == classes).long()
        return function(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    """Records the operations of a step. It refuses edits of tensors that the step did not make, and
    values that Python reads.

    Args:
        inputs: the kind and the tensor of each input.
    """

    def __init__(self, inputs: Sequence[tuple[str, Tensor]]) -> None:
        super().__init__()
        self.vars: dict[int, Var] = {}
        self.tensors: dict[Var, Tensor] = {}  # held, so that no two have one id
        self.nodes: list[Node] = []
        self.stale: set[Var] = set()
        self.whole = ""  # the operation that is being decomposed
        self.inputs = [self._var(tensor, Var(kind, *_meta(tensor))) for kind, tensor in inputs]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import Dynamo, for seconds, to skip it here

    def _var(self, tensor: Tensor, var: Var) -> Var:
        self.tensors[var] = tensor
        self.vars[id(tensor)] = var
        return var

    def var(self, tensor: Tensor) -> Var:
        """Returns what a tensor is; one that the step took from elsewhere is a constant."""
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
        picks = packet in (A.index, A._unsafe_index) and all(
            t is None or t.dtype is not torch.bool for t in args[1]
        )
        if torch.Tag.dynamic_output_shape in op.tags and not picks:
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
        parts = decomposition_table.get(op) or (op.decompose if op._can_decompose() else None)
        ruled = packet in TABLE or packet in _LIKE
        if parts is not None and not ruled and any(var.kind == "S" for var in _vars(recorded)):
            outer, self.whole = self.whole, self.whole or str(packet)
            try:
                with self:
                    return parts(*args, **kwargs)
            finally:
                self.whole = outer
        made = op(*args, **kwargs)
        self._note(op, recorded, {k: self._recorded(v) for k, v in kwargs.items()}, made)
        return made

    def _note(self, op: Any, args: list[Any], kwargs: dict[str, Any], made: Any) -> None:
        name = self.whole or str(op.overloadpacket)
        node = Node(op, tuple(args), kwargs, line(), name=name)
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
            # ``functionalize`` writes to an input when the step has returned.
            new = self.vars.get(id(args[1])) if op is A.copy_.default else None
            _refuse(
                "this edits a tensor in place that the step did not make: a buffer, an argument, "
                "a variable",
                "return what changes as a part of the state",
                new.node.where if new is not None and new.node is not None else None,
            )
        new = getattr(getattr(A, name.removesuffix("_"), None), op._overloadname, None)
        if new is None or not name.endswith("_"):
            _refuse(f"{op.overloadpacket} edits a tensor in place", "assign a new tensor instead")
        recorded = [self._recorded(arg) for arg in args]
        named = {k: self._recorded(v) for k, v in kwargs.items()}
        places = _places(target)
        for other in [*self.tensors.values()]:
            same = other is not target and _storage(other) == _storage(target)
            if same and np.intersect1d(places, _places(other)).size:
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
    """Returns where the numbers of a tensor lie in its storage."""
    places = np.full((), tensor.storage_offset())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places[..., None] + np.arange(size) * stride
    return places.reshape(-1)


def line() -> str:
    """The file and line of the user's code that runs."""
    frame = sys._getframe(1)
    while frame is not None:
        if _of_user(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def raised(error: BaseException) -> str:
    """The file and line of the user's code that raised an error, as the begin of a sentence."""
    place, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        place = f"{Path(file).name}:{trace.tb_lineno}: " if _of_user(file) else place
        trace = trace.tb_next
    return place


def _of_user(file: str) -> bool:
    return not file.startswith((*_SKIPPED, "<")) or file == "<stdin>"


def _refuse(problem: str, instead: str = "", where: str | None = None) -> Any:
    where = line() if where is None else where
    place = f"{where}: " if where else ""
    raise Refused(f"{place}{problem}." + (f" Instead: {instead}." if instead else ""))


@dataclass(eq=False)
class Recording:
    """A step: its inputs and outputs, and the operations between them.

    Attributes:
        tensors: weights, buffers and other tensors that are the same at all steps.
        xs, states: the input of a step and the states before it.
        outputs, after: what the step returns: its output, and the states after it.
        dtype: that of the states.
        rows: the batch of the recording; None if the states have no axis of a batch.
        counted: which states are counters and the like, of kind X.
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
    counted: list[int] = field(default_factory=list)
    plans: dict[Any, list[Node]] = field(default_factory=dict)

    @property
    def constants(self) -> list[Var]:
        """Tensors from elsewhere that are no inputs."""
        used = {var for node in self.nodes for var in node.inputs} | {*self.outputs, *self.after}
        return [var for var in used if var.data is not None and not var.inside]

    def sources(self, var: Var) -> set[Var]:
        """The inputs, and constants, that a value is computed from."""
        inputs = {v for node in self.plan([var]) for v in node.inputs} | {var}
        return {v for v in inputs if v.node is None}

    @property
    def random(self) -> list[Var]:
        """Random numbers that results depend on."""
        return [
            var
            for node in self.plan([*self.outputs, *self.after])
            if torch.Tag.nondeterministic_seeded in node.op.tags
            for var in node.made
        ]

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
    tensors: Sequence[Sequence[Tensor]],
    xs: Sequence[Sequence[Tensor]],
    states: Sequence[Sequence[Tensor]],
    batched: bool,
) -> Recording:
    """Records a step.

    Args:
        step: (tensors, xs, states) -> (outputs, new states).
        tensors: what is the same at all steps, in each of two calls.
        xs, states: the arguments of the calls, of ``ROWS`` rows each if ``batched``.

    Raises:
        Refused: if the step does what no recording can show.
    """
    one, other = (_record(step, *call) for call in zip(tensors, xs, states, strict=True))
    if len(one.nodes) != len(other.nodes):
        raise Refused("the step does something else for another batch or other numbers")
    known: dict[Var, Var] = {}
    for mine, theirs in (
        (one.tensors, other.tensors), (one.xs, other.xs), (one.states, other.states),
    ):  # fmt: skip
        for var, twin in zip(mine, theirs, strict=True):
            _join(var, twin, known, "")
    for node, second in zip(one.nodes, other.nodes, strict=True):
        where = node.where
        if node.op is not second.op or len(node.made) != len(second.made):
            _refuse("the step does something else for another batch", where=where)
        node.args = _joined(node.args, second.args, known, where)
        node.kwargs = {
            name: _joined(value, second.kwargs[name], known, where)
            for name, value in node.kwargs.items()
        }
        for var, twin in zip(node.made, second.made, strict=True):
            if var is not None:
                _join(var, twin, known, where)
    for mine, theirs in ((one.outputs, other.outputs), (one.after, other.after)):
        if len(mine) != len(theirs):
            raise Refused("the step returns something else for another batch")
        for var, twin in zip(mine, theirs, strict=True):
            _joined(var, twin, known, "")
    one.rows = ROWS[0] if batched else None
    _classify(one)
    return one


def _record(
    step: Step, tensors: Sequence[Tensor], xs: Sequence[Tensor], states: Sequence[Tensor]
) -> Recording:
    inputs = [("F", tensor) for tensor in tensors] + [("X", x) for x in xs]
    # Counters keep the operations that the user called: see ``_classify``.
    inputs += [("S" if t.is_floating_point() or t.dtype is torch.bool else "X", t) for t in states]
    made: list[tuple[list[Tensor], list[Tensor]]] = []

    def run(*arguments: list[Tensor]) -> list[Tensor]:
        made.append(step(*arguments))
        return [*made[0][0], *made[0][1]]

    with Recorder(inputs) as recorder, _OneHot(), torch.enable_grad():
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
    """Says of what kind each value is. A state that the step returns as it was is no state; states
    without floats, which no state of floats enters, are computed before the loop.
    """
    for before, after in zip(step.states, step.after, strict=True):
        if before is after:
            before.kind = "F"
        else:
            before.kind = "S"
    changing = [k for k, var in enumerate(step.states) if var.kind == "S"]
    counted = [k for k in changing if not step.states[k].dtype.is_floating_point]
    while True:
        others = {step.states[k] for k in changing if k not in counted}
        kept = [k for k in counted if not others & step.sources(step.after[k])]
        if kept == counted:
            break
        counted = kept
    step.counted = counted
    for k in counted:
        step.states[k].kind = "X"
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
        batch: the number of rows; 1 without an axis of rows.
        merged: whether all steps are computed as one batch of T * B rows; else by ``vmap``.
    """

    def __init__(
        self, step: Recording, tensors: Sequence[Tensor], xs: Sequence[Tensor],
        first: Sequence[Tensor],
        batch: int,
        merged: bool,
    ) -> None:  # fmt: skip
        self.step, self.merged = step, merged
        self.dtype = next(t.dtype for t in first if t.is_floating_point())
        self.steps = xs[0].shape[0]
        self.batch = self.rows = batch
        self.memo: dict[Any, Any] = {}
        self.last: list[Tensor] = []  # the counters after the last step
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

    def one(self, xs: Sequence[Tensor], states: Mapping[Var, Tensor], wanted: Sequence[Var]) -> Any:
        """Values of one step."""
        env = {**states, **dict(zip(self.step.xs, xs, strict=True))}
        find = lambda var: env[var] if var in env else self.fixed(var)  # noqa: E731
        for node in self.step.plan(wanted, frozenset(env)):
            self._apply(node, env, self.batch, find)
        return [find(var) for var in wanted]

    def drawn(self) -> dict[Var, Tensor]:
        """The random numbers of all steps."""
        random = self.step.random
        if random:
            self.compute(random)
        return {var: self.series[var] for var in random}

    def replay(
        self, drawn: Mapping[Var, Tensor], states: Sequence[Tensor]
    ) -> tuple[list[Tensor], Sequence[Tensor]]:
        """The step's own operations, step by step: the outputs ``[T, ...]``, the last states."""
        step, outputs = self.step, []
        for t in range(self.steps):
            known = {var: series[t] for var, series in drawn.items()}
            known |= zip(step.states, states, strict=True)
            xs = [self.series[var][t] for var in step.xs]
            made = self.one(xs, known, [*step.outputs, *step.after])
            outputs.append(made[: len(step.outputs)])
            states = made[len(step.outputs) :]
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
                assert axis is not None
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
