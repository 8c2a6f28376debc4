"""Start of a plan, in real processes: emulated stages, plans that arrive at given times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from launch import run_ranks
from trainer_jobs import Job, make_plan, part

from pipemorph.planning import Plan
from pipemorph.protocol import IterationSample
from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer import EmulatedStage, Options, Pipeline, TrainerContext
from pipemorph_trainer.agent.messages import NullControlClient, RankTelemetry
from pipemorph_trainer.agent.rank_plan import RankPlan

OP = 0.012
"""Seconds of an op. Longer than half the time between two looks at the agent, so that every
iteration has such looks."""


class Arrival(NamedTuple):
    """A plan reaches rank ``rank`` while iteration ``iteration`` runs there."""

    rank: int
    iteration: int
    plan: Plan


@dataclass
class Ran:
    """Plans that a rank ran, and its reports."""

    versions: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    samples: list[IterationSample] = field(default_factory=list)


class Script(NullControlClient):
    """An agent that has a plan for the rank once an iteration runs, and not at its beginning."""

    def __init__(self, arrivals: Mapping[int, RankPlan], ran: Ran) -> None:
        self._arrivals, self._ran = dict(arrivals), ran
        self._requests: dict[int, int] = {}
        self.iteration = 0

    def pop_newest_plan(self) -> RankPlan | None:
        requests = self._requests[self.iteration] = self._requests.get(self.iteration, 0) + 1
        return self._arrivals.pop(self.iteration, None) if requests > 1 else None

    def publish(self, telemetry: RankTelemetry) -> None:
        report = telemetry.report
        if report is not None and report.finished_iteration is not None:
            self._ran.samples.append(report.finished_iteration)

    def close(self) -> None:
        assert not self._arrivals, "a plan has not been taken"


def train(context: TrainerContext, job: Job, arrivals: list[Arrival]) -> Ran:
    ran = Ran()
    mesh = MeshShape(job.stages, context.world_size // job.stages)
    mine = {at: part(plan, rank, mesh) for rank, at, plan in arrivals if rank == context.rank}
    script = Script(mine, ran)
    with Pipeline(
        EmulatedStage(OP, OP, OP, message_bytes=64),
        context=context,
        stages=job.stages,
        microbatches=job.microbatches,
        policy=job.policy,
        options=Options(control=script),
        deadline_seconds=job.deadline,
    ) as pipe:
        for iteration in range(job.iterations):
            script.iteration = iteration
            ran.losses.append(float(pipe.step()))
            ran.versions.append(pipe.plan.version)
    return ran


def test_a_plan_that_arrives_in_an_iteration_is_in_force_in_the_next() -> None:
    job = Job(4, 6, policy="1f1b", iterations=7)
    zero_bubble, again = make_plan(job, 3, "zero-bubble"), make_plan(job, 5, "1f1b")
    arrivals = [Arrival(rank, 1, zero_bubble) for rank in range(4)]
    # A rank gets it two iterations late, and delays it for all.
    arrivals += [Arrival(rank, 3 if rank != 2 else 5, again) for rank in range(4)]
    # A rank never gets this one: it is never in force.
    arrivals += [Arrival(rank, 2, make_plan(job, 4, "gpipe")) for rank in (0, 1, 3)]
    ran = run_ranks(4, train, job, arrivals)
    assert [each.versions for each in ran] == [[0, 0, 3, 3, 3, 3, 5]] * 4
    assert [sample.plan_version for sample in ran[0].samples] == [0, 0, 3, 3, 3, 3, 5]
    assert [sample.index for sample in ran[0].samples] == list(range(7))
    assert all(sample.bubble_fraction > 0 for sample in ran[0].samples)
    assert not any(each.samples for each in ran[1:])


def test_columns_may_change_their_plan_in_different_iterations() -> None:
    job = Job(2, 6, policy="1f1b", iterations=6)
    plan = make_plan(job, 1, "zero-bubble")
    # Ranks 0 and 2 are replica 0; both get it earlier than the ranks of replica 1.
    arrivals = [Arrival(rank, 3 if rank % 2 else 1, plan) for rank in range(4)]
    ran = run_ranks(4, train, job, arrivals)
    assert [each.versions for each in ran] == [[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]] * 2
    # Reported is the oldest of all columns, once per iteration and in order.
    assert [sample.plan_version for sample in ran[0].samples] == [0, 0, 0, 0, 1, 1]
    assert [sample.index for sample in ran[0].samples] == list(range(6))
    assert all(each.losses == ran[0].losses for each in ran)
