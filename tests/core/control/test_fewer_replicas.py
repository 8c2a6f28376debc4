"""Which replicas train while pods of others are missing: no sockets, no clock."""

from __future__ import annotations

from typing import Any

import pytest
from observing import trained
from pod_words import lost_peer, lost_pod, word

from pipemorph.api.sections.parallelism import Parallelism
from pipemorph.api.status_recoveries import PodReplacement, Recoveries
from pipemorph.control.generations import Generations
from pipemorph.control.observed.reports import WrongAttempt
from pipemorph.control.pods.leaving import LEAVE_SECONDS, STAY_SECONDS
from pipemorph.control.pods.presence import (
    GONE_SECONDS,
    REPLACED_SECONDS,
    SILENT_SECONDS,
    TAKEOVER_SECONDS,
    UNHEARD_SECONDS,
)

# Pods 0 and 1 are replica 0, pods 2 and 3 replica 1, pods 4 and 5 replica 2.
CUT = Parallelism(stages=2, replicas=3, min_replicas=1, order=["dp_replicate", "pp"])
PATIENCE = 10.0


def started(cut: Parallelism = CUT, most: int = 5) -> Generations:
    job = Generations(cut.pods, most, cut=cut, patience=PATIENCE)
    for pod in range(cut.pods):
        job.take(word("joined", pod), 1.0)
    return job


def end(job: Generations, *pods: int, now: float, finished: int = 0, **fields: Any) -> None:
    """The ranks of some pods have ended, since they lost another one."""
    for pod in pods:
        told = {"loss": lost_peer(now), "finished": finished, **fields}
        left = list(job.left_out)
        job.take(word("gone", pod, job.state.generation, left_out=left, **told), now)


def lose(job: Generations, pod: int, now: float, finished: int = 5) -> None:
    """A pod is lost, and the operator says so at once."""
    others = set(range(6)) - {pod}
    end(job, *(each for each in others if job.presence.runs(each)), now=now, finished=finished)
    job.expect([lost_pod(pod, now)], now)


def back(job: Generations, pod: int, now: float) -> None:
    """Another pod has begun in the place of one whose replica does not run, and imported."""
    job.take(word("joined", pod, launcher="new"), now - 0.5)
    generation, left = job.state.generation, list(job.left_out)
    job.take(word("gone", pod, generation, left_out=left, launcher="new"), now)


def without(pod: int, now: float = 10.0) -> Generations:
    """A job that goes on without the replica of a pod."""
    job = started()
    lose(job, pod, now)
    job.look(now + PATIENCE)
    return job


def test_whole_replicas_go_on_when_the_lost_pod_is_not_back_in_time() -> None:
    job = started()
    lose(job, 3, 10.0)
    assert job.due(10.0) == 10.0 + PATIENCE
    job.look(19.9)
    assert job.state.over and job.state.awaits == 3
    job.look(20.0)
    state = job.state
    assert (state.generation, state.over, state.left_out, state.leave) == (1, False, (1,), False)
    (record,) = job.saved.last
    assert (record.pod, record.replicas, record.replaced) == (3, 2, [])
    assert record.cause == "pod 3 exited with code 137"
    assert record.lost_at == "1970-01-01T00:00:10.000Z"


def test_a_pod_that_is_back_in_time_leaves_no_replica_out() -> None:
    job = started()
    lose(job, 3, 10.0)
    job.take(word("joined", 3, launcher="new"), 15.0)
    assert (job.state.generation, job.state.left_out) == (1, ())
    assert (job.saved.last[0].replaced, job.saved.last[0].replicas) == ([3], 3)


def test_without_min_replicas_all_wait() -> None:
    job = started(CUT.model_copy(update={"min_replicas": None}))
    lose(job, 3, 10.0)
    job.look(1000.0)
    assert job.due(10.0) is None and job.state.over
    assert (job.state.generation, job.state.left_out) == (0, ())


def test_with_fewer_than_min_replicas_all_wait() -> None:
    job = started(CUT.model_copy(update={"min_replicas": 3}))
    lose(job, 3, 10.0)
    job.look(10.0 + REPLACED_SECONDS - 1)
    assert (job.state.generation, job.state.over, job.state.awaits) == (0, True, 3)
    job.take(word("joined", 3, launcher="new"), 200.0)
    assert (job.state.generation, job.state.left_out) == (0, ()), "others have not asked for long"
    end(job, 0, 1, 2, 4, 5, now=201.0)
    assert (job.state.generation, job.state.left_out) == (1, ())


