"""The fused engine as two operators of PyTorch, for all that traces: torch.compile, torch.export.

``anycell::forward`` and ``anycell::backward`` take lists of tensors, and a text that says which
cell, and what lies where in the list. A text, because a graph holds no Python objects, and outlives
the process: cells are found again by a name made of what they compute. Run-time hyperparameters
come beside it, so that a schedule gives no new graph. Which engine runs a call its device decides.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable, at the first call

from anycell import cells, layer
from anycell.lang.cell import Cell
from anycell.layer import Options, check_checkpoint
from anycell.plan import DTYPES, Plan
from anycell.torch import fused
from anycell.torch.composite import Arrays, Call, Result, Sizes
from anycell.torch.ranges import ranged

AVAILABLE = hasattr(torch.library, "register_autograd")  # since PyTorch 2.4
# Inductor's CUDA graphs (mode="reduce-overhead") must leave our operators out: these replay graphs
# of their own, whose memory lasts, and look at what kernels have reported. Recent PyTorch has a tag
# that says so; without it layers on a card are no operators.
_TAGS = [torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else []
ON_CARDS = bool(_TAGS)
_CELLS: dict[str, Cell] = {}


def register(cell: Cell) -> None:
    """Lets operators find a cell by its name; modules do it for theirs."""
    _CELLS.setdefault(_name(cell.name, cell.key), cell)


def known(cell: Cell, hidden_size: int, sizes: Sizes, x: Tensor) -> str | None:
    """The name of a registered cell that the fused engine runs on such tensors."""
    if x.is_cuda and not ON_CARDS:
        return None
    return _known(cell.name, cell.key, hidden_size, _text(sizes), _dtype(x), x.device.type)


def draws(cell: Cell) -> bool:
    """Whether a cell draws random masks; one that is not registered may."""
    return _draws(cell.name, cell.key)


# A compiler cannot trace these, and sees of a cell only its texts.


def _constant(function: Callable[..., Any]) -> Any:
    """``torch.compiler.assume_constant_result``, without its import of all of Dynamo: that takes as
    long as torch itself.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant
def _known(
    name: str, key: str, hidden_size: int, sizes: str, dtype: str, device: str
) -> str | None:
    name = _name(name, key)
    found = _CELLS.get(name)
    plan = _plan(found, hidden_size, sizes, dtype, device) if found else None
    return name if isinstance(plan, Plan) else None


@_constant
def _draws(name: str, key: str) -> bool:
    cell = _CELLS.get(_name(name, key))
    return cell is None or bool(cell.keeps)


@functools.lru_cache(maxsize=1024)
def _name(name: str, key: str) -> str:
    return f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _text(sizes: Sizes) -> str:
    return ",".join([f"{symbol}={size}" for symbol, size in sizes]) or "-"


def _sizes(text: str) -> Sizes:
    pairs = [one.split("=") for one in text.split(",")] if text != "-" else []
    return tuple([(symbol, int(size)) for symbol, size in pairs])


@_disable_dynamo  # around a broken graph it would look here, and warn of the cache
def _plan(cell: Cell, hidden_size: int, sizes: str, dtype: str, device: str) -> Plan | str:
    return fused.plan_on(device, cell, hidden_size, getattr(torch, dtype), _sizes(sizes))


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


