"""Verdict on a run of all parts: good enough to land or not, and the table that says why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gate.results import Results, TestResult

MOST_UNSTABLE = 2
"""Number of tests that may fail and then pass; with more the run fails."""
MOST_SECOND_RUNS = 10
"""Number of failures above which something is broken at large, and the rest are not run again."""
COSTLIEST = 15
MESSAGE_LINES, MESSAGE_COLUMNS, LOG_LINES = 8, 300, 15
"""Amount of a failure that is shown at the end: the programs under test may print far more than
fits a screen. All of it is in the stored outputs."""
HUNG = "Timeout (0:"
"""Text in the line above the stacks of a process that :mod:`gate.hang_guard` has ended."""
FOREIGN = ("site-packages", "/lib/python", "<frozen")
"""Parts of paths of files that are not the project's."""


@dataclass
class PartResult:
    """Result of a part of the run. ``results`` is None for a command that is not pytest."""

    name: str
    status: int | None
    """Exit status; None if it was never started."""
    seconds: float
    processor_seconds: float = 0.0
    results: Results | None = None
    not_run: str | None = None
    """Reason why it could not be run."""
    log: Path | None = None
    """File of the output."""
    limit: float | None = None
    """Seconds that it was given, if it took longer and was interrupted."""

    def died(self) -> str | None:
        """Reason why the part as a whole is a failure, in spite of its tests; None if it is not."""
        if self.status is None:
            return f"was not run: {self.not_run or 'the run was stopped'}"
        if self.limit is not None:
            return f"was interrupted after {self.limit:.0f} s\n{self._end_of_log()}"
        if self.results is None:
            return f"exit {self.status}\n{self._end_of_log()}" if self.status else None
        if self.results.not_collected:
            return "could not import " + "\n".join(self.results.not_collected)
        if not self.results.complete:
            died = f"died (exit {self.status}) before its last test: what is missing is not known"
            return f"{died}\n{self._end_of_log()}"
        if self.status == 0 or (self.status == 1 and self.results.failed()):
            return None
        return f"exit {self.status}, with no test that failed\n{self._end_of_log()}"

    def _end_of_log(self) -> str:
        if self.log is None or not self.log.exists():
            return ""
        lines = self.log.read_text(errors="replace").splitlines()
        if hung := [number for number, line in enumerate(lines) if HUNG in line]:
            # Lines of this project in stacks, which begin with the last call.
            lines = [line for line in lines[hung[-1] :] if not any(own in line for own in FOREIGN)]
            lines = lines[:LOG_LINES]
        return "\n".join([*lines[-LOG_LINES:], f"all of its output: {self.log}"])


@dataclass
class SecondRun:
    """A failed test, run once more alone. ``folder`` keeps what was said both times."""

    passed: bool
    folder: Path
    message: str = ""
    """Reason of the second failure."""


@dataclass
class Verdict:
    parts: Sequence[PartResult]
    second_runs: Mapping[str, SecondRun] = field(default_factory=dict)
    """Second runs by node id."""
    command: str = "make test"
    """Command, as its user called it."""
    over_budget: str | None = None
    """Cost above the budget, if any."""
    seen_before: Sequence[str] = ()
    """Unstable tests that were unstable in another run of the last days as well."""
    stopped: str | None = None
    """Reason why the run stopped before its end, in one line."""

    def with_(self, **changes: Any) -> Verdict:
        return replace(self, **changes)

    def unstable(self) -> list[TestResult]:
        return [test for test in failures(self.parts) if self._excused(test)]

    def failed(self) -> list[TestResult]:
        return [test for test in failures(self.parts) if not self._excused(test)]

    def _excused(self, test: TestResult) -> bool:
        again = self.second_runs.get(test.nodeid)
        return test.final is None and again is not None and again.passed

    @property
    def good(self) -> bool:
        return not any(self._reasons())

    def _reasons(self) -> Iterator[str]:
        """Reasons why the run is red, in a few words each."""
        if self.stopped is not None:
            yield self.stopped
        elif died := [part.name for part in self.parts if part.died()]:
            yield f"part {', '.join(died)}"
        if self.failed():
            yield f"{len(self.failed())} failed tests"
        if len(self.unstable()) > MOST_UNSTABLE:
            yield f"{len(self.unstable())} unstable tests"
        if self.seen_before:
            yield f"{len(self.seen_before)} tests that were unstable before"
        if self.over_budget is not None:
            yield self.over_budget

    def table(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{f' {self.command} ':=^100}"
        yield f"{'':23} {'by the clock':>12} {'processors':>12}"
        for part in self.parts:
            yield _row(part)
        used = sum(part.processor_seconds for part in self.parts)
        yield f"{'together':23} {'':12} {used:10.0f} s"
        tests = {test.nodeid: (part.name, test) for part, test in _tests(self.parts)}
        yield f"\n{f' the {COSTLIEST} tests that cost the most processor seconds ':=^100}"
        costly = sorted(tests.values(), key=lambda t: -t[1].processor_seconds)[:COSTLIEST]
        for name, test in costly:
            yield f"{test.processor_seconds:6.1f} s   {name:14} {test.nodeid}"
        yield from self._unstable_lines()
        for part in self.parts:
            if (why := part.died()) and not (self.stopped and part.not_run):
                yield f"\nFAILED {part.name}: {_short(why, LOG_LINES + 2).lstrip()}"
        for test in self.failed():
            yield f"\nFAILED {test.nodeid} ({self._why_red(test)})\n{_short(test.message)}"
            if (again := self.second_runs.get(test.nodeid)) is not None:
                yield f"  and again:\n{_short(again.message)}"
        yield ""
        if not self.good:
            yield f"{self.command} FAILED: {'; '.join(self._reasons())}"
        counted = [test for _, test in tests.values()]
        passed = sum(test.outcome == "passed" for test in counted) + len(self.unstable())
        skipped = sum(test.outcome == "skipped" for test in counted)
        yield f"{passed} passed, {len(self.failed())} failed, {skipped} skipped"

    def _unstable_lines(self) -> Iterator[str]:
        unstable = self.unstable()
        if not unstable:
            return
        yield f"\n{' UNSTABLE ':=^100}"
        yield (
            f"{len(unstable)} failed once and passed when run again alone; with more than "
            f"{MOST_UNSTABLE}, or one that was unstable before, the run fails. Each is a defect."
        )
        for test in unstable:
            before = ", AND BEFORE" if test.nodeid in self.seen_before else ""
            yield f"\nUNSTABLE{before} {test.nodeid}\n{_short(test.message)}"
            yield f"    both outputs: {self.second_runs[test.nodeid].folder}"

    def _why_red(self, test: TestResult) -> str:
        if test.final is not None:
            return f"{test.final}, which no second run excuses"
        again = self.second_runs.get(test.nodeid)
        return "not run again" if again is None else f"twice; both outputs: {again.folder}"


def _row(part: PartResult) -> str:
    how = "ok" if part.status == 0 else "FAILED" if part.status else "not run"
    took = f"{part.seconds:10.0f} s {part.processor_seconds:10.0f} s"
    return f"{part.name:14} {how:8} {took}   {_counts(part.results)}".rstrip()


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
    counted = [f"{n} {word}" for outcome, word in counts.items() if (n := results.count(outcome))]
    return ", ".join(counted) + ("" if results.complete else "; DIED")


def _short(text: str, most: int = MESSAGE_LINES) -> str:
    lines = text.splitlines()[:most]
    return "\n".join(f"    {line[:MESSAGE_COLUMNS]}" for line in lines)
