"""Layers of a cell on top of each other: the forward pass of a layer, written once for all.

A frontend makes a ``Stack`` of what its layer is and has, and hands a user's call over to it. The
stack checks the arrays, brings x to ``[T, B, I]``, runs layer after layer, and lays the results out
as x. How one layer runs, and how dropout is drawn, are functions of the frontend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from anycell.layer.checks import describe, dtype_of, refuse, remedy
from anycell.layer.framework import Framework
from anycell.layer.sequences import besides_output, by_name, check_return_states
from anycell.layer.signature import OF_STATES, Shape, state_names
from anycell.plan import Layer
from anycell.plan.layer import OPTIONS, SEQUENCES, STREAM, changed

Array = Any
Names = tuple[str, ...]
Arrays = Mapping[str, Array]  # by the names of ``layer.signature``; absent arrays have no entry
# The output ``[T, B, D * size]``, the final states ``[layers * D, B, size]``, and the sequences of
# further states, laid out as the output.
Results = tuple[Array, Sequence[Array], Sequence[Array]]
NOTHING: Arrays = {}
AXES = ("time", "batch"), ("batch", "time")  # the second if the batch comes first


class Layout(NamedTuple):
    """The order of axes in users' arrays: steps or rows first, or one row without a batch.

    Attributes:
        first: the batch axis of arrays that have no axis of steps: ``(B,)``, or () without a batch.
    """

    framework: type[Framework]
    like: Any
    steps: int
    first: Shape  # Dynamo of PyTorch 2.4 reads no property of a tuple
    batch_first: bool = False

    @classmethod
    def of(cls, framework: type[Framework], x: Array, batch_first: bool) -> Layout:
        """The layout of x: ``[T, B, I]``, ``[B, T, I]`` if ``batch_first``, or ``[T, I]``."""
        if len(x.shape) == 2:
            return cls(framework, x, x.shape[0], (), batch_first)
        steps, rows = (1, 0) if batch_first else (0, 1)
        return cls(framework, x, x.shape[steps], (x.shape[rows],), batch_first)

    def enter(self, x: Array, arrays: Arrays, arguments: Arrays) -> tuple[Array, Arrays]:
        """x as ``[T, B, I]``, and the other arrays with an axis of rows, mask and resets added."""
        flags = self.of_steps(arguments)
        if not self.first:
            x, arrays = x[:, None], {name: a[..., None, :] for name, a in arrays.items()}
        elif self.batch_first:
            x = x.swapaxes(0, 1)
        return x, {**arrays, **flags}

    def leave(self, output: Array, final: Sequence[Array], others: Sequence[Array]) -> Results:
        """The results, laid out as x."""
        if not self.first:
            output, others = output.squeeze(1), [a.squeeze(1) for a in others]
            return output, tuple([s.squeeze(1) for s in final]), others
        if self.batch_first:
            output, others = output.swapaxes(0, 1), [a.swapaxes(0, 1) for a in others]
        return output, final, others

    def of_steps(self, arguments: Arrays) -> dict[str, Array]:
        """The flags of each step and row among the arguments of a call, bool ``[T, B]``: "mask",
        which combines mask and lengths, and "resets". Absent ones have no entry.
        """
        flags, resets = {}, arguments.get("resets")
        valid = self.valid(arguments.get("mask"), arguments.get("lengths"))
        if valid is not None:
            flags["mask"] = valid
        if resets is not None:
            flags["resets"] = self.flags("resets", resets)
        return flags

    def valid(self, mask: Any, lengths: Any) -> Array:
        """``mask`` and ``lengths`` as one mask, bool ``[T, B]``; None if neither is given."""
        if mask is not None:
            mask = self.flags("mask", mask)
        if lengths is None:
            return mask
        within = self.below("lengths", lengths)
        return within if mask is None else within & mask

    def below(self, name: str, lengths: Any) -> Array:
        """Whether each step is below its row's length, bool ``[T, B]``."""
        shape = self.first
        expected = f"integers {list(shape)}, a number of steps for each row"
        counts, visible = self.framework.check_counts(name, lengths, expected)
        if counts.shape != shape:
            refuse(name, describe(counts), expected, "Pass one length per row of the input.")
        if visible and 0 not in shape:
            for length in (int(counts.min()), int(counts.max())):
                if not 0 <= length <= self.steps:
                    expected = f"0 to {self.steps}, the steps of the input"
                    hint = f"Pad the input, or clip the lengths to 0 to {self.steps}."
                    refuse(name, f"a length of {length}", expected, hint)
        return self.framework.below(self.steps, counts.reshape((1, -1)), self.like)

    def flags(self, name: str, value: Any) -> Array:
        """Converts ``mask`` or ``resets``, laid out as the input, to bool ``[T, B]``."""
        shape: Shape = (self.steps, *self.first)
        axes = "(time, batch)"
        if not self.first:
            shape, axes = (self.steps,), "(time)"
        elif self.batch_first:
            shape, axes = (*self.first, self.steps), "(batch, time)"
        flags = self.framework.check_flags(name, value, shape, axes, self.like)
        if not self.first:
            flags = flags[:, None]
        elif self.batch_first:
            flags = flags.T
        return self.framework.copy_flags(flags)


