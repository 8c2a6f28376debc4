"""Table of operations in columns: about 40 bytes an op, whatever the size of the trace."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from math import isfinite
from typing import NamedTuple

from pipemorph.diagnose.operation import OPTYPES, Operation
from pipemorph.errors import InputError, one_line

CODE_OF_OPTYPE = {optype: code for code, optype in enumerate(OPTYPES)}
MOST_WORKERS = 65_536
MOST_OPS = 500_000
"""Ops that are held; of a longer recording every second, fourth, … step is."""
_COLUMNS = (
    "step", "worker", "optype", "start", "duration", "seq_id", "model_chunk", "global_chunk",
    "microbatch",
)  # fmt: skip
LONGEST, FARTHEST = 1e6, 1e12
"""Limits of a duration and of a time, seconds."""
MOST_MICROBATCHES, MOST_CHUNKS, LAST_STEP = 1 << 20, 4096, 1 << 62


class Worker(NamedTuple):
    """Place of a worker: replica, then pipeline rank."""

    dp_rank: int
    stage: int

    @property
    def key(self) -> str:
        """Name in reports, such as ``dp0-stage3``."""
        return f"dp{self.dp_rank}-stage{self.stage}"


class OperationTable:
    """Columns of operations. Row *i* of each is that of op *i*, in the order in which they came.

    ``workers``: places by number; ``ranks``: global rank by number of the worker, -1 if unknown.
    ``posted``, ``waited``, ``completed``: by op, only those that are recorded.
    """

    def __init__(self) -> None:
        self.step = array("q")
        self.worker = array("H")
        self.optype = array("B")
        self.start = array("d")
        self.duration = array("d")
        self.seq_id = array("i")
        self.model_chunk = array("h")
        self.global_chunk = array("h")
        self.microbatch = array("i")
        self.posted: dict[int, float] = {}
        self.waited: dict[int, float] = {}
        self.completed: dict[int, float] = {}
        self.schedule = ""
        """Framework and schedule of the job, if an op has it."""
        self.workers: list[Worker] = []
        self.ranks: list[int] = []
        self._numbers: dict[Worker, int] = {}
        self._order: dict[int, int] = {}
        self.every = 1
        """One in so many steps is held, in the order of their first ops."""

    def __len__(self) -> int:
        return len(self.step)

    def holds_step(self, step: int) -> bool:
        """True for a step whose ops are held, as long as the table is not full."""
        order = self._order
        if order.setdefault(step, len(order)) % self.every:
            return False
        if len(self.step) < MOST_OPS or len(order) <= self.every:
            return True
        self._halve_steps()
        return not order[step] % self.every

    def append_operation(self, op: Operation) -> None:
        """Append an op of a step that is held. Raises :class:`InputError`, without the file's name,
        if a value cannot be."""
        if not self.holds_step(op.step):
            return
        code = CODE_OF_OPTYPE.get(op.optype)
        if code is None:
            raise InputError(
                f"optype {one_line(repr(op.optype), 60)} is none of the format; expected one of"
                f" {', '.join(OPTYPES)}"
            )
        if not -1e-2 <= op.duration <= LONGEST:
            raise InputError(f"duration is {op.duration}; expected seconds, at most {LONGEST:g}")
        for name in ("start", "posted", "waited", "completed"):
            at = getattr(op, name)
            if at is not None and not (isfinite(at) and abs(at) <= FARTHEST):
                raise InputError(f"{name} is {at}; expected seconds")
        self._check_numbers(op)
        number = self._numbers.get(place := Worker(op.dp_rank, op.stage))
        if number is None:
            number = self._numbers[place] = len(self.workers)
            if number >= MOST_WORKERS:
                raise InputError(f"has more than {MOST_WORKERS} workers")
            self.workers.append(place)
            self.ranks.append(op.rank)
        elif op.rank != self.ranks[number]:
            raise InputError(
                f"ranks {self.ranks[number]} and {op.rank} are both stage {op.stage} of dp_rank"
                f" {op.dp_rank}; expected one worker (tensor rank 0) for each"
            )
        self.schedule = one_line(op.schedule, 80) or self.schedule
        row = len(self.step)
        self.step.append(op.step)
        self.worker.append(number)
        self.optype.append(code)
        self.start.append(op.start)
        self.duration.append(max(0.0, op.duration))
        self.seq_id.append(op.seq_id)
        self.model_chunk.append(op.model_chunk)
        self.global_chunk.append(op.global_chunk)
        self.microbatch.append(op.microbatch)
        if op.posted is not None:
            self.posted[row] = op.posted
        if op.waited is not None:
            self.waited[row] = op.waited
        if op.completed is not None:
            self.completed[row] = op.completed

    def _halve_steps(self) -> None:
        """Drop the ops of every second step that is held."""
        self.every *= 2
        rows = [row for row, step in enumerate(self.step) if not self._order[step] % self.every]
        places = {row: place for place, row in enumerate(rows)}
        for name in ("posted", "waited", "completed"):
            times = getattr(self, name)
            setattr(self, name, {places[row]: at for row, at in times.items() if row in places})
        for name in _COLUMNS:
            column = getattr(self, name)
            setattr(self, name, array(column.typecode, [column[row] for row in rows]))

    @staticmethod
    def _check_numbers(op: Operation) -> None:
        for name, least, most in (
            ("step", 0, LAST_STEP),
            ("dp_rank", 0, MOST_WORKERS),
            ("stage", 0, MOST_WORKERS),
            ("rank", -1, LAST_STEP),
            ("seq_id", -1, 2**31 - 1),
            ("model_chunk", -1, MOST_CHUNKS),
            ("global_chunk", -1, MOST_CHUNKS),
            ("microbatch", -1, MOST_MICROBATCHES),
        ):
            if not least <= (value := getattr(op, name)) <= most:
                raise InputError(f"{name} is {value}; expected {least} to {most}")

    def read_operation(self, row: int) -> Operation:
        """Op of a row."""
        number = self.worker[row]
        return Operation(
            self.step[row],
            *self.workers[number],
            self.ranks[number],
            OPTYPES[self.optype[row]],
            self.start[row],
            self.duration[row],
            self.seq_id[row],
            self.model_chunk[row],
            self.global_chunk[row],
            self.microbatch[row],
            self.posted.get(row),
            self.waited.get(row),
            self.completed.get(row),
        )

    def __iter__(self) -> Iterator[Operation]:
        return map(self.read_operation, range(len(self)))

    def group_rows(self) -> dict[int, array[int]]:
        """Rows of each step, in ascending order of the steps."""
        groups: dict[int, array[int]] = {}
        for row, step in enumerate(self.step):
            if (rows := groups.get(step)) is None:
                rows = groups[step] = array("i")
            rows.append(row)
        return dict(sorted(groups.items()))
