"""Microbatches in the planner's order: the bits of a loop in that order, and nothing else."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gate import same_bits
from launch import run_ranks
from torch import Tensor
from trainer_jobs import Job, loss_fn, make_batch, make_plan, make_stage

from pipemorph.planning import OpKind, StageTimes
from pipemorph.protocol import PlanMessage, PlannedTimes
from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer import Options, Pipeline, TrainerContext
from pipemorph_trainer.agent.rank_plan import split_plan
from pipemorph_trainer.errors import BatchError
from pipemorph_trainer.executor.device_times import MeasuredCopy, MeasuredOp
from pipemorph_trainer.executor.microbatch_costs import MicrobatchWork
from pipemorph_trainer.executor.stage_executor import StageRecord
from pipemorph_trainer.schedule.microbatch_orderer import MicrobatchOrderer
from pipemorph_trainer.schedule.plan_agreement import PlanAgreement, TokenRelay
from pipemorph_trainer.schedule.plan_store import PlanStore
from pipemorph_trainer.transport.control_socket import StepToken

N, ITERATIONS = 6, 5
Costs = tuple[float, ...]


def costs_of(iteration: int) -> Costs | None:
    """Costs of an iteration; the one before the last has none."""
    drawn = torch.rand(N, generator=torch.Generator().manual_seed(iteration))
    return None if iteration == ITERATIONS - 2 else tuple((0.2 + drawn).tolist())


@dataclass
class Found:
    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    orders: list[tuple[int, ...]] = field(default_factory=list)
    evaluated: list[Tensor] = field(default_factory=list)
    grads: dict[str, Tensor] = field(default_factory=dict)
    """Gradients after the last iteration: each iteration adds to those before."""


def train(context: TrainerContext, stages: int, reorder: Any, each: int, dispatch: str) -> Found:
    place = context.coordinate(stages, each)
    modules = {stage: make_stage(stage, stages, torch.float32) for stage in place.held_stages}
    found = Found()
    with Pipeline(
        [*modules.values()], context=context, loss_fn=loss_fn, microbatches=N, stages=stages,
        stages_per_rank=each, options=Options(reorder=reorder, dispatch=dispatch),
    ) as pipe:  # fmt: skip
        for iteration in range(ITERATIONS):
            if iteration == 2 and each == 1:
                pipe.install_plan(make_plan(Job(stages, N), 1, "1f1b"))
            tokens, target = make_batch(iteration, 2 * N)
            if iteration == 1:
                with pytest.raises(BatchError, match="costs has 2 numbers"):
                    pipe.step(tokens, target=target, costs=(1, 2))
                assert pipe.microbatch_order == ()
            loss, outputs = pipe.step(
                tokens, target=target, return_outputs=True,
                costs=costs_of(iteration) if place.is_first else None,
            )  # fmt: skip
            found.losses.append(loss)
            found.outputs.append(outputs)
            found.orders.append(pipe.microbatch_order)
            found.evaluated.append(pipe.evaluate(tokens, target=target))
            assert pipe.microbatch_order == (), "an evaluation has none"
    found.grads = {
        f"{stage}.{name}": parameter.grad
        for stage, module in modules.items()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    return found


def loop(stages: int, orders: list[tuple[int, ...]]) -> Found:
    """Run the microbatches one after another in one process, in these orders."""
    torch.set_num_threads(1)
    modules = [make_stage(stage, stages, torch.float32) for stage in range(stages)]
    found = Found()
    for iteration, order in enumerate(orders):
        tokens, target = make_batch(iteration, 2 * N)
        batches = [*zip(tokens.chunk(N), target.chunk(N), strict=True)]
        outputs: dict[int, Tensor] = {}
        total = 0.0
        for microbatch in order or range(N):
            value: Any = (batches[microbatch][0],)
            for module in modules:
                value = module(*(value if isinstance(value, tuple) else (value,)))
            loss = loss_fn(value, batches[microbatch][1])
            outputs[microbatch] = value.detach()
            total += float(loss.detach())
            (loss / N).backward()
        found.losses.append(torch.tensor(total / N, dtype=torch.float32))
        found.outputs.append(torch.cat([outputs[m] for m in range(N)]))
    found.grads = {
        f"{stage}.{name}": parameter.grad
        for stage, module in enumerate(modules)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    return found


@pytest.mark.parametrize(
    ("ranks", "each", "dispatch"), [(3, 1, "static"), (3, 1, "guided"), (2, 2, "static")]
)
def test_a_run_has_the_bits_of_a_loop_in_its_order(ranks: int, each: int, dispatch: str) -> None:
    stages = ranks * each
    found = run_ranks(ranks, train, stages, "sums", each, dispatch)
    orders = found[0].orders
    assert all(rank.orders == orders for rank in found), "all stages run one order"
    assert orders[ITERATIONS - 2] == (), "without costs"
    assert sum(map(bool, orders)) >= 2, "some were better than the script's own"
    assert len(set(orders)) > 2, "each iteration has its own"
    wanted, plain = loop(stages, orders), loop(stages, [()] * ITERATIONS)
    moved = 0
    for rank in found:
        for iteration, loss in enumerate(rank.losses):
            same_bits(loss, wanted.losses[iteration], f"loss of iteration {iteration}")
        for name, grad in rank.grads.items():
            same_bits(grad, wanted.grads[name], name)
            torch.testing.assert_close(grad, plain.grads[name])
            moved += not torch.equal(grad, plain.grads[name])
    assert moved, "the order of sums shows in some gradient"
    for mine, expected in zip(found[-1].outputs, plain.outputs, strict=True):
        same_bits(mine, expected, "outputs in the script's order")
    for mine, other in zip(found[0].evaluated, found[-1].evaluated, strict=True):
        same_bits(mine, other, "evaluation")


# --- the parts ----------------------------------------------------------------------------------


MESH = MeshShape(3)
COSTS = (1.0, 5.0, 1.0, 2.0, 9.0, 1.0)


def test_only_the_rank_of_stage_0_gets_the_whole_plan() -> None:
    plan = make_plan(Job(3, N), 4, "pipemorph")
    times = PlannedTimes.from_stages(
        [StageTimes(forward=1, backward_input=2, backward_weight=3)] * 3, [0.5, 0.0]
    )
    whole = PlanMessage.from_plan(plan).model_copy(update={"times": times})
    first, *others = split_plan(plan, MESH, orders=True, times=times)
    assert first.whole == whole
    assert all(other.whole is None for other in others)
    plain = split_plan(plan, MESH)
    assert all(each.whole is None for each in plain)
    assert first.digest == plain[0].digest, "times are no part of what ranks run"


def test_the_order_depends_on_plan_and_costs_alone() -> None:
    plan = split_plan(make_plan(Job(3, N), 4, "pipemorph"), MESH, orders=True)[0]
    orders = {
        MicrobatchOrderer(MESH).order_microbatches(plan, [scale * cost for cost in COSTS])
        for scale in (1.0, 1.0, 1024.0, 2.0**-60)
    }
    (order,) = orders
    assert sorted(order) == list(range(N)), "only ratios of costs count"
    orderer = MicrobatchOrderer(MESH)
    assert orderer.order_microbatches(plan, ()) == ()
    assert orderer.order_microbatches(plan, (3.0,) * N) == ()
    lacks = plan.model_copy(update={"whole": None})
    assert orderer.order_microbatches(lacks, COSTS) == (), "the host sent no plan for it"


def test_a_plan_that_the_orderer_refuses_leaves_the_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Training goes on, and the log says so once."""
    plan = split_plan(make_plan(Job(3, N), 4, "pipemorph"), MESH, orders=True)[0]
    orderer = MicrobatchOrderer(MESH)
    for _ in range(2):
        assert orderer.order_microbatches(plan, COSTS[:-1]) == ()
    (record,) = caplog.records
    assert "microbatches run in order, since none was found" in record.message


