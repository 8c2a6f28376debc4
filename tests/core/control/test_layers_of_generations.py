"""Layers move between stages by a change of generation: no sockets, no clock."""

from __future__ import annotations

from typing import Any

import pytest
from observing import trained
from pod_words import lost_peer, lost_pod, word

from pipemorph.api.sections.parallelism import Parallelism
from pipemorph.api.status_recoveries import Recoveries
from pipemorph.control.generations import Generations
from pipemorph.control.pods.leaving import LEAVE_SECONDS
from pipemorph.exits import PARTS_STAY, TRIAL_ITERATIONS
from pipemorph.wire import Loss, ResumedFrom

CUT = Parallelism(stages=2, layers=6)
LEFT_AT = 10
"""The iteration at which ranks leave."""
ASKED = 20.0
"""When they are asked to, by the wall clock."""
KEPT = ResumedFrom(iteration=LEFT_AT, rung="kept")


def started(
    cut: Parallelism | None = CUT, saved: Recoveries | None = None, *, relayout: bool = True
) -> Generations:
    pods = cut.pods if cut else 2
    return Generations(pods, 5, cut=cut, saved=saved, done=LEFT_AT, relayout=relayout)


def gone(job: Generations, *pods: int, now: float = 20.0, **fields: Any) -> None:
    """The ranks of some pods have ended, as their launchers say, which know what runs."""
    for pod in pods:
        known = {"layers": job.layers, "layers_before": job.layers_before, "places": job.places}
        job.take(word("gone", pod, job.state.generation, **known | fields), now)


def leave(job: Generations, layers: tuple[int, ...] = (4, 2)) -> None:
    """Layers move; they are on trial."""
    assert job.ask(layers, ASKED)
    pods = sorted(job.presence.with_ranks)
    gone(job, *pods, finished=LEFT_AT, reached=LEFT_AT, left_for=layers)


def fail(job: Generations, *pods: int, reached: int = LEFT_AT, **fields: Any) -> None:
    """Ranks have failed: one of the last of these pods."""
    for pod in pods:
        lost = lost_peer(30.0)
        if pod == pods[-1]:
            lost = Loss(reason="rank 1 exited with code 1", at=29.0, rank=1, **fields)
        gone(job, pod, now=30.0, loss=lost, reached=reached, finished=reached)


def test_ranks_leave_and_go_on_with_other_layers_which_count_once_rank_0_says_so() -> None:
    job = started()
    assert job.ask((4, 2), ASKED)
    assert (job.state.leave, job.state.leave_layers, job.state.layers) == (True, (4, 2), ())
    gone(job, 0, finished=LEFT_AT, reached=LEFT_AT, left_for=(4, 2))
    assert (job.state.over, job.state.leave) == (True, False)
    gone(job, 1, finished=LEFT_AT, reached=LEFT_AT, left_for=())
    state = job.state
    assert (state.generation, state.over, state.leave, state.leave_layers) == (1, False, False, ())
    assert (state.layers, state.layers_before) == ((4, 2), ())
    assert job.told is not None
    (record,) = job.told.last
    assert (record.layers, record.iterations_done, job.saved.count) == ([4, 2], LEFT_AT, 0)
    assert record.cause == "layers move between stages: from layers 3, 3 to layers 4, 2"
    job.take(word("resumed", 0, 1, resumed=KEPT, layers=(4, 2), layers_before=()), 25.0)
    assert (job.state.layers, job.state.layers_before) == ((4, 2), None)
    # Back to even layers, which are not named.
    leave(job, (3, 3))
    assert (job.state.layers, job.state.layers_before) == ((), (4, 2))
    assert job.saved.last[-1].layers == [3, 3]


@pytest.mark.parametrize("retry", [True, False])
def test_a_failure_on_trial_goes_back_and_these_layers_are_not_tried_again(retry: bool) -> None:
    """Also one that a restart does not change: what failed may be the layers."""
    job = started()
    leave(job)
    fail(job, 1, 0, retry=retry)
    state = job.state
    assert (state.generation, state.verdict, state.layers, state.layers_before) == (2, "", (), None)
    assert [each.layers for each in job.saved.last] == [[4, 2], [3, 3]]
    assert (job.saved.count, job.saved.counted) == (1, 0)
    assert not job.ask((4, 2), ASKED) and job.ask((2, 4), ASKED)
    gone(job, 0, 1, finished=14, reached=14, left_for=(2, 4))
    fail(job, 1, 0, reached=15)
    assert (job.layers, job.saved.count) == ((), 2)


def test_a_start_takes_from_when_the_last_pod_is_there_to_the_first_iteration() -> None:
    """Not the time that others waited for a pod."""
    job = started()
    gone(job, 0, now=20.0, loss=lost_peer(20.0))
    job.take(word("joined", 1, launcher="new"), 320.0)
    assert job.state.generation == 1
    job.take(word("resumed", 0, 1, resumed=KEPT), 325.0)
    job.reported(trained(LEFT_AT), 326.0)
    assert job.progress.longest_start == pytest.approx(6.0, abs=1.0)
    assert job.saved.last[-1].seconds == pytest.approx(306.0, abs=1.0)
    assert started(saved=job.saved).progress.longest_start is None, "another ingest has seen none"


