"""What follows a failure."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from pipemorph.api.mesh import MeshShape
from pipemorph.control.pods.following import Ladder, Rung
from pipemorph.exits import END_NOW
from pipemorph.local.moves import LeaveRequests
from pipemorph.local.processes import kept
from pipemorph.local.processes.kept import KeptFolder
from pipemorph.local.processes.rank_log import FileLog
from pipemorph.local.processes.ranks import RankProcess
from pipemorph.local.processes.supervise import _failure
from pipemorph.wire import Loss, ResumedFrom


def failed(error: str | None = None, *, retry: bool = True) -> Loss:
    return Loss(reason="rank 1 failed", at=1.0, error=error, retry=retry)


def test_a_failure_after_progress_is_not_counted() -> None:
    ladder = Ladder(1)
    for done in (3, 4, 9, 10, 40):
        assert ladder.after(failed(), done) == (Rung.GENERATION, "")
    assert ladder.counted == 0


def test_without_progress_each_step_costs_more_until_there_is_none() -> None:
    ladder = Ladder(3)
    rungs = [ladder.after(failed(), done) for done in (5, 5, 5, 6, 6, 6)]
    assert [rung for rung, _ in rungs] == [
        Rung.GENERATION,  # five iterations
        Rung.GENERATION,
        Rung.ATTEMPT,
        Rung.GENERATION,  # one more
        Rung.GENERATION,
        Rung.NONE,
    ]
    assert rungs[1][1] == "restart 1 of at most 3"
    assert rungs[2][1] == "restart 2 of at most 3"
    assert "4 times no iteration was finished" in rungs[5][1]


def test_iterations_that_are_run_again_are_no_progress() -> None:
    ladder = Ladder(2)
    ladder.after(failed(), 8)
    ladder.after(failed(), 8)
    assert ladder.after(failed(), 8)[0] is Rung.ATTEMPT
    # As the attempt from a checkpoint of iteration 4 fails at 6.
    assert ladder.after(failed(), 8)[0] is Rung.NONE


def test_a_job_that_has_finished_nothing_has_nothing_to_go_on_from() -> None:
    assert Ladder(1).after(failed(), 0)[0] is Rung.ATTEMPT


def test_the_same_error_at_the_same_iteration_is_the_users() -> None:
    ladder = Ladder(1000)
    assert ladder.after(failed("ValueError: batch 7"), 7)[0] is Rung.GENERATION
    assert ladder.after(failed("ValueError: batch 8"), 8)[0] is Rung.GENERATION
    assert ladder.after(failed("ValueError: another"), 8)[0] is Rung.GENERATION
    assert ladder.after(failed(None), 8)[0] is Rung.ATTEMPT
    assert ladder.after(failed("ValueError: batch 8"), 8)[0] is Rung.ATTEMPT
    rung, why = ladder.after(failed("ValueError: batch 8"), 8)
    assert (
        rung is Rung.NONE
        and why == "not started again: iteration 8 failed twice, with the same error"
    )


@pytest.mark.parametrize(("most", "loss"), [(0, failed()), (5, failed(retry=False))])
def test_what_ends_the_job(most: int, loss: Loss) -> None:
    assert Ladder(most).after(loss, 5)[0] is Rung.NONE


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
        (TRACEBACK + TRACEBACK.replace("batch 7", "Connection closed by peer"), -END_NOW, None),
        (TRACEBACK, -END_NOW, "ValueError: batch 7 has no labels"),
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
    file = FileLog(tmp_path / "log")
    (tmp_path / "log").write_text(log)
    rank = RankProcess(MeshShape(stages=2).coordinate(1), None, file, status)  # type: ignore[arg-type]
    assert _failure(rank).error == error


def test_what_ranks_keep_is_private_and_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "SHARED_MEMORY", tmp_path)
    folder = KeptFolder.make()
    assert folder.root.parent == tmp_path and folder.root.stat().st_mode & 0o777 == 0o700
    assert folder.resumed(1) is None
    word = folder.root / "resumed.generation-1"
    for text in ("", "[]", '{"iteration": 7}', '{"iteration": null, "rung": "kept", "why": ""}'):
        word.write_text(text)
        assert folder.resumed(1) is None
    word.write_text('{"iteration": 7, "rung": "replica", "why": "rank 3 has none"}')
    assert str(folder.resumed(1)) == "from copies of other replicas (rank 3 has none)"
    assert folder.resumed(2) is None
    (folder.root / "resumed.generation-2").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        folder.resumed(2)
    (folder.root / "copies").mkdir()
    (folder.root / "copies" / "rank-0.a").write_bytes(b"state")
    folder.clear()
    assert not [*folder.root.iterdir()]
    folder.remove()
    folder.remove()
    assert not folder.root.exists()


def test_what_ranks_began_with_is_passed_on_when_it_can_be_read_again(tmp_path: Path) -> None:
    class Answers:
        words: ClassVar[list[ResumedFrom]] = []

        def stays(self, generation: int, why: str) -> None:
            raise AssertionError(why)

        def resumed(self, generation: int, word: ResumedFrom) -> None:
            self.words.append(word)

    requests = LeaveRequests(kept.KeptFolder(tmp_path), Answers(), print)
    requests.begin(word=True)
    word = tmp_path / "resumed.generation-1"
    word.mkdir()
    requests.look(1, None)
    assert not Answers.words
    word.rmdir(), word.write_text('{"iteration": 7, "rung": "kept", "why": ""}')
    requests.look(1, None), requests.look(1, None)
    assert [each.iteration for each in Answers.words] == [7]
