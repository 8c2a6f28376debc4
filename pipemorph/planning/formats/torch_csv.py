"""Reads and writes schedules as torch.distributed.pipelining's compute-only CSV.

One row per rank, one op per cell: ``2F0`` is the forward of microbatch 0 on stage 2, ``I`` the
backward for the input (our B), ``W`` the backward for the weights, ``B`` the fused backward (our
BW). An empty cell is a step without an op; it only aligns the columns for readers.
``(1F2;6B0)OVERLAP_F_B`` has ops that may overlap; here they run one after another, as in torch by
default.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator

from pipemorph.errors import InputError
from pipemorph.planning.ir import KIND_OF_LETTER, LETTERS
from pipemorph.planning.problem import MAX_OPS, shown
from pipemorph.planning.simulation.interleaved import InterleavedSchedule, StageOp

_CELL = re.compile(r"(\d{1,9})([FIWB])(\d{1,9})", re.ASCII)
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
_OTHER = re.compile(r"\d+[A-Z_]+\d*", re.ASCII)


def dump_csv(schedule: InterleavedSchedule) -> str:
    """The CSV text, with torch's line endings."""
    out = io.StringIO()
    writer = csv.writer(out)
    for ops in schedule.ranks:
        writer.writerow(f"{op.stage}{LETTERS[op.kind]}{op.microbatch}" for op in ops)
    return out.getvalue()


def parse_csv(text: str) -> InterleavedSchedule:
    """Parse a schedule from CSV text, without validation. Raises :class:`InputError` that names the
    cell."""
    try:
        rows = list(csv.reader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise InputError(f"the plan is not CSV: {error}") from None
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    if not rows:
        raise InputError("the plan has no ops; expected a row per rank, with cells like 0F0")
    if sum(map(len, rows)) > MAX_OPS:
        raise InputError(f"the plan has more than {MAX_OPS} cells")
    ranks = tuple(
        tuple(op for column, cell in enumerate(row) for op in _read(cell.strip(), rank, column))
        for rank, row in enumerate(rows)
    )
    microbatches = 1 + max((op.microbatch for ops in ranks for op in ops), default=-1)
    return InterleavedSchedule(microbatches, ranks)


def _read(cell: str, rank: int, column: int) -> Iterator[StageOp]:
    several = _OVERLAP.fullmatch(cell)
    for part in several.group(1).split(";") if several is not None else (cell,):
        if part.strip():
            yield _op(part.strip(), rank, column)


def _op(cell: str, rank: int, column: int) -> StageOp:
    match = _CELL.fullmatch(cell)
    if match is None:
        why = "expected a stage, F, I, W or B, and a microbatch, as in 0F0"
        if _OTHER.fullmatch(cell):
            why = "expected a compute-only schedule (F, I, W, B) without communication ops"
        raise InputError(f"the plan: rank {rank}, column {column}: found {shown(cell)}; {why}")
    return StageOp(int(match.group(1)), KIND_OF_LETTER[match.group(2)], int(match.group(3)))
