"""What the tests of the Keras layers share: results and gradients of a layer on any backend."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from tolerances import LIMITS, NO_WORSE_THAN, ONE_ULP, error

from anycell.engines import reference

Arrays = dict[str, np.ndarray]
BACKEND = keras.backend.backend()


def number(tensor: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(tensor))


def solve(
    layer: Any,
    x: np.ndarray,
    states: list[np.ndarray] | None = None,
    mask: np.ndarray | None = None,
    static: np.ndarray | None = None,
    resets: np.ndarray | None = None,
    training: bool = False,
    graph: bool = False,
    xla: bool = False,
    seed: int = 3,
) -> Arrays:
    """Outputs, final states, and the gradients of x, of the states, of the static input and of
    every weight, for a random weighting of the results: a positive one, for where terms of
    both signs cancel, as in the single bias of a single unit, float32 has few digits left.

    Args:
        graph: TensorFlow runs it inside ``tf.function``; ``xla`` compiles that.
    """
    dtype = layer.compute_dtype
    tensors = [x, *(states or []), *([] if static is None else [static])]
    given = [np.asarray(a, dtype) for a in tensors]
    count = len(states or [])
    layer.build(x.shape)
    weights = [v.path.split("/")[-1] for v in layer.trainable_variables]

    def call(tensors: Any) -> list[Any]:
        kwargs: dict[str, Any] = {"training": training}
        if states is not None:
            kwargs["initial_state"] = list(tensors[1 : 1 + count])
        if static is not None:
            kwargs["static"] = tensors[-1]
        if resets is not None:
            kwargs["resets"] = keras.ops.convert_to_tensor(resets)
        if mask is not None:
            kwargs["mask"] = keras.ops.convert_to_tensor(mask)
        found = layer(tensors[0], **kwargs)
        return list(found) if isinstance(found, (list, tuple)) else [found]

    def loss(results: list[Any]) -> Any:
        draw = np.random.default_rng(seed)
        total: Any = 0.0
        for r in results:
            size = [int(n) for n in r.shape]
            total = total + keras.ops.sum(r * keras.ops.cast(draw.uniform(0.5, 1.5, size), r.dtype))
        return total

    results, grads = _DERIVE[BACKEND](layer, call, loss, given, graph, xla)
    names = [f"result {i}" for i in range(len(results))]
    names += ["d x", *[f"d state {i}" for i in range(count)]]
    names += [] if static is None else ["d static"]
    names += [f"d {w}" for w in weights]
    return dict(zip(names, map(number, [*results, *grads]), strict=True))


def _tensorflow(layer: Any, call: Any, loss: Any, given: Any, graph: bool, xla: bool) -> Any:
    import tensorflow as tf

    # All in one tensor of unknown steps and rows where it is a graph.
    signature = [tf.TensorSpec([None] * (a.ndim - 1) + [a.shape[-1]], a.dtype) for a in given]
    shapes = [a.shape for a in given]

    def run(*tensors: Any) -> Any:
        variables = [v.value for v in layer.trainable_variables]
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            results = call(tensors)
            for r in results:
                r.set_shape([t or u for t, u in zip(r.shape, _shape(r, shapes), strict=True)])
            total = loss(results)
        wanted = [*tensors, *variables]
        return results, tape.gradient(total, wanted, unconnected_gradients="zero")

    if graph or xla:
        run = tf.function(
            run, jit_compile=xla, input_signature=None if xla else signature, autograph=False
        )
    return run(*map(tf.constant, given))


def _shape(result: Any, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    rows, steps, _ = shapes[0]
    return (rows, steps, None) if len(result.shape) == 3 else (rows, None)


def _torch(layer: Any, call: Any, loss: Any, given: Any, graph: bool, xla: bool) -> Any:
    import torch

    tensors = [torch.tensor(a, requires_grad=True) for a in given]
    results = call(tensors)
    wanted = [*tensors, *[v.value for v in layer.trainable_variables]]
    grads = torch.autograd.grad(loss(results), wanted, allow_unused=True)
    pairs = zip(wanted, grads, strict=True)
    return results, [torch.zeros_like(w) if g is None else g for w, g in pairs]


def _jax(layer: Any, call: Any, loss: Any, given: Any, graph: bool, xla: bool) -> Any:
    import jax

    trainable = [v.value for v in layer.trainable_variables]
    fixed = [v.value for v in layer.non_trainable_variables]

    def run(tensors: Any, trainable: Any) -> Any:
        pairs = [
            *zip(layer.trainable_variables, trainable, strict=True),
            *zip(layer.non_trainable_variables, fixed, strict=True),
        ]
        with keras.StatelessScope(state_mapping=pairs):
            results = call(tensors)
        return loss(results), results

    tensors = [jax.numpy.asarray(a) for a in given]
    derived = jax.jit(jax.grad(run, argnums=(0, 1), has_aux=True))
    (d_tensors, d_weights), results = derived(tensors, trainable)
    return results, [*d_tensors, *d_weights]


_DERIVE = {"tensorflow": _tensorflow, "torch": _torch, "jax": _jax}


def random_inputs(
    layer: Any, shape: tuple[int, ...], rng: np.random.Generator, masked: bool
) -> dict[str, Any]:
    """Arguments of ``solve`` for a layer of any cell, whose weights are moved off their initials.

    Given ``[B, T, in]``; NaN lies under the mask.
    """
    copy_weights(layer, layer, shape)
    rows, steps, _ = shape
    dtype = layer.compute_dtype
    x = rng.normal(size=shape).astype(dtype)
    mask = random_mask(rng, rows, steps) if masked else None
    if mask is not None:
        x[~mask] = np.nan
    draws = [np.abs(rng.normal(size=(rows, n))).astype(dtype) for n in layer.state_size]
    static = rng.normal(size=(rows, layer.units)).astype(dtype)
    return {
        "x": x, "states": draws, "mask": mask,
        "static": static if layer.cell.cell.static else None,
    }  # fmt: skip


def oracle(
    layer: Any,
    x: np.ndarray,
    states: list[np.ndarray],
    mask: np.ndarray | None = None,
    static: np.ndarray | None = None,
    resets: np.ndarray | None = None,
    seed: int = 3,
) -> Arrays:
    """What ``solve`` should find for a layer of any cell, by the reference engine in float64."""
    step = layer.cell.cell
    named = {w.path.split("/")[-1]: number(w).astype("float64") for w in layer.trainable_variables}
    kernel, bias = named["kernel"], named.get("bias")
    pair = bias if bias is not None and bias.ndim == 2 else (bias, None)
    turned = {n: w.swapaxes(-1, -2) if w.ndim > 1 else w for n, w in named.items()}
    weights = {l.weight: turned.get(f"{l.name}_kernel") for l in step.linears}
    weights |= {l.bias_name: turned.get(f"{l.name}_bias") for l in step.linears}
    if "recurrent_kernel" in named:
        weights |= {"weight_hh": turned["recurrent_kernel"], "bias_hh": pair[1]}
    x = x if mask is None else np.where(mask[..., None], x, 0.0)
    x = x.swapaxes(0, 1).astype("float64")
    gates = x @ kernel + (0.0 if pair[0] is None else pair[0])
    exact = [s.astype("float64") for s in states]
    rest: dict[str, Any] = {
        "mask": None if mask is None else mask.T, "resets": None if resets is None else resets.T,
        "static": None if static is None else static.astype("float64"), "masked_output": "repeat",
        "reverse": layer.go_backwards,
    }  # fmt: skip
    given = (step, gates, weights, exact, {p: named[p] for p in step.param_names})
    outputs, final = reference.run(*given, **rest)
    order = slice(None, None, -1 if layer.go_backwards else 1)
    begun = np.ones(x.shape[:2], bool)
    if mask is not None:  # Keras has zeros before a row's first step
        begun = np.cumsum(mask.T[order], axis=0)[order] > 0
    shown = np.where(begun[..., None], outputs, 0.0).swapaxes(0, 1)[:, order]
    draw = np.random.default_rng(seed)
    dy, *d_final = [draw.uniform(0.5, 1.5, r.shape) for r in (shown, *final)]
    dy = np.where(begun[..., None], dy[:, order].swapaxes(0, 1), 0.0)
    g = reference.backward(*given, d_outputs=dy, d_final=d_final, **rest)

    found = {f"result {i}": value for i, value in enumerate([shown, *final])}
    found["d x"] = (g.gates_x @ kernel.T).swapaxes(0, 1)
    found |= {f"d state {i}": d for i, d in enumerate(g.state)}
    found |= {} if static is None else {"d static": g.static}
    for name in named:
        if name == "kernel":
            value = np.einsum("tbi,tbg->ig", x, g.gates_x)
        elif name == "recurrent_kernel":
            value = g.weights["weight_hh"].T
        elif name == "bias":
            first = g.gates_x.sum((0, 1))
            value = first if pair[1] is None else np.stack([first, g.weights["bias_hh"]])
        elif name in step.param_names:
            value = g.params[name]
        elif name.endswith("_kernel"):
            value = g.weights["weight_" + name.removesuffix("_kernel")].swapaxes(-1, -2)
        else:
            value = g.weights["bias_" + name.removesuffix("_bias")]
        found[f"d {name}"] = value
    return found


def copy_weights(source: Any, target: Any, shape: tuple[int, ...]) -> None:
    """The weights of one layer into another, moved off their initial values."""
    for layer in (source, target):
        if not layer.built:
            layer.build(shape)
    draw = np.random.default_rng(11)
    moved = [w + 0.2 * draw.normal(size=w.shape) for w in source.get_weights()]
    source.set_weights(moved)
    target.set_weights(moved)


def assert_right(found: Arrays, right: Arrays, dtype: str, theirs: Arrays | None = None) -> None:
    """Within tolerance of what is right, or no worse than twice what Keras's own layer has."""
    assert found.keys() == right.keys()
    for name, value in found.items():
        kind = "gradient" if name.startswith("d ") else "forward"
        limit = LIMITS[dtype, kind]
        # Weights have neither a time nor a batch axis.
        axes = None if value.ndim == 3 else (0,) if _per_row(name) else ()
        if theirs is not None:
            own = error(theirs[name], right[name], axes)
            limit = max(limit, NO_WORSE_THAN * own + ONE_ULP)
        wrong = error(value, right[name], axes)
        assert wrong <= limit, f"{name}: error {wrong:.2e}, limit {limit:.1e}"


def _per_row(name: str) -> bool:
    return name.startswith(("result", "d state"))


@contextlib.contextmanager
def policy(name: str) -> Any:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def random_mask(rng: np.random.Generator, rows: int, steps: int) -> np.ndarray:
    """Holes anywhere, and a row with no step at all."""
    mask = rng.random((rows, steps)) < 0.6
    mask[0] = False
    return mask


def config_of(layer: Any) -> Mapping[str, Any]:
    config = dict(layer.get_config())
    config.pop("name")
    return config
