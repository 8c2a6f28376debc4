"""Reads the plan that a job's agent hands in, for a controller that does not know it.

The ranks run it already. But it comes from a pod of the job, and what a controller decides next,
serves and saves follows from it: so it is checked like one that was never seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from pydantic import ValidationError

from pipemorph.api.spec import JobSpec
from pipemorph.api.status_base import MAX_STAGES
from pipemorph.control.decide.forecast import Situation, runnable
from pipemorph.control.observed.stages import in_flight_limits
from pipemorph.errors import InputError, one_line
from pipemorph.planning import Plan, Route
from pipemorph.wire import AdaptationRecord, HandIn, PlanMessage


class HandedIn(NamedTuple):
    """A checked message, and its plan."""

    message: HandIn
    plan: Plan


def read(body: bytes, spec: JobSpec) -> HandedIn:
    """Parse and check a message of the agent of a job of ``spec``. Takes seconds for the largest
    plans. Raises :class:`InputError` that names the field and the value."""
    try:
        message = HandIn.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise InputError(one_line(f"{where}: {first['msg']}")) from None
    directive = message.directive
    sent, record, version = directive.plan, directive.record, directive.plan_version
    if sent.version != version:
        raise InputError(f"directive.plan.version is {sent.version}; expected {version}")
    if record is None or record.plan_version != version:
        raise InputError(f"directive.record is not that of plan v{version}")
    for each in (record, *message.records):
        _check_record(each, version, spec)
    every = range(spec.parallelism.mesh.replicas)
    others = list(chain.from_iterable(own.replicas for own in sent.own))
    if len(set(others)) < len(others) or not set(others) <= set(every):
        raise InputError(f"directive.plan.own: replicas {others[:8]} are not some of {every.stop}")
    for part in (sent, *(own.plan for own in sent.own)):
        _check_shape(part, spec)
    plan = sent.plan()
    if broken := runnable(plan):
        raise InputError(one_line(f"directive.plan: {broken}"))
    for each_plan in plan.each:
        _check_limits(each_plan, spec)
    return HandedIn(message, plan)


def _check_record(record: AdaptationRecord, version: int, spec: JobSpec) -> None:
    """Bound what goes to status."""
    if not 0 < record.plan_version <= version:
        raise InputError(f"a record is of plan v{record.plan_version}; expected 1 to {version}")
    longest = max(len(value) for _, value in record if isinstance(value, list))
    if longest > MAX_STAGES:
        raise InputError(
            f"a list in the record of plan v{record.plan_version} has {longest} items; expected at"
            f" most {MAX_STAGES}"
        )
    if any(row.link >= spec.parallelism.stages - 1 for row in record.links):
        raise InputError(f"the record of plan v{record.plan_version} names a link of another job")


def _check_shape(sent: PlanMessage, spec: JobSpec) -> None:
    """Check what needs no decoding, before anything large is made of it."""
    stages, schedule = spec.parallelism.stages, spec.schedule
    lists: Iterable[tuple[str, int, int, int]] = (
        ("stages", len(sent.stages), stages, stages),
        ("routes", len(sent.routes), stages - 1, stages - 1),
        ("in_flight_limits", len(sent.in_flight_limits), stages, stages),
        ("warmup", len(sent.warmup), stages, stages),
        ("device_limits", len(sent.device_limits), 0, stages),
        ("recompute", len(sent.recompute), 0, stages),
        ("waits", len(sent.waits), 0, stages),
        ("turns", len(sent.turns), 0, spec.parallelism.mesh.sizes["pp"]),
    )
    for name, found, none, some in lists:
        if found not in (none, some):
            raise InputError(f"directive.plan.{name} has {found} items; expected {some}")
    expected = schedule.microbatches
    if sent.microbatches != expected:
        raise InputError(
            f"directive.plan has {sent.microbatches} microbatches; expected {expected}"
        )
    if sent.policy is not schedule.policy_kind:
        raise InputError(f"directive.plan.policy is {sent.policy}; expected {schedule.policy_kind}")
    if any(own.own for own in (each.plan for each in sent.own)):
        raise InputError("directive.plan.own: a plan of some replicas has plans of its own")


def _check_limits(plan: Plan, spec: JobSpec) -> None:
    """Check that the plan keeps to the spec: no rank may hold more than it says."""
    if spec.transport.route == "direct" and Route.DELEGATED in plan.routes:
        raise InputError(
            "directive.plan.routes: a link is delegated; spec.transport.route is direct"
        )
    held = zip(plan.device_limits, plan.in_flight_limits, in_flight_limits(spec), strict=True)
    for stage, (device, in_all, most) in enumerate(held):
        found = min((limit for limit in (device, in_all) if limit is not None), default=None)
        if most is not None and (found is None or found > most):
            raise InputError(
                f"directive.plan: stage {stage} may hold {'all' if found is None else found}"
                f" microbatches; the spec allows {most}"
            )


def judged(record: AdaptationRecord, situation: Situation) -> Situation:
    """The situation that a plan was made for, from its record; the rest as in ``situation``."""
    slow, delays = list(situation.slow), list(situation.delays)
    wires, transfers = list(situation.wire_times), [0.0] * len(slow)
    for row in record.links:
        if row.health == "slow":
            slow[row.link], delays[row.link] = True, row.delay
            wires[row.link], transfers[row.link] = row.wire_time, row.transfer
    return replace(
        situation,
        slow=tuple(slow),
        delays=tuple(delays),
        wire_times=tuple(wires),
        transfers=tuple(transfers) if any(transfers) else (),
        own=(),
    )
