"""Renders a diagnosis as one self-contained HTML file.

The template is ``page.html`` in this folder; the diagnosis is embedded as JSON.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

from pipemorph.diagnose.adapting import format_seconds
from pipemorph.diagnose.analysis.causes import Cause
from pipemorph.diagnose.analysis.step_graph import COLLECTIVES
from pipemorph.diagnose.analysis.steps import RecordedStep, StepSet, join_named
from pipemorph.diagnose.diagnosis import Diagnosis
from pipemorph.diagnose.diagnosis_text import (
    choose_best,
    format_change,
    format_diagnosis,
)
from pipemorph.diagnose.operation import (
    BACKWARD,
    BACKWARD_RECV,
    CHECKPOINT,
    DATA,
    FORWARD,
    FORWARD_RECV,
    GC,
    LOSS,
    OPTIMIZER,
    OPTYPES,
    WEIGHT,
)
from pipemorph.diagnose.pictures.step_timeline import (
    StepTimeline,
    TimelineOp,
    TimelineRow,
    TimelineSet,
)
from pipemorph.views.pictures.colours import NAMES
from pipemorph.views.pictures.html import fill_template, pack_link

MOST_CELLS = 4096
"""Workers in the map of slowdowns: above it only the slowest replicas have a row."""
MOST_TYPES_ROWS = 24
"""Rows of a table of slowdowns."""
MOST_STEPS = 2000
"""Steps in the picture of their times."""
MOST_SPOKEN = 16
"""Workers that the text of a timeline names."""
_KINDS = {
    FORWARD: "F", WEIGHT: "W", LOSS: "L", DATA: "D", GC: "G", OPTIMIZER: "O", CHECKPOINT: "K",
    FORWARD_RECV: "T", BACKWARD_RECV: "T",
    **{OPTYPES[code]: "C" for code in COLLECTIVES},
}  # fmt: skip
"""Letter of an op type in the page's data; a backward is ``B`` or ``U``, fused."""
_KIND_NAMES = NAMES | {
    "U": "B backward, whole",
    "L": "loss",
    "D": "data loader",
    "G": "gc: garbage collection",
    "K": "checkpoint",
    "O": "optimizer",
    "T": "transfer between stages, without waiting",
    "C": "collective, without waiting",
}
"""Names in the legend; ``shared.js`` draws each kind by its letter."""


def render_diagnosis_page(diagnosis: Diagnosis, title: str, timelines: TimelineSet) -> str:
    """Page of a diagnosis. ``title``: names of the traces, plain text."""
    text = json.dumps(
        _build_page_data(diagnosis, title, timelines), separators=(",", ":"), allow_nan=False
    )
    return fill_template(Path(__file__).with_name("page.html"), text)


def _build_page_data(diagnosis: Diagnosis, title: str, timelines: TimelineSet) -> dict[str, Any]:
    step, steps = timelines.step, diagnosis.steps
    return {
        "title": title,
        "stats": list(_list_stats(diagnosis)),
        "story": _list_story(diagnosis),
        "several": steps.replicas > 1,
        "slowest": timelines.slowest[0],
        "heading": _format_heading(diagnosis, step),
        "hidden": len(timelines.slowest) - len(timelines.drawn),
        "most_ops": timelines.most_ops,
        "kinds": _KIND_NAMES,
        "timelines": [_pack_timeline(timeline) for timeline in timelines.timelines],
        "steps": _list_step_times(diagnosis, step),
        "map": _build_map(diagnosis, timelines.slowest),
        "advice": [
            {
                "change": format_change(remedy),
                "gain": f"{remedy.gain:.1%}",
                "time": format_seconds(remedy.predicted_seconds),
            }
            for remedy in diagnosis.advice
        ],
        "causes": [_describe_cause(cause, steps) for cause in diagnosis.causes],
        "tables": list(_list_tables(diagnosis)),
        "notes": diagnosis.notes,
    }


def _list_story(diagnosis: Diagnosis) -> list[str]:
    """Lines of the text form, without its tables."""
    lines = takewhile(lambda part: part != "", format_diagnosis(diagnosis))
    return [line for line in lines if isinstance(line, str)]


