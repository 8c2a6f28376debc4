"""Initial plan, plan 0, which every rank and the controller derive from the spec alone."""

from __future__ import annotations

from functools import lru_cache
from weakref import WeakValueDictionary

from pydantic import ValidationError

from pipemorph.control.job_state.stages import (
    compute_stated_rooms,
    get_expected_times,
    get_in_flight_limits,
)
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
    build_link,
    plan,
)
from pipemorph.planning.simulation.execution import Waits, find_planned_waits, is_guided_as_fast
from pipemorph.planning.validator import check_rank_memory
from pipemorph.spec.job_spec import JobSpec

QUICK_PLAN_CELLS = 4096
"""Most stages × microbatches that a host plans in its own process: it takes about 50 ms. The
largest possible job takes 100 times as long."""


def select_planning_fields(spec: JobSpec) -> JobSpec:
    """Copy the spec, to send it to other processes, without fields that no plan depends on."""
    return spec.model_copy(update={"template": None, "placement": None})


def initial_routes(spec: JobSpec) -> tuple[Route, ...]:
    """Route of each link before any measurement: ``auto`` starts direct."""
    route = Route.DELEGATED if spec.transport.route == "delegated" else Route.DIRECT
    return (route,) * (spec.parallelism.stages - 1)


def build_initial_problem(spec: JobSpec) -> Problem:
    """Problem of plan 0: the op times of the spec, or else equal ones, and no delays.

    Raises :class:`~pipemorph.errors.InputError` if fields of the spec contradict each other.
    """
    stages = get_expected_times(spec)
    if stages is None:
        stages = tuple(
            StageTimes(forward=1, backward_input=1, backward_weight=1, in_flight_limit=limit)
            for limit in get_in_flight_limits(spec)
        )
    warmup, cut = spec.schedule.warmup, spec.parallelism
    several = cut.stages_per_rank > 1
    first = compute_stated_rooms(spec)[
        0
    ]  # Only emulated stages have a known size, equal for all of them.
    memory = (
        first.rank_memory // first.microbatch_bytes
        if first.rank_memory is not None and first.microbatch_bytes
        else None
    )
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
def _plan_schedule(problem: Problem) -> Schedule:
    """Plan a problem. Cached: a host needs the same schedule to check a job and to control it.
    Schedules are never modified."""
    return plan(problem).schedule


@lru_cache(maxsize=2)
def _plan_schedule_for_others(problem: Problem) -> Schedule:
    """Plan a problem for another process. The cache is small: the largest schedules take 10 MB, but
    equal jobs often come one after the other."""
    return plan(problem).schedule


_shared_schedules: WeakValueDictionary[Problem, Schedule] = WeakValueDictionary()
"""Schedules in use: equal jobs share one."""


def share_schedule(problem: Problem, schedule: Schedule) -> Schedule:
    """Use ``schedule``, which may come from another process, for ``problem``, unless this process
    has one already. Returns the schedule in use."""
    return _shared_schedules.setdefault(problem, schedule)


def plans_quickly(spec: JobSpec) -> bool:
    """True if a host may compute plan 0 in its own process."""
    return spec.parallelism.stages * spec.schedule.microbatches <= QUICK_PLAN_CELLS


def has_shared_schedule(spec: JobSpec) -> bool:
    """True if the schedule of plan 0 is in use in this process."""
    return build_initial_problem(spec) in _shared_schedules


def make_initial_schedule(spec: JobSpec) -> Schedule:
    """Schedule of plan 0. Raises :class:`~pipemorph.errors.InputError` if the spec allows none,
    such as a fixed warm-up above an in-flight limit."""
    problem = build_initial_problem(spec)
    found = _shared_schedules.get(problem)
    return found if found is not None else share_schedule(problem, _plan_schedule(problem))


def make_schedule_for_others(spec: JobSpec) -> Schedule:
    """Make the schedule of plan 0 for another process. This process does not store it."""
    return _plan_schedule_for_others(build_initial_problem(spec))


def check_schedule(spec: JobSpec) -> None:
    """Raise :class:`~pipemorph.errors.InputError` if the spec allows no schedule."""
    make_schedule_for_others(spec)


def initial_plan(spec: JobSpec) -> Plan:
    """Make plan 0. It depends only on the spec.

    Raises :class:`~pipemorph.errors.InputError`, one line.
    """
    schedule, problem = make_initial_schedule(spec), build_initial_problem(spec)
    dispatch = problem.dispatch
    if _may_dispatch_guided(spec) and _is_as_fast_guided(problem, initial_routes(spec)):
        dispatch = Dispatch.GUIDED
    waits = _plan_waits(problem) if dispatch is Dispatch.GUIDED else ()
    return Plan(
        version=0,
        policy=spec.schedule.policy_kind,
        schedule=schedule,
        routes=initial_routes(spec),
        in_flight_limits=get_in_flight_limits(spec),
        dispatch=dispatch,
        waits=waits,
    )


def _may_dispatch_guided(spec: JobSpec) -> bool:
    """True if the spec allows guided dispatch. Other policies than ``pipemorph`` are static."""
    return (
        spec.schedule.dispatch == "auto"
        and spec.schedule.policy_kind is Policy.PIPEMORPH
        and spec.parallelism.mesh.lockstep_size == 1
    )


@lru_cache(maxsize=64)
def _plan_waits(problem: Problem) -> Waits:
    return find_planned_waits(_get_schedule(problem), problem)


@lru_cache(maxsize=64)
def _is_as_fast_guided(problem: Problem, routes: tuple[Route, ...]) -> bool:
    """True if plan 0 takes no longer with guided dispatch while all links are healthy."""
    several = problem.ranks is not None
    links = tuple(build_link(route, 0.0, several=several) for route in routes)
    real = problem.model_copy(update={"links": links})
    schedule = _get_schedule(problem)
    try:
        check_rank_memory(schedule, problem.microbatch_sizes, problem.rank_memory, as_peaks=True)
    except ScheduleError:
        return False  # The stages of a rank fit into its memory only in the plan's order.
    return is_guided_as_fast(schedule, real, _plan_waits(problem))


def _get_schedule(problem: Problem) -> Schedule:
    return _shared_schedules.get(problem) or _plan_schedule(problem)
