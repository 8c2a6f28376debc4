"""A plan but for its version, which it only gets when it is issued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipemorph.api.spec import JobSpec
from pipemorph.control.memory_limits import Limits, Room, excess
from pipemorph.planning import Dispatch, Path, Plan, Schedule


class PlanBody(NamedTuple):
    """What the ranks run, how each link's bytes travel, and what a stage may hold. Policy and
    dispatch are those of the spec, for every plan of a job."""

    schedule: Schedule
    paths: tuple[Path, ...]
    limits: Limits

    @staticmethod
    def of(plan: Plan) -> PlanBody:
        return PlanBody(plan.schedule, plan.paths, Limits.of(plan))

    def plan(self, spec: JobSpec, version: int) -> Plan:
        """The plan of this body, under a version."""
        return Plan(
            version=version,
            policy=spec.schedule.policy_kind,
            schedule=self.schedule,
            paths=self.paths,
            in_flight_limits=self.limits.in_flight,
            dispatch=spec.schedule.dispatch_kind,
            device_limits=self.limits.device,
        )

    def excess(self, rooms: Sequence[Room], dispatch: Dispatch) -> str | None:
        """Where it holds more than there is room for, for a sentence; None if nowhere."""
        return excess(self.schedule, self.limits, rooms, dispatch)