def test_ranks_that_still_end_are_waited_for() -> None:
    job = started()
    end(job, 0, 1, 4, now=10.0, finished=5)
    job.expect([lost_pod(3, 10.0)], 10.0)
    job.look(21.0)
    assert job.state.over, "pods 2 and 5 may have ranks"
    end(job, 2, 5, now=22.0)
    assert (job.state.generation, job.state.left_out) == (1, (1,))


def test_a_pod_that_says_nothing_is_given_up_later() -> None:
    job = started()
    end(job, 0, 1, 2, 4, 5, now=10.0, finished=5)
    assert job.due(10.0) == 10.0 + SILENT_SECONDS
    end(job, 0, 1, 2, 4, 5, now=40.0)
    job.look(10.0 + SILENT_SECONDS)
    assert (job.state.generation, job.state.left_out) == (1, (1,))
    assert job.saved.last[0].cause == "pod 3 does not say that its ranks have ended"


def test_ranks_leave_when_a_replica_is_whole_again_and_it_runs() -> None:
    job = without(3)
    job.take(word("gone", 2, 1, left_out=[1]), 25.0)
    assert not job.state.leave, "pod 3 is missing"
    job.take(word("joined", 3, launcher="new"), 26.0)
    assert not job.state.leave, "it cannot start ranks at once"
    job.take(word("gone", 3, 1, left_out=[1], launcher="new"), 27.0)
    assert job.state.leave and not job.state.over
    for pod in (0, 1, 4, 5):
        assert (job.state.generation, job.state.left_out) == (1, (1,))
        job.take(word("gone", pod, 1, left_out=[1], finished=9), 30.0)
    assert (job.state.generation, job.state.left_out, job.state.leave) == (2, (), False)
    told = job.saved
    assert (told.count, told.counted) == (1, 0), "no failure"
    assert told.last[-1].cause == "all pods of replica 1 are there again"
    assert (told.last[-1].replicas, told.last[-1].lost_at) == (3, "1970-01-01T00:00:30.000Z")


def test_a_failure_while_they_leave_counts_as_one() -> None:
    job = without(3)
    back(job, 3, 26.0)
    end(job, 0, 1, 4, now=30.0, loss=None)
    end(job, 5, now=30.0, loss=lost_peer(30.0, lost_peer=False, reason="rank 5 raised"))
    assert (job.state.generation, job.state.left_out) == (2, ()), "pod 2 was heard 20 s ago"
    assert (job.saved.count, job.saved.last[-1].cause) == (2, "rank 5 raised")


def test_a_pod_without_ranks_that_is_not_heard_of_is_not_there() -> None:
    job = without(3)
    back(job, 3, 11.0 + UNHEARD_SECONDS)
    assert not job.state.leave, "pod 2 has not asked since its ranks ended"
    job.take(word("gone", 2, 1, left_out=[1]), 50.0)
    assert job.state.leave


def test_more_pods_may_be_lost() -> None:
    job = without(3)
    end(job, 0, 4, 5, now=40.0, finished=9)
    job.expect([lost_pod(1, 40.0)], 40.0)
    job.take(word("gone", 2, 1, left_out=[1]), 45.0)
    job.look(50.0)
    assert (job.state.generation, job.state.left_out) == (2, (0, 1))
    assert job.saved.last[-1].replicas == 1
    # One whose ranks do not run may be lost as well, and nobody minds.
    job.expect([lost_pod(2, 55.0)], 55.0)
    back(job, 3, 56.0)
    assert not job.state.leave and not job.state.over
    back(job, 2, 57.0)
    assert job.state.leave, "replica 1 is whole, and replica 0 is not"
    end(job, 4, 5, now=60.0, finished=12, loss=None)
    assert (job.state.generation, job.state.left_out) == (3, (0,))


def test_old_news_of_a_loss_do_not_take_the_new_pod_away() -> None:
    job = without(3)
    job.take(word("gone", 2, 1, left_out=[1]), 25.0)
    job.take(word("joined", 3, launcher="new"), 26.0, "new")
    job.expect([lost_pod(3, 25.0, uid="told late")], 27.0)
    job.take(word("gone", 3, 1, left_out=[1], launcher="new"), 28.0, "new")
    end(job, 0, 1, 4, 5, now=30.0, loss=None)
    assert job.state.left_out == ()


