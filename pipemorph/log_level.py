"""Log level of all processes, from the environment variable ``PIPEMORPH_LOG``."""

from __future__ import annotations

import os

from pipemorph.errors import InputError, one_line

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
VARIABLE = "PIPEMORPH_LOG"


def read_log_level() -> str:
    """Level of :mod:`logging`, by default INFO. Raises :class:`InputError` for other values."""
    given = os.environ.get(VARIABLE) or "INFO"
    if given.upper() not in LEVELS:
        raise InputError(f"{VARIABLE} is {one_line(given)!r}; expected one of {', '.join(LEVELS)}")
    return given.upper()
