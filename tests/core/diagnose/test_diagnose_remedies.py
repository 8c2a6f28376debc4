"""Remedies: jobs that are changed as advised take the time that was predicted."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
from op_traces import PlayedJob, make_table

from pipemorph.diagnose.analysis.causes import find_causes
from pipemorph.diagnose.analysis.remedies import AT_BEST, HALF, Remedy, find_remedies
from pipemorph.diagnose.analysis.slowdown import StepSimulator
from pipemorph.diagnose.analysis.steps import select_steps
from pipemorph.planning.formats.torch_csv import dump_csv
from pipemorph.planning.ir import OpKind, Policy, Route
from pipemorph.planning.planner import plan
from pipemorph.planning.problem import Link, Problem, StageTimes
from pipemorph.planning.search.microbatch_order import order_microbatches


def advise(job: PlayedJob) -> list[Remedy]:
    simulator = StepSimulator(select_steps(make_table(job.operations())))
    return find_remedies(simulator, find_causes(simulator))[0]


def find(advice: list[Remedy], words: str) -> Remedy:
    (found,) = [remedy for remedy in advice if words in remedy.change]
    return found


def play(job: PlayedJob, **changes: Any) -> float:
    """Mean seconds of a step of the changed job."""
    changed = replace(job, step_seconds=[], **changes)
    list(changed.operations())
    return fmean(changed.step_seconds)


def long_stage(step: int, replica: int, stage: int, *_: Any) -> float:
    return _[-1] * (1.6 if stage == 3 else 1.0)


def slow_worker(step: int, replica: int, stage: int, *_: Any) -> float:
    return _[-1] * (1.5 if (replica, stage) == (1, 2) else 1.0)


def halves(*of: Any) -> float:
    """Seconds of an op if, as is assumed of a trace without gradients of weights apart, a half of a
    backward computes them."""
    *_, kind, _, usual = of
    return 0.015 if kind in (OpKind.B, OpKind.W) else float(usual)


def slow_link(step: int, replica: int, source: int, target: int) -> float:
    return 0.025 if {source, target} == {1, 2} else 0.001


@pytest.mark.parametrize("policy", [Policy.ONE_F_ONE_B, Policy.GPIPE])
@pytest.mark.parametrize("seconds", [long_stage, slow_worker])
def test_another_schedule_takes_the_predicted_time(
    policy: Policy, seconds: Callable[..., float]
) -> None:
    def scaled(step: int, replica: int, stage: int, *_: Any) -> float:
        return seconds(step, replica, stage, halves(*_))

    job = PlayedJob(2, policy=policy, seconds=scaled, delay=lambda *_: 0.001)
    now = play(job)
    schedules = [remedy for remedy in advise(job) if remedy.schedule is not None]
    assert schedules and all(remedy.gain > 0.01 for remedy in schedules)
    for remedy in schedules:
        assert remedy.schedule is not None
        splits = any(op.kind is OpKind.B for op in remedy.schedule.ranks[0])
        assert remedy.condition.endswith(HALF) == splits
        took = play(job, order=remedy.schedule)
        assert remedy.predicted_seconds == pytest.approx(took, rel=1e-6)
        assert remedy.gain == pytest.approx(1 - took / now)
        assert dump_csv(remedy.schedule).startswith("0F0,")


@pytest.mark.parametrize(
    ("policy", "stages", "ranks"),
    [
        (Policy.ZERO_BUBBLE, 4, None),
        (Policy.ONE_F_ONE_B_INTERLEAVED, 8, 4),
        (Policy.ZERO_BUBBLE_V, 8, 4),
    ],
)
def test_adapting_to_a_slow_link_takes_the_predicted_time(
    policy: Policy, stages: int, ranks: int | None
) -> None:
    job = PlayedJob(1, stages, 12, 3, policy, ranks, delay=slow_link, seconds=halves)
    advice = advise(job)
    schedules = [remedy for remedy in advice if remedy.schedule is not None]
    assert schedules and "repair the link stage 1 to 2 and back" in "".join(
        r.change for r in advice
    )
    for remedy in schedules:
        took = play(job, order=remedy.schedule)
        assert remedy.predicted_seconds == pytest.approx(took, rel=0.02)


def test_an_even_split_takes_the_predicted_time() -> None:
    job = PlayedJob(2, seconds=long_stage)
    remedy = find(advise(job), "another split: move 28% of stage 3's work")
    took = play(job, seconds=lambda *_: _[-1] * 4.6 / 4)
    assert remedy.predicted_seconds == pytest.approx(took) and remedy.condition == AT_BEST


def test_other_numbers_of_microbatches_take_the_predicted_time() -> None:
    job = PlayedJob(2, seconds=long_stage)
    advice = advise(job)
    half = find(advice, "16 microbatches of half the size")
    took = play(job, microbatches=16, seconds=lambda *_: long_stage(*_) / 2)
    assert half.predicted_seconds == pytest.approx(took) and "half the time" in half.condition
    batch = find(advice, "a batch of twice the size")
    took = play(job, microbatches=16)
    assert batch.predicted_seconds == pytest.approx(took)
    assert batch.gain == pytest.approx(1 - took / 2 / play(job))


def test_fewer_microbatches_help_where_transfers_take_most_time() -> None:
    job = PlayedJob(1, policy=Policy.GPIPE, stages=2, microbatches=16, delay=lambda *_: 0.0)
    assert not [remedy for remedy in advise(job) if "twice the size" in remedy.change and
                "microbatches of" in remedy.change and remedy.gain < 0]  # fmt: skip


def test_moved_microbatches_take_the_predicted_time() -> None:
    job = PlayedJob(3, microbatches=12, seconds=slow_worker)
    remedy = find(advise(job), "move microbatches between replicas")
    counts = {int(r): int(n) for n, r in re.findall(r"(\d+) on dp_rank (\d)", remedy.change)}
    assert sum(counts.get(r, 12) for r in range(3)) == 36 and counts[1] < 12
    took = play(job, counts=counts)
    assert remedy.predicted_seconds == pytest.approx(took)


def test_ordered_microbatches_take_the_predicted_time() -> None:
    """Two replicas, each with lengths of its own, which are the same in all steps."""
    lengths = {
        0: (0.5, 1.9, 0.6, 0.7, 1.8, 0.5, 1.4, 0.6),
        1: (1.2, 0.4, 1.8, 0.9, 0.6, 1.7, 0.5, 0.9),
    }

    def vary(step: int, replica: int, stage: int, kind: OpKind, *_: Any) -> float:
        return lengths[replica][_[0]] * halves(kind, *_)

    job = PlayedJob(2, policy=Policy.ONE_F_ONE_B, seconds=vary)
    remedy = find(advise(job), "in the best order for this schedule")
    assert remedy.gain > 0.02
    problem = Problem(
        microbatches=8,
        stages=(StageTimes(forward=10, backward_input=15, backward_weight=15),) * 4,
        links=(Link(),) * 3,
        policy=Policy.ONE_F_ONE_B,
    )
    planned = plan(problem).to_plan(0, (Route.DIRECT,) * 3)
    for replica, row in lengths.items():
        order = order_microbatches(problem, planned, row)
        lengths[replica] = tuple(row[m] for m in order)
    assert remedy.predicted_seconds == pytest.approx(play(job), rel=0.01)


def test_a_replaced_node_takes_the_predicted_time() -> None:
    job = PlayedJob(2, seconds=slow_worker)
    remedy = find(advise(job), "replace the node of stage 2 of dp_rank 1 (rank 5)")
    assert remedy.predicted_seconds == pytest.approx(play(job, seconds=lambda *_: _[-1]))


def test_gc_and_loader_have_their_remedies() -> None:
    for name, words in (("gc", "collect garbage"), ("data", "load data ahead")):

        def extra(step: int, replica: int, *place: int, name: str = name) -> Any:
            return (name, 0.06) if place == (1, 5) else None

        remedy = find(advise(PlayedJob(2, extra=extra)), words)
        assert remedy.predicted_seconds == pytest.approx(play(PlayedJob(2)))


def test_nothing_is_advised_that_saves_nothing() -> None:
    job = PlayedJob(1, policy=Policy.ZERO_BUBBLE, stages=2, microbatches=64, tail=())
    assert [remedy.change for remedy in advise(job) if not remedy.condition] == []


def test_orders_that_no_planner_makes_are_said() -> None:
    """Backwards in reverse order, as GPipe of some trainers runs them."""
    job = PlayedJob(1, policy=Policy.GPIPE)
    ops = [
        op._replace(microbatch=7 - op.microbatch) if op.optype.startswith("backward") else op
        for op in job.operations()
    ]
    simulator = StepSimulator(select_steps(make_table(ops)))
    advice, notes = find_remedies(simulator, [])
    assert not [remedy for remedy in advice if remedy.schedule is not None]
    assert "Other schedules are not compared: " in notes[0]
