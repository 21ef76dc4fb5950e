"""``prepare()`` and ``step()``: one step at a time, on weights packed once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops, tree
from keras.src import backend  # the scope in which Keras calls layers has no public name

from anycell.keras.backends import Variable, as_written, home
from anycell.keras.call import Tensor, expect, flags, for_all, real, tensor
from anycell.keras.rule import planned
from anycell.keras.weights import described, weights_of
from anycell.layer.checks import refuse
from anycell.layer.compression import array_of
from anycell.layer.stream import Prepared, Stream, steps
from anycell.numpy import check, threads
from anycell.numpy.framework import Numpy

if TYPE_CHECKING:
    from typing_extensions import Self


# Arguments of calls that only other frontends take, and what to do in Keras.
_ELSEWHERE = {
    "lengths": "Pass a mask: keras.ops.arange(steps) < lengths[:, None].",
    "return_states": "anycell.torch and anycell.numpy return the states of every step; in Keras, "
    "pass return_sequences=True and return_state=True to the constructor for all outputs and the "
    "last states.",
    "reset_state": "resets= restores the values that the cell declares.",
    "recurrent_mask": "recurrent_dropout= of the constructor draws one.",
    "static": "RNN(cell, units) takes it if the cell declares a static input.",
}


class Keywords:
    """Mixin of layers that say what to do instead of passing arguments of other frontends."""

    @as_written
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the layer."""
        for name in [name for name in _ELSEWHERE if name in kwargs]:
            takes = inspect.signature(self.call).parameters  # type: ignore[attr-defined]
            if name not in takes:
                given = f"to {type(self).__name__} of anycell.keras"
                refuse(name, given, f"one of {', '.join(takes)}", _ELSEWHERE[name], TypeError)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


class Packed(Prepared):
    """The packed weights of a layer, and the variables and functions that they belong to."""

    def __init__(self, layer: Any) -> None:
        kinds: Any = Variable, Callable
        self.of_cell = vars(layer.cell)
        holders = self.of_cell, getattr(layer.cell, "_further", {})
        places = [(h, n) for h in holders for n, v in h.items() if isinstance(v, kinds)]
        dtype = layer.cell.compute_dtype
        plan: Any = planned(described(layer)._replace(dtype=dtype))
        here = layer.engine.name == "cpu" and keras.backend.backend() != "jax"
        stream = None
        if here and steps(plan) and not hasattr(layer, "rounded"):
            learned = weights_of(layer, parts=True).items()
            weights = {n: np.array(ops.convert_to_numpy(array_of(w)), dtype) for n, w in learned}
            stream = Stream(Numpy.of(dtype), plan, [weights], threads.current())
        super().__init__(layer, places, stream=stream)

    def stale(self, layer: Any) -> bool:
        return super().stale(layer) or vars(layer.cell) is not self.of_cell


