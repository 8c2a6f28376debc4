"""Runs all benchmarks that docs/benchmarks.md quotes, one after another.

One command: ``python benchmarks/all.py``. ``faults.py`` is not among them: ``make soak`` runs it.
Writes ``NAME.json`` and ``NAME.md`` to the folder given with --out. Continues if a benchmark fails.
Exits 1 if one failed, or if a goal does not hold, and lists them at the end.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
DEADLINE_SECONDS = 1200
NAMES = (
    "planner",
    "balance",
    "gpt_lengths",
    "idle",
    "detector",
    "diagnose_emulated",
    "engine",
    "observe",
    "observe_adapting",
    "op_cost",
    "pauses",
    "profiler_traces",
    "torch_peer",
    "torch_slow_link",
    "slow_link",
    "rebalance",
    "recovery",
    "replay",
    "uneven",
    "scale",
)
CHECKED = {"engine", "recovery", "scale", "slow_link"}
"""Benchmarks that check their goals only with --check."""


def find_broken_goals(printed: str) -> list[str]:
    """Printed lines of a benchmark with goals that do not hold."""
    return [line.strip() for line in printed.splitlines() if line.startswith("NO ")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {' '.join(NAMES)}")
    args = parser.parse_args()
    if unknown := sorted(set(args.names) - set(NAMES)):
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}")
    args.out.mkdir(parents=True, exist_ok=True)
    goals: dict[str, list[str]] = {}
    failed = []
    for name in args.names or NAMES:
        print(f"\n== {name}", flush=True)
        began = time.monotonic()
        command = [
            sys.executable,
            str(HERE / f"{name}.py"),
            "--json",
            str(args.out / f"{name}.json"),
            *(["--check"] if name in CHECKED else []),
        ]
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, check=False, timeout=DEADLINE_SECONDS
            )
        except subprocess.TimeoutExpired:
            print(f"{name} was not done after {DEADLINE_SECONDS} s")
            failed.append(f"{name} (not done after {DEADLINE_SECONDS} s)")
            continue
        print(done.stdout)
        (args.out / f"{name}.md").write_text(done.stdout)
        if broken := find_broken_goals(done.stdout):
            goals[name] = broken
        elif done.returncode:
            failed.append(f"{name} (exit {done.returncode})")
        print(f"({name}: {time.monotonic() - began:.0f} s, exit {done.returncode})", flush=True)
    if goals:
        print(f"\ngoals that do not hold: {', '.join(goals)}")
        for name, broken in goals.items():
            print("\n".join(f"  {name}: {line}" for line in broken))
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    if not goals and not failed:
        print("\nevery goal holds")
    return 1 if goals or failed else 0


if __name__ == "__main__":
    sys.exit(main())
