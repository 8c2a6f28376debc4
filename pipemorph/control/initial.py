"""The plan of version 0: what every rank and the controller derive from the spec alone."""

from __future__ import annotations

from functools import lru_cache

from pipemorph.control.profile import expected_times, in_flight_limits
from pipemorph.planning import (
    Link,
    Path,
    Plan,
    Problem,
    Schedule,
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


@lru_cache(maxsize=64)
def _schedule(problem: Problem) -> Schedule:
    """A host asks for the same plan when it checks a job and again when it controls it, and
    jobs of one kind can share one: a schedule is never changed."""
    return plan(problem).schedule


def initial_schedule(spec: JobSpec) -> Schedule:
    """Schedule of version 0. Raises :class:`~pipemorph.errors.InputError` if the spec allows
    none, as a fixed warm-up above an in-flight limit."""
    return _schedule(initial_problem(spec))


@lru_cache(maxsize=1024)
def _can_be_planned(problem: Problem) -> None:
    _schedule(problem)


def check_plan(spec: JobSpec) -> None:
    """Raise :class:`~pipemorph.errors.InputError` if the spec allows no plan. What was found
    good is remembered: a reconciler asks with every turn, and a large plan takes a second."""
    _can_be_planned(initial_problem(spec))


def initial_plan(spec: JobSpec) -> Plan:
    """Plan of version 0, the same on every machine: nothing but the spec goes in.

    Raises :class:`~pipemorph.errors.InputError`, one line.
    """
    return Plan(
        version=0,
        policy=spec.schedule.policy_kind,
        schedule=initial_schedule(spec),
        paths=initial_paths(spec),
        in_flight_limits=in_flight_limits(spec),
        dispatch=spec.schedule.dispatch_kind,
    )
