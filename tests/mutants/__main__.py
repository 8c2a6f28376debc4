"""``python -m mutants``: draws mutants of the product, judges them and prints the kill rate.

    PYTHONPATH=tests python -m mutants --seed 1 --count 200 --out build/mutants.json
    PYTHONPATH=tests python -m mutants --compare build/mutants.json

The second judges the mutants that died in the first again, each first by the test that killed it
then, and fails if one survives.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mutants import code, comparing, tree
from mutants.drawing import Mutation, draw
from mutants.judging import Judge, Verdict
from mutants.measuring import Measured, measure_tests
from mutants.report import LOWEST_RATE, Report, describe_survivors, read_mutations

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tests/core", "tests/operator", "tests/trainer")
TIERS = ("test", "full", "times", "soak")
START_PROCESSES = frozenset({"multiprocess", "slow", "quiet", "cluster", "node", "rdma", "gpu"})
"""Markers of tests that judge nothing here: they start processes, or need something."""
DRAWN_FOR_ONE = 4
"""So many are drawn for each that is judged, since no test executes many."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.strftime("%Y%m%d")))
    parser.add_argument("--count", type=int, default=200, help="mutants to judge (default 200)")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the tree whose tests judge")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="the JSON of an earlier run")
    parser.add_argument(
        "--package", action="append", help="mutate this package; may be repeated (default: all)"
    )
    parser.add_argument("--folder", action="append", help="tests from here only; may be repeated")
    parser.add_argument(
        "--budget", type=float, default=20.0, help="processor seconds of a mutant's tests"
    )
    parser.add_argument(
        "--most", type=float, help="leave out tests that take more processor seconds"
    )
    parser.add_argument(
        "--costs", type=Path, help="a report log, to leave out at once what takes more than --most"
    )
    chosen = parser.parse_args(arguments)
    where = chosen.tree.resolve()
    run = Run(chosen, where)
    os.chdir(where)
    ended = pytest.main(
        [
            *("-c", str(where / "pyproject.toml"), "--rootdir", str(where), "-qq"),
            *("-p", "no:cacheprovider", "--hypothesis-profile=repeatable"),
            *(chosen.folder or FOLDERS),
        ],
        plugins=[run],
    )
    if run.status is None:
        print(f"pytest ended with {ended} before any mutant was judged", file=sys.stderr)
        return 2
    return run.status


