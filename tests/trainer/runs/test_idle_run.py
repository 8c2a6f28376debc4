"""Runs with one cause of idle time each: the report names it first, after the plan's own bubble."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from local_runs import manifest, report_of

from pipemorph.protocol import IterationSample
from pipemorph.protocol.samples import average_idle_time

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

ITERATIONS = 16
SCRIPT = """
import time
from pipemorph_trainer import EmulatedStage, Pipeline, TrainerContext

context = TrainerContext.from_env()
stage = EmulatedStage.from_spec(context.job.spec, stage=context.coordinate().stage)
with Pipeline(stage, context=context) as pipe:
    for _ in range(context.iterations):
        time.sleep({load} if pipe.is_first else 0.0)
        pipe.step(work={work})
"""


@pytest.mark.parametrize(
    ("cause", "changes"),
    [
        ("link", {"faults": [{"link": 0, "delayMs": 60.0, "fromIteration": 0}]}),
        ("stage", {"faults": [{"device": 1, "slowdown": 3.0, "fromIteration": 0}]}),
        ("work", {"work": [3.7, 0.1, 0.1, 0.1]}),
        ("data", {"load": 0.2}),
    ],
)
def test_the_cause_is_named(tmp_path: Path, cause: str, changes: dict[str, Any]) -> None:
    """The injected cause is larger than each other one by far, however busy the machine."""
    times = {"forward": 20.0, "backwardInput": 20.0, "backwardWeight": 20.0}
    script = SCRIPT.format(load=changes.get("load", 0.0), work=changes.get("work", [1.0] * 4))
    job = manifest(
        parallelism={"stages": 2},
        schedule={"microbatches": 4, "policy": "zero-bubble"},
        emulation={"stageTimes": [times], "messageBytes": 4096},
        faults=changes.get("faults", []),
        trainer={"command": ["python", "-c", script], "iterations": ITERATIONS},
    )  # fmt: skip
    report = report_of(tmp_path, job)
    samples = [IterationSample.model_validate(each) for each in report["iterations"]]
    idle = average_idle_time(samples[2:])
    bubble = idle.pop("bubble")
    assert max(idle, key=idle.__getitem__) == cause, idle
    assert abs(idle["other"]) < 0.25 * (bubble + sum(idle.values())), idle
    assert report["status"]["training"]["idleSeconds"][cause] > 0
