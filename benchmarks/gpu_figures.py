"""The simulator beside what the paper's authors measured on GPUs.

One command: ``python benchmarks/gpu_figures.py [--json FILE]``. Nothing runs but the planner and
the simulator. Measured are iteration times of the 14B model of "Attack of the Bubbles", 8 stages on
as many GPUs and 24 microbatches, with 0 to 60 ms on the last link, or 30 ms on two or three links:
the means of the last five iterations in the logs that the authors published with their code
(github.com/wutianyuan1/PipeMorph, ``experiments/increasing-delay`` and ``experiments/multiple``).

Simulated are schedules by the same rules under the op times of this model, without any cost of a
message but the delay. The one constant that is fitted is what an iteration takes beside its ops:
the measured time of undisturbed zero-bubble, less the simulated one. The last way is compared with
plans of this planner, which are not those that the authors' planner made.

Exits 1 if a promise of docs/benchmarks.md is not kept.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from goals import arguments, finish

from pipemorph.planning import Link, Policy, Problem, Route, StageTimes, link_on, plan, simulate

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


class Way(NamedTuple):
    name: str
    policy: Policy
    route: Route
    half_duplex: bool
    adapted: bool
    """The plan is made for the delays."""
    measured: tuple[int, ...]
    """Milliseconds, in the order of :data:`CONDITIONS`."""


WAYS = (
    Way("1F1B", Policy.ONE_F_ONE_B, Route.DIRECT, False, False,
        (873, 1082, 1331, 1580, 1832, 2108, 2334, 2106, 2186, 1626, 1687)),
    Way("zero-bubble, one queue per pair of GPUs", Policy.ZERO_BUBBLE, Route.DIRECT, True, False,
        (755, 1007, 1359, 1825, 2299, 2828, 3257, 2307, 2104, 1995, 2123)),
    Way("zero-bubble, slow links delegated", Policy.ZERO_BUBBLE, Route.DELEGATED, False, False,
        (755, 903, 1053, 1221, 1356, 1522, 1691, 1113, 1111, 1217, 1272)),
    Way("delegated and adapted", Policy.PIPEMORPH, Route.DELEGATED, False, True,
        (755, 834, 854, 876, 889, 877, 891, 898, 893, 880, 944)),
)  # fmt: skip
BASELINE = WAYS[1]


def simulated(way: Way, delays: dict[int, float]) -> float:
    """Milliseconds of one iteration without what it takes beside its ops."""
    unaware = Problem(
        microbatches=MICROBATCHES, stages=(TIMES,) * STAGES, links=(Link(),) * (STAGES - 1)
    )
    links = [
        link_on(
            way.route if link in delays else Route.DIRECT,
            delays.get(link, 0.0),
            half_duplex=way.half_duplex,
        )
        for link in range(STAGES - 1)
    ]
    real = unaware.model_copy(update={"links": tuple(links)})
    made = plan(real if way.adapted else unaware, way.policy)
    return simulate(made.schedule, real).makespan


def shown(delays: dict[int, float]) -> str:
    if not delays:
        return "none"
    names = ", ".join(map(str, delays))
    return f"link{'s' if len(delays) > 1 else ''} {names}: {next(iter(delays.values())):g} ms"


def promises(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """What docs/benchmarks.md says about these figures, and whether it holds."""
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
    parser = arguments(__doc__)
    args = parser.parse_args()
    beside = BASELINE.measured[0] - simulated(BASELINE, {})
    rows: list[dict[str, Any]] = []
    for way in WAYS:
        for delays, measured in zip(CONDITIONS, way.measured, strict=True):
            took = simulated(way, delays) + beside
            row = {"way": way.name, "delays": delays, "measured": measured, "simulated": took}
            rows.append(row | {"error": took / measured - 1})
    print(
        f"measured on GPUs by the paper's authors / simulated, ms; {beside:.0f} ms beside the ops"
    )
    print("\n| slow | " + " | ".join(way.name for way in WAYS) + " |")
    print("|---|" + "---|" * len(WAYS))
    for k, delays in enumerate(CONDITIONS):
        cells = [
            f"{row['measured']} / {row['simulated']:.0f} ({row['error']:+.1%})"
            for row in rows[k :: len(CONDITIONS)]
        ]
        print(f"| {shown(delays)} | " + " | ".join(cells) + " |")
    print()
    return 0 if finish(promises(rows), args.json, rows) else 1


if __name__ == "__main__":
    sys.exit(main())
