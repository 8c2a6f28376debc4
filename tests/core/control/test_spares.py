"""Spares in the places of lost pods: no sockets, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from observing import trained
from pod_words import lost_peer, lost_pod, word

from pipemorph.api.sections.parallelism import Parallelism
from pipemorph.api.status_recoveries import Recoveries
from pipemorph.control.generations import Generations
from pipemorph.control.pods.leaving import LEAVE_SECONDS
from pipemorph.control.pods.presence import (
    COMES_SECONDS,
    GONE_SECONDS,
    REPLACED_SECONDS,
    SILENT_SECONDS,
    UNHEARD_SECONDS,
)
from pipemorph.wire import PodReport

# Pods 0 and 1 are replica 0, pods 2 and 3 replica 1, pods 4 and 5 replica 2, pod 6 is a spare.
CUT = Parallelism(stages=2, replicas=3, spares=1, order=["dp_replicate", "pp"])
FEWER = CUT.model_copy(update={"min_replicas": 1})
PATIENCE = 10.0


def told(job: Generations, pod: int, **fields: Any) -> PodReport:
    """What the launcher of a pod says when no rank runs there."""
    known: dict[str, Any] = {"left_out": list(job.left_out), "places": job.places}
    known["launcher"] = job.presence.launchers.get(pod, f"pod {pod}")
    return word("gone", pod, job.state.generation, **known | fields)


def stands_by(job: Generations, pod: int, now: float) -> None:
    """A pod without ranks asks for the next generation."""
    job.take(told(job, pod), now)


def started(cut: Parallelism = CUT, most: int = 5, late: Sequence[int] = ()) -> Generations:
    """``late``: pods that have not come."""
    job = Generations(cut.all_pods, most, cut=cut, patience=PATIENCE)
    there = [pod for pod in range(cut.all_pods) if pod not in late]
    for pod in there:
        job.take(word("joined", pod), 1.0)
    for pod in there:
        if pod >= cut.pods:
            stands_by(job, pod, 2.0)
    return job


def end(job: Generations, *pods: int, now: float, finished: int = 5, **fields: Any) -> None:
    """The ranks of some pods have ended, since they lost another one."""
    for pod in pods:
        given: dict[str, Any] = {"loss": lost_peer(now), "finished": finished}
        job.take(told(job, pod, **given | fields), now)


def lose(job: Generations, *pods: int, now: float, finished: int = 5, **fields: Any) -> None:
    """Pods are lost. The operator says so when the others' ranks have ended."""
    others = (each for each in range(job.pods) if each not in pods and job.presence.runs(each))
    end(job, *others, now=now, finished=finished)
    job.expect([lost_pod(pod, now, **fields) for pod in pods], now)
    due = job.due(now)
    if due is not None and due <= now:
        job.look(now)


def back(job: Generations, pod: int, now: float, launcher: str = "new") -> None:
    """Another pod has begun in the place of a lost one, and imported."""
    job.take(word("joined", pod, launcher=launcher), now - 0.5)
    stands_by(job, pod, now)


def test_a_spare_takes_the_place_of_a_lost_pod_as_soon_as_the_loss_is_known() -> None:
    job = started()
    assert (job.spares_ready, job.told and job.told.spares_ready) == (1, 1)
    stands_by(job, 6, 9.0)
    end(job, 0, 1, 2, 4, 5, now=10.0)
    assert job.state.over, "nobody knows yet what has become of pod 3"
    job.expect([lost_pod(3, 9.0)], 11.0)
    assert job.state.awaits == 3
    due = job.due(11.0)
    assert due is not None and due <= 11.0, "also when it is told in whole seconds"
    job.look(11.0)
    state = job.state
    assert (state.generation, state.over, state.places) == (1, False, ((3, 6),))
    assert state.left_out == ()
    (record,) = job.saved.last
    assert (record.pod, record.cause) == (3, "pod 3 exited with code 137")
    assert [(each.pod, each.instead_of) for each in record.spares] == [(6, 3)]
    assert (record.replaced, record.replicas) == ([], None)
    assert (job.saved.count, job.spares_ready) == (1, 0)
    end(job, 0, 1, 2, 4, now=20.0, finished=9)
    assert job.state.over and job.state.awaits is None, "nobody waits for the new pod 3"


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
    stands_by(job, 6, 42.5)
    end(job, 0, 1, 2, 4, 5, now=43.0)
    job.look(43.0)
    assert (job.state.generation, job.state.places) == (1, ((3, 6),))
    (record,) = job.saved.last
    assert (record.pod, record.cause) == (3, "node n is lost")


def test_what_is_told_late_of_a_lost_pod_is_due_at_once() -> None:
    job = started()
    job.expect([lost_pod(3, 10.0, gone_by=lost_pod(3, 10.0).at)], 60.0)
    assert job.due(60.0) == 60.0
    job.look(60.0)
    assert job.state.over


