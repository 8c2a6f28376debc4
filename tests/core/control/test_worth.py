"""The counter of saved seconds, against the same job without adaptation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from plant_support import Plant, spec

from pipemorph.control import JobController, JobView
from pipemorph.control.history.job_history import (
    MOST_RECORDS,
    JobHistory,
    SavedTime,
    Saving,
    sum_saved_time,
)
from pipemorph.planning import StageTimes
from pipemorph.protocol import AdaptationRecord, IterationSample
from pipemorph.protocol.samples import IdleSeconds
from pipemorph.views.status.status_text import format_progress

param, FULL = pytest.param, pytest.mark.full
Change = Callable[[Plant], None]


def delay(link: int, seconds: float) -> Change:
    def change(plant: Plant) -> None:
        plant.delays[link] = seconds

    return change


def ops(stage: int, factor: float) -> Change:
    def change(plant: Plant) -> None:
        one = 0.01 * factor
        plant.ops[stage] = StageTimes(forward=one, backward_input=one, backward_weight=one)

    return change


def overhead(seconds: float) -> Change:
    def change(plant: Plant) -> None:
        plant.overhead = seconds

    return change


class Unobserved(Plant):
    """Job that does not adapt, so that its reports are not needed."""

    def send(self, **_: object) -> None:
        """Drop the report."""


def total(history: dict[int, Change], iterations: int, *, enabled: bool) -> Plant:
    plant = Plant(spec()) if enabled else Unobserved(spec())
    for i in range(iterations):
        if i in history:
            history[i](plant)
        plant.step()
    return plant


@pytest.mark.parametrize(
    ("history", "iterations", "within"),
    [
        param(
            {20: delay(2, 0.060), 120: delay(2, 0.0)},
            160, 0.02, id="comes-and-goes", marks=FULL,
        ),
        param({10: delay(2, 0.060)}, 50, 0.02, id="stays"),
        param(
            {20: delay(0, 0.03), 60: delay(2, 0.05), 100: delay(0, 0), 140: delay(2, 0)},
            160, 0.02, id="two-links", marks=FULL,
        ),
        param(
            {20: delay(1, 0.080), 60: delay(1, 0.020), 100: delay(1, 0.050)},
            160, 0.02, id="levels", marks=FULL,
        ),
        # Phases of a few iterations, so that those count in which a decision has to wait.
        param(
            {8: delay(2, 0.030), 16: delay(2, 0.060), 24: delay(2, 0.0)}, 50, 0.02, id="short"
        ),
        param(
            {8: delay(2, 0.060), 16: delay(2, 0.090), 24: delay(2, 0.0)},
            160, 0.02, id="short-2", marks=FULL,
        ),
        # A link that flaps: its plan stays, though the fault has ended.
        param(
            {8: delay(2, 0.06), 14: delay(2, 0), 17: delay(2, 0.06), 21: delay(2, 0)},
            28, 0.02, id="held",
        ),
        # A second fault begins before the plan for the end of the first is in effect.
        param(
            {8: delay(1, 0.05), 13: delay(1, 0), 15: delay(0, 0.08), 19: delay(0, 0)},
            28, 0.02, id="another-at-once",
        ),
        # A fault begins while the plan for the end of another is not made for want of certainty.
        param(
            {0: delay(2, 0.06), 3: delay(2, 0), 7: delay(2, 0.06), 11: delay(2, 0),
             15: delay(0, 0.08)},
            23, 0.02, id="begins-while-an-end-is-held",
        ),
        # Less of it on the delegated route, whose normal wire time is guessed from all of it.
        param(
            {0: overhead(0.0015), 10: delay(2, 0.060), 11: delay(2, 0.058), 24: delay(2, 0.0)},
            40, 0.05, id="guessed",
        ),
        # Other op times are looked at every 50 iterations, and so is what they change.
        param(
            {20: delay(2, 0.060), 60: ops(1, 1.5), 120: delay(2, 0.0)},
            160, 0.08, id="slower-stage", marks=FULL,
        ),
    ],
)  # fmt: skip
def test_it_gives_the_time_that_adaptation_saved(
    history: dict[int, Change], iterations: int, within: float
) -> None:
    with_it = total(history, iterations, enabled=True)
    without = total(history, iterations, enabled=False)
    truth = sum(without.seconds) - sum(with_it.seconds)
    found = with_it.controller.saved_time
    assert truth > 1.0
    assert found.seconds == pytest.approx(truth, rel=within)
    assert abs(found.seconds - truth) <= found.error_seconds


def test_a_job_without_a_fault_has_saved_nothing() -> None:
    plant = total({}, 60, enabled=True)
    assert plant.controller.saved_time == SavedTime()


def test_a_fault_that_was_not_there_has_saved_nothing_once_it_is_found_out() -> None:
    """The ranks' samples show a delay that iterations do not have."""
    plant = Plant(spec())
    plant.run(20)
    sample = plant.sample
    plant.sample = lambda link, direction, wire: sample(  # type: ignore[method-assign]
        link, direction, wire + (0.040 if link == 1 else 0.0)
    )
    plant.run(40)
    assert [record.kind for record in plant.controller.records] == ["adapt", "revert"]
    assert plant.controller.saved_time.seconds == pytest.approx(0.0, abs=0.2)


def test_it_goes_on_after_a_restart_of_the_host_where_it_was() -> None:
    history = {10: delay(2, 0.060)}
    undisturbed = total(history, 50, enabled=True).controller.saved_time
    plant = total(history, 30, enabled=True)
    saved = plant.controller.take_snapshot()
    # Six iterations that no host receives.
    unheard = plant.controller
    plant.run(6)
    assert unheard.saved_time.seconds > 0
    plant.controller = JobController.from_snapshot(plant.spec, saved)
    plant.run(14)
    found = plant.controller.saved_time
    assert found.seconds == pytest.approx(undisturbed.seconds, rel=0.01)


