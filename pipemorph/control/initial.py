"""The plan of version 0: what every rank and the controller derive from the spec alone."""

from __future__ import annotations

from pipemorph.control.profile import expected_times, in_flight_limits
from pipemorph.planning import (
    Link,
    Path,
    Plan,
    PlannedSchedule,
    Problem,
    StageTimes,
    plan,
)
from pipemorph.spec import JobSpec


def initial_paths(spec: JobSpec) -> tuple[Path, ...]:
    """Path per link before anything is known: ``auto`` starts direct."""
    path = Path.DELEGATED if spec.transport.path == "delegated" else Path.DIRECT
    return (path,) * (spec.parallelism.stages - 1)


def initial_problem(spec: JobSpec) -> Problem:
    """The problem version 0 is planned for: stated op times, or equal ones, and no delay."""
    stages = expected_times(spec)
    if stages is None:
        stages = tuple(
            StageTimes(forward=1, backward_input=1, backward_weight=1, in_flight_limit=limit)
            for limit in in_flight_limits(spec)
        )
    warmup = spec.schedule.warmup
    return Problem(
        microbatches=spec.schedule.microbatches,
        stages=stages,
        links=(Link(),) * (len(stages) - 1),
        policy=spec.schedule.policy_kind,
        warmup=tuple(warmup) if warmup is not None else None,
    )


def initial_schedule(spec: JobSpec) -> PlannedSchedule:
    """Schedule of version 0. Raises :class:`~pipemorph.errors.InputError` if the spec allows
    none, as a fixed warm-up above an in-flight limit."""
    return plan(initial_problem(spec))


def initial_plan(spec: JobSpec) -> Plan:
    """Plan of version 0, the same on every machine: nothing but the spec goes in.

    Raises :class:`~pipemorph.errors.InputError`, one line.
    """
    return initial_schedule(spec).to_plan(0, initial_paths(spec), spec.schedule.dispatch_kind)
