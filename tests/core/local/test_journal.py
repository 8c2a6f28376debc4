"""History of a run from its reports."""

from __future__ import annotations

from dataclasses import replace

import pytest
from observing import report
from run_records import job, sample

from pipemorph.control.controller import JobController
from pipemorph.control.history.job_history import DecisionRecord, SavedTime
from pipemorph.local.results.journal import RunJournal, RunView
from pipemorph.protocol import Health, LinkState


def test_iterations_of_other_ranks_are_not_the_start_of_new_ranks() -> None:
    """Ranks report both. The last of several iterations in a report has just finished."""
    made = job()
    journal, controller = RunJournal(), JobController(made.spec)
    for number, (indices, now) in enumerate([((6,), 100.0), ((7, 8), 109.0)], start=1):
        done = [sample(index) for index in indices]
        journal.record_report(
            report(number, iteration=indices[-1], iterations=done), controller, now
        )
    assert journal.find_first_iteration() == (6, 100.0)
    assert journal.find_first_iteration(7) == (7, 109.0 - sample(8).seconds)
    assert journal.find_first_iteration(9) is None
    journal.view = RunView(state="training", applied_plan_version=3, saved_time=SavedTime(7.0, 1.0))
    journal.reset_view()
    assert journal.find_first_iteration() is None and journal.count_done() == 9
    assert journal.view == RunView(applied_plan_version=3, saved_time=SavedTime(7.0, 1.0)), (
        "what is over stays"
    )


def test_a_view_has_the_plan_that_the_ranks_run_and_the_one_that_they_should() -> None:
    made = job()
    journal, controller = RunJournal(), JobController(made.spec)
    controller._plans.wanted_plan = replace(controller.wanted_plan, version=2)
    journal.record_report(report(iteration=3), controller, 1.0)
    assert (journal.view.applied_plan_version, journal.view.wanted_plan_version) == (0, 2)


def test_the_reason_for_no_change_stays_after_the_link_has_recovered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decisions about healthy links do not replace it; a change does."""
    made = job()
    journal, controller = RunJournal(), JobController(made.spec)
    healthy = controller.get_job_view(1.0)

    def decide(number: int, health: Health, kind: str) -> str:
        links = (LinkState(0, health, delay=0.06),)
        monkeypatch.setattr(controller, "get_job_view", lambda _: replace(healthy, links=links))
        reason = f"{kind} {number}"
        controller._ledger.decisions.append(
            DecisionRecord(at=1.0, iteration=number, kind=kind, reason=reason, line="")  # type: ignore[arg-type]
        )
        journal.record_report(report(number, iteration=number), controller, float(number))
        return journal.view.keep_reason

    assert decide(1, Health.HEALTHY, "keep") == ""
    assert decide(2, Health.SLOW, "keep") == "keep 2"
    assert decide(3, Health.HEALTHY, "keep") == "keep 2"
    journal.reset_view()
    assert decide(4, Health.HEALTHY, "outcome") == "keep 2"
    assert decide(5, Health.SLOW, "adapt") == ""
