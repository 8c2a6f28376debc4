"""A run whose replicas are slow to reduce the gradients of one stage names that stage."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_runs import manifest, report_of

pytestmark = [pytest.mark.times, pytest.mark.timeout(300)]

GRADIENT_BYTES, FROM, ITERATIONS = 1 << 15, 8, 16
SECONDS = 0.6
"""Duration of a reduction under the fault: far longer than a stall of this machine."""


def test_the_stage_is_named(tmp_path: Path) -> None:
    times = {"forward": 5.0, "backwardInput": 5.0, "backwardWeight": 5.0}
    rate = GRADIENT_BYTES * 8 / SECONDS / 1e6
    job = manifest(
        parallelism={"stages": 2, "replicas": 2},
        schedule={"microbatches": 4, "policy": "pipemorph"},
        trainer={"module": "pipemorph_trainer.examples.emulated", "iterations": ITERATIONS},
        emulation={"stageTimes": [times], "messageBytes": 1024, "gradientBytes": GRADIENT_BYTES},
        faults=[{"reduction": 1, "replica": 1, "bandwidthMbps": rate, "fromIteration": FROM}],
    )
    report = report_of(tmp_path, job)
    assert "gradient reduction of stage 1 is slow: " in report["said"]
    (slow,) = [each for each in report["reductions"] if each["stage"] == 1]
    assert slow["slow"] is True
    assert SECONDS <= slow["seconds"] < 1.5 * SECONDS
    assert slow["exposed"] > 0.9 * SECONDS, "nothing but the last W hides it"
    assert slow["bytes"] == GRADIENT_BYTES
    held = [each for each in report["faults"] if each["buckets_held"]]
    assert [each["stage"] for each in held] == [1, 1], "both replicas wait"
    assert {each["first_iteration"] for each in held} == {FROM}
    (event,) = [e for e in report["events"] if "reduction of stage 1" in e["text"]]
    assert event["iteration"] >= FROM
