"""Starts, watches and stops the ranks of one attempt as processes of this machine.

Each rank has its own session and process group, so that a Ctrl-C at the terminal reaches only the
host, and the rank's child processes can be killed with it. Child processes that left the group
become children of this host when the rank ends, since it is a subreaper, and are killed then. One
thread per rank waits for its exit, so exits are reported in the order in which they happen.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipemorph.api.mesh import Coordinate
from pipemorph.exits import END_NOW
from pipemorph.local.processes.forks import (
    SPAWN,
    ForkedProcess,
    ForkServer,
    python_arguments,
    set_subreaper,
    subreaper,
)
from pipemorph.local.processes.rank_log import RankLog

REAPER = Path(__file__).with_name("reaper.py")
REAPER_SECONDS = 5.0
REAP_SECONDS = 10.0


@dataclass
class RankProcess:
    """A rank's process. ``status``: None while it runs, then its exit code or minus its signal."""

    position: Coordinate
    process: subprocess.Popen[bytes] | ForkedProcess
    log: RankLog
    status: int | None = None

    @property
    def prints_stacks(self) -> bool:
        """Whether it handles SIGQUIT, as ranks do, instead of being killed by it."""
        with contextlib.suppress(OSError, StopIteration, ValueError):
            lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
            caught = next(line for line in lines if line.startswith("SigCgt:"))
            return bool(int(caught.split()[1], 16) >> (signal.SIGQUIT - 1) & 1)
        return False

    @property
    def stopped(self) -> bool:
        """Whether it stands still, as after SIGSTOP."""
        with contextlib.suppress(OSError, IndexError):
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
            return self.running and stat.rpartition(")")[2].split()[0] in ("T", "t")
        return False

    @property
    def running(self) -> bool:
        return self.status is None

    def stuck(self) -> str:
        """A sentence about a rank that SIGKILL does not end: where in the kernel it waits."""
        state, where = "?", ""
        with contextlib.suppress(OSError, IndexError):
            folder = Path(f"/proc/{self.process.pid}")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            where = (folder / "wchan").read_text().strip("0\n")
        where = f", in {where}" if where else ""
        return (
            f"{self.position} does not end on SIGKILL: process {self.process.pid} waits in the"
            f" kernel (state {state}{where}), as for a file system or a device that does not answer"
        )

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

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the rank, not to its child processes."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)


