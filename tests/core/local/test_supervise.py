"""Supervision of ranks: work that they did while their host stood still is in time."""

from __future__ import annotations

import math
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipemorph.exits import EXIT_DRAINED, EXIT_SAVED, encode_progress
from pipemorph.local.processes import ranks as module
from pipemorph.local.processes.hang_detector import HangDetector
from pipemorph.local.processes.rank_log import RankFileLog
from pipemorph.local.processes.ranks import RankProcess, RankSet
from pipemorph.local.processes.supervision import (
    RECOVERY_CAUSE_SECONDS,
    AttemptOutcome,
    Events,
    RankExited,
    ShutdownReason,
    SignalReceived,
    Supervision,
    _describe_failure,
    _drop_exits,
)
from pipemorph.spec.mesh import MeshShape
from pipemorph.spec.sections.recovery import FailurePolicy


class FakeRanks(RankSet):
    """Ranks that run for the host, without processes, and the requests to them."""

    def __init__(self, *logs: Path) -> None:
        super().__init__(None, lambda rank, status: None)  # type: ignore[arg-type]
        self.requests: list[bool] = []
        for rank, log in enumerate(logs):
            log.touch()
            position = MeshShape(stages=len(logs)).find_coordinate(rank)
            self.ranks.append(RankProcess(position, None, RankFileLog(log)))  # type: ignore[arg-type]

    def request_end(self, *, save: bool) -> None:
        self.requests.append(save)


@pytest.fixture
def ranks(tmp_path: Path) -> FakeRanks:
    return FakeRanks(*[tmp_path / "log"] * 2)


def queue_events(*events: RankExited | SignalReceived) -> Events:
    queue = Events()
    for event in events:
        queue.put(event)
    return queue


def test_ranks_that_stopped_in_time_are_not_killed(ranks: RankSet) -> None:
    events = queue_events(RankExited(0, -15), RankExited(1, -15))
    assert not Supervision(ranks, events).wait_for_ranks(0.0)
    assert ranks.running == []


def test_a_wait_ends_where_nothing_has_happened(ranks: RankSet) -> None:
    events = queue_events(RankExited(1, -15))
    assert not Supervision(ranks, events).wait_for_ranks(0.0)
    assert [rank.position.rank for rank in ranks.running] == [0]
    assert Supervision(ranks, queue_events(SignalReceived(signal.SIGINT))).wait_for_ranks(0.0)


@pytest.mark.parametrize(
    ("exits", "end"), [([(0, 0), (1, 0)], AttemptOutcome.COMPLETED),
                       ([(0, 0), (1, 3)], AttemptOutcome.FAILED),
                       ([(0, 0)], AttemptOutcome.DEADLINE)],
)  # fmt: skip
def test_ends_of_ranks_by_the_deadline_come_first(
    ranks: RankSet, exits: list[tuple[int, int]], end: AttemptOutcome
) -> None:
    events = queue_events(*(RankExited(*each) for each in exits))
    ended = Supervision(ranks, events, deadline=time.monotonic() - 1).wait_for_end()
    assert ended.outcome is end, ended


def test_a_rank_that_goes_on_too_long_after_the_first_is_named(ranks: RankSet) -> None:
    ended = Supervision(ranks, queue_events(RankExited(0, 0))).wait_for_end()
    assert ended.reason == "rank 1 (stage 1): still running 0 s after others finished"


def test_ranks_end_when_those_of_another_pod_have(ranks: RankSet) -> None:
    def find_reason() -> ShutdownReason:
        return ShutdownReason("rank 7 was killed")

    events = Events()
    ended = Supervision(
        ranks, events, straggler_seconds=9.0, find_shutdown_reason=find_reason
    ).wait_for_end()
    assert (ended.outcome, ended.reason, ended.retry) == (
        AttemptOutcome.FAILED,
        "rank 7 was killed",
        True,
    )
    assert ended.ended_by_peers and ended.position is None and ended.error is None


def test_the_rank_that_refuses_a_batch_is_blamed(ranks: RankSet, tmp_path: Path) -> None:
    """Whichever ends first: all of them raise its words."""
    why = "step() of iteration 3 is refused on all ranks: rank 1 (stage 1): the stage raised E"
    (tmp_path / "log").write_text(f"Traceback (most recent call last):\nBatchError: {why}\n")
    ranks.record_exit(0, 1)
    assert Supervision(ranks, Events()).is_cause_pending()
    ranks.record_exit(1, 1)
    ending = Supervision(ranks, Events()).find_cause()
    assert ending is not None and ending.position is not None
    assert ending.position.rank == 1 and ending.error == f"BatchError: {why}"
    assert ending.retry and not ending.lost_peer


