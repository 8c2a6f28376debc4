"""Which replicas train while pods of others are missing: no sockets, no clock."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from pipemorph.api.parallelism import Parallelism
from pipemorph.api.status import PodReplacement, Recoveries
from pipemorph.control.generations import (
    REPLACED_SECONDS,
    SILENT_SECONDS,
    UNHEARD_SECONDS,
    Generations,
)
from pipemorph.wire import Loss, PodReport

# Pods 0 and 1 are replica 0, pods 2 and 3 replica 1, pods 4 and 5 replica 2.
CUT = Parallelism(stages=2, replicas=3, min_replicas=1, order=["dp_replicate", "pp"])
PATIENCE = 10.0


def loss(at: float, **fields: Any) -> Loss:
    return Loss.model_validate(
        {"reason": "rank 0 lost rank 1", "at": at, "rank": 0, "lost_peer": True, **fields}
    )


def word(event: str, pod: int, generation: int = 0, **fields: Any) -> PodReport:
    return PodReport.model_validate(
        {
            "attempt": 0,
            "generation": generation,
            "pod": pod,
            "event": event,
            "launcher": f"pod {pod}",
            **fields,
        }
    )


def lost_pod(pod: int, at: float, **fields: Any) -> PodReplacement:
    when = datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
    given = {"uid": f"{pod} {at}", "cause": f"pod {pod} exited with code 137", **fields}
    return PodReplacement(attempt=0, pod=pod, at=when, **given)


def started(cut: Parallelism = CUT, most: int = 5) -> Generations:
    job = Generations(cut.pods, most, cut=cut, patience=PATIENCE)
    for pod in range(cut.pods):
        job.take(word("joined", pod), 1.0)
    return job


def end(job: Generations, *pods: int, now: float, finished: int = 0, **fields: Any) -> None:
    """The ranks of some pods have ended, since they lost another one."""
    for pod in pods:
        told = {"loss": loss(now), "finished": finished, **fields}
        left = list(job.left_out)
        job.take(word("gone", pod, job.state.generation, left_out=left, **told), now)


def lose(job: Generations, pod: int, now: float, finished: int = 5) -> None:
    """A pod is lost, and the operator says so at once."""
    others = set(range(6)) - {pod}
    end(job, *(each for each in others if job._runs(each)), now=now, finished=finished)
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
    end(job, 5, now=30.0, loss=loss(30.0, lost_peer=False, reason="rank 5 raised"))
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
    job.take(word("joined", 3, launcher="new"), 26.0)
    job.expect([lost_pod(3, 25.0, uid="told late")], 27.0)
    job.take(word("gone", 3, 1, left_out=[1], launcher="new"), 28.0)
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
