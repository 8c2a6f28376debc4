"""Reads the ranks' trace files: ``ops-rank{R}.jsonl``, ``faults-rank{R}.json`` and
``split-rank{R}.json``.

An ops file has a line per iteration: ``{"rank", "stage", "replica", "iteration", "plan_version",
"origin", "ops": [[kind, microbatch, start, end], …], "waits": [the same, …]}``, start and
end in seconds after ``origin``, which is wall-clock seconds. Files of a long run are large: their
lines are indexed first, and only requested ones are parsed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pipemorph.planning.ir import OpKind
from pipemorph.planning.simulation.simulator import TimedOp
from pipemorph.views.live_page.page_builder import StageTrace

_ITERATION = re.compile(rb'"iteration":\s*(\d+)')
INDEX_BYTES = 400
"""Bytes at the start of a line that contain the iteration's number; ops follow."""


@dataclass
class _IndexedFile:
    """Indexed part of a file. ``inode``: of that file, which another may replace."""

    inode: int
    end: int


@dataclass
class TraceIndex:
    """Offsets of the iterations in each rank's file. A repeated iteration has that of its last
    line.

    ``newest``: bytes at the end of all files together that one update indexes; None: all.
    """

    offsets: dict[Path, dict[int, int]] = field(default_factory=dict)
    newest: int | None = None
    _seen: dict[Path, _IndexedFile] = field(default_factory=dict)

    @staticmethod
    def from_folder(folder: Path) -> TraceIndex:
        """Index the ops files of ``folder``. Skips lines truncated by a kill."""
        index = TraceIndex()
        index.index_new_lines(folder)
        return index

    def index_new_lines(self, folder: Path) -> None:
        """Index lines that ranks have written since the last call. An incomplete line is read again
        by the next call. A file that a rank has shortened is indexed anew."""
        paths = sorted(folder.glob("ops-rank*.jsonl"))
        for path in paths:
            with path.open("rb") as file:
                about = os.fstat(file.fileno())
                seen = self._seen.get(path)
                if seen is None or seen.inode != about.st_ino or about.st_size < seen.end:
                    tail = about.st_size if self.newest is None else self.newest // len(paths)
                    seen = self._seen[path] = _IndexedFile(
                        about.st_ino, max(0, about.st_size - tail)
                    )
                    self.offsets[path] = {}
                    if seen.end:
                        file.seek(seen.end)
                        seen.end += len(file.readline())  # The rest of a line.
                elif self.newest is not None and about.st_size - seen.end > (
                    most := self.newest // len(paths)
                ):
                    file.seek(about.st_size - most)
                    seen.end = about.st_size - most + len(file.readline())
                self._index_lines(file, seen, self.offsets[path])

    @staticmethod
    def _index_lines(file: BinaryIO, seen: _IndexedFile, found: dict[int, int]) -> None:
        file.seek(seen.end)
        for line in file:
            if not line.endswith(b"\n"):
                break
            match = _ITERATION.search(line, 0, INDEX_BYTES)
            if match is not None and line.endswith(b"}\n"):
                found[int(match.group(1))] = seen.end
            seen.end += len(line)

    def list_iterations(self) -> list[int]:
        """Iterations that every rank has written, ascending."""
        files = list(self.offsets.values())
        return sorted(set(files[0]).intersection(*files[1:])) if files else []

    def read_lines(self, iteration: int) -> list[dict[str, Any]]:
        """Lines of all ranks of an iteration, as they are. Raises ValueError if one is no JSON."""
        lines = []
        for path, offsets in self.offsets.items():
            with path.open("rb") as file:
                if iteration in offsets:
                    file.seek(offsets[iteration])
                    lines.append(json.loads(file.readline()))
        return lines

    def read_iterations(self, iterations: Iterable[int]) -> dict[int, list[StageTrace]]:
        """Parse the given iterations; ranks in order."""
        wanted = sorted(iterations)
        traces: dict[int, list[StageTrace]] = {iteration: [] for iteration in wanted}
        for path, offsets in self.offsets.items():
            with path.open("rb") as file:
                for iteration in wanted:
                    if iteration in offsets:
                        file.seek(offsets[iteration])
                        traces[iteration].append(_parse_trace(json.loads(file.readline())))
        for stages in traces.values():
            stages.sort(key=lambda trace: (trace.rank, trace.stage))
        return traces


def read_faults(folder: Path) -> list[dict[str, Any]]:
    """The faults that the ranks injected: one entry per fault and rank, in rank order."""
    merged: list[dict[str, Any]] = []
    for content in _iterate_rank_files(folder, "faults"):
        place = {key: content[key] for key in ("rank", "stage", "replica") if key in content}
        merged += [place | entry for entry in content.get("faults", [])]
    return merged


def read_iterations_done(folder: Path) -> int:
    """Number of finished iterations, as rank 0 recorded at its end; 0 without a record."""
    try:
        return int(json.loads((folder / "faults-rank0.json").read_text())["iterations"])
    except (OSError, ValueError, KeyError):
        return 0


def read_splits(folder: Path) -> list[dict[str, Any]]:
    """Split of the backward of each rank's stage, and its reason, in rank order. Empty if stages
    are emulated, or before the end of the first iteration."""
    return list(_iterate_rank_files(folder, "split"))


def _iterate_rank_files(folder: Path, kind: str) -> Iterator[dict[str, Any]]:
    """Contents of the ranks' files of a kind. Skips files truncated by a kill."""
    for path in sorted(folder.glob(f"{kind}-rank*.json"), key=lambda p: (len(p.name), p.name)):
        try:
            yield json.loads(path.read_text())
        except (OSError, ValueError):
            continue


def _parse_trace(line: dict[str, Any]) -> StageTrace:
    origin = float(line["origin"])

    def parse_ops(rows: list[list[Any]]) -> tuple[TimedOp, ...]:
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
        ops=parse_ops(line["ops"]),
        waits=parse_ops(line.get("waits", [])),
    )
