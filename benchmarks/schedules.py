"""Schedules in simulation: the paper's example, a slow last link, and how good plans are.

One command: ``python benchmarks/schedules.py [--json FILE] [--problems N]``. Nothing runs but
the planner and the simulator; ``emulated.py`` measures the same schedules in the executor.

1. The paper's example (S=4, N=12, 10/10/10 ms): a zero-bubble plan under a delay it was not
   made for, and the plan made for it.
2. A 14B-like profile (S=8, N=24, 10/10.5/5.5 ms) with 0, 30 and 60 ms on the last link.
3. Distance to the lower bound, which no schedule can beat, on a seeded set of problems, for
   the paper's algorithm and for this planner, with and without in-flight caps.
4. Time to plan.

Exits 1 if a promise of docs/benchmarks.md is not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipemorph.planning import (
    Link,
    Policy,
    Problem,
    Route,
    StageTimes,
    link_on,
    lower_bound,
    plan,
    simulate,
)
from pipemorph.planning.policies.classic import paper_warmup
from pipemorph.planning.simulation.core import online
from pipemorph.planning.simulation.costs import Costs
from pipemorph.planning.simulation.online import Rules

DELAYS_MS = (0.0, 30.0, 60.0)
LLM_14B = StageTimes(forward=10, backward_input=10.5, backward_weight=5.5)
# (name, policy, route of every link, one queue for both directions)
VARIANTS = (
    ("1F1B, queue per direction", Policy.ONE_F_ONE_B, Route.DIRECT, False),
    ("zero-bubble, queue per pair of ranks", Policy.ZERO_BUBBLE, Route.DIRECT, True),
    ("zero-bubble, queue per direction", Policy.ZERO_BUBBLE, Route.DIRECT, False),
    ("zero-bubble, delegated", Policy.ZERO_BUBBLE, Route.DELEGATED, False),
    ("pipemorph, delegated", Policy.PIPEMORPH, Route.DELEGATED, False),
)
CAPS: dict[str, Callable[[int], int | None]] = {
    "none": lambda stages: None,
    "2S": lambda stages: 2 * stages,
    "S+2": lambda stages: stages + 2,
    "S": lambda stages: stages,
}
# Stages, microbatches, caps, repetitions.
SIZES = ((8, 32, None, 15), (8, 32, 16, 15), (8, 32, 10, 15), (64, 256, None, 3), (64, 256, 66, 3))


def paper_example() -> dict[str, float]:
    """Makespans in milliseconds."""
    ten = StageTimes(forward=10, backward_input=10, backward_weight=10)
    problem = Problem(microbatches=12, stages=(ten,) * 4, links=(Link(),) * 3)
    fixed = plan(problem.with_warmup([7, 5, 3, 1]), Policy.ZERO_BUBBLE).schedule
    found = {
        f"zero-bubble 7-5-3-1, {delay} ms on link 0": simulate(
            fixed, problem.with_delays([delay, 0, 0])
        ).makespan
        for delay in (0, 10, 20)
    }
    slow = problem.with_delays([20, 0, 0])
    found["pipemorph, 20 ms on link 0"] = plan(slow).makespan
    found["lower bound, 20 ms on link 0"] = lower_bound(slow)
    return found


def slow_last_link() -> dict[str, list[float]]:
    """Iteration time in milliseconds per variant and delay."""
    found = {}
    for name, policy, route, half_duplex in VARIANTS:
        found[name] = [
            plan(
                Problem(
                    microbatches=24,
                    stages=(LLM_14B,) * 8,
                    links=tuple(
                        link_on(route, c, half_duplex=half_duplex) for c in (*[0.0] * 6, delay)
                    ),
                ),
                policy,
            ).makespan
            for delay in DELAYS_MS
        ]
    return found


def random_problem(rng: random.Random, cap: Callable[[int], int | None]) -> Problem:
    """S 2–8, N 6–24; stages alike or 0.7–1.3× of each other; one or two slow links."""
    stages, microbatches = rng.randint(2, 8), rng.randint(6, 24)
    uneven, slow_links = rng.choice(((False, 1), (True, 1), (False, 2)))
    base = (10.0, rng.choice((10.0, 10.5, 12.0, 20.0)), rng.choice((5.5, 8.0, 10.0)))
    delays = [0.0] * (stages - 1)
    for _ in range(slow_links):
        delays[rng.randrange(stages - 1)] = rng.choice((10.0, 20.0, 30.0, 60.0))
    times = []
    for _ in range(stages):
        f, b, w = (round(t * (rng.uniform(0.7, 1.3) if uneven else 1), 1) for t in base)
        times.append(
            StageTimes(forward=f, backward_input=b, backward_weight=w, in_flight_limit=cap(stages))
        )
    links = tuple(Link(delay=delay) for delay in delays)
    return Problem(microbatches=microbatches, stages=tuple(times), links=links)


def distance(problems: int) -> dict[str, dict[str, dict[str, float]]]:
    """Per cap and planner: mean and worst distance to the bound in percent, share at it."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, cap in CAPS.items():
        rng = random.Random(1)
        gaps: dict[str, list[float]] = {"paper": [], "pipemorph": []}
        for _ in range(problems):
            problem = random_problem(rng, cap)
            bound = lower_bound(problem)
            paper = online(Costs.of(problem), Rules.of(problem, paper_warmup(problem)))
            gaps["paper"].append(100 * (max(map(max, paper.end)) / bound - 1))
            gaps["pipemorph"].append(100 * (plan(problem).makespan / bound - 1))
        found[name] = {
            planner: {
                "mean": statistics.mean(values),
                "worst": max(values),
                "at_bound": 100 * sum(v < 1e-6 for v in values) / problems,
            }
            for planner, values in gaps.items()
        }
    return found


