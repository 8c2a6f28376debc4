"""Renders a replay as one self-contained HTML file.

The template is ``page.html`` in this folder; the replay is embedded as JSON.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pipemorph.replay.baselines import ReplayResult
from pipemorph.replay.link_trace import LinkTrace, TracedLink, TracedStage
from pipemorph.views.explanation.explanation_text import format_count, format_link
from pipemorph.views.pictures.html import fill_template

State = TypeVar("State")

DESCRIPTIONS = {
    "1f1b": "one forward, one backward; never changed",
    "zero-bubble": "never changed",
    "static": "PipeMorph’s plan for healthy links, never changed",
    "adaptive": "PipeMorph as it ships",
    "oracle": "has read the trace: the best plan at once, at no cost",
}
LEAST_DIFFERENCE = 0.005
"""Least fraction of the time that counts as a difference."""
MOST_NAMED_LINKS = 3
"""Most links, and states of each, in the summary."""


def render_replay_page(found: ReplayResult, trace: LinkTrace, title: str, replicas: int = 1) -> str:
    """Page of a replay of ``trace`` with ``replicas`` replicas. ``title``: plain text."""
    text = json.dumps(
        _build_page_data(found, trace, title, replicas), separators=(",", ":"), allow_nan=False
    )
    return fill_template(Path(__file__).with_name("page.html"), text)


def _build_page_data(
    found: ReplayResult, trace: LinkTrace, title: str, replicas: int
) -> dict[str, Any]:
    lanes = list(_list_timelines(trace, replicas, _map_moments(found, trace)))
    return {
        "title": title,
        "story": list(_summarize_replay(found, lanes)),
        "iterations": found.iterations,
        "unit": trace.unit,
        "contenders": [
            {
                "name": name,
                "about": DESCRIPTIONS.get(name, ""),
                "seconds": trained.seconds,
                "rate": found.compute_iterations_per_minute(name),
                "share": found.compute_oracle_share(name),
                "ended": trained.end_reason,
                # Milliseconds.
                "steps": [round(step * 1e3, 3) for step in trained.iteration_seconds],
            }
            for name, trained in found.runs.items()
        ],
        "lanes": [
            {"name": name, "spans": [span._asdict() for span in spans]} for name, spans in lanes
        ],
        "changes": [change._asdict() for change in found.changes],
    }


class _StateSpan(NamedTuple):
    """State of a link, stage or reduction between two iterations. ``kind``: its main fault."""

    begin: float
    end: float
    kind: str
    text: str


def _summarize_replay(
    found: ReplayResult, lanes: Sequence[tuple[str, list[_StateSpan]]]
) -> Iterator[str]:
    """Sentences about the faults, the plan changes and their saving."""
    for name, spans in lanes[:MOST_NAMED_LINKS]:
        texts = [
            f"{span.text} from iteration {span.begin:.0f} "
            + ("to the end" if span.end >= found.iterations else f"to {span.end:.0f}")
            for span in spans[:MOST_NAMED_LINKS]
        ]
        more = (
            f", and {len(spans) - MOST_NAMED_LINKS} times more"
            if len(spans) > MOST_NAMED_LINKS
            else ""
        )
        yield f"{name}: {', '.join(texts)}{more}."
    if len(lanes) > MOST_NAMED_LINKS:
        yield f"{len(lanes) - MOST_NAMED_LINKS} more have faults."
    if not lanes:
        yield "All links are healthy all the time."
    applied = [change for change in found.changes if change.iteration is not None]
    count = format_count(len(applied), "time")
    changed = f"changed its plan {count}" if applied else "did not change its plan"
    adaptive, static = found.runs["adaptive"], found.runs["static"]
    if adaptive.seconds is None:
        yield f"PipeMorph (adaptive) {changed}, and ended: {adaptive.end_reason}"
        return
    text = f"PipeMorph (adaptive) {changed} and took {adaptive.seconds:.1f} s"
    if static.seconds is None:
        text += f"; without any change (static) it would have ended: {static.end_reason}"
    else:
        saved = static.seconds - adaptive.seconds
        part = abs(saved) / static.seconds if static.seconds else 0.0
        less = f": {part:.0%} {'less' if saved > 0 else 'more'} than"
        text += less if part >= LEAST_DIFFERENCE else ", as much as"
        text += f" the {static.seconds:.1f} s without any change (static)"
    yield text + "."
    share = found.compute_oracle_share("adaptive")
    if share is not None and share >= LEAST_DIFFERENCE:
        yield f"That is {share:.0%} of what the oracle saves, which has read the trace."


def _map_moments(found: ReplayResult, trace: LinkTrace) -> Callable[[float], float]:
    """Function: moment of the trace → iteration. Seconds are by the adaptive contender's clock."""
    count = found.iterations
    if trace.unit == "iterations":
        return lambda moment: min(moment, count)
    steps = found.runs["adaptive"].iteration_seconds
    begins = [0.0, *accumulate(steps)]

    def find_iteration(moment: float) -> float:
        k = bisect_right(begins, moment) - 1
        if k >= len(steps):
            return count
        return round(k + (moment - begins[k]) / steps[k], 4)

    return find_iteration


