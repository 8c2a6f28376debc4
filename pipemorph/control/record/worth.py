"""What adapting is worth so far: the time that the job would have taken longer without it.

An iteration that runs cannot be run again under another plan. So each decision predicts two plans
on the same measurements: the one of the start, which the job would still have, and the one that it
has. Errors of the model are in both and mostly cancel in the difference, which counts for each
iteration until the next decision. What each change of plan cost is taken off.

How far that is from the truth is known from the changes themselves: before each one its gain is
predicted, after it measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipemorph.wire import AdaptationRecord

LEAST_ERROR = 0.15
"""Part of what was saved that is never certain: how long a plan takes that does not run is only
predicted. The counter was that far from the difference to a run that does not adapt."""


@dataclass(frozen=True)
class Worth:
    """Seconds that a job's iterations took less than with the plan of the start; negative if they
    took longer.

    ``error``: how far from the truth that may be, in seconds: each change's part by the relative
    difference of its promised and measured gain, at least :data:`LEAST_ERROR`, the whole part where
    nothing was measured.
    """

    seconds: float = 0.0
    error: float = 0.0

    def __add__(self, other: Worth) -> Worth:
        return Worth(self.seconds + other.seconds, self.error + other.error)

    def record(self, ranks: int) -> dict[str, float]:
        """For ``report.json``. ``ranks``: of the job, each of which waits while an iteration takes
        longer."""
        return {
            "seconds": self.seconds,
            "error": self.error,
            "rank_hours": self.seconds * ranks / 3600,
        }


def worth(records: Iterable[AdaptationRecord]) -> Worth:
    """What some changes of plan were worth together."""
    return sum(map(_of, records), Worth())


def _of(record: AdaptationRecord) -> Worth:
    part = abs(record.saved)
    if record.promised and record.measured is not None:
        wrong = abs(1 - record.measured / record.promised)
        part *= min(1.0, max(LEAST_ERROR, wrong))
    return Worth(record.saved - (record.change_seconds or 0.0), part)


def count(record: AdaptationRecord, iteration: int) -> None:
    """An iteration under the record's plan has finished. Those before it, of which nothing was
    heard, were under this plan too. One that ran again after a failure does not count again."""
    before = iteration - 1 if record.saved_until is None else record.saved_until
    record.saved_until = max(before, iteration)
    record.saved += (record.saving or 0.0) * (record.saved_until - before)


def revise(record: AdaptationRecord, saving: float, since: int) -> None:
    """An iteration under the record's plan saves ``saving`` now, and has from iteration ``since``
    on, the first in which the present state showed. That one counts as a whole: where the state
    began is not known more exactly, and most often it is nearly all of it."""
    if record.saved_until is not None and record.applied_at_iteration is not None:
        before = max(since, record.applied_at_iteration) - 1
        late = max(0, record.saved_until - before)
        record.saved += (saving - (record.saving or 0.0)) * late
    record.saving = saving