def test_a_failure_once_they_count_keeps_them() -> None:
    job = started()
    leave(job)
    job.take(word("resumed", 0, 1, resumed=KEPT, layers=(4, 2), layers_before=()), 25.0)
    fail(job, 0, 1, reached=12)
    assert (job.state.generation, job.layers, job.layers_before) == (2, (4, 2), None)
    assert job.saved.last[-1].layers == [], "as before"


def test_the_word_of_a_lost_pod_is_known_by_how_far_the_others_came() -> None:
    """Rank 0 has left its word, others have begun an iteration more and dropped their old copies,
    and the launcher of rank 0's pod dies before it tells."""
    for reached, layers in (
        (LEFT_AT + TRIAL_ITERATIONS, ()),
        (LEFT_AT + TRIAL_ITERATIONS + 1, (4, 2)),
    ):
        job = started()
        leave(job)
        job = started(saved=job.saved)  # Another ingest knows it as well.
        fail(job, 1, reached=reached)
        job.take(word("joined", 0, launcher="new"), 31.0)
        assert (job.state.generation, job.layers, job.layers_before) == (2, layers, None)


def test_how_far_ranks_came_before_they_were_set_back_proves_nothing() -> None:
    """They went on with older copies, and had finished more in an earlier generation."""
    job = started()
    gone(job, 0, finished=40, reached=40, loss=lost_peer(11.0))
    gone(job, 1, finished=40, reached=40)
    assert job.ask((4, 2), ASKED)
    gone(job, 0, 1, finished=40, reached=LEFT_AT, left_for=(4, 2))
    assert job.saved.last[-1].iterations_done == LEFT_AT
    assert not job.reported(trained(LEFT_AT + 3), 25.0), "it may be of the ranks before"
    assert job.layers_before == ()
    for pod in (0, 1):
        gone(job, pod, finished=40, reached=LEFT_AT + 1, loss=lost_peer(30.0))
    assert job.layers == ()


def test_reports_prove_it_if_the_word_was_lost() -> None:
    job = started()
    leave(job)
    job.reported(trained(LEFT_AT + TRIAL_ITERATIONS - 1), 25.0)
    assert job.layers_before == ()
    assert job.reported(trained(LEFT_AT + TRIAL_ITERATIONS), 26.0), "status is to be written"
    assert (job.layers, job.layers_before) == ((4, 2), None)


def test_ranks_that_fail_before_they_leave_keep_their_layers() -> None:
    job = started()
    assert job.ask((4, 2), ASKED)
    gone(job, 0, reached=LEFT_AT, left_for=(4, 2), finished=LEFT_AT)
    lost = Loss(reason="not all ranks left for other places", at=21.0)
    gone(job, 1, loss=lost, finished=LEFT_AT)
    assert (job.state.generation, job.layers, job.layers_before) == (1, (), None)
    assert job.state.leave_layers == () and job.ask((4, 2), ASKED), "they were not tried"


def test_a_pod_that_is_lost_after_its_ranks_left_keeps_the_layers_as_they_were() -> None:
    job = started()
    assert job.ask((4, 2), ASKED)
    gone(job, 0, reached=LEFT_AT, left_for=(4, 2), finished=LEFT_AT)
    job.take(word("joined", 1, launcher="new"), 22.0)
    assert (job.state.generation, job.layers, job.layers_before) == (1, (), None)


def test_what_cannot_be_asked_for() -> None:
    job = started()
    for layers in ((3, 3), (4, 3), (6, 0), (2, 2, 2), (), (7, -1)):
        assert not job.ask(layers, ASKED), layers
    assert not started(None).ask((4, 2), ASKED)
    assert not started(Parallelism(stages=2)).ask((4, 2), ASKED)
    fewer = Parallelism(stages=2, layers=6, replicas=2, min_replicas=1)
    assert not started(fewer).ask((4, 2), ASKED)
    assert job.ask((4, 2), ASKED) and not job.ask((2, 4), ASKED), "one at a time"
    leave(job := started())
    assert not job.ask((2, 4), ASKED), "layers are on trial"
    job = started()
    gone(job, 0, loss=lost_peer(11.0))
    assert not job.ask((4, 2), ASKED), "the ranks start again"
    job = started()
    job.expect([lost_pod(1, 15.0)], 15.0)
    assert not job.ask((4, 2), ASKED), "a pod is lost"


@pytest.mark.parametrize("late", [False, True])
def test_ranks_whose_parts_cannot_change_are_not_asked_again(late: bool) -> None:
    """``late``: they found it out as the next generation, and are gone when it is said."""
    job, why = started(), f"{PARTS_STAY}rank 0: no function builds its stage"
    if late:
        leave(job)
        fail(job, 0, 1)
        job.take(word("stays", 0, 1, why=why), 31.0)
    else:
        assert job.ask((4, 2), ASKED)
        job.take(word("stays", 0, why=why), 21.0)
        assert (job.state.leave, job.state.leave_layers, job.stays) == (False, (), why)
    assert job.splits.fixed == why and not job.ask((2, 4), ASKED)
    assert job.told is not None
    assert not started(saved=job.told).ask((2, 4), ASKED), "another ingest knows it as well"


