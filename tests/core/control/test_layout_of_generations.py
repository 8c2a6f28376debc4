"""A job's layout changes by a change of generation: no sockets, no clock. Each case is played with
layers that move between stages, and with ranks that change places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from observing import trained
from pod_words import lost_peer, lost_pod, word

from pipemorph.control.job_generations import JobGenerations
from pipemorph.control.restart.drain_request import LEAVE_SECONDS
from pipemorph.exits import LAYERS_FIXED_PREFIX, TRIAL_ITERATIONS
from pipemorph.protocol import PodFailure, ResumedFrom
from pipemorph.spec.layout import RankLayout
from pipemorph.spec.sections.parallelism import Parallelism
from pipemorph.spec.status_recoveries import Recoveries

DRAINED = 10
"""The iteration at which ranks leave."""
SENT = 20.0
"""Time of the request to leave, by the wall clock."""
FROM_MEMORY = ResumedFrom(iteration=DRAINED, rung="kept")
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
    ) -> JobGenerations:
        cut, how = cut or self.cut, {"relayout": True} | how
        return JobGenerations(cut.pods, 5, cut=cut, saved=saved, done=DRAINED, **how)

    def leave(self, job: JobGenerations) -> None:
        """The layout changes; it is on trial."""
        assert job.request_layout(self.new, SENT)
        gone(job, 0, 1, finished=DRAINED, reached=DRAINED, left_for=self.new)


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


def gone(job: JobGenerations, *pods: int, now: float = 20.0, **fields: Any) -> None:
    """End the ranks of some pods: reports of their launchers, which know what runs."""
    for pod in pods:
        known = {"layout": job.layout, "layout_before": job.layout_before}
        job.process_pod_report(
            word("gone", pod, job.generation_state.generation, **known | fields), now
        )


def fail(job: JobGenerations, *pods: int, reached: int = DRAINED, **fields: Any) -> None:
    """Ranks have failed: one of the last of these pods."""
    for pod in pods:
        lost = lost_peer(30.0)
        if pod == pods[-1]:
            lost = PodFailure(reason="rank 1 exited with code 1", at=29.0, rank=1, **fields)
        gone(job, pod, now=30.0, loss=lost, reached=reached, finished=reached)


@cases
def test_ranks_leave_for_another_layout_which_counts_once_rank_0_reports_it(case: Case) -> None:
    job = case.started()
    assert job.request_layout(case.new, SENT)
    whole = case.whole.model_copy(update=case.new.model_dump(exclude_defaults=True))
    assert (
        job.generation_state.leave,
        job.generation_state.leave_for,
        job.generation_state.layout,
    ) == (True, whole, FIRST)
    gone(job, 0, finished=DRAINED, reached=DRAINED, left_for=case.new)
    assert (job.generation_state.over, job.generation_state.leave) == (True, False)
    gone(job, 1, finished=DRAINED, reached=DRAINED, left_for=FIRST)
    state = job.generation_state
    assert (state.generation, state.over, state.leave, state.leave_for) == (1, False, False, FIRST)
    assert (state.layout, state.layout_before) == (case.new, FIRST)
    (record,) = job.status_recoveries.last
    assert (record.iterations_done, job.saved.count) == (DRAINED, 0)
    assert (tuple(record.layers), tuple(record.places)) == (case.new.layers, case.new.places)
    assert record.cause == case.cause
    job.process_pod_report(
        word("resumed", 0, 1, resumed=FROM_MEMORY, layout=case.new, layout_before=FIRST), 25.0
    )
    assert (job.generation_state.layout, job.generation_state.layout_before) == (case.new, None)
    # Back to the first layout, which is not named.
    assert job.request_layout(case.whole, SENT)
    gone(job, 0, 1, finished=DRAINED, reached=DRAINED, left_for=case.whole)
    assert (job.generation_state.layout, job.generation_state.layout_before) == (FIRST, case.new)


@pytest.mark.parametrize("retry", [True, False])
@cases
def test_a_failure_on_trial_goes_back_and_that_layout_is_not_tried_again(
    case: Case, retry: bool
) -> None:
    """Holds also for a failure that a restart does not change: the layout may be the cause."""
    job = case.started()
    case.leave(job)
    fail(job, 1, 0, retry=retry)
    state = job.generation_state
    assert (state.generation, state.verdict, state.layout, state.layout_before) == (
        2,
        "",
        FIRST,
        None,
    )
    assert (job.saved.count, job.saved.counted) == (1, 0)
    assert not job.request_layout(case.new, SENT) and job.request_layout(case.other, SENT)
    gone(job, 0, 1, finished=14, reached=14, left_for=case.other)
    fail(job, 1, 0, reached=15)
    assert (job.layout, job.saved.count) == (FIRST, 2)


@cases
def test_a_start_takes_from_when_the_last_pod_is_there_to_the_first_iteration(case: Case) -> None:
    """Time that others waited for a pod is not included."""
    job = case.started()
    gone(job, 0, now=20.0, loss=lost_peer(20.0))
    job.process_pod_report(word("joined", 1, launcher="new"), 320.0)
    assert job.generation_state.generation == 1
    job.process_pod_report(word("resumed", 0, 1, resumed=FROM_MEMORY), 325.0)
    job.process_rank_report(trained(DRAINED), 326.0)
    assert job.progress.longest_start == pytest.approx(6.0, abs=1.0)
    assert job.saved.last[-1].seconds == pytest.approx(306.0, abs=1.0)
    assert case.started(saved=job.saved).progress.longest_start is None, (
        "another ingest has seen none"
    )


@cases
def test_a_failure_once_it_counts_keeps_it(case: Case) -> None:
    job = case.started()
    case.leave(job)
    job.process_pod_report(
        word("resumed", 0, 1, resumed=FROM_MEMORY, layout=case.new, layout_before=FIRST), 25.0
    )
    fail(job, 0, 1, reached=12)
    assert (job.generation_state.generation, job.layout, job.layout_before) == (2, case.new, None)
    assert not job.saved.last[-1].layers and not job.saved.last[-1].places, "as before"


@cases
def test_the_word_of_a_lost_pod_is_known_by_how_far_the_others_came(case: Case) -> None:
    """Rank 0 has departed and reported, others have begun an iteration more and dropped their old
    copies, and the launcher of rank 0's pod dies before its report."""
    for reached, layers in (
        (DRAINED + TRIAL_ITERATIONS, FIRST),
        (DRAINED + TRIAL_ITERATIONS + 1, case.new),
    ):
        job = case.started()
        case.leave(job)
        job = case.started(saved=job.saved)  # A second ingest knows it as well.
        fail(job, 1, reached=reached)
        job.process_pod_report(word("joined", 0, launcher="new"), 31.0)
        assert (job.generation_state.generation, job.layout, job.layout_before) == (2, layers, None)


