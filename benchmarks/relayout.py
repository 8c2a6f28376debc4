"""What a slow wire or device costs, and what it costs when ranks change places, or layers stages.

    python benchmarks/relayout.py [--delay 30] [--iterations 120] [--out FOLDER] [--json FILE]
                                  [--check]

Stages are EMULATED: their ops take 10 ms and compute nothing; replicas reduce 4 MB of gradients per
stage in 8 buckets, played chunk by chunk round a ring of the replicas: a chunk has 512 KiB or, as
here, a bucket's share of each rank, and a step takes as long as on the slowest edge. One wire
between two pods is delayed from one iteration to another, or one device is slower. Each job runs
twice: ranks stay, and ranks may have another layout (``adaptation.relayout``).

- ``ring``: 4 stages x 4 replicas, a rank per pod. The wire is an edge of the ring of stage 1; other
  rings do without it.
- ``pods``: 4 stages x 2 replicas, a pipeline per pod. Every ring goes over the wire between the two
  pods, whatever the order: only between two stages does it cost less.
- ``device``: 4 stages of 4 layers each. Ops take 1.5 times as long on the device of stage 1. What
  moving layers brings is compared with what the best of all splits would, by the planner.

Prints the median of iterations before the fault, in it, and after it, and what each change of
layout promised, brought and took. Ranks go back after the fault only if the iterations left pay.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from pipemorph.planning import StageTimes, plan, problem_for

OP_MS, GRADIENT_BYTES, MICROBATCHES = 10, 4 << 20, 12
FROM, SETTLED = 15, 24
"""First iteration of the fault, and iterations after which ranks and plans should have changed."""
MOST, LEAST = 1.15, 3.0
"""Goals: times the undisturbed iteration, with changes of places, and without them in ``ring``. Two
replicas need a third of the steps of four."""
CASES: dict[str, dict[str, Any]] = {
    "ring": {"parallelism": {"stages": 4, "replicas": 4}, "fault": {"between": [4, 5]}},
    "pods": {
        "parallelism": {
            "stages": 4,
            "replicas": 2,
            "ranksPerPod": 4,
            "order": ["dp_replicate", "pp"],
        },
        "fault": {"between": [0, 1]},
    },
    "device": {
        "parallelism": {"stages": 4, "layers": 16},
        "fault": {"device": 1, "slowdown": 1.5},
    },
}
SHARE = 0.8
"""Goal of ``device``: of what the best split would save."""


def manifest(case: dict[str, Any], iterations: int, delay: float, *, moves: bool) -> dict[str, Any]:
    times = dict.fromkeys(("forward", "backwardInput", "backwardWeight"), OP_MS)
    return {
        "apiVersion": "pipemorph.io/v1alpha1",
        "kind": "PipeMorphJob",
        "metadata": {"name": "relayout"},
        "spec": {
            "parallelism": case["parallelism"],
            "schedule": {"microbatches": MICROBATCHES},
            "trainer": {
                "module": "pipemorph_trainer.examples.emulated",
                "iterations": iterations,
            },
            "emulation": {
                "stageTimes": [times],
                "messageBytes": 1024,
                "gradientBytes": GRADIENT_BYTES,
            },
            "failurePolicy": {"maxRestarts": 2},
            "adaptation": {"relayout": moves},
            "faults": [
                case["fault"]
                | ({"delayMs": delay} if "between" in case["fault"] else {})
                | {"fromIteration": FROM, "toIteration": end(iterations)}
            ],
        },
    }


def end(iterations: int) -> int:
    """First iteration after the fault."""
    return iterations - SETTLED - 10


def run(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "pipemorph.cli", "run", str(folder / "job.json")]
    done = subprocess.run(
        [*command, "--out", str(folder / "out")], check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"the run failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    report: dict[str, Any] = json.loads((folder / "out" / "report.json").read_text())
    report["stays"] = [line for line in done.stdout.splitlines() if " stay " in line]
    return report


def between(report: dict[str, Any], first: int, last: int) -> float:
    """Median seconds of the iterations from ``first`` to before ``last``."""
    return median(i["seconds"] for i in report["iterations"] if first <= i["index"] < last)


def best_saving(case: dict[str, Any]) -> float:
    """Seconds of an iteration that the best of all splits would save while the device is slow, by
    the planner."""
    stages, layers = case["parallelism"]["stages"], case["parallelism"]["layers"]
    fault = case["fault"]

    def seconds(counts: list[int]) -> float:
        times = []
        for stage, count in enumerate(counts):
            factor = fault["slowdown"] if stage == fault["device"] else 1.0
            op = OP_MS / 1e3 * factor * count * stages / layers
            times.append(StageTimes(forward=op, backward_input=op, backward_weight=op))
        return plan(problem_for(MICROBATCHES, times, [0.0] * (stages - 1))).makespan

    splits = []
    for cuts in combinations(range(1, layers), stages - 1):
        splits.append([after - before for before, after in pairwise([0, *cuts, layers])])
    return seconds([layers // stages] * stages) - min(map(seconds, splits))


def measure(name: str, folder: Path, iterations: int, delay: float) -> dict[str, Any]:
    case, over = CASES[name], end(iterations)
    found: dict[str, Any] = {}
    losses = []
    for moves in (False, True):
        job = manifest(case, iterations, delay, moves=moves)
        report = run(folder / f"{name}-{'moves' if moves else 'stays'}", job)
        losses.append([i["loss"] for i in report["iterations"]])
        found["moves" if moves else "stays"] = {
            "before": between(report, 3, FROM),
            "slow": between(report, FROM + SETTLED, over),
            "after": between(report, over + SETTLED, iterations),
            "relayouts": report["relayouts"],
            "said": report["stays"],
        }
    found["same_losses"] = losses[0] == losses[1]
    if name == "device":
        saved = found["stays"]["slow"] - found["moves"]["slow"]
        found["share_of_best"] = saved / best_saving(case)
    return found


def show(name: str, found: dict[str, Any]) -> None:
    print(f"\n{name} (EMULATED)")
    print(f"{'':8} {'undisturbed':>12} {'slow':>10} {'':>6} {'recovered':>10}")
    for which in ("stays", "moves"):
        row = found[which]
        print(
            f"{which:8} {row['before']:>10.3f} s {row['slow']:>8.3f} s"
            f" {row['slow'] / row['before']:>5.2f}x {row['after']:>8.3f} s"
        )
    for move in found["moves"]["relayouts"]:
        measured = "unknown" if move["measured"] is None else f"{move['measured']:.0%}"
        what = f"{len(move['moved'])} ranks"
        if move["layers"] != move["layers_before"]:
            what = f"layers {move['layers_before']} -> {move['layers']}"
        print(
            f"  {move['outcome']} at iteration {move['iteration']}: {what}, in"
            f" {move['seconds']} s; shorter by {move['promised']:.0%} promised, {measured} measured"
        )
    for line in found["moves"]["said"]:
        print(f"  {line}")
    if name == "device":
        print(f"  of what the best split would save, by the planner: {found['share_of_best']:.0%}")
    print(f"  losses to the bit those of ranks that stayed: {found['same_losses']}")


def good(name: str, found: dict[str, Any]) -> bool:
    stays, moves = found["stays"], found["moves"]
    if name == "device":
        first = moves["relayouts"][:1]
        moved = bool(first) and first[0]["outcome"] == "moved"
        return moved and found["share_of_best"] >= SHARE and found["same_losses"]
    return bool(
        (name != "ring" or stays["slow"] >= LEAST * stays["before"])
        and moves["slow"] <= MOST * moves["before"]
        and [move["outcome"] for move in moves["relayouts"]] == ["moved"]
        and found["same_losses"]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delay", type=float, default=30.0, help="of the wire, milliseconds")
    parser.add_argument("--iterations", type=int, default=120)
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--out", type=Path, help="keep the runs there")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 unless the goals are met")
    options = parser.parse_args()
    if options.iterations < FROM + 3 * SETTLED + 10:
        parser.error(f"--iterations is {options.iterations}; expected {FROM + 3 * SETTLED + 10}")
    folder = options.out or Path(tempfile.mkdtemp(prefix="pipemorph-relayout-"))
    try:
        results = {
            name: measure(name, folder, options.iterations, options.delay)
            for name in options.case or CASES
        }
    finally:
        if options.out is None:
            shutil.rmtree(folder, ignore_errors=True)
    for name, found in results.items():
        show(name, found)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))
    met = all(good(name, found) for name, found in results.items())
    holds = "holds" if met else "DOES NOT HOLD"
    print(f"\nat least {LEAST:g}x without, at most {MOST:g}x with, {SHARE:.0%} of the best split,")
    print(f"the same losses: {holds}")
    return 1 if options.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
