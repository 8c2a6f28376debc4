"""Several stages per rank train as one process does, to the bit, in the order of their plan."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gate import same_bits
from launch import Ranks, free_port, missing_in, run_ranks
from torch import Tensor, nn
from trainer_jobs import (
    VOCABULARY,
    WIDTH,
    Job,
    Record,
    assert_same,
    loss_fn,
    make_batch,
    make_stage,
    reference,
)

from pipemorph.api.mesh import MeshShape
from pipemorph.api.spec import Checkpoint, Fault
from pipemorph.errors import InputError
from pipemorph.planning import Dispatch, Link, Plan, Policy, Problem, Route, StageTimes
from pipemorph.planning.formats.torch_csv import parse_csv
from pipemorph.planning.interleaved import plan_interleaved
from pipemorph.planning.simulation.interleaved import InterleavedSchedule
from pipemorph_trainer import Part, Pipeline, TrainerContext
from pipemorph_trainer.agent.rank_plan import check_plan

pytestmark = pytest.mark.multiprocess

PLACEMENT = {"zero-bubble-v": "v", "1f1b-interleaved": "interleaved"}


def make_plan(
    policy: str,
    ranks: int,
    stages: int,
    microbatches: int,
    *,
    placement: str = "interleaved",
    version: int = 0,
    delay: float = 0.0,
    routes: Sequence[Route] | None = None,
) -> Plan:
    """``delay`` on link 0, in op times."""
    one = StageTimes(forward=1, backward_input=1, backward_weight=1)
    problem = Problem(
        microbatches=microbatches,
        stages=(one,) * stages,
        links=tuple(Link(delay=0 if i else delay) for i in range(stages - 1)),
        policy=Policy(policy),
        ranks=ranks,
        placement=PLACEMENT.get(policy, placement),  # type: ignore[arg-type]
    )
    planned = plan_interleaved(problem)
    return planned.to_plan(version, routes or (Route.DIRECT,) * (stages - 1))


def placement_of(plan: Plan) -> str:
    placed = InterleavedSchedule.of_plan(plan).placement()
    ranks = len(plan.turns)
    return "interleaved" if placed == tuple(s % ranks for s in range(len(placed))) else "v"


def train(
    context: TrainerContext, job: Job, as_list: bool = False
) -> dict[int, tuple[Record, list[str]]]:
    """Like :func:`trainer_jobs.train`: a record per stage of this rank, and the order it ran in."""
    plan = job.initial
    assert plan is not None
    ranks, placement = len(plan.turns), placement_of(plan)
    place = context.coordinate(job.stages, job.stages // ranks, placement)  # type: ignore[arg-type]

    def build(part: Part) -> nn.Module:
        return make_stage(part.stage, part.stages, job.dtype)

    stages: Any = [build(Part(s, job.stages)) for s in place.held] if as_list else build
    records = {stage: Record() for stage in place.held}
    order: list[str] = []
    with Pipeline(
        stages,
        context=context,
        loss_fn=loss_fn,
        microbatches=job.microbatches,
        optimizer=lambda modules: torch.optim.SGD(modules.parameters(), lr=0.1),
        stages=job.stages,
        stages_per_rank=len(place.held),
        placement=placement,  # type: ignore[arg-type]
        plan=plan,
        faults=job.faults,
        deadline_seconds=job.deadline,
        engine=job.engine,  # type: ignore[arg-type]
        route=job.route,  # type: ignore[arg-type]
    ) as pipe:
        for iteration in range(job.iterations):
            for at, new, whose in job.switches:
                if at == iteration and context.rank in whose:
                    pipe.install(new)
            # Other shapes half-way: they have to be exchanged again.
            batch = job.batch * (2 if iteration >= job.iterations // 2 else 1)
            tokens, target = make_batch(1000 * place.replica + iteration, batch * job.microbatches)
            began = time.monotonic()
            loss = pipe.step(tokens, target=target)
            took = time.monotonic() - began
            ran = pipe._parts.iterations._turns.ran
            order = [f"{stage}{op.kind.value}{op.microbatch}" for stage, op in ran]
            for stage, module in pipe.modules.items():
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


def check(plan: Plan, *, as_list: bool = False, master_addr: str = "127.0.0.1", **more: Any) -> Any:
    """Train on all ranks; compare with one process, and the order with the plan's."""
    schedule = InterleavedSchedule.of_plan(plan)
    stages = plan.schedule.stage_count
    job = Job(stages, schedule.microbatches, initial=plan, iterations=4, **more)
    found = run_ranks(
        len(schedule.ranks), train, job, as_list, context={"master_addr": master_addr}
    )
    last = max((new for _, new, _ in job.switches), key=lambda new: new.version, default=plan)
    for rank, ops in enumerate(InterleavedSchedule.of_plan(last).ranks):
        wanted = [f"{op.stage}{op.kind.value}{op.microbatch}" for op in ops]
        assert all(order == wanted for _, order in found[rank].values())
    records = [found[rank][stage][0] for stage, rank in enumerate(schedule.placement())]
    assert_same(records, sequential(job))
    return records


