"""Measured iterations against predictions: telemetry that shows a fault which is not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from plant_support import Plant, spec

from pipemorph.control import JobController, decision
from pipemorph.control.decide.decision_state import PlanTrial
from pipemorph.control.decide.plan_choice import (
    DecisionRequest,
    GainNotConfirmed,
    PlanProposal,
    decide,
)
from pipemorph.control.decide.prediction_check import PromisedTimes, has_failed, is_slower
from pipemorph.planning import StageTimes
from pipemorph.protocol import IterationSample, LinkSample, StageProfile
from pipemorph.spec.job_spec import JobSpec

Seen = Callable[[int], bool]


@dataclass
class Lies:
    """Deviations of telemetry from the truth, in iterations for which ``when`` holds.

    ``link`` seems to be ``delay`` seconds late, op times of ``stage`` seem ``inflation`` times as
    long. Each iteration takes ``overhead`` seconds more than its ops, and up to ``noise`` of it.
    Iterations of plan v1 take ``slower`` times as long.
    """

    when: Seen = lambda _: False
    link: int = 1
    delay: float = 0.0
    stage: int = 1
    inflation: float = 1.0
    overhead: float = 0.0
    slower: float = 1.0
    noise: float = 0.0


class LyingPlant(Plant):
    """A trainer whose telemetry is wrong, as under contention for processors."""

    def __init__(self, job: JobSpec, lies: Lies, **fields: Any) -> None:
        super().__init__(job, **fields)
        self.lies = lies

    def sample(self, link: int, direction: Any, wire: float) -> LinkSample:
        lies = self.lies
        late = lies.delay if link == lies.link and lies.when(self.iteration) else 0.0
        return super().sample(link, direction, wire + late)

    def profile(self, stage: int, op: StageTimes) -> StageProfile:
        lies, found = self.lies, super().profile(stage, op)
        if stage != lies.stage or not lies.when(self.iteration):
            return found
        return found.model_copy(
            update={
                name: getattr(found, name) * lies.inflation
                for name in ("forward", "backward_input", "backward_weight")
            }
        )

    def send(self, **fields: Any) -> None:
        if "iterations" in fields:
            lies = self.lies
            fields["iterations"] = [
                each.model_copy(
                    update={
                        "seconds": (each.seconds + lies.overhead)
                        * (lies.slower if each.plan_version == 1 else 1.0)
                        * (1 + lies.noise * self.rng.random())
                    }
                )
                for each in fields["iterations"]
            ]
            assert all(isinstance(each, IterationSample) for each in fields["iterations"])
        super().send(**fields)

    def said(self) -> list[str]:
        return [decision.line for decision in self.controller.decisions]

    def kinds(self) -> list[str]:
        return [record.kind for record in self.controller.records]


def test_a_fault_that_does_not_slow_iterations_is_taken_back_and_then_not_believed() -> None:
    plant = LyingPlant(spec(), Lies(lambda i: i >= 20, delay=0.040))
    first = plant.plan
    plant.run(60)
    assert plant.kinds() == ["adapt", "revert"]
    adapt, revert = plant.controller.records
    assert adapt.promised is not None and adapt.promised > 0.1
    assert adapt.measured is not None and adapt.measured < 0.01
    assert plant.plan.runs_same_as(first), "the plan before did not return"
    assert "the last change did not bring half of its promise" in revert.reason
    lines = [each.line for each in plant.controller.decisions if each.kind == "outcome"]
    summary = f"plan v1: promised {adapt.promised:.1%}, measured {adapt.measured:.1%}, after "
    assert lines[0].startswith(summary)
    waiting = [d.reason for d in plant.controller.decisions if d.kind == "keep"]
    assert any("8 iterations in this state took 402.0 ms, not 79" in reason for reason in waiting)
    links = plant.controller.get_link_states(plant.now)
    assert plant.controller.explain_held_change(links) == waiting[-1]
    assert plant.controller.explain_held_change([link for link in links if link.link != 1]) is None


@pytest.mark.full
def test_evidence_that_nothing_confirms_is_tried_again_ever_less_often() -> None:
    """A link may be slow in a way that is not modelled: it is not ignored for ever."""
    plant = LyingPlant(spec(), Lies(lambda i: i >= 20, delay=0.040))
    plant.run(700)
    kinds = plant.kinds()
    assert kinds == ["adapt", "revert"] * (len(kinds) // 2)
    assert len(kinds) == 6
    tried = [r.detected_at_iteration for r in plant.controller.records if r.kind == "adapt"]
    waits = [later - earlier for earlier, later in pairwise(tried)]
    assert all(later > 2 * earlier for earlier, later in pairwise(waits))


def test_alarms_that_come_and_go_change_the_plan_once() -> None:
    """Stalls of the machine that last for some iterations each."""
    plant = LyingPlant(spec(), Lies(lambda i: i >= 20 and i % 40 < 12, delay=0.040))
    plant.run(150)
    assert plant.kinds() == ["adapt", "revert"]
    waiting = [d.reason for d in plant.controller.decisions if d.kind == "keep"]
    assert any("so 4 more iterations must confirm it" in reason for reason in waiting)


def test_op_times_that_do_not_lengthen_iterations_change_nothing() -> None:
    job = spec(schedule={"inFlightLimit": 6}, adaptation={"minGain": 0.05})
    plant = LyingPlant(job, Lies(lambda i: i >= 70, stage=1, inflation=1.3))
    plant.ops[0] = StageTimes(forward=0.0125, backward_input=0.0125, backward_weight=0.0125)
    first = plant.plan
    plant.run(110)
    assert plant.kinds() == []
    said = [d.reason for d in plant.controller.decisions]
    assert any("op times" in reason and "as predicted" in reason for reason in said)
    plant.run(60)
    assert plant.kinds() == ["adapt", "revert"], "what was tried after all is taken back"
    assert plant.plan.runs_same_as(first)


@pytest.mark.parametrize("slower", [1.11, 1.2, 1.5])
def test_a_change_measured_to_be_slower_is_undone_for_any_prediction(slower: float) -> None:
    plant = LyingPlant(
        spec(schedule={"inFlightLimit": 6}, adaptation={"minGain": 0.005}), Lies(slower=slower)
    )
    first = plant.plan
    plant.run(150)
    assert plant.kinds() == ["adapt", "revert"], "tried again without anything new"
    adapt, revert = plant.controller.records
    assert plant.plan.runs_same_as(first)
    assert adapt.applied_at_iteration is not None and revert.applied_at_iteration is not None
    assert revert.applied_at_iteration - adapt.applied_at_iteration <= 3
    assert revert.measured == pytest.approx(revert.promised, abs=0.02)


def test_a_gain_within_the_error_of_predictions_changes_nothing() -> None:
    """A third of each iteration is beyond its ops: more than optimizer and data loading take."""
    job = spec(schedule={"inFlightLimit": 6}, adaptation={"minGain": 0.005})
    plant = LyingPlant(job, Lies(overhead=0.2))
    plant.run(40)
    assert plant.kinds() == []
    line = next(line for line in plant.said() if "in this state miss 20" in line)
    assert "which is more than the 3" in line


def test_noise_of_iterations_undoes_nothing() -> None:
    before = [1.0, 1.1, 0.9, 1.2, 0.8, 1.0]
    assert not is_slower(0.0, before, [1.5, 1.15])
    assert not is_slower(0.0, [1.0] * 8, [1.5, 1.0]), "the first one has the change"
    assert not is_slower(0.0, [1.0] * 8, [1.5]), "nor is it enough"
    assert is_slower(0.0, before, [1.5, 1.6])
    assert is_slower(0.0, [1.0] * 8, [1.5, 1.02])
    assert not is_slower(0.0, [1.0] * 2, [1.5, 1.02]), "too few to know their spread"


@pytest.mark.parametrize(("after", "failed"), [(1.005, False), (1.03, True)])
def test_a_change_that_promised_nothing_must_only_not_be_slower(after: float, failed: bool) -> None:
    assert has_failed(PromisedTimes(1.0, 1.0), [1.0] * 4, [], [after] * 4) is failed


def judged(promised: PromisedTimes, part: float, *after: float) -> bool | None:
    """True if a change failed, or None. ``part``: seconds of the iteration in which its reason
    began, the only one of the plan before; ``after``: seconds of those under the new one."""
    controller = JobController(spec())
    state, plan = controller._decision, controller.wanted_plan
    # No earlier plan to return to: what failed is only doubted.
    promised = replace(promised, may_revert=False)
    state.job_state.state = "training"
    state.trial = PlanTrial(
        1, plan, plan, frozenset({1}), promised, state.last_decision.situation, shown_since=20
    )
    state.history.add_iterations(
        [
            IterationSample(
                index=index, seconds=each, loss=1.0, plan_version=index > 20, bubble_fraction=0.1
            )
            for index, each in enumerate((0.4, part, after[0], *after), 19)
        ],
        list,
    )
    decision.compare_iterations(state, 0.0)
    return None if state.trial is not None else bool(controller.take_snapshot()["doubts"])


@pytest.mark.parametrize(("part", "failed"), [(1.0, False), (0.75, True)])
def test_the_iteration_in_which_a_fault_began_may_show_that_a_change_pays(
    part: float, failed: bool
) -> None:
    """Predicted from 1 s to 0.5 s, measured 0.8 s: nothing else ran under the plan before."""
    promised = PromisedTimes(seconds_before=1.0, seconds_after=0.5, seconds_if_wrong=0.49)
    assert judged(promised, part, *[0.8] * 5) is failed


def test_without_earlier_iterations_a_prediction_alone_takes_nothing_back() -> None:
    """The link was slow from the third iteration on: what each takes beyond its ops is unknown."""
    assert judged(PromisedTimes(seconds_before=1.0, seconds_after=0.5), 0.75, *[0.8] * 5) is None


def test_a_machine_that_is_busier_than_before_does_not_take_a_change_back() -> None:
    """Iterations are longer than predicted, and shorter than under the plan before all the same."""
    promised = PromisedTimes(seconds_before=1.35, seconds_after=0.75, seconds_if_wrong=0.74)
    after = (1.2, 1.6, 1.4, 1.5, 1.3)
    assert judged(promised, 1.65, *after) is None
    assert judged(promised, 1.35, *after) is True, "they are not shorter"


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_time_between_the_ops_is_not_taken_for_an_error_of_the_model(noise: float) -> None:
    """Optimizer and data loading: here as long as half of the ops."""
    plant = LyingPlant(spec(), Lies(overhead=0.2, noise=noise))
    plant.run(20)
    plant.delays[1] = 0.060
    plant.run(25)
    assert plant.kinds() == ["adapt"]
    record = plant.only()
    assert record.applied_at_iteration == 21
    assert record.promised is not None and record.predicted_seconds_before is not None
    assert record.promised == 1 - record.predicted_seconds_after / record.predicted_seconds_before
    assert record.predicted_seconds_after == pytest.approx(record.iteration_seconds_after, rel=0.1)
    assert record.measured == pytest.approx(record.promised, abs=0.03 + noise)
    said = [d.line for d in plant.controller.decisions if d.line.startswith("plan v1: promised")]
    assert len(said) == 1


@pytest.mark.parametrize("barrier", [True, False])
def test_an_iteration_is_predicted_with_its_time_outside_of_ops(barrier: bool) -> None:
    """Iterations overlap without a barrier, and nothing shows how long they are alone."""
    plant = LyingPlant(spec(), Lies(overhead=0.2))
    plant.barrier = barrier
    plant.run(20)
    outlook = plant.controller.get_outlook(plant.now)
    assert outlook.outside_seconds == pytest.approx(0.2 if barrier else 0.0)
    assert outlook.seconds == pytest.approx(plant.seconds[-1] + outlook.outside_seconds, rel=0.03)


def test_doubt_survives_a_restart_of_the_host() -> None:
    plant = LyingPlant(spec(), Lies(lambda i: i >= 20, delay=0.040))
    plant.run(45)
    assert plant.kinds() == ["adapt", "revert"]
    plant.controller = JobController.from_snapshot(plant.spec, plant.controller.take_snapshot())
    plant.run(12)
    assert plant.kinds() == ["adapt", "revert"]


def test_a_steady_fault_whose_better_plan_is_not_confirmed_is_checked_ever_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests do not come with every report, of which an iteration has many."""
    requested_at = []

    def unsure(request: DecisionRequest) -> PlanProposal:
        if request.cause != "steady":
            return decide(request)
        requested_at.append(plant.iteration)
        return PlanProposal(
            None, None, (GainNotConfirmed(0.5, 0.02, 0, None),), needs_confirmation=True
        )

    monkeypatch.setattr("plant_support.decide", unsure)
    plant = Plant(spec(stages=4, microbatches=12))
    plant.run(4)
    plant.delays[1] = 0.060
    plant.run(50)
    assert 2 <= len(requested_at) <= 8, requested_at
    assert requested_at[1] > requested_at[0]
    lines = [d.line for d in plant.controller.decisions if "cannot confirm" in d.line]
    assert len(lines) == len(requested_at)


