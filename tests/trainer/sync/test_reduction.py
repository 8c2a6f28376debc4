"""Gradients are averaged while ops still run, with the bits of an average after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from float32_gradients import in_float32
from gate import same_bits
from launch import run_ranks
from pairwise import give_tiers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from trainer_jobs import Job, make_plan

from pipemorph.protocol import ReductionSample
from pipemorph.spec.mesh import MeshShape
from pipemorph.spec.sections.faults import Fault
from pipemorph_trainer import EmulatedStage, Options, Pipeline, TrainerContext
from pipemorph_trainer.agent.messages import NullControlClient, RankTelemetry
from pipemorph_trainer.sync import reduction
from pipemorph_trainer.sync.reduction import GradientBucket, make_buckets
from pipemorph_trainer.topology.mesh import join_process_group
from pipemorph_trainer.transport.fault_injection import FaultTrace

WIDTH, N, STAGES, REPLICAS = 6, 4, 2, 2
ITERATIONS = 7
LATER = 0.08
"""Seconds by which a forward of the slow replica is longer: far more than any op on a busy machine
is late."""


class Stage(nn.Module):
    """Stage with a norm, whose gradient the module split computes in B; a layer that only one
    replica uses, and only later; one that never is; and one that is run again in the backward."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.norm = nn.LayerNorm(WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rare, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.times, self.uses_rare = 1, False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(self.norm(x)))))
        if self.uses_rare:
            x = x + self.rare(x)
        for _ in range(self.times):
            x = checkpoint(lambda y: torch.tanh(self.again(y)), x, use_reentrant=True)  # type: ignore[assignment]
        return x

    def at(self, iteration: int, replica: int) -> None:
        self.uses_rare = replica == 1 and iteration in (2, 4)
        # Known from two iterations, and then once more than known.
        self.times = 3 if iteration == 5 else 2


def batch_of(iteration: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * iteration + replica)
    return tuple(torch.randn(2 * N, WIDTH, generator=generator) for _ in range(2))  # type: ignore[return-value]


def mean_gradients(
    modules: list[Stage], iteration: int, dtype: torch.dtype
) -> list[dict[str, Tensor]]:
    """Mean gradients of every stage, over the replicas, one after another in this process."""
    found: list[dict[str, list[Tensor]]] = [{} for _ in modules]
    for replica in range(REPLICAS):
        for module in modules:
            module.at(iteration, replica)
            module.zero_grad()
        x, y = (each.to(dtype) for each in batch_of(iteration, replica))
        for a, b in zip(x.chunk(N), y.chunk(N), strict=True):
            value = a.requires_grad_()
            for module in modules:
                value = module(value)
            (nn.functional.mse_loss(value, b) / N).backward()
        for module, grads in zip(modules, found, strict=True):
            for name, p in module.named_parameters():
                if p.grad is not None:
                    grads.setdefault(name, []).append(p.grad)
    return [
        {name: torch.stack(each).sum(dim=0) / REPLICAS for name, each in grads.items()}
        for grads in found
    ]


def train(context: TrainerContext, policy: str, dtype: torch.dtype) -> list[tuple[int, int, int]]:
    """Compares every gradient, in float32 whatever the ``dtype``. Returns, for each iteration, the
    number of buckets, of those sent before the last op ended, and of those that were sent again."""
    reduction.BUCKET_BYTES = 1
    place = context.coordinate(STAGES)
    module, whole = Stage(place.stage), [Stage(i) for i in range(STAGES)]
    if dtype is torch.bfloat16:
        for each in (module, *whole):
            in_float32(each)
    job = Job(STAGES, N)
    seen = []
    with Pipeline(
        module, context=context, loss_fn=nn.functional.mse_loss, stages=STAGES, split="auto",
        plan=make_plan(job, 0, policy), deadline_seconds=30,
    ) as pipe:  # fmt: skip
        reducer = pipe._parts.iterations._reducer
        assert reducer is not None
        sent: list[bool] = []
        clock: Any = reducer._clock
        counting, ending = clock.before_send, clock.end_ops
        ended: list[bool] = []
        clock.before_send = lambda bucket: (sent.append(not ended), counting(bucket))  # type: ignore[func-returns-value]
        clock.end_ops = lambda: (ended.append(True), ending())  # type: ignore[func-returns-value]
        again: list[Any] = []
        sending: Callable[[GradientBucket], None] = reducer._send_now
        reducer._send_now = lambda bucket: (again.append(bucket), sending(bucket))  # type: ignore[method-assign, assignment, func-returns-value]
        for iteration in range(ITERATIONS):
            module.at(iteration, place.replica)
            sent.clear(), ended.clear(), again.clear()
            x, y = (each.to(dtype) for each in batch_of(iteration, place.replica))
            x.requires_grad_()
            pipe.step(x, target=y)
            wanted = mean_gradients(whole, iteration, dtype)[place.stage]
            mine = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
            assert mine.keys() == wanted.keys()
            for name, grad in mine.items():
                assert grad.dtype is torch.float32
                same_bits(grad, wanted[name], f"{policy}, iteration {iteration}: {name}")
            seen.append((len(sent), sum(sent), len(again)))
            module.zero_grad()
    return seen


