"""The benchmark of many jobs reports what an ingest and an agent did, and notices each failure."""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from certificates import self_signed

from pipemorph.control import JobController
from pipemorph.ingest import BearerAuthenticator, IngestServer, MemoryStore
from pipemorph.manifest import parse_job
from pipemorph.wire import LinkHealthReport

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PERIOD, SLOW_AT, GONE_AT = 0.05, 0.1, 1.0
TOKEN = "token"


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return _module(monkeypatch, "scale")


@pytest.fixture
def scale_load(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return _module(monkeypatch, "scale_load")


def _module(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    return __import__(name)


class Service:
    """Answers reports; issues version 1 after ``later`` reports from the alarm on, or after
    ``early`` of any kind. After ``GONE_AT`` it hangs up on ``refuses`` reports."""

    def __init__(
        self, *, later: int = 1, early: int = 0, refuses: int = 0, seldom: float = PERIOD,
        plans: tuple[str, ...] = ("p",),
    ) -> None:  # fmt: skip
        self._later, self._early, self._refuses, self._seldom = later, early, refuses, seldom
        self._plans = [*plans]
        self._directive, self._since = asyncio.Event(), 0
        self._memory = "one"
        self.kinds: list[str] = []
        self.reports: list[dict[str, Any]] = []

    async def request(self, request: bytes) -> tuple[int, bytes]:
        if request.startswith(b"GET"):
            await self._directive.wait()
            self._directive.clear()
            plan = self._plans.pop(0)
            if self._plans:
                self._directive.set()
            answer = {"directive": {"plan_version": 1, "plan": plan}}
            return 200, json.dumps(answer, separators=(",", ":")).encode()
        if self._refuses and len(self.kinds) * PERIOD > GONE_AT + 0.2:
            self._memory, self._refuses = "two", self._refuses - 1
            raise ConnectionError("the ingest hung up")
        report = json.loads(request.partition(b"\r\n\r\n")[2])
        slow = bool(report.get("directions"))
        self.kinds.append("slow" if slow else "all" if report.get("links") else "rest")
        self.reports.append(report)
        self._since += "slow" in self.kinds
        if self._since == self._later or len(self.kinds) == self._early:
            self._directive.set()
        return 200, f'{{"memory":"{self._memory}","seldom":{self._seldom},"x":0}}'.encode()


def play(
    scale_load: ModuleType, monkeypatch: pytest.MonkeyPatch, service: Service, **changed: Any
) -> Any:
    """The figures of one agent of a job whose link turns slow. ``changed``: of the load or the
    job."""
    of_load = {"port": 1, "server_name": "s", "ca_file": "", "jobs": [], "period": PERIOD,
               "seconds": GONE_AT + 1.0, "gone_at": GONE_AT}  # fmt: skip
    of_job = {"namespace": "n", "name": "j", "token": "t", "slow_at": SLOW_AT}
    for name, value in changed.items():
        (of_load if name in of_load else of_job)[name] = value
    load, out = scale_load.AgentsLoad(**of_load), scale_load.Figures()
    job = scale_load.Job(**of_job)
    reporter = scale_load.Reporter(load, ssl.create_default_context(), job, "127.0.0.1", out)

    async def run() -> None:
        async def connect() -> Service:
            return service

        monkeypatch.setattr(reporter, "connect", connect)
        await scale_load.Agents(load, [reporter], out).run()

    asyncio.run(run())
    return out


def test_a_directive_that_takes_many_periods_is_timed_from_the_alarm(
    scale_load: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(later=12)
    out = play(scale_load, monkeypatch, service)
    ((stages, slow_at, took),) = out.directives
    assert (stages, slow_at, out.unasked, out.twice, out.back) == (2, SLOW_AT, [], [], [])
    first = service.kinds.index("slow")
    assert took >= 0.8 * PERIOD * 11
    assert service.kinds[0] == "all" and "all" not in service.kinds[1:] and first > 0


def test_a_job_reports_as_seldom_as_the_ingest_asks_and_each_iteration_once(
    scale_load: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(seldom=4 * PERIOD)
    play(scale_load, monkeypatch, service, slow_at=0.5)
    first = service.kinds.index("slow")
    assert 2 <= first <= 4, "reports before the alarm"
    indices = [each["index"] for report in service.reports for each in report.get("iterations", ())]
    assert indices == [*range(indices[0], indices[0] + len(indices))]
    assert [len(report["iterations"]) for report in service.reports[1:first]] == [4] * (first - 1)


def test_the_iteration_in_which_a_link_turns_slow_ends_under_the_plan_before(
    scale_load: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service()
    play(scale_load, monkeypatch, service, slow_iteration=3.0)
    _, first, second, *_ = [r for r in service.reports if r.get("directions")]
    assert first.get("applied_plan_version", 0) == 0 and second["applied_plan_version"] == 1
    took = [report["iterations"][0]["seconds"] for report in (first, second)]
    assert took == [pytest.approx(3.0, rel=0.1), pytest.approx(1.0, rel=0.1)]


def test_a_directive_before_the_alarm_is_no_quick_one(
    scale_load: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = play(scale_load, monkeypatch, Service(later=-1, early=1))
    assert (out.directives, out.unasked) == ([], [SLOW_AT])


def test_a_version_that_comes_with_two_plans_is_counted(
    scale_load: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert play(scale_load, monkeypatch, Service(plans=("p", "p"))).twice == []
    assert play(scale_load, monkeypatch, Service(plans=("p", "q"))).twice == ["j: version 1"]


def test_an_ingest_that_was_away_gets_all_states_again(
    scale_load: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(refuses=2)
    out = play(scale_load, monkeypatch, service)
    assert service.kinds.count("all") == 2, service.kinds
    assert out.reconnects == 0 and len(out.back) == 1


def test_an_ingest_that_hangs_up_while_it_should_serve_is_counted(
    scale_load: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = play(scale_load, monkeypatch, Service(refuses=1), gone_at=10.0)
    assert (out.reconnects, out.back) == (1, [])


def test_only_links_that_need_a_plan_turn_slow(
    scale: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One a second, and others after the restart; no two jobs are the same."""
    assert scale.gain(2, 1) > 1 and scale.gain(8, 1) > 1
    monkeypatch.setattr(scale, "gain", lambda _, seed: 2.0 * (seed % 2 == 0))
    sizes = scale.mixed(100)
    assert {stages: sizes.count(stages) for stages in (2, 8, 64)} == {2: 40, 8: 40, 64: 20}
    played, gone_at = scale.alarms(sizes)
    slow = [job for job in played if "slow_at" in job]
    assert len(slow) == len({job["slow_at"] for job in slow}) == 75
    assert sum(job["slow_at"] < gone_at for job in slow) == 50
    assert all(job["slow_at"] < gone_at + scale.RESTART for job in slow)
    assert len({job["seed"] for job in slow}) == 75 and all(job["seed"] % 2 == 0 for job in slow)


@pytest.mark.parametrize("stages", [2, 64])
def test_reports_are_those_of_an_agent(scale: ModuleType, stages: int) -> None:
    """All states at first, then an iteration, and in an alarm the link that is slow in both
    directions; its own numbers."""
    reports, found = scale.Reports(stages), {}
    for sequence, kind in enumerate(("first", "quiet", "alarm", "slow"), 1):
        body = reports.body("team", "llama", sequence, 7, kind)
        report = found[kind] = LinkHealthReport.model_validate_json(body)
        assert (report.namespace, report.job, report.sequence) == ("team", "llama", sequence)
        assert (report.observed_plan_version, report.applied_plan_version) == (7, 7)
    assert {row.link for row in found["first"].links} == set(range(stages - 1))
    assert {row.stage for row in found["first"].stages} == set(range(stages))
    assert [len(found[kind].iterations) for kind in ("first", "quiet", "alarm", "slow")] == [
        1, 1, 0, 1
    ]  # fmt: skip
    rows = {(row.link, row.direction): row.health for row in found["alarm"].directions}
    (link,) = {link for link, _ in rows}
    assert rows == {(link, "forward"): "slow", (link, "backward"): "slow"}
    assert found["quiet"].is_progress and not found["first"].is_progress


FOUND = {
    "directives": [[2, 1.0, 0.2], [64, 2.0, 0.9], [2, 70.0, 5.0]],
    "back": [3.0, 21.0, 11.0], "unasked": [], "twice": [], "answers": [0.01], "reports": 100,
    "wall": 10.0, "reconnects": 0, "late": 0.0, "own_cpu": 1.0,
}  # fmt: skip
AGENT = {"ranks": 1024, "well": 0.1, "one_slow": 0.15, "half_slow": 0.5}


@pytest.mark.parametrize(
    "missed",
    [
        {"directives": [[2, 1.0, 1.2], [64, 2.0, 0.9], [2, 70.0, 0.1]]},
        {"directives": [[2, 1.0, 0.2], [64, 2.0, 0.9]]},
        {"back": [3.0, 21.0]},
        {"back": [3.0, 40.0, 11.0]},
        {"unasked": [1.0]},
        {"twice": ["j: version 2"]},
        {"reconnects": 1},
        {"one_slow": 0.16},
        {"well": 0.16},
    ],
    ids=str,
)
def test_each_goal_can_be_missed(scale: ModuleType, missed: dict[str, Any]) -> None:
    def verdicts(changed: dict[str, Any]) -> list[str]:
        fleet = scale.outcome(FOUND | changed, [1.0, 2.0, 70.0], 60.0)
        agent = AGENT | {name: value for name, value in changed.items() if name in AGENT}
        assert len(scale.table(agent, fleet).splitlines()) == 9
        return [text for text, holds in scale.goals(agent, fleet) if not holds]

    assert verdicts({}) == []
    assert len(verdicts(missed)) == 1


def test_what_cannot_be_measured_is_no_success(
    scale: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scale.catalog, "status", lambda _: "found no etcd")
    for arguments, status in ((["--only", "fleet"], 0), (["--only", "fleet", "--check"], 1)):
        monkeypatch.setattr(sys, "argv", ["scale.py", *arguments])
        assert scale.main() == status
        assert "not measured, found no etcd: DOES NOT HOLD" in capsys.readouterr().out


@pytest.mark.full
def test_agents_report_to_a_real_ingest_that_is_replaced(scale: ModuleType, tmp_path: Path) -> None:
    """All are answered again, and no version comes twice. The API server alone is missing."""
    cert, key = self_signed(tmp_path, "localhost", "127.0.0.1")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    sizes = [2, 8, 2]
    jobs: list[dict[str, Any]] = [
        {"namespace": "n", "name": f"j{i}", "token": TOKEN, "stages": stages, "seed": i + 1}
        for i, stages in enumerate(sizes)
    ]
    for job, slow_at in zip(jobs, (2.0, 2.5, 11.0), strict=True):
        job |= {"slow_at": slow_at, "slow_iteration": scale.gain(job["stages"], job["seed"])}

    @asynccontextmanager
    async def ingest(port: int = 0) -> Any:
        store = MemoryStore()
        for number, stages in enumerate(sizes):
            text = yaml.safe_dump(scale.job_of(stages, f"j{number}"))
            store.add("n", f"j{number}", JobController(parse_job(text).spec))
        async with IngestServer(store, BearerAuthenticator(TOKEN), port=port, tls=tls) as server:
            yield server

    async def run() -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            async with ingest() as server:
                port = int(server.url.rpartition(":")[2])
                load = scale.running(
                    "agents", port=port, server_name="localhost", ca_file=str(cert), jobs=jobs,
                    period=1.0, seconds=14.0, gone_at=5.0, first=scale.FIRST,
                )  # fmt: skip
                figures = await asyncio.to_thread(stack.enter_context, load)
                began = loop.time()
                await asyncio.sleep(5.2 + began - loop.time())
            async with ingest(port):
                return await asyncio.to_thread(figures)
        raise AssertionError

    found = asyncio.run(run())
    assert sorted(each[:2] for each in found["directives"]) == [[2, 2.0], [2, 11.0], [8, 2.5]]
    assert (found["twice"], found["unasked"], found["reconnects"]) == ([], [], 0)
    assert len(found["back"]) == 3


@pytest.mark.full
def test_the_agent_of_a_large_job_is_measured(
    scale: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host hears of the slow links, and answers with a plan."""
    monkeypatch.setattr(scale, "SETTLE", 1.5)
    monkeypatch.setattr(scale, "FAULT", 2.0)
    found = asyncio.run(scale.large_job(32, 4, 1.5))
    assert all(0 <= found[phase] < 1 for phase in ("well", "one_slow", "half_slow"))
    assert found["plan_version"] >= 1 and found["reports"] > 3
    assert found["sent"] > 1000 and found["answered"] > 1000
