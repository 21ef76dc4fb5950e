"""The proof of a reading: what counts as rounding, and what does not."""

import numpy as np
import pytest

from anycell.read.proof import tried


@pytest.mark.parametrize(
    ("step", "reading", "agree"),
    [
        (lambda a: a * 3, lambda a: a + a + a, True),
        (lambda a: np.sin(1e8 * a), lambda a: np.sin(1e3 * a * 1e5), True),
        (lambda a: a, lambda a: a * (1 + 1e-8), False),
        (lambda a: np.sin(1e8 * a), lambda a: np.sin(1e8 * a) * (1 + 1e-5), False),
        (lambda a: np.where(a == 0, 1.0, a), lambda a: a, False),
        (lambda a: a, lambda a: a * np.nan, False),
    ],
)
def test_a_step_that_magnifies_roundings(step, reading, agree):
    def both(states):
        return {"the output": step(states[0])}, {"the output": reading(states[0])}

    reason = tried([(3, 4)], both, "float64")
    assert (reason is None) == agree, reason
