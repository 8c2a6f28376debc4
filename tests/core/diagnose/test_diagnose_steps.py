"""Steps that are analysed, and what is said of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
from op_traces import PlayedJob, make_table

from pipemorph.diagnose.analysis.causes import find_causes
from pipemorph.diagnose.analysis.slowdown import StepSimulator
from pipemorph.diagnose.analysis.steps import StepSet, select_steps
from pipemorph.diagnose.operation import Operation
from pipemorph.errors import InputError


def select(ops: Iterable[Operation]) -> StepSet:
    return select_steps(make_table(ops))


def numbers(steps: StepSet) -> list[int]:
    return [step.step for step in steps.steps]


def test_gaps_between_steps_are_allowed() -> None:
    ops = [op for op in PlayedJob(steps=9).operations() if op.step in (2, 5, 7)]
    assert numbers(select(ops)) == [2, 5, 7]


def test_reading_a_message_that_had_come_is_no_transfer() -> None:
    """A worker that computed meanwhile waits for the moment in which it reads the message."""
    ops = [
        op._replace(duration=0.0004) if op.optype.endswith("recv") and op.duration < 1e-9 else op
        for op in PlayedJob(delay=lambda *_: 0.002).operations()
    ]
    assert sum(op.duration == 0.0004 for op in ops) > 20
    for step in select(ops).steps:
        for message in step.graph.messages:
            assert step.times[message.receive] == pytest.approx(0.002, abs=1e-6)


def test_waiting_for_the_first_message_is_no_part_of_a_step() -> None:
    """Other workers may still be in the step before."""
    ops = [
        op._replace(start=op.start - 0.2, duration=op.duration + 0.2, waited=op.start - 0.2)
        if op.optype == "forward-recv" and op.microbatch == 0
        else op
        for op in PlayedJob().operations()
    ]
    steps = select(ops)
    assert [step.span for step in steps.steps] == [
        pytest.approx(step.span) for step in select(PlayedJob().operations()).steps
    ]
    assert find_causes(StepSimulator(steps))[0].cause != "gaps between ops"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda ops: ops + [op._replace(start=op.start + 1e-4) for op in ops], "overlap, 80 of"),
        (lambda ops: [op._replace(start=1e5 * op.step) for op in ops], "overlap, "),
        (lambda ops: [op._replace(duration=0.0) for op in ops], "no op takes any time"),
    ],
)
def test_files_of_several_jobs_and_times_that_mean_nothing_are_refused(
    change: Callable[[list[Operation]], list[Operation]], expected: str
) -> None:
    with pytest.raises(InputError, match=expected):
        select(change(list(PlayedJob(steps=5).operations())))


def test_ranks_that_are_not_unique_are_not_named() -> None:
    steps = select(op._replace(rank=3) for op in PlayedJob().operations())
    assert {*steps.ranks} == {-1} and any("one rank" in note for note in steps.notes)


def drop(condition: Callable[[Operation], bool]) -> list[Operation]:
    return [op for op in PlayedJob(replicas=2, steps=5).operations() if not condition(op)]


@pytest.mark.parametrize(
    ("condition", "note"),
    [
        (lambda op: op.step == 2 and op.stage == 1, "Step in which workers ran nothing"),
        (
            lambda op: op.step == 2 and op.optype.startswith("backward"),
            "Step without backwards: evaluation, omitted: 2.",
        ),
        (
            lambda op: op.step == 2 and op.optype == "backward-compute" and op.microbatch == 3,
            "Step with other forwards than backwards",
        ),
        (
            lambda op: op.step == 2 and op.stage == 1 and op.microbatch == 3,
            "Step whose stages ran other microbatches",
        ),
    ],
)
def test_incomplete_steps_are_omitted_and_named(
    condition: Callable[[Operation], bool], note: str
) -> None:
    steps = select(drop(condition))
    assert numbers(steps) == [0, 1, 3, 4]
    assert any(each.startswith(note) for each in steps.notes)


def test_a_first_step_with_setup_is_omitted() -> None:
    job = PlayedJob(extra=lambda step, r, s, at: ("data", 5.0) if step + s + at == 0 else None)
    steps = select(job.operations())
    assert numbers(steps) == [1, 2, 3, 4, 5] and "Step 0 took 5." in steps.notes[0]


def test_accumulation_repeats_microbatches() -> None:
    """Two passes of the schedule in a step, with the same numbers of microbatches."""
    job = PlayedJob(steps=4, tail=())
    ops = [
        op._replace(
            step=op.step // 2,
            start=op.start - op.step * 1e5 + op.step % 2 * 1.0,
            posted=None,
            waited=None,
        )
        for op in job.operations()
    ]
    steps = select(sorted(ops, key=lambda op: (op.step, op.start)))
    assert numbers(steps) == [0, 1] and steps.microbatches == 16
    assert not steps.notes
    assert all(seconds > 0.8 for seconds in StepSimulator(steps).recorded_steps)


def test_a_replica_without_a_worker_is_omitted() -> None:
    steps = select(drop(lambda op: (op.dp_rank, op.stage) == (1, 2)))
    assert "stage 2 of dp_rank 1" in steps.notes[0] and steps.replicas == 1
    assert {op.worker for op in steps.steps[0].ops} == {
        i for i, worker in enumerate(steps.workers) if worker.dp_rank == 0
    }


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (
            lambda op: op.stage == 2,
            "workers are missing: stage 2 of dp_rank 0, stage 2 of dp_rank 1",
        ),
        (lambda op: op.stage > 0, "no pipeline in it"),
        (lambda op: "compute" in op.optype, "no pipeline in it"),
        (lambda op: op.optype == "backward-compute", "no step is complete"),
    ],
)
def test_recordings_without_a_whole_pipeline_are_refused(
    condition: Callable[[Operation], bool], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        select(drop(condition))


def set_clocks(ops: Iterable[Operation], *, ahead: Callable[[Operation], float]) -> list[Operation]:
    """Ops by clocks that are ``ahead(op)`` seconds ahead."""
    shifted = []
    for op in ops:
        times: dict[str, Any] = {
            name: None if getattr(op, name) is None else getattr(op, name) + ahead(op)
            for name in ("start", "posted", "waited", "completed")
        }
        shifted.append(op._replace(**times))
    return shifted


@pytest.mark.parametrize("posted", [True, False])
@pytest.mark.parametrize("seconds", [0.05, -0.05, 7200.0])
def test_clocks_apart_are_aligned(seconds: float, posted: bool) -> None:
    """Clocks, each ahead of the one before it, are aligned. The causes stay the same."""

    def delay(step: int, replica: int, source: int, target: int) -> float:
        return 0.03 if replica == 0 and {source, target} == {1, 2} else 0.001

    def slow(*op: Any) -> float:
        return float(op[5]) * (1.5 if op[1] == 0 and op[2] == 3 else 1.0)

    ops = list(PlayedJob(replicas=2, delay=delay, seconds=slow).operations())
    if not posted:
        ops = [op._replace(posted=None, waited=None) for op in ops]
    one = select(ops)
    apart = select(set_clocks(ops, ahead=lambda op: seconds * op.rank))
    assert not any("Clocks" in note for note in one.notes)
    assert any("Clocks of the workers were" in note for note in apart.notes)
    expected, found = (find_causes(StepSimulator(steps)) for steps in (one, apart))
    assert {cause.cause for cause in found} >= {"slow link", "slow worker"}
    for cause, same in zip(found, expected, strict=True):
        assert (cause.cause, cause.link, cause.stage) == (same.cause, same.link, same.stage)
        assert cause.share == pytest.approx(same.share, abs=1e-3), cause


def test_clocks_that_drift_are_aligned() -> None:
    job = PlayedJob(steps=80, delay=lambda *_: 0.001)
    apart = set_clocks(
        job.operations(), ahead=lambda op: (0.05 + 0.002 * op.step) * (op.stage == 2)
    )
    steps = select(apart)
    assert len(steps.steps) == 80
    spans = [step.span for step in steps.steps]
    assert max(spans) < 1.3 * min(spans)


def test_messages_that_no_clocks_explain_are_refused() -> None:
    """Stage 2 runs faster than its data can have come and gone."""
    ops = [
        op._replace(start=1e5 * op.step + 0.1 * (op.start % 1e5), duration=0.1 * op.duration)
        if op.stage == 2
        else op
        for op in PlayedJob().operations()
    ]
    with pytest.raises(InputError, match="clocks differ: "):
        select(ops)


def test_transfers_without_counterparts_are_omitted_and_counted() -> None:
    ops = [
        op._replace(microbatch=-1, global_chunk=-1) if op.optype.endswith("recv") else op
        for op in PlayedJob().operations()
        if not (op.optype == "forward-recv" and op.microbatch == 0)
    ]
    steps = select(ops)
    assert "21 sends and receives of a step have no counterpart" in steps.notes[0]


def test_long_recordings_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops come rank by rank, as from files of ranks."""
    ops = sorted(PlayedJob(steps=40).operations(), key=lambda op: (op.stage, op.step))
    monkeypatch.setattr("pipemorph.diagnose.operation_table.MOST_OPS", len(ops) // 4)
    table = make_table(ops)
    steps = select_steps(table)
    found = numbers(steps)
    assert table.every >= 4 and len(table) <= len(ops) // 4 + 100
    assert {b - a for a, b in pairwise(found)} == {table.every}
    assert steps.microbatches == 8 and not steps.notes
    assert any(table.posted.values()) and len(table.posted) < len(ops)
