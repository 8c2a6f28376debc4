"""Replicas whose devices are slow get fewer microbatches, and equal numbers again afterwards."""

from __future__ import annotations

from typing import Any

import pytest
from plant_support import BASE, Plant, spec

from pipemorph.control import JobController
from pipemorph.control.adopted_plan import parse_message
from pipemorph.control.decide.prediction_check import MOST_ITERATIONS
from pipemorph.control.decide.replica_shares import (
    divide_microbatches,
    measure_paces,
    merge_speeds,
    paces_differ,
)
from pipemorph.control.snapshot import pack_snapshot
from pipemorph.errors import InputError
from pipemorph.planning import build_problem
from pipemorph.planning.simulation.simulator import simulate
from pipemorph.protocol import IterationSample, SnapshotMessage, Straggler, StragglersView
from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.mesh import MeshShape

REPLICAS, STAGES, EACH = 4, 2, 12
OP_MS = 50.0


def job(**adaptation: Any) -> JobSpec:
    times = {"forward": OP_MS, "backwardInput": OP_MS, "backwardWeight": OP_MS}
    return spec(
        STAGES, EACH, parallelism={"stages": STAGES, "replicas": REPLICAS},
        schedule={"stageTimes": [times] * STAGES},
        adaptation={"rebalance": True, **adaptation},
    )  # fmt: skip


class ReplicaPlant(Plant):
    """Trainer with several replicas in simulation. ``slowness``: of stage 0, by replica."""

    def __init__(self, spec: JobSpec, controller: JobController | None = None) -> None:
        super().__init__(spec, controller=controller)
        self.ops = [stage.model_copy(update=dict.fromkeys(
            ("forward", "backward_input", "backward_weight"), OP_MS / 1e3
        )) for stage in self.ops]  # fmt: skip
        self.slowness = [1.0] * REPLICAS
        self.ignored = False
        """True if shares change nothing: the plan is not what makes replicas wait."""
        self.overhead = 0.0
        """Seconds outside ops of each second iteration."""

    def simulate_replica(self, replica: int) -> Any:
        plan = self.plan.for_replica(0 if self.ignored else replica)
        factor = self.slowness[replica]
        ops = [_scale(self.ops[0], factor), *self.ops[1:]]
        problem = build_problem(
            plan.schedule.microbatches, ops, [BASE] * (STAGES - 1), plan.routes
        ).with_plan_limits(plan)
        return simulate(plan.schedule, problem, plan.dispatch, waits=plan.waits)

    def step(self) -> None:
        if self.prepared is not None and self.iteration >= self.prepared[0]:
            self.plan, self.prepared = self.prepared[1], None
        results = [self.simulate_replica(replica) for replica in range(REPLICAS)]
        ops_seconds = max(each.makespan for each in results)
        seconds = ops_seconds + (self.overhead if self.iteration % 2 else 0.0)
        for _ in range(10):
            self.now += seconds / 10
            self.send(links=[self.sample(0, way, BASE) for way in ("forward", "backward")])
        self.seconds.append(seconds)
        self.versions.append(self.plan.version)
        self.iteration += 1
        profiles = [
            self.profile(
                stage, _scale(op, self.slowness[replica] if stage == 0 else 1.0)
            ).model_copy(update={"replica": replica})
            for replica in range(REPLICAS)
            for stage, op in enumerate(self.ops)
        ]
        sample = IterationSample(
            index=self.iteration - 1, seconds=seconds, loss=1.0, plan_version=self.plan.version,
            bubble_fraction=results[0].bubble_fraction, ops_seconds=ops_seconds,
        )  # fmt: skip
        self.send(stages=profiles, iterations=[sample])


def _scale(op: Any, factor: float) -> Any:
    names = ("forward", "backward_input", "backward_weight")
    return op.model_copy(update={name: factor * getattr(op, name) for name in names})


def test_a_slow_replica_gets_fewer_microbatches_and_all_of_them_back() -> None:
    plant = ReplicaPlant(job())
    plant.run(12)
    assert plant.plan.version == 0
    even, plant.slowness = plant.seconds[-1], [1.0, 2.0, 1.0, 1.0]
    plant.run(15)
    record = plant.only()
    shares = plant.plan.shares
    assert sum(shares) == REPLICAS * EACH
    assert shares[1] < EACH < min(shares[0], *shares[2:])
    assert record.shares == list(shares)
    assert "replicas compute at other speeds" in record.reason
    assert (
        f"microbatches by replica {'-'.join(map(str, shares))}: a microbatch takes" in record.reason
    )
    assert "on replica 1 2.0 times as long" in record.reason
    # Within three iterations of the confirmation, which takes a second, and three medians.
    assert record.applied_at_iteration is not None
    assert record.applied_at_iteration <= 12 + 3 + 3
    slow, dealt = plant.seconds[12], plant.seconds[-1]
    # The best deal for 3.5 replicas' worth of speed, with the same fill time.
    best = even * REPLICAS / 3.5
    assert (slow - dealt) >= 0.85 * (slow - best)
    assert plant.controller.get_job_view(plant.now).shares == shares
    outcome = next(d for d in plant.controller.decisions if d.kind == "outcome")
    assert "promised" in outcome.reason

    plant.slowness = [1.0] * REPLICAS
    plant.run(12)
    assert plant.plan.shares == ()
    assert plant.controller.records[-1].kind == "return"
    assert plant.seconds[-1] == pytest.approx(even)
    plant.run(60)
    assert plant.controller.change_count == 2


