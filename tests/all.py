"""Runs all that CI checks, in three lanes, and says how each part ended.

The tests on Kubernetes wait most of the time, so those on nodes and those of the API level run side
by side. Beside both, at low priority, runs what no clock decides: the linters, and the tests marked
``untimed``. All other tests have the machine to themselves. Every test is in exactly one part,
since the parts' marker expressions exclude each other and leave nothing out. What runs beside
others writes to build/tests and is shown at its end.

    python tests/all.py make lint      (what follows is run first in the lane beside)
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "tests"
LOW_PRIORITY = ["nice", "-n", "10"]
"""A tenth of a busy processor: the lowest would come to nothing while the first run on a machine
builds Kubernetes."""
SECONDS_AT_LOW_PRIORITY = 1200
SHOWN_LINES, SHOWN_COLUMNS = 8, 300
"""How much of a failure's message is shown again at the end: the programs under test may have said
far more than fits a screen, or than who keeps the output keeps."""


@dataclass
class Part:
    """A command, its status once it has ended, and what it says where nobody sees it."""

    name: str
    command: list[str]
    shown: bool = True
    priority: Sequence[str] = ()
    status: int | None = None
    seconds: float = 0.0
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return OUT / f"{self.name}.log"

    @property
    def counts(self) -> Path:
        return OUT / f"{self.name}.xml"

    def run(self) -> None:
        began = time.monotonic()
        if self.shown:
            self.process = subprocess.Popen(self.command, cwd=ROOT)
            self.status = self.process.wait()
        else:
            with self.log.open("wb") as log:
                command = [*self.priority, *self.command]
                self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
                self.status = self.process.wait()
        self.seconds = time.monotonic() - began

    def __str__(self) -> str:
        how = {0: "ok", None: "not run"}.get(self.status, f"FAILED (exit {self.status})")
        return f"{self.name:12} {how:18} {self.seconds:5.0f} s   {self._counted()}"

    def _suite(self) -> ElementTree.Element | None:
        if not self.counts.exists():
            return None
        suite = ElementTree.parse(self.counts).getroot().find("testsuite")
        assert suite is not None, f"{self.counts} has no testsuite"
        return suite

    def failures(self) -> Iterator[str]:
        """Each test that failed, with the first lines of why."""
        suite = self._suite()
        if suite is None:
            if self.status not in (0, None):
                yield f"{self.name}: exit {self.status}; what it said is above"
            return
        for case in suite.iter("testcase"):
            for why in (*case.iter("failure"), *case.iter("error")):
                lines = why.get("message", "").splitlines()[:SHOWN_LINES]
                text = "".join(f"\n    {line[:SHOWN_COLUMNS]}" for line in lines)
                yield f"{case.get('classname')}::{case.get('name')}{text}"

    def _counted(self) -> str:
        suite = self._suite()
        if suite is None:
            return ""
        total, *rest = (int(suite.get(k, 0)) for k in ("tests", "failures", "errors", "skipped"))
        names = ("failed", "errors", "SKIPPED")
        told = [f"{n} {name}" for n, name in zip(rest, names, strict=True) if n]
        return ", ".join([f"{total - sum(rest)} passed", *told])


def pytest(name: str, expression: str, *, shown: bool = True, priority: Sequence[str] = ()) -> Part:
    made = Part(name, [], shown, priority)
    made.command = [sys.executable, "-m", "pytest", "-m", expression]
    made.command.append("--hypothesis-profile=repeatable")
    if priority:
        made.command += ["-o", f"timeout={SECONDS_AT_LOW_PRIORITY}"]
    # Two at once must not write one file.
    made.command += [f"--junitxml={made.counts}", "-o", f"cache_dir={OUT / f'{name}.cache'}"]
    return made


def main(lint: list[str]) -> int:
    OUT.mkdir(parents=True, exist_ok=True)
    nodes = pytest("nodes", "not untimed and node")
    api = pytest("api", "not untimed and cluster and not node", shown=False)
    alone = pytest("alone", "not untimed and not (cluster or node)")
    untimed = pytest("untimed", "untimed", shown=False, priority=LOW_PRIORITY)
    lanes = [[api], [untimed]]
    if lint:
        lanes[1].insert(0, Part("lint", lint, shown=False, priority=LOW_PRIORITY))
    beside = [part for lane in lanes for part in lane]
    parts = [*beside, nodes, alone]
    for part in parts:
        part.counts.unlink(missing_ok=True)

    def run_in_turn(lane: list[Part]) -> None:
        for part in lane:
            part.run()

    names = " and ".join(part.name for part in beside)
    print(f"beside the first part: {names}; output in {OUT.relative_to(ROOT)}", flush=True)
    threads = [threading.Thread(target=run_in_turn, args=[lane], daemon=True) for lane in lanes]
    for thread in threads:
        thread.start()
    try:
        nodes.run()
        print(f"waiting for what ran beside: {names}", flush=True)
        for thread in threads:
            thread.join()
        for part in beside:
            print(f"\n{f' {part.name} ':-^100}\n{part.log.read_text(errors='replace')}", flush=True)
        alone.run()
    finally:
        for part in parts:
            if part.process is not None and part.process.poll() is None:
                part.process.terminate()
                part.process.wait()
    print(f"\n{' all parts ':=^100}")
    for part in parts:
        print(part)
    for part in parts:
        for failure in part.failures():
            print(f"\nFAILED {failure}")
    return 0 if all(part.status == 0 for part in parts) else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
