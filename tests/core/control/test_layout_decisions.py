"""Changes of a job's layout, on a simulated clock, and their outcomes: with the generations of one
host, as under ``pipemorph run``."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from observing import trained
from pod_words import word

from pipemorph.control import JobController
from pipemorph.control.decide.layouts.layout_changes import (
    COMPARED_ITERATIONS,
    CONFIRM_ITERATIONS,
    CONFIRM_SECONDS,
    REST_FACTOR,
    SETTLING_ITERATIONS,
    LayoutChange,
    LayoutChanges,
    LayoutSearchRequest,
    build_records,
    search_layout,
)
from pipemorph.control.decide.layouts.layout_search import LayoutProposal, NetworkMeasurements
from pipemorph.control.decide.layouts.stage_overhead import StageOverhead
from pipemorph.control.job_generations import JobGenerations
from pipemorph.exits import LAYERS_FIXED_PREFIX
from pipemorph.planning import StageTimes
from pipemorph.protocol import (
    IterationSample,
    PodFailure,
    ReductionHealth,
    ResumedFrom,
    SlowestEdge,
)
from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.layout import Layout, RankLayout

STAGES, TOTAL, COST = 3, 12, 2.0
OP = 10.0
"""Milliseconds of F, B or W of the four layers that a stage begins with."""
SPEC: dict[str, Any] = {
    "parallelism": {"stages": STAGES, "layers": TOTAL},
    "schedule": {"microbatches": 8},
    "trainer": {"module": "m", "iterations": 5000},
    "failurePolicy": {"maxRestarts": 1},
    "adaptation": {"relayout": True},
}
JOB = JobSpec.model_validate(SPEC)
FIRST = Layout.from_parallelism(JOB.parallelism)
MOVED = (5, 2, 5)
SLOW, WELL = (1.0, 2.0, 1.0), (1.0, 1.0, 1.0)


def network(speeds: tuple[float, ...], held: tuple[int, ...], ahead: int) -> NetworkMeasurements:
    """Measurements of devices on which a layer takes ``speeds`` times as long as usual."""
    ops = [
        OP / 1e3 * speed * count * STAGES / TOTAL for speed, count in zip(speeds, held, strict=True)
    ]
    stages = tuple(StageTimes(forward=t, backward_input=t, backward_weight=t) for t in ops)
    return NetworkMeasurements(stages, (), (), True, ahead, StageOverhead(TOTAL, (0.03,) * STAGES))


class Played:
    """The layouts of one job, by the second and iteration, and what its ranks do."""

    def __init__(self, spec: JobSpec = JOB) -> None:
        self.now, self.remaining, self.notes = 100.0, 5000, list[str]()
        cut = spec.parallelism
        self.generations = JobGenerations(1, 10_000, cut=cut, relayout=True)
        self.moves = LayoutChanges(spec, self.generations, self.notes.append, lambda: self.now)
        self.finished: list[IterationSample] = []

    def iterate(self, count: int, seconds: float = 1.0) -> None:
        for _ in range(count):
            self.remaining -= 1
            sample = IterationSample(
                index=5000 - self.remaining - 1, seconds=seconds, loss=0.0, plan_version=0,
                bubble_fraction=0.0,
            )  # fmt: skip
            self.finished.append(sample)

    def consider(self, known: NetworkMeasurements) -> LayoutChange | None:
        """Returns the change for which ranks are requested to leave, if any."""
        if not self.moves.is_check_due():
            return None
        move = self.moves.search_for_change(known, COST, self.finished)
        if move is not None:
            assert move.proposal.pays_off
            layout = move.proposal.layout.rank_layout
            assert self.generations.request_layout(layout, self.now, undoes=move.undoes_change)
            self.moves.record_request(move)
        return move

    def look(self, speeds: tuple[float, ...], seconds: float = 1.0, iterations: int = 2) -> Any:
        self.now += seconds
        self.iterate(iterations)
        held = self.moves.layout.spread_layers(TOTAL)
        return self.consider(network(speeds, held, self.remaining))

    def looks(
        self, speeds: tuple[float, ...], times: int, iterations: int = 2
    ) -> LayoutChange | None:
        """Check ``times`` times, a second apart, until a change pays."""
        found = (self.look(speeds, iterations=iterations) for _ in range(times))
        return next(filter(None, found), None)

    def says(self, event: str, **fields: Any) -> bool:
        """Apply the host's report on the ranks. Returns true if the layout is another one."""
        job = self.generations
        known = {"layout": job.layout, "layout_before": job.layout_before}
        job.process_pod_report(word(event, 0, job.saved.generation, **known | fields), self.now)
        return self.moves.follow_generation(self.finished)

    def leave(self) -> bool:
        done = 5000 - self.remaining
        left_for = self.generations.layout_transition.requested_layout
        return self.says("gone", left_for=left_for, reached=done, finished=done)

    def fail(self, **fields: Any) -> bool:
        loss = PodFailure.model_validate({"reason": "rank 1 was killed", "at": self.now} | fields)
        done = 5000 - self.remaining
        return self.says("gone", loss=loss, reached=done, finished=done)

    def count(self) -> bool:
        return self.says("resumed", resumed=ResumedFrom(iteration=0, rung="kept"))

    def arrive(self, seconds: float = COST) -> None:
        self.moves.record_first_iteration(5000 - self.remaining, seconds)


