"""A job's layout changes by a change of generation: no sockets, no clock. Each case is played with
layers that move between stages, and with ranks that change places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from observing import trained
from pod_words import lost_peer, lost_pod, word

from pipemorph.api.layout import RankLayout
from pipemorph.api.sections.parallelism import Parallelism
from pipemorph.api.status_recoveries import Recoveries
from pipemorph.control.generations import Generations
from pipemorph.control.pods.leaving import LEAVE_SECONDS
from pipemorph.exits import PARTS_STAY, TRIAL_ITERATIONS
from pipemorph.wire import Loss, ResumedFrom

LEFT_AT = 10
"""The iteration at which ranks leave."""
ASKED = 20.0
"""When they are asked to, by the wall clock."""
KEPT = ResumedFrom(iteration=LEFT_AT, rung="kept")
FIRST = RankLayout()


@dataclass(frozen=True)
class Case:
    """A job of two pods. ``whole``: its first layout with all numbers; ``new``, ``other``: two that
    it may have."""

    cut: Parallelism
    whole: RankLayout
    new: RankLayout
    other: RankLayout
    cause: str

    def started(
        self, cut: Parallelism | None = None, saved: Recoveries | None = None, **how: Any
    ) -> Generations:
        cut, how = cut or self.cut, {"relayout": True} | how
        return Generations(cut.pods, 5, cut=cut, saved=saved, done=LEFT_AT, **how)

    def leave(self, job: Generations) -> None:
        """The layout changes; it is on trial."""
        assert job.ask(self.new, ASKED)
        gone(job, 0, 1, finished=LEFT_AT, reached=LEFT_AT, left_for=self.new)


LAYERS = Case(
    Parallelism(stages=2, layers=6),
    RankLayout(layers=(3, 3), places=(0, 1)),
    RankLayout(layers=(4, 2)),
    RankLayout(layers=(2, 4)),
    "layers move between stages: from layers 3, 3 to layers 4, 2",
)
PLACES = Case(
    Parallelism(stages=2, replicas=2, ranks_per_pod=2),
    RankLayout(places=(0, 1, 2, 3)),
    RankLayout(places=(0, 2, 1, 3)),
    RankLayout(places=(3, 1, 2, 0)),
    "ranks 1, 2 change places",
)
cases = pytest.mark.parametrize("case", [LAYERS, PLACES], ids=["layers", "places"])


def gone(job: Generations, *pods: int, now: float = 20.0, **fields: Any) -> None:
    """The ranks of some pods have ended, as their launchers say, which know what runs."""
    for pod in pods:
        known = {"layout": job.layout, "layout_before": job.layout_before}
        job.take(word("gone", pod, job.state.generation, **known | fields), now)


def fail(job: Generations, *pods: int, reached: int = LEFT_AT, **fields: Any) -> None:
    """Ranks have failed: one of the last of these pods."""
    for pod in pods:
        lost = lost_peer(30.0)
        if pod == pods[-1]:
            lost = Loss(reason="rank 1 exited with code 1", at=29.0, rank=1, **fields)
        gone(job, pod, now=30.0, loss=lost, reached=reached, finished=reached)


@cases
def test_ranks_leave_for_another_layout_which_counts_once_rank_0_says_so(case: Case) -> None:
    job = case.started()
    assert job.ask(case.new, ASKED)
    whole = case.whole.model_copy(update=case.new.model_dump(exclude_defaults=True))
    assert (job.state.leave, job.state.leave_for, job.state.layout) == (True, whole, FIRST)
    gone(job, 0, finished=LEFT_AT, reached=LEFT_AT, left_for=case.new)
    assert (job.state.over, job.state.leave) == (True, False)
    gone(job, 1, finished=LEFT_AT, reached=LEFT_AT, left_for=FIRST)
    state = job.state
    assert (state.generation, state.over, state.leave, state.leave_for) == (1, False, False, FIRST)
    assert (state.layout, state.layout_before) == (case.new, FIRST)
    (record,) = job.told.last
    assert (record.iterations_done, job.saved.count) == (LEFT_AT, 0)
    assert (tuple(record.layers), tuple(record.places)) == (case.new.layers, case.new.places)
    assert record.cause == case.cause
    job.take(word("resumed", 0, 1, resumed=KEPT, layout=case.new, layout_before=FIRST), 25.0)
    assert (job.state.layout, job.state.layout_before) == (case.new, None)
    # Back to the first layout, which is not named.
    assert job.ask(case.whole, ASKED)
    gone(job, 0, 1, finished=LEFT_AT, reached=LEFT_AT, left_for=case.whole)
    assert (job.state.layout, job.state.layout_before) == (FIRST, case.new)


@pytest.mark.parametrize("retry", [True, False])
@cases
def test_a_failure_on_trial_goes_back_and_that_layout_is_not_tried_again(
    case: Case, retry: bool
) -> None:
    """Also one that a restart does not change: what failed may be the layout."""
    job = case.started()
    case.leave(job)
    fail(job, 1, 0, retry=retry)
    state = job.state
    assert (state.generation, state.verdict, state.layout, state.layout_before) == (
        2,
        "",
        FIRST,
        None,
    )
    assert (job.saved.count, job.saved.counted) == (1, 0)
    assert not job.ask(case.new, ASKED) and job.ask(case.other, ASKED)
    gone(job, 0, 1, finished=14, reached=14, left_for=case.other)
    fail(job, 1, 0, reached=15)
    assert (job.layout, job.saved.count) == (FIRST, 2)


@cases
def test_a_start_takes_from_when_the_last_pod_is_there_to_the_first_iteration(case: Case) -> None:
    """Not the time that others waited for a pod."""
    job = case.started()
    gone(job, 0, now=20.0, loss=lost_peer(20.0))
    job.take(word("joined", 1, launcher="new"), 320.0)
    assert job.state.generation == 1
    job.take(word("resumed", 0, 1, resumed=KEPT), 325.0)
    job.reported(trained(LEFT_AT), 326.0)
    assert job.progress.longest_start == pytest.approx(6.0, abs=1.0)
    assert job.saved.last[-1].seconds == pytest.approx(306.0, abs=1.0)
    assert case.started(saved=job.saved).progress.longest_start is None, (
        "another ingest has seen none"
    )


@cases
def test_a_failure_once_it_counts_keeps_it(case: Case) -> None:
    job = case.started()
    case.leave(job)
    job.take(word("resumed", 0, 1, resumed=KEPT, layout=case.new, layout_before=FIRST), 25.0)
    fail(job, 0, 1, reached=12)
    assert (job.state.generation, job.layout, job.layout_before) == (2, case.new, None)
    assert not job.saved.last[-1].layers and not job.saved.last[-1].places, "as before"


@cases
def test_the_word_of_a_lost_pod_is_known_by_how_far_the_others_came(case: Case) -> None:
    """Rank 0 has left its word, others have begun an iteration more and dropped their old copies,
    and the launcher of rank 0's pod dies before it tells."""
    for reached, layers in (
        (LEFT_AT + TRIAL_ITERATIONS, FIRST),
        (LEFT_AT + TRIAL_ITERATIONS + 1, case.new),
    ):
        job = case.started()
        case.leave(job)
        job = case.started(saved=job.saved)  # Another ingest knows it as well.
        fail(job, 1, reached=reached)
        job.take(word("joined", 0, launcher="new"), 31.0)
        assert (job.state.generation, job.layout, job.layout_before) == (2, layers, None)


