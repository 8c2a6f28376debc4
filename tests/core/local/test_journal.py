"""The history of a run as its reports tell it."""

from __future__ import annotations

from dataclasses import replace

from observing import report
from run_records import job, sample

from pipemorph.control.controller import JobController
from pipemorph.control.record.history import Worth
from pipemorph.local.results.history import Journal, View


def test_what_other_ranks_had_finished_is_not_what_new_ranks_went_on_with() -> None:
    """They report both. Of several iterations in a report only the last has just finished."""
    made = job()
    journal, controller = Journal(), JobController(made.spec)
    for number, (indices, now) in enumerate([((6,), 100.0), ((7, 8), 109.0)], start=1):
        done = [sample(index) for index in indices]
        journal.take(report(number, iteration=indices[-1], iterations=done), controller, now)
    assert journal.first() == (6, 100.0)
    assert journal.first(7) == (7, 109.0 - sample(8).seconds)
    assert journal.first(9) is None
    journal.view = View(state="training", applied_plan_version=3, worth=Worth(7.0, 1.0))
    journal.forget_view()
    assert journal.first() is None and journal.done() == 9
    assert journal.view == View(applied_plan_version=3, worth=Worth(7.0, 1.0)), "what is over stays"


def test_a_view_has_the_plan_that_the_ranks_run_and_the_one_that_they_should() -> None:
    made = job()
    journal, controller = Journal(), JobController(made.spec)
    controller._plans.wanted = replace(controller.wanted, version=2)
    journal.take(report(iteration=3), controller, 1.0)
    assert (journal.view.applied_plan_version, journal.view.wanted_plan_version) == (0, 2)
