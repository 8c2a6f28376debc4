"""Draws the two pictures of the README. Nothing is measured here.

``docs/run.svg``: iteration times of the run on a GPU, as ``docs/cuda.md`` has them.
``docs/slow-link.svg``: one simulated iteration before and after adapting to a slow link.

Run ``python docs/slow_link_picture.py`` to draw them again.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from pipemorph.planning import Policy, Route, StageTimes, build_problem, plan, simulate
from pipemorph.views.pictures import (
    ChartLine,
    ChartSpan,
    Drawing,
    Timeline,
    draw_chart,
    draw_steps,
)

DOCS = Path(__file__).parent
STAGES, MICROBATCHES, DELAY_MS = 4, 12, 60.0
PHASES = (0, 10, 30, 40)
"""Iterations of the run on a GPU at which its link changes."""


def draw_schedules() -> Drawing:
    """One iteration with a slow last link, by both plans."""
    times = [StageTimes(forward=10, backward_input=10, backward_weight=10)] * STAGES
    link = STAGES - 2
    delays = [DELAY_MS if i == link else 0.0 for i in range(STAGES - 1)]
    drawn = []
    for policy, route, title in (
        (Policy.ZERO_BUBBLE, Route.DIRECT, "zero-bubble, planned for a fast network"),
        (Policy.PIPEMORPH, Route.DELEGATED, "pipemorph, adapted: the engine carries the messages"),
    ):
        routes = [route if i == link else Route.DIRECT for i in range(STAGES - 1)]
        problem = build_problem(MICROBATCHES, times, delays, routes)
        ran = simulate(plan(problem, policy).schedule, problem)
        about = f"{title}: {ran.makespan:.0f} ms, idle {ran.bubble_fraction:.0%}"
        drawn.append((ran.makespan, Timeline.from_simulation(ran, problem, title=about)))
    (before, _), (after, _) = drawn
    head = f"One iteration (simulated), last link {DELAY_MS:.0f} ms slower"
    return draw_steps(
        f"{head}: {before / after:.1f}× faster with PipeMorph",
        [each for _, each in drawn],
        width=900,
    )


def read_measured() -> dict[str, list[int]]:
    """Policy → milliseconds of an iteration in each phase, from the table in ``docs/cuda.md``."""
    text = (DOCS / "cuda.md").read_text()
    row = re.compile(r"^ *\| ([\w-]+) \| (\d+) ms \| (\d+) ms \| (\d+) ms \|$", re.MULTILINE)
    return {name: [int(each) for each in times] for name, *times in row.findall(text)}


def draw_run(measured: dict[str, list[int]]) -> Drawing:
    """Iteration times of the run on a GPU."""
    ours, theirs = measured["pipemorph"][1], measured["zero-bubble"][1]
    lines = [
        ChartLine(
            f"{name}: {times[1]} ms with the slow link",
            [(edge, ms) for (edge, _), ms in zip(pairwise(PHASES), times, strict=True)]
            + [(PHASES[-1], times[-1])],
            stepped=True,
        )
        for name, times in sorted(measured.items())
    ]
    return draw_chart(
        f"Training on a GPU with a slow link: {theirs / ours:.1f}× faster with PipeMorph",
        lines, x_name="iteration", y_name="milliseconds per iteration",
        spans=[ChartSpan(*PHASES[1:3], f"last link {DELAY_MS:.0f} ms slower")],
    )  # fmt: skip


def main() -> None:
    (DOCS / "run.svg").write_text(draw_run(read_measured()).to_svg())
    (DOCS / "slow-link.svg").write_text(draw_schedules().to_svg())


if __name__ == "__main__":
    main()
