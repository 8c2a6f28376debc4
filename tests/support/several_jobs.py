"""Jobs whose ranks have several stages: their plans, and what a rank records of its training."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from launch import run_ranks
from torch import nn
from trainer_jobs import (
    Job,
    Record,
    assert_same,
    loss_fn,
    make_batch,
    make_stage,
    plan_of,
    reference,
)

from pipemorph.planning import Dispatch, Plan
from pipemorph_trainer import ModelShard, Options, Pipeline, TrainerContext

PLACEMENT = {"zero-bubble-v": "v", "1f1b-interleaved": "interleaved"}


def make_plan(
    policy: str,
    ranks: int,
    stages: int,
    microbatches: int,
    *,
    placement: str = "interleaved",
    **options: Any,
) -> Plan:
    """``options``: see :func:`trainer_jobs.plan_of`."""
    placement = PLACEMENT.get(policy, placement)
    return plan_of(policy, stages, microbatches, ranks=ranks, placement=placement, **options)


def placement_of(plan: Plan) -> str:
    placed, ranks = plan.schedule.placement, len(plan.schedule.ranks)
    return "interleaved" if placed == tuple(s % ranks for s in range(len(placed))) else "v"


def train(
    context: TrainerContext, job: Job, as_list: bool = False
) -> dict[int, tuple[Record, list[str]]]:
    """Train as :func:`trainer_jobs.train`: a record per stage of this rank, and their order."""
    plan = job.initial
    ranks, placement = len(plan.schedule.ranks), placement_of(plan)
    place = context.coordinate(job.stages, job.stages // ranks, placement)  # type: ignore[arg-type]

    def build(part: ModelShard) -> nn.Module:
        return make_stage(part.stage, part.stages, job.dtype)

    stages: Any = (
        [build(ModelShard(s, job.stages)) for s in place.held_stages] if as_list else build
    )
    records = {stage: Record() for stage in place.held_stages}
    order: list[str] = []
    with Pipeline(
        stages,
        context=context,
        loss_fn=loss_fn,
        microbatches=job.microbatches,
        optimizer=lambda modules: torch.optim.SGD(modules.parameters(), lr=0.1),
        stages=job.stages,
        stages_per_rank=len(place.held_stages),
        placement=placement,  # type: ignore[arg-type]
        plan=plan,
        options=Options(
            faults=job.faults,
            engine=job.engine,  # type: ignore[arg-type]
            route=job.route,  # type: ignore[arg-type]
            host_memory=job.host_memory,
        ),
        deadline_seconds=job.deadline,
        **job.extra,
    ) as pipe:
        for iteration in range(job.iterations):
            for at, new, whose in job.switches:
                if at == iteration and context.rank in whose:
                    pipe.install_plan(new)
            # Other shapes half-way: they have to be exchanged again.
            batch = job.batch * (2 if iteration >= job.iterations // 2 else 1)
            tokens, target = make_batch(1000 * place.replica + iteration, batch * job.microbatches)
            began = time.monotonic()
            loss = pipe.step(tokens, target=target)
            took = time.monotonic() - began
            turns = pipe._parts.iterations._turns
            order = [f"{stage}{op.kind.value}{op.microbatch}" for stage, op in turns.ran]
            for stage, module in pipe.modules.items():
                copies = [copy for whose, copy in turns.copied if whose == stage]
                records[stage].moved.append(sum(copy.to_host for copy in copies))
                records[stage].again.append(sum(copy.recomputed for copy in copies))
                records[stage].losses.append(loss)
                records[stage].seconds.append(took)
                records[stage].versions.append(pipe.plan.version)
                records[stage].grads.append(
                    {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
                )
            pipe.optimizer.step()
            pipe.optimizer.zero_grad()
        for stage, how in pipe.splits.items():
            records[stage].split = how
        for stage, module in pipe.modules.items():
            named = module.named_parameters()
            records[stage].parameters = {n: p.detach().clone() for n, p in named}
    return {stage: (record, order) for stage, record in records.items()}


def sequential(job: Job, replica: int = 0) -> list[Record]:
    """:func:`trainer_jobs.reference` with the batch doubled half-way."""
    half = job.iterations // 2
    return reference(job, replica, batch_of=lambda i: job.batch * (2 if i >= half else 1))


def check(
    plan: Plan,
    *,
    as_list: bool = False,
    master_addr: str = "127.0.0.1",
    run: Callable[..., Any] = train,
    expected: Callable[[Job], list[Record]] = sequential,
    seconds: float = 100.0,
    **more: Any,
) -> list[Record]:
    """Train on all ranks; compare with one process, and the order with the plan's: the same, or
    another one where dispatch varies and a link is late. ``run``: what a rank does in place of
    :func:`train`, at most ``seconds``; ``expected``: the one process."""
    schedule, stages = plan.schedule, plan.schedule.stage_count
    job = Job(stages, schedule.microbatches, initial=plan, iterations=4, **more)
    found = run_ranks(
        len(schedule.ranks),
        run,
        job,
        as_list,
        context={"master_addr": master_addr},
        timeout=seconds,
    )
    changed = 0
    last = max((new for _, new, _ in job.switches), key=lambda new: new.version, default=plan)
    varies = last.dispatch is Dispatch.GUIDED
    for rank, ops in enumerate(last.schedule.ranks):
        held = schedule.stages_by_rank[rank]
        wanted = [f"{held[op.chunk]}{op.kind.value}{op.microbatch}" for op in ops]
        for _, order in found[rank].values():
            assert sorted(order) == sorted(wanted)
            assert order == wanted or varies
            changed += order != wanted
    assert not (varies and job.faults) or changed, "what was late held up the rest"
    records = [found[rank][stage][0] for stage, rank in enumerate(schedule.placement)]
    assert_same(records, expected(job))
    return records
