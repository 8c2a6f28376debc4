"""Plans for the period: the longest time that a stage is occupied in an iteration."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import product
from typing import Any

import pytest

from pipemorph.errors import InputError
from pipemorph.planning import (
    Dispatch,
    Op,
    OpKind,
    Policy,
    Problem,
    Schedule,
    compute_lower_bound,
    plan,
    predict_period,
    simulate,
)
from pipemorph.planning.advice import compare_changes
from pipemorph.planning.simulation.simulator import TRANSIENT_ITERATIONS
from pipemorph.planning.validator import ScheduleError

KINDS = (OpKind.F, OpKind.B, OpKind.W)


def problem(microbatches: int, count: int, delays: list[float], **fields: Any) -> Problem:
    stage = {"forward": 10, "backward_input": 10, "backward_weight": 10}
    content = {
        "microbatches": microbatches,
        "stages": [stage] * count,
        "links": [{"delay": delay} for delay in delays],
        "objective": "period",
    }
    return Problem.model_validate(content | fields)


@cache
def orders(microbatches: int) -> list[tuple[Op, ...]]:
    """Returns all orders of the ops of a stage."""

    def more(done: tuple[int, ...]) -> Iterator[tuple[Op, ...]]:
        if min(done) == microbatches:
            yield ()
        for kind, count in enumerate(done):
            if count < (done[kind - 1] if kind else microbatches):
                after = (*done[:kind], count + 1, *done[kind + 1 :])
                yield from ((Op(KINDS[kind], count), *rest) for rest in more(after))

    return list(more((0, 0, 0)))


def drawn(rng: random.Random, stages: int) -> Problem:
    def times() -> dict[str, float]:
        names = ("forward", "backward_input", "backward_weight")
        return {name: rng.randint(1, 9) for name in names} | (
            {"in_flight_limit": rng.randint(1, 3)} if rng.random() < 0.3 else {}
        )

    def link() -> dict[str, float]:
        rate = {"gbps": 1, "message_bytes": rng.randint(1, 9) * 125_000}
        return {"delay": rng.choice([0, 2, 15])} | (rate if rng.random() < 0.3 else {})

    return problem(
        3 if stages == 2 else 2,
        stages,
        [],
        stages=[times() for _ in range(stages)],
        links=[link() for _ in range(stages - 1)],
    )


@pytest.mark.parametrize("stages", [2, 3])
def test_no_order_has_a_shorter_period_than_the_bound_and_few_than_the_plan(stages: int) -> None:
    rng, best_plans = random.Random(stages), 0
    for _ in range(12):
        given = drawn(rng, stages)
        n, shortest = given.microbatches, float("inf")
        for each in product(orders(n), repeat=stages):
            # Some orders exceed a limit, or wait for each other for ever.
            with suppress(ScheduleError):
                shortest = min(shortest, simulate(Schedule(n, each), given).period)
        planned = plan(given)
        assert planned.objective == pytest.approx(planned.simulation.period)
        assert compute_lower_bound(given) <= planned.lower_bound <= shortest * (1 + 1e-9)
        assert planned.objective >= shortest * (1 - 1e-9)
        best_plans += planned.objective <= shortest * (1 + 1e-9)
    assert best_plans >= 11


@pytest.mark.parametrize(
    ("delays", "period"), [([0.0] * 7, 720), ([30.0] + [0.0] * 6, 720), ([4.0] * 7, 720)]
)
def test_a_shorter_period_need_not_lengthen_the_iteration(
    delays: list[float], period: float
) -> None:
    """Stages are all busy for 720: proven shortest, and up to 8% below that of the other plan."""
    given = problem(24, 8, delays)
    planned, other = plan(given), plan(given.model_copy(update={"objective": "makespan"}))
    assert planned.objective == planned.lower_bound == period
    assert planned.makespan == other.makespan
    assert other.simulation.period > period or not any(delays)


def test_fused_backwards_and_offload_shorten_the_period() -> None:
    stage = {"forward": 10, "backward_input": 10, "backward_weight": 10}
    split = plan(problem(12, 2, [0.0], stages=[stage] * 2))
    fused = plan(problem(12, 2, [0.0], stages=[stage | {"fused_backward": 14}] * 2))
    assert fused.objective == fused.simulation.period < split.objective
    assert fused.objective >= fused.lower_bound
    held = [stage | {"device_limit": 2, "offload_copy": 1}] * 3
    capped = [stage | {"in_flight_limit": 2}] * 3
    away = plan(problem(8, 3, [30.0, 0.0], stages=held))
    assert away.leaves_device
    assert away.objective == away.simulation.period
    assert away.objective < plan(problem(8, 3, [30.0, 0.0], stages=capped)).objective


@pytest.mark.parametrize("seed", range(20))
def test_the_predicted_period_is_that_of_one_long_iteration(seed: int) -> None:
    """Iterations without a barrier are one with as many microbatches, in the order repeated."""
    rng = random.Random(seed)
    given = drawn(rng, rng.choice([2, 3]))
    stages = [stage.model_copy(update={"in_flight_limit": None}) for stage in given.stages]
    given = given.model_copy(update={"stages": tuple(stages)})
    n, count = given.microbatches, 2 * TRANSIENT_ITERATIONS
    made = plan(given, rng.choice([Policy.PIPEMORPH, Policy.GPIPE, Policy.ONE_F_ONE_B])).schedule
    if rng.random() < 0.5:
        half = [link.model_copy(update={"queues": 1, "half_duplex": True}) for link in given.links]
        given = given.model_copy(update={"links": tuple(half)})
    repeated = Schedule(
        n * count,
        tuple(
            tuple(Op(op.kind, op.microbatch + k * n) for k in range(count) for op in ops)
            for ops in made.stages
        ),
    )
    whole = simulate(repeated, given.model_copy(update={"microbatches": n * count}))
    each = len(made.stages[0])
    ends = [whole.stages[0][each * (k + 1) - 1].end for k in range(count)]
    settled = (ends[-1] - ends[TRANSIENT_ITERATIONS - 1]) / TRANSIENT_ITERATIONS
    assert predict_period(made, given) == pytest.approx(settled)
    assert predict_period(made, given) <= simulate(made, given).period * (1 + 1e-9)


def test_a_stage_that_falls_behind_sets_the_period() -> None:
    """The W of the last stage come last, so that stage 0 has ended long before."""
    quick = {"forward": 1, "backward_input": 1, "backward_weight": 1}
    given = problem(2, 2, [0.0], stages=[quick, quick | {"backward_weight": 20}])
    kinds = (OpKind.F, OpKind.B, OpKind.F, OpKind.B, OpKind.W, OpKind.W)
    turns = (0, 0, 1, 1, 0, 1)
    ops = tuple(Op(kind, m) for kind, m in zip(kinds, turns, strict=True))
    schedule = Schedule(2, (ops, ops))
    assert simulate(schedule, given).stages[0][-1].end == 10
    # Own ops, and the way of a gradient up and a forward down between first B and second F.
    assert predict_period(schedule, given) == 2 * 22 + 2


def test_the_period_under_guided_dispatch() -> None:
    given = problem(12, 4, [20.0, 0.0, 0.0])
    made = plan(given)
    found = predict_period(made.schedule, given, Dispatch.GUIDED)
    assert made.lower_bound <= found < simulate(made.schedule, given, Dispatch.GUIDED).makespan


def test_advice_and_baselines_have_no_bound_of_the_period() -> None:
    given = problem(4, 2, [0.0])
    with pytest.raises(InputError, match="advise supports only makespan"):
        compare_changes(given)
    by_hand = plan(given, Policy.ZERO_BUBBLE)
    assert by_hand.gap == pytest.approx(by_hand.simulation.period / by_hand.lower_bound - 1)


@pytest.mark.parametrize("limit", [None, 16, 10])
@pytest.mark.parametrize("slow", [{}, {0: 60}, {6: 30}], ids=["well", "first", "last"])
def test_tails_of_all_stages_or_of_the_outer_ones_need_not_be_known(
    limit: int | None, slow: dict[int, float]
) -> None:
    """Tails such as optimizer steps are not measured: the plan made without them takes no longer
    than the one that is made for them, and as much longer as the tail of all stages is."""
    stage = {"forward": 10, "backward_input": 10.5, "backward_weight": 5.5}
    delays = [1 + slow.get(link, 0) for link in range(7)]
    unaware = problem(24, 8, delays, stages=[stage | {"in_flight_limit": limit}] * 8)
    made = plan(unaware).schedule

    def with_tails(tails: list[float]) -> Problem:
        pairs = zip(unaware.stages, tails, strict=True)
        stages = tuple(each.model_copy(update={"reduction": tail}) for each, tail in pairs)
        return unaware.model_copy(update={"stages": stages})

    for tails in ([15.0] * 8, [35.0, *[15.0] * 7], [*[15.0] * 7, 35.0]):
        aware = with_tails(tails)
        assert simulate(made, aware).period == pytest.approx(
            simulate(plan(aware).schedule, aware).period
        )
    without = simulate(made, unaware).period
    assert simulate(made, with_tails([15.0] * 8)).period == pytest.approx(without + 15)
