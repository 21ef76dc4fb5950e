"""The fused engine as operators of PyTorch, for tracers, torch.compile and torch.export, and modes.

``anycell::forward`` takes a list of tensors, and a text that names the cell, the options, and the
array of the signature that each tensor is. It is a text, because a graph holds no Python objects
and outlives the process: cells are found again by a name made of what they compute. Run-time
hyperparameters are separate arguments, so that a schedule makes no new graphs. The device of a call
decides which engine runs it.

Autograd sees only ``anycell::forward``. It turns into ``anycell::run``, which may keep what the
gradient needs, and ``anycell::backward``. Compiled graphs consist of these two, so that their calls
do not pass autograd again, which would take as long as a few steps of a small layer.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # calls torch.compiler.disable at the first call
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from anycell import cells, layer
from anycell.lang.cell import Cell
from anycell.layer import gpu
from anycell.layer.checks import check_options
from anycell.layer.signature import FLAGS
from anycell.plan import DTYPES, OF_CALL, OPTIONS, Call, Options, Plan, Sizes, scales_of
from anycell.torch import fused
from anycell.torch.composite import SEED, Arrays, Result, changed
from anycell.torch.fused import enter
from anycell.torch.observers import ORDINARY, TRACERS, compiled, constant, stepwise

# Inductor's CUDA graphs (mode="reduce-overhead") must leave our operators out: the operators replay
# their own graphs, whose memory lasts, and read what kernels have reported. Recent PyTorch has a
# tag for this; without the tag, layers on a card do not become operators.
_TAGS = [torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else []
ON_CARDS = bool(_TAGS)
_CELLS: dict[str, Cell] = {}


def register(cell: Cell) -> None:
    """Lets operators find a cell by its name; modules register their own cells."""
    _CELLS.setdefault(_name(cell.name, cell.key), cell)


def known(cell: Cell, hidden_size: int, sizes: Sizes, x: Tensor) -> bool:
    """Whether the fused engine runs a registered cell on tensors like x."""
    facts = cell.name, cell.key, hidden_size, sizes, x.dtype, x.device.type
    return _text(*facts, tuple(Options()), ("x",)) is not None


def draws(cell: Cell) -> bool:
    """Whether a cell may draw random masks: under a compiler, any cell that is not registered."""
    return _draws(cell.name, cell.key) if torch.compiler.is_dynamo_compiling() else bool(cell.keeps)


# A compiler cannot trace these functions. Of a cell it sees only the name and the key.


def _constant_size(size: int) -> int:
    """Makes a size constant. Before PyTorch 2.6, ``dynamic=True`` makes the sizes of a module
    unknown to the compiler until it compiles a loop over them.
    """
    return len(range(size))


@constant
def _text(
    name: str,
    key: str,
    hidden_size: int,
    sizes: Sizes,
    dtype: torch.dtype,
    device: str,
    options: tuple[Any, ...],
    arrays: tuple[str, ...],
) -> str | None:
    """Returns the text of a call; None if no fused kernel runs it or its cell is not registered."""
    cell = _CELLS.get(_name(name, key))
    if cell is None or (device == "cuda" and not ON_CARDS):
        return None
    if isinstance(_plan_on(device, cell, hidden_size, dtype, sizes), str):
        return None
    kind = str(dtype).removeprefix("torch.")
    form = Spec(_name(name, key), hidden_size, sizes, kind, Options(*options), arrays)
    return form.text()


@constant
def _draws(name: str, key: str) -> bool:
    cell = _CELLS.get(_name(name, key))
    return cell is None or bool(cell.keeps)


@functools.lru_cache(maxsize=1024)
def _name(name: str, key: str) -> str:
    return f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


# After a graph break, Dynamo would look into this function, and warn about a cache in it.
_plan_on = _disable_dynamo(fused.plan_on)


class Spec(NamedTuple):
    """The facts that the text of an operator states.

    Attributes:
        cell: the name by which the cell is registered.
        sizes: what the cell's size symbols other than H stand for.
        options: the options of the call, but torch sets the threads. With ``checkpoint`` the
            forward pass keeps nothing, because the amount would be no simple function of the sizes;
            the backward pass starts by running the forward pass again.
        arrays: the name of each tensor, as in ``layer.names``, or "seed".
    """

    cell: str
    hidden_size: int
    sizes: Sizes
    dtype: str
    options: Options
    arrays: tuple[str, ...]

    def text(self) -> str:
        """Returns the text, which ``read`` turns back into the facts."""
        return json.dumps({**self._asdict(), "options": self.options._asdict()})

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def read(cls, text: str) -> Spec:
        try:
            read = json.loads(text)
            options, sizes = Options(**read["options"]), read["sizes"]
            read["options"] = options._replace(reverse=tuple(options.reverse))
            read["sizes"] = tuple([(symbol, size) for symbol, size in sizes])
            form = cls(**{**read, "arrays": tuple(read["arrays"])})
            if form.text() != text or not form._sound():
                raise ValueError
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f"form: given {text!r}; expected a text that anycell.torch has written for this "
                "operator. Export or trace the layer again."
            ) from None
        return form

    def _sound(self) -> bool:
        """Whether all fields have valid types and ranges; ``plan`` compares them with the cell."""
        options = self.options
        check_options({n: getattr(options, n) for n in (*OF_CALL, "checkpoint")}, OPTIONS)
        likes = zip(options, Options()._replace(checkpoint=options.checkpoint), strict=True)
        sizes = [self.hidden_size, *[size for _, size in self.sizes]]
        return (
            all(type(value) is type(like) for value, like in likes)
            and len(options.reverse) in (1, 2)
            and {*map(type, options.reverse)} == {bool}
            and 0 <= options.stream < 1 << 31
            and all(type(size) is int and size > 0 for size in sizes)
            and {*map(type, (self.cell, *self.arrays))} == {str}
            and self.dtype in DTYPES
            and "x" in self.arrays
            and len({*self.arrays}) == len(self.arrays)
        )

    @functools.lru_cache(maxsize=1024)  # noqa: B019  (of small tuples)
    def plan(self, hyper: tuple[float, ...], device: str) -> Plan:
        """Returns the plan of the cell with these hyperparameters, on a type of device."""
        cell = _CELLS.get(self.cell)
        if cell is None:
            raise RuntimeError(
                f"anycell: the cell {self.cell} of this graph is not known in this process. "
                "Import the module that defines it, and make a layer of it, before the graph runs."
            )
        if tuple(cell.hyper.values()) != hyper:
            _expect("hyper", len(hyper), len(cell.hyper))
            cell = cell(**dict(zip(cell.hyper, hyper, strict=True)))
        names = (*layer.names(cell, len(self.options.reverse)), "seed")
        _expect("form, names that the cell does not have", {*self.arrays} - {*names}, set())
        dtype = getattr(torch, self.dtype)
        plan: Plan | str = _plan_on(device, cell, self.hidden_size, dtype, self.sizes)
        if isinstance(plan, str):
            given = f"given sizes {dict(self.sizes)} and {self.dtype}"
            raise RuntimeError(f"anycell: the cell {self.cell} of this graph, {given}: {plan}.")
        return plan

    def plan_of(self, tensors: Sequence[Tensor], hyper: Sequence[float]) -> Plan:
        """Returns the plan for these tensors; the text says how many there must be."""
        _expect("tensors", len(tensors), len(self.arrays))
        x = self.x(tensors)
        _expect("x, axes", x.dim(), 3)
        return self.plan(tuple(hyper), x.device.type)

    def unpack(self, tensors: Sequence[Tensor], plan: Plan) -> tuple[Call, dict[str, Tensor]]:
        """Returns the call that these tensors describe, and its arrays.

        Flags and seed are checked here, all other arrays by ``anycell.layer.contract``.
        """
        arrays, options = dict(zip(self.arrays, tensors, strict=True)), self.options
        for name in FLAGS:
            if name in arrays:
                kind = torch.bool, tuple(arrays["x"].shape[:2])
                _expect(name, (arrays[name].dtype, tuple(arrays[name].shape)), kind)
        seed = arrays.pop("seed", None)
        if seed is not None:
            _expect("seed", (seed.dtype, seed.dim()), (torch.int64, 0))
            options = options._replace(seed=int(seed))
        return Call(plan.cell, self.hidden_size, options, self.sizes), arrays

    def x(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns the input among the tensors of the call."""
        return tensors[self.arrays.index("x")]

    def wanted(self, needs: Sequence[bool]) -> set[str]:
        """Returns the names of the tensors that need a gradient."""
        return {name for name, need in zip(self.arrays, needs, strict=True) if need}

    @property
    def apart(self) -> bool:
        """Whether the output is not the sequence of hidden states."""
        return self.options.apart("mask" in self.arrays)

    def kept_states(self, plan: Plan) -> list[bool]:
        """Says which states besides the first are kept: with checkpoints all, at the borders."""
        states, borders = range(len(plan.cell.states)), self.options.checkpoint is not None
        keeps = gpu.keeps_state if plan.engine == "gpu" else layer.keeps_state
        return [i > 0 and (borders or keeps(plan, i)) for i in states]


