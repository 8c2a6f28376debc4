"""Who takes how much of the machine while something is measured, and what the programs count."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

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


class Timed:
    """Mean of a histogram of the ingest's over what is measured, milliseconds."""

    def __init__(self, installation: Installation, name: str, **labels: str) -> None:
        self._metric, self._labels = installation.ingest.metric, labels
        self._name = f"pipemorph_ingest_{name}_seconds"
        self._before = self._now()

    def _now(self) -> tuple[float, float]:
        sum_, count = (self._metric(f"{self._name}_{n}", **self._labels) for n in ("sum", "count"))
        return sum_, count

    def count(self) -> float:
        return self._now()[1] - self._before[1]

    def mean_ms(self) -> float:
        seconds, _ = self._now()
        return 1e3 * (seconds - self._before[0]) / max(1.0, self.count())


def milliseconds(name: str, values: Sequence[float]) -> Result:
    return {f"{name}_p{100 * q:g}_ms": 1e3 * quantile(values, q) for q in (0.5, 0.99)}


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
