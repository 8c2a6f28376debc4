"""Writes the traces of a rank's stages to ``PIPEMORPH_TRACE_DIR``, where the host merges them.

``ops-rank{R}.jsonl``: a line per iteration, ``{"rank", "stage", "replica", "iteration",
"plan_version", "origin", "ops", "waits", "emulated"}``. ``origin`` is the wall clock at the start
of the iteration; ``ops`` and ``waits`` are ``[kind, microbatch, start, end]`` in seconds from it.
With offload, ``copies`` are ``["out" or "back", microbatch, start, end, bytes]``: at the end of an
F, or the beginning of a B or BW; a forward that runs again there is ``"again"``. With replicas,
``reduction`` has the ``bytes`` and ``buckets`` of the gradients, the ``seconds`` in which they were
being reduced, and those that this rank ``waited`` after its last op. ``times``, with the rank's
first stage, are its :class:`~pipemorph.protocol.op_traces.RankTimes`, but for zeros; so a line is
written once the next iteration begins, or after the gradient norm.

The file has at most ``PIPEMORPH_TRACE_BYTES`` bytes. When it reaches this limit, only the first and
the newest quarter stay. A line in between, ``{"rank", "dropped", "limit"}``, has the number of
missing iterations.

``split-rank{R}.json``: how the stage splits its backward, and why; after the first iteration.

``faults-rank{R}.json``: effects of the fault trace, and the number of finished ``iterations`` of
the job, including those before a resume. Written at the end, also after a failure.

If a rank has several stages, the files of all but the first are ``ops-rank{R}-stage{S}.jsonl`` etc.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from pipemorph.protocol.op_traces import RankTimes
from pipemorph.spec.mesh import Coordinate
from pipemorph_trainer.context import TRACE_BYTES
from pipemorph_trainer.executor.stage_executor import StageRecord

log = logging.getLogger("pipemorph.trainer")


class TraceWriter:
    """Writes the traces of a stage to a folder. ``limit``: largest size of the trace of ops,
    bytes."""

    def __init__(
        self,
        folder: Path,
        coordinate: Coordinate,
        *,
        emulated: bool,
        limit: int = TRACE_BYTES,
    ) -> None:
        self._folder, self._coordinate, self._emulated = folder, coordinate, emulated
        self._limit = limit
        self._size = self._dropped = 0
        self._file: TextIO | None = None
        self._closed = False
        self._whose = f"rank{coordinate.rank}"
        if coordinate.stage != coordinate.mesh.find_coordinate(coordinate.rank).stage:
            self._whose += f"-stage{coordinate.stage}"
        self._path = folder / f"ops-{self._whose}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._open_file(self._path)
        except OSError as error:
            # Such as a folder of another machine. Training does not need it.
            log.warning("%s: no traces of ops in %s: %s", coordinate, folder, error.strerror)

    def _open_file(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._size = os.fstat(self._file.fileno()).st_size

    def write_iteration(
        self,
        index: int,
        plan_version: int,
        origin: float,
        outcome: StageRecord,
        reduction: dict[str, float] | None = None,
        *,
        times: RankTimes | None = None,
    ) -> None:
        """Write an iteration. ``reduction``: of the gradients over the replicas; ``times``: of the
        rank outside its ops."""
        if self._file is None:
            return

        def make_rows(timed: list[Any]) -> list[list[Any]]:
            return [
                [kind.value, microbatch, round(start - origin, 6), round(end - origin, 6)]
                for kind, microbatch, start, end in timed
            ]

        line: dict[str, Any] = {
            "rank": self._coordinate.rank,
            "stage": self._coordinate.stage,
            "replica": self._coordinate.column,
            "iteration": index,
            "plan_version": plan_version,
            "origin": origin,
            "ops": make_rows(outcome.ops),
            "waits": make_rows(outcome.waits),
        }
        if outcome.copies:
            line["copies"] = [
                [
                    "again" if copy.recomputed else "out" if copy.to_host else "back",
                    copy.microbatch,
                    round(copy.start - origin, 6),
                    round(copy.end - origin, 6),
                    copy.nbytes,
                ]
                for copy in outcome.copies
            ]
        if reduction is not None:
            line["reduction"] = reduction
        if times is not None:
            line["times"] = times.model_dump(exclude_defaults=True)
        if self._emulated:
            line["emulated"] = True
        text = json.dumps(line) + "\n"
        try:
            if self._size + len(text) > self._limit:
                self._drop_middle()
            self._file.write(text)
            self._file.flush()
            self._size += len(text)
        except OSError as error:
            # A full disk ends the traces, not the training.
            log.warning("%s: no more traces of ops: %s", self._coordinate, error)
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _drop_middle(self) -> None:
        """Shorten the file to its first and newest quarter, in whole lines."""
        assert self._file is not None
        if not self._dropped:
            log.warning(
                "%s: the trace of ops has %d bytes; from now on it keeps its first and newest"
                " iterations. PIPEMORPH_TRACE_BYTES raises the limit of %d bytes",
                self._coordinate, self._size, self._limit,
            )  # fmt: skip
        self._file.close()
        shorter = self._path.with_suffix(".tmp")
        with self._path.open("rb") as old, shorter.open("wb") as new:
            while (
                (head := old.readline()) and old.tell() <= self._limit // 4 and not _marks_gap(head)
            ):
                new.write(head)
            while head and old.tell() < self._size - self._limit // 4:
                self._dropped += not _marks_gap(head)
                head = old.readline()
            record = {"rank": self._coordinate.rank, "dropped": self._dropped, "limit": self._limit}
            new.write(json.dumps(record).encode() + b"\n" + head)
            while block := old.read(1 << 20):
                new.write(block)
        shorter.replace(self._path)
        self._open_file(self._path)

    def write_split(self, record: dict[str, Any]) -> None:
        """Write a record of how this rank's stage splits its backward, and why."""
        self._write_record("split", record, "how the backward is split")

    def close(self, faults: Sequence[dict[str, Any]], iterations: int = 0) -> None:
        """Write the effects of the fault trace and the number of iterations. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
        record = {"iterations": iterations, "faults": list(faults)}
        self._write_record("faults", record, "the fault trace")

    def _write_record(self, kind: str, record: dict[str, Any], what: str) -> None:
        whose = {
            "rank": self._coordinate.rank,
            "stage": self._coordinate.stage,
            "replica": self._coordinate.column,
        }
        path = self._folder / f"{kind}-{self._whose}.json"
        try:
            path.write_text(json.dumps(whose | record), encoding="utf-8")
        except OSError as error:
            log.warning("%s: no record of %s: %s", self._coordinate, what, error)


def _marks_gap(line: bytes) -> bool:
    """True if a line marks dropped iterations."""
    return b'"dropped"' in line
