"""Whole jobs whose plans run forwards again: same bits, traced, and refused where they cannot."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from launch import Ranks, run_ranks
from pairwise import parametrize_product
from test_offload_pipeline import assert_same_training, expected_copies
from trainer_jobs import Job, Record, assert_same, make_plan, reference, train

from pipemorph.planning import Plan
from pipemorph_trainer import EmulatedStage, Pipeline, TrainerContext

AUTO = {"recompute": "auto"}


def recomputing(plan: Plan) -> Plan:
    """The plan whose stages with a device limit recompute instead of offloading."""
    return replace(plan, recompute=tuple(limit is not None for limit in plan.device_limits))


@pytest.mark.parametrize(
    ("policy", "dispatch"),
    parametrize_product(["zero-bubble", "1f1b"], ["guided", "static"], test=1, full=2),
)
def test_results_are_those_without(policy: str, dispatch: str) -> None:
    """Also of iterations before and after, since a plan begins and ends at a boundary."""
    job = Job(3, 6, policy=policy, iterations=8, extra=AUTO)
    warmup = (6, 5, 3) if policy == "zero-bubble" else None

    def made(version: int, limit: int | None) -> Plan:
        return make_plan(job, version, policy, dispatch=dispatch, warmup=warmup, device_limit=limit)

    drops = recomputing(made(1, 2))
    assert expected_copies(drops, 0) > 0
    everywhere = range(3)
    switches = ((1, drops, everywhere), (4, made(2, None), everywhere))
    records: list[Record] = run_ranks(3, train, job.with_(switches=switches))
    assert_same(records, reference(Job(3, 6, iterations=8)))
    for record in records:
        assert 1 in record.versions and record.versions[-1] == 2
        assert not any(record.offloaded), "nothing goes to host memory"
        for profile in record.profiles:
            assert profile.activation_bytes and profile.input_bytes is not None


@pytest.mark.parametrize(
    "autocast",
    [pytest.param(False, marks=pytest.mark.soak), pytest.param(True, marks=pytest.mark.full)],
)
def test_the_gpt_example_with_dropout(autocast: bool) -> None:
    job = Job(2, 6)
    plain = make_plan(job, 0, "zero-bubble", warmup=(6, 4))
    drops = recomputing(make_plan(job, 0, "zero-bubble", warmup=(6, 4), device_limit=2))
    assert_same_training(drops, plain, dropout=0.2, autocast=autocast, recompute="auto")


def test_a_plan_is_refused_where_the_job_must_not() -> None:
    job = Job(2, 4)
    drops = recomputing(make_plan(job, 3, "gpipe", device_limit=2))
    for result in Ranks(2, train, job.with_(initial=drops)).wait():
        assert result.exitcode == 1
        assert "plan 3 runs forwards of stage" in result.error
        assert "give schedule.recompute auto" in result.error


def emulated(context: TrainerContext, plan: Plan) -> list[float]:
    stage = EmulatedStage(0.01, 0.004, 0.004, 64, activation_bytes=1000, input_bytes=100)
    with Pipeline(stage, context=context, plan=plan, recompute="auto") as pipe:
        return [float(pipe.step()) for _ in range(3)]


@pytest.mark.full
def test_forwards_that_run_again_take_their_time_and_are_traced(tmp_path: Path) -> None:
    job = Job(2, 6)
    drops = recomputing(make_plan(job, 0, "gpipe", device_limit=2))
    plain = make_plan(job, 0, "gpipe")
    again = run_ranks(2, emulated, drops, context={"trace_dir": tmp_path})
    assert again == run_ranks(2, emulated, plain)
    for rank in range(2):
        text = (tmp_path / f"ops-rank{rank}.jsonl").read_text()
        for line in map(json.loads, text.splitlines()):
            runs = line["copies"]
            assert {run[0] for run in runs} == {"again"}
            assert len(runs) == expected_copies(drops, rank) > 2
            spans = {(kind, m): (start, end) for kind, m, start, end in line["ops"]}
            for _, m, start, end, _ in runs:
                assert end - start >= 0.0075
                assert spans["BW", m][0] <= start and end <= spans["BW", m][1]
