"""Ranks of which none finishes an iteration: when they are taken for hanging, and what is said."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipemorph.exits import encode_progress
from pipemorph.local.processes.hang_detector import HangDetector, describe_hung_ranks
from pipemorph.local.processes.rank_log import RankFileLog
from pipemorph.local.processes.ranks import RankProcess
from pipemorph.spec.mesh import MeshShape
from pipemorph.spec.sections.recovery import FailurePolicy


class Watched:
    """Ranks 0 and 1, which finish iterations, and a clock with a check every half second."""

    def __init__(self, folder: Path, **policy: int) -> None:
        self.now, self.files = 100.0, HangDetector.list_progress_files(folder, range(2))
        made = FailurePolicy.model_validate(policy)
        self.watch = HangDetector(made, 10, lambda: self.now)
        self.watch.start_generation(self.files)

    def finished(self, rank: int, count: int, first: int = 0) -> None:
        self.files[rank].write_bytes(encode_progress(count, first))

    def quiet_after(self, at_most: float) -> float | None:
        """The seconds after which they are taken for hanging, if they finish nothing more."""
        for half in range(int(2 * at_most)):
            if self.watch.find_hang() is not None:
                return half / 2
            self.now += 0.5
        return None


def test_none_finishes_an_iteration(tmp_path: Path) -> None:
    job = Watched(tmp_path, hangSeconds=5)
    assert job.quiet_after(100.0) is None, "the first start may take any time"
    job.finished(0, 3), job.finished(1, 3)
    assert job.quiet_after(100.0) is None, "they begin with it"
    job.finished(1, 4)
    assert job.quiet_after(100.0) == 5.0
    why = job.watch.find_hang()
    assert why == "no iteration was finished for 5 s (spec.failurePolicy.hangSeconds is 5)"
    job.finished(0, 4)
    assert job.quiet_after(100.0) == 5.0
    job.finished(0, 0)
    assert job.quiet_after(100.0) == 5.0, "a script may begin to count again"
    job.finished(0, 10)
    assert job.quiet_after(100.0) is None, "all are done"


@contextmanager
def no_free_descriptor() -> Iterator[None]:
    """Use up the file descriptors of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    taken = [os.dup(0) for _ in range(last)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in taken:
            os.close(each)


def test_counts_are_read_while_no_file_can_be_opened(tmp_path: Path) -> None:
    job = Watched(tmp_path, hangSeconds=5)
    job.finished(0, 3), job.finished(1, 3)
    assert job.watch.find_hang() is None
    writable = os.open(job.files[1], os.O_WRONLY)
    with no_free_descriptor():
        for count in range(4, 10):
            os.pwrite(writable, encode_progress(count, 0), 0)
            assert job.quiet_after(4.0) is None
        assert job.quiet_after(100.0) == 1.0, "ranks that hang are found, too"
    os.close(writable)
    assert job.watch.iterations_reached == 9


def test_counts_that_cannot_be_read_are_no_hang(tmp_path: Path) -> None:
    job = Watched(tmp_path, hangSeconds=5, startSeconds=20)
    assert job.quiet_after(4.0) is None
    job.finished(0, 3), job.finished(1, 3)
    with no_free_descriptor():
        assert job.quiet_after(100.0) is None
    assert job.quiet_after(100.0) == 16.0, "the time before counts"


def test_with_how_many_iterations_ranks_began(tmp_path: Path) -> None:
    job = Watched(tmp_path)
    assert job.watch.iterations_at_start == 0
    job.finished(0, 7, 7), job.finished(1, 9, 7)
    job.watch.finish_generation()
    assert (job.watch.iterations_at_start, job.watch.iterations_reached) == (7, 9)


def test_another_start_takes_no_longer_than_twice_the_longest(tmp_path: Path) -> None:
    job = Watched(tmp_path, hangSeconds=5)
    job.finished(0, 0)
    assert job.quiet_after(8.0) is None
    job.finished(0, 1)
    assert job.watch.find_hang() is None and job.watch.longest_start == 8.0
    job.files[0].unlink()
    job.watch.start_generation(job.files)
    assert job.quiet_after(100.0) == 21.0


def test_a_limit_of_its_own_for_the_start(tmp_path: Path) -> None:
    job = Watched(tmp_path, startSeconds=20)
    assert job.quiet_after(100.0) == 20.0
    assert job.watch.find_hang() == (
        "no iteration was finished in the 20 s since the start"
        " (spec.failurePolicy.startSeconds is 20)"
    )
    job.finished(0, 0), job.watch.find_hang(), job.finished(0, 1)
    assert job.quiet_after(100.0) is None, "nothing was said of iterations"


def test_the_time_in_which_the_host_stood_still_does_not_count(tmp_path: Path) -> None:
    job = Watched(tmp_path, hangSeconds=5)
    job.finished(0, 0), job.watch.find_hang(), job.finished(0, 1), job.watch.find_hang()
    job.now += 1000.0
    assert job.quiet_after(100.0) == 5.0


def test_it_has_the_iterations_of_ranks_of_all_lives(tmp_path: Path) -> None:
    """Ranks were not checked since they started: one may die right after."""
    job = Watched(tmp_path)
    job.finished(0, 7, first=7), job.finished(1, 7, first=7)
    job.watch.finish_generation()
    assert job.watch.iterations_finished == 0, "they began with what others had finished"
    job.finished(1, 8, first=7)
    job.watch.finish_generation()
    assert job.watch.iterations_finished == 8
    for file in job.files:
        file.unlink()
    job.watch.start_generation(job.files)
    job.finished(0, 6, first=5), job.files[1].write_bytes(b"1234")
    job.watch.finish_generation()
    assert job.watch.iterations_finished == 8, "iterations are run again"


STACK = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 468 in select

Current thread 0x00007f02 (most recent call first):
  File "/home/me/train.py", line 27 in read_labels
  File "/home/me/train.py", line 60 in <module>
"""
WAITS = "terminated: rank 0 (stage 0) waited 5.1 s for B of microbatch 0 from stage 1 on link 0\n"
IDLE = "terminated: rank 1 (stage 1) was not waiting for a message\n"


def ranks_that_said(folder: Path, *texts: str) -> list[RankProcess]:
    ranks = []
    for rank, text in enumerate(texts):
        log = folder / str(rank)
        log.write_text("")
        made = RankFileLog(log)
        log.write_text(text)
        ranks.append(RankProcess(MeshShape(stages=2).find_coordinate(rank), None, made))  # type: ignore[arg-type]
    return ranks


@pytest.mark.parametrize(
    ("log", "stopped", "said"),
    [
        (STACK + IDLE, False, "waits for no other rank: in read_labels (train.py:27)"),
        (STACK, False, "waits for no other rank: in read_labels (train.py:27)"),
        ("", False, "waits for no other rank, and printed no stack"),
        (STACK + IDLE, True, "is stopped, as by SIGSTOP"),
    ],
)
def test_the_rank_that_the_others_wait_for_is_named(
    log: str, stopped: bool, said: str, tmp_path: Path
) -> None:
    ranks = ranks_that_said(tmp_path, STACK + WAITS, log)
    words, suspect = describe_hung_ranks(ranks, ranks[1:] if stopped else [])
    waits = "rank 0 (stage 0) waited 5.1 s for B of microbatch 0 from stage 1 on link 0"
    assert (words, suspect) == ([f"rank 1 (stage 1) {said}", waits], ranks[1])


def test_a_stopped_rank_is_named_for_any_report_of_the_others(tmp_path: Path) -> None:
    ranks = ranks_that_said(tmp_path, STACK + IDLE, STACK + IDLE)
    assert describe_hung_ranks(ranks, ranks[1:])[1] is ranks[1]
    assert describe_hung_ranks(ranks, [])[1] is None
