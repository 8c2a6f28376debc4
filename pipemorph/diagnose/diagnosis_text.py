"""Diagnosis as text: ten lines, then tables."""

from __future__ import annotations

from collections.abc import Sequence

from pipemorph.diagnose.adapting import format_prediction, format_seconds
from pipemorph.diagnose.analysis.causes import LEAST_SHARE
from pipemorph.diagnose.analysis.remedies import AT_BEST, Remedy
from pipemorph.diagnose.diagnosis import Diagnosis
from pipemorph.terminal import RenderableType, make_table

MOST_CAUSES = 4
"""Causes in the lines above the tables."""
MOST_ROWS = 12
"""Rows of a table."""


def format_diagnosis(diagnosis: Diagnosis) -> list[RenderableType]:
    """Lines, then tables."""
    return [*_format_lines(diagnosis), *_format_tables(diagnosis)]


def _format_lines(diagnosis: Diagnosis) -> list[str]:
    slowdown, steps = diagnosis.slowdown, diagnosis.steps
    count = len(steps.steps)
    gaps = slowdown.span - slowdown.recorded
    without = (
        f", {format_seconds(slowdown.recorded)} of it without gaps between ops"
        if gaps > LEAST_SHARE * slowdown.span
        else ""
    )
    lines = [
        f"{diagnosis.format_name}: {count} step{'s' * (count != 1)} of {steps.replicas} ×"
        f" {steps.stages} workers (replicas × stages), {steps.microbatches} microbatches",
        f"a step takes {format_seconds(slowdown.span)}{without}",
        _format_slowdown(diagnosis),
        f"bubble {diagnosis.bubble_fraction:.1%}; {diagnosis.ideal_bubble_fraction:.1%} with equal"
        " stages and no transfers",
    ]
    causes = diagnosis.causes[:MOST_CAUSES]
    lines += [
        f"{word}: {cause.cause}, {cause.where}{format_since(cause.since)}:"
        f" {format_seconds(cause.seconds)} of each step, {cause.share:.1%}"
        for word, cause in zip(("mostly", *["also"] * MOST_CAUSES), causes, strict=False)
    ]
    if not causes:
        lines.append("no cause costs 1% of a step")
    best = choose_best(diagnosis.advice)
    for word, remedy in zip(("do this", "or"), best, strict=False):
        lines.append(
            f"{word}: {format_change(remedy)}: {format_prediction(remedy)} time per sample"
        )
    if not best:
        lines.append("no change that can be predicted saves 1% of a step")
    if diagnosis.change:
        lines.append(f"with PipeMorph: {diagnosis.change}")
    return lines


def _format_slowdown(diagnosis: Diagnosis) -> str:
    """Line on what unequal ops cost, and where, as the study of stragglers defines it."""
    slowdown = diagnosis.slowdown
    if slowdown.m_s is None or slowdown.m_w is None or slowdown.total <= 1:
        return "nothing is lost to unequal ops of one type (slowdown S = 1)"
    slowest = ", ".join(diagnosis.steps.workers[w].key for w in slowdown.slowest[:3])
    # No "-0%".
    of_stage, of_workers = (round(share, 2) + 0.0 for share in (slowdown.m_s, slowdown.m_w))
    return (
        f"with equal ops of each type {format_seconds(slowdown.ideal)}: slowdown S ="
        f" {slowdown.total:.3f}; of that the last stage has {of_stage:.0%} (M_S), the slowest"
        f" workers ({slowest}) {of_workers:.0%} (M_W)"
    )


def choose_best(advice: Sequence[Remedy]) -> list[Remedy]:
    """Best remedy that needs nothing more, then one under a condition if it saves more."""
    firm = [remedy for remedy in advice if remedy.condition in ("", AT_BEST)]
    return list(dict.fromkeys([*firm[:1], *advice[:1]]))


def format_change(remedy: Remedy) -> str:
    """Change with its condition."""
    if not remedy.condition:
        return remedy.change
    return f"{remedy.change} ({'' if remedy.condition == AT_BEST else 'if '}{remedy.condition})"


def format_since(step: int | None) -> str:
    return "" if step is None else f", since step {step}"


def _format_tables(diagnosis: Diagnosis) -> list[RenderableType]:
    slowdown = diagnosis.slowdown
    tables: list[RenderableType] = []
    if diagnosis.advice:
        advised = [
            (f"{remedy.gain:.1%}", format_seconds(remedy.predicted_seconds), format_change(remedy))
            for remedy in diagnosis.advice[:MOST_ROWS]
        ]
        tables += ["", make_table(("gain", "step", "change"), advised, right=("gain", "step"))]
    for name, values in (
        ("op type", slowdown.by_optype),
        ("stage", slowdown.by_stage),
        ("dp_rank", slowdown.by_dp_rank),
        ("worker", slowdown.by_worker),
    ):
        rows = sorted(values.items(), key=lambda row: -row[1])[:MOST_ROWS]
        tables.append("")
        tables.append(
            make_table(
                (name, "slowdown"), [(str(k), f"{v:.4f}") for k, v in rows], right=("slowdown",)
            )
        )
    if diagnosis.notes:
        tables.append("")
        tables.append("What cannot be said from this trace, and what was omitted:")
        tables += [f"- {note}" for note in diagnosis.notes]
    return tables
