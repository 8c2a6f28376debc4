"""Several stages per rank equal a sequential run to the bit, in the order they were given."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence

import pytest
import torch
from launch import Ranks, missing_in, run_ranks
from trainer_jobs import Job, Record, assert_same, loss_fn, make_batch, make_stage, reference

from pipemorph.api.spec import Fault
from pipemorph.errors import InputError
from pipemorph.planning import Link, Policy, Problem, StageTimes
from pipemorph.planning.formats.torch_csv import parse_csv
from pipemorph.planning.policies.interleaved import plan_interleaved
from pipemorph.planning.simulation.interleaved import InterleavedSchedule
from pipemorph_trainer import TrainerContext
from pipemorph_trainer.interleaved import InterleavedPipeline

pytestmark = pytest.mark.multiprocess


def make_schedule(policy: str, ranks: int, stages: int, microbatches: int) -> InterleavedSchedule:
    one = StageTimes(forward=1, backward_input=1, backward_weight=1)
    problem = Problem(
        microbatches=microbatches,
        stages=(one,) * stages,
        links=(Link(),) * (stages - 1),
        policy=Policy(policy),
        ranks=ranks,
    )
    return plan_interleaved(problem).schedule


def train(
    context: TrainerContext, job: Job, schedule: InterleavedSchedule
) -> dict[int, tuple[Record, list[str]]]:
    """Like :func:`jobs.train`: a record per stage of this rank, and the order it ran in."""
    placement = schedule.placement()
    modules = {
        stage: make_stage(stage, job.stages, job.dtype)
        for stage, rank in enumerate(placement)
        if rank == context.rank
    }
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in modules.values()]
    records = {stage: Record() for stage in modules}
    order: list[str] = []
    with InterleavedPipeline(
        modules, context=context, schedule=schedule, loss_fn=loss_fn, faults=job.faults,
        deadline_seconds=job.deadline,
    ) as pipe:  # fmt: skip
        for iteration in range(job.iterations):
            # Other shapes half-way: they have to be exchanged again.
            batch = job.batch * (2 if iteration >= job.iterations // 2 else 1)
            tokens, target = make_batch(iteration, batch * job.microbatches)
            began = time.monotonic()
            loss = pipe.step(tokens, target=target)
            took = time.monotonic() - began
            order = [f"{stage}{op.kind.value}{op.microbatch}" for stage, op in pipe.ops]
            for stage, module in modules.items():
                records[stage].losses.append(loss)
                records[stage].seconds.append(took)
                records[stage].grads.append(
                    {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
                )
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for stage, how in pipe.splits.items():
            records[stage].split = how
    for stage, module in modules.items():
        records[stage].parameters = {n: p.detach().clone() for n, p in module.named_parameters()}
    return {stage: (record, order) for stage, record in records.items()}


def check(
    schedule: InterleavedSchedule,
    dtype: torch.dtype = torch.float32,
    faults: Sequence[Fault] = (),
    master_addr: str = "127.0.0.1",
) -> list[Record]:
    placement = schedule.placement()
    job = Job(len(placement), schedule.microbatches, dtype=dtype, iterations=4, faults=faults)
    context = {"master_addr": master_addr}
    found = run_ranks(len(schedule.ranks), train, job, schedule, context=context)
    for rank, ops in enumerate(schedule.ranks):
        wanted = [f"{op.stage}{op.kind.value}{op.microbatch}" for op in ops]
        assert all(order == wanted for _, order in found[rank].values())
    records = [found[rank][stage][0] for stage, rank in enumerate(placement)]
    assert_same(records, sequential(job))
    return records


def sequential(job: Job) -> list[Record]:
    """:func:`jobs.reference` with the batch doubled half-way."""
    half = job.iterations // 2
    return reference(job, batch_of=lambda i: job.batch * (2 if i >= half else 1))


@pytest.mark.parametrize(
    ("policy", "ranks", "stages", "microbatches"),
    [
        ("1f1b-interleaved", 2, 4, 6),
        ("1f1b-interleaved", 2, 6, 4),
        ("1f1b-interleaved", 3, 6, 6),
        ("zero-bubble-v", 1, 2, 3),
        ("zero-bubble-v", 2, 4, 6),
        ("zero-bubble-v", 3, 6, 8),
    ],
)
def test_policies(policy: str, ranks: int, stages: int, microbatches: int) -> None:
    records = check(make_schedule(policy, ranks, stages, microbatches))
    if policy == "zero-bubble-v":
        # B and W ran apart, or there would be nothing to test.
        assert {record.split for record in records} <= {"module", "graph"}


def test_bfloat16() -> None:
    check(make_schedule("zero-bubble-v", 2, 4, 4), torch.bfloat16)


@pytest.mark.ipv6
def test_over_ipv6() -> None:
    check(make_schedule("1f1b-interleaved", 2, 4, 4), master_addr="::1")


def test_under_delays() -> None:
    faults = [
        Fault(link=0, delay_ms=10.0),
        Fault(link=2, delay_ms=25.0, from_iteration=1, to_iteration=3),
        Fault(link=2, bandwidth_mbps=2.0),
    ]
    records = check(make_schedule("1f1b-interleaved", 2, 4, 4), faults=faults)
    # Four forwards over link 0, one after another, and the last one's gradient back.
    assert min(records[0].seconds) >= 0.050


def test_any_placement_from_a_csv() -> None:
    """Two neighbours on one rank, and one rank with a single stage in between."""
    check(
        parse_csv("0F0,1F0,0F1,1F1,3F0,3I0,3W0,3F1,1B0,0B0,3B1,1B1,0B1\n2F0,2F1,2I0,2I1,2W0,2W1\n")
    )


def breaking(context: TrainerContext, job: Job, schedule: InterleavedSchedule, how: str) -> None:
    """Rank 1 breaks in its second iteration, in the last forward of its first stage."""
    runs = 0

    def hook(*_: object) -> None:
        nonlocal runs
        runs += 1
        if context.rank != 1 or runs < 2 * schedule.microbatches:
            return
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "raise":
            raise ArithmeticError("the stage broke")
        threading.Event().wait()

    modules = {
        stage: make_stage(stage, job.stages, job.dtype)
        for stage, rank in enumerate(schedule.placement())
        if rank == context.rank
    }
    with InterleavedPipeline(
        modules, context=context, schedule=schedule, loss_fn=loss_fn, deadline_seconds=job.deadline
    ) as pipe:
        for iteration in range(3):
            tokens, target = make_batch(iteration, job.batch * job.microbatches)
            pipe.step(tokens, target=target)
            if iteration == 0:
                # After the self-test, which runs the stage as well.
                runs = schedule.microbatches
                next(iter(modules.values())).register_forward_hook(hook)


@pytest.mark.parametrize("how", ["kill", "raise", "hang"])
def test_a_rank_that_breaks_is_named(how: str) -> None:
    """The other rank ends soon, and says which message of which stage it missed."""
    schedule = make_schedule("zero-bubble-v", 2, 4, 4)
    job = Job(4, 4, deadline=4.0 if how == "hang" else 30.0)
    ranks = Ranks(2, breaking, job, schedule, how)
    ranks.wait_for_end([0])
    if how == "hang":
        ranks.signal(1, signal.SIGKILL)
    found = ranks.wait()
    assert found[0].exitcode == 1
    kind = "WaitTimeoutError" if how == "hang" else "PeerLostError"
    assert kind in found[0].error, found[0].error
    missing = missing_in(found[0].error)
    assert missing.iteration == 1 and missing.stage in (1, 2) and missing.link in (0, 2), missing


def test_what_does_not_fit() -> None:
    schedule = make_schedule("zero-bubble-v", 2, 4, 4)
    context = TrainerContext(
        rank=0, world_size=2, local_rank=0, master_addr="127.0.0.1", master_port=1
    )
    modules = {stage: torch.nn.Linear(1, 1) for stage in (0, 1)}
    with pytest.raises(InputError, match=r"was given stages \[0, 1\]; the schedule puts \[0, 3\]"):
        InterleavedPipeline(modules, context=context, schedule=schedule)
    for fault, words in (
        (Fault(link=1, delay_ms=1), "link is 1, which is within rank 1"),
        (Fault(link=3, delay_ms=1), "link is 3; 4 stages have links 0 to 2"),
        (Fault(link=0, sever="data"), "these links have none"),
    ):
        with pytest.raises(InputError, match=words):
            InterleavedPipeline(modules, context=context, schedule=schedule, faults=[fault])
    with pytest.raises(InputError, match="the schedule has 2 ranks; this job runs 3"):
        InterleavedPipeline(
            modules,
            context=TrainerContext(
                rank=0, world_size=3, local_rank=0, master_addr="127.0.0.1", master_port=1
            ),
            schedule=schedule,
        )
