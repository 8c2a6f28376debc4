"""Draws the two pictures of the README. Nothing is measured here.

``docs/run.svg``: iteration times of the run on a GPU, as ``docs/cuda.md`` has them.
``docs/slow-link.svg``: one simulated iteration before and after adapting to a slow link.

Run ``python docs/slow_link_picture.py`` to draw them again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pipemorph.planning import (
    Policy,
    Route,
    Simulation,
    StageTimes,
    build_problem,
    plan,
    simulate,
)

DOCS = Path(__file__).parent
STAGES, MICROBATCHES, DELAY_MS = 4, 12, 60.0
COLOURS = {"F": "#3b6fb6", "B": "#e08a3c", "W": "#9ccf8e"}
NAMES = {"F": "forward", "B": "backward, input", "W": "backward, weights"}
LEFT, ROW, GAP, SCALE = 62, 20, 4, 0.74
PANEL = STAGES * (ROW + GAP) + 44
STYLE = (
    "<style>.paper{fill:#fff}.idle{fill:#f1e6e6}.line{stroke:#8c959f}text{fill:#1f2328}"
    "@media(prefers-color-scheme:dark){.paper{fill:#0d1117}.idle{fill:#3d2f33}"
    ".line{stroke:#6e7681}text{fill:#e6edf3}}</style>"
)
SLOW, OURS = "#c2410c", "#3b6fb6"
PHASES = (("undisturbed", 0, 10), ("last link 60 ms slower", 10, 30), ("undisturbed again", 30, 40))
"""Parts of the run: caption, first iteration, and the one after the last."""


def simulations() -> list[tuple[str, Simulation]]:
    times = [StageTimes(forward=10, backward_input=10, backward_weight=10)] * STAGES
    delays = [0.0] * (STAGES - 2) + [DELAY_MS]
    direct = build_problem(MICROBATCHES, times, delays, [Route.DIRECT] * (STAGES - 1))
    moved = [Route.DIRECT] * (STAGES - 2) + [Route.DELEGATED]
    delegated = build_problem(MICROBATCHES, times, delays, moved)
    before = simulate(plan(direct, Policy.ZERO_BUBBLE).schedule, direct)
    after = simulate(plan(delegated, Policy.PIPEMORPH).schedule, delegated)
    return [("zero-bubble, planned for a fast network", before), ("pipemorph, adapted", after)]


def framed(width: float, height: float, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'font-family="sans-serif" font-size="12">{STYLE}',
            f'<rect width="{width:.0f}" height="{height:.0f}" class="paper"/>',
            *parts,
            "</svg>\n",
        ]
    )


def words(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{text}</text>'


def line(x: float, y: float, to_x: float, to_y: float, more: str = 'class="line"') -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" {more}/>'


def draw_schedules(drawn: list[tuple[str, Simulation]]) -> str:
    span = max(s.makespan for _, s in drawn)
    width, height = LEFT + span * SCALE + 16, len(drawn) * PANEL + 44
    out = []
    for index, (title, simulation) in enumerate(drawn):
        top = index * PANEL + 24
        what = f"{title}: {simulation.makespan:.0f} ms, bubble {simulation.bubble_fraction:.0%}"
        out.append(words(LEFT, top - 8, what, 'font-weight="bold"'))
        for stage, ops in enumerate(simulation.stages):
            y = top + stage * (ROW + GAP)
            out.append(words(6, y + 14, f"stage {stage}"))
            out.append(
                f'<rect x="{LEFT}" y="{y}" width="{simulation.makespan * SCALE:.1f}" '
                f'height="{ROW}" class="idle"/>'
            )
            for op in ops:
                out.append(
                    f'<rect x="{LEFT + op.start * SCALE:.1f}" y="{y}" height="{ROW}" '
                    f'width="{(op.end - op.start) * SCALE - 0.6:.1f}" '
                    f'fill="{COLOURS[op.kind.value]}"/>'
                )
        y = top + (STAGES - 1) * (ROW + GAP) - GAP / 2
        end = LEFT + simulation.makespan * SCALE
        out.append(line(LEFT, y, end, y, f'stroke="{SLOW}" stroke-dasharray="4 3"'))
    axis = len(drawn) * PANEL - 14
    out.append(line(LEFT, axis, LEFT + span * SCALE, axis))
    for at in range(0, int(span) + 1, 200):
        out.append(words(LEFT + at * SCALE, axis + 14, f"{at} ms", 'text-anchor="middle"'))
    x = LEFT
    for kind, name in NAMES.items():
        out.append(
            f'<rect x="{x}" y="{height - 20:.0f}" width="12" height="12" fill="{COLOURS[kind]}"/>'
        )
        out.append(words(x + 17, height - 9, f"{kind} {name}"))
        x += 156
    out.append(line(x, height - 13, x + 26, height - 13, f'stroke="{SLOW}" stroke-dasharray="4 3"'))
    out.append(words(x + 32, height - 9, f"link with {DELAY_MS:.0f} ms of delay"))
    return framed(width, height, out)


def measured() -> dict[str, list[int]]:
    """Policy → milliseconds of an iteration in each phase, from the table in ``docs/cuda.md``."""
    text = (DOCS / "cuda.md").read_text()
    row = re.compile(r"^ *\| ([\w-]+) \| (\d+) ms \| (\d+) ms \| (\d+) ms \|$", re.MULTILINE)
    return {name: [int(each) for each in times] for name, *times in row.findall(text)}


def draw_run(times: dict[str, list[int]]) -> str:
    width, height, left, right, top, bottom = 774, 220, 52, 24, 40, 176
    last = PHASES[-1][2]
    highest = max(map(max, times.values())) * 1.1

    def x(iteration: float) -> float:
        return left + iteration / last * (width - left - right)

    def y(milliseconds: float) -> float:
        return bottom - milliseconds / highest * (bottom - top)

    out = [words(left, 16, "Time of an iteration, ms", 'font-weight="bold"')]
    _, slow_from, slow_to = PHASES[1]
    out.append(
        f'<rect x="{x(slow_from):.1f}" y="{top - 14}" width="{x(slow_to) - x(slow_from):.1f}" '
        f'height="{bottom - top + 14}" class="idle"/>'
    )
    for caption, begin, end in PHASES:
        out.append(words(x((begin + end) / 2), top - 2, caption, 'text-anchor="middle"'))
    for at in range(0, int(highest), 200):
        out.append(line(left, y(at), x(last), y(at)))
        out.append(words(left - 8, y(at) + 4, str(at), 'text-anchor="end"'))
    for at in range(0, last + 1, 10):
        out.append(words(x(at), bottom + 16, str(at), 'text-anchor="middle"'))
    out.append(words(x(last / 2), bottom + 34, "iteration", 'text-anchor="middle"'))
    for name, phases in times.items():
        colour = OURS if name == "pipemorph" else SLOW
        points = " ".join(
            f"{x(edge):.1f},{y(ms):.1f}"
            for ms, (_, begin, end) in zip(phases, PHASES, strict=True)
            for edge in (begin, end)
        )
        out.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>'
        )
        middle = (slow_from + slow_to) / 2
        label = f"{name}: {phases[1]} ms"
        out.append(words(x(middle), y(phases[1]) + 16, label, 'text-anchor="middle"'))
    return framed(width, height, out)


def main() -> None:
    (DOCS / "run.svg").write_text(draw_run(measured()))
    (DOCS / "slow-link.svg").write_text(draw_schedules(simulations()))


if __name__ == "__main__":
    main()
