"""Reads a step, and tries the reading against the user's own step before it is used."""

from __future__ import annotations

import operator
import pickle
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anycell.layer.checks import describe
from anycell.read import Refused, definition, mapped, places, proof
from anycell.read.units import CHANGES_STATE
from anycell.read.watched import alike
from anycell.torch.reading.planned import ReadStep
from anycell.torch.reading.read import Reader
from anycell.torch.reading.record import ROWS, A, Call, Recording, otherwise, record
from anycell.torch.reading.stepwise import Steps, stepwise
from anycell.torch.reading.surroundings import Surroundings

_RETURN = "return what changes as a part of the state"
_MOST = 10_000  # containers, and numbers of an array, that are compared
_OTHER = Tensor, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType
_LOCK = threading.RLock()  # a step is recorded with other tensors in place of its own


def plan_of(surroundings: Surroundings, call: Steps) -> ReadStep | str:
    """Reads a step, and tries the reading; a string says why the step runs step by step."""
    return _recording(surroundings, call, lambda: _proven(surroundings, call))


def unlike(plan: ReadStep, surroundings: Surroundings, call: Steps) -> str | None:
    """Why a reading is not the step for a batch of the call's size, if it is not: a branch on that
    size shows in no recording of others.
    """
    if call.batched and call.rows not in plan.rows:
        plan.rows[call.rows] = _recording(
            surroundings,
            call,
            lambda: _same(plan.recording, _Flat(surroundings, call), call.rows),
        )
    return plan.rows.get(call.rows)


def _recording(surroundings: Surroundings, call: Steps, work: Callable[[], Any]) -> Any:
    """The result of work that records a step; a string says why it cannot be recorded."""
    device = call.xs[0].device
    devices = [device] if device.type == "cuda" else []
    try:
        with (
            _LOCK, torch.random.fork_rng(devices), torch.inference_mode(False),
            _unchanged(surroundings),
        ):  # fmt: skip
            return work()
    except Refused as refusal:
        return str(refusal.at(_place(surroundings.step)))
    except Exception as error:  # whatever a step does under a recording that it does not do alone
        first = (str(error).strip().splitlines() or [""])[0]
        problem, instead = f"this cannot be recorded. {type(error).__name__}: {first}", ""
        if "autograd.Function" in str(error) or "custom_function_call" in str(error):
            problem = "this calls a torch.autograd.Function, whose derivative only it knows"
            instead = "write the step in operations of torch"
        return str(Refused(problem, instead, places.raised(error)))


@contextmanager
def _unchanged(surroundings: Surroundings) -> Iterator[None]:
    """Refuses a step that draws numbers from elsewhere than torch, or changes variables around it:
    attributes, what is in lists and dictionaries, variables of code. Restores all of them, and the
    generators of torch.
    """
    if surroundings.changing:
        raise Refused(f"the step reads {surroundings.changing}, whose changes nobody sees", _RETURN)
    sources = [(name, get, put, get()) for name, get, put in _sources(surroundings.held)]
    old = [(module, dict(vars(module))) for module in surroundings.modules]
    reached = [(thing, _content(thing)) for thing in _reached(surroundings)]
    faults: list[Refused] = []

    def fault(what: str, where: str = "") -> None:
        faults.append(Refused(f"the step changes {what}", _RETURN, where))

    output = sys.stdout
    sys.stdout = cast(Any, _Output(output))
    try:
        yield
    finally:
        sys.stdout = output
        for name, get, put, state in sources:
            if pickle.dumps(get()) != pickle.dumps(state):
                put(state)
                if name:
                    instead = "draw with torch, choose with torch.where"
                    faults.append(Refused(f"the step draws from {name}", instead))
        for module, attributes in old:
            now = vars(module)
            names = [n for n in {**now, **attributes} if now.get(n) is not attributes.get(n)]
            if names:
                now.clear()
                now.update(attributes)
                fault(names[0], _place(module))
        for holder, name, value in [*surroundings.changed]:
            surroundings.assign(holder, name, value)
            cell = isinstance(holder, types.CellType)
            fault("a variable of the function around it" if cell else name)
        for thing, content in reached:
            now = _content(thing)
            if type(now) is bytes:
                if now != content:
                    thing[...] = np.frombuffer(content, thing.dtype).reshape(thing.shape)
                    fault("an array around it")
            elif not alike(now, content):
                thing.clear()
                thing.update(content) if isinstance(thing, (dict, set)) else thing.extend(content)
                fault(f"a {type(thing).__name__} around it")
    if faults:
        raise faults[0]


