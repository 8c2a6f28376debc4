"""Reads and writes schedules as torch.distributed.pipelining's CSV.

The compute-only format has a row per rank and an op per cell: ``2F0`` is the forward of microbatch
0 on stage 2, ``I`` the backward for the input (our B), ``W`` the backward for the weights, ``B``
the fused backward (our BW). Microbatches have their own numbers, in whatever order they run. An
empty cell is a step without an op; it only aligns the columns.
``(1F2;6B0)OVERLAP_F_B`` has ops that may overlap; here they run one after another, as in torch by
default.

The compute-and-communication format is only written. It adds sends and receives: ``2RECV_F0``,
``2SEND_B0``, one ``2WAIT_SEND_B0`` per send, and ``2UNSHARD``, ``2REDUCE_GRAD``,
``2WAIT_REDUCE_GRAD`` and ``2RESHARD``, which FSDP and the scaling of gradients need. torch executes
it unchanged. To a compute-only schedule torch adds them itself, as if every op took one step.
"""

from __future__ import annotations

import csv
import heapq
import io
import re
from collections.abc import Iterator, Sequence

from pipemorph.errors import InputError
from pipemorph.planning.ir import KIND_OF_LETTER, LETTER_OF_KIND, OpKind, Schedule
from pipemorph.planning.problem import MAX_OPS, quote_value

_CELL = re.compile(r"(\d{1,9})([FIWB])(\d{1,9})", re.ASCII)
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
_OTHER = re.compile(r"\d+[A-Z_]+\d*", re.ASCII)

_StageOp = tuple[int, OpKind, int]
"""Stage, kind, microbatch."""


def dump_csv(schedule: Schedule) -> str:
    """CSV text of the ops, with torch's line endings."""
    out = io.StringIO()
    writer = csv.writer(out)
    for mine, ops in zip(schedule.stages_by_rank, schedule.ranks, strict=True):
        writer.writerow(f"{mine[op.chunk]}{LETTER_OF_KIND[op.kind]}{op.microbatch}" for op in ops)
    return out.getvalue()


def dump_communication_csv(schedule: Schedule, ends: Sequence[Sequence[float]]) -> str:
    """CSV text of the ops with sends and receives. ``ends[r][k]``: end time of op *k* of rank *r*.

    A receive is posted when the message is sent: between the receiver's ops that end earlier and
    those that end later. Any two ranks then have their messages, of both directions together, in
    one order, and cannot deadlock over a communicator that handles one message at a time.
    """
    placement = schedule.placement
    last = len(placement) - 1
    rows: list[list[str]] = [
        [f"{mine[chunk]}UNSHARD" for chunk in dict.fromkeys(op.chunk for op in ops)]
        for mine, ops in zip(schedule.stages_by_rank, schedule.ranks, strict=True)
    ]
    pending: list[list[str]] = [[] for _ in rows]
    backwards = [0] * len(placement)
    for rank, (stage, kind, microbatch) in _iterate_by_end(schedule, ends):
        row = rows[rank]
        row.append(f"{stage}{LETTER_OF_KIND[kind]}{microbatch}")
        backward = kind in (OpKind.B, OpKind.BW)
        if backward and (wait := f"{stage}WAIT_SEND_F{microbatch}") in pending[rank]:
            # The gradient returned, so the peer has received the activations.
            pending[rank].remove(wait)
            row.append(wait)
        to = stage + 1 if kind is OpKind.F else stage - 1
        if (backward or kind is OpKind.F) and 0 <= to <= last and placement[to] != rank:
            what = "F" if kind is OpKind.F else "B"
            row.append(f"{stage}SEND_{what}{microbatch}")
            pending[rank].append(f"{stage}WAIT_SEND_{what}{microbatch}")
            rows[placement[to]].append(f"{to}RECV_{what}{microbatch}")
        if kind in (OpKind.W, OpKind.BW):
            backwards[stage] += 1
            if backwards[stage] == schedule.microbatches:
                row += [f"{stage}{each}" for each in ("REDUCE_GRAD", "WAIT_REDUCE_GRAD", "RESHARD")]
    out = io.StringIO()
    csv.writer(out).writerows(row + waits for row, waits in zip(rows, pending, strict=True))
    return out.getvalue()


def _iterate_by_end(
    schedule: Schedule, ends: Sequence[Sequence[float]]
) -> Iterator[tuple[int, _StageOp]]:
    """Ops with their ranks, by end time; at equal times an op precedes those that wait for it."""
    stages = schedule.stage_count
    position = [0] * len(schedule.ranks)
    done: set[tuple[int, bool, int]] = set()
    """Triples: stage, is backward, microbatch."""
    blocked: dict[tuple[int, bool, int], int] = {}
    ready: list[tuple[float, int]] = []

    def get_next_op(rank: int) -> _StageOp:
        kind, microbatch, chunk = schedule.ranks[rank][position[rank]]
        return schedule.stages_by_rank[rank][chunk], kind, microbatch

    def offer_next_op(rank: int) -> None:
        if position[rank] == len(schedule.ranks[rank]):
            return
        stage, kind, microbatch = get_next_op(rank)
        needs = None
        if kind is OpKind.F and stage > 0:
            needs = (stage - 1, False, microbatch)
        elif kind in (OpKind.B, OpKind.BW) and stage < stages - 1:
            needs = (stage + 1, True, microbatch)
        if needs is None or needs in done:
            heapq.heappush(ready, (ends[rank][position[rank]], rank))
        else:
            blocked[needs] = rank

    for rank in range(len(schedule.ranks)):
        offer_next_op(rank)
    while ready:
        _, rank = heapq.heappop(ready)
        stage, kind, microbatch = op = get_next_op(rank)
        yield rank, op
        position[rank] += 1
        offer_next_op(rank)
        if kind is not OpKind.W:
            made = (stage, kind is not OpKind.F, microbatch)
            done.add(made)
            if made in blocked:
                offer_next_op(blocked.pop(made))


def parse_csv(text: str) -> Schedule:
    """Parse a schedule from CSV text, without validation. The :class:`InputError` of a malformed
    text names the cell."""
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
        tuple(
            op for column, cell in enumerate(row) for op in _parse_cell(cell.strip(), rank, column)
        )
        for rank, row in enumerate(rows)
    )
    microbatches = 1 + max((microbatch for ops in ranks for *_, microbatch in ops), default=-1)
    return Schedule.from_stage_ops(microbatches, ranks)


def find_microbatch_order(schedule: Schedule) -> tuple[int, ...]:
    """Microbatches in the order of their forwards on stage 0; empty if that is 0, 1, … or not all
    of them."""
    order = tuple(op.microbatch for op in schedule.stages[0] if op.kind is OpKind.F)
    whole = tuple(range(schedule.microbatches))
    return order if order != whole and tuple(sorted(order)) == whole else ()


def _parse_cell(cell: str, rank: int, column: int) -> Iterator[_StageOp]:
    several = _OVERLAP.fullmatch(cell)
    for part in several.group(1).split(";") if several is not None else (cell,):
        if part.strip():
            yield _parse_op(part.strip(), rank, column)


def _parse_op(cell: str, rank: int, column: int) -> _StageOp:
    match = _CELL.fullmatch(cell)
    if match is None:
        why = "expected a stage, F, I, W or B, and a microbatch, as in 0F0"
        if _OTHER.fullmatch(cell):
            why = "expected a compute-only schedule (F, I, W, B) without communication ops"
        raise InputError(
            f"the plan: rank {rank}, column {column}: found {quote_value(cell)}; {why}"
        )
    return int(match.group(1)), KIND_OF_LETTER[match.group(2)], int(match.group(3))
