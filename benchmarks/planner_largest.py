"""What the largest problems take: processor time and memory.

One command: ``python benchmarks/planner_largest.py [--json FILE]``. One core, nothing runs but the
planner. Uneven stages and several slow links, as in ``planner.py``, without in-flight limit and
with S+2. Predicted are plans of 64 stages × 256 microbatches; planned are 512 × 2,048, the most
that a job may have. Exits 1 if a promise of docs/benchmarks.md is not kept.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from planner_problems import sized_problem

from pipemorph.planning import plan, predict

PREDICTED, LARGEST = (64, 256), (512, 2048)
KINDS = (("uneven", "none"), ("uneven", "S+2"), ("multi-link", "none"), ("multi-link", "S+2"))
TIMES = 20
PROMISED_PREDICT_MS, PROMISED_SECONDS, PROMISED_MIB = 5.0, 15.0, 2048.0


def seconds(began: float) -> float:
    """Of the processor, since."""
    return time.process_time() - began


def measured(shape: str, cap: str) -> dict[str, Any]:
    problem = sized_problem(shape, cap, *PREDICTED, 0)
    schedule = plan(problem).schedule
    took = []
    for _ in range(TIMES):
        began = time.process_time()
        predict(schedule, problem)
        took.append(seconds(began))
    largest = sized_problem(shape, cap, *LARGEST, 0)
    began = time.process_time()
    planned = plan(largest)
    return {
        "shape": shape,
        "cap": cap,
        "predict_ms": 1e3 * statistics.median(took),
        "plan_seconds": seconds(began),
        "gap": planned.gap,
        # Of this process until now, so it never falls from one row to the next.
        "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures")
    args = parser.parse_args()
    print(
        f"| stages | cap | predict {PREDICTED[0]} × {PREDICTED[1]}"
        f" | plan {LARGEST[0]} × {LARGEST[1]} | above the quick bound | memory so far |"
    )
    print("|---|---|---|---|---|---|")
    rows = []
    for shape, cap in KINDS:
        row = measured(shape, cap)
        rows.append(row)
        print(
            f"| {shape} | {cap} | {row['predict_ms']:.1f} ms | {row['plan_seconds']:.1f} s"
            f" | {row['gap']:.2%} | {row['mib']:.0f} MiB |",
            flush=True,
        )
    worst = {name: max(row[name] for row in rows) for name in ("predict_ms", "plan_seconds", "mib")}
    kept = [
        (f"predicted in {worst['predict_ms']:.1f} ms (at most {PROMISED_PREDICT_MS:g})",
         worst["predict_ms"] <= PROMISED_PREDICT_MS),
        (f"planned in {worst['plan_seconds']:.1f} s (at most {PROMISED_SECONDS:g})",
         worst["plan_seconds"] <= PROMISED_SECONDS),
        (f"{worst['mib']:.0f} MiB (at most {PROMISED_MIB:g})", worst["mib"] <= PROMISED_MIB),
    ]  # fmt: skip
    print()
    for text, holds in kept:
        print(f"{'ok ' if holds else 'NO '} {text}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(holds for _, holds in kept) else 1


if __name__ == "__main__":
    sys.exit(main())
