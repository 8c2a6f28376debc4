"""What a decision is estimated to cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plant_support import spec

from pipemorph.control.decide.cost import estimated_seconds
from pipemorph.control.decide.forecast import Situation
from pipemorph.control.decide.replan import Replan
from pipemorph.control.decide.truth import Evidence
from pipemorph.control.first_plan import initial_plan
from pipemorph.control.observed.stages import expected_times
from pipemorph.ingest.planner_pool import SHORT_SECONDS


def asked(stages: int, microbatches: int) -> Replan:
    job = spec(stages, microbatches)
    times, first = expected_times(job), initial_plan(job)
    assert times is not None
    delays = (0.04,) + (0.0,) * (stages - 2)
    links = (False,) * (stages - 1)
    return Replan(
        spec=job,
        cause="slow",
        situation=Situation(times, delays, delays, (True, *links[1:]), links),
        current=first,
        running=first,
        baseline=first,
        lost=False,
        remaining=100,
        change_seconds=None,
        evidence=Evidence(),
    )


@pytest.mark.parametrize(
    ("stages", "microbatches", "short"),
    [(2, 64, True), (8, 24, True), (16, 64, True), (64, 128, True), (64, 48, False)],
)
def test_small_problems_and_quick_searches_are_short(
    stages: int, microbatches: int, short: bool
) -> None:
    assert (estimated_seconds(asked(stages, microbatches)) <= SHORT_SECONDS) is short


def test_plans_for_several_stages_per_rank_cost_as_many_simulations() -> None:
    found = []
    for stages, each in ((16, 2), (64, 2), (64, 1)):
        one = asked(stages, 128)
        cut = one.spec.parallelism.model_copy(update={"stages_per_rank": each})
        found.append(
            estimated_seconds(replace(one, spec=one.spec.model_copy(update={"parallelism": cut})))
        )
    few, many, alone = found
    assert many > 3.5 * few
    assert many > 5 * alone


def test_more_plans_to_try_cost_more() -> None:
    plain = asked(16, 64)
    now = plain.situation
    limited = tuple(each.model_copy(update={"device_limit": 20}) for each in now.stages)
    recent = ((0.02, 0.06) * 40, *((),) * 14)
    least = estimated_seconds(plain)
    for situation in (replace(now, stages=limited), replace(now, recent=recent)):
        assert estimated_seconds(replace(plain, situation=situation)) > 2 * least
    assert estimated_seconds(replace(plain, previous=plain.baseline)) < least / 2, "no search"