@pytest.mark.parametrize(
    ("policy", "dtype"),
    give_tiers(
        [("zero-bubble", torch.bfloat16), ("1f1b", torch.float32), ("zero-bubble", torch.float32)],
        test=1,
        full=2,
    ),
)
def test_buckets_leave_within_the_last_op(policy: str, dtype: torch.dtype) -> None:
    found = run_ranks(STAGES * REPLICAS, train, policy, dtype)
    for seen in found:
        # All there are, after the ops; then those that are used, of which nothing is known yet. Two
        # more that one replica uses are sent on their own; then with the others.
        assert [each[0] for each in seen] == [12, 8, 8, 10, 10, 10, 10]
        assert seen[0][1] == seen[1][1] == 0, "nothing is known of the split that was chosen"
        assert seen[2][2] == seen[4][2] == 2
        assert [each[2] for each in (seen[3], seen[6])] == [0, 0]
    for iteration in range(2, 6):
        # True at least where every gradient is written as often as in the iteration before.
        assert any(seen[iteration][1] == seen[iteration][0] for seen in found), iteration
    # Layers that are run again in the backward write once more, in W as in a whole backward.
    assert [seen[5][2] for seen in found] == [2] * len(found)


def order_of(context: TrainerContext, sharded: bool) -> list[str]:
    """Events of the last iteration, in order."""
    sizes = {"dp_replicate": 2, "pp": 1, "dp_shard": 2} if sharded else {"dp_replicate": 2, "pp": 2}
    join_process_group(context, torch.device("cpu"))
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    if sharded:
        fully_shard(module, mesh=mesh["dp_shard"])
    events: list[str] = []

    def telling(owner: Any, name: str, what: str) -> None:
        call = getattr(owner, name)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            events.append(what)
            return call(*args, **kwargs)

        setattr(owner, name, recorded)

    with Pipeline(
        module, context=context, loss_fn=nn.functional.mse_loss, microbatches=N, mesh=mesh,
        tied=None if sharded else [("0.weight", 0), ("2.weight", 1)], deadline_seconds=30,
    ) as pipe:  # fmt: skip
        iterations: Any = pipe._parts.iterations
        telling(iterations._reducer._clock, "before_send", "sent")
        telling(iterations._loss, "wait_for_loss", "loss")
        telling(iterations._reducer, "finish_iteration", "finish")
        if sharded:
            (own,) = iterations._stages.values()
            telling(own, "reduce_gradients", "shards")
        else:
            telling(iterations._tied, "sum_gradients", "tied")
        for iteration in range(3):
            events.clear()
            x, y = batch_of(iteration, context.rank)
            pipe.step(x, target=y)
            module.zero_grad()
    return events


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "tied"])
def test_what_another_collective_changes_is_averaged_in_the_drain(sharded: bool) -> None:
    """The drain averages it before anything that waits for other stages."""
    wanted = ["shards", "sent", "loss", "finish"] if sharded else ["sent", "loss", "finish", "tied"]
    for events in run_ranks(4, order_of, sharded):
        assert events == wanted


def test_buckets_are_filled_from_the_last_parameter_on() -> None:
    sizes = (3, 5, 2, 8, 1)
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    other = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    over = ("dp_replicate",)
    made = make_buckets([(p, over) for p in (parameters[0], other, *parameters[1:])], most=20)
    found = [(bucket.dtype, [p.numel() for p in bucket.parameters]) for bucket in made]
    assert found == [
        (torch.float32, [1, 8]),
        (torch.float32, [2, 5]),
        (torch.float64, [4]),
        (torch.float32, [3]),
    ]
    assert [bucket.nbytes for bucket in made] == [36, 28, 32, 12]


