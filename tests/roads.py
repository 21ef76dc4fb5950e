"""Choices of a pass that do not change results; tests cover both sides of each."""

from collections.abc import Callable

from anycell.engines import cpu
from anycell.layer.form import Form


def _entry(form: Form, name: str) -> int:
    return form.entries[form.kernel.shared[name]]


ROADS: dict[str, Callable[[Form], bool]] = {
    "the kernel multiplies the input": lambda form: form.inputs > 0,
    "a single step": lambda form: form.single,
    "a single step of few rows": lambda form: form.few,
    "several chunks": lambda form: form.chunk < form.steps,
    "several threads": lambda form: _entry(form, "parts") > 1,
    "threads split the units": lambda form: _entry(form, "units_split") > 0,
    "threads pack the weights": lambda form: (
        form.packed > cpu.WORTH_SPREADING * form.kernel.itemsize
    ),
}
