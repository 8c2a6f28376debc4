"""``split_backward`` behind torch's own schedules: the bits of a whole backward, at its price.

One launch per number of ranks runs every case, since a start of ranks costs more than a case.
"""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gate import same_bits
from launch import run_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    _PipelineScheduleRuntime,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from pipemorph.planning import Link, Policy, Problem, StageTimes, plan
from pipemorph.planning.formats.torch_csv import dump_csv
from pipemorph_trainer import TrainerContext
from pipemorph_trainer.torch import split_backward

WIDTH, BATCH, MICROBATCHES = 16, 3, 4


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


class Block(nn.Module):
    """``recompute``: none, full or selective activation checkpointing. Counts its forwards."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.recompute = recompute
        self.forwards = 0

    def compute(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute == "none":
            return self.compute(x)
        context: Any = {}
        if self.recompute == "selective":
            make = partial(create_selective_checkpoint_contexts, keep_products)
            context = {"context_fn": make}
        return checkpoint(self.compute, x, use_reentrant=False, **context)


class Part(nn.Module):
    """Stage; the last one has a norm, and a head that its loss applies."""

    def __init__(self, index: int, stages: int, recompute: str) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.blocks = nn.Sequential(Block(recompute), Block(recompute))
        self.last = index == stages - 1
        if self.last:
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        return self.norm(x) if self.last else x


class Chunked(torch.autograd.Function):
    """A loss that has its gradient for its input already, as torchtitan's chunked loss."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (saved,) = ctx.saved_tensors
        return saved * grad, None, None