def _list_timelines(
    trace: LinkTrace, replicas: int, place: Callable[[float], float]
) -> Iterator[tuple[str, list[_StateSpan]]]:
    """Names of links, stages and reductions with faults, and their states."""
    bounds = [place(moment) for moment in (*trace.since, float("inf"))]
    for replica in range(replicas):
        states = trace.select_replica(replica).states
        for link in sorted({link for each in states for link in each}):
            name = format_link(link, f"replica {replica}" if replicas > 1 else "")
            yield name, _merge_spans(states, link, bounds, _describe_link)
    for stage in sorted({stage for each in trace.stages for stage in each}):
        yield f"stage {stage}", _merge_spans(trace.stages, stage, bounds, _describe_stage)
    for stage in sorted({stage for each in trace.reduction_delays for stage in each}):
        yield (
            f"reduction of stage {stage}",
            _merge_spans(trace.reduction_delays, stage, bounds, _describe_reduction),
        )


def _merge_spans(
    states: tuple[Mapping[int, State], ...],
    key: int,
    bounds: list[float],
    describe: Callable[[State], tuple[str, str]],
) -> list[_StateSpan]:
    spans: list[_StateSpan] = []
    for each, begin, end in zip(states, bounds[:-1], bounds[1:], strict=True):
        if key not in each or end <= begin:
            continue
        kind, text = describe(each[key])
        if spans and spans[-1].end == begin and spans[-1].text == text:
            spans[-1] = spans[-1]._replace(end=end)
        elif kind:
            spans.append(_StateSpan(begin, end, kind, text))
    return spans


def _describe_link(state: TracedLink) -> tuple[str, str]:
    texts = [
        ("down", "down" if state.down else ""),
        ("narrow", f"{state.gbps:g} Gb/s" if state.gbps is not None else ""),
        ("delayed", f"+{state.delay * 1e3:g} ms" if state.delay else ""),
        ("delayed", f"jitter {state.jitter * 1e3:g} ms" if state.jitter else ""),
    ]
    known = [(kind, text) for kind, text in texts if text]
    return (known[0][0] if known else "", ", ".join(text for _, text in known))


def _describe_stage(state: TracedStage) -> tuple[str, str]:
    texts = [f"ops {state.slowdown:g} times as long"] if state.slowdown > 1 else []
    texts += [f"pauses of {state.pause * 1e3:g} ms"] if state.pause else []
    return ("delayed" if texts else "", ", ".join(texts))


def _describe_reduction(late: float) -> tuple[str, str]:
    return ("delayed", f"+{late * 1e3:g} ms") if late else ("", "")