class Steps:
    """Mixin of layers that can go one step at a time."""

    cell: Any
    _prepared = Prepared()

    def prepare(self) -> Self:
        """Packs the weights, as they are now, for ``step``; returns the layer itself.

        A ``step`` stays an ordinary call on JAX, in 16 and in 8 bits, on copies of the layer, with
        other variables or another cell, and if no kernel runs the layer here. Weights that change
        later go unnoticed: call this method again after training and after loading.

        Raises:
            ValueError: for a layer that goes backwards, or has no weights yet.
        """
        me: Any = self
        self._forwards("prepare")
        self._prepared = Packed(me)
        return self

    @as_written
    def step(
        self, x: Tensor, states: Any = None, *, static: Tensor = None, resets: Tensor = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs one time step in inference; returns the results of a call for one step.

        After ``prepare()``, and if no gradient may be wanted, it is one native call on packed
        weights. Under a tape of TensorFlow, and for tensors of torch that require a gradient, a
        step is an ordinary call.

        Args:
            x: ``[B, in]``.
            states: as the previous step returned them, or one row ``[1, size]`` for all; None for
                the initial states of a call.
            static: as a call takes it.
            resets: bool ``[B]``, True where the state is replaced, before the step, by the initial
                state of a call: where an episode starts.

        Returns:
            output ``[B, size]``, and a list of the new states.

        Raises:
            ValueError: for a layer that goes backwards, and for arguments of another shape.
        """
        me: Any = self
        self._forwards("step")
        dtype = me.cell.compute_dtype
        x = one_step(me, x, dtype)
        before = self._begin(x, states, resets)
        packed = self._prepared
        eager = hasattr(x, "numpy")  # symbols of a graph lack this method
        stream = None if packed.stale(me) else packed.stream
        if stream is not None and eager and not home().recorded((x, *before, static)):
            return self._packed_step(stream, x, before, static)
        with me._beside(static=static), backend.AutocastScope(dtype):
            last, _, final = me.inner_loop(ops.expand_dims(x, 1), before, None, False)
        return last, list(final)

    def _begin(self, x: Tensor, states: Any, resets: Tensor) -> list[Tensor]:
        """Returns the states with which a step begins."""
        me: Any = self
        dtype = me.cell.compute_dtype
        before: list[Tensor] = []
        start: list[Tensor] = []
        if states is None or resets is not None:
            start = [ops.cast(s, dtype) for s in me.get_initial_state(ops.shape(x)[0])]
        if states is not None:
            count = len(tree.flatten(me.cell.state_size))
            before = [for_all(tensor(s, dtype), x) for s in _one_by_one(states, count)]
            if len(before) != count:
                hint = "Pass the states that the previous step returned."
                refuse("states", f"{len(before)} of them", f"{count}, each [B, size]", hint)
        if resets is None:
            return before or start
        new = flags("resets", resets)
        expect("resets", new.shape, (x.shape[0],), "rows")
        new = ops.expand_dims(new, 1)
        return [ops.where(new, s, b) for s, b in zip(start, before or start, strict=True)]

    def _packed_step(
        self, stream: Stream, x: Tensor, states: Sequence[Tensor], static: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs a step on packed weights."""
        kind, rows = self.cell.compute_dtype, x.shape[0]

        def read(name: str, tensor: Tensor, width: int) -> Any:
            return check.array(name, ops.convert_to_numpy(tensor), (rows, width), kind)

        if (static is None) is not (stream.static is None):
            given = "None" if static is None else f"shape {tuple(tensor(static).shape)}"
            expected = f"[B, {stream.static_width}]" if stream.static else "None"
            refuse("static", given, expected, "Only cells that declare a static input take one.")
        pairs = zip(states, stream.shape, strict=True)
        before = [read("states", state, width)[None] for state, (_, width) in pairs]
        static = None if static is None else read("static", static, stream.static_width)
        arrays = read("x", x, stream.width), before, static
        output, new = stream.step(rows, *arrays, threads.current())
        return ops.convert_to_tensor(output), [ops.convert_to_tensor(s[0]) for s in new]

    def _forwards(self, method: str) -> None:
        if self.go_backwards:  # type: ignore[attr-defined]
            hint = "Call the layer with the whole sequence: it begins at its end."
            refuse(method, "go_backwards=True", "a layer that goes forwards", hint)


def _one_by_one(states: Any, count: int) -> list[Any]:
    """Returns the states of a cell in a list. Nested lists may hold the numbers of one state."""
    first, axes = states, 0
    while isinstance(first, (list, tuple)) and first:
        first, axes = first[0], axes + 1
    single = count == 1 and axes + len(getattr(first, "shape", ())) < 3
    return [states] if single or not axes else list(states)


def one_step(layer: Any, x: Tensor, dtype: str) -> Tensor:
    """Returns one step of an input ``[B, in]`` as a tensor, and builds the layer if needed."""
    x = ops.cast(real("x", tensor(x, dtype)), dtype)
    if len(x.shape) != 2:
        refuse("x", f"shape {tuple(x.shape)}", "[B, in], one step", "Take it out: x[:, t].")
    if not layer.built:
        layer.build((None, None, x.shape[1]))
    return x
