"""Starts, watches and stops the ranks of one attempt as processes of this machine.

Each rank has its own session and process group, so that a Ctrl-C at the terminal reaches only the
host, and the rank's child processes can be killed with it. Child processes outside the group become
children of this host when the rank ends, since it is a subreaper, and are killed then. One thread
per rank waits for its exit, so exits are reported in the order in which they happen.
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

from pipemorph.exits import ABORT_SIGNAL
from pipemorph.local.processes.fork_client import (
    SPAWN,
    ForkedProcess,
    ForkServer,
    find_python_arguments,
    is_subreaper,
    set_subreaper,
)
from pipemorph.local.processes.rank_log import RankLog
from pipemorph.spec.mesh import Coordinate

REAPER = Path(__file__).with_name("reaper.py")
REAPER_SECONDS = 5.0
REAP_SECONDS = 10.0


@dataclass
class RankProcess:
    """Process of a rank. ``status``: None while it runs, then its exit code or minus its signal."""

    position: Coordinate
    process: subprocess.Popen[bytes] | ForkedProcess
    log: RankLog
    status: int | None = None

    @property
    def prints_stacks(self) -> bool:
        """True if it handles SIGQUIT, as ranks do, instead of being killed by it."""
        with contextlib.suppress(OSError, StopIteration, ValueError):
            lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
            caught = next(line for line in lines if line.startswith("SigCgt:"))
            return bool(int(caught.split()[1], 16) >> (signal.SIGQUIT - 1) & 1)
        return False

    @property
    def is_stopped(self) -> bool:
        """True if it stands still, as after SIGSTOP."""
        with contextlib.suppress(OSError, IndexError):
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
            return self.is_running and stat.rpartition(")")[2].split()[0] in ("T", "t")
        return False

    @property
    def is_running(self) -> bool:
        return self.status is None

    def describe_stuck(self) -> str:
        """Sentence about a rank that SIGKILL does not end, with its place in the kernel."""
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

    def describe_exit(self) -> str:
        """``exited with code 3`` or ``was killed by SIGKILL``."""
        if self.status is None:
            return "is running"
        if self.status >= 0:
            return f"exited with code {self.status}"
        try:
            return f"was killed by {signal.Signals(-self.status).name}"
        except ValueError:
            return f"was killed by signal {-self.status}"

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the rank, not to its child processes."""
        if self.is_running:
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
        """Add to the reaper's list, or remove from it."""
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
    """Ranks of an attempt. A context manager: on exit all their processes are gone.

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
        """True once exits of ranks are reported no more."""
        self._was_subreaper = is_subreaper()
        self._others = {each.pid for each in _list_processes() if each.parent == os.getpid()}
        """Children of this host that no rank has started."""

    def __enter__(self) -> RankSet:
        set_subreaper(True)
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill_ranks()
        set_subreaper(self._was_subreaper)

    def start_rank(
        self, position: Coordinate, command: list[str], env: Mapping[str, str], log: RankLog
    ) -> None:
        """Start one rank: forked if there is a server and the command is one of this Python, else
        executed. ``on_exit(rank, status)`` is called from a thread when it has exited.

        Raises OSError if it cannot be started.

        Call from the main thread: the kernel kills the rank when the thread that started it exits.
        """
        output = log.open_output()
        try:
            process = self._start_process(command, env, output)
        finally:
            os.close(output)
        self._reaper.send("watch", process.pid)
        self.ranks.append(RankProcess(position, process, log))
        watcher = threading.Thread(
            target=self._watch_exit,
            args=(position.rank, process.pid),
            name=f"rank {position.rank}",
            daemon=True,
        )
        watcher.start()
        self._watchers.append(watcher)

    def _start_process(
        self, command: list[str], env: Mapping[str, str], output: int
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        arguments = find_python_arguments(command, env) if self._forks is not None else None
        if self._forks is not None and arguments is not None:
            return self._forks.fork_rank(arguments, env, output)
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
        return [rank for rank in self.ranks if rank.is_running]

    def record_exit(self, rank: int, status: int) -> RankProcess:
        """Record an exit that ``on_exit`` reported. Main thread only."""
        ended = next(found for found in self.ranks if found.position.rank == rank)
        ended.status = status
        ended.log.wait_complete()
        self.ended.append(ended)
        return ended

    def request_end(self, *, save: bool) -> None:
        """Request the end of every running rank: after it has saved, or at once."""
        for rank in self.running:
            rank.send_signal(signal.SIGTERM if save else ABORT_SIGNAL)
            rank.send_signal(signal.SIGCONT)

    def wait_for_children(self, seconds: float) -> None:
        """Wait for child processes of exited ranks (rank 0's agent), at most ``seconds``."""
        _wait_for_groups([rank for rank in self.ranks if not rank.is_running], seconds)

    def kill_ranks(self) -> None:
        """Kill all processes of the ranks, and wait until they are gone. Processes that remain
        after :data:`REAP_SECONDS` are in :attr:`stuck`. Idempotent."""
        self._over = True
        end = time.monotonic() + REAP_SECONDS
        ranks = [rank for rank in self.ranks if rank not in self.stuck]
        for rank in ranks:
            if rank.process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.process.pid, signal.SIGKILL)
        # Child processes of ranks too: the host gets no notice of their exit.
        _wait_for_groups(ranks, REAP_SECONDS)
        for rank in ranks:
            try:
                rank.status = rank.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.stuck.append(rank)
                continue
            rank.log.wait_complete()
            self._reaper.send("forget", rank.process.pid)
            _collect_orphans(rank.process.pid)
        for rank, watcher in zip(self.ranks, self._watchers, strict=False):
            if rank not in self.stuck:
                watcher.join(REAP_SECONDS)
        self._kill_orphans(end)

    def _kill_orphans(self, end: float) -> None:
        """Kill processes outside the groups of their ranks, until ``end`` at the latest."""
        host, session = os.getpid(), os.getsid(0)
        known = self._others | {rank.process.pid for rank in self.ranks}
        while True:
            orphans = [
                each.pid
                for each in _list_processes()
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

    def _watch_exit(self, rank: int, pid: int) -> None:
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


def _wait_for_groups(ranks: list[RankProcess], seconds: float) -> None:
    """Wait until the process groups of these ranks are empty, at most ``seconds``."""
    end = time.monotonic() + seconds
    # The id of a reaped rank may belong to an unrelated process now.
    groups = {rank.process.pid for rank in ranks if rank.process.returncode is None}
    while _has_live_members(groups) and time.monotonic() < end:
        time.sleep(0.02)


def _has_live_members(groups: set[int]) -> bool:
    """True if any of the process groups has a member other than zombies. False if not Linux."""
    return any(each.group in groups and each.state not in ("Z", "X") for each in _list_processes())


class _ProcessStat(NamedTuple):
    pid: int
    state: str
    parent: int
    group: int
    session: int


def _list_processes() -> Iterator[_ProcessStat]:
    """Processes of this machine; none if not Linux."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            state, *numbers = stat.read_text().rpartition(")")[2].split()[:4]
            yield _ProcessStat(int(stat.parent.name), state, *map(int, numbers))