def test_losses_without_progress_end_the_attempt_as_before() -> None:
    job = started()
    lose(job, 3, 10.0, finished=0)
    job.look(20.0)
    assert (job.state.verdict, job.saved.counted) == ("", 1)
    lose(job, 5, 30.0, finished=0)
    job.look(40.0)
    assert (job.state.verdict, job.state.over) == ("attempt", True)


def test_pods_without_ranks_end_when_the_others_have_finished() -> None:
    job = without(3)
    job.take(word("completed", 0, 1, left_out=[1]), 30.0)
    assert job.state.verdict == "completed"
    again = Generations(6, 5, saved=job.saved, cut=CUT, patience=PATIENCE)
    assert again.state.verdict == "completed", "a pod may come back after the end"
    # But a rank that fails now cannot start again.
    end(again, 4, now=31.0)
    assert again.state.verdict == "attempt"
    again.begin_attempt(1)
    assert (again.state.verdict, again.state.left_out) == ("", ())


def test_an_ingest_that_is_replaced_knows_who_runs() -> None:
    job = without(3)
    saved = Recoveries.model_validate(job.saved.model_dump(by_alias=True))
    again = Generations(6, 5, saved=saved, cut=CUT, patience=PATIENCE)
    assert again.state.left_out == (1,)
    back(again, 3, 26.0)
    assert not again.state.leave
    again.take(word("gone", 2, 1, left_out=[1]), 27.0)
    assert again.state.leave
    # One that could not write it hears it from launchers.
    deaf = Generations(6, 5, cut=CUT, patience=PATIENCE)
    assert not deaf.begun(1), "a poll does not say without which replicas"
    deaf.take(word("gone", 2, 1, left_out=[1]), 27.0)
    assert (deaf.state.generation, deaf.state.left_out, deaf.state.over) == (1, (1,), False)
    deaf.take(word("joined", 3, launcher="new"), 28.0)
    deaf.take(word("gone", 3, 1, launcher="new", left_out=[1]), 29.0)
    for pod in (0, 1, 4, 5):
        deaf.take(word("gone", pod, 1, left_out=[1]), 30.0)
    assert (deaf.state.generation, deaf.state.left_out) == (2, ())


def test_a_pod_whose_peers_notice_nothing_is_given_up_when_its_ranks_have_ended() -> None:
    """Its node lost power, so that no connection has ended. Until its grace period is over, ranks
    of a pod that is deleted may save."""
    job = started()
    gone_by = lost_pod(3, 40.0).at
    job.expect([lost_pod(3, 10.0, gone_by=gone_by, cause="node n is lost")], 11.0)
    assert job.due(11.0) == 40.0 + GONE_SECONDS
    job.look(41.0)
    assert not job.state.over
    job.look(42.0)
    assert (job.state.over, job.state.reason) == (True, "node n is lost")
    end(job, 0, 1, 2, 4, 5, now=43.0, finished=5)
    job.look(42.0 + PATIENCE)
    assert (job.state.generation, job.state.left_out) == (1, (1,))
    (record,) = job.saved.last
    assert (record.pod, record.cause) == (3, "node n is lost")


def test_what_is_told_late_of_a_lost_pod_is_due_at_once() -> None:
    job = started()
    job.expect([lost_pod(3, 10.0, gone_by=lost_pod(3, 10.0).at)], 60.0)
    assert job.due(60.0) == 60.0
    job.look(60.0)
    assert job.state.over


def test_of_a_lost_pod_whose_replica_is_left_out_nothing_is_due() -> None:
    job = started()
    job.expect([lost_pod(3, 10.0, gone_by=lost_pod(3, 12.0).at)], 10.0)
    end(job, 0, 1, 2, 4, 5, now=11.0, finished=5)
    job.look(11.0 + PATIENCE)
    assert job.state.generation == 1
    assert job.due(21.5) is None
    job.look(30.0)
    assert not job.state.over


def taken_over(job: Generations, *lost: PodReplacement, now: float) -> Generations:
    """The same job in another ingest, which finds what is in status."""
    saved = Recoveries.model_validate(job.saved.model_dump(by_alias=True))
    again = Generations(6, 5, saved=saved, done=9, cut=CUT, patience=PATIENCE)
    again.expect(lost, now)
    return again


