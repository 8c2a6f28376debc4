"""Renders a replay as one self-contained HTML file.

``page.html`` beside this module is the template; the replay is embedded as JSON.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pipemorph.explain.story import link_name, plural
from pipemorph.pictures.html import fill
from pipemorph.replay.contenders import Replay
from pipemorph.replay.trace import LinkTrace, TracedLink, TracedStage

State = TypeVar("State")

ABOUT = {
    "1f1b": "one forward, one backward; never changed",
    "zero-bubble": "never changed",
    "static": "PipeMorph’s plan for healthy links, never changed",
    "adaptive": "PipeMorph as it ships",
    "oracle": "knows the trace: the best plan at once, at no cost",
}
LEAST = 0.005
"""The least part of the time that is a difference."""
NAMED = 3
"""Most links of which the story tells."""


def render_page(found: Replay, trace: LinkTrace, title: str, replicas: int = 1) -> str:
    """The page. ``trace``: what was replayed, of so many replicas; ``title``: plain text."""
    text = json.dumps(_data(found, trace, title, replicas), separators=(",", ":"), allow_nan=False)
    return fill(Path(__file__).with_name("page.html"), text)


def _data(found: Replay, trace: LinkTrace, title: str, replicas: int) -> dict[str, Any]:
    lanes = list(_lanes(trace, replicas, _places(found, trace)))
    return {
        "title": title,
        "story": list(_story(found, lanes)),
        "iterations": found.iterations,
        "unit": trace.unit,
        "contenders": [
            {
                "name": name,
                "about": ABOUT.get(name, ""),
                "seconds": trained.seconds,
                "rate": found.per_minute(name),
                "share": found.share(name),
                "ended": trained.ended,
                # Milliseconds.
                "steps": [round(step * 1e3, 3) for step in trained.steps],
            }
            for name, trained in found.trained.items()
        ],
        "lanes": [
            {"name": name, "spans": [span._asdict() for span in spans]} for name, spans in lanes
        ],
        "changes": [change._asdict() for change in found.changes],
    }


class _Span(NamedTuple):
    """A state of a link, or reduction, between two iterations. ``kind``: what of it counts most."""

    begin: float
    end: float
    kind: str
    text: str


def _story(found: Replay, lanes: Sequence[tuple[str, list[_Span]]]) -> Iterator[str]:
    """What happened, what was done, and what it saved."""
    for name, spans in lanes[:NAMED]:
        told = [
            f"{span.text} from iteration {span.begin:.0f} "
            + ("to the end" if span.end >= found.iterations else f"to {span.end:.0f}")
            for span in spans[:NAMED]
        ]
        more = f", and {len(spans) - NAMED} times more" if len(spans) > NAMED else ""
        yield f"{name}: {', '.join(told)}{more}."
    if len(lanes) > NAMED:
        yield f"{len(lanes) - NAMED} more are not well at some time."
    if not lanes:
        yield "All links are well all the time."
    applied = [change for change in found.changes if change.iteration is not None]
    changed = f"changed its plan {plural(len(applied), 'time')}" if applied else "kept its plan"
    adaptive, static = found.trained["adaptive"], found.trained["static"]
    if adaptive.seconds is None:
        yield f"PipeMorph (adaptive) {changed}, and ended: {adaptive.ended}"
        return
    text = f"PipeMorph (adaptive) {changed} and took {adaptive.seconds:.1f} s"
    if static.seconds is None:
        text += f"; without any change (static) it would have ended: {static.ended}"
    else:
        saved = static.seconds - adaptive.seconds
        part = abs(saved) / static.seconds if static.seconds else 0.0
        less = f": {part:.0%} {'less' if saved > 0 else 'more'} than"
        text += less if part >= LEAST else ", as much as"
        text += f" the {static.seconds:.1f} s without any change (static)"
    yield text + "."
    share = found.share("adaptive")
    if share is not None and share >= LEAST:
        yield f"That is {share:.0%} of what can be saved by knowing everything before (oracle)."


def _places(found: Replay, trace: LinkTrace) -> Callable[[float], float]:
    """Moment of the trace → iteration. That of a second is the adaptive contender's."""
    count = found.iterations
    if trace.unit == "iterations":
        return lambda moment: min(moment, count)
    steps = found.trained["adaptive"].steps
    begins = [0.0, *accumulate(steps)]

    def place(moment: float) -> float:
        k = bisect_right(begins, moment) - 1
        if k >= len(steps):
            return count
        return round(k + (moment - begins[k]) / steps[k], 4)

    return place


def _lanes(
    trace: LinkTrace, replicas: int, place: Callable[[float], float]
) -> Iterator[tuple[str, list[_Span]]]:
    """What is not well all the time, by name."""
    bounds = [place(moment) for moment in (*trace.since, float("inf"))]
    for replica in range(replicas):
        states = trace.of(replica).states
        for link in sorted({link for each in states for link in each}):
            name = link_name(link, f"replica {replica}" if replicas > 1 else "")
            yield name, _spans(states, link, bounds, _of_link)
    for stage in sorted({stage for each in trace.stages for stage in each}):
        yield f"stage {stage}", _spans(trace.stages, stage, bounds, _of_stage)
    for stage in sorted({stage for each in trace.late for stage in each}):
        yield f"reduction of stage {stage}", _spans(trace.late, stage, bounds, _of_reduction)


def _spans(
    states: tuple[Mapping[int, State], ...],
    key: int,
    bounds: list[float],
    said: Callable[[State], tuple[str, str]],
) -> list[_Span]:
    spans: list[_Span] = []
    for each, begin, end in zip(states, bounds[:-1], bounds[1:], strict=True):
        if key not in each or end <= begin:
            continue
        kind, text = said(each[key])
        if spans and spans[-1].end == begin and spans[-1].text == text:
            spans[-1] = spans[-1]._replace(end=end)
        elif kind:
            spans.append(_Span(begin, end, kind, text))
    return spans


def _of_link(state: TracedLink) -> tuple[str, str]:
    said = [
        ("down", "down" if state.down else ""),
        ("narrow", f"{state.gbps:g} Gb/s" if state.gbps is not None else ""),
        ("delayed", f"+{state.delay * 1e3:g} ms" if state.delay else ""),
        ("delayed", f"jitter {state.jitter * 1e3:g} ms" if state.jitter else ""),
    ]
    known = [(kind, text) for kind, text in said if text]
    return (known[0][0] if known else "", ", ".join(text for _, text in known))


def _of_stage(state: TracedStage) -> tuple[str, str]:
    said = [f"ops {state.slowdown:g} times as long"] if state.slowdown > 1 else []
    said += [f"pauses of {state.pause * 1e3:g} ms"] if state.pause else []
    return ("delayed" if said else "", ", ".join(said))


def _of_reduction(late: float) -> tuple[str, str]:
    return ("delayed", f"+{late * 1e3:g} ms") if late else ("", "")
