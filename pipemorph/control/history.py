"""What an adaptation was worth: three numbers before and after every change.

Bubble fraction, iteration time and peak memory per stage; a change that lowers the bubble and
breaks the memory is not a win. The same records go to report.json and to status.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pipemorph.planning.ir import Route
from pipemorph.wire import IterationSample

AFTER = 8
"""Iterations under the new plan that its figures are the median of."""
BEFORE = 8
"""Most iterations under the old plan that its figures are the median of."""
KEPT_ITERATIONS = 32
"""Enough for what is asked of them: those before a change, after it, and the newest. A host has
thousands of jobs, and their history is in the reports' receivers and in metrics."""
OPEN_RECORDS = 4
"""Newest records whose figures may still be coming in."""
KEPT_RECORDS = 256
KEPT_DECISIONS = 64


class AdaptationRecord(BaseModel):
    """One directive and what came of it. Times in seconds, memory in bytes per stage.

    ``…_before`` are medians over the iterations from ``detectable_at`` until the new plan was
    in effect: the old plan under what made it be replaced. ``…_after`` are medians over the
    first iterations under the new one. None where there was nothing to measure.
    """

    model_config = ConfigDict(extra="forbid")

    plan_version: int
    kind: Literal["adapt", "return"]
    detected_at: float
    """Controller's wall clock, seconds since the epoch."""
    detected_at_iteration: int
    detectable_at: int
    """Iteration of the first window that showed the change: all later ones did so, too."""
    applied_at_iteration: int | None = None
    """First iteration run under this plan; None until then, or if it was replaced before."""
    reason: str
    links: list[dict[str, Any]]
    warmup_before: list[int]
    warmup_after: list[int]
    routes: list[Route]
    predicted_seconds_before: float | None
    predicted_seconds_after: float
    iteration_seconds_before: float | None = None
    iteration_seconds_after: float | None = None
    bubble_before: float | None = None
    bubble_after: float | None = None
    peak_memory_before: list[int | None] = Field(default_factory=list)
    peak_memory_after: list[int | None] = Field(default_factory=list)
    device_limits_before: list[int | None] = Field(default_factory=list)
    """Microbatches with their activations on the device, per stage; None: no offload there."""
    device_limits_after: list[int | None] = Field(default_factory=list)
    offloaded: list[int] = Field(default_factory=list)
    """Microbatches per iteration that the new plan moves to host memory, per stage."""
    fused_stages: list[int] = Field(default_factory=list)
    """Stages whose backwards the new plan fuses."""


class Decision(BaseModel):
    """One look at whether to adapt, and why it came out as it did."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    at: float
    iteration: int
    kind: Literal["adapt", "return", "keep"]
    reason: str
    line: str
    """What a terminal shows: of a change, the reason in short."""
    plan_version: int | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """One finished iteration, in as few bytes as it takes."""

    index: int
    seconds: float
    loss: float | None
    plan_version: int
    bubble_fraction: float


class Ledger:
    """Iterations seen and adaptations made, kept bounded; fills records in as figures come."""

    def __init__(self) -> None:
        self.records: deque[AdaptationRecord] = deque(maxlen=KEPT_RECORDS)
        self.decisions: deque[Decision] = deque(maxlen=KEPT_DECISIONS)
        self._iterations: dict[int, Finished] = {}
        self._last = -1
        self._changes: dict[int, float] = {}

    @property
    def change_seconds(self) -> float | None:
        """What a change of plan has cost so far: how much longer the first iteration of a new
        plan took than those after it, the median of the last few; None before one."""
        return _median(self._changes.values())

    @property
    def last_iteration(self) -> int:
        """Index of the newest finished iteration; -1 before the first."""
        return self._last

    def recent_seconds(self, count: int = 5) -> float | None:
        """Median time of the newest iterations."""
        newest = sorted(self._iterations)[-count:]
        return _median(self._iterations[i].seconds for i in newest)

    def newest(self) -> Finished | None:
        return self._iterations.get(self._last)

    @property
    def finished(self) -> int:
        """How many iterations of this attempt are known to have finished, bounded."""
        return len(self._iterations)

    def add(
        self, samples: Iterable[IterationSample], peak_memory: Callable[[], list[int | None]]
    ) -> None:
        """Take in finished iterations and complete the records they belong to."""
        changed = False
        for sample in samples:
            self._iterations[sample.index] = Finished(
                sample.index,
                sample.seconds,
                sample.loss,
                sample.plan_version,
                sample.bubble_fraction,
            )
            self._last = max(self._last, sample.index)
            changed = True
        if not changed:
            return
        for record in list(self.records)[-OPEN_RECORDS:]:
            self._complete(record, peak_memory)
        # After that: a report may bring more iterations at once than are kept.
        if len(self._iterations) > KEPT_ITERATIONS:
            for stale in sorted(self._iterations)[:-KEPT_ITERATIONS]:
                del self._iterations[stale]

    def new_attempt(self) -> None:
        """Iterations start again; what was decided stays on record."""
        self._iterations.clear()
        self._last = -1

    def _complete(
        self, record: AdaptationRecord, peak_memory: Callable[[], list[int | None]]
    ) -> None:
        ours = sorted(
            i for i, s in self._iterations.items() if s.plan_version == record.plan_version
        )
        if not ours:
            return
        first = ours[0]
        if record.applied_at_iteration is None:
            record.applied_at_iteration = first
            before = self._before(record.detectable_at, first)
            record.iteration_seconds_before = _median(s.seconds for s in before)
            record.bubble_before = _median(s.bubble_fraction for s in before)
        if first != record.applied_at_iteration or len(ours) > AFTER:
            return  # Its figures are complete.
        after = [self._iterations[i] for i in ours]
        if settled := _median(s.seconds for s in after[1:]):
            self._changes[record.plan_version] = max(0.0, after[0].seconds - settled)
            if len(self._changes) > OPEN_RECORDS:
                del self._changes[min(self._changes)]
        record.iteration_seconds_after = _median(s.seconds for s in after)
        record.bubble_after = _median(s.bubble_fraction for s in after)
        record.peak_memory_after = peak_memory()

    def _before(self, detectable_at: int, applied_at: int) -> list[Finished]:
        earlier = [i for i in sorted(self._iterations) if i < applied_at]
        if earlier:  # Of the plan that was replaced, not of one before it.
            plan_version = self._iterations[earlier[-1]].plan_version
            earlier = [i for i in earlier if self._iterations[i].plan_version == plan_version]
        disturbed = [i for i in earlier if i >= detectable_at]
        return [self._iterations[i] for i in (disturbed or earlier)[-BEFORE:]]


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None
