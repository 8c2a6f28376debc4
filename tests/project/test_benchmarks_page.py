"""docs/benchmarks.md: the table of schedules is what the planner and the simulator say."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipemorph.planning import Link, Policy, Problem, StageTimes, plan, simulate

PAGE = Path(__file__).resolve().parents[2] / "docs/benchmarks.md"
TEN = StageTimes(forward=10, backward_input=10, backward_weight=10)
FAST = Problem(microbatches=12, stages=(TEN,) * 4, links=(Link(),) * 3)
SLOW = FAST.with_delays([20, 0, 0])


def rows() -> dict[str, list[str]]:
    """First cell → the others, of the page's first table."""
    lines = PAGE.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| schedule |"))
    found = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        first, *others = [cell.strip() for cell in line.strip("|").split("|")]
        found[first] = others
    return found


def counts(values: tuple[int, ...]) -> str:
    return "-".join(map(str, values))


@pytest.mark.parametrize(
    ("row", "policy"),
    [
        ("`gpipe`", Policy.GPIPE),
        ("`1f1b`", Policy.ONE_F_ONE_B),
        ("`zero-bubble`", Policy.ZERO_BUBBLE),
        ("`pipemorph`, not adapted", Policy.PIPEMORPH),
    ],
)
def test_a_schedule_planned_for_a_fast_network(row: str, policy: Policy) -> None:
    planned = plan(FAST, policy)
    slow = simulate(planned.schedule, SLOW)
    assert rows()[row] == [
        counts(planned.schedule.count_warmup()),
        f"{100 * planned.simulation.bubble_fraction:.1f} %",
        f"{100 * slow.bubble_fraction:.1f} %",
        f"{planned.makespan:g} ms",
        f"{slow.makespan:g} ms",
        counts(planned.schedule.count_in_flight_peaks()),
    ]


def test_the_plan_made_for_the_delay() -> None:
    planned = plan(SLOW)
    assert rows()["`pipemorph`, planned for the delay"] == [
        counts(planned.schedule.count_warmup()),
        "",
        f"{100 * planned.simulation.bubble_fraction:.1f} %",
        "",
        f"{planned.makespan:g} ms",
        counts(planned.schedule.count_in_flight_peaks()),
    ]
    assert f"{plan(FAST).lower_bound:g} ms without the delay and" in PAGE.read_text()
    assert f"{planned.lower_bound:g} ms with it" in PAGE.read_text()


def test_every_row_is_tested() -> None:
    assert len(rows()) == 5
