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


def test_the_plan_changes_for_a_slow_link(tmp_path: Path) -> None:
    static = run(tmp_path / "static", adapts=False)
    adaptive = run(tmp_path / "adaptive", adapts=True)
    changes = [each for each in adaptive["adaptations"] if each["kind"] == "adapt"]
    assert changes, adaptive["said"]
    assert any("link 0 is slow by" in each["reason"] for each in changes), adaptive["said"]

    assert of(adaptive, "loss") == of(static, "loss")
    assert median(of(adaptive, "seconds")[-5:]) < 0.9 * median(of(static, "seconds")[-5:])


def test_by_default_a_job_goes_on_while_a_message_is_late(tmp_path: Path) -> None:
    """It is guided from the start, so that the fault costs less before anybody knows of it."""
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


def test_other_stages_go_on_while_a_message_is_late(tmp_path: Path) -> None:
    """With a given warm-up, and without a new plan."""
    warmup = [6, 5, 3, 1]
    static = run(tmp_path / "static", adapts=False, warmup=warmup)
    guided = run(tmp_path / "guided", adapts=False, warmup=warmup, dispatch="guided")
    assert of(guided, "loss") == of(static, "loss")
    now, before = (median(of(each, "seconds")[-5:]) for each in (guided, static))
    assert now < 0.9 * before
