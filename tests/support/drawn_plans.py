"""Problems and plans drawn at random, small enough to run op by op."""

from __future__ import annotations

import random

from pipemorph.planning import Dispatch, Link, Plan, Policy, Problem, Route, StageTimes, plan


def random_problem(rng: random.Random, *, offloads: bool = False, limits: bool = True) -> Problem:
    """Times are multiples of 1/128 s, which are exact: sums agree to the bit. ``limits``: of
    microbatches in flight."""

    def time(most: int) -> float:
        return rng.randint(1, most) / 128

    stages = rng.randint(1, 5)
    return Problem(
        microbatches=rng.randint(1, 9),
        stages=tuple(
            StageTimes(
                forward=time(12),
                backward_input=time(12),
                backward_weight=time(12),
                in_flight_limit=rng.choice((None, rng.randint(1, 9))) if limits else None,
                device_limit=rng.choice((None, 1, 2, 3)) if offloads else None,
                offload_copy=time(6) if offloads else None,
                recompute=offloads and rng.random() < 0.5,
                fused_backward=rng.choice((None, time(20))) if offloads else None,
            )
            for _ in range(stages)
        ),
        links=tuple(
            Link(
                delay=rng.choice((0.0, time(60))),
                queues=rng.choice((None, 1, 2, 8)),
                outstanding=rng.choice((None, 1, 2)),
            )
            for _ in range(stages - 1)
        ),
    )


def random_plan(rng: random.Random, dispatch: Dispatch) -> Plan:
    problem = random_problem(rng)
    while problem.stage_count < 2:
        problem = random_problem(rng)
    policy = rng.choice((Policy.ONE_F_ONE_B, Policy.ZERO_BUBBLE, Policy.PIPEMORPH))
    routes = (Route.DIRECT,) * (problem.stage_count - 1)
    return plan(problem, policy).to_plan(1, routes, dispatch)
