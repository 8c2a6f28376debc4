"""The choice among plans that are predicted to take equally long."""

from __future__ import annotations

import pytest
from plant_support import spec

from pipemorph.control.decide.forecast import SAME, Forecast, Situation
from pipemorph.planning import Route, StageTimes

STAGES, SLOW, LIMIT = 8, 6, 16


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
