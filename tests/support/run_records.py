"""Runs on this machine, without starting one: their jobs, records and traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from manifests import job_of

from pipemorph.detection.event_log import HealthEvent
from pipemorph.local.processes.supervision import AttemptOutcome, AttemptResult
from pipemorph.local.results.report import RunRecord
from pipemorph.protocol import (
    AdaptationRecord,
    IterationSample,
    RailHealth,
    RailProblem,
    RailsView,
    TransportFallback,
    TransportsView,
)
from pipemorph.spec.job_spec import PipeMorphJob

STAGES, MICROBATCHES = 2, 3


def job(**spec: Any) -> PipeMorphJob:
    base: dict[str, Any] = {
        "parallelism": {"stages": STAGES},
        "schedule": {"microbatches": MICROBATCHES},
        "trainer": {"module": "m", "iterations": 40},
    }
    return job_of(base | spec, "j")


def emulated(**spec: Any) -> PipeMorphJob:
    times = {"forward": 1.0, "backwardInput": 1.0, "backwardWeight": 1.0}
    emulation = {"stageTimes": [times], "messageBytes": 1 << 18, "standsForBytes": 1 << 24}
    return job(emulation=emulation, **spec)


def sample(index: int, *, plan_version: int = 0) -> IterationSample:
    return IterationSample(
        index=index, seconds=1.5, loss=2.25, plan_version=plan_version, bubble_fraction=0.125
    )


def record(**fields: Any) -> AdaptationRecord:
    values: dict[str, Any] = {
        "plan_version": 1,
        "kind": "adapt",
        "detected_at": 100.0,
        "detected_at_iteration": 5,
        "detectable_at": 4,
        "applied_at_iteration": 6,
        "reason": "link 0 is slow",
        "links": [{"link": 0, "health": "slow", "delay": 0.03, "replica": 0}],
        "warmup_before": [2, 1],
        "warmup_after": [3, 1],
        "routes": ["delegated"],
        "predicted_seconds_before": 2.0,
        "predicted_seconds_after": 1.0,
    }
    return AdaptationRecord(**values | fields)


def run_record(of: PipeMorphJob, iterations: int = 8) -> RunRecord:
    run = RunRecord(of, 1.0)
    attempt = run.begin_attempt(2.0)
    ending = AttemptResult(AttemptOutcome.COMPLETED)
    attempt.record_result(ending, 3.0)
    run.record_results(ending, [sample(i) for i in range(iterations)], [record()])
    return run


def write_trace(folder: Path, iterations: int, *, ranks: int = STAGES) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        with (folder / f"ops-rank{rank}.jsonl").open("a") as file:
            for index in range(iterations):
                ops = [["F", m, m * 0.1, m * 0.1 + 0.05] for m in range(MICROBATCHES)]
                ops += [["BW", m, 0.5 + m * 0.1, 0.55 + m * 0.1] for m in range(MICROBATCHES)]
                line = {
                    "rank": rank,
                    "stage": rank % STAGES,
                    "replica": rank // STAGES,
                    "iteration": index,
                    "plan_version": 0,
                    "origin": 1000.0 + index,
                    "ops": ops,
                    "waits": [],
                }
                file.write(json.dumps(line) + "\n")


RAILS = RailsView(
    health=RailHealth.FAULTY,
    ports=2,
    faulty_count=1,
    faulty=(RailProblem(1, 0, "mlx5_0", 1, "DOWN", "is DOWN"),),
)
FALLEN = TransportFallback(2, 0, "forward", "rdma", "tcp", 1, "mlx5_0 port 1: port error")
TRANSPORTS = TransportsView(
    links=("gloo", "gloo", "tcp"), fallen_count=1, fallen=(FALLEN,), fallbacks=1
)
HAPPENED = HealthEvent(7, 1.0, 5, "link 2 of replica 0 fell back from rdma to tcp")
