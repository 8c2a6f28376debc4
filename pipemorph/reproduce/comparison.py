"""Runs experiments, and collects their figures as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

from pipemorph import __version__
from pipemorph.reproduce.compared_figure import TOLERANCE, ComparedFigure
from pipemorph.reproduce.experiments import Experiment


def run_experiments(
    experiments: Iterable[Experiment],
    *,
    full: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Run experiments. Returns the document that the page shows. ``full``: the long form.
    ``note`` receives a line per experiment that begins."""
    return {
        "version": __version__,
        "form": "full" if full else "short",
        "tolerance": TOLERANCE,
        "experiments": [_run_experiment(each, full, note) for each in experiments],
    }


def _run_experiment(
    experiment: Experiment, full: bool, note: Callable[[str], None]
) -> dict[str, Any]:
    note(f"{experiment.name}: {experiment.title}")
    began = monotonic()
    rows = list(experiment.run(full))
    return {
        "name": experiment.name,
        "title": experiment.title,
        "setting": experiment.setting,
        "source": experiment.source_text,
        "seconds": round(monotonic() - began, 1),
        "summary": summarize_rows(rows),
        "rows": [row.to_json() for row in rows],
    }


def summarize_rows(rows: list[ComparedFigure]) -> str:
    """Number of figures that agree, that have a reason, and that have none."""
    known = [row for row in rows if row.published is not None]
    agree = sum(row.agrees for row in known)
    reasons = sum(row.explained for row in known) - agree
    text = f"{agree} of {len(known)} published figures agree"
    if reasons:
        text += f", {reasons} differ{'s' * (reasons == 1)} for a reason that the figures show"
    if unknown := len(known) - agree - reasons:
        text += f", {unknown} differ{'s' * (unknown == 1)} for no reason found"
    return text
