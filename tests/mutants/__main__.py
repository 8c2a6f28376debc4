"""``python -m mutants``: draws mutants of the product, judges them and prints the kill rate.

PYTHONPATH=tests python -m mutants --seed 1 --count 200 --out build/mutants.json
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

import pytest

from mutants import code, tree
from mutants.drawing import Mutation, draw
from mutants.judging import Judge, Verdict
from mutants.measuring import Measured, measure_tests
from mutants.report import LOWEST_RATE, Report, describe_survivors

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tests/core", "tests/operator", "tests/trainer")
TIERS = ("test", "full", "times", "soak")
START_PROCESSES = frozenset({"multiprocess", "slow", "quiet", "cluster", "node", "rdma", "gpu"})
"""Markers of tests that judge nothing here: they start processes, or need something."""
DRAWN_FOR_ONE = 4
"""Mutants drawn for each that is judged, since no test executes many."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.strftime("%Y%m%d")))
    parser.add_argument("--count", type=int, default=200, help="mutants to judge (default 200)")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the tree whose tests judge")
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
        # pytest captures the usual ones.
        self._said = os.fdopen(os.dup(1), "w", buffering=1)
        packages = chosen.package or tree.PACKAGES
        self._report = Report(
            _commit(ROOT), time.strftime("%Y-%m-%d"), chosen.seed, _commit(where), packages
        )
        self._files = tree.find_product(packages)
        self._most: float = chosen.most or chosen.budget

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if _may_judge(item)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._say(f"{len(session.items)} tests collected")
        for path, why in tree.import_product(self._files).items():
            self._say(f"not imported, so not mutated: {path}: {why}")
        functions = code.LiveFunctions(self._files.values())
        gc.collect()
        gc.freeze()  # forks share what no collection touches
        self.status = self._judge_drawn(session, functions)
        return True

    def _judge_drawn(self, session: pytest.Session, functions: code.LiveFunctions) -> int:
        count = self._chosen.count
        mutations = list(
            itertools.islice(draw(self._files, self._chosen.seed), DRAWN_FOR_ONE * count)
        )
        measured = self._measure(session, functions, mutations)
        items = {item.nodeid: item for item in session.items}
        judge = Judge(session, items, functions, self._files, measured, self._chosen.budget)
        for number, mutation in enumerate(mutations):
            if len(self._report.judged) == count:
                break
            if not measured.tests.get(number):
                self._report.not_executed.append(mutation)
                continue
            self._record(mutation, judge.judge(mutation, judge.choose_tests(number)))
        self._print_result()
        return 0 if self._report.rate >= LOWEST_RATE else 1

    def _measure(
        self, session: pytest.Session, functions: code.LiveFunctions, mutations: Sequence[Mutation]
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
    """True if a test is of ``make test`` and runs in this process."""
    markers = [marker.name for marker in item.iter_markers()]  # the closest first
    tier = next((name for name in markers if name in TIERS), "test")
    return tier == "test" and not START_PROCESSES.intersection(markers)


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
    os._exit(status)  # not through the ends of libraries, which miss objects of gc.freeze()
