"""``loop(module)`` and ``scan(step, init, xs)``: steps as they are written, over all of time.

A step is read at the first call of its kind (``anycell.torch.read``), tried against the user's own
step in float64, and then runs on a fused kernel. What cannot be read runs step by step.
"""

from __future__ import annotations

import functools
import itertools
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.modules import module as modules

from anycell.explanation import Explained, Explanation, Subject
from anycell.layer.checks import Layout, boolean, describe, integer, refuse
from anycell.layer.restarts import restarts
from anycell.plan import Engine
from anycell.read import Reading, Refused, proof
from anycell.torch import read
from anycell.torch.arguments import TORCH
from anycell.torch.functional import engine_of, fused_plan
from anycell.torch.fused import autocast
from anycell.torch.observers import compiled, observed
from anycell.torch.primitive import recurrence
from anycell.torch.recurrent import Lengths

Step = Callable[[Any, Any], tuple[Any, Any]]  # (x, state) -> (output, state)
_ORDINARY = frozenset(nn.Module().__dict__) - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LOCK = threading.RLock()  # a step is read with other tensors in place of its own
_MOST = 64  # readings that one step keeps, and steps of ``scan``
_NUMBERS = itertools.count()
_TORCH = str(Path(torch.__file__).parent)


# -- what a step takes from elsewhere --------------------------------------------------------------


