"""Recurrent steps as people write them in PyTorch, for ``tests/read/test_torch.py``.

Each function draws the numbers of a module and returns ``(module, x, state)``. The module is called
as ``module(x[t], state)``, and returns the new state, or a pair of the step's output and the new
state. ``x`` is a tree of arrays whose first axis is time. Or ``cell`` enters a class of modules.

One file, because it is a list of cells, each of which is read by itself.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from corpus import BATCH, HIDDEN, INPUT, STEPS, Corpus, Numbers, cell
from torch import nn

B, T, I, H = BATCH, STEPS, INPUT, HIDDEN
corpus = Corpus()
reads, either, refused = corpus.reads, corpus.either, corpus.refused


def tensor(array: Any) -> torch.Tensor:
    return torch.as_tensor(array)


def drawn(module: nn.Module, n: Numbers) -> nn.Module:
    """The module in float64, with its parameters drawn anew."""
    module = module.double()
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(tensor(n(*weight.shape)))
    return module


def simple(n: Numbers, module: nn.Module) -> Any:
    """A module of one state, with vectors for x."""
    return drawn(module, n), tensor(n(T, B, I)), tensor(n(B, H))


def paired(n: Numbers, module: nn.Module) -> Any:
    """A module of two states, with vectors for x."""
    return drawn(module, n), tensor(n(T, B, I)), (tensor(n(B, H)), tensor(n(B, H)))


# -- LSTMs --------------------------------------------------------------------------------------
@reads
def lstm_of_the_library(n: Numbers) -> Any:
    return paired(n, nn.LSTMCell(I, H))


@cell(reads, paired, I, H)
class lstm_chunks(nn.Module):
    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.i2h = nn.Linear(input_size, 4 * hidden_size)
        self.h2h = nn.Linear(hidden_size, 4 * hidden_size)

    def forward(self, x: Any, state: Any) -> Any:
        hx, cx = state
        gates = self.i2h(x) + self.h2h(hx)
        ingate, forgetgate, cellgate, outgate = gates.chunk(4, 1)
        cy = torch.sigmoid(forgetgate) * cx + torch.sigmoid(ingate) * torch.tanh(cellgate)
        hy = torch.sigmoid(outgate) * torch.tanh(cy)
        return hy, (hy, cy)


@cell(reads, paired)
class lstm_gate_layers(nn.Module):
    """A layer for each gate, on [h, x], and a prediction of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.forget, self.input, self.candidate, self.output = (
            nn.Linear(H + I, H) for _ in range(4)
        )
        self.head = nn.Linear(H, 2)

    def forward(self, x: Any, state: Any) -> Any:
        h, c = state
        combined = torch.cat((h, x), dim=1)
        f = self.forget(combined).sigmoid()
        i = self.input(combined).sigmoid()
        g = self.candidate(combined).tanh()
        o = self.output(combined).sigmoid()
        c = f * c + i * g
        h = o * c.tanh()
        return F.log_softmax(self.head(h), dim=-1), (h, c)


