"""Experiments on the planner itself: how good its plans are, and how long it takes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from statistics import fmean

from pipemorph.planning import Problem, plan
from pipemorph.reproduce.compared_figure import ComparedFigure, RunForm, compare
from pipemorph.reproduce.pipeline_simulation import SIMULATED_WAYS, build_slow_problem
from pipemorph.reproduce.published import Spread, load_model, load_published

MOST_DELAY, MOST_LINKS = 60.0, 3
"""Largest delay in milliseconds, and most slow links."""


def run_planner(form: RunForm) -> Iterator[ComparedFigure]:
    """Compare the distance of plans to the optimum, and the time to plan."""
    found, model = load_published()["planner"], load_model("14B")
    problems = [
        draw_problem(seed, found["microbatches"]) for seed in range(50 if form.full else 10)
    ]
    plans = [plan(problem, tight_bound=True) for problem in problems]
    gaps = [100 * each.gap for each in plans]
    times = [1e3 * each.planning_seconds for each in plans]
    case = f"{model.stages} stages, {found['microbatches']} microbatches, slow links at random"
    yield compare(
        case, "distance to the optimum, at most", found["gap_percent"],
        Spread(fmean(gaps), min(gaps), max(gaps)), unit="%", method="planned", limit=True,
    )  # fmt: skip
    yield compare(
        case, "time to plan", found["ms"], Spread(fmean(times), min(times), max(times)),
        method="planned", limit=True,
    )  # fmt: skip


def draw_problem(seed: int, microbatches: int) -> Problem:
    """Draw slow links for the 14B model."""
    model, rng = load_model("14B"), random.Random(f"planner {seed}")
    links = rng.sample(range(model.stages - 1), rng.randint(1, MOST_LINKS))
    delays = {link: rng.uniform(0, MOST_DELAY) for link in links}
    problem = build_slow_problem(model, SIMULATED_WAYS["adapted"], delays)
    return problem.model_copy(update={"microbatches": microbatches})
