"""Makes self-contained HTML files, and renders a timeline as one.

Pages load nothing. They share a skeleton, the palette, a style (``shared.css``) and functions
(``shared.js``). A template, such as ``page.html``, has three parts: a ``style`` element with rules
of its own, the body, and a ``script`` element. Data is embedded as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from pipemorph.planning.analysis.bubbles import IdleCause
from pipemorph.views.pictures.colours import IDLE_NAMES, LETTERS, NAMES, format_css_variables
from pipemorph.views.pictures.timeline import Timeline, trace_in_flight

DATA = "{{DATA}}"


def fill_template(template: Path, data: str) -> str:
    """Page of a template. ``data``: JSON, plain ``<`` allowed."""
    # Escaped so that the JSON cannot end the script element or begin a comment. Inserted last, so
    # that a mark of the template within the data is not replaced.
    return _load_template(template).replace(DATA, data.replace("<", "\\u003c"))


@cache
def _load_template(template: Path) -> str:
    style, rest = template.read_text(encoding="utf-8").split("</style>")
    body, script = rest.split("<script>")
    names = json.dumps({"kinds": NAMES, "causes": {c.value: IDLE_NAMES[c] for c in IdleCause}})
    shared = f"const NAMES = {names};\n{_read_shared('shared.js')}"
    return _build_skeleton(
        "PipeMorph",
        style.removeprefix("<style>"),
        f'{body}<script id="data" type="application/json">{DATA}</script>\n'
        f'<script>\n"use strict";\n{shared}{script}',
    )


def _build_skeleton(title: str, style: str, body: str) -> str:
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{format_css_variables()}
{_read_shared("shared.css")}{style.strip()}
</style>
</head>
<body>
{body.strip()}
</body>
</html>
"""


@cache
def _read_shared(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def render_html(timeline: Timeline, stats: Sequence[tuple[str, str]] = ()) -> str:
    """Page of a timeline. ``stats``: names and values shown above the picture, as plain text."""
    text = json.dumps(_build_page_data(timeline, stats), separators=(",", ":"))
    return fill_template(Path(__file__).with_name("page.html"), text)


def pack_link(row: int, messages: Sequence[tuple[bool, float, float]]) -> dict[str, Any]:
    """Slow link below a row, as ``shared.js`` draws it. ``messages``: whether it goes down, and
    microseconds when it was sent and when it arrived."""
    late = median(arrived - sent for _, sent, arrived in messages) / 1e3
    return {"row": row, "text": f"{late:.3g} ms per message", "messages": messages}


def _build_page_data(timeline: Timeline, stats: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Step as ``shared.js`` draws it. Times are microseconds from the start."""
    zero, placement = timeline.begin, timeline.placement

    def scale(seconds: float) -> float:
        return round((seconds - zero) * 1e6, 3)

    rows = []
    for i, ops in enumerate(timeline.stages):
        curve = trace_in_flight(ops)
        starts, ends = [scale(op.start) for op in ops], [scale(op.end) for op in ops]
        rows.append(
            {
                "name": timeline.format_row_name(i),
                "kinds": "".join([LETTERS[op.kind] for op in ops]),
                "microbatches": [op.microbatch for op in ops],
                "gaps": [round(a - b, 3) for a, b in zip(starts, [0, *ends], strict=False)],
                "durations": [round(b - a, 3) for a, b in zip(starts, ends, strict=True)],
                "stages": timeline.list_op_stages(i),
                "idle": [
                    [bubble.cause.value, scale(bubble.start), scale(bubble.end)]
                    for bubble in (timeline.bubbles[i] if timeline.bubbles else ())
                ],
                "flight": [[scale(time), now] for time, now in curve],
                "peak": max((now for _, now in curve), default=0),
                "limit": timeline.limits[i] if timeline.limits else None,
            }
        )
    messages = [
        (each.link, each.forward, each.microbatch, scale(each.sent), scale(each.arrived))
        for each in timeline.messages
    ]
    crossing, links = [], []
    for link in sorted({each[0] for each in messages}):
        mine = [(forward, sent, at) for of, forward, _, sent, at in messages if of == link]
        if placement:
            low, high = placement[link], placement[link + 1]
            crossing += [
                ((low, high) if ahead else (high, low)) + (sent, at) for ahead, sent, at in mine
            ]
        else:
            links.append(pack_link(link, mine))
    return {
        "title": timeline.title,
        "span_us": scale(timeline.end),
        "stats": list(stats),
        "rows": rows,
        "links": links,
        "crossing": crossing,
        "placement": placement or list(range(len(rows))),
        "messages": messages,
    }
