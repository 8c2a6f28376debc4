"""The choice among plans that are predicted to take equally long."""

from __future__ import annotations

from typing import Any

import pytest
from plant_support import spec

from pipemorph.control.decide.forecast import SAME, Forecast, Situation
from pipemorph.control.memory_limits import room
from pipemorph.planning import Dispatch, Route, StageTimes

STAGES, SLOW, LIMIT = 8, 6, 16
DIRECT = (Route.DIRECT,) * (STAGES - 1)
DELEGATED = tuple(Route.DELEGATED if link == SLOW else Route.DIRECT for link in range(STAGES - 1))


def dispatches(
    routes: tuple[Route, ...], *, dispatch: str = "auto", delay: float = 0.03, **fields: Any
) -> list[Dispatch]:
    """Of the new plans for a slow link."""
    limit = 10
    delays = tuple(delay * (link == SLOW) for link in range(STAGES - 1))
    op = StageTimes(forward=0.01, backward_input=0.01, backward_weight=0.01, in_flight_limit=limit)
    job = spec(
        microbatches=24,
        stages=STAGES,
        schedule={"dispatch": dispatch, "inFlightLimit": limit},
        **fields,
    )
    situation = Situation(
        (op,) * STAGES,
        delays,
        delays,
        tuple(map(bool, delays)),
        (False,) * (STAGES - 1),
        rooms=tuple(room(job, stage, None, None) for stage in range(STAGES)),
    )
    return [option.plan.dispatch for option in Forecast(job, situation).fresh(routes)]


def test_online_dispatch_is_a_choice_while_slow_links_are_delegated() -> None:
    assert dispatches(DELEGATED) == [Dispatch.STATIC, Dispatch.ONLINE]
    assert dispatches(DIRECT) == [Dispatch.STATIC], "a late send holds up the stage"
    assert dispatches(DELEGATED, delay=0.0) == [Dispatch.STATIC], "no link is slow"
    assert dispatches(DELEGATED, dispatch="static") == [Dispatch.STATIC]
    assert dispatches(DELEGATED, dispatch="online") == [Dispatch.ONLINE]
    sharded = {"stages": STAGES, "tensor": 2}
    assert dispatches(DELEGATED, parallelism=sharded) == [Dispatch.STATIC], "one order of ops"


def test_ranks_with_several_stages_are_planned_without_what_follows_their_last_op() -> None:
    """Their simulation has no tails, as those of replicas that reduce gradients."""
    op = StageTimes(forward=0.01, backward_input=0.01, backward_weight=0.01, reduction=0.02)
    delays = (0.0, 0.03, 0.0)
    job = spec(
        stages=4,
        microbatches=8,
        parallelism={
            "stages": 4,
            "stagesPerRank": 2,
            "stagePlacement": "interleaved",
            "replicas": 2,
        },
        schedule={"dispatch": "auto"},
    )
    situation = Situation((op,) * 4, delays, delays, (False, True, False), (False,) * 3)
    (option,) = Forecast(job, situation).fresh((Route.DIRECT, Route.DELEGATED, Route.DIRECT))
    assert option.plan.dispatch is Dispatch.STATIC
    assert option.seconds > 8 * 0.06


@pytest.mark.parametrize(("delay", "route"), [(0.012, Route.DIRECT), (0.020, Route.DELEGATED)])
def test_of_equal_plans_one_that_stands_a_longer_delay_is_chosen(
    delay: float, route: Route
) -> None:
    """A direct route has room for exactly the delay that was measured, which may be too short."""
    slow = tuple(link == SLOW for link in range(STAGES - 1))
    delays = tuple(delay * each for each in slow)
    op = StageTimes(forward=0.01, backward_input=0.01, backward_weight=0.01, in_flight_limit=LIMIT)
    forecast = Forecast(
        spec(stages=STAGES, microbatches=24, schedule={"inFlightLimit": LIMIT}),
        Situation(
            (op,) * STAGES, tuple(0.002 + each for each in delays), delays, slow,
            (False,) * (STAGES - 1),
        ),
    )  # fmt: skip
    routes = tuple(Route.DELEGATED if each else Route.DIRECT for each in slow)
    (direct,), (delegated,) = forecast.fresh((Route.DIRECT,) * 7), forecast.fresh(routes)
    assert direct.seconds == pytest.approx(delegated.seconds, rel=SAME)
    chosen = forecast.best([direct, delegated])
    assert chosen.plan.routes[SLOW] is route
    assert forecast.stays_as_fast(direct, delegated) is (route is Route.DIRECT)
