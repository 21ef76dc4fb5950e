"""``loop(module)`` and ``scan(step, init, xs)``: steps as they are written, over all of time.

A step is read at the first call of its kind (``anycell.torch.reading``), tried against the user's
own step in float64, and then runs on a fused kernel. What cannot be read runs step by step.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.modules import module as modules

from anycell.explanation import Explained, explain_read
from anycell.layer.checks import boolean, describe, integer, refuse
from anycell.layer.layers import Layout
from anycell.plan import Engine, Layer
from anycell.read import SHORT, short
from anycell.recent import add_recent
from anycell.torch.framework import Torch
from anycell.torch.observers import autocast, compiled, observed
from anycell.torch.operators.warm import ordinary, quiet
from anycell.torch.reading import stepwise as steps
from anycell.torch.reading.planned import ReadStep
from anycell.torch.reading.proven import plan_of, unlike
from anycell.torch.reading.replayed import Replayed, layouts
from anycell.torch.reading.stepwise import Step, Steps, all_tensors, batch_first, flat, stepwise
from anycell.torch.reading.surroundings import Surroundings
from anycell.torch.recurrent import Lengths, refuse_more

_MOST = 64  # readings that one step keeps, and steps of ``scan``
_AROUND = 4  # as measured: operations beside a kernel take as long as so many of a step
_STEP = 1.5  # and the call of a step, with its part of x and of the output, as so many operations
_RESTLESS = 16  # readings for tensors of the same shapes
_NUMBERS = itertools.count()
# Hooks of all modules.
_FORWARD, _BEFORE = modules._global_forward_hooks, modules._global_forward_pre_hooks
_BACKWARD, _BEFORE_BACKWARD = modules._global_backward_hooks, modules._global_backward_pre_hooks


class Readings:
    """The readings of one step, by signatures."""

    def __init__(self) -> None:
        self.plans: dict[Any, ReadStep | str] = {}
        self.last: ReadStep | str = "no call has been made: a step is read at its first call"
        self.tokens: dict[Any, Any] = {}
        self.reads: Counter[Any] = Counter()
        self.replays: dict[Any, Replayed] = {}
        self.around: Surroundings | None = None  # of the latest call

    def known(self, around: Surroundings) -> Surroundings:
        """Gives surroundings a number that stands for their guards in the signatures of plans."""
        guards = tuple(around.guards)
        if guards not in self.tokens:
            add_recent(self.tokens, guards, (next(_NUMBERS), around.held), _MOST)
        around.token = self.tokens[guards][0]
        self.around = around
        return around

    @property
    def engine(self) -> Engine:
        plan = self.last
        return Engine("torch", plan) if isinstance(plan, str) else plan.engine

    def run(self, around: Surroundings, call: Steps) -> Any:
        """Runs a step over time; returns the output and the last state."""
        tensors = around.tensors()
        self.last = plan = call.why or self.plan(around, call, tensors)
        if isinstance(plan, str):
            return stepwise(around.run, call)
        return plan.replay(call, tensors)

    def again(self, step: Any, x: Any, state: Any, first: bool = False) -> Any:
        """Runs a call without further arguments as an earlier one; None if none was like it.

        Args:
            step: the user's function or module.
            first: see ``Replayed``.
        """
        around = self.around
        if around is None or around.step is not step:
            return None
        if around.few and torch.is_grad_enabled():
            alone = type(x) is Tensor and x.is_cpu and not first  # ``_kind`` is one more call
            rows = around.few.get(x.shape if alone else _kind(x, state, first))
            if rows is not None:
                self.last = SHORT
                if alone:
                    return steps.as_written(around.run, x.unbind(), state)
                output, last = steps.as_written(around.run, steps.parts_of(x, rows), state)
                return (batch_first(output, rows) if rows else output), last
        (xs, x_tree), (leaves, state_tree) = flat(x), flat(state)
        own = [*xs, *leaves]
        if not (xs and ordinary(map(type, own))):
            return None
        known = self.replays.get(_key(xs[0], first))
        if known is None or not quiet() or (tensors := around.again(step)) is None:
            return None
        if not ordinary(map(type, tensors)) or known.facts != [around, x_tree, state_tree]:
            return None
        results = known.run(tensors + own)
        if results is not None:
            self.last = known.plan
        return results

    def learn(self, x: Any, state: Any, call: Steps, first: bool = False) -> None:
        """Learns a call without further arguments that has run."""
        plan, around = self.last, self.around
        if around is None:
            return
        if plan is SHORT:
            rows = call.rows if first and call.batched else 0
            add_recent(around.few, _kind(x, state, first), rows, _MOST)
        elif not isinstance(plan, str) and not call.turned:
            tensors = around.tensors()
            tape, tensors = plan.tape(call, tensors), [*tensors, *call.xs, *call.state]
            if tape is not None and layouts(tensors) is not None:
                known = Replayed(plan, tape, around, call, tensors, first)
                self.replays.pop(key := _key(flat(x)[0][0], first), None)
                add_recent(self.replays, key, known, _MOST)

    def plan(self, around: Surroundings, call: Steps, tensors: Sequence[Tensor]) -> ReadStep | str:
        """Returns the step as it was read, or why the step itself runs."""
        if (why := call.why or obstacle() or around.hooked()) is not None:
            return why
        if any(t.layout is not torch.strided for t in (*tensors, *call.xs, *call.state)):
            return "a tensor is sparse, and kernels read dense memory"
        signature = call.signature(tensors)
        known = self.plans.get((around.token, signature))
        plan = known or self._read(around, signature, call)
        if isinstance(plan, str):
            return plan
        if _short(call, plan):
            return SHORT
        return unlike(plan, around, call) or plan.unfit(call) or plan

    def _read(self, around: Surroundings, signature: Any, call: Steps) -> ReadStep | str:
        self.reads[signature] += 1
        if self.reads[signature] > _RESTLESS:
            plan: ReadStep | str = (
                f"numbers around the step were others in each of {_RESTLESS} calls, and a reading "
                "contains them. Instead: keep what changes in a tensor, such as a buffer."
            )
        else:
            plan = plan_of(around, call)
        return add_recent(self.plans, (around.token, signature), plan, _MOST)


def _key(x: Tensor, first: bool) -> tuple[Any, ...]:
    """The facts by which replayed calls are found; with gradients one may run as it is written."""
    return x.shape, x.dtype, x.device, first, torch.is_grad_enabled()


def _kind(x: Any, state: Any, first: bool) -> Any:
    """The facts by which calls of few steps are found."""
    if type(x) is Tensor and x.is_cpu and not first:
        return x.shape
    (xs, tree), (leaves, _) = flat(x), flat(state)
    shapes = tuple([getattr(t, "shape", None) for t in (*xs, *leaves)])
    return first, steps.of_tree(tree), shapes, getattr(xs[0], "device", None) if xs else None


def _short(call: Steps, plan: ReadStep) -> bool:
    """See ``anycell.read.short``."""
    if not torch.is_grad_enabled() or call.state[0].device.type != "cpu":
        return False
    count, numbers = len(call.xs[0]), sum([t.numel() for t in call.state])
    calls = _STEP + len(plan.recording.equations) - _AROUND * plan.around / count
    return short("torch", count, numbers, calls)


def obstacle() -> str | None:
    """Why steps that were read cannot run here and now, or None."""
    if observed():
        return "tensors of a trace, of torch.func, of a mode or of another type are no memory"
    return "autocast chooses a dtype for each operation of the step" if autocast() else None


# -- doors -----------------------------------------------------------------------------------------


class loop(Explained, nn.Module):
    """Runs a module that computes one step over time, on a fused kernel if the step can be read.

        for x_t in x:                           output, state = loop(module)(x, state)
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
        self.forget()

    def forget(self) -> None:
        """Forgets what was read: the next call reads the module anew. Needed only after a change of
        what is not watched: attributes of objects other than modules, and variables of other files.
        """
        self._readings = Readings()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_readings"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.forget()

    def extra_repr(self) -> str:
        return "batch_first=True" if self.batch_first else ""

    def __call__(self, *args: Any, **more: Any) -> Any:
        """Returns what ``forward`` returns; at once for a call like an earlier one, because torch's
        own way there takes a microsecond.
        """
        hooked = (
            self._forward_hooks or self._forward_pre_hooks or self._backward_hooks
            or self._backward_pre_hooks or _FORWARD or _BEFORE or _BACKWARD or _BEFORE_BACKWARD
        )  # fmt: skip
        if len(args) == 2 and not (more or hooked or torch.compiler.is_dynamo_compiling()):
            x, state = args
            module = self._modules["module"]
            if (known := self._readings.again(module, x, state, self.batch_first)) is not None:
                return known
        return super().__call__(*args, **more)

    def forward(
        self, x: Any, state: Any, *more: Any, mask: Tensor | None = None,
        lengths: Lengths | None = None, resets: Tensor | None = None, reset_state: Any = None,
        reverse: bool = False,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Returns the output and the final state; see the class."""
        if more:
            refuse_more(more, "loop")
        if compiled():  # the graph breaks here
            return torch.compiler.disable(self.forward)(
                x, state, mask=mask, lengths=lengths, resets=resets, reset_state=reset_state,
                reverse=reverse,
            )  # fmt: skip
        plain = mask is lengths is resets is reset_state is None and reverse is False
        first, module = self.batch_first, self._modules["module"]  # ``self.module`` takes longer
        again = self._readings.again
        if plain and (known := again(module, x, state, first)) is not None:
            return known
        call = _call(*flat(x), state, first)
        turned = call.batched and first
        if turned:
            call = call._replace(xs=list(map(steps.time_first, call.xs)))
        if mask is not None or lengths is not None or resets is not None:
            like = call.xs[0]
            layout = Layout(Torch, like, len(like), (call.rows,) if call.batched else (), first)
            flags = None if resets is None else layout.flags("resets", resets)
            call = call._replace(mask=layout.valid(mask, lengths), resets=flags)
        if reset_state is not None:
            call = call._replace(restored=_restored(reset_state, call))
        if reverse is not False:
            call = call._replace(reverse=boolean("reverse", reverse))
        module = self.module
        step = module, _paired(module)
        around = self._readings.around
        if call.why:
            around = Surroundings(*step)
        elif around is None or around.again(module, unhooked=False) is None:
            around = self._readings.known(Surroundings.of(*step))
        output, last = self._readings.run(around, call)
        if plain and not call.why:
            self._readings.learn(x, state, call, first)
        return (batch_first(output, call.rows) if turned else output), last

    @property
    def engine(self) -> Engine:
        """The engine that ran the latest call, and why."""
        return self._readings.engine

    @property
    def text(self) -> str | None:
        """The ``@cell`` that ran the latest call; None if the loop ran step by step."""
        plan = self._readings.last
        return None if isinstance(plan, str) else plan.reading.text

    def _about(self) -> str:
        return f"loop({type(self.module).__name__})"

    def _layer(self) -> Layer | None:
        return getattr(self._readings.last, "layer", None)


def _paired(module: Any) -> Step:
    """A module as a step, whether or not it returns an output besides its state."""

    def step(x: Any, state: Any) -> tuple[Any, Any]:
        result = module(x, state)
        if type(state) is Tensor:  # as most modules have it, at once
            if type(result) is Tensor:
                return result, result
            if type(result) is tuple and len(result) == 2 and type(result[1]) is Tensor:
                return result
        elif type(state) is tuple and type(result) is tuple and len(result) == 2:
            after: Any = result[1]
            both = state + after if type(after) is tuple and len(after) == len(state) else ()
            if both and all_tensors(map(type, both)):
                return result
        pair = isinstance(result, (tuple, list)) and len(result) == 2
        count = len(flat(state)[0])
        if pair and len(flat(result[1])[0]) == count:
            return result[0], result[1]
        leaves = flat(result)[0]
        if len(leaves) != count:
            refuse(
                "module", f"one that returns {describe(result)}",
                f"(output, new state), with the {count} tensors of the state",
                "Return y, state.", TypeError,
            )  # fmt: skip
        return leaves[0], result

    return step


def _call(xs: list[Any], tree: Any, state: Any, batch_first: bool) -> Steps:
    leaves, state_tree = flat(state)
    wrong = [v for v in xs if not isinstance(v, Tensor)]
    if wrong or not xs:
        shown = describe(wrong[0]) if wrong else "no tensors"
        refuse("x", shown, "tensors, or tuples, lists and dictionaries of them", "", TypeError)
    held = [t for t in leaves if isinstance(t, Tensor)]
    batched = max([0, *[t.dim() for t in held]]) > 1 or max(t.dim() for t in xs) > 2
    time = int(batched and batch_first)
    whole = max(xs, key=lambda t: t.dim())
    axes = ("[batch, time, ...]" if batch_first else "[time, batch, ...]") if batched else "[time]"
    lead = whole.shape[: 1 + batched]
    for x in xs:
        alone = batched and x.dim() == 1  # a number for each step
        if len(lead) < 1 + batched or x.shape[: 1 + batched] != (
            lead[time : time + 1] if alone else lead
        ):
            expected = f"{axes}, the same of all tensors of x"
            refuse("x", describe(x), expected, "Lay them out alike.")
    if lead[time] == 0:
        refuse("x", describe(whole), "one step or more", "Skip the call.")
    rows, why = lead[1 - time] if batched else 1, ""
    turned = [
        k for k, t in enumerate(leaves)
        if isinstance(t, Tensor) and t.dim() > 2 and t.shape[0] != rows == t.shape[1]
    ]  # fmt: skip
    if len(held) < len(leaves) or not held:
        other = next((describe(v) for v in leaves if not isinstance(v, Tensor)), "no tensors")
        why = f"the state has {other}, and a kernel holds tensors. Instead: keep it as a tensor"
    elif not rows:  # on which no reading can be tried
        why = "the batch has no rows"
    call = Steps(xs, tree, leaves, state_tree, batched, rows, turned=tuple(turned), why=why)
    return call._replace(state=call.swapped(leaves)) if turned else call


def _restored(state: Any, call: Steps) -> list[Tensor]:
    leaves, _ = call.leaves_of(state)
    if len(leaves) != len(call.state):
        expected = f"{len(call.state)} tensors, as the state has"
        refuse("reset_state", describe(state), expected, "Pass one for each.", TypeError)
    return [
        Torch.check_array("reset_state", a.expand_as(b), b.shape, "a state", b)
        for a, b in zip(leaves, call.state, strict=True)
    ]


_SCANS: dict[Any, tuple[Readings, Any]] = {}


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
        return torch.compiler.disable(scan)(step, init, xs, dim=dim, reverse=reverse)
    plain = dim == 0 and reverse is False
    if plain and (of_code := _SCANS.get(getattr(step, "__code__", None))) is not None:
        known = of_code[0].again(step, xs, init)
        if known is not None:
            return known[1], known[0]
    scanned = _scanned(step, init, xs, dim, reverse)
    if scanned is None:
        return init, []
    readings, around, call = scanned
    output, carry = readings.run(around, call)
    if plain:
        readings.learn(xs, init, call)
    if dim:
        dim %= pytree.tree_leaves(xs)[0].dim()
        output = pytree.tree_map_only(
            Tensor, lambda t: t.movedim(0, dim) if dim < t.dim() else t, output
        )
    return carry, output


def explain_scan(
    step: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any, *, dim: int = 0,
    reverse: bool = False,
) -> str:  # fmt: skip
    """Says what ``scan`` does with these arguments, and why.

    Returns:
        what runs the step; and if it was read, the text of its cell, for those who want to keep it,
        and what ``anycell.explain`` says of the cell.

    Raises:
        TypeError, ValueError: with the argument, what was given, what is expected.

    Example:
        >>> def step(h, x):
        ...     h = torch.tanh(x + 0.5 * h)
        ...     return h, h
        >>> print(explain_scan(step, torch.zeros(2, 8), torch.zeros(50, 2, 8)).partition("\\n")[0])
        A fused kernel runs this body.
    """
    said = functools.partial(explain_read, "A loop over the steps")
    scanned = _scanned(step, init, xs, dim, reverse)
    if scanned is None:
        return said(None, "", "there are no steps")
    readings, around, call = scanned
    plan = readings.plan(around, call, around.tensors())
    if isinstance(plan, str):
        return said(None, "", plan)
    if plan.engine.name not in ("cpu", "gpu"):
        return said(None, "", f"no kernel runs its cell: {plan.engine.reason}")
    return said(plan.reading, str(plan.recording.dtype).removeprefix("torch."))


def _scanned(step: Any, init: Any, xs: Any, dim: int, reverse: bool) -> Any:
    """The readings of a step, and the arguments of ``Readings.run``; None if there is no x."""
    if not callable(step):
        refuse("step", describe(step), "a function (carry, x) -> (carry, y)", "", TypeError)
    leaves, tree = flat(xs)
    if not leaves:
        return None
    dim = integer("dim", dim, -leaves[0].dim(), leaves[0].dim() - 1) % leaves[0].dim()
    call = _call([x.movedim(dim, 0) for x in leaves] if dim else leaves, tree, init, False)
    call = call._replace(reverse=boolean("reverse", reverse))
    function = type(step) is types.FunctionType  # of other steps not all is watched
    of_code = _SCANS.get(step.__code__) if function else None
    around = of_code and of_code[0].around
    if of_code is not None and around and around.again(step, unhooked=False) is not None:
        readings = of_code[0]
    else:
        around = Surroundings.of(step, _turned(step))
        codes = [guard for guard in around.guards if isinstance(guard, types.CodeType)]
        code: Any = codes[0] if codes else tuple(map(id, around.held[:1]))
        if code not in _SCANS:  # steps of one code have their readings together
            add_recent(_SCANS, code, (Readings(), around.held[:1]), _MOST)
        readings = _SCANS[code][0]
        readings.known(around)
    return readings, around, call


def _turned(step: Callable[[Any, Any], tuple[Any, Any]]) -> Step:
    """The step of ``scan`` as one of ``loop``."""

    def turned(x: Any, state: Any) -> tuple[Any, Any]:
        carry, y = step(state, x)
        return y, carry

    return turned
