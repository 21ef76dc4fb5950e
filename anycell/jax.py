"""There are no layers for JAX as yet: importing this says what there is."""

from anycell.requirement import absent

raise ModuleNotFoundError(f"No module named {__name__!r}. {absent('jax')}", name=__name__)
