"""Records the time that each change of plan saved: figures before and after it.

The figures are bubble fraction, iteration time, and peak memory per stage, since a change must not
lower the bubble at the cost of too much memory. The same records go to report.json and to status.

The saved time of a job is the time by which it would be behind without adaptation. An iteration
cannot run again under another plan. So each decision predicts two plans on the same measurements:
the initial one, which the job would still run, and the one in effect. Errors of the model are in
both and mostly cancel in the difference, which counts for each iteration. If links change while the
plan stays, the difference is predicted anew without a decision. The cost of each change is
subtracted. The error is known from the changes themselves: the gain of each is predicted before it,
and measured after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from pipemorph.detection.stage_monitor import MEDIAN_PROFILES
from pipemorph.protocol import AdaptationRecord, IterationSample
from pipemorph.protocol.samples import average_idle_time

LEAST_ERROR_FRACTION = 0.12
"""Least relative error of the saved time, or of the cost of slow links if that is more: the time of
a plan that does not run is only predicted, from measured delays. In 95 of 100 runs the error,
compared with a run that does not adapt, is smaller."""
ITERATIONS_AFTER = 8
"""Iterations under the new plan in the median of its figures."""
ITERATIONS_BEFORE = 8
"""Most iterations under the old plan in the median of its figures."""
MOST_ITERATIONS = 32
"""Iterations that are stored: enough for the medians before and after a change and for the newest
time. Bounded, since a host has thousands of jobs."""
NO_BARRIER_EVIDENCE, ONE_BARRIER_EVIDENCE, BARRIER_EVIDENCE = 24, 4, 10
"""Evidence for another kind of barrier. After NO_BARRIER_EVIDENCE iterations without one none is
expected; each with one subtracts ONE_BARRIER_EVIDENCE, since some jobs clip gradients only after
several steps. One is expected once iterations with one are BARRIER_EVIDENCE ahead.

So none is expected of a job with barriers in less than a fifth of its iterations, and one of a job
with them in more than half; in between, the expectation stays. Barriers may come at random: a job
that waits for the gradient norm only near its bound has them in any share. If the share is a third,
either expectation lasts some 6,000 iterations or more: a change costs an iteration, and the wrong
plan a few per cent of each. A change for op times takes 12 iterations, but op times do not come and
go like that."""
NEWEST_SAMPLED = 8
"""Sampled iterations over which idle times are averaged."""
OPEN_RECORDS = 4
"""Newest records that may still get figures."""
MOST_RECORDS = 256
MOST_DECISIONS = 64


class Saving(NamedTuple):
    """Saving of an iteration under a plan, in one state of links. ``seconds``: by how much it
    would take longer under the initial plan; ``fault_cost``: seconds that slow links cost there;
    ``if_well``: like ``seconds``, if no link is slow. An iteration that takes less than
    ``well_below`` seconds shows that; 0 if measured times cannot separate the two states."""

    seconds: float
    fault_cost: float
    if_well: float = 0.0
    well_below: float = 0.0


@dataclass(frozen=True)
class SavedTime:
    """Seconds by which a job's iterations were shorter than with the initial plan; negative if they
    were longer.

    ``error_seconds``: half of the 95 % interval, seconds. For each change it is
    :data:`LEAST_ERROR_FRACTION` of the cost of slow links, or the difference of its promised and
    measured gain if that is more; if nothing was measured, that of all others together.
    """

    seconds: float = 0.0
    error_seconds: float = 0.0

    def __add__(self, other: SavedTime) -> SavedTime:
        return SavedTime(self.seconds + other.seconds, self.error_seconds + other.error_seconds)

    def to_report(self, ranks: int) -> dict[str, float]:
        """Values for ``report.json``. ``ranks``: number of the job's ranks, all of which wait while
        an iteration takes longer."""
        return {
            "seconds": self.seconds,
            "error": self.error_seconds,
            "rank_hours": self.seconds * ranks / 3600,
        }


def sum_saved_time(records: Iterable[AdaptationRecord]) -> SavedTime:
    """Sum the time that some changes of plan saved."""
    every = list(records)
    known = [found for each in every if (found := _promise(each)) is not None]
    promised = sum(abs(gain) for gain, _ in known)
    # By all of them together: what a small promise is wrong by says nothing about a large one.
    usual = min(1.0, sum(abs(g - m) for g, m in known) / promised) if promised else 1.0
    return sum((_estimate_saved_time(each, usual) for each in every), SavedTime())


def _promise(record: AdaptationRecord) -> tuple[float, float] | None:
    """Promised and measured gain; None if one of them is missing."""
    if not record.promised or record.measured is None:
        return None
    return record.promised, record.measured


def _estimate_saved_time(record: AdaptationRecord, usual: float) -> SavedTime:
    """Saved time of one change. ``usual``: relative error to assume if nothing was measured."""
    part, found = abs(record.saved), _promise(record)
    wrong = usual if found is None else min(1.0, abs(1 - found[1] / found[0]))
    error = max(wrong * part, LEAST_ERROR_FRACTION * max(part, record.fault_costs))
    return SavedTime(record.saved - (record.change_seconds or 0.0), error)


class DecisionRecord(BaseModel):
    """Decision to change or not, and its reason; kind "outcome": the measured gain of a change."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    at: float
    iteration: int
    kind: Literal["adapt", "return", "revert", "keep", "outcome"]
    reason: str
    line: str
    """Text for a terminal, with a short form of the reason."""
    plan_version: int | None = None


