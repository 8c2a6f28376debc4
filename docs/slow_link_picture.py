"""Draws docs/slow-link.svg: one simulated iteration before and after adapting to a slow link.

Run ``python docs/slow_link_picture.py`` to draw it again. Nothing here is measured.
"""

from __future__ import annotations

from pathlib import Path

from pipemorph.planning import (
    Policy,
    Route,
    Simulation,
    StageTimes,
    plan,
    problem_for,
    simulate,
)

STAGES, MICROBATCHES, DELAY_MS = 4, 12, 60.0
COLOURS = {"F": "#3b6fb6", "B": "#e08a3c", "W": "#9ccf8e"}
NAMES = {"F": "forward", "B": "backward, input", "W": "backward, weights"}
LEFT, ROW, GAP, SCALE = 62, 20, 4, 0.74
PANEL = STAGES * (ROW + GAP) + 48


def panels() -> list[tuple[str, Simulation]]:
    times = [StageTimes(forward=10, backward_input=10, backward_weight=10)] * STAGES
    delays = [0.0] * (STAGES - 2) + [DELAY_MS]
    direct = problem_for(MICROBATCHES, times, delays, [Route.DIRECT] * (STAGES - 1))
    moved = [Route.DIRECT] * (STAGES - 2) + [Route.DELEGATED]
    delegated = problem_for(MICROBATCHES, times, delays, moved)
    before = simulate(plan(direct, Policy.ZERO_BUBBLE).schedule, direct)
    after = simulate(plan(delegated, Policy.PIPEMORPH).schedule, delegated)
    return [("zero-bubble, planned for a fast network", before), ("pipemorph, adapted", after)]


def draw(drawn: list[tuple[str, Simulation]]) -> str:
    span = max(s.makespan for _, s in drawn)
    width, height = LEFT + span * SCALE + 16, len(drawn) * PANEL + 30
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width:.0f}" height="{height}" fill="white"/>',
    ]
    for index, (title, simulation) in enumerate(drawn):
        top = index * PANEL + 24
        bubble = f"{simulation.bubble_fraction:.0%}"
        out.append(
            f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{title}: '
            f"{simulation.makespan:.0f} ms simulated, bubble {bubble}</text>"
        )
        for stage, ops in enumerate(simulation.stages):
            y = top + stage * (ROW + GAP)
            out.append(f'<text x="6" y="{y + 14}">stage {stage}</text>')
            out.append(
                f'<rect x="{LEFT}" y="{y}" width="{simulation.makespan * SCALE:.1f}" '
                f'height="{ROW}" fill="#f1e6e6"/>'
            )
            for op in ops:
                out.append(
                    f'<rect x="{LEFT + op.start * SCALE:.1f}" y="{y}" height="{ROW}" '
                    f'width="{(op.end - op.start) * SCALE:.1f}" stroke="white" '
                    f'stroke-width="0.6" fill="{COLOURS[op.kind.value]}"/>'
                )
    y, x = len(drawn) * PANEL + 8, LEFT
    for kind, name in NAMES.items():
        out.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS[kind]}"/>')
        out.append(f'<text x="{x + 17}" y="{y + 11}">{kind} {name}</text>')
        x += 150
    return "\n".join([*out, "</svg>"]) + "\n"


if __name__ == "__main__":
    target = Path(__file__).with_name("slow-link.svg")
    target.write_text(draw(panels()))
    print(target)
