"""Finds ranks of which none finishes an iteration, and describes what each of them does. Counts
their finished iterations, which decide what follows a failure.

Each rank writes the number of its finished iterations to a file of its host, so neither agent nor
ingest has to run for this: their reports come later, and never from a rank that dies. No rank can
be more than an iteration ahead of another, so the ranks of one host show whether any rank of the
job makes progress.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pipemorph.errors import one_line
from pipemorph.exits import PROGRESS_BYTES, decode_progress, progress_file_name
from pipemorph.local.processes.ranks import RankProcess
from pipemorph.spec.sections.recovery import FailurePolicy

LONGEST_NOTE = 500
"""Longest line, in characters, that a rank writes for the output of its host."""
STALL_SECONDS = 2.0
"""Longest pause between two calls: a longer one is a stall of this host and does not count."""
_WAITING = re.compile(
    r".*((?:rank|stage) \d+(?: \([^)]*\))? (?:waited [\d.]+ s|was (?:not )?waiting) for .*)"
)
"""Pattern of a rank's message about a wait that was stopped; group 1 is without the prefix."""
_STACK = re.compile(r"Current thread 0x")
_FRAME = re.compile(r'\s*File "(.*)", line (\d+) in (.*)')


class HangDetector:
    """Watches the ranks of one host, in all generations.

    ``policy``: ``hangSeconds`` limits an iteration, ``startSeconds`` the time from the start of the
    ranks to their first iteration. Without that, a start may take ``hangSeconds`` longer than twice
    the longest so far, and the first one any time. ``iterations``: number of the job.
    """

    def __init__(
        self,
        policy: FailurePolicy,
        iterations: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy, self._iterations, self._clock = policy, iterations, clock
        self.longest_start: float | None = None
        """Longest time from a start of the ranks to the end of their first iteration, seconds."""
        self.first_iteration: int | None = None
        """Iteration with which the first ranks began; None before they have begun."""
        self.iterations_finished = 0
        """Most iterations that any rank has finished in any generation; 0 before one has finished
        one here. An iteration of a rank is finished once its ``step`` has returned."""
        self._files: list[_ProgressFile] = []
        self.start_generation(())

    @property
    def iterations_reached(self) -> int:
        """Most iterations of the job that a rank of this generation has finished, including those
        before its start; 0 before one has begun."""
        return max(0, *self._counts) if self._counts else 0

    @property
    def iterations_at_start(self) -> int:
        """Most iterations with which a rank of this generation began; 0 before one has begun."""
        return max(self._firsts, default=0)

    @property
    def has_limit(self) -> bool:
        """True if there is any limit."""
        return self._policy.hang_seconds is not None or self._policy.start_seconds is not None

    def start_generation(self, files: Sequence[Path]) -> None:
        """Begin a generation, before its ranks start, with these files for their counts."""
        self._close_files()
        self._files = [_ProgressFile(path) for path in files]
        self._noted: set[Path] = set()
        self._began = self._moved = self._looked = self._clock()
        self._counts = [-1 for _ in files]
        self._firsts = [0 for _ in files]
        self._ran = False
        """True once an iteration has been finished since."""

    @staticmethod
    def list_progress_files(folder: Path, ranks: Sequence[int]) -> list[Path]:
        """Files in ``folder`` to which ``ranks`` write their counts."""
        return [folder / progress_file_name(rank) for rank in ranks]

    def find_hang(self) -> str | None:
        """Reason to take the ranks for hanging, or None. Call it several times a second."""
        now = self._clock()
        stall = now - self._looked
        readable = self._read_progress(now)
        # Ranks whose progress this host cannot see are not stopped for it.
        if stall > STALL_SECONDS or not readable:
            self._began, self._moved = self._began + stall, self._moved + stall
        self._looked = now
        if max(self._counts, default=0) >= self._iterations:
            return None
        return self._explain_hang(now)

    def finish_generation(self) -> None:
        """Read the final counts: the ranks have ended, their files still exist."""
        self._read_progress(self._clock())
        self._close_files()

    def read_notes(self) -> list[str]:
        """Lines that ranks have written for the output of this host since the last call."""
        found = []
        for path in (file.path.with_name(f"note{file.path.suffix}") for file in self._files):
            if path not in self._noted and path.exists():
                self._noted.add(path)
                found.append(one_line(path.read_text(errors="replace"), LONGEST_NOTE))
        return found

    def describe_early_exit(self, index: int) -> str | None:
        """Progress of a rank that exited before the last iteration, by its index on this host:
        ``after 5 of 12 iterations``; empty if no rank here counts; None if it had finished all."""
        self._read_progress(self._clock())
        if max(self._counts, default=-1) < 0:
            return ""
        done = max(0, self._counts[index])
        return f"after {done} of {self._iterations} iterations" if done < self._iterations else None

    def _close_files(self) -> None:
        for file in self._files:
            file.close()

    def _read_progress(self, now: float) -> bool:
        """Read all counts. False if one could not be read; it keeps its last value."""
        readable = [file.read() for file in self._files]
        found = [(file.finished, file.first) for file in self._files]
        self.iterations_finished = max(
            [self.iterations_finished, *(done for done, first in found if done > first)]
        )
        if self.first_iteration is None and any(done >= 0 for done, _ in found):
            self.first_iteration = max(first for _, first in found)
        counts, self._firsts = [done for done, _ in found], [first for _, first in found]
        if counts == self._counts:
            return all(readable)
        # The first count of a rank is that of its start.
        goes_on = any(-1 < old != new for old, new in zip(self._counts, counts, strict=True))
        if goes_on and not self._ran:
            self._ran = True
            self.longest_start = max(self.longest_start or 0.0, now - self._began)
        self._counts, self._moved = counts, now
        return all(readable)

    def _explain_hang(self, now: float) -> str | None:
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


class _ProgressFile:
    """File to which a rank writes its counts. It stays open once it exists, so that it can be read
    while this process has no free file descriptor."""

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, -1
        self.finished, self.first = -1, 0
        """Iterations that the rank has finished, and had finished at its start; -1 and 0 before it
        has written them."""

    def read(self) -> bool:
        """Read the counts. False if the file exists and cannot be read."""
        try:
            if self._file < 0:
                self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            written = os.pread(self._file, PROGRESS_BYTES, 0)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        self.finished, self.first = decode_progress(written) or (-1, 0)
        return True

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def find_logged_wait(rank: RankProcess) -> str | None:
    """Last wait in a rank's log."""
    waits = [
        match.group(1)
        for line in rank.log.read_last_lines()
        if (match := _WAITING.match(line.strip()))
    ]
    return waits[-1] if waits else None


def describe_hung_ranks(
    ranks: Sequence[RankProcess], stopped: Sequence[RankProcess]
) -> tuple[list[str], RankProcess | None]:
    """State of each rank after a request for its stacks and its end, ranks that wait for no other
    first; and the rank that the others wait for, if there is just one on this host. ``stopped``:
    ranks that stood still before."""
    free, waiting = [], []
    for rank in ranks:
        wait = find_logged_wait(rank)
        if rank in stopped:
            free.append((rank, f"{rank.position} is stopped, as by SIGSTOP"))
        elif wait is not None and "not waiting" not in wait:
            waiting.append(wait)
        else:
            free.append((rank, f"{rank.position} {_describe_stack(rank)}"))
    suspects = list(stopped) or [rank for rank, _ in free]
    return [text for _, text in free] + waiting, suspects[0] if len(suspects) == 1 else None


def _describe_stack(rank: RankProcess) -> str:
    """Place of a rank's main thread when it printed its stacks."""
    lines = rank.log.read_last_lines()
    heads = [number for number, line in enumerate(lines) if _STACK.match(line)]
    frame = _FRAME.match(lines[heads[-1] + 1]) if heads and heads[-1] + 1 < len(lines) else None
    if frame is None:
        return "waits for no other rank, and printed no stack"
    file, line, function = frame.groups()
    return f"waits for no other rank: in {function} ({Path(file).name}:{line})"