def test_a_step_that_begins_again_has_the_order_of_its_first_try() -> None:
    """Forwards that have run do not run again, so each has to stay in its place."""
    sent: list[StepToken] = []
    down: Any = SimpleNamespace(socket=SimpleNamespace(send_token=sent.append))
    ends: Any = SimpleNamespace(upstream=None, downstream=down)
    (mine,) = split_plan(make_plan(Job(3, N), 0, "pipemorph"), MESH, [0], orders=True)
    book = PlanStore(mine, MESH.find_coordinate(0), [], no_offload={}, no_recompute={})
    orderer: Any = SimpleNamespace(
        order_microbatches=lambda plan, costs: (5, 4, 3, 2, 1, 0) if costs else ()
    )
    mail: Any = None
    relay = TokenRelay(
        MESH.find_coordinate(0), ends, mail, PlanAgreement(book, None, None), orderer
    )
    work = MicrobatchWork(COSTS, (5, 4, 3, 2, 1, 0))
    for again in (False, True):
        assert relay.start_iteration(0, None, again=again, costs=COSTS)[1].work == work
    assert relay.start_iteration(1, None, evaluation=True)[1].work == MicrobatchWork()
    assert relay.start_iteration(1, None)[1].work == MicrobatchWork()
    assert [token.order for token in sent] == [work.order, work.order, (), ()]
    up: Any = SimpleNamespace(peer_stage=0, socket=SimpleNamespace(tokens=deque()))
    arrived = iter(sent)
    below: Any = SimpleNamespace(upstream=up, downstream=None)
    other: Any = SimpleNamespace(await_queue=lambda *_: StepToken.unpack(next(arrived).pack()))
    (theirs,) = split_plan(make_plan(Job(3, N), 0, "pipemorph"), MESH, [1])
    book = PlanStore(theirs, MESH.find_coordinate(1), [], no_offload={}, no_recompute={})
    relay = TokenRelay(MESH.find_coordinate(1), below, other, PlanAgreement(book, None, None))
    assert relay.start_iteration(0, None)[1].work == work


def test_records_name_microbatches() -> None:
    work = MicrobatchWork((1.0, 2.0, 3.0), (2, 0, 1))
    record = StageRecord(
        [MeasuredOp(OpKind.F, place, 0.0, 1.0) for place in range(3)],
        [MeasuredCopy(OpKind.F, 0, 0.0, 1.0, 64)], [(OpKind.B, 1, 0.0, 1.0)], work=work,
    )  # fmt: skip
    record.name_microbatches()
    assert [op.microbatch for op in record.ops] == [2, 0, 1]
    assert record.copies[0].microbatch == 2
    assert record.waits == [(OpKind.B, 0, 0.0, 1.0)]
    assert work.to_places("abc") == ["c", "a", "b"]
    assert work.to_microbatches(["c", "a", "b"]) == ["a", "b", "c"]
