"""The base of every layer: parameters by name, their gradients, and a way to keep them."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from anycell.layer.checks import refuse
from anycell.numpy import archive, check
from anycell.numpy.check import numpy_dtype
from anycell.numpy.framework import on_lines
from anycell.numpy.streaming import Again, Packed, writing
from anycell.plan.dtype import dtypes

Array = npt.NDArray[np.floating]


class Layer:
    """Named parameters and their gradients.

    Attributes:
        dtype: the dtype of everything that the layer computes.
    """

    dtype: np.dtype[Any]

    def __init__(
        self, parameters: dict[str, Array], statistics: Mapping[str, Array] | None = None
    ) -> None:
        self._parameters = {name: on_lines(array) for name, array in parameters.items()}
        self._statistics = dict(statistics or {})
        self._grads: dict[str, Array] = {}
        self._prepared: Packed | None = None
        self._calls: dict[Any, Again | None] = {}
        self._saved: Any = None

    if not TYPE_CHECKING:  # each class tells type checkers that a call is its `forward`

        def __call__(self, *args: Any, **options: Any) -> Any:
            """Calls ``forward``."""
            return self.forward(*args, **options)

    @property
    def parameters(self) -> Mapping[str, Array]:
        """The learned arrays by name. Write into them: ``layer.parameters["bias"][:] = 0``."""
        return MappingProxyType(self._parameters)

    @property
    def arrays(self) -> Mapping[str, Array]:
        """All saved arrays by name: the parameters, and the statistics of layers that have any."""
        return MappingProxyType({**self._parameters, **self._statistics})

    @property
    def grads(self) -> Mapping[str, Array]:
        """The gradients of the last ``backward``, by the same names; empty before the first."""
        return MappingProxyType(self._grads)

    def _last_forward(self) -> Any:
        """Returns what ``forward`` kept for ``backward``.

        Raises:
            RuntimeError: if no ``forward(..., training=True)`` came before.
        """
        if self._saved is None:
            raise RuntimeError(
                f"{type(self).__name__}.backward() needs a forward(x, training=True) before it, "
                "and no other call of forward between the two."
            )
        return self._saved

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles carry the layer, not a pass in progress.
        return {**self.__dict__, "_grads": {}, "_saved": None, "_prepared": None, "_calls": {}}

    def set_parameters(self, values: Mapping[str, npt.ArrayLike]) -> None:
        """Copies ``values`` into the parameters: all of them, or none if any does not fit.

        Args:
            values: an array for every parameter, by name; converted to the layer's dtype. They may
                be parameters of this very layer.

        Raises:
            KeyError: for names that are missing or unknown.
            ValueError, TypeError: if ``values`` is not a mapping, or an array has another shape or
                no real numbers.

        From a PyTorch layer::

            layer.set_parameters(module.state_dict())
        """
        self._check_names(check.mapping("values", values, "arrays by the names of parameters"))
        arrays = {name: check.numbers(name, values[name]) for name in self.arrays}
        for name, array in arrays.items():
            self._check_array(name, array)
        # Copies all values before the first write: a value may be another parameter.
        copies = {name: np.array(array, self.arrays[name].dtype) for name, array in arrays.items()}
        with writing(self.arrays):
            for name, parameter in self.arrays.items():
                parameter[...] = copies[name]

    def state_dict(self) -> dict[str, Array]:
        """Returns copies of the current ``arrays``."""
        return {name: array.copy() for name, array in self.arrays.items()}

    def load_state_dict(self, values: Mapping[str, npt.ArrayLike]) -> None:
        """Loads a ``state_dict`` of a layer or of a PyTorch module; see ``set_parameters``."""
        self.set_parameters(values)

    def _check_names(self, named: Mapping[str, object]) -> None:
        missing = self.arrays.keys() - named.keys()
        unknown = named.keys() - self.arrays.keys()
        if missing or unknown:
            faults = [f"missing {', '.join(sorted(missing))}"] * bool(missing)
            faults += [f"unknown {', '.join(sorted(map(str, unknown)))}"] * bool(unknown)
            expected = ", ".join(self.arrays)
            rounded = any(str(name).endswith("_scales") for name in unknown - missing)
            hint = " They are weights of 8 bits: load them into compress.quantize(layer)." * rounded
            if any(name.startswith("bias_hh") for name in missing):
                hint += " If your model has one bias, pass it as bias_ih, and zeros as bias_hh."
            raise KeyError(f"parameters: given {'; '.join(faults)}; expected {expected}.{hint}")

    def _check_array(self, name: str, array: Array | archive.Header) -> None:
        expected = self.arrays[name].shape
        if array.shape != expected:
            raise ValueError(f"{name}: given shape {array.shape}, expected {expected}.")
        known = array.dtype.kind in "fiu" or array.dtype.name in dtypes("cpu")
        if self.arrays[name].dtype == np.int8 and array.dtype != np.int8:
            hint = "Load them into a float32 layer, and quantize it."
            refuse(name, f"dtype {array.dtype}", "int8, of a quantized layer", hint, TypeError)
        if not (known or _nameless(array)):
            raise TypeError(f"{name}: given dtype {array.dtype}, expected real numbers.")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the parameters to ``path`` as an ``.npz`` archive, without pickle.

        The file appears complete or not at all; the name is taken as it is given.

        Raises:
            FileNotFoundError: if the folder does not exist.
            FileExistsError: if something other than a file has that name.
            TypeError, ValueError: if ``path`` is not a path.
            OSError: if the file cannot be written; an older file of that name stays.
        """
        target = Path(os.path.realpath(check.path(path)))  # what a link points at
        given = f"path: given {os.fspath(path)!r}"
        if not target.parent.is_dir():
            raise FileNotFoundError(f"{given}; expected one in a folder that exists.")
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(target.stat().st_mode):  # a folder, a device
                raise FileExistsError(f"{given}, which is not a file; expected another name.")
        # Next to the target, and without tempfile, whose files have other permissions.
        temporary = target.with_name(f".anycell-{secrets.token_hex(8)}")
        try:
            with open(temporary, "xb") as file:
                np.savez(file, **self.arrays)  # type: ignore[arg-type]
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def load(self, path: str | os.PathLike[str]) -> None:
        """Reads parameters that ``save`` wrote; on any mismatch the layer does not change.

        Nothing in the file is executed: archives that hold pickled objects are refused.

        Raises:
            OSError: if the file does not exist, or cannot be read.
            ValueError: if the file is not such an archive, or is damaged.
            KeyError, ValueError, TypeError: naming the parameter, what was given and what was
                expected.
        """
        try:
            with open(check.path(path), "rb") as file:
                values = archive.read(file, self._check_headers)
        except archive.Damaged as error:
            raise ValueError(
                f"path: given {os.fspath(path)!r}, which is not an .npz archive of plain arrays "
                f"({error}); expected a file written by {type(self).__name__}.save()."
            ) from error
        for name, value in values.items():
            if _nameless(value):
                values[name] = value.view(numpy_dtype("bfloat16"))
        self.set_parameters(values)

    def _check_headers(self, headers: Mapping[str, archive.Header]) -> None:
        self._check_names(headers)
        for name, header in headers.items():
            self._check_array(name, header)


def _nameless(array: Array | archive.Header) -> bool:
    """Whether an array is bfloat16 read from a file, which keeps only the size of dtypes that NumPy
    lacks.
    """
    return array.dtype == np.dtype("V2")