def replaced(pod: int, at: float) -> tuple[Generations, PodReplacement]:
    """A job in which another pod has joined in time, ``new``, and the ranks run again."""
    job, record = started(), lost_pod(pod, at, uid="old")
    end(job, *({0, 1, 2, 3, 4, 5} - {pod}), now=at, finished=5)
    job.expect([record], at)
    job.take(word("joined", pod, launcher="new"), at + 2, "new")
    assert (job.state.generation, job.state.left_out) == (1, ())
    return job, record


def test_another_ingest_does_not_take_a_pod_that_was_replaced_for_lost() -> None:
    job, record = replaced(3, 10.0)
    again = taken_over(job, record, now=60.0)
    error = lost_peer(60.0, lost_peer=False, reason="rank 3 raised")
    again.take(word("gone", 3, 1, launcher="new", loss=error), 60.0, "new")
    for pod in (0, 1, 2, 4, 5):
        again.take(word("gone", pod, 1, loss=lost_peer(60.0)), 61.0, f"uid {pod}")
    assert (again.state.generation, again.state.left_out) == (2, ())
    assert again.saved.last[-1].cause == "rank 3 raised"


def test_another_ingest_hears_of_a_pod_that_was_replaced_by_its_poll() -> None:
    """Before it says anything, lest a replica that is back waits for it."""
    job = without(5)
    end(job, 0, 1, 2, now=20.0, finished=9)
    record = lost_pod(3, 20.0, uid="old")
    job.expect([record], 20.0)
    job.take(word("joined", 3, launcher="new"), 21.0, "new")
    assert (job.state.generation, job.state.left_out) == (2, (2,))
    again = taken_over(job, record, now=60.0)
    again.heard(3, "new", 60.0)
    again.take(word("gone", 4, 2, left_out=[2]), 61.0)
    back(again, 5, 62.0)
    assert again.state.leave


def test_what_the_lost_pod_says_to_another_ingest_does_not_refuse_the_new_one() -> None:
    job, record = replaced(3, 10.0)
    again = taken_over(job, record, now=12.0)
    again.take(word("gone", 3, 1, launcher="old", loss=lost_peer(12.0)), 12.0, "old")
    assert again.state.awaits == 3
    again.take(word("gone", 3, 1, launcher="new", loss=lost_peer(12.0)), 13.0, "new")
    assert again.state.awaits is None
    with pytest.raises(WrongAttempt, match="pod 3 is lost"):
        again.take(word("gone", 3, 1, launcher="old"), 14.0, "old")


def test_a_second_loss_within_the_same_second_is_one() -> None:
    job = without(3)
    job.take(word("gone", 2, 1, left_out=[1]), 25.0)
    job.take(word("joined", 3, launcher="new"), 26.7, "new")
    job.expect([lost_pod(3, 26.0, uid="new")], 26.9)
    job.take(word("gone", 3, 1, left_out=[1], launcher="new"), 26.9, "new")
    assert not job.state.leave, "it is being deleted"


def test_pods_that_wait_hear_that_the_others_have_finished_from_rank_0s_agent() -> None:
    job = without(3)
    assert job.reported(trained(state="finished"), 30.0), "status has to be written"
    assert job.state.verdict == "completed"
    assert Generations(6, 5, saved=job.saved, cut=CUT).state.verdict == "completed"


def test_nobody_waits_forever_for_ranks_that_are_to_leave() -> None:
    job = without(3)
    back(job, 3, 26.0)
    job.take(word("gone", 2, 1, left_out=[1]), 27.0)
    assert job.state.leave
    job.heard(0, "", 100.0)
    end_at = 100.0 + LEAVE_SECONDS
    assert job.due(100.0) == end_at
    job.take(word("gone", 2, 1, left_out=[1]), end_at - 1)
    assert job.state.verdict == ""
    job.take(word("gone", 2, 1, left_out=[1]), end_at)
    assert (job.state.verdict, job.state.generation) == ("attempt", 1), "they may still run"
    assert job.state.why == "nothing was heard for 600 s of ranks that are to leave"


