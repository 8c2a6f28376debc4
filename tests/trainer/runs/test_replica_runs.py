"""``pipemorph run`` with slow links in different replicas, each with its own plan. Emulated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from local_runs import TIMES, manifest, report_of

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

STAGES, REPLICAS, ITERATIONS, SLOW_FROM = 4, 2, 18, 5
SLOW = {0: 0, 1: 2}
"""Link that is slow, by replica."""
DELAY_MS = 30.0


def job() -> dict[str, Any]:
    faults = [
        {"link": link, "replica": replica, "fromIteration": SLOW_FROM, "delayMs": DELAY_MS}
        for replica, link in SLOW.items()
    ]
    return manifest(
        parallelism={"stages": STAGES, "replicas": REPLICAS},
        schedule={"microbatches": 12, "policy": "pipemorph", "inFlightLimit": 6},
        emulation={
            "stageTimes": [TIMES],
            "messageBytes": 16384,
            "standsForBytes": 1 << 24,
            "gradientBytes": 4096,
        },
        trainer={"module": "pipemorph_trainer.examples.emulated", "iterations": ITERATIONS},
        faults=faults,
    )


def warmup(events: list[dict[str, Any]], replica: int, stage: int, iteration: int) -> int:
    """Forwards that a rank ran in an iteration before its first backward."""
    ran = sorted(
        (event["ts"], event["cat"])
        for event in events
        if event["ph"] == "X"
        and (event["pid"], event["tid"]) == (replica, stage)
        and event["args"]["iteration"] == iteration
    )
    kinds = [kind for _, kind in ran]
    return kinds.index("B")


def test_each_replica_runs_the_plan_for_its_own_slow_link(tmp_path: Path) -> None:
    report = report_of(tmp_path, job())
    own = [
        record
        for record in report["adaptations"]
        if record["own_plans"] and record["applied_at_iteration"] is not None
    ]
    assert own, f"no replica had a plan of its own\n{report['said']}{report['adaptations']}"
    record = own[-1]
    (other,) = record["own_plans"]
    (replica,) = other["replicas"]
    assert other["text"].startswith(f"replica {replica}: own plan for link {SLOW[replica]} +")
    assert other["text"] in record["reason"]
    assert other["routes"][SLOW[replica]] == "delegated"
    assert other["routes"][SLOW[1 - replica]] == "direct"
    assert record["routes"] == ["delegated", "direct", "delegated"], "of any replica"
    assert record["kind"] == "adapt"

    # What ran is what is told, in both replicas, under one version.
    trace = json.loads((tmp_path / "out" / "timeline.json").read_text())["traceEvents"]
    versions = {i["index"]: i["plan_version"] for i in report["iterations"]}
    last = max(index for index, version in versions.items() if version == record["plan_version"])
    for place, expected in ((replica, other["warmup"]), (1 - replica, record["warmup_after"])):
        assert [warmup(trace, place, s, last) for s in range(STAGES)] == expected, place
    assert other["warmup"] != record["warmup_after"]