def _expect(name: str, given: Any, expected: Any) -> None:
    """Checks an operator's arguments against its text: a graph may come from a file."""
    if given != expected:
        raise ValueError(
            f"anycell operator, {name}: given {given}; expected {expected}, from the form and the "
            "cell. Export or trace the layer again."
        )


def run(call: Call, arrays: Arrays) -> Result | None:
    """Runs a layer as an operator; returns None if the fused engine cannot run it."""
    cell, options, x = call.cell, call.options, arrays["x"]
    if "recurrent_mask" in arrays or call.sequences:
        return None
    if isinstance(options.seed, Tensor):
        arrays, options = {**arrays, "seed": options.seed}, changed(options, SEED, 0)
    dtype = torch.int8 if scales_of("weight_ih") in arrays else x.dtype
    hidden, sizes = _constant_size(call.hidden_size), []
    for symbol, size in call.sizes:
        sizes.append((symbol, _constant_size(size)))
    text = _text(
        cell.name, cell.key, hidden, tuple(sizes), dtype, x.device.type, tuple(options),
        tuple(arrays),
    )  # fmt: skip
    if text is None:
        return None
    hyper = list(cell.hyper.values())
    if not compiled():
        _tell_counters()
    output, *final = torch.ops.anycell.forward(list(arrays.values()), text, hyper)
    return output, tuple(final), ()


