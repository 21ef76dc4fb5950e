"""Trains an agent that must remember by PPO: its state is reset where an episode begins.

    pip install '.[torch]'
    python examples/recall.py                     (a minute; --quick: seconds)
    python examples/recall.py --picture out.svg   (draws the curves; needs matplotlib)

An episode shows a cue at its first step, and asks for it some steps later. One agent remembers; the
state of another agent is reset at every step, so it can only guess. The losses follow Schulman et
al., *Proximal Policy Optimization Algorithms*, 2017; the advantages follow *High-Dimensional
Continuous Control Using Generalized Advantage Estimation*, 2016.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import anycell

ROWS, STEPS, UNITS = 64, 32, 32
State = tuple[Tensor, Tensor]


class Recall:
    """Environments side by side, each of which runs one episode after another.

    ``x`` is the observation ``[rows, 2]``: the cue, +1 or -1, at the first step and 0 after it;
    and a flag that asks for the answer at the last of 8 to 16 steps. The right answer earns 1.
    ``first`` tells which observations are the first of an episode.
    """

    def __init__(self, rows: int) -> None:
        self.cue = self.left = torch.zeros(rows, dtype=torch.long)
        self._look()

    def act(self, action: Tensor) -> Tensor:
        """Returns the reward of each row; sets ``x`` and ``first`` to the next observation."""
        right = (self.left == 1) & (action == self.cue)
        self.left = self.left - 1
        self._look()
        return right.float()

    def _look(self) -> None:
        self.first = self.left == 0
        self.cue = torch.where(self.first, torch.randint(2, self.left.shape), self.cue)
        self.left = torch.where(self.first, torch.randint(8, 17, self.left.shape), self.left)
        shown, asks = (2 * self.cue - 1) * self.first, self.left == 1
        self.x = torch.stack([shown, asks], -1).float()


class Policy(nn.Module):
    def __init__(self, units: int = UNITS) -> None:
        super().__init__()
        self.rnn = anycell.torch.LSTM(2, units)
        self.actor, self.critic = nn.Linear(units, 2), nn.Linear(units, 1)

    def step(self, x: Tensor, state: State, first: Tensor) -> tuple[Categorical, Tensor, State]:
        """One step of a rollout: a native call."""
        output, state = self.rnn.step(x, state, resets=first)
        return Categorical(logits=self.actor(output)), self.critic(output)[..., 0], state

    def forward(self, x: Tensor, state: State, first: Tensor) -> tuple[Categorical, Tensor]:
        """All steps of a rollout: one fused call, with gradients."""
        output, _ = self.rnn(x, state, resets=first)
        return Categorical(logits=self.actor(output)), self.critic(output)[..., 0]


class Forgetful(Policy):
    """The control: its state is reset at every step."""

    def step(self, x: Tensor, state: State, first: Tensor) -> tuple[Categorical, Tensor, State]:
        return super().step(x, state, torch.ones_like(first))

    def forward(self, x: Tensor, state: State, first: Tensor) -> tuple[Categorical, Tensor]:
        return super().forward(x, state, torch.ones_like(first))


@torch.no_grad()
def rollout(
    policy: Policy, environment: Recall, state: State
) -> tuple[list[Tensor], Tensor, State]:
    """Returns arrays [T, B, ...] of all that happened, the advantages, and the final state."""
    seen = []
    for _ in range(STEPS):
        x, first = environment.x, environment.first
        choice, value, state = policy.step(x, state, first)
        action = choice.sample()
        reward = environment.act(action)
        seen.append((x, first, action, choice.log_prob(action), value, reward))
    happened = [torch.stack(each) for each in zip(*seen, strict=True)]
    _, first, _, _, value, reward = happened
    _, ahead, _ = policy.step(environment.x, state, environment.first)
    advantage, total = torch.zeros_like(value), torch.zeros(ROWS)
    ends = torch.cat([first[1:], environment.first[None]])  # the next step begins an episode
    for t in reversed(range(STEPS)):
        total = reward[t] + 0.95 * (ahead + 0.9 * total) * ~ends[t] - value[t]
        advantage[t], ahead = total, value[t]
    return happened, advantage, state


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    begin: State,
    happened: list[Tensor],
    advantage: Tensor,
) -> None:
    """Runs PPO's epochs over minibatches of rows, each with the initial states of its rows."""
    x, first, action, log_prob, value, _ = happened
    for _ in range(2):
        for rows in torch.randperm(ROWS).split(ROWS // 2):
            states = tuple(s[:, rows] for s in begin)
            choice, now = policy(x[:, rows], states, first[:, rows])
            ratio = (choice.log_prob(action[:, rows]) - log_prob[:, rows]).exp()
            gain = (advantage[:, rows] - advantage.mean()) / (advantage.std() + 1e-8)
            gain = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
            error = (now - (value + advantage)[:, rows]).square()
            loss = (0.5 * error - gain - 0.01 * choice.entropy()).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()


def train(updates: int, kind: type[Policy] = Policy, seed: int = 0) -> list[float]:
    """Trains an agent; returns the share of right answers in each rollout."""
    torch.manual_seed(seed)
    policy, environment = kind(), Recall(ROWS)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    state, right = (torch.zeros(1, ROWS, UNITS), torch.zeros(1, ROWS, UNITS)), []
    for _ in range(updates):
        begin = state
        happened, advantage, state = rollout(policy, environment, begin)
        update(policy, optimizer, begin, happened, advantage)
        x, reward = happened[0], happened[-1]
        right.append((reward.sum() / x[..., 1].sum()).item())
    return right


def draw(curves: dict[str, list[list[float]]], path: Path) -> None:
    """Writes the curves of both agents, one for each seed."""
    from picture import FAINT, INK, STYLE, mpl, plt

    with mpl.rc_context({**STYLE, "svg.fonttype": "none", "svg.hashsalt": "recall"}):
        figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
        for (name, runs), color in zip(curves.items(), ("#3f51b5", FAINT), strict=True):
            for run in runs:
                axes.plot(run, color=color, label=name if run is runs[0] else None)
        axes.set(xlabel="updates", ylabel="right answers", ylim=(0.3, 1.03))
        axes.axhline(0.5, color=INK, linestyle=":", linewidth=1)
        axes.legend(loc="center right")
        figure.savefig(path, metadata={"Date": None})


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    """Prints and returns the share of right answers at the end of training, for both agents."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a short run")
    parser.add_argument("--picture", type=Path, help="where to draw the curves")
    given = parser.parse_args(arguments)
    updates, seeds = (60, 1) if given.quick else (100, 3)
    agents = {"remembers": Policy, "reset at every step": Forgetful}
    curves = {
        name: [train(updates, kind, seed) for seed in range(seeds)] for name, kind in agents.items()
    }
    lasts = [sum(sum(run[-10:]) for run in runs) / (10 * seeds) for runs in curves.values()]
    for name, last in zip(agents, lasts, strict=True):
        print(f"{name:20} {last:.0%} of the answers are right")
    if given.picture:
        draw(curves, given.picture)
    return lasts[0], lasts[1]


if __name__ == "__main__":
    # Operations of 32 units gain nothing from a second thread, and lose much where other processes
    # want the cores.
    torch.set_num_threads(1)
    main()