class _Output:
    """The standard output, to which a step that is read prints nothing."""

    def __init__(self, real: Any) -> None:
        self.real, self.thread = real, threading.get_ident()

    def write(self, text: str) -> Any:
        if threading.get_ident() == self.thread:
            raise Refused("the step prints", "print what it returns", places.here())
        return self.real.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def _content(thing: Any) -> Any:
    """A copy of what a container or an array has."""
    if isinstance(thing, np.ndarray):
        return thing.tobytes()
    return next((kind for kind in (dict, set) if isinstance(thing, kind)), list)(thing)


def _reached(surroundings: Surroundings) -> list[Any]:
    """Containers and arrays that a step may change: those around it, and what they and the objects
    among them have, up to a number. Attributes of an object are a dictionary.
    """
    reached, seen = list[Any](), set[int]()
    known = [*surroundings.held, *(container for container, _ in surroundings.containers)]
    left = [*(value for _, _, value in surroundings.watched), *known]
    left += [value for module in surroundings.modules for value in vars(module).values()]
    while left and len(reached) < _MOST:
        thing = left.pop()
        if id(thing) in seen or isinstance(thing, (*_OTHER, nn.Module)):
            continue
        seen.add(id(thing))
        if isinstance(thing, np.ndarray):
            if thing.flags.writeable and thing.dtype != object and thing.size <= _MOST:
                reached.append(thing)
        elif isinstance(thing, (dict, list, set, deque)):
            reached.append(thing)
            left += [*thing.values()] if isinstance(thing, dict) else [*thing]
        elif isinstance(thing, tuple):
            left += thing
        elif type(thing).__module__.partition(".")[0] not in ("anycell", "torch"):
            attributes = getattr(thing, "__dict__", None)
            left += [attributes] if type(attributes) is dict else []
    return reached


# Sources of random numbers: what errors call them, and the methods that get and set their states. A
# kernel may draw all numbers of torch at once.
_SOURCES: dict[type, tuple[str, str, str]] = {
    torch.Generator: ("", "get_state", "set_state"),
    random.Random: ("Python's random", "getstate", "setstate"),
    np.random.RandomState: ("numpy.random", "get_state", "set_state"),
}


def _sources(held: Sequence[Any]) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    """The sources that a step may draw numbers from, with functions that get and set their
    states.
    """
    of_modules: Any = random.getstate, np.random.get_state
    for thing in (*(function.__self__ for function in of_modules), *held):
        for kind, (name, get, put) in _SOURCES.items():
            if isinstance(thing, kind):
                yield name, getattr(thing, get), getattr(thing, put)
        if isinstance(thing, np.random.Generator):
            bits = thing.bit_generator
            yield "numpy.random", partial(getattr, bits, "state"), partial(setattr, bits, "state")


def _place(step: Any) -> str:
    """The file and line where a step begins."""
    return definition(type(step).forward if isinstance(step, nn.Module) else step)


class _Flat:
    """A step as a function of tensors, to the tensors of its output and of the new state.

    Attributes:
        trees: after a call, the structure of both, and the leaves of the output that are no
            tensors, with their places.
    """

    def __init__(self, surroundings: Surroundings, call: Steps) -> None:
        self.surroundings, self.call = surroundings, call
        self.tensors = [tensor.detach() for tensor in surroundings.tensors()]
        self.trees: list[Any] = []

    def __call__(self, tensors: list[Tensor], xs: list[Tensor], states: list[Tensor]) -> Any:
        surroundings, call = self.surroundings, self.call
        with surroundings.swapped(tensors):
            before = call.state_of(states)
            first = pytree.tree_leaves(before)
            output, state = surroundings.run(pytree.tree_unflatten(xs, call.x_tree), before)
            held = pytree.tree_leaves(before)
            pairs = zip(surroundings.tensors(), tensors, surroundings.places, strict=True)
            changed = [label for now, old, (*_, label) in pairs if now is not old]
        if len(held) != len(states) or any(map(operator.is_not, held, first)):
            raise Refused(*CHANGES_STATE)
        if changed:
            raise Refused(f"the step assigns a new tensor to {changed[0]}", _RETURN)
        parts, output_tree = pytree.tree_flatten(output)
        after, state_tree = call.leaves_of(state)
        fixed = [(k, part) for k, part in enumerate(parts) if not isinstance(part, Tensor)]
        self.trees[:] = output_tree, state_tree, fixed
        return [part for part in parts if isinstance(part, Tensor)], after

    def recorded(self, rows: tuple[int, int]) -> Recording:
        """The step recorded with batches of these sizes."""
        call = self.call
        samples = [_sample(call, count, seed) for seed, count in enumerate(rows)]
        rowed = [
            call.batched and not isinstance(t, nn.Parameter) and t.shape[:1] == (call.rows,)
            for t in self.surroundings.tensors()
        ]
        both = rows if call.batched else None
        try:
            return record(self, [(self.tensors, *sample) for sample in samples], both)
        except (RuntimeError, ValueError):
            if not any(rowed):
                raise
            # Tensors around the step, such as masks of dropout, may have the rows of this call.
            calls: list[Call] = []
            for count, sample in zip(rows, samples, strict=True):
                pairs = zip(self.tensors, rowed, strict=True)
                calls.append(([_of_rows(t, count) if row else t for t, row in pairs], *sample))
            return record(self, calls, both)


