"""The parts of a run: commands that run in turn or side by side, and the second runs of tests that
failed in them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gate import results
from gate.verdict import MOST_SECOND_RUNS, PartResult, SecondRun, Verdict, failures

ROOT = Path(__file__).resolve().parents[2]
SECONDS_OF_A_SECOND_RUN = 1200


@dataclass
class Part:
    """A command of the run. What it says goes to ``OUT/NAME.log``, and to the terminal while it
    runs if it is ``shown``."""

    name: str
    command: list[str]
    out: Path
    is_pytest: bool = True
    shown: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that it gets beside those of this process."""
    status: int | None = None
    seconds: float = 0.0
    processor_seconds: float = 0.0
    """Of the command and of the children that were waited for, theirs included."""
    process: subprocess.Popen[bytes] | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    @property
    def log(self) -> Path:
        return self.out / f"{self.name}.log"

    def run(self) -> None:
        began = time.monotonic()
        with self.log.open("wb") as log:
            where = None if self.shown else log
            env = os.environ | self.env
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, stdout=where, stderr=where, env=env
            )
            _, ended, used = os.wait4(self.process.pid, 0)
            self.process.returncode = os.waitstatus_to_exitcode(ended)
        self.processor_seconds = used.ru_utime + used.ru_stime
        self.seconds = time.monotonic() - began
        self.status = self.process.returncode
        self._ended.set()

    def stop(self) -> None:
        """End it if it still runs, and wait for that in the thread that runs it."""
        if self.process is not None and self.process.returncode is None:
            self.process.terminate()
            self._ended.wait()

    def result(self) -> PartResult:
        read = results.read(_report_log(self.out, self.name)) if self.is_pytest else None
        return PartResult(self.name, self.status, self.seconds, self.processor_seconds, read)


def pytest(
    name: str,
    out: Path,
    *selected: str,
    shown: bool = False,
    nice: int = 0,
    env: Mapping[str, str] | None = None,
) -> Part:
    """The tests that pytest's arguments ``selected`` name."""
    command = [*(["nice", "-n", str(nice)] if nice else []), *_pytest(name, out), *selected]
    return Part(name, command, out, shown=shown, env=env or {})


def _pytest(name: str, out: Path) -> list[str]:
    # Two at once must not write one file.
    own = (f"--report-log={_report_log(out, name)}", "-o", f"cache_dir={out / f'{name}.cache'}")
    return [sys.executable, "-m", "pytest", *own]


def _report_log(out: Path, name: str) -> Path:
    return out / f"{name}.jsonl"


def run_beside(parts: Sequence[Part], lanes: int) -> None:
    """Run parts, ``lanes`` of them at a time: each lane takes the next when it is free."""
    waiting = deque(parts)

    def take_the_next() -> None:
        with suppress(IndexError):
            while True:
                waiting.popleft().run()

    threads = [threading.Thread(target=take_the_next, daemon=True) for _ in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def judge(parts: Sequence[PartResult], out: Path, *options: str) -> Verdict:
    """Run each test that failed once more, alone, with pytest's ``options``, and say how the whole
    run ended. What was said both times stays in ``out/again``."""
    excusable = [test for test in failures(parts) if test.final is None]
    second_runs = {}
    for number, test in enumerate(excusable[:MOST_SECOND_RUNS], 1):
        print(f"running again, alone: {test.nodeid}", flush=True)
        words = re.sub(r"[^A-Za-z0-9]+", "-", test.nodeid).strip("-")[-80:]
        second_runs[test.nodeid] = _run_again(test, out / "again" / f"{number}-{words}", options)
    return Verdict(parts, second_runs)


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
