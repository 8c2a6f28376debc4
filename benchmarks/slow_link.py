"""The closed loop under a slow last link: four policies, 0, 30 and 60 ms, emulated stages.

One command: ``python benchmarks/slow_link.py [--json FILE] [--keep DIR]``. Every row is one
``pipemorph run`` of a 14B-like profile (8 emulated stages, 24 microbatches) whose fault trace
walks the delay of the last link through 0, 30 and 60 ms. Nothing is told to the controller:
what pipemorph does in a phase it found out from the trainer's telemetry. A phase's time is
the median of its iterations once the schedule has settled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

STAGES, MICROBATCHES = 8, 24
TIMES = {"forward": 10.0, "backwardInput": 10.5, "backwardWeight": 5.5}
MESSAGE_BYTES, STANDS_FOR = 1 << 18, 1 << 24
DELAYS_MS = (0.0, 30.0, 60.0)
PHASE, SETTLE = 8, 4
"""Iterations per delay, and how many of them at its start are not counted: detection, and
two iterations until all ranks have committed the new plan."""
DEADLINE_SECONDS = 300


@dataclass(frozen=True)
class Variant:
    name: str
    policy: str
    path: str


VARIANTS = (
    Variant("1F1B", "1f1b", "direct"),
    Variant("zero-bubble", "zero-bubble", "direct"),
    Variant("zero-bubble, delegated", "zero-bubble", "delegated"),
    Variant("pipemorph", "pipemorph", "auto"),
)


@dataclass(frozen=True)
class Row:
    variant: str
    seconds: dict[str, float]
    """Settled iteration time per delay in milliseconds (as text, for JSON)."""
    adaptations: list[dict[str, Any]]
    iterations: list[float]


def manifest(variant: Variant) -> dict[str, Any]:
    link = STAGES - 2
    faults = [
        {"link": link, "fromIteration": k * PHASE, "toIteration": (k + 1) * PHASE, "delayMs": d}
        for k, d in enumerate(DELAYS_MS)
        if d
    ]
    return {
        "apiVersion": "pipemorph.io/v1alpha1",
        "kind": "PipeMorphJob",
        "metadata": {"name": f"slow-link-{variant.policy}-{variant.path}"},
        "spec": {
            "parallelism": {"stages": STAGES},
            "schedule": {
                "microbatches": MICROBATCHES,
                "policy": variant.policy,
                "stageTimes": [TIMES] * STAGES,
            },
            "transport": {"path": variant.path},
            "emulation": {
                "stageTimes": [TIMES],
                "messageBytes": MESSAGE_BYTES,
                "standsForBytes": STANDS_FOR,
            },
            "trainer": {
                "module": "pipemorph_trainer.examples.emulated",
                "iterations": PHASE * len(DELAYS_MS),
            },
            "faults": faults,
        },
    }


def run(variant: Variant, out: Path) -> Row:
    """One ``pipemorph run``. Raises RuntimeError with its last lines if it does not complete."""
    out.mkdir(parents=True, exist_ok=True)
    job = out / "job.yaml"
    job.write_text(yaml.safe_dump(manifest(variant), sort_keys=False))
    command = [sys.executable, "-m", "pipemorph.cli", "run", str(job), "--out", str(out / "run")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False
    )
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise RuntimeError(f"{variant.name}: pipemorph run exited {done.returncode}:\n{tail}")
    report = json.loads((out / "run" / "report.json").read_text())
    times = [iteration["seconds"] for iteration in report["iterations"]]
    settled = {
        f"{delay:g}": statistics.median(times[k * PHASE + SETTLE : (k + 1) * PHASE])
        for k, delay in enumerate(DELAYS_MS)
    }
    return Row(variant.name, settled, report["adaptations"], times)


def table(rows: list[Row]) -> str:
    head = [f"{d:g} ms" for d in DELAYS_MS]
    lines = [
        f"| policy (emulated, {STAGES} stages, {MICROBATCHES} microbatches) | "
        + " | ".join(head)
        + " | 60 ms against its own 0 ms |",
        "|---|" + "---:|" * (len(head) + 1),
    ]
    for row in rows:
        cells = [f"{row.seconds[f'{d:g}'] * 1e3:.0f} ms" for d in DELAYS_MS]
        slowdown = row.seconds["60"] / row.seconds["0"]
        lines.append(f"| {row.variant} | " + " | ".join(cells) + f" | {slowdown:.2f}× |")
    ours, direct = rows[-1], rows[1]
    lines.append("")
    lines.append(
        f"At 60 ms pipemorph is {direct.seconds['60'] / ours.seconds['60']:.2f}× faster than "
        f"zero-bubble on the direct path and {rows[0].seconds['60'] / ours.seconds['60']:.2f}× "
        "faster than 1F1B (emulated stages)."
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--keep", type=Path, help="keep the runs, with their pictures, here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pipemorph-bench-") as scratch:
        base = args.keep or Path(scratch)
        rows = []
        for variant in VARIANTS:
            print(f"running {variant.name} …", file=sys.stderr, flush=True)
            rows.append(run(variant, base / variant.name.replace(", ", "-").replace(" ", "-")))
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
