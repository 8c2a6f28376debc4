"""The gate of ``make test``: which failures a second run may excuse, and what the run says at its
end.

Tests import from here what they need of it. ``tests/all.py`` and ``tests/soak.py`` run
:mod:`gate.parts` and print the table of :mod:`gate.verdict`.
"""

from gate.amounts import examples
from gate.final import AlwaysRed, always_red, same_bits

__all__ = ["AlwaysRed", "always_red", "examples", "same_bits"]
