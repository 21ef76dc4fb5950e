"""Shared by the tests of the Keras layers: results and gradients of a layer on any backend."""

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from tolerances import LIMITS, NO_WORSE_THAN, ONE_ULP, error

Arrays = dict[str, np.ndarray]
BACKEND = keras.backend.backend()


def number(tensor: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(tensor))


def solve(
    layer: Any,
    x: np.ndarray,
    states: list[np.ndarray] | None = None,
    mask: np.ndarray | None = None,
    training: bool = False,
    graph: bool = False,
) -> Arrays:
    """Returns outputs, final states, and the gradients of x, the states and all weights, of a sum
    of the results with random factors. The factors are positive: terms of both signs could cancel,
    as in the single bias of a single unit, and leave float32 few digits.

    Args:
        graph: TensorFlow runs the layer inside ``tf.function``.
    """
    dtype = layer.compute_dtype
    given = [np.asarray(a, dtype) for a in (x, *(states or []))]
    layer.build(x.shape)
    weights = [v.path.split("/")[-1] for v in layer.trainable_variables]

    def call(tensors: Any) -> list[Any]:
        kwargs: dict[str, Any] = {"training": training}
        if states is not None:
            kwargs["initial_state"] = list(tensors[1:])
        if mask is not None:
            kwargs["mask"] = keras.ops.convert_to_tensor(mask)
        found = layer(tensors[0], **kwargs)
        return list(keras.tree.flatten(found))

    def loss(results: list[Any]) -> Any:
        draw = np.random.default_rng(3)
        total: Any = 0.0
        for r in results:
            size = [int(n) for n in r.shape]
            total = total + keras.ops.sum(r * keras.ops.cast(draw.uniform(0.5, 1.5, size), r.dtype))
        return total

    results, grads = derive(layer, call, loss, given, graph)
    names = [f"result {i}" for i in range(len(results))]
    names += ["d x", *[f"d state {i}" for i in range(len(given) - 1)]]
    names += [f"d {w}" for w in weights]
    return dict(zip(names, map(number, [*results, *grads]), strict=True))


def derive(
    layer: Any,
    call: Any,
    loss: Any,
    given: list[np.ndarray],
    graph: bool = False,
    xla: bool = False,
    along: list[np.ndarray] | None = None,
) -> tuple[list[Any], list[Any]]:
    """Returns the results of ``call``, and the gradients of their ``loss`` for each tensor and
    weight; with ``along``, the gradients of the sum of all gradients times ``along``.
    """
    return _DERIVE[BACKEND](layer, call, loss, given, graph, xla, along=along)


def _tensorflow(
    layer: Any, call: Any, loss: Any, given: Any, graph: bool, xla: bool, along: Any
) -> Any:
    import tensorflow as tf

    # In a graph, the numbers of steps and rows are unknown.
    signature = [tf.TensorSpec([None] * (a.ndim - 1) + [a.shape[-1]], a.dtype) for a in given]
    shapes = [a.shape for a in given]

    def run(*tensors: Any) -> Any:
        wanted = [*tensors, *[v.value for v in layer.trainable_variables]]
        with contextlib.nullcontext() if along is None else tf.GradientTape() as outer:
            if outer is not None:
                outer.watch(tensors)
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                results = call(tensors)
                for r in results:
                    r.set_shape([t or u for t, u in zip(r.shape, _shape(r, shapes), strict=True)])
                total = loss(results)
            grads = tape.gradient(total, wanted, unconnected_gradients="zero")
        if outer is not None:
            ahead = [tf.constant(a, g.dtype) for a, g in zip(along, grads, strict=True)]
            grads = outer.gradient(grads, wanted, ahead, unconnected_gradients="zero")
        return results, grads

    if graph or xla:
        run = tf.function(
            run, jit_compile=xla, input_signature=None if xla else signature, autograph=False
        )
    return run(*map(tf.constant, given))


def _shape(result: Any, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    rows, steps, _ = shapes[0]
    return (rows, steps, None) if len(result.shape) == 3 else (rows, None)


def _torch(layer: Any, call: Any, loss: Any, given: Any, *ways: bool, along: Any) -> Any:
    import torch

    # Keras accepts NumPy arrays of bfloat16; torch does not.
    tensors = [keras.ops.convert_to_tensor(a).clone().requires_grad_() for a in given]
    results = call(tensors)
    wanted = [*tensors, *[v.value for v in layer.trainable_variables]]
    derived = functools.partial(torch.autograd.grad, inputs=wanted, materialize_grads=True)
    grads = derived(loss(results), create_graph=along is not None)
    if along is not None:
        grads = derived(grads, grad_outputs=[torch.tensor(a) for a in along])
    return results, grads


def _jax(layer: Any, call: Any, loss: Any, given: Any, *ways: bool, along: Any) -> Any:
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

    def first(tensors: Any, trainable: Any) -> Any:
        grads, results = jax.grad(run, argnums=(0, 1), has_aux=True)(tensors, trainable)
        return [*grads[0], *grads[1]], results

    def second(tensors: Any, trainable: Any) -> Any:
        grads, results = first(tensors, trainable)
        return sum((a * g).sum() for a, g in zip(along, grads, strict=True)), results

    tensors = [jax.numpy.asarray(a) for a in given]
    if along is None:
        grads, results = jax.jit(first)(tensors, trainable)
        return results, grads
    grads, results = jax.jit(jax.grad(second, argnums=(0, 1), has_aux=True))(tensors, trainable)
    return results, [*grads[0], *grads[1]]


_DERIVE = {"tensorflow": _tensorflow, "torch": _torch, "jax": _jax}


def copy_weights(source: Any, target: Any, shape: tuple[int, ...]) -> None:
    """Moves the weights of a layer off their initial values, and copies them to another layer."""
    for layer in (source, target):
        if not layer.built:
            layer.build(shape)
    draw = np.random.default_rng(11)
    moved = [w + 0.2 * draw.normal(size=w.shape) for w in source.get_weights()]
    source.set_weights(moved)
    target.set_weights(moved)


def real(small: Any, layer: Any) -> Any:
    """Returns a float32 layer with the weights that the integers represent."""
    cell, copied = small.cell, type(layer).from_config(layer.get_config())
    copied.build((None, None, cell.kernel.shape[0]))
    for name in ("kernel", "recurrent_kernel"):
        scales = number(cell._scales[f"scales weight_{'hh' if name[0] == 'r' else 'ih'}"])
        getattr(copied.cell, name).assign(number(getattr(cell, name)) * scales)
    copied.cell.bias.assign(cell.bias)
    return copied


def assert_right(found: Arrays, right: Arrays, dtype: str, theirs: Arrays | None = None) -> None:
    """Asserts errors within tolerance, or no worse than twice the error of Keras's own layer."""
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
def double(dtype: str) -> Any:
    """Enables float64 in JAX, which disables it by default."""
    if BACKEND != "jax" or dtype != "float64":
        yield
        return
    import jax

    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)


def random_mask(rng: np.random.Generator, rows: int, steps: int) -> np.ndarray:
    """Returns a mask with holes anywhere, and a row without any step."""
    mask = rng.random((rows, steps)) < 0.6
    mask[0] = False
    return mask


def config_of(layer: Any) -> Mapping[str, Any]:
    config = dict(layer.get_config())
    config.pop("name")
    return config
