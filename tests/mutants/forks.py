"""Runs tests of a collected pytest session in a forked process, within limits."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest

_SET_CHILD_SUBREAPER = 36  # of prctl(2)


@dataclass(frozen=True)
class Limit:
    """Limits of a test; a test that exceeds them is stopped, and the process with it."""

    processor_seconds: float
    wall_seconds: float


@dataclass
class Ran:
    """Result of a test that came to its end."""

    nodeid: str
    outcome: str
    """``passed``, ``failed`` or ``skipped``."""
    processor_seconds: float
    wall_seconds: float
    why: str = ""
    """The last line of its failure."""
    hits: list[int] = field(default_factory=list)
    """Value of :attr:`Fork.hits` after it."""


@dataclass
class Fork:
    """A run of ``items`` in a process of its own, after ``prepare`` was called there."""

    session: pytest.Session
    items: Sequence[pytest.Item]
    limit: Callable[[pytest.Item], Limit]
    prepare: Callable[[pytest.Session], None] = lambda session: None
    hits: Callable[[pytest.Item], list[int]] = lambda item: []
    until_failure: bool = True
    stopped: str | None = None
    """Test that had to be stopped or at which the process died, if any, after the run."""
    error: str | None = None
    """Reason why ``prepare`` failed, if it did, after the run."""

    def run(self) -> Iterator[Ran]:
        """Yield each test as it ends."""
        adopt_orphans()
        folder = tempfile.mkdtemp(prefix="mu", dir="/tmp")  # short: tests put sockets into it
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            self._run_child(writing, Path(folder))
        os.close(writing)
        try:
            yield from self._read(reading)
        finally:
            os.close(reading)
            _kill(child)
            end_orphans()
            shutil.rmtree(folder, ignore_errors=True)

    def _read(self, reading: int) -> Iterator[Ran]:
        coming = deque(self.items)
        unread = b""
        while coming:
            self.stopped = coming[0].nodeid
            patience = self.limit(coming[0]).wall_seconds
            if not select.select([reading], [], [], patience)[0]:
                return
            if not (got := os.read(reading, 1 << 16)):
                return
            *lines, unread = (unread + got).split(b"\n")
            for line in lines:
                message: dict[str, Any] = json.loads(line)
                if "error" in message:
                    self.error = message["error"]
                    return
                if "nodeid" in message:
                    ran = Ran(**message)
                    coming.popleft()
                    yield ran
                    if self.until_failure and ran.outcome == "failed":
                        coming.clear()
        self.stopped = None

    def _run_child(self, writing: int, folder: Path) -> NoReturn:
        """Run the tests; never return into the parent's stack."""
        with os.fdopen(writing, "w") as out:

            def send(**message: Any) -> None:
                print(json.dumps(message), file=out, flush=True)

            try:
                os.setsid()
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                os.environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)
                _silence(self.session.config)
                self.prepare(self.session)
            except BaseException as error:  # noqa: BLE001  reported, and the process ends
                send(error=f"{type(error).__name__}: {error}")
                os._exit(1)
            try:
                self._run_items(send)
            except BaseException:  # noqa: BLE001  a test may raise SystemExit
                traceback.print_exc(file=sys.__stderr__)
                os._exit(1)
            os._exit(0)

    def _run_items(self, send: Callable[..., None]) -> None:
        reports = _Reports()
        self.session.config.pluginmanager.register(reports, "mutants-reports")
        for item, following in zip(self.items, [*self.items[1:], None], strict=True):
            reports.clear()
            _limit_processor(self.limit(item).processor_seconds)
            send(starting=item.nodeid)  # a new test has its own time
            before, began = used_seconds(), time.monotonic()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            send(
                nodeid=item.nodeid,
                outcome=reports.outcome,
                processor_seconds=round(used_seconds() - before, 4),
                wall_seconds=round(time.monotonic() - began, 3),
                why=reports.why,
                hits=self.hits(item),
            )
            if self.until_failure and reports.outcome == "failed":
                return


class _Reports:
    """Reports on the running test so far."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.outcome = "passed"
        self.why = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.outcome != "failed":
            self.outcome = "failed"
            crash = getattr(report.longrepr, "reprcrash", None)
            self.why = str(crash.message if crash else report.longrepr)[:300]
        elif report.skipped and self.outcome == "passed" and not hasattr(report, "wasxfail"):
            self.outcome = "skipped"


def used_seconds() -> float:
    """Processor seconds of this process and of its ended children."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def adopt_orphans() -> None:
    """Become the parent of all processes that descendants of this one leave behind."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def end_orphans() -> None:
    """Kill the children of this process until none remains: it starts none but forks, one at a
    time, and processes that exist after a fork's end were started by its tests."""
    while children := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        for child in map(int, children):
            _kill(child)


def _kill(child: int) -> None:
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(child, 0)


def _limit_processor(seconds: float) -> None:
    """Let this process be ended by SIGPROF when it has used ``seconds`` more."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _silence(config: pytest.Config) -> None:
    """Let the terminal reporter, which other plugins need, print to nowhere."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter._tw._file = Path(os.devnull).open("w")  # noqa: SIM115  until the process ends