class Stack(NamedTuple):
    """Layers of a cell on top of each other, as one call runs them.

    Attributes:
        framework: how the arrays of the framework are checked.
        run: runs one layer: from the layer and its arrays to ``Results``.
        layer: the first layer.
        weights: what each layer learns, and whatever else it alone reads.
        batch_first: whether users' arrays have rows before steps.
        drop: the dropout between layers, if any: from x and the number of the layer that reads it.
        layout: of the arrays of a call, if the shape of x does not tell it.
    """

    framework: type[Framework]
    run: Callable[[Layer, Arrays], Results]
    layer: Layer
    weights: Sequence[Arrays]
    batch_first: bool = False
    drop: Callable[[Array, int], Array] | None = None
    layout: Any = None  # has the methods of ``Layout``

    def call(self, x: Array, state: Any, arguments: Arrays, arrays: Arrays = NOTHING) -> Any:
        """Runs whole sequences, and returns what users get.

        Args:
            x: checked, and laid out as users do.
            state: as users pass it.
            arguments: as users pass them, by name: mask, lengths, resets, reset_state, static,
                recurrent_mask, return_states. None is absent; other names are ignored.
            arrays: states that were checked before, by the names of ``layer.signature``.

        Returns:
            the output, the final states, or the only one, and if ``return_states`` asks for any, a
            dictionary of sequences by name. Sequences are laid out as x.
        """
        layer, layout = self.layer, self.layout
        cell = layer.cell
        wanted: Names = ()
        more = arguments or state is not None or cell.static is not None
        if layout is None and (more or self.batch_first or len(x.shape) == 2):
            layout = Layout.of(self.framework, x, self.batch_first)
        if more:
            arrays = {**arrays, **self._of_rows(layout, state, arguments)}
            wanted = check_return_states(cell, arguments.get("return_states"))
        if layout is not None:
            x, arrays = layout.enter(x, arrays, arguments)
        others = besides_output(wanted, cell) if wanted else ()
        if len(self.weights) == 1:
            layer = changed(layer, SEQUENCES, others) if others else layer
            results = self.run(layer, {"x": x, **arrays, **self.weights[0]})
        else:
            results = self._layers(x, arrays, others)
        output, final, values = results if layout is None else layout.leave(*results)
        last = tuple(final) if len(final) > 1 else final[0]
        return (output, last, by_name(wanted, cell, output, values)) if wanted else (output, last)

    def _layers(self, x: Array, arrays: Arrays, others: Names) -> Results:
        """Runs layer after layer; only the last one returns sequences of states."""
        finals, count = [], len(self.layer.options.reverse)
        values: Sequence[Array] = ()
        for k, learned in enumerate(self.weights):
            if k and self.drop is not None:
                x = self.drop(x, k)
            rows = slice(k * count, (k + 1) * count)
            parts = {n: a[rows] if n.startswith(OF_STATES) else a for n, a in arrays.items()}
            layer = changed(self.layer, OPTIONS, changed(self.layer.options, STREAM, k))
            if k + 1 == len(self.weights):
                layer = changed(layer, SEQUENCES, others)
            x, final, values = self.run(layer, {**parts, "x": x, **learned})
            finals.append(final)
        join = self.framework.xp.concatenate
        return x, tuple([join(states) for states in zip(*finals, strict=True)]), values

    def _of_rows(self, layout: Any, state: Any, arguments: Arrays) -> dict[str, Array]:
        """The arrays of a call that have no axis of steps, checked, by name."""
        framework, layer = self.framework, self.layer
        named: dict[str, Array] = {}
        cell, sizes, rows, like = layer.cell, dict(layer.sizes), layout.first, layout.like
        first = len(self.weights) * len(layer.options.reverse), *rows
        for kind, states in (("state", state), ("reset_state", arguments.get("reset_state"))):
            if states is not None:
                checked = framework.check_states(kind, states, cell, sizes, first, like)
                named.update(zip(state_names(kind, cell), checked, strict=True))
        static, mask = arguments.get("static"), arguments.get("recurrent_mask")
        if static is not None or cell.static is not None:
            shape = *rows, sizes[cell.static_size]
            named["static"] = framework.check_static(cell, static, shape, like)
        if mask is not None:
            mask = framework.check_recurrent_mask(cell, mask, sizes, rows, like)
            named["recurrent_mask"] = mask
        return named


