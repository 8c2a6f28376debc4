"""Recovery after a failure."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from pipemorph.control.restart.restart_policy import RecoveryPolicy, RecoveryStep
from pipemorph.exits import ABORT_SIGNAL
from pipemorph.local.drain_requests import DrainRequests
from pipemorph.local.processes import memory_folder
from pipemorph.local.processes.memory_folder import MemoryCheckpointFolder
from pipemorph.local.processes.rank_log import RankFileLog
from pipemorph.local.processes.ranks import RankProcess
from pipemorph.local.processes.supervision import _describe_failure
from pipemorph.protocol import PodFailure, ResumedFrom
from pipemorph.spec.mesh import MeshShape


def failed(error: str | None = None, *, retry: bool = True) -> PodFailure:
    return PodFailure(reason="rank 1 failed", at=1.0, error=error, retry=retry)


def test_a_failure_after_progress_is_not_counted() -> None:
    ladder = RecoveryPolicy(1)
    for done in (3, 4, 9, 10, 40):
        assert ladder.choose_step(failed(), done) == (RecoveryStep.GENERATION, "")
    assert ladder.counted_failures == 0


def test_without_progress_each_step_costs_more_until_there_is_none() -> None:
    ladder = RecoveryPolicy(3)
    rungs = [ladder.choose_step(failed(), done) for done in (5, 5, 5, 6, 6, 6)]
    assert [rung for rung, _ in rungs] == [
        RecoveryStep.GENERATION,  # five iterations
        RecoveryStep.GENERATION,
        RecoveryStep.ATTEMPT,
        RecoveryStep.GENERATION,  # one more
        RecoveryStep.GENERATION,
        RecoveryStep.NONE,
    ]
    assert rungs[1][1] == "restart 1 of at most 3"
    assert rungs[2][1] == "restart 2 of at most 3"
    assert "4 times no iteration was finished" in rungs[5][1]


def test_iterations_that_are_run_again_are_no_progress() -> None:
    ladder = RecoveryPolicy(2)
    ladder.choose_step(failed(), 8)
    ladder.choose_step(failed(), 8)
    assert ladder.choose_step(failed(), 8)[0] is RecoveryStep.ATTEMPT
    # The attempt from a checkpoint of iteration 4 fails at 6.
    assert ladder.choose_step(failed(), 8)[0] is RecoveryStep.NONE


def test_a_job_without_finished_iterations_has_no_place_to_resume() -> None:
    assert RecoveryPolicy(1).choose_step(failed(), 0)[0] is RecoveryStep.ATTEMPT


def test_the_same_error_at_the_same_iteration_is_the_users() -> None:
    ladder = RecoveryPolicy(1000)
    assert ladder.choose_step(failed("ValueError: batch 7"), 7)[0] is RecoveryStep.GENERATION
    assert ladder.choose_step(failed("ValueError: batch 8"), 8)[0] is RecoveryStep.GENERATION
    assert ladder.choose_step(failed("ValueError: another"), 8)[0] is RecoveryStep.GENERATION
    assert ladder.choose_step(failed(None), 8)[0] is RecoveryStep.ATTEMPT
    assert ladder.choose_step(failed("ValueError: batch 8"), 8)[0] is RecoveryStep.ATTEMPT
    rung, why = ladder.choose_step(failed("ValueError: batch 8"), 8)
    assert (
        rung is RecoveryStep.NONE
        and why == "not started again: iteration 8 failed twice, with the same error"
    )


@pytest.mark.parametrize(("most", "loss"), [(0, failed()), (5, failed(retry=False))])
def test_failures_that_end_the_job(most: int, loss: PodFailure) -> None:
    assert RecoveryPolicy(most).choose_step(loss, 5)[0] is RecoveryStep.NONE


TRACEBACK = """
Traceback (most recent call last):
  File "train.py", line 3, in load
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 9, in <module>
    main()
ValueError: batch 7 has no labels
  of any kind
a thread said something afterwards
"""


@pytest.mark.parametrize(
    ("log", "status", "error"),
    [
        (TRACEBACK, 1, "ValueError: batch 7 has no labels"),
        (TRACEBACK.replace("\n", "\n[rank1]: "), 1, "ValueError: batch 7 has no labels"),
        (TRACEBACK, 143, "ValueError: batch 7 has no labels"),
        (TRACEBACK, -9, None),
        ("RuntimeError: said\n", 1, None),
        (TRACEBACK + TRACEBACK.replace("batch 7", "Connection closed by peer"), 1, None),
        (
            TRACEBACK + TRACEBACK.replace("batch 7", "Connection closed by peer"),
            -ABORT_SIGNAL,
            None,
        ),
        (TRACEBACK, -ABORT_SIGNAL, "ValueError: batch 7 has no labels"),
        ("no such file\n", 1, None),
        (
            TRACEBACK + "rank 1 (stage 1) waited 0.0 s for F of microbatch 3 of iteration 7 from "
            "stage 0 on link 0 (direct, gloo); rank 0 (stage 0) is gone: its connection closed\n",
            1,
            None,
        ),
    ],
)
def test_the_error_of_a_rank(log: str, status: int, error: str | None, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("")
    file = RankFileLog(tmp_path / "log")
    (tmp_path / "log").write_text(log)
    rank = RankProcess(MeshShape(stages=2).find_coordinate(1), None, file, status)  # type: ignore[arg-type]
    assert _describe_failure(rank).error == error


def test_memory_of_ranks_is_private_and_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_folder, "SHARED_MEMORY", tmp_path)
    folder = MemoryCheckpointFolder.create_folder()
    assert folder.root.parent == tmp_path and folder.root.stat().st_mode & 0o777 == 0o700
    assert folder.read_resumed(1) is None
    word = folder.root / "resumed.generation-1"
    for text in ("", "[]", '{"iteration": 7}', '{"iteration": null, "rung": "kept", "why": ""}'):
        word.write_text(text)
        assert folder.read_resumed(1) is None
    word.write_text('{"iteration": 7, "rung": "replica", "why": "rank 3 has none"}')
    assert str(folder.read_resumed(1)) == "from copies of other replicas (rank 3 has none)"
    assert folder.read_resumed(2) is None
    (folder.root / "resumed.generation-2").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        folder.read_resumed(2)
    (folder.root / "copies").mkdir()
    (folder.root / "copies" / "rank-0.a").write_bytes(b"state")
    folder.clear()
    assert not [*folder.root.iterdir()]
    folder.remove()
    folder.remove()
    assert not folder.root.exists()


def test_resumed_state_is_reported_once_readable(tmp_path: Path) -> None:
    class Reporter:
        states: ClassVar[list[ResumedFrom]] = []

        def report_drain_refusal(self, generation: int, why: str) -> None:
            raise AssertionError(why)

        def report_resumed(self, generation: int, state: ResumedFrom) -> None:
            self.states.append(state)

    requests = DrainRequests(memory_folder.MemoryCheckpointFolder(tmp_path), Reporter(), print)
    requests.start_generation(awaits_report=True)
    written = tmp_path / "resumed.generation-1"
    written.mkdir()
    requests.exchange_messages(1, None)
    assert not Reporter.states
    written.rmdir(), written.write_text('{"iteration": 7, "rung": "kept", "why": ""}')
    requests.exchange_messages(1, None), requests.exchange_messages(1, None)
    assert [each.iteration for each in Reporter.states] == [7]
