"""Placeholder for layers for JAX, which do not exist yet: its import error says what to use."""

from anycell.requirement import absent

raise ModuleNotFoundError(f"No module named {__name__!r}. {absent('jax')}", name=__name__)