def _format_heading(diagnosis: Diagnosis, step: RecordedStep) -> str:
    since = diagnosis.causes[0].since if diagnosis.causes else None
    of = "" if since is None else f" of those since step {since}"
    return f"Step {step.step}: the median{of}"


def _list_stats(diagnosis: Diagnosis) -> Iterator[tuple[str, str, str]]:
    """Value, name and explanation of the figures at the top."""
    slowdown = diagnosis.slowdown
    lost = max(0.0, 1 - 1 / slowdown.total) if slowdown.total else 0.0
    yield f"{slowdown.total:.3f}", "slowdown S", f"{lost:.1%} is lost to unequal ops of one type"
    yield (
        f"{diagnosis.bubble_fraction:.1%}",
        "bubble",
        f"(p−1)/(m+p−1) = {diagnosis.ideal_bubble_fraction:.1%}",
    )
    yield (
        format_seconds(slowdown.span),
        "a step as it ran",
        f"{format_seconds(slowdown.ideal)} without stragglers",
    )
    if diagnosis.causes:
        cause = diagnosis.causes[0]
        yield f"{cause.share:.1%}", f"most costly cause: {cause.cause}", cause.where
    for remedy in choose_best(diagnosis.advice)[:1]:
        yield f"−{remedy.gain:.1%}", "best advice: time per sample", format_change(remedy)


# --- timelines ------------------------------------------------------------------------------------


def _get_letter(op: TimelineOp) -> str:
    if op.optype == BACKWARD:
        return "U" if op.fused else "B"
    return _KINDS[op.optype]


def _pack_timeline(timeline: StepTimeline) -> dict[str, Any]:
    return {
        "name": timeline.name,
        "title": timeline.title,
        "summary": timeline.summary,
        "span_us": _to_microseconds(timeline.seconds),
        "text": _describe_timeline(timeline),
        "rows": [_pack_row(timeline, row) for row in timeline.rows],
        **_pack_messages(timeline),
    }


def _pack_messages(timeline: StepTimeline) -> dict[str, Any]:
    """Messages of slow links: ``links`` between rows that are next to each other, which have a
    band, and ``crossing`` between others, as microbatches of several chunks go."""
    row_of = {row.worker: i for i, row in enumerate(timeline.rows)}
    links: dict[int, list[tuple[bool, float, float]]] = defaultdict(list)
    crossing = []
    for sender, receiver, sent, arrived in timeline.messages:
        source, target = row_of[sender], row_of[receiver]
        times = _to_microseconds(sent), _to_microseconds(arrived)
        if abs(source - target) == 1:
            links[min(source, target)].append((source < target, *times))
        else:
            crossing.append((source, target, *times))
    return {
        "links": [
            {**pack_link(row, messages), "name": f"link {timeline.rows[row].worker.stage}"}
            for row, messages in sorted(links.items())
        ],
        "crossing": crossing,
    }


def _pack_row(timeline: StepTimeline, row: TimelineRow) -> dict[str, Any]:
    """Row with its ops in columns: a third of the size of a list per op.

    ``gaps``: from the end of the op before, microseconds; below 0 if they overlap. ``kinds``: a
    letter per op, by which it is drawn; ``type``: index of its op type in ``types``. ``stages``:
    chunks, only if a rank has several; -1: none.
    """
    starts = [_to_microseconds(op.start) for op in row.ops]
    ends = [_to_microseconds(op.end) for op in row.ops]
    types = sorted({op.optype for op in row.ops})
    found: dict[str, Any] = {
        "replica": row.worker.dp_rank,
        "stage": row.worker.stage,
        "rank": row.rank,
        "idle_share": round(timeline.compute_idle(row), 4),
        "kinds": "".join(map(_get_letter, row.ops)),
        "microbatches": [op.microbatch for op in row.ops],
        "gaps": [at - before for before, at in zip([0, *ends], starts, strict=False)],
        "durations": [end - at for end, at in zip(ends, starts, strict=True)],
        "types": types,
        "type": [types.index(op.optype) for op in row.ops],
    }
    if len({op.chunk for op in row.ops if op.chunk >= 0}) > 1:
        found["stages"] = [op.chunk for op in row.ops]
    return found


