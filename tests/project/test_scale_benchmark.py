"""What the benchmark of many jobs says of a service is what the service did."""

from __future__ import annotations

import asyncio
import json
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
SLOW_AT, GONE_AT = 0.1, 1.0


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


class Service:
    """Answers reports at once. Decides ``later`` reports after the alarm, or after so many of any
    kind. From its time ``gone_at`` on it hangs up, until so many have tried to connect."""

    def __init__(
        self, *, later: int, early: int = 0, refuses: int = 0, seldom: float = PERIOD
    ) -> None:
        self._later, self._early, self._refuses = later, early, refuses
        self._directive = asyncio.Event()
        self._reports = self._since = 0
        self.alarms: list[float] = []
        self.decided_at = 0.0
        self.kinds: list[str] = []
        self.told: list[dict[str, Any]] = []
        self.seldom = seldom
        self.memory = "one"

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        if request.startswith(b"GET"):
            await self._directive.wait()
            self._directive.clear()
            return 200, b'{"protocol":4,"directive":{"plan_version":1}}'
        if self._refuses and len(self.kinds) * PERIOD > GONE_AT + 0.2:
            self.memory = "two"
            self._refuses -= 1
            raise ConnectionError("the ingest hung up")
        report = json.loads(request.partition(b"\r\n\r\n")[2])
        slow = bool(report.get("directions"))
        self.kinds.append("slow" if slow else "all" if report.get("links") else "rest")
        if slow:
            self.alarms.append(time.monotonic())
        self._reports += 1
        self._since += bool(self.alarms)
        if self._since == self._later or self._reports == self._early:
            self.decided_at = time.monotonic()
            self._directive.set()
        self.told.append(report)
        return (
            200,
            f'{{"protocol":4,"memory":"{self.memory}","seldom":{self.seldom},"x":0}}'.encode(),
        )


def play(
    report_load: ModuleType, monkeypatch: pytest.MonkeyPatch, service: Service
) -> tuple[Any, Any]:
    """One job's load, whose link turns slow, on a service: its figures, and the job's reporter."""
    load = report_load.Load(
        port=1, server_name="s", ca_file="", jobs=[], period=PERIOD, seconds=GONE_AT + 1.0,
        gone_at=GONE_AT,
    )  # fmt: skip
    job = report_load.Job(namespace="n", name="j", token="t", slow_at=SLOW_AT)
    reporter = report_load.Reporter(load, ssl.create_default_context(), job, "127.0.0.1")
    out = report_load.Figures()

    async def run() -> None:
        async def line() -> Service:
            return service

        monkeypatch.setattr(reporter, "line", line)
        await report_load.Fleet(load, [reporter], out).run()

    asyncio.run(run())
    return out, reporter


