"""The plan of version 0: what every rank and the controller derive from the spec alone."""

from __future__ import annotations

from functools import lru_cache
from weakref import WeakValueDictionary

from pydantic import ValidationError

from pipemorph.api.spec import JobSpec
from pipemorph.control.observe.stage_profile import expected_times, in_flight_limits
from pipemorph.errors import InputError, one_line
from pipemorph.planning import (
    Link,
    Plan,
    Problem,
    Route,
    Schedule,
    StageTimes,
    plan,
)

QUICK_CELLS = 4096
"""Stages × microbatches of a job that is planned within some 50 ms: a host need not have that
done elsewhere. The largest there may be takes 100 times as long."""


def planning_rules(spec: JobSpec) -> JobSpec:
    """The spec without what no plan depends on: a pod template need not travel between
    processes."""
    return spec.model_copy(update={"template": None, "placement": None})


def initial_routes(spec: JobSpec) -> tuple[Route, ...]:
    """Route per link before anything is known: ``auto`` starts direct."""
    route = Route.DELEGATED if spec.transport.route == "delegated" else Route.DIRECT
    return (route,) * (spec.parallelism.stages - 1)


def initial_problem(spec: JobSpec) -> Problem:
    """The problem version 0 is planned for: stated op times, or equal ones, and no delay.

    Raises :class:`~pipemorph.errors.InputError` for a spec of which each field is good, and
    together they are not.
    """
    stages = expected_times(spec)
    if stages is None:
        stages = tuple(
            StageTimes(forward=1, backward_input=1, backward_weight=1, in_flight_limit=limit)
            for limit in in_flight_limits(spec)
        )
    warmup = spec.schedule.warmup
    try:
        return Problem(
            microbatches=spec.schedule.microbatches,
            stages=stages,
            links=(Link(),) * (len(stages) - 1),
            policy=spec.schedule.policy_kind,
            warmup=tuple(warmup) if warmup is not None else None,
        )
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise InputError(one_line(message)) from None


@lru_cache(maxsize=64)
def _schedule(problem: Problem) -> Schedule:
    """A host asks for the same plan when it checks a job and again when it controls it: a
    schedule is never changed."""
    return plan(problem).schedule


@lru_cache(maxsize=2)
def _schedule_for_others(problem: Problem) -> Schedule:
    """The largest take 10 MB, and here they are not held by anybody; jobs of one kind often come
    one after the other."""
    return plan(problem).schedule


_shared: WeakValueDictionary[Problem, Schedule] = WeakValueDictionary()
"""Those that somebody holds: jobs of one kind share one."""


def share(problem: Problem, schedule: Schedule) -> Schedule:
    """Let ``schedule``, perhaps made in another process, be the one for ``problem`` here, unless
    there is one already. Returns the one that is used."""
    return _shared.setdefault(problem, schedule)


def is_quick(spec: JobSpec) -> bool:
    """Whether the plan of the start takes no longer than a host may compute in between."""
    return spec.parallelism.stages * spec.schedule.microbatches <= QUICK_CELLS


def is_shared(spec: JobSpec) -> bool:
    """Whether somebody holds the schedule of the start."""
    return initial_problem(spec) in _shared


def initial_schedule(spec: JobSpec) -> Schedule:
    """Schedule of version 0. Raises :class:`~pipemorph.errors.InputError` if the spec allows
    none, as a fixed warm-up above an in-flight limit."""
    problem = initial_problem(spec)
    found = _shared.get(problem)
    return found if found is not None else share(problem, _schedule(problem))


def schedule_for_others(spec: JobSpec) -> Schedule:
    """:func:`initial_schedule` for another process: nobody holds it in this one."""
    return _schedule_for_others(initial_problem(spec))


def check_schedule(spec: JobSpec) -> None:
    """Raises :class:`~pipemorph.errors.InputError` if the spec allows no schedule."""
    schedule_for_others(spec)


def initial_plan(spec: JobSpec) -> Plan:
    """Plan of version 0, the same on every machine: nothing but the spec goes in.

    Raises :class:`~pipemorph.errors.InputError`, one line.
    """
    return Plan(
        version=0,
        policy=spec.schedule.policy_kind,
        schedule=initial_schedule(spec),
        routes=initial_routes(spec),
        in_flight_limits=in_flight_limits(spec),
        dispatch=spec.schedule.dispatch_kind,
    )
