"""Cells read from a framework's own code: equations, units, their text as an ``@cell``, the proof.

Frontends record the user's step, and have a table of their framework's operations; what is here
knows no framework.
"""

from anycell.read.arrays import Arrays
from anycell.read.body import Body, Equation, Reader, Rule, Values, Variable, row
from anycell.read.functions import known
from anycell.read.places import definition
from anycell.read.reading import STATES, Reading, one_way
from anycell.read.short import SHORT, large, short
from anycell.read.trees import leaves, mapped
from anycell.read.units import Outer, Refused, Value

__all__ = [
    "SHORT", "STATES", "Arrays", "Body", "Equation", "Outer", "Reader", "Reading", "Refused",
    "Rule", "Value", "Values", "Variable", "definition", "known", "large", "leaves", "mapped",
    "one_way", "row", "short",
]  # fmt: skip
