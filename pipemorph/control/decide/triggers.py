"""Finds causes for another decision, by comparing with the situation of the last one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipemorph.api.spec import JobSpec
from pipemorph.control.decide.forecast import Situation
from pipemorph.control.decide.rate_limit import HOLD, Pacing
from pipemorph.control.decide.replan import Cause
from pipemorph.control.decide.truth import BARRIER, OPS, Sources
from pipemorph.control.first_plan import initial_problem, initial_routes
from pipemorph.control.memory_limits import Room, excess
from pipemorph.control.observed.stages import expected_times
from pipemorph.planning import Plan, StageTimes
from pipemorph.wire import Health, LinkState

WARM_UP = 3
"""Iterations before measured op times are compared with the planned ones."""
PROFILE_EVERY = 50
"""Least iterations between two decisions for changed op times."""
COMPARE_FIRST, COMPARE_EVERY = 2, 5
"""Iterations between two comparisons of op times, before the first decision for them and after."""
READINGS = 5
"""Comparisons in a row that must differ. On a busy machine op times differ for a while, and a plan
for them is wrong by the time it is in force."""
MATERIAL = 0.25
"""Relative change of a delay that requires another decision."""
MATERIAL_OP = 0.2
"""Relative change of an op time that requires another decision."""

STEADY = 4
"""Holds, of HOLD iterations at least, after which a constant delay is considered once more: on a
route that was first used while the link was slow, it may be the route's normal wire time."""


_LINK_CAUSES: tuple[Cause, ...] = ("slow", "recovered", "worse", "eased", "varies")
"""Of several replicas, the first of these counts."""


class Progress(NamedTuple):
    """Progress of an attempt.

    ``last``: index of the newest finished iteration, -1 before the first; ``finished``: number of
    finished iterations that are kept; ``measured``: whether every stage has reported op times;
    ``applied``: whether the newest iteration ran the wanted plan, or there is no directive yet.
    """

    last: int
    finished: int
    measured: bool
    applied: bool


