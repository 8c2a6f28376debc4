"""Replicas that train while pods of others are missing: no sockets, no clock."""

from __future__ import annotations

from typing import Any

import pytest
from observing import trained
from pod_words import lost_peer, lost_pod, word

from pipemorph.control.job_generations import JobGenerations
from pipemorph.control.job_state.reports import WrongAttempt
from pipemorph.control.restart.drain_request import LEAVE_SECONDS, STAY_SECONDS
from pipemorph.control.restart.pod_tracker import (
    ABSENT_SECONDS,
    NOTICE_SECONDS,
    REPLACED_SECONDS,
    SILENT_SECONDS,
    TAKEOVER_SECONDS,
)
from pipemorph.spec.sections.parallelism import Parallelism
from pipemorph.spec.status_recoveries import PodReplacement, Recoveries

# Pods 0 and 1 are replica 0, pods 2 and 3 replica 1, pods 4 and 5 replica 2.
CUT = Parallelism(stages=2, replicas=3, min_replicas=1, order=["dp_replicate", "pp"])
PATIENCE = 10.0


def started(cut: Parallelism = CUT, most: int = 5) -> JobGenerations:
    job = JobGenerations(cut.pods, most, cut=cut, patience=PATIENCE)
    for pod in range(cut.pods):
        job.process_pod_report(word("joined", pod), 1.0)
    return job


def end(job: JobGenerations, *pods: int, now: float, finished: int = 0, **fields: Any) -> None:
    """The ranks of some pods have ended, since they lost another one."""
    for pod in pods:
        excluded = list(job.excluded_replicas)
        details = {"loss": lost_peer(now), "finished": finished, "excluded_replicas": excluded}
        job.process_pod_report(
            word("gone", pod, job.generation_state.generation, **details | fields), now
        )


def lose(job: JobGenerations, pod: int, now: float, finished: int = 5) -> None:
    """Lose a pod; the operator reports it at once."""
    others = set(range(6)) - {pod}
    end(
        job,
        *(each for each in others if job.pod_tracker.has_ranks(each)),
        now=now,
        finished=finished,
    )
    job.expect_replacements([lost_pod(pod, now)], now)


def back(job: JobGenerations, pod: int, now: float) -> None:
    """Start another pod in place of one whose replica does not run; it has imported."""
    job.process_pod_report(word("joined", pod, launcher="new"), now - 0.5)
    generation, excluded = job.generation_state.generation, list(job.excluded_replicas)
    job.process_pod_report(
        word("gone", pod, generation, excluded_replicas=excluded, launcher="new"), now
    )


def without(pod: int, now: float = 10.0) -> JobGenerations:
    """A job that goes on without the replica of a pod."""
    job = started()
    lose(job, pod, now)
    job.check_deadlines(now + PATIENCE)
    return job


def test_whole_replicas_go_on_when_the_lost_pod_is_not_back_in_time() -> None:
    job = started()
    lose(job, 3, 10.0)
    assert job.next_deadline(10.0) == 10.0 + PATIENCE
    job.check_deadlines(19.9)
    assert job.generation_state.over and job.generation_state.awaits == 3
    job.check_deadlines(20.0)
    state = job.generation_state
    assert (state.generation, state.over, state.excluded_replicas, state.leave) == (
        1,
        False,
        (1,),
        False,
    )
    (record,) = job.saved.last
    assert (record.pod, record.replicas, record.replaced) == (3, 2, [])
    assert record.cause == "pod 3 exited with code 137"
    assert record.lost_at == "1970-01-01T00:00:10.000Z"


def test_a_pod_that_is_back_in_time_leaves_no_replica_out() -> None:
    job = started()
    lose(job, 3, 10.0)
    job.process_pod_report(word("joined", 3, launcher="new"), 15.0)
    assert (job.generation_state.generation, job.generation_state.excluded_replicas) == (1, ())
    assert (job.saved.last[0].replaced, job.saved.last[0].replicas) == ([3], 3)


