"""Makes a plan for ranks with several stages each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import le
from time import perf_counter

from pipemorph.errors import InputError
from pipemorph.planning.ir import Dispatch, Plan, Policy, Route, place_stages
from pipemorph.planning.offload import recompute_room
from pipemorph.planning.policies.interleaved import one_f_one_b_interleaved, zero_bubble_v
from pipemorph.planning.problem import Problem, StageTimes
from pipemorph.planning.search.variants import on_device, with_stated_limits
from pipemorph.planning.simulation import core
from pipemorph.planning.simulation.interleaved import (
    InterleavedSchedule,
    InterleavedSimulation,
    decoded,
    interleaved_waits,
    placed_costs,
    simulate_interleaved,
)
from pipemorph.planning.simulation.lower_bound import lower_bound
from pipemorph.planning.simulation.online import Rules

AHEAD = (0, 1, 2, 4, 8)
"""Microbatches that policy pipemorph tries to have in flight on every stage, beyond one per stage
from there to the end of the pipeline."""
SAME = 0.005
"""Times within this fraction count as equal: then fewer microbatches in flight win, and plans
whose activations stay on the device."""
MOST_OPS = 50_000
"""Of a problem for which all of :data:`AHEAD` are tried; of a larger one, the first and the
last."""


@dataclass(frozen=True)
class InterleavedPlan:
    """A schedule with its predicted time, and the problem with the limits that it keeps.

    ``planning_seconds``: wall time; all other times are in the problem's unit.
    """

    policy: Policy
    problem: Problem
    schedule: InterleavedSchedule
    simulation: InterleavedSimulation
    lower_bound: float
    planning_seconds: float

    def to_plan(
        self, version: int, routes: Sequence[Route], dispatch: Dispatch = Dispatch.STATIC
    ) -> Plan:
        problem = self.problem
        guided = dispatch is Dispatch.GUIDED
        return self.schedule.to_plan(
            version, routes, policy=self.policy, in_flight_limits=problem.in_flight_limits(),
            device_limits=problem.device_limits(), recompute=problem.recompute(),
            dispatch=dispatch,
            waits=interleaved_waits(self.schedule, problem) if guided else (),
        )  # fmt: skip


def plan_interleaved(problem: Problem, policy: Policy | None = None) -> InterleavedPlan:
    """Plan with ``policy``, or the problem's own, for ``problem.ranks`` ranks that have the stages
    by ``problem.placement``.

    Policies 1f1b-interleaved and zero-bubble-v follow their rule and need the placement that it is
    made for. Policy pipemorph takes the one with the shortest makespan or period, as the problem's
    objective says, of these and of list schedules under the problem's delays: with more and more
    microbatches in flight, on the device or, as far as the stages' limits allow, with activations
    in host memory or computed again. A given warm-up is that of each stage, not of a rank: the F of
    stage *s* before its first B. Then only schedules with it are candidates. Raises
    :class:`InputError` if the policy cannot plan the problem.
    """
    began = perf_counter()
    policy = problem.policy if policy is None else policy
    if problem.warmup is not None and policy is not Policy.PIPEMORPH:
        raise InputError(f"warmup is {list(problem.warmup)}; policy {policy.value} sets its own")
    if policy is Policy.PIPEMORPH:
        kept, simulation = _best(problem)
    else:
        kept, simulation = problem, _by_rule(problem, policy)
    bound = interleaved_bound(problem, simulation.placement)
    return InterleavedPlan(
        policy=policy,
        problem=kept,
        schedule=simulation.schedule,
        simulation=simulation,
        lower_bound=min(bound, simulation.objective(problem)),
        planning_seconds=perf_counter() - began,
    )


def exceeding_plan(problem: Problem) -> InterleavedPlan | None:
    """The best list schedule of policy pipemorph of which activations leave the device; None if no
    stage needs it."""
    began = perf_counter()
    found = list(_exceeding(with_stated_limits(problem)))
    if not found:
        return None
    kept, ran = min(found, key=lambda each: each[1].objective(problem))
    bound = interleaved_bound(problem, ran.placement)
    return InterleavedPlan(
        policy=Policy.PIPEMORPH,
        problem=kept,
        schedule=ran.schedule,
        simulation=ran,
        lower_bound=min(bound, ran.objective(problem)),
        planning_seconds=perf_counter() - began,
    )


def _by_rule(problem: Problem, policy: Policy) -> InterleavedSimulation:
    match policy:
        case Policy.ZERO_BUBBLE_V:
            schedule = zero_bubble_v(problem)
        case Policy.ONE_F_ONE_B_INTERLEAVED:
            schedule = one_f_one_b_interleaved(problem)
        case _:
            raise InputError(
                f"policy {policy.value} has one stage per rank; with several use pipemorph,"
                " 1f1b-interleaved or zero-bubble-v"
            )
    return simulate_interleaved(schedule, problem)


_Candidate = tuple[Problem, InterleavedSimulation]
"""A schedule that was simulated, and the problem with the limits that it keeps."""


def _best(problem: Problem) -> _Candidate:
    """The candidate that takes the shortest time; of equal ones the first, which has the fewest
    microbatches in flight, on the device if possible."""
    within = on_device(problem)
    found = [
        *_candidates(within),
        *_exceeding(with_stated_limits(problem)),
        *_exceeding(within.recomputing()),
    ]
    if not found:
        shown = list(problem.warmup or ())
        raise InputError(f"warmup is {shown}, more than the limits of the stages allow")
    times = [ran.objective(problem) for _, ran in found]
    least = min(times) * (1 + SAME)
    return next(each for each, time in zip(found, times, strict=True) if time <= least)


def _candidates(problem: Problem) -> Iterator[_Candidate]:
    """Schedules whose activations stay on the device."""
    placement = _placement(problem)
    for make in (one_f_one_b_interleaved, zero_bubble_v):
        try:
            schedule = make(problem)
            warmup = problem.warmup in (None, schedule.per_stage().warmup())
            if schedule.placement() == placement and warmup:
                yield problem, simulate_interleaved(schedule, problem)
        except InputError:
            # Not for this placement or number of microbatches, or beyond the caps.
            continue
    for caps in _caps(problem):
        yield problem, _listed(problem, placement, caps)


def _placement(problem: Problem) -> tuple[int, ...]:
    """The rank of each stage."""
    stages, ranks = problem.stage_count, problem.ranks
    if ranks is None or stages % ranks:
        raise InputError(
            f"ranks is {ranks}; policy pipemorph puts {stages} stages on a number of ranks that"
            " divides them"
        )
    return place_stages(stages, ranks, problem.placement)


def _exceeding(problem: Problem) -> Iterator[_Candidate]:
    """List schedules of which activations leave the device; none if no stage has a device limit.

    Where a stage recomputes, the more microbatches are in flight, the fewer stay on its device.
    """
    placement = _placement(problem)
    for caps in _caps(problem):
        stages = tuple(map(_with_cap, problem.stages, caps))
        if any(stage.device_limit is not None for stage in stages):
            kept = problem.model_copy(update={"stages": stages})
            yield kept, _listed(kept, placement, caps)


def _with_cap(stage: StageTimes, cap: int) -> StageTimes:
    """A stage with ``cap`` microbatches in flight; with a device limit only if it needs one."""
    limit = stage.device_limit
    if limit is None or cap <= limit:
        # The smaller of its limits: what is in flight is all on the device.
        least = min((n for n in (stage.in_flight_limit, limit) if n is not None), default=None)
        off = {"in_flight_limit": least, "device_limit": None, "recompute": False}
        return stage.model_copy(update=off)
    if stage.recompute and stage.recompute_limit is not None:
        limit = recompute_room(cap, limit, stage.recompute_limit)
    return stage.model_copy(update={"in_flight_limit": cap, "device_limit": limit})


def _caps(problem: Problem) -> Iterator[tuple[int, ...]]:
    """The microbatches in flight by stage that are tried, fewest first."""
    stages, n = problem.stage_count, problem.microbatches
    warmup = problem.warmup or (1,) * stages
    tried = AHEAD if 3 * stages * n <= MOST_OPS else (AHEAD[0], AHEAD[-1])
    seen = set()
    for ahead in (*tried, n):
        caps = tuple(
            min(n, max(least, stages - s + ahead), n if limit is None else limit)
            for s, (limit, least) in enumerate(zip(problem.in_flight_limits(), warmup, strict=True))
        )
        if caps not in seen and all(map(le, warmup, caps)):
            seen.add(caps)
            yield caps


def _listed(
    problem: Problem, placement: tuple[int, ...], caps: Sequence[int]
) -> InterleavedSimulation:
    return simulate_interleaved(_list(problem, placement, caps), problem)


def _list(problem: Problem, placement: tuple[int, ...], caps: Sequence[int]) -> InterleavedSchedule:
    """The list schedule with at most ``caps[s]`` microbatches in flight on stage *s*, made
    under the delays of the problem."""
    ranks = range(max(placement) + 1)
    stages_of = [[s for s, where in enumerate(placement) if where == rank] for rank in ranks]
    costs = placed_costs(problem, placement)
    whole = [
        fused < b + w
        for fused, b, w in zip(
            costs.whole_backward, costs.backward_input, costs.backward_weight, strict=True
        )
    ]
    given = problem.warmup
    rules = Rules(
        warmup=given or (1,) * problem.stage_count,
        caps=tuple(caps),
        fused=tuple(whole),
        exact_warmup=given is not None,
    )
    codes = core.online(costs, rules, stages_of=stages_of).codes
    return decoded(codes, stages_of, problem.microbatches)


def interleaved_bound(problem: Problem, placement: tuple[int, ...]) -> float:
    """Lower bound of the objective: the larger of the stages' bound and the ranks' total work.

    A link within a rank takes no time.
    """
    delays = [
        0.0 if placement[i] == placement[i + 1] else link.delay
        for i, link in enumerate(problem.links)
    ]
    best = lower_bound(problem.with_delays(delays))
    for rank in set(placement):
        mine = [s for s, where in enumerate(placement) if where == rank]
        before = min(
            sum(problem.stages[s].forward for s in range(first)) + sum(delays[:first])
            for first in mine
        )
        if problem.objective == "period":
            before = 0.0
        work = sum(problem.stages[s].forward + problem.stages[s].least_backward for s in mine)
        best = max(best, before + problem.microbatches * work)
    return best
