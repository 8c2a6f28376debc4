"""Who takes how much of the machine while something is measured, and what the programs count."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from operator_support import Installation

Result = dict[str, float]


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} has no VmRSS")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def idle_seconds() -> float:
    """Of all processors together, since the machine's start."""
    return int(Path("/proc/stat").read_text().split()[4]) / os.sysconf("SC_CLK_TCK")


class Processors:
    """Who took how much of the processors while something was measured."""

    def __init__(self, installation: Installation) -> None:
        ingest = installation.ingest.process.pid
        plane = installation.cluster.control_plane
        assert plane is not None
        self._pids = {
            "ingest": [ingest],
            "planners": children(ingest),
            "operator": [installation.operator.process.pid],
            "api_server": [plane.apiserver.pid],
            "etcd": [plane.etcd.pid],
            "controllers": [plane.controller_manager.pid],
        }
        self._before = {name: self._now(name) for name in self._pids}
        self._idle, self._started = idle_seconds(), time.monotonic()

    def _now(self, name: str) -> float:
        total = 0.0
        for pid in self._pids[name]:
            with contextlib.suppress(FileNotFoundError):  # a planner that was replaced
                total += cpu_seconds(pid)
        return total

    def used(self, name: str) -> float:
        """Processor seconds since the start."""
        return self._now(name) - self._before[name]

    def shares(self) -> Result:
        """Processors kept busy, by whom; ``idle_cores`` of them had nothing to do."""
        wall = time.monotonic() - self._started
        return {f"{name}_cores": self.used(name) / wall for name in self._pids} | {
            "idle_cores": (idle_seconds() - self._idle) / wall
        }


class Requests:
    """What the two programs ask of the API server while something is measured, a second."""

    def __init__(self, installation: Installation) -> None:
        self._programs = {"operator": installation.operator, "ingest": installation.ingest}
        self._before, self._started = self._now(), time.monotonic()

    def _now(self) -> Result:
        return {
            f"{name}_{verb.lower()}_per_second": program.metric(
                "pipemorph_api_requests_total", verb=verb
            )
            for name, program in self._programs.items()
            for verb in ("GET", "PATCH", "POST")
        }

    def rates(self) -> Result:
        wall = time.monotonic() - self._started
        return {name: (now - self._before[name]) / wall for name, now in self._now().items()}


class Alarm(NamedTuple):
    """A job whose link turned slow. ``slow_at``: seconds since the load began; ``sent``: when the
    report that shows it left, ``came``: when the directive was at the agent, monotonic seconds."""

    job: str
    stages: int
    slow_at: float
    sent: float
    came: float


PARTS = ("report", "wait", "plan", "serve", "persist")
"""From the alarm until the decision is asked for; until a planner is free; until it is made; until
the directive is at the agent. And until that is in status, which comes after."""


def parts_of(alarm: Alarm, told: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The parts of an alarm's time, seconds, by what timed_ingest.py told of its job; those that
    are not known are left out."""
    decisions = [
        each
        for each in told
        if "planned" in each
        and alarm.sent <= each["at"]
        and each["at"] + each["waited"] + each["planned"] <= alarm.came
    ]
    if not decisions:
        return {}
    # Of several the newest: those before it have left the plan as it was.
    newest = max(decisions, key=lambda each: each["at"])
    made = newest["at"] + newest["waited"] + newest["planned"]
    found = {
        "report": newest["at"] - alarm.sent,
        "wait": newest["waited"],
        "plan": newest["planned"],
        "serve": alarm.came - made,
    }
    written = [each for each in told if "persisted" in each and each["at"] >= made]
    if written:
        found["persist"] = min(written, key=lambda each: each["at"])["persisted"]
    return found


def by_part(name: str, alarms: Sequence[Alarm], told: Mapping[str, list[dict[str, Any]]]) -> Result:
    """p50 and p99 of each part over some alarms, milliseconds, and of how many it is known.
    ``told``: by job."""
    found: Result = {}
    samples = [parts_of(alarm, told.get(alarm.job, [])) for alarm in alarms]
    for part in PARTS:
        known = [each[part] for each in samples if part in each]
        found |= milliseconds(f"{name}_{part}", known or [math.inf])
        found[f"{name}_{part}_known"] = len(known)
    return found


def told_in(file: Path) -> dict[str, list[dict[str, Any]]]:
    """What timed_ingest.py has told, by job. A process that was killed may have said half a
    line."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in file.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            each = json.loads(line)
            found.setdefault(each["job"], []).append(each)
    return found


def milliseconds(name: str, values: Sequence[float]) -> Result:
    return {f"{name}_p{100 * q:g}_ms": 1e3 * quantile(values, q) for q in (0.5, 0.99)}


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
