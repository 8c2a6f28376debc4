"""Plan 0, which every rank and the controller derive from the spec alone."""

from __future__ import annotations

from functools import lru_cache
from weakref import WeakValueDictionary

from pydantic import ValidationError

from pipemorph.api.spec import JobSpec
from pipemorph.control.observed.stages import expected_times, in_flight_limits, stated_rooms
from pipemorph.errors import InputError, one_line
from pipemorph.planning import (
    Dispatch,
    Link,
    Plan,
    Policy,
    Problem,
    Route,
    Schedule,
    ScheduleError,
    StageTimes,
    link_on,
    plan,
)
from pipemorph.planning.simulation.core import Waits, as_fast_guided, planned_waits
from pipemorph.planning.validator import check_memory

QUICK_CELLS = 4096
"""Largest number of stages × microbatches that is planned within about 50 ms, so that a host can do
it in its own process. The largest possible job takes 100 times as long."""


def planning_rules(spec: JobSpec) -> JobSpec:
    """The spec without the fields that no plan depends on, such as the pod template: it is sent to
    other processes."""
    return spec.model_copy(update={"template": None, "placement": None})


def initial_routes(spec: JobSpec) -> tuple[Route, ...]:
    """Route of each link before any measurement: ``auto`` starts direct."""
    route = Route.DELEGATED if spec.transport.route == "delegated" else Route.DIRECT
    return (route,) * (spec.parallelism.stages - 1)


def initial_problem(spec: JobSpec) -> Problem:
    """The problem of plan 0: the op times of the spec, or else equal ones, and no delays.

    Raises :class:`~pipemorph.errors.InputError` if fields of the spec contradict each other.
    """
    stages = expected_times(spec)
    if stages is None:
        stages = tuple(
            StageTimes(forward=1, backward_input=1, backward_weight=1, in_flight_limit=limit)
            for limit in in_flight_limits(spec)
        )
    warmup, cut = spec.schedule.warmup, spec.parallelism
    several = cut.stages_per_rank > 1
    first = stated_rooms(spec)[0]  # Only emulated stages have a known size, which is that of all.
    memory = first.memory // first.size if first.memory is not None and first.size else None
    try:
        return Problem(
            microbatches=spec.schedule.microbatches,
            stages=stages,
            links=(Link(),) * (len(stages) - 1),
            policy=spec.schedule.policy_kind,
            warmup=tuple(warmup) if warmup is not None else None,
            objective="period" if spec.schedule.objective == "period" else "makespan",
            dispatch=spec.schedule.dispatch_kind,
            ranks=cut.mesh.sizes["pp"] if several else None,
            placement=cut.stage_placement,
            rank_memory=memory,
        )
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise InputError(one_line(message)) from None


@lru_cache(maxsize=64)
def _schedule(problem: Problem) -> Schedule:
    """Cached: a host needs the same schedule to check a job and to control it. Schedules are never
    modified."""
    return plan(problem).schedule


@lru_cache(maxsize=2)
def _schedule_for_others(problem: Problem) -> Schedule:
    """Cached only briefly: the largest schedules take 10 MB and are not used in this process. Equal
    jobs often come one after the other."""
    return plan(problem).schedule


_shared: WeakValueDictionary[Problem, Schedule] = WeakValueDictionary()
"""Schedules in use: equal jobs share one."""


def share(problem: Problem, schedule: Schedule) -> Schedule:
    """Use ``schedule``, which may come from another process, for ``problem``, unless this process
    has one already. Returns the one that is used."""
    return _shared.setdefault(problem, schedule)


def is_quick(spec: JobSpec) -> bool:
    """Whether a host may compute plan 0 in its own process."""
    return spec.parallelism.stages * spec.schedule.microbatches <= QUICK_CELLS


def is_shared(spec: JobSpec) -> bool:
    """Whether the schedule of plan 0 is in use in this process."""
    return initial_problem(spec) in _shared


def initial_schedule(spec: JobSpec) -> Schedule:
    """Schedule of plan 0. Raises :class:`~pipemorph.errors.InputError` if the spec allows none,
    such as a fixed warm-up above an in-flight limit."""
    problem = initial_problem(spec)
    found = _shared.get(problem)
    return found if found is not None else share(problem, _schedule(problem))


def schedule_for_others(spec: JobSpec) -> Schedule:
    """:func:`initial_schedule` for another process. This process does not keep the result."""
    return _schedule_for_others(initial_problem(spec))


def check_schedule(spec: JobSpec) -> None:
    """Raise :class:`~pipemorph.errors.InputError` if the spec allows no schedule."""
    schedule_for_others(spec)


def initial_plan(spec: JobSpec) -> Plan:
    """Plan 0. It depends only on the spec.

    Raises :class:`~pipemorph.errors.InputError`, one line.
    """
    schedule, problem = initial_schedule(spec), initial_problem(spec)
    dispatch = problem.dispatch
    if _may_go_guided(spec) and _goes_guided(problem, initial_routes(spec)):
        dispatch = Dispatch.GUIDED
    waits = _waits(problem) if dispatch is Dispatch.GUIDED else ()
    return Plan(
        version=0,
        policy=spec.schedule.policy_kind,
        schedule=schedule,
        routes=initial_routes(spec),
        in_flight_limits=in_flight_limits(spec),
        dispatch=dispatch,
        waits=waits,
    )


def _may_go_guided(spec: JobSpec) -> bool:
    """Whether the spec leaves guided dispatch open. The other policies keep their order."""
    return (
        spec.schedule.dispatch == "auto"
        and spec.schedule.policy_kind is Policy.PIPEMORPH
        and spec.parallelism.mesh.lockstep == 1
    )


@lru_cache(maxsize=64)
def _waits(problem: Problem) -> Waits:
    return planned_waits(_known(problem), problem)


@lru_cache(maxsize=64)
def _goes_guided(problem: Problem, routes: tuple[Route, ...]) -> bool:
    """Whether plan 0 takes no longer with guided dispatch while all links are well."""
    several = problem.ranks is not None
    links = tuple(link_on(route, 0.0, several=several) for route in routes)
    real = problem.model_copy(update={"links": links})
    schedule = _known(problem)
    try:
        check_memory(schedule, problem.sizes, problem.rank_memory, as_peaks=True)
    except ScheduleError:
        return False  # Only in their order do the stages of a rank fit into its memory.
    return as_fast_guided(schedule, real, _waits(problem))


def _known(problem: Problem) -> Schedule:
    return _shared.get(problem) or _schedule(problem)
