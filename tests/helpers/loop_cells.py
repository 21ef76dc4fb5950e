"""Cells of PyTorch as people write them, for the tests of ``loop``, and the loop over them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from tolerances import LIMITS, assert_close, error
from torch import Tensor, nn

T, B, I, H = 6, 4, 5, 6
CELLS: dict[str, type[nn.Module]] = {}
Run = Callable[[Any, Any], tuple[Any, Any]]


def cell(kind: type[nn.Module]) -> type[nn.Module]:
    CELLS[kind.__name__] = kind
    return kind


def param(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * 0.4)


class One(nn.Module):
    """A cell of one state."""

    def start(self, rows: int) -> Any:
        return torch.randn(rows, H)


class Two(nn.Module):
    """A cell of two states."""

    def start(self, rows: int) -> Any:
        return torch.randn(rows, H), torch.randn(rows, H)


def lstm(gates: Any, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


@cell
class Concatenated(Two):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(I + H, 4 * H)

    def forward(self, x: Tensor, state: Any) -> Any:
        h, c = state
        h, c = lstm(self.lin(torch.cat([h, x], 1)).chunk(4, 1), c)
        return h, (h, c)


@cell
class Peepholes(Two):
    """Gates apart."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.ModuleDict({k: nn.Linear(I, H) for k in "ifco"})
        self.h = nn.ModuleDict({k: nn.Linear(H, H, bias=False) for k in "ifco"})
        self.p = nn.ParameterDict({k: param(H) for k in "ifo"})

    def forward(self, x: Tensor, state: Any) -> Any:
        h, c = state
        i, f = (torch.sigmoid(self.x[k](x) + self.h[k](h) + self.p[k] * c) for k in "if")
        c = f * c + i * torch.tanh(self.x["c"](x) + self.h["c"](h))
        h = torch.sigmoid(self.x["o"](x) + self.h["o"](h) + self.p["o"] * c) * c.tanh()
        return h, (h, c)


@cell
class OfTorchLSTM(Two):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(I, H)

    def forward(self, x: Tensor, state: Any) -> Any:
        h, c = self.cell(x, state)
        return h, [h, c]


@cell
class OfTorchGRU(One):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(I, H)

    def forward(self, x: Tensor, h: Tensor) -> Any:
        h = self.cell(x, h)
        return h, h


@cell
class OfTorchRNN(OfTorchGRU):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(I, H, nonlinearity="relu")  # type: ignore[assignment]


@cell
class ResetBefore(One):
    def __init__(self) -> None:
        super().__init__()
        self.rz, self.n = nn.Linear(I + H, 2 * H), nn.Linear(I + H, H)

    def forward(self, x: Tensor, h: Tensor) -> Any:
        r, z = torch.split(torch.sigmoid(self.rz(torch.cat((h, x), -1))), H, dim=-1)
        n = torch.tanh(self.n(torch.cat((r * h, x), -1)))
        h = torch.lerp(n, h, z)
        return h, h


@cell
class Normalized(Two):
    def __init__(self) -> None:
        super().__init__()
        self.xw, self.hw = nn.Linear(I, 4 * H, bias=False), nn.Linear(H, 4 * H, bias=False)
        self.nx, self.nh, self.nc = nn.LayerNorm(4 * H), nn.LayerNorm(4 * H), nn.LayerNorm(H)

    def forward(self, x: Tensor, state: Any) -> Any:
        h, c = state
        a = self.nx(self.xw(x)) + self.nh(self.hw(h))
        i, f, g, o = a.view(x.size(0), 4, -1).unbind(1)
        c = self.nc(f.sigmoid() * c + i.sigmoid() * g.tanh())
        h = o.sigmoid() * c.tanh()
        return h, (h, c)


@cell
class NormPerGate(Two):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(I + H, 4 * H), nn.GroupNorm(4, 4 * H)

    def forward(self, x: Tensor, state: Any) -> Any:
        h, c = state
        h, c = lstm(self.norm(self.lin(torch.cat([x, h], 1))).chunk(4, 1), c)
        return h, (h, c)


@cell
class Leaky(One):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(I, H), nn.Linear(H, H, bias=False)
        self.leak = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor, h: Tensor) -> Any:
        a = self.leak.sigmoid()
        h = (1 - a) * h + a * torch.tanh(self.w(x) + self.u(h))
        return h, h


