"""Small collectives over many ranks, in rounds over small groups."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from pairwise import give_tiers

from pipemorph_trainer import TrainerContext
from pipemorph_trainer.topology import hierarchy
from pipemorph_trainer.topology.groups import ProcessGroups
from pipemorph_trainer.topology.hierarchy import RankHierarchy, choose_grid, list_round_groups
from pipemorph_trainer.topology.mesh import join_process_group

RANKS = 8


def messages(count: int) -> int:
    """Number of successive messages, round the rings of all rounds."""
    return sum(2 * (size - 1) for size in choose_grid(count))


def test_no_group_is_wide() -> None:
    for count in range(1, 2000):
        grid = choose_grid(count)
        assert prod(grid) == count
        divisors = [d for d in range(2, count + 1) if count % d == 0]
        primes = [d for d in divisors if all(d % other for other in divisors if other < d)]
        assert max(grid) <= max(hierarchy.WIDEST, *primes, 1), grid
        assert len(grid) == 1 or min(grid) > 1, grid
    assert [messages(count) for count in (16, 64, 10_240, 98_304)] == [30, 28, 76, 94]
    assert choose_grid(17 * 16) == (17, 4, 4)  # 44 messages; two dimensions would take 62


@pytest.mark.parametrize("count", [1, 2, 16, 17, 24, 96, 160, 640])
def test_all_ranks_hear_of_all_in_order(count: int) -> None:
    ranks = [3 * k + 1 for k in range(count)]
    rounds = [list_round_groups(rank, ranks) for rank in ranks]
    received = {rank: [rank] for rank in ranks}
    for number in range(len(choose_grid(count))):
        now = {}
        for rank, groups in zip(ranks, rounds, strict=True):
            for other in groups[number]:
                assert rounds[ranks.index(other)][number] == groups[number]
            now[rank] = [each for other in groups[number] for each in received[other]]
        received = now
    assert all(found == ranks for found in received.values())


def collectives(context: TrainerContext, widest: int) -> tuple[list[float], list[list[float]], int]:
    """Run collectives of numbers whose sum depends on the order in which they are added."""
    hierarchy.WIDEST = widest
    join_process_group(context, torch.device("cpu"))
    groups = ProcessGroups()
    mine = list_round_groups(context.rank, list(range(RANKS)))
    ranks = RankHierarchy(
        [groups.create_group(each, backend="gloo", use_local_synchronization=True) for each in mine]
    )
    assert ranks.size == RANKS
    total = torch.tensor([0.1 * 3.7**context.rank, float(context.rank)], dtype=torch.float64)
    ranks.all_reduce(total).wait(lambda work: work.wait())
    most = torch.tensor([context.rank], dtype=torch.float32)
    pending = ranks.all_reduce(most, dist.ReduceOp.MAX)
    waits: list[Any] = []
    while not pending.is_done:
        pending.advance()
    pending.wait(waits.append)
    assert not waits and most.item() == RANKS - 1
    found: list[torch.Tensor] = []
    ranks.all_gather(torch.tensor([context.rank, 0.5]), found).wait(lambda work: work.wait())
    groups.destroy_all(clean=True)
    return total.tolist(), [row.tolist() for row in found], len(mine)


@pytest.mark.parametrize(("widest", "rounds"), give_tiers([(2, 3), (4, 2), (8, 1)], test=1, full=2))
def test_all_ranks_have_the_same_bits(widest: int, rounds: int) -> None:
    found = run_ranks(RANKS, partial(collectives, widest=widest))
    (total, rows, count), *others = found
    assert count == rounds
    assert all(other == found[0] for other in others)
    assert total == pytest.approx([sum(0.1 * 3.7**k for k in range(RANKS)), 28.0], rel=1e-14)
    assert rows == [[k, 0.5] for k in range(RANKS)]
