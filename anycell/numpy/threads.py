"""The largest number of threads of a call on NumPy's arrays.

``threadpoolctl.threadpool_limits`` limits the threads of NumPy's BLAS, and so of ``a @ b``. A layer
follows: while BLAS has fewer threads than at this import, a layer takes no more than BLAS.
``OPENBLAS_NUM_THREADS`` is no such limit, because it is set before.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable

from anycell.engines import cpu

# The functions of OpenBLAS, as NumPy's wheels and other distributions name them, and of MKL.
_NAMES = (
    "scipy_openblas_get_num_threads64_", "scipy_openblas_get_num_threads",
    "openblas_get_num_threads64_", "openblas_get_num_threads", "MKL_Get_Max_Threads",
)  # fmt: skip


def _of_blas() -> Callable[[], int]:
    """Returns the function that says how many threads NumPy's BLAS may take."""
    for core in ("numpy._core", "numpy.core"):  # NumPy 2, and before
        try:
            extension = importlib.import_module(f"{core}._multiarray_umath")
            library = ctypes.PyDLL(extension.__file__)  # and the libraries that it is linked to
        except (ImportError, OSError, TypeError):
            continue
        for name in _NAMES:
            if hasattr(library, name):
                return library[name]
    return lambda: cpu.threads.MOST  # Apple's, or none that can be asked


_blas = _of_blas()
# Returns the largest number of threads for a call. Not one more Python function: calls are counted.
current = functools.partial(cpu.threads.current, _blas, _blas())
