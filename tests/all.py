"""Runs all that CI checks and says how it ended: ``make test``.

What waits runs beside what computes: lanes take part after part, those of low priority (what no
clock decides: the linters and the tests marked ``untimed``) among them, until none is left. At
last, with the machine to themselves, the tests marked ``quiet``, which compare times.
:mod:`gate.plan` says what the parts are. Every test is in exactly one, but for tests marked
``soak``, which ``make soak`` runs. What is not shown while it runs goes to build/tests and is shown
when all parts beside it are done.

At the very end each test that failed is run once more, alone; :mod:`gate` says which failures that
excuses and prints the table.

    python tests/all.py make lint      (what follows is run as well, at low priority)
"""

from __future__ import annotations

import shutil
import sys

from gate import parts, plan

OUT = parts.ROOT / "build" / "tests"
REPEATABLE = "--hypothesis-profile=repeatable"


def main(lint: list[str]) -> int:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)

    def tests(chosen: plan.Selection) -> parts.Part:
        options = (*chosen.arguments, REPEATABLE)
        return parts.pytest(chosen.name, OUT, *options, nice=chosen.nice)

    beside, alone = ([tests(chosen) for chosen in group] for group in (plan.BESIDE, plan.ALONE))
    if lint:
        command = ["nice", "-n", str(plan.NICE), *lint]
        # Third: beside those that wait the longest.
        beside.insert(2, parts.Part("lint", command, OUT, is_pytest=False))
    every = [*beside, *alone]
    try:
        for group, lanes in ((beside, plan.LANES), (alone, 1)):
            shown, *others = group
            shown.shown = True
            names = ", ".join(part.name for part in others) or "nothing"
            print(f"beside or after {shown.name}: {names}", flush=True)
            parts.run_beside(group, lanes)
            for part in others:
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
