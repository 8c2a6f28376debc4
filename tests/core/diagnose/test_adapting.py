"""Gain of adapting an observed job, and the change that brings it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from op_traces import PlayedJob, make_table, write_csv

from pipemorph.cli import main
from pipemorph.diagnose.adapting import predict_adapting
from pipemorph.diagnose.analysis.causes import find_causes
from pipemorph.diagnose.analysis.remedies import Remedy, find_remedies
from pipemorph.diagnose.analysis.slowdown import StepSimulator
from pipemorph.diagnose.analysis.steps import select_steps
from pipemorph.diagnose.operation import Operation
from pipemorph.planning.ir import OpKind, Policy


def slow_link(step: int, replica: int, source: int, target: int) -> float:
    return 0.025 if {source, target} == {1, 2} else 0.001


def observe(job: PlayedJob, schedule: str = "torch Schedule1F1B") -> list[Operation]:
    """Ops of a job; the first one of each worker and step has the schedule."""
    seen: set[tuple[int, int]] = set()
    ops = []
    for op in job.operations():
        first = (op.step, op.rank) not in seen
        seen.add((op.step, op.rank))
        ops.append(op._replace(schedule=schedule if first else ""))
    return ops


def list_plans(ops: Iterable[Operation]) -> list[Remedy]:
    """Advised plans of PipeMorph."""
    simulator = StepSimulator(select_steps(make_table(ops)))
    advice, _ = find_remedies(simulator, find_causes(simulator))
    return [remedy for remedy in advice if remedy.adapts]


def block_sends(ops: Iterable[Operation], seconds: float) -> list[Operation]:
    """Ops of ranks that wait ``seconds`` after each op of a step, for a send that is recorded
    nowhere."""
    counts: Counter[int] = Counter()
    late: dict[tuple[int, str, int, int], float] = {}
    for op in sorted(ops, key=lambda op: op.start):
        if op.optype.endswith("compute"):
            counts[op.step] += 1
        late[op.step, op.optype, op.rank, op.microbatch] = seconds * counts[op.step]
    return [
        op._replace(
            start=op.start + late[op.step, op.optype, op.rank, op.microbatch],
            **{
                name: None if at is None else at + late[op.step, op.optype, op.rank, op.microbatch]
                for name, at in (("posted", op.posted), ("waited", op.waited))
            },
        )
        for op in ops
    ]


def test_waits_for_sends_are_no_part_of_the_prediction() -> None:
    """PipeMorph's sends do not block a rank; the error says that they are not explained."""
    ops = observe(PlayedJob(delay=slow_link))
    plain, blocked = list_plans(ops), list_plans(block_sends(ops, 0.001))
    for remedy, same in zip(blocked, plain, strict=True):
        assert remedy.predicted_seconds == pytest.approx(same.predicted_seconds, rel=0.05)
        assert remedy.gain > same.gain + 0.02
        assert same.error < 0.02 * same.predicted_seconds < remedy.error


def test_a_delay_is_found_behind_messages_that_wait_for_others() -> None:
    """The link carries one message at a time, and forwards are sent faster than it does."""
    sent: Counter[tuple[int, int]] = Counter()

    def delay(step: int, replica: int, source: int, target: int) -> float:
        number = sent[step, source]
        sent[step, source] += 1
        # One each 10 ms, which takes 30 ms.
        return 0.03 + (0.02 * number if source == 0 else 0.0)

    job = PlayedJob(stages=2, delay=delay, policy=Policy.GPIPE)
    (*_, plan) = list_plans(observe(job))
    assert plan.problem is not None
    assert plan.problem.links[0].delay == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (
            "torch Schedule1F1B",
            "replace Schedule1F1B(stage, …) by pipemorph_trainer.torch.Adaptive",
        ),
        ("torchtitan ScheduleInterleaved1F1B", "pipelining_fn to pipemorph_trainer.torch.titan's"),
        (
            "megatron-core forward_backward_pipelining_without_interleaving",
            "P2PCommunicator can be replaced",
        ),
        ("deepspeed PipelineEngine", "PipelineEngine.train_batch runs TrainSchedule"),
    ],
)
def test_the_change_names_the_schedule_and_its_gain(schedule: str, words: str) -> None:
    found = predict_adapting(observe(PlayedJob(delay=slow_link), schedule))
    assert words in found.change and len(found.change) <= 240
    assert f"{found.gain:.1%} ± " in found.promise
    assert "within today's memory" in found.promise
    assert found.predicted == pytest.approx(found.seconds * (1 - found.gain))
    assert 0 < found.error < 0.05 * found.predicted


def test_nothing_to_gain_is_said() -> None:
    """A zero-bubble pipeline without transfers, which no other order makes faster."""

    def weigh(*of: object) -> float:
        return 1e-4 if of[3] is OpKind.F else 0.02

    job = PlayedJob(microbatches=32, stages=2, policy=Policy.ZERO_BUBBLE, seconds=weigh)
    found = predict_adapting(observe(job))
    assert found.change.startswith("there is nothing to gain")
    assert (found.gain, found.predicted) == (0.0, found.seconds)


def test_a_job_that_is_too_large_gets_no_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipemorph.diagnose.analysis.remedies.MOST_CELLS", 31)
    found = predict_adapting(observe(PlayedJob(delay=slow_link)))
    assert found.change.startswith("replace Schedule1F1B")
    assert found.promise == "what it would give cannot be predicted"


@pytest.mark.parametrize("schedule", ["", "torch Schedule1F1B"])
def test_the_change_is_the_last_line_of_an_observed_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], schedule: str
) -> None:
    file = write_csv(tmp_path / "ops.csv", observe(PlayedJob(delay=slow_link), schedule))
    assert main(["diagnose", str(file)]) == 0
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert lines[-1].startswith("with PipeMorph: replace Schedule1F1B") == bool(schedule)
    assert main(["diagnose", str(file), "--output", "json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["schedule"] == (schedule or None)
    assert (fields["with_pipemorph"] is None) == (not schedule)