def test_time_under_way_counts_once() -> None:
    busy, exposed = reduction._compute_seconds([1.0, 1.5, 9.0], [3.0, 4.0, 9.5], 3.5)
    assert (busy, exposed) == (3.5, 6.0)
    assert reduction._compute_seconds([1.0], [2.0], 3.0) == (1.0, 0.0)
    assert reduction._compute_seconds([], [], 3.0) == (0.0, 0.0)


class Slept:
    """Device of two streams on which time passes as its test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def compute_stream(self) -> str:
        return "compute"

    def new_stream(self) -> str:
        return "side"

    @contextmanager
    def use_stream(self, stream: str) -> Iterator[None]:
        yield

    def record_event(self, stream: str, *, timed: bool = False) -> Any:
        event = MagicMock(at=self.now)
        if stream == "side":
            # Reached when the collective is done.
            event.at = self.now + 3.0
        return event

    def elapsed_seconds(self, start: Any, end: Any) -> float:
        return float(end.at - start.at)


def test_times_on_a_device_are_those_of_its_events() -> None:
    device = Slept()
    clock = reduction._DeviceTimer(device)  # type: ignore[arg-type]
    clock.begin_iteration()
    for at in (100.0, 101.0):
        device.now = at
        bucket = MagicMock()
        clock.before_send(bucket)
        clock.after_send(bucket)
        bucket.work.wait.assert_called_once()
    device.now = 102.0
    clock.end_ops()
    device.now = 110.0
    # Under way from 100 to 103 and on to 104; the ops ended at 102.
    assert clock.measure_seconds() == pytest.approx((4.0, 2.0))
    clock.begin_iteration()
    assert clock.measure_seconds() == (0.0, 0.0)


class Samples(NullControlClient):
    def __init__(self) -> None:
        self.found: list[ReductionSample] = []

    def publish(self, telemetry: RankTelemetry) -> None:
        if telemetry.reduction is not None:
            self.found.append(telemetry.reduction)


def uneven(context: TrainerContext) -> list[ReductionSample]:
    """Train with forwards of one replica that take five times as long."""
    forward = 0.02 + LATER * context.rank
    samples = Samples()
    with Pipeline(
        EmulatedStage(forward, 0.02, 0.02, message_bytes=64, gradient_bytes=1 << 12),
        context=context, microbatches=N, stages=1, policy="1f1b", options=Options(control=samples),
        deadline_seconds=30,
    ) as pipe:  # fmt: skip
        for _ in range(ITERATIONS):
            pipe.step()
    return samples.found


@pytest.mark.full
def test_a_slow_stage_is_no_slow_reduction() -> None:
    """The report of the rank that waits for the other one shows that, and no slow reduction."""
    quick, slow = run_ranks(2, uneven)
    assert len(quick) == len(slow) == ITERATIONS - 1
    for mine, theirs in zip(quick, slow, strict=True):
        assert (mine.seconds, mine.exposed) == (theirs.seconds, theirs.exposed)
        assert (mine.group, theirs.group, theirs.replica) == (0, 0, 1)
        assert mine.bytes == 1 << 12
        assert mine.exposed == min(mine.waited, theirs.waited), "of the rank that came last"
    waits = median(sample.waited for sample in quick)
    assert waits > 0.5 * N * LATER, "for the ops of the other one"
    assert median(sample.seconds for sample in quick) < waits / 2
    assert median(sample.exposed for sample in quick) < waits / 2


def test_a_fault_of_one_replica_slows_its_group() -> None:
    mesh = MeshShape(stages=2, replicas=2, tensor=2)
    fault = Fault(reduction=1, replica=2, bandwidth_mbps=8.0, delay_ms=5.0, from_iteration=3)
    trace = FaultTrace([fault])
    slowed = [
        (stage, column)
        for stage in range(2)
        for column in range(4)
        if trace.make_reduction_faults(mesh.find_coordinate(mesh.find_rank(stage, column)))
        is not None
    ]
    assert slowed == [(1, 0), (1, 2)], "the columns of tensor 0"
    faults = trace.make_reduction_faults(mesh.find_coordinate(mesh.find_rank(1, 0)))
    # Long ago, so nothing is waited for. One byte takes a microsecond.
    assert faults.hold_buckets([10.0, 10.0, 10.5], [100_000, 100_000, 1000], 2) == [
        10.0,
        10.0,
        10.5,
    ]
    assert faults.hold_buckets([10.0, 10.0, 10.5], [100_000, 100_000, 1000], 3) == pytest.approx(
        [10.105, 10.205, 10.506]
    )
    (record,) = faults.report_effects()
    assert (record["reduction"], record["buckets_held"], record["first_iteration"]) == (1, 3, 3)
