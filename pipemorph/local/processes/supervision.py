"""Supervises one attempt until its end, and determines how it ended.

Exits of ranks and signals are events in one queue, which the main thread reads. After a failure the
other ranks get time to fail, too: the logs then show the cause among its consequences. After that
all ranks are stopped, with time to save unless one has failed.
"""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum
from queue import Empty, SimpleQueue
from typing import NamedTuple

from pipemorph.errors import printable_line
from pipemorph.exits import ABORT_SIGNAL, EXIT_DRAINED, EXIT_SAVED
from pipemorph.local.processes.hang_detector import describe_hung_ranks, find_logged_wait
from pipemorph.local.processes.ranks import RankProcess, RankSet
from pipemorph.protocol import PodFailure
from pipemorph.protocol.generation_messages import LONGEST_LINE, MOST_WAITS
from pipemorph.spec.mesh import Coordinate
from pipemorph.views.explanation.explanation_text import format_count

REFRESH_SECONDS = 0.1
NOTICE_SECONDS = 1.0
"""Time for the peers of a failed rank to notice and log the failure, before they are stopped."""
CAUSE_SECONDS = 10.0
"""Time for a rank whose peers lost their connection to it to exit too: its log has the cause, and
it is often not the first to exit."""
RECOVERY_CAUSE_SECONDS = 3.0
"""Time for that if the ranks restart afterwards; their peers then get no time to notice."""
STACK_SECONDS = 0.5
"""Time for ranks that hang to print their stacks."""
LAST_WAIT_SECONDS = 3.0
"""Time for the ranks that wait for a stopped one to report it and end, before it continues."""
END_SECONDS = 10.0
"""Time for a rank that has to end at once: enough to report what it waited for."""
AGENT_SECONDS = 2.5
"""Time for rank 0's agent to send the last report after rank 0 has exited."""
LAST_LINES, LONGEST_SHOWN = 20, 1000
"""Number of last lines of a rank that are shown, and the characters of each."""
LONGEST_LINE_SHOWN = 2000
"""Longest line of an ending, in characters: ranks of other pods may have written it."""
MOST_PEERS = 16
_PREFIX = re.compile(r"^\[rank\d+\]: ")
_LOST = re.compile("closed by peer|reset by peer|Broken pipe", re.IGNORECASE)
_REFUSED = re.compile(r"is refused on all ranks: rank (\d+) ")
"""Pattern in the exception of all ranks for a batch that one of them refused."""


class AttemptOutcome(StrEnum):
    """Outcome of an attempt."""

    COMPLETED = "completed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    DEADLINE = "deadline"
    MOVED = "moved"
    """The ranks have left together, to continue with another layout."""


@dataclass(frozen=True)
class RankExited:
    """Exit of a rank. ``status``: exit code, or minus the signal."""

    rank: int
    status: int


@dataclass(frozen=True)
class SignalReceived:
    """Signal that this host has received."""

    number: signal.Signals


Events = SimpleQueue["RankExited | SignalReceived"]


class ShutdownReason(NamedTuple):
    """Reason why the ranks of this host have to end: ranks of another pod have ended, or no rank of
    the job finishes an iteration (``hang``)."""

    reason: str
    hang: bool = False


@dataclass(frozen=True)
class AttemptResult:
    """Result of an attempt: reason, and details, one per line, most important first."""

    outcome: AttemptOutcome
    reason: str = ""
    details: tuple[str, ...] = ()
    retry: bool = False
    """True if a restart may succeed."""
    status: int | None = None
    """Exit code of the rank that failed, or minus its signal; None if none did."""
    position: Coordinate | None = None
    """The rank that failed, if one did."""
    error: str | None = None
    """Exception of that rank, as one line; None if there was none, or if it lost a peer."""
    hang: bool = False
    """True if the ranks ended because none finished an iteration."""
    waits: tuple[str, ...] = ()
    """State of each rank after a hang, ranks that waited for no other first."""
    lost_peer: bool = False
    """True if the rank failed because it lost another one."""
    ended_by_peers: bool = False
    """True if the ranks ended because ranks of other pods had, and none of them failed before."""
    at: float = 0.0
    """Time at which the end was noticed: wall clock, seconds."""
    saved: bool = False
    """True if the ranks saved before they ended, as requested."""

    def format_lines(self) -> str:
        """Lines of the result: the reason, then indented details."""
        lines = (self.reason, *(f"  {line}" for line in self.details))
        return "\n".join(printable_line(line, LONGEST_LINE_SHOWN) for line in lines)


