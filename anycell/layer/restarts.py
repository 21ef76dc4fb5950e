"""The steps at which a direction of a layer restores its states."""

from __future__ import annotations

from anycell.lang.namespaces import Array, namespace


def restarts(resets: Array, mask: Array | None, reverse: bool) -> Array:
    """The steps before which a direction restores its states, ``[T, B]``, none under the mask.

    ``resets`` says where episodes start. A direction that runs backwards enters an episode at its
    last step, so it restarts before the step that precedes the start of the next episode. Steps
    under the mask do not count as steps.

    Args:
        resets, mask: ``[T, B]`` flags of any framework, bool or bytes.
        reverse: whether the direction runs from the last step to the first.
    """
    xp = namespace(resets)
    if mask is not None:  # nothing under a mask matters, neither inputs nor resets
        resets = xp.logical_and(resets, mask)
    if not reverse:
        return resets

    def ahead(flags: Array, steps: int) -> Array:
        """The flags that lie so many steps later; none behind the end."""
        return xp.concatenate([flags[steps:], xp.zeros_like(flags[:steps])], axis=0)

    starts = ahead(resets, 1)
    if mask is None:
        return starts
    # Where the next step is under the mask, the flag of the next step that is not. After each turn
    # ``starts`` has looked ``reach`` steps ahead, and ``valid`` says whether one of them is a step.
    valid, reach = ahead(xp.logical_and(mask, mask), 1), 1
    most = 1 << 31 if mask.shape[0] is None else mask.shape[0]  # a graph may not know its steps
    while reach < most:
        further = xp.logical_and(ahead(starts, reach), xp.logical_not(valid))
        starts, valid = xp.logical_or(starts, further), xp.logical_or(valid, ahead(valid, reach))
        reach *= 2
    return xp.logical_and(starts, mask)
