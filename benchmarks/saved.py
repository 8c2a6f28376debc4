"""The counter of saved seconds against the same emulated job without adaptation.

One command: ``python benchmarks/saved.py [--json FILE] [--check]``. Two ``pipemorph run`` of eight
emulated stages, whose last link is delayed by 30 ms, then by 60 ms, then not at all. One may adapt,
the other keeps the plan of the start. What the first one says that it saved is compared with the
difference of their iterations. With --check the exit status is 1 if the goal does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from slow_link import DEADLINE_SECONDS, DELAYS_MS, PHASE, STAGES, VARIANTS, manifest

PHASES = (*DELAYS_MS, 0.0)
MOST_APART = 0.05
"""Goal: the counter's distance from the truth, as a fraction of it."""


@dataclass(frozen=True)
class Found:
    """Seconds of all iterations of both runs; what the first one's counter says, and its error."""

    adapting: float
    fixed: float
    saved: float
    error: float

    @property
    def truth(self) -> float:
        return self.fixed - self.adapting

    @property
    def apart(self) -> float:
        return abs(self.saved - self.truth) / self.truth


def job(*, adapts: bool) -> dict[str, Any]:
    found = manifest(VARIANTS[-1])
    spec = found["spec"]
    found["metadata"]["name"] = "saved-adapting" if adapts else "saved-fixed"
    spec["adaptation"] = {"enabled": adapts}
    spec["trainer"]["iterations"] = PHASE * len(PHASES)
    spec["faults"] = [
        {
            "link": STAGES - 2,
            "fromIteration": k * PHASE,
            "toIteration": (k + 1) * PHASE,
            "delayMs": delay,
        }
        for k, delay in enumerate(PHASES)
        if delay
    ]
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--check", action="store_true", help="exit 1 if the goal does not hold")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pipemorph-bench-") as scratch:
        adapting = run(Path(scratch) / "adapting", adapts=True)
        fixed = run(Path(scratch) / "fixed", adapts=False)
    took = [sum(i["seconds"] for i in each["iterations"]) for each in (adapting, fixed)]
    saved = adapting["saved"]
    found = Found(took[0], took[1], saved["seconds"], saved["error"])
    print(
        f"| {STAGES} emulated stages, {PHASE} iterations each at "
        f"{', '.join(f'{d:g}' for d in PHASES)} ms | |\n|---|---:|\n"
        f"| iterations, adapting | {found.adapting:.1f} s |\n"
        f"| iterations, plan of the start | {found.fixed:.1f} s |\n"
        f"| saved | {found.truth:.1f} s |\n"
        f"| saved, by the counter | {found.saved:.1f} ± {found.error:.1f} s |\n\n"
        f"Emulated stages. {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}.\n"
    )
    holds = found.apart <= MOST_APART
    print(
        f"counter within {MOST_APART:.0%} of the truth: {found.apart:.1%} "
        f"{'holds' if holds else 'DOES NOT HOLD'}"
    )
    if args.json:
        args.json.write_text(json.dumps(asdict(found), indent=1))
    return 0 if holds or not args.check else 1


if __name__ == "__main__":
    sys.exit(main())