@cases
def test_how_far_ranks_came_before_they_were_set_back_proves_nothing(case: Case) -> None:
    """Ranks went on with older copies, and had finished more in an earlier generation."""
    job = case.started()
    gone(job, 0, finished=40, reached=40, loss=lost_peer(11.0))
    gone(job, 1, finished=40, reached=40)
    assert job.request_layout(case.new, SENT)
    gone(job, 0, 1, finished=40, reached=DRAINED, left_for=case.new)
    assert job.saved.last[-1].iterations_done == DRAINED
    assert not job.process_rank_report(trained(DRAINED + 3), 25.0), "it may be of the ranks before"
    assert job.layout_before == FIRST
    for pod in (0, 1):
        gone(job, pod, finished=40, reached=DRAINED + 1, loss=lost_peer(30.0))
    assert job.layout == FIRST


@cases
def test_reports_prove_it_if_the_word_was_lost(case: Case) -> None:
    job = case.started()
    case.leave(job)
    job.process_rank_report(trained(DRAINED + TRIAL_ITERATIONS - 1), 25.0)
    assert job.layout_before == FIRST
    assert job.process_rank_report(trained(DRAINED + TRIAL_ITERATIONS), 26.0), (
        "status is to be written"
    )
    assert (job.layout, job.layout_before) == (case.new, None)


@cases
def test_ranks_that_fail_before_they_leave_keep_their_layout(case: Case) -> None:
    job = case.started()
    assert job.request_layout(case.new, SENT)
    gone(job, 0, reached=DRAINED, left_for=case.new, finished=DRAINED)
    lost = PodFailure(reason="not all ranks departed for other places", at=21.0)
    gone(job, 1, loss=lost, finished=DRAINED)
    assert (job.generation_state.generation, job.layout, job.layout_before) == (1, FIRST, None)
    assert job.generation_state.leave_for == FIRST and job.request_layout(case.new, SENT), (
        "they were not tried"
    )


@cases
def test_a_pod_that_is_lost_after_its_ranks_departed_keeps_the_layout(case: Case) -> None:
    job = case.started()
    assert job.request_layout(case.new, SENT)
    gone(job, 0, reached=DRAINED, left_for=case.new, finished=DRAINED)
    job.process_pod_report(word("joined", 1, launcher="new"), 22.0)
    assert (job.generation_state.generation, job.layout, job.layout_before) == (1, FIRST, None)