speed = st.sampled_from([1.0, 1.0, 1.0, 1.5, 2.0])
looks = st.tuples(
    st.tuples(speed, speed, speed),
    st.floats(0.1, 12.0),
    st.integers(0, 4),
    st.sampled_from(["stay", "fail", "leave and fail", "count", "count and fail", "attempt"]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(looks, max_size=40))
def test_the_layout_counts_that_ranks_have_trained_with(played: list[Any]) -> None:
    """Ranks receive one request at a time, a failure goes back to the layout that counted, a layout
    that failed is not tried again, and none is requested while ranks rest."""
    job = Played()
    moves, counted, refused, rests = job.moves, FIRST, set[tuple[int, ...]](), 0.0
    for attempt, (speeds, seconds, iterations, then) in enumerate(played, start=1):
        request = job.look(speeds, seconds, iterations)
        assert moves.layout == counted
        if then == "attempt":
            job.generations.begin_attempt(attempt)
            changes = counted != FIRST
            counted = FIRST
            assert moves.follow_generation(job.finished) == changes and moves.layout == counted
            job.generations.attempt = job.generations.saved.attempt = 0
            job.moves._seen = (0, job.generations.saved.generation)
            if request:
                rests = job.now + REST_FACTOR * COST
            continue
        if not request:
            continue
        assert job.now >= rests
        wanted = request.proposal.layout
        assert wanted.layers not in refused and wanted != counted and not moves.is_check_due()
        if then == "stay":
            assert not job.says("stays", why="no memory")
        elif then == "fail":
            assert not job.fail()
        else:
            assert job.leave() and moves.layout == wanted
            if then == "leave and fail":
                assert job.fail()
                refused.add(wanted.layers)
            else:
                assert not job.count()
                counted = wanted
                if then == "count and fail":
                    job.iterate(3)
                    assert not job.fail()
                job.arrive()
        rests = job.now + REST_FACTOR * COST
        assert moves.layout == counted


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(1.0, 3.0), st.integers(0, 3)), max_size=25))
def test_a_slow_stage_is_believed_after_some_time_and_iterations(steps: list[Any]) -> None:
    job = Played()
    began: tuple[float, int] | None = None
    for seconds, iterations in steps:
        request = job.look(SLOW, seconds, iterations)
        if began is None:
            began = job.now, job.remaining
        waited, finished = job.now - began[0], began[1] - job.remaining
        if request:
            assert waited >= CONFIRM_SECONDS and finished >= CONFIRM_ITERATIONS
            assert request.proposal.layout.layers == MOVED
            return
        enough = waited >= CONFIRM_SECONDS and finished >= CONFIRM_ITERATIONS
        assert not (enough and iterations and len(job.moves._imbalance._newest_times) == 3)  # type: ignore[union-attr]


def test_noise_is_no_reason_to_move() -> None:
    """Stages seem slow one after another, one by very different times, or one for a moment."""
    for pair in (((1, 1.5, 1), (1, 1, 1.5)), ((1, 1.4, 1), (1, 2.6, 1)), ((1, 1.5, 1), WELL)):
        job = Played()
        for _ in range(6):
            for speeds in pair:
                assert job.look(speeds) is None
    job = Played()
    assert job.looks(SLOW, 2) is None
    job.now += 1000.0
    assert job.looks(SLOW, 2) is None, "what was seen before a pause does not count"
    assert job.looks(SLOW, 9, iterations=0) is None, "nor do looks between two iterations"
    assert job.looks(SLOW, 2) is not None


def a_question(job: Played, speeds: tuple[float, ...] = SLOW) -> LayoutSearchRequest | None:
    def search() -> Iterator[LayoutSearchRequest]:
        for _ in range(9):
            job.now += 1.0
            job.iterate(2)
            held = job.moves.layout.spread_layers(TOTAL)
            yield from job.moves.list_searches(network(speeds, held, job.remaining), COST)

    return next(search(), None)


def test_the_search_may_be_made_by_another_process() -> None:
    there = pickle.loads(pickle.dumps(a_question(Played())))
    found = pickle.loads(pickle.dumps(search_layout(there)))
    assert isinstance(found, LayoutProposal) and found.layout.layers == MOVED