@cell
class MinimalGated(One):
    def __init__(self) -> None:
        super().__init__()
        self.W, self.U, self.b = param(I, 2 * H), param(2, H, H), param(2 * H)

    def forward(self, x: Tensor, h: Tensor) -> Any:
        xf, xn = (x @ self.W + self.b).split([H, H], 1)
        f = torch.sigmoid(xf + h @ self.U[0])
        h = (1 - f) * h + f * torch.tanh(xn + (f * h) @ self.U[1])
        return h, h


@cell
class Independent(One):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(I, H), param(H)

    def forward(self, x: Tensor, h: Tensor) -> Any:
        h = F.relu(self.w(x) + self.u * h)
        return h, h


@cell
class Residual(One):
    """Clipped, with a matmul of what the first made."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u, self.v = nn.Linear(I, H), nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x: Tensor, h: Tensor) -> Any:
        h = (h + self.v(F.silu(self.w(x) + self.u(h)))).clamp(-2, 2)
        return h, h


@cell
class LowRank(One):
    """With matrices that are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.a, self.b = nn.Linear(I, H), param(H, 2), param(2, H)

    def forward(self, x: Tensor, h: Tensor) -> Any:
        h = torch.tanh(self.w(x) + h @ self.a @ self.b)
        h = torch.tanh(h @ self.a @ self.b + h)
        return h, h


@cell
class Stacked(nn.Module):
    """Two cells, their states nested in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.LSTMCell(I, H), nn.GRUCell(H, H)

    def forward(self, x: Tensor, state: Any) -> Any:
        h, c = self.a(x, state["low"])
        top = self.b(h, state["top"])
        return top, {"low": (h, c), "top": top}

    def start(self, rows: int) -> Any:
        return {"low": (torch.randn(rows, H), torch.randn(rows, H)), "top": torch.randn(rows, H)}


@cell
class ReadOut(One):
    """With outputs that are no state, after the step and before it."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u, self.v = nn.Linear(I, H), nn.Linear(H, H), nn.Linear(H, 3)

    def forward(self, x: Tensor, h: Tensor) -> Any:
        old, h = h, torch.tanh(self.w(x) + self.u(h))
        return {"p": self.v(h).softmax(-1), "e": (h * old).sum(-1), "x": x.sum(-1), "n": None}, h


@cell
class InPlace(Concatenated):
    def forward(self, x: Tensor, state: Any) -> Any:
        h, c = state
        a = self.lin(torch.cat([x, h], 1))
        a[:, : 3 * H].sigmoid_()
        i, f, o, g = a.chunk(4, 1)
        c = c * f
        c += i * g.tanh()
        h = o * c.tanh()
        return h, (h, c)


@cell
class Heads(nn.Module):
    """A stabilized LSTM of two heads (Beck et al., 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.r = nn.Linear(I, 4 * H), param(2, H // 2, 4, H // 2)

    def start(self, rows: int) -> Any:
        return tuple(torch.rand(rows, H) + 1 for _ in range(4))

    def forward(self, x: Tensor, state: Any) -> Any:
        h, c, n, m = state
        r = torch.einsum("bhd,hdge->bghe", h.view(-1, 2, H // 2), self.r).flatten(1)
        i, f, z, o = (self.w(x) + r).chunk(4, -1)
        f = F.logsigmoid(f)
        new = torch.maximum(f + m, i)
        a, b = torch.exp(i - new), torch.exp(f + m - new)
        c, n = b * c + a * z.tanh(), b * n + a
        h = o.sigmoid() * c / n
        return h, (h, c, n, new)


@cell
class OneState(nn.Module):
    """h and c in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(I + H, 4 * H)

    def start(self, rows: int) -> Any:
        return torch.randn(rows, 2 * H)

    def forward(self, x: Tensor, state: Tensor) -> Any:
        h, c = state[:, :H], state[:, H:]
        h, c = lstm(self.lin(torch.cat([x, h], 1)).chunk(4, 1), c)
        return h, torch.cat([h, c], 1)


