"""Tied weights: one weight on two stages trains, counts and is saved as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from float32_gradients import in_float32
from gate import same_bits
from launch import Ranks, run_ranks
from torch import Tensor, nn

from pipemorph.errors import InputError
from pipemorph.spec.mesh import MeshShape
from pipemorph.spec.sections.trainer import Checkpoint
from pipemorph_trainer import Pipeline, TrainerContext
from pipemorph_trainer.errors import BatchError
from pipemorph_trainer.sync import tied_weights as ties

pytestmark = [pytest.mark.timeout(400)]

VOCABULARY, WIDTH, LAYERS, N = 9, 6, 6, 4
ALONE = MeshShape().find_coordinate(0)
TIED = [("embed.weight", 0), ("head.weight", -1)]


class Part(nn.Module):
    """A stage of a small language model; all of it with one stage."""

    def __init__(self, stage: int, stages: int, seed: int = 0) -> None:
        super().__init__()
        per = LAYERS // stages
        if stage == 0:
            torch.manual_seed(100 + seed)
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict()
        for layer in range(stage * per, (stage + 1) * per):
            torch.manual_seed(layer)
            self.layers[str(layer)] = nn.Linear(WIDTH, WIDTH)
        self.first, self.last = stage == 0, stage == stages - 1
        if self.last:
            torch.manual_seed(200 + seed)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
            if self.first:
                self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.embed(x)
        for layer in self.layers.values():
            x = x + torch.tanh(layer(x))
        return self.head(x) if self.last else x


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def make_batch(iteration: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * iteration + replica)
    x = torch.randint(0, VOCABULARY, (2 * N,), generator=generator)
    return x, x.flip(0)


def train(
    context: TrainerContext,
    stages: int,
    until: int,
    folder: str | None,
    every: int = 2,
    *,
    per_rank: int = 1,
) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Losses and norms, and the tied weight by its names here. One optimizer step for two steps of
    the pipeline; a batch that does not fit between them. ``per_rank``: stages, in a V."""
    place = context.coordinate(stages, per_rank, "v")
    replica = place.replica
    module = nn.ModuleList([Part(stage, stages, seed=replica) for stage in place.held_stages])
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    found = []
    several: dict[str, Any] = {"stages_per_rank": per_rank, "placement": "v"}
    with Pipeline(
        module, context=context, loss_fn=loss_fn, microbatches=N, stages=stages,
        optimizer=optimizer, tied=TIED, deadline_seconds=30.0,
        checkpoint=Checkpoint(directory=folder, every=every) if folder else None,
        **several if per_rank > 1 else {},
    ) as pipe:  # fmt: skip
        for iteration in range(pipe.start_iteration, until):
            x, target = make_batch(iteration, replica)
            loss = pipe.step(x, target=target)
            if iteration == 2:
                before = {n: p.grad.clone() for n, p in module.named_parameters()}
                with pytest.raises(BatchError):
                    pipe.step(x[1:], target=target)
                for name, parameter in module.named_parameters():
                    same_bits(parameter.grad, before[name], name)
            if iteration % 2:
                norm = pipe.clip_grad_norm_(0.3)
                optimizer.step()
                optimizer.zero_grad(set_to_none=iteration % 4 == 1)
                found.append((float(loss), float(norm)))
    held = {n: p for each in module for n, p in each.named_parameters(remove_duplicate=False)}
    return found, {n: held[n].detach() for n, _ in TIED if n in held}


def train_in_a_v(context: TrainerContext, until: int, folder: str) -> Any:
    """Train with both holders on one rank."""
    return train(context, 2, until, folder, 100, per_rank=2)