@cell(reads, paired)
class lstm_in_place(nn.Module):
    """Slices of one product, and results that are changed or written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.empty(I, 4 * H))
        self.U = nn.Parameter(torch.empty(H, 4 * H))
        self.bias = nn.Parameter(torch.empty(4 * H))

    def forward(self, x_t: Any, state: Any) -> Any:
        h_t, c_t = state
        gates = x_t @ self.W
        gates += h_t @ self.U
        gates.add_(self.bias)
        i_t, f_t = gates[:, :H].sigmoid(), gates[:, H : H * 2].sigmoid()
        g_t, o_t = gates[:, H * 2 : H * 3].tanh(), gates[:, H * 3 :].sigmoid()
        both = torch.zeros(x_t.shape[0], 2 * H, dtype=x_t.dtype)
        c_t = f_t * c_t
        c_t += i_t * g_t
        both[:, :H] = o_t * torch.tanh(c_t)
        both[:, H:] = c_t
        return both[:, :H], both[:, H:]


class LSTMState(NamedTuple):
    hx: torch.Tensor
    cx: torch.Tensor


@reads
def lstm_layer_norm(n: Numbers) -> Any:
    """Layers of norm around the products, and of the cell; a named tuple of states."""

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight_ih = nn.Parameter(torch.empty(4 * H, I))
            self.weight_hh = nn.Parameter(torch.empty(4 * H, H))
            self.ln_i, self.ln_h, self.ln_c = (nn.LayerNorm(k) for k in (4 * H, 4 * H, H))

        def forward(self, x: Any, state: LSTMState) -> Any:
            hx, cx = state
            igates = self.ln_i(torch.mm(x, self.weight_ih.t()))
            hgates = self.ln_h(torch.mm(hx, self.weight_hh.t()))
            i, f, g, o = (igates + hgates).chunk(4, 1)
            cy = self.ln_c(f.sigmoid() * cx + i.sigmoid() * g.tanh())
            hy = o.sigmoid() * cy.tanh()
            return hy, LSTMState(hy, cy)

    module, x, state = paired(n, Cell())
    return module, x, LSTMState(*state)


@reads
def lstm_peepholes(n: Numbers) -> Any:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(I + H, 4 * H, bias=False)
            self.bias = nn.Parameter(torch.empty(4, H))
            self.w_ci, self.w_cf, self.w_co = (nn.Parameter(torch.empty(1, H)) for _ in range(3))

        def forward(self, x: Any, state: Any) -> Any:
            c, h = state["c"], state["h"]
            pre = self.fc(torch.cat([x, h], -1)).view(-1, 4, H) + self.bias
            i, f, g, o = pre.unbind(dim=1)
            i = torch.sigmoid(torch.addcmul(i, self.w_ci, c))
            f = torch.sigmoid(torch.addcmul(f, self.w_cf, c))
            c = torch.addcmul(f * c, i, g.tanh())
            o = torch.sigmoid(o + self.w_co * c)
            h = o * torch.tanh(c)
            return h, {"c": c, "h": h}

    module, x, (c, h) = paired(n, Cell())
    return module, x, {"c": c, "h": h}


@reads
def lstm_projected(n: Numbers) -> Any:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x, self.r = nn.Linear(I, 4 * H), nn.Linear(3, 4 * H, bias=False)
            self.proj = nn.Linear(H, 3, bias=False)

        def forward(self, x: Any, state: Any) -> Any:
            r, c = state
            f, i, o, g = torch.split(self.x(x) + self.r(r), H, dim=-1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            r = self.proj(torch.sigmoid(o) * torch.tanh(c))
            return r, (r, c)

    return drawn(Cell(), n), tensor(n(T, B, I)), (tensor(n(B, 3)), tensor(n(B, H)))


@cell(reads, paired)
class lstm_coupled_gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(I + H, 3 * H)

    def forward(self, x: Any, state: Any) -> Any:
        h, c = state
        f, o, g = self.lin(torch.hstack([x, h])).tensor_split(3, dim=1)
        c = torch.lerp(g.tanh(), c, torch.sigmoid(f + 1))
        return torch.sigmoid(o) * c.tanh(), c


@reads
def lstm_time_aware(n: Numbers) -> Any:
    class TimeLSTM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W_all = nn.Linear(H, 4 * H)
            self.U_all = nn.Linear(I, 4 * H)
            self.W_d = nn.Linear(H, H)

        def forward(self, inputs: Any, state: Any) -> Any:
            x, timestamp = inputs
            h, c = state
            c_s1 = torch.tanh(self.W_d(c))
            c_s2 = c_s1 * timestamp.unsqueeze(-1).expand_as(c_s1)
            c_adj = c - c_s1 + c_s2
            f, i, o, c_tmp = torch.chunk(self.W_all(h) + self.U_all(x), 4, 1)
            c = torch.sigmoid(f) * c_adj + torch.sigmoid(i) * torch.sigmoid(c_tmp)
            h = torch.sigmoid(o) * torch.tanh(c)
            return h, (h, c)

    module, x, state = paired(n, TimeLSTM())
    return module, (x, tensor(n.positive(T, B))), state


@reads
def lstm_phased(n: Numbers) -> Any:
    class PhasedLSTM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(I, H)
            self.tau, self.phase = nn.Parameter(torch.empty(H)), nn.Parameter(torch.empty(H))
            self.ratio_on, self.leak = 0.4, 0.001

        def forward(self, inputs: Any, state: Any) -> Any:
            x, t = inputs
            h, c = state
            tau = self.tau.exp() + 1
            phi = torch.fmod(t - self.phase.abs(), tau).abs() / tau
            k_up, k_down = 2 * phi / self.ratio_on, 2 - 2 * phi / self.ratio_on
            k = torch.where(phi < self.ratio_on, k_down, self.leak * phi)
            k = torch.where(phi < 0.5 * self.ratio_on, k_up, k)
            h_new, c_new = self.cell(x, (h, c))
            return k * h_new + (1 - k) * h, k * c_new + (1 - k) * c

    module, x, state = paired(n, PhasedLSTM())
    return module, (x, tensor(n.positive(T, B, 1).cumsum(0) + 3)), state


@reads
def lstm_stacked(n: Numbers) -> Any:
    """Two cells of the library in one step, a residual connection, a list of states."""

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp = nn.Linear(I, H)
            self.layers = nn.ModuleList([nn.LSTMCell(H, H) for _ in range(2)])

        def forward(self, x: Any, state: Any) -> Any:
            x, new_state = torch.relu(self.inp(x)), []
            for layer, (h, c) in zip(self.layers, state, strict=True):
                h, c = layer(x, (h, c))
                new_state.append((h, c))
                x = x + h
            return x, new_state

    state = [(tensor(n(B, H)), tensor(n(B, H))) for _ in range(2)]
    return drawn(Stack(), n), tensor(n(T, B, I)), state


@cell(reads, paired)
class lstm_multiplicative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wmx, self.wmh = nn.Linear(I, H, bias=False), nn.Linear(H, H, bias=False)
        self.wx, self.wh = nn.Linear(I, 4 * H, bias=False), nn.Linear(H, 4 * H)

    def forward(self, x: Any, state: Any) -> Any:
        h, c = state
        m = self.wmx(x) * self.wmh(h)
        i, f, o, u = torch.chunk(self.wx(x) + self.wh(m), 4, dim=-1)
        c = f.sigmoid() * c + i.sigmoid() * u.tanh()
        return o.sigmoid() * c.tanh(), c


@reads
def slstm_heads(n: Numbers) -> Any:
    """sLSTM with a block for each head by ``bmm``, exponential gates and a stabiliser."""
    heads, size = 3, H // 3

    class SLSTMCell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(I, 4 * H)
            self.r = nn.Parameter(torch.empty(heads, size, 4 * size))

        def forward(self, x: Any, state: Any) -> Any:
            h, c, norm, m = state
            ry = torch.bmm(h.view(-1, heads, size).transpose(0, 1), self.r).transpose(0, 1)
            ry = ry.reshape(-1, heads, 4, size).transpose(1, 2).reshape(-1, 4 * H)
            i, f, z, o = torch.chunk(self.w(x) + ry, 4, dim=-1)
            logf_plus_m = m + F.logsigmoid(f)
            m_new = torch.max(i, logf_plus_m)
            i, f = torch.exp(i - m_new), torch.exp(logf_plus_m - m_new)
            c = f * c + i * torch.tanh(z)
            norm = f * norm + i
            h = torch.sigmoid(o) * (c / norm)
            return h, (h, c, norm, m_new)

    state = (tensor(n(B, H)), tensor(n(B, H)), tensor(n.positive(B, H)), tensor(n(B, H)))
    return drawn(SLSTMCell(), n), tensor(n(T, B, I)), state


@cell(reads, paired)
class nas_cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(I, 8 * H), nn.Linear(H, 8 * H, bias=False)

    def forward(self, x: Any, state: Any) -> Any:
        h, c = state
        a, u = self.h(h).chunk(8, 1), self.x(x).chunk(8, 1)
        s, t, r = torch.sigmoid, torch.tanh, F.relu
        l1 = [s(u[0] + a[0]), r(u[1] + a[1]), s(u[2] + a[2]), r(u[3] * a[3])]
        l1 += [t(u[4] + a[4]), s(u[5] + a[5]), t(u[6] + a[6]), s(u[7] + a[7])]
        l2 = [t(t(l1[0] * l1[1]) + c), t(l1[2] + l1[3]), t(l1[4] * l1[5]), s(l1[6] + l1[7])]
        c = l2[0] * l2[1]
        return t(c * t(l2[2] + l2[3])), c


# -- GRUs ---------------------------------------------------------------------------------------
@reads
def gru_of_the_library(n: Numbers) -> Any:
    return simple(n, nn.GRUCell(I, H))


@cell(reads, simple)
class gru_equations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for gate in "zrh":
            setattr(self, f"W_{gate}", nn.Linear(I, H))
            setattr(self, f"U_{gate}", nn.Linear(H, H, bias=False))

    def forward(self, x: Any, h: Any) -> Any:
        z = torch.sigmoid(self.W_z(x) + self.U_z(h))
        r = torch.sigmoid(self.W_r(x) + self.U_r(h))
        h_tilde = torch.tanh(self.W_h(x) + self.U_h(r * h))
        return (1 - z) * h + z * h_tilde


@cell(reads, simple)
class gru_functional(nn.Module):
    """Two products with biases, the reset gate behind the second, by ``F.linear``."""

    def __init__(self) -> None:
        super().__init__()
        self.w_ih = nn.Parameter(torch.empty(3 * H, I))
        self.w_hh = nn.Parameter(torch.empty(3 * H, H))
        self.b_ih, self.b_hh = (nn.Parameter(torch.empty(3 * H)) for _ in range(2))

    def forward(self, x: Any, hidden: Any) -> Any:
        gi = F.linear(x, self.w_ih, self.b_ih)
        gh = torch.addmm(self.b_hh, hidden, self.w_hh.T)
        i_r, i_i, i_n = gi.chunk(3, 1)
        h_r, h_i, h_n = gh.chunk(3, 1)
        resetgate = torch.sigmoid(i_r + h_r)
        inputgate = torch.sigmoid(i_i + h_i)
        newgate = torch.tanh(i_n + resetgate * h_n)
        return newgate + inputgate * (hidden - newgate)


@cell(reads, simple)
class gru_norm_as_in_world_models(nn.Module):
    """One layer on [h, x], a layer norm, a bias of -1 on the update gate."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(I + H, 3 * H, bias=False)
        self.norm = nn.LayerNorm(3 * H, eps=1e-3)

    def forward(self, inputs: Any, state: Any) -> Any:
        parts = self.norm(self.layer(torch.cat([state, inputs], -1)))
        reset, cand, update = torch.split(parts, [H] * 3, -1)
        reset = torch.sigmoid(reset)
        cand = torch.tanh(reset * cand)
        update = torch.sigmoid(update - 1)
        output = update * cand + (1 - update) * state
        return output, output


