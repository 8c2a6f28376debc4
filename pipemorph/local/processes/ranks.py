"""The ranks of one attempt as processes of this machine: started, watched, stopped.

Each rank is a session and process group of its own, so a Ctrl-C at the terminal reaches
only the host, and whatever a rank starts can be ended with it. A rank's exit is seen by a
thread that waits for it, so the order of exits is the order in which they happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPAWN = Path(__file__).with_name("spawn.py")
REAPER = Path(__file__).with_name("reaper.py")
REAPER_SECONDS = 5.0
REAP_SECONDS = 10.0


@dataclass(frozen=True)
class Seat:
    """Which rank a process is."""

    rank: int
    stage: int
    replica: int
    replicas: int

    @staticmethod
    def of(rank: int, stages: int, replicas: int) -> Seat:
        return Seat(rank, rank % stages, rank // stages, replicas)

    def __str__(self) -> str:
        if self.replicas == 1:
            return f"rank {self.rank} (stage {self.stage})"
        return f"rank {self.rank} (stage {self.stage}, replica {self.replica})"


@dataclass
class RankProcess:
    """One rank. ``status`` is None while it runs, then its exit code or minus its signal."""

    seat: Seat
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    """Where this attempt's part of the log begins, bytes."""
    status: int | None = None

    @property
    def running(self) -> bool:
        return self.status is None

    def outcome(self) -> str:
        """``exited with code 3`` or ``was killed by SIGKILL``."""
        if self.status is None:
            return "is running"
        if self.status >= 0:
            return f"exited with code {self.status}"
        try:
            return f"was killed by {signal.Signals(-self.status).name}"
        except ValueError:
            return f"was killed by signal {-self.status}"

    def lines(self, start: int | None = None) -> list[str]:
        """Lines of this attempt's log from byte ``start`` on; at most the last 64 KiB."""
        with self.log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self.log_start if start is None else start, end - (64 << 10)))
            return file.read().decode(errors="replace").splitlines()

    def log_size(self) -> int:
        return self.log.stat().st_size

    def signal(self, number: signal.Signals) -> None:
        """Signal the rank itself, not what it started."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)


class Reaper:
    """The host's side of :mod:`pipemorph.local.processes.reaper`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(REAPER)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def tell(self, verb: str, what: int | str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # It was killed: we still clean up.
            self._process.stdin.write(json.dumps([verb, what]).encode() + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(REAPER_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class RankSet:
    """All ranks of an attempt. Use it as a context: leaving it leaves no process behind.

    A rank that has ended stays a zombie until then, so that its process group, in which
    rank 0's agent may still be sending the last report, can be ended without ever hitting
    a stranger that was given the same number.
    """

    def __init__(self, reaper: Reaper, on_exit: Callable[[int, int], None]) -> None:
        self._reaper = reaper
        self._on_exit = on_exit
        self._watchers: list[threading.Thread] = []
        self.ranks: list[RankProcess] = []
        self.ended: list[RankProcess] = []
        """Ranks in the order in which they ended."""

    def __enter__(self) -> RankSet:
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()

    def start(self, seat: Seat, command: list[str], env: Mapping[str, str], log: Path) -> None:
        """Start one rank. ``on_exit(rank, status)`` is called from a thread when it has ended.

        Call from the main thread: the kernel kills the rank when the thread that started
        it ends.
        """
        with log.open("ab") as output:
            start = output.tell()
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SPAWN), str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )
        self._reaper.tell("watch", process.pid)
        self.ranks.append(RankProcess(seat, process, log, start))
        watcher = threading.Thread(
            target=self._watch, args=(seat.rank, process.pid), name=f"rank {seat.rank}", daemon=True
        )
        watcher.start()
        self._watchers.append(watcher)

    @property
    def running(self) -> list[RankProcess]:
        return [rank for rank in self.ranks if rank.running]

    def note_exit(self, rank: int, status: int) -> RankProcess:
        """Take in what ``on_exit`` told. Main thread."""
        ended = self.ranks[rank]
        ended.status = status
        self.ended.append(ended)
        return ended

    def terminate(self) -> None:
        """Ask every rank to stop (SIGTERM)."""
        for rank in self.running:
            rank.signal(signal.SIGTERM)
            rank.signal(signal.SIGCONT)

    def settle(self, seconds: float) -> None:
        """Give what ended ranks left behind (rank 0's agent) this long to end by itself."""
        _until_gone([rank for rank in self.ranks if not rank.running], seconds)

    def kill(self) -> None:
        """End whatever is left of every rank, and wait until it is gone. Idempotent."""
        for rank in self.ranks:
            if rank.process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.process.pid, signal.SIGKILL)
        # Also what ranks started: nobody here is told of its end.
        _until_gone(self.ranks, REAP_SECONDS)
        for rank in self.ranks:
            rank.status = rank.process.wait(REAP_SECONDS)
            self._reaper.tell("forget", rank.process.pid)
        for watcher in self._watchers:
            watcher.join(REAP_SECONDS)

    def _watch(self, rank: int, pid: int) -> None:
        with contextlib.suppress(ChildProcessError):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            if ended is not None:
                exited = ended.si_code == os.CLD_EXITED
                self._on_exit(rank, ended.si_status if exited else -ended.si_status)


def _until_gone(ranks: list[RankProcess], seconds: float) -> None:
    """Wait until nothing is alive that these ranks are or started, at most ``seconds``."""
    end = time.monotonic() + seconds
    # Of a rank that was reaped the number may be a stranger's by now.
    groups = {rank.process.pid for rank in ranks if rank.process.returncode is None}
    while _live_members(groups) and time.monotonic() < end:
        time.sleep(0.02)


def _live_members(groups: set[int]) -> bool:
    """Whether a process group of ``groups`` has a member that is no zombie. Linux; else False."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(group) in groups and state not in ("Z", "X"):
                return True
    return False