@dataclass(frozen=True)
class Supervision:
    """Supervision of an attempt: :meth:`run` waits until all ranks have finished, one fails or the
    run is stopped; then it stops all ranks."""

    ranks: RankSet
    events: Events
    _: KW_ONLY
    refresh: Callable[[], None] = lambda: None
    """Called several times a second."""
    note: Callable[[str], None] = lambda _: None
    grace_seconds: float = 0.0
    """Seconds in which ranks may save after a SIGTERM, and end."""
    straggler_seconds: float = 0.0
    """Seconds that the slowest rank may run after the first has finished."""
    deadline: float | None = None
    """End of the time limit of the job, seconds of the monotonic clock."""
    restarts_ranks: bool = False
    """True if the ranks restart after a failure: no more time than needed is spent on its cause."""
    saves_checkpoint: bool = False
    """True if ranks save at a request to end, and exit with EXIT_SAVED."""
    is_draining: Callable[[], bool] = lambda: False
    """Returns True if the ranks are to leave together and exit with EXIT_DRAINED."""
    find_hang: Callable[[], str | None] = lambda: None
    """Returns the reason to take the ranks for hanging; None if there is none."""
    describe_early_exit: Callable[[int], str | None] = lambda _: None
    """See :meth:`~pipemorph.local.processes.hang_detector.HangDetector.describe_early_exit`."""
    find_shutdown_reason: Callable[[], ShutdownReason | None] = lambda: None
    """Returns the reason why the ranks have to end with ranks of other pods, or None."""
    on_failure: Callable[[AttemptResult], None] = lambda _: None
    """Called before ranks are stopped."""
    clock: Callable[[], float] = time.time
    """Wall clock."""

    def run(self) -> AttemptResult:
        """Wait for the end, stop all ranks, and return the result."""
        ranks, ending = self.ranks, self.wait_for_end()
        at, moving = self.clock(), self.is_draining()
        if ending.outcome is AttemptOutcome.FAILED:
            self.on_failure(replace(ending, at=at))
        if ending.outcome is AttemptOutcome.INTERRUPTED:
            running = format_count(len(ranks.running), "rank")
            self.note(f"{ending.reason}: stopping {running}; repeat to kill the rest")
        if ending.outcome is not AttemptOutcome.COMPLETED:
            stopped = [rank for rank in ranks.running if rank.is_stopped] if ending.hang else []
            hurried = self.stop_ranks(ending, stopped, moving=moving)
            killed = ranks.running
            if ending.outcome is AttemptOutcome.MOVED and (
                killed or not all(map(_has_drained, ranks.ranks))
            ):
                ending = AttemptResult(
                    AttemptOutcome.FAILED, "not all ranks left together", retry=True
                )
            if ending.outcome is AttemptOutcome.FAILED and not ending.hang and ranks.ended:
                ending = self.find_cause(killed, moving=moving) or ending
            waited = (
                self.grace_seconds if _may_save(ending) else min(self.grace_seconds, END_SECONDS)
            )
            why = "as requested" if hurried else f"since they did not stop within {waited:g} s"
            if ending.hang:
                ending = _describe_hang(ending, ranks, stopped)
            ending = _add_peer_waits(ending, ranks, killed, why)
            if self.saves_checkpoint and _have_saved(ranks):
                details = (*ending.details, "the ranks saved a checkpoint")
                ending = replace(ending, details=details, saved=True)
            finished = not killed and all(rank.status == 0 for rank in ranks.ranks)
            if self.saves_checkpoint and finished and ending.outcome is AttemptOutcome.INTERRUPTED:
                ending = AttemptResult(AttemptOutcome.COMPLETED)  # Otherwise they would have saved.
        ranks.wait_for_children(AGENT_SECONDS)
        ranks.kill_ranks()
        if ranks.stuck:
            stuck = (rank.describe_stuck() for rank in ranks.stuck)
            ending = replace(ending, details=(*ending.details, *stuck))
        self.refresh()
        _drop_exits(self.events)
        return replace(ending, at=at)

    def wait_for_end(self) -> AttemptResult:
        """Wait until all ranks have finished, or something ends the attempt."""
        ranks, first_done = self.ranks, None
        while ranks.running:
            try:
                event = self.events.get(timeout=REFRESH_SECONDS)
            except Empty:
                self.refresh()
                # Check time limits only without events: after a stall of this host, events come
                # first.
                now = time.monotonic()
                if self.deadline is not None and now >= self.deadline:
                    return AttemptResult(
                        AttemptOutcome.DEADLINE, "spec.activeDeadlineSeconds exceeded"
                    )
                if first_done is not None and now >= first_done + self.straggler_seconds:
                    late = ", ".join(str(rank.position) for rank in ranks.running)
                    why = (
                        f"{late}: still running {self.straggler_seconds:g} s after others finished"
                    )
                    return AttemptResult(AttemptOutcome.FAILED, why)
                if (stop := self.find_shutdown_reason()) is not None:
                    return AttemptResult(
                        AttemptOutcome.FAILED,
                        stop.reason,
                        retry=True,
                        ended_by_peers=True,
                        hang=stop.hang,
                    )
                if (silence := self.find_hang()) is not None:
                    return AttemptResult(AttemptOutcome.FAILED, silence, retry=True, hang=True)
                continue
            if isinstance(event, SignalReceived):
                return AttemptResult(AttemptOutcome.INTERRUPTED, event.number.name)
            rank = ranks.record_exit(event.rank, event.status)
            if self.saves_checkpoint and event.status == EXIT_SAVED:
                return AttemptResult(AttemptOutcome.INTERRUPTED, "a rank got SIGTERM")
            if _has_drained(rank) and self.is_draining():
                return AttemptResult(AttemptOutcome.MOVED, "the ranks leave together", retry=True)
            if event.status != 0:
                return _describe_failure(rank)
            first_done = first_done or time.monotonic()
        return AttemptResult(AttemptOutcome.COMPLETED)

    def find_cause(
        self, killed: Sequence[RankProcess] = (), *, moving: bool = False
    ) -> AttemptResult | None:
        """Failure that caused the others: of the ranks that failed by themselves, the first that
        had not lost a peer; else the first that exited with code 0 before the last iteration; else
        the first. ``moving``: see :meth:`is_cause_pending`."""
        stopped = (128 + signal.SIGTERM, -ABORT_SIGNAL)
        # A rank may have failed before the request to stop: Python takes time to end.
        bad = [
            r
            for r in self._list_failed(moving=moving)
            if r not in killed and (r.status not in stopped or _find_exception(r))
        ]
        cause = next((rank for rank in bad if _find_lost_wait(rank) is None), None)
        if cause is None:
            early, how_far = self._find_early_exit()
            # If no rank counts iterations, it may have finished all unless another one lost it.
            if early is not None and (how_far or bad):
                return _describe_failure(early, how_far)
        return _describe_failure(cause or bad[0]) if bad else None

    def is_cause_pending(self, *, moving: bool = False) -> bool:
        """True if all failed ranks failed because they lost a peer whose own failure is still to
        come. ``moving``: the ranks were to leave together; those that did have not failed."""
        if self._find_early_exit()[0] is not None:
            return False
        waits = [_find_lost_wait(rank) for rank in self._list_failed(moving=moving)]
        # A wait that reached its deadline lost no peer: the peer hangs, and will not exit.
        return bool(waits) and all(wait and "the deadline is" not in wait for wait in waits)

    def _list_failed(self, *, moving: bool) -> list[RankProcess]:
        ended = self.ranks.ended
        return [rank for rank in ended if rank.status != 0 and not (moving and _has_drained(rank))]

    def _find_early_exit(self) -> tuple[RankProcess | None, str]:
        """The first rank that exited with code 0 before the last iteration, and its progress."""
        for rank in self.ranks.ended:
            how_far = (
                self.describe_early_exit(self.ranks.ranks.index(rank)) if rank.status == 0 else None
            )
            if how_far is not None:
                return rank, how_far
        return None, ""

    def stop_ranks(
        self, ending: AttemptResult, stopped: Sequence[RankProcess] = (), *, moving: bool = False
    ) -> bool:
        """Stop all ranks and wait; ranks that still run then must be killed. Returns True if the
        user interrupted the wait. ``stopped``: ranks that stood still before."""
        ranks = self.ranks
        if ending.hang:
            for rank in ranks.running:
                if rank.prints_stacks:
                    rank.send_signal(signal.SIGQUIT)
            if self.wait_for_ranks(STACK_SECONDS):
                return True
            if stopped:
                # Stopped ranks print theirs when they continue; no other may wait for them then.
                for rank in ranks.running:
                    if rank not in stopped:
                        rank.send_signal(ABORT_SIGNAL)
                # Each rank reports its wait as it ends, which must happen first.
                if self.wait_for_ranks(
                    LAST_WAIT_SECONDS, lambda: all(rank in stopped for rank in ranks.running)
                ):
                    return True
                for rank in stopped:
                    rank.send_signal(signal.SIGCONT)
                if self.wait_for_ranks(STACK_SECONDS):
                    return True
        elif ending.outcome is AttemptOutcome.FAILED:
            if not self.restarts_ranks and self.wait_for_ranks(NOTICE_SECONDS):
                return True
            seconds = RECOVERY_CAUSE_SECONDS if self.restarts_ranks else CAUSE_SECONDS

            def enough() -> bool:
                # The cause may be in another pod.
                return (
                    not self.is_cause_pending(moving=moving)
                    or self.find_shutdown_reason() is not None
                )

            if self.is_cause_pending(moving=moving) and self.wait_for_ranks(seconds, enough):
                return True
        may_save = _may_save(ending)
        if (
            not (self.saves_checkpoint and _have_saved(ranks))
            and ending.outcome is not AttemptOutcome.MOVED
        ):
            # Otherwise all ranks do so by agreement, and end by themselves.
            ranks.request_end(save=may_save)
        return self.wait_for_ranks(
            self.grace_seconds if may_save else min(self.grace_seconds, END_SECONDS)
        )

    def wait_for_ranks(self, seconds: float, enough: Callable[[], bool] = lambda: False) -> bool:
        """Wait until no rank runs or ``enough()``, at most ``seconds``. True if a signal
        interrupted the wait."""
        end = time.monotonic() + seconds
        while self.ranks.running and not enough():
            remaining = end - time.monotonic()
            try:
                # After the time limit, still process events that have already happened.
                event = self.events.get(timeout=min(max(0.0, remaining), REFRESH_SECONDS))
            except Empty:
                if remaining <= 0:
                    return False
                self.refresh()
                continue
            if isinstance(event, SignalReceived):
                return True
            self.ranks.record_exit(event.rank, event.status)
        return False


