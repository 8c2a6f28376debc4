"""Plans for several stages per rank, next to those of a constraint solver."""

from __future__ import annotations

import random
import statistics

import pytest

from pipemorph.planning import Link, Problem, StageTimes, plan, simulate

PROBLEMS = 200
SECONDS = 20
"""Seconds of the solver, for each problem whose plan is not proven shortest."""
MEAN, WORST = 0.001, 0.01


def drawn(seed: int) -> Problem:
    """Problem of 2 to 8 ranks of 2 to 4 stages, caps of all kinds, 0 to 3 slow connections."""
    rng = random.Random(f"int/{seed}")
    ranks = rng.choice((2, 2, 3, 4, 4, 8))
    count = ranks * (rng.choice((2, 2, 2, 3, 4)) if ranks < 8 else 2)
    placement, n = rng.choice(("interleaved", "v")), rng.choice((4, 6, 8, 12, 16))
    each = rng.choice(((10, 10, 10), (10, 11, 5), (5, 6, 4), (10, 12, 8)))
    by = [rng.choice((1, 1, 1, 1.5)) if rng.random() < 0.3 else 1 for _ in range(count)]
    cap = rng.choice(("none", "none", "even", "tight"))
    caps = {"none": [None] * count, "even": [2 * ranks + count // ranks] * count}
    caps["tight"] = [max(2, count - i + 1) for i in range(count)]
    stages = tuple(
        StageTimes(
            forward=int(each[0] * factor),
            backward_input=int(each[1] * factor),
            backward_weight=int(each[2] * factor),
            in_flight_limit=limit,
        )
        for factor, limit in zip(by, caps[cap], strict=True)
    )
    problem = Problem(
        microbatches=min(n, max(4, 140 // count)), stages=stages, ranks=ranks, placement=placement,
        links=(Link(),) * (count - 1),
    )  # fmt: skip
    pairs = [
        frozenset(pair) for pair in zip(problem.stage_ranks, problem.stage_ranks[1:], strict=False)
    ]
    slow = {
        pair: rng.choice((2, 10, 20, 40, 60)) for pair in rng.choices(pairs, k=rng.randint(0, 3))
    }
    return problem.with_delays([slow.get(pair, 0) if len(pair) > 1 else 0 for pair in pairs])


def solved(problem: Problem, longest: float) -> float:
    """The shortest makespan that the solver finds, or ``longest`` if it finds none below it."""
    from ortools.sat.python import cp_model

    model, most, n = cp_model.CpModel(), int(longest), problem.microbatches
    at, rows = {}, {}
    for s, stage in enumerate(problem.stages):
        took = (int(stage.forward), int(stage.backward_input), int(stage.backward_weight))
        for m in range(n):
            for kind in range(3):
                start = model.new_int_var(0, most - took[kind], "")
                at[s, kind, m] = start, start + took[kind]
                interval = model.new_fixed_size_interval_var(start, took[kind], "")
                rows.setdefault(problem.stage_ranks[s], []).append(interval)
                if kind:
                    model.add(at[s, kind - 1, m][1] <= start)
                if m:
                    model.add(at[s, kind, m - 1][1] <= start)
            if stage.in_flight_limit and m >= stage.in_flight_limit:
                model.add(at[s, 2, m - stage.in_flight_limit][1] <= at[s, 0, m][0])
        for m, link in ((m, problem.links[s - 1]) for m in range(n if s else 0)):
            model.add(at[s - 1, 0, m][1] + int(link.delay) <= at[s, 0, m][0])
            model.add(at[s, 1, m][1] + int(link.delay) <= at[s - 1, 1, m][0])
    for row in rows.values():
        model.add_no_overlap(row)
    makespan = model.new_int_var(0, most, "")
    for s in range(problem.stage_count):
        model.add(at[s, 2, n - 1][1] <= makespan)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = SECONDS
    found = solver.solve(model)
    good = found in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return solver.objective_value if good else longest


@pytest.mark.soak
def test_several_stages_per_rank_against_a_solver() -> None:
    gaps = {}
    for seed in range(PROBLEMS):
        problem = drawn(seed)
        found = plan(problem)
        assert simulate(found.schedule, problem).makespan == found.makespan
        least = found.makespan if found.gap == 0 else solved(problem, found.makespan)
        assert least >= found.lower_bound, f"{seed}: the bound is above a schedule"
        gaps[seed] = found.makespan / least - 1
    worst = {seed: gap for seed, gap in gaps.items() if gap > WORST}
    assert not worst and statistics.mean(gaps.values()) <= MEAN, gaps
