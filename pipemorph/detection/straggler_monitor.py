"""Finds stages that compute slower than they should. Pure, without a clock.

Stages differ in their layers, so there are two comparisons:

- *Against its peers*: ranks that hold the same stage in other columns of the mesh do the same work.
- *Against its own past*: a stage that takes longer than in its best iterations, while the others do
  not. If all take longer, the batch has changed, and no stage is slow.

Where the script gives costs of microbatches, paces are those at one cost: columns with other data
do other work. Where it gives none and microbatches differ in work, columns must differ by more than
the measured spread of that work explains.

Both compare medians of three iterations, which ranks report, so that a pause names no stage; nine
iterations where ranks share processors. Medians do not arrive at the same moment: a stage is named
if it is slow in comparisons some time apart. No order of ops makes up for a straggler: with
``adaptation.rebalance`` its replica gets fewer microbatches; else another device helps, or fewer
layers there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import nlargest
from statistics import median_low

from pipemorph.detection.event_log import EventLog
from pipemorph.detection.stage_monitor import MEDIAN_PROFILES, WORK_ERRORS
from pipemorph.protocol import MOST_LISTED, DeviceClockRate, StageState, Straggler, StragglersView
from pipemorph.spec.mesh import MeshShape

FEWEST_PROFILES = 5
"""Fewest profiles in a median that is compared."""
SLOW_FROM, SLOW_UNTIL = 1.2, 1.1
"""Ratios to the others or the past from which a stage is slow, and until which it stays slow. A
device at another clock, or one that throttles, differs by more; healthy ones by a few percent."""
CONFIRM_SECONDS, CONFIRM_ITERATIONS = 1.0, 1
"""Seconds and iterations in which a stage must seem slow, or healthy again, in every comparison:
the paces of an iteration arrive within less."""


@dataclass(eq=False)
class _StagePace:
    """Paces of one stage."""

    column_states: dict[int, StageState] = field(default_factory=dict)
    """States by column."""
    median_pace: float | None = None
    """Seconds of the median column."""
    best_pace: float | None = None
    """Least pace so far."""
    changed: bool = False

    @property
    def least_difference(self) -> float:
        """Least relative difference of two paces that differences in work do not explain."""
        return WORK_ERRORS * max(state.work_error for state in self.column_states.values())


class StragglerMonitor:
    """Compares the paces of all stages in all columns."""

    def __init__(self, stages: int, mesh: MeshShape, events: EventLog) -> None:
        self._stages = [_StagePace() for _ in range(stages)]
        self._mesh, self._events = mesh, events
        self._cost: float | None = None
        """Cost of a microbatch that all paces are for: the first that a rank reported."""
        self._stragglers: dict[tuple[int, int | None], Straggler] = {}
        self._turning: dict[tuple[int, int | None], tuple[float, int]] = {}
        """Stages that seem to have become slow or healthy; time and iteration of their turn."""

    def update_state(self, state: StageState) -> None:
        """Process the newest medians of one column of a stage."""
        if state.profiles < FEWEST_PROFILES:
            return
        stage = self._stages[state.stage]
        stage.column_states[state.replica] = state
        stage.changed = True

    def compare_paces(self, now: float, iteration: int) -> None:
        """Compare the paces of stages. Call it about once a second. ``now``: wall clock."""
        changed = [stage for stage in self._stages if stage.changed]
        for stage in changed:
            stage.changed = False
            pace = stage.median_pace = median_low(
                map(self._compute_pace, stage.column_states.values())
            )
            if any(each.profiles >= MEDIAN_PROFILES for each in stage.column_states.values()):
                stage.best_pace = min(stage.best_pace or pace, pace)
        if not changed and not self._turning:
            return
        turning = {number for number, _ in self._turning}
        common = self._compute_common_factor()
        for number, stage in enumerate(self._stages):
            if stage.median_pace is None:
                continue
            if len(stage.column_states) > 1 and (stage in changed or number in turning):
                usual = SLOW_UNTIL * stage.median_pace
                for each in stage.column_states.values():
                    pace = self._compute_pace(each)
                    if pace < usual and not self._is_followed(number, each.replica):
                        continue  # The common case.
                    self._judge_pace(
                        (number, each.replica),
                        (pace, each.clock),
                        stage.median_pace,
                        (now, iteration),
                        least=stage.least_difference,
                    )
            if stage.best_pace is not None:
                clocked = [each for each in stage.column_states.values() if each.clock is not None]
                lowest = min(clocked, key=_get_clock_mhz, default=None)
                self._judge_pace(
                    (number, None),
                    (stage.median_pace, lowest.clock if lowest is not None else None),
                    stage.best_pace * common,
                    (now, iteration),
                    # It includes differences in work: all stages compute the same batch.
                    common=common,
                )

    def _compute_pace(self, state: StageState) -> float:
        """Compute the pace of a state at the cost that all paces are for."""
        if state.cost is None:
            return state.pace
        self._cost = self._cost or state.cost
        return state.pace * self._cost / state.cost

    def _is_followed(self, *key: int) -> bool:
        return key in self._stragglers or key in self._turning

    def _compute_common_factor(self) -> float:
        """Ratio of the median stage's pace to its past: the effect of the batch on all stages."""
        ratios = [
            s.median_pace / s.best_pace for s in self._stages if s.median_pace and s.best_pace
        ]
        return max(1.0, median_low(ratios)) if ratios else 1.0

    def _judge_pace(
        self,
        key: tuple[int, int | None],
        pace: tuple[float, DeviceClockRate | None],
        usual: float,
        at: tuple[float, int],
        *,
        common: float = 1.0,
        least: float = 0.0,
    ) -> None:
        """Judge a pace. ``usual``: pace of its peers, or of its past times the factor ``common`` to
        all stages. ``at``: time and iteration. ``least``: relative difference that differences in
        work explain."""
        if not usual:
            return
        now, iteration = at
        seconds, clock = pace
        named = key in self._stragglers
        limit = 1 + least / 2 if named else 1 + least
        slow = seconds / usual >= max(SLOW_UNTIL if named else SLOW_FROM, limit)
        if slow is not named:
            since, began = self._turning.setdefault(key, (now, iteration))
            if now - since < CONFIRM_SECONDS or iteration - began < CONFIRM_ITERATIONS:
                return
        self._turning.pop(key, None)
        if slow:
            straggler = Straggler(*key, seconds, usual / common, clock)
            if not named:
                self._events.add_event(now, iteration, straggler.format_text(self._mesh))
            self._stragglers[key] = straggler
        elif named:
            was = self._stragglers.pop(key).format_text(self._mesh).split(" computes ")[0]
            self._events.add_event(now, iteration, f"{was} computes as fast as it should again")

    def build_view(self) -> StragglersView:
        """Build the view of the slowest stages."""
        paces = tuple(stage.median_pace for stage in self._stages if stage.median_pace is not None)
        known = len(paces) == len(self._stages) and all(paces)
        slowest = nlargest(MOST_LISTED, self._stragglers.values(), key=lambda each: each.ratio)
        return StragglersView(known, len(self._stragglers), tuple(slowest), paces if known else ())


def _get_clock_mhz(state: StageState) -> int:
    return state.clock.mhz if state.clock is not None else 0