class Reaper:
    """The host's connection to :mod:`pipemorph.local.processes.reaper`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(REAPER)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def send(self, verb: str, what: int | str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # The reaper was killed; the host cleans up.
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
    """All ranks of an attempt. A context manager: on exit all their processes are gone.

    An exited rank stays a zombie until then, so that its process group id is not reused. Its group,
    in which rank 0's agent may still be sending the last report, can then be killed safely.
    """

    def __init__(
        self,
        reaper: Reaper,
        on_exit: Callable[[int, int], None],
        forks: ForkServer | None = None,
    ) -> None:
        self._reaper = reaper
        self._on_exit = on_exit
        self._forks = forks
        self._watchers: list[threading.Thread] = []
        self.ranks: list[RankProcess] = []
        self.ended: list[RankProcess] = []
        """Exited ranks, in the order of their exits."""
        self.stuck: list[RankProcess] = []
        """Ranks that did not end when they were killed."""
        self._over = False
        """Whether the exits of ranks are reported no more."""
        self._was_subreaper = subreaper()
        self._others = {each.pid for each in _processes() if each.parent == os.getpid()}
        """Children of this host that no rank has started."""

    def __enter__(self) -> RankSet:
        set_subreaper(True)
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()
        set_subreaper(self._was_subreaper)

    def start(
        self, position: Coordinate, command: list[str], env: Mapping[str, str], log: RankLog
    ) -> None:
        """Start one rank: forked if there is a server and the command is one of this Python, else
        executed. ``on_exit(rank, status)`` is called from a thread when it has exited.

        Raises OSError if it cannot be started.

        Call from the main thread: the kernel kills the rank when the thread that started it exits.
        """
        output = log.open()
        try:
            process = self._process(command, env, output)
        finally:
            os.close(output)
        self._reaper.send("watch", process.pid)
        self.ranks.append(RankProcess(position, process, log))
        watcher = threading.Thread(
            target=self._watch,
            args=(position.rank, process.pid),
            name=f"rank {position.rank}",
            daemon=True,
        )
        watcher.start()
        self._watchers.append(watcher)

    def _process(
        self, command: list[str], env: Mapping[str, str], output: int
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        arguments = python_arguments(command, env) if self._forks is not None else None
        if self._forks is not None and arguments is not None:
            return self._forks.fork(arguments, env, output)
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(SPAWN), str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(env),
            start_new_session=True,
        )

    @property
    def running(self) -> list[RankProcess]:
        return [rank for rank in self.ranks if rank.running]

    def note_exit(self, rank: int, status: int) -> RankProcess:
        """Record an exit that ``on_exit`` reported. Main thread only."""
        ended = next(found for found in self.ranks if found.position.rank == rank)
        ended.status = status
        ended.log.finish()
        self.ended.append(ended)
        return ended

    def end(self, *, save: bool) -> None:
        """Ask every running rank to end: after it has saved, or at once."""
        for rank in self.running:
            rank.signal(signal.SIGTERM if save else END_NOW)
            rank.signal(signal.SIGCONT)

    def settle(self, seconds: float) -> None:
        """Wait for child processes of exited ranks (rank 0's agent), at most ``seconds``."""
        _until_gone([rank for rank in self.ranks if not rank.running], seconds)

    def kill(self) -> None:
        """Kill all processes of the ranks, and wait until they are gone: those that are not after
        :data:`REAP_SECONDS` are in :attr:`stuck`. Idempotent."""
        self._over = True
        end = time.monotonic() + REAP_SECONDS
        ranks = [rank for rank in self.ranks if rank not in self.stuck]
        for rank in ranks:
            if rank.process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.process.pid, signal.SIGKILL)
        # Child processes of ranks too: the host gets no notice of their exit.
        _until_gone(ranks, REAP_SECONDS)
        for rank in ranks:
            try:
                rank.status = rank.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.stuck.append(rank)
                continue
            rank.log.finish()
            self._reaper.send("forget", rank.process.pid)
            _collect_orphans(rank.process.pid)
        for rank, watcher in zip(self.ranks, self._watchers, strict=False):
            if rank not in self.stuck:
                watcher.join(REAP_SECONDS)
        self._kill_orphans(end)

    def _kill_orphans(self, end: float) -> None:
        """Kill processes that left the groups of their ranks, until ``end`` at the latest."""
        host, session = os.getpid(), os.getsid(0)
        known = self._others | {rank.process.pid for rank in self.ranks}
        while True:
            orphans = [
                each.pid
                for each in _processes()
                if each.parent == host and each.session != session and each.pid not in known
            ]
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            if not orphans or time.monotonic() > end:
                return
            time.sleep(0.01)

    def _watch(self, rank: int, pid: int) -> None:
        with contextlib.suppress(ChildProcessError):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            if ended is not None and not self._over:
                exited = ended.si_code == os.CLD_EXITED
                self._on_exit(rank, ended.si_status if exited else -ended.si_status)


def _collect_orphans(group: int) -> None:
    """Collect the exit statuses of a rank's processes that became children of this host."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass


def _until_gone(ranks: list[RankProcess], seconds: float) -> None:
    """Wait until the process groups of these ranks are empty, at most ``seconds``."""
    end = time.monotonic() + seconds
    # The id of a reaped rank may belong to an unrelated process now.
    groups = {rank.process.pid for rank in ranks if rank.process.returncode is None}
    while _live_members(groups) and time.monotonic() < end:
        time.sleep(0.02)


def _live_members(groups: set[int]) -> bool:
    """Whether any of the process groups has a member other than zombies. False if not Linux."""
    return any(each.group in groups and each.state not in ("Z", "X") for each in _processes())


class _Process(NamedTuple):
    pid: int
    state: str
    parent: int
    group: int
    session: int


def _processes() -> Iterator[_Process]:
    """All processes of this machine; none if not Linux."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            state, *numbers = stat.read_text().rpartition(")")[2].split()[:4]
            yield _Process(int(stat.parent.name), state, *map(int, numbers))
