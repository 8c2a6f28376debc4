"""How much of what can be drawn at random a run draws."""

import os


def examples(normally: int) -> int:
    """How many examples a property gets: ``normally``, times what ``make soak`` asks for."""
    return max(1, round(normally * float(os.environ.get("PIPEMORPH_TEST_EXAMPLES", "1"))))