def test_without_min_replicas_all_wait() -> None:
    job = started(CUT.model_copy(update={"min_replicas": None}))
    lose(job, 3, 10.0)
    job.check_deadlines(1000.0)
    assert job.next_deadline(10.0) is None and job.generation_state.over
    assert (job.generation_state.generation, job.generation_state.excluded_replicas) == (0, ())


def test_with_fewer_than_min_replicas_all_wait() -> None:
    job = started(CUT.model_copy(update={"min_replicas": 3}))
    lose(job, 3, 10.0)
    job.check_deadlines(10.0 + REPLACED_SECONDS - 1)
    assert (
        job.generation_state.generation,
        job.generation_state.over,
        job.generation_state.awaits,
    ) == (0, True, 3)
    job.process_pod_report(word("joined", 3, launcher="new"), 200.0)
    assert (job.generation_state.generation, job.generation_state.excluded_replicas) == (0, ()), (
        "others have not polled for long"
    )
    end(job, 0, 1, 2, 4, 5, now=201.0)
    assert (job.generation_state.generation, job.generation_state.excluded_replicas) == (1, ())


def test_ranks_that_still_end_are_waited_for() -> None:
    job = started()
    end(job, 0, 1, 4, now=10.0, finished=5)
    job.expect_replacements([lost_pod(3, 10.0)], 10.0)
    job.check_deadlines(21.0)
    assert job.generation_state.over, "pods 2 and 5 may have ranks"
    end(job, 2, 5, now=22.0)
    assert (job.generation_state.generation, job.generation_state.excluded_replicas) == (1, (1,))


def test_a_silent_pod_is_given_up_later() -> None:
    job = started()
    end(job, 0, 1, 2, 4, 5, now=10.0, finished=5)
    assert job.next_deadline(10.0) == 10.0 + SILENT_SECONDS
    end(job, 0, 1, 2, 4, 5, now=40.0)
    job.check_deadlines(10.0 + SILENT_SECONDS)
    assert (job.generation_state.generation, job.generation_state.excluded_replicas) == (1, (1,))
    assert job.saved.last[0].cause == "pod 3 has not reported the end of its ranks"


def test_ranks_leave_when_a_replica_is_whole_again_and_it_runs() -> None:
    job = without(3)
    job.process_pod_report(word("gone", 2, 1, excluded_replicas=[1]), 25.0)
    assert not job.generation_state.leave, "pod 3 is missing"
    job.process_pod_report(word("joined", 3, launcher="new"), 26.0)
    assert not job.generation_state.leave, "it cannot start ranks at once"
    job.process_pod_report(word("gone", 3, 1, excluded_replicas=[1], launcher="new"), 27.0)
    assert job.generation_state.leave and not job.generation_state.over
    for pod in (0, 1, 4, 5):
        assert (job.generation_state.generation, job.generation_state.excluded_replicas) == (
            1,
            (1,),
        )
        job.process_pod_report(word("gone", pod, 1, excluded_replicas=[1], finished=9), 30.0)
    assert (
        job.generation_state.generation,
        job.generation_state.excluded_replicas,
        job.generation_state.leave,
    ) == (2, (), False)
    assert (job.saved.count, job.saved.counted) == (1, 0), "no failure"
    last = job.saved.last[-1]
    assert last.cause == "all pods of replica 1 are present again"
    assert (last.replicas, last.lost_at) == (3, "1970-01-01T00:00:30.000Z")


def test_a_failure_while_they_leave_counts_as_one() -> None:
    job = without(3)
    back(job, 3, 26.0)
    end(job, 0, 1, 4, now=30.0, loss=None)
    end(job, 5, now=30.0, loss=lost_peer(30.0, lost_peer=False, reason="rank 5 raised"))
    assert (job.generation_state.generation, job.generation_state.excluded_replicas) == (2, ()), (
        "pod 2 polled 20 s ago"
    )
    assert (job.saved.count, job.saved.last[-1].cause) == (2, "rank 5 raised")


def test_a_pod_without_ranks_that_does_not_poll_is_not_there() -> None:
    job = without(3)
    back(job, 3, 11.0 + ABSENT_SECONDS)
    assert not job.generation_state.leave, "pod 2 has not polled since its ranks ended"
    job.process_pod_report(word("gone", 2, 1, excluded_replicas=[1]), 50.0)
    assert job.generation_state.leave