@cases
def test_layouts_that_cannot_be_requested(case: Case) -> None:
    job = case.started()
    wrong = [{"layers": (4, 3)}, {"layers": (6, 0)}, {"layers": (2, 2, 2)}, {"layers": (7, -1)}]
    wrong += [{"places": (1, 1)}, {"places": (0, 1, 2)}, {"places": (0, 1, 2, 4)}, {}]
    for each in [*map(RankLayout.model_validate, wrong), case.whole]:
        assert not job.request_layout(each, SENT), each
    assert not JobGenerations(2, 5, done=DRAINED, relayout=True).request_layout(case.new, SENT)
    fewer = case.cut.model_copy(update={"replicas": 2, "min_replicas": 1})
    for cut in (Parallelism(stages=2), fewer, case.cut.model_copy(update={"tensor": 2})):
        allowed = case is LAYERS and cut.tensor > 1
        assert case.started(cut).request_layout(case.new, SENT) == allowed, cut
    assert job.request_layout(case.new, SENT) and not job.request_layout(case.other, SENT), (
        "one at a time"
    )
    case.leave(job := case.started())
    assert not job.request_layout(case.other, SENT), "layers are on trial"
    job = case.started()
    gone(job, 0, loss=lost_peer(11.0))
    assert not job.request_layout(case.new, SENT), "the ranks start again"
    job = case.started()
    job.expect_replacements([lost_pod(1, 15.0)], 15.0)
    assert not job.request_layout(case.new, SENT), "a pod is lost"


@pytest.mark.parametrize("late", [False, True])
@cases
def test_ranks_whose_shards_cannot_change_receive_no_second_request(case: Case, late: bool) -> None:
    """``late``: they found it out as the next generation, and are gone when it is said."""
    job, why = case.started(), f"{LAYERS_FIXED_PREFIX}rank 0: no function builds its stage"
    if late:
        case.leave(job)
        fail(job, 0, 1)
        job.process_pod_report(word("stays", 0, 1, why=why), 31.0)
    else:
        assert job.request_layout(case.new, SENT)
        job.process_pod_report(word("stays", 0, why=why), 21.0)
        assert (job.generation_state.leave, job.generation_state.leave_for, job.stay_reason) == (
            False,
            FIRST,
            why,
        )
    assert job.layout_transition.fixed_reason == why
    # Places may change nevertheless.
    assert job.request_layout(case.other, SENT) == (case is PLACES)
    assert job.status_recoveries is not None
    assert case.started(saved=job.status_recoveries).request_layout(case.other, SENT) == (
        case is PLACES
    ), "another ingest knows it as well"


@cases
def test_the_request_to_ranks_that_do_not_leave_ends(case: Case) -> None:
    """A launcher drops the request, or an iteration takes long. Ranks may still leave."""
    job, late = case.started(), SENT + LEAVE_SECONDS
    assert job.request_layout(case.new, SENT) and job.next_deadline(SENT) == late
    job.check_deadlines(late - 1.0)
    assert job.generation_state.leave
    job.check_deadlines(late)
    assert (
        job.generation_state.leave,
        job.generation_state.leave_for,
        job.generation_state.verdict,
    ) == (False, FIRST, "")
    assert job.stay_reason == f"no rank has left within {LEAVE_SECONDS:g} s"
    assert job.next_deadline(late + 100.0) is None and job.request_layout(case.other, late)
    gone(job, 0, 1, now=late + 1.0, left_for=case.new, finished=DRAINED, reached=DRAINED)
    assert (job.generation_state.generation, job.saved.count) == (1, 0)


@cases
def test_ranks_that_could_not_leave_may_receive_another_request(case: Case) -> None:
    job = case.started()
    assert job.request_layout(case.new, SENT)
    job.process_pod_report(word("stays", 1, why="rank 1: it has no copy of iteration 9"), 21.0)
    assert not job.generation_state.leave and "has no copy" in job.stay_reason
    assert job.request_layout(case.new, SENT) and job.stay_reason == ""


@cases
def test_another_ingest_goes_on_from_status_and_launchers(case: Case) -> None:
    job = case.started()
    assert job.request_layout(case.new, SENT)
    # The ingest had sent the request, and no other one knows.
    other = case.started(saved=Recoveries.model_validate(job.saved.model_dump(by_alias=True)))
    for pod in (0, 1):
        other.process_pod_report(
            word("gone", pod, left_for=case.new, reached=DRAINED, finished=DRAINED), 20.0
        )
    assert (other.layout, other.layout_before) == (case.new, FIRST)
    # The new layout could not be written.
    third = case.started()
    third.process_pod_report(
        word(
            "resumed",
            1,
            1,
            resumed=FROM_MEMORY,
            layout=RankLayout(layers=(5, 2), places=(0, 0)),
            layout_before=FIRST,
        ),
        21.0,
    )
    assert third.generation_state.generation == 0, "a layout that does not fit the job is none"
    assert not third.record_begun_generation(1), "it is not said with which layers"
    fail(other, 1, reached=DRAINED)
    assert (other.layout, third.generation_state.generation) == (case.new, 0)
    known = {"layout": case.new, "layout_before": FIRST}
    third.process_pod_report(word("gone", 1, 1, loss=lost_peer(30.0), **known), 30.0)
    assert (third.generation_state.generation, third.layout, third.layout_before) == (
        1,
        case.new,
        FIRST,
    )
    third.process_pod_report(word("gone", 0, 1, loss=lost_peer(30.0), **known), 30.0)
    assert (third.generation_state.generation, third.layout) == (2, FIRST)


