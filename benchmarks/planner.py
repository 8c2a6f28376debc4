"""Distance of plans to the optimum, and time to plan.

One command: ``python benchmarks/planner.py [--json FILE]``. Two minutes on one core; only the
planner runs. ``--quick`` takes seconds, and checks that the benchmark works.

1. Distance to the proven optimum on the problems of ``planner_problems.py`` (270: S 2–8, N 6–24;
   stages alike, uneven, several slow links; no in-flight cap, 2S, S+2), for this planner, the
   paper's algorithm, zero-bubble and 1F1B. The optima are in ``planner_facts.json``.
2. CPU time to plan, from S=8, N=32 to S=64, N=256, on the same kinds of problems and for the same
   planners, and its growth with S·N. If a plan does not reach the bound, as with several slow links
   under a cap, the search uses its whole effort: that is the slowest case.
3. Proven gaps of larger problems with unknown optima: S=16 and 32, N=3S, op times of several models
   mixed, 4 to 8 slow links, no cap, 2S, S+2 and S. The gap is the distance of our plan to the tight
   lower bound, as printed by ``pipemorph plan``; a second column has the distance to the quick
   bound, with which the planner itself begins. ``--large`` prints only these.

Exits 1 if a promise of docs/benchmarks.md does not hold.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from goals import finish_benchmark, make_parser
from planner_problems import (
    CAPS,
    FACTS,
    LARGE_CAPS,
    LARGE_PER_KIND,
    LARGE_STAGES,
    SEED,
    SHAPES,
    ProblemCase,
    harder_problems,
    hash_problem,
    large_problem,
    load_facts,
    problem_set,
    sized_problem,
)

from pipemorph.planning import Policy, Problem, plan, validate
from pipemorph.planning.simulation import execution
from pipemorph.planning.simulation.execution import (
    Costs,
    DispatchRules,
    choose_paper_warmup,
    compute_lower_bound,
    compute_tight_lower_bound,
)

SIZES = ((8, 32), (16, 64), (32, 128), (64, 256))
REPETITIONS = {8: 15, 16: 9, 32: 5, 64: 5}
"""Timed problems per size, shape and cap for our planner."""
OTHERS_REPETITIONS = 3
"""Limit of timed problems for the other planners."""
HARDER_REPETITIONS = {8: 5, 64: 2}
PROMISED_GAPS = {"none": (0.01, 0.05), "capped": (0.05, 1.0)}
"""Mean and worst distance to the optimum, in percent."""
PROMISED_PROOF = {"S+2": (2.0, 4.0)}
"""Mean and worst distance to the tight lower bound of large problems, in percent."""
PROMISED_MS = {(8, 32): 40.0, (64, 256): 150.0}


def plan_like_paper(problem: Problem) -> float:
    codes, makespan = execution.schedule_online(
        Costs.from_problem(problem),
        DispatchRules.from_problem(problem, choose_paper_warmup(problem)),
    )
    # The schedule is validated, as in plan for every policy.
    validate(
        execution.decode_schedule(codes, problem.microbatches), problem.list_in_flight_limits()
    )
    return makespan


PLANNERS: dict[str, Callable[[Problem], float]] = {
    "pipemorph": lambda problem: plan(problem, Policy.PIPEMORPH).makespan,
    "paper": plan_like_paper,
    "zero-bubble": lambda problem: plan(problem, Policy.ZERO_BUBBLE).makespan,
    "1f1b": lambda problem: plan(problem, Policy.ONE_F_ONE_B).makespan,
}
"""Functions from a problem to the makespan of its plan, milliseconds."""


def measure_gaps(cases: list[ProblemCase], facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Percent above the best known makespan, by problem and planner; True if ours was certified."""
    found = []
    for case in cases:
        fact = facts.get(case.key)
        if fact is None or fact["digest"] != hash_problem(case.problem):
            sys.exit(f"{FACTS.name} has no current entry for {case.key}")
        optimum = fact["optimum"]
        planned = plan(case.problem)
        found.append(
            {
                "key": case.key,
                "shape": case.shape,
                "cap": case.cap,
                "proven": fact["proven"],
                "certified": planned.gap == 0,
                "gaps": {
                    name: max(0.0, 100 * (planner(case.problem) / optimum - 1))
                    for name, planner in PLANNERS.items()
                },
            }
        )
    return found