def test_more_pods_may_be_lost() -> None:
    job = without(3)
    end(job, 0, 4, 5, now=40.0, finished=9)
    job.expect_replacements([lost_pod(1, 40.0)], 40.0)
    job.process_pod_report(word("gone", 2, 1, excluded_replicas=[1]), 45.0)
    job.check_deadlines(50.0)
    assert (job.generation_state.generation, job.generation_state.excluded_replicas) == (2, (0, 1))
    assert job.saved.last[-1].replicas == 1
    # A pod whose ranks do not run may be lost as well, without effect.
    job.expect_replacements([lost_pod(2, 55.0)], 55.0)
    back(job, 3, 56.0)
    assert not job.generation_state.leave and not job.generation_state.over
    back(job, 2, 57.0)
    assert job.generation_state.leave, "replica 1 is whole, and replica 0 is not"
    end(job, 4, 5, now=60.0, finished=12, loss=None)
    assert (job.generation_state.generation, job.generation_state.excluded_replicas) == (3, (0,))


def test_old_news_of_a_loss_do_not_take_the_new_pod_away() -> None:
    job = without(3)
    job.process_pod_report(word("gone", 2, 1, excluded_replicas=[1]), 25.0)
    job.process_pod_report(word("joined", 3, launcher="new"), 26.0, "new")
    job.expect_replacements([lost_pod(3, 25.0, uid="reported late")], 27.0)
    job.process_pod_report(word("gone", 3, 1, excluded_replicas=[1], launcher="new"), 28.0, "new")
    end(job, 0, 1, 4, 5, now=30.0, loss=None)
    assert job.generation_state.excluded_replicas == ()


def test_losses_without_progress_end_the_attempt_as_before() -> None:
    job = started()
    lose(job, 3, 10.0, finished=0)
    job.check_deadlines(20.0)
    assert (job.generation_state.verdict, job.saved.counted) == ("", 1)
    lose(job, 5, 30.0, finished=0)
    job.check_deadlines(40.0)
    assert (job.generation_state.verdict, job.generation_state.over) == ("attempt", True)


def test_pods_without_ranks_end_when_the_others_have_finished() -> None:
    job = without(3)
    job.process_pod_report(word("completed", 0, 1, excluded_replicas=[1]), 30.0)
    assert job.generation_state.verdict == "completed"
    again = JobGenerations(6, 5, saved=job.saved, cut=CUT, patience=PATIENCE)
    assert again.generation_state.verdict == "completed", "a pod may come back after the end"
    # But a rank that fails now cannot start again.
    end(again, 4, now=31.0)
    assert again.generation_state.verdict == "attempt"
    again.begin_attempt(1)
    assert (again.generation_state.verdict, again.generation_state.excluded_replicas) == ("", ())


def test_a_new_ingest_has_the_running_pods() -> None:
    job = without(3)
    saved = Recoveries.model_validate(job.saved.model_dump(by_alias=True))
    again = JobGenerations(6, 5, saved=saved, cut=CUT, patience=PATIENCE)
    assert again.generation_state.excluded_replicas == (1,)
    back(again, 3, 26.0)
    assert not again.generation_state.leave
    again.process_pod_report(word("gone", 2, 1, excluded_replicas=[1]), 27.0)
    assert again.generation_state.leave
    # An ingest that could not write it receives it from launchers.
    deaf = JobGenerations(6, 5, cut=CUT, patience=PATIENCE)
    assert not deaf.record_begun_generation(1), "a poll does not say without which replicas"
    deaf.process_pod_report(word("gone", 2, 1, excluded_replicas=[1]), 27.0)
    assert (
        deaf.generation_state.generation,
        deaf.generation_state.excluded_replicas,
        deaf.generation_state.over,
    ) == (1, (1,), False)
    deaf.process_pod_report(word("joined", 3, launcher="new"), 28.0)
    deaf.process_pod_report(word("gone", 3, 1, launcher="new", excluded_replicas=[1]), 29.0)
    for pod in (0, 1, 4, 5):
        deaf.process_pod_report(word("gone", pod, 1, excluded_replicas=[1]), 30.0)
    assert (deaf.generation_state.generation, deaf.generation_state.excluded_replicas) == (2, ())