def test_of_a_lost_pod_in_whose_place_another_has_ranks_nothing_is_due() -> None:
    job = started()
    stands_by(job, 6, 9.0)
    job.expect([lost_pod(3, 10.0, gone_by=lost_pod(3, 12.0).at)], 10.0)
    end(job, 0, 1, 2, 4, 5, now=11.0)
    job.look(11.0)
    assert job.state.generation == 1
    assert job.due(11.5) is None
    job.look(20.0)
    assert not job.state.over


def test_the_pod_that_comes_back_is_a_spare_from_then_on() -> None:
    job = started()
    stands_by(job, 6, 9.0)
    lose(job, 3, now=10.0)
    job.take(word("joined", 3, launcher="new"), 12.0)
    assert (job.state.over, job.spares_ready) == (False, 0), "it has to import first"
    stands_by(job, 3, 14.0)
    assert (job.state.over, job.state.generation, job.spares_ready) == (False, 1, 1)
    lose(job, 5, now=30.0, finished=9)
    assert (job.state.generation, job.state.places) == (2, ((3, 6), (5, 3)))
    # And with ranks again, in the place that was another's, it may fail as they all may.
    error = lost_peer(40.0, lost_peer=False, reason="rank 5 raised")
    end(job, 0, 1, 2, 4, 6, now=40.0, finished=12)
    end(job, 3, now=40.0, loss=error)
    assert (job.state.generation, job.state.places) == (3, ((3, 6), (5, 3)))
    assert (job.saved.last[-1].cause, job.saved.last[-1].pod) == ("rank 5 raised", 3)


def test_without_a_spare_all_wait_for_the_pod() -> None:
    job = started()
    job.expect([lost_pod(6, 5.0)], 5.0)
    assert job.spares_ready == 0
    lose(job, 3, now=10.0)
    job.look(10.0 + REPLACED_SECONDS - 1)
    assert (job.state.over, job.state.generation) == (True, 0)
    end(job, 0, 1, 2, 4, 5, now=200.0)
    job.take(word("joined", 3, launcher="new"), 201.0)
    assert (job.state.generation, job.state.places) == (1, ())
    assert job.saved.last[0].replaced == [3]


def test_a_spare_that_comes_later_takes_the_place_then() -> None:
    job = started()
    job.expect([lost_pod(6, 5.0)], 5.0)
    lose(job, 3, now=10.0)
    back(job, 6, 20.0)
    assert (job.state.generation, job.state.places) == (1, ((3, 6),))


def test_the_loss_of_a_spare_is_none_of_the_job() -> None:
    job = started(most=1)
    for at in (10.0, 20.0, 30.0):
        job.expect([lost_pod(6, at)], at)
        assert (job.state.over, job.spares_ready) == (False, 0)
        back(job, 6, at + 5, launcher=f"from {at}")
        assert (job.state.over, job.spares_ready) == (False, 1)
    assert (job.saved.count, job.saved.counted, job.saved.last) == (0, 0, [])
    assert job.state.generation == 0


def test_one_that_says_nothing_does_not_stand_by() -> None:
    job = started()
    silent = 2.0 + UNHEARD_SECONDS + 1
    job.heard(0, "", silent)
    assert job.spares_ready == 0
    lose(job, 3, now=silent)
    assert job.state.over, "nobody takes its place"


def test_a_pod_that_says_nothing_is_given_up_for_a_spare() -> None:
    job = started()
    end(job, 0, 1, 2, 4, 5, now=10.0)
    assert job.due(10.0) == 10.0 + SILENT_SECONDS
    end(job, 0, 1, 2, 4, 5, now=50.0)
    stands_by(job, 6, 50.0)
    job.look(10.0 + SILENT_SECONDS)
    assert (job.state.generation, job.state.places) == (1, ((3, 6),))
    assert job.saved.last[0].cause == "pod 3 does not say that its ranks have ended"


def test_a_spare_goes_before_the_new_pod_which_has_not_imported() -> None:
    job = started()
    stands_by(job, 6, 9.0)
    end(job, 0, 1, 2, 4, now=10.0)
    job.expect([lost_pod(3, 10.0)], 10.0)
    job.take(word("joined", 3, launcher="new"), 11.0)
    assert job.state.over, "pod 5 has ranks"
    end(job, 5, now=12.0)
    assert (job.state.generation, job.state.places) == (1, ((3, 6),))
    assert (job.saved.last[0].replaced, job.saved.last[0].pod) == ([], 3)
    assert job.spares_ready == 1, "pod 3 stands by"