@cases
def test_how_far_ranks_came_before_they_were_set_back_proves_nothing(case: Case) -> None:
    """They went on with older copies, and had finished more in an earlier generation."""
    job = case.started()
    gone(job, 0, finished=40, reached=40, loss=lost_peer(11.0))
    gone(job, 1, finished=40, reached=40)
    assert job.ask(case.new, ASKED)
    gone(job, 0, 1, finished=40, reached=LEFT_AT, left_for=case.new)
    assert job.saved.last[-1].iterations_done == LEFT_AT
    assert not job.reported(trained(LEFT_AT + 3), 25.0), "it may be of the ranks before"
    assert job.layout_before == FIRST
    for pod in (0, 1):
        gone(job, pod, finished=40, reached=LEFT_AT + 1, loss=lost_peer(30.0))
    assert job.layout == FIRST


@cases
def test_reports_prove_it_if_the_word_was_lost(case: Case) -> None:
    job = case.started()
    case.leave(job)
    job.reported(trained(LEFT_AT + TRIAL_ITERATIONS - 1), 25.0)
    assert job.layout_before == FIRST
    assert job.reported(trained(LEFT_AT + TRIAL_ITERATIONS), 26.0), "status is to be written"
    assert (job.layout, job.layout_before) == (case.new, None)


@cases
def test_ranks_that_fail_before_they_leave_keep_their_layout(case: Case) -> None:
    job = case.started()
    assert job.ask(case.new, ASKED)
    gone(job, 0, reached=LEFT_AT, left_for=case.new, finished=LEFT_AT)
    lost = Loss(reason="not all ranks left for other places", at=21.0)
    gone(job, 1, loss=lost, finished=LEFT_AT)
    assert (job.state.generation, job.layout, job.layout_before) == (1, FIRST, None)
    assert job.state.leave_for == FIRST and job.ask(case.new, ASKED), "they were not tried"


