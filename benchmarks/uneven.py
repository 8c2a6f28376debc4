"""Gain of an order of microbatches that differ in cost, and of moving them between replicas.

    python benchmarks/uneven.py [--data DIR] [--output text|json] [--json FILE]

Simulated. Each iteration is that of its slowest replica, in several ways:

- as it ran: 1F1B, microbatches in the order in which they come;
- guided: guided dispatch of the plan for the mean times, with the memory of 1F1B;
- reordered: policy pipemorph with the costs known, with the memory of 1F1B;
- unlimited: the same without a limit of microbatches in flight;
- moved: microbatches moved between the replicas, and each replica runs the plan for equal ones in
  the order that a rank finds in an iteration, with the memory of 1F1B.

Behind reordered and unlimited is the lower bound of all schedules and orders of the microbatches.

Three jobs: varying lengths, 32 replicas × 2 stages × 8 microbatches whose op times have a
coefficient of variation of 0.4 (lognormal, one factor per microbatch); a slow worker, 4 × 4 × 32,
one stage of one replica 2.3 times slower; and, with --data, the recorded job straggler-ST of
"Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI '25): its
straggler-ST.timeline.json.gz in DIR, whose last stage is long. There every backward is divided
into halves. Transfers, and what follows the last backward, are left out.

Last, the reordered plan with static and with guided dispatch, where op times differ from what the
costs say: each by a normal error.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from goals import finish_benchmark, make_parser

from pipemorph.planning import (
    Dispatch,
    Link,
    Plan,
    Policy,
    Problem,
    Route,
    StageTimes,
    plan,
    predict,
)
from pipemorph.planning.search.microbatch_order import order_microbatches, with_microbatch_costs
from pipemorph.planning.simulation.execution import find_planned_waits

VARIATION = 0.4
SEEDS = range(5)
SLOWDOWN = 2.3
ERRORS = (0.0, 0.05, 0.1, 0.2)
"""Standard deviations of op times around those by cost."""
SHAPES = ((2, 8), (4, 8), (4, 16), (4, 32), (8, 32))
"""Stages and microbatches of a single replica whose microbatches vary."""
OP = 10.0
"""Time of each F, B and W of the drawn jobs, ms."""
STALLED = 20
"""Swaps without gain after which the deal of microbatches ends."""
Rows = list[list[float]]


class Replica(NamedTuple):
    """Stage times, ms, and costs of the microbatches: one row, or one per stage."""

    stages: tuple[StageTimes, ...]
    costs: tuple[tuple[float, ...], ...]

    @property
    def microbatches(self) -> int:
        return len(self.costs[0])

    def to_problem(self, *, limited: bool = True) -> Problem:
        """Problem with the memory of 1F1B, or without limits."""
        stages = [
            stage.model_copy(update={"in_flight_limit": len(self.stages) - i if limited else None})
            for i, stage in enumerate(self.stages)
        ]
        return Problem(
            microbatches=self.microbatches,
            stages=tuple(stages),
            links=(Link(),) * (len(stages) - 1),
            microbatch_costs=self.costs,
        )


class Times(NamedTuple):
    """Iteration of one or more replicas, ms: the longest."""

    ran: float
    guided: float
    reordered: float
    unlimited: float
    bound: float
    unlimited_bound: float

    @staticmethod
    def longest(each: Sequence[Times]) -> Times:
        return Times(*(max(column) for column in zip(*each, strict=True)))

    @staticmethod
    def mean(each: Sequence[Times]) -> Times:
        return Times(*(fmean(column) for column in zip(*each, strict=True)))


def make_stage(forward: float, backward: float) -> StageTimes:
    half = backward / 2
    return StageTimes(forward=forward, backward_input=half, backward_weight=half)


def draw_costs(rng: random.Random, count: int) -> tuple[float, ...]:
    """Lognormal factors with mean 1."""
    sigma = sqrt(log(1 + VARIATION**2))
    return tuple(exp(rng.gauss(-(sigma**2) / 2, sigma)) for _ in range(count))


def simulate_ways(replica: Replica) -> Times:
    problem = replica.to_problem()
    in_order = problem.with_microbatch_order(())
    mean = plan_mean_times(problem)
    limited, free = plan(problem), plan(replica.to_problem(limited=False))
    return Times(
        plan(problem, Policy.ONE_F_ONE_B).makespan,
        predict(mean.schedule, in_order, Dispatch.GUIDED, mean.waits),
        limited.makespan,
        free.makespan,
        limited.lower_bound,
        free.lower_bound,
    )


def plan_mean_times(problem: Problem) -> Plan:
    routes = [Route.DIRECT] * len(problem.links)
    return plan(problem.with_mean_costs()).to_plan(0, routes, Dispatch.GUIDED)


# --- microbatches moved between replicas --------------------------------------------------------


@cache
def _plan_equal(stages: tuple[StageTimes, ...], count: int) -> Plan:
    return plan_mean_times(Replica(stages, ((1.0,) * count,)).to_problem())


def predict_replica(stages: tuple[StageTimes, ...], costs: Sequence[float]) -> float:
    """Iteration of a replica with these microbatches, ms: the ops of the plan for equal ones, and
    the order of microbatches that a rank finds in an iteration."""
    if not costs:
        return 0.0
    planned = _plan_equal(stages, len(costs))
    problem = Replica(stages, (tuple(costs),)).to_problem()
    order = order_microbatches(problem, planned, costs, seconds=0.002)
    ordered = problem.with_microbatch_order(order)
    return predict(planned.schedule, ordered, planned.dispatch, planned.waits)


def deal_microbatches(replicas: Sequence[Replica]) -> tuple[float, list[int]]:
    """Iteration after the best deal found, ms, and the number of microbatches of each replica.

    The longest microbatch goes first, each to the replica that has the least to do with it. Then
    the slowest replica gives one to another, or exchanges one with it, as long as that helps.
    """
    rng = random.Random(0)
    stages = [replica.stages for replica in replicas]
    speed = [max(s.forward + s.backward_input + s.backward_weight for s in each) for each in stages]
    pool = sorted((cost for replica in replicas for cost in replica.costs[0]), reverse=True)
    hands: Rows = [[] for _ in replicas]
    for cost in pool:
        least = min(range(len(hands)), key=lambda r: speed[r] * (sum(hands[r]) + cost))
        hands[least].append(cost)
    took = [predict_replica(*each) for each in zip(stages, hands, strict=True)]
    stalled = 0
    while stalled < STALLED:
        slow = max(range(len(took)), key=took.__getitem__)
        fast = min(range(len(took)), key=took.__getitem__)
        if stalled:
            fast = rng.choice([r for r in range(len(took)) if r != slow])
        giver, taker = list(hands[slow]), list(hands[fast])
        given = giver.pop(rng.randrange(len(giver)))
        smaller = [cost for cost in taker if cost < given]
        if smaller and rng.random() < 0.7:
            back = rng.choice(smaller)
            taker.remove(back)
            giver.append(back)
        taker.append(given)
        both = predict_replica(stages[slow], giver), predict_replica(stages[fast], taker)
        if max(both) < took[slow]:
            hands[slow], hands[fast] = giver, taker
            took[slow], took[fast] = both
            stalled = 0
        else:
            stalled += 1
    return max(took), [len(hand) for hand in hands]


# --- the jobs -----------------------------------------------------------------------------------


def make_varying_job(seed: int) -> list[Replica]:
    """32 replicas × 2 stages × 8 microbatches of varying length."""
    rng, stages = random.Random(seed), (make_stage(OP, 2 * OP),) * 2
    return [Replica(stages, (draw_costs(rng, 8),)) for _ in range(32)]


def make_slow_worker_job() -> list[Replica]:
    """4 replicas × 4 stages × 32 microbatches; stage 1 of replica 0 is slow."""
    stages, costs = (make_stage(OP, 2 * OP),) * 4, ((1.0,) * 32,)
    slow = (stages[0], make_stage(SLOWDOWN * OP, 2 * SLOWDOWN * OP), *stages[2:])
    return [Replica(each, costs) for each in (slow, *[stages] * 3)]


def read_recorded_job(folder: Path) -> list[list[Replica]]:
    """Replicas of each recorded step of straggler-ST."""
    file = folder / "straggler-ST.timeline.json.gz"
    try:
        events = json.loads(gzip.decompress(file.read_bytes()))
    except (OSError, ValueError) as error:
        sys.exit(f"uneven.py: cannot read {file}: {error}")
    stage_of = {}
    for event in events:
        if event["name"] == "thread_name":
            stage = re.match(r"PP rank (\d+)", event["args"]["name"])
            stage_of[event["tid"]] = int(stage[1]) if stage else 0
    ops: dict[tuple[int, int], dict[tuple[str, int, int], float]] = defaultdict(dict)
    for event in events:
        if event["name"] in ("forward-compute", "backward-compute"):
            of = event["args"]
            key = (event["name"][0], stage_of[event["tid"]], of["mb_id"])
            ops[of["step"], event["pid"]][key] = event["dur"] / 1e3
    steps: dict[int, list[Replica]] = defaultdict(list)
    for (step, _), times in sorted(ops.items()):
        steps[step].append(_make_recorded_replica(times))
    return list(steps.values())


def _make_recorded_replica(times: dict[tuple[str, int, int], float]) -> Replica:
    count = 1 + max(m for *_, m in times)
    stages, costs = [], []
    for stage in range(1 + max(s for _, s, _ in times)):
        forward = fmean(times["f", stage, m] for m in range(count))
        backward = fmean(times["b", stage, m] for m in range(count))
        stages.append(make_stage(forward, backward))
        costs.append(
            tuple(
                (times["f", stage, m] + times["b", stage, m]) / (forward + backward)
                for m in range(count)
            )
        )
    return Replica(tuple(stages), tuple(costs))


def compare_dispatch(stages: int, count: int, error: float) -> tuple[float, float]:
    """Mean iterations, ms, of reordered plans with static and with guided dispatch."""
    found = []
    for seed in SEEDS:
        replica = Replica(
            (make_stage(OP, 2 * OP),) * stages, (draw_costs(random.Random(seed), count),)
        )
        planned = plan(replica.to_problem())
        ordered = replica.to_problem().with_microbatch_order(planned.microbatch_order)
        assert ordered.microbatch_costs is not None
        waits = find_planned_waits(planned.schedule, ordered)
        rng = random.Random(100 + seed)
        rows = [
            [cost * max(0.2, rng.gauss(1, error)) for cost in ordered.microbatch_costs[0]]
            for _ in range(stages)
        ]
        real = with_microbatch_costs(ordered, rows)
        found.append(
            (
                predict(planned.schedule, real),
                predict(planned.schedule, real, Dispatch.GUIDED, waits),
            )
        )
    return fmean(static for static, _ in found), fmean(guided for _, guided in found)


# --- report -------------------------------------------------------------------------------------


def format_row(name: str, times: Times, moved: float | None = None) -> str:
    def against(time: float) -> str:
        return f"{time:,.0f} ({times.ran / time:.2f}×)"

    cells = [
        f"{times.ran:,.0f}",
        against(times.guided),
        f"{against(times.reordered)} ≥ {times.bound:,.0f}",
        f"{against(times.unlimited)} ≥ {times.unlimited_bound:,.0f}",
        "" if moved is None else against(moved),
        f"{100 * (1 - times.reordered / times.guided):.1f} %",
    ]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of straggler-ST")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    args = parser.parse_args()
    found: dict[str, dict[str, object]] = {}
    lines, goals = [], []

    def add_job(name: str, times: Times, moved: float | None = None, **more: object) -> None:
        found[name] = {**times._asdict(), "moved": moved, **more}
        lines.append(format_row(name, times, moved))

    jobs = [make_varying_job(seed) for seed in SEEDS]
    varying = Times.mean([Times.longest(list(map(simulate_ways, job))) for job in jobs])
    deals = [deal_microbatches(job) for job in jobs]
    add_job("varying lengths, 32 × 2 × 8", varying, fmean(took for took, _ in deals))
    order, moved = varying.ran / varying.reordered, varying.ran / fmean(took for took, _ in deals)
    goals.append((f"varying lengths, reordered: {order:.2f}× (at least 1.10)", order >= 1.1))
    goals.append((f"varying lengths, moved: {moved:.2f}× (at least 1.42)", moved >= 1.42))

    job = make_slow_worker_job()
    slow = Times.longest(list(map(simulate_ways, job)))
    took, counts = deal_microbatches(job)
    add_job("slow worker, 4 × 4 × 32", slow, took, microbatches=counts)
    moved = slow.ran / took
    goals.append((f"slow worker, moved: {moved:.2f}× (at least 1.88)", moved >= 1.88))

    if args.data is not None:
        recorded = [
            Times.longest(list(map(simulate_ways, s))) for s in read_recorded_job(args.data)
        ]
        long_stage = Times.mean(recorded)
        add_job("recorded, long last stage, 2 × 4 × 4", long_stage)
        order = long_stage.ran / long_stage.unlimited
        goals.append((f"long last stage, reordered: {order:.2f}× (at least 1.27)", order >= 1.27))

    shapes = []
    for stages, count in SHAPES:
        equal = (make_stage(OP, 2 * OP),) * stages
        rows = [draw_costs(random.Random(seed), count) for seed in SEEDS]
        drawn = [simulate_ways(Replica(equal, (row,))) for row in rows]
        times = Times.mean(drawn)
        saved = 1 - times.reordered / times.guided
        add_job(f"one replica, {stages} × {count}", times, saved=saved)
        if stages > 2:
            shapes.append(saved)
    goals.append(
        (
            f"4 stages or more, reordered than guided: {100 * min(shapes):.1f} to"
            f" {100 * max(shapes):.1f} % shorter (at least 11.5)",
            min(shapes) >= 0.115,
        )
    )
    dispatch = {
        f"{stages} × {count}, error {error:.0%}": compare_dispatch(stages, count, error)
        for stages, count in SHAPES[2:]
        for error in ERRORS
    }
    found["dispatch of reordered plans"] = dict(dispatch)
    gains = [1 - guided / static for static, guided in dispatch.values()]
    goals.append(
        (
            f"reordered, guided dispatch: {100 * min(gains):.1f} to {100 * max(gains):.1f} %"
            " shorter than static (at most 1)",
            max(gains) <= 0.01,
        )
    )
    if args.output == "json":
        print(json.dumps(found, indent=1))
    else:
        print("ms per iteration, and how many times faster than as it ran\n")
        heads = "as it ran", "guided", "reordered", "unlimited", "moved", "reordered than guided"
        print(f"| job | {' | '.join(heads)} |\n{'|---' * (1 + len(heads))}|")
        print("\n".join(lines), end="\n\n")
        print(f"microbatches of the slow worker's replicas: {counts}\n")
        print("| reordered plan, errors of op times | static | guided |\n|---|---|---|")
        for name, (static, guided) in dispatch.items():
            print(f"| {name} | {static:,.0f} | {guided:,.0f} |")
        print()
    return 0 if finish_benchmark(goals, args.json, found) else 1


if __name__ == "__main__":
    sys.exit(main())
