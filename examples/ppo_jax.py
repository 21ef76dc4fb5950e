"""A recurrent PPO in plain JAX, written as such programs are: one import makes its loops fused.

    pip install '.[jax]'
    python examples/ppo_jax.py           (half a minute; --quick: seconds)

Everything is one jitted function: environments of one example each under ``vmap``, a network that
runs its cell in a ``scan`` over time and starts anew where an episode is over, a rollout,
advantages from the last step to the first, and epochs of shuffled minibatches. An episode shows a
cue at its first step, and asks for it at its last. With ``from jax.lax import scan`` it is the same
program. The losses are those of Schulman et al., *Proximal Policy Optimization Algorithms*, 2017.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import nn, random

from anycell.jax import scan

ENVIRONMENTS, STEPS, UNITS, LAST = 64, 32, 32, 7
EPOCHS, MINIBATCHES, RATE = 4, 4, 3e-3
GAMMA, LAMBDA, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.01

Array = Any
Params = dict[str, Array]


# ---- the environment, for one example ------------------------------------------------------------
class Env(NamedTuple):
    time: Array
    cue: Array


def observe(env: Env) -> Array:
    return jnp.stack([jnp.where(env.time == 0, 2.0 * env.cue - 1, 0.0), 1.0 * (env.time == LAST)])


def reset(key: Array) -> Env:
    return Env(jnp.zeros((), jnp.int32), random.bernoulli(key).astype(jnp.int32))


def act(key: Array, env: Env, action: Array) -> tuple[Env, Array, Array]:
    """The next state, the reward, and whether the episode is over; then a new one begins."""
    done = env.time == LAST
    reward = (done & (action == env.cue)).astype(jnp.float32)
    later = env._replace(time=env.time + 1)
    return jax.tree.map(functools.partial(jnp.where, done), reset(key), later), reward, done


# ---- the network ---------------------------------------------------------------------------------
def initialised(key: Array) -> Params:
    draw = nn.initializers.orthogonal(2.0**0.5)
    shapes = {"embed": (2, UNITS), "input": (UNITS, 3 * UNITS), "recurrent": (UNITS, 3 * UNITS)}
    params = {k: draw(random.fold_in(key, i), v) for i, (k, v) in enumerate(shapes.items())}
    heads = {"actor": jnp.zeros((UNITS, 2)), "critic": jnp.zeros((UNITS, 1))}
    return params | heads | {"bias": jnp.zeros(3 * UNITS)}


def gru(params: Params, hidden: Array, x: tuple[Array, Array]) -> tuple[Array, Array]:
    """One step, for all rows; ``done`` is whether an episode was over before it."""
    embedded, done = x
    hidden = jnp.where(done[:, None], jnp.zeros_like(hidden), hidden)
    r, z, n = jnp.split(embedded @ params["input"] + params["bias"], 3, axis=-1)
    hr, hz, hn = jnp.split(hidden @ params["recurrent"], 3, axis=-1)
    z = nn.sigmoid(z + hz)
    hidden = z * hidden + (1 - z) * jnp.tanh(n + nn.sigmoid(r + hr) * hn)
    return hidden, hidden


def network(params: Params, hidden: Array, x: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    """The last state, and logits and values of all steps, from ``[steps, rows, ...]``."""
    seen, done = x
    embedded = nn.relu(seen @ params["embed"])
    hidden, outputs = scan(functools.partial(gru, params), hidden, (embedded, done))
    return hidden, outputs @ params["actor"], (outputs @ params["critic"])[..., 0]


# ---- PPO -----------------------------------------------------------------------------------------
class Transition(NamedTuple):
    seen: Array
    begins: Array
    action: Array
    log_prob: Array
    value: Array
    reward: Array
    done: Array


class Adam(NamedTuple):
    params: Params
    mean: Params
    square: Params
    count: Array


def adam(params: Params) -> Adam:
    zeros = jax.tree.map(jnp.zeros_like, params)
    return Adam(params, zeros, zeros, jnp.zeros((), jnp.int32))


def descended(state: Adam, gradients: Params) -> Adam:
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients)))
    gradients = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.5 / (norm + 1e-6)), gradients)
    count = state.count + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mean, gradients)
    square = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, state.square, gradients)

    def moved(p: Array, m: Array, v: Array) -> Array:
        return p - RATE * m / (1 - 0.9**count) / (jnp.sqrt(v / (1 - 0.999**count)) + 1e-5)

    return Adam(jax.tree.map(moved, state.params, mean, square), mean, square, count)


def log_prob(logits: Array, action: Array) -> Array:
    return jnp.take_along_axis(nn.log_softmax(logits), action[..., None], -1)[..., 0]


def loss(params: Params, hidden: Array, seen: Transition, advantage: Array, target: Array) -> Array:
    _, logits, value = network(params, hidden, (seen.seen, seen.begins))
    ratio = jnp.exp(log_prob(logits, seen.action) - seen.log_prob)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
    clipped = seen.value + jnp.clip(value - seen.value, -CLIP, CLIP)
    error = jnp.maximum((value - target) ** 2, (clipped - target) ** 2)
    entropy = -jnp.sum(nn.softmax(logits) * nn.log_softmax(logits), -1)
    return 0.5 * 0.5 * error.mean() - gain.mean() - ENTROPY * entropy.mean()


def train(key: Array, updates: int) -> tuple[Array, Array]:
    """The losses of all minibatches, and the mean reward of an episode, by update."""
    key, first = random.split(key)
    state = adam(initialised(first))
    env = jax.vmap(reset)(random.split(first, ENVIRONMENTS))

    def step(carry: Any, _: None) -> Any:
        params, env, seen, done, hidden, key = carry
        key, draw, turn = random.split(key, 3)
        x = seen[None], done[None]
        hidden, logits, value = network(params, hidden, x)
        action = random.categorical(draw, logits)[0]
        turns = random.split(turn, ENVIRONMENTS)
        env, reward, over = jax.vmap(act)(turns, env, action)
        chosen = log_prob(logits[0], action)
        transition = Transition(seen, done, action, chosen, value[0], reward, over)
        return (params, env, jax.vmap(observe)(env), over, hidden, key), transition

    def back(carry: Any, now: Transition) -> Any:
        advantage, value = carry
        alive = 1.0 - now.done
        delta = now.reward + GAMMA * value * alive - now.value
        advantage = delta + GAMMA * LAMBDA * alive * advantage
        return (advantage, now.value), advantage

    def minibatch(state: Adam, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(state.params, *batch)
        return descended(state, gradients), value

    def epoch(carry: Any, _: None) -> Any:
        state, start, rollout, key = carry
        key, draw = random.split(key)
        order = random.permutation(draw, ENVIRONMENTS).reshape(MINIBATCHES, -1)
        parts = jax.tree.map(lambda a: jnp.moveaxis(a[:, order], 1, 0), rollout)
        state, losses = scan(minibatch, state, (start[order], *parts))
        return (state, start, rollout, key), losses

    def update(carry: Any, _: None) -> Any:
        state, env, seen, done, start, key = carry
        begin = state.params, env, seen, done, start, key
        (_, env, seen, done, hidden, key), rollout = scan(step, begin, None, STEPS)
        _, _, value = network(state.params, hidden, (seen[None], done[None]))
        ahead = jnp.zeros_like(value[0]), value[0]
        _, advantage = scan(back, ahead, rollout, reverse=True, unroll=16)
        rollout_and_goals = rollout, advantage, advantage + rollout.value
        (state, *_, key), losses = scan(epoch, (state, start, rollout_and_goals, key), None, EPOCHS)
        score = rollout.reward.sum() / jnp.maximum(rollout.done.sum(), 1)
        return (state, env, seen, done, hidden, key), (losses, score)

    begin = state, env, jax.vmap(observe)(env), jnp.ones(ENVIRONMENTS, bool)
    carry = *begin, jnp.zeros((ENVIRONMENTS, UNITS)), key
    return scan(update, carry, None, updates)[1]


def main(arguments: list[str] | None = None) -> tuple[Array, Array]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer updates")
    options = parser.parse_args(arguments)
    losses, scores = jax.jit(train, static_argnums=1)(random.key(0), 3 if options.quick else 100)
    print(f"right answers: {scores[0]:.2f} at first, {scores[-1]:.2f} at last")
    return losses, scores


if __name__ == "__main__":
    main()
