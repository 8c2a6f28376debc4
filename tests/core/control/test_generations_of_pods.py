"""Generations of a job's ranks, one after another: no sockets, no clock."""

from __future__ import annotations

from typing import Any

import pytest
from observing import trained
from pod_words import lost_pod, word

from pipemorph.control.history.progress import RESUMED_SECONDS
from pipemorph.control.job_generations import JobGenerations
from pipemorph.control.job_state.reports import ReportMismatch, WrongAttempt
from pipemorph.control.restart.pod_tracker import REPLACED_SECONDS
from pipemorph.protocol import PodFailure, ResumedFrom
from pipemorph.spec.status_recoveries import MAX_RECOVERIES_KEPT, Recoveries


def loss(at: float = 1.0, **fields: Any) -> PodFailure:
    return PodFailure.model_validate(
        {"reason": "rank 1 exited with code 1", "at": at, "rank": 1, **fields}
    )


def lose(job: JobGenerations, now: float = 10.0, **fields: Any) -> None:
    """The ranks of all pods end, since one of pod 1 has."""
    generation = job.generation_state.generation
    job.process_pod_report(word("failed", 1, generation, loss=loss(now, **fields)), now)
    for pod in range(job.pod_count):
        lost = loss(now, **fields) if pod == 1 else None
        job.process_pod_report(word("gone", pod, generation, loss=lost), now + 1)


def test_a_generation_is_over_at_the_first_word_and_the_next_begins_at_the_last() -> None:
    job = JobGenerations(pods=3, most=2)
    job.process_rank_report(trained(0, 1, 2), 5.0)
    job.process_pod_report(word("failed", 1, loss=loss()), 10.0)
    assert job.generation_state.over and job.generation_state.reason == "rank 1 exited with code 1"
    for pod in (1, 0, 1, 0):  # Repeated reports are allowed.
        job.process_pod_report(word("gone", pod), 11.0)
        assert job.generation_state.over and job.generation_state.generation == 0
    job.process_pod_report(word("gone", 2), 12.0)
    assert (
        job.generation_state.generation,
        job.generation_state.over,
        job.generation_state.verdict,
    ) == (1, False, "")
    assert (job.saved.count, job.saved.counted, job.saved.last[0].pod) == (1, 0, 1)


def test_all_pods_report_on_ranks_that_hang() -> None:
    job = JobGenerations(pods=3, most=2)
    job.process_rank_report(trained(0, 1, 2), 5.0)
    why = "no iteration was finished for 5 s"
    job.process_pod_report(
        word("failed", 0, loss=loss(9.0, reason=why, rank=None, hang=True)), 10.0
    )
    assert job.generation_state.over and job.generation_state.hang, "others print their stacks, too"
    found = {
        0: loss(9.0, reason=why, rank=None, hang=True, lost_peer=True, waits=("0 waits for 1",)),
        1: loss(9.2, reason=why, rank=1, hang=True, waits=("1 is stopped",)),
        2: loss(9.1, reason=why, rank=None, hang=True, lost_peer=True, waits=("2 waits for 1",)),
    }
    for pod, each in found.items():
        job.process_pod_report(word("gone", pod, loss=each), 11.0)
    assert not job.generation_state.hang and job.generation_state.generation == 1
    (recovery,) = job.saved.last
    assert recovery.cause == f"{why}: 1 is stopped; 0 waits for 1; 2 waits for 1"
    assert (recovery.pod, recovery.rank) == (1, 1)


def test_late_reports_change_nothing() -> None:
    job = JobGenerations(pods=3, most=2)
    job.process_rank_report(trained(0), 5.0)
    lose(job)
    before = job.generation_state, job.saved
    job.process_pod_report(word("failed", 2, loss=loss()), 20.0)
    job.process_pod_report(word("gone", 2), 20.0)
    assert (job.generation_state, job.saved) == before


def test_the_cause_is_the_failure_that_lost_no_peer_in_any_order_of_reports() -> None:
    job = JobGenerations(pods=2, most=2)
    job.process_rank_report(trained(0), 5.0)
    lost = loss(1.0, lost_peer=True, reason="rank 0 lost rank 3", rank=0)
    job.process_pod_report(word("gone", 0, loss=lost), 10.0)
    own = loss(2.0, reason="rank 3 raised", rank=3, error="ValueError: 7")
    job.process_pod_report(word("gone", 1, loss=own), 10.0)
    assert (job.saved.last[0].cause, job.saved.last[0].pod) == ("rank 3 raised", 1)
    assert job.saved.error == "ValueError: 7"


