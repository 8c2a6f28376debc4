"""The event core gives the same times as an oracle in Python, to the bit."""

from __future__ import annotations

import random
from collections.abc import Sequence

import event_core
import pytest
from gate import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_strategies import offloading, random_order, random_schedule

from pipemorph.planning import Problem, Schedule, ScheduleError, _planner, validate
from pipemorph.planning.ir import CODE_OF_KIND, OpKind
from pipemorph.planning.simulation import execution
from pipemorph.planning.simulation.execution import Costs, DelayAt, DispatchRules, Execution


def uneven(rng: random.Random, problem: Problem, placement: Sequence[int] = ()) -> Costs:
    """The problem's costs with times whose sums depend on the order of their terms."""
    costs = Costs.from_problem(problem, placement)
    if rng.random() < 0.5:
        return costs
    return costs._replace(
        forward=[rng.uniform(0.1, 9) for _ in costs.forward],
        backward_input=[rng.uniform(0.1, 9) for _ in costs.forward],
        whole_backward=[rng.uniform(0.1, 9) for _ in costs.forward],
        delay=[rng.uniform(0, 9) for _ in costs.delay],
        transfer=[rng.choice([0.0, rng.uniform(0, 9)]) for _ in costs.delay],
        rank_starts=[rng.choice([0.0, rng.uniform(0, 40)]) for _ in costs.rank_starts],
        factors=draw_factors(rng, costs) if rng.random() < 0.5 else (),
    )


def draw_factors(rng: random.Random, costs: Costs) -> list[list[float]]:
    """Costs of the microbatches on each stage, some of them none."""
    return [
        [rng.choice([0.0, 1.0, rng.uniform(0.1, 4)]) for _ in range(costs.microbatches)]
        for _ in costs.forward
    ]


def changing(rng: random.Random) -> DelayAt | None:
    """Delays that change within the iteration, or None."""
    if rng.random() < 0.7:
        return None
    every, low, high = rng.uniform(1, 9), rng.uniform(0, 3), rng.uniform(3, 20)
    return lambda link, sent: (high if int(sent / every + link) % 2 else low) + sent / 7


def both_changing(rng: random.Random) -> tuple[DelayAt | None, DelayAt | None]:
    """Returns delays that change, and transfers that change with them, or None."""
    delay_at = changing(rng)
    return delay_at, changing(rng) if delay_at is not None else None


def same(compiled: Execution, plain: Execution) -> None:
    for field in Execution._fields:
        assert list(getattr(compiled, field)) == list(getattr(plain, field)), field


@given(problem=offloading(half_duplex=True), seed=st.integers(0, 2**32))
@settings(max_examples=examples(150), deadline=None)
def test_a_given_order(problem: Problem, seed: int) -> None:
    """Stops at the same ops also if the order deadlocks."""
    rng = random.Random(seed)
    schedule = random_schedule(rng, problem.stage_count, problem.microbatches)
    costs, (delay_at, transfer_at) = uneven(rng, problem), both_changing(rng)
    # Orders that exceed a device limit are no valid plans; the core executes them all the same.
    codes = schedule.op_codes
    ran = execution.execute_in_order(costs, codes, delay_at, transfer_at)
    same(ran, event_core.execute_in_order(costs, codes, delay_at, transfer_at))
    finished = all(len(row) == len(ops) for row, ops in zip(ran.end, codes, strict=True))
    if delay_at is None:
        assert execution.compute_makespan(costs, codes) == (
            ran.compute_makespan(costs.rank_tails) if finished else float("inf")
        )


