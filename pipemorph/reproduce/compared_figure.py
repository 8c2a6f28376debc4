"""A published figure beside ours, and the reason where they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from pipemorph.reproduce.published import Spread, make_exact

Method = Literal["simulated", "emulated", "planned"]
"""``simulated``: planner and simulator, or the replayed control loop. ``emulated``: ranks that hold
for their op times and compute nothing; executor, transports and control loop are real.
``planned``: plans of this planner, timed here."""

TOLERANCE = 0.10
"""Figures agree if ours is within this fraction of the published spread."""


class Reason(NamedTuple):
    """Reason of a difference. ``name``: short; ``sentence``: the reason, for all figures that it
    explains; ``check``: what the figures say about it in this case."""

    name: str
    sentence: str
    check: str


class RunForm(NamedTuple):
    """Form in which experiments run. ``full``: with more iterations, traces, delays and problems;
    ``note``: receives a line when a long part begins."""

    full: bool = False
    note: Callable[[str], None] = lambda _: None


Explain = Callable[[], Reason | None]
"""Function that explains a difference; None if the figures do not support its reason."""


@dataclass(frozen=True)
class ComparedFigure:
    """Figure of an experiment. ``case``: its conditions; ``way``: how the job runs. ``published``:
    None where the paper has no such figure. ``reason``: why ours differs; None if they agree, or if
    no reason holds."""

    case: str
    way: str
    unit: str
    published: Spread | None
    measured: Spread
    method: Method
    reason: Reason | None = None
    limit: bool = False
    """True if the published figure is a limit: ours agrees if it is no larger."""
    at: float | None = None
    """Delay in milliseconds over which the page draws figures of one way; None: not drawn."""

    @property
    def agrees(self) -> bool:
        """True if our spread is within :data:`TOLERANCE` of the published one, or our mean below
        the limit."""
        if self.published is None:
            return True
        low, high = self.published.least * (1 - TOLERANCE), self.published.most * (1 + TOLERANCE)
        if self.limit:
            return self.measured.mean <= high
        return self.measured.least <= high and self.measured.most >= low

    @property
    def explained(self) -> bool:
        """True if ours agrees or has a reason."""
        return self.agrees or self.reason is not None

    @property
    def difference(self) -> float | None:
        """Our mean over the published one, less 1; None without a published one."""
        if self.published is None or not self.published.mean:
            return None
        return self.measured.mean / self.published.mean - 1

    def to_json(self) -> dict[str, Any]:
        """JSON fields."""
        return {
            "case": self.case,
            "way": self.way,
            "unit": self.unit,
            "published": self.published and self.published._asdict(),
            "limit": self.limit,
            "measured": self.measured._asdict(),
            "difference": self.difference,
            "method": self.method,
            "at": self.at,
            "agrees": self.agrees,
            "reason": self.reason and self.reason._asdict(),
        }


def compare(
    case: str,
    way: str,
    published: Spread | float | None,
    measured: Spread | float,
    *,
    unit: str = "ms",
    method: Method = "simulated",
    limit: bool = False,
    at: float | None = None,
    reasons: Iterable[Explain] = (),
) -> ComparedFigure:
    """Compare a figure. ``reasons``: explanations to try in turn if it does not agree."""
    theirs = make_exact(published) if isinstance(published, float | int) else published
    ours = make_exact(measured) if isinstance(measured, float | int) else measured
    found = ComparedFigure(case, way, unit, theirs, ours, method, limit=limit, at=at)
    if found.agrees:
        return found
    reason = next((holds for explain in reasons if (holds := explain()) is not None), None)
    return replace(found, reason=reason)