def sequential(job: Job, replica: int = 0) -> list[Record]:
    """:func:`trainer_jobs.reference` with the batch doubled half-way."""
    half = job.iterations // 2
    return reference(job, replica, batch_of=lambda i: job.batch * (2 if i >= half else 1))


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
    records = check(make_plan(policy, ranks, stages, microbatches), as_list=ranks == 2)
    if policy == "zero-bubble-v":
        # B and W ran apart, or there would be nothing to test.
        assert {record.split for record in records} <= {"module", "graph"}


def test_bfloat16() -> None:
    check(make_plan("zero-bubble-v", 2, 4, 4), dtype=torch.bfloat16)


@pytest.mark.ipv6
def test_over_ipv6() -> None:
    check(make_plan("1f1b-interleaved", 2, 4, 4), master_addr="::1")


def test_under_delays() -> None:
    faults = [
        Fault(link=0, delay_ms=10.0),
        Fault(link=2, delay_ms=25.0, from_iteration=1, to_iteration=3),
        Fault(link=2, bandwidth_mbps=2.0),
    ]
    records = check(make_plan("1f1b-interleaved", 2, 4, 4), faults=faults)
    # Four forwards over link 0, one after another, and the last one's gradient back.
    assert min(records[0].seconds) >= 0.050


@pytest.mark.parametrize("placement", ["interleaved", "v"])
def test_a_plan_for_a_slow_link_takes_over_on_both_routes(placement: str) -> None:
    """Planned for a slow link, with links on the engine, from the second iteration on."""
    first = make_plan("pipemorph", 2, 4, 6, placement=placement)
    routes = [Route.DELEGATED, Route.DIRECT, Route.DELEGATED]
    if placement == "v":
        # Link 1 is within rank 1: whatever its route is called.
        routes = [Route.DELEGATED, Route.DELEGATED, Route.DIRECT]
    new = make_plan("pipemorph", 2, 4, 6, placement=placement, version=3, delay=3.0, routes=routes)
    assert new.turns != first.turns
    records = check(
        first, switches=[(1, new, (0, 1))], faults=[Fault(link=0, delay_ms=5.0)], engine="tcp",
        route="auto",
    )  # fmt: skip
    # In the second iteration, if the other rank's word of it came in time.
    assert records[0].versions[::2] == [0, 3]


def test_a_schedule_of_torch_from_a_csv() -> None:
    """With a fused backward on some stages and a split one on others."""
    check(
        parse_csv(
            "0F0,0F1,2F0,2F1,2I0,2W0,0B0,2B1,0B1\n1F0,1F1,3F0,3B0,3F1,1I0,3B1,1W0,1B1\n"
        ).to_plan()
    )


class Piece(nn.Module):
    """Some of the layers of a small language model, named by their place in it."""

    def __init__(self, part: Part, seed: int = 0) -> None:
        super().__init__()
        self.first, self.last = part.is_first, part.is_last
        self.layers = nn.ModuleDict()
        for layer in part.layers(4):
            torch.manual_seed(layer + seed)
            self.layers[str(layer)] = nn.Linear(WIDTH, WIDTH)
        if self.first:
            torch.manual_seed(100 + seed)
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
        if self.last:
            torch.manual_seed(100 + seed)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        assert keep is not None, "every stage gets it"
        if self.first:
            x = self.embed(x)
        for layer in self.layers.values():
            x = x + torch.tanh(layer(x)) * keep.unsqueeze(-1)
        return self.head(x) if self.last else x


