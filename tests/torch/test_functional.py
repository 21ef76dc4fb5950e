"""The functional call, ``anycell.torch.recurrence``, and the layer function below it, with masks on
the recurrent connections and input that is projected already.
"""

import functools
from typing import Any

import pytest
import torch
from problems import Adding, Rows, Sized
from tolerances import assert_close
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch_layers import tensors_of, weighted, whole_graphs

import anycell
import anycell.torch as at
from anycell import cell, cells, linear, tanh
from anycell.layer import shapes
from anycell.plan import plan
from anycell.torch.operators import functional, fused

STEPS, ROWS, SIZE, ENTERING = 6, 3, 5, 4


# -- recurrence: tensors of the user's own ---------------------------------------------------------
DOUBLE: dict[str, Any] = {"dtype": torch.float64}


def given_by(cell: Any, projected: bool = False) -> tuple[Any, ...]:
    """Arguments of ``recurrence`` whose tensors all want gradients."""
    sizes = {"H": SIZE, "P": 3}
    learned = shapes(cell, sizes, ENTERING, True)
    width = len(cell.gates) * SIZE if projected else ENTERING
    if projected:
        del learned["weight_ih"]

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, **DOUBLE, requires_grad=True)

    weights = {name: make(*shape) for name, shape in learned.items()}
    state = [make(ROWS, sizes[s.size]) for s in cell.states]
    return cell, make(STEPS, ROWS, width), weights, state


def assert_same(
    ours: list[torch.Tensor], right: list[torch.Tensor], kind: str = "gradient"
) -> None:
    for found, expected in zip(ours, right, strict=True):
        assert_close(found.detach().numpy(), expected.detach().numpy(), "float64", kind)


def test_projected_input_has_two_names() -> None:
    """``gates=`` and x with no ``weight_ih``; parameters among the weights, and apart."""
    cell, x, weights, state = given_by(cells.PeepholeLSTM)
    right = at.recurrence(cell, x, weights, state)
    gates = torch.nn.functional.linear(x, weights["weight_ih"], weights["bias_ih"])
    rest = {name: w for name, w in weights.items() if name not in ("weight_ih", "bias_ih")}
    params = {name: rest.pop(name) for name in cell.param_names}
    for found in (
        at.recurrence(cell, gates, {**rest, "weight_ih": None}, state, params),
        at.recurrence(cell, None, {**rest, **params}, state, gates=gates),
        at.recurrence(cell, None, rest, state, params, gates=gates),
        at.recurrence(
            *(cell, None, {**rest, **params, "bias_ih": weights["bias_ih"]}, state),
            gates=gates - weights["bias_ih"],
        ),
    ):
        assert_same(tensors_of(found), tensors_of(right), "forward")


@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_a_cell_without_gates_has_gradients(engine: str) -> None:
    @cell(gates="", state="h")
    def Still(x: Any, r: Any, s: Any) -> Any:
        return tanh(linear(s.h, "w"))

    weight = torch.randn(SIZE, SIZE, dtype=torch.float64, requires_grad=True)
    state = torch.randn(ROWS, SIZE, dtype=torch.float64)
    gates = torch.zeros(2, ROWS, 0, dtype=torch.float64)
    output, _ = at.recurrence(Still, None, {"weight_w": weight}, state, gates=gates, engine=engine)
    right = torch.tanh(torch.tanh(state @ weight.T) @ weight.T)
    pair = [torch.autograd.grad(end.sum(), weight)[0] for end in (output[1], right)]
    assert_same([output[1], pair[0]], [right, pair[1]])


def test_a_gpu_takes_the_next_road_for_cells_with_sizes() -> None:
    for sized in (Sized, Rows):
        why = fused.plan_of(sized, (("H", 6), ("E", 4), ("P", 4)), torch.float32, "gpu")
        assert isinstance(why, str) and why.startswith("no kernel on the GPU for gates, param")
        with pytest.raises(ValueError, match="engine='gpu' cannot run cell "):
            plan(sized, 6, "float32", "gpu", {"E": 4, "P": 4})
    plain = fused.plan_of(cells.LSTMP, (("H", 6), ("P", 4)), torch.float32, "gpu")
    assert not isinstance(plain, str) and plain.engine == "gpu"


