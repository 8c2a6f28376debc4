"""Types of command-line options, which refuse values outside their range."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an option from ``least`` to ``most``, both included; None: without upper limit.
    ``least`` is 0 or more."""
    expected = f"of at least {least}" if most is None else f"from {least} to {most}"

    def parse(text: str) -> int:
        # int() refuses thousands of digits with an error of its own, which argparse does not show.
        if text.isascii() and text.isdigit() and len(text) <= 18:
            number = int(text)
            if least <= number and (most is None or number <= most):
                return number
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {expected}")

    return parse


port = whole_number(0, 65535)
"""A port to listen on; 0 for any that is free."""
