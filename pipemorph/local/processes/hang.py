"""Finds ranks of which none finishes an iteration, and says what each of them does. Knows how many
iterations they have finished, which decides what follows a failure.

Each rank counts the iterations that it has finished in a file of its host's, so no agent and no
ingest has to live for this: what they are told comes later, and never from a rank that dies. No
rank can be more than an iteration ahead of another: those of one host show whether any rank of the
job goes on.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pipemorph.api.sections.recovery import FailurePolicy
from pipemorph.errors import one_line
from pipemorph.exits import PROGRESS_BYTES, progress_file, progress_of
from pipemorph.local.processes.ranks import RankProcess

LONGEST_NOTE = 500
"""Characters of a line that a rank leaves for the output of its host."""
STALL_SECONDS = 2.0
"""If this host has not looked for longer, it stood still itself, and that time does not count."""
_WAITING = re.compile(
    r".*((?:rank|stage) \d+(?: \([^)]*\))? (?:waited [\d.]+ s|was (?:not )?waiting) for .*)"
)
"""The message of a rank that is stopped while it waits; group 1 is without the line's prefix."""
_STACK = re.compile(r"Current thread 0x")
_FRAME = re.compile(r'\s*File "(.*)", line (\d+) in (.*)')


class HangWatch:
    """Looks at the ranks of one host, in all their lives.

    ``policy``: ``hangSeconds`` is for an iteration; ``startSeconds`` for the time from the start of
    the ranks to their first iteration. Without that, a start may take ``hangSeconds`` longer than
    twice the longest so far, and the first one any time. ``iterations``: those of the job.
    """

    def __init__(
        self,
        policy: FailurePolicy,
        iterations: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy, self._iterations, self._clock = policy, iterations, clock
        self.longest_start: float | None = None
        """Seconds from a start of the ranks to the end of their first iteration."""
        self.first: int | None = None
        """The iteration that the first ranks began with; None before they have begun."""
        self.finished = 0
        """The most iterations that any rank has finished in any life; 0 before one has finished one
        here. An iteration of a rank is finished once its ``step`` has returned."""
        self._files: list[_CountFile] = []
        self.begin(())

    @property
    def reached(self) -> int:
        """The most iterations of the job that a rank of this life has finished, with those that it
        began with; 0 before one has begun."""
        return max(0, *self._counts) if self._counts else 0

    @property
    def began_with(self) -> int:
        """The most iterations that a rank of this life began with; 0 before one has begun."""
        return max(self._firsts, default=0)

    @property
    def watches(self) -> bool:
        """Whether there is any limit."""
        return self._policy.hang_seconds is not None or self._policy.start_seconds is not None

    def begin(self, files: Sequence[Path]) -> None:
        """The ranks are about to be started, with these files for their counts."""
        self._close()
        self._files = [_CountFile(path) for path in files]
        self._noted: set[Path] = set()
        self._began = self._moved = self._looked = self._clock()
        self._counts = [-1 for _ in files]
        self._firsts = [0 for _ in files]
        self._ran = False
        """Whether an iteration has been finished since."""

    @staticmethod
    def files(folder: Path, ranks: Sequence[int]) -> list[Path]:
        return [folder / progress_file(rank) for rank in ranks]

    def look(self) -> str | None:
        """Why the ranks are taken for hanging; None if they are not. Call it several times a
        second."""
        now = self._clock()
        stall = now - self._looked
        readable = self._read(now)
        # What this host does not see is no reason to stop the ranks.
        if stall > STALL_SECONDS or not readable:
            self._began, self._moved = self._began + stall, self._moved + stall
        self._looked = now
        if max(self._counts, default=0) >= self._iterations:
            return None
        return self._why(now)

    def end(self) -> None:
        """The ranks have ended; their files are still there."""
        self._read(self._clock())
        self._close()

    def notes(self) -> list[str]:
        """The lines that ranks have left for the output of this host since the last call."""
        found = []
        for path in (file.path.with_name(f"note{file.path.suffix}") for file in self._files):
            if path not in self._noted and path.exists():
                self._noted.add(path)
                found.append(one_line(path.read_text(errors="replace"), LONGEST_NOTE))
        return found

    def early(self, index: int) -> str | None:
        """How far a rank that has ended, by its place among those of this host, had come before the
        last iteration: ``after 5 of 12 iterations``, or empty if no rank here counts them. None if
        it had finished the last one."""
        self._read(self._clock())
        if max(self._counts, default=-1) < 0:
            return ""
        done = max(0, self._counts[index])
        return f"after {done} of {self._iterations} iterations" if done < self._iterations else None

    def _close(self) -> None:
        for file in self._files:
            file.close()

    def _read(self, now: float) -> bool:
        """Whether all counts that ranks have written could be read. Those of others stay."""
        readable = [file.read() for file in self._files]
        found = [(file.finished, file.first) for file in self._files]
        self.finished = max([self.finished, *(done for done, first in found if done > first)])
        if self.first is None and any(done >= 0 for done, _ in found):
            self.first = max(first for _, first in found)
        counts, self._firsts = [done for done, _ in found], [first for _, first in found]
        if counts == self._counts:
            return all(readable)
        # The first count of a rank is what it begins with.
        goes_on = any(-1 < old != new for old, new in zip(self._counts, counts, strict=True))
        if goes_on and not self._ran:
            self._ran = True
            self.longest_start = max(self.longest_start or 0.0, now - self._began)
        self._counts, self._moved = counts, now
        return all(readable)

    def _why(self, now: float) -> str | None:
        hang, start = self._policy.hang_seconds, self._policy.start_seconds
        took = now - (self._moved if self._ran else self._began)
        if not self._ran and start is not None:
            if took < start:
                return None
            field = f"spec.failurePolicy.startSeconds is {start}"
            return f"no iteration was finished in the {took:.0f} s since the start ({field})"
        if not self._ran:
            if self.longest_start is None:
                return None
            took -= 2 * self.longest_start
        if hang is None or took < hang:
            return None
        field = f"spec.failurePolicy.hangSeconds is {hang}"
        return f"no iteration was finished for {took:.0f} s ({field})"


class _CountFile:
    """The file of a rank's counts. Stays open once it is there, so that it is also read while this
    process may open no more files."""

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, -1
        self.finished, self.first = -1, 0
        """Iterations that the rank has finished, and those of them that it began with; -1 and 0
        before it has written them."""

    def read(self) -> bool:
        """False if the file is there and cannot be read."""
        try:
            if self._file < 0:
                self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            written = os.pread(self._file, PROGRESS_BYTES, 0)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        self.finished, self.first = progress_of(written) or (-1, 0)
        return True

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def logged_wait(rank: RankProcess) -> str | None:
    """The last wait that a rank logged."""
    waits = [match.group(1) for line in rank.log.lines() if (match := _WAITING.match(line.strip()))]
    return waits[-1] if waits else None


def what_they_do(
    ranks: Sequence[RankProcess], stopped: Sequence[RankProcess]
) -> tuple[list[str], RankProcess | None]:
    """What each rank does that was asked for its stacks and to end, those first that wait for no
    other one; and the rank that the others wait for, if there is just one in this host. ``stopped``
    stood still before."""
    free, waiting = [], []
    for rank in ranks:
        wait = logged_wait(rank)
        if rank in stopped:
            free.append((rank, f"{rank.position} is stopped, as by SIGSTOP"))
        elif wait is not None and "not waiting" not in wait:
            waiting.append(wait)
        else:
            free.append((rank, f"{rank.position} {_place(rank)}"))
    suspects = list(stopped) or [rank for rank, _ in free]
    return [text for _, text in free] + waiting, suspects[0] if len(suspects) == 1 else None


def _place(rank: RankProcess) -> str:
    """Where the main thread of a rank was when it printed its stacks."""
    lines = rank.log.lines()
    heads = [number for number, line in enumerate(lines) if _STACK.match(line)]
    frame = _FRAME.match(lines[heads[-1] + 1]) if heads and heads[-1] + 1 < len(lines) else None
    if frame is None:
        return "waits for no other rank, and has not said where it is"
    file, line, function = frame.groups()
    return f"waits for no other rank: in {function} ({Path(file).name}:{line})"
