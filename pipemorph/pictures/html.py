"""Fills templates of self-contained HTML files, and renders a timeline as one.

Nothing is loaded from elsewhere. All pages share one look (``shared.css``) and a few functions
(``shared.js``); a template, such as ``page.html``, names where they go. Data is embedded as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pipemorph.pictures.colours import DELAY, FILL, IDLE, IDLE_NAMES, INK, NAMES
from pipemorph.pictures.timeline import Timeline, in_flight
from pipemorph.planning.analysis.bubbles import Cause
from pipemorph.planning.ir import OpKind

DATA, STYLE, SCRIPT = "{{DATA}}", "{{STYLE}}", "{{SCRIPT}}"


def fill(template: Path, data: str) -> str:
    """The page of a template. ``data``: JSON, plain ``<`` allowed."""
    # Escaped so that the JSON cannot end the script element or begin a comment. Last, so that a
    # text in it that reads like a mark of the template stays a text.
    return _styled(template).replace(DATA, data.replace("<", "\\u003c"))


@cache
def _styled(template: Path) -> str:
    text = template.read_text(encoding="utf-8")
    for mark, name in ((STYLE, "shared.css"), (SCRIPT, "shared.js")):
        shared = Path(__file__).with_name(name).read_text(encoding="utf-8")
        text = text.replace(mark, shared.strip("\n"))
    return text


def render_html(timeline: Timeline, stats: Sequence[tuple[str, str]] = ()) -> str:
    """The page. ``stats``: names and values shown above the picture, as plain text."""
    text = json.dumps(_data(timeline, stats), separators=(",", ":"))
    return fill(Path(__file__).with_name("page.html"), text)


def _data(timeline: Timeline, stats: Sequence[tuple[str, str]]) -> dict[str, Any]:
    zero = timeline.begin
    kinds = {op.kind for ops in timeline.stages for op in ops}

    def at(seconds: float) -> float:
        """Milliseconds from the start, rounded to nanoseconds."""
        return round((seconds - zero) * 1e3, 6)

    stages = []
    for i, ops in enumerate(timeline.stages):
        curve = in_flight(ops)
        stages.append(
            {
                "name": timeline.name(i),
                "ops": [[op.kind.value, op.microbatch, at(op.start), at(op.end)] for op in ops],
                "of": timeline.stage_of(i),
                "bubbles": [
                    [bubble.cause.value, at(bubble.start), at(bubble.end)]
                    for bubble in (timeline.bubbles[i] if timeline.bubbles else ())
                ],
                "flight": [[at(time), now] for time, now in curve],
                "peak": max((now for _, now in curve), default=0),
                "limit": timeline.limits[i] if timeline.limits else None,
            }
        )
    return {
        "title": timeline.title,
        "span": at(timeline.end),
        "stats": [[_plain(name), _plain(value)] for name, value in stats],
        "stages": stages,
        "placement": timeline.placement or list(range(len(stages))),
        "messages": [
            [each.link, each.forward, each.microbatch, at(each.sent), at(each.arrived)]
            for each in timeline.messages
        ],
        "kinds": {
            kind.value: {"name": NAMES[kind], "fill": FILL[kind], "ink": INK[kind]}
            for kind in OpKind
            if kind in kinds
        },
        "causes": {c.value: {"name": IDLE_NAMES[c], "fill": IDLE[c]} for c in Cause},
        "delay": DELAY,
    }


def _plain(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
