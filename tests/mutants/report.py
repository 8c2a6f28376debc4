"""Result of a run: the JSON file and the table."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mutants.drawing import Mutation
from mutants.judging import Verdict

LOWEST_RATE = 0.9


@dataclass
class Report:
    """Findings of a run."""

    commit: str
    date: str
    seed: int
    tests_of: str
    """The commit of the tests' tree, where it is another."""
    packages: Sequence[str]
    tests: int = 0
    """Tests that can judge."""
    unusable: dict[str, str] = field(default_factory=dict)
    judged: list[tuple[Mutation, Verdict]] = field(default_factory=list)
    not_executed: list[Mutation] = field(default_factory=list)

    def killed(self, package: str | None = None) -> int:
        return self._count("killed", package)

    def survived(self, package: str | None = None) -> int:
        return self._count("survived", package)

    @property
    def rate(self) -> float:
        judged = self.killed() + self.survived()
        return self.killed() / judged if judged else 0.0

    def _count(self, outcome: str, package: str | None) -> int:
        return sum(
            verdict.outcome == outcome and package in (None, mutation.package)
            for mutation, verdict in self.judged
        )

    def to_json(self) -> dict[str, Any]:
        run = {"commit": self.commit, "date": self.date, "seed": self.seed}
        return run | {
            "tests_of": self.tests_of,
            "tests": self.tests,
            "rate": round(self.rate, 4),
            "judged": [
                {"mutation": asdict(mutation), "verdict": asdict(verdict)}
                for mutation, verdict in self.judged
            ],
            "not_executed": [asdict(mutation) for mutation in self.not_executed],
            "unusable": self.unusable,
        }

    def table(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        of = f", tests of {self.tests_of}" if self.tests_of != self.commit else ""
        yield f"{self.commit}{of}, {self.date}, seed {self.seed}, {self.tests} tests"
        yield f"{'package':20} {'judged':>7} {'killed':>7} {'survived':>9} {'not executed':>13}"
        for package in (*self.packages, None):
            killed, survived = self.killed(package), self.survived(package)
            missed = sum(package in (None, m.package) for m in self.not_executed)
            judged = killed + survived
            rate = f"{killed / judged:8.1%}" if judged else ""
            yield (
                f"{package or 'all':20} {judged:7} {killed:7} {survived:9} {missed:13} {rate}"
            ).rstrip()
        if others := [m for m, v in self.judged if v.outcome not in ("killed", "survived")]:
            yield f"{len(others)} could not be judged: see the JSON file"


def describe_survivors(report: Report, files: Mapping[str, Path]) -> Iterator[str]:
    """A unified diff of each survivor, and the tests that ran."""
    for mutation, verdict in report.judged:
        if verdict.outcome != "survived":
            continue
        yield f"\nSURVIVED {mutation.path}:{mutation.line_number} {mutation.function}"
        yield from make_diff(mutation, files[mutation.path])
        shown = verdict.tests[:5]
        more = len(verdict.tests) - len(shown)
        yield f"  {len(verdict.tests)} tests ran ({verdict.processor_seconds:.1f} s):"
        yield from (f"    {test}" for test in shown)
        if more > 0:
            yield f"    and {more} more: see the JSON file"


def make_diff(mutation: Mutation, file: Path) -> list[str]:
    source = file.read_bytes()
    before, after = (text.decode().splitlines() for text in (source, mutation.apply(source)))
    return list(difflib.unified_diff(before, after, mutation.path, mutation.path, "", "", 2, ""))
