"""Gradients are averaged while ops still run, with the bits of an average after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gate import same_bits
from launch import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from trainer_jobs import Job, make_plan

from pipemorph.api.mesh import MeshShape
from pipemorph.api.spec import Fault
from pipemorph_trainer import Pipeline, TrainerContext
from pipemorph_trainer.links.faults import FaultTrace
from pipemorph_trainer.state import reduction
from pipemorph_trainer.state.reduction import Bucket, make_buckets

WIDTH, N, STAGES, REPLICAS = 6, 4, 2, 2
ITERATIONS = 7


class Stage(nn.Module):
    """With a norm, whose gradient the module split computes in B; a layer that only one replica
    uses, and only later; one that never is; and one that is run again in the backward."""

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


def mean_gradients(modules: list[Stage], iteration: int) -> list[dict[str, Tensor]]:
    """Of every stage, over the replicas, one after another in this process."""
    found: list[dict[str, list[Tensor]]] = [{} for _ in modules]
    for replica in range(REPLICAS):
        for module in modules:
            module.at(iteration, replica)
            module.zero_grad()
        x, y = batch_of(iteration, replica)
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


def train(context: TrainerContext, policy: str) -> list[tuple[int, int, int]]:
    """Compares every gradient. Returns, for each iteration, the number of buckets, of those sent
    before the last op ended, and of those that were sent again."""
    reduction.BUCKET_BYTES = 1
    place = context.coordinate(STAGES)
    module, whole = Stage(place.stage), [Stage(i) for i in range(STAGES)]
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
        counting, ending = clock.sends, clock.end_ops
        ended: list[bool] = []
        clock.sends = lambda bucket: (sent.append(not ended), counting(bucket))  # type: ignore[func-returns-value]
        clock.end_ops = lambda: (ended.append(True), ending())  # type: ignore[func-returns-value]
        again: list[Any] = []
        sending: Callable[[Bucket], None] = reducer._send_now
        reducer._send_now = lambda bucket: (again.append(bucket), sending(bucket))  # type: ignore[method-assign, assignment, func-returns-value]
        for iteration in range(ITERATIONS):
            module.at(iteration, place.replica)
            sent.clear(), ended.clear(), again.clear()
            x, y = batch_of(iteration, place.replica)
            x.requires_grad_()
            pipe.step(x, target=y)
            wanted = mean_gradients(whole, iteration)[place.stage]
            mine = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
            assert mine.keys() == wanted.keys()
            for name, grad in mine.items():
                same_bits(grad, wanted[name], f"{policy}, iteration {iteration}: {name}")
            seen.append((len(sent), sum(sent), len(again)))
            module.zero_grad()
    return seen


@pytest.mark.multiprocess
@pytest.mark.parametrize("policy", ["zero-bubble", "1f1b"])
def test_buckets_leave_within_the_last_op(policy: str) -> None:
    found = run_ranks(STAGES * REPLICAS, train, policy)
    for seen in found:
        # All there are, after the ops; then those that are used, of which nothing is known yet. Two
        # more that one replica uses are sent on their own; then with the others.
        assert [each[0] for each in seen] == [12, 8, 8, 10, 10, 10, 10]
        assert seen[0][1] == seen[1][1] == 0, "nothing is known of the split that was chosen"
        assert seen[2][2] == seen[4][2] == 2
        assert [each[2] for each in (seen[3], seen[6])] == [0, 0]
    for iteration in range(2, 6):
        # At least where every gradient is written as often as in the iteration before.
        assert any(seen[iteration][1] == seen[iteration][0] for seen in found), iteration
    # Layers that are run again in the backward are run in B, where one is split from W.
    assert [seen[5][2] for seen in found] == [0 if policy == "zero-bubble" else 2] * len(found)


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
    busy, exposed = reduction._measure([1.0, 1.5, 9.0], [3.0, 4.0, 9.5], 3.5)
    assert (busy, exposed) == (3.5, 6.0)
    assert reduction._measure([1.0], [2.0], 3.0) == (1.0, 0.0)
    assert reduction._measure([], [], 3.0) == (0.0, 0.0)


def test_a_fault_of_one_replica_slows_its_group() -> None:
    mesh = MeshShape(stages=2, replicas=2, tensor=2)
    fault = Fault(reduction=1, replica=2, bandwidth_mbps=8.0, delay_ms=5.0, from_iteration=3)
    trace = FaultTrace([fault])
    slowed = [
        (stage, column)
        for stage in range(2)
        for column in range(4)
        if trace.of_group(mesh.coordinate(mesh.rank(stage, column))) is not None
    ]
    assert slowed == [(1, 0), (1, 2)], "the columns of tensor 0"
    faults = trace.of_group(mesh.coordinate(mesh.rank(1, 0)))
    assert faults is not None
    # Long ago, so nothing is waited for. One byte takes a microsecond.
    assert faults.hold([10.0, 10.0, 10.5], [100_000, 100_000, 1000], 2) == [10.0, 10.0, 10.5]
    assert faults.hold([10.0, 10.0, 10.5], [100_000, 100_000, 1000], 3) == pytest.approx(
        [10.105, 10.205, 10.506]
    )
    (record,) = faults.record()
    assert (record["reduction"], record["buckets_held"], record["first_iteration"]) == (1, 3, 3)