def test_gates_of_16_bits_whose_rows_lie_in_each_other() -> None:
    cell, gates, weights, _ = given_by(cells.GRU, projected=True)
    weights = {name: weight.detach().bfloat16() for name, weight in weights.items()}
    gates = torch.randn(100).bfloat16().as_strided((STEPS, ROWS, 3 * SIZE), (1, 2, 1))
    output, _ = at.recurrence(cell, None, weights, gates=gates)
    assert torch.equal(output, at.recurrence(cell, None, weights, gates=gates.contiguous())[0])


def test_states_that_are_not_given_begin_as_declared() -> None:
    cell, x, weights, (h, c) = given_by(cells.LSTM)
    right = at.recurrence(cell, x, weights, (h, torch.zeros_like(c)))
    assert_same(tensors_of(at.recurrence(cell, x, weights, (h, None))), tensors_of(right))
    cell, x, weights, (h,) = given_by(cells.GRU)  # one state may come alone
    assert torch.equal(
        at.recurrence(cell, x, weights, h)[0], at.recurrence(cell, x, weights, [h])[0]
    )


# -- sequences of states ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("wanted", "names"),
    [("c", ["c"]), (("c", "h"), ["c", "h"]), (["h"], ["h"]), (True, ["h", "c"])],
)
def test_which_states(wanted: Any, names: list[str]) -> None:
    arguments = given_by(cells.LSTM)
    *_, states = at.recurrence(*arguments, return_states=wanted)
    assert list(states) == names
    for nothing in (None, False):
        assert len(at.recurrence(*arguments, return_states=nothing)) == 2


def test_masked_steps_of_the_states() -> None:
    """Zero or held, as the output."""
    cell, x, weights, state = given_by(cells.LSTM)
    mask = torch.ones(STEPS, ROWS, dtype=torch.bool)
    mask[0, 0] = mask[3, 1] = False
    x = torch.where(mask[..., None], x, torch.nan)
    for engine in ("cpu", "reference"):
        options: Any = {"mask": mask, "return_states": "c", "engine": engine}
        *_, zeros = at.recurrence(cell, x, weights, state, **options)
        assert not zeros["c"][~mask].any() and zeros["c"][mask].all()
        *_, held = at.recurrence(cell, x, weights, state, masked_output="repeat", **options)
        assert torch.equal(held["c"][0, 0], state[1][0])
        assert torch.equal(held["c"][3, 1], held["c"][2, 1])


