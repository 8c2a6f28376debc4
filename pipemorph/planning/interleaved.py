"""Makes a plan for ranks with several stages each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

from pipemorph.errors import InputError
from pipemorph.planning.ir import OpKind, Plan, Policy, Route, place_stages
from pipemorph.planning.policies.interleaved import one_f_one_b_interleaved, zero_bubble_v
from pipemorph.planning.problem import Problem
from pipemorph.planning.simulation.core import KINDS
from pipemorph.planning.simulation.interleaved import (
    InterleavedSchedule,
    InterleavedSimulation,
    StageOp,
    placed_costs,
    simulate_interleaved,
)
from pipemorph.planning.simulation.lower_bound import lower_bound
from pipemorph.planning.simulation.reference import greedy

AHEAD = (0, 1, 2, 4, 8)
"""Microbatches that policy pipemorph tries to have in flight on every stage, beyond one per stage
from there to the end of the pipeline."""
SAME = 0.005
"""Makespans within this fraction count as equal: then fewer microbatches in flight win."""
MOST_OPS = 50_000
"""Of a problem for which all of :data:`AHEAD` are tried; of a larger one, the first and the
last."""


@dataclass(frozen=True)
class InterleavedPlan:
    """A schedule with its problem and predicted time.

    ``planning_seconds``: wall time; all other times are in the problem's unit.
    """

    policy: Policy
    problem: Problem
    schedule: InterleavedSchedule
    simulation: InterleavedSimulation
    lower_bound: float
    planning_seconds: float

    def to_plan(self, version: int, routes: Sequence[Route]) -> Plan:
        limits = self.problem.in_flight_limits()
        return self.schedule.to_plan(version, routes, policy=self.policy, in_flight_limits=limits)


def plan_interleaved(problem: Problem, policy: Policy | None = None) -> InterleavedPlan:
    """Plan with ``policy``, or the problem's own, for ``problem.ranks`` ranks that have the stages
    by ``problem.placement``.

    Policies 1f1b-interleaved and zero-bubble-v follow their rule and need the placement that it is
    made for. Policy pipemorph takes the fastest of these and of list schedules under the problem's
    delays, with more and more microbatches in flight. Raises :class:`InputError` if the policy
    cannot plan the problem.
    """
    began = perf_counter()
    policy = problem.policy if policy is None else policy
    problem.check_makespan(f"policy {policy.value}")
    if problem.warmup is not None:
        raise InputError(f"warmup is {list(problem.warmup)}; policy {policy.value} sets its own")
    simulation = _best(problem) if policy is Policy.PIPEMORPH else _by_rule(problem, policy)
    bound = interleaved_bound(problem, simulation.placement)
    return InterleavedPlan(
        policy=policy,
        problem=problem,
        schedule=simulation.schedule,
        simulation=simulation,
        lower_bound=min(bound, simulation.makespan),
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


def _best(problem: Problem) -> InterleavedSimulation:
    """The candidate with the shortest makespan; of equal ones the first, which has the fewest
    microbatches in flight."""
    found = list(_candidates(problem))
    least = min(each.makespan for each in found) * (1 + SAME)
    return next(each for each in found if each.makespan <= least)


def _candidates(problem: Problem) -> Iterator[InterleavedSimulation]:
    stages, ranks, n = problem.stage_count, problem.ranks, problem.microbatches
    if ranks is None or stages % ranks:
        raise InputError(
            f"ranks is {ranks}; policy pipemorph puts {stages} stages on a number of ranks that"
            " divides them"
        )
    placement = place_stages(stages, ranks, problem.placement)
    for make in (one_f_one_b_interleaved, zero_bubble_v):
        try:
            schedule = make(problem)
            if schedule.placement() == placement:
                yield simulate_interleaved(schedule, problem)
        except InputError:
            # Not for this placement or number of microbatches, or beyond the caps.
            continue
    stages_of = [[s for s in range(stages) if placement[s] == rank] for rank in range(ranks)]
    costs = placed_costs(problem, placement)
    whole = [
        fused < b + w
        for fused, b, w in zip(
            costs.whole_backward, costs.backward_input, costs.backward_weight, strict=True
        )
    ]
    tried = AHEAD if 3 * stages * n <= MOST_OPS else (AHEAD[0], AHEAD[-1])
    seen = set()
    for ahead in (*tried, n):
        caps = tuple(
            min(n, stages - s + ahead, n if limit is None else limit)
            for s, limit in enumerate(problem.in_flight_limits())
        )
        if caps in seen:
            continue
        seen.add(caps)
        codes = greedy(costs, stages_of, caps, whole)
        yield simulate_interleaved(_decoded(codes, stages_of, n), problem)


def _decoded(
    codes: Sequence[bytes], stages_of: Sequence[Sequence[int]], microbatches: int
) -> InterleavedSchedule:
    ranks = []
    for row, mine in zip(codes, stages_of, strict=True):
        done: dict[tuple[int, OpKind], int] = {}
        ops = []
        for code in row:
            stage, kind = mine[code // 4], KINDS[code % 4]
            m = done[stage, kind] = done.get((stage, kind), -1) + 1
            ops.append(StageOp(stage, kind, m))
        ranks.append(tuple(ops))
    return InterleavedSchedule(microbatches, tuple(ranks))


def interleaved_bound(problem: Problem, placement: tuple[int, ...]) -> float:
    """Lower bound of the makespan: the larger of the stages' bound and the ranks' total work.

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
        work = sum(problem.stages[s].forward + problem.stages[s].least_backward for s in mine)
        best = max(best, before + problem.microbatches * work)
    return best