@reads
def gru_resets(n: Numbers) -> Any:
    """The recurrent part of an actor: a mask of 0 clears the state before the step."""

    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(I, 7), nn.ELU())
            self.rnn = nn.GRUCell(7, H)
            self.pi, self.v = nn.Linear(H, 3), nn.Linear(H, 1)

        def forward(self, inputs: Any, h: Any) -> Any:
            obs, mask = inputs
            h = self.rnn(self.encoder(obs), h * mask.unsqueeze(1))
            return (self.pi(h), self.v(h).squeeze(-1)), h

    module, x, h = simple(n, Memory())
    return module, (x, tensor(n.flags(T, B, likely=0.7).astype(float))), h


@reads
def gru_done_where(n: Numbers) -> Any:
    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start = nn.Parameter(torch.empty(H))
            self.rnn = nn.GRUCell(I, H, bias=False)

        def forward(self, inputs: Any, h: Any) -> Any:
            x, done = inputs
            h = torch.where(done[:, None], self.start, h)
            return self.rnn(x, h)

    module, x, h = simple(n, Memory())
    return module, (x, tensor(n.flags(T, B))), h


@reads
def gru_masked(n: Numbers) -> Any:
    """A padded step keeps its state; ``masked_fill`` clears its output."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(I, H)

        def forward(self, inputs: Any, h: Any) -> Any:
            x, valid = inputs
            new = self.cell(x, h)
            valid = valid.unsqueeze(-1)
            return new.masked_fill(~valid, 0.0), torch.where(valid, new, h)

    module, x, h = simple(n, Masked())
    return module, (x, tensor(n.flags(T, B, likely=0.6))), h


@reads
def gru_d(n: Numbers) -> Any:
    class GRUDCell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w_dg_x, self.b_dg_x = nn.Parameter(torch.empty(I)), nn.Parameter(torch.empty(I))
            self.dg_h = nn.Linear(I, H)
            self.w_x, self.w_h = nn.Linear(I, 3 * H), nn.Linear(H, 3 * H, bias=False)
            self.w_m = nn.Linear(I, 3 * H, bias=False)
            self.register_buffer("x_mean", tensor(n(I)))

        def forward(self, inputs: Any, state: Any) -> Any:
            x, mask, delta = inputs
            h, last = state
            gamma_x = torch.exp(-F.relu(self.w_dg_x * delta + self.b_dg_x))
            gamma_h = torch.exp(-torch.clamp(self.dg_h(delta), min=0))
            last = torch.where(mask > 0, x, last)
            x = mask * x + (1 - mask) * (gamma_x * last + (1 - gamma_x) * self.x_mean)
            h = gamma_h * h
            xz, xr, xn = (self.w_x(x) + self.w_m(mask)).chunk(3, -1)
            hz, hr, hn = self.w_h(h).chunk(3, -1)
            z, r = torch.sigmoid(xz + hz), torch.sigmoid(xr + hr)
            h = (1 - z) * h + z * torch.tanh(xn + r * hn)
            return h, (h, last)

    module, x, h = simple(n, GRUDCell())
    inputs = x, tensor(n.flags(T, B, I).astype(float)), tensor(n.positive(T, B, I))
    return module, inputs, (h, tensor(n(B, I)))


@cell(reads, simple)
class minimal_gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.cand = nn.Linear(I + H, H), nn.Linear(I + H, H)
        self.act = nn.Hardtanh()

    def forward(self, x: Any, h: Any) -> Any:
        f = torch.clamp(0.2 * self.gate(torch.cat([x, h], 1)) + 0.5, 0, 1)
        g = self.act(self.cand(torch.cat([x, f * h], 1)))
        return h + f * (g - h)


# -- Simple and continuous-time networks --------------------------------------------------------
@reads
def rnn_of_the_library(n: Numbers) -> Any:
    return simple(n, nn.RNNCell(I, H, nonlinearity="relu"))


@cell(reads, simple)
class names_classifier(nn.Module):
    """The network of the tutorial: i2h and i2o on [input, hidden]."""

    def __init__(self) -> None:
        super().__init__()
        self.i2h, self.h2h, self.h2o = nn.Linear(I, H), nn.Linear(H, H), nn.Linear(H, 3)
        self.softmax = nn.LogSoftmax(dim=1)

    def forward(self, x: Any, hidden: Any) -> Any:
        hidden = F.tanh(self.i2h(x) + self.h2h(hidden))
        return self.softmax(self.h2o(hidden)), hidden


@cell(reads, simple)
class jordan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(I + H, 7), nn.Tanh())
        self.out = nn.Linear(7, H)

    def forward(self, x: Any, y: Any) -> Any:
        y = self.out(self.hidden(torch.cat([x, y], -1)))
        return y, y


@reads
def echo_state(n: Numbers) -> Any:
    class Reservoir(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w_in", tensor(n(H, I)))
            self.register_buffer("w", tensor(n(H, H, scale=0.2)))
            self.readout = nn.Linear(H + I, 2)

        def forward(self, u: Any, s: Any) -> Any:
            s = 0.7 * s + 0.3 * torch.tanh(u @ self.w_in.T + s.matmul(self.w.T))
            return self.readout(torch.cat([s, u], -1)), s

    return simple(n, Reservoir())


@reads
def clockwork(n: Numbers) -> Any:
    class Clockwork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wx, self.wh = nn.Linear(I, H), nn.Parameter(torch.empty(H, H))
            periods = torch.tensor([1, 2, 4]).repeat_interleave(H // 3)
            self.register_buffer("periods", periods)
            self.register_buffer("mask", (periods[:, None] <= periods[None]).double())

        def forward(self, x: Any, state: Any) -> Any:
            t, h = state
            new = torch.tanh(self.wx(x) + F.linear(h, self.wh * self.mask))
            h = torch.where(t % self.periods == 0, new, h)
            return h, (t + 1, h)

    module, x, h = simple(n, Clockwork())
    return module, x, (torch.tensor(0), h)


@cell(reads, simple)
class ct_rnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input2h, self.h2h = nn.Linear(I, H), nn.Linear(H, H)
        self.readout = nn.Linear(H, 2)
        self.alpha = 20 / 100

    def forward(self, x: Any, hidden: Any) -> Any:
        for _ in range(3):
            h_new = torch.relu(self.input2h(x) + self.h2h(hidden))
            hidden = hidden * (1 - self.alpha) + h_new * self.alpha
        return self.readout(hidden), hidden


@reads
def liquid_closed_form(n: Numbers) -> Any:
    """CfC: two heads mixed by a gate of time."""

    class CfC(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Linear(I + H, 7), nn.SiLU(), nn.Linear(7, 7), nn.SiLU()
            )
            self.ff1, self.ff2 = nn.Linear(7, H), nn.Linear(7, H)
            self.time_a, self.time_b = nn.Linear(7, H), nn.Linear(7, H)

        def forward(self, inputs: Any, hx: Any) -> Any:
            x, ts = inputs
            z = self.backbone(torch.cat([x, hx], 1))
            ff1, ff2 = torch.tanh(self.ff1(z)), torch.tanh(self.ff2(z))
            t_interp = torch.sigmoid(self.time_a(z) * ts.view(-1, 1) + self.time_b(z))
            h = ff1 * (1.0 - t_interp) + t_interp * ff2
            return h, h

    module, x, h = simple(n, CfC())
    return module, (x, tensor(n.positive(T, B))), h


@cell(reads, simple)
class recurrent_highway(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin_x = nn.Linear(I, 2 * H, bias=False)
        self.lin_s = nn.ModuleList([nn.Linear(H, 2 * H) for _ in range(3)])

    def forward(self, x: Any, s: Any) -> Any:
        for depth, lin in enumerate(self.lin_s):
            both = lin(s) + self.lin_x(x) if depth == 0 else lin(s)
            h, t = both[..., :H], both[..., H:]
            h, t = torch.tanh(h), torch.sigmoid(t)
            s = h * t + s * (1.0 - t)
        return s


@cell(reads, simple)
class weight_norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.utils.parametrizations.weight_norm(nn.Linear(I, H))
        self.h = nn.utils.parametrizations.weight_norm(nn.Linear(H, H, bias=False), dim=1)

    def forward(self, x: Any, h: Any) -> Any:
        return torch.tanh(self.x(x) + self.h(h))


@cell(reads, simple)
class orthogonal(nn.Module):
    """A recurrent matrix that is the exponential of a skew one, and modReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.x = nn.Parameter(torch.empty(H, H)), nn.Linear(I, H, bias=False)
        self.b = nn.Parameter(torch.empty(H))

    def forward(self, x: Any, h: Any) -> Any:
        a = self.a.triu(diagonal=1)
        z = self.x(x) + h @ torch.matrix_exp(a - a.t())
        return torch.sign(z) * F.relu(z.abs() + self.b)


