"""Several stages per rank on a simulated device: their receives wait for ops of the rank, and
results equal those of one process to the bit. No GPU has run it."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import free_port, run_ranks
from pairwise import give_tiers, parametrize_product
from several_jobs import check, make_plan, train
from several_replicas import assert_as_one_process, replicated
from simulated_runs import device_with_receives
from torch import nn
from trainer_jobs import Record, loss_fn, make_batch, make_stage

from pipemorph.errors import InputError
from pipemorph.planning import Dispatch, OpKind, Plan, Route, Schedule
from pipemorph.spec.sections.faults import Fault
from pipemorph_trainer import Options, Pipeline, TrainerContext
from pipemorph_trainer.agent import receive_windows

# --- when a receive may be posted -----------------------------------------------------------------


def reachable(plan: Plan, rank: int, ran: int) -> dict[tuple[int, bool], int]:
    """Messages that each stage has sent up and down (False, True), where ``rank`` has run so many
    ops and runs no more: the other ranks run all that they can."""
    schedule, last = plan.schedule, plan.schedule.stage_count - 1
    at = [0] * len(schedule.ranks)
    sent = {(stage, forward): 0 for stage in range(last + 1) for forward in (True, False)}

    def runs(each: int) -> bool:
        most = ran if each == rank else len(schedule.ranks[each])
        if at[each] == most:
            return False
        kind, microbatch, chunk = schedule.ranks[each][at[each]]
        stage = schedule.stages_by_rank[each][chunk]
        forward = kind is OpKind.F
        source = (stage - 1 if forward else stage + 1, forward)
        if kind is not OpKind.W and sent.get(source, last + 99) <= microbatch:
            return False
        at[each] += 1
        if kind is not OpKind.W:
            sent[stage, forward] += 1
        return True

    while any(runs(each) for each in range(len(schedule.ranks))):
        pass
    return sent


@pytest.mark.parametrize("seed", range(12))
def test_a_receive_is_posted_exactly_when_its_message_can_come(seed: int) -> None:
    """Earlier the receive would depend on this rank, if only by way of others."""
    rng = random.Random(seed)
    ranks = rng.randint(2, 4)
    policy = rng.choice(("1f1b-interleaved", "zero-bubble-v", "pipemorph"))
    stages = ranks * (2 if policy == "zero-bubble-v" else rng.randint(2, 3))
    placement = "v" if stages == 2 * ranks and rng.random() < 0.5 else "interleaved"
    microbatches = ranks * rng.randint(1, 3)
    plan = make_plan(
        policy, ranks, stages, microbatches, placement=placement, delay=rng.choice((0.0, 4.0))
    )
    for rank, mine in enumerate(plan.schedule.ranks):
        found = receive_windows.count_ops_before_receives(plan.schedule, rank)
        for ran in range(len(mine) + 1):
            sent = reachable(plan, rank, ran)
            for (stage, forward), ops in found.items():
                source = stage - 1 if forward else stage + 1
                due = sum(need <= ran for need in ops)
                assert due == sent.get((source, forward), 0), (plan, rank, ran, stage)


def test_one_stage_per_rank_counts_the_same() -> None:
    """Messages of the link say no less than ops of the rank there."""
    plan = make_plan("zero-bubble-v", 2, 4, 4)
    stages = tuple(tuple(op._replace(chunk=0) for op in ops) for ops in plan.schedule.stages)
    schedule = Schedule(4, stages)
    line = replace(plan, schedule=schedule)
    for stage in range(1, 4):
        ops = receive_windows.count_ops_before_receives(schedule, stage)[stage, True]
        messages = receive_windows.count_sends_before_forward(line, stage)
        backwards = [
            at for at, op in enumerate(stages[stage], 1) if op.kind in (OpKind.B, OpKind.BW)
        ]
        assert ops == tuple(backwards[sent - 1] if sent else 0 for sent in messages)


# --- whole runs -----------------------------------------------------------------------------------


def on_device(context: TrainerContext, *args: Any) -> dict[int, tuple[Record, list[str]]]:
    """:func:`several_jobs.train` on a device on which page-locking waits for all posted receives:
    one that could never come would end the run."""
    with device_with_receives(context.rank) as (device, _):
        found = train(context, *args)
    assert any("cudaHostRegister" in call for call in device.waited_for_all), "nothing waited"
    return found


@pytest.mark.needs_engine
@pytest.mark.parametrize(
    ("policy", "ranks", "stages", "microbatches", "route"),
    give_tiers(
        [
            ("zero-bubble-v", 2, 4, 6, "auto"),
            ("1f1b-interleaved", 3, 6, 6, "auto"),
            ("1f1b-interleaved", 2, 4, 6, "delegated"),
            ("zero-bubble-v", 3, 6, 8, "delegated"),
            ("1f1b-interleaved", 2, 4, 6, "auto"),
            ("1f1b-interleaved", 3, 6, 6, "delegated"),
            ("zero-bubble-v", 2, 4, 6, "delegated"),
            ("zero-bubble-v", 3, 6, 8, "auto"),
        ],
        test=1,
        full=3,
    ),
)
def test_policies(policy: str, ranks: int, stages: int, microbatches: int, route: str) -> None:
    """Messages take the direct route (``auto`` begins with it), and go over host memory."""
    routes = [Route.DELEGATED if route == "delegated" else Route.DIRECT] * (stages - 1)
    plan = make_plan(policy, ranks, stages, microbatches, routes=routes)
    check(plan, run=on_device, route=route, engine="tcp")


@pytest.mark.needs_engine
@pytest.mark.parametrize("placement", ["interleaved", pytest.param("v", marks=pytest.mark.full)])
def test_a_plan_for_a_slow_link_takes_over_on_both_routes(placement: str) -> None:
    first = make_plan("pipemorph", 2, 4, 6, placement=placement)
    routes = [Route.DELEGATED, Route.DIRECT, Route.DELEGATED]
    new = make_plan("pipemorph", 2, 4, 6, placement=placement, version=3, delay=3.0, routes=routes)
    assert new.schedule.ranks != first.schedule.ranks
    records = check(first, run=on_device, switches=[(1, new, (0, 1))], engine="tcp", route="auto")
    # The second iteration has it, if the other rank's message came in time.
    assert records[0].versions[::2] == [0, 3]


@pytest.mark.needs_engine
@pytest.mark.parametrize(
    ("placement", "dispatch"),
    parametrize_product(["interleaved", "v"], [Dispatch.GUIDED], test=1, full=1),
)
def test_the_order_follows_the_messages(placement: str, dispatch: Dispatch) -> None:
    """A receive waits for its ops of the plan's order, in whatever order the rank runs them."""
    plan = make_plan("pipemorph", 2, 4, 6, placement=placement, dispatch=dispatch)
    check(plan, run=on_device, route="auto", engine="tcp", faults=[Fault(link=0, delay_ms=20.0)])


