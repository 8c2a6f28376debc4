"""Causes of lost time: each that is put into a job is named first, with what it costs."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
from op_traces import PlayedJob, make_table

from pipemorph.diagnose.analysis.causes import Cause, find_beginning, find_causes
from pipemorph.diagnose.analysis.slowdown import StepSimulator
from pipemorph.diagnose.analysis.steps import select_steps
from pipemorph.planning.ir import OpKind, Policy


def name_causes(job: PlayedJob) -> list[Cause]:
    return find_causes(StepSimulator(select_steps(make_table(job.operations()))))


def find_first(**faults: Any) -> tuple[Cause, float]:
    """First cause of a job with faults, and what they really cost, seconds a step."""
    clean = {key: faults.pop(key) for key in [*faults] if key not in FAULTS}
    job, without = PlayedJob(**clean, **faults), PlayedJob(**clean)
    causes = name_causes(job)
    list(without.operations())
    return causes[0], fmean(job.step_seconds) - fmean(without.step_seconds)


FAULTS = ("seconds", "delay", "extra")


def slow_worker(step: int, replica: int, stage: int, *_: Any) -> float:
    return _[-1] * (1.5 if (replica, stage) == (1, 2) else 1.0)


def slow_from_step_4(step: int, replica: int, stage: int, *_: Any) -> float:
    return _[-1] * (1.5 if (stage, step >= 4) == (2, True) else 1.0)


def longer_from_step_4(step: int, replica: int, stage: int, *_: Any) -> float:
    return _[-1] * (1.5 if step >= 4 and stage != 1 else 1.0)


def long_stage(step: int, replica: int, stage: int, *_: Any) -> float:
    return _[-1] * (1.6 if stage == 3 else 1.0)


def longer_forward(step: int, replica: int, stage: int, kind: OpKind, *_: Any) -> float:
    return _[-1] * (2.0 if stage == 1 and kind is OpKind.F else 1.0)


@pytest.mark.parametrize("replicas", [2, 3, 5])
@pytest.mark.parametrize("policy", [Policy.ONE_F_ONE_B, Policy.GPIPE, Policy.ZERO_BUBBLE])
def test_a_slow_worker_is_named(replicas: int, policy: Policy) -> None:
    cause, cost = find_first(replicas=replicas, policy=policy, seconds=slow_worker)
    assert (cause.cause, cause.where) == (
        "slow worker", f"stage 2 of dp_rank 1 (rank {2 * replicas + 1})",
    )  # fmt: skip
    assert cause.seconds == pytest.approx(cost, rel=0.05) and cause.since is None


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_worker_that_becomes_slow_is_named_with_the_step(replicas: int) -> None:
    cause, cost = find_first(replicas=replicas, steps=9, seconds=slow_from_step_4)
    assert cause.cause.startswith("slow worker") and cause.since == 4
    assert "stage 2 of dp_rank 0" in cause.where
    assert cause.seconds == pytest.approx(cost, rel=0.05)


@pytest.mark.parametrize("replicas", [1, 2])
def test_work_that_grows_on_most_workers_is_no_fault_of_nodes(replicas: int) -> None:
    cause, _ = find_first(replicas=replicas, steps=9, seconds=longer_from_step_4)
    assert (cause.cause, cause.where, cause.workers) == ("slower ops", "most workers", ())
    assert cause.since == 4


@pytest.mark.parametrize("seconds", [long_stage, longer_forward])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("stages", [2, 4])
def test_a_long_stage_is_named(seconds: Any, replicas: int, stages: int) -> None:
    def at_stage(step: int, replica: int, stage: int, *rest: Any) -> float:
        return float(seconds(step, replica, stage + 2 if stages == 2 else stage, *rest))

    chosen = at_stage if seconds is long_stage else seconds
    cause, cost = find_first(replicas=replicas, stages=stages, seconds=chosen)
    assert (cause.cause, cause.since) == ("long stage", None)
    assert cause.stage == (min(3, stages - 1) if seconds is long_stage else 1)
    assert cause.seconds == pytest.approx(cost, rel=0.05)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_slow_link_is_named(replicas: int, both: bool) -> None:
    def delay(step: int, replica: int, source: int, target: int) -> float:
        there, back = (source, target) == (1, 2), (source, target) == (2, 1)
        return 0.030 if replica == 0 and (there or (back and both)) else 0.0005

    usual = lambda *_: 0.0005  # noqa: E731
    job = PlayedJob(replicas=replicas, delay=delay)
    without = PlayedJob(replicas=replicas, delay=usual)
    cause = name_causes(job)[0]
    list(without.operations())
    of = " of dp_rank 0" if replicas > 1 else ""
    assert cause.cause == "slow link" and cause.link == 1
    assert cause.where == f"stage 1 to 2{' and back' if both else ''}{of}"
    cost = fmean(job.step_seconds) - fmean(without.step_seconds)
    assert cause.seconds == pytest.approx(cost, rel=0.05)


def test_a_link_that_is_slow_in_all_replicas_is_one_cause() -> None:
    def delay(step: int, replica: int, source: int, target: int) -> float:
        return 0.030 if (source, target, step > 2) == (1, 2, True) else 0.0

    cause, cost = find_first(replicas=3, steps=8, delay=delay)
    assert (cause.cause, cause.link, cause.since) == ("slow link", 1, 3)
    assert cause.seconds == pytest.approx(cost, rel=0.05)


@pytest.mark.parametrize(("replicas", "stages"), [(1, 2), (2, 4), (8, 2)])
def test_varying_lengths_are_named(replicas: int, stages: int) -> None:
    draw = random.Random(replicas)
    lengths = {
        (step, replica, m): draw.uniform(0.4, 1.6)
        for step in range(6)
        for replica in range(replicas)
        for m in range(8)
    }
    means = {
        step: fmean(each for (of, *_), each in lengths.items() if of == step) for step in range(6)
    }

    def vary(step: int, replica: int, *of: Any) -> float:
        *_, m, usual = of
        return float(usual * lengths[step, replica, m])

    shape = {"replicas": replicas, "stages": stages}
    job = PlayedJob(**shape, seconds=vary)  # type: ignore[arg-type]
    even = PlayedJob(**shape, seconds=lambda step, *_: _[-1] * means[step])  # type: ignore[arg-type]
    causes = name_causes(job)
    list(even.operations())
    cost = fmean(job.step_seconds) - fmean(even.step_seconds)
    assert causes[0].cause == "varying lengths"
    assert causes[0].seconds == pytest.approx(cost, rel=0.05)


def test_gc_is_named() -> None:
    def pause(step: int, replica: int, stage: int, position: int) -> Any:
        return ("gc", 0.060) if (replica, stage, position) == (1, 1, 5) else None

    cause, cost = find_first(replicas=2, extra=pause)
    assert (cause.cause, cause.where) == ("gc", "dp1-stage1")
    assert cause.seconds == pytest.approx(cost, rel=0.05)


def test_a_slow_loader_is_named() -> None:
    def load(step: int, replica: int, stage: int, position: int) -> Any:
        return ("data", 0.012) if stage == 0 and position < 8 and step > 1 else None

    cause, cost = find_first(replicas=2, steps=8, extra=load)
    assert (cause.cause, cause.where, cause.since) == ("slow loader", "dp0-stage0, dp1-stage0", 2)
    assert cause.seconds == pytest.approx(cost, rel=0.05)


def test_single_long_ops_are_pauses() -> None:
    def pause(step: int, replica: int, *of: Any) -> float:
        return of[-1] + (0.1 if of[:-1] == (2, OpKind.F, step) else 0.0)

    cause, cost = find_first(seconds=pause)
    assert (cause.cause, cause.where) == ("pauses", "dp0-stage2")
    assert cause.seconds == pytest.approx(cost, rel=0.05)


def test_noise_hides_no_fault_and_is_none() -> None:
    draw = random.Random(3)

    def noisy(*_: Any) -> float:
        return float(slow_worker(*_)) * draw.uniform(0.98, 1.02)

    clean = PlayedJob(replicas=2, seconds=lambda *_: _[-1] * draw.uniform(0.98, 1.02), tail=())
    assert [cause.cause for cause in name_causes(clean)] == []
    faulty = replace(clean, seconds=noisy)
    causes = name_causes(faulty)
    assert [cause.cause for cause in causes] == ["slow worker"]
    cost = fmean(faulty.step_seconds) - fmean(clean.step_seconds)
    assert causes[0].seconds == pytest.approx(cost, rel=0.05)


@pytest.mark.parametrize(
    ("costs", "at"),
    [
        ([0, 0, 5, 5, 5], 2),
        ([5, 5, 5], 0),
        ([0.2, 0.1, 5, 4, 6, 5], 2),
        ([0, 5, 0, 0, 0, 0, 0], 0),
        ([0, 0, 0, 0, 5, 5], 0),
        ([0, 0, 0], 0),
        ([3], 0),
    ],
)
def test_the_step_from_which_costs_are_there(costs: list[float], at: int) -> None:
    assert find_beginning(costs) == at
