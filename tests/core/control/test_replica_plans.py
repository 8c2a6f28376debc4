"""Plan for all replicas: for the worst of each link, in any replica."""

from __future__ import annotations

from typing import Any

import pytest
from plant_support import BASE, Plant, spec

from pipemorph.control import Health, JobController, initial_plan
from pipemorph.control.job_state.reports import LinkTable
from pipemorph.detection.job_observer import JobObserver
from pipemorph.planning import Route, build_problem
from pipemorph.planning.simulation.simulator import simulate
from pipemorph.protocol import DirectiveEnvelope, IterationSample, LinkSample, WireTime
from pipemorph.replay.replayed_ranks import JobTelemetry, ReplayedRanks
from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.mesh import MeshShape
from pipemorph.spec.running_subset import RunningSubset

STAGES, LINKS = 4, 3


def job(replicas: int, *, stages: int = STAGES, **fields: Any) -> JobSpec:
    fields.setdefault("parallelism", {"stages": stages, "replicas": replicas})
    return spec(stages, fields.pop("microbatches", 12), **fields)


class Replicas(Plant):
    """Replicas, each with its own ``delays_of``; an iteration lasts as long as that of the
    slowest."""

    def __init__(self, spec: JobSpec, **fields: Any) -> None:
        super().__init__(spec, **fields)
        self.delays_of = [[0.0] * (self.stages - 1) for _ in range(spec.parallelism.replicas)]

    def step(self) -> None:
        if self.prepared is not None and self.iteration >= self.prepared[0]:
            self.plan, self.prepared = self.prepared[1], None
        ran = [self._simulate(delays) for delays in self.delays_of]
        seconds = max(result.makespan for result in ran)
        windows = max(2, int(seconds / 0.05))
        for _ in range(windows):
            self.now += seconds / windows
            self.send(
                links=[
                    self.sample(link, direction, BASE + delays[link]).model_copy(
                        update={
                            "replica": replica * self.spec.parallelism.mesh.lockstep_size,
                            "route": self.plan.routes[link],
                        }
                    )
                    for replica, delays in enumerate(self.delays_of)
                    for link in range(self.stages - 1)
                    for direction in ("forward", "backward")
                ]
            )
        self.seconds.append(seconds)
        self.versions.append(self.plan.version)
        self.iteration += 1
        sample = IterationSample(
            index=self.iteration - 1,
            seconds=seconds,
            loss=1.0,
            plan_version=self.plan.version,
            bubble_fraction=ran[0].bubble_fraction,
        )
        profiles = [self.profile(i, op) for i, op in enumerate(self.ops)]
        self.send(stages=profiles, iterations=[sample])

    def _simulate(self, delays: list[float]) -> Any:
        felt = [BASE + delay for delay in delays]
        count = self.spec.schedule.microbatches
        problem = build_problem(count, self.ops, felt, self.plan.routes, queues=8).with_plan_limits(
            self.plan
        )
        return simulate(self.plan.schedule, problem, delay_at=lambda link, _: felt[link])


@pytest.mark.parametrize("limit", [None, 8])
def test_one_plan_follows_the_slow_links_of_all_replicas(limit: int | None) -> None:
    schedule = {} if limit is None else {"inFlightLimit": limit}
    plant = Replicas(job(3, stages=6, microbatches=18, schedule=schedule))
    plant.run(6)
    undisturbed = plant.seconds[-1]
    plant.delays_of[1][0] = 0.06
    late = len(plant.seconds)
    plant.run(10)
    assert plant.plan.delegated_links == (0,) and plant.seconds[-1] < 0.95 * plant.seconds[late]
    plant.delays_of[2][4] = 0.06
    late = len(plant.seconds)
    plant.run(10)
    assert plant.plan.delegated_links == (0, 4) and plant.seconds[-1] <= plant.seconds[late]
    # Delay on that link in another replica: the worst delay of the link does not change.
    version = plant.plan.version
    plant.delays_of[0][0] = 0.06
    plant.run(10)
    assert plant.plan.version == version, "nothing new was seen"
    plant.delays_of[0][0] = plant.delays_of[1][0] = 0.0
    plant.run(16)
    assert plant.plan.delegated_links == (4,)
    plant.delays_of[2][4] = 0.0
    plant.run(16)
    assert plant.plan.delegated_links == ()
    # The first plan, or one for which there was more time to search.
    assert plant.seconds[-1] <= 1.001 * undisturbed
    assert not [each for each in plant.controller.records if each.kind == "revert"]