def make_loss(ending: AttemptResult) -> PodFailure:
    """Convert a failure for the decision on what follows it."""
    return PodFailure(
        reason=ending.reason[:LONGEST_LINE],
        at=ending.at,
        rank=ending.position.rank if ending.position else None,
        retry=ending.retry, lost_peer=ending.lost_peer, hang=ending.hang,
        error=ending.error[:LONGEST_LINE] if ending.error else None,
        waits=tuple(line[:LONGEST_LINE] for line in ending.waits[:MOST_WAITS]),
    )  # fmt: skip


def _describe_hang(
    ending: AttemptResult, ranks: RankSet, stopped: list[RankProcess]
) -> AttemptResult:
    """Add the state of each rank to the ending of ranks that hang."""
    waits, suspect = describe_hung_ranks(ranks.ranks, stopped)
    return replace(
        ending,
        details=(
            "the stacks of the ranks are in their logs; their states:",
            *(f"  {line}" for line in waits[:MOST_PEERS]),
        ),
        waits=tuple(waits[:MOST_PEERS]),
        position=None if suspect is None else suspect.position,
        # The rank that they wait for is on another host.
        lost_peer=suspect is None,
    )


def _find_lost_wait(rank: RankProcess) -> str | None:
    """Wait in which a rank failed; None if it failed for another reason."""
    if rank.status is None or _was_killed(rank):
        return None
    return find_logged_wait(rank) or _find_logged_loss(rank)


