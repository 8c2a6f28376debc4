"""``AdaptiveSchedule`` over torch's own stages: the bits of ``Schedule1F1B``, while it adapts.

One launch runs several cases, since a start of ranks costs more than a case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from launch import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from trainer_jobs import Job, make_plan

from pipemorph.errors import InputError
from pipemorph.planning import Route
from pipemorph.spec.sections.faults import Fault
from pipemorph_trainer import Options, TrainerContext
from pipemorph_trainer.topology.mesh import join_process_group
from pipemorph_trainer.torch import AdaptiveSchedule, SplitBackward

pytestmark = [pytest.mark.needs_engine]

WIDTH, BATCH, MICROBATCHES, STEPS = 8, 2, 4, 6
COSTS = [1.0, 5.0, 2.0, 1.0]

LINEARS = {f"{layer}.{parameter}" for layer in ("up", "down") for parameter in ("weight", "bias")}


class Part(nn.Module):
    """Stage with two outputs, one of which gets no gradient, and with dropout."""

    def __init__(self, index: int, stages: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.first, self.last = index == 0, index == stages - 1
        if self.first:
            self.embedding = nn.Embedding(11, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        if self.last:
            self.head = nn.Linear(WIDTH, 11, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: Tensor) -> Any:
        if self.first:
            mask = (x % 2).to(torch.int32)
            x = self.embedding(x)
        hidden = nn.functional.gelu(self.up(self.norm(x))) * (1 + mask.unsqueeze(-1))
        x = x + self.drop(self.down(hidden)) * scale.mean()
        return self.head(x) if self.last else (x, mask)


def loss_fn(output: Tensor, target: Tensor, *, weight: float = 1.0) -> Tensor:
    return weight * nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 11, (BATCH * MICROBATCHES, 5), generator=generator)
    scale = torch.rand(BATCH * MICROBATCHES, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), scale


@dataclass
class Seen:
    """Results of one run of one rank."""

    losses: list[list[float]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    evaluated: list[Any] = field(default_factory=list)
    plans: list[int] = field(default_factory=list)
    orders: list[tuple[int, ...]] = field(default_factory=list)
    deferred: frozenset[str] = frozenset()


def train(context: TrainerContext, make: Callable[..., Any], **more: Any) -> Seen:
    """Train one stage for some steps with a schedule of ``make(stages, n, loss_fn)``; evaluate
    after the second."""
    part = Part(context.rank, context.world_size)
    stage = PipelineStage(part, context.rank, context.world_size, torch.device("cpu"))
    return train_stage(part, stage, make, **more)


def train_stage(
    part: Any,
    stage: PipelineStage,
    make: Callable[..., Any],
    orders: Sequence[tuple[int, ...]] = (),
    **more: Any,
) -> Seen:
    """Train. ``orders``: of the microbatches that the schedule gets in each step."""
    schedule = make(stage, MICROBATCHES, loss_fn, **more)
    optimizer = torch.optim.AdamW(part.parameters(), 1e-2)
    adapts = isinstance(schedule, AdaptiveSchedule)
    seen = Seen()
    x, target, scale = batch(100)
    losses: list[Tensor] = []
    last: dict[str, Any] = {"target": target, "losses": losses} if part.last else {}
    part.eval()
    # Before the first step, and under the caller's grad mode.
    found = schedule.eval(*([x] if part.first else []), scale=scale, **last)
    seen.evaluated.append((found, [loss.item() for loss in losses]))
    part.train()
    torch.manual_seed(99)
    for step in range(STEPS):
        x, target, scale = batch(step)
        losses = []
        last = {"target": target, "losses": losses} if part.last else {}
        if adapts and step == 1:
            routes = (Route.DELEGATED,) * (stage.num_stages - 1)
            schedule.pipeline.install_plan(
                make_plan(Job(stage.num_stages, MICROBATCHES), 7, "pipemorph", routes=routes)
            )
        optimizer.zero_grad()
        costs = {"costs": COSTS} if adapts and part.first else {}
        inputs, own, factors = [x] if part.first else [], last, scale
        if order := orders[step] if orders else ():
            rows = torch.arange(len(x)).view(MICROBATCHES, -1)[list(order)].flatten()
            inputs, factors = [each[rows] for each in inputs], scale[rows]
            own = last | {"target": target[rows]} if part.last else {}
        out = schedule.step(*inputs, scale=factors, loss_kwargs={"weight": 0.5}, **own, **costs)
        if order and part.last:
            losses[:] = [losses[order.index(m)] for m in range(MICROBATCHES)]
            out = out[rows.argsort()]
        if adapts:
            seen.orders.append(schedule.pipeline.microbatch_order)
        seen.losses.append([loss.item() for loss in losses])
        seen.outputs.append(out)
        seen.grads.append(
            {n: p.grad.clone() for n, p in part.named_parameters() if p.grad is not None}
        )
        if adapts:
            seen.plans.append(schedule.pipeline.plan.version)
            assert schedule.pipeline._call_runner.had_barrier() is None, (
                "what follows a step is the script's"
            )
        optimizer.step()
        if step == 2:
            state = torch.get_rng_state()
            part.eval()
            with torch.no_grad():
                found = schedule.eval(*([x] if part.first else []), scale=scale, **last)
            seen.evaluated.append((found, [loss.item() for loss in losses]))
            part.train()
            torch.set_rng_state(state)
    if adapts:
        if schedule.pipeline.split == "deferred":
            assert isinstance(stage.dw_builder, SplitBackward)
            seen.deferred = stage.dw_builder.deferred - {"head.weight", "embedding.weight"}
        schedule.close()
    return seen


def same(a: Any, b: Any) -> bool:
    if isinstance(a, DTensor):
        return isinstance(b, DTensor) and torch.equal(a.to_local(), b.to_local())
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def adaptive(stage: PipelineStage, *args: Any, **kwargs: Any) -> AdaptiveSchedule:
    return AdaptiveSchedule(stage, *args, deadline_seconds=30.0, **kwargs)


def compare(context: TrainerContext) -> list[str]:
    return list(differences(context))


def differences(context: TrainerContext) -> Iterator[str]:
    join_process_group(context, torch.device("cpu"))
    wanted = train(context, Schedule1F1B)
    job = Job(context.world_size, MICROBATCHES)
    cases: dict[str, dict[str, Any]] = {
        "as it comes": {},
        "whole backward": {"split": "fused"},
        "1f1b": {"plan": make_plan(job, 0, "1f1b")},
        "slow link": {
            "plan": make_plan(job, 0, "pipemorph", delay=5.0),
            "options": Options(faults=[Fault(link=0, delay_ms=20.0)]),
        },
    }
    for name, options in cases.items():
        found = train(context, partial(adaptive, context=context), **options)
        for what in ("losses", "outputs", "grads", "evaluated"):
            if not same(getattr(found, what), getattr(wanted, what)):
                yield f"{name}: {what} differ"
        # The plan is in force when stage 0 knows that the others hold it.
        if found.plans != sorted(found.plans) or found.plans[0] or found.plans[-3:] != [7] * 3:
            yield f"{name}: plans {found.plans}"
        if found.deferred != (frozenset() if name == "whole backward" else LINEARS):
            yield f"{name}: deferred {found.deferred}"


def compare_ordered(context: TrainerContext) -> list[str]:
    join_process_group(context, torch.device("cpu"))
    found = train(context, partial(adaptive, context=context), options=Options(reorder="sums"))
    assert any(found.orders), "the planner found no better order for any step"
    wanted = train(context, Schedule1F1B, orders=found.orders)
    return [
        what
        for what in ("losses", "outputs", "grads", "evaluated")
        if not same(getattr(found, what), getattr(wanted, what))
    ]


def test_in_the_planned_order_they_are_those_of_1f1b_over_a_batch_in_that_order() -> None:
    """Results are still those of their own microbatches."""
    assert run_ranks(2, compare_ordered) == [[]] * 2


@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.full), 3])
def test_losses_and_gradients_are_those_of_1f1b(stages: int) -> None:
    assert run_ranks(stages, compare) == [[]] * stages


def sharded_part(mesh: DeviceMesh, case: str) -> tuple[Part, PipelineStage]:
    index = mesh.get_local_rank("pp")
    part = Part(index, 2)
    options: dict[str, Any] = {"mesh": mesh["dp_shard"], "reshard_after_forward": case == "reshard"}
    if case == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully_shard([part.up, part.down], **options)
    fully_shard(part, **options)
    return part, PipelineStage(part, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))


def compare_sharded(context: TrainerContext) -> list[str]:
    join_process_group(context, torch.device("cpu"))
    lines = []
    for names in (("pp", "dp_shard"), ("dp_shard", "pp")):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        for case in ("gathered", "reshard", "mixed") if names[0] == "pp" else ("gathered",):
            wanted = train_stage(*sharded_part(mesh, case), Schedule1F1B)
            make = partial(adaptive, context=context, mesh=mesh)
            found = train_stage(*sharded_part(mesh, case), make)
            lines += [
                f"{names} {case}: {what} differ"
                for what in ("losses", "outputs", "grads", "evaluated")
                if not same(getattr(found, what), getattr(wanted, what))
            ]
            if found.plans[-1] != 7 or found.deferred != LINEARS:
                lines.append(f"{names} {case}: plans {found.plans}, deferred {found.deferred}")
    return lines


@pytest.mark.full
def test_stages_may_be_sharded_by_fsdp2() -> None:
    assert run_ranks(4, compare_sharded) == [[]] * 4


def misfits(context: TrainerContext) -> list[str]:
    join_process_group(context, torch.device("cpu"))
    part = Part(context.rank, 2)
    stage = PipelineStage(part, 1 - context.rank, 2, torch.device("cpu"))
    wrapped = PipelineStage(DistributedDataParallel(nn.Linear(2, 2)), 0, 2, torch.device("cpu"))
    errors = []
    for make in (
        lambda: AdaptiveSchedule([stage], 4, loss_fn, context=context),
        lambda: AdaptiveSchedule([], 4, loss_fn, context=context),
        lambda: AdaptiveSchedule([stage], 4, loss_fn, context=context, split="torch"),  # type: ignore[arg-type]
        lambda: AdaptiveSchedule([wrapped], 4, loss_fn, context=context),
    ):
        with pytest.raises(InputError) as raised:
            make()
        errors.append(str(raised.value))
    return errors


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    for errors in run_ranks(2, misfits):
        assert errors == [
            "rank 0: rank 0 (stage 0) of 2 stages was given stage 1 of 2; give each rank the stage"
            " of its place (1 other rank cannot start either)",
            "stages are: none; expected PipelineStages",
            "split is 'torch'; expected auto, fused, verify",
            "the stage has a DistributedDataParallel, which reduces gradients in its own backward;"
            " use fully_shard, or average gradients after step()",
        ]