def summarize_gaps(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and worst gap in percent and the share at the optimum, per planner."""
    planners = {}
    for planner in rows[0]["gaps"]:
        values = [row["gaps"][planner] for row in rows]
        planners[planner] = {
            "mean": statistics.mean(values),
            "worst": max(values),
            "at_optimum": 100 * sum(value < 1e-6 for value in values) / len(values),
        }
    return {
        "problems": len(rows),
        "proven": sum(row["proven"] for row in rows),
        "certified": 100 * sum(row["certified"] for row in rows) / len(rows),
        "planners": planners,
    }


def measure_planning_times(
    sizes: tuple[tuple[int, int], ...], repetitions: dict[int, int]
) -> list[dict[str, Any]]:
    """CPU milliseconds of a plan: medians, so that other load hardly matters."""
    found = []
    for stages, microbatches in sizes:
        for shape in SHAPES:
            for cap in CAPS:
                taken: dict[str, list[float]] = {name: [] for name in PLANNERS}
                above = []
                for k in range(repetitions[stages]):
                    problem = sized_problem(shape, cap, stages, microbatches, k)
                    for name, planner in PLANNERS.items():
                        if name != "pipemorph" and k >= OTHERS_REPETITIONS:
                            continue
                        began = time.process_time()
                        makespan = planner(problem)
                        taken[name].append(1e3 * (time.process_time() - began))
                        if name == "pipemorph":
                            above.append(
                                100 * max(0.0, makespan / compute_lower_bound(problem) - 1)
                            )
                found.append(
                    {
                        "stages": stages,
                        "microbatches": microbatches,
                        "shape": shape,
                        "cap": cap,
                        "ms": {name: statistics.median(values) for name, values in taken.items()},
                        "worst_ms": max(taken["pipemorph"]),
                        "worst_gap_to_bound": max(above),
                    }
                )
    return found


def measure_harder_times(sizes: tuple[tuple[int, int], ...]) -> list[dict[str, Any]]:
    """CPU milliseconds of our plans for problems with more choices, medians."""
    found = []
    for stages, microbatches in sizes:
        taken: dict[str, list[float]] = {}
        for k in range(HARDER_REPETITIONS.get(stages, 0)):
            for what, problem in harder_problems(stages, microbatches, k).items():
                began = time.process_time()
                plan(problem)
                taken.setdefault(what, []).append(1e3 * (time.process_time() - began))
        found += [
            {
                "stages": stages,
                "microbatches": microbatches,
                "what": what,
                "ms": statistics.median(values),
            }
            for what, values in taken.items()
        ]
    return found


def measure_large_gaps(per_kind: int) -> list[dict[str, Any]]:
    """Percent above the tight and the quick bound, and CPU milliseconds of the plan and of the
    tight bound, which is computed after the plan."""
    found = []
    for stages in LARGE_STAGES:
        for cap in LARGE_CAPS:
            for k in range(per_kind):
                problem = large_problem(stages, cap, k)
                began = time.process_time()
                planned = plan(problem)
                planned_at = time.process_time()
                bound = compute_tight_lower_bound(problem, planned.makespan)
                proven_at = time.process_time()
                found.append(
                    {
                        "stages": stages,
                        "cap": cap,
                        "gap": 100 * max(0.0, planned.makespan / bound - 1),
                        "quick_gap": 100
                        * max(0.0, planned.makespan / compute_lower_bound(problem) - 1),
                        "ms": 1e3 * (planned_at - began),
                        "bound_ms": 1e3 * (proven_at - planned_at),
                    }
                )
    return found


def fit_growth(rows: list[dict[str, Any]]) -> float:
    """Exponent of our time over S·N, by least squares on logarithms."""
    points = [
        (math.log(r["stages"] * r["microbatches"]), math.log(r["ms"]["pipemorph"])) for r in rows
    ]
    x_mean, y_mean = (statistics.mean(axis) for axis in zip(*points, strict=True))
    over = sum((x - x_mean) * (y - y_mean) for x, y in points)
    return over / sum((x - x_mean) ** 2 for x, _ in points)


def check_goals(found: dict[str, Any]) -> list[tuple[str, bool]]:
    goals = []
    for name, (mean, worst) in PROMISED_GAPS.items():
        ours = found["gaps"][name]["planners"]["pipemorph"]
        cap = "no cap" if name == "none" else "with a cap"
        text = (
            f"{cap}: {ours['mean']:.3f}% mean (at most {mean}),"
            f" {ours['worst']:.2f}% worst (at most {worst})"
        )
        goals.append((text, ours["mean"] <= mean and ours["worst"] <= worst))
    for cap, (mean, worst) in PROMISED_PROOF.items():
        values = [row["gap"] for row in found["large"] if row["cap"] == cap]
        text = (
            f"large, cap {cap}: {statistics.mean(values):.2f}% mean proven (at most {mean}),"
            f" {max(values):.2f}% worst (at most {worst})"
        )
        goals.append((text, statistics.mean(values) <= mean and max(values) <= worst))
    for (stages, microbatches), most in PROMISED_MS.items():
        timed = [
            row
            for row in found["times"]
            if (row["stages"], row["microbatches"]) == (stages, microbatches)
        ]
        if not timed:  # with --quick
            continue
        slowest = max(timed, key=lambda row: row["ms"]["pipemorph"])
        took = slowest["ms"]["pipemorph"]
        text = (
            f"S={stages}, N={microbatches}: {took:.1f} ms median (at most {most:.0f}),"
            f" {slowest['shape']}, cap {slowest['cap']}"
        )
        goals.append((text, took <= most))
    return goals


def print_report(found: dict[str, Any]) -> None:
    everything = found["gaps"]["all"]
    print(
        f"Distance to the optimum, {everything['problems']} seeded problems,"
        f" {everything['proven']} optima proven (seed {SEED})\n"
    )
    print("| problems | planner | mean | worst | at the optimum |")
    print("|---|---|---|---|---|")
    for name, group in found["gaps"].items():
        for planner, d in group["planners"].items():
            print(
                f"| {name} ({group['problems']}) | {planner} | {d['mean']:.3f}% |"
                f" {d['worst']:.2f}% | {d['at_optimum']:.0f}% |"
            )
    print(
        f"\n{everything['certified']:.0f}% of our plans are certified by the lower bound alone."
        "\n\nTime to plan on one core, CPU"
        f" (load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)\n"
    )
    others = [name for name in PLANNERS if name != "pipemorph"]
    print(
        f"| S | N | stages | cap | pipemorph, median | worst | {' | '.join(others)} |"
        " above the quick bound, worst |"
    )
    print("|---|---|---|---|---|---|" + "---|" * len(others) + "---|")
    for row in found["times"]:
        print(
            f"| {row['stages']} | {row['microbatches']} | {row['shape']} | {row['cap']} |"
            f" {row['ms']['pipemorph']:.1f} ms | {row['worst_ms']:.1f} ms |"
            + "".join(f" {row['ms'][name]:.1f} ms |" for name in others)
            + f" {row['worst_gap_to_bound']:.2f}% |"
        )
    print(
        f"\nTime grows with (S·N)^{found['growth']:.2f}. The other planners' times are medians"
        " too.\n\nSeveral slow links, cap S+2, and what else there is to plan for:\n"
    )
    print("| S | N | | pipemorph, median |\n|---|---|---|---|")
    for row in found["harder"]:
        print(f"| {row['stages']} | {row['microbatches']} | {row['what']} | {row['ms']:.1f} ms |")
    print()
    print_large_report(found["large"])


def print_large_report(rows: list[dict[str, Any]]) -> None:
    each = len(rows) // len(LARGE_STAGES) // len(LARGE_CAPS)
    print(
        f"Large problems, {each} of each kind: what our plans are above the lower bound at most\n"
        "\n| S | N | cap | tight bound, mean | worst | proven shortest | quick bound, mean | worst"
        " | plan, median | tight bound, median |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for stages in (*LARGE_STAGES, None):
        for cap in LARGE_CAPS:
            of = [row for row in rows if row["cap"] == cap and stages in (row["stages"], None)]
            gaps, quick = ([row[name] for row in of] for name in ("gap", "quick_gap"))
            print(
                f"| {stages or 'all'} | {3 * stages if stages else ''} | {cap} |"
                f" {statistics.mean(gaps):.2f}% | {max(gaps):.2f}% |"
                f" {sum(gap < 1e-6 for gap in gaps)} of {len(gaps)} |"
                f" {statistics.mean(quick):.2f}% | {max(quick):.2f}% |"
                f" {statistics.median(row['ms'] for row in of):.0f} ms |"
                f" {statistics.median(row['bound_ms'] for row in of):.0f} ms |"
            )


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a problem of each kind and the two smallest sizes only: seconds",
    )
    parser.add_argument(
        "--large", action="store_true", help="only the proven gaps of the larger problems"
    )
    args = parser.parse_args()
    if args.large:
        print_large_report(measure_large_gaps(LARGE_PER_KIND))
        return 0
    cases, sizes, repetitions, large = problem_set(), SIZES, REPETITIONS, LARGE_PER_KIND
    if args.quick:
        cases, sizes, large = problem_set(1), SIZES[:2], 1
        repetitions = dict.fromkeys(REPETITIONS, OTHERS_REPETITIONS)
    rows = measure_gaps(cases, load_facts()["problems"])
    times = measure_planning_times(sizes, repetitions)
    groups = {"all": rows, "none": [], "capped": []}
    for row in rows:
        groups["none" if row["cap"] == "none" else "capped"].append(row)
    for cap in CAPS:
        groups.setdefault(cap, [row for row in rows if row["cap"] == cap])
    for shape in SHAPES:
        groups[shape] = [row for row in rows if row["shape"] == shape]
    found = {
        "gaps": {name: summarize_gaps(chosen) for name, chosen in groups.items()},
        "times": times,
        "harder": measure_harder_times(sizes),
        "large": measure_large_gaps(large),
        "growth": fit_growth(times),
    }
    print_report(found)
    print()
    return 0 if finish_benchmark(check_goals(found), args.json, found | {"problems": rows}) else 1


if __name__ == "__main__":
    sys.exit(main())
