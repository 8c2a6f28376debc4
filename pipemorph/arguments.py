"""Types of command-line arguments, which refuse numbers outside their range."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

from pipemorph.errors import one_line

LONGEST_SECONDS = 1e9
"""Upper limit of a duration that needs no other: 31 years."""
_DECIMAL = re.compile(r"\d{1,18}(\.\d{0,18})?(e[+-]?\d{1,3})?", re.ASCII | re.IGNORECASE)


def _shown(text: str) -> str:
    return one_line(repr(text), 40)


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an argument from ``least`` to ``most``, both included; None: without upper limit.
    ``least`` is 0 or more."""
    expected = f"of at least {least}" if most is None else f"from {least} to {most}"
    digits = max(18, len(str(most or 0)))

    def parse(text: str) -> int:
        # int() refuses thousands of digits with an error of its own, which argparse does not show.
        if text.isascii() and text.isdigit() and len(text) <= digits:
            number = int(text)
            if least <= number and (most is None or number <= most):
                return number
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not a whole number {expected}")

    return parse


def number(least: float, most: float) -> Callable[[str], float]:
    """The type of an argument from ``least`` to ``most``, both included; ``least`` is 0 or more.
    Refuses ``nan`` and ``inf``, which float() accepts."""

    def parse(text: str) -> float:
        if _DECIMAL.fullmatch(text) and least <= float(text) <= most:
            return float(text)
        raise argparse.ArgumentTypeError(
            f"{_shown(text)} is not a number from {least:.15g} to {most:.15g}"
        )

    return parse


duration = number(0.0, LONGEST_SECONDS)
"""A number of seconds."""
port = whole_number(0, 65535)
"""A port to listen on; 0 for any that is free."""
