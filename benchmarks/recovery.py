"""How long a job takes to go on after a rank was killed, and whether it goes on as if nothing was.

    python benchmarks/recovery.py [--kills 50] [--seed 0] [--out FOLDER] [--json FILE] [--check]

Runs a small GPT, 2 stages × 2 replicas, under ``pipemorph run``: once undisturbed, and once with
``kill -9`` of a drawn rank at a drawn moment of an iteration, again when the job has gone on.
Prints the seconds from each kill to the end of the next iteration (as the host hears of it, a
fraction of a second later), how many finished iterations were run again, and whether all losses are
the same to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

STAGES, REPLICAS = 2, 2
MEDIAN, WORST = 5.0, 10.0
"""Goals, seconds from a kill to the end of the next iteration."""
DEADLINE = 120.0
"""Seconds without an iteration after which the run is given up."""


def manifest(iterations: int, restarts: int, folder: Path, every: int) -> dict[str, Any]:
    return {
        "apiVersion": "pipemorph.io/v1alpha1",
        "kind": "PipeMorphJob",
        "metadata": {"name": "recovery"},
        "spec": {
            "parallelism": {"stages": STAGES, "replicas": REPLICAS, "layers": 4},
            "schedule": {"microbatches": 8},
            "trainer": {
                "module": "pipemorph_trainer.examples.gpt",
                "iterations": iterations,
                "seed": 1,
                "args": {"width": 64, "heads": 4, "sequence": 64, "microbatch_size": 2},
            },
            "checkpoint": {"directory": str(folder / "checkpoints"), "every": every},
            "failurePolicy": {"maxRestarts": restarts},
        },
    }


class Run:
    """One ``pipemorph run`` in ``folder``."""

    def __init__(self, folder: Path, job: dict[str, Any]) -> None:
        folder.mkdir(parents=True)
        (folder / "job.json").write_text(json.dumps(job))
        self.out = folder / "out"
        command = [sys.executable, "-m", "pipemorph.cli", "run", str(folder / "job.json")]
        self._log = (folder / "log").open("w+b")
        self.host = subprocess.Popen(
            [*command, "--out", str(self.out)], stdout=self._log, stderr=subprocess.STDOUT
        )

    def said(self) -> str:
        return Path(self._log.name).read_text()

    def finish(self) -> dict[str, Any]:
        if self.host.wait(3600) != 0:
            raise SystemExit(f"the run failed:\n{self.said()[-4000:]}")
        report: dict[str, Any] = json.loads((self.out / "report.json").read_text())
        return report

    def rank(self, number: int) -> int | None:
        """The process id of a rank that is running."""
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                name = (entry / "comm").read_text().strip()
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == self.host.pid and name == f"rank-{number}":
                return int(entry.name)
        return None

    def iterations(self) -> int:
        """Lines of rank 0's trace: one per iteration that it has finished in any generation."""
        trace = self.out / "trace" / "ops-rank0.jsonl"
        return trace.read_bytes().count(b"\n") if trace.exists() else 0

    def await_iterations(self, count: int) -> bool:
        """Wait until rank 0 has finished that many; False if the run has ended before."""
        end = time.monotonic() + DEADLINE
        while self.iterations() < count:
            if self.host.poll() is not None:
                return False
            if time.monotonic() > end:
                self.host.kill()
                raise SystemExit(f"no iteration for {DEADLINE:g} s:\n{self.said()[-4000:]}")
            time.sleep(0.01)
        return True


def killed_run(run: Run, kills: int, apart: int, draw: random.Random) -> list[float]:
    """Kill ranks at drawn moments; the times of the kills."""
    times: list[float] = []
    # The first iterations are slower: they test the split of the backward.
    while len(times) < kills and run.await_iterations(run.iterations() + apart):
        began = time.monotonic()
        if not run.await_iterations(run.iterations() + 1):
            break
        iteration = time.monotonic() - began
        time.sleep(draw.random() * min(iteration, 5.0))
        pid = run.rank(draw.randrange(STAGES * REPLICAS))
        if pid is None:
            continue
        times.append(time.time())
        os.kill(pid, signal.SIGKILL)
    return times


def losses(report: dict[str, Any]) -> dict[int, float]:
    return {each["index"]: each["loss"] for each in report["iterations"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--iterations-apart", type=int, default=4)
    parser.add_argument("--checkpoint-every", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 if a goal does not hold")
    options = parser.parse_args()
    folder = options.out or Path(tempfile.mkdtemp(prefix="pipemorph-recovery-"))
    iterations = (options.kills + 1) * (options.iterations_apart + 4)

    def job(name: str, restarts: int) -> Run:
        every = options.checkpoint_every
        return Run(folder / name, manifest(iterations, restarts, folder / name, every))

    undisturbed = job("undisturbed", 0).finish()
    run = job("killed", options.kills)
    times = killed_run(run, options.kills, options.iterations_apart, random.Random(options.seed))
    report = run.finish()

    recoveries = [each for each in report["recoveries"] if each["seconds"] is not None]
    seconds = [
        each["seconds"] + each["lost_at"] - max(at for at in times if at <= each["lost_at"] + 0.05)
        for each in recoveries
    ]
    repeated = [each["repeated"] for each in recoveries]
    found, expected = losses(report), losses(undisturbed)
    same = all(found[index] == expected[index] for index in found)
    print(f"{len(times)} kills of a drawn rank of {STAGES} stages x {REPLICAS} replicas")
    print(
        f"recoveries that finished an iteration: {len(recoveries)} of {len(report['recoveries'])}"
    )
    print(f"from: {', '.join(sorted({str(each['state']) for each in recoveries}))}")
    print(f"rungs: {', '.join(sorted({each['rung'] for each in recoveries}))}")
    if unreported := iterations - len(found):
        print(f"finished by ranks that ended before they could report: {unreported} iterations")
    print(f"goodput {report['goodput']:.1%}; undisturbed {undisturbed['goodput']:.1%}")
    print(f"reports: {folder}")
    goals = [
        (
            f"from the kill to the next finished iteration, median ≤ {MEDIAN:g} s:"
            f" {median(seconds):.2f}",
            median(seconds) <= MEDIAN,
        ),
        (f"the same, worst ≤ {WORST:g} s: {max(seconds):.2f}", max(seconds) <= WORST),
        (f"finished iterations repeated, most = 0: {max(repeated)}", max(repeated) == 0),
        (f"losses of {len(found)} iterations, equal to the bit", same),
    ]
    for text, holds in goals:
        print(f"{text} {'holds' if holds else 'DOES NOT HOLD'}")
    if options.json is not None:
        figures = {"seconds": seconds, "repeated": repeated, "same_losses": same}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    raise SystemExit(0 if same and (all(h for _, h in goals) or not options.check) else 1)


if __name__ == "__main__":
    main()
