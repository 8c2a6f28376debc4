"""What large jobs cost the others, against a real API server.

    python benchmarks/large_jobs.py [--jobs 100] [--json FILE] [--check]

JOBS suspended jobs of 512 uneven stages, capped, each different, are created as fast as the API
server takes them. Meanwhile a small job is edited again and again: how long until the operator's
status says that it has seen the edit, before the large jobs come and while they do. Planning one of
them takes seconds of a processor, which must not hold up anybody (goal: an edit waits less than
0.5 s longer than it did before, at most). About two minutes; everything shares this machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/cluster", "tests/support", "operator")]

from operator_support import Jobs, manifest, own_installation  # noqa: E402
from testbed import catalog, wait_for  # noqa: E402

STAGES, MICROBATCHES = 512, 651
"""A third of what the API admits, so that a hundred are planned in minutes."""
EDITS_BEFORE = 40
MOST_LONGER = 0.5
"""Seconds that the longest wait may exceed the longest one before."""
DEADLINE = 600.0


def large(number: int) -> dict[str, Any]:
    """A job unlike that of any other ``number``."""
    times = [
        {"forward": 10.0 + (7 * i + number) % 5, "backwardInput": 11.0 + (3 * i + number) % 4,
         "backwardWeight": 6.0 + i % 3}
        for i in range(STAGES)
    ]  # fmt: skip
    schedule = {
        "microbatches": MICROBATCHES, "inFlightLimit": 400 + number, "stageTimes": times,
    }  # fmt: skip
    return manifest(f"large-{number}", stages=STAGES, suspend=True, schedule=schedule)


def seconds_until_seen(jobs: Jobs, name: str, number: int) -> float:
    """Edit a job; the time until its status is of that generation."""
    began = time.perf_counter()
    jobs.patch(name, {"adaptation": {"minGain": 0.05 + (number % 2) / 100}})
    wanted = jobs.get(name)["metadata"]["generation"]
    wait_for(
        f"generation {wanted} of {name} to be seen",
        lambda: jobs.get(name).get("status", {}).get("observedGeneration") == wanted,
        DEADLINE,
    )
    return time.perf_counter() - began


def suspended(jobs: Jobs, name: str) -> bool:
    return bool(jobs.get(name).get("status", {}).get("state") == "Suspended")


def measure(jobs: Jobs, count: int) -> tuple[list[float], list[float], float]:
    """Waits of edits before and meanwhile, and the seconds until all large jobs are suspended."""
    jobs.apply(manifest("small", stages=2, suspend=True))
    jobs.wait("small", "Suspended", DEADLINE)
    before = [seconds_until_seen(jobs, "small", i) for i in range(EDITS_BEFORE)]
    began = time.perf_counter()

    def create() -> None:
        for number in range(count):
            jobs.apply(large(number))

    creating = threading.Thread(target=create)
    creating.start()
    meanwhile: list[float] = []

    left = list(range(count))
    while creating.is_alive() or left:
        meanwhile.append(seconds_until_seen(jobs, "small", len(meanwhile)))
        # One look at a time: reading all of them would be most of the load.
        while left and not creating.is_alive() and suspended(jobs, f"large-{left[0]}"):
            left.pop(0)
        if time.perf_counter() - began > DEADLINE:
            raise TimeoutError(f"not all of {count} large jobs were suspended in {DEADLINE:.0f} s")
    creating.join()
    return before, meanwhile, time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--check", action="store_true", help="exit 1 if the goal does not hold")
    options = parser.parse_args()
    catalog.check(["api"])
    with (
        own_installation() as (cluster, installation),
        cluster.namespace("bench") as namespace,
    ):
        found = measure(Jobs(installation, namespace), options.jobs)
    before, meanwhile, seconds = found
    for what, waits in (("before", before), ("meanwhile", meanwhile)):
        waits.sort()
        print(
            f"an edit is seen after, {what}: median {waits[len(waits) // 2]:.3f} s, most "
            f"{waits[-1]:.3f} s ({len(waits)} edits)"
        )
    print(f"{options.jobs} jobs of {STAGES} stages: all suspended after {seconds:.1f} s")
    if options.json:
        figures = {"before": before, "meanwhile": meanwhile, "all_suspended": seconds}
        options.json.write_text(json.dumps(figures, indent=1))
    longer = meanwhile[-1] - before[-1]
    holds = longer < MOST_LONGER
    print(
        f"the longest wait is < {MOST_LONGER:g} s longer than before: {longer:.3f} "
        f"{'holds' if holds else 'DOES NOT HOLD'}"
    )
    return 1 if options.check and not holds else 0


if __name__ == "__main__":
    sys.exit(main())