# -- what layers of all frontends have in common ---------------------------------------------------


def check_input(framework: type[Framework], x: Any, axes: Sequence[Any], like: Array) -> None:
    """Refuses all but an x of these axes, of which the last is a number, with the dtype and the
    device of ``like``. If there are three axes, x may lack the batch.
    """
    told = "padded if sequences have several lengths, which are then passed as lengths="
    if isinstance(x, framework.kind):
        if len(x.shape) not in (2, len(axes)) or x.shape[-1] != axes[-1]:
            hint = "The last axis is input_size."
            if len(axes) == 3:
                hint = f"{hint[:-1]}; without a batch [time, {axes[-1]}]."
            expected = f"{dtype_of(like)} [{', '.join(map(str, axes))}]"
            refuse("x", describe(x), expected, remedy(x, len(axes), hint))
        axes, told = x.shape, "as the weights"
    framework.check_array("x", x, axes, told, like)


def one_step(
    framework: type[Framework], layer: Any, call: Any, x: Any, like: Array, state: Any,
    arguments: Arrays,
) -> tuple[Array, Any]:  # fmt: skip
    """Runs one step as a call with a sequence of length 1.

    Args:
        call: of the layer.
        x: ``[B, input_size]`` or ``[input_size]``.
        arguments: of the step: static, resets ``[B]`` or ``[]``, and reset_state.
    """
    batched = isinstance(x, framework.kind) and len(x.shape) == 2
    rows = tuple(x.shape[:1]) if batched else ()
    axes = "one step" if batched else f"or [B, {layer.input_size}], one step"
    x = framework.check_array("x", x, (*rows, layer.input_size), axes, like)
    axis = 1 if batched and layer.batch_first else 0
    further = {name: value for name, value in arguments.items() if value is not None}
    if "resets" in further:
        resets = framework.check_flags("resets", further["resets"], rows, "a flag per row", x)
        further["resets"] = resets[:, None] if axis else resets[None]
    output, new = call(x[:, None] if axis else x[None], state, **further)
    return output.squeeze(axis), new