def test_a_spare_is_preferred_over_going_on_without_a_replica() -> None:
    job = started(FEWER)
    stands_by(job, 6, 9.0)
    lose(job, 3, now=10.0)
    state = job.state
    assert (state.generation, state.left_out, state.places) == (1, (), ((3, 6),))
    assert (job.saved.last[0].replicas, job.share) == (3, 1.0)
    # There is no other one: as without spares.
    lose(job, 5, now=20.0, finished=9)
    assert (job.state.over, job.due(20.0)) == (True, 20.0 + PATIENCE)
    job.look(20.0 + PATIENCE)
    assert (job.state.left_out, job.state.places) == ((2,), ((3, 6),))
    # Pod 3 comes first, and has no place any more; nor needs that of pod 5 to wait for its own.
    back(job, 3, 40.0)
    stands_by(job, 4, 41.0)
    assert job.state.leave
    end(job, 0, 1, 2, 6, now=42.0, loss=None)
    assert (job.state.left_out, job.state.places) == ((), ((3, 6), (5, 3)))
    assert [(e.pod, e.instead_of) for e in job.saved.last[-1].spares] == [(3, 5)]
    back(job, 5, 50.0)
    assert (job.state.over, job.state.leave, job.spares_ready) == (False, False, 1)


def test_two_losses_and_one_spare_make_most_replicas_whole() -> None:
    job = started(FEWER)
    stands_by(job, 6, 9.0)
    lose(job, 2, 3, 5, now=10.0)
    assert job.state.over, "some are waited for"
    job.look(10.0 + PATIENCE)
    assert (job.state.left_out, job.state.places) == ((1,), ((5, 6),))


def test_what_failed_is_no_change_of_replicas() -> None:
    """Ranks of a job that always has all of them leave for no other reason."""
    job = started()
    end(job, 0, 1, 2, 3, 4, 5, now=10.0, loss=None)
    assert (job.state.generation, job.saved.count) == (1, 1)
    assert job.saved.last[0].cause == "it is over"


def test_losses_without_progress_end_the_attempt_as_before() -> None:
    job = started()
    stands_by(job, 6, 9.0)
    lose(job, 3, now=10.0, finished=0)
    assert (job.state.verdict, job.saved.counted) == ("", 1)
    back(job, 3, 12.0)
    lose(job, 5, now=20.0, finished=0)
    assert (job.state.verdict, job.state.over) == ("attempt", True)
    job.begin_attempt(1)
    assert (job.state.places, job.state.generation, job.spares_ready) == ((), 0, 0)


def test_evictions_do_not_count() -> None:
    job = started()
    for number, pod in enumerate((3, 5, 4)):
        now = 10.0 * (number + 1)
        spare = next(each for each in range(7) if not job.presence.runs(each))
        stands_by(job, spare, now)
        lose(job, pod, now=now, finished=0, counted=False)
        assert (job.state.generation, job.saved.counted) == (number + 1, 0)
        back(job, pod, now + 5)


def test_spares_end_when_the_ranks_have_finished() -> None:
    job = started()
    job.take(word("completed", 0), 30.0)
    assert job.state.verdict == "completed"
    again = Generations(7, 5, saved=job.told, cut=CUT, patience=PATIENCE)
    assert again.state.verdict == "completed", "a spare may come back after the end"
    other = started()
    assert other.reported(trained(state="finished"), 30.0)
    assert other.state.verdict == "completed"


def test_an_ingest_that_is_replaced_knows_who_runs_where() -> None:
    job = started()
    stands_by(job, 6, 9.0)
    lose(job, 3, now=10.0)
    back(job, 3, 12.0)
    assert job.told is not None
    saved = Recoveries.model_validate(job.told.model_dump(by_alias=True))
    again = Generations(7, 5, saved=saved, cut=CUT, patience=PATIENCE)
    assert (again.state.places, again.spares_ready) == (((3, 6),), 1)
    again.take(word("gone", 0, 1, places=((3, 6),), loss=lost_peer(60.0)), 60.0)
    assert again.spares_ready == 1, "it has not asked here yet"
    end(again, 1, 2, 4, 6, now=60.0, finished=9)
    again.expect([lost_pod(5, 60.0)], 61.0)
    assert again.state.over
    stands_by(again, 3, 62.0)
    assert (again.state.generation, again.state.places) == (2, ((3, 6), (5, 3)))
    # One that could not write it hears it from launchers.
    deaf = Generations(7, 5, cut=CUT, patience=PATIENCE)
    assert not deaf.begun(1), "a poll does not say which pods run"
    assert not deaf.begun(1, word("gone", 0, 1, places=((3, 4),))), "two places in one pod"
    deaf.take(word("gone", 3, 1, places=((3, 6),), launcher="new"), 27.0)
    assert (deaf.state.generation, deaf.state.places, deaf.state.over) == (1, ((3, 6),), False)


