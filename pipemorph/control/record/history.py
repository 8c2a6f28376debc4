"""Records what each change of plan was worth: figures before and after it.

The figures are bubble fraction, iteration time, and peak memory per stage, since a change must not
lower the bubble at the cost of too much memory. The same records go to report.json and to status.

What adapting is worth so far is the time that the job would have taken longer without it. An
iteration that runs cannot be run again under another plan. So each decision predicts two plans on
the same measurements: the one of the start, which the job would still have, and the one that it
has. Errors of the model are in both and mostly cancel in the difference, which counts for each
iteration. Links that change while the plan stays are weighed in the same way, without a decision.
What each change of plan cost is taken off. How far that is from the truth is known from the changes
themselves: before each one its gain is predicted, after it measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from pipemorph.wire import AdaptationRecord, IterationSample

LEAST_ERROR = 0.12
"""Part of what slow links would have cost, or of what was saved if that is more, that is never
certain: how long a plan takes that does not run is only predicted, from delays that are only
measured. In 95 of 100 runs the counter is nearer to the difference to one that does not adapt."""
AFTER = 8
"""Iterations under the new plan in the median of its figures."""
BEFORE = 8
"""Most iterations under the old plan in the median of its figures."""
KEPT_ITERATIONS = 32
"""Enough for the medians before and after a change and for the newest time. Bounded, since a host
has thousands of jobs."""
WITHOUT, ONE_BARRIER, WITH = 24, 4, 10
"""Evidence for another kind of barrier. WITHOUT: iterations without a barrier until none is
expected, of which each with one takes ONE_BARRIER away: some jobs clip gradients only after several
steps. WITH: by how many iterations those with a barrier must be ahead until one is expected.

So none is expected of a job with barriers in less than a fifth of its iterations, and one of a job
with them in more than half; in between, what was expected stays. Barriers may come at random: a job
that waits for the gradient norm only where it is near its bound has them in any share. If that is a
third, either expectation lasts some 6,000 iterations or more: a change costs an iteration, and the
wrong plan a few per cent of each. A change for op times takes 12 iterations, but they do not come
and go like that."""
OPEN_RECORDS = 4
"""Newest records that may still get figures."""
KEPT_RECORDS = 256
KEPT_DECISIONS = 64


class Saving(NamedTuple):
    """Saving of an iteration under a plan, in one state of links. ``seconds``: by how much
    longer it would take under the initial plan; ``fault_cost``: what slow links cost there;
    ``if_well``: like ``seconds``, if no link is slow, which iterations show that take less than
    ``well_below``; that is 0 if measured times do not tell the one state from the other."""

    seconds: float
    fault_cost: float
    if_well: float = 0.0
    well_below: float = 0.0


@dataclass(frozen=True)
class Worth:
    """Seconds that a job's iterations took less than with the plan of the start; negative if they
    took longer.

    ``error``: half of the interval that has the truth in it in 95 of 100 jobs, seconds: of each
    change :data:`LEAST_ERROR` of what slow links would have cost, or what its promised and measured
    gain differ by if that is more; where nothing was measured, what those of the others do.
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
    every = list(records)
    known = [found for each in every if (found := _promise(each)) is not None]
    promised = sum(abs(gain) for gain, _ in known)
    # By all of them together: what a small promise is wrong by says nothing about a large one.
    usual = min(1.0, sum(abs(g - m) for g, m in known) / promised) if promised else 1.0
    return sum((_of(each, usual) for each in every), Worth())


def _promise(record: AdaptationRecord) -> tuple[float, float] | None:
    """The gain that was promised and the measured one; None if there is only one of them."""
    if not record.promised or record.measured is None:
        return None
    return record.promised, record.measured