@dataclass
class Judgement:
    """The situation of the last decision of an attempt; at first, the one that the spec expects."""

    spec: JobSpec
    situation: Situation
    _assumed_times: bool
    """Whether plan 0 is for assumed op times, since the spec has none."""
    _after: int | None = None
    """The newest finished iteration at the last decision."""
    _cause: Cause | None = None
    """Of the last decision."""
    barrier: bool = True
    """Whether the plan for healthy links expects a barrier between iterations."""
    profiled_at: int | None = None
    """The newest finished iteration at the last decision for op times or memory limits."""
    _compare_from: int = 0
    _readings: tuple[tuple[StageTimes, ...], ...] = ()
    """Op times at the newest comparisons that differed, oldest first."""
    _fits: tuple[Plan, tuple[Room, ...]] | None = None
    """The plan that was last found to fit, and into what: that takes a walk over all of its ops."""

    @staticmethod
    def first(spec: JobSpec) -> Judgement:
        links = spec.parallelism.stages - 1
        assumed = expected_times(spec) is None
        situation = Situation(
            assumed=assumed,
            stages=initial_problem(spec).stages,
            wire_times=(0.0,) * links,
            delays=(0.0,) * links,
            slow=(False,) * links,
            unknown=(True,) * links,
            barrier=spec.schedule.objective != "period",
        )
        return Judgement(spec, situation, assumed, barrier=situation.barrier)

    def made(self, cause: Cause, situation: Situation, last: int) -> None:
        """Record a decision for ``cause``, made after iteration ``last``."""
        self.situation, self._after = situation, last
        self._cause = cause
        if cause in ("profile", "memory"):
            self.profiled_at, self._readings = last, ()
        if not any(situation.slow):
            self.barrier = situation.barrier

    def now(
        self,
        stages: tuple[StageTimes, ...],
        links: Sequence[LinkState],
        rooms: tuple[Room, ...],
        *,
        barrier: bool,
        own: Sequence[tuple[tuple[int, ...], Sequence[LinkState]]] = (),
    ) -> Situation:
        """The current situation. Values that are unknown or in doubt are those of the last one.

        ``own``: the links of every replica, where some are slow.
        """
        situation = replace(self.situation, stages=stages, rooms=rooms, barrier=barrier, own=())
        each = (
            _seen(situation, seen, self.situation.of(replicas)).links_of(replicas)
            for replicas, seen in own
        )
        return replace(_seen(situation, links, self.situation), own=tuple(each))

    def cause(
        self, now: Situation, wanted: Plan | None, progress: Progress, *, hold: int
    ) -> Cause | None:
        """Why the situation requires another decision; None if it does not.

        ``wanted``: the plan in effect, None if unknown; ``hold``: :attr:`Pacing.hold`.
        """
        if wanted is None:
            return "restart"
        before = self.situation
        if now.rooms != before.rooms and self._exceeds(wanted, now.rooms):
            return "memory"
        changes = [self._change(here, earlier) for here, earlier in now.beside(before)]
        for cause in _LINK_CAUSES:
            if cause in changes:
                return cause
        if self._is_steady(now, wanted, progress, hold):
            return "steady"
        if self.barrier_differs(now.barrier) and not any(now.slow):
            return "barrier"
        if self.profile_is_due(progress) and self._differs(now, progress):
            return "profile"
        return None

    def _exceeds(self, plan: Plan, rooms: tuple[Room, ...]) -> bool:
        if self._fits is not None and self._fits[0] is plan and self._fits[1] is rooms:
            return False
        if excess(plan, rooms) is not None:
            return True
        self._fits = plan, rooms
        return False

    def _change(self, now: Situation, before: Situation) -> Cause | None:
        """How the links of some replicas have changed."""
        links = range(len(now.slow))
        if any(now.slow[i] and not before.slow[i] for i in links):
            return "slow"
        if any(before.slow[i] and not now.slow[i] for i in links):
            return "recovered"
        change = [now.delays[i] - before.delays[i] for i in links]
        least = self.spec.adaptation.min_delay_ms / 1e3
        material = [max(least, MATERIAL * before.delays[i]) for i in links]
        narrowed = [now.transfer(i) - before.transfer(i) for i in links]
        if any(now.slow[i] and max(change[i], narrowed[i]) > material[i] for i in links):
            return "worse"
        if any(now.slow[i] and -min(change[i], narrowed[i]) > material[i] for i in links):
            return "eased"
        if any(now.varies(i) and not before.varies(i) for i in links):
            return "varies"
        return None

    def barrier_differs(self, barrier: bool) -> bool:
        """Whether the plan for healthy links expects otherwise."""
        return barrier != self.barrier

    def _is_steady(self, now: Situation, wanted: Plan, progress: Progress, hold: int) -> bool:
        since, direct = self._after, wanted.all_routes == initial_routes(self.spec)
        if since is None or self._cause == "steady" or direct:
            return False
        waited = progress.last - since
        return any(now.slow) and waited >= STEADY * max(HOLD, hold)

    def profile_is_due(self, progress: Progress) -> bool:
        """Whether to compare op times with the planned ones. Done every few iterations only, since
        it is the most expensive part of a report while links are healthy."""
        if not progress.measured or progress.last < self._compare_from:
            return False
        if self.profiled_at is None:
            return progress.finished >= WARM_UP
        return progress.last - self.profiled_at >= PROFILE_EVERY

    @property
    def readings(self) -> tuple[tuple[StageTimes, ...], ...]:
        """Op times at the comparisons that a decision for changed op times is based on; none if it
        is for other limits, which are known and not measured again and again."""
        return self._readings if len(self._readings) == READINGS else ()

    @property
    def compares(self) -> bool:
        """Whether op times differed at the newest comparison, so that the next one matters."""
        return 0 < len(self._readings) < READINGS

    def _differs(self, now: Situation, progress: Progress) -> bool:
        """Whether op times, reductions or normal wire times have differed from the planned ones
        for some time, or limits do now."""
        if progress.last >= self._compare_from:
            every = COMPARE_FIRST if self.profiled_at is None else COMPARE_EVERY
            self._compare_from = progress.last + every
            kept = (*self._readings, now.stages)[-READINGS:]
            self._readings = kept if self._times_differ(now) else ()
        return len(self._readings) == READINGS or self._limits_differ(now)

    def _times_differ(self, now: Situation) -> bool:
        """Whether op times, reductions or normal wire times differ from the planned ones now."""
        if self._assumed_times and self.profiled_at is None:
            return True
        before = self.situation
        scale = max(op for stage in now.stages for op in _ops(stage))
        ops = any(
            abs(new - old) > MATERIAL_OP * max(old, scale / 2)
            for new_stage, old_stage in zip(now.stages, before.stages, strict=True)
            for new, old in zip(_ops(new_stage), _ops(old_stage), strict=True)
        )
        tails = any(
            abs((new.reduction or 0.0) - (old.reduction or 0.0))
            > MATERIAL_OP * max(old.reduction or 0.0, scale / 2)
            for new, old in zip(now.stages, before.stages, strict=True)
        )
        wires = any(
            abs(new - old) > MATERIAL_OP * scale
            for new, old in zip(now.wire_times, before.wire_times, strict=True)
        )
        # A fused backward that was unknown, and is shorter.
        fused = any(
            old.fused_backward is None and new.fusing_pays
            for new, old in zip(now.stages, before.stages, strict=True)
        )
        return ops or tails or wires or fused

    def _limits_differ(self, now: Situation) -> bool:
        """Whether limits have changed."""
        return any(
            (new.in_flight_limit, new.device_limit, new.recompute_limit)
            != (old.in_flight_limit, old.device_limit, old.recompute_limit)
            for new, old in zip(now.stages, self.situation.stages, strict=True)
        )

    def is_time(
        self, cause: Cause, links: Sequence[LinkState], progress: Progress, pacing: Pacing
    ) -> bool:
        """Whether a decision may be made for this cause now. If not, the next report asks again."""
        finished = progress.last
        if cause == "memory":
            return True
        if cause in ("slow", "restart"):
            return pacing.may_hurry(finished)
        if finished == self._after and not (cause == "worse" and self._cause == "steady"):
            return False  # For a varying delay, at most one decision per iteration.
        if cause == "worse":
            return pacing.may_hurry(finished)
        if not progress.applied:
            return False
        if not pacing.is_settled(finished):
            return False
        if cause == "recovered":
            well = [
                link.since_iteration
                for link, was_slow in zip(links, self.situation.slow, strict=True)
                if was_slow and link.health is Health.HEALTHY and link.since_iteration is not None
            ]
            return pacing.may_return(
                finished,
                max(well, default=0),
                all_well=all(link.health is Health.HEALTHY for link in links),
                varied=any(self.situation.recent),
            )
        return True

    def sources(self, cause: Cause, now: Situation) -> Sources:
        """What a decision for this cause would be based on."""
        if cause == "profile":
            return frozenset({OPS})
        if cause == "barrier":
            return frozenset({BARRIER})
        least = self.spec.adaptation.min_delay_ms / 1e3
        changed = {
            i
            for here, before in now.beside(self.situation)
            for i, is_slow in enumerate(here.slow)
            if is_slow
            and (
                not before.slow[i]
                or max(
                    abs(here.delays[i] - before.delays[i]),
                    abs(here.transfer(i) - before.transfer(i)),
                )
                > max(least, MATERIAL * before.delays[i])
            )
        }
        return frozenset(changed or (i for i, is_slow in enumerate(now.slow) if is_slow))

    def detectable_at(self, now: Situation, links: Sequence[LinkState], iteration: int) -> int:
        """Iteration of the first window that showed the change."""
        turned = [
            link.since_iteration
            for link, was, is_slow in zip(links, self.situation.slow, now.slow, strict=True)
            if was != is_slow and link.since_iteration is not None
        ]
        # Other causes have no first window: the current iteration.
        return min([*turned, iteration])