def _find_logged_loss(rank: RankProcess) -> str | None:
    """Exception of a torch collective that lost a peer, or of a step that another rank refused."""
    error = _find_logged_exception(rank) or ""
    refused = _REFUSED.search(error)
    lost = _LOST.search(error) if refused is None else int(refused[1]) != rank.position.rank
    return error if lost else None


def _describe_failure(rank: RankProcess, how_far: str = "") -> AttemptResult:
    """Ending for a failed rank. ``how_far``: progress of a rank that exited with code 0."""
    lines = [line for line in rank.log.read_last_lines() if line.strip()][-LAST_LINES:]
    if lines:
        shown = (f"  {printable_line(line, LONGEST_SHOWN)}" for line in lines)
        details = [f"its last lines ({rank.log}):", *shown]
    else:
        details = [f"it wrote nothing to {rank.log}"]
    if rank.status == -signal.SIGKILL:
        details.append("likely the kernel's out-of-memory killer; check `dmesg`")
    return AttemptResult(
        AttemptOutcome.FAILED,
        f"{rank.position} {rank.describe_exit()} {how_far}".rstrip(),
        tuple(details),
        # Exit code 2 means invalid input, which a restart does not change.
        retry=rank.status != 2,
        status=rank.status or None,
        position=rank.position,
        error=_find_exception(rank),
        lost_peer=_find_lost_wait(rank) is not None,
    )


