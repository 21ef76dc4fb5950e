"""Calls like earlier ones: one native operator, and little Python around it.

The first call of a module goes the ordinary way, which checks everything. Then it is learnt: a
``Front`` for the facts of module and call, and the layouts of all tensors for the operator. Later
calls with the same facts and layouts are the operator alone; all others go the ordinary way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anycell.engines import cpu
from anycell.layer import Kept
from anycell.layer.forward import draft_stack
from anycell.layer.heuristics import sparse
from anycell.layer.layers import Layout
from anycell.layer.signature import FLAGS, OF_STATES, places, state_names
from anycell.plan import Layer, Options, Plan
from anycell.recent import add_recent
from anycell.torch.framework import Torch
from anycell.torch.observers import ORDINARY, autocast, observed
from anycell.torch.operators import fused
from anycell.torch.operators.composite import Arrays, States
from anycell.torch.operators.fused import Fused, plan_on
from anycell.torch.operators.native import Form, Part, play, table
from anycell.torch.operators.passes import as_given, as_kept, as_read, form_of, narrowed

_MOST = 512  # fronts
ordinary = frozenset(ORDINARY).issuperset
# Not by torch's own functions in Python, which would be further calls of each layer.
_precision = torch._C._get_float32_matmul_precision
_profiled = torch._C._autograd._profiler_enabled
_threads = cpu.threads.within
NOTHING: Mapping[str, Any] = {}
FLAGGED = {*FLAGS, "lengths"}  # arguments of a call that become flags
KNOWN = {*FLAGGED, "static", "reset_state"}  # those of the calls that are learnt


class Front(NamedTuple):
    """Calls that differ in layouts alone.

    Attributes:
        weights: the names of what the call reads of the module; ``absent``, of what it would read
            if it were there.
        form: of calls without gradients.
        keeping: the form of the forward pass of calls with gradients; None if they are not learnt.
        layer, names: of these, with the plan, and the names of its arrays.
        plain: whether kernels read the tensors of the call themselves.
    """

    weights: tuple[str, ...]
    absent: tuple[str, ...]
    form: Form
    keeping: Form | None
    layer: Layer
    names: tuple[str, ...]
    plain: bool

    def read(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of a call as kernels read them, see ``as_read``."""
        last = self.names.index("weight_ih") + 1  # the weights are read as they are
        arrays = dict(zip(self.names[:last], tensors, strict=False))
        return [*as_read(self.layer, arrays).values(), *tensors[last:]]

    def again(self, layer: Layer, arrays: Arrays, keep: bool) -> tuple[Tensor, States, Kept]:
        """Does what ``run_forward`` does, as an earlier pass did it."""
        assert self.keeping is not None
        tensors = [*arrays.values()]
        read = tensors if self.plain else self.read(tensors)
        results = play(read, self.keeping.number, 0)
        if not results:
            raise Unknown
        apart = not self.plain and layer.options.apart("mask" in arrays)
        output, final, kept = as_kept(layer, arrays["x"].shape[0], results, apart)
        return output, final if self.plain else narrowed(layer.plan, final), kept


FRONTS: dict[tuple[Any, ...], Front] = {}


class Unknown(Exception):
    """No call was like this one."""


def settings() -> tuple[Any, ...]:
    """Returns the settings that passes depend on besides their arrays."""
    return _threads() or torch.get_num_threads(), cpu.isa.current(), _precision()


def quiet() -> bool:
    """Whether nobody sees what a call does: no autocast, no profiler, and tensors are their memory,
    but for gradients.
    """
    return not (observed() or autocast() or _profiled())


