"""Gradient reductions, judged: from samples of ranks to names of slow data-parallel groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from observing import report, tell

from pipemorph.control import JobController, ReductionHealth
from pipemorph.control.job_state.reports import ReportMismatch
from pipemorph.detection.detector import DetectorThresholds
from pipemorph.detection.event_log import EventLog
from pipemorph.detection.reduction_monitor import ReductionMonitor
from pipemorph.protocol import ReductionSample, SlowestEdge, StageProfile
from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.mesh import MeshShape

USUAL, SLOW = 0.020, 0.090


def sample(stage: int, iteration: int, seconds: float, replica: int = 0) -> ReductionSample:
    return ReductionSample(
        stage=stage, replica=replica, iteration=iteration, bytes=1 << 20, buckets=4,
        seconds=seconds, exposed=seconds / 2, waited=seconds,
    )  # fmt: skip


class Job:
    """Job of four stages and two replicas; every iteration all ranks of a group report the same."""

    def __init__(self) -> None:
        self.events = EventLog()
        self.mesh = mesh = MeshShape(stages=4, replicas=2)
        self.book = ReductionMonitor(mesh, DetectorThresholds(), events=self.events)
        self.iteration = 0

    def run(self, iterations: int, **slow: float) -> None:
        """``s3=0.09``: the seconds of stage 3; of the other stages as usual."""
        for _ in range(iterations):
            self.iteration += 1
            self.book.observe_samples(
                [
                    sample(stage, self.iteration, slow.get(f"s{stage}", USUAL), column)
                    for stage in range(self.mesh.stages)
                    for column in range(self.mesh.columns)
                ],
                float(self.iteration),
            )

    @property
    def slow(self) -> list[str]:
        return [state.name for state in self.book.list_states() if state.slow]


def test_a_slow_group_is_named_and_recovers() -> None:
    job = Job()
    job.run(10)
    assert job.slow == []
    job.run(4, s3=SLOW)
    assert job.slow == ["gradient reduction of stage 3"]
    (state,) = [each for each in job.book.list_states() if each.slow]
    assert (state.seconds, state.normal) == (pytest.approx(SLOW), pytest.approx(USUAL))
    assert state.delay == pytest.approx(SLOW - USUAL)
    exposed = {state.stage: state.exposed for state in job.book.list_states() if not state.replica}
    assert exposed == {0: 0.01, 1: 0.01, 2: 0.01, 3: pytest.approx(SLOW / 2)}
    job.run(20)
    assert job.slow == []
    assert [event.text for event in job.events.get_newest()] == [
        "gradient reduction of stage 3 is slow: 90 ms, usually 20 ms",
        "gradient reduction of stage 3 is as fast as usual again",
    ]


def test_one_late_iteration_is_none() -> None:
    job = Job()
    job.run(10)
    for _ in range(5):
        job.run(1, s3=SLOW)
        job.run(3)
    assert job.slow == []


def test_a_group_that_was_slow_from_the_start_is_known_by_its_peers() -> None:
    job = Job()
    job.run(12, s2=SLOW)
    assert job.slow == ["gradient reduction of stage 2"]


def test_all_groups_late_at_once_count_little() -> None:
    job = Job()
    job.run(10)
    job.run(5, s0=SLOW, s1=SLOW, s2=SLOW, s3=SLOW)
    assert job.slow == []
    job.run(40, s0=SLOW, s1=SLOW, s2=SLOW, s3=SLOW)
    assert len(job.slow) == 4, "but they are slow if that lasts"


def test_tensor_ranks_have_groups_of_their_own() -> None:
    mesh = MeshShape(stages=1, replicas=2, tensor=2)
    assert [mesh.find_data_group(column) for column in range(4)] == [0, 1, 0, 1]
    book = ReductionMonitor(mesh, DetectorThresholds(), events=EventLog())
    for iteration in range(20):
        for column in range(4):
            late = iteration > 10 and column % 2
            book.observe_samples([sample(0, iteration, SLOW if late else USUAL, column)], 0.0)
    assert [(state.name, state.slow) for state in book.list_states()] == [
        ("gradient reduction of stage 0, tensor 0", False),
        ("gradient reduction of stage 0, tensor 1", True),
    ]


def test_other_gradients_have_another_normal_time() -> None:
    job = Job()
    job.run(10)
    job.book.observe_samples(
        [
            sample(0, 11 + i, SLOW).model_copy(update={"bytes": 5 << 20, "iteration": 11 + i})
            for i in range(8)
        ],
        0.0,
    )
    assert job.slow == []


def test_edges_of_a_ring_are_known_with_other_gradients() -> None:
    """Edges are measured once while all is well, with messages of one size."""
    job = Job()
    edge = SlowestEdge(1, 0.002, 0.001)
    job.book.observe_samples([sample(0, 0, USUAL).model_copy(update={"slowest": edge})], 0.0)
    job.book.observe_samples([sample(0, 1, USUAL).model_copy(update={"bytes": 5 << 20})], 0.0)
    assert [state.slowest for state in job.book.list_states()] == [edge]


def spec(**fields: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "parallelism": {"stages": 2, "replicas": 2},
            "schedule": {"microbatches": 4},
            "trainer": {"module": "m", "iterations": 100},
            **fields,
        }
    )


def test_the_controller_plans_with_it_and_shows_it() -> None:
    controller = JobController(spec())
    profiles = [
        StageProfile(
            stage=stage, replica=replica, forward=0.01, backward_input=0.01, backward_weight=0.01,
            split="deferred", peak_memory=1,
        )
        for stage in range(2)
        for replica in range(2)
    ]  # fmt: skip
    for i in range(1, 16):
        late = SLOW if i > 10 else USUAL
        reductions = [sample(0, i, USUAL), sample(1, i, late, 1)]
        tell(controller, float(i), stages=profiles, reductions=reductions)
    times = controller._job_state.stages.get_stage_times()
    assert times is not None
    assert [stage.reduction for stage in times] == [USUAL / 2, SLOW / 2]
    assert [stage.forward for stage in times] == [0.01, 0.01], "the stages are not slow"
    found: tuple[ReductionHealth, ...] = controller.get_job_view(20.0).reductions
    assert [(each.stage, each.slow) for each in found] == [(0, False), (1, True)]
    assert found[1].to_record()["exposed"] == SLOW / 2
    with pytest.raises(ReportMismatch, match=r"reductions\[0\].stage: is 2; the job has 2 stages"):
        controller.process_report(report(16, reductions=[replace(found[1], stage=2)]), 16.0)
