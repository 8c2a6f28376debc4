"""Which plan runs: prepared by each rank, committed by all at one iteration boundary.

At the end of iteration t every rank contributes the plans it has prepared to one small
collective. The newest plan that **all** have prepared is used from iteration t+2, so the
collective has a whole iteration to finish and nothing waits for it. Ranks hear of
directives at different times and may miss one that was soon replaced: a plan counts only if
every rank holds exactly that version.
"""

from __future__ import annotations

from collections.abc import Callable

from pipemorph.errors import InputError
from pipemorph.planning import Dispatch, Plan, validate, validate_online
from pipemorph_trainer.plans.agreement import CANDIDATES


class PlanBook:
    """The plans this rank has prepared.

    ``reserve`` makes room for a plan's messages; called while the plan in force still runs.
    """

    def __init__(self, first: Plan, reserve: Callable[[Plan], None]) -> None:
        check_plan(first, first)
        self._reserve = reserve
        self._plans = {first.version: first}
        self._in_force = first.version

    @property
    def in_force(self) -> Plan:
        return self._plans[self._in_force]

    @property
    def newest(self) -> int:
        return max(self._plans)

    def prepare(self, plan: Plan) -> None:
        """Make a plan ready to run. Raises :class:`InputError` if it does not fit the job;
        then it is never committed, since this rank does not offer it."""
        if plan.version <= self._in_force or plan.version in self._plans:
            return
        check_plan(plan, self.in_force)
        self._reserve(plan)
        self._plans[plan.version] = plan

    def versions(self) -> tuple[int, ...]:
        """What to offer: the plan in force, then the newest ones."""
        newest = sorted((v for v in self._plans if v != self._in_force), reverse=True)
        return (self._in_force, *newest[: CANDIDATES - 1])

    def commit(self, version: int) -> bool:
        """Use ``version`` from now on and forget older ones. True if that is a change."""
        changed = version != self._in_force
        if changed:
            self._in_force = version
            self._plans = {v: plan for v, plan in self._plans.items() if v >= version}
        return changed

    def prepared(self) -> list[Plan]:
        return list(self._plans.values())


def check_plan(plan: Plan, current: Plan) -> None:
    """Raise :class:`InputError` unless ``plan`` can replace ``current``."""
    have, want = plan.schedule, current.schedule
    if have.stage_count != want.stage_count or have.microbatches != want.microbatches:
        raise InputError(
            f"plan {plan.version} has {have.stage_count} stages and {have.microbatches} "
            f"microbatches; the job runs {want.stage_count} and {want.microbatches}"
        )
    if len(plan.paths) != have.stage_count - 1:
        raise InputError(
            f"plan {plan.version} has {len(plan.paths)} paths; expected {have.stage_count - 1}"
        )
    if plan.dispatch is Dispatch.ONLINE:
        validate(have)
        validate_online(plan.warmup, plan.in_flight_limits, device_limits=plan.device_limits)
    else:
        validate(have, plan.in_flight_limits, plan.device_limits)
