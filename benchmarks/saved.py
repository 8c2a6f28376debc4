"""The counter of saved seconds against the same emulated job without adaptation.

One command: ``python benchmarks/saved.py [--rounds N] [--json FILE] [--check]``. Each round is two
``pipemorph run`` of eight emulated stages, whose last link is delayed by 30 ms, then by 60 ms, then
not at all. One may adapt, the other keeps the plan of the start. What the first one says that it
saved is compared with the difference of their iterations, on average over the rounds.

Two runs of the same job differ, too, the more the busier the machine is: by how much is printed for
both kinds, as a part of what was saved. The counter cannot be judged more exactly than that. With
--check the exit status is 1 if the goal does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from slow_link import DEADLINE_SECONDS, DELAYS_MS, PHASE, STAGES, VARIANTS, manifest, phase

PHASES = (*DELAYS_MS, 0.0)
ROUNDS = 3
MOST_APART = 0.05
"""Goal: the counter's distance from the truth, as a fraction of it."""


@dataclass(frozen=True)
class Round:
    """Seconds of all iterations of both runs; what the first one's counter says, and its error."""

    adapting: float
    fixed: float
    saved: float
    error: float

    @property
    def truth(self) -> float:
        return self.fixed - self.adapting


@dataclass(frozen=True)
class Found:
    """What all rounds say together."""

    rounds: Sequence[Round]

    @property
    def truth(self) -> float:
        return fmean(each.truth for each in self.rounds)

    @property
    def saved(self) -> float:
        return fmean(each.saved for each in self.rounds)

    @property
    def apart(self) -> float:
        return abs(self.saved - self.truth) / abs(self.truth)

    def spread(self, which: str) -> float:
        """Between the longest and the shortest of the runs ``adapting`` or ``fixed``, as a fraction
        of what was saved."""
        took = [getattr(each, which) for each in self.rounds]
        return float(max(took) - min(took)) / abs(self.truth)


def job(*, adapts: bool) -> dict[str, Any]:
    faults = [phase(k, delayMs=delay) for k, delay in enumerate(PHASES) if delay]
    found = manifest(VARIANTS[-1], faults)
    found["metadata"]["name"] = "saved-adapting" if adapts else "saved-fixed"
    found["spec"]["adaptation"] = {"enabled": adapts}
    found["spec"]["trainer"]["iterations"] = PHASE * len(PHASES)
    return found


def run(out: Path, *, adapts: bool) -> dict[str, Any]:
    """The report of one run. Raises RuntimeError with its last lines if it does not complete."""
    out.mkdir(parents=True)
    path = out / "job.yaml"
    path.write_text(yaml.safe_dump(job(adapts=adapts), sort_keys=False))
    done = subprocess.run(
        [sys.executable, "-m", "pipemorph.cli", "run", str(path), "--out", str(out / "run")],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise RuntimeError(f"pipemorph run exited {done.returncode}:\n{tail}")
    report: dict[str, Any] = json.loads((out / "run" / "report.json").read_text())
    return report


def measure(out: Path, number: int) -> Round:
    """One round. Every second one begins with the run that adapts, so that a load that grows or
    falls is in both kinds alike."""
    order = (True, False) if number % 2 else (False, True)
    found = {adapts: run(out / ("adapting" if adapts else "fixed"), adapts=adapts)
             for adapts in order}  # fmt: skip
    adapting, fixed = found[True], found[False]
    took = [sum(i["seconds"] for i in each["iterations"]) for each in (adapting, fixed)]
    return Round(*took, adapting["saved"]["seconds"], adapting["saved"]["error"])


def table(found: Found) -> str:
    rows = [
        f"| {number} | {each.adapting:.1f} s | {each.fixed:.1f} s | {each.truth:.1f} s |"
        f" {each.saved:.1f} ± {each.error:.1f} s |"
        for number, each in enumerate(found.rounds, 1)
    ]
    delays = ", ".join(f"{d:g}" for d in PHASES)
    return "\n".join(
        [
            "| round | adapting | plan of the start | saved | by the counter |",
            "|---:|---:|---:|---:|---:|",
            *rows,
            f"| mean | | | {found.truth:.1f} s | {found.saved:.1f} s |",
            "",
            f"{STAGES} emulated stages, {PHASE} iterations each at {delays} ms."
            f" {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}.",
            "Longest run less the shortest, of what was saved:"
            f" {found.spread('fixed'):.1%} with the plan of the start,"
            f" {found.spread('adapting'):.1%} adapting.",
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="pairs of runs (default: 3)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--check", action="store_true", help="exit 1 if the goal does not hold")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pipemorph-bench-") as scratch:
        found = Found([measure(Path(scratch) / str(k), k) for k in range(args.rounds)])
    print(table(found))
    holds = found.apart <= MOST_APART
    verdict = "holds" if holds else "DOES NOT HOLD"
    noise = max(found.spread("fixed"), found.spread("adapting"))
    if noise > MOST_APART:
        verdict += f", but runs of one kind are {noise:.0%} apart"
    print(f"counter within {MOST_APART:.0%} of the truth: {found.apart:.1%} {verdict}")
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in found.rounds], indent=1))
    return 0 if holds or not args.check else 1


if __name__ == "__main__":
    sys.exit(main())