def _seen(situation: Situation, links: Sequence[LinkState], before: Situation) -> Situation:
    """``situation`` with the state of its links. What is unknown or in doubt is as ``before``."""
    known = [
        link.health is not Health.UNKNOWN and not (link.in_doubt and before.slow[i])
        for i, link in enumerate(links)
    ]
    recent = tuple(
        link.recent if known[i] or before.varies(i) else () for i, link in enumerate(links)
    )
    failed_over = tuple(
        link.failed_over if known[i] else bool(before.failed_over and before.failed_over[i])
        for i, link in enumerate(links)
    )
    return replace(
        situation,
        wire_times=tuple(
            link.wire_time if known[i] else before.wire_times[i] for i, link in enumerate(links)
        ),
        delays=tuple(link.delay if known[i] else before.delays[i] for i, link in enumerate(links)),
        slow=tuple(
            link.health is Health.SLOW if known[i] else before.slow[i]
            for i, link in enumerate(links)
        ),
        unknown=tuple(link.health is Health.UNKNOWN for link in links),
        transfers=tuple(
            link.transfer if known[i] else before.transfer(i) for i, link in enumerate(links)
        ),
        recent=recent if any(recent) else (),
        failed_over=failed_over if any(failed_over) else (),
    )


def _ops(stage: StageTimes) -> tuple[float, float, float]:
    return stage.forward, stage.backward_input, stage.backward_weight
