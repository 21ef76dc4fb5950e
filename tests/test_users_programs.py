"""Programs of users, in short: what projects with recurrent code of their own keep (their
parameters, their layouts, their loops), and the call that takes the place of the loop.

Each is held against its own loop over the steps, in float64: results and gradients.
"""

from collections.abc import Callable
from typing import Any

import torch
from tolerances import assert_close
from torch import Tensor, nn
from torch.nn.functional import linear, softplus
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch_layers import tensors_of, weighted

import anycell.torch as at
from anycell import cell, cells, sigmoid, tanh

STEPS, ROWS, INPUTS, UNITS = 9, 4, 3, 6
F64: dict[str, Any] = {"dtype": torch.float64}


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, **F64)


def own(*shape: int) -> nn.Parameter:
    """A parameter of the user's."""
    return nn.Parameter(randn(*shape) * 0.4)


def assert_same(ours: Callable[[], Any], loop: Callable[[], Any], learned: list[Tensor]) -> None:
    """Results, and gradients of what is learned."""
    solved = []
    for program in (ours, loop):
        results = tensors_of(program())
        solved.append((results, torch.autograd.grad(weighted(results), learned)))
    for kind, found, right in zip(("forward", "gradient"), *solved, strict=True):
        for a, b in zip(found, right, strict=True):
            assert_close(a.detach().numpy(), b.detach().numpy(), "float64", kind)


