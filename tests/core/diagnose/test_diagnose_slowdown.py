"""Slowdowns as the published study defines them, against formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from op_traces import BACKWARD, FORWARD, WEIGHT, PlayedJob, make_table

from pipemorph.diagnose.analysis.slowdown import (
    StepSimulator,
    analyse_slowdown,
    compute_bubble_fraction,
)
from pipemorph.diagnose.analysis.steps import StepSet, select_steps
from pipemorph.diagnose.operation import Operation
from pipemorph.planning.ir import Policy

OPS = FORWARD + BACKWARD + WEIGHT


def steps_of(job: PlayedJob) -> StepSet:
    return select_steps(make_table(job.operations()))


def test_a_long_last_stage_of_gpipe_by_formula() -> None:
    """The last stage's ops take *k* times as long; all T are multiples of F + B."""
    p, m, k = 4, 8, 2.0

    def seconds(step: int, replica: int, stage: int, *_: Any) -> float:
        return _[-1] * (k if stage == p - 1 else 1.0)

    job = PlayedJob(stages=p, microbatches=m, policy=Policy.GPIPE, seconds=seconds, tail=())
    found = analyse_slowdown(StepSimulator(steps_of(job)))
    mean = 1 + (k - 1) / p
    recorded, ideal = (p - 1 + m * k) * OPS, (m + p - 1) * mean * OPS
    assert found.recorded == pytest.approx(recorded) and found.ideal == pytest.approx(ideal)
    assert found.span == pytest.approx(recorded) and found.launch == pytest.approx(1)
    assert found.total == pytest.approx(recorded / ideal)
    assert found.by_stage[p - 1] == pytest.approx(((p - 1) * mean + m * k) * OPS / ideal)
    assert found.by_dp_rank == {0: pytest.approx(found.total)}
    assert next(iter(found.by_worker)) == "dp0-stage3"
    fixed = (p - 1 + m * mean) * OPS
    assert found.m_s == pytest.approx((recorded - fixed) / (recorded - ideal))
    assert found.m_w == found.m_s, "one worker is the slowest 3 %"
    weight = (m * k + p - 1) * FORWARD + (m + p - 1) * mean * (BACKWARD + WEIGHT)
    assert found.by_optype["forward-compute"] == pytest.approx(weight / ideal)
    assert found.by_optype["forward-pp-comm"] == pytest.approx(1)


def test_equal_ops_lose_nothing() -> None:
    steps = steps_of(PlayedJob(replicas=2))
    found = analyse_slowdown(StepSimulator(steps))
    assert found.total == pytest.approx(1) and (found.m_s, found.m_w) == (None, None)
    # The tail is no bubble: it is after the last op.
    assert compute_bubble_fraction(steps) == pytest.approx(3 / 11)


@pytest.mark.parametrize(
    ("policy", "stages", "ranks"),
    [
        (Policy.GPIPE, 4, None),
        (Policy.ONE_F_ONE_B, 4, None),
        (Policy.ZERO_BUBBLE, 4, None),
        (Policy.ONE_F_ONE_B_INTERLEAVED, 8, 4),
        (Policy.ZERO_BUBBLE_V, 8, 4),
    ],
)
@pytest.mark.parametrize("late", [0.0, 0.013])
def test_simulation_repeats_the_recording(
    policy: Policy, stages: int, ranks: int | None, late: float
) -> None:
    def delay(step: int, replica: int, source: int, target: int) -> float:
        return late if source == 1 else late / 10

    def seconds(step: int, replica: int, stage: int, *_: Any) -> float:
        return _[-1] * (1 + stage / 10 + step / 20)

    job = PlayedJob(2, stages, 8, 3, policy, ranks, seconds=seconds, delay=delay)
    steps = steps_of(job)
    assert not steps.notes and steps.stages == 4
    assert StepSimulator(steps).recorded_steps == pytest.approx(job.step_seconds)


def drop_names(op: Operation) -> Operation:
    return op._replace(
        global_chunk=-1, microbatch=-1 if "compute" not in op.optype else op.microbatch
    )


@pytest.mark.parametrize("policy", [Policy.GPIPE, Policy.ONE_F_ONE_B, Policy.ZERO_BUBBLE])
def test_transfers_without_names_pair_up_in_order(policy: Policy) -> None:
    job = PlayedJob(2, policy=policy, delay=lambda *_: 0.004)
    steps = select_steps(make_table(map(drop_names, job.operations())))
    assert not steps.notes and not any(step.graph.unmatched for step in steps.steps)
    assert StepSimulator(steps).recorded_steps == pytest.approx(job.step_seconds)


def test_without_transfers_the_wait_before_an_op_is_its_transfer() -> None:
    def delay(step: int, replica: int, source: int, target: int) -> float:
        return 0.030 if source == 1 else 0.0

    job = PlayedJob(delay=delay)
    ops = [op for op in job.operations() if not op.optype.endswith(("send", "recv"))]
    steps = select_steps(make_table(ops))
    assert any("no sends and receives" in note for note in steps.notes)
    assert StepSimulator(steps).recorded_steps == pytest.approx(job.step_seconds)


def test_gc_within_an_op_counts_once() -> None:
    job = PlayedJob(steps=2)
    ops = []
    for op in job.operations():
        ops.append(op)
        if (op.optype, op.stage, op.microbatch) == ("forward-compute", 2, 3):
            ops.append(
                op._replace(optype="gc", start=op.start + 0.002, duration=0.004, microbatch=-1)
            )
    steps = select_steps(make_table(ops))
    assert StepSimulator(steps).recorded_steps == pytest.approx(job.step_seconds)


def test_workers_beyond_the_slowest_have_no_slowdown_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipemorph.diagnose.analysis.slowdown.MOST_WORKERS", 3)
    job = replace(PlayedJob(3), seconds=lambda step, replica, *_: _[-1] * (1 + replica / 10))
    found = analyse_slowdown(StepSimulator(steps_of(job)))
    assert len(found.by_worker) == 3
    assert all(worker.startswith("dp2-") for worker in found.by_worker)