def planning_time() -> list[dict[str, Any]]:
    """CPU time to plan in milliseconds: medians, so that a busy machine does not count."""
    found = []
    for stages, microbatches, cap, times in SIZES:
        taken, gaps = [], []
        for k in range(times):
            delays = [0.0] * (stages - 1)
            delays[-1 - k % (stages - 1)] = (0.0, 30.0, 60.0)[k % 3]
            problem = Problem(
                microbatches=microbatches,
                stages=(LLM_14B.model_copy(update={"in_flight_limit": cap}),) * stages,
                links=tuple(Link(delay=delay) for delay in delays),
            )
            began = time.process_time()
            planned = plan(problem)
            taken.append(1e3 * (time.process_time() - began))
            gaps.append(100 * (planned.makespan / planned.lower_bound - 1))
        found.append(
            {
                "stages": stages,
                "microbatches": microbatches,
                "cap": cap,
                "median_ms": statistics.median(taken),
                "worst_gap": max(gaps),
            }
        )
    return found


def promises(found: dict[str, Any]) -> list[tuple[str, bool]]:
    example, slow = found["paper_example"], found["slow_last_link"]
    adapted = slow["pipemorph, delegated"]
    baseline = slow["zero-bubble, queue per pair of ranks"]
    sizes = found["planning_time"]
    return [
        (
            "390 / 400 / 440 ms as planned for no delay, 410 ms planned for it, the bound",
            list(example.values()) == [390, 400, 440, 410, 410],
        ),
        (
            f"pipemorph at 60 ms: {adapted[2] / adapted[0]:.2f}× undisturbed (at most 1.15)",
            adapted[2] <= 1.15 * adapted[0],
        ),
        (
            f"pipemorph at 60 ms: {baseline[2] / adapted[2]:.2f}× faster than zero-bubble with a"
            " queue per pair of ranks (at least 3)",
            baseline[2] >= 3 * adapted[2],
        ),
        (
            "never worse on average than the paper's algorithm",
            all(d["pipemorph"]["mean"] <= d["paper"]["mean"] for d in found["distance"].values()),
        ),
        (
            f"planning at S=8, N=32: {sizes[0]['median_ms']:.1f} ms median (at most 10)",
            sizes[0]["median_ms"] <= 10,
        ),
        (
            f"planning at S=64, N=256: {sizes[3]['median_ms']:.0f} ms (at most 1000)",
            sizes[3]["median_ms"] <= 1000,
        ),
    ]


def show(found: dict[str, Any]) -> None:
    print("S=4, N=12, 10/10/10 ms")
    for name, value in found["paper_example"].items():
        print(f"  {name:34} {value:5.0f} ms")
    print("\nS=8, N=24, 10/10.5/5.5 ms, delay on the last link")
    header = "".join(f" {f'{delay:.0f} ms':>8}" for delay in DELAYS_MS)
    print(f"  {'':38}{header}  at {DELAYS_MS[-1]:.0f} ms")
    adapted = found["slow_last_link"]["pipemorph, delegated"][-1]
    for name, values in found["slow_last_link"].items():
        cells = "".join(f" {value:8.0f}" for value in values)
        slow_down, behind = values[-1] / values[0], values[-1] / adapted
        print(f"  {name:38}{cells}  {slow_down:.2f}× its own 0 ms, {behind:.2f}× pipemorph")
    print(f"\nDistance to the lower bound, {found['problems']} seeded problems per cap")
    print(f"  {'cap':5} {'planner':10} {'mean':>8} {'worst':>8} {'at bound':>9}")
    for cap, planners in found["distance"].items():
        for planner, d in planners.items():
            print(
                f"  {cap:5} {planner:10} {d['mean']:7.2f}% {d['worst']:7.2f}% {d['at_bound']:8.0f}%"
            )
    print(f"\nTime to plan (CPU; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)")
    for row in found["planning_time"]:
        print(
            f"  S={row['stages']:<3} N={row['microbatches']:<4} cap {row['cap'] or 'none':<5}"
            f" {row['median_ms']:8.1f} ms median, at most {row['worst_gap']:.2f}% above the bound"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures")
    parser.add_argument("--problems", type=int, default=200, help="per cap (default: 200)")
    args = parser.parse_args()
    found = {
        "problems": args.problems,
        "paper_example": paper_example(),
        "slow_last_link": slow_last_link(),
        "distance": distance(args.problems),
        "planning_time": planning_time(),
    }
    show(found)
    print()
    kept = promises(found)
    for text, holds in kept:
        print(f"{'ok ' if holds else 'NO '} {text}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(holds for _, holds in kept) else 1


if __name__ == "__main__":
    sys.exit(main())
