"""Recorder of an op table: what ``pipemorph diagnose`` reads, from any trainer.

A rank opens one file and adds its ops as they end; ``docs/reference/op-table.md`` has the columns.
Needs nothing but the standard library.

    from pipemorph_trainer import record

    with record.open_table(f"ops/rank{rank}.jsonl", stage=stage, rank=rank) as table:
        for step in range(steps):
            table.begin_step(step)
            for microbatch in range(microbatches):
                with table.time_op("forward-compute", microbatch=microbatch):
                    output = module(x)
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from pipemorph.diagnose.operation import OPTYPES

__all__ = ["OpRecorder", "RecordedOp", "open_table"]

_log = logging.getLogger(__name__)


def open_table(
    path: str | Path,
    *,
    stage: int,
    dp_rank: int = 0,
    rank: int = -1,
    schedule: str = "",
    most_bytes: int = 0,
) -> OpRecorder:
    """Open the op table of a rank for appending; its folder is made if it is missing.

    ``stage``: rank in the pipeline. ``dp_rank``: replica. ``rank``: global rank.
    ``schedule``: framework and schedule of the job, such as ``torch Schedule1F1B``. Each rank has a
    file of its own, with a name that ends in ``.jsonl``. A line that an earlier process left
    unfinished is removed. ``most_bytes``: limit of the recording on disk, 0 for none. A file that
    has grown to half of it is renamed to ``….earlier.jsonl`` at the next step, in place of the one
    before. Raises OSError if the file cannot be opened, ValueError for a negative stage or replica.
    """
    for name, value in (("stage", stage), ("dp_rank", dp_rank)):
        if value < 0:
            raise ValueError(f"{name}: is {value}; expected 0 or more")
    return OpRecorder(Path(path), stage, dp_rank, rank, schedule=schedule, most_bytes=most_bytes)


class RecordedOp(NamedTuple):
    """Op of a rank; see :meth:`OpRecorder.add_op`. Times in seconds."""

    optype: str
    start: float
    duration: float
    microbatch: int = -1
    chunk: int = -1
    global_chunk: int = -1
    posted: float | None = None
    waited: float | None = None
    completed: float | None = None
    bytes: int = -1


class OpRecorder:
    """Writer of one rank's op table. Threads may share it.

    Each op is a line that is written at once, so a process that is killed leaves whole lines. If
    the disk is full, a warning is logged and recording ends; training goes on.
    """

    def __init__(
        self,
        path: Path,
        stage: int,
        dp_rank: int,
        rank: int,
        *,
        schedule: str = "",
        most_bytes: int = 0,
    ) -> None:
        self.path = path
        self.step = -1
        self._most_bytes = most_bytes
        self._place = f'"dp_rank": {dp_rank}, "stage": {stage}, "rank": {rank}'
        self._schedule = f', "schedule": {json.dumps(schedule)}' if schedule else ""
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        # One clock that does not jump, near that of other hosts.
        self._epoch = time.time() - time.perf_counter()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: int | None = _open_file(path)
        _remove_unfinished_line(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Ops after that are not recorded."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def now(self) -> float:
        """Seconds of the recorder's clock: since 1970, without jumps."""
        return time.perf_counter() + self._epoch

    def begin_step(self, step: int) -> None:
        """Count the ops that follow for the training step ``step``."""
        with self._lock:
            self.step = step
            self._counts.clear()
            self._begin_file()

    @contextmanager
    def time_op(
        self,
        optype: str,
        *,
        microbatch: int = -1,
        chunk: int = -1,
        global_chunk: int = -1,
        posted: float | None = None,
    ) -> Iterator[None]:
        """Time the block as an op. One that raises is not recorded.

        For a receive give ``posted``, the :meth:`now` at which it was posted, and let the block be
        the wait for it. Work of a GPU that the block only launches must be waited for within it,
        or timed by events and added by :meth:`add_op`.
        """
        _check_optype(optype)
        start = self.now()
        yield
        end = self.now()
        self.add_op(
            optype,
            start if posted is None else posted,
            end - (start if posted is None else posted),
            microbatch=microbatch,
            chunk=chunk,
            global_chunk=global_chunk,
            posted=posted,
            waited=None if posted is None else start,
        )

    def add_op(
        self,
        optype: str,
        start: float,
        duration: float,
        *,
        microbatch: int = -1,
        chunk: int = -1,
        global_chunk: int = -1,
        posted: float | None = None,
        waited: float | None = None,
        completed: float | None = None,
        bytes: int = -1,
    ) -> None:
        """Add an op with times of your own, in seconds by one clock within the step, such as
        :meth:`now`.

        ``posted``, ``waited``, ``completed``: of a receive, when it was posted, when the wait for
        it began, and when its data were there, if that is known. ``bytes``: size of a send or
        receive. Raises ValueError for an unknown
        op type, for times that are no seconds, and before :meth:`begin_step`.
        """
        _check_optype(optype)
        times = {"start": start, "duration": duration, "posted": posted, "waited": waited,
                 "completed": completed}  # fmt: skip
        for name, value in times.items():
            if value is not None and (not isfinite(value) or (name == "duration" and value < 0)):
                raise ValueError(f"{name}: is {value}; expected seconds")
        within = [None if each is None else float(each) for each in (posted, waited, completed)]
        op = RecordedOp(
            optype, float(start), float(duration), int(microbatch), int(chunk), int(global_chunk),
            within[0], within[1], within[2], int(bytes),
        )  # fmt: skip
        self.add_ops([op])

    def add_ops(self, ops: Iterable[RecordedOp]) -> None:
        """Add ops of one step by one write. Unlike :meth:`add_op` it does not check them."""
        with self._lock:
            if self._file is None:
                return
            if self.step < 0:
                raise ValueError("step: is not begun; call begin_step before the first op")
            self._write_lines("".join(map(self._format_line, ops)).encode())

    def _format_line(self, op: RecordedOp) -> str:
        seq_id = self._counts[op.optype]
        self._counts[op.optype] += 1
        line = (
            f'{{"step": {self.step}, {self._place}, "optype": "{op.optype}", '
            f'"start_ts": {op.start!r}, "duration": {op.duration!r}, "seq_id": {seq_id}, '
            f'"mc": {op.chunk}, "gmc": {op.global_chunk}, "mb_id": {op.microbatch}'
        )
        for name in ("posted", "waited", "completed"):
            if (value := getattr(op, name)) is not None:
                line += f', "{name}": {value!r}'
        if op.bytes >= 0:
            line += f', "bytes": {op.bytes}'
        if not seq_id and len(self._counts) == 1:
            line += self._schedule  # Once in a step.
        return line + "}\n"

    def _write_lines(self, lines: bytes) -> None:
        assert self._file is not None
        try:
            written = os.write(self._file, lines)
            if written < len(lines):
                raise OSError(f"{written} of {len(lines)} bytes were written")
        except OSError as error:
            self._end_recording(error)

    def _begin_file(self) -> None:
        """Begin another file if this one has half of the bytes that the recording may take."""
        if not self._most_bytes or self._file is None:
            return
        try:
            if 2 * os.fstat(self._file).st_size < self._most_bytes:
                return
            self.path.replace(self.path.with_suffix(f".earlier{self.path.suffix}"))
            file = _open_file(self.path)
        except OSError as error:
            self._end_recording(error)
            return
        os.close(self._file)
        self._file = file

    def _end_recording(self, error: OSError) -> None:
        assert self._file is not None
        _log.warning("recording of ops to %s ends: %s", self.path, error)
        with suppress(OSError):
            _remove_unfinished_line(self._file)
        os.close(self._file)
        self._file = None


def _open_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)


def _check_optype(optype: str) -> None:
    if optype not in OPTYPES:
        raise ValueError(f"optype: is {optype!r}; expected one of {', '.join(OPTYPES)}")


def _remove_unfinished_line(file: int) -> None:
    """Cut a file after its last line break."""
    end = os.fstat(file).st_size
    while end > 0:
        begin = max(0, end - 4096)
        chunk = os.pread(file, end - begin, begin)
        place = chunk.rfind(b"\n")
        if place >= 0:
            end = begin + place + 1
            break
        end = begin
    if end < os.fstat(file).st_size:
        os.ftruncate(file, end)
