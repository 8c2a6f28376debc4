"""The sampler of balanced batches: same samples, resumed, and the loss of the whole batch."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainer_jobs import plan_with_shares

from pipemorph.errors import InputError
from pipemorph_trainer import Checkpoint, Microbatch, Options, Pipeline, TrainerContext
from pipemorph_trainer.data import BalancedBatchSampler, pack_samples, pad_microbatches
from pipemorph_trainer.data.sampler import BalancedSource

SAMPLES, BATCH, REPLICAS, MICROBATCHES = 50, 16, 2, 4
WIDTH, CAPACITY = 8, 28


def draw_lengths(count: int = SAMPLES) -> list[int]:
    rng = random.Random(1)
    return [rng.randint(2, 20) for _ in range(count)]


def make_sampler(replica: int = 0, **changes: Any) -> BalancedBatchSampler:
    arguments = {
        "batch_size": BATCH, "replicas": REPLICAS, "replica": replica,
        "microbatches": MICROBATCHES, "stages": 2, "seed": 3,
    } | changes  # fmt: skip
    return BalancedBatchSampler(draw_lengths(), **arguments)


def list_steps(sampler: BalancedBatchSampler, workers: int = 0) -> list[list[list[int]]]:
    """Samples of each microbatch of each step of the rest of the epoch."""
    loader = DataLoader(
        range(SAMPLES), batch_sampler=sampler, collate_fn=list, num_workers=workers  # type: ignore[arg-type]
    )  # fmt: skip
    return [step.microbatches for step in sampler.iterate_steps(loader)]


def test_each_step_has_the_samples_that_it_has_without_balancing() -> None:
    replicas = [list_steps(make_sampler(r)) for r in range(REPLICAS)]
    generator = torch.Generator().manual_seed(3 * 2**20)
    order = torch.randperm(SAMPLES, generator=generator).tolist()
    assert [len(steps) for steps in replicas] == [SAMPLES // BATCH] * REPLICAS
    for k, steps in enumerate(zip(*replicas, strict=True)):
        found = [sample for step in steps for each in step for sample in each]
        assert sorted(found) == sorted(order[k * BATCH : (k + 1) * BATCH])
        assert [len(step) for step in steps] == [MICROBATCHES] * REPLICAS


def test_epochs_differ_and_seeds_repeat() -> None:
    sampler, same = make_sampler(), make_sampler()
    first, second = list_steps(sampler), list_steps(sampler)
    assert first != second and sampler.step == 6
    assert [list_steps(same), list_steps(same)] == [first, second]
    assert list_steps(make_sampler(seed=4)) != first
    ordered = make_sampler(seed=None)
    assert ordered.list_samples(1) == list(range(16, 32)) == ordered.list_samples(4)


def test_costs_of_a_step_are_those_of_its_samples() -> None:
    sampler, lengths = make_sampler(1, base=2.0), draw_lengths()
    loader = DataLoader(range(SAMPLES), batch_sampler=sampler, collate_fn=list)  # type: ignore[arg-type]
    assert len(loader) == 3 * MICROBATCHES
    for step in sampler.iterate_steps(loader):
        assert step.costs == pytest.approx(
            [2.0 + sum(lengths[i] for i in each) for each in step.microbatches]
        )


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_resumes_after_the_last_step_that_was_yielded(workers: int) -> None:
    """A loader with workers has drawn ahead: no sample is lost or doubled."""
    whole = list_steps(make_sampler())
    sampler = make_sampler()
    loader = DataLoader(
        range(SAMPLES), batch_sampler=sampler, collate_fn=list, num_workers=workers,
        prefetch_factor=8 if workers else None,  # type: ignore[arg-type]
    )  # fmt: skip
    first = next(sampler.iterate_steps(loader))
    resumed = make_sampler()
    resumed.load_state_dict(sampler.state_dict())
    assert [first.microbatches, *list_steps(resumed)] == whole


def test_a_sampler_without_steps_counts_what_was_drawn() -> None:
    sampler = make_sampler()
    drawing = iter(sampler)
    for _ in range(MICROBATCHES - 1):
        next(drawing)
    assert sampler.state_dict()["step"] == 0
    next(drawing)
    assert sampler.state_dict()["step"] == 1


def test_a_sampler_resumes_with_other_replicas() -> None:
    sampler = make_sampler()
    list_steps(sampler)
    wider = make_sampler(3, replicas=4, microbatches=2)
    wider.load_state_dict(sampler.state_dict())
    assert wider.step == 3
    with pytest.raises(InputError, match="the saved sampler has batch_size 16, and this one 8"):
        make_sampler(batch_size=8).load_state_dict(sampler.state_dict())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 0}, "batch_size is 0; expected 1 to 50, the number of samples"),
        ({"batch_size": 51}, "batch_size is 51"),
        ({"batch_size": 7}, "costs are of 7 samples; 8 microbatches need at least as many"),
        ({"replica": 2}, "replica is 2; expected 0 to 1"),
    ],
)
def test_unusable_arguments_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        make_sampler(**changes)


def test_a_loader_with_another_sampler_is_refused() -> None:
    sampler = make_sampler()
    with pytest.raises(InputError, match="the loader has another sampler"):
        next(sampler.iterate_steps(DataLoader(range(SAMPLES), batch_size=4)))  # type: ignore[arg-type]


# --- a source of steps --------------------------------------------------------------------------

SHARES = [(4, 4), (2, 6), (2, 6), (4, 4), (7, 1)]


class Broken(list[int]):
    """Data set whose first sample cannot be read."""

    def __getitem__(self, index: Any) -> Any:
        if index == 0:
            raise OSError("no such sample")
        return super().__getitem__(index)


def make_source(
    replica: int, workers: int = 0, *, data: list[int] | None = None, **changes: Any
) -> tuple[BalancedBatchSampler, BalancedSource]:
    sampler = make_sampler(replica, **changes)
    loader = DataLoader(
        list(range(SAMPLES)) if data is None else data,  # type: ignore[arg-type]
        batch_sampler=sampler, collate_fn=list, num_workers=workers,
        prefetch_factor=8 if workers else None, persistent_workers=workers > 0,
    )  # fmt: skip
    return sampler, sampler.make_source(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_source_deals_to_the_numbers_of_the_plan_and_loses_no_sample(workers: int) -> None:
    """The loader has drawn ahead for other numbers when they change; then it is resumed."""
    made = [make_source(r, workers) for r in range(REPLICAS)]
    lengths = draw_lengths()
    for step, shares in enumerate(SHARES):
        if step == 2:
            states = [sampler.state_dict() for sampler, _ in made]
            made = [make_source(r, workers) for r in range(REPLICAS)]
            for (sampler, _), state in zip(made, states, strict=True):
                sampler.load_state_dict(state)
        found = [source.draw_step(shares) for _, source in made]
        assert [len(each.microbatches) for each in found] == list(shares)
        drawn = [i for each in found for rows in each.microbatches for i in rows]
        assert sorted(drawn) == sorted(made[0][0].list_samples(step))
        work = [sum(each.costs) for each in found]
        assert sum(work) == sum(lengths[i] for i in drawn)
        # Fewer microbatches are for a slower replica, which gets less work.
        assert work[0] / sum(work) == pytest.approx(shares[0] / sum(shares), abs=0.04)
    assert [sampler.step for sampler, _ in made] == [5, 5]


def test_a_source_that_cannot_read_a_step_goes_on_after_it() -> None:
    """Ranks go on with the same step: the others may have read the one before."""
    sampler, source = make_source(0, data=Broken(range(SAMPLES)), seed=None)
    other, whole = make_source(1, seed=None)
    failed = 0
    for step in range(3):
        try:
            source.draw_step((4, 4))
        except OSError:
            failed += 1
        whole.draw_step((4, 4))
        assert sampler.step == other.step == step + 1
    assert failed == (0 in {i for each in sampler.deal_samples(0).samples[0] for i in each})
    sampler.load_state_dict({**sampler.state_dict(), "step": 1})
    drawn = [i for rows in source.draw_step((4, 4)).microbatches for i in rows]
    assert sorted(drawn) == sorted(i for each in sampler.deal_samples(1).samples[0] for i in each)
    with pytest.raises(InputError, match="deals to 2 replicas, and the pipeline has 3"):
        source.draw_step((4, 4, 4))


def test_packed_samples_are_numbered() -> None:
    packed, numbers = pack_samples([torch.tensor([5, 6]), torch.tensor([7])], 4, fill=-1)
    assert packed.tolist() == [5, 6, 7, -1] and numbers.tolist() == [0, 0, 1, -1]
    with pytest.raises(InputError, match="samples are 3 long in all"):
        pack_samples([torch.tensor([5, 6]), torch.tensor([7])], 2)


# --- training -----------------------------------------------------------------------------------


def make_sample(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, WIDTH, (draw_lengths()[index],), generator=generator)


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.embed(tokens.clamp(min=0))
        return out


def build_stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [First().double(), nn.Linear(WIDTH, WIDTH).double()]


def sum_losses(output: Tensor, tokens: Tensor) -> Tensor:
    """Sum over tokens, of which padding counts nothing."""
    flat = output.flatten(0, 1), tokens.flatten()
    return nn.functional.cross_entropy(*flat, ignore_index=-1, reduction="sum")


def train_balanced(
    context: TrainerContext, padded: bool, folder: Path, until: int
) -> tuple[list[float], dict[str, Tensor], list[int]]:
    """Train until a step; returns losses, gradients of the last step, and the samples drawn."""
    stage, replica = divmod(context.rank, 2)
    packed = {"sizes": draw_lengths(), "capacity": CAPACITY}
    sampler = make_sampler(replica, **({"padded": True} if padded else packed))
    module, drawn, losses = build_stages()[stage], [], []
    loader = DataLoader(
        [(i, make_sample(i)) for i in range(SAMPLES)],  # type: ignore[arg-type]
        batch_sampler=sampler, collate_fn=list,
    )  # fmt: skip
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    with Pipeline(
        module, context=context, loss_fn=sum_losses, microbatches=MICROBATCHES, stages=2,
        optimizer=optimizer, checkpoint=Checkpoint(directory=str(folder), every=1),
        state={"sampler": sampler}, options=Options(route="direct"),
    ) as pipe:  # fmt: skip
        steps = sampler.iterate_steps(loader)
        for _ in range(pipe.start_iteration, until):
            step = next(steps)
            drawn += [i for rows in step.microbatches for i, _ in rows]
            samples = [[each for _, each in rows] for rows in step.microbatches]
            tokens = pad_microbatches(samples, fill=-1)
            if not padded:
                tokens = [pack_samples(each, CAPACITY, fill=-1)[0][None] for each in samples]
            optimizer.zero_grad()
            loss = pipe.step(
                arg_mbs=[(each,) for each in tokens] if stage == 0 else None,
                target_mbs=tokens if stage == 1 else None,
                weight=sum(int((each >= 0).sum()) for each in tokens) if stage == 1 else None,
            )
            losses.append(float(loss))
            gradients = {n: p.grad.clone() for n, p in module.named_parameters()}  # type: ignore[union-attr]
            optimizer.step()
    return losses, gradients, drawn


def train_from_source(
    context: TrainerContext, padded: bool, folder: Path, until: int
) -> tuple[list[float], list[int], list[list[float]]]:
    """Train until a step with a source, whose shares change; returns losses, the samples drawn, and
    the costs of each step."""
    stage, replica = divmod(context.rank, 2)
    packed = {"sizes": draw_lengths(), "capacity": CAPACITY}
    sampler = make_sampler(replica, **({"padded": True} if padded else packed))
    module, drawn, losses, costs = build_stages()[stage], [], [], []

    def make_microbatch(tokens: Tensor) -> Microbatch:
        return Microbatch((tokens,), {}, tokens, weight=int((tokens >= 0).sum()))

    def collate(rows: list[tuple[int, Tensor]]) -> Any:
        nonlocal drawn
        drawn += [i for i, _ in rows]
        samples = [each for _, each in rows]
        if padded:
            return samples
        return make_microbatch(pack_samples(samples, CAPACITY, fill=-1)[0][None])

    def pad_step(rows: list[Any]) -> list[Microbatch]:
        return [make_microbatch(each) for each in pad_microbatches(rows, fill=-1)]

    loader = DataLoader(
        [(i, make_sample(i)) for i in range(SAMPLES)],  # type: ignore[arg-type]
        batch_sampler=sampler, collate_fn=collate,
    )  # fmt: skip
    source = sampler.make_source(loader, pad_step if padded else None)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    with Pipeline(
        module, context=context, loss_fn=sum_losses, microbatches=MICROBATCHES, stages=2,
        optimizer=optimizer, checkpoint=Checkpoint(directory=str(folder), every=1),
        state={"sampler": sampler}, options=Options(route="direct", rebalance=True),
    ) as pipe:  # fmt: skip
        for step in range(pipe.start_iteration, until):
            if step == 1:
                pipe.install_plan(plan_with_shares(2, 6, version=5))
            losses.append(float(pipe.step(microbatches=source)))
            costs.append([pipe.plan.microbatches, *pipe._parts.iterations.work.costs])
            optimizer.step()
            optimizer.zero_grad()
    return losses, drawn, costs


PADDED = pytest.param(True, marks=pytest.mark.full)


def train_whole_batches(steps: int) -> tuple[nn.Sequential, list[float]]:
    """Train one process on whole batches. Returns the model, with its last gradients, and the
    losses."""
    expected = nn.Sequential(*build_stages())
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.5)
    losses, sampler = [], make_sampler()
    for k in range(steps):
        tokens = [make_sample(i) for i in sampler.list_samples(k)]
        optimizer.zero_grad()
        total = sum(len(each) for each in tokens)
        loss = sum(sum_losses(expected(each[None]), each[None]) for each in tokens) / total
        loss.backward()  # type: ignore[union-attr]
        losses.append(float(loss.detach()))  # type: ignore[union-attr]
        optimizer.step()
    return expected, losses


@pytest.mark.parametrize("padded", [False, PADDED], ids=["packed", "padded"])
def test_losses_and_gradients_are_those_of_the_whole_batch(padded: bool, tmp_path: Path) -> None:
    """Replicas and microbatches have other numbers of samples and tokens; the mean is over all
    tokens of the batch. The second run resumes from the first one's checkpoint."""
    first = run_ranks(4, train_balanced, padded, tmp_path, 1)
    second = run_ranks(4, train_balanced, padded, tmp_path, 3)
    expected, losses = train_whole_batches(3)
    sampler = make_sampler()
    assert first[0][0] + second[0][0] == pytest.approx(losses, rel=1e-6)
    for rank in range(4):
        for name, parameter in expected[rank // 2].named_parameters():
            torch.testing.assert_close(second[rank][1][name], parameter.grad)
    drawn = Counter(i for rank in (0, 1) for i in first[rank][2] + second[rank][2])
    assert sorted(drawn) == sorted(i for k in range(3) for i in sampler.list_samples(k))
    assert set(drawn.values()) == {1}


@pytest.mark.parametrize("padded", [False, PADDED], ids=["packed", "padded"])
def test_losses_are_those_of_the_whole_batch_when_numbers_change(
    padded: bool, tmp_path: Path
) -> None:
    """Replicas change to 2 and 6 microbatches; the second run resumes with equal numbers."""
    first = run_ranks(4, train_from_source, padded, tmp_path, 5)
    second = run_ranks(4, train_from_source, padded, tmp_path, 7)
    _, losses = train_whole_batches(7)
    sampler = make_sampler()
    assert first[0][0] + second[0][0] == pytest.approx(losses, rel=1e-6)
    numbers = [[int(step[0]) for step in first[rank][2]] for rank in range(4)]
    assert numbers[0] == numbers[2] and numbers[1] == numbers[3]
    assert set(numbers[0]) == {4, 2} and set(numbers[1]) == {4, 6}
    assert all(len(step) == 1 + step[0] for rank in range(4) for step in first[rank][2])
    # Every sample that was used was read once for each step of each stage.
    wanted = Counter(i for k in range(7) for i in sampler.list_samples(k))
    for ranks in ((0, 1), (2, 3)):
        assert Counter(i for rank in ranks for i in first[rank][1] + second[rank][1]) == wanted


def run_example(context: TrainerContext, code: str) -> dict[str, Any]:
    """Run code of the page on this rank; returns its names with simple values."""
    names: dict[str, Any] = {"__name__": "example"}
    TrainerContext.from_env = staticmethod(lambda: context)  # type: ignore[method-assign, assignment]
    exec(code, names)
    return {
        name: float(names[name]) if name == "loss" else names[name] for name in ("loss", "costs")
    }


@pytest.mark.full
def test_the_example_of_the_page_runs() -> None:
    page = Path(__file__).resolve().parents[3] / "docs/how-to/uneven-batches.md"
    train, fit = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    found = run_ranks(4, run_example, train + fit)
    assert len({each["loss"] for each in found}) == 1
    assert 5.0 < found[0]["loss"] < 5.7, "the loss falls"
    # Times of a busy machine need not grow with the lengths.
    costs = [each["costs"] for each in found]
    assert all(each.base + each.per_token + each.per_square > 0 for each in costs)
