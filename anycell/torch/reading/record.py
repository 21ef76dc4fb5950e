"""A step of PyTorch, recorded as ATen operations, and the values that need no state.

The step runs twice, with batches of two sizes, under ``functionalize``: where the two recordings
differ, a shape or an argument follows the batch. Tensors that need no state are computed by the
recorded operations, on the caller's own tensors and so with torch's own derivatives: once a call,
or for all steps at once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.func import functionalize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from anycell.read import Body, Equation, Refused, Rule, Values, Variable, leaves, mapped, places

_COMPOSED = torch._C.DispatchKey.CompositeImplicitAutograd  # of ops that consist of others
A = torch.ops.aten
ROWS = (3, 5)  # of the two recordings
places.skip(torch)


@dataclass(eq=False)
class Var(Variable):
    """A tensor of a recording, with the shape that it has in the first one.

    Attributes:
        constant: the tensor itself, if the step took it from elsewhere.
        inside: whether the step makes that tensor itself, out of numbers.
    """

    inside: bool = False


@dataclass(frozen=True)
class Rows:
    """An argument that is a multiple of the batch."""

    times: int


@dataclass(frozen=True)
class Like:
    """An argument of which only shape and dtype are read."""

    shape: tuple[Any, ...]
    dtype: torch.dtype


TABLE: dict[Any, Rule] = {}  # rules of ``read``, by packets of ATen


def named(names: str) -> list[Any]:
    """Operations of ATen by their names."""
    return [getattr(A, name) for name in names.split()]


# -- recording -------------------------------------------------------------------------------------

# Of a tensor's shape and dtype alone.
_LIKE = named(
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros "
    "new_ones new_empty new_full new_empty_strided"
)
_BATCH_NORMS = A.native_batch_norm, A._native_batch_norm_legit, A.cudnn_batch_norm


class _Functions(TorchFunctionMode):
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
        self.tensors: dict[Variable, Tensor] = {}  # held, so that no two have one id
        self.equations: list[Equation] = []
        self.stale: set[Var] = set()
        self.whole = ""  # the operation that is being decomposed
        self.inputs = [self._var(tensor, kind=kind) for kind, tensor in inputs]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import Dynamo, for seconds, to skip it here

    def _var(self, tensor: Any, **more: Any) -> Var:
        if not isinstance(tensor, Tensor):  # a result that is none
            return Var((), "none")
        var = Var(tuple(tensor.shape), _name(tensor.dtype), **more)
        self.tensors[var] = tensor
        self.vars[id(tensor)] = var
        return var

    def var(self, tensor: Tensor) -> Var:
        """Returns what a tensor is; one that the step took from elsewhere is a constant."""
        return self.vars.get(id(tensor)) or self._var(tensor, constant=tensor)

    def _recorded(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        var = self.var(leaf)
        if var in self.stale:
            _refuse("an edit in place also changed this view", "assign a new tensor instead")
        return var

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
        if packet is A._batch_norm_with_update or (packet in _BATCH_NORMS and args[5]):
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
        recorded, options = mapped(self._recorded, ([*args], kwargs))
        composed = op.has_kernel_for_dispatch_key(_COMPOSED)
        parts = decomposition_table.get(op) or (op.decompose if composed else None)
        ruled = packet in TABLE or packet in _LIKE
        if parts and not ruled and any(var.kind == "S" for var in leaves(recorded, Var)):
            outer, self.whole = self.whole, self.whole or str(packet)
            try:
                with self:
                    return parts(*args, **kwargs)
            finally:
                self.whole = outer
        made = op(*args, **kwargs)
        self._note(op, recorded, options, made)
        if torch.is_grad_enabled() or packet is A.detach:
            return made
        with self:  # as the user's ``no_grad`` has it
            several = isinstance(made, (tuple, list))
            return type(made)(map(_detached, made)) if several else _detached(made)

    def _note(self, op: Any, args: list[Any], options: dict[str, Any], made: Any) -> None:
        packet = op.overloadpacket
        if packet in (A.lift_fresh, A.lift_fresh_copy, A.lift):
            args[0].inside = args[0].constant is not None
        if packet in _LIKE or op is A.bernoulli.p:
            args[0] = Like(args[0].shape, getattr(torch, args[0].dtype))
        random = torch.Tag.nondeterministic_seeded in op.tags
        name = self.whole or str(packet)
        kinds = {var.kind for var in leaves((args, options), Var)}
        kind = "S" if "S" in kinds else "X" if "X" in kinds or random else "F"
        fixed = not random and all(v.inside or v.number is not None for v in leaves(args, Var))
        results: list[Any] = [
            self._var(tensor, kind=kind, number=_number(tensor) if fixed else None)
            for tensor in (made if isinstance(made, (tuple, list)) else [made])
        ]
        self.equations.append(
            Equation(packet, tuple(args), options, results, places.here(), name, op, random)
        )

    def _edit(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Records an edit in place as the operation that makes a new tensor."""
        target, name = args[0], op._schema.name.removeprefix("aten::")
        var = self.vars.get(id(target))
        if var is None or var.equation is None:
            # ``functionalize`` writes to an input when the step has returned.
            new = self.vars.get(id(args[1])) if op is A.copy_.default else None
            _refuse(
                "this edits a tensor in place that the step did not make: a buffer, an argument, "
                "a variable",
                "return what changes as a part of the state",
                new.equation.where if new is not None and new.equation is not None else None,
            )
        new = getattr(getattr(A, name.removesuffix("_"), None), op._overloadname, None)
        if new is None or not name.endswith("_"):
            _refuse(f"{op.overloadpacket} edits a tensor in place", "assign a new tensor instead")
        recorded, options = mapped(self._recorded, ([*args], kwargs))
        places = _places(target)
        for other in [*self.tensors.values()]:
            same = other is not target and storage(other) == storage(target)
            if same and np.intersect1d(places, _places(other)).size:
                self.stale.add(self.vars[id(other)])
        self.stale.discard(var)
        made = op(*args, **kwargs)
        self._note(new, recorded, options, made)
        return made


