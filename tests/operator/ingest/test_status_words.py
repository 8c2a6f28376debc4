"""Texts in status about a job's progress and about what changes of plan brought."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from operator_objects import body

from pipemorph.control import AdaptationRecord, Health, JobController, JobView, LinkState
from pipemorph.protocol import TransportFallback, TransportsView
from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.job_status import TrainingStatus
from pipemorph.views.status import status_text
from pipemorph.views.status.summary import StatusInput, summarize_training

TRAINER = {"module": "a.b", "iterations": 1000}


def controller(*records: AdaptationRecord) -> JobController:
    spec = JobSpec.model_validate(body(stages=4, trainer=TRAINER)["spec"])
    saved = JobController(spec).take_snapshot() | {
        "records": [r.model_dump(mode="json") for r in records]
    }
    return JobController.from_snapshot(spec, saved)


def view(**changes: Any) -> JobView:
    values = {
        "state": "training", "iteration": 118, "iteration_seconds": 0.5312, "bubble_fraction": 0.204
    }  # fmt: skip
    return replace(controller().get_job_view(0.0), **(values | changes))


def record(version: int = 1, **changes: Any) -> AdaptationRecord:
    values: dict[str, Any] = {
        "plan_version": version, "kind": "adapt", "detected_at": 1.0, "detected_at_iteration": 10,
        "detectable_at": 9, "reason": "slow", "links": [], "warmup_before": [], "warmup_after": [],
        "routes": [], "predicted_seconds_before": 1.0, "predicted_seconds_after": 0.5,
        "promised": 0.55, "measured": 0.61, "iteration_seconds_before": 1.37,
        "iteration_seconds_after": 0.531, "bubble_before": 0.62, "bubble_after": 0.12,
    }  # fmt: skip
    return AdaptationRecord(**(values | changes))


OPEN = {"measured": None, "iteration_seconds_after": None, "bubble_after": None}


def summary(*records: AdaptationRecord, ended: bool = False, **changes: Any) -> TrainingStatus:
    source = StatusInput(controller(*records), 90.0, 1, ended)
    return summarize_training(source, 100.0, view(**changes))


@pytest.mark.parametrize(
    ("loss", "reported"), [(1.5, 1.5), (None, None), (nan, None), (inf, None), (-inf, None)]
)
def test_a_status_is_json_whatever_the_loss_is(loss: float | None, reported: float | None) -> None:
    assert summary(loss=loss).loss == reported


def test_of_a_job_that_trains() -> None:
    found = summary()
    assert (
        found.progress == "118 of 1,000 iterations (11%); 0.531 s each, 20% idle; 7 min 49 s left"
    )
    assert (found.done, found.left) == ("11%", "7m49s")
    assert (found.gain, found.last_adaptation) == (None, None)


def test_all_is_done_when_the_ranks_say_so_and_not_before() -> None:
    assert (summary(iteration=999).done, summary(iteration=0).done) == ("99%", "0%")
    assert summary(iteration=290).done == "29%", "0.29 is a little less in binary"
    assert summary(iteration=999, state="finished").done == "100%"


def test_goodput_in_percent() -> None:
    assert [status_text.format_goodput(each) for each in (None, 0.0, 0.913, 1.0)] == [
        None,
        "0%",
        "91%",
        "100%",
    ]


def test_links_have_the_names_that_people_know() -> None:
    late = LinkState(2, Health.SLOW, delay=0.06, column="replica 1", replica=1)
    fallen = TransportFallback(1, 0, "forward", "rdma", "tcp", 1, "port error")
    found = summary(links=(late,), transports=TransportsView(fallen=(fallen,), fallen_count=1))
    assert found.slow_links[0].name == "link 2 (stage 2 to 3, replica 1)"
    assert found.fallen_links[0].name == "link 1 (stage 1 to 2)"


@pytest.mark.parametrize(
    "changes",
    [{"state": "starting"}, {"state": "failed"}, {"iteration": 1000}, {"iteration_seconds": None}],
)
def test_an_unknown_remaining_time_is_absent(changes: dict[str, Any]) -> None:
    found = summary(**changes)
    assert found.left is None
    assert "left" not in (found.progress or "")


def test_a_job_that_has_ended_has_no_remaining_time() -> None:
    assert "left" in (summary().progress or "")
    found = summary(ended=True)
    assert found.left is None
    assert found.progress is not None and "left" not in found.progress, "of another ingest, too"


def test_what_a_change_promised_and_brought() -> None:
    found = summary(record())
    assert found.gain == "55%/61%"
    assert found.last_adaptation.effect == (
        "1.37 s became 0.531 s per iteration (55% promised, 61% measured); 62% idle became 12%"
    )


def test_a_gain_stays_until_the_next_one_is_measured() -> None:
    """Gains are absent for a change that is not measured yet and for a return."""
    back = record(3, kind="return", promised=0.01, measured=-0.3)
    found = summary(record(), record(2, **OPEN), back)
    assert found.gain == "55%/61%"
    assert status_text.format_effect(record(2, **OPEN)) is None
    assert summary(record(measured=-0.001)).gain == "55%/0%", "not -0%"


def test_words_change_only_with_the_figures() -> None:
    """Texts are no reason to write status: the time that passes does not change them."""
    source = StatusInput(controller(record()), 90.0, 1)
    assert summarize_training(source, 100.0, view()) == summarize_training(source, 4000.0, view())