@given(problem=offloading(half_duplex=True), seed=st.integers(0, 2**32))
@settings(max_examples=examples(150), deadline=None)
def test_online_dispatch(problem: Problem, seed: int) -> None:
    rng = random.Random(seed)
    costs = uneven(rng, problem)
    most = problem.microbatches
    warmup: list[int] = []
    for limit in problem.list_in_flight_limits():
        most = rng.randint(1, min(most, limit or most))
        warmup.append(most)
    exact = rng.random() < 0.5
    fused = [rng.random() < 0.3 for _ in problem.stages]
    rules = DispatchRules.from_problem(problem, warmup, exact_warmup=exact, fused=fused)
    codes, makespan = execution.schedule_online(costs, rules)
    assert (list(codes), makespan) == event_core.schedule_online(costs, rules)
    schedule = execution.decode_schedule(codes, problem.microbatches)
    validate(schedule, problem.list_in_flight_limits(), problem.list_device_limits())
    assert not exact or all(
        x == min(y, problem.microbatches)
        for x, y in zip(schedule.count_warmup(), warmup, strict=True)
    )


@given(problem=offloading(max_stages=6), seed=st.integers(0, 2**32))
@settings(max_examples=examples(100), deadline=None)
def test_several_stages_per_rank(problem: Problem, seed: int) -> None:
    """Stages on any rank, their ops in any order that each stage allows."""
    rng = random.Random(seed)
    n = problem.microbatches
    remaining = list(range(problem.stage_count))
    rng.shuffle(remaining)
    stages_of = []
    while remaining:
        count = rng.randint(1, len(remaining))
        stages_of.append([remaining.pop() for _ in range(count)])
    placement = [next(r for r, mine in enumerate(stages_of) if s in mine)
                 for s in range(problem.stage_count)]  # fmt: skip
    costs = uneven(rng, problem, placement)
    stages_of = costs.stages_by_rank
    codes = []
    for mine in stages_of:
        rows = [list(random_order(rng, n, fused=rng.random() < 0.3)) for _ in mine]
        row = bytearray()
        while any(rows):
            place = rng.choice([i for i, ops in enumerate(rows) if ops])
            row.append(4 * place + CODE_OF_KIND[rows[place].pop(0).kind])
        codes.append(bytes(row))
    ran = execution.execute_in_order(costs, codes)
    same(ran, event_core.execute_in_order(costs, codes))
    assert ran == execution.execute_in_order(costs, codes, lambda link, _: costs.delay[link])
    schedule = execution.decode_schedule(codes, n, placement)
    assert schedule.op_codes == tuple(codes)
    assert Schedule.decode(n, schedule.encode(), placement) == schedule
    if any(len(row) < len(ops) for row, ops in zip(ran.end, codes, strict=True)):
        with pytest.raises(ScheduleError, match="waits forever"):
            validate(schedule)
        return
    validate(schedule)
    peaks = [rng.randint(1, n) for _ in problem.stages]
    found = _planner.find_planned_waits(costs.pack_for_planner(), codes, peaks)
    assert tuple(map(tuple, found)) == event_core.find_waits(costs, codes, peaks)


def test_arguments_that_do_not_fit_are_refused() -> None:
    """The compiled core indexes by them: it must not read beyond its memory."""
    problem = Problem.model_validate(
        {
            "microbatches": 1,
            "stages": [{"forward": 1, "backward_input": 1, "backward_weight": 1}] * 2,
            "links": [{}],
        }
    )
    costs = Costs.from_problem(problem)
    good = bytes([CODE_OF_KIND[OpKind.F], CODE_OF_KIND[OpKind.BW]])
    for codes, stages_of, words in (
        ([good], [[0], [1]], "ops for every rank"),
        ([good, good], [[0], [2]], "stages of the problem"),
        ([good, good], [[0], [0]], "each stage on one rank"),
        ([good, bytes([4])], [[0], [1]], "own stages"),
        ([good, good + good], [[0], [1]], "at most once per microbatch"),
    ):
        placed = costs._replace(stages_by_rank=stages_of)
        with pytest.raises(ValueError, match=words):
            execution.execute_in_order(placed, codes)
    with pytest.raises(ValueError, match="a factor per stage and microbatch"):
        execution.execute_in_order(costs._replace(factors=[[1.0]]), [good, good])
    with pytest.raises(ValueError, match="one link fewer"):
        execution.execute_in_order(costs._replace(delay=[]), [good, good])
