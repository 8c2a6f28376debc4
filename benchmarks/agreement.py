"""What it takes all ranks of a job to agree in each iteration: loss, refusals, who has to leave.

    python benchmarks/agreement.py [--ranks 16 32 64] [--json FILE]

Each rank is a process, and adds up four numbers with all others: round one ring, as gloo does it,
and in rounds over small groups, as the trainer does it (topology/hierarchy.py). Both take turns.
What follows is how many messages wait for the one before, and what a rank takes of a processor. The
ranks share those of this machine, so how long it would take on machines of their own is computed:
from the messages, and from what one takes between two ranks here. Half a minute with nothing else
to do.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipemorph_trainer.topology.groups import Groups
from pipemorph_trainer.topology.hierarchy import Hierarchy, factors, groups_of

MANY = (1_024, 10_240, 98_304)
TURNS, EACH = 10, 5
PATIENCE = timedelta(seconds=120)


def messages(grid: tuple[int, ...]) -> int:
    """That follow each other."""
    return sum(2 * (size - 1) for size in grid)


def rank_of(rank: int, ranks: int, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", PATIENCE, rank=rank, world_size=ranks)
    world = dist.GroupMember.WORLD
    assert world is not None
    groups = Groups()
    rounds = [
        groups.new(each, backend="gloo", use_local_synchronization=True)
        for each in groups_of(rank, range(ranks))
    ]
    ways = {"ring": Hierarchy([world]), "rounds": Hierarchy(rounds)}
    took: dict[str, list[float]] = {name: [] for name in ways}
    used: dict[str, list[float]] = {name: [] for name in ways}
    values = torch.zeros(4, dtype=torch.float64)
    for turn in range(TURNS + 1):
        for name, way in ways.items():
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            for _ in range(EACH):
                way.all_reduce(values).wait(lambda work: work.wait())
            if turn:
                took[name].append((time.perf_counter() - began) / EACH)
                used[name].append((time.process_time() - cpu) / EACH)
    if rank == 0:
        results.put(
            {
                name: {
                    "seconds": statistics.median(took[name]),
                    "cpu": statistics.fmean(used[name]),
                }
                for name in ways
            }
        )
    groups.destroy(clean=True)
    dist.destroy_process_group()


def measure(ranks: int) -> dict[str, dict[str, float]]:
    """What both ways take: seconds here, and processor seconds of a rank."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=rank_of, args=(rank, ranks, folder, results))
            for rank in range(ranks)
        ]
        for each in processes:
            each.start()
        try:
            found: dict[str, dict[str, float]] = results.get(timeout=PATIENCE.total_seconds())
            for each in processes:
                each.join(PATIENCE.total_seconds())
        finally:
            for each in processes:
                each.kill()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    hop = measure(2)["ring"]["seconds"] / messages((2,))
    print(
        "| ranks | messages in turn, ring | in rounds | so seconds, ring | in rounds | processor |"
    )
    print("|---:|---:|---:|---:|---:|---|")
    rows = []
    for ranks in (*given.ranks, *MANY):
        counts = {"ring": messages((ranks,)), "rounds": messages(factors(ranks))}
        found = measure(ranks) if ranks in given.ranks else None
        used = "" if found is None else ", ".join(f"{1e6 * w['cpu']:.0f}" for w in found.values())
        rows.append({"ranks": ranks, "messages": counts, "found": found})
        print(
            f"| {ranks:,} | {counts['ring']:,} | {counts['rounds']} | {hop * counts['ring']:.4f} |"
            f" {hop * counts['rounds']:.4f} | {used} µs |"
        )
    print(
        f"\nA message between two ranks here takes {1e6 * hop:.0f} µs. Processor time: of a rank."
    )
    if given.json is not None:
        given.json.write_text(json.dumps({"message_seconds": hop, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
