"""A step that does not wait for the gradient norm of all stages has the bits of one that does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gate import same_bits
from launch import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from trainer_jobs import Job, Stage, loss_fn, make_batch, make_plan

from pipemorph.api.sections.trainer import Checkpoint
from pipemorph.errors import InputError
from pipemorph_trainer import GradScaler, Pipeline, TrainerContext
from pipemorph_trainer.agent.messages import NoControl, RankTelemetry
from pipemorph_trainer.topology.mesh import join_process_group
from pipemorph_trainer.topology.placement import local

N, NEVER, ALWAYS = 6, 1e9, 1e-2
BOUNDS = (NEVER, NEVER, ALWAYS, ALWAYS, NEVER, NEVER, ALWAYS, NEVER)
"""Most norm after each iteration. Steps 1, 2, 5 and 6 do not wait; 2 and 6 are taken again."""
TAKEN_AGAIN, OVERFLOW = 2, 5
"""With a scaler 5 is taken again in place of 6."""
SECONDS = 30.0


class Noisy(Stage):
    """A stage whose forwards change random state, a buffer and an attribute."""

    def __init__(self, index: int, stages: int) -> None:
        super().__init__(index, stages)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor, mask: Tensor | None = None, unused: Any = None) -> Any:
        self.calls += 1
        self.seen += self.up.weight.detach().sum() if type(self.up.weight) is nn.Parameter else 1
        ran.append(self.calls)
        for tell in when_it_runs:
            tell()
        out = super().forward(x, mask, unused)
        if self.last:
            return nn.functional.dropout(out, 0.1)
        return (nn.functional.dropout(out[0], 0.1), *out[1:])


ran: list[int] = []
"""A call of a stage's forward each, also of those that were undone."""
when_it_runs: list[Callable[[], None]] = []
"""Called in a stage's forward."""


@dataclass(frozen=True)
class Case:
    """``mesh``: its sizes by dimension."""

    mesh: dict[str, int]
    optimizer: str = "adamw"
    scaled: bool = False
    per_rank: int = 1
    dispatch: str = "static"
    policy: str = "zero-bubble"
    route: str = "direct"
    between: bool = False
    """Whether an evaluation and a checkpoint follow on each step."""


@dataclass
class Found:
    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor | None] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    state: list[Tensor] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    forwards: int = 0
    barriers: list[bool | None] = field(default_factory=list)


class Told(NoControl):
    """Keeps whether iterations ended with a barrier."""

    def __init__(self, barriers: list[bool | None]) -> None:
        self._barriers = barriers

    def publish(self, telemetry: RankTelemetry) -> None:
        if telemetry.finished_iteration is not None:
            self._barriers.append(telemetry.finished_iteration.barrier)


