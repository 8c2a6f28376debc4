"""What the benchmark of many jobs says of a service is what the service did."""

from __future__ import annotations

import asyncio
import ssl
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PERIOD, LATER = 0.05, 12
"""Seconds between two reports, and how many more come while a directive is on its way."""


@pytest.fixture
def report_load(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return _module(monkeypatch, "report_load")


@pytest.fixture
def operator_scale(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return _module(monkeypatch, "operator_scale")


def _module(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """As its own process would import it, and forgotten with the test."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    return __import__(name)


class SlowService:
    """Answers reports at once. Decides ``LATER`` reports after the one that it can decide on."""

    def __init__(self, completes: int) -> None:
        self._last, self._slow = completes + LATER, 0
        self._directive = asyncio.Event()
        self.decided_at = 0.0

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        if request.startswith(b"GET"):
            await self._directive.wait()
            return 200, b'{"protocol":2,"directive":{"plan_version":1}}'
        if b'"directions":' in request or self._slow:
            self._slow += 1
            if self._slow == self._last:
                self.decided_at = time.monotonic()
                self._directive.set()
        return 200, b'{"protocol":2,"directive":null}'


def play(
    report_load: ModuleType, monkeypatch: pytest.MonkeyPatch, *, wanted: int, taken: int
) -> tuple[Any, Any, SlowService]:
    """One job's load, which takes it that a directive wants so many reports of a slow link, on
    a service that takes so many: its figures, the job's reporter, and the service."""
    load = report_load.Load(
        port=1, server_name="s", ca_file="", jobs=[], period=PERIOD,
        turns=24, slow_from=2, slow_over=1, completes=wanted,
    )  # fmt: skip
    reporter = report_load.Reporter(
        load, ssl.create_default_context(), report_load.Job(namespace="n", name="j", token="t")
    )
    out, service = report_load.Figures(), SlowService(taken)

    async def run() -> None:
        async def line() -> SlowService:
            return service

        monkeypatch.setattr(reporter, "line", line)
        await report_load.steady(load, [reporter], out)

    asyncio.run(run())
    return out, reporter, service


def test_a_directive_that_takes_many_periods_is_seen_to_take_them(
    report_load: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many reports were sent while it was on its way."""
    out, reporter, service = play(report_load, monkeypatch, wanted=2, taken=2)
    (directive,), (evidence,) = out.directives, out.evidence
    first, second, *more = reporter.slow_sent
    assert len(more) >= LATER
    assert directive >= service.decided_at - second
    # To the end that both have, however the machine kept the periods.
    assert evidence == pytest.approx(directive + second - first, abs=1e-6)
    assert out.unasked == 0


def test_a_directive_before_the_evidence_is_complete_is_no_quick_one(
    report_load: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, _, _ = play(report_load, monkeypatch, wanted=20, taken=1)
    assert (out.directives, out.evidence, out.unasked) == ([], [], 1)


def test_the_report_that_completes_the_evidence_is_the_controllers(
    operator_scale: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent has judged the windows: an alarm is all that a controller needs."""
    for stages in (2, 8):
        assert operator_scale.completing_report(stages) == 1
    agent_reports = sys.modules["agent_reports"]
    texts = agent_reports._texts(2)
    monkeypatch.setattr(agent_reports, "_texts", lambda _: dict.fromkeys(texts, texts["quiet"]))
    with pytest.raises(RuntimeError, match="no directive after 10 reports"):
        operator_scale.completing_report(2)


@pytest.mark.parametrize("stages", [2, 64])
def test_a_job_is_said_to_report_what_its_agent_would(
    operator_scale: ModuleType, stages: int
) -> None:
    """All states at first, then an iteration and what has changed of the op times, and in an alarm
    the link that is slow in both directions; its own numbers."""
    reports = operator_scale.Reports(stages)
    found = {}
    for sequence, kind in enumerate(("first", "quiet", "alarm", "slow"), 1):
        report = operator_scale.parsed(reports.body("team", "llama", sequence, 7, kind))
        assert (report.namespace, report.job, report.sequence) == ("team", "llama", sequence)
        assert (report.observed_plan_version, report.applied_plan_version) == (7, 7)
        found[kind] = report
    assert {row.link for row in found["first"].links} == set(range(stages - 1))
    assert {row.stage for row in found["first"].stages} == set(range(stages))
    assert [len(found[kind].iterations) for kind in ("first", "quiet", "alarm", "slow")] == [
        1, 1, 0, 1
    ]  # fmt: skip
    rows = {(row.link, row.direction): row.health for row in found["alarm"].directions}
    assert rows == {(0, "forward"): "slow", (0, "backward"): "slow"}
    assert not found["quiet"].directions


WELL = {
    "pods": {"ratio": 1.2},
    "capacity 2": {"reports_per_second_wall": 2000.0},
    "reports": {"directives_missing": 0.0, "directives_unasked": 0.0},
    "storm": {"directives_missing": 0.0, "directives_unasked": 0.0},
}


@pytest.mark.parametrize(
    "missed",
    [
        ("pods", "ratio", 1.21, "a plain Indexed Job"),
        ("capacity 2", "reports_per_second_wall", 1999.0, "reports/s"),
        ("reports", "directives_missing", 1.0, "without a directive"),
        ("storm", "directives_missing", 1.0, "without a directive"),
        ("reports", "directives_unasked", 1.0, "before there was evidence"),
    ],
)
def test_each_goal_of_the_operator_can_be_missed(
    operator_scale: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    missed: tuple[str, str, float, str],
) -> None:
    section, figure, value, goal = missed

    def outcome(*arguments: str, **changed: float) -> tuple[int, list[str]]:
        """Exit status and the goals that do not hold, with figures that are well but for these."""
        found = {name: defaultdict(lambda: 5.0, figures) for name, figures in WELL.items()}
        for name in ("jobs", "capacity 8", "capacity 64"):
            found[name] = defaultdict(lambda: 5.0)
        found[section].update(changed)
        monkeypatch.setattr(operator_scale, "run", lambda _: found)
        monkeypatch.setattr(sys, "argv", ["operator_scale.py", *arguments])
        status = operator_scale.main()
        lines = capsys.readouterr().out.splitlines()
        assert len([line for line in lines if line.endswith((" holds", "NOT HOLD"))]) == 4
        return status, [line for line in lines if line.endswith("DOES NOT HOLD")]

    assert outcome("--check") == (0, [])
    for arguments, expected in (((), 0), (("--check",), 1)):
        status, (broken,) = outcome(*arguments, **{figure: value})
        assert (status, goal in broken) == (expected, True)