class Form(NamedTuple):
    """What the text says.

    Attributes:
        cell: its name among those registered.
        sizes: what the other size symbols of the cell stand for.
        stream: of random masks, the number of the layer.
        reverse: "1" for each direction that runs backwards, "0" for each that does not.
        keep: whether the results are followed by what the backward pass reads.
        checkpoint: see ``layer.Options``; "-" for None. The operator then keeps nothing, for how
            much it would keep is no simple function of the sizes, and the backward pass begins with
            the forward pass once more.
        given: "1" for each array of ``layer.names``, and for a seed, that is in the list; "0" for
            each that the call does without.
    """

    cell: str
    hidden_size: int
    sizes: str
    dtype: str
    stream: int
    reverse: str
    repeat: bool
    training: bool
    keep: bool
    checkpoint: str
    given: str

    def text(self) -> str:
        """``read`` reads it again."""
        numbers = [str(int(n)) for n in (self.repeat, self.training, self.keep)]
        first = self.cell, str(self.hidden_size), self.sizes, self.dtype, str(self.stream)
        return " ".join([*first, self.reverse, *numbers, self.checkpoint, self.given])

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def read(cls, text: str) -> Form:
        try:
            cell, hidden, sizes, dtype, stream, reverse, *flags, checkpoint, given = text.split(" ")
            repeat, training, keep = (bool(int(flag)) for flag in flags)
            form = cls(
                cell, int(hidden), sizes, dtype, int(stream), reverse, repeat, training, keep,
                checkpoint, given,
            )  # fmt: skip
            known = len(reverse) in (1, 2) and form.hidden_size > 0 and dtype in DTYPES
            if form.text() != text or not known or not set(reverse + given) <= {"0", "1"}:
                raise ValueError
            _sizes(sizes)
            check_checkpoint(form._checkpoint)
        except ValueError:
            raise ValueError(
                f"form: given {text!r}; expected a text that anycell.torch has written for this "
                "operator. Export or trace the layer again."
            ) from None
        return form

    @functools.lru_cache(maxsize=1024)  # noqa: B019  (of small tuples)
    def plan(self, hyper: tuple[float, ...], device: str) -> Plan:
        """Of the cell with these hyperparameters, on devices of a type."""
        cell = _CELLS.get(self.cell)
        if cell is None:
            raise RuntimeError(
                f"anycell: the cell {self.cell} of this graph is not known in this process. "
                "Import the module that defines it, and make a layer of it, before the graph runs."
            )
        if tuple(cell.hyper.values()) != hyper:
            _expect("hyper", len(hyper), len(cell.hyper))
            cell = cell(**dict(zip(cell.hyper, hyper, strict=True)))
        plan = _plan(cell, self.hidden_size, self.sizes, self.dtype, device)
        if isinstance(plan, str):
            raise RuntimeError(f"anycell: the cell {self.cell} of this graph: {plan}.")
        return plan

    @functools.lru_cache(maxsize=1024)  # noqa: B019
    def call(self, plan: Plan) -> tuple[Call, tuple[str, ...]]:
        """The call but for its seed, and the names of its tensors."""
        names = (*layer.names(plan.cell, len(self.reverse)), "seed")
        _expect("form, places of tensors", len(self.given), len(names))
        there = tuple([name for name, one in zip(names, self.given, strict=True) if one == "1"])
        options = Options(
            self._reverse, self.repeat, self.training, 0, self.stream, checkpoint=self._checkpoint
        )
        return Call(plan.cell, self.hidden_size, options, _sizes(self.sizes)), there

    def unpack(self, tensors: Sequence[Tensor], plan: Plan) -> tuple[Call, dict[str, Tensor]]:
        """The call that the tensors make.

        That there are as many as the text says, and of which kind are those that are no arrays of
        the layer, is checked here; the rest by ``anycell.layer.contract``.
        """
        call, there = self.call(plan)
        _expect("tensors", len(tensors), len(there))
        arrays = dict(zip(there, tensors, strict=True))
        x, seed = arrays.get("x"), arrays.pop("seed", None)
        _expect("x, axes", None if x is None else x.dim(), 3)
        assert x is not None
        for name in ("mask", "resets"):
            if name in arrays:
                kind = torch.bool, tuple(x.shape[:2])
                _expect(name, (arrays[name].dtype, tuple(arrays[name].shape)), kind)
        if seed is not None:
            _expect("seed", (seed.dtype, seed.dim()), (torch.int64, 0))
            call = call._replace(options=call.options._replace(seed=int(seed)))
        return call, arrays

    @property
    def _reverse(self) -> tuple[bool, ...]:
        return tuple([one == "1" for one in self.reverse])

    @property
    def _checkpoint(self) -> str | int | None:
        text = self.checkpoint
        return None if text == "-" else int(text) if text.isdigit() else text

    @property
    def apart(self) -> bool:
        """Whether the output is not the sequence of hidden states."""
        masked = self.given[2] == "1"  # its place in ``layer.names``
        return masked and not self.repeat


