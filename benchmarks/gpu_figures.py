"""Compares the simulator with the paper authors' measurements on GPUs.

One command: ``python benchmarks/gpu_figures.py [--json FILE]``. Only the planner and the simulator
run. The measurements are iteration times of the 14B model of "Attack of the Bubbles", 8 stages on
as many GPUs and 24 microbatches, with 0 to 60 ms on the last link, or 30 ms on two or three links:
the means of the last five iterations in the logs that the authors published with their code
(github.com/wutianyuan1/PipeMorph, ``experiments/increasing-delay`` and ``experiments/multiple``).

The simulated schedules follow the same rules under the op times of this model; messages cost only
their delay. One constant is fitted, the time of an iteration outside its ops: the measured time of
undisturbed zero-bubble, less the simulated one. The last way is compared with plans of this
planner, which differ from those of the authors' planner.

Exits 1 if a promise of docs/benchmarks.md does not hold.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from goals import finish_benchmark, make_parser

from pipemorph.planning import Link, Policy, Problem, Route, StageTimes, build_link, plan, simulate

TIMES = StageTimes(forward=10, backward_input=10.5, backward_weight=5.5)
STAGES, MICROBATCHES = 8, 24
LAST = STAGES - 2
SEVERAL = ((0, 1), (0, 2), (0, LAST), (0, 3, LAST))
"""Slow links of the second experiment, each by 30 ms."""
CONDITIONS = (
    *({LAST: float(delay)} if delay else {} for delay in range(0, 70, 10)),
    *(dict.fromkeys(links, 30.0) for links in SEVERAL),
)
"""Milliseconds of delay by link."""


class MeasuredWay(NamedTuple):
    name: str
    policy: Policy
    route: Route
    half_duplex: bool
    adapted: bool
    """True if the plan is made for the delays."""
    measured: tuple[int, ...]
    """Milliseconds, in the order of :data:`CONDITIONS`."""


WAYS = (
    MeasuredWay("1F1B", Policy.ONE_F_ONE_B, Route.DIRECT, False, False,
        (873, 1082, 1331, 1580, 1832, 2108, 2334, 2106, 2186, 1626, 1687)),
    MeasuredWay("zero-bubble, one queue per pair of GPUs", Policy.ZERO_BUBBLE, Route.DIRECT,
        True, False, (755, 1007, 1359, 1825, 2299, 2828, 3257, 2307, 2104, 1995, 2123)),
    MeasuredWay("zero-bubble, slow links delegated", Policy.ZERO_BUBBLE, Route.DELEGATED,
        False, False, (755, 903, 1053, 1221, 1356, 1522, 1691, 1113, 1111, 1217, 1272)),
    MeasuredWay("delegated and adapted", Policy.PIPEMORPH, Route.DELEGATED, False, True,
        (755, 834, 854, 876, 889, 877, 891, 898, 893, 880, 944)),
)  # fmt: skip
BASELINE = WAYS[1]


def simulate_way(way: MeasuredWay, delays: dict[int, float]) -> float:
    """Milliseconds of an iteration without the time outside its ops."""
    unaware = Problem(
        microbatches=MICROBATCHES, stages=(TIMES,) * STAGES, links=(Link(),) * (STAGES - 1)
    )
    links = [
        build_link(
            way.route if link in delays else Route.DIRECT,
            delays.get(link, 0.0),
            half_duplex=way.half_duplex,
        )
        for link in range(STAGES - 1)
    ]
    real = unaware.model_copy(update={"links": tuple(links)})
    made = plan(real if way.adapted else unaware, way.policy)
    return simulate(made.schedule, real).makespan


def format_row(delays: dict[int, float]) -> str:
    if not delays:
        return "none"
    names = ", ".join(map(str, delays))
    return f"link{'s' if len(delays) > 1 else ''} {names}: {next(iter(delays.values())):g} ms"


def check_goals(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """Claims of docs/benchmarks.md about these figures, and their results."""
    one = [row for row in rows if len(row["delays"]) <= 1]
    plain = max(abs(row["error"]) for row in one if row["way"] == WAYS[0].name)
    long = [row for row in one if max(row["delays"].values(), default=0.0) >= 20]
    others = [row["error"] for row in long if row["way"] != WAYS[0].name]
    growth = {
        row["way"]: (row["measured"], row["simulated"])
        for row in one
        if row["delays"] == {LAST: 60.0}
    }
    ratios = [a / b for a, b in zip(growth[BASELINE.name], growth[WAYS[3].name], strict=True)]
    return [
        (f"1F1B, one slow link: {plain:.1%} apart at most (3%)", plain <= 0.03),
        (
            f"the others, one link slow by 20 ms or more: {min(others):+.1%} to {max(others):+.1%}"
            " (-13% to 0)",
            min(others) >= -0.13 and max(others) <= 0,
        ),
        (
            f"adapting against zero-bubble at 60 ms: {ratios[0]:.2f}× measured,"
            f" {ratios[1]:.2f}× simulated (within 10%)",
            abs(ratios[1] / ratios[0] - 1) <= 0.1,
        ),
    ]


def main() -> int:
    parser = make_parser(__doc__)
    args = parser.parse_args()
    outside = BASELINE.measured[0] - simulate_way(BASELINE, {})
    rows: list[dict[str, Any]] = []
    for way in WAYS:
        for delays, measured in zip(CONDITIONS, way.measured, strict=True):
            took = simulate_way(way, delays) + outside
            row = {"way": way.name, "delays": delays, "measured": measured, "simulated": took}
            rows.append(row | {"error": took / measured - 1})
    print(
        f"measured on GPUs by the paper's authors / simulated, ms; {outside:.0f} ms outside the ops"
    )
    print("\n| slow | " + " | ".join(way.name for way in WAYS) + " |")
    print("|---|" + "---|" * len(WAYS))
    for k, delays in enumerate(CONDITIONS):
        cells = [
            f"{row['measured']} / {row['simulated']:.0f} ({row['error']:+.1%})"
            for row in rows[k :: len(CONDITIONS)]
        ]
        print(f"| {format_row(delays)} | " + " | ".join(cells) + " |")
    print()
    return 0 if finish_benchmark(check_goals(rows), args.json, rows) else 1


if __name__ == "__main__":
    sys.exit(main())
