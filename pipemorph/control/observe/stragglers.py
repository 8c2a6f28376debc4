"""Finds stages that compute slower than they should. Pure, without a clock.

Two comparisons, since a stage's ops take as long as its layers need and stages differ:

- *Against its peers*: ranks that hold the same stage in other columns of the mesh do the same work.
- *Against its own past*: a stage that takes longer than in its best iterations, while the others do
  not. If all take longer, the batch has changed, and nobody is slow.

Both compare medians of three iterations, which ranks report, so that a pause names nobody; where
ranks share processors, of nine. They do not arrive at the same moment: a stage is named if it is
slow in comparisons some time apart. A straggler only informs people: no order of ops makes up for
it. What helps is another device, or fewer layers there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import nlargest
from statistics import median_low

from pipemorph.api.mesh import MeshShape
from pipemorph.control.observe.events import Events
from pipemorph.control.observe.stage_book import WINDOWS
from pipemorph.wire import SHOWN, DeviceClock, StageState, Straggler, StragglersView

LEAST_WINDOWS = 5
"""Fewest profiles in a median that is compared."""
STARTS, ENDS = 1.2, 1.1
"""Times as long as the others or the past from which a stage is slow, and until which it stays so.
A device at another clock, or one that throttles, differs by more; the speeds of healthy devices of
one kind differ by a few percent."""
CONFIRM_SECONDS, CONFIRM_ITERATIONS = 1.0, 1
"""For which a stage must seem slow, or well again, in every comparison: the paces of an iteration
come within less."""


@dataclass(eq=False)
class _Stage:
    paces: dict[int, StageState] = field(default_factory=dict)
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

    def take(self, state: StageState) -> None:
        """Process the newest medians of one column of a stage."""
        if state.profiles < LEAST_WINDOWS:
            return
        stage = self._stages[state.stage]
        stage.paces[state.replica] = state
        stage.changed = True

    def compare(self, now: float, iteration: int) -> None:
        """Compare the paces of stages. Call it about once a second. ``now``: wall clock."""
        changed = [stage for stage in self._stages if stage.changed]
        for stage in changed:
            stage.changed = False
            pace = stage.pace = median_low(each.pace for each in stage.paces.values())
            if any(each.profiles >= WINDOWS for each in stage.paces.values()):
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
                    if each.pace < usual and not self._known(number, each.replica):
                        continue  # As nearly all.
                    self._judge(
                        (number, each.replica),
                        (each.pace, each.clock),
                        stage.pace,
                        (now, iteration),
                    )
            if stage.best is not None:
                clocked = [each for each in stage.paces.values() if each.clock is not None]
                lowest = min(clocked, key=_mhz, default=None)
                self._judge(
                    (number, None),
                    (stage.pace, lowest.clock if lowest is not None else None),
                    stage.best * common,
                    (now, iteration),
                    common,
                )

    def _known(self, *key: int) -> bool:
        return key in self._slow or key in self._turning

    def _common(self) -> float:
        """Times as long as in its past that the median stage takes: what the batch does to all."""
        ratios = [s.pace / s.best for s in self._stages if s.pace and s.best]
        return max(1.0, median_low(ratios)) if ratios else 1.0

    def _judge(
        self,
        key: tuple[int, int | None],
        pace: tuple[float, DeviceClock | None],
        usual: float,
        at: tuple[float, int],
        common: float = 1.0,
    ) -> None:
        """Judge a pace. ``usual``: of its peers, or of its past with what is ``common`` to all
        stages. ``at``: time and iteration."""
        if not usual:
            return
        now, iteration = at
        seconds, clock = pace
        named = key in self._slow
        slow = seconds / usual >= (ENDS if named else STARTS)
        if slow is not named:
            since, began = self._turning.setdefault(key, (now, iteration))
            if now - since < CONFIRM_SECONDS or iteration - began < CONFIRM_ITERATIONS:
                return
        self._turning.pop(key, None)
        if slow:
            straggler = Straggler(*key, seconds, usual / common, clock)
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


def _mhz(state: StageState) -> int:
    return state.clock.mhz if state.clock is not None else 0