@pytest.mark.parametrize(
    ("reached", "retained"),
    [(DRAINED + TRIAL_ITERATIONS, False), (DRAINED + TRIAL_ITERATIONS + 1, True)],
)
@cases
def test_a_new_ingest_receives_the_time_of_departure_with_the_report_that_ranks_are_gone(
    case: Case, reached: int, retained: bool
) -> None:
    """Writes of the generation, and of its layers that count, have failed."""
    job, known = case.started(), {"layout": case.new, "layout_before": FIRST}
    how = {"began": DRAINED, "reached": reached, "finished": reached}
    job.process_pod_report(word("gone", 0, 1, loss=lost_peer(30.0), **known, **how), 30.0)
    assert (job.generation_state.generation, job.layout_before) == (1, FIRST)
    job.process_pod_report(word("gone", 1, 1, loss=lost_peer(30.0), **known, **how), 30.0)
    assert (job.generation_state.generation, job.layout) == (2, case.new if retained else FIRST)


@cases
def test_a_launcher_reports_to_another_ingest_that_a_layout_counts(case: Case) -> None:
    job, how = case.started(), {"layout": case.new, "reached": DRAINED + 1}
    job.process_pod_report(
        word("gone", 0, 1, loss=lost_peer(30.0), layout_before=FIRST, **how), 30.0
    )
    job.process_pod_report(word("gone", 1, 1, loss=lost_peer(30.0), **how), 30.0)
    assert (job.generation_state.generation, job.layout, job.layout_before) == (2, case.new, None)


@cases
def test_polls_teach_the_newest_generation_where_layouts_do_not_change(case: Case) -> None:
    """The number of a generation identifies it, also if the job has a number of layers."""
    job = case.started(relayout=False)
    assert job.record_begun_generation(3) and job.generation_state.generation == 3
    assert not job.request_layout(case.new, SENT)
    assert not case.started().record_begun_generation(3), "unknown with which layers"


@cases
def test_a_layout_is_known_after_relayout_is_switched_off(case: Case) -> None:
    job = case.started()
    case.leave(job)
    other = case.started(saved=job.saved, relayout=False)
    assert (other.layout, other.layout_before) == (case.new, FIRST)
    assert not other.record_begun_generation(2) and other.record_begun_generation(
        2, word("gone", 0, 2, layout=case.other)
    )
    assert (other.generation_state.generation, other.layout) == (2, case.other)
    other.begin_attempt(1)
    assert other.record_begun_generation(2), "the pods of this attempt move none"


@cases
def test_an_attempt_begins_with_the_first_layout(case: Case) -> None:
    job = case.started()
    case.leave(job)
    job.begin_attempt(1)
    assert (job.layout, job.layout_before, job.generation_state.layout) == (FIRST, None, FIRST)


@cases
def test_an_undone_layout_is_not_tried_again(case: Case) -> None:
    job = case.started()
    case.leave(job)
    known = {"layout": case.new, "layout_before": FIRST}
    job.process_pod_report(word("resumed", 0, 1, resumed=FROM_MEMORY, **known), 25.0)
    job.record_measured_gain(1, -0.2)
    assert job.saved.last[-1].measured == -0.2
    assert job.request_layout(FIRST, SENT, promised=0.2, undoes=True)
    gone(job, 0, 1, finished=DRAINED + 30, reached=DRAINED + 30, left_for=FIRST)
    assert (job.layout, job.layout_before) == (FIRST, case.new)
    assert job.saved.last[-1].cause.endswith("since the last change made iterations slower")
    job.process_pod_report(word("resumed", 0, 2, resumed=FROM_MEMORY, layout_before=case.new), 45.0)
    assert (job.layout, job.layout_before) == (FIRST, None)
    assert not job.request_layout(case.new, SENT) and job.request_layout(case.other, SENT)
    assert not case.started(saved=job.saved).request_layout(case.new, SENT), (
        "another ingest knows it as well"
    )