def test_iterations_that_run_again_after_a_failure_count_once() -> None:
    plant = total({20: delay(2, 0.060)}, 60, enabled=True)
    before = plant.controller.saved_time.seconds
    plant.iteration -= 8
    for _ in range(8):
        plant.run(1)
        assert plant.controller.saved_time.seconds == pytest.approx(before)
    plant.run(1)
    assert plant.controller.saved_time.seconds > before


def record(version: int, **fields: object) -> AdaptationRecord:
    values: dict[str, object] = {
        "plan_version": version,
        "kind": "adapt",
        "detected_at": 0.0,
        "detected_at_iteration": 0,
        "detectable_at": 0,
        "reason": "",
        "links": [],
        "warmup_before": [],
        "warmup_after": [],
        "routes": [],
        "predicted_seconds_before": None,
        "predicted_seconds_after": 1.0,
    }
    return AdaptationRecord.model_validate(values | fields)


@pytest.mark.parametrize(
    ("promised", "measured", "error"),
    [
        (0.5, 0.5, 12.0),
        (0.5, 0.4, 20.0),
        (0.5, -0.5, 100.0),
        (0.5, None, 100.0),
        (None, 0.4, 100.0),
    ],
)
def test_its_error_is_the_difference_of_measured_and_promised_gains(
    promised: float | None, measured: float | None, error: float
) -> None:
    one = record(1, promised=promised, measured=measured, saved=100.0, change_seconds=2.0)
    assert sum_saved_time([one]) == SavedTime(98.0, pytest.approx(error))
    dear = one.model_copy(update={"fault_costs": 500.0})
    assert sum_saved_time([dear]).error_seconds == pytest.approx(max(60.0, error))


def test_an_iteration_that_is_as_short_as_without_a_slow_link_has_saved_nothing() -> None:
    """The fault ended, but it is not yet certain: the job ends before it is, or goes on."""
    ledger = JobHistory()
    ledger.append_record(record(1))
    slow = Saving(seconds=0.6, fault_cost=0.8, if_well=0.01, well_below=0.4)
    ledger.revise_saving(1, slow, 0, None)

    def add(*seconds: float) -> None:
        samples = [
            IterationSample(
                index=index, seconds=each, loss=None, plan_version=1, bubble_fraction=0.1
            )
            for index, each in enumerate(seconds, ledger.last_iteration + 1)
        ]
        ledger.add_iterations(samples, list)

    add(0.5, 0.5, 0.37, 0.38)
    assert ledger.records[0].saved == pytest.approx(2 * 0.6 + 2 * 0.01)
    assert ledger.records[0].fault_costs == pytest.approx(2 * 0.8)
    # Later revisions do not forget measurements.
    ledger.revise_saving(1, slow._replace(seconds=0.7), 1, 2)
    assert ledger.records[0].saved == pytest.approx(0.6 + 0.7 + 2 * 0.01)
    ledger.revise_saving(1, slow._replace(well_below=0.0), 2, None)
    assert ledger.records[0].saved == pytest.approx(0.6 + 0.7 + 2 * 0.6)


def test_the_error_of_a_small_promise_counts_little_for_a_large_one() -> None:
    large = record(1, promised=0.5, measured=0.5, saved=100.0)
    small = record(2, promised=0.001, measured=-0.02)
    unmeasured = record(3, promised=0.5, measured=None, saved=10.0)
    assert sum_saved_time([large, small, unmeasured]).error_seconds == pytest.approx(12.0 + 1.2)


def test_records_that_are_dropped_still_count() -> None:
    ledger = JobHistory()
    for version in range(1, MOST_RECORDS + 11):
        ledger.append_record(record(version, saved=1.0))
    assert len(ledger.records) == MOST_RECORDS
    assert ledger.saved_time.seconds == MOST_RECORDS + 10


def test_report_json_has_it() -> None:
    assert SavedTime(3600.0, 36.0).to_report(ranks=8) == {
        "seconds": 3600.0,
        "error": 36.0,
        "rank_hours": 8.0,
    }


def test_iterations_that_were_not_sampled_count_like_the_newest_sampled_one() -> None:
    ledger, usual = JobHistory(), {"seconds": 0.5, "plan_version": 0, "bubble_fraction": 0.1}

    def add(index: int, idle: IdleSeconds | None = None) -> None:
        sample = IterationSample(index=index, loss=None, idle=idle, **usual)
        ledger.add_iterations([sample], list)

    add(0)
    assert ledger.idle_seconds == ledger.idle_totals == {}
    add(1, {"link": 0.1, "bubble": 0.3})
    for index in (1, 2, 3):  # One of them is reported again.
        add(index)
    add(4, {"link": 0.5, "bubble": 0.3, "other": -0.1})
    assert ledger.idle_totals == pytest.approx({"link": 0.8, "bubble": 1.2, "other": 0.0})
    assert ledger.idle_seconds["link"] == pytest.approx(0.3)
    assert ledger.idle_seconds["other"] == pytest.approx(-0.05)
    view = JobView(
        iteration=5, iteration_seconds=0.5, bubble_fraction=0.6, idle_seconds=ledger.idle_seconds
    )
    assert (
        format_progress(view, 10) == "5 of 10 iterations (50%); 0.5 s each, 60% idle, mostly link"
    )
