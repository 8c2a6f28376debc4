"""Reasons why published and simulated iterations differ, each checked against the figures.

A reason is None if the figures do not support it within the tolerance.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipemorph.reproduce.compared_figure import TOLERANCE, Explain, Reason
from pipemorph.reproduce.pipeline_simulation import measure_outside, simulate_way
from pipemorph.reproduce.published import MeasuredIteration, Spread

NO_OVERLAP = (
    "no overlap",
    "Without delegation, their stages compute nothing while a message of theirs travels over a slow"
    " link, so an iteration takes at least N × (a stage's ops + two delays). Here a stage computes"
    " until two of its sends are under way.",
)
COPYING = (
    "copying",
    "Their delegation takes processor or device time for each message at both ends of a slow link."
    " Ours is charged none in these simulations. The time is fitted to their other delegated runs"
    " of the same model.",
)
"""Names and sentences of reasons."""

DELEGATED_WAYS = ("delegated", "adapted")
MOST_COPYING = 100.0
"""Longest copies of a message that are tried, milliseconds."""
BISECTIONS = 12


def explain_blocked_stage(found: MeasuredIteration, way: str) -> Reason | None:
    """Check that a stage at a slow link computes nothing while its messages travel: an iteration
    then takes at least N times its ops and two delays; of a stage between two slow links, up to N
    times its ops and four."""
    model, delay, outside = found.model, max(found.delays.values()), measure_outside(found.model)
    ops = list(zip(model.forward, model.backward_input, model.backward_weight, strict=True))
    ends = [min(found.delays), max(found.delays) + 1]
    between = [link for link in found.delays if link - 1 in found.delays]
    for stage, most_delays in (*((end, 2) for end in ends), *((each, 4) for each in between)):
        busy = sum(ops[stage])
        least = model.microbatches * (busy + 2 * delay)
        most = model.microbatches * (busy + most_delays * delay)
        if is_near(found.times[way], least, most + outside):
            delays, times = f"2 × {delay:g}", f"{least:.0f}"
            if most > least:
                delays, times = f"2 to 4 × {delay:g}", f"{least:.0f} to {most:.0f}"
            return Reason(
                *NO_OVERLAP,
                f"stage {stage}: {model.microbatches} × ({busy:g} + {delays}) ms = {times} ms,"
                f" and {outside:.0f} ms outside its ops",
            )
    return None


def explain_copying(
    found: MeasuredIteration, way: str, others: Iterable[MeasuredIteration]
) -> Reason | None:
    """Check that the authors' delegation takes processor or device time for each message, as much
    as in the other delegated runs of the same model."""
    fitted = [
        copying
        for other in others
        for name in DELEGATED_WAYS
        if name in other.times
        and (other, name) != (found, way)
        and (copying := fit_copying(other, name)) is not None
    ]
    if not fitted:
        return None
    least, most = min(fitted), max(fitted)
    times = [simulate_way(found.model, way, found.delays, copying) for copying in (least, most)]
    if not is_near(found.times[way], *times):
        return None
    return Reason(
        *COPYING,
        f"{least:.1f} to {most:.1f} ms per message in {len(fitted)} other runs: {times[0]:.0f} to"
        f" {times[1]:.0f} ms",
    )


def fit_copying(found: MeasuredIteration, way: str) -> float | None:
    """Milliseconds per message at both ends of the slow links with which the simulated iteration
    takes as long as the published one; None if none does."""
    wanted = found.times[way].mean

    def is_too_short(copying: float) -> bool:
        return simulate_way(found.model, way, found.delays, copying) < wanted

    low, high = 0.0, MOST_COPYING
    if not is_too_short(low) or is_too_short(high):
        return None
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_too_short(middle) else (low, middle)
    return low


def is_near(published: Spread, least: float, most: float) -> bool:
    """True if a range comes within the tolerance of the published spread."""
    low, high = published.least * (1 - TOLERANCE), published.most * (1 + TOLERANCE)
    return least <= high and most >= low


def list_explanations(
    found: MeasuredIteration, way: str, others: Iterable[MeasuredIteration]
) -> tuple[Explain, ...]:
    """Reasons that may explain a different iteration time of a way. ``others``: iterations of the
    same model."""
    if way in DELEGATED_WAYS:
        return (lambda: explain_copying(found, way, others),)
    return (lambda: explain_blocked_stage(found, way),)