@cell
class Flagged(OfTorchGRU):
    """An episode starts where a number of x says so."""

    def forward(self, x: Tensor, h: Tensor) -> Any:
        h = torch.where(x[:, :1] > 0.3, torch.zeros_like(h), h)
        h = self.cell(x, h)
        return h, h


@cell
class Held(OfTorchGRU):
    """The state is held where a number of x says so."""

    def forward(self, x: Tensor, h: Tensor) -> Any:
        h = torch.where(x[:, :1] > 0.3, self.cell(x, h), h)
        return h, h


@cell
class Shifted(nn.Module):
    """A state that remembers the one before, and one that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(I + 2 * H, H)

    def start(self, rows: int) -> Any:
        return [torch.randn(rows, H) for _ in range(3)]

    def forward(self, x: Tensor, state: Any) -> Any:
        h, old, context = state
        new = torch.tanh(self.lin(torch.cat([x, h, old], -1)) + context)
        return new - old, [new, h, context]


@cell
class Spectral(One):
    """With weights that torch parametrizes, and masked."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.utils.parametrizations.weight_norm(nn.Linear(I, H))
        self.u = nn.utils.parametrizations.orthogonal(nn.Linear(H, H))
        self.register_buffer("kept", (torch.rand(H, H) > 0.3).to(torch.get_default_dtype()))

    def forward(self, x: Tensor, h: Tensor) -> Any:
        h = torch.tanh(self.w(x) + self.u(h) + h @ (self.u.weight * self.kept))
        return h, h


@cell
class Embedded(OfTorchGRU):
    """Of ids."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, I)

    def forward(self, x: Tensor, h: Tensor) -> Any:
        h = self.cell(self.table(x), h)
        return h, h


def by_hand(module: Any) -> Run:
    """The Python loop."""

    def run(x: Tensor, state: Any) -> tuple[Any, Any]:
        outputs = []
        for t in range(len(x)):
            y, state = module(x[t], state)
            outputs.append(y)
        stacked = pytree.tree_map(
            lambda *parts: None if parts[0] is None else torch.stack(parts), *outputs
        )
        return stacked, state

    return run


def results(run: Run, module: nn.Module, x: Tensor, state: Any) -> dict[str, list[Tensor]]:
    """Outputs, last states and all gradients."""
    leaves, tree = pytree.tree_flatten(state)
    inputs = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in (x, *leaves)]
    made = run(inputs[0], pytree.tree_unflatten(inputs[1:], tree))
    outputs = [t for t in pytree.tree_leaves(made) if t is not None]
    total = torch.zeros(())
    for k, t in enumerate(outputs):
        weights = 1 + torch.arange(t.numel()).reshape(t.shape) % 7
        total = total + (torch.sin(t + 0.1 * k) * weights).sum()
    learned = [t for t in (*module.parameters(), *inputs) if t.requires_grad]
    gradients = torch.autograd.grad(total, learned, allow_unused=True)
    known = [torch.zeros_like(t) if g is None else g for t, g in zip(learned, gradients)]  # noqa: B905
    return {"forward": [t.detach() for t in outputs], "gradient": known}


def alike(mine: dict[str, list[Tensor]], theirs: dict[str, list[Tensor]]) -> None:
    for kind, tensors in theirs.items():
        assert len(mine[kind]) == len(tensors)
        for one, other in zip(mine[kind], tensors, strict=True):
            assert error(one, other) <= LIMITS["float64", kind]


def inputs_of(module: Any, steps: int = T, rows: int = B) -> tuple[Tensor, Any]:
    x = torch.randn(steps, rows, I)
    return torch.randint(0, 7, (steps, rows)) if "Embedded" in str(module) else x, module.start(
        rows
    )


def check_trees(ours: Any, expected: Any) -> None:
    """Compares tensors in trees, by the dtype of each."""
    pairs = zip(pytree.tree_leaves(ours), pytree.tree_leaves(expected), strict=True)
    for one, ref in pairs:
        assert one.dtype == ref.dtype and one.shape == ref.shape
        if one.is_floating_point():
            dtype = str(one.dtype).removeprefix("torch.")
            assert_close(*(t.detach().double().numpy() for t in (one, ref)), dtype, "gradient")
        else:
            assert torch.equal(one, ref)
