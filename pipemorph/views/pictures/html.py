"""Fills templates of self-contained HTML files, and renders a timeline as one.

Pages load nothing. They share a style (``shared.css``) and a few functions (``shared.js``), which a
template, such as ``page.html``, includes by a mark. Data is embedded as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pipemorph.planning.analysis.bubbles import IdleCause
from pipemorph.planning.ir import OpKind
from pipemorph.views.pictures.colours import DELAY, FILL, IDLE, IDLE_NAMES, INK, NAMES
from pipemorph.views.pictures.timeline import Timeline, trace_in_flight

DATA, STYLE, SCRIPT = "{{DATA}}", "{{STYLE}}", "{{SCRIPT}}"


def fill_template(template: Path, data: str) -> str:
    """Page of a template. ``data``: JSON, plain ``<`` allowed."""
    # Escaped so that the JSON cannot end the script element or begin a comment. Inserted last, so
    # that a mark of the template within the data is not replaced.
    return _load_styled_template(template).replace(DATA, data.replace("<", "\\u003c"))


@cache
def _load_styled_template(template: Path) -> str:
    text = template.read_text(encoding="utf-8")
    for mark, name in ((STYLE, "shared.css"), (SCRIPT, "shared.js")):
        shared = Path(__file__).with_name(name).read_text(encoding="utf-8")
        text = text.replace(mark, shared.strip("\n"))
    return text


def render_html(timeline: Timeline, stats: Sequence[tuple[str, str]] = ()) -> str:
    """Page of a timeline. ``stats``: names and values shown above the picture, as plain text."""
    text = json.dumps(_build_page_data(timeline, stats), separators=(",", ":"))
    return fill_template(Path(__file__).with_name("page.html"), text)


def _build_page_data(timeline: Timeline, stats: Sequence[tuple[str, str]]) -> dict[str, Any]:
    zero = timeline.begin
    kinds = {op.kind for ops in timeline.stages for op in ops}

    def to_milliseconds(seconds: float) -> float:
        """Milliseconds from the start, rounded to nanoseconds."""
        return round((seconds - zero) * 1e3, 6)

    stages = []
    for i, ops in enumerate(timeline.stages):
        curve = trace_in_flight(ops)
        stages.append(
            {
                "name": timeline.format_row_name(i),
                "ops": [
                    [
                        op.kind.value,
                        op.microbatch,
                        to_milliseconds(op.start),
                        to_milliseconds(op.end),
                    ]
                    for op in ops
                ],
                "of": timeline.list_op_stages(i),
                "bubbles": [
                    [bubble.cause.value, to_milliseconds(bubble.start), to_milliseconds(bubble.end)]
                    for bubble in (timeline.bubbles[i] if timeline.bubbles else ())
                ],
                "flight": [[to_milliseconds(time), now] for time, now in curve],
                "peak": max((now for _, now in curve), default=0),
                "limit": timeline.limits[i] if timeline.limits else None,
            }
        )
    return {
        "title": timeline.title,
        "span": to_milliseconds(timeline.end),
        "stats": [[_escape_html(name), _escape_html(value)] for name, value in stats],
        "stages": stages,
        "placement": timeline.placement or list(range(len(stages))),
        "messages": [
            [
                each.link,
                each.forward,
                each.microbatch,
                to_milliseconds(each.sent),
                to_milliseconds(each.arrived),
            ]
            for each in timeline.messages
        ],
        "kinds": {
            kind.value: {"name": NAMES[kind], "fill": FILL[kind], "ink": INK[kind]}
            for kind in OpKind
            if kind in kinds
        },
        "causes": {c.value: {"name": IDLE_NAMES[c], "fill": IDLE[c]} for c in IdleCause},
        "delay": DELAY,
    }


def _escape_html(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
