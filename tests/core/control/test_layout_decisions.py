"""When a job's layout changes, by a clock that is played, and what becomes of a change: with the
generations of one host, as under ``pipemorph run``."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from observing import trained
from pod_words import word

from pipemorph.api.layout import Layout, RankLayout
from pipemorph.api.spec import JobSpec
from pipemorph.control import JobController
from pipemorph.control.decide.layouts.beside import Beside
from pipemorph.control.decide.layouts.moves import (
    COMPARED,
    CONFIRM_ITERATIONS,
    CONFIRM_SECONDS,
    REST,
    SETTLES,
    Move,
    Moves,
    Question,
    records,
    search,
)
from pipemorph.control.decide.layouts.relayout import Network, Proposal
from pipemorph.control.generations import Generations
from pipemorph.exits import PARTS_STAY
from pipemorph.planning import StageTimes
from pipemorph.wire import IterationSample, Loss, ReductionHealth, ResumedFrom, SlowestEdge

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
FIRST = Layout.of(JOB.parallelism)
MOVED = (5, 2, 5)
SLOW, WELL = (1.0, 2.0, 1.0), (1.0, 1.0, 1.0)


def network(speeds: tuple[float, ...], held: tuple[int, ...], left: int) -> Network:
    """Devices on which a layer takes so many times as long as usual."""
    ops = [
        OP / 1e3 * speed * count * STAGES / TOTAL for speed, count in zip(speeds, held, strict=True)
    ]
    stages = tuple(StageTimes(forward=t, backward_input=t, backward_weight=t) for t in ops)
    return Network(stages, (), (), True, left, Beside(TOTAL, (0.03,) * STAGES))


class Played:
    """The layouts of one job, by the second and iteration, and what its ranks do."""

    def __init__(self, spec: JobSpec = JOB) -> None:
        self.now, self.left, self.told = 100.0, 5000, list[str]()
        cut = spec.parallelism
        self.generations = Generations(1, 10_000, cut=cut, relayout=True)
        self.moves = Moves(spec, self.generations, self.told.append, lambda: self.now)
        self.finished: list[IterationSample] = []

    def iterate(self, count: int, seconds: float = 1.0) -> None:
        for _ in range(count):
            self.left -= 1
            sample = IterationSample(
                index=5000 - self.left - 1, seconds=seconds, loss=0.0, plan_version=0,
                bubble_fraction=0.0,
            )  # fmt: skip
            self.finished.append(sample)

    def consider(self, known: Network) -> Move | None:
        """Whether ranks are asked to leave."""
        if not self.moves.is_due():
            return None
        move = self.moves.consider(known, COST, self.finished)
        if move is not None:
            assert move.proposal.pays
            layout = move.proposal.layout.told
            assert self.generations.ask(layout, self.now, undoes=move.undoes)
            self.moves.ask(move)
        return move

    def look(self, speeds: tuple[float, ...], seconds: float = 1.0, iterations: int = 2) -> Any:
        self.now += seconds
        self.iterate(iterations)
        held = self.moves.layout.spread(TOTAL)
        return self.consider(network(speeds, held, self.left))

    def looks(self, speeds: tuple[float, ...], times: int, iterations: int = 2) -> Move | None:
        """Look so many times, a second apart, until a change pays."""
        found = (self.look(speeds, iterations=iterations) for _ in range(times))
        return next(filter(None, found), None)

    def says(self, event: str, **fields: Any) -> bool:
        """What the host says of the ranks that run. Returns whether the layout is another one."""
        job = self.generations
        known = {"layout": job.layout, "layout_before": job.layout_before}
        job.take(word(event, 0, job.saved.generation, **known | fields), self.now)
        return self.moves.follow(self.finished)

    def leave(self) -> bool:
        done = 5000 - self.left
        left_for = self.generations.layouts.asked
        return self.says("gone", left_for=left_for, reached=done, finished=done)

    def fail(self, **fields: Any) -> bool:
        loss = Loss.model_validate({"reason": "rank 1 was killed", "at": self.now} | fields)
        done = 5000 - self.left
        return self.says("gone", loss=loss, reached=done, finished=done)

    def count(self) -> bool:
        return self.says("resumed", resumed=ResumedFrom(iteration=0, rung="kept"))

    def arrive(self, seconds: float = COST) -> None:
        self.moves.arrived(5000 - self.left, seconds)


speed = st.sampled_from([1.0, 1.0, 1.0, 1.5, 2.0])
looks = st.tuples(
    st.tuples(speed, speed, speed),
    st.floats(0.1, 12.0),
    st.integers(0, 4),
    st.sampled_from(["stay", "fail", "leave and fail", "count", "count and fail", "attempt"]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(looks, max_size=40))
def test_what_counts_is_what_ranks_have_trained_with(played: list[Any]) -> None:
    """Whatever happens: ranks are asked one thing at a time, a failure goes back to what counted, a
    layout that failed is not tried again, and nothing is asked while ranks rest."""
    job = Played()
    moves, counted, refused, rests = job.moves, FIRST, set[tuple[int, ...]](), 0.0
    for attempt, (speeds, seconds, iterations, then) in enumerate(played, start=1):
        asked = job.look(speeds, seconds, iterations)
        assert moves.layout == counted
        if then == "attempt":
            job.generations.begin_attempt(attempt)
            changes = counted != FIRST
            counted = FIRST
            assert moves.follow(job.finished) == changes and moves.layout == counted
            job.generations.attempt = job.generations.saved.attempt = 0
            job.moves._seen = (0, job.generations.saved.generation)
            if asked:
                rests = job.now + REST * COST
            continue
        if not asked:
            continue
        assert job.now >= rests
        wanted = asked.proposal.layout
        assert wanted.layers not in refused and wanted != counted and not moves.is_due()
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
        rests = job.now + REST * COST
        assert moves.layout == counted


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(1.0, 3.0), st.integers(0, 3)), max_size=25))
def test_a_slow_stage_is_believed_after_some_time_and_iterations(steps: list[Any]) -> None:
    job = Played()
    began: tuple[float, int] | None = None
    for seconds, iterations in steps:
        asked = job.look(SLOW, seconds, iterations)
        if began is None:
            began = job.now, job.left
        waited, finished = job.now - began[0], began[1] - job.left
        if asked:
            assert waited >= CONFIRM_SECONDS and finished >= CONFIRM_ITERATIONS
            assert asked.proposal.layout.layers == MOVED
            return
        enough = waited >= CONFIRM_SECONDS and finished >= CONFIRM_ITERATIONS
        assert not (enough and iterations and len(job.moves._uneven._looks) == 3)  # type: ignore[union-attr]


def test_noise_is_no_reason_to_move() -> None:
    """One stage after another seems slow, one by very different times, or one for a moment."""
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


def a_question(job: Played, speeds: tuple[float, ...] = SLOW) -> Question | None:
    def asked() -> Iterator[Question]:
        for _ in range(9):
            job.now += 1.0
            job.iterate(2)
            held = job.moves.layout.spread(TOTAL)
            yield from job.moves.questions(network(speeds, held, job.left), COST)

    return next(asked(), None)


def test_the_search_may_be_made_by_another_process() -> None:
    there = pickle.loads(pickle.dumps(a_question(Played())))
    found = pickle.loads(pickle.dumps(search(there)))
    assert isinstance(found, Proposal) and found.layout.layers == MOVED


def test_an_answer_that_comes_too_late_is_dropped() -> None:
    job = Played()
    asked = a_question(job)
    assert asked is not None
    found = search(asked)
    job.generations.saved = job.generations.saved.with_layout(RankLayout(layers=(5, 3, 4)), None)
    assert job.moves.follow(job.finished) and job.moves.answer(asked, found) is None
    job = Played()
    asked = a_question(job)
    assert asked is not None
    move = job.moves.answer(asked, found)
    assert move is not None
    job.moves.ask(move)
    assert job.moves.answer(asked, found) is None
    assert job.told == [f"layers move: {move.reason}"]


def test_what_does_not_pay_is_said_once() -> None:
    job = Played()
    job.iterate(4990)
    assert job.looks(SLOW, 5) is None
    (told,) = job.told
    assert told.startswith("layers stay where they are: stage 1 computes for 60.0 ms")
    assert "and cost 2.0 s" in told


def test_other_layers_of_which_nothing_is_known_beside_them_stay() -> None:
    job = Played()
    job.generations.saved = job.generations.saved.with_layout(RankLayout(layers=MOVED), None)
    job.moves.follow(job.finished)
    for _ in range(9):
        job.now += 1.0
        job.iterate(2)
        of_devices = network(WELL, MOVED, job.left)
        unknown = Network(of_devices.stages, (), (), True, job.left, Beside(TOTAL))
        assert not list(job.moves.questions(unknown, COST))
    assert a_question(job, WELL) is not None


@pytest.mark.parametrize("late", [False, True])
def test_parts_that_cannot_change_are_asked_once(late: bool) -> None:
    """``late``: they find it out with the new layout, and fail."""
    job, why = Played(), f"{PARTS_STAY}no builder"
    move = job.looks(SLOW, 9)
    assert move is not None
    if late:
        job.leave()
    job.says("stays", why=why)
    if late:
        # What a restart would not change: the layout before is no restart.
        assert job.fail(retry=False)
        assert job.generations.state.verdict == ""
    outcome = "went back" if late else "stayed"
    assert (move.outcome, move.why, job.moves.layout) == (outcome, why, FIRST)
    job.now += 1000.0
    assert job.looks((1.0, 3.0, 1.0), 8) is None


def moved(job: Played, *, seconds: float) -> Move:
    """A change that counts, after which an iteration takes so long: before it took a second."""
    move = job.looks(SLOW, 9)
    assert move is not None
    job.leave()
    job.count()
    job.arrive()
    job.iterate(SETTLES + COMPARED, seconds)
    return move


@pytest.mark.parametrize("in_vain", [False, True])
def test_a_change_that_made_iterations_slower_is_undone_once(in_vain: bool) -> None:
    """Also if ranks were asked in vain for another one since."""
    job = Played()
    move = moved(job, seconds=1.3)
    if in_vain:
        job.moves.made.append(Move("in vain", move.proposal, move.before, "stayed"))
    # Whether or not ranks rest.
    back = job.look((1.0, 1.6, 1.0), iterations=0)
    assert back is not None and back.undoes and back.proposal.layout == FIRST
    assert move.measured == pytest.approx(-0.3)
    assert "takes 30% more time than before" in back.reason
    assert job.leave() and not job.count() and job.moves.layout == FIRST
    job.arrive()
    job.iterate(SETTLES + COMPARED, 9.0)
    assert job.look(WELL) is None, "what undoes is not undone"
    job.now += 1000.0
    again = job.looks(SLOW, 9)
    assert again is None or again.proposal.layout != move.proposal.layout
    told = records(job.moves, job.finished)
    assert [each["outcome"] for each in told if each["iteration"]][:2] == ["moved", "moved"]
    assert told[0]["measured"] == pytest.approx(-0.3)


@pytest.mark.parametrize(("seconds", "left"), [(0.8, 1000), (1.0, 1000), (1.3, 3)])
def test_a_change_stays_that_made_nothing_worse_or_where_the_way_back_would_not_pay(
    seconds: float, left: int
) -> None:
    job = Played()
    move = moved(job, seconds=seconds)
    job.left = left
    assert job.look(WELL, iterations=0) is None
    assert move.measured == pytest.approx(1 - seconds) and job.moves.layout.layers == MOVED


def test_a_late_edge_of_a_ring_makes_ranks_change_places() -> None:
    spec = SPEC | {"parallelism": {"stages": 2, "replicas": 2}}
    job = Played(JobSpec.model_validate(spec))

    def known(late: float) -> Network:
        stages = (StageTimes(forward=0.01, backward_input=0.01, backward_weight=0.01),) * 2
        groups = tuple(
            ReductionHealth(
                stage=stage, replica=0, where="", slow=at > 0, seconds=0.1 + 40 * at, normal=0.1,
                exposed=0.1 + 40 * at, bytes=1 << 20,
                slowest=SlowestEdge(at=0, seconds=0.001 + at, usual=0.001),
            )
            for stage, at in enumerate((late, 0.0))
        )  # fmt: skip
        return Network(stages, (), groups, True, job.left)

    job.now += 1.0
    assert job.consider(known(0.0)) is None
    job.now += 1.0
    job.iterate(9)
    move = job.consider(known(0.03))
    assert move is not None and not move.of_layers and move.reason.startswith("late: pods 0 and")
    assert job.leave() and job.moves.layout.places == move.proposal.layout.places
    assert job.fail() and job.moves.layout.is_first
    assert job.generations.layouts.refused == {move.proposal.layout.whole(None)}


# --- what a controller knows --------------------------------------------------------------


def ops(*seconds: float) -> list[dict[str, Any]]:
    rest = {"fused_backward": None, "activation_bytes": 1000, "offload_copy": None}
    return [
        {"stage": stage, "forward": t, "backward_input": t, "backward_weight": t, "peak_memory": 0}
        | rest
        for stage, t in enumerate(seconds)
    ]


def forwards(controller: JobController) -> list[float]:
    times = controller._observed.stages.times()
    assert times is not None
    return [each.forward for each in times]


def a_controller(**schedule: Any) -> JobController:
    """Of a job whose last stage has a head that takes as long as two layers."""
    spec = SPEC | {"schedule": {"microbatches": 8, **schedule}}
    controller = JobController(JobSpec.model_validate(spec))
    controller.report(trained(0, 1, sequence=1, stages=ops(0.01, 0.01, 0.015)), 1.0)
    found = controller.network(1.0)
    assert found is not None and found.beside[2] == pytest.approx(2.0)
    return controller


def test_stages_are_expected_to_take_what_their_layers_and_the_rest_take() -> None:
    controller = a_controller()
    controller.change_layout(None, MOVED)
    assert forwards(controller) == pytest.approx([0.0125, 0.005, 0.015 * 7 / 6])
    # What is measured with other layers says nothing of what is beside them.
    controller.report(trained(2, sequence=2, stages=ops(0.0125, 0.005, 0.0175)), 2.0)
    found = controller.network(2.0)
    assert found is not None and found.beside[2] == pytest.approx(2.0) and found.beside[1] == 0
    controller.change_layout([], ())
    assert forwards(controller) == pytest.approx([0.01, 0.01, 0.015])


def test_a_restored_controller_expects_what_the_new_parts_take() -> None:
    stated = {"forward": OP, "backwardInput": OP, "backwardWeight": OP}
    last = dict.fromkeys(stated, 1.5 * OP)
    controller = a_controller(stageTimes=[stated, stated, last])
    controller.change_layout(None, MOVED)
    restored = JobController.restore(controller.spec, controller.snapshot())
    assert restored.layers == MOVED
    assert forwards(restored) == pytest.approx([0.0125, 0.005, 0.015 * 7 / 6])
    footprints = [each.activation_bytes for each in restored._observed.stages.footprints]
    assert footprints == [1250, 500, 1167]
    # And again: nothing is scaled twice.
    again = JobController.restore(controller.spec, restored.snapshot())
    assert again.snapshot() == restored.snapshot()
    again.change_layout(None, MOVED)
    assert forwards(again) == forwards(restored)


def test_a_new_attempt_begins_with_the_first_split() -> None:
    controller = a_controller()
    controller.change_layout(None, MOVED)
    controller.begin_attempt(1)
    assert controller.layers == ()
    footprints = [each.activation_bytes for each in controller._observed.stages.footprints]
    assert footprints == [1000, 1000, 1000]
    assert controller.snapshot()["beside"] == [0.03, 0.03, 0.045]


def test_a_snapshot_of_an_earlier_version_has_no_layers() -> None:
    controller = a_controller()
    saved = {k: v for k, v in controller.snapshot().items() if k not in ("layers", "beside")}
    restored = JobController.restore(controller.spec, saved)
    assert restored.layers == () and not restored._beside.least