def test_an_answer_that_comes_too_late_is_dropped() -> None:
    job = Played()
    request = a_question(job)
    assert request is not None
    found = search_layout(request)
    job.generations.saved = job.generations.saved.with_layout(RankLayout(layers=(5, 3, 4)), None)
    assert (
        job.moves.follow_generation(job.finished)
        and job.moves.judge_proposal(request, found) is None
    )
    job = Played()
    request = a_question(job)
    assert request is not None
    move = job.moves.judge_proposal(request, found)
    assert move is not None
    job.moves.record_request(move)
    assert job.moves.judge_proposal(request, found) is None
    assert job.notes == [f"layers move: {move.reason}"]


def test_a_change_that_does_not_pay_is_reported_once() -> None:
    job = Played()
    job.iterate(4990)
    assert job.looks(SLOW, 5) is None
    (line,) = job.notes
    assert line.startswith("layers stay where they are: stage 1 computes for 60.0 ms")
    assert "and cost 2.0 s" in line


def test_other_layers_without_a_known_stage_overhead_stay() -> None:
    job = Played()
    job.generations.saved = job.generations.saved.with_layout(RankLayout(layers=MOVED), None)
    job.moves.follow_generation(job.finished)
    for _ in range(9):
        job.now += 1.0
        job.iterate(2)
        of_devices = network(WELL, MOVED, job.remaining)
        unknown = NetworkMeasurements(
            of_devices.stages, (), (), True, job.remaining, StageOverhead(TOTAL)
        )
        assert not list(job.moves.list_searches(unknown, COST))
    assert a_question(job, WELL) is not None


@pytest.mark.parametrize("late", [False, True])
def test_shards_that_cannot_change_receive_one_request(late: bool) -> None:
    """``late``: they find it out with the new layout, and fail."""
    job, why = Played(), f"{LAYERS_FIXED_PREFIX}no builder"
    move = job.looks(SLOW, 9)
    assert move is not None
    if late:
        job.leave()
    job.says("stays", why=why)
    if late:
        # A restart would not change the failure; the layout before is no restart.
        assert job.fail(retry=False)
        assert job.generations.generation_state.verdict == ""
    outcome = "went back" if late else "stayed"
    assert (move.outcome, move.outcome_reason, job.moves.layout) == (outcome, why, FIRST)
    job.now += 1000.0
    assert job.looks((1.0, 3.0, 1.0), 8) is None


def moved(job: Played, *, seconds: float) -> LayoutChange:
    """A change that counts, after which an iteration takes so long: before it took a second."""
    move = job.looks(SLOW, 9)
    assert move is not None
    job.leave()
    job.count()
    job.arrive()
    job.iterate(SETTLING_ITERATIONS + COMPARED_ITERATIONS, seconds)
    return move


@pytest.mark.parametrize("in_vain", [False, True])
def test_a_change_that_made_iterations_slower_is_undone_once(in_vain: bool) -> None:
    """Holds also if ranks were requested in vain to take another one since."""
    job = Played()
    move = moved(job, seconds=1.3)
    if in_vain:
        job.moves.made_changes.append(
            LayoutChange("in vain", move.proposal, move.layout_before, "stayed")
        )
    # The undo does not wait for the rest of ranks.
    back = job.look((1.0, 1.6, 1.0), iterations=0)
    assert back is not None and back.undoes_change and back.proposal.layout == FIRST
    assert move.measured_gain == pytest.approx(-0.3)
    assert "takes 30% more time than before" in back.reason
    assert job.leave() and not job.count() and job.moves.layout == FIRST
    job.arrive()
    job.iterate(SETTLING_ITERATIONS + COMPARED_ITERATIONS, 9.0)
    assert job.look(WELL) is None, "what undoes is not undone"
    job.now += 1000.0
    again = job.looks(SLOW, 9)
    assert again is None or again.proposal.layout != move.proposal.layout
    records = build_records(job.moves, job.finished)
    assert [each["outcome"] for each in records if each["iteration"]][:2] == ["moved", "moved"]
    assert records[0]["measured"] == pytest.approx(-0.3)


@pytest.mark.parametrize(("seconds", "remaining"), [(0.8, 1000), (1.0, 1000), (1.3, 3)])
def test_a_change_stays_that_made_nothing_worse_or_where_the_way_back_would_not_pay(
    seconds: float, remaining: int
) -> None:
    job = Played()
    move = moved(job, seconds=seconds)
    job.remaining = remaining
    assert job.look(WELL, iterations=0) is None
    assert move.measured_gain == pytest.approx(1 - seconds) and job.moves.layout.layers == MOVED