def test_a_pod_whose_peers_notice_nothing_is_given_up_when_its_ranks_have_ended() -> None:
    """The node lost power, so that no connection has ended. Until its grace period is over, ranks
    of a deleted pod may save."""
    job = started()
    gone_by = lost_pod(3, 40.0).at
    job.expect_replacements([lost_pod(3, 10.0, gone_by=gone_by, cause="node n is lost")], 11.0)
    assert job.next_deadline(11.0) == 40.0 + NOTICE_SECONDS
    job.check_deadlines(41.0)
    assert not job.generation_state.over
    job.check_deadlines(42.0)
    assert (job.generation_state.over, job.generation_state.reason) == (True, "node n is lost")
    end(job, 0, 1, 2, 4, 5, now=43.0, finished=5)
    job.check_deadlines(42.0 + PATIENCE)
    assert (job.generation_state.generation, job.generation_state.excluded_replicas) == (1, (1,))
    (record,) = job.saved.last
    assert (record.pod, record.cause) == (3, "node n is lost")


def test_a_late_report_of_a_lost_pod_is_due_at_once() -> None:
    job = started()
    job.expect_replacements([lost_pod(3, 10.0, gone_by=lost_pod(3, 10.0).at)], 60.0)
    assert job.next_deadline(60.0) == 60.0
    job.check_deadlines(60.0)
    assert job.generation_state.over


def test_a_lost_pod_of_an_excluded_replica_makes_nothing_due() -> None:
    job = started()
    job.expect_replacements([lost_pod(3, 10.0, gone_by=lost_pod(3, 12.0).at)], 10.0)
    end(job, 0, 1, 2, 4, 5, now=11.0, finished=5)
    job.check_deadlines(11.0 + PATIENCE)
    assert job.generation_state.generation == 1
    assert job.next_deadline(21.5) is None
    job.check_deadlines(30.0)
    assert not job.generation_state.over


def taken_over(job: JobGenerations, *lost: PodReplacement, now: float) -> JobGenerations:
    """Returns the job in another ingest, which reads the status."""
    saved = Recoveries.model_validate(job.saved.model_dump(by_alias=True))
    again = JobGenerations(6, 5, saved=saved, done=9, cut=CUT, patience=PATIENCE)
    again.expect_replacements(lost, now)
    return again


def replaced(pod: int, at: float) -> tuple[JobGenerations, PodReplacement]:
    """A job in which another pod has joined in time, ``new``, and the ranks run again."""
    job, record = started(), lost_pod(pod, at, uid="old")
    end(job, *({0, 1, 2, 3, 4, 5} - {pod}), now=at, finished=5)
    job.expect_replacements([record], at)
    job.process_pod_report(word("joined", pod, launcher="new"), at + 2, "new")
    assert (job.generation_state.generation, job.generation_state.excluded_replicas) == (1, ())
    return job, record


def test_another_ingest_does_not_take_a_pod_that_was_replaced_for_lost() -> None:
    job, record = replaced(3, 10.0)
    again = taken_over(job, record, now=60.0)
    error = lost_peer(60.0, lost_peer=False, reason="rank 3 raised")
    again.process_pod_report(word("gone", 3, 1, launcher="new", loss=error), 60.0, "new")
    for pod in (0, 1, 2, 4, 5):
        again.process_pod_report(word("gone", pod, 1, loss=lost_peer(60.0)), 61.0, f"uid {pod}")
    assert (again.generation_state.generation, again.generation_state.excluded_replicas) == (2, ())
    assert again.saved.last[-1].cause == "rank 3 raised"