def _detached(value: Any) -> Any:
    floats = isinstance(value, Tensor) and value.is_floating_point()
    return A.detach.default(value) if floats else value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def storage(tensor: Tensor) -> int:
    """The memory that a tensor lies in."""
    return tensor.untyped_storage()._cdata


def _places(tensor: Tensor) -> np.ndarray:
    """Returns where the numbers of a tensor lie in its storage."""
    places = np.full((), tensor.storage_offset())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places[..., None] + np.arange(size) * stride
    return places.reshape(-1)


def _refuse(problem: str, instead: str = "", where: str | None = None) -> Any:
    raise Refused(problem, instead, places.here() if where is None else where)


@dataclass(eq=False)
class Recording(Body):
    """A step that was recorded.

    Attributes:
        dtype, device: those of the states.
        rows: the batch of the recording; None if the states have no axis of a batch.
    """

    dtype: torch.dtype = torch.float32
    device: Any = "cpu"
    rows: int | None = None

    @property
    def constants(self) -> list[Variable]:
        """Tensors from elsewhere that are no inputs."""
        used = {v for equation in self.equations for v in equation.operands}
        used |= {*self.outputs, *self.after}
        return [v for v in used if v.constant is not None and not getattr(v, "inside", False)]

    @functools.cached_property
    def random(self) -> list[Variable]:
        """Random numbers that results depend on."""
        needed = self.needed([*self.outputs, *self.after])
        return [v for equation in needed if equation.random for v in equation.results]


Step = Callable[[list[Tensor], list[Tensor], list[Tensor]], tuple[list[Tensor], list[Tensor]]]
Call = Sequence[Sequence[Tensor]]  # what is the same at all steps, this step's input, the states


def record(step: Step, calls: Sequence[Call], rows: tuple[int, int] | None = ROWS) -> Recording:
    """Records a step.

    Args:
        calls: the arguments of two calls, which are alike but for their rows.
        rows: of both; None without an axis of the batch.

    Raises:
        Refused: if the step does what no recording can show.
    """
    first, again = (_record(step, call) for call in calls)
    twins = _Twins(rows or ROWS)
    for var, twin in zip(first.inputs, again.inputs, strict=True):
        twins.pair(var, twin)
    for equation, second in itertools.zip_longest(first.equations, again.equations):
        twins.where = (equation or second).where
        if (equation and equation.source) is not (second and second.source):
            raise otherwise(twins.where)
        equation.arguments = twins.joined(equation.arguments, second.arguments)
        equation.options = {
            name: twins.joined(value, second.options[name])
            for name, value in equation.options.items()
        }
        for var, twin in zip(equation.results, second.results, strict=True):
            twins.pair(var, twin)
    twins.where = ""
    twins.joined([first.outputs, first.after], [again.outputs, again.after])
    first.rows = rows[0] if rows else None
    first.sort(k for k, state in enumerate(first.states) if not state.floating)
    return first