LONG_B = StageTimes(forward=0.01, backward_input=0.02, backward_weight=0.01)


def shared(iterations: int) -> Plant:
    """A job that has run, with ranks that hold little."""
    plant = Plant(spec(schedule={"inFlightLimit": 6}, adaptation={"minGain": 0.005}))
    plant.run(iterations)
    return plant


@pytest.mark.parametrize(("lasts", "changes"), [(12, 0), (60, 1)])
def test_op_times_must_differ_for_some_time(lasts: int, changes: int) -> None:
    """A neighbour takes a part of a stage's processor, again and again or once for long."""
    plant = shared(80)
    first, usual, plan = len(plant.controller.records), plant.ops[1], plant.plan
    for _ in range(60 // lasts):
        plant.ops[1] = LONG_B
        plant.run(lasts)
        assert len(plant.controller.records[first:]) == changes
        plant.ops[1] = usual
        plant.run(6)
        assert plant.plan.runs_same_as(plan), (
            "a stage that is well again has the plan for a slow one"
        )
        plant.run(14)
    assert len(plant.controller.records[first:]) == 2 * changes


def test_a_neighbour_that_walks_is_not_followed() -> None:
    """The plan for a stage goes once it is well; none is made for the next one at once."""
    plant = shared(80)
    plan, first = plant.plan, len(plant.controller.records)
    usual, plant.ops[1] = plant.ops[1], LONG_B
    plant.run(60)
    for k in range(7):
        plant.ops = [LONG_B if stage == (2 + k) % 4 else usual for stage in range(4)]
        plant.run(12)
        assert plant.plan.runs_same_as(plan)
    assert len(plant.controller.records[first:]) == 2


def test_op_times_that_are_noisy_ask_for_no_plan() -> None:
    plant = shared(20)
    usual, decided = plant.ops, [*plant.controller.decisions]
    for _ in range(500):
        plant.ops = [stage.model_copy(update={
            name: getattr(stage, name) * plant.rng.gauss(1.0, 0.03)
            for name in ("forward", "backward_input", "backward_weight")
        }) for stage in usual]  # fmt: skip
        plant.run(1)
    assert [*plant.controller.decisions] == decided


def test_a_slow_link_is_planned_for_while_op_times_are_not_believed() -> None:
    """Plan 0 is for assumed op times, which have no unit. A change for the measured ones is taken
    back; the decision for the link must not take an op for a second long."""
    job = spec(schedule={"stageTimes": None, "inFlightLimit": 6})
    plant = LyingPlant(job, Lies(lambda i: True, stage=3, inflation=0.5))
    for _ in range(60):
        plant.run(1)
        if "revert" in plant.kinds():
            break
    assert plant.kinds() == ["adapt", "revert"]
    plant.delays[2] = 0.060
    plant.run(6)
    revert, slow = plant.controller.records[1:3]
    assert "link 2 is slow" in slow.reason
    for record in (revert, slow):
        assert record.predicted_seconds_before < 2