def test_another_ingest_learns_of_a_pod_that_was_replaced_by_its_poll() -> None:
    """The poll comes before a report, lest a replica that is back waits for it."""
    job = without(5)
    end(job, 0, 1, 2, now=20.0, finished=9)
    record = lost_pod(3, 20.0, uid="old")
    job.expect_replacements([record], 20.0)
    job.process_pod_report(word("joined", 3, launcher="new"), 21.0, "new")
    assert (job.generation_state.generation, job.generation_state.excluded_replicas) == (2, (2,))
    again = taken_over(job, record, now=60.0)
    again.record_poll(3, "new", 60.0)
    again.process_pod_report(word("gone", 4, 2, excluded_replicas=[2]), 61.0)
    back(again, 5, 62.0)
    assert again.generation_state.leave


def test_reports_of_the_lost_pod_to_another_ingest_do_not_refuse_the_new_one() -> None:
    job, record = replaced(3, 10.0)
    again = taken_over(job, record, now=12.0)
    again.process_pod_report(word("gone", 3, 1, launcher="old", loss=lost_peer(12.0)), 12.0, "old")
    assert again.generation_state.awaits == 3
    again.process_pod_report(word("gone", 3, 1, launcher="new", loss=lost_peer(12.0)), 13.0, "new")
    assert again.generation_state.awaits is None
    with pytest.raises(WrongAttempt, match="pod 3 is lost"):
        again.process_pod_report(word("gone", 3, 1, launcher="old"), 14.0, "old")


def test_a_second_loss_within_the_same_second_is_one() -> None:
    job = without(3)
    job.process_pod_report(word("gone", 2, 1, excluded_replicas=[1]), 25.0)
    job.process_pod_report(word("joined", 3, launcher="new"), 26.7, "new")
    job.expect_replacements([lost_pod(3, 26.0, uid="new")], 26.9)
    job.process_pod_report(word("gone", 3, 1, excluded_replicas=[1], launcher="new"), 26.9, "new")
    assert not job.generation_state.leave, "it is being deleted"


def test_pods_that_wait_hear_that_the_others_have_finished_from_rank_0s_agent() -> None:
    job = without(3)
    assert job.process_rank_report(trained(state="finished"), 30.0), "status has to be written"
    assert job.generation_state.verdict == "completed"
    assert JobGenerations(6, 5, saved=job.saved, cut=CUT).generation_state.verdict == "completed"


def test_the_wait_for_ranks_that_are_to_leave_ends() -> None:
    job = without(3)
    back(job, 3, 26.0)
    job.process_pod_report(word("gone", 2, 1, excluded_replicas=[1]), 27.0)
    assert job.generation_state.leave
    job.record_poll(0, "", 100.0)
    end_at = 100.0 + LEAVE_SECONDS
    assert job.next_deadline(100.0) == end_at
    job.process_pod_report(word("gone", 2, 1, excluded_replicas=[1]), end_at - 1)
    assert job.generation_state.verdict == ""
    job.process_pod_report(word("gone", 2, 1, excluded_replicas=[1]), end_at)
    assert (job.generation_state.verdict, job.generation_state.generation) == ("attempt", 1), (
        "they may still run"
    )
    assert job.generation_state.why == "ranks that are to leave have not reported for 600 s"


def test_a_failure_of_a_pod_that_was_evicted_while_it_waited_counts() -> None:
    job = without(3)
    job.expect_replacements([lost_pod(2, 21.0, uid="evicted", counted=False)], 21.0)
    back(job, 2, 24.0)
    back(job, 3, 26.0)
    end(job, 0, 1, 4, 5, now=30.0, loss=None)
    assert (job.generation_state.excluded_replicas, job.saved.counted) == ((), 0)
    for launcher in ("newer", "newest"):
        end(job, 0, 1, 4, 5, now=40.0)
        job.process_pod_report(
            word("gone", 3, job.generation_state.generation, launcher="new", loss=lost_peer(40.0)),
            40.0,
        )
        job.expect_replacements([lost_pod(2, 40.0, uid=launcher)], 40.0)
        job.process_pod_report(word("joined", 2, launcher=launcher), 41.0)
    assert job.saved.counted == 1, "the second without a further iteration"


