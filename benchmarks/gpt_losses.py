"""The GPT example with and without a slow link: the same losses, to the bit.

One command: ``python benchmarks/gpt_losses.py [--json FILE] [--iterations N]``. Runs
examples/gpt.yaml and examples/gpt-slow-link.yaml (30 ms on link 2 from iteration 10 to 25) as a
user would, and compares every iteration's loss bit for bit. Exits 1 if one differs, or if the
fault trace did not hold a single message.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_SECONDS = 600


def run(example: str, iterations: int, scratch: Path) -> dict[str, Any]:
    """report.json of one run. Raises RuntimeError with its last lines if it did not complete."""
    manifest = yaml.safe_load((ROOT / "examples" / f"{example}.yaml").read_text())
    manifest["spec"]["trainer"]["iterations"] = iterations
    job = scratch / f"{example}.yaml"
    job.write_text(yaml.safe_dump(manifest))
    out = scratch / example
    command = [sys.executable, "-m", "pipemorph.cli", "run", str(job), "--out", str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False
    )
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise RuntimeError(f"{example}: pipemorph run exited {done.returncode}:\n{tail}")
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pipemorph-bench-") as scratch:
        calm = run("gpt", args.iterations, Path(scratch))
        slow = run("gpt-slow-link", args.iterations, Path(scratch))
    losses = [[float(i["loss"]).hex() for i in report["iterations"]] for report in (calm, slow)]
    differing = [k for k, (a, b) in enumerate(zip(*losses, strict=True)) if a != b]
    held = sum(fault.get("messages_held", 0) for fault in slow["faults"])
    seconds = [statistics.median(i["seconds"] for i in r["iterations"]) for r in (calm, slow)]
    first, last = calm["iterations"][0]["loss"], calm["iterations"][-1]["loss"]
    print("| GPT, 4 stages, this machine's CPU | undisturbed | 30 ms on link 2 |")
    print("|---|---:|---:|")
    print(f"| iterations | {len(losses[0])} | {len(losses[1])} |")
    print(f"| messages held by the fault trace | 0 | {held} |")
    print(f"| median iteration | {seconds[0]:.2f} s | {seconds[1]:.2f} s |")
    print(f"| adaptations | {len(calm['adaptations'])} | {len(slow['adaptations'])} |")
    print(f"| losses that differ in any bit | – | {len(differing)} |")
    print(f"\nLoss {first:.3f} → {last:.3f} nats per byte.")
    if args.json:
        figures = {"losses": losses, "differing": differing, "held": held, "seconds": seconds}
        args.json.write_text(json.dumps(figures, indent=1))
    if not held:
        print("the fault trace held no message: nothing was shown", file=sys.stderr)
    return 1 if differing or not held or len(losses[0]) != args.iterations else 0


if __name__ == "__main__":
    sys.exit(main())
