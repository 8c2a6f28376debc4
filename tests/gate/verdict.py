"""Whether a run of all parts is good enough to land, and the table that says why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gate.results import Results, TestResult

MOST_UNSTABLE = 3
"""With more tests than this that failed and then passed, the run fails."""
MOST_SECOND_RUNS = 10
"""When more fail than this, something is broken at large, and the rest are not run again."""
SLOWEST = 15
MESSAGE_LINES, MESSAGE_COLUMNS = 8, 300
"""How much of a failure is shown at the end: the programs under test may say far more than fits a
screen. All of it is in the kept outputs."""


@dataclass
class PartResult:
    """How one part of the run ended. ``results`` is None for a command that is not pytest."""

    name: str
    status: int | None
    """Its exit status; None if it was never started."""
    seconds: float
    processor_seconds: float = 0.0
    results: Results | None = None

    def died(self) -> str | None:
        """Why the part as a whole is a failure, whatever its tests said; None if it is not."""
        if self.status is None:
            return "was not run"
        if self.results is None:
            return f"exit {self.status}" if self.status else None
        if self.results.not_collected:
            return "could not import " + "\n".join(self.results.not_collected)
        if not self.results.complete:
            return f"died (exit {self.status}) before its last test: what is missing is not known"
        if self.status == 0 or (self.status == 1 and self.results.failed()):
            return None
        return f"exit {self.status}, with no test that failed"


@dataclass
class SecondRun:
    """A failed test, run once more alone. ``folder`` keeps what was said both times."""

    passed: bool
    folder: Path
    message: str = ""
    """Why it failed again."""


@dataclass
class Verdict:
    parts: Sequence[PartResult]
    second_runs: Mapping[str, SecondRun]
    """By node id."""

    def unstable(self) -> list[TestResult]:
        return [test for test in failures(self.parts) if self._excused(test)]

    def failed(self) -> list[TestResult]:
        return [test for test in failures(self.parts) if not self._excused(test)]

    def _excused(self, test: TestResult) -> bool:
        again = self.second_runs.get(test.nodeid)
        return test.final is None and again is not None and again.passed

    @property
    def good(self) -> bool:
        died = any(part.died() for part in self.parts)
        return not died and not self.failed() and len(self.unstable()) <= MOST_UNSTABLE

    def table(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{' parts ':=^100}"
        yield f"{'':23} {'by the clock':>12} {'processors':>12}"
        for part in self.parts:
            how = "ok" if part.status == 0 else "FAILED" if part.status else "not run"
            took = f"{part.seconds:10.0f} s {part.processor_seconds:10.0f} s"
            yield f"{part.name:14} {how:8} {took}   {_counts(part.results)}".rstrip()
        tests = {test.nodeid: (part.name, test) for part, test in _tests(self.parts)}
        yield f"\n{f' the {SLOWEST} slowest tests ':=^100}"
        for name, test in sorted(tests.values(), key=lambda t: -t[1].seconds)[:SLOWEST]:
            yield f"{test.seconds:6.1f} s   {name:10} {test.nodeid}"
        unstable = self.unstable()
        yield f"\n{' UNSTABLE ':=^100}"
        yield (
            f"{len(unstable)} failed once and passed when run again alone; "
            f"with more than {MOST_UNSTABLE} the run fails. Each is a defect."
        )
        for test in unstable:
            yield f"\nUNSTABLE {test.nodeid}\n{_short(test.message)}"
            yield f"    both outputs: {self.second_runs[test.nodeid].folder}"
        for part in self.parts:
            if why := part.died():
                yield f"\nFAILED {part.name}: {_short(why).lstrip()}"
        for test in self.failed():
            yield f"\nFAILED {test.nodeid} ({self._why_red(test)})\n{_short(test.message)}"
            if (again := self.second_runs.get(test.nodeid)) is not None:
                yield f"  and again:\n{_short(again.message)}"
        yield ""
        if not self.good:
            yield "make test FAILED" + (
                f": {len(unstable)} unstable tests" if len(unstable) > MOST_UNSTABLE else ""
            )
        counted = [test for _, test in tests.values()]
        passed = sum(test.outcome == "passed" for test in counted) + len(unstable)
        skipped = sum(test.outcome == "skipped" for test in counted)
        yield f"{passed} passed, {len(self.failed())} failed, {skipped} skipped"

    def _why_red(self, test: TestResult) -> str:
        if test.final is not None:
            return f"{test.final}, which no second run excuses"
        again = self.second_runs.get(test.nodeid)
        return "not run again" if again is None else f"twice; both outputs: {again.folder}"


def failures(parts: Sequence[PartResult]) -> list[TestResult]:
    return [test for _, test in _tests(parts) if test.outcome == "failed"]


def _tests(parts: Sequence[PartResult]) -> Iterator[tuple[PartResult, TestResult]]:
    for part in parts:
        for test in part.results or ():
            yield part, test


def _counts(results: Results | None) -> str:
    if results is None:
        return ""
    counts = {"passed": "passed", "failed": "FAILED", "skipped": "SKIPPED"}
    told = [f"{n} {word}" for outcome, word in counts.items() if (n := results.count(outcome))]
    return ", ".join(told) + ("" if results.complete else "; DIED")


def _short(text: str) -> str:
    lines = text.splitlines()[:MESSAGE_LINES]
    return "\n".join(f"    {line[:MESSAGE_COLUMNS]}" for line in lines)