def _proven(surroundings: Surroundings, call: Steps) -> ReadStep:
    if not any(state.is_floating_point() for state in call.state):
        raise Refused(
            "the state has no real floating point numbers",
            "keep it in such tensors, complex numbers as two of them",
        )
    flat = _Flat(surroundings, call)
    recording = flat.recorded(ROWS)
    constants = recording.constants
    for equation in recording.equations:
        for var in equation.operands:
            if var in constants:
                raise Refused(
                    f"this uses a tensor ({describe(var.constant)}) that is no parameter, buffer "
                    "or attribute of a module, and no variable around the step",
                    "register it as a buffer", equation.where,
                )  # fmt: skip
    for old, new in zip(recording.states, recording.after, strict=True):
        if (old.shape, old.dtype, old.axis) != (new.shape, new.dtype, new.axis):
            raise Refused(
                f"a state of {old.dtype} {list(old.shape)} becomes {new.dtype} {list(new.shape)} "
                "(for 3 rows)",
                "return states as they were passed",
            )
    reader = Reader(recording, _labels(call), surroundings.title)
    made = [v for e in recording.equations for v in e.results if v.dtype != "none"]
    moving = [v for v in made if v.kind == "X"]
    merged = call.batched and all(var.axis is not None for var in [*moving, *recording.x])
    reason: str | None = None
    for joined in (True, False) if merged else (False,):
        plan = ReadStep(recording, reader, list(flat.trees), joined)
        reason = _tried(surroundings, plan, call)
        if reason is None:
            return plan
    _same(recording, flat, min(call.rows, 2))
    raise Refused(f"{reason}", "report it, with the step")


def _same(recording: Recording, flat: _Flat, rows: int) -> None:
    """Refuses a step that does something else for so many rows than the recording shows."""
    other = flat.recorded((ROWS[0], rows))
    lines = ["", *(equation.where for equation in recording.equations), ""]
    for where, line, twin in zip(lines, recording.lines(), other.lines(), strict=False):
        if line != twin:
            raise otherwise(where)


def _of_rows(tensor: Tensor, rows: int) -> Tensor:
    return tensor[torch.arange(rows, device=tensor.device) % len(tensor)]


def _labels(call: Steps) -> list[str]:
    """Names the states in the cell: by the keys of a dictionary, or h and c."""
    tree = pytree.tree_unflatten(call.state, call.state_tree)
    if isinstance(tree, dict) and len(tree) == len(call.state):
        return [str(name) for name in tree]
    return {1: ["h"], 2: ["h", "c"]}.get(len(call.state), [""] * len(call.state))