@dataclass(frozen=True, slots=True)
class FinishedRecord:
    """Finished iteration, stored compactly."""

    index: int
    seconds: float
    loss: float | None
    plan_version: int
    bubble_fraction: float
    outside_seconds: float | None = None
    """Seconds before the first op of any rank and after the last; None if unknown, and without a
    barrier, since iterations overlap then."""
    cost_factor: float = 1.0
    """Mean cost of the newest iterations, divided by that of this one; 1 without costs."""

    @property
    def comparable_seconds(self) -> float:
        """Seconds that the iteration would have taken for a usual batch, to compare plans by."""
        return self.seconds * self.cost_factor


class JobHistory:
    """Iterations and adaptations of a job. Bounded. Adds figures to records as they arrive."""

    def __init__(self) -> None:
        self.records: deque[AdaptationRecord] = deque(maxlen=MOST_RECORDS)
        self.decisions: deque[DecisionRecord] = deque(maxlen=MOST_DECISIONS)
        self._iterations: dict[int, FinishedRecord] = {}
        self._costs: deque[float] = deque(maxlen=MEDIAN_PROFILES)
        """Mean costs of the newest iterations, as many as ranks use for the medians of op times."""
        self._counted_savings: dict[int, tuple[int, float, float]] = {}
        """Plan version, counted saving and counted cost of faults of the newest iterations."""
        self._savings: dict[int, Saving] = {}
        """Saving of each iteration to come, per plan version."""
        self._figures_end: dict[int, int] = {}
        """First iteration that no longer counts for a plan's figures, by plan version."""
        self._sampled: deque[IterationSample] = deque(maxlen=NEWEST_SAMPLED)
        self.idle_totals: dict[str, float] = {}
        """Idle seconds of a rank by cause in all iterations. One that was not sampled counts like
        the newest one that was."""
        self._last_index = -1
        self.changes_before, self.before = 0, SavedTime()
        """Number of changes without a record, and the time that they saved."""
        self._barrier: bool | None = None
        self._no_barrier_evidence = self._barrier_evidence = 0
        """Evidence for no barrier, and for one, since :attr:`barrier` was last determined."""

    @property
    def change_seconds(self) -> float | None:
        """Measured cost of a change of plan: seconds by which the first iteration of a new plan was
        longer than the next ones. Median of the last few changes; None before the first."""
        seen = [each.change_seconds for each in self.records if each.change_seconds is not None]
        return _median_or_none(seen[-OPEN_RECORDS:])

    @property
    def saved_time(self) -> SavedTime:
        """Time that all changes of plan have saved so far."""
        return self.before + sum_saved_time(self.records)

    @property
    def change_count(self) -> int:
        """Number of all changes of plan so far."""
        return self.changes_before + len(self.records)

    def append_record(self, record: AdaptationRecord) -> None:
        """Add the record of a change that is issued now."""
        if len(self.records) == MOST_RECORDS:
            self.before += sum_saved_time([self.records[0]])
            self.changes_before += 1
        self.records.append(record)

    def restore_records(
        self, records: Iterable[AdaptationRecord], before: int, worth: SavedTime
    ) -> None:
        """Continue from these records, and from ``before`` changes without one and their ``worth``.
        The number of changes never falls: the records may be older than the last status."""
        known, self.records = self.change_count, deque(records, maxlen=MOST_RECORDS)
        self.changes_before, self.before = max(before, known - len(self.records)), worth

    def withdraw_record(self, plan_version: int) -> None:
        """Remove the record of the newest change if it has this version: it never ran. It still
        counts: the number of changes may have been shown."""
        if self.records and self.records[-1].plan_version == plan_version:
            self.records.pop()
            self.changes_before += 1

    @property
    def open_records(self) -> tuple[AdaptationRecord, ...]:
        """Records that may still get figures, oldest first."""
        return tuple(self.records)[-OPEN_RECORDS:]

    def find_record(self, plan_version: int) -> AdaptationRecord | None:
        """Find the record of a plan version; None unless it is one of the newest."""
        return next((each for each in self.open_records if each.plan_version == plan_version), None)

    @property
    def last_iteration(self) -> int:
        """Index of the newest finished iteration; -1 before the first."""
        return self._last_index

    def get_recent_seconds(self, count: int = 5) -> float | None:
        """Median time of the newest iterations."""
        newest = sorted(self._iterations)[-count:]
        return _median_or_none(self._iterations[i].seconds for i in newest)

    @property
    def outside_seconds(self) -> float:
        """Median seconds of stored iterations outside of their ops; 0 if unknown."""
        known = (each.outside_seconds for each in self._iterations.values())
        return _median_or_none(seconds for seconds in known if seconds is not None) or 0.0

    def list_iterations_under(self, plan_version: int) -> list[FinishedRecord]:
        """Stored iterations that ran under a plan version, in order."""
        stored = (self._iterations[i] for i in sorted(self._iterations))
        return [each for each in stored if each.plan_version == plan_version]

    def list_iterations(self) -> list[FinishedRecord]:
        """Stored iterations, in order."""
        return [self._iterations[i] for i in sorted(self._iterations)]

    def get_newest(self) -> FinishedRecord | None:
        return self._iterations.get(self._last_index)

    @property
    def barrier(self) -> bool | None:
        """True if stages wait for each other between iterations; None before there is evidence."""
        return self._barrier

    def _weigh_barrier(self, there: bool) -> None:
        """Weigh the barrier of the newest iteration, or its absence."""
        self._no_barrier_evidence = max(
            0, self._no_barrier_evidence + (-ONE_BARRIER_EVIDENCE if there else 1)
        )
        self._barrier_evidence = max(0, self._barrier_evidence + (1 if there else -1))
        if (
            self._barrier_evidence >= BARRIER_EVIDENCE
            or self._no_barrier_evidence >= NO_BARRIER_EVIDENCE
        ):
            self._barrier = self._barrier_evidence >= BARRIER_EVIDENCE
            self._barrier_evidence = self._no_barrier_evidence = 0

    @property
    def finished_count(self) -> int:
        """Number of finished iterations of this attempt that are stored."""
        return len(self._iterations)

    def add_iterations(
        self, samples: Iterable[IterationSample], peak_memory: Callable[[], list[int | None]]
    ) -> None:
        """Add finished iterations, and update the records that they belong to."""
        changed = False
        for sample in samples:
            self._count_idle_time(sample)
            self._iterations[sample.index] = FinishedRecord(
                sample.index,
                sample.seconds,
                sample.loss,
                sample.plan_version,
                sample.bubble_fraction,
                _compute_outside(sample),
                self._compare_cost(sample.cost),
            )
            # Unknown: assume one, since a plan that expects it also suits a job without it.
            self._weigh_barrier(sample.barrier is not False)
            self._last_index = max(self._last_index, sample.index)
            changed = True
            if (record := self.find_record(sample.plan_version)) is not None:
                self._count_saving(record, sample)
        if not changed:
            return
        for record in self.open_records:
            if self._update_figures(record):
                record.peak_memory_after = peak_memory()
        # Drop old ones last: a report may bring more iterations than are stored.
        if len(self._iterations) > MOST_ITERATIONS:
            for stale in sorted(self._iterations)[:-MOST_ITERATIONS]:
                del self._iterations[stale]

    @property
    def idle_seconds(self) -> dict[str, float]:
        """Mean idle seconds by cause of the newest sampled iterations; empty without any."""
        return average_idle_time(self._sampled)

    def _count_idle_time(self, sample: IterationSample) -> None:
        if sample.index in self._iterations:
            return  # It was reported before.
        if sample.idle is not None:
            self._sampled.append(sample)
        newest = self._sampled[-1].idle if self._sampled else None
        for cause, seconds in (newest or {}).items():
            total = self.idle_totals.get(cause, 0.0)
            self.idle_totals[cause] = total + max(0.0, seconds)

    def _compare_cost(self, cost: float | None) -> float:
        """Return the usual cost of iterations divided by that of the newest one."""
        if cost is None:
            self._costs.clear()
            return 1.0
        self._costs.append(cost)
        return median(self._costs) / cost

    def _count_saving(self, record: AdaptationRecord, sample: IterationSample) -> None:
        """Count a finished iteration under the record's plan, and those before it that were not
        reported. One that ran again after a failure does not count again."""
        iteration, saving = sample.index, record.saving or 0.0
        saved_time_before = iteration - 1 if record.saved_until is None else record.saved_until
        if iteration <= saved_time_before:
            return
        record.saved_until = iteration
        for index in range(max(saved_time_before, iteration - MOST_ITERATIONS) + 1, iteration + 1):
            self._counted_savings[index] = record.plan_version, saving, record.fault_cost
        record.saved += saving * (iteration - saved_time_before)
        record.fault_costs += record.fault_cost * (iteration - saved_time_before)
        if (found := self._savings.get(record.plan_version)) is not None:
            self.revise_saving(record.plan_version, found, iteration, iteration)
        for stale in [i for i in self._counted_savings if i <= iteration - MOST_ITERATIONS]:
            del self._counted_savings[stale]

    def counted(self, since: int) -> list[tuple[int, int]]:
        """Newest counted iterations from ``since`` on, each with its plan version."""
        return [(index, each[0]) for index, each in self._counted_savings.items() if index >= since]

    def revise_saving(
        self, plan_version: int, saving: Saving, first: int, last: int | None
    ) -> None:
        """Count iterations under this plan from ``first`` to ``last`` with another ``saving``;
        None: all from ``first`` on, also later ones. The iteration in which a state of links began
        counts entirely: the state mostly lasts for nearly all of it."""
        if (record := self.find_record(plan_version)) is None:
            return
        if last is None:
            record.saving, record.fault_cost = saving.seconds, saving.fault_cost
            newest = [*self._savings.items(), (plan_version, saving)][-OPEN_RECORDS:]
            self._savings, last = dict(newest), self._last_index
        for index, (version, saved, cost) in self._counted_savings.items():
            if version != plan_version or not first <= index <= last:
                continue
            seconds, fault_cost = saving.seconds, saving.fault_cost
            ran = self._iterations.get(index)
            if ran is not None and ran.comparable_seconds < saving.well_below:
                # Measured, the links are well, though that may not be certain yet.
                seconds, fault_cost = saving.if_well, 0.0
            record.saved += seconds - saved
            record.fault_costs += fault_cost - cost
            self._counted_savings[index] = version, seconds, fault_cost

    def end_figures(self, record: AdaptationRecord, since: int) -> None:
        """Limit the record's figures to iterations before ``since``: the state that its plan was
        made for has ended. If it had ended before the iterations that the figures compare, these
        stay comparable."""
        if since <= record.detectable_at:
            return
        self._figures_end.setdefault(record.plan_version, since)
        self._update_figures(record)

    def close_record(self, plan_version: int) -> AdaptationRecord | None:
        """Fix the figures of a record, by which the change has been judged. Returns the record;
        None unless it is one of the newest."""
        record = self.find_record(plan_version)
        if record is not None:
            self._figures_end.setdefault(plan_version, self._last_index + 1)
        return record

    def begin_attempt(self) -> None:
        """Drop the iterations, which count from 0 again; records and decisions stay."""
        self._iterations.clear()
        self._counted_savings.clear()
        self._savings.clear()
        self._figures_end.clear()
        self._last_index = -1
        self._barrier, self._no_barrier_evidence, self._barrier_evidence = None, 0, 0

    def _update_figures(self, record: AdaptationRecord) -> bool:
        """Update the figures of a record, unless they are complete."""
        until = self._figures_end.get(record.plan_version)
        ran = [each.index for each in self.list_iterations_under(record.plan_version)]
        ours = [i for i in ran if until is None or i < until]
        if record.applied_at_iteration is None and ran:
            record.applied_at_iteration = ran[0]
            before = self._list_iterations_before(record.detectable_at, ran[0])
            record.iteration_seconds_before = _median_or_none(s.seconds for s in before)
            record.bubble_before = _median_or_none(s.bubble_fraction for s in before)
        if not ran or ran[0] != record.applied_at_iteration or len(ours) > ITERATIONS_AFTER:
            return False
        # The first iteration includes the change, which is no time of the plan.
        after = [self._iterations[i] for i in ours[1:] or ours]
        record.iteration_seconds_after = settled = _median_or_none(s.seconds for s in after)
        record.bubble_after = _median_or_none(s.bubble_fraction for s in after)
        record.measured = None
        if record.iteration_seconds_before and settled is not None:
            record.measured = 1 - settled / record.iteration_seconds_before
        if len(ours) > 1 and settled is not None:
            record.change_seconds = max(0.0, self._iterations[ours[0]].seconds - settled)
        return True

    def _list_iterations_before(self, detectable_at: int, applied_at: int) -> list[FinishedRecord]:
        """Iterations of the replaced plan, not of earlier ones, in the state that caused the
        change; if there are none, the iteration in which that began."""
        earlier = [i for i in sorted(self._iterations) if i < applied_at]
        if earlier:
            earlier = [
                each.index
                for each in self.list_iterations_under(self._iterations[earlier[-1]].plan_version)
            ]
        disturbed = [i for i in earlier if detectable_at < i < applied_at]
        partly = [i for i in earlier if i == detectable_at]
        return [self._iterations[i] for i in (disturbed or partly)[-ITERATIONS_BEFORE:]]


def _compute_outside(sample: IterationSample) -> float | None:
    if sample.ops_seconds is None or sample.barrier is False:
        return None
    return sample.seconds - sample.ops_seconds


def _median_or_none(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None
