"""Runs the tests and says how they ended: ``make test``, ``make test-all`` and ``make test-times``.

:mod:`gate.plan` says what the parts of each command are. The output of each part goes to
build/tests; a table at the end says what each one cost, and what failed.

    python tests/all.py test     needs no testbed; no second run excuses a failure
    python tests/all.py rest     what `make test-all` runs after `make test`
    python tests/all.py times    what compares times; for an idle machine
    python tests/all.py check    lint, and the tests of `make test` that a change reaches
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gate import budget, impact, parts, plan, records, tiers
from gate.schedule import Schedule
from gate.testbeds import TestbedBuild
from gate.verdict import PartResult, Verdict

OUT = parts.ROOT / "build" / "tests"
DEADLINE = "PIPEMORPH_TEST_DEADLINE"
"""Variable with the time, in seconds since the epoch, at which the caller ends this program."""
SECONDS_TO_TEST = 1500.0
"""Seconds before the deadline at which a run that waits for a testbed stops: too little to test
with it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=["test", "rest", "times", "check"])
    parser.add_argument("--base", help="the commit to compare with, for check")
    arguments = parser.parse_args()
    command = arguments.command
    shutil.rmtree(OUT / command, ignore_errors=True)
    (OUT / command).mkdir(parents=True)
    if command == "check":
        verdict = run_check(OUT / command, arguments.base)
    else:
        verdict = {"test": run_test, "rest": run_rest, "times": run_times}[command](OUT / command)
    print(f"\n{verdict.table()}", flush=True)
    return 0 if verdict.good else 1


def run_test(out: Path) -> Verdict:
    """Run the parts without a second run: nothing here may be decided by a clock."""
    factor = budget.slowness()
    plans = plan.TEST_PARTS
    made = [make_part(one, out, limit=plan.TEST_SECONDS) for one in plans]
    results = run_parts(made, plan.TEST_LANES)
    budgets = {one.name: one.budget or 0.0 for one in plans}
    records.note_costs(costs_of(results))
    too_much = budget.over_budget(results, budgets, plan.TEST_BUDGET, factor)
    return Verdict(results, command="make test", over_budget=too_much)


def costs_of(results: Iterable[PartResult]) -> dict[str, float]:
    """Processor seconds of each test file."""
    costs: dict[str, float] = {}
    for test in (test for part in results for test in part.results or ()):
        path = test.nodeid.partition("::")[0]
        costs[path] = costs.get(path, 0.0) + test.processor_seconds
    return costs


def run_check(out: Path, base: str | None) -> Verdict:
    """Lint, and the nearest tests that what changed since ``base`` reaches."""
    commit, changed = impact.changed_files(parts.ROOT, base)
    reached = impact.ImportGraph(parts.ROOT, impact.list_files(parts.ROOT)).tests_reached(changed)
    here = {p: n for p, n in reached.items() if p.parts[1] not in tiers.FULL_FOLDERS}
    chosen, deferred = impact.choose(here, records.known_costs(), plan.CHECK_BUDGET)
    say(f"{len(changed)} files differ from {commit}; they reach {len(here)} test files")
    if deferred:
        say(
            f"{len(deferred)} of them, which import what changed only through others, are "
            f"run only by `make test`: from {deferred[0]} on"
        )
    made = [make_part(one, out) for one in plan.TEST_PARTS if one.name == "lint"]
    for number, paths in enumerate((chosen[::2], chosen[1::2]), 1):
        if paths:
            selected = plan.PartPlan(f"tests {number}", tuple(map(str, paths)), may_be_empty=True)
            made.append(make_part(selected, out))
    return Verdict(run_parts(made, plan.TEST_LANES), command="make check")


def run_times(out: Path) -> Verdict:
    results = run_parts([make_part(one, out) for one in plan.TIMES_PARTS], 1)
    return parts.judge(results, out, "make test-times", parts.REPEATABLE)


def run_rest(out: Path) -> Verdict:
    plans = plan.REST_PARTS
    needed = sorted({need for one in plans for need in one.needs})
    with TestbedBuild(needed, out / "testbeds.log", say) as testbeds:
        schedule = Schedule(
            plans, lambda one: make_part(one, out), testbeds, lambda: run_seconds(time.time())
        )
        with stopped_at_the_end() as began:
            parts.run_in_lanes(lambda: began.add(schedule.take()), plan.REST_LANES, say)
    ran = {part.name: part.result() for part in began.parts}
    missing = schedule.not_run
    results = [
        ran.get(one.name) or PartResult(one.name, None, 0.0, not_run=missing.get(one.name))
        for one in plans
    ]
    verdict = parts.judge(results, out, "make test-all", parts.REPEATABLE)
    again = records.note_unstable([test.nodeid for test in verdict.unstable()])
    return verdict.with_(seen_before=again, stopped=schedule.stopped)


class Began:
    """The parts that began."""

    def __init__(self) -> None:
        self.parts: list[parts.Part] = []

    def add(self, part: parts.Part | None) -> parts.Part | None:
        if part is not None:
            self.parts.append(part)
        return part


@contextmanager
def stopped_at_the_end() -> Iterator[Began]:
    """Stop the parts that still run when the block ends, as by Ctrl-C."""
    began = Began()
    try:
        yield began
    finally:
        for part in began.parts:
            part.stop()


def run_parts(made: Sequence[parts.Part], lanes: int) -> list[PartResult]:
    take = parts.in_turn(made)
    with stopped_at_the_end() as began:
        parts.run_in_lanes(lambda: began.add(take()), lanes, say)
    return [part.result() for part in made]


def make_part(one: plan.PartPlan, out: Path, **options: Any) -> parts.Part:
    if one.command:
        return parts.Part(one.name, list(one.command), out, is_pytest=False, **options)
    return parts.pytest(one.name, out, *one.arguments, "-q", parts.REPEATABLE, **options)


def run_seconds(now: float) -> float:
    """Seconds until a run that waits for a testbed stops."""
    deadline = os.environ.get(DEADLINE)
    return float(deadline) - SECONDS_TO_TEST - now if deadline else float("inf")


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
