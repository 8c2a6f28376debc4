"""Budgets of processor seconds, and the speed of this machine against the one they are set for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from gate.verdict import PartResult

REFERENCE_SECONDS = 0.045
"""Processor seconds of :func:`_compute` on one of two idle cores at which the budgets were set."""
ROUNDS = 5


def slowness() -> float:
    """Processor seconds of this machine per one of the reference's, at least 1: a slow machine gets
    more, a fast one no less."""
    least = min(_timed() for _ in range(ROUNDS))
    return max(1.0, least / REFERENCE_SECONDS)


def _timed() -> float:
    began = time.process_time()
    _compute()
    return time.process_time() - began


def _compute() -> int:
    """Interpreted code with small objects, as most of the tests run."""
    found: dict[int, int] = {}
    for number in range(200_000):
        found[number * 7919 % 4096] = number ^ len(found)
    return sum(sorted(found.values()))


def over_budget(
    parts: Sequence[PartResult], budgets: Mapping[str, float], most: float, factor: float
) -> str | None:
    """A sentence if the parts together took more than ``most`` processor seconds times ``factor``:
    with the part that took the most above its own budget. None if they did not."""
    took = sum(part.processor_seconds for part in parts)
    if took <= most * factor:
        return None
    grown = max(parts, key=lambda part: part.processor_seconds - budgets[part.name] * factor)
    return (
        f"over budget: {took:.0f} processor seconds, at most {most * factor:.0f} expected on this "
        f"machine; `{grown.name}` took {grown.processor_seconds:.0f} of "
        f"{budgets[grown.name] * factor:.0f}: make its new tests cheaper or mark them `full`"
    )
