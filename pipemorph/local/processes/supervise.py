"""Supervises one attempt until its end, and determines how it ended."""

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

from pipemorph.api.mesh import Coordinate
from pipemorph.errors import printable_line
from pipemorph.exits import END_NOW, EXIT_MOVES, EXIT_SAVED
from pipemorph.explain.story import plural
from pipemorph.local.processes.hang import logged_wait, what_they_do
from pipemorph.local.processes.ranks import RankProcess, RankSet
from pipemorph.wire import Loss
from pipemorph.wire.generations import LONGEST_LINE, MOST_WAITS

REFRESH_SECONDS = 0.1
NOTICE_SECONDS = 1.0
"""Time for the peers of a failed rank to notice and log the failure, before they are stopped."""
CAUSE_SECONDS = 10.0
"""Time for a rank whose peers lost their connection to it to exit too: its log has the cause, and
it is often not the first to exit."""
RECOVERY_CAUSE_SECONDS = 3.0
"""The same where the job goes on afterwards, and the others are not given time to notice."""
STACK_SECONDS = 0.5
"""Time for ranks that hang to print their stacks."""
SAY_SECONDS = 3.0
"""Time for the ranks that wait for a stopped one to say so and end, before that one goes on."""
END_SECONDS = 10.0
"""Time for a rank that is to end at once: enough to say what it waited for."""
AGENT_SECONDS = 2.5
"""Time for rank 0's agent to send the last report after rank 0 has exited."""
LAST_LINES, LONGEST_SHOWN = 20, 1000
"""Last lines of a rank that are shown, and the characters of each."""
LONGEST_LINE_SHOWN = 2000
"""Characters of any line of an ending: ranks of other pods may have written it."""
MOST_PEERS = 16
_PREFIX = re.compile(r"^\[rank\d+\]: ")
_LOST = re.compile("closed by peer|reset by peer|Broken pipe", re.IGNORECASE)
_REFUSED = re.compile(r"is refused on all ranks: rank (\d+) ")
"""In the exception of all ranks for a batch that one of them refused."""