def _record(step: Step, call: Call) -> Recording:
    """Records one call."""
    tensors, xs, states = call
    inputs = [("F", tensor) for tensor in tensors] + [("X", x) for x in xs]
    # Counters keep the operations that the user called.
    inputs += [("S" if t.is_floating_point() or t.dtype is torch.bool else "X", t) for t in states]
    made: list[tuple[list[Tensor], list[Tensor]]] = []

    def run(*arguments: list[Tensor]) -> list[Tensor]:
        made.append(step(*arguments))
        return [*made[0][0], *made[0][1]]

    with Recorder(inputs) as recorder, _Functions(), torch.enable_grad():
        results = functionalize(run)(list(tensors), list(xs), list(states))
    variables: list[Any] = [recorder.var(tensor) for tensor in results]
    known: list[Any] = recorder.inputs
    count, a, b = len(made[0][0]), len(tensors), len(tensors) + len(xs)
    return Recording(
        known[:a], known[a:b], known[b:], variables[:count], variables[count:], recorder.equations,
        dtype=next(state.dtype for state in states if state.is_floating_point()),
        device=states[0].device,
    )  # fmt: skip


def otherwise(where: str) -> Refused:
    """The refusal of a step that branches on the size of the batch."""
    problem = "the step does something else for another batch"
    return Refused(problem, "compute each row from itself alone, without a branch", where)