# -- the operators ---------------------------------------------------------------------------------


def _run(tensors: Sequence[Tensor], text: str, hyper: Sequence[float], keep: bool) -> list[Tensor]:
    """Returns the output and the final states, or, if ``keep``, the final states and the arrays for
    the backward pass. The output is then a part of one of these arrays, or else comes last, because
    results of an operator must not share memory.
    """
    form = Spec.read(text)
    plan = form.plan_of(tensors, hyper)
    call, arrays = form.unpack(tensors, plan)
    output, final, kept = enter(call.cell, "forward", fused.run_forward, call, plan, arrays, keep)
    if kept is None:
        return [output, *final]
    return [*final, *kept.flat(), *([output] if form.apart else [])]


def _run_fake(
    tensors: Sequence[Tensor], text: str, hyper: Sequence[float], keep: bool
) -> list[Tensor]:
    form = Spec.read(text)
    plan = form.plan_of(tensors, hyper)
    x, directions = _expect_one_device(form, tensors), form.options.reverse
    steps, rows, _ = x.shape
    kept = layer.contract.kept_shapes(plan, steps, rows, directions, form.kept_states(plan))
    apart = x.new_empty(steps, rows, kept.hidden[2]) if form.apart else None
    final = [x.new_empty(len(directions), rows, plan.sizes[s.size]) for s in plan.cell.states]
    if not keep:
        return [x.new_empty(kept.hidden)[1 : 1 + steps] if apart is None else apart, *final]
    # States besides the first are kept in the dtype in which the cell computes.
    wide = getattr(torch, plan.types.math.name) if plan.engine == "cpu" else x.dtype
    memory = [x.new_empty(shape) for shape in (kept.hidden, *kept.values)]
    memory += [x.new_empty(shape, dtype=wide) for shape in kept.flat()[len(memory) :]]
    return [*final, *memory, *([] if apart is None else [apart])]