def test_the_cause_in_another_pod_is_not_awaited_here(ranks: FakeRanks, tmp_path: Path) -> None:
    """A rank that has lost its peer, and one that has not noticed yet."""
    lost = "RuntimeError: Connection closed by peer [10.0.0.7]:1234"
    (tmp_path / "log").write_text(f"Traceback (most recent call last):\n{lost}\n")
    failed = ranks.record_exit(0, 1)
    ending = _describe_failure(failed)
    assert ending.lost_peer and ending.error is None
    began = time.monotonic()
    word = ShutdownReason("rank 7 was killed")
    Supervision(ranks, Events(), restarts_ranks=True, find_shutdown_reason=lambda: word).stop_ranks(
        ending
    )
    assert ranks.requests == [False] and time.monotonic() - began < RECOVERY_CAUSE_SECONDS


LOST = "rank 2 (stage 2) waited 0.0 s for F of microbatch 3 of iteration 7 from stage 1 on link 1"
TRACE = "Traceback (most recent call last):\n  File x\n"


@pytest.mark.parametrize(
    ("exits", "counts", "reason"),
    [
        # The first that exited, with any code, and not those that lost it.
        ([(1, 0, ""), (2, 1, LOST), (0, 1, LOST)], [5, 5, 5], "1 exited with code 0 after 5 of 12"),
        ([(2, 1, LOST), (1, 0, ""), (0, 1, LOST)], [5, 0, 5], "1 exited with code 0 after 0 of 12"),
        ([(1, 0, ""), (0, 0, ""), (2, 1, LOST)], [4, 5, 5], "1 exited with code 0 after 5 of 12"),
        # No iterations are counted.
        ([(1, 0, ""), (2, 1, LOST)], [-1, -1, -1], "1 exited with code 0"),
        # A rank that failed by itself comes first.
        ([(1, 0, ""), (2, 1, f"{TRACE}ValueError: no")], [5, 5, 5], "2 exited with code 1"),
        ([(1, 0, ""), (2, -9, "")], [5, 5, 5], "2 was killed by SIGKILL"),
        # The rank had done all iterations.
        ([(1, 0, ""), (2, 1, LOST)], [11, 12, 11], "2 exited with code 1"),
        # None lost it: the others still wait for it when their time is over.
        ([(1, 0, "")], [5, 5, 5], "1 exited with code 0 after 5 of 12"),
        ([(1, 0, "")], [12, 12, 12], None),
        ([(1, 0, "")], [-1, -1, -1], None),
    ],
)
def test_the_first_rank_that_exited_is_the_cause(
    exits: list[tuple[int, int, str]], counts: list[int], reason: str | None, tmp_path: Path
) -> None:
    made = FakeRanks(*(tmp_path / f"log-{rank}" for rank in range(3)))
    watch = HangDetector(FailurePolicy(), 12)
    files = HangDetector.list_progress_files(tmp_path, range(3))
    watch.start_generation(files)
    for file, count in zip(files, counts, strict=True):
        if count >= 0:
            file.write_bytes(encode_progress(count, 0))
    for rank, status, text in exits:
        (tmp_path / f"log-{rank}").write_text(text)
        made.record_exit(rank, status)
    supervision = Supervision(made, Events(), describe_early_exit=watch.describe_early_exit)
    found = supervision.find_cause()
    named = found and found.reason.replace(" iterations", "")
    assert named == (reason and f"rank {reason[0]} (stage {reason[0]}){reason[1:]}")
    assert found is None or (found.retry and found.status != 0)
    finished_early = any(status == 0 and counts[rank] < 12 for rank, status, _ in exits)
    assert not (finished_early and supervision.is_cause_pending()), "it is not waited for"


