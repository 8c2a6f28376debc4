"""Plans whose stages fuse their first backwards and split the others."""

from __future__ import annotations

import pytest

from pipemorph.planning import (
    Link,
    OpKind,
    Problem,
    StageTimes,
    compute_lower_bound,
    plan,
    predict,
    validate,
)
from pipemorph.planning.search import mixed_fusing
from pipemorph.planning.search.mixed_fusing import fuse_first_backwards, search_mixed_order


def alike(stages: int, microbatches: int, ratio: float, slow: float = 0.0) -> Problem:
    """Stages alike, a slow last link, and a fused backward that takes ``ratio`` of its parts."""
    times = StageTimes(forward=10, backward_input=10, backward_weight=10, fused_backward=20 * ratio)
    links = [Link()] * (stages - 1)
    links[-1] = Link(delay=slow)
    return Problem(microbatches=microbatches, stages=(times,) * stages, links=tuple(links))


@pytest.mark.parametrize(
    ("problem", "without", "least"),
    [
        (alike(4, 12, 0.86), 390, 376),
        (alike(8, 24, 0.86), 790, 770),
        (alike(2, 32, 0.94, slow=60), 1030, 1003),
    ],
    ids=["4x12", "8x24", "2x32, 60 ms"],
)
def test_some_fused_are_shorter_than_all_or_none(
    problem: Problem, without: float, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan(problem)
    assert planned.schedule.first_mixed_stage is not None
    assert compute_lower_bound(problem) <= planned.makespan <= least
    validate(planned.schedule, problem.list_in_flight_limits())
    assert predict(planned.schedule, problem) == planned.makespan
    for ops in planned.schedule.stages:
        kinds = [op.kind for op in ops if op.kind in (OpKind.B, OpKind.BW)]
        assert kinds == sorted(kinds, key=lambda kind: kind is OpKind.B), "the first are fused"
    monkeypatch.setattr(mixed_fusing, "STEPS", 0)
    assert plan(problem).makespan == without


def test_limits_and_the_period_hold() -> None:
    problem = alike(8, 32, 0.86)
    limited = problem.model_copy(
        update={
            "stages": tuple(s.model_copy(update={"in_flight_limit": 12}) for s in problem.stages)
        }
    )
    found = search_mixed_order(limited)
    assert found is not None
    assert max(plan(limited).schedule.count_in_flight_peaks()) <= 12
    period = plan(problem.model_copy(update={"objective": "period"}))
    assert period.objective <= plan(problem).simulation.period
    assert period.objective >= period.lower_bound


def test_only_stages_whose_fused_backward_is_shorter() -> None:
    problem = alike(4, 12, 0.86)
    dear = problem.stages[1].model_copy(update={"fused_backward": 25.0})
    problem = problem.model_copy(update={"stages": (problem.stages[0], dear, *problem.stages[2:])})
    found = search_mixed_order(problem)
    assert found is not None
    assert found.fused[1] == 0 and sum(found.fused) > 0


def test_fused_ops_take_the_place_of_the_backwards() -> None:
    # 0 F, 1 B, 2 W, 3 BW.
    order = bytes([0, 0, 1, 0, 1, 2, 1, 2, 2])
    assert fuse_first_backwards([order], [0], [0]) == [order]
    assert fuse_first_backwards([order], [1], [0]) == [bytes([0, 0, 3, 0, 1, 1, 2, 2])]
    assert fuse_first_backwards([order], [3], [0]) == [bytes([0, 0, 3, 0, 3, 3])]
    # Two stages of one rank.
    several = bytes([0, 4, 5, 1, 6, 2])
    assert fuse_first_backwards([several], [0, 1], [0, 0]) == [bytes([0, 4, 7, 1, 2])]


def test_problems_that_are_too_large_are_not_searched() -> None:
    assert search_mixed_order(alike(64, 256, 0.86)) is None
