"""The main job, on this machine: what ``make demo`` runs.

1. A small GPT trains on real text over four stages; link 2 is slow for a while.
2. Eight emulated stages with the op times of a 14B model, run in five ways, while the last
   link goes from 0 to 30 to 60 ms.

Leaves reports and pictures in the folder given with --out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def step(title: str) -> None:
    print(f"\n== {title}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)

    step("1. A GPT over 4 stages on this machine's CPU; link 2 is 30 ms slower from iteration 10")
    run = [sys.executable, "-m", "pipemorph.cli", "run"]
    gpt = [*run, str(ROOT / "examples/gpt-slow-link.yaml"), "--out", str(out / "gpt"), "--force"]
    if code := subprocess.run(gpt, check=False).returncode:
        print(f"demo: the GPT run exited {code}; its logs are in {out / 'gpt' / 'logs'}")
        return code
    report = json.loads((out / "gpt" / "report.json").read_text())
    losses = [iteration["loss"] for iteration in report["iterations"]]
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f} nats/byte in {len(losses)} iterations")
    for adaptation in report["adaptations"]:
        at = adaptation["applied_at_iteration"]
        when = "never in force, a newer plan came first" if at is None else f"iteration {at}"
        print(
            f"  {when}: warm-up {adaptation['warmup_before']} → "
            f"{adaptation['warmup_after']}: {adaptation['reason']}"
        )

    step("2. A slow last link, five ways to run (emulated stages: nothing is computed)")
    path = ROOT / "benchmarks" / "slow_link.py"
    bench = [sys.executable, str(path), "--keep", str(out / "emulated")]
    bench += ["--json", str(out / "emulated.json")]
    if code := subprocess.run(bench, check=False).returncode:
        return code
    if importlib.util.find_spec("matplotlib") is not None:
        step("Pictures")
        for picture in sorted(out.rglob("timeline.png")):
            print(f"  {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
