"""Guided dispatch, and a given warm-up, with several stages per rank."""

from __future__ import annotations

import random
from typing import Any

import event_core
import pytest

from pipemorph.errors import InputError
from pipemorph.planning import (
    Dispatch,
    Link,
    PlannedSchedule,
    Policy,
    Problem,
    Simulation,
    StageTimes,
    plan,
    predict,
    predict_changing,
    simulate,
    validate,
)
from pipemorph.planning.simulation import execution
from pipemorph.planning.simulation.execution import (
    Costs,
    DelayAt,
    build_guide,
    find_planned_waits,
    is_guided_as_fast,
)
from pipemorph.planning.simulation.simulator import compute_next_starts


def drawn(rng: random.Random) -> Problem:
    ranks, microbatches = rng.randint(1, 3), rng.randint(1, 8)
    count = ranks * rng.randint(1, 3)

    def stage() -> StageTimes:
        limits: dict[str, Any] = rng.choice(
            ({}, {"device_limit": rng.randint(1, 3), "offload_copy": 1}, {"in_flight_limit": 4})
        )
        # Ops of no time would be at once with what they wait for.
        times = {kind: rng.randint(1, 9) / 2 for kind in ("forward", "backward_input")}
        return StageTimes(**times, backward_weight=rng.randrange(9) / 2, **limits)

    def link() -> Link:
        bounds = {name: rng.choice((None, 1, 2)) for name in ("queues", "outstanding")}
        return Link(delay=rng.choice((0, 3, 20)), **bounds)

    return Problem(
        microbatches=microbatches,
        stages=tuple(stage() for _ in range(count)),
        links=tuple(link() for _ in range(count - 1)),
        ranks=ranks,
        placement=rng.choice(("interleaved", "v")),
    )


def late(rng: random.Random, most: float) -> DelayAt:
    """Delays of messages that have nothing to do with each other."""
    seed = rng.random()
    return lambda link, sent: random.Random(f"{seed} {link} {sent!r}").uniform(0, most)


def test_any_message_may_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled and in Python, to the bit: no rank waits for ever or exceeds a limit."""
    rng = random.Random(3)
    differ = 0
    for _ in range(60):
        planned = plan(drawn(rng))
        order, problem, delay_at = planned.schedule, planned.problem, late(rng, 30)

        def run() -> Simulation:
            return simulate(order, problem, Dispatch.GUIDED, delay_at=delay_at)  # noqa: B023

        ran = run()
        with monkeypatch.context() as in_python:
            in_python.setattr(execution, "execute_guided", event_core.execute_guided)
            plain = run()
        assert ran == plain
        assert ran.execution.free_at == plain.execution.free_at
        peaks = order.count_in_flight_peaks()
        validate(ran.schedule, peaks, problem.list_device_limits())
        differ += ran.schedule != order
    assert differ > 20


def test_guided_is_the_plan_while_no_message_is_late() -> None:
    rng = random.Random(4)
    for _ in range(60):
        planned = plan(drawn(rng))
        guided = simulate(planned.schedule, planned.problem, Dispatch.GUIDED)
        assert guided == planned.simulation
        assert guided.execution.free_at == planned.simulation.execution.free_at


@pytest.mark.parametrize(("placement", "most"), [("interleaved", 1.0), ("v", 1.01)])
def test_gain_while_messages_are_late(placement: Any, most: float) -> None:
    """Messages up to 2 forwards late, planned for none: mean of 20 draws. No gain in a V."""
    ten = StageTimes(forward=10, backward_input=10, backward_weight=10)
    given = Problem(
        microbatches=16, stages=(ten,) * 8, links=(Link(),) * 7, ranks=4, placement=placement
    )
    order, rng = plan(given).schedule, random.Random(5)
    took = dict.fromkeys(Dispatch, 0.0)
    for _ in range(20):
        delay_at = late(rng, 20)
        for mode in Dispatch:
            took[mode] += simulate(order, given, mode, delay_at=delay_at).makespan / 20
    assert took[Dispatch.GUIDED] < most * took[Dispatch.STATIC], took


def jittered(planned: PlannedSchedule, most: float, *, plain: bool = False) -> tuple[float, float]:
    costs = Costs.from_problem(planned.problem)
    guide = build_guide(planned.schedule, planned.problem)
    return (event_core if plain else execution).compute_jittered_makespans(costs, guide, most, 2)


def test_jitter() -> None:
    """Compiled and in Python, to the bit; messages within a rank come in time."""
    rng = random.Random(6)
    alone = later = 0
    for _ in range(60):
        planned = plan(drawn(rng))
        found = jittered(planned, 9.0)
        assert found == jittered(planned, 9.0, plain=True)
        if planned.problem.ranks == 1:
            assert found == (planned.simulation.makespan,) * 2
            alone += 1
        else:
            later += found[0] > planned.simulation.makespan
    assert alone > 10 and later > 20


@pytest.mark.parametrize(
    ("placement", "limit", "suits"),
    [("interleaved", None, True), ("interleaved", 6, True), ("v", None, False)],
)
def test_where_guided_costs_nothing_while_links_are_well(
    placement: Any, limit: int | None, suits: bool
) -> None:
    ten = StageTimes(forward=10, backward_input=10, backward_weight=10, in_flight_limit=limit)
    direct = Link(delay=1, queues=1, outstanding=2)
    given = Problem(
        microbatches=16, stages=(ten,) * 8, links=(direct,) * 7, ranks=4, placement=placement
    )
    order = plan(given).schedule
    assert is_guided_as_fast(order, given, find_planned_waits(order, given)) is suits


@pytest.mark.parametrize("placement", ["interleaved", "v"])
@pytest.mark.parametrize("objective", ["makespan", "period"])
def test_predictions_equal_the_simulation(placement: Any, objective: Any) -> None:
    """Holds also under delays of which each iteration has its own."""
    ten = StageTimes(forward=10, backward_input=10.5, backward_weight=5.5, reduction=7)
    given = Problem(
        microbatches=12, stages=(ten,) * 4, links=(Link(delay=2),) * 3, ranks=2,
        placement=placement, objective=objective,
    )  # fmt: skip
    order = plan(given).schedule
    rng = random.Random(7)
    changes = [(late(rng, 40), None) for _ in range(3)]
    for mode in Dispatch:
        before, steps = None, []
        for delay_at, _ in changes:
            ran = simulate(order, given, mode, delay_at=delay_at, before=before)
            if objective == "makespan":
                steps.append(ran.makespan)
                continue
            took, before = compute_next_starts(ran.execution.free_at, [7.0] * 2)
            steps.append(took)
        found = predict_changing(order, given, changes, mode)
        assert found == pytest.approx(sum(steps) / len(steps), rel=1e-9)
    if objective == "makespan":
        assert predict(order, given) == simulate(order, given).makespan


def test_a_given_warmup_is_that_of_each_stage() -> None:
    ten = StageTimes(forward=10, backward_input=10, backward_weight=10, in_flight_limit=6)
    given = Problem(microbatches=8, stages=(ten,) * 4, links=(Link(),) * 3, ranks=2)
    for warmup in ((6, 4, 3, 1), (4, 4, 2, 2), (1, 1, 1, 1)):
        order = plan(given.with_warmup(warmup)).schedule
        assert order.count_warmup() == warmup
        validate(order, given.list_in_flight_limits())
    with pytest.raises(InputError, match="sets its own"):
        plan(given.with_warmup((4, 3, 2, 1)), Policy.ONE_F_ONE_B_INTERLEAVED)
