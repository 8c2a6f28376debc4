"""Results of a run of pytest, read from the log that pytest-reportlog writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gate.final import why_final
from gate.processor_time import PROPERTY


@dataclass
class TestResult:
    """Result of a test: its set-up, call and tear-down together."""

    __test__ = False

    nodeid: str
    outcome: str = "passed"
    """``passed``, ``failed`` (in any of the three phases) or ``skipped``."""
    seconds: float = 0.0
    processor_seconds: float = 0.0
    """Processor seconds of the test and of the processes that it started."""
    message: str = ""
    """Reason of the failure, from its exception."""
    text: str = ""
    """Text of the failure: tracebacks, output, logs."""

    @property
    def final(self) -> str | None:
        """Reason why no second run can excuse this failure, or None."""
        return why_final(self.text) if self.outcome == "failed" else None


@dataclass
class Results:
    tests: dict[str, TestResult] = field(default_factory=dict)
    not_collected: list[str] = field(default_factory=list)
    """Files that pytest could not import, with why."""
    complete: bool = False
    """True if pytest came to its own end. If not, it died, and the missing results are unknown."""

    def __iter__(self) -> Iterator[TestResult]:
        return iter(self.tests.values())

    def failed(self) -> list[TestResult]:
        return [test for test in self if test.outcome == "failed"]

    def count(self, outcome: str) -> int:
        return sum(test.outcome == outcome for test in self)


def read(log: Path) -> Results:
    """Read a report log. One that is missing, or breaks off, is that of a run that died."""
    results = Results()
    if not log.exists():
        return results
    for line in log.read_text(errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            break  # the last line of a process that was killed while it wrote
        kind = entry.get("$report_type")
        if kind == "TestReport":
            _add(results, entry)
        elif kind == "CollectReport" and entry["outcome"] == "failed":
            *_, last = _text(entry).splitlines()
            results.not_collected.append(f"{entry['nodeid']}: {last}")
        elif kind == "SessionFinish" or "exitstatus" in entry:
            results.complete = True
    return results


def _add(results: Results, entry: Mapping[str, Any]) -> None:
    test = results.tests.setdefault(entry["nodeid"], TestResult(entry["nodeid"]))
    test.seconds += entry["duration"]
    test.processor_seconds += sum(v for name, v in entry["user_properties"] if name == PROPERTY)
    if entry["outcome"] == "failed":
        test.outcome = "failed"
        test.message = test.message or _message(entry)
        test.text += f"{entry['when']}:\n{_text(entry)}\n"
    elif entry["outcome"] == "skipped" and test.outcome == "passed":
        test.outcome = "skipped"


def _message(entry: Mapping[str, Any]) -> str:
    failure = entry["longrepr"]
    if isinstance(failure, Mapping) and (crash := failure.get("reprcrash")):
        return str(crash["message"])
    return "\n".join(_lines(failure))


def _text(entry: Mapping[str, Any]) -> str:
    sections = [f"--- {name}\n{text}" for name, text in entry.get("sections", ())]
    return "\n".join([*_lines(entry["longrepr"]), *sections])


def _lines(failure: Any) -> Iterator[str]:
    """The lines of a failure as pytest serialises it: text, or a chain of tracebacks."""
    if isinstance(failure, str):
        yield failure
    elif isinstance(failure, Mapping):
        # `chain` holds the last traceback as well.
        for key in ("chain",) if "chain" in failure else ("reprtraceback", "reprentries", "data"):
            yield from _lines(failure.get(key))
        yield from failure.get("lines", ())
    elif isinstance(failure, list):
        for part in failure:
            yield from _lines(part)