@dataclass
class Surroundings:
    """What a step reads besides its arguments.

    Attributes:
        places: where its tensors are: a dictionary or the cell of a closure, and the name there.
        modules: the modules among them.
        guards: what else decides what the step does, hashable; ``held`` keeps it alive.
        loose: whether a list or a dictionary is among them, which may change in place.
    """

    places: list[tuple[Any, str]] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    guards: list[Any] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)
    loose: bool = False
    seen: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, step: Any) -> Surroundings:
        around = cls()
        around.walk(step)
        return around

    def tensors(self) -> list[Tensor]:
        return [
            holder[name] if type(holder) is dict else holder.cell_contents
            for holder, name in self.places
        ]

    def walk(self, value: Any) -> None:
        """Adds a module, or what a function reads."""
        if id(value) in self.seen:
            return
        self.seen.add(id(value))
        self.held.append(value)
        if isinstance(value, nn.Module):
            for module in value.modules():
                self._module(module)
        elif isinstance(value, types.MethodType):
            self.walk(value.__self__)
            self.walk(value.__func__)
        elif isinstance(value, functools.partial):
            self.walk(value.func)
            self.guards.append(self._frozen([*value.args, *value.keywords.items()]))
        elif isinstance(value, types.FunctionType):
            if not value.__code__.co_filename.startswith(_TORCH):
                self._function(value)
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            self.guards.append(type(value))
            for name in vars(value):
                self._item(value.__dict__, name)

    def _function(self, function: types.FunctionType) -> None:
        code = function.__code__
        self.guards.append(code)
        for cell in function.__closure__ or ():
            self._item(cell, "cell_contents")
        for name in _names(code):
            if name in function.__globals__:
                self._item(function.__globals__, name)
        self.guards.append(self._frozen([*(function.__defaults__ or ())]))

    def _module(self, module: nn.Module) -> None:
        if any(module is other for other in self.modules):
            return
        self.modules.append(module)
        self.guards += [type(module), *module._modules]
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    self.places.append((tensors, name))
                self.guards.append((name, tensor is None))
        for name in module.__dict__:
            if name not in _ORDINARY:
                self._item(module.__dict__, name)

    def _item(self, holder: Any, name: str) -> None:
        try:
            value = holder[name] if type(holder) is dict else holder.cell_contents
        except ValueError:  # a variable that has no value yet
            return
        if isinstance(value, Tensor):
            self.places.append((holder, name))
        elif isinstance(value, (nn.Module, types.FunctionType, types.MethodType)):
            self.walk(value)
        elif isinstance(value, functools.partial):
            self.walk(value)
        else:
            self.guards.append((name, self._frozen(value)))

    def _frozen(self, value: Any) -> Any:
        """The value, or what stands for it: its parts, or its identity."""
        kind = type(value)
        if kind in (int, float, bool, str, bytes, type(None), torch.dtype, torch.device):
            return kind, value
        if kind in (tuple, list, dict) and len(value) <= 16:
            self.loose |= kind is not tuple
            return kind, tuple(map(self._frozen, value.items() if kind is dict else value))
        self.held.append(value)
        return id(value)

    @contextmanager
    def swapped(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Puts other tensors in the places of the step's own, for a while."""
        old = self.tensors()
        try:
            self._put(tensors)
            yield
        finally:
            self._put(old)

    def _put(self, tensors: Sequence[Tensor]) -> None:
        for (holder, name), tensor in zip(self.places, tensors, strict=True):
            if type(holder) is dict:
                holder[name] = tensor
            else:
                holder.cell_contents = tensor

    def hooked(self) -> str | None:
        """Why hooks are in the way, if there are any."""
        for module in self.modules:
            if any(getattr(module, name) for name in _HOOKS):
                return (
                    f"{type(module).__name__} has hooks, which a fused step would not call. "
                    "Instead: remove them, or compute in the module what they compute"
                )
        glob = modules._global_forward_hooks or modules._global_forward_pre_hooks
        if glob or modules._global_backward_hooks or modules._global_backward_pre_hooks:
            return "torch has hooks for all modules, which a fused step would not call"
        return None


def _names(code: types.CodeType) -> Iterator[str]:
    """The names that code may read from its module, functions inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


# -- a call ----------------------------------------------------------------------------------------


class Call(NamedTuple):
    """The tensors of a call, with time first.

    Attributes:
        xs, x_tree: the leaves of x, ``[T, B, ...]`` or ``[T, ...]``, and their structure.
        state, state_tree: the leaves of the state before the first step, and their structure.
        batched: whether there is an axis of rows.
        mask: bool ``[T, B]``, or None; B is 1 without an axis of rows.
        resets: bool ``[T, B]``, or None: where episodes start.
        restored: the leaves of the state that resets restore; None for zeros.
        reverse: whether the loop runs from the last step to the first.
    """

    xs: list[Tensor]
    x_tree: Any
    state: list[Tensor]
    state_tree: Any
    batched: bool
    mask: Tensor | None = None
    resets: Tensor | None = None
    restored: list[Tensor] | None = None
    reverse: bool = False

    @property
    def rows(self) -> int:
        return self.xs[0].shape[1] if self.batched else 1

    def signature(self, tensors: Sequence[Tensor]) -> Any:
        """What a reading depends on."""
        skip = 1 + self.batched
        return (
            self.x_tree, self.state_tree, self.batched, self.batched and self.xs[0].shape[1] == 1,
            tuple([(t.shape[skip:], t.dtype, t.device) for t in self.xs]),
            tuple([(t.shape[self.batched :], t.dtype) for t in self.state]),
            tuple([(t.shape, t.dtype) for t in tensors]),
        )  # fmt: skip


def stepwise(step: Step, call: Call) -> tuple[Any, Any]:
    """Runs a step over time as a Python loop does."""
    state, steps = pytree.tree_unflatten(call.state, call.state_tree), len(call.xs[0])
    mask, xs = call.mask, _unmasked(call)
    starts = None if call.resets is None else restarts(call.resets, mask, call.reverse)
    outputs: list[list[Any]] = []
    tree: Any = None
    for t in reversed(range(steps)) if call.reverse else range(steps):
        leaves, structure = pytree.tree_flatten(state)
        if starts is not None:
            restored = call.restored or [torch.zeros_like(leaf) for leaf in leaves]
            leaves = _chosen(starts[t], restored, leaves, call)
        before = pytree.tree_unflatten(leaves, structure)
        output, state = step(pytree.tree_unflatten([x[t] for x in xs], call.x_tree), before)
        parts, tree = pytree.tree_flatten(output)
        if mask is not None:
            after, structure = pytree.tree_flatten(state)
            state = pytree.tree_unflatten(_chosen(mask[t], after, leaves, call), structure)
            nothing = [torch.zeros_like(p) if isinstance(p, Tensor) else p for p in parts]
            parts = _chosen(mask[t], parts, nothing, call)
        outputs.append(parts)
    if call.reverse:
        outputs.reverse()
    series = [
        torch.stack(parts) if isinstance(parts[0], Tensor) else parts[-1]
        for parts in map(list, zip(*outputs, strict=True))
    ]
    return pytree.tree_unflatten(series, tree), state


def _unmasked(call: Call) -> list[Tensor]:
    """The input with zeros under the mask, where a NaN would reach gradients."""
    if call.mask is None:
        return call.xs
    zero = [torch.zeros((), dtype=x.dtype, device=x.device) for x in call.xs]
    return [torch.where(_wide(call.mask, x, call), x, z) for x, z in zip(call.xs, zero, strict=True)]


def _wide(flags: Tensor, like: Tensor, call: Call) -> Tensor:
    """Flags ``[T, B]`` or ``[B]`` in a shape that broadcasts against a tensor."""
    flags = flags if call.batched else flags.squeeze(-1)
    return flags.reshape(*flags.shape, *[1] * (like.dim() - flags.dim()))


def _chosen(flags: Tensor, a: Sequence[Any], b: Sequence[Any], call: Call) -> list[Any]:
    """Leaves of ``a`` for the rows with flags, and of ``b`` for the others."""
    chosen = []
    for one, other in zip(a, b, strict=True):
        if one is other or not isinstance(one, Tensor):
            chosen.append(one)
            continue
        if call.batched and other.shape[:1] != (call.rows,):
            refuse(
                "mask, lengths, resets", f"with a state or an output {describe(other)}",
                f"tensors whose first axis is the batch of {call.rows}", "Expand it to all rows.",
            )  # fmt: skip
        chosen.append(torch.where(_wide(flags, other, call), one, other))
    return chosen


# -- a step that was read --------------------------------------------------------------------------


Series = tuple[dict[str, Tensor], dict[str, Tensor]]


class Plan:
    """A step that was read, and all that its calls have in common."""

    def __init__(
        self, recording: read.Recording, reader: read.Reader, trees: list[Any], merged: bool
    ) -> None:
        self.recording, self.reading, self.merged = recording, reader.reading, merged
        self.output_tree, self.state_tree, self.fixed = trees
        states, after = recording.states, recording.after
        self.moving = [states.index(var) for var in reader.states]  # states that change
        results = {after[k]: place for place, k in enumerate(self.moving)}
        known = frozenset([*results, *reader.states])
        later = [v for v in recording.outputs if v.kind == "S" and v not in known]
        used = {v for node in recording.plan(later, known) for v in node.inputs}
        used.update(recording.outputs)
        self.later = list(dict.fromkeys(later))
        self.after = {var: place for var, place in results.items() if var in used}
        self.before = {
            var: place for place, var in enumerate(reader.states) if var in used
        }  # outputs that read the state before the step
        wanted = {*self.after.values(), *self.before.values()}
        names = [self.reading.names_of(place) for place in sorted(wanted)]
        self.names = tuple(dict.fromkeys(chain.from_iterable(names)))

    def __call__(
        self,
        call: Call,
        tensors: Sequence[Tensor],
        engine: str | None = None,
        drawn: Mapping[read.Var, Tensor] | None = None,
    ) -> tuple[list[Any], list[Tensor]]:
        """Returns the leaves of the output and of the last state.

        Args:
            drawn: random numbers of all steps that are drawn already.
        """
        run = self.run(call, tensors)
        run.series |= drawn or {}
        return self._leave(call, run, self._recur(self._enter(call, run), engine))

    def replayed(self, call: Call, tensors: Sequence[Tensor]) -> tuple[list[Any], list[Tensor]]:
        """Returns the same as a call. What it does around the kernel is recorded in the second call
        with tensors of the same shapes and strides, and then replayed.
        """
        flags = call.mask, call.resets, *(call.restored or ())
        arrays = [*tensors, *call.xs, *call.state, *[flag for flag in flags if flag is not None]]
        key = (
            tuple([(t.shape, t.stride()) for t in arrays]),
            call.mask is None, call.resets is None, call.restored is None, call.reverse,
        )  # fmt: skip
        tape = self.tapes.get(key)
        if tape is None:  # many calls come once, with a number of steps of their own
            self.tapes[key] = None if key not in self.tapes else tape
        return None

    def run(self, call: Call, tensors: Sequence[Tensor]) -> read.Run:
        return read.Run(self.recording, tensors, _unmasked(call), call.state, self.merged)

    def _enter(self, call: Call, run: read.Run) -> dict[str, Any]:
        """The arguments of ``recurrence``."""
        reading, mask = self.reading, call.mask
        arguments = reading.call(run, [call.state[k] for k in self.moving])
        if mask is not None:
            inner = arguments.get("mask")  # the step's own
            mask = mask if inner is None else mask & inner
            arguments |= {"mask": mask, "masked_output": "repeat"}
        if call.resets is not None:
            arguments["resets"] = call.resets
            if call.restored is not None:
                restored = [call.restored[k] for k in self.moving]
                arguments["reset_state"] = tuple(reading.start(run, restored))
        if call.reverse:
            arguments["reverse"] = True
        return arguments

    def _recur(self, arguments: dict[str, Any], engine: str | None = None) -> Series:
        """The states of all steps that outputs need, and the last states, by the cell's names."""
        cell, names = self.reading.cell, self.names
        _, last, *others = recurrence(
            cell, return_states=names or None, engine=engine, **arguments
        )
        return others[0] if others else {}, dict(zip(cell.state_names, last, strict=True))

    def _leave(self, call: Call, run: read.Run, states: Series) -> tuple[list[Any], list[Tensor]]:
        series, ends = states
        final = list(call.state)
        for place, k in enumerate(self.moving):
            final[k] = self._state(place, ends, call)
        return self._outputs(call, run, series), final

    def unfit(self, call: Call) -> str | None:
        """Why the kernel cannot run a call of this step, if it cannot."""
        flags = self.reading.flags
        if call.resets is not None and flags is not None:
            return "resets= for a step that holds or resets its own state"
        if call.resets is not None and len(self.moving) < len(call.state):
            return "resets= with a state that the step never changes"
        if call.reverse and flags is not None and flags.restored is not None:
            return "reverse= for a step that resets its own state"
        return None

    @property
    def engine(self) -> Engine:
        reading, like = self.reading, torch.empty(0, dtype=self.recording.dtype, device=self.recording.device)
        return engine_of(fused_plan(reading.cell, reading.size, like, tuple(reading.sizes.items())))

    def _state(self, place: int, values: Any, call: Call) -> Tensor:
        """A state of the user's, out of those of the cell."""
        tensor, like = self.reading.joined(place, values), call.state[self.moving[place]]
        if like.dtype is torch.bool:
            return tensor > 0.5
        return tensor

    def _outputs(self, call: Call, run: read.Run, series: Any) -> list[Any]:
        known = run.series
        whole = {place: self._state(place, series, call) for place in self.after.values()}
        known |= {var: whole[place] for var, place in self.after.items()}
        for var, place in self.before.items():
            after = whole[place] if place in whole else self._state(place, series, call)
            known[var] = self._entering(call, after, self.moving[place])
        if self.later:
            run.compute(self.later)
        outputs = []
        for var in self.recording.outputs:
            if var.kind == "F":
                tensor = run.fixed(var)
                tensor = tensor.expand(run.steps, *tensor.shape)
            else:
                tensor = run.moving(var)
            if call.mask is not None:
                tensor = torch.where(_wide(call.mask, tensor, call), tensor, torch.zeros_like(tensor))
            outputs.append(tensor)
        for place, value in self.fixed:
            outputs.insert(place, value)
        return outputs

    def _entering(self, call: Call, after: Tensor, k: int) -> Tensor:
        """The states before each step, from those after each step, which masked steps hold."""
        first = call.state[k].unsqueeze(0)
        parts = [after[1:], first] if call.reverse else [first, after[:-1]]
        before = torch.cat(parts)
        if call.resets is None:
            return before
        starts = restarts(call.resets, call.mask, call.reverse)
        restored = torch.zeros_like(first[0]) if call.restored is None else call.restored[k]
        return torch.where(_wide(starts, before, call), restored, before)


class Readings:
    """The readings of one step, by signatures."""

    def __init__(self) -> None:
        self.plans: OrderedDict[Any, Plan | str] = OrderedDict()
        self.last: Plan | str = "no call has been made: a step is read at its first call"
        self.tokens: OrderedDict[Any, Any] = OrderedDict()

    def token(self, guards: Any, held: Any) -> Any:
        """What stands for guards in the signatures of plans."""
        known = self.tokens.get(guards)
        if known is None:
            known = self.tokens[guards] = next(_NUMBERS), held
            if len(self.tokens) > _MOST:
                self.tokens.popitem(last=False)
        return known[0]

    @property
    def engine(self) -> Engine:
        plan = self.last
        return Engine("torch", plan) if isinstance(plan, str) else plan.engine

    def subject(self, about: str) -> Subject:
        """The latest call, for ``explain``."""
        plan = self.last
        if isinstance(plan, str):
            return Subject(about, self.engine, None, 0, "", {})
        dtype = str(plan.recording.dtype).removeprefix("torch.")
        reading = plan.reading
        return Subject(about, plan.engine, reading.cell, reading.size, dtype, reading.sizes)

    def run(self, step: Step, around: Surroundings, key: Any, call: Call, title: str) -> Any:
        """Runs a step over time; returns the output and the last state."""
        plan: Plan | str
        tensors = around.tensors()
        if observed():
            plan = "tensors of a trace, of torch.func, of a mode or of another type are no memory"
        elif autocast():
            plan = "autocast chooses a dtype for each operation of the step"
        elif (hooked := around.hooked()) is not None:
            plan = hooked
        else:
            signature = key, call.signature(tensors)
            known = self.plans.get(signature)
            plan = self._read(step, around, signature, call, title) if known is None else known
            if isinstance(plan, Plan):
                plan = plan.unfit(call) or plan
        self.last = plan
        if isinstance(plan, str):
            return stepwise(step, call)
        outputs, final = plan(call, tensors)
        return (
            pytree.tree_unflatten(outputs, plan.output_tree),
            pytree.tree_unflatten(final, plan.state_tree),
        )

    def _read(
        self, step: Step, around: Surroundings, signature: Any, call: Call, title: str
    ) -> Plan | str:
        with _LOCK:
            plan = _plan(step, around, call, title)
        self.plans[signature] = plan
        if len(self.plans) > _MOST:
            self.plans.popitem(last=False)
        return plan


def _plan(step: Step, around: Surroundings, call: Call, title: str) -> Plan | str:
    """Reads a step, and tries the reading; a string says why the step runs step by step."""
    if not any(state.is_floating_point() for state in call.state):
        return "the state has no floating-point tensor"
    device = call.xs[0].device
    devices = [device] if device.type == "cuda" else []
    try:
        with (
            torch.random.fork_rng(devices), torch.inference_mode(False), _unchanged(around.modules),
        ):  # fmt: skip
            return _proven(step, around, call, title)
    except Refused as refusal:
        return str(refusal)
    except Exception as error:  # whatever a step does under a recording that it does not do alone
        first = (str(error).strip().splitlines() or [""])[0]
        return f"the step could not be recorded: {type(error).__name__}: {first}"


@contextmanager
def _unchanged(watched: Sequence[nn.Module]) -> Iterator[None]:
    """Refuses a step that changes attributes of its modules, and restores them."""
    old = [dict(module.__dict__) for module in watched]
    inside = [
        {name: value.copy() for name, value in attributes.items() if type(value) in (list, dict, set)}
        for attributes in old
    ]
    yield
    for module, attributes, copies in zip(watched, old, inside, strict=True):
        now = module.__dict__
        changed = [n for n in {**now, **attributes} if now.get(n) is not attributes.get(n)]
        for name, copy in copies.items():
            value = attributes[name]
            same = len(value) == len(copy)
            pairs = zip(value.values(), copy.values()) if type(value) is dict else zip(value, copy)
            if not same or not (type(value) is set or all(a is b for a, b in pairs)):
                changed.append(name)
                value.clear()
                value.extend(copy) if type(value) is list else value.update(copy)
        if changed:
            now.clear()
            now.update(attributes)
            raise Refused(
                f"the step changes {type(module).__name__}.{changed[0]}. "
                "Instead: return what changes as a part of the state"
            )


def _proven(step: Step, around: Surroundings, call: Call, title: str) -> Plan | str:
    tensors = [tensor.detach() for tensor in around.tensors()]
    trees: list[Any] = []

    def flat(tensors: list[Tensor], xs: list[Tensor], states: list[Tensor]) -> Any:
        with around.swapped(tensors):
            output, state = step(
                pytree.tree_unflatten(xs, call.x_tree),
                pytree.tree_unflatten(states, call.state_tree),
            )
        parts, output_tree = pytree.tree_flatten(output)
        after, state_tree = pytree.tree_flatten(state)
        fixed = [(k, part) for k, part in enumerate(parts) if not isinstance(part, Tensor)]
        trees[:] = output_tree, state_tree, fixed
        return [part for part in parts if isinstance(part, Tensor)], after

    samples = [_sample(call, rows, seed) for seed, rows in enumerate(read.ROWS)]
    xs, states = zip(*samples, strict=True)
    recording = read.record(flat, tensors, xs, states, call.batched)
    if recording.constants:
        given = describe(recording.constants[0].data)
        raise Refused(
            f"the step uses a tensor ({given}) that is no parameter, buffer or attribute of a "
            "module, nor a variable of the step. Instead: register it as a buffer"
        )
    for old, new in zip(recording.states, recording.after, strict=True):
        if (old.shape, old.dtype, old.axis) != (new.shape, new.dtype, new.axis):
            raise Refused(
                f"a state of {old.dtype} {list(old.shape)} becomes {new.dtype} {list(new.shape)} "
                "(for 3 rows). Instead: return states as they were passed"
            )
    reader = read.Reader(recording, _labels(call), title)
    moving = [v for node in recording.nodes for v in node.made if v is not None and v.kind == "X"]
    merged = call.batched and all(var.axis is not None for var in [*moving, *recording.xs])
    reason: str | None = None
    for way in (True, False) if merged else (False,):
        plan = Plan(recording, reader, list(trees), way)
        reason = _tried(step, around, plan, call)
        if reason is None:
            return plan
    return f"{reason}. Instead: report it, with the step"


def _labels(call: Call) -> list[str]:
    """What the states are called in the cell: the keys of a dictionary, or h and c."""
    tree = pytree.tree_unflatten(call.state, call.state_tree)
    if isinstance(tree, dict) and len(tree) == len(call.state):
        return [str(name) for name in tree]
    return {1: ["h"], 2: ["h", "c"]}.get(len(call.state), [""] * len(call.state))


def _sample(call: Call, rows: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """One step's input and states, of so many rows: random numbers, or if they are none, those of
    the call.
    """
    device = call.xs[0].device
    generator = torch.Generator().manual_seed(seed)

    def like(tensor: Tensor, batched: bool) -> Tensor:
        shape = (rows, *tensor.shape[1:]) if batched else tuple(tensor.shape)
        if tensor.is_floating_point():
            numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
            return numbers.to(device, tensor.dtype)
        tensor = tensor.detach()
        return tensor[torch.arange(rows, device=device) % len(tensor)] if batched else tensor.clone()

    batched = call.batched
    # A state without rows keeps its shape: the step must return it as it was.
    states = [like(t, batched and t.shape[:1] == (call.rows,)) for t in call.state]
    return [like(x[0], batched) for x in call.xs], states


# -- the proof -------------------------------------------------------------------------------------


def _tried(step: Step, around: Surroundings, plan: Plan, call: Call) -> str | None:
    """Why the reading is not the step; None if both agree for a few steps in float64."""
    exact, own = torch.float64, plan.recording.dtype
    for dtype in (exact, own) if own is not exact else (exact,):
        try:
            return _compared(step, around, plan, call, dtype)
        except (RuntimeError, TypeError):  # a step that knows its dtype
            if dtype is own:
                raise
    return None


def _compared(
    step: Step, around: Surroundings, plan: Plan, call: Call, dtype: torch.dtype
) -> str | None:
    rows, own = min(call.rows, 3), plan.recording.dtype
    shapes = [
        (rows, *t.shape[1:]) if call.batched and t.shape[:1] == (call.rows,) else tuple(t.shape)
        for t in call.state
    ]
    tensors, inputs = [], []
    for tensor in around.tensors():
        tensor = tensor.detach().to(dtype if tensor.dtype is own else tensor.dtype, copy=True)
        tensors.append(tensor.requires_grad_(tensor.is_floating_point()))
    for x in call.xs:
        x = x.detach()[torch.arange(proof.STEPS, device=x.device) % len(x)]
        x = x[:, :rows] if call.batched else x
        if x.is_floating_point():
            generator = torch.Generator().manual_seed(7)
            numbers = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            x = numbers.to(x.device, dtype if x.dtype is own else x.dtype).requires_grad_()
        inputs.append(x)
    for start, numbers in proof.starts(shapes):
        states = [
            _started(state, number, call, rows, dtype if state.dtype is own else state.dtype)
            for state, number in zip(call.state, numbers, strict=True)
        ]
        trial = Call(inputs, call.x_tree, states, call.state_tree, call.batched)
        leaves = [t for t in (*tensors, *inputs, *states) if t.requires_grad]
        with torch.enable_grad():
            drawn = plan.run(trial, tensors).drawn()
            reading = _results(plan(trial, tensors, "reference", drawn), leaves)
            if drawn:  # the step draws other numbers
                expected = _results(plan.run(trial, tensors).replay(drawn, states), leaves)
            else:
                with around.swapped(tensors):
                    expected = _results(stepwise(step, trial), leaves)
        name = str(dtype).removeprefix("torch.")
        reason = proof.difference(expected, reading, name, start)
        if reason is not None:
            return reason
    return None


def _started(like: Tensor, number: Any, call: Call, rows: int, dtype: torch.dtype) -> Tensor:
    """A state to start a trial from: the number, or a part of the call's own state."""
    if like.is_floating_point() or like.dtype is torch.bool:
        state = torch.as_tensor(number, device=like.device).to(dtype)
        return state.requires_grad_(state.is_floating_point())
    return like.detach()[:rows].clone() if call.batched and like.dim() else like.detach().clone()


def _results(results: Any, leaves: Sequence[Tensor]) -> dict[str, Any]:
    """Outputs, last states and gradients, by what they are."""
    outputs = [t for t in pytree.tree_leaves(results) if isinstance(t, Tensor)]
    named = {f"output {k}": t.detach().double().cpu().numpy() for k, t in enumerate(outputs)}
    total = sum(
        (torch.sin(t + 0.1 * k) * torch.linspace(1, 2, t.numel(), dtype=t.dtype, device=t.device).reshape(t.shape)).sum()
        for k, t in enumerate(outputs)
        if t.is_floating_point() and t.requires_grad
    )
    if not isinstance(total, Tensor):
        return named
    gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    for k, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True)):
        gradient = torch.zeros_like(leaf) if gradient is None else gradient
        named[f"gradient {k}, of a tensor {list(leaf.shape)}"] = gradient.double().cpu().numpy()
    return named