def optimizer_of(kind: str, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    held = list(parameters)
    if kind == "sgd":
        groups = [{"params": held[::2]}, {"params": held[1::2], "lr": 0.03, "weight_decay": 0.1}]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
    how = {"foreach": True} if kind == "foreach" else {}
    lr: Any = 1e-2
    if kind == "fused":
        how, lr = {"fused": True}, torch.tensor(1e-2)
    return torch.optim.AdamW(held, lr=lr, weight_decay=0.1, **how)


def distributed(module: Stage, mesh: Any) -> Stage:
    if "tp" in mesh.mesh_dim_names:
        parallelize_module(module, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if "dp_shard" in mesh.mesh_dim_names:
        fully_shard(module, mesh=mesh["dp_shard"])
    return module


def train(context: TrainerContext, case: Case, optimistic: bool, folder: str) -> Found:
    found = Found()
    join_process_group(context, torch.device("cpu"))
    mesh = init_device_mesh("cpu", tuple(case.mesh.values()), mesh_dim_names=tuple(case.mesh))
    ran.clear()
    stages = case.mesh["pp"] * case.per_rank

    def build(part: Any) -> nn.Module:
        torch.manual_seed(100 + part.stage)
        return distributed(Noisy(part.stage, stages), mesh)

    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2) if case.scaled else None
    plan = None
    if case.per_rank == 1:
        plan = make_plan(Job(stages, N), 0, case.policy, dispatch=case.dispatch)
    saves = Checkpoint(directory=folder, every=1, keep=2) if case.between else None
    data = mesh.get_local_rank("dp_replicate") if "dp_replicate" in case.mesh else 0
    with Pipeline(
        build, context=context, loss_fn=loss_fn, microbatches=N, mesh=mesh, plan=plan,
        optimizer=lambda module: optimizer_of(case.optimizer, module.parameters()),
        stages_per_rank=case.per_rank, checkpoint=saves, scaler=scaler, deadline_seconds=SECONDS,
        route=case.route, control=Told(found.barriers),
    ) as pipe:  # fmt: skip
        optimizer = pipe.optimizer
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        torch.manual_seed(5)
        for iteration, bound in enumerate(BOUNDS):
            tokens, target = make_batch(1000 * data + iteration, 2 * N)
            if iteration == 1:
                # The self-test is over. How often it runs a stage depends on the time that takes.
                ran.clear()
            found.losses.append(pipe.step(tokens, target=target))
            if scaler is not None:
                found.scales.append(scaler.get_scale())
                if iteration == OVERFLOW and context.rank == 0:
                    first = next(iter(pipe.modules.values())).get_parameter("scale")
                    assert first.grad is not None
                    first.grad[0] = torch.inf
            if optimistic:
                pipe.clip_and_step(optimizer, bound)
                assert all(p.grad is None for g in optimizer.param_groups for p in g["params"])
            else:
                if scaler is not None:
                    scaler.unscale_(optimizer)
                found.norms.append(pipe.clip_grad_norm_(bound))
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
            optimizer.zero_grad(set_to_none=False)
            schedule.step()
            if case.between:
                found.losses.append(pipe.evaluate(tokens, target=target))
            if optimistic and (case.between or iteration == len(BOUNDS) - 1):
                found.norms.append(pipe.settle())
        modules = pipe.modules
    found.forwards = len(ran)
    for module in modules.values():
        found.values += [local(v).clone() for v in (*module.parameters(), *module.buffers())]
        found.values.append(torch.tensor(module.calls))
    for state in optimizer.state.values():
        found.state += [local(v).clone() for v in state.values() if isinstance(v, Tensor)]
    return found


def both(context: TrainerContext, case: Case, folder: str) -> tuple[Found, Found]:
    return (
        train(context, case, False, f"{folder}/waiting"),
        train(context, case, True, f"{folder}/optimistic"),
    )


def same(found: Sequence[Tensor], wanted: Sequence[Tensor], what: str) -> None:
    assert len(found) == len(wanted), what
    for index, (mine, its) in enumerate(zip(found, wanted, strict=True)):
        same_bits(mine, its, f"{what} {index}")


CASES = {
    "AdamW": Case({"pp": 3}),
    "SGD with momentum": Case({"pp": 2}, optimizer="sgd", policy="gpipe"),
    "fused AdamW": Case({"pp": 2}, optimizer="fused", policy="1f1b"),
    "foreach AdamW, replicas": Case({"dp_replicate": 2, "pp": 2}, optimizer="foreach"),
    "FSDP": Case({"pp": 2, "dp_shard": 2}),
    "tensor parallel": Case({"pp": 2, "tp": 2}),
    "scaler": Case({"pp": 2}, scaled=True),
    "several stages per rank": Case({"pp": 2}, per_rank=2),
    "online, delegated": Case({"pp": 2}, dispatch="online", route="delegated"),
    "evaluation and checkpoint between": Case({"pp": 2}, between=True),
}


IN_MAKE_TEST = {"AdamW", "scaler"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.full] * (each not in IN_MAKE_TEST)) for each in CASES],
)
def test_it_has_the_bits_of_a_step_that_waits(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    world = 1
    for size in case.mesh.values():
        world *= size
    for rank, (waiting, found) in enumerate(run_ranks(world, both, case, str(tmp_path))):
        same(found.losses, waiting.losses, f"rank {rank}: loss")
        same(found.values, waiting.values, f"rank {rank}: parameter")
        same(found.state, waiting.state, f"rank {rank}: state")
        assert found.scales == waiting.scales
        its = waiting.norms if case.between else waiting.norms[-1:]
        same(found.norms, its, f"rank {rank}: norm")  # type: ignore[arg-type]
        more = found.forwards - waiting.forwards
        if case.between:
            assert more == 0, "it was settled before any forward"
        else:
            assert more >= TAKEN_AGAIN, "forwards ran before the norm was known, and again"
        if name == "AdamW" and rank == 2:
            assert more == TAKEN_AGAIN, "no backward ran: its warm-up is one forward"
        if rank == 0 and not case.between:
            assert not all(found.barriers)
            assert all(waiting.barriers)


def go_on(context: TrainerContext, folder: str) -> list[float | None]:
    """Norms. The last stage ends its second iteration when the first has begun its third."""
    store = dist.FileStore(f"{folder}/store", 2)
    module = Noisy(context.rank, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    norms = []
    with Pipeline(
        module, context=context, loss_fn=loss_fn, microbatches=N, stages=2, deadline_seconds=SECONDS
    ) as pipe:
        for iteration in range(3):
            tokens, target = make_batch(iteration, 2 * N)
            pipe.step(tokens, target=target)
            if iteration == 1 and context.rank == 0:
                when_it_runs.append(lambda: store.set("forward", ""))
            elif iteration == 1:
                store.wait(["forward"], timedelta(seconds=SECONDS))
            pipe.clip_and_step(optimizer, NEVER)
        norms.append(pipe.settle())
        with pipe.no_sync():
            pipe.step(tokens, target=target)
        with pytest.raises(InputError, match="after a step in no_sync"):
            pipe.clip_and_step(optimizer, NEVER)
    return [None if norm is None else float(norm) for norm in norms]


def test_the_next_iteration_begins_before_all_stages_have_ended_this_one(tmp_path: Path) -> None:
    first, last = run_ranks(2, go_on, str(tmp_path))
    assert first == last
    assert first[0] > 0