def again(
    module: Any, what: str, x: Any, state: Any, arguments: Mapping[str, Any] = NOTHING
) -> Any:
    """Runs a call as an earlier one, and returns what users get; None if there was none like it.

    Args:
        what: "call", a "step" of the module, or the "cell" alone, which has no output.
        arguments: of a step: static, resets and reset_state; of a call also mask and lengths.
    """
    if arguments and what == "call":
        flagged = _flagged(module, x, arguments)
        if flagged is None:
            return None
        arguments = flagged
    key, tensors = _call(module, what, x, state, arguments)
    front = FRONTS.get(key)
    if front is None:
        return None
    held = module._parameters or module._buffers  # weights of 8 bits are buffers
    try:
        for name in front.weights:
            tensors.append(held[name])
    except KeyError:  # parametrised
        return None
    for name in front.absent:
        if getattr(module, name, None) is not None:
            return None
    if not ordinary(map(type, tensors)):
        return None
    if torch.is_grad_enabled() and wanted(tensors):
        results = _trained(module, front, tensors)
    else:
        results = play(tensors if front.plain else front.read(tensors), front.form.number, 0)
        if not front.plain:
            results = [result.to(x.dtype) for result in results]  # final states may be wide
    if not results:
        return None
    if what == "cell":
        return tuple(results) if len(results) > 1 else results[0]
    output, *last = results
    return output, tuple(last) if len(last) > 1 else last[0]


def wanted(tensors: list[Tensor]) -> bool:
    """Whether the gradient of any is wanted."""
    for tensor in tensors:  # noqa: SIM110  (``any`` would call a generator for each)
        if tensor.requires_grad:
            return True
    return False


def _trained(module: Any, front: Front, tensors: list[Tensor]) -> list[Tensor]:
    """The results of a call with gradients; none if there was none like it."""
    if front.keeping is None or tensors[0].dim() != 3:
        return []
    x, *others = tensors
    if module.batch_first:
        x = x.swapaxes(0, 1)
    try:
        output, *final = Fused.apply(front.layer, front.again, front.names, x, *others)
    except Unknown:
        return []
    return [output.swapaxes(0, 1) if module.batch_first else output, *final]


