"""Types of command-line arguments that reject numbers outside their range."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable

from pipemorph.errors import InputError, one_line

LONGEST_SECONDS = 1e9
"""Upper limit of durations without one of their own: 31 years."""
_DEVICE = r"[A-Za-z0-9_.-]{1,63}(:\d{1,2})?"
_DECIMAL = re.compile(r"\d{1,18}(\.\d{0,18})?(e[+-]?\d{1,3})?", re.ASCII | re.IGNORECASE)


def _quote_argument(text: str) -> str:
    return one_line(repr(text), 40)


def whole_number_type(least: int, most: int | None = None) -> Callable[[str], int]:
    """Type of whole numbers from ``least`` to ``most``, both included; None: no upper limit.
    ``least`` is 0 or more."""
    expected = f"of at least {least}" if most is None else f"from {least} to {most}"
    digits = max(18, len(str(most or 0)))

    def parse(text: str) -> int:
        # int() rejects thousands of digits with an error that argparse does not show.
        if text.isascii() and text.isdigit() and len(text) <= digits:
            number = int(text)
            if least <= number and (most is None or number <= most):
                return number
        raise argparse.ArgumentTypeError(
            f"{_quote_argument(text)} is not a whole number {expected}"
        )

    return parse


def number_type(least: float, most: float) -> Callable[[str], float]:
    """Type of numbers from ``least`` to ``most``, both included; ``least`` is 0 or more. Rejects
    ``nan`` and ``inf``, which float() accepts."""

    def parse(text: str) -> float:
        if _DECIMAL.fullmatch(text) and least <= float(text) <= most:
            return float(text)
        raise argparse.ArgumentTypeError(
            f"{_quote_argument(text)} is not a number from {least:.15g} to {most:.15g}"
        )

    return parse


duration_type = number_type(0.0, LONGEST_SECONDS)
"""Number of seconds."""
port_type = whole_number_type(0, 65535)
"""Port to listen on; 0 for any free one."""


def add_port_arguments(parser: argparse._ActionsContainer, what: str, default: str) -> None:
    """Add ``--device`` and ``--gid-index``, for ports of RDMA devices. ``what``: purpose of a
    device, for the help; ``default``: the choice without ``--device``."""
    parser.add_argument(
        "--device",
        metavar="DEVICE[:PORT]",
        action="append",
        default=[],
        help=f"{what}, such as mlx5_0 or mlx5_0:2; repeatable (default: {default})",
    )
    parser.add_argument(
        "--gid-index",
        type=whole_number_type(0, 255),
        metavar="N",
        help="index in the GID table (default: a routable RoCE v2 entry)",
    )


def check_devices(devices: Iterable[str]) -> None:
    """Raise :class:`InputError` for an impossible device name."""
    for device in devices:
        if not re.fullmatch(_DEVICE, device):
            raise InputError(f"--device: {device!r} is not a device such as mlx5_0 or mlx5_0:2")
