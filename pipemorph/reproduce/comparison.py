"""Runs experiments, and collects their figures as JSON and as one self-contained HTML file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from pipemorph import __version__
from pipemorph.reproduce.compared_figure import TOLERANCE, ComparedFigure, RunForm
from pipemorph.reproduce.emulated_runs import FailedRunError
from pipemorph.reproduce.experiments.experiment_list import Experiment
from pipemorph.views.pictures.html import fill_template

DEFAULT_FORM = RunForm()


def run_experiments(
    experiments: Sequence[Experiment], form: RunForm = DEFAULT_FORM
) -> dict[str, Any]:
    """Run experiments. Returns the document that the page shows; a failed run ends only its
    own experiment, whose ``failure`` is what it printed."""
    found, rows = list[dict[str, Any]](), list[ComparedFigure]()
    for number, each in enumerate(experiments, 1):
        form.note(f"{number} of {len(experiments)}: {each.title}")
        document, its_rows = _run_experiment(each, form)
        found.append(document)
        rows += its_rows
    return {
        "version": __version__,
        "form": "full" if form.full else "short",
        "tolerance": TOLERANCE,
        "summary": summarize_rows(rows),
        "experiments": found,
    }


def _run_experiment(
    experiment: Experiment, form: RunForm
) -> tuple[dict[str, Any], list[ComparedFigure]]:
    began, failure = monotonic(), None
    try:
        rows = list(experiment.run(form))
    except FailedRunError as error:
        rows, failure = [], str(error)
    document = {
        "name": experiment.name,
        "title": experiment.title,
        "setting": experiment.setting,
        "source": experiment.source_text,
        "seconds": round(monotonic() - began, 1),
        "summary": "not run" if failure else summarize_rows(rows),
        "failure": failure,
        "rows": [row.to_json() for row in rows],
    }
    return document, rows


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


def render_reproduce_page(found: dict[str, Any]) -> str:
    """Page of the document of :func:`run_experiments`, from the template ``page.html``."""
    text = json.dumps(found, separators=(",", ":"), allow_nan=False)
    return fill_template(Path(__file__).with_name("page.html"), text)
