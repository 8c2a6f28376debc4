"""Number of random examples that a run draws."""

import os


def examples(normally: int) -> int:
    """Number of examples of a property: ``normally``, times the factor of ``make soak``."""
    return max(1, round(normally * float(os.environ.get("PIPEMORPH_TEST_EXAMPLES", "1"))))