@cases
def test_a_pod_that_is_lost_after_its_ranks_left_keeps_the_layout(case: Case) -> None:
    job = case.started()
    assert job.ask(case.new, ASKED)
    gone(job, 0, reached=LEFT_AT, left_for=case.new, finished=LEFT_AT)
    job.take(word("joined", 1, launcher="new"), 22.0)
    assert (job.state.generation, job.layout, job.layout_before) == (1, FIRST, None)


@cases
def test_what_cannot_be_asked_for(case: Case) -> None:
    job = case.started()
    wrong = [{"layers": (4, 3)}, {"layers": (6, 0)}, {"layers": (2, 2, 2)}, {"layers": (7, -1)}]
    wrong += [{"places": (1, 1)}, {"places": (0, 1, 2)}, {"places": (0, 1, 2, 4)}, {}]
    for each in [*map(RankLayout.model_validate, wrong), case.whole]:
        assert not job.ask(each, ASKED), each
    assert not Generations(2, 5, done=LEFT_AT, relayout=True).ask(case.new, ASKED)
    fewer = case.cut.model_copy(update={"replicas": 2, "min_replicas": 1})
    for cut in (Parallelism(stages=2), fewer, case.cut.model_copy(update={"tensor": 2})):
        allowed = case is LAYERS and cut.tensor > 1
        assert case.started(cut).ask(case.new, ASKED) == allowed, cut
    assert job.ask(case.new, ASKED) and not job.ask(case.other, ASKED), "one at a time"
    case.leave(job := case.started())
    assert not job.ask(case.other, ASKED), "layers are on trial"
    job = case.started()
    gone(job, 0, loss=lost_peer(11.0))
    assert not job.ask(case.new, ASKED), "the ranks start again"
    job = case.started()
    job.expect([lost_pod(1, 15.0)], 15.0)
    assert not job.ask(case.new, ASKED), "a pod is lost"


@pytest.mark.parametrize("late", [False, True])
@cases
def test_ranks_whose_parts_cannot_change_are_not_asked_again(case: Case, late: bool) -> None:
    """``late``: they found it out as the next generation, and are gone when it is said."""
    job, why = case.started(), f"{PARTS_STAY}rank 0: no function builds its stage"
    if late:
        case.leave(job)
        fail(job, 0, 1)
        job.take(word("stays", 0, 1, why=why), 31.0)
    else:
        assert job.ask(case.new, ASKED)
        job.take(word("stays", 0, why=why), 21.0)
        assert (job.state.leave, job.state.leave_for, job.stays) == (False, FIRST, why)
    assert job.layouts.fixed == why
    # Places may change nevertheless.
    assert job.ask(case.other, ASKED) == (case is PLACES)
    assert job.told is not None
    assert case.started(saved=job.told).ask(case.other, ASKED) == (case is PLACES), (
        "another ingest knows it as well"
    )


@cases
def test_ranks_that_do_not_leave_are_asked_no_more(case: Case) -> None:
    """As if no launcher passes it on, or an iteration takes long. They may leave all the same."""
    job, late = case.started(), ASKED + LEAVE_SECONDS
    assert job.ask(case.new, ASKED) and job.due(ASKED) == late
    job.look(late - 1.0)
    assert job.state.leave
    job.look(late)
    assert (job.state.leave, job.state.leave_for, job.state.verdict) == (False, FIRST, "")
    assert job.stays == f"no ranks have left within {LEAVE_SECONDS:g} s"
    assert job.due(late + 100.0) is None and job.ask(case.other, late)
    gone(job, 0, 1, now=late + 1.0, left_for=case.new, finished=LEFT_AT, reached=LEFT_AT)
    assert (job.state.generation, job.saved.count) == (1, 0)


@cases
def test_ranks_that_could_not_leave_may_be_asked_again(case: Case) -> None:
    job = case.started()
    assert job.ask(case.new, ASKED)
    job.take(word("stays", 1, why="rank 1: it has no copy of iteration 9"), 21.0)
    assert not job.state.leave and "has no copy" in job.stays
    assert job.ask(case.new, ASKED) and job.stays == ""


