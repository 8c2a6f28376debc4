"""Health of the gradient reductions of a job: one detector per data-parallel group.

A group is the ranks of a stage that reduce their gradients together. Its time is that of the rank
which came last, so a slow stage or a slow link between stages does not make it longer: those show
in op times and wire times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median

from pipemorph.detection.detector import DelayDetector, DetectorLevel, DetectorThresholds
from pipemorph.detection.event_log import EventLog
from pipemorph.detection.link_monitor import DOUBTED_WEIGHT
from pipemorph.protocol import ReductionHealth, ReductionSample, SlowestEdge
from pipemorph.spec.mesh import MeshShape

NEWEST_ITERATIONS = 3
"""Iterations in the median of reported times: as few as show that a group is slow."""
FEWEST_GROUPS = 3
"""Fewest groups in which one can be found to be slower than the others."""
_ROUTE = "reduction"

GroupKey = tuple[int, int]
"""stage, first column of the group"""


class _ReductionGroup:
    """Detector, newest sample and newest times of one group."""

    def __init__(self, thresholds: DetectorThresholds) -> None:
        self.detector = DelayDetector(thresholds)
        self.newest_sample: ReductionSample | None = None
        self.slowest_edge: SlowestEdge | None = None
        self.is_late = False
        """True if its newest iteration was above the threshold, while it is not slow."""
        self.seconds: deque[float] = deque(maxlen=NEWEST_ITERATIONS)
        self.exposed: deque[float] = deque(maxlen=NEWEST_ITERATIONS)


class ReductionMonitor:
    """Judges the reductions of one attempt, from its reports."""

    def __init__(
        self, mesh: MeshShape, thresholds: DetectorThresholds, *, events: EventLog
    ) -> None:
        self._mesh, self._thresholds, self._events = mesh, thresholds, events
        self._groups: dict[GroupKey, _ReductionGroup] = {}
        self._changed_groups: set[GroupKey] = set()

    def change_thresholds(self, thresholds: DetectorThresholds) -> None:
        """Change the thresholds."""
        self._thresholds = thresholds
        for group in self._groups.values():
            group.detector.thresholds = thresholds

    def observe_samples(self, samples: Iterable[ReductionSample], now: float) -> None:
        """Process a report. ``now``: wall clock, seconds. All ranks of a group report the same
        times; the first report counts."""
        seen = False
        for sample in samples:
            key = (sample.stage, self._mesh.find_data_group(sample.replica))
            group = self._groups.get(key)
            if group is None or (group.newest_sample and group.newest_sample.bytes != sample.bytes):
                # The gradients are others: the learned base is no longer valid.
                slowest = group.slowest_edge if group is not None else None
                group = self._groups[key] = _ReductionGroup(self._thresholds)
                # The edge's time is that of chunks, whose size stays.
                group.slowest_edge = slowest
            newest = group.newest_sample
            if newest is not None and sample.iteration <= newest.iteration:
                continue
            group.newest_sample, seen = sample, True
            group.slowest_edge = sample.slowest or group.slowest_edge
            self._changed_groups.add(key)
            group.seconds.append(sample.seconds)
            group.exposed.append(sample.exposed)
            was = group.detector.level
            group.is_late = group.detector.is_late(sample.seconds, route=_ROUTE) or False
            group.detector.observe_window(
                sample.seconds, mark=sample.iteration, route=_ROUTE, weight=self._get_late_weight()
            )
            self._record_level_change(key, group, was, now)
        if seen:
            self._compare_peers(now)

    def _get_late_weight(self) -> float:
        """Weight of a late iteration: little while most groups are late at once, as on a machine
        that stalls."""
        return DOUBTED_WEIGHT if self.most_are_late else 1.0

    @property
    def most_are_late(self) -> bool:
        """True if most groups were late in their newest iteration."""
        late = sum(group.is_late for group in self._groups.values())
        return len(self._groups) >= FEWEST_GROUPS and 2 * late > len(self._groups)

    def _record_level_change(
        self, key: GroupKey, group: _ReductionGroup, was: DetectorLevel, now: float
    ) -> None:
        """Record an event if a group became slow, or recovered."""
        level = group.detector.level
        if level is was or DetectorLevel.SLOW not in (level, was) or group.newest_sample is None:
            return
        state = self._build_state(key, group)
        text = f"{state.name} is as fast as usual again"
        if level is DetectorLevel.SLOW:
            text = (
                f"{state.name} is slow: {1e3 * state.seconds:.0f} ms, usually"
                f" {1e3 * (state.normal or 0.0):.0f} ms"
            )
        self._events.add_event(now, group.newest_sample.iteration, text)

    def _compare_peers(self, now: float) -> None:
        """Find groups that were slow from the start: other stages of the job reduce about as many
        gradients in about the same time."""
        known = {
            key: (group.detector.base, group.newest_sample.bytes)
            for key, group in self._groups.items()
            if group.detector.base is not None and group.newest_sample is not None
        }
        if len(known) < FEWEST_GROUPS:
            return
        for key in known:
            group = self._groups[key]
            was = group.detector.level
            if group.detector.lower_base(_predict_from_peers(key, known)):
                self._changed_groups.add(key)
                self._record_level_change(key, group, was, now)

    def take_changed_states(self) -> list[ReductionHealth]:
        """States of groups that have reported since the last call."""
        found, self._changed_groups = sorted(self._changed_groups), set()
        return [self._build_state(key, self._groups[key]) for key in found]

    def list_states(self) -> tuple[ReductionHealth, ...]:
        """States of all groups that have reported, by stage."""
        return tuple(self._build_state(key, self._groups[key]) for key in sorted(self._groups))

    def _build_state(self, key: GroupKey, group: _ReductionGroup) -> ReductionHealth:
        assert group.newest_sample is not None
        stage, column = key
        return ReductionHealth(
            stage=stage,
            replica=column,
            where=self._mesh.format_lockstep_name(column),
            slow=group.detector.level is DetectorLevel.SLOW,
            seconds=median(group.seconds),
            normal=group.detector.base,
            exposed=median(group.exposed),
            bytes=group.newest_sample.bytes,
            slowest=group.slowest_edge,
        )


def _predict_from_peers(key: GroupKey, known: Mapping[GroupKey, tuple[float, int]]) -> float:
    """Seconds that the other groups would take for as many bytes."""
    nbytes = known[key][1]
    return median(
        base * max(1.0, nbytes / size) for other, (base, size) in known.items() if other != key
    )
