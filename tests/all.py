"""Runs all that CI checks and says how it ended: ``make test``.

What waits runs beside what computes, in three lanes: the tests on nodes and then those in guests;
those of Kubernetes' API level and then most others, whose deadlines leave time for that; and at
low priority what no clock decides, the linters and the tests marked ``untimed``. At last, with the
machine to themselves, the tests marked ``quiet``, which compare times. Every test is in exactly one
part, since the parts' marker expressions exclude each other and leave nothing out but tests marked
``soak``, which ``make soak`` runs. What is not shown while it runs goes to build/tests and is shown
at the end of its phase.

At the very end each test that failed is run once more, alone; :mod:`gate` says which failures that
excuses and prints the table.

    python tests/all.py make lint      (what follows is run first at low priority)
"""

from __future__ import annotations

import shutil
import sys

from gate import parts

OUT = parts.ROOT / "build" / "tests"
NICE = 15
"""A low priority, but not the lowest: that would come to nothing while the first run on a machine
builds Kubernetes."""
REPEATABLE = "--hypothesis-profile=repeatable"


def main(lint: list[str]) -> int:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)

    def tests(name: str, expression: str, *options: str, nice: int = 0) -> parts.Part:
        chosen = f"not soak and {expression}"
        return parts.pytest(name, OUT, "-m", chosen, REPEATABLE, *options, nice=nice)

    # Collecting takes a while: what is in one folder is looked for only there.
    cluster, rdma = "tests/cluster", "tests/rdma"

    low = [tests("untimed", "untimed", "-o", "timeout=1200", nice=NICE)]
    if lint:
        command = ["nice", "-n", str(NICE), *lint]
        low.insert(0, parts.Part("lint", command, OUT, is_pytest=False))
    phases = [
        [
            [
                tests("nodes", "node and not quiet", cluster),
                tests("guests", "rdma and not quiet", rdma),
            ],
            [
                tests("api", "cluster and not (node or quiet)", cluster),
                tests("patient", "not (untimed or cluster or node or rdma or quiet)"),
            ],
            low,
        ],
        # A cluster lives as long as its part, and one that idles would disturb the others.
        [[tests("quiet-nodes", "quiet and node", cluster), tests("quiet", "quiet and not node")]],
    ]
    every = [part for lanes in phases for lane in lanes for part in lane]
    try:
        for lanes in phases:
            shown, *beside = [part for lane in lanes for part in lane]
            shown.shown = True
            print(f"beside or after {shown.name}: {', '.join(p.name for p in beside)}", flush=True)
            parts.run_beside(lanes)
            for part in beside:
                print(f"\n{f' {part.name} ':-^100}\n{part.log.read_text(errors='replace')}")
    finally:
        for part in every:
            part.stop()
    verdict = parts.judge([part.result() for part in every], OUT, REPEATABLE)
    print(f"\n{verdict.table()}", flush=True)
    return 0 if verdict.good else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