def test_the_same_exception_at_the_same_iteration_is_the_users() -> None:
    job = JobGenerations(pods=2, most=1000)
    job.process_rank_report(trained(0), 5.0)
    lose(job, error="ValueError: 7")
    lose(job, error="ValueError: 7")
    assert (job.generation_state.verdict, job.generation_state.cause) == ("none", 1)
    assert "iteration 1 failed twice, with the same error" in job.generation_state.why


def test_without_progress_an_attempt_follows_and_its_restarts_count_too() -> None:
    job = JobGenerations(pods=2, most=3)
    job.process_rank_report(trained(0), 5.0)
    lose(job)
    lose(job)
    assert (job.saved.generation, job.saved.counted) == (2, 1)
    lose(job)
    assert job.generation_state.verdict == "attempt", "the operator counts that one"
    assert job.saved.counted == 1
    job.begin_attempt(1)
    job.restart_policy.restarts = 1
    assert (
        job.generation_state.attempt,
        job.generation_state.generation,
        job.generation_state.verdict,
    ) == (1, 0, "")
    job.restart_policy.restarts = 2
    job.process_pod_report(word("gone", 0, attempt=1, loss=loss()), 30.0)
    job.process_pod_report(word("gone", 1, attempt=1), 30.0)
    assert (
        job.generation_state.verdict == "attempt" and "maxRestarts is 3" in job.generation_state.why
    )


def test_it_counts_on_from_the_saved_number() -> None:
    job = JobGenerations(pods=2, most=5)
    job.process_rank_report(trained(0, 1), 5.0)
    lose(job, error="ValueError: 7")
    saved = Recoveries.model_validate(job.saved.model_dump(by_alias=True))
    again = JobGenerations(pods=2, most=5, saved=saved)
    assert again.generation_state.generation == 1
    again.process_rank_report(trained(), 9.0)
    lose(again, error="ValueError: 7")
    assert again.generation_state.verdict == "none", "the exception and the iteration are known"
    deaf = JobGenerations(pods=2, most=5, saved=saved)
    lose(deaf, error="ValueError: 7")
    assert deaf.generation_state.verdict == "", (
        "iterations may have been finished that another ingest recorded"
    )
    other = JobGenerations(pods=2, most=5, saved=saved)
    lose(other, error="ValueError: 8")
    assert (other.saved.generation, other.saved.last[-1].iterations_done) == (2, 2)


def test_it_counts_iterations_that_ranks_finished_but_did_not_report() -> None:
    """The ranks end right after their first iteration, before it is reported."""
    job = JobGenerations(pods=2, most=1)
    job.process_pod_report(word("failed", 1, loss=loss(10.0, error="ValueError: 7")), 10.0)
    job.process_pod_report(
        word("gone", 1, loss=loss(10.0, error="ValueError: 7"), finished=1), 11.0
    )
    job.process_pod_report(word("gone", 0), 11.0)
    assert (job.generation_state.generation, job.generation_state.verdict) == (1, ""), (
        "an attempt would keep nothing"
    )
    assert (job.saved.counted, job.saved.finished, job.saved.idle) == (0, 1, 0)
    assert job.saved.last[0].iterations_done == 0, "not all ranks have begun the next one"
    job.process_pod_report(
        word("resumed", 0, 1, resumed=ResumedFrom(iteration=0, rung="kept")), 12.0
    )
    assert job.process_rank_report(trained(0, 1), 13.0)
    assert job.saved.last[0].repeated == 0
    # A second ingest saw none of these, and receives them from the launchers.
    again = JobGenerations(pods=2, most=9, saved=job.saved)
    same = loss(20.0, error="ValueError: 7")
    again.process_pod_report(word("gone", 0, 1, loss=same, finished=1), 20.0)
    again.process_pod_report(word("gone", 1, 1), 20.0)
    assert (again.generation_state.verdict, again.generation_state.why) == (
        "none",
        "not started again: iteration 1 failed twice, with the same error",
    )


def test_launchers_know_the_number_that_could_not_be_saved() -> None:
    job = JobGenerations(pods=2, most=5)
    job.process_rank_report(trained(0), 5.0)
    job.process_pod_report(word("failed", 0, generation=4, loss=loss()), 10.0)
    assert (job.generation_state.generation, job.generation_state.over) == (4, True)
    job.process_pod_report(word("gone", 0, generation=4), 10.0)
    job.process_pod_report(word("gone", 1, generation=4), 10.0)
    assert job.generation_state.generation == 5