def _find_exception(rank: RankProcess) -> str | None:
    """Last exception that Python printed for a rank that failed by itself."""
    if rank.status in (None, 0) or _was_killed(rank) or _find_lost_wait(rank) is not None:
        return None
    return _find_logged_exception(rank)


def _was_killed(rank: RankProcess) -> bool:
    """True if a signal ended the rank, other than the host's, which a failing rank may get."""
    return rank.status is not None and rank.status < 0 and rank.status != -ABORT_SIGNAL


def _find_logged_exception(rank: RankProcess) -> str | None:
    # With a process group torch writes "[rank0]: " before each line.
    lines = [_PREFIX.sub("", line) for line in rank.log.read_last_lines()]
    begins = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call")]
    after = lines[begins[-1] + 1 :] if begins else []
    return next((line.strip() for line in after if line.strip() and not line[0].isspace()), None)


def _may_save(ending: AttemptResult) -> bool:
    """True if the ranks may save before they end: none of them has failed."""
    return ending.outcome is not AttemptOutcome.FAILED


def _has_drained(rank: RankProcess) -> bool:
    return rank.status == EXIT_DRAINED


def _have_saved(ranks: RankSet) -> bool:
    return any(rank.status == EXIT_SAVED for rank in ranks.ended)


def _drop_exits(events: Events) -> None:
    """Drop the exits of killed ranks from ``events``: the next attempt would attribute them to its
    own ranks."""
    signals = []
    with contextlib.suppress(Empty):
        while True:
            event = events.get_nowait()
            if isinstance(event, SignalReceived):
                signals.append(event)
    for signalled in signals:
        events.put(signalled)


def _add_peer_waits(
    ending: AttemptResult, ranks: RankSet, killed: list[RankProcess], why: str
) -> AttemptResult:
    """Add the other ranks' messages about their waits."""
    details = list(ending.details)
    logged = "\n".join(details)
    peers = [rank for rank in ranks.ranks if rank.position != ending.position]
    waits = [wait for rank in peers if (wait := _find_last_message(rank)) and wait not in logged]
    if ending.hang:
        waits = []  # The details have them.
    if waits:
        details.append("what the ranks were waiting for:")
        details += [f"  {wait}" for wait in waits[:MOST_PEERS]]
    if len(waits) > MOST_PEERS:
        details.append(f"  and {len(waits) - MOST_PEERS} more; see their logs")
    if killed:
        names = ", ".join(str(rank.position) for rank in killed)
        details.append(f"killed, {why}: {names}")
    return replace(ending, details=tuple(details))


def _find_last_message(rank: RankProcess) -> str | None:
    """Wait in which a rank ended; for a failed rank without one, the last line of its log."""
    logged = find_logged_wait(rank)
    if logged is not None:
        return logged
    lines = [line.strip() for line in rank.log.read_last_lines() if line.strip()]
    if lines and rank.status is not None and rank.status > 0:
        return f"{rank.position} {rank.describe_exit()}: {lines[-1]}"
    return None
