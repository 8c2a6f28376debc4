"""Files of pictures that ``pipemorph diagnose --out`` writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipemorph.diagnose.diagnosis import Diagnosis
from pipemorph.diagnose.pictures.diagnosis_page import render_diagnosis_page
from pipemorph.diagnose.pictures.perfetto_trace import render_perfetto_trace
from pipemorph.diagnose.pictures.step_timeline import build_timelines
from pipemorph.errors import one_line

MOST_NAMED = 3
"""Traces that the title of the page names."""


def render_picture_files(diagnosis: Diagnosis, traces: Sequence[Path]) -> dict[str, str]:
    """Files by name: the page, and a Chrome trace of each timeline. ``traces``: what was read."""
    found = build_timelines(diagnosis)
    more = f" and {len(traces) - MOST_NAMED} more" if len(traces) > MOST_NAMED else ""
    title = (
        ", ".join(one_line(trace.name or str(trace), 80) for trace in traces[:MOST_NAMED]) + more
    )
    files = {"diagnosis.html": render_diagnosis_page(diagnosis, title, found)}
    for timeline in found.timelines:
        files[f"{timeline.name}.json"] = render_perfetto_trace(timeline)
    return files