def _expect_one_device(form: Spec, tensors: Sequence[Tensor]) -> Tensor:
    """Returns x; refuses tensors on other devices: with one on "meta", results are mere shapes."""
    x = form.x(tensors)
    for name, tensor in zip(form.arrays, tensors, strict=True):
        if name != "seed":  # the seed is always on the CPU
            _expect("device of a tensor", str(tensor.device), str(x.device))
    return x


def _backward(
    tensors: Sequence[Tensor],
    kept: Sequence[Tensor],
    arriving: Sequence[Tensor],
    text: str,
    hyper: Sequence[float],
    given: Sequence[bool],
    needs: Sequence[bool],
) -> list[Tensor]:
    """Returns the gradients of the tensors that need one; ``given`` says for the output and each
    final state whether its gradient arrives. If nothing was kept, the forward pass runs again.
    """
    form = Spec.read(text)
    plan = form.plan_of(tensors, hyper)
    call, arrays = form.unpack(tensors, plan)
    _expect("given", len(given), 1 + len(plan.cell.states))
    _expect("arriving", len(arriving), sum(given))
    _expect("needs", len(needs), len(tensors))
    states, directions = form.kept_states(plan), len(form.options.reverse)
    if not kept:
        _, _, again = enter(call.cell, "forward", fused.run_forward, call, plan, arrays, True)
        assert again is not None
        kept = again.flat()
    before = layer.Kept.of(kept, states, directions)
    present = iter(arriving)
    gradients = [next(present) if one else None for one in given]
    wanted, run = form.wanted(needs), fused.run_backward
    named = enter(call.cell, "backward", run, call, plan, arrays, before, gradients, wanted)
    return [
        _alone(named[name], plan) if name in named else t.new_zeros(t.shape)
        for name, t in zip(form.arrays, tensors, strict=True)
        if name in wanted
    ]


def _alone(gradient: Tensor, plan: Plan) -> Tensor:
    """Returns the gradient in memory of its own, which operators require: gradients of a cell's
    parameters are parts of one tensor, and on a GPU others may be too. Makes it contiguous, as the
    fake says: the gradient of a weight stored by columns comes in columns.
    """
    whole = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
    if whole and plan.engine == "cpu":
        return gradient.contiguous()
    return gradient.clone(memory_format=torch.contiguous_format)


def _backward_fake(tensors: Sequence[Tensor], *others: Any) -> list[Tensor]:
    _, _, text, *_, needs = others
    _expect_one_device(Spec.read(text), tensors)
    return [t.new_empty(t.shape) for t, need in zip(tensors, needs, strict=True) if need]


class _Operators(torch.autograd.Function):
    """``anycell::run`` and ``anycell::backward``, as autograd sees them."""

    @staticmethod
    def forward(ctx: Any, text: str, hyper: list[float], *tensors: Tensor) -> tuple[Tensor, ...]:
        form = Spec.read(text)
        keep, kept = form.options.checkpoint is None, list[Tensor]()
        results = torch.ops.anycell.run(tensors, text, hyper, keep)
        if keep:
            states = len(_CELLS[form.cell].states)
            final, kept = results[:states], results[states:]
            x = form.x(tensors)
            output = kept.pop() if form.apart else kept[0][1 : 1 + x.shape[0]].detach()
            if type(x) in ORDINARY and not form.apart:
                # allow_mutation_on_saved_tensors, a mode, finds what an edit changes by its address
                output = output.clone()
            results = [output, *final]
        ctx.save_for_backward(*tensors, *kept)
        ctx.set_materialize_grads(False)
        ctx.text, ctx.hyper, ctx.count = text, hyper, len(tensors)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Any, ...]:
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[2:]
        tensors, kept = saved[: ctx.count], saved[ctx.count :]
        if stepwise(arriving, saved, (*ORDINARY, *TRACERS)):
            form = Spec.read(ctx.text)
            call, arrays = form.unpack(tensors, form.plan_of(tensors, ctx.hyper))
            wanted = form.wanted(needs)
            run: Any = fused.differentiable
            named = enter(call.cell, "backward", run, call, arrays, wanted, arriving)
            return None, None, *[named.get(name) for name in form.arrays]
        given, present = [g is not None for g in arriving], [g for g in arriving if g is not None]
        backward = torch.ops.anycell.backward
        gradients = iter(backward(tensors, kept, present, ctx.text, ctx.hyper, given, needs))
        return None, None, *[next(gradients) if need else None for need in needs]


