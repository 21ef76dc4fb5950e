"""The layers of a framework as ``anycell.compress`` sees them: what it asks of a frontend.

A weight is an array in the layout of ``anycell.layer.signature``, or an object whose ``value`` is
one. A frontend has a subclass of ``Compression``, which is looked up by the classes of a layer.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from anycell.lang.cell import ONE
from anycell.lang.namespaces import Array, namespace
from anycell.layer.checks import refuse

_ARGUMENTS = "input_size num_layers bias batch_first dropout bidirectional checkpoint".split()
_KNOWN: dict[type, Compression] = {}  # by classes of layers, and of models that may contain some
Runs = list[tuple[Any, Any, Any]]


class Compression:
    """Compresses layers of a framework. A subclass adds

        weights(layer)                  per layer what its directions learn, by name; refuses layers
                                        whose weights cannot be replaced
        reads(readout)                  the weights [out, in] that multiply a readout's input
        take(layer, readouts, taken, optimizer, size)
                                        makes weights, and all that belongs to them, smaller in
                                        place: ``taken`` has each once, with the index of what
                                        stays; ``size`` is a symbol and what it stands for then
        like(layer, cell, sizes, learned)
                                        another cell's layer with these sizes and parameters; all
                                        else is as in ``layer``
        within(model)                   all that is in a model, itself included
        quantized(layer)                the same layer with weights of 8 bits
        copy(model, small)              a copy of a model, with quantized layers in place of others
        output(results)                 of a layer, in float64

    Attributes:
        framework, kinds: the frontend's name, and the names of its layers; ``layers`` are their
            classes.
        remedy: what to do with a model that has no such layer.
        readouts: which readouts can be compressed, in words, with a place for their width.
        feedback: the framework's ``Feedback``.
        method: the name of the method by which layers run.
    """

    method = "forward"

    def __init_subclass__(cls, of: Sequence[type]) -> None:
        _KNOWN.update(dict.fromkeys(of, cls()))

    def describe(self, layer: Any) -> Any:
        """The ``plan.Layer`` with a layer's cell, sizes and directions."""
        return layer._layer()

    def learned(self: Any, layer: Any) -> Any:
        """The weights of a layer, with those that are parts of another weight."""
        return self.weights(layer)

    # -- weights of 8 bits -----------------------------------------------------------------------
    def quantize(self: Any, model: Any, data: Iterable[Any] | None) -> Any:
        """See ``anycell.compress.quantize``."""
        parts = self.within(model)
        small = {part: self.quantized(part) for part in parts if self.rounds(part, model)}
        if not small:
            given = f"{type(model).__name__} without a float32 layer of {self.framework}"
            refuse("model", given, f"{self.kinds} in it", self.remedy, TypeError)
        if data is not None:
            self.measure(model, self.runs(model, parts, small), data)
        return small[model] if model in small else self.copy(model, small)

    def rounds(self: Any, part: Any, model: Any) -> bool:
        """Whether a part of a model is a layer whose weights are to be rounded."""
        return isinstance(part, self.layers) and not getattr(part, "rounded", False)

    def runs(self: Any, model: Any, parts: Iterable[Any], small: Mapping[Any, Any]) -> Runs:
        """The measurements: triples of a layer in the model, the layer that runs beside it on the
        same arguments, and the quantized layer whose error the difference is.
        """
        fed = [p for p in parts if isinstance(p, self.feedback) and p.layer in small]
        twins = [(p, self.feedback(small[p.layer], p.readout), small[p.layer]) for p in fed]
        return [*((layer, quantized, quantized) for layer, quantized in small.items()), *twins]

    def beside(self) -> AbstractContextManager[Any]:
        """A context in which the layer beside draws the random numbers of the layer."""
        return nullcontext()

    def measure(self: Any, call: Callable[..., Any], runs: Runs, data: Iterable[Any]) -> None:
        """Runs a model, and other layers beside its own; sets the ``error`` of quantized layers."""
        sums: dict[Any, list[tuple[float, float]]] = {small: [] for _, _, small in runs}

        def both(run: Any, beside: Any, small: Any, *args: Any, **options: Any) -> Any:
            with self.beside():
                output = self.output(beside(*args, **options))
            results = run(*args, **options)
            right = self.output(results)
            sums[small].append((float(((output - right) ** 2).sum()), float((right**2).sum())))
            return results

        run = operator.attrgetter(self.method)
        methods = [(l, self.method, partial(both, run(l), run(o), small)) for l, o, small in runs]
        positional: list[Any] | None = None
        with replaced(methods):
            for batch in data:
                positional = [*batch] if isinstance(batch, tuple) else [batch]
                together = isinstance(batch, tuple) and batch and isinstance(batch[-1], dict)
                named = positional.pop() if together else {}
                try:
                    call(*positional, **named)
                except TypeError as error:
                    # Python's own message does not mention data.
                    if "required" in str(error) or "multiple values" in str(error):
                        raise TypeError(
                            f"data: given {len(positional)} argument(s) a batch; the model says: "
                            f"{error}. Make each batch a tuple of its arguments, those by name in "
                            'a dict at the end: data=[(x, {"forced": forced})]. Leave targets out.'
                        ) from error
                    raise
        if positional is None:
            hint = "A generator gives its batches only once: make a new one, or leave data out."
            refuse("data", "nothing to iterate over", "a batch or more", hint)
        for small, pairs in sums.items():
            wrong, size = map(sum, zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
            relative = math.sqrt(wrong / size) if size else math.inf if wrong else 0.0
            small.error = relative if pairs else None


def compression(value: Any) -> Any:
    """The ``Compression`` for a layer or model; None for other objects."""
    # Layers of Keras may be modules of torch: the first class that is known decides.
    return next((_KNOWN[kind] for kind in type(value).__mro__ if kind in _KNOWN), None)


@contextmanager
def replaced(values: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Sets attributes within the context: triples of an object, a name and a value."""
    with ExitStack() as stack:
        for owner, name, value in values:
            known = vars(owner)  # past what frameworks do when an attribute is set
            restore = known.__setitem__ if name in known else known.pop
            stack.callback(restore, name, known.get(name))
            known[name] = value
        yield


def arguments(layer: Any, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The arguments of such a layer besides its cell, for a layer of other sizes."""
    named = {name: size for name, size in sizes.items() if name != ONE}
    counts = {"hidden_size" if name == "H" else name: size for name, size in named.items()}
    return {name: getattr(layer, name) for name in _ARGUMENTS} | counts


def array_of(weight: Any) -> Array:
    """An array of the framework, with its gradient."""
    return getattr(weight, "value", weight)


def sharded(array: Any) -> bool:
    """Whether an array is a ``DTensor`` of torch, of which each process may hold a part."""
    return hasattr(array, "device_mesh")


def numbers(weight: Any) -> npt.NDArray[np.float64]:
    """A NumPy array with the values of a weight."""
    if sharded(array_of(weight)):
        hint = "Compress the layer first, then shard it."
        refuse("layer", "one whose weights are sharded (DTensor)", "whole weights", hint)
    array: npt.NDArray[np.float64] = namespace(array_of(weight)).numbers(array_of(weight))
    return array


def check_optimizer(optimizer: Any, trains: bool, follows: bool, remedy: str) -> None:
    """Refuses an optimizer that does not train the layer, or cannot follow its compression."""
    kind = type(optimizer).__name__
    if not trains:
        given, hint = f"{kind} without parameters of the layer", "Leave it out if there is none."
        refuse("optimizer", given, "the optimizer that trains the layer", hint)
    if not follows:
        given = f"{kind}, whose state does not have a number for each number of a parameter"
        refuse("optimizer", given, "one like Adam or SGD", f"Leave it out, and {remedy}.")
