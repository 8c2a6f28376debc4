"""What delegating takes of the ops at the ends of a link, learned from op times on both routes.

A delegated message is copied by the rank that computes, or beside it. So an F or a B is longer for
each message that it sends or receives on the delegated route. How much is measured: the same stages
run with and without delegated ends, before and after a change of plan. What else changed meanwhile,
as the clock of all devices, shows in the stages whose ends did not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pipemorph.planning import Plan, Route, StageTimes

SETTLED = 9
"""Iterations under a plan after which op times are those under it: as many as are in a median."""
MOSTLY = 5
"""Iterations after which their median is."""
LOOK_EVERY = 3
"""Iterations between two looks at op times."""
LEAST, MOST = 0.01, 0.5
"""Of an op: less is within the error of op times, and more is not the copies."""


@dataclass(frozen=True)
class RouteCost:
    """``part``: of an op, by which it is longer for each delegated message. ``measured_on``: the
    routes on which the op times at hand were measured; empty if that does not matter."""

    part: float = 0.0
    measured_on: tuple[Route, ...] = ()

    def on(self, stages: tuple[StageTimes, ...], routes: Sequence[Route]) -> tuple[StageTimes, ...]:
        """The op times as they would be on other routes."""
        if not self.part or not self.measured_on or self.measured_on == tuple(routes):
            return stages
        pairs = zip(stages, _ends(self.measured_on), _ends(routes), strict=True)
        return tuple(self._moved(stage, was, now) for stage, was, now in pairs)

    def _moved(self, stage: StageTimes, was: int, now: int) -> StageTimes:
        if was == now:
            return stage
        factor = (1 + self.part * now) / (1 + self.part * was)
        fused, extra = stage.fused_backward, (factor - 1) * stage.backward_input
        return stage.model_copy(
            update={
                "forward": factor * stage.forward,
                "backward_input": stage.backward_input + extra,
                "fused_backward": None if fused is None else fused + extra,
            }
        )


class RouteCosts:
    """Learns the cost for one job."""

    def __init__(self) -> None:
        self._part = 0.0
        self._measured_on: tuple[Route, ...] = ()
        self._direct: tuple[StageTimes, ...] | None = None
        """The newest op times while no link was delegated."""
        self._direct_at = 0
        """The newest iteration then."""
        self._known: tuple[Route, ...] = ()
        """Routes of the newest change, which has been looked at."""
        self._seen_at = -LOOK_EVERY

    def due(self, last: int) -> bool:
        """Whether to look at op times again: not with each report, of which a host has many.
        ``last``: the index of the newest iteration."""
        if last - self._seen_at < LOOK_EVERY:
            return False
        self._seen_at = last
        return True

    @property
    def now(self) -> RouteCost:
        return RouteCost(self._part, self._measured_on)

    def observe(
        self,
        stages: tuple[StageTimes, ...],
        plan: Plan,
        *,
        iterations: int,
        last: int,
        failed_over: bool = False,
    ) -> None:
        """Note op times. ``iterations``: how many have run under this plan; ``last``: the index of
        the newest. Replicas with plans of their own have other routes, and teach nothing; nor do
        routes that are others than the plan's, since a direct one broke (``failed_over``).

        Only op times from shortly before a change and from shortly after it are compared: what
        makes a stage slow later is not what delegating takes."""
        if plan.own or failed_over:
            self._measured_on = ()
            return
        if iterations < MOSTLY:
            return
        self._measured_on = plan.routes
        if iterations < SETTLED:
            return
        if not plan.delegated:
            self._direct, self._direct_at, self._known = stages, last, ()
            return
        fresh, self._known = self._known != plan.routes, plan.routes
        began = last - iterations + 1
        if fresh and self._direct is not None and began - self._direct_at <= SETTLED + LOOK_EVERY:
            self._learn(self._direct, stages, plan.routes)

    def _learn(
        self,
        direct: Sequence[StageTimes],
        stages: Sequence[StageTimes],
        routes: Sequence[Route],
    ) -> None:
        found: dict[int, list[float]] = {}
        for before, stage, ends in zip(direct, stages, _ends(routes), strict=True):
            was = before.forward + before.backward_input
            if was > 0:
                ratio = (stage.forward + stage.backward_input) / was
                found.setdefault(ends, []).append(ratio)
        usual = median(found.pop(0, [0.0]))
        if not (usual and found):
            return  # Whatever changed may have changed all stages.
        # The least: an end that is slow for another reason is not alone.
        part = min((ratio / usual - 1) / k for k, each in found.items() for ratio in each)
        self._part = min(part, MOST) if part >= LEAST else 0.0


def _ends(routes: Sequence[Route]) -> list[int]:
    """Number of delegated links at each stage."""
    away = [route is Route.DELEGATED for route in routes]
    return [above + below for above, below in zip([False, *away], [*away, False], strict=True)]