def test_a_late_edge_of_a_ring_makes_ranks_change_places() -> None:
    spec = SPEC | {"parallelism": {"stages": 2, "replicas": 2}}
    job = Played(JobSpec.model_validate(spec))

    def known(late: float) -> NetworkMeasurements:
        stages = (StageTimes(forward=0.01, backward_input=0.01, backward_weight=0.01),) * 2
        groups = tuple(
            ReductionHealth(
                stage=stage, replica=0, where="", slow=at > 0, seconds=0.1 + 40 * at, normal=0.1,
                exposed=0.1 + 40 * at, bytes=1 << 20,
                slowest=SlowestEdge(at=0, seconds=0.001 + at, usual=0.001),
            )
            for stage, at in enumerate((late, 0.0))
        )  # fmt: skip
        return NetworkMeasurements(stages, (), groups, True, job.remaining)

    job.now += 1.0
    assert job.consider(known(0.0)) is None
    job.now += 1.0
    job.iterate(9)
    move = job.consider(known(0.03))
    assert move is not None and not move.moves_layers and move.reason.startswith("late: pods 0 and")
    assert job.leave() and job.moves.layout.places == move.proposal.layout.places
    assert job.fail() and job.moves.layout.is_first
    assert job.generations.layout_transition.refused_layouts == {
        move.proposal.layout.to_explicit_layout(None)
    }


# --- measurements of a controller ---------------------------------------------------------


def ops(*seconds: float) -> list[dict[str, Any]]:
    rest = {"fused_backward": None, "activation_bytes": 1000, "offload_copy": None}
    return [
        {"stage": stage, "forward": t, "backward_input": t, "backward_weight": t, "peak_memory": 0}
        | rest
        for stage, t in enumerate(seconds)
    ]


def forwards(controller: JobController) -> list[float]:
    times = controller._job_state.stages.get_stage_times()
    assert times is not None
    return [each.forward for each in times]


def a_controller(**schedule: Any) -> JobController:
    """Controller of a job whose last stage has a head that takes as long as two layers."""
    spec = SPEC | {"schedule": {"microbatches": 8, **schedule}}
    controller = JobController(JobSpec.model_validate(spec))
    controller.process_report(trained(0, 1, sequence=1, stages=ops(0.01, 0.01, 0.015)), 1.0)
    found = controller.measure_network(1.0)
    assert found is not None and found.stage_overhead[2] == pytest.approx(2.0)
    return controller


def test_expected_times_of_stages_are_those_of_layers_and_overhead() -> None:
    controller = a_controller()
    controller.change_layout(None, MOVED)
    assert forwards(controller) == pytest.approx([0.0125, 0.005, 0.015 * 7 / 6])
    # Measurements with other layers do not give the stage overhead.
    controller.process_report(trained(2, sequence=2, stages=ops(0.0125, 0.005, 0.0175)), 2.0)
    found = controller.measure_network(2.0)
    assert (
        found is not None
        and found.stage_overhead[2] == pytest.approx(2.0)
        and found.stage_overhead[1] == 0
    )
    controller.change_layout([], ())
    assert forwards(controller) == pytest.approx([0.01, 0.01, 0.015])


def test_a_restored_controller_expects_the_times_of_the_new_shards() -> None:
    stated = {"forward": OP, "backwardInput": OP, "backwardWeight": OP}
    last = dict.fromkeys(stated, 1.5 * OP)
    controller = a_controller(stageTimes=[stated, stated, last])
    controller.change_layout(None, MOVED)
    restored = JobController.from_snapshot(controller.spec, controller.take_snapshot())
    assert restored.layers == MOVED
    assert forwards(restored) == pytest.approx([0.0125, 0.005, 0.015 * 7 / 6])
    footprints = [each.activation_bytes for each in restored._job_state.stages.footprints]
    assert footprints == [1250, 500, 1167]
    # A second time: nothing is scaled twice.
    again = JobController.from_snapshot(controller.spec, restored.take_snapshot())
    assert again.take_snapshot() == restored.take_snapshot()
    again.change_layout(None, MOVED)
    assert forwards(again) == forwards(restored)


def test_a_new_attempt_begins_with_the_first_split() -> None:
    controller = a_controller()
    controller.change_layout(None, MOVED)
    controller.begin_attempt(1)
    assert controller.layers == ()
    footprints = [each.activation_bytes for each in controller._job_state.stages.footprints]
    assert footprints == [1000, 1000, 1000]
    assert controller.take_snapshot()["initial_stage_seconds"] == [0.03, 0.03, 0.045]


def test_a_snapshot_of_an_earlier_version_has_no_layers() -> None:
    controller = a_controller()
    saved = {
        k: v
        for k, v in controller.take_snapshot().items()
        if k not in ("layers", "initial_stage_seconds")
    }
    restored = JobController.from_snapshot(controller.spec, saved)
    assert restored.layers == () and not restored._stage_overhead.initial_seconds
