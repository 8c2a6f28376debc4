"""The parts of a run: commands that run side by side, and the second runs of tests that failed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gate import results
from gate.verdict import MOST_SECOND_RUNS, PartResult, SecondRun, Verdict, failures

ROOT = Path(__file__).resolve().parents[2]
SECONDS_OF_A_SECOND_RUN = 1200
SECONDS_TO_INTERRUPT = 60.0
"""Seconds for a part to end after Ctrl-C."""
SAY_EVERY = 60.0
REPEATABLE = "--hypothesis-profile=repeatable"


@dataclass
class Part:
    """A command of the run. Its output goes to ``OUT/NAME.log``, or, if ``shown``, to the
    terminal."""

    name: str
    command: list[str]
    out: Path
    is_pytest: bool = True
    shown: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that it gets in addition to those of this process."""
    limit: float = 3600.0
    """Seconds after which it is interrupted: its tests may fail one by one, each after minutes."""
    interrupted: bool = False
    status: int | None = None
    seconds: float = 0.0
    processor_seconds: float = 0.0
    """Processor seconds of the command and of the children that it waited for, and of theirs."""
    process: subprocess.Popen[bytes] | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    @property
    def log(self) -> Path:
        return self.out / f"{_file_name(self.name)}.log"

    def run(self) -> None:
        began = time.monotonic()
        with self.log.open("wb") as log:
            where = None if self.shown else log
            env = os.environ | self.env
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, stdout=where, stderr=where, env=env
            )
            with self._limited():
                _, ended, used = os.wait4(self.process.pid, 0)
            self.process.returncode = os.waitstatus_to_exitcode(ended)
        self.processor_seconds = used.ru_utime + used.ru_stime
        self.seconds = time.monotonic() - began
        self.status = self.process.returncode
        self._ended.set()

    @contextmanager
    def _limited(self) -> Iterator[None]:
        timers = [
            threading.Timer(self.limit, self._signal, [signal.SIGINT]),
            threading.Timer(self.limit + SECONDS_TO_INTERRUPT, self._signal, [signal.SIGKILL]),
        ]
        for timer in timers:
            timer.start()
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()

    def _signal(self, number: signal.Signals) -> None:
        self.interrupted = True
        assert self.process is not None
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        """End it if it still runs, and wait for that in the thread that runs it."""
        if self.process is not None and self.process.returncode is None:
            self.process.terminate()
            self._ended.wait()

    def result(self) -> PartResult:
        read = results.read(_report_log(self.out, self.name)) if self.is_pytest else None
        result = PartResult(self.name, self.status, self.seconds, self.processor_seconds, read)
        result.log = None if self.shown else self.log
        result.limit = self.limit if self.interrupted else None
        return result


def pytest(
    name: str, out: Path, *selected: str, env: Mapping[str, str] | None = None, **options: Any
) -> Part:
    """The tests that pytest's arguments ``selected`` name. ``options``: those of :class:`Part`."""
    return Part(name, [*_pytest(name, out), *selected], out, env=env or {}, **options)


def _pytest(name: str, out: Path) -> list[str]:
    # Two at once must not write one file.
    own = (
        f"--report-log={_report_log(out, name)}",
        *("-o", f"cache_dir={out / f'{_file_name(name)}.cache'}"),
    )
    return [sys.executable, "-m", "pytest", *own]


def _file_name(name: str) -> str:
    return name.replace(" ", "-")


def _report_log(out: Path, name: str) -> Path:
    return out / f"{_file_name(name)}.jsonl"


Take = Callable[[], Part | None]


def run_in_lanes(take: Take, lanes: int, say: Callable[[str], None] = print) -> list[Part]:
    """Run parts, ``lanes`` of them at a time, until ``take`` returns None for the next one. Returns
    them in the order in which they began."""
    began: list[Part] = []
    running: dict[str, float] = {}
    lock = threading.Lock()

    def run_lane() -> None:
        while (part := take()) is not None:
            with lock:
                began.append(part)
                running[part.name] = time.monotonic()
            say(f"{part.name}: begins; output in {_shown_path(part.log)}")
            try:
                part.run()
            finally:
                with lock:
                    del running[part.name]
            ended = "ok" if part.status == 0 else f"FAILED (exit {part.status})"
            say(f"{part.name}: {ended} after {part.seconds:.0f} s")

    threads = [threading.Thread(target=run_lane, daemon=True) for _ in range(lanes)]
    for thread in threads:
        thread.start()
    said = time.monotonic()
    while any(thread.is_alive() for thread in threads):
        for thread in threads:
            thread.join(1.0 / lanes)
        if time.monotonic() - said > SAY_EVERY:
            said = time.monotonic()
            with lock:
                now = ", ".join(f"{name} {said - since:.0f} s" for name, since in running.items())
            say(f"running: {now or 'nothing'}")
    return began


def in_turn(parts: Sequence[Part]) -> Take:
    """A function that returns each of the parts once, then None."""
    waiting = iter(parts)
    lock = threading.Lock()

    def take() -> Part | None:
        with lock:
            return next(waiting, None)

    return take


def _shown_path(path: Path) -> Path:
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def judge(
    parts: Sequence[PartResult], out: Path, command: str = "make test", *options: str
) -> Verdict:
    """The verdict on parts, with each test that failed run once more, alone, with pytest's
    ``options``, unless its failure is proof. The output of both runs stays in ``out/again``."""
    excusable = [test for test in failures(parts) if test.final is None]
    second_runs = {}
    for number, test in enumerate(excusable[:MOST_SECOND_RUNS], 1):
        print(f"running again, alone: {test.nodeid}", flush=True)
        words = re.sub(r"[^A-Za-z0-9]+", "-", test.nodeid).strip("-")[-80:]
        second_runs[test.nodeid] = _run_again(test, out / "again" / f"{number}-{words}", options)
    return Verdict(parts, second_runs, command)


def _run_again(test: results.TestResult, folder: Path, options: Sequence[str]) -> SecondRun:
    folder.mkdir(parents=True)
    (folder / "first.txt").write_text(test.text)
    with (folder / "second.txt").open("wb") as said:
        command = [*_pytest("second", folder), *options, test.nodeid]
        try:
            status = subprocess.run(
                command,
                check=False,
                cwd=ROOT,
                stdout=said,
                stderr=said,
                timeout=SECONDS_OF_A_SECOND_RUN,
            ).returncode
        except subprocess.TimeoutExpired:
            why = f"not done after {SECONDS_OF_A_SECOND_RUN} s"
            said.write(f"\n{why}\n".encode())
            return SecondRun(False, folder, why)
    second = results.read(_report_log(folder, "second"))
    passed = status == 0 and second.count("passed") == len(second.tests) == 1
    why = "".join(test.message for test in second) or f"exit {status}, and no test failed"
    return SecondRun(passed, folder, "" if passed else why)