@pytest.mark.parametrize("overhead", [0.6, 1.2, 2.0, 3.0])
def test_after_iterations_of_varying_length_a_change_waits_for_as_many_as_confirm_it(
    overhead: float,
) -> None:
    plant = ReplicaPlant(job())
    plant.overhead = overhead
    plant.run(12)
    plant.slowness = [1.0, 2.0, 1.0, 1.0]
    plant.run(20)
    record = plant.only()
    kept = [each.reason for each in plant.controller.decisions if each.kind == "keep"]
    assert record.applied_at_iteration is not None
    assert any("cannot confirm" in reason for reason in kept) is (overhead > 1.5), kept
    # Found after two iterations; eight at most confirm it.
    assert record.applied_at_iteration <= 12 + 2 + MOST_ITERATIONS + 3


def test_without_the_field_the_plan_stays() -> None:
    plant = ReplicaPlant(job(rebalance=False))
    plant.run(10)
    plant.slowness = [1.0, 2.0, 1.0, 1.0]
    plant.run(20)
    assert not plant.plan.shares


def test_shares_that_do_not_bring_what_they_promise_are_taken_back() -> None:
    plant = ReplicaPlant(job())
    plant.run(12)
    plant.slowness, plant.ignored = [1.0, 2.0, 1.0, 1.0], True
    plant.run(30)
    kinds = [record.kind for record in plant.controller.records]
    assert kinds[:2] == ["adapt", "revert"]
    # Tried again only after iterations that confirm it, more each time.
    plant.run(70)
    assert plant.controller.change_count <= 12


def test_a_host_that_takes_over_keeps_the_shares_and_takes_them_back() -> None:
    plant = ReplicaPlant(job())
    plant.run(12)
    plant.slowness = [1.0, 2.0, 1.0, 1.0]
    plant.run(12)
    shares = plant.plan.shares
    assert shares
    saved = plant.controller.take_snapshot()
    body = SnapshotMessage(
        job="j", namespace="default", attempt=0, snapshot=pack_snapshot(saved)
    ).model_dump_json()
    adopted = parse_message(body.encode(), plant.spec)
    assert adopted.snapshot.directive is not None
    assert adopted.snapshot.directive.plan.to_plan().shares == shares
    with pytest.raises(InputError, match=r"shares is set; spec\.adaptation\.rebalance is false"):
        parse_message(body.encode(), job(rebalance=False))
    plant.controller = JobController.from_snapshot(plant.spec, saved)
    plant.agent, plant.slowness = None, [1.0] * REPLICAS
    plant.run(50)
    assert plant.plan.shares == ()


def test_microbatches_are_divided_so_that_the_slowest_replica_ends_first() -> None:
    assert divide_microbatches(48, [1.0] * 4, [1.0, 2.0, 1.0, 1.0]) == [14, 7, 14, 13]
    assert divide_microbatches(4, [0.0] * 4, [1.0, 100.0, 1.0, 1.0]) == [1, 1, 1, 1]
    assert divide_microbatches(8, [0.0, 0.0], [1.0, 1.0]) == [4, 4]
    rows = tuple((1.0 + 0.1 * k,) for k in range(6))
    merged = merge_speeds(rows)
    assert len(set(merged)) == 4
    assert all(new >= old for new, old in zip(merged, rows, strict=True))


def test_paces_are_those_of_stages_that_are_slower_than_their_peers() -> None:
    mesh = MeshShape(2, replicas=2)
    slow = Straggler(1, 1, 0.3, 0.1)
    view = StragglersView(True, 1, (slow,), (0.2, 0.1))
    assert measure_paces(view, mesh) == ((0.2, 0.1), (0.2, 0.3))
    everywhere = StragglersView(True, 1, (Straggler(1, None, 0.3, 0.1),), (0.2, 0.3))
    assert measure_paces(everywhere, mesh) == ()
    assert paces_differ(((0.1,), (0.2,)), ())
    assert not paces_differ(((0.1,), (0.2,)), ((0.1,), (0.21,)))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"parallelism": {"stages": 2}}, "the job has one replica"),
        ({"parallelism": {"stages": 2, "replicas": 2, "shard": 2}}, "parallelism.shard is 2"),
        ({"schedule": {"microbatches": 4, "policy": "1f1b"}}, "policy 1f1b keeps"),
        ({"schedule": {"microbatches": 4, "warmup": [2, 1]}}, "schedule.warmup fixes"),
    ],
)
def test_where_it_is_refused(changes: dict[str, Any], why: str) -> None:
    fields: dict[str, Any] = {
        "parallelism": {"stages": 2, "replicas": 2}, "schedule": {"microbatches": 4},
        "adaptation": {"rebalance": True}, "trainer": {"module": "x", "iterations": 1},
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"is true, but {why}"):
        JobSpec.model_validate(fields | changes)