def test_a_failure_of_a_pod_that_was_evicted_while_it_waited_counts() -> None:
    job = without(3)
    job.expect([lost_pod(2, 21.0, uid="evicted", counted=False)], 21.0)
    back(job, 2, 24.0)
    back(job, 3, 26.0)
    end(job, 0, 1, 4, 5, now=30.0, loss=None)
    assert (job.state.left_out, job.saved.counted) == ((), 0)
    for launcher in ("newer", "newest"):
        end(job, 0, 1, 4, 5, now=40.0)
        job.take(word("gone", 3, job.state.generation, launcher="new", loss=lost_peer(40.0)), 40.0)
        job.expect([lost_pod(2, 40.0, uid=launcher)], 40.0)
        job.take(word("joined", 2, launcher=launcher), 41.0)
    assert job.saved.counted == 1, "the second without a further iteration"


def test_an_eviction_does_not_excuse_the_next_generation() -> None:
    job = started()
    lose(job, 3, 10.0)
    job.expect([lost_pod(2, 11.0, uid="evicted", counted=False)], 11.0)
    job.look(21.0)
    back(job, 2, 24.0)
    assert not job.presence.uncounted
    job.expect([lost_pod(2, 25.0, uid="again", counted=False)], 25.0)
    assert job.presence.uncounted == {2}
    job.expect([lost_pod(2, 26.0, uid="killed")], 26.0)
    assert not job.presence.uncounted


def test_ranks_that_cannot_leave_are_asked_again_later() -> None:
    job = without(3)
    back(job, 3, 26.0)
    job.take(word("gone", 2, 1, left_out=[1]), 27.0)
    assert job.state.leave
    job.take(word("stays", 0, 1, left_out=[1], why="rank 2: it has no copy"), 30.0)
    assert (job.state.leave, job.stays) == (False, "rank 2: it has no copy")
    assert job.due(31.0) == 30.0 + STAY_SECONDS
    for now in (45.0, 60.0, 75.0, 30.0 + STAY_SECONDS - 1):
        job.take(word("gone", 2, 1, left_out=[1]), now)
        job.take(word("gone", 3, 1, left_out=[1], launcher="new"), now)
        assert not job.state.leave
    job.look(30.0 + STAY_SECONDS)
    assert job.state.leave
    end(job, 0, 1, 4, 5, now=95.0, loss=None)
    assert (job.state.left_out, job.stays) == ((), "")


def test_the_others_wait_for_a_pod_from_when_they_have_lost_it() -> None:
    """The notice comes first: a pod that is asked to end has time to save."""
    job = started()
    job.expect([lost_pod(3, 10.0)], 10.0)
    end(job, 0, 1, 2, 4, 5, now=40.0, finished=5)
    job.look(40.0 + PATIENCE - 1)
    assert job.state.over
    job.look(40.0 + PATIENCE)
    assert job.state.left_out == (1,)


def test_ranks_that_leave_to_another_ingest_have_not_failed() -> None:
    job = without(3)
    back(job, 3, 26.0)
    job.take(word("gone", 2, 1, left_out=[1]), 27.0)
    assert job.state.leave
    again = taken_over(job, lost_pod(3, 10.0), now=29.0)
    counts = again.saved.count, again.saved.counted
    for pod in (0, 1, 4, 5):
        again.take(word("gone", pod, 1, left_out=[1], finished=9), 30.0, f"uid {pod}")
    assert again.state.over, "pods that wait have not asked yet"
    assert again.due(30.0) == 30.0 + TAKEOVER_SECONDS
    again.take(word("gone", 2, 1, left_out=[1]), 33.0, "uid 2")
    again.take(word("gone", 3, 1, left_out=[1], launcher="new"), 34.0, "uid 3")
    for pod in (0, 1, 4, 5):
        again.take(word("gone", pod, 1, left_out=[1], finished=9), 35.0, f"uid {pod}")
    assert (again.state.generation, again.state.left_out) == (2, ())
    assert (again.saved.count, again.saved.counted) == counts
    assert again.saved.last[-1].cause == "all pods of replica 1 are there again"


def test_an_ingest_that_took_over_does_not_wait_long_for_pods_that_are_not_there() -> None:
    again = taken_over(without(3), now=29.0)
    for pod in (0, 1, 4, 5):
        again.take(word("gone", pod, 1, left_out=[1], loss=lost_peer(30.0)), 30.0)
    again.look(30.0 + TAKEOVER_SECONDS - 1)
    assert again.state.over
    again.look(30.0 + TAKEOVER_SECONDS)
    assert (again.state.generation, again.state.left_out) == (2, (1,))
