"""Slow gradient reductions, from reports to the condition ReductionsHealthy and status."""

from __future__ import annotations

from typing import Any

from observing import tell
from operator_objects import body

from pipemorph.control import JobController
from pipemorph.protocol import ReductionSample
from pipemorph.spec.job_spec import JobSpec
from pipemorph.views.status.summary import StatusInput, summarize_training, update_conditions


def controller_of(replicas: int, seconds: float = 0.02) -> JobController:
    given: dict[str, Any] = body(stages=4)["spec"]
    given["parallelism"]["replicas"] = replicas
    controller = JobController(JobSpec.model_validate(given))
    for i in range(1, 16 if replicas > 1 else 2):
        late = seconds if i > 10 else 0.02
        reductions = [
            ReductionSample(
                stage=stage, iteration=i, bytes=1000, buckets=1, waited=0.0, exposed=0.01,
                seconds=late if stage == 3 else 0.02,
            )
            for stage in range(4 if replicas > 1 else 0)
        ]  # fmt: skip
        tell(controller, 90.0, iteration=i, reductions=reductions)
    return controller


def verdicts(controller: JobController, *, ended: bool = False) -> dict[str, tuple[str, str, str]]:
    source = StatusInput(controller, 95.0, 1, is_over=ended)
    return {c.type: (c.status, c.reason, c.message) for c in update_conditions(source, [], 96.0)}


def test_a_slow_reduction_is_a_condition_of_its_own() -> None:
    controller = controller_of(2, seconds=0.09)
    found = verdicts(controller)
    assert found["ReductionsHealthy"] == (
        "False", "SlowReductions", "gradient reduction of stage 3 (+70 ms) slow",
    )  # fmt: skip
    assert found["LinksHealthy"][0] != "False", "no link is slow"
    training = summarize_training(StatusInput(controller, 95.0, 1), 96.0)
    (slow,) = training.slow_reductions
    assert (slow.stage, slow.normal_ms, training.slow_reduction_count) == (3, 20.0, 1)
    assert slow.time_ms == 90.0
    over = summarize_training(StatusInput(controller, 95.0, 1, is_over=True), 96.0)
    assert (over.slow_reductions, over.slow_reduction_count) == ([], 0)
    assert verdicts(controller, ended=True)["ReductionsHealthy"][0] == "Unknown"


def test_a_job_without_replicas_has_no_such_condition() -> None:
    assert verdicts(controller_of(2))["ReductionsHealthy"] == (
        "True", "ReductionsAsUsual", "4 groups, none slow",
    )  # fmt: skip
    assert "ReductionsHealthy" not in verdicts(controller_of(1))
