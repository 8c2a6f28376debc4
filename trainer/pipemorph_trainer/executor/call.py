"""How a call of ``step`` or ``evaluate`` begins on a stage."""

from __future__ import annotations

from typing import NamedTuple


class Start(NamedTuple):
    """What a stage knows at the beginning of a call.

    ``shapes_from_above``, ``shapes_to_below``: whether shapes are exchanged with this neighbour.
    ``refused``: the batch of this stage or of a stage above does not fit. ``cut_off``: a stage
    above refused, so that nothing comes from above.
    """

    shapes_from_above: bool = False
    shapes_to_below: bool = False
    refused: bool = False
    cut_off: bool = False


AS_BEFORE = Start()
"""Nothing has changed since the last call."""


class Generations(NamedTuple):
    """Number of shape exchanges so far with each neighbour."""

    above: int = 0
    below: int = 0


FIRST = Generations()
"""No shapes were exchanged."""


def name_call(iteration: int, evaluation: bool) -> str:
    """Name of a call of ``step`` or ``evaluate`` for messages."""
    return (
        f"the evaluation before iteration {iteration}" if evaluation else f"iteration {iteration}"
    )