def test_an_eviction_does_not_excuse_the_next_generation() -> None:
    job = started()
    lose(job, 3, 10.0)
    job.expect_replacements([lost_pod(2, 11.0, uid="evicted", counted=False)], 11.0)
    job.check_deadlines(21.0)
    back(job, 2, 24.0)
    assert not job.pod_tracker.uncounted_pods
    job.expect_replacements([lost_pod(2, 25.0, uid="again", counted=False)], 25.0)
    assert job.pod_tracker.uncounted_pods == {2}
    job.expect_replacements([lost_pod(2, 26.0, uid="killed")], 26.0)
    assert not job.pod_tracker.uncounted_pods


def test_ranks_that_cannot_leave_receive_another_request_later() -> None:
    job = without(3)
    back(job, 3, 26.0)
    job.process_pod_report(word("gone", 2, 1, excluded_replicas=[1]), 27.0)
    assert job.generation_state.leave
    job.process_pod_report(
        word("stays", 0, 1, excluded_replicas=[1], why="rank 2: it has no copy"), 30.0
    )
    assert (job.generation_state.leave, job.stay_reason) == (False, "rank 2: it has no copy")
    assert job.next_deadline(31.0) == 30.0 + STAY_SECONDS
    for now in (45.0, 60.0, 75.0, 30.0 + STAY_SECONDS - 1):
        job.process_pod_report(word("gone", 2, 1, excluded_replicas=[1]), now)
        job.process_pod_report(word("gone", 3, 1, excluded_replicas=[1], launcher="new"), now)
        assert not job.generation_state.leave
    job.check_deadlines(30.0 + STAY_SECONDS)
    assert job.generation_state.leave
    end(job, 0, 1, 4, 5, now=95.0, loss=None)
    assert (job.generation_state.excluded_replicas, job.stay_reason) == ((), "")


def test_the_others_wait_for_a_pod_from_when_they_have_lost_it() -> None:
    """The notice comes first: a pod that has to end has time to save."""
    job = started()
    job.expect_replacements([lost_pod(3, 10.0)], 10.0)
    end(job, 0, 1, 2, 4, 5, now=40.0, finished=5)
    job.check_deadlines(40.0 + PATIENCE - 1)
    assert job.generation_state.over
    job.check_deadlines(40.0 + PATIENCE)
    assert job.generation_state.excluded_replicas == (1,)


def test_ranks_that_leave_to_another_ingest_have_not_failed() -> None:
    job = without(3)
    back(job, 3, 26.0)
    job.process_pod_report(word("gone", 2, 1, excluded_replicas=[1]), 27.0)
    assert job.generation_state.leave
    again = taken_over(job, lost_pod(3, 10.0), now=29.0)
    counts = again.saved.count, again.saved.counted
    for pod in (0, 1, 4, 5):
        again.process_pod_report(
            word("gone", pod, 1, excluded_replicas=[1], finished=9), 30.0, f"uid {pod}"
        )
    assert again.generation_state.over, "pods that wait have not polled yet"
    assert again.next_deadline(30.0) == 30.0 + TAKEOVER_SECONDS
    again.process_pod_report(word("gone", 2, 1, excluded_replicas=[1]), 33.0, "uid 2")
    again.process_pod_report(
        word("gone", 3, 1, excluded_replicas=[1], launcher="new"), 34.0, "uid 3"
    )
    for pod in (0, 1, 4, 5):
        again.process_pod_report(
            word("gone", pod, 1, excluded_replicas=[1], finished=9), 35.0, f"uid {pod}"
        )
    assert (again.generation_state.generation, again.generation_state.excluded_replicas) == (2, ())
    assert (again.saved.count, again.saved.counted) == counts
    assert again.saved.last[-1].cause == "all pods of replica 1 are present again"


def test_an_ingest_that_took_over_does_not_wait_long_for_pods_that_are_not_there() -> None:
    again = taken_over(without(3), now=29.0)
    for pod in (0, 1, 4, 5):
        again.process_pod_report(
            word("gone", pod, 1, excluded_replicas=[1], loss=lost_peer(30.0)), 30.0
        )
    again.check_deadlines(30.0 + TAKEOVER_SECONDS - 1)
    assert again.generation_state.over
    again.check_deadlines(30.0 + TAKEOVER_SECONDS)
    assert (again.generation_state.generation, again.generation_state.excluded_replicas) == (
        2,
        (1,),
    )