def test_a_rank_that_waits_in_the_kernel_is_named_and_ends_nothing(
    ranks: RankSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(seconds: float) -> int:
        raise subprocess.TimeoutExpired("rank", seconds)

    events, forgotten = Events(), []
    ranks._reaper = SimpleNamespace(send=lambda *what: forgotten.append(what))  # type: ignore[assignment]
    for rank, waits in zip(ranks.ranks, (lambda _: -9, wait), strict=True):
        rank.process = SimpleNamespace(pid=1 << 30, returncode=None, wait=waits)  # type: ignore[assignment]
    monkeypatch.setattr(module, "_wait_for_groups", lambda *_: None)
    monkeypatch.setattr(module, "_collect_orphans", lambda group: None)
    monkeypatch.setattr(ranks, "wait_for_children", lambda seconds: None)
    events.put(RankExited(0, -9))
    events.put(SignalReceived(signal.SIGTERM))
    ending = Supervision(ranks, events).run()
    assert ending.reason == "rank 0 (stage 0) was killed by SIGKILL"
    assert ending.details[-1].startswith("rank 1 (stage 1) does not end on SIGKILL: process ")
    assert ranks.ranks[0].status == -9 and ranks.stuck == [ranks.ranks[1]]
    assert forgotten == [("forget", 1 << 30)], "the reaper kills the other one again"
    ranks.kill_ranks()
    assert len(ranks.stuck) == 1, "it is not waited for again"


def test_signals_outlive_the_attempt_and_exits_do_not() -> None:
    interrupt = SignalReceived(signal.SIGINT)
    events = queue_events(RankExited(0, -9), interrupt, RankExited(1, -9))
    _drop_exits(events)
    assert events.get_nowait() == interrupt
    assert events.empty()


class Ended(FakeRanks):
    """Ranks that end as requested."""

    def wait_for_children(self, seconds: float) -> None:
        pass

    def kill_ranks(self) -> None:
        pass


TERM = SignalReceived(signal.SIGTERM)


@pytest.mark.parametrize(
    ("events", "saves", "expected"),
    [
        # Ranks at their end have no more to save.
        (
            [TERM, RankExited(0, 0), RankExited(1, 0)],
            True,
            (AttemptOutcome.COMPLETED, False, [True]),
        ),
        # A program of its own that ends by request has not completed.
        (
            [TERM, RankExited(0, 0), RankExited(1, 0)],
            False,
            (AttemptOutcome.INTERRUPTED, False, [True]),
        ),
        (
            [TERM, RankExited(0, 75), RankExited(1, 75)],
            True,
            (AttemptOutcome.INTERRUPTED, True, [True]),
        ),
        # Interrupted by another process. One rank may be in its `finally`: not disturbed.
        ([RankExited(0, 75), RankExited(1, 75)], True, (AttemptOutcome.INTERRUPTED, True, [])),
        # A program that saves nothing may have the code for something else.
        ([RankExited(0, 75), RankExited(1, 0)], False, (AttemptOutcome.FAILED, False, [False])),
    ],
)
def test_the_end_of_ranks_by_request(
    events: list[RankExited | SignalReceived],
    saves: bool,
    expected: tuple[AttemptOutcome, bool, list[bool]],
    tmp_path: Path,
) -> None:
    assert EXIT_SAVED == 75
    ranks = Ended(*[tmp_path / "log"] * 2)
    found = Supervision(
        ranks,
        queue_events(*events),
        grace_seconds=60.0,
        straggler_seconds=60.0,
        restarts_ranks=True,
        saves_checkpoint=saves,
    ).run()
    assert (found.outcome, found.saved, ranks.requests) == expected, found


@pytest.mark.parametrize(
    ("exits", "draining", "end"),
    [
        ([76, 76], True, AttemptOutcome.MOVED),
        ([76, 0], True, AttemptOutcome.FAILED),
        # A program may have the code for something else, and its ranks received no request.
        ([76, 76], False, AttemptOutcome.FAILED),
    ],
)
def test_ranks_leave_for_other_places_only_by_request(
    exits: list[int], draining: bool, end: AttemptOutcome, tmp_path: Path
) -> None:
    assert EXIT_DRAINED == 76
    ranks = Ended(*[tmp_path / "log"] * 2)
    events = queue_events(*(RankExited(rank, status) for rank, status in enumerate(exits)))
    found = Supervision(
        ranks,
        events,
        grace_seconds=60.0,
        straggler_seconds=60.0,
        restarts_ranks=True,
        is_draining=lambda: draining,
    ).run()
    assert found.outcome is end, found
    if not draining:
        assert (found.status, found.reason) == (76, "rank 0 (stage 0) exited with code 76")


def test_a_rank_that_departed_has_not_failed(ranks: RankSet, tmp_path: Path) -> None:
    """The other one has lost it, or a third one whose failure is to come."""
    lost = "RuntimeError: Connection closed by peer [10.0.0.7]:1234"
    ranks.ranks[1].log = RankFileLog(tmp_path / "own")
    (tmp_path / "own").write_text(f"Traceback (most recent call last):\n{lost}\n")
    ranks.record_exit(0, EXIT_DRAINED)
    ranks.record_exit(1, 1)
    supervision = Supervision(ranks, Events())
    assert supervision.is_cause_pending(moving=True)
    assert not supervision.is_cause_pending()
    causes = [supervision.find_cause(moving=moving) for moving in (True, False)]
    assert [cause and cause.status for cause in causes] == [1, EXIT_DRAINED]


# --- waits for processes --------------------------------------------------------------------------


class Processes:
    """Process groups that live for ``looks`` checks, on a clock that only sleeps move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, looks: float) -> None:
        self.now, self.looks = 50.0, looks
        self.requests: list[set[int]] = []
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep)
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(module, "_has_live_members", self._live)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def _live(self, groups: set[int]) -> bool:
        self.requests.append(set(groups))
        return len(self.requests) <= self.looks


@pytest.mark.parametrize(
    ("looks", "seconds", "checks_and_seconds"),
    [
        (0, 9.0, (1, 0.0)),
        (3, 9.0, (4, 0.06)),
        (math.inf, 0.0, (1, 0.0)),
        (math.inf, 0.11, (7, 0.12)),
    ],
)
def test_a_wait_for_processes_ends_when_they_are_gone_or_its_time_is_over(
    ranks: RankSet,
    looks: float,
    seconds: float,
    checks_and_seconds: tuple[int, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number, rank in enumerate(ranks.ranks):
        rank.process = SimpleNamespace(pid=70 + number, returncode=None)  # type: ignore[assignment]
    ranks.record_exit(1, 0)
    played = Processes(monkeypatch, looks)
    ranks.wait_for_children(seconds)
    assert (len(played.requests), played.now - 50.0) == pytest.approx(checks_and_seconds)
    assert all(groups == {71} for groups in played.requests), "that of the rank that has exited"


def test_a_rank_that_was_reaped_is_neither_killed_nor_waited_for(
    ranks: RankSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process id may be another process's by now. A rank whose group has gone is no error."""
    killed: list[int] = []

    def killpg(group: int, number: int) -> None:
        killed.append(group)
        raise ProcessLookupError

    forgotten: list[tuple[str, int]] = []
    ranks._reaper = SimpleNamespace(send=lambda *what: forgotten.append(what))  # type: ignore[assignment]
    for number, rank in enumerate(ranks.ranks):
        rank.process = SimpleNamespace(  # type: ignore[assignment]
            pid=70 + number, returncode=number or None, wait=lambda _, status=number: status
        )
    played = Processes(monkeypatch, 1)
    monkeypatch.setattr(module.os, "killpg", killpg)
    monkeypatch.setattr(module, "_collect_orphans", lambda group: None)
    ranks.kill_ranks()
    assert killed == [70]
    assert played.requests == [{70}, {70}]
    assert [rank.status for rank in ranks.ranks] == [0, 1]
    assert forgotten == [("forget", 70), ("forget", 71)]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (None, "is running"),
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-9, "was killed by SIGKILL"),
        (-70, "was killed by signal 70"),
    ],
)
def test_the_end_of_a_rank_is_reported(ranks: RankSet, status: int | None, words: str) -> None:
    ranks.ranks[0].status = status
    assert ranks.ranks[0].describe_exit() == words