@pytest.mark.parametrize("most", [0, 2])
def test_no_generation_follows_where_a_pod_has_finished_or_nothing_restarts(most: int) -> None:
    job = JobGenerations(pods=3, most=most)
    if most:
        job.process_pod_report(word("completed", 0), 9.0)
        assert not job.generation_state.over
    job.process_pod_report(word("failed", 1, loss=loss()), 10.0)
    assert (job.generation_state.verdict, job.generation_state.cause) == ("attempt", 1)


def test_a_failure_that_no_restart_changes_is_not_retried() -> None:
    job = JobGenerations(pods=2, most=5)
    job.process_rank_report(trained(0), 5.0)
    lose(job, retry=False)
    assert (job.generation_state.verdict, job.generation_state.cause) == ("attempt", 1)


def test_it_has_recovered_when_the_new_ranks_have_finished_an_iteration() -> None:
    job = JobGenerations(pods=2, most=5)
    job.process_rank_report(trained(0, 1, 2, 3), 5.0)
    lose(job, now=10.0)
    slow = trained(4, 5, seconds=RESUMED_SECONDS + 1)
    assert not job.process_rank_report(slow, 40.0), "unknown yet who has finished which"
    job.process_pod_report(
        word("resumed", 0, 1, resumed=ResumedFrom(iteration=5, rung="kept")), 41.0
    )
    (found,) = job.saved.last
    assert (found.went_on_with, found.seconds, found.repeated, found.state) == (5, 30.0, 0, "kept")
    assert not job.process_rank_report(trained(7), 45.0)


def test_word_of_the_beginning_is_not_waited_for_long() -> None:
    job = JobGenerations(pods=2, most=5)
    job.process_rank_report(trained(0, 1, 2, 3), 5.0)
    lose(job, now=10.0)
    assert not job.process_rank_report(trained(2), 12.0)
    assert job.process_rank_report(trained(3), 12.0 + RESUMED_SECONDS)
    (found,) = job.saved.last
    assert (found.went_on_with, found.repeated, found.state) == (2, 2, None)


def test_a_new_ingest_reports_the_recovery_that_it_finds() -> None:
    job = JobGenerations(pods=2, most=5)
    job.process_rank_report(trained(0), 5.0)
    lose(job, now=10.0)
    again = JobGenerations(pods=2, most=5, saved=job.saved)
    again.process_pod_report(
        word("resumed", 0, 1, resumed=ResumedFrom(iteration=1, rung="replica")), 12.5
    )
    assert again.process_rank_report(trained(1), 13.0)
    assert again.saved.last[0].seconds == 3.0


def test_only_the_newest_recoveries_are_stored() -> None:
    job = JobGenerations(pods=2, most=5)
    for iteration in range(MAX_RECOVERIES_KEPT + 3):
        job.process_rank_report(trained(iteration), 5.0)
        lose(job)
    assert len(job.saved.last) == MAX_RECOVERIES_KEPT
    assert job.saved.last[-1].generation == job.saved.count == MAX_RECOVERIES_KEPT + 3


def test_words_of_others_are_refused() -> None:
    job = JobGenerations(pods=2, most=5, attempt=3)
    with pytest.raises(WrongAttempt, match="attempt 2 is not the attempt in progress, 3"):
        job.process_pod_report(word("gone", 0, attempt=2), 1.0)
    with pytest.raises(ReportMismatch, match="pod: is 2; the job has 2 pods"):
        job.process_pod_report(word("gone", 2, attempt=3), 1.0)


def joins(job: JobGenerations, now: float, *launchers: str) -> None:
    for pod, launcher in enumerate(launchers):
        job.process_pod_report(word("joined", pod, launcher=launcher), now)


def test_the_first_launchers_of_pods_start_generation_0() -> None:
    job = JobGenerations(pods=2, most=2)
    joins(job, 1.0, "a", "b")
    joins(job, 1.5, "a", "b")  # Repeated reports are allowed.
    assert (job.generation_state.generation, job.generation_state.over) == (0, False)