def test_a_pod_that_was_given_up_and_is_there_again_is_a_spare() -> None:
    job = started()
    end(job, 0, 1, 2, 4, 5, now=10.0)
    end(job, 0, 1, 2, 4, 5, now=50.0)
    stands_by(job, 6, 50.0)
    job.look(10.0 + SILENT_SECONDS)
    # It ends its ranks, which nobody met any more, and hears that it has none.
    job.take(word("gone", 3, 0, loss=lost_peer(60.0)), 60.0)
    assert (job.state.over, job.spares_ready) == (False, 0)
    stands_by(job, 3, 61.0)
    assert (job.state.over, job.spares_ready) == (False, 1)


def test_a_spare_takes_the_place_of_a_pod_that_has_not_come() -> None:
    job, by = started(late=[3]), 1.0 + COMES_SECONDS
    assert job.due(2.0) == by
    stands_by(job, 6, by - 1)
    assert not job.state.over
    job.look(by)
    assert (job.state.over, job.state.awaits, job.due(by)) == (True, 3, by + SILENT_SECONDS)
    assert job.state.reason == "pod 3 has not come 60 s after the others"
    end(job, 0, 1, 2, 4, 5, now=by + 1, finished=0, loss=None)
    assert (job.state.generation, job.state.places, job.state.verdict) == (1, ((3, 6),), "")
    (record,) = job.saved.last
    assert (record.cause, record.pod) == ("pod 3 has not come 60 s after the others", 3)
    assert [(each.pod, each.instead_of) for each in record.spares] == [(6, 3)]
    assert (job.saved.count, job.saved.counted) == (1, 0)
    back(job, 3, by + 10)
    assert (job.state.over, job.spares_ready, job.due(by + 10)) == (False, 1, None)


def test_a_spare_goes_before_a_pod_that_comes_at_last() -> None:
    job, by = started(late=[3]), 1.0 + COMES_SECONDS
    stands_by(job, 6, by)
    assert job.state.over
    end(job, 0, 1, 2, 4, now=by + 1, finished=0, loss=None)
    job.take(word("joined", 3), by + 2)
    end(job, 5, now=by + 3, finished=0, loss=None)
    assert (job.state.generation, job.state.places, job.state.verdict) == (1, ((3, 6),), "")
    assert (job.saved.counted, job.spares_ready) == (0, 1)
    # If the spare is lost meanwhile, the pod has its place.
    job = started(late=[3])
    stands_by(job, 6, by)
    job.expect([lost_pod(6, by)], by)
    end(job, 0, 1, 2, 4, 5, now=by + 1, finished=0, loss=None)
    assert job.state.over
    job.take(word("joined", 3), by + 2)
    assert (job.state.generation, job.state.places, job.state.verdict) == (1, (), "")
    assert job.saved.counted == 0


def test_without_enough_spares_all_wait_for_the_pods_that_have_not_come() -> None:
    job, by = started(late=[3, 5]), 1.0 + COMES_SECONDS
    stands_by(job, 6, by)
    assert (job.state.over, job.due(by)) == (False, None)
    job.take(word("joined", 5), by + 1)
    assert job.due(by + 1) == by + 1 + COMES_SECONDS, "others may follow it"
    stands_by(job, 6, by + 1 + COMES_SECONDS)
    assert job.state.over


def test_of_ranks_that_train_all_pods_have_come() -> None:
    job = started(late=[3])
    job.reported(trained(0), 20.0)
    stands_by(job, 6, 1.0 + COMES_SECONDS)
    assert (job.state.over, job.due(21.0)) == (False, None)
    assert started().due(2.0) is None


def test_a_pod_that_is_lost_before_the_ranks_have_trained_has_not_come() -> None:
    """Ranks that wait for all to begin do not notice."""
    job = started()
    job.expect([lost_pod(3, 9.0)], 10.0)
    stands_by(job, 6, 9.0 + COMES_SECONDS)
    assert (job.state.over, job.state.reason) == (True, "pod 3 exited with code 137")
    end(job, 0, 1, 2, 4, 5, now=80.0, finished=0, loss=None)
    assert (job.state.generation, job.state.places) == (1, ((3, 6),))


def test_an_ingest_that_takes_over_hears_late_of_pods_that_came() -> None:
    """Of a large job, some ask only every few minutes."""
    job = Generations(7, 5, cut=CUT, patience=PATIENCE)
    for pod in (0, 1, 2, 4, 5):
        job.heard(pod, "", 1.0)
    stands_by(job, 6, 1.0 + COMES_SECONDS)
    assert (job.state.over, job.due(70.0)) == (False, 1.0 + LEAVE_SECONDS)
    job.heard(3, "", 300.0)
    assert job.due(301.0) is None