def _sample(call: Steps, rows: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """One step's input and states, of so many rows: random numbers, or if they are none, those of
    the call.
    """
    generator = torch.Generator().manual_seed(seed)

    def like(tensor: Tensor, batched: bool) -> Tensor:
        if tensor.is_floating_point():
            shape = (rows,) * batched + tensor.shape[batched:]
            return _random(shape, generator, call.xs[0].device, tensor.dtype)
        tensor = tensor.detach()
        return _of_rows(tensor, rows) if batched else tensor.clone()

    # A state without rows keeps its shape: the step must return it as it was.
    states = [like(t, call.has_rows(t, 0)) for t in call.state]
    return [like(x[0], call.has_rows(x, 1)) for x in call.xs], states


def _random(shape: Any, generator: torch.Generator, device: Any, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


# -- the proof -------------------------------------------------------------------------------------


def _tried(surroundings: Surroundings, plan: ReadStep, call: Steps) -> str | None:
    """Why the reading is not the step; None if both agree for a few steps in float64."""
    exact, recorded, default = torch.float64, plan.recording.dtype, torch.get_default_dtype()
    try:
        torch.set_default_dtype(exact)  # of numbers and new tensors in the step
        return _compared(surroundings, plan, call, exact)
    except (RuntimeError, TypeError):  # a step that knows its dtype
        torch.set_default_dtype(default)
        return _compared(surroundings, plan, call, recorded)
    finally:
        torch.set_default_dtype(default)


def _compared(
    surroundings: Surroundings, plan: ReadStep, call: Steps, dtype: torch.dtype
) -> str | None:
    rows, recorded = min(call.rows, 2), plan.recording.dtype  # not as many as recorded
    shapes = [(rows, *t.shape[1:]) if call.has_rows(t, 0) else tuple(t.shape) for t in call.state]
    buffers = {id(module._buffers) for module in surroundings.modules}
    tensors, inputs = [], []

    def tried_in(tensor: Tensor) -> torch.dtype:
        return dtype if tensor.dtype is recorded else tensor.dtype

    for tensor, var, (holder, *_) in zip(
        surroundings.tensors(), plan.recording.fixed, surroundings.places, strict=True
    ):
        constant = not tensor.requires_grad and id(holder) in buffers
        part = tensor if var.axis is None else tensor[:rows]
        part = part.detach().to(tried_in(tensor), copy=True)
        tensors.append(part.requires_grad_(part.is_floating_point() and not constant))
    for x in call.xs:
        x = _of_rows(x.detach(), proof.STEPS)
        x = x[:, :rows] if call.has_rows(x, 1) else x
        if x.is_floating_point():
            generator = torch.Generator().manual_seed(7)
            x = _random(x.shape, generator, x.device, tried_in(x)).requires_grad_()
        inputs.append(x)

    def both(values: list[np.ndarray]) -> tuple[proof.Results, proof.Results]:
        pairs = zip(call.state, values, strict=True)
        states = [_started(state, number, call, rows, tried_in(state)) for state, number in pairs]
        plain: dict[str, Any] = {"mask": None, "resets": None, "restored": None, "reverse": False}
        trial = call._replace(xs=inputs, state=states, rows=rows, **plain)
        named = [(p[-1], t) for p, t in zip(surroundings.places, tensors, strict=True)]
        named += [("x", x) for x in inputs] + [("the state", s) for s in states]
        leaves = [(f"the gradient of {name}", t) for name, t in named if t.requires_grad]
        with torch.enable_grad():
            drawn = plan.values(trial, tensors).drawn()
            reading = _results(plan.run(trial, tensors, "reference", drawn), leaves)
            if drawn:  # the step draws other numbers
                return _results(plan.repeat(trial, tensors, drawn), leaves), reading
            with surroundings.swapped(tensors), _Casts(recorded, dtype):
                return _results(stepwise(surroundings.run, trial), leaves), reading

    # The derivative of torch's hardsigmoid is rounded to float32, as a cell's is in float64.
    rounded = any(e.op is A.hardsigmoid for e in plan.recording.equations)
    name = str(dtype).removeprefix("torch.")
    narrow = recorded is not dtype or any(t.dtype is torch.float32 for t in tensors)
    if dtype is torch.float64 and narrow:
        name = "float32" if rounded else proof.OF_FLOAT32
    return proof.tried(shapes, both, name)


class _Casts(TorchFunctionMode):
    """Lets a step that names its dtype compute in another."""

    def __init__(self, named: torch.dtype, dtype: torch.dtype) -> None:
        super().__init__()
        self.other = {named: dtype}
        self.casts = {torch.float32: Tensor.float, torch.float16: Tensor.half}.get(named)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is self.casts:
            return args[0].to(*self.other.values())
        named = lambda leaf: self.other.get(leaf, leaf) if type(leaf) is torch.dtype else leaf  # noqa: E731
        args, kwargs = mapped(named, (args, kwargs or {}))
        return function(*args, **kwargs)


def _started(like: Tensor, number: Any, call: Steps, rows: int, dtype: torch.dtype) -> Tensor:
    """A state to start a trial from: the number, or a part of the call's own state."""
    if like.is_floating_point() or like.dtype is torch.bool:
        state = torch.as_tensor(number, device=like.device).to(dtype)
        return state.requires_grad_(state.is_floating_point())
    kept = like.detach()
    return (kept[:rows] if call.has_rows(like, 0) else kept).clone()


def _results(results: Any, leaves: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
    """Outputs, last states and gradients, by what they are."""
    outputs = [t for t in pytree.tree_leaves(results) if isinstance(t, Tensor)]
    named = {f"result {k}": t.detach().double().cpu().numpy() for k, t in enumerate(outputs)}
    total: Any = 0.0
    for k, t in enumerate(outputs):
        if t.is_floating_point() and t.requires_grad:
            weights = torch.linspace(1, 2, t.numel(), dtype=t.dtype, device=t.device)
            total = total + (torch.sin(t + 0.1 * k) * weights.reshape(t.shape)).sum()
    tensors = [tensor for _, tensor in leaves]
    gradients: Sequence[Tensor | None] = [None] * len(leaves)
    if isinstance(total, Tensor) and tensors:
        gradients = torch.autograd.grad(total, tensors, allow_unused=True)
    for k, ((name, leaf), gradient) in enumerate(zip(leaves, gradients, strict=True)):
        gradient = torch.zeros_like(leaf) if gradient is None else gradient
        named[f"{name} ({k})"] = gradient.double().cpu().numpy()
    return named