def replicas_on_device(context: TrainerContext, placement: str, folder: str) -> Any:
    with device_with_receives(context.rank):
        return replicated(
            context, 2, placement, folder, options=Options(route="auto", engine="tcp")
        )


@pytest.mark.needs_engine
@pytest.mark.parametrize("placement", give_tiers([("v",), ("interleaved",)], test=0, full=1))
def test_replicas_with_all_that_a_loop_needs(placement: str, tmp_path: Path) -> None:
    """Evaluations, too, have receives that wait for ops of their rank."""
    found = run_ranks(4, replicas_on_device, placement, str(tmp_path))
    assert_as_one_process(found, [0])


def evaluations(context: TrainerContext, placement: Any, device: bool) -> list[float]:
    """Losses of evaluations before and after a step, of batches of growing size."""
    seat = device_with_receives(context.rank) if device else nullcontext()
    with (
        seat,
        Pipeline(
            lambda part: make_stage(part.stage, part.stages, torch.float32),
            context=context, loss_fn=loss_fn, microbatches=4, stages=4, stages_per_rank=2,
            placement=placement, options=Options(route="auto", engine="tcp"), deadline_seconds=30.0,
        ) as pipe,
    ):  # fmt: skip
        found = []
        for size in (8, 16, 32):
            tokens, target = make_batch(size, size)
            found.append(float(pipe.evaluate(tokens, target=target)))
            found.append(float(pipe.step(tokens[:8], target=target[:8])))
        return found


@pytest.mark.needs_engine
@pytest.mark.parametrize("placement", ["v", pytest.param("interleaved", marks=pytest.mark.full)])
def test_evaluations_may_grow_in_mid_run(placement: str) -> None:
    """Memory for larger messages is page-locked when a stage begins, while another one receives."""
    found, expected = (run_ranks(2, evaluations, placement, device) for device in (True, False))
    assert found == expected


def test_stages_on_two_devices_are_refused() -> None:
    context = TrainerContext(
        rank=0, world_size=1, local_rank=0, master_addr="127.0.0.1", master_port=free_port()
    )
    stages = [nn.Linear(1, 1), nn.Linear(1, 1, device=torch.device("meta"))]
    with pytest.raises(InputError, match="stage 1 is on meta, and stage 0 of the same"):
        Pipeline(stages, context=context, microbatches=4, stages_per_rank=2, placement="v")
    assert not dist.is_initialized(), "the group of a pipeline that was refused is still there"