def test_a_directive_that_takes_many_periods_is_seen_to_take_them(
    report_load: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many reports were sent while it was on its way."""
    service = Service(later=LATER)
    out, reporter = play(report_load, monkeypatch, service)
    ((stages, slow_at, took, _),) = out.directives
    ((name, _, _, sent, came),) = out.alarms
    assert (name, came - sent) == ("j", pytest.approx(took)), "by the machine's clock"
    assert sent == reporter.alarm_sent
    alarm = service.alarms[0]
    assert (stages, slow_at, out.unasked) == (2, SLOW_AT, [])
    assert took >= service.decided_at - alarm > 0
    assert reporter.alarm_sent <= alarm
    assert service.kinds[0] == "all" and "all" not in service.kinds[1:]
    assert out.back == [], "it was never away"


def test_a_job_reports_as_seldom_as_it_is_asked_to_and_of_all_its_iterations(
    report_load: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(later=1, seldom=4 * PERIOD)
    monkeypatch.setattr(sys.modules[__name__], "SLOW_AT", 0.5)
    play(report_load, monkeypatch, service)
    first = service.kinds.index("slow")
    assert 2 <= first <= 4, "reports before the alarm"
    indices = [each["index"] for report in service.told for each in report.get("iterations", ())]
    assert indices == [*range(indices[0], indices[0] + len(indices))], "none twice, none left out"
    assert [len(report["iterations"]) for report in service.told[1:first]] == [4] * (first - 1)
    assert len(service.kinds) - first > 2.0 / PERIOD / 4 + 5, "one an iteration while it is slow"


def test_the_iteration_in_which_a_link_turns_slow_ends_under_the_plan_before(
    report_load: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, made = Service(later=1), report_load.Job
    monkeypatch.setattr(report_load, "Job", lambda **what: made(**what, slow_iteration=3.0))
    play(report_load, monkeypatch, service)
    _, first, second, *_ = [r for r in service.told if r.get("directions")]
    assert first["applied_plan_version"] == 0 and second["applied_plan_version"] == 1
    assert first["observed_plan_version"] == second["observed_plan_version"] == 1
    took = [report["iterations"][0]["seconds"] for report in (first, second)]
    assert took == [pytest.approx(3.0, rel=0.1), pytest.approx(1.0, rel=0.1)]


def test_a_directive_before_the_alarm_is_no_quick_one(
    report_load: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, _ = play(report_load, monkeypatch, Service(later=-1, early=1))
    assert (out.directives, out.unasked) == ([], [SLOW_AT])


def test_an_ingest_that_was_away_is_told_everything_again(
    report_load: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(later=1, refuses=2)
    out, _ = play(report_load, monkeypatch, service)
    assert service.kinds.count("all") == 2, service.kinds
    assert out.reconnects == 0 and len(out.back) == 1


def test_an_agent_that_is_hung_up_on_while_the_ingest_should_be_there_is_counted(
    report_load: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = report_load.Load
    monkeypatch.setattr(report_load, "Load", lambda **what: made(**what | {"gone_at": 10.0}))
    out, _ = play(report_load, monkeypatch, Service(later=1, refuses=1))
    assert (out.reconnects, out.back) == (1, [])


def test_only_links_that_ask_for_a_plan_turn_slow(
    operator_scale: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One a second, then many at once; no two of them are the same."""
    assert operator_scale.gain(2, 1) > 1 and operator_scale.gain(8, 1) > 1
    monkeypatch.setattr(operator_scale, "gain", lambda _, seed: 2.0 * (seed % 2 == 0))
    sizes = operator_scale.mixed(1000)
    assert {stages: sizes.count(stages) for stages in (2, 8, 64)} == {2: 400, 8: 400, 64: 200}
    played, drawn = operator_scale.onsets(sizes)
    slow = [job for job in played if "slow_at" in job]
    hit = operator_scale.ONSETS + operator_scale.STORM
    assert (len(slow), drawn) == (hit, 2 * hit)
    assert len({job["seed"] for job in slow}) == hit and all(job["seed"] % 2 == 0 for job in slow)
    assert len({job["slow_at"] for job in slow}) == operator_scale.ONSETS + 1
    assert [job["stages"] for job in played] == sizes


@pytest.mark.parametrize("stages", [2, 64])
def test_a_job_is_said_to_report_what_its_agent_would(
    operator_scale: ModuleType, stages: int
) -> None:
    """All states at first, then an iteration, and in an alarm the link that is slow in both
    directions; its own numbers."""
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
    (link,) = {link for link, _ in rows}
    assert rows == {(link, "forward"): "slow", (link, "backward"): "slow"}
    assert found["quiet"].is_progress and not found["first"].is_progress


def test_a_slow_link_is_missed_in_the_phase_that_had_to_serve_it(
    operator_scale: ModuleType,
) -> None:
    storm = operator_scale.STORM_AT
    gone = storm + operator_scale.CALM
    slow_at = [30.0, 31.0, 32.0, storm, storm, storm]
    served = [
        (2, 30.0, 0.1, 30.1),
        (2, 31.0, 0.1, storm + 1),
        (2, storm, 0.1, storm + 1),
        (2, storm, 0.1, gone + 1),
    ]
    found = {"directives": served, "unasked": [32.0, 0.0]}
    missed = operator_scale.lacking(found, slow_at, gone)
    assert missed == {"onsets": 1, "storm": 2, "end": 1}


def test_the_time_of_an_alarm_is_told_by_its_parts(
    operator_scale: ModuleType, tmp_path: Path
) -> None:
    """Also where an earlier decision has left the plan as it was."""
    told = [
        {"job": "j", "at": 9.0, "waited": 0.0, "planned": 0.5},  # Before the alarm.
        {"job": "j", "at": 10.01, "waited": 0.0, "planned": 0.01},
        {"job": "k", "at": 10.02, "waited": 0.0, "planned": 0.01},
        {"job": "j", "at": 10.1, "waited": 0.2, "planned": 0.3},
        {"job": "j", "at": 10.605, "persisted": 0.04},
        {"job": "j", "at": 11.5, "waited": 0.0, "planned": 0.2},  # For what came then.
        {"job": "j", "at": 12.0, "persisted": 1.0},
    ]
    file = tmp_path / "told"
    file.write_text("".join(json.dumps(each) + "\n" for each in told) + '{"job": "j", "at')
    usage = sys.modules[operator_scale.Alarm.__module__]
    known = usage.told_in(file)
    assert {job: len(rows) for job, rows in known.items()} == {"j": 6, "k": 1}
    alarm = operator_scale.Alarm("j", 8, 0.0, sent=10.0, came=10.65)
    assert usage.parts_of(alarm, known["j"]) == pytest.approx(
        {"report": 0.1, "wait": 0.2, "plan": 0.3, "serve": 0.05, "persist": 0.04}
    )
    other = operator_scale.Alarm("l", 8, 0.0, sent=10.0, came=10.65)
    found = operator_scale.by_part("storm", [alarm, other], known)
    assert (found["storm_plan_p50_ms"], found["storm_plan_known"]) == (pytest.approx(300.0), 1)
    assert operator_scale.by_part("storm", [other], known)["storm_plan_p99_ms"] == float("inf")


FLEET = {
    "onset_2_p50_ms": 50.0,
    "onset_2_p99_ms": 250.0,
    "onset_8_p50_ms": 50.0,
    "onset_8_p99_ms": 250.0,
    "onset_64_p99_ms": 1000.0,
    "storm_last_seconds": 10.0,
    "ingest_cores": 1.0,
    "memory_mib": 512.0,
    "directives_missing_onsets": 0.0,
    "directives_missing_storm": 0.0,
    "directives_missing_end": 0.0,
    "directives_unasked": 0.0,
}
WELL = {
    "pods": {"ratio": 1.2},
    "fleet": FLEET | {"reconnects": 0.0},
    "restart": {"missing": 0.0},
}
MISSED = [("pods", "ratio", 1.21), ("restart", "missing", 1.0)]
MISSED += [("fleet", name, most + 1) for name, most in FLEET.items()]


@pytest.mark.parametrize("missed", MISSED, ids=[name for _, name, _ in MISSED])
def test_each_goal_of_the_operator_can_be_missed(
    operator_scale: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    missed: tuple[str, str, float],
) -> None:
    section, figure, value = missed

    def outcome(*arguments: str, **changed: float) -> tuple[int, int]:
        """Exit status and how many goals do not hold, with figures that are well but for these."""
        found = {name: defaultdict(lambda: 5.0, figures) for name, figures in WELL.items()}
        found["jobs"] = defaultdict(lambda: 5.0)
        found[section].update(changed)
        monkeypatch.setattr(operator_scale, "run", lambda _: found)
        monkeypatch.setattr(sys, "argv", ["operator_scale.py", *arguments])
        status = operator_scale.main()
        lines = capsys.readouterr().out.splitlines()
        assert len([line for line in lines if line.endswith((" holds", "NOT HOLD"))]) == 14
        return status, len([line for line in lines if line.endswith("DOES NOT HOLD")])

    assert outcome("--check") == (0, 0)
    for arguments, expected in (((), 0), (("--check",), 1)):
        assert outcome(*arguments, **{figure: value}) == (expected, 1)


def test_an_agent_that_was_hung_up_on_fails_the_benchmark(
    operator_scale: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {name: defaultdict(lambda: 5.0, figures) for name, figures in WELL.items()}
    found["jobs"] = defaultdict(lambda: 5.0)
    found["fleet"]["reconnects"] = 2.0
    monkeypatch.setattr(operator_scale, "run", lambda _: found)
    monkeypatch.setattr(sys, "argv", ["operator_scale.py"])
    assert operator_scale.main() == 1
    assert "2 reports failed" in capsys.readouterr().err
