"""A timeline for chrome://tracing and Perfetto (Trace Event Format)."""

from __future__ import annotations

from typing import Any

from pipemorph.pictures.timeline import Timeline, in_flight
from pipemorph.planning.ir import OpKind

# Reserved colour names of the viewer.
COLOURS = {
    OpKind.F: "thread_state_running",
    OpKind.B: "thread_state_runnable",
    OpKind.W: "thread_state_iowait",
    OpKind.BW: "thread_state_runnable",
}


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The trace as a JSON object: a thread per stage, in-flight counters, delayed messages.

    Times are microseconds from the start of the timeline.
    """
    zero = timeline.begin
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "pipeline"}}
    ]
    for i, ops in enumerate(timeline.stages):
        events.append(
            {"ph": "M", "pid": 0, "tid": i, "name": "thread_name", "args": {"name": f"stage {i}"}}
        )
        events.append(
            {"ph": "M", "pid": 0, "tid": i, "name": "thread_sort_index", "args": {"sort_index": i}}
        )
        for op in ops:
            events.append(
                {
                    "ph": "X",
                    "pid": 0,
                    "tid": i,
                    "name": f"{op.kind.value}{op.microbatch}",
                    "cat": op.kind.value,
                    "cname": COLOURS[op.kind],
                    "ts": _micros(op.start - zero),
                    "dur": _micros(op.end - op.start),
                    "args": {"stage": i, "microbatch": op.microbatch},
                }
            )
        for time, now in in_flight(ops):
            events.append(
                {
                    "ph": "C",
                    "pid": 0,
                    "name": f"in flight, stage {i}",
                    "ts": _micros(time - zero),
                    "args": {"microbatches": now},
                }
            )
    for number, message in enumerate(timeline.messages):
        sender = message.link if message.forward else message.link + 1
        receiver = message.link + 1 if message.forward else message.link
        common = {
            "pid": 0,
            "id": number,
            "cat": "message",
            "name": f"{'activation' if message.forward else 'gradient'} {message.microbatch}",
        }
        sent, arrived = _micros(message.sent - zero), _micros(message.arrived - zero)
        events.append({"ph": "s", "tid": sender, "ts": sent, **common})
        events.append({"ph": "f", "bp": "e", "tid": receiver, "ts": arrived, **common})
    for time, text in timeline.marks:
        events.append({"ph": "i", "s": "g", "pid": 0, "name": text, "ts": _micros(time - zero)})
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"title": timeline.title},
    }


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)