def batch_of(iteration: int, replica: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, target = make_batch(1000 * replica + iteration, 8)
    return tokens, target, (tokens % 3 > 0).float()


def replicated(
    context: TrainerContext, per_rank: int, placement: Any, folder: str, until: int
) -> tuple[list[float], dict[str, Tensor], list[float]]:
    """Two replicas of a pipeline of two ranks: losses, norms and evaluations; what is left of the
    gradients; and where it began."""
    place = context.coordinate(2 * per_rank, per_rank, placement)
    found = []
    with Pipeline(
        lambda part: Piece(part, seed=place.replica),
        context=context, loss_fn=loss_fn, microbatches=4, stages=2 * per_rank,
        stages_per_rank=per_rank, placement=placement,
        tied=[("embed.weight", 0), ("head.weight", -1)],
        optimizer=lambda modules: torch.optim.AdamW(modules.parameters(), lr=0.05),
        checkpoint=Checkpoint(directory=folder, every=2), deadline_seconds=30.0,
    ) as pipe:  # fmt: skip
        for iteration in range(pipe.start_iteration, until):
            tokens, target, keep = batch_of(iteration, place.replica)
            loss = pipe.step(tokens, keep=keep, target=target)
            norm = pipe.clip_grad_norm_(1e9)
            pipe.optimizer.step()
            gradients = {
                name: p.grad.clone()
                for module in pipe.modules.values()
                for name, p in module.named_parameters()
                if p.grad is not None
            }
            pipe.optimizer.zero_grad()
            found += [float(loss), float(norm)]
            found.append(float(pipe.evaluate(tokens, keep=keep, target=target)))
        return found, gradients, [pipe.start_iteration]


def one_process(until: int) -> tuple[list[float], dict[str, Tensor]]:
    """The same in one process: the replicas one after the other, and their mean."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    stages = [Piece(Part(stage, 4)) for stage in range(4)]
    parameters = {n: p for stage in stages for n, p in stage.named_parameters()}
    parameters["head.weight"].data.copy_(parameters["embed.weight"])
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.05)
    found = []

    def run(iteration: int, replica: int, *, train: bool) -> float:
        total = 0.0
        chunks = (each.chunk(4) for each in batch_of(iteration, replica))
        for tokens, target, keep in zip(*chunks, strict=True):
            value = tokens
            for stage in stages:
                value = stage(value, keep=keep)
            loss = loss_fn(value, target)
            total += float(loss.detach())
            if train:
                (loss / 4).backward()
        return total / 4

    for iteration in range(until):
        losses, each = [], []
        for replica in range(2):
            losses.append(run(iteration, replica, train=True))
            each.append({n: p.grad for n, p in parameters.items() if p.grad is not None})
            optimizer.zero_grad()
        means = {n: (each[0][n] + each[1][n]) / 2 for n in parameters}
        tied = means["embed.weight"] + means["head.weight"]
        means |= {"embed.weight": tied, "head.weight": tied}
        for name, parameter in parameters.items():
            parameter.grad = means[name].clone()
        counted = [g for name, g in means.items() if name != "head.weight"]
        norm = torch.nn.utils.get_total_norm(counted)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            again = [run(iteration, replica, train=False) for replica in range(2)]
        found += [float(torch.tensor(sum(losses) / 2)), float(norm)]
        found.append(float(torch.tensor(sum(again) / 2)))
    torch.set_num_threads(threads)
    return found, means


@pytest.mark.parametrize("placement", ["v", "interleaved"])
def test_replicas_with_all_that_a_loop_needs(placement: str, tmp_path: Path) -> None:
    """2 stages on each of 2 ranks × 2 replicas: keyword arguments, tied weights (in a V on one
    rank), the norm, evaluations and checkpoints. Losses, evaluations and gradients equal those of
    one process to the bit; the norm adds up stage by stage."""
    expected, gradients = one_process(4)
    found = run_ranks(4, replicated, 2, placement, str(tmp_path), 4)
    if placement == "v":
        # Goes on where it was cut, with one stage per rank.
        shutil.rmtree(tmp_path / "iteration-00000004")
        found += run_ranks(4, replicated, 1, "interleaved", str(tmp_path), 4)
    for rank, (values, mine, (began,)) in enumerate(found):
        assert began == (0 if rank < 4 else 2)
        wanted = expected[3 * began :]
        assert values[0::3] == wanted[0::3] and values[2::3] == wanted[2::3]
        assert values[1::3] == pytest.approx(wanted[1::3], rel=1e-5)
        for name, value in mine.items():
            same_bits(value, gradients[name], f"rank {rank}: {name}")


def breaking(context: TrainerContext, job: Job, how: str) -> None:
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
        placement="v", policy="zero-bubble-v", deadline_seconds=job.deadline,
    ) as pipe:  # fmt: skip
        for iteration in range(3):
            tokens, target = make_batch(iteration, job.batch * job.microbatches)
            pipe.step(tokens, target=target)
            if iteration == 0:
                # After the self-test, which runs the stage as well.
                runs = job.microbatches
                next(iter(pipe.modules.values())).register_forward_hook(hook)


@pytest.mark.parametrize("how", ["kill", "raise", "hang"])
def test_a_rank_that_breaks_is_named(how: str) -> None:
    """The other rank ends soon, and says which message of which stage it missed."""
    job = Job(4, 4, deadline=4.0 if how == "hang" else 30.0)
    ranks = Ranks(2, breaking, job, how)
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
    online = replace(make_plan("zero-bubble-v", 2, 4, 4), dispatch=Dispatch.ONLINE)
    with pytest.raises(InputError, match="dispatch online; ranks with several stages need static"):
        check_plan(online, mesh)