def _expect(name: str, given: Any, expected: Any) -> None:
    """What an operator is called with must be what its text says: a graph may come from a file."""
    if given != expected:
        raise ValueError(
            f"anycell operator, {name}: given {given}; expected {expected}, from the form and the "
            "cell. Export or trace the layer again."
        )


def run(call: Call, arrays: Arrays) -> Result | None:
    """A layer as an operator; None where the fused engine does not run it."""
    cell, options, x = call.cell, call.options, arrays["x"]
    name = known(cell, call.hidden_size, call.sizes, x)
    if name is None or "recurrent_mask" in arrays or call.sequences:
        return None
    seed: list[Tensor] = [options.seed] if isinstance(options.seed, Tensor) else []
    names = layer.names(cell, len(options.reverse))
    tensors = [*[arrays[name] for name in names if name in arrays], *seed]
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    form = Form(
        name, call.hidden_size, _text(call.sizes), _dtype(x), options.stream,
        "".join(["1" if reverse else "0" for reverse in options.reverse]),
        options.repeat, options.training,
        keep and options.checkpoint is None and not torch.compiler.is_exporting(),
        "-" if options.checkpoint is None else str(options.checkpoint),
        "".join(["1" if name in arrays else "0" for name in names]) + ("1" if seed else "0"),
    )  # fmt: skip
    results = torch.ops.anycell.forward(tensors, form.text(), list(cell.hyper.values()))
    output, final = results[0], results[1 : 1 + len(cell.states)]
    if form.keep and not form.apart:  # the hidden states, with the slot before the first step
        output = output[1 : 1 + x.shape[0]]
    return output, tuple(final), ()


# -- the operators ---------------------------------------------------------------------------------
# Results of forward: the output, final states, and then what is kept. Where the hidden states are
# kept they are the output too: two results of an operator must not share memory.


def _forward(tensors: Sequence[Tensor], text: str, hyper: Sequence[float]) -> list[Tensor]:
    form = Form.read(text)
    plan = form.plan(tuple(hyper), _device(tensors))
    call, arrays = form.unpack(tensors, plan)
    run = fused.run_forward
    output, final, kept = ranged(call.cell, "forward", run, call, plan, arrays, form.keep)
    if kept is None:
        return [output, *final]
    hidden, *rest = kept.flat()
    return [output, *final, hidden, *rest] if form.apart else [hidden, *final, *rest]


def _device(tensors: Sequence[Tensor]) -> str:
    """The type of the device of x, the first tensor."""
    if not tensors:
        _expect("tensors", 0, "x first")
    return tensors[0].device.type


def _expect_one_device(form: Form, tensors: Sequence[Tensor]) -> None:
    """That no tensor is elsewhere than x: one on "meta" would make all results shapes alone."""
    for tensor in tensors[: len(tensors) - int(form.given[-1])]:  # a seed is on the CPU always
        _expect("device of a tensor", str(tensor.device), str(tensors[0].device))


def _kept(form: Form, plan: Plan) -> list[bool]:
    """Which states besides the first are kept: with checkpoints all, at the borders."""
    engine = fused.engine_of(plan)
    every, states = form.checkpoint != "-", range(len(plan.cell.states))
    return [i > 0 and (every or engine.keeps_state(plan, i)) for i in states]


def _forward_fake(tensors: Sequence[Tensor], text: str, hyper: Sequence[float]) -> list[Tensor]:
    form = Form.read(text)
    plan = form.plan(tuple(hyper), _device(tensors))
    _expect_one_device(form, tensors)
    x, directions = tensors[0], len(form.reverse)
    steps, rows, _ = x.shape
    engine = fused.engine_of(plan)
    kept = layer.contract.kept_shapes(
        plan, steps, rows, form._reverse, engine.saved_width(plan), _kept(form, plan)
    )
    hidden, *rest = kept.flat()
    output = steps, rows, hidden[2]
    finals = [(directions, rows, plan.sizes[state.size]) for state in plan.cell.states]
    if not form.keep:
        out = x.new_empty(output) if form.apart else x.new_empty(hidden)[1 : 1 + steps]
        return [out, *[x.new_empty(shape) for shape in finals]]
    shapes = [output, *finals, hidden, *rest] if form.apart else [hidden, *finals, *rest]
    return [x.new_empty(shape) for shape in shapes]


