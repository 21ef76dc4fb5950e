"""``scan``: ``jax.lax.scan``, fused where its body can be read as a cell."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anycell.explanation import explain_read
from anycell.jax import exact, fused
from anycell.jax.equations import defined, evaluated, interpreted
from anycell.jax.read import Body
from anycell.read import SHORT, Refused, large, proof
from anycell.read.proof import STEPS

Array = Any

# Tests set it: an unexpected exception of the reader is raised, where users get ``lax.scan``.
STRICT = False


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any = None, length: int | None = None,
    reverse: bool = False, unroll: int | bool = 1, _split_transpose: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """``jax.lax.scan``, with its signature, semantics and errors, and faster where f is a cell.

    A body that can be read as a cell runs in a fused kernel, forward and backward, if JAX's default
    device is the CPU; ``explain_scan`` shows that cell, or says why ``jax.lax.scan`` itself runs
    the body. Before a reading is used, it is compared with f for a few steps.

    Args:
        f: ``carry, x -> carry, y``: one step.
        init: the first carry, a pytree of arrays.
        xs: a pytree of arrays, whose first axis is time; or None.
        length: the number of steps, needed if ``xs`` is None.
        reverse: whether to run from the last step to the first.
        unroll: of ``jax.lax.scan``; a fused kernel has nothing to unroll.

    Returns:
        the last carry, and the stacked outputs.

    Example:
        >>> import jax.numpy as jnp
        >>> w = jnp.ones((8, 8))
        >>> def step(h, x):
        ...     h = jnp.tanh(x + h @ w)
        ...     return h, h
        >>> h, outputs = scan(step, jnp.zeros((2, 8)), jnp.ones((5, 2, 8)))
        >>> outputs.shape
        (5, 2, 8)
    """
    loop = functools.partial(
        jax.lax.scan, f, init, xs, length, reverse, unroll, _split_transpose=_split_transpose
    )
    config: Any = jax.config
    if config.jax_disable_jit:  # then f may compute with numbers
        return loop()
    traced = Traced(loop)
    return traced.run(traced.body())


def explain_scan(
    f: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any = None,
    length: int | None = None, reverse: bool = False, unroll: int | bool = 1,
) -> str:  # fmt: skip
    """Says what ``scan`` does with these arguments, and why.

    Returns:
        which road f takes; and if it was read, the text of its cell, for those who want to keep it,
        and what ``anycell.explain`` says of the cell.

    Example:
        >>> import jax.numpy as jnp
        >>> step = lambda h, x: (jnp.tanh(x + 0.5 * h), h)
        >>> print(explain_scan(step, jnp.zeros((2, 8)), jnp.ones((5, 2, 8))).partition("\\n")[0])
        A fused kernel runs this body.
    """
    body = Traced(lambda: jax.lax.scan(f, init, xs, length, reverse, unroll)).body()
    if isinstance(body, str):
        return explain_read("jax.lax.scan", None, "", body)
    return explain_read("jax.lax.scan", body.reading, str(body.dtype))


class Traced:
    """A call of ``lax.scan`` as a program: that function has checked it and traced f.

    Args:
        loop: calls ``lax.scan``. Arrays that it closes over may be those of an outer program.
    """

    def __init__(self, loop: Callable[[], Any]) -> None:
        closed, shapes = jax.make_jaxpr(loop, return_shape=True)()
        self.jaxpr, self.consts = closed.jaxpr, closed.consts
        self.tree = jax.tree.structure(shapes)

    def body(self) -> Body | str:
        """The body as it was read, or why ``lax.scan`` runs it."""
        scans = [eqn for eqn in self.jaxpr.eqns if eqn.primitive.name == "scan"]
        if len(scans) != 1:
            return "JAX has traced it to something else than one loop"
        params = scans[0].params
        if any(fused.varying(a) for a in self.consts if isinstance(a, jax.core.Tracer)):
            return "it runs within shard_map, which follows arrays from device to device"
        if not params["length"] or not isinstance(params["length"], int):
            return "it has no steps, or the number of steps is not known"
        platform = jax.default_backend()
        if platform != "cpu":
            return f"JAX's default device is of the kind {platform}, not cpu"
        body = read_body(params["jaxpr"], params["num_consts"], params["num_carry"])
        if isinstance(body, str):
            return body
        few = large(params["length"], body.rows, body.weights, body.reading.joins)
        return SHORT if few else body

    def run(self, body: Body | str) -> Any:
        """The results of the program, in which a body that was read takes the place of the loop."""

        def results(eqn: Any, operands: list[Array]) -> list[Array]:
            if isinstance(body, str) or eqn.primitive.name != "scan":
                return evaluated(eqn, operands)
            params, first = eqn.params, eqn.params["num_consts"]
            end = first + params["num_carry"]
            return body.jitted(
                operands[:first], operands[first:end], operands[end:],
                steps=params["length"], reverse=params["reverse"],
            )  # fmt: skip

        return jax.tree.unflatten(self.tree, interpreted(self.jaxpr, self.consts, (), results))


@functools.lru_cache(maxsize=512)  # lax.scan returns the same jaxpr for the same f and shapes
def read_body(closed: Any, consts: int, carries: int) -> Body | str:
    """Reads the body of a ``lax.scan`` from its jaxpr; returns why not if it cannot be read."""
    try:
        body = Body(closed, consts, carries)
        if body.plan.engine != "cpu":  # step by step, the loop itself is as fast
            raise Refused(f"no kernel runs its cell: {body.plan.reason}")
        if (count := body.spread()) is not None:
            raise Refused(
                f"this step makes {count} numbers of each row of x, which a kernel would read from "
                "memory, and multiplies no state by a matrix: XLA's loop is faster"
            )
        text = re.sub(r" at 0x[0-9a-f]+", "", str(closed))
        key = hashlib.sha256(text.encode()).digest(), consts, carries
        if key not in _PROVED:
            _PROVED[key] = tried(body, closed)
        if _PROVED[key]:
            raise Refused(_PROVED[key])
        return body
    except Refused as refusal:
        return str(refusal.at(defined(closed.jaxpr)))
    except Exception as error:
        if STRICT:
            raise
        return f"reading it failed, by a fault of anycell: {error!r}"


# By the text of a body: "" for a reading that agrees with it, else how they differ.
_PROVED: dict[tuple[bytes, int, int], str] = {}


# ---- proof ---------------------------------------------------------------------------------------
def tried(body: Body, closed: Any) -> str:
    """Compares a reading with the body for a few steps; "" if they agree, else how they differ.

    Results, and their derivatives in a random direction of all arrays at once, are computed in
    float64. An outer program that is being traced does not notice.
    """
    consts, carries = len(body.fixed), len(body.states)

    def loop(*flat: Array) -> list[Array]:
        def step(carry: list[Array], x: list[Array]) -> tuple[list[Array], list[Array]]:
            results = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *flat[:consts], *carry, *x)
            return results[:carries], results[carries:]

        carry, xs = list(flat[consts : consts + carries]), list(flat[consts + carries :])
        last, ys = jax.lax.scan(step, carry, xs, STEPS)
        return [*last, *ys]

    def read(*flat: Array) -> list[Array]:
        parts = flat[:consts], flat[consts : consts + carries], flat[consts + carries :]
        return body.run(*parts, steps=STEPS, reverse=False, engine="reference")

    avals = closed.in_avals
    leads = [()] * (consts + carries) + [(STEPS,)] * len(body.x)
    shapes = [
        jax.ShapeDtypeStruct((*lead, *aval.shape), aval.dtype)
        for lead, aval in zip(leads, avals, strict=True)
    ]
    derived = "custom_vjp" not in str(closed)  # which have no such derivative
    programs = [Program(function, shapes, derived) for function in (loop, read)]
    rng = np.random.default_rng(0)
    arrays = [_draw(rng, shape, i < consts) for i, shape in enumerate(shapes)]
    directions = [_draw(rng, shape, False) for shape in shapes]
    small = [
        i for i, shape in enumerate(shapes)
        if _floating(shape) and (i >= consts or len(shape.shape) < 2)
    ]  # fmt: skip

    def both(started: list[np.ndarray]) -> Any:
        for i, array in zip(small, started, strict=True):
            arrays[i] = array
        of_jax, of_kernel = (program(arrays, directions) for program in programs)
        for name, array in of_jax.items():  # where the loop has no number, any will do
            of_kernel[name] = np.where(np.isfinite(array), of_kernel[name], 0.0)
            of_jax[name] = np.where(np.isfinite(array), array, 0.0)
        return of_jax, of_kernel

    dtype = "float64" if body.dtype == "float64" else proof.OF_FLOAT32
    return proof.tried([shapes[i].shape for i in small], both, dtype) or ""


class Program:
    """A function of arrays, traced with its derivative in one direction.

    Args:
        derived: whether it has a derivative; without, values alone are computed.
    """

    def __init__(self, function: Callable[..., list[Array]], shapes: Any, derived: bool) -> None:
        self.moved = [i for i, shape in enumerate(shapes) if _floating(shape)] if derived else []

        def both(flat: list[Array], along: list[Array]) -> Any:
            def of_moved(*moved: Array) -> list[Array]:
                arrays = list(flat)
                for i, array in zip(self.moved, moved, strict=True):
                    arrays[i] = array
                return function(*arrays)

            if not self.moved:
                return function(*flat), []
            results, derivative = jax.jvp(of_moved, [flat[i] for i in self.moved], along)
            return results, [d for d in derivative if d.dtype != jax.dtypes.float0]

        self.closed, kinds = jax.make_jaxpr(both, return_shape=True)(
            shapes, [shapes[i] for i in self.moved]
        )
        self.count = len(kinds[0])

    def __call__(self, arrays: Sequence[Array], along: Sequence[Array]) -> dict[str, np.ndarray]:
        """Results and their derivatives, by what they are."""
        along = [along[i] for i in self.moved]
        flat = exact.evaluate(self.closed.jaxpr, self.closed.consts, *arrays, *along)
        named = {}
        for i, array in enumerate(flat):
            derivative = f"the derivative {i - self.count}"
            named[derivative if i >= self.count else f"result {i}"] = np.asarray(array)
        return named


def _floating(shape: Any) -> bool:
    return bool(jnp.issubdtype(shape.dtype, jnp.floating))


def _draw(rng: np.random.Generator, shape: Any, weight: bool) -> Array:
    """Random numbers of a shape and dtype; weights are small enough that sums of products are."""
    size, dtype = shape.shape, shape.dtype
    if _floating(shape):
        wide = max(size) if weight and len(size) > 1 else 1
        return rng.normal(size=size) / np.sqrt(wide)
    if jnp.issubdtype(dtype, jax.dtypes.extended):  # keys, as ``exact`` has them
        return rng.integers(0, 2**64, size, np.uint64)
    if dtype == np.uint32:  # a key of the older sort
        return rng.integers(0, 2**32, size, np.uint32)
    return rng.integers(0, 2, size).astype(dtype)
