"""Finds stages that compute slower than they should. Pure, without a clock.

Two comparisons, since a stage's ops take as long as its layers need and stages differ:

- *Against its peers*: ranks that hold the same stage in other columns of the mesh do the same work.
- *Against its own past*: a stage that takes longer than in its best iterations, while the others do
  not. If all take longer, the batch has changed, and nobody is slow.

Both compare medians of several iterations, so that a pause names nobody. A straggler only informs
people: no order of ops makes up for it. What helps is another device, or fewer layers there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import nlargest
from statistics import median_low

from pipemorph.api.mesh import MeshShape
from pipemorph.control.observe.events import Events
from pipemorph.wire import SHOWN, DeviceClock, StageProfile, Straggler, StragglersView

WINDOWS = 9
"""Profiles in a median."""
LEAST_WINDOWS = 5
STARTS, ENDS = 1.2, 1.1
"""Times as long as the others or the past from which a stage is slow, and until which it stays so.
A device at another clock, or one that throttles, differs by more; the speeds of healthy devices of
one kind differ by a few percent."""


class _Round:
    """Whether all have reported since the last round. One that has become silent holds up the
    others for one round only."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._count = 0

    def complete(self, which: int, of: int) -> bool:
        self._seen.add(which)
        self._count += 1
        if len(self._seen) < of and self._count < 2 * of:
            return False
        self._seen.clear()
        self._count = 0
        return True


@dataclass
class _Stage:
    columns: dict[int, deque[float]] = field(default_factory=dict)
    medians: dict[int, float] = field(default_factory=dict)
    clocks: dict[int, DeviceClock] = field(default_factory=dict)
    """By column; without those that do not report any."""
    round: _Round = field(default_factory=_Round)
    pace: float | None = None
    """Seconds of its median column."""
    best: float | None = None
    """The least pace so far."""


class StragglerBook:
    """Op times of all stages in all columns. Medians are compared when all of a stage, or all
    stages, have reported anew: else those that report first would seem slow, or fast."""

    def __init__(self, stages: int, mesh: MeshShape, events: Events) -> None:
        self._stages = [_Stage() for _ in range(stages)]
        self._mesh, self._events = mesh, events
        self._round = _Round()
        self._slow: dict[tuple[int, int | None], Straggler] = {}

    def observe(self, profile: StageProfile, now: float, iteration: int) -> None:
        """Process the op times of one stage in one column. ``now``: wall clock, seconds."""
        seconds = profile.forward + profile.backward_input + profile.backward_weight
        number, column = profile.stage, profile.replica
        stage = self._stages[number]
        windows = stage.columns.setdefault(column, deque(maxlen=WINDOWS))
        windows.append(seconds)
        stage.clocks.pop(column, None)
        if profile.clock is not None:
            stage.clocks[column] = profile.clock
        if len(windows) >= LEAST_WINDOWS:
            stage.medians[column] = median_low(windows)
        if not stage.round.complete(column, self._mesh.columns) or not stage.medians:
            return
        pace = stage.pace = median_low(stage.medians.values())
        if max(map(len, stage.columns.values())) == WINDOWS:
            stage.best = min(stage.best or pace, pace)
        if len(stage.medians) > 1:
            for each, took in stage.medians.items():
                found = Straggler(number, each, took, pace, stage.clocks.get(each))
                self._judge(found, 1.0, now, iteration)
        if self._round.complete(number, len(self._stages)):
            common = self._common()
            for i, other in enumerate(self._stages):
                if other.pace is not None and other.best is not None:
                    lowest = min(other.clocks.values(), key=lambda c: c.mhz, default=None)
                    found = Straggler(i, None, other.pace, other.best, lowest)
                    self._judge(found, common, now, iteration)

    def _common(self) -> float:
        """Times as long as in its past that the median stage takes: what the batch does to all."""
        ratios = [s.pace / s.best for s in self._stages if s.pace and s.best]
        return max(1.0, median_low(ratios)) if ratios else 1.0

    def _judge(self, found: Straggler, common: float, now: float, iteration: int) -> None:
        key = found.stage, found.column
        if not found.usual:
            return
        slow = found.ratio / common >= (ENDS if key in self._slow else STARTS)
        if slow and key not in self._slow:
            self._events.add(now, iteration, found.text(self._mesh))
        elif not slow and key in self._slow:
            was = self._slow.pop(key).text(self._mesh).split(" computes ")[0]
            self._events.add(now, iteration, f"{was} computes as fast as it should again")
        if slow:
            self._slow[key] = found

    def view(self) -> StragglersView:
        paces = tuple(stage.pace for stage in self._stages if stage.pace is not None)
        known = len(paces) == len(self._stages) and all(paces)
        slowest = nlargest(SHOWN, self._slow.values(), key=lambda each: each.ratio)
        return StragglersView(known, len(self._slow), tuple(slowest), paces if known else ())