class Run:
    """A plugin that judges mutants in place of running the collected tests."""

    def __init__(self, chosen: argparse.Namespace, where: Path) -> None:
        self.status: int | None = None
        self._chosen = chosen
        self._out: Path | None = chosen.out and chosen.out.resolve()
        self._earlier: dict[str, Any] | None = None
        if chosen.compare is not None:
            self._earlier = json.loads(chosen.compare.read_text())
        # pytest captures the usual ones.
        self._said = os.fdopen(os.dup(1), "w", buffering=1)
        packages = chosen.package or tree.PACKAGES
        seed = self._earlier["seed"] if self._earlier is not None else chosen.seed
        self._report = Report(
            _commit(ROOT), time.strftime("%Y-%m-%d"), seed, _commit(where), packages
        )
        self._files = tree.find_product(packages)
        self._most: float = chosen.most or chosen.budget
        self._costs = _read_costs(chosen.costs) if chosen.costs is not None else {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [
            item
            for item in items
            if _may_judge(item) and self._costs.get(item.nodeid, 0.0) <= self._most
        ]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._say(f"{len(session.items)} tests collected")
        for path, why in tree.import_product(self._files).items():
            self._say(f"not imported, so not mutated: {path}: {why}")
        functions = code.LiveFunctions(self._files.values())
        gc.collect()
        gc.freeze()  # forks share what no collection touches
        if self._earlier is not None:
            self.status = self._compare(session, functions, self._earlier)
        else:
            self.status = self._judge_drawn(session, functions)
        return True

    def _judge_drawn(self, session: pytest.Session, functions: code.LiveFunctions) -> int:
        count = self._chosen.count
        mutations = list(
            itertools.islice(draw(self._files, self._chosen.seed), DRAWN_FOR_ONE * count)
        )
        measured = self._measure(session, functions, mutations)
        judge = self._judge(session, functions, measured)
        for number, mutation in enumerate(mutations):
            if len(self._report.judged) == count:
                break
            if not measured.tests.get(number):
                self._report.not_executed.append(mutation)
                continue
            self._record(mutation, judge.judge(mutation, judge.choose_tests(number)))
        self._print_result()
        return 0 if self._report.rate >= LOWEST_RATE else 1

    def _compare(
        self, session: pytest.Session, functions: code.LiveFunctions, earlier: dict[str, Any]
    ) -> int:
        died = {m: v for m, v in read_mutations(earlier) if v.outcome == "killed"}
        found = comparing.find_again(list(died), self._files)
        judge = self._judge(session, functions, Measured())
        remaining = []
        for then, today in found.mutations.items():
            killer = died[then].by or ""
            verdict = judge.judge(today, comparing.find_test(killer, list(judge.items)))
            if verdict.outcome == "killed":
                self._record(today, verdict)
                continue
            self._say(f"not by the test that killed it then ({killer}): {_name(today)}")
            remaining.append(today)
        if remaining:
            measured = self._measure(session, functions, remaining)
            judge = self._judge(session, functions, measured)
            for number, mutation in enumerate(remaining):
                if measured.tests.get(number):
                    verdict = judge.judge(mutation, judge.choose_tests(number))
                else:
                    verdict = Verdict("survived", why="no test executes it")
                self._record(mutation, verdict)
        self._print_result()
        for mutation in found.gone:
            self._say(f"gone, its line has changed: {_name(mutation)}")
        survived = self._report.survived()
        self._say(f"{len(died)} had died, {survived} of them survive, {len(found.gone)} are gone")
        others = len(died) - len(found.gone) - self._report.killed()
        return 1 if others else 0

    def _measure(
        self,
        session: pytest.Session,
        functions: code.LiveFunctions,
        mutations: Sequence[Mutation],
    ) -> Measured:
        measured = measure_tests(
            session, functions, mutations, self._files, most_seconds=self._most, say=self._say
        )
        self._report.tests = len(measured.seconds)
        self._report.unusable = measured.unusable
        total = sum(measured.seconds.values())
        self._say(
            f"{len(measured.seconds)} tests can judge, {total:.0f} processor seconds; "
            f"{len(measured.unusable)} cannot (skipped, stopped or failed)"
        )
        for nodeid, why in measured.unusable.items():
            if not why.startswith("skipped"):
                self._say(f"  {nodeid}: {why.splitlines()[0]}")
        return measured

    def _judge(
        self, session: pytest.Session, functions: code.LiveFunctions, measured: Measured
    ) -> Judge:
        items = {item.nodeid: item for item in session.items}
        return Judge(session, items, functions, self._files, measured, self._chosen.budget)

    def _record(self, mutation: Mutation, verdict: Verdict) -> None:
        self._report.judged.append((mutation, verdict))
        number = len(self._report.judged)
        self._say(f"{number}: {verdict.outcome}: {_name(mutation)} by {verdict.by or 'no test'}")
        self._keep()

    def _keep(self) -> None:
        """Write all that is known so far: who stops the run has that."""
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._out.write_text(json.dumps(self._report.to_json(), indent=1))
            self._out.with_suffix(".txt").write_text(f"{self._report.table()}\n")

    def _print_result(self) -> None:
        self._keep()
        for line in describe_survivors(self._report, self._files):
            self._say(line)
        self._say(f"\n{self._report.table()}")

    def _say(self, line: str) -> None:
        print(line, file=self._said, flush=True)


def _name(mutation: Mutation) -> str:
    change = f"{mutation.before!r} -> {mutation.after!r}"
    return f"{mutation.path}:{mutation.line_number} {mutation.function}: {change}"


def _may_judge(item: pytest.Item) -> bool:
    """Whether a test is of ``make test`` and runs in this process."""
    markers = [marker.name for marker in item.iter_markers()]  # the closest first
    tier = next((name for name in markers if name in TIERS), "test")
    return tier == "test" and not START_PROCESSES.intersection(markers)


def _read_costs(log: Path) -> dict[str, float]:
    """The processor seconds of tests, from the log of a run with ``gate.processor_time``."""
    costs: dict[str, float] = {}
    for line in log.read_text().splitlines():
        entry = json.loads(line)
        for name, value in entry.get("user_properties", ()):
            if name == "processor_seconds":
                costs[entry["nodeid"]] = costs.get(entry["nodeid"], 0.0) + value
    return costs


def _commit(where: Path) -> str:
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=where,
        check=False,
        capture_output=True,
        text=True,
    )
    return said.stdout.strip()


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # not through the ends of all libraries, which miss what gc.freeze() kept