class End(StrEnum):
    """How an attempt ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    DEADLINE = "deadline"
    MOVED = "moved"
    """The ranks have left together, to go on with another layout."""


@dataclass(frozen=True)
class RankExited:
    rank: int
    status: int


@dataclass(frozen=True)
class Signalled:
    number: signal.Signals


Events = SimpleQueue["RankExited | Signalled"]


class Told(NamedTuple):
    """Why the ranks here have to end: those of another pod have, or none of the job's finishes an
    iteration (``hang``)."""

    reason: str
    hang: bool = False


@dataclass(frozen=True)
class Ending:
    """How an attempt ended: reason, and details, one per line, most important first."""

    end: End
    reason: str = ""
    details: tuple[str, ...] = ()
    retry: bool = False
    """Whether a restart may succeed."""
    status: int | None = None
    """Of the rank that failed, if one did: its exit code, or minus its signal."""
    position: Coordinate | None = None
    """The rank that failed, if one did."""
    error: str | None = None
    """The exception in which it ended, as one line; None if it ended otherwise, or lost a peer."""
    hang: bool = False
    """Whether the ranks ended because none finished an iteration."""
    waits: tuple[str, ...] = ()
    """Then what each of them did, those first that waited for no other."""
    lost_peer: bool = False
    """Whether the rank failed because it lost another one."""
    told: bool = False
    """Whether the ranks ended because those of other pods had, and none of them failed before."""
    at: float = 0.0
    """When it was noticed: wall clock, seconds."""
    saved: bool = False
    """Whether the ranks saved before they ended, as they were asked to."""

    def describe(self) -> str:
        """All lines of it: the reason, then indented details."""
        lines = (self.reason, *(f"  {line}" for line in self.details))
        return "\n".join(printable_line(line, LONGEST_LINE_SHOWN) for line in lines)


@dataclass(frozen=True)
class Supervision:
    """One attempt, until its end: :meth:`run` waits until all ranks have finished, one fails or the
    run is stopped; then it stops all ranks."""

    ranks: RankSet
    events: Events
    _: KW_ONLY
    refresh: Callable[[], None] = lambda: None
    """Called several times a second."""
    note: Callable[[str], None] = lambda _: None
    grace: float = 0.0
    """Seconds in which ranks may save after a SIGTERM, and end."""
    straggle: float = 0.0
    """Seconds that the slowest rank may run after the first has finished."""
    deadline: float | None = None
    """End of the time limit of the job, seconds of the monotonic clock."""
    recovers: bool = False
    """Whether the ranks start again after a failure, so that no time is spent on finding its cause
    that is not needed."""
    saves: bool = False
    """Whether ranks that are asked to end save, and exit with EXIT_SAVED."""
    moves: Callable[[], bool] = lambda: False
    """Whether they have been asked to leave together, and exit with EXIT_MOVES."""
    hung: Callable[[], str | None] = lambda: None
    """Why the ranks are taken for hanging."""
    early: Callable[[int], str | None] = lambda _: None
    """See :meth:`~pipemorph.local.processes.hang.HangWatch.early`."""
    told: Callable[[], Told | None] = lambda: None
    """Why the ranks have to end, as those of other pods do."""
    on_failure: Callable[[Ending], None] = lambda _: None
    """Called before ranks are stopped."""
    clock: Callable[[], float] = time.time
    """Wall clock."""

    def run(self) -> Ending:
        """How the ranks ended. On return no rank runs that can be killed."""
        ranks, ending = self.ranks, self.until_the_end()
        at, moving = self.clock(), self.moves()
        if ending.end is End.FAILED:
            self.on_failure(replace(ending, at=at))
        if ending.end is End.INTERRUPTED:
            running = plural(len(ranks.running), "rank")
            self.note(f"{ending.reason}: stopping {running}; repeat to kill what does not stop")
        if ending.end is not End.COMPLETED:
            stopped = [rank for rank in ranks.running if rank.stopped] if ending.hang else []
            hurried = self.stop(ending, stopped, moving=moving)
            killed = ranks.running
            if ending.end is End.MOVED and (killed or not all(map(_moved, ranks.ranks))):
                ending = Ending(End.FAILED, "not all ranks left together", retry=True)
            if ending.end is End.FAILED and not ending.hang and ranks.ended:
                ending = self.cause(killed, moving=moving) or ending
            waited = self.grace if _may_save(ending) else min(self.grace, END_SECONDS)
            why = "as requested" if hurried else f"since they did not stop within {waited:g} s"
            if ending.hang:
                ending = _hang(ending, ranks, stopped)
            ending = _with_peers(ending, ranks, killed, why)
            if self.saves and _saved(ranks):
                details = (*ending.details, "the ranks saved a checkpoint")
                ending = replace(ending, details=details, saved=True)
            finished = not killed and all(rank.status == 0 for rank in ranks.ranks)
            if self.saves and finished and ending.end is End.INTERRUPTED:
                ending = Ending(End.COMPLETED)  # Otherwise they would have saved.
        ranks.settle(AGENT_SECONDS)
        ranks.kill()
        if ranks.stuck:
            stuck = (rank.stuck() for rank in ranks.stuck)
            ending = replace(ending, details=(*ending.details, *stuck))
        self.refresh()
        _forget_exits(self.events)
        return replace(ending, at=at)

    def until_the_end(self) -> Ending:
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
                    return Ending(End.DEADLINE, "spec.activeDeadlineSeconds exceeded")
                if first_done is not None and now >= first_done + self.straggle:
                    late = ", ".join(str(rank.position) for rank in ranks.running)
                    why = f"{late}: still running {self.straggle:g} s after others finished"
                    return Ending(End.FAILED, why)
                if (word := self.told()) is not None:
                    return Ending(End.FAILED, word.reason, retry=True, told=True, hang=word.hang)
                if (silence := self.hung()) is not None:
                    return Ending(End.FAILED, silence, retry=True, hang=True)
                continue
            if isinstance(event, Signalled):
                return Ending(End.INTERRUPTED, event.number.name)
            rank = ranks.note_exit(event.rank, event.status)
            if self.saves and event.status == EXIT_SAVED:
                return Ending(End.INTERRUPTED, "a rank got SIGTERM")
            if _moved(rank) and self.moves():
                return Ending(End.MOVED, "the ranks leave together", retry=True)
            if event.status != 0:
                return _failure(rank)
            first_done = first_done or time.monotonic()
        return Ending(End.COMPLETED)

    def cause(self, killed: Sequence[RankProcess] = (), *, moving: bool = False) -> Ending | None:
        """The failure that caused the others: of the ranks that failed by themselves, the first
        that had not lost a peer; else the first that exited with code 0 before the last iteration;
        else the first. ``moving``: see :meth:`cause_is_to_come`."""
        asked = (128 + signal.SIGTERM, -END_NOW)
        # One that was asked to stop may have failed before: Python takes its time to end.
        bad = [
            r
            for r in self._bad(moving=moving)
            if r not in killed and (r.status not in asked or _exception(r))
        ]
        cause = next((rank for rank in bad if _lost_wait(rank) is None), None)
        if cause is None:
            left, how_far = self._first_to_leave()
            # Where nobody counts iterations, it may have been done if no other one lost it.
            if left is not None and (how_far or bad):
                return _failure(left, how_far)
        return _failure(cause or bad[0]) if bad else None

    def cause_is_to_come(self, *, moving: bool = False) -> bool:
        """Whether all failed ranks failed because they lost a peer, whose own failure is to come.
        ``moving``: they were asked to leave together, and those that did have not failed."""
        if self._first_to_leave()[0] is not None:
            return False
        waits = [_lost_wait(rank) for rank in self._bad(moving=moving)]
        # A wait that reached its deadline lost no peer: the peer hangs, and will not exit.
        return bool(waits) and all(wait and "the deadline is" not in wait for wait in waits)

    def _bad(self, *, moving: bool) -> list[RankProcess]:
        ended = self.ranks.ended
        return [rank for rank in ended if rank.status != 0 and not (moving and _moved(rank))]

    def _first_to_leave(self) -> tuple[RankProcess | None, str]:
        """The first rank that exited with code 0 before the last iteration, and how far it had
        come."""
        for rank in self.ranks.ended:
            how_far = self.early(self.ranks.ranks.index(rank)) if rank.status == 0 else None
            if how_far is not None:
                return rank, how_far
        return None, ""

    def stop(
        self, ending: Ending, stopped: Sequence[RankProcess] = (), *, moving: bool = False
    ) -> bool:
        """Stop all ranks and wait: those that still run then must be killed. Returns whether the
        user interrupted the wait. ``stopped``: ranks that stood still before."""
        ranks = self.ranks
        if ending.hang:
            for rank in ranks.running:
                if rank.prints_stacks:
                    rank.signal(signal.SIGQUIT)
            if self.wait(STACK_SECONDS):
                return True
            if stopped:
                # These print theirs when they go on, and by then nobody may have to wait for them.
                for rank in ranks.running:
                    if rank not in stopped:
                        rank.signal(END_NOW)
                # Each says what it waits for as it ends: that must not come before.
                if self.wait(SAY_SECONDS, lambda: all(rank in stopped for rank in ranks.running)):
                    return True
                for rank in stopped:
                    rank.signal(signal.SIGCONT)
                if self.wait(STACK_SECONDS):
                    return True
        elif ending.end is End.FAILED:
            if not self.recovers and self.wait(NOTICE_SECONDS):
                return True
            seconds = RECOVERY_CAUSE_SECONDS if self.recovers else CAUSE_SECONDS

            def enough() -> bool:
                # The cause may be in another pod.
                return not self.cause_is_to_come(moving=moving) or self.told() is not None

            if self.cause_is_to_come(moving=moving) and self.wait(seconds, enough):
                return True
        may_save = _may_save(ending)
        if not (self.saves and _saved(ranks)) and ending.end is not End.MOVED:
            # Else all do, by agreement, and end by themselves.
            ranks.end(save=may_save)
        return self.wait(self.grace if may_save else min(self.grace, END_SECONDS))

    def wait(self, seconds: float, enough: Callable[[], bool] = lambda: False) -> bool:
        """Wait until no rank runs or ``enough()``, at most ``seconds``. True if a signal
        interrupted the wait."""
        end = time.monotonic() + seconds
        while self.ranks.running and not enough():
            left = end - time.monotonic()
            try:
                # With 0 left, still process events that have already happened.
                event = self.events.get(timeout=min(max(0.0, left), REFRESH_SECONDS))
            except Empty:
                if left <= 0:
                    return False
                self.refresh()
                continue
            if isinstance(event, Signalled):
                return True
            self.ranks.note_exit(event.rank, event.status)
        return False


def loss_of(ending: Ending) -> Loss:
    """A failure, for the decision on what follows it."""
    return Loss(
        reason=ending.reason[:LONGEST_LINE],
        at=ending.at,
        rank=ending.position.rank if ending.position else None,
        retry=ending.retry, lost_peer=ending.lost_peer, hang=ending.hang,
        error=ending.error[:LONGEST_LINE] if ending.error else None,
        waits=tuple(line[:LONGEST_LINE] for line in ending.waits[:MOST_WAITS]),
    )  # fmt: skip


def _hang(ending: Ending, ranks: RankSet, stopped: list[RankProcess]) -> Ending:
    """The ending of ranks of which none finished an iteration, with what each of them did."""
    waits, suspect = what_they_do(ranks.ranks, stopped)
    return replace(
        ending,
        details=(
            "the stacks of the ranks are in their logs; what they did:",
            *(f"  {line}" for line in waits[:MOST_PEERS]),
        ),
        waits=tuple(waits[:MOST_PEERS]),
        position=None if suspect is None else suspect.position,
        # The one that they wait for is elsewhere.
        lost_peer=suspect is None,
    )


def _lost_wait(rank: RankProcess) -> str | None:
    """The wait in which a rank failed; None if it failed for another reason."""
    if rank.status is None or _was_killed(rank):
        return None
    return logged_wait(rank) or _logged_loss(rank)


def _logged_loss(rank: RankProcess) -> str | None:
    """The exception of a collective of torch in which a peer was lost, or of a step that another
    rank refused."""
    error = _logged_exception(rank) or ""
    refused = _REFUSED.search(error)
    lost = _LOST.search(error) if refused is None else int(refused[1]) != rank.position.rank
    return error if lost else None


def _failure(rank: RankProcess, how_far: str = "") -> Ending:
    """The ending for a failed rank. ``how_far``: it had come, for one that exited with code 0."""
    lines = [line for line in rank.log.lines() if line.strip()][-LAST_LINES:]
    if lines:
        shown = (f"  {printable_line(line, LONGEST_SHOWN)}" for line in lines)
        details = [f"its last lines ({rank.log}):", *shown]
    else:
        details = [f"it wrote nothing to {rank.log}"]
    if rank.status == -signal.SIGKILL:
        details.append("likely the kernel's out-of-memory killer; check `dmesg`")
    return Ending(
        End.FAILED,
        f"{rank.position} {rank.outcome()} {how_far}".rstrip(),
        tuple(details),
        # Exit code 2 means invalid input, which a restart does not change.
        retry=rank.status != 2,
        status=rank.status or None,
        position=rank.position,
        error=_exception(rank),
        lost_peer=_lost_wait(rank) is not None,
    )


def _exception(rank: RankProcess) -> str | None:
    """The last exception that Python printed for a rank that failed by itself."""
    if rank.status in (None, 0) or _was_killed(rank) or _lost_wait(rank) is not None:
        return None
    return _logged_exception(rank)


def _was_killed(rank: RankProcess) -> bool:
    """Whether a signal ended it, other than that of a host, which a rank that fails may get."""
    return rank.status is not None and rank.status < 0 and rank.status != -END_NOW


def _logged_exception(rank: RankProcess) -> str | None:
    # With a process group torch writes "[rank0]: " before each line.
    lines = [_PREFIX.sub("", line) for line in rank.log.lines()]
    begins = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call")]
    after = lines[begins[-1] + 1 :] if begins else []
    return next((line.strip() for line in after if line.strip() and not line[0].isspace()), None)


def _may_save(ending: Ending) -> bool:
    """Whether the ranks may save before they end: none of them has failed."""
    return ending.end is not End.FAILED


def _moved(rank: RankProcess) -> bool:
    return rank.status == EXIT_MOVES


def _saved(ranks: RankSet) -> bool:
    return any(rank.status == EXIT_SAVED for rank in ranks.ended)


def _forget_exits(events: Events) -> None:
    """Drop the exits of killed ranks from ``events``: the next attempt would attribute them to its
    own ranks."""
    signals = []
    with contextlib.suppress(Empty):
        while True:
            event = events.get_nowait()
            if isinstance(event, Signalled):
                signals.append(event)
    for signalled in signals:
        events.put(signalled)


def _with_peers(ending: Ending, ranks: RankSet, killed: list[RankProcess], why: str) -> Ending:
    """Add the other ranks' messages about what they were waiting for."""
    details = list(ending.details)
    logged = "\n".join(details)
    peers = [rank for rank in ranks.ranks if rank.position != ending.position]
    words = [word for rank in peers if (word := _last_message(rank)) and word not in logged]
    if ending.hang:
        words = []  # They are among its details.
    if words:
        details.append("what the ranks were waiting for:")
        details += [f"  {word}" for word in words[:MOST_PEERS]]
    if len(words) > MOST_PEERS:
        details.append(f"  and {len(words) - MOST_PEERS} more; see their logs")
    if killed:
        names = ", ".join(str(rank.position) for rank in killed)
        details.append(f"killed, {why}: {names}")
    return replace(ending, details=tuple(details))


def _last_message(rank: RankProcess) -> str | None:
    """The wait in which a rank ended; for a failed rank without one, the last line of its log."""
    logged = logged_wait(rank)
    if logged is not None:
        return logged
    lines = [line.strip() for line in rank.log.lines() if line.strip()]
    if lines and rank.status is not None and rank.status > 0:
        return f"{rank.position} {rank.outcome()}: {lines[-1]}"
    return None
