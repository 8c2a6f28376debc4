"""What plans of their own are worth to replicas with slow links of their own. Simulated.

One command: ``python benchmarks/replica_plans.py [--json FILE]``. Half a minute, one core.
``--quick`` takes seconds, and shows that it runs.

Random links of random replicas are 20, 40 or 60 ms late. The controller decides twice: as it does,
and as if all replicas had to run one plan for the worst delay of each link. Each replica then runs
its plan with its own delays, and the iteration takes as long as the slowest one. Stages take 11, 10
and 4 ms (F, B, W), as those of a 140B model on A800s.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from pipemorph.api.spec import JobSpec
from pipemorph.control import initial_plan
from pipemorph.control.decide.forecast import Forecast, Situation
from pipemorph.control.decide.replan import Replan, propose
from pipemorph.control.decide.replica_links import ReplicaLinks
from pipemorph.control.decide.truth import Evidence
from pipemorph.control.first_plan import planning_rules
from pipemorph.control.observed.stages import expected_times
from pipemorph.planning import Plan

OP = {"forward": 11.0, "backwardInput": 10.0, "backwardWeight": 4.0}
BASE = 0.001
LATE = (0.020, 0.040, 0.060)
SEED = 1


class Setup(NamedTuple):
    """``slow``: links that are late, each of one replica; ``cap``: in-flight limit."""

    stages: int
    microbatches: int
    replicas: int
    slow: int
    cap: int | None

    def __str__(self) -> str:
        names = {None: "none", 2 * self.stages: "2S", self.stages + 2: "S+2"}
        return (
            f"{self.stages} × {self.microbatches} | {self.replicas} | {self.slow}"
            f" | {names[self.cap]}"
        )

    def job(self) -> JobSpec:
        schedule: dict[str, Any] = {
            "microbatches": self.microbatches,
            "stageTimes": [OP] * self.stages,
        }
        if self.cap is not None:
            schedule["inFlightLimit"] = self.cap
        return JobSpec.model_validate(
            {
                "parallelism": {"stages": self.stages, "replicas": self.replicas},
                "schedule": schedule,
                "trainer": {"module": "benchmark", "iterations": 1_000_000},
            }
        )


SETUPS = [
    Setup(stages, microbatches, replicas, slow, cap)
    for stages, microbatches, replicas, slow in ((8, 24, 2, 2), (8, 24, 8, 4), (16, 64, 16, 8))
    for cap in (None, 2 * stages, stages + 2)
]


def situation(job: JobSpec, late: Mapping[int, Mapping[int, float]]) -> Situation:
    """What a controller knows when these links, by replica and link, are late."""
    count = job.parallelism.stages - 1

    def links(replicas: tuple[int, ...], own: Mapping[int, float]) -> ReplicaLinks:
        delays = tuple(own.get(link, 0.0) for link in range(count))
        wires = tuple(BASE + delay for delay in delays)
        slow = tuple(delay > 0 for delay in delays)
        return ReplicaLinks(replicas, wires, delays, slow, (False,) * count, (0.0,) * count)

    well = tuple(r for r in range(job.parallelism.replicas) if r not in late)
    own = [links((replica,), each) for replica, each in sorted(late.items())]
    own += [links(well, {})] if well else []
    worst = own[0]
    for each in own[1:]:
        worst = worst.joined(each)
    stages = expected_times(job)
    assert stages is not None
    return Situation(
        stages, worst.wire_times, worst.delays, worst.slow, worst.unknown, own=tuple(own)
    )


def decide(job: JobSpec, now: Situation) -> tuple[Plan, float]:
    """The plan that the controller changes to, and the seconds that it took."""
    first = initial_plan(job)
    asked = Replan(
        spec=planning_rules(job), cause="slow", situation=now, current=first, running=first,
        baseline=first, lost=False, remaining=1_000_000, change_seconds=0.0, evidence=Evidence(),
    )  # fmt: skip
    began = time.process_time()
    proposal = propose(asked)
    took = time.process_time() - began
    return proposal.chosen.plan if proposal.chosen is not None else first, took


def iteration(job: JobSpec, now: Situation, plan: Plan) -> float:
    """Seconds, of the slowest replica."""
    forecast = Forecast(job, now)
    return max(
        forecast.under(now.of([replica])).of(plan.of_replica(replica)).seconds
        for replica in range(job.parallelism.replicas)
    )


def compare(setup: Setup, count: int) -> dict[str, Any]:
    """Over ``count`` random faults: joint over own plans, and both over no fault."""
    job, rng = setup.job(), random.Random(f"{SEED} {setup}")
    well = iteration(job, situation(job, {}), initial_plan(job))
    rows = []
    for _ in range(count):
        late: dict[int, dict[int, float]] = {}
        places = [(r, k) for r in range(setup.replicas) for k in range(setup.stages - 1)]
        for replica, link in rng.sample(places, setup.slow):
            late.setdefault(replica, {})[link] = rng.choice(LATE)
        now = situation(job, late)
        own, seconds = decide(job, now)
        joint, _ = decide(job, replace(now, own=()))
        took = {name: iteration(job, now, plan) for name, plan in (("own", own), ("joint", joint))}
        rows.append(
            {
                "joint_over_own": 100 * (took["joint"] / took["own"] - 1),
                "own": 100 * (took["own"] / well - 1),
                "joint": 100 * (took["joint"] / well - 1),
                "plans": len(own.each),
                "ms": 1e3 * seconds,
            }
        )
    return {
        "setup": setup._asdict(),
        "mean": mean(row["joint_over_own"] for row in rows),
        "worst": max(row["joint_over_own"] for row in rows),
        "joint": mean(row["joint"] for row in rows),
        "own": mean(row["own"] for row in rows),
        "plans": max(row["plans"] for row in rows),
        "ms": median(row["ms"] for row in rows),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    print("| S × N | replicas | slow links | cap | joint over own: mean (worst)"
          " | over no fault: joint | own | plans, at most | ms to decide |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    found = []
    for setup in SETUPS[:2] if args.quick else SETUPS:
        row = compare(setup, 2 if args.quick else 24)
        found.append(row)
        print(
            f"| {setup} | {row['mean']:.1f} ({row['worst']:.1f}) % | {row['joint']:.0f} %"
            f" | {row['own']:.0f} % | {row['plans']} | {row['ms']:.0f} |",
            flush=True,
        )
    better = all(row["worst"] >= -0.1 and row["mean"] >= -0.01 for row in found)
    print(f"\n{'ok ' if better else 'NO '} own plans are not slower than one for all")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if better else 1


if __name__ == "__main__":
    raise SystemExit(main())