def one_process(until: int, replicas: int) -> list[tuple[float, float]]:
    module = Part(0, 1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    found, losses = [], [0.0] * until
    for iteration in range(until):
        for replica in range(replicas):
            for x, y in zip(*(t.chunk(N) for t in make_batch(iteration, replica)), strict=True):
                loss = loss_fn(module(x), y) / N / replicas
                loss.backward()
                losses[iteration] += float(loss.detach())
        if iteration % 2:
            norm = nn.utils.clip_grad_norm_(module.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
            found.append((losses[iteration], float(norm)))
    return found


def check(results: Any, expected: list[tuple[float, float]]) -> None:
    copies = [value for _, held in results for value in held.values()]
    for found, _ in results:
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4)
    for copy in copies:
        same_bits(copy, copies[0])


def test_a_tied_weight_is_one_weight_in_training_and_in_checkpoints(tmp_path: Path) -> None:
    expected = one_process(8, 1)
    whole = run_ranks(3, train, 3, 8, None)
    check(whole, expected)
    # Saved in the middle of an accumulation, after iteration 2, and after an optimizer's step.
    run_ranks(3, train, 3, 4, str(tmp_path), 3)
    check(run_ranks(1, train_in_a_v, 6, str(tmp_path)), expected[1:3])
    check(run_ranks(1, train, 1, 6, str(tmp_path), 6), expected[1:3])
    resumed = run_ranks(3, train, 3, 8, str(tmp_path), 100)
    check(resumed, expected[3:])


@pytest.mark.full
def test_replicas_share_a_tied_weight() -> None:
    expected = one_process(6, 2)
    check(run_ranks(6, train, 3, 6, None), expected)


def test_what_cannot_be_tied_is_refused() -> None:
    a, b = ("a", 0), ("b", -1)
    assert ties.parse_ties(None, 3) == ()
    assert ties.parse_ties([a, b], 3) == ties.parse_ties([[a, b]], 3) == ((("a", 0), ("b", 2)),)
    for wrong, error in (
        ([a], "at least two"),
        ([[a, b], a], "expected at least two"),
        ("embed.weight", "expected at least two"),
        ([a, ("b", 3)], "stage 3 for 'b', expected -3 to 2"),
        ([a, ("a", -3)], "'a' of stage 0 twice"),
    ):
        with pytest.raises(InputError, match=error):
            ties.parse_ties(wrong, 3)
    two = ties.parse_ties([("0.weight", 0), ("1.weight", 0)], 1)
    with pytest.raises(InputError, match="two parameters of one stage"):
        ties.describe_tied(two, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ALONE)
    with pytest.raises(InputError, match="of stage 0, which has no such parameter"):
        ties.describe_tied(two, nn.Sequential(nn.Linear(2, 2)), ALONE)
    one = ties.parse_ties([a, b], 2)
    with pytest.raises(InputError, match=r"'a' of stage 0 is float32\[2\]; 'b' of stage 1 is"):
        ties.check_forms(one, [{(0, 0): "float32[2]"}, {(0, 1): "float32[3]"}])


class Half(nn.Module):
    """Stage of two of bfloat16. The second has ``used`` and ``unused`` of the first, which itself
    uses one of them."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.stage = stage
        in_float32(self)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.unused(self.used(x)) if self.stage else self.used(x))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(2 * N, WIDTH, generator=generator).bfloat16() for _ in range(2))  # type: ignore[return-value]


def float32_sums(context: TrainerContext) -> dict[str, Tensor | None]:
    module, (x, target) = Half(context.rank), batch()
    names = ("used.weight", "used.bias", "unused.weight")
    with Pipeline(
        module, context=context, loss_fn=nn.functional.mse_loss, microbatches=N,
        tied=[[(name, 0), (name, 1)] for name in names], deadline_seconds=30.0,
    ) as pipe:  # fmt: skip
        pipe.step(x, target=target)
    return {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.full
def test_gradients_in_float32_of_a_tied_weight_are_summed() -> None:
    """A holder may not use it."""
    stages, (x, target) = [Half(0), Half(1)], batch()
    for a, b in zip(x.chunk(N), target.chunk(N), strict=True):
        (nn.functional.mse_loss(stages[1](stages[0](a)), b) / N).backward()
    first, second = (dict(stage.named_parameters()) for stage in stages)
    for found in run_ranks(2, float32_sums):
        for name, grad in found.items():
            sole, other = first[name].grad, second[name].grad
            assert other is not None and grad is not None and grad.dtype is torch.float32
            same_bits(grad, other if sole is None else sole + other, name)


def test_holders_differ_in_the_dtype_of_their_gradients() -> None:
    tie = ties.parse_ties([("weight", 0), ("weight", 1)], 2)
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight.grad_dtype = torch.float64
    error = r"'weight' of stage 1 is float32\[2, 2\], gradients in float64"
    with pytest.raises(InputError, match=error):
        at = MeshShape(2).find_coordinate
        ties.check_forms(
            tie, [ties.describe_tied(tie, one, at(0)), ties.describe_tied(tie, other, at(1))]
        )


def untied(context: TrainerContext) -> None:
    module = nn.Sequential(nn.Linear(VOCABULARY, VOCABULARY))
    tied = None if context.rank else [("0.weight", 0), ("0.weight", 1)]
    with Pipeline(module, context=context, loss_fn=loss_fn, microbatches=N, tied=tied):
        pass


def test_ranks_have_to_tie_the_same() -> None:
    for result in Ranks(2, untied).wait():
        assert "InputError: rank 1 was given another tied= than rank 0" in result.error