def _of(record: AdaptationRecord, usual: float) -> Worth:
    """``usual``: what promises are wrong by where nothing was measured."""
    part, found = abs(record.saved), _promise(record)
    wrong = usual if found is None else min(1.0, abs(1 - found[1] / found[0]))
    error = max(wrong * part, LEAST_ERROR * max(part, record.fault_costs))
    return Worth(record.saved - (record.change_seconds or 0.0), error)


class Decision(BaseModel):
    """One decision whether to adapt, and its reason; of kind "outcome": what a change brought."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    at: float
    iteration: int
    kind: Literal["adapt", "return", "revert", "keep", "outcome"]
    reason: str
    line: str
    """The text for a terminal, with a short form of the reason."""
    plan_version: int | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """One finished iteration, stored compactly."""

    index: int
    seconds: float
    loss: float | None
    plan_version: int
    bubble_fraction: float
    outside: float | None = None
    """Seconds before the first op of any rank and after the last; None if unknown, and without a
    barrier, since iterations overlap then."""


class Ledger:
    """Iterations and adaptations of a job. Bounded. Adds figures to records as they arrive."""

    def __init__(self) -> None:
        self.records: deque[AdaptationRecord] = deque(maxlen=KEPT_RECORDS)
        self.decisions: deque[Decision] = deque(maxlen=KEPT_DECISIONS)
        self._iterations: dict[int, Finished] = {}
        self._counted: dict[int, tuple[int, float, float]] = {}
        """Per iteration, the newest ones, the plan version that it ran, and the saving and the cost
        of faults that it counts with."""
        self._savings: dict[int, Saving] = {}
        """Per plan version, what each iteration saves from now on."""
        self._until: dict[int, int] = {}
        """Per plan version, the first iteration that is none of its figures any more."""
        self._last = -1
        self.changes_before, self.before = 0, Worth()
        """Number of changes without a record, and what they were worth."""
        self._barrier: bool | None = None
        self._without = self._with = 0
        """Evidence for none, and for one, since :attr:`barrier` was last found out."""

    @property
    def change_seconds(self) -> float | None:
        """Measured cost of a change of plan: how much longer the first iteration of a new plan took
        than the next ones. Median of the last few changes; None before the first."""
        seen = [each.change_seconds for each in self.records if each.change_seconds is not None]
        return _median(seen[-OPEN_RECORDS:])

    @property
    def worth(self) -> Worth:
        """What all changes of plan were worth so far."""
        return self.before + worth(self.records)

    @property
    def changes(self) -> int:
        """Number of all changes of plan so far."""
        return self.changes_before + len(self.records)

    def append(self, record: AdaptationRecord) -> None:
        """Add the record of a change that is issued now."""
        if len(self.records) == KEPT_RECORDS:
            self.before += worth([self.records[0]])
            self.changes_before += 1
        self.records.append(record)

    def restore(self, records: Iterable[AdaptationRecord], before: int, worth: Worth) -> None:
        """Go on from these records, and from ``before`` changes without one and their worth. The
        number of changes does not fall: the records may be older than the last status."""
        known, self.records = self.changes, deque(records, maxlen=KEPT_RECORDS)
        self.changes_before, self.before = max(before, known - len(self.records)), worth

    def withdraw(self, plan_version: int) -> None:
        """Remove the record of the newest change if it is of this version: it never ran. It stays
        counted: the number of changes may have been shown."""
        if self.records and self.records[-1].plan_version == plan_version:
            self.records.pop()
            self.changes_before += 1

    @property
    def open(self) -> tuple[AdaptationRecord, ...]:
        """Records that may still get figures, oldest first."""
        return tuple(self.records)[-OPEN_RECORDS:]

    def record(self, plan_version: int) -> AdaptationRecord | None:
        """The record of a plan version, if it is one of the newest."""
        return next((each for each in self.open if each.plan_version == plan_version), None)

    @property
    def last_iteration(self) -> int:
        """Index of the newest finished iteration; -1 before the first."""
        return self._last

    def recent_seconds(self, count: int = 5) -> float | None:
        """Median time of the newest iterations."""
        newest = sorted(self._iterations)[-count:]
        return _median(self._iterations[i].seconds for i in newest)

    @property
    def outside(self) -> float:
        """Median seconds of an iteration outside of its ops, of those that are kept; 0 if
        unknown."""
        known = (each.outside for each in self._iterations.values())
        return _median(seconds for seconds in known if seconds is not None) or 0.0

    def under(self, plan_version: int) -> list[Finished]:
        """Iterations that ran under a plan version, as far as they are kept, in order."""
        kept = (self._iterations[i] for i in sorted(self._iterations))
        return [each for each in kept if each.plan_version == plan_version]

    def newest_iterations(self) -> list[Finished]:
        """Those that are kept, in order."""
        return [self._iterations[i] for i in sorted(self._iterations)]

    def newest(self) -> Finished | None:
        return self._iterations.get(self._last)

    @property
    def barrier(self) -> bool | None:
        """Whether stages wait for each other between iterations; None before there is evidence of
        either."""
        return self._barrier

    def _weigh_barrier(self, there: bool) -> None:
        """Process whether the newest iteration had a barrier."""
        self._without = max(0, self._without + (-ONE_BARRIER if there else 1))
        self._with = max(0, self._with + (1 if there else -1))
        if self._with >= WITH or self._without >= WITHOUT:
            self._barrier = self._with >= WITH
            self._with = self._without = 0

    @property
    def finished(self) -> int:
        """Number of finished iterations of this attempt that are kept."""
        return len(self._iterations)

    def add(
        self, samples: Iterable[IterationSample], peak_memory: Callable[[], list[int | None]]
    ) -> None:
        """Add finished iterations, and update the records that they belong to."""
        changed = False
        for sample in samples:
            self._iterations[sample.index] = Finished(
                sample.index,
                sample.seconds,
                sample.loss,
                sample.plan_version,
                sample.bubble_fraction,
                _outside(sample),
            )
            # Unknown: assume one, since a plan that expects it also suits a job without it.
            self._weigh_barrier(sample.barrier is not False)
            self._last = max(self._last, sample.index)
            changed = True
            if (record := self.record(sample.plan_version)) is not None:
                self._count(record, sample)
        if not changed:
            return
        for record in self.open:
            if self._complete(record):
                record.peak_memory_after = peak_memory()
        # Last, since one report may bring more iterations than are kept.
        if len(self._iterations) > KEPT_ITERATIONS:
            for stale in sorted(self._iterations)[:-KEPT_ITERATIONS]:
                del self._iterations[stale]

    def _count(self, record: AdaptationRecord, sample: IterationSample) -> None:
        """An iteration under the record's plan has finished. Those before it, of which no report
        came, were under this plan too. One that ran again after a failure does not count again."""
        iteration, saving = sample.index, record.saving or 0.0
        before = iteration - 1 if record.saved_until is None else record.saved_until
        if iteration <= before:
            return
        record.saved_until = iteration
        for index in range(max(before, iteration - KEPT_ITERATIONS) + 1, iteration + 1):
            self._counted[index] = record.plan_version, saving, record.fault_cost
        record.saved += saving * (iteration - before)
        record.fault_costs += record.fault_cost * (iteration - before)
        if (found := self._savings.get(record.plan_version)) is not None:
            self.revise(record.plan_version, found, iteration, iteration)
        for stale in [i for i in self._counted if i <= iteration - KEPT_ITERATIONS]:
            del self._counted[stale]

    def counted(self, since: int) -> list[tuple[int, int]]:
        """The newest iterations from ``since`` on that count with a saving, each with the version
        of its plan."""
        return [(index, each[0]) for index, each in self._counted.items() if index >= since]

    def revise(self, plan_version: int, saving: Saving, first: int, last: int | None) -> None:
        """Count iterations under this plan from ``first`` to ``last`` with another ``saving``;
        None: all from ``first`` on, also those to come. One in which a state of links began counts
        as a whole: where in it is not known, and most often it is nearly all of it."""
        if (record := self.record(plan_version)) is None:
            return
        if last is None:
            record.saving, record.fault_cost = saving.seconds, saving.fault_cost
            newest = [*self._savings.items(), (plan_version, saving)][-OPEN_RECORDS:]
            self._savings, last = dict(newest), self._last
        for index, (version, saved, cost) in self._counted.items():
            if version != plan_version or not first <= index <= last:
                continue
            seconds, fault_cost = saving.seconds, saving.fault_cost
            ran = self._iterations.get(index)
            if ran is not None and ran.seconds < saving.well_below:
                # Measured, the links are well, though that may not be certain yet.
                seconds, fault_cost = saving.if_well, 0.0
            record.saved += seconds - saved
            record.fault_costs += fault_cost - cost
            self._counted[index] = version, seconds, fault_cost

    def turn(self, record: AdaptationRecord, since: int) -> None:
        """The state that the record's plan was made for ended: its figures are those before
        iteration ``since``. If it ended before that was found, the plan replaced had none other
        in the iterations that count as before, and the figures are comparable."""
        if since <= record.detectable_at:
            return
        self._until.setdefault(record.plan_version, since)
        self._complete(record)

    def close(self, plan_version: int) -> AdaptationRecord | None:
        """Let the figures of a record stay as they are, since the change has been judged by them.
        Returns the record; None if it is none of the newest."""
        record = self.record(plan_version)
        if record is not None:
            self._until.setdefault(plan_version, self._last + 1)
        return record

    def new_attempt(self) -> None:
        """Drop the iterations, which count from 0 again; records and decisions stay."""
        self._iterations.clear()
        self._counted.clear()
        self._savings.clear()
        self._until.clear()
        self._last = -1
        self._barrier, self._without, self._with = None, 0, 0

    def _complete(self, record: AdaptationRecord) -> bool:
        """Update the figures of a record, unless they are complete."""
        until = self._until.get(record.plan_version)
        ran = [each.index for each in self.under(record.plan_version)]
        ours = [i for i in ran if until is None or i < until]
        if record.applied_at_iteration is None and ran:
            record.applied_at_iteration = ran[0]
            before = self._before(record.detectable_at, ran[0])
            record.iteration_seconds_before = _median(s.seconds for s in before)
            record.bubble_before = _median(s.bubble_fraction for s in before)
        if not ran or ran[0] != record.applied_at_iteration or len(ours) > AFTER:
            return False
        # The first iteration has the change in it, which is not what the plan takes.
        after = [self._iterations[i] for i in ours[1:] or ours]
        record.iteration_seconds_after = settled = _median(s.seconds for s in after)
        record.bubble_after = _median(s.bubble_fraction for s in after)
        record.measured = None
        if record.iteration_seconds_before and settled is not None:
            record.measured = 1 - settled / record.iteration_seconds_before
        if len(ours) > 1 and settled is not None:
            record.change_seconds = max(0.0, self._iterations[ours[0]].seconds - settled)
        return True

    def _before(self, detectable_at: int, applied_at: int) -> list[Finished]:
        """Iterations of the replaced plan, not of earlier ones, in the state that it was replaced
        for; without any, the one in which this began."""
        earlier = [i for i in sorted(self._iterations) if i < applied_at]
        if earlier:
            earlier = [
                each.index for each in self.under(self._iterations[earlier[-1]].plan_version)
            ]
        disturbed = [i for i in earlier if detectable_at < i < applied_at]
        partly = [i for i in earlier if i == detectable_at]
        return [self._iterations[i] for i in (disturbed or partly)[-BEFORE:]]


def _outside(sample: IterationSample) -> float | None:
    if sample.ops_seconds is None or sample.barrier is False:
        return None
    return sample.seconds - sample.ops_seconds


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None