@cases
def test_another_ingest_goes_on_from_status_and_from_what_launchers_say(case: Case) -> None:
    job = case.started()
    assert job.ask(case.new, ASKED)
    # It had asked them, and nobody else knows.
    other = case.started(saved=Recoveries.model_validate(job.saved.model_dump(by_alias=True)))
    for pod in (0, 1):
        other.take(word("gone", pod, left_for=case.new, reached=LEFT_AT, finished=LEFT_AT), 20.0)
    assert (other.layout, other.layout_before) == (case.new, FIRST)
    # That could not be written.
    third = case.started()
    third.take(
        word(
            "resumed",
            1,
            1,
            resumed=KEPT,
            layout=RankLayout(layers=(5, 2), places=(0, 0)),
            layout_before=FIRST,
        ),
        21.0,
    )
    assert third.state.generation == 0, "a layout that does not fit the job is none"
    assert not third.begun(1), "it is not said with which layers"
    fail(other, 1, reached=LEFT_AT)
    assert (other.layout, third.state.generation) == (case.new, 0)
    known = {"layout": case.new, "layout_before": FIRST}
    third.take(word("gone", 1, 1, loss=lost_peer(30.0), **known), 30.0)
    assert (third.state.generation, third.layout, third.layout_before) == (1, case.new, FIRST)
    third.take(word("gone", 0, 1, loss=lost_peer(30.0), **known), 30.0)
    assert (third.state.generation, third.layout) == (2, FIRST)


@pytest.mark.parametrize(
    ("reached", "kept"),
    [(LEFT_AT + TRIAL_ITERATIONS, False), (LEFT_AT + TRIAL_ITERATIONS + 1, True)],
)
@cases
def test_an_ingest_that_cannot_know_when_ranks_left_hears_it_as_they_are_gone(
    case: Case, reached: int, kept: bool
) -> None:
    """Neither the generation nor that its layers count could be written."""
    job, known = case.started(), {"layout": case.new, "layout_before": FIRST}
    how = {"began": LEFT_AT, "reached": reached, "finished": reached}
    job.take(word("gone", 0, 1, loss=lost_peer(30.0), **known, **how), 30.0)
    assert (job.state.generation, job.layout_before) == (1, FIRST)
    job.take(word("gone", 1, 1, loss=lost_peer(30.0), **known, **how), 30.0)
    assert (job.state.generation, job.layout) == (2, case.new if kept else FIRST)


@cases
def test_a_launcher_that_knows_that_a_layout_counts_tells_another_ingest(case: Case) -> None:
    job, how = case.started(), {"layout": case.new, "reached": LEFT_AT + 1}
    job.take(word("gone", 0, 1, loss=lost_peer(30.0), layout_before=FIRST, **how), 30.0)
    job.take(word("gone", 1, 1, loss=lost_peer(30.0), **how), 30.0)
    assert (job.state.generation, job.layout, job.layout_before) == (2, case.new, None)


@cases
def test_polls_teach_the_newest_generation_where_layouts_do_not_change(case: Case) -> None:
    """Its number says all of it, also if the job says how many layers it has."""
    job = case.started(relayout=False)
    assert job.begun(3) and job.state.generation == 3
    assert not job.ask(case.new, ASKED)
    assert not case.started().begun(3), "nobody knows with which layers"


@cases
def test_a_layout_is_known_after_relayout_is_switched_off(case: Case) -> None:
    job = case.started()
    case.leave(job)
    other = case.started(saved=job.saved, relayout=False)
    assert (other.layout, other.layout_before) == (case.new, FIRST)
    assert not other.begun(2) and other.begun(2, word("gone", 0, 2, layout=case.other))
    assert (other.state.generation, other.layout) == (2, case.other)
    other.begin_attempt(1)
    assert other.begun(2), "the pods of this attempt move none"


@cases
def test_an_attempt_begins_with_the_first_layout(case: Case) -> None:
    job = case.started()
    case.leave(job)
    job.begin_attempt(1)
    assert (job.layout, job.layout_before, job.state.layout) == (FIRST, None, FIRST)


@cases
def test_what_is_undone_is_not_tried_again(case: Case) -> None:
    job = case.started()
    case.leave(job)
    known = {"layout": case.new, "layout_before": FIRST}
    job.take(word("resumed", 0, 1, resumed=KEPT, **known), 25.0)
    job.brought(1, -0.2)
    assert job.saved.last[-1].measured == -0.2
    assert job.ask(FIRST, ASKED, promised=0.2, undoes=True)
    gone(job, 0, 1, finished=LEFT_AT + 30, reached=LEFT_AT + 30, left_for=FIRST)
    assert (job.layout, job.layout_before) == (FIRST, case.new)
    assert job.saved.last[-1].cause.endswith("since the last change made iterations slower")
    job.take(word("resumed", 0, 2, resumed=KEPT, layout_before=case.new), 45.0)
    assert (job.layout, job.layout_before) == (FIRST, None)
    assert not job.ask(case.new, ASKED) and job.ask(case.other, ASKED)
    assert not case.started(saved=job.saved).ask(case.new, ASKED), "another ingest knows it as well"
