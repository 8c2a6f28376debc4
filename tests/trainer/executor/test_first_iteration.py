"""First iteration of a job: modules that are slow at first, and its measurements."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from launch import Ranks, run_ranks
from torch import Tensor, nn
from trainer_jobs import Job, Record, assert_same, reference, train

from pipemorph.diagnose.formats.rank_traces import read_splits
from pipemorph.errors import InputError
from pipemorph_trainer import Pipeline, TrainerContext
from pipemorph_trainer.executor.local_stage import parse_split_mode

STAGES, SLOW, DEADLINE = 4, 2.0, 5.0
"""The last stage waits for the first F of three others: longer than the deadline."""
PAUSE = 0.1


class SlowAtFirst(nn.Module):
    """Module slow at its first call, as one that is compiled then. Later calls take a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(PAUSE if self.calls else SLOW)
        self.calls.append(time.monotonic())
        return self.linear(x)


def slow_at_first(context: TrainerContext) -> int:
    module = SlowAtFirst()
    with Pipeline(
        module, context=context, loss_fn=nn.functional.mse_loss, microbatches=2,
        deadline_seconds=DEADLINE,
    ) as pipe:  # fmt: skip
        for _ in range(2):
            pipe.step(torch.ones(4, 8), target=torch.zeros(4, 8))
            assert pipe.split == "deferred"
    return len(module.calls)


@pytest.mark.full
def test_slow_first_calls_do_not_run_into_the_deadline(tmp_path: Path) -> None:
    results = Ranks(STAGES, slow_at_first, context={"trace_dir": tmp_path}).wait()
    assert [r.exitcode for r in results] == [0] * STAGES, "\n".join(r.error for r in results)
    assert [r.value for r in results] == [2 * 2] * STAGES, "a forward per microbatch, and no other"
    for rank, result in enumerate(results):
        (line,) = [x for x in result.output.splitlines() if "split backward" in x]
        assert line.startswith(f"rank {rank} (stage {rank}): split backward: defers 100%")
    found = read_splits(tmp_path)
    assert [each["rank"] for each in found] == list(range(STAGES))
    assert all(each["deferred_share"] == 1.0 for each in found)


def hangs_at_first(context: TrainerContext) -> None:
    class Hangs(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if context.rank == 1:
                time.sleep(60.0)
            return super().forward(x)

    module = Hangs(8, 8)
    with Pipeline(
        module, context=context, loss_fn=nn.functional.mse_loss, microbatches=2,
        deadline_seconds=0.5,
    ) as pipe:  # fmt: skip
        pipe.step(torch.ones(4, 8), target=torch.zeros(4, 8))


@pytest.mark.full
def test_a_first_iteration_that_hangs_ends_too() -> None:
    ranks = Ranks(2, hangs_at_first)
    ranks.wait_for_end([0])
    ranks.processes[1].kill()
    result = ranks.wait()[0]
    # Deadlines: one per stage.
    assert "B of microbatch 0 of iteration 0" in result.error
    assert "the deadline is 1 s" in result.error


def test_the_planner_hears_nothing_of_the_first_iteration() -> None:
    job = Job(2, 4, iterations=3)
    records: list[Record] = run_ranks(2, train, job)
    assert_same(records, reference(job))
    for record in records:
        assert len(record.profiles) == job.iterations - 1
        for profile in record.profiles:
            assert profile.split == record.split == "deferred"
            assert profile.backward_weight > 0


def chosen(context: TrainerContext, split: str) -> tuple[list[str], int]:
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    calls: list[int] = []
    module.register_forward_hook(lambda *_: calls.append(1))
    splits = []
    with Pipeline(
        module, context=context, loss_fn=nn.functional.mse_loss, microbatches=2,
        policy="zero-bubble", split=split,
    ) as pipe:  # fmt: skip
        for _ in range(2):
            pipe.step(torch.ones(4, 8), target=torch.zeros(4, 8))
            splits.append(pipe.split)
    return splits, len(calls)


@pytest.mark.parametrize("split", ["verify", pytest.param("fused", marks=pytest.mark.full)])
def test_no_split_calls_the_module_more_than_once_per_microbatch(split: str) -> None:
    ((splits, calls),) = run_ranks(1, chosen, split)
    assert splits == ["fused" if split == "fused" else "deferred"] * 2
    assert calls == 2 * 2


@pytest.mark.parametrize(
    ("split", "instead"), [("module", "auto"), ("graph", "auto"), ("off", "fused")]
)
def test_a_split_that_was_removed_is_refused_with_its_replacement(split: str, instead: str) -> None:
    with pytest.raises(InputError, match=f"'{split}', which was removed; use {instead}"):
        parse_split_mode(split)
    with pytest.raises(InputError, match="'none'; expected auto, fused, verify"):
        parse_split_mode("none")
