"""Jobs with and without a barrier between iterations: makespan or period."""

from __future__ import annotations

import random

import pytest
from gate import examples
from plant_support import BASE, Plant, spec

from pipemorph.control import initial_plan
from pipemorph.planning import Plan, Policy, Route, StageTimes, build_problem, plan, predict_period
from pipemorph.spec.job_spec import JobSpec

STAGES, MICROBATCHES = 8, 24
OPS = (0.010, 0.0105, 0.0055)


def job(objective: str = "auto") -> JobSpec:
    names = ("forward", "backwardInput", "backwardWeight")
    times = [{name: 1e3 * op for name, op in zip(names, OPS, strict=True)}] * STAGES
    return spec(STAGES, MICROBATCHES, schedule={"objective": objective, "stageTimes": times})


def plant_of(objective: str = "auto") -> Plant:
    plant = Plant(job(objective))
    f, b, w = OPS
    plant.ops = [StageTimes(forward=f, backward_input=b, backward_weight=w)] * STAGES
    return plant


def without_barrier(objective: str = "auto") -> Plant:
    plant = plant_of(objective)
    plant.barrier, plant.waits = False, False
    return plant


def shortest(plant: Plant) -> float:
    """The bound of the period of healthy links."""
    wires = [BASE] * (STAGES - 1)
    problem = build_problem(MICROBATCHES, plant.ops, wires, [Route.DIRECT] * (STAGES - 1))
    planned = plan(problem.model_copy(update={"objective": "period"}))
    return planned.lower_bound


def test_the_first_plan_mixes_forms_of_backwards() -> None:
    f, b, w = OPS
    names = ("forward", "backwardInput", "backwardWeight", "fusedBackward")
    times = [dict(zip(names, (1e3 * each for each in (f, b, w, 0.92 * (b + w))), strict=True))]
    schedule = {"dispatch": "static", "stageTimes": 4 * times}
    assert initial_plan(spec(4, 12, schedule=schedule)).schedule.first_mixed_stage is not None


def runs_as_first(plant: Plant, made: Plan) -> bool:
    return made.runs_same_as(initial_plan(plant.spec))


def test_a_job_without_a_barrier_gets_the_shortest_period() -> None:
    plant = without_barrier()
    plant.run(40)
    record = plant.only()
    assert record.kind == "adapt"
    assert "barrier" in record.reason
    assert record.measured == pytest.approx(record.promised, abs=0.002)
    assert plant.seconds[-1] <= 1.01 * shortest(plant)
    assert plant.seconds[-1] < 0.99 * plant.seconds[3]
    wires = [BASE] * (STAGES - 1)
    problem = build_problem(MICROBATCHES, plant.ops, wires, [Route.DIRECT] * (STAGES - 1))
    zero_bubble = plan(problem, Policy.ZERO_BUBBLE).schedule
    assert plant.seconds[-1] <= predict_period(zero_bubble, problem)


@pytest.mark.parametrize(
    ("objective", "barrier"),
    [("auto", True), ("auto", None), ("makespan", True), ("makespan", None), ("makespan", False)],
)
def test_with_a_barrier_or_by_the_spec_the_makespan_counts(
    objective: str, barrier: bool | None
) -> None:
    plant = plant_of(objective)
    plant.barrier, plant.waits = barrier, barrier is not False
    plant.run(40)
    assert plant.controller.records == []
    assert plant.plan == initial_plan(job())


def test_the_spec_may_say_that_the_period_counts() -> None:
    plant = without_barrier("period")
    plant.barrier = None
    assert plant.plan != initial_plan(job())
    plant.run(40)
    # Plan 0 has no wire times. They may require another plan, barriers may not.
    assert all("wire times" in record.reason for record in plant.controller.records)
    assert plant.seconds[-1] <= 1.02 * shortest(plant)


def test_a_few_barriers_do_not_count() -> None:
    """A job that clips gradients after every tenth step."""
    plant = without_barrier()
    for k in range(80):
        plant.barrier = plant.waits = k % 10 == 0
        plant.step()
    assert len(plant.controller.records) == 1


def now_and_then(plant: Plant, iterations: int, seed: int = 0) -> None:
    """Iterations of a job whose gradient norm is near its bound: it waits for the norm of all
    stages in a third of them, at random."""
    draw = random.Random(seed)
    for _ in range(iterations):
        plant.barrier = plant.waits = draw.random() < 1 / 3
        plant.step()


@pytest.mark.parametrize("seed", range(examples(1)))
def test_barriers_that_come_and_go_change_no_plan(seed: int) -> None:
    plant = plant_of()
    now_and_then(plant, 120, seed)
    assert plant.controller.records == []
    assert plant.plan == initial_plan(job())


def test_barriers_that_come_and_go_leave_the_shortest_period() -> None:
    plant = without_barrier()
    plant.run(40)
    assert not runs_as_first(plant, plant.plan)
    version, decided = plant.plan.version, len(plant.controller.decisions)
    now_and_then(plant, 100)
    assert plant.plan.version == version
    assert not [d.reason for d in plant.controller.decisions[decided:] if "barrier" in d.reason]


def test_a_job_that_stops_waiting_is_followed() -> None:
    plant = plant_of()
    now_and_then(plant, 60)
    plant.barrier = plant.waits = False
    plant.run(40)
    assert "barrier" in plant.only().reason
    assert plant.seconds[-1] <= 1.01 * shortest(plant)


def test_a_barrier_that_ranks_do_not_see_is_found_out() -> None:
    plant = plant_of()
    plant.barrier = False
    plant.run(60)
    assert [record.kind for record in plant.controller.records] == ["adapt", "revert"]
    assert runs_as_first(plant, plant.plan)
    plant.delays[3] = 0.04
    plant.run(20)
    assert not runs_as_first(plant, plant.plan)
    plant.delays[3] = 0.0
    plant.run(40)
    assert plant.controller.records[-1].kind == "return"
    assert runs_as_first(plant, plant.plan)


def test_a_slow_link_of_a_job_without_a_barrier() -> None:
    plant = without_barrier()
    plant.run(40)
    well, healthy = plant.plan, plant.seconds[-1]
    plant.delays[6] = 0.03
    plant.run(20)
    assert plant.plan.delegated_links == (6,)
    assert plant.seconds[-1] < 1.12 * healthy
    plant.delays[6] = 0.0
    plant.run(40)
    assert plant.plan.runs_same_as(well)
    assert plant.seconds[-1] == pytest.approx(healthy)


def test_a_barrier_that_appears_ends_it() -> None:
    plant = without_barrier()
    plant.run(40)
    assert not runs_as_first(plant, plant.plan)
    plant.barrier = plant.waits = True
    plant.run(30)
    with_barrier = plant_of()
    with_barrier.run(5)
    assert plant.seconds[-1] <= 1.01 * with_barrier.seconds[-1]
