"""Renders a replay as one self-contained HTML file.

``page.html`` beside this module is the template; the replay is embedded as JSON.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pipemorph.pictures.pages import fill
from pipemorph.replay.contenders import Replay
from pipemorph.replay.trace import LinkState, LinkTrace

State = TypeVar("State")


def render_page(found: Replay, trace: LinkTrace, title: str, replicas: int = 1) -> str:
    """The page. ``trace``: what was replayed, of so many replicas; ``title``: plain text."""
    text = json.dumps(_data(found, trace, title, replicas), separators=(",", ":"), allow_nan=False)
    return fill(Path(__file__).with_name("page.html"), text)


def _data(found: Replay, trace: LinkTrace, title: str, replicas: int) -> dict[str, Any]:
    return {
        "title": title,
        "iterations": found.iterations,
        "unit": trace.unit,
        "contenders": [
            {
                "name": name,
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
            {"name": name, "spans": [span._asdict() for span in spans]}
            for name, spans in _lanes(trace, replicas, _places(found, trace))
        ],
        "changes": [change._asdict() for change in found.changes],
    }


class _Span(NamedTuple):
    """A state of a link, or reduction, between two iterations. ``kind``: what of it counts most."""

    begin: float
    end: float
    kind: str
    text: str


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
            name = f"link {link}" + (f" of replica {replica}" if replicas > 1 else "")
            yield name, _spans(states, link, bounds, _of_link)
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


def _of_link(state: LinkState) -> tuple[str, str]:
    said = [
        ("down", "down" if state.down else ""),
        ("narrow", f"{state.gbps:g} Gb/s" if state.gbps is not None else ""),
        ("delayed", f"+{state.delay * 1e3:g} ms" if state.delay else ""),
        ("delayed", f"jitter {state.jitter * 1e3:g} ms" if state.jitter else ""),
    ]
    known = [(kind, text) for kind, text in said if text]
    return (known[0][0] if known else "", ", ".join(text for _, text in known))


def _of_reduction(late: float) -> tuple[str, str]:
    return ("delayed", f"+{late * 1e3:g} ms") if late else ("", "")
