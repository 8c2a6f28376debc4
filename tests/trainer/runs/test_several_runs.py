"""A job with several stages per rank under ``pipemorph run``: its plan changes for a slow link."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest
from local_runs import manifest, report_of

pytestmark = [pytest.mark.times, pytest.mark.timeout(300)]

SLOW_FROM, ITERATIONS = 5, 16


def run(folder: Path, *, adapts: bool, delay_ms: int = 25, **schedule: Any) -> dict[str, Any]:
    op = {"forward": 6, "backwardInput": 6, "backwardWeight": 6}
    job = manifest(
        parallelism={"stages": 4, "stagesPerRank": 2, "stagePlacement": "interleaved"},
        schedule={"microbatches": 8, "policy": "pipemorph", **schedule},
        adaptation={"enabled": adapts},
        emulation={"stageTimes": [op], "messageBytes": 4096},
        faults=[{"link": 0, "fromIteration": SLOW_FROM, "delayMs": delay_ms}],
        trainer={"module": "pipemorph_trainer.examples.emulated", "iterations": ITERATIONS},
    )
    return report_of(folder, job)


def of(report: dict[str, Any], what: str) -> list[float]:
    return [each[what] for each in report["iterations"]]


def test_by_default_a_job_goes_on_while_a_message_is_late(tmp_path: Path) -> None:
    """The job is guided from the start, so that the fault costs less before it is detected."""
    slow = {"microbatches": 16, "delay_ms": 60}
    static = run(tmp_path / "static", adapts=False, dispatch="static", **slow)
    auto = run(tmp_path / "auto", adapts=True, **slow)
    changes = (each for each in auto["adaptations"] if "link 0 is slow by" in each["reason"])
    change = next(changes, None)
    assert change is not None, auto["said"]
    assert change["measured"] > 0.5 * change["promised"] > 0.05, auto["said"]

    assert of(auto, "loss") == of(static, "loss")
    assert of(auto, "seconds")[SLOW_FROM] < 0.8 * of(static, "seconds")[SLOW_FROM]
    assert median(of(auto, "seconds")[-5:]) < 0.6 * median(of(static, "seconds")[-5:])
