"""What every layer is: parameters by name, their gradients, and a way to keep them."""

from __future__ import annotations

import os
import secrets
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating]


class Layer:
    """Named parameters and their gradients.

    Attributes:
        dtype: of everything the layer computes.
    """

    dtype: np.dtype[Any]

    def __init__(self, parameters: dict[str, Array]) -> None:
        self._parameters = parameters
        self._grads: dict[str, Array] = {}
        self._writes = 0  # to the parameters, all that go through a method of ours
        self._prepared: Any = None

    @property
    def parameters(self) -> Mapping[str, Array]:
        """The learned arrays by name. Write into them: ``layer.parameters["bias"][:] = 0``."""
        return MappingProxyType(self._parameters)

    @property
    def grads(self) -> Mapping[str, Array]:
        """The gradients of the last ``backward``, by the same names; empty before the first."""
        return MappingProxyType(self._grads)

    def __getstate__(self) -> dict[str, Any]:
        # A copy, and a pickle, is of the layer, not of a pass that is under way.
        return {**self.__dict__, "_grads": {}, "_saved": None, "_prepared": None}

    def set_parameters(self, values: Mapping[str, npt.ArrayLike]) -> None:
        """Copies ``values`` into the parameters; all of them, or on any mismatch none.

        Args:
            values: an array for every parameter, by name; converted to the layer's dtype.

        Raises:
            KeyError: for names that are missing or unknown.
            ValueError, TypeError: for an array of another shape, or not of real numbers.

        From a PyTorch layer::

            layer.set_parameters({k: v.numpy() for k, v in module.state_dict().items()})
        """
        missing = self._parameters.keys() - values.keys()
        unknown = values.keys() - self._parameters.keys()
        if missing or unknown:
            found = [f"missing {', '.join(sorted(missing))}"] * bool(missing)
            found += [f"unknown {', '.join(sorted(unknown))}"] * bool(unknown)
            expected = ", ".join(self._parameters)
            raise KeyError(f"parameters: given {'; '.join(found)}; expected {expected}.")
        arrays = {name: np.asarray(values[name]) for name in self._parameters}
        for name, parameter in self._parameters.items():
            given = arrays[name]
            if given.shape != parameter.shape:
                raise ValueError(f"{name}: given shape {given.shape}, expected {parameter.shape}.")
            if given.dtype.kind not in "fiu":
                raise TypeError(f"{name}: given dtype {given.dtype}, expected real numbers.")
        self._writes += 1
        for name, parameter in self._parameters.items():
            parameter[...] = arrays[name]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the parameters to ``path`` as an ``.npz`` archive, without pickle.

        The file appears complete or not at all; the name is taken as it is given.

        Raises:
            FileNotFoundError: where there is no such folder.
        """
        target = Path(os.path.realpath(path))  # what a link points at
        if not target.parent.is_dir():
            given = f"path: given {os.fspath(path)!r}"
            raise FileNotFoundError(f"{given}; expected one in a folder that exists.")
        # Beside the target, and with the permissions of any new file, as tempfile's has not.
        beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            with open(beside, "xb") as file:
                np.savez(file, **self._parameters)  # type: ignore[arg-type]
            os.replace(beside, target)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise

    def load(self, path: str | os.PathLike[str]) -> None:
        """Reads parameters that ``save`` wrote; on any mismatch the layer stays as it is.

        Nothing in the file is executed: archives that hold pickled objects are refused.

        Raises:
            FileNotFoundError: where there is no such file.
            KeyError, ValueError: naming the parameter, what was given and what was expected.
        """
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
                values = {name: archive[name] for name in archive.files}
        except (ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"path: given {os.fspath(path)!r}, which is no .npz archive of plain arrays "
                f"({error}); expected a file written by {type(self).__name__}.save()."
            ) from error
        self.set_parameters(values)
