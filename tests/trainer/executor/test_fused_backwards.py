"""Time of a fused backward, as the controller receives it: at first, and later from plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
from launch import run_ranks
from torch import nn
from trainer_jobs import Job, Record, assert_same, make_plan, reference, train

from pipemorph.planning import Plan, Schedule
from pipemorph_trainer import TrainerContext
from pipemorph_trainer.backward import stage_measurements as measurements
from pipemorph_trainer.backward.stage_measurements import StageMeasurements

WIDTH = 8


def fused_ratio(whole: list[float], apart: list[tuple[float, float]]) -> float | None:
    """The ratio where backwards take these times; the first of each kind does not count."""
    found = StageMeasurements(nn.Linear(WIDTH, WIDTH))
    clock = iter([0.0])
    for kind, times in (
        ("whole", whole), ("B", [b for b, _ in apart]), ("W", [w for _, w in apart]),
    ):  # fmt: skip
        for took in times:
            clock = iter([10.0, 10.0 + took])
            found._read_synchronized_clock = lambda: next(clock)  # type: ignore[method-assign]  # noqa: B023
            with found.time_backward(kind):
                pass
    return found.fused_ratio


def test_the_ratio_is_that_of_the_shortest_times() -> None:
    assert fused_ratio([9.0, 1.0, 1.5], [(9.0, 9.0), (0.7, 0.75), (0.5, 0.8)]) == pytest.approx(0.8)


def test_a_ratio_that_cannot_be_measured_is_not_reported() -> None:
    assert fused_ratio([9.0, 1e-4], [(9.0, 9.0), (1e-4, 1e-4)]) is None
    assert fused_ratio([9.0], [(9.0, 9.0), (1.0, 1.0)]) is None
    assert fused_ratio([9.0, 1.0], []) is None


def test_every_other_of_the_first_microbatches_is_whole() -> None:
    found = StageMeasurements(nn.Linear(WIDTH, WIDTH))
    assert found.choose_whole_backwards(3) == {1}
    assert found.choose_whole_backwards(3) == {0, 2}
    assert found.choose_whole_backwards(3) is None
    assert StageMeasurements(nn.Linear(WIDTH, WIDTH)).choose_whole_backwards(1) == frozenset()


def measured(context: TrainerContext, job: Job) -> Record:
    measurements.MEASURABLE = 0.0
    return train(context, job)


def test_a_plan_that_ran_one_knows_better() -> None:
    job = Job(2, 4, policy="zero-bubble", iterations=10)
    everywhere = range(2)
    switches = (
        (2, make_plan(job, 1, "1f1b"), everywhere),
        (6, make_plan(job, 2, "zero-bubble"), everywhere),
    )
    for record in run_ranks(2, measured, job.with_(switches=switches)):
        profiles, versions = record.profiles, record.versions[1:]
        assert {*versions} == {0, 1, 2}
        first, last = versions.index(1), len(versions) - 1 - versions[::-1].index(1)
        before, fused, after = profiles[first - 1], profiles[last], profiles[-1]
        assert (before.split, fused.split) == ("deferred", "deferred")
        assert before.fused_backward and before.backward_weight
        assert fused.backward_weight == 0
        assert fused.fused_backward == fused.backward_input
        ratio = fused.backward_input / (before.backward_input + before.backward_weight)
        now = after.backward_input + after.backward_weight
        assert after.fused_backward == pytest.approx(ratio * now)


def half_fused(plan: Plan) -> Plan:
    """The zero-bubble plan of four microbatches whose first two have a fused backward."""
    letters = ["FFBBFIFIWW", "FBFBFIFIWW"]
    return replace(plan, schedule=Schedule.decode(4, letters))


def test_a_plan_may_fuse_some_backwards_of_a_stage_and_split_others() -> None:
    """Losses and gradients are to the bit those of one process; both forms are reported."""
    job = Job(2, 4, policy="zero-bubble", iterations=8)
    mixed = half_fused(make_plan(job, 1, "zero-bubble"))
    assert mixed.schedule.first_mixed_stage == 0
    switches = ((2, mixed, range(2)),)
    records = run_ranks(2, measured, job.with_(switches=switches))
    assert_same(records, reference(Job(2, 4, iterations=8)))
    for record in records:
        assert record.versions[-1] == 1
        profile = record.profiles[-1]
        assert profile.split == "deferred"
        assert profile.backward_weight > 0 and profile.fused_backward
        assert profile.fused_backward != profile.backward_input