def plain_loss(head: nn.Module, hidden: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(head(hidden), target)


def chunked_loss(head: nn.Module, hidden: Tensor, target: Tensor) -> Tensor:
    """The head and the loss in two parts, each with its own backward at once."""
    total, grads = torch.zeros(()), []
    for part, wanted in zip(hidden.detach().chunk(2, -2), target.chunk(2, -2), strict=True):
        leaf = part.clone().requires_grad_(hidden.requires_grad)
        loss = nn.functional.mse_loss(head(leaf), wanted) / 2
        if hidden.requires_grad:
            loss.backward()
            assert leaf.grad is not None
            grads.append(leaf.grad)
        total = total + loss.detach()
    if not grads:
        return total
    return Chunked.apply(hidden, total, torch.cat(grads, -2))


LOSSES = {"plain": plain_loss, "chunked": chunked_loss}


def planned(stages: int, fused: bool) -> str:
    """The compute-only CSV of a plan, as ``pipemorph plan --out plan.csv`` writes it."""
    problem = Problem(
        microbatches=MICROBATCHES,
        stages=(StageTimes(forward=10, backward_input=10, backward_weight=10),) * stages,
        links=(Link(delay=20),) * (stages - 1),
        policy=Policy.ONE_F_ONE_B if fused else Policy.PIPEMORPH,
    )
    return dump_csv(plan(problem).schedule)


def of_plan(folder: str, fused: bool) -> Callable[..., PipelineScheduleMulti]:
    def make(stages: list[PipelineStage], *args: Any, **kwargs: Any) -> PipelineScheduleMulti:
        runtime = _PipelineScheduleRuntime(stages, *args, **kwargs)  # type: ignore[arg-type]
        file = Path(folder) / f"{fused}-{dist.get_rank()}.csv"
        file.write_text(planned(stages[0].num_stages, fused))
        runtime._load_csv(str(file))
        return runtime

    return make


def train(
    schedule_class: Any, indices: list[int], stages: int, case: tuple[str, str], *, split: bool
) -> tuple[dict[str, Tensor], int, list[Any]]:
    """Gradients after two steps, the forwards of one block, and the builders."""
    recompute, loss = case
    parts = [Part(index, stages, recompute) for index in indices]
    builders = [split_backward(part) if split else None for part in parts]
    mine = [
        PipelineStage(part, index, stages, torch.device("cpu"), dw_builder=builder)
        for part, index, builder in zip(parts, indices, builders, strict=True)
    ]
    heads = [part.head for part in parts if part.last]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return LOSSES[loss](heads[0], output, target)

    schedule = schedule_class(mine, MICROBATCHES, loss_fn=loss_fn)
    grads: dict[str, Tensor] = {}
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(BATCH * MICROBATCHES, 4, WIDTH, generator=generator)
        target = torch.randn(BATCH * MICROBATCHES, 4, 5, generator=generator)
        for part in parts:
            part.zero_grad()
            for block in part.blocks:
                block.forwards = 0
        schedule.step(*([x] if 0 in indices else []), target=target if heads else None)
        grads.update(
            (f"{step} {index} {name}", parameter.grad.clone())
            for part, index in zip(parts, indices, strict=True)
            for name, parameter in part.named_parameters()
            if parameter.grad is not None
        )
    return grads, parts[0].blocks[0].forwards, builders


def cases(context: TrainerContext, folder: str) -> Iterator[str]:
    """Errors of cases, on one rank of two."""
    dist.init_process_group("gloo", rank=context.rank, world_size=2,
        init_method=f"tcp://{context.master_addr}:{context.master_port}")  # fmt: skip
    rank = context.rank
    looped, single, vee = [rank, rank + 2], [rank], [rank, 3 - rank]
    schedules = {
        "looped": (ScheduleInterleavedZeroBubble, ScheduleInterleaved1F1B, looped, 4),
        "V": (ScheduleZBVZeroBubble, None, vee, 4),
        "plan": (of_plan(folder, False), of_plan(folder, True), single, 2),
    }
    for name, (apart, whole, indices, stages) in schedules.items():
        for recompute, loss in [
            ("none", "plain"), ("full", "plain"), ("selective", "plain"), ("none", "chunked"),
        ]:  # fmt: skip
            if name != "plan" and loss == "chunked":
                continue
            found, forwards, builders = train(apart, indices, stages, (recompute, loss), split=True)
            if whole is None:
                # torch's own split, since there is no schedule of this placement without it.
                if recompute == "selective":
                    continue
                wanted, _, _ = train(apart, indices, stages, (recompute, loss), split=False)
            else:
                wanted, usual, _ = train(whole, indices, stages, (recompute, loss), split=False)
                if forwards != usual:
                    yield f"{name} {recompute} {loss}: {forwards} forwards, not {usual}"
            if found.keys() != wanted.keys():
                yield f"{name} {recompute} {loss}: {found.keys() ^ wanted.keys()}"
            # torch's inference of shapes before the first step runs a chunked loss, and so leaves
            # a gradient of uninitialized memory.
            unsound = "0 1 head.weight" if loss == "chunked" else ""
            wrong = [
                key for key in found if key != unsound and not torch.equal(found[key], wanted[key])
            ]
            if wrong:
                yield f"{name} {recompute} {loss}: {wrong} differ"
            names = {f"blocks.{b}.{layer}.{p}" for b in "01" for layer in ("up", "down")
                     for p in ("weight", "bias")}  # fmt: skip
            for builder in builders:
                if builder.deferred - {"head.weight"} != names:
                    yield f"{name} {recompute} {loss}: deferred {sorted(builder.deferred)}"
    dist.destroy_process_group()


def all_cases(context: TrainerContext, folder: str) -> list[str]:
    return list(cases(context, folder))


@pytest.mark.full
def test_bits_of_a_whole_backward_at_its_price(tmp_path: Path) -> None:
    assert run_ranks(2, all_cases, str(tmp_path)) == [[], []]


def test_a_backward_outside_the_stage_is_whole() -> None:
    module = Part(0, 2, "none")
    builder = split_backward(module)
    x = torch.randn(2, 4, WIDTH)
    module(x).sum().backward()
    other = Part(0, 2, "none")
    other(x).sum().backward()
    for mine, its in zip(module.parameters(), other.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        same_bits(mine.grad, its.grad)
    builder.close()


@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_a_plain_module(make: Callable[[nn.Module], nn.Module]) -> None:
    linear = nn.Sequential(nn.Linear(2, 2))
    builder = split_backward(linear)
    other = make(linear)
    with torch.no_grad():
        other[0].weight.zero_()  # type: ignore[index, operator, union-attr]
        other[0].bias.zero_()  # type: ignore[index, operator, union-attr]
    assert not other(torch.ones(1, 2)).any()
    assert builder
    linear(torch.ones(1, 2)).sum().backward()
    other(torch.ones(1, 2)).sum().backward()
    assert linear[0].weight.grad is None
    assert all(parameter.grad is not None for parameter in other.parameters())
    builder()()
    assert linear[0].weight.grad is not None


def test_a_wrapped_forward_is_deferred() -> None:
    """torchtitan wraps the forwards of its Linears so."""
    linear, other = nn.Linear(3, 2), nn.Linear(3, 2)
    other.load_state_dict(linear.state_dict())
    own = linear.forward
    linear.forward = lambda x: own(2 * x) + 1  # type: ignore[method-assign]
    builder = split_backward(linear)
    x = torch.randn(4, 3)
    assert builder
    linear(x).square().sum().backward()
    assert linear.weight.grad is None
    builder()()
    (other(2 * x) + 1).square().sum().backward()
    assert builder.deferred == {"weight", "bias"}
    for mine, its in zip(linear.parameters(), other.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        same_bits(mine.grad, its.grad)


def test_its_report_says_what_waits() -> None:
    module = nn.Sequential(nn.Embedding(3, 4), nn.LayerNorm(4))
    builder = split_backward(module)
    out = module(torch.tensor([1, 2]))
    assert builder
    out.sum().backward()
    builder()()
    assert builder.build_report().deferred == ("0.weight",)
    assert (
        builder.build_report().not_deferred["1.weight"]
        == "of a LayerNorm, without a gradient so far"
    )


def test_torchs_functions_are_given_back() -> None:
    own = nn.functional.linear
    builders = [split_backward(nn.Linear(2, 2)) for _ in range(2)]
    assert nn.functional.linear is not own
    builders[0].close()
    builders[0].close()
    assert nn.functional.linear is not own
    builders.clear()
    gc.collect()
    assert nn.functional.linear is own