def _backward(
    tensors: Sequence[Tensor],
    results: Sequence[Tensor],
    arriving: Sequence[Tensor],
    text: str,
    hyper: Sequence[float],
    given: Sequence[bool],
    needs: Sequence[bool],
) -> list[Tensor]:
    form = Form.read(text)
    if not form.keep:  # as of an exported graph, or with checkpoints: the forward pass once more
        text = form._replace(keep=True).text()
        results = _forward(tensors, text, hyper)
        form = Form.read(text)
    plan = form.plan(tuple(hyper), _device(tensors))
    call, arrays = form.unpack(tensors, plan)
    states, kept = 1 + len(plan.cell.states), _kept(form, plan)
    _expect("results", len(results), states + form.apart + len(form.reverse) * (1 + sum(kept)))
    _expect("given", len(given), states)
    _expect("arriving", len(arriving), sum(given))
    _expect("needs", len(needs), len(tensors))
    first = results[states:] if form.apart else [results[0], *results[states:]]
    present = iter(arriving)
    gradients = [next(present) if one else None for one in given]
    wanted = {name for name, need in zip(arrays, needs, strict=False) if need}
    before, run = layer.Kept.of(first, kept, len(form.reverse)), fused.run_backward
    named = ranged(call.cell, "backward", run, call, plan, arrays, before, gradients, wanted)
    return [
        _alone(named[name], plan) if name in named else torch.zeros_like(t)
        for name, t in zip(arrays, tensors, strict=False)
        if name in wanted
    ]


def _alone(gradient: Tensor, plan: Plan) -> Tensor:
    """The gradient in memory of its own, as results of an operator must be: those of a cell's
    parameters are parts of one tensor, and on a GPU others may be too.
    """
    whole = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
    return gradient if whole and plan.engine == "cpu" else gradient.clone()


def _backward_fake(
    tensors: Sequence[Tensor],
    results: Sequence[Tensor],
    arriving: Sequence[Tensor],
    text: str,
    hyper: Sequence[float],
    given: Sequence[bool],
    needs: Sequence[bool],
) -> list[Tensor]:
    _expect_one_device(Form.read(text), tensors)
    return [t.new_empty(t.shape) for t, need in zip(tensors, needs, strict=True) if need]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, ctx.text, ctx.hyper = inputs
    ctx.count = len(tensors)
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)
    ctx.needs = [t.requires_grad for t in tensors]


def _gradient(ctx: Any, arriving: Sequence[Tensor | None]) -> tuple[Any, None, Any]:
    saved = list(ctx.saved_tensors)
    tensors, results = saved[: ctx.count], saved[ctx.count :]
    form = Form.read(ctx.text)
    states = len(form.plan(tuple(ctx.hyper), tensors[0].device.type).cell.states)
    gradients = list(arriving[: 1 + states])
    if gradients[0] is not None and form.keep and not form.apart:
        gradients[0] = gradients[0][1 : 1 + tensors[0].shape[0]]
    given, present = [g is not None for g in gradients], [g for g in gradients if g is not None]
    backward = torch.ops.anycell.backward
    found = iter(backward(tensors, results, present, ctx.text, ctx.hyper, given, ctx.needs))
    first = [next(found) if need else None for need in ctx.needs]
    return first, None, None if ctx.hyper else []  # torch takes an empty list for one of tensors


if AVAILABLE:
    _library = torch.library.Library("anycell", "DEF")
    _library.define("forward(Tensor[] tensors, str form, float[] hyper) -> Tensor[]", tags=_TAGS)
    _library.define(
        "backward(Tensor[] tensors, Tensor[] results, Tensor[] arriving, str form, float[] hyper, "
        "bool[] given, bool[] needs) -> Tensor[]",
        tags=_TAGS,
    )
    for _key in ("CPU", "CUDA"):
        _library.impl("forward", _forward, _key)
        _library.impl("backward", _backward, _key)
    torch.library.register_fake("anycell::forward", _forward_fake, lib=_library)
    torch.library.register_fake("anycell::backward", _backward_fake, lib=_library)
    torch.library.register_autograd(
        "anycell::forward", _gradient, setup_context=_setup, lib=_library
    )
    for _cell in vars(cells).values():
        if isinstance(_cell, Cell):
            register(_cell)
