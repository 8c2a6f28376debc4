"""Chrome trace of a timeline, for Perfetto: a process per replica, a thread per stage.

Receives and collectives overlap with compute ops and with each other. Events of one thread must
not overlap, so they are asynchronous events of their process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pipemorph.diagnose.pictures.step_timeline import StepTimeline, TimelineOp, TimelineRow


def render_perfetto_trace(timeline: StepTimeline) -> str:
    """Trace Event Format as JSON. Times in microseconds from the start of the step."""
    trace = {
        "traceEvents": list(_list_events(timeline)),
        "displayTimeUnit": "ms",
        "otherData": {"title": timeline.title},
    }
    return json.dumps(trace, separators=(",", ":"), allow_nan=False) + "\n"


def _list_events(timeline: StepTimeline) -> Iterator[dict[str, Any]]:
    for replica in sorted({row.worker.dp_rank for row in timeline.rows}):
        yield _make_name_event("process_name", replica, 0, f"replica {replica} (dp_rank)")
    number = 0
    for row in timeline.rows:
        replica, stage = row.worker
        rank = f", rank {row.rank}" if row.rank >= 0 else ""
        yield _make_name_event("thread_name", replica, stage, f"stage {stage}{rank}")
        yield {
            "ph": "M", "pid": replica, "tid": stage, "name": "thread_sort_index",
            "args": {"sort_index": stage},
        }  # fmt: skip
        yield from _list_compute_events(row)
        for op in row.ops:
            if not op.in_order:
                number += 1
                yield from _make_pair(row, op, number)


def _make_name_event(name: str, pid: int, tid: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": {"name": value}}


def _list_compute_events(row: TimelineRow) -> Iterator[dict[str, Any]]:
    """Complete events that are nested or follow each other."""
    open_ends: list[float] = []
    for op in row.ops:
        if not op.in_order:
            continue
        start, end = _to_microseconds(op.start), _to_microseconds(op.end)
        # With clocks' noise it may begin before the op before it ends.
        while open_ends and end > open_ends[-1]:
            start = max(start, open_ends.pop())
        open_ends.append(end)
        label = op.optype if op.microbatch < 0 else f"{op.optype} {op.microbatch}"
        yield {
            "ph": "X", "pid": row.worker.dp_rank, "tid": row.worker.stage, "name": label,
            "cat": op.optype, "ts": start, "dur": round(end - start, 3),
            "args": _list_arguments(op),
        }  # fmt: skip


def _make_pair(row: TimelineRow, op: TimelineOp, number: int) -> Iterator[dict[str, Any]]:
    """Begin and end of an asynchronous event."""
    both = {
        "pid": row.worker.dp_rank, "tid": row.worker.stage, "id": number, "cat": "communication",
        "name": f"stage {row.worker.stage}: {op.optype}",
    }  # fmt: skip
    yield {"ph": "b", **both, "ts": _to_microseconds(op.start), "args": _list_arguments(op)}
    yield {"ph": "e", **both, "ts": _to_microseconds(op.end)}


def _list_arguments(op: TimelineOp) -> dict[str, int]:
    return {
        name: value
        for name, value in (("microbatch", op.microbatch), ("chunk", op.chunk))
        if value >= 0
    }


def _to_microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