def _describe_timeline(timeline: StepTimeline) -> str:
    """Text alternative of a timeline."""
    rows = sorted(timeline.rows, key=lambda row: -timeline.compute_idle(row))
    named = [f"{row.worker.key} {timeline.compute_idle(row):.0%}" for row in rows[:MOST_SPOKEN]]
    more = f" and {len(rows) - MOST_SPOKEN} more" if len(rows) > MOST_SPOKEN else ""
    return (
        f"{timeline.title}: {timeline.summary}. Idle time of the workers, most first:"
        f" {', '.join(named)}{more}."
    )


def _to_microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


# --- steps, workers, tables -----------------------------------------------------------------------


def _list_step_times(diagnosis: Diagnosis, drawn: RecordedStep) -> dict[str, Any]:
    """Times of the newest steps, and the step since which each cause is there."""
    steps = diagnosis.steps.steps[-MOST_STEPS:]
    spans = [step.span for step in steps]
    since = [
        {"step": cause.since, "text": f"{cause.cause}, {cause.where}"}
        for cause in diagnosis.causes
        if cause.since is not None and cause.since >= steps[0].step
    ]
    slowest = steps[spans.index(max(spans))].step
    text = (
        f"Times of {len(steps)} steps, from {steps[0].step} to {steps[-1].step}: median"
        f" {format_seconds(median(spans))}, shortest {format_seconds(min(spans))}, longest"
        f" {format_seconds(max(spans))} (step {slowest})."
        + "".join(f" Since step {each['step']}: {each['text']}." for each in since)
    )
    return {
        "number": [step.step for step in steps],
        "seconds": [round(span, 6) for span in spans],
        "since": since,
        "drawn": drawn.step,
        "text": text,
    }


def _build_map(diagnosis: Diagnosis, slowest: Sequence[int]) -> dict[str, Any]:
    """Slowdowns of the workers, a row per replica. A worker without one of its own has the bound by
    its replica and its stage, with ``bound`` set."""
    slowdown, steps = diagnosis.slowdown, diagnosis.steps
    stages = range(steps.stages)
    replicas = sorted(slowest[: max(1, MOST_CELLS // steps.stages)])
    places = {(w.dp_rank, w.stage): number for number, w in enumerate(steps.workers)}
    named = {worker for cause in diagnosis.causes for worker in _list_workers(cause, steps)}
    rows = []
    for replica in replicas:
        cells = []
        for stage in stages:
            number = places[replica, stage]
            own = slowdown.by_worker.get(steps.workers[number].key)
            bound = min(slowdown.by_dp_rank[replica], slowdown.by_stage[stage])
            value = bound if own is None else own
            cells.append([round(value, 4), own is None, number in named, steps.ranks[number]])
        rows.append(cells)
    every = [cell[0] for row in rows for cell in row]
    return {
        "replicas": replicas,
        "rows": rows,
        "most": max(every),
        "hidden": len(slowest) - len(replicas),
    }


def _list_workers(cause: Cause, steps: StepSet) -> Sequence[int]:
    """Workers that a cause names: single ones, or those of its stage."""
    if cause.workers or cause.stage is None:
        return cause.workers
    return [worker for worker in steps.used if steps.workers[worker].stage == cause.stage]


def _describe_cause(cause: Cause, steps: StepSet) -> dict[str, Any]:
    ranks = sorted({steps.ranks[worker] for worker in _list_workers(cause, steps)} - {-1})
    return {
        "cause": cause.cause,
        "where": cause.where,
        "ranks": join_named(map(str, ranks)),
        "since": cause.since,
        "time": format_seconds(cause.seconds),
        "share": f"{cause.share:.1%}",
    }


def _list_tables(diagnosis: Diagnosis) -> Iterator[dict[str, Any]]:
    """Slowdowns by type, stage and replica, largest first."""
    slowdown = diagnosis.slowdown
    found: Sequence[tuple[str, Mapping[Any, float]]] = (
        ("op type", slowdown.by_optype),
        ("stage", slowdown.by_stage),
        ("replica (dp_rank)", slowdown.by_dp_rank),
    )
    for name, values in found:
        rows = sorted(values.items(), key=lambda row: -row[1])
        yield {
            "name": name,
            "rows": [[str(key), f"{value:.4f}"] for key, value in rows[:MOST_TYPES_ROWS]],
            "more": max(0, len(rows) - MOST_TYPES_ROWS),
        }
