"""From a problem to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter

from pipemorph.errors import InputError
from pipemorph.planning.ir import Path, Policy, Schedule
from pipemorph.planning.policies.classic import gpipe, one_f_one_b, zero_bubble
from pipemorph.planning.problem import Link, Problem, StageTimes
from pipemorph.planning.search.backend import lower_bound, search
from pipemorph.planning.search.order import to_schedule
from pipemorph.planning.search.variants import Variant, best_variant, has_variants
from pipemorph.planning.simulation.costs import Costs
from pipemorph.planning.simulation.lower_bound import SAME
from pipemorph.planning.simulation.simulator import Simulation, predict, run_static, timed
from pipemorph.planning.validator import validate

# Where a direct path's sends block compute, and how many queues the engine gives a link.
DIRECT_QUEUES, DIRECT_OUTSTANDING = 1, 2
DELEGATED_QUEUES = 8


@dataclass(frozen=True, kw_only=True)
class PlannedSchedule(Variant):
    """A schedule with what it was planned for and what it is predicted to take.

    ``problem`` is the one asked for, but with the device limits and in-flight caps the plan uses.
    No schedule is shorter than ``lower_bound``. ``planning_seconds`` is wall time; every other
    time is in the problem's unit.
    """

    lower_bound: float
    planning_seconds: float

    @cached_property
    def simulation(self) -> Simulation:
        """The static order under the problem's times: made when it is first asked for."""
        costs = Costs.of(self.problem)
        return timed(self.schedule, run_static(self.schedule, costs), costs)

    @property
    def gap(self) -> float:
        """How much longer than ``lower_bound``, as a fraction of it; 0 is proven shortest."""
        return self.makespan / self.lower_bound - 1 if self.lower_bound > 0 else 0.0


def plan(
    problem: Problem, policy: Policy | None = None, *, time_limit: float | None = None
) -> PlannedSchedule:
    """Plan with ``policy``, or with the problem's own.

    The same problem gives the same schedule on every machine: nothing depends on the time
    planning takes. Policy exact is the exception: it stops after ``time_limit`` seconds (by
    default :data:`pipemorph.planning.search.exact.TIME_LIMIT`), with what it has.

    Policy pipemorph decides where to offload within the device limits, and which stages fuse
    their backwards where ``fused_backward`` is shorter than both parts; the others keep the
    device limits as they are. Raises :class:`InputError` for a policy that cannot serve the
    problem.
    """
    began = perf_counter()
    policy = problem.policy if policy is None else policy
    if policy is Policy.PIPEMORPH and has_variants(problem):
        bound = lower_bound(problem)
        best = best_variant(problem)
        problem, schedule, makespan = best.problem, best.schedule, best.makespan
    elif policy is Policy.PIPEMORPH:
        found = search(problem)
        schedule = to_schedule(found.order, problem.microbatches)
        makespan, bound = found.makespan, found.bound
    elif policy is Policy.EXACT:
        if has_variants(problem):
            raise InputError(
                "policy exact plans split backwards and no offload; leave out device_limit, and a"
                " fused_backward shorter than backward_input + backward_weight"
            )
        # OR-tools is slow to import and not always there.
        from pipemorph.planning.search.exact import TIME_LIMIT, solve

        solved = solve(problem, TIME_LIMIT if time_limit is None else time_limit)
        schedule, makespan, bound = solved.schedule, solved.makespan, solved.bound
    else:
        schedule, bound = _made_by_hand(problem, policy), lower_bound(problem)
        makespan = predict(schedule, problem)
    validate(schedule, problem.in_flight_limits(), problem.device_limits())
    return PlannedSchedule(
        policy=policy,
        problem=problem,
        schedule=schedule,
        makespan=makespan,
        # Both are sums of the same times in another order; hide the last bit.
        lower_bound=makespan if makespan <= bound * (1 + SAME) else bound,
        planning_seconds=perf_counter() - began,
    )


def _made_by_hand(problem: Problem, policy: Policy) -> Schedule:
    match policy:
        case Policy.GPIPE:
            return gpipe(problem)
        case Policy.ONE_F_ONE_B:
            return one_f_one_b(problem)
        case Policy.ZERO_BUBBLE:
            return zero_bubble(problem)
        case Policy.ONE_F_ONE_B_INTERLEAVED | Policy.ZERO_BUBBLE_V:
            raise InputError(
                f"policy {policy.value} puts several stages on a rank; a plan made here has one"
                " (pipemorph.planning.policies.interleaved.plan_interleaved makes the other)"
            )
        case _:
            raise AssertionError(f"policy {policy.value} is not made by hand")


def plan_for(
    microbatches: int,
    stages: Sequence[StageTimes],
    delays: Sequence[float],
    paths: Sequence[Path] | None = None,
    *,
    policy: Policy = Policy.PIPEMORPH,
    queues: int = DELEGATED_QUEUES,
    half_duplex: bool = False,
) -> PlannedSchedule:
    """Plan for measured op times and link delays: what the adaptation controller asks for.

    ``stages`` and ``delays`` share one unit (seconds in the controller). ``paths[i]`` says
    how link *i* carries messages: see :func:`link_on`; None plans for pure latency.
    """
    problem = problem_for(
        microbatches, stages, delays, paths, queues=queues, half_duplex=half_duplex
    )
    return plan(problem, policy)


def problem_for(
    microbatches: int,
    stages: Sequence[StageTimes],
    delays: Sequence[float],
    paths: Sequence[Path] | None = None,
    *,
    queues: int = DELEGATED_QUEUES,
    half_duplex: bool = False,
) -> Problem:
    """The problem :func:`plan_for` plans, to predict other schedules on."""
    if paths is None:
        links = [Link(delay=delay) for delay in delays]
    else:
        links = [
            link_on(path, delay, queues=queues, half_duplex=half_duplex)
            for path, delay in zip(paths, delays, strict=True)
        ]
    return Problem(microbatches=microbatches, stages=tuple(stages), links=tuple(links))


def link_on(
    path: Path, delay: float, *, queues: int = DELEGATED_QUEUES, half_duplex: bool = False
) -> Link:
    """How a path under ``delay`` behaves.

    Direct: one queue per direction (``half_duplex``: one for both), and the third send in
    flight blocks compute until the first has arrived, as a framework's in-order send queue
    does. Delegated: ``queues`` queues, round robin, and sends are handed over.
    """
    if path is Path.DIRECT:
        return Link(
            delay=delay,
            queues=DIRECT_QUEUES,
            outstanding=DIRECT_OUTSTANDING,
            half_duplex=half_duplex,
        )
    return Link(delay=delay, queues=queues)