def test_who_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel, whichever sequence a gradient arrives at."""
    steps = []
    run = functional.fused.composite
    monkeypatch.setattr(functional.fused, "composite", lambda *a: steps.append(1) or run(*a))
    arguments = given_by(cells.LSTM)
    output, (_, c), states = at.recurrence(*arguments, return_states=True)
    torch.autograd.grad(output.sum() + c.sum() + states["h"].sum(), arguments[1], retain_graph=True)
    assert not steps
    torch.autograd.grad(states["c"].sum(), arguments[1])
    assert not steps


def test_states_cannot_be_edited_before_the_backward_pass() -> None:
    """The backward pass reads them where they lie."""
    arguments = given_by(cells.LSTM)
    output, _, states = at.recurrence(*arguments, return_states="c")
    states["c"].detach().mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


# -- derivatives -----------------------------------------------------------------------------------
@pytest.mark.parametrize("per_gate", [False, True])
def test_a_learned_recurrent_mask(per_gate: bool) -> None:
    """No kernel has its gradient, so that the call goes step by step."""
    cell, x, weights, state = given_by(cells.GRU)
    shape = (3, ROWS, SIZE) if per_gate else (ROWS, SIZE)
    mask = torch.rand(shape, **DOUBLE, requires_grad=True)

    def output(mask: torch.Tensor) -> torch.Tensor:
        return at.recurrence(cell, x.detach()[:2], weights, state, recurrent_mask=mask)[0]

    assert torch.autograd.gradcheck(output, (mask,))
    with pytest.raises(ValueError, match="engine='cpu' cannot run this call: no fused kernel has"):
        at.recurrence(cell, x, weights, recurrent_mask=mask, engine="cpu")
    with torch.no_grad():
        at.recurrence(cell, x, weights, recurrent_mask=mask, engine="cpu")


# -- packed input ----------------------------------------------------------------------------------
@pytest.mark.parametrize("order", [[6, 4, 2], [2, 6, 4], [6, 6, 6]])
@pytest.mark.parametrize("projected", [False, True], ids=["", "projected"])
@pytest.mark.parametrize("reverse", [False, True], ids=["", "reverse"])
def test_packed(order: list[int], projected: bool, reverse: bool) -> None:
    cell, x, weights, state = given_by(cells.LSTM, projected)
    resets = torch.rand(STEPS, ROWS) < 0.4
    once = [torch.randn(SIZE, **DOUBLE), torch.randn(ROWS, SIZE, **DOUBLE)]
    options: Any = {
        "recurrent_mask": torch.rand(4, ROWS, SIZE, **DOUBLE), "reset_state": once,
        "return_states": True, "reverse": reverse,
    }  # fmt: skip

    def packed(t: torch.Tensor) -> PackedSequence:
        return pack_padded_sequence(t, order, enforce_sorted=False)

    entering = {"gates": packed(x)} if projected else {}
    output, final, states = at.recurrence(
        *(cell, None if projected else packed(x), weights, state),
        **(options | entering), resets=packed(resets.double()),
    )  # fmt: skip
    right, last, sequences = at.recurrence(
        cell, x, weights, state, **options, lengths=order, resets=resets
    )
    assert output.sorted_indices.equal(packed(x).sorted_indices)
    ours = [pad_packed_sequence(t)[0] for t in (output, *states.values())]
    assert_same([*ours, *final], [right, *sequences.values(), *last], "forward")


# -- resets as numbers -----------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64,
                                   torch.int32, torch.uint8, torch.bool])  # fmt: skip
def test_resets_as_numbers(dtype: torch.dtype) -> None:
    arguments = given_by(cells.GRU)
    resets = torch.rand(STEPS, ROWS) < 0.5
    right = at.recurrence(*arguments, resets=resets)[0]
    assert not torch.equal(at.recurrence(*arguments)[0], right)
    assert torch.equal(at.recurrence(*arguments, resets=resets.to(dtype))[0], right)
    for layer in (at.GRU(ENTERING, SIZE, batch_first=True), at.RNN(cells.RNN, ENTERING, SIZE)):
        x = torch.randn(STEPS, STEPS, ENTERING)
        resets = torch.rand(STEPS, STEPS) < 0.5
        assert torch.equal(layer(x, resets=resets.to(dtype))[0], layer(x, resets=resets)[0])


@pytest.mark.parametrize("value", [0.5, 2.0, -1.0, float("nan")])
def test_resets_of_other_numbers(value: float) -> None:
    arguments = given_by(cells.GRU)
    resets = torch.zeros(STEPS, ROWS)
    resets[1, 1] = value
    with pytest.raises(ValueError, match=rf"resets: .*a value of {value:g}; .*resets > 0\.5"):
        at.recurrence(*arguments, resets=resets)
    with pytest.raises(ValueError, match=r"resets: .*a value of"):
        at.LSTM(ENTERING, SIZE)(torch.zeros(STEPS, ROWS, ENTERING), resets=resets)


def test_nobody_looks_at_the_values_of_a_transform() -> None:
    """There all but 0 are resets."""
    arguments = given_by(cells.GRU)
    resets = torch.rand(2, STEPS, ROWS).round() * 3

    def output(resets: torch.Tensor) -> torch.Tensor:
        return at.recurrence(*arguments, resets=resets)[0]

    assert_same(
        list(torch.func.vmap(output)(resets)), [output(one > 0) for one in resets], "forward"
    )


@pytest.mark.parametrize(
    ("name", "value"), [("mask", torch.ones(STEPS, ROWS)), ("resets", torch.ones(STEPS, ROWS) * 1j)]
)
def test_what_flags_are_not(name: str, value: torch.Tensor) -> None:
    arguments = given_by(cells.GRU)
    with pytest.raises(TypeError, match=rf"{name}: given .*Cast it: {name}\.bool\(\)"):
        at.recurrence(*arguments, **{name: value})


# -- random masks, autocast, engines ---------------------------------------------------------------
def test_seeds(seed: int) -> None:
    cell, x, weights, _ = given_by(cells.ZoneoutLSTM, True)

    def output(**options: Any) -> torch.Tensor:
        return at.recurrence(cell, x, weights, training=True, **options)[0]

    learned = {name: w.detach().numpy() for name, w in weights.items() if name != "bias_ih"}
    gates = (x + weights["bias_ih"]).detach().numpy()
    for number in (seed, (1 << 64) - 1):
        right, _ = anycell.recurrence(cell, gates, learned, training=True, seed=number)
        assert_close(output(seed=number).detach().numpy(), right, "float64", "forward")
    torch.manual_seed(seed)
    first = output()
    assert not torch.equal(output(), first)
    torch.manual_seed(seed)
    assert torch.equal(output(), first)
    state = torch.get_rng_state()
    output(seed=1), at.recurrence(cell, x, weights)  # neither draws
    assert torch.equal(torch.get_rng_state(), state)


def test_autocast() -> None:
    """What other layers hand on is of 16 bits."""
    cell, x, weights, _ = given_by(cells.LSTM)
    weights = {name: w.float() for name, w in weights.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = at.recurrence(cell, x.bfloat16(), weights)
    halves = {name: w.bfloat16() for name, w in weights.items()}
    assert torch.equal(output, at.recurrence(cell, x.bfloat16(), halves)[0])
    assert output.dtype == torch.bfloat16


def test_engines() -> None:
    arguments = given_by(cells.LSTM)
    with pytest.raises(ValueError, match=r"engine='gpu' cannot run this call: .*engine 'cpu'"):
        at.recurrence(*arguments, engine="gpu")
    halves = {name: w.detach().half() for name, w in arguments[2].items()}
    x = arguments[1].detach().half()
    assert at.recurrence(cells.LSTM, x, halves, engine="cpu")[0].dtype is torch.float16
    eighths = {name: w.detach().to(torch.float8_e4m3fn) for name, w in arguments[2].items()}
    with pytest.raises(ValueError, match=r"engine='cpu' .*no fused kernel for torch\.float8"):
        at.recurrence(cells.LSTM, x.to(torch.float8_e4m3fn), eighths, engine="cpu")
    step = functools.partial(at.recurrence, cells.LSTM, weights=arguments[2], engine="cpu")
    with pytest.raises(ValueError, match=r"engine='cpu' cannot run this call: .*torch\.func"):
        torch.func.jacfwd(torch.func.jacfwd(step))(arguments[1])


@whole_graphs
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cell", [Adding, cells.LSTM], ids=repr)
@pytest.mark.slow
def test_compiled(cell: Any) -> None:
    """One operator, but with ``return_states``; a cell is known from its first call."""
    arguments = given_by(cell)
    flags = {"resets": torch.rand(STEPS, ROWS).round(), "lengths": torch.tensor([6, 3, 1])}

    def call(*arguments: Any, **options: Any) -> Any:
        return at.recurrence(cell, *arguments, **options)

    for options, whole in ((flags, True), ({**flags, "return_states": "c"}, False)):
        right = tensors_of(call(*arguments[1:], **options))
        wanted = tensors_of(arguments[1:])
        slopes = torch.autograd.grad(weighted(right), wanted)
        compiled = torch.compile(call, backend="aot_eager", fullgraph=whole, dynamic=False)
        found = tensors_of(compiled(*arguments[1:], **options))
        assert_same(found, right, "forward")
        assert_same(list(torch.autograd.grad(weighted(found), wanted)), list(slopes))


# -- errors ----------------------------------------------------------------------------------------
X, GATES = torch.zeros(STEPS, ROWS, ENTERING), torch.zeros(STEPS, ROWS, 3 * SIZE)
IH, HH = torch.zeros(3 * SIZE, ENTERING), torch.zeros(3 * SIZE, SIZE)
BOTH = {"weight_ih": IH, "weight_hh": HH}
PEEPHOLES = {"weight_ih": IH.new_zeros(4 * SIZE, ENTERING), "weight_hh": HH.new_zeros(20, SIZE)}
INDRNN = {"weight_ih": IH[:SIZE], "bias_ih": HH[0], "u": HH[0]}


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"cell": "GRU"}, TypeError, r"cell: given str 'GRU'; expected a cell"),
        ({"x": None}, TypeError, "x, gates: given neither; expected one"),
        ({"gates": GATES}, TypeError, "x, gates: given both"),
        ({"x": None, "gates": GATES}, ValueError, "weights: given weight_ih with gates"),
        ({"x": X[0]}, ValueError, r"x: given .*\[3, 4\]; expected \[time, batch, input"),
        ({"x": [1.0]}, TypeError, r"x: given list .*expected \[time, batch, input"),
        ({"weights": {"weight_hh": HH}}, ValueError, r"x: .*batch, 3 \* H\].*or pass weight_ih"),
        ({"x": X.double()}, ValueError, r"x: given torch.float64.*expected torch.float32"),
        ({"weights": [HH]}, TypeError, "weights: given list .*a dictionary of arrays by name"),
        ({"weights": {**BOTH, "w": HH}}, ValueError, "given .w., unknown; expected each name of"),
        ({"params": {"weight_hh": HH}}, ValueError, "params: given 'weight_hh', twice"),
        ({"weights": {**BOTH, "bias_hh": 0.0}}, TypeError, "bias_hh: given float 0.0"),
        ({"weights": {"weight_ih": IH}}, ValueError, "weight_hh: given nothing; expected .out, in"),
        ({"weights": {**BOTH, "weight_ih": IH[:4]}}, ValueError, r"weight_ih: .*\[3 \* H, input"),
        ({"weights": {**BOTH, "weight_hh": HH[:, :2]}}, ValueError, r"weight_hh: .*\[15, 5\]"),
        ({"weights": {**BOTH, "bias_hh": HH[0]}}, ValueError, r"bias_hh: .*expected .*\[15\]"),
        ({"weights": {**BOTH, "bias_hh": HH[:, 0].half()}}, ValueError, "bias_hh: .*float16"),
        (
            {"cell": cells.PeepholeLSTM, "weights": PEEPHOLES}, ValueError,
            r"p_i: given nothing; expected torch.float32 \[5\], which cell PeepholeLSTM learns",
        ),
        ({"state": (HH[0], HH[0])}, TypeError, r"state: given .*expected a tuple \(h\)"),
        ({"state": HH[0]}, TypeError, r"state: .*expected \[B, size\] for the state 'h'"),
        ({"state": HH[:2]}, ValueError, r"state: .*\[2, 5\]; expected .*\[3, 5\]"),
        ({"reset_state": HH[0, :2]}, ValueError, r"reset_state: .*\[5\], the state 'h'"),
        ({"static": HH[:3]}, TypeError, "static: .*declares no static input"),
        ({"masked_output": "hold"}, ValueError, "masked_output: given 'hold'"),
        ({"reverse": 2}, TypeError, "reverse: given int 2; expected True or False"),
        ({"training": None}, TypeError, "training: given None"),
        ({"seed": -1}, ValueError, "seed: given -1; expected an int from 0"),
        ({"seed": True}, TypeError, "seed: given bool"),
        ({"checkpoint": 0}, ValueError, "checkpoint: given 0"),
        ({"engine": "tpu"}, ValueError, "engine: given 'tpu'; expected None, 'cpu'"),
        ({"return_states": "c"}, ValueError, "return_states: given 'c'.*states of cell GRU: h"),
        ({"return_states": 1}, ValueError, "return_states: given 1"),
        ({"recurrent_mask": HH[:2]}, ValueError, r"recurrent_mask: .*\[3, 5\], of the state"),
        (
            {"recurrent_mask": torch.ones(2, ROWS, SIZE)}, ValueError,
            r"recurrent_mask: .*expected torch.float32 \[3, 3, 5\]",
        ),
        (
            {"cell": cells.IndRNN, "weights": INDRNN, "recurrent_mask": HH[:3]}, ValueError,
            "recurrent_mask: .*cell IndRNN.* no matmul behind",
        ),
        ({"mask": X}, ValueError, r"mask: given torch.float32 \[6, 3, 4\]; expected torch.bool"),
        ({"lengths": [9, 1, 1]}, ValueError, "lengths: given a length of 9"),
    ],
)  # fmt: skip
def test_errors(arguments: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        at.recurrence(**{"cell": cells.GRU, "x": X, "weights": BOTH, **arguments})


# -- the same options of the module ----------------------------------------------------------------
@pytest.mark.parametrize("batch_first", [False, True])
def test_the_module_returns_states(batch_first: bool) -> None:
    """Of the last layer, with its directions side by side, laid out as x; packed as x is."""
    layer = at.RNN(cells.LSTM, 3, 5, 2, bidirectional=True, batch_first=batch_first, **DOUBLE)
    x = torch.randn(STEPS, ROWS, 3, **DOUBLE)
    x = x.transpose(0, 1) if batch_first else x
    output, (_, c), states = layer(x, lengths=[6, 4, 1], return_states=True)
    assert torch.equal(states["h"], output)
    cs = states["c"].transpose(0, 1) if batch_first else states["c"]
    last = torch.stack([cs[n - 1, row, :5] for row, n in enumerate([6, 4, 1])])
    assert torch.equal(last, c[2]) and torch.equal(cs[0, :, 5:], c[3])
    packed = pack_padded_sequence(x, [6, 4, 1], batch_first=batch_first)
    *_, ours = layer(packed, return_states=("c",))
    assert torch.equal(pad_packed_sequence(ours["c"], batch_first=batch_first)[0], states["c"])
    if not batch_first:
        alone = layer(x[:, 0], return_states="c")[2]["c"]
        assert_same([alone], [states["c"][:, 0]], "forward")