def test_a_rank_whose_process_has_gone_has_no_handlers_and_gets_no_signals(
    ranks: RankSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []

    def kill(process: int, number: int) -> None:
        sent.append(number)
        raise ProcessLookupError

    monkeypatch.setattr(module.os, "kill", kill)
    gone, running = ranks.ranks
    for rank in ranks.ranks:
        rank.process = SimpleNamespace(pid=1 << 30)  # type: ignore[assignment]
        assert (rank.prints_stacks, rank.is_stopped) == (False, False)
    gone.status = 0
    gone.send_signal(signal.SIGTERM)
    assert sent == []
    running.send_signal(signal.SIGTERM)
    assert sent == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("stat", "status", "stopped_and_prints"),
    [
        ("70 (python) T 1", "Name:\tx\nSigCgt:\t0000000000000004\n", (True, True)),
        ("70 (a) S) t 1", "Name:\tx\nSigCgt:\tfffffffffffffffb\n", (True, False)),
        ("70 (T) S 1", "Name:\tx\nSigCgt:\t?\n", (False, False)),
        ("70 (T) ", "Name:\tx\n", (False, False)),
        (None, None, (False, False)),
    ],
)
def test_kernel_data_of_a_rank_is_read_as_far_as_it_can_be(
    ranks: RankSet,
    stat: str | None,
    status: str | None,
    stopped_and_prints: tuple[bool, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class File:
        def __init__(self, path: str) -> None:
            self.text = {"/proc/70/stat": stat, "/proc/70/status": status}[path]

        def read_text(self) -> str:
            if self.text is None:
                raise FileNotFoundError
            return self.text

    monkeypatch.setattr(module, "Path", File)
    rank = ranks.ranks[0]
    rank.process = SimpleNamespace(pid=70)  # type: ignore[assignment]
    assert (rank.is_stopped, rank.prints_stacks) == stopped_and_prints
    rank.status = 0
    assert not rank.is_stopped, "another process may have its id"
