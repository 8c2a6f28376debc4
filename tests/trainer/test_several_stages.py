"""Several stages per rank train as one process does, to the bit, in the order of their plan."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Ranks, free_port, missing_in, run_ranks
from pairwise import give_tiers, parametrize_product
from several_jobs import check, make_plan
from several_replicas import assert_as_one_process, replicated
from torch import nn
from trainer_jobs import Job, loss_fn, make_batch, make_stage

from pipemorph.errors import InputError
from pipemorph.planning import Dispatch, Route
from pipemorph.planning.formats.torch_csv import parse_csv
from pipemorph.planning.offload import count_away_microbatches
from pipemorph.spec.mesh import MeshShape
from pipemorph.spec.sections.faults import Fault
from pipemorph_trainer import Options, Pipeline, TrainerContext
from pipemorph_trainer.agent.rank_plan import check_plan


@pytest.mark.parametrize(
    ("policy", "ranks", "stages", "microbatches"),
    give_tiers(
        [
            ("1f1b-interleaved", 2, 6, 4),
            ("zero-bubble-v", 2, 4, 6),
            ("1f1b-interleaved", 3, 6, 6),
            ("zero-bubble-v", 3, 6, 8),
            ("zero-bubble-v", 1, 2, 3),
            ("1f1b-interleaved", 2, 4, 6),
        ],
        test=2,
        full=3,
    ),
)
def test_policies(policy: str, ranks: int, stages: int, microbatches: int) -> None:
    records = check(make_plan(policy, ranks, stages, microbatches), as_list=ranks == 2)
    if policy == "zero-bubble-v":
        # B and W ran apart, or there would be nothing to test.
        assert {record.split for record in records} == {"deferred"}


@pytest.mark.full
def test_bfloat16() -> None:
    check(make_plan("zero-bubble-v", 2, 4, 4), dtype=torch.bfloat16)


@pytest.mark.full
@pytest.mark.ipv6
def test_over_ipv6() -> None:
    check(make_plan("1f1b-interleaved", 2, 4, 4), master_addr="::1")


@pytest.mark.full
def test_under_delays() -> None:
    faults = [
        Fault(link=0, delay_ms=10.0),
        Fault(link=2, delay_ms=25.0, from_iteration=1, to_iteration=3),
        Fault(link=2, bandwidth_mbps=2.0),
    ]
    records = check(make_plan("1f1b-interleaved", 2, 4, 4), faults=faults)
    # Four forwards over link 0, one after another, and the last one's gradient back.
    assert min(records[0].seconds) >= 0.050


@pytest.mark.parametrize("placement", ["v", pytest.param("interleaved", marks=pytest.mark.full)])
def test_a_plan_for_a_slow_link_takes_over_on_both_routes(placement: str) -> None:
    """Planned for a slow link, with links on the engine, from the second iteration on."""
    first = make_plan("pipemorph", 2, 4, 6, placement=placement)
    routes = [Route.DELEGATED, Route.DIRECT, Route.DELEGATED]
    if placement == "v":
        # Link 1 is within rank 1: whatever its route is called.
        routes = [Route.DELEGATED, Route.DELEGATED, Route.DIRECT]
    new = make_plan("pipemorph", 2, 4, 6, placement=placement, version=3, delay=3.0, routes=routes)
    assert new.schedule.ranks != first.schedule.ranks
    records = check(
        first, switches=[(1, new, (0, 1))], faults=[Fault(link=0, delay_ms=5.0)], engine="tcp",
        route="auto",
    )  # fmt: skip
    # The second iteration has it, if the other rank's message came in time.
    assert records[0].versions[::2] == [0, 3]


@pytest.mark.parametrize(
    ("placement", "dispatch"),
    parametrize_product(["v", "interleaved"], [Dispatch.GUIDED], test=1, full=1),
)
def test_the_order_follows_the_messages(placement: str, dispatch: Dispatch) -> None:
    """Results are the same bits; also while a link is late that the plan knows nothing of, and from
    the second iteration on under a plan for it, with links on the engine."""
    first = make_plan("pipemorph", 2, 4, 6, placement=placement, dispatch=dispatch)
    check(first)
    routes = [Route.DELEGATED, Route.DIRECT, Route.DELEGATED]
    new = make_plan(
        "pipemorph", 2, 4, 6, placement=placement, version=3, delay=3.0, routes=routes,
        dispatch=dispatch,
    )  # fmt: skip
    records = check(
        first, switches=[(1, new, (0, 1))], faults=[Fault(link=0, delay_ms=20.0)], engine="tcp",
        route="auto",
    )  # fmt: skip
    assert records[0].versions[::2] == [0, 3]


@pytest.mark.parametrize("dispatch", give_tiers([(Dispatch.GUIDED,)], test=0, full=1))
def test_the_order_follows_the_messages_of_three_stages(dispatch: Dispatch) -> None:
    plan = make_plan("1f1b-interleaved", 2, 6, 6, dispatch=dispatch)
    check(plan, faults=[Fault(link=2, delay_ms=20.0)])


def test_a_schedule_of_torch_from_a_csv() -> None:
    """The backward is fused on some stages and split on others."""
    check(
        parse_csv(
            "0F0,0F1,2F0,2F1,2I0,2W0,0B0,2B1,0B1\n1F0,1F1,3F0,3B0,3F1,1I0,3B1,1W0,1B1\n"
        ).to_plan()
    )


@pytest.mark.parametrize("placement", [pytest.param("v", marks=pytest.mark.full), "interleaved"])
def test_replicas_with_all_that_a_loop_needs(placement: str, tmp_path: Path) -> None:
    """2 stages on each of 2 ranks × 2 replicas: keyword arguments, tied weights (in a V on one
    rank), the norm, evaluations and checkpoints; across a plan for a slow link that moves all
    links to the engine."""
    moved = make_plan(
        "pipemorph", 2, 4, 4, placement=placement, version=3, delay=3.0,
        routes=[Route.DELEGATED] * 3,
    )  # fmt: skip
    found = run_ranks(4, replicated, 2, placement, str(tmp_path), moved)
    if placement == "v":
        # Goes on where it was cut, with one stage per rank.
        shutil.rmtree(tmp_path / "iteration-00000004")
        found += run_ranks(4, replicated, 1, "interleaved", str(tmp_path))
    assert_as_one_process(found, [0, 2][: len(found) // 4])


@pytest.mark.parametrize(
    ("how", "placement"),
    parametrize_product(["offload", "recompute"], ["v", "interleaved"], test=1, full=1),
)
def test_activations_leave_the_device(placement: str, how: str) -> None:
    """Planned for a slow link within limits that stages of both ranks keep so, from the second
    iteration on; the stages of a rank move or drop activations as the simulator says."""
    limits, fields = {"device_limit": 1, "offload_copy": 0}, {"host_memory": 1 << 30}
    if how == "recompute":
        limits, fields = (
            {"in_flight_limit": 1, "recompute_limit": 8},
            {"extra": {"recompute": "auto"}},
        )
    first = make_plan("pipemorph", 2, 4, 8, placement=placement)
    new = make_plan("pipemorph", 2, 4, 8, placement=placement, version=3, delay=20.0, **limits)
    away = count_away_microbatches(new.schedule, new.device_limits, new.recompute)
    leaving = away.recomputed if how == "recompute" else away.offloaded
    assert leaving[0] and leaving[1], "on both ranks"
    records = check(first, switches=[(1, new, (0, 1))], **fields)
    for stage, record in enumerate(records):
        done = record.again if how == "recompute" else record.moved
        assert sum(record.again) + sum(record.moved) == sum(done), "in one way only"
        planned = [leaving[stage] if version == 3 else 0 for version in record.versions]
        assert done == planned and record.versions[2:] == [3, 3]


def breaking(context: TrainerContext, job: Job, how: str, dispatch: str) -> None:
    """Rank 1 breaks in its second iteration, in the last forward of its first stage."""
    runs = 0

    def hook(*_: object) -> None:
        nonlocal runs
        runs += 1
        if context.rank != 1 or runs < 2 * job.microbatches:
            return
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "raise":
            raise ArithmeticError("the stage broke")
        threading.Event().wait()

    with Pipeline(
        lambda part: make_stage(part.stage, part.stages, job.dtype),
        context=context, loss_fn=loss_fn, microbatches=job.microbatches, stages_per_rank=2,
        placement="v", policy="zero-bubble-v", options=Options(dispatch=dispatch),
        deadline_seconds=job.deadline,
    ) as pipe:  # fmt: skip
        for iteration in range(3):
            tokens, target = make_batch(iteration, job.batch * job.microbatches)
            pipe.step(tokens, target=target)
            if iteration == 0:
                # After the self-test, which runs the stage as well.
                runs = job.microbatches
                next(iter(pipe.modules.values())).register_forward_hook(hook)


@pytest.mark.parametrize(
    ("how", "dispatch"),
    give_tiers(
        [
            ("kill", "guided"), ("raise", "static"), ("hang", "guided"), ("hang", "static"),
            ("kill", "static"),
        ],
        test=1, full=2,
    ),
)  # fmt: skip
def test_a_rank_that_breaks_is_named(how: str, dispatch: str) -> None:
    """The other rank ends soon, and names the message and stage that it missed."""
    job = Job(4, 4, deadline=4.0 if how == "hang" else 30.0)
    ranks = Ranks(2, breaking, job, how, dispatch)
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
    context = TrainerContext(
        rank=0, world_size=1, local_rank=0, master_addr="127.0.0.1", master_port=free_port()
    )
    one: dict[str, Any] = {"context": context, "microbatches": 4}
    several = {**one, "stages_per_rank": 2, "placement": "v"}
    for stages, options, words in (
        (
            [nn.Linear(1, 1)],
            several,
            r"rank 0 was given 1 stage; it has stages 0 and 1 of 2 stages \(2 per rank, v\)",
        ),
        ([nn.Linear(1, 1)] * 2, one, "rank 0 was given 2 stages; it has stage 0 of 1 stages"),
        ([], several, "the list of stages is empty"),
        ([shared := nn.Linear(1, 1), nn.Sequential(shared)], several, "share the parameter"),
        (lambda _: nn.Linear(1, 1), {**several, "placement": "w"}, "placement is 'w'; expected"),
        (lambda _: nn.Linear(1, 1), {**several, "stages": 3}, "expected a multiple of stages_per"),
        (lambda _: nn.Linear(1, 1), {**several, "policy": "1f1b"}, "policy 1f1b has one stage per"),
    ):
        with pytest.raises(InputError, match=words):
            Pipeline(stages, **options)  # type: ignore[arg-type]
    wrong = make_plan("1f1b-interleaved", 2, 4, 4)
    mesh = MeshShape(4, stages_per_rank=2, placement="v")
    with pytest.raises(InputError, match=r"on ranks \[0, 1, 0, 1\] .* has them on \[0, 1, 1, 0\]"):
        check_plan(wrong, mesh)
