"""Runs tests against one mutant in a forked process and reports if it died."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mutants import code
from mutants.drawing import Mutation
from mutants.forks import Fork, Limit
from mutants.measuring import Measured


@dataclass
class Verdict:
    outcome: str
    """``killed``, ``survived`` or ``not judged``."""
    by: str | None = None
    """The test that failed or hung."""
    why: str = ""
    tests: list[str] = field(default_factory=list)
    """Tests that ran, in this order."""
    processor_seconds: float = 0.0


@dataclass
class Judge:
    session: pytest.Session
    items: Mapping[str, pytest.Item]
    """Items by node id."""
    functions: code.LiveFunctions
    files: dict[str, Path]
    measured: Measured
    budget: float = 20.0
    """The processor seconds, as measured without a mutant, of the tests that a mutant gets."""

    def choose_tests(self, number: int) -> list[str]:
        """The tests that judge a mutation: those that execute its statement, cheapest first, then
        others of their files, since some read what a cached helper of the file has computed."""
        executing = self.measured.tests.get(number, [])
        files = {nodeid.split("::")[0] for nodeid in executing}
        others = sorted(
            (t for t in self.measured.seconds if t.split("::")[0] in files),
            key=lambda nodeid: self.measured.seconds[nodeid],
        )
        chosen: list[str] = []
        spent = 0.0
        for nodeid in dict.fromkeys([*executing, *others]):
            spent += self.measured.seconds[nodeid]
            if chosen and spent > self.budget:
                break
            chosen.append(nodeid)
        return chosen

    def judge(self, mutation: Mutation, tests: Sequence[str]) -> Verdict:
        """Run ``tests`` until one fails. A failure counts if the same tests, up to that one, pass
        without the mutant; otherwise that test is skipped."""
        remaining = list(tests)
        ran: list[str] = []
        seconds = 0.0
        while remaining:
            fork = self._fork(remaining, mutation)
            failed, why = None, ""
            for one in fork.run():
                seconds += one.processor_seconds
                ran.append(one.nodeid)
                if one.outcome == "failed":
                    failed, why = one.nodeid, one.why
            if fork.error is not None:
                return Verdict("not judged", why=fork.error)
            if fork.stopped is not None:
                failed, why = fork.stopped, "hangs, or its process dies"
                ran.append(failed)
            if failed is None:
                return Verdict("survived", tests=ran, processor_seconds=round(seconds, 2))
            end = remaining.index(failed) + 1
            if self._pass_without(remaining[:end]):
                return Verdict("killed", failed, why, ran, round(seconds, 2))
            ran.remove(failed)
            remaining = remaining[end:]
        return Verdict("survived", tests=ran, processor_seconds=round(seconds, 2))

    def _pass_without(self, tests: Sequence[str]) -> bool:
        fork = self._fork(tests, None)
        outcomes = [one.outcome for one in fork.run()]
        return len(outcomes) == len(tests) and "failed" not in outcomes

    def _fork(self, tests: Sequence[str], mutation: Mutation | None) -> Fork:
        def prepare(session: pytest.Session) -> None:
            if mutation is not None:
                file = self.files[mutation.path]
                for replacement in code.compile_mutant(self.functions, mutation, file):
                    replacement.install()

        def limit(item: pytest.Item) -> Limit:
            usual = self.measured.seconds.get(item.nodeid, self.budget)
            usual_wall = self.measured.wall_seconds.get(item.nodeid, self.budget)
            return Limit(min(5 * usual + 5, 2 * self.budget), 10 * usual_wall + 30)

        return Fork(self.session, [self.items[nodeid] for nodeid in tests], limit, prepare)