def lstm_step(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def test_parameters_of_the_users_own() -> None:
    """A cell of one's own in a module whose ``state_dict`` others load: one matrix, one bias."""

    @cell(gates="f g", state="h", params="decay")
    def Leaky(x: Any, r: Any, s: Any, p: Any) -> Any:
        keep = sigmoid(x.f + r.f) * p.decay
        return keep * s.h + (1.0 - keep) * tanh(x.g + r.g)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W, self.b, self.tau = own(2 * UNITS, INPUTS + UNITS), own(2 * UNITS), own(UNITS)

        def forward(self, x: Tensor) -> Tensor:
            w_x, w_h = self.W.split([INPUTS, UNITS], dim=1)
            weights = {"weight_ih": w_x, "weight_hh": w_h, "bias_ih": self.b}
            weights["decay"] = torch.exp(-softplus(self.tau))
            return at.recurrence(Leaky, x, weights)[0]

        def loop(self, x: Tensor) -> Tensor:
            h, outputs = x.new_zeros(x.shape[1], UNITS), []
            for step in x:
                f, g = linear(torch.cat([step, h], 1), self.W, self.b).chunk(2, 1)
                keep = torch.sigmoid(f) * torch.exp(-softplus(self.tau))
                h = keep * h + (1 - keep) * torch.tanh(g)
                outputs.append(h)
            return torch.stack(outputs)

    model, x = Model(), randn(STEPS, ROWS, INPUTS)
    assert list(model.state_dict()) == ["W", "b", "tau"]
    assert_same(lambda: model(x), lambda: model.loop(x), list(model.parameters()))


def test_weights_laid_out_as_keras_has_them() -> None:
    """Transposed, one bias; turning them is a view, and gradients go to the user's tensors."""
    kernel, recurrent, bias = own(INPUTS, 4 * UNITS), own(UNITS, 4 * UNITS), own(4 * UNITS)
    x = randn(STEPS, ROWS, INPUTS)

    def ours() -> Any:
        weights = {"weight_ih": kernel.T, "weight_hh": recurrent.T, "bias_ih": bias}
        return at.recurrence(cells.LSTM, x, weights)

    def loop() -> Any:
        h = c = x.new_zeros(ROWS, UNITS)
        outputs = []
        for step in x:
            h, c = lstm_step(step @ kernel + h @ recurrent + bias, c)
            outputs.append(h)
        return torch.stack(outputs), (h, c)

    assert_same(ours, loop, [kernel, recurrent, bias])


def test_c_of_every_step() -> None:
    """Hydrology: storages are read out of c of each day, and a loss on them (mass balance)."""
    x, layer = randn(STEPS, ROWS, INPUTS), nn.LSTM(INPUTS, UNITS, **F64)
    head = nn.Linear(UNITS, 1, **F64)

    def ours() -> Any:
        weights = {n.removesuffix("_l0"): p for n, p in layer.named_parameters()}
        output, _, states = at.recurrence(cells.LSTM, x, weights, return_states="c")
        return head(output), states["c"].sum(-1).diff(dim=0)

    def loop() -> Any:
        state, outputs, storages = None, [], []
        for step in x.split(1):
            output, state = layer(step, state)
            outputs.append(output)
            storages.append(state[1])
        return head(torch.cat(outputs)), torch.cat(storages).sum(-1).diff(dim=0)

    assert_same(ours, loop, [*layer.parameters(), *head.parameters()])
    # And from the module.
    module = at.RNN(cells.LSTM, INPUTS, UNITS, **F64)
    module.load_state_dict(layer.state_dict())
    _, _, states = module(x, return_states="c")
    assert_close(
        states["c"].sum(-1).diff(dim=0).detach().numpy(), loop()[1].detach().numpy(),
        "float64", "forward",
    )  # fmt: skip


def test_dones_of_a_rollout() -> None:
    """PPO: ``dones`` are floats, and say that the observation of that step begins an episode."""
    observations, dones = randn(STEPS, ROWS, INPUTS), torch.rand(STEPS, ROWS).round()
    policy, start = at.LSTM(INPUTS, UNITS, **F64), (randn(1, ROWS, UNITS), randn(1, ROWS, UNITS))

    def loop() -> Any:  # as CleanRL has it
        state, outputs = start, []
        for observation, done in zip(observations, dones, strict=True):
            alive = (1.0 - done).view(1, -1, 1).double()
            output, state = nn.LSTM.forward(
                policy, observation.unsqueeze(0), (alive * state[0], alive * state[1])
            )
            outputs.append(output)
        return torch.cat(outputs), state

    learned = list(policy.parameters())
    assert_same(lambda: policy(observations, start, resets=dones), loop, learned)
    weights = {n.removesuffix("_l0"): p for n, p in policy.named_parameters()}
    state = [s[0] for s in start]
    output, _ = at.recurrence(cells.LSTM, observations, weights, state, resets=dones.long())
    assert torch.equal(output, policy(observations, start, resets=dones.bool())[0])


def test_gates_from_an_embedding() -> None:
    """Words: the projection of a word is a row of a table, looked up and never multiplied."""
    table, recurrent = nn.Embedding(11, 3 * UNITS, **F64), own(3 * UNITS, UNITS)
    words = torch.randint(11, (STEPS, ROWS))

    def ours() -> Any:
        return at.recurrence(cells.GRU, None, {"weight_hh": recurrent}, gates=table(words))

    def loop() -> Any:
        h, outputs = recurrent.new_zeros(ROWS, UNITS), []
        for word in words:
            (a, b, c), (r, z, n) = table(word).chunk(3, -1), linear(h, recurrent).chunk(3, -1)
            z = torch.sigmoid(b + z)
            h = (1 - z) * torch.tanh(c + torch.sigmoid(a + r) * n) + z * h
            outputs.append(h)
        return torch.stack(outputs), (h,)

    assert_same(ours, loop, [table.weight, recurrent])


def test_variational_dropout() -> None:
    """Gal and Ghahramani: one mask on the recurrent connections per sequence, one for each gate."""
    layer, x = nn.LSTM(INPUTS, UNITS, **F64), randn(STEPS, ROWS, INPUTS)
    mask = torch.bernoulli(torch.full((4, ROWS, UNITS), 0.7, **F64)) / 0.7

    def ours() -> Any:
        weights = {n.removesuffix("_l0"): p for n, p in layer.named_parameters()}
        return at.recurrence(cells.LSTM, x, weights, recurrent_mask=mask)

    def loop() -> Any:
        h = c = x.new_zeros(ROWS, UNITS)
        outputs = []
        for step in x:
            gates = linear(step, layer.weight_ih_l0, layer.bias_ih_l0) + layer.bias_hh_l0
            blocks = zip(mask, layer.weight_hh_l0.chunk(4), strict=True)
            h, c = lstm_step(gates + torch.cat([linear(h * m, w) for m, w in blocks], -1), c)
            outputs.append(h)
        return torch.stack(outputs), (h, c)

    assert_same(ours, loop, list(layer.parameters()))
    module = at.RNN(cells.LSTM, INPUTS, UNITS, **F64)
    module.load_state_dict(layer.state_dict())
    assert torch.equal(module(x, recurrent_mask=mask)[0], ours()[0])


def test_static_inputs_through_a_layer_of_ones_own() -> None:
    """EA-LSTM: catchment attributes make the input gate, by parameters that the user has."""
    attributes, embed, x = randn(ROWS, 5), nn.Linear(5, UNITS, **F64), randn(STEPS, ROWS, INPUTS)
    w_ih, w_hh, bias = own(3 * UNITS, INPUTS), own(3 * UNITS, UNITS), own(3 * UNITS)

    def ours() -> Any:
        weights = {"weight_ih": w_ih, "weight_hh": w_hh, "bias_ih": bias}
        return at.recurrence(cells.EALSTM, x, weights, static=embed(attributes), return_states=True)

    def loop() -> Any:
        h, hs, cs = x.new_zeros(ROWS, UNITS), [], []
        c, i = h, torch.sigmoid(embed(attributes))
        for step in x:
            f, g, o = (linear(step, w_ih, bias) + linear(h, w_hh)).chunk(3, -1)
            c = torch.sigmoid(f) * c + i * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            hs.append(h)
            cs.append(c)
        return torch.stack(hs), (h, c), {"h": torch.stack(hs), "c": torch.stack(cs)}

    assert_same(ours, loop, [w_ih, w_hh, bias, *embed.parameters()])


def test_weights_that_another_network_makes() -> None:
    """A hypernetwork: the weights are no leaves, and gradients go on through them."""
    hyper, task, x = nn.Linear(2, 15 * UNITS, **F64), randn(2), randn(STEPS, ROWS, INPUTS)

    def made() -> tuple[Tensor, Tensor]:
        flat = hyper(task).view(UNITS, 15)
        return flat[:, :INPUTS], flat[:, INPUTS : INPUTS + UNITS] / 2

    def ours() -> Any:
        return at.recurrence(
            cells.RNN, x, dict(zip(("weight_ih", "weight_hh"), made(), strict=True))
        )

    def loop() -> Any:
        h, outputs = x.new_zeros(ROWS, UNITS), []
        for step in x:
            h = torch.tanh(linear(step, made()[0]) + linear(h, made()[1]))
            outputs.append(h)
        return torch.stack(outputs), (h,)

    assert_same(ours, loop, list(hyper.parameters()))


def test_a_gradient_step_inside_the_graph() -> None:
    """MAML: weights after a step of the inner loop, and second derivatives through it."""
    layer, head = nn.GRU(INPUTS, UNITS, **F64), own(UNITS)
    support, query = randn(STEPS, ROWS, INPUTS), randn(STEPS, ROWS, INPUTS)

    def program(run: Callable[[Tensor, dict[str, Tensor]], Tensor]) -> Tensor:
        weights = {n.removesuffix("_l0"): p for n, p in layer.named_parameters()}
        inner = (run(support, weights) @ head).square().mean()
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {n: w - 0.5 * g for (n, w), g in zip(weights.items(), slopes, strict=True)}
        return (run(query, fast) @ head).square()

    def ours() -> Tensor:
        return program(lambda x, weights: at.recurrence(cells.GRU, x, weights)[0])

    def loop() -> Tensor:
        def run(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
            named = {f"{n}_l0": w for n, w in weights.items()}
            return torch.func.functional_call(layer, named, (x,))[0]

        return program(run)

    assert_same(ours, loop, [*layer.parameters(), head])


def test_both_directions_of_packed_words() -> None:
    """A tagger: sentences of several lengths, packed, one call for each direction."""
    lengths, x = [4, STEPS, 1, 6], randn(STEPS, ROWS, INPUTS)
    layer = nn.LSTM(INPUTS, UNITS, bidirectional=True, **F64)
    packed = pack_padded_sequence(x, lengths, enforce_sorted=False)

    def ours() -> Any:
        outputs, finals = [], []
        for end in ("", "_reverse"):
            weights = {name: getattr(layer, f"{name}_l0{end}") for name in cells.LSTM.learned}
            output, final = at.recurrence(cells.LSTM, packed, weights, reverse=bool(end))
            outputs.append(pad_packed_sequence(output)[0])
            finals.append(final)
        return torch.cat(outputs, -1), [torch.stack(parts) for parts in zip(*finals, strict=True)]

    def loop() -> Any:
        output, final = layer(packed)
        return pad_packed_sequence(output)[0], final

    assert_same(ours, loop, list(layer.parameters()))


def test_truncated_backpropagation() -> None:
    """Long series in chunks: the state goes on, its gradient does not; masks for missing days."""
    weights = {
        "weight_ih": own(4 * UNITS, INPUTS), "weight_hh": own(4 * UNITS, UNITS),
        "bias_hh": own(4 * UNITS), "p_i": own(UNITS), "p_f": own(UNITS), "p_o": own(UNITS),
    }  # fmt: skip
    x, there = randn(STEPS, ROWS, INPUTS), torch.rand(STEPS, ROWS) < 0.7
    x = torch.where(there[..., None], x, torch.nan)

    def ours() -> Any:
        state, outputs = None, []
        for part in (slice(0, 5), slice(5, STEPS)):
            output, state = at.recurrence(
                cells.PeepholeLSTM, x[part], weights, state, mask=there[part],
                masked_output="repeat",
            )  # fmt: skip
            state = tuple(s.detach() for s in state)
            outputs.append(output)
        return outputs

    def loop() -> Any:
        p_i, p_f, p_o = (weights[name] for name in ("p_i", "p_f", "p_o"))
        h = c = x.new_zeros(ROWS, UNITS)
        outputs: list[Tensor] = []
        for t, (step, now) in enumerate(zip(x.nan_to_num(), there, strict=True)):
            if t == 5:
                h, c = h.detach(), c.detach()
            gates = linear(step, weights["weight_ih"]) + linear(h, weights["weight_hh"])
            i, f, g, o = (gates + weights["bias_hh"]).chunk(4, -1)
            new = torch.sigmoid(f + p_f * c) * c + torch.sigmoid(i + p_i * c) * torch.tanh(g)
            out = torch.sigmoid(o + p_o * new) * torch.tanh(new)
            h, c = torch.where(now[:, None], out, h), torch.where(now[:, None], new, c)
            outputs.append(h)
        return [torch.stack(outputs[:5]), torch.stack(outputs[5:])]

    assert_same(ours, loop, list(weights.values()))