# -- doors -----------------------------------------------------------------------------------------


class Loop(Explained, nn.Module):
    """Runs a module that computes one step over time, on a fused kernel if the step can be read.

        for x_t in x:                           output, state = Loop(module)(x, state)
            y, state = module(x_t, state)

    Weights stay the module's own. The module is read at the first call with arguments of new shapes
    or dtypes, and again when it has changed: its attributes, ``train()`` or ``eval()``, its
    parameters' dtype. ``engine`` says what runs, and why; ``explain()`` shows the ``@cell`` that
    was read, which you can keep instead.

    Args:
        module: returns (output, new state) for the input and the state of one step. A module that
            returns the new state alone, as ``torch.nn.LSTMCell`` does, has its first tensor as
            output.
        batch_first: whether the tensors of x and the output are ``[B, T, ...]``.

    ``forward`` takes (pass all but the first two by name), and returns (output, final state):
        x: a tensor ``[T, B, ...]``, or tensors in tuples, lists and dictionaries; without a batch
            ``[T, ...]``.
        state: the module's state before the first step, ``[B, ...]``, nested as it likes.
        mask, lengths: as in ``anycell.torch.RNN``: a masked step holds the state, and its output is
            zero.
        resets: ``[T, B]``, laid out as x, True where an episode starts.
        reset_state: the state that resets restore; zeros by default.
        reverse: whether the loop runs from the last step to the first.
        output: what the module returns at each step, ``[T, B, ...]``.

    Random numbers, as of dropout, are drawn for all steps at once: of the same distribution, but
    not the numbers that a loop would draw. Modules with hooks, calls under autocast, in traces and
    in ``torch.func``, and all that cannot be read run step by step.

    Raises:
        TypeError, ValueError: with the argument, what was given, what is expected.

    Example:
        >>> layer = loop(nn.GRUCell(3, 8))
        >>> output, h = layer(torch.zeros(5, 2, 3), torch.zeros(2, 8), lengths=[5, 3])
        >>> output.shape, layer.engine.name
        (torch.Size([5, 2, 8]), 'cpu')
    """

    def __init__(self, module: nn.Module, batch_first: bool = False) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            hint = "Use anycell.torch.scan(step, init, xs) for a function."
            refuse("module", describe(module), "a torch.nn.Module of one step", hint, TypeError)
        self.module = module
        self.batch_first = boolean("batch_first", batch_first)
        self._forget()

    def _forget(self) -> None:
        self._readings = Readings()
        self._around: tuple[list[Any], Surroundings, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        made = "_readings", "_around"
        return {name: value for name, value in self.__dict__.items() if name not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def extra_repr(self) -> str:
        return "batch_first=True" if self.batch_first else ""

    def forward(
        self,
        x: Any,
        state: Any,
        *,
        mask: Tensor | None = None,
        lengths: Lengths | None = None,
        resets: Tensor | None = None,
        reset_state: Any = None,
        reverse: bool = False,
    ) -> tuple[Any, Any]:
        """Returns the output and the final state; see the class."""
        arguments = x, state, mask, lengths, resets, reset_state, reverse
        if compiled():  # the graph breaks here
            return torch.compiler.disable(self._forward)(*arguments)
        return self._forward(*arguments)

    def _forward(
        self, x: Any, state: Any, mask: Any, lengths: Any, resets: Any, restored: Any, reverse: Any
    ) -> tuple[Any, Any]:
        first, swap = self.batch_first, False
        xs, tree = pytree.tree_flatten(x)
        call = _call(xs, tree, state, first)
        if call.batched and first:
            swap = True
            call = call._replace(xs=[t.transpose(0, 1) for t in call.xs])
        if mask is not None or lengths is not None or resets is not None:
            xs = call.xs
            layout = Layout(TORCH, xs[0], len(xs[0]), call.rows, first, call.batched)
            flags = None if resets is None else layout.flags("resets", resets)
            call = call._replace(mask=layout.valid(mask, lengths), resets=flags)
        if restored is not None:
            call = call._replace(restored=_restored(restored, call))
        if reverse is not False:
            call = call._replace(reverse=boolean("reverse", reverse))
        around, key = self._surroundings()
        title = type(self.module).__name__
        output, state = self._readings.run(self._step, around, key, call, title)
        if swap:
            rows = call.rows
            output = pytree.tree_map(
                lambda t: t.transpose(0, 1) if t.dim() > 1 and t.shape[1] == rows else t, output
            )
        return output, state

    def _step(self, x: Any, state: Any) -> tuple[Any, Any]:
        result = self.module(x, state)
        count = len(pytree.tree_leaves(state))
        if isinstance(result, (tuple, list)) and len(result) == 2:
            if len(pytree.tree_leaves(result[1])) == count:
                return result[0], result[1]
        leaves = pytree.tree_leaves(result)
        if len(leaves) != count:
            refuse(
                "module", f"one that returns {describe(result)}",
                f"(output, new state), with the {count} tensors of the state",
                "Return y, state.", TypeError,
            )  # fmt: skip
        return leaves[0], result

    def _surroundings(self) -> tuple[Surroundings, Any]:
        """What the module reads, walked again only if an attribute has changed."""
        if self._around is not None:
            old, around, key = self._around
            if not around.loose and old == _identities(around.modules):
                return around, key
        around = Surroundings.of(self.module)
        key = tuple(around.guards)
        key = self._readings.token(key, around.held)
        self._around = _identities(around.modules), around, key
        return around, key

    @property
    def engine(self) -> Engine:
        """The engine that ran the latest call, and why."""
        return self._readings.engine

    def _subject(self) -> Subject:
        about = f"loop({type(self.module).__name__})"
        return self._readings.subject(about)

    def explain(self, **options: Any) -> Explanation:
        """Describes the latest call: the engine that ran it, and why; then the ``@cell`` that was
        read. The arguments are as in ``anycell.explain``.
        """
        return super().explain(**options)


def _identities(watched: Sequence[nn.Module]) -> list[Any]:
    """What says that modules are as they were: their attributes and children."""
    made: list[Any] = []
    for module in watched:
        made += map(id, module.__dict__.values())
        made += map(id, module._modules.values())
        for tensors in (module._parameters, module._buffers):
            made += [name for name, tensor in tensors.items() if tensor is not None]
    return made


loop = Loop


def _call(xs: list[Any], tree: Any, state: Any, batch_first: bool) -> Call:
    leaves, state_tree = pytree.tree_flatten(state)
    for name, values in (("x", xs), ("state", leaves)):
        wrong = [v for v in values if not isinstance(v, Tensor)]
        if wrong or not values:
            given = describe(wrong[0]) if wrong else "no tensors"
            refuse(name, given, "tensors, or tuples, lists and dictionaries of them", "", TypeError)
    batched = max(t.dim() for t in leaves) > 1 or max(t.dim() for t in xs) > 2
    lead = xs[0].shape[: 1 + batched]
    for x in xs:
        if x.shape[: 1 + batched] != lead or len(lead) < 1 + batched:
            axes = "[batch, time, ...]" if batch_first else "[time, batch, ...]"
            expected = f"{axes if batched else '[time, ...]'}, the same of all tensors of x"
            refuse("x", describe(x), expected, "Lay them out alike.")
    if lead[int(batched and batch_first)] == 0:
        refuse("x", describe(xs[0]), "one step or more", "Skip the call.")
    return Call(xs, tree, leaves, state_tree, batched)


def _restored(state: Any, call: Call) -> list[Tensor]:
    leaves, tree = pytree.tree_flatten(state)
    if len(leaves) != len(call.state):
        expected = f"{len(call.state)} tensors, as the state has"
        refuse("reset_state", describe(state), expected, "Pass one for each.", TypeError)
    return [TORCH.fit("reset_state", a.expand_as(b), b.shape, "a state", b) for a, b in zip(leaves, call.state, strict=True)]


_SCANS: OrderedDict[Any, tuple[Readings, Any]] = OrderedDict()


def scan(
    step: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any, *, dim: int = 0,
    reverse: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """Runs ``carry, y = step(carry, x)`` over slices of ``xs``, on a fused kernel if the step can
    be read; the signature is that of ``torch._higher_order_ops.scan``.

    Args:
        step: a function, which may read tensors and modules around it. Its outputs may be views and
            the carry itself.
        init: the first carry: a tensor, or tensors in tuples, lists and dictionaries.
        xs: what is sliced, nested likewise.
        dim: the axis of ``xs`` that is time.
        reverse: whether the last slice comes first.

    Returns:
        the last carry, and the outputs with an axis of time at ``dim``.

    Raises:
        TypeError, ValueError: with the argument, what was given, what is expected.

    Example:
        >>> def step(h, x):
        ...     h = torch.tanh(x + 0.5 * h)
        ...     return h, h
        >>> last, output = scan(step, torch.zeros(2, 8), torch.zeros(5, 2, 8))
        >>> output.shape
        torch.Size([5, 2, 8])
    """
    if compiled():
        return torch.compiler.disable(_scan)(step, init, xs, dim, reverse)
    return _scan(step, init, xs, dim, reverse)


def _scan(step: Any, init: Any, xs: Any, dim: int, reverse: bool) -> tuple[Any, Any]:
    if not callable(step):
        refuse("step", describe(step), "a function (carry, x) -> (carry, y)", "", TypeError)
    leaves, tree = pytree.tree_flatten(xs)
    if not leaves:
        return init, []
    dim = integer("dim", dim, -leaves[0].dim(), leaves[0].dim() - 1) % leaves[0].dim()
    call = _call([x.movedim(dim, 0) for x in leaves] if dim else leaves, tree, init, False)
    call = call._replace(reverse=boolean("reverse", reverse))
    around = Surroundings.of(step)
    readings, key = _readings_of(around)

    def turned(x: Any, state: Any) -> tuple[Any, Any]:
        carry, y = step(state, x)
        return y, carry

    title = getattr(step, "__name__", type(step).__name__)
    output, carry = readings.run(turned, around, key, call, title)
    if dim:
        output = pytree.tree_map(lambda t: t.movedim(0, dim) if dim < t.dim() else t, output)
    return carry, output


def _readings_of(around: Surroundings) -> tuple[Readings, Any]:
    """The readings of steps of the same code."""
    code = next((g for g in around.guards if isinstance(g, types.CodeType)), None)
    code = code if code is not None else tuple(map(id, around.held[:1]))
    if code not in _SCANS:
        _SCANS[code] = Readings(), around.held[:1]
        if len(_SCANS) > _MOST:
            _SCANS.popitem(last=False)
    readings = _SCANS[code][0]
    return readings, readings.token(tuple(around.guards), around.held)