class _Twins:
    """Finds where the batch is, in two recordings with other numbers of rows.

    Args:
        rows: of each.
    """

    def __init__(self, rows: tuple[int, int]) -> None:
        self.rows, self.known, self.where = rows, dict[Variable, Variable](), ""

    def refuse(self, problem: str, instead: str = "") -> Any:
        _refuse(problem, instead, self.where)

    def pair(self, var: Variable, twin: Variable) -> None:
        """Notes the batch's axis of a tensor, which the second recording has in another size."""
        self.known[twin] = var
        if len(var.shape) != len(twin.shape) or var.dtype != twin.dtype:
            self.refuse("this has another shape or dtype for another batch")
        axes = [i for i, (n, m) in enumerate(zip(var.shape, twin.shape, strict=True)) if n != m]
        if len(axes) > 1:
            self.refuse("this has the batch in two axes", "compute each row from itself")
        var.axis = axes[0] if axes else None
        var.number = var.number if var.number == twin.number else None

    def joined(self, a: Any, b: Any) -> Any:
        """An argument of an operation, from those of both recordings."""
        if isinstance(a, Var):
            if isinstance(b, Var) and b not in self.known and b.constant is not None:
                inside = a.inside and torch.equal(a.constant, b.constant)
                if a.constant is not b.constant and not inside:
                    self.refuse("the step reads numbers out of tensors", "compute with tensors")
                self.known[b] = a
            if self.known.get(b) is not a:
                raise otherwise(self.where)
            return a
        if isinstance(a, Like):
            return Like(self.joined(a.shape, b.shape), a.dtype)
        if isinstance(a, (tuple, list)):
            if len(a) != len(b):
                raise otherwise(self.where)
            return type(a)([self.joined(x, y) for x, y in zip(a, b, strict=True)])
        if a == b or a is b or (a != a and b != b):
            return a
        first, second = self.rows
        if type(a) is int and type(b) is int and a % first == 0 and a * second == b * first:
            return Rows(a // first)
        return self.refuse(
            "a number here follows the size of the batch, or values that Python has read",
            "compute each row from itself alone, with tensors",
        )


def _number(made: Any) -> float | None:
    """The number that all elements of a tensor are; None if they differ."""
    if not isinstance(made, Tensor) or made.is_complex() or not made.numel():
        return None
    first = made.flatten()[0]
    return float(first) if bool((made == first).all()) else None


# -- computing what needs no state -----------------------------------------------------------------


class Run:
    """The tensors of one call of a step that was recorded.

    Args:
        tensors: of ``Recording.fixed``.
        xs: ``[T, B, ...]``, without a batch ``[T, ...]``.
        first: the states before the first step.
        rows: their number; 1 without an axis of rows.
        merged: whether all steps are computed as one batch of T * B rows; else by ``vmap``.

    Attributes:
        series: values at all steps, ``[T, ...]``.
    """

    def __init__(
        self, step: Recording, tensors: Sequence[Tensor], xs: Sequence[Tensor],
        first: Sequence[Tensor], rows: int, merged: bool,
    ) -> None:  # fmt: skip
        self.step, self.rows, self.merged = step, rows, merged
        self.dtype = next(t.dtype for t in first if t.is_floating_point())
        self.steps = xs[0].shape[0]
        self.memo: dict[Any, Any] = {}
        self.last: list[Tensor] = []  # the counters after the last step
        self._once = functools.partial(self._execute, rows)
        self._values = Values(dict(zip(step.fixed, tensors, strict=True)), self._once)
        self._values.update(
            (v, t) for v, t in zip(step.states, first, strict=True) if v.kind == "F"
        )
        self.series: dict[Variable, Tensor] = dict(zip(step.x, xs, strict=True))
        every = functools.partial(self._execute, self.steps * rows)
        self._flat = Values({}, every, self._flattened)  # [T * B, ...]

    def fixed(self, v: Variable) -> Tensor:
        """A value of kind F."""
        return self._values[v]

    def moving(self, v: Variable) -> Tensor:
        """A value of kind X, at all steps: ``[T, ...]``."""
        if v not in self.series:
            self.compute([v])
        return self.series[v]

    def compute(self, wanted: Sequence[Variable]) -> None:
        """Adds values of kind X or S at all steps to ``series``; S from states that are there."""
        missing = [v for v in dict.fromkeys(wanted) if v not in self.series]
        whole = [v for v in missing if not self.merged or v.axis is None]
        if whole:
            self._map(whole)
        for v in missing:
            if v in self.series:
                continue
            tensor, axis = self._flat[v], v.axis
            times = tensor.shape[axis] // self.steps
            tensor = tensor.unflatten(axis, (self.steps, times))
            self.series[v] = tensor.movedim(axis, 0) if axis else tensor

    def one(self, known: Mapping[Variable, Tensor], wanted: Sequence[Variable]) -> list[Tensor]:
        """Values of one step."""
        values = Values(known, self._once, self._fixed)
        return [values[v] for v in wanted]

    def drawn(self) -> dict[Variable, Tensor]:
        """The random numbers of all steps."""
        random = self.step.random
        self.compute(random)
        return {v: self.series[v] for v in random}

    def _fixed(self, v: Variable) -> Tensor | None:
        return self._values[v] if v.kind == "F" else None

    def _flattened(self, v: Variable) -> Tensor | None:
        """A value that is known, with steps and rows as one axis."""
        tensor, axis = self._fixed(v) if v.kind == "F" else self.series.get(v), v.axis
        if tensor is None or axis is None:
            return tensor
        if v.kind == "F":
            shape = list(tensor.shape)
            shape.insert(axis, self.steps)
            tensor = tensor.unsqueeze(axis).expand(shape)
        elif axis:
            tensor = tensor.movedim(0, axis)
        return tensor.flatten(axis, axis + 1)

    def _map(self, wanted: Sequence[Variable]) -> None:
        inputs = list(self.series)

        def one(_: Any, *tensors: Tensor) -> list[Tensor]:
            values = Values(dict(zip(inputs, tensors, strict=True)), self._once, self._fixed)
            return [values[v] for v in wanted]

        clock = torch.empty(self.steps, device=self.step.device)
        made = torch.vmap(one, randomness="different")(clock, *self.series.values())
        self.series |= zip(wanted, made, strict=True)

    def _execute(self, rows: int, equation: Equation, values: Values) -> Sequence[Any]:
        def fill(leaf: Any) -> Any:
            kind = type(leaf)
            if kind is Var:
                return values[leaf]
            if kind is Rows:
                return leaf.times * rows
            if kind is Like:
                like = torch.empty((), dtype=fill(leaf.dtype), device=self.step.device)
                return like.expand(mapped(fill, leaf.shape))
            return self.dtype if leaf is self.step.dtype else leaf

        args, options = mapped(fill, (equation.arguments, equation.options))
        made = equation.source(*args, **options)
        return made if isinstance(made, (tuple, list)) else [made]