def test_fewer_replicas_keep_the_plan() -> None:
    plant = Replicas(job(3))
    plant.run(6)
    plant.delays_of[1][0] = 0.06
    plant.run(10)
    fewer = RunningSubset(plant.spec.parallelism, (0,)).build_reduced_spec(plant.spec)
    assert plant.plan.version > 0
    assert plant.controller.with_replicas_of(fewer).wanted_plan == plant.plan


def test_replicas_that_share_out_the_batch_begin_with_a_plan_for_it() -> None:
    cut = {"stages": STAGES, "replicas": 2, "minReplicas": 1, "batch": "keep"}
    plant = Replicas(job(2, parallelism=cut, failurePolicy={"maxRestarts": 1}))
    plant.run(6)
    plant.delays_of[0][0] = plant.delays_of[1][0] = 0.06
    plant.run(10)
    assert plant.plan.version > 0
    fewer = RunningSubset(plant.spec.parallelism, (0,)).build_reduced_spec(plant.spec)
    assert fewer.schedule.microbatches == 2 * plant.spec.schedule.microbatches
    reduced = Replicas(fewer, controller=plant.controller.with_replicas_of(fewer))
    assert reduced.controller.wanted_plan == initial_plan(fewer)
    assert reduced.controller.get_directive() is None
    # State of a host that starts again after only the smaller job was written.
    restored = JobController.from_snapshot(fewer, plant.controller.take_snapshot())
    assert restored.wanted_plan == initial_plan(fewer) and restored.get_directive() is None
    assert restored.plan_version == plant.plan.version
    reduced.now, reduced.iteration, reduced.sequence = plant.now, plant.iteration, plant.sequence
    reduced.delays_of[0][0] = 0.06
    reduced.run(12)
    assert reduced.plan.version > plant.plan.version
    assert reduced.plan.schedule.microbatches == fewer.schedule.microbatches


def test_a_link_is_as_slow_as_in_its_slowest_column() -> None:
    """Replicas have two columns each; link 1 is slow in the second column of replica 1."""
    mesh = MeshShape(STAGES, 3, tensor=2)
    observer = JobObserver(mesh, job="j", namespace="n", attempt=0)
    ranks = ReplayedRanks(mesh, observer)
    table = LinkTable(mesh, stale_after=30.0)
    now, slow = 1000.0, (1, 3)
    for window in range(40):
        now += 0.05
        samples = []
        for link in range(LINKS):
            for column in range(mesh.columns):
                for direction in ("forward", "backward"):
                    late = 0.05 * ((link, column) == slow and window > 20)
                    value = BASE + 0.0001 * (window % 3) + late
                    samples.append(
                        LinkSample(
                            link=link, replica=column, direction=direction, route=Route.DIRECT,
                            transport="gloo", iteration=window, bytes=1, queue_p50=0.0,
                            wire=WireTime(
                                count=2, exact=2, min=value, p50=value, p99=value, mean=value
                            ),
                        )
                    )  # fmt: skip
        ranks.process_telemetry(JobTelemetry(links=samples), now, refresh=True)
        report = observer.build_report(1, now, 0)
        observer.record_delivery(report, DirectiveEnvelope(memory="m"))
        table.process_states(report.directions, report.links, now)
    states = table.get_states(now)
    assert [each.health for each in states] == [Health.HEALTHY, Health.SLOW, Health.HEALTHY]
    assert states[1].delay == pytest.approx(0.05, abs=0.005)
    assert states[1].column == mesh.format_column_name(3)
    ranks.process_telemetry(JobTelemetry(), now + 31, refresh=True)
    table.process_states(observer.build_report(2, now + 31, 0).directions, [], now + 31)
    assert table.get_states(now + 31)[1].health is Health.UNKNOWN, "slow, but not reported lately"
