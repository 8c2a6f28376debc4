"""Finds stages that compute slower than they should. Pure, without a clock.

Two comparisons, since a stage's ops take as long as its layers need and stages differ:

- *Against its peers*: ranks that hold the same stage in other columns of the mesh do the same work.
- *Against its own past*: a stage that takes longer than in its best iterations, while the others do
  not. If all take longer, the batch has changed, and nobody is slow.

Both compare medians of several iterations, so that a pause names nobody. An agent keeps those of
its ranks (:class:`PaceBook`), and the job's agent compares all of them (:class:`StragglerBook`).
They do not arrive at the same moment: a stage is named if it is slow in comparisons some time
apart. A straggler only informs people: no order of ops makes up for it. What helps is another
device, or fewer layers there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import nlargest
from statistics import median_low

from pipemorph.api.mesh import MeshShape
from pipemorph.control.observe.events import Events
from pipemorph.wire import SHOWN, DeviceClock, StageProfile, Straggler, StragglersView
from pipemorph.wire.parts import Pace

WINDOWS = 9
"""Profiles in a median."""
LEAST_WINDOWS = 5
STARTS, ENDS = 1.2, 1.1
"""Times as long as the others or the past from which a stage is slow, and until which it stays so.
A device at another clock, or one that throttles, differs by more; the speeds of healthy devices of
one kind differ by a few percent."""
CONFIRM_SECONDS, CONFIRM_ITERATIONS = 2.0, 2
"""For which a stage must seem slow, or well again, in every comparison: the paces of an iteration
come within less."""


class PaceBook:
    """Op times of stages in columns, of the ranks that report here."""

    def __init__(self) -> None:
        self._windows: dict[tuple[int, int], deque[float]] = {}
        self._clocks: dict[tuple[int, int], DeviceClock | None] = {}
        self._changed: dict[tuple[int, int], None] = {}

    def observe(self, profile: StageProfile) -> None:
        key = profile.stage, profile.replica
        windows = self._windows.setdefault(key, deque(maxlen=WINDOWS))
        windows.append(profile.forward + profile.backward_input + profile.backward_weight)
        self._clocks[key] = profile.clock
        self._changed[key] = None

    def changed(self) -> list[Pace]:
        """The paces of those that have reported since the last call, and often enough."""
        found, self._changed = self._changed, {}
        return [
            Pace(
                stage=key[0],
                column=key[1],
                seconds=median_low(self._windows[key]),
                settled=len(self._windows[key]) == WINDOWS,
                clock=self._clocks[key],
            )
            for key in found
            if len(self._windows[key]) >= LEAST_WINDOWS
        ]


@dataclass(eq=False)
class _Stage:
    paces: dict[int, Pace] = field(default_factory=dict)
    """By column."""
    pace: float | None = None
    """Seconds of its median column."""
    best: float | None = None
    """The least pace so far."""
    changed: bool = False


class StragglerBook:
    """Paces of all stages in all columns."""

    def __init__(self, stages: int, mesh: MeshShape, events: Events) -> None:
        self._stages = [_Stage() for _ in range(stages)]
        self._mesh, self._events = mesh, events
        self._slow: dict[tuple[int, int | None], Straggler] = {}
        self._turning: dict[tuple[int, int | None], tuple[float, int]] = {}
        """Those that seem to have become slow or well, since when: time and iteration."""

    def take(self, paces: Iterable[Pace]) -> None:
        """Note the newest paces."""
        for pace in paces:
            stage = self._stages[pace.stage]
            stage.paces[pace.column] = pace
            stage.changed = True

    def compare(self, now: float, iteration: int) -> None:
        """Compare the paces of stages. Call it about once a second. ``now``: wall clock."""
        changed = [stage for stage in self._stages if stage.changed]
        for stage in changed:
            stage.changed = False
            pace = stage.pace = median_low(each.seconds for each in stage.paces.values())
            if any(each.settled for each in stage.paces.values()):
                stage.best = min(stage.best or pace, pace)
        if not changed and not self._turning:
            return
        turning = {number for number, _ in self._turning}
        common = self._common()
        for number, stage in enumerate(self._stages):
            if stage.pace is None:
                continue
            if len(stage.paces) > 1 and (stage in changed or number in turning):
                usual = ENDS * stage.pace
                for each in stage.paces.values():
                    if each.seconds < usual and not self._known(number, each.column):
                        continue  # As nearly all.
                    self._judge((number, each.column), each, stage.pace, (now, iteration))
            if stage.best is not None:
                clocked = [each for each in stage.paces.values() if each.clock is not None]
                lowest = min(clocked, key=_mhz, default=None)
                whole = Pace.model_construct(
                    stage=number,
                    column=0,
                    seconds=stage.pace,
                    clock=lowest.clock if lowest is not None else None,
                )
                self._judge((number, None), whole, stage.best * common, (now, iteration), common)

    def _known(self, *key: int) -> bool:
        return key in self._slow or key in self._turning

    def _common(self) -> float:
        """Times as long as in its past that the median stage takes: what the batch does to all."""
        ratios = [s.pace / s.best for s in self._stages if s.pace and s.best]
        return max(1.0, median_low(ratios)) if ratios else 1.0

    def _judge(
        self,
        key: tuple[int, int | None],
        found: Pace,
        usual: float,
        at: tuple[float, int],
        common: float = 1.0,
    ) -> None:
        """Judge a pace. ``usual``: of its peers, or of its past with what is ``common`` to all
        stages. ``at``: time and iteration."""
        if not usual:
            return
        now, iteration = at
        named = key in self._slow
        slow = found.seconds / usual >= (ENDS if named else STARTS)
        if slow is not named:
            since, began = self._turning.setdefault(key, (now, iteration))
            if now - since < CONFIRM_SECONDS or iteration - began < CONFIRM_ITERATIONS:
                return
        self._turning.pop(key, None)
        if slow:
            straggler = Straggler(*key, found.seconds, usual / common, found.clock)
            if not named:
                self._events.add(now, iteration, straggler.text(self._mesh))
            self._slow[key] = straggler
        elif named:
            was = self._slow.pop(key).text(self._mesh).split(" computes ")[0]
            self._events.add(now, iteration, f"{was} computes as fast as it should again")

    def view(self) -> StragglersView:
        paces = tuple(stage.pace for stage in self._stages if stage.pace is not None)
        known = len(paces) == len(self._stages) and all(paces)
        slowest = nlargest(SHOWN, self._slow.values(), key=lambda each: each.ratio)
        return StragglersView(known, len(self._slow), tuple(slowest), paces if known else ())


def _mhz(pace: Pace) -> int:
    return pace.clock.mhz if pace.clock is not None else 0
