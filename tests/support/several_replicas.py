"""Training of two replicas of a pipeline whose ranks have several stages, with all that a loop
needs: keyword arguments, tied weights, the gradient norm, evaluations and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from gate import same_bits
from torch import Tensor, nn
from trainer_jobs import VOCABULARY, WIDTH, loss_fn, make_batch

from pipemorph.planning import Plan
from pipemorph.spec.sections.trainer import Checkpoint
from pipemorph_trainer import ModelShard, Pipeline, TrainerContext

ITERATIONS = 4


class Piece(nn.Module):
    """Layers of a small language model, named by their place in it."""

    def __init__(self, part: ModelShard, seed: int = 0) -> None:
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
    context: TrainerContext,
    per_rank: int,
    placement: Any,
    folder: str,
    moved: Plan | None = None,
    **arguments: Any,
) -> tuple[list[float], dict[str, Tensor], list[float]]:
    """Train two replicas of a pipeline of two ranks: losses, norms and evaluations; the remaining
    gradients; and where it began. ``moved``: a plan that comes before the second iteration."""
    place = context.coordinate(2 * per_rank, per_rank, placement)
    found = []
    with Pipeline(
        lambda part: Piece(part, seed=place.replica),
        context=context, loss_fn=loss_fn, microbatches=4, stages=2 * per_rank,
        stages_per_rank=per_rank, placement=placement,
        tied=[("embed.weight", 0), ("head.weight", -1)],
        optimizer=lambda modules: torch.optim.AdamW(modules.parameters(), lr=0.05),
        checkpoint=Checkpoint(directory=folder, every=2), deadline_seconds=30.0, **arguments,
    ) as pipe:  # fmt: skip
        for iteration in range(pipe.start_iteration, ITERATIONS):
            if moved is not None and iteration == 1:
                pipe.install_plan(moved)
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
        assert moved is None or pipe.plan.version == moved.version
        return found, gradients, [pipe.start_iteration]


def one_process() -> tuple[list[float], dict[str, Tensor]]:
    """Train in one process: the replicas one after the other, and their mean."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    stages = [Piece(ModelShard(stage, 4)) for stage in range(4)]
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

    for iteration in range(ITERATIONS):
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


def assert_as_one_process(found: Sequence[Any], began: Sequence[int]) -> None:
    """Losses, evaluations and gradients equal those of one process to the bit; the norm adds up
    stage by stage. ``began``: the first iteration, by group of four ranks."""
    expected, gradients = one_process()
    for rank, (values, mine, (first,)) in enumerate(found):
        assert first == began[rank // 4]
        wanted = expected[3 * first :]
        assert values[0::3] == wanted[0::3] and values[2::3] == wanted[2::3]
        assert values[1::3] == pytest.approx(wanted[1::3], rel=1e-5)
        for name, value in mine.items():
            same_bits(value, gradients[name], f"rank {rank}: {name}")
