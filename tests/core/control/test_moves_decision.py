"""When layers move, by a clock that is played, and what a controller knows of them after a
restart."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from observing import trained

from pipemorph.api.layout import Layout
from pipemorph.api.spec import JobSpec
from pipemorph.control import JobController
from pipemorph.control.decide.layouts.beside import Beside
from pipemorph.control.decide.layouts.moves import (
    CONFIRM_ITERATIONS,
    CONFIRM_SECONDS,
    REST,
    Moves,
    search,
)
from pipemorph.control.decide.layouts.relayout import Network, Proposal
from pipemorph.planning import StageTimes

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


def network(speeds: tuple[float, ...], held: tuple[int, ...], left: int) -> Network:
    """Devices on which a layer takes so many times as long as usual."""
    ops = [
        OP / 1e3 * speed * count * STAGES / TOTAL for speed, count in zip(speeds, held, strict=True)
    ]
    stages = tuple(StageTimes(forward=t, backward_input=t, backward_weight=t) for t in ops)
    return Network(stages, (), (), True, left, Beside(TOTAL, (0.03,) * STAGES))


class Played:
    """The layouts of one job, by the second and iteration, and what its ranks do."""

    def __init__(self) -> None:
        self.now, self.left, self.told = 100.0, 5000, list[str]()
        self.moves = Moves(JOB, self.told.append, lambda: self.now)
        self.generation = 0

    def look(self, speeds: tuple[float, ...], seconds: float, iterations: int) -> bool:
        """Whether ranks are asked to leave."""
        self.now, self.left = self.now + seconds, self.left - iterations
        if not self.moves.decides:
            return False
        held = self.moves.layout.spread(TOTAL)
        move = self.moves.consider(network(speeds, held, self.left), COST)
        if move is not None:
            assert move.proposal.pays and sum(move.proposal.layout.spread(TOTAL)) == TOTAL
            assert min(move.proposal.layout.spread(TOTAL)) >= 1
            self.moves.ask(move)
        return move is not None


speed = st.sampled_from([1.0, 1.0, 1.0, 1.5, 2.0])
looks = st.tuples(
    st.tuples(speed, speed, speed),
    st.floats(0.1, 12.0),
    st.integers(0, 4),
    st.sampled_from(["stay", "fail", "leave and fail", "count", "count and fail", "attempt"]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(looks, max_size=40))
def test_what_counts_is_what_ranks_have_met_with(played: list[Any]) -> None:
    """Whatever happens: ranks are asked one thing at a time, a failure goes back to what counted, a
    split that failed is not tried again, and nothing is asked while ranks rest."""
    job = Played()
    moves, counted, refused, rests = job.moves, FIRST, set[tuple[int, ...]](), 0.0
    for speeds, seconds, iterations, then in played:
        asked = job.look(speeds, seconds, iterations)
        assert moves.layout == counted
        if then == "attempt":
            moves.failed(attempt=True)
            counted = FIRST
            assert moves.layout == counted
            if asked:
                rests = job.now + REST * COST
            continue
        if not asked:
            continue
        assert job.now >= rests
        wanted = moves.asked.proposal.layout  # type: ignore[union-attr]
        assert wanted.layers not in refused and wanted != counted
        assert not moves.decides and moves.leaving
        if then == "stay":
            moves.stay("no memory")
        elif then == "fail":
            assert not moves.failed(attempt=False)
        else:
            job.generation += 1
            moves.left(job.generation)
            assert moves.settling and moves.layout == wanted
            if then == "leave and fail":
                assert moves.failed(attempt=False)
                refused.add(wanted.layers)
            else:
                moves.counts()
                counted = wanted
                if then == "count and fail":
                    assert not moves.failed(attempt=False)
                assert not moves.decides
                moves.arrived(5000 - job.left, COST)
        rests = job.now + REST * COST
        assert moves.layout == counted


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0.05, 3.0), st.integers(0, 3)), max_size=25))
def test_a_slow_stage_is_believed_after_some_time_and_iterations(steps: list[Any]) -> None:
    job = Played()
    began: tuple[float, int] | None = None
    for seconds, iterations in steps:
        asked = job.look((1.0, 2.0, 1.0), seconds, iterations)
        if began is None:
            began = job.now, job.left
        waited, finished = job.now - began[0], began[1] - job.left
        if asked:
            assert waited >= CONFIRM_SECONDS and finished >= CONFIRM_ITERATIONS
            assert job.moves.asked.proposal.layout.layers == MOVED  # type: ignore[union-attr]
            return
        enough = waited >= CONFIRM_SECONDS and finished >= CONFIRM_ITERATIONS
        assert not (enough and iterations and len(job.moves._uneven._looks) == 3)  # type: ignore[union-attr]


def a_question(job: Played) -> Any:
    job.moves.see(network((1, 2, 1), (4, 4, 4), job.left))
    for _ in range(9):
        job.now, job.left = job.now + 1.0, job.left - 2
        found = job.moves.of_layers(network((1, 2, 1), (4, 4, 4), job.left), COST)
        if found is not None:
            return found
    raise AssertionError("nothing was asked")


def test_the_search_may_be_made_by_another_process() -> None:
    asked = a_question(Played())
    there = pickle.loads(pickle.dumps(asked))
    found = pickle.loads(pickle.dumps(search(there)))
    assert isinstance(found, Proposal) and found.layout.layers == MOVED


def test_an_answer_that_comes_too_late_is_dropped() -> None:
    job = Played()
    asked = a_question(job)
    found = search(asked)
    job.moves.follow((5, 3, 4))
    assert job.moves.answer(asked, found) is None
    job = Played()
    asked = a_question(job)
    move = job.moves.answer(asked, found)
    assert move is not None
    job.moves.ask(move)
    assert job.moves.answer(asked, found) is None
    assert job.told == [f"layers move: {move.reason}"]


def test_a_question_without_an_answer_is_asked_again() -> None:
    job = Played()
    a_question(job)
    job.now, job.left = job.now + 1.0, job.left - 2
    assert job.moves.of_layers(network((1, 2, 1), (4, 4, 4), job.left), COST) is not None


def test_other_layers_of_which_nothing_is_known_beside_them_stay() -> None:
    job = Played()
    job.moves.follow(MOVED)
    for _ in range(9):
        job.now, job.left = job.now + 1.0, job.left - 2
        of_devices = network((1, 1, 1), MOVED, job.left)
        unknown = Network(of_devices.stages, (), (), True, job.left, Beside(TOTAL))
        assert job.moves.of_layers(unknown, COST) is None
    assert a_question_back(job) is not None


def a_question_back(job: Played) -> Any:
    for _ in range(9):
        job.now, job.left = job.now + 1.0, job.left - 2
        found = job.moves.of_layers(network((1, 1, 1), MOVED, job.left), COST)
        if found is not None:
            return found
    return None


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