@cell(reads, paired)
class oscillators(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.i2h = nn.Linear(I + 2 * H, H)
        self.dt, self.gamma, self.epsilon = 0.04, 2.7, 4.7

    def forward(self, x: Any, state: Any) -> Any:
        hy, hz = state
        inner = torch.tanh(self.i2h(torch.cat((x, hz, hy), 1)))
        hz = hz + self.dt * (inner - self.gamma * hy - self.epsilon * hz)
        hy = hy + self.dt * hz
        return hy, hz


@cell(reads, simple)
class antisymmetric(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vh, self.vz = nn.Linear(I, H), nn.Linear(I, H)
        self.w = nn.Parameter(torch.empty(H, H))
        self.register_buffer("gamma_I", torch.eye(H, dtype=torch.float64) * 0.01)

    def forward(self, x: Any, h: Any) -> Any:
        hw = h @ (self.w - self.w.T - self.gamma_I)
        return h + 0.1 * torch.sigmoid(hw + self.vz(x)) * torch.tanh(hw + self.vh(x))


@cell(reads, simple)
class independent_units(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.u = nn.Linear(I, H), nn.Parameter(torch.empty(H))

    def forward(self, x: Any, h: Any) -> Any:
        return F.leaky_relu(torch.add(self.lin(x), torch.mul(h, self.u)), 0.1)


@cell(reads, simple)
class low_rank_with_scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W1, self.W2 = nn.Parameter(torch.empty(I, 2)), nn.Parameter(torch.empty(2, H))
        self.U1, self.U2 = nn.Parameter(torch.empty(H, 2)), nn.Parameter(torch.empty(2, H))
        self.bias_gate = nn.Parameter(torch.empty(1, H))
        self.bias_update = nn.Parameter(torch.empty(1, H))
        self.zeta, self.nu = nn.Parameter(torch.empty(1, 1)), nn.Parameter(torch.empty(1, 1))

    def forward(self, x: Any, state: Any) -> Any:
        w = torch.matmul(torch.matmul(x, self.W1), self.W2)
        u = torch.matmul(torch.matmul(state, self.U1), self.U2)
        pre = w + u
        z, c = torch.sigmoid(pre + self.bias_gate), torch.tanh(pre + self.bias_update)
        return z * state + (torch.sigmoid(self.zeta) * (1.0 - z) + torch.sigmoid(self.nu)) * c


# -- Networks without a recurrent matrix --------------------------------------------------------
@cell(reads, simple)
class simple_recurrent_unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(I, 4 * H))
        self.weight_c = nn.Parameter(torch.empty(2 * H))
        self.bias = nn.Parameter(torch.empty(2, H))

    def forward(self, x: Any, c: Any) -> Any:
        u = (x @ self.weight).view(-1, H, 4)
        v_f, v_r = self.weight_c.view(2, H)
        f = (u[..., 1] + v_f * c + self.bias[0]).sigmoid()
        r = (u[..., 2] + v_r * c + self.bias[1]).sigmoid()
        c = u[..., 0] + (c - u[..., 0]) * f
        return (c - u[..., 3]) * r + u[..., 3], c


@reads
def quasi_recurrent(n: Numbers) -> Any:
    class QRNN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2 * I, 3 * H)

        def forward(self, x: Any, state: Any) -> Any:
            prev, c = state
            z, f, o = self.linear(torch.cat([x, prev], -1)).chunk(3, dim=-1)
            f = f.sigmoid()
            c = f * c + (1 - f) * z.tanh()
            return o.sigmoid() * c, (x, c)

    module, x, c = simple(n, QRNN())
    return module, x, (tensor(n(B, I)), c)


@cell(reads, simple)
class min_gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_hidden_and_gate = nn.Linear(I, 2 * H, bias=False)

    def forward(self, x: Any, prev: Any) -> Any:
        hidden, gate = self.to_hidden_and_gate(x).chunk(2, dim=-1)
        hidden = torch.where(hidden >= 0, hidden + 0.5, hidden.sigmoid())
        out = torch.lerp(prev, hidden, gate.sigmoid())
        return out, out


@reads
def delay_line(n: Numbers) -> Any:
    class TappedDelay(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.rec = nn.Linear(3 * I, H), nn.Linear(H, H)

        def forward(self, x: Any, state: Any) -> Any:
            buf, h = state
            buf = torch.cat([buf[:, 1:], x.unsqueeze(1)], dim=1)
            h = torch.tanh(self.mix(buf.flatten(1)) + self.rec(h))
            return h, (buf, h)

    module, x, h = simple(n, TappedDelay())
    return module, x, (tensor(n(B, 3, I)), h)


@reads
def shifted_by_roll(n: Numbers) -> Any:
    """A queue that ``roll`` turns, and whose last slot is written by index."""

    class Queue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.mix = nn.Linear(I, 2), nn.Linear(4, H)

        def forward(self, x: Any, queue: Any) -> Any:
            queue = queue.roll(-1, dims=1)
            queue[:, -1] = self.inp(x).sum(-1)
            return self.mix(queue), queue

    return drawn(Queue(), n), tensor(n(T, B, I)), tensor(n(B, 4))


@reads
def leaky_scalar(n: Numbers) -> Any:
    """A number for each row."""

    class Integrator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.leak = nn.Parameter(torch.empty(I)), nn.Parameter(torch.empty(()))

        def forward(self, x: Any, level: Any) -> Any:
            leak = torch.sigmoid(self.leak)
            return leak * level + (1 - leak) * torch.mv(x, self.w)

    return drawn(Integrator(), n), tensor(n(T, B, I)), tensor(n(B))


# -- Dropout, shapes, integers ------------------------------------------------------------------
@reads
def dropout_masks(n: Numbers) -> Any:
    """Masks of x and h, set once before the loop."""

    class Variational(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(I, H)
            self.register_buffer("mask_x", tensor(n.flags(B, I, likely=0.7) / 0.7))
            self.register_buffer("mask_h", tensor(n.flags(B, H, likely=0.7) / 0.7))

        def forward(self, x: Any, state: Any) -> Any:
            h, c = state
            return self.cell(x * self.mask_x, (h * self.mask_h, c))

    return paired(n, Variational())


@reads
def dropout_asleep(n: Numbers) -> Any:
    """Dropout in evaluation, which does nothing."""

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.drop = nn.GRUCell(I, H), nn.Dropout(0.5)

        def forward(self, x: Any, h: Any) -> Any:
            h = self.cell(self.drop(x), h)
            return self.drop(h), h

    module, x, h = simple(n, Cell())
    return module.eval(), x, h


@cell(either, simple)
class dropout_awake(nn.Module):
    """Random numbers within a step, by the global generator, seeded before each loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.drop = nn.GRUCell(I, H), nn.Dropout(0.5)

    def forward(self, x: Any, h: Any) -> Any:
        return self.drop(self.cell(x, h))


@reads
def zoneout(n: Numbers) -> Any:
    """Draws as inputs decide which units stay."""

    class ZoneOut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(I, H)

        def forward(self, inputs: Any, state: Any) -> Any:
            x, u = inputs
            new = self.cell(x, state)
            return tuple(
                torch.where(u < 0.2, old, now) for old, now in zip(state, new, strict=True)
            )

    module, x, state = paired(n, ZoneOut())
    return module, (x, tensor(n.random.random((T, B, H)))), state


@reads
def embedding(n: Numbers) -> Any:
    class CharRNN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.gru = nn.Embedding(9, H), nn.GRUCell(H, H)
            self.decoder = nn.Linear(H, 9)
            self.decoder.weight = self.encoder.weight

        def forward(self, token: Any, h: Any) -> Any:
            h = self.gru(self.encoder(token), h)
            return self.decoder(h), h

    tokens = tensor(n.integers(T, B, below=9)).long()
    return drawn(CharRNN(), n), tokens, tensor(n(B, H))


@reads
def one_hot(n: Numbers) -> Any:
    class CharRNN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.RNNCell(7, H)

        def forward(self, char: Any, h: Any) -> Any:
            return self.cell(F.one_hot(char, 7).to(h.dtype), h)

    tokens = tensor(n.integers(T, B, below=7)).long()
    return drawn(CharRNN(), n), tokens, tensor(n(B, H))


@reads
def teacher_forcing(n: Numbers) -> Any:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = nn.GRUCell(2, H), nn.Linear(H, 2)

        def forward(self, inputs: Any, state: Any) -> Any:
            target, forced = inputs
            h, y = state
            h = self.cell(torch.where(forced, target, y), h)
            y = self.out(h)
            return y, (h, y)

    module = drawn(Decoder(), n)
    x = tensor(n(T, B, 2)), tensor(n.flags(T))
    return module, x, (tensor(n(B, H)), tensor(n(B, 2)))


@reads
def three_sizes(n: Numbers) -> Any:
    """Cortex-like areas of three sizes, each driven by the one below."""

    class Areas(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = [I, H, 4, 2]
            self.up = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
            self.own = nn.ParameterList(torch.empty(b, b) for b in sizes[1:])
            self.tau = nn.ParameterDict({f"a{k}": torch.empty(()) for k in range(3)})

        def forward(self, x: Any, state: Any) -> Any:
            new = []
            for k, (up, own) in enumerate(zip(self.up, self.own, strict=True)):
                gain = torch.sigmoid(self.tau[f"a{k}"])
                x = (1 - gain) * state[k] + gain * F.softplus(up(x) + state[k] @ own)
                new.append(x)
            return torch.cat(new, -1), new

    state = [tensor(n(B, k)) for k in (H, 4, 2)]
    return drawn(Areas(), n), tensor(n(T, B, I)), state


@cell(reads, simple)
class einsum_heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.r = nn.Linear(I, 2 * H), nn.Parameter(torch.empty(2, 3, 3))
        self.norm = nn.GroupNorm(2, H)

    def forward(self, x: Any, h: Any) -> Any:
        z, g = torch.tensor_split(self.x(x), 2, dim=-1)
        rec = torch.einsum("bnd,nde->bne", h.unflatten(-1, (2, 3)), self.r).flatten(-2)
        h = torch.sigmoid(z) * h + F.gelu(g + rec)
        return self.norm(h), h


@cell(reads, simple)
class rms_norm_residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(I, H), nn.Linear(H, H)
        self.scale = nn.Parameter(torch.empty(H))

    def forward(self, x: Any, h: Any) -> Any:
        a = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        h = h + F.mish(self.x(x) + self.h(a))
        return h.max(dim=-1).values, h


@either
def batch_second(n: Numbers) -> Any:
    """A state [layers, B, H] as PyTorch's own layers keep it."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.GRUCell(I, H), nn.GRUCell(H, H)

        def forward(self, x: Any, h: Any) -> Any:
            h1 = self.first(x, h[0])
            h2 = self.second(h1, h[1])
            return h2, torch.stack([h1, h2], dim=0)

    return drawn(Layers(), n), tensor(n(T, B, I)), tensor(n(2, B, H))


@reads
def legendre_memory(n: Numbers) -> Any:
    class LMUCell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e_x, self.e_h = nn.Linear(I, 1, bias=False), nn.Linear(H, 1, bias=False)
            self.w_x, self.w_h, self.w_m = nn.Linear(I, H), nn.Linear(H, H), nn.Linear(4, H)
            self.register_buffer("A", tensor(n(4, 4)))
            self.register_buffer("B", tensor(n(4, 1)))

        def forward(self, x: Any, state: Any) -> Any:
            h, m = state
            u = self.e_x(x) + self.e_h(h)
            m = F.linear(m, self.A) + F.linear(u, self.B)
            h = torch.tanh(self.w_x(x) + self.w_h(h) + self.w_m(m))
            return h, (h, m)

    module, x, h = simple(n, LMUCell())
    return module, x, (h, tensor(n(B, 4)))


@either
def attention_over_encoder(n: Numbers) -> Any:
    """Attention of a decoder to an encoder's outputs, which a buffer holds."""

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("encoded", tensor(n(B, 5, 3)))
            self.query, self.key = nn.Linear(H, 4), nn.Linear(3, 4)
            self.v, self.cell = nn.Linear(4, 1, bias=False), nn.GRUCell(I + 3, H)

        def forward(self, x: Any, h: Any) -> Any:
            energy = self.v(torch.tanh(self.query(h).unsqueeze(1) + self.key(self.encoded)))
            weights = torch.softmax(energy.squeeze(-1), dim=-1)
            context = torch.bmm(weights.unsqueeze(1), self.encoded).squeeze(1)
            h = self.cell(torch.cat([x, context], -1), h)
            return (h, weights), h

    return simple(n, Decoder())


@cell(either, simple)
class changes_a_constant(nn.Module):
    """A counter that is a plain attribute, and so is one number at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(I, H)
        self.calls = 0

    def forward(self, x: Any, h: Any) -> Any:
        self.calls += 1
        return self.cell(x, h)


# -- What cannot be read ------------------------------------------------------------------------
@refused()
def turing_memory(n: Numbers) -> Any:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.erase, self.add = nn.Linear(H, 3), nn.Linear(H, 3), nn.Linear(H, 3)
            self.cell = nn.GRUCell(I + 3, H)

        def forward(self, x: Any, state: Any) -> Any:
            h, memory = state
            w = F.softmax(F.cosine_similarity(memory, self.key(h).unsqueeze(1), dim=-1), dim=-1)
            read = torch.einsum("bm,bms->bs", w, memory)
            h = self.cell(torch.cat([x, read], -1), h)
            erase = torch.sigmoid(self.erase(h))
            memory = memory * (1 - torch.einsum("bm,bs->bms", w, erase))
            memory = memory + torch.einsum("bm,bs->bms", w, self.add(h))
            return h, (h, memory)

    module, x, h = simple(n, Head())
    return module, x, (h, tensor(n(B, 4, 3)))


@refused()
def fast_weights(n: Numbers) -> Any:
    class FastWeights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x, self.h = nn.Linear(I, H), nn.Linear(H, H, bias=False)

        def forward(self, x: Any, state: Any) -> Any:
            h, a = state
            z = self.x(x) + self.h(h)
            h = torch.tanh(z + torch.bmm(a, z.tanh().unsqueeze(-1)).squeeze(-1))
            a = 0.9 * a + 0.5 * torch.bmm(h.unsqueeze(2), h.unsqueeze(1))
            return h, (h, a)

    module, x, h = simple(n, FastWeights())
    return module, x, (h, tensor(n(B, H, H)))


@cell(refused(), simple)
class branch_on_data(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.RNNCell(I, H), nn.RNNCell(I, H)

    def forward(self, x: Any, h: Any) -> Any:
        if h.sum() > 0:
            return self.a(x, h)
        return self.b(x, h)


@cell(refused("batch"), simple)
class batch_norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(I, H), nn.Linear(H, H, bias=False)
        self.bn = nn.BatchNorm1d(H, track_running_stats=False)

    def forward(self, x: Any, h: Any) -> Any:
        return torch.tanh(self.x(x) + self.bn(self.h(h)))


@cell(refused(), simple)
class batch_norm_running(nn.Module):
    """Buffers that each step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(I, H), nn.Linear(H, H, bias=False)
        self.bn = nn.BatchNorm1d(H)

    def forward(self, x: Any, h: Any) -> Any:
        return torch.tanh(self.bn(self.x(x)) + self.h(h))


class Spike(torch.autograd.Function):
    """A step forwards, a fast sigmoid backwards."""

    @staticmethod
    def forward(ctx: Any, v: Any) -> Any:
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (v,) = ctx.saved_tensors
        return grad / (10 * v.abs() + 1.0) ** 2


@refused()
def spiking(n: Numbers) -> Any:
    class LIF(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x, self.rec = nn.Linear(I, H), nn.Linear(H, H, bias=False)

        def forward(self, x: Any, state: Any) -> Any:
            spk, mem = state
            mem = 0.9 * mem + self.x(x) + self.rec(spk) - spk * 0.3
            spk = Spike.apply(mem - 0.3)
            return spk, (spk, mem)

    module, x, mem = simple(n, LIF())
    return module, x, (torch.zeros(B, H, dtype=torch.float64), mem)


@cell(refused(), simple)
class rows_that_mix(nn.Module):
    """Each row sees its neighbour."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(I, H)

    def forward(self, x: Any, h: Any) -> Any:
        return self.cell(x, h + 0.1 * h.roll(1, dims=0))


@cell(either, simple)
class binary_units(nn.Module):
    """Signs whose derivative ``detach`` makes that of the values."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(I, H)

    def forward(self, x: Any, h: Any) -> Any:
        h = self.cell(x, h)
        return h + (torch.sign(h) - h).detach()


@cell(reads, simple)
class unit_length(nn.Module):
    """Norms of a state and deviations of its units, which may be zero."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(I, H), nn.Linear(H, H)

    def forward(self, x: Any, h: Any) -> Any:
        new = self.x(x) + self.h(F.normalize(h, dim=-1))
        sizes = [h.norm(p, -1, keepdim=True) for p in (1, 2, float("inf"))]
        return torch.tanh(new / (1 + sum(sizes) + h.std(-1, keepdim=True)))


@cell(refused("order 3.* Instead: "), simple)
class another_norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(I, H)

    def forward(self, x: Any, h: Any) -> Any:
        return self.cell(x, h / (1 + h.norm(3, -1, keepdim=True)))


@cell(refused("topk|sort"), simple)
class winners_take_all(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(I, H)

    def forward(self, x: Any, h: Any) -> Any:
        h = self.cell(x, h)
        kept = h.topk(2, dim=-1).indices
        return h * torch.zeros_like(h).scatter(-1, kept, 1.0)


@cell(refused("convolution.* Instead: a product"), simple)
class convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(I, H), nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Any, h: Any) -> Any:
        return torch.tanh(self.x(x) + self.h(h[:, None])[:, 0])


@refused("real floating point numbers")
def complex_state(n: Numbers) -> Any:
    class Rotation(nn.Module):
        def forward(self, x: Any, h: Any) -> Any:
            h = 0.9j * h + x
            return h.real, h

    return Rotation(), tensor(n(T, B, H)), torch.complex(tensor(n(B, H)), tensor(n(B, H)))


@cell(refused("float16|half|bits|cast"), simple)
class half_inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(I, H), nn.Linear(H, H)

    def forward(self, x: Any, h: Any) -> Any:
        return torch.tanh((self.x(x) + self.h(h)).half()).to(h.dtype)


@cell(refused(), simple)
class appends_to_a_list(nn.Module):
    """A side effect: what each step did is kept by the module."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.history = nn.RNNCell(I, H), []

    def forward(self, x: Any, h: Any) -> Any:
        if len(self.history) >= 2:
            h = h + 0.1 * self.history[-2]
        h = self.cell(x, h)
        self.history.append(h)
        return h


@refused()
def greedy_decoder(n: Numbers) -> Any:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.cell, self.out = nn.Embedding(7, H), nn.GRUCell(H, H), nn.Linear(H, 7)

        def forward(self, x: Any, state: Any) -> Any:
            h, token = state
            h = self.cell(self.emb(token) + x, h)
            logits = self.out(h)
            return logits, (h, logits.argmax(-1))

    start = torch.zeros(B, dtype=torch.long)
    return drawn(Decoder(), n), tensor(n(T, B, H)), (tensor(n(B, H)), start)
