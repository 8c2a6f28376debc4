"""Accuracy of what `pipemorph diagnose` reads from traces of torch.profiler.

    python benchmarks/profiler_traces.py [--steps 5] [--rounds 10] [--json FILE]

Torch's own schedules run on four ranks over gloo with ops of 20 ms and more, which sleep.
`pipemorph_trainer.observe` records each op in the same processes. Clocks of the traces are set off
by up to 5 s. With and without the schedule's labels, the table says how many ops were found with
their stage and microbatch, the median error of an op's duration, the error of the bubble's share in
points, and the error of the clocks with the bound that is printed. Then steps run with and without
the profiler in turn: what it adds to an op. Exits 1 if a goal does not hold.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from goals import finish_benchmark, make_parser

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/support")]

RANKS = 4
OFFSETS = (0.0, 5.0, -5.0, 3.1)
"""Seconds by which the clock of each rank's trace is set off."""
ROWS = (
    ("GPipe", True), ("GPipe", False), ("1F1B", False), ("Interleaved1F1B", True),
    ("Interleaved1F1B", False), ("InterleavedZeroBubble", True), ("InterleavedZeroBubble", False),
    ("ZBVZeroBubble", True),
)  # fmt: skip
"""Schedules, each with true if its labels are read. 1F1B has none; without them, a stage of
ZBVZeroBubble that follows on the same rank cannot be found, for no message leads to it."""
OPTYPES = {"forward-compute": "F", "backward-compute": "B or I", "backward-weight": "W"}


def measure_schedule(schedule: str, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Figures of a schedule, with its labels and without. Times in milliseconds."""
    from profiled_pipelines import (
        PipelineRun,
        change_trace,
        compare_operations,
        profile_into,
        read_profiles,
    )

    run = PipelineRun(schedule, steps=steps, rounds=rounds)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        ranks = profile_into(Path(folder), run, RANKS, timeout=300.0)
        for rank, seconds in enumerate(OFFSETS):
            change_trace(Path(folder, f"rank{rank}.json.gz"), seconds=seconds)
        costs = [
            with_profiler - without
            for rank in ranks
            for with_profiler, without in zip(rank.with_profiler, rank.without, strict=True)
        ]
        for labels in (labels for name, labels in ROWS if name == schedule):
            if not labels:
                for rank in range(RANKS):
                    change_trace(Path(folder, f"rank{rank}.json.gz"), labels=False)
            notes: list[str] = []
            compared = compare_operations(read_profiles(Path(folder), notes), Path(folder), run)
            bubbles = [100 * abs(error) for error in compared.bubbles]
            rows.append(
                {
                    "schedule": schedule,
                    "labels": labels,
                    "found": compared.found,
                    "recorded": compared.recorded,
                    "durations": {o: 1e3 * compared.median_duration(o) for o in compared.errors},
                    "errors": {o: 1e3 * compared.median_error(o) for o in compared.errors},
                    "bubble_median": statistics.median(bubbles),
                    "bubble_max": max(bubbles),
                    "clocks": 1e3 * max(map(abs, compared.clocks)),
                    "notes": notes,
                    "profiler": 1e3 * statistics.median(costs) if costs else None,
                    "profiler_quartiles": [1e3 * q for q in statistics.quantiles(costs)[::2]]
                    if len(costs) > 1 else None,
                }
            )  # fmt: skip
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    print("| schedule | ops found | F, ms | B or I, ms | W, ms | bubble: median, max | clocks |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        cells = [
            f"{row['schedule']}{'' if row['labels'] else ', no labels'}",
            f"{row['found']} of {row['recorded']}",
            *(
                f"{row['errors'][o]:.2f} of {row['durations'][o]:.1f}" if o in row["errors"] else ""
                for o in OPTYPES
            ),
            f"{row['bubble_median']:.2f}, {row['bubble_max']:.1f} points",
            f"{row['clocks']:.2f} ms",
        ]
        print(f"| {' | '.join(cells)} |")
    print()
    for row in rows:
        if row["profiler"] is not None and (row["labels"] or row["schedule"] == "1F1B"):
            low, high = row["profiler_quartiles"]
            print(
                f"{row['schedule']}: the profiler adds {row['profiler']:+.2f} ms to an op "
                f"(quartiles {low:+.2f}, {high:+.2f})"
            )


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=5, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=10, help=argparse.SUPPRESS)
    args = parser.parse_args()
    rows = []
    for schedule in dict.fromkeys(name for name, _ in ROWS):
        rows += measure_schedule(schedule, args.steps, args.rounds)
    print_table(rows)
    within = [
        (error, max(0.02 * row["durations"][optype], 0.3))
        for row in rows
        for optype, error in row["errors"].items()
    ]
    goals = [
        ("every op is found with its stage and microbatch",
         all(row["found"] == row["recorded"] for row in rows)),
        ("median errors of ops are within 2 % or 0.3 ms",
         all(error <= limit for error, limit in within)),
        ("the bubble's median error is within a point",
         all(row["bubble_median"] <= 1 for row in rows)),
        ("clocks are recovered within 1 ms", all(row["clocks"] <= 1 for row in rows)),
    ]  # fmt: skip
    return 0 if finish_benchmark(goals, args.json, rows) else 1


if __name__ == "__main__":
    sys.exit(main())
