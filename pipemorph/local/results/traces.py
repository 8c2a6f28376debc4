"""Reads what the ranks wrote: ``ops-rank{R}.jsonl``, ``faults-rank{R}.json`` and
``split-rank{R}.json``.

An ops file has a line per iteration: ``{"rank", "stage", "replica", "iteration", "plan_version",
"origin", "ops": [[kind, microbatch, start, end], …], "waits": [the same, …]}``, start and
end in seconds after ``origin``, which is wall-clock seconds. A long run writes much: lines
are indexed first, and only those that are wanted are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipemorph.planning.ir import OpKind
from pipemorph.planning.simulation.simulator import TimedOp

_ITERATION = re.compile(rb'"iteration":\s*(\d+)')
INDEX_BYTES = 400
"""The iteration's number is within the first bytes of a line; the ops come after it."""


@dataclass(frozen=True)
class StageTrace:
    """What one rank computed in one iteration; times are wall-clock seconds."""

    rank: int
    stage: int
    replica: int
    iteration: int
    plan_version: int
    ops: tuple[TimedOp, ...]
    waits: tuple[TimedOp, ...] = ()
    """Idle times before ops, for the message the op needed."""


@dataclass
class TraceIndex:
    """Where each iteration is in each rank's file. A repeated iteration's last line counts."""

    offsets: dict[Path, dict[int, int]] = field(default_factory=dict)

    @staticmethod
    def of(folder: Path) -> TraceIndex:
        """Index the ops files of ``folder``. Lines cut short by a kill are left out."""
        index = TraceIndex()
        for path in sorted(folder.glob("ops-rank*.jsonl")):
            found: dict[int, int] = {}
            with path.open("rb") as file:
                offset = 0
                for line in file:
                    match = _ITERATION.search(line, 0, INDEX_BYTES)
                    if match is not None and line.endswith(b"}\n"):
                        found[int(match.group(1))] = offset
                    offset += len(line)
            index.offsets[path] = found
        return index

    def iterations(self) -> list[int]:
        """Iterations that every rank has written, ascending."""
        files = list(self.offsets.values())
        return sorted(set(files[0]).intersection(*files[1:])) if files else []

    def read(self, iterations: Iterable[int]) -> dict[int, list[StageTrace]]:
        """The wanted iterations, ranks in order."""
        wanted = sorted(iterations)
        traces: dict[int, list[StageTrace]] = {iteration: [] for iteration in wanted}
        for path, offsets in self.offsets.items():
            with path.open("rb") as file:
                for iteration in wanted:
                    if iteration in offsets:
                        file.seek(offsets[iteration])
                        traces[iteration].append(_trace(json.loads(file.readline())))
        for stages in traces.values():
            stages.sort(key=lambda trace: trace.rank)
        return traces


def read_faults(folder: Path) -> list[dict[str, Any]]:
    """What each rank says it injected: an entry per fault and rank, ranks in order."""
    merged: list[dict[str, Any]] = []
    for content in _files(folder, "faults"):
        seat = {key: content[key] for key in ("rank", "stage", "replica") if key in content}
        merged += [seat | entry for entry in content.get("faults", [])]
    return merged


def iterations_done(folder: Path) -> int:
    """How many iterations of the job are done, as rank 0 said when it ended; 0 if it did not."""
    try:
        return int(json.loads((folder / "faults-rank0.json").read_text())["iterations"])
    except (OSError, ValueError, KeyError):
        return 0


def read_splits(folder: Path) -> list[dict[str, Any]]:
    """How each rank says its stage splits the backward, and why; ranks in order. Empty where
    stages are emulated, or before the first iteration has ended."""
    return list(_files(folder, "split"))


def _files(folder: Path, kind: str) -> Iterator[dict[str, Any]]:
    """What is in the ranks' files of a kind. Those a killed rank left half written are left out."""
    for path in sorted(folder.glob(f"{kind}-rank*.json"), key=lambda p: (len(p.name), p.name)):
        try:
            yield json.loads(path.read_text())
        except (OSError, ValueError):
            continue


def _trace(line: dict[str, Any]) -> StageTrace:
    origin = float(line["origin"])

    def timed(rows: list[list[Any]]) -> tuple[TimedOp, ...]:
        return tuple(
            TimedOp(OpKind(kind), microbatch, origin + start, origin + end)
            for kind, microbatch, start, end in rows
        )

    return StageTrace(
        rank=line["rank"],
        stage=line["stage"],
        replica=line["replica"],
        iteration=line["iteration"],
        plan_version=line["plan_version"],
        ops=timed(line["ops"]),
        waits=timed(line.get("waits", [])),
    )
