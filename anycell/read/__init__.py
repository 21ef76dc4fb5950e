"""Cells read from a framework's own code: units, their text as an ``@cell``, and the proof.

Frontends trace the user's step and have a table of their framework's operations; what is here
knows no framework.
"""

from anycell.read.printer import read
from anycell.read.reading import Reading
from anycell.read.units import Graph, Outer, Refused, Value

__all__ = ["Graph", "Outer", "Reading", "Refused", "Value", "read"]