def test_a_launcher_in_the_place_of_another_joins_the_next_generation() -> None:
    job = JobGenerations(pods=3, most=2)
    joins(job, 1.0, "a", "b", "c")
    job.process_rank_report(trained(0, 1), 5.0)
    job.process_pod_report(word("failed", 0, loss=loss(lost_peer=True), launcher="a"), 10.0)
    job.expect_replacements([lost_pod(1, 9.0)], 11.0)
    assert job.generation_state.awaits == 1
    for pod, launcher in ((0, "a"), (2, "c")):
        job.process_pod_report(word("gone", pod, launcher=launcher), 12.0)
    assert job.generation_state.over, "one is missing"
    job.process_pod_report(word("joined", 1, launcher="new"), 20.0)
    assert (
        job.generation_state.generation,
        job.generation_state.over,
        job.generation_state.awaits,
    ) == (1, False, None)
    (record,) = job.saved.last
    assert (record.replaced, record.pod) == ([1], 1)
    assert record.cause == "pod 1 exited with code 137"
    assert record.lost_at == "1970-01-01T00:00:09.000Z", "not when a peer noticed"
    with pytest.raises(WrongAttempt, match="pod 1 is lost"):
        job.process_pod_report(word("gone", 1, generation=1, launcher="b"), 21.0)


def test_a_pod_that_reported_its_end_before_it_was_lost_is_waited_for() -> None:
    job = JobGenerations(pods=2, most=2)
    joins(job, 1.0, "a", "b")
    job.process_rank_report(trained(0), 5.0)
    job.process_pod_report(word("gone", 1, loss=loss(), launcher="b"), 10.0)
    job.expect_replacements([lost_pod(1, 11.0)], 11.0)
    job.process_pod_report(word("gone", 0, launcher="a"), 12.0)
    assert job.generation_state.over and job.generation_state.generation == 0
    job.process_pod_report(word("joined", 1, launcher="new"), 20.0)
    assert job.generation_state.generation == 1


def test_a_new_ingest_knows_a_new_launcher_by_the_iterations_of_its_ranks() -> None:
    job = JobGenerations(pods=2, most=2, done=7)
    job.process_pod_report(word("joined", 1, launcher="new"), 20.0)
    assert job.generation_state.over, "the ranks of the other pod have to end"
    assert job.generation_state.reason == "pod 1 was lost, and another one has taken its place"
    late = JobGenerations(pods=2, most=2)
    late.process_pod_report(word("joined", 1, launcher="first"), 20.0)
    assert not late.generation_state.over


def test_a_new_ingest_knows_a_new_launcher_by_the_loss_in_status() -> None:
    """The launcher finished no iteration, or it would begin the generation that others are in."""
    job = JobGenerations(pods=2, most=2)
    job.expect_replacements([lost_pod(1, 9.0)], 10.0)
    job.process_pod_report(word("joined", 1, launcher="new"), 20.0)
    assert job.generation_state.over and job.generation_state.reason == "pod 1 exited with code 137"


def test_replaced_pods_without_progress_count_and_then_an_attempt_follows() -> None:
    job = JobGenerations(pods=1, most=3)
    joins(job, 1.0, "a")
    for number, launcher in enumerate(("b", "c")):
        job.expect_replacements([lost_pod(0, 10.0, uid=launcher)], 10.0)
        job.process_pod_report(word("joined", 0, launcher=launcher), 11.0)
        assert (job.generation_state.generation, job.saved.counted) == (1, 1), (
            "before any iteration, too"
        )
        assert (job.generation_state.verdict == "attempt") == bool(number)


def test_pods_that_the_cluster_takes_do_not_count() -> None:
    job = JobGenerations(pods=1, most=1)
    joins(job, 1.0, "a")
    for number in range(5):
        job.expect_replacements([lost_pod(0, 10.0, uid=f"u{number}", counted=False)], 10.0)
        job.process_pod_report(word("joined", 0, launcher=f"new-{number}"), 11.0)
    assert (job.generation_state.generation, job.saved.counted, job.generation_state.verdict) == (
        5,
        0,
        "",
    )


def test_others_do_not_wait_forever_for_a_pod_that_does_not_come() -> None:
    job = JobGenerations(pods=2, most=2)
    joins(job, 1.0, "a", "b")
    job.expect_replacements([lost_pod(1, 10.0)], 10.0)
    job.process_pod_report(word("gone", 0, loss=loss(lost_peer=True), launcher="a"), 12.0)
    assert job.generation_state.awaits == 1
    job.process_pod_report(word("gone", 0, launcher="a"), 10.0 + REPLACED_SECONDS)
    assert job.generation_state.awaits is None