def test_ranks_that_do_not_leave_are_asked_no_more() -> None:
    """As if no launcher passes it on, or an iteration takes long. They may leave all the same."""
    job, late = started(), ASKED + LEAVE_SECONDS
    assert job.ask((4, 2), ASKED) and job.due(ASKED) == late
    job.look(late - 1.0)
    assert job.state.leave
    job.look(late)
    assert (job.state.leave, job.state.leave_layers, job.state.verdict) == (False, (), "")
    assert job.stays == f"no ranks have left within {LEAVE_SECONDS:g} s"
    assert job.due(late + 100.0) is None and job.ask((2, 4), late)
    gone(job, 0, 1, now=late + 1.0, left_for=(4, 2), finished=LEFT_AT, reached=LEFT_AT)
    assert (job.state.generation, job.saved.count) == (1, 0)


def test_ranks_that_could_not_leave_may_be_asked_again() -> None:
    job = started()
    assert job.ask((4, 2), ASKED)
    job.take(word("stays", 1, why="rank 1: it has no copy of iteration 9"), 21.0)
    assert not job.state.leave and "has no copy" in job.stays
    assert job.ask((4, 2), ASKED) and job.stays == ""


def test_another_ingest_goes_on_from_status_and_from_what_launchers_say() -> None:
    job = started()
    assert job.ask((4, 2), ASKED)
    # It had asked them, and nobody else knows.
    other = started(saved=Recoveries.model_validate(job.saved.model_dump(by_alias=True)))
    for pod in (0, 1):
        other.take(word("gone", pod, left_for=(4, 2), reached=LEFT_AT, finished=LEFT_AT), 20.0)
    assert (other.layers, other.layers_before) == ((4, 2), ())
    # That could not be written.
    third = started()
    third.take(word("resumed", 1, 1, resumed=KEPT, layers=(5, 2), layers_before=()), 21.0)
    assert third.state.generation == 0, "layers that do not make up the model are none"
    assert not third.begun(1), "it is not said with which layers"
    fail(other, 1, reached=LEFT_AT)
    assert (other.layers, third.state.generation) == ((4, 2), 0)
    known = {"layers": (4, 2), "layers_before": ()}
    third.take(word("gone", 1, 1, loss=lost_peer(30.0), **known), 30.0)
    assert (third.state.generation, third.layers, third.layers_before) == (1, (4, 2), ())
    third.take(word("gone", 0, 1, loss=lost_peer(30.0), **known), 30.0)
    assert (third.state.generation, third.layers) == (2, ())


@pytest.mark.parametrize(
    ("reached", "kept"),
    [(LEFT_AT + TRIAL_ITERATIONS, False), (LEFT_AT + TRIAL_ITERATIONS + 1, True)],
)
def test_an_ingest_that_cannot_know_when_ranks_left_hears_it_as_they_are_gone(
    reached: int, kept: bool
) -> None:
    """Neither the generation nor that its layers count could be written."""
    job, known = started(), {"layers": (4, 2), "layers_before": ()}
    how = {"began": LEFT_AT, "reached": reached, "finished": reached}
    job.take(word("gone", 0, 1, loss=lost_peer(30.0), **known, **how), 30.0)
    assert (job.state.generation, job.layers_before) == (1, ())
    job.take(word("gone", 1, 1, loss=lost_peer(30.0), **known, **how), 30.0)
    assert (job.state.generation, job.layers) == (2, (4, 2) if kept else ())


def test_a_launcher_that_knows_that_layers_count_tells_another_ingest() -> None:
    job, how = started(), {"layers": (4, 2), "reached": LEFT_AT + 1}
    job.take(word("gone", 0, 1, loss=lost_peer(30.0), layers_before=(), **how), 30.0)
    job.take(word("gone", 1, 1, loss=lost_peer(30.0), **how), 30.0)
    assert (job.state.generation, job.layers, job.layers_before) == (2, (4, 2), None)


def test_polls_teach_the_newest_generation_where_layers_do_not_move() -> None:
    """Its number says all of it, also if the job says how many layers it has."""
    job = started(relayout=False)
    assert job.begun(3) and job.state.generation == 3
    assert not job.ask((4, 2), ASKED)
    assert not started().begun(3), "nobody knows with which layers"


def test_layers_that_have_moved_are_known_after_relayout_is_switched_off() -> None:
    job = started()
    leave(job)
    other = started(saved=job.saved, relayout=False)
    assert (other.layers, other.layers_before) == ((4, 2), ())
    assert not other.begun(2) and other.begun(2, word("gone", 0, 2, layers=(2, 4)))
    assert (other.state.generation, other.layers) == (2, (2, 4))
    other.begin_attempt(1)
    assert other.begun(2), "the pods of this attempt move none"


def test_an_attempt_begins_with_even_layers() -> None:
    job = started()
    leave(job)
    job.begin_attempt(1)
    assert (job.layers, job.layers_before, job.state.layers) == ((), None, ())
