"""``pipemorph run`` with slow links in different replicas. Emulated."""

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


def test_all_replicas_run_the_plan_for_the_slow_links_of_each(tmp_path: Path) -> None:
    report = report_of(tmp_path, job())
    ran = [each for each in report["adaptations"] if each["applied_at_iteration"] is not None]
    assert ran, f"no plan was changed\n{report['said']}{report['adaptations']}"
    record = ran[-1]
    assert record["routes"] == ["delegated", "direct", "delegated"]
    assert record["kind"] == "adapt"

    # What ran is what is reported, in both replicas, under one version.
    trace = json.loads((tmp_path / "out" / "timeline.json").read_text())["traceEvents"]
    versions = {i["index"]: i["plan_version"] for i in report["iterations"]}
    last = max(index for index, version in versions.items() if version == record["plan_version"])
    for replica in range(REPLICAS):
        found = [warmup(trace, replica, stage, last) for stage in range(STAGES)]
        assert found == record["warmup_after"], replica
