"""Form in which experiments run: short or full."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class RunForm(NamedTuple):
    """Form of a comparison. ``full``: more iterations, traces, delays and problems; ``note``:
    receives a line when a long part begins."""

    full: bool = False
    note: Callable[[str], None] = lambda _: None
