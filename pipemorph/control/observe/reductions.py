"""Health of the gradient reductions of a job: one detector per data-parallel group.

A group is the ranks of a stage that reduce their gradients together. Its time is that of the rank
which came last, so a slow stage or a slow link between stages does not make it longer: those are
seen in op times and wire times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median

from pipemorph.api.mesh import MeshShape
from pipemorph.control.observe.detector import DelayDetector, Level, Thresholds
from pipemorph.control.observe.events import Events
from pipemorph.control.observe.link_book import DOUBTED_WEIGHT
from pipemorph.wire import ReductionHealth, ReductionSample, SlowestEdge

NEWEST = 3
"""Iterations over whose median times are reported: as few as show that a group is slow."""
PEERS = 3
"""Fewest groups of which one can be told to be slower than the others."""
_ROUTE = "reduction"

GroupKey = tuple[int, int]
"""stage, first column of the group"""


class _Group:
    def __init__(self, thresholds: Thresholds) -> None:
        self.detector = DelayDetector(thresholds)
        self.newest: ReductionSample | None = None
        self.slowest: SlowestEdge | None = None
        self.late = False
        """Whether its newest iteration was above the threshold, while it is not slow."""
        self.seconds: deque[float] = deque(maxlen=NEWEST)
        self.exposed: deque[float] = deque(maxlen=NEWEST)


class ReductionBook:
    """The reductions of one attempt, from its reports."""

    def __init__(self, mesh: MeshShape, thresholds: Thresholds, *, events: Events) -> None:
        self._mesh, self._thresholds, self._events = mesh, thresholds, events
        self._groups: dict[GroupKey, _Group] = {}
        self._changed: set[GroupKey] = set()

    def set(self, thresholds: Thresholds) -> None:
        """Judge by these from now on."""
        self._thresholds = thresholds
        for group in self._groups.values():
            group.detector.thresholds = thresholds

    def observe(self, samples: Iterable[ReductionSample], now: float) -> None:
        """Process a report. ``now``: wall clock, seconds. All ranks of a group report the same
        times; those of the first that comes are taken."""
        seen = False
        for sample in samples:
            key = (sample.stage, self._mesh.data_group(sample.replica))
            group = self._groups.get(key)
            if group is None or (group.newest and group.newest.bytes != sample.bytes):
                # Other gradients: what was normal is so no longer.
                slowest = group.slowest if group is not None else None
                group = self._groups[key] = _Group(self._thresholds)
                # Messages of that size take as long as they did.
                group.slowest = slowest
            newest = group.newest
            if newest is not None and sample.iteration <= newest.iteration:
                continue
            group.newest, seen = sample, True
            group.slowest = sample.slowest or group.slowest
            self._changed.add(key)
            group.seconds.append(sample.seconds)
            group.exposed.append(sample.exposed)
            was = group.detector.level
            group.late = group.detector.is_late(sample.seconds, route=_ROUTE) or False
            group.detector.observe(
                sample.seconds, mark=sample.iteration, route=_ROUTE, weight=self._weight()
            )
            self._tell(key, group, was, now)
        if seen:
            self._compare_peers(now)

    def _weight(self) -> float:
        """Weight of a late iteration: little while most groups are late at once, as on a machine
        that stalls."""
        return DOUBTED_WEIGHT if self.most_are_late else 1.0

    @property
    def most_are_late(self) -> bool:
        """Whether most groups were late in their newest iteration."""
        late = sum(group.late for group in self._groups.values())
        return len(self._groups) >= PEERS and 2 * late > len(self._groups)

    def _tell(self, key: GroupKey, group: _Group, was: Level, now: float) -> None:
        level = group.detector.level
        if level is was or Level.SLOW not in (level, was) or group.newest is None:
            return
        state = self._state(key, group)
        text = f"{state.name} is as fast as usual again"
        if level is Level.SLOW:
            text = (
                f"{state.name} is slow: {1e3 * state.seconds:.0f} ms, usually"
                f" {1e3 * (state.normal or 0.0):.0f} ms"
            )
        self._events.add(now, group.newest.iteration, text)

    def _compare_peers(self, now: float) -> None:
        """Find groups that were slow from the start: other stages of the job reduce about as many
        gradients in about the same time."""
        known = {
            key: (group.detector.base, group.newest.bytes)
            for key, group in self._groups.items()
            if group.detector.base is not None and group.newest is not None
        }
        if len(known) < PEERS:
            return
        for key in known:
            group = self._groups[key]
            was = group.detector.level
            if group.detector.lower_base(_usual(key, known)):
                self._changed.add(key)
                self._tell(key, group, was, now)

    def changed(self) -> list[ReductionHealth]:
        """The states of groups that have reported since the last call."""
        found, self._changed = sorted(self._changed), set()
        return [self._state(key, self._groups[key]) for key in found]

    def states(self) -> tuple[ReductionHealth, ...]:
        """One state per group that has reported, by stage."""
        return tuple(self._state(key, self._groups[key]) for key in sorted(self._groups))

    def _state(self, key: GroupKey, group: _Group) -> ReductionHealth:
        assert group.newest is not None
        stage, column = key
        return ReductionHealth(
            stage=stage,
            replica=column,
            where=self._mesh.lockstep_name(column),
            slow=group.detector.level is Level.SLOW,
            seconds=median(group.seconds),
            normal=group.detector.base,
            exposed=median(group.exposed),
            bytes=group.newest.bytes,
            slowest=group.slowest,
        )


def _usual(key: GroupKey, known: Mapping[GroupKey, tuple[float, int]]) -> float:
    """What the others would take for as many bytes."""
    nbytes = known[key][1]
    return median(
        base * max(1.0, nbytes / size) for other, (base, size) in known.items() if other != key
    )
