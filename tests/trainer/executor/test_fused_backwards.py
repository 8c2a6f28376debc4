"""What a fused backward takes, as the controller is told: by the self-test, then by plans."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from launch import run_ranks
from split_support import Job as StageJob
from split_support import samples
from test_split_zoo import vectors
from torch import nn
from trainer_jobs import Job, Record, assert_same, make_plan, reference, train

from pipemorph.planning import Plan, Schedule
from pipemorph_trainer import TrainerContext
from pipemorph_trainer.executor.split import SplitReport, self_test
from pipemorph_trainer.executor.split.trial import Outcome

WIDTH = 8


def told(
    monkeypatch: pytest.MonkeyPatch, module: nn.Module, apart: list[float], least: float = 0.0
) -> SplitReport:
    """The report where an unsplit backward takes 1 s and B + W, in turn, what is given; the first
    two runs only try the split."""
    monkeypatch.setattr(self_test, "MEASURABLE", least)
    real, times = self_test.run_trial, iter([1.0, 1.0, *apart])

    def timed(*args: Any, fused: bool, **options: Any) -> Outcome:
        outcome = real(*args, fused=fused, **options)
        seconds = {"BW": 1.0} if fused else {"B": 0.5 * (took := next(times)), "W": 0.5 * took}
        outcome.seconds = {"F": 1.0} | seconds
        return outcome

    monkeypatch.setattr(self_test, "run_trial", timed)
    torch.manual_seed(0)
    job = StageJob(module, vectors, 3)
    return job.runner().self_test(samples(job))


@pytest.mark.parametrize(("kind", "module"), [("module", nn.Linear), ("graph", nn.LayerNorm)])
def test_the_least_favourable_run_counts(
    monkeypatch: pytest.MonkeyPatch, kind: str, module: type[nn.Module]
) -> None:
    arguments = (WIDTH, WIDTH) if module is nn.Linear else (WIDTH,)
    report = told(monkeypatch, module(*arguments), [1.4, 1.25, 1.3])
    assert (report.split, report.fused_ratio) == (kind, 0.8)


def test_what_cannot_be_measured_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, nn.Linear(WIDTH, WIDTH), [], math.inf).fused_ratio is None
    unsplit = told(monkeypatch, nn.Tanh(), [])
    assert (unsplit.split, unsplit.fused_ratio) == ("fused", None)


def measured(context: TrainerContext, job: Job) -> Record:
    self_test.MEASURABLE = 0.0
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
        assert (before.split, fused.split) == ("module", "module")
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
    """To the bit the losses and gradients of one process; both forms are told of."""
    job = Job(2, 4, policy="zero-bubble", iterations=8)
    mixed = half_fused(make_plan(job, 1, "zero-bubble"))
    assert mixed.schedule.mixed == 0
    switches = ((2, mixed, range(2)),)
    records = run_ranks(2, measured, job.with_(switches=switches))
    assert_same(records, reference(Job(2, 4, iterations=8)))
    for record in records:
        assert record.versions[-1] == 1
        profile = record.profiles[-1]
        assert profile.split == "module"
        assert profile.backward_weight > 0 and profile.fused_backward
        assert profile.fused_backward != profile.backward_input