def _forward(tensors: Sequence[Tensor], text: str, hyper: Sequence[float]) -> list[Tensor]:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return list(_Operators.apply(text, hyper, *tensors))
    results: list[Tensor] = torch.ops.anycell.run(tensors, text, hyper, False)
    return results


# -- how FlopCounterMode counts them ---------------------------------------------------------------


def _tell_counters() -> None:
    """Adds the operators to the list of each FlopCounterMode that is on; to add them to torch's own
    list, we would have to import its module, which imports Triton.
    """
    for mode in _get_current_dispatch_mode_stack():
        known = getattr(getattr(mode, "counter", mode), "flop_registry", None)
        if known is not None:
            known.setdefault(torch.ops.anycell.run, _flops)
            known.setdefault(torch.ops.anycell.backward, _backward_flops)


def _matmuls(tensors: Sequence[Tensor], text: str) -> dict[str, int]:
    """The operations of the product with each weight, in one step of all rows."""
    arrays = dict(zip(Spec.read(text).arrays, tensors, strict=True))
    rows = 2 * arrays["x"].shape[1]
    weights = {n: t for n, t in arrays.items() if n.startswith("weight_") and t.dim() > 1}
    return {name: rows * weight.numel() for name, weight in weights.items()}


def _flops(tensors: Sequence[Tensor], text: str, *_: Any, out_val: Any = None) -> int:
    steps = Spec.read(text).x(tensors).shape[0]
    return steps * sum(_matmuls(tensors, text).values())


def _backward_flops(
    tensors: Sequence[Tensor],
    kept: Sequence[Tensor],
    arriving: Sequence[Tensor],
    text: str,
    hyper: Sequence[float],
    given: Sequence[bool],
    needs: Sequence[bool],
    out_val: Any = None,
) -> int:
    """Counts the products for the gradients of each weight, and of what it multiplies."""
    form = Spec.read(text)
    wanted, steps = form.wanted(needs), form.x(tensors).shape[0]
    count = 0 if kept else _flops(tensors, text)
    for name, flops in _matmuls(tensors, text).items():
        count += steps * flops * (name in wanted)
        if name.startswith("weight_ih"):
            count += steps * flops * ("x" in wanted)
        elif name.startswith("weight_hh"):  # the first step's state may be a constant
            count += (steps - 1 + any(n.startswith("state ") for n in wanted)) * flops
        else:
            count += steps * flops
    return count


_library = torch.library.Library("anycell", "DEF")
for _schema in (
    "forward(Tensor[] tensors, str form, float[] hyper) -> Tensor[]",
    "run(Tensor[] tensors, str form, float[] hyper, bool keep) -> Tensor[]",
    "backward(Tensor[] tensors, Tensor[] kept, Tensor[] arriving, str form, float[] hyper, "
    "bool[] given, bool[] needs) -> Tensor[]",
):
    _library.define(_schema, tags=_TAGS)
for _key in ("CPU", "CUDA"):
    _library.impl("forward", functools.partial(_run, keep=False), _key)
    _library.impl("run", _run, _key)
    _library.impl("backward", _backward, _key)
_library.impl("forward", _forward, "Autograd")
_fake = functools.partial(torch.library.register_fake, lib=_library)
_fake("anycell::forward", functools.partial(_run_fake, keep=False))
_fake("anycell::run", _run_fake)
_fake("anycell::backward", _backward_fake)
for _cell in vars(cells).values():
    if isinstance(_cell, Cell):
        register(_cell)