def _flagged(module: Any, x: Any, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of a call with its flags as ``mask`` and ``resets``, bool ``[T, B]``; None if
    it is not one to learn.
    """
    if not arguments.keys() <= KNOWN or type(x) is not Tensor or x.dim() not in (2, 3):
        return None
    named = {n: arguments[n] for n in ("reset_state", "static") if arguments.get(n) is not None}
    if arguments.keys().isdisjoint(FLAGGED):
        return named
    try:
        return named | Layout.of(Torch, x, module.batch_first).of_steps(arguments)
    except (TypeError, ValueError):  # the ordinary way raises it, after errors of other arrays
        return None


def _call(
    module: Any, what: str, x: Any, state: Any, arguments: Mapping[str, Any]
) -> tuple[tuple[Any, ...], list[Any]]:
    """The facts of a call, and its tensors."""
    tensors, given = [x], list[Any]()
    for value in (state, *arguments.values()):
        many = type(value) is tuple
        given.append(len(value) if many else None if value is None else Tensor)
        if many:
            tensors += value
        elif value is not None:
            tensors.append(value)
    if arguments and what == "call":
        given += [*arguments, sparse(arguments.get("mask"))]
    facts: tuple[Any, ...] = ()
    if what != "cell":
        facts = (
            module.num_layers, module.bidirectional, module.batch_first, module.dropout,
            module.checkpoint,
        )  # fmt: skip
    return (
        what, getattr(x, "dtype", None), id(module.cell), module._sizes, module.bias,
        module.training, "weight_ih_l0_scales" in module._buffers, *given, facts,
        # ``settings``, which would be one more call of each layer
        _threads() or torch.get_num_threads(), cpu.isa.current(), _precision(),
    ), tensors  # fmt: skip


def learn(
    module: Any, what: str, x: Any, state: Any, arguments: Mapping[str, Any], results: Any
) -> None:
    """Learns a call that went the ordinary way, with these results; see ``again``."""
    if arguments and what == "call":
        flagged = _flagged(module, x, arguments)
        if flagged is None:
            return
        arguments = flagged
    cell, alone = module.cell, what == "cell"
    layers, both = (1, False) if alone else (module.num_layers, module.bidirectional)
    draws = bool(cell.keeps) or (layers > 1 and module.dropout > 0)
    if (
        table() is None
        or (cell.static is not None and arguments.get("static") is None)
        or (draws and module.training)
    ):
        return
    names = ["x", *state_names("state", cell) * (state is not None)]
    for name, value in arguments.items():
        if value is not None:
            names += state_names(name, cell) if name == "reset_state" else [name]
    held, weights, of_layer, absent = module._parameters or module._buffers, {}, [], []
    for k in range(layers):
        for public, place in places(cell.learned, k, 1 + both).items():
            name = place.removesuffix("_l0") if alone else place
            if name not in held:
                absent.append(name)
                continue
            weights[place] = name
            of_layer.append(public)
            if f"{name}_scales" in held:
                weights[f"{place}_scales"] = f"{name}_scales"
    key, tensors = _call(module, what, x, state, arguments)
    tensors += map(held.get, weights.values())
    if not ordinary(map(type, tensors)) or not all(t.is_cpu for t in tensors):
        return
    if any(getattr(module, name, None) is not None for name in absent):
        return
    flags = arguments.get("resets")
    if flags is not None and (flags.dtype is not torch.bool or not flags.is_contiguous()):
        return
    plan = plan_on("cpu", cell, module._sizes, held[weights["weight_ih_l0"]].dtype)
    if not isinstance(plan, Plan) or plan.engine != "cpu":
        return
    if x.dtype != Torch.of(plan.dtype).dtype:
        return
    if flags is not None and plan.types.mixed and what == "step":
        return
    options = Options((False, True)[: 1 + both], training=module.training)
    layer = Layer(cell, module._sizes, fused.on_threads(options), plan=plan)
    ready, front, holes = fused.ready(layer), FRONTS.get(key), sparse(arguments.get("mask"))
    inputs = *names, *of_layer
    single = what == "call" and layers == 1 and module.checkpoint is None
    single &= not plan.types.quantized  # of 8 bits, the kernels have no backward pass
    facts = "forward", True, *["holes"] * holes
    keeping = form_of(ready, inputs, *facts) if single else None
    if front is None or front.keeping is not keeping:  # of many forms the oldest are made again
        read = tuple(weights.values()), tuple(absent)
        plain = as_given(plan, names if what == "call" else ())
        form = Form() if front is None else front.form
        front = Front(*read, form, keeping, layer, inputs, plain)
        FRONTS.pop(key, None)
        add_recent(FRONTS, key, front, _MOST)
    if torch.is_grad_enabled() and wanted(tensors):
        return  # the passes of the layer learn themselves
    user = dict(zip((*names, *weights), tensors, strict=True))
    given = dict(zip(user, tensors if front.plain else front.read(tensors), strict=True))
    arrays = {**user, **_entering(module, user, what)}
    if what == "call":
        arrays |= {name: given[name] for name in FLAGS if name in given}
    host = Torch.of(plan.dtype)
    known = draft_stack(host, ready.plan, layers, arrays, ready.options, holes)
    if known is None:
        return
    output, last = (None, results) if alone else results
    ends = [(known.out, output)] if output is not None else []
    ends += zip(known.finals, last if type(last) is tuple else (last,), strict=True)
    parts = [Part(n, tuple(t.shape), t.stride(), t.storage_offset()) for n, t in ends]
    front.form.learn(known.recipe, given, parts)


def _entering(module: Any, user: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
    """The arrays of a call as a layer reads them, in views of the user's."""
    x, batch_first = user["x"], what != "cell" and module.batch_first
    arrays = {name: a for name, a in user.items() if name.startswith((*OF_STATES, "static"))}
    if what == "cell":
        arrays = {n: a[None] if n.startswith(OF_STATES) else a for n, a in arrays.items()}
    if what != "call":
        x = x[:, None] if batch_first and x.dim() == 2 else x[None]
    x, others = Layout.of(Torch, x, batch_first).enter(x, arrays, {})
    entering = {"x": x, **others}
    if "resets" in user and what == "step":  # flags of its only direction
        entering["resets"] = user["resets"].view(torch.uint8).reshape(1, 1, -1)
    return entering
